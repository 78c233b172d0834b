//! te-core: slicing, batches, routes, and the cost of `MultiTransport` per slice.
#![allow(missing_docs, reason = "criterion's macros make public items")]

use benches::{REGION, REMOTE_REGION, slices};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use std::time::Duration;
use te_core::testkit::NullTransport;
use te_core::{
    Access, BatchTable, Completion, Delay, Fault, FaultConfig, HealthConfig, HealthRoute, Instant, Mailbox,
    MemSpan, Memory, MultiTransport, Op, RegionOffset, RemoteOffset, Route, Slice, Slicer, Throttle, Token,
    Trace, TransferRequest, Transport,
};

const BATCH: u32 = 128;
const SLICE_BYTES: u32 = 4 << 10;

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

/// A whole batch: created, cut, accepted, completed, freed.
fn batch_table(criterion: &mut Criterion) {
    let request = |index: u32| {
        let offset = u64::from(index) * u64::from(SLICE_BYTES);
        TransferRequest {
            op: Op::Read,
            local: RegionOffset::new(REGION, offset),
            remote: RemoteOffset::new(REMOTE_REGION, offset),
            len: SLICE_BYTES.into(),
        }
    };
    let requests: Vec<_> = (0..BATCH).map(request).collect();
    let mut table = BatchTable::new(16, BATCH as usize);
    let mut cut = slices(Op::Read, 64, SLICE_BYTES);

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
    let slice = slices(Op::Write, 1, SLICE_BYTES)[0];
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

/// The budget is 20 ns per slice: submit and poll through `dyn Transport` children, routing included. With
/// books: one request of 128 slices is created, cut, accepted, submitted, polled, completed and freed, which
/// is everything that a slice passes through.
fn multi(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("multi transport");
    group.throughput(Throughput::Elements(BATCH.into()));
    let batch = slices(Op::Write, BATCH, SLICE_BYTES);
    for rails in [1usize, 2, 8] {
        let children = (0..rails).map(|_| Box::new(NullTransport::new(1024)) as Box<dyn Transport>);
        let route = HealthRoute::new(&vec![100; rails], HealthConfig::default());
        let mut multi = MultiTransport::new(children, route, 1024).expect("valid");
        attach(&mut multi);
        let mut clock = Clock::default();
        group.bench_function(BenchmarkId::new("128 slices", rails), |bencher| {
            bencher.iter(|| round(&mut multi, &batch, &mut clock));
        });
        let mut table = BatchTable::new(16, 1);
        let mut cut = batch.clone();
        group.bench_function(BenchmarkId::new("128 slices with books", rails), |bencher| {
            bencher.iter(|| booked_round(&mut multi, &mut table, &mut cut, &mut clock));
        });
    }
    let mut alone = NullTransport::new(1024);
    let mut clock = Clock::default();
    group.bench_function("128 slices, no multi", |bencher| {
        bencher.iter(|| round(&mut alone, &batch, &mut clock));
    });
    group.finish();
}

/// The cost of a decorator that changes nothing.
fn decorators(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decorator");
    group.throughput(Throughput::Elements(BATCH.into()));
    let batch = slices(Op::Write, BATCH, SLICE_BYTES);
    let rail = || NullTransport::new(1024);
    let quiet = FaultConfig::default();
    let decorated: [(&str, Box<dyn Transport>); 5] = [
        ("none", Box::new(rail())),
        ("fault", Box::new(Fault::new(rail(), 1, quiet))),
        ("trace", Box::new(Trace::new(rail(), 4096))),
        ("throttle", Box::new(Throttle::new(rail(), u64::MAX, u64::MAX))),
        ("delay", Box::new(Delay::new(rail(), Duration::ZERO))),
    ];
    for (name, mut transport) in decorated {
        attach(&mut transport);
        let mut clock = Clock::default();
        group.bench_function(name, |bencher| bencher.iter(|| round(&mut transport, &batch, &mut clock)));
    }
    group.finish();
}

/// One thread on both ends: the cost of the ring itself. Between two threads, the cost depends on the caches.
fn mailbox(criterion: &mut Criterion) {
    let mailbox = Mailbox::new(256);
    let mut group = criterion.benchmark_group("mailbox");
    group.throughput(Throughput::Elements(1));
    group.bench_function("push and pop", |bencher| {
        bencher.iter(|| {
            mailbox.push(black_box(7u64)).expect("room");
            black_box(mailbox.pop())
        });
    });
    group.finish();
}

/// Registers and attaches the regions of [`slices`].
fn attach(transport: &mut impl Transport) {
    // SAFETY: no rail here touches the span; it is never dereferenced.
    unsafe {
        transport
            .register(REGION, MemSpan::new(std::ptr::without_provenance_mut(1 << 20), 1 << 30), Access::all())
            .expect("fresh");
    }
    let mut blob = [0; 256];
    let len = transport.export(REGION, &mut blob).expect("exportable");
    transport.attach(REMOTE_REGION, &blob[..len]).expect("fresh");
}

/// A clock that moves forward at each call.
#[derive(Default)]
struct Clock(u64);

impl Clock {
    fn now(&mut self) -> Instant {
        self.0 += 1_000;
        Instant::from_nanos(self.0)
    }
}

/// Submits all of `batch` and polls until it has completed.
fn round(transport: &mut impl Transport, batch: &[Slice], clock: &mut Clock) {
    let mut out = [Completion::applied(Token(0)); BATCH as usize];
    let mut submitted = 0;
    let mut completed = 0;
    while completed < batch.len() {
        if submitted < batch.len() {
            submitted += transport.submit(black_box(&batch[submitted..])).expect("valid slices");
        }
        completed += transport.poll(clock.now(), black_box(&mut out));
    }
}

/// The same as one request of a batch, which is cut, counted, and freed at the end.
fn booked_round(
    transport: &mut impl Transport,
    table: &mut BatchTable,
    cut: &mut [Slice],
    clock: &mut Clock,
) {
    let mut out = [Completion::applied(Token(0)); BATCH as usize];
    let len = u64::from(BATCH) * u64::from(SLICE_BYTES);
    let request = TransferRequest {
        op: Op::Write,
        local: RegionOffset::new(REGION, 0),
        remote: RemoteOffset::new(REMOTE_REGION, 0),
        len,
    };
    let handle = table.create([request].into_iter(), Slicer::new(SLICE_BYTES)).expect("room");
    let mut ended = None;
    while ended.is_none() {
        let count = table.next(handle, cut).expect("live");
        if count > 0 {
            let accepted = transport.submit(black_box(&cut[..count])).expect("valid slices");
            table.accepted(&cut[..accepted]);
        }
        let count = transport.poll(clock.now(), black_box(&mut out));
        for completion in &out[..count] {
            ended = table.complete(completion).or(ended);
        }
    }
    table.free(handle).expect("terminal");
}

criterion_group!(benches, slicing, batch_table, routes, multi, decorators, mailbox);
criterion_main!(benches);
