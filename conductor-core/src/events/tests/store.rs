//! Events of a store, and the keys of its objects.

use super::*;

/// Two stored events and a removed one, with the fields and in the order of Mooncake's
/// `kv_event_publisher.cpp` (`emit_legacy_compat_fields`, `emit_object_key`), written by msgspec.
const PUBLISHED: &str = concat!(
    "93cf0000019ab697e87b93de0014a86576656e745f696401a974696d657374616d70cf0000019ab697e87baa6576656e745f",
    "74797065a673746f726564a474797065ab426c6f636b53746f726564aa6d6f64656c5f6e616d65c0aa626c6f636b5f73697a",
    "65c0af6164646974696f6e616c5f73616c74c0a96c6f72615f6e616d65c0a974656e616e745f6964a764656661756c74aa62",
    "61636b656e645f6964a773746f72652d31a867726f75705f6964c0a66d656469756da3637075a764705f72616e6bc0aa6f62",
    "6a6563745f6b6579b2307866656463626139383736353433323130aa7365715f68617368657391cffedcba9876543210ac62",
    "6c6f636b5f68617368657391d3fedcba9876543210ae626173655f626c6f636b5f69647800ab706172656e745f68617368c0",
    "a9746f6b656e5f696473c0b1706172656e745f626c6f636b5f68617368c0de0014a86576656e745f696402a974696d657374",
    "616d70cf0000019ab697e87baa6576656e745f74797065a673746f726564a474797065ab426c6f636b53746f726564aa6d6f",
    "64656c5f6e616d65c0aa626c6f636b5f73697a65c0af6164646974696f6e616c5f73616c74c0a96c6f72615f6e616d65c0a9",
    "74656e616e745f6964a764656661756c74aa6261636b656e645f6964a773746f72652d31a867726f75705f6964c0a66d6564",
    "69756da46469736ba764705f72616e6bc0aa6f626a6563745f6b6579d95e6d4070637030406463703040686561645f6f725f",
    "74705f72616e6b3a314061626162616261626162616261626162616261626162616261626162616261626162616261626162",
    "616261626162616261626162616261626162616261626162aa7365715f68617368657390ac626c6f636b5f68617368657390",
    "ae626173655f626c6f636b5f69647800ab706172656e745f68617368c0a9746f6b656e5f696473c0b1706172656e745f626c",
    "6f636b5f68617368c0de0011a86576656e745f696403a974696d657374616d70cf0000019ab697e87baa6576656e745f7479",
    "7065a772656d6f766564a474797065ac426c6f636b52656d6f766564aa6d6f64656c5f6e616d65c0aa626c6f636b5f73697a",
    "65c0af6164646974696f6e616c5f73616c74c0a96c6f72615f6e616d65c0a974656e616e745f6964a764656661756c74aa62",
    "61636b656e645f6964a773746f72652d31a867726f75705f6964c0a66d656469756da3637075a764705f72616e6bc0aa6f62",
    "6a6563745f6b6579b43138333634373538353434343933303634373230aa7365715f68617368657391cffedcba9876543210",
    "ac626c6f636b5f68617368657391d3fedcba9876543210ae626173655f626c6f636b5f696478c000",
);

#[test]
fn events_of_mooncakes_publisher_are_read() {
    let payload = bytes(PUBLISHED);
    let (batch, decoded) = decode(Dialect::Mooncake, &payload);
    assert_eq!((decoded.events, decoded.skipped.total()), (3, 0));
    assert_eq!(batch.dp_rank(), Some(0));
    assert!((batch.published() - 1_764_000_000_123.0).abs() < 1.0);
    let source = |event_id, medium, object, base_block| Source {
        event_id: Some(event_id),
        backend: Some("store-1"),
        tenant: Some("default"),
        medium: Some(medium),
        object: Some(object),
        base_block,
        ..Source::default()
    };
    let stored = |hashes, source| {
        Event::Stored(Stored {
            hashes,
            parent: None,
            tokens: &[],
            block_tokens: 0,
            lora: None,
            salt: None,
            extra: Extra::default(),
            tier: Tier::Store,
            group: None,
            source,
        })
    };
    let ascend =
        "m@pcp0@dcp0@head_or_tp_rank:1@abababababababababababababababababababababababababababababababab";
    let expected = [
        stored(&[EngineHash(0xfedc_ba98_7654_3210)], source(1, "cpu", "0xfedcba9876543210", Some(0))),
        // The publisher could not read this key; its hash is in it all the same.
        stored(&[EngineHash(0xabab_abab_abab_abab)], source(2, "disk", ascend, Some(0))),
        Event::Removed(Removed {
            hashes: &[EngineHash(0xfedc_ba98_7654_3210)],
            tier: Tier::Store,
            group: None,
            source: source(3, "cpu", "18364758544493064720", None),
        }),
    ];
    let found: Vec<Event<'_>> = batch.events().collect();
    assert_eq!(found, expected);

    // Written again they have the same bytes, but for the hash that was not read from the second key.
    let mut again = Vec::new();
    let mut events = found.clone();
    if let Event::Stored(stored) = &mut events[1] {
        stored.hashes = &[];
    }
    encode(Layout::Mooncake, batch.published(), batch.dp_rank(), &events, &mut again);
    assert_eq!(again, payload);
}

#[test]
fn an_object_without_a_hash_is_not_used() {
    let mut batch = Batch::new();
    for removed in [false, true] {
        let event =
            Owned { removed, hashes: vec![], object: Some("notes.txt".into()), ..Owned::stored(0, 0) };
        let payload = payload(Layout::Mooncake, &[event]);
        let decoded = Decoder::new(Dialect::Mooncake).decode(&payload, &mut batch).expect("a batch");
        assert_eq!((decoded.events, decoded.skipped.unknown_object), (0, 1));
        assert!(!decoded.removals_lost, "nothing was known of it");
    }
}

#[test]
fn standard_events_say_where_they_came_from() {
    // The example of RFC 1527, with a worker's tier.
    let payload = batch_of(1, |writer| {
        writer.map(13);
        for (name, text) in [
            ("event_type", "stored"),
            ("model_name", "qwen"),
            ("additional_salt", "int8"),
            ("lora_name", "adapter"),
            ("tenant_id", "team"),
            ("backend_id", "worker-7"),
            ("medium", "gpu"),
        ] {
            writer.text(name);
            writer.text(text);
        }
        for (name, number) in
            [("event_id", 42), ("dp_rank", 3), ("block_size", 1), ("base_block_idx", 5), ("parent_hash", 9)]
        {
            writer.text(name);
            writer.unsigned(number);
        }
        writer.text("seq_hashes");
        writer.array(1);
        writer.unsigned(u64::MAX);
    });
    for dialect in [Dialect::Mooncake, Dialect::Vllm] {
        let (batch, _) = decode(dialect, &payload);
        let Some(Event::Stored(stored)) = batch.events().next() else { panic!("no stored event") };
        assert_eq!(stored.hashes, [EngineHash(u64::MAX)]);
        assert_eq!((stored.parent, stored.tier), (Some(EngineHash(9)), Tier::Gpu));
        assert_eq!((stored.lora, stored.salt), (Some("adapter"), Some("int8")));
        let source = stored.source;
        assert_eq!((source.event_id, source.base_block, source.dp_rank), (Some(42), Some(5), Some(3)));
        assert_eq!(
            (source.backend, source.tenant, source.model),
            (Some("worker-7"), Some("team"), Some("qwen"))
        );
    }
}

const DIGEST: &str = "00112233445566778899aabbccddeeff0123456789abcdeffedcba9876543210";

fn key(text: &str) -> ObjectKey<'_> {
    ObjectKey::parse(text).unwrap_or_else(|| panic!("{text} is a key"))
}

#[test]
fn keys_of_vllm_are_read() {
    let text = alloc::format!("Qwen/Qwen3-8B@tp_rank:3@pcp0@dcp1@pp_rank:2@{DIGEST}");
    let found = key(&text);
    assert_eq!((found.layout, found.hash), (ObjectLayout::Vllm, EngineHash(0xfedc_ba98_7654_3210)));
    assert_eq!((found.model, found.prefix), (Some("Qwen/Qwen3-8B"), None));
    assert_eq!((found.tp_rank, found.pp_rank), (Some(3), Some(2)));
    assert_eq!((found.pcp_rank, found.dcp_rank), (Some(0), Some(1)));
    assert_eq!((found.group, found.component), (None, None));

    let text = alloc::format!(
        "a@b@model@tp_rank:0@pcp0@dcp0@pp_rank:0@group:4@cache_role:sparse@cache_family:mla@{DIGEST}"
    );
    let found = key(&text);
    assert_eq!((found.model, found.prefix), (Some("model"), Some("a@b")));
    assert_eq!((found.group, found.component), (Some(4), Some("mla")));
}

#[test]
fn keys_of_ascend_are_read() {
    let text = alloc::format!("model@pcp1@dcp2@head_or_tp_rank:3@pp_rank:4@group:5@layer_id:6@{DIGEST}");
    let found = key(&text);
    assert_eq!((found.layout, found.model), (ObjectLayout::Ascend, Some("model")));
    assert_eq!((found.pcp_rank, found.dcp_rank, found.tp_rank), (Some(1), Some(2), Some(3)));
    assert_eq!((found.pp_rank, found.group, found.layer), (Some(4), Some(5), Some(6)));
}

#[test]
fn keys_of_former_releases_are_read() {
    let text = alloc::format!("a@b@pcp1@dcp2@head_or_tp_rank:3@{DIGEST}@6");
    let found = key(&text);
    assert_eq!((found.layout, found.model), (ObjectLayout::Ascend, Some("a@b")));
    assert_eq!((found.hash, found.layer), (EngineHash(0xfedc_ba98_7654_3210), Some(6)));
    let text = alloc::format!("model@tp_rank:3@pcp0@dcp0@pp_rank:0@0x{DIGEST}");
    assert_eq!((key(&text).hash, key(&text).tp_rank), (EngineHash(0xfedc_ba98_7654_3210), Some(3)));
}

#[test]
fn an_event_may_have_the_hash_of_its_object_beside_it() {
    let event = |hash: &str| {
        batch_of(1, |writer| {
            writer.map(3);
            writer.text("event_type");
            writer.text("removed");
            writer.text("connector_block_hash");
            writer.text(hash);
            writer.text("seq_hashes");
            writer.array(0);
        })
    };
    let (batch, _) = decode(Dialect::Mooncake, &event("0123456789abcdef000000000000002a"));
    let Some(Event::Removed(removed)) = batch.events().next() else { panic!("no removed event") };
    assert_eq!(removed.hashes, [EngineHash(42)]);
    let (_, decoded) = decode(Dialect::Mooncake, &event("2a"));
    assert_eq!((decoded.events, decoded.skipped.empty), (0, 1));
}

#[test]
fn compact_keys_are_read() {
    let text = alloc::format!("model@{DIGEST}@7");
    let found = key(&text);
    assert_eq!((found.layout, found.hash), (ObjectLayout::Compact, EngineHash(0xfedc_ba98_7654_3210)));
    assert_eq!((found.model, found.group, found.tp_rank), (Some("model"), None, Some(7)));
    let text = alloc::format!("org@model@2@{DIGEST}@7");
    let found = key(&text);
    assert_eq!((found.model, found.group, found.tp_rank), (Some("org@model"), Some(2), Some(7)));
}

#[test]
fn keys_of_sglang_are_read() {
    for (text, prefix, component) in [
        (String::from(DIGEST), None, None),
        (alloc::format!("tenant_a_{DIGEST}"), Some("tenant_a"), None),
        (alloc::format!("{DIGEST}_k"), None, Some("k")),
        (alloc::format!("ns_{DIGEST}_0_v"), Some("ns"), Some("0_v")),
    ] {
        let found = key(&text);
        assert_eq!((found.layout, found.hash), (ObjectLayout::Sglang, EngineHash(0x0011_2233_4455_6677)));
        assert_eq!((found.prefix, found.component), (prefix, component));
    }
}

#[test]
fn keys_that_are_numbers_are_read() {
    for (text, hash) in [("12345", 12345), ("0x2a", 42), ("0XFF", 255), ("18446744073709551615", u64::MAX)] {
        assert_eq!((key(text).layout, key(text).hash), (ObjectLayout::Number, EngineHash(hash)));
    }
}

#[test]
fn texts_that_are_no_keys_are_refused() {
    let long = "f".repeat(130);
    let cases = [
        String::new(),
        "notes.txt".into(),
        "0x".into(),
        "-1".into(),
        "+1".into(),
        "0x+1".into(),
        "18446744073709551616".into(),
        "@".into(),
        "@@@".into(),
        "é_é@é".into(),
        alloc::format!("model@{DIGEST}"),
        alloc::format!("@tp_rank:0@{DIGEST}"),
        alloc::format!("prefix@@tp_rank:0@{DIGEST}"),
        alloc::format!("model@pcp0@{DIGEST}"),
        alloc::format!("@head_or_tp_rank:1@{DIGEST}@0"),
        alloc::format!("model@tp_rank:1@{DIGEST}@0"),
        alloc::format!("model@tp_rank:x@{DIGEST}"),
        alloc::format!("model@tp_rank:0@{}", &DIGEST[..15]),
        alloc::format!("model@tp_rank:0@{long}"),
        alloc::format!("model@tp_rank:0@{}é", &DIGEST[..18]),
        alloc::format!("model@{DIGEST}@x"),
        alloc::format!("@{DIGEST}@1"),
        alloc::format!("{}_k", &DIGEST[1..]),
        alloc::format!("é{DIGEST}"),
    ];
    for text in cases {
        assert_eq!(ObjectKey::parse(&text), None, "{text}");
    }
}

proptest! {
    #[test]
    fn any_text_is_a_key_or_none(text in "[a-f0-9x@:_gtpé]{0,90}") {
        if let Some(found) = ObjectKey::parse(&text) {
            for part in [found.model, found.prefix, found.component].into_iter().flatten() {
                prop_assert!(text.contains(part));
            }
        }
    }
}

fn bytes(hex: &str) -> Vec<u8> {
    let digit = |byte: u8| char::from(byte).to_digit(16).expect("hexadecimal") as u8;
    hex.as_bytes().chunks_exact(2).map(|pair| (digit(pair[0]) << 4) | digit(pair[1])).collect()
}
