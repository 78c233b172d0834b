//! What an encoder writes, the decoder reads, in every layout.

use super::*;

fn text() -> impl Strategy<Value = String> {
    "[a-zé/@:0-9]{1,40}"
}

/// Extra keys: images, embeddings and texts that cannot be taken for a salt.
fn extra_values() -> impl Strategy<Value = Vec<u8>> {
    let value = prop_oneof![
        (text(), any::<i64>()).prop_map(|(identifier, offset)| {
            let mut out = Vec::new();
            let mut writer = Writer { out: &mut out };
            writer.array(2);
            writer.text(&identifier);
            writer.signed(offset);
            out
        }),
        prop::collection::vec(any::<u8>(), 32).prop_map(|digest| {
            let mut out = vec![0xc4, 32];
            out.extend_from_slice(&digest);
            out
        }),
    ];
    prop::collection::vec(value, 0..3).prop_map(|values| values.concat())
}

fn event() -> impl Strategy<Value = Owned> {
    let hashes = prop::collection::vec(any::<u64>().prop_map(EngineHash), 1..40);
    let shape = (0..3_u32, hashes, 0..20_u32, any::<Option<u64>>());
    let names = (prop::option::of(text()), prop::option::of(text()), prop::option::of(text()));
    let rest = (0..4_usize, prop::option::of(0..64_u32), any::<u32>(), prop::bool::ANY);
    let extra = prop::collection::vec(extra_values(), 40);
    (shape, names, rest, extra).prop_map(|((kind, hashes, block_tokens, parent), names, rest, extra)| {
        let (tier, group, first_token, with_extra) = rest;
        let (lora, salt, tenant) = names;
        let blocks = hashes.len();
        let tokens = (0..blocks as u32 * block_tokens)
            .map(|i| first_token.wrapping_add(i).wrapping_mul(0x9e37_79b9) >> (i % 32))
            .collect();
        let extra = if with_extra { &extra[..blocks] } else { &[] };
        let ends: Vec<u32> = extra
            .iter()
            .scan(0, |end, values| {
                *end += values.len() as u32;
                Some(*end)
            })
            .collect();
        let bytes = extra.concat();
        let ends = if bytes.is_empty() { vec![] } else { ends };
        Owned {
            removed: kind == 1,
            cleared: kind == 2,
            hashes,
            parent: parent.map(EngineHash),
            tokens,
            block_tokens,
            lora,
            salt,
            ends,
            extra: bytes,
            tier: Some(Tier::ALL[tier]),
            group,
            object: None,
            tenant,
        }
    })
}

/// The event without what the layout has no field for.
fn as_said(layout: Layout, event: &Owned) -> Owned {
    let mut event = event.clone();
    match layout {
        Layout::VllmArrays | Layout::VllmMaps => {
            event.tenant = None;
            if event.parent.is_some() {
                event.salt = None;
            }
        }
        Layout::Sglang => {
            event.tenant = None;
            event.group = None;
            (event.ends, event.extra) = (vec![], vec![]);
        }
        Layout::Mooncake => (event.ends, event.extra) = (vec![], vec![]),
    }
    event
}

/// Takes the medium's name away, which the encoder of Mooncake's layout adds.
fn without_medium(event: Event<'_>) -> Event<'_> {
    match event {
        Event::Stored(stored) => Event::Stored(Stored {
            source: Source { medium: None, event_id: None, ..stored.source },
            ..stored
        }),
        Event::Removed(removed) => Event::Removed(Removed {
            source: Source { medium: None, event_id: None, ..removed.source },
            ..removed
        }),
        Event::Cleared(source) => Event::Cleared(Source { event_id: None, ..source }),
    }
}

proptest! {
    #[test]
    fn what_is_encoded_is_decoded(
        layout in prop::sample::select(&LAYOUTS[..]),
        events in prop::collection::vec(event(), 0..6),
    ) {
        // A group of Mooncake's layout has no kind; only 0 counts without one.
        let events: Vec<Owned> = events
            .into_iter()
            .map(|event| Owned {
                group: event.group.filter(|&group| layout != Layout::Mooncake || group == 0),
                ..event
            })
            .collect();
        let (batch, decoded) = decode(dialect(layout), &payload(layout, &events));
        prop_assert_eq!(decoded.skipped.total(), 0);
        prop_assert!(!decoded.removals_lost);
        prop_assert_eq!(batch.dp_rank(), Some(2));
        let said: Vec<Owned> = events.iter().map(|event| as_said(layout, event)).collect();
        let expected: Vec<Event<'_>> = said.iter().map(Owned::event).collect();
        let found: Vec<Event<'_>> = batch.events().map(without_medium).collect();
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn a_batch_is_the_same_after_any_other(
        first in prop::collection::vec(event(), 0..6),
        second in prop::collection::vec(event(), 0..6),
    ) {
        let (first, second) = (payload(Layout::VllmMaps, &first), payload(Layout::VllmMaps, &second));
        let mut decoder = Decoder::new(Dialect::Vllm);
        let mut used = Batch::new();
        decoder.decode(&first, &mut used).expect("a batch");
        decoder.decode(&second, &mut used).expect("a batch");
        let (fresh, _) = decode(Dialect::Vllm, &second);
        prop_assert!(used.events().eq(fresh.events()));
    }
}
