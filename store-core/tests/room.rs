//! Puts that find no room: nothing is evicted for them, and the error says why.
#![allow(clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;
use store_core::message::{
    FetchRequest, Get, LeaseWanted, MountSegment, Operation, Pin, PutOptions, PutRequest, RemoveMode,
    Retention, SegmentOrder, SegmentState, TaskEnd, WriterState,
};
use store_core::{
    AllocatorKind, ErrorCode, Event, Frame, FullKey, Incarnation, Instant, Key, Master, MasterConfig, NodeId,
    Place, Placement, ReplicationConfig, ReplicationMode, SegmentNo, Session, TenantConfig, TenantNo,
};

const MIB: u64 = 1 << 20;
const KIB: u64 = 1 << 10;

fn at(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

fn config() -> MasterConfig {
    MasterConfig {
        eviction_high_watermark: 1.0,
        eviction_ratio: 0.0,
        lease_ttl_ms: 1_000,
        lease_guard_ms: 0,
        slow_start_ms: 0,
        ..MasterConfig::default()
    }
}

fn tenant(name: &str, quota: Option<u64>, guaranteed_bytes: u64) -> TenantConfig {
    TenantConfig { name: name.into(), quota_bytes: quota, guaranteed_bytes, ..TenantConfig::default() }
}

fn master(config: MasterConfig, segments: &[u64]) -> Master {
    let mut master = Master::new(config).unwrap();
    for (at_no, len) in segments.iter().enumerate() {
        let segment = MountSegment {
            node: NodeId::new(at_no as u64 + 1),
            incarnation: Incarnation::new(1),
            name: &format!("s{at_no}"),
            endpoint: "n:1",
            len: *len,
            ..MountSegment::default()
        };
        master.mount(at(0), &segment).unwrap().mounted().unwrap();
    }
    master
}

fn put(
    master: &mut Master,
    ms: u64,
    of: (TenantNo, &str),
    len: u64,
    options: &PutOptions,
) -> Result<(), ErrorCode> {
    let key = FullKey { tenant: of.0, key: of.1.as_bytes() };
    let started = master.put_start(at(ms), key, len, options)?;
    master.put_end(at(ms), key, started.generation, 1)
}

fn excluding(segments: &[u32]) -> PutOptions {
    let mut placement = Placement::ANY;
    segments.iter().for_each(|no| placement.excluded.push(SegmentNo::new(*no)).unwrap());
    PutOptions { placement, ..PutOptions::DEFAULT }
}

/// Puts that fail, and their error.
fn refuses(master: &mut Master, of: TenantNo, len: u64, options: &PutOptions, why: ErrorCode) {
    let before = (master.stats().objects, master.stats().evictions_total, master.stats().used_bytes);
    for turn in 0..8 {
        assert_eq!(put(master, 1, (of, &format!("refused {turn}")), len, options), Err(why));
    }
    let after = (master.stats().objects, master.stats().evictions_total, master.stats().used_bytes);
    assert_eq!(after, before, "a put that is refused ({why}) must change nothing");
}

#[test]
fn a_put_that_no_segment_can_take_changes_nothing_and_the_error_says_why() {
    let plain = PutOptions::DEFAULT;
    let mut empty = master(config(), &[]);
    refuses(&mut empty, TenantNo::new(0), 1, &plain, ErrorCode::NoSegment);

    // Nearly full, and full: eviction could make room, but not where the put may be placed.
    for objects in [40, 64] {
        let mut pool = master(config(), &[64 * MIB]);
        for object in 0..objects {
            put(&mut pool, 0, (TenantNo::new(0), &format!("{object}")), MIB - KIB, &plain).unwrap();
        }
        refuses(&mut pool, TenantNo::new(0), 100, &excluding(&[1]), ErrorCode::SegmentsExcluded);
        refuses(&mut pool, TenantNo::new(0), 64 * MIB, &plain, ErrorCode::ObjectTooLarge);
        refuses(&mut pool, TenantNo::new(0), u64::MAX, &plain, ErrorCode::ObjectTooLarge);
        for state in [SegmentState::Maintenance, SegmentState::Draining] {
            pool.order_segment(at(1), &SegmentOrder { segment: SegmentNo::new(1), state }).unwrap();
            refuses(&mut pool, TenantNo::new(0), 100, &plain, ErrorCode::SegmentsClosed);
        }
    }
    let pinned = PutOptions { retention: Retention { pin: Pin::Hard, ..Retention::DEFAULT }, ..plain };
    let mut pool = master(config(), &[MIB]);
    put(&mut pool, 0, (TenantNo::new(0), "pinned"), 500 * KIB, &pinned).unwrap();
    put(&mut pool, 0, (TenantNo::new(0), "plain"), 100 * KIB, &plain).unwrap();
    refuses(&mut pool, TenantNo::new(0), 100 * KIB, &pinned, ErrorCode::PinnedShareReached);
}

#[test]
fn while_the_only_room_is_on_a_segment_that_is_excluded_or_closed_the_other_loses_nothing_needlessly() {
    // The other segment is full of objects that cannot be evicted.
    let mut pool = master(config(), &[4 * MIB, 4 * MIB]);
    let on = |no| PutOptions { placement: Placement::on(no), ..PutOptions::DEFAULT };
    for object in 0..4 {
        put(&mut pool, 0, (TenantNo::new(0), &format!("a{object}")), MIB - KIB, &on(SegmentNo::new(1)))
            .unwrap();
        put(&mut pool, 0, (TenantNo::new(0), &format!("b{object}")), MIB - KIB, &on(SegmentNo::new(2)))
            .unwrap();
        pool.get(at(1), format!("b{object}").as_bytes()).unwrap();
    }
    refuses(&mut pool, TenantNo::new(0), MIB - KIB, &excluding(&[1]), ErrorCode::NoAvailableHandle);
    pool.order_segment(at(1), &SegmentOrder { segment: SegmentNo::new(1), state: SegmentState::Draining })
        .unwrap();
    refuses(&mut pool, TenantNo::new(0), MIB - KIB, &PutOptions::DEFAULT, ErrorCode::NoAvailableHandle);
    // As soon as an object can be evicted where the put may be placed, it is.
    put(&mut pool, 2_000, (TenantNo::new(0), "new"), MIB - KIB, &PutOptions::DEFAULT).unwrap();
    assert_eq!(pool.stats().evictions_total, 1);
}

#[test]
fn a_long_object_takes_neighbours_and_only_those_it_needs() {
    let mut pool = master(config(), &[16 * MIB]);
    for object in 0..16 {
        put(&mut pool, 0, (TenantNo::new(0), &format!("{object:02}")), MIB - KIB, &PutOptions::DEFAULT)
            .unwrap();
    }
    // Every other object is leased: no two neighbours can be evicted.
    for object in (0..16).step_by(2) {
        pool.get(at(1), format!("{object:02}").as_bytes()).unwrap();
    }
    refuses(&mut pool, TenantNo::new(0), 2 * MIB, &PutOptions::DEFAULT, ErrorCode::NoAvailableHandle);
    let before = pool.stats().evictions_total;
    put(&mut pool, 2_000, (TenantNo::new(0), "long"), 3 * MIB - 8 * KIB, &PutOptions::DEFAULT).unwrap();
    assert_eq!(pool.stats().evictions_total - before, 3, "exactly three neighbours");
}

/// The objects, of 1,024 of 64 KiB in a full segment, that a put of 256 KiB evicts. Those of odd number are
/// first or last in the policy's order.
fn gone_for_a_long_object(pin: Pin) -> Vec<u32> {
    let mut pool = master(MasterConfig { soft_pin_ttl_ms: 3_600_000, ..config() }, &[64 * MIB]);
    let name = |object: u32| format!("{object:04}");
    let options = PutOptions { retention: Retention { pin, ..Retention::DEFAULT }, ..PutOptions::DEFAULT };
    let fill = |pool: &mut Master, object: u32| {
        put(pool, 0, (TenantNo::new(0), &name(object)), 64 * KIB, &options).unwrap();
    };
    for object in 0..1_024 {
        fill(&mut pool, object);
    }
    match pin {
        // Objects that were not read are evicted first.
        Pin::None => {
            for object in (0..1_024).step_by(2) {
                pool.get(at(1), name(object).as_bytes()).unwrap();
            }
        }
        // Pinned objects are evicted in the order in which they were pinned.
        _ => {
            let odd = || (1..1_024).step_by(2);
            for object in odd() {
                pool.remove(at(1), name(object).as_bytes(), RemoveMode::Force).unwrap();
            }
            for object in odd() {
                fill(&mut pool, object);
            }
        }
    }
    put(&mut pool, 2_000, (TenantNo::new(0), "long"), 256 * KIB, &PutOptions::DEFAULT).unwrap();
    (0..1_024).filter(|object| !pool.exists(name(*object).as_bytes())).collect()
}

#[test]
fn what_a_long_object_passes_over_goes_with_it_and_not_more_than_a_few_times_its_length() {
    let gone = gone_for_a_long_object(Pin::None);
    // Five neighbours make room, with the trailer; of the objects before them in the order, three times as
    // many bytes are evicted.
    assert_eq!(gone[..5], [1, 2, 3, 4, 5]);
    assert!((13..=17).contains(&gone.len()), "{gone:?}");
    let odd = gone[5..].iter().all(|object| object % 2 == 1);
    assert!(odd, "only objects before the neighbours are evicted: {gone:?}");
}

#[test]
fn pinned_objects_that_a_long_object_passes_over_stay() {
    let gone = gone_for_a_long_object(Pin::Soft);
    assert_eq!(gone.len(), 5, "only those whose space the put needs: {gone:?}");
}

#[test]
fn extra_replicas_go_only_where_they_make_room() {
    let replication = ReplicationConfig {
        mode: ReplicationMode::Enforce,
        gets_per_s_min: 10.0,
        window_ms: 1_000,
        replicas_max: 2,
        tasks_per_s_max: 100,
    };
    let mut pool = master(MasterConfig { replication, ..config() }, &[4 * MIB, 4 * MIB]);
    let pinned =
        PutOptions { retention: Retention { pin: Pin::Hard, ..Retention::DEFAULT }, ..PutOptions::DEFAULT };
    let on = |no, options| PutOptions { placement: Placement::on(no), ..options };
    // It is read so often that it soon has a second replica, on the other segment.
    put(&mut pool, 0, (TenantNo::new(0), "hot"), MIB - KIB, &on(SegmentNo::new(1), pinned)).unwrap();
    for ms in 0..12 {
        pool.get(at(10 * ms), b"hot").unwrap();
    }
    let fetch = FetchRequest { node: NodeId::new(2), incarnation: Incarnation::new(1), count_max: 9, key: 0 };
    let orders = pool.fetch_tasks(at(200), &fetch).unwrap();
    let end = TaskEnd { id: orders[0].id, attempt: orders[0].attempt, result: Ok(1), quiet: true };
    pool.end_task(at(200), NodeId::new(2), &end).unwrap();
    for object in 0..3 {
        put(
            &mut pool,
            300,
            (TenantNo::new(0), &format!("{object}")),
            MIB - KIB,
            &on(SegmentNo::new(1), PutOptions::DEFAULT),
        )
        .unwrap();
        pool.get(at(2_000), format!("{object}").as_bytes()).unwrap();
    }
    // Everything else is pinned or leased. Objects on the other segment would not help.
    let before = pool.stats().used_bytes;
    for turn in 0..8 {
        let refused = put(
            &mut pool,
            2_001,
            (TenantNo::new(0), &format!("refused {turn}")),
            MIB - KIB,
            &excluding(&[2]),
        );
        assert_eq!(refused, Err(ErrorCode::NoAvailableHandle));
    }
    assert_eq!((pool.stats().used_bytes, pool.task_report().extras_shed_total), (before, 0));
    // Where the extra replica helps, it is dropped before any object is evicted.
    for object in 3..7 {
        put(&mut pool, 2_002, (TenantNo::new(0), &format!("{object}")), MIB - KIB, &excluding(&[1])).unwrap();
    }
    assert_eq!((pool.stats().evictions_total, pool.task_report().extras_shed_total), (0, 1));
}

#[test]
fn a_tenant_that_wishes_the_impossible_takes_nothing_from_others() {
    let tenants = vec![tenant("alice", None, 0), tenant("bob", Some(MIB), 0)];
    let config = MasterConfig { multi_tenants: true, tenants, ..config() };
    let mut pool = master(config, &[16 * MIB]);
    for object in 0..16 {
        put(&mut pool, 0, (TenantNo::new(1), &format!("{object}")), MIB - KIB, &PutOptions::DEFAULT).unwrap();
    }
    refuses(&mut pool, TenantNo::new(2), 100, &excluding(&[1]), ErrorCode::SegmentsExcluded);
    refuses(&mut pool, TenantNo::new(2), 2 * MIB, &PutOptions::DEFAULT, ErrorCode::TenantQuotaExceeded);
    // Bob's objects are leased: his quota cannot be kept, and nothing of Alice's is evicted for it either.
    put(&mut pool, 0, (TenantNo::new(2), "own"), 900 * KIB, &PutOptions::DEFAULT).unwrap();
    pool.get(at(1), FullKey { tenant: TenantNo::new(2), key: b"own" }).unwrap();
    refuses(&mut pool, TenantNo::new(2), 900 * KIB, &PutOptions::DEFAULT, ErrorCode::TenantQuotaExceeded);
}

#[test]
fn a_quota_that_too_few_can_go_for_costs_none_of_them() {
    let tenants = vec![tenant("a", Some(4 * MIB), 0)];
    let config = MasterConfig { multi_tenants: true, tenants, ..config() };
    let mut pool = master(config, &[16 * MIB]);
    let pinned =
        PutOptions { retention: Retention { pin: Pin::Hard, ..Retention::DEFAULT }, ..PutOptions::DEFAULT };
    put(&mut pool, 0, (TenantNo::new(1), "pinned"), 2 * MIB - KIB, &pinned).unwrap();
    put(&mut pool, 0, (TenantNo::new(1), "a"), MIB - KIB, &PutOptions::DEFAULT).unwrap();
    put(&mut pool, 0, (TenantNo::new(1), "b"), MIB - KIB, &PutOptions::DEFAULT).unwrap();
    refuses(&mut pool, TenantNo::new(1), 3 * MIB, &PutOptions::DEFAULT, ErrorCode::TenantQuotaExceeded);
    put(&mut pool, 1, (TenantNo::new(1), "c"), 2 * MIB - KIB, &PutOptions::DEFAULT).unwrap();
    assert_eq!(pool.stats().evictions_total, 2);
}

#[test]
fn what_would_have_to_go_for_a_limit_stays_while_the_put_has_no_place() {
    // For the tenant's own quota, for the number of objects, for the watermark.
    let tenants = vec![tenant("a", Some(4 * MIB), 0)];
    let of_quota = MasterConfig { multi_tenants: true, tenants, ..config() };
    let of_count = MasterConfig { objects_max: 4, ..config() };
    let of_mark = MasterConfig { eviction_high_watermark: 0.1, eviction_ratio: 0.05, ..config() };
    for (config, of) in [(of_quota, 1), (of_count, 0), (of_mark, 0)] {
        let mut pool = master(config, &[16 * MIB]);
        for object in 0..4 {
            let key = object.to_string();
            put(&mut pool, 0, (TenantNo::new(of), &key), MIB - KIB, &PutOptions::DEFAULT).unwrap();
            pool.get(at(0), FullKey { tenant: TenantNo::new(of), key: key.as_bytes() }).unwrap();
        }
        assert_eq!(pool.stats().evictions_total, 0);
        let before = pool.stats();
        for turn in 0..8 {
            let new = format!("refused {turn}");
            let refused = put(&mut pool, 2_000, (TenantNo::new(of), &new), MIB - KIB, &excluding(&[1]));
            assert_eq!(refused, Err(ErrorCode::SegmentsExcluded));
        }
        assert_eq!((pool.stats().evictions_total, pool.stats().used_bytes), (0, before.used_bytes));
        // As soon as the put has a place, they are evicted.
        put(&mut pool, 2_000, (TenantNo::new(of), "new"), MIB - KIB, &PutOptions::DEFAULT).unwrap();
        assert!(pool.stats().evictions_total > 0);
    }
}

#[test]
fn what_the_master_knows_is_bounded_and_the_bound_is_kept_by_eviction_or_a_refusal() {
    let mut pool = master(MasterConfig { metadata_bytes_max: 1 << 20, ..config() }, &[64 * MIB]);
    let key = |n: u32| format!("{n:0>1000}");
    // Puts that never end: nothing can be evicted, so that they are refused before long.
    let begun =
        (0..5_000).take_while(|n| pool.put_start(at(1), key(*n).as_bytes(), 1, &PutOptions::DEFAULT).is_ok());
    let begun = begun.count();
    assert!((500..1_000).contains(&begun), "{begun} puts of about 1.2 KB in 1 MiB");
    let refused = pool.put_start(at(1), b"one more", 1, &PutOptions::DEFAULT);
    assert_eq!(refused, Err(ErrorCode::MetadataFull));
    assert!(pool.stats().puts_metadata_full_total > 0);
    let events = std::iter::from_fn(|| pool.poll_event());
    assert_eq!(events.filter(|event| matches!(event, Event::MetadataFull { .. })).count(), 1);

    // Objects are evicted for others, as when there is no room for their bytes.
    let mut pool = master(MasterConfig { metadata_bytes_max: 1 << 20, ..config() }, &[64 * MIB]);
    for n in 0..5_000 {
        put(&mut pool, 1, (TenantNo::new(0), &key(n)), 1, &PutOptions::DEFAULT).unwrap();
    }
    assert!((500..1_000).contains(&pool.stats().objects), "{:?}", pool.stats());
    assert!(pool.exists(key(4_999).as_bytes()) && !pool.exists(key(0).as_bytes()));

    // Metadata of writers counts, too: fewer unfinished puts fit.
    let short = |n: u32| format!("{n:08}");
    let begin = |pool: &mut Master, n: u32| {
        let put = PutRequest { writer: 7, ..PutRequest::once(PutOptions::DEFAULT) };
        pool.put_start_in(at(1), short(n).as_bytes(), 1, &put, Place::ALONE)
    };
    let bounded = || master(MasterConfig { metadata_bytes_max: 1 << 20, ..config() }, &[64 * MIB]);
    let mut pool = bounded();
    let begun = (0..50_000).take_while(|n| begin(&mut pool, *n).is_ok()).count() as u64;
    let mut pool = bounded();
    for n in 0..50_000 {
        put(&mut pool, 1, (TenantNo::new(0), &short(n)), 1, &PutOptions::DEFAULT).unwrap();
    }
    let objects = pool.stats().objects;
    assert!(begun > 1_000 && objects < 20_000, "{begun} puts, {objects} objects");
    assert!(10 * begun < 9 * objects, "{begun} puts in the memory of {objects} objects");
}

#[test]
fn leases_that_connections_can_give_back_count_for_what_the_master_may_know() {
    let mut pool = master(MasterConfig { metadata_bytes_max: 1 << 20, ..config() }, &[64 * MIB]);
    put(&mut pool, 0, (TenantNo::new(0), "read"), 1, &PutOptions::DEFAULT).unwrap();
    let before = pool.memory_bytes();
    let mut request = Vec::new();
    let keys = std::iter::repeat_n(Key(b"read"), 1_024);
    Get::encode_request(&mut request, 1, &LeaseWanted::Quick, keys).unwrap();
    let (frame, _) = Frame::parse(&request).unwrap().unwrap();
    let mut readers = Vec::new();
    while readers.len() < 100 {
        let Ok(put) = pool.put_start(at(1), b"new", 1, &PutOptions::DEFAULT) else { break };
        pool.put_revoke(at(1), b"new", put.generation, WriterState::Quiet).unwrap();
        let mut session = Session::default();
        pool.handle(at(1), &mut session, &frame, &mut Vec::new());
        readers.push(session);
    }
    assert!((20..60).contains(&readers.len()), "{} readers with 1,024 leases each in 1 MiB", readers.len());
    let refused = pool.put_start(at(1), b"new", 1, &PutOptions::DEFAULT);
    assert_eq!(refused, Err(ErrorCode::MetadataFull));
    assert!(pool.memory_bytes() > before + (1 << 19), "the memory of leases is counted");
    readers.into_iter().for_each(|session| pool.session_ended(at(2), session));
    assert!(pool.put_start(at(2), b"new", 1, &PutOptions::DEFAULT).is_ok());
}

#[test]
fn what_is_guaranteed_stays_to_the_byte() {
    let cases = [(10 * MIB, MIB), (10 * MIB, 4 * MIB), (10 * MIB, 9 * MIB), (10 * MIB, 1_000)];
    // A tenant that reads all that it has put has nothing of its own to evict.
    for ((guaranteed, len), reads) in cases.into_iter().flat_map(|case| [(case, false), (case, true)]) {
        let tenants = vec![tenant("alice", None, guaranteed), tenant("bob", None, 0)];
        let config = MasterConfig { multi_tenants: true, tenants, ..config() };
        let mut pool = master(config, &[32 * MIB]);
        let mut object = 0;
        while put(&mut pool, 0, (TenantNo::new(1), &format!("{object}")), len, &PutOptions::DEFAULT).is_ok()
            && pool.stats().evictions_total == 0
        {
            object += 1;
        }
        // Bob puts as much as he can, in pieces of all lengths.
        for turn in 0..400u64 {
            let len = [1_000, 100 * KIB, MIB, 3 * MIB][turn as usize % 4];
            let key = format!("bob {turn}");
            let stored = put(&mut pool, 20 * turn, (TenantNo::new(2), &key), len, &PutOptions::DEFAULT);
            if reads && stored.is_ok() {
                pool.get(at(20 * turn), FullKey { tenant: TenantNo::new(2), key: key.as_bytes() }).unwrap();
            }
            let left = pool.tenant("alice").unwrap().bytes;
            assert!(left >= guaranteed, "{left} bytes are left of {guaranteed} with objects of {len} bytes");
        }
        assert!(pool.tenant("bob").unwrap().bytes > 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_put_that_fails_evicts_nothing_whatever_the_store_is_like(
        slab in any::<bool>(),
        steps in prop::collection::vec((0u8..6, 1u64..60_000, 0usize..64, any::<u8>()), 1..120),
    ) {
        let tenants = vec![tenant("a", Some(300 * KIB), 0), tenant("b", None, 100 * KIB), tenant("c", None, 0)];
        let allocator = if slab { AllocatorKind::Slab } else { AllocatorKind::Offset };
        let config = MasterConfig { multi_tenants: true, tenants, allocator, objects_max: 60, ..config() };
        let mut pool = master(config, &[256 * KIB, 200 * KIB]);
        let mut ms = 0;
        for (what, len, name, bits) in steps {
            ms += u64::from(bits);
            let tenant = TenantNo::new(1 + u16::from(bits % 3));
            let name = name.to_string();
            let key = FullKey { tenant, key: name.as_bytes() };
            match what {
                0 => drop(pool.get(at(ms), key)),
                1 => {
                    let state = [SegmentState::Active, SegmentState::Maintenance][usize::from(bits & 1)];
                    pool.order_segment(at(ms), &SegmentOrder { segment: SegmentNo::new(1 + u32::from(bits >> 7)), state }).unwrap();
                }
                _ => {
                    let excluded: &[u32] = [&[][..], &[1], &[2], &[1, 2]][usize::from(bits >> 3) % 4];
                    let pin = [Pin::None, Pin::None, Pin::Soft, Pin::Hard][usize::from(bits >> 5) % 4];
                    let group = (bits & 64 != 0).then_some(u64::from(bits % 4));
                    let retention = Retention { pin, group, ..Retention::DEFAULT };
                    let options = PutOptions { retention, ..excluding(excluded) };
                    let before = pool.stats();
                    if let Err(error) = put(&mut pool, ms, (tenant, &name), len, &options) {
                        let after = pool.stats();
                        prop_assert_eq!(before.evictions_total, after.evictions_total, "{}", error);
                        prop_assert_eq!(before.used_bytes, after.used_bytes, "{}", error);
                    }
                }
            }
        }
    }
}
