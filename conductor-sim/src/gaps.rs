//! Times between tokens: the ends of an instance's decode steps, and what its requests saw of them.

/// The ends of the decode steps of one instance, nanoseconds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Steps {
    ends_ns: Vec<u64>,
    scratch: Vec<u64>,
}

impl Steps {
    /// The number of steps so far; the number of the next step.
    pub(crate) const fn len(&self) -> usize {
        self.ends_ns.len()
    }

    /// The end of a step, nanoseconds.
    pub(crate) fn end_ns(&self, step: usize) -> u64 {
        self.ends_ns[step]
    }

    pub(crate) fn push(&mut self, end_ns: u64) {
        self.ends_ns.push(end_ns);
    }

    /// The time between tokens of a request whose first token was out at `first_ns`, and the others at the
    /// ends of steps `from..to`: the mean of the longest tenth of its gaps (paper, Section 5.1), at least one
    /// of them. Zero when there was only one token.
    pub(crate) fn tbt_ns(&mut self, first_ns: u64, from: usize, to: usize) -> u64 {
        let mut before = first_ns;
        self.scratch.clear();
        for end in &self.ends_ns[from..to] {
            self.scratch.push(end - before);
            before = *end;
        }
        let count = self.scratch.len();
        if count == 0 {
            return 0;
        }
        let longest = count.div_ceil(10);
        self.scratch.select_nth_unstable(count - longest);
        self.scratch[count - longest..].iter().sum::<u64>() / longest as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_tenth_of_the_gaps_counts() {
        let mut steps = Steps::default();
        let mut end = 100;
        for gap in (1..=20).rev() {
            end += gap;
            steps.push(end);
        }
        assert_eq!((steps.len(), steps.end_ns(0)), (20, 120));
        // 20 and 19 of twenty gaps; the longest alone of the last five and of one; nothing of none.
        assert_eq!(steps.tbt_ns(100, 0, 20), 19);
        assert_eq!(steps.tbt_ns(steps.end_ns(14), 15, 20), 5);
        assert_eq!(steps.tbt_ns(110, 0, 1), 10);
        assert_eq!(steps.tbt_ns(110, 3, 3), 0);
    }
}
