//! Tests with a simulated read that does not drain, which no real fabric produces on demand.

use std::sync::atomic::Ordering;

use store_core::message::PutOptions;
use store_master::{Config, MasterHandle, MasterServer};
use te_engine::Fabrics;
use te_fabric::testkit::eventually;

use super::{LocalClient, LocalConfig, LocalServer, LocalServerConfig, default_path};
use crate::{ClientConfig, Get, Masters, Node, NodeConfig, Store as _, StoreError};

const LEN: u64 = 300_000;
const ONE: PutOptions = PutOptions::DEFAULT;

struct Store {
    server: LocalServer,
    _node: Node,
    _master: MasterHandle,
    _dir: tempfile::TempDir,
}

fn store() -> (Store, LocalConfig) {
    let listen = "127.0.0.1:0".parse().unwrap();
    let config = Config { rpc_listen: listen, http_listen: None, ..Config::default() };
    let master = MasterServer::bind(config).unwrap().spawn().unwrap();
    let address = master.rpc_addr();
    let node = Node::start(NodeConfig::new("a", address.into(), 8 << 20).fabrics(Fabrics::TCP)).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let client = ClientConfig::new(address.into()).fabrics(Fabrics::TCP);
    let config = LocalServerConfig { workers: 1, ..LocalServerConfig::new(dir.path().join("l"), client) };
    let server = LocalServer::start(config).unwrap();
    let local = LocalConfig { arena_bytes: 2 << 20, ..LocalConfig::new(server.path()) };
    (Store { server, _node: node, _master: master, _dir: dir }, local)
}

#[test]
fn a_buffer_that_may_still_be_written_is_used_by_no_operation_until_it_has_drained() {
    let (store, config) = store();
    let mut client = LocalClient::connect(config).unwrap();
    let bytes: Vec<u8> = (0..LEN).map(|i| (i * 7 / 3) as u8).collect();
    assert!(client.put(b"k", &bytes, &ONE).unwrap());
    let buffer = client.alloc(LEN).unwrap();

    store.server.shared().stick.store(true, Ordering::SeqCst);
    assert_eq!(
        client.get_with(Get::new(b"k", buffer.all())).unwrap(),
        None,
        "a read that was given up is a miss"
    );
    assert!(matches!(buffer.read(0, &mut [0]), Err(StoreError::Held)));
    assert!(matches!(buffer.write(0, &[0]), Err(StoreError::Held)));
    assert!(matches!(client.put(b"l", buffer.all(), &ONE), Err(StoreError::Held)));
    assert!(matches!(client.get_with(Get::new(b"k", buffer.part(0, 1))), Err(StoreError::Held)));
    // Other operations go on, but never in the memory of the buffer.
    let held = buffer.in_arena();
    drop(buffer);
    let mut others = Vec::new();
    while let Ok(other) = client.alloc(LEN) {
        let place = other.in_arena();
        assert!(place.offset >= held.offset + held.len || place.offset + place.len <= held.offset);
        others.push(other);
    }
    assert!(!others.is_empty());
    assert_eq!(client.get_with(Get::new(b"k", others[0].all())).unwrap(), Some(LEN));
    assert_eq!(others[0].to_vec().unwrap(), bytes);

    let room = others.len();
    drop(others);
    store.server.shared().unstick.store(true, Ordering::SeqCst);
    client.exists(b"k").unwrap();
    let all: Vec<_> = std::iter::from_fn(|| client.alloc(LEN).ok()).collect();
    assert_eq!(all.len(), room + 1, "the part is free again after it has drained");
}

#[test]
fn a_live_buffer_is_usable_again_once_it_has_drained() {
    let (store, config) = store();
    let mut client = LocalClient::connect(config).unwrap();
    assert!(client.put(b"k", &vec![5; LEN as usize], &ONE).unwrap());
    let buffer = client.alloc(LEN).unwrap();
    store.server.shared().stick.store(true, Ordering::SeqCst);
    let mut items = [Get::new(b"k", buffer.all())];
    assert_eq!(client.batch_get(&mut items).missed, 1);
    assert!(matches!(items[0].result(), Ok(None)));
    assert_eq!(client.batch_get(&mut items).failed, 1);
    assert!(matches!(items[0].result(), Err(StoreError::Held)));
    store.server.shared().unstick.store(true, Ordering::SeqCst);
    assert_eq!(client.get_with(Get::new(b"k", buffer.all())).unwrap(), Some(LEN));
}

#[test]
fn an_arena_that_may_still_be_written_outlives_its_client() {
    let (store, config) = store();
    let mut client = LocalClient::connect(config.clone()).unwrap();
    let arena_bytes = client.arena_bytes();
    assert!(client.put(b"k", &vec![5; LEN as usize], &ONE).unwrap());
    store.server.shared().stick.store(true, Ordering::SeqCst);
    assert_eq!(client.get(b"k").unwrap(), None);
    drop(client);
    eventually("the client is gone", || store.server.stats().clients == 0);
    // Other clients are served meanwhile. The memory stays registered and counted.
    let mut other = LocalClient::connect(config).unwrap();
    for _ in 0..20 {
        assert!(!other.exists(b"nothing").unwrap());
    }
    assert_eq!(store.server.stats().arenas_bytes, 2 * arena_bytes);
    store.server.shared().unstick.store(true, Ordering::SeqCst);
    eventually("the arena is freed when it has drained", || store.server.stats().arenas_bytes == arena_bytes);
}

#[test]
fn each_master_has_a_path_of_its_own_that_fits_a_socket() {
    let long = format!("store.{}.example:50051", "a".repeat(300));
    let paths: Vec<_> = ["127.0.0.1:50051", "127.0.0.1:50052", "unix:/run/m.sock", &long]
        .iter()
        .map(|text| default_path(&text.parse::<Masters>().unwrap()))
        .collect();
    for (index, path) in paths.iter().enumerate() {
        assert!(!paths[..index].contains(path));
        assert!(path.file_name().unwrap().len() <= 60, "{path:?}");
    }
}
