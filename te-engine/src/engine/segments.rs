//! Open segments: the peer, its incarnation, and which of its regions are attached.

use std::string::String;
use std::vec::Vec;

use te_core::{Access, Location, RemoteRegionId};

use crate::error::SegmentError;
use crate::request::{RemoteRegion, SegmentHandle};

/// All open segments of one engine.
pub(super) struct Segments {
    rows: Vec<Row>,
    /// Generations of the ids of remote regions, by index.
    ids: Vec<u32>,
    free_ids: Vec<u32>,
    remote_regions_max: u32,
}

struct Row {
    generation: u32,
    segment: Option<Segment>,
}

pub(super) struct Segment {
    pub(super) name: String,
    /// `host:port` of its owner; `None`: the segment is foreign.
    pub(super) endpoint: Option<String>,
    pub(super) incarnation: u64,
    pub(super) version: u64,
    /// How often it was opened and not closed.
    pub(super) opens: u32,
    /// The incarnation of another process that answers under the name.
    pub(super) restarted: Option<u64>,
    /// Requests of batches that have not ended, and fences.
    pub(super) requests: u32,
    /// In the order of their addresses.
    pub(super) regions: Vec<Attached>,
}

/// A peer's region, attached here.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attached {
    pub(super) id: RemoteRegionId,
    /// The owner's id of the region: another id at the same address is another region.
    pub(super) region: u64,
    pub(super) addr: u64,
    pub(super) len: u64,
    pub(super) access: Access,
    pub(super) location: Location,
    /// Fingerprint of its export, which changes when the region joins another rail.
    pub(super) export: u64,
}

impl Segments {
    pub(super) fn new(remote_regions_max: u32) -> Self {
        Self { rows: Vec::new(), ids: Vec::new(), free_ids: Vec::new(), remote_regions_max }
    }

    pub(super) fn insert(&mut self, segment: Segment) -> SegmentHandle {
        let index = self.rows.iter().position(|row| row.segment.is_none()).unwrap_or(self.rows.len());
        if index == self.rows.len() {
            self.rows.push(Row { generation: 0, segment: None });
        }
        let row = &mut self.rows[index];
        row.segment = Some(segment);
        SegmentHandle { index: index as u32, generation: row.generation }
    }

    pub(super) fn remove(&mut self, handle: SegmentHandle) -> Option<Segment> {
        let row =
            self.rows.get_mut(handle.index as usize).filter(|row| row.generation == handle.generation)?;
        let segment = row.segment.take()?;
        row.generation = row.generation.wrapping_add(1);
        Some(segment)
    }

    pub(super) fn segment(&self, handle: SegmentHandle) -> Option<&Segment> {
        let row = self.rows.get(handle.index as usize).filter(|row| row.generation == handle.generation)?;
        row.segment.as_ref()
    }

    pub(super) fn segment_mut(&mut self, handle: SegmentHandle) -> Option<&mut Segment> {
        let row =
            self.rows.get_mut(handle.index as usize).filter(|row| row.generation == handle.generation)?;
        row.segment.as_mut()
    }

    /// The segment that was opened as `name` and whose owner has not restarted since.
    pub(super) fn find(&self, name: &str) -> Option<SegmentHandle> {
        self.rows.iter().zip(0..).find_map(|(row, index)| {
            let current = row.segment.as_ref()?;
            let found = current.name == name && current.restarted.is_none();
            found.then_some(SegmentHandle { index, generation: row.generation })
        })
    }

    pub(super) fn len(&self) -> u32 {
        self.rows.iter().filter(|row| row.segment.is_some()).count() as u32
    }

    /// Takes an id under which to attach a remote region.
    pub(super) fn take_id(&mut self) -> Result<RemoteRegionId, SegmentError> {
        let index = match self.free_ids.pop() {
            Some(index) => index,
            None if self.ids.len() < self.remote_regions_max as usize => {
                self.ids.push(0);
                (self.ids.len() - 1) as u32
            }
            None => return Err(SegmentError::Full { remote_regions_max: self.remote_regions_max }),
        };
        Ok(RemoteRegionId::new(index, self.ids[index as usize]))
    }

    /// Frees an id under which nothing is attached any more.
    pub(super) fn put_id(&mut self, id: RemoteRegionId) {
        let generation = &mut self.ids[id.index as usize];
        *generation = generation.wrapping_add(1);
        self.free_ids.push(id.index);
    }
}

impl Segment {
    /// The attached region and the offset of `len` remote bytes; `None` if they do not lie in one region.
    pub(super) fn resolve(&self, addr: u64, len: u64) -> Option<(&Attached, u64)> {
        let after = self.regions.partition_point(|region| region.addr <= addr);
        let region = &self.regions[after.checked_sub(1)?];
        let offset = addr - region.addr;
        (offset.checked_add(len)? <= region.len).then_some((region, offset))
    }

    pub(super) fn restart_error(&self) -> Option<SegmentError> {
        let found = self.restarted?;
        Some(SegmentError::Restarted { name: self.name.clone(), expected: self.incarnation, found })
    }
}

impl From<&Attached> for RemoteRegion {
    fn from(region: &Attached) -> Self {
        Self { addr: region.addr, len: region.len, access: region.access, location: region.location }
    }
}
