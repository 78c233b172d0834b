//! Checksums of a put, chunk by chunk, in one pass over its bytes; or of a range of an open put.

use store_core::chunks::{CHUNK_BYTES, ChunkSums};

use crate::checksum::Checksum;

/// Bytes of an object that lie in one chunk: their offset in the object, their number and their checksum.
pub(crate) type PartSum = (u64, u64, u32);

/// The checksums of one item.
#[derive(Clone, Debug, Default)]
pub(super) struct ItemSum {
    /// The offset of the item's first byte in its object.
    base: u64,
    /// Number of bytes so far.
    at: u64,
    /// Where the part of a chunk begins that contains `at`.
    opened: u64,
    /// Its checksum.
    open: Checksum,
    chunks: ChunkSums,
    /// Of a range: its parts. `None`: the item is a whole object.
    parts: Option<Vec<PartSum>>,
}

impl ItemSum {
    /// The checksums of a range that begins at this offset of its object.
    pub(super) fn of_range(base: u64) -> Self {
        Self { base, parts: Some(Vec::new()), ..Self::default() }
    }

    /// The checksums of a range, when all of its bytes are included.
    pub(super) fn take_parts(&mut self) -> Vec<PartSum> {
        self.parts.take().unwrap_or_default()
    }

    /// Where the chunk that contains `at` ends, in an item of `len` bytes.
    fn chunk_end(&self, len: u64) -> u64 {
        let end = ((self.base + self.at) / CHUNK_BYTES + 1) * CHUNK_BYTES;
        (end - self.base).min(len)
    }

    /// The bytes up to `at` end a chunk, or the item.
    fn close_part(&mut self) {
        let (crc32c, bytes) = (std::mem::take(&mut self.open).finish(), self.at - self.opened);
        match &mut self.parts {
            Some(parts) => parts.push((self.base + self.opened, bytes, crc32c)),
            None => self.chunks.push(crc32c, bytes),
        }
        self.opened = self.at;
    }

    /// Appends the bytes `offset..offset + bytes` of an item of `len` bytes, as far as they are new and
    /// continue the bytes before. `sum` appends some of them, with offsets relative to `offset`, to a
    /// checksum.
    pub(super) fn update(
        &mut self,
        len: u64,
        offset: u64,
        bytes: u64,
        mut sum: impl FnMut(&mut Checksum, u64, u64),
    ) {
        let end = (offset + bytes).min(len);
        if offset > self.at {
            return;
        }
        while self.at < end {
            let chunk_end = self.chunk_end(len);
            let to = chunk_end.min(end);
            sum(&mut self.open, self.at - offset, to - self.at);
            self.at = to;
            if to == chunk_end {
                self.close_part();
            }
        }
    }

    /// Appends the next bytes by their checksum, if they lie in one chunk and continue the bytes before.
    /// Returns whether they do.
    pub(super) fn take(&mut self, len: u64, offset: u64, bytes: u64, crc32c: u32) -> bool {
        let (chunk_end, end) = (self.chunk_end(len), offset + bytes);
        if offset != self.at || end > chunk_end {
            return false;
        }
        self.open.update_summed(crc32c, bytes);
        self.at = end;
        if end == chunk_end {
            self.close_part();
        }
        true
    }

    /// Whether the first `bytes` bytes of the item are included.
    pub(super) fn reaches(&self, bytes: u64) -> bool {
        self.at >= bytes
    }

    /// Whether all `len` bytes of the item are included.
    pub(super) fn is_whole(&self, len: u64) -> bool {
        self.at == len
    }

    /// Checksum of all completed chunks; after the last byte, that of the item.
    pub(super) const fn whole(&self) -> u32 {
        self.chunks.whole()
    }

    /// The trailer, which is stored after the item.
    pub(super) fn trailer(&self) -> &[u8] {
        self.chunks.trailer()
    }
}

#[cfg(test)]
mod tests {
    use store_core::chunks::{expected, trailer_len};

    use super::*;

    #[test]
    fn bytes_of_a_chunk_are_taken_by_their_checksums_in_order() {
        let bytes: Vec<u8> = (0..150_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let len = bytes.len() as u64;
        let of = |from: u64, to: u64| {
            let mut sum = Checksum::default();
            sum.update(&bytes[from as usize..to as usize]);
            sum.finish()
        };
        let mut sum = ItemSum::default();
        assert!(!sum.take(len, 65_536, 65_536, of(65_536, 131_072)), "not the next");
        assert!(!sum.take(len, 0, 65_537, of(0, 65_537)), "more than a chunk");
        assert!(sum.take(len, 0, 65_536, of(0, 65_536)));
        assert!(!sum.take(len, 0, 65_536, of(0, 65_536)), "taken already");
        sum.update(len, 65_536, 10, |sum, from, count| {
            sum.update(&bytes[65_536 + from as usize..][..count as usize]);
        });
        assert!(!sum.take(len, 65_536, 65_536, of(65_536, 131_072)), "another start");
        assert!(sum.take(len, 65_546, 2_000, of(65_546, 67_546)), "after the bytes that were summed here");
        assert!(sum.take(len, 67_546, 131_072 - 67_546, of(67_546, 131_072)));
        assert!(sum.take(len, 131_072, len - 131_072, of(131_072, len)), "the last is shorter");
        assert!(sum.is_whole(len));
        assert_eq!(sum.whole(), of(0, len));
    }

    #[test]
    fn a_range_is_summed_by_the_chunks_of_its_object() {
        let bytes: Vec<u8> = (0..200_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let of = |from: u64, to: u64| {
            let mut sum = Checksum::default();
            sum.update(&bytes[from as usize..to as usize]);
            (from, to - from, sum.finish())
        };
        for (from, to, expected) in [
            (0, 65_536, vec![of(0, 65_536)]),
            (5, 6, vec![of(5, 6)]),
            (65_535, 65_537, vec![of(65_535, 65_536), of(65_536, 65_537)]),
            (100, 140_000, vec![of(100, 65_536), of(65_536, 131_072), of(131_072, 140_000)]),
        ] {
            let len = to - from;
            for (step, summed) in [(1_000, false), (70_000, false), (1_000, true)] {
                let mut sum = ItemSum::of_range(from);
                let mut offset = 0;
                while offset < len {
                    let border = 65_536 - (from + offset) % 65_536;
                    let count = if summed { step.min(border) } else { step }.min(len - offset);
                    let part = &bytes[(from + offset) as usize..][..count as usize];
                    if summed {
                        let (.., crc32c) = of(from + offset, from + offset + count);
                        assert!(sum.take(len, offset, count, crc32c));
                    }
                    // Bytes that are included already change nothing.
                    sum.update(len, offset, count, |sum, at, bytes| {
                        sum.update(&part[at as usize..][..bytes as usize]);
                    });
                    offset += count;
                }
                assert!(sum.is_whole(len));
                assert_eq!(sum.take_parts(), expected, "{from}..{to} by {step}");
            }
        }
    }

    #[test]
    fn however_the_bytes_come_the_sums_are_the_same() {
        let bytes: Vec<u8> = (0..200_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let len = bytes.len() as u64;
        let mut wanted = Checksum::default();
        wanted.update(&bytes);
        for step in [1_000, 65_536, 65_537, 99_999, 200_000] {
            let mut sum = ItemSum::default();
            let mut offset = 0;
            while offset < len {
                let part = &bytes[offset as usize..][..step.min(bytes.len() - offset as usize)];
                // Twice, as when a second replica is written; and once with bytes that do not continue those
                // before.
                for at in [offset, offset, offset + 2 * step as u64] {
                    sum.update(len, at, part.len() as u64, |sum, from, count| {
                        sum.update(&part[from as usize..][..count as usize]);
                    });
                }
                offset += part.len() as u64;
            }
            assert!(sum.is_whole(len));
            assert_eq!(sum.whole(), wanted.finish(), "{step}");
            assert_eq!(sum.trailer().len() as u64, trailer_len(len));
            let mut second = Checksum::default();
            second.update(&bytes[65_536..131_072]);
            assert_eq!(expected(sum.trailer(), len, 65_536, 65_536), Some(second.finish()));
        }
    }
}
