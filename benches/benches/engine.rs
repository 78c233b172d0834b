//! The engine, polled by its caller, on each fabric of this build: submit a batch of requests, poll until it
//! has completed.
//!
//! As in `transports`, one thread polls both engines, so a figure contains the work of both.
#![allow(missing_docs, reason = "criterion's macros make public items")]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use te_core::{Access, Op, Status};
use te_engine::{Config, Engine, Fabrics, LocalAddr, TransferRequest, fabrics};

const KIB: u64 = 1 << 10;
/// Requests per batch, and bytes per request.
const SHAPES: [(u64, u64); 3] = [(1, 4 * KIB), (128, 4 * KIB), (1, 1024 * KIB)];
const REGION_BYTES: u64 = 1024 * KIB;

/// The engine of the initiator, that of the target, and the request.
struct Engines {
    initiator: Engine,
    target: Engine,
    request: TransferRequest,
}

impl Engines {
    fn start(fabrics: Fabrics) -> Self {
        let start = || Engine::start(Config { fabrics, ..Config::default() }).expect("loopback");
        let (mut initiator, mut target) = (start(), start());
        let local = initiator.alloc_shared(REGION_BYTES as usize, Access::all()).expect("memory");
        let remote = target.alloc_shared(REGION_BYTES as usize, Access::all()).expect("memory");
        let segment = initiator.open_segment(target.name()).expect("it listens");
        let request = TransferRequest {
            op: Op::Read,
            local: LocalAddr::Region(local.id(), 0),
            segment,
            remote_addr: remote.addr(),
            len: 0,
        };
        Self { initiator, target, request }
    }

    fn requests(&self, op: Op, count: u64, len: u64) -> Vec<TransferRequest> {
        let LocalAddr::Region(region, _) = self.request.local else { unreachable!("made in `start`") };
        let request = |index: u64| TransferRequest {
            op,
            local: LocalAddr::Region(region, index * len),
            remote_addr: self.request.remote_addr + index * len,
            len,
            ..self.request
        };
        (0..count).map(request).collect()
    }

    fn round(&mut self, requests: &[TransferRequest]) {
        let batch = self.initiator.submit(requests, None).expect("valid requests");
        loop {
            self.initiator.poll();
            self.target.poll();
            let status = self.initiator.status(batch).expect("not freed");
            if status.is_terminal() {
                assert_eq!(status, Status::Completed);
                break;
            }
        }
        self.initiator.free(batch).expect("terminal");
    }
}

fn engine(criterion: &mut Criterion) {
    // Not every host has RDMA: its benches are in `rdma`, over simulated NICs. Fabrics that `auto` leaves out
    // need a GPU, a pool or a target that their settings name.
    for entry in fabrics().iter().filter(|entry| entry.is_built() && entry.auto && entry.name != "rdma") {
        let (name, mut engines) = (entry.name, Engines::start(Fabrics::of(entry)));
        let mut group = criterion.benchmark_group(format!("engine {name}"));
        for (count, len) in SHAPES {
            group.throughput(Throughput::Bytes(count * len));
            for (verb, op) in [("read", Op::Read), ("write", Op::Write)] {
                let requests = engines.requests(op, count, len);
                let what = format!("{verb} {count} x {} KiB", len / KIB);
                group.bench_function(what, |bencher| bencher.iter(|| engines.round(&requests)));
            }
        }
        group.finish();
    }
}

criterion_group!(benches, engine);
criterion_main!(benches);
