//! [`SharedRegion`]: memory that an engine allocates and shares within the host, or has claimed in a CXL
//! pool.

use std::fmt;
use std::sync::Arc;

use te_core::{Error, ErrorKind, MemSpan, RegionId, VolatileSpan};
use te_host::SharedMemory;

/// When the pages of allocated memory are allocated by the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Populate {
    /// At the allocation, on the calling thread.
    Now,
    /// Each page when it is used first.
    OnFirstUse,
}

/// Registered memory that processes on one host can share, or extents of a CXL pool. Peers may write it at
/// any time, so its bytes are copied in and out, never borrowed (law L7). The memory is freed when it is
/// unregistered and the last clone of this value is gone.
#[derive(Clone)]
pub struct SharedRegion {
    id: RegionId,
    memory: Kept,
}

/// What keeps the memory of a region mapped.
#[derive(Clone)]
enum Kept {
    Shared(Arc<SharedMemory>),
    /// Extents of a pool.
    #[cfg(feature = "cxl")]
    Pool(Arc<te_cxl::Pool>, MemSpan),
}

impl SharedRegion {
    pub(crate) fn new(id: RegionId, memory: Arc<SharedMemory>) -> Self {
        Self { id, memory: Kept::Shared(memory) }
    }

    /// A region of extents.
    #[cfg(feature = "cxl")]
    pub(crate) fn in_pool(id: RegionId, pool: Arc<te_cxl::Pool>, span: MemSpan) -> Self {
        Self { id, memory: Kept::Pool(pool, span) }
    }

    /// The id of the region, for requests and `unregister`.
    #[must_use]
    pub fn id(&self) -> RegionId {
        self.id
    }

    /// The first address, which peers use as the remote address.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.span().as_ptr().addr() as u64
    }

    /// Length, bytes; at least one.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> usize {
        self.span().len()
    }

    /// The memory of the region.
    #[must_use]
    pub fn span(&self) -> MemSpan {
        match &self.memory {
            Kept::Shared(memory) => memory.span(),
            #[cfg(feature = "cxl")]
            Kept::Pool(_, span) => *span,
        }
    }

    /// Access to the bytes, which are copied in and out. In a child after a fork every access is
    /// `OutOfRange`, and so is one to a CXL pool in the mode `flush`, which is [read](Self::read) and
    /// [written](Self::write). Memory of a CXL pool that fails ends the process.
    #[must_use]
    pub fn view(&self) -> VolatileSpan<'_> {
        match &self.memory {
            Kept::Shared(memory) => memory.view(),
            #[cfg(feature = "cxl")]
            Kept::Pool(pool, span) => pool.view(*span).unwrap_or(VolatileSpan::EMPTY),
        }
    }

    /// A file descriptor of the memory, for another process on this host to [map](te_host::BorrowedMemory). A
    /// process that has it can read and write all of the region for any time.
    ///
    /// # Errors
    /// `PermissionDenied` unless the memory was allocated to be lent
    /// ([`Engine::alloc_lent`](crate::Engine::alloc_lent)); in a child after a fork.
    pub fn lend(&self) -> std::io::Result<std::os::fd::OwnedFd> {
        self.here().map_err(std::io::Error::other)?;
        match self.memory() {
            Some(memory) if memory.peers_may_write() => memory.share(te_host::Protection::ReadWrite),
            _ => Err(std::io::ErrorKind::PermissionDenied.into()),
        }
    }

    /// Returns all pages to the system, even if other processes map them. The contents are lost, pages that
    /// are touched later are zero, and mappings stay valid.
    ///
    /// # Errors
    /// `PermissionDenied` unless peers may write the memory (the file is sealed against this, too); in a
    /// child after a fork; `Unsupported` for memory of a CXL pool; the system's error.
    pub fn discard(&self) -> std::io::Result<()> {
        self.here().map_err(std::io::Error::other)?;
        self.memory().ok_or(std::io::ErrorKind::Unsupported)?.discard()
    }

    /// Fails in a child after a fork: there the region belongs to the parent.
    fn here(&self) -> Result<(), Error> {
        let is_forked = match &self.memory {
            Kept::Shared(memory) => memory.is_forked(),
            #[cfg(feature = "cxl")]
            Kept::Pool(pool, _) => pool.is_forked(),
        };
        if is_forked { Err(ErrorKind::Forked.into()) } else { Ok(()) }
    }

    /// The memory, unless it is that of a pool.
    pub(crate) fn memory(&self) -> Option<&Arc<SharedMemory>> {
        match &self.memory {
            Kept::Shared(memory) => Some(memory),
            #[cfg(feature = "cxl")]
            Kept::Pool(..) => None,
        }
    }

    /// Whether only [`read`](Self::read) and [`write`](Self::write) of this process, and the fabric of pools,
    /// may touch the bytes: it is memory of a CXL pool in the mode `flush`.
    #[must_use]
    pub fn is_apart(&self) -> bool {
        self.span().location() == te_core::Location::Pool
    }

    /// Copies bytes out. Of a CXL pool: as they are in memory, whatever this host's caches hold.
    ///
    /// # Errors
    /// `OutOfRange`, `Forked`; nothing was copied. Memory of a CXL pool that fails: `Corrupt`, `Rail`.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        self.here()?;
        match &self.memory {
            Kept::Shared(memory) => memory.view().read(offset, out),
            #[cfg(feature = "cxl")]
            Kept::Pool(pool, span) => pool.read(*span, offset, out).map_err(|error| of_pool(&error)),
        }
    }

    /// Copies bytes in. Those of a CXL pool are seen by all hosts afterwards; lines of the cache, 64 bytes
    /// each, of which they are a part have no other writer meanwhile.
    ///
    /// # Errors
    /// `OutOfRange`, `Forked`; nothing was copied. Memory of a CXL pool that fails: `Corrupt`, `Rail`.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.here()?;
        match &self.memory {
            Kept::Shared(memory) => memory.view().write(offset, bytes),
            #[cfg(feature = "cxl")]
            Kept::Pool(pool, span) => pool.write(*span, offset, bytes).map_err(|error| of_pool(&error)),
        }
    }

    /// Makes code that reads these bytes by their addresses (the kernel, a device) find what peers have
    /// written before this call. It changes nothing but for a CXL pool in the mode `flush`, where it drops
    /// what this host's caches hold of them.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn refresh(&self, offset: u64, len: u64) -> Result<(), Error> {
        self.here()?;
        match (&self.memory, self.span().part(offset, len)?) {
            (Kept::Shared(_), _) => Ok(()),
            #[cfg(feature = "cxl")]
            (Kept::Pool(pool, _), part) => pool.refresh(part).map_err(|error| of_pool(&error)),
        }
    }
}

#[cfg(feature = "cxl")]
fn of_pool(error: &te_cxl::PoolError) -> Error {
    match error {
        te_cxl::PoolError::Outside => ErrorKind::OutOfRange.into(),
        te_cxl::PoolError::Memory(error) => *error,
        other => other.kind().into(),
    }
}

impl fmt::Debug for SharedRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedRegion").field("id", &self.id).field("len", &self.len()).finish()
    }
}
