//! Every function of the driver fails once, at every place: nothing is lost, hangs or ends twice. Those that
//! give something back have worked when they fail, as a driver that reports failures of earlier work does.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::collections::BTreeMap;

use common::{Fake, NO_END, hop};
use te_core::MemSpan;
use te_core::device::HopDirection::{ToDevice, ToHost};
use te_core::device::{Devices, Hop, Stager};
use te_gpu::{Config, Gpu};

/// Uses everything once. Each step may fail; what may not happen is asserted.
fn everything(fake: &Fake, gpu: &Gpu, memory: MemSpan) -> usize {
    let mut worked = 0;
    let mut did = |is_ok: bool| worked += usize::from(is_ok);
    did(gpu.devices().is_ok());
    did(gpu.locate(memory.as_ptr(), memory.len()).is_some());
    did(gpu.dmabuf(memory).is_ok());
    did(gpu.flush_writes(fake.location()).is_ok());
    did(gpu.gate(fake.location()).is_ok());
    if let Ok(buffer) = gpu.allocate(fake.location(), 5_000) {
        did(buffer.export_fd().is_ok() || buffer.export_ipc().is_ok());
        did(buffer.write(1, &[5; 64]).is_ok());
        did(buffer.read(1, &mut [0; 64]).is_ok());
    }
    if let Ok(mut stager) = gpu.stager(fake.location()) {
        did(true);
        worked += hops(&mut *stager, memory);
    }
    assert_eq!((fake.context(), fake.capture_mode()), (0, 0), "what the caller's thread has");
    assert_eq!(fake.wrong(), 0, "what was given back is not given back again");
    worked
}

/// Each hop that was started ends once.
fn hops(stager: &mut dyn Stager, memory: MemSpan) -> usize {
    let slots: Vec<_> = std::iter::from_fn(|| stager.take()).collect();
    let mut all: Vec<Hop> = Vec::new();
    for round in 0..4_u64 {
        for (nth, slot) in slots.iter().enumerate() {
            let direction = if round % 2 == 0 { ToDevice } else { ToHost };
            let device = memory.part(nth as u64 * 4_096 + round, 500 + round).unwrap();
            all.push(hop(all.len() as u64, slot.index, round as u32 * 1_000, device, direction));
        }
    }
    let (mut running, mut left, mut worked) = (BTreeMap::new(), &all[..], 0);
    // timing: the fake driver's streams run in threads
    let start = std::time::Instant::now();
    while !left.is_empty() || !running.is_empty() {
        match stager.start(&left[..left.len().min(20)]) {
            Ok(count) => {
                left[..count].iter().for_each(|hop| assert!(running.insert(hop.token, ()).is_none()));
                left = &left[count..];
            }
            // The first one was refused.
            Err(_) => left = &left[1..],
        }
        let mut out = [NO_END; 7];
        let count = stager.poll(&mut out);
        for end in &out[..count] {
            assert!(running.remove(&end.token).is_some(), "{:?} ended and did not run", end.token);
            worked += usize::from(end.result.is_ok());
        }
        // timing: only a hang takes as long
        assert!(start.elapsed().as_secs() < 60, "{} hops do not end", running.len());
    }
    slots.into_iter().for_each(|slot| stager.give_back(slot));
    worked
}

/// The fake driver, our devices on it, and memory of the application.
fn set_up(fake: &Fake, words: bool) -> (Gpu, MemSpan) {
    fake.set("stream_writes", i64::from(words)).set("delay_us_max", 0).set("ordering", 0);
    let config = Config { slot_bytes: 8_192, ring_bytes: 8 * 8_192, calibrate_ms_max: 2, ..fake.config() };
    (fake.gpu(config), fake.allocate(8 * 4_096))
}

fn each_function_fails(make: fn() -> Fake, words: bool, codes: &[i32]) -> usize {
    let fake = make();
    let (gpu, memory) = set_up(&fake, words);
    let expected = everything(&fake, &gpu, memory);
    drop(gpu);
    fake.free(memory);
    assert_eq!(fake.live(), 0);
    let mut tried = 0;
    for name in fake.names() {
        let calls = fake.calls(&name);
        let mut places = vec![1, 2, 3, 5, 8, 13, calls / 2, calls];
        places.retain(|nth| (1..=calls).contains(nth));
        places.sort_unstable();
        places.dedup();
        for nth in places {
            for code in codes {
                let fake = make();
                let (gpu, memory) = set_up(&fake, words);
                fake.fail(&name, nth, *code);
                let worked = everything(&fake, &gpu, memory);
                assert!(worked <= expected);
                // Afterwards all is as if nothing had happened, unless the driver did not even start.
                if gpu.devices().is_ok() {
                    fake.fail(&name, 0, 0);
                    let after = everything(&fake, &gpu, memory);
                    assert!(after == expected, "{name}, call {nth}, error {code}: {after} of {expected}");
                }
                drop(gpu);
                fake.free(memory);
                // A range whose mapping may still be there is not freed.
                let lost = u64::from(name.ends_with("MemUnmap"));
                assert_eq!(fake.live(), lost, "after {name} failed at call {nth} with {code}");
                assert_eq!(fake.wrong(), 0, "after {name} failed at call {nth} with {code}");
                tried += 1;
            }
        }
    }
    tried
}

#[test]
fn with_completion_words() {
    assert!(each_function_fails(Fake::cuda, true, &[1, 304]) > 100);
}

#[test]
fn with_events() {
    assert!(each_function_fails(Fake::cuda, false, &[2]) > 50);
}

#[test]
fn with_hip() {
    assert!(each_function_fails(Fake::hip, true, &[1, 304]) > 50);
}

/// The context dies at any call. Memory that the device may still use is kept on purpose, so only what
/// callers see is checked.
#[test]
fn the_context_dies_at_any_call() {
    let fake = Fake::cuda();
    let (gpu, memory) = set_up(&fake, true);
    everything(&fake, &gpu, memory);
    for name in fake.names() {
        for nth in [1, 4, 20] {
            if nth > fake.calls(&name) {
                continue;
            }
            let fake = Fake::cuda();
            let (gpu, memory) = set_up(&fake, true);
            fake.fail(&name, nth, 700);
            everything(&fake, &gpu, memory);
            drop(gpu);
        }
    }
}

/// Pages of this process's address space.
fn pages() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn pages_that_cannot_be_registered_are_unmapped() {
    for function in ["cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2"] {
        let fake = Fake::cuda();
        let gpu = fake.gpu(fake.config());
        fake.fail(function, 0, 1);
        let before = pages();
        // Each maps 2 MiB at least. Other tests of this process map some, too.
        (0..1_000).for_each(|_| assert!(gpu.stager(fake.location()).is_err()));
        let mib = pages().saturating_sub(before) * 4 / 1_024;
        assert!(mib < 1_000, "{mib} MiB more are mapped after {function} failed 1,000 times");
        assert_eq!((fake.context(), gpu.stagers_quarantined()), (0, 0));
    }
}
