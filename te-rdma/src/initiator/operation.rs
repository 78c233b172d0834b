//! What this fabric keeps of an accepted slice, beside what every fabric does.

use te_core::Instant;

/// The part of an operation that is te-rdma's own.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ext {
    /// Offset into the local region.
    pub(super) local_offset: u64,
    /// Some piece of a WRITE is in place.
    pub(super) landed: bool,
    /// Some piece of a WRITE ended, and it is not known whether it will land.
    pub(super) doubtful: bool,
    /// Flushed because of another slice's failure: to be sent again when its last piece has ended.
    pub(super) again: bool,
    /// The caller wants it to end: by itself until then.
    pub(super) canceled: Option<Instant>,
    pub(super) replays: u8,
    /// The queue that it is in is its segment's: it waits for keys.
    pub(super) waiting: bool,
}

impl Ext {
    /// Of a slice that was just accepted.
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
