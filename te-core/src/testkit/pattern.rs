//! Bytes that both ends of a test know without having exchanged them.

use alloc::vec::Vec;

/// The first `len` bytes of the pattern that `seed` names. They differ from place to place and from seed to
/// seed.
///
/// ```
/// use te_core::testkit::{pattern, pattern_at};
///
/// assert_eq!(pattern(1, 100)[30..], pattern_at(1, 30, 70));
/// ```
#[must_use]
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    pattern_at(seed, 0, len)
}

/// `len` bytes of the pattern that `seed` names, from byte `offset` of it on.
#[must_use]
pub fn pattern_at(seed: u64, offset: u64, len: usize) -> Vec<u8> {
    let base = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d;
    let head = (offset % 8) as usize;
    let mut bytes = Vec::with_capacity(head + len + 8);
    let mut index = offset / 8;
    while bytes.len() < head + len {
        // The finaliser of SplitMix64 (Steele, Lea, Flood 2014), shortened: neighbours and seeds look
        // unrelated.
        let word = (base ^ index.wrapping_mul(0xbf58_476d_1ce4_e5b9)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bytes.extend_from_slice(&(word ^ (word >> 31)).to_le_bytes());
        index += 1;
    }
    bytes.truncate(head + len);
    bytes.drain(..head);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_the_same_wherever_it_begins() {
        let whole = pattern(3, 200);
        for offset in 0..40 {
            for len in [0, 1, 7, 8, 9, 100] {
                assert_eq!(pattern_at(3, offset as u64, len), whole[offset..offset + len]);
            }
        }
    }

    #[test]
    fn patterns_differ_by_seed_and_place() {
        let (a, b) = (pattern(1, 4096), pattern(2, 4096));
        let equal = a.iter().zip(&b).filter(|(a, b)| a == b).count();
        assert!(equal < 64, "{equal} of 4096 bytes are the same under two seeds");
        assert!(pattern(0, 64).chunks(8).skip(1).all(|word| word != &pattern(0, 8)[..]));
        assert_ne!(a[..2048], a[2048..]);
    }
}
