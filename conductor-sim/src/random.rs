//! SplitMix64: small, seeded, and the same on every machine.

/// A generator of pseudo-random numbers. Not for secrets.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.0)
    }

    /// A number below `limit`, which is not zero.
    pub(crate) const fn below(&mut self, limit: u64) -> u64 {
        ((self.next() as u128 * limit as u128) >> 64) as u64
    }
}

/// A permutation of the 64-bit numbers without visible pattern.
pub(crate) const fn mixed(number: u64) -> u64 {
    let mut z = number;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
