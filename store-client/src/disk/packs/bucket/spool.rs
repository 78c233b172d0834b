//! Memory for extents that are not closed: a bucket has no append.
//!
//! An open extent is an anonymous file in memory. It needs no directory: at every sync, what was written is
//! put into the bucket, so that nothing that counts as durable is only here.

use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Most bytes of all open extents of a directory.
pub(super) const SPOOL_BYTES_MAX: u64 = 512 << 20;
/// How long a write waits for room.
const WAIT: Duration = Duration::from_secs(20);

/// The room for open extents, and whether the disk is being closed.
#[derive(Debug, Default)]
pub(in crate::disk::packs) struct Spool {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    used: u64,
    closed: bool,
}

impl Spool {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes room, or waits for it.
    ///
    /// # Errors
    /// `ENOSPC` when there was none in time, or the disk is being closed.
    pub(super) fn take(&self, bytes: u64) -> io::Result<()> {
        let end = Instant::now() + WAIT;
        let mut state = self.lock();
        loop {
            if state.used + bytes <= SPOOL_BYTES_MAX {
                state.used += bytes;
                return Ok(());
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || state.closed {
                return Err(io::Error::from_raw_os_error(libc::ENOSPC));
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Gives room back.
    pub(super) fn give(&self, bytes: u64) {
        let mut state = self.lock();
        state.used = state.used.saturating_sub(bytes);
        drop(state);
        self.changed.notify_all();
    }

    /// Whether objects should be written now: the store keeps up.
    pub(in crate::disk::packs) fn has_room(&self) -> bool {
        self.lock().used < SPOOL_BYTES_MAX / 2
    }

    /// Ends all pauses, and every one to come.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Waits. Returns whether the disk is being closed.
    pub(super) fn pause(&self, pause: Duration) -> bool {
        let end = Instant::now() + pause;
        let mut state = self.lock();
        while !state.closed {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_given_back_and_a_closed_spool_keeps_no_thread() {
        let spool = Spool::default();
        assert!(spool.take(SPOOL_BYTES_MAX).is_ok() && !spool.has_room());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| spool.take(1));
            spool.give(2);
            assert!(waiting.join().is_ok_and(|taken| taken.is_ok()));
        });
        spool.close();
        assert!(spool.pause(Duration::from_secs(60)));
        assert!(spool.take(2).is_err_and(|error| error.raw_os_error() == Some(libc::ENOSPC)));
        spool.give(SPOOL_BYTES_MAX);
        assert!(spool.has_room());
    }
}
