//! Memory that one process shares and another one maps: two copies of the fake driver do not know each
//! other's memory. Copies between memory of all kinds.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(unsafe_code, reason = "starts copies between memory under test")]

mod common;

use common::Fake;
use te_core::device::HopEnd;
use te_core::testkit::Rng;
use te_core::{ErrorKind, Location, MemSpan, Token};
use te_gpu::{Config, Copy, CopyQueue, Gpu, Handle, NotShared, Place, SharedPart};

const MIB: usize = 1 << 20;

/// Who shares, and who maps.
fn two() -> [(Fake, Gpu); 2] {
    [(); 2].map(|()| {
        let fake = Fake::cuda();
        let gpu = fake.gpu(fake.config());
        (fake, gpu)
    })
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Rng::new(seed).fill(&mut bytes);
    bytes
}

/// Carries out copies between memory that exists until they have ended.
fn run(queue: &mut CopyQueue, copies: &[Copy]) -> Vec<HopEnd> {
    let (mut begun, mut ended) = (0, Vec::new());
    let mut out = [common::NO_END; 16];
    // timing: only a hang takes as long
    let start = std::time::Instant::now();
    while ended.len() < copies.len() {
        // SAFETY: the tests free nothing before the copies have ended, and make no references.
        begun += unsafe { queue.start(&copies[begun..]) }.unwrap_or(0);
        let count = queue.poll(&mut out);
        ended.extend_from_slice(&out[..count]);
        // timing: as above
        assert!(start.elapsed().as_secs() < 30, "{} of {} copies ended", ended.len(), copies.len());
    }
    ended
}

/// Copies that together cover `len` bytes, of lengths that divide nothing.
fn cut(to: Place, from: Place, len: usize) -> Vec<Copy> {
    let (mut at, mut copies, mut rng) = (0, Vec::new(), Rng::new(3));
    while at < len {
        let part = (1 + rng.below(150_000) as usize).min(len - at);
        let (to, from) = (to.plus(at as u64), from.plus(at as u64));
        copies.push(Copy { token: Token(copies.len() as u64), to, from, len: part as u32, kernel: true });
        at += part;
    }
    copies
}

#[test]
fn a_part_of_an_allocation_is_at_its_place_on_the_other_side() {
    let [(owner, shares), (other, maps)] = two();
    let whole = owner.allocate(8 * MIB);
    let span = whole.part(3 * MIB as u64 + 512, MIB as u64).unwrap();
    let parts = shares.share(span).unwrap();
    let [SharedPart { handle: Handle::Ipc(_), bytes: 8_388_608, offset: 3_146_240, len: 1_048_576 }] =
        parts[..]
    else {
        panic!("{parts:?}")
    };
    let mapped = maps.import(other.location(), &parts, true).unwrap();
    let again = maps.import(other.location(), &parts, true).unwrap();
    assert_eq!((mapped.len(), mapped.location()), (MIB as u64, other.location()));
    assert_eq!(mapped.place(), again.place(), "memory that is open already is counted");
    owner.fill(whole, &bytes(1, 8 * MIB));
    let here = other.allocate(MIB);
    let mut queue = maps.copy_queue(other.location()).unwrap();
    run(&mut queue, &cut(maps.place(here), mapped.place(), MIB));
    assert!(other.bytes(here) == owner.bytes(span));
    assert!(again.close());
    other.fill(here, &bytes(2, MIB));
    run(&mut queue, &cut(mapped.place(), maps.place(here), MIB));
    assert!(owner.bytes(span) == bytes(2, MIB));
    let left = whole.part(0, 3 * MIB as u64 + 512).unwrap();
    assert!(owner.bytes(left) == bytes(1, 8 * MIB)[..left.len()], "nothing beside it has changed");
    drop(queue);
    assert!(mapped.close());
    owner.free(whole);
    assert_eq!((owner.freed_while_open(), owner.wrong(), other.wrong()), (0, 0, 0));
}

#[test]
fn a_span_of_three_mappings_is_mapped_as_one() {
    let [(owner, shares), (other, maps)] = two();
    let whole = owner.map_chunks(3, 2 * MIB);
    let span = whole.part(100, 6 * MIB as u64 - 300).unwrap();
    let parts = shares.share(span).unwrap();
    assert_eq!(parts.iter().map(|part| part.offset).collect::<Vec<_>>(), [100, 0, 0]);
    assert!(parts.iter().all(|part| matches!(part.handle, Handle::Fd(_)) && part.bytes == 2 * MIB as u64));
    let mapped = maps.import(other.location(), &parts, false).unwrap();
    drop(parts);
    owner.fill(whole, &bytes(1, 6 * MIB));
    let here = other.allocate(span.len());
    let mut queue = maps.copy_queue(other.location()).unwrap();
    run(&mut queue, &cut(maps.place(here), mapped.place(), span.len()));
    assert!(other.bytes(here) == owner.bytes(span));
    // It was granted for reading alone.
    let end = run(&mut queue, &cut(mapped.place(), maps.place(here), 4_096)[..1]);
    assert!(end[0].result.is_err() && queue.is_dead(), "the device refuses to write");
    assert!(owner.bytes(span) == bytes(1, 6 * MIB)[100..6 * MIB - 200]);
}

#[test]
fn what_an_import_made_is_given_back_when_any_call_fails() {
    for call in ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"] {
        for nth in 1..=3 {
            let [(owner, shares), (other, maps)] = two();
            let parts = shares.share(owner.map_chunks(3, 2 * MIB)).unwrap();
            maps.devices().unwrap();
            other.fail(call, nth, 2);
            let result = maps.import(other.location(), &parts, true);
            let may_work = nth > 1 && matches!(call, "cuMemAddressReserve" | "cuMemSetAccess");
            assert_eq!(result.is_ok(), may_work, "{call} {nth}");
            drop(result);
            other.fail(call, 0, 0);
            drop(maps);
            assert_eq!((other.live(), other.wrong()), (0, 0), "{call} {nth}");
        }
    }
    let [(owner, shares), (other, maps)] = two();
    let mut parts = shares.share(owner.allocate(MIB)).unwrap();
    // An allocation that is shorter than its owner says.
    (parts[0].bytes, parts[0].len) = (2 * MIB as u64, 2 * MIB as u64);
    assert_eq!(maps.import(other.location(), &parts, true).unwrap_err().error.kind, ErrorKind::OutOfRange);
    drop(maps);
    assert_eq!(other.live(), 0);
}

#[test]
fn memory_that_could_not_be_unmapped_again_is_reported_as_mapped() {
    for (call, undo) in [("cuMemGetAddressRange_v2", "cuIpcCloseMemHandle"), ("cuMemSetAccess", "cuMemUnmap")]
    {
        for fails in [false, true] {
            let [(owner, shares), (other, maps)] = two();
            let is_ipc = undo == "cuIpcCloseMemHandle";
            let span = if is_ipc { owner.allocate(MIB) } else { owner.map_chunks(3, 2 * MIB) };
            let parts = shares.share(span).unwrap();
            maps.devices().unwrap();
            other.fail(call, 0, 2);
            if fails {
                other.fail(undo, 0, 2);
            }
            let why = maps.import(other.location(), &parts, true).unwrap_err();
            assert_eq!((why.stays_mapped, why.error.code), (fails, 2), "{call}");
            assert_eq!(why.to_string().contains("stays mapped"), fails);
        }
    }
}

#[test]
fn a_process_cannot_open_its_own_memory_by_ipc() {
    let [(owner, shares), _] = two();
    let parts = shares.share(owner.allocate(MIB)).unwrap();
    assert_eq!(shares.import(owner.location(), &parts, true).unwrap_err().error.code, 201);
}

#[test]
fn memory_without_a_handle_says_so() {
    let [(owner, shares), _] = two();
    owner.set("private", 1);
    let private = owner.allocate(MIB);
    let why = shares.share(private).unwrap_err();
    assert_eq!(why, NotShared::NoHandle { at: private.as_ptr().addr() });
    assert!(why.to_string().contains("cudaMallocAsync") && why.error().kind == ErrorKind::Unsupported);
    let mut host = [0_u8; 64];
    let why = shares.share(MemSpan::new(host.as_mut_ptr(), 64)).unwrap_err();
    assert!(why.to_string().contains("no allocation of device memory"), "{why}");
    let error = te_core::Error::with_code(ErrorKind::Unsupported, 800);
    let fabric = NotShared::Refused { handle: "fabric", error };
    assert!(fabric.to_string().contains("no IMEX channel"), "{fabric}");
    let refused = NotShared::Refused { handle: "IPC", error };
    assert!(refused.to_string().starts_with("the driver refused the IPC handle with 800"), "{refused}");
    owner.set("private", 0);
    owner.fail("cuIpcGetMemHandle", 1, 801);
    let why = shares.share(owner.allocate(MIB)).unwrap_err();
    assert!(matches!(why, NotShared::Refused { handle: "IPC", .. }) && why.error().code == 801, "{why}");
}

#[test]
fn a_queue_copies_between_devices_and_the_host_by_every_path() {
    for path in ["loop", "batch", "kernel"] {
        let fake = Fake::cuda();
        let sizes = [4_096, 16_384, 65_536, 262_144];
        let lines = sizes.map(|bytes| format!("to-device {bytes}: {path} {path} {path}"));
        let gpu = fake.gpu(Config { paths: Some(lines.join(";")), ..fake.config() });
        let (one, two) = (fake.allocate(MIB), fake.allocate(MIB));
        let heap = Box::into_raw(vec![0_u8; MIB].into_boxed_slice());
        let host = MemSpan::new(heap.cast(), MIB);
        // SAFETY: the memory is freed below, after the pin is dropped.
        let pin = unsafe { gpu.pin(fake.location(), host, true) }.unwrap();
        // SAFETY: as above.
        let same = unsafe { gpu.pin(fake.location(), host, true) }.unwrap();
        assert!(std::sync::Arc::ptr_eq(&pin, &same));
        let at_host = pin.place(host).unwrap();
        let mut queue = gpu.copy_queue(fake.location()).unwrap();
        assert!(queue.plan().offer().batch || queue.plan().offer().kernel);
        fake.fill(one, &bytes(1, MIB));
        let calls =
            || ["cuMemcpyAsync", "cuMemcpyBatchAsync_v2", "cuLaunchKernel"].map(|name| fake.calls(name));
        let (before, tried) = (fake.blocking(), calls());
        run(&mut queue, &cut(gpu.place(two), gpu.place(one), MIB));
        run(&mut queue, &cut(at_host, gpu.place(two), MIB));
        assert_eq!(fake.blocking(), before, "{path}");
        assert!(fake.bytes(host) == bytes(1, MIB), "{path}");
        fake.fill(host, &bytes(2, MIB));
        run(&mut queue, &cut(gpu.place(one), at_host, MIB));
        assert!(fake.bytes(one) == bytes(2, MIB), "{path}");
        let now = calls();
        let used = [0, 1, 2].map(|nth| now[nth] - tried[nth]);
        let copies = cut(at_host, at_host, MIB).len() as u64;
        match path {
            "loop" => assert_eq!(used, [3 * copies, 0, 0]),
            "batch" => assert!(used[1] > 2 && used[2] == 0, "{used:?}"),
            _ => assert!(used[2] > 2 && used[1] == 0, "{used:?}"),
        }
        // Pages that another span shares are not locked twice.
        let part = MemSpan::new(host.as_ptr(), 4_096);
        // SAFETY: as above.
        let foreign = unsafe { gpu.pin(fake.location(), part, true) }.unwrap();
        assert!(pin.allows_kernel() && !foreign.allows_kernel());
        drop((queue, pin, same, foreign, gpu));
        // SAFETY: made by `into_raw` above, and nothing uses it any more.
        drop(unsafe { Box::from_raw(heap) });
        fake.free(one);
        fake.free(two);
        assert_eq!((fake.live(), fake.wrong()), (0, 0), "{path}");
    }
}

#[test]
fn devices_that_reach_each_other_say_so() {
    let fake = Fake::cuda();
    fake.set("devices", 2);
    let gpu = fake.gpu(fake.config());
    let [one, two] = [0, 1].map(|index| Location::Device(fake.vendor(), index));
    assert!(gpu.reaches(one, two) && gpu.reaches(one, one) && !gpu.reaches(one, Location::Host));
    fake.set("peer_access", 0);
    assert!(!gpu.reaches(one, two) && gpu.reaches(two, two));
}

#[test]
fn an_error_of_a_launch_ends_its_copies_and_the_queue_goes_on() {
    let fake = Fake::cuda();
    let gpu = fake.gpu(fake.config());
    let (one, two) = (fake.allocate(MIB), fake.allocate(MIB));
    let mut queue = gpu.copy_queue(fake.location()).unwrap();
    fake.fail("cuMemcpyAsync", 1, 2);
    let copy = cut(gpu.place(two), gpu.place(one), 4_096);
    assert!(run(&mut queue, &copy[..1])[0].result.is_err());
    fake.fill(one, &bytes(5, MIB));
    assert!(run(&mut queue, &copy[..1])[0].result.is_ok());
    let first = copy[0].len as usize;
    assert!(fake.bytes(two)[..first] == bytes(5, MIB)[..first]);
    assert_eq!(queue.drain(), Ok(()));
}
