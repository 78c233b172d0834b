//! What this fabric keeps of an attached segment, beside what every fabric does: the target's keys.

use te_fabric::Queue;

use crate::wire::Chunking;

/// What the target has said about a segment.
#[derive(Debug)]
pub(super) enum Keys {
    /// Not asked.
    Unknown,
    /// Asked, with this id.
    Asked(u64),
    /// All known; asked for in order, so the list grows.
    Known,
    /// The target has withdrawn the region.
    Withdrawn,
}

/// The part of a segment that is te-rdma's own. Its length and rights are as exported, and then as the target
/// says.
#[derive(Debug)]
pub(super) struct SegmentExt {
    pub(super) keys: Keys,
    pub(super) chunking: Option<Chunking>,
    pub(super) remote_keys: Vec<u32>,
    /// Slices that wait for the keys.
    pub(super) waiting: Queue,
}

impl SegmentExt {
    /// Of a segment that was just attached.
    pub(super) const fn new() -> Self {
        Self { keys: Keys::Unknown, chunking: None, remote_keys: Vec::new(), waiting: Queue::new() }
    }

    /// Forgets the remote keys: they have to be asked for again, unless the region was withdrawn.
    pub(super) fn forget(&mut self, keys: Keys) {
        self.remote_keys.clear();
        self.keys = keys;
    }
}

pub(super) type Segment = te_fabric::RemoteRegion<SegmentExt>;
pub(super) type Segments = te_fabric::RemoteRegions<SegmentExt>;
