//! Memory files: shared memory of this process, a peer's memory that is mapped here, and the ledger between
//! two processes.

use std::collections::BTreeMap;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, OFlag, SealFlag, fallocate, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, munmap};
use nix::sys::stat::{Mode, fstat};
use nix::unistd::ftruncate;
use te_core::grant::{Inside, ROWS_MAX, Revoked, Row, Rows};
use te_core::{MemSpan, VolatileSpan};

use super::held::{Protection, Window};
use super::wipe::PerProcess;
use crate::fork::Mark;

/// Zeroed, page-aligned memory in a file without a name, mapped here. Its file descriptor can be passed to
/// another process of this host.
#[derive(Debug)]
pub struct SharedMemory {
    map: Map,
    len: usize,
    fd: OwnedFd,
    peers_may_write: bool,
}

/// How to allocate [`SharedMemory`].
#[derive(Clone, Copy, Debug, Default)]
pub struct AllocOptions {
    /// Peers may be granted write access. Without it the kernel refuses them write access.
    pub peers_may_write: bool,
    /// Touch every page at once instead of on first use.
    pub populate: bool,
    /// Request huge pages; the kernel may not have any.
    pub huge_pages: bool,
}

/// Every [`SharedMemory`] of the process by address, so that a span is recognised as shared memory when it is
/// registered.
static ALLOCATED: PerProcess<Mutex<BTreeMap<usize, Weak<SharedMemory>>>> = PerProcess::new();

impl SharedMemory {
    /// Allocates `len` bytes, at least one.
    ///
    /// # Errors
    /// The system's error.
    pub fn new(len: usize, options: AllocOptions) -> io::Result<Arc<Self>> {
        let (fd, map) = create(len, options.peers_may_write)?;
        if options.huge_pages {
            // This is a hint; the kernel may ignore it.
            let _ = map.advise(MmapAdvise::MADV_HUGEPAGE);
        }
        if options.populate {
            // Kernels before 5.14 do not support it; pages are then touched on first use.
            let _ = map.advise(MmapAdvise::MADV_POPULATE_WRITE);
        }
        let memory = Arc::new(Self { map, len, fd, peers_may_write: options.peers_may_write });
        let mut allocated = ALLOCATED.get().lock().unwrap_or_else(PoisonError::into_inner);
        allocated.insert(memory.span().as_ptr().addr(), Arc::downgrade(&memory));
        Ok(memory)
    }

    /// The shared memory that contains all of `span`, and the span's offset in its file.
    #[must_use]
    pub fn find(span: MemSpan) -> Option<(Arc<Self>, u64)> {
        let addr = span.as_ptr().addr();
        let allocated = ALLOCATED.get().lock().unwrap_or_else(PoisonError::into_inner);
        let (&base, memory) = allocated.range(..=addr).next_back()?;
        let memory = memory.upgrade()?;
        // The lock is released first: dropping the last reference takes it.
        drop(allocated);
        let offset = (addr - base) as u64;
        memory.span().contains(offset, span.len() as u64).then_some((memory, offset))
    }

    /// Its address and length. Access it through [`view`](Self::view), or register it.
    #[must_use]
    pub fn span(&self) -> MemSpan {
        MemSpan::new(self.map.ptr.as_ptr(), self.len)
    }

    /// Whether this process is a fork of the process that allocated it.
    #[inline]
    #[must_use]
    pub fn is_forked(&self) -> bool {
        self.map.mark.is_forked()
    }

    /// Its bytes, which other processes may write at any time. Empty in a child after a fork.
    #[must_use]
    pub fn view(&self) -> VolatileSpan<'_> {
        if self.is_forked() {
            return nothing();
        }
        // SAFETY: mapped readable and writable as long as `self`; no reference to it is ever made, and the
        // pointer leaves this module only as a `MemSpan`, whose every use is unsafe.
        unsafe { VolatileSpan::new(self.span()) }
    }

    /// Returns all pages to the system; a page that is touched later is zero in every process that maps it.
    ///
    /// # Errors
    /// `EPERM` for memory that peers may not write: its file is sealed against this as well.
    pub fn discard(&self) -> io::Result<()> {
        let len = i64::try_from(self.len).map_err(|_| Errno::EFBIG)?;
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        Ok(fallocate(&self.fd, flags, 0, len)?)
    }

    /// Whether a peer can be granted write access.
    #[must_use]
    pub fn peers_may_write(&self) -> bool {
        self.peers_may_write
    }

    /// A file descriptor for a peer. Through a read-only one the file cannot be mapped for writing.
    ///
    /// # Errors
    /// The system's error.
    pub fn share(&self, protection: Protection) -> io::Result<OwnedFd> {
        if protection == Protection::ReadWrite {
            return self.fd.try_clone();
        }
        let path = std::format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&self.fd));
        Ok(nix::fcntl::open(path.as_str(), OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())?)
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        if self.is_forked() {
            // The memory, and its entry in the table, belong to the parent.
            return;
        }
        let mut allocated = ALLOCATED.get().lock().unwrap_or_else(PoisonError::into_inner);
        allocated.remove(&self.map.ptr.as_ptr().addr());
        // `map` is unmapped after this, so its address cannot have been allocated again yet.
    }
}

/// A peer's memory, mapped here.
#[derive(Debug)]
pub struct Mapping {
    map: Map,
    /// Offset of the region in the mapping, bytes.
    delta: usize,
    len: u64,
    protection: Protection,
}

impl Mapping {
    /// Maps `len` bytes at `offset` of a file that a peer sent.
    ///
    /// # Errors
    /// `EINVAL` when the file is shorter, or could shrink; otherwise the system's errno.
    pub fn new(fd: BorrowedFd<'_>, offset: u64, len: u64, protection: Protection) -> Result<Self, Errno> {
        check(fd, offset.checked_add(len).ok_or(Errno::EINVAL)?)?;
        let delta = offset % PAGE;
        let map_len = usize::try_from(len + delta).map_err(|_| Errno::EINVAL)?;
        let map = Map::new(fd, offset - delta, map_len, protection)?;
        // A child must not keep a peer's memory mapped that this process has promised to unmap.
        let _ = map.advise(MmapAdvise::MADV_DONTFORK);
        Ok(Self { map, delta: delta as usize, len, protection })
    }

    /// The address and length of the mapped region.
    #[must_use]
    pub fn span(&self) -> MemSpan {
        // `new` mapped that many bytes, so the length fits an address.
        MemSpan::new(self.map.ptr.as_ptr().wrapping_add(self.delta), self.len as usize)
    }

    /// Its bytes, which the peer may write at any time; `None` when it is mapped read-only. Empty in a child
    /// after a fork.
    pub(crate) fn view(&self) -> Option<VolatileSpan<'_>> {
        if self.map.mark.is_forked() {
            return Some(nothing());
        }
        // SAFETY: mapped readable and writable as long as `self`, sealed against shrinking; no reference to
        // it is ever made, and the pointer leaves this module only as a `MemSpan`, whose every use is unsafe.
        (self.protection == Protection::ReadWrite).then(|| unsafe { VolatileSpan::new(self.span()) })
    }

    fn window(&self) -> Window<'_> {
        // SAFETY: mapped as long as `self`, sealed against shrinking, never referenced.
        unsafe { Window::new(self.map.ptr.as_ptr().wrapping_add(self.delta), self.len, self.protection) }
    }
}

/// Pages that owner and peer both map, with a [`Row`] for each grant.
#[derive(Debug)]
pub struct Ledger {
    map: Map,
}

/// The right to access a granted mapping while it lives.
pub(crate) struct Lease<'a> {
    _inside: Inside<'a>,
    mapping: &'a Mapping,
}

impl Ledger {
    const BYTES: usize = ROWS_MAX as usize * size_of::<Row>();

    /// A new ledger, and the file descriptor for the peer.
    ///
    /// # Errors
    /// The system's errno.
    pub fn create() -> Result<(Self, OwnedFd), Errno> {
        let (fd, map) = create(Self::BYTES, true)?;
        Ok((Self { map }, fd))
    }

    /// Maps the ledger that an owner sent.
    ///
    /// # Errors
    /// `EINVAL` when the file is shorter, or could shrink; otherwise the system's errno.
    pub fn open(fd: BorrowedFd<'_>) -> Result<Self, Errno> {
        check(fd, Self::BYTES as u64)?;
        Ok(Self { map: Map::new(fd, 0, Self::BYTES, Protection::ReadWrite)? })
    }

    /// Peer: begins to copy under grant `row`.
    ///
    /// # Errors
    /// The reason why the grant is revoked.
    pub(crate) fn enter<'a>(&'a self, row: u32, mapping: &'a Mapping) -> Result<Lease<'a>, Revoked> {
        let inside = self.row(row).ok_or(Revoked::Region)?.enter()?;
        Ok(Lease { _inside: inside, mapping })
    }

    /// A row of the ledger.
    #[must_use]
    pub fn row(&self, row: u32) -> Option<&Row> {
        // SAFETY: the index lies in the mapping, which lives as long as `self`, is page-aligned and sealed
        // against shrinking; any bits are a valid `Row`, and both sides access them only as its atomics.
        (row < ROWS_MAX).then(|| unsafe { &*self.map.ptr.as_ptr().cast::<Row>().add(row as usize) })
    }
}

impl Rows for Ledger {
    fn reset(&self, row: u32) {
        if let Some(row) = self.row(row) {
            row.reset();
        }
    }

    fn revoke(&self, row: u32, why: Revoked) -> bool {
        self.row(row).is_none_or(|row| row.revoke(why))
    }
}

impl Lease<'_> {
    /// The granted memory, for as long as this guard is borrowed.
    pub(crate) fn window(&self) -> Window<'_> {
        self.mapping.window()
    }
}

/// A mapping that is unmapped on drop. A child after a fork does not unmap it: other memory may be at that
/// address.
#[derive(Debug)]
struct Map {
    ptr: NonNull<u8>,
    len: NonZeroUsize,
    mark: Mark,
}

// SAFETY: an address range; code that accesses it has to justify that.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    fn new(fd: BorrowedFd<'_>, offset: u64, len: usize, protection: Protection) -> Result<Self, Errno> {
        let len = NonZeroUsize::new(len).ok_or(Errno::EINVAL)?;
        let offset = offset.try_into().map_err(|_| Errno::EINVAL)?;
        let flags = match protection {
            Protection::ReadOnly => ProtFlags::PROT_READ,
            Protection::ReadWrite => ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
        };
        // SAFETY: the kernel picks the address, so nothing that exists is replaced.
        let ptr = unsafe { mmap(None, len, flags, MapFlags::MAP_SHARED, fd, offset) }?;
        Ok(Self { ptr: ptr.cast(), len, mark: Mark::new() })
    }

    fn advise(&self, advice: MmapAdvise) -> Result<(), Errno> {
        // SAFETY: a mapping of this process; none of the advices used here changes its bytes.
        unsafe { madvise(self.ptr.cast(), self.len.get(), advice) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        if self.mark.is_forked() {
            return;
        }
        // SAFETY: a mapping of this process; everything that accessed it had borrowed it from its owner.
        let unmapped = unsafe { munmap(self.ptr.cast(), self.len.get()) };
        debug_assert!(unmapped.is_ok(), "munmap of a mapping of this process");
    }
}

/// What a child has in place of its parent's memory.
fn nothing<'a>() -> VolatileSpan<'a> {
    // SAFETY: it has no bytes.
    unsafe { VolatileSpan::new(MemSpan::new(NonNull::dangling().as_ptr(), 0)) }
}

/// Page size of x86_64, the smallest of Linux. Offsets in memory files are multiples of it, or are rounded
/// down to one.
const PAGE: u64 = 4096;

fn create(len: usize, peers_may_write: bool) -> Result<(OwnedFd, Map), Errno> {
    if len == 0 {
        return Err(Errno::EINVAL);
    }
    let fd = memfd_create("snowskin", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    ftruncate(&fd, len.try_into().map_err(|_| Errno::EFBIG)?)?;
    let map = Map::new(fd.as_fd(), 0, len, Protection::ReadWrite)?;
    // No process that gets the file can make this one fault by truncating it, or remove the seals. The
    // mapping of this process exists already: the last seal leaves it writable and prevents every later
    // writable mapping.
    let mut seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    if !peers_may_write {
        seals |= SealFlag::from_bits_retain(libc::F_SEAL_FUTURE_WRITE);
    }
    fcntl(&fd, FcntlArg::F_ADD_SEALS(seals))?;
    Ok((fd, map))
}

/// Whether a file that a peer sent has `len` bytes and always will.
fn check(fd: BorrowedFd<'_>, len: u64) -> Result<(), Errno> {
    let seals = SealFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GET_SEALS)?);
    let size = u64::try_from(fstat(fd)?.st_size).map_err(|_| Errno::EINVAL)?;
    if size >= len && seals.contains(SealFlag::F_SEAL_SHRINK) { Ok(()) } else { Err(Errno::EINVAL) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::copy;

    #[test]
    fn a_span_of_shared_memory_is_recognised_and_others_are_not() {
        let memory = SharedMemory::new(10_000, AllocOptions::default()).unwrap();
        let part = memory.span().part(100, 50).unwrap();
        assert_eq!(SharedMemory::find(part).unwrap().1, 100);
        let too_long = MemSpan::new(memory.span().as_ptr(), 10_001);
        assert!(SharedMemory::find(too_long).is_none());
        let mut elsewhere = [0u8; 4];
        assert!(SharedMemory::find(MemSpan::new(elsewhere.as_mut_ptr(), 4)).is_none());
        let span = memory.span();
        drop(memory);
        assert!(SharedMemory::find(span).is_none());
    }

    #[test]
    fn a_read_only_share_cannot_be_mapped_for_writing() {
        let memory = SharedMemory::new(4096, AllocOptions::default()).unwrap();
        memory.view().write(0, b"hello").unwrap();
        for fd in [memory.share(Protection::ReadOnly).unwrap(), memory.share(Protection::ReadWrite).unwrap()]
        {
            assert!(Mapping::new(fd.as_fd(), 0, 4096, Protection::ReadWrite).is_err(), "the kernel refuses");
        }
        let fd = memory.share(Protection::ReadOnly).unwrap();
        let mapping = Mapping::new(fd.as_fd(), 1, 5, Protection::ReadOnly).unwrap();
        let other = SharedMemory::new(16, AllocOptions::default()).unwrap();
        // SAFETY: the test accesses `other` only through windows and views.
        let held = unsafe { super::super::HeldSpan::new(other.span()) };
        let inside = held.enter().unwrap();
        copy(mapping.window(), 0, inside.window(), 0, 4).unwrap();
        assert!(copy(inside.window(), 0, mapping.window(), 0, 1).is_err(), "read-only");
        let mut bytes = [0; 4];
        other.view().read(0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"ello");
    }

    #[test]
    fn discarded_memory_costs_nothing_and_reads_as_zeroes_in_every_mapping() {
        let options = AllocOptions { peers_may_write: true, populate: true, huge_pages: false };
        let memory = SharedMemory::new(1 << 20, options).unwrap();
        memory.view().write(12_345, b"content").unwrap();
        let fd = memory.share(Protection::ReadWrite).unwrap();
        let mapping = Mapping::new(fd.as_fd(), 0, 1 << 20, Protection::ReadWrite).unwrap();
        let blocks = || fstat(&memory.fd).unwrap().st_blocks;
        assert!(blocks() > 0);
        memory.discard().unwrap();
        assert_eq!(blocks(), 0);
        let mut seen = [1; 7];
        mapping.view().unwrap().read(12_345, &mut seen).unwrap();
        assert_eq!(seen, [0; 7]);
        // A peer that continues in the middle of a copy does no harm.
        mapping.view().unwrap().write(12_345, b"late").unwrap();
        let sealed = SharedMemory::new(4096, AllocOptions::default()).unwrap();
        let refused = sealed.discard().unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn a_file_that_could_shrink_is_not_mapped() {
        let fd = memfd_create("test", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).unwrap();
        ftruncate(&fd, 8192).unwrap();
        assert_eq!(Mapping::new(fd.as_fd(), 0, 4096, Protection::ReadWrite).unwrap_err(), Errno::EINVAL);
        let memory = SharedMemory::new(4096, AllocOptions::default()).unwrap();
        let fd = memory.share(Protection::ReadOnly).unwrap();
        assert_eq!(Mapping::new(fd.as_fd(), 0, 4097, Protection::ReadOnly).unwrap_err(), Errno::EINVAL);
        assert!(ftruncate(&memory.fd, 0).is_err(), "sealed");
    }

    #[test]
    fn a_revoked_grant_lets_the_peer_finish_and_never_in_again() {
        let memory =
            SharedMemory::new(4096, AllocOptions { peers_may_write: true, ..Default::default() }).unwrap();
        let fd = memory.share(Protection::ReadWrite).unwrap();
        let mapping = Mapping::new(fd.as_fd(), 0, 4096, Protection::ReadWrite).unwrap();
        let (owner, fd) = Ledger::create().unwrap();
        let peer = Ledger::open(fd.as_fd()).unwrap();
        let lease = peer.enter(3, &mapping).unwrap();
        assert!(!owner.revoke(3, Revoked::Region));
        assert!(owner.revoke(4, Revoked::Region), "another grant is not affected");
        drop(lease);
        assert!(owner.revoke(3, Revoked::Region));
        assert!(peer.enter(3, &mapping).is_err_and(|why| why == Revoked::Region));
        assert!(owner.revoke(3, Revoked::Region), "a refused attempt leaves nothing behind");
        assert!(owner.revoke(3, Revoked::Peer));
        assert!(owner.revoke(3, Revoked::Region), "the better reason stays");
        assert!(peer.enter(3, &mapping).is_err_and(|why| why == Revoked::Peer));
        owner.reset(3);
        assert!(peer.enter(3, &mapping).is_ok());
        assert!(peer.enter(ROWS_MAX, &mapping).is_err(), "no such row");
    }
}
