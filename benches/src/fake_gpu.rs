//! The fake driver of te-gpu, for benchmarks of what the code around a driver costs.

use std::path::PathBuf;

use te_core::Location;
use te_gpu::{Config, Gpu};

/// Bytes of a slot of a stager, and most bytes of a block of the benchmarks.
pub const SLOT_BYTES: u32 = 64 << 10;

/// The devices of the fake driver, and the location of the first. `None`, with a line that says so, where the
/// driver was not built in this profile.
///
/// # Panics
/// When the driver is there and cannot be used.
#[must_use]
pub fn fake_gpu() -> Option<(Gpu, Location)> {
    let library = library()?;
    let config = Config {
        cuda_library: Some(library),
        slot_bytes: SLOT_BYTES,
        ring_bytes: 256 * SLOT_BYTES,
        hops_max: 256,
        calibrate_ms_max: 0,
        sysfs: PathBuf::from("/nonexistent"),
        ..Config::default()
    };
    let gpu = Gpu::cuda(config).expect("valid settings");
    let location = gpu.devices().expect("the fake driver has a device")[0].location;
    Some((gpu, location))
}

fn library() -> Option<PathBuf> {
    let program = std::env::current_exe().ok()?;
    let library = program.parent()?.parent()?.join("examples/libcuda.so");
    if !library.exists() {
        println!(
            "nothing is measured: the fake driver is not there; run `cargo build -p te-gpu --features cuda,hip --examples`, \
             with --release for `cargo bench`"
        );
        return None;
    }
    Some(library)
}
