//! The proxy with the Conductor itself behind it.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use conductor::demo::{Cluster, Demo, Ran};
use conductor::mock::{Flavor, MockConfig, Role, Workload, tokenize};
use conductor::{Conductor, ConductorHandle, Config, EngineConfig, PolicyName};

use crate::common::{post, quick, start};

/// At this speed, what engines compute takes longer than what the machine does for it, so that placement is
/// about the engines.
const SPEED: f64 = 20.0;

fn demo(flavor: Flavor, policy: PolicyName) -> Demo {
    Demo {
        prefill: 3,
        decode: 2,
        engine: MockConfig { flavor, speed: SPEED, ..MockConfig::default() },
        policy,
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
    }
}

fn workload() -> Workload {
    Workload {
        // With a multiple of the prefill engines, turns that are placed in turn return to where they were.
        conversations: 7,
        system_tokens: 512,
        user_tokens: 128,
        output_tokens: 16,
        ..Workload::default()
    }
}

/// Runs a workload until the proxy has answered `requests`.
fn run(cluster: &Cluster, requests: u64) -> Ran {
    let wait = || {
        while cluster.figures().done < requests {
            std::thread::yield_now();
        }
    };
    cluster.run(workload(), wait).unwrap()
}

#[test]
fn the_conductor_places_turns_of_a_conversation_where_the_earlier_ones_are() {
    for flavor in [Flavor::Vllm, Flavor::VllmArrays, Flavor::Sglang] {
        let rates = [PolicyName::Cost, PolicyName::RoundRobin].map(|policy| {
            let cluster = Cluster::start(&demo(flavor, policy)).unwrap();
            let ran = run(&cluster, 80);
            assert_eq!((ran.seen.failed, ran.seen.refused), (0, 0), "{:?}", ran.seen.last_failure);
            // Prefill engines of all kinds leave the answer to the others.
            for (engine, requests) in cluster.engines().iter().zip(&ran.requests).take(3) {
                assert!(engine.output_tokens() <= *requests, "{flavor:?}");
            }
            ran.hit_rate
        });
        assert!(rates[0] > rates[1], "{flavor:?}: {rates:?}");
    }
}

#[test]
fn no_request_fails_when_engines_of_the_conductor_die() {
    let cluster = Cluster::start(&demo(Flavor::Vllm, PolicyName::Cost)).unwrap();
    let wait = || {
        for (dies, after) in [(0, 20), (3, 60)] {
            while cluster.figures().done < after {
                std::thread::yield_now();
            }
            cluster.engines()[dies].kill();
        }
        while cluster.figures().done < 120 {
            std::thread::yield_now();
        }
    };
    let ran = cluster.run(workload(), wait).unwrap();
    assert_eq!((ran.seen.failed, ran.seen.refused), (0, 0), "{:?}", ran.seen.last_failure);
    assert!(cluster.figures().retries > 0);
}

/// An engine that answers what it is told for a path, and how often it was asked.
fn engine_that(
    answer: impl Fn(&str) -> (&'static str, String) + Send + 'static,
) -> (SocketAddr, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (addr, asked) = (listener.local_addr().unwrap(), Arc::<AtomicU64>::default());
    let counted = Arc::clone(&asked);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut reader = BufReader::new(stream.unwrap());
            let (mut first, mut line, mut length) = (String::new(), String::new(), 0);
            reader.read_line(&mut first).unwrap();
            while reader.read_line(&mut line).unwrap() > 2 {
                let value = line.to_ascii_lowercase();
                length =
                    value.strip_prefix("content-length: ").map_or(length, |it| it.trim().parse().unwrap());
                line.clear();
            }
            reader.read_exact(&mut vec![0; length]).unwrap();
            counted.fetch_add(1, Ordering::Relaxed);
            let (status, body) = answer(first.split(' ').nth(1).unwrap_or_default());
            let length = body.len();
            let head = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n");
            // The client may have gone.
            let _ = reader.get_mut().write_all((head + &body).as_bytes());
        }
    });
    (addr, asked)
}

fn entry(name: &str, http: SocketAddr) -> EngineConfig {
    EngineConfig {
        instance: name.into(),
        model: "mock".into(),
        http: http.to_string(),
        ..EngineConfig::default()
    }
}

/// A Conductor with a proxy in front of engines that publish nothing.
fn conductor(engines: Vec<EngineConfig>) -> ConductorHandle {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let config = Config { listen: any, proxy_listen: Some(any), engines, ..Config::default() };
    Conductor::bind(config).unwrap().spawn().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_never_goes_back_to_the_engine_that_failed_the_request() {
    let (busy, asked) = engine_that(|_| ("503 Busy", "{}".into()));
    let good = start(quick(Role::Both, Flavor::Vllm));
    // Of equals the first one is chosen, and it is never suspected: it answers.
    let conductor = conductor(vec![entry("busy", busy), entry("good", good.http())]);
    let proxy = conductor.proxy_addr().unwrap();
    for request in 1..=20 {
        let body = r#"{"model":"mock","prompt":[1,2,3],"max_tokens":3}"#;
        let (status, _, text) = post(proxy, "/v1/completions", body).await;
        assert_eq!(status.as_u16(), 200, "{text}");
        assert!(asked.load(Ordering::Relaxed) <= request, "it was asked again");
    }
    let figures = conductor.proxy_figures().unwrap();
    assert_eq!((figures.requests, figures.done, figures.in_flight, figures.left), (20, 20, 0, 0));
    assert_eq!(
        (figures.retries, figures.prompt_tokens, figures.output_tokens),
        (asked.load(Ordering::Relaxed), 60, 60)
    );
    assert!(figures.retries > 0, "the busy one was never chosen");
    tokio::task::block_in_place(|| conductor.stop());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_is_placed_by_the_tokens_that_an_engine_tells_and_without_them_otherwise() {
    const TEXT: &str = "tell me of horses and donkeys";
    let ask = serde_json::json!({"model": "mock", "prompt": TEXT, "max_tokens": 2}).to_string();
    let tells = async |http: SocketAddr| {
        let conductor = conductor(vec![entry("it", http)]);
        let (status, _, text) = post(conductor.proxy_addr().unwrap(), "/v1/completions", ask.clone()).await;
        assert_eq!(status.as_u16(), 200, "whatever becomes of its tokens: {text}");
        let (placed, _, why) = post(conductor.addr(), "/schedule", ask.clone()).await;
        let figures = conductor.proxy_figures().unwrap();
        assert_eq!((figures.done, figures.output_tokens), (1, 2), "{text}");
        tokio::task::block_in_place(|| conductor.stop());
        (figures.prompt_tokens, placed.as_u16(), why)
    };
    let good = start(quick(Role::Both, Flavor::Vllm));
    let (tokens, placed, why) = tells(good.http()).await;
    assert_eq!((tokens, placed), (tokenize(TEXT).len() as u64, 200), "{why}");

    let deep = "[".repeat(100_000);
    for (status, answer) in [
        ("404 Not Found", "{}"),
        ("500 Error", "{\"tokens\":[1]}"),
        ("200 OK", ""),
        ("200 OK", "{"),
        ("200 OK", "[1,2]"),
        ("200 OK", "{\"count\":2}"),
        ("200 OK", "{\"tokens\":\"x\"}"),
        ("200 OK", "{\"tokens\":[-1]}"),
        ("200 OK", "{\"tokens\":[1.5]}"),
        ("200 OK", "{\"tokens\":[99999999999]}"),
        ("200 OK", deep.as_str()),
    ] {
        let whole = r#"{"choices":[{"index":0,"text":"x"}],"usage":{"completion_tokens":2}}"#;
        let garbage = answer.to_owned();
        let (engine, _) = engine_that(move |path| match path {
            "/tokenize" => (status, garbage.clone()),
            _ => ("200 OK", whole.to_owned()),
        });
        let (tokens, placed, why) = tells(engine).await;
        assert_eq!((tokens, placed), (0, 502), "{status} {answer:.40}: {why}");
        assert!(why.contains("/tokenize"), "{why}");
    }
}
