//! Decoding and hashing allocate nothing once the arenas have grown.
//!
//! ```text
//!   payload ──▶ Decoder ──▶ Batch (the same again) ──▶ keys (the same again)
//! ```

use std::alloc::System;

use conductor_core::events::encode::{Layout, encode};
use conductor_core::events::{Batch, Decoder, Dialect, Event, Extra, Removed, Source, Stored};
use conductor_core::hash::{Chain, Root};
use conductor_core::{BlockKey, EngineHash, Tier};
use te_core::testkit::{CountingAlloc, allocations};

#[global_allocator]
static ALLOCATOR: CountingAlloc<System> = CountingAlloc::new(System);

fn payload(layout: Layout, events: usize) -> Vec<u8> {
    let hashes: Vec<EngineHash> = (1..=64).map(|block| EngineHash(block << 57)).collect();
    let tokens: Vec<u32> = (0..64 * 16).map(|token| token * 151).collect();
    let stored = Event::Stored(Stored {
        hashes: &hashes,
        parent: None,
        tokens: &tokens,
        block_tokens: 16,
        lora: Some("adapter"),
        salt: Some("salt"),
        extra: Extra::default(),
        tier: Tier::Gpu,
        group: Some(0),
        source: Source { backend: Some("worker"), ..Source::default() },
    });
    let removed =
        Event::Removed(Removed { hashes: &hashes, tier: Tier::Cpu, group: None, source: Source::default() });
    let cleared = Event::Cleared(Source::default());
    let mut out = Vec::new();
    let events: Vec<Event<'_>> = [stored, removed, cleared].into_iter().cycle().take(events).collect();
    encode(layout, 1.0, None, &events, &mut out);
    out
}

#[test]
fn a_warm_batch_allocates_nothing() {
    let layouts = [
        (Layout::VllmArrays, Dialect::Vllm),
        (Layout::VllmMaps, Dialect::Vllm),
        (Layout::Sglang, Dialect::Sglang),
        (Layout::Mooncake, Dialect::Mooncake),
    ];
    for (layout, dialect) in layouts {
        let (large, small) = (payload(layout, 9), payload(layout, 2));
        let mut cut = large.clone();
        cut.truncate(large.len() * 2 / 3);
        let mut decoder = Decoder::new(dialect);
        let mut batch = Batch::new();
        let mut keys: Vec<BlockKey> = Vec::new();
        let mut pass = |payload: &[u8]| {
            let decoded = decoder.decode(payload, &mut batch).expect("a batch");
            for event in batch.events() {
                let Event::Stored(stored) = event else { continue };
                keys.clear();
                let mut chain = Chain::new(&Root::of(0, stored.lora, stored.salt));
                let blocks = stored.tokens.chunks_exact(stored.block_tokens as usize).enumerate();
                keys.extend(blocks.map(|(block, tokens)| chain.push_with(tokens, stored.extra.of(block))));
            }
            decoded.events
        };
        let events = pass(&large);
        assert_eq!(events, 9, "{layout:?}");
        let before = allocations();
        let again = [pass(&large), pass(&small), pass(&cut), pass(&large)];
        assert_eq!(allocations() - before, 0, "{layout:?}");
        assert!(again[2] < 9 && again[3] == 9, "{layout:?}: {again:?}");
    }
}
