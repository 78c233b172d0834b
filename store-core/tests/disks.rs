//! The disks of nodes: what is copied to them and when, what is found on them, and what is not found again.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "disks/copies.rs"]
mod copies;

use std::collections::BTreeMap;

use store_core::message::*;
use store_core::{
    ErrorCode, EvictionPolicy, Frame, Incarnation, Instant, Key, Master, MasterConfig, NodeId, SegmentNo,
    Session, Stats, TenantTag, bound,
};

const LEN: u64 = 4_096;
/// Objects that fit into memory.
const ROOM: u64 = 100;
const EXTENT: u64 = 1 << 20;
const CRC: u32 = 0x1234;

fn at(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

fn config() -> MasterConfig {
    MasterConfig {
        eviction: EvictionPolicy::Lru,
        lease_ttl_ms: 1_000,
        lease_guard_ms: 0,
        eviction_high_watermark: 1.0,
        eviction_ratio: 0.0,
        demote_ahead: 0.2,
        node_ttl_ms: 10_000,
        disk_away_ms: 60_000,
        ..MasterConfig::default()
    }
}

/// One node with a disk that never fails, and its master.
struct Store {
    master: Master,
    now: u64,
    incarnation: u64,
    disk: SegmentNo,
    /// Where it is, if readers may read it themselves.
    shared: &'static str,
    /// What is on the disk: by locator.
    found: BTreeMap<u64, (String, u64)>,
    next: u64,
}

impl Store {
    fn new() -> Self {
        Self::with(config())
    }

    fn with(config: MasterConfig) -> Self {
        let master = Master::new(config).unwrap();
        let mut store = Self {
            master,
            now: 1,
            incarnation: 0,
            disk: SegmentNo::NONE,
            shared: "",
            found: BTreeMap::new(),
            next: EXTENT,
        };
        store.start_node();
        store
    }

    fn node(&self) -> NodeProof {
        NodeProof { node: NodeId::new(1), key: 0 }
    }

    fn proof(&self) -> DiskProof {
        DiskProof { node: self.node(), disk: self.disk }
    }

    fn call<'a, O: Operation>(
        &mut self,
        out: &'a mut Vec<u8>,
        head: &O::Request<'_>,
        items: Vec<O::RequestItem<'_>>,
    ) -> Result<Vec<O::ResponseItem<'a>>, ErrorCode> {
        let mut request = Vec::new();
        O::encode_request(&mut request, 1, head, items.into_iter()).unwrap();
        let frame = Frame::parse(&request).unwrap().unwrap().0;
        self.master.handle(at(self.now), &mut Session::owner(), &frame, out);
        let frame = Frame::parse(out).unwrap().unwrap().0;
        O::decode_response(&frame).map(|(_, items)| items.collect())
    }

    /// Mounts memory and the disk, as after a restart.
    fn start_node(&mut self) {
        self.incarnation += 1;
        self.mount_memory(1, self.incarnation);
        self.mount_disk().unwrap();
    }

    fn mount_memory(&mut self, node: u64, incarnation: u64) {
        let mount = MountSegment {
            node: NodeId::new(node),
            incarnation: Incarnation::new(incarnation),
            name: ["", "n1", "n2"][node as usize],
            endpoint: "n:1",
            len: ROOM * LEN,
            ..MountSegment::default()
        };
        self.master.mount(at(self.now), &mount).unwrap().mounted().unwrap();
    }

    fn mount_disk(&mut self) -> Result<(), ErrorCode> {
        let mount = MountDisk {
            shared: self.shared,
            node: NodeId::new(1),
            incarnation: Incarnation::new(self.incarnation),
            uuid: [7; 16],
            bytes: 1 << 30,
            extent_bytes: EXTENT,
            endpoint: "n1:1",
            stage: "n1:2",
            ..MountDisk::default()
        };
        self.disk = self.master.mount_disk(at(self.now), &mount)?.disk;
        Ok(())
    }

    /// Announces everything that is on the disk; returns the keys that are to be forgotten.
    fn announce(&mut self) -> Vec<String> {
        let found = self.found.clone();
        let mut forgotten = Vec::new();
        for (locator, (key, generation)) in found {
            match self.adopt(locator, &key, generation) {
                Adoption::Adopted | Adoption::Refused(_) => {}
                Adoption::Forget => forgotten.push(key),
            }
        }
        forgotten
    }

    fn adopt(&mut self, locator: u64, key: &str, generation: u64) -> Adoption {
        let tenant = TenantTag::of("default");
        let key = Key(key.as_bytes());
        let found = FoundObject { tenant, key, generation, len: LEN, crc32c: CRC, locator };
        let proof = self.proof();
        self.call::<AdoptObjects>(&mut Vec::new(), &proof, vec![found]).unwrap()[0]
    }

    fn ready(&mut self) {
        let proof = self.proof();
        self.call::<DiskReady>(&mut Vec::new(), &proof, vec![]).unwrap();
    }

    /// A store whose disk is ready and empty.
    fn opened() -> Self {
        let mut store = Self::new();
        store.ready();
        store
    }

    /// Ends the node without a word, and lets the master notice.
    fn lose_node(&mut self) {
        self.now += 10_001;
        self.master.handle_timeout(at(self.now));
        assert_eq!(self.master.nodes_len(), 0);
    }

    fn put(&mut self, key: &str) -> u64 {
        let put = self.master.put_start(at(self.now), key.as_bytes(), LEN, &PutOptions::DEFAULT).unwrap();
        let checksum = bound(CRC, key.as_bytes(), put.generation);
        self.master.put_end(at(self.now), key.as_bytes(), put.generation, checksum).unwrap();
        self.now += 1;
        put.generation
    }

    fn fill(&mut self, keys: std::ops::Range<u32>) {
        keys.for_each(|key| {
            self.put(&format!("key-{key}"));
        });
    }

    /// The work for the disk: the keys to be written with generation and memory, those to be forgotten, and
    /// the order to clear.
    fn fetch(&mut self, count_max: u32) -> Work {
        let (node, incarnation) = (NodeId::new(1), Incarnation::new(self.incarnation));
        let fetch = FetchRequest { node, incarnation, count_max, key: 0 };
        let fetch = FetchDisk { fetch, disk: self.disk, bytes_max: 1 << 30 };
        let (mut work, mut out) = (Work::default(), Vec::new());
        for order in self.call::<FetchDiskOrders>(&mut out, &fetch, vec![]).unwrap() {
            match order {
                DiskOrder::Demote { tenant, key, generation, len, crc32c, proven, .. } => {
                    assert_eq!((tenant, len, crc32c), (TenantTag::of("default"), LEN, CRC));
                    work.demote.push((String::from_utf8(key.0.into()).unwrap(), generation, proven));
                }
                DiskOrder::Forget { key, generation, .. } => {
                    work.forget.push((String::from_utf8(key.0.into()).unwrap(), generation));
                }
                DiskOrder::Clear { ticket } => work.clear = Some(ticket),
            }
        }
        work
    }

    fn end(&mut self, end: DiskEnd<'_>) -> Result<(), ErrorCode> {
        let proof = self.proof();
        self.call::<EndDiskOrders>(&mut Vec::new(), &proof, vec![end]).unwrap()[0]
    }

    /// Writes an object to the disk; returns its locator.
    fn write(&mut self, key: &str, generation: u64) -> u64 {
        let locator = self.next;
        self.next += 2 * LEN;
        self.found.insert(locator, (key.into(), generation));
        locator
    }

    fn demoted(&mut self, key: &str, generation: u64) -> Result<(), ErrorCode> {
        let locator = self.write(key, generation);
        self.end(DiskEnd::Demoted { generation, result: Ok(locator) })
    }

    /// Does all work that there is; returns the keys that were written.
    fn work(&mut self) -> Vec<String> {
        let mut written = Vec::new();
        loop {
            let work = self.fetch(16);
            if work.demote.is_empty() {
                return written;
            }
            for (key, generation, _) in work.demote {
                self.demoted(&key, generation).unwrap();
                written.push(key);
            }
        }
    }

    /// Where a get finds a key: `None`, in memory (`false`) or on the disk.
    fn get(&mut self, key: &str) -> Option<bool> {
        let object = self.master.get(at(self.now), key.as_bytes()).ok()?;
        assert_eq!(object.checksum, bound(CRC, key.as_bytes(), object.generation));
        assert_eq!(object.replicas.len(), 1);
        let replica = object.replicas[0];
        if replica.segment != self.disk {
            return Some(false);
        }
        let on_disk = self.found.get(&replica.addr).unwrap();
        assert_eq!(*on_disk, (key.to_owned(), object.generation), "the locator is that of the object");
        Some(true)
    }

    fn exists(&mut self, key: &str) -> bool {
        self.master.exists(key.as_bytes())
    }

    fn remove(&mut self, key: &str) -> Result<(), ErrorCode> {
        self.master.remove(at(self.now), key.as_bytes(), RemoveMode::Force)
    }

    fn stats(&self) -> Stats {
        self.master.stats()
    }
}

#[derive(Debug, Default)]
struct Work {
    demote: Vec<(String, u64, bool)>,
    forget: Vec<(String, u64)>,
    clear: Option<u64>,
}

#[test]
fn the_coldest_objects_are_copied_before_their_space_is_needed_and_stay_readable() {
    let mut store = Store::opened();
    store.fill(0..80);
    assert_eq!(store.work(), Vec::<String>::new(), "memory is not full to within the share that leaves");
    store.fill(80..ROOM as u32);
    let expected: Vec<String> = (0..20).map(|key| format!("key-{key}")).collect();
    assert_eq!(store.work(), expected, "the oldest fifth, the oldest first");
    assert_eq!(store.work(), Vec::<String>::new(), "nothing is written twice");
    store.now += 2_000;
    store.fill(200..210);
    for key in 0..10 {
        assert_eq!(store.get(&format!("key-{key}")), Some(true), "evicted, and on the disk");
        assert!(store.exists(&format!("key-{key}")));
    }
    assert_eq!(store.get("key-10"), Some(false), "copied, and still in memory");
    let stats = store.stats();
    assert_eq!((stats.demotions_total, stats.disk_objects, stats.evictions_to_disk_total), (20, 20, 10));
    assert_eq!((stats.disk_hits_total, stats.objects_lost_total), (10, 0));
}

#[test]
fn the_backlog_is_what_should_be_on_a_disk_and_is_not() {
    let mut store = Store::opened();
    let backlog = |store: &Store| store.stats().disk_backlog_bytes / LEN;
    store.fill(0..80);
    assert_eq!(backlog(&store), 0, "nothing is to leave yet");
    store.fill(80..ROOM as u32);
    assert_eq!(backlog(&store), 20, "nothing has been chosen yet");
    let work = store.fetch(5);
    assert_eq!((work.demote.len(), backlog(&store)), (5, 20), "all are chosen, and five are being written");
    for (key, generation, _) in work.demote {
        store.demoted(&key, generation).unwrap();
    }
    assert_eq!(backlog(&store), 15);
    store.work();
    assert_eq!(backlog(&store), 0);
    store.now += 2_000;
    store.fill(200..205);
    assert_eq!(backlog(&store), 5, "five that had their copies were evicted");
    store.lose_node();
    assert_eq!(backlog(&store), 0, "without a disk nothing waits for one");
}

#[test]
fn eviction_does_not_wait_for_a_disk_and_what_was_evicted_meanwhile_does_not_count() {
    let mut store = Store::opened();
    store.fill(0..ROOM as u32);
    let work = store.fetch(1_000);
    assert_eq!(work.demote.len(), 20);
    store.now += 2_000;
    store.fill(200..230);
    assert_eq!(store.get("key-0"), None, "evicted while it was written");
    let (key, generation, _) = &work.demote[0];
    store.demoted(key, *generation).unwrap();
    assert_eq!(store.get("key-0"), None, "its memory may have been written to while it was copied");
    assert_eq!(store.stats().demotions_failed_total, 1);
    let forget = store.fetch(1_000).forget;
    assert_eq!(forget, [(key.clone(), *generation)], "and it must not come back");
}

#[test]
fn an_object_that_is_read_before_its_eviction_stays_in_memory() {
    let mut store = Store::opened();
    store.fill(0..ROOM as u32);
    store.work();
    assert_eq!(store.get("key-3"), Some(false));
    store.now += 2_000;
    store.fill(200..250);
    assert_eq!(store.get("key-3"), Some(false), "the read made it the youngest");
    assert_eq!(store.get("key-4"), Some(true));
}

#[test]
fn an_order_is_given_again_until_its_end_is_reported_and_a_second_report_changes_nothing() {
    let mut store = Store::opened();
    store.fill(0..ROOM as u32);
    let first = store.fetch(5).demote;
    assert_eq!(store.fetch(5).demote, first);
    let (key, generation, proven) = first[0].clone();
    assert!(!proven);
    store.demoted(&key, generation).unwrap();
    let end = DiskEnd::Demoted { generation, result: Ok(5) };
    assert_eq!(store.end(end), Err(ErrorCode::TaskNotFound));
    assert_eq!(store.stats().disk_objects, 1);
    assert_eq!(store.fetch(5).demote.len(), 5);
}

#[test]
fn what_is_removed_is_gone_from_the_disk_too_and_its_node_is_told_until_it_confirms() {
    let mut store = Store::opened();
    store.fill(0..ROOM as u32);
    store.work();
    store.now += 2_000;
    store.fill(200..210);
    // One that is on the disk alone, and one that is in memory as well.
    for key in ["key-0", "key-15"] {
        store.remove(key).unwrap();
        assert_eq!((store.get(key), store.exists(key)), (None, false));
        assert_eq!(store.remove(key), Err(ErrorCode::KeyNotFound));
    }
    let forget = store.fetch(9).forget;
    assert_eq!(forget.iter().map(|(key, _)| &**key).collect::<Vec<_>>(), ["key-0", "key-15"]);
    assert_eq!(store.fetch(9).forget, forget, "until it confirms");
    store.end(DiskEnd::Forgotten { generation: forget[0].1 }).unwrap();
    assert_eq!(store.fetch(9).forget, forget[1..]);
    // Not confirmed yet: the disk announces it again.
    store.lose_node();
    store.start_node();
    assert_eq!(store.announce(), ["key-15"], "the other one was forgotten by the disk, and is adopted");
}

#[test]
fn a_key_that_is_put_again_has_nothing_old_on_the_disk() {
    let mut store = Store::opened();
    store.fill(0..ROOM as u32);
    store.work();
    store.now += 2_000;
    store.fill(200..210);
    let put = store.master.put_start(at(store.now), b"key-0", LEN, &PutOptions::DEFAULT);
    assert_eq!(put, Err(ErrorCode::ObjectAlreadyExists), "it is on the disk");
    let old = store.master.get(at(store.now), b"key-0").unwrap().generation;
    let options = PutOptions { existing: Existing::REPLACE, ..PutOptions::DEFAULT };
    let put = store.master.put_start(at(store.now), b"key-0", LEN, &options).unwrap();
    assert_eq!(store.get("key-0"), Some(true), "served until the upsert is committed");
    let checksum = bound(CRC, b"key-0", put.generation);
    store.master.put_end(at(store.now), b"key-0", put.generation, checksum).unwrap();
    assert_eq!(store.get("key-0"), Some(false));
    assert_eq!(store.fetch(9).forget, [("key-0".to_owned(), old)]);
}

#[test]
fn after_a_restart_of_the_node_its_objects_are_known_again() {
    let mut store = Store::opened();
    store.fill(0..ROOM as u32);
    store.work();
    store.lose_node();
    assert_eq!((store.get("key-0"), store.exists("key-0")), (None, false), "out of reach");
    assert_eq!(store.stats().disks_away, 1);
    store.start_node();
    assert_eq!(store.get("key-0"), None, "not announced yet");
    assert_eq!(store.announce(), Vec::<String>::new());
    store.ready();
    for key in 0..20 {
        assert_eq!(store.get(&format!("key-{key}")), Some(true), "{key}");
    }
    assert_eq!(store.get("key-20"), None, "was in memory alone");
    let stats = store.stats();
    assert_eq!((stats.disk_objects, stats.disks, stats.disks_away), (20, 1, 0));
}

/// A second node takes the copies: the promotion does not end with the node of the disk.
#[test]
fn what_was_being_promoted_when_its_node_ended_is_read_from_the_disk_again() {
    for fetched in [false, true] {
        let mut store = Store::opened();
        store.fill(0..ROOM as u32);
        store.work();
        store.fill(200..210);
        let keys = (0..ROOM as u32).map(|key| format!("key-{key}"));
        let evicted: Vec<String> = keys.filter(|key| store.get(key) == Some(true)).collect();
        store.mount_memory(2, 1);
        assert!(evicted.iter().chain(&evicted).all(|key| store.get(key) == Some(true)));
        store.master.handle_timeout(at(store.now));
        assert!(store.stats().promotions_total > 0);
        if fetched {
            let (node, incarnation) = (NodeId::new(2), Incarnation::new(1));
            let fetch = FetchRequest { node, incarnation, count_max: 4, key: 0 };
            assert!(!store.master.fetch_tasks(at(store.now), &fetch).unwrap().is_empty());
        }
        // Before the master has noticed: the first mount of a new incarnation drops the old one.
        let first = store.disk;
        store.start_node();
        assert_ne!(store.disk, first);
        assert!(evicted.iter().all(|key| store.get(key).is_none() && !store.exists(key)), "not announced");
        store.announce();
        store.ready();
        assert!(evicted.iter().all(|key| store.get(key) == Some(true)), "fetched: {fetched}");
        let report = store.master.task_report();
        assert_eq!((report.pending, report.processing), (0, 0));
    }
}

#[test]
fn packs_are_read_without_their_node_and_what_is_removed_meanwhile_stays_removed() {
    let mut store = Store::new();
    store.shared = "/mnt/kv/default/07070707";
    store.lose_node();
    store.start_node();
    store.ready();
    store.fill(0..ROOM as u32);
    store.work();
    let info = |store: &Store, disk| {
        store
            .master
            .segment(disk)
            .map(|info| (info.shared.to_owned(), info.stage.to_owned(), info.extent_bytes))
    };
    let (first, path) = (store.disk, store.shared.to_owned());
    assert_eq!(info(&store, first), Some((path.clone(), "n1:2".into(), EXTENT)));
    store.lose_node();
    assert_eq!((store.get("key-0"), store.exists("key-0")), (Some(true), true));
    assert_eq!(info(&store, first), Some((path.clone(), String::new(), EXTENT)), "no node serves it");
    let generation = store.master.get(at(store.now), b"key-1").unwrap().generation;
    store.master.remove(at(store.now), b"key-1", RemoveMode::Force).unwrap();
    assert_eq!(store.get("key-1"), None);
    store.start_node();
    assert_ne!(store.disk, first);
    assert_eq!(store.get("key-0"), Some(false), "still where it was, while its successor looks");
    assert_eq!(store.announce(), ["key-1"]);
    store.ready();
    assert_eq!(store.get("key-0"), Some(true));
    assert_eq!(info(&store, first), None, "its successor has another number");
    assert_eq!(store.fetch(9).forget, [("key-1".to_owned(), generation)]);
    store.now += 200_000;
    store.master.handle_timeout(at(store.now));
    store.now += 200_000;
    store.master.handle_timeout(at(store.now));
    assert!(!store.exists("key-0"), "a directory that no node takes over is forgotten");
}

#[test]
fn nothing_is_queued_for_a_disk_that_its_node_writes_nothing_to() {
    let mut store = Store::opened();
    store.fill(0..ROOM as u32);
    let fetch = |store: &mut Store, bytes_max| {
        let (node, incarnation) = (NodeId::new(1), Incarnation::new(store.incarnation));
        let fetch = FetchRequest { node, incarnation, count_max: 1, key: 0 };
        let fetch = FetchDisk { fetch, disk: store.disk, bytes_max };
        store.call::<FetchDiskOrders>(&mut Vec::new(), &fetch, vec![]).unwrap().len()
    };
    assert_eq!(fetch(&mut store, 1), 1);
    assert!(store.stats().disk_backlog_bytes > LEN, "more waits");
    fetch(&mut store, 0);
    let waits = store.stats().disk_backlog_bytes;
    assert_eq!(waits, 0, "nothing waits for it");
    store.fill(100..140);
    assert!(store.fetch(64).demote.len() > 1, "it takes objects again");
}

#[test]
fn what_a_disk_does_not_announce_is_gone_when_it_is_ready() {
    let mut store = Store::opened();
    store.fill(0..ROOM as u32);
    store.work();
    store.lose_node();
    store.start_node();
    store.found.retain(|_, (key, _)| key != "key-7");
    store.announce();
    assert_eq!(store.stats().disk_objects, 20);
    store.ready();
    assert_eq!(store.stats().disk_objects, 19);
    assert_eq!(store.get("key-7"), None);
    store.put("key-7");
}

#[test]
fn what_is_removed_while_its_disk_is_away_does_not_come_back() {
    let mut store = Store::opened();
    store.fill(0..ROOM as u32);
    store.work();
    store.lose_node();
    store.remove("key-1").unwrap();
    store.start_node();
    store.remove("key-2").unwrap();
    assert_eq!(store.announce(), ["key-1", "key-2"]);
    store.ready();
    assert_eq!((store.get("key-1"), store.get("key-2"), store.get("key-3")), (None, None, Some(true)));
    assert_eq!(store.fetch(9).forget.len(), 2);
    // Twice in a row, and the second time before the disk was ready.
    store.lose_node();
    store.start_node();
    store.lose_node();
    store.remove("key-3").unwrap();
    store.start_node();
    assert_eq!(store.announce(), ["key-1", "key-2", "key-3"]);
}

#[test]
fn a_removal_during_a_put_takes_the_older_object_off_a_disk_that_is_away() {
    let mut store = Store::opened();
    store.fill(0..ROOM as u32);
    store.work();
    store.lose_node();
    store.mount_memory(2, 1);
    let start = |store: &mut Store, key: &str| {
        store.master.put_start(at(store.now), key.as_bytes(), LEN, &PutOptions::DEFAULT).unwrap()
    };
    let put = start(&mut store, "key-1");
    store.remove("key-1").unwrap();
    let checksum = bound(CRC, b"key-1", put.generation);
    let ended = store.master.put_end(at(store.now), b"key-1", put.generation, checksum);
    assert_eq!(ended, Err(ErrorCode::PutIsOver));
    // A put that is given up removes nothing.
    let put = start(&mut store, "key-2");
    store.master.put_revoke(at(store.now), b"key-2", put.generation, WriterState::Quiet).unwrap();
    store.start_node();
    assert_eq!(store.announce(), ["key-1"], "what is not to be adopted");
    store.ready();
    assert_eq!((store.get("key-1"), store.get("key-2")), (None, Some(true)));
}

#[test]
fn what_was_being_written_when_its_node_died_counts_only_if_it_is_still_there() {
    let mut store = Store::opened();
    store.fill(0..ROOM as u32);
    let orders = store.fetch(3).demote;
    // Written, and not reported. The object is removed meanwhile, and the removal finds no record.
    for (key, generation, _) in &orders {
        store.write(key, *generation);
    }
    store.remove("key-0").unwrap();
    store.lose_node();
    store.start_node();
    assert_eq!(store.announce(), ["key-0", "key-1", "key-2"], "the node's death took the objects in memory");
}

#[test]
fn a_disk_that_was_away_for_too_long_is_cleared() {
    let mut store = Store::opened();
    store.fill(0..ROOM as u32);
    store.work();
    store.lose_node();
    store.now += 60_001;
    store.master.handle_timeout(at(store.now));
    assert_eq!((store.stats().disks_away, store.stats().disk_objects), (0, 0), "forgotten");
    assert_eq!(store.remove("key-0"), Err(ErrorCode::KeyNotFound));
    store.start_node();
    store.announce();
    assert_eq!(store.get("key-0"), None, "a removal may have been missed");
    store.ready();
    let ticket = store.fetch(9).clear.unwrap();
    assert_eq!(store.fetch(9).clear, Some(ticket));
    store.fill(300..400);
    assert!(store.fetch(99).demote.is_empty(), "not before it is cleared");
    store.end(DiskEnd::Cleared { ticket }).unwrap();
    assert_eq!(store.end(DiskEnd::Cleared { ticket }), Err(ErrorCode::TaskNotFound));
    store.found.clear();
    assert_eq!((store.fetch(9).clear, store.work().len()), (None, 20));
    store.lose_node();
    store.start_node();
    assert_eq!(store.announce(), Vec::<String>::new());
    assert_eq!(store.stats().disk_objects, 20, "what was written since counts");
}

#[test]
fn an_extent_that_is_given_up_takes_its_objects_with_it_and_no_others() {
    let mut store = Store::opened();
    store.next = EXTENT * 3 - 10 * 2 * LEN;
    store.fill(0..ROOM as u32);
    store.work();
    store.now += 2_000;
    store.fill(200..220);
    let proof = store.proof();
    store.call::<ReclaimExtents>(&mut Vec::new(), &proof, vec![2]).unwrap();
    for key in 0..20 {
        let here = (key >= 10).then_some(true);
        assert_eq!(store.get(&format!("key-{key}")), here, "{key}");
    }
    assert_eq!(store.stats().disk_reclaimed_total, 10);
    assert!(store.fetch(9).forget.is_empty(), "the bytes are gone");
    store.put("key-0");
}

#[test]
fn objects_of_unknown_tenants_older_and_impossible_ones_are_not_adopted() {
    let mut store = Store::new();
    store.put("first");
    let generation = store.put("key");
    assert_eq!(store.adopt(4_096, "key", generation - 1), Adoption::Forget, "an older one");
    assert_eq!(store.adopt(4_096, "key", generation), Adoption::Adopted, "in memory as well");
    assert_eq!(store.adopt(4_096, "", 9), Adoption::Refused(ErrorCode::InvalidParams));
    let proof = store.proof();
    let tenant = TenantTag::of("no one");
    let found = FoundObject { tenant, key: Key(b"k"), generation: 9, len: 5, crc32c: 0, locator: 1 };
    let answer = store.call::<AdoptObjects>(&mut Vec::new(), &proof, vec![found]).unwrap();
    assert_eq!(answer, [Adoption::Refused(ErrorCode::TenantNotRegistered)]);
    // What comes later has a higher generation than anything that was found.
    let high = generation + 1_000_000;
    assert_eq!(store.adopt(8_192, "high", high), Adoption::Adopted);
    assert!(store.put("next") > high);
    assert_eq!(store.adopt(12_288, "high", high - 1), Adoption::Forget);
    assert_eq!(store.adopt(12_288, "high", high + 1), Adoption::Adopted, "a newer one replaces it");
}

#[test]
fn a_disk_belongs_to_one_live_node_and_requests_need_its_key() {
    let mut store = Store::opened();
    let other = MountSegment {
        node: NodeId::new(2),
        incarnation: Incarnation::new(1),
        name: "n2",
        endpoint: "n2:1",
        len: 1 << 20,
        key: 5,
        ..MountSegment::default()
    };
    store.master.mount(at(store.now), &other).unwrap().mounted().unwrap();
    let mount = MountDisk {
        shared: "",
        node: NodeId::new(2),
        incarnation: Incarnation::new(1),
        key: 5,
        uuid: [7; 16],
        bytes: 1,
        extent_bytes: EXTENT,
        endpoint: "n2:1",
        stage: "n2:2",
        ..MountDisk::default()
    };
    let mut try_with = |change: &dyn Fn(&mut MountDisk<'_>)| {
        let mut mount = mount;
        change(&mut mount);
        store.master.mount_disk(at(1_000), &mount)
    };
    assert_eq!(try_with(&|_| {}), Err(ErrorCode::SegmentAlreadyExists));
    assert_eq!(try_with(&|mount| mount.key = 6), Err(ErrorCode::IllegalClient));
    assert_eq!(try_with(&|mount| mount.lineage = 9), Err(ErrorCode::IllegalClient));
    assert_eq!(try_with(&|mount| mount.incarnation = Incarnation::new(2)), Err(ErrorCode::ClientNotFound));
    assert_eq!(try_with(&|mount| mount.node = NodeId::new(3)), Err(ErrorCode::ClientNotFound));
    assert_eq!(try_with(&|mount| mount.extent_bytes = 0), Err(ErrorCode::InvalidParams));
    assert_eq!(try_with(&|mount| mount.stage = ""), Err(ErrorCode::InvalidParams));
    assert!(try_with(&|mount| mount.uuid = [8; 16]).is_ok());
    let other = DiskProof { node: NodeProof { node: NodeId::new(2), key: 5 }, disk: store.disk };
    let answer = store.call::<DiskReady>(&mut Vec::new(), &other, vec![]);
    assert_eq!(answer.unwrap_err(), ErrorCode::SegmentNotFound);
}

#[test]
fn listings_and_bulk_removals_see_the_objects_on_disks_once() {
    let mut store = Store::opened();
    store.fill(0..ROOM as u32);
    store.work();
    store.now += 2_000;
    store.fill(200..210);
    let mut keys = Vec::new();
    let mut cursor = 0;
    loop {
        let query = ListQuery { prefix: Key(b""), cursor, limit: 7 };
        cursor = store.master.list_of(at(store.now), 0.into(), &query, |listed| {
            keys.push(listed.key.0.to_vec());
            true
        });
        if cursor == 0 {
            break;
        }
    }
    let listed = keys.len();
    keys.sort();
    keys.dedup();
    assert_eq!((listed, keys.len()), (110, 110));
    let mut found = 0;
    loop {
        let query = FindQuery { pattern: "^key-[0-9]$", cursor, limit: 3 };
        cursor = store
            .master
            .find(at(store.now), 0.into(), &query, |_| {
                found += 1;
                true
            })
            .unwrap();
        if cursor == 0 {
            break;
        }
    }
    assert_eq!(found, 10, "all of them are on the disk alone");
    let mut removed = 0;
    loop {
        let query = RemoveQuery { pattern: None, cursor, force: true };
        let page = store.master.remove_many(at(store.now), 0.into(), &query).unwrap();
        removed += page.removed;
        cursor = page.cursor;
        if cursor == 0 {
            break;
        }
    }
    assert_eq!(removed, 110);
    let stats = store.stats();
    assert_eq!((stats.objects, stats.disk_objects, stats.disk_tombstones), (0, 0, 20));
}

#[test]
fn readers_that_agree_take_a_damaged_copy_off_the_disk() {
    let mut store = Store::opened();
    store.fill(0..ROOM as u32);
    store.work();
    store.now += 2_000;
    store.fill(200..210);
    let generation = store.master.get(at(store.now), b"key-0").unwrap().generation;
    let bad = BadReplica { key: Key(b"key-0"), generation, segment: store.disk };
    let mut report = |reporter| store.master.report_replica(at(5_000), reporter, 0.into(), &bad);
    assert_eq!(report(1), Ok(Verdict::Noted));
    assert_eq!(report(1), Ok(Verdict::Noted));
    assert_eq!(report(2), Ok(Verdict::Gone));
    assert_eq!(report(3), Err(ErrorCode::ObjectNotFound));
    assert_eq!(store.get("key-0"), None);
    // What the node itself cannot read is gone at once.
    let generation = store.master.get(at(store.now), b"key-1").unwrap().generation;
    let lost = DiskEnd::Lost { tenant: TenantTag::of("default"), key: Key(b"key-1"), generation };
    assert_eq!((store.end(lost), store.end(lost)), (Ok(()), Err(ErrorCode::ObjectNotFound)));
    let locator = store.master.get(at(store.now), b"key-2").unwrap().replicas[0].addr;
    store.end(DiskEnd::Dropped { from: locator, to: locator + 1 }).unwrap();
    assert_eq!((store.get("key-1"), store.get("key-2"), store.get("key-3")), (None, None, Some(true)));
    assert_eq!(store.stats().disk_lost_total, 3);
}
