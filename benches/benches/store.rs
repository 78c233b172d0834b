//! The store's state machines: the allocator, and the master's operations with and without their frames.
#![allow(missing_docs, reason = "criterion's macros make public items")]

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use std::time::{Duration, Instant as Clock};
use store_core::allocator::Allocator;
use store_core::message::{
    Commit, Exists, Get, LeaseWanted, MountSegment, NewObject, PutEnd, PutOptions, PutRequest, PutStart,
    RemoveMode,
};
use store_core::{AllocatorKind, Frame, Incarnation, Key, Master, MasterConfig, NodeId, Operation, Session};
use te_core::Instant;
use te_core::testkit::Rng;

const KIB: u64 = 1 << 10;
const OBJECTS: usize = 100_000;
const ONE_REPLICA: PutOptions = PutOptions::DEFAULT;

/// A segment that is three quarters full: each iteration frees a random block and allocates one of a random
/// size.
fn allocator(criterion: &mut Criterion) {
    const CAPACITY: u64 = 64 << 30;
    let lengths = [
        ("4 KiB", 4 * KIB, 4 * KIB),
        ("4 KiB to 1 MiB", 4 * KIB, 1024 * KIB),
        ("3.12 MB", 3_274_752, 3_274_752),
        ("643 KiB or 3.12 MB", 643 * KIB, 3_274_752),
    ];
    for kind in AllocatorKind::ALL {
        let mut group = criterion.benchmark_group(format!("{kind} allocator"));
        group.throughput(Throughput::Elements(1));
        for (name, len_min, len_max) in lengths {
            let mut allocator = kind.build(CAPACITY);
            let mut random = Rng::new(1);
            let mut len = move || match len_max - len_min {
                0 => len_min,
                // One of two sizes.
                more if name.contains("or") => len_min + more * random.below(2),
                more => len_min + random.below(more + 1),
            };
            let mut blocks = Vec::new();
            while allocator.used_bytes() < CAPACITY / 4 * 3 && blocks.len() < 1_000_000 {
                blocks.push(allocator.allocate(len(), 0).expect("room").0);
            }
            let mut choose = Rng::new(2);
            group.bench_function(BenchmarkId::new("free and allocate", name), |bencher| {
                bencher.iter(|| {
                    let chosen = choose.below(blocks.len() as u64) as usize;
                    black_box(allocator.free(blocks[chosen]));
                    let (block, offset) = allocator.allocate(len(), 0).expect("a quarter is free");
                    black_box(offset);
                    blocks[chosen] = block;
                });
            });
        }
        group.finish();
    }
}

/// Keys like those of clients: 32 bytes of hash.
fn keys() -> Vec<[u8; 32]> {
    let mut random = Rng::new(3);
    let key = |_| {
        let mut key = [0; 32];
        for part in key.chunks_exact_mut(8) {
            part.copy_from_slice(&random.next().to_le_bytes());
        }
        key
    };
    (0..OBJECTS).map(key).collect()
}

fn full_master(keys: &[[u8; 32]]) -> Master {
    let mut master = Master::new(MasterConfig::default()).expect("valid");
    for node in 1..=2 {
        let name = format!("node-{node}");
        let len = keys.len() as u64 * 4 * KIB;
        let segment = MountSegment {
            node: NodeId::new(node),
            incarnation: Incarnation::new(1),
            name: &name,
            endpoint: "host:1",
            len,
            ..MountSegment::default()
        };
        master.mount(Instant::ZERO, &segment).expect("fresh");
    }
    for key in keys {
        put(&mut master, Instant::ZERO, key);
    }
    master
}

fn put(master: &mut Master, now: Instant, key: &[u8]) {
    let started = master.put_start(now, key, 4 * KIB, &ONE_REPLICA).expect("room");
    master.put_end(now, key, started.generation, 1).expect("just started");
}

fn master(criterion: &mut Criterion) {
    let keys: &[[u8; 32]] = &keys();
    let mut master = full_master(keys);
    let mut random = Rng::new(4);
    let mut any = move || &keys[random.below(OBJECTS as u64) as usize];
    let now = Instant::from_millis(1);

    let mut group = criterion.benchmark_group("master");
    group.throughput(Throughput::Elements(1));
    group.bench_function("exists", |bencher| bencher.iter(|| black_box(master.exists(any()))));
    group.bench_function("get", |bencher| {
        bencher.iter(|| black_box(master.get(now, any()).expect("all are there")));
    });
    group.bench_function("put start, put end, remove", |bencher| {
        let key = [0xff; 32];
        bencher.iter(|| {
            put(&mut master, now, &key);
            master.remove(now, &key, RemoveMode::Force).expect("just put");
        });
    });

    let mut session = Session::default();
    for batch in [1usize, 32, 128] {
        group.throughput(Throughput::Elements(batch as u64));
        let (mut request, mut response) = (Vec::new(), Vec::new());
        let mut encode = |encode: fn(&mut Vec<u8>, &[&[u8; 32]])| {
            let keys: Vec<_> = (0..batch).map(|_| any()).collect();
            request.clear();
            encode(&mut request, &keys);
            request.clone()
        };
        let exists = encode(|out, keys| {
            Exists::encode_request(out, 1, &(), keys.iter().map(|key| Key(*key))).expect("short");
        });
        let get = encode(|out, keys| {
            Get::encode_request(out, 1, &LeaseWanted::Quick, keys.iter().map(|key| Key(*key)))
                .expect("short");
        });
        for (name, request) in [("exists, framed", exists), ("get, framed", get)] {
            group.bench_function(BenchmarkId::new(name, batch), |bencher| {
                bencher.iter(|| {
                    let (frame, _) = Frame::parse(black_box(&request)).expect("valid").expect("whole");
                    response.clear();
                    master.handle(now, &mut session, &frame, &mut response);
                    black_box(&response);
                });
            });
        }
        framed_puts(&mut group, &mut master, &mut session, batch);
    }
    group.finish();
}

/// Started and committed by two requests, each time under the same keys. The removal in between is not timed.
fn framed_puts(
    group: &mut BenchmarkGroup<'_, WallTime>,
    master: &mut Master,
    session: &mut Session,
    batch: usize,
) {
    let now = Instant::from_millis(1);
    let keys: Vec<[u8; 32]> = (0..batch).map(|at| [at as u8; 32]).collect();
    let (mut request, mut response, mut commit) = (Vec::new(), Vec::new(), Vec::new());
    let head = PutRequest { writer: 7, ..PutRequest::once(ONE_REPLICA) };
    let start = keys.iter().map(|key| NewObject { key: Key(key), len: 4 * KIB });
    PutStart::encode_request(&mut request, 1, &head, start).expect("short");
    group.bench_function(BenchmarkId::new("put start and put end, framed", batch), |bencher| {
        bencher.iter_custom(|times| {
            let mut spent = Duration::ZERO;
            for _ in 0..times {
                let began = Clock::now();
                response.clear();
                let (frame, _) = Frame::parse(black_box(&request)).expect("valid").expect("whole");
                master.handle(now, session, &frame, &mut response);
                let (frame, _) = Frame::parse(&response).expect("valid").expect("whole");
                let (_, items) = PutStart::decode_response(&frame).expect("valid");
                let commits = keys.iter().zip(items).map(|(key, given)| {
                    let given = given.expect("room");
                    Commit { key: Key(key), generation: given.generation, checksum: 1, handle: given.handle }
                });
                commit.clear();
                PutEnd::encode_request(&mut commit, 2, &(), commits).expect("short");
                response.clear();
                let (frame, _) = Frame::parse(&commit).expect("valid").expect("whole");
                master.handle(now, session, &frame, &mut response);
                spent += began.elapsed();
                for key in &keys {
                    master.remove(now, key, RemoveMode::Force).expect("just put");
                }
            }
            spent
        });
    });
}

/// The checksum that every reader and writer computes, compared with a copy of as many bytes.
fn checksum(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("checksum");
    for len in [4 * KIB, 1024 * KIB] {
        let bytes = vec![0x5au8; len as usize];
        let mut copy = vec![0u8; len as usize];
        group.throughput(Throughput::Bytes(len));
        group.bench_function(BenchmarkId::new("crc32c", len), |bencher| {
            bencher.iter(|| crc32c::crc32c(black_box(&bytes)));
        });
        group.bench_function(BenchmarkId::new("memcpy", len), |bencher| {
            bencher.iter(|| black_box(&mut copy).copy_from_slice(black_box(&bytes)));
        });
    }
    group.finish();
}

criterion_group!(benches, allocator, master, checksum);
criterion_main!(benches);
