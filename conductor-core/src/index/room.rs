//! What is dropped when an index is full.

use super::table::segment_of;
use super::{AGE_MAX, EMPTY, Index};

/// Entries that are looked at, by segments, before the new block is refused.
const ENTRIES_SEARCHED: usize = 16_384;
/// One in so many blocks of a segment is dropped at a time, and the blocks that follow them.
const SHARE: usize = 32;
/// Blocks that are dropped with the one that they follow; one with more is kept.
const FOLLOWERS_MAX: usize = 4096;
/// Followers that are looked at before the new block is refused.
const FOLLOWERS_SEARCHED: usize = 16 * FOLLOWERS_MAX;

impl Index {
    /// The age advances eight times while as many blocks are stored as may be in the index.
    pub(super) fn advance_age(&mut self, blocks: usize) {
        self.stored_in_age += blocks;
        if self.stored_in_age > self.limits.blocks_max / 8 {
            self.stored_in_age = 0;
            self.age = (self.age + 1) & AGE_MAX;
        }
    }

    /// Drops ends of chains, but not the block `keep`: blocks that no owner holds, then the least recently
    /// stored, and of those the deepest, each with all that follow it. A block that something more recent
    /// follows stays. False when there is nothing to drop near `hash`.
    pub(super) fn make_room(&mut self, hash: u64, keep: Option<u64>) -> bool {
        let first = segment_of(hash);
        let (mut searched, mut followers) = (0, FOLLOWERS_SEARCHED);
        for segment in (first..super::BUCKETS).chain(0..first) {
            searched += self.table.segment_len(segment);
            if self.drop_from(segment, keep, &mut followers) > 0 {
                return true;
            }
            if searched >= ENTRIES_SEARCHED || followers == 0 {
                break;
            }
        }
        false
    }

    fn drop_from(&mut self, segment: usize, keep: Option<u64>, followers: &mut usize) -> usize {
        let wanted = (self.table.segment_len(segment) / SHARE).max(1);
        let mut candidates = core::mem::take(&mut self.candidates);
        candidates.clear();
        let now = self.age;
        for entry in self.table.segment_mut(segment) {
            let mut age = now.wrapping_sub(entry.age()) & AGE_MAX;
            if age > AGE_MAX / 2 {
                // Ages wrap: what is old stays old.
                age = AGE_MAX / 2;
                entry.set_age(now.wrapping_sub(age) & AGE_MAX);
            }
            let unheld = u64::from(entry.set == EMPTY);
            candidates.push((unheld << 63 | u64::from(age) << 32 | u64::from(entry.depth()), entry.hash));
        }
        // The best come first; a few more than wanted, since some have to stay.
        let best = (wanted * 4).min(candidates.len());
        if best < candidates.len() {
            candidates.select_nth_unstable_by(best, |a, b| b.cmp(a));
        }
        candidates[..best].sort_unstable_by(|a, b| b.cmp(a));
        let mut dropped = 0;
        for (_, hash) in &candidates {
            if dropped >= wanted || *followers == 0 {
                break;
            }
            dropped += self.drop_end(*hash, keep, followers);
        }
        self.candidates = candidates;
        dropped
    }

    /// Drops a block and what follows it; returns how many blocks. `followers` is how many may be looked at.
    fn drop_end(&mut self, hash: u64, keep: Option<u64>, followers: &mut usize) -> usize {
        let mut end = core::mem::take(&mut self.end);
        end.clear();
        end.push(hash);
        let mut stays = keep == Some(hash);
        let age = |entry: &super::Entry| self.age.wrapping_sub(entry.age()) & AGE_MAX;
        let mut at = 0;
        while let Some(hash) = end.get(at).copied().filter(|_| !stays) {
            at += 1;
            let Some(entry) = self.table.find(hash).map(|at| self.table.get(at)) else { break };
            stays = self.any_child(&entry, |child| {
                end.push(child.hash);
                *followers = followers.saturating_sub(1);
                age(child) < age(&entry)
                    || keep == Some(child.hash)
                    || end.len() > FOLLOWERS_MAX
                    || *followers == 0
            });
        }
        let mut dropped = 0;
        if !stays {
            dropped = end.iter().rev().filter(|hash| self.drop_block(**hash)).count();
        }
        self.end = end;
        dropped
    }

    /// Drops a block that has no successor.
    fn drop_block(&mut self, hash: u64) -> bool {
        let Some(at) = self.table.find(hash) else { return false };
        let entry = self.table.get(at);
        if self.any_child(&entry, |_| true) {
            return false;
        }
        let (seats, holders) = (&mut self.seats, &self.holders);
        let mut held = core::mem::take(&mut self.mask);
        held.clear();
        held.extend_from_slice(seats.live());
        holders.each(entry.set, &held, |seat| seats.subtract(seat, hash));
        self.mask = held;
        self.holders.release(entry.set);
        self.forget(at);
        self.counters.dropped += u64::from(entry.set != EMPTY);
        true
    }
}
