//! Cuts a request into slices on demand: the place of the next cut is computed, not looked up in a list.

use crate::{Op, RegionOffset, RemoteOffset};

/// One contiguous local range to or from one contiguous remote range, as a caller requests it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferRequest {
    /// The direction.
    pub op: Op,
    /// Where the request begins in the local region.
    pub local: RegionOffset,
    /// Where the request begins in the remote region.
    pub remote: RemoteOffset,
    /// The length, in bytes. 0 is allowed and completes at once.
    pub len: u64,
}

/// Where to cut a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slicer {
    slice_bytes: u32,
}

impl Slicer {
    /// The default length of a slice: 64 KiB.
    pub const SLICE_BYTES_DEFAULT: u32 = 64 << 10;
    /// The shortest slice: 512 B. A shorter one is not worth its header.
    pub const SLICE_BYTES_MIN: u32 = 512;
    /// The longest slice: 1 GiB. With a tail merged into it, a longer one would not fit the length field.
    pub const SLICE_BYTES_MAX: u32 = 1 << 30;

    /// Slices of `slice_bytes`, limited to the range above.
    #[must_use]
    pub const fn new(slice_bytes: u32) -> Self {
        let slice_bytes = if slice_bytes < Self::SLICE_BYTES_MIN {
            Self::SLICE_BYTES_MIN
        } else if slice_bytes > Self::SLICE_BYTES_MAX {
            Self::SLICE_BYTES_MAX
        } else {
            slice_bytes
        };
        Self { slice_bytes }
    }

    /// The length of a slice, in bytes.
    #[must_use]
    pub const fn slice_bytes(self) -> u32 {
        self.slice_bytes
    }

    /// The length of the next slice when `remaining` bytes are left; 0 when `remaining` is 0.
    ///
    /// A tail that is shorter than a quarter of a slice becomes part of the slice before it: that saves a
    /// header for few bytes.
    #[must_use]
    pub const fn cut(self, remaining: u64) -> u32 {
        let slice = self.slice_bytes as u64;
        if remaining < slice + slice / 4 { remaining as u32 } else { self.slice_bytes }
    }
}

impl Default for Slicer {
    fn default() -> Self {
        Self::new(Self::SLICE_BYTES_DEFAULT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_tail_rides_with_the_slice_before_it() {
        let slicer = Slicer::new(1024);
        assert_eq!(slicer.cut(0), 0);
        assert_eq!(slicer.cut(1), 1);
        assert_eq!(slicer.cut(1024), 1024);
        assert_eq!(slicer.cut(1279), 1279);
        assert_eq!(slicer.cut(1280), 1024);
    }

    #[test]
    fn cuts_cover_a_request_exactly() {
        for slice_bytes in [512, 4096, 65536] {
            let slicer = Slicer::new(slice_bytes);
            for len in [1u64, 511, 512, 513, 4095, 4096, 100_000, 16 << 20] {
                let mut left = len;
                while left > 0 {
                    let cut = u64::from(slicer.cut(left));
                    assert!(cut > 0 && cut <= left);
                    left -= cut;
                }
            }
        }
    }
}
