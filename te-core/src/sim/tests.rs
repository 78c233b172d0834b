#![allow(unsafe_code, reason = "registers and looks at memory of its own")]

use super::*;
use crate::testkit::{each_seed, seeds};
use crate::{
    Access, Completion, Error, ErrorKind, ExpelMode, MemSpan, Memory, Op, Outcome, RegionId, RegionOffset,
    RemoteOffset, RemoteRegionId, Slice, Token, Transport,
};
use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;

const REGION: RegionId = RegionId::new(0, 1);
const REMOTE_REGION: RemoteRegionId = RemoteRegionId::new(0, 1);
const BYTES: usize = 64 << 10;

/// Two nodes with one region each; `here` has attached that of `there`. The memory is dropped last.
struct World {
    net: SimNet,
    here: SimTransport,
    there: SimTransport,
    source: Memory64K,
    sink: Memory64K,
    tokens: u64,
}

/// Raw memory, so that tests may read it while the fabric may write it.
struct Memory64K(MemSpan);

impl Memory64K {
    fn new() -> Self {
        let bytes = vec![0u8; BYTES].into_boxed_slice();
        Self(MemSpan::new(alloc::boxed::Box::into_raw(bytes).cast(), BYTES))
    }

    fn fill(&self, byte: u8) {
        // SAFETY: ours, mapped until drop, and written by one thread; the simulation runs on this one.
        unsafe { self.0.as_ptr().write_bytes(byte, BYTES) };
    }

    fn at(&self, offset: usize) -> u8 {
        assert!(offset < BYTES);
        // SAFETY: as in `fill`.
        unsafe { self.0.as_ptr().add(offset).read() }
    }
}

impl Drop for Memory64K {
    fn drop(&mut self) {
        let bytes = core::ptr::slice_from_raw_parts_mut(self.0.as_ptr(), BYTES);
        // SAFETY: from `into_raw` in `new`, returned once.
        drop(unsafe { alloc::boxed::Box::from_raw(bytes) });
    }
}

impl World {
    fn new(seed: u64, config: SimConfig) -> Self {
        let net = SimNet::new(seed, config);
        let (here, there) = (net.node(), net.node());
        let (source, sink) = (Memory64K::new(), Memory64K::new());
        let mut world = Self { net, here, there, source, sink, tokens: 0 };
        // SAFETY: the memory is a field after the transports, and only reached through raw pointers.
        unsafe { world.here.register(REGION, world.source.0, Access::LOCAL) }.expect("registered");
        world.export();
        world
    }

    fn export(&mut self) {
        let access = Access::LOCAL | Access::REMOTE_READ | Access::REMOTE_WRITE;
        // SAFETY: as in `new`.
        unsafe { self.there.register(REGION, self.sink.0, access) }.expect("registered");
        let mut blob = [0; 64];
        let len = self.there.export(REGION, &mut blob).expect("exported");
        self.here.attach(REMOTE_REGION, &blob[..len]).expect("attached");
    }

    fn submit(&mut self, op: Op, len: u32) -> Token {
        self.tokens += 1;
        let token = Token(self.tokens);
        let slice = Slice {
            token,
            local: RegionOffset::new(REGION, 0),
            remote: RemoteOffset::new(REMOTE_REGION, 0),
            len,
            op,
        };
        assert_eq!(self.here.submit(&[slice]), Ok(1));
        token
    }

    fn finish(&mut self) -> Vec<Completion> {
        let mut all = Vec::new();
        let mut out = [Completion::applied(Token(0)); 16];
        loop {
            let count = self.here.poll(self.net.now(), &mut out);
            all.extend_from_slice(&out[..count]);
            if self.net.in_flight() == 0 && count < out.len() {
                return all;
            }
            self.net.advance_to_next();
        }
    }

    fn one(&mut self) -> Completion {
        let all = self.finish();
        assert_eq!(all.len(), 1);
        all[0]
    }
}

fn error(kind: ErrorKind) -> Result<(), Error> {
    Err(Error::new(kind))
}

/// Everything that leaves is lost, and lands late.
const LATE: SimConfig = SimConfig {
    link: LinkConfig { loss_ppm: 1_000_000, late_ppm: 1_000_000, ..LinkConfig::CALM },
    ..SimConfig::CALM
};

#[test]
fn equal_seeds_give_equal_histories_and_others_do_not() {
    let history = |seed| {
        let mut world = World::new(seed, SimConfig::STORMY);
        (0..200).for_each(|i| {
            let op = if i % 2 == 0 { Op::Read } else { Op::Write };
            let _token = world.submit(op, 100 + i);
        });
        let ends = world.finish();
        (ends, world.net.now(), world.net.counters())
    };
    assert_eq!(history(1), history(1));
    assert_ne!(history(1), history(2));
}

#[test]
fn a_write_given_up_lands_up_to_a_minute_later() {
    const SEEDS: core::ops::Range<u64> = 0..40;
    let mut latest = Duration::ZERO;
    for seed in each_seed(SEEDS) {
        let mut world = World::new(seed, LATE);
        world.source.fill(0xAA);
        let _token = world.submit(Op::Write, 10);
        let end = world.one();
        assert_eq!((end.result, end.outcome), (error(ErrorKind::TimedOut), Outcome::Unknown));
        let gave_up = world.net.now();
        // The source may be deregistered: the bytes are on the wire.
        world.source.fill(0xBB);
        assert_eq!((world.sink.at(0), world.net.orphaned_writes(world.there.node())), (0, 1));
        while world.net.advance_to_next() {}
        assert_eq!((world.sink.at(0), world.sink.at(9), world.sink.at(10)), (0xAA, 0xAA, 0));
        assert_eq!(world.net.counters().landed_late, 1);
        latest = latest.max(world.net.now() - gave_up);
    }
    assert!(latest <= Duration::from_secs(60), "latest after {latest:?}");
    assert!(seeds(SEEDS) != SEEDS || latest > Duration::from_secs(40), "latest after {latest:?}");
}

#[test]
fn after_a_fence_no_write_lands_late() {
    for seed in each_seed(0..40) {
        let mut world = World::new(seed, LATE);
        world.source.fill(0xAA);
        let _token = world.submit(Op::Write, 10);
        assert_eq!(world.one().outcome, Outcome::Unknown);
        // The path to the target works again.
        world.net.set_link(world.here.node(), world.there.node(), LinkConfig::CALM);
        world.net.set_link(world.there.node(), world.here.node(), LinkConfig::CALM);
        world.here.fence(Token(99), REMOTE_REGION).expect("accepted");
        assert_eq!(world.one(), Completion::applied(Token(99)));
        assert_eq!(world.net.orphaned_writes(world.there.node()), 0);
        world.sink.fill(0xCC);
        while world.net.advance_to_next() {}
        assert_eq!(world.sink.at(0), 0xCC);
    }
}

#[test]
fn a_fence_lands_nothing_of_an_engine_that_was_expelled() {
    for seed in each_seed(0..40) {
        let mut world = World::new(seed, LATE);
        world.source.fill(0xAA);
        let _token = world.submit(Op::Write, 10);
        assert_eq!(world.one().outcome, Outcome::Unknown);
        let peer = world.here.identity();
        assert_eq!(world.there.expel(peer, ExpelMode::Force), Ok(true));
        // Its host continues with another engine, whose fence the target receives.
        world.here.set_identity(peer.wrapping_add(1));
        world.net.set_link(world.here.node(), world.there.node(), LinkConfig::CALM);
        world.net.set_link(world.there.node(), world.here.node(), LinkConfig::CALM);
        world.here.fence(Token(99), REMOTE_REGION).expect("accepted");
        assert_eq!(world.one(), Completion::applied(Token(99)));
        while world.net.advance_to_next() {}
        assert_eq!(world.sink.at(0), 0);
    }
}

#[test]
fn a_fence_that_the_target_never_hears_does_not_end_well() {
    let mut world = World::new(1, LATE);
    world.here.fence(Token(9), REMOTE_REGION).expect("accepted");
    assert_eq!(world.one(), Completion::unknown(Token(9), ErrorKind::TimedOut.into()));
    let there = world.there.node();
    world.net.set_link(world.here.node(), there, LinkConfig::CALM);
    world.net.kill(there);
    world.here.fence(Token(10), REMOTE_REGION).expect("accepted");
    assert_eq!(world.one(), Completion::unknown(Token(10), ErrorKind::PeerDead.into()));
}

#[test]
fn a_writer_that_dies_leaves_its_writes_on_the_wire() {
    let mut world = World::new(3, LATE);
    world.source.fill(0xAA);
    let _token = world.submit(Op::Write, 10);
    world.net.advance_to(world.net.now() + Duration::from_micros(1));
    world.net.kill(world.here.node());
    world.source.fill(0xBB);
    assert_eq!(world.net.orphaned_writes(world.there.node()), 1);
    while world.net.advance_to_next() {}
    assert_eq!(world.sink.at(0), 0xAA);
    assert_eq!(world.here.submit(&[]), Err(ErrorKind::Rail.into()), "a dead transport submits nothing");
}

#[test]
fn a_restarted_peer_is_never_mistaken_for_its_predecessor() {
    let mut world = World::new(4, SimConfig::CALM);
    let before = world.there.incarnation();
    world.there = world.net.restart(world.there.node());
    assert_ne!(world.there.incarnation(), before);
    // The same ids and the same memory, in another life of the process.
    let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
    // SAFETY: as in `World::new`.
    unsafe { world.there.register(REGION, world.sink.0, access) }.expect("registered");
    world.source.fill(1);
    for op in [Op::Read, Op::Write] {
        let _token = world.submit(op, 10);
        let end = world.one();
        assert_eq!((end.result, end.outcome), (error(ErrorKind::PeerRestarted), Outcome::NotApplied));
    }
    assert_eq!((world.source.at(0), world.sink.at(0)), (1, 0));
    world.here.fence(Token(50), REMOTE_REGION).expect("accepted");
    assert_eq!(world.one(), Completion::applied(Token(50)), "another incarnation fences the old one");
}

#[test]
fn a_link_that_is_down_fails_as_a_rail_and_heals() {
    let mut world = World::new(5, SimConfig::CALM);
    let (here, there) = (world.here.node(), world.there.node());
    world.net.flap(here, there, Instant::from_millis(1), Instant::from_millis(9));
    world.net.advance_to(Instant::from_millis(2));
    let token = world.submit(Op::Write, 10);
    assert_eq!(world.one(), Completion::not_applied(token, ErrorKind::Rail.into()));
    world.net.advance_to(Instant::from_millis(9));
    let token = world.submit(Op::Write, 10);
    assert_eq!(world.one(), Completion::applied(token));
    // Down while the slice is on its way: it is not known how far it came.
    let token = world.submit(Op::Write, 10);
    world.net.link_down(here, there);
    assert_eq!(world.one(), Completion::unknown(token, ErrorKind::Rail.into()));
    world.net.link_up(here, there);
    let token = world.submit(Op::Read, 10);
    assert_eq!(world.one(), Completion::applied(token));
}

#[test]
fn a_slow_rail_takes_its_time_and_a_stalled_target_waits() {
    let time = |factor| {
        let mut world = World::new(6, SimConfig { timeout: Duration::from_secs(1), ..SimConfig::CALM });
        world.net.set_slow(world.there.node(), factor);
        let began = world.net.now();
        let token = world.submit(Op::Write, BYTES as u32);
        assert_eq!(world.one(), Completion::applied(token));
        world.net.now() - began
    };
    let (fast, slow) = (time(1), time(1000));
    assert!(slow > fast * 50, "{fast:?} and {slow:?}");

    let mut world = World::new(7, SimConfig::CALM);
    let there = world.there.node();
    world.net.stall(there, true);
    world.source.fill(5);
    let token = world.submit(Op::Write, 10);
    assert_eq!(world.one(), Completion::unknown(token, ErrorKind::TimedOut.into()));
    assert_eq!(world.sink.at(0), 0);
    world.net.stall(there, false);
    while world.net.advance_to_next() {}
    assert_eq!(world.sink.at(0), 5, "it waited until the target continued");
}

#[test]
fn handles_may_move_between_threads() {
    fn is_send<T: Send>() {}
    is_send::<SimTransport>();
    is_send::<SimNet>();
}
