//! What readers asked a node for, and its disk says is gone: the node tells the master.
//!
//! The master does not hear it from readers: one that asks with another length, or makes a locator up, could
//! have good objects dropped. The disk itself says that nothing is at a locator and never will be, whatever
//! the reader says about the object. Each locator is reported once, and so many per second, because readers
//! can ask for any number of them.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

/// Most reports in a window.
const REPORTS_MAX: u32 = 64;
const WINDOW: Duration = Duration::from_secs(1);
/// Locators that are not reported again; beyond this the oldest are.
const KNOWN_MAX: usize = 4_096;

/// What was reported of one disk since it was mounted.
#[derive(Debug, Default)]
pub(super) struct GonePlaces {
    known: BTreeSet<u64>,
    order: VecDeque<u64>,
    window: Option<Instant>,
    reports: u32,
}

impl GonePlaces {
    /// Whether to report a locator now.
    pub(super) fn admit(&mut self, now: Instant, locator: u64) -> bool {
        if self.known.contains(&locator) {
            return false;
        }
        if self.window.is_none_or(|since| now.saturating_duration_since(since) >= WINDOW) {
            (self.window, self.reports) = (Some(now), 0);
        }
        if self.reports >= REPORTS_MAX {
            return false;
        }
        self.reports += 1;
        self.known.insert(locator);
        self.order.push_back(locator);
        if self.order.len() > KNOWN_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_locator_is_reported_once_and_so_many_per_second() {
        let (mut gone, mut now) = (GonePlaces::default(), Instant::now());
        assert!(gone.admit(now, 7) && !gone.admit(now, 7));
        let admitted = (100..300).filter(|locator| gone.admit(now, *locator)).count();
        assert_eq!(admitted, REPORTS_MAX as usize - 1);
        now += WINDOW;
        assert!(gone.admit(now, 299), "it was not reported before");
        for locator in 1_000..1_000 + 2 * KNOWN_MAX as u64 {
            now += WINDOW;
            assert!(gone.admit(now, locator));
        }
        assert_eq!((gone.known.len(), gone.order.len()), (KNOWN_MAX, KNOWN_MAX));
    }
}
