//! The unsafe calls of io_uring.

use std::io;

use io_uring::{IoUring, squeue};

/// A ring. Its requests name memory of a [`Transfer`](super::Transfer), which the driver keeps until their
/// completion.
pub(in crate::disk) struct Ring(IoUring);

impl Ring {
    pub(in crate::disk) fn new(ring: IoUring) -> Self {
        Self(ring)
    }

    /// Queues a request, whose memory its caller keeps until its completion.
    pub(in crate::disk) fn push(&mut self, request: &squeue::Entry) -> io::Result<()> {
        for _ in 0..2 {
            // SAFETY: the request names pieces of a transfer, which owns or shares the memory, and which the
            // driver keeps in its table until the completion; the pieces are on the heap and do not move.
            if unsafe { self.0.submission().push(request) }.is_ok() {
                return Ok(());
            }
            self.submit()?;
        }
        Err(io::Error::from_raw_os_error(libc::EBUSY))
    }

    /// Whether every request was given to the kernel.
    pub(in crate::disk) fn is_empty(&mut self) -> bool {
        self.0.submission().is_empty()
    }

    pub(in crate::disk) fn submit(&mut self) -> io::Result<()> {
        loop {
            match self.0.submit() {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Completions are taken first.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EAGAIN)) => {
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The next completion: the place of its transfer, and its result.
    pub(in crate::disk) fn next(&mut self) -> Option<(usize, i32)> {
        let completion = self.0.completion().next()?;
        Some((completion.user_data() as usize, completion.result()))
    }

    /// Sleeps until there is a completion.
    pub(in crate::disk) fn wait(&mut self) -> io::Result<()> {
        match self.0.submit_and_wait(1) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
            _ => Ok(()),
        }
    }
}
