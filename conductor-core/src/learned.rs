//! What was learnt from events: which block an engine's hash stands for.
//!
//! ```text
//!   stored:  hashes [e0, e1], tokens ──▶ own chain [k0, k1] ──▶ learn(e0, k0), learn(e1, k1) ──▶ index
//!   removed: hashes [e1] ──▶ get(e1) = k1 ──▶ index
//!   sweep:   k1 is in use no more ──▶ e1 is forgotten
//! ```
//!
//! Engines compute hashes in ways that change from release to release, with seeds that they do not publish,
//! so they are never computed here. An entry takes 16 bytes, at a load between 67 and 84 %.

use alloc::vec::Vec;

use crate::index::{BUCKETS, Slot, TOUCHED, Table, segment_of, spread, unspread};
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
    /// A limit was reached and the pair is not kept. The block must not be recorded in the index either: a
    /// later event that removes it could not be understood.
    Full,
}

/// Counts since the map was made, in pairs.
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

/// Blocks that one hash may stand for.
const BLOCKS_PER_HASH_MAX: usize = 8;

#[derive(Clone, Copy, Debug)]
struct Pair {
    /// The spread hash of the engine.
    hash: u64,
    key: BlockKey,
}

impl Slot for Pair {
    const VACANT: Self = Self { hash: u64::MAX, key: BlockKey(u64::MAX) };

    fn hash(&self) -> u64 {
        self.hash
    }

    fn vacant(&self) -> bool {
        self.hash == u64::MAX && self.key.0 == u64::MAX
    }
}

/// The blocks that the hashes of engines stand for, in one context.
#[derive(Debug)]
pub struct Learned {
    pairs: Table<Pair>,
    pairs_max: usize,
    /// Where the sweep goes on.
    cursor: u64,
    counters: LearnedCounters,
}

impl Learned {
    /// A map of up to `pairs_max` pairs.
    #[must_use]
    pub fn new(pairs_max: usize) -> Self {
        Self { pairs: Table::new(), pairs_max, cursor: 0, counters: LearnedCounters::default() }
    }

    /// A map of these pairs, in the order of [`Learned::pairs`]; none when they are not in that order, or are
    /// not what a map may hold.
    pub(crate) fn of(pairs: impl Iterator<Item = (EngineHash, BlockKey)>, pairs_max: usize) -> Option<Self> {
        let mut this = Self::new(pairs_max);
        let mut pairs = pairs.map(|(hash, key)| Pair { hash: spread(hash.0), key }).peekable();
        let mut of_segment: Vec<Pair> = Vec::new();
        for segment in 0..BUCKETS {
            of_segment.clear();
            while let Some(pair) = pairs.next_if(|pair| segment_of(pair.hash) == segment) {
                let same = of_segment.iter().rev().take_while(|known| known.hash == pair.hash);
                let others = same.clone().count();
                if others >= BLOCKS_PER_HASH_MAX || same.into_iter().any(|known| known.key == pair.key) {
                    return None;
                }
                of_segment.push(pair);
            }
            if !this.pairs.fill(segment, &of_segment) {
                return None;
            }
        }
        (pairs.next().is_none() && this.len() <= pairs_max).then_some(this)
    }

    /// An event said that `hash` is the block `key`.
    pub fn learn(&mut self, hash: EngineHash, key: BlockKey) -> Learnt {
        let pair = Pair { hash: spread(hash.0), key };
        let mut others = 0;
        for known in self.get(hash) {
            if known == key {
                return Learnt::Known;
            }
            others += 1;
        }
        let full = self.pairs.len() >= self.pairs_max || others >= BLOCKS_PER_HASH_MAX || pair.vacant();
        if full || self.pairs.insert(pair).is_none() {
            self.counters.refused += 1;
            return Learnt::Full;
        }
        self.counters.learnt += 1;
        if others > 0 {
            self.counters.collisions += 1;
            return Learnt::Collision;
        }
        Learnt::New
    }

    /// Lets the processor fetch where up to [`TOUCHED`] hashes are, which are about to be looked up.
    #[inline]
    pub(crate) fn touch(&self, hashes: &[EngineHash]) {
        let mut spread_hashes = [0; TOUCHED];
        let count = hashes.len().min(TOUCHED);
        spread_hashes.iter_mut().zip(hashes).for_each(|(spread_hash, hash)| *spread_hash = spread(hash.0));
        self.pairs.touch(&spread_hashes[..count]);
    }

    /// The blocks that `hash` may stand for: one, but for collisions, of which the caller takes the one that
    /// the engine has.
    #[inline]
    pub fn get(&self, hash: EngineHash) -> impl Iterator<Item = BlockKey> + '_ {
        let hash = spread(hash.0);
        let mut next = self.pairs.find(hash);
        core::iter::from_fn(move || {
            let at = next?;
            let pair = self.pairs.get(at);
            next = self.pairs.next_in_cluster(at);
            (pair.hash == hash).then_some(pair.key)
        })
    }

    /// Visits up to `budget` pairs, goes on where the last call ended, and drops those whose block is in use
    /// no more, which `used` says. Returns how many were dropped. Call it with blocks that the index has
    /// ([`Index::contains`](crate::index::Index::contains)), and not between learning a pair and recording
    /// its block.
    pub fn sweep(&mut self, budget: usize, mut used: impl FnMut(BlockKey) -> bool) -> usize {
        let mut dropped = 0;
        for _ in 0..budget.min(self.pairs.len()) {
            let Some(at) = self.pairs.at_or_after(self.cursor) else {
                self.cursor = 0;
                continue;
            };
            let hash = self.pairs.get(at).hash;
            let mut unused = [BlockKey::default(); BLOCKS_PER_HASH_MAX];
            let mut count = 0;
            for key in
                self.get(EngineHash(unspread(hash))).filter(|key| !used(*key)).take(BLOCKS_PER_HASH_MAX)
            {
                unused[count] = key;
                count += 1;
            }
            unused[..count].iter().for_each(|key| self.forget(hash, *key));
            dropped += count;
            self.cursor = hash.wrapping_add(1);
        }
        self.counters.swept += dropped as u64;
        dropped
    }

    fn forget(&mut self, hash: u64, key: BlockKey) {
        let mut next = self.pairs.find(hash);
        while let Some(at) = next {
            let pair = self.pairs.get(at);
            if pair.hash == hash && pair.key == key {
                self.pairs.remove(at);
                return;
            }
            next = self.pairs.next_in_cluster(at).filter(|_| pair.hash == hash);
        }
    }

    /// Every pair, in an order that depends on the pairs only.
    pub fn pairs(&self) -> impl Iterator<Item = (EngineHash, BlockKey)> + '_ {
        (0..BUCKETS).flat_map(|part| self.part(part))
    }

    /// The pairs of one of [`BUCKETS`] parts, of about equal size.
    pub(crate) fn part(&self, part: usize) -> impl Iterator<Item = (EngineHash, BlockKey)> + '_ {
        self.pairs.segment(part).map(|pair| (EngineHash(unspread(pair.hash)), pair.key))
    }

    /// Pairs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pairs.len()
    }

    /// Whether nothing was learnt.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pairs.len() == 0
    }

    /// Bytes of memory that the map has allocated.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.pairs.bytes()
    }

    /// The counts.
    #[must_use]
    pub fn counters(&self) -> &LearnedCounters {
        &self.counters
    }
}

#[cfg(test)]
mod tests {
    use alloc::collections::{BTreeMap, BTreeSet};
    use alloc::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    fn of(learned: &Learned, hash: u64) -> Vec<u64> {
        let mut keys: Vec<_> = learned.get(EngineHash(hash)).map(|key| key.0).collect();
        keys.sort_unstable();
        keys
    }

    #[test]
    fn a_hash_that_means_two_blocks_keeps_both() {
        let mut learned = Learned::new(100);
        assert_eq!(learned.learn(EngineHash(5), BlockKey(50)), Learnt::New);
        assert_eq!(learned.learn(EngineHash(5), BlockKey(50)), Learnt::Known);
        assert_eq!(learned.learn(EngineHash(5), BlockKey(60)), Learnt::Collision);
        assert_eq!(learned.learn(EngineHash(6), BlockKey(60)), Learnt::New);
        assert_eq!((of(&learned, 5), of(&learned, 7)), (alloc::vec![50, 60], alloc::vec![]));
        assert_eq!(learned.sweep(100, |key| key != BlockKey(50)), 1);
        assert_eq!(of(&learned, 5), [60]);
        let counters = LearnedCounters { learnt: 3, collisions: 1, refused: 0, swept: 1 };
        assert_eq!((*learned.counters(), learned.len()), (counters, 2));
    }

    #[test]
    fn what_does_not_fit_is_refused_and_counted() {
        let mut learned = Learned::new(20);
        for hash in 0..30 {
            let expected = if hash < 20 { Learnt::New } else { Learnt::Full };
            assert_eq!(learned.learn(EngineHash(hash), BlockKey(hash)), expected);
        }
        assert_eq!(learned.counters().refused, 10);
        let mut learned = Learned::new(1000);
        let full = (0..30).filter(|key| learned.learn(EngineHash(1), BlockKey(*key)) == Learnt::Full).count();
        assert_eq!((full, of(&learned, 1).len()), (30 - BLOCKS_PER_HASH_MAX, BLOCKS_PER_HASH_MAX));
    }

    #[test]
    fn hashes_made_to_collide_take_little_memory() {
        let mut learned = Learned::new(1 << 20);
        let hash = |i: u64| EngineHash(unspread(u64::MAX - 1 - i));
        (0..4000).for_each(|i| assert_eq!(learned.learn(hash(i), BlockKey(i)), Learnt::New));
        assert!((0..4000).all(|i| learned.get(hash(i)).eq([BlockKey(i)])));
        assert!(learned.bytes() < 1 << 20, "{} bytes", learned.bytes());
        let full = (4000..10_000).filter(|i| learned.learn(hash(*i), BlockKey(*i)) == Learnt::Full).count();
        assert!(full > 5000, "{full} were refused");
    }

    #[test]
    fn pairs_that_no_map_has_are_refused() {
        let pairs = |pairs: &[(u64, u64)]| {
            let mut pairs: Vec<_> =
                pairs.iter().map(|(hash, key)| (EngineHash(*hash), BlockKey(*key))).collect();
            pairs.sort_by_key(|(hash, _)| spread(hash.0));
            pairs
        };
        let of = |pairs: Vec<_>| Learned::of(pairs.into_iter(), 20).map(|map| map.len());
        let whole: Vec<_> = (0..20).map(|i| (i, i)).collect();
        assert_eq!(of(pairs(&whole)), Some(20));
        assert_eq!(of(pairs(&[(1, 2), (1, 3)])), Some(2));
        assert_eq!(of(pairs(&[(1, 2), (1, 3), (1, 2)])), None, "a pair twice");
        assert_eq!(of(pairs(&whole).into_iter().rev().collect()), None, "another order");
        assert_eq!(of(pairs(&(0..21).map(|i| (i, i)).collect::<Vec<_>>())), None, "too many");
        assert_eq!(of(pairs(&(0..9).map(|i| (7, i)).collect::<Vec<_>>())), None, "a hash with nine blocks");
        let vacant = (EngineHash(unspread(u64::MAX)), BlockKey(u64::MAX));
        assert_eq!(of(Vec::from([vacant])), None, "what marks a free place");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn it_equals_a_map_of_sets(steps in prop::collection::vec((0..60u64, 0..90u64, 0..8u8), 1..400)) {
            let mut learned = Learned::new(10_000);
            let mut model: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
            for (hash, key, what) in steps {
                if what == 0 {
                    while learned.sweep(17, |of| of.0 % 5 != key % 5) > 0 {}
                    learned.sweep(1000, |of| of.0 % 5 != key % 5);
                    model.values_mut().for_each(|keys| keys.retain(|of| of % 5 != key % 5));
                } else if model.get(&hash).is_none_or(|keys| keys.len() < BLOCKS_PER_HASH_MAX) {
                    let known = !model.entry(hash).or_default().insert(key);
                    prop_assert_eq!(learned.learn(EngineHash(hash), BlockKey(key)) == Learnt::Known, known);
                }
            }
            let again = Learned::of(learned.pairs(), 10_000).expect("its own pairs");
            prop_assert_eq!(again.len(), learned.len());
            for (hash, keys) in &model {
                prop_assert_eq!(&of(&learned, *hash), &keys.iter().copied().collect::<Vec<_>>());
                prop_assert_eq!(of(&again, *hash), of(&learned, *hash));
            }
            prop_assert_eq!(learned.len(), model.values().map(BTreeSet::len).sum::<usize>());
        }
    }
}
