//! Both halves, one exchange at a time. `tests/grant.rs` runs them against each other at random.

use alloc::rc::Rc;
use alloc::vec;
use alloc::vec::Vec;
use core::cell::Cell;
use core::time::Duration;

use super::*;
use crate::{Access, Error, ErrorKind, Instant, RegionId};

const REGION: RegionId = RegionId::new(2, 5);
const KEY: [u8; 16] = [9; 16];
const SECOND: Duration = Duration::from_secs(1);
const OFFER: Offer = Offer { key: KEY, offset: 4096, len: 100, access: Access::REMOTE_WRITE };
const WANT: Want = Want { region: REGION, key: KEY, len: 100, access: Access::REMOTE_WRITE };
const ASK: Message = Message::Ask { request: 1, region: REGION, key: KEY };
const GRANT: Message =
    Message::Grant { request: 1, row: 0, offset: 4096, len: 100, access: Access::REMOTE_WRITE };

impl Rows for Rc<[Row]> {
    fn reset(&self, row: u32) {
        self[row as usize].reset();
    }

    fn revoke(&self, row: u32, why: Revoked) -> bool {
        self[row as usize].revoke(why)
    }
}

fn rows() -> Rc<[Row]> {
    (0..8).map(|_| Row::new()).collect()
}

fn at(millis: u64) -> Instant {
    Instant::from_millis(millis)
}

fn owner() -> Owner<Rc<[Row]>> {
    let mut owner = Owner::new(OwnerLimits { peers_max: 4, idle_max: 2 * SECOND });
    owner.share(REGION, OFFER);
    owner
}

fn effects(owner: &mut Owner<Rc<[Row]>>) -> Vec<OwnerEffect> {
    core::iter::from_fn(|| owner.effect()).collect()
}

/// A peer that has stated its identity, and its rows.
fn welcome(owner: &mut Owner<Rc<[Row]>>, identity: u64) -> (u32, Rc<[Row]>) {
    let (peer, rows) = (owner.connected().expect("room"), rows());
    owner.received(peer, Message::Hello { protocol: PROTOCOL, identity });
    assert_eq!(effects(owner), [OwnerEffect::MakeRows { peer }]);
    owner.welcomed(peer, rows.clone());
    assert_eq!(effects(owner), [OwnerEffect::Send { peer, message: Message::Welcome }]);
    (peer, rows)
}

fn closed(peer: u32, kind: ErrorKind) -> OwnerEffect {
    OwnerEffect::Close { peer, why: Error::new(kind) }
}

#[test]
fn a_region_is_granted_for_its_key_and_generation_alone() {
    let mut owner = owner();
    let (peer, _rows) = welcome(&mut owner, 7);
    owner.received(peer, ASK);
    assert_eq!(effects(&mut owner), [OwnerEffect::Grant { peer, region: REGION, message: GRANT }]);
    let refused = |request, stale| [OwnerEffect::Send { peer, message: Message::Refuse { request, stale } }];
    owner.received(peer, Message::Ask { request: 2, region: REGION, key: [0; 16] });
    assert_eq!(effects(&mut owner), refused(2, false));
    for region in [RegionId::new(2, 4), RegionId::new(0, 5), RegionId::new(99, 5)] {
        owner.received(peer, Message::Ask { request: 3, region, key: KEY });
        assert_eq!(effects(&mut owner), refused(3, true));
    }
}

#[test]
fn a_row_is_granted_again_only_once_it_was_released() {
    let mut owner = owner();
    let (peer, rows) = welcome(&mut owner, 7);
    owner.received(peer, ASK);
    assert!(owner.unshare(REGION), "no peer uses it");
    effects(&mut owner);
    let next = RegionId::new(2, 6);
    owner.share(next, OFFER);
    let ask = Message::Ask { request: 2, region: next, key: KEY };
    owner.received(peer, ask);
    let Some(OwnerEffect::Grant { message: Message::Grant { row, .. }, .. }) = owner.effect() else {
        panic!()
    };
    assert_eq!(row, 1, "the first is still in use");
    assert!(rows[0].enter().is_err() && rows[1].enter().is_ok());
    owner.received(peer, Message::Release { row: 0 });
    owner.received(peer, Message::Ask { request: 3, region: next, key: KEY });
    let Some(OwnerEffect::Grant { message: Message::Grant { row, .. }, .. }) = owner.effect() else {
        panic!()
    };
    assert_eq!(row, 0);
    assert!(rows[0].enter().is_ok());
}

#[test]
fn a_peer_that_uses_a_region_is_waited_for_until_it_is_out_or_gone() {
    for goes in [false, true] {
        let mut owner = owner();
        let (peer, rows) = welcome(&mut owner, 7);
        owner.received(peer, ASK);
        effects(&mut owner);
        let inside = rows[0].enter().unwrap();
        assert!(!owner.unshare(REGION) && !owner.unshare(REGION));
        let told = OwnerEffect::Send { peer, message: Message::Revoked { row: 0 } };
        assert_eq!(effects(&mut owner), [told], "it is reported once");
        assert!(owner.waited_for().eq([peer]));
        if goes {
            drop(inside);
        } else {
            owner.ended(peer);
        }
        assert!(owner.unshare(REGION));
        assert_eq!(owner.waited_for().count(), 0);
    }
}

#[test]
fn memory_that_is_granted_until_it_is_released_is_not_free_before() {
    let mut owner = owner().until_released();
    let (peer, rows) = welcome(&mut owner, 7);
    assert!(!owner.holds(peer) && owner.unshare(RegionId::new(0, 1)));
    owner.received(peer, ASK);
    effects(&mut owner);
    assert!(owner.holds(peer));
    let inside = rows[0].enter().unwrap();
    assert!(!owner.unshare(REGION));
    let told = OwnerEffect::Send { peer, message: Message::Revoked { row: 0 } };
    assert_eq!(effects(&mut owner), [told], "it is reported once");
    drop(inside);
    assert!(!owner.unshare(REGION), "it is out, and has it mapped");
    assert!(owner.waited_for().eq([peer]) && effects(&mut owner).is_empty());
    owner.received(peer, Message::Release { row: 0 });
    assert!(owner.unshare(REGION) && !owner.holds(peer));
    // The death of a peer releases as well.
    owner.share(REGION, OFFER);
    owner.received(peer, ASK);
    assert!(!owner.unshare(REGION));
    owner.ended(peer);
    assert!(owner.unshare(REGION));
}

#[test]
fn a_peer_that_is_expelled_or_disconnected_stays_until_it_has_released_its_memory() {
    for expelled in [true, false] {
        let mut owner = owner().until_released();
        let (peer, rows) = welcome(&mut owner, 7);
        owner.received(peer, ASK);
        effects(&mut owner);
        let inside = rows[0].enter().unwrap();
        if expelled {
            assert_eq!(owner.expel(7), Ok(false));
        } else {
            owner.disconnect(peer, Error::new(ErrorKind::Protocol));
        }
        let told = OwnerEffect::Send { peer, message: Message::Revoked { row: 0 } };
        assert_eq!(effects(&mut owner), [told]);
        drop(inside);
        if expelled {
            assert_eq!(owner.expel(7), Ok(true), "nothing of it can land");
        }
        owner.poll(at(1));
        assert!(effects(&mut owner).is_empty() && !owner.unshare(REGION) && owner.waited_for().eq([peer]));
        owner.received(peer, Message::Release { row: 0 });
        owner.poll(at(2));
        let why = if expelled { ErrorKind::Expelled } else { ErrorKind::Protocol };
        assert_eq!(effects(&mut owner).last(), Some(&closed(peer, why)));
        assert!(owner.unshare(REGION));
    }
}

#[test]
fn an_expelled_peer_is_gone_once_it_is_out_and_is_refused_when_it_comes_back() {
    let mut owner = owner();
    let (peer, rows) = welcome(&mut owner, 7);
    let (other, _) = welcome(&mut owner, 8);
    owner.received(peer, ASK);
    effects(&mut owner);
    let inside = rows[0].enter().unwrap();
    assert!(owner.connections(7).eq([peer]));
    assert_eq!(owner.expel(7), Ok(false));
    assert_eq!(owner.connections(7).count(), 0);
    // Messages that it sends meanwhile change nothing, and do not end it before it is out.
    owner.received(peer, Message::Ask { request: 2, region: REGION, key: KEY });
    let refuse = Message::Refuse { request: 2, stale: true };
    assert_eq!(effects(&mut owner), [OwnerEffect::Send { peer, message: refuse }]);
    owner.received(peer, Message::Welcome);
    owner.poll(at(1));
    assert_eq!(effects(&mut owner), []);
    drop(inside);
    assert!(rows[0].enter().is_err_and(|why| why == Revoked::Peer));
    owner.poll(at(2));
    let goodbye =
        |peer| [OwnerEffect::Send { peer, message: Message::Expelled }, closed(peer, ErrorKind::Expelled)];
    assert_eq!(effects(&mut owner), goodbye(peer));
    assert_eq!(owner.expel(7), Ok(true));
    let again = owner.connected().unwrap();
    owner.received(again, Message::Hello { protocol: PROTOCOL, identity: 7 });
    assert_eq!(effects(&mut owner), goodbye(again));
    assert!(owner.connections(8).eq([other]), "other peers are not disturbed");
}

#[test]
fn one_that_says_nonsense_is_closed_once_it_is_out() {
    let mut owner = owner();
    let (peer, rows) = welcome(&mut owner, 7);
    owner.received(peer, ASK);
    effects(&mut owner);
    let inside = rows[0].enter().unwrap();
    owner.received(peer, Message::Hello { protocol: PROTOCOL, identity: 7 });
    owner.poll(at(1));
    assert_eq!(effects(&mut owner), []);
    assert!(!owner.unshare(REGION), "the owner still waits for it");
    effects(&mut owner);
    drop(inside);
    owner.poll(at(2));
    assert_eq!(effects(&mut owner), [closed(peer, ErrorKind::Protocol)]);
    for nonsense in [Message::Welcome, ASK, Message::Hello { protocol: PROTOCOL + 1, identity: 7 }] {
        let unknown = owner.connected().unwrap();
        owner.received(unknown, nonsense);
        assert_eq!(effects(&mut owner), [closed(unknown, ErrorKind::Protocol)]);
    }
}

#[test]
fn one_that_is_granted_nothing_in_time_is_closed_and_there_is_room_for_so_many() {
    let mut owner = owner();
    let (good, _) = welcome(&mut owner, 7);
    owner.received(good, ASK);
    let unknown = [(); 3].map(|()| owner.connected().unwrap());
    assert_eq!(owner.connected(), Err(Error::new(ErrorKind::Full)));
    effects(&mut owner);
    assert_eq!(owner.poll_at(at(5)), Some(at(5)));
    owner.poll(at(10));
    assert_eq!(owner.poll_at(at(10)), Some(at(2010)));
    owner.poll(at(2009));
    assert_eq!(effects(&mut owner), []);
    owner.poll(at(2010));
    assert_eq!(effects(&mut owner), unknown.map(|unknown| closed(unknown, ErrorKind::TimedOut)));
    assert_eq!(owner.poll_at(at(2010)), None);
}

#[test]
fn a_grant_whose_memory_cannot_be_sent_is_taken_back() {
    let mut owner = owner();
    let (peer, _rows) = welcome(&mut owner, 7);
    owner.received(peer, ASK);
    effects(&mut owner);
    owner.withdraw(peer, GRANT);
    let message = Message::Refuse { request: 1, stale: false };
    assert_eq!(effects(&mut owner), [OwnerEffect::Send { peer, message }]);
    owner.received(peer, ASK);
    assert_eq!(effects(&mut owner), [OwnerEffect::Grant { peer, region: REGION, message: GRANT }]);
}

/// Memory that is mapped while the value exists.
struct Mapping(Rc<Cell<u32>>);

impl Mapping {
    fn new(count: &Rc<Cell<u32>>) -> Self {
        count.set(count.get() + 1);
        Self(count.clone())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

type Half = Peer<Rc<[Row]>, Mapping>;

fn said(peer: &mut Half) -> Vec<PeerEffect> {
    core::iter::from_fn(|| peer.effect()).collect()
}

/// A peer that has requested the region.
fn asking() -> (Half, u32, u32) {
    let mut peer = Peer::new(7, 2 * SECOND);
    let owner = peer.connected().expect("room");
    let link = peer.attach(owner, WANT);
    let hello = Message::Hello { protocol: PROTOCOL, identity: 7 };
    let send = |message| PeerEffect::Send { owner, message };
    assert_eq!(said(&mut peer), [send(hello), send(ASK)]);
    peer.received(owner, Message::Welcome);
    assert_eq!(said(&mut peer), [PeerEffect::OpenRows { owner }]);
    peer.welcomed(owner, rows());
    (peer, owner, link)
}

const fn release(owner: u32) -> PeerEffect {
    PeerEffect::Send { owner, message: Message::Release { row: 0 } }
}

fn is_closed(peer: &Half, link: u32, kind: ErrorKind) -> bool {
    matches!(peer.link_state(link), LinkState::Closed(error) if error.kind == kind)
}

#[test]
fn a_granted_region_is_mapped_and_unmapped_before_it_is_released() {
    let count = Rc::new(Cell::new(0));
    for revoked in [false, true] {
        let (mut peer, owner, link) = asking();
        assert!(matches!(peer.link_state(link), LinkState::Waiting));
        peer.received(owner, GRANT);
        let map = PeerEffect::Map { owner, link, offset: 4096, len: 100, writable: true };
        assert_eq!(said(&mut peer), [map]);
        assert!(matches!(peer.link_state(link), LinkState::Waiting));
        peer.mapped(link, Ok(Mapping::new(&count)));
        assert!(matches!(peer.link_state(link), LinkState::Ready { row: 0, .. }));
        if revoked {
            peer.received(owner, Message::Revoked { row: 1 });
            assert_eq!(said(&mut peer), [], "the row of another peer");
            peer.received(owner, Message::Revoked { row: 0 });
            assert_eq!((said(&mut peer), count.get()), (vec![release(owner)], 0));
            assert!(is_closed(&peer, link, ErrorKind::Stale));
            peer.detach(link);
            assert_eq!(said(&mut peer), [PeerEffect::Close { owner }]);
        } else {
            peer.detach(link);
            assert_eq!(
                (said(&mut peer), count.get()),
                (vec![release(owner), PeerEffect::Close { owner }], 0)
            );
        }
    }
}

#[test]
fn what_is_revoked_or_not_wanted_any_more_while_it_is_mapped_is_released_after_that() {
    let count = Rc::new(Cell::new(0));
    for detached in [false, true] {
        let (mut peer, owner, link) = asking();
        peer.received(owner, GRANT);
        said(&mut peer);
        if detached {
            peer.detach(link);
        } else {
            peer.received(owner, Message::Revoked { row: 0 });
        }
        assert_eq!(said(&mut peer), []);
        peer.mapped(link, Ok(Mapping::new(&count)));
        assert_eq!(count.get(), 0);
        let then = [PeerEffect::Close { owner }];
        let then = if detached { &then[..] } else { &[] };
        assert_eq!(said(&mut peer), [&[release(owner)], then].concat());
        assert!(is_closed(&peer, link, if detached { ErrorKind::NotFound } else { ErrorKind::Stale }));
    }
}

#[test]
fn a_grant_that_is_not_waited_for_or_that_is_less_than_was_exported_is_released() {
    let (mut peer, owner, link) = asking();
    let keep = peer.attach(owner, WANT);
    said(&mut peer);
    peer.detach(link);
    peer.received(owner, GRANT);
    assert_eq!(said(&mut peer), [release(owner)]);
    // Nor is a region granted twice.
    let held = peer.attach(owner, WANT);
    let grant = |row| Message::Grant { request: 3, row, offset: 0, len: 100, access: Access::REMOTE_WRITE };
    peer.received(owner, grant(5));
    peer.mapped(held, Ok(Mapping::new(&Rc::default())));
    said(&mut peer);
    peer.received(owner, grant(0));
    assert_eq!(said(&mut peer), [release(owner)]);
    assert!(matches!(peer.link_state(held), LinkState::Ready { row: 5, .. }));
    let less = Message::Grant { request: 2, row: 0, offset: 0, len: 99, access: Access::REMOTE_WRITE };
    peer.received(owner, less);
    assert_eq!(said(&mut peer), [release(owner)]);
    assert!(is_closed(&peer, keep, ErrorKind::AccessDenied));
    for (request, stale, kind) in [(4, true, ErrorKind::Stale), (5, false, ErrorKind::AccessDenied)] {
        let link = peer.attach(owner, WANT);
        peer.received(owner, Message::Refuse { request, stale });
        assert!(is_closed(&peer, link, kind));
    }
}

#[test]
fn an_owner_that_does_not_answer_in_time_is_late_and_its_answer_counts() {
    let (mut peer, owner, link) = asking();
    peer.poll(at(10));
    assert_eq!(peer.poll_at(), Some(at(2010)));
    peer.poll(at(2009));
    assert!(matches!(peer.link_state(link), LinkState::Waiting));
    peer.poll(at(2010));
    assert!(matches!(peer.link_state(link), LinkState::Late));
    assert_eq!(peer.poll_at(), None, "it waits for a message");
    // A request that could not be sent is sent again, at longer intervals when the owner is late anyway.
    peer.unsent(ASK);
    assert_eq!(peer.poll_at(), Some(at(2110)));
    peer.poll(at(2110));
    assert_eq!(said(&mut peer), [PeerEffect::Send { owner, message: ASK }]);
    assert_eq!(peer.poll_at(), None);
    peer.received(owner, GRANT);
    peer.mapped(link, Ok(Mapping::new(&Rc::default())));
    assert!(matches!(peer.link_state(link), LinkState::Ready { .. }));
    // And one that is answered in time.
    let second = peer.attach(owner, WANT);
    let Message::Ask { region, key, .. } = ASK else { panic!() };
    peer.unsent(Message::Ask { request: 2, region, key });
    assert_eq!(peer.poll_at(), Some(at(2111)));
    peer.detach(second);
    assert_eq!(peer.poll_at(), None);
}

#[test]
fn all_ways_end_with_their_owner_and_say_why() {
    for (message, kind) in [(Message::Expelled, ErrorKind::Expelled), (ASK, ErrorKind::Protocol)] {
        let count = Rc::new(Cell::new(0));
        let (mut peer, owner, link) = asking();
        peer.received(owner, GRANT);
        peer.mapped(link, Ok(Mapping::new(&count)));
        let waiting = peer.attach(owner, WANT);
        said(&mut peer);
        peer.received(owner, message);
        assert_eq!((said(&mut peer), count.get()), (vec![PeerEffect::Close { owner }], 0));
        assert!(is_closed(&peer, link, kind) && is_closed(&peer, waiting, kind));
        assert_eq!(peer.poll_at(), None);
        let late = peer.attach(owner, WANT);
        assert!(is_closed(&peer, late, ErrorKind::PeerDead));
        [link, waiting, late].into_iter().for_each(|link| peer.detach(link));
        assert_eq!(said(&mut peer), []);
        assert_eq!(peer.connected(), Ok(owner), "its number is free again");
    }
}
