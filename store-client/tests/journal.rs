//! A master with a journal that is killed and started again: what it has acknowledged is there, and what was
//! removed is gone, while nodes keep their memory and clients their connections' work.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{
    Process, client, eventually, master_config, node, own_host, pattern, role, say, wait_for_parent,
};
use store_client::{Client, PutOptions, PutRange, RemoveMode, RpcConfig, RpcConnection, Store as _};
use store_core::message::{ChangeConfig, ReadConfig};
use store_core::{ChangeHow, ConfigChange, ConfigChanges, MasterConfig};
use store_master::{BindError, Config, JournalError, MasterServer};

const ONE: PutOptions = PutOptions::DEFAULT;

/// Where children begin. As a test it does nothing.
#[test]
fn entry() {
    let Some(role) = role() else { return };
    if role[0] == "master" {
        be_master(&role);
    }
}

/// The role `master ADDR DIR SNAPSHOT_MIB LEASE_MS`.
fn be_master(role: &[String]) {
    let server = MasterServer::bind(journaled(
        role[1].parse().unwrap(),
        Path::new(&role[2]),
        role[3].parse().unwrap(),
        role[4].parse().unwrap(),
    ));
    let master = server.unwrap().spawn().unwrap();
    say(&master.rpc_addr().to_string());
    wait_for_parent();
    master.stop().unwrap();
}

fn journaled(listen: SocketAddr, dir: &Path, journal_snapshot_mib: u32, lease_ttl_ms: u32) -> Config {
    Config {
        rpc_listen: listen,
        journal: Some(dir.into()),
        journal_snapshot_mib,
        store: MasterConfig { lease_ttl_ms, ..MasterConfig::default() },
        ..master_config()
    }
}

/// A master that can be killed and started again at its address.
struct Killable {
    process: Process,
    addr: SocketAddr,
    dir: tempfile::TempDir,
    snapshot_mib: u32,
}

impl Killable {
    fn start(host: u8, snapshot_mib: u32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let process = Self::process(own_host(host), dir.path(), snapshot_mib, 5_000);
        let addr = process.said().parse().unwrap();
        Self { process, addr, dir, snapshot_mib }
    }

    fn process(addr: SocketAddr, dir: &Path, snapshot_mib: u32, lease_ms: u32) -> Process {
        let dir = dir.to_str().unwrap();
        let (addr, snapshot_mib, lease_ms) =
            (addr.to_string(), snapshot_mib.to_string(), lease_ms.to_string());
        Process::start("entry", &["master", &addr, dir, &snapshot_mib, &lease_ms])
    }

    fn start_again(&mut self) {
        self.process = Self::process(self.addr, self.dir.path(), self.snapshot_mib, 5_000);
    }

    fn kill_and_start_again(&mut self) {
        self.process.kill();
        self.start_again();
    }

    /// The file that commands are written to.
    fn last_file(&self) -> PathBuf {
        let mut files: Vec<PathBuf> =
            fs::read_dir(self.dir.path()).unwrap().map(|it| it.unwrap().path()).collect();
        files.retain(|path| path.extension().is_some_and(|extension| extension == "log"));
        files.sort();
        files.pop().unwrap()
    }

    /// Why a master does not start in this directory.
    fn refusal(&self) -> JournalError {
        let elsewhere = SocketAddr::new(self.addr.ip(), 0);
        match MasterServer::bind(journaled(elsewhere, self.dir.path(), 256, 5_000)) {
            Err(BindError::Journal(error)) => error,
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("it starts"),
        }
    }
}

fn value(key: u64) -> Vec<u8> {
    pattern(key, 10_000 + 100 * key as usize % 50_000)
}

#[test]
fn a_master_that_is_killed_goes_on_with_all_objects_and_no_node_mounts_its_memory_again() {
    let mut master = Killable::start(31, 256);
    let node = node("a", master.addr);
    let mut client = client(master.addr);
    for key in 0..40_u64 {
        assert!(client.put(&key.to_le_bytes(), &value(key), &ONE).unwrap());
    }
    for key in (0..40_u64).step_by(3) {
        client.remove(&key.to_le_bytes(), RemoveMode::Force).unwrap();
    }
    // A put that is half written, and one of which nothing is.
    let half = pattern(99, 300_000);
    let started = client.start_puts(&[(b"half", 300_000), (b"begun", 10)], &ONE);
    assert!(started.iter().all(Result::is_ok), "{started:?}");
    assert!(client.write_puts(&[PutRange::new(b"half", 0, &half[..200_000])])[0].is_ok());

    master.kill_and_start_again();
    for key in 0..40_u64 {
        let wanted = (key % 3 != 0).then(|| value(key));
        assert_eq!(client.get(&key.to_le_bytes()).unwrap(), wanted, "{key}");
    }
    // What was written before is not written again.
    assert!(client.write_puts(&[PutRange::new(b"half", 200_000, &half[200_000..])])[0].is_ok());
    assert!(client.end_puts(&[b"half"])[0].is_ok());
    assert_eq!(client.get(b"half").unwrap(), Some(half));
    assert_eq!(client.get(b"begun").unwrap(), None);
    assert!(client.put(b"after", b"value", &ONE).unwrap());
    assert_eq!(client.counters().checksum_mismatches, 0);

    // A second time, with what the second process has written.
    master.kill_and_start_again();
    assert_eq!(client.get(b"after").unwrap().as_deref(), Some(&b"value"[..]));
    assert_eq!(client.get(&1_u64.to_le_bytes()).unwrap(), Some(value(1)));
    eventually("the node is heard of", || client.master().stats().unwrap().nodes == 1);
    assert_eq!((node.status().mounts, client.master().stats().unwrap().mounts_total), (1, 1));
}

/// Bytes that the engine of a client has moved.
fn moved(client: &Client) -> u64 {
    client.engine_stats().rails.iter().map(|rail| rail.bytes).sum()
}

#[test]
fn a_put_whose_master_is_killed_before_its_end_is_ended_and_its_bytes_are_not_written_again() {
    let mut master = Killable::start(37, 256);
    let node = node("a", master.addr);
    let mut client = client(master.addr);
    let value = pattern(5, 300_000);
    for key in [&b"open"[..], b"again"] {
        assert!(client.start_puts(&[(key, 300_000)], &ONE)[0].is_ok());
        assert!(client.write_puts(&[PutRange::new(key, 0, &value[..])])[0].is_ok());
        let written = moved(&client);
        assert!(written >= 300_000);
        let lineage = RpcConnection::connect(master.addr.into(), RpcConfig::default()).unwrap();
        master.kill_and_start_again();
        assert!(client.end_puts(&[key])[0].is_ok());
        // The end writes the checksums of the pieces alone.
        assert!(moved(&client) - written < 1_000, "{} bytes after {written}", moved(&client));
        let after = RpcConnection::connect(master.addr.into(), RpcConfig::default()).unwrap();
        assert_eq!(lineage.welcome().reign(), after.welcome().reign());
        assert_eq!(client.get(key).unwrap().as_deref(), Some(&value[..]));
    }
    assert_eq!(node.status().mounts, 1);
}

#[test]
fn a_master_that_is_stopped_and_gets_other_settings_keeps_the_objects() {
    let mut master = Killable::start(32, 256);
    let node = node("a", master.addr);
    let mut client = client(master.addr);
    assert!(client.put(b"k", &value(1), &ONE).unwrap());
    master.process.stop();
    master.process = Killable::process(master.addr, master.dir.path(), 256, 777);
    assert_eq!(client.get(b"k").unwrap(), Some(value(1)));
    let mut rpc = RpcConnection::connect(master.addr.into(), RpcConfig::default()).unwrap();
    let (config, _): (MasterConfig, _) = rpc.call::<ReadConfig>(&(), std::iter::empty()).unwrap();
    assert_eq!(config.lease_ttl_ms, 777);
    // What is set while it serves stays, also when the settings are others.
    let changes = ConfigChanges { lease_ttl_ms: Some(555), ..ConfigChanges::default() };
    let change = ConfigChange { how: ChangeHow::Set, changes };
    rpc.call::<ChangeConfig>(&change, std::iter::empty()).unwrap();
    master.process.kill();
    master.process = Killable::process(master.addr, master.dir.path(), 256, 888);
    let mut rpc = RpcConnection::connect(master.addr.into(), RpcConfig::default()).unwrap();
    let (config, _): (MasterConfig, _) = rpc.call::<ReadConfig>(&(), std::iter::empty()).unwrap();
    assert_eq!(config.lease_ttl_ms, 555);
    // And again, from the snapshot that has the new ones.
    master.process.kill();
    master.process = Killable::process(master.addr, master.dir.path(), 256, 777);
    assert_eq!(client.get(b"k").unwrap(), Some(value(1)));
    assert_eq!(node.status().mounts, 1);
}

#[test]
fn an_end_that_was_not_written_completely_is_cut_off_and_damage_before_it_is_refused() {
    let mut master = Killable::start(33, 256);
    let _node = node("a", master.addr);
    let mut client = client(master.addr);
    for key in 0..10_u64 {
        assert!(client.put(&key.to_le_bytes(), &value(key), &ONE).unwrap());
    }
    master.process.kill();
    let path = master.last_file();
    let whole = fs::read(&path).unwrap();
    let record_of = |bytes: &[u8]| bytes[40..].to_vec();
    // The beginning of a record; bytes of an older file; zeros.
    for end in [&record_of(&whole)[..50], &[0xa5; 333], &[0; 4_096]] {
        fs::write(&path, [&whole[..], end].concat()).unwrap();
        master.start_again();
        assert_eq!(client.get(&9_u64.to_le_bytes()).unwrap(), Some(value(9)));
        assert!(client.put(b"more", b"value", &ONE).unwrap());
        client.remove(b"more", RemoveMode::Force).unwrap();
        master.process.kill();
        for entry in fs::read_dir(master.dir.path()).unwrap() {
            let other = entry.unwrap().path();
            if other.extension().is_some_and(|extension| extension == "log") && other != path {
                fs::remove_file(other).unwrap();
            }
        }
    }
    // In the middle of the file, in the head of the first record or in its commands.
    for offset in [44, 50, 72] {
        let mut damaged = whole.clone();
        damaged[offset] ^= 4;
        fs::write(&path, &damaged).unwrap();
        let error = master.refusal();
        let JournalError::Damaged { path: named, offset: at } = &error else { panic!("{error}") };
        assert!(*named == path && *at <= offset as u64, "{error}");
        assert!(error.to_string().contains("empty"), "it says what to do: {error}");
    }
    // A file that is missing between others.
    fs::write(&path, &whole).unwrap();
    master.start_again();
    // A change that is acknowledged is in the next file.
    assert!(client.put(b"more", b"value", &ONE).unwrap());
    master.process.kill();
    fs::remove_file(&path).unwrap();
    let error = master.refusal();
    assert!(matches!(error, JournalError::Gap { .. }), "{error}");
    // Files without a snapshot.
    for entry in fs::read_dir(master.dir.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "snap") {
            fs::remove_file(path).unwrap();
        }
    }
    assert!(matches!(master.refusal(), JournalError::NoSnapshot { .. }));
}

#[test]
fn a_damaged_snapshot_is_refused_and_so_is_a_directory_that_another_master_uses() {
    let mut master = Killable::start(34, 256);
    let error = master.refusal();
    assert!(matches!(&error, JournalError::Locked { dir } if dir == master.dir.path()), "{error}");
    let has_snapshot = || {
        let mut files = fs::read_dir(master.dir.path()).unwrap().map(|entry| entry.unwrap().path());
        files.any(|path| path.extension().is_some_and(|extension| extension == "snap"))
    };
    eventually("the first snapshot is written", has_snapshot);
    master.process.kill();
    for entry in fs::read_dir(master.dir.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "snap") {
            let mut bytes = fs::read(&path).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::write(&path, bytes).unwrap();
        }
    }
    let error = master.refusal();
    assert!(matches!(&error, JournalError::Snapshot { .. }), "{error}");
}

#[test]
fn snapshots_bound_the_journal_and_the_store_goes_on_from_them() {
    // One MiB: some thousand puts.
    let mut master = Killable::start(35, 1);
    let _node = node("a", master.addr);
    let mut client = client(master.addr);
    let key = |n: u64| format!("{n:0>500}").into_bytes();
    for n in 0..6_000_u64 {
        assert!(client.put(&key(n), b"value", &ONE).unwrap());
        if n % 2 == 0 {
            client.remove(&key(n), RemoveMode::Force).unwrap();
        }
    }
    let bytes = || -> u64 {
        let files = fs::read_dir(master.dir.path()).unwrap().map(|entry| entry.unwrap());
        let logs = files.filter(|entry| entry.path().extension().is_some_and(|extension| extension == "log"));
        logs.map(|entry| entry.metadata().unwrap().len()).sum()
    };
    eventually("old files are removed", || bytes() < 4 << 20);
    let taken = fs::read_dir(master.dir.path()).unwrap().any(|entry| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        name.starts_with("snapshot-") && name != "snapshot-0000000000000000.snap"
    });
    assert!(taken, "a snapshot was taken while it served");
    master.kill_and_start_again();
    for n in 0..6_000_u64 {
        assert_eq!(client.exists(&key(n)).unwrap(), n % 2 == 1, "{n}");
    }
    assert_eq!(client.get(&key(5_999)).unwrap().as_deref(), Some(&b"value"[..]));
}

/// There is room for all of them.
fn small(key: u64) -> Vec<u8> {
    pattern(key & 0xff, 300)
}

/// What is known of an object.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Known {
    There,
    Gone,
    /// A call has failed: it may have had an effect.
    Unknown,
}

/// Puts and removes until it is stopped; returns what is known of each key.
fn work(addr: SocketAddr, worker: u64, stop: &AtomicBool) -> (BTreeMap<u64, Known>, u64) {
    let mut client: Client = client(addr);
    let (mut known, mut acked) = (BTreeMap::new(), 0);
    let mut n = worker << 32;
    while !stop.load(Ordering::Acquire) {
        n += 1;
        let (key, removes) = if n.is_multiple_of(3) { (n - 2, true) } else { (n, false) };
        let done = if removes {
            client.remove(&key.to_le_bytes(), RemoveMode::Force).map(|_| Known::Gone)
        } else {
            client.put(&key.to_le_bytes(), &small(key), &ONE).map(|_| Known::There)
        };
        acked += u64::from(done.is_ok());
        known.insert(key, done.unwrap_or(Known::Unknown));
    }
    (known, acked)
}

#[test]
fn of_what_was_acknowledged_nothing_is_lost_and_nothing_comes_back_however_often_the_master_is_killed() {
    const KILLS: u32 = 40;
    let mut master = Killable::start(36, 1);
    let nodes = ["a", "b"].map(|name| node(name, master.addr));
    let stop = AtomicBool::new(false);
    let addr = master.addr;
    let found = std::thread::scope(|scope| {
        let stop = &stop;
        let workers = [1, 2].map(|worker| scope.spawn(move || work(addr, worker, stop)));
        let mut wait = 7_u64;
        for _ in 0..KILLS {
            wait = wait.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17);
            // timing: the master is killed at random times while it works
            std::thread::sleep(Duration::from_millis(20 + wait % 100));
            master.kill_and_start_again();
        }
        stop.store(true, Ordering::Release);
        workers.map(|worker| worker.join().unwrap())
    });
    let mut client = client(addr);
    let mut counts = [0; 3];
    for (known, _) in &found {
        for (key, known) in known {
            counts[*known as usize] += 1;
            match known {
                Known::There => {
                    let got = client.get(&key.to_le_bytes()).unwrap();
                    assert_eq!(got, Some(small(*key)), "{key:x} was acknowledged");
                }
                Known::Gone => {
                    assert_eq!(client.get(&key.to_le_bytes()).unwrap(), None, "{key:x} was removed")
                }
                Known::Unknown => {}
            }
        }
    }
    let stats = client.master().stats().unwrap();
    assert_eq!(stats.evictions_total, 0);
    println!("{KILLS} kills, {counts:?} there, gone, unknown");
    assert!(counts[0] > 100 && counts[1] > 50, "{counts:?}");
    assert!(nodes.iter().all(|node| node.status().mounts == 1));
}
