//! Decides when memory that was freed is given back to the operating system.
//!
//! The allocator keeps freed memory for the next allocation. That is right for memory that is needed again
//! soon, and wrong for the memory of a segment with millions of objects that was unmounted. Giving memory
//! back stops the process for some milliseconds, so it is done rarely.

use std::time::{Duration, Instant};

/// Less freed memory than this is not given back, bytes.
const BYTES_MIN: u64 = 64 << 20;
/// Shortest time between two times that memory is given back.
const EVERY: Duration = Duration::from_secs(60);

/// Tracks how much memory is in use. See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Reclaim {
    /// Highest use since memory was last given back, bytes.
    most: u64,
    last: Option<Instant>,
}

impl Reclaim {
    /// Records that `bytes` are in use. Returns whether to give freed memory back now.
    pub(crate) fn is_due(&mut self, now: Instant, bytes: u64) -> bool {
        self.most = self.most.max(bytes);
        let freed = self.most - bytes;
        let lately = self.last.is_some_and(|last| now.saturating_duration_since(last) < EVERY);
        let is_due = freed >= BYTES_MIN && freed >= self.most / 4 && !lately;
        if is_due {
            (self.most, self.last) = (bytes, Some(now));
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn much_freed_memory_is_given_back_but_not_often() {
        let (mut reclaim, start) = (Reclaim::default(), Instant::now());
        const MIB: u64 = 1 << 20;
        assert!(!reclaim.is_due(start, 1000 * MIB));
        // A variation that is too small.
        assert!(!reclaim.is_due(start, 800 * MIB));
        assert!(reclaim.is_due(start, 700 * MIB));
        assert!(!reclaim.is_due(start, 700 * MIB));
        assert!(!reclaim.is_due(start, 100 * MIB));
        assert!(reclaim.is_due(start + EVERY, 100 * MIB));
        // Too little in absolute terms.
        assert!(!reclaim.is_due(start + 2 * EVERY, 40 * MIB));
    }
}
