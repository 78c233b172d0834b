//! A descriptor that another thread makes readable.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// An eventfd: readable from [`raise`](Self::raise) to [`lower`](Self::lower).
#[derive(Debug)]
pub(in crate::disk) struct EventFd(OwnedFd);

impl EventFd {
    pub(in crate::disk) fn new() -> io::Result<Self> {
        // SAFETY: no memory is involved; the descriptor is new and belongs to nothing else.
        unsafe {
            let fd = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
            if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(Self(OwnedFd::from_raw_fd(fd))) }
        }
    }

    pub(in crate::disk) fn raise(&self) {
        let one = 1u64;
        // SAFETY: eight bytes that outlive the call. A counter that is full fails the call and is readable.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), size_of::<u64>()) };
    }

    pub(in crate::disk) fn lower(&self) {
        let mut count = 0u64;
        // SAFETY: eight bytes that outlive the call. A counter of 0 fails the call and stays 0.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), size_of::<u64>()) };
    }

    /// Sleeps until the descriptor is readable, or for `timeout`. May return early.
    pub(in crate::disk) fn wait(&self, timeout: Option<Duration>) {
        let mut fd = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let timeout = timeout.map(|timeout| libc::timespec {
            tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: one pollfd and one timespec or none, both outlive the call; the signal mask is not changed.
        unsafe { libc::ppoll(&raw mut fd, 1, timeout, std::ptr::null()) };
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
