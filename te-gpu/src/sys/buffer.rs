//! Device memory that this crate allocates, in a way that other processes and NICs can share.

use std::ffi::c_int;
use std::fmt;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use te_core::{Error, ErrorKind, Location, MemSpan};

use super::abi::{
    AccessDesc, AllocationProp, Api, DEVICE_FABRIC, DEVICE_POSIX_FD, DEVICE_VMM, DevicePtr,
    GRANULARITY_MINIMUM, HANDLE_FABRIC, HANDLE_POSIX_FD, SUCCESS,
};
use super::device::Device;
use super::share;

/// Ways in which other processes can map the memory of a [`DeviceBuffer`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HandleTypes {
    /// By a file descriptor, in processes of this host.
    pub posix_fd: bool,
    /// By a fabric handle, in processes of the hosts of one NVLink domain.
    pub fabric: bool,
    /// By an IPC handle of the older interface, in processes of this host.
    pub legacy_ipc: bool,
}

/// Memory of a device, freed when the value is dropped.
///
/// It is allocated with every type of handle that the device has. Where virtual memory management is not
/// available, it is memory of `cuMemAlloc`.
///
/// The value must outlive every registration of its span, as all registered memory must.
pub struct DeviceBuffer {
    device: Arc<Device>,
    at: DevicePtr,
    /// What was asked for.
    len: usize,
    kind: Kind,
    /// Why the memory does not have a type of handle: the driver's error at the attempt.
    refused: Option<Error>,
}

enum Kind {
    Legacy,
    Mapped { handle: u64, bytes: usize, types: u32 },
}

impl DeviceBuffer {
    pub(crate) fn new(device: &Arc<Device>, len: usize) -> Result<Self, Error> {
        if len == 0 || len > isize::MAX as usize {
            return Err(ErrorKind::InvalidArgument.into());
        }
        let _entered = device.enter()?;
        let mut refused = None;
        for (types, gpu_direct) in wanted(device) {
            match map(device, len, types, gpu_direct) {
                Ok((at, handle, bytes)) => {
                    let kind = Kind::Mapped { handle, bytes, types };
                    return Ok(Self { device: Arc::clone(device), at, len, kind, refused });
                }
                Err(error) => refused = refused.or(Some(error)),
            }
            if device.is_dead() {
                return Err(ErrorKind::Rail.into());
            }
        }
        let mut at = 0;
        // SAFETY: writes one address.
        device.check(unsafe { (device.driver.mem_alloc)(&raw mut at, len) })?;
        Ok(Self { device: Arc::clone(device), at, len, kind: Kind::Legacy, refused })
    }

    /// The memory.
    #[must_use]
    pub fn span(&self) -> MemSpan {
        MemSpan::new(ptr::without_provenance_mut(self.at as usize), self.len).at(self.location())
    }

    /// Where the memory is.
    #[must_use]
    pub fn location(&self) -> Location {
        self.device.info.location
    }

    /// How other processes can map it.
    #[must_use]
    pub fn handle_types(&self) -> HandleTypes {
        match self.kind {
            Kind::Legacy => HandleTypes { legacy_ipc: true, ..HandleTypes::default() },
            Kind::Mapped { types, .. } => HandleTypes {
                posix_fd: types & HANDLE_POSIX_FD != 0,
                fabric: types & HANDLE_FABRIC != 0,
                legacy_ipc: false,
            },
        }
    }

    /// The driver's error where a way to allocate with more types of handles was refused. 800 for fabric
    /// handles means that this process has no IMEX channel.
    #[must_use]
    pub const fn refused(&self) -> Option<Error> {
        self.refused
    }

    /// A file descriptor by which processes of this host import the memory. Its length there is
    /// [`shared_bytes`](Self::shared_bytes).
    ///
    /// # Errors
    /// `Unsupported` when the memory has no such handle; the driver's.
    pub fn export_fd(&self) -> Result<OwnedFd, Error> {
        let mut fd: c_int = -1;
        self.export(HANDLE_POSIX_FD, (&raw mut fd).cast())?;
        if fd < 0 {
            return Err(ErrorKind::System.into());
        }
        // SAFETY: the driver made the descriptor for this call, and nothing else has it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// The handle by which processes of the NVLink domain import the memory.
    ///
    /// # Errors
    /// As [`export_fd`](Self::export_fd).
    pub fn export_fabric(&self) -> Result<[u8; 64], Error> {
        let mut handle = [0; 64];
        self.export(HANDLE_FABRIC, handle.as_mut_ptr().cast())?;
        Ok(handle)
    }

    /// The handle of the older interface by which processes of this host open the memory.
    ///
    /// # Errors
    /// `Unsupported` when the memory has no such handle; the driver's.
    pub fn export_ipc(&self) -> Result<[u8; 64], Error> {
        match self.kind {
            Kind::Legacy => share::ipc_handle(&self.device, self.at),
            Kind::Mapped { .. } => Err(ErrorKind::Unsupported.into()),
        }
    }

    /// Length of the memory that an importer maps, bytes: a multiple of the device's granularity.
    #[must_use]
    pub const fn shared_bytes(&self) -> usize {
        match self.kind {
            Kind::Legacy => self.len,
            Kind::Mapped { bytes, .. } => bytes,
        }
    }

    /// Copies `bytes` into the memory, and waits. For control paths; data goes by a stager.
    ///
    /// # Errors
    /// `OutOfRange`; the driver's.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let part = self.span().part(offset, bytes.len() as u64)?;
        let _entered = self.device.enter()?;
        let to = part.as_ptr().addr() as DevicePtr;
        copy_in(&self.device, to, bytes)
    }

    /// Copies bytes of the memory out, and waits. For control paths; data goes by a stager.
    ///
    /// # Errors
    /// `OutOfRange`; the driver's.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        let part = self.span().part(offset, out.len() as u64)?;
        let _entered = self.device.enter()?;
        let from = part.as_ptr().addr() as DevicePtr;
        // SAFETY: inside our own memory; the call returns when the bytes are here.
        self.device.check(unsafe { (self.device.driver.copy_out)(out.as_mut_ptr().cast(), from, out.len()) })
    }

    fn export(&self, wanted: u32, out: *mut std::ffi::c_void) -> Result<(), Error> {
        let Kind::Mapped { handle, types, .. } = self.kind else {
            return Err(ErrorKind::Unsupported.into());
        };
        let export = self.device.driver.vmm_export.ok_or(ErrorKind::Unsupported)?;
        if types & wanted == 0 {
            return Err(ErrorKind::Unsupported.into());
        }
        let _entered = self.device.enter()?;
        // SAFETY: a handle of ours; `out` has the size of the type that is wanted.
        self.device.check(unsafe { export(out, handle, wanted, 0) })
    }
}

impl fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let handles = self.handle_types();
        f.debug_struct("DeviceBuffer").field("span", &self.span()).field("handles", &handles).finish()
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        let Ok(_entered) = self.device.enter_to_free() else { return };
        let driver = &self.device.driver;
        match self.kind {
            Kind::Legacy => {
                // SAFETY: allocated in `new`, freed once.
                self.device.gave_back("memory", unsafe { (driver.mem_free)(self.at) });
            }
            Kind::Mapped { handle, bytes, .. } => undo(&self.device, self.at, bytes, handle, Step::Mapped),
        }
    }
}

/// Copies to device memory, and returns when the bytes are there. The caller has entered the device, and `to`
/// is its memory, which nothing else uses.
pub(crate) fn copy_in(device: &Device, to: DevicePtr, bytes: &[u8]) -> Result<(), Error> {
    let Some(last) = bytes.len().checked_sub(1) else { return Ok(()) };
    // SAFETY: device memory of that length.
    device.check(unsafe { (device.driver.copy_in)(to, bytes.as_ptr().cast(), bytes.len()) })?;
    // The call may return when the driver has read the bytes, before they are there, and streams of ours do
    // not wait for it. What reads the last one does.
    let mut byte = 0_u8;
    // SAFETY: one byte of the same memory.
    device.check(unsafe { (device.driver.copy_out)((&raw mut byte).cast(), to + last as u64, 1) })
}

/// Handle types and GPUDirect RDMA, from the most to the least. The attributes are hints: what they do not
/// deny is tried.
fn wanted(device: &Device) -> Vec<(u32, bool)> {
    if device.driver.vmm_create.is_none() || device.attribute(DEVICE_VMM) == Some(0) {
        return Vec::new();
    }
    let may = |attribute| device.attribute(attribute) != Some(0);
    let mut types = Vec::new();
    if device.driver.api == Api::Cuda && may(DEVICE_FABRIC) {
        types.push(HANDLE_POSIX_FD | HANDLE_FABRIC);
    }
    if may(DEVICE_POSIX_FD) {
        types.push(HANDLE_POSIX_FD);
    }
    types.into_iter().flat_map(|types| [(types, true), (types, false)]).collect()
}

/// How far an allocation came.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Created,
    Reserved,
    Mapped,
}

/// Allocates, maps and makes accessible; returns address, handle and length.
fn map(device: &Device, len: usize, types: u32, gpu_direct: bool) -> Result<(DevicePtr, u64, usize), Error> {
    let driver = &device.driver;
    let (Some(create), Some(reserve), Some(map), Some(access), Some(granularity)) =
        (driver.vmm_create, driver.vmm_reserve, driver.vmm_map, driver.vmm_access, driver.vmm_granularity)
    else {
        return Err(ErrorKind::Unsupported.into());
    };
    let prop = AllocationProp::on(device.ordinal(), types, gpu_direct);
    let mut grain = 0;
    // SAFETY: reads the properties, writes one number.
    device.check(unsafe { granularity(&raw mut grain, &raw const prop, GRANULARITY_MINIMUM) })?;
    let bytes = len.checked_next_multiple_of(grain.max(1)).ok_or(ErrorKind::InvalidArgument)?;
    let (mut handle, mut at) = (0, 0);
    // SAFETY: reads the properties, writes one number.
    device.check(unsafe { create(&raw mut handle, bytes, &raw const prop, 0) })?;
    let failed = |code, at, step| {
        undo(device, at, bytes, handle, step);
        device.check(code).err().unwrap_or(ErrorKind::System.into())
    };
    // SAFETY: writes one address.
    let code = unsafe { reserve(&raw mut at, bytes, 0, 0, 0) };
    if code != SUCCESS {
        return Err(failed(code, 0, Step::Created));
    }
    // SAFETY: the range was reserved for this, and the handle has as many bytes.
    let code = unsafe { map(at, bytes, 0, handle, 0) };
    if code != SUCCESS {
        return Err(failed(code, at, Step::Reserved));
    }
    let rights = AccessDesc::read_write(device.ordinal());
    // SAFETY: the range was mapped; reads one description.
    let code = unsafe { access(at, bytes, &raw const rights, 1) };
    if code != SUCCESS {
        return Err(failed(code, at, Step::Mapped));
    }
    Ok((at, handle, bytes))
}

/// Undoes what was done up to `step`.
fn undo(device: &Device, at: DevicePtr, bytes: usize, handle: u64, step: Step) {
    let driver = &device.driver;
    let (Some(unmap), Some(free), Some(release)) = (driver.vmm_unmap, driver.vmm_free, driver.vmm_release)
    else {
        return;
    };
    let mut is_free = true;
    if step >= Step::Mapped {
        // SAFETY: mapped by `map`, and no registration covers it any more.
        is_free = device.gave_back("a mapping", unsafe { unmap(at, bytes) });
    }
    if step >= Step::Reserved && is_free {
        // SAFETY: reserved by `map`; nothing is mapped there.
        device.gave_back("an address range", unsafe { free(at, bytes) });
    }
    // SAFETY: created by `map`, released once.
    device.gave_back("memory", unsafe { release(handle) });
}
