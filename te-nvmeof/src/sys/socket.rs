//! Non-blocking TCP sockets, and vectored I/O directly from and into registered memory.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use te_fabric::net;

use super::mem::Pinned;

/// Pieces of memory that one system call takes.
pub(crate) const IOV_MAX: usize = 512;
/// Size of the memory into which discarded bytes are received.
const SINK_BYTES: usize = 64 << 10;

/// Where received bytes go.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Incoming {
    Memory(Pinned),
    /// This many bytes are discarded.
    Discard(usize),
}

/// Memory to be sent.
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
}

// SAFETY: the pointers in `pieces` are used only within one call of `Socket::receive` or `Socket::send`.
unsafe impl Send for Buffers {}

impl Buffers {
    pub(crate) fn new() -> Self {
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Self { pieces: vec![empty; IOV_MAX].into(), used: 0, sink: vec![0; SINK_BYTES].into() }
    }

    /// Lays out where received bytes go; returns how many bytes there is room for.
    fn gather(&mut self, into: Option<Incoming>, buffer: &mut [u8]) -> usize {
        self.used = 0;
        let sink = self.sink.as_mut_ptr();
        let mut offered = 0;
        if let Some(piece) = into {
            let (base, mut left, step) = match piece {
                Incoming::Memory(pinned) => (pinned.as_ptr(), pinned.len(), pinned.len()),
                Incoming::Discard(len) => (sink, len, SINK_BYTES),
            };
            while left > 0 && self.used < IOV_MAX {
                let len = left.min(step);
                self.push(base, len);
                offered += len;
                left -= len;
            }
            if left > 0 {
                // Bytes behind this piece in the stream must not be read before the rest of the piece.
                return offered;
            }
        }
        if self.used < IOV_MAX {
            self.push(buffer.as_mut_ptr(), buffer.len());
            offered += buffer.len();
        }
        offered
    }

    fn push(&mut self, base: *mut u8, len: usize) {
        if len > 0 && self.used < IOV_MAX {
            self.pieces[self.used] = libc::iovec { iov_base: base.cast(), iov_len: len };
            self.used += 1;
        }
    }
}

/// A TCP socket that never blocks. It is closed on drop.
#[derive(Debug)]
pub(crate) struct Socket(TcpStream);

impl Socket {
    /// A socket that can [`connect`](Self::connect) to addresses of this family.
    pub(crate) fn new(address: SocketAddr) -> io::Result<Self> {
        net::socket(address).map(Self)
    }

    /// Starts to connect. The socket becomes writable when that has ended; [`Self::take_error`] returns the
    /// result.
    pub(crate) fn connect(&self, address: SocketAddr) -> io::Result<()> {
        net::start_connect(&self.0, address)
    }

    /// The pending error of the socket, from connecting or from the network. It is returned once.
    pub(crate) fn take_error(&self) -> io::Result<()> {
        self.0.take_error()?.map_or(Ok(()), Err)
    }

    pub(crate) fn set_nodelay(&self) -> io::Result<()> {
        self.0.set_nodelay(true)
    }

    /// Receives once: into the memory, then into the buffer. Returns the bytes that arrived and those that
    /// there was room for. 0 bytes mean that the peer has finished sending.
    pub(crate) fn receive(
        &self,
        buffers: &mut Buffers,
        into: Option<Incoming>,
        buffer: &mut [u8],
    ) -> io::Result<(usize, usize)> {
        let offered = buffers.gather(into, buffer);
        // SAFETY: each piece is registered memory that its counts keep mapped (`Pinned`), the sink, or the
        // buffer that the caller lends; all outlive the call, and the kernel keeps none of the pointers.
        let result = unsafe { libc::readv(self.0.as_raw_fd(), buffers.pieces.as_ptr(), buffers.used as i32) };
        check_len(result).map(|bytes| (bytes, offered))
    }

    /// Sends as many of `pieces` as fit, in order; returns the bytes that the socket took and the bytes that
    /// it was offered.
    pub(crate) fn send<'a>(
        &self,
        buffers: &mut Buffers,
        pieces: impl Iterator<Item = Outgoing<'a>>,
    ) -> io::Result<(usize, usize)> {
        buffers.used = 0;
        let mut offered = 0;
        for piece in pieces {
            if buffers.used >= IOV_MAX {
                break;
            }
            match piece {
                Outgoing::Memory(pinned) => {
                    offered += pinned.len();
                    buffers.push(pinned.as_ptr(), pinned.len());
                }
                Outgoing::Bytes(bytes) => {
                    offered += bytes.len();
                    // The kernel only reads this memory; `iovec` has no const form.
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
        let result = unsafe { libc::sendmsg(self.0.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
        check_len(result).map(|bytes| (bytes, offered))
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<TcpStream> for Socket {
    /// The stream must be non-blocking.
    fn from(stream: TcpStream) -> Self {
        Self(stream)
    }
}

/// Converts the result of a system call, a byte count or -1.
fn check_len(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}
