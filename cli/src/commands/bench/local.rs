//! `snowskin bench local`: compares the local client with the embedded client, in turns within one run.

use std::time::{Duration, Instant};

use serde::Serialize;
use store_client::local::LocalConfig;
use store_client::{
    BufferRange, Client, ClientConfig, Get, LocalBuffer, LocalClient, PutOptions, RemoveMode, SharedRegion,
    Store as _, StoreError,
};
use te_engine::Fabrics;

use super::cpu_s_per_gib;
use crate::commands::cluster::{Cluster, ClusterConfig};
use crate::commands::local::failure;
use crate::content::mix;
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::global::Global;
use crate::histogram::Histogram;
use crate::output::{Align, LiveTable, figure, rounded};
use crate::progress::Bar;
use crate::size::ByteSize;
use crate::{Outcome, fail, output, sys};

const AFTER_HELP: &str =
    "Starts a master and a node with a local socket. Both clients have one operation in \
progress at a time, to and from registered memory; what is read is verified against its checksum. They take \
turns, so that other load on the machine affects both. CPU time is that of client, master and node.

Examples:
  snowskin bench local
  snowskin bench local --value 64KiB,16MiB --rounds 20 --json";

/// Compare the local client with the embedded client
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(super) struct Args {
    /// Size of an object.
    #[arg(long, value_delimiter = ',', default_values = ["4KiB", "1MiB"], value_name = "SIZE,…")]
    value: Vec<ByteSize>,
    /// Turns per client, operation and size.
    #[arg(long, default_value_t = 10, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Duration of a turn, milliseconds.
    #[arg(long, default_value_t = 200, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=60_000))]
    turn_ms: u64,
    /// Print one JSON array of objects.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Debug, Serialize)]
struct Row {
    op: &'static str,
    value: u64,
    client: &'static str,
    ops_s: f64,
    gb_s: f64,
    p50_us: f64,
    p99_us: f64,
    cpu_s_per_gib: f64,
}

/// Memory of the node.
const NODE_BYTES: u64 = 1 << 30;
/// Longest object: the node and the arena have room for four of them.
const VALUE_BYTES_MAX: u64 = 64 << 20;
/// Number of objects to read in turn.
const OBJECTS: u64 = 64;

/// A client, with memory for one object.
enum BenchClient {
    Embedded(Box<Client>, SharedRegion),
    Local(Box<LocalClient>, LocalBuffer),
}

impl BenchClient {
    const fn name(&self) -> &'static str {
        match self {
            Self::Embedded(..) => "embedded",
            Self::Local(..) => "local",
        }
    }

    fn put(&mut self, key: &[u8], len: u64) -> anyhow::Result<()> {
        let options = PutOptions::default();
        let stored = match self {
            Self::Embedded(client, buffer) => client.put(key, BufferRange::part(buffer, 0, len), &options)?,
            Self::Local(client, buffer) => {
                client.put(key, buffer.part(0, len), &options).map_err(|error| failure("", &error))?
            }
        };
        anyhow::ensure!(stored, "an object with the same key exists from an earlier turn");
        Ok(())
    }

    fn get(&mut self, key: &[u8], len: u64) -> anyhow::Result<()> {
        let found = match self {
            Self::Embedded(client, buffer) => {
                client.get_with(Get::new(key, BufferRange::part(buffer, 0, len)))?
            }
            Self::Local(client, buffer) => {
                client.get_with(Get::new(key, buffer.part(0, len))).map_err(|error| failure("", &error))?
            }
        };
        anyhow::ensure!(found == Some(len), "a stored object does not exist any more");
        Ok(())
    }

    fn remove(&mut self, keys: &[Vec<u8>]) -> anyhow::Result<()> {
        let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        match self {
            Self::Embedded(client, _) => drop(client.batch_remove(&keys, RemoveMode::Force)?),
            Self::Local(client, _) => {
                drop(client.batch_remove(&keys, RemoveMode::Force).map_err(|error| failure("", &error))?);
            }
        }
        Ok(())
    }
}

#[derive(Default)]
struct Measured {
    latency: Histogram,
    elapsed: Duration,
    cpu: Duration,
}

pub(super) fn run(args: &Args, global: Global) -> Outcome {
    let longest = args.value.iter().map(|value| value.bytes()).max().unwrap_or(1);
    if args.value.iter().any(|value| value.bytes() == 0) || longest > VALUE_BYTES_MAX {
        let message = format!("--value must be from 1 B to {}", ByteSize(VALUE_BYTES_MAX));
        return fail(Failure::usage(message));
    }
    sys::catch_interrupts();
    let socket = std::env::temp_dir().join(format!("snowskin-bench-{}.sock", std::process::id()));
    let mut cluster = Cluster::start(&ClusterConfig {
        nodes: 1,
        node_bytes: NODE_BYTES,
        fabric: Fabrics::AUTO,
        // The space of removed objects is free when no lease on them can be valid any more.
        lease_ms: Some(1000),
        eviction: None,
        local: Some(socket.clone()),
        disks: Vec::new(),
        global,
    })?;
    let config = ClientConfig::new(cluster.address().parse()?);
    let mut embedded = Client::connect(config).map_err(crate::commands::no_start)?;
    let region = embedded.alloc(usize::try_from(longest)?)?;
    let arena_bytes = 2 * longest.max(1 << 20);
    let mut config = LocalConfig::new(&socket);
    config.arena_bytes = arena_bytes;
    let mut local = LocalClient::connect(config).map_err(|error| failure("", &StoreError::from(error)))?;
    let buffer = local.alloc(longest).map_err(|error| failure("", &error))?;
    let zeros = vec![0; usize::try_from(longest)?];
    region.write(0, &zeros)?;
    buffer.write(0, &zeros).map_err(|error| failure("", &error))?;
    let mut clients =
        [BenchClient::Embedded(Box::new(embedded), region), BenchClient::Local(Box::new(local), buffer)];

    let bar = Bar::new(2 * args.value.len() as u64, "combinations", global.quiet);
    let mut table = LiveTable::new(&[
        ("op", Align::Left),
        ("value", Align::Right),
        ("client  ", Align::Left),
        ("calls/s", Align::Right),
        ("GB/s", Align::Right),
        ("p50 µs", Align::Right),
        ("p99 µs", Align::Right),
        ("CPU s/GiB", Align::Right),
    ]);
    let mut rows = Vec::new();
    for value in args.value.iter().map(|value| value.bytes()) {
        for op in ["put", "get"] {
            let measured = measure(args, &mut clients, op, value, &mut cluster)?;
            if let Some(exit) = sys::interrupted() {
                return Ok(exit);
            }
            for (client, measured) in clients.iter().zip(measured) {
                let row = row(op, value, client.name(), &measured);
                if !args.json {
                    let cells = [
                        op.to_owned(),
                        ByteSize(value).to_string(),
                        row.client.to_owned(),
                        figure(row.ops_s),
                        figure(row.gb_s),
                        figure(row.p50_us),
                        figure(row.p99_us),
                        figure(row.cpu_s_per_gib),
                    ];
                    bar.suspend(|| table.row(&cells))?;
                }
                rows.push(row);
            }
            bar.set(rows.len() as u64 / 2);
        }
    }
    drop((bar, clients));
    cluster.stop();
    if args.json {
        output::print_json(&rows)?;
    }
    Ok(Exit::Ok)
}

fn measure(
    args: &Args,
    clients: &mut [BenchClient; 2],
    op: &'static str,
    value: u64,
    cluster: &mut Cluster,
) -> anyhow::Result<[Measured; 2]> {
    let turn = Duration::from_millis(args.turn_ms);
    // A quarter of the node at most: then a put finds space without evictions.
    let objects = (NODE_BYTES / 4 / value).clamp(1, OBJECTS);
    let mut number = mix(std::time::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos() as u64));
    let mut key = || {
        number = number.wrapping_add(1);
        format!("bench/{number:016x}").into_bytes()
    };
    let stored: Vec<_> = (0..if op == "get" { objects } else { 0 }).map(|_| key()).collect();
    for key in &stored {
        clients[0].put(key, value)?;
    }
    let mut measured = [Measured::default(), Measured::default()];
    // The first turn of each client is a warm-up.
    for round in 0..=args.rounds {
        for (client, measured) in clients.iter_mut().zip(&mut measured) {
            let before = cluster.cpu().total();
            let started = Instant::now();
            let mut written = Vec::new();
            let mut latency = Histogram::new();
            while started.elapsed() < turn && sys::interrupted().is_none() {
                let at = latency.count() as usize;
                let (took, full) = match stored.is_empty() {
                    true => {
                        written.push(key());
                        let begun = Instant::now();
                        client.put(&written[at], value)?;
                        (begun.elapsed(), written.len() as u64 >= objects * 2)
                    }
                    false => {
                        let begun = Instant::now();
                        client.get(&stored[at % stored.len()], value)?;
                        (begun.elapsed(), false)
                    }
                };
                latency.record(took);
                if full {
                    break;
                }
            }
            let (elapsed, cpu) = (started.elapsed(), cluster.cpu().total().saturating_sub(before));
            client.remove(&written)?;
            if round > 0 {
                measured.latency.merge(&latency);
                measured.elapsed += elapsed;
                measured.cpu += cpu;
            }
        }
    }
    clients[0].remove(&stored)?;
    Ok(measured)
}

fn row(op: &'static str, value: u64, client: &'static str, measured: &Measured) -> Row {
    let calls = measured.latency.count();
    let bytes = calls * value;
    let seconds = measured.elapsed.as_secs_f64();
    Row {
        op,
        value,
        client,
        ops_s: rounded(calls as f64 / seconds),
        gb_s: rounded(bytes as f64 / seconds / 1e9),
        p50_us: rounded(measured.latency.quantile_us(0.5)),
        p99_us: rounded(measured.latency.quantile_us(0.99)),
        cpu_s_per_gib: rounded(cpu_s_per_gib(measured.cpu, bytes)),
    }
}
