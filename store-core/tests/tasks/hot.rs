//! Further replicas of objects that are read very often, and replicas that are bad or are lost with their
//! node.

use store_core::message::*;
use store_core::{ErrorCode, Key, MasterConfig, ReplicationConfig, ReplicationMode, SegmentNo, TenantNo};

use crate::store::*;

pub(crate) fn hot(mode: ReplicationMode) -> MasterConfig {
    let replication = ReplicationConfig {
        mode,
        gets_per_s_min: 10.0,
        window_ms: 1_000,
        replicas_max: 2,
        tasks_per_s_max: 2,
    };
    MasterConfig { replication, ..config() }
}

#[test]
fn what_is_read_very_often_gets_another_replica_if_that_is_wanted() {
    for (mode, hot_gets, created) in
        [(ReplicationMode::Off, 0, 0), (ReplicationMode::Observe, 11, 0), (ReplicationMode::Enforce, 11, 1)]
    {
        let mut store = Store::new(hot(mode), &[64 * KIB, 64 * KIB, 64 * KIB]);
        store.put_on(0, "hot", KIB, SegmentNo::new(1));
        store.put_on(0, "cold", KIB, SegmentNo::new(1));
        for turn in 0..20 {
            store.read(turn * 10, "hot").unwrap();
        }
        store.read(200, "cold").unwrap();
        let report = store.master.task_report();
        assert_eq!((report.hot_gets_total, report.created_total), (hot_gets, created), "{mode:?}");
        store.settle(200);
        let replicas = store.read(201, "hot").unwrap().len();
        assert_eq!(replicas as u64, 1 + created);
        // It does not get a third replica.
        for turn in 0..20 {
            store.read(210 + turn * 10, "hot").unwrap();
        }
        assert_eq!(store.master.task_report().created_total, created);
        assert_eq!(store.master.task_report().extra_replicas, created);
    }
}

#[test]
fn further_replicas_are_begun_at_a_bounded_rate() {
    let mut store = Store::new(hot(ReplicationMode::Enforce), &[64 * KIB, 64 * KIB]);
    for key in 0..5 {
        store.put_on(0, &format!("k{key}"), KIB, SegmentNo::new(1));
    }
    for turn in 0..12 {
        for key in 0..5 {
            store.read(turn * 10, &format!("k{key}")).unwrap();
        }
    }
    assert_eq!(store.master.task_report().created_total, 2);
    for key in 0..5 {
        store.read(1_000, &format!("k{key}")).unwrap();
    }
    assert_eq!(store.master.task_report().created_total, 4);
}

#[test]
fn extra_replicas_are_the_first_to_go() {
    let mut store = Store::new(hot(ReplicationMode::Enforce), &[4 * KIB, 4 * KIB]);
    store.put_on(0, "old", KIB, SegmentNo::new(2));
    store.put_on(0, "hot", KIB, SegmentNo::new(1));
    for turn in 0..12 {
        store.read(turn * 10, "hot").unwrap();
    }
    store.settle(200);
    assert_eq!(store.read(201, "hot").unwrap().len(), 2);
    for (turn, segment) in [1, 1, 1, 2, 2].into_iter().enumerate() {
        store.put_on(300, &format!("fill{turn}"), KIB, SegmentNo::new(segment));
    }
    assert_eq!(store.used(), 8 * KIB);
    // While the extra replica is leased, it stays, and the oldest object is evicted.
    store.put(400, "one", KIB, &ONE);
    assert!(!store.master.exists(b"old"));
    assert_eq!(store.read(401, "hot").unwrap().len(), 2);
    // When it is not leased, it is dropped before any object is evicted.
    store.put(2_000, "two", KIB, &ONE);
    assert_eq!(store.read(2_001, "hot").unwrap().len(), 1);
    assert_eq!((store.master.stats().evictions_total, store.master.stats().objects), (1, 8));
    assert_eq!(store.master.task_report().extras_shed_total, 1);
}

#[test]
fn a_replica_goes_when_enough_different_readers_found_it_bad() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
    let generation = store.put(0, "k", KIB, &TWO);
    let bad = |segment| BadReplica { key: Key(b"k"), generation, segment };
    let mut report =
        |ms, who, segment| store.master.report_replica(at(ms), who, TenantNo::new(0), &bad(segment));
    for ms in 0..10 {
        assert_eq!(report(ms, 7, SegmentNo::new(1)), Ok(Verdict::Noted), "one reader counts once");
    }
    assert_eq!(
        report(10, 8, SegmentNo::new(2)),
        Ok(Verdict::Noted),
        "reports of another replica are counted apart"
    );
    assert_eq!(report(11, 8, SegmentNo::new(1)), Ok(Verdict::Dropped));
    assert_eq!(report(12, 9, SegmentNo::new(1)), Err(ErrorCode::ReplicaNotFound));
    assert_eq!(store.read(13, "k"), Ok(nos([2])));
    // The last replica is dropped in the same way: it could not be read, and its key would be taken.
    let last = store.master.report_replica(at(14), 7, TenantNo::new(0), &bad(SegmentNo::new(2)));
    assert_eq!(last, Ok(Verdict::Gone));
    assert_eq!(store.read(15, "k"), Err(ErrorCode::ObjectNotFound));
    assert_eq!(store.master.stats().deferred_bytes, KIB, "a reader may still have a lease");
    store.put(16, "k", KIB, &ONE);
    let stale = store.master.report_replica(at(17), 1, TenantNo::new(0), &bad(SegmentNo::new(1)));
    assert_eq!(stale, Err(ErrorCode::ObjectNotFound), "a report about the previous object");
}

#[test]
fn a_nodes_death_costs_its_replicas_and_no_others() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB, 64 * KIB]);
    for key in 0..12 {
        store.put(0, &format!("k{key}"), KIB, &TWO);
    }
    let before: Vec<_> = (0..12).map(|key| store.read(1, &format!("k{key}")).unwrap()).collect();
    store.mount(2, 2, 64 * KIB);
    for (key, replicas) in before.iter().enumerate() {
        let left: Vec<_> = replicas.iter().copied().filter(|no| *no != SegmentNo::new(2)).collect();
        assert_eq!(store.read(3, &format!("k{key}")), Ok(left));
    }
    assert_eq!(store.master.stats().objects_lost_total, 0);
}
