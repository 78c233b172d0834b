//! How long to poll before sleeping: for a short time, and not at all while another process needs the core.
//!
//! Code that waits for an answer which takes microseconds polls for it instead of sleeping, and yields the
//! core between polls, in case the answer needs it. On a core that another process keeps busy this does harm:
//! the scheduler then gives that process milliseconds. A waiter that sleeps instead is woken when the answer
//! is there, and runs first. So a yield that took long ends spinning for a while, and for longer when it
//! happens again.

use std::thread;
use std::time::{Duration, Instant};

/// A yield that takes this long has waited for a process that computes.
const CROWDED: Duration = Duration::from_micros(500);
/// How long spinning is paused after that.
const PAUSE_MIN: Duration = Duration::from_millis(20);
/// Upper limit of the pause, which doubles while the core stays busy.
const PAUSE_MAX: Duration = Duration::from_millis(640);

/// The spinning of one waiter; see the module's documentation.
#[derive(Clone, Copy, Debug)]
pub struct Spin {
    budget: Duration,
    since: Option<Instant>,
    paused_until: Option<Instant>,
    pause: Duration,
}

impl Spin {
    /// A waiter that spins for at most `budget` per wait.
    #[must_use]
    pub const fn new(budget: Duration) -> Self {
        Self { budget, since: None, paused_until: None, pause: PAUSE_MIN }
    }

    /// Ends a wait: what was waited for has happened. The next wait has the whole budget again.
    pub const fn reset(&mut self) {
        self.since = None;
    }

    /// Called when what is waited for has not happened yet. Returns true after yielding the core once: poll
    /// again. Returns false when the time for spinning is over: sleep.
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
            // The first spin after a pause.
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
        assert!(spin.may_spin(start + 51 * US), "after a sleep it has its whole budget again");
        spin.reset();
        assert!(spin.may_spin(start + 200 * US), "and after an answer");
        assert!(!Spin::new(Duration::ZERO).again(), "a budget of zero is possible");
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
