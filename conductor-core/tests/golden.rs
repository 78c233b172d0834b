//! What releases of vLLM and `SGLang` publish and hash, captured from their own code: `golden/capture.py`.
//!
//! ```text
//!   golden/RELEASE.txt ── frames ──▶ Decoder ──▶ the events that capture.py published
//!                     └── chains, roots ──▶ hash::vllm, hash::sglang ──▶ the same digests
//! ```

use std::fmt::Write as _;

use conductor_core::EngineHash;
use conductor_core::events::encode::{Layout, encode};
use conductor_core::events::{Batch, Decoder, Dialect, Event, decode_load};
use conductor_core::hash::vllm::{Algorithm, Digest, ExtraKey, Profile, Release, VllmChain};
use conductor_core::hash::{sglang, vllm};

const BLOCK_TOKENS: u32 = 16;
const LORA: (&str, &str) = ("sql-adapter", "/adapters/sql");
const SALT: &str = "tenant-é";

const VLLM: [(&str, Release, &str); 10] = [
    ("vllm-0.22", Release::UpTo28, include_str!("golden/vllm-0.22.txt")),
    ("vllm-0.23", Release::UpTo28, include_str!("golden/vllm-0.23.txt")),
    ("vllm-0.24", Release::UpTo28, include_str!("golden/vllm-0.24.txt")),
    ("vllm-0.26", Release::UpTo28, include_str!("golden/vllm-0.26.txt")),
    ("vllm-0.28", Release::UpTo28, include_str!("golden/vllm-0.28.txt")),
    ("vllm-0.29", Release::From29, include_str!("golden/vllm-0.29.txt")),
    ("vllm-0.30", Release::From29, include_str!("golden/vllm-0.30.txt")),
    ("vllm-0.31", Release::From31, include_str!("golden/vllm-0.31.txt")),
    ("vllm-0.32", Release::From31, include_str!("golden/vllm-0.32.txt")),
    ("vllm-0.33", Release::From31, include_str!("golden/vllm-0.33.txt")),
];

const SGLANG: [(&str, &str); 5] = [
    ("sglang-0.5.10", include_str!("golden/sglang-0.5.10.txt")),
    ("sglang-0.5.17", include_str!("golden/sglang-0.5.17.txt")),
    ("sglang-0.5.18", include_str!("golden/sglang-0.5.18.txt")),
    ("sglang-0.5.20", include_str!("golden/sglang-0.5.20.txt")),
    ("sglang-0.5.23", include_str!("golden/sglang-0.5.23.txt")),
];

#[test]
fn every_frame_of_every_release_says_what_was_published() {
    let vllm = VLLM.map(|(name, _, text)| (name, Dialect::Vllm, text));
    let sglang = SGLANG.map(|(name, text)| (name, Dialect::Sglang, text));
    for (name, dialect, text) in vllm.into_iter().chain(sglang) {
        let file = File::read(text);
        assert!(file.frames.len() >= 10, "{name} has {} frames", file.frames.len());
        let mut decoder = Decoder::new(dialect);
        let mut batch = Batch::new();
        for frame in &file.frames {
            let decoded = decoder.decode(&frame.payload, &mut batch).expect("a batch");
            let mut said: Vec<String> = decoded
                .skipped
                .by_reason()
                .iter()
                .filter(|(_, count)| *count > 0)
                .map(|(reason, count)| format!("skipped {reason}={count}"))
                .collect();
            said.extend(batch.events().map(|event| line(&event)));
            let expected: Vec<String> = frame.expected.iter().map(|line| file.spelled(line)).collect();
            assert_eq!(said, expected, "{name}, {}", frame.name);
            assert_eq!(decoded.events as usize, batch.len());
            assert!(!decoded.removals_lost, "{name}, {}", frame.name);
            if frame.name == "no-rank" {
                assert_eq!(batch.dp_rank(), None);
            } else {
                assert_eq!(batch.dp_rank(), Some(3), "{name}, {}", frame.name);
                assert!((batch.published() - 1_764_000_000.25).abs() < f64::EPSILON);
            }
        }
    }
}

#[test]
fn roots_of_vllm_are_those_of_the_release() {
    let mut compared = 0;
    for (name, release, text) in VLLM {
        for line in text.lines().filter_map(|line| line.strip_prefix("root ")) {
            let [algorithm, seed, digest] = words(line);
            let algorithm = Algorithm::named(algorithm).expect("a known algorithm");
            let seed = Some(seed).filter(|seed| *seed != "-");
            let profile = Profile::of(release, algorithm, seed);
            if digest == "random" {
                assert_eq!(profile, None, "{name}: {line}");
            } else {
                assert_eq!(hex(profile.expect("a known root").root().as_bytes()), digest, "{name}: {line}");
            }
            compared += 1;
        }
    }
    assert_eq!(compared, 10 * 4 * 3);
}

#[test]
fn chains_of_vllm_are_those_of_the_release() {
    let mut compared = 0;
    for (name, release, text) in VLLM {
        let file = File::read(text);
        for line in text.lines().filter_map(|line| line.strip_prefix("chain ")) {
            let [algorithm, seed, case, lookahead, digests] = words(line);
            let algorithm = Algorithm::named(algorithm).expect("a known algorithm");
            let mut profile = Profile::of(release, algorithm, Some(seed)).expect("a seed");
            profile.lookahead_tokens = lookahead.parse().expect("a number");
            let hashes = chain(&profile, &file.tokens, case);
            let found: Vec<String> = hashes.iter().map(|digest| hex(digest.as_bytes())).collect();
            assert_eq!(found.join(","), digests, "{name}: {algorithm:?}, {case}, lookahead {lookahead}");
            compared += 1;
        }
    }
    // Nine releases without lookahead; 0.33 with and without, where images have no lookahead.
    assert_eq!(compared, 9 * 4 * 5 + 4 * 9);
}

#[test]
fn the_published_number_is_the_end_of_vllms_digest() {
    let (_, release, text) = VLLM[9];
    let file = File::read(text);
    let profile = Profile::of(release, Algorithm::Sha256, Some("0")).expect("a seed");
    let published: Vec<EngineHash> =
        chain(&profile, &file.tokens, "plain").iter().map(Digest::published).collect();
    let mut batch = Batch::new();
    let frame = file.frames.iter().find(|frame| frame.name == "plain").expect("the frame");
    Decoder::new(Dialect::Vllm).decode(&frame.payload, &mut batch).expect("a batch");
    let Some(Event::Stored(stored)) = batch.events().next() else { panic!("no stored event") };
    assert_eq!(stored.hashes, published);
}

#[test]
fn pages_of_sglang_are_those_of_the_release() {
    let mut compared = 0;
    for (name, text) in SGLANG {
        let file = File::read(text);
        for line in text.lines().filter_map(|line| line.strip_prefix("pages ")) {
            let [case, salt, extra_key, numbers] = words(line);
            let option = |text: &'static str| Some(text).filter(|text| *text != "-");
            let mut found = Vec::new();
            if case == "pairs" {
                let mut chain = sglang::SglangChain::default();
                for start in (0..file.tokens.len() - 1).step_by(BLOCK_TOKENS as usize) {
                    let end = (start + 1 + BLOCK_TOKENS as usize).min(file.tokens.len());
                    found.push(sglang::published(&chain.push_pairs(&file.tokens[start..end])));
                }
            } else {
                sglang::hashes(&file.tokens, BLOCK_TOKENS, option(salt), &mut found);
            }
            let namespace = match case {
                "dynamo" | "adapter" => sglang::Namespace::new(option(extra_key), option(salt)),
                _ => sglang::Namespace::new(None, None),
            };
            let found: Vec<u64> = found.iter().map(|&hash| namespace.apply(hash).0).collect();
            assert_eq!(joined(&found), numbers, "{name}: {case}");
            compared += 1;
        }
    }
    assert!(compared >= 9, "{compared} chains of pages");
}

#[test]
fn a_report_of_load_is_read() {
    let line = SGLANG[4].1.lines().find_map(|line| line.strip_prefix("load ")).expect("a report");
    let load = decode_load(&bytes(line)).expect("a report");
    assert_eq!((load.running_requests, load.waiting_requests), (5, 2));
    assert_eq!((load.used_tokens, load.capacity_tokens), (70_000, 1_000_000));
    assert_eq!(load.dp_rank, Some(1));
    assert_eq!((load.waiting_uncached_tokens, load.total_tokens), (4096, 75_000));
    assert_eq!(load.running_requests_max, 256);
    assert_eq!((load.prefilled_tokens, load.prefill_busy_us), (123_456_789, 987_654_321));
    let mut again = Vec::new();
    conductor_core::events::encode::encode_load(&load, &mut again);
    assert_eq!(again, bytes(line));
}

#[test]
fn encoders_write_the_bytes_of_the_releases() {
    let releases = [
        (Layout::VllmArrays, VLLM[0].2, Dialect::Vllm),
        (Layout::VllmArrays, VLLM[1].2, Dialect::Vllm),
        (Layout::VllmMaps, VLLM[9].2, Dialect::Vllm),
        (Layout::Sglang, SGLANG[4].1, Dialect::Sglang),
    ];
    for (layout, text, dialect) in releases {
        let file = File::read(text);
        let mut decoder = Decoder::new(dialect);
        let mut batch = Batch::new();
        let mut compared = 0;
        for frame in &file.frames {
            // Those that encoders have no field for: sessions, windows, numbers of adapters, old media.
            let whole = ["plain", "child", "media-keys", "many", "adapter", "remote", "cleared", "mixed"];
            if !whole.contains(&frame.name) {
                continue;
            }
            decoder.decode(&frame.payload, &mut batch).expect("a batch");
            let events: Vec<Event<'_>> = batch.events().collect();
            let mut again = Vec::new();
            encode(layout, batch.published(), batch.dp_rank(), &events, &mut again);
            assert_eq!(hex(&again), hex(&frame.payload), "{layout:?}, {}", frame.name);
            compared += 1;
        }
        assert!(compared >= 5, "{layout:?}: {compared} frames");
    }
}

/// The hashes of the captured prompt: 48 tokens, 16 per block.
fn chain(profile: &Profile, tokens: &[u32], case: &str) -> Vec<Digest> {
    let mut found = Vec::new();
    if case == "media" {
        let media = |offset: i64, block: i64| ExtraKey::Media {
            identifier: ["image-2", "image-8", "image-28"]
                [[2, 8, 28].iter().position(|o| *o == offset).expect("as capture.py writes it")],
            offset: offset - 16 * block,
        };
        let keys = [vec![media(2, 0), media(8, 0)], vec![media(28, 1)], vec![media(28, 2)]];
        let mut chain = VllmChain::new(profile);
        for (block, keys) in tokens.chunks_exact(BLOCK_TOKENS as usize).zip(&keys) {
            found.push(chain.push(block, keys, &[]));
        }
        return found;
    }
    let lora = matches!(case, "lora" | "both").then_some(LORA);
    let salt = matches!(case, "salt" | "both").then_some(SALT);
    vllm::hashes(profile, tokens, BLOCK_TOKENS, lora, salt, &mut found);
    found
}

/// A file of vectors.
struct File {
    tokens: Vec<u32>,
    frames: Vec<Frame>,
}

struct Frame {
    name: &'static str,
    payload: Vec<u8>,
    expected: Vec<&'static str>,
}

impl File {
    fn read(text: &'static str) -> Self {
        let mut file = Self { tokens: Vec::new(), frames: Vec::new() };
        for line in text.lines() {
            let Some((kind, rest)) = line.split_once(' ') else { continue };
            match kind {
                "tokens" => {
                    file.tokens =
                        rest.split(',').map(|token| token.parse().expect("as capture.py writes it")).collect()
                }
                "frame" => {
                    let [name, _, _, payload] = words(rest);
                    file.frames.push(Frame { name, payload: bytes(payload), expected: Vec::new() });
                }
                "expect" => file.frames.last_mut().expect("as capture.py writes it").expected.push(rest),
                _ => {}
            }
        }
        file
    }

    /// The line, with tokens in place of a reference to them.
    fn spelled(&self, line: &str) -> String {
        let Some((before, rest)) = line.split_once("t=@") else { return line.to_owned() };
        let (range, after) = rest.split_once(' ').expect("as capture.py writes it");
        let (start, end) = range.split_once(':').expect("as capture.py writes it");
        let tokens = &self.tokens
            [start.parse().expect("as capture.py writes it")..end.parse().expect("as capture.py writes it")];
        format!("{before}t={} {after}", joined(tokens))
    }
}

/// An event in the words of the files.
fn line(event: &Event<'_>) -> String {
    let numbers = |hashes: &[EngineHash]| joined(&hashes.iter().map(|hash| hash.0).collect::<Vec<_>>());
    let option = |number: Option<u64>| number.map_or("-".to_owned(), |number| number.to_string());
    match event {
        Event::Cleared(_) => "cleared".to_owned(),
        Event::Removed(removed) => format!(
            "removed h={} tier={} group={}",
            numbers(removed.hashes),
            removed.tier,
            option(removed.group.map(u64::from))
        ),
        Event::Stored(stored) => {
            let extra: Vec<String> =
                (0..stored.hashes.len()).map(|block| hex(stored.extra.of(block))).collect();
            format!(
                "stored h={} p={} t={} b={} lora={} salt={} extra={} tier={} group={}",
                numbers(stored.hashes),
                option(stored.parent.map(|parent| parent.0)),
                joined(stored.tokens),
                stored.block_tokens,
                stored.lora.unwrap_or("-"),
                stored.salt.unwrap_or("-"),
                if stored.extra.is_empty() { "-".to_owned() } else { extra.join(",") },
                stored.tier,
                option(stored.group.map(u64::from)),
            )
        }
    }
}

fn words<const N: usize>(line: &'static str) -> [&'static str; N] {
    let words: Vec<&str> = line.split(' ').collect();
    words.try_into().unwrap_or_else(|words| panic!("not {N} words: {words:?}"))
}

fn joined<T: ToString>(numbers: &[T]) -> String {
    numbers.iter().map(T::to_string).collect::<Vec<_>>().join(",")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn bytes(hex: &str) -> Vec<u8> {
    hex.as_bytes()
        .chunks_exact(2)
        .map(|pair| {
            u8::from_str_radix(std::str::from_utf8(pair).expect("as capture.py writes it"), 16)
                .expect("as capture.py writes it")
        })
        .collect()
}
