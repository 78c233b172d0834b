//! What this fabric keeps of an accepted slice, beside what every fabric does.

use te_core::Instant;

/// The part of an operation that is te-rdma's own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ext {
    /// Offset into the local region.
    pub(crate) local_offset: u64,
    /// Some piece of a WRITE is in place.
    pub(crate) landed: bool,
    /// Some piece of a WRITE ended without anybody knowing whether it will land.
    pub(crate) doubtful: bool,
    /// Swept out by somebody else's failure: to be sent again when its last piece has ended.
    pub(crate) again: bool,
    /// The caller wants it to end: by itself until then.
    pub(crate) canceled: Option<Instant>,
    pub(crate) replays: u8,
    /// The queue that it is in is its segment's: it waits for keys.
    pub(crate) waiting: bool,
}

impl Ext {
    /// Of a slice that was just accepted.
    pub(crate) const fn new(local_offset: u64) -> Self {
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

pub(crate) type Operation = te_fabric::Operation<Ext>;
pub(crate) type Operations = te_fabric::Operations<Ext>;
