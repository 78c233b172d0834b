//! The only unsafe code of the crate: memory that is reached by address.
#![allow(
    unsafe_code,
    reason = "registered memory is reached by address; the contract is that of Client::register"
)]

use te_engine::{MemSpan, crc32c_at};

/// CRC-32C of registered memory, appended to that of what came before. It is read where it lies and never borrowed: a fabric may be writing it (L7), and then the
/// checksum is one of a mix and does not fit. `None` when the bytes do not lie inside.
pub(crate) fn checksum_span(so_far: u32, span: MemSpan, offset: u64, len: u64) -> Option<u32> {
    let part = span.part(offset, len).ok()?;
    // SAFETY: `span` is registered: the engine's own, which is held, or one whose owner promised in `Client::register`
    // that it stays mapped and readable until it is unregistered, when the table that it came from forgets it.
    Some(unsafe { crc32c_at(so_far, part.as_ptr(), part.len()) })
}
