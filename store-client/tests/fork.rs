//! Processes that fork and continue without `exec`, with real children. A child never reads a value through
//! an object that its parent made, and its parent never reads a wrong value.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use std::cell::RefCell;
use std::future::Future as _;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use common::{Process, client_over, fabrics, get_batch, get_range, master, node, pattern, role, say};
use store_client::local::{LocalConfig, LocalServerConfig};
use store_client::{
    AsyncClient, BufferRange, Client, ClientConfig, ErrorCode, Fabrics, Get, LocalClient, LocalServer, Node,
    NodeConfig, Pending, PutOptions, RemoveMode, RpcConfig, RpcConnection, RpcError, Store as _, StoreError,
};
use store_core::message::ReadStats;
use te_fabric::testkit::{Complaint, fork_and};

const ONE: PutOptions = PutOptions::DEFAULT;
const OBJECTS: u64 = 100;
const FORKS: u64 = 40;

/// Where children begin. As a test it does nothing.
#[test]
fn entry() {
    let Some(role) = role() else { return };
    match role[0].as_str() {
        "forks" => be_forking(&role),
        "forks-rest" => be_forking_rest(&role),
        _ => {}
    }
}

fn forked<T: std::fmt::Debug>(what: &str, result: Result<T, StoreError>) -> Complaint {
    match result {
        Err(StoreError::Forked) => Ok(()),
        other => Err(format!("{what}: {other:?}")),
    }
}

fn key(object: u64) -> Vec<u8> {
    format!("key-{object}").into_bytes()
}

fn value(object: u64) -> Vec<u8> {
    pattern(object, 1_000 + 700 * object as usize)
}

/// Reads distinct objects with the parent's client while children read others, with the same client and with
/// their own.
fn be_forking(role: &[String]) {
    let master = role[1].parse().unwrap();
    let rail = fabrics(&role[2]);
    let mut client = client_over(master, rail);
    let memory = client.alloc(1 << 20).unwrap();
    for object in 0..OBJECTS {
        assert!(client.put(&key(object), &value(object), &ONE).unwrap());
    }
    for round in 0..FORKS {
        // In the child these are the parent's objects, and they are dropped in the middle of its work.
        let shared = RefCell::new(Some(client));
        fork_and(
            "a client",
            || {
                let mut inherited = shared.borrow_mut().take().unwrap();
                for object in 0..30 {
                    let object = (object * 7 + round) % OBJECTS;
                    forked("get", inherited.get(&key(object)))?;
                    let got = get_batch(&mut inherited, &[&key(object)]);
                    if !matches!(got.as_slice(), [Err(ErrorCode::Forked)]) {
                        return Err(format!("batch_get: {got:?}"));
                    }
                }
                forked("get_with", inherited.get_with(Get::new(&key(1), BufferRange::all(&memory))))?;
                forked("get_range", get_range(&mut inherited, &key(1), 1..2))?;
                forked("put", inherited.put(b"child", b"value", &ONE))?;
                forked("put from memory", inherited.put(b"child", BufferRange::all(&memory), &ONE))?;
                forked("exists", inherited.exists(&key(1)))?;
                forked("remove", inherited.remove(&key(1), RemoveMode::Force))?;
                forked("alloc", inherited.alloc(4096))?;
                forked("unregister", inherited.unregister(memory.id()))?;
                if inherited.metrics_text().is_empty() {
                    return Err("its counters are still there".into());
                }
                if round % 2 == 0 {
                    drop(inherited);
                } else {
                    std::mem::forget(inherited);
                }
                let config = ClientConfig::new(master.into()).fabrics(rail);
                let mut own = Client::connect(config).map_err(|error| error.to_string())?;
                for object in 0..10 {
                    let object = (object * 13 + round) % OBJECTS;
                    let got = own.get(&key(object)).map_err(|error| error.to_string())?;
                    if got != Some(value(object)) {
                        return Err(format!("its own client reads something else of {object}"));
                    }
                }
                let put = own.put(format!("child-{round}").as_bytes(), b"value", &ONE);
                if !matches!(put, Ok(true)) {
                    return Err(format!("its own client: {put:?}"));
                }
                Ok(())
            },
            || {
                let mut shared = shared.borrow_mut();
                let client = shared.as_mut().unwrap();
                for object in 0..30 {
                    let object = (object * 11 + round) % OBJECTS;
                    assert!(client.get(&key(object)).unwrap() == Some(value(object)), "object {object}");
                }
                memory.write(0, &value(3)).unwrap();
                let name = format!("parent-{round}");
                let range = BufferRange::part(&memory, 0, value(3).len() as u64);
                assert!(client.put(name.as_bytes(), range, &ONE).unwrap());
                assert!(client.get(name.as_bytes()).unwrap() == Some(value(3)));
                assert!(client.remove(name.as_bytes(), RemoveMode::Force).unwrap());
            },
        );
        client = shared.into_inner().unwrap();
    }
    assert_eq!(client.counters().checksum_mismatches, 0);
    assert_eq!(client.counters().connects, 1, "the connection was closed");
    say("done");
}

fn now<T>(mut pending: Pending<T>) -> Poll<Result<T, StoreError>> {
    Pin::new(&mut pending).poll(&mut Context::from_waker(Waker::noop()))
}

fn wait<T>(mut pending: Pending<T>) -> Result<T, StoreError> {
    loop {
        match Pin::new(&mut pending).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(result) => return result,
            Poll::Pending => std::thread::yield_now(),
        }
    }
}

/// The other objects that a process may have when it forks: a node, an asynchronous client, a local server
/// and a client of it.
fn be_forking_rest(role: &[String]) {
    let master: std::net::SocketAddr = role[1].parse().unwrap();
    let node = Node::start(NodeConfig::new("forking", master.into(), 8 << 20)).unwrap();
    let asynchronous = AsyncClient::start(client_over(master, Fabrics::default())).unwrap();
    let server = LocalServerConfig::new(&role[2], ClientConfig::new(master.into()));
    let server = LocalServer::start(server).unwrap();
    let mut local = LocalClient::connect(LocalConfig::new(&role[2])).unwrap();
    let content = value(50);
    assert!(local.put(b"local", &content, &ONE).unwrap());
    let buffer = local.get_buffer(b"local").unwrap().unwrap();
    let rpc = RpcConnection::connect(master.into(), RpcConfig::default()).unwrap();
    let all = RefCell::new(Some((node, asynchronous, server, local, buffer, rpc)));
    for _ in 0..20 {
        let mut begun = all.borrow().as_ref().unwrap().1.get(b"local".to_vec());
        let _ = Pin::new(&mut begun).poll(&mut Context::from_waker(Waker::noop()));
        let begun = RefCell::new(Some(begun));
        fork_and(
            "a client",
            || {
                let (node, asynchronous, server, mut local, buffer, mut rpc) =
                    all.borrow_mut().take().unwrap();
                match rpc.call::<ReadStats>(&(), std::iter::empty()) {
                    Err(RpcError::Forked) => {}
                    other => return Err(format!("call: {other:?}")),
                }
                match now(begun.borrow_mut().take().unwrap()) {
                    Poll::Ready(Err(StoreError::Forked)) => {}
                    other => return Err(format!("begun in the parent: {other:?}")),
                }
                match now(asynchronous.put(b"child".to_vec(), vec![1], &ONE)) {
                    Poll::Ready(Err(StoreError::Forked)) => {}
                    other => return Err(format!("begun in the child: {other:?}")),
                }
                drop(asynchronous.clone());
                asynchronous.stop();
                for result in [
                    local.get(b"local").map(drop),
                    local.put(b"child", b"value", &ONE).map(drop),
                    local.exists(b"local").map(drop),
                    local.alloc(64).map(drop),
                    buffer.write(0, b"child"),
                    buffer.to_vec().map(drop),
                ] {
                    if !matches!(result, Err(StoreError::Forked)) {
                        return Err(format!("local: {result:?}"));
                    }
                }
                drop((buffer, local));
                server.stop();
                if node.status() != Default::default() || node.region().is_some() {
                    return Err("the node is the parent's".into());
                }
                if node.drain(Duration::ZERO).is_ok() {
                    return Err("the child drained its parent's node".into());
                }
                node.stop();
                let own = Client::connect(ClientConfig::new(master.into()));
                match own.map_err(|error| error.to_string())?.get(b"local") {
                    Ok(Some(found)) if found == value(50) => Ok(()),
                    other => Err(format!("its own client: {other:?}")),
                }
            },
            || {
                let mut all = all.borrow_mut();
                let (node, asynchronous, _, local, buffer, rpc) = all.as_mut().unwrap();
                rpc.call::<ReadStats>(&(), std::iter::empty()).unwrap();
                assert_eq!(wait(begun.borrow_mut().take().unwrap()).unwrap().as_ref(), Some(&content));
                assert_eq!(wait(asynchronous.get(b"local".to_vec())).unwrap().as_ref(), Some(&content));
                assert_eq!(local.get(b"local").unwrap().as_ref(), Some(&content));
                assert_eq!(buffer.to_vec().unwrap(), content);
                assert!(node.status().segment.is_some());
            },
        );
    }
    let (node, ..) = all.into_inner().unwrap();
    assert_eq!(node.status().mounts, 1, "a child unmounted the node");
    say("done");
}

#[test]
fn parent_and_child_read_right_values_or_none_over_each_rail() {
    let master = master();
    let _node = node("a", master.rpc_addr());
    for rail in ["tcp", "shm", "auto"] {
        let mut forking = Process::start("entry", &["forks", &master.rpc_addr().to_string(), rail]);
        assert_eq!(forking.said(), "done", "{rail}");
        forking.stop();
        // The parent's work has no effect on the next one.
        let mut client = client_over(master.rpc_addr(), Fabrics::TCP);
        for object in 0..OBJECTS {
            assert!(client.remove(&key(object), RemoveMode::Force).unwrap());
        }
        for round in 0..FORKS {
            assert!(client.remove(format!("child-{round}").as_bytes(), RemoveMode::Force).unwrap());
        }
    }
}

#[test]
fn a_child_leaves_its_parents_node_server_and_tasks_alone() {
    let master = master();
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("local.sock");
    let role = ["forks-rest", &master.rpc_addr().to_string(), socket.to_str().unwrap()];
    let mut forking = Process::start("entry", &role);
    assert_eq!(forking.said(), "done");
    forking.stop();
}
