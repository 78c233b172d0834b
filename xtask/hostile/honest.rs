//! The honest processes: a master and nodes with short timeouts, and a prober that sends requests at a steady
//! pace.

use super::{Result, Turn, mix, say, value_of, wait_for_parent};
use std::net::SocketAddr;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use store_client::{
    Client, ClientConfig, ErrorCode, Fabrics, Masters, Node, NodeConfig, PutOptions, Store as _,
};
use store_core::MasterConfig;
use store_master::{Config, MasterServer};

/// Interval between two rounds of the prober: one put, one get, one exists.
const ROUND: Duration = Duration::from_millis(20);
/// Number of keys that it uses repeatedly: so few that they are read before they are evicted.
const KEYS: u64 = 32;
const VALUE_BYTES: usize = 4096;

/// Runs the master. Leases, windows and timeouts are short, so that writers that are stopped for seconds
/// exceed all of them.
pub(crate) fn master(rpc: SocketAddr, http: SocketAddr) -> Result<()> {
    let store = MasterConfig {
        lease_ttl_ms: 1_000,
        node_ttl_ms: 4_000,
        put_start_discard_timeout_ms: 2_000,
        put_start_release_timeout_ms: 6_000,
        ..MasterConfig::default()
    };
    let config = Config { rpc_listen: rpc, http_listen: Some(http), spin_us: 0, store, ..Config::default() };
    let server = MasterServer::bind(config)?;
    say(&format!("ready {}", server.rpc_addr()));
    let stopper = server.stopper();
    std::thread::spawn(move || {
        wait_for_parent();
        stopper.stop();
    });
    Ok(server.run()?)
}

pub(crate) fn node(
    name: &str,
    master: Masters,
    bytes: u64,
    control: SocketAddr,
    data: SocketAddr,
) -> Result<()> {
    let mut config = NodeConfig::new(name, master, bytes);
    config.engine.listen = control;
    config.engine.tcp.port = data.port();
    let node = Node::start(config)?;
    say(&format!("ready {}", node.endpoint()));
    wait_for_parent();
    node.stop();
    Ok(())
}

/// Runs the prober. It prints `times OPERATION µs…` with the duration of each call, once per second.
pub(crate) fn probe(turn: &mut Turn, master: Masters) -> Result<()> {
    let mut client = Client::connect(ClientConfig::new(master).fabrics(Fabrics::TCP))?;
    let life = mix(SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64);
    let mut times: [(&str, Vec<u64>); 3] = [("exists", vec![]), ("get", vec![]), ("put", vec![])];
    let mut say_at = Instant::now() + Duration::from_secs(1);
    let mut next_at = Instant::now();
    while turn.goes_on() {
        let key = format!("probe/{life:x}/{}", turn.below(KEYS)).into_bytes();
        let began = Instant::now();
        match client.exists(&key) {
            Ok(_) => turn.count("probed_exists", 1),
            Err(_) => turn.count("probe_errors", 1),
        }
        let asked = Instant::now();
        match client.get(&key) {
            Ok(Some(value)) if value == value_of(&key, VALUE_BYTES) => turn.count("probed_hits", 1),
            Ok(Some(value)) => turn.wrong(&format!("bytes of {}: {} B", key.escape_ascii(), value.len())),
            Ok(None) => turn.count("probed_misses", 1),
            Err(_) => turn.count("probe_errors", 1),
        }
        let got = Instant::now();
        // One key is always new, so that every round has something to put.
        let fresh = format!("probe/{life:x}/{}", KEYS + turn.below(1 << 40)).into_bytes();
        let key = if turn.below(2) == 0 { key } else { fresh };
        match client.put(&key, &value_of(&key, VALUE_BYTES), &PutOptions::DEFAULT) {
            Ok(_) => turn.count("probed_puts", 1),
            Err(error) if error.code() == ErrorCode::ObjectAlreadyExists => turn.count("probed_puts", 1),
            Err(_) => turn.count("probe_errors", 1),
        }
        let put = Instant::now();
        let spans = [asked - began, got - asked, put - got];
        for ((_, list), span) in times.iter_mut().zip(spans) {
            list.push(span.as_micros() as u64);
        }
        if put >= say_at {
            for (name, list) in &mut times {
                let words: Vec<String> = list.drain(..).map(|time| time.to_string()).collect();
                say(&format!("times {name} {}", words.join(" ")));
            }
            say_at = put + Duration::from_secs(1);
        }
        // A round that took long does not make the next ones come sooner.
        next_at = (next_at + ROUND).max(put);
        turn.pause(next_at - put);
    }
    Ok(())
}
