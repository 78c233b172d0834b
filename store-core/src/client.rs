//! The client: one get or one put of many keys, as a state machine without sockets or clocks.
//!
//! ```text
//!            poll ─▶ Call ──▶ the master ──▶ handle_response / handle_call_failed
//!            poll ─▶ Transfer ─▶ the fabric ──▶ handle_transfer        ┐ until is_done
//!            poll ─▶ Cancel ──▶ the fabric (the transfer's end still comes)
//!            poll ─▶ Fence ───▶ the fabric ──▶ handle_fence            ┘ then result(item)
//! ```
//!
//! [`GetOp`] and [`PutOp`] keep their buffers between operations: `start` an operation, run it until
//! [`GetOp::is_done`], read the results, `start` the next. Their methods form four groups: *inputs* (`start`,
//! `abort`, `handle_*`), *outputs* (`poll`, `poll_timeout`), *timeouts* (`handle_timeout`) and *getters*.
//! After any input or timeout, call `poll` until it returns `None`.
//!
//! Operations that are one request and one response (exists, remove, list, …) need no state machine: use
//! [`crate::message`] directly.

mod get;
mod put;

use alloc::vec::Vec;

use te_core::{Op, Outcome};

pub use get::{Fetched, GetItem, GetOp};
pub use put::{CloseItem, OpenPut, PutEnding, PutItem, PutOp, RangeItem};

use crate::SegmentNo;

/// What the caller of an operation has to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A request frame was appended to `out`, under the request id that the caller passed: send it.
    Call,
    /// Move bytes. Report the end with `handle_transfer`, exactly once.
    Transfer(Transfer),
    /// Cancel a transfer. Its end is still reported.
    Cancel {
        /// The [`Transfer::id`].
        transfer: u32,
    },
    /// Fence the process that owns a segment's memory (law L5). Report the end with `handle_fence`, exactly
    /// once.
    Fence {
        /// The segment.
        segment: SegmentNo,
    },
}

/// Bytes to move between the caller's buffer for an item and one replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Identifies the transfer within its operation.
    pub id: u32,
    /// The index of the item in the operation, by which the caller finds the buffer.
    pub item: u32,
    /// Whether to read or to write.
    pub op: Op,
    /// The replica's segment. To learn where it is, send [`crate::message::Segments`] to the master.
    pub segment: SegmentNo,
    /// The replica's address in the segment's export.
    pub addr: u64,
    /// Bytes of the object's data, which begin at `addr`. The trailer follows them ([`crate::chunks`]).
    ///
    /// A write transfers data and trailer. A read of the whole object transfers the data; a read of a part
    /// transfers the trailer and the chunks that the part touches. Writes of an open put ([`PutOp::write`],
    /// [`PutOp::close`]) transfer exactly `len` bytes to `addr`: a range, or the trailer.
    pub len: u64,
}

/// How a transfer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferEnd {
    /// What is known about the destination; the worst over all slices.
    pub outcome: Outcome,
    /// At least one slice reported that a copy of its bytes may still land.
    pub fence_needed: bool,
    /// For a read that was applied: CRC-32C of the object as it was read. Of the whole object, the sum over
    /// all bytes; of a part, the checksums of the trailer combined ([`crate::chunks`]). Ignored for writes.
    pub checksum: u32,
    /// A part was read, and one of its chunks does not match the trailer.
    pub damaged: bool,
}

impl TransferEnd {
    /// A write that was applied.
    #[must_use]
    pub const fn written() -> Self {
        Self::read(0)
    }

    /// A read that was applied, with the CRC-32C of what was read.
    #[must_use]
    pub const fn read(checksum: u32) -> Self {
        Self { outcome: Outcome::Applied, fence_needed: false, checksum, damaged: false }
    }

    /// A transfer that failed and will not change a byte any more.
    #[must_use]
    pub const fn not_applied() -> Self {
        Self { outcome: Outcome::NotApplied, ..Self::read(0) }
    }

    /// A write that failed and whose bytes may still land.
    #[must_use]
    pub const fn unknown() -> Self {
        Self { outcome: Outcome::Unknown, fence_needed: true, ..Self::read(0) }
    }
}

/// How a fence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FenceEnd {
    /// The target has confirmed that nothing older can land any more.
    Held,
    /// Bytes may still land.
    Failed,
}

impl FenceEnd {
    /// `Held` if the fence held.
    #[must_use]
    pub const fn of(held: bool) -> Self {
        if held { Self::Held } else { Self::Failed }
    }
}

/// Limits on retries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientConfig {
    /// Tries per call to the master. Default 3.
    pub rpc_tries_max: u8,
    /// Places that a put requests, one after the other, while segments cannot be written to. 1: no second
    /// place is requested. Default 3.
    pub places_max: u8,
    /// A segment that has not accepted a byte for this long, milliseconds, plus the time that the put's bytes
    /// take at 25 MB/s, is abandoned for another place. Default 2,000.
    pub place_ms_max: u32,
}

impl Default for ClientConfig {
    fn default() -> Self {
        Self { rpc_tries_max: 3, places_max: 3, place_ms_max: 2_000 }
    }
}

/// The keys of one operation, concatenated in one buffer that is reused.
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
