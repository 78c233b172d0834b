//! Unix sockets that keep message boundaries and carry file descriptors.

use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, accept4, bind, connect,
    getsockopt, listen, sendmsg, socket, sockopt::PeerCredentials,
};

/// Room for as many descriptors as one message can carry (`SCM_MAX_FD`), so that none is cut off and lost.
// SAFETY: plain arithmetic.
const CONTROL_BYTES: usize = unsafe { libc::CMSG_SPACE(253 * size_of::<RawFd>() as u32) } as usize;

/// Aligned as control messages must be.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

/// The socket option that returns a pidfd of the peer; the `libc` crate does not have it yet.
const SO_PEERPIDFD: libc::c_int = 77;

/// A process whose end can be noticed. On a kernel before 6.5, nothing is known of a process in a PID
/// namespace that is not visible here, and on one before 5.3, or where pidfds are forbidden, of none: it
/// counts as running for ever.
#[derive(Debug)]
pub struct Process(Option<OwnedFd>);

impl Process {
    /// The process that has connected a socket.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE` and `ENOMEM` when there is no descriptor for it, `ESRCH` when it has ended.
    fn of_peer(socket: &OwnedFd, pid: libc::pid_t) -> Result<Self, Errno> {
        match peer_pidfd(socket) {
            Ok(fd) => return Ok(Self(Some(fd))),
            Err(errno @ (Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM)) => return Err(errno),
            // The kernel does not have the option, or the process has ended.
            Err(_) if pid <= 0 => return Ok(Self(None)),
            Err(_) => {}
        }
        // SAFETY: takes numbers and returns a new descriptor, or an error.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        match Errno::result(fd) {
            // The kernel sets close-on-exec for the descriptor.
            Ok(fd) => Ok(Self(RawFd::try_from(fd).ok().map(wrap_fd))),
            Err(errno @ (Errno::EPERM | Errno::EACCES | Errno::ENOSYS)) => {
                log::warn!("the end of process {pid} cannot be noticed: pidfd_open failed: {errno}");
                Ok(Self(None))
            }
            Err(errno) => Err(errno),
        }
    }

    /// Whether the end of the process can be noticed.
    #[must_use]
    pub const fn is_known(&self) -> bool {
        self.0.is_some()
    }

    /// Whether the whole process has ended: its memory is gone.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        let Some(fd) = &self.0 else { return false };
        let mut polled = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
        poll(&mut polled, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }
}

/// A non-blocking `SOCK_SEQPACKET` socket, listening or connected.
#[derive(Debug)]
pub struct SeqSocket(OwnedFd);

impl SeqSocket {
    /// Listens under an abstract name.
    ///
    /// # Errors
    /// The system's errno.
    pub fn listen(name: &[u8]) -> Result<Self, Errno> {
        let this = Self::new()?;
        bind(this.0.as_raw_fd(), &UnixAddr::new_abstract(name)?)?;
        listen(&this.0, Backlog::new(64)?)?;
        Ok(this)
    }

    /// Connects to an abstract name, without waiting.
    ///
    /// # Errors
    /// The system's errno.
    pub fn connect(name: &[u8]) -> Result<Self, Errno> {
        let this = Self::new()?;
        connect(this.0.as_raw_fd(), &UnixAddr::new_abstract(name)?)?;
        Ok(this)
    }

    /// The next connection, if one waits.
    ///
    /// # Errors
    /// The system's errno.
    pub fn accept(&self) -> Result<Option<Self>, Errno> {
        match accept4(self.0.as_raw_fd(), SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC) {
            Ok(fd) => Ok(Some(Self(wrap_fd(fd)))),
            Err(Errno::EAGAIN | Errno::ECONNABORTED | Errno::EINTR) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// The user id that the peer had when it connected, and its process.
    ///
    /// # Errors
    /// The system's errno: `EMFILE` or `ENFILE` when there is no descriptor for the process, `ESRCH` when it
    /// has ended.
    pub fn peer(&self) -> Result<(u32, Process), Errno> {
        let peer = getsockopt(&self.0, PeerCredentials)?;
        Ok((peer.uid(), Process::of_peer(&self.0, peer.pid())?))
    }

    /// Sends one message, completely or not at all.
    ///
    /// # Errors
    /// The system's errno.
    pub fn send(&self, message: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
        send_with_fd(self.0.as_fd(), message, fd).map(drop)
    }

    /// The next message, if one waits: its length (0: the peer has closed the socket) and the file descriptor
    /// that came with it.
    ///
    /// # Errors
    /// The system's errno; `EMFILE` when the message has arrived, but there was no room for its descriptors.
    pub fn recv(&self, out: &mut [u8]) -> Result<Option<(usize, Option<OwnedFd>)>, Errno> {
        match recv_with_fd(self.0.as_fd(), out) {
            Ok(received) => Ok(Some(received)),
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(None),
            Err(errno) => Err(errno),
        }
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

/// The user id that the peer of a Unix socket had when it connected.
pub(crate) fn peer_uid(socket: BorrowedFd<'_>) -> Result<u32, Errno> {
    getsockopt(&socket, PeerCredentials).map(|peer| peer.uid())
}

/// Sends bytes, with a file descriptor attached to the first of them; blocks if the socket does. Returns how
/// many bytes were sent.
pub(crate) fn send_with_fd(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fd: Option<BorrowedFd<'_>>,
) -> Result<usize, Errno> {
    let fds: &[RawFd] = &fd.map_or([-1], |fd| [fd.as_raw_fd()]);
    let rights = [ControlMessage::ScmRights(fds)];
    let control: &[ControlMessage<'_>] = if fd.is_some() { &rights } else { &[] };
    sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(bytes)], control, MsgFlags::MSG_NOSIGNAL, None)
}

/// A pidfd of the process that has connected a socket.
fn peer_pidfd(socket: &OwnedFd) -> Result<OwnedFd, Errno> {
    let (mut fd, mut len): (RawFd, _) = (-1, size_of::<RawFd>() as libc::socklen_t);
    // SAFETY: writes at most `len` bytes, which is the size of `fd`.
    let code = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut len,
        )
    };
    Errno::result(code)?;
    if fd < 0 { Err(Errno::ENODATA) } else { Ok(wrap_fd(fd)) }
}

/// Receives bytes, and the file descriptor that came with them; blocks if the socket does. 0 bytes: the peer
/// has closed the socket. `EMFILE`: the bytes have arrived, and descriptors that came with them are lost,
/// because this process may have no more (`RLIMIT_NOFILE`).
pub(crate) fn recv_with_fd(
    socket: BorrowedFd<'_>,
    out: &mut [u8],
) -> Result<(usize, Option<OwnedFd>), Errno> {
    let mut control = Control([0; CONTROL_BYTES]);
    let mut iov = libc::iovec { iov_base: out.as_mut_ptr().cast(), iov_len: out.len() };
    // SAFETY: all zeroes is a `msghdr` without anything.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    (header.msg_iov, header.msg_iovlen) = (&raw mut iov, 1);
    (header.msg_control, header.msg_controllen) = (control.0.as_mut_ptr().cast(), CONTROL_BYTES as _);
    // SAFETY: the header points to `out` and `control` with their lengths, and both outlive the call.
    let count = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC) };
    let count = Errno::result(count)? as usize;
    // All descriptors are taken, even if the message is otherwise invalid, so that unwanted ones are closed.
    let fd = take_fds(&header);
    // The buffer has room for as many as a message can have.
    match header.msg_flags & libc::MSG_CTRUNC {
        0 => Ok((count, fd)),
        _ => Err(Errno::EMFILE),
    }
}

/// The user id of this process.
#[must_use]
pub fn own_uid() -> u32 {
    // SAFETY: it has no preconditions and cannot fail.
    unsafe { libc::geteuid() }
}

/// Takes over every descriptor that came with a message; keeps the first and closes the others.
fn take_fds(header: &libc::msghdr) -> Option<OwnedFd> {
    let mut first = None;
    // SAFETY: `recvmsg` has filled the control buffer and set its length; the buffer is there.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(header) };
    // SAFETY: not null, so it points to a header within what the kernel has written.
    while let Some(control) = unsafe { next.as_ref() } {
        if (control.cmsg_level, control.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: the kernel wrote `cmsg_len` bytes from the header on, the descriptors after it.
            let data = unsafe { libc::CMSG_DATA(control) };
            // SAFETY: plain arithmetic.
            let empty = unsafe { libc::CMSG_LEN(0) } as usize;
            let count = control.cmsg_len.saturating_sub(empty) / size_of::<RawFd>();
            for index in 0..count {
                // SAFETY: `count` descriptors lie there, as the length says.
                let fd = unsafe { data.cast::<RawFd>().add(index).read_unaligned() };
                // Every descriptor is wrapped: those that are not kept are closed here.
                let fd = wrap_fd(fd);
                first.get_or_insert(fd);
            }
        }
        // SAFETY: `control` lies in the header's buffer, as the kernel left it.
        next = unsafe { libc::CMSG_NXTHDR(header, control) };
    }
    first
}

/// Takes over a descriptor that the kernel has just opened for this process.
fn wrap_fd(fd: RawFd) -> OwnedFd {
    // SAFETY: callers pass what the kernel has just returned; nothing else knows the number.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

#[cfg(test)]
mod tests {
    use std::io::PipeReader;

    use super::*;

    #[test]
    fn every_descriptor_that_a_message_brings_is_closed_but_the_first() {
        let name = format!("snowskin-test-{}", std::process::id());
        let listener = SeqSocket::listen(name.as_bytes()).unwrap();
        let sender = SeqSocket::connect(name.as_bytes()).unwrap();
        let receiver = listener.accept().unwrap().unwrap();
        // A pipe reports when its last writing end is closed.
        for count in [1usize, 2, 5, 253] {
            let (mut reader, writer) = std::io::pipe().unwrap();
            let fds = vec![writer.as_raw_fd(); count];
            let rights = [ControlMessage::ScmRights(&fds)];
            let flags = MsgFlags::MSG_NOSIGNAL;
            sendmsg::<()>(sender.0.as_raw_fd(), &[IoSlice::new(b"x")], &rights, flags, None).unwrap();
            drop((rights, writer));
            let (len, first) = receiver.recv(&mut [0; 8]).unwrap().unwrap();
            assert_eq!(len, 1);
            assert!(first.is_some());
            assert!(!at_end(&mut reader), "{count}: the first is open");
            drop(first);
            assert!(at_end(&mut reader), "{count}: all are closed");
        }
        // No descriptor.
        sender.send(b"y", None).unwrap();
        assert!(receiver.recv(&mut [0; 8]).unwrap().unwrap().1.is_none());
    }

    #[test]
    fn a_process_without_free_descriptors_says_so_and_loses_no_connection() {
        let name = format!("snowskin-test-full-{}", std::process::id());
        let listener = SeqSocket::listen(name.as_bytes()).unwrap();
        let sender = SeqSocket::connect(name.as_bytes()).unwrap();
        let receiver = listener.accept().unwrap().unwrap();
        let (_uid, process) = receiver.peer().unwrap();
        assert!(process.is_known() && !process.has_ended());
        let (_reader, writer) = std::io::pipe().unwrap();
        sender.send(b"x", Some(writer.as_fd())).unwrap();
        sender.send(b"y", None).unwrap();
        te_fabric::testkit::in_a_child("full", || {
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: reads one struct; the limit is that of a child that ends soon.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none) }, 0);
            let peer = receiver.peer().map(|(uid, _)| uid);
            let lost = receiver.recv(&mut [0; 8]).map(|received| received.map(|(len, _)| len));
            let next = receiver.recv(&mut [0; 8]).map(|received| received.map(|(len, _)| len));
            match (peer, lost, next) {
                (Err(Errno::EMFILE), Err(Errno::EMFILE), Ok(Some(1))) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        });
    }

    fn at_end(reader: &mut PipeReader) -> bool {
        use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
        let mut fds = [PollFd::new(reader.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).unwrap() == 1
    }
}
