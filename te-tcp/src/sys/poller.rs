//! Readiness of sockets: epoll, or io_uring where the settings say so.

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
    /// Whether it reports changes rather than states: code that stops before a socket is empty must come back
    /// without another event.
    pub(crate) const fn reports_changes(&self) -> bool {
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
            // It reports changes of every kind.
            #[cfg(feature = "uring")]
            Self::Ring(_) => Ok(()),
        }
    }

    /// Must be called before the socket is closed.
    pub(crate) fn remove(&mut self, name: u64) {
        match self {
            // epoll forgets a socket when it is closed.
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
