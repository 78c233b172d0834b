//! Sending from and receiving into raw memory, one system call each.

use std::io;
use std::net::TcpStream;
use std::os::fd::AsRawFd as _;

use super::memory::Memory;

/// Sends as much of `head` and then of `memory` as the socket takes. Returns the number of bytes.
///
/// # Errors
/// The system's error; `WouldBlock` when the socket is full.
pub(crate) fn send(socket: &TcpStream, head: &[u8], memory: Memory) -> io::Result<usize> {
    let mut pieces = [
        // The kernel only reads this memory; `iovec` has no const form.
        libc::iovec { iov_base: head.as_ptr().cast_mut().cast(), iov_len: head.len() },
        libc::iovec { iov_base: memory.as_ptr().cast(), iov_len: memory.len() },
    ];
    let pieces = without_empty(&mut pieces, head.is_empty());
    // SAFETY: all zeroes is a value of this type.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len() as _;
    // SAFETY: both pieces are mapped for the time of the call: `head` is borrowed, `memory` is held as its
    // documentation says. The kernel keeps none of the pointers.
    check_len(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) })
}

/// Receives into `head` and then into `memory`. Returns the number of bytes; 0 when the peer has finished
/// sending, or when there is no room.
///
/// # Errors
/// The system's error; `WouldBlock` when there is nothing.
pub(crate) fn receive(socket: &TcpStream, head: &mut [u8], memory: Memory) -> io::Result<usize> {
    let mut pieces = [
        libc::iovec { iov_base: head.as_mut_ptr().cast(), iov_len: head.len() },
        libc::iovec { iov_base: memory.as_ptr().cast(), iov_len: memory.len() },
    ];
    let pieces = without_empty(&mut pieces, head.is_empty());
    // SAFETY: both pieces are mapped and writable for the time of the call: `head` is borrowed exclusively,
    // `memory` is held as its documentation says, and no reference to it exists.
    check_len(unsafe { libc::readv(socket.as_raw_fd(), pieces.as_ptr(), pieces.len() as i32) })
}

/// The pieces without an empty first one.
fn without_empty(pieces: &mut [libc::iovec; 2], head_is_empty: bool) -> &mut [libc::iovec] {
    if head_is_empty { &mut pieces[1..] } else { &mut pieces[..] }
}

/// Converts the result of a system call, a byte count or -1.
fn check_len(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use te_core::MemSpan;

    use super::*;

    #[test]
    fn heads_and_memory_are_sent_and_received_in_order() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let out = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
        let (into, _) = listener.accept().expect("connected");
        let (mut source, mut sink) = (*b"payload!", [0_u8; 8]);
        // SAFETY: both arrays outlive the values, and nothing refers to them meanwhile.
        let (from, to) = unsafe {
            (
                Memory::new(MemSpan::new(source.as_mut_ptr(), 8)),
                Memory::new(MemSpan::new(sink.as_mut_ptr(), 8)),
            )
        };
        assert_eq!(send(&out, b"head", from).expect("room"), 12);
        assert_eq!(send(&out, b"", from.from(0, 3)).expect("room"), 3);
        assert_eq!(send(&out, b"end", Memory::NONE).expect("room"), 3);
        let mut head = [0; 4];
        assert_eq!(receive(&into, &mut head, to).expect("sent"), 12);
        assert_eq!(&head, b"head");
        let mut rest = [0; 6];
        assert_eq!(receive(&into, &mut rest, Memory::NONE).expect("sent"), 6);
        assert_eq!((&rest, &sink), (b"payend", b"payload!"));
        drop(out);
        assert_eq!(receive(&into, &mut rest, Memory::NONE).expect("the end"), 0);
    }
}
