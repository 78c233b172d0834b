//! CRC-32C of memory that is reached by address: by folding where the processor can, else by the `crc32c` crate.

#[cfg(target_arch = "x86_64")]
mod fold;

/// Copied out at a time where memory is not read in place.
const PIECE_BYTES: usize = 8 << 10;

/// CRC-32C of `len` bytes at `bytes`, appended to that of what came before.
///
/// # Safety
/// The bytes are readable. They may change meanwhile; the result is then that of some mix.
pub(super) unsafe fn append(so_far: u32, bytes: *const u8, len: usize) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if len >= fold::BLOCK_BYTES && fold::can_fold() {
        // SAFETY: the processor can, and the caller's promise.
        return unsafe { fold::blocks(so_far, bytes, len) };
    }
    let mut crc = so_far;
    let mut piece = [0; PIECE_BYTES];
    let mut at = 0;
    while at < len {
        let part = (len - at).min(PIECE_BYTES);
        // SAFETY: `part` bytes from `at` on are inside what the caller promised; `piece` is ours.
        unsafe { te_core::copy_bytes(bytes.add(at), piece.as_mut_ptr(), part) };
        crc = crc32c::crc32c_append(crc, &piece[..part]);
        at += part;
    }
    crc
}
