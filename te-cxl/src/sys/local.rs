//! The end of a copy that is not the pool: registered memory, or a few bytes of our own.

use std::marker::PhantomData;

use te_core::{Error, ErrorKind, MemSpan, copy_bytes};

/// Bytes outside the pool that a copy may read and write for `'a`. They are never borrowed: a peer may be
/// writing them.
#[derive(Clone, Copy, Debug)]
pub struct Local<'a> {
    ptr: *mut u8,
    len: usize,
    _alive: PhantomData<&'a ()>,
}

impl<'a> Local<'a> {
    /// Bytes of the caller.
    #[must_use]
    pub fn of(bytes: &'a mut [u8]) -> Self {
        Self { ptr: bytes.as_mut_ptr(), len: bytes.len(), _alive: PhantomData }
    }

    /// The length, in bytes.
    #[must_use]
    pub const fn len(self) -> usize {
        self.len
    }

    /// Whether the length is 0.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The part of `len` bytes from `offset` on; `None` when it does not lie inside.
    #[must_use]
    pub fn part(self, offset: usize, len: usize) -> Option<Self> {
        let end = offset.checked_add(len)?;
        (end <= self.len).then(|| Self { ptr: self.ptr.wrapping_add(offset), len, _alive: PhantomData })
    }

    /// Copies the first bytes out, as many as `out` has.
    ///
    /// # Errors
    /// `OutOfRange` when there are fewer; nothing was copied. `System` when their memory failed.
    pub fn read(self, out: &mut [u8]) -> Result<(), Error> {
        let part = self.part(0, out.len()).ok_or(ErrorKind::OutOfRange)?;
        // SAFETY: the bytes are readable for `'a`, or fail with SIGBUS, which the handler catches where they
        // lie in a pool (`Map::new` has installed it); `out` is exclusively ours.
        #[cfg(target_arch = "x86_64")]
        if unsafe { super::copy::copy(out.as_mut_ptr(), part.ptr, out.len()) }.cause != 0 {
            return Err(Error::with_code(ErrorKind::System, libc::EFAULT));
        }
        // SAFETY: as above, but for the handler.
        #[cfg(not(target_arch = "x86_64"))]
        unsafe {
            copy_bytes(part.ptr, out.as_mut_ptr(), out.len());
        }
        Ok(())
    }

    /// Copies `bytes` to the beginning.
    ///
    /// # Errors
    /// `OutOfRange` when they do not fit; nothing was copied.
    pub fn write(self, bytes: &[u8]) -> Result<(), Error> {
        let part = self.part(0, bytes.len()).ok_or(ErrorKind::OutOfRange)?;
        // SAFETY: the bytes are writable for `'a`; `bytes` is a reference, so they do not overlap.
        unsafe { copy_bytes(bytes.as_ptr(), part.ptr, bytes.len()) };
        Ok(())
    }

    pub(super) const fn as_ptr(self) -> *mut u8 {
        self.ptr
    }
}

/// A span that stays mapped until its region is deregistered. The transport gives up a region only when no
/// slice pins it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pinned(MemSpan);

impl Pinned {
    /// # Safety
    /// The promise of [`te_core::Memory::register`] holds for `span`, and the value and its parts are not
    /// used once `deregister` has returned `Ok`.
    pub(crate) const unsafe fn new(span: MemSpan) -> Self {
        Self(span)
    }

    /// The part of `len` bytes from `offset` on.
    ///
    /// # Errors
    /// `OutOfRange`.
    pub(crate) fn part(&self, offset: u64, len: u64) -> Result<Local<'_>, Error> {
        let part = self.0.part(offset, len)?;
        Ok(Local { ptr: part.as_ptr(), len: part.len(), _alive: PhantomData })
    }
}

impl Local<'_> {
    /// CRC-32C of the bytes; `None` when their memory failed. They are copied to a small buffer first,
    /// because a peer may be writing them and the checksum code needs a reference.
    pub(crate) fn crc32c(self) -> Option<u32> {
        let mut piece = [0; 8 << 10];
        let (mut crc, mut done) = (0, 0);
        while done < self.len {
            let len = (self.len - done).min(piece.len());
            let from = self.ptr.wrapping_add(done);
            // SAFETY: `done + len` stays inside bytes that are readable for `'a`, or fail with SIGBUS, which
            // the handler catches where they lie in a pool (`Map::new` has installed it); `piece` is ours.
            #[cfg(target_arch = "x86_64")]
            if unsafe { super::copy::copy(piece.as_mut_ptr(), from, len) }.cause != 0 {
                return None;
            }
            // SAFETY: as above, but for the handler.
            #[cfg(not(target_arch = "x86_64"))]
            unsafe {
                copy_bytes(from, piece.as_mut_ptr(), len);
            }
            crc = crc32c::crc32c_append(crc, &piece[..len]);
            done += len;
        }
        Some(crc)
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use nix::unistd::ftruncate;

    use super::super::{Access, Opened};
    use super::*;

    #[test]
    fn memory_that_fails_has_no_checksum() {
        const BYTES: usize = 64 << 10;
        let fd = memfd_create("local", MFdFlags::MFD_CLOEXEC).expect("a memory file");
        ftruncate(&fd, BYTES as i64).expect("room");
        let opened = Opened::of(fd.try_clone().expect("a descriptor")).expect("a file");
        let map = opened.map(Access::ReadWrite).expect("a mapping");
        let span = map.span(0, BYTES as u64).expect("the whole mapping");
        // SAFETY: the mapping outlives the value.
        let memory = unsafe { Pinned::new(span) };
        let crc = || memory.part(0, BYTES as u64).expect("the whole").crc32c();
        assert_eq!(crc(), Some(crc32c::crc32c(&[0; BYTES])));
        for bytes in [BYTES as i64 / 2, 0] {
            ftruncate(&fd, bytes).expect("a shorter file");
            assert_eq!(crc(), None, "{bytes} bytes are there");
        }
    }
}
