//! A side channel with its role: ours to a peer, or a peer's to us.

use std::collections::VecDeque;

use te_core::Instant;

use crate::channel::Channel;
use crate::exchange::{Kind, PortBody, QpEntry};
use crate::verbs::QpHandle;

/// The names of what epoll tells about beside connections; no connection has them.
pub(crate) const LISTENER: u64 = u64::MAX;
/// The completion channel.
pub(crate) const CQ: u64 = u64::MAX - 1;
/// The device's asynchronous events.
pub(crate) const EVENTS: u64 = u64::MAX - 2;
/// Queue pairs that were being connected.
pub(crate) const CONNECTS: u64 = u64::MAX - 3;

/// One side channel.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) channel: Channel,
    /// Given up then: it does not come up, or an answer is overdue.
    pub(crate) deadline: Option<Instant>,
    pub(crate) role: Role,
}

/// Who opened it.
#[derive(Debug)]
pub(crate) enum Role {
    /// We did.
    Out(Out),
    /// A peer did.
    In(In),
}

/// How far a side channel of ours is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Connecting,
    Greeting,
    Up,
}

/// A side channel of ours.
#[derive(Debug)]
pub(crate) struct Out {
    pub(crate) endpoint: u32,
    /// Which of the endpoint's addresses it goes to.
    pub(crate) address: u8,
    pub(crate) phase: Phase,
    /// Questions without an answer, the handshake included.
    pub(crate) asked: u32,
    /// Those after the handshake: answers come in the order of the questions.
    pub(crate) open: VecDeque<(u64, Kind)>,
    /// Some question was answered.
    pub(crate) answered: bool,
}

/// A side channel of a peer's.
#[derive(Debug, Default)]
pub(crate) struct In {
    /// What late events know it by.
    pub(crate) name: u32,
    /// Whose, once it has said so.
    pub(crate) session: Option<u64>,
    /// Which sessions are one process's, once it has said so.
    pub(crate) identity: u64,
    /// Which connection of the session it is.
    pub(crate) number: u32,
    /// It has shown the key of some region: whoever has none gets no queue pair.
    pub(crate) proven: bool,
    /// Its next frame offers queue pairs, and waits for the next poll.
    pub(crate) waits: bool,
    /// The queue pairs that we hold for it.
    pub(crate) qps: Vec<PeerQp>,
    /// The answer to its last offer, once its queue pairs are connected. What it asks meanwhile waits.
    pub(crate) accepting: Option<Accepting>,
    /// Everything has been said; it goes when that has left.
    pub(crate) closing: bool,
}

/// An offer of a peer's whose queue pairs are being connected.
#[derive(Debug)]
pub(crate) struct Accepting {
    pub(crate) id: u64,
    pub(crate) port: PortBody,
    pub(crate) entries: Vec<QpEntry>,
}

/// A peer's queue pair that could not be put out of action.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Undead {
    pub(crate) session: u64,
    pub(crate) identity: u64,
    pub(crate) handle: QpHandle,
}

/// A queue pair for a peer's work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerQp {
    pub(crate) generation: u32,
    pub(crate) handle: QpHandle,
}

impl Connection {
    /// The queue pairs that we hold for the peer that opened it.
    pub(crate) fn peer_qps(&self) -> impl Iterator<Item = QpHandle> + '_ {
        let qps = match &self.role {
            Role::In(role) => role.qps.as_slice(),
            Role::Out(_) => &[],
        };
        qps.iter().map(|qp| qp.handle)
    }
}
