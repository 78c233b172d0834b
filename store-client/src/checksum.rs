//! CRC-32C, the store's checksum.

use te_core::MemSpan;

use crate::sys;

/// An incremental checksum.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Checksum(u32);

impl Checksum {
    /// Appends bytes.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0 = te_host::crc32c_of(self.0, bytes);
    }

    /// Appends bytes of registered memory. A range that does not lie inside the span changes nothing.
    pub(crate) fn update_span(&mut self, span: MemSpan, offset: u64, len: u64) {
        self.0 = sys::checksum_span(self.0, span, offset, len).unwrap_or(self.0);
    }

    /// Appends `len` bytes of which only the checksum is known.
    pub(crate) fn update_summed(&mut self, crc32c: u32, len: u64) {
        self.0 = te_core::crc32c_joined(self.0, crc32c, len);
    }

    /// The state after bytes that were summed elsewhere.
    pub(crate) const fn of(crc32c: u32) -> Self {
        Self(crc32c)
    }

    /// The checksum of all bytes so far.
    pub(crate) const fn finish(self) -> u32 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_castagnoli_polynomial() {
        // Test vector of RFC 3720, B.4.
        let mut checksum = Checksum::default();
        checksum.update(&[0; 16]);
        checksum.update(&[0; 16]);
        assert_eq!(checksum.finish(), 0x8a91_36aa);
    }

    #[test]
    fn parts_may_come_summed() {
        let bytes: Vec<u8> = (0..1000u32).map(|i| (i * 7) as u8).collect();
        let mut whole = Checksum::default();
        whole.update(&bytes);
        let mut parts = Checksum::default();
        for part in [&bytes[..1], &bytes[1..400], &bytes[400..]] {
            parts.update_summed(te_host::crc32c_of(0, part), part.len() as u64);
        }
        assert_eq!(parts.finish(), whole.finish());
    }
}
