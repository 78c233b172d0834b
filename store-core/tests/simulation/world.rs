//! One thread, one clock, one seed: the master, its nodes and its clients, and all events between them.

use std::time::Duration;

use te_core::Instant;
use te_core::sim::{NodeId, SimConfig, SimNet};
use te_core::testkit::Rng;

use crate::client::Client;
use crate::clock::Wall;
use crate::common::{Core, Event, Party};
use crate::memory::{content, sums};
use crate::node::Node;
use crate::scenario::{CHILD, CLIENTS, LATE_MAX, NODES, OPERATION_MAX, Report, Scenario};
use crate::shadow::Violation;

const NODE_TICK: Duration = Duration::from_millis(500);
/// The same when no message is lost.
const QUIET_TICK: Duration = Duration::from_millis(900);

pub(crate) struct World {
    pub(crate) core: Core,
    pub(crate) clients: Vec<Option<Client>>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) fabric_ids: Vec<NodeId>,
    pub(crate) lives: u64,
    pub(crate) rng: Rng,
    /// Events for clients that are stopped, by client.
    pub(crate) held: Vec<Vec<Event>>,
    /// The client whose next put is forked.
    pub(crate) forks_next: Option<usize>,
    pub(crate) busy_until: Instant,
    /// The master's clock does not jump again before this time.
    pub(crate) jump_after: Instant,
    /// The segment that is drained at the end.
    pub(crate) last_drain: Option<store_core::SegmentNo>,
}

impl World {
    pub(crate) fn new(seed: u64, mut scenario: Scenario) -> Self {
        scenario.vary(seed);
        // The night falls into the middle, and everything after it is later by its length.
        let night = scenario.night.map(|night| {
            let begin = Instant::ZERO + scenario.busy / 2;
            scenario.busy += night;
            (begin, begin + night)
        });
        let mut rng = Rng::new(seed);
        let mut config = SimConfig::CALM;
        config.link = scenario.link;
        let net = SimNet::new(rng.next(), config);
        let mut core = Core::new(scenario, net.clone(), rng.fork());
        let wall = if core.scenario.clocks { Wall::random(&mut rng, true) } else { Wall::default() };
        let clock = core.random_clock(&mut rng);
        core.set_clock(clock, wall);
        core.night = night;
        let mut fabric_ids = Vec::new();
        let mut nodes = Vec::new();
        for index in 0..NODES {
            let transport = net.node();
            fabric_ids.push(transport.node());
            let clocks = (core.random_clock(&mut rng), core.random_wall(&mut rng));
            let segment_bytes = core.scenario.segment_bytes;
            nodes.push(Node::new(index, transport, segment_bytes, clocks, &mut core));
            core.at(Instant::ZERO, Event::Tick { node: index, life: 0 });
        }
        let mut clients = Vec::new();
        for index in 0..CLIENTS {
            let transport = net.node();
            fabric_ids.push(transport.node());
            if index == CHILD {
                // Created when a client is forked.
                clients.push(None);
                continue;
            }
            let clock = core.random_clock(&mut rng);
            clients.push(Some(Client::new(index, transport, 0, clock, core.scenario.slot_bytes())));
            core.at(Instant::from_millis(10), Event::Wake { client: index, life: 0 });
        }
        if core.scenario.faults {
            core.at(Instant::from_millis(1_000), Event::Trouble);
        }
        if core.scenario.intruders {
            core.at(Instant::from_millis(1_500), Event::Intruders);
        }
        if core.scenario.settings {
            core.at(Instant::from_millis(3_000), Event::SetTenant);
        }
        if core.scenario.standstills.is_some() {
            core.at(Instant::from_millis(2_000), Event::StandStill);
        }
        let busy_until = Instant::ZERO + core.scenario.busy;
        if core.scenario.tasks {
            core.at(busy_until + OPERATION_MAX + Duration::from_secs(1), Event::LastDrain);
        }
        Self {
            core,
            clients,
            nodes,
            fabric_ids,
            lives: 0,
            rng,
            held: (0..CLIENTS).map(|_| Vec::new()).collect(),
            forks_next: None,
            busy_until,
            jump_after: Instant::ZERO,
            last_drain: None,
        }
    }

    /// Runs to the end, and through the silence after it.
    pub(crate) fn run(mut self) -> Result<Report, Violation> {
        let config = self.core.master.config().clone();
        // Longer than any clock takes to show the end of the release timeout.
        let release = Duration::from_millis(config.put_start_release_timeout_ms.into());
        let silence = release.mul_f64(1.05) + Duration::from_secs(1) + LATE_MAX;
        let end_drain = self.busy_until + OPERATION_MAX + silence;
        let end = end_drain + Duration::from_secs(10);
        self.core.at(end_drain, Event::EndDrain);
        while let Some(next) = self.next_time().filter(|next| *next <= end) {
            self.core.now = next.max(self.core.now);
            self.step()?;
        }
        self.core.now = end;
        self.core.net.advance_to(end);
        self.core.master_timeout()?;
        self.core.compare()?;
        if let Some(client) = self.clients.iter().flatten().find(|client| !client.is_idle()) {
            return Err(Violation::Stuck(client.describe()));
        }
        self.core.report.landed_late = self.core.net.counters().landed_late;
        self.core.report.stats = self.core.master.stats();
        self.core.report.tasks = self.core.master.task_report();
        self.core.report.eviction = self.core.master.eviction();
        self.core.report.recorded = self.core.history.len() as u64;
        self.core.report.losses = self.core.history.losses() as u64;
        let explained = self.core.history.check();
        explained.map_err(|refusal| Violation::NotLinearizable(refusal.to_string()))?;
        self.core.check_space()?;
        Ok(self.core.report.plus(&self.core.past))
    }

    fn next_time(&self) -> Option<Instant> {
        let events = self.core.events.keys().next().map(|(at, _)| *at);
        let clients = self.clients.iter().flatten().filter_map(|client| client.poll_timeout(self.core.lies));
        let serving = self.core.standing.is_none();
        let master = self.core.master.poll_timeout().filter(|_| serving);
        let master = master.map(|shown| self.core.clock.when(shown));
        [events, self.core.net.next_event(), master].into_iter().flatten().chain(clients).min()
    }

    fn step(&mut self) -> Result<(), Violation> {
        let now = self.core.now;
        self.core.net.advance_to(now);
        while let Some(entry) = self.core.events.first_entry().filter(|entry| entry.key().0 <= now) {
            let event = entry.remove();
            self.handle(event)?;
        }
        let due = self.core.master.poll_timeout().is_some_and(|due| due <= self.core.shown());
        if due && self.core.standing.is_none() {
            self.core.master_timeout()?;
        }
        for node in &mut self.nodes {
            node.reap(&mut self.core)?;
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

    /// Returns an event that can happen now; others are kept until their party continues.
    fn unless_it_waits(&mut self, event: Event) -> Option<Event> {
        match &event {
            Event::ToMaster { .. }
            | Event::HangUp(..)
            | Event::Look(_)
            | Event::Trouble
            | Event::SetTenant
            | Event::Intruders => {
                if let Some((_, until)) = self.core.standing {
                    self.core.at(until, event);
                    return None;
                }
            }
            _ => {}
        }
        if let Some(morning) = self.core.morning().filter(|_| event.begins_something()) {
            let soon = Duration::from_micros(self.rng.below(80_000));
            self.core.at(morning + soon, event);
            return None;
        }
        let (client, life) = match &event {
            Event::ToParty { to: Party::Client(client), life, .. } => (*client, *life),
            Event::CallTimeout { client, life, .. } | Event::Wake { client, life } => (*client, *life),
            _ => return Some(event),
        };
        if self.clients[client].as_ref().is_some_and(|client| client.life == life && client.stopped) {
            self.held[client].push(event);
            return None;
        }
        Some(event)
    }

    fn handle(&mut self, event: Event) -> Result<(), Violation> {
        let Some(event) = self.unless_it_waits(event) else { return Ok(()) };
        match event {
            Event::ToMaster { from, life, epoch, bytes } => {
                if epoch == self.core.epoch() && self.core.now >= self.core.down_until {
                    self.core.serve(from, life, &bytes)?;
                    self.look_at_copies()?;
                }
            }
            Event::ToParty { to: Party::Client(index), life, bytes } => {
                let index = self.who_reads((index, life));
                let speaks = |client: &&mut Client| client.speaks_as.1 == life && !client.stopped;
                let Some(client) = self.clients[index].as_mut().filter(speaks) else {
                    return Ok(());
                };
                if client.receive(&mut self.core, &bytes)? {
                    self.think(index);
                }
                self.drive(index)?;
            }
            Event::ToParty { to: Party::Node(index), life, bytes } => {
                self.nodes[index].receive(&mut self.core, life, &bytes)?;
            }
            Event::CallTimeout { client: index, life, request_id } => {
                let Some(client) = self.clients[index].as_mut().filter(|client| client.life == life) else {
                    return Ok(());
                };
                if client.call_failed(&mut self.core, request_id)? {
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
                if self.nodes[node].tick(&mut self.core, life)? {
                    let tick = if self.core.is_quiet() { QUIET_TICK } else { NODE_TICK };
                    self.core.at(self.core.now + tick, Event::Tick { node, life });
                }
            }
            Event::Resume { client: index, life, stopped_at } => {
                if let Some(client) = self.clients[index].as_mut().filter(|client| client.life == life) {
                    client.resume(stopped_at);
                    client.write_on(&mut self.core);
                    self.drive(index)?;
                    for event in std::mem::take(&mut self.held[index]) {
                        self.core.at(self.core.now, event);
                    }
                }
            }
            Event::GoOn { node, life } => self.nodes[node].go_on(&mut self.core, life)?,
            other => self.happen(other)?,
        }
        Ok(())
    }

    /// Events of parties, and actions of the operator.
    fn happen(&mut self, event: Event) -> Result<(), Violation> {
        match event {
            Event::Trouble => self.trouble()?,
            Event::RestartClient(index) => {
                self.lives += 1;
                let transport = self.core.net.restart(self.fabric_ids[NODES + index]);
                let clock = self.core.random_clock(&mut self.rng);
                let slot_bytes = self.core.scenario.slot_bytes();
                self.clients[index] = Some(Client::new(index, transport, self.lives, clock, slot_bytes));
                self.think(index);
            }
            Event::RestartNode(index) => {
                self.lives += 1;
                let transport = self.core.net.restart(self.fabric_ids[index]);
                let clocks = (self.core.random_clock(&mut self.rng), self.core.random_wall(&mut self.rng));
                self.nodes[index].restart(transport, self.lives, clocks, &mut self.core);
                self.core.at(self.core.now, Event::Tick { node: index, life: self.lives });
            }
            Event::HangUp(party, life) => self.core.hang_up(party, life),
            Event::Unstall(node) => self.core.net.stall(node, false),
            Event::Intruders => self.intruders()?,
            Event::SetTenant => self.set_tenant()?,
            Event::StandStill => self.stand_still(),
            Event::Stop(party, until) => self.stop(party, until),
            Event::StopMaster(until) => self.core.stop_master(until),
            Event::MasterGoesOn => self.core.master_goes_on(),
            Event::EndChild(life) => {
                if self.clients[CHILD].as_ref().is_some_and(|child| child.life == life) {
                    self.crash_client(CHILD);
                }
            }
            Event::Heal(from, to) => self.core.net.set_link(from, to, self.core.scenario.link),
            Event::CrashNode(index) => self.crash_node(index),
            Event::Look(segment) => self.look(segment)?,
            Event::LastDrain => self.last_drain()?,
            Event::EndDrain => self.end_drain()?,
            Event::ToMaster { .. }
            | Event::ToParty { .. }
            | Event::CallTimeout { .. }
            | Event::Wake { .. }
            | Event::Tick { .. }
            | Event::Resume { .. }
            | Event::GoOn { .. } => unreachable!("handled before"),
        }
        Ok(())
    }

    /// A copy that counts must have the bytes of its object: a move has dropped its source.
    fn look_at_copies(&mut self) -> Result<(), Violation> {
        for attempt in std::mem::take(&mut self.core.fresh) {
            let given = &self.core.given[&attempt];
            let (segment, addr, len) = given.range;
            let Some(info) = self.core.master.segment(segment) else { continue };
            // A node that is gone by now takes its memory with it.
            let Some(memory) = self.nodes[info.node.get() as usize - 1].memory_of(info.incarnation.get())
            else {
                continue;
            };
            let Some(put) = self.core.shadow.puts.get(&given.generation) else { continue };
            let mut bytes = content(put.number, put.len);
            let sums = sums(&bytes);
            bytes.extend_from_slice(sums.trailer());
            let found = if memory.read(addr, len) == bytes {
                Ok(())
            } else {
                Err(Violation::BadCopy(format!("{given:?} at {:?}", self.core.now)))
            };
            self.core.judge(found)?;
        }
        Ok(())
    }

    fn drive(&mut self, index: usize) -> Result<(), Violation> {
        let Some(client) = &mut self.clients[index] else { return Ok(()) };
        let ended = client.drive(&mut self.core)?;
        if self.forks_next == Some(index) && client.is_putting() {
            self.fork(index);
        }
        if ended {
            self.think(index);
        }
        Ok(())
    }

    /// Lets a client pause, then begin something new.
    fn think(&mut self, index: usize) {
        let Some(client) = &self.clients[index] else { return };
        let rest = Duration::from_micros(500 + self.rng.below(80_000));
        self.core.at(self.core.now + rest, Event::Wake { client: index, life: client.life });
    }
}
