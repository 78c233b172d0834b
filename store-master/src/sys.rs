//! System calls that the standard library does not offer.
#![allow(unsafe_code, reason = "calls of the C library")]

use std::io;
use std::net::TcpStream;
use std::os::fd::AsRawFd as _;

/// Gives freed memory that the allocator has kept back to the operating system. Without glibc's allocator it
/// does nothing. Takes some milliseconds per 100 MiB.
pub(crate) fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: malloc_trim(3) may be called at any time, from any thread; it does not touch allocated memory.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Sends as much as the socket takes at this moment, also if it is one that blocks.
///
/// # Errors
/// `WouldBlock` when it takes nothing, and those of the connection.
pub(crate) fn send_now(stream: &TcpStream, bytes: &[u8]) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the descriptor is open as long as `stream` is borrowed, and `bytes` outlives the call, which
    // only reads it.
    let sent = unsafe { libc::send(stream.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}
