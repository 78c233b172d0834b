//! Registered memory of the simulated devices: the key table, mapped dma-bufs, and the only code of the
//! simulation that touches bytes.
//!
//! Every copy goes between memory that was found in a table under the fabric's lock, and buffers of the
//! simulation. `Registrar::register`'s promise covers it until `deregister` returned, and `deregister` takes
//! the same lock.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use te_core::MemSpan;

use crate::sys::verbs::{MrAccess, Sge};

/// What drivers want the address and the offset of a dma-buf to agree in.
const PAGE: u64 = 4_096;

/// Part of a dma-buf, mapped as long as the value exists. Any file that can be mapped stands in for one.
#[derive(Debug)]
pub(crate) struct Mapping {
    /// Whole pages.
    whole: MemSpan,
    /// The part.
    span: MemSpan,
}

impl Mapping {
    /// Maps `len` bytes from `offset` on.
    ///
    /// # Errors
    /// An errno: the system's, or `EINVAL` for bytes that the file does not have.
    pub(crate) fn new(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<Self, i32> {
        let errno = |error: std::io::Error| error.raw_os_error().unwrap_or(libc::EIO);
        let file = File::from(fd.try_clone_to_owned().map_err(errno)?);
        let (end, bytes) = (offset.checked_add(len), file.metadata().map_err(errno)?.len());
        if len == 0 || end.is_none_or(|end| end > bytes) {
            return Err(libc::EINVAL);
        }
        let (first, skip) = (offset / PAGE * PAGE, offset % PAGE);
        let whole = (skip + len) as usize;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice, which touches no other memory.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), whole, protection, flags, file.as_raw_fd(), first as i64)
        };
        if start == libc::MAP_FAILED {
            return Err(errno(std::io::Error::last_os_error()));
        }
        let whole = MemSpan::new(start.cast(), whole);
        let span = MemSpan::new(whole.as_ptr().wrapping_add(skip as usize), len as usize);
        Ok(Self { whole, span })
    }

    pub(crate) fn span(&self) -> MemSpan {
        self.span
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, unmapped once; the table entry that named it is gone, and nothing else
        // has its address.
        unsafe { libc::munmap(self.whole.as_ptr().cast(), self.whole.len()) };
    }
}

/// The memory that a key names.
#[derive(Debug)]
struct Entry {
    span: MemSpan,
    /// The address by which work requests and peers name the first byte.
    address: u64,
    access: MrAccess,
    /// Keeps `span` mapped, if it is part of a dma-buf.
    _mapping: Option<Mapping>,
}

/// One slot of a device's table. The tag is the last byte of its keys and changes with each use, as on real
/// devices.
#[derive(Debug)]
struct Slot {
    tag: u8,
    entry: Option<Entry>,
}

/// Remote keys have this bit, so that no local key is a valid remote key.
const REMOTE_KEY: u32 = 1 << 31;

/// A device's registrations.
#[derive(Debug, Default)]
pub(crate) struct MrTable {
    slots: Vec<Slot>,
    free: VecDeque<u32>,
    live: u32,
    pinned_bytes: u64,
}

/// The memory that a key and a range name. Valid while the fabric's lock is held.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target<'a> {
    at: *mut u8,
    len: usize,
    _lock: std::marker::PhantomData<&'a MrTable>,
}

impl MrTable {
    pub(crate) fn live(&self) -> u32 {
        self.live
    }

    pub(crate) fn pinned_bytes(&self) -> u64 {
        self.pinned_bytes
    }

    /// Adds a registration; returns its handle, its local and its remote key. `mapping` keeps `span` mapped.
    pub(crate) fn insert(
        &mut self,
        (span, mapping): (MemSpan, Option<Mapping>),
        address: u64,
        access: MrAccess,
        first_tag: u8,
    ) -> (u64, u32, u32) {
        let index = self.free.pop_front().unwrap_or_else(|| {
            self.slots.push(Slot { tag: first_tag, entry: None });
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        slot.tag = slot.tag.wrapping_add(1);
        slot.entry = Some(Entry { span, address, access, _mapping: mapping });
        self.live += 1;
        self.pinned_bytes += span.len() as u64;
        let key = (index + 1) << 8 | u32::from(slot.tag);
        let remote = access.intersects(MrAccess::REMOTE_READ | MrAccess::REMOTE_WRITE);
        (u64::from(key), key, if remote { key | REMOTE_KEY } else { 0 })
    }

    /// Removes a registration; false: there is none with this handle.
    pub(crate) fn remove(&mut self, handle: u64) -> bool {
        let Ok(key) = u32::try_from(handle) else { return false };
        let Some(entry) = self.entry(key) else { return false };
        let (bytes, index) = (entry.span.len() as u64, (key >> 8) - 1);
        self.slots[index as usize].entry = None;
        // Slots are used again oldest first, so that a stale key names a live slot as late as possible.
        self.free.push_back(index);
        self.live -= 1;
        self.pinned_bytes -= bytes;
        true
    }

    /// Removes every registration.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// The memory that a peer reaches with `key`, if the key grants `right` to all of the range.
    #[inline]
    pub(crate) fn remote(&self, key: u32, addr: u64, len: u64, right: MrAccess) -> Option<Target<'_>> {
        if key & REMOTE_KEY == 0 {
            return None;
        }
        self.find(key & !REMOTE_KEY, addr, len, right)
    }

    /// The memory of a piece of a work request; `right` is `LOCAL_WRITE` or empty.
    #[inline]
    pub(crate) fn local(&self, sge: &Sge, right: MrAccess) -> Option<Target<'_>> {
        self.find(sge.local_key, sge.addr, u64::from(sge.len), right)
    }

    #[inline]
    fn find(&self, key: u32, addr: u64, len: u64, right: MrAccess) -> Option<Target<'_>> {
        let entry = self.entry(key)?;
        let offset = addr.checked_sub(entry.address)?;
        if !entry.access.contains(right) || !entry.span.contains(offset, len) {
            return None;
        }
        Some(Target {
            at: entry.span.as_ptr().wrapping_add(offset as usize),
            len: len as usize,
            _lock: std::marker::PhantomData,
        })
    }

    #[inline]
    fn entry(&self, key: u32) -> Option<&Entry> {
        let index = (key >> 8).checked_sub(1)?;
        let slot = self.slots.get(index as usize)?;
        if slot.tag == key as u8 { slot.entry.as_ref() } else { None }
    }
}

impl Target<'_> {
    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// The part from `offset` on, at most `len` bytes.
    pub(crate) fn part(self, offset: usize, len: usize) -> Self {
        let offset = offset.min(self.len);
        Self { at: self.at.wrapping_add(offset), len: len.min(self.len - offset), ..self }
    }

    /// Copies as many bytes as both have from `source`. The two may overlap: a device may write to itself.
    pub(crate) fn copy_from(self, source: Target<'_>) {
        // SAFETY: both came from `MrTable::find`, so they lie inside registered, mapped memory to which no
        // reference exists (the promise of `Registrar::register`; a `Mapping` is reached only here), and
        // the lock that `deregister` takes is held.
        unsafe { std::ptr::copy(source.at, self.at, self.len.min(source.len)) };
    }

    /// Copies as many bytes as both have out of a packet.
    pub(crate) fn write(self, bytes: &[u8]) {
        // SAFETY: as above for `self`; `bytes` is a buffer of the simulation, which is never registered, so
        // they do not overlap.
        unsafe { te_core::copy_bytes(bytes.as_ptr(), self.at, self.len.min(bytes.len())) };
    }

    /// Copies as many bytes as both have into a packet.
    pub(crate) fn read(self, bytes: &mut [u8]) {
        // SAFETY: as in `write`, in the other direction.
        unsafe { te_core::copy_bytes(self.at, bytes.as_mut_ptr(), self.len.min(bytes.len())) };
    }
}

/// Copies the bytes of an inline piece.
///
/// # Safety
/// `sge` is readable, as `Verbs::post` requires of inline requests.
pub(crate) unsafe fn copy_inline(sge: &Sge, out: &mut [u8]) {
    let from = std::ptr::with_exposed_provenance::<u8>(sge.addr as usize);
    // SAFETY: the caller's promise; `out` is ours alone.
    unsafe { te_core::copy_bytes(from, out.as_mut_ptr(), out.len().min(sge.len as usize)) };
}
