//! Runs the contract's conformance suite on the transport, in both modes, alone and through `MultiTransport`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use common::{MIB, PoolFile};
use te_core::testkit::{CountingAlloc, Harness, Hook, Pair, Side, WallClock};
use te_core::{HealthConfig, HealthRoute, Instant, MemSpan, MultiTransport, Transport};
use te_cxl::{Coherence, CxlTransport, Export, Pool};

#[global_allocator]
static ALLOCATIONS: CountingAlloc<std::alloc::System> = CountingAlloc::new(std::alloc::System);

mod flush {
    te_core::conformance_tests!(super::CxlHarness { coherence: super::Coherence::Flush, multi: false }, skips [after_a_fence_nothing_lands, after_a_fence_nothing_lands_that_a_stalled_target_held_back, when_the_target_dies_every_slice_ends_once, a_cut_connection_ends_every_slice_and_heals]);
}

mod hardware {
    te_core::conformance_tests!(super::CxlHarness { coherence: super::Coherence::Hardware, multi: false }, skips [after_a_fence_nothing_lands, after_a_fence_nothing_lands_that_a_stalled_target_held_back, a_slice_off_the_granule_is_refused_before_a_byte_moves, when_the_target_dies_every_slice_ends_once, a_cut_connection_ends_every_slice_and_heals]);
}

mod flush_through_multi {
    te_core::conformance_tests!(super::CxlHarness { coherence: super::Coherence::Flush, multi: true }, skips [after_a_fence_nothing_lands, after_a_fence_nothing_lands_that_a_stalled_target_held_back, when_the_target_dies_every_slice_ends_once, a_cut_connection_ends_every_slice_and_heals]);
}

mod hardware_through_multi {
    te_core::conformance_tests!(super::CxlHarness { coherence: super::Coherence::Hardware, multi: true }, skips [after_a_fence_nothing_lands, after_a_fence_nothing_lands_that_a_stalled_target_held_back, a_slice_off_the_granule_is_refused_before_a_byte_moves, when_the_target_dies_every_slice_ends_once, a_cut_connection_ends_every_slice_and_heals]);
}

const INITIATOR: u64 = 0x1111;
const TARGET: u64 = 0x2222;
/// Extents of 2 MiB that the target claims.
const EXTENTS: u32 = 6;

struct CxlHarness {
    coherence: Coherence,
    multi: bool,
}

impl Harness for CxlHarness {
    fn pair(&mut self) -> Box<dyn Pair + '_> {
        let file = PoolFile::new(16 * MIB, 8);
        let Self { coherence, multi } = *self;
        let (_, initiator) = file.transport(coherence, 0, INITIATOR);
        let mut pair = CxlPair {
            coherence,
            multi,
            initiator: boxed(initiator, multi),
            target: None,
            pools: Vec::new(),
            memory: None,
            used: Cell::new(0),
            file,
            clock: WallClock::new(Duration::ZERO),
        };
        pair.start_target(1);
        Box::new(pair)
    }

    fn skip(&self, case: &str) -> Option<&'static str> {
        (case == "when_the_target_dies_every_slice_ends_once").then_some(
            "the memory of a pool stays reachable when its owner dies, until the master gives it away",
        )
    }
}

fn boxed(transport: CxlTransport, multi: bool) -> Box<dyn Transport> {
    if !multi {
        return Box::new(transport);
    }
    let route = HealthRoute::new(&[100], HealthConfig::default());
    Box::new(MultiTransport::new([transport], route, 512).unwrap())
}

struct CxlPair {
    coherence: Coherence,
    multi: bool,
    initiator: Box<dyn Transport>,
    target: Option<Box<dyn Transport>>,
    /// The mappings of all targets: the suite looks at the memory of a dead one.
    pools: Vec<Arc<Pool>>,
    /// The extents of the target, in its mapping.
    memory: Option<MemSpan>,
    used: Cell<u64>,
    file: PoolFile,
    clock: WallClock,
}

impl CxlPair {
    fn start_target(&mut self, incarnation: u64) {
        let (pool, transport) = self.file.transport(self.coherence, 1, TARGET);
        // The suite keeps the memory of the first target: the second one registers spans of that mapping.
        let pool = match self.pools.first() {
            None => pool,
            Some(first) => {
                drop(transport);
                let seat = Some(te_cxl::Seat { slot: 1, epoch: self.file.epoch() });
                let mount = te_cxl::Mount { pool: first.clone(), seat };
                let config = te_cxl::Config {
                    coherence: self.coherence,
                    identity: TARGET,
                    ..te_cxl::Config::default()
                };
                let transport = CxlTransport::new(config, vec![mount]).unwrap();
                first.claim(self.file.claim(0, EXTENTS, incarnation)).unwrap();
                self.target = Some(boxed(transport, self.multi));
                return;
            }
        };
        self.memory = Some(pool.claim(self.file.claim(0, EXTENTS, incarnation)).unwrap());
        self.pools.push(pool);
        self.target = Some(boxed(transport, self.multi));
    }
}

impl Pair for CxlPair {
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

    fn allocate(&mut self, side: Side, bytes: usize) -> Option<MemSpan> {
        if side == Side::Initiator {
            return None;
        }
        let at = self.used.get();
        self.used.set((at + bytes as u64).next_multiple_of(4096));
        Some(self.memory.unwrap().part(at, bytes as u64).expect("the suite fits into the extents"))
    }

    fn key_bytes(&self, export: &[u8]) -> Option<Range<usize>> {
        // Through `MultiTransport`, an export has a header for each rail.
        let at = export.len() - Export::BYTES + Export::KEY_AT;
        Some(at..at + 16)
    }

    fn initiator_identity(&self) -> Option<u64> {
        Some(INITIATOR)
    }

    fn kill_target(&mut self) -> Hook {
        // A process that is killed says nothing in the pool.
        std::mem::forget(self.target.take());
        Hook::Done
    }

    fn restart_target(&mut self) -> Hook {
        self.start_target(2);
        Hook::Done
    }

    fn stall_target(&mut self, _stalled: bool) -> Hook {
        // Only the suite polls it.
        Hook::Done
    }

    fn cut(&mut self) -> Hook {
        Hook::Unsupported("there is no connection")
    }
}
