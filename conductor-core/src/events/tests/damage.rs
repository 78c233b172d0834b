//! Payloads that are cut, wrong or hostile.

use super::*;

fn events() -> Vec<Owned> {
    vec![
        Owned { group: Some(1), lora: Some("adapter".into()), ..Owned::stored(3, 4) },
        Owned::removed(2),
        Owned { cleared: true, ..Owned::default() },
        Owned::stored(1, 40),
    ]
}

#[test]
fn of_a_cut_payload_the_events_in_front_of_the_cut_are_used() {
    for layout in LAYOUTS {
        let whole = payload(layout, &events());
        let (batch, _) = decode(dialect(layout), &whole);
        let expected: Vec<Event<'_>> = batch.events().collect();
        // Without the rank, the last byte, every event is there.
        for length in 0..whole.len() - 1 {
            let mut batch = Batch::new();
            match Decoder::new(dialect(layout)).decode(&whole[..length], &mut batch) {
                Ok(decoded) => {
                    let found: Vec<Event<'_>> = batch.events().collect();
                    assert_eq!(found, expected[..found.len()], "{layout:?} cut to {length}");
                    assert_eq!(decoded.skipped.truncated, 1, "{layout:?} cut to {length}");
                    assert!(decoded.removals_lost, "{layout:?} cut to {length}");
                }
                Err(error) => {
                    assert_eq!(error, BatchError::NotABatch);
                    assert!(batch.is_empty());
                    assert!(length < 11, "{layout:?} cut to {length}");
                }
            }
        }
    }
}

#[test]
fn every_byte_may_be_any_other() {
    for layout in LAYOUTS {
        let whole = payload(layout, &events());
        let mut decoder = Decoder::new(dialect(layout));
        let mut batch = Batch::new();
        for at in 0..whole.len() {
            for bit in 0..8 {
                let mut damaged = whole.clone();
                damaged[at] ^= 1 << bit;
                if let Ok(decoded) = decoder.decode(&damaged, &mut batch) {
                    assert_eq!(decoded.events as usize, batch.events().count());
                    for event in batch.events() {
                        if let Event::Stored(stored) = event {
                            let tokens = stored.hashes.len() * stored.block_tokens as usize;
                            assert_eq!(stored.tokens.len(), tokens);
                        }
                    }
                }
            }
        }
    }
}

/// Three events of which the second has `value` in place of the field's value.
fn with_bad_field(name: &str, kind: &str, value: &[u8]) -> Vec<u8> {
    let removed = |writer: &mut Writer<'_>| {
        writer.array(2);
        writer.text("BlockRemoved");
        writer.array(1);
        writer.unsigned(3);
    };
    batch_of(3, |writer| {
        removed(writer);
        writer.map(3);
        writer.text("type");
        writer.text(kind);
        writer.text("block_hashes");
        writer.array(1);
        writer.unsigned(3);
        writer.text(name);
        writer.out.extend_from_slice(value);
        removed(writer);
    })
}

#[test]
fn a_field_that_cannot_be_read_costs_its_event_only() {
    let text = b"\xa1x".as_slice();
    let number = b"\x05".as_slice();
    let cases = [
        ("block_hashes", text),
        ("block_hashes", b"\x91\xa1x"),
        ("block_hashes", b"\x91\xc4\x02\x01\x02"),
        ("parent_block_hash", text),
        ("parent_block_hash", b"\xcb\0\0\0\0\0\0\0\0"),
        ("token_ids", text),
        ("token_ids", b"\x91\xff"),
        ("token_ids", b"\x91\xcf\0\0\0\x01\0\0\0\0"),
        ("token_ids", b"\x92\x92\x01\x02\x93\x01\x02\x03"),
        ("block_size", text),
        ("block_size", b"\xff"),
        ("medium", number),
        ("lora_name", number),
        ("lora_name", b"\xa1\xff"),
        ("cache_salt", number),
        ("extra_keys", number),
        ("extra_keys", b"\x91\x05"),
        ("group_idx", text),
        ("kv_cache_spec_kind", number),
        ("locality", number),
        ("event_id", b"\xff"),
        ("dp_rank", text),
        ("object_key", number),
        ("base_block_idx", text),
    ];
    for (kind, lost) in [("BlockStored", false), ("BlockRemoved", true)] {
        for (name, value) in cases {
            let bad_for_stored_only = name == "extra_keys" && value == b"\x91\x05";
            if bad_for_stored_only && lost {
                continue;
            }
            let (batch, decoded) = decode(Dialect::Vllm, &with_bad_field(name, kind, value));
            let skipped = Skipped { malformed: 1, ..Skipped::default() };
            assert_eq!((decoded.events, decoded.skipped), (2, skipped), "{kind} {name} {value:?}");
            assert_eq!(decoded.removals_lost, lost, "{kind} {name} {value:?}");
            assert_eq!(batch.hashes.len(), 2, "what was read of the event is gone");
        }
    }
}

#[test]
fn events_that_contradict_themselves_are_skipped() {
    let cases: [(&str, &str, &[u8], Skipped); 6] = [
        // One hash and two tokens, without a block size.
        ("BlockStored", "token_ids", b"\x92\x01\x02", Skipped { mismatch: 1, ..Skipped::default() }),
        ("BlockStored", "extra_keys", b"\x92\x91\x05\xc0", Skipped { mismatch: 1, ..Skipped::default() }),
        ("BlockStored", "block_hashes", b"\x90", Skipped { empty: 1, ..Skipped::default() }),
        ("BlockRemoved", "block_hashes", b"\x90", Skipped { empty: 1, ..Skipped::default() }),
        ("BlockMoved", "to", b"\x90", Skipped { unknown_event: 1, ..Skipped::default() }),
        ("BlockRemoved", "medium", b"\xa4TAPE", Skipped { unknown_medium: 1, ..Skipped::default() }),
    ];
    for (kind, name, value, skipped) in cases {
        let (_, decoded) = decode(Dialect::Vllm, &with_bad_field(name, kind, value));
        assert_eq!((decoded.events, decoded.skipped), (2, skipped), "{kind} {name}");
        assert!(!decoded.removals_lost, "{kind} {name}");
    }
}

#[test]
fn an_event_without_a_kind_or_without_hashes_may_have_removed_something() {
    let payload = batch_of(2, |writer| {
        writer.map(1);
        writer.text("block_hashes");
        writer.array(0);
        writer.array(1);
        writer.text("BlockRemoved");
    });
    let (_, decoded) = decode(Dialect::Vllm, &payload);
    assert_eq!((decoded.events, decoded.skipped.malformed), (0, 2));
    assert!(decoded.removals_lost);
}

#[test]
fn limits_hold() {
    let limits = Limits {
        payload_bytes_max: 400,
        events_max: 2,
        blocks_max: 3,
        block_tokens_max: 8,
        text_bytes_max: 5,
        extra_bytes_max: 4,
    };
    let decode = |events: &[Owned]| {
        let mut batch = Batch::new();
        Decoder::with_limits(Dialect::Vllm, limits).decode(&payload(Layout::VllmMaps, events), &mut batch)
    };
    let large = |event: Owned| decode(&[event]).expect("a batch").skipped.too_large;
    assert_eq!(large(Owned::stored(3, 8)), 0);
    assert_eq!(large(Owned::stored(4, 1)), 1);
    assert_eq!(large(Owned::stored(1, 9)), 1);
    assert_eq!(large(Owned { lora: Some("12345".into()), ..Owned::stored(1, 1) }), 0);
    assert_eq!(large(Owned { lora: Some("123456".into()), ..Owned::stored(1, 1) }), 1);
    assert_eq!(large(Owned { salt: Some("123456".into()), ..Owned::stored(1, 1) }), 1);
    let extra = |length: usize| {
        let extra = vec![0x01; length];
        Owned { ends: vec![u32::try_from(length).expect("short")], extra, ..Owned::stored(1, 1) }
    };
    assert_eq!(large(extra(4)), 0);
    assert_eq!(large(extra(5)), 1);
    let removed = decode(&[Owned::removed(4)]).expect("a batch");
    assert_eq!(removed.skipped.too_large, 1);
    assert!(removed.removals_lost);
    let cleared = Owned { cleared: true, ..Owned::default() };
    let events = vec![cleared; 3];
    assert_eq!(decode(&events), Err(BatchError::TooMany { events: 3, events_max: 2 }));
    let long = Owned { lora: Some("x".repeat(500)), ..Owned::stored(1, 1) };
    assert!(matches!(decode(&[long]), Err(BatchError::TooLong { bytes_max: 400, .. })));
}

#[test]
fn counts_that_the_payload_cannot_hold_allocate_nothing() {
    let named = |before: &[u8], name: &[u8], count: &[u8]| [before, name, count, &[1, 1]].concat();
    let huge = [
        // Arrays, maps and texts of 2^32 - 1 values: the batch, the events, an event, a field that is not
        // known.
        vec![0xdd, 255, 255, 255, 255, 1],
        vec![0x92, 1, 0xdd, 255, 255, 255, 255, 1],
        vec![0x92, 1, 0x91, 0xdf, 255, 255, 255, 255, 1],
        named(&[0x92, 1, 0x91, 0x81], b"\xa1x", &[0xdb, 255, 255, 255, 255]),
        // 2^32 - 1 tokens, and as many hashes as the limit allows.
        named(&[0x92, 1, 0x91, 0x81], b"\xa9token_ids", &[0xdd, 255, 255, 255, 255]),
        named(&[0x92, 1, 0x91, 0x92], b"\xacBlockRemoved", &[0xdd, 0, 3, 255, 255]),
    ];
    for payload in huge {
        let mut batch = Batch::new();
        let decoded = Decoder::new(Dialect::Vllm).decode(&payload, &mut batch);
        assert!(batch.is_empty(), "{payload:?}");
        if let Ok(decoded) = decoded {
            assert!(decoded.removals_lost, "{payload:?}");
        }
        assert!(batch.hashes.capacity() + batch.tokens.capacity() + batch.bytes.capacity() < 100);
    }
}

#[test]
fn a_huge_payload_does_not_keep_its_memory() {
    let mut decoder = Decoder::new(Dialect::Vllm);
    let mut batch = Batch::new();
    let events: Vec<Owned> = (0..40).map(|_| Owned::stored(1, 60_000)).collect();
    decoder.decode(&payload(Layout::VllmMaps, &events), &mut batch).expect("a batch");
    assert_eq!(batch.tokens.len(), 2_400_000);
    decoder.decode(&payload(Layout::VllmMaps, &events[..1]), &mut batch).expect("a batch");
    assert!(batch.tokens.capacity() < 1_100_000, "{}", batch.tokens.capacity());
}

#[test]
fn depth_costs_no_stack() {
    // An unknown field with a million arrays within each other, then an event that is fine.
    let payload = batch_of(2, |writer| {
        map_event(
            writer,
            1,
            |_| {},
            |writer| {
                writer.text("deep");
                writer.out.resize(writer.out.len() + 1_000_000, 0x91);
                writer.nil();
            },
        );
        writer.array(1);
        writer.text("AllBlocksCleared");
    });
    let (_, decoded) = decode(Dialect::Vllm, &payload);
    assert_eq!((decoded.events, decoded.skipped.total()), (2, 0));
}

#[test]
fn what_is_no_batch_is_refused() {
    let cases: [&[u8]; 9] = [
        b"",
        b"\xc0",
        b"\xa5hello",
        b"\x90",
        b"\x91\x01",
        b"\x92\xa1x\x90",
        b"\x92\x01\xa1x",
        b"\x80",
        b"\x81\xa2ts\x01",
    ];
    for payload in cases {
        let mut batch = Batch::new();
        assert_eq!(Decoder::new(Dialect::Vllm).decode(payload, &mut batch), Err(BatchError::NotABatch));
    }
}

proptest! {
    #[test]
    fn any_bytes_are_refused_or_read(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut batch = Batch::new();
        for dialect in [Dialect::Vllm, Dialect::Sglang, Dialect::Mooncake] {
            if let Ok(decoded) = Decoder::new(dialect).decode(&bytes, &mut batch) {
                prop_assert_eq!(decoded.events as usize, batch.events().count());
            }
            let _ = decode_load(&bytes);
        }
    }
}
