//! Memory that the crate allocates, and what orders transfers with callers' work.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(unsafe_code, reason = "uses events and streams of a caller")]

mod common;

use std::os::unix::fs::FileExt;

use common::{Fake, ends, hop};
use te_core::device::{Devices, HopDirection};
use te_core::{ErrorKind, GpuVendor, Location};
use te_gpu::{After, Config, DeviceBuffer, Over};

fn round_trip(fake: &Fake, buffer: &DeviceBuffer) {
    let bytes: Vec<u8> = (0..buffer.span().len()).map(|at| at as u8).collect();
    buffer.write(0, &bytes).unwrap();
    assert!(fake.bytes(buffer.span()) == bytes);
    let mut out = vec![0; 100];
    buffer.read(50, &mut out).unwrap();
    assert!(out == bytes[50..150]);
    let past = buffer.span().len() as u64 - 99;
    assert_eq!(buffer.read(past, &mut out).map_err(|error| error.kind), Err(ErrorKind::OutOfRange));
    assert_eq!(buffer.write(past, &out).map_err(|error| error.kind), Err(ErrorKind::OutOfRange));
    assert_eq!(fake.context(), 0);
}

#[test]
fn a_buffer_has_every_type_of_handle_that_the_device_has() {
    for fake in [Fake::cuda(), Fake::hip()] {
        let gpu = fake.gpu(fake.config());
        let buffer = gpu.allocate(fake.location(), 5_000).unwrap();
        let types = buffer.handle_types();
        assert!(types.posix_fd && !types.fabric && !types.legacy_ipc, "{types:?}");
        if fake.vendor() == GpuVendor::Nvidia {
            // The device says that it has fabric handles, and refuses to make one.
            assert_eq!(buffer.refused().map(|error| error.code), Some(800));
        }
        assert_eq!((buffer.span().len(), buffer.shared_bytes()), (5_000, 2 << 20));
        round_trip(&fake, &buffer);
        let file = std::fs::File::from(buffer.export_fd().unwrap());
        let mut bytes = [0; 3];
        file.read_exact_at(&mut bytes, 10).unwrap();
        assert_eq!(bytes, [10, 11, 12]);
        for refused in [buffer.export_fabric().map(|_| ()), buffer.export_ipc().map(|_| ())] {
            assert_eq!(refused.map_err(|error| error.kind), Err(ErrorKind::Unsupported));
        }
        assert_eq!(gpu.locate(buffer.span().as_ptr(), 5_000), Some(fake.location()));
        // HIP does not say of an address how it can be shared.
        let is_posix_fd = gpu.examine(buffer.span()).unwrap().is_posix_fd;
        assert_eq!(is_posix_fd, fake.vendor() == GpuVendor::Nvidia);
        drop((buffer, gpu));
        assert_eq!(fake.live(), 0);
    }
}

#[test]
fn without_virtual_memory_management_a_buffer_is_plain_memory() {
    let fake = Fake::cuda();
    fake.set("virtual_memory", 0);
    let gpu = fake.gpu(fake.config());
    let buffer = gpu.allocate(fake.location(), 5_000).unwrap();
    assert!(buffer.handle_types().legacy_ipc && buffer.refused().is_none());
    assert_eq!(fake.calls("cuMemCreate"), 0);
    round_trip(&fake, &buffer);
    assert!(buffer.export_ipc().unwrap()[8..16] == (buffer.span().as_ptr().addr() as u64).to_le_bytes());
    assert_eq!(buffer.export_fd().map(|_| ()).map_err(|error| error.kind), Err(ErrorKind::Unsupported));
    drop((buffer, gpu));
    assert_eq!(fake.live(), 0);
}

#[test]
fn each_step_of_an_allocation_that_fails_is_undone() {
    // The first attempt asks for fabric handles, and does not come beyond `cuMemCreate`.
    for (step, first) in [
        ("cuMemGetAllocationGranularity", 2),
        ("cuMemCreate", 2),
        ("cuMemAddressReserve", 800),
        ("cuMemMap", 800),
        ("cuMemSetAccess", 800),
    ] {
        let fake = Fake::cuda();
        let gpu = fake.gpu(fake.config());
        fake.fail(step, 0, 2);
        let buffer = gpu.allocate(fake.location(), 5_000).unwrap();
        assert!(buffer.handle_types().legacy_ipc, "{step}: memory of the older kind is left");
        assert_eq!(buffer.refused().map(|error| error.code), Some(first), "{step}");
        fake.fail("cuMemAlloc_v2", 0, 2);
        let refused = gpu.allocate(fake.location(), 5_000).map(|_| ()).unwrap_err();
        assert_eq!((refused.kind, refused.code), (ErrorKind::Full, 2), "{step}");
        drop((buffer, gpu));
        assert_eq!(fake.live(), 0, "{step}");
    }
}

#[test]
fn what_cannot_be_allocated_is_refused() {
    let fake = Fake::cuda();
    let gpu = fake.gpu(fake.config());
    let kind = |location, bytes| gpu.allocate(location, bytes).map(|_| ()).map_err(|error| error.kind);
    assert_eq!(kind(fake.location(), 0), Err(ErrorKind::InvalidArgument));
    assert_eq!(kind(fake.location(), usize::MAX), Err(ErrorKind::InvalidArgument));
    assert_eq!(kind(fake.location(), isize::MAX as usize), Err(ErrorKind::Full));
    for location in
        [Location::Host, Location::Device(GpuVendor::Amd, 0), Location::Device(GpuVendor::Nvidia, 1)]
    {
        assert_eq!(kind(location, 1), Err(ErrorKind::Unsupported));
        assert!(gpu.stager(location).is_err());
    }
}

#[test]
fn work_after_an_event_of_the_caller_waits_for_it() {
    let fake = Fake::cuda();
    let gpu = fake.gpu(fake.config());
    let caller = fake.caller();
    let event = caller.record_behind_a_stall();
    // SAFETY: the event lives until the end of the test.
    let event = unsafe { gpu.event(fake.location(), event) }.unwrap();
    let mut queue = After::new();
    queue.hold(event, 5);
    assert_eq!(queue.next_ready(), None);
    fake.set("stalled", 0);
    // timing: the fake driver's stream goes on in its own thread
    let start = std::time::Instant::now();
    let ready = loop {
        if let Some(ready) = queue.next_ready() {
            break ready;
        }
        // timing: only a hang takes as long
        assert!(start.elapsed().as_secs() < 30);
        std::thread::yield_now();
    };
    assert_eq!(ready, (5, Ok(())));
    // SAFETY: a number that is no event: the driver refuses it.
    let nothing = unsafe { gpu.event(fake.location(), 12) }.unwrap();
    assert!(nothing.is_over().is_err());
    assert_eq!(fake.context(), 0);
}

#[test]
fn a_stream_of_the_caller_goes_on_when_its_gate_opens() {
    let fake = Fake::cuda();
    let gpu = fake.gpu(fake.config());
    let caller = fake.caller();
    for drops in [false, true] {
        let mut gate = gpu.gate(fake.location()).unwrap();
        // SAFETY: a stream of the device, which is idle before the devices are dropped.
        unsafe { gate.hold(caller.stream()) }.unwrap();
        let event = caller.record();
        // SAFETY: the event lives until the end of the test.
        let event = unsafe { gpu.event(fake.location(), event) }.unwrap();
        // timing: nothing is to happen in this time
        std::thread::sleep(std::time::Duration::from_millis(5));
        assert_eq!(event.is_over(), Ok(false));
        if drops {
            drop(gate);
        } else {
            gate.open();
        }
        while event.is_over() == Ok(false) {
            std::thread::yield_now();
        }
    }
    assert_eq!(fake.context(), 0);
}

#[test]
fn gates_run_out_and_come_back() {
    let fake = Fake::cuda();
    let gpu = fake.gpu(fake.config());
    let gates: Vec<_> = (0..1_024).map(|_| gpu.gate(fake.location()).unwrap()).collect();
    assert_eq!(gpu.gate(fake.location()).map(|_| ()).map_err(|error| error.kind), Err(ErrorKind::Full));
    drop(gates);
    assert!(gpu.gate(fake.location()).is_ok());
    drop(gpu);
    assert_eq!(fake.live(), 0);
    let hip = Fake::hip();
    let refused = hip.gpu(hip.config()).gate(hip.location()).map(|_| ());
    assert_eq!(refused.map_err(|error| error.kind), Err(ErrorKind::Unsupported));
}

#[test]
fn a_probe_reports_what_works_and_why_the_rest_does_not() {
    let fake = Fake::cuda();
    let gpu = fake.gpu(fake.config());
    let probe = gpu.probe(fake.location()).unwrap();
    assert_eq!((probe.stager, probe.posix_fd, probe.dmabuf), (Ok(()), Ok(()), Ok(())));
    assert!(probe.words && probe.batch && probe.kernel && !probe.is_peer_direct);
    assert_eq!(probe.fabric.map_err(|error| error.code), Err(800));
    assert!(probe.to_string().contains("shared by fabric handle: no: "), "{probe}");
    let old = Fake::cuda();
    old.set("version", 12_020).set("stream_writes", 0).set("dma_bufs", 0).set("virtual_memory", 0);
    old.fail("cuModuleLoadDataEx", 0, 218);
    let gpu = old.gpu(old.config());
    let probe = gpu.probe(old.location()).unwrap();
    assert!(!probe.words && !probe.batch && !probe.kernel && probe.posix_fd.is_err());
    assert_eq!(probe.dmabuf.map_err(|error| error.kind), Err(ErrorKind::Unsupported));
    assert!(gpu.probe(Location::Host).is_err());
    drop(gpu);
    assert_eq!(old.live(), 0);
}

#[test]
fn a_capture_of_the_callers_is_not_disturbed() {
    for fake in [Fake::cuda(), Fake::hip()] {
        fake.set("stream_writes", 0);
        let gpu = fake.gpu(fake.config());
        // Every call that a capture forbids fails.
        fake.set("capturing", 1);
        let memory = fake.allocate(4_096);
        let mut stager = gpu.stager(fake.location()).unwrap();
        let slot = stager.take().unwrap();
        let one = hop(1, slot.index, 0, memory, HopDirection::ToDevice);
        assert_eq!(stager.start(&[one]), Ok(1));
        assert!(ends(&mut *stager, 1)[0].result.is_ok());
        assert_eq!(fake.capture_mode(), 0);
    }
}

/// Uses everything, and looks after each call at what the thread has as its current context or device.
fn keeps_current(fake: &Fake, before: u64) {
    let check = |what: &str| assert_eq!((fake.context(), fake.capture_mode()), (before, 0), "after {what}");
    let gpu = fake.gpu(Config { calibrate_ms_max: 1, ..fake.config() });
    for location in [0, 1].map(|index| Location::Device(fake.vendor(), index)) {
        let buffer = gpu.allocate(location, 64 << 10).unwrap();
        check("allocate");
        buffer.write(0, &[1; 64]).unwrap();
        buffer.read(0, &mut [0; 64]).unwrap();
        check("read and write");
        drop(buffer.export_fd());
        check("export_fd");
        assert_eq!(gpu.locate(buffer.span().as_ptr(), 1), Some(location));
        check("locate");
        drop(gpu.dmabuf(buffer.span()).unwrap());
        check("dmabuf");
        let _not_on_hip = gpu.flush_writes(location);
        check("flush_writes");
        drop(gpu.gate(location));
        check("gate");
        gpu.probe(location).unwrap();
        check("probe");
        let mut stager = gpu.stager(location).unwrap();
        check("stager");
        let slot = stager.take().unwrap();
        for direction in [HopDirection::ToDevice, HopDirection::ToHost] {
            let part = |nth: u64| buffer.span().part(nth * 100, 50).unwrap();
            let hops: Vec<_> =
                (0..8).map(|nth| hop(nth, slot.index, nth as u32 * 64, part(nth), direction)).collect();
            assert_eq!(stager.start(&hops), Ok(8));
            check("start");
            ends(&mut *stager, 8);
            check("poll");
        }
        drop(stager);
        check("the drop of a stager");
        drop(buffer);
        check("the drop of a buffer");
    }
    drop(gpu);
    check("the drop of the devices");
}

#[test]
fn the_context_of_the_calling_thread_is_the_same_after_every_call() {
    for words in [1, 0] {
        let fake = Fake::cuda();
        fake.set("devices", 2).set("stream_writes", words);
        keeps_current(&fake, 0);
        fake.within(|| keeps_current(&fake, 1));
        let hip = Fake::hip();
        hip.set("devices", 2).set("stream_writes", words);
        for device in [0, 1] {
            hip.set_current(device);
            keeps_current(&hip, device as u64);
        }
    }
}
