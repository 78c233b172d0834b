//! A set of blocks per owner, and a scenario that drives it and an index.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use te_core::Instant;

use super::super::*;

/// A tree of chains: block `n` follows `parents[n]`.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    pub(super) parents: Vec<Option<usize>>,
}

impl Tree {
    /// A forest of `blocks` blocks: mostly chains, with forks and a few roots.
    pub(super) fn new(blocks: usize, mut random: impl FnMut(usize) -> usize) -> Self {
        let parents = (0..blocks).map(|block| match random(16) {
            _ if block == 0 => None,
            0 => None,
            1..4 => Some(random(block)),
            _ => Some(block - 1),
        });
        Self { parents: parents.collect() }
    }

    pub(super) fn key(&self, block: usize) -> BlockKey {
        BlockKey((block as u64 + 1).wrapping_mul(0xd6e8_feb8_6659_fd93))
    }

    /// The blocks from the root to this one.
    pub(super) fn path(&self, block: usize) -> Vec<usize> {
        let mut path: Vec<_> = core::iter::successors(Some(block), |block| self.parents[*block]).collect();
        path.reverse();
        path
    }

    pub(super) fn keys(&self, blocks: &[usize]) -> Vec<BlockKey> {
        blocks.iter().map(|block| self.key(*block)).collect()
    }
}

#[derive(Clone, Debug)]
pub(super) enum Op {
    /// The last `blocks` blocks of the path to `end` are stored.
    Stored {
        owner: u32,
        end: usize,
        blocks: usize,
    },
    /// Blocks on the path to `end` are removed: from the leaf, or from the root.
    Removed {
        owner: u32,
        end: usize,
        blocks: usize,
        from_leaf: bool,
    },
    Cleared {
        owner: u32,
    },
    Assumed {
        owner: u32,
        end: usize,
        until: u64,
    },
    Expired {
        now: u64,
    },
    Swept {
        budget: usize,
    },
    Restored,
    Queried {
        end: usize,
        beyond: bool,
    },
}

#[derive(Debug, Default)]
pub(super) struct Model {
    pub(super) held: BTreeMap<u32, BTreeSet<usize>>,
    assumed: BTreeMap<(u32, usize), u64>,
}

impl Model {
    fn holds(&self, owner: u32, block: usize) -> bool {
        self.held.get(&owner).is_some_and(|held| held.contains(&block))
    }

    fn prefix(&self, owner: u32, path: &[usize], with_assumed: bool) -> u32 {
        let has = |block: &&usize| {
            self.holds(owner, **block) || (with_assumed && self.assumed.contains_key(&(owner, **block)))
        };
        path.iter().take_while(has).count() as u32
    }

    pub(super) fn matches(&self, owners: u32, path: &[usize], with_assumed: bool) -> Vec<(u32, u32)> {
        (0..owners)
            .map(|owner| (owner, self.prefix(owner, path, with_assumed)))
            .filter(|(_, n)| *n > 0)
            .collect()
    }

    fn is_holey(&self, owner: u32, tree: &Tree) -> bool {
        let held = self.held.get(&owner);
        held.into_iter()
            .flatten()
            .any(|block| tree.parents[*block].is_some_and(|parent| !self.holds(owner, parent)))
    }
}

/// An index and the model that it must equal.
pub(super) struct Pair<'a> {
    pub(super) tree: &'a Tree,
    pub(super) owners: u32,
    pub(super) index: Index,
    pub(super) model: Model,
}

impl<'a> Pair<'a> {
    pub(super) fn new(tree: &'a Tree, owners: u32) -> Self {
        Self { tree, owners, index: Index::new(IndexLimits::default()), model: Model::default() }
    }

    pub(super) fn apply(&mut self, op: &Op) {
        match *op {
            Op::Stored { owner, end, blocks } => self.stored(owner, end, blocks),
            Op::Removed { owner, end, blocks, from_leaf } => self.removed(owner, end, blocks, from_leaf),
            Op::Cleared { owner } => {
                self.index.cleared(OwnerId(owner));
                self.model.held.remove(&owner);
                self.model.assumed.retain(|(of, _), _| *of != owner);
            }
            Op::Assumed { owner, end, until } => {
                let path = self.tree.path(end);
                self.index.assumed(OwnerId(owner), &self.tree.keys(&path), Instant::from_nanos(until));
                for block in path {
                    if !self.model.holds(owner, block) {
                        let deadline = self.model.assumed.entry((owner, block)).or_default();
                        *deadline = until.max(*deadline);
                    }
                }
            }
            Op::Expired { now } => {
                self.index.expire(Instant::from_nanos(now));
                self.model.assumed.retain(|_, until| *until > now);
            }
            Op::Swept { budget } => {
                self.index.sweep(budget);
            }
            Op::Restored => {
                let mut bytes = Vec::new();
                self.index.snapshot(&mut bytes);
                self.index = Index::restore(&bytes, IndexLimits::default()).expect("its own snapshot");
                self.model.assumed.clear();
            }
            Op::Queried { end, beyond } => self.check(end, beyond),
        }
    }

    fn stored(&mut self, owner: u32, end: usize, blocks: usize) {
        let path = self.tree.path(end);
        let piece = &path[path.len() - blocks.clamp(1, path.len())..];
        let parent = self.tree.parents[piece[0]];
        let stored = self.index.stored(
            OwnerId(owner),
            parent.map(|block| self.tree.key(block)),
            &self.tree.keys(piece),
        );
        if parent.is_some_and(|parent| !self.model.held.values().any(|held| held.contains(&parent))) {
            assert_eq!(stored.refused, piece.len(), "the parent is known to no owner");
            return;
        }
        assert_eq!(stored.refused, 0);
        let held = self.model.held.entry(owner).or_default();
        let added = piece.iter().filter(|block| held.insert(**block)).count();
        assert_eq!(stored.added, added);
        for block in piece {
            self.model.assumed.remove(&(owner, *block));
        }
    }

    fn removed(&mut self, owner: u32, end: usize, blocks: usize, from_leaf: bool) {
        let mut path = self.tree.path(end);
        if from_leaf {
            path.reverse();
        }
        path.truncate(blocks.max(1));
        let removed = self.index.removed(OwnerId(owner), &self.tree.keys(&path));
        let held = self.model.held.entry(owner).or_default();
        assert_eq!(removed, path.iter().filter(|block| held.remove(block)).count());
    }

    /// Every owner's match on the path to `end`, with `beyond` further keys that no owner has.
    pub(super) fn check(&self, end: usize, beyond: bool) {
        let path = self.tree.path(end);
        let mut keys = self.tree.keys(&path);
        if beyond {
            keys.extend((1..20).map(|far| BlockKey(far << 40)));
        }
        let mut out = Vec::new();
        for with_assumed in [false, true] {
            if with_assumed {
                self.index.query_with_assumed(&keys, &mut out);
            } else {
                self.index.query(&keys, &mut out);
            }
            let mut found: Vec<_> = out.iter().map(|found| (found.owner.0, found.blocks)).collect();
            found.sort_unstable();
            assert_eq!(found, self.model.matches(self.owners, &path, with_assumed), "at block {end}");
        }
        for owner in 0..self.owners {
            assert_eq!(self.index.matched(OwnerId(owner), &keys), self.model.prefix(owner, &path, false));
        }
    }

    /// Everything at once.
    pub(super) fn check_all(&mut self) {
        for block in 0..self.tree.parents.len() {
            self.check(block, false);
            let key = self.tree.key(block);
            assert_eq!(self.index.contains(key), self.model.held.values().any(|held| held.contains(&block)));
        }
        for owner in 0..self.owners {
            let held = self.model.held.get(&owner).map_or(0, BTreeSet::len);
            let mut fresh = Index::new(IndexLimits::default());
            for block in self.model.held.get(&owner).into_iter().flatten() {
                fresh.stored(OwnerId(9), None, &[self.tree.key(*block)]);
            }
            assert_eq!(self.index.digest(OwnerId(owner)), fresh.digest(OwnerId(9)));
            assert_eq!(self.index.digest(OwnerId(owner)).blocks, held as u64);
            if self.model.is_holey(owner, self.tree) {
                assert!(self.index.is_holey(OwnerId(owner)), "owner {owner} has a hole that was not noticed");
            }
        }
        self.index.validate();
    }
}

impl Index {
    /// What must be true between calls.
    pub(super) fn validate(&self) {
        let mut refs = BTreeMap::new();
        let mut ghosts = 0;
        for segment in 0..BUCKETS {
            let mut last = None;
            for entry in self.table.segment(segment) {
                assert!(last < Some(entry.hash), "hashes ascend");
                last = Some(entry.hash);
                assert!(self.table.find(entry.hash).is_some(), "what is there is found");
                *refs.entry(entry.set).or_insert(0u32) += 1;
                ghosts += usize::from(entry.set == EMPTY);
            }
        }
        assert_eq!(ghosts, self.ghosts);
        refs.remove(&EMPTY);
        assert_eq!(refs.len(), self.holders.len(), "a set that no block has is forgotten");
        refs.iter().for_each(|(set, count)| assert_eq!(self.holders.refs(*set), *count));
    }
}
