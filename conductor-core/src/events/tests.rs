use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use proptest::prelude::*;

use super::encode::{Layout, encode};
use super::msgpack::Writer;
use super::*;
use crate::hash::{Chain, Root};

mod damage;
mod round_trip;
mod store;

/// An event that owns what it has, to build batches from.
#[derive(Clone, Debug, Default)]
struct Owned {
    removed: bool,
    cleared: bool,
    hashes: Vec<EngineHash>,
    parent: Option<EngineHash>,
    tokens: Vec<u32>,
    block_tokens: u32,
    lora: Option<String>,
    salt: Option<String>,
    ends: Vec<u32>,
    extra: Vec<u8>,
    tier: Option<Tier>,
    group: Option<u32>,
    object: Option<String>,
    tenant: Option<String>,
}

impl Owned {
    fn event(&self) -> Event<'_> {
        let source =
            Source { object: self.object.as_deref(), tenant: self.tenant.as_deref(), ..Source::default() };
        let tier = self.tier.unwrap_or(Tier::Gpu);
        if self.cleared {
            return Event::Cleared(source);
        }
        if self.removed {
            return Event::Removed(Removed { hashes: &self.hashes, tier, group: self.group, source });
        }
        Event::Stored(Stored {
            hashes: &self.hashes,
            parent: self.parent,
            tokens: &self.tokens,
            block_tokens: self.block_tokens,
            lora: self.lora.as_deref(),
            salt: self.salt.as_deref(),
            extra: Extra::new(&self.ends, &self.extra).expect("whole values"),
            tier,
            group: self.group,
            source,
        })
    }

    fn stored(blocks: u32, block_tokens: u32) -> Self {
        Self {
            hashes: (1..=blocks).map(|block| EngineHash(u64::from(block) << 40)).collect(),
            tokens: (0..blocks * block_tokens).map(|token| token * 977).collect(),
            block_tokens,
            ..Self::default()
        }
    }

    fn removed(blocks: u32) -> Self {
        Self { removed: true, ..Self::stored(blocks, 0) }
    }
}

fn payload(layout: Layout, events: &[Owned]) -> Vec<u8> {
    let events: Vec<Event<'_>> = events.iter().map(Owned::event).collect();
    let mut out = Vec::new();
    encode(layout, 1.5, Some(2), &events, &mut out);
    out
}

const fn dialect(layout: Layout) -> Dialect {
    match layout {
        Layout::VllmArrays | Layout::VllmMaps => Dialect::Vllm,
        Layout::Sglang => Dialect::Sglang,
        Layout::Mooncake => Dialect::Mooncake,
    }
}

const LAYOUTS: [Layout; 4] = [Layout::VllmArrays, Layout::VllmMaps, Layout::Sglang, Layout::Mooncake];

/// A batch in the layout of vLLM whose events `write` writes.
fn batch_of(count: usize, write: impl FnOnce(&mut Writer<'_>)) -> Vec<u8> {
    let mut out = Vec::new();
    let mut writer = Writer { out: &mut out };
    writer.array(2);
    writer.float(1.0);
    writer.array(count);
    write(&mut writer);
    out
}

fn decode(dialect: Dialect, payload: &[u8]) -> (Batch, Decoded) {
    let mut batch = Batch::new();
    let decoded = Decoder::new(dialect).decode(payload, &mut batch).expect("a batch");
    (batch, decoded)
}

/// A stored event of one block of two tokens as a map, with more fields in front of and behind its own.
fn map_event(
    writer: &mut Writer<'_>,
    more: usize,
    front: impl FnOnce(&mut Writer<'_>),
    back: impl FnOnce(&mut Writer<'_>),
) {
    writer.map(4 + more);
    front(writer);
    writer.text("token_ids");
    writer.array(2);
    writer.unsigned(7);
    writer.unsigned(70_000);
    writer.text("block_size");
    writer.unsigned(2);
    writer.text("block_hashes");
    writer.array(1);
    writer.unsigned(9);
    back(writer);
    writer.text("type");
    writer.text("BlockStored");
}

#[test]
fn fields_come_in_any_order_and_unknown_ones_are_ignored() {
    let payload = batch_of(1, |writer| {
        map_event(
            writer,
            3,
            |writer| {
                writer.text("remaining_copy_counts");
                writer.map(2);
                writer.text("a");
                writer.array(2);
                writer.float(0.5);
                writer.nil();
                writer.unsigned(1 << 40);
                writer.out.extend_from_slice(&[0xc7, 2, 9, 1, 2]);
                writer.text("session_id");
                writer.out.extend_from_slice(&[0xd6, 1, 2, 3, 4, 5]);
            },
            |writer| {
                writer.text("source_kind");
                writer.out.extend_from_slice(&[0xc4, 1, 0]);
            },
        );
    });
    let (batch, decoded) = decode(Dialect::Vllm, &payload);
    assert_eq!((decoded.events, decoded.skipped.total()), (1, 0));
    let Some(Event::Stored(stored)) = batch.events().next() else { panic!("no stored event") };
    assert_eq!(stored.hashes, [EngineHash(9)]);
    assert_eq!(stored.tokens, [7, 70_000]);
    assert_eq!(stored.tier, Tier::Gpu);
}

#[test]
fn a_batch_may_be_a_map() {
    let mut out = Vec::new();
    let mut writer = Writer { out: &mut out };
    writer.map(4);
    writer.text("data_parallel_rank");
    writer.unsigned(5);
    writer.text("new");
    writer.array(0);
    writer.text("events");
    writer.array(1);
    writer.array(1);
    writer.text("AllBlocksCleared");
    writer.text("ts");
    writer.float(2.5);
    let (batch, decoded) = decode(Dialect::Vllm, &out);
    assert_eq!((decoded.events, batch.dp_rank()), (1, Some(5)));
    assert!((batch.published() - 2.5).abs() < f64::EPSILON);
    assert_eq!(batch.events().next(), Some(Event::Cleared(Source::default())));
}

#[test]
fn integers_of_every_width_are_hashes_and_tokens() {
    let payload = batch_of(1, |writer| {
        writer.array(5);
        writer.text("BlockStored");
        writer.array(10);
        let hashes: [&[u8]; 10] = [
            &[5],
            &[0xff],
            &[0xcc, 200],
            &[0xcd, 1, 0],
            &[0xce, 1, 0, 0, 0],
            &[0xcf, 255, 0, 0, 0, 0, 0, 0, 1],
            &[0xd0, 0x80],
            &[0xd1, 0x80, 0],
            &[0xd2, 0x80, 0, 0, 0],
            &[0xd3, 0x80, 0, 0, 0, 0, 0, 0, 0],
        ];
        hashes.iter().for_each(|hash| writer.out.extend_from_slice(hash));
        writer.nil();
        writer.array(10);
        let tokens: [&[u8]; 10] = [
            &[5],
            &[0x7f],
            &[0xcc, 1],
            &[0xcd, 0, 2],
            &[0xce, 0, 0, 0, 3],
            &[0xcf, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff],
            &[0xd0, 4],
            &[0xd1, 0, 5],
            &[0xd2, 0, 0, 0, 6],
            &[0xd3, 0, 0, 0, 0, 0, 0, 0, 7],
        ];
        tokens.iter().for_each(|token| writer.out.extend_from_slice(token));
        writer.unsigned(1);
    });
    let (batch, decoded) = decode(Dialect::Vllm, &payload);
    assert_eq!(decoded.skipped.total(), 0);
    let Some(Event::Stored(stored)) = batch.events().next() else { panic!("no stored event") };
    let hashes = [
        5,
        u64::MAX,
        200,
        256,
        1 << 24,
        0xff00_0000_0000_0001,
        (-128_i64).cast_unsigned(),
        (-32768_i64).cast_unsigned(),
        (i64::from(i32::MIN)).cast_unsigned(),
        1 << 63,
    ];
    assert_eq!(stored.hashes, hashes.map(EngineHash));
    assert_eq!(stored.tokens, [5, 127, 1, 2, 3, u32::MAX, 4, 5, 6, 7]);
}

#[test]
fn a_digest_is_the_number_that_its_engine_publishes_otherwise() {
    let digest: Vec<u8> = (1..=32).collect();
    let removed = batch_of(1, |writer| {
        writer.array(2);
        writer.text("BlockRemoved");
        writer.array(1);
        writer.out.extend_from_slice(&[0xc4, 32]);
        writer.out.extend_from_slice(&digest);
    });
    for (dialect, hash) in [(Dialect::Vllm, 0x191a_1b1c_1d1e_1f20), (Dialect::Sglang, 0x0102_0304_0506_0708)]
    {
        let (batch, _) = decode(dialect, &removed);
        let Some(Event::Removed(removed)) = batch.events().next() else { panic!("no removed event") };
        assert_eq!(removed.hashes, [EngineHash(hash)]);
    }
}

/// An event of a group: stored with the kind, or removed.
fn group_event(writer: &mut Writer<'_>, removed: bool, group: u64, kind: Option<&str>) {
    writer.map(3 + usize::from(kind.is_some()));
    writer.text("type");
    writer.text(if removed { "BlockRemoved" } else { "BlockStored" });
    writer.text("block_hashes");
    writer.array(1);
    writer.unsigned(1);
    writer.text("group_idx");
    writer.unsigned(group);
    if let Some(kind) = kind {
        writer.text("kv_cache_spec_kind");
        writer.text(kind);
    }
}

#[test]
fn only_groups_that_keep_whole_prefixes_count() {
    let cases = [
        ("full_attention", true),
        ("mla_attention", true),
        ("sink_full_attention", true),
        ("sliding_window", false),
        ("sliding_window_mla", false),
        ("chunked_local_attention", false),
        ("mamba", false),
        ("encoder_only_attention", false),
        ("cross_attention", false),
        ("unknown", false),
        ("tomorrow", false),
    ];
    for (kind, counts) in cases {
        let payload = batch_of(3, |writer| {
            group_event(writer, false, 1, Some(kind));
            // Events of a group whose kind was said once.
            group_event(writer, false, 1, None);
            group_event(writer, true, 1, None);
        });
        let (_, decoded) = decode(Dialect::Vllm, &payload);
        let expected = if counts { (3, 0) } else { (0, 3) };
        assert_eq!((decoded.events, decoded.skipped.other_group), expected, "{kind}");
        assert!(!decoded.removals_lost);
    }
}

#[test]
fn a_group_of_which_nothing_is_known_stores_nothing_but_removes() {
    let payload = batch_of(4, |writer| {
        group_event(writer, false, 2, None);
        group_event(writer, true, 2, None);
        // Models with one group number it 0.
        group_event(writer, false, 0, None);
        group_event(writer, false, 64, Some("full_attention"));
    });
    let (batch, decoded) = decode(Dialect::Vllm, &payload);
    assert_eq!((decoded.events, decoded.skipped.other_group), (2, 2));
    let groups: Vec<(bool, Option<u32>)> = batch
        .events()
        .map(|event| match event {
            Event::Stored(stored) => (true, stored.group),
            Event::Removed(removed) => (false, removed.group),
            Event::Cleared(_) => (false, None),
        })
        .collect();
    assert_eq!(groups, [(false, Some(2)), (true, Some(0))]);
}

#[test]
fn a_group_that_turns_out_to_be_another_loses_what_it_stored_by_removals_still() {
    let payload = batch_of(5, |writer| {
        group_event(writer, false, 1, Some("full_attention"));
        group_event(writer, false, 0, None);
        for group in [0, 1] {
            group_event(writer, false, group, Some("sliding_window"));
        }
        group_event(writer, false, 1, None);
    });
    let mut decoder = Decoder::new(Dialect::Vllm);
    let mut batch = Batch::new();
    let stored = decoder.decode(&payload, &mut batch).unwrap();
    assert_eq!((stored.events, stored.skipped.other_group), (2, 3));
    let payload =
        batch_of(2, |writer| [0, 1].into_iter().for_each(|group| group_event(writer, true, group, None)));
    assert_eq!(decoder.decode(&payload, &mut batch).unwrap().events, 2);
}

#[test]
fn what_was_learnt_of_groups_lasts_until_the_publisher_restarts() {
    let sliding = batch_of(1, |writer| group_event(writer, false, 0, Some("sliding_window")));
    let removed = batch_of(1, |writer| group_event(writer, true, 0, None));
    let mut decoder = Decoder::new(Dialect::Vllm);
    let mut batch = Batch::new();
    decoder.decode(&sliding, &mut batch).expect("a batch");
    assert_eq!(decoder.decode(&removed, &mut batch).expect("a batch").events, 0);
    decoder.restart();
    assert_eq!(decoder.decode(&removed, &mut batch).expect("a batch").events, 1);
}

#[test]
fn media_are_tiers_and_unknown_ones_are_not_used() {
    use Dialect::{Mooncake, Sglang, Vllm};
    let cases = [
        (Vllm, "GPU", Some(Tier::Gpu)),
        (Vllm, "CPU", Some(Tier::Cpu)),
        (Vllm, "FS", Some(Tier::Disk)),
        (Vllm, "OBJ", Some(Tier::Store)),
        (Vllm, "STORAGE", Some(Tier::Disk)),
        (Sglang, "GPU", Some(Tier::Gpu)),
        (Sglang, "CPU_PINNED", Some(Tier::Cpu)),
        (Sglang, "CPU_TIER1", Some(Tier::Cpu)),
        (Sglang, "CPU_TIER2", Some(Tier::Disk)),
        (Sglang, "DISK", Some(Tier::Disk)),
        (Sglang, "EXTERNAL", Some(Tier::Store)),
        (Mooncake, "cpu", Some(Tier::Store)),
        (Mooncake, "disk", Some(Tier::Store)),
        (Mooncake, "gpu", Some(Tier::Gpu)),
        (Mooncake, "G2", Some(Tier::Cpu)),
        (Mooncake, "G3", Some(Tier::Disk)),
        (Vllm, "", None),
        (Vllm, "TAPE", None),
        (Sglang, "GPU ", None),
        (Mooncake, "a medium with a long name", None),
    ];
    for (dialect, medium, tier) in cases {
        let payload = batch_of(1, |writer| {
            map_event(
                writer,
                1,
                |_| {},
                |writer| {
                    writer.text("medium");
                    writer.text(medium);
                },
            );
        });
        let (batch, decoded) = decode(dialect, &payload);
        let found = batch.events().next().map(|event| match event {
            Event::Stored(stored) => stored.tier,
            Event::Removed(_) | Event::Cleared(_) => panic!("stored was published"),
        });
        assert_eq!(found, tier, "{dialect:?} {medium}");
        assert_eq!(decoded.skipped.unknown_medium, u32::from(tier.is_none()), "{dialect:?} {medium}");
        assert!(!decoded.removals_lost);
    }
}

#[test]
fn a_salt_is_read_from_the_first_block_of_a_prompt_only() {
    let event = |parent: Option<u64>| {
        batch_of(1, |writer| {
            map_event(
                writer,
                2,
                |_| {},
                |writer| {
                    writer.text("parent_block_hash");
                    match parent {
                        Some(parent) => writer.unsigned(parent),
                        None => writer.nil(),
                    }
                    writer.text("extra_keys");
                    writer.array(1);
                    writer.array(1);
                    writer.text("text");
                },
            );
        })
    };
    let (batch, _) = decode(Dialect::Vllm, &event(None));
    let Some(Event::Stored(stored)) = batch.events().next() else { panic!("no stored event") };
    assert_eq!((stored.salt, stored.extra.is_empty()), (Some("text"), true));
    let (batch, _) = decode(Dialect::Vllm, &event(Some(1)));
    let Some(Event::Stored(stored)) = batch.events().next() else { panic!("no stored event") };
    assert_eq!((stored.salt, stored.extra.of(0)), (None, &b"\xa4text"[..]));
    assert_eq!(stored.extra.of(1), b"");
}

#[test]
fn a_salt_is_told_from_other_texts_when_it_is_written_again() {
    let of_keys = |texts: [&[u8]; 2]| {
        batch_of(1, |writer| {
            map_event(
                writer,
                1,
                |_| {},
                |writer| {
                    writer.text("extra_keys");
                    writer.array(1);
                    writer.array(3);
                    writer.unsigned(7);
                    for text in texts {
                        writer.out.push(0xa0 | text.len() as u8);
                        writer.out.extend_from_slice(text);
                    }
                },
            );
        })
    };
    // The second is not UTF-8, and no salt could be. An empty text is no salt.
    for (texts, salt, extra) in [
        ([&b"salt"[..], &b"\x8e\x9a"[..]], "salt", &b"\x07\xa2\x8e\x9a"[..]),
        ([b"", b"salt"], "salt", b"\x07"),
    ] {
        let (batch, _) = decode(Dialect::Vllm, &of_keys(texts));
        let events: Vec<Event<'_>> = batch.events().collect();
        for layout in [Layout::VllmArrays, Layout::VllmMaps] {
            let mut out = Vec::new();
            encode(layout, 1.0, None, &events, &mut out);
            let (again, decoded) = decode(Dialect::Vllm, &out);
            assert_eq!(decoded.skipped.total(), 0, "{layout:?}");
            for batch in [&batch, &again] {
                let Some(Event::Stored(stored)) = batch.events().next() else { panic!("no stored event") };
                assert_eq!((stored.salt, stored.extra.of(0)), (Some(salt), extra), "{layout:?}");
            }
        }
    }
}

#[test]
fn the_keys_of_an_event_are_those_of_its_prompt() {
    let tokens: Vec<u32> = (0..64).collect();
    let event = Owned { lora: Some("adapter".into()), salt: Some("salt".into()), ..Owned::stored(4, 16) };
    let event = Owned { tokens: tokens.clone(), ..event };
    let (batch, _) = decode(Dialect::Vllm, &payload(Layout::VllmMaps, &[event]));
    let Some(Event::Stored(stored)) = batch.events().next() else { panic!("no stored event") };
    let mut chain = Chain::new(&Root::of(3, stored.lora, stored.salt));
    let found: Vec<_> = stored
        .tokens
        .chunks_exact(stored.block_tokens as usize)
        .enumerate()
        .map(|(block, tokens)| chain.push_with(tokens, stored.extra.of(block)))
        .collect();
    let mut expected = vec![];
    crate::hash::keys(&tokens, 16, &Root::of(3, Some("adapter"), Some("salt")), &mut expected);
    assert_eq!(found, expected);
}

#[test]
fn reports_of_load_of_other_shapes_are_refused_or_completed() {
    let report = |values: usize, write: fn(&mut Writer<'_>)| {
        let mut out = Vec::new();
        let mut writer = Writer { out: &mut out };
        writer.array(1 + values);
        writer.text("LoadStat");
        (0..values).for_each(|_| write(&mut writer));
        out
    };
    let short = decode_load(&report(4, |writer| writer.unsigned(7))).expect("a report");
    assert_eq!((short.running_requests, short.capacity_tokens, short.dp_rank), (7, 7, None));
    // A later release with more fields.
    assert!(decode_load(&report(14, |writer| writer.unsigned(7))).is_ok());
    for refused in [
        report(3, |writer| writer.unsigned(7)),
        report(10, |writer| writer.text("7")),
        report(10, |writer| writer.nil()),
        report(10, |writer| writer.unsigned(1 << 40)),
        vec![],
        vec![0x9b],
        batch_of(0, |_| {}),
    ] {
        assert_eq!(decode_load(&refused), Err(NotALoad), "{refused:?}");
    }
    let whole = report(10, |writer| writer.unsigned(7));
    for length in 0..whole.len() {
        assert_eq!(decode_load(&whole[..length]), Err(NotALoad), "{length}");
    }
}
