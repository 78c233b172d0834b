//! Device memory: memfds, mapped twice. The address that callers have is mapped without any right, so a CPU
//! that touches it faults.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use crate::model::{INVALID_VALUE, Mapping, Origin, State};

pub(crate) const PAGE: usize = 4_096;

/// The device's address of page-locked memory is that of the host and this. Copies take the host's alone,
/// words and the kernel the device's alone.
pub(crate) const BY_DEVICE: u64 = 1 << 60;

/// A new memfd of this length.
pub(crate) fn memory(bytes: usize) -> Result<Arc<OwnedFd>, c_int> {
    // SAFETY: a C string; makes a file descriptor.
    let fd = unsafe { libc::memfd_create(c"fake-device".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(2);
    }
    // SAFETY: the descriptor was just made.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: a descriptor of ours.
    match unsafe { libc::ftruncate(fd.as_raw_fd(), bytes as libc::off_t) } {
        0 => Ok(Arc::new(fd)),
        _ => Err(2),
    }
}

/// Maps a memfd; `at`: where, replacing what is there.
pub(crate) fn map(fd: &OwnedFd, bytes: usize, protection: c_int, at: Option<usize>) -> Result<usize, c_int> {
    let fixed = if at.is_some() { libc::MAP_FIXED } else { 0 };
    let hint = ptr::with_exposed_provenance_mut::<c_void>(at.unwrap_or(0));
    // SAFETY: a mapping at an address of the kernel's choice, or over a reservation of ours.
    let start = unsafe { libc::mmap(hint, bytes, protection, libc::MAP_SHARED | fixed, fd.as_raw_fd(), 0) };
    if start == libc::MAP_FAILED { Err(2) } else { Ok(start.expose_provenance()) }
}

/// Address space without memory, where `hint` says if that is free.
pub(crate) fn reserve(bytes: usize, hint: usize) -> Result<usize, c_int> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let hint = ptr::with_exposed_provenance_mut::<c_void>(hint);
    // SAFETY: a new mapping.
    let start = unsafe { libc::mmap(hint, bytes, libc::PROT_NONE, flags, -1, 0) };
    if start == libc::MAP_FAILED { Err(2) } else { Ok(start.expose_provenance()) }
}

pub(crate) fn unmap(at: usize, bytes: usize) {
    // SAFETY: a mapping of ours.
    unsafe { libc::munmap(ptr::with_exposed_provenance_mut(at), bytes) };
}

/// Allocates as `cuMemAlloc` does.
pub(crate) fn allocate(state: &mut State, device: c_int, len: usize, is_managed: bool) -> Result<u64, c_int> {
    if len == 0 || len > 1 << 40 {
        return Err(if len == 0 { INVALID_VALUE } else { 2 });
    }
    let whole = len.next_multiple_of(PAGE);
    // The page behind the memory lists the processes that have it open.
    let fd = memory(whole + PAGE)?;
    // A page behind it belongs to nothing.
    let hint = state.freed.take().filter(|(_, bytes)| *bytes == whole).map_or(0, |(at, _)| at);
    let at = reserve(whole + PAGE, hint)?;
    map(&fd, whole, libc::PROT_NONE, Some(at))?;
    let own = map(&fd, whole, libc::PROT_READ | libc::PROT_WRITE, None)?;
    let (buffer_id, block_id) = (state.id(), state.id());
    let mapping = Mapping {
        bytes: len,
        own,
        fd,
        device,
        range: (at as u64, len),
        is_legacy: true,
        is_managed,
        is_foreign: state.is_foreign,
        is_private: state.is_private,
        handle_types: 0,
        gpu_direct: true,
        buffer_id,
        block_id,
        origin: Origin::Own,
        remote: (0, 0, 0),
        is_writable: true,
    };
    state.mappings.insert(at as u64, mapping);
    Ok(at as u64)
}

/// Frees as `cuMemFree` does.
pub(crate) fn free(state: &mut State, at: u64) -> Result<(), c_int> {
    if !state.mappings.get(&at).is_some_and(|mapping| mapping.is_legacy && mapping.origin == Origin::Own) {
        return Err(INVALID_VALUE);
    }
    let Some(mapping) = state.mappings.remove(&at) else { return Err(INVALID_VALUE) };
    let whole = mapping.bytes.next_multiple_of(PAGE);
    if crate::ipc::is_open(&mapping.fd, whole) {
        // The behaviour of a driver is not defined then.
        crate::faults::freed_while_open();
    }
    // What others have mapped is gone.
    // SAFETY: a descriptor of ours.
    unsafe { libc::ftruncate(mapping.fd.as_raw_fd(), 0) };
    unmap(mapping.own, whole);
    unmap(at as usize, whole + PAGE);
    state.freed = Some((at as usize, whole));
    Ok(())
}

/// Memory of `cuMemCreate` is gone when nothing maps it and no handle of it is left.
pub(crate) fn forget_unused(state: &mut State, handle: u64) {
    let is_mapped = state.mappings.values().any(|mapping| !mapping.is_legacy && mapping.block_id == handle);
    if !is_mapped && state.physical.get(&handle).is_some_and(|physical| physical.handles == 0) {
        state.physical.remove(&handle);
    }
}

/// The mapping that has this address.
pub(crate) fn find(state: &State, at: u64) -> Option<(u64, &Mapping)> {
    let (base, mapping) = state.mappings.range(..=at).next_back()?;
    (at - base < mapping.bytes as u64).then_some((*base, mapping))
}

/// Where the fake has the byte at this address, and how many follow it there.
fn place(state: &State, at: u64) -> (usize, usize) {
    match find(state, at) {
        Some((base, mapping)) => {
            let offset = (at - base) as usize;
            (mapping.own + offset, mapping.bytes - offset)
        }
        // Host memory, by its address.
        None => (at as usize, usize::MAX),
    }
}

/// Whether all bytes are memory of a device that may be read, and written, or page-locked memory of the host.
pub(crate) fn reaches(state: &State, at: u64, len: usize, is_written: bool) -> bool {
    let mut done = 0;
    while done < len {
        let Some((base, mapping)) = find(state, at + done as u64) else {
            return done == 0 && is_pinned(state, at, len) && (!is_written || !is_read_only(state, at));
        };
        if (is_written && !mapping.is_writable) || is_gone(mapping) {
            return false;
        }
        done = (base + mapping.bytes as u64 - at) as usize;
    }
    true
}

/// Whether the process that allocated the memory has freed it.
fn is_gone(mapping: &Mapping) -> bool {
    // SAFETY: plain numbers; the descriptor is ours.
    let bytes = unsafe {
        let mut status: libc::stat = std::mem::zeroed();
        if libc::fstat(mapping.fd.as_raw_fd(), &raw mut status) == 0 { status.st_size } else { 0 }
    };
    (bytes as usize) < mapping.bytes
}

/// Copies between memory of any kind. False: device memory ends before the copy does.
pub(crate) fn copy(state: &State, to: u64, from: u64, len: usize, device: Device) -> bool {
    let ends = match device {
        Device::To => [Some(to), None],
        Device::From => [Some(from), None],
        Device::Any => [None, None],
        Device::Both => match reaches(state, to, len, true) && reaches(state, from, len, false) {
            true => [None, None],
            false => return false,
        },
    };
    for at in ends.into_iter().flatten() {
        let mut done = 0;
        while done < len {
            let Some((base, mapping)) = find(state, at + done as u64) else { return false };
            done = (base + mapping.bytes as u64 - at) as usize;
        }
    }
    let mut done = 0;
    while done < len {
        let (to, room) = place(state, to + done as u64);
        let (from, there) = place(state, from + done as u64);
        let part = (len - done).min(room).min(there);
        // SAFETY: both places are mapped memory: of the fake, or of the host, as the caller of the driver's
        // function promised. They may overlap.
        unsafe {
            ptr::copy(
                ptr::with_exposed_provenance::<u8>(from),
                ptr::with_exposed_provenance_mut::<u8>(to),
                part,
            );
        }
        done += part;
    }
    true
}

/// What synchronous copies have left to do is done.
pub(crate) fn settle(state: &mut State) {
    for (to, bytes) in std::mem::take(&mut state.pending) {
        copy(state, to, bytes.as_ptr().expose_provenance() as u64, bytes.len(), Device::To);
    }
}

/// Which end of a copy has to be device memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Device {
    To,
    From,
    Any,
    /// Both have to be memory that the device reaches.
    Both,
}

/// Whether these bytes of host memory are page-locked.
pub(crate) fn is_pinned(state: &State, at: u64, len: usize) -> bool {
    let before = state.pinned.range(..=at as usize).next_back();
    before.is_some_and(|(base, (bytes, _))| at as usize + len <= base + bytes)
}

/// Whether the process may write a page, by its own mapping.
pub(crate) fn is_mapped_writable(at: usize) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines().any(|line| {
        let Some((range, rest)) = line.split_once(' ') else { return false };
        let bound = |text: &str| usize::from_str_radix(text, 16).unwrap_or(0);
        let (from, to) = range.split_once('-').map_or((0, 0), |(from, to)| (bound(from), bound(to)));
        (from..to).contains(&at) && rest.as_bytes().get(1) == Some(&b'w')
    })
}

/// Whether page-locked memory at this address was registered for reading alone.
fn is_read_only(state: &State, at: u64) -> bool {
    let before = state.pinned.range(..=at as usize).next_back();
    before.is_some_and(|(_, (_, is_read_only))| *is_read_only)
}
