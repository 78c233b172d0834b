//! The header of a batch.

use alloc::vec::Vec;

use super::bytes::{Append, Reader};
use super::lists::{self, Dead, Entry, Lists};
use super::{DiskUuid, Extent, Geometry, Marks, PAGE_BYTES, VERSION};
use crate::disk::crc::crc32c;

const MAGIC: u64 = u64::from_le_bytes(*b"SnowBtch");
const FIXED_BYTES: usize = 8 + 2 + 2 + 4 + Extent::BYTES + 4 + 4 + Marks::BYTES + 4 + 4;

/// What the header of a batch says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchHeader<'a> {
    /// The extent that the batch is in.
    pub extent: Extent,
    /// Where the batch begins in the extent.
    pub offset: u32,
    /// Bytes of the header.
    pub header_bytes: u32,
    /// Bytes of the batch, its header included.
    pub batch_bytes: u32,
    /// Synced positions.
    pub marks: Marks,
    /// The objects of the batch.
    pub entries: Vec<Entry<'a>>,
    /// Tombstones.
    pub dead: Vec<Dead<'a>>,
}

impl<'a> BatchHeader<'a> {
    /// Bytes of a header whose lists have `list_bytes` bytes.
    #[must_use]
    pub const fn bytes(list_bytes: usize) -> u32 {
        (FIXED_BYTES + list_bytes + 4).next_multiple_of(PAGE_BYTES as usize) as u32
    }

    /// The header of a batch at `offset`, with these lists and `image_bytes` bytes of images behind it,
    /// padding included.
    #[must_use]
    pub fn encode(extent: &Extent, offset: u32, image_bytes: u32, marks: &Marks, lists: &Lists) -> Vec<u8> {
        let header_bytes = Self::bytes(lists.bytes());
        let mut out = Vec::with_capacity(header_bytes as usize);
        out.put_u64(MAGIC);
        out.put_u16(VERSION);
        out.put_u16(0); // The cipher: none.
        out.put_u32(header_bytes);
        extent.put(&mut out);
        out.put_u32(offset);
        out.put_u32(header_bytes + image_bytes);
        marks.put(&mut out);
        out.put_u32(lists.entries());
        out.put_u32(lists.dead());
        lists.put(&mut out);
        out.resize(header_bytes as usize - 4, 0);
        let crc = crc32c(0, &out);
        out.put_u32(crc);
        out
    }

    /// Bytes of the header that begins with these bytes, at least a page; before anything else of it is
    /// known. `None`: no header begins here.
    #[must_use]
    pub fn announced_bytes(page: &[u8], geometry: &Geometry) -> Option<u32> {
        let mut from = Reader(page);
        let known = from.u64()? == MAGIC && from.u16()? == VERSION && from.u16()? == 0;
        let bytes = from.u32()?;
        let fits = (PAGE_BYTES..=geometry.extent_bytes).contains(&bytes);
        (known && fits && bytes.is_multiple_of(PAGE_BYTES)).then_some(bytes)
    }

    /// The extent that the header at the beginning of these bytes says that it is in. Nothing is verified but
    /// the magic number and the version: for drivers that keep extents in files, before anything is decoded.
    #[must_use]
    pub fn extent_of(page: &[u8]) -> Option<Extent> {
        let mut from = Reader(page);
        let known = from.u64()? == MAGIC && from.u16()? == VERSION && from.u16()? == 0;
        from.u32()?;
        if known { Extent::take(&mut from) } else { None }
    }

    /// The version of a header that this release cannot read.
    #[must_use]
    pub fn foreign_version(page: &[u8]) -> Option<u16> {
        let mut from = Reader(page);
        let version = if from.u64()? == MAGIC { from.u16()? } else { return None };
        (version != VERSION).then_some(version)
    }

    /// Decodes the header at `offset` of the extent in `slot`. `None`: there is none, or it is torn, or
    /// belongs elsewhere.
    #[must_use]
    pub fn decode(
        bytes: &'a [u8],
        disk: &DiskUuid,
        geometry: &Geometry,
        slot: u32,
        offset: u32,
    ) -> Option<Self> {
        let header_bytes = Self::announced_bytes(bytes, geometry)?;
        let bytes = bytes.get(..header_bytes as usize)?;
        let (body, crc) = bytes.split_last_chunk::<4>()?;
        if u32::from_le_bytes(*crc) != crc32c(0, body) {
            return None;
        }
        let mut from = Reader(body.get(16..)?);
        let extent = Extent::take(&mut from)?;
        let (at, batch_bytes) = (from.u32()?, from.u32()?);
        let marks = Marks::take(&mut from)?;
        let counts = (from.u32()?, from.u32()?);
        let end = offset.checked_add(batch_bytes)?;
        let here = extent.disk == *disk && extent.slot == slot && at == offset;
        let whole = batch_bytes >= header_bytes && batch_bytes.is_multiple_of(PAGE_BYTES);
        if !here || !whole || end > geometry.extent_bytes || !geometry.has_locators(extent.sequence) {
            return None;
        }
        let (entries, dead) = lists::take(from.0, counts, geometry, (offset + header_bytes, end))?;
        Some(Self { extent, offset, header_bytes, batch_bytes, marks, entries, dead })
    }
}
