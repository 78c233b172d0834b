//! Warnings about what other processes do: so many in a period, so that no process fills the log.

use std::fmt;
use std::time::{Duration, Instant};

/// Warnings that are written in one period.
const WARNINGS_MAX: u32 = 20;
const PERIOD: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(crate) struct Warnings {
    /// The begin of the period.
    since: Option<Instant>,
    count: u32,
}

impl Warnings {
    /// Writes a warning, or counts it.
    pub(crate) fn warn(&mut self, text: fmt::Arguments<'_>) {
        match self.next(Instant::now()) {
            Next::Skip => {}
            Next::Write => log::warn!("nvlink: {text}"),
            Next::WriteAfter(skipped) => {
                log::warn!("nvlink: {text} ({skipped} warnings before this one were left out)");
            }
        }
    }

    fn next(&mut self, now: Instant) -> Next {
        if self.since.is_none_or(|since| now.duration_since(since) >= PERIOD) {
            let skipped = self.count.saturating_sub(WARNINGS_MAX);
            (self.since, self.count) = (Some(now), 1);
            return if skipped == 0 { Next::Write } else { Next::WriteAfter(skipped) };
        }
        self.count = self.count.saturating_add(1);
        if self.count > WARNINGS_MAX { Next::Skip } else { Next::Write }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Next {
    Skip,
    Write,
    /// So many were left out before.
    WriteAfter(u32),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twenty_warnings_are_written_in_a_minute_and_the_others_are_counted() {
        let (mut warnings, begin) = (Warnings::default(), Instant::now());
        assert!((0..20).all(|_| warnings.next(begin) == Next::Write));
        assert!((0..7).all(|_| warnings.next(begin + PERIOD / 2) == Next::Skip));
        assert_eq!(warnings.next(begin + PERIOD), Next::WriteAfter(7));
        assert_eq!(warnings.next(begin + PERIOD), Next::Write);
        assert_eq!(warnings.next(begin + 3 * PERIOD), Next::Write, "none was left out");
    }
}
