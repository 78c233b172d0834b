//! Copies by the C library's memcpy, for comparison with transfers.

use std::time::{Duration, Instant};

use super::memory::Place;
use super::transfer::Worker;

/// Batches without an engine.
pub(super) struct Copies {
    from: Vec<u8>,
    to: Vec<u8>,
    block: usize,
    batch: usize,
}

impl Copies {
    /// Batches of `batch` blocks, for which both buffers have `places`.
    pub(super) fn new(places: u64, block: u64, batch: u32) -> anyhow::Result<Self> {
        let bytes = usize::try_from(places * block)?;
        let block = usize::try_from(block)?;
        Ok(Self { from: vec![1; bytes], to: vec![2; bytes], block, batch: batch as usize })
    }
}

impl Worker for Copies {
    fn target(&self) -> Place {
        Place::HOST
    }

    fn batch(&mut self) -> anyhow::Result<Duration> {
        let started = Instant::now();
        let pairs = self.to.chunks_exact_mut(self.block).zip(self.from.chunks_exact(self.block));
        let places = pairs.len();
        let mut left = self.batch;
        for (to, from) in pairs {
            to.copy_from_slice(from);
            left -= 1;
        }
        // With fewer places than blocks, places are used again.
        while left > 0 {
            let at = left % places * self.block;
            self.to[at..at + self.block].copy_from_slice(&self.from[at..at + self.block]);
            left -= 1;
        }
        std::hint::black_box(&mut self.to);
        Ok(started.elapsed())
    }
}
