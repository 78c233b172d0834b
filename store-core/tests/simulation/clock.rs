//! A process's own clock: it begins anywhere, runs a little fast or slow, and sometimes jumps ahead. It never goes back.

use std::time::Duration;

use te_core::Instant;
use te_core::sim::Rng;

/// How far a clock's rate may be off, parts per million.
pub(crate) const DRIFT_PPM_MAX: u64 = 10_000;
const MILLION: i128 = 1_000_000;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    /// At this true time …
    at: Instant,
    /// … it showed this.
    shows: Instant,
    rate_ppm: i64,
}

impl Clock {
    /// Shows the true time.
    pub(crate) const TRUE: Self = Self { at: Instant::ZERO, shows: Instant::ZERO, rate_ppm: 0 };

    /// That of a process that begins now.
    pub(crate) fn random(now: Instant, rng: &mut Rng) -> Self {
        let rate_ppm = rng.below(2 * DRIFT_PPM_MAX + 1) as i64 - DRIFT_PPM_MAX as i64;
        Self { at: now, shows: Instant::from_millis(rng.below(100_000)), rate_ppm }
    }

    /// What it shows.
    pub(crate) fn shows(&self, now: Instant) -> Instant {
        let gone = i128::from(now.as_nanos().saturating_sub(self.at.as_nanos()));
        self.shows + nanos(gone * (MILLION + i128::from(self.rate_ppm)) / MILLION)
    }

    /// The first true time at which it shows `shown` or more.
    pub(crate) fn when(&self, shown: Instant) -> Instant {
        let gone = i128::from(shown.as_nanos().saturating_sub(self.shows.as_nanos()));
        let rate = MILLION + i128::from(self.rate_ppm);
        self.at + nanos((gone * MILLION + rate - 1) / rate)
    }

    /// From now on it shows more.
    pub(crate) fn jump(&mut self, now: Instant, by: Duration) {
        (self.shows, self.at) = (self.shows(now) + by, now);
    }
}

fn nanos(nanos: i128) -> Duration {
    Duration::from_nanos(nanos as u64)
}
