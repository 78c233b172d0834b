//! CRC-32C of memory that is given by its address, alone or during a copy: by folding where the processor
//! supports it, otherwise with the `crc32c` crate.

#[cfg(target_arch = "x86_64")]
mod fold;

/// Bytes that are copied out at a time when memory is not read in place.
const PIECE_BYTES: usize = 8 << 10;

/// CRC-32C of `bytes`, appended to the checksum `so_far` of earlier bytes; 0 at the beginning.
#[must_use]
pub fn crc32c_of(so_far: u32, bytes: &[u8]) -> u32 {
    // SAFETY: a slice is readable over its length.
    unsafe { crc32c_at(so_far, bytes.as_ptr(), bytes.len()) }
}

/// CRC-32C of `len` bytes at `bytes`, appended to the checksum `so_far` of earlier bytes; 0 at the beginning.
/// For memory to which no reference may be made.
///
/// # Safety
/// The bytes are readable. They may change during the call; the result is then the checksum of some mix of
/// old and new bytes.
#[must_use]
pub unsafe fn crc32c_at(so_far: u32, bytes: *const u8, len: usize) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if len >= fold::CHUNK_BYTES && fold::can_fold() {
        // SAFETY: the processor has the features; the rest is the caller's promise.
        return unsafe { fold::chunks(so_far, bytes, len) };
    }
    let mut crc = so_far;
    let mut piece = [0; PIECE_BYTES];
    let mut at = 0;
    while at < len {
        let part = (len - at).min(PIECE_BYTES);
        // SAFETY: `part` bytes from `at` on are inside what the caller promised; `piece` is a local array.
        unsafe { te_core::copy_bytes(bytes.add(at), piece.as_mut_ptr(), part) };
        crc = crc32c::crc32c_append(crc, &piece[..part]);
        at += part;
    }
    crc
}

/// Copies `len` bytes and returns the CRC-32C of what was written.
///
/// Where the processor can fold, copying and summing are interleaved: memory that is not in the cache takes
/// longer to load than to sum.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes, and they do not overlap. A peer may change `from`
/// during the call.
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if len >= fold::CHUNK_BYTES && fold::can_fold() {
        // SAFETY: the processor has the features; the rest is the caller's promise.
        return unsafe { fold::copy(from, to, len) };
    }
    // SAFETY: the caller's promise.
    unsafe {
        te_core::copy_bytes(from, to, len);
        // The checksum is that of the written bytes: a peer may have changed the source since.
        crc32c_at(0, to, len)
    }
}

/// As [`copy`], for bytes that are unlikely to be read soon: they are stored past the cache where the
/// processor supports it. The CRC-32C is that of the source; when a peer changes the source during the call,
/// it does not match what was written.
///
/// # Safety
/// As [`copy`].
pub(super) unsafe fn copy_past_cache(from: *const u8, to: *mut u8, len: usize) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if fold::can_fold() {
        // SAFETY: the processor has the features; the rest is the caller's promise.
        return unsafe { fold::stream(from, to, len) };
    }
    // SAFETY: the caller's promise.
    unsafe { copy(from, to, len) }
}
