//! How a region is divided into registrations, which both ends compute from the same three numbers.

/// The division of a region into chunks. A chunk begins where the address is a multiple of the chunk length,
/// which is a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunking {
    /// Address of the region's first byte.
    pub base: u64,
    /// Bytes of the region; not 0.
    pub len: u64,
    /// log2 of the chunk length in bytes.
    pub shift: u32,
}

impl Chunking {
    /// `None` for an empty region, one that wraps around the end of the address space, or a chunk length that
    /// is not a power of two.
    #[must_use]
    pub const fn new(base: u64, len: u64, chunk_bytes: u64) -> Option<Self> {
        if len == 0 || base.checked_add(len - 1).is_none() || !chunk_bytes.is_power_of_two() {
            return None;
        }
        Some(Self { base, len, shift: chunk_bytes.trailing_zeros() })
    }

    /// The number of chunks.
    #[must_use]
    pub const fn count(&self) -> u64 {
        (((self.base + (self.len - 1)) >> self.shift) - (self.base >> self.shift)) + 1
    }

    /// The chunk in which the byte at `offset` lies, and how many bytes of that chunk follow, that byte
    /// included.
    #[must_use]
    pub const fn locate(&self, offset: u64) -> (u64, u64) {
        let address = self.base + offset;
        let chunk = (address >> self.shift) - (self.base >> self.shift);
        let mask = (1_u64 << self.shift) - 1;
        let to_boundary = (mask - (address & mask)).saturating_add(1);
        let to_end = self.len - offset;
        (chunk, if to_boundary < to_end { to_boundary } else { to_end })
    }

    /// Offset of the first byte of chunk `index`, and its length in bytes.
    #[must_use]
    pub const fn chunk(&self, index: u64) -> (u64, u64) {
        let offset =
            if index == 0 { 0 } else { (((self.base >> self.shift) + index) << self.shift) - self.base };
        (offset, self.locate(offset).1)
    }
}
