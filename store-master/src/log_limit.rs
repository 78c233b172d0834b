//! Rate limit of log lines that peers can cause: lines above the limit are counted instead.

use std::time::{Duration, Instant};

/// Most lines of one kind within [`PERIOD`].
const LINES_MAX: u32 = 10;
const PERIOD: Duration = Duration::from_secs(10);

/// The limit of one kind of line.
#[derive(Debug, Default)]
pub(crate) struct LogLimit {
    since: Option<Instant>,
    lines: u32,
    suppressed: u64,
}

impl LogLimit {
    /// Whether to write the next line, and how many were suppressed before it.
    pub(crate) fn may(&mut self, now: Instant) -> Option<u64> {
        if self.since.is_none_or(|since| now.saturating_duration_since(since) >= PERIOD) {
            (self.since, self.lines) = (Some(now), 0);
        }
        if self.lines >= LINES_MAX {
            self.suppressed += 1;
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suppressed_lines_are_counted_and_reported_with_the_next() {
        let (mut log_limit, start) = (LogLimit::default(), Instant::now());
        let written = (0..1_000).filter(|_| log_limit.may(start).is_some()).count();
        assert_eq!(written, LINES_MAX as usize);
        assert_eq!(log_limit.may(start + PERIOD), Some(1_000 - u64::from(LINES_MAX)));
        assert_eq!(log_limit.may(start + PERIOD), Some(0));
    }
}
