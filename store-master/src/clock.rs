//! The serving thread's clock, and how much of its time the master counts.
//!
//! The master's time is the time in which it was served, not the time in which it existed. When the whole
//! process was stopped (by a signal, a debugger, a suspended machine), or one request took very long, no peer
//! could prove that it is alive. Of a gap between two readings of the clock, at most [`GAP_MAX`] counts.
//! Everything that the master times then takes longer in real time than configured, which is the safe side
//! for leases, for waiting writers and for silent nodes.

use std::time::{Duration, Instant};

/// Most of a gap without input that counts.
const GAP_MAX: Duration = Duration::from_millis(250);

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Clock {
    started: Instant,
    /// The master's time at the start: not zero for a store that continues.
    base: te_core::Instant,
    last: Instant,
    /// Time since the start that does not count.
    uncounted: Duration,
    /// Gaps up to this length count in full.
    allowed: Duration,
}

impl Clock {
    pub(crate) fn new(now: Instant, base: te_core::Instant) -> Self {
        Self { started: now, base, last: now, uncounted: Duration::ZERO, allowed: GAP_MAX }
    }

    /// The thread is about to wait for input, for at most this long; `None`: without limit.
    pub(crate) fn waits(&mut self, at_most: Option<Duration>) {
        self.allowed = at_most.map_or(Duration::MAX, |wait| wait.saturating_add(GAP_MAX));
    }

    /// Reads the clock.
    pub(crate) fn read(&mut self) -> Instant {
        self.note(Instant::now());
        self.last
    }

    fn note(&mut self, now: Instant) {
        let gap = now.saturating_duration_since(self.last);
        self.uncounted += gap.saturating_sub(self.allowed);
        self.allowed = GAP_MAX;
        self.last = self.last.max(now);
    }

    /// The time at the latest reading.
    pub(crate) fn last(&self) -> Instant {
        self.last
    }

    /// The same time, as the master counts it.
    pub(crate) fn core(&self) -> te_core::Instant {
        self.base + (self.uptime().saturating_sub(self.uncounted))
    }

    /// Real time since the start.
    pub(crate) fn uptime(&self) -> Duration {
        self.last.saturating_duration_since(self.started)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn time_in_which_no_input_was_read_counts_for_little() {
        let start = Instant::now();
        let mut clock = Clock::new(start, te_core::Instant::ZERO);
        let counted = |clock: &Clock| clock.core() - te_core::Instant::ZERO;
        clock.note(start + 100 * MS);
        assert_eq!(counted(&clock), 100 * MS);
        // Stopped for a quarter of an hour.
        clock.note(start + 900_100 * MS);
        assert_eq!(counted(&clock), 100 * MS + GAP_MAX);
        // The intended wait counts, and the delay of the system.
        clock.waits(Some(500 * MS));
        clock.note(start + 900_700 * MS);
        assert_eq!(counted(&clock), 700 * MS + GAP_MAX);
        // The permission was for that one wait.
        clock.note(start + 901_700 * MS);
        assert_eq!(counted(&clock), 700 * MS + 2 * GAP_MAX);
        clock.waits(None);
        clock.note(start + 999_700 * MS);
        assert_eq!(counted(&clock), 98_700 * MS + 2 * GAP_MAX);
        assert_eq!(clock.uptime(), 999_700 * MS);
    }

    #[test]
    fn it_never_goes_back() {
        let start = Instant::now();
        let mut clock = Clock::new(start, te_core::Instant::ZERO);
        clock.note(start + 9 * MS);
        clock.note(start + 5 * MS);
        assert_eq!((clock.last(), clock.uptime()), (start + 9 * MS, 9 * MS));
    }
}
