//! Nodes with disks: what no longer fits into memory is read from the disk, and is still there after a
//! restart.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use common::{MIB, client_over, master_with, pattern, with};
use store_client::{
    Client, DiskCopy, DiskList, ErrorCode, Fabrics, Node, NodeConfig, NodeDiskConfig, Prefetched, PutOptions,
    RemoveMode, Retention, RpcConfig, RpcConnection, Stats, Store as _,
};
use store_core::message::{Get, LeaseWanted, Segments, Stage, StageItem, StageRequest};
use store_core::{Key, MasterConfig};
use store_master::MasterHandle;
use te_fabric::testkit::eventually;

const OBJECT: usize = 256 << 10;

fn config() -> MasterConfig {
    MasterConfig { lease_ttl_ms: 2_000, lease_guard_ms: 0, demote_ahead: 0.3, ..MasterConfig::default() }
}

fn node_config(master: SocketAddr, disk: &Path, fabrics: Fabrics) -> NodeConfig {
    let disk = NodeDiskConfig { path: disk.to_owned(), bytes: Some(64 * MIB) };
    with(NodeConfig::new("a", master.into(), 8 * MIB).fabrics(fabrics), |it| {
        it.disks = DiskList(vec![disk]);
        it.stage.memory_bytes = 8 * MIB;
    })
}

fn start(master: &MasterHandle, disk: &Path, fabrics: Fabrics) -> Node {
    let node = Node::start(node_config(master.rpc_addr(), disk, fabrics)).unwrap();
    eventually("the disk is ready", || node.disks().iter().any(|disk| disk.ready));
    node
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

/// Puts more than fits into memory, slowly enough for the disk.
fn fill(client: &mut Client, numbers: std::ops::Range<usize>) {
    for number in numbers {
        eventually("there is room", || {
            client.put(&key(number), &value(number), &PutOptions::DEFAULT).unwrap_or(false)
        });
        // The oldest of what is in memory is on the disk before its space is needed.
        let expected = (number + 1).saturating_sub(24) as u64;
        eventually("the disk keeps up", || stats(client).demotions_total >= expected);
    }
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

#[test]
fn what_does_not_fit_into_memory_is_read_from_the_disk() {
    for fabrics in [Fabrics::TCP, Fabrics::SHM] {
        let dir = tempfile::tempdir().unwrap();
        let master = master_with(config());
        let node = start(&master, &dir.path().join("disk"), fabrics);
        let mut client = client_over(master.rpc_addr(), fabrics);
        fill(&mut client, 0..80);
        let before = stats(&mut client);
        assert!(before.disk_objects >= 40 && before.evictions_to_disk_total >= 40, "{before:?}");
        assert_eq!(read_all(&mut client, 0..80), 80, "{fabrics}: {:?}", stats(&mut client));
        let after = stats(&mut client);
        assert!(after.disk_hits_total > before.disk_hits_total, "{after:?}");
        assert!(node.stage().staged_total > 0);
        // A removed object is gone from both tiers.
        client.remove(&key(0), RemoveMode::Force).unwrap();
        assert_eq!(client.get(&key(0)).unwrap(), None);
        drop(client);
        node.stop();
    }
}

#[test]
fn objects_on_the_disk_survive_a_restart_of_the_node_and_removed_ones_do_not_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk");
    let master = master_with(config());
    let mut client = client_over(master.rpc_addr(), Fabrics::default());
    let node = start(&master, &disk, Fabrics::default());
    fill(&mut client, 0..80);
    let objects = stats(&mut client).disk_objects as usize;
    node.stop();
    eventually("the master notices", || stats(&mut client).disks_away == 1);
    client.remove(&key(1), RemoveMode::Force).unwrap();
    let node = start(&master, &disk, Fabrics::default());
    client.remove(&key(2), RemoveMode::Force).unwrap();
    let found = read_all(&mut client, 0..80);
    assert!(found + 2 >= objects && objects >= 40, "{found} of {objects}");
    for number in [1, 2] {
        assert_eq!(client.get(&key(number)).unwrap(), None);
    }
    eventually("the removals are confirmed", || stats(&mut client).disk_tombstones == 0);
    node.stop();
    let node = start(&master, &disk, Fabrics::default());
    for number in [1, 2] {
        assert_eq!(client.get(&key(number)).unwrap(), None, "nor after another restart");
    }
    assert!(read_all(&mut client, 0..80) + 2 >= objects);
    node.stop();
}

/// What a reader asks for, and with which length, decides nothing about the objects of others.
#[test]
fn a_reader_that_makes_up_lengths_and_locators_has_no_object_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let master = master_with(config());
    let node = start(&master, &dir.path().join("disk"), Fabrics::default());
    let mut client = client_over(master.rpc_addr(), Fabrics::default());
    fill(&mut client, 0..80);
    let mut rpc = RpcConnection::connect(master.rpc_addr().into(), RpcConfig::default()).unwrap();
    let (_, infos) = rpc.call::<Segments>(&(), std::iter::empty()).unwrap();
    let found = infos.flatten().find(|info| info.extent_bytes > 0);
    let (disk, extent_bytes, service) =
        found.map(|info| (info.segment, info.extent_bytes, info.stage.to_owned())).unwrap();
    let keys: Vec<Vec<u8>> = (0..40).map(key).collect();
    let (_, objects) = rpc.call::<Get>(&LeaseWanted::Quick, keys.iter().map(|key| Key(key))).unwrap();
    let replicas = objects.flatten().flat_map(|object| object.replicas.iter().copied().collect::<Vec<_>>());
    let places: Vec<u64> = replicas.filter(|it| it.segment == disk).map(|it| it.addr).collect();
    assert!(places.len() >= 20, "{places:?}");

    let mut stage = RpcConnection::connect(service.parse().unwrap(), RpcConfig::default()).unwrap();
    let mut ask = |locator: u64, len: u64| {
        let item = StageItem { disk, locator, len };
        let asked = stage.call::<Stage>(&StageRequest { deadline_ms: 2_000 }, std::iter::once(item));
        asked.unwrap().1.next().unwrap().map(|_| ())
    };
    let len = OBJECT as u64;
    for place in &places {
        for wrong in [1, 4_095, 2 * len] {
            assert_eq!(ask(*place, wrong), Err(ErrorCode::InvalidParams), "{place}, {wrong} bytes");
        }
        for wrong in [place + 512, place + 1_000 * extent_bytes] {
            assert_eq!(ask(wrong, len), Err(ErrorCode::ObjectNotFound), "{place}, at {wrong}");
        }
    }
    assert_eq!(ask(places[0], len), Ok(()));
    // What the node reports is in order, so that everything before a removal is known with it.
    client.remove(&key(79), RemoveMode::Force).unwrap();
    client.remove(&key(0), RemoveMode::Force).unwrap();
    eventually("the removal is confirmed", || stats(&mut client).disk_tombstones == 0);
    assert_eq!(stats(&mut client).disk_lost_total, 0, "{:?}", stats(&mut client));
    assert_eq!(read_all(&mut client, 1..79), 78);
    node.stop();
}

#[test]
fn an_object_that_is_read_from_the_disk_again_and_again_comes_back_into_memory() {
    let dir = tempfile::tempdir().unwrap();
    let master = master_with(config());
    let node = start(&master, &dir.path().join("disk"), Fabrics::default());
    let mut client = client_over(master.rpc_addr(), Fabrics::default());
    fill(&mut client, 0..60);
    eventually("the object is promoted", || {
        let read = client.get(&key(3)).unwrap();
        assert!(read == Some(value(3)), "a miss: {}, {:?}", read.is_none(), stats(&mut client));
        let replicas = client.master().replicas(&key(3)).unwrap();
        replicas.len() == 2
    });
    let hits = stats(&mut client).disk_hits_total;
    assert!(client.get(&key(3)).unwrap() == Some(value(3)));
    assert_eq!(stats(&mut client).disk_hits_total, hits, "from memory");
    node.stop();
}

#[test]
fn what_is_prefetched_is_read_from_memory() {
    let dir = tempfile::tempdir().unwrap();
    let master = master_with(config());
    let node = start(&master, &dir.path().join("disk"), Fabrics::default());
    let mut client = client_over(master.rpc_addr(), Fabrics::default());
    fill(&mut client, 0..60);
    let keys: Vec<Vec<u8>> = [0, 1, 2].map(key).to_vec();
    let nothing = b"nothing".to_vec();
    let wanted: Vec<&[u8]> = keys.iter().chain([&nothing]).map(|key| &**key).collect();
    assert_eq!(client.batch_prefetch(&wanted[3..]).unwrap(), [Prefetched::Absent]);
    let there = client.prefetch(&wanted, Duration::from_secs(10)).unwrap();
    assert_eq!(there, [true, true, true, false], "{:?}", stats(&mut client));
    let hits = stats(&mut client).disk_hits_total;
    assert_eq!(read_all(&mut client, 0..3), 3);
    assert_eq!(stats(&mut client).disk_hits_total, hits, "from memory");
    // Without a deadline it only asks.
    assert_eq!(client.prefetch(&[&key(4)], Duration::ZERO).unwrap(), [false]);
    node.stop();
}

#[test]
fn a_put_may_ask_for_a_copy_on_the_disk_at_once_or_for_none() {
    let dir = tempfile::tempdir().unwrap();
    let master = master_with(config());
    let node = start(&master, &dir.path().join("disk"), Fabrics::default());
    let mut client = client_over(master.rpc_addr(), Fabrics::default());
    let with = |disk| {
        let retention = Retention { disk, ..Retention::DEFAULT };
        PutOptions { retention, ..PutOptions::DEFAULT }
    };
    assert!(client.put(b"scratch", &value(0), &with(DiskCopy::Never)).unwrap());
    assert!(client.put(b"early", &value(1), &with(DiskCopy::Now)).unwrap());
    eventually("it has its copy", || client.master().replicas(b"early").unwrap().len() == 2);
    assert_eq!(
        (stats(&mut client).demotions_total, client.master().replicas(b"scratch").unwrap().len()),
        (1, 1)
    );
    // The node's death leaves the one and takes the other.
    node.stop();
    let node = start(&master, &dir.path().join("disk"), Fabrics::default());
    assert!(client.get(b"early").unwrap() == Some(value(1)));
    assert_eq!(client.get(b"scratch").unwrap(), None);
    node.stop();
}

/// The limit holds, and puts and gets of what is in memory do not wait for the disk.
#[test]
fn a_node_writes_no_more_to_its_disk_than_its_limit() {
    const LIMIT: u64 = 2 << 20;
    let dir = tempfile::tempdir().unwrap();
    let master = master_with(config());
    let config = node_config(master.rpc_addr(), &dir.path().join("disk"), Fabrics::default());
    let node = Node::start(with(config, |it| it.disk_write_bytes_per_s_max = LIMIT)).unwrap();
    eventually("the disk is ready", || node.disks().iter().any(|disk| disk.ready));
    let mut client = client_over(master.rpc_addr(), Fabrics::default());
    let written = |node: &Node| {
        let counters = node.disks()[0].stats.counters;
        counters.object_bytes_total + counters.pad_bytes_total + counters.header_bytes_total
    };
    let (begun, before) = (Instant::now(), written(&node));
    let mut stored = 0;
    // timing: the limit is on bytes per second.
    while begun.elapsed() < Duration::from_secs(4) {
        stored +=
            usize::from(client.put(&key(stored), &value(stored), &PutOptions::DEFAULT).unwrap_or(false));
    }
    let took = begun.elapsed().as_secs_f64(); // timing: as above
    let bytes = (written(&node) - before) as f64;
    assert!(stored as u64 * OBJECT as u64 > 4 * LIMIT * 4, "{stored} puts did not wait for the disk");
    // A second's worth is saved up at the beginning, and a batch may exceed it.
    let most = LIMIT as f64 * (took + 1.0) + (5 << 20) as f64;
    assert!(bytes > LIMIT as f64 && bytes <= most, "{bytes} bytes in {took} s, at most {most}");
    let text = node.metrics_text();
    let line = text.lines().find(|line| {
        line.starts_with("snowskin_node_disk_written_bytes_total{") && line.contains("class=\"object\"")
    });
    assert!(line.is_some_and(|line| !line.ends_with(" 0")), "{text}");
    node.stop();
}
