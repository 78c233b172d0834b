//! One peer, as an initiator sees it: its addresses, the connections to it, what waits for them, its fences
//! and its pulse.

use std::collections::VecDeque;

use te_core::Instant;
use te_fabric::peer::{Contact, Fence};
use te_fabric::{Export, Queue};

use crate::config::CONNECTIONS_PER_PEER_MAX;
use crate::operation::Piece;

/// How a fence was sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    /// What its answers carry. Another one each time it is sent: an answer to an earlier FENCE speaks of
    /// other connections.
    pub(crate) id: u64,
    /// Connections (by number) whose answer is missing.
    pub(crate) connections: u32,
}

/// One peer.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(crate) contact: Contact,
    /// Index of each connection in the initiator's table.
    pub(crate) connections: [Option<u32>; CONNECTIONS_PER_PEER_MAX as usize],
    /// Slices with pieces that no connection has taken.
    pub(crate) pending: Queue,
    /// Slices with pieces of a device's memory that have no slot yet.
    pub(crate) unstaged: Queue,
    /// Pieces that a connection had taken and the target has not, and pieces that have a slot: they go first.
    pub(crate) ready: VecDeque<Piece>,
    pub(crate) fences: Vec<Fence<Sent>>,
    /// Slices not yet completed.
    operations: u32,
    /// Segments of it that are attached.
    remote_regions: u32,
    /// Since when there has been no connection to be had, its own or one of ours.
    pub(crate) full_since: Option<Instant>,
    /// When it last showed a sign of life; `None` while it owes us nothing.
    pub(crate) last_heard: Option<Instant>,
    /// In the list of peers that have something to send.
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

    /// One more segment of it is attached, by this export.
    pub(super) fn attached(&mut self, export: &Export) {
        let connecting = self.connection_count() > 0;
        self.contact.learn(export, connecting);
        self.remote_regions += 1;
    }

    /// One of its segments is no longer attached.
    pub(super) fn detached(&mut self) {
        debug_assert!(self.remote_regions > 0, "a remote region is detached once");
        self.remote_regions -= 1;
    }

    /// One more slice is for it.
    pub(crate) const fn slice_accepted(&mut self) {
        self.operations += 1;
    }

    /// A slice for it has completed.
    pub(crate) fn slice_completed(&mut self) {
        debug_assert!(self.operations > 0, "a slice completes once");
        self.operations -= 1;
        if !self.is_awaited() {
            self.last_heard = None;
        }
    }

    /// Whether it has to be put into the list of those with something to send. Asked once for each time.
    pub(super) const fn enlist(&mut self) -> bool {
        !core::mem::replace(&mut self.listed, true)
    }

    /// It has left that list.
    pub(super) const fn delist(&mut self) {
        self.listed = false;
    }

    /// Whether it owes us anything.
    pub(crate) fn is_awaited(&self) -> bool {
        self.operations > 0 || !self.fences.is_empty()
    }

    /// Whether something waits to be put on a connection.
    pub(crate) fn has_work(&self) -> bool {
        !self.pending.is_empty()
            || !self.ready.is_empty()
            || self.fences.iter().any(|fence| fence.sent.is_none())
    }

    /// Whether nothing needs it any more.
    pub(crate) fn is_idle(&self) -> bool {
        self.remote_regions == 0 && !self.is_awaited()
    }

    pub(crate) fn connection_count(&self) -> usize {
        self.connections.iter().flatten().count()
    }

    /// The first connection number up to `connections_max` that has no connection.
    pub(crate) fn vacant_connection(&self, connections_max: u8) -> Option<usize> {
        self.connections[..usize::from(connections_max)].iter().position(Option::is_none)
    }

    /// A connection to the address with this number is up: whatever kept us away is over.
    pub(crate) fn connected(&mut self, address: u8) {
        self.contact.welcomed(address);
        self.full_since = None;
    }

    /// A connection is gone; its answers will not come, so fences that wait for it are sent anew.
    pub(crate) fn connection_lost(&mut self, number: usize) {
        self.connections[number] = None;
        for fence in &mut self.fences {
            if fence.sent.is_some_and(|sent| sent.connections & 1 << number != 0) {
                fence.sent = None;
            }
        }
    }

    /// The answer `id` to a FENCE has come on connection `number`. Gives the fence whose last answer that
    /// was.
    pub(super) fn fence_answered(&mut self, number: u8, id: u64) -> Option<Fence<Sent>> {
        let is = |fence: &Fence<Sent>| fence.sent.is_some_and(|sent| sent.id == id);
        let at = self.fences.iter().position(is)?;
        let sent = self.fences[at].sent.as_mut()?;
        sent.connections &= !(1 << number);
        (sent.connections == 0).then(|| self.fences.swap_remove(at))
    }
}
