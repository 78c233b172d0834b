//! A node whose disk stalls or fails: it costs hits of what is on that disk, and nothing else.

use std::net::SocketAddr;
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use store_client::disk::{Caching, DiskFile, DiskOptions, DiskService, FormatOptions};
use store_client::{
    Client, ClientConfig, DiskList, Fabrics, Node, NodeConfig, NodeDiskConfig, PutOptions, RemoveMode, Stats,
    Store as _,
};
use store_core::MasterConfig;
use store_core::disk::{State, Why};
use store_master::MasterHandle;

use super::bench_disk::{Owner, PATIENCE};
use super::common::{MIB, eventually, master_with, pattern, with};
use super::dm::Mapped;

const OBJECT: usize = 256 << 10;
const BYTES: u64 = 64 * MIB;
/// More than memory has room for.
const OBJECTS: u64 = 60;
/// So many of them are surely on the disk then.
const DEMOTED: u64 = 34;
/// So many of the youngest may be in memory only, while objects are put.
const AHEAD: u64 = 24;
const NONE: [u64; 0] = [];
/// What a get waits for a disk at most.
const DEADLINE: Duration = Duration::from_secs(2);
/// How much later a get may end here: emulated processors on a busy machine stand still for seconds. Without
/// a deadline it would never end.
const MARGIN: Duration = Duration::from_secs(8);
/// What does not wait for the disk takes less.
const AT_ONCE: Duration = Duration::from_secs(1);
/// The disk tells that it has stalled after 5 s; some more.
const STALL: Duration = Duration::from_secs(7);

/// A store of one node with a disk, and a client.
struct Bench {
    node: Option<Node>,
    client: Client,
    master: MasterHandle,
    /// Closed after everything that uses it.
    disk: Mapped,
    sectors: u64,
    device: String,
}

impl Bench {
    fn new(name: &'static str, device: &str) -> Self {
        let sectors = BYTES / 512;
        let disk = Mapped::create(name, &format!("0 {sectors} linear {device} 0"));
        let wanted = FormatOptions {
            bytes: Some(BYTES),
            extent_bytes: Some(MIB as u32),
            force: true,
            caching: Caching::Direct,
        };
        let (file, geometry) = DiskFile::prepare(&disk.path(), wanted).unwrap();
        let owner = Owner::new(DiskService::format(file, geometry, DiskOptions::default(), 7).unwrap());
        assert!(owner.disk.close(PATIENCE));
        let config = MasterConfig {
            lease_ttl_ms: 2_000,
            lease_guard_ms: 0,
            demote_ahead: 0.3,
            ..MasterConfig::default()
        };
        let master = master_with(config);
        let node = Some(start(master.rpc_addr(), &disk.path()));
        let config = with(ClientConfig::new(master.rpc_addr().into()).fabrics(Fabrics::SHM), |config| {
            config.disk_deadline_ms = DEADLINE.as_millis() as u32;
        });
        let client = Client::connect(config).unwrap();
        Self { node, client, master, disk, sectors, device: device.to_owned() }
    }

    fn stats(&mut self) -> Stats {
        self.client.master().stats().unwrap()
    }

    fn state(&self) -> State {
        self.node.as_ref().unwrap().disks()[0].stats.state
    }

    /// Puts objects, slowly enough for the disk.
    fn fill(&mut self, numbers: Range<u64>) {
        let before = self.stats().demotions_total;
        for number in numbers.clone() {
            self.put(number);
            let expected = before + (number + 1 - numbers.start).saturating_sub(AHEAD);
            eventually("the disk keeps up", || self.stats().demotions_total >= expected);
        }
    }

    /// No put fails.
    fn put(&mut self, number: u64) {
        let put = self.client.put(&key(number), &pattern(number, OBJECT), &PutOptions::DEFAULT);
        assert!(matches!(put, Ok(true)), "put of {number}: {put:?}, {:?}", self.stats());
    }

    /// Reads an object: its bytes, or a miss, in time. Returns whether it is there, and how long it took.
    fn get(&mut self, number: u64) -> (bool, Duration) {
        let began = Instant::now();
        let read = self.client.get(&key(number)).unwrap();
        let took = began.elapsed(); // timing: a get ends at its deadline
        assert!(took < DEADLINE + MARGIN, "get of {number} took {took:?}");
        if let Some(bytes) = &read {
            assert!(*bytes == pattern(number, OBJECT), "{number} has other bytes");
        }
        (read.is_some(), took)
    }

    /// The objects that are there, of these.
    fn found(&mut self, numbers: impl IntoIterator<Item = u64>) -> Vec<u64> {
        numbers.into_iter().filter(|number| self.get(*number).0).collect()
    }

    /// Every one of these is there. Emulated processors may need more time than one get has.
    fn all_there(&mut self, numbers: impl IntoIterator<Item = u64>) {
        let mut missing: Vec<u64> = numbers.into_iter().collect();
        for _ in 0..4 {
            missing.retain(|number| !self.get(*number).0);
        }
        assert!(missing.is_empty(), "{missing:?} are missing: {:?}", self.stats());
    }

    /// Reads what is in memory; returns the median of the times.
    fn median(&mut self, numbers: Range<u64>) -> Duration {
        let mut times = Vec::new();
        for number in numbers.cycle().take(30) {
            let (found, took) = self.get(number);
            assert!(found, "{number} is in memory");
            times.push(took);
        }
        times.sort();
        times[times.len() / 2]
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // A test that fails in a stall ends it.
        self.disk.resume();
    }
}

fn start(master: SocketAddr, disk: &Path) -> Node {
    let disk = NodeDiskConfig { path: disk.to_owned(), bytes: None };
    let config = with(NodeConfig::new("a", master.into(), 8 * MIB).fabrics(Fabrics::SHM), |config| {
        config.disks = DiskList(vec![disk]);
        config.stage.memory_bytes = 8 * MIB;
    });
    let node = Node::start(config).unwrap();
    eventually("the disk is ready", || node.disks().iter().any(|disk| disk.ready));
    node
}

fn key(number: u64) -> Vec<u8> {
    format!("object-{number}").into_bytes()
}

pub(crate) fn a_disk_that_stalls_fails_no_put_and_holds_up_no_get_beyond_its_deadline(devices: &[&str]) {
    let mut bench = Bench::new("snowskin-stalls", devices[2]);
    bench.fill(0..OBJECTS);
    bench.all_there(0..10);
    let quiet = bench.median(OBJECTS - 5..OBJECTS);

    bench.disk.suspend();
    let began = Instant::now();
    // The first ones wait; when the disk has stalled for a while, gets and demotions are refused at once.
    assert_eq!(bench.found(20..24), NONE, "on a disk that does not answer");
    let stalled = bench.median(OBJECTS - 5..OBJECTS);
    let mut puts = 0;
    // timing: the time that the disk takes to notice.
    while puts < 40 || began.elapsed() < STALL {
        bench.put(1_000 + puts);
        assert!(bench.get(1_000 + puts).0, "what was just put is in memory");
        puts += 1;
    }
    let (found, took) = bench.get(25);
    let late = bench.median(995 + puts..1_000 + puts);
    println!(
        "a get from memory takes {quiet:.1?} in the median, {stalled:.1?} in the first seconds of a stall and \
         {late:.1?} later; {puts} puts in it; a get from the disk takes {took:.1?} then"
    );
    assert!(!found && took < AT_ONCE, "it is refused at once: {took:?}");
    assert!(stalled.max(late) < AT_ONCE, "memory does not wait for the disk");
    assert_eq!(bench.state(), State::Ready);

    bench.disk.resume();
    eventually("the disk is read again", || bench.get(20).0);
    bench.all_there(20..DEMOTED);
    let before = bench.stats().demotions_total;
    bench.fill(2_000..2_030);
    assert!(bench.stats().demotions_total > before);
    bench.node.take().unwrap().stop();
}

pub(crate) fn a_disk_that_fails_costs_its_own_objects_only(devices: &[&str]) {
    let mut bench = Bench::new("snowskin-fails", devices[2]);
    let Bench { sectors, device, .. } = &bench;
    let (good, no_writes, dead) = (
        format!("0 {sectors} linear {device} 0"),
        // Up for 0 s, down for 1 s, and so on.
        format!("0 {sectors} flakey {device} 0 0 1 1 error_writes"),
        format!("0 {sectors} error"),
    );
    bench.fill(0..OBJECTS);
    bench.client.remove(&key(1), RemoveMode::Force).unwrap();
    eventually("the removal is durable", || bench.stats().disk_tombstones == 0);

    bench.disk.becomes(&no_writes);
    for number in 1_000..1_040 {
        bench.put(number);
    }
    eventually("the disk is not written any more", || matches!(bench.state(), State::ReadOnly(_)));
    let why = bench.state();
    assert!(matches!(why, State::ReadOnly(Why::Errors | Why::Sync)), "{why:?}");
    bench.all_there(2..12);
    assert_eq!(bench.found([1]), NONE);

    bench.disk.becomes(&dead);
    // The master forgets what could not be read.
    assert_eq!(bench.found(12..16), NONE, "neither bytes nor an error");
    for number in 2_000..2_040 {
        bench.put(number);
        assert!(bench.get(number).0, "from memory");
    }
    println!("a disk with errors: {why:?}; {:?}", bench.node.as_ref().unwrap().disks()[0].stats.counters);

    bench.disk.becomes(&good);
    bench.node.take().unwrap().stop();
    eventually("the master notices", || bench.stats().disks_away == 1);
    bench.node = Some(start(bench.master.rpc_addr(), &bench.disk.path()));
    bench.all_there([0].into_iter().chain(2..12).chain(16..DEMOTED));
    assert_eq!(bench.found([1]), NONE, "it does not come back");
    bench.fill(3_000..3_030);
    bench.node.take().unwrap().stop();
}
