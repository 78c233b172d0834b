//! Requests that go well, and those that are refused.

use std::time::Duration;

use conductor::mock::{Flavor, MockEngine, Role, detokenize, tokenize};
use conductor::proxy::{Limits, Progress, Refused};
use serde_json::{Value, json};

use crate::common::{front, post, quick, read, start};

/// A prefill and a decode engine of each kind, and engines that do both.
fn clusters() -> Vec<(&'static str, Vec<MockEngine>, Vec<MockEngine>)> {
    let pair = |flavor| (vec![start(quick(Role::Prefill, flavor))], vec![start(quick(Role::Decode, flavor))]);
    let (vllm, sglang) = (pair(Flavor::Vllm), pair(Flavor::Sglang));
    vec![
        ("vLLM", vllm.0, vllm.1),
        ("SGLang", sglang.0, sglang.1),
        ("both", vec![], vec![start(quick(Role::Both, Flavor::Vllm))]),
    ]
}

fn refs(engines: &[MockEngine]) -> Vec<&MockEngine> {
    engines.iter().collect()
}

#[tokio::test]
async fn an_answer_is_the_same_through_the_proxy_as_from_an_engine() {
    let alone = start(quick(Role::Both, Flavor::Vllm));
    for (name, prefill, decode) in clusters() {
        let front = front(&refs(&prefill), &refs(&decode), Limits::default());
        for stream in [false, true] {
            let text =
                json!({"model": "mock", "prompt": "tell me of horses", "max_tokens": 9, "stream": stream});
            let chat = json!({"model": "mock", "messages": [{"role": "user", "content": "hello baba"}],
                "max_tokens": 7, "stream": stream, "stream_options": {"include_usage": true}});
            for (path, body) in [("/v1/completions", text), ("/v1/chat/completions", chat)] {
                let (status, _, direct) = post(alone.http(), path, body.to_string()).await;
                let (status_proxied, headers, proxied) = post(front.addr, path, body.to_string()).await;
                assert_eq!((status.as_u16(), status_proxied.as_u16()), (200, 200), "{name} {proxied}");
                assert!(headers.contains_key("x-request-id"));
                if stream {
                    let (mut direct, proxied) = (read(&direct), read(&proxied));
                    direct.ids.clone_from(&proxied.ids);
                    assert_eq!(direct, proxied, "{name} {path}");
                    assert_eq!((proxied.finish.len(), proxied.is_done), (1, true));
                } else {
                    let mut answers =
                        [&direct, &proxied].map(|text| serde_json::from_str::<Value>(text).unwrap());
                    answers.iter_mut().for_each(|answer| answer["id"] = Value::Null);
                    assert_eq!(answers[0], answers[1], "{name} {path}");
                }
            }
        }
        assert_eq!(front.place.open(), 0, "{name}");
        let done = front.place.reports().iter().filter(|(_, progress)| *progress == Progress::Done).count();
        assert_eq!((done, front.proxy.figures().done), (4, 4), "{name}");
        // The prefill engines computed, and the decode engines did not.
        if let (Some(prefill), Some(decode)) = (prefill.first(), decode.first()) {
            assert!(prefill.prompt_tokens().0 > 0 && decode.prompt_tokens() == (0, 0), "{name}");
        }
    }
}

#[tokio::test]
async fn ids_are_placed_as_they_are_and_texts_by_the_tokenizer_of_an_engine() {
    let engine = start(quick(Role::Both, Flavor::Vllm));
    let front = front(&[], &[&engine], Limits::default());
    let prompt = detokenize(&[300, 301, 302]);
    for body in [
        json!({"model": "mock", "prompt": [300, 301, 302, 303]}),
        json!({"model": "mock", "prompt": prompt}),
        json!({"model": "mock", "prompt": prompt}),
        json!({"model": "mock", "prompt": [[300, 301]]}),
    ] {
        post(front.addr, "/v1/completions", body.to_string()).await;
    }
    assert_eq!(front.place.lengths(), [4, tokenize(&prompt).len(), 3, 2]);
}

#[tokio::test]
async fn token_ids_come_only_to_clients_that_asked_for_them() {
    let engine = start(quick(Role::Both, Flavor::Vllm));
    let front = front(&[], &[&engine], Limits::default());
    let ask = |more: Value| {
        let mut body = json!({"model": "mock", "prompt": "x", "max_tokens": 3, "stream": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        post(front.addr, "/v1/completions", body.to_string())
    };
    let (_, _, without) = ask(json!({})).await;
    assert_eq!(without.matches("\"token_ids\":null").count(), 3, "{without}");
    let (_, _, with) = ask(json!({"return_token_ids": true})).await;
    assert_eq!(with.matches("\"token_ids\":[").count(), 3, "{with}");
    // An output that could not be continued is not asked for them.
    let (_, _, tools) = ask(json!({"stop": ["x"]})).await;
    assert!(!tools.contains("token_ids"), "{tools}");
}

#[tokio::test]
async fn refusals_say_what_to_do() {
    let engine = start(quick(Role::Both, Flavor::Vllm));
    let front = front(&[], &[&engine], Limits::default());
    let body = json!({"model": "mock", "prompt": "x"}).to_string();
    let overloaded = Refused::Overloaded { retry_after: Duration::from_millis(2_300) };
    for (refused, status, retry) in
        [(overloaded, 429, Some("3")), (Refused::NoEngine, 503, Some("1")), (Refused::NoModel, 404, None)]
    {
        front.place.refuse(Some(refused));
        let (got, headers, text) = post(front.addr, "/v1/completions", body.clone()).await;
        assert_eq!(got.as_u16(), status);
        assert_eq!(headers.get("retry-after").map(|value| value.to_str().unwrap()), retry);
        let error: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(error["error"]["code"], status);
    }
    front.place.refuse(None);
    let figures = front.proxy.figures();
    assert_eq!((figures.overloaded, figures.unavailable, figures.wrong), (1, 1, 1));
    assert_eq!(front.place.open(), 0);
    // What the engine finds wrong is passed on, and no other engine is asked.
    let long = json!({"model": "mock", "prompt": [1, 2], "max_tokens": 200_000}).to_string();
    let (status, _, text) = post(front.addr, "/v1/completions", long).await;
    assert_eq!(status.as_u16(), 400);
    assert!(text.contains("mock_error"), "{text}");
    assert_eq!((front.proxy.figures().retries, front.place.open()), (0, 0));
}
