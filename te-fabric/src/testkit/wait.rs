//! Waiting for what other threads, processes and the kernel bring about.

use core::time::Duration;
use std::time::Instant;

/// How long [`eventually`] waits.
const GIVE_UP: Duration = Duration::from_secs(10);
/// The pause between two looks.
const PAUSE: Duration = Duration::from_millis(1);

/// Returns once `holds` returns true; looks every millisecond.
///
/// ```
/// use std::sync::atomic::{AtomicBool, Ordering};
/// use te_fabric::testkit::eventually;
///
/// let done = AtomicBool::new(false);
/// std::thread::scope(|scope| {
///     scope.spawn(|| done.store(true, Ordering::Relaxed));
///     eventually("the thread has run", || done.load(Ordering::Relaxed));
/// });
/// ```
///
/// # Panics
/// After 10 s, with `what`, at the caller's line.
#[track_caller]
pub fn eventually(what: &str, holds: impl FnMut() -> bool) {
    assert!(holds_within(GIVE_UP, holds), "not within {GIVE_UP:?}: {what}");
}

fn holds_within(limit: Duration, mut holds: impl FnMut() -> bool) -> bool {
    let give_up = Instant::now() + limit;
    while !holds() {
        if Instant::now() > give_up {
            return false;
        }
        std::thread::sleep(PAUSE);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_looks_until_it_holds() {
        let mut looks = 0;
        eventually("the fifth look", || {
            looks += 1;
            looks == 5
        });
        assert_eq!(looks, 5);
    }

    #[test]
    fn what_never_holds_is_given_up_after_at_least_one_look() {
        let mut looks = 0;
        assert!(!holds_within(Duration::ZERO, || {
            looks += 1;
            false
        }));
        assert!(looks > 0);
    }
}
