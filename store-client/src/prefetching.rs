//! Waiting until objects are in memory.

use std::time::{Duration, Instant};

use store_core::message::Prefetched;

/// Longest time between two questions.
const PAUSE_MAX: Duration = Duration::from_millis(20);

/// What is known of objects that are to be in memory by a deadline: for callers that wait in their own way.
/// [`Store::prefetch`](crate::Store::prefetch) waits by sleeping.
#[derive(Debug)]
pub struct Prefetching {
    until: Instant,
    pause: Duration,
    there: Vec<bool>,
    left: Vec<usize>,
}

impl Prefetching {
    /// So many objects, none of which was asked for yet.
    #[must_use]
    pub fn new(objects: usize, deadline: Duration) -> Self {
        let now = Instant::now();
        // A deadline that no clock shows is never reached.
        let until = now.checked_add(deadline).unwrap_or(now + Duration::from_secs(86_400 * 365));
        Self {
            until,
            pause: Duration::from_millis(1),
            there: vec![false; objects],
            left: (0..objects).collect(),
        }
    }

    /// The objects to ask for next, by their number.
    #[must_use]
    pub fn left(&self) -> &[usize] {
        &self.left
    }

    /// Takes the answers about [`left`](Self::left), in its order. Returns after which time to ask again;
    /// `None`: it is over.
    pub fn heard(&mut self, answers: &[Prefetched]) -> Option<Duration> {
        let mut answers = answers.iter();
        let there = &mut self.there;
        self.left.retain(|at| {
            let answer = answers.next().copied().unwrap_or(Prefetched::Absent);
            there[*at] = answer == Prefetched::InMemory;
            answer == Prefetched::Coming
        });
        let time = self.until.saturating_duration_since(Instant::now());
        if self.left.is_empty() || time.is_zero() {
            return None;
        }
        let pause = self.pause.min(time);
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        Some(pause)
    }

    /// For each object whether it is in memory.
    #[must_use]
    pub fn into_there(self) -> Vec<bool> {
        self.there
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_coming_is_asked_for_again_until_the_deadline() {
        let mut waiting = Prefetching::new(3, Duration::from_secs(3_600));
        assert_eq!(waiting.left(), [0, 1, 2]);
        let first = waiting.heard(&[Prefetched::Coming, Prefetched::InMemory, Prefetched::Absent]);
        assert_eq!((first, waiting.left()), (Some(Duration::from_millis(1)), &[0][..]));
        assert!(waiting.heard(&[Prefetched::Coming]) > first, "the pauses grow");
        assert!(waiting.heard(&[Prefetched::InMemory]).is_none());
        assert_eq!(waiting.into_there(), [true, true, false]);
        let mut waiting = Prefetching::new(1, Duration::ZERO);
        assert_eq!(waiting.heard(&[Prefetched::Coming]), None, "the deadline has passed");
        // An answer that is missing is no reason to wait.
        let mut waiting = Prefetching::new(1, Duration::MAX);
        assert_eq!(waiting.heard(&[]), None);
    }
}
