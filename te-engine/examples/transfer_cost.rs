//! Latency and throughput of transfers on this host, per fabric:
//! `cargo run --release -p te-engine --example transfer_cost`.
//!
//! The target is another process, except for `local`. Latencies are those of one request at a time;
//! throughput is that of batches, compared with a plain copy.

use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use te_core::{Access, Op};
use te_engine::{Config, Engine, Fabrics, Populate, TransferEngine, TransferRequest, fabrics};

const REGION_BYTES: usize = 64 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    if let Some(fabric) = std::env::args().nth(1) {
        return serve(&fabric);
    }
    // Without RDMA, which not every host has.
    for entry in fabrics().iter().filter(|entry| entry.is_built() && entry.auto && entry.name != "rdma") {
        let (name, fabrics) = (entry.name, Fabrics::of(entry));
        let config = Config { fabrics, ..Config::default() };
        let (mut child, neighbour, segment_name) = if name == "local" {
            let neighbour = TransferEngine::start(config.clone())?;
            let _memory = neighbour.alloc_shared_with(REGION_BYTES, Access::all(), Populate::Now)?;
            let segment_name = neighbour.name().to_string();
            (None, Some(neighbour), segment_name)
        } else {
            let mut child = Command::new(std::env::current_exe()?)
                .arg(name)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()?;
            let mut line = String::new();
            BufReader::new(child.stdout.take().ok_or("no stdout")?).read_line(&mut line)?;
            (Some(child), None, line.trim().to_string())
        };
        polled(name, config.clone(), &segment_name)?;
        threaded(name, config, &segment_name)?;
        drop(neighbour);
        if let Some(child) = &mut child {
            child.kill()?;
            child.wait()?;
        }
    }
    Ok(())
}

/// This thread polls the engine.
fn polled(name: &str, config: Config, peer: &str) -> Result<(), Box<dyn Error>> {
    let mut engine = Engine::start(config)?;
    let local = engine.alloc_shared(REGION_BYTES, Access::LOCAL)?;
    let segment = engine.open_segment(peer)?;
    let remote_addr = engine.segment_regions(segment)?.first().ok_or("nothing exported")?.addr;
    for op in [Op::Read, Op::Write] {
        let one = TransferRequest { op, local: (local.id(), 0).into(), segment, remote_addr, len: 4096 };
        let mut nanos = Vec::new();
        for _ in 0..50_000 {
            let start = Instant::now();
            let batch = engine.submit(&[one], None)?;
            while !engine.is_done(batch)? {
                engine.poll();
            }
            nanos.push(start.elapsed().as_nanos());
            engine.wait(batch, None)?;
            engine.free(batch)?;
        }
        percentiles(&format!("{name:6} polled   {op:?} 4 KiB"), &mut nanos);
    }
    let mut copies = plain_copies();
    for (block, batch) in [(4096u64, 128usize), (1 << 20, 16)] {
        for op in [Op::Read, Op::Write] {
            let requests: Vec<_> = (0..batch as u64)
                .map(|i| TransferRequest {
                    op,
                    local: (local.id(), i * block).into(),
                    segment,
                    remote_addr: remote_addr + i * block,
                    len: block,
                })
                .collect();
            let mut rounds = |duration: Duration| -> Result<f64, Box<dyn Error>> {
                let (start, mut bytes) = (Instant::now(), 0);
                while start.elapsed() < duration {
                    let handle = engine.submit(&requests, None)?;
                    bytes += engine.wait(handle, None)?.bytes;
                    engine.free(handle)?;
                }
                Ok(bytes as f64 / start.elapsed().as_secs_f64() / 1e9)
            };
            // In turns, so that both see the same load of the host; the median leaves out disturbed rounds.
            let (mut ours, mut plain) = (Vec::new(), Vec::new());
            for _ in 0..9 {
                ours.push(rounds(Duration::from_millis(100))?);
                plain.push(copies(Duration::from_millis(100)));
            }
            let (ours, plain) = (median(&mut ours), median(&mut plain));
            let what = format!("{name:6} polled   {op:?} {:4} KiB x{batch}", block >> 10);
            println!("{what}: {ours:6.2} GB/s, {:.2} of memcpy's {plain:.2}", ours / plain);
        }
    }
    Ok(())
}

/// A worker polls the engine; this thread submits requests.
fn threaded(name: &str, config: Config, peer: &str) -> Result<(), Box<dyn Error>> {
    let engine = TransferEngine::start(config)?;
    let local = engine.alloc_shared(4096, Access::LOCAL)?;
    let segment = engine.open_segment(peer)?;
    let remote_addr = engine.segment_regions(segment)?.first().ok_or("nothing exported")?.addr;
    let one =
        TransferRequest { op: Op::Read, local: (local.id(), 0).into(), segment, remote_addr, len: 4096 };
    let mut nanos = Vec::new();
    for _ in 0..50_000 {
        let start = Instant::now();
        engine.submit(&[one], None)?.wait(None)?;
        nanos.push(start.elapsed().as_nanos());
    }
    percentiles(&format!("{name:6} threaded Read 4 KiB"), &mut nanos);
    Ok(())
}

fn serve(fabric: &str) -> Result<(), Box<dyn Error>> {
    let engine = TransferEngine::start(Config { fabrics: fabric.parse()?, ..Config::default() })?;
    let _memory = engine.alloc_shared_with(REGION_BYTES, Access::all(), Populate::Now)?;
    println!("{}", engine.name());
    std::io::stdout().flush()?;
    // Until the parent closes standard input.
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

fn percentiles(what: &str, nanos: &mut [u128]) {
    nanos.sort_unstable();
    let at = |percent: usize| nanos[nanos.len() * percent / 100] as f64 / 1e3;
    println!("{what}: p50 {:.2} µs, p99 {:.2} µs", at(50), at(99));
}

/// Copies 16 chunks of 1 MiB from one allocation to another, repeatedly; returns GB/s.
fn plain_copies() -> impl FnMut(Duration) -> f64 {
    let (from, mut to) = (vec![1u8; 16 << 20], vec![0u8; 16 << 20]);
    move |duration| {
        let (start, mut bytes) = (Instant::now(), 0usize);
        while start.elapsed() < duration {
            for (from, to) in from.chunks(1 << 20).zip(to.chunks_mut(1 << 20)) {
                to.copy_from_slice(std::hint::black_box(from));
                bytes += to.len();
            }
            std::hint::black_box(&mut to);
        }
        bytes as f64 / start.elapsed().as_secs_f64() / 1e9
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}
