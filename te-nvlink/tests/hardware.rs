//! The fabric on the GPUs of this machine, between two processes. Where there is none the tests are
//! reported as ignored, with the reason. `SNOWSKIN_CUDA_LIBRARY` names another library than the driver's.
//!
//! Figures are printed beside the bounds that the design gives for an H200. They are not checked: a machine
//! may have another GPU.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(unsafe_code, reason = "calls the driver, and registers memory under test")]

mod cuda;

use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant as Clock};

use cuda::{Cuda, gpu};
use libtest_mimic::{Arguments, Failed, Trial};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use te_core::device::HopEnd;
use te_core::testkit::Rng;
use te_core::{
    Access, Completion, Instant, Location, MemSpan, Memory, Op, RegionId, RegionOffset, RemoteOffset,
    RemoteRegionId, Slice, Token, Transport,
};
use te_fabric::testkit::{Process, bytes_of, hex};
use te_gpu::{Copy, Gpu};
use te_nvlink::{Config, NvlinkTransport};

const ROLE: &str = "SNOWSKIN_TEST_NVLINK_HARDWARE";
const REGION: RegionId = RegionId::new(0, 1);
const REMOTE: RemoteRegionId = RemoteRegionId::new(0, 1);
const MIB: usize = 1 << 20;
/// Bytes of a region.
const BYTES: usize = 64 * MIB;

/// Memory under test, which is never freed.
fn allocate(gpu: &Gpu, cuda: &Cuda, kind: &str) -> MemSpan {
    let location = gpu.devices().unwrap()[0].location;
    match kind {
        // At a place that is no multiple of a page, in a larger allocation.
        "legacy" => {
            cuda.allocate(BYTES + 8 * MIB, location).part(3 * MIB as u64 + 512, BYTES as u64).unwrap()
        }
        "mapped" => {
            let buffer = gpu.allocate(location, BYTES).unwrap();
            let span = buffer.span();
            std::mem::forget(buffer);
            span
        }
        _ => {
            let options = te_host::AllocOptions { peers_may_write: true, populate: true, huge_pages: true };
            let memory = te_host::SharedMemory::new(BYTES, options).unwrap();
            let span = memory.span();
            std::mem::forget(memory);
            span
        }
    }
}

fn bytes(seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; BYTES];
    Rng::new(seed).fill(&mut bytes);
    bytes
}

fn open(gpu: &Gpu, span: MemSpan, access: Access) -> NvlinkTransport {
    let config = Config { inflight_max: 4_096, ..Config::default() };
    let mut transport = NvlinkTransport::new(config, gpu.clone()).unwrap();
    // SAFETY: the memory is never freed, and no reference to it is made.
    unsafe { transport.register(REGION, span, access) }.unwrap();
    transport
}

fn poll(transport: &mut NvlinkTransport, out: &mut [Completion]) -> usize {
    static START: std::sync::OnceLock<Clock> = std::sync::OnceLock::new();
    // timing: the transport's clock
    let now = Instant::ZERO + START.get_or_init(Clock::now).elapsed();
    transport.poll(now, out)
}

/// Carries out `count` slices of `len` bytes side by side.
fn run(transport: &mut NvlinkTransport, op: Op, count: u64, len: u32) {
    let one = |nth: u64| {
        let (local, remote) = (
            RegionOffset::new(REGION, nth * u64::from(len)),
            RemoteOffset::new(REMOTE, nth * u64::from(len)),
        );
        Slice { token: Token(nth), local, remote, len, op }
    };
    let slices: Vec<Slice> = (0..count).map(one).collect();
    let (mut begun, mut ended) = (0, 0);
    let mut out = [Completion::applied(Token(0)); 256];
    while ended < slices.len() {
        begun += transport.submit(&slices[begun..]).unwrap();
        let done = poll(transport, &mut out);
        out[..done].iter().for_each(|end| end.result.unwrap());
        ended += done;
    }
}

/// The other process: owns a region and does what it is told, or writes for ever.
fn other_process(role: &str) {
    let (gpu, cuda) = (gpu(), Cuda::load());
    let (role, what) = role.split_once(' ').unwrap();
    let span = allocate(&gpu, &cuda, if role == "owner" { what } else { "mapped" });
    let mut transport = open(&gpu, span, Access::all());
    if role == "writer" {
        transport.attach(REMOTE, &bytes_of(what)).unwrap();
        for round in 0_u64.. {
            cuda.write(span, &vec![round as u8; BYTES]);
            run(&mut transport, Op::Write, BYTES as u64 >> 14, 16 << 10);
            say("writing");
        }
    }
    let mut export = [0; 128];
    let len = transport.export(REGION, &mut export).unwrap();
    say(&format!("export {}", hex(&export[..len])));
    let (tell, commands) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        std::io::stdin().lines().map_while(Result::ok).try_for_each(|line| tell.send(line))
    });
    loop {
        poll(&mut transport, &mut []);
        let Ok(command) = commands.try_recv() else { continue };
        let (what, seed) = command.split_once(' ').unwrap();
        let expected = bytes(seed.parse().unwrap());
        match what {
            "fill" => cuda.write(span, &expected),
            "check" => assert!(cuda.read(span) == expected, "wrong bytes arrived"),
            _ => return,
        }
        say("done");
    }
}

fn say(line: &str) {
    println!("{line}");
    std::io::stdout().flush().unwrap();
}

struct Other {
    process: Process,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Other {
    fn start(role: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let mut child = command.env(ROLE, role).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { stdin: child.stdin.take().unwrap(), process: Process(child), lines }
    }

    fn line(&mut self, word: &str) -> String {
        let line = self.lines.by_ref().map_while(Result::ok).find(|line| line.starts_with(word));
        line.unwrap_or_else(|| panic!("the other process has ended before it said {word}"))[word.len()..]
            .trim()
            .into()
    }

    fn ask(&mut self, command: &str) {
        writeln!(self.stdin, "{command}").unwrap();
        self.line("done");
    }
}

/// A region of another process, attached here.
fn attached(local: &str, remote: &str) -> (Other, NvlinkTransport, MemSpan, Cuda, Duration) {
    let (gpu, cuda) = (gpu(), Cuda::load());
    let mut other = Other::start(&format!("owner {remote}"));
    let export = bytes_of(&other.line("export"));
    let span = allocate(&gpu, &cuda, local);
    let mut transport = open(&gpu, span, Access::LOCAL);
    // timing: the figure of the first transfer
    let start = Clock::now();
    transport.attach(REMOTE, &export).unwrap();
    run(&mut transport, Op::Write, 1, 4_096);
    // timing: as above
    (other, transport, span, cuda, start.elapsed())
}

fn bytes_arrive_where_they_should(local: &str, remote: &str) -> Result<(), Failed> {
    let (mut other, mut transport, span, cuda, _) = attached(local, remote);
    for (len, seed) in [(16_384, 1), (1 << 20, 2), (BYTES as u32, 3)] {
        cuda.write(span, &bytes(seed));
        run(&mut transport, Op::Write, BYTES as u64 / u64::from(len), len);
        other.ask(&format!("check {seed}"));
        other.ask(&format!("fill {}", seed + 10));
        run(&mut transport, Op::Read, BYTES as u64 / u64::from(len), len);
        assert!(cuda.read(span) == bytes(seed + 10), "{remote} to {local}, {len} bytes");
    }
    Ok(())
}

/// n6 of the design: whether a pidfd is the word for the end of a killed process's work on a device.
fn after_a_writer_was_killed_memory_is_constant() -> Result<(), Failed> {
    let (gpu, cuda) = (gpu(), Cuda::load());
    for round in 0..10_u64 {
        let kind = ["legacy", "mapped"][round as usize % 2];
        let span = allocate(&gpu, &cuda, kind);
        let mut owner = open(&gpu, span, Access::all());
        let mut export = [0; 128];
        let len = owner.export(REGION, &mut export).unwrap();
        let mut writer = Other::start(&format!("writer {}", hex(&export[..len])));
        let waits = std::thread::spawn(move || {
            writer.line("writing");
            writer
        });
        while !waits.is_finished() {
            poll(&mut owner, &mut []);
        }
        let writer = waits.join().unwrap();
        // timing: another moment of the writer's loop in each round
        std::thread::sleep(Duration::from_micros(300 * round));
        kill(Pid::from_raw(writer.process.0.id() as i32), Signal::SIGKILL)?;
        while owner.deregister(REGION).is_err() {
            poll(&mut owner, &mut []);
        }
        let before = cuda.read(span);
        // timing: a late write would come within this time
        std::thread::sleep(Duration::from_secs(1));
        assert!(cuda.read(span) == before, "a late write, {kind}, round {round}");
    }
    Ok(())
}

/// The best of some tries, seconds.
fn best(tries: u32, mut run: impl FnMut()) -> f64 {
    run();
    let one = |_| {
        // timing: a figure
        let start = Clock::now();
        run();
        // timing: as above
        start.elapsed().as_secs_f64()
    };
    (0..tries).map(one).fold(f64::INFINITY, f64::min)
}

/// One copy within this process, by the same queue: what the device can do.
fn ceiling(gpu: &Gpu, cuda: &Cuda) -> f64 {
    let location: Location = gpu.devices().unwrap()[0].location;
    let (one, two) = (cuda.allocate(BYTES, location), cuda.allocate(BYTES, location));
    let mut queue = gpu.copy_queue(location).unwrap();
    let copy =
        Copy { token: Token(0), to: gpu.place(two), from: gpu.place(one), len: BYTES as u32, kernel: false };
    best(20, || {
        // SAFETY: the memory is never freed.
        assert_eq!(unsafe { queue.start(&[copy]) }, Ok(1));
        while queue.poll(&mut [HopEnd { token: Token(0), result: Ok(()) }]) == 0 {}
    })
}

fn figures() -> Result<(), Failed> {
    let (here, cuda) = (gpu(), Cuda::load());
    let whole = ceiling(&here, &cuda);
    let rate = |bytes: u64, seconds: f64| bytes as f64 / seconds / 1e9;
    println!("64 MiB inside one process: {:.0} GB/s", rate(BYTES as u64, whole));
    for remote in ["legacy", "mapped"] {
        let (_other, mut transport, _, _, first) = attached("legacy", remote);
        println!("{remote}: first transfer after attach: {:.2} ms (at most 5)", first.as_secs_f64() * 1e3);
        for (op, count, len, bound) in [
            (Op::Write, 1, BYTES as u32, "at least 0.9 of one process"),
            (Op::Read, 1, BYTES as u32, "at least 0.9 of one process"),
            (Op::Write, 1_024, 16 << 10, "at least 300 GB/s"),
            (Op::Read, 1_024, 16 << 10, "at least 300 GB/s"),
            (Op::Write, 1_024, 4 << 10, "at least 80 GB/s"),
        ] {
            let seconds = best(20, || run(&mut transport, op, count, len));
            let moved = rate(count * u64::from(len), seconds);
            println!("{remote}: {op:?} {count} x {len}: {moved:.1} GB/s ({bound})");
        }
        let mut times: Vec<f64> =
            (0..2_000).map(|_| best(1, || run(&mut transport, Op::Write, 1, 4_096))).collect();
        times.sort_by(f64::total_cmp);
        println!("{remote}: one WRITE of 4 KiB: p50 {:.1} us (at most 8)", times[1_000] * 1e6);
    }
    let (_other, mut transport, _, _, _) = attached("legacy", "host");
    for op in [Op::Write, Op::Read] {
        let seconds = best(20, || run(&mut transport, op, 16, 1 << 20));
        println!("device and shared host memory: {op:?} 16 x 1 MiB: {:.1} GB/s", rate(16 << 20, seconds));
    }
    Ok(())
}

fn main() -> ExitCode {
    if let Ok(role) = std::env::var(ROLE) {
        other_process(&role);
        return ExitCode::SUCCESS;
    }
    let reason = gpu().devices().err();
    let mut trials = Vec::new();
    let mut add = |test: String, run: Box<dyn FnOnce() -> Result<(), Failed> + Send>| {
        let title = match &reason {
            None => test,
            Some(reason) => format!("{test} ({reason})"),
        };
        trials.push(Trial::test(title, run).with_ignored_flag(reason.is_some()));
    };
    for (local, remote) in
        [("legacy", "legacy"), ("legacy", "mapped"), ("mapped", "host"), ("host", "legacy")]
    {
        let test = format!("bytes_arrive_where_they_should, {local} and {remote}");
        add(test, Box::new(move || bytes_arrive_where_they_should(local, remote)));
    }
    let killed = after_a_writer_was_killed_memory_is_constant;
    add("after_a_writer_was_killed_memory_is_constant".to_owned(), Box::new(killed));
    add("figures".to_owned(), Box::new(figures));
    // One after the other: figures are not disturbed.
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    libtest_mimic::run(&arguments, trials).exit_code()
}
