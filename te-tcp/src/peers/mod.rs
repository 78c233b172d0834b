//! The peers of an initiator: which ones exist, how each is reached, and which of them have something to
//! send.
//!
//! A peer is one incarnation of a target. It is in the table while a region of it is attached. Incarnations
//! that were connected once and then removed are remembered, because what was sent to them may still land.

mod endpoint;

pub(crate) use endpoint::{Endpoint, Sent};

use te_core::{Error, ErrorKind, Instant};
use te_fabric::peer::{Fence, FenceCount, KnownIncarnations};
use te_fabric::timers::Earliest;
use te_fabric::{Export, Table, Timers};

/// All peers, by number.
#[derive(Debug)]
pub(crate) struct Peers {
    table: Table<Endpoint>,
    /// Incarnations that were connected and are no longer in the table.
    known: KnownIncarnations,
    /// Peers that have something to send.
    listed: Vec<u32>,
    /// Fences of all peers together.
    fences: FenceCount,
}

impl Peers {
    /// An empty table with room for `peers_max` peers, and for `fences_max` fences that run at the same time.
    pub(crate) fn new(peers_max: u32, fences_max: u32) -> Self {
        Self {
            table: Table::new(peers_max),
            known: KnownIncarnations::default(),
            listed: Vec::new(),
            fences: FenceCount::new(fences_max),
        }
    }

    pub(crate) fn get(&self, peer: u32) -> Option<&Endpoint> {
        self.table.get(peer)
    }

    pub(crate) fn get_mut(&mut self, peer: u32) -> Option<&mut Endpoint> {
        self.table.get_mut(peer)
    }

    /// One more than the largest number of any peer.
    pub(crate) fn bound(&self) -> u32 {
        self.table.bound()
    }

    /// Another region of the peer that wrote this export is attached; returns the peer's number.
    ///
    /// # Errors
    /// `Full`.
    pub(crate) fn attach(&mut self, export: &Export) -> Result<u32, Error> {
        let is = |(_, peer): &(u32, &Endpoint)| peer.contact.incarnation() == export.incarnation;
        let known = self.table.iter().find(is).map(|(number, _)| number);
        let number = match known {
            Some(number) => number,
            None => self.table.add(Endpoint::new(export))?,
        };
        if let Some(peer) = self.table.get_mut(number) {
            peer.attached(export);
        }
        Ok(number)
    }

    /// A region of the peer was detached. Returns true when nothing needs the peer any more.
    pub(crate) fn detach(&mut self, peer: u32) -> bool {
        self.table.get_mut(peer).is_some_and(|peer| {
            peer.detached();
            peer.is_idle()
        })
    }

    /// Removes a peer, and remembers its incarnation if it was connected.
    pub(crate) fn remove(&mut self, peer: u32) {
        self.listed.retain(|&known| known != peer);
        if let Some(peer) = self.table.remove(peer) {
            self.known.remember(&peer.contact);
        }
    }

    /// Whether nothing that this transport sent can land at the peer any more, or ever could.
    pub(crate) fn is_harmless(&self, peer: u32) -> bool {
        self.table.get(peer).is_none_or(|peer| peer.contact.is_harmless(&self.known))
    }

    /// This transport was not polled until `now`: the time before does not count as the peers' silence.
    pub(crate) fn forgive(&mut self, now: Instant) {
        for peer in 0..self.table.bound() {
            if let Some(peer) = self.table.get_mut(peer) {
                peer.last_heard = peer.last_heard.map(|_| now);
            }
        }
    }
}

/// The list of peers that have something to send.
impl Peers {
    /// Puts a peer into the list.
    pub(crate) fn list(&mut self, peer: u32, timers: &mut Timers) {
        if self.table.get_mut(peer).is_some_and(Endpoint::enlist) {
            self.listed.push(peer);
            timers.wake();
            timers.changed();
        }
    }

    /// Whether the list has a peer.
    pub(crate) fn has_listed(&self) -> bool {
        !self.listed.is_empty()
    }

    /// The peer at position `at` of the list.
    pub(crate) fn listed(&self, at: usize) -> Option<u32> {
        self.listed.get(at).copied()
    }

    /// The peer at position `at` has sent what it could; it stays in the list while it has more. Returns the
    /// position of the next.
    pub(crate) fn had_turn(&mut self, at: usize) -> usize {
        let Some(&number) = self.listed.get(at) else { return at };
        match self.table.get_mut(number) {
            Some(peer) if peer.has_work() => return at + 1,
            Some(peer) => peer.delist(),
            None => {}
        }
        self.listed.swap_remove(at);
        at
    }

    /// When the first backoff of a peer in the list ends.
    pub(crate) fn next_attempt(&self) -> Option<Instant> {
        let mut next = Earliest::default();
        for &peer in &self.listed {
            next.note(self.table.get(peer).and_then(|peer| peer.contact.paused_until()));
        }
        next.get()
    }
}

/// Fences.
impl Peers {
    /// Adds a fence towards this peer; it is sent by the next poll.
    ///
    /// # Errors
    /// `NotFound`: no such peer. `Full`: too many fences run.
    pub(crate) fn begin_fence(&mut self, peer: u32, fence: Fence<Sent>) -> Result<(), Error> {
        let Some(peer) = self.table.get_mut(peer) else { return Err(ErrorKind::NotFound.into()) };
        self.fences.begin()?;
        peer.fences.push(fence);
        Ok(())
    }

    /// The answer `id` to a FENCE has arrived on connection `number` of the peer. Returns the fence when this
    /// was its last missing answer.
    pub(crate) fn fence_answered(&mut self, peer: u32, number: u8, id: u64) -> Option<Fence<Sent>> {
        let fence = self.table.get_mut(peer)?.fence_answered(number, id)?;
        self.fences.end();
        Some(fence)
    }

    /// Removes a fence that no answer can end any more.
    pub(crate) fn pop_fence(&mut self, peer: u32) -> Option<Fence<Sent>> {
        let fence = self.table.get_mut(peer)?.fences.pop()?;
        self.fences.end();
        Some(fence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::EXPORT_FORMAT;
    use te_core::Token;

    fn export(incarnation: u64) -> Export {
        let mut export = te_fabric::testkit::export(EXPORT_FORMAT);
        export.incarnation = incarnation;
        export
    }

    fn fence(token: u64, sent: Option<Sent>) -> Fence<Sent> {
        Fence { token: Token(token), remote_region: 0, sent }
    }

    #[test]
    fn a_peer_is_its_incarnation_and_stays_while_a_region_of_it_is_attached() {
        let mut peers = Peers::new(2, 1);
        assert_eq!(
            (peers.attach(&export(5)), peers.attach(&export(6)), peers.attach(&export(5))),
            (Ok(0), Ok(1), Ok(0))
        );
        assert_eq!(peers.attach(&export(7)).map_err(|error| error.kind), Err(ErrorKind::Full));
        assert!(!peers.detach(0), "another region of it is attached");
        assert!(peers.detach(0));
        peers.remove(0);
        assert!(peers.get(0).is_none() && peers.get(1).is_some());
    }

    #[test]
    fn a_peer_that_was_met_and_let_go_is_not_harmless_when_it_comes_again() {
        let mut peers = Peers::new(2, 1);
        assert_eq!(peers.attach(&export(5)), Ok(0));
        assert!(peers.is_harmless(0), "it was sent nothing");
        peers.get_mut(0).expect("attached").connected(0);
        assert!(!peers.is_harmless(0));
        peers.detach(0);
        peers.remove(0);
        assert_eq!(peers.attach(&export(5)), Ok(0));
        assert!(!peers.is_harmless(0));
    }

    #[test]
    fn a_peer_is_listed_once_and_until_it_has_no_work() {
        let mut peers = Peers::new(2, 4);
        let mut timers = Timers::new();
        for incarnation in [5, 6] {
            peers.attach(&export(incarnation)).expect("room");
        }
        assert_eq!(peers.begin_fence(0, fence(1, None)), Ok(()));
        [0, 1, 0].into_iter().for_each(|peer| peers.list(peer, &mut timers));
        assert_eq!((peers.listed(0), peers.listed(1), peers.listed(2)), (Some(0), Some(1), None));
        assert_eq!((peers.had_turn(0), peers.had_turn(1)), (1, 1), "the first has a fence to send");
        assert_eq!((peers.listed(0), peers.listed(1)), (Some(0), None));
        assert!(peers.pop_fence(0).is_some() && peers.pop_fence(0).is_none());
        assert_eq!((peers.had_turn(0), peers.has_listed()), (0, false));
        peers.list(0, &mut timers);
        assert!(peers.has_listed(), "it can come again");
        peers.remove(0);
        assert!(!peers.has_listed());
    }

    #[test]
    fn fences_are_counted_over_all_peers_and_end_with_their_last_answer() {
        let mut peers = Peers::new(2, 2);
        for incarnation in [5, 6] {
            peers.attach(&export(incarnation)).expect("room");
        }
        let sent = Some(Sent { id: 9, connections: 0b11 });
        assert_eq!(peers.begin_fence(0, fence(1, sent)), Ok(()));
        assert_eq!(peers.begin_fence(1, fence(2, None)), Ok(()));
        let full = peers.begin_fence(0, fence(3, None)).map_err(|error| error.kind);
        assert_eq!(full, Err(ErrorKind::Full));
        assert!(peers.fence_answered(0, 0, 8).is_none(), "the answer to an earlier one");
        assert!(peers.fence_answered(0, 0, 9).is_none(), "another connection has not answered");
        assert_eq!(peers.fence_answered(0, 1, 9).map(|fence| fence.token), Some(Token(1)));
        assert_eq!(peers.begin_fence(0, fence(3, None)), Ok(()));
    }

    #[test]
    fn only_peers_that_owe_something_are_forgiven() {
        let mut peers = Peers::new(2, 1);
        for incarnation in [5, 6] {
            peers.attach(&export(incarnation)).expect("room");
        }
        peers.get_mut(1).expect("attached").last_heard = Some(Instant::from_millis(1));
        peers.forgive(Instant::from_millis(9));
        let last_heard = |peer| peers.get(peer).and_then(|peer| peer.last_heard);
        assert_eq!((last_heard(0), last_heard(1)), (None, Some(Instant::from_millis(9))));
    }
}
