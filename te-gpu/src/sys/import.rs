//! Memory of another process, mapped here by its handles.

use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Arc;

use te_core::{Error, ErrorKind, Location};

use super::abi::{AccessDesc, DevicePtr, HANDLE_FABRIC, HANDLE_POSIX_FD, IPC_LAZY_PEER_ACCESS, IpcHandle};
use super::channel::Place;
use super::device::Device;
use super::share::{Handle, SharedPart};

/// Device memory of another process, mapped here until the value is [closed](Self::close) or dropped. The
/// process that it belongs to must not free it before that.
///
/// Memory that came in several parts is mapped without gaps, in their order.
pub struct Imported {
    /// The device that copies to and from it.
    device: Arc<Device>,
    /// Where the first byte is.
    at: DevicePtr,
    len: u64,
    kind: Option<Kind>,
}

/// Why memory of another process was not mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotImported {
    /// The reason.
    pub error: Error,
    /// Whether some of it is mapped all the same, because it could not be unmapped: it stays mapped for the
    /// life of the process, and its owner must not free it.
    pub stays_mapped: bool,
}

impl std::fmt::Display for NotImported {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.error.fmt(f)?;
        match self.stays_mapped {
            true => f.write_str(", and some of the memory stays mapped for the life of the process"),
            false => Ok(()),
        }
    }
}

impl std::error::Error for NotImported {}

impl From<Error> for NotImported {
    fn from(error: Error) -> Self {
        Self { error, stays_mapped: false }
    }
}

impl From<ErrorKind> for NotImported {
    fn from(kind: ErrorKind) -> Self {
        Error::from(kind).into()
    }
}

enum Kind {
    Ipc { base: DevicePtr },
    Mapped { range: DevicePtr, bytes: usize, pieces: Vec<(DevicePtr, usize)> },
}

impl Imported {
    /// Maps the parts for this device. Memory by virtual memory management is mapped read-only unless it is
    /// to be `writable`; the older IPC cannot be.
    pub(crate) fn new(
        device: &Arc<Device>,
        parts: &[SharedPart],
        writable: bool,
    ) -> Result<Self, NotImported> {
        let (first, len) = check(parts)?;
        let _entered = device.enter()?;
        let (at, kind) = match (&first.handle, parts) {
            (Handle::Ipc(handle), [_]) => {
                let base = open_ipc(device, *handle, first.offset + len)?;
                (base + first.offset, Kind::Ipc { base })
            }
            (Handle::Ipc(_), _) => return Err(ErrorKind::InvalidArgument.into()),
            _ => {
                let (range, bytes, pieces) = map_all(device, parts, writable)?;
                (range + first.offset, Kind::Mapped { range, bytes, pieces })
            }
        };
        Ok(Self { device: Arc::clone(device), at, len, kind: Some(kind) })
    }

    /// Where the first byte is.
    #[must_use]
    pub const fn place(&self) -> Place {
        Place { at: self.at, by_kernel: self.at }
    }

    /// The length, bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "it is never empty")]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// The device that copies to and from it.
    #[must_use]
    pub fn location(&self) -> Location {
        self.device.info.location
    }

    /// Unmaps the memory. Returns whether it is unmapped: otherwise it stays mapped for the life of the
    /// process, and its owner must not free it. No copy uses the memory.
    #[must_use]
    pub fn close(mut self) -> bool {
        self.unmap()
    }

    fn unmap(&mut self) -> bool {
        let Some(kind) = self.kind.take() else { return true };
        let Ok(_entered) = self.device.enter_to_free() else { return false };
        match kind {
            Kind::Ipc { base } => {
                let Some(close) = self.device.driver.ipc_close else { return false };
                // SAFETY: opened in `open_ipc`, closed once; the caller says that no copy uses it.
                self.device.gave_back("memory of another process", unsafe { close(base) })
            }
            Kind::Mapped { range, bytes, pieces } => unmap_all(&self.device, range, bytes, &pieces),
        }
    }
}

impl std::fmt::Debug for Imported {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts = match &self.kind {
            Some(Kind::Mapped { pieces, .. }) => pieces.len(),
            _ => 1,
        };
        f.debug_struct("Imported").field("len", &self.len).field("parts", &parts).finish_non_exhaustive()
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        self.unmap();
    }
}

/// What another process says about its memory has to fit together: returns the first part, and the length of
/// all.
fn check(parts: &[SharedPart]) -> Result<(&SharedPart, u64), Error> {
    let invalid = Error::new(ErrorKind::InvalidArgument);
    let first = parts.first().ok_or(invalid)?;
    let (mut len, last) = (0_u64, parts.len() - 1);
    for (nth, part) in parts.iter().enumerate() {
        let end = part.offset.checked_add(part.len).filter(|end| *end <= part.bytes).ok_or(invalid)?;
        let is_whole = (nth == 0 || part.offset == 0) && (nth == last || end == part.bytes);
        if part.len == 0 || !is_whole || part.bytes > 1 << 48 {
            return Err(invalid);
        }
        len = len.checked_add(part.len).filter(|len| *len <= 1 << 48).ok_or(invalid)?;
    }
    Ok((first, len))
}

fn open_ipc(device: &Device, handle: [u8; 64], len: u64) -> Result<DevicePtr, NotImported> {
    let driver = &device.driver;
    let (Some(open), Some(close)) = (driver.ipc_open, driver.ipc_close) else {
        return Err(ErrorKind::Unsupported.into());
    };
    let mut base = 0;
    // SAFETY: writes one address; the driver checks the handle.
    device.check(unsafe { open(&raw mut base, IpcHandle(handle), IPC_LAZY_PEER_ACCESS) })?;
    let (mut start, mut bytes) = (0, 0);
    // SAFETY: writes two numbers; the address is not accessed.
    let code = unsafe { (driver.address_range)(&raw mut start, &raw mut bytes, base) };
    // The allocation is as long as its owner says, or copies would leave it.
    let fits = device.check(code).and(match start == base && len <= bytes as u64 {
        true => Ok(()),
        false => Err(ErrorKind::OutOfRange.into()),
    });
    if let Err(error) = fits {
        // SAFETY: opened above, closed once.
        let is_closed = device.gave_back("memory of another process", unsafe { close(base) });
        return Err(NotImported { error, stays_mapped: !is_closed });
    }
    Ok(base)
}

type Mapped = (DevicePtr, usize, Vec<(DevicePtr, usize)>);

fn map_all(device: &Device, parts: &[SharedPart], writable: bool) -> Result<Mapped, NotImported> {
    let driver = &device.driver;
    let (Some(import), Some(reserve), Some(map), Some(access), Some(release)) =
        (driver.vmm_import, driver.vmm_reserve, driver.vmm_map, driver.vmm_access, driver.vmm_release)
    else {
        return Err(ErrorKind::Unsupported.into());
    };
    let bytes = parts.iter().map(|part| part.bytes).sum::<u64>() as usize;
    let mut range = 0;
    // SAFETY: writes one address.
    device.check(unsafe { reserve(&raw mut range, bytes, 0, 0, 0) })?;
    let mut pieces = Vec::with_capacity(parts.len());
    let mut map_one = |at: DevicePtr, part: &SharedPart| {
        let mut fabric = match &part.handle {
            Handle::Fabric(handle) => *handle,
            _ => [0; 64],
        };
        let (from, kind) = match &part.handle {
            Handle::Fd(fd) => (ptr::without_provenance_mut(fd.as_raw_fd() as usize), HANDLE_POSIX_FD),
            Handle::Fabric(_) => (fabric.as_mut_ptr().cast(), HANDLE_FABRIC),
            Handle::Ipc(_) => return Err(ErrorKind::InvalidArgument.into()),
        };
        let mut allocation = 0;
        // SAFETY: writes one number; a descriptor is passed as a number, and a fabric handle by its address.
        device.check(unsafe { import(&raw mut allocation, from, kind) })?;
        // SAFETY: the range was reserved for this; the driver compares the length with the allocation's.
        let code = unsafe { map(at, part.bytes as usize, 0, allocation, 0) };
        // A mapping keeps the memory.
        // SAFETY: imported above, released once.
        device.gave_back("a handle", unsafe { release(allocation) });
        device.check(code)?;
        pieces.push((at, part.bytes as usize));
        Ok(())
    };
    let mut at = range;
    let mut mapped: Result<(), Error> = Ok(());
    for part in parts {
        mapped = mapped.and_then(|()| map_one(at, part));
        at += part.bytes;
    }
    let ordinal = device.ordinal();
    let rights = if writable { AccessDesc::read_write(ordinal) } else { AccessDesc::read(ordinal) };
    let mapped = mapped.and_then(|()| {
        // SAFETY: all of the range is mapped; reads one description.
        device.check(unsafe { access(range, bytes, &raw const rights, 1) })
    });
    match mapped {
        Ok(()) => Ok((range, bytes, pieces)),
        Err(error) => {
            let stays_mapped = !unmap_all(device, range, bytes, &pieces);
            Err(NotImported { error, stays_mapped })
        }
    }
}

/// Returns whether nothing is mapped any more.
fn unmap_all(device: &Device, range: DevicePtr, bytes: usize, pieces: &[(DevicePtr, usize)]) -> bool {
    let (Some(unmap), Some(free)) = (device.driver.vmm_unmap, device.driver.vmm_free) else { return false };
    let mut all = true;
    for (at, len) in pieces {
        // SAFETY: mapped by `map_all`, and no copy uses it any more.
        all &= device.gave_back("memory of another process", unsafe { unmap(*at, *len) });
    }
    if all {
        // SAFETY: reserved by `map_all`; nothing is mapped there.
        device.gave_back("an address range", unsafe { free(range, bytes) });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(bytes: u64, offset: u64, len: u64) -> SharedPart {
        SharedPart { handle: Handle::Fabric([0; 64]), bytes, offset, len }
    }

    #[test]
    fn parts_that_do_not_fit_together_are_refused() {
        assert_eq!(check(&[part(100, 10, 90), part(50, 0, 50), part(9, 0, 3)]).unwrap().1, 143);
        assert_eq!(check(&[part(100, 10, 20)]).unwrap().1, 20);
        for parts in [
            vec![],
            vec![part(100, 10, 91)],
            vec![part(100, u64::MAX, 1)],
            vec![part(100, 0, 0)],
            vec![part(100, 0, 99), part(100, 0, 1)],
            vec![part(100, 0, 100), part(100, 1, 1)],
            vec![part(u64::MAX, 0, u64::MAX)],
        ] {
            assert_eq!(check(&parts).unwrap_err().kind, ErrorKind::InvalidArgument, "{parts:?}");
        }
    }
}
