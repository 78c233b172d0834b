//! Placement: what a put prefers, what it forbids, and the share of a new segment.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;

use proptest::prelude::*;
use store_core::message::{Allocation, MountSegment, PutOptions, RemoveMode, UnmountSegment, WriterState};
use store_core::{
    AllocationStrategy, AllocatorKind, ErrorCode, Incarnation, Master, MasterConfig, NodeId, Placement,
    SegmentNo,
};
use te_core::Instant;

/// The segment with this number.
fn no(number: u32) -> SegmentNo {
    SegmentNo::new(number)
}

/// The segments with these numbers.
fn nos<const N: usize>(numbers: [u32; N]) -> Vec<SegmentNo> {
    numbers.map(SegmentNo::new).to_vec()
}

const KIB: u64 = 1024;
const SLOW_START_MS: u64 = 60_000;

fn at(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

fn config(strategy: AllocationStrategy) -> MasterConfig {
    MasterConfig {
        allocation_strategy: strategy,
        slow_start_ms: SLOW_START_MS as u32,
        eviction_high_watermark: 1.0,
        eviction_ratio: 0.0,
        node_ttl_ms: 80_000_000,
        put_start_discard_timeout_ms: 80_000_000,
        put_start_release_timeout_ms: 86_000_000,
        ..MasterConfig::default()
    }
}

fn mount(master: &mut Master, ms: u64, node: u64, incarnation: u64, name: &str, len: u64) -> SegmentNo {
    let segment = MountSegment {
        node: NodeId::new(node),
        incarnation: Incarnation::new(incarnation),
        name,
        endpoint: "host:1",
        len,
        ..MountSegment::default()
    };
    master.mount(at(ms), &segment).unwrap().mounted().unwrap().segment
}

/// A store whose segments belong to these nodes, all mounted at time 0; they are numbered from 1.
fn store(strategy: AllocationStrategy, nodes: &[u64], len: u64) -> Master {
    let mut master = Master::new(config(strategy)).unwrap();
    for (index, node) in nodes.iter().enumerate() {
        mount(&mut master, 0, *node, 1, &format!("s{}", index + 1), len);
    }
    master
}

/// Starts a put that never ends: it cannot be evicted.
fn start(
    master: &mut Master,
    key: &str,
    len: u64,
    replicas: u8,
    placement: Placement,
) -> Result<Vec<SegmentNo>, ErrorCode> {
    let options = PutOptions { replicas, placement, ..PutOptions::DEFAULT };
    master.put_start(at(0), key.as_bytes(), len, &options).map(|started| segments_of(&started))
}

fn segments_of(started: &Allocation) -> Vec<SegmentNo> {
    started.replicas.iter().map(|replica| replica.segment).collect()
}

fn put(master: &mut Master, ms: u64, key: &str, len: u64) -> SegmentNo {
    let started = master.put_start(at(ms), key.as_bytes(), len, &PutOptions::DEFAULT).unwrap();
    master.put_end(at(ms), key.as_bytes(), started.generation, 1).unwrap();
    started.replicas[0].segment
}

fn placement(preferred: &[SegmentNo], excluded: &[SegmentNo]) -> Placement {
    let mut placement = Placement::ANY;
    preferred.iter().for_each(|no| placement.preferred.push(*no).unwrap());
    excluded.iter().for_each(|no| placement.excluded.push(*no).unwrap());
    placement
}

#[test]
fn preferred_segments_are_tried_in_their_order_and_each_holds_one_replica() {
    for strategy in AllocationStrategy::ALL {
        let mut master = store(*strategy, &[1, 2, 3, 4, 5], 64 * KIB);
        // Segment 9 does not exist.
        let wish = placement(&[SegmentNo::new(9), SegmentNo::new(4), SegmentNo::new(2)], &[]);
        for turn in 0..4 {
            assert_eq!(start(&mut master, &format!("a{turn}"), 16 * KIB, 1, wish), Ok(nos([4])));
        }
        for turn in 0..3 {
            assert_eq!(start(&mut master, &format!("b{turn}"), 16 * KIB, 1, wish), Ok(nos([2])), "4 is full");
        }
        let placed = start(&mut master, "c", 16 * KIB, 2, wish).unwrap();
        assert!(placed[0] == SegmentNo::new(2) && !nos([2, 4]).contains(&placed[1]), "{placed:?}");
        let placed = start(&mut master, "d", 16 * KIB, 1, wish).unwrap();
        assert!(!nos([2, 4]).contains(&placed[0]), "both are full");
        let placed = start(
            &mut master,
            "e",
            KIB,
            3,
            placement(&[SegmentNo::new(5), SegmentNo::new(3), SegmentNo::new(1)], &[]),
        )
        .unwrap();
        assert_eq!(placed, nos([5, 3, 1]));
    }
}

#[test]
fn excluded_segments_are_never_used_not_even_when_there_is_no_other() {
    for strategy in AllocationStrategy::ALL {
        let mut master = store(*strategy, &[1, 2, 3], 64 * KIB);
        let wish =
            placement(&[SegmentNo::new(1), SegmentNo::new(2)], &[SegmentNo::new(1), SegmentNo::new(3)]);
        for turn in 0..64 {
            assert_eq!(start(&mut master, &format!("k{turn}"), KIB, 3, wish), Ok(nos([2])));
        }
        assert_eq!(master.stats().puts_partial_total, 64);
        let refused = start(&mut master, "k", KIB, 1, wish);
        assert_eq!(refused, Err(ErrorCode::NoAvailableHandle), "only excluded segments have room");
        // Nothing is evicted there without need.
        let mut master = store(*strategy, &[1], 64 * KIB);
        put(&mut master, 0, "kept", KIB);
        let all = placement(&[], &[SegmentNo::new(1)]);
        assert_eq!(start(&mut master, "k", 64 * KIB, 1, all), Err(ErrorCode::SegmentsExcluded));
    }
}

#[test]
fn room_on_excluded_segments_does_not_prevent_eviction_elsewhere() {
    for strategy in AllocationStrategy::ALL {
        let mut master = store(*strategy, &[1, 2], 64 * KIB);
        // The next victims are on the excluded segment, which has room, too.
        let on = |master: &mut Master, key: String, placement| {
            let options = PutOptions { placement, ..PutOptions::DEFAULT };
            let started = master.put_start(at(0), key.as_bytes(), KIB, &options).unwrap();
            master.put_end(at(0), key.as_bytes(), started.generation, 1).unwrap();
            started.replicas[0].segment
        };
        for turn in 0..8 {
            assert_eq!(
                on(&mut master, format!("a{turn}"), Placement::on(SegmentNo::new(1))),
                SegmentNo::new(1)
            );
        }
        for turn in 0..64 {
            assert_eq!(
                on(&mut master, format!("b{turn}"), Placement::on(SegmentNo::new(2))),
                SegmentNo::new(2)
            );
        }
        let options = PutOptions { placement: placement(&[], &[SegmentNo::new(1)]), ..PutOptions::DEFAULT };
        for turn in 0..8 {
            // Up to four objects may be evicted per put.
            let started = master.put_start(at(1), format!("c{turn}").as_bytes(), KIB, &options);
            if let Ok(started) = started {
                assert_eq!(segments_of(&started), nos([2]));
            }
        }
        assert!(master.stats().puts_no_room_total <= 2, "{:?}", master.stats());
    }
}

#[test]
fn a_near_node_gets_every_replica_that_it_may_have() {
    for strategy in AllocationStrategy::ALL {
        let mut master = store(*strategy, &[1, 2, 7, 3, 7, 4], 64 * KIB);
        let near = Placement { near: Some(NodeId::new(7)), ..Placement::ANY };
        for turn in 0..16 {
            let mut placed = start(&mut master, &format!("a{turn}"), KIB, 3, near).unwrap();
            let rest = placed.split_off(2);
            assert!(
                placed == nos([3, 5]) && rest.iter().all(|no| !nos([3, 5]).contains(no)),
                "{placed:?} {rest:?}"
            );
        }
        let apart = Placement { distinct_nodes: true, ..near };
        for turn in 0..16 {
            let placed = start(&mut master, &format!("b{turn}"), KIB, 2, apart).unwrap();
            assert!(placed[0] == SegmentNo::new(3) && !nos([3, 5]).contains(&placed[1]), "{placed:?}");
        }
        let unknown = Placement { near: Some(NodeId::new(99)), ..Placement::ANY };
        assert_eq!(start(&mut master, "c", KIB, 6, unknown).unwrap().len(), 6);
    }
}

#[test]
fn replicas_share_a_node_only_if_they_must_and_never_if_that_is_forbidden() {
    for strategy in AllocationStrategy::ALL {
        let mut master = store(*strategy, &[1, 1, 1, 2], 64 * KIB);
        for turn in 0..16 {
            let placed = start(&mut master, &format!("a{turn}"), KIB, 2, Placement::ANY).unwrap();
            assert_eq!(placed.iter().filter(|no| **no == SegmentNo::new(4)).count(), 1, "{placed:?}");
        }
        assert_eq!(start(&mut master, "b", KIB, 3, Placement::ANY).unwrap().len(), 3);
        let apart = Placement { distinct_nodes: true, ..Placement::ANY };
        for turn in 0..16 {
            assert_eq!(start(&mut master, &format!("c{turn}"), KIB, 3, apart).unwrap().len(), 2);
        }
        let apart = Placement {
            distinct_nodes: true,
            ..placement(&[SegmentNo::new(1), SegmentNo::new(2), SegmentNo::new(3)], &[])
        };
        let placed = start(&mut master, "d", KIB, 4, apart).unwrap();
        assert_eq!(placed, nos([1, 4]), "a preference does not override it");
    }
}

/// Shares of the next 2,000 puts that go to a new segment: at the beginning, in the middle and after its slow
/// start. `fill`: the used share of the eight others when it is mounted.
fn newcomers_shares(strategy: AllocationStrategy, fill: f64) -> [f64; 3] {
    const LEN: u64 = 64 * KIB;
    const PER_NODE: u64 = 4_000;
    const PUTS: u64 = 2_000;
    let mut shares = [0.0; 3];
    for (share, age_ms) in shares.iter_mut().zip([0, SLOW_START_MS / 2, SLOW_START_MS]) {
        let mut master = store(strategy, &[1, 2, 3, 4, 5, 6, 7, 8], PER_NODE * LEN);
        for object in 0..(8.0 * PER_NODE as f64 * fill) as u64 {
            put(&mut master, 1, &format!("old {object}"), LEN);
        }
        let joined = 10_000_000;
        let newcomer = mount(&mut master, joined, 9, 1, "s9", PER_NODE * LEN);
        let landed = (0..PUTS)
            .filter(|object| put(&mut master, joined + age_ms, &format!("new {object}"), LEN) == newcomer)
            .count();
        *share = landed as f64 / PUTS as f64;
    }
    shares
}

// Mooncake issue 3688: the node that restarted empty got every write.
#[test]
fn a_newcomers_share_of_the_puts_is_bounded_and_grows() {
    for strategy in AllocationStrategy::ALL {
        // The others have room: in the end its share is one of nine, or the emptier of two drawn from nine.
        let [first, middle, last] = newcomers_shares(*strategy, 0.9);
        let drawn = match strategy {
            AllocationStrategy::Random => 1.0 / 9.0,
            _ => 2.0 / 9.0,
        };
        assert!(first > 0.0 && first < drawn / 8.0, "{strategy}: {first}");
        assert!(middle > drawn / 4.0 && middle < drawn * 0.75, "{strategy}: {middle}");
        assert!((last - drawn).abs() < drawn / 4.0, "{strategy}: {last}");
        // The others are full: without slow start it would get every put from the first on.
        let [first, middle, last] = newcomers_shares(*strategy, 1.0);
        assert!(first > 0.0 && first < 0.2, "{strategy}: {first}");
        assert!(middle > first * 2.0 && middle < 0.9, "{strategy}: {middle}");
        assert!(last > 0.95, "{strategy}: {last}");
    }
}

#[test]
fn a_node_that_restarts_empty_is_a_newcomer() {
    let mut master = store(AllocationStrategy::FreeRatioFirst, &[1, 2, 3], 1024 * KIB);
    for object in 0..2_900 {
        put(&mut master, 1, &format!("old {object}"), KIB);
    }
    let again = mount(&mut master, 10_000_000, 2, 2, "s2", 1024 * KIB);
    let landed = (0..100)
        .filter(|object| put(&mut master, 10_000_000, &format!("new {object}"), KIB) == again)
        .count();
    assert!(landed < 20, "{landed} of 100");
}

#[test]
fn a_newcomer_is_used_when_there_is_no_other_place() {
    let mut master = store(AllocationStrategy::FreeRatioFirst, &[1], 64 * KIB);
    assert_eq!(start(&mut master, "unfinished", 64 * KIB, 1, Placement::ANY), Ok(nos([1])));
    let newcomer = mount(&mut master, 10_000_000, 2, 1, "s2", 64 * KIB);
    for object in 0..64 {
        assert_eq!(put(&mut master, 10_000_000, &format!("{object}"), KIB), newcomer);
    }
    assert_eq!(master.stats().evictions_total, 0);
    // When only the new segment is long enough, hardly anything is evicted before.
    let mut master = store(AllocationStrategy::FreeRatioFirst, &[1, 2], 64 * KIB);
    for object in 0..128 {
        put(&mut master, 1, &format!("old {object}"), KIB);
    }
    mount(&mut master, 10_000_000, 3, 1, "s3", 1024 * KIB);
    let started = master.put_start(at(10_000_000), b"long", 512 * KIB, &PutOptions::DEFAULT).unwrap();
    assert_eq!(segments_of(&started), nos([3]));
    assert_eq!(master.stats().evictions_total, 0, "no other could hold it");
}

#[test]
fn segments_that_come_together_fill_evenly_from_the_first_put_on() {
    for strategy in AllocationStrategy::ALL {
        let mut master = store(*strategy, &[1, 2, 3, 4], 1024 * KIB);
        let mut counts = BTreeMap::new();
        for object in 0..2_000 {
            *counts.entry(put(&mut master, 0, &format!("{object}"), KIB)).or_insert(0) += 1;
        }
        assert!(counts.values().all(|count| (400..600).contains(count)), "{strategy}: {counts:?}");
    }
}

#[test]
fn a_full_store_finds_the_one_segment_with_room() {
    for strategy in AllocationStrategy::ALL {
        let nodes: Vec<u64> = (1..=200).collect();
        let mut master = store(*strategy, &nodes, KIB);
        let mut keys = BTreeMap::new();
        for object in 0..200 {
            let key = format!("{object}");
            keys.insert(start(&mut master, &key, KIB, 1, Placement::ANY).unwrap()[0], key);
        }
        assert_eq!(keys.len(), 200, "each object has a replica");
        assert_eq!(start(&mut master, "more", 64, 1, Placement::ANY), Err(ErrorCode::NoAvailableHandle));
        for no in [1, 77, 200, 128] {
            master
                .unmount(
                    at(0),
                    &UnmountSegment::new(no.into(), Incarnation::new(1), SegmentNo::new(no as u32)),
                )
                .unwrap();
            mount(&mut master, 0, no, 2, &format!("s{no}"), KIB);
            assert!(
                start(&mut master, &format!("again {no}"), KIB, 1, Placement::ANY).unwrap()[0]
                    > SegmentNo::new(200)
            );
            assert_eq!(start(&mut master, "more", 64, 1, Placement::ANY), Err(ErrorCode::NoAvailableHandle));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_is_wished_nothing_forbidden_happens_and_room_that_may_be_used_is_found(
        nodes in prop::collection::vec(1u64..6, 1..12),
        slab in any::<bool>(),
        random in any::<bool>(),
        puts in prop::collection::vec((
            1u64..20 * KIB,
            1u8..5,
            prop::collection::vec(1u32..14, 0..4),
            prop::collection::vec(1u32..14, 0..4),
            prop::option::of(1u64..8),
            any::<bool>(),
            any::<bool>(),
        ), 1..150),
    ) {
        let allocator = AllocatorKind::ALL[usize::from(slab)];
        let strategy = AllocationStrategy::ALL[usize::from(random)];
        let mut master = Master::new(MasterConfig { allocator, ..config(strategy) }).unwrap();
        for (index, node) in nodes.iter().enumerate() {
            // They are mounted one after the other, so that some are in their slow start.
            mount(&mut master, index as u64 * 10_000, *node, 1, &format!("s{}", index + 1), 200 * KIB);
        }
        let now = at(nodes.len() as u64 * 10_000);
        let mut started = Vec::new();
        for (index, (len, replicas, preferred, excluded, near, distinct_nodes, drop_one)) in puts.into_iter().enumerate() {
            let [preferred, excluded] = [preferred, excluded].map(|all| all.into_iter().map(no).collect::<Vec<_>>());
            let near = near.map(NodeId::new);
            let wish = Placement { near, distinct_nodes, ..placement(&preferred, &excluded) };
            let before: BTreeMap<SegmentNo, u64> =
                master.segments().map(|info| (info.segment, info.free_bytes_largest)).collect();
            let key = format!("{index}");
            let options = PutOptions { replicas, placement: wish, ..PutOptions::DEFAULT };
            let result = master.put_start(now, key.as_bytes(), len, &options);
            // Segments that may be used and certainly have room. Slots of slabs, which are shorter than 24
            // KiB here, serve objects of their own length only.
            let certain = (len + len / 16 + 64).max(if slab { 24 * KIB } else { 0 });
            let has_room = |no: &&SegmentNo| before[*no] >= certain && !excluded.contains(*no);
            let open: Vec<SegmentNo> = before.keys().filter(has_room).copied().collect();
            let node = |no: SegmentNo| nodes[no.get() as usize - 1];
            match result {
                Err(error) => {
                    prop_assert!(error.is_no_room(), "{}", error);
                    prop_assert!(open.is_empty(), "{} bytes would fit {:?}", len, open);
                }
                Ok(allocation) => {
                    let placed = segments_of(&allocation);
                    let mut distinct = placed.clone();
                    distinct.sort_unstable();
                    distinct.dedup();
                    prop_assert_eq!(distinct.len(), placed.len(), "two replicas on one segment");
                    prop_assert!(placed.iter().all(|no| !excluded.contains(no)));
                    let mut used: Vec<u64> = placed.iter().map(|no| node(*no)).collect();
                    used.sort_unstable();
                    used.dedup();
                    prop_assert!(!distinct_nodes || used.len() == placed.len(), "two replicas on one node");
                    let first = preferred.iter().find(|no| open.contains(no));
                    prop_assert!(first.is_none_or(|no| placed.contains(no) || distinct_nodes || placed.len() == usize::from(replicas)));
                    if placed.len() < usize::from(replicas) {
                        let more = open.iter().find(|no| {
                            !(placed.contains(no) || distinct_nodes && used.contains(&node(**no)))
                        });
                        prop_assert_eq!(more, None, "a further replica would fit");
                    }
                    started.push((key, allocation.generation));
                }
            }
            if drop_one && !started.is_empty() {
                let (key, generation) = started.swap_remove(index * 7 % started.len());
                prop_assert_eq!(master.put_revoke(now, key.as_bytes(), generation, WriterState::Quiet), Ok(()));
            }
        }
        for (key, generation) in started {
            prop_assert_eq!(master.put_revoke(now, key.as_bytes(), generation, WriterState::Quiet), Ok(()));
        }
        prop_assert_eq!(master.stats().used_bytes, 0);
        prop_assert!(master.segments().all(|info| info.free_bytes_largest == 200 * KIB && info.used == 0));
    }
}

#[test]
fn the_slab_allocator_serves_a_master_as_well_node_death_included() {
    let mut master = Master::new(MasterConfig {
        allocator: AllocatorKind::Slab,
        ..config(AllocationStrategy::FreeRatioFirst)
    })
    .unwrap();
    mount(&mut master, 0, 1, 1, "s1", 8192 * KIB);
    mount(&mut master, 0, 2, 1, "s2", 8192 * KIB);
    let options = PutOptions { replicas: 2, ..PutOptions::DEFAULT };
    let mut bytes = 0;
    for object in 0..3_000u64 {
        // Short objects share slabs, long ones are allocated directly.
        let (key, len) = (format!("{object}"), if object % 100 == 0 { 50 * KIB } else { 1 + object % 2_000 });
        let options = if object % 3 == 0 { options } else { PutOptions::DEFAULT };
        let started = master.put_start(at(0), key.as_bytes(), len, &options).unwrap();
        master.put_end(at(0), key.as_bytes(), started.generation, 1).unwrap();
        bytes += len * started.replicas.len() as u64;
    }
    assert!(master.stats().used_bytes >= bytes && master.stats().evictions_total == 0);
    master
        .unmount(at(1), &UnmountSegment::new(NodeId::new(1), Incarnation::new(1), SegmentNo::new(1)))
        .unwrap();
    for object in 0..3_000u64 {
        let key = format!("{object}");
        match master.get(at(1), key.as_bytes()) {
            Ok(found) => assert!(found.replicas.iter().all(|replica| replica.segment == SegmentNo::new(2))),
            Err(error) => assert!(error == ErrorCode::ObjectNotFound && object % 3 != 0, "{object}: {error}"),
        }
        let _ = master.remove(at(10_000), key.as_bytes(), RemoveMode::Force);
    }
    assert_eq!(master.stats().used_bytes, 0);
    assert_eq!(master.stats().free_bytes_largest, 8192 * KIB);
}
