//! `snowskin bench allocator`: how much of a segment objects can fill, and the time of an allocation.
//!
//! The workloads and the method are those of results that Mooncake has published; those results, from another
//! machine, are printed beside the measured ones. Only metadata is touched: the segments have no memory.

mod cluster;
mod one;
mod published;

use std::time::Duration;

use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use serde::Serialize;
use store_core::{AllocationStrategy, AllocatorKind};

use crate::content::mix;
use crate::exit::{EXIT_CODES, Exit};
use crate::global::Global;
use crate::output::{Align, LiveTable, figure, rounded, thousands};
use crate::progress::Bar;
use crate::{Outcome, output, sys};
use cluster::Cluster;
use published::Published;

const AFTER_HELP: &str =
    "Utilisation is the bytes of live objects divided by the bytes of the pool. Every pool is filled until \
    it refuses an object, and is then kept full: at each refusal, random objects are freed, one at a time, \
    or 5 % of all with 3.12 MB blocks and pairs. Utilisation is sampled after every allocation, or with 5 % \
    at each refusal. Time is CPU time, the average per allocation; in the first table it includes the frees \
    that make room, in the others it is a whole put_start of the master, including its table of objects. \
    Published figures are Mooncake's, from its documentation, measured on another machine; in the second \
    table they are of its allocation strategies alone. Objects are aligned to 64 bytes here, so those \
    shorter than about 512 bytes fill less.

Examples:
  snowskin bench allocator
  snowskin bench allocator --workload scaled --allocator slab
  snowskin bench allocator --json | jq '.[] | select(.ns > 150)'";

/// Measure allocators and placement: utilisation and time
///
/// Runs workloads for which Mooncake has published results, with both allocators and both allocation
/// strategies, and prints the published results beside its own.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(super) struct Args {
    /// Workloads to run.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Workload::ALL, value_name = "NAME,…")]
    workload: Vec<Workload>,
    /// Allocators to measure.
    #[arg(long, value_delimiter = ',', default_values_t = AllocatorKind::ALL.to_vec(), value_name = "NAME,…", value_parser = allocator_parser())]
    allocator: Vec<AllocatorKind>,
    /// Allocation strategies to measure.
    #[arg(long, value_delimiter = ',', default_values_t = AllocationStrategy::ALL.to_vec(), value_name = "NAME,…", value_parser = strategy_parser())]
    strategy: Vec<AllocationStrategy>,
    /// Allocations measured per row of the first table, and at most per row of the others.
    #[arg(long, default_value_t = 1_000_000, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    allocations: u64,
    /// Size of a segment of the second table, in GiB. The published results used 1,024.
    #[arg(long, default_value_t = 64, value_name = "GIB", value_parser = clap::value_parser!(u64).range(1..=4096))]
    segment_gib: u64,
    /// Print one JSON array of objects.
    #[arg(long)]
    json: bool,
}

/// The workloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Workload {
    /// Objects of one length, a power of two
    Uniform,
    /// Objects of one length, a power of two minus or plus 17
    Uneven,
    /// Objects of one length, a power of two times 0.9 or 1.1
    Scaled,
    /// Random lengths from 1 KiB to 64 MiB
    Random,
    /// KV-cache blocks of 3.12 MB
    Kv,
    /// Blocks of 3.12 MB and an equal number of 643 KiB
    Paired,
    /// The two workloads before through a master, with 1 and 16 segments, 1 and 3 replicas, segments of equal
    /// or different size
    Cluster,
    /// A put with free space and with exactly one hole, with 1 to 4,096 segments
    Scale,
    /// An empty segment joins full ones
    Join,
}

impl Workload {
    const ALL: [Self; 9] = [
        Self::Uniform,
        Self::Uneven,
        Self::Scaled,
        Self::Random,
        Self::Kv,
        Self::Paired,
        Self::Cluster,
        Self::Scale,
        Self::Join,
    ];
}

/// The result of a run.
#[derive(Clone, Copy, Debug)]
struct Measured {
    utilisation_min: f64,
    utilisation: f64,
    ns: f64,
    allocations: u64,
}

impl Measured {
    fn new(min: f64, avg: f64, elapsed: Duration, allocations: u64) -> Self {
        let ns = elapsed.as_nanos() as f64 / allocations.max(1) as f64;
        Self { utilisation_min: min, utilisation: avg, ns, allocations }
    }
}

/// One row of the JSON output. Values that do not apply are null.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Row {
    workload: Option<Workload>,
    allocator: &'static str,
    strategy: Option<&'static str>,
    object_bytes: Option<u64>,
    segments: usize,
    replicas: u8,
    skewed: bool,
    utilisation_min: Option<f64>,
    utilisation: Option<f64>,
    ns: Option<f64>,
    allocations: Option<u64>,
    /// Time of a removal and a put in a store that is full except for the removed object, nanoseconds.
    ns_full: Option<f64>,
    /// For a new segment: fill level of the others, its age in milliseconds, and its share of the puts.
    fill: Option<f64>,
    age_ms: Option<u64>,
    share: Option<f64>,
    /// The published result, from another machine.
    published: Option<Published>,
}

impl Row {
    fn of(workload: Workload, allocator: AllocatorKind, segments: usize, replicas: u8) -> Self {
        Self { workload: Some(workload), allocator: allocator.name(), segments, replicas, ..Self::default() }
    }

    fn measured(self, measured: Measured) -> Self {
        Self {
            utilisation_min: Some(rounded(measured.utilisation_min)),
            utilisation: Some(rounded(measured.utilisation)),
            ns: Some(rounded(measured.ns)),
            allocations: Some(measured.allocations),
            ..self
        }
    }
}

/// Prints the tables, and collects the rows.
struct Report<'a> {
    args: &'a Args,
    bar: Bar,
    rows: Vec<Row>,
}

pub(super) fn run(args: &Args, global: Global) -> Outcome {
    sys::catch_interrupts();
    let mut report = Report { args, bar: Bar::spinner("allocating", global.quiet), rows: Vec::new() };
    let parts = [Report::one, Report::cluster, Report::scale, Report::join];
    let mut exit = Exit::Ok;
    for part in parts {
        if let Some(interrupted) = part(&mut report)? {
            exit = interrupted;
            break;
        }
    }
    let Report { rows, bar, .. } = report;
    drop(bar);
    if args.json {
        output::print_json(&rows)?;
    }
    Ok(exit)
}

impl Report<'_> {
    /// The first table: a row per length, two columns per allocator.
    fn one(&mut self) -> anyhow::Result<Option<Exit>> {
        let fixed: &[(Workload, &[(u64, Published)])] = &[
            (Workload::Uniform, published::UNIFORM),
            (Workload::Uneven, published::UNEVEN),
            (Workload::Scaled, published::SCALED),
        ];
        let mut lines: Vec<(Workload, Option<u64>, Option<Published>)> = Vec::new();
        for (workload, results) in fixed.iter().filter(|(workload, _)| self.wants(*workload)) {
            lines.extend(results.iter().map(|(len, result)| (*workload, Some(*len), Some(*result))));
        }
        for (workload, result) in [
            (Workload::Random, Some(published::RANDOM)),
            (Workload::Kv, published::strategy(AllocationStrategy::Random, false, false, 1, 1)),
            (Workload::Paired, published::strategy(AllocationStrategy::Random, true, false, 1, 1)),
        ] {
            if self.wants(workload) {
                lines.push((workload, None, result));
            }
        }
        if lines.is_empty() {
            return Ok(None);
        }
        let mut columns = vec![("objects", Align::Left), ("bytes", Align::Right)];
        for kind in &self.args.allocator {
            columns.extend(match kind {
                AllocatorKind::Slab => {
                    [("slab min", Align::Right), ("avg", Align::Right), ("ns", Align::Right)]
                }
                _ => [("offset min", Align::Right), ("avg", Align::Right), ("ns", Align::Right)],
            });
        }
        columns.extend([("published", Align::Right), ("ns", Align::Right)]);
        self.heading("One segment: utilisation and ns per allocation; published: another machine")?;
        let mut table = LiveTable::new(&columns);
        for (workload, len, published) in lines {
            let bytes = len.map_or_else(|| "various".to_owned(), thousands);
            let mut cells = vec![format!("{workload:?}").to_lowercase(), bytes];
            for kind in self.args.allocator.clone() {
                let count = self.args.allocations;
                let measured = match (workload, len) {
                    (_, Some(len)) => one::uniform(kind, len, count),
                    (Workload::Random, _) => one::random(kind, count),
                    (workload, _) => one::rounds(kind, workload == Workload::Paired, count),
                };
                cells.extend([
                    share(measured.utilisation_min),
                    share(measured.utilisation),
                    figure(measured.ns),
                ]);
                let row = Row::of(workload, kind, 1, 1).measured(measured);
                self.rows.push(Row { object_bytes: len, published, ..row });
            }
            cells.extend([published.map_or_else(dash, |p| share(p.utilisation)), ns_of(published)]);
            self.line(&mut table, &cells)?;
            if let Some(exit) = sys::interrupted() {
                return Ok(Some(exit));
            }
        }
        Ok(None)
    }

    /// The second table: a whole master.
    fn cluster(&mut self) -> anyhow::Result<Option<Exit>> {
        if !self.wants(Workload::Cluster) {
            return Ok(None);
        }
        let gib = self.args.segment_gib;
        self.heading(&format!(
            "Through a master, {gib} GiB per segment: utilisation, ns per put_start; published: 1,024 GiB, \
            another machine"
        ))?;
        let mut table = LiveTable::new(&[
            ("objects", Align::Left),
            ("segments", Align::Left),
            ("replicas", Align::Right),
            ("strategy        ", Align::Left),
            ("allocator", Align::Left),
            ("min", Align::Right),
            ("avg", Align::Right),
            ("ns", Align::Right),
            ("published", Align::Right),
            ("ns", Align::Right),
        ]);
        let shapes = [(false, 1, 1), (false, 16, 1), (false, 16, 3), (true, 16, 1), (true, 16, 3)];
        for paired in [false, true] {
            for (skewed, segments, replicas) in shapes {
                for (strategy, allocator) in self.combinations() {
                    let cluster =
                        Cluster { allocator, strategy, segments, replicas, skewed, segment_bytes: gib << 30 };
                    let measured = cluster.fill(paired, 3)?;
                    let published = published::strategy(strategy, paired, skewed, segments, replicas);
                    let row = Row::of(Workload::Cluster, allocator, segments, replicas).measured(measured);
                    let object_bytes = (!paired).then_some(published::KV_BYTES);
                    let strategy = strategy.name();
                    self.rows.push(Row { strategy: Some(strategy), object_bytes, skewed, published, ..row });
                    let cells = [
                        if paired { "paired" } else { "kv" }.to_owned(),
                        format!("{segments}{}", if skewed { " skewed" } else { "" }),
                        replicas.to_string(),
                        strategy.to_owned(),
                        allocator.to_string(),
                        share(measured.utilisation_min),
                        share(measured.utilisation),
                        figure(measured.ns),
                        published.map_or_else(dash, |p| share(p.utilisation)),
                        ns_of(published),
                    ];
                    self.line(&mut table, &cells)?;
                    if let Some(exit) = sys::interrupted() {
                        return Ok(Some(exit));
                    }
                }
            }
        }
        Ok(None)
    }

    /// The third table: many segments.
    fn scale(&mut self) -> anyhow::Result<Option<Exit>> {
        if !self.wants(Workload::Scale) {
            return Ok(None);
        }
        self.heading(
            "4 KiB objects: ns per put with half of the space free; ns per removal and put with none free",
        )?;
        // A million objects; fewer if fewer allocations are measured, but some per segment.
        let capacity = self.args.allocations.clamp(16 << 10, 1 << 20) * 4096;
        let mut table = LiveTable::new(&[
            ("segments", Align::Right),
            ("strategy        ", Align::Left),
            ("allocator", Align::Left),
            ("room", Align::Right),
            ("full", Align::Right),
        ]);
        for segments in [1, 16, 256, 4096] {
            for (strategy, allocator) in self.combinations() {
                let segment_bytes = capacity / segments as u64;
                let cluster =
                    Cluster { allocator, strategy, segments, replicas: 1, skewed: false, segment_bytes };
                let (room, full) = cluster.scale(self.args.allocations)?;
                let cells = [
                    thousands(segments as u64),
                    strategy.to_string(),
                    allocator.to_string(),
                    figure(room),
                    figure(full),
                ];
                self.rows.push(Row {
                    strategy: Some(strategy.name()),
                    object_bytes: Some(4096),
                    ns: Some(rounded(room)),
                    ns_full: Some(rounded(full)),
                    ..Row::of(Workload::Scale, allocator, segments, 1)
                });
                self.line(&mut table, &cells)?;
                if let Some(exit) = sys::interrupted() {
                    return Ok(Some(exit));
                }
            }
        }
        Ok(None)
    }

    /// The fourth table: slow start of a new segment.
    fn join(&mut self) -> anyhow::Result<Option<Exit>> {
        const AGES_MS: [u64; 5] = [0, 15_000, 30_000, 45_000, 60_000];
        if !self.wants(Workload::Join) {
            return Ok(None);
        }
        self.heading(
            "An empty segment joins 16 others: its share of the next puts, by seconds since it joined",
        )?;
        let mut columns = vec![("others", Align::Right), ("strategy        ", Align::Left)];
        columns.extend(["0 s", "15 s", "30 s", "45 s", "60 s"].map(|name| (name, Align::Right)));
        let mut table = LiveTable::new(&columns);
        let allocator = self.args.allocator[0];
        for fill in [0.5, 0.9, 1.0] {
            for strategy in self.args.strategy.clone() {
                let cluster = Cluster {
                    allocator,
                    strategy,
                    segments: 16,
                    replicas: 1,
                    skewed: false,
                    segment_bytes: 256 << 20,
                };
                let puts = self.args.allocations.min(2_000);
                let shares = cluster.join(fill, &AGES_MS, puts)?;
                let mut cells = vec![format!("{:.0} % full", fill * 100.0), strategy.to_string()];
                for (age_ms, part) in AGES_MS.into_iter().zip(shares) {
                    cells.push(format!("{:.1} %", part * 100.0));
                    self.rows.push(Row {
                        strategy: Some(strategy.name()),
                        object_bytes: Some(64 << 10),
                        fill: Some(fill),
                        age_ms: Some(age_ms),
                        share: Some(rounded(part)),
                        ..Row::of(Workload::Join, allocator, 17, 1)
                    });
                }
                self.line(&mut table, &cells)?;
                if let Some(exit) = sys::interrupted() {
                    return Ok(Some(exit));
                }
            }
        }
        Ok(None)
    }

    fn wants(&self, workload: Workload) -> bool {
        self.args.workload.contains(&workload)
    }

    fn combinations(&self) -> Vec<(AllocationStrategy, AllocatorKind)> {
        let kinds = |strategy| self.args.allocator.iter().map(move |kind| (strategy, *kind));
        self.args.strategy.iter().copied().flat_map(kinds).collect()
    }

    fn heading(&self, text: &str) -> anyhow::Result<()> {
        if self.args.json {
            return Ok(());
        }
        let before = if self.rows.is_empty() { "" } else { "\n" };
        self.bar.suspend(|| output::print(&format!("{before}{text}\n")))
    }

    fn line(&self, table: &mut LiveTable, cells: &[String]) -> anyhow::Result<()> {
        if self.args.json { Ok(()) } else { self.bar.suspend(|| table.row(cells)) }
    }
}

/// A pseudo-random sequence that is the same in every run.
#[derive(Clone, Debug)]
struct Random(u64);

impl Random {
    const fn new(seed: u64) -> Self {
        Self(seed << 40)
    }

    /// A number below `limit`, which must not be 0.
    const fn below(&mut self, limit: u64) -> u64 {
        self.0 += 1;
        ((mix(self.0) as u128 * limit as u128) >> 64) as u64
    }
}

/// Parses the name of an allocator, and lists all in the help.
fn allocator_parser() -> impl clap::builder::TypedValueParser<Value = AllocatorKind> {
    PossibleValuesParser::new(AllocatorKind::ALL.iter().map(|kind| kind.name())).try_map(|name| name.parse())
}

/// Parses the name of an allocation strategy, and lists all in the help.
fn strategy_parser() -> impl clap::builder::TypedValueParser<Value = AllocationStrategy> {
    let names = AllocationStrategy::ALL.iter().map(|strategy| strategy.name());
    PossibleValuesParser::new(names).try_map(|name| name.parse())
}

/// Rounded down, so that 1 means full.
fn share(value: f64) -> String {
    format!("{:.4}", (value * 10_000.0).floor() / 10_000.0)
}

fn ns_of(published: Option<Published>) -> String {
    published.map_or_else(dash, |published| figure(published.ns))
}

fn dash() -> String {
    "–".to_owned()
}
