//! Clocks of a process. Its monotonic clock begins at any value, runs slightly fast or slow, and sometimes
//! jumps ahead; it never goes back. Wall clocks agree roughly, and are set by operators.

use std::time::Duration;

use te_core::Instant;
use te_core::testkit::Rng;

/// Largest error of a clock's rate, parts per million.
pub(crate) const DRIFT_PPM_MAX: u64 = 10_000;
const MILLION: i128 = 1_000_000;
/// Of a gap in which it served no request, the master counts this much (`store-master`, module `clock`).
const GAP_MAX: Duration = Duration::from_millis(250);

#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    /// At this true time …
    at: Instant,
    /// … the clock showed this.
    shows: Instant,
    rate_ppm: i64,
}

impl Clock {
    /// Shows the true time.
    pub(crate) const TRUE: Self = Self { at: Instant::ZERO, shows: Instant::ZERO, rate_ppm: 0 };

    /// The clock of a process that begins now.
    pub(crate) fn random(now: Instant, rng: &mut Rng) -> Self {
        let rate_ppm = rng.below(2 * DRIFT_PPM_MAX + 1) as i64 - DRIFT_PPM_MAX as i64;
        Self { at: now, shows: Instant::from_millis(rng.below(100_000)), rate_ppm }
    }

    /// The time that it shows.
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

    /// At the end of a gap it shows little more than at its beginning.
    pub(crate) fn leave_out(&mut self, from: Instant, to: Instant) {
        let counted = GAP_MAX.min(self.shows(to) - self.shows(from));
        (self.shows, self.at) = (self.shows(from) + counted, to);
    }
}

/// A wall clock.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wall {
    /// Its error, ms.
    off_ms: i64,
}

impl Wall {
    /// Wall time at the beginning of a run, ms since 1970.
    const BEGIN_MS: u64 = 1_700_000_000_000;

    /// A random wall clock; one that is slow may be off by hours. No node's clock is more than an hour ahead
    /// of the master's.
    pub(crate) fn random(rng: &mut Rng, master: bool) -> Self {
        const MINUTE_MS: i64 = 60_000;
        let (slow, fast) = if master { (25, 180) } else { (180, 25) };
        Self { off_ms: rng.below((slow + fast) as u64 * MINUTE_MS as u64) as i64 - slow * MINUTE_MS }
    }

    /// Milliseconds since 1970, by this clock.
    pub(crate) fn shows_ms(&self, now: Instant) -> u64 {
        (Self::BEGIN_MS + now.as_nanos() / 1_000_000).saturating_add_signed(self.off_ms)
    }

    /// Nanoseconds since 1970, by this clock, exactly.
    pub(crate) fn shows_ns(&self, now: Instant) -> u64 {
        self.shows_ms(now) * 1_000_000 + now.as_nanos() % 1_000_000
    }

    /// Whether it is behind another clock.
    pub(crate) fn is_behind(&self, other: &Self) -> bool {
        self.off_ms < other.off_ms
    }
}

fn nanos(nanos: i128) -> Duration {
    Duration::from_nanos(nanos as u64)
}
