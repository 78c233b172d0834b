//! The checksums of an object whose ranges are written in any order.
//!
//! CRCs can be joined, so a chunk need not be read from its beginning to its end: parts of it are summed
//! as they are written, and joined as soon as they touch. Each byte is written once. A byte that was
//! written twice would have two checksums, and no reader could tell which of them is in memory.

use alloc::collections::BTreeMap;

use te_core::crc32c_joined;

use super::{CHUNK_BYTES, ChunkSums};

/// Limit on the ranges of an object that are written and do not touch each other.
pub const RANGES_MAX: usize = 65_536;

/// What is known of an object that is written range by range.
#[derive(Clone, Debug)]
pub struct RangeSums {
    len: u64,
    /// Ranges that were written, or are: start and end. Ranges that touch are one.
    claimed: BTreeMap<u64, u64>,
    /// Parts of chunks that were written: start, end and checksum. Parts of one chunk that touch are one.
    parts: BTreeMap<u64, (u64, u32)>,
    summed: u64,
}

impl RangeSums {
    /// An object of `len` bytes of which nothing is written yet.
    #[must_use]
    pub const fn new(len: u64) -> Self {
        Self { len, claimed: BTreeMap::new(), parts: BTreeMap::new(), summed: 0 }
    }

    /// Claims a range that is about to be written. Returns `false`, and claims nothing, if the range is empty
    /// or not inside the object, if a byte of it was claimed before, or if there are too many ranges that do
    /// not touch ([`RANGES_MAX`]).
    #[must_use]
    pub fn claim(&mut self, offset: u64, bytes: u64) -> bool {
        let Some(end) = offset.checked_add(bytes).filter(|end| *end <= self.len && bytes > 0) else {
            return false;
        };
        let before = self.claimed.range(..end).next_back().map(|(start, end)| (*start, *end));
        if before.is_some_and(|(_, before_end)| before_end > offset) {
            return false;
        }
        let start = before.filter(|(_, before_end)| *before_end == offset).map_or(offset, |(start, _)| start);
        let after_end = self.claimed.get(&end).copied();
        if start == offset && after_end.is_none() && self.claimed.len() >= RANGES_MAX {
            return false;
        }
        if after_end.is_some() {
            self.claimed.remove(&end);
        }
        self.claimed.insert(start, after_end.unwrap_or(end));
        true
    }

    /// Adds the checksum of bytes of a claimed range that were written, all in one chunk, each once.
    pub fn add(&mut self, offset: u64, bytes: u64, crc32c: u32) {
        let chunk = offset / CHUNK_BYTES;
        let (mut start, mut end, mut sum) = (offset, offset + bytes, crc32c);
        self.summed += bytes;
        let before = self.parts.range(..offset).next_back().map(|(start, part)| (*start, *part));
        if let Some((before_start, (before_end, before_sum))) = before
            && before_end == offset
            && before_start / CHUNK_BYTES == chunk
        {
            self.parts.remove(&before_start);
            (start, sum) = (before_start, crc32c_joined(before_sum, sum, bytes));
        }
        if end / CHUNK_BYTES == chunk
            && let Some((after_end, after_sum)) = self.parts.remove(&end)
        {
            (end, sum) = (after_end, crc32c_joined(sum, after_sum, after_end - end));
        }
        self.parts.insert(start, (end, sum));
    }

    /// Length of the object, bytes.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether the object has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of bytes whose checksum is not known yet.
    #[must_use]
    pub const fn missing(&self) -> u64 {
        self.len - self.summed
    }

    /// The checksums of the object's chunks. `None`: bytes are missing.
    #[must_use]
    pub fn finish(&self) -> Option<ChunkSums> {
        if self.missing() > 0 {
            return None;
        }
        let mut sums = ChunkSums::default();
        // With no byte missing, the parts of each chunk have become one.
        self.parts.iter().for_each(|(start, (end, sum))| sums.push(*sum, end - start));
        Some(sums)
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    const B: u64 = CHUNK_BYTES;

    /// CRC-32C, a bit at a time.
    fn crc32c(bytes: &[u8]) -> u32 {
        let step = |crc: u32| crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
        !bytes.iter().fold(!0u32, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc)))
    }

    #[test]
    fn a_byte_is_claimed_once_and_only_inside_of_the_object() {
        let mut sums = RangeSums::new(100);
        for (offset, bytes) in [(0, 0), (100, 1), (99, 2), (u64::MAX, 1), (1, u64::MAX), (0, 101)] {
            assert!(!sums.claim(offset, bytes), "{offset}+{bytes}");
        }
        assert!(sums.claim(10, 10) && sums.claim(30, 10) && sums.claim(0, 10));
        for (offset, bytes) in [(0, 1), (19, 1), (19, 2), (15, 30), (25, 6), (39, 1), (5, 90)] {
            assert!(!sums.claim(offset, bytes), "{offset}+{bytes}");
        }
        assert!(sums.claim(20, 10) && sums.claim(40, 60));
        assert_eq!(sums.claimed.into_iter().collect::<Vec<_>>(), [(0, 100)]);
    }

    #[test]
    fn ranges_that_do_not_touch_are_limited_in_number() {
        let mut sums = RangeSums::new(u64::MAX);
        assert!((0..RANGES_MAX as u64).all(|range| sums.claim(4 * range, 1)));
        assert!(!sums.claim(4 * RANGES_MAX as u64, 1));
        assert!(sums.claim(1, 1), "a range that touches another one is no further range");
        assert!(sums.claim(2, 2), "nor one that joins two");
        assert!(sums.claim(4 * RANGES_MAX as u64, 1));
    }

    #[test]
    fn nothing_is_finished_while_a_byte_is_missing() {
        let mut sums = RangeSums::new(B + 2);
        assert!(sums.claim(0, B + 2));
        sums.add(0, B, 1);
        sums.add(B + 1, 1, 2);
        assert_eq!(sums.missing(), 1);
        assert!(sums.finish().is_none());
        sums.add(B, 1, 3);
        let finished = sums.finish().unwrap();
        assert_eq!((sums.missing(), finished.len(), finished.trailer().len()), (0, B + 2, 8));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

        #[test]
        fn in_whatever_order_the_parts_come_the_sums_are_those_of_the_bytes(
            len in 1..3 * B,
            cuts in proptest::collection::vec(any::<u64>(), 0..40),
            order in any::<u64>(),
        ) {
            let bytes: Vec<u8> = (0..len).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
            // Cuts anywhere, and at the borders of chunks.
            let mut edges: Vec<u64> = cuts.iter().map(|cut| cut % len).chain((0..len).step_by(B as usize)).collect();
            edges.extend([0, len]);
            edges.sort_unstable();
            edges.dedup();
            let mut parts: Vec<(u64, u64)> = edges.windows(2).map(|edge| (edge[0], edge[1])).collect();
            parts.sort_by_key(|part| (part.0 ^ order).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let mut sums = RangeSums::new(len);
            for (start, end) in parts {
                prop_assert!(sums.finish().is_none());
                prop_assert!(sums.claim(start, end - start));
                sums.add(start, end - start, crc32c(&bytes[start as usize..end as usize]));
            }
            let mut expected = ChunkSums::default();
            bytes.chunks(B as usize).for_each(|chunk| expected.push(crc32c(chunk), chunk.len() as u64));
            let found = sums.finish().unwrap();
            prop_assert_eq!((found.whole(), found.trailer()), (expected.whole(), expected.trailer()));
            prop_assert_eq!(sums.claimed.into_iter().collect::<Vec<_>>(), [(0, len)]);
        }
    }
}
