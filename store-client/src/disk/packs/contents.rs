//! What a file or an object of a directory is, by what is in it: superblocks, and the first and the last page
//! of a pack. Nothing here reads or writes anything.

use std::collections::BTreeSet;
use std::path::Path;

use store_core::disk::format::{BatchHeader, DiskUuid, Extent, Footer, Geometry, PAGE_BYTES, Superblock};

use super::PackFault;
use crate::disk::error::DiskError;
use crate::disk::file::foreign_version;

/// Bytes of the two superblocks.
pub(super) const PAGES_BYTES: usize = 2 * PAGE_BYTES as usize;

/// The current one of two superblocks, and how many of them are valid.
pub(super) fn newest_superblock(bytes: &[u8], path: &Path) -> Result<(Superblock, u32), DiskError> {
    let pages = bytes.chunks(PAGE_BYTES as usize);
    let valid: Vec<Superblock> = pages.clone().filter_map(Superblock::decode).collect();
    let count = valid.len() as u32;
    valid.into_iter().max_by_key(|page| page.serial).map(|page| (page, count)).ok_or_else(|| {
        let version = pages.into_iter().find_map(foreign_version);
        version.map_or_else(
            || DiskError::NotADisk(path.to_owned()),
            |version| DiskError::Version { path: path.to_owned(), version },
        )
    })
}

/// The superblocks of a directory that was taken.
#[derive(Debug)]
pub(super) struct Renewed {
    /// Two pages. Slots are not made of anything that could break: those in which a write failed are not
    /// listed any more.
    pub(super) bytes: Vec<u8>,
    /// These slots. What they contain does not count.
    pub(super) bad: BTreeSet<u32>,
    /// The first sequence that was never reserved.
    pub(super) end: u64,
}

impl Renewed {
    pub(super) fn of(found: &[u8]) -> Self {
        let mut bytes = found.to_vec();
        bytes.resize(PAGES_BYTES, 0);
        let mut pages: Vec<Superblock> =
            bytes.chunks(PAGE_BYTES as usize).filter_map(Superblock::decode).collect();
        pages.sort_by_key(|page| page.serial);
        if let Some((disk, geometry)) = pages.last().map(|last| (last.disk, last.geometry)) {
            // What another disk says would not fit.
            pages.retain(|page| (page.disk, page.geometry) == (disk, geometry));
        }
        let bad: BTreeSet<u32> = pages.iter().flat_map(|page| page.bad.iter().copied()).collect();
        let end = pages.iter().map(|page| page.sequences_end).max().unwrap_or(1);
        if let Some(last) = pages.pop().filter(|_| !bad.is_empty()) {
            for serial in [last.serial + 1, last.serial + 2] {
                let page = Superblock { serial, bad: BTreeSet::new(), sequences_end: end, ..last.clone() };
                let at = (serial % 2) as usize * PAGE_BYTES as usize;
                bytes[at..at + PAGE_BYTES as usize].copy_from_slice(&page.encode());
            }
        }
        Self { bytes, bad, end }
    }
}

/// A pack that is whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Closed {
    pub(super) slot: u32,
    /// Where its batches end.
    pub(super) end: u32,
    /// Bytes of its footer.
    pub(super) footer: u32,
}

/// What a file or an object with a name of a pack should be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected<'a> {
    pub(super) disk: &'a DiskUuid,
    pub(super) geometry: &'a Geometry,
    pub(super) sequence: u64,
}

impl Expected<'_> {
    /// By its last page and its length. `None`: it has no footer.
    pub(super) fn closed(&self, tail: &[u8], bytes: u64) -> Option<Result<Closed, PackFault>> {
        let footer = Footer::decode_any_tail(tail, self.disk, self.geometry)?;
        let whole = u64::from(footer.end) + u64::from(footer.footer_bytes) == bytes;
        let closed = |slot| Closed { slot, end: footer.end, footer: footer.footer_bytes };
        whole.then(|| self.check(&footer.extent).map(closed))
    }

    /// By its first page, where it has no footer. Returns its slot.
    pub(super) fn begun(&self, head: &[u8]) -> Result<u32, PackFault> {
        match BatchHeader::extent_of(head) {
            Some(extent) => self.check(&extent),
            None => Err(BatchHeader::foreign_version(head).map_or(PackFault::Foreign, PackFault::Version)),
        }
    }

    fn check(&self, extent: &Extent) -> Result<u32, PackFault> {
        if extent.disk != *self.disk || extent.slot >= self.geometry.extents() {
            return Err(PackFault::OtherDirectory);
        }
        if extent.sequence != self.sequence {
            return Err(PackFault::Renamed);
        }
        Ok(extent.slot)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use store_core::disk::format::{FIRST_EXTENT_AT, Marks};

    use super::*;

    #[test]
    fn a_superblock_of_other_extents_decides_nothing_about_the_newest_one() {
        let page = |serial: u64, extent_bytes: u32, sequences_end: u64, bad: &[u32]| {
            let bytes = FIRST_EXTENT_AT + 16 * u64::from(extent_bytes);
            let geometry = Geometry::new(bytes, extent_bytes, 512).unwrap();
            let (disk, bad, marks) = ([7; 16], bad.iter().copied().collect(), Marks::default());
            let (floor, written_bytes, object_bytes) = (0, 0, 0);
            Superblock {
                disk,
                geometry,
                serial,
                sequences_end,
                floor,
                written_bytes,
                object_bytes,
                marks,
                bad,
            }
            .encode()
        };
        // The highest sequence of short extents is more than long ones can have.
        let pages = [page(2, 1 << 20, 1 << 43, &[3]), page(3, 128 << 20, 65, &[4])].concat();
        let Renewed { bytes, bad, end } = Renewed::of(&pages);
        assert_eq!((end, bad.into_iter().collect::<Vec<u32>>()), (65, vec![4]));
        let (newest, valid) = newest_superblock(&bytes, Path::new("x")).unwrap();
        assert_eq!((newest.geometry.extent_bytes(), newest.serial, valid), (128 << 20, 5, 2));
        assert!(newest.bad.is_empty());
        // Two of the same disk count together.
        let pages = [page(2, 1 << 20, 129, &[3]), page(3, 1 << 20, 65, &[])].concat();
        let renewed = Renewed::of(&pages);
        assert_eq!((renewed.end, renewed.bad.into_iter().collect::<Vec<u32>>()), (129, vec![3]));
    }
}
