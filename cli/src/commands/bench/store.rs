//! `snowskin bench store`: puts and gets of whole objects, including checksums.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::ValueEnum;
use serde::Serialize;
use store_client::{
    BufferRange, Client, ClientConfig, ErrorCode, Get, Put, PutOptions, RemoveMode, SharedRegion, Store as _,
    StoreError,
};
use te_engine::Fabrics;

use super::cpu_s_per_gib;
use crate::commands::FabricParser;
use crate::commands::cluster::{Cluster, ClusterConfig};
use crate::content::{Content, mix};
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::global::Global;
use crate::histogram::Histogram;
use crate::output::{Align, LiveTable, figure, rounded, thousands};
use crate::progress::Bar;
use crate::size::ByteSize;
use crate::{Outcome, fail, output, sys};

const AFTER_HELP: &str =
    "One client with one operation at a time, to and from registered memory; what is read is verified \
    against its checksum. get reads one random object among those stored before, batch-get --batch of them; \
    put and batch-put store new ones (when the pool is full, old ones are evicted, which is part of the \
    time). get-range reads a quarter of an object, starting at a third of it; put-parts stores an object from \
    16 pieces of memory. With --plain, objects come from and go to ordinary memory, which costs a copy. A \
    pool that is started here is written once before the measurement, as a pool in use has been. Latency is \
    that of one call; CPU time is that of client, master and nodes (with --master, of this process alone).

Examples:
  snowskin bench store
  snowskin bench store --value 1MiB --op get --fabric tcp
  snowskin bench store --master 10.0.0.5:50051           an existing store, if it is empty
  snowskin bench store --op batch-get --batch 128 --json | jq '.[].gb_s'";

/// Measure puts and gets of objects
///
/// Starts a master and nodes, or uses an existing store, and measures from a client: one row per combination
/// of operation and object size.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(super) struct Args {
    /// Size of an object.
    #[arg(long, value_delimiter = ',', default_values = ["4KiB", "1MiB"], value_name = "SIZE,…")]
    value: Vec<ByteSize>,
    /// Operations to measure.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [What::Put, What::Get, What::BatchGet], value_name = "OP,…")]
    op: Vec<What>,
    /// Objects per batch-get or batch-put.
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: u32,
    /// Fabrics to use between client and nodes.
    #[arg(long, default_value_t, value_parser = FabricParser, value_name = "FABRIC")]
    fabric: Fabrics,
    /// Number of node processes.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    nodes: u16,
    /// Memory of all nodes together.
    #[arg(long, default_value = "1GiB", value_name = "SIZE")]
    memory: ByteSize,
    /// Replicas per object.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=8))]
    replicas: u8,
    /// Seconds per combination.
    #[arg(long, default_value_t = 2.0, value_name = "S")]
    duration: f64,
    /// Put from and get into ordinary memory instead of registered memory.
    #[arg(long)]
    plain: bool,
    /// Use this store instead of starting one. Objects whose keys begin with `bench/` are left behind.
    #[arg(long, value_name = "HOST:PORT")]
    master: Option<String>,
    /// Measure a store that holds other objects as well, which may be evicted for those of the benchmark.
    #[arg(long, requires = "master")]
    yes: bool,
    /// Compare every byte that was read with what was stored. Not part of the measured time.
    #[arg(long)]
    verify: bool,
    /// Print one JSON array of objects.
    #[arg(long)]
    json: bool,
}

/// The operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum What {
    /// Store new objects
    Put,
    /// Read one object
    Get,
    /// Read --batch objects in one call
    BatchGet,
    /// Store --batch new objects in one call
    BatchPut,
    /// Read a part of an object
    GetRange,
    /// Store new objects, each from several pieces of memory
    PutParts,
}

impl What {
    fn is_put(self) -> bool {
        matches!(self, Self::Put | Self::BatchPut | Self::PutParts)
    }

    fn is_batch(self) -> bool {
        matches!(self, Self::BatchGet | Self::BatchPut)
    }
}

#[derive(Clone, Debug, Serialize)]
struct Row {
    op: What,
    value: u64,
    batch: u32,
    plain: bool,
    fabric: String,
    ops_s: f64,
    gb_s: f64,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    cpu_s_per_gib: f64,
    misses: u64,
    verified: bool,
}

/// Most objects that are stored for reading.
const OBJECTS_MAX: u64 = 4096;
/// Longest registered buffer, bytes.
const BUFFER_BYTES_MAX: u64 = 256 << 20;
/// Objects that are stored per call, if the buffer has room for them.
const FILL_BATCH: u64 = 16;
/// Length of the objects with which a pool is written the first time, bytes.
const TOUCH_BYTES: u64 = 4 << 20;
/// Pieces of memory per object of put-parts.
const PIECES: u64 = 16;
/// Prefix of the benchmark's keys.
const KEY_PREFIX: &[u8] = b"bench/";
/// Keys per page of a listing.
const PAGE: u32 = 1024;
const WARM_UP: Duration = Duration::from_millis(200);

pub(super) fn run(args: &Args, global: Global) -> Outcome {
    check(args)?;
    sys::catch_interrupts();
    let mut combinations = Vec::new();
    for &value in &args.value {
        combinations.extend(args.op.iter().map(|&op| (op, value.bytes())));
    }
    let mut cluster = match args.master {
        Some(_) => None,
        None => Some(Cluster::start(&ClusterConfig {
            nodes: args.nodes,
            node_bytes: args.memory.bytes().div_ceil(u64::from(args.nodes)),
            fabric: args.fabric,
            // The space of removed objects is free when no lease on them can be valid any more.
            lease_ms: Some(1000),
            eviction: None,
            local: None,
            disks: Vec::new(),
            global,
        })?),
    };
    let address = cluster.as_ref().map(Cluster::address).or(args.master.as_deref()).unwrap_or_default();
    let config = ClientConfig::new(address.parse()?).fabrics(args.fabric);
    let mut client = Client::connect(config).map_err(crate::commands::no_start)?;
    if cluster.is_none() && !args.yes {
        let foreign = foreign_objects(&mut client)?;
        if foreign > 0 {
            return fail(super::not_ours(address, foreign));
        }
    }
    let mut bench = Bench::new(client, args)?;
    if cluster.is_some() {
        bench.touch_pool(args.memory.bytes() / u64::from(args.replicas), global)?;
    }

    let bar = Bar::new(combinations.len() as u64, "combinations", global.quiet);
    let mut table = LiveTable::new(&COLUMNS);
    let mut rows = Vec::new();
    let mut ended = Exit::Ok;
    for &(op, value) in &combinations {
        let row = bench.measure(args, op, value, cluster.as_mut());
        if let Some(exit) = sys::interrupted() {
            ended = exit;
            break;
        }
        let row = match (row, cluster.as_mut()) {
            (Err(error), Some(cluster)) => {
                cluster.check_children(&bar)?;
                return Err(error);
            }
            (row, _) => row?,
        };
        if !args.json {
            bar.suspend(|| table.row(&cells(op, value, &row)))?;
        }
        rows.push(row);
        bar.set(rows.len() as u64);
    }
    drop(bar);
    drop(bench);
    if let Some(cluster) = cluster {
        cluster.stop();
    }
    if args.json {
        output::print_json(&rows)?;
    }
    Ok(ended)
}

const COLUMNS: [(&str, Align); 10] = [
    ("op", Align::Left),
    ("value", Align::Right),
    ("batch", Align::Right),
    ("calls/s", Align::Right),
    ("GB/s", Align::Right),
    ("p50 µs", Align::Right),
    ("p99 µs", Align::Right),
    ("p99.9 µs", Align::Right),
    ("CPU s/GiB", Align::Right),
    ("misses", Align::Right),
];

fn cells(op: What, value: u64, row: &Row) -> [String; 10] {
    [
        op.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default(),
        ByteSize(value).to_string(),
        row.batch.to_string(),
        figure(row.ops_s),
        figure(row.gb_s),
        figure(row.p50_us),
        figure(row.p99_us),
        figure(row.p999_us),
        figure(row.cpu_s_per_gib),
        thousands(row.misses),
    ]
}

/// Number of objects in the store that were not stored by a benchmark.
fn foreign_objects(client: &mut Client) -> anyhow::Result<u64> {
    let all = client.master().stats()?.objects;
    let (mut own, mut cursor) = (0, 0);
    loop {
        let page = client.master().list(KEY_PREFIX, cursor, PAGE)?;
        own += page.entries.len() as u64;
        cursor = page.cursor;
        // Objects of other tenants are not listed, but they count.
        if cursor == 0 || sys::interrupted().is_some() {
            return Ok(all.saturating_sub(own));
        }
    }
}

fn check(args: &Args) -> anyhow::Result<()> {
    if !(0.01..=3600.0).contains(&args.duration) {
        return fail(Failure::usage("--duration: choose 0.01 to 3600 seconds"));
    }
    for value in &args.value {
        if value.bytes() == 0 || value.bytes() > BUFFER_BYTES_MAX {
            return fail(Failure::usage(format!(
                "--value {value} must be from 1 B to {}",
                ByteSize(BUFFER_BYTES_MAX)
            )));
        }
        let wanted = value.bytes().saturating_mul(u64::from(args.nodes)).saturating_mul(4);
        if args.master.is_none() && wanted > args.memory.bytes() {
            let message = format!(
                "--memory {} is too little for objects of {value} on {} nodes",
                args.memory, args.nodes
            );
            return fail(Failure::usage(message).hint("each node needs memory for at least four objects"));
        }
    }
    if let (None, Some(available)) = (&args.master, crate::commands::available_memory())
        && args.memory.bytes() > available / 10 * 8
    {
        let available = ByteSize(available).approximate();
        return fail(Failure::failed(format!(
            "--memory {}: this machine has only {available} available",
            args.memory
        )));
    }
    Ok(())
}

/// A client, its buffer, and the numbers of the objects that it stored.
struct Bench {
    client: Client,
    buffer: SharedRegion,
    content: Content,
    options: PutOptions,
    next: u64,
    /// The objects to read: their length and numbers.
    stored: Option<(u64, std::ops::Range<u64>)>,
    scratch: Vec<u8>,
    plain: bool,
    /// Ordinary memory to read into.
    plain_into: Vec<u8>,
}

impl Bench {
    fn new(mut client: Client, args: &Args) -> anyhow::Result<Self> {
        let value = args.value.iter().map(|value| value.bytes()).max().unwrap_or(1);
        let batch = if args.op.iter().any(|op| op.is_batch()) { u64::from(args.batch) } else { FILL_BATCH };
        let bytes = value.saturating_mul(batch).min(BUFFER_BYTES_MAX).max(value).max(TOUCH_BYTES);
        let buffer = client.alloc(usize::try_from(bytes)?)?;
        super::memory::touch(&buffer)?;
        let options = PutOptions { replicas: args.replicas, ..PutOptions::default() };
        // Keys of another run must not collide with those of this one.
        let next = mix(std::time::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos() as u64)) >> 8;
        let content = Content::new(next);
        // Memory that was never written is one page of zeros to the kernel, which is always in the CPU's
        // cache.
        let mut scratch = vec![0; usize::try_from(value)?];
        content.fill(next, &mut scratch);
        Ok(Self {
            client,
            buffer,
            content,
            options,
            next,
            stored: None,
            scratch,
            plain: args.plain,
            plain_into: Vec::new(),
        })
    }

    fn measure(
        &mut self,
        args: &Args,
        op: What,
        value: u64,
        mut cluster: Option<&mut Cluster>,
    ) -> anyhow::Result<Row> {
        let batch = match op.is_batch() {
            true => u64::from(args.batch).min(self.buffer.len() as u64 / value).max(1),
            false => 1,
        };
        let first = self.next;
        let stored = if op.is_put() { 0..0 } else { self.readable(args, value)? };
        let mut run = Run { op, value, batch, stored, random: 1, misses: 0, latency: Histogram::new() };
        let duration = Duration::from_secs_f64(args.duration);
        self.run(&mut run, WARM_UP.min(duration), args.verify)?;
        (run.latency, run.misses) = (Histogram::new(), 0);
        let mut cpu = || match cluster.as_deref_mut() {
            Some(cluster) => cluster.cpu().total(),
            None => sys::own_cpu(),
        };
        let before = (Instant::now(), cpu());
        self.run(&mut run, duration, args.verify)?;
        let (elapsed, used) = (before.0.elapsed(), cpu().saturating_sub(before.1));
        if op.is_put() {
            self.remove(first..self.next)?;
            // The puts may have evicted the objects to read.
            if let Some((_, numbers)) = self.stored.take() {
                self.remove(numbers)?;
            }
        }
        let calls = run.latency.count();
        let moved = if op == What::GetRange { part_of(value).1 } else { value };
        let bytes = (calls * batch - run.misses) * moved;
        let seconds = if args.verify { run.latency.sum_s() } else { elapsed.as_secs_f64() };
        Ok(Row {
            op,
            value,
            batch: batch as u32,
            plain: args.plain,
            fabric: args.fabric.to_string(),
            ops_s: rounded(calls as f64 / seconds),
            gb_s: rounded(bytes as f64 / seconds / 1e9),
            p50_us: rounded(run.latency.quantile_us(0.5)),
            p99_us: rounded(run.latency.quantile_us(0.99)),
            p999_us: rounded(run.latency.quantile_us(0.999)),
            cpu_s_per_gib: rounded(cpu_s_per_gib(used, bytes)),
            misses: run.misses,
            verified: args.verify,
        })
    }

    /// Writes to about every page of a fresh pool once: the kernel allocates pages at the first write, and in
    /// a pool that is in use that has happened.
    fn touch_pool(&mut self, bytes: u64, global: Global) -> anyhow::Result<()> {
        let first = self.next;
        let count = bytes / TOUCH_BYTES;
        let bar = Bar::new(count, "pieces of the pool written once", global.quiet);
        for number in first..first + count {
            if let Some(exit) = sys::interrupted() {
                return fail(Failure::silent(exit));
            }
            let range = BufferRange::part(&self.buffer, 0, TOUCH_BYTES);
            match self.client.put(&key_of(number), range, &self.options) {
                // The remaining space is less than such an object.
                Err(error) if error.code().is_no_room() => break,
                stored => stored.context("cannot fill the pool")?,
            };
            self.next = number + 1;
            bar.set(self.next - first);
        }
        drop(bar);
        self.remove(first..self.next)
    }

    /// The objects to read: those of the measurement before if they have the same length, else new ones in
    /// their place.
    fn readable(&mut self, args: &Args, value: u64) -> anyhow::Result<std::ops::Range<u64>> {
        if let Some((stored, numbers)) = self.stored.take() {
            if stored == value {
                self.stored = Some((stored, numbers.clone()));
                return Ok(numbers);
            }
            self.remove(numbers)?;
        }
        let numbers = self.store(args, value)?;
        self.stored = Some((value, numbers.clone()));
        Ok(numbers)
    }

    /// Removes the objects with these numbers. Objects that were evicted are ignored.
    fn remove(&mut self, numbers: std::ops::Range<u64>) -> anyhow::Result<()> {
        let keys: Vec<_> = numbers.map(key_of).collect();
        let keys: Vec<&[u8]> = keys.iter().map(|key| &key[..]).collect();
        self.client.batch_remove(&keys, RemoveMode::Force)?;
        Ok(())
    }

    /// Stores as many objects as fit into a quarter of the pool, but not more than are needed.
    fn store(&mut self, args: &Args, value: u64) -> anyhow::Result<std::ops::Range<u64>> {
        let room = args.memory.bytes() / 4 / value / u64::from(args.replicas);
        let first = self.next;
        let end = first + room.clamp(1, OBJECTS_MAX);
        let slots = (self.buffer.len() as u64 / value).max(1);
        while self.next < end {
            if let Some(exit) = sys::interrupted() {
                return fail(Failure::silent(exit));
            }
            let numbers = self.next..end.min(self.next + slots);
            for (slot, number) in numbers.clone().enumerate() {
                let block = &mut self.scratch[..value as usize];
                self.content.fill(number, block);
                self.buffer.write(slot as u64 * value, block)?;
            }
            let keys: Vec<_> = numbers.clone().map(key_of).collect();
            let range = |slot: usize| BufferRange::part(&self.buffer, slot as u64 * value, value);
            let mut items: Vec<_> =
                keys.iter().enumerate().map(|(slot, key)| Put::new(key, range(slot))).collect();
            let _ = self.client.batch_put(&mut items, &self.options);
            for item in items {
                all_new(item).context("cannot store the objects to read")?;
            }
            self.next = numbers.end;
        }
        Ok(first..end)
    }

    /// Stores the next `batch` objects in one call.
    fn put(&mut self, value: u64, batch: u64, filled: bool) -> anyhow::Result<Duration> {
        let numbers = self.next..self.next + batch;
        if filled {
            for (slot, number) in numbers.clone().enumerate() {
                let block = &mut self.scratch[..value as usize];
                self.content.fill(number, block);
                self.buffer.write(slot as u64 * value, block)?;
            }
        }
        let keys: Vec<_> = numbers.clone().map(key_of).collect();
        // All objects have the same value, unless they are compared later: then there is a value per object
        // of the batch.
        let mut values = Vec::new();
        if self.plain && filled {
            values = vec![0; usize::try_from(batch * value)?];
            self.buffer.read(0, &mut values)?;
        }
        let scratch = &self.scratch[..value as usize];
        let item = |(slot, key)| match self.plain {
            true => Put::new(key, values.chunks(value as usize).nth(slot).unwrap_or(scratch)),
            false => Put::new(key, BufferRange::part(&self.buffer, slot as u64 * value, value)),
        };
        let mut items: Vec<_> = keys.iter().enumerate().map(item).collect();
        let started = Instant::now();
        let _ = self.client.batch_put(&mut items, &self.options);
        let elapsed = started.elapsed();
        items.into_iter().try_for_each(all_new)?;
        self.next = numbers.end;
        Ok(elapsed)
    }

    fn run(&mut self, run: &mut Run, duration: Duration, verify: bool) -> anyhow::Result<()> {
        let end = Instant::now() + duration;
        let mut numbers = Vec::new();
        while Instant::now() < end && sys::interrupted().is_none() {
            let elapsed = match run.op {
                What::Put | What::BatchPut => self.put(run.value, run.batch, verify)?,
                What::Get | What::BatchGet => self.read(run, &mut numbers, verify)?,
                What::GetRange => self.read_part(run, verify)?,
                What::PutParts => self.put_parts(run.value, verify)?,
            };
            run.latency.record(elapsed);
        }
        Ok(())
    }

    /// Stores the next object from pieces of equal length.
    fn put_parts(&mut self, value: u64, filled: bool) -> anyhow::Result<Duration> {
        let number = self.next;
        if filled {
            let block = &mut self.scratch[..value as usize];
            self.content.fill(number, block);
            self.buffer.write(0, block)?;
        }
        let key = key_of(number);
        let piece = value.div_ceil(PIECES);
        let (stored, elapsed) = if self.plain {
            let mut bytes = vec![0; value as usize];
            self.buffer.read(0, &mut bytes)?;
            let parts: Vec<&[u8]> = bytes.chunks(piece as usize).collect();
            let started = Instant::now();
            (self.client.put(&key, &parts, &self.options), started.elapsed())
        } else {
            let range = |at| BufferRange::part(&self.buffer, at, piece.min(value - at));
            let ranges: Vec<_> = (0..value).step_by(piece as usize).map(range).collect();
            let started = Instant::now();
            (self.client.put(&key, &ranges, &self.options), started.elapsed())
        };
        anyhow::ensure!(stored?, "an object with the same key exists from an earlier run: run again");
        self.next += 1;
        Ok(elapsed)
    }

    /// Reads a part of one object.
    fn read_part(&mut self, run: &mut Run, verify: bool) -> anyhow::Result<Duration> {
        run.random = run.random.wrapping_add(1);
        let number = run.stored.start + mix(run.random) % (run.stored.end - run.stored.start);
        let (key, (offset, len)) = (key_of(number), part_of(run.value));
        let mut found = Vec::new();
        let started = Instant::now();
        let item = match self.plain {
            true => Get::new(&key, &mut found),
            false => Get::new(&key, BufferRange::part(&self.buffer, 0, len)),
        };
        let read = self.client.get_with(item.range(offset..offset + len));
        let elapsed = started.elapsed();
        match hit(read)? {
            true if verify => {
                if !self.plain {
                    found = vec![0; len as usize];
                    self.buffer.read(0, &mut found)?;
                }
                let block = &mut self.scratch[..run.value as usize];
                self.content.fill(number, block);
                block[offset as usize..][..len as usize].copy_from_slice(&found);
                compare(&self.content, number, block)?;
            }
            true => {}
            false => run.misses += 1,
        }
        Ok(elapsed)
    }

    fn read(&mut self, run: &mut Run, numbers: &mut Vec<u64>, verify: bool) -> anyhow::Result<Duration> {
        numbers.clear();
        for _ in 0..run.batch {
            run.random = run.random.wrapping_add(1);
            numbers.push(run.stored.start + mix(run.random) % (run.stored.end - run.stored.start));
        }
        let keys: Vec<_> = numbers.iter().map(|&number| key_of(number)).collect();
        if self.plain {
            return self.read_plain(run, &keys, numbers, verify);
        }
        let range = |slot: usize| BufferRange::part(&self.buffer, slot as u64 * run.value, run.value);
        let mut items: Vec<_> =
            keys.iter().enumerate().map(|(slot, key)| Get::new(key, range(slot))).collect();
        let started = Instant::now();
        let _ = self.client.batch_get(&mut items);
        let elapsed = started.elapsed();
        for (slot, (item, &number)) in items.into_iter().zip(numbers.iter()).enumerate() {
            match hit(item.into_result())? {
                true if verify => {
                    let block = &mut self.scratch[..run.value as usize];
                    self.buffer.read(slot as u64 * run.value, block)?;
                    compare(&self.content, number, block)?;
                }
                true => {}
                false => run.misses += 1,
            }
        }
        Ok(elapsed)
    }

    /// As `read`, into ordinary memory.
    fn read_plain(
        &mut self,
        run: &mut Run,
        keys: &[[u8; 22]],
        numbers: &[u64],
        verify: bool,
    ) -> anyhow::Result<Duration> {
        let value = run.value as usize;
        if self.plain_into.len() < keys.len() * value {
            self.plain_into.resize(keys.len() * value, 0);
        }
        let places = self.plain_into.chunks_mut(value);
        let mut items: Vec<_> = keys.iter().zip(places).map(|(key, place)| Get::new(key, place)).collect();
        let started = Instant::now();
        let _ = self.client.batch_get(&mut items);
        let elapsed = started.elapsed();
        let results: Vec<_> = items.into_iter().map(Get::into_result).collect();
        for ((result, &number), bytes) in results.into_iter().zip(numbers).zip(self.plain_into.chunks(value))
        {
            match hit(result)? {
                true if verify => compare(&self.content, number, bytes)?,
                true => {}
                false => run.misses += 1,
            }
        }
        Ok(elapsed)
    }
}

/// Whether the object was read. An object none of whose replicas could be read counts as a miss.
fn hit(result: Result<Option<u64>, StoreError>) -> Result<bool, StoreError> {
    match result {
        Err(error) if error.code() == ErrorCode::TransferFail => Ok(false),
        result => Ok(result?.is_some()),
    }
}

/// Checks that an item was stored: the keys are new.
fn all_new(item: Put<'_>) -> anyhow::Result<()> {
    anyhow::ensure!(item.into_result()?, "an object with the same key exists from an earlier run: run again");
    Ok(())
}

/// Offset and length of the part that get-range reads.
fn part_of(value: u64) -> (u64, u64) {
    (value / 3, (value / 4).max(1))
}

fn compare(content: &Content, number: u64, block: &[u8]) -> anyhow::Result<()> {
    match content.verify(number, block) {
        Ok(()) => Ok(()),
        Err(wrong) => {
            let message = format!(
                "byte {} of an object was read as {:#04x}, but stored as {:#04x}",
                wrong.offset, wrong.found, wrong.expected
            );
            fail(Failure::new(Exit::Verification, message))
        }
    }
}

/// The state of one measurement.
struct Run {
    op: What,
    value: u64,
    batch: u64,
    stored: std::ops::Range<u64>,
    random: u64,
    misses: u64,
    latency: Histogram,
}

pub(super) fn key_of(number: u64) -> [u8; 22] {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut key = *b"bench/----------------";
    for (i, digit) in key[6..].iter_mut().enumerate() {
        *digit = DIGITS[(number >> (60 - 4 * i)) as usize & 15];
    }
    key
}
