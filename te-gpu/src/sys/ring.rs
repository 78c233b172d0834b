//! Page-locked host memory: mapped next to the device, in huge pages where the kernel has some, and
//! registered with the driver.
//!
//! `cuMemHostAlloc` would not say on which NUMA node the pages are; so they are mapped, bound to the node,
//! and then registered.

use std::ffi::{c_long, c_ulong, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use te_core::{Error, ErrorKind, MemSpan};

use super::abi::{DevicePtr, HOST_REGISTER_DEVICEMAP, HOST_REGISTER_PORTABLE};
use super::device::Device;

const HUGE_PAGE: usize = 2 << 20;
/// `MPOL_PREFERRED` of mbind(2).
const PREFERRED: c_long = 1;

/// Page-locked memory, zeroed. It is given back when the value is dropped, unless it was
/// [abandoned](Self::abandon).
pub(crate) struct Pinned {
    device: Arc<Device>,
    span: MemSpan,
    /// The same memory as the device addresses it.
    by_device: DevicePtr,
    is_abandoned: bool,
}

impl Pinned {
    /// Maps and registers at least `bytes`. The caller has entered the device.
    pub(crate) fn new(device: &Arc<Device>, bytes: usize) -> Result<Self, Error> {
        let span = map(bytes.next_multiple_of(HUGE_PAGE), device.info.numa_node)?;
        let flags = HOST_REGISTER_PORTABLE | HOST_REGISTER_DEVICEMAP;
        // SAFETY: memory that was just mapped and that only this value unmaps, after it was unregistered.
        let code = unsafe { (device.driver.host_register)(span.as_ptr().cast(), span.len(), flags) };
        if let Err(error) = device.check(code) {
            unmap(span);
            return Err(error);
        }
        let mut pinned = Self { device: Arc::clone(device), span, by_device: 0, is_abandoned: false };
        // SAFETY: registered above; writes one address.
        let code = unsafe {
            (device.driver.host_device_pointer)(&raw mut pinned.by_device, span.as_ptr().cast(), 0)
        };
        device.check(code)?;
        Ok(pinned)
    }

    pub(crate) fn span(&self) -> MemSpan {
        self.span
    }

    /// The host's address of the byte at `offset`.
    pub(crate) fn by_host(&self, offset: usize) -> DevicePtr {
        self.span.as_ptr().expose_provenance() as u64 + offset as u64
    }

    /// The device's address of the byte that has this address on the host.
    pub(crate) fn to_device(&self, by_host: DevicePtr) -> DevicePtr {
        by_host - self.by_host(0) + self.by_device
    }

    /// The address that the device has for the byte at `offset`.
    pub(crate) fn by_device(&self, offset: usize) -> DevicePtr {
        self.by_device + offset as u64
    }

    /// The memory is never unmapped: a device may still write to it.
    pub(crate) fn abandon(&mut self) {
        self.is_abandoned = true;
    }

    /// The word at `offset`, which the device writes.
    pub(crate) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.span.len(), "a word of the memory");
        // SAFETY: inside the mapping, aligned, mapped as long as `self`, zeroed at first; the CPU accesses it
        // as an atomic alone.
        unsafe { &*self.span.as_ptr().add(offset).cast::<AtomicU64>() }
    }

    /// Writes a value that only the device reads, while it does not read it.
    pub(crate) fn put<T: Copy>(&self, offset: usize, value: T) {
        let room = self.span.len() - size_of::<T>();
        assert!(offset <= room && offset.is_multiple_of(align_of::<T>()), "inside the memory");
        // SAFETY: inside the mapping and aligned; no reference to it exists.
        unsafe { self.span.as_ptr().add(offset).cast::<T>().write(value) };
    }
}

impl Pinned {
    /// Reads a byte that the device has written and does not write now.
    pub(crate) fn byte(&self, offset: usize) -> u8 {
        assert!(offset < self.span.len(), "inside the memory");
        // SAFETY: inside the mapping; no reference to it exists.
        unsafe { self.span.as_ptr().add(offset).read_volatile() }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.is_abandoned {
            return;
        }
        let Ok(_entered) = self.device.enter_to_free() else { return };
        // SAFETY: registered in `new`; nothing of the device uses it any more.
        let code = unsafe { (self.device.driver.host_unregister)(self.span.as_ptr().cast()) };
        // After an error the driver may still have it: the pages stay.
        if self.device.gave_back("page-locked memory", code) {
            unmap(self.span);
        }
    }
}

/// Address space for slots of a stager whose device has failed. It takes no memory until a slot is used.
pub(crate) struct Spare(MemSpan);

impl Spare {
    pub(crate) fn new(bytes: usize) -> Result<Self, Error> {
        fresh(bytes).map(Self)
    }

    pub(crate) fn span(&self) -> MemSpan {
        self.0
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        unmap(self.0);
    }
}

/// New zeroed pages, which take no memory until they are touched.
fn fresh(bytes: usize) -> Result<MemSpan, Error> {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the kernel's choice, which touches no other memory.
    let start = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        let code = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
        return Err(Error::with_code(ErrorKind::Full, code));
    }
    Ok(MemSpan::new(start.cast(), bytes))
}

/// Fresh zeroed pages, aligned to huge ones, if possible on this node.
fn map(bytes: usize, node: Option<u16>) -> Result<MemSpan, Error> {
    let start = fresh(bytes + HUGE_PAGE)?.as_ptr();
    let skip = start.addr().next_multiple_of(HUGE_PAGE) - start.addr();
    let from = start.wrapping_add(skip);
    for (part, len) in [(start, skip), (from.wrapping_add(bytes), HUGE_PAGE - skip)] {
        if len > 0 {
            unmap(MemSpan::new(part, len));
        }
    }
    prefer(from, bytes, node);
    // SAFETY: fresh pages that are ours alone. Touching them places them, so that registering finds them.
    unsafe { from.write_bytes(0, bytes) };
    // No child of a fork gets them: a copy-on-write fault of the parent would move them away from the device.
    // SAFETY: advice about memory of ours.
    unsafe { libc::madvise(from.cast(), bytes, libc::MADV_DONTFORK) };
    Ok(MemSpan::new(from, bytes))
}

/// Asks for huge pages of this node. The memory is as good without either.
fn prefer(from: *mut u8, bytes: usize, node: Option<u16>) {
    // SAFETY: advice about memory of ours.
    unsafe { libc::madvise(from.cast::<c_void>(), bytes, libc::MADV_HUGEPAGE) };
    let Some(node) = node.filter(|node| *node < 1_024) else { return };
    let mut nodes = [0 as c_ulong; 1_024 / c_ulong::BITS as usize];
    nodes[usize::from(node) / c_ulong::BITS as usize] = 1 << (u32::from(node) % c_ulong::BITS);
    // SAFETY: mbind(2) of memory of ours, with a mask of 1,024 bits (one more than the kernel reads).
    unsafe { libc::syscall(libc::SYS_mbind, from, bytes, PREFERRED, nodes.as_ptr(), 1_025 as c_ulong, 0) };
}

fn unmap(span: MemSpan) {
    // SAFETY: mapped in `map`, unmapped once, and nothing has its address any more.
    unsafe { libc::munmap(span.as_ptr().cast(), span.len()) };
}

/// Reads a word that the device writes, and everything that it wrote before.
#[inline]
pub(crate) fn seen(word: &AtomicU64) -> u64 {
    word.load(Ordering::Acquire)
}
