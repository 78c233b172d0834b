//! One control connection: a socket, the bytes to send, and the bytes that have arrived. It does not
//! interpret them.

use std::io::{self, Read, Write};
use std::net::TcpStream;

use te_fabric::Interest;

use crate::wire::FRAME_BYTES_MAX;

/// The most bytes that wait to be sent. A peer that does not read is write-blocked: its further requests
/// stay unanswered.
const OUTBOX_BYTES_MAX: usize = 16 << 10;
const INBOX_BYTES: usize = 4 * FRAME_BYTES_MAX;

/// A socket with room for several frames in each direction, allocated once.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) stream: TcpStream,
    inbox: Box<[u8]>,
    from: usize,
    until: usize,
    outbox: Vec<u8>,
    sent: usize,
    /// The peer has finished sending.
    pub(crate) finished: bool,
    /// The connection is being made; the socket is writable when that has ended.
    pub(crate) dialing: bool,
    /// The readiness that epoll watches for.
    pub(crate) interest: Interest,
}

impl Connection {
    pub(crate) fn new(stream: TcpStream, interest: Interest) -> Self {
        Self {
            stream,
            inbox: vec![0; INBOX_BYTES].into(),
            from: 0,
            until: 0,
            outbox: Vec::with_capacity(OUTBOX_BYTES_MAX),
            sent: 0,
            finished: false,
            dialing: false,
            interest,
        }
    }

    /// The bytes that have arrived and are not consumed.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.inbox[self.from..self.until]
    }

    pub(crate) fn consume(&mut self, bytes: usize) {
        self.from = (self.from + bytes).min(self.until);
        if self.from == self.until {
            (self.from, self.until) = (0, 0);
        }
    }

    /// Receives as many bytes as are there and fit. True: at least one.
    ///
    /// # Errors
    /// The system's: the connection is broken.
    pub(crate) fn receive(&mut self) -> io::Result<bool> {
        if self.from > 0 {
            self.inbox.copy_within(self.from..self.until, 0);
            (self.from, self.until) = (0, self.until - self.from);
        }
        if self.finished || self.until == self.inbox.len() {
            return Ok(false);
        }
        match self.stream.read(&mut self.inbox[self.until..]) {
            Ok(0) => {
                self.finished = true;
                Ok(false)
            }
            Ok(count) => {
                self.until += count;
                Ok(true)
            }
            Err(error) if is_later(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether a frame of any length can be pushed.
    pub(crate) fn has_room(&self) -> bool {
        self.outbox.len() + FRAME_BYTES_MAX <= OUTBOX_BYTES_MAX
    }

    /// Puts a frame into the outbox. False: there is no room, and nothing was put.
    pub(crate) fn push(&mut self, parts: &[&[u8]]) -> bool {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        if self.outbox.len() + bytes > OUTBOX_BYTES_MAX {
            return false;
        }
        parts.iter().for_each(|part| self.outbox.extend_from_slice(part));
        true
    }

    /// Sends as much of the outbox as the socket takes.
    ///
    /// # Errors
    /// The system's: the connection is gone.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        while self.sent < self.outbox.len() {
            match self.stream.write(&self.outbox[self.sent..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => self.sent += count,
                Err(error) if is_later(&error) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        self.outbox.clear();
        self.sent = 0;
        Ok(())
    }

    /// The readiness to watch for.
    pub(crate) fn wanted(&self) -> Interest {
        Interest {
            readable: !self.finished && self.until - self.from < self.inbox.len(),
            writable: self.dialing || !self.outbox.is_empty(),
        }
    }
}

fn is_later(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
