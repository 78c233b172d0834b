//! Packets on the wire: requests to a target, and its responses.

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
    /// Remote address of the first byte of this packet.
    pub(super) addr: u64,
    /// Bytes of this packet: of its payload, or (READ) of all that is requested.
    pub(super) len: u32,
    /// Bytes of the whole message from `addr` on.
    pub(super) message_bytes: u32,
    /// READ: the number of responses.
    pub(super) packets: u32,
    pub(super) payload: Payload,
}

/// Where the bytes of a packet are.
pub(super) enum Payload {
    None,
    /// Still in the sender's memory, in the request at this position. Only where the memory cannot change
    /// before the packet arrives.
    InPlace(u64),
    Copied(Vec<u8>),
}

/// A packet to the initiator.
pub(super) struct Response {
    pub(super) due: u64,
    pub(super) psn: u32,
    pub(super) body: Body,
}

pub(super) enum Body {
    /// Every packet up to `psn` was executed.
    Ack,
    /// Part of the data of a READ. `InPlace` memory is found by (device, key, address).
    Data { bytes: Answer, last: bool },
    /// Packets are missing; `psn` is the next that is expected.
    Gap,
    /// Send `psn` again later.
    NotReady,
    /// `psn` failed for good.
    Refused(WcStatus),
}

pub(super) enum Answer {
    InPlace { device: usize, key: u32, addr: u64, len: u32 },
    Copied(Vec<u8>),
}
