//! One control connection of ours: the handshake, requests, and the order of answers.

use std::collections::VecDeque;
use std::io;

use te_core::{Error, ErrorKind, Instant};
use te_fabric::net::error_of;
use zerocopy::IntoBytes;

use crate::io::connection::Connection;
use crate::wire::{self, Header, Hello, Kind, Response, Step, Welcome};

/// The state of a control connection of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Connecting,
    Greeting,
    Up,
}

/// Why a control connection of ours ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionEnd {
    /// It was up, and broke or was closed.
    Lost(Error),
    /// It was never up.
    Refused(Error),
    /// We closed it, without a failure.
    Dropped,
}

/// A frame from the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Frame<'a> {
    /// The answer of the handshake.
    Welcome(Welcome),
    /// Every later frame.
    Response(Response<'a>),
}

/// A control connection of ours.
#[derive(Debug)]
pub(crate) struct Outbound {
    connection: Connection,
    peer: u32,
    /// Number of the peer's address.
    address: u8,
    phase: Phase,
    /// When it is closed, unless it is up and no answer is overdue by then.
    deadline: Option<Instant>,
    /// Requests without an answer, the handshake included.
    unanswered: u32,
    /// Id and kind of each request after the handshake. Answers come in their order.
    open: VecDeque<(u64, Kind)>,
    /// Some request was answered.
    answered: bool,
}

impl Outbound {
    /// A connection to address number `address` of `peer` that is being made.
    pub(crate) fn new(mut connection: Connection, peer: u32, address: u8, deadline: Instant) -> Self {
        connection.dialing = true;
        Self {
            connection,
            peer,
            address,
            phase: Phase::Connecting,
            deadline: Some(deadline),
            unanswered: 1,
            open: VecDeque::new(),
            answered: false,
        }
    }

    /// Requests without an answer, the handshake included.
    pub(crate) const fn unanswered(&self) -> u32 {
        self.unanswered
    }

    /// Whether there is room for a request of any length.
    pub(crate) fn has_room(&self) -> bool {
        self.connection.has_room()
    }

    /// Writes a request with `count` entries, if there is room.
    pub(crate) fn request(&mut self, kind: Kind, count: u16, id: u64, body: [&[u8]; 2]) {
        if self.connection.push(&[Header::new(kind, count, id).as_bytes(), body[0], body[1]]) {
            self.open.push_back((id, kind));
            self.unanswered += 1;
        }
    }

    pub(crate) const fn peer(&self) -> u32 {
        self.peer
    }

    pub(super) const fn address(&self) -> u8 {
        self.address
    }

    pub(super) const fn has_answered(&self) -> bool {
        self.answered
    }

    pub(super) const fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    pub(super) const fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    pub(super) const fn connection_mut(&mut self) -> &mut Connection {
        &mut self.connection
    }

    /// Whether the connection was just made, so that the handshake begins. `Ok(false)`: it is still being
    /// made, or the handshake has begun.
    pub(super) fn is_made(&mut self) -> Result<bool, ConnectionEnd> {
        if self.phase != Phase::Connecting {
            return Ok(false);
        }
        match self.connection.stream.take_error() {
            Ok(None) => Ok(self.connection.stream.peer_addr().is_ok()),
            Ok(Some(error)) | Err(error) => Err(ConnectionEnd::Refused(error_of(&error))),
        }
    }

    /// Whether the connection is still being made.
    pub(super) fn is_connecting(&self) -> bool {
        self.phase == Phase::Connecting
    }

    pub(super) fn greet(&mut self, hello: &Hello) {
        self.connection.dialing = false;
        self.connection.push(&[hello.as_bytes()]);
        self.phase = Phase::Greeting;
    }

    /// Receives what has arrived. True: at least one byte.
    pub(super) fn receive(&mut self) -> Result<bool, ConnectionEnd> {
        self.connection.receive().map_err(|error| self.broken(&error))
    }

    /// Sends as much as the socket takes.
    pub(super) fn flush(&mut self) -> Result<(), ConnectionEnd> {
        self.connection.flush().map_err(|error| self.broken(&error))
    }

    /// Reports that the peer has closed the connection, after every frame before that was handled.
    pub(super) fn check_finished(&self) -> Result<(), ConnectionEnd> {
        match self.connection.finished {
            true => Err(self.lost(Error::with_code(ErrorKind::PeerDead, libc::ECONNRESET))),
            false => Ok(()),
        }
    }

    /// The end of the connection by this error, which depends on whether it was up.
    pub(super) fn lost(&self, error: Error) -> ConnectionEnd {
        match self.phase {
            Phase::Up => ConnectionEnd::Lost(error),
            Phase::Connecting | Phase::Greeting => ConnectionEnd::Refused(error),
        }
    }

    fn broken(&self, error: &io::Error) -> ConnectionEnd {
        self.lost(error_of(error))
    }

    /// The next frame and its length; `None`: it has not arrived completely.
    pub(super) fn frame(&self) -> Result<Option<(Frame<'_>, usize)>, ConnectionEnd> {
        let bytes = self.connection.bytes();
        let step = if self.phase == Phase::Greeting {
            wire::parse_welcome(bytes).map(|step| match step {
                Step::Need(_) => None,
                Step::Frame(welcome, used) => Some((Frame::Welcome(welcome), used)),
            })
        } else {
            wire::parse_response(bytes).map(|step| match step {
                Step::Need(_) => None,
                Step::Frame(response, used) => Some((Frame::Response(response), used)),
            })
        };
        step.map_err(|_| self.lost(ErrorKind::Protocol.into()))
    }

    /// The peer has welcomed us.
    pub(super) fn welcomed(&mut self) {
        self.phase = Phase::Up;
        self.unanswered = 0;
        self.deadline = None;
    }

    /// Notes the answer to the oldest open request. `until`: when the next answer is overdue. False: it does
    /// not answer that request.
    pub(super) fn answered(&mut self, kind: Kind, id: u64, until: Instant) -> bool {
        let Some((open, request)) = self.open.pop_front() else { return false };
        let fits = match kind {
            Kind::Accept => request == Kind::Connect,
            Kind::Resolved => request == Kind::Resolve,
            Kind::Fenced => request == Kind::Fence,
            Kind::Refused => matches!(request, Kind::Connect | Kind::Resolve),
            _ => false,
        };
        if !fits || open != id || self.unanswered == 0 {
            return false;
        }
        self.answered = true;
        self.unanswered -= 1;
        self.deadline = (self.unanswered > 0).then_some(until);
        true
    }
}

/// The kind and the id of an answer; `None`: the frame needs no request.
pub(super) const fn answer_of(response: &Response<'_>) -> Option<(Kind, u64)> {
    match *response {
        Response::Accept { id, .. } => Some((Kind::Accept, id)),
        Response::Resolved { id, .. } => Some((Kind::Resolved, id)),
        Response::Fenced { id } => Some((Kind::Fenced, id)),
        Response::Refused { id, .. } => Some((Kind::Refused, id)),
        Response::Withdrawn { .. } | Response::Error { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{MAGIC, PROTOCOL, VERSION};
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use te_fabric::Interest;
    use zerocopy::little_endian::{U16, U32, U64};

    const LATER: Instant = Instant::from_millis(100);

    /// A connection that was made, and its other end.
    fn made() -> (Outbound, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let stream = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
        stream.set_nonblocking(true).expect("a socket");
        let (there, _) = listener.accept().expect("it was connected to");
        (Outbound::new(Connection::new(stream, Interest::BOTH), 3, 1, LATER), there)
    }

    fn hello() -> Hello {
        Hello {
            magic: MAGIC,
            version: U16::new(VERSION),
            reserved: U16::ZERO,
            connection: U32::new(1),
            session: U64::new(2),
            target: U64::new(3),
            identity: U64::new(4),
            reserved_end: U64::ZERO,
        }
    }

    fn receive(out: &mut Outbound) {
        while !out.receive().expect("the connection is there") {
            std::thread::yield_now();
        }
    }

    #[test]
    fn handshake_requests_and_answers_come_in_order() {
        let (mut out, mut there) = made();
        assert_eq!(out.is_made(), Ok(true));
        out.greet(&hello());
        assert_eq!((out.flush(), out.is_made(), out.is_connecting()), (Ok(()), Ok(false), false));
        let mut greeting = [0; 48];
        there.read_exact(&mut greeting).expect("the greeting");
        assert_eq!(greeting, hello().as_bytes());
        assert_eq!(out.frame(), Ok(None));

        let welcome = PROTOCOL.welcome(0, 3, 0);
        there.write_all(welcome.as_bytes()).expect("room");
        receive(&mut out);
        assert_eq!(out.frame(), Ok(Some((Frame::Welcome(welcome), 32))));
        out.connection_mut().consume(32);
        out.welcomed();
        assert_eq!((out.unanswered(), out.deadline()), (0, None));

        out.request(Kind::Resolve, 0, 7, [&[0; 24], &[]]);
        out.request(Kind::Fence, 0, 8, [&[], &[]]);
        assert_eq!(out.unanswered(), 2);
        assert!(out.answered(Kind::Refused, 7, LATER) && out.has_answered());
        assert_eq!(out.deadline(), Some(LATER));
        assert!(out.answered(Kind::Fenced, 8, LATER));
        assert_eq!((out.unanswered(), out.deadline()), (0, None));
        assert!(!out.answered(Kind::Fenced, 9, LATER), "there was no such request");
    }

    #[test]
    fn an_answer_to_another_request_is_refused() {
        for (kind, id) in [(Kind::Accept, 7), (Kind::Resolved, 8), (Kind::Fenced, 7)] {
            let (mut out, _there) = made();
            out.greet(&hello());
            out.welcomed();
            out.request(Kind::Resolve, 0, 7, [&[0; 24], &[]]);
            assert!(!out.answered(kind, id, LATER), "{kind:?} {id}");
        }
    }

    #[test]
    fn the_end_of_a_connection_depends_on_whether_it_was_up() {
        let error = Error::new(ErrorKind::PeerDead);
        let (mut out, there) = made();
        assert_eq!(out.lost(error), ConnectionEnd::Refused(error));
        out.greet(&hello());
        assert_eq!(out.lost(error), ConnectionEnd::Refused(error));
        out.welcomed();
        assert_eq!((out.lost(error), out.check_finished()), (ConnectionEnd::Lost(error), Ok(())));
        drop(there);
        while out.check_finished().is_ok() {
            let _ = out.receive();
        }
        let reset = Error::with_code(ErrorKind::PeerDead, libc::ECONNRESET);
        assert_eq!(out.check_finished(), Err(ConnectionEnd::Lost(reset)));
    }
}
