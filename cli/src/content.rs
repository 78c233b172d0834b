//! Verifiable block contents: every byte of a block follows from the run's seed and the block's id, and every
//! byte is checked.
//!
//! Word `i` of block `id` is a bijection of `seed(id) + i × odd`, so no word repeats inside a block, and a
//! block that is shifted, truncated, stale or another block's does not pass. It uses additions and shifts
//! only: the compiler vectorises it, and checking costs less than copying.

/// Generates and checks the contents of blocks. Two runs with different seeds have different contents.
#[derive(Clone, Copy, Debug)]
pub struct Content {
    seed: u64,
}

/// Bytes of one word.
const WORD: usize = size_of::<u64>();
/// Odd, so that `i × STEP` takes every value once; 2⁶⁴ divided by the golden ratio, so that neighbouring
/// words differ in all bytes.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
/// Bytes that are compared before the result is tested.
const CHUNK: usize = 1024;

/// The first byte of a block that differs from its expected content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Offset in the block, bytes.
    pub offset: usize,
    /// The byte that belongs there.
    pub expected: u8,
    /// The byte that was found there.
    pub found: u8,
}

impl Content {
    /// The contents of the run with this seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// Writes the content of block `id`.
    pub fn fill(&self, id: u64, block: &mut [u8]) {
        let mut state = self.start(id);
        let mut words = block.chunks_exact_mut(WORD);
        for word in &mut words {
            word.copy_from_slice(&word_of(state).to_le_bytes());
            state = state.wrapping_add(STEP);
        }
        let rest = words.into_remainder();
        rest.copy_from_slice(&word_of(state).to_le_bytes()[..rest.len()]);
    }

    /// Checks every byte of `block` against the content of block `id`.
    ///
    /// # Errors
    /// The first byte that differs.
    pub fn verify(&self, id: u64, block: &[u8]) -> Result<(), Mismatch> {
        let mut state = self.start(id);
        let mut chunks = block.chunks_exact(CHUNK);
        for (index, chunk) in (&mut chunks).enumerate() {
            let mut difference = 0;
            for (i, word) in chunk.chunks_exact(WORD).enumerate() {
                let expected = word_of(state.wrapping_add((i as u64).wrapping_mul(STEP)));
                difference |= expected ^ u64::from_le_bytes(word.try_into().unwrap_or_default());
            }
            if difference != 0 {
                return Err(first_mismatch(state, index * CHUNK, chunk));
            }
            state = state.wrapping_add(((CHUNK / WORD) as u64).wrapping_mul(STEP));
        }
        let rest = chunks.remainder();
        let good = rest.chunks(WORD).enumerate().all(|(i, word)| {
            word_of(state.wrapping_add((i as u64).wrapping_mul(STEP))).to_le_bytes()[..word.len()] == *word
        });
        if good { Ok(()) } else { Err(first_mismatch(state, block.len() - rest.len(), rest)) }
    }

    fn start(&self, id: u64) -> u64 {
        mix(mix(self.seed) ^ id)
    }
}

#[inline]
const fn word_of(state: u64) -> u64 {
    state ^ (state >> 32)
}

#[cold]
fn first_mismatch(state: u64, offset: usize, bytes: &[u8]) -> Mismatch {
    for (i, &found) in bytes.iter().enumerate() {
        let expected =
            word_of(state.wrapping_add(((i / WORD) as u64).wrapping_mul(STEP))).to_le_bytes()[i % WORD];
        if expected != found {
            return Mismatch { offset: offset + i, expected, found };
        }
    }
    Mismatch { offset, expected: 0, found: 0 }
}

/// The finaliser of splitmix64: every bit of the input reaches every bit of the output.
#[must_use]
pub(crate) const fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(STEP);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(seed: u64, id: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        Content::new(seed).fill(id, &mut bytes);
        bytes
    }

    #[test]
    fn content_follows_from_seed_and_id_alone() {
        assert_eq!(block(1, 2, 4096), block(1, 2, 4096));
        assert_ne!(block(1, 2, 4096), block(2, 2, 4096));
        assert_ne!(block(1, 2, 4096), block(1, 3, 4096));
        // A longer block begins like a shorter one: the reader has to check the length.
        assert_eq!(block(1, 2, 13), block(1, 2, 4096)[..13]);
        // The stream is not part of any stored format, but both sides of a cluster generate it: a change must
        // be deliberate.
        assert_eq!(block(42, 7, 8), word_of(mix(mix(42) ^ 7)).to_le_bytes());
    }

    #[test]
    fn every_flipped_byte_is_found_where_it_is() {
        for len in [1, 7, 8, 1023, 1024, 1025, 2056, 4096] {
            let good = block(9, 9, len);
            assert_eq!(Content::new(9).verify(9, &good), Ok(()));
            for offset in (0..len).step_by(61).chain([len - 1]) {
                let mut bad = good.clone();
                bad[offset] ^= 0x40;
                let error = Content::new(9).verify(9, &bad).unwrap_err();
                assert_eq!((error.offset, error.expected, error.found), (offset, good[offset], bad[offset]));
            }
        }
    }

    #[test]
    fn blocks_of_others_shifted_blocks_and_zeros_do_not_pass() {
        let content = Content::new(3);
        let good = block(3, 100, 8192);
        assert!(content.verify(101, &good).is_err());
        assert!(content.verify(100, &good[8..4104]).is_err());
        assert!(content.verify(100, &good[4096..]).is_err());
        assert!(content.verify(100, &[0; 4096]).is_err());
    }
}
