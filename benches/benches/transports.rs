//! Posting and completing on each transport: submit a batch, poll both ends until it has completed.
//!
//! One thread polls both ends, so a figure contains the work of both. Two processes on two cores work at the
//! same time: for throughput see `snowskin bench transfer`.
#![allow(missing_docs, reason = "criterion's macros make public items")]

use benches::{Pair, slices};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use te_core::{Op, Transport};
use te_host::{LocalConfig, LocalTransport};
use te_nvmeof::NvmeofTransport;
use te_tcp::{Config, TcpTransport};

const KIB: u32 = 1 << 10;
/// Slices per batch, and bytes per slice.
const SHAPES: [(u32, u32); 4] = [(1, 4 * KIB), (128, 4 * KIB), (4, 1024 * KIB), (16, 1024 * KIB)];

fn rounds<T: Transport>(criterion: &mut Criterion, name: &str, mut pair: Pair<T>) {
    let mut group = criterion.benchmark_group(name);
    for (count, len) in SHAPES {
        group.throughput(Throughput::Bytes(u64::from(count) * u64::from(len)));
        for op in [Op::Read, Op::Write] {
            let batch = slices(op, count, len);
            let verb = if op == Op::Read { "read" } else { "write" };
            let what = format!("{verb} {count} x {} KiB", len / KIB);
            group.bench_function(what, |bencher| bencher.iter(|| pair.round(&batch)));
        }
    }
    group.finish();
}

fn bytes() -> usize {
    SHAPES.iter().map(|(count, len)| (count * len) as usize).max().unwrap_or(0)
}

fn tcp(criterion: &mut Criterion) {
    for checksum in [false, true] {
        let open = || TcpTransport::new(Config { checksum, ..Config::default() }).expect("loopback");
        let name = if checksum { "tcp with checksums" } else { "tcp" };
        rounds(criterion, name, Pair::new(open(), open(), bytes()));
    }
}

fn nvmeof(criterion: &mut Criterion) {
    for digests in [false, true] {
        let config = te_nvmeof::Config {
            header_digest: digests,
            data_digest: digests,
            ..te_nvmeof::Config::default()
        };
        let open = || NvmeofTransport::new(config.clone()).expect("loopback");
        let name = if digests { "nvmeof with digests" } else { "nvmeof" };
        rounds(criterion, name, Pair::new(open(), open(), bytes()));
    }
}

fn local(criterion: &mut Criterion) {
    let open = || LocalTransport::new(LocalConfig::default()).expect("randomness");
    rounds(criterion, "local", Pair::new(open(), open(), bytes()));
}

criterion_group!(benches, tcp, nvmeof, local);
criterion_main!(benches);
