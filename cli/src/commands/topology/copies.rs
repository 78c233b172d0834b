//! How fast the GPUs of this host copy to and from host memory, measured through their stagers.

use std::time::{Duration, Instant};

use te_core::device::{Devices, Hop, HopDirection, HopEnd, Stager, StagingSlot};
use te_core::{Error, ErrorKind, Location, Token};
use te_gpu::Gpu;

use super::Copies;

/// Bytes that are copied in each direction.
const BYTES: u64 = 256 << 20;
/// Copies in flight.
const SLOTS_MAX: usize = 16;
/// A copy that takes longer is an error.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Measures every GPU that this build reaches.
pub(super) fn measure() -> Vec<(String, Result<Copies, String>)> {
    let made = [
        #[cfg(feature = "cuda")]
        ("cuda", Gpu::cuda(te_gpu::Config::default())),
        #[cfg(feature = "hip")]
        ("hip", Gpu::hip(te_gpu::Config::default())),
    ];
    let mut all = Vec::new();
    for (vendor, gpu) in made {
        match gpu.map_err(|error| error.to_string()).and_then(|gpu| {
            let devices = gpu.devices().map_err(|error| error.to_string())?;
            Ok((gpu, devices))
        }) {
            Ok((gpu, devices)) => all.extend(devices.iter().map(|device| {
                let copies = one(&gpu, device.location).map_err(|error| error.to_string());
                (device.location.to_string(), copies)
            })),
            Err(why) => all.push((vendor.to_owned(), Err(why))),
        }
    }
    all
}

fn one(gpu: &Gpu, location: Location) -> Result<Copies, Error> {
    // The first stager finds out which paths are the fastest.
    drop(gpu.stager(location)?);
    let to_device_gb_s = rate(gpu, location, HopDirection::ToDevice)?;
    let to_host_gb_s = rate(gpu, location, HopDirection::ToHost)?;
    let paths = gpu
        .plan(location)
        .map_or_else(Vec::new, |plan| plan.table().to_string().lines().map(str::to_owned).collect());
    Ok(Copies { to_device_gb_s, to_host_gb_s, paths })
}

/// GB/s of copies that each fill a slot.
fn rate(gpu: &Gpu, location: Location, direction: HopDirection) -> Result<f64, Error> {
    let mut stager = gpu.stager(location)?;
    let slot_bytes = u64::from(stager.slot_bytes());
    let slots: Vec<StagingSlot> = std::iter::from_fn(|| stager.take()).take(SLOTS_MAX).collect();
    let each = usize::try_from(slot_bytes).map_err(|_| ErrorKind::OutOfRange)?;
    let buffer = gpu.allocate(location, slots.len() * each)?;
    let hop = |(slot, nth): (&StagingSlot, u64)| {
        let device = buffer.span().part(nth * slot_bytes, slot_bytes)?;
        Ok(Hop { token: Token(nth), slot: slot.index, offset: 0, device, direction })
    };
    let hops: Vec<Hop> = slots.iter().zip(0..).map(hop).collect::<Result<_, Error>>()?;
    let rounds = (BYTES / (hops.len() as u64 * slot_bytes).max(1)).max(1);
    match copy(&mut *stager, &hops, rounds) {
        Ok(seconds) => {
            slots.into_iter().for_each(|slot| stager.give_back(slot));
            Ok((rounds * hops.len() as u64 * slot_bytes) as f64 / seconds / 1e9)
        }
        Err(error) => {
            // Copies may still run: their memory is not given back.
            std::mem::forget(buffer);
            Err(error)
        }
    }
}

/// Carries the hops out `rounds` times; returns how long it took, in seconds.
fn copy(stager: &mut dyn Stager, hops: &[Hop], rounds: u64) -> Result<f64, Error> {
    let mut ends = [HopEnd { token: Token(0), result: Ok(()) }; SLOTS_MAX];
    let begun = Instant::now();
    for _ in 0..rounds {
        let (mut started, mut ended) = (0, 0);
        while ended < hops.len() {
            if started < hops.len() {
                started += stager.start(&hops[started..])?;
            }
            let count = stager.poll(&mut ends);
            ends[..count].iter().try_for_each(|end| end.result)?;
            ended += count;
            if begun.elapsed() > TIMEOUT {
                return Err(ErrorKind::TimedOut.into());
            }
        }
    }
    Ok(begun.elapsed().as_secs_f64())
}
