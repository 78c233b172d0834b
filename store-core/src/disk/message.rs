//! What a disk is asked, and what it answers.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;

use te_core::Instant;

use super::format::Stream;
use super::tombstones::Removed;

/// Asks for an object to be written to the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Demote {
    /// Names the request in its answer: chosen by the caller.
    pub id: u64,
    /// The object's tenant: a number that means the same after a restart of the master.
    pub tenant: u64,
    /// The object's key, 1 to 1,024 bytes.
    pub key: Box<[u8]>,
    /// The object's generation.
    pub generation: u64,
    /// Bytes of its data, without the trailer.
    pub len: u64,
    /// CRC-32C of its data, not bound to key and generation.
    pub crc32c: u32,
    /// Whether it was read since its put.
    pub stream: Stream,
    /// Names the memory of the object, data and trailer, in [`Piece::Source`](super::Piece::Source). The
    /// bytes must not change until the request is answered.
    pub token: u64,
}

/// Asks for the image of an object to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage {
    /// Names the request in its answer: chosen by the caller.
    pub id: u64,
    /// Where the object is.
    pub locator: u64,
    /// Bytes of its data, without the trailer.
    pub len: u64,
    /// Names the buffer in [`Target::Buffer`](super::Target::Buffer); it has at least
    /// [`Geometry::image_bytes`](super::format::Geometry::image_bytes) bytes.
    pub token: u64,
    /// When the reader stops waiting.
    pub deadline: Instant,
}

/// Why a request is refused at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// A queue is full, the disk does not answer, or it is being opened: try later, or elsewhere.
    Busy,
    /// The disk is not written to any more: see [`State`].
    ReadOnly,
    /// The object is too short or too long for this disk, or its key is empty or too long.
    Unsuitable,
    /// The object was removed.
    Removed,
    /// Nothing is at this locator, and never will be: it was given up, or removed, or never written.
    Gone,
    /// Nothing is at this locator so far, in an extent that is still written to: it was removed, or never
    /// written.
    Absent,
    /// The object at this locator does not have this length.
    OtherLength,
    /// No further tombstones are possible: raise the floor of this disk
    /// ([`Disk::clear`](super::Disk::clear)).
    TombstonesFull,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Busy => "the disk is busy: try again later, or use another replica",
            Self::ReadOnly => {
                "the disk is read-only after errors: replace it, or restart the node to try again"
            }
            Self::Unsuitable => "objects of this length, or with this key, are not stored on this disk",
            Self::Removed => "the object was removed",
            Self::Gone | Self::Absent => "the object is not on this disk any more: ask the master again",
            Self::OtherLength => "the object at this locator has another length: ask the master again",
            Self::TombstonesFull => "the list of removed objects is full: clear the disk",
        })
    }
}

impl core::error::Error for Refused {}

/// Why a demotion or a read that was accepted failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The disk reported an error.
    Device,
    /// The deadline of the reader passed.
    Deadline,
    /// The disk became read-only, or was cleared, before the object was written.
    Abandoned,
    /// The object was removed meanwhile.
    Removed,
}

/// An object that recovery found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adopted {
    /// Its tenant, key and generation.
    pub object: Removed,
    /// Bytes of its data.
    pub len: u32,
    /// CRC-32C of its data, not bound to key and generation.
    pub crc32c: u32,
    /// Where it is.
    pub locator: u64,
}

/// What a disk has to tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// These objects are on the disk. All of them are announced between the opening and [`Event::Ready`].
    Adopt {
        /// The lineage of the master that knew them.
        lineage: u64,
        /// At most 1,024 objects.
        objects: Vec<Adopted>,
    },
    /// Every object was announced, and objects can be written.
    Ready,
    /// Recovery found that tombstones are missing: nothing on the disk was announced, or will be.
    /// [`Self::Ready`] follows when that is durable.
    Distrusted,
    /// The object was written. It becomes durable with the next sync, which is not announced.
    Demoted {
        /// The id of the request.
        id: u64,
        /// Where the object is.
        locator: u64,
    },
    /// The object was not written.
    DemoteFailed {
        /// The id of the request.
        id: u64,
        /// Why.
        why: Failure,
    },
    /// The image is in the buffer. Whether it is the right one is for the reader to verify.
    Staged {
        /// The id of the request.
        id: u64,
    },
    /// The image was not read.
    ReadFailed {
        /// The id of the request.
        id: u64,
        /// Why.
        why: Failure,
        /// Whether the buffer may be used again at once. If not, [`Event::BufferFree`] follows.
        buffer_free: bool,
    },
    /// The buffer of a read that was answered before may be used again.
    BufferFree {
        /// The token of the buffer.
        token: u64,
    },
    /// The removal is durable: the object will not be announced again. The master can forget its tombstone.
    Forgotten(Removed),
    /// The extent is to be given up. The master drops all places with a locator in this extent, waits until
    /// no reader uses them, and answers with [`Disk::reclaimed`](super::Disk::reclaimed).
    Reclaim {
        /// The sequence of the extent.
        sequence: u64,
    },
    /// Nothing with a locator from `from` on and below `to` may be on the disk any more.
    Dropped {
        /// The first locator.
        from: u64,
        /// The locator behind the last one.
        to: u64,
    },
    /// The disk was cleared, as it was told to: no object that was on it will be announced again.
    Cleared,
    /// The state changed to [`State::ReadOnly`] or [`State::Failed`].
    Stopped(Why),
}

/// What a disk can do at present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Superblocks, footers and headers are read and verified. No object is known yet.
    Opening,
    /// Objects are announced. They can be read.
    Adopting,
    /// Everything is possible.
    Ready,
    /// Objects can be read; nothing is written any more.
    ReadOnly(Why),
    /// Nothing is possible.
    Failed(Why),
}

/// Why a disk is not written to, or not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// A sync failed, and what was written before it may be lost. It is not repeated: the next one would
    /// succeed without having written anything.
    Sync,
    /// Too many errors within an hour, or one where none is allowed: superblocks.
    Errors,
    /// No valid superblock was found: the disk was never formatted, or another program wrote to it.
    NoSuperblock,
    /// The disk is shorter than 8 of its extents, or its logical blocks are longer than when it was
    /// formatted.
    Geometry,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sync => {
                "a sync failed: the disk is read-only; replace it, or restart the node to try again"
            }
            Self::Errors => {
                "too many errors: the disk is read-only; replace it, or restart the node to try again"
            }
            Self::NoSuperblock => "the disk has no valid superblock: format it, or check which disk is meant",
            Self::Geometry => "the disk does not fit its superblock: check which disk is meant, or format it",
        })
    }
}

/// What was counted since a disk was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes of objects that were written, without trailers.
    pub object_bytes_total: u64,
    /// Bytes of trailers and padding.
    pub pad_bytes_total: u64,
    /// Bytes of headers, footers, superblocks, and of destroyed headers and footers.
    pub header_bytes_total: u64,
    /// Bytes of images that were read for readers.
    pub staged_bytes_total: u64,
    /// Bytes that recovery read.
    pub recovery_bytes_total: u64,
    /// Objects that were written.
    pub demoted_total: u64,
    /// Objects that were read.
    pub staged_total: u64,
    /// Objects that were announced.
    pub adopted_total: u64,
    /// Objects that recovery did not announce: their data was not what their entry says.
    pub torn_total: u64,
    /// Requests that were refused because of a full queue or a disk that does not answer.
    pub busy_total: u64,
    /// Orders that did less than they should have, and were continued.
    pub short_total: u64,
    /// Reads that failed.
    pub read_errors_total: u64,
    /// Writes that failed.
    pub write_errors_total: u64,
    /// Syncs that succeeded.
    pub syncs_total: u64,
    /// Extents that were given up and are free again, or will be.
    pub reclaimed_total: u64,
}
