//! Memory that somebody else may write.
//!
//! Two rules hold for every byte that a peer can reach, and every `SAFETY` comment in the project leans on them:
//!
//! 1. From `register` until `deregister` returned `Ok`, the span stays mapped.
//! 2. In that time there is no `&[u8]` or `&mut [u8]` to bytes that a peer may write. They are read through a
//!    [`VolatileSpan`], which copies them out.
#![allow(unsafe_code, reason = "raw memory is this module's business; the two rules above are its contract")]

use crate::{Error, ErrorKind};

bitflags::bitflags! {
    /// Who may do what with a registered region.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Access: u8 {
        /// Local operations may read it (source of a WRITE).
        const LOCAL_READ = 1;
        /// Local operations may write it (destination of a READ).
        const LOCAL_WRITE = 1 << 1;
        /// A peer that holds the export may read it.
        const REMOTE_READ = 1 << 2;
        /// A peer that holds the export may write it.
        const REMOTE_WRITE = 1 << 3;
    }
}

impl Access {
    /// A private buffer: source and destination of local operations, never exported.
    pub const LOCAL: Self = Self::LOCAL_READ.union(Self::LOCAL_WRITE);

    /// Whether any peer can reach the region.
    #[must_use]
    pub const fn is_remote(self) -> bool {
        self.intersects(Self::REMOTE_READ.union(Self::REMOTE_WRITE))
    }
}

/// Where memory lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Location {
    /// Host memory, node unknown or irrelevant.
    #[default]
    Host,
    /// Host memory of a NUMA node.
    Numa(u16),
}

/// A range of bytes somewhere: address, length, location. An address, not a borrow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemSpan {
    ptr: *mut u8,
    len: usize,
    location: Location,
}

// SAFETY: a span is only an address; each use of the memory behind it is unsafe and argued for where it happens.
unsafe impl Send for MemSpan {}
// SAFETY: as above; a shared span gives no access.
unsafe impl Sync for MemSpan {}

impl MemSpan {
    /// `len` bytes of host memory at `ptr`.
    #[must_use]
    pub const fn new(ptr: *mut u8, len: usize) -> Self {
        Self { ptr, len, location: Location::Host }
    }

    /// The same bytes, with a better idea of where they live.
    #[must_use]
    pub const fn at(self, location: Location) -> Self {
        Self { location, ..self }
    }

    /// First byte.
    #[must_use]
    pub const fn as_ptr(self) -> *mut u8 {
        self.ptr
    }

    /// Bytes.
    #[must_use]
    pub const fn len(self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Where it lives.
    #[must_use]
    pub const fn location(self) -> Location {
        self.location
    }

    /// Whether `len` bytes from `offset` on lie inside.
    #[must_use]
    pub const fn contains(self, offset: u64, len: u64) -> bool {
        match offset.checked_add(len) {
            Some(end) => end <= self.len as u64,
            None => false,
        }
    }

    /// The part of `len` bytes from `offset` on.
    ///
    /// # Errors
    /// `OutOfRange` when it does not lie inside.
    pub fn part(self, offset: u64, len: u64) -> Result<Self, Error> {
        if !self.contains(offset, len) {
            return Err(Error::new(ErrorKind::OutOfRange));
        }
        Ok(Self { ptr: self.ptr.wrapping_add(offset as usize), len: len as usize, location: self.location })
    }
}

/// A view of memory that a peer may be writing at this moment: bytes are copied in and out, never borrowed (L7).
///
/// A copy taken while a peer writes holds some mix of old and new bytes; checksums tell. What it never does is lend
/// the compiler a reference on whose stability it could rely.
#[derive(Clone, Copy, Debug)]
pub struct VolatileSpan<'a> {
    span: MemSpan,
    _mapped: core::marker::PhantomData<&'a ()>,
}

impl VolatileSpan<'_> {
    /// # Safety
    /// `span` is host memory, mapped readable and writable, for as long as the view lives, and no `&` or `&mut` to it exists.
    #[must_use]
    pub const unsafe fn new(span: MemSpan) -> Self {
        Self { span, _mapped: core::marker::PhantomData }
    }

    /// Bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.span.len()
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.span.is_empty()
    }

    /// Copies `out.len()` bytes from `offset` on into `out`.
    ///
    /// # Errors
    /// `OutOfRange` when they do not lie inside; nothing was copied.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        let part = self.span.part(offset, out.len() as u64)?;
        // SAFETY: `part` lies inside memory that `new`'s caller keeps mapped; `out` is ours alone, so they do not overlap.
        unsafe { copy_bytes(part.as_ptr(), out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// Copies `bytes` into the memory from `offset` on.
    ///
    /// # Errors
    /// `OutOfRange` when they do not fit; nothing was copied.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let part = self.span.part(offset, bytes.len() as u64)?;
        // SAFETY: as in `read`, with the direction turned round.
        unsafe { copy_bytes(bytes.as_ptr(), part.as_ptr(), bytes.len()) };
        Ok(())
    }
}

/// Copies `len` bytes that a peer may be changing meanwhile.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes, and the two do not overlap.
pub unsafe fn copy_bytes(from: *const u8, to: *mut u8, len: usize) {
    // The copy is opaque to the optimiser for any length that is not a constant, and no reference is made; this is
    // what `vm-memory` and the standard library's own mapped-file users rely on.
    // SAFETY: the caller's promise.
    unsafe { core::ptr::copy_nonoverlapping(from, to, len) };
}
