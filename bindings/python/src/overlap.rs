//! Which of several destinations can be written in one batch.
//!
//! Gets into the same memory would mix their bytes, and the checksums would turn them into misses. So gets
//! whose destinations overlap are carried out one after the other.

use std::collections::BTreeMap;

/// Memory that the gets of a batch write.
#[derive(Debug, Default)]
pub(crate) struct Occupied {
    /// End of each range, by its start.
    ranges: BTreeMap<usize, usize>,
}

impl Occupied {
    /// Adds a range unless a byte of it is occupied. Returns whether it was added.
    pub(crate) fn add(&mut self, start: usize, len: usize) -> bool {
        let end = start.saturating_add(len);
        let taken = self.ranges.range(..end).next_back().is_some_and(|(_, &other)| other > start);
        if len > 0 && taken {
            return false;
        }
        if len > 0 {
            self.ranges.insert(start, end);
        }
        true
    }
}
