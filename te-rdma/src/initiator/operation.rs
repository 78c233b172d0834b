//! The part of an accepted slice that is specific to this fabric.

use te_core::Instant;

/// The part of an operation that is specific to te-rdma.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ext {
    /// Offset into the local region.
    pub(super) local_offset: u64,
    /// Some piece of a WRITE is in place.
    pub(super) landed: bool,
    /// Some piece of a WRITE ended, and it is unknown whether it will land.
    pub(super) doubtful: bool,
    /// Flushed because of another slice's failure: it is sent again when its last piece has ended.
    pub(super) again: bool,
    /// The caller cancelled it: it may end by itself until this time.
    pub(super) canceled: Option<Instant>,
    /// How often it was sent again.
    pub(super) replays: u8,
    /// It waits for keys: the queue that it is in is that of its remote region.
    pub(super) waiting: bool,
}

impl Ext {
    /// For a slice that was just accepted.
    pub(super) const fn new(local_offset: u64) -> Self {
        Self {
            local_offset,
            landed: false,
            doubtful: false,
            again: false,
            canceled: None,
            replays: 0,
            waiting: false,
        }
    }
}

pub(super) type Operation = te_fabric::Operation<Ext>;
pub(super) type Operations = te_fabric::Operations<Ext>;
