//! Non-blocking TCP sockets and vectored I/O straight from and to registered memory.

use std::io;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use te_fabric::net;

use super::mem::Pinned;

/// Pieces of memory that one system call takes.
pub(crate) const IOV_MAX: usize = 1_024;
/// What is to be discarded is read into here; nobody reads it.
const SINK_BYTES: usize = 64 << 10;

/// Where received bytes go.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Incoming {
    Memory(Pinned),
    /// So many bytes are discarded.
    Discard(usize),
}

/// Something that says where received bytes go.
pub(crate) trait AsIncoming {
    fn incoming(&self) -> Incoming;
}

/// One receive: its places, borrowed until it has ended, and its end.
pub(crate) struct Job<'a, T> {
    pub(crate) socket: &'a Socket,
    pub(crate) into: &'a [T],
    pub(crate) buffer: &'a mut [u8],
    /// Bytes that there was room for.
    pub(crate) offered: usize,
    pub(crate) result: io::Result<usize>,
}

impl<T: AsIncoming> Job<'_, T> {
    /// Receives once: pieces first, what is beyond into the stage. 0 bytes mean the peer has finished.
    pub(crate) fn run(&mut self, buffers: &mut Buffers) {
        self.offered = buffers.gather(self.into.iter().map(AsIncoming::incoming), self.buffer);
        let fd = self.socket.raw_fd();
        // SAFETY: each piece is registered memory that its counts keep mapped (`Pinned`), the sink, or the
        // stage that the job borrows; all outlive the call, and the kernel keeps none of the pointers.
        self.result = check_len(unsafe { libc::readv(fd, buffers.pieces.as_ptr(), buffers.used as i32) });
    }
}

/// What is to be sent.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Outgoing<'a> {
    Memory(Pinned),
    Bytes(&'a [u8]),
}

/// The array of pieces that system calls take, and the sink. One for each transport.
pub(crate) struct Buffers {
    pieces: Box<[libc::iovec]>,
    used: usize,
    sink: Box<[u8]>,
    #[cfg(feature = "uring")]
    message: Box<libc::msghdr>,
}

// SAFETY: the pointers in `pieces` mean something only within one call of `Socket::receive` or
// `Socket::send`.
unsafe impl Send for Buffers {}

impl Buffers {
    pub(crate) fn new() -> Self {
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Self { pieces: vec![empty; IOV_MAX].into(), used: 0, sink: vec![0; SINK_BYTES].into(),
            #[cfg(feature = "uring")]
            // SAFETY: all zeroes is a value of this type.
            message: Box::new(unsafe { std::mem::zeroed() }),
        }
    }

    /// Lays out where received bytes go; gives how many there is room for.
    pub(super) fn gather(&mut self, into: impl Iterator<Item = Incoming>, buffer: &mut [u8]) -> usize {
        self.clear();
        let sink = self.sink.as_mut_ptr();
        let (mut offered, mut all) = (0, true);
        for piece in into {
            let (base, mut left, step) = match piece {
                Incoming::Memory(pinned) => (pinned.as_ptr(), pinned.len(), pinned.len()),
                Incoming::Discard(len) => (sink, len, SINK_BYTES),
            };
            while left > 0 && self.has_room() {
                let len = left.min(step);
                self.push(base, len);
                offered += len;
                left -= len;
            }
            if left > 0 {
                // What follows in the stream must not be read before the rest of this piece.
                all = false;
                break;
            }
        }
        if all && self.has_room() {
            self.push(buffer.as_mut_ptr(), buffer.len());
            offered += buffer.len();
        }
        offered
    }

    /// The pieces in the form that `recvmsg` takes; good until the next `gather`.
    #[cfg(feature = "uring")]
    pub(super) fn message(&mut self) -> *mut libc::msghdr {
        self.message.msg_iov = self.pieces.as_mut_ptr();
        self.message.msg_iovlen = self.used as _;
        &raw mut *self.message
    }

    fn clear(&mut self) {
        self.used = 0;
    }

    fn has_room(&self) -> bool {
        self.used < IOV_MAX
    }

    fn push(&mut self, base: *mut u8, len: usize) {
        if len > 0 && self.used < IOV_MAX {
            self.pieces[self.used] = libc::iovec { iov_base: base.cast(), iov_len: len };
            self.used += 1;
        }
    }
}

/// A TCP socket that never blocks. Closed on drop.
#[derive(Debug)]
pub(crate) struct Socket(TcpStream);

impl Socket {
    /// A socket that can [`connect`](Self::connect) to addresses of this family.
    pub(crate) fn new(address: SocketAddr) -> io::Result<Self> {
        net::socket(address).map(Self)
    }

    /// Starts to connect; writability tells the end, [`Self::take_error`] which.
    pub(crate) fn connect(&self, address: SocketAddr) -> io::Result<()> {
        net::start_connect(&self.0, address)
    }

    pub(crate) fn raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    pub(crate) fn local_address(&self) -> io::Result<SocketAddr> {
        self.0.local_addr().map(net::canonical)
    }

    pub(crate) fn peer_address(&self) -> io::Result<SocketAddr> {
        self.0.peer_addr().map(net::canonical)
    }

    /// The error that a connect or the network left, once.
    pub(crate) fn take_error(&self) -> io::Result<()> {
        self.0.take_error()?.map_or(Ok(()), Err)
    }

    pub(crate) fn set_nodelay(&self) -> io::Result<()> {
        self.0.set_nodelay(true)
    }

    /// Says that nothing more will be sent. It fails only when the connection is gone, which the next read
    /// tells.
    pub(crate) fn finish_sending(&self) {
        let _ = self.0.shutdown(Shutdown::Write);
    }

    /// Bytes that the peer's kernel has not acknowledged.
    pub(crate) fn unacknowledged(&self) -> u64 {
        let mut bytes: i32 = 0;
        // SAFETY: TIOCOUTQ (SIOCOUTQ on a socket) writes one `int`.
        let ok = unsafe { libc::ioctl(self.raw_fd(), libc::TIOCOUTQ, &raw mut bytes) } == 0;
        if ok { u64::try_from(bytes).unwrap_or(0) } else { 0 }
    }

    /// Sends what fits of `pieces`, in order; gives the bytes that were taken and the bytes that were
    /// offered.
    pub(crate) fn send<'a>(
        &self,
        buffers: &mut Buffers,
        pieces: impl Iterator<Item = Outgoing<'a>>,
    ) -> io::Result<(usize, usize)> {
        buffers.clear();
        let mut offered = 0;
        for piece in pieces {
            if !buffers.has_room() {
                break;
            }
            match piece {
                Outgoing::Memory(pinned) => {
                    offered += pinned.len();
                    buffers.push(pinned.as_ptr(), pinned.len());
                }
                Outgoing::Bytes(bytes) => {
                    offered += bytes.len();
                    // The kernel only reads what is sent; `iovec` has no const form.
                    buffers.push(bytes.as_ptr().cast_mut(), bytes.len());
                }
            }
        }
        // SAFETY: all zeroes is a value of this type.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = buffers.pieces.as_mut_ptr();
        message.msg_iovlen = buffers.used as _;
        // SAFETY: the pieces are registered memory that its counts keep mapped, or borrowed bytes; all
        // outlive the call.
        let sent =
            check_len(unsafe { libc::sendmsg(self.raw_fd(), &raw const message, libc::MSG_NOSIGNAL) })?;
        Ok((sent, offered))
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<TcpStream> for Socket {
    /// One that does not block already.
    fn from(stream: TcpStream) -> Self {
        Self(stream)
    }
}

/// Turns a byte count, or the -1 of a system call, into a result.
fn check_len(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}
