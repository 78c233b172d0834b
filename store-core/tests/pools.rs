//! Pools of CXL memory: who owns extents, and who has which page.
#![allow(clippy::unwrap_used, reason = "tests")]

use crc32c::crc32c;
use store_core::command_log::{Recorder, Standby};
use store_core::message::{
    ClaimExtents, ExtentsGiven, ExtentsReleased, ExtentsWanted, MountSegment, Operation, POOL_EPOCHS_AHEAD,
    PageFound, PageFreed, PageGiven, PageWanted, PoolEntry, TakePage,
};
use store_core::{ErrorCode, Frame, Incarnation, Instant, Master, MasterConfig, NodeId, Session, snapshot};

const POOL: [u8; 16] = [7; 16];
const NOW: Instant = Instant::ZERO;

fn master() -> Master {
    Master::new(MasterConfig::default()).unwrap()
}

/// Node `no` of host `domain`.
fn wanted(no: u64, domain: u64, first: u32, count: u32) -> ExtentsWanted<'static> {
    ExtentsWanted {
        node: NodeId::new(no),
        key: no,
        name: "a node",
        pool: POOL,
        first,
        count,
        incarnation: no,
        domain,
        locked: true,
        ..ExtentsWanted::default()
    }
}

fn claim(master: &mut Master, wanted: &ExtentsWanted<'_>) -> Result<u64, String> {
    match master.claim_extents(NOW, wanted).unwrap() {
        ExtentsGiven::Given { epoch } => Ok(epoch),
        held @ ExtentsGiven::Held { .. } => Err(format!("{held:?}")),
    }
}

fn page(identity: u64, domain: u64) -> PageWanted {
    PageWanted { lineage: 0, pool: POOL, pages: 2, identity, domain }
}

fn take(master: &mut Master, wanted: &PageWanted, found: &[PageFound]) -> PageGiven {
    master.take_page(NOW, wanted, found.iter().copied()).unwrap()
}

fn given(slot: u32, epoch: u64) -> PageGiven {
    PageGiven::Given { slot, epoch }
}

#[test]
fn a_node_that_asks_again_has_the_same_epoch_and_another_one_is_told_who_has_the_extents() {
    let mut master = master();
    let first = claim(&mut master, &wanted(1, 10, 4, 4)).unwrap();
    assert_eq!(claim(&mut master, &wanted(1, 10, 4, 4)), Ok(first));
    for (from, count) in [(4, 4), (0, 5), (7, 9), (5, 1), (0, 100)] {
        let held = master.claim_extents(NOW, &wanted(2, 20, from, count)).unwrap();
        assert_eq!(held, ExtentsGiven::Held { first: 4, count: 4, name: "a node", alive: false });
    }
    let beside = claim(&mut master, &wanted(2, 20, 8, 4)).unwrap();
    assert!(beside > first);
    assert!(claim(&mut master, &wanted(2, 20, 0, 4)).unwrap() > beside);
}

#[test]
fn extents_of_a_process_go_to_another_one_only_with_a_proof_that_it_has_ended() {
    let mut master = master();
    let first = claim(&mut master, &wanted(1, 10, 0, 4)).unwrap();
    let unlocked = ExtentsWanted { locked: false, ..wanted(2, 10, 0, 4) };
    assert!(claim(&mut master, &unlocked).is_err());
    assert!(claim(&mut master, &wanted(2, 0, 0, 4)).is_err(), "an unknown domain proves nothing");
    let (mut other, mut operator) = (wanted(3, 30, 1, 1), wanted(3, 30, 1, 1));
    assert!(claim(&mut master, &other).is_err());
    // Silence proves nothing.
    let later = Instant::from_millis(3_600_000);
    master.handle_timeout(later);
    assert!(matches!(master.claim_extents(later, &other), Ok(ExtentsGiven::Held { .. })));
    // A process of the same host that has the lock.
    let second = claim(&mut master, &wanted(2, 10, 0, 2)).unwrap();
    assert!(second > first);
    // What it did not ask for still belongs to the former process.
    assert!(claim(&mut master, &wanted(3, 30, 2, 1)).is_err());
    operator.takeover = true;
    let third = claim(&mut master, &operator).unwrap();
    assert!(third > second);
    other.first = 0;
    assert!(claim(&mut master, &other).is_err());
    let released =
        ExtentsReleased { node: NodeId::new(2), key: 2, pool: POOL, first: 0, count: 1, epoch: second };
    let foreign = ExtentsReleased { key: 3, ..released };
    assert_eq!(master.release_extents(&foreign), Err(ErrorCode::SegmentNotFound));
    assert_eq!(master.release_extents(&released), Ok(()));
    assert_eq!(master.release_extents(&released), Err(ErrorCode::SegmentNotFound));
    assert!(claim(&mut master, &other).unwrap() > third);
}

#[test]
fn the_memory_of_a_process_that_has_lost_its_extents_is_dropped() {
    let mut master = master();
    claim(&mut master, &wanted(1, 10, 0, 4)).unwrap();
    let segment = MountSegment {
        node: NodeId::new(1),
        key: 1,
        incarnation: Incarnation::new(1),
        name: "n",
        endpoint: "h:1",
        len: 1 << 20,
        ..MountSegment::default()
    };
    master.mount(NOW, &segment).unwrap().mounted().unwrap();
    claim(&mut master, &wanted(2, 10, 3, 1)).unwrap();
    assert_eq!((master.segments_len(), master.nodes_len()), (0, 0));
}

#[test]
fn a_master_without_state_learns_from_the_pool_what_was_given_before() {
    let mut master = master();
    let node = wanted(1, 10, 0, 4);
    let found = ExtentsWanted { above: 77, owned_elsewhere: true, ..node };
    let held = master.claim_extents(NOW, &found).unwrap();
    assert_eq!(held, ExtentsGiven::Held { first: 0, count: 4, name: "", alive: false });
    assert_eq!(claim(&mut master, &ExtentsWanted { takeover: true, ..found }), Ok(78));
    // The same request once more, after its answer was lost; and when the pool has a later epoch.
    assert_eq!(claim(&mut master, &found), Ok(78));
    assert_eq!(claim(&mut master, &ExtentsWanted { above: 90, ..node }), Ok(91));

    // A process of another domain, which another lineage has given the extents, keeps them.
    assert!(claim(&mut master, &ExtentsWanted { above: 95, owned_elsewhere: true, ..node }).is_err());

    let of = |slot, epoch, identity| PageFound { slot, epoch, identity, ..PageFound::default() };
    let records = [of(0, 100, 5), of(1, 101, 6)];
    assert_eq!(take(&mut master, &page(6, 10), &records), given(1, 101), "it has that page");
    assert_eq!(take(&mut master, &page(8, 20), &records), PageGiven::Full { elsewhere: 2 }, "no proof");
    assert_eq!(
        take(&mut master, &page(8, 10), &records),
        given(1, 102),
        "no process of its host has locked it"
    );
}

#[test]
fn pages_go_to_another_process_of_the_same_host_when_no_other_one_has_locked_them() {
    let mut master = master();
    let PageGiven::Given { slot: 0, epoch: first } = take(&mut master, &page(1, 10), &[]) else { panic!() };
    assert_eq!(take(&mut master, &page(1, 10), &[]), given(0, first));
    assert_eq!(take(&mut master, &page(2, 20), &[]), given(1, first + 1));
    assert_eq!(take(&mut master, &page(3, 30), &[]), PageGiven::Full { elsewhere: 2 });
    let locked =
        |slot, epoch, identity| PageFound { slot, epoch, identity, locked: true, ..PageFound::default() };
    assert_eq!(take(&mut master, &page(3, 20), &[locked(1, first + 1, 2)]), PageGiven::Full { elsewhere: 1 });
    let free = |slot, epoch, identity| PageFound { locked: false, ..locked(slot, epoch, identity) };
    assert_eq!(take(&mut master, &page(3, 20), &[free(1, first + 1, 2)]), given(1, first + 2));
    // Another process had taken the lock before this one did: it may have the page.
    assert_eq!(take(&mut master, &page(3, 20), &[locked(1, first + 1, 2)]), PageGiven::Full { elsewhere: 1 });
    let freed = PageFreed { pool: POOL, slot: 0, epoch: first };
    // A process of an unknown domain leaves its page to no other one.
    assert_eq!(take(&mut master, &page(4, 0), &[]), PageGiven::Full { elsewhere: 2 });
    assert_eq!(master.free_page(&PageFreed { slot: 2, ..freed }), Err(ErrorCode::KeyNotFound));
    assert_eq!(master.free_page(&PageFreed { pool: [0; 16], ..freed }), Err(ErrorCode::KeyNotFound));
    assert_eq!(master.free_page(&freed), Ok(()));
    assert_eq!(master.free_page(&freed), Ok(()), "a repetition");
    assert_eq!(take(&mut master, &page(4, 0), &[free(0, first, 1)]), given(0, first + 3));
    // Once more, after the page was given: the process that has it now is not meant.
    assert_eq!(master.free_page(&freed), Err(ErrorCode::KeyNotFound));
    assert_eq!(take(&mut master, &page(5, 50), &[]), PageGiven::Full { elsewhere: 2 });
}

#[test]
fn a_page_that_was_freed_stays_with_its_process_when_that_one_asks_for_it() {
    let mut master = master();
    assert_eq!(take(&mut master, &page(1, 10), &[]), given(0, 1));
    assert_eq!(take(&mut master, &page(2, 20), &[]), given(1, 2));
    assert_eq!(master.free_page(&PageFreed { pool: POOL, slot: 0, epoch: 1 }), Ok(()));
    assert_eq!(take(&mut master, &page(1, 10), &[]), given(0, 1), "it has not ended");
    assert_eq!(take(&mut master, &page(3, 30), &[]), PageGiven::Full { elsewhere: 2 });
}

#[test]
fn a_request_whose_evidence_was_read_under_another_lineage_is_refused() {
    let mut master = Master::new(MasterConfig { epoch: 5, ..MasterConfig::default() }).unwrap();
    let digest = master.digest();
    for lineage in [0, 4, 6, u64::MAX] {
        let wanted = ExtentsWanted { lineage, takeover: true, ..wanted(1, 10, 0, 4) };
        assert_eq!(master.claim_extents(NOW, &wanted), Err(ErrorCode::IllegalClient), "{lineage}");
        let wanted = PageWanted { lineage, ..page(1, 10) };
        assert_eq!(master.take_page(NOW, &wanted, std::iter::empty()), Err(ErrorCode::IllegalClient));
    }
    assert_eq!(master.digest(), digest);
    assert_eq!(claim(&mut master, &ExtentsWanted { lineage: 5, ..wanted(1, 10, 0, 4) }), Ok((5 << 31) + 1));
    assert_eq!(take(&mut master, &PageWanted { lineage: 5, ..page(1, 10) }, &[]), given(0, (5 << 31) + 2));
}

#[test]
fn extents_that_another_lineage_gave_are_a_process_own_only_if_it_was_given_all_of_them_since() {
    let mut master = master();
    // It has one extent, and the pool says that another process owns the ones beside it.
    let one = claim(&mut master, &wanted(1, 10, 0, 1)).unwrap();
    let all = ExtentsWanted { above: one, owned_elsewhere: true, ..wanted(1, 10, 0, 3) };
    let held = master.claim_extents(NOW, &all).unwrap();
    assert_eq!(held, ExtentsGiven::Held { first: 0, count: 3, name: "", alive: false });
    let last = claim(&mut master, &wanted(1, 10, 0, 3)).unwrap();
    let some = ExtentsWanted { above: last, ..all };
    assert_eq!(claim(&mut master, &some), Ok(last), "all of them, and no process had them since");
    assert_eq!(claim(&mut master, &ExtentsWanted { first: 1, count: 2, ..some }), Ok(last + 1));
}

#[test]
fn a_record_that_an_owner_of_another_lineage_has_written_late_is_no_proof_for_who_was_given_the_extents() {
    let mut master = master();
    let first = ExtentsWanted { above: 5, ..wanted(1, 10, 0, 4) };
    assert_eq!(claim(&mut master, &first), Ok(6));
    let next = claim(&mut master, &ExtentsWanted { incarnation: 2, ..first }).unwrap();
    assert_eq!(next, 7);
    // The pool says 6 since: not what the node was told of, and not what it has written.
    let late = ExtentsWanted { above: 6, owned_elsewhere: true, incarnation: 2, ..first };
    let held = master.claim_extents(NOW, &late).unwrap();
    assert_eq!(held, ExtentsGiven::Held { first: 0, count: 4, name: "", alive: false });
    // A process of its own domain has ended, as the lock says; so has one of which an operator says so.
    assert_eq!(claim(&mut master, &ExtentsWanted { owned_elsewhere: false, ..late }), Ok(7));
    assert_eq!(claim(&mut master, &ExtentsWanted { takeover: true, ..late }), Ok(7));
    // What it was told of, and what it has written itself, is no news.
    for above in [5, 7] {
        assert_eq!(claim(&mut master, &ExtentsWanted { above, ..late }), Ok(7), "{above}");
    }
}

#[test]
fn no_request_leaves_too_few_epochs_for_later_ones() {
    let mut master = master();
    let limit = POOL_EPOCHS_AHEAD << 31;
    let of = |epoch| PageFound { slot: 1, epoch, identity: 9, ..PageFound::default() };
    let digest = master.digest();
    for epoch in [limit + 1, u64::MAX] {
        let found = [of(epoch)].into_iter();
        assert_eq!(master.take_page(NOW, &page(1, 10), found), Err(ErrorCode::InvalidParams), "{epoch}");
        let wanted = ExtentsWanted { above: epoch, ..wanted(1, 10, 0, 1) };
        assert_eq!(master.claim_extents(NOW, &wanted), Err(ErrorCode::InvalidParams), "{epoch}");
    }
    assert_eq!(master.digest(), digest);
    assert_eq!(take(&mut master, &page(1, 10), &[of(limit)]), given(0, limit + 1));
    // What was given may be found; nothing above it.
    let next = ExtentsWanted { above: limit + 2, ..wanted(1, 10, 0, 1) };
    assert_eq!(master.claim_extents(NOW, &next), Err(ErrorCode::InvalidParams));
    assert_eq!(claim(&mut master, &ExtentsWanted { above: limit + 1, ..next }), Ok(limit + 2));
    // The limit of another pool is not moved by that. The last lineage that there can be has epochs left.
    let other = ExtentsWanted { pool: [8; 16], ..next };
    assert_eq!(master.claim_extents(NOW, &other), Err(ErrorCode::InvalidParams));
    let mut master = Master::new(MasterConfig { epoch: u32::MAX, ..MasterConfig::default() }).unwrap();
    let limit = (u64::from(u32::MAX) + POOL_EPOCHS_AHEAD) << 31;
    let last = ExtentsWanted { lineage: u32::MAX.into(), above: limit, ..wanted(1, 10, 0, 1) };
    assert_eq!(claim(&mut master, &last), Ok(limit + 1));
    let beyond = ExtentsWanted { above: limit + 2, ..last };
    assert_eq!(master.claim_extents(NOW, &beyond), Err(ErrorCode::InvalidParams));
}

#[test]
fn epochs_of_a_pool_that_was_forgotten_are_not_given_again() {
    let mut master = master();
    let name = |no: u8| [no; 16];
    let mut of = |no, identity| {
        let wanted = PageWanted { pool: name(no), ..page(identity, 10) };
        master.take_page(NOW, &wanted, std::iter::empty())
    };
    for round in 1..=2 {
        assert_eq!(of(0, round), Ok(given(round as u32 - 1, round)));
    }
    for no in 1..=64 {
        of(no, 1).unwrap();
    }
    // The first one was forgotten for the last one. A record that is not written yet does not say its epoch.
    assert!(matches!(of(0, 3), Ok(PageGiven::Given { slot: 0, epoch: 3.. })));
}

#[test]
fn a_page_of_a_process_that_ended_long_ago_is_given_before_an_unused_one() {
    let mut master = master();
    assert_eq!(take(&mut master, &page(1, 10), &[]), given(0, 1));
    assert_eq!(take(&mut master, &page(2, 10), &[]), given(1, 2), "the first may be about to lock its page");
    let PageWanted { pool, .. } = page(0, 0);
    let wanted = PageWanted { pool, pages: 3, ..page(3, 10) };
    let later = Instant::from_millis(5_000);
    assert_eq!(master.take_page(later, &wanted, std::iter::empty()), Ok(given(0, 3)));
}

#[test]
fn bad_requests_are_refused_and_change_nothing() {
    let mut master = master();
    let digest = master.digest();
    let good = wanted(1, 10, 0, 4);
    let long = "x".repeat(257);
    for bad in [
        ExtentsWanted { count: 0, ..good },
        ExtentsWanted { first: u32::MAX, count: 2, ..good },
        ExtentsWanted { above: u64::MAX, ..good },
        ExtentsWanted { name: "", ..good },
        ExtentsWanted { name: &long, ..good },
    ] {
        assert_eq!(master.claim_extents(NOW, &bad), Err(ErrorCode::InvalidParams), "{bad:?}");
    }
    let found = PageFound { slot: 0, epoch: 1, identity: 1, ..PageFound::default() };
    for (wanted, found) in [
        (PageWanted { identity: 0, ..page(1, 1) }, vec![]),
        (PageWanted { pages: 0, ..page(1, 1) }, vec![]),
        (PageWanted { pages: 1_025, ..page(1, 1) }, vec![]),
        (page(1, 1), vec![PageFound { slot: 2, ..found }]),
        (page(1, 1), vec![PageFound { epoch: u64::MAX, ..found }]),
        (page(1, 1), vec![found; 3]),
    ] {
        assert_eq!(
            master.take_page(NOW, &wanted, found.into_iter()),
            Err(ErrorCode::InvalidParams),
            "{wanted:?}"
        );
    }
    let none = ExtentsReleased { node: NodeId::new(1), key: 1, pool: POOL, first: 0, count: 4, epoch: 1 };
    assert_eq!(master.release_extents(&none), Err(ErrorCode::SegmentNotFound));
    assert_eq!(master.digest(), digest);
}

#[test]
fn pools_without_owners_make_room_for_others_and_owned_ones_do_not() {
    let mut master = master();
    let name = |no: u8| [no; 16];
    for no in 0..64 {
        master.take_page(NOW, &PageWanted { pool: name(no), ..page(1, 10) }, std::iter::empty()).unwrap();
    }
    for no in 64..128 {
        claim(&mut master, &ExtentsWanted { pool: name(no), ..wanted(1, 10, 0, 1) }).unwrap();
    }
    let more = ExtentsWanted { pool: name(200), ..wanted(1, 10, 0, 1) };
    assert_eq!(master.claim_extents(NOW, &more), Err(ErrorCode::KeysUltraLimit));
    let more = PageWanted { pool: name(200), ..page(1, 10) };
    assert_eq!(master.take_page(NOW, &more, std::iter::empty()), Err(ErrorCode::KeysUltraLimit));
    // One pool has not more ranges than it may have.
    let first = (0..).find(|no| {
        master.claim_extents(NOW, &ExtentsWanted { pool: name(64), ..wanted(1, 10, 2 * no, 1) }).is_err()
    });
    assert_eq!(first, Some(4_095));
}

#[test]
fn a_standby_and_a_snapshot_know_who_has_what() {
    let mut master = master();
    let (mut recorder, mut standby) =
        (Recorder::new(&mut master), Standby::new(MasterConfig::default()).unwrap());
    let (mut session, mut request, mut out) = (Session::owner(), Vec::new(), Vec::new());
    ClaimExtents::encode_request(&mut request, 1, &wanted(1, 10, 0, 4), std::iter::empty()).unwrap();
    recorder.handle(&mut master, NOW, &mut session, &Frame::parse(&request).unwrap().unwrap().0, &mut out);
    request.clear();
    TakePage::encode_request(&mut request, 2, &page(5, 10), std::iter::empty()).unwrap();
    recorder.handle(&mut master, NOW, &mut session, &Frame::parse(&request).unwrap().unwrap().0, &mut out);
    standby.apply(&recorder.take()).unwrap();
    assert_eq!(standby.master().digest(), master.digest());
    let extents = PoolEntry::Extents {
        pool: POOL,
        first: 0,
        count: 4,
        node: NodeId::new(1),
        name: "a node",
        epoch: 1,
        alive: false,
    };
    let page = PoolEntry::Page { pool: POOL, slot: 0, identity: 5, epoch: 2, free: false };
    assert_eq!(standby.master().pools(NOW), [extents, page]);
    let mut bytes = Vec::new();
    let mut sink = |chunk: &[u8]| -> Result<(), ()> {
        bytes.extend_from_slice(chunk);
        Ok(())
    };
    standby.snapshot(1, crc32c, &mut sink).unwrap();
    let mut rest = &bytes[..];
    let (restored, _) = snapshot::restore(crc32c, &mut |to| std::io::Read::read(&mut rest, to)).unwrap();
    assert_eq!(restored.master().digest(), master.digest());
    let (mut master, _) = restored.lead(false);
    assert_eq!(claim(&mut master, &wanted(1, 10, 0, 4)), Ok(1));
    assert!(claim(&mut master, &wanted(2, 20, 0, 4)).is_err());
}

#[test]
fn a_master_without_state_gives_pages_of_processes_that_have_ended_as_their_host_or_they_themselves_say() {
    let of = |slot, identity, domain| PageFound {
        slot,
        epoch: 100 + u64::from(slot),
        identity,
        domain,
        ..PageFound::default()
    };
    let full = |elsewhere| PageGiven::Full { elsewhere };
    let locked = |found| PageFound { locked: true, ..found };
    // No process of the host holds the lock that the process has held there.
    let mut master = master();
    let records = [of(0, 1, 10), of(1, 2, 20)];
    assert_eq!(take(&mut master, &page(8, 30), &records), full(2), "another host sees no locks");
    assert_eq!(take(&mut master, &page(8, 0), &records), full(2), "an unknown one neither");
    assert_eq!(take(&mut master, &page(8, 10), &[locked(records[0]), records[1]]), full(1), "it is alive");
    assert_eq!(take(&mut master, &page(8, 10), &records), given(0, 102));
    assert_eq!(take(&mut master, &page(9, 20), &records), given(1, 103));
    // A page whose process never held a lock stays with the operator.
    let mut master = self::master();
    let records = [of(0, 1, 0), of(1, 2, 0)];
    assert_eq!(take(&mut master, &page(8, 10), &records), full(2));
    assert_eq!(take(&mut master, &page(8, 0), &records), full(2), "two unknown hosts need not be one");
    assert_eq!(master.free_page(&PageFreed { pool: POOL, slot: 0, epoch: 100 }), Ok(()));
    assert_eq!(take(&mut master, &page(8, 10), &records), given(0, 102));
    // A process has given its page back, and the record says so to every host.
    let mut master = self::master();
    let left = PageFound { left: true, ..of(1, 2, 20) };
    assert_eq!(take(&mut master, &page(8, 30), &[of(0, 1, 10), left]), given(1, 102));
    // The record that is there until the new process writes its own says nothing about that one.
    assert_eq!(take(&mut master, &page(9, 40), &[of(0, 1, 10), left]), full(2));
    // Also when the master knows it.
    let now = PageFound { epoch: 102, ..PageFound { left: true, ..of(1, 8, 30) } };
    assert_eq!(take(&mut master, &page(9, 40), &[of(0, 1, 10), now]), given(1, 103));
}

/// Asks for a page over a connection.
fn take_over(
    master: &mut Master,
    session: &mut Session,
    wanted: &PageWanted,
) -> Result<PageGiven, ErrorCode> {
    let (mut request, mut out) = (Vec::new(), Vec::new());
    TakePage::encode_request(&mut request, 1, wanted, std::iter::empty()).unwrap();
    master.handle(NOW, session, &Frame::parse(&request).unwrap().unwrap().0, &mut out);
    TakePage::decode_response(&Frame::parse(&out).unwrap().unwrap().0).map(|(given, _)| given)
}

#[test]
fn neither_a_connection_nor_a_tenant_takes_every_page_of_a_pool() {
    let limits = |session, tenant| MasterConfig {
        session_pool_pages_max: session,
        tenant_pool_pages_max: tenant,
        ..MasterConfig::default()
    };
    let limited = |of_connection, pages_max| Ok(PageGiven::Limited { of_connection, pages_max });
    let slot = |given: Result<PageGiven, _>| match given {
        Ok(PageGiven::Given { slot, .. }) => Some(slot),
        _ => None,
    };
    // Each identity of another domain: none of them proves that another one has ended.
    let of = |identity| PageWanted { pages: 8, ..page(identity, identity) };
    let mut master = Master::new(limits(2, 1_024)).unwrap();
    let (mut greedy, mut other) = (Session::default(), Session::default());
    assert_eq!((1..=2).map(|no| slot(take_over(&mut master, &mut greedy, &of(no)))).count(), 2);
    assert_eq!(take_over(&mut master, &mut greedy, &of(3)), limited(true, 2));
    assert_eq!(slot(take_over(&mut master, &mut greedy, &of(2))), Some(1), "it has that one");
    assert_eq!(slot(take_over(&mut master, &mut other, &of(4))), Some(2));
    // Another pool has its own.
    let elsewhere = PageWanted { pool: [9; 16], ..of(3) };
    assert_eq!(slot(take_over(&mut master, &mut greedy, &elsewhere)), Some(0));
    // A process of the same host that has ended leaves its page to the next one of the connection.
    let next = PageWanted { domain: 1, ..of(5) };
    assert_eq!(slot(take_over(&mut master, &mut greedy, &next)), Some(0));

    // Over however many connections.
    let mut master = Master::new(limits(1_024, 3)).unwrap();
    for no in 1..=3 {
        assert!(slot(take_over(&mut master, &mut Session::default(), &of(no))).is_some());
    }
    assert_eq!(take_over(&mut master, &mut Session::default(), &of(4)), limited(false, 3));
    // What was given back makes room.
    let freed = PageFreed { pool: POOL, slot: 1, epoch: 2 };
    assert_eq!(master.free_page(&freed), Ok(()));
    assert!(slot(take_over(&mut master, &mut Session::default(), &of(4))).is_some());
    assert_eq!(take_over(&mut master, &mut Session::default(), &of(5)), limited(false, 3));
    // Raised while the master serves.
    for bad in [limits(0, 1), limits(1, 0), limits(1_025, 1), limits(1, 1_025)] {
        assert!(bad.validate().is_err());
    }
}
