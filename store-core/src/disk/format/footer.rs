//! The footer of an extent: the lists of all its batches again, so that recovery reads one place per extent.

use alloc::vec::Vec;

use super::bytes::{Append, Reader};
use super::lists::{self, Dead, Entry, Lists};
use super::{DiskUuid, Extent, Geometry, Marks, PAGE_BYTES, VERSION};
use crate::disk::crc::crc32c;

const MAGIC: u64 = u64::from_le_bytes(*b"SnowFoot");
/// The last bytes of an extent with a footer.
pub const TAIL_BYTES: usize = 128;
const _: () = assert!(8 + 2 + 2 + 4 + Extent::BYTES + Marks::BYTES + 4 + 4 + 4 + 4 + 4 <= TAIL_BYTES);

/// Where the extent is in the tail.
const SLOT_AT: usize = 8 + 2 + 2 + 4;

/// What the footer of an extent says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footer<'a> {
    /// The extent.
    pub extent: Extent,
    /// Bytes of the footer.
    pub footer_bytes: u32,
    /// Where the last batch ends.
    pub end: u32,
    /// Synced positions.
    pub marks: Marks,
    /// All objects of the extent; empty where only the tail was decoded.
    pub entries: Vec<Entry<'a>>,
    /// All tombstones of the extent; empty where only the tail was decoded.
    pub dead: Vec<Dead<'a>>,
}

/// The tail of a footer, and what it says about the lists.
struct Tail {
    extent: Extent,
    footer_bytes: u32,
    end: u32,
    marks: Marks,
    counts: (u32, u32),
    body_crc: u32,
}

impl<'a> Footer<'a> {
    /// Bytes of a footer whose lists have `list_bytes` bytes.
    #[must_use]
    pub const fn bytes(list_bytes: usize) -> u32 {
        (list_bytes + TAIL_BYTES).next_multiple_of(PAGE_BYTES as usize) as u32
    }

    /// The footer of an extent whose batches end at `end`.
    #[must_use]
    pub fn encode(extent: &Extent, end: u32, marks: &Marks, lists: &Lists) -> Vec<u8> {
        let footer_bytes = Self::bytes(lists.bytes());
        let mut out = Vec::with_capacity(footer_bytes as usize);
        lists.put(&mut out);
        out.resize(footer_bytes as usize - TAIL_BYTES, 0);
        let body_crc = crc32c(0, &out);
        out.put_u64(MAGIC);
        out.put_u16(VERSION);
        out.put_u16(0); // The cipher: none.
        out.put_u32(footer_bytes);
        extent.put(&mut out);
        marks.put(&mut out);
        for number in [end, lists.entries(), lists.dead(), body_crc] {
            out.put_u32(number);
        }
        out.resize(footer_bytes as usize - 4, 0);
        let crc = crc32c(0, &out[footer_bytes as usize - TAIL_BYTES..]);
        out.put_u32(crc);
        out
    }

    /// Decodes the tail alone, from bytes that end where the extent in `slot` ends. `None`: there is no
    /// footer, or it belongs elsewhere.
    #[must_use]
    pub fn decode_tail(
        bytes: &[u8],
        disk: &DiskUuid,
        geometry: &Geometry,
        slot: u32,
    ) -> Option<Footer<'static>> {
        let Tail { extent, footer_bytes, end, marks, .. } = tail(bytes, disk, geometry, slot)?;
        Some(Footer { extent, footer_bytes, end, marks, entries: Vec::new(), dead: Vec::new() })
    }

    /// As [`Self::decode_tail`], in whichever slot the extent is.
    #[must_use]
    pub fn decode_any_tail(bytes: &[u8], disk: &DiskUuid, geometry: &Geometry) -> Option<Footer<'static>> {
        let (_, tail) = bytes.split_last_chunk::<TAIL_BYTES>()?;
        let extent = Extent::take(&mut Reader(tail.get(SLOT_AT..)?))?;
        Self::decode_tail(bytes, disk, geometry, extent.slot)
    }

    /// Decodes a footer from bytes that end where the extent in `slot` ends. `None`: they are too short, or
    /// not a whole footer of this extent.
    #[must_use]
    pub fn decode(bytes: &'a [u8], disk: &DiskUuid, geometry: &Geometry, slot: u32) -> Option<Self> {
        let Tail { extent, footer_bytes, end, marks, counts, body_crc } = tail(bytes, disk, geometry, slot)?;
        let body = &bytes.get(bytes.len().checked_sub(footer_bytes as usize)?..)?;
        let body = body.get(..body.len() - TAIL_BYTES)?;
        if crc32c(0, body) != body_crc {
            return None;
        }
        let (entries, dead) = lists::take(body, counts, geometry, (PAGE_BYTES, end))?;
        Some(Self { extent, footer_bytes, end, marks, entries, dead })
    }
}

fn tail(bytes: &[u8], disk: &DiskUuid, geometry: &Geometry, slot: u32) -> Option<Tail> {
    let (_, tail) = bytes.split_last_chunk::<TAIL_BYTES>()?;
    let (body, crc) = tail.split_last_chunk::<4>()?;
    let mut from = Reader(body);
    let known = from.u64()? == MAGIC && from.u16()? == VERSION && from.u16()? == 0;
    if !known || u32::from_le_bytes(*crc) != crc32c(0, body) {
        return None;
    }
    let footer_bytes = from.u32()?;
    let (extent, marks) = (Extent::take(&mut from)?, Marks::take(&mut from)?);
    let (end, entries, dead, body_crc) = (from.u32()?, from.u32()?, from.u32()?, from.u32()?);
    let here = extent.disk == *disk && extent.slot == slot && geometry.has_locators(extent.sequence);
    let fits = footer_bytes >= PAGE_BYTES
        && footer_bytes.is_multiple_of(PAGE_BYTES)
        && end.checked_add(footer_bytes).is_some_and(|both| both <= geometry.extent_bytes);
    (here && fits).then_some(Tail { extent, footer_bytes, end, marks, counts: (entries, dead), body_crc })
}
