//! Storage as a part of this engine's segment: ranges of namespaces of targets of NVMe over TCP, whose data
//! does not pass through this process.

use core::ops::Range;
use std::ptr::without_provenance_mut;

use te_core::{Access, ErrorKind, Location, MemSpan, RegionId, Transport as _};
use te_nvmeof::{Namespace, NvmeofTransport};

use super::Engine;
use super::regions::Region;
use crate::error::RegisterError;

/// Where the addresses of storage begin: no memory of a process has such an address.
pub(super) const ADDRESSES_AT: u64 = 1 << 63;
/// The addresses of two ranges are at least this far apart, bytes.
const GAP_BYTES: u64 = 1 << 16;

/// A range of a namespace that an engine mounts as a part of its segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Storage {
    /// The namespace.
    pub namespace: Namespace,
    /// The range in it, bytes, in multiples of the granule of the engine's rail. Its first granule is
    /// overwritten; the region is what follows.
    pub range: Range<u64>,
    /// Tells the uses of the range apart, for instance a number that grows with each.
    pub epoch: u32,
    /// Whether the range had an owner before, who is dead, or was this process in an earlier life: every
    /// other host that is registered with the namespace is fenced first. No other range of the namespace may
    /// be in use then.
    pub take_over: bool,
}

/// Storage that is a part of this engine's segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MountedStorage {
    /// The region, for `unregister`. No request of this engine may use it as local memory.
    pub region: RegionId,
    /// The first address, which peers use as the remote address. Nothing is there in this process.
    pub addr: u64,
    /// Length, bytes.
    pub len: u64,
}

impl Engine {
    /// Begins to mount storage as a part of this engine's segment: peers read and write it past this process,
    /// which hands it out and fences them ([`expel`](Self::expel)). It is [listed](Self::list_storage) when
    /// the target has agreed.
    ///
    /// # Errors
    /// `Rails`: `Unsupported` without the fabric `nvmeof`; `InvalidArgument` for a namespace or a range that
    /// cannot be, or without remote rights. `Full`.
    pub fn mount_storage(
        &mut self,
        storage: &Storage,
        access: Access,
    ) -> Result<MountedStorage, RegisterError> {
        let Storage { namespace, range, epoch, take_over } = storage;
        let rail = self.rails.rails().iter().find(|rail| rail.name() == "nvmeof");
        let granule = rail.map(|rail| rail.capabilities().granule_bytes);
        let granule = granule.ok_or(RegisterError::Rails(ErrorKind::Unsupported.into()))?;
        let invalid = RegisterError::Rails(ErrorKind::InvalidArgument.into());
        let len = range.end.checked_sub(range.start).and_then(|bytes| bytes.checked_sub(granule.into()));
        let len = len.filter(|len| (1..ADDRESSES_AT / 2).contains(len)).ok_or(invalid)?;
        let access = access.intersection(Access::REMOTE_READ | Access::REMOTE_WRITE);
        let id = self.reserve_region()?;
        let addr = self.storage_at;
        let span = MemSpan::new(without_provenance_mut(addr as usize), len as usize);
        #[allow(unsafe_code, reason = "registers storage, which has no memory")]
        // SAFETY: the only rail that registers the region adopts the range and never touches the span.
        let registered = unsafe {
            self.rails.register_with(id, span, access, |rails, results| {
                for (rail, result) in rails.iter_mut().zip(results) {
                    let Some(rail) = rail.as_any().and_then(|any| any.downcast_mut::<NvmeofTransport>())
                    else {
                        continue;
                    };
                    let range = range.clone();
                    *result = match take_over {
                        false => rail.adopt(id, namespace, range, access, *epoch),
                        true => rail.take_over(id, namespace, range, access, *epoch),
                    };
                }
            })
        };
        if let Err(error) = registered {
            self.regions.release(id);
            return Err(RegisterError::Rails(error));
        }
        self.storage_at = addr.saturating_add(len).next_multiple_of(GAP_BYTES) + GAP_BYTES;
        let region = Region {
            span,
            access,
            owned: false,
            requests: 0,
            closing: false,
            quarantined: false,
            _memory: None,
        };
        self.regions.insert(id, region);
        Ok(MountedStorage { region: id, addr, len })
    }

    /// Lists mounted storage in this engine's descriptor, if the target has agreed. False: not yet, to be
    /// called again after [`poll`](Self::poll).
    ///
    /// # Errors
    /// The storage cannot be mounted, and is not any more: `Rails` with `Stale` when the namespace is another
    /// one or ends before the range, `AccessDenied` when another host has it reserved, `Unsupported` when it
    /// was to be taken over from a target without reservations, or what the target says. `NotFound`.
    pub fn list_storage(&mut self, storage: &MountedStorage) -> Result<bool, RegisterError> {
        self.here()?;
        let region = self.regions.region(storage.region).filter(|region| !region.closing);
        let (span, access) = region.map(|it| (it.span, it.access)).ok_or(RegisterError::NotFound)?;
        match self.exported(storage.region, span, Location::Host, access) {
            Ok(Some(descriptor)) => {
                self.published.insert([descriptor]);
                Ok(true)
            }
            Err(RegisterError::Rails(error)) if error.kind == ErrorKind::Busy => Ok(false),
            Ok(None) => {
                self.unregister(storage.region)?;
                Err(RegisterError::Rails(ErrorKind::Unsupported.into()))
            }
            Err(error) => {
                self.unregister(storage.region)?;
                Err(error)
            }
        }
    }
}
