//! Upserts: puts that replace. What is served while one is in progress, and what becomes of the space.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;

use proptest::prelude::*;
use store_core::message::{
    Existing, ExpulsionEnd, FetchRequest, Inherit, InheritPin, Kept, ListQuery, MountSegment, Pin,
    PutOptions, PutRequest, RemoveMode, RemoveQuery, Retention, WriterState,
};
use store_core::{
    AllocatorKind, ErrorCode, EvictionPolicy, Incarnation, Key, Master, MasterConfig, NodeId, Place,
    SegmentNo, TenantNo,
};
use te_core::Instant;

const GRAIN: u64 = 64;
const PUT: PutOptions = PutOptions::DEFAULT;
const UPSERT: PutOptions = PutOptions { existing: Existing::REPLACE, ..PutOptions::DEFAULT };
const ALL: ListQuery<'_> = ListQuery { prefix: Key(b""), cursor: 0, limit: 512 };

fn at(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

fn config() -> MasterConfig {
    MasterConfig {
        lease_ttl_ms: 1_000,
        lease_guard_ms: 0,
        soft_pin_ttl_ms: 10_000,
        put_start_discard_timeout_ms: 3_000,
        put_start_release_timeout_ms: 60_000,
        node_ttl_ms: 86_400_000,
        eviction_high_watermark: 1.0,
        eviction_ratio: 0.0,
        hard_pin_share_max: 1.0,
        eviction: EvictionPolicy::Lru,
        ..MasterConfig::default()
    }
}

/// Segments of so many grains.
fn master_with(config: MasterConfig, segments: &[u64]) -> Master {
    let mut master = Master::new(config).unwrap();
    for (node, grains) in segments.iter().enumerate() {
        let segment = MountSegment {
            node: NodeId::new(node as u64 + 1),
            incarnation: Incarnation::new(1),
            name: ["a", "b", "c"][node],
            endpoint: "host:1",
            len: grains * GRAIN,
            ..MountSegment::default()
        };
        master.mount(at(0), &segment).unwrap();
    }
    master
}

fn master(grains: u64) -> Master {
    master_with(config(), &[grains])
}

/// Begins a put of a writer with an identity; returns its generation.
fn begin(master: &mut Master, ms: u64, key: &str, options: PutOptions, nonce: u32) -> Result<u64, ErrorCode> {
    let request = PutRequest { nonce, options, writer: 7 };
    let put = master.put_start_in(at(ms), key.as_bytes(), GRAIN, &request, Place::ALONE)?;
    Ok(put.generation)
}

fn store(master: &mut Master, ms: u64, key: &str, options: &PutOptions) -> u64 {
    let put = master.put_start(at(ms), key.as_bytes(), GRAIN, options).unwrap();
    master.put_end(at(ms), key.as_bytes(), put.generation, 0).unwrap();
    put.generation
}

fn served(master: &mut Master, ms: u64, key: &str) -> Result<u64, ErrorCode> {
    master.get(at(ms), key.as_bytes()).map(|object| object.generation)
}

fn retained(retention: Retention) -> PutOptions {
    PutOptions { retention, ..PUT }
}

fn pinned(pin: Pin) -> PutOptions {
    retained(Retention { pin, ..Retention::DEFAULT })
}

fn inheriting(pin: InheritPin, group: bool, retention: Retention) -> PutOptions {
    PutOptions { retention, existing: Existing::Replace(Inherit { pin, group }), ..PUT }
}

#[test]
fn the_old_object_is_served_until_the_new_one_is_committed() {
    let mut master = master(8);
    let old = store(&mut master, 1, "k", &PUT);
    let new = begin(&mut master, 2, "k", UPSERT, 0).unwrap();
    assert_eq!((served(&mut master, 3, "k"), master.exists(b"k")), (Ok(old), true));
    let stats = master.stats();
    assert_eq!((stats.objects, stats.objects_processing, stats.upserts_unfinished), (1, 1, 1));
    let mut listed = Vec::new();
    master.list_of(at(3), TenantNo::DEFAULT, &ALL, |object| {
        listed.push((object.key.0.to_vec(), object.complete));
        true
    });
    assert_eq!(listed, [(b"k".to_vec(), true)], "the unfinished upsert is not listed beside it");
    assert_eq!(master.find_replicas(b"k").unwrap().len(), 1);
    assert_eq!(master.unfinished_upserts(at(3), TenantNo::DEFAULT).count(), 1);
    master.put_end(at(4), b"k", new, 5).unwrap();
    let object = master.get(at(5), b"k").unwrap();
    assert_eq!((object.generation, object.checksum), (new, 5));
    assert_eq!(master.put_end(at(6), b"k", new, 5), Ok(()), "a repeated commit has no effect");
    assert_eq!(
        master.put_end(at(6), b"k", old, 0),
        Err(ErrorCode::PutIsOver),
        "one of the old object neither"
    );
    let stats = master.stats();
    assert_eq!((stats.upserts_total, stats.objects_replaced_total, stats.upserts_unfinished), (1, 1, 0));
}

#[test]
fn an_upsert_of_a_key_without_an_object_stores_it() {
    let mut master = master(8);
    let new = begin(&mut master, 1, "k", UPSERT, 0).unwrap();
    assert_eq!(
        served(&mut master, 2, "k"),
        Err(ErrorCode::ObjectNotFound),
        "nothing is there before its end"
    );
    assert!(!master.exists(b"k"));
    assert_eq!(master.remove(at(2), b"k", RemoveMode::Force), Err(ErrorCode::KeyNotFound));
    master.put_end(at(3), b"k", new, 5).unwrap();
    assert_eq!(served(&mut master, 4, "k"), Ok(new));
    assert_eq!((master.stats().upserts_total, master.stats().objects_replaced_total), (1, 0));
}

#[test]
fn a_revoked_or_abandoned_upsert_leaves_the_old_object() {
    let mut master = master(8);
    let old = store(&mut master, 1, "k", &PUT);
    let new = begin(&mut master, 2, "k", UPSERT, 0).unwrap();
    master.put_revoke(at(3), b"k", new, WriterState::Quiet).unwrap();
    assert_eq!((served(&mut master, 4, "k"), master.stats().used_bytes), (Ok(old), GRAIN));
    assert_eq!(master.put_end(at(5), b"k", new, 5), Err(ErrorCode::PutIsOver));
    assert_eq!(served(&mut master, 6, "k"), Ok(old));

    // A writer that may still write: its space is held, and the old object is unharmed.
    let second = begin(&mut master, 10, "k", UPSERT, 0).unwrap();
    master.put_revoke(at(11), b"k", second, WriterState::MayWrite).unwrap();
    assert_eq!((served(&mut master, 12, "k"), master.stats().quarantined_bytes), (Ok(old), GRAIN));
    assert_eq!(master.put_revoke(at(13), b"k", second, WriterState::Quiet), Ok(()), "it is quiet now");
    assert_eq!(master.stats().used_bytes, GRAIN);

    // A writer that is never heard of again.
    begin(&mut master, 20, "k", UPSERT, 0).unwrap();
    master.handle_timeout(at(20 + 60_000));
    let stats = master.stats();
    assert_eq!(
        (stats.puts_abandoned_total, stats.upserts_unfinished, stats.quarantined_bytes),
        (1, 0, GRAIN)
    );
    assert_eq!(served(&mut master, 60_100, "k"), Ok(old));
    // The node is told to cut the writer off, and confirms.
    master.handle_timeout(at(200_000));
    let fetch = FetchRequest { node: NodeId::new(1), incarnation: Incarnation::new(1), count_max: 8, key: 0 };
    let orders = master.fetch_expulsions(at(200_000), &fetch).unwrap();
    assert_eq!(orders.len(), 1);
    let end = ExpulsionEnd { ticket: orders[0].ticket, gone: true };
    master.end_expulsion(at(200_001), NodeId::new(1), &end).unwrap();
    assert_eq!(master.stats().used_bytes, GRAIN);
}

#[test]
fn an_upsert_whose_writer_is_cut_off_is_over_and_the_old_object_is_not() {
    let mut master = master(8);
    let old = store(&mut master, 1, "k", &PUT);
    // Another put of the same writer takes too long.
    let other = begin(&mut master, 2, "other", PUT, 0).unwrap();
    master.put_revoke(at(3), b"other", other, WriterState::MayWrite).unwrap();
    let new = begin(&mut master, 50_000, "k", UPSERT, 0).unwrap();
    master.handle_timeout(at(3 + 60_000));
    let fetch = FetchRequest { node: NodeId::new(1), incarnation: Incarnation::new(1), count_max: 8, key: 0 };
    let orders = master.fetch_expulsions(at(60_010), &fetch).unwrap();
    let end = ExpulsionEnd { ticket: orders[0].ticket, gone: true };
    master.end_expulsion(at(60_010), NodeId::new(1), &end).unwrap();
    assert_eq!(master.put_end(at(60_011), b"k", new, 5), Err(ErrorCode::PutIsOver));
    assert_eq!((served(&mut master, 60_012, "k"), master.stats().used_bytes), (Ok(old), GRAIN));
}

#[test]
fn the_last_commit_of_several_upserts_remains() {
    let mut master = master(8);
    let old = store(&mut master, 1, "k", &PUT);
    let first = begin(&mut master, 2, "k", UPSERT, 0).unwrap();
    let second = begin(&mut master, 3, "k", UPSERT, 0).unwrap();
    let third = begin(&mut master, 4, "k", UPSERT, 0).unwrap();
    assert_eq!((served(&mut master, 5, "k"), master.stats().used_bytes), (Ok(old), 4 * GRAIN));
    for (ms, generation) in [(10, second), (2_010, first)] {
        master.put_end(at(ms), b"k", generation, 5).unwrap();
        assert_eq!(served(&mut master, ms + 1, "k"), Ok(generation));
        // The leases on what was served before end.
        master.handle_timeout(at(ms + 1_500));
    }
    master.put_revoke(at(5_000), b"k", third, WriterState::Quiet).unwrap();
    assert_eq!((served(&mut master, 5_001, "k"), master.stats().used_bytes), (Ok(first), GRAIN));
    assert_eq!(master.put_end(at(5_002), b"k", second, 5), Err(ErrorCode::PutIsOver), "it was replaced");
}

#[test]
fn a_put_and_an_upsert_do_not_hinder_each_other_until_one_is_committed() {
    let mut master = master(8);
    let upsert = begin(&mut master, 1, "k", UPSERT, 0).unwrap();
    let put = begin(&mut master, 2, "k", PUT, 0).unwrap();
    assert_eq!(begin(&mut master, 2, "k", PUT, 0), Err(ErrorCode::ObjectAlreadyExists));
    assert_eq!(served(&mut master, 3, "k"), Err(ErrorCode::ReplicaIsNotReady));
    master.put_end(at(4), b"k", upsert, 5).unwrap();
    assert_eq!(served(&mut master, 5, "k"), Ok(upsert));
    assert_eq!(master.put_end(at(6), b"k", put, 5), Err(ErrorCode::PutIsOver), "it has lost its key");
    assert_eq!(served(&mut master, 7, "k"), Ok(upsert));
    assert_eq!(master.stats().used_bytes, GRAIN, "its writer has reported that it is quiet");

    // The other way round, the upsert replaces.
    let upsert = begin(&mut master, 10, "l", UPSERT, 0).unwrap();
    let put = store(&mut master, 11, "l", &PUT);
    assert_eq!(served(&mut master, 12, "l"), Ok(put));
    master.put_end(at(13), b"l", upsert, 5).unwrap();
    assert_eq!(served(&mut master, 14, "l"), Ok(upsert));
}

#[test]
fn the_space_of_a_replaced_object_is_held_until_its_leases_end() {
    let mut master = master(2);
    let old = store(&mut master, 1, "k", &PUT);
    let place = master.get(at(10), b"k").unwrap().replicas;
    let new = begin(&mut master, 11, "k", UPSERT, 0).unwrap();
    master.put_end(at(12), b"k", new, 5).unwrap();
    let stats = master.stats();
    assert_eq!((stats.used_bytes, stats.deferred_bytes), (2 * GRAIN, GRAIN));
    // The new object alone can go, and makes room where it is.
    let other = master.put_start(at(13), b"other", GRAIN, &PUT).unwrap();
    assert_ne!(other.replicas, place, "readers of {old} still read there");
    assert_eq!(master.put_start(at(14), b"third", GRAIN, &PUT), Err(ErrorCode::NoAvailableHandle));
    master.handle_timeout(at(1_010));
    let third = master.put_start(at(1_011), b"third", GRAIN, &PUT).unwrap();
    assert_eq!(third.replicas, place);
}

#[test]
fn an_object_is_not_evicted_for_the_upsert_that_is_to_replace_it() {
    let mut master = master(1);
    let old = store(&mut master, 1, "k", &PUT);
    assert_eq!(begin(&mut master, 2, "k", UPSERT, 0), Err(ErrorCode::NoAvailableHandle));
    assert_eq!(served(&mut master, 3, "k"), Ok(old));
    // Afterwards it can be evicted as before.
    store(&mut master, 2_000, "other", &PUT);
    assert_eq!(served(&mut master, 2_001, "k"), Err(ErrorCode::ObjectNotFound));
}

#[test]
fn an_object_is_not_evicted_for_its_upsert_with_its_group_or_for_a_quota() {
    for retention in [
        Retention { group: Some(1), ..Retention::DEFAULT },
        Retention { pin: Pin::Soft, ..Retention::DEFAULT },
        Retention { pin: Pin::Soft, group: Some(1), ..Retention::DEFAULT },
    ] {
        let mut master = master(2);
        let old = store(&mut master, 1, "k", &retained(retention));
        store(&mut master, 1, "l", &retained(retention));
        let upsert = PutOptions { existing: Existing::REPLACE, ..retained(retention) };
        let begun = begin(&mut master, 2, "k", upsert, 0);
        // Without a group the other object goes.
        assert_eq!(begun.is_ok(), retention.group.is_none(), "{retention:?}");
        assert_eq!(served(&mut master, 3, "k"), Ok(old), "{retention:?}");
    }
    // The limit on objects, of which an upsert in progress is one.
    let mut master = master_with(MasterConfig { objects_max: 1, ..config() }, &[8]);
    let old = store(&mut master, 1, "k", &PUT);
    assert_eq!(begin(&mut master, 2, "k", UPSERT, 0), Err(ErrorCode::KeysUltraLimit));
    assert_eq!(served(&mut master, 3, "k"), Ok(old));
}

#[test]
fn what_removes_the_old_object_does_not_end_the_upsert() {
    let mut master = master(8);
    for (round, force) in [(0, false), (1, true)] {
        let ms = 10_000 * (round + 1);
        store(&mut master, ms, "k", &PUT);
        let new = begin(&mut master, ms + 1, "k", UPSERT, 0).unwrap();
        let query = RemoveQuery { pattern: None, cursor: 0, force };
        let page = master.remove_many(at(ms + 2), TenantNo::DEFAULT, &query).unwrap();
        assert_eq!((page.removed, page.unfinished), (1, 0), "upserts in progress are not counted");
        assert_eq!(served(&mut master, ms + 3, "k"), Err(ErrorCode::ObjectNotFound));
        master.put_end(at(ms + 4), b"k", new, 5).unwrap();
        assert_eq!(served(&mut master, ms + 5, "k"), Ok(new));
        assert_eq!(master.remove(at(ms + 2_000), b"k", RemoveMode::IfUnused), Ok(()));
        assert_eq!(master.stats().used_bytes, 0);
    }
}

#[test]
fn a_segment_that_goes_takes_its_upserts_along() {
    let mut master = master_with(config(), &[4, 4]);
    let old = store(&mut master, 1, "k", &PutOptions { replicas: 2, ..PUT });
    let one = PutOptions { placement: store_core::Placement::on(SegmentNo::new(1)), ..UPSERT };
    let first = begin(&mut master, 2, "k", one, 0).unwrap();
    let two = PutOptions { replicas: 2, ..UPSERT };
    let second = begin(&mut master, 2, "k", two, 0).unwrap();
    let unmount = store_core::message::UnmountSegment {
        node: NodeId::new(1),
        incarnation: Incarnation::new(1),
        segment: SegmentNo::new(1),
        key: 0,
    };
    master.unmount(at(3), &unmount).unwrap();
    assert_eq!((served(&mut master, 4, "k"), master.stats().upserts_unfinished), (Ok(old), 1));
    assert_eq!(master.put_end(at(5), b"k", first, 5), Err(ErrorCode::PutIsOver));
    master.put_end(at(6), b"k", second, 5).unwrap();
    assert_eq!(served(&mut master, 7, "k"), Ok(second));
}

#[test]
fn a_start_that_comes_again_gets_the_same_space_and_none_after_the_end() {
    let mut master = master(16);
    let old = store(&mut master, 1, "k", &PUT);
    let first = begin(&mut master, 2, "k", UPSERT, 9).unwrap();
    assert_eq!(begin(&mut master, 3, "k", UPSERT, 9), Ok(first));
    let second = begin(&mut master, 3, "k", UPSERT, 10).unwrap();
    assert_ne!(second, first);
    let foreign = PutRequest { nonce: 9, options: UPSERT, writer: 8 };
    let foreign = master.put_start_in(at(3), b"k", GRAIN, &foreign, Place::ALONE).unwrap().generation;
    assert!(![first, second].contains(&foreign), "another writer that has drawn the same nonce");
    assert_eq!(begin(&mut master, 4, "k", UPSERT, 9), Ok(first), "both are in progress");
    master.put_end(at(5), b"k", first, 5).unwrap();
    master.put_revoke(at(5), b"k", second, WriterState::Quiet).unwrap();
    let used = master.stats().used_bytes;
    for nonce in [9, 10] {
        assert_eq!(begin(&mut master, 6, "k", UPSERT, nonce), Err(ErrorCode::PutIsOver), "{nonce}");
    }
    assert_eq!(master.stats().used_bytes, used, "no writer would have used it");
    assert_eq!(begin(&mut master, 7, "k", UPSERT, 0).map(|new| new > old), Ok(true), "0 is not a nonce");
    assert!(begin(&mut master, 7, "l", UPSERT, 9).is_ok(), "another key");
}

#[test]
fn an_upsert_takes_over_what_it_is_told_to() {
    let soft = |ttl_ms| Retention { pin: Pin::Soft, soft_pin_ttl_ms: ttl_ms, ..Retention::DEFAULT };
    let hard = Retention { pin: Pin::Hard, ..Retention::DEFAULT };
    let none = Retention::DEFAULT;
    let pins = [
        (hard, InheritPin::No, none, None),
        (hard, InheritPin::Hard, none, Some(Kept::HardPinned)),
        (hard, InheritPin::Hard, soft(None), Some(Kept::HardPinned)),
        (hard, InheritPin::Stronger, none, Some(Kept::HardPinned)),
        (soft(None), InheritPin::Hard, none, None),
        (soft(None), InheritPin::Stronger, none, Some(Kept::SoftPinned)),
        (soft(None), InheritPin::Stronger, hard, Some(Kept::HardPinned)),
        (none, InheritPin::Stronger, soft(None), Some(Kept::SoftPinned)),
        (none, InheritPin::Hard, soft(None), Some(Kept::SoftPinned)),
    ];
    for (old, pin, wanted, kept) in pins {
        let mut master = master(8);
        store(&mut master, 1, "k", &retained(old));
        store(&mut master, 2, "k", &inheriting(pin, false, wanted));
        assert_eq!(master.kept(at(3), b"k"), Ok(kept), "{old:?} {pin:?} {wanted:?}");
    }
    // The validity of a soft pin goes with it, and a pin that has run out is none.
    for (ms, kept) in [(400, Some(Kept::SoftPinned)), (600, None)] {
        let mut master = master(8);
        store(&mut master, 1, "k", &retained(soft(Some(500))));
        store(&mut master, ms, "k", &inheriting(InheritPin::Stronger, false, none));
        assert_eq!(master.kept(at(ms), b"k"), Ok(kept), "after {ms} ms");
        master.handle_timeout(at(ms + 510));
        assert_eq!(master.kept(at(ms + 510), b"k"), Ok(None), "its own validity, not the default");
    }
    // A group.
    for (group, wanted, together) in [(true, None, true), (false, None, false), (true, Some(2), false)] {
        let mut master = master(8);
        store(&mut master, 1, "k", &retained(Retention { group: Some(1), ..none }));
        store(&mut master, 1, "l", &retained(Retention { group: Some(1), pin: Pin::Hard, ..none }));
        store(&mut master, 2, "k", &inheriting(InheritPin::No, group, Retention { group: wanted, ..none }));
        let kept = together.then_some(Kept::Group);
        assert_eq!(master.kept(at(3), b"k"), Ok(kept), "{group} {wanted:?}");
    }
}

#[test]
fn a_time_to_live_begins_with_the_commit_and_an_expired_object_gives_nothing() {
    let mut master = master(8);
    let mortal = Retention { ttl_ms: Some(100), pin: Pin::Hard, ..Retention::DEFAULT };
    store(&mut master, 1, "k", &retained(mortal));
    let new = begin(&mut master, 90, "k", UPSERT, 0).unwrap();
    master.handle_timeout(at(150));
    assert_eq!(served(&mut master, 151, "k"), Err(ErrorCode::ObjectNotFound), "it is expired as before");
    master.put_end(at(160), b"k", new, 5).unwrap();
    master.handle_timeout(at(100_000));
    assert_eq!(served(&mut master, 100_001, "k"), Ok(new), "the new one has no time to live");

    store(&mut master, 200_000, "l", &retained(mortal));
    // Expired, and not removed yet.
    store(&mut master, 200_200, "l", &inheriting(InheritPin::Stronger, true, Retention::DEFAULT));
    assert_eq!(master.kept(at(200_201), b"l"), Ok(None));
    assert_eq!(master.eviction().expired_total, 2);
}

#[test]
fn a_soft_pin_of_its_own_length_needs_a_soft_pin_and_a_sensible_length() {
    let mut master = master(8);
    for (pin, ttl_ms, fits) in [
        (Pin::Soft, 1, true),
        (Pin::Soft, 30 * 86_400_000, true),
        (Pin::Soft, 30 * 86_400_000 + 1, false),
        (Pin::Soft, 0, false),
        (Pin::None, 5, false),
        (Pin::Hard, 5, false),
    ] {
        let options = retained(Retention { pin, soft_pin_ttl_ms: Some(ttl_ms), ..Retention::DEFAULT });
        let begun = master.put_start(at(1), format!("{pin:?} {ttl_ms}").as_bytes(), 1, &options);
        assert_eq!(begun.map(drop), if fits { Ok(()) } else { Err(ErrorCode::InvalidParams) }, "{options:?}");
    }
    store(
        &mut master,
        10,
        "long",
        &retained(Retention { pin: Pin::Soft, soft_pin_ttl_ms: Some(50_000), ..Retention::DEFAULT }),
    );
    store(&mut master, 10, "default", &pinned(Pin::Soft));
    master.handle_timeout(at(20_011));
    assert_eq!(master.kept(at(20_011), b"default"), Ok(None));
    assert_eq!(master.kept(at(20_011), b"long"), Ok(Some(Kept::SoftPinned)));
    // A read renews it for its own length.
    served(&mut master, 40_000, "long").unwrap();
    master.handle_timeout(at(89_000));
    assert_eq!(master.kept(at(89_000), b"long"), Ok(Some(Kept::SoftPinned)));
    master.handle_timeout(at(90_001));
    assert_eq!(master.kept(at(90_001), b"long"), Ok(None));
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Put { key: u8, upsert: bool, group: Option<u64>, pin: Pin },
    End(prop::sample::Index, bool),
    Get(u8),
    Remove(u8, bool),
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let pin = prop_oneof![6 => Just(Pin::None), 1 => Just(Pin::Soft), 1 => Just(Pin::Hard)];
    prop_oneof![
        5 => (0u8..4, any::<bool>(), prop::option::weighted(0.2, 0u64..2), pin)
            .prop_map(|(key, upsert, group, pin)| Step::Put { key, upsert, group, pin }),
        5 => (any::<prop::sample::Index>(), prop::bool::weighted(0.8)).prop_map(|(at, end)| Step::End(at, end)),
        4 => (0u8..4).prop_map(Step::Get),
        1 => (0u8..4, any::<bool>()).prop_map(|(key, force)| Step::Remove(key, force)),
        1 => (1u64..1_500).prop_map(Step::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    /// With room for everything: what is served is what was committed last, and in the end every byte is
    /// free.
    // Long because: the map, the store and the steps on both are compared step by step.
    #[test]
    fn puts_and_upserts_in_any_order_are_those_of_a_map(
        steps in prop::collection::vec(step(), 1..120),
        slab in any::<bool>(),
    ) {
        let allocator = AllocatorKind::ALL[usize::from(slab)];
        let mut master = master_with(MasterConfig { allocator, ..config() }, &[4096]);
        let mut model: BTreeMap<u8, u64> = BTreeMap::new();
        // Key, generation, whether it is an upsert.
        let mut unfinished: Vec<(u8, u64, bool)> = Vec::new();
        let mut ms = 1;
        for step in steps {
            ms += 1;
            match step {
                Step::Put { key, upsert, group, pin } => {
                    let retention = Retention { group, pin, ..Retention::DEFAULT };
                    let existing = if upsert { Existing::REPLACE } else { Existing::Keep };
                    let options = PutOptions { retention, existing, ..PUT };
                    let begun = master.put_start(at(ms), &[key], GRAIN, &options);
                    let taken = model.contains_key(&key)
                        || unfinished.iter().any(|put| put.0 == key && !put.2);
                    prop_assert_eq!(begun.is_ok(), upsert || !taken, "{:?}", begun);
                    if let Ok(begun) = begun {
                        unfinished.push((key, begun.generation, upsert));
                    }
                }
                Step::End(at_index, commit) if !unfinished.is_empty() => {
                    let (key, generation, upsert) = unfinished.remove(at_index.index(unfinished.len()));
                    if commit {
                        prop_assert_eq!(master.put_end(at(ms), &[key], generation, 7), Ok(()));
                        model.insert(key, generation);
                        if upsert {
                            // A put that had the key is over.
                            let lost: Vec<_> =
                                unfinished.iter().filter(|put| put.0 == key && !put.2).copied().collect();
                            for (key, generation, _) in lost {
                                unfinished.retain(|put| put.1 != generation);
                                let ended = master.put_end(at(ms), &[key], generation, 7);
                                prop_assert_eq!(ended, Err(ErrorCode::PutIsOver));
                            }
                        }
                    } else {
                        let revoked = master.put_revoke(at(ms), &[key], generation, WriterState::Quiet);
                        prop_assert_eq!(revoked, Ok(()));
                    }
                }
                Step::Get(key) => {
                    let put = unfinished.iter().any(|put| put.0 == key && !put.2);
                    let missing = if put { ErrorCode::ReplicaIsNotReady } else { ErrorCode::ObjectNotFound };
                    let found = master.get(at(ms), &[key]).map(|object| object.generation);
                    prop_assert_eq!(found, model.get(&key).copied().ok_or(missing));
                }
                Step::Remove(key, force) => {
                    let removed = master.remove(at(ms), &[key], RemoveMode::of(force));
                    if removed.is_ok() {
                        model.remove(&key);
                        let lost: Vec<_> =
                            unfinished.iter().filter(|put| put.0 == key && !put.2).copied().collect();
                        for (key, generation, _) in lost {
                            unfinished.retain(|put| put.1 != generation);
                            let revoked = master.put_revoke(at(ms), &[key], generation, WriterState::Quiet);
                            prop_assert_eq!(revoked, Ok(()));
                        }
                    } else if force {
                        prop_assert!(!model.contains_key(&key));
                    }
                }
                Step::Wait(more) => {
                    ms += more;
                    // The discard timeout is not what this test is about.
                    if ms < 2_500 {
                        master.handle_timeout(at(ms));
                    } else {
                        return Ok(());
                    }
                }
                Step::End(..) => {}
            }
            let upserts = unfinished.iter().filter(|put| put.2).count();
            let stats = master.stats();
            prop_assert_eq!(stats.upserts_unfinished as usize, upserts);
            prop_assert_eq!(stats.objects as usize, model.len());
            prop_assert_eq!(stats.objects_processing as usize, unfinished.len());
        }
        for (key, generation, _) in unfinished {
            master.put_revoke(at(ms), &[key], generation, WriterState::Quiet).unwrap();
        }
        for key in model.keys() {
            prop_assert_eq!(master.remove(at(ms), &[*key], RemoveMode::Force), Ok(()));
        }
        master.handle_timeout(at(ms + 1_001));
        let (stats, report) = (master.stats(), master.eviction());
        prop_assert_eq!((stats.used_bytes, stats.deferred_bytes, stats.objects), (0, 0, 0));
        prop_assert_eq!((report.groups, report.hard_pinned_bytes, report.kept_unfinished), (0, 0, 0));
    }
}
