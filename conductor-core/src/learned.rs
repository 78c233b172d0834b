//! What was learnt from events: which block an engine's hash stands for.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::{BlockKey, EngineHash};

/// What became of a pair that was learnt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Learnt {
    /// It was not known.
    New,
    /// It was known.
    Known,
    /// The hash stood for another block already, of an engine with another seed or another algorithm. Both
    /// pairs are kept.
    Collision,
    /// A limit was reached and the pair is not kept. The block must not be recorded in the index either: a later
    /// event that removes it could not be understood.
    Full,
}

/// Counts since the map was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LearnedCounters {
    /// Pairs that were learnt.
    pub learnt: u64,
    /// Pairs whose hash stood for another block already.
    pub collisions: u64,
    /// Pairs that were refused since a limit was reached.
    pub refused: u64,
    /// Pairs that were swept since their block left the index.
    pub swept: u64,
}

/// The blocks that the hashes of engines stand for, in one context.
#[derive(Debug)]
pub struct Learned {
    pairs_max: usize,
    pairs: BTreeMap<EngineHash, Vec<BlockKey>>,
    len: usize,
    counters: LearnedCounters,
}

impl Learned {
    /// A map of up to `pairs_max` pairs.
    #[must_use]
    pub fn new(pairs_max: usize) -> Self {
        Self { pairs_max, pairs: BTreeMap::new(), len: 0, counters: LearnedCounters::default() }
    }

    /// An event said that `hash` is the block `key`.
    pub fn learn(&mut self, hash: EngineHash, key: BlockKey) -> Learnt {
        let full = self.len >= self.pairs_max;
        let keys = self.pairs.entry(hash).or_default();
        if keys.contains(&key) {
            return Learnt::Known;
        }
        if full {
            self.counters.refused += 1;
            return Learnt::Full;
        }
        keys.push(key);
        self.len += 1;
        self.counters.learnt += 1;
        if keys.len() > 1 {
            self.counters.collisions += 1;
            return Learnt::Collision;
        }
        Learnt::New
    }

    /// The blocks that `hash` may stand for: one, but for collisions, of which the caller takes the one that
    /// the engine has.
    pub fn get(&self, hash: EngineHash) -> impl Iterator<Item = BlockKey> + '_ {
        self.pairs.get(&hash).into_iter().flatten().copied()
    }

    /// Visits up to `budget` pairs and drops those whose block is not in use any more, which `used` says. Returns
    /// how many were dropped. Call it after the index was swept.
    pub fn sweep(&mut self, budget: usize, mut used: impl FnMut(BlockKey) -> bool) -> usize {
        let _ = budget;
        let before = self.len;
        for keys in self.pairs.values_mut() {
            keys.retain(|key| used(*key));
        }
        self.pairs.retain(|_, keys| !keys.is_empty());
        self.len = self.pairs.values().map(Vec::len).sum();
        self.counters.swept += (before - self.len) as u64;
        before - self.len
    }

    /// Pairs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing was learnt.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The counts.
    #[must_use]
    pub fn counters(&self) -> &LearnedCounters {
        &self.counters
    }
}
