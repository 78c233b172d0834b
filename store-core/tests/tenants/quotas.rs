//! Quotas: a tenant above its quota evicts its own objects.

use store_core::message::*;
use store_core::{
    ErrorCode, FullKey, Incarnation, Master, MasterConfig, NodeId, SegmentNo, TenantConfig, TenantNo,
};

use crate::common::*;

#[test]
fn a_tenant_over_its_quota_evicts_its_own_objects_and_no_others() {
    for limit in [limited("a", Some(2 * GRAIN), None), limited("a", None, Some(2))] {
        let config =
            MasterConfig { eviction: store_core::EvictionPolicy::Lru, ..config(&[limit, tenant("b")]) };
        let mut master = master_with(16, config);
        let master = &mut master;
        store(master, 0, 2, "old", &PLAIN).unwrap();
        for key in ["1", "2", "3", "4"] {
            store(master, 1, 1, key, &PLAIN).unwrap();
        }
        assert_eq!(present(master, 1, &["1", "2", "3", "4"]), [false, false, true, true]);
        assert_eq!(present(master, 2, &["old"]), [true], "the oldest of all, but of another tenant");
        let (a, b) = (usage(master, "a"), usage(master, "b"));
        assert_eq!((a.bytes, a.objects, a.evictions_total, a.refusals_total), (2 * GRAIN, 2, 2, 0));
        assert_eq!((b.bytes, b.objects, b.evictions_total), (GRAIN, 1, 0));
    }
}

#[test]
fn a_put_that_no_eviction_makes_room_for_is_refused_and_costs_nothing() {
    let mut master = master_with(16, config(&[limited("a", Some(2 * GRAIN), None)]));
    let master = &mut master;
    let full = Err(ErrorCode::TenantQuotaExceeded);
    store(master, 0, 1, "k", &PLAIN).unwrap();
    let large =
        master.put_start(at(0), FullKey { tenant: TenantNo::new(1), key: b"large" }, 2 * GRAIN + 1, &PLAIN);
    assert_eq!(large.map(|_| ()), full, "larger than the quota");
    assert_eq!(present(master, 1, &["k"]), [true], "nothing was evicted for an object that cannot fit");
    let whole = FullKey { tenant: TenantNo::new(1), key: b"whole" };
    assert!(master.put_start(at(0), whole, 2 * GRAIN, &PLAIN).is_ok(), "exactly the quota");
    assert_eq!(
        store(master, 0, 1, "more", &PLAIN).map(|_| ()),
        full,
        "an object that is being written is not evicted"
    );
    assert_eq!(usage(master, "a").refusals_total, 2);
}

#[test]
fn leased_pinned_and_held_back_bytes_count_until_they_are_free() {
    let mut master = master_with(16, config(&[limited("a", Some(GRAIN), None)]));
    let master = &mut master;
    let key = FullKey { tenant: TenantNo::new(1), key: b"k" };
    let full = Err(ErrorCode::TenantQuotaExceeded);
    store(master, 0, 1, "k", &PLAIN).unwrap();
    master.get(at(0), key).unwrap();
    assert_eq!(store(master, 1, 1, "l", &PLAIN).map(|_| ()), full, "leased");
    master.remove(at(1), key, RemoveMode::Force).unwrap();
    assert_eq!((usage(master, "a").bytes, usage(master, "a").held_bytes), (0, GRAIN));
    assert_eq!(store(master, 2, 1, "l", &PLAIN).map(|_| ()), full, "its reader may still be reading");
    master.handle_timeout(at(6_000));
    let put = master.put_start(at(6_000), key, GRAIN, &PLAIN).unwrap();
    master.put_revoke(at(6_000), key, put.generation, WriterState::MayWrite).unwrap();
    assert_eq!(store(master, 6_001, 1, "l", &PLAIN).map(|_| ()), full, "its writer may still be writing");
    master.put_revoke(at(6_001), key, put.generation, WriterState::Quiet).unwrap();
    assert!(store(master, 6_002, 1, "l", &PLAIN).is_ok());
    assert_eq!((usage(master, "a").bytes, usage(master, "a").held_bytes), (GRAIN, 0));
}

#[test]
fn further_replicas_are_had_as_far_as_the_quota_goes() {
    let mut master = master_with(16, config(&[limited("a", Some(3 * GRAIN), None)]));
    let second = MountSegment {
        node: NodeId::new(2),
        incarnation: Incarnation::new(1),
        name: "n2",
        endpoint: "n2:1",
        len: 1024,
        ..MountSegment::default()
    };
    master.mount(at(0), &second).unwrap();
    let two = PutOptions { replicas: 2, ..PLAIN };
    let copies = |master: &mut Master, key: &[u8]| {
        master
            .put_start(at(0), FullKey { tenant: TenantNo::new(1), key }, GRAIN, &two)
            .unwrap()
            .replicas
            .len()
    };
    assert_eq!((copies(&mut master, b"k"), copies(&mut master, b"l")), (2, 1));
    assert_eq!(usage(&master, "a").bytes, 3 * GRAIN);
    master.handle_timeout(at(100_000_000));
    assert_eq!((usage(&master, "a").bytes, usage(&master, "a").objects), (0, 0), "all of it is freed");
}

#[test]
fn a_move_whose_source_is_gone_is_one_copy_more_and_not_above_the_quota() {
    let mut master = master_with(16, config(&[limited("a", Some(2 * GRAIN), None)]));
    let node = |node, name| MountSegment {
        node,
        incarnation: Incarnation::new(1),
        name,
        endpoint: "n:1",
        len: 1024,
        ..MountSegment::default()
    };
    master.mount(at(0), &node(NodeId::new(2), "n2")).unwrap();
    let key = FullKey { tenant: TenantNo::new(1), key: b"k" };
    let two = PutOptions { replicas: 2, ..PLAIN };
    store(&mut master, 0, 1, "k", &two).unwrap();
    master.mount(at(0), &node(NodeId::new(3), "n3")).unwrap();
    let id = master.create_task(at(0), key, Some(SegmentNo::new(1)), Some(SegmentNo::new(3))).unwrap();
    let fetch = FetchRequest { node: NodeId::new(3), incarnation: Incarnation::new(1), count_max: 1, key: 0 };
    let attempt = master.fetch_tasks(at(1), &fetch).unwrap()[0].attempt;
    master
        .unmount(at(2), &UnmountSegment::new(NodeId::new(1), Incarnation::new(1), SegmentNo::new(1)))
        .unwrap();
    store(&mut master, 3, 1, "l", &PLAIN).unwrap();
    assert_eq!(usage(&master, "a").bytes, 2 * GRAIN, "released space is used again");
    master.end_task(at(4), NodeId::new(3), &TaskEnd { id, attempt, result: Ok(0), quiet: true }).unwrap();
    assert_eq!(master.task(at(5), id).unwrap().error, Some(ErrorCode::ReplicaNotFound));
    assert_eq!(usage(&master, "a").bytes, 2 * GRAIN);
}

#[test]
fn a_tenant_pins_within_its_own_share() {
    let mut master = master_with(16, config(&[limited("a", Some(4 * GRAIN), None), tenant("b")]));
    let master = &mut master;
    let mut pins = |tenant, names: &[&str]| {
        names.iter().filter(|name| store(master, 0, tenant, name, &HARD).is_ok()).count()
    };
    assert_eq!(pins(1, &["1", "2", "3"]), 2, "half of its quota");
    assert_eq!(pins(2, &["1", "2", "3", "4", "5", "6", "7", "8"]), 6, "the rest of half of all bytes");
    let guarded = TenantConfig { guaranteed_bytes: 8 * GRAIN, ..tenant("a") };
    let mut master = master_with(16, config(&[guarded, tenant("b")]));
    let master = &mut master;
    let mut pins = |tenant, names: &[&str]| {
        names.iter().filter(|name| store(master, 0, tenant, name, &HARD).is_ok()).count()
    };
    assert_eq!(
        pins(2, &["1", "2", "3", "4", "5", "6", "7", "8"]),
        4,
        "the guarantee of another tenant is kept"
    );
    assert_eq!(pins(1, &["1", "2", "3", "4", "5"]), 4);
}

#[test]
fn tenants_come_change_and_go_while_the_master_runs() {
    let mut master = master_with(16, MasterConfig { tenants_max: 3, ..config(&[tenant("a")]) });
    let mut a = session(&mut master, "a");
    let master = &mut master;
    let setting = TenantSetting { name: "b", quota_objects: Some(1), ..TenantSetting::default() };
    master.set_tenant(&setting).unwrap();
    assert_eq!(master.set_tenant(&TenantSetting { name: "c", ..setting }), Err(ErrorCode::KeysUltraLimit));
    assert_eq!(master.set_tenant(&TenantSetting { name: "", ..setting }), Err(ErrorCode::InvalidParams));
    let greedy = TenantSetting { quota_bytes: Some(1), guaranteed_bytes: 2, ..setting };
    assert_eq!(master.set_tenant(&greedy), Err(ErrorCode::InvalidParams));
    let mut b = session(master, "b");
    put(master, &mut b, b"1").unwrap();
    put(master, &mut b, b"2").unwrap();
    assert_eq!(usage(master, "b").objects, 1);
    assert_eq!(master.remove_tenant("b"), Err(ErrorCode::TenantNotEmpty));
    let every = RemoveQuery { pattern: None, cursor: 0, force: false };
    assert_eq!(master.remove_many(at(1), TenantNo::new(2), &every).unwrap().removed, 1);
    assert_eq!(master.remove_tenant("b"), Ok(()));
    assert_eq!(master.remove_tenant("b"), Err(ErrorCode::TenantNotRegistered));
    assert_eq!(exists(master, &mut b, b"2"), Err(ErrorCode::TenantNotRegistered), "its session is over");
    // The number belongs to another tenant now, and its quota is gone.
    master.set_tenant(&TenantSetting { name: "d", ..TenantSetting::default() }).unwrap();
    assert_eq!(
        exists(master, &mut b, b"2"),
        Err(ErrorCode::TenantNotRegistered),
        "it is not a session of the new tenant"
    );
    let mut d = session(master, "d");
    put(master, &mut d, b"1").unwrap();
    put(master, &mut d, b"2").unwrap();
    assert_eq!(usage(master, "d").objects, 2);
    assert_eq!(exists(master, &mut a, b"1"), Ok(false));
}
