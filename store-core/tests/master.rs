//! The master's rules, one by one.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use store_core::message::{
    Allocation, ExpulsionEnd, FetchRequest, Heartbeat, ListQuery, MountResponse, MountSegment, NodeInfo,
    NodeStatus, PutOptions, PutRequest, RemoveMode, UnmountSegment, WriterState,
};
use store_core::{
    ErrorCode, EvictionPolicy, Incarnation, Key, Master, MasterConfig, NodeId, Place, Placement, SegmentNo,
    TenantNo,
};
use te_core::Instant;

const KIB: u64 = 1024;
const ONE: PutOptions = PutOptions::DEFAULT;
const TWO: PutOptions = PutOptions { replicas: 2, ..PutOptions::DEFAULT };

fn at(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

fn config() -> MasterConfig {
    MasterConfig {
        lease_ttl_ms: 1_000,
        lease_guard_ms: 0,
        put_start_discard_timeout_ms: 3_000,
        put_start_release_timeout_ms: 60_000,
        node_ttl_ms: 1_000_000,
        eviction_high_watermark: 1.0,
        eviction_ratio: 0.0,
        eviction: EvictionPolicy::Lru,
        ..MasterConfig::default()
    }
}

fn segment(node: u64, incarnation: u64, name: &str, len: u64) -> MountSegment<'_> {
    MountSegment {
        node: NodeId::new(node),
        incarnation: Incarnation::new(incarnation),
        name,
        endpoint: "host:1",
        base: 0x1000,
        len,
        ..MountSegment::default()
    }
}

fn master_with(config: MasterConfig, segments: &[u64]) -> Master {
    let mut master = Master::new(config).unwrap();
    for (node, len) in segments.iter().enumerate() {
        master.mount(at(0), &segment(node as u64 + 1, 1, &format!("s{}", node + 1), *len)).unwrap();
    }
    master
}

fn master(segments: &[u64]) -> Master {
    master_with(config(), segments)
}

fn put(master: &mut Master, now: Instant, key: &str, len: u64) -> u64 {
    let generation = master.put_start(now, key.as_bytes(), len, &ONE).unwrap().generation;
    master.put_end(now, key.as_bytes(), generation, 7).unwrap();
    generation
}

/// Begins a put of a writer with an identity.
fn begin(master: &mut Master, now: Instant, key: &[u8], len: u64) -> Allocation {
    master
        .put_start_in(now, key, len, &PutRequest { writer: 7, ..PutRequest::once(ONE) }, Place::ALONE)
        .unwrap()
}

/// Every node carries out its orders to cut off writers; returns the number of writers.
fn cut_off(master: &mut Master, now: Instant) -> usize {
    let nodes: Vec<_> = master.nodes(now).collect();
    let mut count = 0;
    for NodeInfo { node, incarnation, .. } in nodes {
        let fetch = FetchRequest { node, incarnation, count_max: 10, key: 0 };
        for order in master.fetch_expulsions(now, &fetch).unwrap() {
            assert!(order.force && order.writer == 7, "{order:?}");
            master.end_expulsion(now, node, &ExpulsionEnd { ticket: order.ticket, gone: true }).unwrap();
            count += 1;
        }
    }
    count
}

#[test]
fn an_object_is_readable_exactly_from_put_end_on() {
    let mut master = master(&[64 * KIB]);
    let started = master.put_start(at(1), b"k", 5 * KIB, &ONE).unwrap();
    assert_eq!(started.replicas.len(), 1);
    assert!(started.replicas[0].addr >= 0x1000);
    assert!(!master.exists(b"k"));
    assert_eq!(master.get(at(2), b"k"), Err(ErrorCode::ReplicaIsNotReady));
    assert_eq!(master.put_end(at(2), b"k", started.generation + 1, 9), Err(ErrorCode::PutIsOver));
    master.put_end(at(3), b"k", started.generation, 9).unwrap();
    let object = master.get(at(4), b"k").unwrap();
    assert_eq!((object.len, object.checksum, object.generation), (5 * KIB, 9, started.generation));
    assert_eq!(object.replicas, started.replicas);
    assert_eq!(master.put_end(at(5), b"k", started.generation, 9), Ok(()), "a repeated commit has no effect");
    assert_eq!(master.put_end(at(5), b"k", started.generation, 8), Err(ErrorCode::InvalidWrite));
    assert_eq!(
        master.put_revoke(at(5), b"k", started.generation, WriterState::Quiet),
        Err(ErrorCode::InvalidWrite)
    );
    assert_eq!(master.put_start(at(6), b"k", KIB, &ONE), Err(ErrorCode::ObjectAlreadyExists));
}

#[test]
fn senseless_puts_are_refused() {
    let mut master = master(&[64 * KIB]);
    let none = PutOptions { replicas: 0, ..PutOptions::DEFAULT };
    assert_eq!(master.put_start(at(0), b"", 1, &ONE), Err(ErrorCode::InvalidKey));
    assert_eq!(master.put_start(at(0), &[b'k'; 1025], 1, &ONE), Err(ErrorCode::InvalidKey));
    assert_eq!(master.put_start(at(0), b"k", 0, &ONE), Err(ErrorCode::InvalidParams));
    assert_eq!(master.put_start(at(0), b"k", 1, &none), Err(ErrorCode::InvalidParams));
    assert_eq!(master.put_start(at(0), b"k", 65 * KIB, &ONE), Err(ErrorCode::ObjectTooLarge));
    assert_eq!(master.put_start(at(0), b"k", u64::MAX, &ONE), Err(ErrorCode::ObjectTooLarge));
    assert_eq!(master.stats().used_bytes, 0);
}

#[test]
fn replicas_lie_on_distinct_segments_and_best_effort_is_enough() {
    let mut master = master(&[64 * KIB, 64 * KIB]);
    for turn in 0..8 {
        let started = master.put_start(at(0), format!("k{turn}").as_bytes(), KIB, &TWO).unwrap();
        assert_eq!(started.replicas.len(), 2);
        assert_ne!(started.replicas[0].segment, started.replicas[1].segment);
    }
    let eight = PutOptions { replicas: 8, ..PutOptions::DEFAULT };
    assert_eq!(master.put_start(at(0), b"many", KIB, &eight).unwrap().replicas.len(), 2);
    assert_eq!(master.stats().puts_partial_total, 1);
}

#[test]
fn replicas_prefer_another_node_over_another_segment_of_the_same() {
    let mut master = Master::new(config()).unwrap();
    master.mount(at(0), &segment(1, 1, "a", 64 * KIB)).unwrap();
    master.mount(at(0), &segment(1, 1, "b", 64 * KIB)).unwrap();
    let other = master.mount(at(0), &segment(2, 1, "c", 64 * KIB)).unwrap().mounted().unwrap().segment;
    for turn in 0..16 {
        let started = master.put_start(at(0), format!("k{turn}").as_bytes(), KIB, &TWO).unwrap();
        assert!(started.replicas.iter().any(|replica| replica.segment == other), "{started:?}");
    }
}

#[test]
fn a_preferred_segment_is_taken_while_it_has_room() {
    let mut master = master(&[64 * KIB, 64 * KIB, 64 * KIB]);
    let options =
        PutOptions { replicas: 1, placement: Placement::on(SegmentNo::new(2)), ..PutOptions::DEFAULT };
    for turn in 0..5 {
        let started = master.put_start(at(0), format!("k{turn}").as_bytes(), 16 * KIB, &options).unwrap();
        assert_eq!(started.replicas[0].segment == SegmentNo::new(2), turn < 4);
    }
}

#[test]
fn a_dead_writers_key_is_free_after_the_discard_timeout_and_its_space_after_the_release_timeout() {
    let mut master = master(&[64 * KIB]);
    let lost = begin(&mut master, at(0), b"k", 16 * KIB);
    assert_eq!(master.put_start(at(2_999), b"k", 16 * KIB, &ONE), Err(ErrorCode::ObjectAlreadyExists));
    let fresh = begin(&mut master, at(3_000), b"k", 16 * KIB);
    assert_ne!(fresh.replicas, lost.replicas, "the lost writer may still write there");
    assert_eq!(master.stats().quarantined_bytes, 16 * KIB);
    assert_eq!(master.put_end(at(3_001), b"k", fresh.generation, 1), Ok(()));
    assert_eq!(master.poll_timeout(), Some(at(60_000)));
    master.handle_timeout(at(59_999));
    assert_eq!(master.stats().used_bytes, 32 * KIB);
    master.handle_timeout(at(60_000));
    assert_eq!(master.stats().used_bytes, 32 * KIB, "time alone releases nothing");
    assert_eq!(cut_off(&mut master, at(60_001)), 1);
    assert_eq!((master.stats().used_bytes, master.stats().quarantined_bytes), (16 * KIB, 0));
}

#[test]
fn a_displaced_writer_that_is_quiet_gives_its_space_back_at_once() {
    for vouch in ["commit", "revoke"] {
        let mut master = master(&[64 * KIB]);
        let lost = master.put_start(at(0), b"k", 16 * KIB, &ONE).unwrap();
        master.put_start(at(3_000), b"k", 16 * KIB, &ONE).unwrap();
        if vouch == "commit" {
            assert_eq!(master.put_end(at(3_001), b"k", lost.generation, 1), Err(ErrorCode::PutIsOver));
        } else {
            assert_eq!(master.put_revoke(at(3_001), b"k", lost.generation, WriterState::MayWrite), Ok(()));
            assert_eq!(master.stats().quarantined_bytes, 16 * KIB, "not quiet yet");
            assert_eq!(master.put_revoke(at(3_002), b"k", lost.generation, WriterState::Quiet), Ok(()));
        }
        assert_eq!((master.stats().used_bytes, master.stats().quarantined_bytes), (16 * KIB, 0));
    }
}

#[test]
fn a_revoke_that_is_not_quiet_holds_the_space_back_from_then_on() {
    let mut master = master(&[16 * KIB]);
    let put = begin(&mut master, at(0), b"k", 16 * KIB);
    master.put_revoke(at(1_000), b"k", put.generation, WriterState::MayWrite).unwrap();
    assert_eq!(master.put_start(at(2_000), b"k", KIB, &ONE), Err(ErrorCode::NoAvailableHandle));
    master.handle_timeout(at(60_999));
    assert_eq!(master.stats().used_bytes, 16 * KIB);
    master.handle_timeout(at(61_000));
    assert_eq!(cut_off(&mut master, at(61_000)), 1);
    assert_eq!(master.stats().used_bytes, 0);
    assert!(master.put_start(at(61_000), b"k", KIB, &ONE).is_ok());
}

#[test]
fn revoking_again_and_again_puts_the_release_off_and_costs_no_memory() {
    let mut master = master(&[8 * KIB]);
    let started = begin(&mut master, at(0), b"k", 8 * KIB);
    master.put_revoke(at(0), b"k", started.generation, WriterState::MayWrite).unwrap();
    let memory = master.memory_bytes();
    for now in 1..=10_000 {
        master.put_revoke(at(now), b"k", started.generation, WriterState::MayWrite).unwrap();
    }
    assert_eq!(master.memory_bytes(), memory);
    master.handle_timeout(at(69_999));
    assert_eq!(
        master.stats().quarantined_bytes,
        8 * KIB,
        "pending release for the release timeout from the last report on"
    );
    assert_eq!(master.poll_timeout(), Some(at(70_000)));
    master.handle_timeout(at(70_000));
    assert_eq!(cut_off(&mut master, at(70_000)), 1);
    assert_eq!(master.stats().quarantined_bytes, 0);
    assert_eq!(master.stats().used_bytes, 0);
}

#[test]
fn a_lost_put_that_is_not_displaced_ends_at_the_release_timeout() {
    let mut master = master(&[64 * KIB]);
    let lost = begin(&mut master, at(0), b"k", KIB);
    assert_eq!(master.poll_timeout(), Some(at(60_000)));
    master.handle_timeout(at(60_000));
    assert_eq!((master.stats().objects_processing, master.stats().quarantined_bytes), (0, KIB));
    assert_eq!(cut_off(&mut master, at(60_000)), 1);
    assert_eq!((master.stats().objects_processing, master.stats().used_bytes), (0, 0));
    assert_eq!(master.put_end(at(60_001), b"k", lost.generation, 1), Err(ErrorCode::PutIsOver));
}

#[test]
fn a_leased_object_is_removed_by_force_only_and_its_space_waits_for_the_lease() {
    let mut master = master(&[64 * KIB]);
    put(&mut master, at(0), "k", 64 * KIB);
    master.get(at(100), b"k").unwrap();
    assert_eq!(master.remove(at(1_099), b"k", RemoveMode::IfUnused), Err(ErrorCode::ObjectHasLease));
    assert_eq!(master.remove(at(500), b"k", RemoveMode::Force), Ok(()));
    assert!(!master.exists(b"k"));
    assert_eq!(master.stats().deferred_bytes, 64 * KIB);
    assert_eq!(master.put_start(at(600), b"k", KIB, &ONE), Err(ErrorCode::NoAvailableHandle));
    assert_eq!(master.poll_timeout().unwrap(), at(1_100));
    master.handle_timeout(at(1_100));
    assert_eq!((master.stats().used_bytes, master.stats().deferred_bytes), (0, 0));
    put(&mut master, at(1_200), "k", KIB);
    assert_eq!(
        master.remove(at(1_201), b"k", RemoveMode::IfUnused),
        Ok(()),
        "a lease that is over does not count"
    );
    assert_eq!(master.remove(at(1_202), b"k", RemoveMode::IfUnused), Err(ErrorCode::KeyNotFound));
}

#[test]
fn removing_what_is_being_written_needs_force_and_holds_the_space_back() {
    let mut master = master(&[64 * KIB]);
    master.put_start(at(0), b"k", KIB, &ONE).unwrap();
    assert_eq!(master.remove(at(1), b"k", RemoveMode::IfUnused), Err(ErrorCode::ReplicaIsNotReady));
    assert_eq!(master.remove(at(1), b"k", RemoveMode::Force), Ok(()));
    assert_eq!(master.stats().quarantined_bytes, KIB);
}

#[test]
fn eviction_takes_the_least_recently_read_and_spares_the_leased_and_the_unfinished() {
    let mut master = master(&[4 * KIB]);
    for key in ["a", "b", "c"] {
        put(&mut master, at(0), key, KIB);
    }
    master.put_start(at(0), b"unfinished", KIB, &ONE).unwrap();
    master.get(at(10), b"a").unwrap();
    assert!(master.exists(b"b"), "exists does not count as a use");
    put(&mut master, at(20), "d", KIB);
    assert!(!master.exists(b"b") && master.exists(b"a") && master.exists(b"c"));
    put(&mut master, at(30), "e", KIB);
    assert!(!master.exists(b"c"));
    master.get(at(40), b"d").unwrap();
    master.get(at(40), b"e").unwrap();
    assert_eq!(master.put_start(at(50), b"f", KIB, &ONE), Err(ErrorCode::NoAvailableHandle), "all leased");
    assert_eq!(master.stats().evictions_starved_total, 1);
    // The lease of "a" is the first one to end.
    put(&mut master, at(1_010), "f", KIB);
    assert!(!master.exists(b"a") && master.exists(b"d") && master.exists(b"e"));
}

#[test]
fn the_watermark_starts_eviction_and_the_timeout_carries_it_through() {
    let config = MasterConfig { eviction_high_watermark: 0.5, eviction_ratio: 0.25, ..config() };
    let mut master = master_with(config, &[100 * KIB]);
    for key in 0..51 {
        put(&mut master, at(0), &format!("{key:02}"), KIB);
    }
    assert_eq!(master.stats().evictions_total, 0);
    assert_eq!(master.poll_timeout(), Some(Instant::ZERO), "at once");
    master.handle_timeout(at(1));
    assert_eq!(master.stats().used_bytes, 25 * KIB);
    assert!(!master.exists(b"25") && master.exists(b"26"));
}

#[test]
fn an_object_that_does_not_fit_does_not_cost_the_whole_cache() {
    let config = MasterConfig { eviction_high_watermark: 1.0, eviction_ratio: 0.05, ..config() };
    let mut master = master_with(config, &[1024 * KIB]);
    // Every other block is being written, so that no hole is longer than one block.
    for key in 0..512 {
        put(&mut master, at(0), &format!("k{key}"), KIB);
        master.put_start(at(0), format!("w{key}").as_bytes(), KIB, &ONE).unwrap();
    }
    assert_eq!(master.put_start(at(1), b"big", 2 * KIB, &ONE), Err(ErrorCode::NoAvailableHandle));
    assert_eq!(master.stats().evictions_total, 0, "nothing is evicted without need");
}

#[test]
fn what_is_read_all_the_time_does_not_keep_others_from_being_evicted() {
    let mut master = master(&[4 * KIB]);
    for key in ["hot", "a", "b", "c"] {
        put(&mut master, at(0), key, KIB);
    }
    for ms in (0..10_000).step_by(100) {
        master.get(at(ms), b"hot").unwrap();
        if ms == 0 {
            for key in ["a", "b", "c"] {
                master.get(at(0), key.as_bytes()).unwrap();
            }
        }
    }
    for key in ["x", "y", "z"] {
        put(&mut master, at(9_950), key, KIB);
    }
    assert!(master.exists(b"hot"));
}

#[test]
fn a_silent_node_is_given_up_with_everything_that_was_only_there() {
    let mut master = master_with(MasterConfig { node_ttl_ms: 10_000, ..config() }, &[64 * KIB, 64 * KIB]);
    let only = |segment| PutOptions { replicas: 1, placement: Placement::on(segment), ..PutOptions::DEFAULT };
    for (key, options) in [("one", only(SegmentNo::new(1))), ("two", only(SegmentNo::new(2))), ("both", TWO)]
    {
        let put = master.put_start(at(0), key.as_bytes(), KIB, &options).unwrap();
        master.put_end(at(0), key.as_bytes(), put.generation, 1).unwrap();
    }
    let unfinished = master.put_start(at(0), b"unfinished", KIB, &only(SegmentNo::new(1))).unwrap();
    assert_eq!(master.poll_timeout(), Some(at(10_000)));
    assert_eq!(
        master.heartbeat(
            at(9_000),
            &Heartbeat { node: NodeId::new(2), incarnation: Incarnation::new(1), key: 0 }
        ),
        Ok(NodeStatus::Ok)
    );
    master.handle_timeout(at(10_000));
    assert!(!master.exists(b"one") && master.exists(b"two") && master.exists(b"both"));
    let left = master.get(at(10_001), b"both").unwrap().replicas;
    assert_eq!((left.len(), left[0].segment), (1, SegmentNo::new(2)));
    assert_eq!(
        master.put_end(at(10_001), b"unfinished", unfinished.generation, 1),
        Err(ErrorCode::PutIsOver)
    );
    assert_eq!(master.stats().used_bytes, 2 * KIB);
    assert_eq!(master.stats().objects_lost_total, 1);
    assert_eq!(
        master.heartbeat(
            at(10_002),
            &Heartbeat { node: NodeId::new(1), incarnation: Incarnation::new(1), key: 0 }
        ),
        Ok(NodeStatus::NeedRemount)
    );
    // The old export may still be written through: only a new incarnation may be mounted, under a new number.
    assert_eq!(
        master.mount(at(10_003), &segment(1, 1, "s1", 64 * KIB)),
        Ok(MountResponse::Stale { incarnation_min: Incarnation::new(2) })
    );
    assert_eq!(
        master.mount(at(10_004), &segment(1, 2, "s1", 64 * KIB)).unwrap().mounted().unwrap().segment,
        SegmentNo::new(3)
    );
    assert_eq!(
        master.heartbeat(
            at(10_005),
            &Heartbeat { node: NodeId::new(1), incarnation: Incarnation::new(2), key: 0 }
        ),
        Ok(NodeStatus::Ok)
    );
    assert_eq!(master.poll_timeout(), Some(at(19_000)));
}

#[test]
fn a_restarted_node_replaces_its_old_self_and_a_late_word_of_the_old_one_does_nothing() {
    let mut master = master(&[64 * KIB]);
    put(&mut master, at(0), "k", KIB);
    assert_eq!(
        master.mount(at(1), &segment(1, 1, "s1", 64 * KIB)).unwrap().mounted().unwrap().segment,
        SegmentNo::new(1),
        "repeated"
    );
    assert_eq!(
        master.mount(at(1), &segment(9, 1, "s1", 64 * KIB)),
        Ok(MountResponse::Held { endpoint: "host:1", silent_ms: 0 })
    );
    assert_eq!(
        master.mount(at(2), &segment(1, 2, "s1", 32 * KIB)).unwrap().mounted().unwrap().segment,
        SegmentNo::new(2)
    );
    assert!(!master.exists(b"k"));
    assert_eq!(
        master.mount(at(3), &segment(1, 1, "s1", 64 * KIB)),
        Ok(MountResponse::Stale { incarnation_min: Incarnation::new(3) })
    );
    assert_eq!(
        master
            .heartbeat(at(3), &Heartbeat { node: NodeId::new(1), incarnation: Incarnation::new(1), key: 0 }),
        Ok(NodeStatus::NeedRemount)
    );
    assert_eq!(
        master
            .heartbeat(at(3), &Heartbeat { node: NodeId::new(1), incarnation: Incarnation::new(2), key: 0 }),
        Ok(NodeStatus::Ok)
    );
    assert_eq!(
        master
            .heartbeat(at(4), &Heartbeat { node: NodeId::new(1), incarnation: Incarnation::new(3), key: 0 }),
        Ok(NodeStatus::NeedRemount)
    );
    assert_eq!(
        (master.stats().segments, master.stats().capacity_bytes),
        (1, 32 * KIB),
        "a heartbeat drops nothing"
    );
}

#[test]
fn memory_that_was_exported_under_another_life_of_the_master_is_not_mounted() {
    let mut master = master_with(MasterConfig { epoch: 8, ..config() }, &[]);
    let old = MountSegment { lineage: 7, ..segment(1, 1, "s", KIB) };
    assert_eq!(master.mount(at(0), &old), Err(ErrorCode::IllegalClient));
    master.mount(at(0), &MountSegment { lineage: 8, ..old }).unwrap();
}

#[test]
fn unmounting_drops_lost_puts_and_leased_space() {
    let mut master = master(&[64 * KIB]);
    let revoked = master.put_start(at(0), b"z", KIB, &ONE).unwrap();
    master.put_revoke(at(0), b"z", revoked.generation, WriterState::MayWrite).unwrap();
    put(&mut master, at(0), "l", KIB);
    master.get(at(0), b"l").unwrap();
    master.remove(at(0), b"l", RemoveMode::Force).unwrap();
    let theirs = UnmountSegment::new(NodeId::new(1), Incarnation::new(1), SegmentNo::new(1));
    for not in [
        UnmountSegment { node: NodeId::new(2), ..theirs },
        UnmountSegment { incarnation: Incarnation::new(2), ..theirs },
        UnmountSegment { key: 1, ..theirs },
    ] {
        assert_eq!(master.unmount(at(1), &not), Err(ErrorCode::IllegalClient));
    }
    assert_eq!(master.unmount(at(1), &theirs), Ok(()));
    assert_eq!(master.unmount(at(1), &theirs), Err(ErrorCode::SegmentNotFound));
    let stats = master.stats();
    assert_eq!((stats.used_bytes, stats.quarantined_bytes, stats.deferred_bytes), (0, 0, 0));
    master.handle_timeout(at(100_000));
    assert_eq!(
        master.put_revoke(at(100_000), b"z", revoked.generation, WriterState::Quiet),
        Err(ErrorCode::PutIsOver)
    );
}

#[test]
fn a_listing_in_pages_sees_every_key_once() {
    let mut master = master(&[1024 * KIB]);
    for key in 0..500 {
        put(&mut master, at(0), &format!("{}/{key}", if key % 2 == 0 { "even" } else { "odd" }), 64);
    }
    for key in (0..500).step_by(4) {
        master.remove(at(0), format!("even/{key}").as_bytes(), RemoveMode::IfUnused).unwrap();
    }
    let mut seen = std::collections::BTreeSet::new();
    let mut cursor = 0;
    loop {
        let query = ListQuery { prefix: Key(b"even/"), cursor, limit: 7 };
        cursor =
            master.list_of(at(0), TenantNo::new(0), &query, |listed| seen.insert(listed.key.to_string()));
        if cursor == 0 {
            break;
        }
    }
    assert_eq!(seen.len(), 125);
    assert!(seen.iter().all(|key| key.starts_with("even/")));
}

#[test]
fn segments_of_absurd_length_are_refused_and_the_store_stays_as_it_was() {
    let mut master = master_with(MasterConfig { eviction_high_watermark: 0.95, ..config() }, &[64 * KIB]);
    put(&mut master, at(0), "k", KIB);
    let mount = |master: &mut Master, name, len| {
        master.mount(at(1), &MountSegment { base: 0, ..segment(9, 1, name, len) }).map(drop)
    };
    assert_eq!(mount(&mut master, "a", u64::MAX), Err(ErrorCode::InvalidParams));
    assert_eq!(mount(&mut master, "b", u64::MAX - 4096), Err(ErrorCode::InvalidParams));
    assert_eq!(mount(&mut master, "c", (64 << 40) + 1), Err(ErrorCode::InvalidParams));
    assert_eq!(master.stats().capacity_bytes, 64 * KIB);
    mount(&mut master, "d", 64 << 40).unwrap();
    assert_eq!(master.stats().capacity_bytes, 64 * KIB + (64 << 40));
    master.handle_timeout(at(10));
    assert!(master.exists(b"k"));

    let config = MasterConfig { segment_bytes_max: u64::MAX, ..config() };
    assert_eq!(Master::new(config).unwrap_err().setting, "segment_bytes_max");
}

#[test]
fn limits_hold() {
    let config = MasterConfig { objects_max: 2, segments_max: 2, nodes_max: 2, ..config() };
    let mut master = master_with(config, &[64 * KIB, 64 * KIB]);
    assert_eq!(master.mount(at(0), &segment(3, 1, "s3", KIB)), Err(ErrorCode::TooManySegments));
    assert_eq!(master.mount(at(0), &segment(3, 1, "", KIB)), Err(ErrorCode::InvalidParams));
    assert_eq!(master.mount(at(0), &segment(3, 1, "s4", 1)), Err(ErrorCode::InvalidParams));
    master.put_start(at(0), b"a", KIB, &ONE).unwrap();
    master.put_start(at(0), b"b", KIB, &ONE).unwrap();
    assert_eq!(master.put_start(at(0), b"c", KIB, &ONE), Err(ErrorCode::KeysUltraLimit));
    let wrong = MasterConfig { put_start_release_timeout_ms: 10, ..MasterConfig::default() };
    let error = Master::new(wrong).unwrap_err();
    assert_eq!(error.setting, "put_start_release_timeout_ms");
}

#[test]
fn space_is_even_over_nodes_and_a_fresh_node_does_not_draw_every_write() {
    let mut master = master_with(config(), &[1 << 20; 8]);
    for key in 0..4_000 {
        put(&mut master, at(0), &format!("k{key}"), KIB);
    }
    let used: Vec<u64> = master.segments().map(|segment| segment.used).collect();
    assert!(used.iter().all(|used| (400 * KIB..600 * KIB).contains(used)), "{used:?}");
    master.mount(at(1) + Duration::from_millis(1), &segment(9, 1, "fresh", 1 << 20)).unwrap();
    for key in 4_000..4_400 {
        put(&mut master, at(2), &format!("k{key}"), KIB);
    }
    let fresh = master.segment(SegmentNo::new(9)).unwrap().used / KIB;
    assert!((40..=160).contains(&fresh), "{fresh} of 400 went to the fresh node");
}
