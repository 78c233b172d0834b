//! What initiator and target borrow for one call, so that each of them holds only its own state.

use core::time::Duration;

use te_core::Instant;
use te_fabric::Timers;

use crate::config::Config;
use crate::io::Io;
use crate::region::Regions;

/// The parts that initiator and target share.
pub(crate) struct Context<'a> {
    pub(crate) config: &'a Config,
    pub(crate) io: &'a mut Io,
    pub(crate) regions: &'a mut Regions,
    pub(crate) timers: &'a mut Timers,
}

impl Context<'_> {
    /// The time of the current poll; between polls, that of the last one.
    pub(crate) fn now(&self) -> Instant {
        self.timers.now()
    }

    /// The time `ms` milliseconds from now.
    pub(crate) fn after_ms(&self, ms: u64) -> Instant {
        self.timers.now() + Duration::from_millis(ms)
    }
}

/// What the unit tests of initiator and target lend them.
#[cfg(test)]
pub(crate) mod testing {
    use te_core::{Access, Location, RegionId};

    use super::*;
    use crate::region::{Ext, Region};
    use crate::sys::{Memory, Pinned};

    /// The region that [`Lent::region`] registers.
    pub(crate) const REGION: RegionId = RegionId::new(0, 1);
    /// The key that peers must present for it.
    pub(crate) const KEY: u64 = 77;

    /// The shared parts of a transport that listens on loopback.
    pub(crate) struct Lent {
        pub(crate) config: Config,
        pub(crate) io: Io,
        pub(crate) regions: Regions,
        pub(crate) timers: Timers,
    }

    impl Lent {
        pub(crate) fn new(config: Config) -> Self {
            let io = Io::open(&config).expect("loopback");
            let mut timers = Timers::new();
            timers.begin(Instant::from_millis(1_000));
            Self { io, regions: Regions::new(config.regions_max), timers, config }
        }

        /// Registers memory of `bytes` bytes that are all `fill`, with every right.
        pub(crate) fn region(&mut self, bytes: usize, fill: u8) -> Pinned {
            let memory = Pinned::leaked(vec![fill; bytes]);
            let region = Region::new(
                REGION,
                bytes as u64,
                Location::Host,
                Access::all(),
                KEY,
                Ext { memory: Memory::of(memory), peers: 0 },
            );
            self.regions.insert(REGION.index, region).expect("an empty table");
            memory
        }

        pub(crate) fn cx(&mut self) -> Context<'_> {
            let Self { config, io, regions, timers } = self;
            Context { config, io, regions, timers }
        }

        /// How many own slices and how many payloads of peers use the region.
        pub(crate) fn users(&self) -> (u32, u32) {
            self.regions.find(REGION).map_or((0, 0), |region| (region.pins, region.ext.peers))
        }
    }
}
