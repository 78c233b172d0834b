//! Chunks: how a part of an object is verified as reliably as the whole.
//!
//! ```text
//!   stored   [chunk 0: 64 KiB][chunk 1: 64 KiB]…[last: 1 B to 64 KiB][crc 0][crc 1]…[crc last]
//!            └────────────── data: `len` bytes ────────────────────┘└─ trailer: 4 bytes per chunk, little endian ─┘
//! ```
//!
//! An object of more than one chunk is stored with a *trailer*: the CRC-32C of each of its chunks. The master
//! keeps only the CRC-32C of all data. CRCs can be combined: the checksums in the trailer, combined, must
//! give the one that the master keeps. So a reader of the trailer and some chunks can verify that the trailer
//! is the committed one, and with the trailer that the chunks are, without reading the rest of the object. A
//! reader of the whole object does not read the trailer.
//!
//! An object may be written in ranges of any order ([`RangeSums`]); what is stored is the same.
//!
//! An object of one chunk has no trailer: the chunk's checksum is the one that the master keeps. This module
//! reads no data bytes; its callers compute the CRCs of chunks.

mod ranges;

use alloc::vec::Vec;
use core::ops::Range;

use te_core::crc32c_joined;

pub use ranges::{RANGES_MAX, RangeSums};

/// Bytes that share a checksum: the smallest unit that a reader of a part reads.
pub const CHUNK_BYTES: u64 = 64 << 10;
/// Bytes of a chunk's checksum in the trailer.
const SUM_BYTES: u64 = 4;

/// Bytes that an object of `len` bytes takes in each of its replicas.
#[must_use]
pub const fn stored_len(len: u64) -> u64 {
    len.saturating_add(trailer_len(len))
}

/// Bytes of the trailer of an object of `len` bytes.
#[must_use]
pub const fn trailer_len(len: u64) -> u64 {
    if len <= CHUNK_BYTES { 0 } else { len.div_ceil(CHUNK_BYTES) * SUM_BYTES }
}

/// The checksums of an object's chunks, appended in order, and the checksum of the whole object.
#[derive(Clone, Debug, Default)]
pub struct ChunkSums {
    trailer: Vec<u8>,
    whole: u32,
    len: u64,
}

impl ChunkSums {
    /// Appends the next chunk: its CRC-32C and its length. Only the last chunk may be shorter than
    /// [`CHUNK_BYTES`].
    pub fn push(&mut self, crc32c: u32, len: u64) {
        if self.len == 0 {
            (self.whole, self.len) = (crc32c, len);
            return;
        }
        if self.trailer.is_empty() {
            self.trailer.extend_from_slice(&self.whole.to_le_bytes());
        }
        self.trailer.extend_from_slice(&crc32c.to_le_bytes());
        self.whole = crc32c_joined(self.whole, crc32c, len);
        self.len += len;
    }

    /// CRC-32C of all chunks so far.
    #[must_use]
    pub const fn whole(&self) -> u32 {
        self.whole
    }

    /// Bytes of all chunks so far.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether no chunk was appended yet.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The trailer as it is stored: empty for an object of one chunk.
    #[must_use]
    pub fn trailer(&self) -> &[u8] {
        &self.trailer
    }
}

/// The CRC-32C that whole chunks of an object of `len` bytes must have according to its trailer: the `bytes`
/// bytes from `offset` on. `None`: the range is not made of whole chunks, or the trailer has the wrong
/// length.
#[must_use]
pub fn expected(trailer: &[u8], len: u64, offset: u64, bytes: u64) -> Option<u32> {
    let end = offset.checked_add(bytes)?;
    let whole = offset.is_multiple_of(CHUNK_BYTES) && (end.is_multiple_of(CHUNK_BYTES) || end == len);
    if !whole || bytes == 0 || end > len || trailer.len() as u64 != trailer_len(len) {
        return None;
    }
    let first = offset / CHUNK_BYTES * SUM_BYTES;
    let (sums, _) = trailer.get(first as usize..)?.as_chunks();
    let mut joined = None;
    for (at, sum) in (offset..end).step_by(CHUNK_BYTES as usize).zip(sums) {
        let sum = u32::from_le_bytes(*sum);
        joined = Some(joined.map_or(sum, |so_far| crc32c_joined(so_far, sum, (end - at).min(CHUNK_BYTES))));
    }
    joined
}

/// The chunks that have to be read for several ranges of one object, each chunk once.
#[derive(Clone, Debug, Default)]
pub struct Cover {
    runs: Vec<Run>,
    bytes: u64,
}

/// Adjacent chunks that are read together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Where the run begins in the object.
    pub offset: u64,
    /// Length of the run, bytes.
    pub len: u64,
    /// Total length of the runs before this one, bytes.
    pub at: u64,
    /// The range that contains the whole run, if there is exactly one and no other range touches the run: the
    /// run can then be read straight to its destination.
    pub only: Option<u32>,
}

impl Cover {
    /// The chunks of an object of `len` bytes that the ranges touch. Each range is not empty and lies within
    /// the object.
    #[must_use]
    pub fn new(len: u64, ranges: impl IntoIterator<Item = Range<u64>>) -> Self {
        // Each edge: its position in chunks, the change in the number of ranges that touch what follows, the
        // change in the number of those that contain all of it, and their index.
        let mut edges: Vec<(u64, i32, i32, i64)> = Vec::new();
        for (index, range) in ranges.into_iter().enumerate() {
            let (touched, touched_end) = (range.start / CHUNK_BYTES, range.end.div_ceil(CHUNK_BYTES));
            edges.push((touched, 1, 0, 0));
            edges.push((touched_end, -1, 0, 0));
            let whole = range.start.div_ceil(CHUNK_BYTES);
            let whole_end = if range.end == len { touched_end } else { range.end / CHUNK_BYTES };
            if whole < whole_end {
                edges.push((whole, 0, 1, index as i64));
                edges.push((whole_end, 0, -1, -(index as i64)));
            }
        }
        edges.sort_unstable_by_key(|edge| edge.0);
        let mut this = Self::default();
        let (mut touching, mut wanting, mut who, mut from) = (0, 0, 0, 0);
        for (block, touch, want, index) in edges {
            if block > from && touching > 0 {
                let only = (touching == 1 && wanting == 1).then_some(who as u32);
                this.add(from * CHUNK_BYTES, (block * CHUNK_BYTES).min(len), only);
            }
            from = block;
            (touching, wanting, who) = (touching + touch, wanting + want, who + index);
        }
        this
    }

    /// Total length of all runs, bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The run that contains byte `at` of the concatenated runs.
    #[must_use]
    pub fn run_at(&self, at: u64) -> Option<&Run> {
        let after = self.runs.partition_point(|run| run.at <= at);
        self.runs[..after].last().filter(|run| at < run.at + run.len)
    }

    /// All runs, in the order of the object.
    #[must_use]
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    fn add(&mut self, offset: u64, end: u64, only: Option<u32>) {
        let len = end - offset;
        match self.runs.last_mut().filter(|run| run.offset + run.len == offset && run.only == only) {
            Some(run) => run.len += len,
            None => self.runs.push(Run { offset, len, at: self.bytes, only }),
        }
        self.bytes += len;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const B: u64 = CHUNK_BYTES;

    fn run(offset: u64, len: u64, at: u64, only: Option<u32>) -> Run {
        Run { offset, len, at, only }
    }

    #[test]
    fn an_object_of_one_chunk_has_no_trailer_and_a_longer_one_four_bytes_per_chunk() {
        assert_eq!([1, B - 1, B, B + 1, 2 * B, 2 * B + 1].map(trailer_len), [0, 0, 0, 8, 8, 12]);
        assert_eq!([0, 1, B, B + 1].map(stored_len), [0, 1, B, B + 9]);
        assert_eq!(stored_len(u64::MAX), u64::MAX);
    }

    #[test]
    fn the_trailer_joined_is_the_checksum_of_the_whole() {
        let lens = [B, B, 1000];
        let mut sums = ChunkSums::default();
        assert!(sums.is_empty());
        for (index, len) in lens.into_iter().enumerate() {
            sums.push(0x1234_5678 + index as u32, len);
        }
        let len = 2 * B + 1000;
        assert_eq!((sums.len(), sums.trailer().len() as u64), (len, trailer_len(len)));
        assert_eq!(expected(sums.trailer(), len, 0, len), Some(sums.whole()));
        assert_eq!(expected(sums.trailer(), len, B, B), Some(0x1234_5679));
        assert_eq!(expected(sums.trailer(), len, 2 * B, 1000), Some(0x1234_567a));
        let joined = crc32c_joined(0x1234_5679, 0x1234_567a, 1000);
        assert_eq!(expected(sums.trailer(), len, B, B + 1000), Some(joined));
        for (offset, bytes) in
            [(1, B), (0, 1), (2 * B, 999), (2 * B, 1001), (0, 0), (u64::MAX, 2), (3 * B, 1)]
        {
            assert_eq!(expected(sums.trailer(), len, offset, bytes), None, "{offset}+{bytes}");
        }
        assert_eq!(expected(&sums.trailer()[1..], len, 0, len), None);
        let mut one = ChunkSums::default();
        one.push(7, B);
        assert_eq!((one.whole(), one.trailer()), (7, [].as_slice()));
    }

    #[test]
    fn whole_chunks_of_one_range_are_apart_from_its_edges() {
        let len = 10 * B + 5;
        let cover = |ranges: &[(u64, u64)]| {
            Cover::new(len, ranges.iter().map(|&(start, end)| start..end)).runs().to_vec()
        };
        assert_eq!(cover(&[(5, 6)]), [run(0, B, 0, None)]);
        assert_eq!(cover(&[(0, len)]), [run(0, len, 0, Some(0))]);
        assert_eq!(
            cover(&[(B - 1, 3 * B + 1)]),
            [run(0, B, 0, None), run(B, 2 * B, B, Some(0)), run(3 * B, B, 3 * B, None)]
        );
        // The last chunk is complete although it is short; without its last byte it is not.
        assert_eq!(cover(&[(10 * B, len)]), [run(10 * B, 5, 0, Some(0))]);
        assert_eq!(cover(&[(10 * B, len - 1)]), [run(10 * B, 5, 0, None)]);
        // Adjacent ranges share nothing; overlapping ranges share the overlap.
        assert_eq!(cover(&[(B, 2 * B), (0, B)]), [run(0, B, 0, Some(1)), run(B, B, B, Some(0))]);
        assert_eq!(cover(&[(0, 2 * B), (0, 1)]), [run(0, B, 0, None), run(B, B, B, Some(0))]);
        assert_eq!(cover(&[(0, 2 * B), (B, 2 * B)]), [run(0, B, 0, Some(0)), run(B, B, B, None)]);
        assert_eq!(cover(&[(1, 2), (5 * B, 5 * B + 1)]), [run(0, B, 0, None), run(5 * B, B, B, None)]);
    }

    proptest! {
        #[test]
        fn every_wanted_byte_is_covered_once_and_no_chunk_needlessly(
            len in 1..20 * B,
            picks in proptest::collection::vec((any::<u64>(), any::<u64>()), 1..8),
        ) {
            let ranges: Vec<Range<u64>> = picks
                .iter()
                .map(|(a, b)| {
                    let start = a % len;
                    start..start + 1 + b % (len - start)
                })
                .collect();
            let cover = Cover::new(len, ranges.iter().cloned());
            let (mut at, mut last_end) = (0, 0);
            for run in cover.runs() {
                prop_assert!(run.len > 0 && run.offset >= last_end && run.at == at);
                prop_assert!(run.offset % B == 0);
                last_end = run.offset + run.len;
                prop_assert!(last_end % B == 0 || last_end == len);
                at += run.len;
                for block in (run.offset..last_end).step_by(B as usize) {
                    let block = block..(block + B).min(len);
                    let touching: Vec<usize> = (0..ranges.len())
                        .filter(|index| ranges[*index].start < block.end && block.start < ranges[*index].end)
                        .collect();
                    prop_assert!(!touching.is_empty());
                    let whole = |index: &usize| ranges[*index].start <= block.start && block.end <= ranges[*index].end;
                    let only = match touching.as_slice() {
                        [one] if whole(one) => Some(*one as u32),
                        _ => None,
                    };
                    prop_assert_eq!(run.only, only);
                }
            }
            prop_assert_eq!(at, cover.bytes());
            for range in &ranges {
                let inside: u64 = cover
                    .runs()
                    .iter()
                    .map(|run| (run.offset + run.len).min(range.end).saturating_sub(run.offset.max(range.start)))
                    .sum();
                prop_assert_eq!(inside, range.end - range.start);
            }
            for at in [0, cover.bytes() / 2, cover.bytes() - 1] {
                let run = cover.run_at(at).unwrap();
                prop_assert!(run.at <= at && at < run.at + run.len);
            }
            prop_assert_eq!(cover.run_at(cover.bytes()), None);
        }
    }
}
