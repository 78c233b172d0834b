//! The part of an attached remote region that is specific to this fabric: the target's keys.

use te_fabric::Queue;

use crate::wire::Chunking;

/// Whether the remote keys are known.
#[derive(Debug)]
pub(super) enum Keys {
    /// Some are missing, and no request is open.
    Unknown,
    /// Some are missing, and the request with this id is open.
    Requested(u64),
    /// All are known.
    Known,
    /// The target has deregistered the region.
    Withdrawn,
}

/// The part of a remote region that is specific to te-rdma. Its length and rights are those of the export,
/// until the target's answer replaces them.
#[derive(Debug)]
pub(super) struct RemoteRegionExt {
    pub(super) keys: Keys,
    pub(super) chunking: Option<Chunking>,
    /// The keys of the chunks from the first one on; the target sends them in order.
    pub(super) remote_keys: Vec<u32>,
    /// Slices that wait for the keys.
    pub(super) waiting: Queue,
}

impl RemoteRegionExt {
    /// For a remote region that was just attached.
    pub(super) const fn new() -> Self {
        Self { keys: Keys::Unknown, chunking: None, remote_keys: Vec::new(), waiting: Queue::new() }
    }

    /// Forgets the remote keys, and sets the new state.
    pub(super) fn forget(&mut self, keys: Keys) {
        self.remote_keys.clear();
        self.keys = keys;
    }
}

pub(super) type RemoteRegion = te_fabric::RemoteRegion<RemoteRegionExt>;
pub(super) type RemoteRegions = te_fabric::RemoteRegions<RemoteRegionExt>;
