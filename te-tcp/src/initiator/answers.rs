//! Takes in the answers of targets: payloads of READs, statuses of WRITEs, the end of a handshake.

use te_core::{Completion, Error, ErrorKind, Op};
use te_fabric::Timers;
use zerocopy::little_endian::U32;

use super::connection::{ConnectionEnd, Own, OwnConnection, Phase};
use super::slices::Slices;
use super::staged::{Stagings, land, release};
use crate::connection::{Connection, Destination};
use crate::frame::{self, DataEntry, Response, Status, Step};
use crate::operation::{Operation, Stage};
use crate::peers::Peers;
use crate::region::Regions;

/// The parts of the transport that answers change.
pub(super) struct Answers<'a> {
    pub(super) slices: &'a mut Slices,
    pub(super) staging: &'a mut Stagings,
    pub(super) peers: &'a mut Peers,
    pub(super) regions: &'a mut Regions,
    pub(super) timers: &'a mut Timers,
}

impl Answers<'_> {
    /// Takes in every answer that has arrived on the connection.
    pub(super) fn take(&mut self, connection: &mut OwnConnection) -> Result<(), ConnectionEnd> {
        loop {
            while let Some(destination) = connection.inbox.next_complete() {
                if let Some(piece) = connection.role.pop() {
                    if let Some(staged) = piece.staged
                        && land(staged, connection.role.peer, piece, &destination, self.staging, self.slices)
                    {
                        continue;
                    }
                    self.slices.piece_read(&piece, &destination, self.peers, self.regions);
                }
            }
            if connection.inbox.expects_payload() {
                return Ok(());
            }
            connection.inbox.clear_plan();
            let head = if connection.role.phase == Phase::Greeting {
                self.welcome(connection)?
            } else {
                self.response(connection)?
            };
            match head {
                Some(bytes) => connection.inbox.take(bytes),
                None => return Ok(()),
            }
        }
    }

    /// Notes that the peer was heard from.
    pub(super) fn sign_of_life(&mut self, peer: u32) {
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.last_heard = Some(self.timers.now());
        }
    }

    /// Takes in the WELCOME; returns its length. `None`: it is not complete yet.
    fn welcome(&mut self, connection: &mut OwnConnection) -> Result<Option<usize>, ConnectionEnd> {
        const PROTOCOL: ConnectionEnd = ConnectionEnd::Refused(Error::new(ErrorKind::Protocol));
        let (welcome, head) = match frame::parse_welcome(connection.inbox.unparsed()) {
            Ok(Step::Need(_)) => return Ok(None),
            Ok(Step::Frame(welcome, head)) => (welcome, head),
            Err(_) => return Err(PROTOCOL),
        };
        if let Some(error) = Status::from_wire(welcome.status.get()).error() {
            return Err(ConnectionEnd::Refused(error));
        }
        let peer = self.peers.get_mut(connection.role.peer);
        let Some(peer) = peer.filter(|peer| peer.contact.incarnation() == welcome.incarnation.get()) else {
            return Err(PROTOCOL);
        };
        peer.connected(connection.role.address);
        connection.role.phase = Phase::Live;
        connection.deadline = None;
        self.peers.list(connection.role.peer, self.timers);
        Ok(Some(head))
    }

    /// Takes in the head of one frame; returns its length. `None`: it is not complete yet.
    fn response(&mut self, connection: &mut OwnConnection) -> Result<Option<usize>, ConnectionEnd> {
        let Connection { inbox, role, .. } = connection;
        let (staged, plan) = inbox.split();
        let (response, head) = match frame::parse_response(staged) {
            Ok(Step::Need(_)) => return Ok(None),
            Ok(Step::Frame(response, head)) => (response, head),
            Err(_) => return Err(ConnectionEnd::PROTOCOL),
        };
        match response {
            Response::Data { seq, checksum, entries } => self.data(role, seq, checksum, entries, plan)?,
            Response::Ack { seq, statuses } => self.written(role, seq, statuses)?,
            Response::FenceAck { id } => {
                if let Some(fence) = self.peers.fence_answered(role.peer, role.number, id) {
                    self.slices.end_fence(&fence, Completion::applied(fence.token));
                }
            }
            Response::Pong { .. } => role.ponged(),
            // Every operation before `next` has been answered, and these answers have arrived before this
            // frame.
            Response::GoAway { next } if next == role.first() => return Err(ConnectionEnd::GoAway),
            Response::GoAway { .. } => return Err(ConnectionEnd::PROTOCOL),
            Response::Error { status } => {
                return Err(status.error().map_or(ConnectionEnd::PROTOCOL, ConnectionEnd::Lost));
            }
        }
        Ok(Some(head))
    }

    /// Announces the payloads of a DATA frame. Payloads for completed slices are discarded.
    fn data(
        &self,
        role: &Own,
        seq: u64,
        checksum: bool,
        entries: &[DataEntry],
        plan: &mut Vec<Destination>,
    ) -> Result<(), ConnectionEnd> {
        if seq != role.first() || entries.len() > role.pieces().len() {
            return Err(ConnectionEnd::PROTOCOL);
        }
        for (entry, piece) in entries.iter().zip(role.pieces()) {
            let status = entry.status.get();
            let expected = if status == 0 { u64::from(piece.len) } else { 0 };
            if piece.op != Op::Read || entry.len.get() != expected {
                return Err(ConnectionEnd::PROTOCOL);
            }
            let part = |operation: &Operation| match piece.staged {
                None => {
                    let part = operation.ext.local.part(u64::from(piece.offset), u64::from(piece.len));
                    part.ok()?.host()
                }
                Some(staged) => self.staging.memory(staged, u64::from(piece.len)),
            };
            let live = if status == 0 { self.slices.live(piece.slot) } else { None };
            plan.push(Destination {
                memory: live.and_then(part),
                len: expected,
                done: 0,
                checksum: checksum.then_some((entry.crc.get(), 0)),
                status,
                user: piece.slot,
            });
        }
        Ok(())
    }

    /// Settles the pieces that an ACK frame is about.
    fn written(&mut self, role: &mut Own, seq: u64, statuses: &[U32]) -> Result<(), ConnectionEnd> {
        if seq != role.first() || statuses.len() > role.pieces().len() {
            return Err(ConnectionEnd::PROTOCOL);
        }
        for status in statuses {
            let is_due = role.pieces().front().is_some_and(|piece| {
                piece.op == Op::Write && matches!(piece.stage, Stage::Sent | Stage::Void)
            });
            // A piece for which no status is due stays on the connection, and is settled when the connection
            // ends.
            let Some(piece) = is_due.then(|| role.pop()).flatten() else {
                return Err(ConnectionEnd::PROTOCOL);
            };
            release(&piece, self.staging);
            let status = Status::from_wire(status.get());
            self.slices.piece_written(&piece, status, self.peers, self.regions);
        }
        Ok(())
    }
}
