//! Which objects have a copy on a disk: what their puts ask for, the quotas of tenants, and what is asked to
//! be in memory again.

use store_core::message::*;
use store_core::{ErrorCode, Key, MasterConfig, TenantConfig, TenantTag, bound};

use super::{CRC, LEN, ROOM, Store, at, config};

impl Store {
    fn put_with(&mut self, key: &str, len: u64, retention: Retention) -> Result<u64, store_core::ErrorCode> {
        let (now, key) = (at(self.now), key.as_bytes());
        let put = self.master.put_start(now, key, len, &PutOptions { retention, ..PutOptions::DEFAULT })?;
        self.master.put_end(now, key, put.generation, bound(CRC, key, put.generation))?;
        self.now += 1;
        Ok(put.generation)
    }
}

const fn disk(disk: DiskCopy) -> Retention {
    Retention { disk, ..Retention::DEFAULT }
}

#[test]
fn objects_with_a_time_to_live_a_pin_or_a_group_and_short_ones_have_no_copy() {
    let mut store = Store::opened();
    let mortal = Retention { ttl_ms: Some(1_000_000), ..Retention::DEFAULT };
    store.put_with("mortal", LEN, mortal).unwrap();
    store.put_with("grouped", LEN, Retention { group: Some(1), ..Retention::DEFAULT }).unwrap();
    store.put_with("short", LEN - 1, Retention::DEFAULT).unwrap();
    store.fill(0..97);
    let written = store.work();
    assert!(written.len() >= 16 && written.iter().all(|key| key.starts_with("key-")), "{written:?}");
    // A time to live that comes later ends the copy: a disk knows no times.
    let change = RetentionChange { ttl: TtlChange::After(500_000), ..RetentionChange::default() };
    store.master.change_retention(at(store.now), b"key-0", &change).unwrap();
    assert_eq!(store.fetch(9).forget.len(), 1);
}

#[test]
fn an_object_that_is_never_to_be_on_a_disk_is_not_copied() {
    let mut store = Store::opened();
    store.put_with("scratch", LEN, disk(DiskCopy::Never)).unwrap();
    store.fill(0..ROOM as u32 - 1);
    let written = store.work();
    assert!(written.len() > 10 && !written.contains(&"scratch".to_owned()), "{written:?}");
    store.now += 2_000;
    store.fill(200..201);
    assert_eq!(store.get("scratch"), None, "it was evicted like any other");
}

#[test]
fn an_object_that_is_to_be_on_a_disk_now_is_copied_at_once_and_once() {
    let mut store = Store::opened();
    store.put_with("early", LEN, disk(DiskCopy::Now)).unwrap();
    assert_eq!(store.work(), ["early"]);
    assert_eq!(store.stats().disk_objects, 1);
    // It leaves memory like any other, and is not written a second time.
    store.fill(0..ROOM as u32 - 1);
    assert!(!store.work().contains(&"early".to_owned()));
    store.now += 2_000;
    store.fill(200..201);
    assert_eq!(store.get("early"), Some(true));
    // Chosen to be evicted while it waits, or while it is written, it is not queued again.
    store.put_with("second", LEN, disk(DiskCopy::Now)).unwrap();
    let orders = store.fetch(1).demote;
    assert_eq!(orders.len(), 1);
    store.now += 2_000;
    store.fill(300..300 + ROOM as u32 - 1);
    let again = store.fetch(1_000).demote;
    assert_eq!(again.iter().filter(|(key, ..)| key == "second").count(), 1, "the order that it had");
    // What cannot have a copy is refused.
    let pinned = Retention { pin: Pin::Hard, ..disk(DiskCopy::Now) };
    assert_eq!(store.put_with("pinned", LEN, pinned), Err(store_core::ErrorCode::InvalidParams));
}

#[test]
fn without_a_disk_that_takes_it_an_early_copy_is_made_like_any_other() {
    let mut store = Store::opened();
    store.lose_node();
    store.incarnation += 1;
    store.mount_memory(1, store.incarnation);
    store.put_with("early", LEN, disk(DiskCopy::Now)).unwrap();
    store.mount_disk().unwrap();
    store.ready();
    assert_eq!(store.work(), Vec::<String>::new());
    store.fill(0..ROOM as u32 - 1);
    assert!(store.work().contains(&"early".to_owned()));
}

#[test]
fn a_tenant_has_no_more_on_disks_than_its_quota() {
    let quota = 5 * store_core::chunks::stored_len(LEN) + 1;
    let tenant = TenantConfig { quota_disk_bytes: Some(quota), ..TenantConfig::default() };
    let mut store = Store::with(MasterConfig { tenants: vec![tenant], ..config() });
    store.ready();
    store.fill(0..ROOM as u32);
    // Nothing is ordered that would exceed it, however many orders are given before the first one ends.
    let orders = store.fetch(1_000).demote;
    assert_eq!(orders.len(), 5);
    assert_eq!(store.fetch(1_000).demote.len(), 5, "the same ones");
    for (key, generation, _) in &orders {
        store.demoted(key, *generation).unwrap();
    }
    let used = |store: &Store| store.master.tenants().map(|usage| usage.disk_bytes).sum::<u64>();
    assert_eq!((store.work(), used(&store)), (vec![], quota - 1));
    // The eviction of others waits for nothing.
    store.now += 2_000;
    store.fill(200..210);
    assert_eq!((store.get("key-4"), store.get("key-5")), (Some(true), None));
    // What is removed makes room.
    store.remove("key-0").unwrap();
    store.remove("key-1").unwrap();
    assert_eq!((store.work().len(), used(&store)), (2, quota - 1));
    // A disk that comes back brings what it has.
    store.lose_node();
    store.start_node();
    store.announce();
    store.ready();
    assert_eq!(used(&store), quota - 1);
}

#[test]
fn what_is_prefetched_is_copied_into_memory_if_there_is_room_and_is_there_then() {
    let mut store = Store::opened();
    store.fill(0..ROOM as u32);
    store.work();
    store.now += 2_000;
    store.fill(200..220);
    assert_eq!(store.master.prefetch(at(store.now), &b"key-0"[..]), Prefetched::Coming);
    assert_eq!(store.master.prefetch(at(store.now), &b"key-50"[..]), Prefetched::InMemory);
    assert_eq!(store.master.prefetch(at(store.now), &b"none"[..]), Prefetched::Absent);
    // Nothing may be evicted for it without loss: all that leaves must be copied first.
    store.master.handle_timeout(at(store.now));
    assert_eq!((store.stats().promotions_total, store.get("key-0")), (0, Some(true)));
    store.work();
    assert_eq!(store.master.prefetch(at(store.now), &b"key-1"[..]), Prefetched::Coming);
    store.master.handle_timeout(at(store.now));
    assert_eq!(store.stats().promotions_total, 1);
    assert_eq!(store.master.prefetch(at(store.now), &b"key-1"[..]), Prefetched::Coming, "it is being copied");
    let (node, incarnation) = (store.node(), store.incarnation);
    let fetch = FetchRequest {
        node: node.node,
        incarnation: store_core::Incarnation::new(incarnation),
        count_max: 4,
        key: 0,
    };
    let orders = store.master.fetch_tasks(at(store.now), &fetch).unwrap();
    let (id, attempt, result) = (orders[0].id, orders[0].attempt, Ok(orders[0].checksum));
    store
        .call::<EndTasks>(&mut Vec::new(), &node, vec![TaskEnd { id, attempt, result, quiet: true }])
        .unwrap()[0]
        .unwrap();
    assert_eq!(store.master.prefetch(at(store.now), &b"key-1"[..]), Prefetched::InMemory);
    assert_eq!(store.get("key-1"), Some(false));
    // Without the node that has it, an object is nowhere.
    store.lose_node();
    assert_eq!(store.master.prefetch(at(store.now), &b"key-2"[..]), Prefetched::Absent);
}

#[test]
fn tenants_keep_their_objects_apart_on_disks_too() {
    let tenants = ["a", "b"].map(|name| TenantConfig { name: name.into(), ..TenantConfig::default() });
    let config = MasterConfig {
        multi_tenants: true,
        tenants: tenants.to_vec(),
        admin_secret: store_core::Secret::new(b"root"),
        ..config()
    };
    let mut store = Store::with(config);
    let proof = store.proof();
    for (name, generation) in [("a", 5), ("b", 6)] {
        let tenant = TenantTag::of(name);
        let found =
            FoundObject { tenant, key: Key(b"k"), generation, len: 5, crc32c: 0, locator: generation };
        let answer = store.call::<AdoptObjects>(&mut Vec::new(), &proof, vec![found]).unwrap();
        assert_eq!(answer, [Adoption::Adopted]);
    }
    let generation_of = |store: &mut Store, tenant: u16| {
        let key = store_core::FullKey { tenant: tenant.into(), key: b"k" };
        store.master.get(at(1), key).map(|object| object.generation)
    };
    assert_eq!((generation_of(&mut store, 1), generation_of(&mut store, 2)), (Ok(5), Ok(6)));
    assert_eq!(store.master.remove_tenant("a"), Err(ErrorCode::TenantNotEmpty));
    let key = store_core::FullKey { tenant: 1.into(), key: b"k" };
    store.master.remove(at(1), key, RemoveMode::Force).unwrap();
    assert_eq!(generation_of(&mut store, 2), Ok(6));
    store.master.remove_tenant("a").unwrap();
}
