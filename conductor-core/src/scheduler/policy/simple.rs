//! Policies that look at load alone, or at prefixes alone.

use super::super::view::{Placement, View};
use super::Policy;

/// Uniform numbers from a seed (SplitMix64).
#[derive(Clone, Copy, Debug)]
struct Draws(u64);

impl Draws {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        // The upper half of a product: uniform but for 2^-64 of `n`.
        ((u128::from(z ^ z >> 31) * n as u128) >> 64) as usize
    }
}

/// Drawn.
#[derive(Clone, Copy, Debug)]
pub struct Random(Draws);

impl Random {
    /// With this seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(Draws(seed))
    }
}

impl Policy for Random {
    fn place(&mut self, view: &View<'_>) -> Option<Placement> {
        Some(Placement { candidate: self.0.below(view.candidates().len()), fetch: None })
    }
}

/// The one with fewer requests of two drawn ones.
#[derive(Clone, Copy, Debug)]
pub struct PowerOfTwo(Draws);

impl PowerOfTwo {
    /// With this seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(Draws(seed))
    }
}

impl Policy for PowerOfTwo {
    fn place(&mut self, view: &View<'_>) -> Option<Placement> {
        let candidates = view.candidates();
        let first = self.0.below(candidates.len());
        // Another one, if there is one.
        let other = (first + 1 + self.0.below(candidates.len().saturating_sub(1).max(1))) % candidates.len();
        let less = candidates[other].requests < candidates[first].requests;
        Some(Placement { candidate: if less { other } else { first }, fetch: None })
    }
}

/// One after the other.
#[derive(Clone, Copy, Debug, Default)]
pub struct RoundRobin {
    next: usize,
}

impl Policy for RoundRobin {
    fn place(&mut self, view: &View<'_>) -> Option<Placement> {
        let candidate = self.next % view.candidates().len();
        self.next = candidate + 1;
        Some(Placement { candidate, fetch: None })
    }
}

/// The fewest requests.
#[derive(Clone, Copy, Debug)]
pub struct LeastRequests;

impl Policy for LeastRequests {
    fn place(&mut self, view: &View<'_>) -> Option<Placement> {
        view.least(|candidate| candidate.requests)
    }
}

/// The queue that drains first.
#[derive(Clone, Copy, Debug)]
pub struct LeastTime;

impl Policy for LeastTime {
    fn place(&mut self, view: &View<'_>) -> Option<Placement> {
        view.least(|candidate| candidate.wait)
    }
}

/// The longest prefix; among equals the first, whatever its load.
#[derive(Clone, Copy, Debug)]
pub struct MaxHit;

impl Policy for MaxHit {
    fn place(&mut self, view: &View<'_>) -> Option<Placement> {
        view.least(|candidate| u32::MAX - candidate.disk)
    }
}
