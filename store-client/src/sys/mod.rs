//! The unsafe code of the crate: access to memory by address.
#![allow(
    unsafe_code,
    reason = "registered memory is reached by address; the contract is that of Client::register"
)]

use te_core::{Access, MemSpan, MemoryKinds, RegionId, copy_bytes};
use te_engine::RegisterError;
use te_host::crc32c_at;

use crate::engine::Engine;

/// Registers the caller's plain memory for the duration of one operation.
///
/// # Safety
/// `span` was taken from a `&[u8]` (with `LOCAL_READ` alone) or a `&mut [u8]`. Its borrow lasts until
/// `Engine::unregister` has returned `Ok` for the region, and nothing is read or written through it until
/// then.
pub(crate) unsafe fn lend(
    engine: &mut Engine,
    span: MemSpan,
    access: Access,
) -> Result<RegionId, RegisterError> {
    // SAFETY: the caller promises that the borrow keeps the span mapped and that it is not used otherwise
    // meanwhile.
    unsafe { engine.register(span, access) }
}

/// Registers a staging slot, from and into which fabrics move the bytes of device memory.
///
/// # Safety
/// `span` is a slot that its stager has handed out. It is not given back and the stager is not dropped before
/// the region is unregistered or the engine is dropped.
pub(crate) unsafe fn register_slot(engine: &mut Engine, span: MemSpan) -> Result<RegionId, RegisterError> {
    // SAFETY: a slot that is taken stays mapped, and no reference to its bytes exists (the contract of
    // `Stager`); the caller promises for how long it is taken.
    unsafe { engine.register(span, Access::LOCAL) }
}

/// Registers a buffer that a transport reads into.
///
/// # Safety
/// `span` stays mapped, and nothing refers to its bytes, until the region is deregistered or the transport is
/// dropped.
#[cfg(feature = "nvmeof")]
pub(crate) unsafe fn register_buffer(
    memory: &mut impl te_core::Memory,
    id: RegionId,
    span: MemSpan,
) -> Result<(), te_core::Error> {
    // SAFETY: the caller promises what registration needs.
    unsafe { memory.register(id, span, Access::LOCAL) }
}

/// Copies bytes of registered host memory out. Does nothing when the range does not lie inside the span.
pub(crate) fn read_span(span: MemSpan, offset: u64, out: &mut [u8]) {
    let Ok(part) = span.require(MemoryKinds::HOST).and_then(|()| span.part(offset, out.len() as u64)) else {
        return;
    };
    // SAFETY: the span is registered, as in `checksum_span`; `out` is exclusively ours.
    unsafe { copy_bytes(part.as_ptr(), out.as_mut_ptr(), out.len()) };
}

/// Appends registered memory to a CRC-32C. The memory is read in place and never borrowed: a fabric may be
/// writing it (L7), and the checksum of such a mixture does not match. `None` when the range does not lie
/// inside the span, or the span is memory of a device.
pub(crate) fn checksum_span(so_far: u32, span: MemSpan, offset: u64, len: u64) -> Option<u32> {
    debug_assert!(span.require(MemoryKinds::HOST).is_ok(), "the CPU does not touch memory of a device");
    span.require(MemoryKinds::HOST).ok()?;
    let part = span.part(offset, len).ok()?;
    // SAFETY: `span` is registered: it is either memory of the engine, which is held, or memory whose owner
    // promised in `Client::register` that it stays mapped and readable until it is unregistered and removed
    // from the table.
    Some(unsafe { crc32c_at(so_far, part.as_ptr(), part.len()) })
}

/// Copies between two spans of registered memory, neither of which is ever borrowed (L7). Does nothing when a
/// range does not lie inside its span, when the two overlap, or when one is memory of a device.
pub(crate) fn copy_span(from: MemSpan, from_offset: u64, to: MemSpan, to_offset: u64, len: u64) {
    let is_host = [from, to].iter().all(|span| span.require(MemoryKinds::HOST).is_ok());
    debug_assert!(is_host, "the CPU does not touch memory of a device");
    if !is_host {
        return;
    }
    let (Ok(from), Ok(to)) = (from.part(from_offset, len), to.part(to_offset, len)) else { return };
    if from.as_ptr().addr().abs_diff(to.as_ptr().addr()) < from.len() {
        return;
    }
    // SAFETY: both spans are registered and stay mapped, as in `checksum_span`; that they do not overlap was
    // checked above.
    unsafe { copy_bytes(from.as_ptr(), to.as_ptr(), from.len()) };
}

/// Writes the beginning of the buffer of a job.
#[cfg(any(test, feature = "testkit"))]
pub(crate) fn write_job(job: &crate::stage::StageJob, bytes: &[u8]) -> Result<(), store_core::ErrorCode> {
    // SAFETY: the buffer is mapped as long as the job exists, and it is borrowed nowhere.
    let buffer = unsafe { te_core::VolatileSpan::new(job.buffer()) };
    buffer.write(0, bytes).map_err(|_| store_core::ErrorCode::InternalError)
}
