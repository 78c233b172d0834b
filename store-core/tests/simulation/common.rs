//! What all parties of a run share: the fabric, the time, and the messages to and from the master.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use store_core::command_log::Recorder;
use store_core::message::{ExpulsionEnd, FetchRequest, Greeting, Hello, Operation, PutEnd, PutStart};
use store_core::wire::VERSION;
use store_core::{Frame, Kind, Master, MasterConfig, SegmentNo, Session, TaskId};
use te_core::Instant;
use te_core::sim::{NodeId, SimNet};
use te_core::testkit::Rng;

use crate::bulk::Places;
use crate::checker::History;
use crate::clock::{Clock, Wall};
use crate::follower::Follower;
use crate::intruders::make_room;
use crate::judge::{Given, Seen, Standing};
use crate::quotas::Promise;
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
    /// A node that was slow continues.
    GoOn {
        node: usize,
        life: u64,
    },
    /// The master notices that a party's connection has ended.
    HangUp(Party, u64),
    Unstall(NodeId),
    Resume {
        client: usize,
        life: u64,
        stopped_at: Instant,
    },
    Heal(NodeId, NodeId),
    /// An intruder tries something without permission, see `intruders`.
    Intruders,
    /// The operator changes the limits of a tenant.
    SetTenant,
    /// All processes are stopped for a while, and continue in any order.
    StandStill,
    /// A process is stopped until then.
    Stop(Party, Instant),
    /// The master is stopped until then.
    StopMaster(Instant),
    /// The master continues.
    MasterGoesOn,
    /// A forked process ends.
    EndChild(u64),
    /// The operator checks a segment that is not active.
    Look(SegmentNo),
    /// The operator drains a last segment, after the end of all other events.
    LastDrain,
    /// The operator puts that segment back into use.
    EndDrain,
}

impl Event {
    /// Whether a party begins something, which waits until the night is over.
    pub(crate) const fn begins_something(&self) -> bool {
        matches!(self, Self::Wake { .. } | Self::Trouble | Self::Intruders | Self::SetTenant)
    }
}

/// One direction between a party and the master in which no message arrives.
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
    /// A standby of the master.
    pub(crate) follower: Follower,
    pub(crate) shadow: Shadow,
    pub(crate) report: Report,
    /// The counters of earlier epochs of the master.
    pub(crate) past: Report,
    pub(crate) lies: Lies,
    /// The requests and responses of clients.
    pub(crate) history: History,
    /// The clock of the master.
    pub(crate) clock: Clock,
    /// The same clock without the time in which the master was stopped, whatever the master counts of that.
    honest: Clock,
    /// The master's wall clock.
    pub(crate) wall: Wall,
    /// The interval in which no party begins anything.
    pub(crate) night: Option<(Instant, Instant)>,
    /// Since when, and until when, the master is stopped.
    pub(crate) standing: Option<(Instant, Instant)>,
    /// When the master last heard of a node, by a correct clock, and the node's incarnation.
    pub(crate) heard: HashMap<u64, (Instant, u64)>,
    /// The keys of nodes, those of their earlier incarnations included.
    pub(crate) node_keys: HashMap<u64, Vec<u64>>,
    /// Connections of intruders: one per tenant, and one without a tenant.
    pub(crate) intruders: [Option<Session>; TENANTS.len() + 1],
    /// The master is not running until then.
    pub(crate) down_until: Instant,
    /// Connections to the master, by party and incarnation.
    pub(crate) sessions: HashMap<(Party, u64), Session>,
    pub(crate) partitions: Vec<Partition>,
    /// Requests that reach the master twice: the response to the second is discarded.
    pub(crate) doubled: HashSet<(usize, u64)>,
    /// The order in which the master started puts, by generation.
    pub(crate) starts: HashMap<u64, u64>,
    /// What is readable, as far as is known.
    pub(crate) visible: BTreeMap<Vec<u8>, Seen>,
    /// When an object that is gone was last readable.
    pub(crate) gone: HashMap<Vec<u8>, Instant>,
    /// Generations of objects that were pinned for good after their put.
    pub(crate) pinned: HashSet<u64>,
    /// Where the objects of the running request to clear replicas were.
    pub(crate) places: Places,
    /// The limits and guarantees of tenants.
    pub(crate) promised: [Promise; TENANTS.len()],
    /// Orders that nodes were given, by attempt.
    pub(crate) given: HashMap<u64, Given>,
    /// Copies that were accepted since their bytes were last checked.
    pub(crate) fresh: Vec<u64>,
    /// The tenant of each task, and the tasks of this epoch that are done.
    pub(crate) task_owners: BTreeMap<TaskId, usize>,
    pub(crate) done: HashSet<TaskId>,
    /// Segments that accept nothing new.
    pub(crate) closed: BTreeSet<SegmentNo>,
    /// Replicas that were dropped because they were bad.
    pub(crate) dropped: HashSet<(u64, SegmentNo)>,
    /// Exports by segment name and incarnation, as a metadata service would return them.
    pub(crate) directory: HashMap<(String, u64), Vec<u8>>,
    pub(crate) scenario: Scenario,
    pub(crate) events: BTreeMap<(Instant, u64), Event>,
    rng: Rng,
    counter: u64,
    pub(crate) requests: u64,
}

impl Core {
    pub(crate) fn new(scenario: Scenario, net: SimNet, rng: Rng) -> Self {
        let mut master = Master::new(scenario.master.clone()).unwrap();
        Self {
            now: Instant::ZERO,
            net,
            follower: Follower::new(&mut master, scenario.lies),
            master,
            shadow: Shadow::new(std::env::var_os("SNOWSKIN_TALK").is_some()),
            report: Report::default(),
            past: Report::default(),
            lies: scenario.lies,
            history: History::default(),
            clock: Clock::TRUE,
            honest: Clock::TRUE,
            wall: Wall::default(),
            night: None,
            standing: None,
            heard: HashMap::new(),
            node_keys: HashMap::new(),
            intruders: Default::default(),
            down_until: Instant::ZERO,
            sessions: HashMap::new(),
            partitions: Vec::new(),
            doubled: HashSet::new(),
            starts: HashMap::new(),
            visible: BTreeMap::new(),
            gone: HashMap::new(),
            pinned: HashSet::new(),
            places: Places::new(),
            promised: Promise::all(&scenario.master),
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
        // Some keys are requested more often than others.
        let few = if rng.below(4) == 0 { 4 } else { self.scenario.keys };
        let key = rng.below(few);
        // Some keys are too long to be stored in place.
        if key.is_multiple_of(3) {
            format!("{key}{}", "-long".repeat(12)).into_bytes()
        } else {
            format!("key-{key}").into_bytes()
        }
    }

    /// A mounted segment, if there is one.
    pub(crate) fn random_segment(&self, rng: &mut Rng) -> Option<SegmentNo> {
        let all: Vec<SegmentNo> = self.master.segments().map(|info| info.segment).collect();
        all.get(rng.index(all.len())).copied()
    }

    pub(crate) fn random_clock(&self, rng: &mut Rng) -> Clock {
        if self.scenario.clocks { Clock::random(self.now, rng) } else { Clock::TRUE }
    }

    pub(crate) fn random_wall(&self, rng: &mut Rng) -> Wall {
        if self.scenario.clocks { Wall::random(rng, false) } else { self.wall }
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.rng.below(n)
    }

    pub(crate) fn chance_ppm(&mut self, ppm: u32) -> bool {
        self.rng.chance_ppm(ppm)
    }

    /// The export of a segment's node.
    pub(crate) fn export_of(&self, segment: SegmentNo) -> Option<&[u8]> {
        let info = self.master.segment(segment)?;
        self.directory.get(&(info.name.to_owned(), info.incarnation.get())).map(Vec::as_slice)
    }

    /// The master gave a put its place, and its writer knows.
    pub(crate) fn note_start(&mut self, put: u64, generation: u64) {
        if let Some(order) = self.starts.get(&generation) {
            self.history.started(put, *order);
        }
    }

    /// The time on the master's clock. While the master is stopped its clock is not read.
    pub(crate) fn shown(&self) -> Instant {
        self.clock.shows(self.standing.map_or(self.now, |(since, _)| since))
    }

    /// The time that a correct master counts.
    pub(crate) fn counted(&self) -> Instant {
        self.honest.shows(self.standing.map_or(self.now, |(since, _)| since))
    }

    pub(crate) fn set_clock(&mut self, clock: Clock, wall: Wall) {
        (self.clock, self.honest, self.wall) = (clock, clock, wall);
        let (now, wall_ms) = (clock.shows(self.now), wall.shows_ms(self.now));
        self.follower.recorder.set_wall_ms(&mut self.master, now, wall_ms);
    }

    pub(crate) fn jump(&mut self, by: Duration) {
        self.clock.jump(self.now, by);
        self.honest.jump(self.now, by);
    }

    /// Stops the master; what is sent to it waits.
    pub(crate) fn stop_master(&mut self, until: Instant) {
        if self.standing.is_none() && self.now >= self.down_until {
            self.standing = Some((self.now, until));
            self.at(until, Event::MasterGoesOn);
        }
    }

    pub(crate) fn master_goes_on(&mut self) {
        let Some((since, until)) = self.standing.filter(|(_, until)| *until == self.now) else { return };
        self.standing = None;
        self.honest.leave_out(since, until);
        if !self.lies.contains(Lies::PAUSE) {
            self.clock = self.honest;
        }
    }

    /// When the master serves again, if it does not now.
    pub(crate) fn away_until(&self) -> Option<Instant> {
        let down = (self.now < self.down_until).then_some(self.down_until);
        self.standing.map(|(_, until)| until).or(down)
    }

    pub(crate) fn master_timeout(&mut self) -> Result<(), Violation> {
        self.by_the_master(|recorder, master, now| recorder.handle_timeout(master, now))?;
        if self.lies.contains(Lies::TIME) {
            self.believe_in_time();
        }
        Ok(())
    }

    /// Reports in the nodes' name that writers with a forced order are gone: they have had time enough.
    fn believe_in_time(&mut self) {
        let nodes: Vec<_> = self.master.segments().map(|info| (info.node, info.incarnation)).collect();
        for (node, incarnation) in nodes {
            let Some(&key) = self.node_keys.get(&node.get()).and_then(|keys| keys.last()) else { continue };
            let fetch = FetchRequest { node, incarnation, count_max: 64, key };
            let now = self.shown();
            for order in self.master.fetch_expulsions(now, &fetch).unwrap_or_default() {
                if order.force {
                    let end = ExpulsionEnd { ticket: order.ticket, gone: true };
                    assert_eq!(self.master.end_expulsion(now, node, &end), Ok(()));
                }
            }
        }
    }

    /// The master does something by itself, or for the operator.
    pub(crate) fn by_the_master(
        &mut self,
        act: impl FnOnce(&mut Recorder, &mut Master, Instant),
    ) -> Result<(), Violation> {
        let before = Standing::of(&self.master);
        let now = self.shown();
        act(&mut self.follower.recorder, &mut self.master, now);
        self.note_losses();
        let found = self.follow();
        self.judge(found)?;
        let found = self.check_tenants(&before, None).and_then(|()| self.check_given_up());
        self.judge(found)
    }

    /// Another master, without any state.
    pub(crate) fn restart_master(&mut self, down: Duration) {
        self.report.master_restarts += 1;
        let past =
            Report { stats: self.master.stats(), tasks: self.master.task_report(), ..Report::default() };
        self.past = self.past.plus(&past);
        let config = self.master.config().clone();
        self.master = Master::new(MasterConfig { epoch: config.epoch + 1, ..config }).unwrap();
        self.follower = Follower::new(&mut self.master, self.lies);
        self.promised = Promise::all(&self.scenario.master);
        self.standing = None;
        let mut rng = self.rng.fork();
        let wall = if self.scenario.clocks { Wall::random(&mut rng, true) } else { self.wall };
        self.report.set_back += u64::from(wall.is_behind(&self.wall));
        let clock = self.random_clock(&mut rng);
        self.set_clock(clock, wall);
        self.heard.clear();
        self.intruders = Default::default();
        self.shadow.claims.clear();
        self.down_until = self.now + down;
        self.closed.clear();
        self.sessions.clear();
        self.note_losses();
    }

    /// Whether the final silence has begun, in which unfinished operations end.
    pub(crate) fn is_silent(&self) -> bool {
        self.now > Instant::ZERO + self.scenario.busy + OPERATION_MAX
    }

    /// The end of the current night.
    pub(crate) fn morning(&self) -> Option<Instant> {
        self.night.filter(|(evening, morning)| (*evening..*morning).contains(&self.now)).map(|(_, end)| end)
    }

    /// Whether nothing is begun, and nothing goes wrong.
    pub(crate) fn is_quiet(&self) -> bool {
        self.is_silent() || self.morning().is_some()
    }

    fn is_cut(&self, party: Party, to_master: bool) -> bool {
        let cut =
            |each: &Partition| each.party == party && each.to_master == to_master && self.now < each.until;
        self.partitions.iter().any(cut)
    }

    /// The master's epoch.
    pub(crate) fn epoch(&self) -> u32 {
        self.master.config().epoch
    }

    /// The sender and its incarnation; and the party that the master takes it for.
    pub(crate) fn send_call(
        &mut self,
        (client, life): (usize, u64),
        speaks_as: (usize, u64),
        request_id: u64,
        bytes: Vec<u8>,
    ) {
        self.at(self.now + CALL_TIMEOUT, Event::CallTimeout { client, life, request_id });
        self.send(Party::Client(speaks_as.0), speaks_as.1, bytes);
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
            // A master that restarts breaks every connection, and loses the messages on it.
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
        // A heartbeat lost in the silence, or in the night, would prove nothing.
        let (lost, doubled, slow, slow_ms) = if self.is_quiet() { (0, 0, 0, 0) } else { self.scenario.calls };
        let copies = if self.rng.chance_ppm(lost) { 0 } else { 1 + u64::from(self.rng.chance_ppm(doubled)) };
        let mut times = Vec::new();
        for copy in 0..copies {
            let slow_us = if self.rng.chance_ppm(slow) { self.rng.below(slow_ms * 1_000) } else { 0 };
            // The second copy may come when much has happened since.
            let slow_us = slow_us + copy * self.rng.below(300_000);
            times.push(self.now + Duration::from_micros(50 + self.rng.below(500) + slow_us));
        }
        times
    }

    pub(crate) fn at(&mut self, at: Instant, event: Event) {
        self.counter += 1;
        self.events.insert((at, self.counter), event);
    }

    /// The master carries out a request, and the response is compared with what must hold.
    pub(crate) fn serve(&mut self, from: Party, life: u64, bytes: &[u8]) -> Result<(), Violation> {
        let (request, _) = Frame::parse(bytes).unwrap().unwrap();
        let mut out = Vec::new();
        let mut session = self.sessions.remove(&(from, life)).unwrap_or_else(|| {
            // Nodes have no tenant.
            self.greet(if let Party::Node(_) = from { "" } else { TENANTS[self.tenant_of(from)] })
        });
        let before = Standing::of(&self.master);
        self.places = self.places_of(from, &request);
        self.overdo(from, &request);
        self.overdo_upsert(from, &request);
        let falsified = self.falsified(from, &request);
        let passed_on = falsified.as_deref().map_or(request, |bytes| Frame::parse(bytes).unwrap().unwrap().0);
        self.request(&mut session, &passed_on, &mut out);
        self.forget_leases(&request, &mut session);
        self.sessions.insert((from, life), session);
        if out.is_empty() {
            assert_eq!(request.header.kind, Kind::ReturnLeases as u8);
            return Ok(());
        }
        let (response, len) = Frame::parse(&out).unwrap().unwrap();
        assert_eq!((len, response.header.request_id), (out.len(), request.header.request_id));
        let found = self.observe((from, life), &request, &response);
        self.judge(found)?;
        let asker = matches!(from, Party::Client(_)).then(|| self.tenant_of(from));
        let found = self.check_change(&before, asker, &request, &response);
        self.judge(found)?;
        let found = self.follow();
        self.judge(found)?;
        self.answer(from, life, out);
        // A heartbeat changes nothing.
        self.requests += u64::from(request.header.kind != Kind::Beat as u8);
        if self.requests.is_multiple_of(16) {
            let found = self.audit();
            self.judge(found)?;
        }
        Ok(())
    }

    /// A party's connection to the master ends.
    pub(crate) fn hang_up(&mut self, party: Party, life: u64) {
        if let Party::Node(index) = party {
            // A late message of an earlier incarnation is not on an open connection.
            let node = index as u64 + 1;
            if self.heard.get(&node).is_some_and(|(_, heard)| *heard == life) {
                self.heard.remove(&node);
            }
        }
        if let Some(session) = self.sessions.remove(&(party, life)) {
            let now = self.shown();
            self.follower.recorder.session_ended(&mut self.master, now, session);
        }
    }

    /// The checks after every change: no object is lost without need, and none that is within a guarantee.
    fn check_change(
        &mut self,
        before: &Standing,
        asker: Option<usize>,
        request: &Frame<'_>,
        response: &Frame<'_>,
    ) -> Result<(), Violation> {
        let lost = self.note_losses();
        self.check_losses(asker, request, &lost)?;
        self.check_tenants(before, asker)?;
        if request.header.kind == Kind::PutStart as u8 && is_refused(response) {
            self.check_refusal(before)?;
        }
        self.check_given_up()
    }

    /// An intruder sends a request: one of a tenant, or one without a tenant. Returns the response.
    pub(crate) fn request_as_intruder(&mut self, who: usize, bytes: &[u8]) -> Result<Vec<u8>, Violation> {
        let (request, _) = Frame::parse(bytes).unwrap().unwrap();
        let name = TENANTS.get(who).copied().unwrap_or_default();
        let mut session = self.intruders[who].take().unwrap_or_else(|| self.greet(name));
        let before = Standing::of(&self.master);
        if self.lies.contains(Lies::WISH) && request.header.kind == Kind::PutStart as u8 {
            make_room(self);
        }
        let mut out = Vec::new();
        self.request(&mut session, &request, &mut out);
        self.intruders[who] = Some(session);
        if let Some((response, _)) = Frame::parse(&out).unwrap() {
            let done =
                PutEnd::decode_response(&response).is_ok_and(|(_, mut ends)| ends.any(|end| end.is_ok()));
            if request.header.kind == Kind::PutEnd as u8 && done {
                return Err(Violation::Forged(format!("a put was committed by {name:?} at {:?}", self.now)));
            }
            let asker = (who < TENANTS.len()).then_some(who);
            let found = self.check_change(&before, asker, &request, &response);
            self.judge(found)?;
        }
        Ok(out)
    }

    /// A node has cut off an engine: none of its writes land in this segment any more.
    pub(crate) fn cut_off(&mut self, writer: u64, segment: SegmentNo) {
        self.report.expelled += 1;
        self.shadow.cut_off(writer, segment);
    }

    /// Every connection begins with a greeting.
    fn greet(&mut self, tenant: &str) -> Session {
        let greeting = Greeting { version: VERSION, tenant, ..Greeting::default() };
        let (mut hello, mut out) = (Vec::new(), Vec::new());
        Hello::encode_request(&mut hello, 0, &greeting, core::iter::empty()).unwrap();
        let mut session = Session::default();
        let (frame, _) = Frame::parse(&hello).unwrap().unwrap();
        self.request(&mut session, &frame, &mut out);
        let (answer, _) = Frame::parse(&out).unwrap().unwrap();
        assert_eq!(answer.header.result(), Ok(()));
        session
    }

    /// The tenant that the master takes a client for.
    pub(crate) fn tenant_of(&self, from: Party) -> usize {
        match from {
            Party::Client(0) if self.lies.contains(Lies::TENANT) => 1,
            Party::Client(client) => tenant_of(client),
            Party::Node(_) => unreachable!("nodes have no tenant"),
        }
    }
}

/// Whether a put was given no place at all.
fn is_refused(response: &Frame<'_>) -> bool {
    PutStart::decode_response(response).map_or(true, |(_, mut answers)| answers.all(|answer| answer.is_err()))
}

/// The length of the pieces into which `len` bytes are cut.
pub(crate) const fn slice_bytes(len: u64) -> u64 {
    let sixth = len.div_ceil(6);
    if sixth > 700 { sixth } else { 700 }
}
