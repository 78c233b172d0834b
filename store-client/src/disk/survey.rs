//! What inspection and verification of a disk report.

use std::collections::BTreeMap;

use store_core::disk::Removed;
use store_core::disk::format::{Extent, Superblock};

/// An object on a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundObject {
    /// Its tenant, key and generation.
    pub object: Removed,
    /// Bytes of its data.
    pub len: u32,
    /// CRC-32C of its data.
    pub crc32c: u32,
    /// Where it is.
    pub locator: u64,
}

/// Something on a disk that is not what was written.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Damage {
    /// One of the two superblocks is not valid. The other one is used.
    Superblock,
    /// The footer of an extent is damaged, or was torn by a crash. Its headers say the same.
    Footer {
        /// The place of the extent.
        slot: u32,
    },
    /// A header is damaged. The objects of its batch are known from the footer alone; without one, they and
    /// those behind are lost.
    Header {
        /// The place of the extent.
        slot: u32,
        /// Where the header begins in it.
        offset: u32,
    },
    /// Headers are missing that were synced: a recovery announces nothing of the disk.
    Missing {
        /// The place of the extent.
        slot: u32,
        /// Up to where there should be headers.
        synced_to: u32,
    },
    /// The data or trailer of an object is not what its entry says. Readers do not accept it.
    Object(FoundObject),
    /// The device does not read a part of the disk.
    Unreadable {
        /// Where, bytes from the beginning.
        at: u64,
        /// What it said.
        error: String,
    },
}

/// What is on a disk, in numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Survey {
    /// The current superblock.
    pub superblock: Superblock,
    /// Extents that are full and have a footer.
    pub closed: u64,
    /// Extents that were being written to: without a footer.
    pub open: u64,
    /// Extents without anything that is valid.
    pub free: u64,
    /// Extents on the list of bad ones.
    pub bad: u64,
    /// Objects that a recovery would announce, if the data of those in open extents is intact.
    pub objects: u64,
    /// Bytes of their data.
    pub object_bytes: u64,
    /// Objects that were removed and whose bytes are still there.
    pub removed: u64,
    /// Removals that are recorded.
    pub tombstones: u64,
    /// Objects by the lineage of the master that they were written for.
    pub lineages: BTreeMap<u64, u64>,
    /// The newest lineage and its last extent.
    pub newest: Option<Extent>,
    /// What is damaged.
    pub damage: Vec<Damage>,
}

/// What [`verify`](super::verify) has read.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verified {
    /// What is on the disk. Its `damage` includes damaged objects.
    pub survey: Survey,
    /// Objects whose bytes were verified.
    pub objects: u64,
    /// Damaged objects among them.
    pub damaged: u64,
    /// Bytes that were read for it.
    pub bytes: u64,
    /// Whether everything was verified: the caller did not stop it.
    pub complete: bool,
}

/// How far [`verify`](super::verify) has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Objects that were verified.
    pub objects: u64,
    /// All objects.
    pub of: u64,
    /// Damaged ones.
    pub damaged: u64,
    /// Bytes that were read.
    pub bytes: u64,
}
