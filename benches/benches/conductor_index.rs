//! The Conductor's index: events of engines, queries, and snapshots. `examples/conductor_index_figures.rs`
//! has percentiles, memory and a real trace.
#![allow(missing_docs, reason = "criterion's macros make public items")]

use benches::Prompts;
use conductor_core::OwnerId;
use conductor_core::index::{Index, IndexLimits};
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};

const DEPTH: usize = 860;

fn ingest(c: &mut Criterion) {
    let mut group = c.benchmark_group("conductor_index/ingest");
    group.sample_size(10);
    for (engines, depth) in [(64, DEPTH), (1024, 192)] {
        let events = Prompts::synthetic(3_000).events(engines, 2_048, depth);
        group.throughput(Throughput::Elements(events.keys.len() as u64));
        group.bench_function(format!("{engines} engines"), |b| {
            b.iter_batched_ref(
                || Index::new(IndexLimits::default()),
                |index| events.apply(index),
                BatchSize::LargeInput,
            );
        });
    }
    group.finish();
}

fn query(c: &mut Criterion) {
    let prompts = Prompts::synthetic(6_000);
    let chains = prompts.chains(DEPTH);
    for engines in [64, 1024] {
        let mut index = Index::new(IndexLimits::default());
        prompts.events(engines, 16_384, DEPTH).apply(&mut index);
        let (mut out, mut at) = (Vec::new(), 0);
        let mut run = |name: String, index: &Index| {
            c.bench_function(&name, |b| {
                b.iter(|| {
                    at = (at + 1) % chains.len();
                    index.query(&chains[at], &mut out);
                    out.len()
                });
            });
        };
        run(format!("conductor_index/query of {DEPTH} blocks, {engines} engines"), &index);
        // One engine has lost the first block of all: it is walked block by block.
        index.removed(OwnerId(0), &chains[0][1..2]);
        run(format!("conductor_index/query of {DEPTH} blocks, {engines} engines, one is holey"), &index);
    }
}

fn snapshot(c: &mut Criterion) {
    let mut group = c.benchmark_group("conductor_index/snapshot");
    group.sample_size(10);
    let mut index = Index::new(IndexLimits::default());
    Prompts::synthetic(3_000).events(64, usize::MAX, DEPTH).apply(&mut index);
    group.throughput(Throughput::Elements(index.blocks() as u64));
    let mut bytes = Vec::new();
    index.snapshot(&mut bytes);
    group.bench_function("restore", |b| b.iter(|| Index::restore(&bytes, IndexLimits::default())));
    group.bench_function("write", |b| {
        b.iter(|| {
            bytes.clear();
            index.snapshot(&mut bytes);
        });
    });
    group.finish();
}

criterion_group!(benches, ingest, query, snapshot);
criterion_main!(benches);
