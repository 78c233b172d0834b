//! How long an idle poller spins before it parks: not at all when it has learnt that spinning does not pay.
//!
//! A pause that is about to end is shorter than a sleep: spin. One that lasts longer than the spin is paid for twice, once on
//! the core and once for the sleep after all: park at once. Which of the two comes is learnt from those that came.

use std::time::Duration;

/// Learns from the pauses of one poller.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spin {
    limit: Duration,
    /// Smoothed length of a pause.
    pause: Duration,
}

impl Spin {
    /// Spins for `limit_us` at most; 0 never spins.
    pub(crate) fn new(limit_us: u32) -> Self {
        Self { limit: Duration::from_micros(limit_us.into()), pause: Duration::ZERO }
    }

    /// Whether a pause that has lasted `so_far` is still worth spinning for.
    pub(crate) fn goes_on(&self, so_far: Duration) -> bool {
        so_far < self.limit && self.pause <= self.limit
    }

    /// A pause has ended after `pause`, sleep included. One that was very long counts as a moderately long one, so that
    /// a few short ones outweigh it.
    pub(crate) fn ended(&mut self, pause: Duration) {
        self.pause = (self.pause * 3 + pause.min(self.limit * 4)) / 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_micros(10);
    const LONG: Duration = Duration::from_millis(5);

    #[test]
    fn short_pauses_are_spun_through_and_long_ones_slept_through() {
        let mut spin = Spin::new(50);
        assert!(spin.goes_on(SHORT) && !spin.goes_on(LONG), "nothing learnt yet: spin for the limit");
        (0..8).for_each(|_| spin.ended(LONG));
        assert!(!spin.goes_on(Duration::ZERO), "spinning has not paid");
        (0..8).for_each(|_| spin.ended(SHORT));
        assert!(spin.goes_on(SHORT), "it pays again");
    }

    #[test]
    fn no_limit_is_no_spin() {
        assert!(!Spin::new(0).goes_on(Duration::ZERO));
    }
}
