//! How long to look again and again before sleeping: a little, and not at all while somebody else wants the
//! core.
//!
//! Whoever waits for an answer that takes microseconds looks for it rather than sleep, and gives the core
//! away each time, should the answer need it. On a core that another process keeps busy that is a bad
//! bargain: the scheduler gives that one milliseconds. Who sleeps instead is woken when the answer is there,
//! and goes first. So a yield that took long ends spinning for a while, and for longer when it happens again.

use std::thread;
use std::time::{Duration, Instant};

/// A yield that takes this long has waited for somebody who computes.
const CROWDED: Duration = Duration::from_micros(500);
/// How long spinning pauses then.
const PAUSE_MIN: Duration = Duration::from_millis(20);
/// And at most, when the core was found crowded again and again.
const PAUSE_MAX: Duration = Duration::from_millis(640);

/// The spinning of one waiter. See the module.
#[derive(Clone, Copy, Debug)]
pub struct Spin {
    budget: Duration,
    since: Option<Instant>,
    paused_until: Option<Instant>,
    pause: Duration,
}

impl Spin {
    /// Spins for `budget` at a time.
    #[must_use]
    pub const fn new(budget: Duration) -> Self {
        Self { budget, since: None, paused_until: None, pause: PAUSE_MIN }
    }

    /// What was waited for is there: the next wait begins afresh.
    pub const fn reset(&mut self) {
        self.since = None;
    }

    /// It is not there yet. True: look again; the core was given away once. False: sleep, the time for
    /// spinning is over.
    pub fn again(&mut self) -> bool {
        let now = Instant::now();
        if !self.may_spin(now) {
            return false;
        }
        thread::yield_now();
        self.yielded(now, Instant::now());
        true
    }

    fn may_spin(&mut self, now: Instant) -> bool {
        let paused = self.paused_until.is_some_and(|until| now < until);
        if paused || now.saturating_duration_since(*self.since.get_or_insert(now)) >= self.budget {
            self.since = None;
            return false;
        }
        true
    }

    fn yielded(&mut self, from: Instant, to: Instant) {
        if to.saturating_duration_since(from) >= CROWDED {
            self.paused_until = Some(to + self.pause);
            self.pause = (self.pause * 2).min(PAUSE_MAX);
        } else if self.paused_until.take().is_some() {
            // The first after a pause.
            self.pause = PAUSE_MIN;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    #[test]
    fn it_spins_for_its_time_and_then_sleeps() {
        let start = Instant::now();
        let mut spin = Spin::new(50 * US);
        assert!(spin.may_spin(start) && spin.may_spin(start + 49 * US));
        assert!(!spin.may_spin(start + 50 * US));
        assert!(spin.may_spin(start + 51 * US), "after a sleep it has its time again");
        spin.reset();
        assert!(spin.may_spin(start + 200 * US), "and after an answer");
        assert!(!Spin::new(Duration::ZERO).again(), "no time at all is possible");
    }

    #[test]
    fn a_long_yield_ends_spinning_for_a_while_and_a_second_one_for_longer() {
        let mut now = Instant::now();
        let mut spin = Spin::new(50 * US);
        let mut pauses = Vec::new();
        for _ in 0..8 {
            assert!(spin.may_spin(now));
            spin.yielded(now, now + 3000 * US);
            now += 3000 * US;
            let until = spin.paused_until.unwrap_or(now);
            assert!(!spin.may_spin(now) && !spin.may_spin(until - US));
            pauses.push((until - now).as_millis());
            now = until;
        }
        assert_eq!(pauses, [20, 40, 80, 160, 320, 640, 640, 640]);
        assert!(spin.may_spin(now));
        spin.yielded(now, now + US);
        assert!(spin.may_spin(now + US), "a short one ends that");
        spin.yielded(now, now + 500 * US);
        assert_eq!(spin.paused_until, Some(now + 500 * US + PAUSE_MIN));
    }
}
