//! Faults, and what the operator does meanwhile.

use std::iter;
use std::time::Duration;

use store_core::message::{
    Evict, EvictNow, OrderSegments, SegmentOrder, SegmentState, Unmount, UnmountSegment,
};
use store_core::{Frame, SegmentNo};
use te_core::sim::LinkConfig;
use te_core::testkit::Rng;

use crate::common::{Event, Partition, Party};
use crate::follower::operate;
use crate::scenario::{CHILD, CLIENTS, LATE_MAX, NODES};
use crate::shadow::Violation;
use crate::world::World;

pub(crate) fn ms(rng: &mut Rng, min: u64, max: u64) -> Duration {
    Duration::from_millis(min + rng.below(max - min))
}

impl World {
    pub(crate) fn trouble(&mut self) -> Result<(), Violation> {
        if self.core.now >= self.busy_until {
            return Ok(());
        }
        let now = self.core.now;
        let client = self.rng.index(CLIENTS);
        let node = self.rng.index(NODES);
        let rng = &mut self.rng;
        let party = if rng.below(2) == 0 { Party::Client(client) } else { Party::Node(node) };
        let (node_id, client_id) = (self.fabric_ids[node], self.fabric_ids[NODES + client]);
        match rng.below(56) {
            24 => self.core.restart_master(ms(rng, 0, 1_500)),
            // In one direction no message between a party and the master arrives.
            25..28 => {
                self.core.report.partitions += 1;
                let (to_master, until) = (rng.below(2) == 0, now + ms(rng, 100, 5_000));
                self.core.partitions.retain(|each| now < each.until);
                self.core.partitions.push(Partition { party, to_master, until });
            }
            // In one direction no message between a client, or another node, and a node arrives.
            28..30 => {
                self.core.report.partitions += 1;
                let other = self.fabric_ids[rng.index(NODES + CLIENTS)];
                let (from, to) = if rng.below(2) == 0 { (node_id, other) } else { (other, node_id) };
                let mut lossy: LinkConfig = self.core.scenario.link;
                lossy.loss_ppm = 1_000_000;
                self.core.net.set_link(from, to, lossy);
                self.core.at(now + ms(rng, 10, 3_000), Event::Heal(from, to));
            }
            // A process is stopped, and continues later as if nothing had happened.
            30..33 => {
                self.core.report.stops += 1;
                let back = now + ms(rng, 10, 6_000);
                self.stop(party, back);
            }
            // The master's clock jumps, seldom and not further than the guard covers; other clocks jump as
            // far as they like.
            33..36 if self.core.scenario.clocks => {
                self.core.report.jumps += 1;
                if rng.below(2) == 0 && now >= self.jump_after {
                    self.core.jump(ms(rng, 0, self.core.scenario.jump_ms));
                    self.jump_after = now + Duration::from_secs(1);
                } else if let (Some(client), Party::Client(_)) = (&mut self.clients[client], party) {
                    client.clock.jump(now, ms(rng, 1, 10_000));
                } else {
                    self.nodes[node].clock_mut().jump(now, ms(rng, 1, 10_000));
                }
            }
            36..41 if self.core.scenario.tasks => self.close_segment()?,
            41..48 if self.core.scenario.flips => self.flip(),
            0..4 if self.clients[client].is_some() => {
                self.crash_client(client);
                if client != CHILD {
                    let back = now + ms(&mut self.rng, 50, 2_000);
                    self.core.at(back, Event::RestartClient(client));
                }
            }
            4..8 => self.crash_node(node),
            8..12 => {
                // It is alive and serves, but the master does not hear of it.
                self.nodes[node].muted_until = now + ms(rng, 500, 6_000);
            }
            12..16 => self.core.net.flap(node_id, client_id, now, now + ms(rng, 1, 2_000)),
            16..20 => {
                self.core.net.stall(node_id, true);
                let back = now + ms(rng, 1, 500);
                self.core.at(back, Event::Unstall(node_id));
            }
            48..50 => self.core.at(now, Event::StandStill),
            // The next put of a client is forked.
            50..54 => self.forks_next = Some(rng.index(2)),
            _ => self.core.net.cut(node_id, client_id),
        }
        let next = now + ms(&mut self.rng, 50, 2_200);
        self.core.at(next, Event::Trouble);
        Ok(())
    }

    /// A client's process dies. The master notices later.
    pub(crate) fn crash_client(&mut self, index: usize) {
        let Some(mut client) = self.clients[index].take() else { return };
        let now = self.core.now;
        self.core.report.crashes += 1;
        client.die(&mut self.core);
        // A twin that lies used the connection of another client, which is alive.
        if client.speaks_as == (index, client.life) {
            let (party, life) = (Party::Client(index), client.life);
            self.core.at(now + ms(&mut self.rng, 0, 4_000), Event::HangUp(party, life));
        }
        self.core.net.kill(self.fabric_ids[NODES + index]);
        self.core.shadow.writer_died(index, now + LATE_MAX);
        self.held[index].clear();
    }

    /// A node's process dies, and restarts later with nothing.
    pub(crate) fn crash_node(&mut self, node: usize) {
        if self.core.net.is_alive(self.fabric_ids[node]) && self.core.now < self.busy_until {
            self.core.report.crashes += 1;
            self.core.net.kill(self.fabric_ids[node]);
            self.nodes[node].die(&mut self.core);
            // The master notices at once, or later.
            let noticed = self.rng.below(2) * self.rng.below(3_000);
            let noticed = self.core.now + Duration::from_millis(noticed);
            self.core.at(noticed, Event::HangUp(Party::Node(node), self.nodes[node].life));
            let back = self.core.now + ms(&mut self.rng, 50, 5_000);
            self.core.at(back, Event::RestartNode(node));
        }
    }

    /// Flips a byte of a committed replica.
    fn flip(&mut self) {
        for _ in 0..2 {
            let Some(segment) = self.core.random_segment(&mut self.rng) else { return };
            let core = &self.core;
            let found =
                core.shadow.random_range(&mut self.rng, segment, |generation| core.is_visible(generation));
            let Some((generation, (_, addr, len))) = found else { continue };
            let Some(info) = core.master.segment(segment) else { continue };
            let Some(memory) = self.nodes[info.node.get() as usize - 1].memory_of(info.incarnation.get())
            else {
                continue;
            };
            memory.flip(addr + self.rng.below(len));
            self.core.shadow.flip(generation, segment);
            self.core.report.flips += 1;
        }
    }

    /// Puts a segment into maintenance or drains it.
    fn close_segment(&mut self) -> Result<(), Violation> {
        let Some(segment) = self.core.random_segment(&mut self.rng) else { return Ok(()) };
        if !self.core.closed.is_empty() || self.core.away_until().is_some() {
            return Ok(());
        }
        if self.rng.below(4) == 0 {
            return self.order(segment, SegmentState::Maintenance);
        }
        let room = self.rng.below(2) == 0;
        self.drain(segment, room)
    }

    /// Drains a segment, with or without making room for its objects first.
    pub(crate) fn drain(&mut self, segment: SegmentNo, room: bool) -> Result<(), Violation> {
        self.core.report.drains += 1;
        if room {
            let used_bytes_max = self.core.master.stats().capacity_bytes / 3;
            let evict = Evict { objects_max: u64::MAX, used_bytes_max };
            self.core.by_the_master(|recorder, master, now| {
                operate::<EvictNow>(recorder, master, now, &evict, iter::empty());
            })?;
        }
        self.order(segment, SegmentState::Draining)
    }

    fn order(&mut self, segment: SegmentNo, state: SegmentState) -> Result<(), Violation> {
        self.core.by_the_master(|recorder, master, now| {
            // The segment may be gone.
            let order = iter::once(SegmentOrder { segment, state });
            operate::<OrderSegments>(recorder, master, now, &(), order);
        })?;
        if state == SegmentState::Active {
            self.core.closed.remove(&segment);
        } else {
            self.core.closed.insert(segment);
            let look = self.core.now + ms(&mut self.rng, 500, 5_000);
            self.core.at(look, Event::Look(segment));
        }
        Ok(())
    }

    /// Checks a segment that accepts nothing new.
    pub(crate) fn look(&mut self, segment: SegmentNo) -> Result<(), Violation> {
        let Ok(info) = self.core.master.drain_info(segment) else {
            self.core.closed.remove(&segment);
            return Ok(());
        };
        let drained = info.state == SegmentState::Drained;
        if info.state == SegmentState::Active || self.last_drain == Some(segment) {
            return Ok(());
        }
        if drained && info.used_bytes + info.blocks > 0 {
            return Err(Violation::NotDrained(format!("{info:?} at {:?}", self.core.now)));
        }
        self.core.report.drained += u64::from(drained);
        if drained && self.rng.below(4) > 0 {
            return self.unmount(segment);
        }
        if drained || self.core.now >= self.busy_until || self.rng.below(8) == 0 {
            return self.order(segment, SegmentState::Active);
        }
        let again = self.core.now + ms(&mut self.rng, 500, 3_000);
        self.core.at(again, Event::Look(segment));
        Ok(())
    }

    /// Unmounts a segment that is drained: nothing may be lost.
    fn unmount(&mut self, segment: SegmentNo) -> Result<(), Violation> {
        let Some(info) = self.core.master.segment(segment) else { return Ok(()) };
        let (node, incarnation) = (info.node, info.incarnation);
        // The key of its latest incarnation, or of an earlier one which the master counts as alive.
        let keys = self.core.node_keys[&node.get()].clone();
        let before = self.core.master.stats();
        self.core.by_the_master(|recorder, master, now| {
            let unmounts = |key| {
                let unmount = UnmountSegment { node, incarnation, segment, key };
                let out = operate::<Unmount>(recorder, master, now, &unmount, iter::empty());
                Frame::parse(&out).unwrap().unwrap().0.header.result() == Ok(())
            };
            assert!(keys.into_iter().any(unmounts));
        })?;
        let after = self.core.master.stats();
        self.core.closed.remove(&segment);
        self.core.report.left += 1;
        if (before.objects, before.objects_lost_total) != (after.objects, after.objects_lost_total) {
            return Err(Violation::LostByTask(format!(
                "segment {segment} was drained: {before:?}, {after:?}"
            )));
        }
        Ok(())
    }

    /// Everything is quiet, and one segment is drained.
    pub(crate) fn last_drain(&mut self) -> Result<(), Violation> {
        if self.core.master.segments().count() != NODES || !self.core.closed.is_empty() {
            return Ok(());
        }
        self.last_drain = self.core.random_segment(&mut self.rng);
        let Some(segment) = self.last_drain else { return Ok(()) };
        self.drain(segment, self.core.scenario.faults)
    }

    /// Its time is over.
    pub(crate) fn end_drain(&mut self) -> Result<(), Violation> {
        let Some(segment) = self.last_drain else { return Ok(()) };
        let Ok(info) = self.core.master.drain_info(segment) else {
            return Err(Violation::Leak(format!("segment {segment} was unmounted in the silence")));
        };
        // Nothing is evicted to make room elsewhere; but where there is room, everything has moved there.
        let drained = info.state == SegmentState::Drained;
        // Bad replicas stay, too; the last try to move one may have failed for another reason.
        let tried_again = info.left_unfinished > 0 && self.core.is_rotten(segment);
        if !drained && info.left_no_room == 0 && info.left_bad == 0 && !tried_again {
            return Err(Violation::Stuck(format!("{info:?}")));
        }
        self.core.report.drained += u64::from(drained);
        self.order(segment, SegmentState::Active)
    }
}
