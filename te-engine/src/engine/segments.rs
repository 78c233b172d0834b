//! Open segments: which peer, which life of it, and which of its regions are attached.

use std::string::String;
use std::vec::Vec;

use te_core::{Access, Location, RemoteRegionId};

use crate::error::SegmentError;
use crate::request::{RemoteRegion, SegmentHandle};

/// All open segments of one engine.
pub(super) struct Segments {
    rows: Vec<Row>,
    /// Generations of the ids under which remote regions are attached, and those that are free.
    ids: Vec<u32>,
    free_ids: Vec<u32>,
    segments_max: u32,
}

struct Row {
    generation: u32,
    segment: Option<Segment>,
}

pub(super) struct Segment {
    pub(super) name: String,
    /// `host:port` of its owner.
    pub(super) endpoint: String,
    pub(super) incarnation: u64,
    pub(super) version: u64,
    /// Times it was opened and not closed.
    pub(super) opens: u32,
    /// Another process answers under the name: its incarnation.
    pub(super) restarted: Option<u64>,
    /// Requests of batches that have not ended, and fences.
    pub(super) requests: u32,
    /// By address.
    pub(super) regions: Vec<Attached>,
}

/// A peer's region, attached here.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attached {
    pub(super) id: RemoteRegionId,
    /// The owner's id for it: another one under the same address is another region.
    pub(super) region: u64,
    pub(super) addr: u64,
    pub(super) len: u64,
    pub(super) access: Access,
    pub(super) location: Location,
    /// Tells its export from a later one of the same region.
    pub(super) export: u64,
}

impl Segments {
    pub(super) fn new(segments_max: u32) -> Self {
        Self { rows: Vec::new(), ids: Vec::new(), free_ids: Vec::new(), segments_max }
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

    /// An id to attach a remote region as.
    pub(super) fn take_id(&mut self) -> Result<RemoteRegionId, SegmentError> {
        let index = match self.free_ids.pop() {
            Some(index) => index,
            None if self.ids.len() < self.segments_max as usize => {
                self.ids.push(0);
                (self.ids.len() - 1) as u32
            }
            None => return Err(SegmentError::Full { segments_max: self.segments_max }),
        };
        Ok(RemoteRegionId::new(index, self.ids[index as usize]))
    }

    /// Gives back an id that nothing is attached as any more.
    pub(super) fn put_id(&mut self, id: RemoteRegionId) {
        let generation = &mut self.ids[id.index as usize];
        *generation = generation.wrapping_add(1);
        self.free_ids.push(id.index);
    }
}

impl Segment {
    /// The attached region and offset of `len` remote bytes; `None` when they do not lie in one region.
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
