//! What the Conductor does with every block of an event: decoding, and hashing its tokens.
#![allow(missing_docs, reason = "criterion's macros make public items")]

use std::hint::black_box;

use conductor_core::events::encode::{Layout, encode};
use conductor_core::events::{Batch, Decoder, Dialect, Event, Extra, Source, Stored};
use conductor_core::hash::vllm::{Algorithm, Profile, Release};
use conductor_core::hash::{Root, Session, extend, keys, sglang, vllm};
use conductor_core::{BlockKey, EngineHash, Tier};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use te_core::testkit::Rng;

const BLOCK_TOKENS: u32 = 16;
/// The vocabulary of Qwen 2.5 and 3: the integers of a prompt have 2, 3 and 5 bytes in no order.
const VOCABULARY: u64 = 151_936;

fn tokens(count: usize) -> Vec<u32> {
    let mut random = Rng::new(1);
    (0..count).map(|_| u32::try_from(random.below(VOCABULARY)).expect("small")).collect()
}

/// A payload with one event of `blocks` blocks.
fn payload(layout: Layout, blocks: usize) -> Vec<u8> {
    let tokens = tokens(blocks * BLOCK_TOKENS as usize);
    let mut random = Rng::new(2);
    let hashes: Vec<EngineHash> = (0..blocks).map(|_| EngineHash(random.next())).collect();
    let stored = Stored {
        hashes: &hashes,
        parent: Some(EngineHash(1 << 63)),
        tokens: &tokens,
        block_tokens: BLOCK_TOKENS,
        lora: None,
        salt: None,
        extra: Extra::default(),
        tier: Tier::Gpu,
        group: None,
        source: Source::default(),
    };
    let mut out = Vec::new();
    encode(layout, 1.5, Some(0), &[Event::Stored(stored)], &mut out);
    out
}

/// From the bytes of a message to block keys.
fn events(criterion: &mut Criterion) {
    let layouts = [
        ("vllm 0.22", Dialect::Vllm, Layout::VllmArrays),
        ("vllm 0.33", Dialect::Vllm, Layout::VllmMaps),
        ("sglang 0.5.23", Dialect::Sglang, Layout::Sglang),
    ];
    for (work, hashed) in [("decode", false), ("decode and hash", true)] {
        let mut group = criterion.benchmark_group(work);
        for (name, dialect, layout) in layouts {
            for blocks in [4, 64] {
                let payload = payload(layout, blocks);
                let mut decoder = Decoder::new(dialect);
                let mut batch = Batch::new();
                let mut found: Vec<BlockKey> = Vec::new();
                group.throughput(Throughput::Elements(blocks as u64));
                group.bench_function(BenchmarkId::new(name, blocks), |bencher| {
                    bencher.iter(|| {
                        let decoded = decoder.decode(black_box(&payload), &mut batch).expect("a batch");
                        assert_eq!(decoded.events, 1);
                        for event in batch.events().filter(|_| hashed) {
                            let Event::Stored(stored) = event else { continue };
                            found.clear();
                            let mut chain = conductor_core::hash::Chain::after(0, BlockKey(1));
                            extend(&mut chain, stored.tokens, stored.block_tokens, &mut found);
                        }
                        black_box(&found);
                    });
                });
            }
        }
        group.finish();
    }
}

/// The keys of a prompt of 12 032 tokens, and the hashes of the engines for it.
fn hashes(criterion: &mut Criterion) {
    let prompt = tokens(752 * BLOCK_TOKENS as usize);
    let mut group = criterion.benchmark_group("hash 752 blocks");
    group.throughput(Throughput::Elements(752));
    let root = Root::new(0);
    let mut found = Vec::new();
    group.bench_function("own", |bencher| {
        bencher.iter(|| {
            found.clear();
            keys(black_box(&prompt), BLOCK_TOKENS, &root, &mut found);
        });
    });
    let mut session = Session::new(root, BLOCK_TOKENS);
    group.bench_function("own, in a session", |bencher| {
        bencher.iter(|| session.turn(black_box(&prompt)).len());
    });
    for algorithm in Algorithm::ALL {
        let profile = Profile::of(Release::From31, algorithm, Some("0")).expect("a seed");
        let mut digests = Vec::new();
        group.bench_function(BenchmarkId::new("vllm", algorithm.name()), |bencher| {
            bencher.iter(|| {
                digests.clear();
                vllm::hashes(&profile, black_box(&prompt), BLOCK_TOKENS, None, None, &mut digests);
            });
        });
    }
    let mut pages = Vec::new();
    group.bench_function("sglang", |bencher| {
        bencher.iter(|| {
            pages.clear();
            sglang::hashes(black_box(&prompt), BLOCK_TOKENS, None, &mut pages);
        });
    });
    group.finish();
}

criterion_group!(benches, events, hashes);
criterion_main!(benches);
