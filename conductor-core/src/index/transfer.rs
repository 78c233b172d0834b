//! Comparing two indexes of one context, and bringing one up to the other.
//!
//! Two Conductors that follow the same engines compare an owner's [`Digest`]. Where it differs they compare
//! the digests per bucket of keys, then exchange the entries of the buckets that differ: [`Index::adopt`]
//! records what is missing, [`Index::removed`] takes out what is too much.

use alloc::vec::Vec;

use super::seats::digest_of;
use super::table::segment_of;
use super::{
    BUCKETS, BucketEntry, Digest, EMPTY, Entry, FORK, Index, IndexLimits, PARENT, Refusal, Stored, link,
    spread,
};
use crate::{BlockKey, OwnerId};

impl Index {
    /// What `owner` has in each bucket of keys. The time is that of visiting every entry.
    pub fn bucket_digests(&self, owner: OwnerId, out: &mut [Digest; BUCKETS]) {
        *out = [Digest::default(); BUCKETS];
        let Some(seat) = self.seats.of(owner) else { return };
        for (bucket, digest) in out.iter_mut().enumerate() {
            for entry in self.table.segment(bucket) {
                if self.holders.contains(entry.set, seat) {
                    digest.blocks += 1;
                    digest.sum = digest.sum.wrapping_add(digest_of(entry.hash));
                }
            }
        }
    }

    /// The bucket that a block belongs to; less than [`BUCKETS`].
    #[must_use]
    pub fn bucket_of(key: BlockKey) -> usize {
        segment_of(spread(key.0))
    }

    /// The blocks that `owner` has in a bucket, with the blocks before them. `out` is emptied first. The time
    /// is that of visiting every entry.
    pub fn bucket(&self, owner: OwnerId, bucket: usize, out: &mut Vec<BucketEntry>) {
        out.clear();
        let Some(seat) = self.seats.of(owner).filter(|_| bucket < BUCKETS) else { return };
        let held = self.table.segment(bucket).filter(|entry| self.holders.contains(entry.set, seat));
        let children: Vec<Entry> = held.copied().collect();
        out.extend(children.iter().map(|entry| BucketEntry {
            depth: entry.depth(),
            key: entry.key(),
            parent: None,
        }));
        for of in 0..BUCKETS {
            for entry in self.table.segment(of).filter(|entry| entry.meta & PARENT != 0) {
                let more = if entry.meta & FORK != 0 { self.forks.get(&{ entry.hash }) } else { None };
                for child in core::iter::once(entry.child).chain(more.into_iter().flatten().copied()) {
                    if (child >> 24) as usize != bucket {
                        continue;
                    }
                    let first = children.partition_point(|entry| link(entry.hash) < child);
                    let same = children[first..].iter().take_while(|entry| link(entry.hash) == child);
                    for (at, of) in (first..).zip(same) {
                        if of.depth() == entry.depth() + 1 {
                            out[at].parent = Some(entry.key());
                        }
                    }
                }
            }
        }
        out.retain(|entry| entry.depth == 0 || entry.parent.is_some());
    }

    /// Records blocks of `owner` that another index gave, in whatever order. Until every block's parent is
    /// there the owner is holey; a later [`Index::sweep`] notices when it is not any more.
    pub fn adopt(&mut self, owner: OwnerId, entries: &[BucketEntry]) -> Stored {
        let mut stored = Stored::default();
        let Some(seat) = self.seats.of_or_new(owner) else {
            self.counters.refused_owners += entries.len() as u64;
            return Stored { refused: entries.len(), ..stored };
        };
        for entry in entries {
            match self.adopt_one(seat, entry) {
                Ok(added) => {
                    stored.added += usize::from(added);
                    stored.known += usize::from(!added);
                    if self.seats.get(seat).assumed > 0 {
                        self.confirm(seat, entry.key);
                    }
                }
                Err(refusal) => {
                    stored.refused += 1;
                    refusal.count(&mut self.counters, 1);
                }
            }
        }
        self.counters.added += stored.added as u64;
        self.advance_age(stored.added);
        self.sweep.examine_soon();
        stored
    }

    /// `owner` has a block, of which nothing is said but its key, and perhaps which block is before it.
    /// Returns whether it is recorded: it is if any owner has it already, since only then it is known what is
    /// before it. Unless that is `before` and the owner has it, the owner is holey until a later
    /// [`Index::sweep`] notices that it is not.
    pub fn joined(&mut self, owner: OwnerId, key: BlockKey, before: Option<BlockKey>) -> bool {
        let hash = spread(key.0);
        let Some(at) = self.table.find(hash).filter(|at| self.is_held(self.table.get(*at).set)) else {
            self.counters.orphans += 1;
            return false;
        };
        let depth = self.table.get(at).depth();
        let Some(seat) = self.seats.of_or_new(owner) else {
            self.counters.refused_owners += 1;
            return false;
        };
        let Ok((_, added)) = self.store(seat, None, hash, depth) else {
            self.counters.refused_holders += 1;
            return false;
        };
        self.counters.added += u64::from(added);
        if self.seats.get(seat).assumed > 0 {
            self.confirm(seat, key);
        }
        let continues = |before: BlockKey| self.holds(owner, before) && self.follows(Some(before), key);
        if added && depth > 0 && !before.is_some_and(continues) {
            self.puncture(seat);
            self.sweep.examine_soon();
        }
        true
    }

    fn adopt_one(&mut self, seat: u32, entry: &BucketEntry) -> Result<bool, Refusal> {
        if entry.depth >= self.limits.depth_max.min(IndexLimits::DEPTH_MAX) {
            return Err(Refusal::Deep);
        }
        let mut before = None;
        match entry.parent {
            None if entry.depth == 0 => {}
            Some(parent) if entry.depth > 0 && parent != entry.key => {
                let hash = spread(parent.0);
                let at = match self.table.find(hash) {
                    Some(at) => at,
                    None => self.insert_unheld(hash, entry.depth - 1)?,
                };
                if self.table.get(at).depth() != entry.depth - 1 {
                    return Err(Refusal::Conflict);
                }
                before = Some((hash, at));
            }
            _ => return Err(Refusal::Conflict),
        }
        let result = self.store(seat, before, spread(entry.key.0), entry.depth);
        if let (Some((hash, at)), Ok(_)) = (before, &result) {
            let parent_held = self
                .table
                .find_near(at, hash)
                .is_some_and(|at| self.holders.contains(self.table.get(at).set, seat));
            if !parent_held {
                self.puncture(seat);
            }
        }
        result.map(|(_, added)| added)
    }

    /// The parent of a block, which no owner has yet.
    fn insert_unheld(&mut self, hash: u64, depth: u32) -> Result<super::At, Refusal> {
        if self.table.len() >= self.limits.blocks_max && !self.make_room(hash, None) {
            return Err(Refusal::Full);
        }
        let entry = Entry::new(hash, EMPTY, depth, self.age);
        let at = self.table.insert(entry).ok_or(Refusal::Full)?;
        self.ghosts += 1;
        self.sweep.note_ghost();
        Ok(at)
    }
}
