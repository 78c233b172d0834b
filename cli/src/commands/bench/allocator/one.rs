//! One allocator alone: filled until it refuses an allocation, then kept full by freeing random objects at
//! each refusal.

use std::hint::black_box;

use store_core::AllocatorKind;
use store_core::allocator::{Allocator, AnyAllocator, Block};

use super::published::{INDEX_BYTES, KV_BYTES};
use super::{Measured, Random};
use crate::sys;

const GIB: u64 = 1 << 30;
const PAIRS_PER_ROUND_MAX: u64 = 128;

/// Objects of one length.
pub(super) fn uniform(kind: AllocatorKind, len: u64, allocations: u64) -> Measured {
    let pool = if len < 1024 { 2 * GIB / 16 } else { 2 * GIB };
    let mut churn = Churn::new(kind, pool, None);
    (0..pool / len).for_each(|_| churn.allocate(len));
    churn.measure(allocations, |_, _| len)
}

/// Random lengths from 1 KiB to 64 MiB.
pub(super) fn random(kind: AllocatorKind, allocations: u64) -> Measured {
    let pool = 2 * GIB;
    let len = |random: &mut Random| 1024 + random.below((64 << 20) - 1024 + 1);
    let mut churn = Churn::new(kind, pool, None);
    let mut offered = 0;
    while offered < pool {
        let len = len(&mut churn.random);
        churn.allocate(len);
        offered += len;
    }
    churn.measure(allocations, |random, _| len(random))
}

/// Rounds of 1 to 128 KV-cache blocks, followed by as many index blocks if `paired`. At a refusal, 5 % of all
/// objects are freed.
pub(super) fn rounds(kind: AllocatorKind, paired: bool, allocations: u64) -> Measured {
    let mut churn = Churn::new(kind, 1024 * GIB, Some(0.05));
    let mut lens = Rounds::new(paired);
    while churn.refusals == 0 {
        let len = lens.next(&mut churn.random);
        churn.allocate(len);
    }
    churn.measure(allocations, |random, _| lens.next(random))
}

/// The lengths in those rounds.
#[derive(Clone, Debug)]
pub(super) struct Rounds {
    paired: bool,
    size: u64,
    at: u64,
}

impl Rounds {
    pub(super) fn new(paired: bool) -> Self {
        Self { paired, size: 0, at: 0 }
    }

    pub(super) fn next(&mut self, random: &mut Random) -> u64 {
        let of_round = if self.paired { 2 * self.size } else { self.size };
        if self.at == of_round {
            (self.size, self.at) = (1 + random.below(PAIRS_PER_ROUND_MAX), 0);
        }
        self.at += 1;
        if self.at <= self.size { KV_BYTES } else { INDEX_BYTES }
    }
}

struct Churn {
    allocator: AnyAllocator,
    pool: u64,
    live: Vec<(Block, u64)>,
    live_bytes: u64,
    /// Share of all objects that are freed at a refusal; `None`: one object.
    share: Option<f64>,
    random: Random,
    refusals: u64,
    /// Lowest utilisation at a refusal.
    refused_min: f64,
    refused_sum: f64,
}

impl Churn {
    fn new(kind: AllocatorKind, pool: u64, share: Option<f64>) -> Self {
        Self {
            allocator: kind.build(pool),
            pool,
            live: Vec::new(),
            live_bytes: 0,
            share,
            random: Random::new(1),
            refusals: 0,
            refused_min: 1.0,
            refused_sum: 0.0,
        }
    }

    fn allocate(&mut self, len: u64) {
        loop {
            if let Some((block, offset)) = self.allocator.allocate(len, 0) {
                black_box(offset);
                self.live.push((block, len));
                self.live_bytes += len;
                return;
            }
            if self.live.is_empty() {
                return;
            }
            self.refused();
        }
    }

    fn refused(&mut self) {
        let now = self.live_bytes as f64 / self.pool as f64;
        self.refusals += 1;
        self.refused_min = self.refused_min.min(now);
        self.refused_sum += now;
        let count = self.share.map_or(1, |share| ((self.live.len() as f64 * share) as usize).max(1));
        for _ in 0..count {
            let chosen = self.random.below(self.live.len() as u64) as usize;
            let (block, len) = self.live.swap_remove(chosen);
            self.allocator.free(block);
            self.live_bytes -= len;
        }
    }

    /// With a share, utilisation is sampled at each refusal; otherwise after every allocation.
    fn measure(mut self, allocations: u64, mut len: impl FnMut(&mut Random, u64) -> u64) -> Measured {
        (self.refusals, self.refused_min, self.refused_sum) = (0, 1.0, 0.0);
        let (mut least, mut sum) = (u64::MAX, 0u128);
        let started = sys::own_cpu();
        for turn in 0..allocations {
            let len = len(&mut self.random, turn);
            self.allocate(len);
            least = least.min(self.live_bytes);
            sum += u128::from(self.live_bytes);
        }
        let elapsed = sys::own_cpu() - started;
        let pool = self.pool as f64;
        let (min, avg) = match self.share {
            Some(_) if self.refusals > 0 => (self.refused_min, self.refused_sum / self.refusals as f64),
            _ => (least as f64 / pool, sum as f64 / allocations as f64 / pool),
        };
        Measured::new(min, avg, elapsed, allocations)
    }
}
