//! Leases: never shorter than the reader was told, and over as soon as the last reader returns its lease.
#![allow(clippy::unwrap_used, reason = "tests")]

use store_core::command_log::{Dependence, Recorder};
use store_core::message::{
    ClearReplicas, Existing, ExistsLeased, Get, Kept, LeaseRange, LeaseWanted, MountSegment, Operation,
    PutOptions, Removal, Remove, RemoveMode, Retention, ReturnLeases,
};
use store_core::{
    ErrorCode, Frame, Incarnation, Instant, Key, Master, MasterConfig, NodeId, QUICK_LEASE_MS, Session,
    snapshot,
};

const KIB: u64 = 1 << 10;
const LEASE_MS: u64 = 1_000;

fn at(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

fn master(len: u64) -> Master {
    let config = MasterConfig {
        lease_ttl_ms: LEASE_MS as u32,
        lease_guard_ms: 100,
        eviction_high_watermark: 1.0,
        eviction_ratio: 0.0,
        ..MasterConfig::default()
    };
    let mut master = Master::new(config).unwrap();
    let segment = MountSegment {
        node: NodeId::new(1),
        incarnation: Incarnation::new(1),
        name: "s",
        endpoint: "n:1",
        len,
        ..MountSegment::default()
    };
    master.mount(at(0), &segment).unwrap().mounted().unwrap();
    master
}

fn put(master: &mut Master, ms: u64, key: &str, options: &PutOptions) -> Result<(), ErrorCode> {
    let started = master.put_start(at(ms), key.as_bytes(), KIB, options)?;
    master.put_end(at(ms), key.as_bytes(), started.generation, 1)
}

fn send<O>(master: &mut Master, ms: u64, session: &mut Session, items: &[O::RequestItem<'_>]) -> Vec<u8>
where
    for<'a> O: Operation<Request<'a>: Default>,
    for<'a> O::RequestItem<'a>: Copy,
{
    let (mut request, mut out) = (Vec::new(), Vec::new());
    O::encode_request(&mut request, 1, &Default::default(), items.iter().copied()).unwrap();
    master.handle(at(ms), session, &Frame::parse(&request).unwrap().unwrap().0, &mut out);
    out
}

/// Gets keys; returns the leases of those that were found.
fn get(master: &mut Master, ms: u64, session: &mut Session, keys: &[&str]) -> LeaseRange {
    let keys: Vec<_> = keys.iter().map(|key| Key(key.as_bytes())).collect();
    let out = send::<Get>(master, ms, session, &keys);
    let (lease, items) = Get::decode_response(&Frame::parse(&out).unwrap().unwrap().0).unwrap();
    LeaseRange { first: lease.first, count: items.filter(Result::is_ok).count() as u32 }
}

fn give_back(master: &mut Master, ms: u64, session: &mut Session, range: LeaseRange) {
    assert!(send::<ReturnLeases>(master, ms, session, &[range]).is_empty(), "it has no response");
}

fn remove(master: &mut Master, ms: u64, key: &str) -> Result<(), ErrorCode> {
    let removal = Removal { key: Key(key.as_bytes()), force: false };
    let out = send::<Remove>(master, ms, &mut Session::default(), &[removal]);
    Remove::decode_response(&Frame::parse(&out).unwrap().unwrap().0).unwrap().1.next().unwrap()
}

/// Clears all replicas of an object.
fn clear(master: &mut Master, ms: u64, key: &str) -> Result<(), ErrorCode> {
    let (mut request, mut out) = (Vec::new(), Vec::new());
    ClearReplicas::encode_request(&mut request, 1, &None, [Key(key.as_bytes())].into_iter()).unwrap();
    master.handle(at(ms), &mut Session::default(), &Frame::parse(&request).unwrap().unwrap().0, &mut out);
    ClearReplicas::decode_response(&Frame::parse(&out).unwrap().unwrap().0).unwrap().1.next().unwrap()
}

#[test]
fn what_was_just_written_or_read_is_not_cleared_and_may_be_removed() {
    let mut master = master(64 * KIB);
    // Half of the lease's time after the commit, however long the put took.
    let started = master.put_start(at(0), b"k", KIB, &PutOptions::DEFAULT).unwrap();
    assert_eq!(clear(&mut master, 0, "k"), Err(ErrorCode::ReplicaIsNotReady));
    master.put_end(at(700), b"k", started.generation, 1).unwrap();
    assert_eq!(clear(&mut master, 700, "k"), Err(ErrorCode::ObjectHasLease));
    assert_eq!(clear(&mut master, 1_199, "k"), Err(ErrorCode::ObjectHasLease));
    assert_eq!(master.stats().objects_leased, 0, "it is not leased otherwise");
    assert_eq!(clear(&mut master, 1_200, "k"), Ok(()));
    // The same after a lease that was returned, and after one that ran out.
    let mut session = Session::default();
    for key in ["returned", "over"] {
        put(&mut master, 2_000, key, &PutOptions::DEFAULT).unwrap();
    }
    let range = get(&mut master, 3_000, &mut session, &["returned"]);
    get(&mut master, 3_000, &mut session, &["over"]);
    give_back(&mut master, 3_001, &mut session, range);
    assert_eq!(master.stats().objects_leased, 1);
    assert_eq!(clear(&mut master, 3_500, "returned"), Err(ErrorCode::ObjectHasLease));
    assert_eq!(clear(&mut master, 3_501, "returned"), Ok(()));
    assert_eq!(clear(&mut master, 4_599, "over"), Err(ErrorCode::ObjectHasLease));
    assert_eq!(clear(&mut master, 4_600, "over"), Ok(()), "the lease ended at 4,100");
    // A removal does not wait for it.
    put(&mut master, 6_000, "k", &PutOptions::DEFAULT).unwrap();
    assert_eq!(remove(&mut master, 6_000, "k"), Ok(()));
}

#[test]
fn a_lease_is_measured_from_the_handling_of_its_own_request_however_long_the_turn_is() {
    let mut master = master(64 * KIB);
    put(&mut master, 0, "k", &PutOptions::DEFAULT).unwrap();
    let mut session = Session::default();
    // One turn of the loop takes three seconds, and every request in it is given the time that was read
    // before it.
    for ms in (1_000..4_000).step_by(500) {
        get(&mut master, ms, &mut session, &["k"]);
    }
    // The last reader sent its request at 3,500 at the earliest and may read for a second.
    assert_eq!(remove(&mut master, 4_500, "k"), Err(ErrorCode::ObjectHasLease));
    assert_eq!(remove(&mut master, 4_599, "k"), Err(ErrorCode::ObjectHasLease));
    assert_eq!(remove(&mut master, 4_600, "k"), Ok(()));
}

#[test]
fn with_the_last_reader_that_gives_its_lease_back_the_object_may_go() {
    let mut master = master(64 * KIB);
    put(&mut master, 0, "k", &PutOptions::DEFAULT).unwrap();
    let (mut a, mut b) = (Session::default(), Session::default());
    let first = get(&mut master, 1, &mut a, &["k"]);
    let second = get(&mut master, 2, &mut a, &["miss", "k"]);
    let other = get(&mut master, 3, &mut b, &["k"]);
    assert_eq!((first.first, second.first, second.count, other.first), (1, 2, 1, 1));
    assert!(a.holds() && b.holds());
    give_back(&mut master, 4, &mut a, first);
    // A repetition returns nothing.
    for _ in 0..5 {
        give_back(&mut master, 4, &mut a, first);
    }
    give_back(&mut master, 4, &mut a, second);
    assert!(!a.holds());
    assert_eq!(
        remove(&mut master, 5, "k"),
        Err(ErrorCode::ObjectHasLease),
        "the other reader still has its lease"
    );
    assert_eq!(master.stats().objects_leased, 1);
    give_back(&mut master, 6, &mut b, other);
    assert_eq!((master.stats().objects_leased, master.stats().leases_returned_total), (0, 3));
    assert_eq!(remove(&mut master, 6, "k"), Ok(()));
}

#[test]
fn a_connection_returns_only_leases_that_it_was_granted() {
    let mut master = master(64 * KIB);
    put(&mut master, 0, "k", &PutOptions::DEFAULT).unwrap();
    let (mut reader, mut liar) = (Session::default(), Session::default());
    let lease = get(&mut master, 1, &mut reader, &["k"]);
    for range in [
        lease,
        LeaseRange { first: 0, count: u32::MAX },
        LeaseRange { first: u64::MAX, count: u32::MAX },
        LeaseRange { first: lease.first, count: 0 },
    ] {
        give_back(&mut master, 2, &mut liar, range);
    }
    give_back(&mut master, 2, &mut reader, LeaseRange { first: lease.first + 1, count: 9 });
    assert_eq!(remove(&mut master, 3, "k"), Err(ErrorCode::ObjectHasLease));
    // A lease that has run out is not returned in place of another reader's.
    get(&mut master, 1_500, &mut liar, &["k"]);
    give_back(&mut master, 1_501, &mut reader, lease);
    assert_eq!(remove(&mut master, 1_502, "k"), Err(ErrorCode::ObjectHasLease));
}

#[test]
fn a_lease_of_an_object_that_is_gone_is_not_taken_for_one_of_its_successor() {
    let mut master = master(64 * KIB);
    put(&mut master, 0, "k", &PutOptions::DEFAULT).unwrap();
    let mut session = Session::default();
    let old = get(&mut master, 1, &mut session, &["k"]);
    master.remove(at(2), b"k", RemoveMode::Force).unwrap();
    put(&mut master, 3, "k", &PutOptions::DEFAULT).unwrap();
    get(&mut master, 4, &mut Session::default(), &["k"]);
    give_back(&mut master, 5, &mut session, old);
    assert_eq!(remove(&mut master, 6, "k"), Err(ErrorCode::ObjectHasLease));
}

#[test]
fn the_space_of_an_object_that_is_gone_is_free_when_the_last_reader_has_returned_its_lease() {
    let upsert = PutOptions { existing: Existing::REPLACE, ..PutOptions::DEFAULT };
    for replaces in [false, true] {
        let mut master = master(64 * KIB);
        put(&mut master, 0, "k", &PutOptions::DEFAULT).unwrap();
        let (mut a, mut b) = (Session::default(), Session::default());
        let first = get(&mut master, 1, &mut a, &["k"]);
        let second = get(&mut master, 2, &mut b, &["k"]);
        let again = get(&mut master, 3, &mut b, &["k"]);
        match replaces {
            true => put(&mut master, 4, "k", &upsert).unwrap(),
            false => master.remove(at(4), b"k", RemoveMode::Force).unwrap(),
        }
        let other = get(&mut master, 5, &mut a, &["k"]);
        for (session, lease) in [(&mut a, first), (&mut b, second)] {
            give_back(&mut master, 6, session, lease);
            assert_eq!(master.stats().deferred_bytes, KIB);
        }
        // A repetition, and the lease of the successor, return nothing.
        give_back(&mut master, 7, &mut b, second);
        give_back(&mut master, 7, &mut a, other);
        assert_eq!(master.stats().deferred_bytes, KIB, "{replaces}");
        give_back(&mut master, 8, &mut b, again);
        let stats = master.stats();
        assert_eq!((stats.deferred_bytes, stats.used_bytes), (0, if replaces { KIB } else { 0 }));
    }
}

#[test]
fn with_more_readers_than_are_counted_the_space_of_an_object_that_is_gone_waits_for_the_time() {
    let mut master = master(64 * KIB);
    put(&mut master, 0, "k", &PutOptions::DEFAULT).unwrap();
    let mut sessions: Vec<Session> = (0..40).map(|_| Session::default()).collect();
    let leases: Vec<_> = sessions.iter_mut().map(|session| get(&mut master, 1, session, &["k"])).collect();
    master.remove(at(2), b"k", RemoveMode::Force).unwrap();
    for (session, lease) in sessions.iter_mut().zip(leases) {
        give_back(&mut master, 3, session, lease);
    }
    master.handle_timeout(at(1_100));
    assert_eq!(master.stats().deferred_bytes, KIB, "the count may be late, but not early");
    master.handle_timeout(at(1_101));
    assert_eq!(master.stats().deferred_bytes, 0);
}

/// Checks whether keys exist; returns which do, and their leases.
fn exists(master: &mut Master, ms: u64, session: &mut Session, keys: &[&str]) -> (Vec<bool>, LeaseRange) {
    let keys: Vec<_> = keys.iter().map(|key| Key(key.as_bytes())).collect();
    let out = send::<ExistsLeased>(master, ms, session, &keys);
    let (lease, items) = ExistsLeased::decode_response(&Frame::parse(&out).unwrap().unwrap().0).unwrap();
    let found: Vec<bool> = items.collect();
    let count = found.iter().filter(|found| **found).count() as u32;
    (found, LeaseRange { first: lease.first, count })
}

#[test]
fn what_is_said_to_exist_with_a_lease_stays_as_long_as_for_a_reader() {
    let mut master = master(2 * KIB);
    let mortal =
        PutOptions { retention: Retention { ttl_ms: Some(50), ..Retention::DEFAULT }, ..PutOptions::DEFAULT };
    put(&mut master, 0, "k", &PutOptions::DEFAULT).unwrap();
    put(&mut master, 0, "expired", &mortal).unwrap();
    let mut session = Session::default();
    let (found, leases) = exists(&mut master, 60, &mut session, &["none", "k", "expired"]);
    assert_eq!((found, leases), (vec![false, true, false], LeaseRange { first: 1, count: 1 }));
    master.put_start(at(61), b"unfinished", KIB, &PutOptions::DEFAULT).unwrap();
    assert_eq!(exists(&mut master, 61, &mut session, &["unfinished"]).0, [false]);
    assert_eq!(remove(&mut master, 62, "k"), Err(ErrorCode::ObjectHasLease));
    assert_eq!(put(&mut master, 63, "l", &PutOptions::DEFAULT), Err(ErrorCode::NoAvailableHandle));
    assert_eq!(remove(&mut master, 1_159, "k"), Err(ErrorCode::ObjectHasLease));
    // The lease of a reader and this one are counted alike.
    let read = get(&mut master, 1_160, &mut session, &["k"]);
    let (_, again) = exists(&mut master, 1_160, &mut session, &["k"]);
    assert_eq!((read.first, again.first), (2, 3));
    give_back(&mut master, 1_170, &mut session, read);
    assert_eq!(remove(&mut master, 1_170, "k"), Err(ErrorCode::ObjectHasLease));
    give_back(&mut master, 1_171, &mut session, again);
    assert_eq!(remove(&mut master, 1_171, "k"), Ok(()));
    let stats = master.stats();
    assert_eq!((stats.exists_total, stats.exists_hits_total, stats.gets_total), (5, 2, 1));
}

#[test]
fn more_readers_than_are_counted_wait_for_the_time() {
    let mut master = master(64 * KIB);
    put(&mut master, 0, "k", &PutOptions::DEFAULT).unwrap();
    let mut sessions: Vec<Session> = (0..40).map(|_| Session::default()).collect();
    let leases: Vec<_> = sessions.iter_mut().map(|session| get(&mut master, 1, session, &["k"])).collect();
    for (session, lease) in sessions.iter_mut().zip(leases) {
        give_back(&mut master, 2, session, lease);
    }
    assert_eq!(
        remove(&mut master, 3, "k"),
        Err(ErrorCode::ObjectHasLease),
        "the count may be late, but not early"
    );
    assert_eq!(remove(&mut master, 1_101, "k"), Ok(()));
}

#[test]
fn an_object_of_the_leased_set_can_be_evicted_as_soon_as_its_lease_is_returned() {
    let mut master = master(2 * KIB);
    for key in ["a", "b"] {
        put(&mut master, 0, key, &PutOptions::DEFAULT).unwrap();
    }
    let mut session = Session::default();
    let leases = get(&mut master, 1, &mut session, &["a", "b"]);
    assert_eq!(put(&mut master, 2, "c", &PutOptions::DEFAULT), Err(ErrorCode::NoAvailableHandle));
    give_back(&mut master, 3, &mut session, LeaseRange { count: 1, ..leases });
    put(&mut master, 4, "c", &PutOptions::DEFAULT).unwrap();
    assert_eq!([b"a", b"b", b"c"].map(|key| master.exists(key)), [false, true, true]);
}

#[test]
fn the_members_of_a_group_stay_together_until_the_lease_of_any_of_them_has_run_out() {
    let mut master = master(2 * KIB);
    let grouped =
        PutOptions { retention: Retention { group: Some(1), ..Retention::DEFAULT }, ..PutOptions::DEFAULT };
    for key in ["a", "b"] {
        put(&mut master, 0, key, &grouped).unwrap();
    }
    let mut session = Session::default();
    let lease = get(&mut master, 1, &mut session, &["a"]);
    give_back(&mut master, 2, &mut session, lease);
    assert_eq!(master.kept(at(3), b"b"), Ok(Some(Kept::Leased)));
    assert_eq!(master.kept(at(1_101), b"b"), Ok(None));
}

#[test]
fn what_a_connection_may_give_back_is_bounded() {
    let mut master = master(64 * KIB);
    put(&mut master, 0, "k", &PutOptions::DEFAULT).unwrap();
    let mut session = Session::default();
    let first = get(&mut master, 1, &mut session, &["k"]);
    get(&mut master, 1, &mut session, &["k"; 2_000]);
    give_back(&mut master, 2, &mut session, first);
    assert_eq!(master.stats().leases_returned_total, 0, "it was forgotten, and ends by time");
}

/// A process that leads after this master, whose last command is of this time.
fn successor(mut master: Master, ms: u64, handed_over: bool) -> Master {
    let mut recorder = Recorder::new(&mut master);
    recorder.set_wall_ms(&mut master, at(ms), 1);
    let _ = recorder.take();
    let mut bytes = Vec::new();
    let mut sink = |chunk: &[u8]| -> Result<(), ()> {
        bytes.extend_from_slice(chunk);
        Ok(())
    };
    recorder.snapshot(&master, [].iter(), 1, crc32c::crc32c, &mut sink).unwrap();
    let mut rest = &bytes[..];
    let read = &mut |to: &mut [u8]| std::io::Read::read(&mut rest, to);
    snapshot::restore(crc32c::crc32c, read).unwrap().0.lead(handed_over).0
}

#[test]
fn a_leader_that_was_not_handed_over_to_reuses_no_space_while_leases_that_it_does_not_know_may_be_valid() {
    for handed_over in [true, false] {
        let mut former = master(8 * KIB);
        for number in 0..20 {
            // The store is full, so each put evicts another object.
            put(&mut former, 0, &format!("key {number}"), &PutOptions::DEFAULT).unwrap();
        }
        // After what was written at the beginning may be cleared.
        let mut leader = successor(former, LEASE_MS, handed_over);
        let over = LEASE_MS + u64::from(QUICK_LEASE_MS) + 100;
        let cleared = clear(&mut leader, over - 1, "key 19");
        let added = put(&mut leader, over - 1, "new", &PutOptions::DEFAULT)
            .and_then(|()| put(&mut leader, over - 1, "newer", &PutOptions::DEFAULT));
        if handed_over {
            assert_eq!((cleared, added), (Ok(()), Ok(())));
            continue;
        }
        assert_eq!(cleared, Err(ErrorCode::ObjectHasLease));
        assert_eq!(added, Err(ErrorCode::NoAvailableHandle));
        // The longest lease that it may not know, and its guard, are over.
        assert_eq!(put(&mut leader, over, "new", &PutOptions::DEFAULT), Ok(()));
        assert_eq!(clear(&mut leader, over, "key 19"), Ok(()));
    }
}

#[test]
fn an_answer_grants_a_quick_lease_at_once_and_a_lasting_one_when_it_is_confirmed() {
    let mut master = master(64 * KIB);
    put(&mut master, 0, "k", &PutOptions::DEFAULT).unwrap();
    let mut session = Session::default();
    let ms = |out: &[u8]| Get::decode_response(&Frame::parse(out).unwrap().unwrap().0).unwrap().0.lease_ms;
    let out = send::<Get>(&mut master, 1, &mut session, &[Key(b"k")]);
    assert_eq!(u64::from(ms(&out)), LEASE_MS, "nothing continues a master without a log");
    let mut recorder = Recorder::new(&mut master);
    let mut dependence = Dependence::new(&mut master, 0);
    let mut ask = |at_ms: u64, request: &[u8]| {
        let (frame, _) = Frame::parse(request).unwrap().unwrap();
        let mut out = Vec::new();
        recorder.handle(&mut master, at(at_ms), &mut session, &frame, &mut out);
        dependence.executed(&mut master, &frame, recorder.lsn());
        (out, dependence.of(&master, &session, &frame), dependence.awaited(), recorder.lsn())
    };
    let get = |wanted| {
        let mut request = Vec::new();
        Get::encode_request(&mut request, 1, &wanted, [Key(b"k")].into_iter()).unwrap();
        request
    };
    let (out, depends_on, awaited, _) = ask(2, &get(LeaseWanted::Quick));
    assert_eq!((ms(&out), depends_on, awaited), (QUICK_LEASE_MS, 0, 0));
    let (out, depends_on, awaited, lsn) = ask(3, &get(LeaseWanted::Lasting));
    assert!(lsn > 0, "the lease is in the log");
    assert_eq!((u64::from(ms(&out)), depends_on, awaited), (LEASE_MS, lsn, lsn));
    let mut request = Vec::new();
    ExistsLeased::encode_request(&mut request, 1, &(), [Key(b"k")].into_iter()).unwrap();
    let (out, depends_on, awaited, after) = ask(4, &request);
    let (lease, _) = ExistsLeased::decode_response(&Frame::parse(&out).unwrap().unwrap().0).unwrap();
    assert!(after > lsn);
    assert_eq!((u64::from(lease.lease_ms), depends_on, awaited), (LEASE_MS, after, after));
}
