//! Eviction: what is evicted, what is kept and why, and the cost.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;
use store_core::message::{
    ExplainEviction, Kept, MountSegment, Operation, Pin, PutOptions, PutRequest, PutStart, RemoveMode,
    Retention, RetentionChange, TtlChange, WhyKept,
};
use store_core::{
    BatchOrder, ErrorCode, EvictionPolicy, Frame, Incarnation, Instant, Key, Master, MasterConfig, NodeId,
    Place, Session,
};

const LEASE_MS: u64 = 1_000;
const SOFT_MS: u64 = 60_000;
const GRAIN: u64 = 64;

fn at(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

fn config(eviction: EvictionPolicy) -> MasterConfig {
    MasterConfig {
        eviction,
        lease_ttl_ms: LEASE_MS as u32,
        lease_guard_ms: 0,
        soft_pin_ttl_ms: SOFT_MS as u32,
        hard_pin_share_max: 1.0,
        put_start_discard_timeout_ms: 80_000_000,
        put_start_release_timeout_ms: 86_000_000,
        node_ttl_ms: 86_400_000,
        eviction_high_watermark: 1.0,
        eviction_ratio: 0.0,
        ..MasterConfig::default()
    }
}

/// A pool of `objects` objects of one grain.
fn master_with(config: MasterConfig, objects: u64) -> Master {
    let mut master = Master::new(config).unwrap();
    let segment = MountSegment {
        node: NodeId::new(1),
        incarnation: Incarnation::new(1),
        name: "s",
        endpoint: "host:1",
        len: objects * GRAIN,
        ..MountSegment::default()
    };
    master.mount(at(0), &segment).unwrap();
    master
}

fn master(objects: u64) -> Master {
    master_with(config(EvictionPolicy::Lru), objects)
}

fn retained(retention: Retention) -> PutOptions {
    PutOptions { retention, ..PutOptions::DEFAULT }
}

fn pinned(pin: Pin) -> PutOptions {
    retained(Retention { pin, ..Retention::DEFAULT })
}

fn grouped(group: u64) -> PutOptions {
    retained(Retention { group: Some(group), ..Retention::DEFAULT })
}

fn mortal(ttl_ms: u32) -> PutOptions {
    retained(Retention { ttl_ms: Some(ttl_ms), ..Retention::DEFAULT })
}

fn try_put(master: &mut Master, ms: u64, key: &str, options: &PutOptions) -> Result<(), ErrorCode> {
    let put = master.put_start(at(ms), key.as_bytes(), GRAIN, options)?;
    master.put_end(at(ms), key.as_bytes(), put.generation, 0)
}

fn put(master: &mut Master, ms: u64, key: &str, options: &PutOptions) {
    try_put(master, ms, key, options).unwrap();
}

fn plain(master: &mut Master, ms: u64, keys: &[&str]) {
    keys.iter().for_each(|key| put(master, ms, key, &PutOptions::DEFAULT));
}

fn there(master: &mut Master, keys: &[&str]) -> Vec<bool> {
    keys.iter().map(|key| master.exists(key.as_bytes())).collect()
}

// ---- cost ----

#[test]
fn eviction_looks_at_nothing_that_cannot_go_more_than_once_a_lease() {
    for policy in EvictionPolicy::ALL {
        let looks = |stuck: u64| {
            // `stuck` objects cannot be evicted, 100 can; each of 1,000 puts evicts one.
            let config = MasterConfig { evictions_per_call_max: u32::MAX, ..config(*policy) };
            let mut master = master_with(config, stuck + 100);
            for object in 0..stuck {
                let pin = if object % 2 == 0 { Pin::Hard } else { Pin::None };
                put(&mut master, 0, &format!("stuck-{object}"), &pinned(pin));
            }
            for object in 0..100 {
                put(&mut master, 0, &format!("first-{object}"), &PutOptions::DEFAULT);
            }
            let mut gets = 0;
            for object in (1..stuck).step_by(2) {
                master.get(at(0), format!("stuck-{object}").as_bytes()).unwrap();
                gets += 1;
            }
            let before = master.eviction();
            for object in 0..1_000 {
                put(&mut master, 1, &format!("new-{object}"), &PutOptions::DEFAULT);
            }
            let after = master.eviction();
            assert_eq!(after.evictions_total - before.evictions_total, 1_000, "{policy}");
            let looks = after.looks_total - before.looks_total;
            // One look per victim, and one per lease, for which its get pays. SIEVE's hand also clears the
            // bits.
            assert!(looks <= 1_000 + 2 * gets, "{policy}: {looks} looks, {gets} gets");
            // Objects in the leased set are not examined again.
            for object in 0..1_000 {
                put(&mut master, 2, &format!("newer-{object}"), &PutOptions::DEFAULT);
            }
            master.eviction().looks_total - after.looks_total
        };
        assert_eq!(looks(200), 1_000, "{policy}");
        assert_eq!(looks(20_000), 1_000, "{policy}: a hundred times as many that cannot go");
    }
}

#[test]
fn one_call_looks_at_no_more_than_its_limit_and_the_next_goes_on() {
    let mut master =
        master_with(MasterConfig { evictions_per_call_max: 10, ..config(EvictionPolicy::Fifo) }, 51);
    put(&mut master, 0, "soft", &pinned(Pin::Soft));
    for object in 0..50 {
        put(&mut master, 0, &format!("{object}"), &PutOptions::DEFAULT);
    }
    for object in 0..35 {
        master.get(at(0), format!("{object}").as_bytes()).unwrap();
    }
    for _ in 0..2 {
        assert_eq!(try_put(&mut master, 1, "new", &PutOptions::DEFAULT), Err(ErrorCode::NoAvailableHandle));
    }
    put(&mut master, 1, "new", &PutOptions::DEFAULT);
    assert_eq!(there(&mut master, &["34", "35", "36"]), [true, false, true]);
    assert!(master.exists(b"soft"), "there was another object to evict, which was found later");
    assert_eq!(master.eviction().kept_leased, 30);
}

#[test]
fn an_object_of_the_leased_set_is_evicted_after_its_lease() {
    for policy in EvictionPolicy::ALL {
        let mut master = master_with(config(*policy), 2);
        plain(&mut master, 0, &["a", "b"]);
        master.get(at(1), b"a").unwrap();
        master.get(at(1), b"b").unwrap();
        assert_eq!(try_put(&mut master, 2, "c", &PutOptions::DEFAULT), Err(ErrorCode::NoAvailableHandle));
        assert_eq!((master.eviction().kept_leased, master.eviction().candidates), (2, 0), "{policy}");
        plain(&mut master, 1_001, &["c"]);
        assert_eq!(there(&mut master, &["a", "b"]).iter().filter(|there| **there).count(), 1, "{policy}");
        assert_eq!((master.eviction().kept_leased, master.stats().evictions_total), (0, 1), "{policy}");
    }
}

#[test]
fn a_pool_that_is_all_pins_waits_without_spinning() {
    let mut master =
        master_with(MasterConfig { eviction_high_watermark: 0.5, ..config(EvictionPolicy::Lru) }, 4);
    for key in ["a", "b", "c"] {
        put(&mut master, 0, key, &pinned(Pin::Hard));
    }
    master.handle_timeout(at(5));
    assert!(master.poll_timeout().is_none_or(|due| due > at(5)), "{:?}", master.poll_timeout());
    for (key, group) in [("d", 9), ("e", 9)] {
        let _ = try_put(&mut master, 6, key, &grouped(group));
    }
    master.handle_timeout(at(7));
    assert!(master.poll_timeout().is_none_or(|due| due > at(7)), "{:?}", master.poll_timeout());
}

// ---- the default policy, through the master ----

fn put_batch(master: &mut Master, ms: u64, keys: &[&str]) {
    let returning = master.returning(keys.iter().map(|key| Key(key.as_bytes())));
    let mut puts = Vec::new();
    for (index, key) in keys.iter().enumerate() {
        let place = Place::new(index, keys.len(), returning);
        let put = master.put_start_in(at(ms), key.as_bytes(), GRAIN, &PutRequest::default(), place).unwrap();
        puts.push((key, put.generation));
    }
    for (index, (key, generation)) in puts.into_iter().enumerate() {
        master.put_end_in(at(ms), key.as_bytes(), generation, 0, BatchOrder::of(index)).unwrap();
    }
}

#[test]
fn trial_loses_the_end_of_a_prefix_first_and_its_head_last() {
    let mut master = master_with(config(EvictionPolicy::Trial), 4);
    put_batch(&mut master, 0, &["1", "2", "3", "end"]);
    let mut left = vec!["1", "2", "3", "end"];
    for round in 0..4 {
        plain(&mut master, 1 + round, &[&format!("new-{round}")]);
        left.pop();
        let all = there(&mut master, &["1", "2", "3", "end"]);
        assert_eq!(all.iter().filter(|there| **there).count(), left.len(), "{all:?}");
        assert!(all.iter().take(left.len()).all(|there| *there), "{all:?}");
    }
}

#[test]
fn trial_keeps_what_was_read_again_three_times_as_long() {
    let mut master = master_with(config(EvictionPolicy::Trial), 10);
    plain(&mut master, 0, &["read"]);
    master.get(at(0), b"read").unwrap();
    let mut gone_at = None;
    for round in 0..60 {
        plain(&mut master, 2_000 + round, &[&format!("once-{round}")]);
        if gone_at.is_none() && !master.exists(b"read") {
            gone_at = Some(round);
        }
    }
    // Nine other objects are evicted at an age of nine, so this one is evicted at an age of 27.
    assert!(gone_at.is_some_and(|round| (25..=28).contains(&round)), "{gone_at:?}");
}

#[test]
fn trial_takes_a_prefix_that_comes_back_for_proven_up_to_the_last_key_it_remembers() {
    let mut master = master_with(config(EvictionPolicy::Trial), 4);
    put_batch(&mut master, 0, &["1", "2", "3", "4"]);
    put_batch(&mut master, 1, &["a", "b", "c", "d"]);
    assert_eq!(there(&mut master, &["1", "2", "3", "4"]), [false; 4]);
    let keys = |keys: &'static [&'static str]| keys.iter().map(|key| Key(key.as_bytes()));
    // "4" was an end, and is not remembered.
    assert_eq!(master.returning(keys(&["1", "2", "3", "4", "new"])), 3);
    assert_eq!(
        master.returning(keys(&["x", "3", "y"])),
        2,
        "without the previous one, it could not have been read"
    );
    assert_eq!(master.returning(keys(&["x", "y"])), 0);
    put_batch(&mut master, 2, &["1", "2", "3"]);
    assert_eq!(master.eviction().returned_total, 3);
    // "a" is the last object on trial, and is evicted first; then the end of what is proven.
    put_batch(&mut master, 3, &["p", "q"]);
    assert_eq!(there(&mut master, &["a", "1", "2", "3"]), [false, true, true, false]);
}

// ---- pins ----

#[test]
fn a_hard_pin_is_never_evicted_and_too_many_are_refused() {
    let mut master =
        master_with(MasterConfig { hard_pin_share_max: 0.5, ..config(EvictionPolicy::Trial) }, 4);
    put(&mut master, 0, "p1", &pinned(Pin::Hard));
    put(&mut master, 0, "p2", &pinned(Pin::Hard));
    assert_eq!(try_put(&mut master, 0, "p3", &pinned(Pin::Hard)), Err(ErrorCode::PinnedShareReached));
    for key in 0..20 {
        put(&mut master, 1, &format!("{key}"), &PutOptions::DEFAULT);
    }
    assert_eq!(there(&mut master, &["p1", "p2", "17", "18", "19"]), [true, true, false, true, true]);
    assert_eq!(master.kept(at(1), b"p1"), Ok(Some(Kept::HardPinned)));
    assert_eq!(master.eviction().hard_pinned_bytes, 2 * GRAIN);
    master.remove(at(2), b"p1", RemoveMode::IfUnused).unwrap();
    put(&mut master, 2, "p3", &pinned(Pin::Hard));
}

#[test]
fn a_soft_pin_goes_last_decays_and_revives() {
    let mut master = master(3);
    put(&mut master, 0, "soft", &pinned(Pin::Soft));
    plain(&mut master, 0, &["a", "b", "c", "d"]);
    assert_eq!(there(&mut master, &["soft", "a", "b", "c", "d"]), [true, false, false, true, true]);
    assert_eq!(master.kept(at(0), b"soft"), Ok(Some(Kept::SoftPinned)));

    // Nothing else can be evicted: both others are leased.
    master.get(at(10), b"c").unwrap();
    master.get(at(10), b"d").unwrap();
    plain(&mut master, 20, &["e"]);
    assert_eq!(there(&mut master, &["soft", "c", "d", "e"]), [false, true, true, true]);
    assert_eq!(master.eviction().soft_pinned_evicted_total, 1);

    // It decays when it is not read for its time, and is then evicted like any other object.
    let mut master = self::master(3);
    put(&mut master, 0, "soft", &pinned(Pin::Soft));
    plain(&mut master, 0, &["a", "b"]);
    master.get(at(SOFT_MS - 1), b"soft").unwrap();
    master.handle_timeout(at(2 * SOFT_MS - 2));
    assert_eq!(master.kept(at(2 * SOFT_MS - 2), b"soft"), Ok(Some(Kept::SoftPinned)), "the read renewed it");
    master.handle_timeout(at(2 * SOFT_MS));
    assert_eq!(master.kept(at(2 * SOFT_MS), b"soft"), Ok(None), "decayed");
    // A read revives it.
    master.get(at(2 * SOFT_MS + 1), b"soft").unwrap();
    let after_lease = 2 * SOFT_MS + 1 + LEASE_MS;
    assert_eq!(master.kept(at(after_lease), b"soft"), Ok(Some(Kept::SoftPinned)));
    plain(&mut master, after_lease, &["c", "d", "e"]);
    assert_eq!(there(&mut master, &["soft", "a", "b"]), [true, false, false]);
    let report = master.eviction();
    assert_eq!((report.soft_pins_decayed_total, report.soft_pins_revived_total), (1, 1));
}

// ---- groups ----

#[test]
fn a_group_is_evicted_whole_and_a_read_of_one_member_is_a_read_of_all() {
    let mut master = master(5);
    for key in ["g1", "g2", "g3"] {
        put(&mut master, 0, key, &grouped(7));
    }
    plain(&mut master, 1, &["a", "b"]);
    master.get(at(2), b"g3").unwrap();
    let after = 2 + LEASE_MS;
    plain(&mut master, after, &["c"]);
    assert_eq!(there(&mut master, &["g1", "g2", "g3", "a", "b"]), [true, true, true, false, true]);
    plain(&mut master, after, &["d"]);
    plain(&mut master, after, &["e"]);
    assert_eq!(
        there(&mut master, &["g1", "g2", "g3"]),
        [false; 3],
        "it is the oldest now, and is evicted as a whole"
    );
    assert_eq!(there(&mut master, &["c", "d", "e"]), [true; 3]);
    assert_eq!((master.eviction().groups_evicted_total, master.eviction().groups), (1, 0));
}

#[test]
fn a_group_stays_while_a_member_is_leased_pinned_or_being_written() {
    let keys = ["g1", "g2"];
    let both = |master: &mut Master| there(master, &keys) == [true, true];
    // Leased.
    let mut leased = master(2);
    keys.iter().for_each(|key| put(&mut leased, 0, key, &grouped(7)));
    leased.get(at(0), b"g2").unwrap();
    assert_eq!(leased.kept(at(1), b"g1"), Ok(Some(Kept::Leased)));
    assert_eq!(try_put(&mut leased, 1, "x", &PutOptions::DEFAULT), Err(ErrorCode::NoAvailableHandle));
    assert!(both(&mut leased));
    put(&mut leased, LEASE_MS, "x", &PutOptions::DEFAULT);
    assert_eq!(there(&mut leased, &keys), [false, false]);

    // Pinned.
    let mut held = master(3);
    keys.iter().for_each(|key| put(&mut held, 0, key, &grouped(7)));
    let retention = Retention { pin: Pin::Hard, group: Some(7), ..Retention::DEFAULT };
    put(&mut held, 0, "pin", &retained(retention));
    assert_eq!(held.kept(at(1), b"g1"), Ok(Some(Kept::Group)));
    assert_eq!(held.eviction().kept_by_group, 2);
    assert_eq!(try_put(&mut held, 1, "x", &PutOptions::DEFAULT), Err(ErrorCode::NoAvailableHandle));
    assert!(both(&mut held));
    held.remove(at(2), b"pin", RemoveMode::IfUnused).unwrap();
    plain(&mut held, 2, &["x", "y"]);
    assert_eq!(there(&mut held, &keys), [false, false]);

    // Being written.
    let mut unfinished = master(3);
    keys.iter().for_each(|key| put(&mut unfinished, 0, key, &grouped(7)));
    let third = unfinished.put_start(at(0), b"g3", GRAIN, &grouped(7)).unwrap();
    assert_eq!(try_put(&mut unfinished, 1, "x", &PutOptions::DEFAULT), Err(ErrorCode::NoAvailableHandle));
    assert!(both(&mut unfinished));
    unfinished.put_end(at(2), b"g3", third.generation, 0).unwrap();
    plain(&mut unfinished, 2, &["x"]);
    assert_eq!(there(&mut unfinished, &["g1", "g2", "g3"]), [false; 3]);
}

#[test]
fn a_group_has_a_limit() {
    let mut master = master(5_000);
    for object in 0..4_096 {
        put(&mut master, 0, &format!("{object}"), &grouped(1));
    }
    assert_eq!(try_put(&mut master, 0, "one more", &grouped(1)), Err(ErrorCode::KeysUltraLimit));
    put(&mut master, 0, "one more", &grouped(2));
}

// ---- time to live ----

#[test]
fn an_object_is_gone_when_its_time_is_over_and_readers_finish() {
    let mut master = master(2);
    put(&mut master, 0, "k", &mortal(500));
    assert_eq!(master.poll_timeout(), Some(at(500)));
    master.get(at(499), b"k").unwrap();
    assert_eq!(master.get(at(500), b"k"), Err(ErrorCode::ObjectNotFound), "no timeout had to run");
    master.handle_timeout(at(500));
    assert!(!master.exists(b"k"));
    let stats = master.stats();
    assert_eq!((stats.used_bytes, stats.deferred_bytes), (GRAIN, GRAIN), "a reader still has a lease");
    master.handle_timeout(at(499 + LEASE_MS));
    assert_eq!(master.stats().used_bytes, 0);
    assert_eq!(master.eviction().expired_total, 1);

    // The key is free at once, and a pin makes no difference.
    let retention = Retention { pin: Pin::Hard, ttl_ms: Some(10), group: Some(1), ..Retention::DEFAULT };
    put(&mut master, 2_000, "p", &retained(retention));
    assert_eq!(try_put(&mut master, 2_009, "p", &PutOptions::DEFAULT), Err(ErrorCode::ObjectAlreadyExists));
    put(&mut master, 2_010, "p", &PutOptions::DEFAULT);
    assert_eq!(try_put(&mut master, 2_011, "q", &mortal(0)), Err(ErrorCode::InvalidParams));
    master.handle_timeout(at(3_000));
    assert!(master.exists(b"p"), "the new object stays");
}

#[test]
fn objects_that_go_before_their_time_leave_nothing_behind() {
    let mut master = master(8);
    for round in 0..100_000u64 {
        put(&mut master, round, "k", &mortal(1_000_000_000));
        master.remove(at(round), b"k", RemoveMode::IfUnused).unwrap();
    }
    assert!(master.memory_bytes() < 1 << 20, "{} bytes", master.memory_bytes());
}

// ---- over the wire ----

#[test]
fn retention_and_the_explanation_travel() {
    let mut master = master(4);
    let call = |master: &mut Master, request: &[u8]| {
        let mut out = Vec::new();
        master.handle(at(5), &mut Session::default(), &Frame::parse(request).unwrap().unwrap().0, &mut out);
        out
    };
    let items = || [store_core::message::NewObject { key: Key(b"k"), len: GRAIN }].into_iter();
    let retention = Retention { pin: Pin::Hard, ttl_ms: Some(9_000), group: Some(3), ..Retention::DEFAULT };
    let mut request = Vec::new();
    PutStart::encode_request(
        &mut request,
        2,
        &PutRequest { writer: 1, ..PutRequest::once(retained(retention)) },
        items(),
    )
    .unwrap();
    let answer = call(&mut master, &request);
    let frame = Frame::parse(&answer).unwrap().unwrap().0;
    let generation = PutStart::decode_response(&frame).unwrap().1.next().unwrap().unwrap().generation;
    master.put_end(at(5), b"k", generation, 0).unwrap();
    put(&mut master, 5, "next", &PutOptions::DEFAULT);

    let mut request = Vec::new();
    WhyKept::encode_request(&mut request, 3, &(), [Key(b"k"), Key(b"next"), Key(b"none")].into_iter())
        .unwrap();
    let answer = call(&mut master, &request);
    let frame = Frame::parse(&answer).unwrap().unwrap().0;
    let why: Vec<_> = WhyKept::decode_response(&frame).unwrap().1.collect();
    assert_eq!(why, [Ok(Some(Kept::HardPinned)), Ok(None), Err(ErrorCode::ObjectNotFound)]);

    let mut request = Vec::new();
    ExplainEviction::encode_request(&mut request, 4, &10, std::iter::empty()).unwrap();
    let answer = call(&mut master, &request);
    let frame = Frame::parse(&answer).unwrap().unwrap().0;
    let (report, next) = ExplainEviction::decode_response(&frame).unwrap();
    let next: Vec<_> = next.map(|victim| (victim.key.0.to_vec(), victim.company, victim.leased)).collect();
    assert_eq!(next, [(b"next".to_vec(), 1, false)]);
    assert_eq!(report, master.eviction());
    assert_eq!((report.kept_hard_pinned, report.candidates), (1, 1));
}

// ---- against a naive model of the rules ----

#[derive(Clone, Debug)]
enum Op {
    Put(u8, Retention),
    Start(u8, Retention),
    Finish,
    Get(u8),
    Change(u8, RetentionChange),
    Remove(u8),
    Wait(u64),
}

fn retention() -> impl Strategy<Value = Retention> {
    let pin = prop_oneof![6 => Just(Pin::None), 2 => Just(Pin::Soft), 1 => Just(Pin::Hard)];
    let ttl = prop::option::weighted(0.2, 1u32..5_000);
    let soft_ttl = prop::option::weighted(0.3, 1u32..3_000);
    let group = prop::option::weighted(0.4, 0u64..3);
    (pin, soft_ttl, ttl, group).prop_map(|(pin, soft_ttl, ttl_ms, group)| {
        let soft_pin_ttl_ms = soft_ttl.filter(|_| pin == Pin::Soft);
        Retention { pin, soft_pin_ttl_ms, ttl_ms, group, ..Retention::DEFAULT }
    })
}

/// A change, valid or not.
fn change() -> impl Strategy<Value = RetentionChange> {
    let pin = prop_oneof![Just(None), Just(Some(Pin::None)), Just(Some(Pin::Soft)), Just(Some(Pin::Hard))];
    let soft_ttl = prop::option::weighted(0.3, 0u32..3_000);
    let ttl = prop_oneof![
        3 => Just(TtlChange::Keep),
        1 => Just(TtlChange::Never),
        1 => (0u32..5_000).prop_map(TtlChange::After)
    ];
    let change = |(pin, soft_pin_ttl_ms, ttl)| RetentionChange { pin, soft_pin_ttl_ms, ttl };
    (pin, soft_ttl, ttl).prop_map(change)
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0u8..30, retention()).prop_map(|(key, retention)| Op::Put(key, retention)),
        1 => (0u8..30, retention()).prop_map(|(key, retention)| Op::Start(key, retention)),
        1 => Just(Op::Finish),
        6 => (0u8..30).prop_map(Op::Get),
        3 => (0u8..30, change()).prop_map(|(key, change)| Op::Change(key, change)),
        2 => (0u8..30).prop_map(Op::Remove),
        3 => prop_oneof![0u64..500, Just(SOFT_MS)].prop_map(Op::Wait),
    ]
}

#[derive(Clone, Debug)]
struct Known {
    retention: Retention,
    generation: u64,
    complete: bool,
    leased_until: u64,
    group_leased_until: u64,
    soft_until: u64,
    expires: Option<u64>,
}

impl Known {
    fn soft_ttl(&self) -> u64 {
        self.retention.soft_pin_ttl_ms.map_or(SOFT_MS, u64::from)
    }

    fn change(&mut self, now: u64, change: &RetentionChange) -> Result<(), ErrorCode> {
        let RetentionChange { pin, soft_pin_ttl_ms, ttl } = *change;
        if !self.complete {
            return Err(ErrorCode::ReplicaIsNotReady);
        }
        let was = self.retention.pin;
        let becomes = pin.unwrap_or(was);
        let fits = soft_pin_ttl_ms.is_none_or(|ms| ms > 0 && becomes == Pin::Soft);
        if !fits || ttl == TtlChange::After(0) {
            return Err(ErrorCode::InvalidParams);
        }
        if pin.is_some() || soft_pin_ttl_ms.is_some() {
            let old = self.retention.soft_pin_ttl_ms.filter(|_| was == Pin::Soft);
            self.retention.soft_pin_ttl_ms = soft_pin_ttl_ms.or(old);
            self.retention.pin = becomes;
            self.soft_until = now + self.soft_ttl();
        }
        match ttl {
            TtlChange::Keep => {}
            TtlChange::Never => self.expires = None,
            TtlChange::After(ms) => self.expires = Some(now + u64::from(ms)),
        }
        Ok(())
    }
}

/// Marks a lease on the whole group, which outlives the member that was read, as long as the group exists.
fn lease_group(model: &mut BTreeMap<u8, Known>, group: Option<u64>, until: u64) {
    let members = model.values_mut().filter(|known| group.is_some() && known.retention.group == group);
    members.for_each(|known| known.group_leased_until = until);
}

/// The rules about a set of objects, evaluated object by object.
struct Rules<'a>(&'a BTreeMap<u8, Known>, u64);

impl Rules<'_> {
    fn company(&self, key: u8) -> Vec<u8> {
        match self.0[&key].retention.group {
            None => vec![key],
            group => self
                .0
                .iter()
                .filter(|(_, other)| other.retention.group == group)
                .map(|(key, _)| *key)
                .collect(),
        }
    }
    fn is_soft(&self, key: u8) -> bool {
        self.0[&key].retention.pin == Pin::Soft && self.0[&key].soft_until > self.1
    }
    /// Whether at most a soft pin keeps it.
    fn may_go(&self, key: u8) -> bool {
        self.company(key).iter().all(|key| {
            let known = &self.0[key];
            let leased_until = known.leased_until.max(known.group_leased_until);
            known.complete && leased_until <= self.1 && known.retention.pin != Pin::Hard
        })
    }
    fn is_free(&self, key: u8) -> bool {
        self.may_go(key) && !self.company(key).iter().any(|key| self.is_soft(*key))
    }
}

/// Objects for which the pool of [`Check`] has room.
const ROOM: u64 = 12;

/// A master, and the objects that it should have.
struct Check {
    master: Master,
    model: BTreeMap<u8, Known>,
    now: u64,
}

impl Check {
    fn new(policy: EvictionPolicy) -> Self {
        Self { master: master_with(config(policy), ROOM), model: BTreeMap::new(), now: 0 }
    }

    fn step(&mut self, op: &Op) -> Result<(), TestCaseError> {
        self.now += 1;
        let now = self.now;
        self.model.retain(|_, known| !known.complete || known.expires.is_none_or(|expires| expires > now));
        self.master.handle_timeout(at(now));
        match op {
            Op::Wait(ms) => self.now += ms,
            Op::Get(key) => self.get(*key)?,
            Op::Change(key, change) => {
                let changed = self.master.change_retention(at(now), &[*key], change);
                let known = self.model.get_mut(key).ok_or(ErrorCode::ObjectNotFound);
                prop_assert_eq!(changed, known.and_then(|known| known.change(now, change)));
            }
            Op::Remove(key) => self.remove(*key)?,
            Op::Finish => {
                for (key, known) in self.model.iter_mut().filter(|(_, known)| !known.complete) {
                    self.master.put_end(at(now), &[*key], known.generation, 0).unwrap();
                    finish(known, now);
                }
            }
            Op::Put(key, retention) => self.put(*key, *retention, true)?,
            Op::Start(key, retention) => self.put(*key, *retention, false)?,
        }
        self.check_kept()
    }

    fn get(&mut self, key: u8) -> Result<(), TestCaseError> {
        let now = self.now;
        let hit = self.master.get(at(now), &[key]).is_ok();
        prop_assert_eq!(hit, self.model.get(&key).is_some_and(|known| known.complete));
        if let Some(known) = self.model.get_mut(&key).filter(|known| known.complete) {
            known.leased_until = now + LEASE_MS;
            known.soft_until = now + known.soft_ttl();
            let group = known.retention.group;
            lease_group(&mut self.model, group, now + LEASE_MS);
        }
        Ok(())
    }

    fn remove(&mut self, key: u8) -> Result<(), TestCaseError> {
        let ok = self.master.remove(at(self.now), &[key], RemoveMode::IfUnused).is_ok();
        let idle = |known: &Known| known.complete && known.leased_until <= self.now;
        prop_assert_eq!(ok, self.model.get(&key).is_some_and(idle));
        if ok {
            self.model.remove(&key);
        }
        Ok(())
    }

    fn put(&mut self, key: u8, retention: Retention, complete: bool) -> Result<(), TestCaseError> {
        let now = self.now;
        let used = self.master.stats().used_bytes;
        let result = self.master.put_start(at(now), &[key], GRAIN, &retained(retention));
        prop_assert_eq!(result == Err(ErrorCode::ObjectAlreadyExists), self.model.contains_key(&key));
        let gone = self.evicted()?;
        if result == Err(ErrorCode::NoAvailableHandle) {
            let rules = Rules(&self.model, now);
            let free = self.model.keys().find(|key| rules.is_free(**key));
            prop_assert!(gone.is_empty() && free.is_none(), "no room, and {free:?} could have been evicted");
        }
        prop_assert!(gone.is_empty() || used == ROOM * GRAIN, "objects were evicted without need");
        self.model.retain(|key, _| !gone.contains(key));
        let Ok(put) = result else { return Ok(()) };
        let mut group = self.model.values().filter(|known| known.retention.group == retention.group);
        let group_leased_until =
            group.next().filter(|_| retention.group.is_some()).map_or(0, |known| known.group_leased_until);
        let mut known = Known {
            retention,
            generation: put.generation,
            complete: false,
            leased_until: 0,
            group_leased_until,
            soft_until: 0,
            expires: None,
        };
        if complete {
            self.master.put_end(at(now), &[key], put.generation, 0).unwrap();
            finish(&mut known, now);
        }
        self.model.insert(key, known);
        Ok(())
    }

    /// The objects that are gone. Each of them could be evicted, with its group, and no other one had to be
    /// first.
    fn evicted(&mut self) -> Result<Vec<u8>, TestCaseError> {
        let rules = Rules(&self.model, self.now);
        let keys = self.model.keys().copied();
        let gone: Vec<u8> = keys.filter(|key| !is_there(&mut self.master, at(self.now), *key)).collect();
        for key in &gone {
            prop_assert!(rules.may_go(*key), "{key} was evicted: {:?}", self.model[key]);
            let whole = rules.company(*key).iter().all(|other| gone.contains(other));
            prop_assert!(whole, "a part of a group was evicted");
            if !rules.is_free(*key) {
                let free = self.model.keys().find(|other| rules.is_free(**other));
                prop_assert!(free.is_none(), "soft {key} was evicted, {free:?} could have been");
            }
        }
        Ok(gone)
    }

    /// What the master reports about objects that are kept.
    fn check_kept(&mut self) -> Result<(), TestCaseError> {
        let rules = Rules(&self.model, self.now);
        for (key, known) in &self.model {
            // Ends of soft pins and leases are noticed when room is needed.
            let kept = self.master.kept(at(self.now), &[*key]).unwrap();
            if known.retention.pin == Pin::Hard && known.complete {
                prop_assert_eq!(kept, Some(Kept::HardPinned));
            }
            prop_assert!(kept.is_some() || rules.is_free(*key), "{key} is kept: {known:?}");
        }
        let report = self.master.eviction();
        let hard = self.model.values().filter(|known| known.retention.pin == Pin::Hard);
        prop_assert_eq!(report.hard_pinned_bytes, hard.count() as u64 * GRAIN);
        let unfinished = self.model.values().filter(|known| !known.complete);
        prop_assert_eq!(report.kept_unfinished, unfinished.count() as u64);
        Ok(())
    }

    /// In the end everything can be removed, and nothing is left.
    fn remove_all(mut self) -> Result<(), TestCaseError> {
        self.now += 10 * SOFT_MS;
        for key in 0..30u8 {
            let _ = self.master.remove(at(self.now), &[key], RemoveMode::Force);
        }
        let report = self.master.eviction();
        prop_assert_eq!(report.candidates + report.kept_leased + report.kept_soft_pinned + report.groups, 0);
        prop_assert_eq!(report.kept_hard_pinned + report.kept_by_group + report.hard_pinned_bytes, 0);
        Ok(())
    }
}

/// Whether the object of the model exists, written or not.
fn is_there(master: &mut Master, now: Instant, key: u8) -> bool {
    master.kept(now, &[key]).is_ok()
}

fn finish(known: &mut Known, now: u64) {
    known.complete = true;
    known.soft_until = now + known.soft_ttl();
    known.expires =
        known.retention.ttl_ms.map(|ttl| now + Duration::from_millis(ttl.into()).as_millis() as u64);
}

proptest! {
    #[test]
    fn whatever_happens_only_what_may_go_goes_and_room_is_found_when_there_is_some(
        policy in prop::sample::select(EvictionPolicy::ALL),
        ops in prop::collection::vec(op(), 1..150),
    ) {
        let mut check = Check::new(policy);
        ops.iter().try_for_each(|op| check.step(op))?;
        check.remove_all()?;
    }
}
