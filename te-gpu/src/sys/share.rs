//! Device memory for NICs and for other processes: dma-bufs, ordering after a peer's writes, and handles.

use std::ffi::c_int;
use std::os::fd::{FromRawFd, OwnedFd};

use te_core::{Error, ErrorKind};

use super::abi::{
    DEVICE_WRITES_ORDERING, DevicePtr, FLUSH_TARGET_CURRENT_CTX, FLUSH_TO_OWNER, HANDLE_FABRIC,
    HANDLE_POSIX_FD, IpcHandle, POINTER_SYNC_MEMOPS, RANGE_HANDLE_DMA_BUF, WRITES_ORDERED_FOR_OWNER,
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

/// A handle by which another process maps memory.
#[derive(Debug)]
pub enum Handle {
    /// A file descriptor of memory that was mapped by virtual memory management.
    Fd(OwnedFd),
    /// A fabric handle of such memory.
    Fabric([u8; 64]),
    /// An IPC handle of the older interface. It shares the whole allocation.
    Ipc([u8; 64]),
}

/// A part of a span, and how another process maps it.
#[derive(Debug)]
pub struct SharedPart {
    /// The handle.
    pub handle: Handle,
    /// The length of the memory that the handle is of, bytes.
    pub bytes: u64,
    /// Where the part begins in that memory, bytes.
    pub offset: u64,
    /// The length of the part, bytes.
    pub len: u64,
}

/// Why memory cannot be shared with other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotShared {
    /// It is not memory of a device, or the span leaves its allocation.
    NotDeviceMemory(Error),
    /// The memory at this address was allocated without any handle.
    NoHandle {
        /// The address.
        at: usize,
    },
    /// The memory at this address was allocated without a fabric handle, which other hosts need.
    NoFabric {
        /// The address.
        at: usize,
    },
    /// The driver refused the handle.
    Refused {
        /// The kind of handle: `POSIX file descriptor`, `IPC` or `fabric`.
        handle: &'static str,
        /// Its error.
        error: Error,
    },
    /// The memory consists of more mappings than a span may have here.
    TooManyParts {
        /// The most that are allowed.
        max: usize,
    },
}

impl NotShared {
    /// The error that stands for it: `Unsupported`, or the one that led to it.
    #[must_use]
    pub const fn error(&self) -> Error {
        match self {
            Self::NotDeviceMemory(error) => *error,
            Self::NoHandle { .. } | Self::NoFabric { .. } | Self::TooManyParts { .. } => {
                Error::new(ErrorKind::Unsupported)
            }
            Self::Refused { error, .. } => Error::with_code(ErrorKind::Unsupported, error.code),
        }
    }
}

impl std::fmt::Display for NotShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotDeviceMemory(error) => write!(f, "no allocation of device memory covers it: {error}"),
            Self::NoHandle { at } => write!(
                f,
                "the memory at {at:#x} was allocated without a shareable handle, as pools of cudaMallocAsync do: allocate \
                 it with cudaMalloc, or with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
            ),
            Self::NoFabric { at } => write!(
                f,
                "the memory at {at:#x} has no fabric handle, as memory of cudaMalloc: allocate it with cuMemCreate \
                 and CU_MEM_HANDLE_TYPE_FABRIC, in a process that has an IMEX channel"
            ),
            Self::Refused { handle: "fabric", error } if error.code == super::abi::NOT_PERMITTED => write!(
                f,
                "the driver refused the fabric handle with 800: this process has no IMEX channel; pass \
                 /dev/nvidia-caps-imex-channels/channel0 into the container"
            ),
            Self::Refused { handle, error } => {
                write!(f, "the driver refused the {handle} handle with {} ({error})", error.code)
            }
            Self::TooManyParts { max } => {
                write!(f, "it consists of more than {max} mappings: register parts of it")
            }
        }
    }
}

impl std::error::Error for NotShared {}

/// The best handle of the part of the mapping from `at` on: a file descriptor where the memory has one, then
/// the older IPC, then a fabric handle.
pub(crate) fn part(device: &Device, found: &Found, at: DevicePtr, len: u64) -> Result<SharedPart, NotShared> {
    let _entered = device.enter().map_err(NotShared::NotDeviceMemory)?;
    let refused = |handle| move |error| NotShared::Refused { handle, error };
    let (base, bytes) = found.whole;
    let (offset, bytes) = (at - base, bytes as u64);
    if found.handle_types & HANDLE_POSIX_FD != 0 {
        let mut fd: c_int = -1;
        export(device, at, HANDLE_POSIX_FD, (&raw mut fd).cast())
            .map_err(refused("POSIX file descriptor"))?;
        if fd < 0 {
            return Err(refused("POSIX file descriptor")(ErrorKind::System.into()));
        }
        // SAFETY: the driver made the descriptor for this call, and nothing else has it.
        let handle = Handle::Fd(unsafe { OwnedFd::from_raw_fd(fd) });
        return Ok(SharedPart { handle, bytes, offset, len });
    }
    if found.is_legacy {
        // Handles mean whole allocations, from their base on, and a span may begin anywhere in one.
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: writes two numbers; the address is not accessed.
        let code = unsafe { (device.driver.address_range)(&raw mut base, &raw mut bytes, at) };
        device.check(code).map_err(refused("IPC"))?;
        let handle = Handle::Ipc(ipc_handle(device, base).map_err(refused("IPC"))?);
        return Ok(SharedPart { handle, bytes: bytes as u64, offset: at - base, len });
    }
    if found.handle_types & HANDLE_FABRIC != 0 {
        return fabric_part(device, found, at, len);
    }
    Err(NotShared::NoHandle { at: at as usize })
}

/// The fabric handle of the part of the mapping from `at` on.
pub(crate) fn fabric_part(
    device: &Device,
    found: &Found,
    at: DevicePtr,
    len: u64,
) -> Result<SharedPart, NotShared> {
    if found.handle_types & HANDLE_FABRIC == 0 {
        return Err(NotShared::NoFabric { at: at as usize });
    }
    let _entered = device.enter().map_err(NotShared::NotDeviceMemory)?;
    let (mut handle, (base, bytes)) = ([0; 64], found.whole);
    export(device, at, HANDLE_FABRIC, handle.as_mut_ptr().cast())
        .map_err(|error| NotShared::Refused { handle: "fabric", error })?;
    Ok(SharedPart { handle: Handle::Fabric(handle), bytes: bytes as u64, offset: at - base, len })
}

/// Writes the handle of an allocation that anyone in this process made. `out` has the size of the type.
fn export(device: &Device, at: DevicePtr, kind: u32, out: *mut std::ffi::c_void) -> Result<(), Error> {
    let driver = &device.driver;
    let (Some(retain), Some(export), Some(release)) =
        (driver.vmm_retain, driver.vmm_export, driver.vmm_release)
    else {
        return Err(ErrorKind::Unsupported.into());
    };
    let mut allocation = 0;
    // SAFETY: writes one number; the address is looked up.
    device.check(unsafe { retain(&raw mut allocation, std::ptr::without_provenance_mut(at as usize)) })?;
    // SAFETY: a handle that was just retained; `out` has the size of the type that is wanted.
    let code = unsafe { export(out, allocation, kind, 0) };
    // SAFETY: retained above, released once.
    device.gave_back("a handle", unsafe { release(allocation) });
    device.check(code)
}
