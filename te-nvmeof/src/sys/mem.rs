//! Registered memory: an address that stays valid because of the promise given at registration.

use te_core::{Error, MemSpan, copy_bytes};

/// A span, or part of one, that stays mapped until its region is deregistered.
///
/// The transport keeps two counts for each region, of its own slices and of peers' payloads, and gives up a
/// region only when both are zero; each `Pinned` that it holds is covered by one of the two. Every `SAFETY`
/// comment of this crate relies on that.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pinned(MemSpan);

impl Pinned {
    /// # Safety
    /// The promise of [`te_core::Memory::register`] holds for `span`, which is host memory, and the value,
    /// its copies and its parts are not used once `deregister` has returned `Ok`.
    pub(crate) const unsafe fn new(span: MemSpan) -> Self {
        Self(span)
    }

    /// Bytes that are never freed, for tests.
    #[cfg(test)]
    pub(crate) fn leaked(bytes: Vec<u8>) -> Self {
        let (len, memory) = (bytes.len(), Box::into_raw(bytes.into_boxed_slice()));
        // SAFETY: the bytes came out of their box, are never freed, and nothing else refers to them.
        unsafe { Self::new(MemSpan::new(memory.cast(), len)) }
    }

    #[inline]
    pub(crate) const fn len(self) -> usize {
        self.0.len()
    }

    #[inline]
    pub(crate) fn part(self, offset: u64, len: u64) -> Result<Self, Error> {
        self.0.part(offset, len).map(Self)
    }

    /// The part from `offset` to the end; empty when `offset` lies outside.
    #[inline]
    pub(crate) fn tail(self, offset: u64) -> Self {
        let left = (self.0.len() as u64).saturating_sub(offset);
        self.0.part(offset, left).map_or(Self(MemSpan::new(self.0.as_ptr(), 0)), Self)
    }

    pub(super) const fn as_ptr(self) -> *mut u8 {
        self.0.as_ptr()
    }

    /// Copies as many of `bytes` as fit to the beginning of the memory.
    pub(crate) fn fill_from(self, bytes: &[u8]) {
        let len = bytes.len().min(self.len());
        // SAFETY: `new`: the span is mapped and no reference to it exists; `bytes` is a reference, so they
        // cannot overlap.
        unsafe { copy_bytes(bytes.as_ptr(), self.as_ptr(), len) };
    }

    /// Copies the bytes out.
    pub(crate) fn to_vec(self) -> Vec<u8> {
        let mut out = vec![0; self.len()];
        // SAFETY: as in `fill_from`, in the other direction.
        unsafe { copy_bytes(self.as_ptr(), out.as_mut_ptr(), out.len()) };
        out
    }

    /// CRC-32C of the bytes, appended to `crc`. A peer may be writing them.
    pub(crate) fn crc32c(self, crc: u32) -> u32 {
        // SAFETY: `new`: the span is mapped, and no reference to it is made.
        unsafe { te_host::crc32c_at(crc, self.as_ptr(), self.len()) }
    }
}
