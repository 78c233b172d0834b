//! What is on the wire: packets to a target, and its answers.

use te_core::Op;

use crate::sys::verbs::WcStatus;

/// A packet to the target.
pub(super) struct Request {
    pub(super) due: u64,
    pub(super) psn: u32,
    pub(super) op: Op,
    /// The first of its message: carries the whole range and its key.
    pub(super) first: bool,
    pub(super) last: bool,
    pub(super) key: u32,
    /// Of the first byte that this packet is about.
    pub(super) addr: u64,
    /// Bytes that this packet is about: its payload, or (READ) all that is asked for.
    pub(super) len: u32,
    /// Bytes of the whole message from `addr` on.
    pub(super) message_bytes: u32,
    /// READ: responses that are expected.
    pub(super) packets: u32,
    pub(super) payload: Payload,
}

/// Where a packet's bytes are.
pub(super) enum Payload {
    None,
    /// Still in the sender's memory: request at this position. Only when nothing can happen before it
    /// arrives.
    InPlace(u64),
    Copied(Vec<u8>),
}

/// A packet back.
pub(super) struct Response {
    pub(super) due: u64,
    pub(super) psn: u32,
    pub(super) body: Body,
}

pub(super) enum Body {
    /// All up to here is done.
    Ack,
    /// Part of a READ's answer. `InPlace` memory is found by (device, key, address).
    Data { bytes: Answer, last: bool },
    /// Something is missing; `psn` is the next that is wanted.
    Gap,
    /// Try `psn` again later.
    NotReady,
    /// `psn` failed for good.
    Refused(WcStatus),
}

pub(super) enum Answer {
    InPlace { device: usize, key: u32, addr: u64, len: u32 },
    Copied(Vec<u8>),
}
