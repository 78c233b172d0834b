//! Sleeping until one of several file descriptors is readable.

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Descriptors that one call waits on.
const FDS_MAX: usize = 40;

/// Sleeps until a descriptor is readable or `timeout` has passed. It may return earlier.
pub fn wait_readable(fd: BorrowedFd<'_>, timeout: Duration) {
    park([fd.as_raw_fd()], Some(timeout));
}

/// Sleeps until one of `fds` is readable or `timeout` has passed (`None`: no limit). It may return earlier. A
/// number that is not an open descriptor, or by now another one, makes it return early at worst.
pub fn park(fds: impl IntoIterator<Item = RawFd>, timeout: Option<Duration>) {
    let mut open = fds.into_iter().filter(|&fd| fd >= 0).take(FDS_MAX).map(|fd| {
        // SAFETY: the callers pass descriptors that their transports keep open; they are only waited on,
        // within this call.
        unsafe { BorrowedFd::borrow_raw(fd) }
    });
    // On the stack: a client that waits for an answer parks here, and its operations allocate nothing.
    let mut array: [PollFd<'_>; FDS_MAX];
    let polled: &mut [PollFd<'_>] = match open.next() {
        None => &mut [],
        Some(first) => {
            array = std::array::from_fn(|_| PollFd::new(first, PollFlags::POLLIN));
            let mut count = 1;
            for (slot, fd) in array[1..].iter_mut().zip(open) {
                *slot = PollFd::new(fd, PollFlags::POLLIN);
                count += 1;
            }
            &mut array[..count]
        }
    };
    // Rounded up: waking shortly before the time would make the caller spin.
    let timeout = match timeout {
        None => PollTimeout::NONE,
        Some(timeout) => {
            let millis = timeout.as_nanos().div_ceil(1_000_000);
            PollTimeout::try_from(u32::try_from(millis).unwrap_or(u32::MAX).min(60_000))
                .unwrap_or(PollTimeout::MAX)
        }
    };
    match poll(polled, timeout) {
        Ok(_) | Err(Errno::EINTR) => {}
        Err(errno) => {
            // A descriptor that cannot be waited on must not make the caller spin.
            log::warn!("waiting for the fabrics failed: {errno}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
