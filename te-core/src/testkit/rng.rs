//! A small random number generator that gives the same numbers on every machine and in every release: a
//! failure is a seed.

use core::ops::Range;

/// xoshiro256++ (Blackman and Vigna, 2019), seeded through splitmix64. Fast and even; not for secrets.
///
/// ```
/// use te_core::testkit::Rng;
///
/// let mut rng = Rng::new(7);
/// assert!(rng.below(10) < 10);
/// assert_eq!(Rng::new(7).next(), Rng::new(7).next());
/// ```
#[derive(Clone, Debug)]
pub struct Rng([u64; 4]);

impl Rng {
    /// The generator that `seed` names.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut x = seed;
        Self(core::array::from_fn(|_| {
            x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        }))
    }

    /// A second generator, seeded from this one, for a part of a test whose draws must not change the draws
    /// of the others.
    #[must_use]
    pub fn fork(&mut self) -> Self {
        Self::new(self.next())
    }

    /// Any 64 bits.
    pub const fn next(&mut self) -> u64 {
        let [a, b, c, d] = &mut self.0;
        let result = a.wrapping_add(*d).rotate_left(23).wrapping_add(*a);
        let t = *b << 17;
        *c ^= *a;
        *d ^= *b;
        *b ^= *c;
        *a ^= *d;
        *c ^= t;
        *d = d.rotate_left(45);
        result
    }

    /// A number below `n`; 0 when `n` is 0.
    pub const fn below(&mut self, n: u64) -> u64 {
        // Lemire's multiplication. Its bias of n / 2^64 does not matter here.
        ((self.next() as u128 * n as u128) >> 64) as u64
    }

    /// A number in `range`; the start of `range` when it is empty.
    pub fn range(&mut self, range: Range<u64>) -> u64 {
        range.start + self.below(range.end.saturating_sub(range.start))
    }

    /// An index below `n`; 0 when `n` is 0.
    pub const fn index(&mut self, n: usize) -> usize {
        self.below(n as u64) as usize
    }

    /// True `ppm` times in a million.
    pub fn chance_ppm(&mut self, ppm: u32) -> bool {
        ppm != 0 && self.below(1_000_000) < u64::from(ppm)
    }

    /// Overwrites `bytes` with random bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.next().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }

    /// Puts `items` into a random order; every order is equally likely.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.index(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_names_a_sequence() {
        let (mut a, mut b, mut c) = (Rng::new(1), Rng::new(1), Rng::new(2));
        assert_eq!(a.next(), b.next());
        assert_ne!(a.next(), c.next());
    }

    #[test]
    fn draws_stay_inside_and_reach_everything() {
        let mut rng = Rng::new(7);
        let mut seen = [false; 10];
        for _ in 0..1_000 {
            seen[rng.range(3..13) as usize - 3] = true;
        }
        assert_eq!(seen, [true; 10]);
        assert_eq!((rng.below(0), rng.range(5..5)), (0, 5));
        let hits = (0..100_000).filter(|_| rng.chance_ppm(250_000)).count();
        assert!((24_000..26_000).contains(&hits), "a quarter, got {hits}");
    }

    #[test]
    fn a_shuffle_keeps_every_item() {
        let mut items: [u8; 32] = core::array::from_fn(|i| i as u8);
        Rng::new(3).shuffle(&mut items);
        assert_ne!(items[..8], [0, 1, 2, 3, 4, 5, 6, 7]);
        items.sort_unstable();
        assert_eq!(items, core::array::from_fn(|i| i as u8));
    }
}
