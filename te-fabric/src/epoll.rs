//! Readiness of file descriptors (epoll, level-triggered).

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};

use nix::sys::epoll::{EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

/// The readiness of a file descriptor that is reported. Errors and hang-ups are always reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest {
    /// Whether to report that it can be read.
    pub readable: bool,
    /// Whether to report that it can be written.
    pub writable: bool,
}

impl Interest {
    /// Report when it can be read.
    pub const READ: Self = Self { readable: true, writable: false };
    /// Report when it can be read and when it can be written.
    pub const BOTH: Self = Self { readable: true, writable: true };
    /// Report errors and hang-ups alone.
    pub const NONE: Self = Self { readable: false, writable: false };

    fn event(self, token: u64) -> EpollEvent {
        let mut flags = EpollFlags::empty();
        flags.set(EpollFlags::EPOLLIN, self.readable);
        flags.set(EpollFlags::EPOLLOUT, self.writable);
        EpollEvent::new(flags, token)
    }
}

/// One file descriptor that is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The token that it was added with.
    pub token: u64,
    /// It can be read, or has failed.
    pub readable: bool,
    /// It can be written, or has failed.
    pub writable: bool,
    /// It has failed, or both sides have finished.
    pub finished: bool,
}

/// An epoll instance, and room for the events of one call.
#[derive(Debug)]
pub struct Epoll {
    epoll: nix::sys::epoll::Epoll,
    events: Box<[EpollEvent]>,
}

impl Epoll {
    /// An instance that reports up to `events_max` file descriptors per call.
    ///
    /// # Errors
    /// The error of the system.
    pub fn new(events_max: usize) -> io::Result<Self> {
        let epoll = nix::sys::epoll::Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        Ok(Self { epoll, events: vec![EpollEvent::empty(); events_max].into() })
    }

    /// The file descriptor of the instance itself, readable while a watched one is ready.
    #[must_use]
    pub fn raw_fd(&self) -> RawFd {
        self.epoll.0.as_raw_fd()
    }

    /// Watches a file descriptor until it is closed.
    ///
    /// # Errors
    /// The error of the system.
    pub fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(self.epoll.add(fd, interest.event(token))?)
    }

    /// Changes the token and the interest of a file descriptor that is watched.
    ///
    /// # Errors
    /// The error of the system.
    pub fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(self.epoll.modify(fd, &mut interest.event(token))?)
    }

    /// Collects what is ready at this moment and returns the number of events, to be read with
    /// [`Self::event`]. Never waits.
    ///
    /// # Errors
    /// The error of the system.
    #[inline]
    pub fn ready(&mut self) -> io::Result<usize> {
        Ok(self.epoll.wait(&mut self.events, EpollTimeout::ZERO)?)
    }

    /// The largest number of events that one call reports. After a call that reported as many there may be
    /// more.
    #[must_use]
    pub fn events_max(&self) -> usize {
        self.events.len()
    }

    /// Event `at` of the last call of [`Self::ready`].
    #[inline]
    #[must_use]
    pub fn event(&self, at: usize) -> Event {
        let event = self.events[at];
        let flags = event.events();
        let finished = flags.intersects(EpollFlags::EPOLLERR | EpollFlags::EPOLLHUP);
        Event {
            token: event.data(),
            readable: finished || flags.contains(EpollFlags::EPOLLIN),
            writable: finished || flags.contains(EpollFlags::EPOLLOUT),
            finished,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    fn only(epoll: &mut Epoll) -> Option<Event> {
        match epoll.ready().expect("epoll") {
            0 => None,
            count => {
                assert_eq!(count, 1);
                Some(epoll.event(0))
            }
        }
    }

    #[test]
    fn readiness_is_reported_as_asked_for_and_the_end_always() {
        let mut epoll = Epoll::new(4).expect("an instance");
        let (here, mut there) = UnixStream::pair().expect("a pair");
        epoll.add(&here, 7, Interest::READ).expect("added");
        assert_eq!(only(&mut epoll), None);
        there.write_all(b"x").expect("room");
        let event = only(&mut epoll).expect("it can be read");
        assert!(event.token == 7 && event.readable && !event.writable && !event.finished);
        epoll.modify(&here, 8, Interest::BOTH).expect("modified");
        let event = only(&mut epoll).expect("it can be read and written");
        assert!(event.token == 8 && event.readable && event.writable);
        epoll.modify(&here, 9, Interest::NONE).expect("modified");
        assert_eq!(only(&mut epoll), None);
        drop(there);
        let event = only(&mut epoll).expect("it has ended");
        assert!(event.token == 9 && event.readable && event.writable && event.finished);
    }
}
