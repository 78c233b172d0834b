//! Which parts of a pool the hardware has reported as damaged.

use std::sync::atomic::{AtomicU64, Ordering};

/// The bytes that one report concerns: the page that the kernel takes away.
const GRANULE: u64 = 2 << 20;

/// A bit per granule.
#[derive(Debug)]
pub(crate) struct BadGranules {
    words: Box<[AtomicU64]>,
    /// Whether any bit is set.
    any: AtomicU64,
}

impl BadGranules {
    pub(crate) fn new(bytes: u64) -> Self {
        let words = bytes.div_ceil(GRANULE).div_ceil(64);
        Self { words: (0..words).map(|_| AtomicU64::new(0)).collect(), any: AtomicU64::new(0) }
    }

    pub(crate) fn mark(&self, at: u64) {
        let granule = at / GRANULE;
        if let Some(word) = self.words.get((granule / 64) as usize) {
            word.fetch_or(1 << (granule % 64), Ordering::Relaxed);
            self.any.store(1, Ordering::Relaxed);
        }
    }

    fn is_bad(&self, granule: u64) -> bool {
        let word = self.words.get((granule / 64) as usize);
        word.is_some_and(|word| word.load(Ordering::Relaxed) & 1 << (granule % 64) != 0)
    }

    /// Whether a range touches a granule that was reported.
    pub(crate) fn any(&self, at: u64, len: u64) -> bool {
        if self.any.load(Ordering::Relaxed) == 0 || len == 0 {
            return false;
        }
        (at / GRANULE..=(at + len - 1) / GRANULE).any(|granule| self.is_bad(granule))
    }

    pub(crate) fn all(&self) -> Vec<u64> {
        let granules = 0..self.words.len() as u64 * 64;
        granules.filter(|granule| self.is_bad(*granule)).map(|granule| granule * GRANULE).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_concerns_its_granule_and_no_other() {
        let bad = BadGranules::new(300 * GRANULE + 1);
        assert!(!bad.any(0, 300 * GRANULE) && bad.all().is_empty());
        bad.mark(70 * GRANULE + 5);
        assert_eq!(bad.all(), [70 * GRANULE]);
        assert!(bad.any(70 * GRANULE, 1) && bad.any(0, u64::MAX >> 8) && bad.any(71 * GRANULE - 1, 64));
        assert!(!bad.any(71 * GRANULE, 64) && !bad.any(70 * GRANULE - 64, 64) && !bad.any(70 * GRANULE, 0));
        bad.mark(u64::MAX);
        assert_eq!(bad.all().len(), 1, "outside of the pool");
    }
}
