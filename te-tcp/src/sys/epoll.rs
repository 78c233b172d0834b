//! Readiness, level-triggered.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::check;

/// What to be told about a socket. Errors and hang-ups are always told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interest {
    pub(crate) readable: bool,
    pub(crate) writable: bool,
}

/// One socket that is ready.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) token: u64,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    /// The peer has finished sending, or the connection has failed.
    #[cfg(feature = "uring")]
    pub(crate) finished: bool,
}

/// An epoll instance and room for the events of one call.
pub(crate) struct Epoll {
    fd: OwnedFd,
    events: Box<[libc::epoll_event]>,
}

impl Epoll {
    pub(crate) fn new(events_max: usize) -> io::Result<Self> {
        // SAFETY: takes no pointer.
        let fd = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: the kernel has just given us this descriptor; nobody else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { fd, events: vec![libc::epoll_event { events: 0, u64: 0 }; events_max].into() })
    }

    pub(crate) fn raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    pub(crate) fn add(&self, fd: RawFd, token: u64, interest: Interest) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, token, interest)
    }

    pub(crate) fn modify(&self, fd: RawFd, token: u64, interest: Interest) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, token, interest)
    }

    /// What is ready at this moment; gives how many, to be read with [`Self::event`]. Never waits.
    pub(crate) fn ready(&mut self) -> io::Result<usize> {
        // SAFETY: `events` is ours and as long as we say.
        let n = unsafe {
            libc::epoll_wait(self.fd.as_raw_fd(), self.events.as_mut_ptr(), self.events.len() as i32, 0)
        };
        check(n).map(|n| n as usize)
    }

    pub(crate) fn event(&self, i: usize) -> Event {
        let raw = self.events[i];
        let bits = raw.events as i32;
        let failed = bits & (libc::EPOLLERR | libc::EPOLLHUP) != 0;
        Event {
            token: raw.u64,
            readable: failed || bits & libc::EPOLLIN != 0,
            writable: failed || bits & libc::EPOLLOUT != 0,
            #[cfg(feature = "uring")]
            finished: failed,
        }
    }

    fn control(&self, operation: i32, fd: RawFd, token: u64, interest: Interest) -> io::Result<()> {
        let readable = if interest.readable { libc::EPOLLIN } else { 0 };
        let writable = if interest.writable { libc::EPOLLOUT } else { 0 };
        let mut event = libc::epoll_event { events: (readable | writable) as u32, u64: token };
        // SAFETY: `event` lives across the call; the kernel copies it.
        check(unsafe { libc::epoll_ctl(self.fd.as_raw_fd(), operation, fd, &raw mut event) }).map(|_| ())
    }
}
