//! The figures of the Conductor's index: ingest, percentiles of queries, memory, snapshots.
//!
//! ```text
//! cargo run --release -p benches --example conductor_index_figures -- [TRACE.jsonl] [--json]
//! ```
//!
//! The trace is one of Mooncake's (`hash_ids` per line, blocks of 512 tokens), expanded to blocks of 16
//! tokens. Without one, synthetic conversations of the same shape are used. One thread; each row is the
//! median of five.
#![allow(clippy::print_stdout, reason = "prints its result")]

use std::time::{Duration, Instant};

use benches::{Events, Prompts};
use conductor_core::index::{Index, IndexLimits};
use conductor_core::{BlockKey, OwnerId, OwnerMatch};

const RUNS: usize = 5;
const RESTORED_BLOCKS: usize = 2_280_000;

/// A name, a value and its unit.
type Row = (String, f64, &'static str);

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let trace = args.iter().find(|arg| !arg.starts_with("--"));
    let prompts = match trace {
        Some(path) => Prompts::from_trace(path.as_ref()).expect("a trace that can be read"),
        None => Prompts::synthetic(12_000),
    };
    let mut rows = Vec::new();
    engines(&prompts, 64, 860, &mut rows);
    engines(&prompts, 1024, 192, &mut rows);
    replicas(&prompts, &mut rows);
    restart(&prompts, &mut rows);
    if args.iter().any(|arg| arg == "--json") {
        let rows: Vec<_> = rows
            .iter()
            .map(|(name, value, unit)| {
                format!("{{\"name\":\"{name}\",\"value\":{value:.4},\"unit\":\"{unit}\"}}")
            })
            .collect();
        println!("[{}]", rows.join(","));
    } else {
        println!("prompts: {}", trace.map_or("synthetic", String::as_str));
        rows.iter().for_each(|(name, value, unit)| println!("{name:<58}{value:>10.3} {unit}"));
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Millions per second.
fn rate(count: usize, took: Duration) -> f64 {
    count as f64 / took.as_secs_f64() / 1e6
}

/// Ingest and queries of engines with 16,384 blocks each.
fn engines(prompts: &Prompts, engines: u32, depth: usize, rows: &mut Vec<Row>) {
    let events = prompts.events(engines, 16_384, depth);
    let mut index = Index::new(IndexLimits::default());
    let ingest = (0..RUNS).map(|_| {
        index = Index::new(IndexLimits::default());
        let began = Instant::now();
        let added = events.apply(&mut index);
        rate(added, began.elapsed())
    });
    let ingest = median(ingest.collect());
    let name = |what: &str| format!("{engines} engines x 16384 blocks, {depth} deep: {what}");
    rows.push((name("ingest"), ingest, "M blocks/s"));
    rows.push((name("unique blocks"), index.blocks() as f64 / 1e6, "M"));
    rows.push((name("memory"), index.bytes() as f64 / index.blocks() as f64, "B/block"));
    for length in [192, 860] {
        let chains = prompts.chains(length);
        let (mean, p50, p99) = query(&index, &chains);
        rows.push((name(&format!("query of {length}, mean")), mean, "us"));
        rows.push((name(&format!("query of {length}, p50")), p50, "us"));
        rows.push((name(&format!("query of {length}, p99")), p99, "us"));
    }
    rows.push((name("sweep of everything after clears"), sweep(&mut index, engines), "ns/block"));
}

fn query(index: &Index, chains: &[Vec<BlockKey>]) -> (f64, f64, f64) {
    let mut out: Vec<OwnerMatch> = Vec::new();
    let mut of_runs = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..RUNS {
        let mut took: Vec<f64> = chains
            .iter()
            .map(|chain| {
                let began = Instant::now();
                index.query(chain, &mut out);
                std::hint::black_box(&out);
                began.elapsed().as_nanos() as f64 / 1e3
            })
            .collect();
        took.sort_by(f64::total_cmp);
        of_runs.0.push(took.iter().sum::<f64>() / took.len() as f64);
        of_runs.1.push(took[took.len() / 2]);
        of_runs.2.push(took[took.len() * 99 / 100]);
    }
    (median(of_runs.0), median(of_runs.1), median(of_runs.2))
}

/// Clears every engine, and sweeps until nothing is left.
fn sweep(index: &mut Index, engines: u32) -> f64 {
    let blocks = index.blocks();
    let began = Instant::now();
    (0..engines).for_each(|engine| index.cleared(OwnerId(engine)));
    while index.sweep(10_000) > 0 {}
    assert_eq!(index.blocks(), 0, "everything was swept");
    began.elapsed().as_nanos() as f64 / blocks as f64
}

/// Memory of one set of chains that 1, 64 and 1,024 engines have.
fn replicas(prompts: &Prompts, rows: &mut Vec<Row>) {
    let of_one = prompts.events(1, 65_536, 860);
    for engines in [1, 64, 1024] {
        let mut events = Events::default();
        for event in &of_one.stored {
            for engine in 0..engines {
                events.store(OwnerId(engine), event.parent, &of_one.keys[event.keys.clone()]);
            }
        }
        let mut index = Index::new(IndexLimits::default());
        let began = Instant::now();
        let added = events.apply(&mut index);
        let took = began.elapsed();
        let bytes = index.bytes() as f64 / index.blocks() as f64;
        rows.push((format!("{engines} replicas of 65536 blocks: memory"), bytes, "B/block"));
        rows.push((format!("{engines} replicas of 65536 blocks: ingest"), rate(added, took), "M blocks/s"));
    }
}

/// A snapshot of 2.28 million unique blocks, and back.
fn restart(prompts: &Prompts, rows: &mut Vec<Row>) {
    let events = prompts.events(64, usize::MAX, 860);
    let mut index = Index::new(IndexLimits::default());
    for event in &events.stored {
        index.stored(event.owner, event.parent, &events.keys[event.keys.clone()]);
        if index.blocks() >= RESTORED_BLOCKS {
            break;
        }
    }
    let (mut wrote, mut read, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..RUNS {
        bytes = Vec::new();
        let began = Instant::now();
        index.snapshot(&mut bytes);
        wrote.push(began.elapsed().as_secs_f64() * 1e3);
        let began = Instant::now();
        let restored = Index::restore(&bytes, IndexLimits::default()).expect("its own snapshot");
        read.push(began.elapsed().as_secs_f64() * 1e3);
        assert_eq!(restored.blocks(), index.blocks());
        assert_eq!(restored.digest(OwnerId(0)), index.digest(OwnerId(0)));
    }
    let name = |what: &str| format!("{:.2} M unique blocks: {what}", index.blocks() as f64 / 1e6);
    rows.push((name("memory"), index.bytes() as f64 / index.blocks() as f64, "B/block"));
    rows.push((name("snapshot"), median(wrote), "ms"));
    rows.push((name("snapshot, size"), bytes.len() as f64 / 1e6, "MB"));
    rows.push((name("restore"), median(read), "ms"));
}
