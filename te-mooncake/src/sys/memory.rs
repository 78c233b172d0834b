//! Host memory: an address that stays valid because of the promise given at registration.

use te_core::{Error, MemSpan};

/// A range of host memory, or part of one.
///
/// What holds a `Memory` holds something that keeps the range mapped, too: a pin of its region (the
/// initiator), or a guard of its export (the target). Every `SAFETY` comment of this module's siblings relies
/// on that.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory(MemSpan);

impl Memory {
    /// No bytes.
    pub(crate) const NONE: Self = Self(MemSpan::new(std::ptr::null_mut(), 0));

    /// # Safety
    /// The promise of [`te_core::Memory::register`] holds for `span`, which is host memory, and neither the
    /// value nor a copy or part of it is used once that promise has ended.
    pub(crate) const unsafe fn new(span: MemSpan) -> Self {
        Self(span)
    }

    pub(crate) const fn len(self) -> usize {
        self.0.len()
    }

    /// The part of `len` bytes from `offset` on.
    ///
    /// # Errors
    /// `OutOfRange`.
    pub(crate) fn part(self, offset: u64, len: u64) -> Result<Self, Error> {
        self.0.part(offset, len).map(Self)
    }

    /// The bytes from `offset` on, at most `len_max`; none when `offset` lies outside.
    pub(crate) fn from(self, offset: u64, len_max: u64) -> Self {
        let left = (self.0.len() as u64).saturating_sub(offset).min(len_max);
        self.0.part(offset, left).map_or(Self::NONE, Self)
    }

    pub(super) const fn as_ptr(self) -> *mut u8 {
        self.0.as_ptr()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_stays_inside() {
        let mut bytes = [0_u8; 8];
        // SAFETY: the bytes outlive the value, which is not used to access them.
        let memory = unsafe { Memory::new(MemSpan::new(bytes.as_mut_ptr(), bytes.len())) };
        assert_eq!(memory.part(2, 6).map(Memory::len), Ok(6));
        assert!(memory.part(2, 7).is_err() && memory.part(u64::MAX, 2).is_err());
        let lens = [(0, 3), (6, 9), (8, 1), (9, 1), (u64::MAX, 1)]
            .map(|(offset, max)| memory.from(offset, max).len());
        assert_eq!(lens, [3, 2, 0, 0, 0]);
    }
}
