//! What every party of a run may use: the fabric, the time, and the way to the master and back.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use store_core::message::{ExpulsionEnd, FetchRequest, Greeting, Hello, Operation, PutStart};
use store_core::wire::VERSION;
use store_core::{Frame, Kind, Master, MasterConfig, SegmentNo, Session};
use te_core::Instant;
use te_core::sim::{NodeId, Rng, SimNet};

use crate::bulk::Places;
use crate::checker::History;
use crate::clock::{Clock, Wall};
use crate::judge::{Given, Seen, Standing};
use crate::quotas::Promise;
use crate::scenario::{CALL_TIMEOUT, Lies, OPERATION_MAX, Report, Scenario, TENANTS, tenant_of};
use crate::shadow::{Shadow, Violation};
use crate::strangers::make_room;

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
    /// Somebody tries what he may not, see `strangers`.
    Strangers,
    /// Whoever administers the store changes what a tenant may.
    SetTenant,
    /// Everything stands still for a while, in any order.
    StandStill,
    /// A process does, until then.
    Stop(Party, Instant),
    /// The master does, until then.
    StopMaster(Instant),
    /// And goes on.
    MasterGoesOn,
    /// What was forked ends.
    EndChild(u64),
    /// Whoever administers the store looks after a segment that is not active.
    Look(SegmentNo),
    /// It drains a last one, when everything is quiet.
    LastDrain,
    /// And takes it back into use.
    EndDrain,
}

impl Event {
    /// Whether somebody begins something, which waits for the morning.
    pub(crate) const fn begins_something(&self) -> bool {
        matches!(self, Self::Wake { .. } | Self::Trouble | Self::Strangers | Self::SetTenant)
    }
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
    /// The same without the time in which the master stood still, whatever it counts of that.
    honest: Clock,
    /// The master's wall clock.
    pub(crate) wall: Wall,
    /// From when to when nobody begins anything.
    pub(crate) night: Option<(Instant, Instant)>,
    /// The master stands still: since when, and until when.
    pub(crate) standing: Option<(Instant, Instant)>,
    /// When the master heard a node last, by what it should count, and which life of it.
    pub(crate) heard: HashMap<u64, (Instant, u64)>,
    /// What nodes prove with that they are themselves, and what their former lives did.
    pub(crate) node_keys: HashMap<u64, Vec<u64>>,
    /// Connections of those who have no business here: of each tenant, and of nobody.
    pub(crate) strangers: [Option<Session>; TENANTS.len() + 1],
    /// Nobody is there to hear until then.
    pub(crate) down_until: Instant,
    /// Connections to the master, by who made them and in which life.
    pub(crate) sessions: HashMap<(Party, u64), Session>,
    pub(crate) partitions: Vec<Partition>,
    /// Requests that reach the master twice: what the second does is nobody's answer.
    pub(crate) doubled: HashSet<(usize, u64)>,
    /// The order in which the master started puts, by generation.
    pub(crate) starts: HashMap<u64, u64>,
    /// What is readable, as far as is known.
    pub(crate) visible: BTreeMap<Vec<u8>, Seen>,
    /// When what was readable was so last.
    pub(crate) gone: HashMap<Vec<u8>, Instant>,
    /// Where the objects were that the running request to clear replicas is about.
    pub(crate) places: Places,
    /// What tenants may.
    pub(crate) promised: [Promise; TENANTS.len()],
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
            strangers: Default::default(),
            down_until: Instant::ZERO,
            sessions: HashMap::new(),
            partitions: Vec::new(),
            doubled: HashSet::new(),
            starts: HashMap::new(),
            visible: BTreeMap::new(),
            gone: HashMap::new(),
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

    pub(crate) fn random_wall(&self, rng: &mut Rng) -> Wall {
        if self.scenario.clocks { Wall::random(rng, false) } else { self.wall }
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

    /// What the master's clock shows now. While it stands still nobody looks at it.
    pub(crate) fn shown(&self) -> Instant {
        self.clock.shows(self.standing.map_or(self.now, |(since, _)| since))
    }

    /// What the master should count.
    pub(crate) fn counted(&self) -> Instant {
        self.honest.shows(self.standing.map_or(self.now, |(since, _)| since))
    }

    pub(crate) fn set_clock(&mut self, clock: Clock, wall: Wall) {
        (self.clock, self.honest, self.wall) = (clock, clock, wall);
        self.master.set_wall_ms(clock.shows(self.now), wall.shows_ms(self.now));
    }

    pub(crate) fn jump(&mut self, by: Duration) {
        self.clock.jump(self.now, by);
        self.honest.jump(self.now, by);
    }

    /// The master stands still, and what is sent to it waits.
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
        self.by_the_master(|master, now| master.handle_timeout(now))?;
        if self.lies.contains(Lies::TIME) {
            self.believe_in_time();
        }
        Ok(())
    }

    /// Says in the nodes' name that whoever was to be cut off by force is: he has had time enough.
    fn believe_in_time(&mut self) {
        let nodes: Vec<_> = self.master.segments().map(|info| (info.node, info.incarnation)).collect();
        for (node, incarnation) in nodes {
            let Some(&key) = self.node_keys.get(&node).and_then(|keys| keys.last()) else { continue };
            let ask = FetchRequest { node, incarnation, count_max: 64, key };
            let now = self.shown();
            for order in self.master.fetch_expulsions(now, &ask).unwrap_or_default() {
                if order.force {
                    let end = ExpulsionEnd { ticket: order.ticket, gone: true };
                    assert_eq!(self.master.end_expulsion(now, node, &end), Ok(()));
                }
            }
        }
    }

    /// The master does something of its own accord, or for whoever administers it.
    pub(crate) fn by_the_master(&mut self, act: impl FnOnce(&mut Master, Instant)) -> Result<(), Violation> {
        let before = Standing::of(&self.master);
        let now = self.shown();
        act(&mut self.master, now);
        self.note_losses();
        let found = self.check_tenants(&before, None).and_then(|()| self.check_given_up());
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
        self.promised = Promise::all(&self.scenario.master);
        self.standing = None;
        let mut rng = self.rng.fork();
        let wall = if self.scenario.clocks { Wall::random(&mut rng, true) } else { self.wall };
        self.report.set_back += u64::from(wall.is_behind(&self.wall));
        let clock = self.random_clock(&mut rng);
        self.set_clock(clock, wall);
        self.heard.clear();
        self.strangers = Default::default();
        self.shadow.claims.clear();
        self.down_until = self.now + down;
        self.closed.clear();
        self.sessions.clear();
        self.note_losses();
    }

    /// Whether the silence has begun, in which what is unfinished ends.
    pub(crate) fn is_silent(&self) -> bool {
        self.now > Instant::ZERO + self.scenario.busy + OPERATION_MAX
    }

    /// When the night ends that it is.
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

    /// Which life of the master it is.
    pub(crate) fn epoch(&self) -> u32 {
        self.master.config().epoch
    }

    /// Who speaks, and which of its lives; for whom the master takes it.
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
        // A heartbeat lost in the silence, or in the night, would prove nothing.
        let (lost, doubled, slow, slow_ms) = if self.is_quiet() { (0, 0, 0, 0) } else { self.scenario.calls };
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
        let mut session = self.sessions.remove(&(from, life)).unwrap_or_else(|| {
            // Nodes are nobody's.
            self.greet(if let Party::Node(_) = from { "" } else { TENANTS[self.tenant_of(from)] })
        });
        let before = Standing::of(&self.master);
        self.places = self.places_of(from, &request);
        self.overdo(from, &request);
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
        let asker = matches!(from, Party::Client(_)).then(|| self.tenant_of(from));
        let found = self.check_change(&before, asker, &request, &response);
        self.judge(found)?;
        self.answer(from, life, out);
        // Nothing is changed by a heartbeat.
        self.requests += u64::from(request.header.kind != Kind::Beat as u8);
        if self.requests.is_multiple_of(16) {
            let found = self.audit();
            self.judge(found)?;
        }
        Ok(())
    }

    /// Somebody's connection to the master ends.
    pub(crate) fn hang_up(&mut self, party: Party, life: u64) {
        if let Party::Node(index) = party {
            // What it sent before and comes late is on no connection that stands.
            let node = index as u64 + 1;
            if self.heard.get(&node).is_some_and(|(_, heard)| *heard == life) {
                self.heard.remove(&node);
            }
        }
        if let Some(session) = self.sessions.remove(&(party, life)) {
            let now = self.shown();
            self.master.session_ended(now, session);
        }
    }

    /// What goes without saying: nothing is lost for nothing, and to nobody whom it is guaranteed.
    fn check_change(
        &mut self,
        before: &Standing,
        asker: Option<usize>,
        request: &Frame<'_>,
        response: &Frame<'_>,
    ) -> Result<(), Violation> {
        let lost = self.note_losses();
        self.check_losses(request, lost)?;
        self.check_tenants(before, asker)?;
        if request.header.kind == Kind::PutStart as u8 && is_refused(response) {
            self.check_refusal(before)?;
        }
        self.check_given_up()
    }

    /// Somebody asks who has no business here: one of a tenant, or nobody. Gives the answer.
    pub(crate) fn ask_as_stranger(&mut self, who: usize, bytes: &[u8]) -> Result<Vec<u8>, Violation> {
        let (request, _) = Frame::parse(bytes).unwrap().unwrap();
        let name = TENANTS.get(who).copied().unwrap_or_default();
        let mut session = self.strangers[who].take().unwrap_or_else(|| self.greet(name));
        let before = Standing::of(&self.master);
        if self.lies.contains(Lies::WISH) && request.header.kind == Kind::PutStart as u8 {
            make_room(self);
        }
        let mut out = Vec::new();
        let now = self.shown();
        self.master.handle(now, &mut session, &request, &mut out);
        self.strangers[who] = Some(session);
        if let Some((response, _)) = Frame::parse(&out).unwrap() {
            let asker = (who < TENANTS.len()).then_some(who);
            let found = self.check_change(&before, asker, &request, &response);
            self.judge(found)?;
        }
        Ok(out)
    }

    /// A node has cut an engine off: nothing of it lands in this segment any more.
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

/// Whether a put was given no place at all.
fn is_refused(response: &Frame<'_>) -> bool {
    PutStart::decode_response(response).map_or(true, |(_, mut answers)| answers.all(|answer| answer.is_err()))
}

/// Into how long pieces so many bytes are cut.
pub(crate) const fn slice_bytes(len: u64) -> u64 {
    let sixth = len.div_ceil(6);
    if sixth > 700 { sixth } else { 700 }
}
