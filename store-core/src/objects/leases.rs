//! The number of objects that are leased now, without visiting any of them.

use core::time::Duration;

use serde::{Deserialize, Serialize};
use te_core::Instant;

/// Counts leases by the time slot that they end in. The count may be late by one slot, a 32nd of the longest
/// lease.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct LeaseCount {
    slot_ns: u64,
    /// By slot, modulo their number. Leases end within the next 33 slots.
    #[serde(with = "crate::snapshot::array")]
    ends: [u32; SLOTS],
    /// Slots up to this one are over and empty.
    over: u64,
    count: u32,
}

const SLOTS: usize = 64;

impl LeaseCount {
    pub(crate) fn new(lease: Duration) -> Self {
        let slot_ns = (lease.as_nanos() as u64 / 32).max(1);
        Self { slot_ns, ends: [0; SLOTS], over: 0, count: 0 }
    }

    /// A lease whose end was `before` ends at `until` now.
    pub(crate) fn moved(&mut self, now: Instant, before: Instant, until: Instant) {
        self.advance(now);
        self.ended(before);
        let slot = self.slot(until);
        if slot > self.over {
            self.ends[slot as usize % SLOTS] += 1;
            self.count += 1;
        }
    }

    /// An object whose lease ends at `end` is gone.
    pub(crate) fn ended(&mut self, end: Instant) {
        let slot = self.slot(end);
        if slot > self.over {
            self.ends[slot as usize % SLOTS] -= 1;
            self.count -= 1;
        }
    }

    /// Removes the leases that have ended.
    pub(crate) fn advance(&mut self, now: Instant) {
        // Leases that end in the current slot may still be valid.
        let over = self.slot(now).saturating_sub(1);
        if over <= self.over {
            return;
        }
        for slot in self.over + 1..=over.min(self.over + SLOTS as u64) {
            self.count -= core::mem::take(&mut self.ends[slot as usize % SLOTS]);
        }
        self.over = over;
    }

    pub(crate) const fn count(&self) -> u32 {
        self.count
    }

    const fn slot(&self, at: Instant) -> u64 {
        at.as_nanos() / self.slot_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_count_is_right_to_within_a_slot(
            ops in prop::collection::vec((0u64..400, 0usize..8, any::<bool>()), 1..200),
        ) {
            const LEASE: Duration = Duration::from_millis(320);
            let slot = Duration::from_millis(10);
            let mut count = LeaseCount::new(LEASE);
            let mut ends = [Instant::ZERO; 8];
            let mut now = Instant::from_millis(1_000);
            for (wait, object, gone) in ops {
                now = now + Duration::from_millis(wait);
                if gone {
                    count.advance(now);
                    count.ended(ends[object]);
                    ends[object] = Instant::ZERO;
                } else {
                    count.moved(now, ends[object], now + LEASE);
                    ends[object] = now + LEASE;
                }
                let at_least = ends.iter().filter(|end| **end > now).count() as u32;
                let at_most = ends.iter().filter(|end| **end + slot + slot > now).count() as u32;
                prop_assert!((at_least..=at_most).contains(&count.count()), "{} of {at_least}..={at_most}", count.count());
            }
        }
    }
}
