//! Processes that are stopped and continue as if nothing had happened: one writer during a write, until all
//! timeouts have passed, or all processes, the master included, in any order. And processes that are forked.

use std::time::Duration;

use te_core::Instant;

use crate::common::{Core, Event, Party};
use crate::scenario::{CHILD, CLIENTS, NODES};
use crate::trouble::ms;
use crate::world::World;

/// How long all processes are stopped, ms.
const STILL_MS: (u64, u64) = (500, 12_000);
/// The longest time between the stops, and between the continuations, of processes in a storm.
const APART_MAX: Duration = Duration::from_secs(4);

impl Core {
    /// Whether a writer is stopped before it has written everything. It continues after the night, if there
    /// is one to come.
    pub(crate) fn stops_writer(&mut self, client: usize, life: u64) -> bool {
        if !self.scenario.faults || self.is_silent() || !self.chance_ppm(self.scenario.stops_ppm) {
            return false;
        }
        self.report.paused += 1;
        let back = match self.night.filter(|(evening, _)| self.now < *evening) {
            Some((_, morning)) => {
                self.report.slept += 1;
                morning + Duration::from_micros(self.below(12_000_000))
            }
            None => self.now + Duration::from_micros(10_000 + self.below(6_000_000)),
        };
        let stopped_at = self.now;
        self.at(back, Event::Resume { client, life, stopped_at });
        true
    }
}

impl World {
    /// Stops a process until then.
    pub(crate) fn stop(&mut self, party: Party, until: Instant) {
        match party {
            Party::Node(node) => {
                self.nodes[node].muted_until = self.nodes[node].muted_until.max(until);
                self.core.net.stall(self.fabric_ids[node], true);
                self.core.at(until, Event::Unstall(self.fabric_ids[node]));
            }
            Party::Client(client) => {
                if let Some(client) = self.clients[client].as_mut().filter(|client| !client.stopped) {
                    client.stopped = true;
                    let (client, life, stopped_at) = (client.index, client.life, self.core.now);
                    self.core.at(until, Event::Resume { client, life, stopped_at });
                }
            }
        }
    }

    /// Stops all processes, one after the other, and lets them continue, one after the other.
    pub(crate) fn stand_still(&mut self) {
        let now = self.core.now;
        if now >= self.busy_until {
            return;
        }
        self.core.report.standstills += 1;
        let apart = self.core.scenario.standstills.unwrap_or(APART_MAX);
        let rng = &mut self.rng;
        let still = ms(rng, STILL_MS.0, STILL_MS.1);
        let mut any = |within: Duration| Duration::from_nanos(rng.below(within.as_nanos() as u64));
        let mut times = || (now + any(apart), now + apart + still + any(apart));
        let (begin, end) = times();
        self.core.at(begin, Event::StopMaster(end));
        let clients = (0..CLIENTS).map(Party::Client);
        for party in (0..NODES).map(Party::Node).chain(clients) {
            let (begin, end) = times();
            self.core.at(begin, Event::Stop(party, end));
        }
        if self.core.scenario.standstills.is_some() {
            let next = now + 2 * apart + still + ms(&mut self.rng, 1_000, 4_000);
            self.core.at(next, Event::StandStill);
        }
    }

    /// Forks a client.
    pub(crate) fn fork(&mut self, parent: usize) {
        self.forks_next = None;
        let (None, Some(parent)) = (&self.clients[CHILD], &self.clients[parent]) else { return };
        self.core.report.forks += 1;
        self.lives += 1;
        let life = self.lives;
        let transport = self.core.net.restart(self.fabric_ids[NODES + CHILD]);
        self.clients[CHILD] = Some(parent.fork(transport, life, self.core.lies));
        let soon = self.core.now + Duration::from_micros(self.rng.below(400));
        self.core.at(soon, Event::Wake { client: CHILD, life });
        self.core.at(soon + ms(&mut self.rng, 100, 4_000), Event::EndChild(life));
    }

    /// The process that receives a response on a connection that two of them share.
    pub(crate) fn who_reads(&mut self, owner: (usize, u64)) -> usize {
        let twin = self.clients[CHILD].as_ref().is_some_and(|child| child.speaks_as == owner);
        if owner.0 != CHILD && twin && self.rng.below(2) == 0 { CHILD } else { owner.0 }
    }
}
