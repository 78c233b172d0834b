//! [`Home`]: what a node has mounted, memory or storage.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use store_core::MemoryLocation;
use te_core::RegionId;
use te_engine::SharedRegion;

/// What a node has mounted, and has exported for that: memory, or storage of a target.
#[derive(Clone)]
pub(super) struct Home {
    id: RegionId,
    addr: u64,
    len: u64,
    location: MemoryLocation,
    /// The memory. `None`: it is storage, which no process has among its memory.
    memory: Option<SharedRegion>,
    gate: Arc<Gate>,
}

/// Counts this node's own writes to its storage, so that none is under way when that is mounted anew.
#[derive(Default)]
struct Gate(Mutex<Writes>);

#[derive(Default)]
struct Writes {
    under_way: u32,
    closed: bool,
}

/// A write of this node to its storage that is under way, for as long as this value lives.
pub(super) struct Writing(Arc<Gate>);

impl Home {
    pub(super) fn of_memory(region: SharedRegion, location: MemoryLocation) -> Self {
        let (id, addr, len) = (region.id(), region.addr(), region.len() as u64);
        Self { id, addr, len, location, memory: Some(region), gate: Arc::default() }
    }

    #[cfg(feature = "nvmeof")]
    pub(super) fn of_storage(mounted: te_engine::MountedStorage, location: MemoryLocation) -> Self {
        let te_engine::MountedStorage { region: id, addr, len } = mounted;
        Self { id, addr, len, location, memory: None, gate: Arc::default() }
    }

    /// The region of the engine.
    pub(super) const fn id(&self) -> RegionId {
        self.id
    }

    /// The first address, which peers use.
    pub(super) const fn addr(&self) -> u64 {
        self.addr
    }

    /// Length, bytes.
    pub(super) const fn len(&self) -> u64 {
        self.len
    }

    /// Where it is, as the master lists it.
    pub(super) const fn location(&self) -> MemoryLocation {
        self.location
    }

    /// What offsets and lengths of reads and writes are multiples of, bytes.
    pub(super) fn granule(&self) -> u64 {
        self.location.granule_bytes().into()
    }

    /// The memory; `None`: it is storage.
    pub(super) const fn memory(&self) -> Option<&SharedRegion> {
        self.memory.as_ref()
    }

    /// Whether no fabric can put bytes there which are read from other nodes: they are read into other memory
    /// first.
    pub(super) fn is_apart(&self) -> bool {
        self.memory.as_ref().is_none_or(SharedRegion::is_apart)
    }

    /// Announces a write of this node to its storage; `None`: it is being unmounted.
    pub(super) fn begin_write(&self) -> Option<Writing> {
        let mut writes = self.gate.lock();
        if writes.closed {
            return None;
        }
        writes.under_way += 1;
        Some(Writing(Arc::clone(&self.gate)))
    }

    /// Lets no further write begin. Returns how many are under way.
    pub(super) fn close(&self) -> u32 {
        let mut writes = self.gate.lock();
        writes.closed = true;
        writes.under_way
    }
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, Writes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.0.lock().under_way -= 1;
    }
}
