//! Cuts a request into slices, lazily: where the next cut falls is arithmetic, not a list.

use crate::{Op, RegionOffset, RemoteOffset};

/// What a caller asks for: one contiguous local range to or from one contiguous remote range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferRequest {
    /// Which way.
    pub op: Op,
    /// Local region and byte offset into it.
    pub local: RegionOffset,
    /// Attached segment and byte offset into it.
    pub remote: RemoteOffset,
    /// Bytes. 0 is allowed and completes at once.
    pub len: u64,
}

/// Where to cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slicer {
    slice_bytes: u32,
}

impl Slicer {
    /// Bytes a slice when nothing else is said: 64 KiB.
    pub const SLICE_BYTES_DEFAULT: u32 = 64 << 10;
    /// A shorter slice is not worth its header: 512 B.
    pub const SLICE_BYTES_MIN: u32 = 512;
    /// A longer one does not fit a slice's length after a merged tail: 1 GiB.
    pub const SLICE_BYTES_MAX: u32 = 1 << 30;

    /// Slices of `slice_bytes`, brought within the limits above.
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

    /// Bytes a slice.
    #[must_use]
    pub const fn slice_bytes(self) -> u32 {
        self.slice_bytes
    }

    /// Length of the next slice when `remaining` bytes are left; 0 when none are.
    ///
    /// A tail shorter than a quarter of a slice rides with the slice before it: one header less for bytes that would
    /// hardly fill one.
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
