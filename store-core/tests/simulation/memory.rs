//! Memory that the simulated fabric writes, and the bytes that belong in it.

use store_core::chunks::{CHUNK_BYTES, ChunkSums};
use te_core::testkit::Rng;
use te_core::{MemSpan, VolatileSpan};

/// Bytes that are only ever accessed through a volatile view.
pub(crate) struct Memory {
    bytes: *mut [u8],
}

impl Memory {
    pub(crate) fn new(len: usize, fill: u8) -> Self {
        Self { bytes: Box::into_raw(vec![fill; len].into_boxed_slice()) }
    }

    pub(crate) fn span(&self) -> MemSpan {
        MemSpan::new(self.bytes.cast(), self.bytes.len())
    }

    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        self.view().write(offset, bytes).unwrap();
    }

    pub(crate) fn read(&self, offset: u64, len: u64) -> Vec<u8> {
        let mut out = vec![0; len as usize];
        self.view().read(offset, &mut out).unwrap();
        out
    }

    /// Flips one bit of a byte.
    pub(crate) fn flip(&self, offset: u64) {
        let byte = self.read(offset, 1)[0];
        self.write(offset, &[byte ^ 0x10]);
    }

    fn view(&self) -> VolatileSpan<'_> {
        // SAFETY: the box lives as long as `self`, and no reference to its bytes exists.
        unsafe { VolatileSpan::new(self.span()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: from `Box::into_raw`; transports are dropped first, so the fabric is done with it.
        drop(unsafe { Box::from_raw(self.bytes) });
    }
}

/// The bytes of one put: those of two puts differ everywhere, so that a mix is noticed.
pub(crate) fn content(put: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    Rng::new(put ^ 0x5eed_0000_0000).fill(&mut bytes);
    bytes
}

/// The checksums of an object's chunks.
pub(crate) fn sums(bytes: &[u8]) -> ChunkSums {
    let mut sums = ChunkSums::default();
    bytes.chunks(CHUNK_BYTES as usize).for_each(|block| sums.push(checksum(block), block.len() as u64));
    sums
}

/// CRC-32C.
pub(crate) fn checksum(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes)
}
