//! Device memory for NICs: dma-bufs, and ordering after a peer's writes.

use std::ffi::c_int;
use std::os::fd::{FromRawFd, OwnedFd};

use te_core::{Error, ErrorKind};

use super::abi::{
    DEVICE_WRITES_ORDERING, DevicePtr, FLUSH_TARGET_CURRENT_CTX, FLUSH_TO_OWNER, IpcHandle,
    POINTER_SYNC_MEMOPS, RANGE_HANDLE_DMA_BUF, WRITES_ORDERED_FOR_OWNER,
};
use super::device::Device;
use super::pointer::Found;

/// What drivers want dma-bufs to begin and end at: pages of the host.
fn page() -> u64 {
    // SAFETY: reads a constant of the system.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(bytes).ok().filter(|bytes| *bytes > 0).unwrap_or(4_096)
}

/// A dma-buf over the whole pages of the mapping, and where `at` is in it.
pub(crate) fn dmabuf(device: &Device, found: &Found, at: DevicePtr) -> Result<(OwnedFd, u64), Error> {
    let export = device.driver.range_handle.ok_or(ErrorKind::Unsupported)?;
    let _entered = device.enter()?;
    sync_memops(device, at);
    let (mapping, bytes) = found.whole;
    let from = mapping / page() * page();
    let end = (mapping + bytes as u64).next_multiple_of(page());
    let mut fd: c_int = -1;
    // SAFETY: the driver writes a file descriptor, which has the size of `fd`, and checks the range.
    let code = unsafe { export((&raw mut fd).cast(), from, (end - from) as usize, RANGE_HANDLE_DMA_BUF, 0) };
    device.check(code)?;
    if fd < 0 {
        return Err(ErrorKind::System.into());
    }
    // SAFETY: the driver made the descriptor for this call, and nothing else has it.
    Ok((unsafe { OwnedFd::from_raw_fd(fd) }, at - from))
}

/// The memory may be written by a NIC: synchronous calls of the driver do not return before their copies are
/// done. It is advice, and a driver that refuses it has other means.
fn sync_memops(device: &Device, at: DevicePtr) {
    let on: u32 = 1;
    if let Some(set) = device.driver.pointer_set {
        // SAFETY: reads one number; the address is only looked up.
        let code = unsafe { set((&raw const on).cast(), POINTER_SYNC_MEMOPS, at) };
        if device.check(code).is_err() {
            log::debug!("{}: SYNC_MEMOPS was refused: {code}", device.info.location);
        }
    }
}

/// Makes what peers wrote by RDMA visible to the device's work that is submitted from now on.
pub(crate) fn flush_writes(device: &Device) -> Result<(), Error> {
    let ordering = device.attribute(DEVICE_WRITES_ORDERING);
    if ordering.is_some_and(|ordering| ordering >= WRITES_ORDERED_FOR_OWNER) {
        return Ok(());
    }
    let flush = device.driver.flush_writes.ok_or(ErrorKind::Unsupported)?;
    let _entered = device.enter()?;
    // SAFETY: no memory is involved.
    device.check(unsafe { flush(FLUSH_TARGET_CURRENT_CTX, FLUSH_TO_OWNER) })
}

/// The handle by which another process of the host opens the allocation.
pub(crate) fn ipc_handle(device: &Device, base: DevicePtr) -> Result<[u8; 64], Error> {
    let get = device.driver.ipc_get.ok_or(ErrorKind::Unsupported)?;
    let _entered = device.enter()?;
    let mut handle = IpcHandle([0; 64]);
    // SAFETY: writes 64 bytes; the address is looked up.
    device.check(unsafe { get(&raw mut handle, base) })?;
    Ok(handle.0)
}
