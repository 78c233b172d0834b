//! Engines, the network and two Conductors, by seed.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use conductor_core::events::Dialect;
use conductor_core::events::encode::Layout;
use conductor_core::knowledge::{Knowledge, Matches, PublisherId, Registration, Role, Settings};
use conductor_core::stream::{self, History, REPLAY_END, State, Stream};
use conductor_core::{ContextId, InstanceId};
use te_core::Instant;
use te_core::testkit::Rng;

use crate::judge::{Cursor, Lie, Origin, Told, Watched, answered, compare};
use crate::model::{BLOCK_TOKENS, Op, Prompts, Rank};
use crate::transfers::Transfer;

const STEPS: u64 = 250;
const STEPS_TO_RECOVER_MAX: u64 = 2_000;
const STEP: Duration = Duration::from_millis(100);

/// A connection that carries messages.
#[derive(Debug, Default)]
struct Wire {
    messages: VecDeque<(u64, Vec<u8>)>,
    /// It ends after its messages.
    cut: bool,
}

#[derive(Debug)]
pub(crate) struct Publisher {
    pub(crate) rank: Rank,
    pub(crate) history: History,
    kept: usize,
    said: Told,
    up: bool,
    pub(crate) id: PublisherId,
    instance: InstanceId,
    pub(crate) settings: stream::Settings,
    /// As the two Conductors follow it.
    pub(crate) followers: [Follower; 2],
}

#[derive(Debug)]
pub(crate) struct Follower {
    pub(crate) stream: Stream,
    live: Option<Wire>,
    replay: Option<Wire>,
    pub(crate) cursor: Cursor,
    /// Of a stream before a crash.
    pub(crate) excused: bool,
    /// The last message that was applied, for a lie.
    last: Vec<u8>,
}

/// A Conductor.
#[derive(Debug)]
pub(crate) struct Side {
    pub(crate) knowledge: Knowledge,
    snapshot: Option<(Vec<u8>, Vec<Cursor>)>,
    /// What the other one knew at some time.
    pub(crate) transfers: Vec<Transfer>,
}

/// What a seed came to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Report {
    pub(crate) applied: u64,
    pub(crate) gaps: u64,
    pub(crate) replays: u64,
    pub(crate) fences: u64,
    pub(crate) crashes: u64,
    pub(crate) restarts: u64,
    pub(crate) whole: u64,
    pub(crate) partial: u64,
    pub(crate) served_blocks: u64,
    pub(crate) adopted: u64,
    pub(crate) refused: u64,
    pub(crate) damaged: u64,
}

pub(crate) struct World {
    pub(crate) rng: Rng,
    pub(crate) now: Instant,
    prompts: Prompts,
    pub(crate) publishers: Vec<Publisher>,
    pub(crate) sides: [Side; 2],
    context: ContextId,
    origins: HashMap<Vec<u8>, Origin>,
    stamp: u64,
    pub(crate) calm: bool,
    pub(crate) lie: Option<Lie>,
    /// Faults in a million, of this seed.
    faults_ppm: u32,
    matches: Matches,
    /// Something was applied since the judge looked.
    dirty: bool,
    pub(crate) report: Report,
}

impl World {
    pub(crate) fn new(seed: u64, lie: Option<Lie>) -> Self {
        let mut rng = Rng::new(seed);
        let prompts = Prompts::new(&mut rng);
        let side = |_| Side {
            knowledge: Knowledge::new(Settings::default()),
            snapshot: None,
            transfers: Vec::new(),
        };
        let mut sides = [0, 1].map(side);
        let mut publishers = Vec::new();
        for engine in 0..1 + rng.index(3) {
            for dp_rank in 0..1 + rng.index(2) as u32 {
                publishers.push(Publisher::new(&mut rng, &mut sides, engine, dp_rank));
            }
        }
        let context = sides[0].knowledge.context("tenant", "model", BLOCK_TOKENS).expect("registered");
        let faults_ppm = [0, 10_000, 60_000][rng.index(3)];
        Self {
            rng,
            now: Instant::ZERO,
            prompts,
            publishers,
            sides,
            context,
            origins: HashMap::new(),
            stamp: 0,
            calm: false,
            lie,
            faults_ppm,
            matches: Matches::default(),
            dirty: true,
            report: Report::default(),
        }
    }

    /// Runs the seed; an error is a lie of the Conductor.
    pub(crate) fn run(mut self) -> Result<Report, String> {
        for _ in 0..STEPS {
            self.step()?;
        }
        self.calm = true;
        for at in 0..self.publishers.len() {
            self.publishers[at].up = true;
        }
        for step in 0..STEPS_TO_RECOVER_MAX {
            self.step()?;
            // Something is said after the last loss, so that it is noticed.
            if step % 100 == 20 {
                (0..self.publishers.len()).for_each(|at| self.publish(at, true));
            }
            if step > 50 && self.publishers.iter().all(Publisher::is_settled) {
                return self.recovered();
            }
        }
        let stuck = self.publishers.iter().find(|publisher| !publisher.is_settled());
        Err(format!("not recovered: {:?}", stuck.map(|publisher| &publisher.followers)))
    }

    fn recovered(mut self) -> Result<Report, String> {
        for publisher in &self.publishers {
            let whole = publisher.followers.each_ref().map(|follower| follower.stream.is_whole());
            if whole[0] != whole[1] {
                return Err(format!("one does not know what the other knows: {:?}", publisher.followers));
            }
            for follower in &publisher.followers {
                let keeps = publisher.settings.replay && publisher.kept > 10_000;
                if !whole[0] && keeps && !follower.excused() {
                    return Err(format!("not whole, though it could be: {:?}", follower.stream));
                }
                *(if whole[0] { &mut self.report.whole } else { &mut self.report.partial }) += 1;
                self.report.fences += follower.cursor.fences;
                // Since the last crash.
                let counters = follower.stream.counters();
                self.report.applied += counters.applied;
                self.report.gaps += counters.gaps;
                self.report.replays += counters.replays;
            }
        }
        self.judge(true)?;
        let [ours, theirs] = self.sides.each_ref().map(|side| side.knowledge.digests());
        if self.publishers.iter().all(|publisher| publisher.followers[0].stream.is_whole()) && ours != theirs
        {
            return Err(format!("digests differ: {ours:?}, {theirs:?}"));
        }
        Ok(self.report)
    }

    fn step(&mut self) -> Result<(), String> {
        self.now = self.now + STEP;
        for at in 0..self.publishers.len() {
            self.engine(at);
            for side in 0..2 {
                self.network(at, side)?;
                self.with(at, side, |stream, now, sink| stream.tick(now, sink))?;
                self.judge(false)?;
            }
        }
        for side in 0..2 {
            self.sides[side].knowledge.tick(self.now, 8);
            self.conductor(side)?;
            self.anti_entropy(side)?;
        }
        self.judge(false)
    }

    pub(crate) fn fault(&mut self, times: u32) -> bool {
        !self.calm && self.rng.chance_ppm(self.faults_ppm.saturating_mul(times) / 10)
    }

    /// What the engine of a publisher does.
    fn engine(&mut self, at: usize) {
        if self.fault(2) {
            self.report.restarts += 1;
            self.publishers[at].restart(&mut self.rng);
        }
        if self.publishers[at].up && !self.calm {
            for _ in 0..self.rng.index(3) {
                self.publish(at, false);
            }
        } else if self.rng.index(20) == 0 {
            self.publishers[at].up = true;
        }
    }

    fn publish(&mut self, at: usize, always: bool) {
        let ops = self.publishers[at].rank.act(&mut self.rng, &self.prompts);
        if ops.is_empty() && !always {
            return;
        }
        let unreadable = self.fault(1) && self.rng.index(4) == 0;
        let mut faults = || [(); 2].map(|()| (self.fault(5), self.fault(5), self.fault(5)));
        let faults = faults();
        self.stamp += 1;
        let publisher = &mut self.publishers[at];
        let mut payload = publisher.rank.payload(&mut self.rng, &self.prompts, &ops, self.stamp as f64);
        if unreadable {
            payload = vec![0xc1; 9 + self.stamp as usize];
        }
        let seq = publisher.history.push(&payload);
        let run = publisher.said.runs.len() - 1;
        publisher.said.runs[run].push(ops);
        self.origins.insert(payload.clone(), (at, run, seq));
        for (follower, (lost, again, swap)) in publisher.followers.iter_mut().zip(faults) {
            let Some(wire) = follower.live.as_mut().filter(|wire| !wire.cut && !lost) else { continue };
            wire.messages.push_back((seq, payload.clone()));
            if again {
                wire.messages.push_back((seq, payload.clone()));
            }
            let len = wire.messages.len();
            if swap && len >= 2 {
                wire.messages.swap(len - 1, len - 2);
            }
        }
    }

    /// What arrives at the Conductor.
    fn network(&mut self, at: usize, side: usize) -> Result<(), String> {
        let (cut, connects) = (self.fault(3), self.rng.index(4) == 0 && self.publishers[at].up);
        match &mut self.publishers[at].followers[side].live {
            None if connects => {
                self.publishers[at].followers[side].live = Some(Wire::default());
                if !self.hides_reconnects(at, side) {
                    self.with(at, side, |stream, now, sink| stream.connected(now, sink))?;
                }
            }
            None => {}
            Some(wire) => {
                wire.cut |= cut;
                // A connection that is cut loses what is in flight, or not.
                if cut && self.rng.index(2) == 0 {
                    wire.messages.clear();
                }
            }
        }
        for _ in 0..self.rng.index(5) {
            let Some(wire) = &mut self.publishers[at].followers[side].live else { break };
            if let Some((seq, payload)) = wire.messages.pop_front() {
                self.with(at, side, |stream, now, sink| stream.live(now, seq, &payload, sink))?;
            } else if wire.cut {
                self.publishers[at].followers[side].live = None;
                if !self.hides_reconnects(at, side) {
                    self.with(at, side, |stream, now, sink| stream.disconnected(now, sink))?;
                }
            }
        }
        for _ in 0..self.rng.index(8) {
            let Some(wire) = &mut self.publishers[at].followers[side].replay else { break };
            if let Some((seq, mut payload)) = wire.messages.pop_front() {
                let follower = &self.publishers[at].followers[side];
                let position = follower.stream.position();
                let first = position.is_some_and(|position| position.next.checked_sub(1) == Some(seq));
                if self.lie == Some(Lie::ReplaysNotVerified) && first {
                    payload.clone_from(&follower.last);
                }
                self.with(at, side, |stream, now, sink| stream.replayed(now, seq, &payload, sink))?;
            } else if wire.cut {
                self.publishers[at].followers[side].replay = None;
                self.with(at, side, |stream, now, sink| stream.replay_failed(now, sink))?;
            }
        }
        Ok(())
    }

    /// With the lie, a live stream is not told that its connection ended and another one began.
    fn hides_reconnects(&self, at: usize, side: usize) -> bool {
        self.lie == Some(Lie::ReconnectsNotNoticed)
            && self.publishers[at].followers[side].stream.state() == State::Live
    }

    /// Crashes, snapshots, and reports that an engine is dead.
    fn conductor(&mut self, side: usize) -> Result<(), String> {
        if self.fault(3) {
            let at = self.rng.index(self.publishers.len());
            if !self.publishers[at].up {
                self.with(at, side, |stream, now, sink| stream.died(now, sink))?;
            }
        }
        if !self.calm && self.rng.index(20) == 0 {
            self.take_snapshot(side);
        }
        if self.fault(1) {
            self.crash(side);
        }
        Ok(())
    }

    /// Lets the stream of a publisher act, and answers the replay for which it asks.
    pub(crate) fn with<T>(
        &mut self,
        at: usize,
        side: usize,
        act: impl FnOnce(&mut Stream, Instant, &mut Watched<'_>) -> T,
    ) -> Result<T, String> {
        let prompts = &self.prompts;
        let publisher = &mut self.publishers[at];
        let (rank, said) = (&publisher.rank, &publisher.said);
        let follower = &mut publisher.followers[side];
        let altered = |origin: Origin| without_parents(prompts, rank, said, origin);
        let mut sink = Watched {
            feed: self.sides[side].knowledge.feed(publisher.id),
            cursor: &mut follower.cursor,
            said,
            origins: &self.origins,
            publisher: at,
            lie: self.lie,
            wrong: Ok(()),
            acted: false,
            altered: &altered,
        };
        let value = act(&mut follower.stream, self.now, &mut sink);
        self.dirty |= sink.acted;
        let (asked, wrong) = (sink.feed.asked, sink.wrong);
        wrong?;
        if self.lie == Some(Lie::ReplaysNotVerified)
            && let Some((run, next)) = follower.cursor.at
        {
            let last = self.origins.iter().find(|(_, origin)| **origin == (at, run, next - 1));
            follower.last = last.map(|(payload, _)| payload.clone()).unwrap_or_default();
        }
        if let Some(from) = asked {
            self.answer_replay(at, side, from);
        }
        Ok(value)
    }

    fn answer_replay(&mut self, at: usize, side: usize, from: u64) {
        let (refused, cut) = (self.fault(10), self.fault(5));
        let lossy = self.fault(20);
        let publisher = &self.publishers[at];
        let mut wire = Wire { messages: VecDeque::new(), cut: refused || cut || !publisher.up };
        if publisher.up && !refused {
            let kept: Vec<_> =
                publisher.history.since(from).map(|(seq, payload)| (seq, payload.to_vec())).collect();
            let end = if cut { self.rng.index(kept.len() + 1) } else { kept.len() };
            wire.messages = kept.into_iter().take(end).collect();
            if lossy {
                wire.messages.retain(|_| self.rng.index(4) != 0);
            }
            if !wire.cut && (!lossy || self.rng.index(4) != 0) {
                wire.messages.push_back((REPLAY_END, Vec::new()));
            }
        }
        self.publishers[at].followers[side].replay = Some(wire);
    }

    fn take_snapshot(&mut self, side: usize) {
        let of = |publisher: &Publisher| (publisher.id, publisher.followers[side].stream.position());
        let positions: Vec<_> = self.publishers.iter().map(of).collect();
        let position = |id| positions.iter().find(|(of, _)| *of == id).and_then(|(_, position)| *position);
        let mut bytes = Vec::new();
        self.sides[side].knowledge.snapshot(position, &mut bytes);
        let cursors = self.publishers.iter().map(|publisher| publisher.followers[side].cursor.clone());
        self.sides[side].snapshot = Some((bytes, cursors.collect()));
    }

    /// A Conductor ends, and starts from its last snapshot.
    fn crash(&mut self, side: usize) {
        let Side { knowledge, snapshot: Some((bytes, cursors)), .. } = &mut self.sides[side] else { return };
        self.report.crashes += 1;
        let (restored, positions) = Knowledge::restore(bytes, Settings::default()).unwrap();
        *knowledge = restored;
        for (publisher, cursor) in self.publishers.iter_mut().zip(cursors) {
            let position = positions.iter().find(|(of, _)| *of == publisher.id).and_then(|(_, at)| *at);
            let follower = &mut publisher.followers[side];
            follower.excused = follower.excused();
            follower.stream = Stream::new(publisher.settings, position);
            follower.cursor = Cursor { served: false, ..cursor.clone() };
            (follower.live, follower.replay) = (None, None);
            if self.lie == Some(Lie::SnapshotsTrusted) {
                knowledge.serve(publisher.id, true);
            }
        }
        self.dirty = true;
    }

    /// Compares every answer with the truth, if anything has changed.
    fn judge(&mut self, equal: bool) -> Result<(), String> {
        if !self.dirty && !equal {
            return Ok(());
        }
        self.dirty = false;
        for (prompt, keys) in self.prompts.prompts.iter().zip(&self.prompts.keys) {
            for (at, side) in self.sides.iter().enumerate() {
                side.knowledge.query(self.context, keys, false, &mut self.matches);
                for publisher in &self.publishers {
                    let answered = answered(&self.matches, publisher.instance, publisher.rank.dp_rank);
                    let follower = &publisher.followers[at];
                    let equal = equal && follower.stream.is_whole();
                    compare(answered, &follower.cursor, prompt, equal, publisher.id)?;
                    self.report.served_blocks += u64::from(answered[2]);
                }
            }
        }
        Ok(())
    }
}

impl Publisher {
    fn new(rng: &mut Rng, sides: &mut [Side; 2], engine: usize, dp_rank: u32) -> Self {
        let rank = Rank::new(rng, dp_rank);
        let (dialect, first_seq) = match rank.layout {
            Layout::VllmArrays | Layout::VllmMaps => (Dialect::Vllm, 0),
            Layout::Sglang => (Dialect::Sglang, 0),
            Layout::Mooncake => (Dialect::Mooncake, 1),
        };
        let replay = rng.index(4) != 0;
        let kept = [20, 100, 100_000][rng.index(3)];
        let settings = stream::Settings {
            first_seq,
            replay,
            replay_timeout: Duration::from_millis(1_000),
            stale_after: Duration::from_millis(500),
            held_messages_max: [3, 1_000][rng.index(2)],
            ..stream::Settings::default()
        };
        let registration = Registration {
            instance: format!("engine {engine}"),
            tenant: "tenant".into(),
            model: "model".into(),
            block_tokens: BLOCK_TOKENS,
            lora: None,
            salt: None,
            dp_rank,
            dialect,
            role: Role::Engine,
        };
        let instance_name = registration.instance.clone();
        let ids =
            sides.each_mut().map(|side| side.knowledge.register(registration.clone()).expect("room for it"));
        let instance = sides[0].knowledge.instance("tenant", &instance_name).expect("registered");
        let follower = |_| Follower {
            stream: Stream::new(settings, None),
            live: None,
            replay: None,
            cursor: Cursor::default(),
            excused: false,
            last: Vec::new(),
        };
        Self {
            rank,
            history: History::new(first_seq, kept, usize::MAX),
            kept,
            said: Told { runs: vec![Vec::new()], first_seq },
            up: true,
            id: ids[0],
            instance,
            settings,
            followers: [0, 1].map(follower),
        }
    }

    /// The process ends, and a new one may begin at once.
    fn restart(&mut self, rng: &mut Rng) {
        self.rank.restart();
        self.history = History::new(self.said.first_seq, self.kept, usize::MAX);
        self.said.runs.push(Vec::new());
        self.up = rng.index(2) == 0;
        for follower in &mut self.followers {
            for wire in [&mut follower.live, &mut follower.replay].into_iter().flatten() {
                wire.cut = true;
            }
        }
    }

    fn is_settled(&self) -> bool {
        let quiet = |wire: &Wire| wire.messages.is_empty() && !wire.cut;
        let here = Some((self.said.runs.len() - 1, self.history.next()));
        let follows = |follower: &Follower| {
            let live = follower.stream.state() == State::Live && follower.live.as_ref().is_some_and(quiet);
            live && follower.cursor.at == here
        };
        let begins = self.followers.each_ref().map(|it| it.stream.position().map(|position| position.begin));
        self.up && self.followers.iter().all(follows) && begins[0] == begins[1]
    }
}

impl Follower {
    /// A message could not be read, or the replays failed too often in a row: what was before is not known.
    pub(crate) fn excused(&self) -> bool {
        let counters = self.stream.counters();
        self.excused
            || counters.fences[stream::FenceReason::Unreadable as usize] != 0
            || counters.given_up != 0
    }
}

/// The payload of a message without removals of blocks that have successors on their tier.
fn without_parents(prompts: &Prompts, rank: &Rank, said: &Told, (_, run, seq): Origin) -> Option<Vec<u8>> {
    let ops = &said.runs[run][(seq - said.first_seq) as usize];
    let kept: Vec<Op> = ops.iter().filter(|op| !matches!(op, Op::Remove(1 | 2, _))).cloned().collect();
    (kept.len() != ops.len()).then(|| rank.payload(&mut Rng::new(seq), prompts, &kept, 0.0))
}
