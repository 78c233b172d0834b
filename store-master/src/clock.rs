//! The serving thread's clock, and what of its time the master counts.
//!
//! The master is told how long it has been served, not how long it has existed: when the whole process was stopped (a signal, a
//! debugger, a machine that paused), or one request took very long, nobody could say that it lives. So of a gap between two
//! looks at the clock at most [`GAP_MAX`] counts. Everything that the master times then takes longer in the world than it
//! was told, which is the safe side of each: leases, the patience with writers, the silence of nodes.

use std::time::{Duration, Instant};

/// Of a gap in which nobody was listened to, as much counts.
const GAP_MAX: Duration = Duration::from_millis(250);

/// See the module.
#[derive(Debug)]
pub(crate) struct Clock {
    started: Instant,
    last: Instant,
    /// Time since the start that does not count.
    left_out: Duration,
    /// A gap that is as long as this is none.
    allowed: Duration,
}

impl Clock {
    pub(crate) fn new(now: Instant) -> Self {
        Self { started: now, last: now, left_out: Duration::ZERO, allowed: GAP_MAX }
    }

    /// The thread is about to wait for something to arrive, so long at most; `None`: for as long as it takes.
    pub(crate) fn waits(&mut self, at_most: Option<Duration>) {
        self.allowed = at_most.map_or(Duration::MAX, |wait| wait.saturating_add(GAP_MAX));
    }

    /// Notes what time it is.
    pub(crate) fn read(&mut self) -> Instant {
        self.note(Instant::now());
        self.last
    }

    fn note(&mut self, now: Instant) {
        let gap = now.saturating_duration_since(self.last);
        self.left_out += gap.saturating_sub(self.allowed);
        self.allowed = GAP_MAX;
        self.last = self.last.max(now);
    }

    /// The time that was read last.
    pub(crate) fn last(&self) -> Instant {
        self.last
    }

    /// The same as the master counts it.
    pub(crate) fn core(&self) -> te_core::Instant {
        te_core::Instant::ZERO + (self.uptime().saturating_sub(self.left_out))
    }

    /// Since the start, all of it.
    pub(crate) fn uptime(&self) -> Duration {
        self.last.saturating_duration_since(self.started)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn time_in_which_nobody_was_listened_to_counts_for_little() {
        let start = Instant::now();
        let mut clock = Clock::new(start);
        let counted = |clock: &Clock| clock.core() - te_core::Instant::ZERO;
        clock.note(start + 100 * MS);
        assert_eq!(counted(&clock), 100 * MS);
        // Stopped for a quarter of an hour.
        clock.note(start + 900_100 * MS);
        assert_eq!(counted(&clock), 100 * MS + GAP_MAX);
        // What was meant to be waited counts, and what the system was late.
        clock.waits(Some(500 * MS));
        clock.note(start + 900_700 * MS);
        assert_eq!(counted(&clock), 700 * MS + GAP_MAX);
        // The leave was for that one time.
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
        let mut clock = Clock::new(start);
        clock.note(start + 9 * MS);
        clock.note(start + 5 * MS);
        assert_eq!((clock.last(), clock.uptime()), (start + 9 * MS, 9 * MS));
    }
}
