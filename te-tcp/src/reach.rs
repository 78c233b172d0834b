//! Getting to a peer and losing it: lanes are opened and end, fences are sent and answered, a silent peer is given up.

use std::io;

use te_core::{Completion, Error, ErrorKind, Instant, Op};
use te_fabric::Interest;
use te_fabric::net::{error_of, peer_dead, reset_on_close};
use te_fabric::peer::{Attempt, Fence, Refusal};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

use crate::config::LANES_MAX;
use crate::connections::Connection;
use crate::endpoint::{LaneEnd, Sent};
use crate::frame::{ENTRIES_MAX, Header, Hello, Kind, LaneEntry, MAGIC, VERSION};
use crate::initiator::{OutLane, Phase, Stage};
use crate::lane::{Lane, Reading};
use crate::sys::Socket;
use crate::transport::TcpTransport;

/// Within one host a short queue stays in the processor's caches, and there is no delay to fill.
const WINDOW_BYTES_SAME_HOST: u32 = 2 << 20;
/// Enough for 100 Gbit/s over half a millisecond.
const WINDOW_BYTES_ELSEWHERE: u32 = 8 << 20;

impl TcpTransport {
    /// Opens one more lane, if there may be one and nothing keeps us away.
    pub(crate) fn open_lane(&mut self, peer: u32) {
        let now = self.timers.now();
        let Some(endpoint) = self.peers.get_mut(peer) else { return };
        let (at, address) = match endpoint.contact.attempt(now) {
            Attempt::To(at, address) => (at, address),
            Attempt::Later => return,
            Attempt::Never(error) => {
                self.fail_waiting(peer, error);
                return;
            }
        };
        let opening = endpoint
            .lanes
            .iter()
            .flatten()
            .any(|index| self.connections.out(*index).is_none_or(|lane| lane.role.phase != Phase::Live));
        let Some(number) = endpoint.vacant_lane(self.config.lanes) else { return };
        if opening {
            return;
        }
        let (all, own) = (self.connections.len(), self.connections.len() - self.admission.inbound);
        if all >= self.config.connections_max as usize && own >= self.config.connections_kept() {
            self.lane_refused(peer, at, ErrorKind::Full.into());
            return;
        }
        if let Err(error) = self.start_lane(peer, number, at, address) {
            self.lane_refused(peer, at, error_of(&error));
        }
    }

    fn start_lane(
        &mut self,
        peer: u32,
        number: usize,
        at: u8,
        address: std::net::SocketAddr,
    ) -> io::Result<()> {
        let socket = Socket::new(address)?;
        self.tune(&socket)?;
        socket.connect(address)?;
        self.lane_generation = self.lane_generation.wrapping_add(1);
        let interest = Interest::BOTH;
        let (index, name) = self.connections.reserve();
        if let Err(error) = self.poller.add(&socket, name, interest) {
            self.connections.release(index);
            return Err(error);
        }
        self.waiting_to_write += 1;
        let role = OutLane::new(peer, number as u8, at, self.lane_generation);
        let mut lane = Lane::new(socket, interest, role);
        lane.blocked = true;
        lane.deadline = Some(
            self.timers.now() + core::time::Duration::from_millis(u64::from(self.config.connect_ms_max)),
        );
        if let Some(endpoint) = self.peers.get_mut(peer) {
            endpoint.lanes[number] = Some(index);
        }
        self.connections.put(index, Connection::Out(Box::new(lane)));
        self.stats.lanes_opened += 1;
        self.timers.changed();
        Ok(())
    }

    pub(crate) fn greet(&mut self, lane: &mut Lane<OutLane>) {
        let same_host = self.suit(&lane.socket);
        let fitting = if same_host { WINDOW_BYTES_SAME_HOST } else { WINDOW_BYTES_ELSEWHERE };
        lane.role.window = u64::from(self.config.window_bytes_max.unwrap_or(fitting));
        let target = self.peers.get(lane.role.peer).map_or(0, |endpoint| endpoint.contact.incarnation());
        let hello = Hello {
            magic: MAGIC,
            version: U16::new(VERSION),
            lane: U16::new(u16::from(lane.role.number)),
            lane_generation: U32::new(lane.role.generation),
            session: U64::new(self.session),
            initiator: U64::new(self.end.incarnation),
            target: U64::new(target),
            identity: U64::new(self.end.identity),
        };
        lane.outbox.push_head(&[hello.as_bytes()]);
        lane.role.phase = Phase::Greeting;
    }

    /// A lane of ours has ended: its pieces are settled by how far they got.
    pub(crate) fn end_out(&mut self, index: u32, lane: Box<Lane<OutLane>>, end: LaneEnd) {
        let Lane { socket, role, interest, .. } = *lane;
        reset_on_close(&socket);
        self.forget(index, interest);
        // The socket goes before its pieces are settled: from here on the kernel reads and writes nothing of ours (L2).
        drop(socket);
        self.stats.lanes_lost += 1;
        let peer = role.peer;
        log::debug!("lane {} to peer {peer} ended: {:?}", role.number, end);
        if let Some(endpoint) = self.peers.get_mut(peer) {
            endpoint.lane_lost(usize::from(role.number));
        }
        let error = peer_dead(end.error());
        if end == LaneEnd::Retired {
            self.send_again(peer, &role);
            self.list_peer(peer);
            return;
        }
        for piece in &role.pieces {
            let touched = piece.op == Op::Write && matches!(piece.stage, Stage::Started | Stage::Sent);
            self.settle(piece.slot, Some(error), touched);
        }
        if let LaneEnd::Refused(error) = end {
            self.lane_refused(peer, role.address, error);
        }
        self.list_peer(peer);
    }

    /// The target has not accepted the pieces of this lane, and said so: they wait for another lane, as if for the first.
    fn send_again(&mut self, peer: u32, role: &OutLane) {
        for piece in &role.pieces {
            if self.operations.get(piece.slot).is_some_and(|operation| operation.ext.live)
                && let Some(endpoint) = self.peers.get_mut(peer)
            {
                endpoint.again.push_back(*piece);
            } else {
                // Cancelled; its memory is nobody's concern any more.
                self.settle(piece.slot, None, false);
            }
        }
    }

    /// An attempt to open a lane to address `at` has failed.
    fn lane_refused(&mut self, peer: u32, at: u8, error: Error) {
        let Some(endpoint) = self.peers.get_mut(peer) else { return };
        self.timers.changed();
        let error = match endpoint.contact.refused(at, error, self.timers.now(), self.config.reconnect_ms_max)
        {
            Refusal::Final(error) => {
                self.fail_peer(peer, error);
                return;
            }
            Refusal::NextAddress => {
                self.timers.wake();
                return;
            }
            Refusal::Paused(error) => error,
        };
        if error.kind == ErrorKind::Full {
            // Somebody's lane falls idle soon. What waits may wait as long as for a connection that is slow to come.
            let since = *endpoint.crowded.get_or_insert(self.timers.now());
            if self.timers.now().nanos_since(since) < u64::from(self.config.connect_ms_max) * 1_000_000 {
                return;
            }
            endpoint.crowded = None;
        }
        if endpoint.lane_count() == 0 {
            self.fail_waiting(peer, error);
        }
    }

    /// The peer is dead or another one: every lane goes, everything that waits ends.
    pub(crate) fn fail_peer(&mut self, peer: u32, error: Error) {
        let Some(endpoint) = self.peers.get(peer) else { return };
        for index in endpoint.lanes.into_iter().flatten() {
            if let Some(lane) = self.connections.take_out(index) {
                self.end_out(index, lane, LaneEnd::Lost(error));
            }
        }
        self.fail_waiting(peer, error);
    }

    /// Ends what waits for a lane that will not come.
    fn fail_waiting(&mut self, peer: u32, error: Error) {
        while let Some(piece) = self.peers.get_mut(peer).and_then(|endpoint| endpoint.again.pop_front()) {
            self.settle(piece.slot, Some(error), false);
        }
        while let Some(endpoint) = self.peers.get_mut(peer)
            && let Some(slot) = endpoint.pending.first()
        {
            self.operations.unlink(&mut endpoint.pending, slot);
            if let Some(operation) = self.operations.get_mut(slot) {
                operation.error.get_or_insert(error);
            }
            self.finish(slot);
        }
        let harmless = self.peers.get(peer).is_none_or(|endpoint| endpoint.contact.is_harmless(&self.known));
        while let Some(fence) = self.peers.get_mut(peer).and_then(|endpoint| endpoint.fences.pop()) {
            let completion = if harmless {
                Completion::applied(fence.token)
            } else {
                Completion::unknown(fence.token, error)
            };
            self.fence_done(fence.segment, completion);
        }
    }

    /// Sends a fence that is not yet on its way, if there is one and a live lane to carry it. True: there was.
    pub(crate) fn send_fence(&mut self, peer: u32) -> bool {
        let Some(endpoint) = self.peers.get_mut(peer) else { return false };
        if endpoint.fences.iter().all(|fence| fence.sent.is_some()) {
            return false;
        }
        let mut lanes =
            [LaneEntry { lane: U16::ZERO, reserved: U16::ZERO, generation: U32::ZERO }; ENTRIES_MAX];
        let (mut count, mut live) = (0, 0_u32);
        for index in endpoint.lanes.iter().flatten() {
            let Some(lane) = self.connections.out(*index) else { continue };
            lanes[count].lane = U16::new(u16::from(lane.role.number));
            lanes[count].generation = U32::new(lane.role.generation);
            count += 1;
            if lane.role.phase == Phase::Live {
                if !lane.outbox.has_room(0) {
                    return false;
                }
                live |= 1 << lane.role.number;
            }
        }
        if live == 0 {
            return false;
        }
        let Some(fence) = endpoint.fences.iter_mut().find(|fence| fence.sent.is_none()) else {
            return false;
        };
        self.next_fence += 1;
        fence.sent = Some(Sent { id: self.next_fence, lanes: live });
        let header = Header::new(Kind::Fence, 0, count as u16, self.next_fence);
        let indexes = endpoint.lanes;
        for (_, index) in indexes.iter().enumerate().filter(|(number, _)| live & 1 << number != 0) {
            let Some(index) = *index else { continue };
            if let Some(mut lane) = self.connections.take_out(index) {
                lane.outbox.push_head(&[header.as_bytes(), lanes[..count].as_bytes()]);
                self.connections.put(index, Connection::Out(lane));
                self.flush_out(index);
            }
        }
        true
    }

    pub(crate) fn fence_answered(&mut self, peer: u32, number: u8, id: u64) {
        let Some(endpoint) = self.peers.get_mut(peer) else { return };
        let is = |fence: &Fence<Sent>| fence.sent.is_some_and(|sent| sent.id == id);
        let Some(at) = endpoint.fences.iter().position(is) else { return };
        let Some(sent) = &mut endpoint.fences[at].sent else { return };
        sent.lanes &= !(1 << number);
        if sent.lanes == 0 {
            let fence = endpoint.fences.swap_remove(at);
            self.fence_done(fence.segment, Completion::applied(fence.token));
        }
    }

    fn fence_done(&mut self, segment: u32, completion: Completion) {
        self.operations.complete(completion);
        self.fences.end();
        self.segments.unpin(segment);
    }

    /// Looks after the peers' pulses; gives the next time to look.
    pub(crate) fn check_pulses(&mut self, now: Instant) -> Option<Instant> {
        let limit = u64::from(self.config.peer_silence_ms_max) * 1_000_000;
        let mut next: Option<Instant> = None;
        for peer in 0..self.peers.bound() {
            let Some(endpoint) = self.peers.get_mut(peer) else { continue };
            if !endpoint.is_awaited() {
                endpoint.pulse = None;
                continue;
            }
            let pulse = *endpoint.pulse.get_or_insert(now);
            let lanes = endpoint.lanes;
            if now.nanos_since(pulse) >= limit / 4 {
                self.feel_pulse(peer, lanes);
            }
            let Some(endpoint) = self.peers.get_mut(peer) else { continue };
            let silent = now.nanos_since(endpoint.pulse.unwrap_or(now));
            if silent >= limit && endpoint.lane_count() > 0 {
                log::warn!("peer {peer} is silent for {} ms: given up", silent / 1_000_000);
                endpoint.contact.back_off(now, self.config.reconnect_ms_max);
                self.stats.peers_lost += 1;
                self.fail_peer(peer, Error::with_code(ErrorKind::PeerDead, libc::ETIMEDOUT));
                continue;
            }
            let due = Instant::from_nanos(
                now.as_nanos() + (limit / 4).min(limit.saturating_sub(silent)).max(1_000_000),
            );
            next = Some(next.map_or(due, |known| known.min(due)));
        }
        next
    }

    /// Asks a silent peer for a sign of life, and looks whether its kernel still takes bytes.
    fn feel_pulse(&mut self, peer: u32, lanes: [Option<u32>; LANES_MAX as usize]) {
        for index in lanes.into_iter().flatten() {
            let Some(mut lane) = self.connections.take_out(index) else { continue };
            let unacknowledged = lane.socket.unacknowledged();
            if unacknowledged < lane.role.unacknowledged
                && let Some(endpoint) = self.peers.get_mut(peer)
            {
                endpoint.pulse = Some(self.timers.now());
            }
            lane.role.unacknowledged = unacknowledged;
            let ask = lane.role.phase == Phase::Live && !lane.role.pinged && lane.outbox.has_room(0);
            if ask {
                lane.role.pinged = true;
                lane.outbox.push_head(&[Header::new(Kind::Ping, 0, 0, 0).as_bytes()]);
            }
            self.drive_out(index, lane, Reading::No, false);
        }
    }
}
