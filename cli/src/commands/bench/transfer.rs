//! `snowskin bench transfer`: transfers from one process to another, over one fabric.

use std::ffi::OsStr;
use std::fmt;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::builder::{PossibleValue, TypedValueParser};
use clap::{Arg, Command, ValueEnum};
use serde::{Serialize, Serializer};
use te_core::{Access, Op, Status};
use te_engine::{Config, Engine, FabricEntry, Fabrics, LocalAddr, Tier, TransferRequest};

use super::copies::Copies;
use super::cpu_s_per_gib;
use super::memory::{self, Buffer, GpuArgs, GpuDriver, Place};
use super::pool::{PoolArgs, take_page};
use super::target::TargetReady;
use crate::commands::fabric_values;
use crate::commands::metadata::MetadataArg;
use crate::content::{Content, mix};
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::global::Global;
use crate::histogram::Histogram;
use crate::output::{Align, LiveTable, figure, rounded};
use crate::process::Child;
use crate::progress::Bar;
use crate::size::ByteSize;
use crate::{Outcome, fail, output, sys};

const AFTER_HELP: &str =
    "Each thread has its own engine and polls it. A batch of --batch requests is submitted, and the next one \
    when all of it has ended: latency is that of a whole batch, from submission to completion. Buffers have \
    at most --window bytes on either side; a larger batch uses the same places again. GB/s counts 10⁹ bytes; \
    CPU time is that of both processes per GiB (with --target, of this process alone). memcpy copies within \
    this process without an engine, to show what the memory can do.

Examples:
  snowskin bench transfer
  snowskin bench transfer --fabric memcpy,shm,tcp --block 1MiB --batch 1
  snowskin bench transfer --fabric tcp --op read --block 4KiB --batch 1 --duration 5 --json
  snowskin bench transfer --fabric tcp --verify --duration 1
  snowskin bench transfer --fabric tcp --memory cuda:0 --target-memory host --verify
  snowskin bench transfer --target 10.0.0.7:7400 --fabric tcp --connections 4
  snowskin bench transfer --target 10.0.0.7:7400 --fabric rdma --device mlx5_0,mlx5_1 --block 1MiB
  snowskin bench transfer --fabric cxl,nvmeof,tcp --block 1MiB --batch 16
  snowskin bench transfer --target prefill/3 --metadata http://10.0.0.5:9003/metadata";

/// Measure transfers between two processes, over each fabric
///
/// Starts the other process itself, or uses a `bench target` elsewhere. Prints one row per combination of
/// fabric, direction, block size, batch size and number of threads.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(super) struct Args {
    /// Fabrics to measure.
    #[arg(long, value_delimiter = ',', default_values = default_fabrics(), value_parser = ViaParser, value_name = "FABRIC,…")]
    fabric: Vec<Via>,
    /// Read from the target, or write to it.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Direction::Read, Direction::Write], value_name = "OP,…")]
    op: Vec<Direction>,
    /// Size of a request.
    #[arg(long, value_delimiter = ',', default_values = ["4KiB", "64KiB", "1MiB", "16MiB"], value_name = "SIZE,…")]
    block: Vec<ByteSize>,
    /// Requests per batch.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 128], value_name = "N,…", value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: Vec<u32>,
    /// Threads, each with its own engine and connections.
    #[arg(long, value_delimiter = ',', default_values_t = [1], value_name = "N,…", value_parser = clap::value_parser!(u32).range(1..=256))]
    threads: Vec<u32>,
    /// Seconds per combination.
    #[arg(long, default_value_t = 3.0, value_name = "S")]
    duration: f64,
    /// Use this `bench target` instead of starting one: HOST:PORT, or its --segment, looked up with
    /// --metadata.
    #[arg(long, value_name = "SEGMENT")]
    target: Option<String>,
    #[command(flatten)]
    metadata: MetadataArg,
    /// Longest buffer on either side.
    #[arg(long, default_value = "256MiB", value_name = "SIZE")]
    window: ByteSize,
    /// Where the memory of this process is: host, cuda:N or hip:N.
    #[arg(long, default_value_t, value_name = "PLACE")]
    memory: Place,
    /// Where the memory of the target is that this starts. Default: as --memory.
    #[arg(long, value_name = "PLACE", conflicts_with = "target")]
    target_memory: Option<Place>,
    #[command(flatten)]
    gpu: GpuArgs,
    #[command(flatten)]
    pool: PoolArgs,
    /// First page of the pool that this process takes, one per thread. Processes that use a pool at the same
    /// time take different ones.
    #[arg(long, default_value_t = 0, value_name = "N")]
    page: u32,
    /// Spread batches over this much of the target's memory, at random, so that what is read is not in the
    /// CPU's cache. Default: every batch uses the same places.
    #[arg(long, value_name = "SIZE")]
    working_set: Option<ByteSize>,
    /// TCP connections per engine.
    #[arg(long, alias = "lanes", default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    connections: u8,
    /// TCP congestion control of both ends (of this end, with --target). Default: cubic within a host, else
    /// the kernel's default.
    #[arg(long, value_name = "NAME")]
    congestion: Option<String>,
    /// RDMA devices or ports to use (mlx5_0, mlx5_0:1), on both ends unless there is a --target. Default:
    /// every active port.
    #[arg(long, value_name = "DEVICE,…", value_delimiter = ',')]
    device: Vec<String>,
    /// Length at which requests are cut into slices.
    #[arg(long, default_value = "64KiB", value_name = "SIZE")]
    slice: ByteSize,
    /// How long a waiting end polls before it sleeps, microseconds.
    #[arg(long, default_value_t = 50, value_name = "µs")]
    spin_us: u32,
    /// Verify payloads end to end with CRC-32C (TCP).
    #[arg(long)]
    checksum: bool,
    /// Write verifiable contents, read them back, and compare every byte. Not part of the measured time.
    #[arg(long)]
    verify: bool,
    /// Print one JSON array of objects.
    #[arg(long)]
    json: bool,
}

/// How bytes are moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Via {
    /// By engines, over these fabrics.
    Engine(Fabrics),
    /// Without an engine: memcpy of the C library, for comparison.
    Memcpy,
}

impl Via {
    /// By an engine within one process.
    const LOCAL: Self = Self::Engine(Fabrics::LOCAL);
}

impl fmt::Display for Via {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Engine(fabrics) => fabrics.fmt(f),
            Self::Memcpy => f.write_str("memcpy"),
        }
    }
}

impl Serialize for Via {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Parses a fabric of this build or `memcpy`, and lists them in the help.
#[derive(Clone, Debug)]
struct ViaParser;

impl TypedValueParser for ViaParser {
    type Value = Via;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<Via, clap::Error> {
        let parse = |text: &str| match text {
            "memcpy" => Ok(Via::Memcpy),
            text => text.parse().map(Via::Engine),
        };
        TypedValueParser::parse_ref(&parse, command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let memcpy =
            PossibleValue::new("memcpy").help("Without an engine: memcpy of the C library, for comparison");
        Some(Box::new(fabric_values().chain([memcpy])))
    }
}

/// Fabrics that connect two processes on any host, the slowest first.
fn default_fabrics() -> Vec<&'static str> {
    let has = |entry: &&FabricEntry<'_>| {
        entry.is_built() && entry.auto && !matches!(entry.tier, Tier::Local | Tier::Rdma)
    };
    te_engine::fabrics().iter().filter(has).map(|entry| entry.name).rev().collect()
}

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Direction {
    /// From the target to this process
    Read,
    /// From this process to the target
    Write,
}

#[derive(Clone, Debug, Serialize)]
struct Row {
    fabric: Via,
    op: Direction,
    block: u64,
    batch: u32,
    threads: u32,
    gb_s: f64,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    cpu_s_per_gib: f64,
    batches: u64,
    verified: bool,
    /// Where the memory of this process is, and that of the target, as it says.
    memory: String,
    target_memory: String,
    /// The driver of the GPU that has one of them.
    gpu: Option<GpuDriver>,
}

/// One combination of parameters.
#[derive(Clone, Copy, Debug)]
struct Combination {
    via: Via,
    op: Direction,
    block: u64,
    batch: u32,
    threads: u32,
}

const WARM_UP: Duration = Duration::from_millis(200);
/// A batch that takes longer is an error.
const BATCH_TIMEOUT: Duration = Duration::from_secs(60);
const READY_TIMEOUT: Duration = Duration::from_secs(20);

pub(super) fn run(args: &Args, global: Global) -> Outcome {
    check(args)?;
    sys::catch_interrupts();
    let uses_pool =
        |via: &Via| matches!(via, Via::Engine(fabrics) if fabrics.named().any(|one| one.name == "cxl"));
    let threads = u64::from(args.threads.iter().copied().max().unwrap_or(1));
    let there = args.working_set.map_or(0, |size| size.bytes()).max(largest_window(args)) * threads;
    let (pool, _temporary) = args.pool.or_temporary(there, args.fabric.iter().any(uses_pool))?;
    let args = &Args { pool, ..args.clone() };
    check_fabrics(args)?;
    let mut combinations = Vec::new();
    for &via in &args.fabric {
        for &op in &args.op {
            for block in args.block.iter().map(|block| block.bytes()) {
                for &batch in &args.batch {
                    combinations.extend(args.threads.iter().map(|&threads| Combination {
                        via,
                        op,
                        block,
                        batch,
                        threads,
                    }));
                }
            }
        }
    }
    let bar = Bar::new(combinations.len() as u64, "combinations", global.quiet);
    let mut table = LiveTable::new(&[
        ("fabric", Align::Left),
        ("op", Align::Left),
        ("block", Align::Right),
        ("batch", Align::Right),
        ("threads", Align::Right),
        ("GB/s", Align::Right),
        ("p50 µs", Align::Right),
        ("p99 µs", Align::Right),
        ("p99.9 µs", Align::Right),
        ("CPU s/GiB", Align::Right),
    ]);
    let mut rows = Vec::new();
    let mut ended = Exit::Ok;
    for combination in &combinations {
        let row = measure(args, *combination, global)?;
        if let Some(exit) = sys::interrupted() {
            ended = exit;
            break;
        }
        if !args.json {
            bar.suspend(|| table.row(&cells(&row)))?;
        }
        rows.push(row);
        bar.set(rows.len() as u64);
    }
    drop(bar);
    if args.json {
        output::print_json(&rows)?;
    }
    Ok(ended)
}

fn check(args: &Args) -> anyhow::Result<()> {
    if !(0.01..=3600.0).contains(&args.duration) {
        return fail(Failure::usage("--duration: choose 0.01 to 3600 seconds"));
    }
    let window = args.window.bytes();
    if let Some(block) = args.block.iter().find(|block| block.bytes() == 0 || block.bytes() > window) {
        return fail(Failure::usage(format!(
            "--block {block} must be from 1 B to --window, which is {}",
            args.window
        )));
    }
    if !(4096..=1 << 30).contains(&args.slice.bytes()) {
        return fail(Failure::usage(format!("--slice {} must be from 4KiB to 1GiB", args.slice)));
    }
    let is_device = args.memory.is_device() || args.target_memory.is_some_and(Place::is_device);
    if is_device && args.fabric.contains(&Via::Memcpy) {
        return fail(Failure::usage(
            "memcpy copies host memory alone: choose other fabrics, or --memory host",
        ));
    }
    if args.working_set.is_some() && args.fabric.contains(&Via::Memcpy) {
        return fail(Failure::usage("--working-set does not apply to memcpy: choose other fabrics"));
    }
    let threads = u64::from(args.threads.iter().copied().max().unwrap_or(1));
    let largest = largest_window(args);
    let there = args.working_set.map_or(0, |size| size.bytes()).max(largest);
    let on_host = |place: Place, bytes| if place.is_device() { 0 } else { bytes };
    let needed = on_host(args.memory, largest)
        .saturating_add(on_host(target_place(args), there))
        .saturating_mul(threads);
    if let Some(available) = crate::commands::available_memory()
        && needed > available / 10 * 9
    {
        return fail(Failure::failed(format!(
            "the buffers need {}, but this machine has only {} available: choose a smaller --window or fewer \
            --threads",
            ByteSize(needed).approximate(),
            ByteSize(available).approximate()
        )));
    }
    let remote = args.fabric.iter().find(|via| [Via::LOCAL, Via::Memcpy].contains(via));
    if let (Some(via), Some(_)) = (remote, &args.target) {
        return fail(Failure::usage(format!("--target does not work with fabric {via}")));
    }
    Ok(())
}

/// Reports fabrics that do not start on this host before the measurement, instead of in the child or in the
/// middle of a table.
fn check_fabrics(args: &Args) -> anyhow::Result<()> {
    for via in &args.fabric {
        let Via::Engine(fabrics) = *via else { continue };
        let mut engine = match Engine::start(config(args, fabrics)?) {
            Ok(engine) => engine,
            Err(error) => {
                return fail(
                    Failure::failed(format!("--fabric {via}: {error}"))
                        .hint("`snowskin doctor` reports what is missing"),
                );
            }
        };
        for place in [args.memory, target_place(args)].into_iter().filter(|place| place.is_device()) {
            let tried = Buffer::new(&mut engine, place, &args.gpu, 1, Access::all());
            let buffer = tried.with_context(|| format!("--fabric {via}"))?;
            engine.unregister(buffer.id())?;
        }
    }
    Ok(())
}

/// Where the memory of the target is that is started for the measurement.
fn target_place(args: &Args) -> Place {
    if args.target.is_some() { Place::HOST } else { args.target_memory.unwrap_or(args.memory) }
}

/// Size of one thread's buffer for the largest combination, bytes.
fn largest_window(args: &Args) -> u64 {
    let block = args.block.iter().map(|block| block.bytes()).max().unwrap_or(0);
    let batch = u64::from(args.batch.iter().copied().max().unwrap_or(1));
    block.saturating_mul(batch).min(args.window.bytes())
}

/// Places in the buffer: as many as the batch has requests, if they fit.
fn places(args: &Args, combination: &Combination) -> u64 {
    (args.window.bytes() / combination.block).clamp(1, u64::from(combination.batch))
}

/// Parts of the target's memory, each as long as a thread's buffer, that its batches use in turn.
fn sets(args: &Args, combination: &Combination) -> u64 {
    let each = places(args, combination) * combination.block;
    args.working_set.map_or(1, |size| (size.bytes() / each).max(1))
}

fn cells(row: &Row) -> [String; 10] {
    [
        row.fabric.to_string(),
        format!("{:?}", row.op).to_lowercase(),
        ByteSize(row.block).to_string(),
        row.batch.to_string(),
        row.threads.to_string(),
        figure(row.gb_s),
        figure(row.p50_us),
        figure(row.p99_us),
        figure(row.p999_us),
        figure(row.cpu_s_per_gib),
    ]
}

/// The process that has the memory at the other end.
enum Target {
    /// A child process.
    Child(Child, TargetReady),
    /// A process that was started elsewhere, by its endpoint.
    Remote(String),
    /// An engine in this process, which keeps its memory until it is dropped.
    Here(Box<(Engine, Buffer)>),
    /// None: plain copies.
    None,
}

impl Target {
    fn start(args: &Args, combination: &Combination, bytes: u64, global: Global) -> anyhow::Result<Self> {
        Ok(match (combination.via, &args.target) {
            (Via::Memcpy, _) => Self::None,
            (Via::LOCAL, _) => {
                let mut engine = Engine::start(config(args, Fabrics::LOCAL)?)?;
                let bytes = usize::try_from(bytes)?;
                let buffer = Buffer::new(&mut engine, target_place(args), &args.gpu, bytes, Access::all())?;
                Self::Here(Box::new((engine, buffer)))
            }
            (_, Some(target)) => Self::Remote(target.clone()),
            (via, None) => {
                let mut child_args = global.to_args();
                child_args.extend(["bench", "target", "--json"].map(str::to_owned));
                child_args.extend(["--fabric".to_owned(), via.to_string()]);
                child_args.extend(["--memory".to_owned(), bytes.to_string()]);
                child_args.extend(["--place".to_owned(), target_place(args).to_string()]);
                child_args.extend(args.gpu.to_args());
                child_args.extend(args.pool.to_args());
                child_args.extend(["--spin-us".to_owned(), args.spin_us.to_string()]);
                if !args.device.is_empty() {
                    child_args.extend(["--device".to_owned(), args.device.join(",")]);
                }
                child_args.extend(args.checksum.then(|| "--checksum".to_owned()));
                if let Some(name) = &args.congestion {
                    child_args.extend(["--congestion".to_owned(), name.clone()]);
                }
                let mut child = Child::start("the target", &child_args)?;
                let ready = child.ready(READY_TIMEOUT)?;
                Self::Child(child, ready)
            }
        })
    }

    fn endpoint(&self) -> Option<&str> {
        match self {
            Self::Child(_, ready) => Some(&ready.endpoint),
            Self::Remote(endpoint) => Some(endpoint),
            Self::Here(here) => Some(here.0.name()),
            Self::None => None,
        }
    }

    fn cpu(&mut self) -> Duration {
        sys::own_cpu() + if let Self::Child(child, _) = self { child.cpu() } else { Duration::ZERO }
    }
}

fn config(args: &Args, fabrics: Fabrics) -> Result<Config, Failure> {
    let mut config = Config { fabrics, metadata: args.metadata.config()?, ..Config::default() };
    config.slice_bytes = u32::try_from(args.slice.bytes()).unwrap_or(u32::MAX);
    config.spin_us = args.spin_us;
    args.gpu.apply(&mut config);
    args.pool.apply(&mut config);
    #[cfg(feature = "tcp")]
    {
        config.tcp.connections = args.connections;
        config.tcp.checksum = args.checksum;
        config.tcp.congestion.clone_from(&args.congestion);
    }
    #[cfg(feature = "rdma")]
    config.rdma.devices.clone_from(&args.device);
    Ok(config)
}

fn measure(args: &Args, combination: Combination, global: Global) -> anyhow::Result<Row> {
    let threads = combination.threads;
    let each = sets(args, &combination) * places(args, &combination) * combination.block;
    let mut target = Target::start(args, &combination, each * u64::from(threads), global)?;
    let endpoint = target.endpoint().map(str::to_owned);
    let barrier = Barrier::new(threads as usize + 1);
    let duration = Duration::from_secs_f64(args.duration);
    let (elapsed, cpu, results) = thread::scope(|scope| {
        let running: Vec<_> = (0..threads)
            .map(|index| {
                let (barrier, endpoint) = (&barrier, endpoint.as_deref());
                let place = (index, u64::from(index) * each);
                scope.spawn(move || one_thread(args, combination, endpoint, place, duration, barrier))
            })
            .collect();
        barrier.wait();
        let before = (Instant::now(), target.cpu());
        barrier.wait();
        let after = (Instant::now(), target.cpu());
        let results: Vec<_> = running
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow::anyhow!("a thread panicked")))
            .collect();
        (after.0 - before.0, after.1.saturating_sub(before.1), results)
    });
    let mut latency = Histogram::new();
    let mut there = Place::HOST;
    for result in results {
        match result? {
            Ok((theirs, place)) => {
                latency.merge(&theirs);
                there = place;
            }
            Err(error) => {
                // The target's last lines on stderr explain more than the failed transfer.
                if let Target::Child(child, _) = &mut target
                    && let Some(how) = child.died()
                {
                    return fail(Failure::failed(how));
                }
                return Err(error);
            }
        }
    }
    // It gives extents of a pool back when it stops.
    if let Target::Child(child, _) = &mut target {
        child.stop();
    }
    let bytes = latency.count() * u64::from(combination.batch) * combination.block;
    // With verification, the time between transfers is long; then only the time inside them counts.
    let seconds = if args.verify { latency.sum_s() / f64::from(threads) } else { elapsed.as_secs_f64() };
    Ok(Row {
        fabric: combination.via,
        op: combination.op,
        block: combination.block,
        batch: combination.batch,
        threads,
        gb_s: rounded(bytes as f64 / seconds / 1e9),
        p50_us: rounded(latency.quantile_us(0.5)),
        p99_us: rounded(latency.quantile_us(0.99)),
        p999_us: rounded(latency.quantile_us(0.999)),
        cpu_s_per_gib: rounded(cpu_s_per_gib(cpu, bytes)),
        batches: latency.count(),
        verified: args.verify,
        memory: args.memory.to_string(),
        target_memory: there.to_string(),
        gpu: driver_of(args, there)?,
    })
}

/// The driver of the GPU whose memory is measured, if there is one and this process uses it.
fn driver_of(args: &Args, there: Place) -> Result<Option<GpuDriver>, Failure> {
    let ours = memory::driver(&args.gpu, args.memory)?;
    if ours.is_some() || args.target.is_some() { Ok(ours) } else { memory::driver(&args.gpu, there) }
}

/// Runs one thread. It reaches both barriers even after an error, because the other threads wait there.
fn one_thread(
    args: &Args,
    combination: Combination,
    endpoint: Option<&str>,
    place: (u32, u64),
    duration: Duration,
    barrier: &Barrier,
) -> anyhow::Result<(Histogram, Place)> {
    let mut worker: anyhow::Result<Box<dyn Worker>> = match endpoint {
        Some(endpoint) => {
            Transfers::new(args, combination, endpoint, place).map(|worker| Box::new(worker) as _)
        }
        None => {
            let (places, batch) = (places(args, &combination), combination.batch);
            Copies::new(places, combination.block, batch).map(|worker| Box::new(worker) as _)
        }
    };
    let warm =
        worker.as_mut().map_or(Ok(()), |worker| run_for(&mut **worker, WARM_UP.min(duration)).map(drop));
    barrier.wait();
    let ran = match (&mut worker, warm) {
        (Ok(worker), Ok(())) => run_for(&mut **worker, duration),
        (_, warm) => warm.map(|()| Histogram::new()),
    };
    barrier.wait();
    let place = worker?.target();
    ran.map(|latency| (latency, place))
}

fn run_for(worker: &mut dyn Worker, duration: Duration) -> anyhow::Result<Histogram> {
    let mut latency = Histogram::new();
    let started = Instant::now();
    while started.elapsed() < duration && sys::interrupted().is_none() {
        latency.record(worker.batch()?);
    }
    Ok(latency)
}

/// Moves one batch and returns the time that it took.
pub(super) trait Worker {
    /// Where the memory of the target is.
    fn target(&self) -> Place;
    /// Moves one batch.
    fn batch(&mut self) -> anyhow::Result<Duration>;
}

/// Batches through an engine.
struct Transfers {
    engine: Engine,
    /// Dropped after the engine.
    local: Buffer,
    requests: Vec<TransferRequest>,
    /// The same places in the other direction, to prepare and to verify.
    reverse: Vec<TransferRequest>,
    places: u64,
    /// Number of parts of the target's memory, and the part that the requests name now.
    sets: u64,
    set: u64,
    random: u64,
    block: u64,
    direction: Direction,
    verify: Option<Verify>,
    target: Place,
}

/// State for verification.
struct Verify {
    content: Content,
    round: u64,
    block: Vec<u8>,
}

impl Transfers {
    fn new(
        args: &Args,
        combination: Combination,
        endpoint: &str,
        (thread, offset): (u32, u64),
    ) -> anyhow::Result<Self> {
        let Combination { block, batch, op, .. } = combination;
        let fabrics = match combination.via {
            Via::Engine(fabrics) => fabrics,
            Via::Memcpy => Fabrics::LOCAL,
        };
        let mut engine = Engine::start(config(args, fabrics)?)?;
        let places = places(args, &combination);
        let bytes = usize::try_from(places * block)?;
        let local = Buffer::new(&mut engine, args.memory, &args.gpu, bytes, Access::LOCAL)?;
        take_page(&engine, args.page.saturating_add(thread));
        let segment = engine.open_segment(endpoint)?;
        let regions = engine.segment_regions(segment)?;
        let sets = sets(args, &combination);
        let needed = offset + sets * places * block;
        let Some(region) = regions.iter().find(|region| region.len >= needed) else {
            let message = format!("the target exports less than {}", ByteSize(needed).approximate());
            return fail(
                Failure::failed(message)
                    .hint("start it with a larger --memory, or choose a smaller --window"),
            );
        };
        let request = |op, i: u64| {
            let at = i % places * block;
            let local = LocalAddr::Region(local.id(), at);
            TransferRequest { op, local, segment, remote_addr: region.addr + offset + at, len: block }
        };
        let (forth, back) = match op {
            Direction::Read => (Op::Read, Op::Write),
            Direction::Write => (Op::Write, Op::Read),
        };
        let requests = (0..u64::from(batch)).map(|i| request(forth, i)).collect();
        let reverse = (0..places).map(|i| request(back, i)).collect();
        let verify = args.verify.then(|| Verify {
            content: Content::new(offset),
            round: 0,
            block: vec![0; block as usize],
        });
        let (set, random, target) = (0, offset, Place::of(region.location));
        Ok(Self {
            engine,
            local,
            requests,
            reverse,
            places,
            sets,
            set,
            random,
            block,
            direction: op,
            verify,
            target,
        })
    }

    /// Switches to another part of the target's memory.
    fn turn(&mut self) {
        if self.sets == 1 {
            return;
        }
        self.random = self.random.wrapping_add(1);
        let set = mix(self.random) % self.sets;
        let (each, before) = (self.places * self.block, self.set);
        for request in self.requests.iter_mut().chain(&mut self.reverse) {
            request.remote_addr = request.remote_addr - before * each + set * each;
        }
        self.set = set;
    }

    fn fill(&mut self) -> anyhow::Result<()> {
        let Some(verify) = &mut self.verify else { return Ok(()) };
        verify.round += 1;
        for place in 0..self.places {
            verify.content.fill(verify.round * self.places + place, &mut verify.block);
            self.local.write(place * self.block, &verify.block)?;
        }
        Ok(())
    }

    fn clear(&mut self) -> anyhow::Result<()> {
        let Some(verify) = &mut self.verify else { return Ok(()) };
        verify.block.fill(0);
        for place in 0..self.places {
            self.local.write(place * self.block, &verify.block)?;
        }
        Ok(())
    }

    fn compare(&mut self) -> anyhow::Result<()> {
        let Some(verify) = &mut self.verify else { return Ok(()) };
        for place in 0..self.places {
            self.local.read(place * self.block, &mut verify.block)?;
            if let Err(wrong) = verify.content.verify(verify.round * self.places + place, &verify.block) {
                let at = place * self.block + wrong.offset as u64;
                let message =
                    format!("byte {at} arrived as {:#04x} instead of {:#04x}", wrong.found, wrong.expected);
                return fail(Failure::new(Exit::Verification, message));
            }
        }
        Ok(())
    }

    fn reverse(&mut self) -> anyhow::Result<()> {
        if self.verify.is_some() {
            move_batch(&mut self.engine, &self.reverse)?;
        }
        Ok(())
    }
}

impl Worker for Transfers {
    fn target(&self) -> Place {
        self.target
    }

    fn batch(&mut self) -> anyhow::Result<Duration> {
        self.turn();
        // Before a read, the contents are written; after a write, they are read back.
        self.fill()?;
        if self.direction == Direction::Read {
            self.reverse()?;
            self.clear()?;
        }
        let started = Instant::now();
        move_batch(&mut self.engine, &self.requests)?;
        let elapsed = started.elapsed();
        if self.direction == Direction::Write {
            self.clear()?;
            self.reverse()?;
        }
        self.compare()?;
        Ok(elapsed)
    }
}

fn move_batch(engine: &mut Engine, requests: &[TransferRequest]) -> anyhow::Result<()> {
    let batch = engine.submit(requests, Some(BATCH_TIMEOUT))?;
    let report = engine.wait(batch, None)?;
    engine.free(batch)?;
    anyhow::ensure!(report.status == Status::Completed, "a batch ended {:?}", report.status);
    Ok(())
}
