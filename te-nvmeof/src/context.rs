//! What initiator and target borrow for one call, and the regions that they share.

use core::time::Duration;

use te_core::Instant;
use te_fabric::{Epoll, Timers};

use crate::config::Config;
use crate::stats::Stats;
use crate::sys::{Buffers, Pinned};

/// What this fabric keeps with a region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RegionExt {
    /// The memory; `None` for a range of a namespace of another target, which is adopted and has none.
    pub(crate) memory: Option<Pinned>,
    /// Payloads of hosts that are being moved into it or out of it.
    pub(crate) peers: u32,
    /// The namespace as which it is served; 0 for none.
    pub(crate) nsid: u32,
}

pub(crate) type Region = te_fabric::Region<RegionExt>;
pub(crate) type Regions = te_fabric::Regions<RegionExt>;

/// One more payload of a host uses the region.
pub(crate) fn peer_begins(regions: &mut Regions, index: u32) {
    if let Some(region) = regions.get_mut(index) {
        region.ext.peers += 1;
    }
}

/// One payload of a host fewer uses the region.
pub(crate) fn peer_ends(regions: &mut Regions, index: u32) {
    if let Some(region) = regions.get_mut(index) {
        debug_assert!(region.ext.peers > 0, "a payload ends once");
        region.ext.peers -= 1;
    }
}

/// The parts that initiator and target share.
pub(crate) struct Context<'a> {
    pub(crate) config: &'a Config,
    pub(crate) epoll: &'a Epoll,
    pub(crate) buffers: &'a mut Buffers,
    pub(crate) regions: &'a mut Regions,
    pub(crate) timers: &'a mut Timers,
    pub(crate) stats: &'a mut Stats,
}

impl Context<'_> {
    /// The time of the current poll; between polls, that of the last one.
    pub(crate) fn now(&self) -> Instant {
        self.timers.now()
    }

    /// The time `ms` milliseconds from now.
    pub(crate) fn after_ms(&self, ms: u32) -> Instant {
        self.timers.now() + Duration::from_millis(ms.into())
    }
}

/// Which part an event of the poller belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watched {
    Listener,
    /// A connection of a host, by its name in the target.
    Host(u32),
    /// A queue of ours, by its name in the initiator.
    Queue(u32),
}

impl Watched {
    pub(crate) const fn token(self) -> u64 {
        match self {
            Self::Listener => 0,
            Self::Host(name) => 1 << 32 | name as u64,
            Self::Queue(name) => 2 << 32 | name as u64,
        }
    }

    pub(crate) const fn of(token: u64) -> Self {
        match token >> 32 {
            0 => Self::Listener,
            1 => Self::Host(token as u32),
            _ => Self::Queue(token as u32),
        }
    }
}
