//! `snowskin bench master`: how many requests a master answers per second, and its memory per object.
//!
//! The clients are threads with a connection each and several requests in progress. Objects are metadata
//! only: the segment that is mounted is never read or written, so payload does not affect the measurement.

use std::sync::{Barrier, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::ValueEnum;
use serde::Serialize;
use store_client::{Masters, RpcConfig, RpcConnection};
use store_core::message::{
    Beat, Commit, Exists, Get, Heartbeat, Kind, LeaseWanted, Mount, MountSegment, NewObject, Operation as _,
    PutEnd, PutOptions, PutRequest, PutStart, ReadStats, Removal, Remove,
};
use store_core::{ErrorCode, Frame, Incarnation, Key, NodeId};

use crate::commands::cluster::MasterReady;
use crate::commands::no_master;
use crate::content::mix;
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::global::Global;
use crate::histogram::Histogram;
use crate::output::{Align, LiveTable, figure, rounded, thousands};
use crate::process::Child;
use crate::progress::Bar;
use crate::{Outcome, fail, output, sys};

/// A put needs a writer's identity: the master refuses one without.
const ASK: PutRequest = PutRequest { writer: 1, ..PutRequest::once(PutOptions::DEFAULT) };

const AFTER_HELP: &str =
    "exists and get request random keys among --objects stored ones; put stores new keys, and counts one \
    when its start and its end are both answered. Keys have 32 bytes. Latency is that of one request of \
    --batch keys (put: of both requests), with --depth of them in progress per connection. Memory per object \
    is the growth of the process (VmRSS), and the master's own estimate, both divided by --objects.

Examples:
  snowskin bench master
  snowskin bench master --op exists --batch 1 --clients 2 --depth 32
  snowskin bench master --op put --batch 128 --json | jq '.[].keys_s'";

/// Measure a master: operations per second, latencies, memory per object
///
/// Starts a master, fills it, and sends requests from several connections: one row per combination of
/// operation, batch and number of clients.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(super) struct Args {
    /// Operations to measure.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Ask::Exists, Ask::Put, Ask::Get], value_name = "OP,…")]
    op: Vec<Ask>,
    /// Keys per request.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 32, 128], value_name = "N,…", value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: Vec<u32>,
    /// Connections, each with its own thread.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2], value_name = "N,…", value_parser = clap::value_parser!(u32).range(1..=256))]
    clients: Vec<u32>,
    /// Requests in progress per connection.
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    depth: u32,
    /// Objects stored before measuring.
    #[arg(long, default_value_t = 1_000_000, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=50_000_000))]
    objects: u64,
    /// Seconds per combination.
    #[arg(long, default_value_t = 2.0, value_name = "S")]
    duration: f64,
    /// Measure this master instead of starting one. It is filled with keys that begin with `bench`, and a
    /// segment without memory is mounted at it.
    #[arg(long, env = "SNOWSKIN_BENCH_MASTER", hide_env_values = true, value_name = "HOST:PORT")]
    master: Option<String>,
    /// Measure a master that has nodes or objects. Puts of other clients may then be placed in memory that
    /// does not exist.
    #[arg(long, requires = "master")]
    yes: bool,
    /// Print one JSON array of objects.
    #[arg(long)]
    json: bool,
}

/// The operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Ask {
    /// Whether keys exist
    Exists,
    /// Start and end of a put
    Put,
    /// Locations of objects, with a lease
    Get,
}

#[derive(Clone, Debug, Serialize)]
struct Row {
    op: Ask,
    batch: u32,
    clients: u32,
    depth: u32,
    ops_s: f64,
    keys_s: f64,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    errors: u64,
    cpu_us_per_key: f64,
    objects: u64,
    bytes_per_object: Option<f64>,
    bytes_per_object_estimate: f64,
}

/// Objects per request while filling.
const FILL_BATCH: usize = 512;
/// Length of an object, which is never written, bytes.
const OBJECT_BYTES: u64 = 4096;
/// More than can be filled, so that allocation never fails.
const SEGMENT_BYTES: u64 = 1 << 44;
/// Range of key numbers per client: more than it can use.
const NUMBERS_EACH: u64 = 1 << 36;
/// How often the segment of the benchmark is kept mounted.
const BEAT_EVERY: Duration = Duration::from_secs(1);
const WARM_UP: Duration = Duration::from_millis(200);

pub(super) fn run(args: &Args, global: Global) -> Outcome {
    if !(0.01..=3600.0).contains(&args.duration) {
        return fail(Failure::usage("--duration: choose 0.01 to 3600 seconds"));
    }
    sys::catch_interrupts();
    let mut child = match &args.master {
        Some(_) => None,
        None => {
            let mut child_args = global.to_args();
            let fixed =
                ["master", "--listen", "127.0.0.1:0", "--http", "none", "--json", "--node-ttl-ms", "3600000"];
            child_args.extend(fixed.map(str::to_owned));
            Some(Child::start("the master", &child_args)?)
        }
    };
    let address = match &mut child {
        Some(child) => child.ready::<MasterReady>(Duration::from_secs(20))?.rpc,
        None => args.master.clone().unwrap_or_default(),
    };
    let address: Masters = address.parse()?;
    let mut control = RpcConnection::connect(address.clone(), RpcConfig::default()).map_err(no_master)?;
    if child.is_none() && !args.yes {
        let stats = control.call::<ReadStats>(&(), std::iter::empty()).map_err(no_master)?.0;
        if stats.objects > 0 || stats.segments > 0 {
            return fail(super::not_ours(&address.to_string(), stats.objects));
        }
    }
    let node = mount(&mut control)?;
    let _beats = Beats::start(address.clone(), node);
    let memory = fill(&mut control, args.objects, child.as_ref(), global)?;

    let duration = Duration::from_secs_f64(args.duration);
    let combinations: Vec<_> = args
        .op
        .iter()
        .flat_map(|&op| {
            args.batch
                .iter()
                .flat_map(move |&batch| args.clients.iter().map(move |&clients| (op, batch, clients)))
        })
        .collect();
    let bar = Bar::new(combinations.len() as u64, "combinations", global.quiet);
    let mut table = LiveTable::new(&COLUMNS);
    let mut rows = Vec::new();
    let mut first = args.objects;
    for (done, &(op, batch, clients)) in combinations.iter().enumerate() {
        let load = Load { op, batch: batch as usize, depth: args.depth as usize, objects: args.objects };
        let row = measure(&address, load, clients, duration, first, child.as_mut(), memory)?;
        first += NUMBERS_EACH * u64::from(clients);
        if let Some(exit) = sys::interrupted() {
            drop(bar);
            finish(args, &rows, memory)?;
            return Ok(exit);
        }
        if !args.json {
            bar.suspend(|| table.row(&cells(batch, clients, &row)))?;
        }
        rows.push(row);
        bar.set(done as u64 + 1);
    }
    drop(bar);
    finish(args, &rows, memory)?;
    Ok(Exit::Ok)
}

const COLUMNS: [(&str, Align); 10] = [
    ("op", Align::Left),
    ("batch", Align::Right),
    ("clients", Align::Right),
    ("ops/s", Align::Right),
    ("keys/s", Align::Right),
    ("p50 µs", Align::Right),
    ("p99 µs", Align::Right),
    ("p99.9 µs", Align::Right),
    ("CPU µs/key", Align::Right),
    ("errors", Align::Right),
];

fn cells(batch: u32, clients: u32, row: &Row) -> [String; 10] {
    [
        format!("{:?}", row.op).to_lowercase(),
        batch.to_string(),
        clients.to_string(),
        figure(row.ops_s),
        figure(row.keys_s),
        figure(row.p50_us),
        figure(row.p99_us),
        figure(row.p999_us),
        figure(row.cpu_us_per_key),
        thousands(row.errors),
    ]
}

fn finish(args: &Args, rows: &[Row], memory: Memory) -> anyhow::Result<()> {
    if args.json {
        return output::print_json(&rows);
    }
    let measured = memory.measured.map(|bytes| format!("{} B measured, ", figure(bytes))).unwrap_or_default();
    output::print(&format!(
        "\nmaster's memory per object, for {} objects with 32-byte keys: {measured}{} B by its own \
        estimate\n",
        thousands(args.objects),
        figure(memory.estimated)
    ))
}

/// Memory of the master per object, bytes.
#[derive(Clone, Copy, Debug)]
struct Memory {
    measured: Option<f64>,
    estimated: f64,
}

/// The load of each client.
#[derive(Clone, Copy, Debug)]
struct Load {
    op: Ask,
    batch: usize,
    depth: usize,
    objects: u64,
}

fn mount(control: &mut RpcConnection) -> anyhow::Result<Heartbeat> {
    let seconds = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let wall = u64::try_from(seconds.as_nanos()).unwrap_or(u64::MAX);
    let (node, incarnation) =
        (NodeId::new(mix(wall ^ u64::from(std::process::id()))), Incarnation::new(wall));
    let name = format!("bench-{node:016x}");
    // Port 9 is the discard service: no client reads or writes there.
    let segment = MountSegment {
        node,
        incarnation,
        name: &name,
        endpoint: "127.0.0.1:9",
        len: SEGMENT_BYTES,
        lineage: control.welcome().lineage,
        ..MountSegment::default()
    };
    control
        .call::<Mount>(&segment, std::iter::empty())
        .context("cannot mount a segment for the benchmark")?;
    Ok(Heartbeat { node, incarnation, key: 0 })
}

/// Keeps the segment of the benchmark mounted as long as it exists: the master removes nodes from which no
/// heartbeat comes.
struct Beats(Option<(mpsc::Sender<()>, JoinHandle<()>)>);

impl Beats {
    fn start(address: Masters, node: Heartbeat) -> Self {
        let (stop, stopped) = mpsc::channel();
        let beat = move || {
            let mut rpc = None;
            while stopped.recv_timeout(BEAT_EVERY) == Err(mpsc::RecvTimeoutError::Timeout) {
                if rpc.is_none() {
                    rpc = RpcConnection::connect(address.clone(), RpcConfig::default()).ok();
                }
                // A master that cannot be reached fails what is measured as well.
                if rpc.as_mut().is_some_and(|rpc| rpc.call::<Beat>(&node, std::iter::empty()).is_err()) {
                    rpc = None;
                }
            }
        };
        Self(Some((stop, thread::spawn(beat))))
    }
}

impl Drop for Beats {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.0.take() {
            drop(stop);
            let _ = thread.join();
        }
    }
}

fn fill(
    control: &mut RpcConnection,
    objects: u64,
    child: Option<&Child>,
    global: Global,
) -> anyhow::Result<Memory> {
    let resident = || child.and_then(Child::resident_bytes);
    let before = (resident(), stats_memory(control)?);
    let bar = Bar::new(objects, "objects stored", global.quiet);
    let mut keys = Vec::new();
    let mut generations = Vec::new();
    let mut done = 0;
    while done < objects {
        if let Some(exit) = sys::interrupted() {
            return fail(Failure::silent(exit));
        }
        let count = (objects - done).min(FILL_BATCH as u64);
        fill_keys(&mut keys, done..done + count);
        let items = keys.iter().map(|key| NewObject { key: Key(key), len: OBJECT_BYTES });
        let (_, allocations) = control.call::<PutStart>(&ASK, items).map_err(no_master)?;
        generations.clear();
        for allocation in allocations {
            let allocation =
                allocation.context("the master has no space for the objects of the benchmark")?;
            generations.push((allocation.generation, allocation.handle));
        }
        let items = keys.iter().zip(&generations).map(|(key, &(generation, handle))| Commit {
            key: Key(key),
            generation,
            handle,
            checksum: 0,
        });
        control.call::<PutEnd>(&(), items).map_err(no_master)?;
        done += count;
        bar.set(done);
    }
    let after = (resident(), stats_memory(control)?);
    let each = |before: u64, after: u64| after.saturating_sub(before) as f64 / objects as f64;
    Ok(Memory {
        measured: before.0.zip(after.0).map(|(before, after)| rounded(each(before, after))),
        estimated: rounded(each(before.1, after.1)),
    })
}

fn stats_memory(control: &mut RpcConnection) -> anyhow::Result<u64> {
    Ok(control.call::<ReadStats>(&(), std::iter::empty()).map_err(no_master)?.0.memory_bytes)
}

fn measure(
    address: &Masters,
    load: Load,
    clients: u32,
    duration: Duration,
    first: u64,
    mut child: Option<&mut Child>,
    memory: Memory,
) -> anyhow::Result<Row> {
    let barrier = Barrier::new(clients as usize + 1);
    let mut cpu = || sys::own_cpu() + child.as_mut().map(|child| child.cpu()).unwrap_or_default();
    let (elapsed, used, tallies) = thread::scope(|scope| {
        let threads: Vec<_> = (0..u64::from(clients))
            .map(|index| {
                let barrier = &barrier;
                scope.spawn(move || client(address, load, first + index * NUMBERS_EACH, duration, barrier))
            })
            .collect();
        barrier.wait();
        let before = (Instant::now(), cpu());
        barrier.wait();
        let after = (Instant::now(), cpu());
        let tallies: Vec<_> = threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow::anyhow!("a client panicked")))
            .collect();
        (after.0 - before.0, after.1.saturating_sub(before.1), tallies)
    });
    let mut all = Tally::default();
    for tally in tallies {
        let tally = tally??;
        all.latency.merge(&tally.latency);
        all.keys += tally.keys;
        all.errors += tally.errors;
    }
    let seconds = elapsed.as_secs_f64();
    Ok(Row {
        op: load.op,
        batch: load.batch as u32,
        clients,
        depth: load.depth as u32,
        ops_s: rounded(all.latency.count() as f64 / seconds),
        keys_s: rounded(all.keys as f64 / seconds),
        p50_us: rounded(all.latency.quantile_us(0.5)),
        p99_us: rounded(all.latency.quantile_us(0.99)),
        p999_us: rounded(all.latency.quantile_us(0.999)),
        errors: all.errors,
        cpu_us_per_key: rounded(used.as_secs_f64() * 1e6 / all.keys.max(1) as f64),
        objects: load.objects,
        bytes_per_object: memory.measured,
        bytes_per_object_estimate: memory.estimated,
    })
}

/// Runs one client. It reaches both barriers even after an error, because the other threads wait there.
fn client(
    address: &Masters,
    load: Load,
    first: u64,
    duration: Duration,
    barrier: &Barrier,
) -> anyhow::Result<Tally> {
    let mut client =
        RpcConnection::connect(address.clone(), RpcConfig::default()).map_err(no_master).map(|rpc| Client {
            rpc,
            load,
            first,
            next: first,
            random: first,
            under_way: Vec::new(),
            idle: Vec::new(),
            tally: Tally::default(),
        });
    let warm = client.as_mut().map_or(Ok(()), |client| client.run(WARM_UP.min(duration)));
    barrier.wait();
    let ran = match (&mut client, warm) {
        (Ok(client), Ok(())) => {
            client.tally = Tally::default();
            client.run(duration)
        }
        (_, warm) => warm,
    };
    barrier.wait();
    let mut client = client?;
    ran?;
    client.remove_own()?;
    Ok(client.tally)
}

/// The counts of a client.
#[derive(Clone, Debug, Default)]
struct Tally {
    latency: Histogram,
    keys: u64,
    errors: u64,
}

/// A connection and its requests in progress.
struct Client {
    rpc: RpcConnection,
    load: Load,
    /// Key numbers of this client: `first` to `next`.
    first: u64,
    next: u64,
    random: u64,
    under_way: Vec<(u64, Work)>,
    idle: Vec<Work>,
    tally: Tally,
}

/// One unit of work: its keys, its start time, and what has been answered.
struct Work {
    started: Instant,
    keys: Vec<[u8; KEY_BYTES]>,
    generations: Vec<(u64, u64)>,
}

/// Bytes of a key.
const KEY_BYTES: usize = 32;

impl Client {
    /// Keeps `depth` requests in progress for `duration`, then waits for the remaining ones.
    fn run(&mut self, duration: Duration) -> anyhow::Result<()> {
        let end = Instant::now() + duration;
        let mut counted = true;
        for _ in 0..self.load.depth {
            self.begin()?;
        }
        while !self.under_way.is_empty() {
            if counted && (Instant::now() >= end || sys::interrupted().is_some()) {
                counted = false;
            }
            // Answers that arrived together are handled together, and the requests that follow are sent in
            // one write.
            let mut answered = self.take_answer(true, counted)?;
            while answered {
                answered = !self.under_way.is_empty() && self.take_answer(false, counted)?;
            }
            self.rpc.flush()?;
        }
        Ok(())
    }

    fn begin(&mut self) -> anyhow::Result<()> {
        let mut work = self.idle.pop().unwrap_or_else(|| Work {
            started: Instant::now(),
            keys: Vec::new(),
            generations: Vec::new(),
        });
        work.keys.clear();
        for _ in 0..self.load.batch {
            let number = if self.load.op == Ask::Put {
                self.next += 1;
                self.next - 1
            } else {
                self.random = self.random.wrapping_add(1);
                mix(self.random) % self.load.objects
            };
            work.keys.push(key_of(number));
        }
        work.started = Instant::now();
        let keys = work.keys.iter().map(|key| Key(key));
        let id = match self.load.op {
            Ask::Exists => self.rpc.queue::<Exists>(&(), keys)?,
            Ask::Get => self.rpc.queue::<Get>(&LeaseWanted::Quick, keys)?,
            Ask::Put => {
                let objects = work.keys.iter().map(|key| NewObject { key: Key(key), len: OBJECT_BYTES });
                self.rpc.queue::<PutStart>(&ASK, objects)?
            }
        };
        self.under_way.push((id, work));
        Ok(())
    }

    /// Handles one answer, waiting for it if `wait`, and starts what follows from it. Returns whether there
    /// was one.
    fn take_answer(&mut self, wait: bool, counted: bool) -> anyhow::Result<bool> {
        let frame = if wait { Some(self.rpc.recv()?) } else { self.rpc.try_recv()? };
        let Some(frame) = frame else { return Ok(false) };
        let Some(index) = self.under_way.iter().position(|(id, _)| *id == frame.header.request_id) else {
            frame.header.result().context("the master refused the connection")?;
            anyhow::bail!(
                "the master answered a request that was not sent; run the same release on both sides"
            );
        };
        let (_, mut work) = self.under_way.swap_remove(index);
        let (errors, again) = read_answer(&frame, &mut work)?;
        self.tally.errors += errors;
        if again {
            let commits = work.keys.iter().zip(&work.generations);
            let commits = commits.map(|(key, &(generation, handle))| Commit {
                key: Key(key),
                generation,
                handle,
                checksum: 0,
            });
            let id = self.rpc.queue::<PutEnd>(&(), commits)?;
            self.under_way.push((id, work));
            return Ok(true);
        }
        if counted {
            self.tally.latency.record(work.started.elapsed());
            self.tally.keys += work.keys.len() as u64;
        }
        self.idle.push(work);
        if counted {
            self.begin()?;
        }
        Ok(true)
    }

    /// Removes the objects that its puts stored, so that the next measurement starts from the same state.
    fn remove_own(&mut self) -> anyhow::Result<()> {
        let mut keys = Vec::new();
        while self.first < self.next {
            let end = self.next.min(self.first + FILL_BATCH as u64);
            fill_keys(&mut keys, self.first..end);
            let removals = keys.iter().map(|key| Removal { key: Key(key), force: true });
            self.rpc.call::<Remove>(&(), removals).map_err(no_master)?;
            self.first = end;
        }
        Ok(())
    }
}

/// Reads an answer. Returns how many keys failed, and whether the put is to be ended now.
fn read_answer(frame: &Frame<'_>, work: &mut Work) -> anyhow::Result<(u64, bool)> {
    let count = |failed: usize| failed as u64;
    Ok(match Kind::from_byte(frame.header.kind) {
        Some(Kind::Exists) => {
            let ((), found) = Exists::decode_response(frame)?;
            (count(found.filter(|found| !found).count()), false)
        }
        Some(Kind::Get) => {
            let (_, objects) = Get::decode_response(frame)?;
            (count(objects.filter(Result::is_err).count()), false)
        }
        Some(Kind::PutEnd) => {
            let ((), ends) = PutEnd::decode_response(frame)?;
            (count(ends.filter(Result::is_err).count()), false)
        }
        Some(Kind::PutStart) => {
            let (_, allocations) = PutStart::decode_response(frame)?;
            work.generations.clear();
            let mut failed: Option<ErrorCode> = None;
            for allocation in allocations {
                match allocation {
                    Ok(allocation) => work.generations.push((allocation.generation, allocation.handle)),
                    Err(code) => failed = Some(code),
                }
            }
            if let Some(code) = failed {
                anyhow::bail!("a put was refused: {code}");
            }
            (0, true)
        }
        _ => anyhow::bail!("the master sent another kind of answer; run the same release on both sides"),
    })
}

fn fill_keys(keys: &mut Vec<[u8; KEY_BYTES]>, numbers: std::ops::Range<u64>) {
    keys.clear();
    keys.extend(numbers.map(key_of));
}

/// Spread like hashes of real blocks, but readable: `bench`, the hash of the number, and the number, in
/// hexadecimal.
fn key_of(number: u64) -> [u8; KEY_BYTES] {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut key = *b"bench/----------/---------------";
    for (i, digit) in key[6..16].iter_mut().enumerate() {
        *digit = DIGITS[(mix(number) >> (60 - 4 * i)) as usize & 15];
    }
    for (i, digit) in key[17..].iter_mut().enumerate() {
        *digit = DIGITS[(number >> (56 - 4 * i)) as usize & 15];
    }
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_unique_and_as_long_as_promised() {
        let keys: std::collections::HashSet<_> =
            (0..10_000).chain(NUMBERS_EACH..NUMBERS_EACH + 10_000).map(key_of).collect();
        assert_eq!(keys.len(), 20_000);
        assert!(keys.iter().all(|key| key.starts_with(b"bench/") && key.is_ascii()));
    }
}
