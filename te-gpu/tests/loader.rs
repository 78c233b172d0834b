//! Why there is no GPU, and that a process with host memory alone never loads a driver.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::path::Path;
use std::process::Command;

use common::{Fake, config_of, copy_of};
use te_core::device::Devices;
use te_core::{ErrorKind, GpuVendor, Location, MemSpan, MemoryKinds};
use te_gpu::{Config, Gpu, NoGpu};

fn is_mapped(path: &Path) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().any(|line| line.ends_with(path.to_str().unwrap()))
}

/// Why the devices cannot be used, and that asking again gives the same answer.
fn reason(gpu: &Gpu) -> NoGpu {
    let reason = gpu.devices().unwrap_err();
    assert_eq!(gpu.devices().unwrap_err(), reason);
    assert_eq!(gpu.locate(std::ptr::without_provenance_mut(1 << 40), 1), None);
    let refused = gpu.stager(Location::Device(GpuVendor::Nvidia, 0)).map(|_| ()).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Unsupported);
    reason
}

#[test]
fn a_library_that_is_missing_is_a_reason() {
    let gpu = Gpu::cuda(config_of(GpuVendor::Nvidia, Path::new("/nonexistent/libcuda.so"))).unwrap();
    let text = reason(&gpu).to_string();
    assert!(text.starts_with("no CUDA device here, because the driver's library cannot be loaded"), "{text}");
    assert!(text.contains("/nonexistent/libcuda.so") && text.contains("install the GPU's driver"), "{text}");
}

#[test]
fn a_file_that_is_no_library_is_a_reason() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("libcuda.so");
    std::fs::write(&path, "no library").unwrap();
    let text = reason(&Gpu::cuda(config_of(GpuVendor::Nvidia, &path)).unwrap()).to_string();
    assert!(text.contains("too short") || text.contains("ELF"), "{text}");
}

#[test]
fn a_driver_that_is_too_old_is_a_reason() {
    for (fake, version, hint) in [(Fake::cuda(), 11_080, "CUDA 12.0"), (Fake::hip(), 50_700_000, "ROCm 6.0")]
    {
        fake.set("version", version);
        let gpu = fake.gpu(fake.config());
        let found = gpu.devices().unwrap_err();
        assert_eq!(found, NoGpu::OldDriver { vendor: fake.vendor(), version: version as i32 });
        let text = found.to_string();
        assert!(text.contains(&version.to_string()) && text.contains(hint), "{text}");
        let init = if fake.vendor() == GpuVendor::Amd { "hipInit" } else { "cuInit" };
        assert_eq!(fake.calls(init), 0, "it is not started");
    }
}

#[test]
fn a_host_without_a_device_is_a_reason() {
    let fake = Fake::cuda();
    fake.set("devices", 0);
    let text = reason(&fake.gpu(fake.config())).to_string();
    assert!(text.contains("the driver has no device: load its kernel module"), "{text}");
}

#[test]
fn devices_that_are_hidden_are_a_reason_that_names_the_variable() {
    const HIDDEN: &str = "CUDA_VISIBLE_DEVICES";
    if std::env::var_os("TE_GPU_CHILD").is_some() {
        let fake = Fake::cuda();
        let text = reason(&fake.gpu(fake.config())).to_string();
        assert!(
            text.contains("shows no device to this process: CUDA_VISIBLE_DEVICES is \"\", unset it"),
            "{text}"
        );
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "devices_that_are_hidden_are_a_reason_that_names_the_variable"]);
    assert!(child.env(HIDDEN, "").env("TE_GPU_CHILD", "1").status().unwrap().success());
}

#[test]
fn a_driver_that_does_not_start_is_a_reason_with_its_number_and_name() {
    let fake = Fake::cuda();
    fake.fail("cuInit", 0, 999);
    let text = reason(&fake.gpu(fake.config())).to_string();
    assert!(text.contains("`cuInit` failed with 999 (FAKE_ERROR_UNKNOWN): check that"), "{text}");
}

#[test]
fn a_process_with_host_memory_alone_never_loads_the_driver() {
    let (_directory, path) = copy_of(GpuVendor::Nvidia);
    let gpu = Gpu::cuda(config_of(GpuVendor::Nvidia, &path)).unwrap();
    let mut bytes = vec![0_u8; 4_096];
    let span = MemSpan::new(bytes.as_mut_ptr(), bytes.len());
    assert_eq!(gpu.locate(span.as_ptr(), span.len()), None);
    assert_eq!(gpu.examine(span).map_err(|error| error.kind), Err(ErrorKind::NotFound));
    assert_eq!(gpu.kinds(), MemoryKinds::CUDA, "the library was named");
    assert!(!gpu.is_peer_direct(Location::Device(GpuVendor::Nvidia, 0)));
    assert!(!gpu.is_loaded() && !is_mapped(&path));
    drop(
        te_tcp::TcpTransport::with_devices(te_tcp::Config::default(), std::sync::Arc::new(gpu.clone()))
            .unwrap(),
    );
    assert!(!gpu.is_loaded() && !is_mapped(&path));
    // The check is one that can fail.
    assert_eq!(gpu.devices().unwrap().len(), 1);
    assert!(gpu.is_loaded() && is_mapped(&path));
}

#[test]
fn memory_of_a_driver_that_the_caller_loaded_is_found() {
    let fake = Fake::cuda();
    let gpu = fake.gpu(fake.config());
    // The library is mapped, but nothing has started the driver.
    assert_eq!(gpu.locate(std::ptr::without_provenance_mut(1 << 40), 1), None);
    assert_eq!((gpu.is_loaded(), fake.calls("cuInit")), (false, 0));
    let span = fake.allocate(4_096);
    assert!(!gpu.is_loaded());
    assert_eq!(gpu.locate(span.as_ptr(), span.len()), Some(fake.location()));
    assert!(gpu.is_loaded());
}

#[test]
fn without_a_driver_there_are_no_kinds_of_memory() {
    let empty = tempfile::tempdir().unwrap();
    let config = Config { dev: empty.path().to_owned(), ..Config::default() };
    assert_eq!(Gpu::cuda(config.clone()).unwrap().kinds(), MemoryKinds::empty());
    std::fs::write(empty.path().join("kfd"), "").unwrap();
    assert_eq!(Gpu::cuda(config.clone()).unwrap().kinds(), MemoryKinds::empty());
    assert_eq!(Gpu::hip(config).unwrap().kinds(), MemoryKinds::HIP);
}

#[test]
fn a_setting_outside_its_limits_is_refused() {
    let error = Gpu::cuda(Config { slot_bytes: 1, ..Config::default() }).unwrap_err();
    assert!(error.to_string().contains("slot_bytes is 1"), "{error}");
}
