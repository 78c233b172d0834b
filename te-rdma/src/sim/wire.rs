//! The packets on the wire, and how both ends handle them: the RC protocol of IBA volume 1, chapter 9, as far
//! as one-sided READs and WRITEs can observe it.
//!
//! Senders run one at a time: the packets that have arrived are executed at the target, the responses that
//! have arrived are processed, the timer may expire, and then the packets that may be sent are sent.

use te_core::Op;

use super::config::{LinkConfig, Pace, Refusal};
use super::packet::{Answer, Body, Payload, Request, Response};
use super::queue::{PSN_MASK, psn_diff};
use super::world::{NEVER, State, World};
use crate::sys::dma::Target;
use crate::sys::verbs::{AsyncEvent, MrAccess, QpConfig, Sge, WcStatus, WorkRequest};

/// How the target responds to one packet.
enum Reply {
    /// Not at all.
    None,
    /// It was executed: acknowledge up to this number, together with others.
    Ack(u32),
    /// The response was sent.
    Sent,
}

impl World {
    /// Runs one sender until nothing of it can happen at this time.
    pub(super) fn run_qp(&mut self, qp: usize) {
        self.execute_directly(qp);
        loop {
            self.deliver_requests(qp);
            self.deliver_responses(qp);
            self.expire(qp);
            self.transmit(qp);
            let (sender, now) = (&self.senders[qp], self.now);
            let due = sender.requests.front().is_some_and(|packet| packet.due <= now)
                || sender.responses.front().is_some_and(|packet| packet.due <= now);
            if !due {
                break;
            }
        }
        self.schedule_next(qp);
    }

    pub(super) fn schedule_next(&mut self, qp: usize) {
        let sender = &self.senders[qp];
        let mut next = sender.requests.front().map_or(NEVER, |packet| packet.due);
        if self.ends[qp].state == State::Ready {
            next = next.min(sender.responses.front().map_or(NEVER, |packet| packet.due));
            next = next.min(sender.ack_deadline);
            let held = sender.hold_until.max(sender.wire_free_at);
            if held > self.now && sender.queue.sent < sender.queue.tail {
                next = next.min(held);
            }
        }
        if next != NEVER {
            self.schedule(qp, next.max(self.now));
        }
    }

    /// The length of a full packet.
    fn packet_bytes(&self, qp: usize) -> u32 {
        match (self.config.pace, self.ends[qp].path) {
            (Pace::Timed, Some(path)) => path.mtu_bytes,
            _ => u32::MAX,
        }
    }

    /// Puts one request into the send queue. The caller has checked state, fullness and the number of pieces.
    pub(super) fn enqueue(&mut self, qp: usize, request: &WorkRequest, len: u32, sges: &[Sge]) {
        let packets = len.div_ceil(self.packet_bytes(qp)).max(1);
        let sender = &mut self.senders[qp];
        sender.queue.push(request, len, sges, sender.psn, packets);
        sender.psn = (sender.psn + packets) & PSN_MASK;
    }

    /// The link from `from`'s device to `to`'s; `None`: packets that are sent now are lost.
    pub(super) fn link(&self, from: usize, to: usize) -> Option<LinkConfig> {
        let (from, to) = (self.ends[from].device, self.ends[to].device);
        let link = self.links[from][to];
        (self.is_up(from) && self.is_up(to) && !link.down).then_some(link)
    }

    /// Whether a packet on the wire arrives. The device that sent it may be gone by now.
    fn arrives(&self, from: usize, to: usize) -> bool {
        let (from, to) = (self.ends[from].device, self.ends[to].device);
        self.is_up(to) && !self.links[from][to].down
    }

    /// Whether a queue pair executes packets.
    fn is_open(&mut self, qp: usize) -> bool {
        let lingering = &mut self.devices[self.ends[qp].device].faults.lingering;
        match self.ends[qp].state {
            State::Ready => true,
            State::Error if *lingering > 0 => {
                *lingering -= 1;
                true
            }
            _ => false,
        }
    }

    fn is_up(&self, device: usize) -> bool {
        self.devices[device].alive && self.devices[device].active
    }

    /// The time at which a packet that is sent now arrives; `None`: it is lost.
    #[inline]
    fn flight(&mut self, link: &LinkConfig, after: u64) -> Option<u64> {
        if link.loss_ppm == 0 && link.hold_ppm == 0 && link.jitter_ns == 0 {
            return Some(after.max(self.now + link.latency_ns));
        }
        if self.rng.chance_ppm(link.loss_ppm) {
            self.counters.lost += 1;
            return None;
        }
        let jitter = if link.jitter_ns == 0 { 0 } else { self.rng.below(link.jitter_ns + 1) };
        let hold = if self.rng.chance_ppm(link.hold_ppm) { link.hold_ns } else { 0 };
        Some(after.max(self.now + link.latency_ns + jitter + hold))
    }

    // The sender.

    /// Sends packets in order, until READ credits, bandwidth or a target that was not ready stop it.
    pub(super) fn transmit(&mut self, qp: usize) {
        let end = &self.ends[qp];
        let Some(path) = end.path else { return };
        if end.state != State::Ready || self.senders[qp].queue.sent == self.senders[qp].queue.tail {
            return;
        }
        let link = self.peer_of(qp).and_then(|peer| self.link(qp, peer));
        let packet_bytes = self.packet_bytes(qp);
        loop {
            let sender = &self.senders[qp];
            let (position, index) = (sender.queue.sent, sender.queue.sent_packets);
            if position == sender.queue.tail || sender.hold_until.max(sender.wire_free_at) > self.now {
                return;
            }
            let wqe = *sender.queue.at(position);
            if wqe.op == Op::Read && sender.reads_open >= u32::from(path.reads_to_peer).max(1) {
                return;
            }
            let reads_forbidden = wqe.op == Op::Read && path.reads_to_peer == 0;
            if reads_forbidden || !self.local_pieces_are_good(qp, position) {
                // Earlier requests end first.
                if position == self.senders[qp].queue.done {
                    self.fail_oldest(qp, WcStatus::Local);
                }
                return;
            }
            let offset = index.wrapping_mul(packet_bytes);
            let rest = wqe.len - offset.min(wqe.len);
            let len = if wqe.op == Op::Read { rest } else { rest.min(packet_bytes) };
            let packets = if wqe.op == Op::Read { wqe.packets - index } else { 1 };
            let psn = (wqe.first_psn + index) & PSN_MASK;

            let sender = &mut self.senders[qp];
            if wqe.op == Op::Read {
                sender.reads_open += 1;
            }
            sender.queue.sent_packets += packets;
            if sender.queue.sent_packets == wqe.packets {
                (sender.queue.sent, sender.queue.sent_packets) = (position + 1, 0);
            }
            let psn_after = (psn + packets) & PSN_MASK;
            if psn_diff(psn_after, sender.psn_sent) > 0 {
                sender.psn_sent = psn_after;
            }
            if sender.ack_deadline == NEVER {
                sender.ack_deadline = self.now + ack_timeout_ns(path.timeout_exponent);
            }
            self.counters.packets += 1;
            let Some(link) = link else {
                self.counters.lost += 1;
                continue;
            };
            if link.bytes_per_s != 0 {
                let wire_ns = u128::from(len) * 1_000_000_000 / u128::from(link.bytes_per_s);
                self.senders[qp].wire_free_at = self.now + wire_ns as u64;
            }
            let request = Request {
                due: 0,
                psn,
                op: wqe.op,
                first: index == 0 || wqe.op == Op::Read,
                last: offset + len == wqe.len,
                key: wqe.remote_key,
                addr: wqe.remote_addr.wrapping_add(u64::from(offset)),
                len,
                message_bytes: rest,
                packets,
                payload: Payload::None,
            };
            self.send_request(qp, &link, (position, offset), &request);
        }
    }

    /// Puts `request` on the link, twice if the link duplicates it. `place`: the work request's position in
    /// the send queue, and the offset of the payload in it.
    fn send_request(&mut self, qp: usize, link: &LinkConfig, place: (u64, u32), request: &Request) {
        let (position, offset) = place;
        let copies = 1 + u32::from(self.rng.chance_ppm(link.duplicate_ppm));
        for _ in 0..copies {
            let after = self.senders[qp].request_due_last;
            let Some(due) = self.flight(link, after) else { continue };
            let payload = match request.op {
                Op::Read => Payload::None,
                Op::Write if self.config.pace == Pace::Immediate => Payload::InPlace(position),
                Op::Write => Payload::Copied(self.gather(qp, position, offset, request.len)),
            };
            let sender = &mut self.senders[qp];
            sender.request_due_last = due;
            sender.requests.push_back(Request { due, payload, ..*request });
        }
    }

    fn local_pieces_are_good(&self, qp: usize, position: u64) -> bool {
        let queue = &self.senders[qp].queue;
        let wqe = queue.at(position);
        let device = &self.devices[self.ends[qp].device];
        let right = if wqe.op == Op::Read { MrAccess::LOCAL_WRITE } else { MrAccess::empty() };
        wqe.len <= device.config.message_bytes_max
            && (wqe.inline
                || queue.sges_at(position).iter().all(|sge| device.mrs.local(sge, right).is_some()))
    }

    /// Copies part of a request's bytes from its sender's memory.
    fn gather(&mut self, qp: usize, position: u64, offset: u32, len: u32) -> Vec<u8> {
        let mut bytes = self.buffers.pop().unwrap_or_default();
        bytes.clear();
        bytes.resize(len as usize, 0);
        let queue = &self.senders[qp].queue;
        if queue.at(position).inline {
            let offset = offset as usize;
            bytes.copy_from_slice(&queue.inline_at(position)[offset..offset + len as usize]);
            return bytes;
        }
        let mrs = &self.devices[self.ends[qp].device].mrs;
        let (mut skip, mut filled) = (offset as usize, 0);
        for sge in queue.sges_at(position) {
            let Some(piece) = mrs.local(sge, MrAccess::empty()) else { continue };
            let part = piece.part(skip, bytes.len() - filled);
            part.read(&mut bytes[filled..]);
            skip = skip.saturating_sub(piece.len());
            filled += part.len();
        }
        bytes
    }

    fn expire(&mut self, qp: usize) {
        let sender = &mut self.senders[qp];
        if sender.ack_deadline > self.now || self.ends[qp].state != State::Ready {
            return;
        }
        sender.ack_deadline = NEVER;
        self.retry(qp);
    }

    /// A packet was lost: sends again from the first one on that is not acknowledged, or fails the request.
    fn retry(&mut self, qp: usize) {
        let limit = self.ends[qp].path.map_or(0, |path| path.retries);
        let sender = &mut self.senders[qp];
        if !sender.queue.is_under_way() {
            return;
        }
        if sender.retries >= limit {
            self.fail_oldest(qp, WcStatus::RetriesExceeded);
            return;
        }
        sender.retries += 1;
        self.counters.retried += 1;
        self.go_back(qp);
    }

    fn go_back(&mut self, qp: usize) {
        let sender = &mut self.senders[qp];
        sender.queue.go_back();
        sender.reads_open = 0;
        sender.ack_deadline = NEVER;
    }

    fn deliver_responses(&mut self, qp: usize) {
        while self.senders[qp].responses.front().is_some_and(|packet| packet.due <= self.now) {
            let Some(response) = self.senders[qp].responses.pop_front() else { return };
            if let Body::Data { last: true, .. } = response.body
                && let Some(peer) = self.peer_of(qp)
            {
                self.ends[peer].reads_open = self.ends[peer].reads_open.saturating_sub(1);
            }
            if self.ends[qp].state == State::Ready && self.is_up(self.ends[qp].device) {
                self.handle_response(qp, response);
            }
        }
    }

    fn handle_response(&mut self, qp: usize, response: Response) {
        let psn = response.psn;
        // A response to a packet that was not sent: the peer counts from another number.
        let was_sent = psn_diff(self.senders[qp].psn_sent, psn) > 0;
        match response.body {
            Body::Ack if was_sent => self.acknowledge(qp, psn),
            Body::Data { bytes, .. } if was_sent => {
                self.acknowledge(qp, psn.wrapping_sub(1) & PSN_MASK);
                self.land(qp, psn, bytes);
            }
            Body::Gap if was_sent => {
                self.acknowledge(qp, psn.wrapping_sub(1) & PSN_MASK);
                if self.ends[qp].state == State::Ready {
                    self.retry(qp);
                }
            }
            Body::NotReady if was_sent => {
                self.acknowledge(qp, psn.wrapping_sub(1) & PSN_MASK);
                self.back_off(qp);
            }
            Body::Refused(status) if was_sent => {
                self.acknowledge(qp, psn.wrapping_sub(1) & PSN_MASK);
                if self.ends[qp].state == State::Ready {
                    self.fail_oldest(qp, status);
                }
            }
            _ => {}
        }
    }

    /// Everything up to and including `psn` was executed. A READ ends only when its data has arrived.
    fn acknowledge(&mut self, qp: usize, psn: u32) {
        let mut progress = false;
        loop {
            let queue = &mut self.senders[qp].queue;
            if queue.done == queue.tail {
                break;
            }
            let position = queue.done;
            let wqe = queue.at_mut(position);
            let ahead = psn_diff(psn, wqe.first_psn);
            if ahead < 0 || wqe.op == Op::Read {
                break;
            }
            let acknowledged = (ahead as u32 + 1).min(wqe.packets);
            progress |= acknowledged > wqe.done_packets;
            wqe.done_packets = wqe.done_packets.max(acknowledged);
            if wqe.done_packets < wqe.packets {
                queue.catch_up();
                break;
            }
            if !self.complete_oldest(qp) {
                return;
            }
        }
        if progress {
            self.progress(qp);
        }
    }

    fn progress(&mut self, qp: usize) {
        let timeout = self.ends[qp].path.map_or(NEVER, |path| ack_timeout_ns(path.timeout_exponent));
        let sender = &mut self.senders[qp];
        (sender.retries, sender.rnr_retries) = (0, 0);
        sender.ack_deadline =
            if sender.queue.is_under_way() { self.now.saturating_add(timeout) } else { NEVER };
    }

    /// Data of a READ has arrived.
    fn land(&mut self, qp: usize, psn: u32, bytes: Answer) {
        let packet_bytes = self.packet_bytes(qp);
        let queue = &self.senders[qp].queue;
        let position = queue.done;
        let expected = position < queue.tail && {
            let wqe = queue.at(position);
            wqe.op == Op::Read && psn == (wqe.first_psn + wqe.done_packets) & PSN_MASK
        };
        let wqe = *queue.at(position);
        let landed =
            expected && self.scatter(qp, position, wqe.done_packets.wrapping_mul(packet_bytes), &bytes);
        if let Answer::Copied(bytes) = bytes {
            self.buffers.push(bytes);
        }
        if !expected {
            return;
        }
        if !landed {
            self.fail_oldest(qp, WcStatus::Local);
            return;
        }
        let queue = &mut self.senders[qp].queue;
        queue.at_mut(position).done_packets += 1;
        queue.catch_up();
        if wqe.done_packets + 1 == wqe.packets {
            let sender = &mut self.senders[qp];
            sender.reads_open = sender.reads_open.saturating_sub(1);
            if !self.complete_oldest(qp) {
                return;
            }
        }
        self.progress(qp);
    }

    /// Copies the data of a READ into its pieces; false: a registration is gone.
    fn scatter(&self, qp: usize, position: u64, offset: u32, bytes: &Answer) -> bool {
        let mrs = &self.devices[self.ends[qp].device].mrs;
        let mut skip = offset as usize;
        let total = match bytes {
            Answer::InPlace { len, .. } => *len as usize,
            Answer::Copied(bytes) => bytes.len(),
        };
        let mut done = 0;
        if total == 0 {
            return true;
        }
        for sge in self.senders[qp].queue.sges_at(position) {
            let Some(piece) = mrs.local(sge, MrAccess::LOCAL_WRITE) else { return false };
            let part = piece.part(skip, total - done);
            skip = skip.saturating_sub(piece.len());
            match bytes {
                Answer::Copied(bytes) => part.write(&bytes[done..done + part.len()]),
                Answer::InPlace { device, key, addr, len } => {
                    let source =
                        self.devices[*device].mrs.remote(*key, *addr, u64::from(*len), MrAccess::REMOTE_READ);
                    let Some(source) = source else { return false };
                    part.copy_from(source.part(done, part.len()));
                }
            }
            done += part.len();
        }
        done == total
    }

    /// The target was not ready: waits and sends again, or fails the request.
    fn back_off(&mut self, qp: usize) {
        let Some(path) = self.ends[qp].path else { return };
        if self.ends[qp].state != State::Ready || !self.senders[qp].queue.is_under_way() {
            return;
        }
        // 7: no limit.
        if path.rnr_retries != 7 && self.senders[qp].rnr_retries >= path.rnr_retries {
            self.fail_oldest(qp, WcStatus::NotReady);
            return;
        }
        self.senders[qp].rnr_retries = self.senders[qp].rnr_retries.saturating_add(1);
        self.counters.retried += 1;
        self.go_back(qp);
        self.senders[qp].hold_until = self.now + self.config.rnr_wait_ns;
    }

    // The target.

    fn deliver_requests(&mut self, qp: usize) {
        let mut ack = None;
        while self.senders[qp].requests.front().is_some_and(|packet| packet.due <= self.now) {
            let Some(mut request) = self.senders[qp].requests.pop_front() else { break };
            let peer = self.peer_of(qp).filter(|&peer| self.arrives(qp, peer) && self.is_open(peer));
            match peer {
                None => self.counters.lost += 1,
                // A connected queue pair accepts packets only from its own peer.
                Some(peer) if self.peer_of(peer) != Some(qp) && !self.sent_from_peer_address(qp, peer) => {
                    self.counters.lost += 1;
                }
                Some(peer) => match self.receive(qp, peer, &request, &mut ack) {
                    Reply::Ack(psn) => ack = Some((peer, psn)),
                    Reply::None | Reply::Sent => {}
                },
            }
            if let Payload::Copied(bytes) = std::mem::replace(&mut request.payload, Payload::None) {
                self.buffers.push(bytes);
            }
        }
        self.send_ack(qp, &mut ack);
    }

    /// Whether packets of `qp` carry the address that `peer` expects, although it expects another queue pair
    /// there: packets do not name the queue pair that sent them.
    fn sent_from_peer_address(&self, qp: usize, peer: usize) -> bool {
        let (Some(expected), from) = (self.ends[peer].path, &self.ends[qp]) else { return false };
        let device = &self.devices[from.device];
        if device.config.infiniband {
            return self.lid(from.device) == expected.peer_lid;
        }
        let Some(path) = from.path else { return false };
        let gid = device.config.gids.get(path.gid_index as usize).copied().flatten();
        gid.is_some_and(|gid| gid.raw == expected.peer_gid)
    }

    fn receive(
        &mut self,
        qp: usize,
        peer: usize,
        request: &Request,
        ack: &mut Option<(usize, u32)>,
    ) -> Reply {
        let ahead = psn_diff(request.psn, self.ends[peer].expected_psn);
        if ahead > 0 {
            if !std::mem::replace(&mut self.ends[peer].gap_reported, true) {
                self.send_ack(qp, ack);
                let wanted = self.ends[peer].expected_psn;
                self.respond(qp, peer, wanted, Body::Gap);
            }
            return Reply::None;
        }
        if ahead < 0 {
            // A duplicate: WRITEs are acknowledged and not executed again, READs are answered again.
            self.counters.duplicates += 1;
            let last = self.ends[peer].expected_psn.wrapping_sub(1) & PSN_MASK;
            return match request.op {
                Op::Write => Reply::Ack(last),
                // Not a duplicate: the peer counts from another number.
                Op::Read if u64::from(ahead.unsigned_abs()) > self.ends[peer].received => Reply::None,
                Op::Read => {
                    self.send_ack(qp, ack);
                    self.answer_read(qp, peer, request)
                }
            };
        }
        let device = self.ends[peer].device;
        match self.devices[device].faults.refusal {
            Some((refusal, left)) if left > 0 => {
                self.devices[device].faults.refusal = Some((refusal, left - 1)).filter(|_| left > 1);
                self.send_ack(qp, ack);
                return match refusal {
                    Refusal::NotReady => {
                        self.ends[peer].gap_reported = true;
                        self.respond(qp, peer, request.psn, Body::NotReady);
                        Reply::Sent
                    }
                    Refusal::Failed => self.refuse(qp, peer, request.psn, WcStatus::RemoteOperation),
                };
            }
            _ => {}
        }
        if let Err(status) = self.execute(qp, peer, request) {
            self.send_ack(qp, ack);
            return self.refuse(qp, peer, request.psn, status);
        }
        let end = &mut self.ends[peer];
        end.gap_reported = false;
        end.expected_psn = (request.psn + request.packets) & PSN_MASK;
        end.received += u64::from(request.packets);
        match request.op {
            Op::Read => {
                // Its first response acknowledges the packets before it.
                *ack = None;
                self.answer_read(qp, peer, request)
            }
            Op::Write => {
                if self.ends[qp].state != State::Ready {
                    self.counters.landed_late += 1;
                }
                Reply::Ack(request.psn)
            }
        }
    }

    /// Checks a packet (IBA 9.7.4.1, 9.7.5.2.8) and executes a WRITE. `Err`: the target refuses it.
    #[inline]
    fn execute(&self, qp: usize, peer: usize, request: &Request) -> Result<(), WcStatus> {
        let end = &self.ends[peer];
        let Some(path) = end.path else { return Err(WcStatus::RemoteOperation) };
        let right = match request.op {
            Op::Read => MrAccess::REMOTE_READ,
            Op::Write => MrAccess::REMOTE_WRITE,
        };
        // Malformed: the queue pair lacks the right, there are more READs than agreed, or the packet has
        // another size.
        let reads_fit = request.op == Op::Write || end.reads_open < u32::from(path.reads_from_peer);
        let size_fits = self.config.pace == Pace::Immediate
            || request.op == Op::Read
            || if request.last { request.len <= path.mtu_bytes } else { request.len == path.mtu_bytes };
        // The data of a READ comes in packets of the target's MTU; the initiator counts them by its own.
        let answer_fits = self.config.pace == Pace::Immediate
            || request.op == Op::Write
            || self.ends[qp].path.is_some_and(|initiator| initiator.mtu_bytes == path.mtu_bytes)
            || request.len <= path.mtu_bytes.min(self.packet_bytes(qp));
        if !end.access.contains(right) || !reads_fit || !size_fits || !answer_fits {
            return Err(WcStatus::RemoteOperation);
        }
        let bytes = if request.first { request.message_bytes } else { request.len };
        let mrs = &self.devices[end.device].mrs;
        // The key is not checked when there is no byte (IBA 9.7.5.2.8).
        if bytes == 0 {
            return Ok(());
        }
        let target = mrs.remote(request.key, request.addr, u64::from(bytes), right);
        let target = target.ok_or(WcStatus::RemoteAccess)?;
        self.store(qp, target, &request.payload);
        Ok(())
    }

    /// A class C fault: the sender gets an error, and the target's queue pair goes to error (IBA 9.9.3.1).
    fn refuse(&mut self, qp: usize, peer: usize, psn: u32, status: WcStatus) -> Reply {
        self.counters.refused += 1;
        let (device, number) = (self.ends[peer].device, self.ends[peer].number);
        self.respond(qp, peer, psn, Body::Refused(status));
        if qp == peer {
            // Connected to itself: it fails when the response arrives, and accepts nothing until then.
            self.ends[peer].gap_reported = true;
        } else {
            self.qp_to_error(peer);
        }
        self.devices[device].raise(AsyncEvent::QpError(number));
        Reply::Sent
    }

    /// Writes a packet's bytes to the beginning of `target`.
    #[inline]
    fn store(&self, qp: usize, target: Target<'_>, payload: &Payload) {
        let position = match payload {
            Payload::None => return,
            Payload::Copied(bytes) => return target.write(bytes),
            Payload::InPlace(position) => *position,
        };
        let queue = &self.senders[qp].queue;
        if queue.at(position).inline {
            return target.write(queue.inline_at(position));
        }
        let own = &self.devices[self.ends[qp].device].mrs;
        let mut done = 0;
        for sge in queue.sges_at(position) {
            let Some(piece) = own.local(sge, MrAccess::empty()) else { return };
            target.part(done, piece.len()).copy_from(piece);
            done += piece.len();
        }
    }

    fn answer_read(&mut self, qp: usize, peer: usize, request: &Request) -> Reply {
        let device = self.ends[peer].device;
        self.ends[peer].reads_open += 1;
        let step = self.packet_bytes(peer);
        for index in 0..request.packets {
            let offset = index.wrapping_mul(step);
            let len = (request.len - offset.min(request.len)).min(step);
            let addr = request.addr.wrapping_add(u64::from(offset));
            let bytes = if self.config.pace == Pace::Immediate {
                Answer::InPlace { device, key: request.key, addr, len }
            } else {
                let mut bytes = self.buffers.pop().unwrap_or_default();
                bytes.clear();
                bytes.resize(len as usize, 0);
                let mrs = &self.devices[device].mrs;
                let source = mrs.remote(request.key, addr, u64::from(len), MrAccess::REMOTE_READ);
                match source {
                    Some(source) => source.read(&mut bytes),
                    None if len == 0 => {}
                    // A duplicate of a READ whose memory was deregistered meanwhile.
                    None => return self.refuse(qp, peer, request.psn, WcStatus::RemoteAccess),
                }
                Answer::Copied(bytes)
            };
            let last = index + 1 == request.packets;
            self.respond(qp, peer, (request.psn + index) & PSN_MASK, Body::Data { bytes, last });
        }
        Reply::Sent
    }

    fn send_ack(&mut self, qp: usize, ack: &mut Option<(usize, u32)>) {
        if let Some((peer, psn)) = ack.take() {
            self.respond(qp, peer, psn, Body::Ack);
        }
    }

    /// Sends `peer`'s response to the queue pair that it is connected to. If that is not `qp`, it is lost.
    fn respond(&mut self, qp: usize, peer: usize, psn: u32, body: Body) {
        let link = if self.peer_of(peer) == Some(qp) { self.link(peer, qp) } else { None };
        let after = self.senders[qp].response_due_last;
        let due = link.and_then(|link| self.flight(&link, after));
        if let Some(due) = due
            && self.ends[qp].state == State::Ready
        {
            let sender = &mut self.senders[qp];
            sender.response_due_last = due;
            sender.responses.push_back(Response { due, psn, body });
            return;
        }
        if let Body::Data { bytes, last } = body {
            if last {
                self.ends[peer].reads_open = self.ends[peer].reads_open.saturating_sub(1);
            }
            if let Answer::Copied(bytes) = bytes {
                self.buffers.push(bytes);
            }
        }
    }
}

/// IBA 9.7.6.1.3: 4.096 µs × 2^exponent.
fn ack_timeout_ns(exponent: u8) -> u64 {
    4_096 << u32::from(exponent).min(31)
}

/// The length of a request; `None`: its pieces exceed the capacity of the queue pair.
pub(super) fn length(request: &WorkRequest, sges: &[Sge], config: QpConfig) -> Option<u32> {
    let len = sges.iter().try_fold(0u32, |sum, sge| sum.checked_add(sge.len))?;
    let fits = sges.len() <= config.sges as usize
        && (!request.inline || (request.op == Op::Write && len <= config.inline_bytes));
    fits.then_some(len)
}
