//! One thread, one clock, one seed: the master, its nodes and its clients, and everything that goes wrong between them.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use store_core::blocks::trailer_len;
use store_core::message::{
    Allocation, Commit, EvictionReport, Get, Greeting, Hello, ListQuery, NewObject, Operation, PutEnd,
    PutOptions, PutStart, PutWindow, Remove, Retention,
};
use store_core::wire::VERSION;
use store_core::{
    AllocationStrategy, AllocatorKind, ErrorCode, EvictionPolicy, Frame, FullKey, Items, Key, Kind, Master,
    MasterConfig, Placement, SegmentNo, Session, Stats, TenantConfig,
};
use te_core::Instant;
use te_core::sim::{LinkConfig, NodeId, Rng, SimConfig, SimNet};

use crate::checker::History;
use crate::client::Client;
use crate::clock::{Clock, DRIFT_PPM_MAX};
use crate::node::Node;
use crate::shadow::{Shadow, Violation};

pub(crate) const NODES: usize = 3;
pub(crate) const CLIENTS: usize = 4;
/// Half of the clients are of each tenant, and they have the same keys.
const TENANTS: [&str; 2] = ["a", "b"];
/// The latest that a write may land after its writer lost sight of it, and a little more.
pub(crate) const LATE_MAX: Duration = Duration::from_secs(61);
const CALL_TIMEOUT: Duration = Duration::from_millis(800);
const NODE_TICK: Duration = Duration::from_millis(500);
const OPERATION_MAX: Duration = Duration::from_secs(30);

/// What a shell does wrong, on purpose: the simulation must notice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lies(u8);

impl Lies {
    pub(crate) const NONE: Self = Self(0);
    /// Says that every read has the committed checksum.
    pub(crate) const CHECKSUM: Self = Self(1);
    /// Never looks at the clock again after asking.
    pub(crate) const CLOCK: Self = Self(2);
    /// Says that fences held without asking for any.
    pub(crate) const FENCE: Self = Self(4);
    /// Takes a write that may still land for one that is in place.
    pub(crate) const OUTCOME: Self = Self(8);
    /// Says that a put or a remove was done when it got no answer, or failed.
    pub(crate) const ANSWER: Self = Self(16);
    /// Reads what it has read before without asking again.
    pub(crate) const CACHE: Self = Self(32);
    /// Some clients greet the master as another tenant than they are.
    pub(crate) const TENANT: Self = Self(64);

    pub(crate) fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    pub(crate) fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// What one run is like.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) master: MasterConfig,
    pub(crate) link: LinkConfig,
    /// Crashes, flaps, stalls and silences.
    pub(crate) faults: bool,
    /// Calls lost, doubled and slow, per million; how slow, ms.
    pub(crate) calls: (u32, u32, u32, u64),
    pub(crate) segment_bytes: u64,
    pub(crate) keys: u64,
    pub(crate) busy: Duration,
    pub(crate) lies: Lies,
    /// Judge only what readers see, not what ranges are given out.
    pub(crate) blind: bool,
    /// Objects have pins, groups and times to live.
    pub(crate) retention: bool,
    /// Every process has a clock of its own, that drifts and jumps.
    pub(crate) clocks: bool,
    /// How far the master's clock may jump at once, ms. Not further than the lease's guard covers.
    pub(crate) jump_ms: u64,
}

impl Scenario {
    /// Everything goes wrong.
    pub(crate) fn stormy() -> Self {
        Self {
            master: MasterConfig {
                lease_ttl_ms: 200,
                lease_guard_ms: 10,
                put_start_discard_timeout_ms: 2_000,
                put_start_release_timeout_ms: 70_000,
                node_ttl_ms: 2_000,
                eviction_high_watermark: 0.9,
                eviction_ratio: 0.1,
                soft_pin_ttl_ms: 3_000,
                hard_pin_share_max: 0.2,
                multi_tenants: true,
                tenants: TENANTS.map(|name| TenantConfig { name: name.into(), ..Default::default() }).into(),
                ..MasterConfig::default()
            },
            link: LinkConfig::STORMY,
            faults: true,
            calls: (50_000, 50_000, 30_000, 3_000),
            segment_bytes: 40 * 1024,
            keys: 64,
            busy: Duration::from_secs(40),
            lies: Lies::NONE,
            blind: false,
            retention: true,
            clocks: true,
            jump_ms: 5,
        }
    }

    /// Nothing goes wrong, and there is room for everything.
    pub(crate) fn calm() -> Self {
        let stormy = Self::stormy();
        Self {
            link: LinkConfig::CALM,
            faults: false,
            calls: (0, 0, 0, 0),
            segment_bytes: 4 << 20,
            busy: Duration::from_secs(10),
            retention: false,
            clocks: false,
            ..stormy
        }
    }
}

/// What a run saw. Sums say that a suite of runs was not vacuous.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Report {
    /// Objects put with a pin, a time to live or a group.
    pub(crate) retained: u64,
    pub(crate) eviction: EvictionReport,
    pub(crate) gets: u64,
    pub(crate) hits: u64,
    pub(crate) failed_reads: u64,
    pub(crate) lease_expired: u64,
    pub(crate) mismatches: u64,
    pub(crate) puts: u64,
    pub(crate) failed_puts: u64,
    pub(crate) removes: u64,
    pub(crate) unknown_writes: u64,
    pub(crate) landed_late: u64,
    pub(crate) fences: u64,
    pub(crate) crashes: u64,
    pub(crate) master_restarts: u64,
    pub(crate) remounts: u64,
    /// Processes stopped for a while, partitions in one direction, and clocks that jumped.
    pub(crate) stops: u64,
    pub(crate) partitions: u64,
    pub(crate) jumps: u64,
    /// Operations whose history was checked, and objects that the store lost by its own doing.
    pub(crate) recorded: u64,
    pub(crate) losses: u64,
    pub(crate) stats: Stats,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Party {
    Client(usize),
    Node(usize),
}

enum Event {
    ToMaster { from: Party, life: u64, epoch: u32, bytes: Vec<u8> },
    ToParty { to: Party, life: u64, bytes: Vec<u8> },
    CallTimeout { client: usize, life: u64, request_id: u64 },
    Wake { client: usize, life: u64 },
    Tick { node: usize, life: u64 },
    Trouble,
    RestartClient(usize),
    RestartNode(usize),
    Unstall(NodeId),
    Resume { client: usize, life: u64, stopped_at: Instant },
    Heal(NodeId, NodeId),
}

/// One direction between a party and the master in which nothing gets through.
#[derive(Clone, Copy, Debug)]
struct Partition {
    party: Party,
    to_master: bool,
    until: Instant,
}

/// What every party may use.
pub(crate) struct Core {
    pub(crate) now: Instant,
    pub(crate) net: SimNet,
    pub(crate) master: Master,
    pub(crate) shadow: Shadow,
    pub(crate) report: Report,
    /// What former lives of the master counted.
    past: Report,
    pub(crate) lies: Lies,
    /// What clients asked and were answered.
    pub(crate) history: History,
    /// What the master's clock shows.
    clock: Clock,
    /// Nobody is there to hear until then.
    down_until: Instant,
    partitions: Vec<Partition>,
    /// Requests that reach the master twice: what the second does is nobody's answer.
    doubled: HashSet<(usize, u64)>,
    /// The order in which the master started puts, by generation.
    starts: HashMap<u64, u64>,
    /// What is readable, as far as is known.
    visible: HashSet<Vec<u8>>,
    /// Exports by segment name and incarnation: what a metadata service would say.
    pub(crate) directory: HashMap<(String, u64), Vec<u8>>,
    pub(crate) scenario: Scenario,
    events: BTreeMap<(Instant, u64), Event>,
    rng: Rng,
    counter: u64,
}

impl Core {
    pub(crate) fn next_put(&mut self) -> u64 {
        self.counter += 1;
        self.counter
    }

    pub(crate) fn random_key(&self, rng: &mut Rng) -> Vec<u8> {
        let key = rng.below(self.scenario.keys);
        // Some are longer than what is kept inline.
        if key.is_multiple_of(3) {
            format!("{key}{}", "-long".repeat(12)).into_bytes()
        } else {
            format!("key-{key}").into_bytes()
        }
    }

    fn random_clock(&self, rng: &mut Rng) -> Clock {
        if self.scenario.clocks { Clock::random(self.now, rng) } else { Clock::TRUE }
    }

    pub(crate) fn judge(&self, found: Result<(), Violation>) -> Result<(), Violation> {
        let hidden = |violation: &Violation| {
            !matches!(
                violation,
                Violation::WrongBytes(_)
                    | Violation::NotLinearizable(_)
                    | Violation::Leak(_)
                    | Violation::Stuck(_)
            )
        };
        found.or_else(
            |violation| if self.scenario.blind && hidden(&violation) { Ok(()) } else { Err(violation) },
        )
    }

    /// The master gave a put its place, and its writer knows.
    pub(crate) fn note_start(&mut self, put: u64, generation: u64) {
        if let Some(order) = self.starts.get(&generation) {
            self.history.started(put, *order);
        }
    }

    /// Compares what is readable with what was, and notes what was lost.
    fn note_losses(&mut self) {
        if self.master.stats().objects == self.visible.len() as u64 {
            return;
        }
        let mut keys = HashSet::new();
        let query = ListQuery { prefix: Key(b""), cursor: 0, limit: 4096 };
        for (tenant, no) in TENANTS.iter().zip(1..) {
            self.master.list_of(self.clock.shows(self.now), no, &query, |listed| {
                if listed.complete {
                    keys.insert(full_key(tenant, listed.key.0));
                }
                true
            });
        }
        for key in self.visible.difference(&keys) {
            self.history.lost(key, self.now.as_nanos());
        }
        assert!(keys.is_subset(&self.visible), "readable without a commit: {keys:?} of {:?}", self.visible);
        self.visible = keys;
    }

    fn master_timeout(&mut self) {
        self.master.handle_timeout(self.clock.shows(self.now));
        self.note_losses();
    }

    /// Another master, which knows nothing.
    fn restart_master(&mut self, down: Duration) {
        self.report.master_restarts += 1;
        self.past = self.past.plus(&Report { stats: self.master.stats(), ..Report::default() });
        let config = self.master.config().clone();
        self.master = Master::new(MasterConfig { epoch: config.epoch + 1, ..config }).unwrap();
        if self.scenario.clocks {
            self.clock = Clock::random(self.now, &mut self.rng);
        }
        self.down_until = self.now + down;
        self.note_losses();
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
        // The silence at the end is silent: a heartbeat lost there would prove nothing.
        let over = self.now > Instant::ZERO + self.scenario.busy + OPERATION_MAX;
        let (lost, doubled, slow, slow_ms) = if over { (0, 0, 0, 0) } else { self.scenario.calls };
        let copies = if self.rng.chance_ppm(lost) { 0 } else { 1 + u64::from(self.rng.chance_ppm(doubled)) };
        let mut times = Vec::new();
        for _ in 0..copies {
            let slow_us = if self.rng.chance_ppm(slow) { self.rng.below(slow_ms * 1_000) } else { 0 };
            times.push(self.now + Duration::from_micros(50 + self.rng.below(500) + slow_us));
        }
        times
    }

    fn at(&mut self, at: Instant, event: Event) {
        self.counter += 1;
        self.events.insert((at, self.counter), event);
    }

    /// The master carries a request out, and what it says is compared with what must hold.
    fn serve(&mut self, from: Party, life: u64, bytes: &[u8]) -> Result<(), Violation> {
        let (request, _) = Frame::parse(bytes).unwrap().unwrap();
        let mut out = Vec::new();
        let mut session = self.greet(from);
        self.master.handle(self.clock.shows(self.now), &mut session, &request, &mut out);
        let (response, len) = Frame::parse(&out).unwrap().unwrap();
        assert_eq!((len, response.header.request_id), (out.len(), request.header.request_id));
        let found = self.observe(from, &request, &response);
        self.judge(found)?;
        self.note_losses();
        self.answer(from, life, out);
        Ok(())
    }

    /// Every message comes over a connection that began with a greeting.
    fn greet(&mut self, from: Party) -> Session {
        let tenant = match from {
            // Nodes are nobody's.
            Party::Node(_) => "",
            Party::Client(0) if self.lies.contains(Lies::TENANT) => TENANTS[1],
            Party::Client(client) => tenant_of(client),
        };
        let greeting = Greeting { version: VERSION, tenant, secret: Key(b""), admin: Key(b"") };
        let (mut hello, mut out) = (Vec::new(), Vec::new());
        Hello::encode_request(&mut hello, 0, &greeting, core::iter::empty()).unwrap();
        let mut session = Session::default();
        let (frame, _) = Frame::parse(&hello).unwrap().unwrap();
        self.master.handle(self.clock.shows(self.now), &mut session, &frame, &mut out);
        let (answer, _) = Frame::parse(&out).unwrap().unwrap();
        assert_eq!(answer.header.result(), Ok(()));
        session
    }

    fn observe(&mut self, from: Party, request: &Frame<'_>, response: &Frame<'_>) -> Result<(), Violation> {
        match Kind::from_byte(request.header.kind) {
            Some(Kind::PutStart) => {
                let (ask, asked) = PutStart::decode_request(request.body).unwrap();
                let retained = ask.options.retention != Retention::DEFAULT;
                self.report.retained += asked.len() as u64 * u64::from(retained);
                self.observe_put(asked, PutStart::decode_response(response))
            }
            Some(Kind::PutEnd) => {
                let (_, asked) = PutEnd::decode_request(request.body).unwrap();
                let Ok((_, answers)) = PutEnd::decode_response(response) else { return Ok(()) };
                for (Commit { key, .. }, answer) in asked.zip(answers) {
                    if answer.is_ok() {
                        self.visible.insert(self.full_key(from, key.0));
                    }
                }
                Ok(())
            }
            Some(Kind::Get) => {
                let Ok((lease, answers)) = Get::decode_response(response) else { return Ok(()) };
                // The slowest of clocks.
                let lease = Duration::from_millis(lease.lease_ms.into());
                let until = self.now + lease.mul_f64(1.0 / (1.0 - DRIFT_PPM_MAX as f64 / 1e6));
                for object in answers.flatten() {
                    for replica in object.replicas.iter() {
                        let range = (replica.segment, replica.addr, object.len);
                        self.shadow.leased(object.generation, range, until)?;
                    }
                }
                Ok(())
            }
            Some(Kind::Remove) => {
                let (_, mut asked) = Remove::decode_request(request.body).unwrap();
                let Ok((_, mut answers)) = Remove::decode_response(response) else { return Ok(()) };
                if let (Party::Client(client), Some(Ok(())), Some(removal)) =
                    (from, answers.next(), asked.next())
                {
                    let key = self.full_key(from, removal.key.0);
                    self.visible.remove(&key);
                    if self.doubled.contains(&(client, request.header.request_id)) {
                        self.history.lost(&key, self.now.as_nanos());
                    }
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// A key, and whose it really is.
    fn full_key(&self, from: Party, key: &[u8]) -> Vec<u8> {
        match from {
            Party::Client(0) if self.lies.contains(Lies::TENANT) => full_key(TENANTS[1], key),
            Party::Client(client) => full_key(tenant_of(client), key),
            Party::Node(_) => unreachable!("nodes have no keys"),
        }
    }

    fn observe_put<'a>(
        &mut self,
        asked: impl Iterator<Item = NewObject<'a>>,
        answer: Result<(PutWindow, Items<'_, Result<Allocation, ErrorCode>>), ErrorCode>,
    ) -> Result<(), Violation> {
        let Ok((_, answers)) = answer else { return Ok(()) };
        let mut found = Ok(());
        for (NewObject { len, .. }, allocation) in asked.zip(answers) {
            let Ok(allocation) = allocation else { continue };
            let order = self.starts.len() as u64 + 1;
            // A start that came twice is the same start.
            self.starts.entry(allocation.generation).or_insert(order);
            for replica in allocation.replicas.iter() {
                let range = (replica.segment, replica.addr, len);
                let given = self.shadow.allocated(self.now, allocation.generation, range);
                self.shadow.own(allocation.generation, range);
                found = found.and(given);
            }
        }
        found
    }
}

/// Whose a client is.
pub(crate) fn tenant_of(client: usize) -> &'static str {
    TENANTS[client * TENANTS.len() / CLIENTS]
}

pub(crate) fn full_key(tenant: &str, key: &[u8]) -> Vec<u8> {
    [tenant.as_bytes(), b"/", key].concat()
}

pub(crate) struct World {
    pub(crate) core: Core,
    clients: Vec<Option<Client>>,
    nodes: Vec<Node>,
    fabric_ids: Vec<NodeId>,
    lives: u64,
    rng: Rng,
    busy_until: Instant,
    /// The master's clock does not jump again before this.
    jump_after: Instant,
}

impl World {
    pub(crate) fn new(seed: u64, mut scenario: Scenario) -> Self {
        scenario.master.eviction = EvictionPolicy::ALL[seed as usize % EvictionPolicy::ALL.len()];
        scenario.master.allocator = AllocatorKind::ALL[seed as usize / 4 % 2];
        scenario.master.allocation_strategy = AllocationStrategy::ALL[seed as usize / 8 % 2];
        let mut rng = Rng::new(seed);
        let net = SimNet::new(rng.next_u64(), SimConfig { link: scenario.link, ..SimConfig::CALM });
        let mut core = Core {
            now: Instant::ZERO,
            net: net.clone(),
            master: Master::new(MasterConfig { hash_seed: seed, ..scenario.master.clone() }).unwrap(),
            shadow: Shadow::default(),
            report: Report::default(),
            past: Report::default(),
            lies: scenario.lies,
            history: History::default(),
            clock: Clock::TRUE,
            down_until: Instant::ZERO,
            partitions: Vec::new(),
            doubled: HashSet::new(),
            starts: HashMap::new(),
            visible: HashSet::new(),
            directory: HashMap::new(),
            events: BTreeMap::new(),
            rng: rng.fork(),
            counter: 0,
            scenario,
        };
        core.clock = core.random_clock(&mut rng);
        let mut fabric_ids = Vec::new();
        let mut nodes = Vec::new();
        for index in 0..NODES {
            let transport = net.node();
            fabric_ids.push(transport.node());
            nodes.push(Node::new(index, transport, core.scenario.segment_bytes));
            core.at(Instant::ZERO, Event::Tick { node: index, life: 0 });
        }
        let mut clients = Vec::new();
        for index in 0..CLIENTS {
            let transport = net.node();
            fabric_ids.push(transport.node());
            let clock = core.random_clock(&mut rng);
            clients.push(Some(Client::new(index, transport, 0, clock)));
            core.at(Instant::from_millis(10), Event::Wake { client: index, life: 0 });
        }
        if core.scenario.faults {
            core.at(Instant::from_millis(1_000), Event::Trouble);
        }
        let busy_until = Instant::ZERO + core.scenario.busy;
        Self { core, clients, nodes, fabric_ids, lives: 0, rng, busy_until, jump_after: Instant::ZERO }
    }

    /// Runs to the end, and to the silence after it.
    pub(crate) fn run(mut self) -> Result<Report, Violation> {
        let config = self.core.master.config().clone();
        // Longer than any clock takes to see the release timeout pass.
        let release = Duration::from_millis(config.put_start_release_timeout_ms.into());
        let silence = release.mul_f64(1.05) + Duration::from_secs(1) + LATE_MAX;
        let end = self.busy_until + OPERATION_MAX + silence;
        while let Some(next) = self.next_time().filter(|next| *next <= end) {
            self.core.now = next.max(self.core.now);
            self.step()?;
        }
        self.core.now = end;
        self.core.net.advance_to(end);
        self.core.master_timeout();
        if let Some(client) = self.clients.iter().flatten().find(|client| !client.is_idle()) {
            return Err(Violation::Stuck(client.describe()));
        }
        self.core.report.landed_late = self.core.net.counters().landed_late;
        self.core.report.stats = self.core.master.stats();
        self.core.report.eviction = self.core.master.eviction();
        self.core.report.recorded = self.core.history.len() as u64;
        self.core.report.losses = self.core.history.losses() as u64;
        let explained = self.core.history.check();
        explained.map_err(|refusal| Violation::NotLinearizable(refusal.to_string()))?;
        self.check_space()?;
        Ok(self.core.report.plus(&self.core.past))
    }

    fn next_time(&self) -> Option<Instant> {
        let events = self.core.events.keys().next().map(|(at, _)| *at);
        let clients = self.clients.iter().flatten().filter_map(|client| client.poll_timeout(self.core.lies));
        let master = self.core.master.poll_timeout().map(|shown| self.core.clock.when(shown));
        [events, self.core.net.next_event(), master].into_iter().flatten().chain(clients).min()
    }

    fn step(&mut self) -> Result<(), Violation> {
        let now = self.core.now;
        self.core.net.advance_to(now);
        while let Some(entry) = self.core.events.first_entry().filter(|entry| entry.key().0 <= now) {
            let event = entry.remove();
            self.handle(event)?;
        }
        if self.core.master.poll_timeout().is_some_and(|due| due <= self.core.clock.shows(now)) {
            self.core.master_timeout();
        }
        for index in 0..CLIENTS {
            let Some(client) = self.clients[index].as_mut().filter(|client| !client.stopped) else {
                continue;
            };
            let due = client.poll_timeout(self.core.lies).is_some_and(|due| due <= now);
            if due {
                client.handle_timeout(now);
            }
            let reaped = client.reap(&mut self.core);
            if due || reaped {
                self.drive(index)?;
            }
        }
        Ok(())
    }

    /// Whether an event has to wait because its client is stopped; it is kept.
    fn is_kept_back(&mut self, event: &Event) -> bool {
        let (client, life) = match event {
            Event::ToParty { to: Party::Client(client), life, .. } => (*client, *life),
            Event::CallTimeout { client, life, .. } | Event::Wake { client, life } => (*client, *life),
            _ => return false,
        };
        self.clients[client].as_ref().is_some_and(|client| client.life == life && client.stopped)
    }

    fn handle(&mut self, event: Event) -> Result<(), Violation> {
        if self.is_kept_back(&event) {
            self.core.at(self.core.now + Duration::from_millis(10), event);
            return Ok(());
        }
        match event {
            Event::ToMaster { from, life, epoch, bytes } => {
                if epoch == self.core.epoch() && self.core.now >= self.core.down_until {
                    self.core.serve(from, life, &bytes)?;
                }
            }
            Event::ToParty { to: Party::Client(index), life, bytes } => {
                let Some(client) = self.clients[index].as_mut().filter(|client| client.life == life) else {
                    return Ok(());
                };
                if client.receive(&mut self.core, &bytes) {
                    self.think(index);
                }
                self.drive(index)?;
            }
            Event::ToParty { to: Party::Node(index), life, bytes } => {
                self.nodes[index].receive(&mut self.core, life, &bytes);
            }
            Event::CallTimeout { client: index, life, request_id } => {
                let Some(client) = self.clients[index].as_mut().filter(|client| client.life == life) else {
                    return Ok(());
                };
                if client.call_failed(&mut self.core, request_id) {
                    self.think(index);
                }
                self.drive(index)?;
            }
            Event::Wake { client: index, life } => {
                let busy = self.core.now < self.busy_until;
                let Some(client) = self.clients[index].as_mut().filter(|client| client.life == life && busy)
                else {
                    return Ok(());
                };
                if client.is_idle() {
                    client.start(&mut self.core, &mut self.rng);
                    self.drive(index)?;
                }
            }
            Event::Tick { node, life } => {
                if self.nodes[node].tick(&mut self.core, life) {
                    self.core.at(self.core.now + NODE_TICK, Event::Tick { node, life });
                }
            }
            Event::Trouble => self.trouble(),
            Event::RestartClient(index) => {
                self.lives += 1;
                let transport = self.core.net.restart(self.fabric_ids[NODES + index]);
                let clock = self.core.random_clock(&mut self.rng);
                self.clients[index] = Some(Client::new(index, transport, self.lives, clock));
                self.think(index);
            }
            Event::RestartNode(index) => {
                self.lives += 1;
                let transport = self.core.net.restart(self.fabric_ids[index]);
                self.nodes[index].restart(transport, self.lives);
                self.core.at(self.core.now, Event::Tick { node: index, life: self.lives });
            }
            Event::Unstall(node) => self.core.net.stall(node, false),
            Event::Resume { client: index, life, stopped_at } => {
                if let Some(client) = self.clients[index].as_mut().filter(|client| client.life == life) {
                    client.resume(stopped_at);
                    self.drive(index)?;
                }
            }
            Event::Heal(from, to) => self.core.net.set_link(from, to, self.core.scenario.link),
        }
        Ok(())
    }

    fn drive(&mut self, index: usize) -> Result<(), Violation> {
        let Some(client) = &mut self.clients[index] else { return Ok(()) };
        if client.drive(&mut self.core)? {
            self.think(index);
        }
        Ok(())
    }

    /// Lets a client rest, then begin something new.
    fn think(&mut self, index: usize) {
        let Some(client) = &self.clients[index] else { return };
        let rest = Duration::from_micros(500 + self.rng.below(80_000));
        self.core.at(self.core.now + rest, Event::Wake { client: index, life: client.life });
    }

    fn trouble(&mut self) {
        if self.core.now >= self.busy_until {
            return;
        }
        let ms = |rng: &mut Rng, min: u64, max: u64| Duration::from_millis(min + rng.below(max - min));
        let now = self.core.now;
        let client = self.rng.index(CLIENTS);
        let node = self.rng.index(NODES);
        let rng = &mut self.rng;
        let party = if rng.below(2) == 0 { Party::Client(client) } else { Party::Node(node) };
        let (node_id, client_id) = (self.fabric_ids[node], self.fabric_ids[NODES + client]);
        match rng.below(36) {
            24 => self.core.restart_master(ms(rng, 0, 1_500)),
            // In one direction nothing gets through between somebody and the master.
            25..28 => {
                self.core.report.partitions += 1;
                let (to_master, until) = (rng.below(2) == 0, now + ms(rng, 100, 5_000));
                self.core.partitions.retain(|each| now < each.until);
                self.core.partitions.push(Partition { party, to_master, until });
            }
            // In one direction nothing gets through between a client and a node.
            28..30 => {
                self.core.report.partitions += 1;
                let (from, to) = if rng.below(2) == 0 { (node_id, client_id) } else { (client_id, node_id) };
                self.core.net.set_link(
                    from,
                    to,
                    LinkConfig { loss_ppm: 1_000_000, ..self.core.scenario.link },
                );
                self.core.at(now + ms(rng, 10, 3_000), Event::Heal(from, to));
            }
            // A process is stopped, and goes on later as if nothing had been.
            30..33 => {
                self.core.report.stops += 1;
                let back = now + ms(rng, 10, 6_000);
                match party {
                    Party::Node(_) => {
                        self.nodes[node].muted_until = back;
                        self.core.net.stall(node_id, true);
                        self.core.at(back, Event::Unstall(node_id));
                    }
                    Party::Client(_) => {
                        if let Some(client) = self.clients[client].as_mut().filter(|client| !client.stopped) {
                            client.stopped = true;
                            let (client, life) = (client.index, client.life);
                            self.core.at(back, Event::Resume { client, life, stopped_at: now });
                        }
                    }
                }
            }
            // The master's clock jumps, seldom and no further than the guard covers, a client's as it likes.
            33.. if self.core.scenario.clocks => {
                self.core.report.jumps += 1;
                if rng.below(2) == 0 && now >= self.jump_after {
                    self.core.clock.jump(now, ms(rng, 0, self.core.scenario.jump_ms));
                    self.jump_after = now + Duration::from_secs(1);
                } else if let Some(client) = &mut self.clients[client] {
                    client.clock.jump(now, ms(rng, 1, 10_000));
                }
            }
            0..4 if self.clients[client].is_some() => {
                self.core.report.crashes += 1;
                if let Some(client) = &mut self.clients[client] {
                    client.die(&mut self.core);
                }
                self.core.net.kill(self.fabric_ids[NODES + client]);
                self.core.shadow.writer_died(client, now + LATE_MAX);
                self.clients[client] = None;
                let back = now + ms(rng, 50, 2_000);
                self.core.at(back, Event::RestartClient(client));
            }
            4..8 if self.core.net.is_alive(self.fabric_ids[node]) => {
                self.core.report.crashes += 1;
                self.core.net.kill(self.fabric_ids[node]);
                self.nodes[node].die();
                let back = now + ms(rng, 50, 5_000);
                self.core.at(back, Event::RestartNode(node));
            }
            8..12 => {
                // It lives and serves, but the master hears nothing of it.
                self.nodes[node].muted_until = now + ms(rng, 500, 6_000);
            }
            12..16 => {
                let (a, b) = (self.fabric_ids[node], self.fabric_ids[NODES + client]);
                self.core.net.flap(a, b, now, now + ms(rng, 1, 2_000));
            }
            16..20 => {
                self.core.net.stall(self.fabric_ids[node], true);
                let back = now + ms(rng, 1, 500);
                self.core.at(back, Event::Unstall(self.fabric_ids[node]));
            }
            _ => self.core.net.cut(self.fabric_ids[node], self.fabric_ids[NODES + client]),
        }
        let next = now + ms(&mut self.rng, 50, 3_000);
        self.core.at(next, Event::Trouble);
    }

    /// Everything is quiet: every byte belongs to an object, and after the objects are gone to none.
    fn check_space(&mut self) -> Result<(), Violation> {
        let now = self.core.clock.shows(self.core.now);
        let master = &mut self.core.master;
        let stats = master.stats();
        let mut keys = Vec::new();
        let mut bytes = 0;
        let query = ListQuery { prefix: Key(b""), cursor: 0, limit: 4096 };
        for tenant in 0..=TENANTS.len() as u16 {
            master.list_of(now, tenant, &query, |listed| {
                bytes += listed.len.div_ceil(64) * 64 * u64::from(listed.replicas);
                keys.push((tenant, listed.key.0.to_vec()));
                true
            });
        }
        if stats.used_bytes != bytes
            || stats.quarantined_bytes + stats.deferred_bytes + stats.objects_processing > 0
        {
            return Err(Violation::Leak(format!("{bytes} bytes of objects, and {stats:?}")));
        }
        for (tenant, key) in &keys {
            assert_eq!(master.remove(now, FullKey { tenant: *tenant, key }, true), Ok(()));
        }
        let later = now + Duration::from_secs(1);
        master.handle_timeout(later);
        let segments: Vec<(SegmentNo, u64, u64)> =
            master.segments().map(|info| (info.segment, info.used, info.len)).collect();
        if self.core.scenario.segment_bytes > 0 && segments.len() != NODES {
            return Err(Violation::Leak(format!("{} segments of {NODES} came back", segments.len())));
        }
        for (segment, used, len) in segments {
            let options =
                PutOptions { replicas: 1, placement: Placement::on(segment), ..PutOptions::DEFAULT };
            let data = len - trailer_len(len);
            let whole = master.put_start(later, format!("whole {segment}").as_bytes(), data, &options);
            if used != 0 || whole.map_or(0, |allocation| allocation.replicas[0].segment) != segment {
                return Err(Violation::Leak(format!(
                    "segment {segment} has {used} bytes used, whole: {whole:?}"
                )));
            }
        }
        Ok(())
    }
}

impl Report {
    /// The sum of two; of the master's figures only what the suite asks for.
    pub(crate) fn plus(mut self, other: &Self) -> Self {
        self.gets += other.gets;
        self.hits += other.hits;
        self.failed_reads += other.failed_reads;
        self.lease_expired += other.lease_expired;
        self.mismatches += other.mismatches;
        self.puts += other.puts;
        self.failed_puts += other.failed_puts;
        self.removes += other.removes;
        self.unknown_writes += other.unknown_writes;
        self.landed_late += other.landed_late;
        self.fences += other.fences;
        self.crashes += other.crashes;
        self.master_restarts += other.master_restarts;
        self.remounts += other.remounts;
        self.stops += other.stops;
        self.partitions += other.partitions;
        self.jumps += other.jumps;
        self.recorded += other.recorded;
        self.losses += other.losses;
        self.retained += other.retained;
        self.eviction.groups_evicted_total += other.eviction.groups_evicted_total;
        self.eviction.expired_total += other.eviction.expired_total;
        self.eviction.soft_pins_decayed_total += other.eviction.soft_pins_decayed_total;
        self.eviction.kept_leased_total += other.eviction.kept_leased_total;
        self.stats.zombies_total += other.stats.zombies_total;
        self.stats.evictions_total += other.stats.evictions_total;
        self.stats.nodes_expired_total += other.stats.nodes_expired_total;
        self
    }
}
