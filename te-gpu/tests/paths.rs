//! The three copy paths, what calls of a stager may not do, and what happens when a device fails.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::time::Duration;

use common::{Fake, NO_END, all_are_ok, ends, hop, run};
use te_core::device::HopDirection::{ToDevice, ToHost};
use te_core::device::{Devices, Hop, Stager, StagingSlot};
use te_core::testkit::{CountingAlloc, Rng, allocations, is_counting};
use te_core::{Error, ErrorKind, MemSpan};
use te_gpu::Config;
use te_gpu::plan::Path;

#[global_allocator]
static ALLOC: CountingAlloc<std::alloc::System> = CountingAlloc::new(std::alloc::System);

/// Settings by which groups of more than four hops go by this path.
fn only(fake: &Fake, path: Path) -> Config {
    let lines = ["to-device", "to-host"].into_iter().flat_map(|direction| {
        [4_096, 16_384, 65_536, 262_144].map(|bytes| format!("{direction} {bytes}: {path} {path} {path}"))
    });
    let paths = Some(lines.collect::<Vec<_>>().join(";"));
    Config { paths, slot_bytes: 128 << 10, ring_bytes: 16 * (128 << 10), hops_max: 256, ..fake.config() }
}

fn take_all(stager: &mut dyn Stager) -> Vec<StagingSlot> {
    std::iter::from_fn(|| stager.take()).collect()
}

fn kind<T>(result: Result<T, Error>) -> Result<T, ErrorKind> {
    result.map_err(|error| error.kind)
}

/// Hops of random lengths and alignments that do not overlap: several for each slot, in both directions.
struct Mixed {
    memory: MemSpan,
    hops: Vec<Hop>,
    expected_memory: Vec<u8>,
    expected_slots: Vec<Vec<u8>>,
}

impl Mixed {
    fn new(fake: &Fake, rng: &mut Rng, slots: &[StagingSlot]) -> Self {
        let cell = slots[0].span.len() / 8;
        let memory = fake.allocate(slots.len() * 8 * cell);
        let mut expected_memory = vec![0; memory.len()];
        rng.fill(&mut expected_memory);
        fake.fill(memory, &expected_memory);
        let (mut hops, mut expected_slots) = (Vec::new(), Vec::new());
        for (nth, slot) in slots.iter().enumerate() {
            let mut bytes = vec![0; slot.span.len()];
            rng.fill(&mut bytes);
            fake.fill(slot.span, &bytes);
            for part in 0..8 {
                let longest = [40, 3_000, cell][rng.index(3)].min(cell);
                let len = 1 + rng.index(longest);
                let (skip, there) = (rng.index(cell - len + 1), rng.index(cell - len + 1));
                let (at, there) = (part * cell + skip, (nth * 8 + part) * cell + there);
                let direction = if rng.below(2) == 0 {
                    expected_memory[there..there + len].copy_from_slice(&bytes[at..at + len]);
                    ToDevice
                } else {
                    bytes[at..at + len].copy_from_slice(&expected_memory[there..there + len]);
                    ToHost
                };
                let device = memory.part(there as u64, len as u64).unwrap();
                hops.push(hop(hops.len() as u64, slot.index, at as u32, device, direction));
            }
            expected_slots.push(bytes);
        }
        Self { memory, hops, expected_memory, expected_slots }
    }

    fn check(&self, fake: &Fake, slots: &[StagingSlot]) {
        assert!(fake.bytes(self.memory) == self.expected_memory, "device memory");
        for (slot, expected) in slots.iter().zip(&self.expected_slots) {
            assert!(fake.bytes(slot.span) == *expected, "slot {}", slot.index);
        }
    }
}

#[test]
fn every_path_brings_every_byte() {
    for path in Path::ALL {
        let fake = Fake::cuda();
        let gpu = fake.gpu(only(&fake, path));
        let mut stager = gpu.stager(fake.location()).unwrap();
        let functions = ["cuMemcpyHtoDAsync_v2", "cuMemcpyBatchAsync_v2", "cuLaunchKernel"];
        let calls = || functions.map(|name| fake.calls(name));
        let before = calls();
        let mut rng = Rng::new(path as u64);
        for _ in 0..10 {
            let slots = take_all(&mut *stager);
            let mixed = Mixed::new(&fake, &mut rng, &slots);
            all_are_ok(&run(&mut *stager, &mixed.hops)).unwrap();
            mixed.check(&fake, &slots);
            slots.into_iter().for_each(|slot| stager.give_back(slot));
        }
        let used: Vec<bool> = calls().iter().zip(before).map(|(now, before)| *now > before).collect();
        assert!(used[path as usize], "{path} {used:?}");
        assert_eq!(fake.context(), 0);
    }
}

#[test]
fn hops_do_not_end_before_the_device_has_copied() {
    for events in [false, true] {
        let fake = Fake::cuda();
        fake.set("stream_writes", i64::from(!events));
        let gpu = fake.gpu(only(&fake, Path::Kernel));
        let mut stager = gpu.stager(fake.location()).unwrap();
        let slots = take_all(&mut *stager);
        let mixed = Mixed::new(&fake, &mut Rng::new(3), &slots);
        fake.set("stalled", 1);
        let begun = stager.start(&mixed.hops).unwrap();
        assert_eq!(begun, mixed.hops.len());
        let mut out = [NO_END; 8];
        (0..40_000).for_each(|_| assert_eq!(stager.poll(&mut out), 0));
        fake.set("stalled", 0);
        all_are_ok(&ends(&mut *stager, begun)).unwrap();
        mixed.check(&fake, &slots);
        // timing: nothing is to end any more
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(stager.poll(&mut out), 0);
    }
}

#[test]
fn start_and_poll_never_block_or_allocate_and_a_poll_makes_no_call() {
    assert!(is_counting());
    for (path, events) in [Path::Loop, Path::Batch, Path::Kernel].into_iter().zip([false, true, false]) {
        let fake = Fake::cuda();
        fake.set("stream_writes", i64::from(!events));
        let gpu = fake.gpu(only(&fake, path));
        let mut stager = gpu.stager(fake.location()).unwrap();
        let slots = take_all(&mut *stager);
        let mixed = Mixed::new(&fake, &mut Rng::new(9), &slots);
        let mut out = [NO_END; 64];
        let (blocking, mut allocated) = (fake.blocking(), 0);
        for round in 0..50 {
            let (mut begun, mut ended) = (0, 0);
            while ended < mixed.hops.len() {
                let before = allocations();
                begun += stager.start(&mixed.hops[begun..]).unwrap();
                ended += stager.poll(&mut out);
                allocated += allocations() - before;
            }
            let looked_up = fake.calls("cuPointerGetAttributes");
            if round == 0 {
                // The driver is asked once about an allocation, and again after memory was registered.
                stager.start(&mixed.hops[..1]).unwrap();
                assert_eq!(fake.calls("cuPointerGetAttributes"), looked_up);
                gpu.locate(mixed.memory.as_ptr(), 1).unwrap();
                stager.start(&mixed.hops[..1]).unwrap();
                assert_eq!(fake.calls("cuPointerGetAttributes"), looked_up + 2);
                // Registrations of host memory change nothing.
                let mut host = 0_u64;
                assert_eq!(gpu.locate((&raw mut host).cast(), 8), None);
                stager.start(&mixed.hops[..1]).unwrap();
                assert_eq!(fake.calls("cuPointerGetAttributes"), looked_up + 3);
                ends(&mut *stager, 3);
            }
        }
        assert_eq!((fake.blocking() - blocking, allocated), (0, 0), "{path}");
        if !events {
            fake.set("stalled", 1);
            stager.start(&mixed.hops[..64]).unwrap();
            let calls = || fake.names().iter().map(|name| fake.calls(name)).sum::<u64>();
            let before = calls();
            (0..1_000).for_each(|_| assert_eq!(stager.poll(&mut out), 0));
            assert_eq!(calls() - before, 0, "{path}: calls of the driver in polls");
            fake.set("stalled", 0);
            ends(&mut *stager, 64);
        }
    }
}

#[test]
fn a_full_stager_starts_a_prefix_and_the_rest_later() {
    let fake = Fake::cuda();
    let gpu = fake.gpu(Config { hops_max: 16, ..fake.config() });
    let mut stager = gpu.stager(fake.location()).unwrap();
    let slots = take_all(&mut *stager);
    let memory = fake.allocate(4_096);
    let one = |nth: u64| hop(nth, slots[0].index, nth as u32, memory.part(nth, 1).unwrap(), ToDevice);
    let hops: Vec<Hop> = (0..40).map(one).collect();
    fake.set("stalled", 1);
    assert_eq!(stager.start(&hops), Ok(16));
    assert_eq!(stager.start(&hops[16..]), Ok(0));
    // The other direction has a queue of its own.
    assert_eq!(stager.start(&[Hop { direction: ToHost, ..hops[39] }]), Ok(1));
    fake.set("stalled", 0);
    ends(&mut *stager, 17);
    assert_eq!(run(&mut *stager, &hops[16..]).len(), 24);

    let many = fake.gpu(Config { hops_max: 4_096, ..fake.config() });
    let mut stager = many.stager(fake.location()).unwrap();
    let slot = stager.take().unwrap();
    fake.set("stalled", 1);
    let mut begun = 0;
    while stager.start(&[Hop { slot: slot.index, ..hops[0] }]).unwrap() == 1 {
        begun += 1;
    }
    assert!((60..=64).contains(&begun), "{begun} launches are in the stream");
    fake.set("stalled", 0);
    assert_eq!(ends(&mut *stager, begun).len(), begun);
    let blocked = fake.blocking();
    assert_eq!(stager.start(&[Hop { slot: slot.index, ..hops[0] }]), Ok(1));
    assert_eq!(fake.blocking(), blocked);
    ends(&mut *stager, 1);
}

#[test]
fn the_drivers_queue_never_fills() {
    for path in Path::ALL {
        let fake = Fake::cuda();
        let gpu = fake.gpu(Config { hops_max: 4_096, ..only(&fake, path) });
        let mut stager = gpu.stager(fake.location()).unwrap();
        let slot = stager.take().unwrap();
        let memory = fake.allocate(4_096);
        let one = |nth: u64| hop(nth, slot.index, nth as u32, memory.part(nth, 1).unwrap(), ToDevice);
        let hops: Vec<Hop> = (0..4_096).map(one).collect();
        fake.set("stalled", 1);
        let (mut begun, blocking) = (0, fake.blocking());
        loop {
            match stager.start(&hops[begun..]).unwrap() {
                0 => break,
                count => begun += count,
            }
        }
        assert_eq!(fake.blocking(), blocking, "{path}: calls that may wait, with {begun} hops");
        assert!(begun >= 500, "{path}: {begun}");
        fake.set("stalled", 0);
        all_are_ok(&ends(&mut *stager, begun)).unwrap();
        all_are_ok(&run(&mut *stager, &hops[begun..])).unwrap();
    }
}

#[test]
fn an_unknown_error_that_does_not_end_ends_the_hops() {
    for function in ["cuStreamQuery", "cuCtxPushCurrent_v2"] {
        let fake = Fake::cuda();
        let gpu = fake.gpu(only(&fake, Path::Loop));
        let mut stager = gpu.stager(fake.location()).unwrap();
        let slots = take_all(&mut *stager);
        let mixed = Mixed::new(&fake, &mut Rng::new(11), &slots);
        fake.set("stalled", 1);
        let begun = stager.start(&mixed.hops).unwrap();
        fake.fail(function, 0, 12_345);
        let mut out = [NO_END; 256];
        // Once in 16,384 polls the driver is asked; the eighth time it is the same.
        let ended = (0..9 << 14).map(|_| stager.poll(&mut out)).find(|count| *count > 0);
        assert_eq!(ended, Some(begun), "{function}");
        assert!(
            out[..begun].iter().all(|end| end.result.map_err(|error| error.kind) == Err(ErrorKind::Rail))
        );
        fake.fail(function, 0, 0).set("stalled", 0);
    }
}

#[test]
fn memory_of_another_context_is_not_copied_by_the_kernel() {
    let fake = Fake::cuda();
    let gpu = fake.gpu(only(&fake, Path::Kernel));
    let mut stager = gpu.stager(fake.location()).unwrap();
    let slots = take_all(&mut *stager);
    fake.set("foreign", 1);
    let foreign = Mixed::new(&fake, &mut Rng::new(12), &slots);
    fake.set("foreign", 0);
    let launches = fake.calls("cuLaunchKernel");
    all_are_ok(&run(&mut *stager, &foreign.hops)).unwrap();
    foreign.check(&fake, &slots);
    // What is remembered of the memory says so as well.
    all_are_ok(&run(&mut *stager, &foreign.hops)).unwrap();
    assert_eq!(fake.calls("cuLaunchKernel"), launches);
    let own = Mixed::new(&fake, &mut Rng::new(13), &slots);
    all_are_ok(&run(&mut *stager, &own.hops)).unwrap();
    own.check(&fake, &slots);
    assert!(fake.calls("cuLaunchKernel") > launches);
}

#[test]
fn a_batch_that_fails_is_drained_before_its_hops_end_with_the_error() {
    for (path, function) in [
        (Path::Batch, "cuMemcpyBatchAsync_v2"),
        (Path::Kernel, "cuLaunchKernel"),
        (Path::Loop, "cuMemcpyHtoDAsync_v2"),
    ] {
        let fake = Fake::cuda();
        let gpu = fake.gpu(only(&fake, path));
        let mut stager = gpu.stager(fake.location()).unwrap();
        let slots = take_all(&mut *stager);
        let memory = fake.allocate(16 * 4_096);
        let part = |nth: u64| memory.part(nth * 4_096, 4_096).unwrap();
        let hops: Vec<Hop> =
            (0..16).map(|nth| hop(nth, slots[nth as usize].index, 0, part(nth), ToDevice)).collect();
        fake.set("stalled", 1);
        let nth = if path == Path::Loop { 9 } else { 1 };
        fake.fail(function, nth, 1);
        assert_eq!(stager.start(&hops), Ok(16), "{path}");
        let mut out = [NO_END; 16];
        (0..100).for_each(|_| assert_eq!(stager.poll(&mut out), 0, "{path}: copies may run"));
        fake.set("stalled", 0);
        let failed = Err(Error::with_code(ErrorKind::System, 1));
        assert!(ends(&mut *stager, 16).iter().all(|end| end.result == failed), "{path}");
        all_are_ok(&run(&mut *stager, &hops)).unwrap();
    }
}

#[test]
fn a_mark_that_cannot_be_set_delays_the_ends_and_loses_none() {
    let fake = Fake::cuda();
    let gpu = fake.gpu(only(&fake, Path::Loop));
    let mut stager = gpu.stager(fake.location()).unwrap();
    let slots = take_all(&mut *stager);
    let mixed = Mixed::new(&fake, &mut Rng::new(4), &slots);
    fake.fail("cuStreamWriteValue64_v2", 2, 1);
    all_are_ok(&run(&mut *stager, &mixed.hops)).unwrap();
    mixed.check(&fake, &slots);
}

#[test]
fn when_the_context_dies_every_hop_ends_once_and_its_memory_is_never_used_again() {
    for in_flight in [true, false] {
        let fake = Fake::cuda();
        let gpu = fake.gpu(only(&fake, Path::Kernel));
        let mut stager = gpu.stager(fake.location()).unwrap();
        let slots = take_all(&mut *stager);
        let mixed = Mixed::new(&fake, &mut Rng::new(5), &slots);
        let half = mixed.hops.len() / 2;
        fake.set("stalled", 1);
        let begun = stager.start(&mixed.hops[..half]).unwrap();
        assert_eq!(begun, half);
        fake.set("sticky", 719);
        let mut begun = half;
        if !in_flight {
            // The next call notices; without one, polls do after a while.
            begun += stager.start(&mixed.hops[half..]).unwrap();
        }
        let ended = ends(&mut *stager, begun);
        assert!(ended.iter().all(|end| end.result.map_err(|error| error.kind) == Err(ErrorKind::Rail)));
        let mut tokens: Vec<u64> = ended.iter().map(|end| end.token.0).collect();
        tokens.sort_unstable();
        assert!(tokens.iter().enumerate().all(|(nth, token)| nth as u64 == *token), "each once");
        // The device may still write to the slots. Later ones are elsewhere: callers go on to `start`, which
        // fails.
        let before: Vec<usize> = slots.iter().map(|slot| slot.span.as_ptr().addr()).collect();
        slots.into_iter().for_each(|slot| stager.give_back(slot));
        let after = take_all(&mut *stager);
        assert_eq!(after.len(), before.len());
        for slot in &after {
            assert!(!before.contains(&slot.span.as_ptr().addr()));
            fake.fill(slot.span, &vec![1; slot.span.len()]);
        }
        assert_eq!(kind(stager.start(&mixed.hops[..1])), Err(ErrorKind::Rail));
        drop(stager);
        assert_eq!(gpu.stagers_quarantined(), 1);
        assert_eq!(kind(gpu.stager(fake.location()).map(|_| ())), Err(ErrorKind::Rail));
        fake.set("stalled", 0);
    }
}

#[test]
fn a_stager_that_is_dropped_waits_for_its_hops_and_not_for_ever() {
    let fake = Fake::cuda();
    let gpu = fake.gpu(Config { drain_ms_max: 20, ..only(&fake, Path::Batch) });
    let fill = |stager: &mut dyn Stager| {
        let slots = take_all(stager);
        let mixed = Mixed::new(&fake, &mut Rng::new(6), &slots);
        assert_eq!(stager.start(&mixed.hops), Ok(mixed.hops.len()));
        mixed
    };
    let mut stager = gpu.stager(fake.location()).unwrap();
    let mixed = fill(&mut *stager);
    drop(stager);
    assert!(fake.bytes(mixed.memory) == mixed.expected_memory, "the hops were over");
    assert_eq!(gpu.stagers_quarantined(), 0);

    let mut stager = gpu.stager(fake.location()).unwrap();
    fake.set("stalled", 1);
    let mixed = fill(&mut *stager);
    drop(stager);
    assert_eq!(gpu.stagers_quarantined(), 1);
    // What still runs reads and writes memory that is still there.
    fake.set("stalled", 0);
    // timing: the stream has no one who waits for it any more
    while fake.bytes(mixed.memory) != mixed.expected_memory {
        std::thread::yield_now();
    }
}

#[test]
fn paths_are_measured_in_the_time_that_is_set_and_printed() {
    let fake = Fake::cuda();
    let measured = Config { calibrate_ms_max: 20, hops_max: 1_024, ..fake.config() };
    let gpu = fake.gpu(measured);
    assert_eq!(gpu.plan(fake.location()), None);
    let launches = fake.calls("cuLaunchKernel");
    let stager = gpu.stager(fake.location()).unwrap();
    let plan = gpu.plan(fake.location()).unwrap();
    assert!(plan.offer().batch && plan.offer().kernel);
    assert!(fake.calls("cuLaunchKernel") > launches);
    assert_eq!(plan.table().to_string().lines().count(), 8);
    drop(stager);
    let again = fake.calls("cuMemcpyBatchAsync_v2");
    drop(gpu.stager(fake.location()).unwrap());
    assert!(fake.calls("cuMemcpyBatchAsync_v2") - again < 10, "once per device");
    let set = fake.gpu(only(&fake, Path::Batch));
    drop(set.stager(fake.location()).unwrap());
    let table = set.plan(fake.location()).unwrap().table();
    assert!(table.to_string().lines().all(|line| line.ends_with("batch batch batch")));
    assert!(!set.plan(fake.location()).unwrap().offer().kernel, "a path that is not wanted is not tried");
    drop((gpu, set));
    assert_eq!(fake.live(), 0);
}

#[test]
fn the_cpu_cannot_touch_memory_of_the_fake_device() {
    let fake = Fake::cuda();
    let memory = fake.allocate(4_096);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| line.starts_with(&format!("{:x}-", memory.as_ptr().addr())));
    assert!(line.unwrap().contains(" ---s "), "{line:?}");
}

#[test]
#[allow(unsafe_code, reason = "forks")]
fn a_fork_that_drops_a_stager_calls_nothing_and_touches_nothing() {
    let fake = Fake::cuda();
    let gpu = fake.gpu(only(&fake, Path::Loop));
    let mut stager = gpu.stager(fake.location()).unwrap();
    let mut gate = gpu.gate(fake.location()).unwrap();
    let slots = take_all(&mut *stager);
    let mixed = Mixed::new(&fake, &mut Rng::new(8), &slots);
    fake.set("stalled", 1);
    let begun = stager.start(&mixed.hops).unwrap();
    // SAFETY: the child drops values of ours, which call nothing and touch no memory that it lacks, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        gate.open();
        drop((stager, gate, gpu));
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(0) };
    }
    let mut status = -1;
    // SAFETY: waits for the child; writes one number.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0, "the child was ended by a signal, or failed");
    fake.set("stalled", 0);
    all_are_ok(&ends(&mut *stager, begun)).unwrap();
    mixed.check(&fake, &slots);
}

#[test]
fn what_is_not_memory_of_the_device_is_refused() {
    let fake = Fake::cuda();
    fake.set("devices", 2);
    let gpu = fake.gpu(fake.config());
    let here = te_core::Location::Device(fake.vendor(), 0);
    let mut stager = gpu.stager(here).unwrap();
    let slot = stager.take().unwrap();
    // The driver shows device 1 first.
    let (own, other) = (fake.allocate_at(1, 4_096, here), fake.allocate_at(0, 4_096, here));
    let mut host = [0_u8; 64];
    let past = MemSpan::new(own.as_ptr().wrapping_add(4_000), 97).at(here);
    for (what, span) in [
        ("host memory that is said to be the device's", MemSpan::new(host.as_mut_ptr(), 64).at(here)),
        ("a slot", MemSpan::new(slot.span.as_ptr(), 64).at(here)),
        ("memory of another device", other.part(0, 64).unwrap()),
        ("memory of the device that is said to be the host's", MemSpan::new(own.as_ptr(), 64)),
        ("memory past the end of an allocation", past),
        ("an address that nothing has", MemSpan::new(std::ptr::without_provenance_mut(64), 64).at(here)),
        (
            "the end of all addresses",
            MemSpan::new(std::ptr::without_provenance_mut(usize::MAX - 7), 64).at(here),
        ),
    ] {
        for direction in [ToDevice, ToHost] {
            let refused = stager.start(&[hop(1, slot.index, 0, span, direction)]);
            assert_eq!(kind(refused), Err(ErrorKind::InvalidArgument), "{what}");
            // Behind a good one, it is refused later.
            let good = hop(2, slot.index, 0, own.part(0, 64).unwrap(), direction);
            assert_eq!(stager.start(&[good, hop(3, slot.index, 64, span, direction)]), Ok(1), "{what}");
            ends(&mut *stager, 1);
        }
    }
}
