//! What every party of a run may use: the fabric, the time, and the way to the master and back.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use store_core::message::{Greeting, Hello, Operation};
use store_core::wire::VERSION;
use store_core::{Frame, Kind, Master, MasterConfig, SegmentNo, Session};
use te_core::Instant;
use te_core::sim::{NodeId, Rng, SimNet};

use crate::checker::History;
use crate::clock::Clock;
use crate::judge::{Given, Seen, Standing};
use crate::scenario::{CALL_TIMEOUT, Lies, OPERATION_MAX, Report, Scenario, TENANTS, tenant_of};
use crate::shadow::{Shadow, Violation};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Party {
    Client(usize),
    Node(usize),
}

pub(crate) enum Event {
    ToMaster {
        from: Party,
        life: u64,
        epoch: u32,
        bytes: Vec<u8>,
    },
    ToParty {
        to: Party,
        life: u64,
        bytes: Vec<u8>,
    },
    CallTimeout {
        client: usize,
        life: u64,
        request_id: u64,
    },
    Wake {
        client: usize,
        life: u64,
    },
    Tick {
        node: usize,
        life: u64,
    },
    Trouble,
    RestartClient(usize),
    RestartNode(usize),
    CrashNode(usize),
    /// A node that was slow goes on.
    GoOn {
        node: usize,
        life: u64,
    },
    /// The master notices that somebody's connection has ended.
    HangUp(Party, u64),
    Unstall(NodeId),
    Resume {
        client: usize,
        life: u64,
        stopped_at: Instant,
    },
    Heal(NodeId, NodeId),
    /// Whoever administers the store looks after a segment that is not active.
    Look(SegmentNo),
    /// It drains a last one, when everything is quiet.
    LastDrain,
    /// And takes it back into use.
    EndDrain,
}

/// One direction between a party and the master in which nothing gets through.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Partition {
    pub(crate) party: Party,
    pub(crate) to_master: bool,
    pub(crate) until: Instant,
}

pub(crate) struct Core {
    pub(crate) now: Instant,
    pub(crate) net: SimNet,
    pub(crate) master: Master,
    pub(crate) shadow: Shadow,
    pub(crate) report: Report,
    /// What former lives of the master counted.
    pub(crate) past: Report,
    pub(crate) lies: Lies,
    /// What clients asked and were answered.
    pub(crate) history: History,
    /// What the master's clock shows.
    pub(crate) clock: Clock,
    /// Nobody is there to hear until then.
    pub(crate) down_until: Instant,
    /// Connections to the master, by who made them and in which life.
    sessions: HashMap<(Party, u64), Session>,
    /// Engines of clients: whose, and in which life.
    pub(crate) engines: HashMap<u64, (usize, u64)>,
    pub(crate) partitions: Vec<Partition>,
    /// Requests that reach the master twice: what the second does is nobody's answer.
    pub(crate) doubled: HashSet<(usize, u64)>,
    /// The order in which the master started puts, by generation.
    pub(crate) starts: HashMap<u64, u64>,
    /// What is readable, as far as is known.
    pub(crate) visible: BTreeMap<Vec<u8>, Seen>,
    /// What nodes were told to copy, by attempt.
    pub(crate) given: HashMap<u64, Given>,
    /// Copies that were accepted since somebody looked at their bytes.
    pub(crate) fresh: Vec<u64>,
    /// Whose each task is, and those of this life of the master that are done.
    pub(crate) task_owners: BTreeMap<u64, usize>,
    pub(crate) done: HashSet<u64>,
    /// Segments that take nothing new.
    pub(crate) closed: BTreeSet<SegmentNo>,
    /// Replicas that were dropped because they were bad.
    pub(crate) dropped: HashSet<(u64, SegmentNo)>,
    /// Exports by segment name and incarnation: what a metadata service would say.
    pub(crate) directory: HashMap<(String, u64), Vec<u8>>,
    pub(crate) scenario: Scenario,
    pub(crate) events: BTreeMap<(Instant, u64), Event>,
    rng: Rng,
    counter: u64,
    pub(crate) requests: u64,
}

impl Core {
    pub(crate) fn new(scenario: Scenario, net: SimNet, rng: Rng) -> Self {
        Self {
            now: Instant::ZERO,
            net,
            master: Master::new(scenario.master.clone()).unwrap(),
            shadow: Shadow::default(),
            report: Report::default(),
            past: Report::default(),
            lies: scenario.lies,
            history: History::default(),
            clock: Clock::TRUE,
            down_until: Instant::ZERO,
            sessions: HashMap::new(),
            engines: HashMap::new(),
            partitions: Vec::new(),
            doubled: HashSet::new(),
            starts: HashMap::new(),
            visible: BTreeMap::new(),
            given: HashMap::new(),
            fresh: Vec::new(),
            task_owners: BTreeMap::new(),
            done: HashSet::new(),
            closed: BTreeSet::new(),
            dropped: HashSet::new(),
            directory: HashMap::new(),
            events: BTreeMap::new(),
            rng,
            counter: 0,
            requests: 0,
            scenario,
        }
    }

    pub(crate) fn next_put(&mut self) -> u64 {
        self.counter += 1;
        self.counter
    }

    pub(crate) fn random_key(&self, rng: &mut Rng) -> Vec<u8> {
        // Some are asked for more often than others.
        let few = if rng.below(4) == 0 { 4 } else { self.scenario.keys };
        let key = rng.below(few);
        // Some are longer than what is kept inline.
        if key.is_multiple_of(3) {
            format!("{key}{}", "-long".repeat(12)).into_bytes()
        } else {
            format!("key-{key}").into_bytes()
        }
    }

    /// One that is mounted, if any is.
    pub(crate) fn random_segment(&self, rng: &mut Rng) -> Option<SegmentNo> {
        let all: Vec<SegmentNo> = self.master.segments().map(|info| info.segment).collect();
        all.get(rng.index(all.len())).copied()
    }

    pub(crate) fn random_clock(&self, rng: &mut Rng) -> Clock {
        if self.scenario.clocks { Clock::random(self.now, rng) } else { Clock::TRUE }
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.rng.below(n)
    }

    pub(crate) fn chance_ppm(&mut self, ppm: u32) -> bool {
        self.rng.chance_ppm(ppm)
    }

    /// What a segment's node has exported.
    pub(crate) fn export_of(&self, segment: SegmentNo) -> Option<&[u8]> {
        let info = self.master.segment(segment)?;
        self.directory.get(&(info.name.to_owned(), info.incarnation)).map(Vec::as_slice)
    }

    /// The master gave a put its place, and its writer knows.
    pub(crate) fn note_start(&mut self, put: u64, generation: u64) {
        if let Some(order) = self.starts.get(&generation) {
            self.history.started(put, *order);
        }
    }

    /// What the master's clock shows now.
    pub(crate) fn shown(&self) -> Instant {
        self.clock.shows(self.now)
    }

    pub(crate) fn master_timeout(&mut self) -> Result<(), Violation> {
        self.by_the_master(|master, now| master.handle_timeout(now))
    }

    /// The master does something of its own accord, or for whoever administers it.
    pub(crate) fn by_the_master(&mut self, act: impl FnOnce(&mut Master, Instant)) -> Result<(), Violation> {
        let before = Standing::of(&self.master);
        let now = self.shown();
        act(&mut self.master, now);
        self.note_losses();
        let found = self.check_tenants(&before, None);
        self.judge(found)
    }

    /// Another master, which knows nothing.
    pub(crate) fn restart_master(&mut self, down: Duration) {
        self.report.master_restarts += 1;
        let past =
            Report { stats: self.master.stats(), tasks: self.master.task_report(), ..Report::default() };
        self.past = self.past.plus(&past);
        let config = self.master.config().clone();
        self.master = Master::new(MasterConfig { epoch: config.epoch + 1, ..config }).unwrap();
        if self.scenario.clocks {
            self.clock = Clock::random(self.now, &mut self.rng);
        }
        self.down_until = self.now + down;
        self.closed.clear();
        self.sessions.clear();
        self.note_losses();
    }

    /// Whether the silence has begun, in which what is unfinished ends.
    pub(crate) fn is_silent(&self) -> bool {
        self.now > Instant::ZERO + self.scenario.busy + OPERATION_MAX
    }

    fn is_cut(&self, party: Party, to_master: bool) -> bool {
        let cut =
            |each: &Partition| each.party == party && each.to_master == to_master && self.now < each.until;
        self.partitions.iter().any(cut)
    }

    /// Which life of the master it is.
    pub(crate) fn epoch(&self) -> u32 {
        self.master.config().epoch
    }

    pub(crate) fn send_call(&mut self, client: usize, life: u64, request_id: u64, bytes: Vec<u8>) {
        self.at(self.now + CALL_TIMEOUT, Event::CallTimeout { client, life, request_id });
        self.send(Party::Client(client), life, bytes);
    }

    pub(crate) fn send(&mut self, from: Party, life: u64, bytes: Vec<u8>) {
        if self.is_cut(from, true) {
            return;
        }
        let deliveries = self.deliveries();
        if let (Party::Client(client), true) = (from, deliveries.len() > 1) {
            let (frame, _) = Frame::parse(&bytes).unwrap().unwrap();
            self.doubled.insert((client, frame.header.request_id));
        }
        for at in deliveries {
            // A master that restarts breaks every connection, and what was on it is lost.
            let epoch = self.epoch();
            self.at(at, Event::ToMaster { from, life, epoch, bytes: bytes.clone() });
        }
    }

    fn answer(&mut self, to: Party, life: u64, bytes: Vec<u8>) {
        if self.is_cut(to, false) {
            return;
        }
        for at in self.deliveries() {
            self.at(at, Event::ToParty { to, life, bytes: bytes.clone() });
        }
    }

    /// When a message arrives: never, once or twice.
    fn deliveries(&mut self) -> Vec<Instant> {
        // A heartbeat lost in the silence would prove nothing.
        let (lost, doubled, slow, slow_ms) =
            if self.is_silent() { (0, 0, 0, 0) } else { self.scenario.calls };
        let copies = if self.rng.chance_ppm(lost) { 0 } else { 1 + u64::from(self.rng.chance_ppm(doubled)) };
        let mut times = Vec::new();
        for copy in 0..copies {
            let slow_us = if self.rng.chance_ppm(slow) { self.rng.below(slow_ms * 1_000) } else { 0 };
            // What comes twice may come when much has happened since.
            let slow_us = slow_us + copy * self.rng.below(300_000);
            times.push(self.now + Duration::from_micros(50 + self.rng.below(500) + slow_us));
        }
        times
    }

    pub(crate) fn at(&mut self, at: Instant, event: Event) {
        self.counter += 1;
        self.events.insert((at, self.counter), event);
    }

    /// The master carries a request out, and what it says is compared with what must hold.
    pub(crate) fn serve(&mut self, from: Party, life: u64, bytes: &[u8]) -> Result<(), Violation> {
        let (request, _) = Frame::parse(bytes).unwrap().unwrap();
        let mut out = Vec::new();
        let mut session = self.sessions.remove(&(from, life)).unwrap_or_else(|| self.greet(from));
        let before = Standing::of(&self.master);
        let now = self.shown();
        self.master.handle(now, &mut session, &request, &mut out);
        self.sessions.insert((from, life), session);
        if out.is_empty() {
            assert_eq!(request.header.kind, Kind::ReturnLeases as u8);
            return Ok(());
        }
        let (response, len) = Frame::parse(&out).unwrap().unwrap();
        assert_eq!((len, response.header.request_id), (out.len(), request.header.request_id));
        let found = self.observe((from, life), &request, &response);
        self.judge(found)?;
        let lost = self.note_losses();
        let found = self.check_losses(&request, lost).and_then(|()| {
            let asker = matches!(from, Party::Client(_)).then(|| self.tenant_of(from));
            self.check_tenants(&before, asker)
        });
        self.judge(found)?;
        self.answer(from, life, out);
        self.requests += 1;
        if self.requests.is_multiple_of(16) {
            let found = self.audit();
            self.judge(found)?;
        }
        Ok(())
    }

    /// Somebody's connection to the master ends.
    pub(crate) fn hang_up(&mut self, party: Party, life: u64) {
        if let Some(session) = self.sessions.remove(&(party, life)) {
            let now = self.shown();
            self.master.session_ended(now, session);
        }
    }

    /// A node has cut an engine off: nothing of it lands in this segment any more.
    pub(crate) fn cut_off(&mut self, writer: u64, segment: SegmentNo, lives: &[Option<u64>]) {
        let Some((client, life)) = self.engines.get(&writer).copied() else { return };
        self.report.expelled += 1;
        self.shadow.cut_off(client, segment, lives[client] == Some(life));
    }

    /// Every connection begins with a greeting.
    fn greet(&mut self, from: Party) -> Session {
        // Nodes are nobody's.
        let tenant = if let Party::Node(_) = from { "" } else { TENANTS[self.tenant_of(from)] };
        let greeting = Greeting { version: VERSION, tenant, ..Greeting::default() };
        let (mut hello, mut out) = (Vec::new(), Vec::new());
        Hello::encode_request(&mut hello, 0, &greeting, core::iter::empty()).unwrap();
        let mut session = Session::default();
        let (frame, _) = Frame::parse(&hello).unwrap().unwrap();
        let now = self.shown();
        self.master.handle(now, &mut session, &frame, &mut out);
        let (answer, _) = Frame::parse(&out).unwrap().unwrap();
        assert_eq!(answer.header.result(), Ok(()));
        session
    }

    /// Which tenant a client is for the master.
    pub(crate) fn tenant_of(&self, from: Party) -> usize {
        match from {
            Party::Client(0) if self.lies.contains(Lies::TENANT) => 1,
            Party::Client(client) => tenant_of(client),
            Party::Node(_) => unreachable!("nodes are nobody's"),
        }
    }
}

/// Into how long pieces so many bytes are cut.
pub(crate) const fn slice_bytes(len: u64) -> u64 {
    let sixth = len.div_ceil(6);
    if sixth > 700 { sixth } else { 700 }
}
