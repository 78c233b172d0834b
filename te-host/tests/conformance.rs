//! Runs the contract's conformance suite on the two fabrics within a host.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use te_core::testkit::{CountingAlloc, Harness, Hook, Pair, Side, WallClock};
use te_core::{Instant, MemSpan, Transport};
use te_host::{AllocOptions, LocalConfig, LocalTransport, SharedMemory, ShmConfig, ShmTransport};

#[global_allocator]
static ALLOCATIONS: CountingAlloc<std::alloc::System> = CountingAlloc::new(std::alloc::System);

mod local {
    te_core::conformance_tests!(super::HostHarness { fabric: super::Fabric::Local }, skips [a_slice_off_the_granule_is_refused_before_a_byte_moves, when_the_target_dies_every_slice_ends_once, after_a_restart_an_old_remote_region_is_refused_and_never_misread, after_a_restart_a_new_export_works, a_fence_to_a_dead_target_ends, a_fence_after_a_restart_ends_and_holds, a_cut_connection_ends_every_slice_and_heals]);
}

mod shm {
    te_core::conformance_tests!(super::HostHarness { fabric: super::Fabric::Shm }, skips [a_slice_off_the_granule_is_refused_before_a_byte_moves, after_a_restart_an_old_remote_region_is_refused_and_never_misread, after_a_restart_a_new_export_works, a_fence_to_a_dead_target_ends, a_fence_after_a_restart_ends_and_holds, a_cut_connection_ends_every_slice_and_heals]);
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fabric {
    Local,
    Shm,
}

const INITIATOR: u64 = 0x1111;
const TARGET: u64 = 0x2222;

struct HostHarness {
    fabric: Fabric,
}

impl Fabric {
    fn open(self, identity: u64) -> Box<dyn Transport> {
        match self {
            Self::Local => Box::new(LocalTransport::new(LocalConfig::of(identity)).unwrap()),
            Self::Shm => {
                let mut config = ShmConfig::default();
                config.identity = identity;
                Box::new(ShmTransport::new(config).unwrap())
            }
        }
    }
}

impl Harness for HostHarness {
    fn pair(&mut self) -> Box<dyn Pair + '_> {
        Box::new(HostPair {
            fabric: self.fabric,
            initiator: self.fabric.open(INITIATOR),
            target: Some(self.fabric.open(TARGET)),
            clock: WallClock::new(Duration::ZERO),
            memory: Vec::new(),
        })
    }
}

struct HostPair {
    fabric: Fabric,
    initiator: Box<dyn Transport>,
    target: Option<Box<dyn Transport>>,
    clock: WallClock,
    memory: Vec<Arc<SharedMemory>>,
}

impl Pair for HostPair {
    fn initiator(&mut self) -> &mut dyn Transport {
        &mut self.initiator
    }

    fn target(&mut self) -> &mut dyn Transport {
        self.target.as_mut().expect("the suite does not use a dead target")
    }

    fn tick(&mut self) -> Instant {
        self.clock.tick()
    }

    fn late_max(&self) -> Duration {
        // Bytes move inside the initiator's `poll`, so nothing can be late.
        Duration::from_millis(5)
    }

    fn allocate(&mut self, _side: Side, bytes: usize) -> Option<MemSpan> {
        if self.fabric == Fabric::Local {
            return None;
        }
        let options = AllocOptions { peers_may_write: true, populate: false, huge_pages: true };
        let memory = SharedMemory::new(bytes, options).unwrap();
        let span = memory.span();
        self.memory.push(memory);
        Some(span)
    }

    fn address_bytes(&self, _export: &[u8]) -> Range<usize> {
        match self.fabric {
            Fabric::Local => 1..17,
            Fabric::Shm => 1..33,
        }
    }

    fn key_bytes(&self, _export: &[u8]) -> Option<Range<usize>> {
        match self.fabric {
            Fabric::Local => Some(25..41),
            Fabric::Shm => Some(41..57),
        }
    }

    fn initiator_identity(&self) -> Option<u64> {
        Some(INITIATOR)
    }

    fn kill_target(&mut self) -> Hook {
        if self.fabric == Fabric::Local {
            return Hook::Unsupported("initiator and target are the same process");
        }
        self.target = None;
        Hook::Done
    }

    fn restart_target(&mut self) -> Hook {
        Hook::Unsupported("a new process listens under a new name; nothing listens under the old one")
    }

    fn stall_target(&mut self, _stalled: bool) -> Hook {
        // Only the suite polls it.
        Hook::Done
    }

    fn cut(&mut self) -> Hook {
        Hook::Unsupported("the kernel does not cut connections within a host")
    }
}
