//! Unix sockets that keep message boundaries and carry descriptors.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr,
    accept4, bind, connect, listen, recvmsg, sendmsg, socket,
};

/// A non-blocking `SOCK_SEQPACKET` socket, listening or connected.
#[derive(Debug)]
pub(crate) struct SeqSocket(OwnedFd);

impl SeqSocket {
    /// Listens under an abstract name.
    pub(crate) fn listen(name: &[u8]) -> Result<Self, Errno> {
        let this = Self::new()?;
        bind(this.0.as_raw_fd(), &UnixAddr::new_abstract(name)?)?;
        listen(&this.0, Backlog::new(64)?)?;
        Ok(this)
    }

    /// Connects to an abstract name; at once or not at all.
    pub(crate) fn connect(name: &[u8]) -> Result<Self, Errno> {
        let this = Self::new()?;
        connect(this.0.as_raw_fd(), &UnixAddr::new_abstract(name)?)?;
        Ok(this)
    }

    /// The next connection, if one waits.
    pub(crate) fn accept(&self) -> Result<Option<Self>, Errno> {
        match accept4(self.0.as_raw_fd(), SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC) {
            Ok(fd) => Ok(Some(Self(wrap_fd(fd)))),
            Err(Errno::EAGAIN | Errno::ECONNABORTED | Errno::EINTR) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// Sends one message, whole or not at all.
    pub(crate) fn send(&self, message: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
        let fds: &[RawFd] = &fd.map_or([-1], |fd| [fd.as_raw_fd()]);
        let rights = [ControlMessage::ScmRights(fds)];
        let control: &[ControlMessage<'_>] = if fd.is_some() { &rights } else { &[] };
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        sendmsg::<()>(self.0.as_raw_fd(), &[IoSlice::new(message)], control, flags, None).map(drop)
    }

    /// The next message, if one waits: its length (0: the peer has closed) and the descriptor that came with it.
    pub(crate) fn recv(&self, out: &mut [u8]) -> Result<Option<(usize, Option<OwnedFd>)>, Errno> {
        let mut space = nix::cmsg_space!([RawFd; 4]);
        let mut iov = [IoSliceMut::new(out)];
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
        let message = match recvmsg::<()>(self.0.as_raw_fd(), &mut iov, Some(&mut space), flags) {
            Ok(message) => message,
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
            Err(errno) => return Err(errno),
        };
        let mut first = None;
        for control in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(fds) = control {
                // All are taken, so that those we did not ask for are closed.
                for fd in fds.into_iter().map(wrap_fd) {
                    first.get_or_insert(fd);
                }
            }
        }
        Ok(Some((message.bytes, first)))
    }

    fn new() -> Result<Self, Errno> {
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).map(Self)
    }
}

impl AsFd for SeqSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Takes over a descriptor that the kernel has just made for us.
fn wrap_fd(fd: RawFd) -> OwnedFd {
    // SAFETY: callers pass what `accept4` or `recvmsg` has just given; nobody else knows the number.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
