//! `snowskin replay`: the main use case, end to end: real processes, real data, every byte verified.

mod belady;
mod compare;
mod disks;
mod driver;
mod plot;
mod report;
mod simulate;
mod simulated_disk;
mod source;
mod store;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use store_core::EvictionPolicy;
use store_core::allocator::GRAIN_BYTES;
use store_core::chunks::stored_len;
use te_engine::Fabrics;

use crate::commands::cluster::{Cluster, ClusterConfig};
use crate::commands::{FabricParser, eviction_parser};
use crate::content::Content;
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::global::Global;
use crate::output::rounded;
use crate::progress::Bar;
use crate::size::ByteSize;
use crate::{Outcome, fail, output, sys};
use disks::{DiskDir, DiskFiles, Pace, Shape};
use driver::{Counters, Driver};
use report::{OnDisk, Report};
use simulate::{Tier, Tokens};
use source::{Source, Survey};

const AFTER_HELP: &str = "For each request of the trace, in order and without its pauses, the command does \
    this:
  1. ask the master for the length of the cached prefix (one batch_exists)
  2. get the blocks of that prefix, verify every byte   (batches of --batch blocks)
  3. put the blocks that were missing                   (batches of --batch blocks)
A block counts as a hit when it is in the longest prefix that was actually read and was correct.

Output: latencies are per batch call; GiB/s counts the time inside those calls; cpu_s_per_gib is the CPU \
time of all processes (client with its verification, master, nodes) per GiB read or written.

With --simulate, no process is started and no data is moved: the master's own code is run on the trace, once \
per policy and capacity, and the hit rates are printed as a table (or as JSON, or plotted). It shows how \
much memory is worthwhile, and which --eviction suits the requests. With --disk-tokens, each pool is simulated \
once more with a disk of each of these capacities under it: hits then are hits in memory or on the disk.

Without --simulate, --disk-tokens and --disk give the nodes disks: files that are written with direct I/O, in a \
temporary directory, or in the one that --disk names. Blocks are copied to the disk of their node before they \
are evicted. Because a replay has no pauses, a request waits while the disks are far behind.

With --compare, each policy and capacity is both simulated and replayed, and the exit code is 1 when two hit \
rates differ by more than --agree-within percentage points.

A trace has one JSON object per line:
  {\"timestamp\": 0, \"input_length\": 900, \"output_length\": 3, \"hash_ids\": [0, 7]}
An id stands for one block of 512 tokens and everything before it. Without --trace, a multi-turn workload is \
generated.

Examples:
  snowskin replay                              generated workload, two nodes, enough capacity
  snowskin replay --trace trace.jsonl --json   your trace; prints one JSON object at the end
  snowskin replay --capacity-blocks 2000       too little memory for all blocks: evictions
  snowskin replay --block-bytes 64KiB --nodes 4 --fabric tcp
  snowskin replay --trace trace.jsonl --simulate --svg hits.svg
  snowskin replay --trace trace.jsonl --simulate --policies trial,lru --capacity-tokens 3.0M,10M
  snowskin replay --trace trace.jsonl --simulate --policies trial --capacity-tokens 3M --disk-tokens 25.6M
  snowskin replay --trace trace.jsonl --capacity-blocks 5859 --disk-tokens 25.6M
  snowskin replay --capacity-blocks 2000 --disk /mnt/nvme0:4GiB      keeps the disks of its nodes there
  snowskin replay --trace trace.jsonl --compare --policies all --capacity-blocks 10000,20000";

/// Replay a request trace against a real cluster of processes on this machine
///
/// Starts a master and nodes as separate processes; looks up, gets, verifies and puts KV-cache blocks as the
/// requests of a trace would; and reports hit rate, throughput and CPU time. No process is left running
/// afterwards.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// Trace to replay; without it, a seeded multi-turn workload is generated.
    #[arg(long, env = "SNOWSKIN_TRACE", hide_env_values = true, value_name = "FILE.jsonl")]
    trace: Option<PathBuf>,
    /// Requests to replay [default: the whole trace; 2000 without one].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    requests: Option<u64>,
    /// Number of node processes.
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    nodes: u16,
    /// Size of a block.
    #[arg(long, default_value = "4KiB", value_name = "SIZE")]
    block_bytes: ByteSize,
    /// Blocks that fit into the pool of all nodes together; several with --compare [default: all blocks of
    /// the trace, and some more; with --compare a quarter and a half of them].
    #[arg(long, value_delimiter = ',', value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    capacity_blocks: Vec<u64>,
    /// Blocks per get or put call [default: 512, fewer when they are long].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    batch: Option<u16>,
    /// Fabrics to use between client and nodes.
    #[arg(long, default_value_t, value_parser = FabricParser, value_name = "FABRIC")]
    fabric: Fabrics,
    /// Seed of block contents and of the generated workload.
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,
    /// Lease time, milliseconds: how long a reader's blocks are protected from eviction.
    #[arg(long, default_value_t = 1000, value_name = "MS", value_parser = clap::value_parser!(u32).range(50..))]
    lease_ms: u32,
    /// Eviction policy.
    #[arg(long, env = "SNOWSKIN_EVICTION", hide_env_values = true, default_value_t, value_name = "POLICY", value_parser = eviction_parser())]
    eviction: EvictionPolicy,
    /// Compute hit rates without moving data.
    #[arg(long, conflicts_with = "capacity_blocks", group = "hits")]
    simulate: bool,
    /// Compute hit rates and replay, one after the other, and report where they differ.
    #[arg(long, conflicts_with = "simulate", group = "hits")]
    compare: bool,
    /// Largest allowed difference between simulated and real hit rate, percentage points.
    #[arg(long, requires = "compare", default_value_t = 0.5, value_name = "POINTS")]
    agree_within: f64,
    /// Policies to simulate or compare, or all [default: all]. Belady's bound is always simulated.
    #[arg(long, requires = "hits", value_delimiter = ',', value_name = "POLICY,…", value_parser = policies_parser())]
    policies: Vec<Policies>,
    /// Capacities to simulate, in tokens, 512 per block [default: from 1/32 of the trace's blocks to all].
    #[arg(long, requires = "simulate", value_delimiter = ',', value_name = "TOKENS,…")]
    capacity_tokens: Vec<Tokens>,
    /// Disks of all nodes together, in tokens; several with --simulate and --compare. The format and the
    /// spare extents of a disk take their part of it [default: no disks].
    #[arg(long, value_delimiter = ',', value_name = "TOKENS,…")]
    disk_tokens: Vec<Tokens>,
    /// Directory of the nodes' disks, and the size of all of them together. What a single replay writes is
    /// kept [default size: --disk-tokens, or enough for all blocks of the trace].
    #[arg(long, conflicts_with = "simulate", value_name = "DIR[:SIZE]")]
    disk: Option<DiskDir>,
    /// Most blocks that are written to the disk per block reference, as a limit on wear would have it
    /// [default: no limit].
    #[arg(long, requires = "simulate", requires = "disk_tokens", value_name = "N")]
    disk_writes_max: Option<f64>,
    /// Requests arrive as their timestamps say, X times as fast [default: one after the other].
    #[arg(long, conflicts_with = "simulate", value_name = "X")]
    pace: Option<f64>,
    /// Kill the first node after half of the requests, and start it again. Its objects on a disk come back.
    #[arg(long, conflicts_with_all = ["simulate", "compare"])]
    restart_node: bool,
    /// Plot hit rate over capacity into this SVG file.
    #[arg(long, requires = "simulate", value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print one JSON object instead of the table.
    #[arg(long)]
    json: bool,
}

/// Longest block, bytes: two batches of them must fit into memory.
const BLOCK_BYTES_MAX: u64 = 64 << 20;
/// Number of requests without a trace.
const REQUESTS_DEFAULT: u64 = 2_000;
/// How often children are checked and the bar is updated.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

pub(crate) fn run(args: &Args, global: Global) -> Outcome {
    let block_bytes = args.block_bytes.bytes();
    if !(1..=BLOCK_BYTES_MAX).contains(&block_bytes) {
        return fail(Failure::usage(format!(
            "--block-bytes {} must be from 1 B to {}",
            args.block_bytes,
            ByteSize(BLOCK_BYTES_MAX)
        )));
    }
    if args.pace.is_some_and(|pace| !(1e-3..=1e6).contains(&pace)) {
        return fail(Failure::usage("--pace: choose 0.001 to 1,000,000 times the speed of the trace"));
    }
    sys::catch_interrupts();
    let limit = args.requests.or(args.trace.is_none().then_some(REQUESTS_DEFAULT));
    let source = Source::new(args.trace.as_deref(), args.seed, limit)?;
    if args.simulate {
        return simulated(args, &source, global);
    }
    if args.compare {
        return compared(args, &source, global);
    }
    if args.capacity_blocks.len() > 1 {
        return fail(Failure::usage("--capacity-blocks: several capacities need --compare"));
    }
    if args.disk_tokens.len() > 1 {
        return fail(Failure::usage("--disk-tokens: several disks need --simulate or --compare"));
    }
    let capacity = args.capacity_blocks.first().copied();
    let survey = {
        let _bar = Bar::spinner("reading the trace", global.quiet);
        source.survey(capacity.is_some())?
    };
    if args.restart_node && survey.requests.is_none() {
        return fail(
            Failure::usage("--restart-node: the trace can be read only once, so its half is not known")
                .hint("give a regular file"),
        );
    }
    let disks = disks_of(args, args.disk_tokens.first().copied(), survey.distinct_blocks)?;
    let setup = Setup { eviction: args.eviction, capacity, disks, keeps_disks: args.disk.is_some() };
    let (report, interrupted) = replay(args, &source, &survey, setup, global)?;
    if args.json {
        output::print_json(&report)?;
    } else {
        output::print(&report.table())?;
    }
    Ok(match interrupted {
        _ if report.verify_failures > 0 => Exit::Verification,
        Some(exit) => exit,
        None if report.nodes_lost > 0 => Exit::Failed,
        None => Exit::Ok,
    })
}

/// What one replay is done with.
#[derive(Clone, Copy, Debug)]
struct Setup {
    eviction: EvictionPolicy,
    /// Blocks of the pool.
    capacity: Option<u64>,
    /// The disk of each node.
    disks: Option<Shape>,
    keeps_disks: bool,
}

/// The disk of each node, if there are disks.
fn disks_of(args: &Args, tokens: Option<Tokens>, distinct: Option<u64>) -> anyhow::Result<Option<Shape>> {
    let tier = tier_of(args);
    let tokens = match (args.disk.as_ref(), tokens) {
        (None, None) => return Ok(None),
        (Some(DiskDir { bytes: Some(_), .. }), Some(_)) => {
            return fail(Failure::usage(
                "--disk DIR:SIZE and --disk-tokens are both a size: give one of them",
            ));
        }
        (Some(DiskDir { bytes: Some(bytes), .. }), None) => {
            return Shape::of_bytes(bytes / u64::from(tier.nodes), tier.block_bytes).map(Some);
        }
        (_, Some(tokens)) => tokens,
        (Some(_), None) => match distinct {
            // And the extents that are kept free.
            Some(distinct) => Tokens::of_blocks(distinct + distinct / 4 + 1_024 * u64::from(tier.nodes)),
            None => {
                return fail(Failure::usage(
                    "--disk needs a size when the trace can be read only once: DIR:SIZE",
                ));
            }
        },
    };
    tier.shape(tokens).map(Some)
}

/// The disks of a replay, to be simulated.
fn tier_of(args: &Args) -> Tier {
    Tier { nodes: args.nodes, block_bytes: args.block_bytes.bytes(), ..Tier::DEFAULT }
}

/// Starts the processes of a replay.
fn start(
    args: &Args,
    setup: Setup,
    pool: u64,
    files: Option<&DiskFiles>,
    global: Global,
) -> anyhow::Result<Cluster> {
    Cluster::start(&ClusterConfig {
        nodes: args.nodes,
        node_bytes: pool.div_ceil(u64::from(args.nodes)),
        fabric: args.fabric,
        lease_ms: Some(args.lease_ms),
        eviction: Some(setup.eviction),
        local: None,
        disks: files.map(|files| files.paths().to_vec()).unwrap_or_default(),
        global,
    })
}

/// Replays the whole source once, with its own processes.
fn replay(
    args: &Args,
    source: &Source,
    survey: &Survey,
    setup: Setup,
    global: Global,
) -> anyhow::Result<(Report, Option<Exit>)> {
    let block_bytes = args.block_bytes.bytes();
    let pool = pool_bytes(args, setup.capacity, survey.distinct_blocks)?;
    let bar = Bar::spinner(format!("starting a master and {} nodes", args.nodes), global.quiet);
    let dir = args.disk.as_ref().map(|disk| &*disk.dir);
    let files = setup.disks.map(|shape| DiskFiles::make(dir, shape, args.nodes, setup.keeps_disks));
    // Removed when the nodes have ended.
    let files = files.transpose()?;
    let mut cluster = start(args, setup, pool, files.as_ref(), global)?;
    let batch = args.batch.map_or_else(|| batch_for(block_bytes), usize::from);
    let store = store::ClusterStore::open(cluster.address(), args.fabric, batch, block_bytes as usize)?;
    drop(bar);

    let bar = Bar::new(survey.requests.unwrap_or(0), "requests", global.quiet);
    let mut driver = Driver::new(store, Content::new(args.seed));
    let mut pace = setup.disks.map(|_| Pace::new(driver.store_mut(), args.nodes, pool)).transpose()?;
    let stats_before = driver.store_mut().stats()?;
    let (cpu_before, started) = (cluster.cpu(), Instant::now());
    let (interrupted, at_middle) =
        each_request(args, source, survey, &mut driver, &mut pace, &mut cluster, &bar)?;
    let elapsed = started.elapsed();
    cluster.check_children(&bar)?;
    let cpu = cluster.cpu().since(cpu_before);
    let stats = driver.store_mut().stats()?;
    drop(bar);
    if let Some(sample) = driver.first_mismatch() {
        eprintln!("snowskin: wrong bytes were read: {sample}");
    }
    let mut report = Report::new(driver.counters(), driver.latencies(), elapsed, cpu);
    let client = driver.store_mut().counters();
    let second_half = at_middle.map(|before| rounded(driver.counters().hit_rate_since(&before)));
    report.second_half_hit_rate = second_half;
    report.evicted = stats.evictions_total - stats_before.evictions_total;
    report.checksum_mismatches = client.checksum_mismatches;
    report.nodes = args.nodes;
    report.nodes_lost = cluster.nodes_lost();
    report.block_bytes = block_bytes;
    report.capacity_bytes = pool;
    report.fabric = args.fabric.to_string();
    report.interrupted = interrupted.is_some();
    report.disk = setup.disks.zip(pace).map(|(shape, pace)| OnDisk {
        disk_bytes: shape.bytes * u64::from(args.nodes),
        disk_dir: args.disk.as_ref().map(|disk| disk.dir.display().to_string()),
        disk_wait_s: rounded(pace.waited().as_secs_f64()),
        ..OnDisk::new(driver.counters(), &client, &stats_before, &stats)
    });
    drop(driver);
    cluster.stop();
    Ok((report, interrupted))
}

/// Replays the requests one after the other. Returns whether it was interrupted, and the counts when half of
/// them were replayed.
fn each_request(
    args: &Args,
    source: &Source,
    survey: &Survey,
    driver: &mut Driver<store::ClusterStore>,
    pace: &mut Option<Pace>,
    cluster: &mut Cluster,
    bar: &Bar,
) -> anyhow::Result<(Option<Exit>, Option<Counters>)> {
    let mut looked = Instant::now();
    let mut interrupted = None;
    let (middle, mut at_middle) = (survey.requests.map(|requests| requests / 2), None);
    let mut arrivals = args.pace.map(Arrivals::new);
    for request in source.requests()? {
        let request = request?;
        if Some(driver.counters().requests) == middle {
            at_middle = Some(*driver.counters());
            if args.restart_node {
                cluster.restart_first_node()?;
            }
        }
        if let Some(arrivals) = &mut arrivals {
            arrivals.wait_for(request.timestamp);
        }
        if let Err(error) = driver.request(&request.hash_ids) {
            // How the master ended explains more than the broken connection to it.
            std::thread::sleep(CHECK_INTERVAL);
            cluster.check_children(bar)?;
            return Err(error);
        }
        if let Some(pace) = pace {
            pace.keep(driver.store_mut())?;
        }
        if looked.elapsed() >= CHECK_INTERVAL {
            looked = Instant::now();
            cluster.check_children(bar)?;
            bar.set(driver.counters().requests);
            bar.message(format!("hit rate {:.3}", driver.counters().hit_rate()));
        }
        interrupted = sys::interrupted();
        if interrupted.is_some() {
            break;
        }
    }
    Ok((interrupted, at_middle))
}

/// When requests arrive.
struct Arrivals {
    speed: f64,
    /// When the first request arrived, here and by its timestamp, milliseconds.
    first: Option<(Instant, f64)>,
}

impl Arrivals {
    const fn new(speed: f64) -> Self {
        Self { speed, first: None }
    }

    /// Waits until a request arrives, unless Ctrl-C is pressed.
    fn wait_for(&mut self, timestamp_ms: f64) {
        let (began, first_ms) = *self.first.get_or_insert_with(|| (Instant::now(), timestamp_ms));
        let after_s = (timestamp_ms - first_ms) / 1e3 / self.speed;
        while sys::interrupted().is_none() {
            let left = after_s - began.elapsed().as_secs_f64();
            if left <= 0.0 {
                break;
            }
            std::thread::sleep(CHECK_INTERVAL.min(Duration::from_secs_f64(left)));
        }
    }
}

/// As many blocks as the longest requests of the published traces have, because a request should not be
/// split: the end of each part would count as the end of a prompt. Fewer if the blocks would take too much
/// memory.
fn batch_for(block_bytes: u64) -> usize {
    const BLOCKS: u64 = 512;
    const BUFFER_BYTES: u64 = 256 << 20;
    (BUFFER_BYTES / block_bytes.max(1)).clamp(1, BLOCKS) as usize
}

/// Policies by name.
#[derive(Clone, Copy, Debug)]
enum Policies {
    All,
    One(EvictionPolicy),
}

/// Parses the name of an eviction policy, or `all`, and lists them in the help.
fn policies_parser() -> impl clap::builder::TypedValueParser<Value = Policies> {
    use clap::builder::{PossibleValuesParser, TypedValueParser as _};
    let names = EvictionPolicy::ALL.iter().map(|policy| policy.name()).chain(["all"]);
    PossibleValuesParser::new(names).try_map(|name| match name.as_str() {
        "all" => Ok(Policies::All),
        name => name.parse().map(Policies::One),
    })
}

/// The chosen policies, each once.
fn policies(args: &Args) -> Vec<EvictionPolicy> {
    let one = |policies: &Policies| match policies {
        Policies::One(policy) => Some(*policy),
        Policies::All => None,
    };
    let named: Option<Vec<EvictionPolicy>> = args.policies.iter().map(one).collect();
    match named {
        Some(named) if !named.is_empty() => named,
        _ => EvictionPolicy::ALL.to_vec(),
    }
}

/// Hit rates, simulated and real.
fn compared(args: &Args, source: &Source, global: Global) -> Outcome {
    if !(0.0..=100.0).contains(&args.agree_within) {
        return fail(Failure::usage("--agree-within: choose 0 to 100 points"));
    }
    let survey = {
        let _bar = Bar::spinner("reading the trace", global.quiet);
        source.survey(false)?
    };
    let distinct = survey.distinct_blocks.unwrap_or(1);
    let capacities = match args.capacity_blocks.as_slice() {
        [] => vec![(distinct / 4).max(1), (distinct / 2).max(1)],
        given => given.to_vec(),
    };
    if args.disk.as_ref().is_some_and(|disk| disk.bytes.is_some() || args.disk_tokens.is_empty()) {
        return fail(Failure::usage(
            "--compare with --disk DIR: give the size of the disks as --disk-tokens",
        ));
    }
    let plan = simulate::Plan {
        policies: policies(args),
        capacities: capacities.iter().map(|blocks| Tokens::of_blocks(*blocks)).collect(),
        disks: args.disk_tokens.clone(),
        tier: tier_of(args),
        quiet: global.quiet,
    };
    let simulation = simulate::run(source.requests()?, &plan)?;
    let mut comparison = compare::Comparison::new(args.agree_within);
    let disks: Vec<Option<Tokens>> = match &*plan.disks {
        [] => vec![None],
        disks => disks.iter().copied().map(Some).collect(),
    };
    let mut ended = sys::interrupted();
    for row in simulation.rows.iter() {
        let Ok(eviction) = row.policy.parse::<EvictionPolicy>() else { continue };
        if !disks.iter().any(|disk| disk.map(Tokens::count) == row.disk_tokens) {
            continue;
        }
        for (at, &blocks) in capacities.iter().enumerate() {
            if ended.is_some() {
                break;
            }
            let disks = disks_of(args, row.disk_tokens.map(Tokens::of), survey.distinct_blocks)?;
            let setup = Setup { eviction, capacity: Some(blocks), disks, keeps_disks: false };
            let (report, interrupted) = replay(args, source, &survey, setup, global)?;
            ended = interrupted;
            if ended.is_none() {
                comparison.add(row, (at, blocks), &report);
            }
        }
    }
    comparison.interrupted = ended.is_some();
    if args.json {
        output::print_json(&comparison)?;
    } else {
        output::print(&comparison.table())?;
    }
    Ok(match ended {
        _ if comparison.rows.iter().any(|row| row.verify_failures > 0) => Exit::Verification,
        Some(exit) => exit,
        None if comparison.agree => Exit::Ok,
        None => Exit::Failed,
    })
}

/// Simulated hit rates only.
fn simulated(args: &Args, source: &Source, global: Global) -> Outcome {
    let writes_max = args.disk_writes_max.unwrap_or(Tier::DEFAULT.writes_max);
    if !(0.0..=f64::MAX).contains(&writes_max) {
        return fail(Failure::usage(
            "--disk-writes-max: a number of blocks per block reference, such as 0.5",
        ));
    }
    let plan = simulate::Plan {
        policies: policies(args),
        capacities: args.capacity_tokens.clone(),
        disks: args.disk_tokens.clone(),
        tier: Tier { writes_max, ..Tier::DEFAULT },
        quiet: global.quiet,
    };
    let simulation = simulate::run(source.requests()?, &plan)?;
    if let Some(file) = &args.svg {
        let name = args.trace.as_deref().and_then(std::path::Path::file_stem);
        let name = name.map_or("generated workload".into(), std::ffi::OsStr::to_string_lossy);
        let plot = plot::svg(&simulation, &format!("Prefix hit rate, simulated: {name}"));
        std::fs::write(file, plot)
            .map_err(|error| Failure::failed(format!("cannot write {}: {error}", file.display())))?;
    }
    if args.json {
        output::print_json(&simulation)?;
    } else {
        output::print(&simulation.table())?;
    }
    Ok(sys::interrupted().unwrap_or(Exit::Ok))
}

/// Size of the whole pool: as requested, or enough for the whole trace, if this machine has the memory.
fn pool_bytes(args: &Args, capacity: Option<u64>, distinct_blocks: Option<u64>) -> anyhow::Result<u64> {
    /// Below this fill level no eviction starts, whichever nodes the blocks are placed on.
    const FILL: f64 = 0.8;
    const ROOM_BLOCKS: u64 = 256;
    // The space of a block: with its trailer, rounded up to the allocator's granularity.
    let block_bytes = stored_len(args.block_bytes.bytes());
    let block_bytes = block_bytes.checked_next_multiple_of(GRAIN_BYTES).unwrap_or(block_bytes);
    let blocks = match (capacity, distinct_blocks) {
        (Some(blocks), _) => blocks,
        (None, Some(distinct)) => (distinct as f64 / FILL) as u64 + ROOM_BLOCKS * u64::from(args.nodes),
        (None, None) => {
            return fail(Failure::usage("--capacity-blocks is needed when the trace can be read only once"));
        }
    };
    let Some(bytes) = blocks.checked_mul(block_bytes) else {
        return fail(Failure::usage(
            "--capacity-blocks times --block-bytes exceeds the memory of any machine",
        ));
    };
    // At least one page per node.
    let bytes = bytes.max(u64::from(args.nodes) * 4096);
    let available = crate::commands::available_memory();
    if let Some(available) = available
        && bytes > available / 10 * 9
    {
        return fail(
            Failure::failed(format!(
                "{blocks} blocks of {} need {}, but this machine has only {} available",
                args.block_bytes,
                ByteSize(bytes).approximate(),
                ByteSize(available).approximate()
            ))
            .hint("choose a smaller --block-bytes, fewer --requests, or a --capacity-blocks that fits (older blocks are evicted)"),
        );
    }
    Ok(bytes)
}
