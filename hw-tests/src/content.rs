//! Patterns in regions: bytes that both sides know without having exchanged them.

use te_core::testkit::pattern;
use te_engine::SharedRegion;

/// Seed of the pattern that fills memory which must not be written any more.
pub(crate) const CANARY: u64 = 0xCA;

/// Fills a range of a region with the pattern of `seed`.
pub(crate) fn fill(region: &SharedRegion, seed: u64, offset: u64, len: usize) -> Result<(), te_core::Error> {
    region.write(offset, &pattern(seed, len))
}

/// The offset into the region of the first byte of the range that differs from the pattern of `seed`.
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
