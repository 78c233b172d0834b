//! The cost of te-rdma per slice, from `submit` to its completion, without a NIC.
//!
//! `instant` completes every work request as it is posted and moves no bytes: the figure is the cost of
//! te-rdma alone. `simulated` is the provider of te-rdma's tests, which copies the bytes and keeps the rules
//! of a queue pair; it does not predict the speed of a device. Control connections are real sockets on
//! loopback, and idle while slices move.
//!
//! `examples/rdma_slices.rs` counts instructions per slice; `tests/rdma.rs` checks that nothing is allocated.
#![allow(missing_docs, reason = "criterion's macros make public items")]

use benches::{InstantVerbs, Pair, slices};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use te_core::Op;
use te_rdma::sim::{DeviceConfig, SimConfig, SimFabric};
use te_rdma::verbs::Verbs;
use te_rdma::{Config, RdmaTransport};

/// Slices per batch, and bytes per slice.
const SHAPES: [(u32, u32); 4] = [(1, 64), (1, 4096), (128, 64), (128, 4096)];
const BYTES: usize = 128 * 4096;

fn rounds<V: Verbs>(criterion: &mut Criterion, name: &str, open: impl Fn() -> V) {
    let config = || Config { proof_ms_max: 0, ..Config::default() };
    let transport = || RdmaTransport::new(open(), config()).expect("a simulated port");
    let mut pair = Pair::new(transport(), transport(), BYTES);
    let mut group = criterion.benchmark_group(name);
    for (count, len) in SHAPES {
        group.throughput(Throughput::Elements(u64::from(count)));
        for op in [Op::Read, Op::Write] {
            let batch = slices(op, count, len);
            let verb = if op == Op::Read { "read" } else { "write" };
            group.bench_function(format!("{verb} {count} x {len} B"), |bencher| {
                bencher.iter(|| pair.round(&batch));
            });
        }
    }
    group.finish();
}

fn instant(criterion: &mut Criterion) {
    let fabric = SimFabric::new(1, SimConfig::IMMEDIATE);
    rounds(criterion, "rdma instant", || InstantVerbs::new(fabric.device(DeviceConfig::default())));
}

fn simulated(criterion: &mut Criterion) {
    let fabric = SimFabric::new(1, SimConfig::IMMEDIATE);
    rounds(criterion, "rdma simulated", || fabric.device(DeviceConfig::default()));
}

criterion_group!(benches, instant, simulated);
criterion_main!(benches);
