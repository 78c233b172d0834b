//! Measures the transport between two processes on this machine: GB/s, latency, CPU seconds per GiB (both
//! processes together).
//!
//! `cargo run --release -p te-tcp --example loopback -- [--op read,write] [--slice 4096,1048576] [--batch
//! 1,128] [--seconds 2] [--connections 1] [--checksum] [--congestion cubic] [--spins 20] [--uring]`
//!
//! The target is this program, started once more. Both processes park when they have nothing to do.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant as Clock};

use te_core::{
    Access, Completion, Instant, MemSpan, Memory, Op, RegionId, RegionOffset, RemoteOffset, RemoteRegionId,
    Slice, Token, Transport,
};
use te_tcp::{Config, TcpTransport};

const REGION: RegionId = RegionId::new(0, 1);
const REMOTE: RemoteRegionId = RemoteRegionId::new(0, 1);
/// Bytes of registered memory on each side; slices use its parts in turn.
const MEMORY_BYTES: usize = 64 << 20;
/// Idle polls before parking. More polls lower the latency when each process has a core to itself, and raise
/// it when not.
const SPINS: u32 = 20;

struct Options {
    ops: Vec<Op>,
    slice_sizes: Vec<u32>,
    batches: Vec<u64>,
    seconds: f64,
    memory_bytes: usize,
    spins: u32,
    config: Config,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == "serve") {
        let options = parse(&arguments[1..]);
        serve(&options);
        return;
    }
    let options = parse(&arguments);
    println!(
        "{:>6} {:>9} {:>6} {:>8} {:>9} {:>9} {:>10} {:>9}",
        "op", "slice", "batch", "GB/s", "p50 us", "p99 us", "CPU-s/GiB", "calls/GiB"
    );
    for &op in &options.ops {
        for &slice_bytes in &options.slice_sizes {
            for &batch in &options.batches {
                measure(&options, &arguments, op, slice_bytes, batch);
            }
        }
    }
}

fn parse(arguments: &[String]) -> Options {
    let mut options = Options {
        ops: vec![Op::Read, Op::Write],
        slice_sizes: vec![4 << 10, 64 << 10, 1 << 20, 16 << 20],
        batches: vec![1, 16, 128],
        seconds: 1.0,
        memory_bytes: MEMORY_BYTES,
        spins: SPINS,
        config: Config { inflight_max: 4_096, ..Config::default() },
    };
    let mut rest = arguments.iter();
    while let Some(name) = rest.next() {
        let mut value = || rest.next().unwrap_or_else(|| panic!("{name} needs a value")).as_str();
        match name.as_str() {
            "--op" => {
                options.ops =
                    value().split(',').map(|op| if op == "read" { Op::Read } else { Op::Write }).collect()
            }
            "--slice" => {
                options.slice_sizes = value().split(',').map(|n| n.parse().expect("bytes")).collect()
            }
            "--batch" => options.batches = value().split(',').map(|n| n.parse().expect("a number")).collect(),
            "--seconds" => options.seconds = value().parse().expect("seconds"),
            "--memory" => options.memory_bytes = value().parse().expect("bytes"),
            "--connections" => options.config.connections = value().parse().expect("a number"),
            "--piece" => options.config.piece_bytes_max = value().parse().expect("bytes"),
            #[cfg(feature = "uring")]
            "--uring" => options.config.driver = te_tcp::Driver::Uring,
            "--window" => options.config.window_bytes_max = Some(value().parse().expect("bytes")),
            "--checksum" => options.config.checksum = true,
            "--congestion" => options.config.congestion = Some(value().to_owned()),
            "--send-buffer" => options.config.send_buffer_bytes = Some(value().parse().expect("bytes")),
            "--receive-buffer" => options.config.receive_buffer_bytes = Some(value().parse().expect("bytes")),
            "--spins" => options.spins = value().parse().expect("a number"),
            other => panic!("unknown option {other}; see the head of this file"),
        }
    }
    options
}

/// A transport, with memory that lives as long as the process.
fn open(options: &Options) -> TcpTransport {
    let mut transport = TcpTransport::new(options.config.clone()).expect("a transport");
    let memory = Box::leak(vec![1_u8; options.memory_bytes].into_boxed_slice());
    let span = MemSpan::new(memory.as_mut_ptr(), memory.len());
    // SAFETY: leaked, so mapped for ever; the reference it came from is not used again.
    unsafe { transport.register(REGION, span, Access::all()) }.expect("a region");
    transport
}

/// Polls until something has happened: spins first, then parks.
struct Poller {
    start: Clock,
    idle_polls: u32,
    spins: u32,
    parks: u64,
}

impl Poller {
    fn new(spins: u32) -> Self {
        Self { start: Clock::now(), idle_polls: 0, spins, parks: 0 }
    }

    fn now(&self) -> Instant {
        Instant::from_nanos(self.start.elapsed().as_nanos() as u64)
    }

    fn poll(&mut self, transport: &mut TcpTransport, out: &mut [Completion]) -> usize {
        let before = transport.stats();
        let count = transport.poll(self.now(), out);
        let after = transport.stats();
        let idle = count == 0 && before.receives == after.receives && before.sends == after.sends;
        self.idle_polls = if idle { self.idle_polls + 1 } else { 0 };
        if self.idle_polls > self.spins {
            self.parks += 1;
            let now = self.now();
            let wait = transport.poll_at().map_or(-1, |at| (at.nanos_since(now).div_ceil(1_000_000)) as i32);
            if wait != 0 {
                let fd = transport.event_source().map_or(-1, |source| source.0);
                let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
                // SAFETY: one `pollfd` that lives across the call.
                unsafe { libc::poll(&raw mut poll, 1, wait) };
            }
            self.idle_polls = self.spins / 2;
        }
        count
    }
}

fn serve(options: &Options) {
    let mut transport = open(options);
    let mut blob = [0; 256];
    let len = transport.export(REGION, &mut blob).expect("an export");
    let hex: String = blob[..len].iter().map(|byte| format!("{byte:02x}")).collect();
    println!("{hex}");
    std::io::stdout().flush().expect("stdout");
    let mut poller = Poller::new(options.spins);
    let mut out = [Completion::applied(Token(0)); 1];
    loop {
        poller.poll(&mut transport, &mut out);
    }
}

struct Target(Child);

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start_target(arguments: &[String]) -> (Target, Vec<u8>) {
    let program = std::env::current_exe().expect("our own path");
    let mut child =
        Command::new(program).arg("serve").args(arguments).stdout(Stdio::piped()).spawn().expect("a target");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("its output")).read_line(&mut line).expect("its export");
    let hex = line.trim();
    let blob =
        (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).expect("hex")).collect();
    (Target(child), blob)
}

fn measure(options: &Options, arguments: &[String], op: Op, slice_bytes: u32, batch: u64) {
    let (target, blob) = start_target(arguments);
    let mut transport = open(options);
    transport.attach(REMOTE, &blob).expect("an export of the target");
    let mut poller = Poller::new(options.spins);
    let places = (options.memory_bytes as u64 / u64::from(slice_bytes)).max(1);
    let mut out = [Completion::applied(Token(0)); 256];
    let mut started = vec![Clock::now(); batch as usize];
    let mut latencies: Vec<u32> = Vec::with_capacity(1 << 20);
    let mut free: Vec<u64> = (0..batch).rev().collect();
    let (mut next, mut bytes) = (0_u64, 0_u64);
    let mut slices = Vec::with_capacity(batch as usize);
    let active = Duration::from_millis(200);
    let begin = Clock::now();
    let (mut measuring, mut clock, mut cpu, mut calls) = (false, begin, 0.0, 0);
    loop {
        let elapsed = begin.elapsed();
        if !measuring && elapsed > active {
            (measuring, clock, bytes) = (true, Clock::now(), 0);
            (cpu, calls) = (cpu_seconds(None) + cpu_seconds(Some(target.0.id())), calls_of(&transport));
            latencies.clear();
        }
        if measuring && clock.elapsed().as_secs_f64() > options.seconds {
            break;
        }
        slices.clear();
        let at = Clock::now();
        while let Some(token) = free.pop() {
            let offset = next % places * u64::from(slice_bytes);
            next += 1;
            started[token as usize] = at;
            let (local, remote) = (RegionOffset::new(REGION, offset), RemoteOffset::new(REMOTE, offset));
            slices.push(Slice { token: Token(token), local, remote, len: slice_bytes, op });
        }
        if !slices.is_empty() {
            let taken = transport.submit(&slices).expect("slices are in order");
            free.extend(slices[taken..].iter().map(|slice| slice.token.0));
        }
        let count = poller.poll(&mut transport, &mut out);
        if count == 0 {
            continue;
        }
        let at = Clock::now();
        for completion in &out[..count] {
            completion.result.expect("it works");
            bytes += u64::from(slice_bytes);
            let token = completion.token.0;
            if latencies.len() < latencies.capacity() {
                latencies.push((at - started[token as usize]).as_nanos().min(u128::from(u32::MAX)) as u32);
            }
            free.push(token);
        }
    }
    let seconds = clock.elapsed().as_secs_f64();
    let cpu = cpu_seconds(None) + cpu_seconds(Some(target.0.id())) - cpu;
    let calls = calls_of(&transport) - calls;
    latencies.sort_unstable();
    let at = |share: f64| {
        latencies.get((latencies.len() as f64 * share) as usize).map_or(0.0, |&n| f64::from(n) / 1e3)
    };
    let gib = bytes as f64 / f64::from(1 << 30);
    let name = if op == Op::Read { "read" } else { "write" };
    println!(
        "{name:>6} {slice_bytes:>9} {batch:>6} {:>8.2} {:>9.1} {:>9.1} {:>10.3} {:>9.0}",
        bytes as f64 / seconds / 1e9,
        at(0.5),
        at(0.99),
        cpu / gib,
        calls as f64 / gib,
    );
}

/// System calls of the initiator that moved bytes or asked for events.
fn calls_of(transport: &TcpTransport) -> u64 {
    let stats = transport.stats();
    stats.receives + stats.sends + stats.waits
}

/// User and system time of a process in seconds, of this process by default.
fn cpu_seconds(process: Option<u32>) -> f64 {
    let name = process.map_or("self".to_owned(), |id| id.to_string());
    let stat = std::fs::read_to_string(format!("/proc/{name}/stat")).unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<f64>().ok()).unwrap_or(0.0);
    (ticks(11) + ticks(12)) / 100.0
}
