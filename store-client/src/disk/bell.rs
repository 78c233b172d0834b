//! [`Bell`]: wakes the thread of a disk.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::sys::EventFd;

/// Wakes the thread of a disk. Copies ring the same bell.
#[derive(Clone, Debug)]
pub struct Bell(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    event: EventFd,
    rung: AtomicBool,
}

impl Bell {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(Inner { event: EventFd::new()?, rung: AtomicBool::new(false) })))
    }

    /// Rings. What was made visible to other threads before is seen by the thread that wakes.
    pub fn ring(&self) {
        // From the first ring to the wake-up further ones cost no system call.
        if !self.0.rung.swap(true, Ordering::SeqCst) {
            self.0.event.raise();
        }
    }

    /// Sleeps until it rings, or for `timeout`. The caller looks for everything that it may have been rung
    /// for afterwards.
    pub(super) fn wait(&self, timeout: Option<Duration>) {
        self.0.event.wait(timeout);
        self.0.event.lower();
        // After the descriptor: a ring in between is not lost, because the caller has yet to look.
        self.0.rung.store(false, Ordering::SeqCst);
    }

    /// As [`wait`](Self::wait), and until the descriptor is readable.
    #[cfg(feature = "nvmeof")]
    pub(crate) fn wait_or(&self, fd: std::os::fd::RawFd, timeout: Option<Duration>) {
        use std::os::fd::AsRawFd as _;
        te_host::park([self.0.event.as_raw_fd(), fd], timeout);
        self.0.event.lower();
        self.0.rung.store(false, Ordering::SeqCst);
    }

    /// The descriptor, for a driver that lets the kernel ring.
    #[cfg(all(feature = "uring", target_os = "linux"))]
    pub(super) fn event(&self) -> &EventFd {
        &self.0.event
    }
}
