//! An accepted slice and the pieces in which it travels: what this fabric keeps beside what every fabric
//! does.

use te_core::Op;

use crate::staging::SlotId;
use crate::sys::Memory;

/// The part of an operation that is te-tcp's own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ext {
    /// The local bytes.
    pub(crate) local: Memory,
    /// Hops to and from them that have not ended.
    pub(crate) hops: u16,
    /// Cancelled, and not completed because hops run.
    pub(crate) ending: bool,
    /// Some piece of a WRITE is in place, or may be.
    pub(crate) touched: bool,
    /// Not yet completed. A slice that is cancelled stays as a ghost until its last piece is answered.
    pub(crate) live: bool,
}

impl Ext {
    /// Of a slice that was just accepted.
    pub(crate) const fn new(local: Memory) -> Self {
        Self { local, hops: 0, ending: false, touched: false, live: true }
    }
}

pub(crate) type Operation = te_fabric::Operation<Ext>;
pub(crate) type Operations = te_fabric::Operations<Ext>;

/// How far a piece got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Not one byte of its payload is sent (a READ has none).
    Framed,
    /// Some bytes are.
    Started,
    /// All are.
    Sent,
    /// Taken back before its entry was sent: the target will refuse it.
    Void,
}

/// Part of an operation that is on a connection, or was.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    /// Slot of the operation.
    pub(crate) slot: u32,
    /// Bytes.
    pub(crate) len: u32,
    /// Offset into the slice, bytes.
    pub(crate) offset: u32,
    pub(crate) op: Op,
    pub(crate) stage: Stage,
    /// The slot that holds its bytes, when the slice's are a device's.
    pub(crate) staged: Option<SlotId>,
    /// Where its entry lies among the connection's heads.
    pub(crate) entry_at: u64,
}

const _: () = assert!(size_of::<Piece>() == 24);

impl Piece {
    /// Whether bytes of it are in place at the target, or may be.
    pub(crate) fn may_have_landed(&self) -> bool {
        self.op == Op::Write && matches!(self.stage, Stage::Started | Stage::Sent)
    }
}
