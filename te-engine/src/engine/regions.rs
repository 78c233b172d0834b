//! Registered local memory, by id and by address, with the number of requests that use it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::vec::Vec;

use te_core::{Access, MemSpan, RegionId};
use te_host::SharedMemory;

use crate::error::RegisterError;
use crate::request::LocalAddr;

/// All regions of one engine.
pub(super) struct Regions {
    rows: Vec<Row>,
    free: Vec<u32>,
    /// From first address to index. Regions do not overlap.
    by_addr: BTreeMap<u64, u32>,
    bytes: u64,
    regions_max: u32,
}

struct Row {
    generation: u32,
    region: Option<Region>,
}

pub(super) struct Region {
    pub(super) span: MemSpan,
    pub(super) access: Access,
    /// A [`te_core::Registered`] buffer: only the owned API may move it.
    pub(super) owned: bool,
    /// Requests of batches that have not ended.
    pub(super) requests: u32,
    /// `unregister` was called and has not succeeded yet: no new operation may use the region.
    pub(super) closing: bool,
    /// It is unregistered as soon as the last peer's operation has ended.
    pub(super) quarantined: bool,
    /// Keeps memory that this engine allocated mapped.
    pub(super) _memory: Option<Arc<SharedMemory>>,
}

impl Regions {
    pub(super) fn new(regions_max: u32) -> Self {
        Self { rows: Vec::new(), free: Vec::new(), by_addr: BTreeMap::new(), bytes: 0, regions_max }
    }

    /// Checks that `span` is not empty and does not overlap a region.
    pub(super) fn check(&self, span: MemSpan) -> Result<(), RegisterError> {
        if span.is_empty() {
            return Err(RegisterError::Empty);
        }
        let addr = span.as_ptr().addr() as u64;
        let end = addr.saturating_add(span.len() as u64);
        if let Some((&other, &index)) = self.by_addr.range(..end).next_back()
            && let Some(region) = &self.rows[index as usize].region
        {
            let len = region.span.len() as u64;
            if other + len > addr {
                return Err(RegisterError::Overlap { addr: other, len });
            }
        }
        Ok(())
    }

    /// Reserves an id, for [`insert`](Self::insert) or [`release`](Self::release).
    pub(super) fn reserve(&mut self) -> Result<RegionId, RegisterError> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.rows.len() < self.regions_max as usize => {
                self.rows.push(Row { generation: 0, region: None });
                (self.rows.len() - 1) as u32
            }
            None => return Err(RegisterError::Full { regions_max: self.regions_max }),
        };
        Ok(RegionId::new(index, self.rows[index as usize].generation))
    }

    /// Frees a reserved id.
    pub(super) fn release(&mut self, id: RegionId) {
        self.free.push(id.index);
    }

    /// Inserts a region under a reserved id.
    pub(super) fn insert(&mut self, id: RegionId, region: Region) {
        self.by_addr.insert(region.span.as_ptr().addr() as u64, id.index);
        self.bytes += region.span.len() as u64;
        self.rows[id.index as usize].region = Some(region);
    }

    pub(super) fn remove(&mut self, id: RegionId) {
        let Some(row) = self.rows.get_mut(id.index as usize) else { return };
        let Some(region) = row.region.take() else { return };
        row.generation = row.generation.wrapping_add(1);
        self.free.push(id.index);
        self.by_addr.remove(&(region.span.as_ptr().addr() as u64));
        self.bytes -= region.span.len() as u64;
    }

    pub(super) fn region(&self, id: RegionId) -> Option<&Region> {
        let row = self.rows.get(id.index as usize).filter(|row| row.generation == id.generation)?;
        row.region.as_ref()
    }

    /// The ids of all regions, with whether peers may use them.
    pub(super) fn ids(&self) -> impl Iterator<Item = (RegionId, bool)> {
        (0..).zip(&self.rows).filter_map(|(index, row)| {
            let region = row.region.as_ref()?;
            Some((RegionId::new(index, row.generation), region.access.is_remote() && !region.closing))
        })
    }

    pub(super) fn region_mut(&mut self, id: RegionId) -> Option<&mut Region> {
        let row = self.rows.get_mut(id.index as usize).filter(|row| row.generation == id.generation)?;
        row.region.as_mut()
    }

    /// The region and the offset of `len` local bytes; `None` if they do not lie in one region.
    pub(super) fn resolve(&self, local: LocalAddr, len: u64) -> Option<(RegionId, u64, &Region)> {
        let (id, offset) = match local {
            LocalAddr::Region(id, offset) => (id, offset),
            LocalAddr::Address(addr) => {
                let (&first, &index) = self.by_addr.range(..=addr).next_back()?;
                (RegionId::new(index, self.rows[index as usize].generation), addr - first)
            }
        };
        let region = self.region(id)?;
        (!region.closing && region.span.contains(offset, len)).then_some((id, offset, region))
    }

    pub(super) fn len(&self) -> u32 {
        self.by_addr.len() as u32
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(addr: usize, len: usize) -> MemSpan {
        MemSpan::new(std::ptr::without_provenance_mut(addr), len)
    }

    fn add(regions: &mut Regions, addr: usize, len: usize) -> Result<RegionId, RegisterError> {
        let span = span(addr, len);
        regions.check(span)?;
        let id = regions.reserve()?;
        let access = Access::LOCAL;
        let region = Region {
            span,
            access,
            owned: false,
            requests: 0,
            closing: false,
            quarantined: false,
            _memory: None,
        };
        regions.insert(id, region);
        Ok(id)
    }

    #[test]
    fn overlaps_are_refused_and_neighbours_are_not() {
        let mut regions = Regions::new(8);
        add(&mut regions, 0x1000, 0x1000).unwrap();
        for (addr, len) in [(0x1000, 1), (0x1fff, 1), (0xfff, 2), (0x800, 0x4000), (0x1800, 0x100)] {
            let refused = add(&mut regions, addr, len);
            assert_eq!(refused, Err(RegisterError::Overlap { addr: 0x1000, len: 0x1000 }));
        }
        add(&mut regions, 0x2000, 1).unwrap();
        add(&mut regions, 0xfff, 1).unwrap();
        assert_eq!(add(&mut regions, 0x9000, 0), Err(RegisterError::Empty));
        assert_eq!((regions.len(), regions.bytes()), (3, 0x1002));
    }

    #[test]
    fn an_id_of_an_unregistered_region_is_stale() {
        let mut regions = Regions::new(1);
        let old = add(&mut regions, 0x1000, 0x1000).unwrap();
        assert_eq!(add(&mut regions, 0x8000, 1), Err(RegisterError::Full { regions_max: 1 }));
        regions.remove(old);
        let new = add(&mut regions, 0x1000, 0x1000).unwrap();
        assert_ne!(old, new);
        assert!(regions.region(old).is_none());
        assert!(regions.resolve(LocalAddr::Region(old, 0), 1).is_none());
        let (id, offset, _) = regions.resolve(LocalAddr::Address(0x1800), 0x800).unwrap();
        assert_eq!((id, offset), (new, 0x800));
        assert!(regions.resolve(LocalAddr::Address(0x1800), 0x801).is_none());
        assert!(regions.resolve(LocalAddr::Address(0xfff), 1).is_none());
    }
}
