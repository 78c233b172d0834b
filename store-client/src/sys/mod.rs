//! The only unsafe code of the crate: memory that is reached by address.
#![allow(
    unsafe_code,
    reason = "registered memory is reached by address; the contract is that of Client::register"
)]

use te_core::{Access, MemSpan, RegionId, copy_bytes};
use te_engine::RegisterError;
use te_host::crc32c_at;

use crate::engine::Engine;

/// Registers plain memory of the caller's for the length of one operation.
///
/// # Safety
/// `span` was taken from a `&[u8]` (`LOCAL_READ` alone) or a `&mut [u8]`, whose borrow lasts until
/// `Engine::unregister` returned `Ok` for the region, and through which nothing is read or written until
/// then.
pub(crate) unsafe fn lend(
    engine: &mut Engine,
    span: MemSpan,
    access: Access,
) -> Result<RegionId, RegisterError> {
    // SAFETY: the caller's promise: the borrow keeps the span mapped, and nobody else uses it meanwhile.
    unsafe { engine.register(span, access) }
}

/// CRC-32C of registered memory, appended to that of what came before. It is read where it lies and never borrowed: a fabric may be writing it (L7), and then the
/// checksum is one of a mix and does not fit. `None` when the bytes do not lie inside.
pub(crate) fn checksum_span(so_far: u32, span: MemSpan, offset: u64, len: u64) -> Option<u32> {
    let part = span.part(offset, len).ok()?;
    // SAFETY: `span` is registered: the engine's own, which is held, or one whose owner promised in `Client::register`
    // that it stays mapped and readable until it is unregistered, when the table that it came from forgets it.
    Some(unsafe { crc32c_at(so_far, part.as_ptr(), part.len()) })
}

/// Copies registered memory to other registered memory, neither of them ever borrowed (L7). Does nothing when the bytes do not lie inside either, or the two overlap.
pub(crate) fn copy_span(from: MemSpan, from_offset: u64, to: MemSpan, to_offset: u64, len: u64) {
    let (Ok(from), Ok(to)) = (from.part(from_offset, len), to.part(to_offset, len)) else { return };
    if from.as_ptr().addr().abs_diff(to.as_ptr().addr()) < from.len() {
        return;
    }
    // SAFETY: both spans are registered and stay mapped, as in `checksum_span`; they do not overlap, which was checked.
    unsafe { copy_bytes(from.as_ptr(), to.as_ptr(), from.len()) };
}
