//! Checksums that are valid for one put of one key only.
//!
//! A CRC alone identifies bytes, not the object that they belong to. So the master keeps, returns and
//! compares the CRC-32C of an object *bound* to its key and generation: the two are hashed, the hash is
//! folded to 32 bits, and the CRC is xored with it. A reader binds what it has read with the key that it
//! requested; a response that was meant for another key, or that names another generation than that of the
//! bytes, does not verify, except in one case in 2^32.
//!
//! The hash is part of the protocol: it is the same on every machine and in every release that speaks it. It
//! protects against mix-ups, not against an attacker who chooses bytes to fit.

/// The CRC-32C of an object's bytes, bound to its key and generation.
#[must_use]
pub const fn bound(crc32c: u32, key: &[u8], generation: u64) -> u32 {
    crc32c ^ mask(key, generation)
}

/// The CRC-32C of an object's bytes, from a bound checksum. The function is the same as [`bound`]; the two
/// names show the direction.
#[must_use]
pub const fn unbound(checksum: u32, key: &[u8], generation: u64) -> u32 {
    checksum ^ mask(key, generation)
}

/// 32 bits that depend on every bit of the key and the generation. The key is folded in eight bytes at a time
/// by a multiplication to 128 bits, as in wyhash.
const fn mask(key: &[u8], generation: u64) -> u32 {
    const SEED: u64 = 0x9e37_79b9_7f4a_7c15;
    const STEP: u64 = 0xe703_7ed1_a0b4_28db;
    let mut hash = folded(generation ^ SEED, STEP ^ key.len() as u64);
    let (words, rest) = key.as_chunks::<8>();
    let mut at = 0;
    while at < words.len() {
        hash = folded(hash ^ u64::from_le_bytes(words[at]), STEP);
        at += 1;
    }
    let mut last = 0;
    let mut at = 0;
    while at < rest.len() {
        last |= (rest[at] as u64) << (8 * at);
        at += 1;
    }
    hash = folded(hash ^ last, STEP ^ SEED);
    (hash ^ (hash >> 32)) as u32
}

const fn folded(a: u64, b: u64) -> u64 {
    let product = a as u128 * b as u128;
    product as u64 ^ (product >> 64) as u64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_hash_is_part_of_the_protocol_and_never_changes() {
        let of = |key: &[u8], generation| bound(0, key, generation);
        assert_eq!(
            [of(b"", 0), of(b"k", 1), of(b"01234567", 2), of(b"0123456789abcdef!", u64::MAX)],
            [0x721b_d134, 0xf897_bffa, 0x1faf_64ac, 0xce93_f633]
        );
    }

    #[test]
    fn lengths_and_zero_bytes_count() {
        let mut seen: alloc::vec::Vec<u32> = (0..40).map(|len| bound(0, &[0; 40][..len], 7)).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 40);
    }

    proptest! {
        #[test]
        fn what_is_bound_to_one_put_does_not_hold_for_another(
            crc in any::<u32>(),
            key in prop::collection::vec(any::<u8>(), 0..40),
            generation in any::<u64>(),
            bit in any::<prop::sample::Index>(),
        ) {
            let checksum = bound(crc, &key, generation);
            prop_assert_eq!(unbound(checksum, &key, generation), crc);
            prop_assert_ne!(bound(crc, &key, generation ^ 1 << bit.index(64)), checksum);
            if !key.is_empty() {
                let mut other = key.clone();
                let bit = bit.index(8 * other.len());
                other[bit / 8] ^= 1 << (bit % 8);
                prop_assert_ne!(bound(crc, &other, generation), checksum);
            }
        }
    }
}
