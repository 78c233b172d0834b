//! Memory of an owner, as it is mapped here.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use te_core::{Access, Error, ErrorKind, Location, RegionId};
use te_gpu::{Gpu, Handle, HostPin, Imported, NotImported, Place, SharedPart};
use te_host::Protection;
use te_host::control::Mapping;
use te_host::fork::PerProcess;

use crate::sys::{Lasting, pin};
use crate::wire::{Means, Part};

/// Memory of an owner.
#[derive(Debug)]
pub(crate) enum Memory {
    /// Of a device, opened by its handles.
    Device(Imported),
    /// Of a device, and of this process.
    Own(Own),
    /// Of the host. The pages are unlocked before they are unmapped.
    Host { pin: Arc<HostPin>, map: Mapping },
}

/// Device memory that a transport of this process exports. A process cannot open its own memory by handles.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Own {
    pub(crate) driver: u64,
    pub(crate) place: Place,
    pub(crate) location: Location,
    pub(crate) len: u64,
    pub(crate) kernel: bool,
}

/// Regions by the listener of their transport and their id.
type Exported = BTreeMap<([u8; 16], u64), Own>;

/// What this process exports.
static OWN: PerProcess<Mutex<Exported>> = PerProcess::new();

impl Own {
    pub(crate) fn find(socket: [u8; 16], region: RegionId, driver: u64) -> Option<Self> {
        let known = OWN.get().lock().unwrap_or_else(PoisonError::into_inner);
        known.get(&(socket, region.to_bits())).filter(|own| own.driver == driver).copied()
    }

    pub(crate) fn remember(self, socket: [u8; 16], region: RegionId) {
        let mut known = OWN.get().lock().unwrap_or_else(PoisonError::into_inner);
        known.insert((socket, region.to_bits()), self);
    }

    pub(crate) fn forget(socket: [u8; 16], region: RegionId) {
        let mut known = OWN.get().lock().unwrap_or_else(PoisonError::into_inner);
        known.remove(&(socket, region.to_bits()));
    }
}

/// What a grant brought, and what it is to become.
#[derive(Debug)]
pub(crate) struct Opening {
    pub(crate) parts: Vec<(Part, Option<OwnedFd>)>,
    /// Whether they come from another host.
    pub(crate) is_across_hosts: bool,
    pub(crate) own: Option<Own>,
    /// Whether the export says that the memory is a GPU's.
    pub(crate) is_device: bool,
    /// The device that will copy.
    pub(crate) via: Location,
    pub(crate) len: u64,
    pub(crate) writable: bool,
}

impl Opening {
    /// Maps the memory. It may wait for the driver.
    pub(crate) fn open(self, gpu: &Gpu) -> Result<Memory, NotImported> {
        if let Some(mut own) = self.own {
            // The kernel reaches memory of its own device.
            own.kernel &= own.location == self.via;
            let is_all = own.len == self.len;
            return if is_all { Ok(Memory::Own(own)) } else { Err(ErrorKind::InvalidArgument.into()) };
        }
        // Other handles mean something of this host.
        let is_fabric = |(part, _): &(Part, _)| matches!(part.means, Means::Fabric(_));
        if self.is_across_hosts && !self.parts.iter().all(is_fabric) {
            return Err(ErrorKind::Protocol.into());
        }
        let memory = match (self.is_device, &self.parts[..]) {
            (false, [(Part { means: Means::File, offset, len, .. }, Some(fd))]) if *len == self.len => {
                let protection = if self.writable { Protection::ReadWrite } else { Protection::ReadOnly };
                let map = Mapping::new(fd.as_fd(), *offset, *len, protection);
                let map = map.map_err(|errno| Error::with_code(ErrorKind::System, errno as i32))?;
                let pin = pin(gpu, self.via, Lasting(map.span()), self.writable)?;
                Memory::Host { pin, map }
            }
            (true, _) => {
                let parts: Option<Vec<SharedPart>> = self.parts.into_iter().map(shared).collect();
                let parts = parts.ok_or(ErrorKind::Protocol)?;
                Memory::Device(gpu.import(self.via, &parts, self.writable)?)
            }
            _ => return Err(ErrorKind::Protocol.into()),
        };
        match memory.len() == self.len {
            true => Ok(memory),
            false => {
                let stays_mapped = !memory.close();
                Err(NotImported { error: ErrorKind::InvalidArgument.into(), stays_mapped })
            }
        }
    }
}

/// The parts of a region, for its peers.
pub(crate) type Handles = Vec<(Part, Option<Arc<OwnedFd>>)>;

/// A part as it is sent to peers.
pub(crate) fn part(shared: SharedPart) -> (Part, Option<Arc<OwnedFd>>) {
    let (means, fd) = match shared.handle {
        Handle::Fd(fd) => (Means::Fd, Some(Arc::new(fd))),
        Handle::Fabric(handle) => (Means::Fabric(handle), None),
        Handle::Ipc(handle) => (Means::Ipc(handle), None),
    };
    (Part { means, bytes: shared.bytes, offset: shared.offset, len: shared.len }, fd)
}

fn shared((part, fd): (Part, Option<OwnedFd>)) -> Option<SharedPart> {
    let handle = match part.means {
        Means::Fd => Handle::Fd(fd?),
        Means::Fabric(handle) => Handle::Fabric(handle),
        Means::Ipc(handle) => Handle::Ipc(handle),
        Means::File => return None,
    };
    Some(SharedPart { handle, bytes: part.bytes, offset: part.offset, len: part.len })
}

impl Memory {
    /// Where its first byte is.
    pub(crate) fn place(&self) -> Result<Place, Error> {
        match self {
            Self::Device(imported) => Ok(imported.place()),
            Self::Own(own) => Ok(own.place),
            Self::Host { pin, map } => pin.place(map.span()),
        }
    }

    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::Device(imported) => imported.len(),
            Self::Own(own) => own.len,
            Self::Host { map, .. } => map.span().len() as u64,
        }
    }

    /// Whether the copy kernel may touch it.
    pub(crate) fn allows_kernel(&self) -> bool {
        match self {
            Self::Device(_) => true,
            Self::Own(own) => own.kernel,
            Self::Host { pin, .. } => pin.allows_kernel(),
        }
    }

    /// Unmaps it. Returns whether it is unmapped.
    pub(crate) fn close(self) -> bool {
        match self {
            Self::Device(imported) => imported.close(),
            Self::Own(_) => true,
            Self::Host { pin, map } => {
                drop((pin, map));
                true
            }
        }
    }
}

/// Whether devices write a region: into it as the destination of a READ, or for a peer.
pub(crate) const fn is_written(access: Access) -> bool {
    access.intersects(Access::LOCAL_WRITE.union(Access::REMOTE_WRITE))
}
