//! Memory of a GPU in an engine's transfers, with the fake driver of te-gpu. No GPU is behind it.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]

mod common;

use std::path::PathBuf;
use std::time::Duration;

use common::{EVERYTHING, bytes, pattern, request};
use te_core::{Access, ErrorKind, MemSpan, Op, Status};
use te_engine::{Config, Fabrics, RegisterError, StartError, TransferEngine};
use te_gpu::{DeviceBuffer, Gpu};

const LEN: usize = 1 << 20;

/// The fake driver, which `cargo test --workspace` builds as an example of te-gpu.
fn fake_driver() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let path = tests.parent().unwrap().parent().unwrap().join("examples/libcuda.so");
    assert!(path.exists(), "{} was not built: run `cargo build -p te-gpu --examples`", path.display());
    path
}

fn settings(library: PathBuf) -> te_gpu::Config {
    let mut settings = te_gpu::Config::default();
    (settings.cuda_library, settings.calibrate_ms_max) = (Some(library), 0);
    settings
}

fn engine(library: PathBuf, fabrics: &str) -> Result<TransferEngine, StartError> {
    let fabrics: Fabrics = fabrics.parse().unwrap();
    TransferEngine::start(Config { fabrics, gpu: settings(library), ..Config::default() })
}

/// A device with its driver loaded, as in a process whose framework has used it.
fn device(library: PathBuf) -> (Gpu, te_core::Location) {
    let gpu = Gpu::cuda(settings(library)).unwrap();
    let location = gpu.devices().unwrap()[0].location;
    (gpu, location)
}

fn host_span(buffer: &DeviceBuffer) -> MemSpan {
    // As a caller gives it that knows nothing but an address.
    MemSpan::new(buffer.span().as_ptr(), buffer.span().len())
}

#[test]
#[cfg(feature = "tcp")]
#[allow(unsafe_code, reason = "the test keeps the buffers until they are unregistered")]
fn device_memory_is_found_by_its_address_and_moves_over_tcp_at_both_ends() {
    let library = fake_driver();
    let (gpu, location) = device(library.clone());
    let (ours, theirs) = (engine(library.clone(), "tcp").unwrap(), engine(library, "tcp").unwrap());
    let (from, into) = (gpu.allocate(location, LEN).unwrap(), gpu.allocate(location, LEN).unwrap());
    let host = theirs.alloc_shared(LEN, EVERYTHING).unwrap();
    // SAFETY: the buffers are dropped after the engines have unregistered them.
    let (source, there) = unsafe {
        let source = ours.register(host_span(&from), Access::LOCAL).unwrap();
        (source, theirs.register(host_span(&into), EVERYTHING).unwrap())
    };
    let content = pattern(7, LEN);
    from.write(0, &content).unwrap();

    let segment = ours.open_segment(theirs.name()).unwrap();
    let transfer = |op, address: u64| {
        let requests = [request(op, (source, 0), segment, address, LEN as u64)];
        let batch = ours.submit(&requests, None).unwrap();
        let report = batch.wait(Some(Duration::from_secs(20))).unwrap();
        assert_eq!(report.status, Status::Completed, "{report:?}");
    };
    // Device to host.
    transfer(Op::Write, host.addr());
    assert_eq!(bytes(&host), content);
    // Device to device.
    let device_address = into.span().as_ptr().addr() as u64;
    transfer(Op::Write, device_address);
    let mut read = vec![0; LEN];
    into.read(0, &mut read).unwrap();
    assert_eq!(read, content);
    // And back into the first buffer, which has something else meanwhile.
    from.write(0, &vec![0xff; LEN]).unwrap();
    transfer(Op::Read, device_address);
    from.read(0, &mut read).unwrap();
    assert_eq!(read, content);
    ours.unregister(source).unwrap();
    theirs.unregister(there).unwrap();
}

#[test]
#[allow(unsafe_code, reason = "the registration is refused")]
fn fabrics_without_a_way_to_a_device_refuse_its_memory() {
    let library = fake_driver();
    let (gpu, location) = device(library.clone());
    let engine = engine(library, "shm").unwrap();
    let buffer = gpu.allocate(location, LEN).unwrap();
    // SAFETY: nothing is registered.
    let refused = unsafe { engine.register(host_span(&buffer), EVERYTHING) };
    assert!(
        matches!(refused, Err(RegisterError::Rails(error)) if error.kind == ErrorKind::Unsupported),
        "{refused:?}"
    );
}

#[test]
#[cfg(feature = "tcp")]
#[allow(unsafe_code, reason = "the registrations are refused")]
fn a_span_that_leaves_device_memory_is_refused_and_not_taken_for_host_memory() {
    let library = fake_driver();
    let (gpu, location) = device(library.clone());
    let engine = engine(library, "tcp,shm").unwrap();
    let buffer = gpu.allocate(location, LEN).unwrap();
    let ptr = buffer.span().as_ptr();
    let beyond = buffer.shared_bytes().max(LEN) + 1;
    for span in [MemSpan::new(ptr, beyond), MemSpan::new(ptr.wrapping_sub(1), LEN)] {
        // SAFETY: nothing is registered.
        let refused = unsafe { engine.register(span, EVERYTHING) };
        assert!(matches!(refused, Err(RegisterError::Rails(_))), "{refused:?}");
    }
}

#[test]
fn a_setting_that_is_out_of_its_limits_is_named() {
    let mut config = Config::default();
    config.gpu.slot_bytes = 1;
    let error = TransferEngine::start(config).map(drop).unwrap_err();
    assert!(error.to_string().contains("gpu: setting slot_bytes is 1"), "{error}");
}

/// Through the handles of the driver, without a byte in host memory.
#[cfg(feature = "nvlink")]
#[test]
#[allow(unsafe_code, reason = "the test keeps the buffers until they are unregistered")]
fn device_memory_of_another_engine_is_reached_without_a_network() {
    let library = fake_driver();
    let (gpu, location) = device(library.clone());
    let named = "nvlink,shm,tcp";
    let (ours, theirs) = (engine(library.clone(), named).unwrap(), engine(library, named).unwrap());
    let (from, into) = (gpu.allocate(location, LEN).unwrap(), gpu.allocate(location, LEN).unwrap());
    let host = theirs.alloc_shared(LEN, EVERYTHING).unwrap();
    let own_host = ours.alloc_shared(LEN, Access::LOCAL).unwrap();
    // SAFETY: the buffers are dropped after the engines have unregistered them.
    let (source, there) = unsafe {
        let source = ours.register(host_span(&from), Access::LOCAL).unwrap();
        (source, theirs.register(host_span(&into), EVERYTHING).unwrap())
    };
    let content = pattern(7, LEN);
    from.write(0, &content).unwrap();
    let segment = ours.open_segment(theirs.name()).unwrap();
    let moved = |fabric: &str| {
        let stats = ours.stats();
        stats.rails.iter().filter(|rail| rail.name == fabric).map(|rail| rail.bytes).sum::<u64>()
    };
    let transfer = |op, local, address: u64| {
        let requests = [request(op, (local, 0), segment, address, LEN as u64)];
        let report = ours.submit(&requests, None).unwrap().wait(Some(Duration::from_secs(20))).unwrap();
        assert_eq!(report.status, Status::Completed, "{report:?}");
    };
    let device_address = into.span().as_ptr().addr() as u64;
    transfer(Op::Write, source, device_address);
    assert_eq!((moved("nvlink"), moved("tcp")), (LEN as u64, 0), "device to device");
    let mut read = vec![0; LEN];
    into.read(0, &mut read).unwrap();
    assert_eq!(read, content);
    transfer(Op::Write, source, host.addr());
    assert_eq!((moved("nvlink"), bytes(&host) == content), (2 * LEN as u64, true), "device to host");
    transfer(Op::Read, own_host.id(), device_address);
    assert_eq!((moved("nvlink"), bytes(&own_host) == content), (3 * LEN as u64, true), "host from device");
    // What is host memory at both ends goes by shared memory.
    transfer(Op::Write, own_host.id(), host.addr());
    assert_eq!((moved("nvlink"), moved("shm"), moved("tcp")), (3 * LEN as u64, LEN as u64, 0));

    ours.close_segment(segment).unwrap();
    ours.unregister(source).unwrap();
    theirs.unregister(there).unwrap();
}

#[test]
#[cfg(all(feature = "nvlink", feature = "tcp"))]
#[allow(unsafe_code, reason = "the test keeps the buffers until they are unregistered")]
fn why_memory_is_not_exported_over_nvlink_is_in_the_list_of_what_is_left_out() {
    let library = fake_driver();
    let (gpu, location) = device(library.clone());
    let engine = engine(library, "nvlink,tcp").unwrap();
    let (device, shared) =
        (gpu.allocate(location, LEN).unwrap(), engine.alloc_shared(LEN, EVERYTHING).unwrap());
    let heap = vec![0_u8; LEN].into_boxed_slice();
    let heap = MemSpan::new(Box::into_raw(heap).cast(), LEN);
    // SAFETY: the buffer is dropped after the engine has unregistered it, and the heap is never freed.
    let (exported, private, not_shared) = unsafe {
        let exported = engine.register(host_span(&device), EVERYTHING).unwrap();
        let part = MemSpan::new(heap.as_ptr(), LEN / 2);
        let private = engine.register(part, Access::LOCAL).unwrap();
        let rest = MemSpan::new(heap.as_ptr().wrapping_add(LEN / 2), LEN / 2);
        (exported, private, engine.register(rest, EVERYTHING).unwrap())
    };
    let left_out = engine.left_out();
    let [only] = &left_out[..] else { panic!("{left_out:?}") };
    assert_eq!((only.region, only.fabric, only.registered), (not_shared, "nvlink", true));
    assert!(only.why.contains("not in a memory file"), "{}", only.why);
    engine.unregister(not_shared).unwrap();
    assert_eq!(engine.left_out(), []);
    engine.unregister(exported).unwrap();
    engine.unregister(private).unwrap();
    drop(shared);
}
