//! Memory that was needed and is not any more: given back to the system when there is much of it.
//!
//! The allocator keeps what was freed for whoever allocates next, which is right for what comes and goes, and wrong for what a
//! segment with millions of objects leaves behind. Giving back halts the process for some milliseconds, so it is done seldom.

use std::time::{Duration, Instant};

/// Less is not worth it, bytes.
const BYTES_MIN: u64 = 64 << 20;
const EVERY: Duration = Duration::from_secs(60);

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Ballast {
    /// Most that was in use since the last time.
    most: u64,
    last: Option<Instant>,
}

impl Ballast {
    /// So many bytes are in use now. Whether to give back what was freed.
    pub(crate) fn is_much(&mut self, now: Instant, bytes: u64) -> bool {
        self.most = self.most.max(bytes);
        let freed = self.most - bytes;
        let lately = self.last.is_some_and(|last| now.saturating_duration_since(last) < EVERY);
        let is_much = freed >= BYTES_MIN && freed >= self.most / 4 && !lately;
        if is_much {
            (self.most, self.last) = (bytes, Some(now));
        }
        is_much
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn much_is_given_back_and_seldom() {
        let (mut ballast, start) = (Ballast::default(), Instant::now());
        const MIB: u64 = 1 << 20;
        assert!(!ballast.is_much(start, 1000 * MIB));
        // What comes and goes.
        assert!(!ballast.is_much(start, 800 * MIB));
        assert!(ballast.is_much(start, 700 * MIB));
        assert!(!ballast.is_much(start, 700 * MIB));
        assert!(!ballast.is_much(start, 100 * MIB));
        assert!(ballast.is_much(start + EVERY, 100 * MIB));
        // Little.
        assert!(!ballast.is_much(start + 2 * EVERY, 40 * MIB));
    }
}
