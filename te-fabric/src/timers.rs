//! When a transport must be polled: at once, because it has work, or at the earliest deadline that it set.
//!
//! ```text
//!   poll(now) ─▶ begin ─▶ work ─▶ is_due? ─▶ look at all deadlines ─▶ looked(next)
//!                           │ wake: something can be done at once
//!                           │ changed, due_by: a deadline was set
//!   poll_at ◀── next_poll ◀─┘
//! ```
//!
//! A transport looks at its deadlines every 5 ms, not on every poll. The fields are private so that no
//! deadline is set without a call of `changed` or `due_by`: the transport would sleep past it.

use core::time::Duration;

use te_core::Instant;

/// The time between two looks at the deadlines, in milliseconds.
const LOOK_MS: u64 = 5;

/// The time of a transport, and when it has to run again.
#[derive(Clone, Copy, Debug)]
pub struct Timers {
    now: Instant,
    polls: u32,
    /// There is work that the last poll did not do.
    woken: bool,
    /// When to look at the deadlines next.
    due: Instant,
    /// The earliest deadline, when they were last looked at.
    next: Option<Instant>,
    /// A deadline was set since then.
    stale: bool,
}

impl Timers {
    /// The timers of a transport that was not polled yet.
    #[must_use]
    pub const fn new() -> Self {
        Self { now: Instant::ZERO, polls: 0, woken: false, due: Instant::ZERO, next: None, stale: false }
    }

    /// The time of the current poll or, between polls, of the last one.
    #[inline]
    #[must_use]
    pub const fn now(&self) -> Instant {
        self.now
    }

    /// The number of polls so far. It wraps.
    #[inline]
    #[must_use]
    pub const fn polls(&self) -> u32 {
        self.polls
    }

    /// Begins a poll. Time does not go back.
    #[inline]
    pub fn begin(&mut self, now: Instant) {
        self.now = self.now.max(now);
        self.woken = false;
        self.polls = self.polls.wrapping_add(1);
    }

    /// The time since the last poll, when it is more than half of the time for which a peer may be silent:
    /// the transport must not blame peers for silence in that time. `None` before the first poll. The caller
    /// calls this before [`Self::begin`].
    #[must_use]
    pub fn absence(&self, now: Instant, silence_ms_max: u32) -> Option<Duration> {
        let away = now.nanos_since(self.now);
        let long = away > u64::from(silence_ms_max) * 1_000_000 / 2;
        (self.polls > 0 && long).then(|| Duration::from_nanos(away))
    }

    /// Notes that there is work: `poll` is due again at once.
    #[inline]
    pub const fn wake(&mut self) {
        self.woken = true;
    }

    /// As [`Self::wake`], if `something` is true.
    #[inline]
    pub const fn wake_if(&mut self, something: bool) {
        self.woken |= something;
    }

    /// Notes that a deadline was set.
    #[inline]
    pub const fn changed(&mut self) {
        self.stale = true;
    }

    /// Notes that a deadline was set, and that the next look at the deadlines must not come after it.
    #[inline]
    pub fn due_by(&mut self, at: Instant) {
        self.due = self.due.min(at);
        self.stale = true;
    }

    /// Whether to look at the deadlines in this poll.
    #[inline]
    #[must_use]
    pub fn is_due(&self) -> bool {
        self.now >= self.due
    }

    /// Begins a look at the deadlines: it does not see those that are set from here on.
    pub const fn looking(&mut self) {
        self.stale = false;
    }

    /// Ends a look at the deadlines; `next` is the earliest of them.
    pub fn looked(&mut self, next: Option<Instant>) {
        self.next = next;
        let often = self.now + Duration::from_millis(LOOK_MS);
        self.due = next.map_or(often, |next| next.min(often)).max(self.now);
    }

    /// The result of `poll_at`. `busy` is whether there is something to do or to fetch at once.
    #[inline]
    #[must_use]
    pub const fn next_poll(&self, busy: bool) -> Option<Instant> {
        if self.woken || busy {
            Some(self.now)
        } else if self.stale {
            Some(self.due)
        } else {
            self.next
        }
    }
}

impl Default for Timers {
    fn default() -> Self {
        Self::new()
    }
}

/// The earliest of several deadlines.
#[derive(Clone, Copy, Debug, Default)]
pub struct Earliest(Option<Instant>);

impl Earliest {
    /// Takes one more deadline into account, if there is one.
    #[inline]
    pub fn note(&mut self, at: Option<Instant>) {
        self.0 = [self.0, at].into_iter().flatten().min();
    }

    /// The earliest so far.
    #[must_use]
    pub const fn get(self) -> Option<Instant> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(millis: u64) -> Instant {
        Instant::from_millis(millis)
    }

    fn polled(at: Instant, next: Option<Instant>) -> Timers {
        let mut timers = Timers::new();
        timers.begin(at);
        timers.looking();
        timers.looked(next);
        timers
    }

    #[test]
    fn a_transport_sleeps_until_its_next_deadline() {
        assert_eq!(polled(ms(10), None).next_poll(false), None);
        assert_eq!(polled(ms(10), Some(ms(90))).next_poll(false), Some(ms(90)));
        assert_eq!(polled(ms(10), Some(ms(90))).next_poll(true), Some(ms(10)));
    }

    #[test]
    fn a_deadline_that_was_set_is_looked_at_in_time() {
        let mut timers = polled(ms(10), None);
        timers.changed();
        assert_eq!(timers.next_poll(false), Some(ms(15)), "the regular look");
        let mut timers = polled(ms(10), None);
        timers.due_by(ms(12));
        assert_eq!(timers.next_poll(false), Some(ms(12)));
        timers.begin(ms(11));
        assert!(!timers.is_due());
        timers.begin(ms(12));
        assert!(timers.is_due());
        timers.looking();
        timers.changed();
        timers.looked(None);
        assert_eq!(timers.next_poll(false), Some(ms(17)), "set while they were looked at");
    }

    #[test]
    fn what_can_be_done_at_once_is_done_by_the_next_poll() {
        let mut timers = polled(ms(10), Some(ms(90)));
        timers.wake();
        assert_eq!(timers.next_poll(false), Some(ms(10)));
        timers.begin(ms(11));
        assert_eq!(timers.next_poll(false), Some(ms(90)));
    }

    #[test]
    fn time_does_not_go_back() {
        let mut timers = polled(ms(10), Some(ms(5)));
        assert_eq!(timers.next_poll(false), Some(ms(5)), "a deadline that has passed");
        timers.begin(ms(7));
        assert_eq!((timers.now(), timers.polls(), timers.is_due()), (ms(10), 2, true));
    }

    #[test]
    fn the_time_before_the_first_poll_is_no_absence() {
        let mut timers = Timers::new();
        assert_eq!(timers.absence(ms(100_000), 1_000), None);
        timers.begin(ms(100_000));
        assert_eq!(timers.absence(ms(100_500), 1_000), None);
        assert_eq!(timers.absence(ms(100_501), 1_000), Some(Duration::from_millis(501)));
    }

    #[test]
    fn the_earliest_deadline_is_kept() {
        let mut next = Earliest::default();
        next.note(None);
        assert_eq!(next.get(), None);
        [Some(ms(7)), None, Some(ms(3)), Some(ms(9))].into_iter().for_each(|at| next.note(at));
        assert_eq!(next.get(), Some(ms(3)));
    }
}
