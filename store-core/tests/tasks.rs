//! Copying, moving, draining: a master, and nodes that do what it says, or do not.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::{BTreeMap, HashMap};

use store_core::message::*;
use store_core::{
    ErrorCode, EvictionPolicy, Key, Master, MasterConfig, Placement, ReplicationConfig, ReplicationMode,
    SegmentNo, TaskConfig,
};
use te_core::Instant;

const KIB: u64 = 1024;
const LEASE_MS: u64 = 1_000;
const RELEASE_MS: u64 = 60_000;
const ONE: PutOptions = PutOptions::DEFAULT;
const TWO: PutOptions = PutOptions { replicas: 2, ..PutOptions::DEFAULT };

fn at(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

fn config() -> MasterConfig {
    MasterConfig {
        lease_ttl_ms: LEASE_MS as u32,
        lease_guard_ms: 0,
        put_start_discard_timeout_ms: 3_000,
        put_start_release_timeout_ms: RELEASE_MS as u32,
        node_ttl_ms: 1_000_000,
        eviction_high_watermark: 1.0,
        eviction_ratio: 0.0,
        eviction: EvictionPolicy::Lru,
        slow_start_ms: 0,
        tasks: TaskConfig {
            processing_timeout_ms: 5_000,
            pending_timeout_ms: 20_000,
            ..TaskConfig::default()
        },
        ..MasterConfig::default()
    }
}

/// What a put writes.
fn content(generation: u64, len: u64) -> Vec<u8> {
    (0..len).map(|i| (generation.wrapping_mul(0x9e37_79b9) >> (i % 29)) as u8 ^ (i * 7) as u8).collect()
}

fn checksum(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |sum: u32, byte| (sum ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

/// A master and the memory of its segments. Node `n` has segment `n`, until it restarts.
struct Store {
    master: Master,
    memory: HashMap<SegmentNo, Vec<u8>>,
    incarnations: BTreeMap<u64, u64>,
}

impl Store {
    fn new(config: MasterConfig, segments: &[u64]) -> Self {
        let master = Master::new(config).unwrap();
        let mut store = Self { master, memory: HashMap::new(), incarnations: BTreeMap::new() };
        for (node, len) in segments.iter().enumerate() {
            assert_eq!(store.mount(0, node as u64 + 1, *len), node as SegmentNo + 1);
        }
        store
    }

    fn mount(&mut self, ms: u64, node: u64, len: u64) -> SegmentNo {
        let incarnation = self.incarnations.entry(node).or_default();
        *incarnation += 1;
        let name = format!("s{node}");
        let segment = MountSegment {
            node,
            incarnation: *incarnation,
            name: &name,
            endpoint: "host:1",
            base: 0,
            len,
            export: Export::default(),
            epoch: 0,
            key: 0,
            takeover: false,
        };
        let no = self.master.mount(at(ms), &segment).unwrap().mounted().unwrap().segment;
        self.memory.insert(no, vec![0; len as usize]);
        no
    }

    fn put(&mut self, ms: u64, key: &str, len: u64, options: &PutOptions) -> u64 {
        let put = self.master.put_start(at(ms), key.as_bytes(), len, options).unwrap();
        let bytes = content(put.generation, len);
        for replica in put.replicas.iter() {
            self.write(replica.segment, replica.addr, &bytes);
        }
        self.master.put_end(at(ms), key.as_bytes(), put.generation, checksum(&bytes)).unwrap();
        put.generation
    }

    fn put_on(&mut self, ms: u64, key: &str, len: u64, segment: SegmentNo) -> u64 {
        self.put(ms, key, len, &PutOptions { placement: Placement::on(segment), ..ONE })
    }

    fn write(&mut self, segment: SegmentNo, addr: u64, bytes: &[u8]) {
        // A segment that is gone has no memory.
        if let Some(memory) = self.memory.get_mut(&segment) {
            memory[addr as usize..][..bytes.len()].copy_from_slice(bytes);
        }
    }

    fn bytes(&self, segment: SegmentNo, addr: u64, len: u64) -> Vec<u8> {
        self.memory[&segment][addr as usize..][..len as usize].to_vec()
    }

    /// Reads every replica; each must have the bytes of the put.
    fn read(&mut self, ms: u64, key: &str) -> Result<Vec<SegmentNo>, ErrorCode> {
        let object = self.master.get(at(ms), key.as_bytes())?;
        for replica in object.replicas.iter() {
            let bytes = self.bytes(replica.segment, replica.addr, object.len);
            assert_eq!(bytes, content(object.generation, object.len), "{key} on {}", replica.segment);
        }
        Ok(object.replicas.iter().map(|replica| replica.segment).collect())
    }

    fn fetch(&mut self, ms: u64, node: u64) -> Vec<Order> {
        let incarnation = self.incarnations[&node];
        let ask = FetchAsk { node, incarnation, count_max: 1_000, key: 0 };
        self.master.fetch_tasks(at(ms), &ask).unwrap().iter().map(Order::new).collect()
    }

    /// Does what an order says, and gives what is to be reported.
    fn copy(&mut self, order: &Order) -> TaskEnd {
        let source = order.sources[0];
        let bytes = self.bytes(source.segment, source.addr, order.len);
        self.write(order.segment, order.addr, &bytes);
        order.end(Ok(checksum(&bytes)))
    }

    fn report(&mut self, ms: u64, node: u64, end: &TaskEnd) -> Result<(), ErrorCode> {
        self.master.end_task(at(ms), node, end)
    }

    /// A node does all its work.
    fn work(&mut self, ms: u64, node: u64) -> usize {
        let orders = self.fetch(ms, node);
        for order in &orders {
            let end = self.copy(order);
            assert_eq!(self.report(ms, node, &end), Ok(()));
        }
        orders.len()
    }

    /// Everybody works until there is nothing left to do.
    fn settle(&mut self, ms: u64) {
        for _ in 0..10_000 {
            self.master.handle_timeout(at(ms));
            let nodes: Vec<u64> = self.incarnations.keys().copied().collect();
            if nodes.into_iter().map(|node| self.work(ms, node)).sum::<usize>() == 0 {
                return;
            }
        }
        panic!("there is always something left to do");
    }

    fn task(&self, ms: u64, id: TaskId) -> TaskInfo<'_> {
        self.master.task(at(ms), id).unwrap()
    }

    fn used(&self) -> u64 {
        self.master.stats().used_bytes
    }

    fn order(&mut self, ms: u64, segment: SegmentNo, state: SegmentState) -> DrainInfo {
        self.master.order_segment(at(ms), &SegmentOrder { segment, state }).unwrap()
    }
}

/// [`TaskOrder`] without the key.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Order {
    id: TaskId,
    attempt: u64,
    len: u64,
    segment: SegmentNo,
    addr: u64,
    sources: Vec<Replica>,
}

impl Order {
    fn new(order: &TaskOrder<'_>) -> Self {
        let TaskOrder { id, attempt, len, segment, addr, .. } = *order;
        Self { id, attempt, len, segment, addr, sources: order.sources.to_vec() }
    }

    fn end(&self, result: Result<u32, ErrorCode>) -> TaskEnd {
        TaskEnd { id: self.id, attempt: self.attempt, result, quiet: true }
    }
}

#[test]
fn a_copy_is_readable_when_its_node_has_reported_it_and_not_before() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
    store.put_on(0, "k", 5_000, 1);
    let id = store.master.create_task(at(0), b"k", None, Some(2)).unwrap();
    assert_eq!(store.task(0, id).state, TaskState::Pending);
    let beat = |node| Heartbeat { node, incarnation: 1, key: 0 };
    assert_eq!(store.master.heartbeat(at(1), &beat(1)), Ok(NodeStatus::Ok), "the target's node is to do it");
    assert_eq!(store.master.heartbeat(at(1), &beat(2)), Ok(NodeStatus::Work));
    let states = |store: &Store| store.master.find_replicas(b"k").unwrap().map_states();
    assert_eq!(states(&store), [(1, ReplicaState::Complete), (2, ReplicaState::Initialized)]);
    let orders = store.fetch(2, 2);
    assert_eq!((orders.len(), orders[0].segment, orders[0].sources[0].segment), (1, 2, 1));
    assert_eq!(states(&store), [(1, ReplicaState::Complete), (2, ReplicaState::Processing)]);
    let end = store.copy(&orders[0]);
    assert_eq!(store.read(3, "k"), Ok(vec![1]));
    assert_eq!(store.report(4, 2, &end), Ok(()));
    assert_eq!(store.read(4, "k"), Ok(vec![1, 2]));
    assert_eq!(store.task(5, id).state, TaskState::Done);
    assert_eq!(store.master.heartbeat(at(6), &beat(2)), Ok(NodeStatus::Ok));
    let report = store.master.task_report();
    assert_eq!((report.done_total, report.copied_bytes_total, report.processing), (1, 5_000, 0));
    // It is a replica like any other: it goes with its object, or its segment.
    store.mount(7, 1, 64 * KIB);
    assert_eq!(store.read(8, "k"), Ok(vec![2]));
    store.master.remove(at(2_000), b"k", false).unwrap();
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
    store.put_on(0, "k", KIB, 1);
    let id = store.master.create_task(at(0), b"k", None, None).unwrap();
    let order = store.fetch(1, 2).remove(0);
    store.write(1, order.sources[0].addr, b"rot");
    // A node that does not look reports the checksum of what it has; the master does look.
    let end = store.copy(&order);
    assert_eq!(store.report(2, 2, &end), Ok(()));
    let task = store.task(3, id);
    assert_eq!((task.state, task.error), (TaskState::Failed, Some(ErrorCode::ChecksumMismatch)));
    assert_eq!(store.master.get(at(4), b"k").unwrap().replicas.len(), 1);
    assert_eq!(store.used(), KIB, "its space is free again");
}

#[test]
fn a_moved_replicas_space_waits_for_those_who_read_it() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
    store.put_on(0, "k", 64 * KIB, 1);
    let old = store.master.get(at(10), b"k").unwrap().replicas[0];
    let id = store.master.create_task(at(20), b"k", Some(1), None).unwrap();
    assert_eq!(store.work(500, 2), 1);
    assert_eq!((store.task(500, id).state, store.read(500, "k")), (TaskState::Done, Ok(vec![2])));
    assert_eq!(store.master.stats().deferred_bytes, 64 * KIB);
    let full = store.master.put_start(at(1_009), b"l", 64 * KIB, &ONE).unwrap_err();
    assert_eq!(full, ErrorCode::NoAvailableHandle, "somebody may be reading there");
    // The node's own hold on the source, of 500, is over later than the reader's.
    store.master.handle_timeout(at(1_500));
    assert_eq!(store.master.stats().deferred_bytes, 0);
    let reused = store.master.put_start(at(1_500), b"l", 64 * KIB, &ONE).unwrap();
    assert_eq!(reused.replicas[0], old);
}

#[test]
fn an_object_that_goes_during_its_copy_takes_the_copy_with_it() {
    for quiet in [true, false] {
        let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
        store.put_on(0, "k", KIB, 1);
        let id = store.master.create_task(at(0), b"k", None, None).unwrap();
        let order = store.fetch(1, 2).remove(0);
        store.master.remove(at(2), b"k", true).unwrap();
        // The same key again is another object.
        store.put_on(3, "k", KIB, 1);
        let end = store.copy(&order);
        let end = if quiet { end } else { TaskEnd { result: Err(ErrorCode::TransferFail), quiet, ..end } };
        assert_eq!(store.report(4, 2, &end), Ok(()));
        assert_eq!(store.task(5, id).state, TaskState::Failed);
        assert_eq!(store.read(5, "k"), Ok(vec![1]));
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
    store.put_on(0, "k", 2 * KIB, 1);
    store.master.create_task(at(0), b"k", None, Some(2)).unwrap();
    let order = store.fetch(1, 2).remove(0);
    let refused = store.master.put_start(at(2), b"l", KIB, &ONE).unwrap_err();
    assert_eq!(refused, ErrorCode::NoAvailableHandle);
    let end = store.copy(&order);
    store.report(3, 2, &end).unwrap();
    assert_eq!(store.read(3, "k"), Ok(vec![1, 2]));
}

#[test]
fn space_of_a_try_that_was_given_up_waits_for_its_nodes_word() {
    for word in ["none", "done", "quiet", "not quiet"] {
        let mut store = Store::new(config(), &[64 * KIB, 4 * KIB]);
        store.put_on(0, "k", 4 * KIB, 1);
        let id = store.master.create_task(at(0), b"k", None, Some(2)).unwrap();
        let order = store.fetch(100, 2).remove(0);
        assert_eq!(store.master.poll_timeout(), Some(at(5_100)));
        store.master.handle_timeout(at(5_100));
        let task = store.task(5_100, id);
        assert_eq!(task.state, TaskState::Failed, "there is no other place on that segment");
        assert_eq!(store.master.stats().quarantined_bytes, 4 * KIB);
        let options = PutOptions { placement: Placement::on(2), ..ONE };
        let put = store.master.put_start(at(5_101), b"l", 4 * KIB, &options).unwrap();
        assert_ne!(put.replicas[0].segment, 2, "the node may still write there");
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
        assert_eq!(store.read(70_000, "k"), Ok(vec![1]));
    }
}

#[test]
fn a_try_that_failed_is_followed_by_another_until_there_were_enough() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB, 64 * KIB]);
    store.put_on(0, "k", KIB, 1);
    let id = store.master.create_task(at(0), b"k", None, Some(2)).unwrap();
    let mut attempts = Vec::new();
    for turn in 1..=3 {
        let order = store.fetch(turn, 2).remove(0);
        assert_eq!(store.task(turn, id).attempts, turn as u32);
        attempts.push(order.attempt);
        store.report(turn, 2, &order.end(Err(ErrorCode::TransferFail))).unwrap();
    }
    attempts.dedup();
    assert_eq!(attempts.len(), 3, "each with its own name");
    let task = store.task(4, id);
    assert_eq!((task.state, task.error), (TaskState::Failed, Some(ErrorCode::TransferFail)));
    assert_eq!(store.used(), KIB);
    // Somebody insists.
    assert_eq!(store.master.retry_task(at(5), id).unwrap().state, TaskState::Pending);
    assert_eq!(store.master.retry_task(at(5), id).unwrap().attempts, 0);
    assert_eq!(store.work(6, 2), 1);
    assert_eq!(store.task(7, id).state, TaskState::Done);
    assert_eq!(store.master.retry_task(at(8), id).unwrap().state, TaskState::Done);
    assert_eq!(store.read(9, "k"), Ok(vec![1, 2]));
}

#[test]
fn asking_fetching_and_reporting_twice_is_doing_it_once() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB, 64 * KIB]);
    store.put_on(0, "k", KIB, 1);
    let id = store.master.create_task(at(0), b"k", None, Some(2)).unwrap();
    assert_eq!(store.master.create_task(at(0), b"k", None, Some(2)), Ok(id));
    let orders = store.fetch(1, 2);
    assert_eq!(store.fetch(2, 2), orders);
    let end = store.copy(&orders[0]);
    assert_eq!((store.report(3, 2, &end), store.report(4, 2, &end)), (Ok(()), Ok(())));
    assert_eq!(store.read(5, "k"), Ok(vec![1, 2]));
    let again = store.master.create_task(at(6), b"k", None, Some(2));
    assert_eq!(again, Err(ErrorCode::ReplicaAlreadyExists));
    assert_eq!((store.used(), store.fetch(7, 2)), (2 * KIB, vec![]));
    // Another node's word about it counts nothing.
    store.master.create_task(at(8), b"k", None, Some(3)).unwrap();
    let order = store.fetch(9, 3).remove(0);
    let end = store.copy(&order);
    assert_eq!(store.report(10, 2, &end), Err(ErrorCode::TaskNotFound));
    assert_eq!(store.report(10, 3, &end), Ok(()));
}

#[test]
fn a_node_that_restarts_loses_its_tasks_to_others_or_gets_them_again() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
    store.put_on(0, "k", KIB, 1);
    store.put_on(0, "l", KIB, 1);
    let anywhere = store.master.create_task(at(0), b"k", None, None).unwrap();
    let there = store.master.create_task(at(0), b"l", None, Some(2)).unwrap();
    let orders = store.fetch(1, 2);
    assert_eq!(orders.len(), 2);
    // Its memory is new, and has a new number.
    let new = store.mount(2, 2, 64 * KIB);
    assert_eq!(store.task(3, there).error, Some(ErrorCode::SegmentNotFound));
    assert_eq!(store.task(3, there).state, TaskState::Failed, "the segment that was named is gone");
    let end = orders[0].end(Ok(checksum(&content(1, KIB))));
    assert_eq!(store.report(4, 2, &end), Err(ErrorCode::TaskNotFound), "a word of its former life");
    // When the segment went there was no other place; now there is.
    let task = store.task(3, anywhere);
    assert_eq!((task.state, task.error), (TaskState::Failed, Some(ErrorCode::NoAvailableHandle)));
    store.master.retry_task(at(5), anywhere).unwrap();
    assert_eq!(store.work(6, 2), 1);
    assert_eq!(store.read(7, "k"), Ok(vec![1, new]));

    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB, 64 * KIB]);
    store.put_on(0, "k", KIB, 1);
    let id = store.master.create_task(at(0), b"k", None, None).unwrap();
    let first = store.task(0, id).target.unwrap();
    let other = if first == 2 { 3 } else { 2 };
    store.fetch(1, first.into());
    store.mount(2, first.into(), 64 * KIB);
    let task = store.task(3, id);
    assert_eq!((task.state, task.target), (TaskState::Pending, Some(other)));
    assert_eq!(store.work(4, other.into()), 1);
    assert_eq!(store.read(5, "k"), Ok(vec![1, other]));
    let stale = FetchAsk { node: u64::from(first), incarnation: 1, count_max: 5, key: 0 };
    assert_eq!(store.master.fetch_tasks(at(6), &stale).unwrap_err(), ErrorCode::ClientNotFound);
}

#[test]
fn a_task_that_lost_its_source_fails() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB, 64 * KIB]);
    let two = PutOptions { placement: Placement::on(1), ..TWO };
    store.put(0, "k", KIB, &two);
    let other = store.read(0, "k").unwrap()[1];
    let third = 5 - other;
    let id = store.master.create_task(at(0), b"k", Some(1), Some(third)).unwrap();
    store.mount(1, 1, 64 * KIB);
    assert_eq!(store.fetch(2, third.into()), vec![]);
    let task = store.task(3, id);
    assert_eq!((task.state, task.error), (TaskState::Failed, Some(ErrorCode::ReplicaNotFound)));
    assert_eq!((store.used(), store.read(4, "k")), (KIB, Ok(vec![other])));
}

#[test]
fn cancelled_tasks_give_their_space_back_when_nobody_writes_to_it() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
    store.put_on(0, "k", KIB, 1);
    store.put_on(0, "l", KIB, 1);
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
    assert_eq!((store.used(), store.read(5, "l")), (2 * KIB, Ok(vec![1])));
    assert_eq!(store.master.cancel_task(at(5), 77).unwrap_err(), ErrorCode::TaskNotFound);
    assert_eq!(store.master.task_report().canceled_total, 2);
}

#[test]
fn tasks_have_limits() {
    let tasks = TaskConfig { unfinished_max: 4, finished_max: 2, per_node_max: 3, ..config().tasks };
    let mut store = Store::new(MasterConfig { tasks, ..config() }, &[64 * KIB, 64 * KIB]);
    let keys = ["a", "b", "c", "d", "e"];
    keys.iter().for_each(|key| {
        store.put_on(0, key, KIB, 1);
    });
    let created: Vec<_> =
        keys.map(|key| store.master.create_task(at(0), key.as_bytes(), None, None)).to_vec();
    assert!(created[..4].iter().all(Result::is_ok));
    assert_eq!(created[4], Err(ErrorCode::TaskPendingLimitExceeded));
    let orders = store.fetch(1, 2);
    assert_eq!(orders.len(), 3, "a node is at so many at most");
    let ends: Vec<_> = orders.iter().map(|order| store.copy(order)).collect();
    ends.iter().for_each(|end| store.report(2, 2, end).unwrap());
    assert_eq!(store.master.task(at(3), created[0].unwrap()).unwrap_err(), ErrorCode::TaskNotFound);
    assert_eq!(store.master.task_report().finished, 2, "and the oldest is forgotten");
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
    // One that nobody fetches is given up, and its space with it.
    store.master.handle_timeout(at(20_000));
    assert_eq!(store.task(20_001, created[3].unwrap()).error, Some(ErrorCode::RpcTimeout));
    assert_eq!(store.used(), 8 * KIB);
}

#[test]
fn senseless_tasks_are_refused() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB, 4 * KIB]);
    store.put_on(0, "k", 8 * KIB, 1);
    let open = store.master.put_start(at(0), b"open", KIB, &ONE).unwrap();
    let mut create = |key: &str, source, target| {
        store.master.create_task(at(1), key.as_bytes(), source, target).unwrap_err()
    };
    assert_eq!(create("none", None, None), ErrorCode::ObjectNotFound);
    assert_eq!(create("open", None, None), ErrorCode::ReplicaIsNotReady);
    assert_eq!(create("k", Some(2), None), ErrorCode::ReplicaNotFound);
    assert_eq!(create("k", None, Some(1)), ErrorCode::ReplicaAlreadyExists);
    assert_eq!(create("k", None, Some(9)), ErrorCode::SegmentNotFound);
    assert_eq!(create("k", None, Some(3)), ErrorCode::NoAvailableHandle);
    store.master.put_revoke(at(2), b"open", open.generation, true).unwrap();
    store.master.create_task(at(3), b"k", Some(1), Some(2)).unwrap();
    let second = store.master.create_task(at(3), b"k", Some(1), Some(3));
    assert_eq!(second, Err(ErrorCode::ObjectHasReplicationTask));
    let limited = MasterConfig { replicas_max: 2, ..config() };
    let mut store = Store::new(limited, &[64 * KIB, 64 * KIB, 64 * KIB]);
    store.put(0, "k", KIB, &TWO);
    assert_eq!(store.master.create_task(at(1), b"k", None, None), Err(ErrorCode::KeysUltraLimit));
    let source = store.read(1, "k").unwrap()[0];
    assert!(store.master.create_task(at(1), b"k", Some(source), None).is_ok(), "a move leaves as many");
}

#[test]
fn draining_moves_everything_while_readers_read() {
    let tasks = TaskConfig { drain_moves_max: 4, ..config().tasks };
    let mut store = Store::new(MasterConfig { tasks, ..config() }, &[256 * KIB, 256 * KIB, 256 * KIB]);
    for key in 0..40 {
        store.put_on(0, &format!("k{key}"), KIB + key * 64, 1);
    }
    assert_eq!(store.order(10, 1, SegmentState::Draining).state, SegmentState::Draining);
    assert_eq!(store.master.poll_timeout(), Some(at(10)));
    let mut ms = 10;
    while store.master.drain_info(1).unwrap().state == SegmentState::Draining {
        ms += 50;
        store.master.handle_timeout(at(ms));
        assert!(store.master.drain_info(1).unwrap().moving <= 4);
        store.work(ms, 2 + ms / 50 % 2);
        for key in (0..40).step_by(7) {
            store.read(ms, &format!("k{key}")).unwrap();
        }
        let new = store.master.put_start(at(ms), format!("n{ms}").as_bytes(), KIB, &ONE).unwrap();
        assert_ne!(new.replicas[0].segment, 1, "new puts go elsewhere");
        store.master.put_revoke(at(ms), format!("n{ms}").as_bytes(), new.generation, true).unwrap();
        assert!(ms < 30_000, "{:?}", store.master.drain_info(1));
    }
    let info = store.master.drain_info(1).unwrap();
    assert_eq!((info.state, info.moved_total, info.blocks), (SegmentState::Drained, 40, 0));
    for key in 0..40 {
        assert_ne!(store.read(ms, &format!("k{key}")), Ok(vec![1]));
    }
    store.master.unmount(at(ms), &UnmountSegment { node: 1, incarnation: 1, segment: 1, key: 0 }).unwrap();
    assert_eq!((store.master.stats().objects_lost_total, store.master.stats().objects), (0, 40));
    assert!(store.master.drains().next().is_none());
}

#[test]
fn what_finds_no_place_elsewhere_stays_and_is_counted() {
    let mut store = Store::new(config(), &[64 * KIB, 4 * KIB]);
    store.put_on(0, "fits", 3 * KIB, 1);
    store.put_on(0, "large", 8 * KIB, 1);
    store.put_on(0, "also large", 8 * KIB, 1);
    let open = store.master.put_start(at(0), b"open", 16 * KIB, &ONE).unwrap();
    store.order(0, 1, SegmentState::Draining);
    store.settle(1);
    let info = store.master.drain_info(1).unwrap();
    assert_eq!(info.state, SegmentState::Draining);
    assert_eq!((info.moved_total, info.left_no_room, info.left_unfinished), (1, 2, 1));
    assert_eq!(store.read(2, "large"), Ok(vec![1]), "and is served still");
    assert_eq!(store.master.poll_timeout(), Some(at(1_001)), "the next round");
    // With a new node there is room; and the unfinished put was given up.
    store.mount(2_000, 3, 64 * KIB);
    store.master.put_revoke(at(2_000), b"open", open.generation, true).unwrap();
    store.settle(2_500);
    // What was moved waits for its readers.
    store.settle(10_000);
    store.settle(20_000);
    let info = store.master.drain_info(1).unwrap();
    assert_eq!((info.state, info.left_no_room, info.left_unfinished), (SegmentState::Drained, 0, 0));
    for key in ["fits", "large", "also large"] {
        assert!(!store.read(20_001, key).unwrap().contains(&1));
    }
}

#[test]
fn what_has_gone_bad_stays_and_is_counted_until_somebody_removes_it() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
    store.put_on(0, "good", KIB, 1);
    store.put_on(0, "bad", KIB, 1);
    let bad = store.master.get(at(0), b"bad").unwrap();
    store.write(1, bad.replicas.iter().next().unwrap().addr, b"rot");
    store.order(10_000, 1, SegmentState::Draining);
    for ms in [10_001, 20_000, 30_000, 40_000] {
        // What was moved waits for its readers, and every round tries the bad one again.
        store.settle(ms);
    }
    let info = store.master.drain_info(1).unwrap();
    assert_eq!((info.state, info.blocks), (SegmentState::Draining, 1));
    assert_eq!((info.moved_total, info.left_bad, info.left_no_room), (1, 1, 0));
    assert!(info.failed_total >= 2, "{info:?}");
    store.master.remove(at(50_000), b"bad", true).unwrap();
    store.settle(50_001);
    store.settle(60_000);
    let info = store.master.drain_info(1).unwrap();
    assert_eq!((info.state, info.left_bad), (SegmentState::Drained, 0));
}

#[test]
fn what_is_removed_during_a_round_is_not_left_by_it() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
    for key in ["one", "two"] {
        store.put_on(0, key, KIB, 1);
    }
    store.order(10_000, 1, SegmentState::Draining);
    store.master.handle_timeout(at(10_000));
    let orders = store.fetch(10_001, 2);
    assert_eq!((orders.len(), store.master.drain_info(1).unwrap().moving), (2, 2));
    store.write(1, orders[0].sources[0].addr, b"rot");
    let end = store.copy(&orders[0]);
    store.report(10_002, 2, &end).unwrap();
    assert_eq!(store.master.drain_info(1).unwrap().moving, 1);
    let rotten = |store: &Store, key: &str| {
        let replicas = store.master.find_replicas(key.as_bytes()).unwrap();
        replicas.iter().any(|replica| (replica.segment, replica.addr) == (1, orders[0].sources[0].addr))
    };
    let key = if rotten(&store, "one") { "one" } else { "two" };
    store.master.remove(at(10_003), key.as_bytes(), true).unwrap();
    let end = store.copy(&orders[1]);
    store.report(10_004, 2, &end).unwrap();
    // Both places wait for their readers.
    for ms in [10_005, 20_000, 30_000] {
        store.settle(ms);
    }
    let info = store.master.drain_info(1).unwrap();
    assert_eq!((info.state, info.left_bad, info.left_unfinished), (SegmentState::Drained, 0, 0), "{info:?}");
}

#[test]
fn a_move_of_a_drain_that_was_called_off_does_not_count_for_the_next() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
    for key in 0..3 {
        store.put_on(0, &format!("k{key}"), KIB, 1);
    }
    store.order(10_000, 1, SegmentState::Draining);
    store.master.handle_timeout(at(10_000));
    let orders = store.fetch(10_001, 2);
    assert_eq!(orders.len(), 3);
    store.order(10_002, 1, SegmentState::Active);
    store.order(10_003, 1, SegmentState::Draining);
    store.master.handle_timeout(at(10_003));
    let before = store.master.drain_info(1).unwrap();
    store.write(1, orders[0].sources[0].addr, b"rot");
    let end = store.copy(&orders[0]);
    store.report(10_004, 2, &end).unwrap();
    let after = store.master.drain_info(1).unwrap();
    assert_eq!((after.moving, after.failed_total, after.left_bad), (before.moving, 0, 0), "{after:?}");
}

#[test]
fn a_replica_with_another_elsewhere_is_dropped_when_there_is_no_third_place() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
    store.put(0, "k", KIB, &TWO);
    store.order(0, 1, SegmentState::Draining);
    store.settle(1);
    let info = store.master.drain_info(1).unwrap();
    assert_eq!((info.state, info.dropped_total, info.left_no_room), (SegmentState::Drained, 1, 0));
    assert_eq!(store.read(2, "k"), Ok(vec![2]));
}

#[test]
fn maintenance_takes_nothing_new_and_serves_and_active_ends_everything() {
    let mut store = Store::new(config(), &[64 * KIB, 64 * KIB]);
    store.put_on(0, "k", KIB, 1);
    assert_eq!(store.order(0, 1, SegmentState::Maintenance).state, SegmentState::Maintenance);
    let options = PutOptions { placement: Placement::on(1), ..TWO };
    let put = store.master.put_start(at(1), b"l", KIB, &options).unwrap();
    assert_eq!((put.replicas.len(), put.replicas[0].segment), (1, 2));
    assert_eq!(store.master.create_task(at(1), b"k", None, Some(1)), Err(ErrorCode::ReplicaAlreadyExists));
    assert_eq!(store.read(2, "k"), Ok(vec![1]));
    store.settle(3);
    assert_eq!(store.master.drain_info(1).unwrap().moved_total, 0);
    assert_eq!(store.master.drains().count(), 1);
    // A drain that is called off takes back what nobody has begun.
    store.order(4, 1, SegmentState::Draining);
    store.master.handle_timeout(at(4));
    assert_eq!(store.master.task_report().pending, 1);
    assert_eq!(store.order(5, 1, SegmentState::Active).state, SegmentState::Active);
    let report = store.master.task_report();
    assert_eq!((report.pending, report.canceled_total, report.draining), (0, 1, 0));
    let put =
        store.master.put_start(at(6), b"m", KIB, &PutOptions { placement: Placement::on(1), ..ONE }).unwrap();
    assert_eq!(put.replicas[0].segment, 1);
    let gone = SegmentOrder { segment: 9, state: SegmentState::Active };
    assert_eq!(store.master.order_segment(at(7), &gone), Err(ErrorCode::SegmentNotFound));
}

fn hot(mode: ReplicationMode) -> MasterConfig {
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
        store.put_on(0, "hot", KIB, 1);
        store.put_on(0, "cold", KIB, 1);
        for turn in 0..20 {
            store.read(turn * 10, "hot").unwrap();
        }
        store.read(200, "cold").unwrap();
        let report = store.master.task_report();
        assert_eq!((report.hot_gets_total, report.created_total), (hot_gets, created), "{mode:?}");
        store.settle(200);
        let replicas = store.read(201, "hot").unwrap().len();
        assert_eq!(replicas as u64, 1 + created);
        // And no third.
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
        store.put_on(0, &format!("k{key}"), KIB, 1);
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
    store.put_on(0, "old", KIB, 2);
    store.put_on(0, "hot", KIB, 1);
    for turn in 0..12 {
        store.read(turn * 10, "hot").unwrap();
    }
    store.settle(200);
    assert_eq!(store.read(201, "hot").unwrap().len(), 2);
    for (turn, segment) in [1, 1, 1, 2, 2].into_iter().enumerate() {
        store.put_on(300, &format!("fill{turn}"), KIB, segment);
    }
    assert_eq!(store.used(), 8 * KIB);
    // While somebody reads it, the extra replica stays, and the oldest object goes.
    store.put(400, "one", KIB, &ONE);
    assert!(!store.master.exists(b"old"));
    assert_eq!(store.read(401, "hot").unwrap().len(), 2);
    // When nobody does, it goes before any object.
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
    let mut report = |ms, who, segment| store.master.report_replica(at(ms), who, 0, &bad(segment));
    for ms in 0..10 {
        assert_eq!(report(ms, 7, 1), Ok(Verdict::Noted), "one reader counts once");
    }
    assert_eq!(report(10, 8, 2), Ok(Verdict::Noted), "another replica is another case");
    assert_eq!(report(11, 8, 1), Ok(Verdict::Dropped));
    assert_eq!(report(12, 9, 1), Err(ErrorCode::ReplicaNotFound));
    assert_eq!(store.read(13, "k"), Ok(vec![2]));
    // The last one goes in the same way: nobody could read it, and its key would be taken.
    let last = store.master.report_replica(at(14), 7, 0, &bad(2));
    assert_eq!(last, Ok(Verdict::Gone));
    assert_eq!(store.read(15, "k"), Err(ErrorCode::ObjectNotFound));
    assert_eq!(store.master.stats().deferred_bytes, KIB, "a reader may be at it still");
    store.put(16, "k", KIB, &ONE);
    let stale = store.master.report_replica(at(17), 1, 0, &bad(1));
    assert_eq!(stale, Err(ErrorCode::ObjectNotFound), "a word about the former object");
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
        let left: Vec<_> = replicas.iter().copied().filter(|no| *no != 2).collect();
        assert_eq!(store.read(3, &format!("k{key}")), Ok(left));
    }
    assert_eq!(store.master.stats().objects_lost_total, 0);
}

/// A copy that a node is in the middle of.
struct Copying {
    node: u64,
    incarnation: u64,
    order: Order,
    /// Read so far.
    bytes: Vec<u8>,
    until: u64,
}

/// Everything at once, from a seed: puts, reads, removals, copies, moves, drains, restarts, lost reports; and nodes that take
/// their time between reading, writing and reporting. A reader must find the bytes of the put as long as its lease runs, on
/// every replica it was told; and in the end no byte is missing.
fn random_history(seed: u64) -> (u64, u64) {
    let mut rng = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut below = move |n: u64| {
        rng ^= rng << 13;
        rng ^= rng >> 7;
        rng ^= rng << 17;
        rng % n
    };
    const SEGMENT: u64 = 32 * KIB;
    let replication = hot(ReplicationMode::Enforce).replication;
    let mut store = Store::new(MasterConfig { replication, ..config() }, &[SEGMENT; 4]);
    let mut copying: Vec<Copying> = Vec::new();
    let mut reading: Vec<(u64, Object)> = Vec::new();
    let (mut ms, mut reads) = (0, 0);
    for _ in 0..3_000 {
        ms += below(60);
        store.master.handle_timeout(at(ms));
        let key = format!("k{}", below(12));
        match below(20) {
            0..5 => {
                let options = PutOptions { replicas: 1 + below(2) as u8, ..ONE };
                let len = 1 + below(6 * KIB);
                if let Ok(put) = store.master.put_start(at(ms), key.as_bytes(), len, &options) {
                    let bytes = content(put.generation, len);
                    for replica in put.replicas.iter() {
                        store.write(replica.segment, replica.addr, &bytes);
                    }
                    store.master.put_end(at(ms), key.as_bytes(), put.generation, checksum(&bytes)).unwrap();
                }
            }
            5..9 => {
                if let Ok(object) = store.master.get(at(ms), key.as_bytes()) {
                    reading.push((ms + LEASE_MS, object));
                }
            }
            9 => drop(store.master.remove(at(ms), key.as_bytes(), below(2) == 0)),
            10..12 => {
                let named = |pick: u64| (pick < 5).then_some(pick as SegmentNo + 1);
                let (source, target) = (named(below(10)), named(below(10)));
                let _ = store.master.create_task(at(ms), key.as_bytes(), source, target);
            }
            12..15 => {
                let node = 1 + below(4);
                for order in store.fetch(ms, node) {
                    let known = |copying: &Copying| copying.order.attempt == order.attempt;
                    if copying.iter().any(known) || order.sources.is_empty() {
                        continue;
                    }
                    let source = order.sources[below(order.sources.len() as u64) as usize];
                    let bytes = store.bytes(source.segment, source.addr, order.len);
                    let (incarnation, until) = (store.incarnations[&node], ms + below(8_000));
                    copying.push(Copying { node, incarnation, order, bytes, until });
                }
            }
            15 if below(4) == 0 => {
                let state = [SegmentState::Draining, SegmentState::Active, SegmentState::Maintenance]
                    [below(3) as usize];
                let all: Vec<SegmentNo> = store.master.segments().map(|segment| segment.segment).collect();
                store.order(ms, all[below(all.len() as u64) as usize], state);
            }
            16 if below(20) == 0 => {
                let node = 1 + below(4);
                let old: Vec<_> = store
                    .master
                    .segments()
                    .filter(|info| info.node == node)
                    .map(|info| info.segment)
                    .collect();
                store.mount(ms, node, SEGMENT);
                // Leases on what is gone with its node are worth nothing.
                old.iter().for_each(|no| drop(store.memory.remove(no)));
            }
            17 => {
                let listed = below(40) + 1;
                let _ = if below(2) == 0 {
                    store.master.cancel_task(at(ms), listed).map(|_| ())
                } else {
                    store.master.retry_task(at(ms), listed).map(|_| ())
                };
            }
            _ => {}
        }
        // Nodes write as late as they can: right before they report.
        let mut at_work = Vec::new();
        for copy in copying.drain(..) {
            if copy.until > ms {
                at_work.push(copy);
                continue;
            }
            store.write(copy.order.segment, copy.order.addr, &copy.bytes);
            if store.incarnations[&copy.node] == copy.incarnation {
                let end = match below(6) {
                    0 => copy.order.end(Err(ErrorCode::TransferFail)),
                    1 => TaskEnd { quiet: false, ..copy.order.end(Err(ErrorCode::TransferFail)) },
                    _ => copy.order.end(Ok(checksum(&copy.bytes))),
                };
                if below(8) > 0 {
                    let _ = store.report(ms, copy.node, &end);
                }
            }
        }
        copying = at_work;
        reading.retain(|(until, object)| {
            for replica in
                object.replicas.iter().filter(|replica| store.memory.contains_key(&replica.segment))
            {
                let bytes = store.bytes(replica.segment, replica.addr, object.len);
                let right = bytes == content(object.generation, object.len);
                assert!(right, "seed {seed}, {ms} ms: {:#x} on {replica:?}", object.generation);
                reads += 1;
            }
            *until > ms + 60
        });
    }
    // Everybody falls silent. What is left is what objects have.
    ms += 10 * RELEASE_MS;
    for segment in 0..store.memory.len() as SegmentNo * 4 {
        let _ = store.master.order_segment(at(ms), &SegmentOrder { segment, state: SegmentState::Active });
    }
    for _ in 0..50 {
        ms += RELEASE_MS;
        store.master.handle_timeout(at(ms));
    }
    let mut expected = 0;
    let keys: Vec<String> = (0..12).map(|key| format!("k{key}")).collect();
    for key in &keys {
        if let Ok(object) = store.master.get(at(ms), key.as_bytes()) {
            let segments: Vec<_> = object.replicas.iter().map(|replica| replica.segment).collect();
            let mut distinct = segments.clone();
            distinct.sort_unstable();
            distinct.dedup();
            assert_eq!(segments.len(), distinct.len(), "seed {seed}: two replicas on one segment");
            expected += segments.len() as u64 * object.len.next_multiple_of(64);
        }
    }
    assert_eq!(store.used(), expected, "seed {seed}: {:?}", store.master.task_report());
    assert_eq!(store.master.stats().quarantined_bytes, 0, "seed {seed}");
    let report = store.master.task_report();
    assert_eq!((report.pending, report.processing), (0, 0), "seed {seed}");
    (reads, report.done_total)
}

#[test]
fn whatever_happens_readers_find_what_was_put_and_no_byte_is_lost() {
    let (mut reads, mut copies) = (0, 0);
    for seed in 1..=24 {
        let found = random_history(seed);
        reads += found.0;
        copies += found.1;
    }
    assert!(reads > 10_000 && copies > 300, "{reads} reads, {copies} copies: too little happened");
}
