//! `snowskin bench tier`: how fast a node writes objects to its disk, and a client reads them from there.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;
use store_client::disk::{Caching, DiskError, FormatOptions};
use store_client::{BufferRange, Client, ClientConfig, Get, Put, PutOptions, SharedRegion, Store as _};
use store_core::MasterConfig;
use te_engine::Fabrics;

use super::cpu_s_per_gib;
use super::store::key_of;
use crate::commands::cluster::{Cluster, ClusterConfig, ClusterCpu};
use crate::commands::disk::format_file;
use crate::content::{Content, mix};
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::global::Global;
use crate::histogram::Histogram;
use crate::output::{Align, LiveTable, figure, rounded, thousands};
use crate::progress::Bar;
use crate::size::ByteSize;
use crate::{Outcome, fail, output, sys};

const AFTER_HELP: &str =
    "Starts a master and a node with a disk in FILE, and stores three quarters of the disk's size. The node \
    copies objects to the disk before the master evicts them; puts wait while it is behind, so the rate of \
    demotion is that of the disk, unless this host is slower at puts. Then objects that are on the disk \
    alone are read once, in random order, --batch in one call, and every byte is verified against its \
    checksum. The disk is read and written with direct I/O. Compare with `snowskin disk bench`, which measures \
    the disk alone, and with fio --direct=1 on the same file system. A miss is an object that was evicted \
    before it was copied, or that the disk did not deliver in time.

Then the node is killed and started again. The recovery is the time from when it lends its memory again until \
    the master knows all objects that are on the disk. Objects that were written just before the kill \
    may not be durable, and are not recovered. FILE is removed at the end.

Examples:
  snowskin bench tier --file /mnt/nvme0/bench.disk
  snowskin bench tier --file /mnt/nvme0/bench.disk --size 32GiB --value 64KiB --json";

/// Measure the disk tier: objects are demoted by a node and read by a client
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(super) struct Args {
    /// The file that is the disk. It must not exist.
    #[arg(long, value_name = "FILE")]
    file: PathBuf,
    /// Its size, at least 8 times --memory.
    #[arg(long, default_value = "4GiB", value_name = "SIZE")]
    size: ByteSize,
    /// Memory of the node.
    #[arg(long, default_value = "512MiB", value_name = "SIZE")]
    memory: ByteSize,
    /// Size of an object.
    #[arg(long, value_delimiter = ',', default_values = ["64KiB", "1MiB"], value_name = "SIZE,…")]
    value: Vec<ByteSize>,
    /// Objects per call.
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: u32,
    /// Seconds of reading per size, if there is so much to read.
    #[arg(long, default_value_t = 10.0, value_name = "S")]
    duration: f64,
    /// Print one JSON array of objects.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Debug, Serialize)]
struct Row {
    value: u64,
    batch: u32,
    /// Objects that were copied to the disk, bytes per second.
    demote_gb_s: f64,
    /// Objects that were read from the disk, bytes per second.
    read_gb_s: f64,
    p50_us: f64,
    p99_us: f64,
    cpu_s_per_gib: f64,
    reads: u64,
    /// Reads that came from memory after all.
    memory_hits: u64,
    misses: u64,
    /// Objects that the disk has brought back after the node was killed.
    recovered: u64,
    /// Objects that it has not.
    unrecovered: u64,
    /// How long that took, seconds.
    recovery_s: f64,
}

/// Longest registered buffer, bytes.
const BUFFER_BYTES_MAX: u64 = 256 << 20;
/// How long the node may take to mount its disk, or to make progress with it.
const PATIENCE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(1);

const COLUMNS: [(&str, Align); 11] = [
    ("value", Align::Right),
    ("batch", Align::Right),
    ("demote GB/s", Align::Right),
    ("read GB/s", Align::Right),
    ("p50 µs", Align::Right),
    ("p99 µs", Align::Right),
    ("CPU s/GiB", Align::Right),
    ("from memory", Align::Right),
    ("misses", Align::Right),
    ("recovered", Align::Right),
    ("in s", Align::Right),
];

pub(super) fn run(args: &Args, global: Global) -> Outcome {
    check(args)?;
    sys::catch_interrupts();
    let mut table = LiveTable::new(&COLUMNS);
    let mut rows = Vec::new();
    let bar = Bar::new(2 * args.value.len() as u64, "measurements", global.quiet);
    let mut ended = Exit::Ok;
    for &value in &args.value {
        let row = measure(args, value.bytes(), global, &bar, 2 * rows.len() as u64);
        if let Some(exit) = sys::interrupted() {
            ended = exit;
            break;
        }
        let row = row?;
        if !args.json {
            bar.suspend(|| table.row(&cells(&row)))?;
        }
        rows.push(row);
    }
    drop(bar);
    if args.json {
        output::print_json(&rows)?;
    }
    Ok(ended)
}

fn cells(row: &Row) -> [String; 11] {
    [
        ByteSize(row.value).to_string(),
        row.batch.to_string(),
        figure(row.demote_gb_s),
        figure(row.read_gb_s),
        figure(row.p50_us),
        figure(row.p99_us),
        figure(row.cpu_s_per_gib),
        thousands(row.memory_hits),
        thousands(row.misses),
        thousands(row.recovered),
        figure(row.recovery_s),
    ]
}

fn check(args: &Args) -> anyhow::Result<()> {
    if !(0.01..=3600.0).contains(&args.duration) {
        return fail(Failure::usage("--duration: choose 0.01 to 3600 seconds"));
    }
    let (size, memory) = (args.size.bytes(), args.memory.bytes());
    if memory == 0 || size / 8 < memory {
        let message = format!("--size {} is too little for --memory {}", args.size, args.memory);
        return fail(
            Failure::usage(message).hint("choose at least 8 times as much, so that objects leave the memory"),
        );
    }
    for value in &args.value {
        let all = value.bytes().saturating_mul(args.batch.into());
        if value.bytes() == 0 || all > BUFFER_BYTES_MAX || all > memory / 4 {
            let most = ByteSize(BUFFER_BYTES_MAX.min(memory / 4));
            let message = format!("--value {value} times --batch {} must be from 1 B to {most}", args.batch);
            return fail(Failure::usage(message).hint("a batch takes a quarter of the memory at most"));
        }
    }
    Ok(())
}

/// The file of the disk; removed with this.
struct File<'a>(&'a Path);

impl Drop for File<'_> {
    fn drop(&mut self) {
        // What cannot be removed is left to the user, who has named it.
        let _ = std::fs::remove_file(self.0);
    }
}

fn measure(args: &Args, value: u64, global: Global, bar: &Bar, done: u64) -> anyhow::Result<Row> {
    let options = FormatOptions {
        bytes: Some(args.size.bytes()),
        extent_bytes: None,
        force: false,
        caching: Caching::Direct,
    };
    if args.file.exists() {
        return fail(
            Failure::failed(format!("{} exists already", args.file.display()))
                .hint("remove it, or name another file: it is overwritten and removed at the end"),
        );
    }
    let file = File(&args.file);
    format_file(file.0, options, |error| {
        let failure = Failure::failed(error.to_string());
        match error {
            DiskError::NoDirectIo(_) | DiskError::NoFallocate(_) => {
                failure.hint("name a file on another file system, as ext4 or XFS")
            }
            _ => failure,
        }
        .into()
    })?;
    let mut cluster = Cluster::start(&ClusterConfig {
        nodes: 1,
        node_bytes: args.memory.bytes(),
        fabric: Fabrics::default(),
        lease_ms: Some(1000),
        eviction: None,
        local: None,
        disks: vec![args.file.clone()],
        global,
    })?;
    let measured = (|| {
        let client = Client::connect(ClientConfig::new(cluster.address().parse()?))
            .map_err(crate::commands::no_start)?;
        let mut bench = Bench::new(client, args, value)?;
        let demote_gb_s = bench.write(&mut cluster, bar)?;
        bar.set(done + 1);
        let row = bench.read(&mut cluster, demote_gb_s)?;
        let row = bench.recover(&mut cluster, row)?;
        bar.set(done + 2);
        Ok(row)
    })();
    cluster.stop();
    measured
}

struct Bench {
    client: Client,
    buffer: SharedRegion,
    content: Content,
    value: u64,
    batch: u64,
    memory: u64,
    /// The numbers of the objects to store.
    numbers: std::ops::Range<u64>,
    duration: Duration,
}

impl Bench {
    fn new(mut client: Client, args: &Args, value: u64) -> anyhow::Result<Self> {
        let batch = u64::from(args.batch);
        let buffer = client.alloc(usize::try_from(value * batch)?)?;
        super::memory::touch(&buffer)?;
        let first = mix(std::time::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos() as u64)) >> 8;
        let count = (args.size.bytes() / 4 * 3 / value).max(batch);
        let started = Instant::now();
        while client.master().stats()?.disks == 0 {
            if let Some(exit) = sys::interrupted() {
                return fail(Failure::silent(exit));
            }
            if started.elapsed() > PATIENCE {
                return fail(
                    Failure::failed(format!("the disk was not mounted within {} s", PATIENCE.as_secs()))
                        .hint("run again with -v to see the log of the node"),
                );
            }
            std::thread::sleep(PAUSE);
        }
        Ok(Self {
            client,
            buffer,
            content: Content::new(first),
            value,
            batch,
            memory: args.memory.bytes(),
            numbers: first..first + count,
            duration: Duration::from_secs_f64(args.duration),
        })
    }

    /// Stores the objects as fast as the disk takes them. Returns how fast that is, GB/s.
    fn write(&mut self, cluster: &mut Cluster, bar: &Bar) -> anyhow::Result<f64> {
        let behind_max = (self.memory as f64 * MasterConfig::default().demote_ahead / 2.0) as u64;
        let mut block = vec![0; usize::try_from(self.value)?];
        let mut began: Option<(Instant, u64)> = None;
        let mut progress = (0, Instant::now());
        let mut next = self.numbers.start;
        while next < self.numbers.end {
            if let Some(exit) = sys::interrupted() {
                return fail(Failure::silent(exit));
            }
            let stats = self.client.master().stats()?;
            if stats.demoted_bytes_total > progress.0 {
                progress = (stats.demoted_bytes_total, Instant::now());
                began.get_or_insert((progress.1, progress.0));
            }
            if stats.disk_backlog_bytes > behind_max {
                cluster.check_children(bar)?;
                if progress.1.elapsed() > PATIENCE {
                    return fail(Failure::failed(format!(
                        "the disk has written nothing for {} s",
                        PATIENCE.as_secs()
                    )));
                }
                std::thread::sleep(PAUSE);
                continue;
            }
            let keys: Vec<_> = (next..self.numbers.end.min(next + self.batch)).map(key_of).collect();
            for (slot, number) in (next..).take(keys.len()).enumerate() {
                self.content.fill(number, &mut block);
                self.buffer.write(slot as u64 * self.value, &block)?;
            }
            let mut items: Vec<_> =
                keys.iter().enumerate().map(|(slot, key)| Put::new(key, self.range(slot))).collect();
            let _ = self.client.batch_put(&mut items, &PutOptions::default());
            for item in items {
                anyhow::ensure!(item.into_result()?, "an object with the same key exists: run again");
            }
            next += keys.len() as u64;
        }
        let Some((began, before)) = began else {
            return fail(Failure::failed("nothing was copied to the disk").hint("choose a larger --size"));
        };
        let bytes = self.client.master().stats()?.demoted_bytes_total - before;
        Ok(bytes as f64 / began.elapsed().as_secs_f64() / 1e9)
    }

    fn range(&self, slot: usize) -> BufferRange {
        BufferRange::part(&self.buffer, slot as u64 * self.value, self.value)
    }

    /// Reads objects that are on the disk alone, each once.
    fn read(&mut self, cluster: &mut Cluster, demote_gb_s: f64) -> anyhow::Result<Row> {
        // The last that were stored may still be in memory.
        let end = self.numbers.end.saturating_sub(2 * self.memory / self.value).max(self.numbers.start + 1);
        let mut order: Vec<u64> = (self.numbers.start..end).collect();
        order.sort_unstable_by_key(|number| mix(*number));
        let mut latency = Histogram::new();
        let (before, hits) = (cluster.cpu(), self.client.counters());
        let (mut reads, mut misses) = (0, 0);
        let started = Instant::now();
        for numbers in order.chunks(self.batch as usize) {
            if sys::interrupted().is_some() || started.elapsed() > self.duration {
                break;
            }
            let keys: Vec<_> = numbers.iter().map(|&number| key_of(number)).collect();
            let mut items: Vec<_> =
                keys.iter().enumerate().map(|(slot, key)| Get::new(key, self.range(slot))).collect();
            let began = Instant::now();
            let _ = self.client.batch_get(&mut items);
            latency.record(began.elapsed());
            for item in items {
                reads += 1;
                misses += u64::from(item.into_result()?.is_none());
            }
        }
        let elapsed = started.elapsed().as_secs_f64();
        let used: ClusterCpu = cluster.cpu().since(before);
        let now = self.client.counters();
        let disk_hits = now.disk_hits - hits.disk_hits;
        let bytes = disk_hits * self.value;
        Ok(Row {
            value: self.value,
            batch: self.batch as u32,
            demote_gb_s: rounded(demote_gb_s),
            read_gb_s: rounded(bytes as f64 / elapsed / 1e9),
            p50_us: rounded(latency.quantile_us(0.5)),
            p99_us: rounded(latency.quantile_us(0.99)),
            cpu_s_per_gib: rounded(cpu_s_per_gib(used.total(), bytes)),
            reads,
            memory_hits: (now.hits - hits.hits).saturating_sub(disk_hits),
            misses,
            recovered: 0,
            unrecovered: 0,
            recovery_s: 0.0,
        })
    }

    /// Kills the node, and measures how long its disk takes to bring the objects back.
    fn recover(&mut self, cluster: &mut Cluster, row: Row) -> anyhow::Result<Row> {
        let before = self.client.master().stats()?;
        cluster.restart_first_node()?;
        cluster.first_node_ready()?;
        let began = Instant::now();
        // Until the disk has announced everything, the master remembers it as away as well.
        let after = loop {
            let stats = self.client.master().stats()?;
            if stats.disks > 0 && stats.disks_away == 0 {
                break stats;
            }
            if let Some(exit) = sys::interrupted() {
                return fail(Failure::silent(exit));
            }
            if began.elapsed() > PATIENCE {
                let message = format!("the disk was not recovered within {} s", PATIENCE.as_secs());
                return fail(Failure::failed(message).hint("run again with -v to see the log of the node"));
            }
            std::thread::sleep(PAUSE);
        };
        let recovery_s = rounded(began.elapsed().as_secs_f64());
        let recovered = after.disk_objects;
        let unrecovered = before.disk_objects.saturating_sub(recovered);
        Ok(Row { recovered, unrecovered, recovery_s, ..row })
    }
}
