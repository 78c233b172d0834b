//! The provider's descriptors, which it gives as numbers.

use std::io;
use std::os::fd::BorrowedFd;

use te_fabric::{Epoll, Interest};

/// Watches a descriptor of the provider, which keeps it open for as long as it lives itself.
///
/// # Errors
/// The system's; `EBADF` for a negative number.
pub(crate) fn watch(epoll: &Epoll, fd: i32, token: u64) -> io::Result<()> {
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: used for this one call only, during which the provider is alive and keeps the descriptor open.
    epoll.add(unsafe { BorrowedFd::borrow_raw(fd) }, token, Interest::READ)
}
