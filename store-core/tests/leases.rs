//! Leases: never shorter than the reader was told, and over as soon as the last reader returns its lease.
#![allow(clippy::unwrap_used, reason = "tests")]

use store_core::message::{
    Get, Kept, LeaseRange, MountSegment, Operation, PutOptions, Removal, Remove, RemoveMode, Retention,
    ReturnLeases,
};
use store_core::{ErrorCode, Frame, Incarnation, Instant, Key, Master, MasterConfig, NodeId, Session};

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
    for<'a> O: Operation<Request<'a> = ()>,
    for<'a> O::RequestItem<'a>: Copy,
{
    let (mut request, mut out) = (Vec::new(), Vec::new());
    O::encode_request(&mut request, 1, &(), items.iter().copied()).unwrap();
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
