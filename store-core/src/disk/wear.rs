//! The limit on bytes written per second.

use core::time::Duration;

use te_core::Instant;

const SECOND: Duration = Duration::from_secs(1);

/// A token bucket of one second: kept as the time at which everything written is paid.
#[derive(Debug, Default)]
pub(super) struct Wear {
    bytes_per_s: u64,
    paid_at: Instant,
}

impl Wear {
    pub(super) const fn new(bytes_per_s: u64) -> Self {
        Self { bytes_per_s, paid_at: Instant::ZERO }
    }

    pub(super) const fn set(&mut self, bytes_per_s: u64) {
        self.bytes_per_s = bytes_per_s;
        self.paid_at = Instant::ZERO;
    }

    /// From when on a batch may be written; the past where it may be written at once.
    pub(super) const fn open_at(&self) -> Instant {
        self.paid_at
    }

    pub(super) fn charge(&mut self, now: Instant, bytes: u64) {
        if self.bytes_per_s == 0 {
            return;
        }
        let nanos = u128::from(bytes) * SECOND.as_nanos() / u128::from(self.bytes_per_s);
        // Up to a second without writes is saved up.
        let earliest = Instant::from_nanos(now.as_nanos().saturating_sub(SECOND.as_nanos() as u64));
        let cost = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        self.paid_at = self.paid_at.max(earliest) + cost;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn over_a_minute_the_limit_is_kept_within_five_per_cent() {
        let limit = 40 << 20;
        let (mut wear, mut now, mut written) = (Wear::new(limit), Instant::from_millis(5_000), 0_u64);
        let end = now + Duration::from_secs(60);
        while now < end {
            if wear.open_at() <= now {
                wear.charge(now, 4 << 20);
                written += 4 << 20;
            }
            now = now + Duration::from_millis(1);
        }
        let share = written as f64 / (60.0 * limit as f64);
        assert!((0.95..1.05).contains(&share), "{share}");
        wear.set(0);
        wear.charge(now, u64::MAX);
        assert!(wear.open_at() <= now, "no limit");
    }
}
