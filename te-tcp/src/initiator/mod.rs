//! Our own operations: cut into pieces, framed onto lanes, settled by the answers.

use std::collections::VecDeque;
use std::io;

use te_core::{Error, ErrorKind, Op};
use te_fabric::net::error_of;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use crate::connections::Connection;
use crate::endpoint::LaneEnd;
use crate::frame::{
    self, CHECKSUM_BYTES_MAX, ENTRIES_MAX, FLAG_CHECKSUM, Header, Kind, Operation, Response, Status, Step,
};
use crate::lane::{Destination, Lane, Owner, Progress, Reading};
use crate::sys::Pinned;
use crate::transport::TcpTransport;

/// Pieces on one lane without an answer, at most.
const PIECES_MAX: usize = 1_024;
/// A frame takes further operations while it carries less than this.
const FRAME_BYTES: u64 = 256 << 10;
const _: () = assert!(FRAME_BYTES <= CHECKSUM_BYTES_MAX as u64);
/// A lane takes further WRITEs while less than this waits for its socket: what is not framed can still be taken back.
const UNSENT_BYTES_MAX: u64 = 2 << 20;

/// How far a lane's handshake got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Connecting,
    Greeting,
    Live,
}

/// How far a piece got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Not one byte of its payload is sent (a READ has none).
    Framed,
    /// Some bytes are.
    Started,
    /// All are.
    Sent,
    /// Taken back before its entry was sent: the target will refuse it.
    Void,
}

/// Part of an operation that is on a lane.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) slot: u32,
    pub(crate) len: u32,
    pub(crate) offset: u32,
    pub(crate) op: Op,
    pub(crate) stage: Stage,
    /// Where its entry lies among the lane's heads.
    entry_at: u64,
}

/// The initiator's side of a lane.
#[derive(Debug)]
pub(crate) struct OutLane {
    pub(crate) peer: u32,
    pub(crate) number: u8,
    /// Which of the peer's addresses it goes to.
    pub(crate) address: u8,
    pub(crate) generation: u32,
    pub(crate) phase: Phase,
    /// Pieces without an answer, in the order in which the answers will come.
    pub(crate) pieces: VecDeque<Piece>,
    /// Sequence number of the first of them.
    first: u64,
    /// Their bytes.
    outstanding: u64,
    /// The lane takes further pieces while it has fewer bytes outstanding than this.
    pub(crate) window: u64,
    pub(crate) pinged: bool,
    pub(crate) unacknowledged: u64,
}

impl OutLane {
    pub(crate) fn new(peer: u32, number: u8, address: u8, generation: u32) -> Self {
        Self {
            peer,
            number,
            address,
            generation,
            phase: Phase::Connecting,
            pieces: VecDeque::with_capacity(PIECES_MAX),
            first: 0,
            outstanding: 0,
            window: 0,
            pinged: false,
            unacknowledged: 0,
        }
    }

    fn progress(&mut self, owner: Owner, progress: Progress) {
        if let Owner::Piece(seq) = owner
            && let Some(piece) = self.pieces.get_mut(seq.wrapping_sub(self.first) as usize)
        {
            piece.stage = match progress {
                Progress::Started => Stage::Started,
                Progress::Finished => Stage::Sent,
            };
        }
    }

    /// Whether it can be read.
    #[cfg(feature = "uring")]
    pub(crate) fn is_up(&self) -> bool {
        self.phase != Phase::Connecting
    }

    /// Whether an answer of any kind is due.
    pub(crate) fn is_awaited(&self) -> bool {
        !self.pieces.is_empty() || self.phase != Phase::Live || self.pinged
    }
}

impl Lane<OutLane> {
    fn takes(&self, op: Op) -> bool {
        self.role.outstanding < self.role.window
            && (op == Op::Read || self.outbox.queued() < UNSENT_BYTES_MAX)
            && self.role.phase == Phase::Live
            && self.role.pieces.len() + ENTRIES_MAX <= PIECES_MAX
            && self.outbox.has_room(ENTRIES_MAX)
    }

    fn load(&self) -> u64 {
        self.role.outstanding
    }
}

impl TcpTransport {
    /// Puts the peer in the list of those that have something to send.
    pub(crate) fn list_peer(&mut self, peer: u32) {
        if let Some(endpoint) = self.peers.get_mut(peer)
            && !endpoint.listed
        {
            endpoint.listed = true;
            self.listed.push(peer);
            self.timers.wake();
            self.timers.changed();
        }
    }

    /// Frames and sends what waits, for every peer that has something waiting.
    pub(crate) fn feed_all(&mut self) {
        let mut at = 0;
        while at < self.listed.len() {
            let peer = self.listed[at];
            self.feed(peer);
            match self.peers.get_mut(peer) {
                Some(endpoint) if endpoint.has_work() => at += 1,
                Some(endpoint) => {
                    endpoint.listed = false;
                    self.listed.swap_remove(at);
                }
                None => {
                    self.listed.swap_remove(at);
                }
            }
        }
    }

    fn feed(&mut self, peer: u32) {
        while self.send_fence(peer) {}
        let mut fed = [false; crate::config::LANES_MAX as usize];
        let mut wanting = false;
        while let Some(op) = self.next_pending(peer) {
            let Some((number, index)) = self.pick_lane(peer, op) else {
                wanting = true;
                break;
            };
            let Some(mut lane) = self.connections.take_out(index) else { break };
            self.frame_batch(peer, op, &mut lane);
            self.connections.put(index, Connection::Out(lane));
            fed[number] = true;
        }
        for number in fed.iter().enumerate().filter_map(|(number, fed)| fed.then_some(number)) {
            if let Some(index) = self.peers.get(peer).and_then(|endpoint| endpoint.lanes[number]) {
                self.flush_out(index);
            }
        }
        if wanting || self.peers.get(peer).is_some_and(|p| p.has_work() && p.lane_count() == 0) {
            self.open_lane(peer);
        }
    }

    fn next_pending(&self, peer: u32) -> Option<Op> {
        let endpoint = self.peers.get(peer)?;
        if let Some(piece) = endpoint.again.front() {
            return Some(piece.op);
        }
        let slot = endpoint.pending.first()?;
        self.operations.get(slot).map(|operation| operation.op)
    }

    /// The live lane with the least on it that has room.
    fn pick_lane(&self, peer: u32, op: Op) -> Option<(usize, u32)> {
        let lanes = &self.peers.get(peer)?.lanes;
        let open = lanes.iter().enumerate().filter_map(|(number, index)| {
            let lane = self.connections.out((*index)?)?;
            lane.takes(op).then_some((number, (*index)?, lane.load()))
        });
        open.min_by_key(|&(.., load)| load).map(|(number, index, _)| (number, index))
    }

    /// Moves pieces of one kind from the peer's queue into one frame.
    fn frame_batch(&mut self, peer: u32, kind: Op, lane: &mut Lane<OutLane>) {
        let zero = Operation {
            region: U32::ZERO,
            generation: U32::ZERO,
            key: U64::ZERO,
            offset: U64::ZERO,
            len: U64::ZERO,
            crc: U32::ZERO,
            reserved: U32::ZERO,
        };
        let mut entries = [zero; ENTRIES_MAX];
        let mut memory: [Option<Pinned>; ENTRIES_MAX] = [None; ENTRIES_MAX];
        let (mut count, mut bytes) = (0, 0);
        let piece_bytes_max = match self.config.checksum {
            true => self.config.piece_bytes_max.min(CHECKSUM_BYTES_MAX),
            false => self.config.piece_bytes_max,
        };
        let first = lane.role.first + lane.role.pieces.len() as u64;
        let Some(endpoint) = self.peers.get_mut(peer) else { return };
        while count < ENTRIES_MAX
            && let again = endpoint.again.front().copied()
            && let Some(slot) = again.map(|piece| piece.slot).or(endpoint.pending.first())
            && let Some(operation) = self.operations.get_mut(slot)
            && operation.op == kind
        {
            let (offset, len) = match again {
                Some(piece) => (piece.offset, piece.len),
                None => (operation.issued, (operation.len - operation.issued).min(piece_bytes_max)),
            };
            if count > 0 && bytes + u64::from(len) > FRAME_BYTES {
                break;
            }
            let Some(segment) = self.segments.get(operation.segment) else { break };
            let Ok(part) = operation.ext.local.part(u64::from(offset), u64::from(len)) else { break };
            let with_crc = kind == Op::Write && self.config.checksum;
            entries[count] = Operation {
                region: U32::new(segment.region),
                generation: U32::new(segment.region_generation),
                key: U64::new(segment.key),
                offset: U64::new(operation.remote_offset + u64::from(offset)),
                len: U64::new(u64::from(len)),
                crc: U32::new(if with_crc { part.crc32c(0) } else { 0 }),
                reserved: U32::ZERO,
            };
            memory[count] = Some(part);
            lane.role.pieces.push_back(Piece {
                slot,
                len,
                offset,
                op: kind,
                stage: Stage::Framed,
                entry_at: 0,
            });
            if again.is_some() {
                // Counted when a lane first took it.
                endpoint.again.pop_front();
            } else {
                operation.issued += len;
                operation.open += 1;
                if operation.issued == operation.len {
                    self.operations.unlink(&mut endpoint.pending, slot);
                }
            }
            count += 1;
            bytes += u64::from(len);
        }
        if count == 0 {
            return;
        }
        let flags = if self.config.checksum { FLAG_CHECKSUM } else { 0 };
        let wire_kind = if kind == Op::Read { Kind::Read } else { Kind::Write };
        let header = Header::new(wire_kind, flags, count as u16, first);
        let at = lane.outbox.push_head(&[header.as_bytes(), entries[..count].as_bytes()]);
        let known = lane.role.pieces.len() - count;
        for (i, part) in memory[..count].iter().enumerate() {
            lane.role.pieces[known + i].entry_at =
                at + (size_of::<Header>() + i * size_of::<Operation>()) as u64;
            if let (Op::Write, Some(part)) = (kind, part) {
                lane.outbox.push_payload(*part, Owner::Piece(first + i as u64));
            }
        }
        lane.role.outstanding += bytes;
        self.stats.frames_sent += 1;
    }

    /// Works on one of our lanes after an event, or because it is warm.
    pub(crate) fn drive_out(
        &mut self,
        index: u32,
        mut lane: Box<Lane<OutLane>>,
        reading: Reading,
        writable: bool,
    ) {
        let end = match self.step_out(index, &mut lane, reading, writable) {
            Ok(()) => match self.write_out(index, &mut lane) {
                Ok(()) => None,
                Err(error) => Some(LaneEnd::Lost(error_of(&error))),
            },
            Err(end) => Some(end),
        };
        match end {
            None => {
                self.settle_interest(index, &mut lane);
                self.connections.put(index, Connection::Out(lane));
            }
            Some(end) => self.end_out(index, lane, end),
        }
    }

    fn step_out(
        &mut self,
        index: u32,
        lane: &mut Lane<OutLane>,
        reading: Reading,
        writable: bool,
    ) -> Result<(), LaneEnd> {
        if writable {
            if lane.blocked
                && let Some(endpoint) = self.peers.get_mut(lane.role.peer)
            {
                // The peer makes room: it reads. What merely fits into the socket says nothing about it.
                endpoint.pulse = Some(self.timers.now());
            }
            lane.blocked = false;
            if lane.role.phase == Phase::Connecting {
                lane.socket.take_error().map_err(|error| LaneEnd::Refused(error_of(&error)))?;
                self.greet(lane);
            }
        }
        if reading.is_wanted() && lane.role.phase != Phase::Connecting {
            self.read_out(index, lane, reading)?;
        }
        Ok(())
    }

    fn read_out(
        &mut self,
        index: u32,
        lane: &mut Lane<OutLane>,
        mut reading: Reading,
    ) -> Result<(), LaneEnd> {
        let mut budget = crate::transport::RECEIVE_BYTES_MAX;
        loop {
            let received = match reading
                .take()
                .unwrap_or_else(|| lane.inbox.receive(&lane.socket, &mut self.buffers))
            {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    lane.heat = lane.heat.saturating_sub(1);
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if lane.role.phase == Phase::Live => return Err(LaneEnd::Lost(error_of(&error))),
                Err(error) => return Err(LaneEnd::Refused(error_of(&error))),
            };
            self.stats.receives += 1;
            self.stats.bytes_received += received.bytes as u64;
            if let Some(endpoint) = self.peers.get_mut(lane.role.peer) {
                endpoint.pulse = Some(self.timers.now());
            }
            self.answers(lane)?;
            budget = budget.saturating_sub(received.bytes);
            if received.drained || budget == 0 {
                self.stopped_reading(index, &mut lane.heat, received.drained && !lane.finished);
                return Ok(());
            }
        }
    }

    /// Takes in every answer that has arrived.
    fn answers(&mut self, lane: &mut Lane<OutLane>) -> Result<(), LaneEnd> {
        const PROTOCOL: LaneEnd = LaneEnd::Lost(Error::new(ErrorKind::Protocol));
        loop {
            while let Some(destination) = lane.inbox.next_complete() {
                self.piece_read(lane, &destination);
            }
            if lane.inbox.expects_payload() {
                return Ok(());
            }
            lane.inbox.clear_plan();
            let head = if lane.role.phase == Phase::Greeting {
                match frame::parse_welcome(lane.inbox.staged()) {
                    Ok(Step::Need(_)) => return Ok(()),
                    Ok(Step::Frame(welcome, head)) => {
                        if let Some(error) = Status::from_wire(welcome.status.get()).error() {
                            return Err(LaneEnd::Refused(error));
                        }
                        let known =
                            self.peers.get(lane.role.peer).map(|endpoint| endpoint.contact.incarnation());
                        if known != Some(welcome.incarnation.get()) {
                            return Err(LaneEnd::Refused(Error::new(ErrorKind::Protocol)));
                        }
                        lane.role.phase = Phase::Live;
                        lane.deadline = None;
                        if let Some(endpoint) = self.peers.get_mut(lane.role.peer) {
                            endpoint.connected(lane.role.address);
                        }
                        self.list_peer(lane.role.peer);
                        head
                    }
                    Err(_) => return Err(LaneEnd::Refused(Error::new(ErrorKind::Protocol))),
                }
            } else {
                let Lane { inbox, role, .. } = lane;
                let (staged, plan) = inbox.split();
                match frame::parse_response(staged) {
                    Ok(Step::Need(_)) => return Ok(()),
                    Ok(Step::Frame(Response::Data { seq, checksum, entries }, head)) => {
                        if seq != role.first || entries.len() > role.pieces.len() {
                            return Err(PROTOCOL);
                        }
                        for (entry, piece) in entries.iter().zip(&role.pieces) {
                            let status = entry.status.get();
                            let expected = if status == 0 { u64::from(piece.len) } else { 0 };
                            if piece.op != Op::Read || entry.len.get() != expected {
                                return Err(PROTOCOL);
                            }
                            let live =
                                self.operations.get(piece.slot).filter(|op| op.ext.live && status == 0);
                            plan.push(Destination {
                                memory: live.and_then(|operation| {
                                    operation
                                        .ext
                                        .local
                                        .part(u64::from(piece.offset), u64::from(piece.len))
                                        .ok()
                                }),
                                len: expected,
                                done: 0,
                                checksum: checksum.then_some((entry.crc.get(), 0)),
                                status,
                                owner: piece.slot,
                            });
                        }
                        head
                    }
                    Ok(Step::Frame(Response::Ack { seq, statuses }, head)) => {
                        if seq != role.first || statuses.len() > role.pieces.len() {
                            return Err(PROTOCOL);
                        }
                        for status in statuses {
                            let Some(piece) = role.pieces.front().copied() else { return Err(PROTOCOL) };
                            let answerable = matches!(piece.stage, Stage::Sent | Stage::Void);
                            if piece.op != Op::Write || !answerable {
                                return Err(PROTOCOL);
                            }
                            role.pieces.pop_front();
                            role.first += 1;
                            role.outstanding -= u64::from(piece.len);
                            self.piece_written(&piece, Status::from_wire(status.get()));
                        }
                        head
                    }
                    Ok(Step::Frame(Response::FenceAck { id }, head)) => {
                        self.fence_answered(role.peer, role.number, id);
                        head
                    }
                    Ok(Step::Frame(Response::Pong { .. }, head)) => {
                        role.pinged = false;
                        head
                    }
                    Ok(Step::Frame(Response::Retired { next }, _)) => {
                        // What came before has been answered, and its answers came before this.
                        return Err(if next == role.first { LaneEnd::Retired } else { PROTOCOL });
                    }
                    Ok(Step::Frame(Response::Error { status }, _)) => {
                        return Err(LaneEnd::Lost(status.error().unwrap_or(Error::new(ErrorKind::Protocol))));
                    }
                    Err(_) => return Err(PROTOCOL),
                }
            };
            lane.inbox.take(head);
        }
    }

    /// All bytes of a READ's piece are in, or it was refused.
    fn piece_read(&mut self, lane: &mut Lane<OutLane>, destination: &Destination) {
        let Some(piece) = lane.role.pieces.pop_front() else { return };
        lane.role.first += 1;
        lane.role.outstanding -= u64::from(piece.len);
        if destination.is_intact() {
            let error = Status::from_wire(destination.status).error();
            self.stats.bytes_read += destination.len;
            self.settle(piece.slot, error, false);
        } else {
            self.stats.corrupt += 1;
            self.settle(piece.slot, Some(Error::new(ErrorKind::Corrupt)), false);
        }
    }

    fn piece_written(&mut self, piece: &Piece, status: Status) {
        match status {
            Status::Ok => {
                self.stats.bytes_written += u64::from(piece.len);
                self.settle(piece.slot, None, true);
            }
            Status::Corrupt => {
                self.stats.corrupt += 1;
                self.settle(piece.slot, status.error(), true);
            }
            // The target took the region away while the payload was coming in.
            Status::Withdrawn => self.settle(piece.slot, status.error(), true),
            refused => self.settle(piece.slot, refused.error(), false),
        }
    }

    /// A piece of `slot` has had its answer, or will never have one. `touched`: it changed remote bytes, or may have.
    pub(crate) fn settle(&mut self, slot: u32, error: Option<Error>, touched: bool) {
        let Some(operation) = self.operations.get_mut(slot) else { return };
        operation.open -= 1;
        operation.ext.touched |= touched;
        if operation.error.is_none() {
            operation.error = error;
        }
        if operation.error.is_some() && operation.is_queued() {
            // What is not yet on a lane would only prolong it.
            let peer = operation.peer;
            if let Some(endpoint) = self.peers.get_mut(peer) {
                self.operations.unlink(&mut endpoint.pending, slot);
            }
        }
        self.finish(slot);
    }

    /// Completes `slot` if nothing of it is left anywhere.
    pub(crate) fn finish(&mut self, slot: u32) {
        let Some(operation) = self.operations.get(slot) else { return };
        if operation.open > 0 || operation.is_queued() {
            return;
        }
        if operation.ext.live {
            self.complete(slot);
        }
        self.operations.remove(slot);
    }

    /// Hands the completion out and lets go of region, segment and peer. The slot stays.
    fn complete(&mut self, slot: u32) {
        let Some(operation) = self.operations.get_mut(slot) else { return };
        operation.ext.live = false;
        let operation = *operation;
        let completion = operation.completion(operation.ext.touched, false);
        if completion.result.is_err() {
            self.stats.failed += 1;
        }
        self.operations.complete(completion);
        self.regions.unpin(operation.region);
        self.segments.unpin(operation.segment);
        if let Some(endpoint) = self.peers.get_mut(operation.peer) {
            endpoint.operations -= 1;
            if !endpoint.is_awaited() {
                endpoint.pulse = None;
            }
        }
    }

    /// L3: ends a slice at once. What a lane still owes it goes to nobody.
    pub(crate) fn cancel_slot(&mut self, slot: u32) {
        let Some(operation) = self.operations.get_mut(slot) else { return };
        let peer = operation.peer;
        operation.error.get_or_insert(Error::new(ErrorKind::Canceled));
        let (op, open) = (operation.op, operation.open);
        let Some(endpoint) = self.peers.get_mut(peer) else { return };
        self.operations.unlink(&mut endpoint.pending, slot);
        let waiting = endpoint.again.len();
        endpoint.again.retain(|piece| piece.slot != slot);
        let open = open - (waiting - endpoint.again.len()) as u32;
        if let Some(operation) = self.operations.get_mut(slot) {
            operation.open = open;
        }
        let lanes = endpoint.lanes;
        if open > 0 {
            for index in lanes.into_iter().flatten() {
                let Some(mut lane) = self.connections.take_out(index) else { continue };
                if self.cut_out(slot, op, &mut lane) {
                    self.connections.put(index, Connection::Out(lane));
                } else {
                    self.end_out(index, lane, LaneEnd::Lost(Error::new(ErrorKind::Rail)));
                }
            }
        }
        if self.operations.get(slot).is_some_and(|operation| operation.ext.live) {
            self.complete(slot);
            self.finish(slot);
        }
    }

    /// Makes a lane forget the memory of `slot`. False: it cannot within its limits, and must go.
    fn cut_out(&mut self, slot: u32, op: Op, lane: &mut Lane<OutLane>) -> bool {
        let Lane { outbox, inbox, role, .. } = lane;
        if op == Op::Read {
            inbox.redirect(slot, Status::Ok as u32);
        }
        let first = role.first;
        let mut aside = 0;
        for (i, piece) in role.pieces.iter_mut().enumerate().filter(|(_, piece)| piece.slot == slot) {
            let owner = Owner::Piece(first + i as u64);
            if piece.stage == Stage::Framed && outbox.is_unsent(piece.entry_at) {
                outbox.void(piece.entry_at, owner);
                piece.stage = Stage::Void;
                continue;
            }
            if op == Op::Read {
                continue;
            }
            if let Some(operation) = self.operations.get_mut(slot) {
                operation.ext.touched = true;
            }
            aside += outbox.unsent(owner);
            if aside > u64::from(self.config.aside_bytes_max) {
                return false;
            }
            if piece.stage != Stage::Sent {
                outbox.detach(owner);
                // Its bytes are the lane's own now and will go out before any answer can come.
                piece.stage = Stage::Sent;
            }
        }
        true
    }

    pub(crate) fn flush_out(&mut self, index: u32) {
        if let Some(lane) = self.connections.take_out(index) {
            self.drive_out(index, lane, Reading::No, false);
        }
    }

    fn write_out(&mut self, index: u32, lane: &mut Lane<OutLane>) -> io::Result<()> {
        if lane.role.phase == Phase::Connecting {
            return Ok(());
        }
        while !lane.blocked && !lane.outbox.is_empty() {
            let Lane { outbox, socket, role, .. } = lane;
            match outbox.flush(socket, &mut self.buffers, |owner, progress| role.progress(owner, progress)) {
                Ok((sent, all)) => {
                    self.stats.sends += 1;
                    self.stats.bytes_sent += sent as u64;
                    lane.blocked = !all;
                    // An answer is likely soon.
                    self.heat_up(index, &mut lane.heat);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => lane.blocked = true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
