//! Engines that die, and clients that leave.
//!
//! Engines die after a number of tokens that follows from the seed, so that a death is at any place of a
//! stream: before it, in it, at its end. When bytes arrive is not determined, as sockets are real.

use std::time::Duration;

use conductor::mock::{Flavor, MockConfig, MockEngine, Role};
use conductor::proxy::{Limits, Message, Pool, Progress};
use hyper::body::Bytes;
use hyper::header::HeaderMap;
use serde_json::{Value, json};
use te_core::testkit::each_seed;

use crate::common::{Read, front, post, quick, read, start};

/// Requests of a test, at the same time.
const REQUESTS: usize = 6;
/// Tokens of each.
const TOKENS: u32 = 12;

fn body(at: usize, is_chat: bool) -> (&'static str, String) {
    let text = format!("request {at}: tell me about horses and donkeys");
    let mut body = json!({"model": "mock", "max_tokens": TOKENS, "stream": true,
        "stream_options": {"include_usage": true}});
    let path = match is_chat {
        true => {
            body["messages"] = json!([{"role": "user", "content": text}]);
            "/v1/chat/completions"
        }
        false => {
            body["prompt"] = text.into();
            "/v1/completions"
        }
    };
    (path, body.to_string())
}

fn comparable(mut read: Read) -> Read {
    assert_eq!(read.ids.len(), 1, "one stream has one id");
    read.ids.clear();
    read
}

/// What an undisturbed engine answers.
async fn undisturbed() -> Vec<Read> {
    let engine = start(quick(Role::Both, Flavor::Vllm));
    let mut all = Vec::new();
    for at in 0..REQUESTS {
        let (path, body) = body(at, at % 2 == 1);
        all.push(comparable(read(&post(engine.http(), path, body).await.2)));
    }
    all
}

/// Starts two prefill and two decode engines, of which one dies after some tokens.
fn cluster(flavor: Flavor, dies: Role, after: u64) -> (Vec<MockEngine>, Vec<MockEngine>) {
    let engine = |role, at: u64| {
        let fails = (at == 0 && role == dies).then_some(after);
        // A step takes 0.1 ms, so that the streams of several requests overlap.
        start(MockConfig { speed: 250.0, fail_after_tokens: fails, ..quick(role, flavor) })
    };
    let engines = |role| (0..2).map(|at| engine(role, at)).collect::<Vec<_>>();
    (engines(Role::Prefill), engines(Role::Decode))
}

fn block_on<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

/// Runs requests while an engine dies; all of them have to be answered as if nothing had happened. Returns
/// how many streams were continued by another engine.
fn survive(flavor: Flavor, dies: Role, seeds: std::ops::Range<u64>) -> u64 {
    let expected = block_on(undisturbed());
    let mut continued = 0;
    for seed in each_seed(seeds) {
        block_on(async {
            let most = if dies == Role::Prefill {
                REQUESTS as u64 / 2
            } else {
                REQUESTS as u64 / 2 * u64::from(TOKENS)
            };
            let (prefill, decode) = cluster(flavor, dies, 1 + seed.wrapping_mul(0x9E37_79B9) % most);
            let front = front(
                &prefill.iter().collect::<Vec<_>>(),
                &decode.iter().collect::<Vec<_>>(),
                Limits::default(),
            );
            let ask = |at| {
                let (path, body) = body(at, at % 2 == 1);
                tokio::spawn(post(front.addr, path, body))
            };
            let asked: Vec<_> = (0..REQUESTS).map(ask).collect();
            for (at, asked) in asked.into_iter().enumerate() {
                let (status, _, text) = asked.await.unwrap();
                assert_eq!(status.as_u16(), 200, "{text}");
                assert_eq!(comparable(read(&text)), expected[at], "request {at}");
            }
            assert!(prefill.iter().chain(&decode).any(MockEngine::is_dead), "nothing died");
            assert_eq!(front.place.open(), 0);
            let figures = front.proxy.figures();
            assert_eq!((figures.done + figures.continued >= REQUESTS as u64, figures.broken), (true, 0));
            continued += figures.continued;
        });
    }
    continued
}

#[test]
fn no_request_fails_when_a_prefill_engine_of_vllm_dies() {
    survive(Flavor::Vllm, Role::Prefill, 0..100);
}

#[test]
fn no_request_fails_when_a_decode_engine_of_vllm_dies() {
    let continued = survive(Flavor::Vllm, Role::Decode, 0..100);
    assert!(continued > 0, "no stream was continued by another engine");
}

#[test]
fn no_request_fails_when_a_prefill_engine_of_sglang_dies() {
    survive(Flavor::Sglang, Role::Prefill, 0..100);
}

/// SGLang tells no token ids: an output that has begun ends with an error, and repeats nothing.
#[test]
fn an_output_whose_tokens_are_not_known_ends_with_an_error_when_its_engine_dies() {
    let expected = block_on(undisturbed());
    for seed in each_seed(0..20) {
        block_on(async {
            let (prefill, decode) = cluster(Flavor::Sglang, Role::Decode, 1 + seed % u64::from(TOKENS - 1));
            let front = front(
                &prefill.iter().collect::<Vec<_>>(),
                &decode.iter().collect::<Vec<_>>(),
                Limits::default(),
            );
            for (at, expected) in expected.iter().enumerate().take(2) {
                let (path, body) = body(at, at % 2 == 1);
                let (status, _, text) = post(front.addr, path, body).await;
                assert_eq!(status.as_u16(), 200, "{text}");
                let got = read(&text);
                assert!(expected.text.starts_with(&got.text), "{} is no beginning", got.text);
                assert_eq!(got.is_done, got.error.is_none(), "{text}");
                assert!(got.error.is_some() || got.text == expected.text);
            }
            assert_eq!(front.place.open(), 0);
        });
    }
}

#[test]
fn an_answer_in_one_piece_is_made_anew_when_its_engine_dies() {
    for seed in each_seed(0..20) {
        block_on(async {
            let (prefill, decode) = cluster(Flavor::Vllm, Role::Decode, 1 + seed % u64::from(TOKENS));
            let front = front(
                &prefill.iter().collect::<Vec<_>>(),
                &decode.iter().collect::<Vec<_>>(),
                Limits::default(),
            );
            let body = json!({"model": "mock", "prompt": "horses", "max_tokens": TOKENS}).to_string();
            let mut texts = Vec::new();
            for _ in 0..2 {
                let (status, _, text) = post(front.addr, "/v1/completions", body.clone()).await;
                assert_eq!(status.as_u16(), 200, "{text}");
                let answer: Value = serde_json::from_str(&text).unwrap();
                texts.push(answer["choices"][0]["text"].clone());
            }
            assert_eq!(texts[0], texts[1]);
            assert_eq!(front.place.open(), 0);
        });
    }
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_request_at_the_engine() {
    let engine = start(MockConfig { speed: 1.0, ..quick(Role::Both, Flavor::Vllm) });
    let front = front(&[], &[&engine], Limits::default());
    let pool = Pool::new(&front.addr.to_string()).unwrap();
    let body = json!({"model": "mock", "prompt": [300, 301], "max_tokens": 100_000, "stream": true});
    let (body, headers) = (Bytes::from(body.to_string()), HeaderMap::new());
    let message = Message { path: "/v1/completions", body: Some(&body), headers: &headers };
    let mut exchange = pool.send(message, Duration::from_secs(60)).await.unwrap();
    exchange.next().await.unwrap().unwrap();
    assert_eq!((engine.requests().1, front.place.open()), (1, 1));
    drop(exchange);
    while engine.requests().1 > 0 || front.place.open() > 0 {
        tokio::task::yield_now().await;
    }
    let ended: Vec<_> =
        front.place.reports().iter().filter(|(_, end)| *end == Progress::Failed).copied().collect();
    assert_eq!(ended.len(), 1);
}

#[tokio::test]
async fn without_a_living_engine_clients_are_told_to_come_back() {
    let engine = start(quick(Role::Both, Flavor::Vllm));
    let front = front(&[], &[&engine], Limits::default());
    engine.kill();
    let body = json!({"model": "mock", "prompt": [300], "stream": true}).to_string();
    let (status, headers, _) = post(front.addr, "/v1/completions", body).await;
    assert_eq!((status.as_u16(), headers["retry-after"].to_str().unwrap()), (503, "1"));
}
