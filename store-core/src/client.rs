//! The client: one get or put of many keys, as a state machine without sockets or clocks.
//!
//! ```text
//!            poll ─▶ Call ──▶ the master ──▶ handle_response / handle_call_failed
//!            poll ─▶ Transfer ─▶ the fabric ──▶ handle_transfer        ┐ until is_done
//!            poll ─▶ Cancel ──▶ the fabric (the transfer's end still comes)
//!            poll ─▶ Fence ───▶ the fabric ──▶ handle_fence            ┘ then result(item)
//! ```
//!
//! [`GetOp`] and [`PutOp`] keep their buffers between operations: `start` one, run it until [`GetOp::is_done`], read the
//! results, `start` the next. Their methods come in quinn's four groups: *inputs* (`start`, `abort`, `handle_*`), *outputs*
//! (`poll`, `poll_timeout`), *timeouts* (`handle_timeout`) and *getters*. After any input or timeout, call `poll` until it
//! gives `None`.
//!
//! Operations that are one call and one answer (exists, remove, list, …) need no machine: use [`crate::message`] directly.

mod get;
mod put;

use alloc::vec::Vec;

use te_core::{Op, Outcome};

pub use get::{Fetched, GetItem, GetOp};
pub use put::{PutItem, PutOp};

use crate::SegmentNo;

/// What the shell is to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A request frame was appended to `out`, under the request id that the caller passed: send it.
    Call,
    /// Move bytes. The end goes to `handle_transfer`, exactly once.
    Transfer(Transfer),
    /// Cancel a transfer that was asked for. Its end still comes.
    Cancel {
        /// Which.
        transfer: u32,
    },
    /// Fence the owner of a segment (L5). The end goes to `handle_fence`, exactly once.
    Fence {
        /// Which.
        segment: SegmentNo,
    },
}

/// Bytes to move between the caller's buffer for an item and one replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Names it, within its operation.
    pub id: u32,
    /// Which item of the operation: the caller knows its buffer.
    pub item: u32,
    /// Read or write.
    pub op: Op,
    /// The replica's segment. Unknown here: ask the master for [`crate::message::Segments`].
    pub segment: SegmentNo,
    /// The replica's address in the segment's export.
    pub addr: u64,
    /// Bytes of the object's data, which lie there from `addr` on, followed by the trailer ([`crate::blocks`]).
    ///
    /// A write writes both. A read of all reads the data; one of a part the trailer and the blocks that it needs.
    pub len: u64,
}

/// How a transfer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferEnd {
    /// What is known about the destination; the worst over all slices.
    pub outcome: Outcome,
    /// Some slice said that a copy of the bytes may still land.
    pub fence_needed: bool,
    /// A read that was applied: CRC-32C of the object by what arrived. Of all bytes as they were summed; of a part the
    /// checksums in the trailer, joined ([`crate::blocks`]). Else ignored.
    pub checksum: u32,
    /// A part was read, and a block of it is not what the trailer says.
    pub damaged: bool,
}

impl TransferEnd {
    /// A write that is in place.
    #[must_use]
    pub const fn written() -> Self {
        Self::read(0)
    }

    /// A read that is in place, and what arrived.
    #[must_use]
    pub const fn read(checksum: u32) -> Self {
        Self { outcome: Outcome::Applied, fence_needed: false, checksum, damaged: false }
    }

    /// It failed and no byte will change.
    #[must_use]
    pub const fn not_applied() -> Self {
        Self { outcome: Outcome::NotApplied, ..Self::read(0) }
    }

    /// A write of which bytes may still land.
    #[must_use]
    pub const fn unknown() -> Self {
        Self { outcome: Outcome::Unknown, fence_needed: true, ..Self::read(0) }
    }
}

/// How often, and for how long, something is tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientConfig {
    /// Tries of a call. Default 3.
    pub rpc_tries_max: u8,
    /// Places that a put asks for, one after the other, when segments cannot be written to. 1: the first must do. Default 3.
    pub places_max: u8,
    /// A segment that has not taken a byte for so long, milliseconds, and as much longer as a put's bytes take at 25 MB/s, is
    /// given up for another place. Default 2,000.
    pub place_ms_max: u32,
}

impl Default for ClientConfig {
    fn default() -> Self {
        Self { rpc_tries_max: 3, places_max: 3, place_ms_max: 2_000 }
    }
}

/// Keys of one operation, end to end in one buffer that is kept.
#[derive(Debug, Default)]
struct KeyList {
    bytes: Vec<u8>,
    ends: Vec<u32>,
}

impl KeyList {
    fn clear(&mut self) {
        self.bytes.clear();
        self.ends.clear();
    }

    fn push(&mut self, key: &[u8]) {
        self.bytes.extend_from_slice(key);
        self.ends.push(self.bytes.len() as u32);
    }

    fn key(&self, item: usize) -> crate::Key<'_> {
        let start = if item == 0 { 0 } else { self.ends[item - 1] as usize };
        crate::Key(&self.bytes[start..self.ends[item] as usize])
    }
}
