//! Lends memory to a process on this host that has no engine, over a Unix socket.
//!
//! ```text
//!   process with an engine                         process without
//!   SharedMemory (a region of the engine)
//!                            │ share
//!                            ▼ file descriptor
//!                       send_with_fd ══════════════ recv_with_fd
//!                                                      │
//!                                                 BorrowedMemory: the same bytes
//! ```
//!
//! Both sides can write all of it at any time. The file is sealed, so neither side can make the other fault
//! by truncating it.

use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use te_core::{MemSpan, VolatileSpan};

use crate::sys::{self, Mapping, Protection};

/// Memory of another process on this host, mapped here. Its owner may write it at any time, so its bytes are
/// copied in and out, never borrowed (L7). In a child after `fork` it is not mapped, and its
/// [`view`](Self::view) is empty.
pub struct BorrowedMemory(Mapping);

impl BorrowedMemory {
    /// Maps the first `len` bytes of lent memory.
    ///
    /// # Errors
    /// `InvalidInput` when the memory is shorter or could be truncated; otherwise the system's error.
    pub fn map(lent: BorrowedFd<'_>, len: u64) -> io::Result<Self> {
        Ok(Self(Mapping::new(lent, 0, len, Protection::ReadWrite)?))
    }

    /// Its address and length.
    #[must_use]
    pub fn span(&self) -> MemSpan {
        self.0.span()
    }

    /// Its bytes, to be copied in and out.
    ///
    /// # Panics
    /// Never: it is mapped for writing.
    #[must_use]
    pub fn view(&self) -> VolatileSpan<'_> {
        self.0.view().expect("mapped for writing")
    }
}

impl fmt::Debug for BorrowedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BorrowedMemory").field("len", &self.span().len()).finish()
    }
}

/// Sends bytes over a Unix socket, with a file descriptor attached to the first of them; blocks if the socket
/// does. Returns how many bytes were sent; the rest of a stream can follow without the descriptor.
///
/// # Errors
/// The system's error.
pub fn send_with_fd(socket: BorrowedFd<'_>, bytes: &[u8], fd: BorrowedFd<'_>) -> io::Result<usize> {
    sys::send_with_fd(socket, bytes, Some(fd)).map_err(Into::into)
}

/// Receives bytes from a Unix socket, and the file descriptor that came with them; of several descriptors,
/// all but the first are closed. Blocks if the socket does. 0 bytes mean that the peer has closed the socket.
///
/// # Errors
/// The system's error; `EMFILE` when the bytes have arrived, but there was no room for their descriptors.
pub fn recv_with_fd(socket: BorrowedFd<'_>, out: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    sys::recv_with_fd(socket, out).map_err(Into::into)
}

/// The user id that the peer of a Unix socket had when it connected.
///
/// # Errors
/// The system's error.
pub fn peer_uid(socket: BorrowedFd<'_>) -> io::Result<u32> {
    sys::peer_uid(socket).map_err(Into::into)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
mod tests {
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::{AllocOptions, SharedMemory, own_uid};

    #[test]
    fn a_descriptor_travels_with_the_first_bytes_and_is_the_same_memory() {
        let options = AllocOptions { peers_may_write: true, ..AllocOptions::default() };
        let memory = SharedMemory::new(10_000, options).unwrap();
        let (here, there) = UnixStream::pair().unwrap();
        let lent = memory.share(Protection::ReadWrite).unwrap();
        assert_eq!(send_with_fd(here.as_fd(), b"arena", lent.as_fd()).unwrap(), 5);
        let mut bytes = [0; 16];
        let (len, fd) = recv_with_fd(there.as_fd(), &mut bytes).unwrap();
        assert_eq!(&bytes[..len], b"arena");
        let fd = fd.unwrap();
        assert!(BorrowedMemory::map(fd.as_fd(), 10_001).is_err(), "longer than it is");
        let borrowed = BorrowedMemory::map(fd.as_fd(), 10_000).unwrap();
        borrowed.view().write(9_000, b"from the borrower").unwrap();
        let mut seen = [0; 17];
        memory.view().read(9_000, &mut seen).unwrap();
        assert_eq!(&seen, b"from the borrower");
        assert_eq!(peer_uid(there.as_fd()).unwrap(), own_uid());
    }
}
