//! A random history of all operations on tasks.

use store_core::message::*;
use store_core::{ErrorCode, MasterConfig, ReplicationMode, SegmentNo};

use crate::hot::hot;
use crate::store::*;

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
                // Leases on segments that are gone with their node are void.
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
        // Nodes write as late as possible: right before they report.
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
    // No further requests. What is left must belong to objects.
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
