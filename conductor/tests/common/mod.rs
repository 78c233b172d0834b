//! A Conductor and publishers on loopback, and a client that can send anything.
#![allow(dead_code, reason = "each test file uses its part")]

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use conductor::{Conductor, ConductorHandle, Config, EngineConfig, Publisher};
use conductor_core::EngineHash;
use conductor_core::Tier;
use conductor_core::events::encode::{Layout, encode};
use conductor_core::events::{Event, Extra, Removed, Source, Stored};
use serde_json::{Value, json};

/// How long a test waits for what has to come before it fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// Tokens per block in tests.
pub(crate) const BLOCK_TOKENS: u32 = 4;

pub(crate) fn config() -> Config {
    let mut config = Config { listen: "127.0.0.1:0".parse().unwrap(), ..Config::default() };
    config.streams.reconnect_ms_min = 10;
    config.streams.reconnect_ms_max = 50;
    config.streams.replay_ms_max = 500;
    config.streams.lost_ms = 200;
    config
}

pub(crate) fn start(config: Config) -> ConductorHandle {
    Conductor::bind(config).unwrap().spawn().unwrap()
}

/// A publisher that keeps its last 100 messages.
pub(crate) fn publisher() -> Publisher {
    Publisher::start("127.0.0.1:0".parse().unwrap(), 0, 100).unwrap()
}

/// The entry of an engine with these events.
pub(crate) fn engine(name: &str, publisher: &Publisher) -> EngineConfig {
    EngineConfig {
        instance: name.into(),
        endpoint: publisher.endpoint(),
        replay_endpoint: publisher.replay_endpoint(),
        model: "m".into(),
        block_tokens: BLOCK_TOKENS,
        ..EngineConfig::default()
    }
}

/// `count` blocks of a prompt whose tokens are `from`, `from + 1`, …
pub(crate) fn tokens(from: u32, count: u32) -> Vec<u32> {
    (from..from + count * BLOCK_TOKENS).collect()
}

/// The engine's hashes of the blocks of such a prompt: any numbers do.
pub(crate) fn hashes(from: u32, count: u32) -> Vec<EngineHash> {
    (0..count).map(|at| EngineHash(0xe000_0000 + u64::from(from) * 1_000 + u64::from(at))).collect()
}

pub(crate) fn batch(events: &[Event<'_>], time: f64) -> Vec<u8> {
    let mut out = Vec::new();
    encode(Layout::VllmMaps, time, None, events, &mut out);
    out
}

/// A batch that stores the blocks `first..count` of the prompt that begins with the token `from`.
pub(crate) fn stored(from: u32, first: u32, count: u32) -> Vec<u8> {
    let (hashes, tokens) = (hashes(from, count), tokens(from, count));
    let first = first as usize;
    let event = Event::Stored(Stored {
        hashes: &hashes[first..],
        parent: first.checked_sub(1).map(|before| hashes[before]),
        tokens: &tokens[first * BLOCK_TOKENS as usize..],
        block_tokens: BLOCK_TOKENS,
        lora: None,
        salt: None,
        extra: Extra::default(),
        tier: Tier::Gpu,
        group: None,
        source: Source::default(),
    });
    batch(&[event], f64::from(from) + f64::from(first as u32) / 1_000.0)
}

/// A batch that removes the blocks from `first` on.
pub(crate) fn removed(from: u32, first: u32, count: u32) -> Vec<u8> {
    let hashes = hashes(from, count);
    let event = Event::Removed(Removed {
        hashes: &hashes[first as usize..],
        tier: Tier::Gpu,
        group: None,
        source: Source::default(),
    });
    batch(&[event], 0.5 + f64::from(from) + f64::from(first) / 1_000.0)
}

/// Waits until `done` is true.
pub(crate) fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(2)); // timing: between two looks at a state that has to come
    }
}

/// Status and body of an answer.
pub(crate) fn raw(addr: SocketAddr, request: &[u8]) -> (u16, String) {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(request).unwrap();
    let mut text = Vec::new();
    // A refusal may close the connection before all of a long request was read.
    let _ = stream.read_to_end(&mut text);
    let text = String::from_utf8_lossy(&text).into_owned();
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_default();
    (status, text.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default())
}

pub(crate) fn send(addr: SocketAddr, method: &str, path: &str, body: &str) -> (u16, String) {
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    raw(addr, request.as_bytes())
}

pub(crate) fn post(addr: SocketAddr, path: &str, body: &Value) -> (u16, Value) {
    let (status, text) = send(addr, "POST", path, &body.to_string());
    (status, serde_json::from_str(&text).unwrap_or(Value::Null))
}

pub(crate) fn get(addr: SocketAddr, path: &str) -> (u16, Value) {
    let (status, text) = send(addr, "GET", path, "");
    (status, serde_json::from_str(&text).unwrap_or(Value::Null))
}

/// The body of an answer, as bytes.
pub(crate) fn bytes(addr: SocketAddr, path: &str) -> Vec<u8> {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
    let head = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap();
    answer.split_off(head + 4)
}

/// What looks like another Conductor: `/digest` has one answer, everything else another one.
pub(crate) struct Liar {
    addr: SocketAddr,
    asked: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
}

impl Liar {
    pub(crate) fn start(digest: String, lie: Vec<u8>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let (asked, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, stopped) = (Arc::clone(&asked), Arc::clone(&stop));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                let Ok(mut stream) = stream else { continue };
                let mut request = [0; 4096];
                let len = stream.read(&mut request).unwrap_or_default();
                let is_digest = request[..len].starts_with(b"GET /digest");
                let body = if is_digest { digest.as_bytes() } else { &lie };
                let head =
                    format!("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
                let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
                count.fetch_add(u64::from(!is_digest), Ordering::Relaxed);
            }
        });
        Self { addr, asked, stop }
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// How often something else than the digest was asked for.
    pub(crate) fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }
}

impl Drop for Liar {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.addr);
    }
}

/// Tokens of the prompt that an instance has, by `/query`.
pub(crate) fn matched(addr: SocketAddr, instance: &str, from: u32, count: u32) -> u64 {
    let body = json!({"model": "m", "block_size": BLOCK_TOKENS, "token_ids": tokens(from, count)});
    let (status, answer) = post(addr, "/query", &body);
    assert_eq!(status, 200, "{answer}");
    answer["default"][instance]["longest_matched"].as_u64().unwrap_or_default()
}

/// The value of a metric without labels, or with exactly these.
pub(crate) fn metric(addr: SocketAddr, name: &str) -> f64 {
    let (_, text) = send(addr, "GET", "/metrics", "");
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|value| value.trim().parse().ok()).unwrap_or(f64::NAN)
}
