//! Runs the contract's conformance suite on the transport over fake drivers: between memory of devices by
//! every kind of handle, and between devices and the host, both ways. Two copies of the fake driver in one
//! process do not know each other's memory, so each stands for a process of its own. No call of `submit` or
//! `poll` may make a call of the driver that can wait.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;
#[path = "../../te-gpu/tests/common/mod.rs"]
mod fakes;

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use common::{INITIATOR, MIB, TARGET};
use fakes::Fake;
use te_core::testkit::{
    ByPointer, CountingAlloc, Harness, Hook, Pair, PeekPoke, Side, Verdict, WallClock, cases, each_seed,
    run_case,
};
use te_core::{
    Access, Capabilities, Completion, Error, EventSource, ExpelMode, HealthConfig, HealthRoute, Instant,
    MemSpan, Memory, MultiTransport, RegionId, RemoteRegionId, Slice, Token, Transport,
};
use te_host::SharedMemory;
use te_nvlink::{Config, Export, NvlinkTransport};

#[global_allocator]
static ALLOCATOR: CountingAlloc<std::alloc::System> = CountingAlloc::new(std::alloc::System);

/// What the memory of one end is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Of cudaMalloc, at an odd place of a larger allocation.
    Legacy,
    /// Mapped by virtual memory management, in two chunks.
    Chunks,
    /// Of the host.
    Heap,
    /// Of the host, in a memory file.
    Shared,
    /// Mapped by virtual memory management, with a fabric handle, in two pieces.
    Fabric,
}

#[derive(Clone, Copy)]
struct Ends {
    initiator: Kind,
    target: Kind,
    /// Both ends use one copy of the driver, as within one process.
    is_own: bool,
    is_multi: bool,
    /// The ends stand for processes of two hosts.
    is_across_hosts: bool,
}

impl Ends {
    const fn of(initiator: Kind, target: Kind) -> Self {
        Self { initiator, target, is_own: false, is_multi: false, is_across_hosts: false }
    }
}

/// The memory of both ends.
struct Memories {
    fakes: [Arc<Fake>; 2],
    spans: RefCell<Vec<(MemSpan, usize)>>,
    files: RefCell<Vec<Arc<SharedMemory>>>,
}

impl Memories {
    fn of(&self, span: MemSpan) -> Option<&Fake> {
        let at = span.as_ptr().addr();
        let spans = self.spans.borrow();
        let is_in = |whole: &MemSpan| at >= whole.as_ptr().addr() && at < whole.as_ptr().addr() + whole.len();
        spans.iter().find(|(whole, _)| is_in(whole)).map(|(_, of)| &*self.fakes[*of])
    }

    fn allocate(&self, side: usize, kind: Kind, bytes: usize) -> Option<MemSpan> {
        let fake = &self.fakes[side];
        let (whole, span) = match kind {
            Kind::Heap => return None,
            Kind::Shared => {
                let memory = common::shared(bytes);
                let span = memory.span();
                self.files.borrow_mut().push(memory);
                return Some(span);
            }
            Kind::Legacy => {
                let whole = fake.allocate(bytes + 3 * 4_096);
                (whole, whole.part(2 * 4_096, bytes as u64).unwrap())
            }
            Kind::Chunks | Kind::Fabric => {
                // The border of the chunks is in the span.
                let bytes = bytes.next_multiple_of(2 * MIB);
                let whole = fake.map_chunks_with(2, bytes, if kind == Kind::Fabric { 1 | 8 } else { 1 });
                let at = (whole.len() / 2) as u64 - (bytes as u64 / 2 / 4_096 * 4_096);
                (whole, whole.part(at, bytes as u64).unwrap())
            }
        };
        self.spans.borrow_mut().push((whole, side));
        Some(span)
    }
}

#[allow(unsafe_code, reason = "the suite's promise about the span is passed on")]
impl PeekPoke for Memories {
    unsafe fn peek(&self, span: MemSpan, out: &mut [u8]) {
        match self.of(span) {
            // SAFETY: the caller gives the same promise.
            Some(fake) => unsafe { fake.peek(span.at(fake.location()), out) },
            // SAFETY: as above.
            None => unsafe { ByPointer.peek(span, out) },
        }
    }

    unsafe fn poke(&self, span: MemSpan, bytes: &[u8]) {
        match self.of(span) {
            // SAFETY: the caller gives the same promise.
            Some(fake) => unsafe { fake.poke(span.at(fake.location()), bytes) },
            // SAFETY: as above.
            None => unsafe { ByPointer.poke(span, bytes) },
        }
    }
}

struct Gpus {
    ends: Ends,
    fakes: [Arc<Fake>; 2],
    seed: Cell<i64>,
}

impl Gpus {
    fn new(ends: Ends) -> Self {
        let first = Arc::new(Fake::cuda());
        let second = if ends.is_own { Arc::clone(&first) } else { Arc::new(Fake::cuda()) };
        Self { ends, fakes: [first, second], seed: Cell::new(1) }
    }
}

const STOPPED: &str = "nothing_lands_of_an_initiator_that_was_expelled_while_it_was_stopped";

impl Harness for Gpus {
    fn skip(&self, case: &str) -> Option<&'static str> {
        match case {
            STOPPED => Some("a process that is not polled does not say that its copies have ended"),
            "a_wrong_key_opens_nothing" if self.ends.is_multi => {
                Some("the export has a header for each rail")
            }
            _ => None,
        }
    }

    fn pair(&mut self) -> Box<dyn Pair + '_> {
        self.seed.set(self.seed.get() + 1);
        self.fakes.iter().for_each(|fake| _ = fake.set("seed", self.seed.get()).set("domain", 7));
        let memories =
            Memories { fakes: self.fakes.clone(), spans: RefCell::default(), files: RefCell::default() };
        Box::new(GpuPair {
            ends: self.ends,
            initiator: Some(open(&self.fakes[0], INITIATOR, self.ends)),
            target: Some(open(&self.fakes[1], TARGET, self.ends)),
            memories: Rc::new(memories),
            clock: WallClock::new(Duration::ZERO),
        })
    }
}

fn open(fake: &Arc<Fake>, identity: u64, ends: Ends) -> Watched {
    let across_hosts = ends.is_across_hosts;
    let host = across_hosts.then_some([identity as u8; 16]);
    let config = Config { identity, inflight_max: 512, across_hosts, host, ..Config::default() };
    let transport = NvlinkTransport::new(config, fake.gpu(fake.config())).unwrap();
    let inner: Box<dyn Transport> = match ends.is_multi {
        false => Box::new(transport),
        true => {
            let route = HealthRoute::new(&[100], HealthConfig::default());
            Box::new(MultiTransport::new([transport], route, 300).unwrap())
        }
    };
    Watched { inner, blocking_here: fake.blocking_here() }
}

/// A transport whose data path makes no call of the driver that may wait.
struct Watched {
    inner: Box<dyn Transport>,
    blocking_here: unsafe extern "C" fn() -> u64,
}

impl Watched {
    #[allow(unsafe_code, reason = "calls a function of the fake driver")]
    fn blocking(&self) -> u64 {
        // SAFETY: the library of the fake driver is never closed.
        unsafe { (self.blocking_here)() }
    }
}

#[allow(unsafe_code, reason = "forwards `register`")]
impl Memory for Watched {
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.register(id, span, access) }
    }
    fn deregister(&mut self, id: RegionId) -> Result<(), Error> {
        self.inner.deregister(id)
    }
    fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error> {
        self.inner.export(id, out)
    }
    fn attach(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), Error> {
        self.inner.attach(id, blob)
    }
    fn detach(&mut self, id: RemoteRegionId) -> Result<(), Error> {
        self.inner.detach(id)
    }
}

impl Transport for Watched {
    fn name(&self) -> &'static str {
        self.inner.name()
    }
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        let before = self.blocking();
        let accepted = self.inner.submit(batch);
        assert_eq!(self.blocking(), before, "L4: `submit` made a call that may wait");
        accepted
    }
    fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize {
        let before = self.blocking();
        let count = self.inner.poll(now, out);
        assert_eq!(self.blocking(), before, "L4: `poll` made a call that may wait");
        count
    }
    fn poll_at(&self) -> Option<Instant> {
        self.inner.poll_at()
    }
    fn event_source(&self) -> Option<EventSource> {
        self.inner.event_source()
    }
    fn activity(&self) -> u64 {
        self.inner.activity()
    }
    fn set_checksums(&mut self, wanted: bool) {
        self.inner.set_checksums(wanted);
    }
    fn cancel(&mut self, token: Token) -> Result<(), Error> {
        self.inner.cancel(token)
    }
    fn fence(&mut self, token: Token, remote: RemoteRegionId) -> Result<(), Error> {
        self.inner.fence(token, remote)
    }
    fn is_connected(&self, peer: u64) -> bool {
        self.inner.is_connected(peer)
    }
    fn expel(&mut self, peer: u64, mode: ExpelMode) -> Result<bool, Error> {
        self.inner.expel(peer, mode)
    }
}

struct GpuPair {
    ends: Ends,
    initiator: Option<Watched>,
    target: Option<Watched>,
    memories: Rc<Memories>,
    clock: WallClock,
}

impl GpuPair {
    /// Where the export of this fabric begins.
    fn header(&self, export: &[u8]) -> usize {
        let addresses = if self.ends.is_across_hosts { 2 + 16 } else { 0 };
        export.len() - Export::BYTES - addresses
    }
}

impl Pair for GpuPair {
    fn initiator(&mut self) -> &mut dyn Transport {
        self.initiator.as_mut().expect("it lives as long as the pair")
    }

    fn target(&mut self) -> &mut dyn Transport {
        self.target.as_mut().expect("the suite does not use a dead target")
    }

    fn tick(&mut self) -> Instant {
        self.clock.tick()
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(30)
    }

    fn late_max(&self) -> Duration {
        Duration::from_millis(10)
    }

    fn allocate(&mut self, side: Side, bytes: usize) -> Option<MemSpan> {
        match side {
            Side::Initiator => self.memories.allocate(0, self.ends.initiator, bytes),
            Side::Target => self.memories.allocate(1, self.ends.target, bytes),
        }
    }

    fn peek_poke(&self) -> Rc<dyn PeekPoke> {
        self.memories.clone()
    }

    fn address_bytes(&self, export: &[u8]) -> Range<usize> {
        let header = self.header(export);
        header + Export::ADDRESS.start..header + Export::ADDRESS.end
    }

    fn key_bytes(&self, export: &[u8]) -> Option<Range<usize>> {
        let at = self.header(export) + Export::KEY_AT;
        Some(at..at + 16)
    }

    fn initiator_identity(&self) -> Option<u64> {
        Some(INITIATOR)
    }

    fn kill_target(&mut self) -> Hook {
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

impl Drop for GpuPair {
    fn drop(&mut self) {
        // The initiator closes what it has mapped, and says so to the target.
        self.initiator = None;
        self.target = None;
        for fake in &self.memories.fakes {
            assert_eq!(
                (fake.wrong(), fake.freed_while_open()),
                (0, 0),
                "everything was given back once, in time"
            );
        }
    }
}

macro_rules! between {
    ($name:ident, $ends:expr, skips [$($skip:ident,)*]) => {
        mod $name {
            use super::*;

            te_core::conformance_tests!(Gpus::new($ends), skips [
                a_slice_off_the_granule_is_refused_before_a_byte_moves,
                a_caller_driven_transport_releases_memory_in_the_next_poll,
                a_cut_connection_ends_every_slice_and_heals,
                a_fence_to_a_dead_target_ends,
                a_fence_after_a_restart_ends_and_holds,
                after_a_restart_a_new_export_works,
                after_a_restart_an_old_remote_region_is_refused_and_never_misread,
                nothing_lands_of_an_initiator_that_was_expelled_while_it_was_stopped,
                $($skip,)*
            ], may_skip [
                after_a_fence_nothing_lands,
                after_a_fence_nothing_lands_that_a_stalled_target_held_back,
            ]);
        }
    };
}

between!(device_to_device_by_ipc, Ends::of(Kind::Legacy, Kind::Legacy), skips [
    what_a_peer_writes_shows_through_a_volatile_span,
    a_peer_reads_what_was_written_through_a_volatile_span,
]);

between!(device_to_device_by_descriptors, Ends::of(Kind::Legacy, Kind::Chunks), skips [
    what_a_peer_writes_shows_through_a_volatile_span,
    a_peer_reads_what_was_written_through_a_volatile_span,
]);

between!(device_to_device_in_one_process, Ends { is_own: true, ..Ends::of(Kind::Chunks, Kind::Legacy) }, skips [
    what_a_peer_writes_shows_through_a_volatile_span,
    a_peer_reads_what_was_written_through_a_volatile_span,
]);

between!(host_to_device, Ends::of(Kind::Heap, Kind::Chunks), skips [
    what_a_peer_writes_shows_through_a_volatile_span,
    a_peer_reads_what_was_written_through_a_volatile_span,
]);

between!(device_to_host, Ends::of(Kind::Legacy, Kind::Shared), skips []);

between!(device_to_device_across_hosts, Ends { is_across_hosts: true, ..Ends::of(Kind::Legacy, Kind::Fabric) }, skips [
    what_a_peer_writes_shows_through_a_volatile_span,
    a_peer_reads_what_was_written_through_a_volatile_span,
]);

between!(host_to_device_across_hosts, Ends { is_across_hosts: true, ..Ends::of(Kind::Heap, Kind::Fabric) }, skips [
    what_a_peer_writes_shows_through_a_volatile_span,
    a_peer_reads_what_was_written_through_a_volatile_span,
]);

between!(through_multi, Ends { is_multi: true, ..Ends::of(Kind::Legacy, Kind::Legacy) }, skips [
    what_a_peer_writes_shows_through_a_volatile_span,
    a_peer_reads_what_was_written_through_a_volatile_span,
    a_wrong_key_opens_nothing,
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
    "nothing_of_an_expelled_initiator_lands",
    "a_deregistered_region_is_out_of_reach",
];

fn seeds(ends: Ends) {
    assert!(MOVING.iter().all(|name| cases().iter().any(|case| case.name == *name)));
    let mut gpus = Gpus::new(ends);
    for seed in each_seed(0..40) {
        gpus.seed.set(seed as i64 * 16);
        let name = MOVING[seed as usize % MOVING.len()];
        assert_eq!(run_case(name, &mut gpus), Verdict::Passed, "{name}");
    }
}

#[test]
fn many_seeds_between_devices_by_ipc() {
    seeds(Ends::of(Kind::Chunks, Kind::Legacy));
}

#[test]
fn many_seeds_between_devices_by_descriptors() {
    seeds(Ends::of(Kind::Legacy, Kind::Chunks));
}

#[test]
fn many_seeds_between_devices_across_hosts() {
    seeds(Ends { is_across_hosts: true, ..Ends::of(Kind::Legacy, Kind::Fabric) });
}

#[test]
fn many_seeds_from_the_host_to_a_device() {
    seeds(Ends::of(Kind::Heap, Kind::Chunks));
}

#[test]
fn many_seeds_from_a_device_to_the_host() {
    seeds(Ends::of(Kind::Legacy, Kind::Shared));
}
