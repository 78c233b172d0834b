//! te-core: slicing, batches, routes, and what `MultiTransport` costs a slice.
#![allow(missing_docs, reason = "criterion's macros make public items")]

use benches::{InstantRail, REGION, SEGMENT, slices};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use te_core::{
    Access, BatchTable, Completion, HealthConfig, HealthRoute, Instant, MemSpan, Memory, MultiTransport, Op,
    Route, Slicer, Token, TransferRequest, Transport,
};

const BATCH: u32 = 128;
const BLOCK: u32 = 4 << 10;

fn slicing(criterion: &mut Criterion) {
    let slicer = Slicer::default();
    let len = 16u64 << 20;
    let mut group = criterion.benchmark_group("slicer");
    group.throughput(Throughput::Elements(len / u64::from(slicer.slice_bytes())));
    group.bench_function("cut 16 MiB", |bencher| {
        bencher.iter(|| {
            let mut left = black_box(len);
            while left > 0 {
                left -= u64::from(black_box(slicer.cut(left)));
            }
        });
    });
    group.finish();
}

/// A batch's whole life: created, cut, accepted, completed, freed.
fn batch_table(criterion: &mut Criterion) {
    let request = |index: u32| {
        let offset = u64::from(index) * u64::from(BLOCK);
        TransferRequest {
            op: Op::Read,
            local: (REGION, offset),
            remote: (SEGMENT, offset),
            len: BLOCK.into(),
        }
    };
    let requests: Vec<_> = (0..BATCH).map(request).collect();
    let mut table = BatchTable::new(16, BATCH as usize);
    let mut cut = slices(Op::Read, 64, BLOCK);

    let mut group = criterion.benchmark_group("batch table");
    group.throughput(Throughput::Elements(BATCH.into()));
    group.bench_function("128 requests of 4 KiB", |bencher| {
        bencher.iter(|| {
            let handle = table.create(requests.iter().copied(), Slicer::default()).expect("room");
            loop {
                let count = table.next(handle, &mut cut).expect("live");
                if count == 0 {
                    break;
                }
                table.accepted(&cut[..count]);
                for slice in &cut[..count] {
                    black_box(table.complete(&Completion::applied(slice.token)));
                }
            }
            table.free(handle).expect("terminal");
        });
    });
    group.finish();
}

fn routes(criterion: &mut Criterion) {
    let slice = slices(Op::Write, 1, BLOCK)[0];
    let mut group = criterion.benchmark_group("health route");
    group.throughput(Throughput::Elements(1));
    for rails in [1usize, 2, 8] {
        let mut route = HealthRoute::new(&vec![100; rails], HealthConfig::default());
        let all = (1u32 << rails) - 1;
        group.bench_function(BenchmarkId::new("route, accept, complete", rails), |bencher| {
            bencher.iter(|| {
                let rail = route.route(black_box(&slice), all).expect("all are healthy");
                route.accepted(rail, &slice);
                let ahead = route.bytes_in_flight(rail);
                route.completed(rail, &slice, &Completion::applied(Token(0)), 1_000, ahead);
            });
        });
    }
    group.finish();
}

/// The budget is 20 ns a slice: submit and poll through `dyn Transport` children, routing included.
fn multi(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("multi transport");
    group.throughput(Throughput::Elements(BATCH.into()));
    let batch = slices(Op::Write, BATCH, BLOCK);
    for rails in [1usize, 2, 8] {
        let children = (0..rails).map(|_| Box::new(InstantRail::new(1024)) as Box<dyn Transport>);
        let route = HealthRoute::new(&vec![100; rails], HealthConfig::default());
        let mut multi = MultiTransport::new(children, route, 1024).expect("valid");
        attach(&mut multi);
        group.bench_function(BenchmarkId::new("128 slices", rails), |bencher| {
            bencher.iter(|| round(&mut multi, &batch));
        });
    }
    let mut alone = InstantRail::new(1024);
    group.bench_function("128 slices, no multi", |bencher| bencher.iter(|| round(&mut alone, &batch)));
    group.finish();
}

/// Registers and attaches what [`slices`] refer to.
fn attach(transport: &mut impl Transport) {
    // SAFETY: no rail here touches the span; it is never dereferenced.
    unsafe {
        transport
            .register(REGION, MemSpan::new(std::ptr::without_provenance_mut(1 << 20), 1 << 30), Access::all())
            .expect("fresh");
    }
    let mut blob = [0; 256];
    let len = transport.export(REGION, &mut blob).expect("exportable");
    transport.attach(SEGMENT, &blob[..len]).expect("fresh");
}

/// Submits all of `batch` and polls until it has completed.
fn round(transport: &mut impl Transport, batch: &[te_core::Slice]) {
    let mut out = [Completion::applied(Token(0)); BATCH as usize];
    let mut submitted = 0;
    let mut completed = 0;
    while completed < batch.len() {
        if submitted < batch.len() {
            submitted += transport.submit(black_box(&batch[submitted..])).expect("valid slices");
        }
        completed += transport.poll(Instant::from_nanos(1), black_box(&mut out));
    }
}

criterion_group!(benches, slicing, batch_table, routes, multi);
criterion_main!(benches);
