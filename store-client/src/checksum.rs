//! CRC-32C, the store's checksum.

/// A checksum in the making.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Checksum(u32);

impl Checksum {
    /// Takes further bytes in.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0 = crc32c::crc32c_append(self.0, bytes);
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
