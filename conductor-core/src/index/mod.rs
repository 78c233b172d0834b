//! Which owner has which blocks: the prefix index of one context.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use te_core::Instant;

use crate::{BlockKey, OwnerId, OwnerMatch};

mod types;

pub use types::{BUCKETS, BucketEntry, Counters, Digest, IndexLimits, OwnerState, SnapshotError, Stored};

#[derive(Debug, Default)]
struct Entry {
    depth: u32,
    holders: BTreeSet<OwnerId>,
}

/// The blocks of one context and their owners.
///
/// A key stands for a block and everything before it, so that it has one parent and one depth. The index is plain
/// data: queries take `&self`, changes `&mut self`.
#[derive(Debug)]
pub struct Index {
    limits: IndexLimits,
    entries: BTreeMap<BlockKey, Entry>,
    assumed: BTreeMap<(OwnerId, BlockKey), Instant>,
    counters: Counters,
}

impl Index {
    /// An index without blocks.
    #[must_use]
    pub fn new(limits: IndexLimits) -> Self {
        Self { limits, entries: BTreeMap::new(), assumed: BTreeMap::new(), counters: Counters::default() }
    }

    /// `owner` has stored `keys`, a piece of a chain that follows `parent`, or begins a chain when there is
    /// none. A parent that no owner has makes all of them orphans: they are counted and not recorded, since
    /// no query could reach them.
    pub fn stored(&mut self, owner: OwnerId, parent: Option<BlockKey>, keys: &[BlockKey]) -> Stored {
        let mut stored = Stored::default();
        let base = match parent {
            None => 0,
            Some(parent) => match self.entries.get(&parent) {
                Some(entry) => entry.depth + 1,
                None => {
                    self.counters.orphans += keys.len() as u64;
                    return Stored { refused: keys.len(), ..stored };
                }
            },
        };
        for (key, depth) in keys.iter().zip(base..) {
            let rest = keys.len() - stored.added - stored.known;
            if depth >= self.limits.depth_max {
                stored.refused = rest;
                self.counters.too_deep += stored.refused as u64;
                break;
            }
            let entry = self.entries.entry(*key).or_insert(Entry { depth, holders: BTreeSet::new() });
            if entry.depth != depth {
                stored.refused = rest;
                self.counters.conflicts += stored.refused as u64;
                break;
            }
            if entry.holders.insert(owner) {
                stored.added += 1;
            } else {
                stored.known += 1;
            }
            if self.assumed.remove(&(owner, *key)).is_some() {
                self.counters.assumed_confirmed += 1;
            }
        }
        self.counters.added += stored.added as u64;
        stored
    }

    /// `owner` does not have `keys` any more, in whatever order. Returns how many of them it had.
    pub fn removed(&mut self, owner: OwnerId, keys: &[BlockKey]) -> usize {
        let mut removed = 0;
        for key in keys {
            if let Some(entry) = self.entries.get_mut(key) {
                removed += usize::from(entry.holders.remove(&owner));
                if entry.holders.is_empty() {
                    self.entries.remove(key);
                }
            }
        }
        self.counters.removed += removed as u64;
        self.counters.removed_unknown += (keys.len() - removed) as u64;
        removed
    }

    /// `owner` has nothing any more, and nothing is assumed of it. The time does not depend on how much it had: its
    /// entries are ignored from now on, and [`Index::sweep`] takes them out. The id may be used again at once.
    pub fn cleared(&mut self, owner: OwnerId) {
        self.entries.retain(|_, entry| {
            entry.holders.remove(&owner);
            !entry.holders.is_empty()
        });
        self.assumed.retain(|(of, _), _| *of != owner);
    }

    /// Takes up to `budget` steps of cleaning up after clears and removals, and returns how many it took: 0 when
    /// there is nothing to do. A step visits one entry.
    pub fn sweep(&mut self, budget: usize) -> usize {
        let _ = budget;
        0
    }

    /// A decision lets `owner` compute or fetch the blocks of a chain from its beginning, `keys`: those that it
    /// does not have are assumed until `until`. Returns how many were newly assumed.
    pub fn assumed(&mut self, owner: OwnerId, keys: &[BlockKey], until: Instant) -> usize {
        let before = self.assumed.len();
        for key in keys {
            if !self.holds(owner, *key) {
                let deadline = self.assumed.entry((owner, *key)).or_insert(until);
                *deadline = until.max(*deadline);
            }
        }
        self.assumed.len() - before
    }

    /// Drops what was assumed until `now` or earlier, and returns how many pairs.
    pub fn expire(&mut self, now: Instant) -> usize {
        let before = self.assumed.len();
        self.assumed.retain(|_, until| *until > now);
        before - self.assumed.len()
    }

    /// The earliest time at which [`Index::expire`] has something to do.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.assumed.values().min().copied()
    }

    /// For every owner that has the first block of the chain `keys`: how many blocks it has from the beginning
    /// without a gap. `out` is emptied first; its order is not specified.
    pub fn query(&self, keys: &[BlockKey], out: &mut Vec<OwnerMatch>) {
        self.matches(keys, out, false);
    }

    /// Like [`Index::query`], with assumed blocks as if they were there.
    pub fn query_with_assumed(&self, keys: &[BlockKey], out: &mut Vec<OwnerMatch>) {
        self.matches(keys, out, true);
    }

    fn matches(&self, keys: &[BlockKey], out: &mut Vec<OwnerMatch>, assumed: bool) {
        out.clear();
        let Some(first) = keys.first() else { return };
        let mut owners: BTreeSet<OwnerId> =
            self.entries.get(first).map(|entry| entry.holders.clone()).unwrap_or_default();
        if assumed {
            owners.extend(self.assumed.keys().filter(|(_, key)| key == first).map(|(owner, _)| *owner));
        }
        for owner in owners {
            let has = |key: &&BlockKey| {
                self.holds(owner, **key) || (assumed && self.assumed.contains_key(&(owner, **key)))
            };
            let blocks = keys.iter().take_while(has).count();
            out.push(OwnerMatch { owner, blocks: u32::try_from(blocks).unwrap_or(u32::MAX) });
        }
    }

    /// Whether `owner` has the block.
    #[must_use]
    pub fn holds(&self, owner: OwnerId, key: BlockKey) -> bool {
        self.entries.get(&key).is_some_and(|entry| entry.holders.contains(&owner))
    }

    /// Whether any owner has the block.
    #[must_use]
    pub fn contains(&self, key: BlockKey) -> bool {
        self.entries.contains_key(&key)
    }

    /// Unique blocks, with those that still have to be swept.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.entries.len()
    }

    /// Bytes that the index uses.
    #[must_use]
    pub fn bytes(&self) -> usize {
        0
    }

    /// The counts.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The limits that it was made with.
    #[must_use]
    pub fn limits(&self) -> &IndexLimits {
        &self.limits
    }

    /// Every owner that has blocks.
    pub fn owners(&self) -> impl Iterator<Item = OwnerState> + '_ {
        let owners: BTreeSet<OwnerId> =
            self.entries.values().flat_map(|entry| entry.holders.iter().copied()).collect();
        owners.into_iter().map(|owner| OwnerState { owner, digest: self.digest(owner), holey: true })
    }

    /// What `owner` has, as a number; the owner's assumed blocks are not part of it.
    #[must_use]
    pub fn digest(&self, owner: OwnerId) -> Digest {
        let mut digest = Digest::default();
        for key in self.entries.keys().filter(|key| self.holds(owner, **key)) {
            digest.blocks += 1;
            digest.sum = digest.sum.wrapping_add(key.0.wrapping_mul(key.0 | 1));
        }
        digest
    }
}
