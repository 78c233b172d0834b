//! How a node starts, stops, and stays in the store.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use common::{MIB, client, client_over, eventually, master_at, master_with, own_host, pattern};
use store_client::{
    Client, ConnectError, Fabrics, Node, NodeConfig, Placement, PutOptions, RpcError, SegmentNo, SegmentState,
};
use store_core::MasterConfig;

const ONE: PutOptions = PutOptions::DEFAULT;

fn config(name: &str, master: SocketAddr) -> NodeConfig {
    NodeConfig::new(name, master.into(), 32 * MIB).fabrics(Fabrics::TCP)
}

/// A port on a host of its own, where nobody listens yet.
fn free_address(host: u8) -> SocketAddr {
    TcpListener::bind(own_host(host)).unwrap().local_addr().unwrap()
}

fn on(segment: SegmentNo) -> PutOptions {
    PutOptions { placement: Placement::on(segment), ..ONE }
}

#[test]
fn a_node_that_is_started_before_its_master_waits_for_it() {
    let addr = free_address(31);
    let tries = Arc::new(AtomicU64::new(0));
    let asked = Arc::clone(&tries);
    let waits = NodeConfig { wait_master_ms: NodeConfig::FOR_EVER, ..config("early", addr) };
    let starting = thread::spawn(move || {
        Node::start_unless(waits, || {
            asked.fetch_add(1, Ordering::Relaxed);
            false
        })
    });
    eventually("it waits", || tries.load(Ordering::Relaxed) > 5);
    assert!(!starting.is_finished());
    let _master = master_at(addr, MasterConfig::default());
    let node = starting.join().unwrap().unwrap();
    assert!(node.status().segment.is_some());
    assert!(client(addr).put(b"k", b"v", &ONE).unwrap());
}

#[test]
fn a_node_that_is_told_to_end_while_it_waits_gives_up() {
    let waits = NodeConfig { wait_master_ms: NodeConfig::FOR_EVER, ..config("early", free_address(32)) };
    let mut asked = 0;
    let gave_up = Node::start_unless(waits, || {
        asked += 1;
        asked > 3
    });
    assert!(matches!(gave_up, Err(ConnectError::Rpc(RpcError::Connect { .. }))));
    // And one that is not to wait does not.
    let impatient = NodeConfig { wait_master_ms: 0, ..config("early", free_address(32)) };
    let gave_up = Node::start_unless(impatient, || panic!("it does not wait"));
    assert!(matches!(gave_up, Err(ConnectError::Rpc(RpcError::Connect { .. }))));
}

#[test]
fn what_waiting_does_not_change_is_told_at_once() {
    let master = master_with(MasterConfig::default());
    let mut config = NodeConfig { wait_master_ms: NodeConfig::FOR_EVER, ..config("a", master.rpc_addr()) };
    config.identity.tenant = "nobody".into();
    let refused = Node::start_unless(config, || panic!("it does not wait")).map(drop);
    assert!(matches!(refused, Err(ConnectError::Rpc(RpcError::Tenant { .. }))), "{refused:?}");
}

fn put_all(client: &mut Client, segment: SegmentNo, objects: u64, len: usize) {
    for i in 0..objects {
        assert!(client.put(format!("k{i}").as_bytes(), &pattern(i, len), &on(segment)).unwrap());
    }
}

fn read_all(client: &mut Client, objects: u64, len: usize) {
    for i in 0..objects {
        assert_eq!(client.get(format!("k{i}").as_bytes()).unwrap(), Some(pattern(i, len)), "k{i}");
    }
}

#[test]
fn a_node_that_drains_when_it_is_stopped_leaves_nothing_behind() {
    let master = master_with(MasterConfig::default());
    let addr = master.rpc_addr();
    let leaving = NodeConfig { drain_on_stop_ms: 60_000, ..config("leaving", addr) };
    let leaving = Node::start(leaving).unwrap();
    let mut other = config("other", addr);
    other.heartbeat_ms = 20;
    let _other = Node::start(other).unwrap();
    let mut client = client_over(addr, Fabrics::TCP);
    put_all(&mut client, leaving.status().segment.unwrap(), 30, 20_000);
    leaving.stop();
    assert_eq!(client.stats().unwrap().objects_lost_total, 0);
    read_all(&mut client, 30, 20_000);
}

#[test]
fn a_drain_survives_a_master_that_is_away_for_a_moment() {
    let addr = free_address(33);
    let master = master_at(addr, MasterConfig::default());
    let mut quick = config("a", addr);
    quick.heartbeat_ms = 20;
    let leaving = Node::start(quick).unwrap();
    // Nowhere to go: it stays as long as its master does.
    put_all(&mut client_over(addr, Fabrics::TCP), leaving.status().segment.unwrap(), 3, 1_000);
    let seen = Arc::new(AtomicU64::new(0));
    let watched = Arc::clone(&seen);
    let stopping = thread::spawn(move || {
        leaving.stop_drained_while(Duration::from_secs(600), |info| {
            watched.fetch_add(u64::from(info.state == SegmentState::Draining), Ordering::Relaxed);
            std::ops::ControlFlow::Continue(())
        })
    });
    eventually("it is being drained", || seen.load(Ordering::Relaxed) > 0);
    master.stop().unwrap();
    let before = seen.load(Ordering::Relaxed);
    eventually("it waits on", || seen.load(Ordering::Relaxed) > before + 5);
    assert!(!stopping.is_finished());
    // The new one knows of no object, so there is nothing left to wait for.
    let _master = master_at(addr, MasterConfig { epoch: 2, ..MasterConfig::default() });
    let info = stopping.join().unwrap().unwrap();
    assert_eq!(info.blocks, 0, "{info:?}");
}

#[test]
fn a_drain_that_is_broken_off_says_what_is_left() {
    let master = master_with(MasterConfig::default());
    let addr = master.rpc_addr();
    let alone = Node::start(config("alone", addr)).unwrap();
    put_all(&mut client_over(addr, Fabrics::TCP), alone.status().segment.unwrap(), 7, 1_000);
    let info = alone.stop_drained_while(Duration::from_secs(600), |info| match info.left_no_room {
        0 => std::ops::ControlFlow::Continue(()),
        _ => std::ops::ControlFlow::Break(()),
    });
    let info = info.unwrap();
    assert_eq!((info.state, info.blocks, info.left_no_room), (SegmentState::Draining, 7, 7));
    assert_eq!(client(addr).stats().unwrap().segments, 0, "it has ended all the same");
}

#[test]
fn a_drain_does_not_wait_for_heartbeats() {
    // A heartbeat each 5 s: whoever copies a few objects for each of them takes many.
    let master = master_with(MasterConfig { node_ttl_ms: 15_000, ..MasterConfig::default() });
    let addr = master.rpc_addr();
    let leaving = Node::start(config("leaving", addr)).unwrap();
    let other = Node::start(config("other", addr)).unwrap();
    let objects = 400;
    let mut client = client_over(addr, Fabrics::TCP);
    put_all(&mut client, leaving.status().segment.unwrap(), objects, 10_000);
    let mut first = None;
    let drained = leaving.stop_drained_while(Duration::from_secs(600), |info| {
        if info.moved_total > 0 {
            first.get_or_insert(other.status().heartbeats);
        }
        std::ops::ControlFlow::Continue(())
    });
    assert_eq!(drained.unwrap().moved_total, objects);
    let beats = other.status().heartbeats - first.unwrap();
    assert!(beats <= 3, "{objects} objects took {beats} heartbeats");
    read_all(&mut client, objects, 10_000);
}

#[test]
fn a_share_slows_copies_down_and_loses_none() {
    let master = master_with(MasterConfig { lease_ttl_ms: 1_000, ..MasterConfig::default() });
    let addr = master.rpc_addr();
    let leaving = Node::start(config("leaving", addr)).unwrap();
    // 20 objects a second, of which several leases' worth wait at a time.
    let mut slow = NodeConfig { copy_bytes_per_s_max: 200_000, ..config("slow", addr) };
    slow.heartbeat_ms = 20;
    let slow = Node::start(slow).unwrap();
    let mut client = client_over(addr, Fabrics::TCP);
    put_all(&mut client, leaving.status().segment.unwrap(), 60, 10_000);
    let info = leaving.stop_drained(Duration::from_secs(600)).unwrap();
    assert_eq!((info.state, info.moved_total), (SegmentState::Drained, 60), "{info:?}");
    assert_eq!(slow.status().copy_failures, 0, "nothing that waited for its turn lost its lease");
    read_all(&mut client, 60, 10_000);
}
