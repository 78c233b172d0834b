//! How operations travel: packets over links, the target's checks, and the end of each operation.
#![allow(
    unsafe_code,
    reason = "copies between the memories of nodes, which only their registrations describe"
)]

use alloc::vec::Vec;

use super::{Done, Kind, Link, NodeId, Operation, Packet, What, World, nanos};
use crate::sim::blob::Export;
use crate::sim::config::LinkConfig;
use crate::sim::slab::Key;
use crate::{Access, Completion, Error, ErrorKind, MemSpan, Outcome, RegionId, RemoteOffset, Token};

impl World {
    #[allow(clippy::too_many_arguments, reason = "one private constructor of the two halves of an operation")]
    pub(super) fn start(
        &mut self,
        initiator: u32,
        token: Token,
        kind: Kind,
        local: Option<(RegionId, MemSpan)>,
        remote: RemoteOffset,
        export: Export,
        len: u32,
    ) {
        let target = export.node;
        let outbound = if kind == Kind::Write { u64::from(len) } else { 0 };
        let link = *self.link(initiator, target);
        let (departs, gone) = self.transmit(initiator, target, outbound);
        let operation = self.operations.insert(Operation {
            initiator,
            target,
            target_incarnation: export.incarnation,
            token,
            kind,
            region: local.map(|(id, _)| id),
            remote_region: remote.region,
            local: local.map_or(MemSpan::new(core::ptr::null_mut(), 0), |(_, span)| span),
            packet: None,
            departs,
            expires: departs + nanos(self.config.timeout),
            expiry_set: false,
        });
        let me = &mut self.nodes[initiator as usize];
        if let Some(region) = local.and_then(|(id, _)| me.regions.get_mut(&id.index)) {
            region.local_pins += 1;
            me.in_flight += 1;
        } else {
            me.fences += 1;
        }
        if let Some(remote_region) = me.remote_regions.get_mut(&remote.region.index) {
            remote_region.pins += 1;
        }
        if !link.up {
            let outcome = if kind == Kind::Fence { Outcome::Unknown } else { Outcome::NotApplied };
            self.schedule(nanos(self.config.detect), What::End(operation, Some(ErrorKind::Rail), outcome));
            return;
        }
        let mut arrives = gone + self.latency(&link.config);
        if self.rng.chance_ppm(link.config.loss_ppm) {
            self.counters.lost += 1;
            if kind != Kind::Write || !self.rng.chance_ppm(link.config.late_ppm) {
                self.give_up_on(operation);
                return;
            }
            arrives =
                departs + nanos(self.config.timeout) + self.rng.range(0..nanos(link.config.late_max) + 1);
        }
        let identity = self.nodes[initiator as usize].identity;
        let packet = self.packets.insert(Packet {
            initiator,
            identity,
            target,
            kind,
            export,
            offset: remote.offset,
            len,
            operation: Some(operation),
            orphan_count: self.orphan_count,
            payload: Vec::new(),
            answering: false,
            answer_lost: false,
        });
        if let Some(op) = self.operations.find_mut(operation) {
            op.packet = Some(packet);
            if arrives > op.expires {
                self.give_up_on(operation);
            }
        }
        self.schedule(arrives - self.now, What::Arrive(packet));
    }

    pub(super) fn happen(&mut self, what: What) {
        match what {
            What::Arrive(packet) => self.arrive(packet),
            What::Answer(packet) => self.answer(packet),
            What::End(operation, error, outcome) => self.end(operation, error, outcome),
            What::Expire(operation) => {
                let Some(op) = self.operations.find(operation) else { return };
                let target = &self.nodes[op.target as usize];
                let error = match () {
                    () if !target.alive => ErrorKind::PeerDead,
                    () if target.incarnation != op.target_incarnation => ErrorKind::PeerRestarted,
                    () if self.links.get(&(op.initiator, op.target)).is_some_and(|link| !link.up) => {
                        ErrorKind::Rail
                    }
                    () => ErrorKind::TimedOut,
                };
                self.end(operation, Some(error), Outcome::Unknown);
            }
            What::Link(a, b, up) => self.set_link_up(NodeId(a), NodeId(b), up),
        }
    }

    /// A request reaches its target.
    pub(super) fn arrive(&mut self, key: Key) {
        let Some(packet) = self.packets.find(key) else { return };
        let (initiator, target, operation) = (packet.initiator, packet.target, packet.operation);
        let (kind, orphan_count, identity) = (packet.kind, packet.orphan_count, packet.identity);
        if !self.link(initiator, target).up {
            self.counters.lost += 1;
            self.drop_packet(key);
            operation.into_iter().for_each(|op| self.give_up_on(op));
            return;
        }
        let node = &mut self.nodes[target as usize];
        if !node.alive {
            self.counters.lost += 1;
            self.drop_packet(key);
            if let Some(op) = operation {
                self.schedule(
                    nanos(self.config.detect),
                    What::End(op, Some(ErrorKind::PeerDead), Outcome::Unknown),
                );
            }
            return;
        }
        if node.stalled {
            node.inbox.push(key);
            operation.into_iter().for_each(|op| self.give_up_on(op));
            return;
        }
        if node.expelled.contains(&identity) {
            self.counters.refused += 1;
            self.drop_packet(key);
            self.reply(operation, Err(ErrorKind::Expelled));
            return;
        }
        match kind {
            Kind::Write => {
                let landed = self.land(key);
                self.drop_packet(key);
                self.reply(operation, landed);
            }
            Kind::Fence => {
                self.flush_orphans(initiator, target, orphan_count);
                self.drop_packet(key);
                self.reply(operation, Ok(()));
            }
            Kind::Read => self.begin_answer(key),
        }
    }

    /// The target's own checks, which do not trust the packet (L6).
    fn check(&self, packet: &Packet, right: Access) -> Result<MemSpan, ErrorKind> {
        let node = &self.nodes[packet.target as usize];
        if node.incarnation != packet.export.incarnation {
            return Err(ErrorKind::PeerRestarted);
        }
        let region = node.regions.get(&packet.export.region.index).ok_or(ErrorKind::Stale)?;
        if region.generation != packet.export.region.generation {
            return Err(ErrorKind::Stale);
        }
        if region.key != packet.export.key || !region.access.contains(right) {
            return Err(ErrorKind::AccessDenied);
        }
        region.span.part(packet.offset, u64::from(packet.len)).map_err(|error| error.kind)
    }

    fn land(&mut self, key: Key) -> Result<(), ErrorKind> {
        let Some(packet) = self.packets.find(key) else { return Ok(()) };
        let checked = self.check(packet, Access::REMOTE_WRITE);
        let Ok(to) = checked else {
            self.counters.refused += 1;
            return checked.map(|_| ());
        };
        let from = match packet.operation.and_then(|key| self.operations.find(key)) {
            Some(op) => op.local.as_ptr().cast_const(),
            None => {
                self.counters.landed_late += 1;
                packet.payload.as_ptr()
            }
        };
        // SAFETY: `to` passed the target's check, so it lies in a registered span; `from` is the source of an
        // operation in flight, hence registered, or the packet's own copy; both are `packet.len` long. They
        // may overlap.
        unsafe { core::ptr::copy(from, to.as_ptr(), to.len()) };
        self.counters.bytes += to.len() as u64;
        Ok(())
    }

    fn begin_answer(&mut self, key: Key) {
        let Some(packet) = self.packets.find(key) else { return };
        let (initiator, target, len) = (packet.initiator, packet.target, packet.len);
        let (export, operation) = (packet.export, packet.operation);
        let checked = self.check(packet, Access::REMOTE_READ);
        let local = operation.and_then(|key| self.operations.find(key)).map(|op| op.local);
        let (Ok(from), Some(to)) = (checked, local) else {
            self.counters.refused += u64::from(checked.is_err());
            self.drop_packet(key);
            self.reply(operation, checked.map(|_| ()));
            return;
        };
        if self.rng.chance_ppm(250_000) {
            let some = self.rng.index(len as usize);
            // SAFETY: as in `answer`; a fabric may fill the destination of a READ in pieces until it
            // completes.
            unsafe { core::ptr::copy(from.as_ptr(), to.as_ptr(), some) };
        }
        if let Some(region) = self.nodes[target as usize].regions.get_mut(&export.region.index) {
            region.remote_pins += 1;
        }
        let link = *self.link(target, initiator);
        let (_, gone) = self.transmit(target, initiator, u64::from(len));
        let arrives = gone + self.latency(&link.config);
        let lost = !link.up || self.rng.chance_ppm(link.config.loss_ppm);
        self.counters.lost += u64::from(lost);
        if let Some(packet) = self.packets.find_mut(key) {
            packet.answering = true;
            packet.answer_lost = lost;
        }
        let expires = operation.and_then(|key| self.operations.find(key)).map_or(0, |op| op.expires);
        if lost || arrives > expires {
            operation.into_iter().for_each(|op| self.give_up_on(op));
        }
        self.schedule(arrives - self.now, What::Answer(key));
    }

    /// The bytes of a READ reach their initiator.
    fn answer(&mut self, key: Key) {
        let Some(packet) = self.packets.find(key) else { return };
        let (lost, operation, len) = (packet.answer_lost, packet.operation, packet.len as usize);
        let from = self.check(packet, Access::REMOTE_READ);
        self.drop_packet(key);
        let Some((operation, to)) =
            operation.and_then(|key| self.operations.find(key).map(|op| (key, op.local)))
        else {
            return;
        };
        match from {
            Ok(from) if !lost => {
                // SAFETY: `from` passed the target's check just now; `to` belongs to an operation in flight,
                // so its region is registered; both are `len` long. They may overlap.
                unsafe { core::ptr::copy(from.as_ptr(), to.as_ptr(), len) };
                self.counters.bytes += len as u64;
                self.end(operation, None, Outcome::Applied);
            }
            // The response is lost, or the target died meanwhile.
            _ => self.give_up_on(operation),
        }
    }

    fn reply(&mut self, operation: Option<Key>, result: Result<(), ErrorKind>) {
        let Some((key, op)) = operation.and_then(|key| self.operations.find(key).map(|op| (key, op))) else {
            return;
        };
        let (initiator, target, expires) = (op.initiator, op.target, op.expires);
        let link = *self.link(target, initiator);
        if !link.up || self.rng.chance_ppm(link.config.loss_ppm) {
            self.counters.lost += 1;
            self.give_up_on(key);
            return;
        }
        let after = self.latency(&link.config);
        if self.now + after > expires {
            self.give_up_on(key);
        }
        let outcome = if result.is_ok() { Outcome::Applied } else { Outcome::NotApplied };
        self.schedule(after, What::End(key, result.err(), outcome));
    }

    /// No response will come for this operation in time: it ends when it expires.
    fn give_up_on(&mut self, key: Key) {
        let now = self.now;
        if let Some(op) = self.operations.find_mut(key).filter(|op| !op.expiry_set) {
            op.expiry_set = true;
            let after = op.expires.saturating_sub(now);
            self.schedule(after, What::Expire(key));
        }
    }

    pub(super) fn end(&mut self, key: Key, error: Option<ErrorKind>, outcome: Outcome) {
        let Some(op) = self.operations.remove(key) else { return };
        let departed = op.departs <= self.now;
        if let Some(packet_key) = op.packet {
            if op.kind == Kind::Write && departed {
                self.orphan(packet_key, op.local);
            } else if self.packets.find(packet_key).is_some_and(|packet| packet.answering) {
                self.packets.find_mut(packet_key).into_iter().for_each(|packet| packet.operation = None);
            } else {
                self.drop_packet(packet_key);
            }
        }
        let error = error.map(Error::new);
        let completion = match (error, outcome, op.kind) {
            (None, _, _) => Completion::applied(op.token),
            (Some(error), Outcome::Unknown, Kind::Write) if departed => Completion::unknown(op.token, error),
            (Some(error), _, Kind::Fence) => Completion::unknown(op.token, error),
            (Some(error), _, _) => Completion::not_applied(op.token, error),
        };
        match completion.outcome {
            Outcome::Applied => self.counters.applied += 1,
            Outcome::NotApplied => self.counters.not_applied += 1,
            Outcome::Unknown => self.counters.unknown += 1,
        }
        let done = Done { completion, region: op.region, remote_region: op.remote_region };
        self.nodes[op.initiator as usize].done.push_back(done);
    }

    /// The initiator no longer waits for this WRITE; its bytes stay on the wire.
    fn orphan(&mut self, key: Key, source: MemSpan) {
        let mut payload = self.buffers.pop().unwrap_or_default();
        let Some(packet) = self.packets.find_mut(key) else {
            self.buffers.push(payload);
            return;
        };
        payload.resize(source.len(), 0);
        // SAFETY: the operation ends in this call and not before, so its source is still registered;
        // `payload` is ours.
        unsafe { crate::copy_bytes(source.as_ptr(), payload.as_mut_ptr(), source.len()) };
        self.orphan_count += 1;
        packet.operation = None;
        packet.orphan_count = self.orphan_count;
        packet.payload = payload;
    }

    /// The target settles every orphan up to number `count`: half of them land now, half never.
    fn flush_orphans(&mut self, initiator: u32, target: u32, count: u64) {
        let mut from = 0;
        let older = |packet: &Packet| {
            packet.kind == Kind::Write
                && packet.operation.is_none()
                && (packet.initiator, packet.target) == (initiator, target)
                && packet.orphan_count <= count
        };
        while let Some((key, next)) = self.packets.next_where(from, older) {
            from = next;
            let identity = self.packets.find(key).map(|packet| packet.identity);
            if identity.is_some_and(|identity| self.nodes[target as usize].expelled.contains(&identity)) {
                // The initiator was expelled since, and the fence may be of another engine on its node.
                self.counters.refused += 1;
            } else if self.rng.chance_ppm(500_000) {
                let _refused_or_not = self.land(key);
            } else {
                self.counters.fenced_off += 1;
            }
            self.drop_packet(key);
        }
    }

    fn drop_packet(&mut self, key: Key) {
        let Some(packet) = self.packets.remove(key) else { return };
        if packet.payload.capacity() > 0 {
            self.buffers.push(packet.payload);
        }
        let node = &mut self.nodes[packet.target as usize];
        if packet.answering && node.incarnation == packet.export.incarnation {
            // The pin kept the region registered, or the target was killed and lost all regions.
            if let Some(region) = node.regions.get_mut(&packet.export.region.index) {
                region.remote_pins -= 1;
            }
        }
    }

    pub(super) fn link(&mut self, from: u32, to: u32) -> &mut Link {
        let config = self.config.link;
        self.links.entry((from, to)).or_insert(Link { config, up: true, busy_until: 0 })
    }

    /// When `bytes` begin and end to leave.
    fn transmit(&mut self, from: u32, to: u32, bytes: u64) -> (u64, u64) {
        let slowness = self.nodes[from as usize].slowness.max(self.nodes[to as usize].slowness);
        let now = self.now;
        let link = self.link(from, to);
        let wire = u128::from(bytes + 64) * 1_000_000_000 * u128::from(slowness);
        let begin = link.busy_until.max(now);
        link.busy_until = begin + (wire / u128::from(link.config.bytes_per_s.max(1))) as u64;
        (begin, link.busy_until)
    }

    fn latency(&mut self, config: &LinkConfig) -> u64 {
        let mut latency = self.rng.range(nanos(config.latency_min)..nanos(config.latency_max) + 1);
        if self.rng.chance_ppm(config.reorder_ppm) {
            latency += self.rng.range(0..nanos(config.reorder_max) + 1);
        }
        latency
    }
}
