//! How long the Conductor takes from its start to the first right answer, with everything that it knew in its
//! snapshot (figure 13 of the reference: 2.28 million blocks, at most 2 seconds).
//!
//! ```text
//! cargo run --release -p benches --example conductor_restart -- [--blocks N] [--engines N] [--json]
//! ```
//!
//! The whole server: engines publish over ZMTP on loopback and keep as many messages as vLLM does, the
//! Conductor stops (which writes the snapshot), and starts anew. It answers a prompt of an engine once the
//! engine's replay has shown that it is the same run. Then the same without the snapshot, from the engines'
//! replays, while queries are answered. Each row is the median of the runs.
#![allow(clippy::print_stdout, reason = "prints its result")]
#![allow(clippy::unwrap_used, reason = "a figure that cannot be measured reports the line")]

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use conductor::{Conductor, ConductorHandle, Config, EngineConfig, Publisher};
use conductor_core::events::encode::{Layout, encode};
use conductor_core::events::{Event, Extra, Source, Stored};
use conductor_core::{EngineHash, Tier};
use te_core::testkit::Rng;

const RUNS: usize = 5;
const BLOCK_TOKENS: u32 = 16;
/// Blocks of a prompt.
const PROMPT_BLOCKS: usize = 860;
const MESSAGE_BLOCKS: usize = 64;
/// Messages that an engine keeps, as vLLM does.
const KEPT: usize = 10_000;
const PATIENCE: Duration = Duration::from_secs(300);

/// An engine: its publisher, and the tokens of its last prompt with all blocks.
struct Engine {
    publisher: Publisher,
    last: Vec<u32>,
    blocks: usize,
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |name: &str, default: usize| {
        let at = args.iter().position(|arg| arg == name);
        at.map_or(default, |at| args[at + 1].parse().unwrap())
    };
    let (blocks, engines) = (number("--blocks", 2_280_000), number("--engines", 64).max(1));
    let dir = std::env::temp_dir().join(format!("snowskin-restart-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join("index");
    let mut rows = measure(blocks, engines, &path);
    std::fs::remove_dir_all(&dir).unwrap();
    for (_, values, _) in &mut rows {
        values.sort_by(f64::total_cmp);
    }
    let name = |what: &str| format!("{:.2} M blocks of {engines} engines: {what}", blocks as f64 / 1e6);
    if args.iter().any(|arg| arg == "--json") {
        let rows = rows.iter().map(|(what, values, unit)| {
            let (name, value) = (name(what), values[values.len() / 2]);
            format!("{{\"name\":\"{name}\",\"value\":{value:.4},\"unit\":\"{unit}\"}}")
        });
        println!("[{}]", rows.collect::<Vec<_>>().join(","));
    } else {
        for (what, values, unit) in &rows {
            let (median, first, last) = (values[values.len() / 2], values[0], values[values.len() - 1]);
            println!("{:<72}{median:>10.1} {unit} ({first:.1} to {last:.1})", name(what));
        }
    }
}

type Row = (&'static str, Vec<f64>, &'static str);

fn measure(blocks: usize, engines: usize, path: &Path) -> Vec<Row> {
    let per_engine = blocks.div_ceil(engines);
    let mut engines: Vec<Engine> = (0..engines).map(|_| started()).collect();
    let settings = settings(&engines, Some(path));
    let (conductor, _) = start(&settings);
    // A subscription that comes late is no loss: replays have everything.
    let began = Instant::now();
    for (at, engine) in engines.iter_mut().enumerate() {
        publish(engine, at as u64, per_engine);
    }
    until_all_answer(conductor.addr(), &engines);
    let ingest = began.elapsed();
    let began = Instant::now();
    conductor.stop();
    let stop = began.elapsed();
    let bytes = std::fs::metadata(path).unwrap().len();
    let (mut read, mut first, mut all) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..RUNS {
        let began = Instant::now();
        let (conductor, bound) = start(&settings);
        let addr = conductor.addr();
        while matched(addr, 0, &engines[0]) != whole(&engines[0]) {}
        first.push(ms(began.elapsed()));
        until_all_answer(addr, &engines);
        all.push(ms(began.elapsed()));
        read.push(ms(bound));
        conductor.stop();
    }
    let without = Config { snapshot: None, ..settings };
    let (mut replayed, mut p50, mut p99) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..RUNS {
        let began = Instant::now();
        let (conductor, _) = start(&without);
        let mut times = until_all_answer(conductor.addr(), &engines);
        replayed.push(ms(began.elapsed()));
        times.sort_by(f64::total_cmp);
        p50.push(times[times.len() / 2]);
        p99.push(times[times.len() * 99 / 100]);
        conductor.stop();
    }
    vec![
        ("everything published and found", vec![ms(ingest)], "ms"),
        ("stop, with a snapshot", vec![ms(stop)], "ms"),
        ("size of the snapshot", vec![bytes as f64 / 1e6], "MB"),
        ("restart: snapshot read", read, "ms"),
        ("restart: first right answer", first, "ms"),
        ("restart: right answers for every engine", all, "ms"),
        ("without a snapshot, from replays: right answers for every engine", replayed, "ms"),
        ("without a snapshot: queries meanwhile, p50", p50, "ms"),
        ("without a snapshot: queries meanwhile, p99", p99, "ms"),
    ]
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn started() -> Engine {
    let publisher = Publisher::start("127.0.0.1:0".parse().unwrap(), 0, KEPT).unwrap();
    Engine { publisher, last: Vec::new(), blocks: 0 }
}

fn settings(engines: &[Engine], path: Option<&Path>) -> Config {
    let engine = |(at, engine): (usize, &Engine)| EngineConfig {
        instance: at.to_string(),
        endpoint: engine.publisher.endpoint(),
        replay_endpoint: engine.publisher.replay_endpoint(),
        model: "m".into(),
        block_tokens: BLOCK_TOKENS,
        ..EngineConfig::default()
    };
    Config {
        listen: "127.0.0.1:0".parse().unwrap(),
        engines: engines.iter().enumerate().map(engine).collect(),
        snapshot: path.map(Into::into),
        snapshot_s: 3_600,
        ..Config::default()
    }
}

/// A running Conductor, and how long it took to read the snapshot.
fn start(settings: &Config) -> (ConductorHandle, Duration) {
    let began = Instant::now();
    let bound = Conductor::bind(settings.clone()).unwrap();
    let read = began.elapsed();
    (bound.spawn().unwrap(), read)
}

/// Publishes prompts with so many blocks together.
fn publish(engine: &mut Engine, seed: u64, blocks: usize) {
    let mut rng = Rng::new(seed);
    while engine.blocks < blocks {
        let count = PROMPT_BLOCKS.min(blocks - engine.blocks);
        let tokens: Vec<u32> =
            (0..count * BLOCK_TOKENS as usize).map(|_| rng.below(150_000) as u32).collect();
        let mut parent = None;
        for piece in tokens.chunks(MESSAGE_BLOCKS * BLOCK_TOKENS as usize) {
            let hashes: Vec<_> =
                (0..piece.len() / BLOCK_TOKENS as usize).map(|_| EngineHash(rng.next())).collect();
            let stored = Event::Stored(Stored {
                hashes: &hashes,
                parent,
                tokens: piece,
                block_tokens: BLOCK_TOKENS,
                lora: None,
                salt: None,
                extra: Extra::default(),
                tier: Tier::Gpu,
                group: None,
                source: Source::default(),
            });
            parent = hashes.last().copied();
            let mut payload = Vec::new();
            encode(Layout::VllmMaps, (rng.next() >> 12) as f64, None, &[stored], &mut payload);
            engine.publisher.publish(&payload).unwrap();
        }
        engine.blocks += count;
        engine.last = tokens;
    }
}

fn whole(engine: &Engine) -> u64 {
    engine.last.len() as u64
}

/// Asks until all have everything; returns how long each query took, milliseconds.
fn until_all_answer(addr: SocketAddr, engines: &[Engine]) -> Vec<f64> {
    let (began, mut times) = (Instant::now(), Vec::new());
    for (at, engine) in engines.iter().enumerate() {
        loop {
            let asked = Instant::now();
            let found = matched(addr, at, engine);
            times.push(ms(asked.elapsed()));
            if found == whole(engine) {
                break;
            }
            assert!(began.elapsed() < PATIENCE, "engine {at}: its last prompt is not found");
            // Room for what is measured, on machines with few cores.
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    times
}

/// Tokens of the last prompt of an engine that it has, by `POST /query` on a connection of its own.
fn matched(addr: SocketAddr, at: usize, engine: &Engine) -> u64 {
    let tokens: Vec<String> = engine.last.iter().map(u32::to_string).collect();
    let body = format!(
        "{{\"model\":\"m\",\"block_size\":{BLOCK_TOKENS},\"instance_id\":\"{at}\",\"token_ids\":[{}]}}",
        tokens.join(",")
    );
    let head = format!(
        "POST /query HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let found = answer.split_once("\"longest_matched\":").map(|(_, rest)| rest);
    let digits = found.map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next().unwrap());
    digits.map_or(0, |digits| digits.parse().unwrap())
}
