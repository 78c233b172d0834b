//! Memory under test: at a fixed address, without references to it.
#![allow(unsafe_code, reason = "raw memory, so that no reference to bytes that a peer may write exists (L7)")]

use te_core::testkit::pattern_at;
use te_core::{MemSpan, VolatileSpan};

/// Memory that stays where it is, and that is read and written only through volatile copies.
#[derive(Debug)]
pub struct Block {
    ptr: *mut u8,
    len: usize,
}

impl Block {
    /// `len` bytes, all zero.
    #[must_use]
    pub fn new(len: usize) -> Self {
        let bytes = vec![0_u8; len].into_boxed_slice();
        Self { ptr: Box::into_raw(bytes).cast(), len }
    }

    /// The span to register.
    #[must_use]
    pub const fn span(&self) -> MemSpan {
        MemSpan::new(self.ptr, self.len)
    }

    /// A copy of `len` bytes from `offset` on.
    #[must_use]
    pub fn get(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.view().read(offset, &mut out).unwrap();
        out
    }

    /// Copies `bytes` in at `offset`.
    pub fn set(&self, offset: u64, bytes: &[u8]) {
        self.view().write(offset, bytes).unwrap();
    }

    /// Fills the block with the [`pattern`] of a seed.
    pub fn paint(&self, seed: u8) {
        self.set(0, &pattern(seed, 0, self.len));
    }

    const fn view(&self) -> VolatileSpan<'_> {
        // SAFETY: the block lives as long as `self` and nothing else refers to it.
        unsafe { VolatileSpan::new(self.span()) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: made by `Box::into_raw` in `new` from a boxed slice of this length, and freed once.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.ptr, self.len)) });
    }
}

/// `len` bytes from `offset` on of a pattern; each byte depends on its place and on the seed.
#[must_use]
pub fn pattern(seed: u8, offset: u64, len: usize) -> Vec<u8> {
    pattern_at(seed.into(), offset, len)
}
