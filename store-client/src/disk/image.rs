//! Images: the bytes of an object as they are on a disk.

use store_core::chunks::{CHUNK_BYTES, ChunkSums, stored_len};

use super::sys::{AlignedBuffer, Lent};

/// The checksum of an object, and its data and trailer as [`DiskService::demote`](super::DiskService::demote)
/// takes them.
#[must_use]
pub fn image_of(data: &[u8]) -> (u32, Lent) {
    let sums = sums_of(data);
    let len = stored_len(data.len() as u64) as usize;
    let mut image = AlignedBuffer::new(len);
    image[..data.len()].copy_from_slice(data);
    image[data.len()..data.len() + sums.trailer().len()].copy_from_slice(sums.trailer());
    (sums.whole(), Lent::buffer(image))
}

/// Whether an image is that of an object with `len` bytes of data and this checksum, trailer included.
#[must_use]
pub fn is_intact(image: &[u8], len: u64, crc32c: u32) -> bool {
    let (Ok(data), Ok(stored)) = (usize::try_from(len), usize::try_from(stored_len(len))) else {
        return false;
    };
    let Some((data, trailer)) = image.get(..stored).and_then(|image| image.split_at_checked(data)) else {
        return false;
    };
    let sums = sums_of(data);
    sums.whole() == crc32c && sums.trailer() == trailer
}

fn sums_of(data: &[u8]) -> ChunkSums {
    let mut sums = ChunkSums::default();
    for chunk in data.chunks(CHUNK_BYTES as usize) {
        sums.push(te_host::crc32c_of(0, chunk), chunk.len() as u64);
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_of_an_image_shows() {
        let data: Vec<u8> = (0..150_000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let (crc, image) = image_of(&data);
        let mut image = image.into_buffer().expect("a buffer was lent");
        assert_eq!(image.len(), 150_000 + 3 * 4);
        assert!(is_intact(&image, 150_000, crc));
        for at in [0, 65_535, 65_536, 149_999, 150_000, 150_011] {
            image[at] ^= 4;
            assert!(!is_intact(&image, 150_000, crc), "{at}");
            image[at] ^= 4;
        }
        assert!(!is_intact(&image, 150_001, crc) && !is_intact(&image[..150_000], 150_000, crc));
    }
}
