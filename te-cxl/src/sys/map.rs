//! Devices and files that hold a pool, and mappings of them.

use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, munmap};
use nix::sys::stat::{Mode, SFlag, fstat, major, minor};
use te_core::{MemSpan, VolatileSpan};

use crate::lines::{Cause, Fault};
use crate::pool::PoolError;
use crate::pool::bad::BadGranules;

#[cfg(target_arch = "x86_64")]
use super::reports::Watch;

/// What a mapping may be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Everything.
    ReadWrite,
    /// Nothing is written.
    ReadOnly,
}

/// A device or a file that can be mapped.
#[derive(Debug)]
pub(crate) struct Opened {
    fd: OwnedFd,
    /// The number of bytes that it has.
    pub(crate) size: u64,
}

impl Opened {
    pub(crate) fn open(path: &Path, access: Access) -> Result<Self, PoolError> {
        let rights = if access == Access::ReadWrite { OFlag::O_RDWR } else { OFlag::O_RDONLY };
        let fd = open(path, rights | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK, Mode::empty())
            .map_err(|errno| PoolError::system("open the pool", errno))?;
        Self::of(fd)
    }

    pub(crate) fn of(fd: OwnedFd) -> Result<Self, PoolError> {
        let stat = fstat(&fd).map_err(|errno| PoolError::system("look at the pool", errno))?;
        let kind = SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT;
        let size = match kind {
            SFlag::S_IFREG => u64::try_from(stat.st_size).unwrap_or(0),
            SFlag::S_IFCHR => dax_bytes(major(stat.st_rdev), minor(stat.st_rdev))?,
            _ => return Err(PoolError::NotMappable),
        };
        Ok(Self { fd, size })
    }

    pub(crate) fn map(&self, access: Access) -> Result<Map, PoolError> {
        Map::new(self, access)
    }
}

impl AsFd for Opened {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The size of a devdax device, from sysfs: such a device has no size of its own.
fn dax_bytes(major: u64, minor: u64) -> Result<u64, PoolError> {
    let node = format!("/sys/dev/char/{major}:{minor}");
    let subsystem = std::fs::read_link(format!("{node}/subsystem"));
    if !subsystem.is_ok_and(|target| target.ends_with("dax")) {
        return Err(PoolError::NotMappable);
    }
    let size = std::fs::read_to_string(format!("{node}/size"));
    let size = size.map_err(|source| PoolError::System { what: "read the size of the device", source })?;
    size.trim().parse().map_err(|_| PoolError::NotMappable)
}

/// A mapping of a whole pool, shared with every process and host that maps it. A child after a fork does not
/// have it.
#[derive(Debug)]
pub(crate) struct Map {
    ptr: NonNull<u8>,
    len: NonZeroUsize,
    here: Here,
    // Dropped before what it refers to.
    #[cfg(target_arch = "x86_64")]
    _watch: Option<Watch>,
    /// What the hardware has reported as damaged. In a box: the handler of SIGBUS has its address.
    bad: Box<BadGranules>,
}

// SAFETY: an address range; code that accesses it has to justify that.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    fn new(opened: &Opened, access: Access) -> Result<Self, PoolError> {
        let step = |errno| PoolError::system("map the pool", errno);
        #[cfg(target_arch = "x86_64")]
        super::signal::install()
            .map_err(|source| PoolError::System { what: "install the handler of SIGBUS", source })?;
        let len = usize::try_from(opened.size).ok().and_then(NonZeroUsize::new);
        let len = len.ok_or(PoolError::TooSmall { bytes: opened.size, needed: crate::pool::PAGE })?;
        let here = Here::new().map_err(step)?;
        let rights = match access {
            Access::ReadOnly => ProtFlags::PROT_READ,
            Access::ReadWrite => ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
        };
        // SAFETY: the kernel picks the address, so nothing that exists is replaced.
        let ptr = unsafe { mmap(None, len, rights, MapFlags::MAP_SHARED, &opened.fd, 0) }.map_err(step)?;
        let bad = Box::new(BadGranules::new(opened.size));
        #[cfg(target_arch = "x86_64")]
        let watch = Watch::new(ptr.as_ptr().addr(), len.get(), &bad);
        let map = Self {
            ptr: ptr.cast(),
            len,
            here,
            #[cfg(target_arch = "x86_64")]
            _watch: watch,
            bad,
        };
        // A child must not write as its parent does. Where the kernel refuses it, `range` still does.
        // SAFETY: a mapping of this process, whose bytes the advice does not change.
        let _ = unsafe { madvise(map.ptr.cast(), len.get(), MmapAdvise::MADV_DONTFORK) };
        Ok(map)
    }

    /// What the hardware has reported as damaged.
    pub(crate) fn bad(&self) -> &BadGranules {
        &self.bad
    }

    /// Makes everything from `from` on read-only for this process.
    pub(crate) fn protect_from(&self, from: u64) -> Result<(), PoolError> {
        let len = self.len.get().saturating_sub(from as usize);
        if len == 0 {
            return Ok(());
        }
        let first = self.ptr.as_ptr().wrapping_add(from as usize);
        let first = NonNull::new(first).ok_or(PoolError::NotMappable)?;
        // SAFETY: a part of a mapping of this process, which only the copy routines write.
        unsafe { mprotect(first.cast(), len, ProtFlags::PROT_READ) }
            .map_err(|errno| PoolError::system("protect the pool", errno))
    }

    /// The address of `len` bytes at `at`.
    pub(super) fn range(&self, at: u64, len: u64) -> Result<*mut u8, Fault> {
        if self.here.is_forked() {
            return Err(Fault { cause: Cause::Forked, done: 0 });
        }
        let end = at.checked_add(len).ok_or(Fault::RANGE)?;
        if end > self.len.get() as u64 {
            return Err(Fault::RANGE);
        }
        Ok(self.ptr.as_ptr().wrapping_add(at as usize))
    }

    /// The offset of an address in the mapping.
    pub(crate) fn offset_of(&self, addr: usize) -> Option<u64> {
        let offset = addr.checked_sub(self.ptr.as_ptr().addr())?;
        (offset < self.len.get()).then_some(offset as u64)
    }

    /// The offset of a span that lies in the mapping.
    pub(crate) fn find(&self, span: MemSpan) -> Option<u64> {
        let at = self.offset_of(span.as_ptr().addr())?;
        (at + span.len() as u64 <= self.len.get() as u64).then_some(at)
    }

    /// The bytes of a span that lies in the mapping. `None` in a child after a fork.
    pub(crate) fn view(&self, span: MemSpan) -> Option<VolatileSpan<'_>> {
        self.find(span).filter(|_| !self.here.is_forked())?;
        // SAFETY: the mapping is read and written, as the caller says; it lives as long as the view borrows
        // it, and no reference to its bytes is ever made.
        Some(unsafe { VolatileSpan::new(span) })
    }

    /// Whether this process is a fork of the one that has made the mapping.
    pub(crate) fn is_forked(&self) -> bool {
        self.here.is_forked()
    }

    /// Whether any byte of a span lies in the mapping.
    pub(crate) fn overlaps(&self, span: MemSpan) -> bool {
        let (ours, theirs) = (self.ptr.as_ptr().addr(), span.as_ptr().addr());
        let (end, their_end) = (ours + self.len.get(), theirs.saturating_add(span.len()));
        theirs < end && ours < their_end
    }

    /// The address and length of a part, which lies inside.
    pub(crate) fn span(&self, at: u64, len: u64) -> Option<MemSpan> {
        MemSpan::new(self.ptr.as_ptr(), self.len.get()).part(at, len).ok()
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        if self.here.is_forked() {
            // Other memory may be at that address.
            return;
        }
        // SAFETY: a mapping of this process; everything that accessed it had borrowed it from its owner.
        let unmapped = unsafe { munmap(self.ptr.cast(), self.len.get()) };
        debug_assert!(unmapped.is_ok(), "munmap of a mapping of this process");
    }
}

/// Whether this is the process that made the value: a page that the kernel wipes in a forked child.
#[derive(Debug)]
struct Here(NonNull<AtomicU32>);

const HERE_BYTES: NonZeroUsize = match NonZeroUsize::new(crate::pool::PAGE as usize) {
    Some(bytes) => bytes,
    None => NonZeroUsize::MIN,
};

impl Here {
    fn new() -> Result<Self, Errno> {
        let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: the kernel picks the address, so nothing that exists is replaced.
        let page = unsafe { mmap_anonymous(None, HERE_BYTES, rights, MapFlags::MAP_PRIVATE) }?;
        let here = Self(page.cast());
        // SAFETY: a mapping of this process, made above.
        unsafe { madvise(page, HERE_BYTES.get(), MmapAdvise::MADV_WIPEONFORK) }?;
        here.word().store(1, Ordering::Relaxed);
        Ok(here)
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: the page is mapped until the value drops; a page of zeroes is a valid atomic.
        unsafe { self.0.as_ref() }
    }

    fn is_forked(&self) -> bool {
        self.word().load(Ordering::Relaxed) == 0
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, by this process or its parent, and used by this value alone.
        let unmapped = unsafe { munmap(self.0.cast(), HERE_BYTES.get()) };
        debug_assert!(unmapped.is_ok(), "munmap of a mapping of this process");
    }
}
