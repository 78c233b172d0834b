//! What callers ask for and what they are told: requests, statuses, reports.

use std::string::String;
use std::vec::Vec;

use te_core::{Access, Error, Location, Op, Outcome, RegionId, Status};

/// An open segment: the memory that one peer exports. Names a row of the engine's table, never memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SegmentHandle {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl SegmentHandle {
    /// Both halves in one word, for foreign callers.
    #[must_use]
    pub const fn to_bits(self) -> u64 {
        (self.generation as u64) << 32 | self.index as u64
    }

    /// The inverse of [`Self::to_bits`].
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self { index: bits as u32, generation: (bits >> 32) as u32 }
    }
}

/// One contiguous move between a registered local range and a range of a peer's exported memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferRequest {
    /// Which way.
    pub op: Op,
    /// First local byte.
    pub local: LocalAddr,
    /// Whose memory.
    pub segment: SegmentHandle,
    /// First remote byte: an address in the owner's address space, as its descriptor lists them.
    pub remote_addr: u64,
    /// Bytes.
    pub len: u64,
}

/// A place in registered local memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LocalAddr {
    /// An absolute address; it must lie in a registered region.
    Address(u64),
    /// A byte offset into a region.
    Region(RegionId, u64),
}

impl From<*mut u8> for LocalAddr {
    fn from(ptr: *mut u8) -> Self {
        Self::Address(ptr.addr() as u64)
    }
}

impl From<*const u8> for LocalAddr {
    fn from(ptr: *const u8) -> Self {
        Self::Address(ptr.addr() as u64)
    }
}

impl From<(RegionId, u64)> for LocalAddr {
    fn from((region, offset): (RegionId, u64)) -> Self {
        Self::Region(region, offset)
    }
}

/// What is known about one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestStatus {
    /// How far it is.
    pub status: Status,
    /// Bytes in place.
    pub bytes: u64,
    /// Why it did not complete.
    pub error: Option<Error>,
    /// What is known about the destination once it has ended; `Unknown` until then, and when only some bytes are in place.
    pub outcome: Outcome,
    /// Bytes of it may still land at the target: fence before the range gets other bytes or another owner.
    pub fence_needed: bool,
    /// CRC-32C of the bytes that were moved, where a rail came by it on the way: see
    /// [`Engine::checksum_copies`](crate::Engine::checksum_copies).
    pub crc32c: Option<u32>,
}

/// What is known about a whole batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchReport {
    /// How far it is; when final, the worst of its requests.
    pub status: Status,
    /// Bytes in place.
    pub bytes: u64,
    /// Requests that ended, and not as `Completed`.
    pub requests_failed: u32,
    /// The error of the first of them that failed.
    pub error: Option<Error>,
    /// Whether a fence is needed before any destination range gets other bytes or another owner.
    pub fence_needed: bool,
    /// It did not drain in time: its local memory may still be written and must not be reused. See
    /// [`Stats::quarantined_bytes`].
    pub quarantined: bool,
}

/// One region that a peer exports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteRegion {
    /// First byte, in the owner's address space.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// What we may do with it.
    pub access: Access,
    /// Where it lives, as its owner knows.
    pub location: Location,
}

/// Whether the owner of a segment is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// The process that was opened answers.
    Alive {
        /// Its incarnation.
        incarnation: u64,
    },
    /// Another process answers under the name; the handle refuses further work.
    Restarted {
        /// The incarnation that was opened.
        expected: u64,
        /// The one that answers.
        found: u64,
    },
    /// Nobody answers in time.
    Unreachable,
}

/// How far the [expulsion](crate::TransferEngine::expel) of a peer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expulsion {
    /// Nothing of it can land in our memory any more, and it is refused from now on.
    Gone,
    /// It is refused, and something of it may still land: ask again.
    Underway,
    /// It is connected, and was left alone.
    Connected,
    /// A fabric of this engine cannot tell one peer from another.
    Unsupported,
}

/// A message from a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    /// What it is about; the peers agree on names.
    pub name: String,
    /// Its body.
    pub message: Vec<u8>,
}

/// Counters of one rail since the engine started.
#[derive(Clone, Debug, PartialEq)]
pub struct RailStats {
    /// `local`, `shm`, `rdma`, `tcp`.
    pub name: &'static str,
    /// Device and port, `mlx5_0:1`, where a fabric has several; else empty.
    pub device: String,
    /// Bytes moved.
    pub bytes: u64,
    /// Slices that ended well.
    pub slices: u64,
    /// Slices that did not.
    pub errors: u64,
    /// Bytes in flight now.
    pub inflight_bytes: u64,
    /// Recent throughput, smoothed, GB/s (10⁹ bytes).
    pub ewma_gb_s: f64,
    /// How long a slice takes, smoothed, nanoseconds.
    pub slice_ns: u64,
    /// Whether the route leaves it out for now.
    pub paused: bool,
    /// Whether it works, but several times slower than others of its kind.
    pub slow: bool,
    /// Times it was paused.
    pub pauses: u64,
    /// Times it became slow.
    pub slowdowns: u64,
}

/// What an engine knows about itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    /// One row a rail.
    pub rails: Vec<RailStats>,
    /// Registered regions.
    pub regions: u32,
    /// Registered bytes.
    pub registered_bytes: u64,
    /// Open segments.
    pub segments: u32,
    /// Batches not freed.
    pub batches: u32,
    /// Batches that ran into their deadline.
    pub batches_timed_out: u64,
    /// Batches that did not drain in time, and have not since.
    pub quarantined_batches: u32,
    /// Bytes of their local memory.
    pub quarantined_bytes: u64,
    /// Regions that could not be unregistered because a stopped peer may be in the middle of a copy, and that nobody asks for any
    /// more: see [`TransferEngine::quarantine_shared`](crate::TransferEngine::quarantine_shared).
    pub quarantined_regions: u32,
    /// Bytes of those: of addresses, not of memory.
    pub quarantined_region_bytes: u64,
    /// Buffers of dropped transfers that could not be given back.
    pub leaked_buffers: u64,
    /// Bytes of those.
    pub leaked_bytes: u64,
    /// Notifications refused because too many waited.
    pub notifications_refused: u64,
}
