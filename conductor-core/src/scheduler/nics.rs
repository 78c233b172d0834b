//! NICs as we have booked them: each direction of an instance sends one transfer after the other.
//!
//! Transfers that were asked for are in `free_at`; transfers to a decode instance that begin when a prefill
//! ends are counted in steps of time until then.

use alloc::boxed::Box;
use alloc::vec;

use te_core::Instant;

use super::decay::Fading;
use super::projection::STEP_NS;

/// One direction of an instance's NICs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Direction {
    free_at: u64,
    outstanding: u32,
    recent_ns: f64,
}

impl Direction {
    /// When a new transfer could begin, in nanoseconds; not before `now`.
    #[inline]
    pub(super) fn free(&self, now: u64) -> u64 {
        self.free_at.max(now)
    }

    /// Transfers that were booked and have not ended.
    pub(super) const fn outstanding(&self) -> u32 {
        self.outstanding
    }

    /// Books a transfer of `span` that ends at `end`.
    pub(super) fn book(&mut self, end: u64, span: u64) {
        self.free_at = self.free_at.max(end);
        self.outstanding += 1;
        self.recent_ns += span as f64;
    }

    /// The part of the recent time for which transfers were booked; above 1 when they pile up.
    pub(super) fn utilisation(&self) -> f64 {
        Fading::TEN_SECONDS.utilisation(self.recent_ns)
    }

    /// What was booked before weighs less by `factor`.
    pub(super) fn fade(&mut self, factor: f64) {
        self.recent_ns *= factor;
    }

    /// A transfer of `span` that should have ended at `end` has ended, or will not take place. What was
    /// booked behind it moves by the difference.
    pub(super) fn release(&mut self, end: u64, span: u64, now: u64) {
        self.outstanding = self.outstanding.saturating_sub(1);
        if self.outstanding == 0 {
            self.free_at = self.free_at.min(now);
        } else if end > now {
            self.free_at = self.free_at.saturating_sub(span.min(end - now)).max(now);
        } else {
            self.free_at = self.free_at.saturating_add(span.min(now - end));
        }
    }
}

/// Steps that are looked ahead; later transfers count in the last one.
const STEPS: usize = 128;

/// Transfers that an instance will receive, in steps of time.
#[derive(Clone, Debug)]
pub(super) struct Arrivals {
    head: u64,
    spans: Box<[u64]>,
    total: u64,
}

impl Arrivals {
    pub(super) fn new() -> Self {
        Self { head: 0, spans: vec![0; STEPS].into_boxed_slice(), total: 0 }
    }

    /// Makes the step of `now` the first; what should have arrived before counts there.
    #[inline]
    pub(super) fn advance(&mut self, now: Instant) {
        let to = now.as_nanos() / STEP_NS;
        if to > self.head {
            self.advance_to(to);
        }
    }

    fn advance_to(&mut self, to: u64) {
        if to > self.head + STEPS as u64 {
            let late = self.total;
            self.spans.fill(0);
            self.head = to;
            self.spans[Self::index(to)] = late;
        }
        while self.head < to {
            let late = core::mem::take(&mut self.spans[Self::index(self.head)]);
            self.head += 1;
            self.spans[Self::index(self.head)] += late;
        }
    }

    /// Counts a transfer of `span` in the step of `at`; the step is needed to remove it.
    pub(super) fn add(&mut self, at: u64, span: u64) -> u64 {
        let step = (at / STEP_NS).clamp(self.head, self.head + STEPS as u64 - 1);
        self.spans[Self::index(step)] += span;
        self.total += span;
        step
    }

    pub(super) fn remove(&mut self, step: u64, span: u64) {
        let spans = &mut self.spans[Self::index(step.max(self.head))];
        *spans = spans.saturating_sub(span);
        self.total = self.total.saturating_sub(span);
    }

    /// When a transfer that is asked for at `at` could begin, if the NIC is free from `free_at` on.
    #[inline]
    pub(super) fn begin(&self, free_at: u64, at: u64) -> u64 {
        let mut free_at = free_at;
        if self.total > 0 {
            let last = (at / STEP_NS).clamp(self.head, self.head + STEPS as u64 - 1);
            for step in self.head..last {
                free_at = match self.spans[Self::index(step)] {
                    0 => free_at,
                    span => free_at.max(step * STEP_NS) + span,
                };
            }
        }
        free_at.max(at)
    }

    #[cfg(test)]
    pub(super) const fn total(&self) -> u64 {
        self.total
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.total == 0 && self.spans.iter().all(|&span| span == 0)
    }

    const fn index(step: u64) -> usize {
        (step % STEPS as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_wait_for_those_before_them() {
        let mut nic = Direction::default();
        nic.book(100, 100);
        nic.book(250, 150);
        assert_eq!(nic.free(10), 250);
        // The first ends 20 early, so does the second.
        nic.release(100, 100, 80);
        assert_eq!(nic.free(80), 230);
        // The second does not take place: nothing is left.
        nic.release(250, 150, 90);
        assert_eq!((nic.free(90), nic.outstanding()), (90, 0));
    }

    #[test]
    fn a_late_transfer_delays_those_behind_it() {
        let mut nic = Direction::default();
        nic.book(100, 100);
        nic.book(250, 150);
        nic.release(100, 100, 140);
        assert_eq!(nic.free(140), 290);
    }

    #[test]
    fn transfers_of_the_future_delay_later_ones_only() {
        let mut arrivals = Arrivals::new();
        let step = arrivals.add(3 * STEP_NS, 2 * STEP_NS);
        assert_eq!(arrivals.begin(0, STEP_NS), STEP_NS);
        assert_eq!(arrivals.begin(0, 4 * STEP_NS), 5 * STEP_NS);
        assert_eq!(arrivals.begin(0, 9 * STEP_NS), 9 * STEP_NS);
        arrivals.advance(Instant::from_nanos(8 * STEP_NS));
        assert_eq!(arrivals.begin(0, 9 * STEP_NS), 10 * STEP_NS);
        arrivals.remove(step, 2 * STEP_NS);
        assert!(arrivals.is_empty());
    }

    #[test]
    fn after_a_long_silence_what_is_late_is_still_counted() {
        let mut arrivals = Arrivals::new();
        let step = arrivals.add(STEP_NS, 7);
        arrivals.advance(Instant::from_nanos(10_000 * STEP_NS));
        assert_eq!(arrivals.total, 7);
        arrivals.remove(step, 7);
        assert!(arrivals.is_empty());
    }
}
