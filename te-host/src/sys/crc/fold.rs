//! CRC-32C by two units of the processor at once.
//!
//! A processor has one unit for the `crc32` instruction and another for carry-less multiplication, and a copy
//! from the cache uses neither. Each alone reached 23 GB/s on the machine where this was written, both
//! together 34. So a chunk is divided into four streams that do not depend on each other:
//!
//! ```text
//!   ┌── crc32 ──┬── crc32 ──┬── crc32 ──┬───── carry-less, eight lanes of 16 bytes ─────┐
//!   │ 40 B × 63 │ 40 B × 63 │ 40 B × 63 │                 128 B × 64                    │  15,752 bytes
//!   └───────────┴───────────┴───────────┴───────────────────────────────────────────────┘
//! ```
//!
//! and their checksums are combined at its end. The folding is Intel's ("Fast CRC Computation for Generic
//! Polynomials Using PCLMULQDQ Instruction", 2009) for reflected polynomials: a lane (low, high) moved D bits
//! ahead becomes `low × K(D + 32) ⊕ high × K(D - 32)`, `K(n) = reflect(xⁿ mod P) << 1`.
//!
//! A copy is interleaved chunk by chunk: while one chunk is summed, which leaves the memory bus idle, part of
//! the next is fetched. For memory that is not in the cache, copy and checksum together then take hardly
//! longer than the copy. (Storing from the registers of the checksum instead, word by word, was slower than
//! copying first and summing afterwards.) When the copy is unlikely to be read soon, storing past the cache
//! avoids fetching what is to be overwritten: 1 MiB between memory that is not in the cache took 67 µs with
//! its checksum, 94 µs through the cache, and 70 to 80 µs with `memcpy` and no checksum.
//!
//! The parent module uses other code where the processor has no `vpclmulqdq`, and for short memory.

use std::arch::is_x86_feature_detected;
use std::arch::x86_64::{
    __m128i, __m256i, _MM_HINT_T0, _mm_clmulepi64_si128, _mm_crc32_u8, _mm_crc32_u64, _mm_cvtsi32_si128,
    _mm_cvtsi128_si64, _mm_extract_epi64, _mm_prefetch, _mm_set_epi64x, _mm_setzero_si128, _mm_sfence,
    _mm_xor_si128, _mm256_broadcastsi128_si256, _mm256_castsi256_si128, _mm256_clmulepi64_epi128,
    _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_stream_si256, _mm256_xor_si256,
};

use te_core::crc32c_power as power;

/// Steps of one chunk.
const STEPS: usize = 64;
/// Bytes that the carry-less stream takes per step: four registers of two lanes.
const FOLD_BYTES: usize = 128;
/// Words that each of the three other streams takes per step: as many as can be processed during eight
/// multiplications.
const WORDS: usize = 5;
/// Bytes of each of the three streams in a chunk.
const STREAM_BYTES: usize = (STEPS - 1) * WORDS * 8;
/// Cache lines fetched ahead per step of a copy. Two, which is half of the next chunk, are better than none
/// and better than four.
const COPY_LINES: usize = 2;
/// The same when storing past the cache: all of the next chunk.
const STREAM_LINES: usize = 4;
/// Bytes that are stored past the cache at a time: two cache lines.
const STORE_BYTES: usize = 128;
/// Bytes of one chunk. For less, folding does not pay.
pub(super) const CHUNK_BYTES: usize = 3 * STREAM_BYTES + STEPS * FOLD_BYTES;

/// Whether this processor has the features that [`chunks`] needs.
pub(super) fn can_fold() -> bool {
    is_x86_feature_detected!("vpclmulqdq")
        && is_x86_feature_detected!("pclmulqdq")
        && is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("sse4.2")
}

/// CRC-32C of `len` bytes at `bytes`, appended to the checksum of earlier bytes.
///
/// # Safety
/// The bytes are readable, and the processor has the features.
#[target_feature(enable = "avx2,vpclmulqdq,pclmulqdq,sse4.2")]
pub(super) unsafe fn chunks(so_far: u32, bytes: *const u8, len: usize) -> u32 {
    // The instruction does not invert its input and output.
    let mut crc = !so_far;
    let mut at = 0;
    while at + CHUNK_BYTES <= len {
        // SAFETY: a chunk inside `len`.
        crc = unsafe { chunk::<0>(crc, bytes.add(at), std::ptr::null()) };
        at += CHUNK_BYTES;
    }
    // SAFETY: the rest of `len`.
    !unsafe { rest(crc, bytes.add(at), len - at) }
}

/// Copies `len` bytes, chunk by chunk, and returns the CRC-32C of what was written: it is computed at the
/// destination, because a peer may change the source during the call.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes, they do not overlap, and the processor has the
/// features.
#[target_feature(enable = "avx2,vpclmulqdq,pclmulqdq,sse4.2")]
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) -> u32 {
    let mut crc = !0;
    let mut at = 0;
    while at + CHUNK_BYTES <= len {
        // SAFETY: a chunk inside `len`.
        crc = unsafe {
            te_core::copy_bytes(from.add(at), to.add(at), CHUNK_BYTES);
            chunk::<COPY_LINES>(crc, to.add(at), from.wrapping_add(at + CHUNK_BYTES))
        };
        at += CHUNK_BYTES;
    }
    // SAFETY: the rest of `len`.
    !unsafe {
        te_core::copy_bytes(from.add(at), to.add(at), len - at);
        rest(crc, to.add(at), len - at)
    }
}

/// Copies `len` bytes past the cache, and returns the CRC-32C of the source, each byte of which is read
/// twice: if a peer changes the source during the call, the checksum does not match.
///
/// # Safety
/// As [`copy`].
#[target_feature(enable = "avx2,vpclmulqdq,pclmulqdq,sse4.2")]
pub(super) unsafe fn stream(from: *const u8, to: *mut u8, len: usize) -> u32 {
    // Stores past the cache write whole, aligned registers.
    let mut done = to.align_offset(align_of::<__m256i>()).min(len);
    // SAFETY: the bytes before the first aligned register.
    unsafe { te_core::copy_bytes(from, to, done) };
    let mut store_until = |until: usize| {
        while done < until && len - done >= STORE_BYTES {
            for at in (done..done + STORE_BYTES).step_by(size_of::<__m256i>()) {
                // SAFETY: inside `len`; `to + done` is aligned, and stays so.
                unsafe {
                    let register = _mm256_loadu_si256(from.add(at).cast());
                    _mm256_stream_si256(to.add(at).cast(), register);
                }
            }
            done += STORE_BYTES;
        }
        done
    };
    let (mut crc, mut at) = (!0, 0);
    while at + CHUNK_BYTES <= len {
        // This brings the chunk into the cache.
        store_until(at + CHUNK_BYTES);
        // SAFETY: a chunk inside `len`.
        crc = unsafe { chunk::<STREAM_LINES>(crc, from.add(at), from.wrapping_add(at + CHUNK_BYTES)) };
        at += CHUNK_BYTES;
    }
    let done = store_until(len);
    // SAFETY: the rest of `len`.
    unsafe {
        te_core::copy_bytes(from.add(done), to.add(done), len - done);
        crc = rest(crc, from.add(at), len - at);
    }
    // Such stores are not ordered before the stores that report the copy as done.
    _mm_sfence();
    !crc
}

/// `FETCH` cache lines per step are prefetched from the chunk at `next`. Prefetching from any address is
/// harmless.
///
/// # Safety
/// `CHUNK_BYTES` are readable, and the processor has the features.
#[target_feature(enable = "avx2,vpclmulqdq,pclmulqdq,sse4.2")]
unsafe fn chunk<const FETCH: usize>(crc: u32, bytes: *const u8, next: *const u8) -> u32 {
    // SAFETY: `at` is inside the chunk by at least a word or a register, at any alignment.
    let word = |at: usize| unsafe { bytes.add(at).cast::<u64>().read_unaligned() };
    // SAFETY: as above.
    let register = |at: usize| unsafe { _mm256_loadu_si256(bytes.add(at).cast::<__m256i>()) };
    let fold_at = 3 * STREAM_BYTES;
    let ahead = _mm256_broadcastsi128_si256(keys(KSTEP));
    let (mut a, mut b, mut c) = (u64::from(crc), 0, 0);
    let mut lanes =
        [register(fold_at), register(fold_at + 32), register(fold_at + 64), register(fold_at + 96)];
    for step in 1..STEPS {
        for line in 0..FETCH {
            let ahead = next.wrapping_add(((step - 1) * FETCH + line) * 64);
            _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
        }
        let from = fold_at + step * FOLD_BYTES;
        for (index, lane) in lanes.iter_mut().enumerate() {
            let low = _mm256_clmulepi64_epi128::<0x00>(*lane, ahead);
            let high = _mm256_clmulepi64_epi128::<0x11>(*lane, ahead);
            *lane = _mm256_xor_si256(_mm256_xor_si256(low, high), register(from + 32 * index));
        }
        let from = (step - 1) * WORDS * 8;
        for index in 0..WORDS {
            a = _mm_crc32_u64(a, word(from + 8 * index));
            b = _mm_crc32_u64(b, word(from + STREAM_BYTES + 8 * index));
            c = _mm_crc32_u64(c, word(from + 2 * STREAM_BYTES + 8 * index));
        }
    }
    // Combines eight lanes into one: each is moved ahead onto its neighbour.
    let next = keys(KLANE);
    let mut sum = _mm_setzero_si128();
    for lane in lanes {
        for half in [_mm256_castsi256_si128(lane), _mm256_extracti128_si256::<1>(lane)] {
            let low = _mm_clmulepi64_si128::<0x00>(sum, next);
            let high = _mm_clmulepi64_si128::<0x11>(sum, next);
            sum = _mm_xor_si128(_mm_xor_si128(low, high), half);
        }
    }
    let folded = _mm_crc32_u64(0, _mm_cvtsi128_si64(sum) as u64);
    let folded = _mm_crc32_u64(folded, _mm_extract_epi64::<1>(sum) as u64);
    shift(a, SHIFT_A) ^ shift(b, SHIFT_B) ^ shift(c, SHIFT_C) ^ folded as u32
}

/// # Safety
/// `len` bytes are readable, and the processor has the features.
#[target_feature(enable = "sse4.2")]
unsafe fn rest(crc: u32, bytes: *const u8, len: usize) -> u32 {
    let mut wide = u64::from(crc);
    let mut at = 0;
    while at + 8 <= len {
        // SAFETY: eight bytes inside `len`, at any alignment.
        wide = _mm_crc32_u64(wide, unsafe { bytes.add(at).cast::<u64>().read_unaligned() });
        at += 8;
    }
    let mut crc = wide as u32;
    while at < len {
        // SAFETY: a byte inside `len`.
        crc = _mm_crc32_u8(crc, unsafe { bytes.add(at).read() });
        at += 1;
    }
    crc
}

/// The checksum after as many zero bits as `key` stands for: the instruction itself multiplies by x³², and
/// the product of reflected factors lacks one x, so `key` is x^(bits - 33).
#[target_feature(enable = "pclmulqdq,sse4.2")]
fn shift(crc: u64, key: u32) -> u32 {
    let product =
        _mm_clmulepi64_si128::<0x00>(_mm_cvtsi32_si128(crc as u32 as i32), _mm_cvtsi32_si128(key as i32));
    _mm_crc32_u64(0, _mm_cvtsi128_si64(product) as u64) as u32
}

/// The multipliers that move a lane ahead.
#[target_feature(enable = "sse2")]
fn keys((low, high): (u64, u64)) -> __m128i {
    _mm_set_epi64x(high as i64, low as i64)
}

const KSTEP: (u64, u64) = lane_keys(FOLD_BYTES as u64 * 8);
const KLANE: (u64, u64) = lane_keys(128);
const SHIFT_A: u32 = power((2 * STREAM_BYTES + STEPS * FOLD_BYTES) as u64 * 8 - 33);
const SHIFT_B: u32 = power((STREAM_BYTES + STEPS * FOLD_BYTES) as u64 * 8 - 33);
const SHIFT_C: u32 = power((STEPS * FOLD_BYTES) as u64 * 8 - 33);

/// K(bits + 32) and K(bits - 32) of the module's documentation.
const fn lane_keys(bits: u64) -> (u64, u64) {
    ((power(bits + 32) as u64) << 1, (power(bits - 32) as u64) << 1)
}

#[cfg(test)]
mod tests {
    use super::super::crc32c_at;
    use super::*;

    fn bytes(len: usize) -> Vec<u8> {
        (0..len as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
    }

    #[test]
    fn it_agrees_with_the_crate_at_every_length_and_alignment() {
        if !can_fold() {
            println!("skipped: this processor has no vpclmulqdq");
        }
        let all = bytes(3 * CHUNK_BYTES + 100);
        for start in [0, 1, 7, 31] {
            for len in
                [CHUNK_BYTES, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES].into_iter().flat_map(|len| len..len + 20)
            {
                let part = &all[start..start + len];
                let so_far = len as u32 * 77;
                // SAFETY: a slice.
                let ours = unsafe { crc32c_at(so_far, part.as_ptr(), part.len()) };
                assert_eq!(ours, crc32c::crc32c_append(so_far, part), "{start}+{len}");
            }
        }
    }

    #[test]
    fn every_bit_counts() {
        let mut all = bytes(CHUNK_BYTES);
        // SAFETY: a slice.
        let good = unsafe { crc32c_at(0, all.as_ptr(), all.len()) };
        for at in (0..CHUNK_BYTES).step_by(13) {
            all[at] ^= 1 << (at % 8);
            // SAFETY: a slice.
            assert_ne!(unsafe { crc32c_at(0, all.as_ptr(), all.len()) }, good, "byte {at}");
            all[at] ^= 1 << (at % 8);
        }
    }

    #[test]
    fn a_copy_that_is_woven_in_is_exact_and_stays_in_its_place() {
        let all = bytes(2 * CHUNK_BYTES + 100);
        for len in [0, 1, 100, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 77, 2 * CHUNK_BYTES + 9] {
            let mut to = vec![0xee; len + 16];
            // SAFETY: both vectors are longer, and apart.
            let crc = unsafe { super::super::copy(all.as_ptr().add(3), to.as_mut_ptr().add(8), len) };
            assert_eq!(to[8..8 + len], all[3..3 + len], "{len}");
            assert!(to[..8].iter().chain(&to[8 + len..]).all(|&byte| byte == 0xee), "{len}");
            assert_eq!(crc, crc32c::crc32c(&all[3..3 + len]), "{len}");
        }
    }

    #[test]
    fn a_copy_past_the_cache_is_exact_and_stays_in_its_place() {
        let all = bytes(2 * CHUNK_BYTES + 200);
        for start in [0, 1, 31, 32] {
            for len in
                [0, 1, 31, 127, 128, 300, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 77, 2 * CHUNK_BYTES + 9]
            {
                let mut to = vec![0xee; len + 64];
                let place = to.as_mut_ptr().wrapping_add(start);
                // SAFETY: both vectors are longer, and apart.
                let crc = unsafe { super::super::copy_past_cache(all.as_ptr().add(3), place, len) };
                assert_eq!(to[start..start + len], all[3..3 + len], "{start}+{len}");
                assert!(
                    to[..start].iter().chain(&to[start + len..]).all(|&byte| byte == 0xee),
                    "{start}+{len}"
                );
                assert_eq!(crc, crc32c::crc32c(&all[3..3 + len]), "{start}+{len}");
            }
        }
    }

    #[test]
    fn what_is_short_is_right_as_well() {
        for len in [0, 1, 16, 4096, CHUNK_BYTES - 1] {
            let bytes = bytes(len);
            // SAFETY: a slice.
            assert_eq!(unsafe { crc32c_at(9, bytes.as_ptr(), len) }, crc32c::crc32c_append(9, &bytes));
        }
    }
}
