//! Copies and moves on request: when a replica counts, what becomes of its space, and what is refused.

use store_core::message::*;
use store_core::{
    ErrorCode, Frame, Incarnation, Key, MasterConfig, NodeId, Placement, SegmentNo, Session, TaskConfig,
    TaskId,
};

use crate::store::*;

#[test]
fn a_copy_is_readable_when_its_node_has_reported_it_and_not_before() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
    store.put_on(0, "k", 5_000, SegmentNo::new(1));
    let id = store.master.create_task(at(0), b"k", None, Some(SegmentNo::new(2))).unwrap();
    assert_eq!(store.task(0, id).state, TaskState::Pending);
    let beat = |node| Heartbeat { node, incarnation: Incarnation::new(1), key: 0 };
    assert_eq!(
        store.master.heartbeat(at(1), &beat(NodeId::new(1))),
        Ok(NodeStatus::Ok),
        "the target's node has the task"
    );
    assert_eq!(store.master.heartbeat(at(1), &beat(NodeId::new(2))), Ok(NodeStatus::Work));
    let states = |store: &Store| store.master.find_replicas(b"k").unwrap().map_states();
    assert_eq!(states(&store), [(no(1), ReplicaState::Complete), (no(2), ReplicaState::Initialized)]);
    let orders = store.fetch(2, 2);
    assert_eq!((orders.len(), orders[0].segment, orders[0].sources[0].segment), (1, no(2), no(1)));
    assert_eq!(states(&store), [(no(1), ReplicaState::Complete), (no(2), ReplicaState::Processing)]);
    let end = store.copy(&orders[0]);
    assert_eq!(store.read(3, "k"), Ok(nos([1])));
    assert_eq!(store.report(4, 2, &end), Ok(()));
    assert_eq!(store.read(4, "k"), Ok(nos([1, 2])));
    assert_eq!(store.task(5, id).state, TaskState::Done);
    assert_eq!(store.master.heartbeat(at(6), &beat(NodeId::new(2))), Ok(NodeStatus::Ok));
    let report = store.master.task_report();
    assert_eq!((report.done_total, report.copied_bytes_total, report.processing), (1, 5_000, 0));
    // It is a replica like any other: it goes with its object, or its segment.
    store.mount(7, 1, 64 * KIB);
    assert_eq!(store.read(8, "k"), Ok(nos([2])));
    store.master.remove(at(2_000), b"k", RemoveMode::IfUnused).unwrap();
    assert_eq!(store.used(), 0);
}

trait MapStates {
    fn map_states(&self) -> Vec<(SegmentNo, ReplicaState)>;
}

impl MapStates for ReplicaInfos {
    fn map_states(&self) -> Vec<(SegmentNo, ReplicaState)> {
        self.iter().map(|info| (info.segment, info.state)).collect()
    }
}

#[test]
fn a_copy_of_bad_bytes_never_becomes_a_replica() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
    store.put_on(0, "k", KIB, SegmentNo::new(1));
    let id = store.master.create_task(at(0), b"k", None, None).unwrap();
    let order = store.fetch(1, 2).remove(0);
    store.write(SegmentNo::new(1), order.sources[0].addr, b"rot");
    // A node that does not verify reports the checksum of what it has; the master does verify.
    let end = store.copy(&order);
    assert_eq!(store.report(2, 2, &end), Ok(()));
    let task = store.task(3, id);
    assert_eq!((task.state, task.error), (TaskState::Failed, Some(ErrorCode::ChecksumMismatch)));
    assert_eq!(store.master.get(at(4), b"k").unwrap().replicas.len(), 1);
    assert_eq!(store.used(), KIB, "its space is freed");
}

#[test]
fn a_moved_replicas_space_waits_for_those_who_read_it() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
    store.put_on(0, "k", 64 * KIB, SegmentNo::new(1));
    let old = store.master.get(at(10), b"k").unwrap().replicas[0];
    let id = store.master.create_task(at(20), b"k", Some(SegmentNo::new(1)), None).unwrap();
    assert_eq!(store.work(500, 2), 1);
    assert_eq!((store.task(500, id).state, store.read(500, "k")), (TaskState::Done, Ok(nos([2]))));
    assert_eq!(store.master.stats().deferred_bytes, 64 * KIB);
    let full = store.master.put_start(at(1_009), b"l", 64 * KIB, &ONE).unwrap_err();
    assert_eq!(full, ErrorCode::NoAvailableHandle, "a reader may still have a lease there");
    // It is kept for the longest of the leases: that of the node that copied it, granted at 500.
    store.master.handle_timeout(at(1_500));
    assert_eq!(store.master.stats().deferred_bytes, 0);
    let reused = store.master.put_start(at(1_500), b"l", 64 * KIB, &ONE).unwrap();
    assert_eq!(reused.replicas[0], old);
}

#[test]
fn a_moved_replicas_space_is_free_when_the_node_that_copied_it_reports_so_and_no_reader_has_a_lease() {
    for (reads, returns) in [(false, false), (true, true), (true, false)] {
        let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
        store.put_on(0, "k", KIB, SegmentNo::new(1));
        store.master.create_task(at(10), b"k", Some(SegmentNo::new(1)), None).unwrap();
        let order = store.fetch(20, 2).remove(0);
        // A repetition extends the hold on the source, which still counts as one.
        assert_eq!(store.fetch(400, 2), std::slice::from_ref(&order));
        let mut reader = Session::default();
        if reads {
            let mut lease = read_as(&mut store, &mut reader, 500, "k");
            lease.count = if returns { 1 } else { 0 };
            give_back(&mut store, &mut reader, 600, lease);
        }
        let end = store.copy(&order);
        store.report(700, 2, &end).unwrap();
        let left = if reads && !returns { KIB } else { 0 };
        assert_eq!(store.master.stats().deferred_bytes, left, "read: {reads}, given back: {returns}");
        // The object is not held any more: it can be removed.
        let removed = store.master.remove(at(701), b"k", RemoveMode::IfUnused);
        assert_eq!(removed, if left == 0 { Ok(()) } else { Err(ErrorCode::ObjectHasLease) });
    }
}

#[test]
fn a_source_is_held_for_a_try_that_was_given_up_until_its_node_has_said_that_it_reads_no_more() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
    store.put_on(0, "k", KIB, SegmentNo::new(1));
    let task = store.master.create_task(at(10), b"k", None, None).unwrap();
    let order = store.fetch(20, 2).remove(0);
    store.master.cancel_task(at(30), task).unwrap();
    assert_eq!(
        store.master.remove(at(31), b"k", RemoveMode::IfUnused),
        Err(ErrorCode::ObjectHasLease),
        "the node is still reading"
    );
    assert_eq!(store.report(40, 2, &order.end(Err(ErrorCode::TransferFail))), Err(ErrorCode::TaskNotFound));
    assert_eq!(store.master.remove(at(41), b"k", RemoveMode::IfUnused), Ok(()));

    // The node can no longer end the hold of an attempt that was followed by another: it ends by time.
    store.put_on(50, "l", KIB, SegmentNo::new(1));
    let task = store.master.create_task(at(50), b"l", None, None).unwrap();
    let first = store.fetch(5_000, 2).remove(0);
    store.master.cancel_task(at(5_100), task).unwrap();
    store.master.retry_task(at(5_200), task).unwrap();
    let second = store.fetch(5_300, 2).remove(0);
    assert_ne!(first.attempt, second.attempt);
    store.report(5_400, 2, &second.end(Err(ErrorCode::ChecksumMismatch))).unwrap();
    assert_eq!(store.master.remove(at(5_401), b"l", RemoveMode::IfUnused), Err(ErrorCode::ObjectHasLease));
    store.report(5_500, 2, &first.end(Err(ErrorCode::TransferFail))).unwrap_err();
    assert_eq!(
        store.master.remove(at(6_300), b"l", RemoveMode::IfUnused),
        Ok(()),
        "the second hold was the longest"
    );
}

#[test]
fn a_hold_that_has_run_out_takes_no_readers_lease_with_it() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
    store.put_on(0, "k", KIB, SegmentNo::new(1));
    store.master.create_task(at(10), b"k", None, None).unwrap();
    let order = store.fetch(20, 2).remove(0);
    // The hold of 20 is over when a reader gets the object, and the node reports only then.
    store.read(1_100, "k").unwrap();
    let end = store.copy(&order);
    store.report(1_200, 2, &end).unwrap();
    assert_eq!(store.master.remove(at(1_300), b"k", RemoveMode::IfUnused), Err(ErrorCode::ObjectHasLease));
    assert_eq!(store.master.remove(at(2_101), b"k", RemoveMode::IfUnused), Ok(()));
}

/// Reads a key as a client that can return its lease.
fn read_as(store: &mut Store, reader: &mut Session, ms: u64, key: &str) -> LeaseRange {
    let (mut request, mut out) = (Vec::new(), Vec::new());
    Get::encode_request(&mut request, 1, &LeaseWanted::Quick, std::iter::once(Key(key.as_bytes()))).unwrap();
    store.master.handle(at(ms), reader, &Frame::parse(&request).unwrap().unwrap().0, &mut out);
    let (frame, _) = Frame::parse(&out).unwrap().unwrap();
    let (lease, _) = Get::decode_response(&frame).unwrap();
    LeaseRange { first: lease.first, count: 1 }
}

fn give_back(store: &mut Store, reader: &mut Session, ms: u64, lease: LeaseRange) {
    let mut request = Vec::new();
    ReturnLeases::encode_request(&mut request, 1, &(), std::iter::once(lease)).unwrap();
    store.master.handle(at(ms), reader, &Frame::parse(&request).unwrap().unwrap().0, &mut Vec::new());
}

#[test]
fn an_object_that_goes_during_its_copy_takes_the_copy_with_it() {
    for quiet in [true, false] {
        let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
        store.put_on(0, "k", KIB, SegmentNo::new(1));
        let id = store.master.create_task(at(0), b"k", None, None).unwrap();
        let order = store.fetch(1, 2).remove(0);
        store.master.remove(at(2), b"k", RemoveMode::Force).unwrap();
        // The same key put again is another object.
        store.put_on(3, "k", KIB, SegmentNo::new(1));
        let end = store.copy(&order);
        let end = if quiet { end } else { TaskEnd { result: Err(ErrorCode::TransferFail), quiet, ..end } };
        assert_eq!(store.report(4, 2, &end), Ok(()));
        assert_eq!(store.task(5, id).state, TaskState::Failed);
        assert_eq!(store.read(5, "k"), Ok(nos([1])));
        let held = if quiet { 0 } else { KIB };
        assert_eq!(store.master.stats().quarantined_bytes, held);
        store.master.handle_timeout(at(1_001));
        assert_eq!(store.used(), KIB + held);
        store.master.handle_timeout(at(4 + RELEASE_MS));
        assert_eq!(store.used(), KIB);
    }
}

#[test]
fn eviction_spares_what_is_being_copied() {
    let mut store = Store::new(config(), &[2 * KIB, 2 * KIB]);
    store.put_on(0, "k", 2 * KIB, SegmentNo::new(1));
    store.master.create_task(at(0), b"k", None, Some(SegmentNo::new(2))).unwrap();
    let order = store.fetch(1, 2).remove(0);
    let refused = store.master.put_start(at(2), b"l", KIB, &ONE).unwrap_err();
    assert_eq!(refused, ErrorCode::NoAvailableHandle);
    let end = store.copy(&order);
    store.report(3, 2, &end).unwrap();
    assert_eq!(store.read(3, "k"), Ok(nos([1, 2])));
}

#[test]
fn space_of_a_try_that_was_given_up_waits_for_its_nodes_word() {
    for word in ["none", "done", "quiet", "not quiet"] {
        let mut store = Store::new(config(), &[64 * KIB, 4 * KIB]);
        store.put_on(0, "k", 4 * KIB, SegmentNo::new(1));
        let id = store.master.create_task(at(0), b"k", None, Some(SegmentNo::new(2))).unwrap();
        let order = store.fetch(100, 2).remove(0);
        assert_eq!(store.master.poll_timeout(), Some(at(5_100)));
        store.master.handle_timeout(at(5_100));
        let task = store.task(5_100, id);
        assert_eq!(task.state, TaskState::Failed, "that segment has no other place");
        assert_eq!(store.master.stats().quarantined_bytes, 4 * KIB);
        let options = PutOptions { placement: Placement::on(SegmentNo::new(2)), ..ONE };
        let put = store.master.put_start(at(5_101), b"l", 4 * KIB, &options).unwrap();
        assert_ne!(put.replicas[0].segment, no(2), "the node may still write there");
        let end = store.copy(&order);
        let end = match word {
            "none" => None,
            "done" => Some(end),
            "quiet" => Some(order.end(Err(ErrorCode::TransferFail))),
            _ => Some(TaskEnd { quiet: false, ..order.end(Err(ErrorCode::TransferFail)) }),
        };
        if let Some(end) = end {
            assert_eq!(store.report(6_000, 2, &end), Err(ErrorCode::TaskNotFound));
            assert_eq!(store.report(6_001, 2, &end), Err(ErrorCode::TaskNotFound));
        }
        let held = if matches!(word, "done" | "quiet") { 0 } else { 4 * KIB };
        assert_eq!(store.master.stats().quarantined_bytes, held, "{word}");
        store.master.handle_timeout(at(5_100 + RELEASE_MS));
        assert_eq!(store.master.stats().quarantined_bytes, 0);
        assert_eq!(store.read(70_000, "k"), Ok(nos([1])));
    }
}

#[test]
fn a_try_that_failed_is_followed_by_another_until_there_were_enough() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB, 64 * KIB]);
    store.put_on(0, "k", KIB, SegmentNo::new(1));
    let id = store.master.create_task(at(0), b"k", None, Some(SegmentNo::new(2))).unwrap();
    let mut attempts = Vec::new();
    for turn in 1..=3 {
        let order = store.fetch(turn, 2).remove(0);
        assert_eq!(store.task(turn, id).attempts, turn as u32);
        attempts.push(order.attempt);
        store.report(turn, 2, &order.end(Err(ErrorCode::TransferFail))).unwrap();
    }
    attempts.dedup();
    assert_eq!(attempts.len(), 3, "each with its own number");
    let task = store.task(4, id);
    assert_eq!((task.state, task.error), (TaskState::Failed, Some(ErrorCode::TransferFail)));
    assert_eq!(store.used(), KIB);
    // A retry is requested.
    assert_eq!(store.master.retry_task(at(5), id).unwrap().state, TaskState::Pending);
    assert_eq!(store.master.retry_task(at(5), id).unwrap().attempts, 0);
    assert_eq!(store.work(6, 2), 1);
    assert_eq!(store.task(7, id).state, TaskState::Done);
    assert_eq!(store.master.retry_task(at(8), id).unwrap().state, TaskState::Done);
    assert_eq!(store.read(9, "k"), Ok(nos([1, 2])));
}

#[test]
fn asking_fetching_and_reporting_twice_is_doing_it_once() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB, 64 * KIB]);
    store.put_on(0, "k", KIB, SegmentNo::new(1));
    let id = store.master.create_task(at(0), b"k", None, Some(SegmentNo::new(2))).unwrap();
    assert_eq!(store.master.create_task(at(0), b"k", None, Some(SegmentNo::new(2))), Ok(id));
    let orders = store.fetch(1, 2);
    assert_eq!(store.fetch(2, 2), orders);
    let end = store.copy(&orders[0]);
    assert_eq!((store.report(3, 2, &end), store.report(4, 2, &end)), (Ok(()), Ok(())));
    assert_eq!(store.read(5, "k"), Ok(nos([1, 2])));
    let again = store.master.create_task(at(6), b"k", None, Some(SegmentNo::new(2)));
    assert_eq!(again, Err(ErrorCode::ReplicaAlreadyExists));
    assert_eq!((store.used(), store.fetch(7, 2)), (2 * KIB, vec![]));
    // A report from another node has no effect.
    store.master.create_task(at(8), b"k", None, Some(SegmentNo::new(3))).unwrap();
    let order = store.fetch(9, 3).remove(0);
    let end = store.copy(&order);
    assert_eq!(store.report(10, 2, &end), Err(ErrorCode::TaskNotFound));
    assert_eq!(store.report(10, 3, &end), Ok(()));
}

#[test]
fn a_node_that_restarts_loses_its_tasks_to_others_or_gets_them_again() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
    store.put_on(0, "k", KIB, SegmentNo::new(1));
    store.put_on(0, "l", KIB, SegmentNo::new(1));
    let anywhere = store.master.create_task(at(0), b"k", None, None).unwrap();
    let there = store.master.create_task(at(0), b"l", None, Some(SegmentNo::new(2))).unwrap();
    let orders = store.fetch(1, 2);
    assert_eq!(orders.len(), 2);
    // Its memory is new, and has a new segment number.
    let new = store.mount(2, 2, 64 * KIB);
    assert_eq!(store.task(3, there).error, Some(ErrorCode::SegmentNotFound));
    assert_eq!(store.task(3, there).state, TaskState::Failed, "the named segment is gone");
    let end = orders[0].end(Ok(checksum(&content(1, KIB))));
    assert_eq!(
        store.report(4, 2, &end),
        Err(ErrorCode::TaskNotFound),
        "a report under its previous incarnation"
    );
    // When the segment was unmounted there was no other place; now there is.
    let task = store.task(3, anywhere);
    assert_eq!((task.state, task.error), (TaskState::Failed, Some(ErrorCode::NoAvailableHandle)));
    store.master.retry_task(at(5), anywhere).unwrap();
    assert_eq!(store.work(6, 2), 1);
    assert_eq!(store.read(7, "k"), Ok(vec![no(1), new]));

    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB, 64 * KIB]);
    store.put_on(0, "k", KIB, SegmentNo::new(1));
    let id = store.master.create_task(at(0), b"k", None, None).unwrap();
    let first = store.task(0, id).target.unwrap();
    let other = if first == SegmentNo::new(2) { no(3) } else { no(2) };
    store.fetch(1, first.get().into());
    store.mount(2, first.get().into(), 64 * KIB);
    let task = store.task(3, id);
    assert_eq!((task.state, task.target), (TaskState::Pending, Some(other)));
    assert_eq!(store.work(4, other.get().into()), 1);
    assert_eq!(store.read(5, "k"), Ok(vec![no(1), other]));
    let stale = FetchRequest {
        node: NodeId::new(first.get().into()),
        incarnation: Incarnation::new(1),
        count_max: 5,
        key: 0,
    };
    assert_eq!(store.master.fetch_tasks(at(6), &stale).unwrap_err(), ErrorCode::ClientNotFound);
}

#[test]
fn a_task_that_lost_its_source_fails() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB, 64 * KIB]);
    let two = PutOptions { placement: Placement::on(SegmentNo::new(1)), ..TWO };
    store.put(0, "k", KIB, &two);
    let other = store.read(0, "k").unwrap()[1];
    let third = no(5 - other.get());
    let id = store.master.create_task(at(0), b"k", Some(SegmentNo::new(1)), Some(third)).unwrap();
    store.mount(1, 1, 64 * KIB);
    assert_eq!(store.fetch(2, third.get().into()), vec![]);
    let task = store.task(3, id);
    assert_eq!((task.state, task.error), (TaskState::Failed, Some(ErrorCode::ReplicaNotFound)));
    assert_eq!((store.used(), store.read(4, "k")), (KIB, Ok(vec![other])));
}

#[test]
fn cancelled_tasks_free_their_space_when_no_node_writes_to_it() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
    store.put_on(0, "k", KIB, SegmentNo::new(1));
    store.put_on(0, "l", KIB, SegmentNo::new(1));
    let waiting = store.master.create_task(at(0), b"k", None, None).unwrap();
    let state = |store: &mut Store, ms, id| store.master.cancel_task(at(ms), id).unwrap().state;
    assert_eq!(state(&mut store, 1, waiting), TaskState::Canceled);
    assert_eq!(state(&mut store, 1, waiting), TaskState::Canceled);
    assert_eq!((store.used(), store.fetch(2, 2)), (2 * KIB, vec![]));
    let running = store.master.create_task(at(2), b"l", None, None).unwrap();
    let order = store.fetch(3, 2).remove(0);
    assert_eq!(state(&mut store, 4, running), TaskState::Canceled);
    assert_eq!(store.master.stats().quarantined_bytes, KIB);
    let end = store.copy(&order);
    assert_eq!(store.report(5, 2, &end), Err(ErrorCode::TaskNotFound));
    assert_eq!((store.used(), store.read(5, "l")), (2 * KIB, Ok(nos([1]))));
    assert_eq!(store.master.cancel_task(at(5), TaskId::new(77)).unwrap_err(), ErrorCode::TaskNotFound);
    assert_eq!(store.master.task_report().canceled_total, 2);
}

#[test]
fn tasks_have_limits() {
    let tasks = TaskConfig { unfinished_max: 4, finished_max: 2, per_node_max: 3, ..config().tasks };
    let mut store = Store::new(MasterConfig { tasks, ..config() }, &[64 * KIB, 64 * KIB]);
    let keys = ["a", "b", "c", "d", "e"];
    keys.iter().for_each(|key| {
        store.put_on(0, key, KIB, SegmentNo::new(1));
    });
    let created: Vec<_> =
        keys.map(|key| store.master.create_task(at(0), key.as_bytes(), None, None)).to_vec();
    assert!(created[..4].iter().all(Result::is_ok));
    assert_eq!(created[4], Err(ErrorCode::TaskPendingLimitExceeded));
    let orders = store.fetch(1, 2);
    assert_eq!(orders.len(), 3, "the limit of a node");
    let ends: Vec<_> = orders.iter().map(|order| store.copy(order)).collect();
    ends.iter().for_each(|end| store.report(2, 2, end).unwrap());
    assert_eq!(store.master.task(at(3), created[0].unwrap()).unwrap_err(), ErrorCode::TaskNotFound);
    assert_eq!(store.master.task_report().finished, 2, "the oldest is forgotten");
    let query = TaskQuery { cursor: 0, limit: 2, state: None };
    let mut listed = Vec::new();
    let cursor = store.master.list_tasks(at(3), &query, |task| {
        listed.push((task.id, task.state));
        true
    });
    assert_eq!(listed.len(), 2);
    let pending = TaskQuery { cursor, limit: 2, state: Some(TaskState::Pending) };
    let end = store.master.list_tasks(at(3), &pending, |task| {
        listed.push((task.id, task.state));
        true
    });
    assert_eq!((end, listed.len(), listed[2].1), (0, 3, TaskState::Pending));
    // A task that no node fetches is given up, and its space is freed.
    store.master.handle_timeout(at(20_000));
    assert_eq!(store.task(20_001, created[3].unwrap()).error, Some(ErrorCode::RpcTimeout));
    assert_eq!(store.used(), 8 * KIB);
}

#[test]
fn senseless_tasks_are_refused() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB, 4 * KIB]);
    store.put_on(0, "k", 8 * KIB, SegmentNo::new(1));
    let open = store.master.put_start(at(0), b"open", KIB, &ONE).unwrap();
    let mut create = |key: &str, source, target| {
        store.master.create_task(at(1), key.as_bytes(), source, target).unwrap_err()
    };
    assert_eq!(create("none", None, None), ErrorCode::ObjectNotFound);
    assert_eq!(create("open", None, None), ErrorCode::ReplicaIsNotReady);
    assert_eq!(create("k", Some(SegmentNo::new(2)), None), ErrorCode::ReplicaNotFound);
    assert_eq!(create("k", None, Some(SegmentNo::new(1))), ErrorCode::ReplicaAlreadyExists);
    assert_eq!(create("k", None, Some(SegmentNo::new(9))), ErrorCode::SegmentNotFound);
    assert_eq!(create("k", None, Some(SegmentNo::new(3))), ErrorCode::NoAvailableHandle);
    store.master.put_revoke(at(2), b"open", open.generation, WriterState::Quiet).unwrap();
    store.master.create_task(at(3), b"k", Some(SegmentNo::new(1)), Some(SegmentNo::new(2))).unwrap();
    let second = store.master.create_task(at(3), b"k", Some(SegmentNo::new(1)), Some(SegmentNo::new(3)));
    assert_eq!(second, Err(ErrorCode::ObjectHasReplicationTask));
    let limited = MasterConfig { replicas_max: 2, ..config() };
    let mut store = Store::new(limited, &[64 * KIB, 64 * KIB, 64 * KIB]);
    store.put(0, "k", KIB, &TWO);
    assert_eq!(store.master.create_task(at(1), b"k", None, None), Err(ErrorCode::KeysUltraLimit));
    let source = store.read(1, "k").unwrap()[0];
    assert!(
        store.master.create_task(at(1), b"k", Some(source), None).is_ok(),
        "a move does not add a replica"
    );
}
