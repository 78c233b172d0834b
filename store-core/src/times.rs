//! [`Times`]: a histogram of durations with few and fixed classes.

/// Counts durations by class. Small enough to have one per operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    counts: [u64; CLASSES],
    sum_ns: u64,
}

const CLASSES: usize = BOUNDS_NS.len() + 1;

/// Upper bounds of all classes but the last, which is unbounded, nanoseconds: each four times the previous
/// one.
const BOUNDS_NS: [u64; 12] = {
    let mut bounds = [1_000; 12];
    let mut at = 1;
    while at < bounds.len() {
        bounds[at] = bounds[at - 1] * 4;
        at += 1;
    }
    bounds
};

impl Times {
    /// Counts one duration.
    pub fn record_ns(&mut self, ns: u64) {
        let class = BOUNDS_NS.iter().position(|bound| ns <= *bound).unwrap_or(BOUNDS_NS.len());
        self.counts[class] += 1;
        self.sum_ns = self.sum_ns.saturating_add(ns);
    }

    /// Number of durations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Sum of all durations, seconds.
    #[must_use]
    pub fn sum_s(&self) -> f64 {
        self.sum_ns as f64 / 1e9
    }

    /// Each class: its upper bound in seconds (infinite for the last), and the number of durations in it.
    pub fn classes(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        let ends = BOUNDS_NS.iter().map(|bound| *bound as f64 / 1e9).chain([f64::MAX]);
        ends.zip(self.counts)
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn what_took_as_long_as_a_bound_is_in_the_class_below_it() {
        let mut times = Times::default();
        for ns in [0, 1_000, 1_001, 4_000, u64::MAX] {
            times.record_ns(ns);
        }
        let classes: Vec<(f64, u64)> = times.classes().collect();
        assert_eq!((classes[0], classes[1], classes[12]), ((1e-6, 2), (4e-6, 2), (f64::MAX, 1)));
        assert_eq!(classes[11].0, 4.194_304);
        assert_eq!(times.count(), 5);
        assert_eq!(times.sum_s(), u64::MAX as f64 / 1e9, "the sum does not wrap");
    }
}
