//! What a source found, and what was odd about it.

use std::string::String;
use std::vec::Vec;

use te_core::topology::Topology;

/// Warnings that are kept, at most.
const WARNINGS_MAX: usize = 32;

/// What was found, and what was odd about it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The host.
    pub topology: Topology,
    /// What was left out or guessed, and why, in words for people. At most 33; the last one counts the rest.
    pub warnings: Vec<String>,
}

/// Warnings while a source is read.
#[derive(Default)]
pub(super) struct Warnings {
    kept: Vec<String>,
    unsaid: usize,
}

impl Warnings {
    pub(super) fn add(&mut self, warning: String) {
        if self.kept.len() < WARNINGS_MAX {
            self.kept.push(warning);
        } else {
            self.unsaid += 1;
        }
    }

    /// Cuts a list that is too long, and says so.
    pub(super) fn cut<T>(&mut self, list: &mut Vec<T>, count_max: usize, what: &str) {
        if list.len() > count_max {
            let warning = format!("{what}: only the first {count_max} of {} are used", list.len());
            // What is missing matters more than what is odd: it goes first, and is never left unsaid for the
            // others.
            self.kept.insert(0, warning);
            self.unsaid += usize::from(self.kept.len() > WARNINGS_MAX);
            self.kept.truncate(WARNINGS_MAX);
            list.truncate(count_max);
        }
    }

    pub(super) fn into_vec(mut self) -> Vec<String> {
        if self.unsaid > 0 {
            self.kept.push(format!("and {} more", self.unsaid));
        }
        self.kept
    }
}
