//! What this fabric keeps of an accepted slice, beside what every fabric does.

use crate::sys::Pinned;

/// The part of an operation that is te-tcp's own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ext {
    /// The local bytes.
    pub(crate) local: Pinned,
    /// Some piece of a WRITE is in place, or may be.
    pub(crate) touched: bool,
    /// Not yet completed. A slice that is cancelled stays as a ghost until its last piece is answered.
    pub(crate) live: bool,
}

impl Ext {
    /// Of a slice that was just accepted.
    pub(crate) const fn new(local: Pinned) -> Self {
        Self { local, touched: false, live: true }
    }
}

pub(crate) type Operation = te_fabric::Operation<Ext>;
pub(crate) type Operations = te_fabric::Operations<Ext>;
