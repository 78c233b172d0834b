//! What was read from a source, with warnings about what was left out.

use std::string::String;
use std::vec::Vec;

use te_core::topology::Topology;

/// Warnings that are kept.
const WARNINGS_MAX: usize = 32;

/// What was read from a source, with warnings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The host.
    pub topology: Topology,
    /// What was left out or guessed, and why, in sentences for people. At most 33; the last one counts the
    /// others.
    pub warnings: Vec<String>,
}

/// Collects warnings while a source is read.
#[derive(Default)]
pub(super) struct Warnings {
    kept: Vec<String>,
    dropped: usize,
}

impl Warnings {
    pub(super) fn add(&mut self, warning: String) {
        if self.kept.len() < WARNINGS_MAX {
            self.kept.push(warning);
        } else {
            self.dropped += 1;
        }
    }

    /// Truncates a list that is too long, with a warning.
    pub(super) fn cut<T>(&mut self, list: &mut Vec<T>, count_max: usize, what: &str) {
        if list.len() > count_max {
            let warning = format!("{what}: only the first {count_max} of {} are used", list.len());
            // What is left out matters more than other oddities: this warning goes first, and is never
            // dropped in favour of others.
            self.kept.insert(0, warning);
            self.dropped += usize::from(self.kept.len() > WARNINGS_MAX);
            self.kept.truncate(WARNINGS_MAX);
            list.truncate(count_max);
        }
    }

    pub(super) fn into_vec(mut self) -> Vec<String> {
        if self.dropped > 0 {
            self.kept.push(format!("and {} more", self.dropped));
        }
        self.kept
    }
}
