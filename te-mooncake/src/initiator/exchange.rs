//! One request on a connection and its answer.

use std::io;
use std::net::TcpStream;

use te_core::{Error, ErrorKind, Op};
use te_fabric::net::{error_of, peer_dead};

use crate::header::{REQUEST_BYTES, Request, STATUS_BYTES, Status, Version};
use crate::sys::{self, Memory};

/// Bytes that one exchange moves before others have their turn.
const TURN_BYTES: u64 = 1 << 20;

/// A request, and how much of it and of its answer was moved.
#[derive(Debug)]
pub(crate) struct Exchange {
    /// The operation, in the table of the transport.
    pub(crate) slot: u32,
    request: Request,
    memory: Memory,
    head: [u8; REQUEST_BYTES],
    /// Bytes of the request and, for a WRITE, of the payload behind it that the socket has taken.
    sent: u64,
    status: [u8; STATUS_BYTES],
    /// Bytes of the status and, for a READ, of the payload behind it that were received.
    received: u64,
}

/// How far an exchange is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Advance {
    /// It goes on when the socket can be written (`true`) or read.
    Pending(bool),
    /// The answer is complete. Of a WRITE of version 1: the socket has taken the last byte.
    Done,
    /// The target does not serve the range; nothing was or will be moved.
    Rejected,
}

impl Exchange {
    /// The exchange for a request, whose payload comes from or goes to `memory`.
    pub(crate) fn new(slot: u32, request: Request, memory: Memory) -> Self {
        debug_assert_eq!(request.len, memory.len() as u64, "the two ends of a slice are equally long");
        let (head, status) = (request.to_bytes(), [0; STATUS_BYTES]);
        Self { slot, request, memory, head, sent: 0, status, received: 0 }
    }

    /// Whether the target cannot know of the request: no byte of it was sent.
    pub(crate) const fn is_unsent(&self) -> bool {
        self.sent == 0
    }

    /// Whether bytes of a WRITE may change the target's memory. None do while only the request was sent.
    pub(crate) const fn may_land(&self) -> bool {
        self.sent > REQUEST_BYTES as u64
    }

    /// Whether the target has answered anything.
    pub(crate) const fn is_answered(&self) -> bool {
        self.received > 0
    }

    /// Bytes that were moved in both directions.
    pub(crate) const fn moved(&self) -> u64 {
        self.sent + self.received
    }

    pub(crate) const fn request(&self) -> &Request {
        &self.request
    }

    /// Sends and receives what is possible without waiting.
    ///
    /// # Errors
    /// The connection is of no further use: `PeerDead`, or `Protocol` for what is no answer.
    pub(crate) fn advance(&mut self, socket: &TcpStream) -> Result<Advance, Error> {
        let mut blocked = false;
        if self.sent < self.to_send() {
            blocked = match self.send(socket) {
                Ok(blocked) => blocked,
                // A target that refuses a WRITE closes; its status may have arrived before.
                Err(error) => match self.receive(socket) {
                    Ok(Some(advance)) => return Ok(advance),
                    Err(answer) if answer.kind == ErrorKind::Protocol => return Err(answer),
                    _ => return Err(error),
                },
            };
        }
        if let Some(advance) = self.receive(socket)? {
            return Ok(advance);
        }
        let all_sent = self.sent == self.to_send();
        if all_sent && self.received == self.to_receive() {
            return Ok(Advance::Done);
        }
        Ok(Advance::Pending(blocked && !all_sent))
    }

    const fn to_send(&self) -> u64 {
        REQUEST_BYTES as u64 + if matches!(self.request.op, Op::Write) { self.request.len } else { 0 }
    }

    const fn status_bytes(&self) -> u64 {
        if matches!(self.request.version, Version::V2) { STATUS_BYTES as u64 } else { 0 }
    }

    const fn to_receive(&self) -> u64 {
        self.status_bytes() + if matches!(self.request.op, Op::Read) { self.request.len } else { 0 }
    }

    /// Sends; true when there is more to send.
    fn send(&mut self, socket: &TcpStream) -> Result<bool, Error> {
        let until = self.to_send().min(self.sent + TURN_BYTES);
        while self.sent < until {
            let head = self.head.get(self.sent as usize..).unwrap_or(&[]);
            let memory = match self.request.op {
                Op::Read => Memory::NONE,
                Op::Write => self.memory.from(self.sent.saturating_sub(REQUEST_BYTES as u64), TURN_BYTES),
            };
            match sys::send(socket, head, memory) {
                Ok(0) => return Err(ErrorKind::PeerDead.into()),
                Ok(count) => self.sent += count as u64,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(peer_dead(error_of(&error))),
            }
        }
        Ok(self.sent < self.to_send())
    }

    /// Receives. `Some` when the exchange has ended by what was received.
    fn receive(&mut self, socket: &TcpStream) -> Result<Option<Advance>, Error> {
        let until = self.to_receive().min(self.received + TURN_BYTES);
        while self.received < until {
            let status_bytes = self.status_bytes();
            let head = self.status.get_mut(self.received as usize..).filter(|_| status_bytes > 0);
            let payload_at = self.received.saturating_sub(status_bytes);
            let memory = match self.request.op {
                Op::Read => self.memory.from(payload_at, TURN_BYTES),
                Op::Write => Memory::NONE,
            };
            let count = match sys::receive(socket, head.unwrap_or(&mut []), memory) {
                Ok(0) => return Err(Error::with_code(ErrorKind::PeerDead, libc::ECONNRESET)),
                Ok(count) => count as u64,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(peer_dead(error_of(&error))),
            };
            let before = self.received;
            self.received += count;
            if before < status_bytes && self.received >= status_bytes {
                self.check_status()?;
                if Status::parse(&self.status) == Some(Status::Rejected) {
                    return Ok(Some(Advance::Rejected));
                }
            }
        }
        Ok(None)
    }

    /// A status other than success or refusal is no answer to this request. Neither is success before the
    /// last byte of a WRITE was sent: a target of version 1 sends bytes where version 2 expects a status.
    fn check_status(&self) -> Result<(), Error> {
        match Status::parse(&self.status) {
            Some(Status::Rejected) => Ok(()),
            Some(Status::Done) if self.sent == self.to_send() => Ok(()),
            Some(Status::Other(code)) => Err(Error::with_code(ErrorKind::Protocol, code.cast_signed())),
            Some(Status::Done) | None => Err(ErrorKind::Protocol.into()),
        }
    }
}
