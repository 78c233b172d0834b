//! The superblock: what a disk is, and what must be known before anything on it is read.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use super::bytes::{Append, Reader};
use super::{DiskUuid, EXTENTS_MAX, Geometry, Marks, PAGE_BYTES, VERSION};
use crate::disk::crc::crc32c;

const MAGIC: u64 = u64::from_le_bytes(*b"SnowDisk");
const FIXED_BYTES: usize = 8 + 2 + 2 + 4 + 16 + 8 + 4 + 4 + 8 + 8 + 8 + 8 + Marks::BYTES + 4;
/// Most extents on the list of bad ones.
pub const BAD_MAX: usize = (PAGE_BYTES as usize - FIXED_BYTES - 4) / 4;

/// One of the two superblocks, which are written alternately: when a crash tears one, the other is valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The disk.
    pub disk: DiskUuid,
    /// Its extents.
    pub geometry: Geometry,
    /// Counts the superblocks written; the valid one with the higher number is the current one.
    pub serial: u64,
    /// No extent with this sequence or a higher one was ever opened.
    pub sequences_end: u64,
    /// Extents with a lower sequence do not exist any more, whatever is read from them.
    pub floor: u64,
    /// Bytes written to the disk so far, of everything.
    pub written_bytes: u64,
    /// Bytes of objects among them.
    pub object_bytes: u64,
    /// Synced positions.
    pub marks: Marks,
    /// Slots that are not used any more because of errors. What they contain does not exist.
    pub bad: BTreeSet<u32>,
}

impl Superblock {
    /// The page, with its checksum. Only the first [`BAD_MAX`] bad extents find room.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(PAGE_BYTES as usize);
        out.put_u64(MAGIC);
        out.put_u16(VERSION);
        out.put_u16(0); // The cipher: none.
        out.put_u32(self.geometry.block_bytes);
        out.extend_from_slice(&self.disk);
        out.put_u64(self.serial);
        out.put_u32(self.geometry.extent_bytes);
        out.put_u32(self.geometry.extents);
        for number in [self.sequences_end, self.floor, self.written_bytes, self.object_bytes] {
            out.put_u64(number);
        }
        self.marks.put(&mut out);
        out.put_u32(self.bad.len().min(BAD_MAX) as u32);
        for slot in self.bad.iter().take(BAD_MAX) {
            out.put_u32(*slot);
        }
        out.resize(PAGE_BYTES as usize - 4, 0);
        let crc = crc32c(0, &out);
        out.put_u32(crc);
        out
    }

    /// Decodes a page. `None`: it is not a superblock of this version.
    #[must_use]
    pub fn decode(page: &[u8]) -> Option<Self> {
        let (body, crc) = page.split_last_chunk::<4>()?;
        if page.len() != PAGE_BYTES as usize || u32::from_le_bytes(*crc) != crc32c(0, body) {
            return None;
        }
        let mut from = Reader(body);
        if from.u64()? != MAGIC || from.u16()? != VERSION || from.u16()? != 0 {
            return None;
        }
        let block_bytes = from.u32()?;
        let (disk, serial) = (from.array()?, from.counter()?);
        let (extent_bytes, extents) = (from.u32()?, from.u32()?);
        let disk_bytes = u64::from(extents.min(EXTENTS_MAX + 1)) * u64::from(extent_bytes);
        let geometry = Geometry::new(disk_bytes + super::FIRST_EXTENT_AT, extent_bytes, block_bytes).ok()?;
        let (sequences_end, floor) = (from.u64()?, from.u64()?);
        let (written_bytes, object_bytes) = (from.counter()?, from.counter()?);
        let marks = Marks::take(&mut from)?;
        let count = from.u32()? as usize;
        let list = from.bytes(count.checked_mul(4)?)?;
        let bad: BTreeSet<u32> = list.as_chunks().0.iter().map(|slot| u32::from_le_bytes(*slot)).collect();
        if bad.len() != count || bad.last().is_some_and(|slot| *slot >= extents) {
            return None;
        }
        let limits = u64::MAX / u64::from(extent_bytes);
        if sequences_end == 0 || sequences_end > limits || floor > sequences_end {
            return None;
        }
        Some(Self { disk, geometry, serial, sequences_end, floor, written_bytes, object_bytes, marks, bad })
    }
}
