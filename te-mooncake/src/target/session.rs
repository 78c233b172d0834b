//! One data connection of a peer: requests, one after the other.

use std::io::{self, Read as _};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use te_core::Op;
use te_fabric::Interest;
use te_fabric::net::reset_on_close;

use super::Target;
use crate::header::{REQUEST_BYTES, Request, STATUS_BYTES, Status, Version};
use crate::server::Turn;
use crate::sys::{self, ExportedRange, Memory};

/// Bytes that one connection moves before others are served.
const TURN_BYTES: usize = 1 << 20;
/// Bytes that a refused initiator may still send before its connection is closed: it would not read the
/// status if the connection were reset.
const DRAINED_BYTES_MAX: u64 = 64 << 20;
/// How long it may take to send them.
const DRAIN: Duration = Duration::from_secs(2);

pub(super) struct Session {
    name: u64,
    stream: TcpStream,
    state: State,
    /// When a byte moved last; before the first one, when the connection was accepted.
    moved_at: Instant,
    /// A request was served.
    used: bool,
}

enum State {
    /// A request, as far as it has arrived.
    Header([u8; REQUEST_BYTES], usize),
    /// The operation waits for room.
    Waiting(Operation),
    /// Of a WRITE.
    Receiving(Operation),
    /// Of a READ: its status, and how much of it was sent.
    Sending(Operation, [u8; STATUS_BYTES], usize),
    /// The status of a WRITE whose bytes are in place, and how much of it was sent.
    Status([u8; STATUS_BYTES], usize),
    /// The status of a request that is refused, and how much of it was sent.
    Rejecting([u8; STATUS_BYTES], usize),
    /// What a refused initiator sends is discarded: until when, and how many bytes at most.
    Draining(Instant, u64),
}

struct Operation {
    request: Request,
    range: Arc<ExportedRange>,
    /// Where the operation begins in the range.
    offset: u64,
    /// Bytes that were moved.
    done: u64,
}

impl Operation {
    const fn left(&self) -> u64 {
        self.request.len - self.done
    }
}

/// What ends a turn.
enum End {
    /// The socket has no bytes, or no room.
    Blocked,
    /// Others are served.
    Budget,
    Close,
    /// Discards what was sent and not received.
    Reset,
}

impl Session {
    pub(super) const fn new(name: u64, stream: TcpStream, now: Instant) -> Self {
        Self { name, stream, state: State::Header([0; REQUEST_BYTES], 0), moved_at: now, used: false }
    }

    pub(super) const fn name(&self) -> u64 {
        self.name
    }

    pub(super) const fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// The length of the operation that is being served.
    pub(super) const fn inflight_bytes(&self) -> Option<u64> {
        match &self.state {
            State::Receiving(operation) | State::Sending(operation, ..) => Some(operation.request.len),
            _ => None,
        }
    }

    pub(super) fn deadline(&self, header: Duration, silence: Duration) -> Option<Instant> {
        match &self.state {
            // Between two requests a connection may be idle.
            State::Header(_, 0) if self.used => None,
            State::Header(..) => Some(self.moved_at + header),
            State::Waiting(_) => None,
            State::Receiving(_) | State::Sending(..) | State::Status(..) => Some(self.moved_at + silence),
            State::Rejecting(..) => Some(self.moved_at + DRAIN),
            State::Draining(until, _) => Some(*until),
        }
    }

    pub(super) const fn idle_since(&self) -> Option<Instant> {
        match &self.state {
            State::Header(..) | State::Draining(..) => Some(self.moved_at),
            _ => None,
        }
    }

    /// Closes the connection. In the middle of an operation it is reset, so that the peer cannot take an end
    /// of the stream for the end of the bytes.
    pub(super) fn close(self) {
        if !matches!(self.state, State::Header(_, 0) | State::Draining(..)) {
            reset_on_close(&self.stream);
        }
    }

    pub(super) fn drive(&mut self, target: &mut Target, now: Instant) -> Turn {
        let mut budget = TURN_BYTES;
        let end = loop {
            let step = match &self.state {
                State::Header(..) => self.receive_header(target, now),
                State::Waiting(_) if target.takes_grant(self.name) => self.begin(),
                State::Waiting(operation) if operation.range.is_revoked() => Err(End::Reset),
                State::Waiting(_) if self.is_gone() => Err(End::Reset),
                State::Waiting(_) => Err(End::Blocked),
                State::Receiving(_) => self.receive_payload(target, &mut budget, now),
                State::Sending(..) => self.send_payload(target, &mut budget, now),
                State::Status(..) | State::Rejecting(..) => self.send_status(now),
                State::Draining(..) => self.drain(target, &mut budget),
            };
            if let Err(end) = step {
                break end;
            }
        };
        match end {
            End::Blocked | End::Budget => Turn::Wait(self.interest()),
            End::Close => Turn::Close,
            End::Reset => {
                reset_on_close(&self.stream);
                Turn::Close
            }
        }
    }

    /// What the next step needs of the socket.
    const fn interest(&self) -> Interest {
        match &self.state {
            State::Header(..) | State::Receiving(_) | State::Draining(..) => Interest::READ,
            State::Sending(..) | State::Status(..) | State::Rejecting(..) => {
                Interest { readable: false, writable: true }
            }
            State::Waiting(_) => Interest::NONE,
        }
    }

    /// Whether the peer has closed or reset the connection, which is reported even while nothing is asked.
    fn is_gone(&self) -> bool {
        match self.stream.take_error() {
            Ok(None) => match self.stream.peek(&mut [0]) {
                Ok(count) => count == 0,
                Err(error) => error.kind() != io::ErrorKind::WouldBlock,
            },
            _ => true,
        }
    }

    fn receive_header(&mut self, target: &mut Target, now: Instant) -> Result<(), End> {
        let State::Header(bytes, have) = &mut self.state else { return Ok(()) };
        let count = received((&self.stream).read(&mut bytes[*have..]))?;
        if *have == 0 {
            self.moved_at = now;
        }
        *have += count;
        if *have < REQUEST_BYTES {
            return Ok(());
        }
        let request = Request::parse(bytes);
        self.moved_at = now;
        let Some((range, offset)) = target.find(&request) else {
            // Version 1 has no other answer.
            if request.version == Version::V1 {
                self.state = State::Header([0; REQUEST_BYTES], 0);
                return Err(End::Close);
            }
            self.state = State::Rejecting(Status::Rejected.to_bytes(), 0);
            return Ok(());
        };
        self.used = true;
        self.state = State::Waiting(Operation { request, range, offset, done: 0 });
        if target.enter(self.name, request.len, now) { self.begin() } else { Ok(()) }
    }

    /// The operation was given room.
    fn begin(&mut self) -> Result<(), End> {
        let empty = State::Header([0; REQUEST_BYTES], 0);
        let State::Waiting(operation) = std::mem::replace(&mut self.state, empty) else { return Ok(()) };
        self.state = match (operation.request.op, operation.request.version) {
            (Op::Write, _) => State::Receiving(operation),
            (Op::Read, Version::V2) => State::Sending(operation, Status::Done.to_bytes(), 0),
            (Op::Read, Version::V1) => State::Sending(operation, [0; STATUS_BYTES], STATUS_BYTES),
        };
        Ok(())
    }

    fn receive_payload(&mut self, target: &mut Target, budget: &mut usize, now: Instant) -> Result<(), End> {
        let State::Receiving(operation) = &mut self.state else { return Ok(()) };
        let stream = &self.stream;
        let io = |memory| sys::receive(stream, &mut [], memory);
        let at_most = operation.left().min(*budget as u64);
        let at = operation.offset + operation.done;
        let count = received(operation.range.access_part(at, at_most, io).ok_or(End::Reset)?)?;
        operation.done += count as u64;
        self.moved_at = now;
        target.counters.moved(count);
        if operation.left() == 0 {
            let request = operation.request;
            self.state = match request.version {
                Version::V1 => State::Header([0; REQUEST_BYTES], 0),
                Version::V2 => State::Status(Status::Done.to_bytes(), 0),
            };
            target.leave(request.len);
            target.counters.done(Op::Write);
        }
        spend(budget, count)
    }

    fn send_payload(&mut self, target: &mut Target, budget: &mut usize, now: Instant) -> Result<(), End> {
        let State::Sending(operation, status, sent) = &mut self.state else { return Ok(()) };
        let stream = &self.stream;
        let head = &status[*sent..];
        let io = |memory| sys::send(stream, head, memory);
        let at_most = operation.left().min(*budget as u64);
        let at = operation.offset + operation.done;
        let count = was_sent(operation.range.access_part(at, at_most, io).ok_or(End::Reset)?)?;
        let of_head = count.min(head.len());
        *sent += of_head;
        operation.done += (count - of_head) as u64;
        self.moved_at = now;
        target.counters.moved(count - of_head);
        if operation.left() == 0 && *sent == STATUS_BYTES {
            let len = operation.request.len;
            self.state = State::Header([0; REQUEST_BYTES], 0);
            target.leave(len);
            target.counters.done(Op::Read);
            return spend(budget, count);
        }
        spend(budget, count)
    }

    fn send_status(&mut self, now: Instant) -> Result<(), End> {
        let (State::Status(bytes, sent) | State::Rejecting(bytes, sent)) = &mut self.state else {
            return Ok(());
        };
        *sent += was_sent(sys::send(&self.stream, &bytes[*sent..], Memory::NONE))?;
        if *sent < STATUS_BYTES {
            return Ok(());
        }
        self.moved_at = now;
        self.state = match &self.state {
            State::Rejecting(..) => {
                // This fails only when the connection is gone, which the next read reports.
                let _ = self.stream.shutdown(Shutdown::Write);
                State::Draining(now + DRAIN, DRAINED_BYTES_MAX)
            }
            _ => State::Header([0; REQUEST_BYTES], 0),
        };
        Ok(())
    }

    fn drain(&mut self, target: &mut Target, budget: &mut usize) -> Result<(), End> {
        let State::Draining(_, left) = &mut self.state else { return Ok(()) };
        let count = received((&self.stream).read(&mut target.sink))?;
        *left = left.saturating_sub(count as u64);
        if *left == 0 {
            return Err(End::Reset);
        }
        spend(budget, count)
    }
}

/// Counts bytes against the budget of a turn.
fn spend(budget: &mut usize, bytes: usize) -> Result<(), End> {
    *budget = budget.saturating_sub(bytes);
    if *budget == 0 { Err(End::Budget) } else { Ok(()) }
}

fn received(result: io::Result<usize>) -> Result<usize, End> {
    match result {
        // The peer has finished.
        Ok(0) => Err(End::Close),
        Ok(count) => Ok(count),
        Err(error) => Err(ended(&error)),
    }
}

fn was_sent(result: io::Result<usize>) -> Result<usize, End> {
    result.map_err(|error| ended(&error))
}

fn ended(error: &io::Error) -> End {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => End::Blocked,
        _ => End::Close,
    }
}
