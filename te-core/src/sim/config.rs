//! What the simulated fabric does to packets.

use core::time::Duration;

use crate::Features;

/// One direction between two nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkConfig {
    /// Shortest time on the wire.
    pub latency_min: Duration,
    /// Longest time on the wire.
    pub latency_max: Duration,
    /// Bytes that leave in a second; packets queue behind one another.
    pub bytes_per_s: u64,
    /// Packets lost, per million: requests and answers alike.
    pub loss_ppm: u32,
    /// Of the lost WRITEs, those that land late after all, per million.
    pub late_ppm: u32,
    /// How late, at most.
    pub late_max: Duration,
    /// Packets held back so that later ones overtake them, per million.
    pub reorder_ppm: u32,
    /// How long they are held back, at most.
    pub reorder_max: Duration,
}

impl LinkConfig {
    /// A good day: 5 to 15 µs, 10 GB/s, nothing lost.
    pub const CALM: Self = Self {
        latency_min: Duration::from_micros(5),
        latency_max: Duration::from_micros(15),
        bytes_per_s: 10_000_000_000,
        loss_ppm: 0,
        late_ppm: 0,
        late_max: Duration::from_secs(60),
        reorder_ppm: 0,
        reorder_max: Duration::from_micros(200),
    };

    /// A bad day: one packet in twenty lost, half of those WRITEs land up to a minute later, one in five overtaken.
    pub const STORMY: Self = Self {
        latency_max: Duration::from_micros(80),
        loss_ppm: 50_000,
        late_ppm: 500_000,
        reorder_ppm: 200_000,
        ..Self::CALM
    };
}

/// The fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimConfig {
    /// What [`Transport::name`](crate::Transport::name) says; rails of one `MultiTransport` need names of their own.
    pub name: &'static str,
    /// Every link, unless [`SimNet::set_link`](super::SimNet::set_link) says otherwise.
    pub link: LinkConfig,
    /// How long an initiator waits for an answer before it gives a slice or fence up.
    pub timeout: Duration,
    /// How long a cancel takes, at most.
    pub cancel_max: Duration,
    /// How long it takes to notice that a link is down or a peer gone.
    pub detect: Duration,
    /// Slices and fences a node may have in flight, each.
    pub inflight_max: u32,
    /// Longest slice, bytes.
    pub slice_bytes_max: u32,
    /// What a slicer should cut to, bytes.
    pub slice_bytes_preferred: u32,
    /// `READ`, `WRITE` or both; fences always work.
    pub features: Features,
    /// What remote offsets and lengths have to be multiples of, bytes; a power of two.
    pub granule_bytes: u32,
}

impl SimConfig {
    /// [`LinkConfig::CALM`] everywhere.
    pub const CALM: Self = Self {
        name: "sim",
        link: LinkConfig::CALM,
        timeout: Duration::from_millis(20),
        cancel_max: Duration::from_micros(20),
        detect: Duration::from_millis(1),
        inflight_max: 256,
        slice_bytes_max: 1 << 20,
        slice_bytes_preferred: 64 << 10,
        features: Features::READ.union(Features::WRITE),
        granule_bytes: 1,
    };

    /// [`LinkConfig::STORMY`] everywhere.
    pub const STORMY: Self = Self { link: LinkConfig::STORMY, ..Self::CALM };
}

impl Default for SimConfig {
    fn default() -> Self {
        Self::CALM
    }
}
