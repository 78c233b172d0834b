//! One process of a soak: a master, a node, or a client that reads and writes all the time and checks every
//! byte.
//!
//! ```text
//! cargo run --release -p store-client --example soak master 127.0.0.1:50051
//! cargo run --release -p store-client --example soak node a 127.0.0.1:50051 16777216
//! cargo run --release -p store-client --example soak client 1 127.0.0.1:50051 42 1024
//! ```
//!
//! Each ends when its standard input ends. `cargo xtask soak` runs several of them, kills and stops them, and
//! judges. A client prints a line of counters per second, and `wrong …` for each wrong byte.

use std::env;
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use store_client::{
    BufferRange, Client, ClientConfig, ErrorCode, Fabrics, Get, Masters, Node, NodeConfig, Put, PutOptions,
    RemoveMode, Store as _,
};
use store_core::MasterConfig;
use store_master::{Config, MasterServer};
use te_core::testkit::Rng;
use te_engine::SharedRegion;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Longest object, bytes.
const OBJECT_BYTES_MAX: u64 = 128 << 10;
/// Objects in a batch, at most.
const BATCH_MAX: u64 = 8;
/// The writer's number, and the number of its put.
const HEAD_BYTES: usize = 16;

fn main() -> Result<()> {
    let words: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["master", listen] => be_master(listen),
        ["node", name, master, bytes] => be_node(name, master.parse()?, bytes.parse()?),
        ["client", who, master, seed, keys] => {
            be_client(who.parse()?, master.parse()?, seed.parse()?, keys.parse()?)
        }
        _ => Err("use `master LISTEN`, `node NAME MASTER BYTES` or `client WHO MASTER SEED KEYS`".into()),
    }
}

/// Leases, windows and timeouts are short, so that a soak of minutes sees them expire thousands of times.
fn be_master(listen: &str) -> Result<()> {
    let store = MasterConfig {
        lease_ttl_ms: 500,
        node_ttl_ms: 1_500,
        put_start_discard_timeout_ms: 2_000,
        put_start_release_timeout_ms: 20_000,
        soft_pin_ttl_ms: 5_000,
        ..MasterConfig::default()
    };
    let server = MasterServer::bind(Config {
        rpc_listen: listen.parse()?,
        http_listen: None,
        // There are more processes than cores.
        spin_us: 0,
        store,
        ..Config::default()
    })?;
    say(&format!("ready {}", server.rpc_addr()));
    let stopper = server.stopper();
    std::thread::spawn(move || {
        wait_for_parent();
        stopper.stop();
    });
    Ok(server.run()?)
}

fn be_node(name: &str, master: Masters, bytes: u64) -> Result<()> {
    let node = Node::start(NodeConfig::new(name, master, bytes))?;
    say(&format!("ready {}", node.endpoint()));
    wait_for_parent();
    node.stop();
    Ok(())
}

fn be_client(who: u64, master: Masters, seed: u64, keys: u64) -> Result<()> {
    let mut config = ClientConfig::new(master);
    config.rpc.call_ms_max = 3_000;
    config.transfer_ms_max = 2_000;
    // Clients with odd numbers use sockets, those with even numbers shared memory.
    if who % 2 == 1 {
        config = config.fabrics(Fabrics::TCP);
    }
    let client = Client::connect(config)?;
    say("ready");
    let over = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&over);
    std::thread::spawn(move || {
        wait_for_parent();
        flag.store(true, Ordering::Relaxed);
    });
    // A restarted client must not take its former puts for its own.
    let life = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64;
    let mut soak = Soak::new(client, who, Rng::new(seed ^ life), keys, life)?;
    let mut say_at = Instant::now();
    while !over.load(Ordering::Relaxed) {
        soak.step();
        if Instant::now() >= say_at {
            soak.report();
            say_at = Instant::now() + Duration::from_secs(1);
        }
    }
    soak.report();
    Ok(())
}

struct Soak {
    client: Client,
    region: SharedRegion,
    rng: Rng,
    who: u64,
    keys: u64,
    puts_begun: u64,
    counts: Counts,
}

/// Counts since the process began.
#[derive(Default)]
struct Counts {
    puts: u64,
    taken: u64,
    gets: u64,
    hits: u64,
    exists: u64,
    removes: u64,
    errors: u64,
    wrong: u64,
}

impl Soak {
    fn new(mut client: Client, who: u64, rng: Rng, keys: u64, life: u64) -> Result<Self> {
        let region = client.alloc((BATCH_MAX * OBJECT_BYTES_MAX) as usize)?;
        Ok(Self { client, region, rng, who, keys, puts_begun: life, counts: Counts::default() })
    }

    /// One call of a random kind.
    fn step(&mut self) {
        match self.rng.below(100) {
            0..10 => self.put(1),
            10..20 => self.put(BATCH_MAX),
            20..30 => self.put_from(),
            30..50 => self.get(1),
            50..70 => self.get(BATCH_MAX),
            70..85 => self.get_into(),
            85..92 => self.exists(),
            _ => self.remove(),
        }
    }

    fn put(&mut self, count: u64) {
        let names = self.names(count);
        let values: Vec<Vec<u8>> = names.iter().map(|name| self.next_value(*name)).collect();
        let keys: Vec<Vec<u8>> = names.iter().map(|name| key(*name)).collect();
        let items = keys.iter().zip(&values).map(|(key, value)| Put::new(key, value)).collect();
        self.put_all(items);
    }

    fn put_from(&mut self) {
        let names = self.names(BATCH_MAX);
        let mut items = Vec::new();
        for (slot, name) in names.iter().enumerate() {
            let value = self.next_value(*name);
            let at = slot as u64 * OBJECT_BYTES_MAX;
            // A range that is still in quarantine is refused below.
            let _ = self.region.write(at, &value);
            items.push((key(*name), BufferRange::part(&self.region, at, value.len() as u64)));
        }
        let items = items.iter().map(|(key, range)| Put::new(key, *range)).collect();
        self.put_all(items);
    }

    fn get(&mut self, count: u64) {
        let names = self.names(count);
        let keys: Vec<Vec<u8>> = names.iter().map(|name| key(*name)).collect();
        let mut values = vec![Vec::new(); keys.len()];
        let mut items: Vec<_> =
            keys.iter().zip(&mut values).map(|(key, value)| Get::new(key, value)).collect();
        let _ = self.client.batch_get(&mut items);
        let results: Vec<_> = items.into_iter().map(Get::into_result).collect();
        for ((result, value), name) in results.into_iter().zip(values).zip(names) {
            self.counts.gets += 1;
            match result {
                Ok(Some(_)) => self.verify(name, &value),
                Ok(None) => {}
                Err(_) => self.counts.errors += 1,
            }
        }
    }

    fn get_into(&mut self) {
        let names = self.names(BATCH_MAX);
        let keys: Vec<Vec<u8>> = names.iter().map(|name| key(*name)).collect();
        let range =
            |slot: usize| BufferRange::part(&self.region, slot as u64 * OBJECT_BYTES_MAX, OBJECT_BYTES_MAX);
        let mut items: Vec<_> =
            keys.iter().enumerate().map(|(slot, key)| Get::new(key, range(slot))).collect();
        let _ = self.client.batch_get(&mut items);
        for (slot, (item, name)) in items.into_iter().zip(names).enumerate() {
            self.counts.gets += 1;
            match item.into_result() {
                Ok(Some(len)) => {
                    let mut value = vec![0; len as usize];
                    if self.region.read(slot as u64 * OBJECT_BYTES_MAX, &mut value).is_ok() {
                        self.verify(name, &value);
                    }
                }
                Ok(None) => {}
                Err(_) => self.counts.errors += 1,
            }
        }
    }

    fn exists(&mut self) {
        let keys: Vec<Vec<u8>> = self.names(BATCH_MAX).iter().map(|name| key(*name)).collect();
        let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        match self.client.batch_exists(&keys) {
            Ok(found) => self.counts.exists += found.len() as u64,
            Err(_) => self.counts.errors += 1,
        }
    }

    fn remove(&mut self) {
        let name = self.rng.below(self.keys);
        let force = self.rng.below(2) == 0;
        match self.client.remove(&key(name), RemoveMode::forced(force)) {
            Ok(removed) => self.counts.removes += u64::from(removed),
            Err(error)
                if [ErrorCode::ObjectHasLease, ErrorCode::ReplicaIsNotReady].contains(&error.code()) => {}
            Err(_) => self.counts.errors += 1,
        }
    }

    fn options(&mut self) -> PutOptions {
        PutOptions { replicas: 1 + u8::from(self.rng.below(4) == 0), ..PutOptions::DEFAULT }
    }

    fn names(&mut self, count: u64) -> Vec<u64> {
        let mut names = Vec::new();
        for _ in 0..count {
            // Small numbers occur more often than large ones.
            let name = self.rng.below(self.keys).min(self.rng.below(self.keys));
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    fn next_value(&mut self, name: u64) -> Vec<u8> {
        self.puts_begun += 1;
        let (who, put) = (self.who, self.puts_begun);
        let mut value = vec![0; len_of(name, who, put)];
        value[..8].copy_from_slice(&who.to_le_bytes());
        value[8..HEAD_BYTES].copy_from_slice(&put.to_le_bytes());
        content(name, who, put, &mut value[HEAD_BYTES..]);
        value
    }

    fn put_all(&mut self, mut items: Vec<Put<'_>>) {
        let options = self.options();
        let tally = self.client.batch_put(&mut items, &options);
        self.counts.puts += tally.done as u64;
        self.counts.taken += tally.missed as u64;
        self.counts.errors += tally.failed as u64;
    }

    /// The head names the put; every other byte, and the length, follow from it and from the key.
    fn verify(&mut self, name: u64, value: &[u8]) {
        self.counts.hits += 1;
        let word = |at: usize| {
            value.get(at..at + 8).and_then(|word| Some(u64::from_le_bytes(word.try_into().ok()?)))
        };
        let right = match (word(0), word(8)) {
            (Some(who), Some(put)) => {
                let mut expected = vec![0; len_of(name, who, put) - HEAD_BYTES];
                content(name, who, put, &mut expected);
                value[HEAD_BYTES..] == expected
            }
            _ => false,
        };
        if !right {
            self.counts.wrong += 1;
            let head = &value[..value.len().min(HEAD_BYTES)];
            say(&format!("wrong bytes of key {name}: {} bytes that begin with {head:?}", value.len()));
        }
    }

    fn report(&self) {
        let Counts { puts, taken, gets, hits, exists, removes, errors, wrong } = self.counts;
        let seen = self.client.counters();
        say(&format!(
            "counts puts={puts} taken={taken} gets={gets} hits={hits} exists={exists} removes={removes} \
             errors={errors} wrong={wrong} mismatches={} lease_misses={} failovers={} quarantined={} \
             read_bytes={} written_bytes={}",
            seen.checksum_mismatches,
            seen.lease_misses,
            seen.replica_failovers,
            seen.quarantined_pieces,
            seen.read_bytes,
            seen.written_bytes,
        ));
    }
}

fn key(name: u64) -> Vec<u8> {
    format!("soak/{name}").into_bytes()
}

/// Lengths from a few bytes to the longest, short ones more often.
fn len_of(name: u64, who: u64, put: u64) -> usize {
    let bits = mix(name ^ mix(who ^ mix(put)));
    let longest = OBJECT_BYTES_MAX >> (bits % 8);
    HEAD_BYTES + (bits >> 8) as usize % (longest as usize - HEAD_BYTES)
}

fn content(name: u64, who: u64, put: u64, bytes: &mut [u8]) {
    let mut state = mix(put ^ mix(name ^ mix(who)));
    for word in bytes.chunks_mut(8) {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        word.copy_from_slice(&(state ^ state >> 29).to_le_bytes()[..word.len()]);
    }
}

/// The finisher of SplitMix64.
const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Prints one line at once. If the parent does not read any more, it is about to end this process.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

fn wait_for_parent() {
    let _ = std::io::stdin().read(&mut [0]);
}
