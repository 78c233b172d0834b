//! Ranges of namespaces of other targets: what their owner states about them, and the superblock in their
//! first granule. No I/O.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The first bytes of a superblock.
const MAGIC: [u8; 8] = *b"snowskin";
/// The version of its layout.
const VERSION: u32 = 1;

/// RESCAP: the namespace has Exclusive Access – Registrants Only.
pub(crate) const RESERVES_REGISTRANTS: u8 = 1 << 4;

/// A namespace of another target, as its owner describes it to [`adopt`](crate::NvmeofTransport::adopt), or
/// a reader to [`attach_namespace`](crate::NvmeofTransport::attach_namespace).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Where the target listens, one to four addresses.
    pub addresses: Vec<core::net::IpAddr>,
    /// The port, 4420 by custom.
    pub port: u16,
    /// The subsystem.
    pub nqn: String,
    /// The namespace's number.
    pub nsid: u32,
    /// Its NGUID, or its UUID where it has no NGUID. Zero for a reader that takes any.
    pub nguid: [u8; 16],
}

/// The first granule of an adopted range: proof that the range is what its owner made of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct Superblock {
    magic: [u8; 8],
    version: U32,
    epoch: U32,
    /// The identity of the namespace.
    nguid: [u8; 16],
    /// The incarnation of the owner that wrote it.
    incarnation: U64,
    /// The first block and the length of the range, in bytes.
    first_lba: U64,
    bytes: U64,
    reserved: [u8; 4],
    /// CRC-32C of everything before.
    checksum: U32,
}

impl Superblock {
    /// Length, in bytes.
    pub(crate) const BYTES: usize = size_of::<Self>();

    /// The superblock of a range.
    #[must_use]
    pub(crate) fn new(nguid: [u8; 16], incarnation: u64, epoch: u32, first_lba: u64, bytes: u64) -> Self {
        let mut made = Self {
            magic: MAGIC,
            version: U32::new(VERSION),
            epoch: U32::new(epoch),
            nguid,
            incarnation: U64::new(incarnation),
            first_lba: U64::new(first_lba),
            bytes: U64::new(bytes),
            reserved: [0; 4],
            checksum: U32::ZERO,
        };
        made.checksum.set(made.computed());
        made
    }

    /// Whether the first granule of a range is this superblock.
    #[must_use]
    pub(crate) fn is_in(&self, granule: &[u8]) -> bool {
        granule.get(..Self::BYTES) == Some(self.as_bytes())
    }

    fn computed(&self) -> u32 {
        crc32c::crc32c(&self.as_bytes()[..Self::BYTES - 4])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_superblock_is_recognized_by_every_byte() {
        let made = Superblock::new([7; 16], 5, 1, 2048, 1 << 30);
        let mut granule = [0; 4096];
        granule[..Superblock::BYTES].copy_from_slice(made.as_bytes());
        assert!(made.is_in(&granule) && !made.is_in(&granule[..10]));
        assert!(!Superblock::new([7; 16], 5, 2, 2048, 1 << 30).is_in(&granule), "another epoch");
        for at in 0..Superblock::BYTES {
            granule[at] ^= 1;
            assert!(!made.is_in(&granule), "byte {at}");
            granule[at] ^= 1;
        }
    }
}
