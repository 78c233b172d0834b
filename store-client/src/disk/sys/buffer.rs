//! Memory that direct I/O may use.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use te_core::MemSpan;

/// Alignment of every buffer, bytes: enough for every device.
const ALIGN: usize = 4_096;

/// Bytes that begin at a multiple of 4,096, as direct I/O needs them.
pub struct AlignedBuffer {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: it owns its memory, as a `Vec` does.
unsafe impl Send for AlignedBuffer {}
// SAFETY: as above; a shared buffer can only be read.
unsafe impl Sync for AlignedBuffer {}

impl AlignedBuffer {
    /// A buffer of `len` zeros.
    ///
    /// # Panics
    /// `len` is more than `isize::MAX`.
    #[must_use]
    pub fn new(len: usize) -> Self {
        let Some(layout) = layout(len) else { return Self { ptr: NonNull::dangling(), len: 0 } };
        // SAFETY: the layout has a size.
        let ptr = unsafe { alloc_zeroed(layout) };
        let Some(ptr) = NonNull::new(ptr) else { handle_alloc_error(layout) };
        Self { ptr, len }
    }

    /// The buffer as an address.
    pub(crate) const fn span(&self) -> MemSpan {
        MemSpan::new(self.ptr.as_ptr(), self.len)
    }
}

/// `None`: nothing to allocate.
fn layout(len: usize) -> Option<Layout> {
    match Layout::from_size_align(len, ALIGN) {
        Ok(layout) => (len > 0).then_some(layout),
        Err(_) => handle_alloc_error(Layout::new::<u8>()),
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        if let Some(layout) = layout(self.len) {
            // SAFETY: allocated in `new` with the same layout; nothing else has the pointer, because an
            // operation of the kernel owns the buffer that it uses.
            unsafe { dealloc(self.ptr.as_ptr(), layout) };
        }
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` bytes that are initialised and that this owns; with length 0 the pointer is not used.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; the exclusive borrow of the buffer is one of its bytes.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl fmt::Debug for AlignedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AlignedBuffer").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_zero() {
        for len in [0, 1, 512, 4_096, 100_000] {
            let mut buffer = AlignedBuffer::new(len);
            assert_eq!((buffer.len(), buffer.iter().all(|byte| *byte == 0)), (len, true));
            assert!(len == 0 || buffer.as_ptr().addr().is_multiple_of(ALIGN));
            buffer.fill(7);
            assert!(buffer.iter().all(|byte| *byte == 7));
        }
    }
}
