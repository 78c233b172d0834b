//! The members, the arbiter, the network, and what must hold.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use store_core::command_log::Lsn;
use store_core::ha::{
    Action, Ask, Limits, Member, MemberId, Message, Record, Reign, Rules, Timing, Told, Versioned,
};
use store_core::message::{Get, LeaseWanted, Operation};
use store_core::{Frame, Key, MasterConfig, SegmentNo, Session};
use te_core::Instant;
use te_core::testkit::Rng;

use crate::checker::History;
use crate::clients::Client;
use crate::followers::Follower;
use crate::nodes::Node;
use crate::pools::Pool;
use crate::report::{Lies, Report, Violation};

#[path = "faults.rs"]
mod faults;

pub(crate) const MEMBERS: usize = 3;
pub(crate) const CLIENTS: usize = 4;
/// How long things go wrong, how long clients go on after it, and how long nothing is asked for at the end.
const PHASES_S: [u64; 3] = [20, 20, 5];
/// The same with disks, of which each run does more.
const PHASES_WITH_DISKS_S: [u64; 3] = [15, 13, 5];
/// After this, a question to the arbiter has no answer.
const ASK_TIMEOUT: Duration = Duration::from_millis(300);
pub(crate) const LEASE_MS: u32 = 2_000;

/// A process or service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Party {
    Member(usize),
    Client(usize),
    Arbiter,
}

pub(crate) enum Event {
    Message {
        from: usize,
        to: usize,
        message: Message,
    },
    /// A question reaches the arbiter, and its answer the member.
    Ask {
        member: usize,
        life: u64,
        number: u64,
        ask: Ask,
    },
    Told {
        member: usize,
        life: u64,
        number: u64,
        told: Told,
    },
    /// A request reaches a member, and its answer the client.
    Request {
        client: usize,
        member: usize,
        connection: u64,
        bytes: Vec<u8>,
    },
    Answer {
        client: usize,
        connection: u64,
        bytes: Option<Vec<u8>>,
    },
    Wake {
        client: usize,
        call: u64,
    },
    /// A node does what it does next.
    Node(usize),
    NodeBack(usize),
    /// A process that uses the pool does what it does next.
    Pool(usize),
    Flush(usize),
    Trouble,
    /// A process is killed.
    Dies(usize),
    Restart(usize),
    GoOn(usize),
    Compare,
}

struct Process {
    member: Option<Member>,
    life: u64,
    /// Its clock shows the time since this moment, at this rate.
    started: Instant,
    rate_ppm: i64,
    /// It is stopped until then.
    stopped: Option<Instant>,
    /// Connections of clients and the node.
    sessions: HashMap<(usize, u64), Session>,
    /// Answers that wait for the command that they depend on, with the connection that they go to.
    held: VecDeque<(Lsn, (usize, u64), Vec<u8>)>,
    /// When a switchover was begun whose end is not known.
    handing: Option<Reign>,
    /// The life of the member after the last event, and whether it had state.
    was: (u64, bool),
}

impl Process {
    fn describe(&self) -> String {
        let Some(member) = &self.member else { return "down".into() };
        let (leads, follows) = (member.leads().map(|of| of.0), member.follows().map(|of| of.0));
        let (lsn, leader, due) = (member.lsn(), member.leader(), member.poll_timeout());
        let stopped = self.stopped;
        format!("leads {leads:?}, follows {follows:?}, {lsn}, {leader:?}, due {due:?}, stopped {stopped:?}")
    }

    fn local(&self, now: Instant) -> Instant {
        let nanos = now.nanos_since(self.started) as i128;
        Instant::from_nanos((1_000_000_000 + nanos + nanos * i128::from(self.rate_ppm) / 1_000_000) as u64)
    }
}

pub(crate) struct World {
    pub(crate) now: Instant,
    pub(crate) rng: Rng,
    pub(crate) lies: Lies,
    processes: Vec<Process>,
    arbiter: Versioned,
    arbiter_away: Instant,
    pub(crate) clients: Vec<Client>,
    pub(crate) has_disks: bool,
    pub(crate) nodes: Vec<Node>,
    pub(crate) pool: Pool,
    /// Whose disk has a number.
    pub(crate) disks: HashMap<SegmentNo, usize>,
    /// What is in memory: the generation that was written last at each place.
    pub(crate) memory: HashMap<(SegmentNo, u64), u64>,
    /// The put that each key has had last, if nothing else was asked for since.
    pub(crate) settled: HashMap<Vec<u8>, u64>,
    /// When it was not known last what became of a change of a key.
    pub(crate) doubts: HashMap<Vec<u8>, Instant>,
    pub(crate) history: History,
    pub(crate) report: Report,
    events: BTreeMap<(Instant, u64), Event>,
    counter: u64,
    /// No message goes from the first to the second until then.
    cuts: Vec<(Party, Party, Instant)>,
    /// The latest reign that has answered.
    answered: Reign,
    limits: Limits,
    pub(crate) keys: BTreeSet<Vec<u8>>,
    /// Ranges that readers may read, and until when.
    pub(crate) leases: Vec<(SegmentNo, u64, u64, Instant)>,
    pub(crate) lineage: u64,
    /// The lives under which members have last acknowledged something.
    lives: [u64; MEMBERS],
    /// The same by reign.
    lives_then: HashMap<(usize, Reign), u64>,
    /// How much longer than usual messages between members take, us.
    lag_us: u64,
    /// When the last message from one member to another arrives.
    arrives: HashMap<(usize, usize), Instant>,
    /// Prints the messages of members.
    pub(crate) talks: bool,
    /// Each is told what one process does while it leads.
    followers: Vec<Follower>,
}

impl World {
    pub(crate) fn new(seed: u64, lies: Lies, has_disks: bool) -> Self {
        let mut rng = Rng::new(seed);
        let lag_us = if rng.below(3) == 0 { 30_000 } else { 1 };
        let processes = (0..MEMBERS)
            .map(|_| Process {
                member: None,
                life: 0,
                started: Instant::ZERO,
                rate_ppm: rng.below(20_000) as i64 - 10_000,
                stopped: None,
                sessions: HashMap::new(),
                held: VecDeque::new(),
                handing: None,
                was: (0, false),
            })
            .collect();
        // In some runs little is kept, and little is under way.
        let limits = match rng.below(3) {
            0 => Limits { history_bytes: 2_000, window_bytes: 2_000, append_bytes: 200, ..Limits::default() },
            1 => Limits { append_bytes: 1, window_bytes: 1_000, window_chunks: 1, ..Limits::default() },
            _ => Limits::default(),
        };
        // The runs that show other broken rules stay as they are.
        let has_pool = !has_disks && matches!(lies, Lies::NONE | Lies::ONE_DOMAIN | Lies::UNTOLD);
        let mut this = Self {
            now: Instant::ZERO,
            rng,
            lies,
            processes,
            arbiter: Versioned::default(),
            arbiter_away: Instant::ZERO,
            clients: (0..CLIENTS).map(Client::new).collect(),
            has_disks,
            nodes: Node::all(has_disks),
            pool: if has_pool { Pool::new() } else { Pool::default() },
            disks: HashMap::new(),
            memory: HashMap::new(),
            settled: HashMap::new(),
            doubts: HashMap::new(),
            history: History::default(),
            report: Report::default(),
            events: BTreeMap::new(),
            counter: 0,
            cuts: Vec::new(),
            answered: Reign::default(),
            limits,
            keys: BTreeSet::new(),
            leases: Vec::new(),
            lineage: 0,
            lives: [0; MEMBERS],
            lives_then: HashMap::new(),
            lag_us,
            arrives: HashMap::new(),
            talks: std::env::var_os("SNOWSKIN_TALK").is_some(),
            followers: (0..MEMBERS).map(|_| Follower::default()).collect(),
        };
        (0..MEMBERS).for_each(|member| this.start(member));
        for client in 0..CLIENTS {
            this.after(Duration::from_millis(700), Event::Wake { client, call: 0 });
        }
        (0..this.nodes.len()).for_each(|node| this.after(Duration::from_millis(600), Event::Node(node)));
        let processes = this.pool.processes.len();
        (0..processes).for_each(|process| this.after(Duration::from_millis(650), Event::Pool(process)));
        this.after(Duration::from_secs(1), Event::Trouble);
        this.after(Duration::from_secs(1), Event::Compare);
        this
    }

    fn config(&mut self, life: u64) -> MasterConfig {
        MasterConfig {
            lease_ttl_ms: LEASE_MS,
            lease_guard_ms: 50,
            node_ttl_ms: 8_000,
            put_start_discard_timeout_ms: 20_000,
            put_start_release_timeout_ms: 40_000,
            epoch: life as u32,
            disk_away_ms: 2_000,
            demote_ahead: if self.has_disks { 0.3 } else { 0.0 },
            hash_seed: self.rng.next(),
            handle_key: [self.rng.next(), self.rng.next()],
            ..MasterConfig::default()
        }
    }

    fn start(&mut self, index: usize) {
        self.counter += 1;
        let life = self.counter;
        let config = self.config(life);
        let process = &mut self.processes[index];
        (process.life, process.started, process.stopped) = (life, self.now, None);
        let local = process.local(self.now);
        let id = MemberId(index as u64);
        let ms = Duration::from_millis;
        // Messages may take longer than the leader waits for a switchover.
        let timing = Timing { compare: ms(500), hand_over: ms(60), ..Timing::default() };
        let rules = Rules { timing, limits: self.limits, crc32c: crc32c::crc32c };
        process.held.clear();
        process.handing = None;
        process.member = Some(Member::new(local, id, life, config, rules).unwrap());
        process.was = (0, false);
        self.with(index, |_, _| {});
    }

    pub(crate) fn at(&mut self, at: Instant, event: Event) {
        self.counter += 1;
        self.events.insert((at, self.counter), event);
    }

    pub(crate) fn after(&mut self, by: Duration, event: Event) {
        self.at(self.now + by, event);
    }

    pub(crate) fn is_quiet(&self) -> bool {
        self.now >= self.phase_end(1)
    }

    /// When so many phases have ended.
    pub(crate) fn phase_end(&self, phases: usize) -> Instant {
        let of = if self.has_disks { PHASES_WITH_DISKS_S } else { PHASES_S };
        Instant::ZERO + Duration::from_secs(of[..phases].iter().sum())
    }

    pub(crate) fn us(&mut self, min: u64, max: u64) -> Duration {
        Duration::from_micros(min + self.rng.below(max - min))
    }

    pub(crate) fn number(&mut self) -> u64 {
        self.counter += 1;
        self.counter
    }

    fn is_cut(&self, from: Party, to: Party) -> bool {
        self.cuts.iter().any(|(a, b, until)| *a == from && *b == to && self.now < *until)
    }

    pub(crate) fn run(mut self) -> Result<Report, Violation> {
        let end = self.phase_end(3);
        loop {
            let due = |(index, process): (usize, &Process)| {
                let member = process.member.as_ref().filter(|_| process.stopped.is_none())?;
                Some((self.when(index, member.poll_timeout()), index))
            };
            let timeout = self.processes.iter().enumerate().filter_map(due).min();
            let event = self.events.first_key_value().map(|((at, _), _)| *at);
            match (timeout, event) {
                (Some((at, index)), event) if event.is_none_or(|event| at < event) => {
                    self.now = self.now.max(at);
                    if self.now >= end {
                        break;
                    }
                    self.with(index, |member, local| member.handle_timeout(local));
                }
                (_, Some(at)) => {
                    self.now = self.now.max(at);
                    if self.now >= end {
                        break;
                    }
                    let event = self.events.pop_first().unwrap().1;
                    self.handle(event)?;
                }
                (_, None) => break,
            }
            self.tell_followers();
            self.take_actions()?;
        }
        self.finish()
    }

    /// When a process' clock shows this time; at least 1 us from now, so that time goes on.
    fn when(&self, index: usize, local: Instant) -> Instant {
        let process = &self.processes[index];
        let shown = process.local(self.now);
        if local <= shown {
            return self.now + Duration::from_micros(1);
        }
        self.now + Duration::from_nanos(local.nanos_since(shown) * 1_011 / 1_000 + 1)
    }

    /// Lets a member that runs do something.
    pub(crate) fn with(&mut self, index: usize, act: impl FnOnce(&mut Member, Instant)) {
        let process = &mut self.processes[index];
        let local = process.local(self.now);
        if let Some(member) = process.member.as_mut().filter(|_| process.stopped.is_none()) {
            act(member, local);
        }
    }

    fn handle(&mut self, event: Event) -> Result<(), Violation> {
        match event {
            Event::Message { from, to, message } => {
                if let Some(until) = self.processes[to].stopped {
                    self.at(until, Event::Message { from, to, message });
                    return Ok(());
                }
                self.report.joins += u64::from(matches!(message, Message::Join { .. }));
                if let Message::Chunk { reign, number: 0, .. } = &message {
                    let follows = self.processes[to].member.as_ref().and_then(Member::follows);
                    self.report.behind += u64::from(follows.is_some_and(|(of, _)| of == *reign));
                }
                let message = self.falsified(to, message);
                if self.talks {
                    let mut text = format!("{message:?}");
                    text.truncate(160);
                    println!("{:?}: {from} -> {to}: {text}", self.now);
                }
                self.with(to, |member, now| member.handle_message(now, MemberId(from as u64), message));
            }
            Event::Ask { member, life, number, ask } => self.ask(member, life, number, ask),
            Event::Told { member, life, number, told } => {
                if let Some(until) = self.processes[member].stopped {
                    self.at(until, Event::Told { member, life, number, told });
                } else if self.processes[member].life == life {
                    self.with(member, |member, now| member.handle_told(now, number, told));
                }
            }
            Event::Request { client, member, connection, bytes } => {
                self.request(client, member, connection, bytes)?;
            }
            Event::Answer { client, connection, bytes } => self.answer(client, connection, bytes)?,
            Event::Wake { client, call } => self.wake(client, call)?,
            Event::Node(node) => self.node_steps(node),
            Event::NodeBack(node) => self.node_is_back(node),
            Event::Pool(process) => self.pool_steps(process),
            Event::Flush(member) => self.with(member, Member::flush),
            Event::Trouble => self.trouble(),
            Event::Dies(index) => self.crash(index),
            Event::Restart(index) => {
                if self.processes[index].member.is_none() {
                    self.start(index);
                }
            }
            Event::GoOn(index) => {
                let process = &mut self.processes[index];
                if process.stopped.is_some_and(|until| until <= self.now) {
                    process.stopped = None;
                }
            }
            Event::Compare => {
                self.compare()?;
                self.after(Duration::from_secs(1), Event::Compare);
            }
        }
        Ok(())
    }

    fn request(
        &mut self,
        client: usize,
        member: usize,
        connection: u64,
        bytes: Vec<u8>,
    ) -> Result<(), Violation> {
        let process = &mut self.processes[member];
        if let Some(until) = process.stopped {
            self.at(until, Event::Request { client, member, connection, bytes });
            return Ok(());
        }
        let local = process.local(self.now);
        let Some(running) = &mut process.member else { return Ok(()) };
        let mut session = process.sessions.remove(&(client, connection)).unwrap_or_default();
        let (frame, _) = Frame::parse(&bytes).unwrap().unwrap();
        let mut out = Vec::new();
        match running.handle(local, &mut session, &frame, &mut out) {
            Ok(lsn) => {
                process.sessions.insert((client, connection), session);
                process.held.push_back((lsn, (client, connection), out));
                // Requests that come together are sent on together.
                let flush = self.us(1, 200);
                self.after(flush, Event::Flush(member));
            }
            Err(_) => {
                // It says at once that it does not lead.
                let delay = self.us(50, 400);
                self.after(delay, Event::Answer { client, connection, bytes: None });
            }
        }
        Ok(())
    }

    /// Gives the answers that may be given, and takes a snapshot if one is wanted.
    fn release(&mut self, index: usize) -> Result<(), Violation> {
        let process = &mut self.processes[index];
        let local = process.local(self.now);
        let Some(member) = process.member.as_mut().filter(|_| process.stopped.is_none()) else {
            return Ok(());
        };
        if member.wants_snapshot() {
            member.take_snapshot(local, process.sessions.values());
        }
        let Some(ready) = member.ready(local) else { return Ok(()) };
        let (reign, _) = member.leads().unwrap();
        let held = std::mem::take(&mut process.held);
        let (given, kept): (VecDeque<_>, _) = held.into_iter().partition(|(lsn, ..)| *lsn <= ready);
        process.held = kept;
        for (_, (client, connection), answer) in given {
            if reign < self.answered {
                let text = format!("{reign:?} after {:?} at {:?}", self.answered, self.now);
                return Err(Violation::TwoReigns(text));
            }
            self.answered = reign;
            self.check_space(client, connection, &answer)?;
            if !answer.is_empty() && !self.is_cut(Party::Member(index), Party::Client(client)) {
                let delay = self.us(50, 400);
                self.after(delay, Event::Answer { client, connection, bytes: Some(answer) });
            }
        }
        Ok(())
    }

    fn ask(&mut self, member: usize, life: u64, number: u64, ask: Ask) {
        if self.now < self.arbiter_away {
            return;
        }
        let is_smaller = |record: &Record| record.in_sync.len() < self.arbiter.record.in_sync.len();
        let told = match ask {
            Ask::Swap { version, record }
                if self.lies == Lies::DROPPED_BEFORE
                    && record.reign == self.arbiter.record.reign
                    && is_smaller(&record) =>
            {
                Told::Swapped { version }
            }
            Ask::Swap { version, record } if version == self.arbiter.version => {
                if record.in_sync.len() > self.arbiter.record.in_sync.len() && !self.is_quiet() {
                    // A member that the record names may take over, although the leader never says so.
                    let dies = self.us(0, 500);
                    (self.rng.below(8) == 0).then(|| self.after(dies, Event::Dies(member)));
                }
                self.arbiter = Versioned { version: version + 1, record };
                self.report.swaps += 1;
                Told::Swapped { version: version + 1 }
            }
            _ => {
                let mut is = self.arbiter.clone();
                if self.lies == Lies::TRUSTED {
                    is.record.in_sync = vec![MemberId(member as u64)];
                }
                Told::Is(is)
            }
        };
        let lost = !self.is_quiet() && self.rng.below(20) == 0;
        if lost || self.is_cut(Party::Arbiter, Party::Member(member)) {
            self.report.unknown_swaps += u64::from(matches!(told, Told::Swapped { .. }));
            return;
        }
        let delay = self.us(300, 3_000);
        self.after(delay, Event::Told { member, life, number, told });
    }

    /// A member that is in sync keeps its state while the record says that it may take over.
    fn keeps_state(&mut self, index: usize) -> Result<(), Violation> {
        let process = &mut self.processes[index];
        let Some(member) = &process.member else { return Ok(()) };
        let now = (member.life(), member.master().is_some());
        let was = std::mem::replace(&mut process.was, now);
        let member = MemberId(index as u64);
        if was.1 && was.0 != now.0 && self.arbiter.record.in_sync.contains(&member) && self.lies == Lies::NONE
        {
            return Err(Violation::GivenUp(format!(
                "{member:?} had {was:?}, has {now:?}, {:?}",
                self.arbiter
            )));
        }
        Ok(())
    }

    fn take_actions(&mut self) -> Result<(), Violation> {
        for index in 0..MEMBERS {
            self.keeps_state(index)?;
            loop {
                let process = &mut self.processes[index];
                let Some(action) = process.member.as_mut().and_then(Member::poll_action) else { break };
                let life = process.life;
                self.act(index, life, action)?;
            }
            self.release(index)?;
            // A snapshot is sent at once.
            while let Some(action) = self.processes[index].member.as_mut().and_then(Member::poll_action) {
                let life = self.processes[index].life;
                self.act(index, life, action)?;
            }
        }
        Ok(())
    }

    fn act(&mut self, index: usize, life: u64, action: Action) -> Result<(), Violation> {
        match action {
            Action::Send(to, message) => self.send(index, to.0 as usize, message),
            Action::Ask(number, ask) => {
                let told = match (&ask, self.lies) {
                    (Ask::Swap { version, .. }, Lies::SWAP_WON) => Told::Swapped { version: version + 1 },
                    _ => Told::Unknown,
                };
                self.after(ASK_TIMEOUT, Event::Told { member: index, life, number, told });
                let lost = !self.is_quiet() && self.rng.below(20) == 0;
                if !lost && !self.is_cut(Party::Member(index), Party::Arbiter) {
                    let slow = if self.rng.below(30) == 0 && !self.is_quiet() { 400_000 } else { 3_000 };
                    let delay = self.us(300, slow);
                    self.after(delay, Event::Ask { member: index, life, number, ask });
                }
            }
            Action::Leads(reign) => {
                if reign.term == 1 {
                    self.report.lineages += 1;
                    self.lineage = reign.lineage;
                    // Everything is lost that there was.
                    for key in &self.keys {
                        self.history.lost(key, self.now.as_nanos());
                    }
                    self.leases.clear();
                    self.disks.clear();
                    self.settled.clear();
                } else {
                    self.report.takeovers += 1;
                    if self.lies == Lies::TOMBSTONES {
                        self.forget_tombstones(index);
                    }
                }
            }
            Action::Deposed => {
                self.report.deposed += 1;
                let process = &mut self.processes[index];
                process.sessions.clear();
                process.held.clear();
                let handed = process.handing.take();
                self.report.switched += u64::from(handed.is_some());
            }
        }
        Ok(())
    }

    fn send(&mut self, from: usize, to: usize, message: Message) {
        if let Message::Ack { life, reign, .. } = &message {
            self.lives[from] = *life;
            self.lives_then.insert((from, *reign), *life);
        }
        if self.lies == Lies::LEASED
            && let Message::Append { reign, beat, .. } = &message
        {
            // The leader hears of every beat, but of nothing else.
            let life = self.lives[to];
            let ack = Message::Ack { reign: *reign, life, lsn: 0, beat: *beat, gap: false };
            let delay = self.us(50, 500);
            self.after(delay, Event::Message { from: to, to: from, message: ack });
        }
        if self.is_cut(Party::Member(from), Party::Member(to)) {
            return;
        }
        let (lost, doubled) =
            if self.is_quiet() { (false, false) } else { (self.rng.below(50) == 0, self.rng.below(50) == 0) };
        if lost {
            self.report.chunks_lost += u64::from(matches!(message, Message::Chunk { .. }));
            return;
        }
        for copy in 0..1 + u64::from(doubled) {
            // A request to take over often comes when the leader has given it up.
            let (rarely, late) = match &message {
                Message::TakeOver { .. } => (3, 400_000),
                _ => (100, 60_000),
            };
            let slow = if !self.is_quiet() && self.rng.below(rarely) == 0 { late } else { 400 };
            let lag = if self.is_quiet() { 0 } else { self.rng.below(self.lag_us) };
            let delay = self.us(50 + lag + copy * 10_000, 450 + lag + slow + copy * 10_000);
            let mut at = self.now + delay;
            if self.is_quiet() {
                // A connection keeps the order. Without it, a member that gets one command per message may
                // never be as far as its leader.
                let last = self.arrives.entry((from, to)).or_insert(at);
                at = at.max(*last);
                *last = at;
            }
            self.at(at, Event::Message { from, to, message: message.clone() });
        }
        if self.lies == Lies::PROMISE
            && let Message::Append { reign, after, commands, beat, .. } = &message
        {
            // A follower that has promised acknowledges all the same, and forgets it.
            self.acks_falsely(from, to, (*reign, *after, *beat), commands);
        }
        if self.lies == Lies::TERM
            && let Message::Append { reign, after, commands, beat, .. } = &message
            && self.processes[to].member.as_ref().is_some_and(|it| it.status().reign > *reign)
        {
            self.acks_falsely(from, to, (*reign, *after, *beat), commands);
        }
    }

    /// A request of a client is on its way.
    pub(crate) fn call(&mut self, client: usize, member: usize, connection: u64, bytes: Vec<u8>) {
        let party = Party::Client(client);
        if !self.is_cut(party, Party::Member(member)) {
            let delay = self.us(50, 400);
            self.after(delay, Event::Request { client, member, connection, bytes });
        }
    }

    /// A connection of a client ends.
    pub(crate) fn hang_up(&mut self, member: usize, client: usize, connection: u64) {
        let session = self.processes[member].sessions.remove(&(client, connection));
        if let Some(session) = session {
            self.with(member, |member, now| member.session_ended(now, session));
        }
    }

    /// The epoch for which memory is to be exported, if the member leads.
    pub(crate) fn epoch_of(&self, member: usize) -> Option<u64> {
        let (_, master) = self.processes[member].member.as_ref()?.leads()?;
        Some(master.config().epoch.into())
    }

    /// Tells the followers outside of the store what has changed.
    fn tell_followers(&mut self) {
        for (process, follower) in self.processes.iter_mut().zip(&mut self.followers) {
            match &mut process.member {
                Some(member) => {
                    follower.begin(member);
                    self.report.told += follower.tell(member);
                }
                None => *follower = Follower::default(),
            }
        }
    }

    /// Compares every follower that is where its leader is.
    fn compare(&mut self) -> Result<(), Violation> {
        for (process, follower) in self.processes.iter_mut().zip(&mut self.followers) {
            if let Some(member) = &mut process.member {
                follower.check(member)?;
            }
        }
        let members = || self.processes.iter().filter_map(|process| process.member.as_ref());
        let mut compared = 0;
        for leader in members() {
            let Some((reign, master)) = leader.leads() else { continue };
            for follower in members() {
                let Some((followed, standby)) = follower.follows() else { continue };
                if followed == reign && standby.lsn() == leader.lsn() {
                    compared += 1;
                    if standby.master().digest() != master.digest() {
                        let text = format!("{:?} at {} of {reign:?}", follower.id(), standby.lsn());
                        return Err(Violation::Diverged(text));
                    }
                }
            }
        }
        self.report.compared += compared;
        Ok(())
    }

    fn finish(mut self) -> Result<Report, Violation> {
        self.compare()?;
        for member in self.processes.iter().filter_map(|process| process.member.as_ref()) {
            let status = member.status();
            if status.history_bytes > self.limits.history_bytes {
                return Err(Violation::Unbounded(format!("{status:?}")));
            }
            self.report.snapshots += status.totals.snapshots_taken;
            self.report.loaded += status.totals.snapshots_loaded;
            self.report.diverged += status.totals.diverged;
        }
        if self.report.diverged > 0 && self.lies == Lies::NONE {
            return Err(Violation::Diverged("as a member has found".into()));
        }
        let leaders: Vec<_> = self.processes.iter().filter_map(|p| p.member.as_ref()?.leads()).collect();
        let all: Vec<MemberId> = (0..MEMBERS as u64).map(MemberId).collect();
        if leaders.len() != 1 || self.arbiter.record.in_sync != all {
            let leaders: Vec<_> = leaders.iter().map(|(reign, _)| *reign).collect();
            let members: Vec<_> = self.processes.iter().map(|process| process.describe()).collect();
            return Err(Violation::NotHealed(format!(
                "{leaders:?}, {:?}\n{}",
                self.arbiter,
                members.join("\n")
            )));
        }
        if let Some(stuck) = self.clients.iter().find(|client| !client.is_idle()) {
            return Err(Violation::NotHealed(stuck.describe()));
        }
        self.objects_of_disks_are_found()?;
        match self.history.check() {
            Ok(()) => Ok(self.report),
            Err(refusal) => Err(Violation::NotLinearizable(format!(
                "{}: {:?}\n{}",
                refusal.key, refusal.reason, refusal.story
            ))),
        }
    }

    /// What is on a disk that works, and was not removed since, is found.
    fn objects_of_disks_are_found(&mut self) -> Result<(), Violation> {
        let leads =
            |process: &Process| process.member.as_ref().is_some_and(|member| member.leads().is_some());
        let Some(leader) = self.processes.iter().position(leads) else { return Ok(()) };
        for (key, generation) in self.on_disks() {
            if self.settled.get(key.as_bytes()) != Some(&generation) {
                continue;
            }
            let (mut request, mut out) = (Vec::new(), Vec::new());
            Get::encode_request(&mut request, 1, &LeaseWanted::Quick, [Key(key.as_bytes())].into_iter())
                .unwrap();
            let (frame, _) = Frame::parse(&request).unwrap().unwrap();
            self.with(leader, |member, now| {
                member.handle(now, &mut Session::default(), &frame, &mut out).unwrap();
            });
            let (frame, _) = Frame::parse(&out).unwrap().unwrap();
            let answer = Get::decode_response(&frame).map(|(_, mut answers)| answers.next().unwrap());
            match answer {
                Ok(Ok(object)) if object.generation == generation => self.report.found += 1,
                other => return Err(Violation::NotFound(format!("{key}, {generation}: {other:?}"))),
            }
        }
        Ok(())
    }
}
