//! Sockets of the side channel, and the one descriptor to wait on. Nothing blocks.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrIn, SockaddrIn6, bind, connect, listen, setsockopt,
    socket, sockopt,
};

/// Events taken at a time.
pub(crate) const EVENTS_MAX: usize = 64;

/// What to be told about a descriptor. Errors and hang-ups are always told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interest {
    pub(crate) readable: bool,
    pub(crate) writable: bool,
}

impl Interest {
    pub(crate) const READ: Self = Self { readable: true, writable: false };
    pub(crate) const NONE: Self = Self { readable: false, writable: false };

    fn event(self, token: u64) -> EpollEvent {
        let mut flags = EpollFlags::empty();
        flags.set(EpollFlags::EPOLLIN, self.readable);
        flags.set(EpollFlags::EPOLLOUT, self.writable);
        EpollEvent::new(flags, token)
    }
}

/// An epoll instance, level-triggered.
pub(crate) struct Poller {
    epoll: Epoll,
    events: Box<[EpollEvent]>,
}

impl Poller {
    pub(crate) fn new() -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        Ok(Self { epoll, events: vec![EpollEvent::empty(); EVENTS_MAX].into() })
    }

    pub(crate) fn raw_fd(&self) -> i32 {
        std::os::fd::AsRawFd::as_raw_fd(&self.epoll.0)
    }

    pub(crate) fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(self.epoll.add(fd, interest.event(token))?)
    }

    /// Watches a descriptor of the provider, which keeps it open for as long as it lives itself.
    #[allow(unsafe_code, reason = "the provider gives its descriptors as numbers")]
    pub(crate) fn add_raw(&self, fd: i32, token: u64) -> io::Result<()> {
        if fd < 0 {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        }
        // SAFETY: used for this one call only, during which the provider is alive and keeps the descriptor open.
        self.add(unsafe { BorrowedFd::borrow_raw(fd) }, token, Interest::READ)
    }

    pub(crate) fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(self.epoll.modify(fd, &mut interest.event(token))?)
    }

    /// What is ready at this moment; gives how many, to be read with [`Self::event`].
    pub(crate) fn ready(&mut self) -> usize {
        self.epoll.wait(&mut self.events, EpollTimeout::ZERO).unwrap_or(0)
    }

    /// Name, readable, writable.
    pub(crate) fn event(&self, at: usize) -> (u64, bool, bool) {
        let event = self.events[at];
        let flags = event.events();
        let failed = flags.intersects(EpollFlags::EPOLLERR | EpollFlags::EPOLLHUP);
        let readable = failed || flags.contains(EpollFlags::EPOLLIN);
        (event.data(), readable, failed || flags.contains(EpollFlags::EPOLLOUT))
    }
}

/// Listens on `address`.
pub(crate) fn listener(address: SocketAddr) -> io::Result<TcpListener> {
    let fd = new_socket(address)?;
    setsockopt(&fd, sockopt::ReuseAddr, &true)?;
    let raw = std::os::fd::AsRawFd::as_raw_fd(&fd);
    match address {
        SocketAddr::V4(v4) => bind(raw, &SockaddrIn::from(v4))?,
        SocketAddr::V6(v6) => bind(raw, &SockaddrIn6::from(v6))?,
    }
    listen(&fd, Backlog::new(1_024)?)?;
    Ok(TcpListener::from(fd))
}

/// Starts to connect; writability tells the end, `take_error` which.
pub(crate) fn dial(address: SocketAddr, silence_ms: u32) -> io::Result<TcpStream> {
    let fd = new_socket(address)?;
    let raw = std::os::fd::AsRawFd::as_raw_fd(&fd);
    let result = match address {
        SocketAddr::V4(v4) => connect(raw, &SockaddrIn::from(v4)),
        SocketAddr::V6(v6) => connect(raw, &SockaddrIn6::from(v6)),
    };
    match result {
        Ok(()) | Err(Errno::EINPROGRESS) => {}
        Err(errno) => return Err(errno.into()),
    }
    let stream = TcpStream::from(fd);
    tune(&stream, silence_ms)?;
    Ok(stream)
}

/// The next connection; `WouldBlock` when there is none.
pub(crate) fn accept(listener: &TcpListener, silence_ms: u32) -> io::Result<TcpStream> {
    let (stream, _) = listener.accept()?;
    stream.set_nonblocking(true)?;
    tune(&stream, silence_ms)?;
    Ok(stream)
}

/// Makes the close that follows reset the connection: what we left unread or unsent must not linger.
pub(crate) fn reset_on_close(stream: &TcpStream) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    // A failure leaves an ordinary close, which is correct too.
    let _ = setsockopt(stream, sockopt::Linger, &linger);
}

/// Small frames leave at once, and the kernel looks after a silent connection: a host that is gone lets go of its queue
/// pairs here, and of ours there.
fn tune(stream: &TcpStream, silence_ms: u32) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let seconds = (silence_ms / 1_000).clamp(1, 3_600);
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    setsockopt(stream, sockopt::TcpKeepIdle, &seconds)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &seconds)?;
    setsockopt(stream, sockopt::TcpKeepCount, &3)?;
    setsockopt(stream, sockopt::TcpUserTimeout, &silence_ms.saturating_mul(4))?;
    Ok(())
}

fn new_socket(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    Ok(socket(family, SockType::Stream, flags, None)?)
}
