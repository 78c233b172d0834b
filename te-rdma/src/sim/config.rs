//! What a simulated device and the links between devices are like. Plain data.

use te_core::{Error, ErrorKind};

use crate::sys::verbs::{DeviceFeatures, Gid};

/// How time passes on the fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Virtual time, moved by [`SimFabric::advance_to`](super::SimFabric::advance_to) alone. Messages are cut
    /// into packets of the path MTU, and every packet takes its link's latency.
    Timed,
    /// Every poll, of any device, first lets time run until nothing is under way. A message is one packet.
    /// For benches and for tests with threads: nothing is late, timeouts take no time.
    Immediate,
}

/// One direction between two ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkConfig {
    /// A packet's flight, nanoseconds.
    pub latency_ns: u64,
    /// Up to so much more, drawn for each packet. Packets of one queue pair never overtake each other.
    pub jitter_ns: u64,
    /// Bytes a second that one queue pair sends; 0: no limit.
    pub bytes_per_s: u64,
    /// Packets lost, in a million.
    pub loss_ppm: u32,
    /// Packets that arrive twice, in a million.
    pub duplicate_ppm: u32,
    /// Packets held up by `hold_ns`, and all behind them, in a million.
    pub hold_ppm: u32,
    /// See `hold_ppm`.
    pub hold_ns: u64,
    /// Nothing passes.
    pub down: bool,
}

impl LinkConfig {
    /// No loss, a microsecond's flight.
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
    /// No loss, no flight.
    pub const INSTANT: Self = Self { latency_ns: 0, ..Self::CALM };
}

/// The fabric as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimConfig {
    /// How time passes.
    pub pace: Pace,
    /// What every link starts as.
    pub link: LinkConfig,
    /// Wait after "receiver not ready", nanoseconds.
    pub rnr_wait_ns: u64,
}

impl SimConfig {
    /// Virtual time, calm links.
    pub const TIMED: Self = Self { pace: Pace::Timed, link: LinkConfig::CALM, rnr_wait_ns: 640_000 };
    /// Everything arrives at the next poll.
    pub const IMMEDIATE: Self =
        Self { pace: Pace::Immediate, link: LinkConfig::INSTANT, rnr_wait_ns: 640_000 };
}

/// One device with one port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Name; empty: `sim0`, `sim1`, … by the order in which devices were added.
    pub name: String,
    /// NUMA node.
    pub numa_node: Option<u16>,
    /// InfiniBand, found by LID, or Ethernet (RoCE), found by GID.
    pub infiniband: bool,
    /// Path MTU, bytes.
    pub mtu_bytes: u32,
    /// The GID table. Empty: a RoCE v1 and a RoCE v2 entry (or one InfiniBand entry) that no other device
    /// has.
    pub gids: Vec<Option<Gid>>,
    /// Longest registration, bytes.
    pub mr_bytes_max: u64,
    /// Registrations at a time.
    pub mr_count_max: u32,
    /// Bytes registered at a time, as `RLIMIT_MEMLOCK` limits them.
    pub pinned_bytes_max: u64,
    /// Queue pairs at a time.
    pub qp_count_max: u32,
    /// Work requests in one send queue.
    pub qp_depth_max: u32,
    /// Entries of the completion queue.
    pub cq_depth: u32,
    /// Pieces of one work request.
    pub sge_max: u32,
    /// Bytes inside a work request.
    pub inline_bytes_max: u32,
    /// READs in flight on one queue pair, each way.
    pub reads_max: u8,
    /// Longest message, bytes.
    pub message_bytes_max: u32,
    /// Abilities.
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

/// A device's one port, by the order in which devices were added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortId(pub(super) usize);

/// How a target turns requests away that are in order and allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// "Receiver not ready": the sender waits and tries again.
    NotReady,
    /// "Remote operational error": both queue pairs end in error.
    Failed,
}

/// What has happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SimCounters {
    /// Work requests taken.
    pub posted: u64,
    /// Work requests that ended well, signaled or not.
    pub succeeded: u64,
    /// Work requests that put their queue pair in error.
    pub failed: u64,
    /// Work requests flushed.
    pub flushed: u64,
    /// Request packets that left, again or for the first time.
    pub packets: u64,
    /// Packets that arrived nowhere, requests and answers.
    pub lost: u64,
    /// Packets that a target had seen before.
    pub duplicates: u64,
    /// Times that a sender went back.
    pub retried: u64,
    /// Requests that a target turned away for good.
    pub refused: u64,
    /// WRITE packets carried out when their sender was in error or gone already: what fences are for (L5).
    pub landed_late: u64,
}

pub(super) fn errno(code: i32) -> Error {
    Error::with_code(ErrorKind::System, code)
}
