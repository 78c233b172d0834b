//! Runs the contract's conformance suite over memory that the CPU cannot access, at both ends and at one end.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use te_core::testkit::{CountingAlloc, FakeDevices, FakeStaging, Harness, Hook, Pair, PeekPoke, Side};
use te_core::{GpuVendor, Instant, Location, MemSpan, Transport};
use te_fabric::testkit::{Ends, EndsConfig, Fabric};
use te_tcp::{Config, TcpTransport};

#[global_allocator]
static ALLOCATOR: CountingAlloc<std::alloc::System> = CountingAlloc::new(std::alloc::System);

const HERE: Location = Location::Device(GpuVendor::Nvidia, 0);
const THERE: Location = Location::Device(GpuVendor::Amd, 1);

/// Memory of the devices at both ends, where there are any, and the host's.
#[derive(Clone)]
struct Memories {
    initiator: Option<FakeDevices>,
    target: Option<FakeDevices>,
}

impl Memories {
    fn of(&self, location: Location) -> Option<&FakeDevices> {
        [&self.initiator, &self.target].into_iter().flatten().find(|device| device.location() == location)
    }
}

impl PeekPoke for Memories {
    #[allow(unsafe_code, reason = "the suite's promise about the span is passed on")]
    unsafe fn peek(&self, span: MemSpan, out: &mut [u8]) {
        // SAFETY: the caller gives the same promise.
        unsafe { self.of(span.location()).unwrap().peek(span, out) }
    }

    #[allow(unsafe_code, reason = "the suite's promise about the span is passed on")]
    unsafe fn poke(&self, span: MemSpan, bytes: &[u8]) {
        // SAFETY: the caller gives the same promise.
        unsafe { self.of(span.location()).unwrap().poke(span, bytes) }
    }
}

/// Opens pairs of transports on this machine, with devices.
struct Devices {
    config: Config,
    staging: FakeStaging,
    /// Whether initiator and target have a device.
    ends: (bool, bool),
    seed: Cell<u64>,
}

impl Devices {
    fn new(config: Config, staging: FakeStaging, ends: (bool, bool)) -> Self {
        Self { config, staging, ends, seed: Cell::new(1) }
    }

    fn device(&self, location: Location, wanted: bool) -> Option<FakeDevices> {
        self.seed.set(self.seed.get() + 1);
        wanted.then(|| FakeDevices::new(self.seed.get(), location, self.staging))
    }
}

fn open(config: Config, devices: Option<&FakeDevices>) -> TcpTransport {
    match devices {
        Some(devices) => TcpTransport::with_devices(config, Arc::new(devices.clone())).unwrap(),
        None => TcpTransport::new(config).unwrap(),
    }
}

impl Harness for Devices {
    fn pair(&mut self) -> Box<dyn Pair + '_> {
        let memories =
            Memories { initiator: self.device(HERE, self.ends.0), target: self.device(THERE, self.ends.1) };
        let initiator = open(self.config.clone(), memories.initiator.as_ref());
        let target = open(self.config.clone(), memories.target.as_ref());
        let config = Config { bind: target.local_address(), ..self.config.clone() };
        let restart = Restart { config, devices: memories.target.clone() };
        let limits = EndsConfig { patience: Duration::from_secs(20), late_max: Duration::from_millis(30) };
        Box::new(OnDevices { ends: Ends::new(initiator, target, restart, limits), memories })
    }
}

struct Restart {
    config: Config,
    devices: Option<FakeDevices>,
}

impl Fabric for Restart {
    type Transport = TcpTransport;

    fn reopen(&mut self) -> TcpTransport {
        open(self.config.clone(), self.devices.as_ref())
    }

    fn identity(transport: &TcpTransport) -> u64 {
        transport.identity()
    }

    fn cut(transport: &mut TcpTransport) {
        transport.close_connections();
    }
}

/// A pair whose memory is on the devices.
struct OnDevices {
    ends: Ends<Restart>,
    memories: Memories,
}

impl Pair for OnDevices {
    fn initiator(&mut self) -> &mut dyn Transport {
        self.ends.initiator()
    }

    fn target(&mut self) -> &mut dyn Transport {
        self.ends.target()
    }

    fn tick(&mut self) -> Instant {
        self.ends.tick()
    }

    fn patience(&self) -> Duration {
        self.ends.patience()
    }

    fn late_max(&self) -> Duration {
        self.ends.late_max()
    }

    fn allocate(&mut self, side: Side, bytes: usize) -> Option<MemSpan> {
        let devices = match side {
            Side::Initiator => &self.memories.initiator,
            Side::Target => &self.memories.target,
        };
        devices.as_ref().map(|devices| devices.allocate(bytes))
    }

    fn peek_poke(&self) -> Rc<dyn PeekPoke> {
        Rc::new(self.memories.clone())
    }

    fn address_bytes(&self, export: &[u8]) -> Range<usize> {
        self.ends.address_bytes(export)
    }

    fn key_bytes(&self, export: &[u8]) -> Option<Range<usize>> {
        self.ends.key_bytes(export)
    }

    fn initiator_identity(&self) -> Option<u64> {
        self.ends.initiator_identity()
    }

    fn kill_target(&mut self) -> Hook {
        self.ends.kill_target()
    }

    fn restart_target(&mut self) -> Hook {
        self.ends.restart_target()
    }

    fn stall_target(&mut self, stalled: bool) -> Hook {
        self.ends.stall_target(stalled)
    }

    fn cut(&mut self) -> Hook {
        self.ends.cut()
    }
}

fn plain() -> Config {
    Config {
        peer_silence_ms_max: 1_000,
        connect_ms_max: 1_000,
        slice_bytes_max: 4 << 20,
        #[cfg(feature = "uring")]
        driver: te_tcp::Driver::Uring,
        ..Config::default()
    }
}

/// So few slots that nearly every piece waits for one, and a length that divides nothing.
const TINY: FakeStaging = FakeStaging { slots: 2, slot_bytes: 3_001, hops_max: 1, polls_max: 5 };

macro_rules! on_devices {
    ($name:ident, $config:expr, $staging:expr, $ends:expr, skips $skips:tt) => {
        mod $name {
            use super::*;

            te_core::conformance_tests!(Devices::new($config, $staging, $ends), skips $skips);
        }
    };
}

on_devices!(both_ends, plain(), FakeStaging::default(), (true, true), skips [
    a_slice_off_the_granule_is_refused_before_a_byte_moves,
    a_caller_driven_transport_releases_memory_in_the_next_poll,
    what_a_peer_writes_shows_through_a_volatile_span,
    a_peer_reads_what_was_written_through_a_volatile_span,
]);

on_devices!(few_small_slots, Config { connections: 4, slice_bytes_max: 1 << 20, ..plain() }, TINY, (true, true), skips [
    a_slice_off_the_granule_is_refused_before_a_byte_moves,
    a_caller_driven_transport_releases_memory_in_the_next_poll,
    what_a_peer_writes_shows_through_a_volatile_span,
    a_peer_reads_what_was_written_through_a_volatile_span,
]);

on_devices!(with_checksums, Config { checksum: true, ..plain() }, FakeStaging::default(), (true, true), skips [
    a_slice_off_the_granule_is_refused_before_a_byte_moves,
    a_caller_driven_transport_releases_memory_in_the_next_poll,
    what_a_peer_writes_shows_through_a_volatile_span,
    a_peer_reads_what_was_written_through_a_volatile_span,
]);

on_devices!(at_the_initiator, plain(), FakeStaging::default(), (true, false), skips [
    a_slice_off_the_granule_is_refused_before_a_byte_moves,
    a_caller_driven_transport_releases_memory_in_the_next_poll,
]);

on_devices!(at_the_target, Config { checksum: true, ..plain() }, TINY, (false, true), skips [
    a_slice_off_the_granule_is_refused_before_a_byte_moves,
    what_a_peer_writes_shows_through_a_volatile_span,
    a_peer_reads_what_was_written_through_a_volatile_span,
]);
