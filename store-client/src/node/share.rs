//! The limit on a node's copy rate, and how many copies the node requests at a time because of it.

use std::time::{Duration, Instant};

/// Unused bandwidth is kept for this long.
const BURST: Duration = Duration::from_millis(100);

/// A rate that copies stay below: the operator's setting `copy_bytes_per_s_max`.
#[derive(Debug)]
pub(super) struct Share {
    /// 0: no limit.
    bytes_per_s: u64,
    /// When the next copy may begin.
    next_at: Instant,
    /// Mean length of recent copies.
    mean_bytes: u64,
}

impl Share {
    pub(super) fn new(bytes_per_s: u64) -> Self {
        Self { bytes_per_s, next_at: Instant::now(), mean_bytes: 0 }
    }

    /// Records that a copy of this many bytes was ordered.
    pub(super) fn saw(&mut self, bytes: u64) {
        self.mean_bytes = if self.mean_bytes == 0 { bytes } else { (7 * self.mean_bytes + bytes) / 8 };
    }

    /// Number of copies to hold at a time, at most `most`: about one second's worth, so that none of them
    /// waits until it is given up.
    pub(super) fn orders_max(&self, most: u32) -> u32 {
        if self.bytes_per_s == 0 {
            return most;
        }
        let orders = self.bytes_per_s / self.mean_bytes.max(1);
        u32::try_from(orders).unwrap_or(most).clamp(1, most)
    }

    /// Whether a copy of this many bytes may begin now. If so, it is counted.
    pub(super) fn take(&mut self, bytes: u64) -> bool {
        self.take_at(Instant::now(), bytes)
    }

    fn take_at(&mut self, now: Instant, bytes: u64) -> bool {
        if self.bytes_per_s == 0 {
            return true;
        }
        if now < self.next_at {
            return false;
        }
        let begun = now.checked_sub(BURST).map_or(self.next_at, |earliest| self.next_at.max(earliest));
        self.next_at = begun + Duration::from_secs_f64(bytes as f64 / self.bytes_per_s as f64);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_stay_below_the_limit_whatever_their_length() {
        for (bytes, rate) in [(1 << 20, 10 << 20), (1_000, 1 << 20), (64 << 20, 1 << 20), (1, 1)] {
            let mut share = Share::new(rate);
            let start = share.next_at;
            let (mut now, mut begun) = (start, 0);
            while begun < 200 {
                begun += u64::from(share.take_at(now, bytes));
                now += Duration::from_micros(500);
                // Long waits are skipped.
                now = now.max(share.next_at - Duration::from_micros(500));
            }
            // The last copy has only begun, and the burst is granted in advance.
            let took = now - start + BURST;
            assert!(
                (begun - 1) as f64 * bytes as f64 <= rate as f64 * took.as_secs_f64(),
                "{bytes} at {rate}"
            );
        }
    }

    #[test]
    fn bandwidth_that_was_not_used_for_long_is_not_saved_up() {
        let mut share = Share::new(1_000);
        let now = share.next_at + Duration::from_secs(60);
        assert!(share.take_at(now, 500));
        assert!(!share.take_at(now, 500), "only a tenth of a second is kept");
        assert!(share.take_at(now + Duration::from_millis(400), 500));
    }

    #[test]
    fn no_more_copies_are_held_than_the_limit_allows_in_about_a_second() {
        let mut share = Share::new(10 << 20);
        share.saw(1 << 20);
        assert_eq!(share.orders_max(64), 10);
        share.saw(1 << 30);
        assert_eq!(share.orders_max(64), 1);
        assert_eq!(Share::new(0).orders_max(64), 64);
        assert_eq!(Share::new(u64::MAX).orders_max(64), 64);
    }

    #[test]
    fn without_a_limit_no_copy_waits() {
        let mut share = Share::new(0);
        assert!((0..1_000).all(|_| share.take(1 << 40)));
    }
}
