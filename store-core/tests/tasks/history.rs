//! A random history of all operations on tasks.

use std::collections::BTreeSet;

use store_core::message::*;
use store_core::{ErrorCode, MasterConfig, ReplicationMode, SegmentNo, TaskId};
use te_core::testkit::{Rng, each_seed, seeds};

use crate::hot::hot;
use crate::store::*;

const SEGMENT_BYTES: u64 = 32 * KIB;
/// Keys that the history uses.
const KEYS: u64 = 12;

/// A copy that a node is carrying out.
struct Copying {
    node: u64,
    incarnation: u64,
    order: Order,
    /// The bytes read so far.
    bytes: Vec<u8>,
    until: u64,
}

/// A random history from a seed: puts, reads, removals, copies, moves, drains, restarts, lost reports; and
/// nodes that take their time between reading, writing and reporting. While its lease is valid, a reader must
/// find the bytes of the put on every replica; and in the end no byte is missing.
struct History {
    seed: u64,
    rng: Rng,
    store: Store,
    ms: u64,
    copying: Vec<Copying>,
    /// Objects under a lease, and the end of the lease, ms.
    reading: Vec<(u64, Object)>,
    /// Replicas that were read and verified.
    reads: u64,
}

impl History {
    fn new(seed: u64) -> Self {
        let replication = hot(ReplicationMode::Enforce).replication;
        let store = Store::new(MasterConfig { replication, ..config() }, &[SEGMENT_BYTES; 4]);
        Self { seed, rng: Rng::new(seed), store, ms: 0, copying: Vec::new(), reading: Vec::new(), reads: 0 }
    }

    fn step(&mut self) {
        self.ms += self.rng.below(60);
        self.store.master.handle_timeout(at(self.ms));
        let key = format!("k{}", self.rng.below(KEYS));
        match self.rng.below(20) {
            0..5 => self.put(key.as_bytes()),
            5..9 => {
                if let Ok(object) = self.store.master.get(at(self.ms), key.as_bytes()) {
                    self.reading.push((self.ms + LEASE_MS, object));
                }
            }
            9 => {
                let mode = RemoveMode::of(self.rng.below(2) == 0);
                let _ = self.store.master.remove(at(self.ms), key.as_bytes(), mode);
            }
            10..12 => {
                let mut named =
                    || Some(self.rng.below(10)).filter(|pick| *pick < 5).map(|pick| no(pick as u32 + 1));
                let (source, target) = (named(), named());
                let _ = self.store.master.create_task(at(self.ms), key.as_bytes(), source, target);
            }
            12..15 => self.fetch(),
            15 if self.rng.below(4) == 0 => self.order_segment(),
            16 if self.rng.below(20) == 0 => self.restart_node(),
            17 => self.change_task(),
            _ => {}
        }
        self.write_and_report();
        self.verify_readers();
    }

    fn put(&mut self, key: &[u8]) {
        let options = PutOptions { replicas: 1 + self.rng.below(2) as u8, ..ONE };
        let len = 1 + self.rng.below(6 * KIB);
        if let Ok(put) = self.store.master.put_start(at(self.ms), key, len, &options) {
            let bytes = content(put.generation, len);
            for replica in put.replicas.iter() {
                self.store.write(replica.segment, replica.addr, &bytes);
            }
            self.store.master.put_end(at(self.ms), key, put.generation, checksum(&bytes)).unwrap();
        }
    }

    /// A node fetches its tasks and reads the sources.
    fn fetch(&mut self) {
        let node = 1 + self.rng.below(4);
        for order in self.store.fetch(self.ms, node) {
            let known = |copying: &Copying| copying.order.attempt == order.attempt;
            if self.copying.iter().any(known) || order.sources.is_empty() {
                continue;
            }
            let source = order.sources[self.rng.index(order.sources.len())];
            let bytes = self.store.bytes(source.segment, source.addr, order.len);
            let (incarnation, until) = (self.store.incarnations[&node], self.ms + self.rng.below(8_000));
            self.copying.push(Copying { node, incarnation, order, bytes, until });
        }
    }

    fn order_segment(&mut self) {
        let states = [SegmentState::Draining, SegmentState::Active, SegmentState::Maintenance];
        let state = states[self.rng.index(states.len())];
        let all: Vec<SegmentNo> = self.store.master.segments().map(|segment| segment.segment).collect();
        self.store.order(self.ms, all[self.rng.index(all.len())], state);
    }

    fn restart_node(&mut self) {
        let node = 1 + self.rng.below(4);
        let of_node = self.store.master.segments().filter(|info| info.node.get() == node);
        let old: Vec<_> = of_node.map(|info| info.segment).collect();
        self.store.mount(self.ms, node, SEGMENT_BYTES);
        // Leases on segments that are gone with their node are void.
        old.iter().for_each(|no| drop(self.store.memory.remove(no)));
    }

    fn change_task(&mut self) {
        let listed = TaskId::new(self.rng.below(40) + 1);
        let _ = if self.rng.below(2) == 0 {
            self.store.master.cancel_task(at(self.ms), listed).map(|_| ())
        } else {
            self.store.master.retry_task(at(self.ms), listed).map(|_| ())
        };
    }

    /// Nodes write as late as possible: right before they report.
    fn write_and_report(&mut self) {
        let (due, later): (Vec<_>, Vec<_>) = self.copying.drain(..).partition(|copy| copy.until <= self.ms);
        self.copying = later;
        for copy in due {
            self.store.write(copy.order.segment, copy.order.addr, &copy.bytes);
            if self.store.incarnations[&copy.node] != copy.incarnation {
                continue;
            }
            let end = match self.rng.below(6) {
                0 => copy.order.end(Err(ErrorCode::TransferFail)),
                1 => TaskEnd { quiet: false, ..copy.order.end(Err(ErrorCode::TransferFail)) },
                _ => copy.order.end(Ok(checksum(&copy.bytes))),
            };
            if self.rng.below(8) > 0 {
                let _ = self.store.report(self.ms, copy.node, &end);
            }
        }
    }

    /// Every reader finds the bytes of the put on every replica, as long as its lease is valid.
    fn verify_readers(&mut self) {
        let Self { seed, store, ms, reads, .. } = self;
        self.reading.retain(|(until, object)| {
            let mounted = |replica: &&Replica| store.memory.contains_key(&replica.segment);
            for replica in object.replicas.iter().filter(mounted) {
                let bytes = store.bytes(replica.segment, replica.addr, object.len);
                let right = bytes == content(object.generation, object.len);
                assert!(right, "seed {seed}, {ms} ms: {:#x} on {replica:?}", object.generation);
                *reads += 1;
            }
            *until > *ms + 60
        });
    }

    /// Without further requests, everything that is left belongs to objects. Returns the number of copies
    /// made.
    fn settle(&mut self) -> u64 {
        let Self { seed, store, ms, .. } = self;
        *ms += 10 * RELEASE_MS;
        for segment in 0..store.memory.len() as u32 * 4 {
            let order = SegmentOrder { segment: no(segment), state: SegmentState::Active };
            let _ = store.master.order_segment(at(*ms), &order);
        }
        for _ in 0..50 {
            *ms += RELEASE_MS;
            store.master.handle_timeout(at(*ms));
        }
        let mut expected = 0;
        for key in 0..KEYS {
            let Ok(object) = store.master.get(at(*ms), format!("k{key}").as_bytes()) else { continue };
            let segments: BTreeSet<_> = object.replicas.iter().map(|replica| replica.segment).collect();
            assert_eq!(segments.len(), object.replicas.len(), "seed {seed}: two replicas on one segment");
            expected += segments.len() as u64 * object.len.next_multiple_of(64);
        }
        assert_eq!(store.used(), expected, "seed {seed}: {:?}", store.master.task_report());
        assert_eq!(store.master.stats().quarantined_bytes, 0, "seed {seed}");
        let report = store.master.task_report();
        assert_eq!((report.pending, report.processing), (0, 0), "seed {seed}");
        report.done_total
    }
}

#[test]
fn whatever_happens_readers_find_what_was_put_and_no_byte_is_lost() {
    const SEEDS: std::ops::Range<u64> = 1..25;
    let (mut reads, mut copies) = (0, 0);
    for seed in each_seed(SEEDS) {
        let mut history = History::new(seed);
        (0..3_000).for_each(|_| history.step());
        copies += history.settle();
        reads += history.reads;
    }
    let enough = reads > 10_000 && copies > 300;
    assert!(enough || seeds(SEEDS) != SEEDS, "{reads} reads, {copies} copies: too little happened");
}
