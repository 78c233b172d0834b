//! One peer, as the initiator sees it: its addresses, the connections to it, the pieces and fences that wait
//! for it, and when it was last heard from.

use std::collections::VecDeque;

use te_core::Instant;
use te_fabric::peer::{Contact, Fence};
use te_fabric::{Export, Queue};

use crate::config::CONNECTIONS_PER_PEER_MAX;
use crate::operation::Piece;

/// A fence that was sent, and the answers that it waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    /// The number that its answers carry. Each time a fence is sent it gets another one, because an answer to
    /// an earlier FENCE is about other connections.
    pub(crate) id: u64,
    /// Connections whose answer is missing: bit N stands for number N.
    pub(crate) connections: u32,
}

/// One peer.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(crate) contact: Contact,
    /// Index of each connection in the initiator's table, by the connection's number.
    pub(crate) connections: [Option<u32>; CONNECTIONS_PER_PEER_MAX as usize],
    /// Slices with pieces that no connection has taken.
    pub(crate) pending: Queue,
    /// Slices on memory of a device with pieces that have no staging slot yet.
    pub(crate) unstaged: Queue,
    /// Pieces to frame before those in `pending`: those that have a staging slot, and those that a connection
    /// took and the target did not accept.
    pub(crate) ready: VecDeque<Piece>,
    pub(crate) fences: Vec<Fence<Sent>>,
    /// Slices that have not completed.
    operations: u32,
    /// Regions of the peer that are attached.
    remote_regions: u32,
    /// Since when no connection could be opened because this transport or the peer has as many as it may.
    pub(crate) full_since: Option<Instant>,
    /// When the peer was last heard from; `None` while no answer is due.
    pub(crate) last_heard: Option<Instant>,
    /// The peer is in the list of those that have something to send.
    listed: bool,
}

impl Endpoint {
    pub(crate) fn new(export: &Export) -> Self {
        Self {
            contact: Contact::new(export),
            connections: [None; CONNECTIONS_PER_PEER_MAX as usize],
            pending: Queue::new(),
            unstaged: Queue::new(),
            ready: VecDeque::new(),
            fences: Vec::new(),
            operations: 0,
            remote_regions: 0,
            full_since: None,
            last_heard: None,
            listed: false,
        }
    }

    /// Another region of the peer is attached, from this export.
    pub(super) fn attached(&mut self, export: &Export) {
        let connecting = self.connection_count() > 0;
        self.contact.learn(export, connecting);
        self.remote_regions += 1;
    }

    /// A region of the peer is no longer attached.
    pub(super) fn detached(&mut self) {
        debug_assert!(self.remote_regions > 0, "a remote region is detached once");
        self.remote_regions -= 1;
    }

    /// A slice for the peer was accepted.
    pub(crate) const fn slice_accepted(&mut self) {
        self.operations += 1;
    }

    /// A slice for the peer has completed.
    pub(crate) fn slice_completed(&mut self) {
        debug_assert!(self.operations > 0, "a slice completes once");
        self.operations -= 1;
        if !self.is_awaited() {
            self.last_heard = None;
        }
    }

    /// Whether the peer has to be put into the list of those with something to send. From now on it counts as
    /// listed.
    pub(super) const fn enlist(&mut self) -> bool {
        !core::mem::replace(&mut self.listed, true)
    }

    /// The peer was taken off that list.
    pub(super) const fn delist(&mut self) {
        self.listed = false;
    }

    /// Whether an answer of the peer is due.
    pub(crate) fn is_awaited(&self) -> bool {
        self.operations > 0 || !self.fences.is_empty()
    }

    /// Whether something waits to be put on a connection.
    pub(crate) fn has_work(&self) -> bool {
        !self.pending.is_empty()
            || !self.ready.is_empty()
            || self.fences.iter().any(|fence| fence.sent.is_none())
    }

    /// Whether no remote region, slice or fence needs the peer any more.
    pub(crate) fn is_idle(&self) -> bool {
        self.remote_regions == 0 && !self.is_awaited()
    }

    pub(crate) fn connection_count(&self) -> usize {
        self.connections.iter().flatten().count()
    }

    /// The first connection number below `connections_max` without a connection.
    pub(crate) fn vacant_connection(&self, connections_max: u8) -> Option<usize> {
        self.connections[..usize::from(connections_max)].iter().position(Option::is_none)
    }

    /// A connection to the address with this number is up: backoff and shortage of connections have ended.
    pub(crate) fn connected(&mut self, address: u8) {
        self.contact.welcomed(address);
        self.full_since = None;
    }

    /// A connection has ended. Its answers will not come, so the fences that wait for them are sent again.
    pub(crate) fn connection_lost(&mut self, number: usize) {
        self.connections[number] = None;
        for fence in &mut self.fences {
            if fence.sent.is_some_and(|sent| sent.connections & 1 << number != 0) {
                fence.sent = None;
            }
        }
    }

    /// The answer `id` to a FENCE has arrived on connection `number`. Returns the fence when this was its
    /// last missing answer.
    pub(super) fn fence_answered(&mut self, number: u8, id: u64) -> Option<Fence<Sent>> {
        let is = |fence: &Fence<Sent>| fence.sent.is_some_and(|sent| sent.id == id);
        let at = self.fences.iter().position(is)?;
        let sent = self.fences[at].sent.as_mut()?;
        sent.connections &= !(1 << number);
        (sent.connections == 0).then(|| self.fences.swap_remove(at))
    }
}
