//! The same checks on the GPUs of this machine. Where there is none they are reported as ignored, with the
//! reason.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(unsafe_code, reason = "reads and writes device memory under test")]

use std::cell::RefCell;
use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};
use te_core::device::HopDirection::{ToDevice, ToHost};
use te_core::device::{Devices, Hop, HopEnd, Stager};
use te_core::testkit::{ByPointer, PeekPoke, Rng, stager_conformance};
use te_core::{Location, MemSpan, Token};
use te_gpu::plan::Path;
use te_gpu::{Config, DeviceBuffer, Gpu};

/// Device memory under test, by synchronous copies of the driver.
#[derive(Default)]
struct Buffers(RefCell<Vec<DeviceBuffer>>);

impl Buffers {
    fn allocate(&self, gpu: &Gpu, location: Location, bytes: usize) -> MemSpan {
        let buffer = gpu.allocate(location, bytes).unwrap();
        let span = buffer.span();
        self.0.borrow_mut().push(buffer);
        span
    }

    fn with<R>(&self, span: MemSpan, run: impl FnOnce(&DeviceBuffer, u64) -> R) -> R {
        let buffers = self.0.borrow();
        let offset = |buffer: &DeviceBuffer| span.as_ptr().addr().checked_sub(buffer.span().as_ptr().addr());
        let found = buffers.iter().find_map(|buffer| {
            let offset = offset(buffer)? as u64;
            buffer.span().contains(offset, span.len() as u64).then_some((buffer, offset))
        });
        let (buffer, offset) = found.expect("memory of a buffer");
        run(buffer, offset)
    }
}

impl PeekPoke for Buffers {
    unsafe fn peek(&self, span: MemSpan, out: &mut [u8]) {
        match span.location() {
            Location::Device(..) => self.with(span, |buffer, offset| buffer.read(offset, out).unwrap()),
            // SAFETY: the caller's promise, passed on.
            _ => unsafe { ByPointer.peek(span, out) },
        }
    }

    unsafe fn poke(&self, span: MemSpan, bytes: &[u8]) {
        match span.location() {
            Location::Device(..) => self.with(span, |buffer, offset| buffer.write(offset, bytes).unwrap()),
            // SAFETY: the caller's promise, passed on.
            _ => unsafe { ByPointer.poke(span, bytes) },
        }
    }
}

fn first(gpu: &Gpu) -> Location {
    gpu.devices().unwrap()[0].location
}

fn a_stager_keeps_the_laws(gpu: &Gpu) -> Result<(), Failed> {
    let (location, buffers) = (first(gpu), Buffers::default());
    stager_conformance(gpu, &buffers, location, |bytes| buffers.allocate(gpu, location, bytes));
    println!("{}", gpu.plan(location).unwrap().table());
    Ok(())
}

fn run(stager: &mut dyn Stager, hops: &[Hop]) {
    let (mut begun, mut ended) = (0, 0);
    let mut out = [HopEnd { token: Token(0), result: Ok(()) }; 64];
    while ended < hops.len() {
        begun += stager.start(&hops[begun..]).unwrap();
        let count = stager.poll(&mut out);
        out[..count].iter().for_each(|end| end.result.unwrap());
        ended += count;
    }
}

/// Every byte of a slot goes to the device and comes back to another slot, by each path, in pieces of odd
/// lengths at odd places.
fn every_path_brings_every_byte(make: fn(Config) -> Gpu) -> Result<(), Failed> {
    for path in Path::ALL {
        let lines = ["to-device", "to-host"].into_iter().flat_map(|direction| {
            [4_096, 16_384, 65_536, 262_144].map(|bytes| format!("{direction} {bytes}: {path} {path} {path}"))
        });
        let gpu = make(Config {
            paths: Some(lines.collect::<Vec<_>>().join(";")),
            kernel: true,
            ..Config::default()
        });
        let (location, buffers) = (first(&gpu), Buffers::default());
        let mut stager = gpu.stager(location).unwrap();
        let offer = gpu.plan(location).unwrap().offer();
        if !offer.has(path) {
            println!("this device has no path {path}");
            continue;
        }
        let memory = buffers.allocate(&gpu, location, 1 << 20);
        let (there, back) = (stager.take().unwrap(), stager.take().unwrap());
        let mut rng = Rng::new(11);
        for piece in [1_u64, 17, 509, 4_096, 5_003, 65_536] {
            let mut bytes = vec![0; there.span.len()];
            rng.fill(&mut bytes);
            // SAFETY: a slot that is ours.
            unsafe { buffers.poke(there.span, &bytes) };
            let count = (bytes.len() as u64 / piece).min(1_000);
            let hops = |slot: u32, direction| -> Vec<Hop> {
                let part = |nth| memory.part(nth * piece + piece % 13, piece).unwrap();
                let one = |nth: u64| Hop {
                    token: Token(nth),
                    slot,
                    offset: (nth * piece) as u32,
                    device: part(nth),
                    direction,
                };
                (0..count).map(one).collect()
            };
            run(&mut *stager, &hops(there.index, ToDevice));
            run(&mut *stager, &hops(back.index, ToHost));
            let mut found = vec![0; (count * piece) as usize];
            // SAFETY: as above.
            unsafe { buffers.peek(back.span.part(0, count * piece).unwrap(), &mut found) };
            assert!(found == bytes[..found.len()], "{path}, pieces of {piece} bytes");
        }
    }
    Ok(())
}

fn a_buffer_is_what_was_written(gpu: &Gpu) -> Result<(), Failed> {
    let buffer = gpu.allocate(first(gpu), 100_000).unwrap();
    let bytes: Vec<u8> = (0..100_000).map(|at| (at * 31 / 7) as u8).collect();
    buffer.write(0, &bytes).unwrap();
    let mut out = vec![0; 100_000];
    buffer.read(0, &mut out).unwrap();
    assert!(out == bytes);
    println!("{:?}, refused: {:?}", buffer.handle_types(), buffer.refused());
    println!("{:?}", gpu.probe(buffer.location()).unwrap());
    Ok(())
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    let cuda: fn(Config) -> Gpu = |config| Gpu::cuda(config).unwrap();
    let hip: fn(Config) -> Gpu = |config| Gpu::hip(config).unwrap();
    for (name, make) in [("cuda", cuda), ("hip", hip)] {
        let gpu = make(Config { kernel: true, ..Config::default() });
        let reason = gpu.devices().err();
        let mut add = |test: &str, run: Box<dyn FnOnce() -> Result<(), Failed> + Send>| {
            let title = match &reason {
                None => format!("{name}::{test}"),
                Some(reason) => format!("{name}::{test} ({reason})"),
            };
            trials.push(Trial::test(title, run).with_ignored_flag(reason.is_some()));
        };
        let (one, two) = (gpu.clone(), gpu);
        add("a_stager_keeps_the_laws", Box::new(move || a_stager_keeps_the_laws(&one)));
        add("every_path_brings_every_byte", Box::new(move || every_path_brings_every_byte(make)));
        add("a_buffer_is_what_was_written", Box::new(move || a_buffer_is_what_was_written(&two)));
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}
