//! What the simulated fabric does to packets.

use core::time::Duration;

use crate::Features;

/// One direction between two nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinkConfig {
    /// The shortest time on the wire.
    pub latency_min: Duration,
    /// The longest time on the wire.
    pub latency_max: Duration,
    /// The bytes that leave per second; packets queue behind one another.
    pub bytes_per_s: u64,
    /// Packets that are lost, per million: requests and responses alike.
    pub loss_ppm: u32,
    /// Of the lost WRITEs, those that land late, per million.
    pub late_ppm: u32,
    /// How late they land, at most.
    pub late_max: Duration,
    /// Packets that are held back so that later ones overtake them, per million.
    pub reorder_ppm: u32,
    /// How long they are held back, at most.
    pub reorder_max: Duration,
}

impl LinkConfig {
    /// A reliable link: 5 to 15 µs, 10 GB/s, no losses.
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

    /// An unreliable link: one packet in twenty is lost, half of the lost WRITEs land up to a minute later,
    /// one packet in five is overtaken.
    pub const STORMY: Self = Self {
        latency_max: Duration::from_micros(80),
        loss_ppm: 50_000,
        late_ppm: 500_000,
        reorder_ppm: 200_000,
        ..Self::CALM
    };
}

/// The whole fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SimConfig {
    /// The name of its transports; the rails of one `MultiTransport` need different names.
    pub name: &'static str,
    /// Every link without a configuration by [`SimNet::set_link`](super::SimNet::set_link).
    pub link: LinkConfig,
    /// How long an initiator waits for a response before a slice or fence ends.
    pub timeout: Duration,
    /// How long a cancel takes, at most.
    pub cancel_max: Duration,
    /// How long it takes to notice that a link is down or a peer is dead.
    pub detect: Duration,
    /// The largest number of slices that a node may have in flight; the same limit holds for fences.
    pub inflight_max: u32,
    /// The longest slice, in bytes.
    pub slice_bytes_max: u32,
    /// The preferred length of slices, in bytes.
    pub slice_bytes_preferred: u32,
    /// `READ`, `WRITE` or both; fences always work.
    pub features: Features,
    /// The granule of remote offsets and lengths, in bytes; a power of two.
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
