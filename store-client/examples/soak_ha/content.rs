//! The bytes of objects: they follow from the key and the version, so that whatever is read can be verified.

use super::ledger::Read;

/// The object's number and its version.
pub(crate) const HEAD_BYTES: usize = 16;

/// The bytes of this version, of `least` to twice `least` bytes.
pub(crate) fn value(who: u64, id: u64, version: u64, least: usize) -> Vec<u8> {
    let mut bytes = vec![0; len_of(who, id, version, least)];
    // Numbers of writers are small; the upper part of the word tells apart what writers and others put.
    bytes[..8].copy_from_slice(&(who << 48 | id).to_le_bytes());
    bytes[8..HEAD_BYTES].copy_from_slice(&version.to_le_bytes());
    let mut state = mix(version ^ mix(id ^ mix(who)));
    for word in bytes[HEAD_BYTES..].chunks_mut(8) {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        word.copy_from_slice(&(state ^ state >> 29).to_le_bytes()[..word.len()]);
    }
    bytes
}

/// What was read from the key of this object.
pub(crate) fn read(who: u64, id: u64, least: usize, bytes: Option<&[u8]>) -> Read {
    let Some(bytes) = bytes else { return Read::Miss };
    let version = bytes.get(8..HEAD_BYTES).and_then(|word| Some(u64::from_le_bytes(word.try_into().ok()?)));
    let version = version.unwrap_or(0);
    Read::Value { version, intact: bytes == value(who, id, version, least) }
}

fn len_of(who: u64, id: u64, version: u64, least: usize) -> usize {
    least.max(HEAD_BYTES) + mix(who ^ mix(id ^ mix(version))) as usize % least.max(1)
}

/// The finisher of SplitMix64.
const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_changed_byte_is_seen() {
        let bytes = value(1, 7, 3, 40);
        assert_eq!(read(1, 7, 40, Some(&bytes)), Read::Value { version: 3, intact: true });
        assert_eq!(read(1, 7, 40, None), Read::Miss);
        for at in 0..bytes.len() {
            let mut other = bytes.clone();
            other[at] ^= 0x10;
            assert!(matches!(read(1, 7, 40, Some(&other)), Read::Value { intact: false, .. }), "{at}");
        }
        let others = [read(1, 8, 40, Some(&bytes)), read(2, 7, 40, Some(&bytes))];
        for other in others.into_iter().chain([read(1, 7, 40, Some(&bytes[..30])), read(1, 7, 40, Some(&[]))])
        {
            assert!(matches!(other, Read::Value { intact: false, .. }));
        }
    }
}
