//! Who is ready: epoll, or io_uring where asked for.

use std::io;
#[cfg(feature = "uring")]
use std::os::fd::AsRawFd;
use std::os::fd::{AsFd, RawFd};

use te_fabric::{Epoll, Event, Interest};

#[cfg(feature = "uring")]
use super::ring::Ring;

/// The driver that a transport was opened with.
pub(crate) enum Poller {
    Epoll(Epoll),
    #[cfg(feature = "uring")]
    Ring(Box<Ring>),
}

impl Poller {
    /// Whether it tells changes rather than states: who stops before a socket is empty must come back by
    /// itself.
    pub(crate) const fn tells_changes(&self) -> bool {
        match self {
            Self::Epoll(_) => false,
            #[cfg(feature = "uring")]
            Self::Ring(_) => true,
        }
    }

    pub(crate) fn raw_fd(&self) -> RawFd {
        match self {
            Self::Epoll(epoll) => epoll.raw_fd(),
            #[cfg(feature = "uring")]
            Self::Ring(ring) => ring.raw_fd(),
        }
    }

    pub(crate) fn add(&mut self, fd: &impl AsFd, name: u64, interest: Interest) -> io::Result<()> {
        match self {
            Self::Epoll(epoll) => epoll.add(fd, name, interest),
            #[cfg(feature = "uring")]
            Self::Ring(ring) => ring.add(fd.as_fd().as_raw_fd(), name),
        }
    }

    pub(crate) fn modify(&mut self, fd: &impl AsFd, name: u64, interest: Interest) -> io::Result<()> {
        match self {
            Self::Epoll(epoll) => epoll.modify(fd, name, interest),
            // Changes of all kinds are told anyway.
            #[cfg(feature = "uring")]
            Self::Ring(_) => Ok(()),
        }
    }

    /// To be called before the socket is closed.
    pub(crate) fn remove(&mut self, name: u64) {
        match self {
            // Closing the socket is enough.
            Self::Epoll(_) => _ = name,
            #[cfg(feature = "uring")]
            Self::Ring(ring) => ring.remove(name),
        }
    }

    pub(crate) fn ready(&mut self) -> io::Result<usize> {
        match self {
            Self::Epoll(epoll) => epoll.ready(),
            #[cfg(feature = "uring")]
            Self::Ring(ring) => ring.ready(),
        }
    }

    pub(crate) fn event(&self, i: usize) -> Event {
        match self {
            Self::Epoll(epoll) => epoll.event(i),
            #[cfg(feature = "uring")]
            Self::Ring(ring) => ring.event(i),
        }
    }
}
