//! Sockets of the side channel.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::BorrowedFd;

use te_fabric::net::{set_liveness, socket, start_connect};
use te_fabric::{Epoll, Interest};

/// Starts to connect; writability tells the end, `take_error` which.
pub(crate) fn dial(address: SocketAddr, silence_ms: u32) -> io::Result<TcpStream> {
    let stream = socket(address)?;
    start_connect(&stream, address)?;
    tune(&stream, silence_ms)?;
    Ok(stream)
}

/// Small frames leave at once, and the kernel looks after a silent connection: a host that is gone lets go of its queue
/// pairs here, and of ours there.
pub(crate) fn tune(stream: &TcpStream, silence_ms: u32) -> io::Result<()> {
    stream.set_nodelay(true)?;
    set_liveness(stream, silence_ms)
}

/// Watches a descriptor of the provider, which keeps it open for as long as it lives itself.
#[allow(unsafe_code, reason = "the provider gives its descriptors as numbers")]
pub(crate) fn watch(epoll: &Epoll, fd: i32, token: u64) -> io::Result<()> {
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: used for this one call only, during which the provider is alive and keeps the descriptor open.
    epoll.add(unsafe { BorrowedFd::borrow_raw(fd) }, token, Interest::READ)
}
