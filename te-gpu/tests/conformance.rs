//! Runs the contract's conformance suite over TCP with memory of a fake driver at the initiator, at the
//! target and at both ends. A CPU that touches the memory faults.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use common::Fake;
use te_core::device::{Devices, Hop, HopEnd, Stager, StagingSlot};
use te_core::testkit::{
    ByPointer, CountingAlloc, Harness, Pair, PeekPoke, Side, Verdict, cases, each_seed, run_case,
};
use te_core::{Error, HealthConfig, HealthRoute, Location, MemSpan, MemoryKinds, MultiTransport};
use te_fabric::testkit::{Ends, EndsConfig, EndsMemory, Fabric};
use te_gpu::{Config as GpuConfig, Gpu};
use te_tcp::{Config, TcpTransport};

#[global_allocator]
static ALLOCATOR: CountingAlloc<std::alloc::System> = CountingAlloc::new(std::alloc::System);

/// The drivers at both ends, where there are any.
#[derive(Clone)]
struct Memories {
    initiator: Option<Arc<Fake>>,
    target: Option<Arc<Fake>>,
}

impl Memories {
    fn of(&self, span: MemSpan) -> Option<&Fake> {
        let ends = [&self.initiator, &self.target].into_iter().flatten();
        ends.map(|fake| &**fake).find(|fake| fake.location() == span.location())
    }
}

#[allow(unsafe_code, reason = "the suite's promise about the span is passed on")]
impl PeekPoke for Memories {
    unsafe fn peek(&self, span: MemSpan, out: &mut [u8]) {
        match self.of(span) {
            // SAFETY: the caller gives the same promise.
            Some(fake) => unsafe { fake.peek(span, out) },
            // SAFETY: as above.
            None => unsafe { ByPointer.peek(span, out) },
        }
    }

    unsafe fn poke(&self, span: MemSpan, bytes: &[u8]) {
        match self.of(span) {
            // SAFETY: the caller gives the same promise.
            Some(fake) => unsafe { fake.poke(span, bytes) },
            // SAFETY: as above.
            None => unsafe { ByPointer.poke(span, bytes) },
        }
    }
}

impl EndsMemory for Memories {
    fn allocate(&self, side: Side, bytes: usize) -> Option<MemSpan> {
        let fake = match side {
            Side::Initiator => &self.initiator,
            Side::Target => &self.target,
        };
        fake.as_ref().map(|fake| fake.allocate(bytes))
    }
}

/// Opens pairs of transports on this machine, with devices of two vendors.
struct Gpus {
    config: Config,
    /// Changes the small settings of the tests.
    staging: fn(GpuConfig) -> GpuConfig,
    memories: Memories,
    seed: Cell<i64>,
    /// Whether a poll of a stager waits until a hop has ended.
    is_patient: bool,
    /// Whether there are two rails.
    is_multi: bool,
    limits: EndsConfig,
}

impl Gpus {
    fn new(config: Config, staging: fn(GpuConfig) -> GpuConfig, ends: (bool, bool)) -> Self {
        let initiator = ends.0.then(|| Arc::new(Fake::cuda()));
        let target = ends.1.then(|| Arc::new(Fake::hip()));
        let memories = Memories { initiator, target };
        Self {
            config,
            staging,
            memories,
            seed: Cell::new(1),
            is_patient: false,
            is_multi: false,
            limits: LIMITS,
        }
    }
}

fn open(
    config: Config,
    fake: Option<&Fake>,
    (staging, is_patient): (fn(GpuConfig) -> GpuConfig, bool),
) -> TcpTransport {
    match fake {
        Some(fake) => {
            let gpu = fake.gpu(staging(fake.config()));
            let devices: Arc<dyn Devices> = if is_patient { Arc::new(Patient(gpu)) } else { Arc::new(gpu) };
            TcpTransport::with_devices(config, devices).unwrap()
        }
        None => TcpTransport::new(config).unwrap(),
    }
}

impl Harness for Gpus {
    fn skip(&self, case: &str) -> Option<&'static str> {
        // Forged exports of several rails are checked by another case.
        let of_one_rail = self.is_multi && case == "a_wrong_key_opens_nothing";
        of_one_rail.then_some("an export over several rails has a key for each")
    }

    fn pair(&mut self) -> Box<dyn Pair + '_> {
        self.seed.set(self.seed.get() + 1);
        let Memories { initiator, target } = &self.memories;
        for fake in [initiator, target].into_iter().flatten() {
            fake.set("seed", self.seed.get());
        }
        if self.is_multi {
            return Box::new(Rails::pair(self).with_memory(Rc::new(self.memories.clone())));
        }
        let here = open(self.config.clone(), initiator.as_deref(), (self.staging, self.is_patient));
        let there = open(self.config.clone(), target.as_deref(), (self.staging, self.is_patient));
        let (config, binds) = (self.config.clone(), [there.local_address(); 2]);
        let restart = Restart { config, binds, fake: target.clone(), staging: self.staging };
        Box::new(Ends::new(here, there, restart, self.limits).with_memory(Rc::new(self.memories.clone())))
    }
}

struct Restart {
    config: Config,
    /// Where the rails of the target listen.
    binds: [SocketAddr; 2],
    fake: Option<Arc<Fake>>,
    staging: fn(GpuConfig) -> GpuConfig,
}

impl Fabric for Restart {
    type Transport = TcpTransport;

    fn reopen(&mut self) -> TcpTransport {
        let config = Config { bind: self.binds[0], ..self.config.clone() };
        open(config, self.fake.as_deref(), (self.staging, false))
    }

    fn identity(transport: &TcpTransport) -> u64 {
        transport.identity()
    }

    fn cut(transport: &mut TcpTransport) {
        transport.close_connections();
    }
}

/// Two rails between the same ends.
struct Rails(Restart);

type Multi = MultiTransport<TcpTransport, HealthRoute>;

impl Rails {
    fn open(configs: [Config; 2], fake: Option<&Fake>, staging: fn(GpuConfig) -> GpuConfig) -> Multi {
        let rails = configs.map(|config| open(config, fake, (staging, false)));
        MultiTransport::new(rails, HealthRoute::new(&[100, 100], HealthConfig::default()), 300).unwrap()
    }

    fn pair(gpus: &Gpus) -> Ends<Self> {
        let Memories { initiator, target } = &gpus.memories;
        // Rails of one end have one identity.
        let of = |identity| [0, 1].map(|_| Config { identity, ..gpus.config.clone() });
        let here = Self::open(of(1), initiator.as_deref(), gpus.staging);
        let there = Self::open(of(2), target.as_deref(), gpus.staging);
        let binds = [0, 1].map(|rail: usize| there.rails()[rail].local_address());
        let config = gpus.config.clone();
        let restart = Restart { config, binds, fake: target.clone(), staging: gpus.staging };
        Ends::new(here, there, Self(restart), LIMITS)
    }
}

impl Fabric for Rails {
    type Transport = Multi;

    fn reopen(&mut self) -> Multi {
        let Restart { config, binds, fake, staging } = &self.0;
        let configs = binds.map(|bind| Config { bind, identity: 2, ..config.clone() });
        Self::open(configs, fake.as_deref(), *staging)
    }

    fn identity(transport: &Multi) -> u64 {
        transport.rails()[0].identity()
    }

    fn cut(transport: &mut Multi) {
        transport.rails_mut().iter_mut().for_each(TcpTransport::close_connections);
    }
}

const LIMITS: EndsConfig =
    EndsConfig { patience: Duration::from_secs(30), late_max: Duration::from_millis(30) };

fn plain() -> Config {
    Config {
        peer_silence_ms_max: 2_000,
        connect_ms_max: 2_000,
        slice_bytes_max: 1 << 20,
        ..Config::default()
    }
}

/// Devices whose stagers have ended a hop by the next poll, as if hops took no time.
struct Patient(Gpu);

impl Devices for Patient {
    fn locate(&self, ptr: *mut u8, len: usize) -> Option<Location> {
        self.0.locate(ptr, len)
    }

    fn kinds(&self) -> MemoryKinds {
        self.0.kinds()
    }

    fn stager(&self, location: Location) -> Result<Box<dyn Stager>, Error> {
        Ok(Box::new(PatientStager { inner: self.0.stager(location)?, running: 0 }))
    }
}

struct PatientStager {
    inner: Box<dyn Stager>,
    running: usize,
}

#[allow(unsafe_code, reason = "forwards a stager")]
// SAFETY: everything is forwarded unchanged to a stager that keeps the promise.
unsafe impl Stager for PatientStager {
    fn slot_bytes(&self) -> u32 {
        self.inner.slot_bytes()
    }

    fn take(&mut self) -> Option<StagingSlot> {
        self.inner.take()
    }

    fn give_back(&mut self, slot: StagingSlot) {
        self.inner.give_back(slot);
    }

    fn start(&mut self, hops: &[Hop]) -> Result<usize, Error> {
        let started = self.inner.start(hops)?;
        self.running += started;
        Ok(started)
    }

    fn poll(&mut self, out: &mut [HopEnd]) -> usize {
        let mut ended = self.inner.poll(out);
        while ended == 0 && self.running > 0 {
            std::thread::yield_now();
            ended = self.inner.poll(out);
        }
        self.running -= ended;
        ended
    }
}

/// So few slots that nearly every piece waits for one, and a length that divides nothing.
fn tiny(config: GpuConfig) -> GpuConfig {
    GpuConfig { slot_bytes: 5_001, ring_bytes: 2 * 5_001, hops_max: 16, ..config }
}

fn small(config: GpuConfig) -> GpuConfig {
    config
}

/// The two cases that need a WRITE whose bytes have left when it is cancelled: they poll the initiator a few
/// times, in which a hop has to end. The modules below may skip them.
#[test]
fn after_a_fence_nothing_lands_on_or_from_a_device() {
    for ends in [(true, true), (true, false), (false, true)] {
        for case in
            ["after_a_fence_nothing_lands", "after_a_fence_nothing_lands_that_a_stalled_target_held_back"]
        {
            let mut gpus = Gpus { is_patient: true, ..Gpus::new(plain(), small, ends) };
            assert_eq!(run_case(case, &mut gpus), Verdict::Passed, "{case}");
        }
    }
}

macro_rules! on_devices {
    ($name:ident, $config:expr, $staging:expr, $ends:expr, skips $skips:tt) => {
        mod $name {
            use super::*;

            te_core::conformance_tests!(Gpus::new($config, $staging, $ends), skips $skips, may_skip [
                after_a_fence_nothing_lands,
                after_a_fence_nothing_lands_that_a_stalled_target_held_back,
            ]);
        }
    };
}

fn two_rails() -> Gpus {
    Gpus { is_multi: true, ..Gpus::new(plain(), small, (true, true)) }
}

mod over_two_rails {
    te_core::conformance_tests!(super::two_rails(), skips [
        a_slice_off_the_granule_is_refused_before_a_byte_moves,
        a_caller_driven_transport_releases_memory_in_the_next_poll,
        what_a_peer_writes_shows_through_a_volatile_span,
        a_peer_reads_what_was_written_through_a_volatile_span,
        a_wrong_key_opens_nothing,
    ], may_skip [
        after_a_fence_nothing_lands,
        after_a_fence_nothing_lands_that_a_stalled_target_held_back,
    ]);
}

on_devices!(both_ends, plain(), small, (true, true), skips [
    a_slice_off_the_granule_is_refused_before_a_byte_moves,
    a_caller_driven_transport_releases_memory_in_the_next_poll,
    what_a_peer_writes_shows_through_a_volatile_span,
    a_peer_reads_what_was_written_through_a_volatile_span,
]);

on_devices!(few_small_slots, Config { connections: 3, checksum: true, ..plain() }, tiny, (true, true), skips [
    a_slice_off_the_granule_is_refused_before_a_byte_moves,
    a_caller_driven_transport_releases_memory_in_the_next_poll,
    what_a_peer_writes_shows_through_a_volatile_span,
    a_peer_reads_what_was_written_through_a_volatile_span,
]);

on_devices!(at_the_initiator, plain(), small, (true, false), skips [
    a_slice_off_the_granule_is_refused_before_a_byte_moves,
    a_caller_driven_transport_releases_memory_in_the_next_poll,
]);

on_devices!(at_the_target, plain(), tiny, (false, true), skips [
    a_slice_off_the_granule_is_refused_before_a_byte_moves,
    what_a_peer_writes_shows_through_a_volatile_span,
    a_peer_reads_what_was_written_through_a_volatile_span,
]);

/// Cases in which bytes move, over many seeds of the driver's delays: 40 by default, which is five for each
/// case. `SNOWSKIN_SEEDS=200`, or more, runs 25 for each.
const MOVING: [&str; 8] = [
    "a_write_puts_the_bytes_there_at_odd_offsets_and_lengths",
    "a_read_brings_the_bytes_at_odd_offsets_and_lengths",
    "a_finished_read_never_writes_again",
    "a_cancelled_read_never_writes_again",
    "the_source_of_a_finished_write_is_free_for_reuse",
    "outcomes_are_honest_under_cancels",
    "after_a_fence_nothing_lands",
    "submit_and_poll_do_not_allocate",
];

fn seeds(ends: (bool, bool)) {
    assert!(MOVING.iter().all(|name| cases().iter().any(|case| case.name == *name)));
    let limits = EndsConfig { late_max: Duration::from_millis(3), ..LIMITS };
    let mut gpus = Gpus { limits, ..Gpus::new(plain(), small, ends) };
    for seed in each_seed(0..40) {
        gpus.seed.set(seed as i64 * 16);
        let name = MOVING[seed as usize % MOVING.len()];
        gpus.is_patient = name == "after_a_fence_nothing_lands";
        assert_eq!(run_case(name, &mut gpus), Verdict::Passed, "{name}");
    }
}

#[test]
fn many_seeds_at_both_ends() {
    seeds((true, true));
}

#[test]
fn many_seeds_at_the_initiator() {
    seeds((true, false));
}

#[test]
fn many_seeds_at_the_target() {
    seeds((false, true));
}
