//! Buffers whose owner is taken apart while they are registered.
//!
//! A `Box` or `Vec` beside a raw pointer to the same bytes is undefined behaviour as soon as both are used:
//! moving the owner asserts that no other pointer reaches its memory. Therefore the owner is decomposed into
//! its raw parts first and composed again at the end.
#![allow(unsafe_code, reason = "owners are decomposed and composed here; the trait states the contract")]

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::mem::ManuallyDrop;

use crate::{Access, MemSpan, RegionId, VolatileSpan};

/// An owner of host memory that can be decomposed into raw parts and composed again.
///
/// # Safety
/// `into_raw` returns a span that is valid for reads and writes, initialised, and stays in place until
/// `from_raw` gets the same parts, exactly once. No reference to it exists meanwhile.
pub unsafe trait Buffer: Sized + Send + 'static {
    /// What `from_raw` needs besides the span.
    type Rest: Copy + Send;

    /// Decomposes the owner.
    fn into_raw(self) -> (MemSpan, Self::Rest);

    /// Composes the owner.
    ///
    /// # Safety
    /// The parts come from `into_raw`, and this is their first use here.
    unsafe fn from_raw(span: MemSpan, rest: Self::Rest) -> Self;
}

// SAFETY: the heap block of a vector stays in place while the vector is decomposed; ptr, len and capacity
// rebuild it.
unsafe impl Buffer for Vec<u8> {
    type Rest = usize;

    fn into_raw(self) -> (MemSpan, usize) {
        let mut this = ManuallyDrop::new(self);
        (MemSpan::new(this.as_mut_ptr(), this.len()), this.capacity())
    }

    unsafe fn from_raw(span: MemSpan, capacity: usize) -> Self {
        // SAFETY: the parts of a vector, by the trait's contract.
        unsafe { Vec::from_raw_parts(span.as_ptr(), span.len(), capacity) }
    }
}

// SAFETY: as for `Vec`, without spare capacity.
unsafe impl Buffer for Box<[u8]> {
    type Rest = ();

    fn into_raw(self) -> (MemSpan, ()) {
        let len = self.len();
        (MemSpan::new(Box::into_raw(self).cast::<u8>(), len), ())
    }

    unsafe fn from_raw(span: MemSpan, (): ()) -> Self {
        // SAFETY: the parts of a boxed slice, by the trait's contract.
        unsafe { Box::from_raw(core::ptr::slice_from_raw_parts_mut(span.as_ptr(), span.len())) }
    }
}

/// A buffer that is registered. Its owner is decomposed until [`Registered::into_inner`].
///
/// Dropping it leaks the memory: it may be freed only after `deregister`, and `drop` cannot know of that.
/// Engines count such leaks.
#[must_use = "dropping a registered buffer leaks it: return it to the engine that registered it"]
pub struct Registered<B: Buffer> {
    span: MemSpan,
    rest: B::Rest,
    region: RegionId,
    access: Access,
}

impl<B: Buffer> Registered<B> {
    /// Decomposes `buffer` for registration as `region` with `access`.
    pub fn new(buffer: B, region: RegionId, access: Access) -> Self {
        let (span, rest) = buffer.into_raw();
        Self { span, rest, region, access }
    }

    /// The region as which it is registered.
    #[must_use]
    pub const fn region(&self) -> RegionId {
        self.region
    }

    /// The span of its bytes.
    #[must_use]
    pub const fn span(&self) -> MemSpan {
        self.span
    }

    /// Its bytes, when no peer can write them. No transfer of this process uses them while the value can be
    /// borrowed: a transfer owns the value.
    #[must_use]
    pub fn as_slice(&self) -> Option<&[u8]> {
        // SAFETY: the parts are valid and initialised (`Buffer`), no peer may write them, and a transfer owns
        // the value while it runs, so none runs while `self` is borrowed.
        self.is_private().then(|| unsafe { core::slice::from_raw_parts(self.span.as_ptr(), self.span.len()) })
    }

    /// Its bytes, when no peer can read or write them.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        let private = !self.access.is_remote();
        // SAFETY: as in `as_slice`, and `self` is borrowed exclusively.
        private.then(|| unsafe { core::slice::from_raw_parts_mut(self.span.as_ptr(), self.span.len()) })
    }

    /// Its bytes, whether or not a peer may write them: copied in and out (L7). Borrows the buffer
    /// exclusively, because the view can write, and `as_slice` may have lent a private buffer.
    #[must_use]
    pub fn volatile(&mut self) -> VolatileSpan<'_> {
        // SAFETY: the memory lives as long as `self`, and `self` is borrowed exclusively: no reference from
        // `as_slice` or `as_mut_slice` exists.
        unsafe { VolatileSpan::new(self.span) }
    }

    /// Composes the owner again.
    ///
    /// # Safety
    /// The region is deregistered: `Memory::deregister` returned `Ok` for it.
    pub unsafe fn into_inner(self) -> B {
        // SAFETY: the parts come from `new` and are used once, since `self` is consumed.
        unsafe { B::from_raw(self.span, self.rest) }
    }

    fn is_private(&self) -> bool {
        !self.access.contains(Access::REMOTE_WRITE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn an_owner_survives_being_taken_apart() {
        let mut vec = Vec::with_capacity(10);
        vec.extend_from_slice(&[1, 2, 3]);
        let mut registered = Registered::new(vec, RegionId::new(0, 0), Access::LOCAL);
        registered.as_mut_slice().expect("private")[1] = 9;
        assert_eq!(registered.as_slice(), Some(&[1, 9, 3][..]));
        // SAFETY: it was never registered with a transport.
        let vec = unsafe { registered.into_inner() };
        assert_eq!((vec.as_slice(), vec.capacity()), (&[1, 9, 3][..], 10));
    }

    #[test]
    fn a_buffer_that_peers_may_write_is_never_lent() {
        let all = Access::LOCAL | Access::REMOTE_WRITE;
        let mut registered = Registered::new(vec![7u8; 4].into_boxed_slice(), RegionId::new(0, 0), all);
        assert!(registered.as_slice().is_none() && registered.as_mut_slice().is_none());
        let mut copy = [0; 4];
        registered.volatile().read(0, &mut copy).expect("in range");
        assert_eq!(copy, [7; 4]);
        // SAFETY: it was never registered with a transport.
        drop(unsafe { registered.into_inner() });
    }
}
