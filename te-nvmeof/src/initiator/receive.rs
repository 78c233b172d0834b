//! What arrives on a queue: data, requests for data, and responses.

use std::io;

use te_core::{Error, ErrorKind};
use te_fabric::{Interest, net};

use super::peer::{Peer, Phase, QueueConnection};
use super::slices::PieceEnd;
use super::{Answer, Initiator};
use crate::command::{Cqe, NO_FLOW_CONTROL, Status};
use crate::context::{Context, Watched};
use crate::controller::Admin;
use crate::pdu::{self, Data, End, FLAG_LAST, FLAG_SUCCESS, Fatal, Pdu, Step, Transfer};
use crate::queue::Purpose;
use crate::stream::{Arrived, Payload, Source, Stream};

/// Bytes that one poll receives on one queue.
const RECEIVE_BYTES_MAX: usize = 8 << 20;
/// The longest data of one PDU: no command of ours asks for more.
const DATA_BYTES_MAX: u32 = 32 << 20;

/// Why an association has to end.
#[derive(Debug)]
pub(super) enum Stop {
    /// The target has broken the protocol: tell it.
    Fatal(Fatal),
    Failed(Error),
}

impl From<Fatal> for Stop {
    fn from(fatal: Fatal) -> Self {
        Self::Fatal(fatal)
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl From<ErrorKind> for Stop {
    fn from(kind: ErrorKind) -> Self {
        Self::Failed(kind.into())
    }
}

impl Initiator {
    /// Works on a queue that is ready.
    pub(crate) fn drive(&mut self, name: u32, readable: bool, writable: bool, cx: &mut Context<'_>) {
        let Some(at) = self.queues.index(name) else { return };
        let Some(mut queue) = self.queues.take(at) else { return };
        let index = queue.peer;
        let result = self.drive_queue(&mut queue, readable, writable, cx);
        self.watch(&mut queue, at, cx);
        let error = match result {
            Ok(()) => None,
            Err(Stop::Failed(error)) => Some(error),
            Err(Stop::Fatal(fatal)) => {
                cx.stats.protocol_errors += 1;
                log::debug!("ending an association: {fatal}");
                let header = &queue.stream.unparsed()[..queue.stream.unparsed().len().min(128)];
                let term = pdu::term_req(End::Host, fatal, header);
                // Only where it does not land in the middle of a PDU.
                if queue.stream.is_sent() {
                    queue.stream.push_detached(term.into());
                    let _ = queue.stream.flush(cx.buffers, cx.stats, |_| {});
                }
                Some(Error::with_code(ErrorKind::Protocol, fatal.to_wire().0.into()))
            }
        };
        self.queues.put(at, queue);
        if let Some(error) = error {
            self.fail_association(index, error, cx);
        }
        self.act(cx);
        let has_work = |peer: &Peer| !peer.pending.is_empty() || !peer.fences.is_empty() || peer.starved;
        if self.peers.get(index).is_some_and(has_work) {
            self.list(index);
        }
    }

    fn drive_queue(
        &mut self,
        queue: &mut QueueConnection,
        readable: bool,
        writable: bool,
        cx: &mut Context<'_>,
    ) -> Result<(), Stop> {
        if queue.phase == Phase::Connecting {
            if !writable {
                return Ok(());
            }
            Self::connected(queue, cx)?;
        }
        let (mut more, mut budget) = (readable, RECEIVE_BYTES_MAX);
        loop {
            while self.step(queue, cx)? {}
            Self::flush_queue(queue, cx)?;
            if !more {
                return Ok(());
            }
            match queue.stream.receive(cx.buffers, cx.stats) {
                Ok((bytes, drained)) => {
                    budget = budget.saturating_sub(bytes);
                    more = !drained && budget > 0;
                    let now = cx.now();
                    if let Some(association) =
                        self.peers.get_mut(queue.peer).and_then(|peer| peer.association.as_mut())
                    {
                        association.last_heard = now;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => more = false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(net::peer_dead(net::error_of(&error)).into()),
            }
        }
    }

    /// Sends what waits on a queue, and what the target has asked for.
    fn flush_queue(queue: &mut QueueConnection, cx: &mut Context<'_>) -> Result<(), Error> {
        if queue.phase == Phase::Connecting {
            return Ok(());
        }
        loop {
            for _ in 0..queue.backlog.len() {
                if let Some(at) = queue.backlog.pop_front() {
                    Self::pump(queue, at);
                }
            }
            let flushed = queue.stream.flush(cx.buffers, cx.stats, |_| {});
            flushed.map_err(|error| net::peer_dead(net::error_of(&error)))?;
            if queue.backlog.is_empty() || queue.stream.blocked {
                return Ok(());
            }
        }
    }

    /// As [`Self::flush_queue`], for a queue that is not taken out.
    pub(super) fn flush_index(&mut self, at: u32, cx: &mut Context<'_>) -> Result<(), Error> {
        let Some(queue) = self.queues.get_mut(at) else { return Ok(()) };
        if queue.stream.blocked || queue.stream.is_sent() && queue.backlog.is_empty() {
            return Ok(());
        }
        let result = Self::flush_queue(queue, cx);
        if let Some(mut queue) = self.queues.take(at) {
            self.watch(&mut queue, at, cx);
            self.queues.put(at, queue);
        }
        result
    }

    fn watch(&self, queue: &mut QueueConnection, at: u32, cx: &mut Context<'_>) {
        let interest = Interest { readable: true, writable: queue.stream.blocked };
        if interest != queue.interest {
            queue.interest = interest;
            let token = Watched::Queue(self.queues.name(at)).token();
            let _ = cx.epoll.modify(&queue.stream.socket, token, interest);
        }
    }

    /// Takes in one PDU, or the end of data; returns whether there was one.
    fn step(&mut self, queue: &mut QueueConnection, cx: &mut Context<'_>) -> Result<bool, Stop> {
        if queue.stream.is_receiving_data() {
            let Some(arrived) = queue.stream.arrived() else { return Ok(false) };
            self.data_arrived(queue, arrived, cx)?;
            return Ok(true);
        }
        let agreed = queue.stream.agreed;
        let Step::Frame(pdu, used) =
            pdu::parse(queue.stream.unparsed(), End::Controller, agreed, DATA_BYTES_MAX)?
        else {
            return Ok(false);
        };
        match (queue.phase, pdu) {
            (Phase::Opened, Pdu::IcResp(answer)) => {
                queue.stream.take(used);
                self.initialized(queue, &answer, cx)?;
            }
            (Phase::Initialized | Phase::Up, Pdu::Response(cqe)) => {
                queue.stream.take(used);
                self.response(queue, &cqe, cx)?;
            }
            (Phase::Up, Pdu::C2hData(header, data)) => return self.data(queue, &header, data, used),
            (Phase::Up, Pdu::R2t(header)) => {
                queue.stream.take(used);
                let at = queue.commands.find(header.cid.get()).ok_or(Fatal::Field(8))?;
                let command = queue.commands.get_mut(at).ok_or(Fatal::Field(8))?;
                command.asked(header.ttag.get(), header.offset.get(), header.len.get())?;
                Self::pump(queue, at);
            }
            (_, Pdu::TermReq(fatal)) => {
                log::debug!("the target ends a connection: {fatal}");
                return Err(Error::with_code(ErrorKind::Protocol, fatal.to_wire().0.into()).into());
            }
            _ => return Err(Fatal::Sequence.into()),
        }
        Ok(true)
    }

    /// The head of data.
    fn data(
        &mut self,
        queue: &mut QueueConnection,
        header: &Transfer,
        data: Data,
        used: usize,
    ) -> Result<bool, Stop> {
        let at = queue.commands.find(header.cid.get()).ok_or(Fatal::Field(8))?;
        let flags = header.common.flags;
        let (last, success) = (flags & FLAG_LAST != 0, flags & FLAG_SUCCESS != 0);
        if success && !queue.no_flow_control {
            return Err(Fatal::Field(1).into());
        }
        let command = queue.commands.get(at).ok_or(Fatal::Field(8))?;
        if let Purpose::Admin(_) = command.purpose {
            return self.collect(queue, at, header, data, used);
        }
        let memory = command.incoming(header.offset.get(), header.len.get())?;
        let mut payload = Payload::new(memory, data, at);
        (payload.last, payload.success) = (last, success);
        queue.stream.take(used);
        queue.stream.announce(payload);
        Ok(true)
    }

    /// Data of a command of the association: it is copied out of the buffer once it is whole.
    fn collect(
        &mut self,
        queue: &mut QueueConnection,
        at: u16,
        header: &Transfer,
        data: Data,
        used: usize,
    ) -> Result<bool, Stop> {
        if !Stream::can_collect(data.len) {
            return Err(Fatal::OutOfRange(pdu::LEN_AT).into());
        }
        let Some((bytes, intact, whole)) = queue.stream.collected(used, data) else { return Ok(false) };
        let command = queue.commands.get_mut(at).ok_or(Fatal::Field(8))?;
        if header.offset.get() != command.moved {
            return Err(Fatal::OutOfRange(pdu::OFFSET_AT).into());
        }
        if !intact {
            return Err(ErrorKind::Corrupt.into());
        }
        let association = self.peers.get_mut(queue.peer).and_then(|peer| peer.association.as_mut());
        let association = association.ok_or(ErrorKind::NotFound)?;
        let from = command.moved as usize;
        if let Some(room) = association.collected.get_mut(from..) {
            let len = room.len().min(bytes.len());
            room[..len].copy_from_slice(&bytes[..len]);
        }
        command.moved = command.moved.checked_add(data.len).ok_or(Fatal::OutOfRange(pdu::LEN_AT))?;
        queue.stream.take(used + whole);
        if header.common.flags & FLAG_SUCCESS != 0 {
            let cqe = Cqe::new(header.cid.get(), Status::SUCCESS, 0, 0);
            self.ended(queue, at, &cqe);
        }
        Ok(true)
    }

    /// Data of a READ has arrived whole.
    fn data_arrived(
        &mut self,
        queue: &mut QueueConnection,
        arrived: Arrived,
        cx: &mut Context<'_>,
    ) -> Result<(), Stop> {
        let Arrived { payload, intact } = arrived;
        let command = queue.commands.get_mut(payload.user).ok_or(Fatal::Sequence)?;
        command.moved += payload.len;
        if !intact {
            cx.stats.corrupt += 1;
            command.error = command.error.or(Some(ErrorKind::Corrupt.into()));
        }
        if payload.success {
            if command.moved != command.len {
                return Err(Fatal::OutOfRange(pdu::LEN_AT).into());
            }
            self.piece_ended(queue, payload.user, Status::SUCCESS, cx)?;
        }
        Ok(())
    }

    fn response(&mut self, queue: &mut QueueConnection, cqe: &Cqe, cx: &mut Context<'_>) -> Result<(), Stop> {
        let at = queue.commands.find(cqe.cid.get()).ok_or(Fatal::Field(8 + 12))?;
        let command = queue.commands.get(at).ok_or(Fatal::Field(8 + 12))?;
        match command.purpose {
            Purpose::Admin(what) => {
                if what == Admin::Connect && cqe.status() == Status::SUCCESS {
                    queue.phase = Phase::Up;
                    queue.no_flow_control = cqe.sqhd.get() == NO_FLOW_CONTROL;
                }
                self.ended(queue, at, cqe);
                Ok(())
            }
            Purpose::Read | Purpose::Write => self.piece_ended(queue, at, cqe.status(), cx),
        }
    }

    /// A command of the association has its response.
    fn ended(&mut self, queue: &mut QueueConnection, at: u16, cqe: &Cqe) {
        let Some(command) = queue.commands.remove(at) else { return };
        if let Purpose::Admin(what) = command.purpose {
            self.answers.push_back(Answer {
                peer: queue.peer,
                number: queue.number,
                what,
                status: cqe.status(),
                result: cqe.result.get(),
                sequence: command.stamp,
                qid: queue.qid,
            });
        }
    }

    /// A command of a slice has its response.
    fn piece_ended(
        &mut self,
        queue: &mut QueueConnection,
        at: u16,
        status: Status,
        cx: &mut Context<'_>,
    ) -> Result<(), Stop> {
        let command = queue.commands.get(at).ok_or(Fatal::Sequence)?;
        // A response to a WRITE may come early when it has failed; then all that was asked for was sent.
        let complete = command.moved == command.len && command.wanted.is_none();
        // No socket may send from the memory of a slice that has ended.
        let unsent = !queue.stream.is_sent() && queue.stream.unsent(Source::Command(at)) > 0;
        if status == Status::SUCCESS && (!complete || unsent) || command.wanted.is_some() {
            return Err(Fatal::Sequence.into());
        }
        if unsent {
            // It was refused before its data was there. The target discards what it gets of that.
            queue.stream.detach(Source::Command(at));
        }
        let Some(command) = queue.commands.remove(at) else { return Ok(()) };
        queue.bytes_in_flight = queue.bytes_in_flight.saturating_sub(command.len.into());
        if !command.live {
            return Ok(());
        }
        let end = match (status.error(), command.error) {
            (None, None) => PieceEnd::Done,
            (None, Some(error)) => PieceEnd::Failed(error),
            (Some(error), _) if status.is_before_data() && !command.was_asked => PieceEnd::Refused(error),
            (Some(error), _) => PieceEnd::Failed(error),
        };
        self.end_piece(command.slot, end, cx);
        Ok(())
    }
}
