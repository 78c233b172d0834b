//! Buffers that a session allocates: `allocate_managed_buffer` of the Python interface.

use std::collections::HashMap;

use te_engine::{SharedRegion, TransferEngine};

use super::regions::{Regions, SHARED};
use super::slabs::{SLAB_BYTES_MAX, Slabs};
use super::wire::Wire;
use super::{EngineError, RegionSpan};

/// Length of an arena, bytes. Only address space is reserved; pages are allocated when they are used first,
/// except on fabrics that page-lock registered memory.
pub(super) const ARENA_BYTES: u64 = 2 << 30;

/// Buffers of a session. Slabs of 8 KiB to 256 MiB come from arenas, of which each is one registered region
/// that processes on this host share; longer buffers are allocated alone.
pub(super) struct Managed {
    arena_bytes: u64,
    slabs: Slabs,
    arenas: Vec<SharedRegion>,
    /// By first address.
    alone: HashMap<u64, SharedRegion>,
}

impl Managed {
    /// Without an arena: the first one is allocated when it is needed.
    pub(super) fn new(arena_bytes: u64) -> Self {
        Self { arena_bytes, slabs: Slabs::new(), arenas: Vec::new(), alone: HashMap::new() }
    }

    /// Allocates a zeroed buffer of at least `len` bytes and returns its address. Contents of an earlier
    /// buffer may be left in it.
    ///
    /// # Errors
    /// `Memory`, `System`.
    pub(super) fn allocate(
        &mut self,
        len: u64,
        engine: &TransferEngine,
        regions: &Regions,
        wire: &Wire,
    ) -> Result<u64, EngineError> {
        if len > SLAB_BYTES_MAX.min(self.arena_bytes) {
            let region = allocate(len, engine, regions, wire)?;
            let addr = region.addr();
            self.alone.insert(addr, region);
            return Ok(addr);
        }
        if let Some(addr) = self.slabs.take(len) {
            return Ok(addr);
        }
        let arena = allocate(self.arena_bytes, engine, regions, wire)?;
        self.slabs.add_arena(arena.addr(), arena.len() as u64);
        self.arenas.push(arena);
        self.slabs.take(len).ok_or_else(|| EngineError::argument(format!("no slab has {len} bytes")))
    }

    /// Frees a buffer.
    ///
    /// # Errors
    /// `NotRegistered` if no buffer that is in use begins at `addr`; `Memory` with `Busy` while a transfer
    /// uses one that was allocated alone.
    pub(super) fn free(
        &mut self,
        addr: u64,
        engine: &TransferEngine,
        regions: &Regions,
        wire: &Wire,
    ) -> Result<(), EngineError> {
        if let Some(region) = self.alone.get(&addr) {
            wire.withdraw(&[addr]);
            if let Err(error) = engine.unregister(region.id()) {
                export_again(region, wire);
                return Err(error.into());
            }
            regions.remove_managed(addr);
            self.alone.remove(&addr);
            return Ok(());
        }
        if self.slabs.put(addr) { Ok(()) } else { Err(EngineError::NotRegistered { addr }) }
    }

    /// The memory that is registered for buffers.
    pub(super) fn spans(&self) -> Vec<RegionSpan> {
        let all = self.arenas.iter().chain(self.alone.values());
        all.map(|region| RegionSpan { addr: region.addr(), len: region.len() as u64 }).collect()
    }
}

fn allocate(
    len: u64,
    engine: &TransferEngine,
    regions: &Regions,
    wire: &Wire,
) -> Result<SharedRegion, EngineError> {
    let size = usize::try_from(len)
        .ok()
        .filter(|size| isize::try_from(*size).is_ok())
        .ok_or_else(|| EngineError::argument(format!("a buffer of {len} bytes: ask for less")))?;
    let region = engine.alloc_shared(size, SHARED)?;
    #[allow(unsafe_code, reason = "exports memory that the engine keeps mapped")]
    // SAFETY: `region` is kept in `Managed`, and with it the memory, until after `withdraw`; a session
    // stops its wire before it drops its buffers.
    let exported = unsafe { wire.export(&[region.span()]) };
    if let Err(error) = exported {
        // No peer has seen the region; nothing uses it.
        let _ = engine.unregister(region.id());
        return Err(error);
    }
    regions.add_managed(region.addr(), region.len() as u64, region.id());
    Ok(region)
}

fn export_again(region: &SharedRegion, wire: &Wire) {
    #[allow(unsafe_code, reason = "exports memory that the engine keeps mapped")]
    // SAFETY: as in `allocate`; the region is still in `Managed`.
    let exported = unsafe { wire.export(&[region.span()]) };
    if let Err(error) = exported {
        log::warn!("a buffer of {} bytes is not exported any more: {error}", region.len());
    }
}
