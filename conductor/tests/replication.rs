//! Hot prefixes get more replicas in a real store: a master, two nodes, and the Conductor that hears its
//! events.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::net::SocketAddr;
use std::path::PathBuf;

use common::{
    config, engine, eventually, get, hashes, metric, post, publisher, removed, send, start, stored, tokens,
};
use conductor::{ConductorHandle, Config, EngineConfig, EngineKind, Publisher, StoreConfig};
use serde_json::json;
use store_client::{Client, ClientConfig, Fabrics, Node, NodeConfig, PutOptions, Store as _};
use store_master::{MasterHandle, MasterServer};

/// Blocks of the prefix; each is an object.
const BLOCKS: u32 = 60;

/// A store with every block of a prefix, once.
struct Cluster {
    client: Client,
    _nodes: [Node; 2],
    events: (SocketAddr, SocketAddr),
    master: MasterHandle,
}

fn key(at: u32) -> String {
    format!("m@tp_rank:0@pcp0@dcp0@pp_rank:0@{:064x}", hashes(1, BLOCKS)[at as usize].0)
}

impl Cluster {
    fn start() -> Self {
        let mut config = store_master::Config {
            rpc_listen: "127.0.0.1:0".parse().unwrap(),
            http_listen: None,
            ..store_master::Config::default()
        };
        config.kv_events.listen = Some("127.0.0.1:0".parse().unwrap());
        let server = MasterServer::bind(config).unwrap();
        let events = server.kv_events_addrs().unwrap();
        let master = server.spawn().unwrap();
        let address = master.rpc_addr();
        let nodes = ["a", "b"].map(|name| {
            let mut config = NodeConfig::new(name, address.into(), 32 << 20).fabrics(Fabrics::TCP);
            config.heartbeat_ms = 20;
            Node::start(config).unwrap()
        });
        let config = ClientConfig::new(address.into()).fabrics(Fabrics::TCP);
        let mut client = Client::connect(config).unwrap();
        for at in 0..BLOCKS {
            assert!(client.put(key(at).as_bytes(), &[7; 4_096], &PutOptions::DEFAULT).unwrap());
        }
        Self { client, _nodes: nodes, events, master }
    }

    /// Readable replicas of all blocks.
    fn replicas(&mut self) -> usize {
        (0..BLOCKS).map(|at| self.client.master().replicas(key(at).as_bytes()).unwrap().len()).sum()
    }
}

/// A Conductor that knows the prefix from an engine which has lost it again, so that only the store has it.
fn conductor(cluster: &Cluster, store: StoreConfig) -> (ConductorHandle, Publisher) {
    conductor_at(cluster, store, None)
}

/// As [`conductor`], with a snapshot.
fn conductor_at(
    cluster: &Cluster,
    store: StoreConfig,
    snapshot: Option<PathBuf>,
) -> (ConductorHandle, Publisher) {
    let engine_events = publisher();
    let of_store = EngineConfig {
        instance: "store".into(),
        kind: EngineKind::Snowskin,
        endpoint: format!("tcp://{}", cluster.events.0),
        replay_endpoint: format!("tcp://{}", cluster.events.1),
        ..engine("store", &engine_events)
    };
    let engines = vec![engine("one", &engine_events), of_store];
    let mut config = Config { engines, store, snapshot, ..config() };
    config.schedule.assumed_ms = 1;
    let conductor = start(config);
    let addr = conductor.addr();
    engine_events.publish(&stored(1, 0, BLOCKS)).unwrap();
    eventually("the engine and every object are heard", || {
        metric(addr, "snowskin_conductor_store_names") == f64::from(BLOCKS)
            && common::matched(addr, "one", 1, BLOCKS) == u64::from(4 * BLOCKS)
    });
    engine_events.publish(&removed(1, 0, BLOCKS)).unwrap();
    eventually("the engine has lost it", || common::matched(addr, "one", 1, BLOCKS) == 0);
    (conductor, engine_events)
}

/// Places a request with the prefix, which ends at once. Returns from where it is fetched.
fn place(addr: SocketAddr) -> String {
    let ask = json!({"model": "m", "token_ids": tokens(1, BLOCKS + 20), "max_tokens": 8});
    let (status, placed) = post(addr, "/schedule", &ask);
    assert_eq!(status, 200, "{placed}");
    let id = placed["reservation"].as_str().unwrap();
    assert_eq!(send(addr, "DELETE", &format!("/reservations/{id}"), "").0, 204);
    placed["fetch"]["from"].as_str().unwrap_or_default().to_owned()
}

fn refused(addr: SocketAddr, reason: &str) -> f64 {
    metric(addr, &format!("snowskin_conductor_store_copies_refused_total{{reason=\"{reason}\"}}"))
}

fn hot(cluster: &Cluster) -> StoreConfig {
    StoreConfig {
        master: cluster.master.rpc_addr().to_string(),
        hot_ms: 1,
        replicas_max: 2,
        ..StoreConfig::default()
    }
}

#[test]
fn a_hot_prefix_gets_its_second_replica_and_no_third() {
    let mut cluster = Cluster::start();
    let (conductor, _events) = conductor(&cluster, hot(&cluster));
    let addr = conductor.addr();
    assert_eq!(cluster.replicas(), BLOCKS as usize);
    eventually("every block has been copied", || {
        place(addr);
        metric(addr, "snowskin_conductor_store_copies_done_total") == f64::from(BLOCKS)
    });
    assert_eq!(cluster.replicas(), 2 * BLOCKS as usize);
    eventually("it is hot again, and has enough", || {
        place(addr);
        refused(addr, "enough") >= f64::from(BLOCKS)
    });
    assert_eq!(cluster.replicas(), 2 * BLOCKS as usize);
    assert_eq!(metric(addr, "snowskin_conductor_store_copies_asked_total"), f64::from(BLOCKS));
    assert_eq!(metric(addr, "snowskin_conductor_store_copies_in_flight"), 0.0);
    assert!(cluster.client.get(key(0).as_bytes()).unwrap().is_some());
    conductor.stop();
}

#[test]
fn copies_are_limited_and_a_dry_run_only_counts() {
    let mut cluster = Cluster::start();
    let few = StoreConfig { copies_per_min_max: 10, ..hot(&cluster) };
    let (limited, _events) = conductor(&cluster, few);
    let addr = limited.addr();
    eventually("the rest is refused", || {
        place(addr);
        refused(addr, "rate") >= f64::from(BLOCKS - 10)
    });
    eventually("the first have been copied", || {
        metric(addr, "snowskin_conductor_store_copies_done_total") == 10.0
    });
    assert_eq!(cluster.replicas(), BLOCKS as usize + 10);
    limited.stop();
    let (dry, _events) = conductor(&cluster, StoreConfig { dry_run: true, ..hot(&cluster) });
    let addr = dry.addr();
    eventually("it is counted", || {
        place(addr);
        refused(addr, "dry_run") >= f64::from(BLOCKS - 10)
    });
    assert_eq!(metric(addr, "snowskin_conductor_store_copies_asked_total"), 0.0);
    assert_eq!(cluster.replicas(), BLOCKS as usize + 10);
    dry.stop();
}

#[test]
fn a_master_that_is_away_stops_nothing() {
    let cluster = Cluster::start();
    let gone = StoreConfig { master: "127.0.0.1:1".into(), ..hot(&cluster) };
    let (conductor, _events) = conductor(&cluster, gone);
    let addr = conductor.addr();
    eventually("it is counted", || {
        place(addr);
        refused(addr, "unreachable") >= f64::from(2 * BLOCKS)
    });
    // What the engine was assumed to have after the last request is forgotten a little later.
    eventually("requests are placed as before", || place(addr) == "store");
    assert_eq!(get(addr, "/health").0, 200);
    assert_eq!(metric(addr, "snowskin_conductor_store_copies_asked_total"), 0.0);
    conductor.stop();
}

#[test]
fn names_of_objects_are_known_again_after_a_restart_with_a_snapshot() {
    let cluster = Cluster::start();
    let dir = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        let snapshot = Some(dir.path().join("index"));
        let (conductor, _events) = conductor_at(&cluster, hot(&cluster), snapshot);
        eventually("the prefix is fetched from the store", || place(conductor.addr()) == "store");
        conductor.stop();
    }
    assert!(dir.path().join("index").exists());
}
