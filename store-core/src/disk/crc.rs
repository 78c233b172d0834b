//! CRC-32C of headers, and of the objects that recovery verifies.
//!
//! Eight bytes at a time from tables, because this crate has no processor instructions for it. Checksums of
//! objects that are written or read in normal operation are computed elsewhere.

/// Continues the CRC-32C `crc` of preceding bytes (0 for none) with `bytes`.
#[must_use]
pub(crate) fn crc32c(crc: u32, bytes: &[u8]) -> u32 {
    let mut crc = !crc;
    let (words, rest) = bytes.as_chunks::<8>();
    for word in words {
        let word = u64::from_le_bytes(*word) ^ u64::from(crc);
        crc = 0;
        for (at, table) in TABLES.iter().rev().enumerate() {
            crc ^= table[(word >> (8 * at)) as usize & 0xff];
        }
    }
    for byte in rest {
        crc = TABLES[0][((crc ^ u32::from(*byte)) & 0xff) as usize] ^ (crc >> 8);
    }
    !crc
}

/// `TABLES[n][b]`: the checksum register after the byte `b` and `n` bytes of zeros.
static TABLES: [[u32; 256]; 8] = {
    const REFLECTED: u32 = 0x82f6_3b78;
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let (mut crc, mut bit) = (byte as u32, 0);
        while bit < 8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ REFLECTED } else { crc >> 1 };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut n = 1;
    while n < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before: u32 = tables[n - 1][byte];
            tables[n][byte] = tables[0][(before & 0xff) as usize] ^ (before >> 8);
            byte += 1;
        }
        n += 1;
    }
    tables
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_rfc_3720_however_the_bytes_are_divided() {
        assert_eq!(crc32c(0, &[0; 32]), 0x8a91_36aa);
        let bytes: std::vec::Vec<u8> =
            (0..5_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
        for at in [0, 1, 7, 8, 9, 4_096, 5_000] {
            let (first, second) = bytes.split_at(at);
            assert_eq!(crc32c(crc32c(0, first), second), ::crc32c::crc32c(&bytes), "{at}");
        }
    }
}
