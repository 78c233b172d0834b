//! An accepted slice and the pieces in which it travels: what te-tcp keeps beside the fields that every
//! fabric keeps.

use te_core::Op;

use crate::staging::SlotId;
use crate::sys::Memory;

/// The part of an operation that only te-tcp needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ext {
    /// The slice's local memory.
    pub(crate) local: Memory,
    /// Hops to and from that memory that have not ended.
    pub(crate) hops: u16,
    /// The slice is cancelled, and completes when its hops have ended.
    pub(crate) ending: bool,
    /// Bytes of a WRITE have changed the remote memory, or may have.
    pub(crate) touched: bool,
    /// The slice has not completed. A cancelled slice keeps its slot after its completion until its last
    /// piece is answered.
    pub(crate) live: bool,
}

impl Ext {
    /// For a slice that was just accepted.
    pub(crate) const fn new(local: Memory) -> Self {
        Self { local, hops: 0, ending: false, touched: false, live: true }
    }
}

pub(crate) type Operation = te_fabric::Operation<Ext>;
pub(crate) type Operations = te_fabric::Operations<Ext>;

/// How much of a piece has been sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// No byte of its payload. A READ has none.
    Framed,
    /// A part of its payload.
    Started,
    /// The whole payload.
    Sent,
    /// The piece was taken back before its entry was sent: its length is 0, and the target will refuse it.
    Void,
}

/// Part of an operation that a connection carries, has carried, or will carry next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    /// Slot of the operation in the initiator's table.
    pub(crate) slot: u32,
    /// Length, bytes.
    pub(crate) len: u32,
    /// Offset into the slice, bytes.
    pub(crate) offset: u32,
    pub(crate) op: Op,
    pub(crate) stage: Stage,
    /// The staging slot that holds its bytes, when the slice's memory is a device's.
    pub(crate) staged: Option<SlotId>,
    /// Position of its entry in the connection's ring of heads.
    pub(crate) entry_at: u64,
}

const _: () = assert!(size_of::<Piece>() == 24);

impl Piece {
    /// Whether some of its bytes have changed the target's memory, or may have.
    pub(crate) fn may_have_landed(&self) -> bool {
        self.op == Op::Write && matches!(self.stage, Stage::Started | Stage::Sent)
    }
}
