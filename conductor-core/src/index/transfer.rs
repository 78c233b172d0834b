//! What one index says of an owner to another index of the same context.
//!
//! [`Index::blocks_of`] lists the blocks of an owner with the blocks before them, [`Index::adopt`] records
//! such a list. Neither knows when the list was true: the caller has to tie it to a position in the owner's
//! stream ([`Stream::adopt`](crate::stream::Stream::adopt)).

use alloc::vec::Vec;

use super::{EMPTY, Entry, FORK, HeldBlock, Index, IndexLimits, PARENT, Refusal, Stored, link, spread};
use crate::{BlockKey, OwnerId};

impl Index {
    /// The blocks of `owner` with the blocks before them, by depth. `out` is emptied first. A block appears
    /// once for each block that may be the one before it: more than once where their links are the same. The
    /// time is that of visiting every entry.
    pub fn blocks_of(&self, owner: OwnerId, out: &mut Vec<HeldBlock>) {
        out.clear();
        let Some(seat) = self.seats.of(owner) else { return };
        let segments = || (0..super::BUCKETS).flat_map(|segment| self.table.segment(segment));
        let held = |entry: &&Entry| self.holders.contains(entry.set, seat);
        // In the order of their hashes.
        let children: Vec<Entry> = segments().filter(held).copied().collect();
        let is_first = |entry: &&Entry| entry.depth() == 0;
        let block = |entry: &Entry, parent| HeldBlock { depth: entry.depth(), key: entry.key(), parent };
        out.extend(children.iter().filter(is_first).map(|entry| block(entry, None)));
        let mut link_children = |parent: &Entry| {
            if parent.meta & PARENT == 0 {
                return;
            }
            let more = if parent.meta & FORK != 0 { self.forks.get(&{ parent.hash }) } else { None };
            let mut links = more.cloned().unwrap_or_default();
            links.push(parent.child);
            links.sort_unstable();
            links.dedup();
            for child in links {
                let first = children.partition_point(|entry| link(entry.hash) < child);
                let same = children[first..].iter().take_while(|entry| link(entry.hash) == child);
                let follows = same.filter(|entry| entry.depth() == parent.depth() + 1);
                out.extend(follows.map(|entry| block(entry, Some(parent.key()))));
            }
        };
        if self.seats.is_holey(seat) {
            segments().for_each(&mut link_children);
        } else {
            children.iter().for_each(link_children);
        }
        out.sort_unstable();
    }

    /// Records blocks of `owner` as [`Index::blocks_of`] of another index lists them. An owner with a block
    /// whose parent it does not have is holey, until a later [`Index::sweep`] notices that it is not any
    /// more.
    pub fn adopt(&mut self, owner: OwnerId, blocks: &[HeldBlock]) -> Stored {
        let mut stored = Stored::default();
        let Some(seat) = self.seats.of_or_new(owner) else {
            self.counters.refused_owners += blocks.len() as u64;
            return Stored { refused: blocks.len(), ..stored };
        };
        for block in blocks {
            match self.adopt_one(seat, block) {
                Ok(added) => {
                    stored.added += usize::from(added);
                    stored.known += usize::from(!added);
                    if self.seats.get(seat).assumed > 0 {
                        self.confirm(seat, block.key);
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

    fn adopt_one(&mut self, seat: u32, entry: &HeldBlock) -> Result<bool, Refusal> {
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
        let hash = spread(entry.key.0);
        let result = self.store(seat, before, hash, entry.depth);
        if let (Ok((_, false)), Some(parent)) = (&result, entry.parent)
            && !self.follows(Some(parent), entry.key)
        {
            // It has several parents by its link, or was known with another one: each counts as its parent.
            self.attach(before, hash, entry.depth);
        }
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
