//! Memory that an engine allocates, to be shared within the host.

use std::fmt;
use std::sync::Arc;

use te_core::{Error, ErrorKind, MemSpan, RegionId, VolatileSpan};
use te_host::SharedMemory;

/// Registered memory that processes on one host can share. Peers may write it at any time, so its bytes are copied in and
/// out, never borrowed (L7). Freed when it is unregistered and the last clone of this is gone.
#[derive(Clone)]
pub struct SharedRegion {
    id: RegionId,
    memory: Arc<SharedMemory>,
}

impl SharedRegion {
    pub(crate) fn new(id: RegionId, memory: Arc<SharedMemory>) -> Self {
        Self { id, memory }
    }

    /// Its id, for requests and `unregister`.
    #[must_use]
    pub fn id(&self) -> RegionId {
        self.id
    }

    /// Its first address, by which peers name it.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.span().as_ptr().addr() as u64
    }

    /// Bytes; at least one.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "it never is")]
    pub fn len(&self) -> usize {
        self.span().len()
    }

    /// Where it is.
    #[must_use]
    pub fn span(&self) -> MemSpan {
        self.memory.span()
    }

    /// Its bytes, to be copied in and out. In a child after a fork there are none: every access is `OutOfRange`.
    #[must_use]
    pub fn view(&self) -> VolatileSpan<'_> {
        self.memory.view()
    }

    /// A descriptor of its memory, for a process on this host to [map](te_host::BorrowedMemory). Whoever has it can read
    /// and write all of the region for as long as they like.
    ///
    /// # Errors
    /// `PermissionDenied` unless it was allocated to be lent ([`Engine::alloc_lent`](crate::Engine::alloc_lent)); in a child after a
    /// fork.
    pub fn lend(&self) -> std::io::Result<std::os::fd::OwnedFd> {
        self.here().map_err(std::io::Error::other)?;
        if !self.memory.peers_may_write() {
            return Err(std::io::ErrorKind::PermissionDenied.into());
        }
        self.memory.share(te_host::Protection::ReadWrite)
    }

    /// Gives all pages back to the system, whoever maps them: the contents are lost, what is touched later is a fresh page of
    /// zeroes, and mappings stay valid.
    ///
    /// # Errors
    /// `PermissionDenied` unless peers may write it: the file is sealed against this, too; in a child after a fork; the system's
    /// reason.
    pub fn discard(&self) -> std::io::Result<()> {
        self.here().map_err(std::io::Error::other)?;
        self.memory.discard()
    }

    /// Not in a child: there it is its parent's.
    fn here(&self) -> Result<(), Error> {
        if self.memory.is_forked() { Err(ErrorKind::Forked.into()) } else { Ok(()) }
    }

    pub(crate) fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// `OutOfRange`, `Forked`; nothing was copied.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        self.here()?;
        self.view().read(offset, out)
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// `OutOfRange`, `Forked`; nothing was copied.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.here()?;
        self.view().write(offset, bytes)
    }
}

impl fmt::Debug for SharedRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedRegion").field("id", &self.id).field("len", &self.len()).finish()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
mod tests {
    use std::io;
    use std::os::fd::AsFd as _;

    use te_core::Access;
    use te_host::BorrowedMemory;

    use crate::{Config, Engine, Fabrics};

    fn engine() -> Engine {
        let fabrics = Fabrics::LOCAL.and(Fabrics::SHM);
        Engine::start(Config { fabrics, ..Config::default() }).unwrap()
    }

    #[test]
    fn who_borrowed_memory_keeps_its_bytes_when_its_owner_is_done_with_it() {
        let mut engine = engine();
        let region = engine.alloc_lent(10_000, Access::LOCAL).unwrap();
        let borrowed = BorrowedMemory::map(region.lend().unwrap().as_fd(), 10_000).unwrap();
        borrowed.view().write(9_000, b"from the borrower").unwrap();
        let mut seen = [0; 17];
        region.read(9_000, &mut seen).unwrap();
        assert_eq!(&seen, b"from the borrower");
        engine.unregister(region.id()).unwrap();
        drop((region, engine));
        borrowed.view().read(9_000, &mut seen).unwrap();
        assert_eq!(&seen, b"from the borrower");
    }

    #[test]
    fn memory_that_was_not_allocated_for_it_is_not_lent() {
        let mut engine = engine();
        let region = engine.alloc_shared(4096, Access::LOCAL).unwrap();
        assert_eq!(region.lend().unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
}
