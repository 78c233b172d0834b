//! Events of engines and stores, in every dialect: what is read keeps its promises, and what is written of it
//! is read as the same.
#![no_main]

use conductor_core::events::encode::{Layout, encode, encode_load};
use conductor_core::events::{Batch, Decoder, Dialect, Event, decode_load};
use libfuzzer_sys::fuzz_target;

/// What every layout has fields for.
fn said(event: &Event<'_>) -> String {
    match event {
        Event::Stored(stored) => format!(
            "{:?} {:?} {:?} {} {:?} {:?}",
            stored.hashes, stored.parent, stored.tokens, stored.block_tokens, stored.lora, stored.tier
        ),
        Event::Removed(removed) => format!("{:?} {:?}", removed.hashes, removed.tier),
        Event::Cleared(_) => "cleared".into(),
    }
}

fn check(event: &Event<'_>) {
    let (hashes, group) = match event {
        Event::Stored(stored) => {
            assert_eq!(stored.tokens.len(), stored.hashes.len() * stored.block_tokens as usize);
            for block in 0..stored.hashes.len() {
                let _ = stored.extra.of(block);
            }
            (stored.hashes, stored.group)
        }
        Event::Removed(removed) => (removed.hashes, removed.group),
        Event::Cleared(_) => return,
    };
    assert!(!hashes.is_empty());
    assert!(group.is_none_or(|group| group < 64));
}

fuzz_target!(|bytes: &[u8]| {
    if let Ok(load) = decode_load(bytes) {
        let mut out = Vec::new();
        encode_load(&load, &mut out);
        assert_eq!(decode_load(&out), Ok(load));
    }
    let (mut batch, mut again) = (Batch::new(), Batch::new());
    for (dialect, layouts) in [
        (Dialect::Vllm, &[Layout::VllmArrays, Layout::VllmMaps][..]),
        (Dialect::Sglang, &[Layout::Sglang]),
        (Dialect::Mooncake, &[Layout::Mooncake]),
    ] {
        let Ok(decoded) = Decoder::new(dialect).decode(bytes, &mut batch) else {
            assert!(batch.is_empty());
            continue;
        };
        assert_eq!(decoded.events as usize, batch.len());
        batch.events().for_each(|event| check(&event));
        // A group without a kind would not be read back, nor the place of a medium.
        let events: Vec<Event<'_>> = batch
            .events()
            .map(|event| match event {
                Event::Stored(mut stored) => {
                    (stored.group, stored.source.medium) = (None, None);
                    Event::Stored(stored)
                }
                Event::Removed(mut removed) => {
                    (removed.group, removed.source.medium) = (None, None);
                    Event::Removed(removed)
                }
                cleared @ Event::Cleared(_) => cleared,
            })
            .collect();
        for &layout in layouts {
            let mut out = Vec::new();
            encode(layout, 1.0, batch.dp_rank(), &events, &mut out);
            let decoded = Decoder::new(dialect).decode(&out, &mut again).expect("our own batch");
            assert_eq!((decoded.skipped.total(), decoded.removals_lost), (0, false), "{layout:?}");
            assert!(again.events().map(|event| said(&event)).eq(events.iter().map(said)), "{layout:?}");
        }
    }
});
