//! The settings of a simulated device and of the links between devices.

use te_core::{Error, ErrorKind};

use crate::sys::verbs::{DeviceFeatures, Gid};

/// How time passes on the fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pace {
    /// Virtual time, moved by [`SimFabric::advance_to`](super::SimFabric::advance_to) alone. Messages are cut
    /// into packets of the path MTU, and every packet takes its link's latency.
    Timed,
    /// Every poll of any device first lets time run until nothing is on the wire. A message is one packet.
    /// For benches and for tests with threads: nothing is late, and timeouts take no time.
    Immediate,
}

/// One direction between two ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkConfig {
    /// Time from the sending to the arrival of a packet, nanoseconds.
    pub latency_ns: u64,
    /// Longest additional latency, nanoseconds, drawn for each packet. Packets of one queue pair do not
    /// overtake each other.
    pub jitter_ns: u64,
    /// Bytes per second that one queue pair sends; 0: no limit.
    pub bytes_per_s: u64,
    /// Packets lost, per million.
    pub loss_ppm: u32,
    /// Packets that arrive twice, per million.
    pub duplicate_ppm: u32,
    /// Packets that are delayed by `hold_ns`, with all packets behind them, per million.
    pub hold_ppm: u32,
    /// The delay of such a packet, nanoseconds.
    pub hold_ns: u64,
    /// Every packet is lost.
    pub down: bool,
}

impl LinkConfig {
    /// No loss, a latency of one microsecond.
    pub const CALM: Self = Self {
        latency_ns: 1_000,
        jitter_ns: 0,
        bytes_per_s: 0,
        loss_ppm: 0,
        duplicate_ppm: 0,
        hold_ppm: 0,
        hold_ns: 0,
        down: false,
    };
    /// No loss, no latency.
    pub const INSTANT: Self = Self { latency_ns: 0, ..Self::CALM };
}

/// The fabric as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimConfig {
    /// How time passes.
    pub pace: Pace,
    /// The initial setting of every link.
    pub link: LinkConfig,
    /// How long a sender waits after "receiver not ready", nanoseconds.
    pub rnr_wait_ns: u64,
}

impl SimConfig {
    /// Virtual time, links without loss.
    pub const TIMED: Self = Self { pace: Pace::Timed, link: LinkConfig::CALM, rnr_wait_ns: 640_000 };
    /// Everything arrives at the next poll.
    pub const IMMEDIATE: Self =
        Self { pace: Pace::Immediate, link: LinkConfig::INSTANT, rnr_wait_ns: 640_000 };
}

/// One device with one port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Name; empty: `sim0`, `sim1`, … in the order in which devices were added.
    pub name: String,
    /// NUMA node; `None`: unknown.
    pub numa_node: Option<u16>,
    /// InfiniBand, addressed by LID (true), or Ethernet, that is RoCE, addressed by GID.
    pub infiniband: bool,
    /// Path MTU, bytes.
    pub mtu_bytes: u32,
    /// The GID table. Empty: RoCE v1 and RoCE v2 entries (or one InfiniBand entry) that no other device has.
    pub gids: Vec<Option<Gid>>,
    /// Longest registration, bytes.
    pub mr_bytes_max: u64,
    /// The most registrations that exist at the same time.
    pub mr_count_max: u32,
    /// The most bytes that are registered at the same time, as `RLIMIT_MEMLOCK` limits them.
    pub pinned_bytes_max: u64,
    /// The most queue pairs that exist at the same time.
    pub qp_count_max: u32,
    /// The most work requests in one send queue.
    pub qp_depth_max: u32,
    /// Entries of the completion queue.
    pub cq_depth: u32,
    /// The most scatter/gather entries in one work request.
    pub sge_max: u32,
    /// Longest WRITE that is carried inside its work request, bytes.
    pub inline_bytes_max: u32,
    /// The most READs in flight on one queue pair, in each direction.
    pub reads_max: u8,
    /// Longest message, bytes.
    pub message_bytes_max: u32,
    /// Optional abilities. With `DMABUF`, any file that can be mapped stands in for a dma-buf.
    pub features: DeviceFeatures,
}

impl Default for DeviceConfig {
    fn default() -> Self {
        Self {
            name: String::new(),
            numa_node: None,
            infiniband: false,
            mtu_bytes: 4096,
            gids: Vec::new(),
            mr_bytes_max: 1 << 40,
            mr_count_max: 1 << 16,
            pinned_bytes_max: u64::MAX,
            qp_count_max: 1 << 12,
            qp_depth_max: 1 << 12,
            cq_depth: 1 << 14,
            sge_max: 16,
            inline_bytes_max: 256,
            reads_max: 16,
            message_bytes_max: 1 << 30,
            features: DeviceFeatures::RELAXED_ORDERING,
        }
    }
}

/// The one port of a device, numbered in the order in which devices were added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortId(pub(super) usize);

/// How a target refuses requests that are in order and allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// "Receiver not ready": the sender waits and tries again.
    NotReady,
    /// "Remote operational error": both queue pairs go to the error state.
    Failed,
}

/// Counters since the fabric was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SimCounters {
    /// Work requests that queue pairs took.
    pub posted: u64,
    /// Work requests that succeeded, signaled or not.
    pub succeeded: u64,
    /// Work requests that put their queue pair in error.
    pub failed: u64,
    /// Work requests that were flushed.
    pub flushed: u64,
    /// Request packets that were sent, repetitions included.
    pub packets: u64,
    /// Packets that did not arrive, requests and responses.
    pub lost: u64,
    /// Packets that a target had received before.
    pub duplicates: u64,
    /// How often a sender went back to repeat packets.
    pub retried: u64,
    /// Requests that a target refused for good.
    pub refused: u64,
    /// WRITE packets that were executed when their sender was in error or destroyed: late writes, which
    /// fences exist for (L5).
    pub landed_late: u64,
}

pub(super) fn errno(code: i32) -> Error {
    Error::with_code(ErrorKind::System, code)
}
