//! The start, the stop and the heartbeats of a node.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use common::{
    MIB, Process, client, client_over, eventually, master_at, master_with, own_host, pattern, role, say,
    wait_for_parent, with,
};
use store_client::{
    Client, ClientConfig, ConnectError, Fabrics, Node, NodeConfig, Placement, PutOptions, RemoveMode,
    RpcConfig, RpcConnection, RpcError, SegmentNo, SegmentState, Store as _,
};
use store_core::message::{Mount, MountSegment, NewObject, PutRequest, PutStart};
use store_core::{Incarnation, Key, MasterConfig, NodeId, Secret};
use store_master::MasterHandle;

const ONE: PutOptions = PutOptions::DEFAULT;

fn config(name: &str, master: SocketAddr) -> NodeConfig {
    NodeConfig::new(name, master.into(), 32 * MIB).fabrics(Fabrics::TCP)
}

/// A port on a host that only this test uses, without a listener.
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
    let waits = with(config("early", addr), |config| config.wait_master_ms = NodeConfig::FOR_EVER);
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
fn a_node_that_is_asked_to_end_while_it_waits_gives_up() {
    let waits =
        with(config("early", free_address(32)), |config| config.wait_master_ms = NodeConfig::FOR_EVER);
    let mut asked = 0;
    let gave_up = Node::start_unless(waits, || {
        asked += 1;
        asked > 3
    });
    assert!(matches!(gave_up, Err(ConnectError::Rpc(RpcError::Connect { .. }))));
    // A node without patience does not wait either.
    let impatient = with(config("early", free_address(32)), |config| config.wait_master_ms = 0);
    let gave_up = Node::start_unless(impatient, || panic!("it does not wait"));
    assert!(matches!(gave_up, Err(ConnectError::Rpc(RpcError::Connect { .. }))));
}

#[test]
fn an_error_that_waiting_does_not_change_is_returned_at_once() {
    let master = master_with(MasterConfig::default());
    let mut config =
        with(config("a", master.rpc_addr()), |config| config.wait_master_ms = NodeConfig::FOR_EVER);
    config.identity.tenant = "absent".into();
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
    let leaving = with(config("leaving", addr), |config| config.drain_on_stop_ms = 60_000);
    let leaving = Node::start(leaving).unwrap();
    let mut other = config("other", addr);
    other.heartbeat_ms = 20;
    let _other = Node::start(other).unwrap();
    let mut client = client_over(addr, Fabrics::TCP);
    put_all(&mut client, leaving.status().segment.unwrap(), 30, 20_000);
    leaving.stop();
    assert_eq!(client.master().stats().unwrap().objects_lost_total, 0);
    read_all(&mut client, 30, 20_000);
}

#[test]
fn a_drain_survives_a_short_absence_of_the_master() {
    let addr = free_address(33);
    let master = master_at(addr, MasterConfig::default());
    let mut quick = config("a", addr);
    quick.heartbeat_ms = 20;
    let leaving = Node::start(quick).unwrap();
    // A put that is never ended: it stays as long as its master runs.
    let mut rpc = RpcConnection::connect(addr.into(), RpcConfig::default()).unwrap();
    let object = NewObject { key: Key(b"half"), len: 10_000 };
    let (_, mut allocations) = rpc
        .call::<PutStart>(&PutRequest { writer: 1, ..PutRequest::once(ONE) }, std::iter::once(object))
        .unwrap();
    assert!(allocations.next().unwrap().is_ok());
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
    eventually("it continues to wait", || seen.load(Ordering::Relaxed) > before + 5);
    assert!(!stopping.is_finished());
    // The new master knows no object, so there is nothing left to wait for.
    let _master = master_at(addr, MasterConfig { epoch: 2, ..MasterConfig::default() });
    let info = stopping.join().unwrap().unwrap();
    assert_eq!(info.blocks, 0, "{info:?}");
}

#[test]
fn a_drain_that_can_move_nothing_more_ends_and_reports_what_is_left() {
    let master = master_with(MasterConfig::default());
    let addr = master.rpc_addr();
    let alone = Node::start(config("alone", addr)).unwrap();
    put_all(&mut client_over(addr, Fabrics::TCP), alone.status().segment.unwrap(), 7, 1_000);
    // There is no other segment, so waiting is useless; the node continues to serve.
    let info = alone.drain(Duration::from_secs(600)).unwrap();
    assert_eq!((info.state, info.blocks, info.left_no_room), (SegmentState::Draining, 7, 7));
    assert_eq!(client(addr).get(b"k3").unwrap(), Some(pattern(3, 1_000)));
    let info = alone.stop_drained(Duration::from_secs(600)).unwrap();
    assert_eq!(info.blocks, 7);
    assert_eq!(client(addr).master().stats().unwrap().segments, 0, "it has ended nevertheless");
}

#[test]
fn a_drain_does_not_wait_for_heartbeats() {
    // A heartbeat every 5 s: a node that copied a few objects per heartbeat would need many.
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
    // `None`: the drain ended before `watch` was called.
    let beats = first.map_or(0, |first| other.status().heartbeats - first);
    assert!(beats <= 3, "{objects} objects took {beats} heartbeats");
    read_all(&mut client, objects, 10_000);
}

#[test]
fn a_rate_limit_slows_copies_down_and_loses_none() {
    let master = master_with(MasterConfig { lease_ttl_ms: 1_000, ..MasterConfig::default() });
    let addr = master.rpc_addr();
    let leaving = Node::start(config("leaving", addr)).unwrap();
    // 20 objects per second, of which several leases' worth wait at a time.
    let mut slow = with(config("slow", addr), |config| config.copy_bytes_per_s_max = 200_000);
    slow.heartbeat_ms = 20;
    let slow = Node::start(slow).unwrap();
    let mut client = client_over(addr, Fabrics::TCP);
    put_all(&mut client, leaving.status().segment.unwrap(), 60, 10_000);
    let info = leaving.stop_drained(Duration::from_secs(600)).unwrap();
    assert_eq!((info.state, info.moved_total), (SegmentState::Drained, 60), "{info:?}");
    assert_eq!(slow.status().copy_failures, 0, "a copy that waited lost its lease");
    read_all(&mut client, 60, 10_000);
}

/// Where children begin. As a test it does nothing.
#[test]
fn entry() {
    let Some(role) = role() else { return };
    match role[0].as_str() {
        "idle" => be_idle(&role),
        "copier" => be_copier(&role),
        _ => {}
    }
}

/// Reads once over shared memory, and then does nothing.
fn be_idle(role: &[String]) {
    let mut client = client_over(role[1].parse().unwrap(), Fabrics::SHM);
    let _ = client.put(b"k", &pattern(1, 100_000), &ONE);
    say(if client.get(b"k").unwrap().is_some() { "read" } else { "miss" });
    wait_for_parent();
}

/// Puts over shared memory all the time.
fn be_copier(role: &[String]) {
    let mut client = client_over(role[1].parse().unwrap(), Fabrics::SHM);
    let value = pattern(2, 8 << 20);
    say("ready");
    loop {
        let _ = client.put(b"large", &value, &ONE);
        let _ = client.remove(b"large", RemoveMode::Force);
    }
}

fn metric(node: &Node, name: &str) -> u64 {
    let text = node.metrics_text();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

/// Restarts the master at its address, and waits until the node is mounted there.
fn restart_master(master: &mut Option<MasterHandle>, addr: SocketAddr, node: &Node, epoch: u32) {
    let mounts = node.status().mounts;
    master.take().unwrap().stop().unwrap();
    *master = Some(master_at(addr, MasterConfig { epoch, ..MasterConfig::default() }));
    eventually("it is mounted anew", || node.status().mounts > mounts);
}

#[test]
fn a_node_that_is_mounted_anew_keeps_its_memory_while_clients_are_idle() {
    let addr = free_address(34);
    let mut master = Some(master_at(addr, MasterConfig { epoch: 1, ..MasterConfig::default() }));
    let node = Node::start(NodeConfig::new("a", addr.into(), 32 * MIB)).unwrap();
    let first = node.region().unwrap();
    let registered = metric(&node, "snowskin_engine_registered_bytes ");
    let mut idle = Vec::new();
    for epoch in 2..7 {
        idle.push(Process::start("entry", &["idle", &addr.to_string()]));
        assert_eq!(idle.last().unwrap().said(), "read");
        let before = node.region().unwrap();
        restart_master(&mut master, addr, &node, epoch);
        let after = node.region().unwrap();
        assert_eq!(after.addr(), first.addr(), "the same memory");
        assert_ne!(after.id(), before.id(), "under another id");
        assert_eq!(metric(&node, "snowskin_engine_registered_bytes "), registered);
    }
    // The memory is usable.
    let mut client = client_over(addr, Fabrics::SHM);
    assert!(client.put(b"after", &pattern(3, 1_000_000), &ONE).unwrap());
    assert_eq!(client.get(b"after").unwrap(), Some(pattern(3, 1_000_000)));
    idle.iter_mut().for_each(Process::stop);
}

#[test]
fn a_second_node_with_the_same_name_is_refused_and_the_first_loses_nothing() {
    let master = master_with(MasterConfig::default());
    let addr = master.rpc_addr();
    let first = Node::start(config("twin", addr)).unwrap();
    let mut client = client_over(addr, Fabrics::TCP);
    assert!(client.put(b"k", b"kept", &ONE).unwrap());
    let refused = Node::start(config("twin", addr)).map(drop).unwrap_err();
    assert!(
        matches!(&refused, ConnectError::Held { endpoint, .. } if endpoint == first.endpoint()),
        "{refused}"
    );
    assert!(refused.to_string().contains(first.endpoint()), "{refused}");
    assert_eq!(client.get(b"k").unwrap().as_deref(), Some(b"kept".as_slice()));
    assert_eq!(first.status().mounts, 1);
    // Unless the operator requests it.
    let second = Node::start(with(config("twin", addr), |config| config.takeover = true)).unwrap();
    assert!(second.status().segment.is_some());
    assert_eq!(client.master().segments().unwrap()[0].endpoint, second.endpoint());
    drop(first);
    assert_eq!(
        client.master().segments().unwrap()[0].endpoint,
        second.endpoint(),
        "the first node took nothing with it"
    );
}

#[test]
fn a_node_whose_clock_went_back_is_mounted_once_the_silent_holder_of_its_name_is_given_up() {
    let master = master_with(MasterConfig { node_ttl_ms: 1_000, ..MasterConfig::default() });
    let addr = master.rpc_addr();
    // A former process with the same name and a clock that was ahead.
    let mut rpc = RpcConnection::connect(addr.into(), RpcConfig::default()).unwrap();
    let hour_ahead = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap()
        + Duration::from_secs(3_000);
    let incarnation = Incarnation::new(hour_ahead.as_nanos() as u64);
    let segment = MountSegment {
        node: NodeId::new(7),
        incarnation,
        name: "back",
        endpoint: "127.0.0.1:1",
        len: MIB,
        lineage: rpc.welcome().lineage,
        key: 7,
        ..MountSegment::default()
    };
    rpc.call::<Mount>(&segment, std::iter::empty()).unwrap().0.mounted().unwrap();
    let node = Node::start(with(config("back", addr), |config| config.wait_master_ms = 0)).unwrap();
    drop(rpc);
    let mounted = &client(addr).master().segments().unwrap()[0];
    assert!(mounted.incarnation > incarnation);
    assert_eq!(mounted.endpoint, node.endpoint());
}

#[test]
fn nodes_of_a_cluster_with_a_secret_prove_it_and_others_are_refused() {
    let secret: Secret = "winter".to_owned().into();
    let master = master_with(MasterConfig { cluster_secret: secret.clone(), ..MasterConfig::default() });
    let addr = master.rpc_addr();
    for wrong in [Secret::default(), "summer".to_owned().into()] {
        let mut config = with(config("outsider", addr), |config| config.wait_master_ms = 0);
        config.identity.cluster = wrong;
        let refused = Node::start(config).map(drop).unwrap_err();
        assert!(matches!(refused, ConnectError::Rpc(_)), "{refused}");
        assert_eq!(client(addr).master().segments().unwrap(), []);
    }
    let mut config = config("ours", addr);
    config.identity.cluster = secret.clone();
    let node = Node::start(config).unwrap();
    eventually("its heartbeats are answered", || node.status().heartbeats > 0);
    assert_eq!(node.status().mounts, 1);
    let mut config = ClientConfig::new(addr.into()).fabrics(Fabrics::TCP);
    config.identity.cluster = secret;
    let mut client = Client::connect(config).unwrap();
    assert!(client.put(b"k", b"v", &ONE).unwrap());
    assert_eq!(client.get(b"k").unwrap().as_deref(), Some(b"v".as_slice()));
}

mod timing {
    //! Real time: a process is stopped at different points of its work.

    use super::*;

    #[test]
    fn a_client_that_is_stopped_in_the_middle_of_a_copy_does_not_prevent_a_mount() {
        let addr = free_address(35);
        let mut master = Some(master_at(addr, MasterConfig { epoch: 1, ..MasterConfig::default() }));
        let node = Node::start(NodeConfig::new("a", addr.into(), 32 * MIB)).unwrap();
        let mut copier = Process::start("entry", &["copier", &addr.to_string()]);
        // It is copying most of the time, but not all of it.
        let mut caught = false;
        for epoch in 2..60 {
            thread::sleep(Duration::from_micros(u64::from(20_000 + epoch * 1_300)));
            copier.signal("STOP");
            restart_master(&mut master, addr, &node, epoch);
            caught = metric(&node, "snowskin_engine_quarantined_regions ") > 0;
            let mut client = client_over(addr, Fabrics::TCP);
            assert!(client.put(b"k", &pattern(4, 100_000), &ONE).unwrap(), "it serves");
            assert_eq!(client.get(b"k").unwrap(), Some(pattern(4, 100_000)));
            if caught {
                break;
            }
            copier.signal("CONT");
        }
        assert!(caught, "it was never stopped in the middle of a copy");
        copier.signal("CONT");
        eventually("the memory in quarantine is released", || {
            metric(&node, "snowskin_engine_quarantined_regions ") == 0
        });
        copier.kill();
    }
}
