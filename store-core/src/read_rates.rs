//! Read rates of objects, estimated in constant time and without a byte per object.
//!
//! A count-min sketch (G. Cormode and S. Muthukrishnan, "An improved data stream summary", J. Algorithms 55,
//! 2005) of two rows over sliding windows: each cell counts the reads of the current window and keeps the
//! count of the previous one, which is weighted by the share of it that is less than a window's length ago.
//! Objects that share a cell are overestimated; with two rows it is unlikely that they share both.

use alloc::boxed::Box;
use alloc::vec;

use serde::{Deserialize, Serialize};
use te_core::Instant;

const ROWS: usize = 2;
const ROW_BITS: u32 = 14;

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Cell {
    window: u32,
    now: u32,
    before: u32,
}

/// Further replicas of objects that are read very often.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReplicationConfig {
    /// Whether reads are counted, and whether replicas are added. Default off.
    pub mode: ReplicationMode,
    /// Gets of an object per second from which on it gets another replica. Default 20.
    pub gets_per_s_min: f64,
    /// The time over which gets are counted, ms. Default 10,000.
    pub window_ms: u32,
    /// The number of replicas up to which replicas are added. Default 2.
    pub replicas_max: u8,
    /// Most replicas that are begun per second, over all objects. Default 10.
    pub tasks_per_s_max: u32,
}

impl Default for ReplicationConfig {
    fn default() -> Self {
        Self {
            mode: ReplicationMode::Off,
            gets_per_s_min: 20.0,
            window_ms: 10_000,
            replicas_max: 2,
            tasks_per_s_max: 10,
        }
    }
}

/// What is done about objects that are read very often.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReplicationMode {
    /// Nothing. A get has no extra cost.
    #[default]
    Off,
    /// Their gets are counted: see
    /// [`TaskReport::hot_gets_total`](crate::message::TaskReport::hot_gets_total).
    Observe,
    /// They get further replicas, which are dropped first when space is needed.
    Enforce,
}

/// The estimator of read rates.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ReadRates {
    cells: Box<[Cell]>,
    window_ns: u64,
    /// Reads per window that make an object hot.
    reads_min: f64,
}

impl ReadRates {
    pub(crate) fn new(window_ms: u32, reads_per_s_min: f64) -> Self {
        Self {
            cells: vec![Cell::default(); ROWS << ROW_BITS].into(),
            window_ns: u64::from(window_ms) * 1_000_000,
            reads_min: (reads_per_s_min * f64::from(window_ms) / 1e3).max(1.0),
        }
    }

    /// Counts a read of an object; returns whether the object is hot.
    pub(crate) fn read(&mut self, now: Instant, generation: u64) -> bool {
        let (window, part) = (now.as_nanos() / self.window_ns, now.as_nanos() % self.window_ns);
        let left = 1.0 - part as f64 / self.window_ns as f64;
        let hash = generation.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut reads = f64::INFINITY;
        for row in 0..ROWS {
            let bits = (hash >> (64 - ROW_BITS * (row as u32 + 1))) as usize & ((1 << ROW_BITS) - 1);
            let cell = &mut self.cells[row << ROW_BITS | bits];
            match (window as u32).wrapping_sub(cell.window) {
                0 => {}
                1 => *cell = Cell { window: window as u32, now: 0, before: cell.now },
                _ => *cell = Cell { window: window as u32, now: 0, before: 0 },
            }
            cell.now = cell.now.saturating_add(1);
            reads = reads.min(f64::from(cell.now) + left * f64::from(cell.before));
        }
        reads >= self.reads_min
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        size_of_val(&*self.cells)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Instant {
        Instant::from_millis(ms)
    }

    #[test]
    fn an_object_is_hot_when_it_is_read_often_enough_and_no_more_when_it_is_not() {
        let mut rates = ReadRates::new(1_000, 10.0);
        for ms in 0..9 {
            assert!(!rates.read(at(ms * 100), 5));
        }
        assert!(rates.read(at(900), 5));
        // Nine tenths of the previous window still count.
        assert!(rates.read(at(1_100), 5));
        assert!(!rates.read(at(1_900), 5));
        assert!(!rates.read(at(9_000), 5));
    }

    #[test]
    fn one_that_is_read_seldom_stays_cold_among_a_thousand_others() {
        let mut rates = ReadRates::new(1_000, 10.0);
        let hot = (0..4)
            .flat_map(|turn| (0..1_000).map(move |generation| (turn, generation)))
            .filter(|(turn, generation)| rates.read(at(turn * 200), *generation))
            .count();
        assert_eq!(hot, 0);
    }
}
