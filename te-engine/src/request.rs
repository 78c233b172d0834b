//! What callers pass and receive: requests, statuses, reports, counters.

use std::boxed::Box;
use std::string::String;
use std::time::Duration;
use std::vec::Vec;

use te_core::{Access, Error, Location, Op, Outcome, RegionId, Status};

/// An open segment: the memory that one peer exports. A handle with a generation: a handle of a closed
/// segment is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SegmentHandle {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl SegmentHandle {
    /// The handle as one number, for callers in other languages.
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

/// One copy between a contiguous range of registered local memory and one of a peer's exported memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferRequest {
    /// The direction: `Read` copies remote bytes to local memory, `Write` local bytes to remote memory.
    pub op: Op,
    /// First local byte.
    pub local: LocalAddr,
    /// The segment of the peer.
    pub segment: SegmentHandle,
    /// First remote byte: an address in the owner's address space, as its descriptor lists them.
    pub remote_addr: u64,
    /// Length, bytes; at least 1.
    pub len: u64,
}

/// How a batch is carried out. The options are those of a whole batch: requests with other options are
/// another batch.
///
/// ```
/// use std::time::Duration;
/// use te_engine::SubmitOptions;
///
/// let options = SubmitOptions::new().timeout(Duration::from_secs(2)).fabric("tcp").notify("kv", b"layer 7");
/// # assert_eq!(options, options.clone());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SubmitOptions {
    pub(crate) timeout: Option<Duration>,
    pub(crate) fabric: Option<Box<str>>,
    pub(crate) notice: Option<Box<Notification>>,
}

impl SubmitOptions {
    /// No timeout, any fabric, no notification.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Requests that have not ended after this time are cancelled and end `TimedOut`.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Only rails of this fabric carry the batch (`tcp`, `rdma`: [`RailStats::name`]), also when some of them
    /// fail. A batch with a request that no such rail can carry is refused with
    /// [`RequestProblem::Fabric`](crate::RequestProblem::Fabric).
    #[must_use]
    pub fn fabric(mut self, name: &str) -> Self {
        self.fabric = Some(name.into());
        self
    }

    /// When the batch has ended `Completed`, and never otherwise, the engine sends this notification to the
    /// owner of the first request's segment, as [`TransferEngine::notify`](crate::TransferEngine::notify)
    /// does. The transfer ends when the owner has answered or the sending has failed, which takes at most
    /// `control.timeout_ms` more; [`Transfer::notified`](crate::Transfer::notified) has the result.
    ///
    /// A [`Transfer`](crate::Transfer) that is dropped once all bytes have arrived does not stop the
    /// notification; one that is dropped earlier is cancelled, and nothing is sent. Notifications of one
    /// owner are sent in the order in which their batches completed. An engine that is stopped sends those of
    /// batches that have completed, for at most `drain_ms`.
    #[must_use]
    pub fn notify(mut self, name: &str, message: &[u8]) -> Self {
        self.notice = Some(Box::new(Notification { name: name.into(), message: message.into() }));
        self
    }
}

/// A position in registered local memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LocalAddr {
    /// An absolute address; it must lie in a registered region.
    Address(u64),
    /// An offset in a region, bytes.
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
    /// The state of the request.
    pub status: Status,
    /// Bytes that have arrived at the destination.
    pub bytes: u64,
    /// Why the request did not complete.
    pub error: Option<Error>,
    /// What is known about the destination after the end; `Unknown` before it, and when only some of the
    /// bytes have arrived.
    pub outcome: Outcome,
    /// Bytes of the request may still land at the target: a fence is needed before the range is used for
    /// anything else.
    pub fence_needed: bool,
    /// CRC-32C of the bytes that were moved, if the rails computed it: see
    /// [`Engine::checksum_copies`](crate::Engine::checksum_copies).
    pub crc32c: Option<u32>,
}

/// What is known about a whole batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchReport {
    /// The state of the batch; after its end, the worst status of its requests.
    pub status: Status,
    /// Bytes that have arrived at their destinations.
    pub bytes: u64,
    /// Requests that ended other than `Completed`.
    pub requests_failed: u32,
    /// The error of the request that failed first.
    pub error: Option<Error>,
    /// Bytes of a request may still land at the target: a fence is needed before its range is used for
    /// anything else.
    pub fence_needed: bool,
    /// The batch did not drain in time: its local memory may still be written and must not be reused. See
    /// [`Stats::quarantined_bytes`].
    pub quarantined: bool,
}

/// One region of a segment that is attached here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RemoteRegion {
    /// First byte, in the owner's address space.
    pub addr: u64,
    /// Length, bytes.
    pub len: u64,
    /// The remote rights that the owner grants.
    pub access: Access,
    /// Where the memory is, as its owner reports it.
    pub location: Location,
}

/// Whether the owner of a segment is alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
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
        /// The incarnation that answers.
        found: u64,
    },
    /// No process answered in time.
    Unreachable,
}

/// The state of the [expulsion](crate::TransferEngine::expel) of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Expulsion {
    /// No write of the peer can land in this engine's memory any more, and the peer is refused from now on.
    Gone,
    /// The peer is refused, and writes of it may still land: call again.
    Underway,
    /// The peer is connected and was not expelled.
    Connected,
    /// A fabric of this engine cannot distinguish its peers.
    Unsupported,
}

/// A message from a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Notification {
    /// The kind of message, by a name on which the peers agree.
    pub name: String,
    /// The body of the message.
    pub message: Vec<u8>,
}

/// Counters of one rail since the engine started.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct RailStats {
    /// The name of the fabric in [`fabrics`](fn@crate::fabrics): `shm`, `tcp`.
    pub name: &'static str,
    /// Device and port (`mlx5_0:1`) of a fabric with several rails; else empty.
    pub device: String,
    /// Bytes moved.
    pub bytes: u64,
    /// Slices that completed without an error.
    pub slices: u64,
    /// Slices that ended with an error.
    pub errors: u64,
    /// Bytes in flight now.
    pub inflight_bytes: u64,
    /// Recent throughput, smoothed, GB/s (10⁹ bytes per second).
    pub ewma_gb_s: f64,
    /// Recent time from submit to completion of a slice, smoothed, nanoseconds.
    pub slice_ns: u64,
    /// Whether the rail is in backoff: the route uses others.
    pub paused: bool,
    /// Whether the rail works, but several times slower than others of its tier.
    pub slow: bool,
    /// How often the rail was paused.
    pub pauses: u64,
    /// How often the rail became slow.
    pub slowdowns: u64,
}

/// A region that a rail does not serve as it could, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeftOut {
    /// The region.
    pub region: RegionId,
    /// The name of the fabric.
    pub fabric: &'static str,
    /// As [`RailStats::device`].
    pub device: String,
    /// Whether it is registered there: then it can be the local side of requests, and peers do not reach it
    /// over this rail.
    pub registered: bool,
    /// The reason, for people.
    pub why: String,
}

/// Counters of an engine, since it started, and gauges.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Stats {
    /// One row per rail.
    pub rails: Vec<RailStats>,
    /// Registered regions.
    pub regions: u32,
    /// Registered bytes.
    pub registered_bytes: u64,
    /// Open segments.
    pub segments: u32,
    /// Batches that are not freed.
    pub batches: u32,
    /// Batches that were cancelled at their deadline.
    pub batches_timed_out: u64,
    /// Batches that did not drain in time and still have not.
    pub quarantined_batches: u32,
    /// Local bytes that those batches use.
    pub quarantined_bytes: u64,
    /// Regions that are quarantined because a stopped peer may be in the middle of a copy: see
    /// [`TransferEngine::quarantine_shared`](crate::TransferEngine::quarantine_shared).
    pub quarantined_regions: u32,
    /// Bytes of address space of those regions. Their memory has been returned to the system.
    pub quarantined_region_bytes: u64,
    /// Buffers of dropped transfers that could not be freed.
    pub leaked_buffers: u64,
    /// Bytes of those buffers.
    pub leaked_bytes: u64,
    /// Notifications that were refused, for their length or because the queue was full.
    pub notifications_refused: u64,
}
