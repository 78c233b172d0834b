//! Bytes that both sides know without having exchanged them: a pattern that differs with the seed and with every place.

use te_engine::SharedRegion;

/// What fills memory that nobody may write any more.
pub(crate) const CANARY: u64 = 0xCA;

/// `len` bytes of the pattern of `seed`.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len.next_multiple_of(8));
    let base = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    for index in 0..len.div_ceil(8) as u64 {
        // The finaliser of SplitMix64 (Steele, Lea, Flood 2014), shortened: neighbours and seeds look unrelated.
        let word = (base ^ index.wrapping_mul(0xBF58_476D_1CE4_E5B9)).wrapping_mul(0x94D0_49BB_1331_11EB);
        bytes.extend_from_slice(&(word ^ word >> 31).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Fills a range of a region.
pub(crate) fn fill(region: &SharedRegion, seed: u64, offset: u64, len: usize) -> Result<(), te_core::Error> {
    region.write(offset, &pattern(seed, len))
}

/// The first byte of a range that is not of the pattern, as an offset into the region.
pub(crate) fn first_difference(
    region: &SharedRegion,
    seed: u64,
    offset: u64,
    len: usize,
) -> Result<Option<u64>, te_core::Error> {
    let mut bytes = vec![0; len];
    region.read(offset, &mut bytes)?;
    let expected = pattern(seed, len);
    Ok(bytes.iter().zip(&expected).position(|(a, b)| a != b).map(|at| offset + at as u64))
}

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn patterns_differ_by_seed_and_place() {
        let (a, b) = (pattern(1, 4096), pattern(2, 4096));
        assert_eq!(a, pattern(1, 4096));
        let same = a.iter().zip(&b).filter(|(a, b)| a == b).count();
        assert!(same < 64, "{same} of 4096 bytes agree");
        assert_ne!(a[..8], a[8..16]);
        assert_eq!(pattern(1, 13), a[..13]);
    }
}
