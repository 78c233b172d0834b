//! All unsafe code of this crate: two calls of te-gpu whose promises come from elsewhere.
//!
//! Memory that callers registered stays as it is until `deregister` returned `Ok`, which it does not while
//! a slice uses the region, or its pages are being locked. Memory of peers stays mapped as long as the
//! value for it, which is dropped only while no copy uses it.
#![allow(unsafe_code, reason = "passes promises on to te-gpu; they are in this module's header")]

use std::sync::Arc;

use te_core::{Error, Location, MemSpan};
use te_gpu::{Copy, CopyQueue, Gpu, HostPin};

/// Host memory that stays mapped until the pin is dropped: a registered region, which is not deregistered
/// before, or the mapping of a peer's memory file, which is unmapped afterwards.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lasting(pub(crate) MemSpan);

/// Page-locks memory for a device.
pub(crate) fn pin(
    gpu: &Gpu,
    device: Location,
    memory: Lasting,
    writable: bool,
) -> Result<Arc<HostPin>, Error> {
    // SAFETY: what `Lasting` says. Memory that the region's rights allow peers or slices to write is mapped
    // writable, by the promise of `register`.
    unsafe { gpu.pin(device, memory.0, writable) }
}

/// Starts copies between regions and imports that stay as they are until the copies have ended.
pub(crate) fn start(queue: &mut CopyQueue, copies: &[Copy]) -> Result<usize, Error> {
    // SAFETY: each copy lies in a registered region and in memory of a peer that is mapped here, both checked
    // when its slice was accepted, and both pinned until the copy has ended.
    unsafe { queue.start(copies) }
}
