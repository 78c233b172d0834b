//! Segments that accept nothing new, and are emptied.

use store_core::message::*;
use store_core::{ErrorCode, Event, Incarnation, MasterConfig, NodeId, Placement, SegmentNo, TaskConfig};

use crate::store::*;

#[test]
fn draining_moves_everything_while_readers_read() {
    let tasks = TaskConfig { drain_moves_max: 4, ..config().tasks };
    let mut store = Store::new(MasterConfig { tasks, ..config() }, &[256 * KIB, 256 * KIB, 256 * KIB]);
    for key in 0..40 {
        store.put_on(0, &format!("k{key}"), KIB + key * 64, SegmentNo::new(1));
    }
    assert_eq!(store.order(10, SegmentNo::new(1), SegmentState::Draining).state, SegmentState::Draining);
    assert_eq!(store.master.poll_timeout(), Some(at(10)));
    let mut ms = 10;
    while store.master.drain_info(SegmentNo::new(1)).unwrap().state == SegmentState::Draining {
        ms += 50;
        store.master.handle_timeout(at(ms));
        assert!(store.master.drain_info(SegmentNo::new(1)).unwrap().moving <= 4);
        store.work(ms, 2 + ms / 50 % 2);
        for key in (0..40).step_by(7) {
            store.read(ms, &format!("k{key}")).unwrap();
        }
        let new = store.master.put_start(at(ms), format!("n{ms}").as_bytes(), KIB, &ONE).unwrap();
        assert_ne!(new.replicas[0].segment, no(1), "new puts go elsewhere");
        store
            .master
            .put_revoke(at(ms), format!("n{ms}").as_bytes(), new.generation, WriterState::Quiet)
            .unwrap();
        assert!(ms < 30_000, "{:?}", store.master.drain_info(SegmentNo::new(1)));
    }
    let info = store.master.drain_info(SegmentNo::new(1)).unwrap();
    assert_eq!((info.state, info.moved_total, info.blocks), (SegmentState::Drained, 40, 0));
    for key in 0..40 {
        assert_ne!(store.read(ms, &format!("k{key}")), Ok(nos([1])));
    }
    store
        .master
        .unmount(at(ms), &UnmountSegment::new(NodeId::new(1), Incarnation::new(1), SegmentNo::new(1)))
        .unwrap();
    assert_eq!((store.master.stats().objects_lost_total, store.master.stats().objects), (0, 40));
    assert!(store.master.drains().next().is_none());
}

/// The number of requests of a node until a segment is drained, with fetches and reports in turn, while no
/// time passes.
fn calls_to_drain(store: &mut Store, ms: u64, segment: SegmentNo, node: u64) -> u32 {
    store.order(ms, segment, SegmentState::Draining);
    store.master.handle_timeout(at(ms));
    let mut calls = 0;
    while store.master.drain_info(segment).unwrap().state == SegmentState::Draining {
        store.work(ms, node);
        calls += 1;
        assert!(calls < 10_000, "{:?}", store.master.drain_info(segment));
    }
    calls
}

#[test]
fn a_drain_goes_as_fast_as_nodes_ask_and_is_over_with_its_last_move() {
    const OBJECTS: u64 = 1_000;
    let mut store = Store::new(config(), &[OBJECTS * KIB, OBJECTS * KIB]);
    for key in 0..OBJECTS {
        store.put_on(0, &format!("k{key}"), KIB - 64, SegmentNo::new(1));
    }
    // No timer has to run out, neither the master's nor a lease's: every fetch returns as many tasks as the
    // node may have.
    let calls = calls_to_drain(&mut store, 10, SegmentNo::new(1), 2);
    let per_node_max = u64::from(config().tasks.per_node_max);
    assert!(u64::from(calls) <= OBJECTS.div_ceil(per_node_max) + 1, "{calls} calls");
    let info = store.master.drain_info(SegmentNo::new(1)).unwrap();
    assert_eq!((info.moved_total, info.used_bytes), (OBJECTS, 0));
}

#[test]
fn what_a_drain_leaves_is_reported_once_and_so_is_its_end() {
    let mut store = Store::new(config(), &[64 * KIB, 4 * KIB]);
    store.put_on(0, "fits", KIB, SegmentNo::new(1));
    store.put_on(0, "large", 8 * KIB, SegmentNo::new(1));
    store.put_on(0, "bad", KIB, SegmentNo::new(1));
    let bad = store.master.get(at(0), b"bad").unwrap();
    store.write(SegmentNo::new(1), bad.replicas[0].addr, b"rot");
    let reported = |store: &mut Store| -> Vec<(u64, u64)> {
        let events = std::iter::from_fn(|| store.master.poll_event());
        let left = events.filter_map(|event| match event {
            Event::SegmentDrained { segment, left_objects, left_bad, .. } => {
                assert_eq!(segment, no(1));
                Some((left_objects, left_bad))
            }
            _ => None,
        });
        left.collect()
    };
    store.order(2_000, SegmentNo::new(1), SegmentState::Draining);
    for ms in (2_001..20_000).step_by(1_000) {
        store.settle(ms);
    }
    assert_eq!(reported(&mut store), [(1, 1)], "whatever the number of rounds");
    store.master.remove(at(20_000), b"bad", RemoveMode::Force).unwrap();
    for ms in (20_001..25_000).step_by(1_000) {
        store.settle(ms);
    }
    assert_eq!(reported(&mut store), [(1, 0)]);
    store.mount(25_000, 3, 64 * KIB);
    for ms in (25_001..30_000).step_by(1_000) {
        store.settle(ms);
    }
    assert_eq!(
        (reported(&mut store), store.master.drain_info(SegmentNo::new(1)).unwrap().state),
        (vec![(0, 0)], SegmentState::Drained)
    );
}

#[test]
fn what_finds_no_place_elsewhere_stays_and_is_counted() {
    let mut store = Store::new(config(), &[64 * KIB, 4 * KIB]);
    store.put_on(0, "fits", 3 * KIB, SegmentNo::new(1));
    store.put_on(0, "large", 8 * KIB, SegmentNo::new(1));
    store.put_on(0, "also large", 8 * KIB, SegmentNo::new(1));
    let open = store.master.put_start(at(0), b"open", 16 * KIB, &ONE).unwrap();
    store.order(0, SegmentNo::new(1), SegmentState::Draining);
    store.settle(1);
    let info = store.master.drain_info(SegmentNo::new(1)).unwrap();
    assert_eq!(info.state, SegmentState::Draining);
    assert_eq!((info.moved_total, info.left_no_room, info.left_unfinished), (1, 2, 1));
    assert_eq!(store.read(2, "large"), Ok(nos([1])), "it is still readable");
    assert_eq!(store.master.poll_timeout(), Some(at(1_001)), "the next round");
    // With a new node there is room; and the unfinished put was given up.
    store.mount(2_000, 3, 64 * KIB);
    store.master.put_revoke(at(2_000), b"open", open.generation, WriterState::Quiet).unwrap();
    store.settle(2_500);
    // The source of a move stays until its leases are over.
    store.settle(10_000);
    store.settle(20_000);
    let info = store.master.drain_info(SegmentNo::new(1)).unwrap();
    assert_eq!((info.state, info.left_no_room, info.left_unfinished), (SegmentState::Drained, 0, 0));
    for key in ["fits", "large", "also large"] {
        assert!(!store.read(20_001, key).unwrap().contains(&no(1)));
    }
}

#[test]
fn a_bad_replica_stays_and_is_counted_until_it_is_removed() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
    store.put_on(0, "good", KIB, SegmentNo::new(1));
    store.put_on(0, "bad", KIB, SegmentNo::new(1));
    let bad = store.master.get(at(0), b"bad").unwrap();
    store.write(SegmentNo::new(1), bad.replicas.iter().next().unwrap().addr, b"rot");
    store.order(10_000, SegmentNo::new(1), SegmentState::Draining);
    for ms in [10_001, 20_000, 30_000, 40_000] {
        // The source of a move stays until its leases are over, and every round tries the bad replica again.
        store.settle(ms);
    }
    let info = store.master.drain_info(SegmentNo::new(1)).unwrap();
    assert_eq!((info.state, info.blocks), (SegmentState::Draining, 1));
    assert_eq!((info.moved_total, info.left_bad, info.left_no_room), (1, 1, 0));
    assert!(info.failed_total >= 2, "{info:?}");
    store.master.remove(at(50_000), b"bad", RemoveMode::Force).unwrap();
    store.settle(50_001);
    store.settle(60_000);
    let info = store.master.drain_info(SegmentNo::new(1)).unwrap();
    assert_eq!((info.state, info.left_bad), (SegmentState::Drained, 0));
}

#[test]
fn what_is_removed_during_a_round_is_not_left_by_it() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
    for key in ["one", "two"] {
        store.put_on(0, key, KIB, SegmentNo::new(1));
    }
    store.order(10_000, SegmentNo::new(1), SegmentState::Draining);
    store.master.handle_timeout(at(10_000));
    let orders = store.fetch(10_001, 2);
    assert_eq!((orders.len(), store.master.drain_info(SegmentNo::new(1)).unwrap().moving), (2, 2));
    store.write(SegmentNo::new(1), orders[0].sources[0].addr, b"rot");
    let end = store.copy(&orders[0]);
    store.report(10_002, 2, &end).unwrap();
    assert_eq!(store.master.drain_info(SegmentNo::new(1)).unwrap().moving, 1);
    let rotten = |store: &Store, key: &str| {
        let replicas = store.master.find_replicas(key.as_bytes()).unwrap();
        replicas
            .iter()
            .any(|replica| (replica.segment, replica.addr) == (SegmentNo::new(1), orders[0].sources[0].addr))
    };
    let key = if rotten(&store, "one") { "one" } else { "two" };
    store.master.remove(at(10_003), key.as_bytes(), RemoveMode::Force).unwrap();
    let end = store.copy(&orders[1]);
    store.report(10_004, 2, &end).unwrap();
    // Both sources stay until their leases are over.
    for ms in [10_005, 20_000, 30_000] {
        store.settle(ms);
    }
    let info = store.master.drain_info(SegmentNo::new(1)).unwrap();
    assert_eq!((info.state, info.left_bad, info.left_unfinished), (SegmentState::Drained, 0, 0), "{info:?}");
}

#[test]
fn a_move_of_a_drain_that_was_called_off_does_not_count_for_the_next() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
    for key in 0..3 {
        store.put_on(0, &format!("k{key}"), KIB, SegmentNo::new(1));
    }
    store.order(10_000, SegmentNo::new(1), SegmentState::Draining);
    store.master.handle_timeout(at(10_000));
    let orders = store.fetch(10_001, 2);
    assert_eq!(orders.len(), 3);
    store.order(10_002, SegmentNo::new(1), SegmentState::Active);
    store.order(10_003, SegmentNo::new(1), SegmentState::Draining);
    store.master.handle_timeout(at(10_003));
    let before = store.master.drain_info(SegmentNo::new(1)).unwrap();
    store.write(SegmentNo::new(1), orders[0].sources[0].addr, b"rot");
    let end = store.copy(&orders[0]);
    store.report(10_004, 2, &end).unwrap();
    let after = store.master.drain_info(SegmentNo::new(1)).unwrap();
    assert_eq!((after.moving, after.failed_total, after.left_bad), (before.moving, 0, 0), "{after:?}");
}

#[test]
fn a_replica_with_another_elsewhere_is_dropped_when_there_is_no_third_place() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
    store.put(0, "k", KIB, &TWO);
    store.order(0, SegmentNo::new(1), SegmentState::Draining);
    store.settle(1);
    let info = store.master.drain_info(SegmentNo::new(1)).unwrap();
    assert_eq!((info.state, info.dropped_total, info.left_no_room), (SegmentState::Drained, 1, 0));
    assert_eq!(store.read(2, "k"), Ok(nos([2])));
}

#[test]
fn maintenance_takes_nothing_new_and_serves_and_active_ends_everything() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
    store.put_on(0, "k", KIB, SegmentNo::new(1));
    assert_eq!(store.order(0, SegmentNo::new(1), SegmentState::Maintenance).state, SegmentState::Maintenance);
    let options = PutOptions { placement: Placement::on(SegmentNo::new(1)), ..TWO };
    let put = store.master.put_start(at(1), b"l", KIB, &options).unwrap();
    assert_eq!((put.replicas.len(), put.replicas[0].segment), (1, no(2)));
    assert_eq!(
        store.master.create_task(at(1), b"k", None, Some(SegmentNo::new(1))),
        Err(ErrorCode::ReplicaAlreadyExists)
    );
    assert_eq!(store.read(2, "k"), Ok(nos([1])));
    store.settle(3);
    assert_eq!(store.master.drain_info(SegmentNo::new(1)).unwrap().moved_total, 0);
    assert_eq!(store.master.drains().count(), 1);
    // A drain that is called off cancels the moves that have not begun.
    store.order(4, SegmentNo::new(1), SegmentState::Draining);
    store.master.handle_timeout(at(4));
    assert_eq!(store.master.task_report().pending, 1);
    assert_eq!(store.order(5, SegmentNo::new(1), SegmentState::Active).state, SegmentState::Active);
    let report = store.master.task_report();
    assert_eq!((report.pending, report.canceled_total, report.draining), (0, 1, 0));
    let put = store
        .master
        .put_start(at(6), b"m", KIB, &PutOptions { placement: Placement::on(SegmentNo::new(1)), ..ONE })
        .unwrap();
    assert_eq!(put.replicas[0].segment, SegmentNo::new(1));
    let gone = SegmentOrder { segment: SegmentNo::new(9), state: SegmentState::Active };
    assert_eq!(store.master.order_segment(at(7), &gone), Err(ErrorCode::SegmentNotFound));
}
