//! Numbers and byte strings in little endian, as the structures on disk have them.

use alloc::vec::Vec;

/// Reads from the front of bytes. Every function returns `None` at the end of them.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

/// Highest number of something that is counted: the next ones exist, too.
const COUNTER_MAX: u64 = u64::MAX / 2;

impl<'a> Reader<'a> {
    pub(super) fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(bytes)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// A number that will be counted on from.
    pub(super) fn counter(&mut self) -> Option<u64> {
        self.u64().filter(|number| *number <= COUNTER_MAX)
    }
}

/// Appends to bytes.
pub(super) trait Append {
    fn put_u16(&mut self, number: u16);
    fn put_u32(&mut self, number: u32);
    fn put_u64(&mut self, number: u64);
}

impl Append for Vec<u8> {
    fn put_u16(&mut self, number: u16) {
        self.extend_from_slice(&number.to_le_bytes());
    }

    fn put_u32(&mut self, number: u32) {
        self.extend_from_slice(&number.to_le_bytes());
    }

    fn put_u64(&mut self, number: u64) {
        self.extend_from_slice(&number.to_le_bytes());
    }
}
