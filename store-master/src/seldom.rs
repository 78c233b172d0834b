//! Lines of the log that others could cause without end: some of them are written, the rest is counted.

use std::time::{Duration, Instant};

/// Lines of one kind that are written within [`PER`].
const LINES_MAX: u32 = 10;
const PER: Duration = Duration::from_secs(10);

/// One kind of line.
#[derive(Debug, Default)]
pub(crate) struct Seldom {
    since: Option<Instant>,
    lines: u32,
    left_out: u64,
}

impl Seldom {
    /// Whether to write the next one, and how many were left out before it.
    pub(crate) fn may(&mut self, now: Instant) -> Option<u64> {
        if self.since.is_none_or(|since| now.saturating_duration_since(since) >= PER) {
            (self.since, self.lines) = (Some(now), 0);
        }
        if self.lines >= LINES_MAX {
            self.left_out += 1;
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_written_is_counted_and_told_with_the_next() {
        let (mut seldom, start) = (Seldom::default(), Instant::now());
        let written = (0..1_000).filter(|_| seldom.may(start).is_some()).count();
        assert_eq!(written, LINES_MAX as usize);
        assert_eq!(seldom.may(start + PER), Some(1_000 - u64::from(LINES_MAX)));
        assert_eq!(seldom.may(start + PER), Some(0));
    }
}
