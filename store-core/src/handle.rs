//! Put handles: the proof that the process that ends a put is the one that began it.
//!
//! Generations are counted up, so every client that starts a put can guess the generations of others. A
//! handle is the SipHash-2-4 of the generation under a key that only the master knows: it need not be stored,
//! and it cannot be guessed.
//!
//! J.-P. Aumasson, D. J. Bernstein, "SipHash: a fast short-input PRF", INDOCRYPT 2012.

/// The handle of the put with this generation.
pub(crate) const fn handle_of(key: [u64; 2], generation: u64) -> u64 {
    let mut v = [
        key[0] ^ 0x736f_6d65_7073_6575,
        key[1] ^ 0x646f_7261_6e64_6f6d,
        key[0] ^ 0x6c79_6765_6e65_7261,
        key[1] ^ 0x7465_6462_7974_6573,
    ];
    // One word, then the message length of 8 bytes in the highest byte of the last word.
    let words = [generation, 8 << 56];
    let mut at = 0;
    while at < words.len() {
        v[3] ^= words[at];
        v = round(round(v));
        v[0] ^= words[at];
        at += 1;
    }
    v[2] ^= 0xff;
    v = round(round(round(round(v))));
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

const fn round(v: [u64; 4]) -> [u64; 4] {
    let [mut v0, mut v1, mut v2, mut v3] = v;
    v0 = v0.wrapping_add(v1);
    v1 = v1.rotate_left(13) ^ v0;
    v0 = v0.rotate_left(32);
    v2 = v2.wrapping_add(v3);
    v3 = v3.rotate_left(16) ^ v2;
    v0 = v0.wrapping_add(v3);
    v3 = v3.rotate_left(21) ^ v0;
    v2 = v2.wrapping_add(v1);
    v1 = v1.rotate_left(17) ^ v2;
    v2 = v2.rotate_left(32);
    [v0, v1, v2, v3]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_siphash_2_4() {
        // From the reference implementation's vectors: key 00 01 … 0f, message 00 01 … 07.
        let key = [0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908];
        assert_eq!(
            handle_of(key, 0x0706_0504_0302_0100).to_le_bytes(),
            [0x62, 0x24, 0x93, 0x9a, 0x79, 0xf5, 0xf5, 0x93]
        );
    }
}
