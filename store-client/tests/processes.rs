//! Real processes that die without notice, and are restarted.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{
    Process, be_node, client, client_over, eventually, fabrics, get_batch, master_at, master_with, node,
    node_over, own_host, pattern, role, say, wait_for_parent,
};
use store_client::{
    Client, ClientConfig, ErrorCode, Fabrics, Placement, PutOptions, RpcConfig, RpcConnection, Store as _,
    StoreError,
};
use store_core::message::{NewObject, PutRequest, PutStart};
use store_core::{Key, MasterConfig};

const ONE: PutOptions = PutOptions::DEFAULT;
const TWO: PutOptions = PutOptions { replicas: 2, ..PutOptions::DEFAULT };

/// Where children begin. As a test it does nothing.
#[test]
fn entry() {
    let Some(role) = role() else { return };
    match role[0].as_str() {
        "node" => be_node(&role),
        "half-put" => be_half_put(&role),
        "client" => be_client(&role),
        _ => {}
    }
}

fn start_node(name: &str, master: &dyn std::fmt::Display, fabrics: &str) -> Process {
    Process::start("entry", &["node", name, &master.to_string(), fabrics])
}

/// Gives dead nodes up soon, but no node that is only slow on a busy machine.
fn quick() -> MasterConfig {
    MasterConfig { node_ttl_ms: 2_000, ..MasterConfig::default() }
}

/// Puts one object, then starts another put and never ends it.
fn be_half_put(role: &[String]) {
    let mut client = Client::connect(ClientConfig::new(role[1].parse().unwrap())).unwrap();
    assert!(client.put(b"whole", &pattern(1, 10_000), &ONE).unwrap());
    let mut rpc = RpcConnection::connect(role[1].parse().unwrap(), RpcConfig::default()).unwrap();
    let object = NewObject { key: Key(b"half"), len: 10_000 };
    // With an identity, as every client has one: its node can confirm that no write of it is under way.
    let ask = PutRequest { writer: 0xdead, ..PutRequest::once(ONE) };
    let (_, mut allocations) = rpc.call::<PutStart>(&ask, std::iter::once(object)).unwrap();
    assert!(allocations.next().unwrap().is_ok());
    say("started");
    wait_for_parent();
}

/// Reads and writes in its own process.
fn be_client(role: &[String]) {
    let config = ClientConfig::new(role[1].parse().unwrap()).fabrics(fabrics(&role[2]));
    let mut client = Client::connect(config).unwrap();
    for seed in 0..20 {
        let key = format!("{}-{seed}", role[2]);
        let value = pattern(seed, 1000 * seed as usize + 1);
        assert!(client.put(key.as_bytes(), &value, &ONE).unwrap());
        assert_eq!(client.get(key.as_bytes()).unwrap(), Some(value));
    }
    say("done");
}

#[test]
fn master_node_and_clients_are_processes_over_each_rail() {
    let master = master_with(MasterConfig::default());
    let mut node = start_node("a", &master.rpc_addr(), "auto");
    for rail in ["shm", "tcp"] {
        let mut writer = Process::start("entry", &["client", &master.rpc_addr().to_string(), rail]);
        assert_eq!(writer.said(), "done");
        writer.stop();
        let mut client = client_over(master.rpc_addr(), fabrics(rail));
        for seed in 0..20 {
            let found = client.get(format!("{rail}-{seed}").as_bytes()).unwrap();
            assert_eq!(found, Some(pattern(seed, 1000 * seed as usize + 1)));
        }
    }
    node.stop();
    // The node unmounted its memory, so the master does not wait for its silence.
    assert_eq!(client(master.rpc_addr()).master().stats().unwrap().segments, 0);
}

#[test]
fn a_node_killed_between_put_and_get_is_skipped() {
    let master = master_with(MasterConfig::default());
    let mut doomed = start_node("a", &master.rpc_addr(), "tcp");
    let _other = node_over("b", master.rpc_addr(), Fabrics::TCP);
    let mut client = client_over(master.rpc_addr(), Fabrics::TCP);
    let keys: Vec<Vec<u8>> = (0..10).map(|i| format!("k{i}").into_bytes()).collect();
    for (seed, key) in keys.iter().enumerate() {
        assert!(client.put(key, &pattern(seed as u64, 20_000), &TWO).unwrap());
    }
    doomed.kill();
    for (seed, key) in keys.iter().enumerate() {
        assert_eq!(client.get(key).unwrap(), Some(pattern(seed as u64, 20_000)), "key {seed}");
    }
    assert!(client.counters().replica_failovers > 0);
    // So is it for a client that has never used it.
    let mut newcomer = client_over(master.rpc_addr(), Fabrics::TCP);
    let refs: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    assert!(get_batch(&mut newcomer, &refs).iter().all(|got| matches!(got, Ok(Some(_)))));
}

#[test]
fn objects_of_a_dead_node_vanish_and_others_stay() {
    let master = master_with(quick());
    let mut doomed = start_node("a", &master.rpc_addr(), "tcp");
    let mut client = client_over(master.rpc_addr(), Fabrics::TCP);
    for i in 0..5 {
        assert!(client.put(format!("doomed-{i}").as_bytes(), b"value", &ONE).unwrap());
    }
    let safe = node_over("b", master.rpc_addr(), Fabrics::TCP);
    let placement = Placement::on(safe.status().segment.unwrap());
    for i in 0..5 {
        assert!(
            client.put(format!("safe-{i}").as_bytes(), b"value", &PutOptions { placement, ..ONE }).unwrap()
        );
    }
    doomed.kill();
    eventually("the dead node is given up", || client.master().stats().unwrap().nodes == 1);
    for i in 0..5 {
        assert_eq!(client.get(format!("doomed-{i}").as_bytes()).unwrap(), None);
        assert_eq!(client.get(format!("safe-{i}").as_bytes()).unwrap(), Some(b"value".to_vec()));
    }
    // The name is free for its successor.
    let successor = start_node("a", &master.rpc_addr(), "tcp");
    eventually("the successor is there", || client.master().stats().unwrap().nodes == 2);
    assert!(client.put(b"doomed-0", b"again", &ONE).unwrap());
    drop(successor);
}

#[test]
fn after_a_restart_of_the_master_nodes_are_mounted_anew_and_clients_reconnect() {
    let first = master_at(own_host(11), quick());
    let addr = first.rpc_addr();
    let node = node("a", addr);
    let mut client = client(addr);
    assert!(client.put(b"before", b"value", &ONE).unwrap());
    first.stop().unwrap();
    let away = client.get(b"before");
    assert!(matches!(&away, Err(error) if error.code() == ErrorCode::RpcFail), "{away:?}");

    let second = master_at(addr, quick());
    eventually("the node is mounted anew", || node.status().mounts >= 2 && node.status().segment.is_some());
    // The objects that the first master knew are gone, and none of them is served.
    assert_eq!(client.get(b"before").unwrap(), None);
    assert!(client.put(b"after", &pattern(5, 100_000), &ONE).unwrap());
    assert_eq!(client.get(b"after").unwrap(), Some(pattern(5, 100_000)));
    assert!(client.counters().connects >= 2);
    drop(second);
}

#[test]
fn a_put_right_after_a_restart_of_the_master_is_not_lost() {
    let first = master_at(own_host(12), quick());
    let addr = first.rpc_addr();
    let mut client = client(addr);
    first.stop().unwrap();
    let _second = master_at(addr, quick());
    let _node = node("a", addr);
    // The client's connection is closed, and the client has not noticed yet.
    assert!(client.put(b"k", b"value", &ONE).unwrap());
}

#[test]
fn a_node_that_was_given_up_is_mounted_anew() {
    let master = master_with(quick());
    // It sends heartbeats often enough; only the stop makes it silent.
    let process = start_node("a", &master.rpc_addr(), "auto");
    let mut client = client(master.rpc_addr());
    assert!(client.put(b"k", b"value", &ONE).unwrap());
    process.signal("STOP");
    eventually("the silent node is given up", || client.master().stats().unwrap().nodes == 0);
    assert_eq!(client.get(b"k").unwrap(), None);
    process.signal("CONT");
    eventually("it is mounted anew", || client.master().stats().unwrap().segments == 1);
    assert_eq!(client.get(b"k").unwrap(), None);
    eventually("it accepts objects again", || client.put(b"k2", &pattern(1, 5000), &ONE).is_ok());
    assert_eq!(client.get(b"k2").unwrap(), Some(pattern(1, 5000)));
}

#[test]
fn a_client_killed_in_mid_put_leaves_nothing_readable() {
    // Long enough for the writer to end its first put on a busy machine.
    let store = MasterConfig {
        put_start_discard_timeout_ms: 1_000,
        put_start_release_timeout_ms: 600_000,
        ..MasterConfig::default()
    };
    let master = master_with(store);
    let _node = node("a", master.rpc_addr());
    let mut writer = Process::start("entry", &["half-put", &master.rpc_addr().to_string()]);
    writer.kill();
    let mut client = client(master.rpc_addr());
    assert_eq!(client.get(b"whole").unwrap(), Some(pattern(1, 10_000)));
    assert_eq!(client.get(b"half").unwrap(), None);
    assert!(!client.exists(b"half").unwrap());
    // Another writer may use the key after the window of the first one.
    eventually("the key is free", || client.put(b"half", &pattern(2, 500), &ONE).unwrap_or(false));
    assert_eq!(client.get(b"half").unwrap(), Some(pattern(2, 500)));
    eventually("the dead writer's space is released", || {
        client.master().stats().unwrap().quarantined_bytes == 0
    });
}

#[test]
fn without_a_master_errors_name_its_address() {
    let master = master_with(MasterConfig::default());
    let addr = master.rpc_addr();
    let mut config = ClientConfig::new(addr.into());
    config.rpc.reconnect_ms_max = 50;
    let mut client = Client::connect(config.clone()).unwrap();
    drop(master);
    let error = client.exists(b"k").unwrap_err();
    assert!(matches!(&error, StoreError::Rpc(_)), "{error:?}");
    assert!(error.to_string().contains(&addr.to_string()), "{error}");
    assert_eq!(
        Client::connect(config).err().map(|error| error.to_string().contains("no master at")),
        Some(true)
    );
}
