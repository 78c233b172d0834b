//! `snowskin conductor replay`: how fast a Conductor reads events and answers, over real sockets.
//!
//! ```text
//!   publishers (this process) ── ZMTP on loopback ──▶ `snowskin conductor serve` (a child) ◀── HTTP ── queries
//!                                                      its CPU time is read from outside
//! ```

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use conductor::Publisher;
use conductor_core::events::encode::{Layout, encode};
use conductor_core::events::{Event, Extra, Source, Stored};
use conductor_core::{EngineHash, Tier};
use serde::Serialize;
use serde_json::{Value, json};

use super::client::Client;
use crate::exit::{EXIT_CODES, Exit, Failure};
use crate::histogram::Histogram;
use crate::output::{figure, print, print_json, rounded};
use crate::{Outcome, sys};

const AFTER_HELP: &str = "Examples:
  snowskin conductor replay                                 64 blocks per message, as while prompts are computed
  snowskin conductor replay --blocks-per-message 4          as while tokens are generated
  snowskin conductor replay --frames captured.hex           payloads of an engine, one per line, in hexadecimal";

/// Longest wait for the Conductor.
const PATIENCE: Duration = Duration::from_secs(120);
/// Messages that publishers keep for replays.
const HISTORY: usize = 10_000;

/// Measure how fast a Conductor reads events and answers queries
///
/// Starts a Conductor as a process of its own, publishes events to it over ZeroMQ's protocol on loopback, and
/// measures blocks per second until they are visible, blocks per second of its CPU time, the latency of
/// queries by 12,032 token ids and by 752 hashes, and its CPU use while nothing happens.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("{AFTER_HELP}\n\n{EXIT_CODES}"))]
pub(crate) struct Args {
    /// Publishers.
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    publishers: u32,
    /// Blocks of all publishers together.
    #[arg(long, default_value_t = 1_280_000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    blocks: u32,
    /// Blocks per message.
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    blocks_per_message: u32,
    /// Blocks per prompt.
    #[arg(long, default_value_t = 752, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    blocks_per_prompt: u32,
    /// Queries of each kind.
    #[arg(long, default_value_t = 1_000, value_name = "N")]
    queries: u32,
    /// How long the idle Conductor is watched, seconds; 0: not.
    #[arg(long, default_value_t = 5, value_name = "S")]
    idle_s: u32,
    /// Publish these payloads, each a line in hexadecimal, instead of made-up blocks.
    #[arg(long, value_name = "FILE")]
    frames: Option<PathBuf>,
    /// Print the figures as JSON.
    #[arg(long)]
    json: bool,
}

/// Tokens per block of what is made up.
const BLOCK_TOKENS: u32 = 16;

/// What was measured.
#[derive(Debug, Serialize)]
struct Figures {
    blocks: u64,
    messages: u64,
    bytes: u64,
    visible_s: f64,
    blocks_per_s: f64,
    cpu_s: f64,
    blocks_per_cpu_s: f64,
    query_us: Option<Latency>,
    query_by_hash_us: Option<Latency>,
    health_us: Option<Latency>,
    idle_cpu_share: Option<f64>,
}

/// Microseconds.
#[derive(Debug, Serialize)]
struct Latency {
    p50: f64,
    p99: f64,
}

pub(crate) fn run(args: &Args) -> Outcome {
    sys::lift_file_limit();
    let messages = match &args.frames {
        Some(path) => frames(path)?,
        None => made_up(args),
    };
    let mut child = Serving::start()?;
    let mut client = Client::connect(&child.http, PATIENCE)?;
    let publishers = publishers(args, &mut client)?;
    let figures = measure(args, &mut child, &mut client, &publishers, &messages)?;
    if args.json {
        print_json(&figures)?;
    } else {
        print(&text(&figures))?;
    }
    Ok(Exit::Ok)
}

/// A Conductor in a process of its own. Dropping it ends it.
struct Serving {
    child: Child,
    http: String,
}

impl Serving {
    fn start() -> anyhow::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["conductor", "serve", "--listen", "127.0.0.1:0", "--json"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        sys::die_with_parent(&mut command);
        let mut child = command.spawn().context("cannot start `snowskin conductor serve`")?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("no output")?).read_line(&mut line)?;
        let ready: Value = serde_json::from_str(&line).context("the Conductor did not start")?;
        let http = ready["http"].as_str().context("the Conductor named no address")?.to_owned();
        Ok(Self { child, http })
    }

    fn cpu(&self) -> Duration {
        sys::process_cpu(self.child.id()).unwrap_or_default()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        sys::terminate(self.child.id());
        let _ = self.child.wait();
    }
}

/// Starts publishers, and registers them.
fn publishers(args: &Args, client: &mut Client) -> anyhow::Result<Vec<Publisher>> {
    let mut all = Vec::new();
    for number in 0..args.publishers {
        let publisher = Publisher::start(([127, 0, 0, 1], 0).into(), 0, HISTORY)?;
        let body = json!({
            "endpoint": publisher.endpoint(), "replay_endpoint": publisher.replay_endpoint(), "type": "vLLM",
            "modelname": "m", "instance_id": format!("engine-{number}"), "block_size": BLOCK_TOKENS,
        });
        let (status, answer) = client.send("POST", "/register", body.to_string().as_bytes())?;
        if status != 200 {
            let why = String::from_utf8_lossy(&answer).into_owned();
            return Err(Failure::failed(format!("the Conductor refuses a publisher: {why}")).into());
        }
        all.push(publisher);
    }
    wait("the Conductor does not subscribe", || Ok(all.iter().all(|publisher| publisher.subscribers() > 0)))?;
    Ok(all)
}

fn measure(
    args: &Args,
    child: &mut Serving,
    client: &mut Client,
    publishers: &[Publisher],
    messages: &[Vec<Vec<u8>>],
) -> anyhow::Result<Figures> {
    let (began, cpu) = (Instant::now(), child.cpu());
    std::thread::scope(|scope| {
        for (publisher, messages) in publishers.iter().zip(messages) {
            scope.spawn(move || messages.iter().try_for_each(|payload| publisher.publish(payload)));
        }
    });
    let total: u64 = messages.iter().map(|each| each.len() as u64).sum();
    wait("the Conductor does not read everything", || Ok(applied(client)? >= total))?;
    let (visible, cpu) = (began.elapsed(), child.cpu().saturating_sub(cpu));
    let blocks = stored(client)?;
    let tokens: Vec<u32> = (0..args.blocks_per_prompt).flat_map(|block| tokens_of(0, block)).collect();
    let by_tokens = json!({"model": "m", "block_size": BLOCK_TOKENS, "token_ids": tokens}).to_string();
    let hashes: Vec<u64> = (0..args.blocks_per_prompt).map(|block| hash_of(0, block).0).collect();
    let by_hash = json!({"model": "m", "block_size": BLOCK_TOKENS, "seq_hashes": hashes}).to_string();
    let made_up = args.frames.is_none() && args.queries > 0;
    let query_us = made_up.then(|| latency(args, client, "POST", "/query", &by_tokens)).transpose()?;
    let query_by_hash_us =
        made_up.then(|| latency(args, client, "POST", "/query_by_hash", &by_hash)).transpose()?;
    let health_us = made_up.then(|| latency(args, client, "GET", "/openapi.json", "")).transpose()?;
    let idle_cpu_share = (args.idle_s > 0).then(|| {
        let (began, cpu) = (Instant::now(), child.cpu());
        std::thread::sleep(Duration::from_secs(args.idle_s.into()));
        child.cpu().saturating_sub(cpu).as_secs_f64() / began.elapsed().as_secs_f64()
    });
    let bytes = messages.iter().flatten().map(|payload| payload.len() as u64).sum();
    Ok(Figures {
        blocks,
        messages: total,
        bytes,
        visible_s: rounded(visible.as_secs_f64()),
        blocks_per_s: rounded(blocks as f64 / visible.as_secs_f64()),
        cpu_s: rounded(cpu.as_secs_f64()),
        blocks_per_cpu_s: rounded(blocks as f64 / cpu.as_secs_f64().max(1e-9)),
        query_us,
        query_by_hash_us,
        health_us,
        idle_cpu_share: idle_cpu_share.map(rounded),
    })
}

fn latency(
    args: &Args,
    client: &mut Client,
    method: &str,
    path: &str,
    body: &str,
) -> anyhow::Result<Latency> {
    let mut histogram = Histogram::new();
    for _ in 0..args.queries {
        let began = Instant::now();
        let (status, answer) = client.send(method, path, body.as_bytes())?;
        histogram.record(began.elapsed());
        anyhow::ensure!(status == 200, "{path} answers {status}: {}", String::from_utf8_lossy(&answer));
    }
    let us = |q: f64| rounded(histogram.quantile_us(q));
    Ok(Latency { p50: us(0.5), p99: us(0.99) })
}

/// Messages that the Conductor has applied.
fn applied(client: &mut Client) -> anyhow::Result<u64> {
    let (_, answer) = client.send("GET", "/services", b"")?;
    let answer: Value = serde_json::from_slice(&answer)?;
    let services = answer["services"].as_array().into_iter().flatten();
    Ok(services.filter_map(|service| service["applied"].as_u64()).sum())
}

/// Blocks of all owners.
fn stored(client: &mut Client) -> anyhow::Result<u64> {
    let (_, answer) = client.send("GET", "/digest", b"")?;
    let answer: Value = serde_json::from_slice(&answer)?;
    let digests = answer["digests"].as_array().into_iter().flatten();
    Ok(digests.filter_map(|digest| digest["blocks"].as_u64()).sum())
}

fn wait(what: &str, mut done: impl FnMut() -> anyhow::Result<bool>) -> anyhow::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !done()? {
        anyhow::ensure!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Payloads of a file; all of one publisher.
fn frames(path: &Path) -> anyhow::Result<Vec<Vec<Vec<u8>>>> {
    let wrong = |why: String| Failure::usage(format!("--frames {}: {why}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let payloads = lines
        .map(|(at, line)| hex(line.trim()).ok_or_else(|| wrong(format!("line {}: not hexadecimal", at + 1))));
    Ok(vec![payloads.collect::<Result<_, _>>()?])
}

fn hex(text: &str) -> Option<Vec<u8>> {
    let bytes = text.as_bytes();
    bytes.len().is_multiple_of(2).then_some(())?;
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let byte = |pair: &[u8]| u8::try_from(digit(pair[0])? * 16 + digit(pair[1])?).ok();
    bytes.chunks_exact(2).map(byte).collect()
}

/// Tokens of a block of a prompt.
fn tokens_of(prompt: u32, block: u32) -> impl Iterator<Item = u32> {
    let first = prompt.wrapping_mul(2_654_435_761).wrapping_add(block * BLOCK_TOKENS);
    (0..BLOCK_TOKENS).map(move |at| first.wrapping_add(at) % 128_000)
}

/// The engine's hash of a block of a prompt.
fn hash_of(prompt: u32, block: u32) -> EngineHash {
    EngineHash((u64::from(prompt) << 32 | u64::from(block)).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// Messages of made-up prompts: per publisher the same number, every prompt on one publisher.
fn made_up(args: &Args) -> Vec<Vec<Vec<u8>>> {
    let per_publisher = args.blocks.div_ceil(args.publishers);
    let mut all = Vec::new();
    for publisher in 0..args.publishers {
        let (mut messages, mut left, mut prompt) = (Vec::new(), per_publisher, publisher);
        while left > 0 {
            let blocks = left.min(args.blocks_per_prompt);
            left -= blocks;
            for first in (0..blocks).step_by(args.blocks_per_message as usize) {
                let end = (first + args.blocks_per_message).min(blocks);
                messages.push(message(prompt, first, end));
            }
            prompt += args.publishers;
        }
        all.push(messages);
    }
    all
}

fn message(prompt: u32, first: u32, end: u32) -> Vec<u8> {
    let hashes: Vec<EngineHash> = (first..end).map(|block| hash_of(prompt, block)).collect();
    let tokens: Vec<u32> = (first..end).flat_map(|block| tokens_of(prompt, block)).collect();
    let stored = Event::Stored(Stored {
        hashes: &hashes,
        parent: first.checked_sub(1).map(|before| hash_of(prompt, before)),
        tokens: &tokens,
        block_tokens: BLOCK_TOKENS,
        lora: None,
        salt: None,
        extra: Extra::default(),
        tier: Tier::Gpu,
        group: None,
        source: Source::default(),
    });
    let mut out = Vec::new();
    encode(Layout::VllmMaps, f64::from(prompt) + f64::from(first) / 1e6, None, &[stored], &mut out);
    out
}

fn text(figures: &Figures) -> String {
    let mut out = format!(
        "{} blocks in {} messages, {} MiB, visible after {} s\n  {} M blocks/s, {} M blocks per second of CPU time\n",
        figures.blocks,
        figures.messages,
        figures.bytes >> 20,
        figure(figures.visible_s),
        figure(figures.blocks_per_s / 1e6),
        figure(figures.blocks_per_cpu_s / 1e6),
    );
    let kinds = [
        ("POST /query", &figures.query_us),
        ("POST /query_by_hash", &figures.query_by_hash_us),
        ("GET /openapi.json (floor of the client)", &figures.health_us),
    ];
    for (name, latency) in kinds {
        if let Some(Latency { p50, p99 }) = latency {
            out += &format!("  {name}: p50 {} µs, p99 {} µs\n", figure(*p50), figure(*p99));
        }
    }
    if let Some(share) = figures.idle_cpu_share {
        out += &format!("  idle: {} % of a core\n", figure(100.0 * share));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn captured_payloads_are_lines_in_hexadecimal() {
        assert_eq!(hex("00fF"), Some(vec![0, 255]));
        assert_eq!((hex("0"), hex("0g"), hex("é0")), (None, None, None));
    }
}
