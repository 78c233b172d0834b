//! The plan on simulated rails: two fast ones of one fabric and a slow one of another, in virtual time.
//!
//! Its seed determines a run. The run keeps the rules for applications, and looks for what an application
//! must never see: a transfer that fails although a rail works, a wrong byte, a byte that changes after the
//! end of a transfer.
//!
//! *Places.* Each transfer moves one place of the local buffer to or from the same place of the remote one.
//! Between transfers both hold canaries, fresh ones each time. A remote place on which a copy of its last
//! WRITE may still land is fenced first (L5).

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use super::super::buffer::Buffer;
use super::{Fault, Phase, Recovery, Timing, Watch};
use crate::sim::{LinkConfig, NodeId, SimConfig, SimNet, SimTransport};
use crate::testkit::{Rng, pattern};
use crate::{
    Access, Completion, Error, ErrorKind, FaultConfig, HealthConfig, HealthRoute, Instant, Memory,
    MultiTransport, Op, Outcome, RailHealth, RegionId, RegionOffset, RemoteOffset, RemoteRegionId, Route,
    Slice, Token, Transport,
};

/// The names of the simulated rails: two of one name, as two ports of one fabric, and the last resort.
pub const RAIL_NAMES: [&str; 3] = ["rdma", "rdma", "tcp"];
/// The tier of each rail, for a route with tiers.
pub const TIERS: [u8; 3] = [0, 0, 1];
/// The rails that carry everything while they work, as a mask.
pub const FAST: u32 = 0b011;

const HERE: NodeId = NodeId(0);
const THERE: NodeId = NodeId(1);
const LOCAL: RegionId = RegionId::new(0, 1);
const PLACES: usize = 16;
const SLICES_MAX: usize = 8;
const SLICE_BYTES: usize = 256;
const PLACE_BYTES: usize = SLICES_MAX * SLICE_BYTES;
/// The number of a place's fence among the tokens of the place.
const FENCE: usize = SLICES_MAX;
/// The longest time for which a lost WRITE may still be on its way.
const LATE_MAX: Duration = Duration::from_millis(100);
const PACE: Duration = Duration::from_millis(2);

const RDMA: LinkConfig = LinkConfig {
    latency_min: Duration::from_micros(2),
    latency_max: Duration::from_micros(5),
    late_max: LATE_MAX,
    ..LinkConfig::CALM
};
const TCP: LinkConfig = LinkConfig {
    latency_min: Duration::from_micros(30),
    latency_max: Duration::from_micros(120),
    bytes_per_s: 1_200_000_000,
    late_max: LATE_MAX,
    ..LinkConfig::CALM
};

fn timing() -> Timing {
    Timing {
        give_up: Duration::from_millis(20),
        transfer: Duration::from_millis(1),
        pace: PACE,
        health: HealthConfig::default(),
    }
}

type Rail = crate::Fault<SimTransport>;

/// Carries out `plan`, one phase after another, while verified transfers run over a [`MultiTransport`] with
/// `route`. `health` returns what the route knows about a rail.
///
/// # Errors
/// A sentence about what an application saw and must not see, or about the bound that was missed.
///
/// # Panics
/// When a call fails that cannot fail.
pub fn simulate<R: Route>(
    seed: u64,
    plan: &[Phase],
    route: R,
    health: fn(&R, usize) -> Option<RailHealth>,
) -> Result<Vec<Recovery>, String> {
    let mut run = Run::new(seed, route, health);
    run.go_on_until(run.now + 5 * PACE, None)?;
    let mut recoveries = Vec::with_capacity(plan.len());
    for phase in plan {
        recoveries.push(run.phase(phase).map_err(|what| format!("{phase}: {what}"))?);
        let calm = Duration::from_micros(run.rng.range(1_000..20_000));
        run.go_on_until(run.now + calm, None)?;
    }
    run.end()?;
    Ok(recoveries)
}

struct Run<R> {
    here: MultiTransport<Rail, R>,
    /// `None` while the peer is dead.
    there: Option<MultiTransport<SimTransport, HealthRoute>>,
    nets: [SimNet; 3],
    rng: Rng,
    now: Instant,
    health: fn(&R, usize) -> Option<RailHealth>,
    remote_region: RemoteRegionId,
    /// Remote regions of earlier incarnations of the peer that are still in use.
    leaving: Vec<RemoteRegionId>,
    places: [Place; PLACES],
    /// Slices that are not accepted yet.
    queue: VecDeque<Slice>,
    starts: bool,
    next_start: Instant,
    /// The number of bytes that each rail has carried.
    carried: [u64; 3],
    patterns: u64,
    // After the transports: they are dropped before the memory that they reach.
    local: Buffer,
    remote: Buffer,
}

/// One place of both buffers, and the transfer that moves it.
#[derive(Clone, Copy)]
struct Place {
    doing: Doing,
    /// The patterns: of the local place between transfers, of the remote one before the last WRITE, and of
    /// that WRITE.
    local: u64,
    remote: u64,
    source: u64,
    /// The outcome of the last WRITE for each slice of the remote place.
    remote_is: [Outcome; SLICES_MAX],
    op: Op,
    started: Instant,
    /// The incarnation of the peer for which it was started.
    life: u32,
    slices: usize,
    /// The slices that have not ended, as a mask.
    waiting: u32,
    ends: [Option<Completion>; SLICES_MAX],
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Doing {
    Nothing,
    Moving,
    /// The remote place needs a fence before any other transfer; not before the given time.
    Owes(Instant),
    Fencing,
}

impl<R: Route> Run<R> {
    fn new(seed: u64, route: R, health: fn(&R, usize) -> Option<RailHealth>) -> Self {
        let mut rng = Rng::new(seed);
        let nets = core::array::from_fn(|rail| {
            let tcp = RAIL_NAMES[rail] == "tcp";
            let config = SimConfig {
                name: RAIL_NAMES[rail],
                link: if tcp { TCP } else { RDMA },
                timeout: Duration::from_millis(if tcp { 20 } else { 4 }),
                detect: Duration::from_micros(if tcp { 2_000 } else { 300 }),
                ..SimConfig::CALM
            };
            SimNet::new(rng.next(), config)
        });
        let rails: Vec<Rail> = nets
            .iter()
            .map(|net: &SimNet| crate::Fault::new(net.node(), rng.next(), FaultConfig::default()))
            .collect();
        let Ok(mut here) = MultiTransport::new(rails, route, 256) else { unreachable!("three rails") };
        let there = nets.iter().map(SimNet::node).collect();
        let (local, remote) = (Buffer::on_heap(PLACES * PLACE_BYTES), Buffer::on_heap(PLACES * PLACE_BYTES));
        #[allow(unsafe_code, reason = "registers the run's own memory")]
        // SAFETY: the transports are dropped before the buffer, to whose bytes no reference is ever made.
        let registered = unsafe { here.register(LOCAL, local.span(), Access::LOCAL) };
        assert_eq!(registered, Ok(()));
        let place = Place {
            doing: Doing::Nothing,
            local: 0,
            remote: 0,
            source: 0,
            remote_is: [Outcome::NotApplied; SLICES_MAX],
            op: Op::Read,
            started: Instant::ZERO,
            life: 0,
            slices: 0,
            waiting: 0,
            ends: [None; SLICES_MAX],
        };
        let mut run = Self {
            here,
            there: None,
            nets,
            rng,
            now: Instant::ZERO,
            health,
            remote_region: RemoteRegionId::new(0, 0),
            leaving: Vec::new(),
            places: [place; PLACES],
            queue: VecDeque::new(),
            starts: true,
            next_start: Instant::ZERO,
            carried: [0; 3],
            patterns: 0,
            local,
            remote,
        };
        (0..PLACES).for_each(|place| run.fill_local(place));
        run.meet(there);
        run
    }

    /// Starts a new incarnation of the peer: its memory holds fresh canaries, and we attach its export.
    fn meet(&mut self, rails: Vec<SimTransport>) {
        let route = HealthRoute::new(&[100; 3], timing().health);
        let Ok(mut there) = MultiTransport::new(rails, route, 16) else { unreachable!("three rails") };
        let life = self.remote_region.generation + 1;
        let region = RegionId::new(0, life);
        for place in 0..PLACES {
            self.fill_remote(place);
            // The old incarnation, and everything that was on its way to it, have no effect any more.
            if matches!(self.places[place].doing, Doing::Owes(_)) {
                self.places[place].doing = Doing::Nothing;
            }
        }
        #[allow(unsafe_code, reason = "registers the run's own memory")]
        // SAFETY: as in `new`; every incarnation of the peer ends before the buffer does.
        let registered =
            unsafe { there.register(region, self.remote.span(), Access::REMOTE_READ | Access::REMOTE_WRITE) };
        assert_eq!(registered, Ok(()));
        let mut blob = [0; 512];
        let exported = there.export(region, &mut blob);
        // Another index than that of the incarnation before, which may still be in use.
        let remote_region = RemoteRegionId::new(life % 64, life);
        let attached = exported.and_then(|len| self.here.attach(remote_region, &blob[..len]));
        assert_eq!(attached, Ok(()));
        assert_eq!(self.here.reachable(remote_region), 0b111, "each rail finds its other end");
        if life > 1 {
            self.leaving.push(self.remote_region);
        }
        self.remote_region = remote_region;
        self.there = Some(there);
    }

    fn phase(&mut self, phase: &Phase) -> Result<Recovery, String> {
        let mut watch = Watch::new(*phase, FAST, self.now);
        let bounds = phase.bounds(&timing());
        let start = self.now;
        let resort = self.carried[2];
        let mut turns: Vec<(Instant, usize, bool)> = Vec::new();
        for (rail, after) in phase.hits() {
            turns.push((start + after, rail, true));
            turns.push((start + after + phase.lasts, rail, false));
        }
        if phase.fault == Fault::PeerKilled {
            turns = [(start, 0, true), (start + phase.lasts, 0, false)].into();
        }
        turns.sort_by_key(|turn| turn.0);
        for (at, rail, on) in turns {
            self.go_on_until(at, Some(&mut watch))?;
            if on {
                self.break_rail(phase.fault, rail);
            } else {
                self.mend_rail(phase.fault, rail);
            }
        }
        let no_fast_rail = phase.fault == Fault::LinkDown && phase.rails == FAST && phase.stagger.is_zero();
        if no_fast_rail && phase.lasts > timing().give_up + 2 * PACE && self.carried[2] == resort {
            return Err("the last resort carried nothing".into());
        }
        watch.over(self.now);
        let last = self.now + bounds.back;
        while !watch.is_back() && self.now < last {
            self.go_on_until(last.min(self.now + Duration::from_millis(1)), Some(&mut watch))?;
        }
        let recovery = watch.recovery();
        recovery.judge(&bounds)?;
        Ok(recovery)
    }

    fn break_rail(&mut self, fault: Fault, rail: usize) {
        let net = &self.nets[rail];
        match fault {
            Fault::LinkDown => net.link_down(HERE, THERE),
            Fault::Loss { ppm } => self.lose(rail, ppm),
            Fault::Broken => net.cut(HERE, THERE),
            Fault::Slow { factor } => net.set_slow(THERE, factor),
            Fault::Refuses(kind) => {
                let error = Some(Error::new(kind));
                let config = FaultConfig {
                    submit_refused_ppm: 1_000_000,
                    submit_error: error,
                    ..FaultConfig::default()
                };
                self.here.rails_mut()[rail].set_config(config);
            }
            Fault::Fails(kind) => {
                let config = FaultConfig {
                    completion_failed_ppm: 1_000_000,
                    completion_error: Error::new(kind),
                    ..FaultConfig::default()
                };
                self.here.rails_mut()[rail].set_config(config);
            }
            Fault::PeerKilled => {
                self.nets.iter().for_each(|net| net.kill(THERE));
                self.there = None;
            }
        }
    }

    fn mend_rail(&mut self, fault: Fault, rail: usize) {
        let net = &self.nets[rail];
        match fault {
            Fault::LinkDown => net.link_up(HERE, THERE),
            Fault::Loss { .. } => self.lose(rail, 0),
            Fault::Broken => {}
            Fault::Slow { .. } => net.set_slow(THERE, 1),
            Fault::Refuses(_) | Fault::Fails(_) => {
                self.here.rails_mut()[rail].set_config(FaultConfig::default());
            }
            Fault::PeerKilled => {
                let rails = self.nets.iter().map(|net| net.restart(THERE)).collect();
                self.meet(rails);
            }
        }
    }

    fn lose(&self, rail: usize, loss_ppm: u32) {
        let link = if RAIL_NAMES[rail] == "tcp" { TCP } else { RDMA };
        let link = LinkConfig { loss_ppm, late_ppm: 500_000, ..link };
        self.nets[rail].set_link(HERE, THERE, link);
        self.nets[rail].set_link(THERE, HERE, link);
    }

    /// Runs the application.
    fn go_on_until(&mut self, until: Instant, mut watch: Option<&mut Watch>) -> Result<(), String> {
        let mut ends = [Completion::applied(Token(0)); 64];
        while self.now < until {
            self.start_transfers()?;
            self.start_fences();
            self.submit(&mut watch)?;
            self.step(until);
            let count = self.here.poll(self.now, &mut ends);
            for end in &ends[..count] {
                self.ended(end, &mut watch)?;
            }
            for rail in 0..3 {
                let bytes = (self.health)(self.here.route(), rail).map_or(0, |health| health.bytes_done);
                if bytes > self.carried[rail]
                    && let Some(watch) = &mut watch
                {
                    watch.carried(rail, self.now);
                }
                self.carried[rail] = bytes;
            }
            let here = &mut self.here;
            self.leaving.retain(|&id| here.detach(id).is_err_and(|error| error.kind == ErrorKind::Busy));
        }
        Ok(())
    }

    /// Moves the time to the next event.
    fn step(&mut self, until: Instant) {
        let owed = self.places.iter().filter_map(|place| match place.doing {
            Doing::Owes(at) => Some(at),
            _ => None,
        });
        let start = self.starts.then_some(self.next_start);
        let events = self.nets.iter().filter_map(SimNet::next_event);
        let next = events.chain(self.here.poll_at()).chain(owed).chain(start).min();
        // A refused submission wants to be polled at once, again and again.
        let least = self.now + Duration::from_micros(20);
        self.now = next.unwrap_or(until).max(least).min(until.max(least));
        self.nets.iter().for_each(|net| net.advance_to(self.now));
    }

    fn start_transfers(&mut self) -> Result<(), String> {
        if !self.starts || self.now < self.next_start {
            return Ok(());
        }
        let pace = PACE.as_nanos() as u64;
        self.next_start = self.now + Duration::from_nanos(self.rng.range(pace / 4..pace));
        let count = if self.rng.chance_ppm(200_000) { 8 } else { 1 };
        for _ in 0..count {
            let first = self.rng.index(PLACES);
            let free = (0..PLACES)
                .map(|nth| (first + nth) % PLACES)
                .find(|&at| self.places[at].doing == Doing::Nothing);
            if let Some(at) = free {
                self.start(at)?;
            }
        }
        Ok(())
    }

    fn start(&mut self, at: usize) -> Result<(), String> {
        let op = if self.rng.chance_ppm(500_000) { Op::Read } else { Op::Write };
        let slices = 1 + self.rng.index(SLICES_MAX);
        self.fresh_local(at)?;
        self.check_remote(at)?;
        let place = &mut self.places[at];
        place.doing = Doing::Moving;
        (place.op, place.slices, place.started) = (op, slices, self.now);
        (place.life, place.waiting, place.ends) =
            (self.remote_region.generation, (1 << slices) - 1, [None; SLICES_MAX]);
        for nth in 0..slices {
            let offset = (at * PLACE_BYTES + nth * SLICE_BYTES) as u64;
            self.queue.push_back(Slice {
                token: token(at, nth),
                local: RegionOffset::new(LOCAL, offset),
                remote: RemoteOffset::new(self.remote_region, offset),
                len: SLICE_BYTES as u32,
                op,
            });
        }
        Ok(())
    }

    fn start_fences(&mut self) {
        for at in 0..PLACES {
            if let Doing::Owes(not_before) = self.places[at].doing
                && self.now >= not_before
            {
                // A place that needs a fence belongs to the incarnation to which we are attached: `meet`
                // drops what older ones needed.
                self.places[at].doing = match self.here.fence(token(at, FENCE), self.remote_region) {
                    Ok(()) => Doing::Fencing,
                    Err(_) => Doing::Owes(self.now + PACE),
                };
            }
        }
    }

    fn submit(&mut self, watch: &mut Option<&mut Watch>) -> Result<(), String> {
        while !self.queue.is_empty() {
            match self.here.submit(self.queue.make_contiguous()) {
                Ok(0) => break,
                Ok(accepted) => drop(self.queue.drain(..accepted)),
                Err(error) => {
                    let Some(slice) = self.queue.pop_front() else { break };
                    self.ended(&Completion::not_applied(slice.token, error), watch)?;
                }
            }
        }
        Ok(())
    }

    fn ended(&mut self, end: &Completion, watch: &mut Option<&mut Watch>) -> Result<(), String> {
        let (at, nth) = (end.token.0 as usize / (FENCE + 1), end.token.0 as usize % (FENCE + 1));
        if nth == FENCE {
            return self.fenced(at, end);
        }
        let place = &mut self.places[at];
        if place.doing != Doing::Moving || place.waiting & 1 << nth == 0 {
            return Err(format!("slice {nth} of place {at} ended twice (L1)"));
        }
        place.waiting &= !(1 << nth);
        place.ends[nth] = Some(*end);
        if place.waiting != 0 {
            return Ok(());
        }
        let place = *place;
        let ok = place.ends.iter().flatten().all(|end| end.result.is_ok());
        // A transfer to an earlier incarnation of the peer may end late, long after its fault.
        let to_the_dead = !ok && place.life != self.remote_region.generation;
        match watch {
            Some(watch) if !to_the_dead || watch.recovery().phase.fault == Fault::PeerKilled => {
                watch.transfer(place.started, self.now, ok);
            }
            None if !ok && !to_the_dead => {
                return Err(format!("a transfer failed although there was no fault: {:?}", place.ends));
            }
            _ => {}
        }
        self.transferred(at)
    }

    /// A transfer has ended: checks both places against its completions, and frees them.
    fn transferred(&mut self, at: usize) -> Result<(), String> {
        let place = &mut self.places[at];
        let (op, ends) = (place.op, place.ends);
        // A transfer to an earlier incarnation of the peer has no effect on this one.
        let current = place.life == self.remote_region.generation;
        let ended = |wanted: Outcome| {
            move |(nth, end): (usize, Option<Completion>)| {
                end.is_some_and(|end| end.outcome == wanted).then_some(nth)
            }
        };
        match op {
            Op::Write => {
                for (nth, end) in ends.iter().enumerate() {
                    if let (Some(end), true) = (end, current) {
                        place.remote_is[nth] = end.outcome;
                    }
                }
                place.source = place.local;
                self.fresh_local(at)?;
            }
            Op::Read => {
                let (local, remote) = (read(&self.local, at), bytes_of(place.remote));
                for nth in ends.into_iter().enumerate().filter_map(ended(Outcome::Applied)) {
                    // The canary of an old incarnation is not kept, so it cannot be checked any more.
                    if current && local[range(nth)] != remote[range(nth)] {
                        return Err(format!("place {at}: wrong bytes read"));
                    }
                }
                self.fill_local(at);
            }
        }
        self.check_remote(at)?;
        let owes = current && ends.iter().flatten().any(|end| end.fence_needed);
        self.places[at].doing = if owes { Doing::Owes(self.now) } else { Doing::Nothing };
        if !owes {
            self.fill_remote(at);
        }
        Ok(())
    }

    fn fenced(&mut self, at: usize, end: &Completion) -> Result<(), String> {
        let place = &mut self.places[at];
        if place.doing != Doing::Fencing {
            return Err(format!("the fence of place {at} ended twice (L1)"));
        }
        let current = place.life == self.remote_region.generation;
        if current && end.result.is_err() {
            place.doing = Doing::Owes(self.now + PACE);
            return Ok(());
        }
        place.doing = Doing::Nothing;
        // A copy that landed late brought the bytes that were there already.
        self.check_remote(at)?;
        self.fill_remote(at);
        Ok(())
    }

    /// Checks that everything that was started ends well, nothing lands late, and nothing is left.
    fn end(mut self) -> Result<(), String> {
        self.starts = false;
        let last = self.now + LATE_MAX + Duration::from_secs(20);
        while self.places.iter().any(|place| place.doing != Doing::Nothing) {
            if self.now > last {
                return Err("a transfer or fence never ended".into());
            }
            self.go_on_until(self.now + Duration::from_millis(1), None)?;
        }
        self.go_on_until(self.now + LATE_MAX + Duration::from_millis(50), None)?;
        for at in 0..PLACES {
            self.fresh_local(at)?;
            self.check_remote(at)?;
        }
        if !self.local.guards_intact() || !self.remote.guards_intact() {
            return Err("bytes outside of the registered memory have changed".into());
        }
        let in_flight: usize = self.nets.iter().map(SimNet::in_flight).sum();
        if in_flight > 0 || !self.leaving.is_empty() {
            return Err(format!(
                "{in_flight} operations and {} old remote regions are left",
                self.leaving.len()
            ));
        }
        self.here.detach(self.remote_region).map_err(|error| format!("the remote region: {error}"))?;
        self.here.deregister(LOCAL).map_err(|error| format!("the region: {error}"))
    }

    /// Checks the local canary, and replaces it by another.
    fn fresh_local(&mut self, at: usize) -> Result<(), String> {
        if read(&self.local, at) != bytes_of(self.places[at].local) {
            return Err(format!("place {at}: local bytes changed after the end of a transfer (L2)"));
        }
        self.fill_local(at);
        Ok(())
    }

    fn fill_local(&mut self, at: usize) {
        self.patterns += 1;
        self.places[at].local = self.patterns;
        self.local.write(at * PLACE_BYTES, &bytes_of(self.patterns));
    }

    fn fill_remote(&mut self, at: usize) {
        self.patterns += 1;
        let place = &mut self.places[at];
        (place.remote, place.remote_is) = (self.patterns, [Outcome::NotApplied; SLICES_MAX]);
        self.remote.write(at * PLACE_BYTES, &bytes_of(self.patterns));
    }

    /// Checks that the remote place holds the right bytes.
    fn check_remote(&self, at: usize) -> Result<(), String> {
        let place = &self.places[at];
        let (bytes, source, canary) =
            (read(&self.remote, at), bytes_of(place.source), bytes_of(place.remote));
        for (nth, is) in place.remote_is.iter().enumerate() {
            let range = range(nth);
            let right = match is {
                Outcome::Applied => bytes[range.clone()] == source[range],
                Outcome::NotApplied => bytes[range.clone()] == canary[range],
                Outcome::Unknown => range.into_iter().all(|i| bytes[i] == source[i] || bytes[i] == canary[i]),
            };
            if !right {
                return Err(format!("place {at}: wrong bytes at the peer, where slice {nth} ended {is:?}"));
            }
        }
        Ok(())
    }
}

const fn token(at: usize, nth: usize) -> Token {
    Token((at * (FENCE + 1) + nth) as u64)
}

const fn range(nth: usize) -> core::ops::Range<usize> {
    nth * SLICE_BYTES..(nth + 1) * SLICE_BYTES
}

/// The bytes of place `at`.
fn read(buffer: &Buffer, at: usize) -> Box<[u8]> {
    buffer.read(at * PLACE_BYTES, PLACE_BYTES).into()
}

/// The bytes of a place that holds pattern `number`.
fn bytes_of(number: u64) -> Box<[u8]> {
    pattern(number, PLACE_BYTES).into()
}
