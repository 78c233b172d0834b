//! CRC-32C, the store's checksum.

use te_engine::MemSpan;

use crate::sys;

/// A checksum in the making.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Checksum(u32);

impl Checksum {
    /// Takes further bytes in.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0 = sys::checksum(self.0, bytes);
    }

    /// Takes further bytes of registered memory in. What does not lie inside changes nothing.
    pub(crate) fn update_span(&mut self, span: MemSpan, offset: u64, len: u64) {
        self.0 = sys::checksum_span(self.0, span, offset, len).unwrap_or(self.0);
    }

    /// Of all bytes so far.
    pub(crate) const fn finish(self) -> u32 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_castagnoli_polynomial() {
        // RFC 3720, B.4.
        let mut checksum = Checksum::default();
        checksum.update(&[0; 16]);
        checksum.update(&[0; 16]);
        assert_eq!(checksum.finish(), 0x8a91_36aa);
    }
}
