//! One control connection that a peer opened: the peer's session and identity, its queue pairs, and answers.

use core::time::Duration;

use te_core::Instant;
use zerocopy::IntoBytes;

use crate::io::connection::Connection;
use crate::sys::verbs::QpHandle;
use crate::wire::{Header, Kind, PROTOCOL, PortBody, QpEntry, Refusal, Status, Welcome};

/// A control connection of a peer.
#[derive(Debug)]
pub(super) struct Inbound {
    pub(super) connection: Connection,
    /// When it is closed, unless the handshake has succeeded by then.
    pub(super) deadline: Option<Instant>,
    /// Its name, which is not used again for another connection.
    pub(super) name: u32,
    /// The session in its HELLO; `None`: the handshake has not succeeded yet.
    pub(super) session: Option<u64>,
    /// The identity in its HELLO.
    pub(super) identity: u64,
    /// Its number among the connections of the session.
    pub(super) number: u32,
    /// The peer has shown the key of some region. Without one it gets no queue pair.
    pub(super) proven: bool,
    /// Its next frame offers queue pairs, and waits for the next poll.
    pub(super) waits: bool,
    /// The queue pairs that are held for it.
    pub(super) qps: Vec<PeerQp>,
    /// The answer to its last offer, while its queue pairs are being connected. Its later frames wait.
    pub(super) accepting: Option<Accepting>,
    /// The last answer was written. The connection is closed when it was sent.
    pub(super) closing: bool,
}

/// The answer to an offer of a peer, sent when its queue pairs are connected.
#[derive(Debug)]
pub(super) struct Accepting {
    pub(super) id: u64,
    pub(super) port: PortBody,
    pub(super) entries: Vec<QpEntry>,
}

/// A queue pair for a peer's work.
#[derive(Clone, Copy, Debug)]
pub(super) struct PeerQp {
    pub(super) generation: u32,
    pub(super) handle: QpHandle,
}

impl Inbound {
    /// A connection before its handshake.
    pub(super) fn new(connection: Connection, name: u32, deadline: Instant) -> Self {
        Self {
            connection,
            deadline: Some(deadline),
            name,
            session: None,
            identity: 0,
            number: 0,
            proven: false,
            waits: false,
            qps: Vec::new(),
            accepting: None,
            closing: false,
        }
    }

    /// Whether the peer has this identity.
    pub(super) fn is_of(&self, identity: u64) -> bool {
        self.session.is_some() && self.identity == identity
    }

    /// Sends the reason, and closes the connection afterwards.
    pub(super) fn refuse_connection(&mut self, status: Status) {
        if self.session.is_none() {
            self.connection.push(&[welcome(status, 0).as_bytes()]);
        } else {
            let header = Header::new(Kind::Error, 0, 0);
            self.connection.push(&[header.as_bytes(), Refusal::new(status).as_bytes()]);
        }
        self.closing = true;
    }

    /// Answers an offer. False: there is no room for the answer.
    pub(super) fn accept(&mut self, accepting: &Accepting) -> bool {
        let Accepting { id, port, entries } = accepting;
        let header = Header::new(Kind::Accept, entries.len() as u16, *id);
        self.connection.push(&[header.as_bytes(), port.as_bytes(), entries.as_bytes()])
    }

    /// Refuses a request; the connection goes on.
    pub(super) fn refuse(&mut self, id: u64, status: Status) {
        let header = Header::new(Kind::Refused, 0, id);
        self.connection.push(&[header.as_bytes(), Refusal::new(status).as_bytes()]);
    }

    /// Extends its deadline by the time in which this process was not polled.
    pub(super) fn forgive(&mut self, away: Duration) {
        self.deadline = self.deadline.map(|at| at + away);
    }
}

/// The answer of the handshake. A refusal names no incarnation.
pub(super) fn welcome(status: Status, incarnation: u64) -> Welcome {
    PROTOCOL.welcome(status as u32, incarnation, 0)
}
