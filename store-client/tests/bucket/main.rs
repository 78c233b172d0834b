//! Packs in a bucket: real nodes and clients, and a real S3 server on the loopback ([`server`]).
//!
//! The settings of a store are in the environment of a process, so that this binary starts its server, sets
//! its environment, and runs its tests one after the other.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;
mod server;

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use common::{MIB, Process, client_over, eventually, master_with, pattern, role, say, wait_for_parent, with};
use libtest_mimic::{Arguments, Trial};
use server::{Fault, KEY_ID, SECRET, Server};
use store_client::disk::{DiskError, PackBucket};
use store_client::{
    Client, DiskKind, DiskList, Fabrics, Node, NodeConfig, NodeDiskConfig, PutOptions, RemoveMode, Stats,
    Store as _,
};
use store_core::MasterConfig;
use store_master::MasterHandle;

const OBJECT: usize = 256 << 10;

static SERVER: LazyLock<Server> = LazyLock::new(Server::new);

/// Tests by name.
const TESTS: &[(&str, fn())] = &[
    ("be_a_node_with_packs", be_a_node_with_packs),
    (
        "packs_are_read_while_their_node_is_there_and_after_it_was_killed_and_by_a_successor",
        packs_are_read_while_their_node_is_there_and_after_it_was_killed_and_by_a_successor,
    ),
    (
        "after_a_restart_of_everything_packs_are_announced_and_the_oldest_go_for_new_ones",
        after_a_restart_of_everything_packs_are_announced_and_the_oldest_go_for_new_ones,
    ),
    (
        "a_store_that_is_away_costs_hits_and_nothing_else_and_comes_back",
        a_store_that_is_away_costs_hits_and_nothing_else_and_comes_back,
    ),
    (
        "a_store_that_refuses_is_reported_and_memory_goes_on",
        a_store_that_refuses_is_reported_and_memory_goes_on,
    ),
    (
        "a_truncated_and_a_missing_pack_are_misses_whose_replicas_are_dropped",
        a_truncated_and_a_missing_pack_are_misses_whose_replicas_are_dropped,
    ),
    ("a_second_owner_is_refused", a_second_owner_is_refused),
    (
        "an_owner_that_was_replaced_while_it_was_stopped_writes_nothing_more",
        an_owner_that_was_replaced_while_it_was_stopped_writes_nothing_more,
    ),
    ("a_reader_does_not_wait_for_a_store_that_hangs", a_reader_does_not_wait_for_a_store_that_hangs),
];

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    // In a role, the environment is that of the process that has started this one.
    if role().is_none() && !arguments.list {
        let endpoint = format!("http://{}", SERVER.address());
        for (name, value) in [
            ("AWS_ENDPOINT_URL", endpoint.as_str()),
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ACCESS_KEY_ID", KEY_ID),
            ("AWS_SECRET_ACCESS_KEY", SECRET),
        ] {
            // SAFETY: this is the only thread of the process so far.
            unsafe { std::env::set_var(name, value) };
        }
        SERVER.start();
    }
    let run = |test: fn()| {
        move || {
            test();
            Ok(())
        }
    };
    let trials = TESTS.iter().map(|(name, test)| Trial::test(*name, run(*test))).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn config() -> MasterConfig {
    let config = MasterConfig {
        lease_ttl_ms: 2_000,
        lease_guard_ms: 0,
        demote_ahead: 0.3,
        node_ttl_ms: 2_000,
        ..MasterConfig::default()
    };
    with(config, |it| it.tasks.bad_reports_min = 1)
}

fn node_config(name: &str, master: SocketAddr, address: &Path) -> NodeConfig {
    let shared = NodeDiskConfig { path: address.to_owned(), bytes: Some(64 * MIB) };
    with(NodeConfig::new(name, master.into(), 8 * MIB), |it| {
        it.shared = DiskList(vec![shared]);
        it.shared_adopt_ms = 500;
        it.stage.memory_bytes = 8 * MIB;
    })
}

fn is_ready(node: &Node) -> bool {
    node.disks().iter().any(|disk| disk.ready && !disk.adopted)
}

fn adopted(node: &Node) -> usize {
    node.disks().iter().filter(|disk| disk.adopted && disk.ready).count()
}

fn start(name: &str, master: &MasterHandle, address: &Path) -> Node {
    let node = Node::start(node_config(name, master.rpc_addr(), address)).unwrap();
    eventually("its directory is ready", || is_ready(&node));
    node
}

/// The role `packs NAME MASTER ADDRESS`: a node in a process of its own.
fn be_a_node_with_packs() {
    let Some(role) = role() else { return };
    let node = Node::start(node_config(&role[1], role[2].parse().unwrap(), Path::new(&role[3]))).unwrap();
    eventually("its directory is ready", || is_ready(&node));
    say(node.endpoint());
    wait_for_parent();
    node.stop();
}

fn process(name: &str, master: &MasterHandle, address: &Path) -> Process {
    let master = master.rpc_addr().to_string();
    Process::start("be_a_node_with_packs", &["packs", name, &master, address.to_str().unwrap()])
}

fn client(master: &MasterHandle) -> Client {
    client_over(master.rpc_addr(), Fabrics::default())
}

fn value(number: usize) -> Vec<u8> {
    pattern(number as u64, OBJECT)
}

fn key(number: usize) -> Vec<u8> {
    format!("object-{number}").into_bytes()
}

fn stats(client: &mut Client) -> Stats {
    client.master().stats().unwrap()
}

/// Puts more than fits into memory, which is empty, slowly enough for the store.
fn fill(client: &mut Client, numbers: std::ops::Range<usize>) {
    let (first, before) = (numbers.start, stats(client).demotions_total);
    for number in numbers {
        put(client, number);
        let expected = before + (number + 1 - first).saturating_sub(24) as u64;
        eventually("the store keeps up", || stats(client).demotions_total >= expected);
    }
}

fn put(client: &mut Client, number: usize) {
    eventually("there is room", || {
        client.put(&key(number), &value(number), &PutOptions::DEFAULT).unwrap_or(false)
    });
}

fn read_all(client: &mut Client, numbers: std::ops::Range<usize>) -> usize {
    let mut found = 0;
    for number in numbers {
        if let Some(read) = client.get(&key(number)).unwrap() {
            assert!(read == value(number), "{number}");
            found += 1;
        }
    }
    found
}

/// The directories in a bucket.
fn directories(address: &Path) -> Vec<PathBuf> {
    PackBucket::list(&address.join("default")).unwrap()
}

/// The objects of the only directory whose names end so, oldest first.
fn objects(address: &Path, end: &str) -> Vec<PathBuf> {
    let found = directories(address);
    assert_eq!(found.len(), 1, "{found:?}");
    let entries = fs::read_dir(SERVER.files(&found[0])).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<PathBuf> = entries.filter(|path| path.to_str().unwrap().ends_with(end)).collect();
    found.sort();
    found
}

/// Puts until many objects were written to the store.
fn writes_on(client: &mut Client, first: usize) {
    let before = stats(client).demotions_total;
    let mut numbers = first..first + 2_000;
    eventually("it writes on", || {
        put(client, numbers.next().unwrap());
        stats(client).demotions_total >= before + 50
    });
}

/// Waits until everything that was written is in the bucket.
fn wait_for_syncs() {
    // timing: a sync is at most two seconds away, and nothing is written meanwhile.
    std::thread::sleep(Duration::from_secs(4));
}

fn packs_are_read_while_their_node_is_there_and_after_it_was_killed_and_by_a_successor() {
    let address = SERVER.bucket("kv-successor");
    let master = master_with(config());
    let mut client = client(&master);
    let mut node = process("a", &master, &address);
    fill(&mut client, 0..80);
    let objects = stats(&mut client).disk_objects as usize;
    assert!(objects >= 40, "{objects}");
    wait_for_syncs();
    assert_eq!(read_all(&mut client, 0..80), 80, "{:?}", stats(&mut client));
    let direct = client.counters().shared_hits;
    assert!(direct >= 20 && client.counters().disk_hits > 0, "{:?}", client.counters());
    node.kill();
    eventually("the master notices", || stats(&mut client).disks_away == 1);
    client.remove(&key(1), RemoveMode::Force).unwrap();
    let is_there = |number: &usize| client.get(&key(*number)).unwrap().is_some();
    let closed: Vec<usize> = (0..objects).filter(is_there).collect();
    assert!(closed.len() + 24 >= objects && closed.len() >= 20, "{} of {objects}", closed.len());
    assert!(client.counters().shared_hits > direct);
    assert_eq!(client.counters().shared_lost, 0, "what is not closed is not lost");
    // A client that never knew the node.
    let mut other = self::client(&master);
    for number in &closed {
        assert!(other.get(&key(*number)).unwrap() == Some(value(*number)), "{number}");
    }
    assert_eq!(other.counters().shared_hits, closed.len() as u64);
    assert_eq!(other.get(&key(1)).unwrap(), None, "it was removed");

    // Another node takes the directory over, with what was not closed. What was removed stays removed.
    client.remove(&key(2), RemoveMode::Force).unwrap();
    let successor = start("b", &master, &address);
    eventually("the directory is adopted", || adopted(&successor) == 1);
    assert!(successor.disks().iter().all(|disk| disk.kind == DiskKind::Shared));
    eventually("nothing is away", || stats(&mut client).disks_away == 0);
    let known = (0..objects).filter(|number| other.get(&key(*number)).unwrap().is_some()).count();
    assert_eq!(known, objects - 2, "everything that was synced");
    eventually("the removals are confirmed", || stats(&mut client).disk_tombstones == 0);
    successor.stop();
    // The first node is back. Its directory belongs to another one that is stopped: it gets one of its own,
    // and adopts the others.
    let node = start("a", &master, &address);
    eventually("both directories are adopted", || adopted(&node) == 2);
    for number in [1, 2] {
        assert_eq!(client.get(&key(number)).unwrap(), None, "nor after another adoption");
    }
    let again = (0..objects).filter(|number| client.get(&key(*number)).unwrap().is_some()).count();
    assert_eq!(again, known);
    node.stop();
}

fn after_a_restart_of_everything_packs_are_announced_and_the_oldest_go_for_new_ones() {
    let address = SERVER.bucket("kv-restart");
    let master = master_with(config());
    let mut client = client(&master);
    let node = start("a", &master, &address);
    fill(&mut client, 0..80);
    let known = stats(&mut client).disk_objects as usize;
    client.remove(&key(3), RemoveMode::Force).unwrap();
    eventually("the removal is confirmed", || stats(&mut client).disk_tombstones == 0);
    node.stop();
    drop((client, master));
    let master = master_with(config());
    let mut client = self::client(&master);
    let node = start("a", &master, &address);
    let found = read_all(&mut client, 0..80);
    assert!(found + 2 >= known && known >= 40, "{found} of {known}");
    assert_eq!(client.get(&key(3)).unwrap(), None);
    // It writes on, and the oldest packs go when the room is used up.
    fill(&mut client, 80..400);
    assert!(objects(&address, ".pack").len() <= 64);
    assert!(stats(&mut client).disk_reclaimed_total > 0);
    let bytes: u64 = objects(&address, "").iter().map(|path| path.metadata().unwrap().len()).sum();
    assert!(bytes <= 70 * MIB, "{bytes}");
    node.stop();
}

fn a_store_that_is_away_costs_hits_and_nothing_else_and_comes_back() {
    let address = SERVER.bucket("kv-away");
    let master = master_with(config());
    let mut client = client(&master);
    let node = start("a", &master, &address);
    fill(&mut client, 0..80);
    wait_for_syncs();
    let known = stats(&mut client).disk_objects;
    let before = read_all(&mut client, 0..80);
    assert_eq!(before, 80);
    SERVER.stop();
    // Puts and gets of what is in memory go on; what is in the bucket alone is a miss.
    let mut other = self::client(&master);
    let found = read_all(&mut other, 0..80);
    assert!((8..60).contains(&found), "{found}");
    for number in 100..160 {
        put(&mut client, number);
        assert!(client.get(&key(number)).unwrap() == Some(value(number)), "{number}");
    }
    assert!(stats(&mut client).disk_lost_total == 0, "a store that is away has lost nothing");
    SERVER.start();
    // A client that did not reach it waits before it tries again.
    eventually("hits again", || {
        (0..40).all(|number| other.get(&key(number)).unwrap() == Some(value(number)))
    });
    assert!(stats(&mut client).disk_objects >= known, "{:?}", stats(&mut client));
    writes_on(&mut client, 200);
    node.stop();
}

fn a_store_that_refuses_is_reported_and_memory_goes_on() {
    let address = SERVER.bucket("kv-refused");
    let cluster = address.join("default");
    for (status, code, advice) in [
        (403, "AccessDenied", "s3:PutObject"),
        (403, "RequestTimeTooSkewed", "NTP"),
        (403, "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
        (404, "NoSuchBucket", "there is no such bucket"),
        (503, "SlowDown", "fewer requests"),
        (301, "PermanentRedirect", "AWS_REGION"),
        (500, "InternalError", "look at its log"),
    ] {
        SERVER.set_fault("kv-refused", Some(Fault::Refuse(status, code)));
        let text = PackBucket::create(&cluster, 64 * MIB, None, "a").unwrap_err().to_string();
        assert!(text.contains(advice) && !text.contains(SECRET) && !text.contains(KEY_ID), "{text}");
    }
    SERVER.set_fault("kv-refused", Some(Fault::Agree));
    let text = PackBucket::create(&cluster, 64 * MIB, None, "a").unwrap_err().to_string();
    assert!(text.contains("If-None-Match"), "{text}");
    SERVER.set_fault("kv-refused", Some(Fault::Break));
    let text = PackBucket::list(&cluster).unwrap_err().to_string();
    assert!(text.contains("AWS_ENDPOINT_URL"), "{text}");
    SERVER.set_fault("kv-refused", None);

    // A node with such a bucket serves its memory.
    SERVER.set_fault("kv-refused", Some(Fault::Refuse(403, "AccessDenied")));
    let master = master_with(config());
    let mut client = client(&master);
    let node = Node::start(node_config("a", master.rpc_addr(), &address)).unwrap();
    for number in 0..60 {
        put(&mut client, number);
        assert!(client.get(&key(number)).unwrap() == Some(value(number)), "{number}");
    }
    assert!(!is_ready(&node));
    SERVER.set_fault("kv-refused", None);
    eventually("its directory is ready", || is_ready(&node));
    // Where the store begins to refuse later, it is the same.
    fill(&mut client, 100..160);
    SERVER.set_fault("kv-refused", Some(Fault::Refuse(503, "SlowDown")));
    for number in 200..260 {
        put(&mut client, number);
        assert!(client.get(&key(number)).unwrap() == Some(value(number)), "{number}");
    }
    SERVER.set_fault("kv-refused", None);
    writes_on(&mut client, 300);
    node.stop();
    // An address that has what belongs elsewhere is refused, and not repeated.
    let wrong = node_config("b", master.rpc_addr(), Path::new("s3://key:hidden@kv-refused"));
    let text = Node::start(wrong).err().unwrap().to_string();
    assert!(text.contains("AWS_SECRET_ACCESS_KEY") && !text.contains("hidden"), "{text}");
}

fn a_truncated_and_a_missing_pack_are_misses_whose_replicas_are_dropped() {
    let address = SERVER.bucket("kv-damaged");
    let master = master_with(config());
    let mut client = client(&master);
    let node = start("a", &master, &address);
    fill(&mut client, 0..80);
    wait_for_syncs();
    let packs = objects(&address, ".pack");
    assert!(packs.len() >= 8, "{}", packs.len());
    let file = fs::OpenOptions::new().write(true).open(&packs[0]).unwrap();
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    fs::remove_file(&packs[2]).unwrap();
    let mut reader = self::client(&master);
    let is_lost = |number: &usize| reader.get(&key(*number)).unwrap().is_none();
    let lost: Vec<usize> = (0..80).filter(is_lost).collect();
    assert!((4..=12).contains(&lost.len()), "{lost:?}");
    // The node tells the master what no client can read any more.
    for number in &lost {
        eventually("it is dropped", || !client.exists(&key(*number)).unwrap());
    }
    let found = 80 - lost.len();
    assert_eq!(read_all(&mut client, 0..80), found);
    node.stop();
    // What is intact in the truncated one is kept.
    let master = master_with(config());
    let node = start("a", &master, &address);
    let again = read_all(&mut self::client(&master), 0..80);
    assert!(again >= 30 && again <= found, "{again} of {found}");
    node.stop();
}

fn a_second_owner_is_refused() {
    let address = SERVER.bucket("kv-owners");
    let master = master_with(config());
    let node = start("first", &master, &address);
    let path = node.disks()[0].path.clone();
    assert!(directories(&address) == [path.as_path()]);
    // Other nodes leave it alone while it is there, whatever they wait.
    let other = start("other", &master, &address);
    // timing: longer than a node waits before it takes a directory, and the pause between two looks.
    std::thread::sleep(Duration::from_secs(8));
    assert_eq!(other.disks().len(), 1);
    assert_eq!(PackBucket::owner_of(&path).unwrap(), "first");
    assert!(node.disks()[0].ready);
    other.stop();
    node.stop();
    // Of two that the master has let in by mistake, one is told who was faster.
    let (mut one, mut two) = (PackBucket::open(&path).unwrap(), PackBucket::open(&path).unwrap());
    one.take("one").unwrap();
    let error = two.take("two").unwrap_err();
    assert!(matches!(error, DiskError::Owned { .. }) && error.to_string().contains("node one"), "{error}");
    assert_eq!(PackBucket::owner_of(&path).unwrap(), "one");
}

fn an_owner_that_was_replaced_while_it_was_stopped_writes_nothing_more() {
    let address = SERVER.bucket("kv-stopped");
    let master = master_with(config());
    let mut client = client(&master);
    let node = process("a", &master, &address);
    fill(&mut client, 0..60);
    wait_for_syncs();
    node.signal("STOP");
    eventually("the master gives it up", || stats(&mut client).disks_away == 1);
    let path = directories(&address).remove(0);
    let successor = start("b", &master, &address);
    eventually("the directory is adopted", || adopted(&successor) == 1);
    let list = || {
        let of = |entry: fs::DirEntry| (entry.file_name(), fs::read(entry.path()).unwrap());
        let mut files: Vec<_> =
            fs::read_dir(SERVER.files(&path)).unwrap().map(|entry| of(entry.unwrap())).collect();
        files.sort();
        files
    };
    let before = list();
    node.signal("CONT");
    // timing: what the former owner might do, it does by then.
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(PackBucket::owner_of(&path).unwrap(), "b");
    let names = |files: &[(std::ffi::OsString, Vec<u8>)]| {
        files.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>()
    };
    let after = list();
    assert_eq!(names(&after), names(&before));
    assert!(after == before, "no byte has changed");
    assert_eq!(read_all(&mut client, 0..20), 20);
    drop(node);
    successor.stop();
}

fn a_reader_does_not_wait_for_a_store_that_hangs() {
    let address = SERVER.bucket("kv-hangs");
    let master = master_with(config());
    let mut client = client(&master);
    let mut node = process("a", &master, &address);
    fill(&mut client, 0..60);
    wait_for_syncs();
    node.kill();
    eventually("the master notices", || stats(&mut client).disks_away == 1);
    SERVER.set_fault("kv-hangs", Some(Fault::Hang));
    let began = Instant::now();
    assert_eq!(client.get(&key(0)).unwrap(), None);
    // timing: a request to the store would take 10 seconds.
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    SERVER.set_fault("kv-hangs", None);
    eventually("a hit again", || client.get(&key(0)).unwrap() == Some(value(0)));
}
