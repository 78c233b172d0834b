//! One control connection that a peer opened: who it is, what it holds here, and what it is answered.

use core::time::Duration;

use te_core::Instant;
use zerocopy::IntoBytes;

use crate::io::channel::Channel;
use crate::sys::verbs::QpHandle;
use crate::wire::{Header, Kind, PROTOCOL, PortBody, QpEntry, Refusal, Status, Welcome};

/// A control connection of a peer.
#[derive(Debug)]
pub(super) struct Inbound {
    pub(super) channel: Channel,
    /// Closed then, unless the peer has said who it is.
    pub(super) deadline: Option<Instant>,
    /// What late events know it by.
    pub(super) name: u32,
    /// Whose, once it has said so.
    pub(super) session: Option<u64>,
    /// Which sessions are one process's, once it has said so.
    pub(super) identity: u64,
    /// Which connection of the session it is.
    pub(super) number: u32,
    /// It has shown the key of some region: a peer that has none gets no queue pair.
    pub(super) proven: bool,
    /// Its next frame offers queue pairs, and waits for the next poll.
    pub(super) waits: bool,
    /// The queue pairs that we hold for it.
    pub(super) qps: Vec<PeerQp>,
    /// The answer to its last offer, once its queue pairs are connected. What it asks meanwhile waits.
    pub(super) accepting: Option<Accepting>,
    /// The last answer was written; the connection is closed when that has left.
    pub(super) closing: bool,
}

/// An offer of a peer's, to be answered when its queue pairs are connected.
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
    /// A connection that has said nothing yet.
    pub(super) fn new(channel: Channel, name: u32, deadline: Instant) -> Self {
        Self {
            channel,
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

    /// Whether it is a connection of the process with this identity.
    pub(super) fn is_of(&self, identity: u64) -> bool {
        self.session.is_some() && self.identity == identity
    }

    /// Says why, and ends the connection when that has left.
    pub(super) fn turn_away(&mut self, status: Status) {
        if self.session.is_none() {
            self.channel.push(&[welcome(status, 0).as_bytes()]);
        } else {
            let header = Header::new(Kind::Error, 0, 0);
            self.channel.push(&[header.as_bytes(), Refusal::new(status).as_bytes()]);
        }
        self.closing = true;
    }

    /// Answers an offer. False: there is no room for the answer.
    pub(super) fn accept(&mut self, accepting: &Accepting) -> bool {
        let Accepting { id, port, entries } = accepting;
        let header = Header::new(Kind::Accept, entries.len() as u16, *id);
        self.channel.push(&[header.as_bytes(), port.as_bytes(), entries.as_bytes()])
    }

    /// Refuses a question.
    pub(super) fn refuse(&mut self, id: u64, status: Status) {
        let header = Header::new(Kind::Refused, 0, id);
        self.channel.push(&[header.as_bytes(), Refusal::new(status).as_bytes()]);
    }

    /// We were away ourselves for so long: the peer's silence is not its fault.
    pub(super) fn forgive(&mut self, away: Duration) {
        self.deadline = self.deadline.map(|at| at + away);
    }
}

/// The handshake's answer. A refusal names no incarnation.
pub(super) fn welcome(status: Status, incarnation: u64) -> Welcome {
    PROTOCOL.welcome(status as u32, incarnation, 0)
}
