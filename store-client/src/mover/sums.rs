//! Checksums of a put, chunk by chunk, in one pass over its bytes.

use store_core::chunks::{CHUNK_BYTES, ChunkSums};

use crate::checksum::Checksum;

/// The checksums of one item.
#[derive(Clone, Debug, Default)]
pub(super) struct ItemSum {
    /// Number of bytes so far.
    at: u64,
    /// Checksum of the chunk that contains `at`.
    open: Checksum,
    chunks: ChunkSums,
}

impl ItemSum {
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
            let start = self.at / CHUNK_BYTES * CHUNK_BYTES;
            let chunk_end = (start + CHUNK_BYTES).min(len);
            let to = chunk_end.min(end);
            sum(&mut self.open, self.at - offset, to - self.at);
            self.at = to;
            if to == chunk_end {
                self.chunks.push(std::mem::take(&mut self.open).finish(), to - start);
            }
        }
    }

    /// Appends the next bytes by their checksum, if they lie in one chunk and continue the bytes before.
    /// Returns whether they do.
    pub(super) fn take(&mut self, len: u64, offset: u64, bytes: u64, crc32c: u32) -> bool {
        let start = self.at / CHUNK_BYTES * CHUNK_BYTES;
        let chunk_end = (start + CHUNK_BYTES).min(len);
        let end = offset + bytes;
        if offset != self.at || end > chunk_end {
            return false;
        }
        self.open.update_summed(crc32c, bytes);
        self.at = end;
        if end == chunk_end {
            self.chunks.push(std::mem::take(&mut self.open).finish(), end - start);
        }
        true
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
