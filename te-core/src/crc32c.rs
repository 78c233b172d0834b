//! CRC-32C of concatenations, computed from the checksums of the parts. Arithmetic of polynomials modulo that
//! of RFC 3720.
//!
//! Checksums of bytes are computed where the bytes are, with the processor's instructions; this module reads
//! no bytes.

/// The CRC-32C of bytes with the checksum `first`, followed by `len` bytes with the checksum `second`.
///
/// Costs one multiplication per bit of `len` that is set: tens of nanoseconds for a power of two.
#[must_use]
pub fn crc32c_joined(first: u32, second: u32, len: u64) -> u32 {
    let mut moved = first.reverse_bits();
    let mut rest = len;
    while rest > 0 {
        // x to the power of 2^3: a byte is eight bits.
        moved = multiply(moved, SQUARES[rest.trailing_zeros() as usize + 3]);
        rest &= rest - 1;
    }
    moved.reverse_bits() ^ second
}

/// x, its square, the square of that, and so on, not reflected.
const SQUARES: [u32; 67] = {
    let mut squares = [2; 67];
    let mut i = 1;
    while i < squares.len() {
        squares[i] = multiply(squares[i - 1], squares[i - 1]);
        i += 1;
    }
    squares
};

/// xⁿ modulo the polynomial of CRC-32C, reflected: the constants that folding algorithms need.
#[must_use]
pub const fn crc32c_power(n: u64) -> u32 {
    let (mut result, mut square, mut left) = (1, 2, n);
    while left > 0 {
        if left & 1 == 1 {
            result = multiply(result, square);
        }
        square = multiply(square, square);
        left >>= 1;
    }
    result.reverse_bits()
}

/// a × b mod P, not reflected.
const fn multiply(mut a: u32, mut b: u32) -> u32 {
    /// The polynomial of RFC 3720, without x³².
    const CASTAGNOLI: u32 = 0x1edc_6f41;
    let mut product = 0;
    while b > 0 {
        if b & 1 == 1 {
            product ^= a;
        }
        a = if a >> 31 == 1 { (a << 1) ^ CASTAGNOLI } else { a << 1 };
        b >>= 1;
    }
    product
}

#[cfg(any(test, feature = "testkit"))]
/// CRC-32C bit by bit, as it is defined: the reference for tests.
pub(crate) fn crc32c_slowly(bytes: &[u8]) -> u32 {
    let mut crc = !0_u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joined_checksums_are_those_of_the_whole() {
        // RFC 3720, B.4.
        assert_eq!(crc32c_slowly(&[0; 32]), 0x8a91_36aa);
        let bytes: std::vec::Vec<u8> =
            (0..100_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
        for at in [0, 1, 7, 4096, 65_536, 99_999, 100_000] {
            let (first, second) = bytes.split_at(at);
            let joined = crc32c_joined(crc32c_slowly(first), crc32c_slowly(second), second.len() as u64);
            assert_eq!(joined, crc32c_slowly(&bytes), "{at}");
        }
    }
}
