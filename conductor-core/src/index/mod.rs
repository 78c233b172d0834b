//! Which owner has which blocks: the prefix index of one context.
//!
//! ```text
//!   table, ordered by hash                    holder sets, each kept once
//!   ┌ hash of key ┬ set ┬ depth ┬ child ┐       3 ─▶ {gpu of a, gpu of b}   100 blocks
//!   │ 64 bits     │  3 ─┼───────┼───────┼────▶  7 ─▶ {gpu of b}              12 blocks
//!   └─────────────┴─────┴───────┴───────┘
//!
//!   query   block  0 ── 1 ── 3 ── 7 ─────── 15      gallop: 15 has another set than 7
//!                                 7 ─ 11            bisect: so has 11, and 9 has the set of 7 ...
//! ```
//!
//! Blocks are chained: a key stands for a block and everything before it. An owner that stores and evicts
//! from the ends of chains has a block only with every block before it; then the owners of block *i* are a
//! subset of those of block *i - 1*, and [`Index::query`] finds where they change by bisection. An owner that
//! has a block without its parent is *holey* ([`Index::is_holey`]) and is walked block by block. The index
//! notices that by itself: each entry knows its children (32 bits of the hash of the only child, which place
//! it in the table, or a list beside the table where a chain forks), so that the removal of a block is
//! checked against them. Answers are exact in both cases; only the time differs.
//!
//! An entry takes 20 bytes, at a load between 67 and 84 %, whatever the number of its owners.
//!
//! # Threads
//!
//! An index is plain data: queries take `&self` and allocate nothing once `out` has grown, changes take `&mut
//! self`. A server keeps one index per context behind a lock for readers and a writer. Changes are short when
//! the server applies events one batch at a time and calls [`Index::sweep`] with a budget: the longest pause
//! is then the growth of one of 256 segments. Contexts share nothing.

use alloc::vec::Vec;

use hashbrown::HashMap;

use crate::{BlockKey, OwnerId};

mod assumed;
mod holders;
mod query;
mod room;
mod seats;
mod snapshot;
mod sweep;
mod table;
#[cfg(test)]
mod tests;
mod transfer;
mod types;

pub(crate) use types::BUCKETS;
pub use types::{Counters, Digest, HeldBlock, IndexLimits, OwnerState, SnapshotError, Stored};

use assumed::Assumptions;
use holders::{EMPTY, Holders, NONE, SetId};
use seats::Seats;
use sweep::Sweep;
use table::At;
pub(crate) use table::{Slot, Table, segment_of, spread, unspread};

/// A block in the table. `meta` has the depth, the age, and whether there are children.
#[derive(Clone, Copy, Debug)]
#[repr(C, packed(4))]
struct Entry {
    hash: u64,
    set: SetId,
    meta: u32,
    /// The upper half of a child's hash, when there is one.
    child: u32,
}

const DEPTH_BITS: u32 = 23;
const AGE_MAX: u32 = (1 << 7) - 1;
/// `child` is valid.
const PARENT: u32 = 1 << 30;
/// There are more children, in `Index::forks`.
const FORK: u32 = 1 << 31;

impl Entry {
    fn new(hash: u64, set: SetId, depth: u32, age: u32) -> Self {
        Self { hash, set, meta: depth | (age << DEPTH_BITS), child: 0 }
    }

    #[inline]
    fn depth(&self) -> u32 {
        self.meta & IndexLimits::DEPTH_MAX
    }

    fn age(&self) -> u32 {
        (self.meta >> DEPTH_BITS) & AGE_MAX
    }

    #[inline]
    fn set_age(&mut self, age: u32) {
        self.meta = (self.meta & !(AGE_MAX << DEPTH_BITS)) | (age << DEPTH_BITS);
    }

    fn key(&self) -> BlockKey {
        BlockKey(unspread(self.hash))
    }
}

impl Slot for Entry {
    const VACANT: Self = Self { hash: u64::MAX, set: NONE, meta: 0, child: 0 };

    #[inline]
    fn hash(&self) -> u64 {
        self.hash
    }

    #[inline]
    fn vacant(&self) -> bool {
        self.set == NONE
    }
}

/// What an entry knows of a child.
#[inline]
const fn link(hash: u64) -> u32 {
    (hash >> 32) as u32
}

/// The children of blocks that have several, but for the first, by the hash of the parent. A child that has
/// left the index may be named still.
type Forks = HashMap<u64, Vec<u32>, foldhash::fast::FixedState>;

/// Why a block was not recorded.
enum Refusal {
    Conflict,
    Deep,
    Full,
    Holders,
}

impl Refusal {
    fn count(self, counters: &mut Counters, blocks: usize) {
        let counter = match self {
            Self::Conflict => &mut counters.conflicts,
            Self::Deep => &mut counters.too_deep,
            Self::Full => &mut counters.refused_full,
            Self::Holders => &mut counters.refused_holders,
        };
        *counter += blocks as u64;
    }
}

/// Children of a block that are looked at when it is removed. Of a block with more it is not found out
/// whether the owner keeps one: the owner counts as holey.
const CHILDREN_SEARCHED: usize = 4096;
/// Blocks whose places in the table are fetched at the same time.
pub(crate) const TOUCHED: usize = 16;

/// The blocks of one context and their owners. See the [module](self).
#[derive(Debug)]
pub struct Index {
    limits: IndexLimits,
    table: Table<Entry>,
    forks: Forks,
    holders: Holders,
    seats: Seats,
    assumed: Assumptions,
    sweep: Sweep,
    counters: Counters,
    /// Entries without holders that were kept since they have children.
    ghosts: usize,
    /// Blocks stored since the age advanced.
    stored_in_age: usize,
    age: u32,
    /// Blocks that might be dropped.
    candidates: Vec<(u64, u64)>,
    /// Seats that lose a block.
    mask: Vec<u64>,
    /// The end of a chain that might be dropped.
    end: Vec<u64>,
}

impl Index {
    /// An index without blocks.
    #[must_use]
    pub fn new(limits: IndexLimits) -> Self {
        Self {
            table: Table::new(),
            forks: Forks::with_hasher(foldhash::fast::FixedState::with_seed(0)),
            holders: Holders::new(limits.holders_bytes_max),
            seats: Seats::new(limits.owners_max),
            assumed: Assumptions::new(limits.assumed_max),
            sweep: Sweep::default(),
            counters: Counters::default(),
            ghosts: 0,
            stored_in_age: 0,
            age: 0,
            candidates: Vec::new(),
            mask: Vec::new(),
            end: Vec::new(),
            limits,
        }
    }

    /// `owner` has stored `keys`, a piece of a chain that follows `parent`, or begins a chain when there is
    /// none. A parent that no owner has makes all of them orphans: they are counted and not recorded, since
    /// no query could reach them. When one is refused, so are those after it.
    pub fn stored(&mut self, owner: OwnerId, parent: Option<BlockKey>, keys: &[BlockKey]) -> Stored {
        let mut stored = Stored::default();
        if keys.is_empty() {
            return stored;
        }
        let refused = Stored { refused: keys.len(), ..stored };
        let mut before = None;
        let mut parent_held = true;
        let mut depth = 0;
        if let Some(parent) = parent {
            let hash = spread(parent.0);
            let Some(at) = self.table.find(hash).filter(|at| self.is_held(self.table.get(*at).set)) else {
                self.counters.orphans += keys.len() as u64;
                return refused;
            };
            let entry = self.table.get(at);
            depth = entry.depth() + 1;
            parent_held = self.seats.of(owner).is_some_and(|seat| self.holders.contains(entry.set, seat));
            before = Some((hash, at));
        }
        let Some(seat) = self.seats.of_or_new(owner) else {
            self.counters.refused_owners += keys.len() as u64;
            return refused;
        };
        let confirms = self.seats.get(seat).assumed > 0;
        let mut hashes = [0; TOUCHED];
        'pieces: for (piece, depth) in keys.chunks(TOUCHED).zip((depth..).step_by(TOUCHED)) {
            let hashes = &mut hashes[..piece.len()];
            hashes.iter_mut().zip(piece).for_each(|(hash, key)| *hash = spread(key.0));
            self.table.touch(hashes);
            for ((key, hash), depth) in piece.iter().zip(hashes).zip(depth..) {
                match self.store(seat, before, *hash, depth) {
                    Ok((at, added)) => {
                        stored.added += usize::from(added);
                        stored.known += usize::from(!added);
                        before = Some((*hash, at));
                    }
                    Err(refusal) => {
                        refusal.count(&mut self.counters, keys.len() - stored.added - stored.known);
                        break 'pieces;
                    }
                }
                if confirms {
                    self.confirm(seat, *key);
                }
            }
        }
        if !parent_held && stored.added + stored.known > 0 {
            self.puncture(seat);
        }
        stored.refused = keys.len() - stored.added - stored.known;
        self.counters.added += stored.added as u64;
        self.advance_age(stored.added + stored.known);
        self.sweep.note_changes(stored.added);
        stored
    }

    /// Whether a set has a member that is an owner still.
    fn is_held(&self, set: SetId) -> bool {
        set > EMPTY && (self.seats.dead() == 0 || self.holders.any(set, self.seats.live()))
    }

    /// Records one block; says where it is, and whether the owner did not have it.
    #[inline]
    fn store(
        &mut self,
        seat: u32,
        before: Option<(u64, At)>,
        hash: u64,
        depth: u32,
    ) -> Result<(At, bool), Refusal> {
        let at = match self.table.find_or_place(hash) {
            Ok(at) => at,
            Err(place) => return self.store_new(seat, before, hash, depth, place).map(|at| (at, true)),
        };
        let entry = self.table.get(at);
        if entry.depth() != depth {
            return Err(Refusal::Conflict);
        }
        let added = !self.holders.contains(entry.set, seat);
        let age = self.age;
        if added {
            let set = self.holders.with(entry.set, seat).ok_or(Refusal::Holders)?;
            self.table.get_mut(at).set = set;
            self.holders.retain(set);
            self.holders.release(entry.set);
            self.seats.add(seat, hash);
            if entry.set == EMPTY {
                self.ghosts -= 1;
                // An entry that another index named as a parent has no parent yet.
                self.attach(before, hash, depth);
            }
        }
        self.table.get_mut(at).set_age(age);
        Ok((at, added))
    }

    fn store_new(
        &mut self,
        seat: u32,
        before: Option<(u64, At)>,
        hash: u64,
        depth: u32,
        mut place: Option<At>,
    ) -> Result<At, Refusal> {
        if depth >= self.limits.depth_max.min(IndexLimits::DEPTH_MAX) {
            return Err(Refusal::Deep);
        }
        if self.table.len() >= self.limits.blocks_max {
            place = None;
            if !self.make_room(hash, before.map(|(hash, _)| hash)) {
                return Err(Refusal::Full);
            }
        }
        let set = self.holders.with(EMPTY, seat).ok_or(Refusal::Holders)?;
        let Some(at) = self.table.insert_at(place, Entry::new(hash, set, depth, self.age)) else {
            self.holders.forget_unused(set);
            return Err(Refusal::Full);
        };
        self.holders.retain(set);
        self.seats.add(seat, hash);
        self.attach(before, hash, depth);
        Ok(at)
    }

    /// Makes `hash` a child of the entry before it.
    fn attach(&mut self, before: Option<(u64, At)>, hash: u64, depth: u32) {
        let Some((parent, hint)) = before else { return };
        let Some(at) = self.table.find_near(hint, parent) else { return };
        let entry = self.table.get(at);
        let child = link(hash);
        if entry.meta & PARENT == 0 {
            let entry = self.table.get_mut(at);
            entry.meta |= PARENT;
            entry.child = child;
        } else if entry.child == child {
            // Known, or a block that was here before.
        } else if !has_child(&self.table, entry.child, depth) {
            self.table.get_mut(at).child = child;
        } else {
            self.table.get_mut(at).meta |= FORK;
            let more = self.forks.entry(parent).or_default();
            if more.len() == more.capacity() {
                // Before the list grows, children that left are taken out of it.
                more.sort_unstable();
                more.dedup();
                more.retain(|child| has_child(&self.table, *child, depth));
                if more.len() * 2 > more.capacity() {
                    more.reserve_exact(more.len().max(2));
                }
            }
            more.push(child);
        }
    }

    /// Whether `found` is true of a child of an entry. Stops at the first.
    fn any_child(&self, entry: &Entry, mut found: impl FnMut(&Entry) -> bool) -> bool {
        if entry.meta & PARENT == 0 {
            return false;
        }
        let depth = entry.depth() + 1;
        let mut any = |child| any_linked(&self.table, child, depth, &mut found);
        any(entry.child) || self.more_children(entry).iter().any(|child| any(*child))
    }

    /// The children of an entry but for the first.
    fn more_children(&self, entry: &Entry) -> &[u32] {
        let more = if entry.meta & FORK != 0 { self.forks.get(&{ entry.hash }) } else { None };
        more.map_or(&[], Vec::as_slice)
    }

    /// Whether it is known that the block `before` is the one before `key`; without `before`, that `key`
    /// begins a chain. False for a block that is not here, and sometimes for one whose parent has very many
    /// children.
    #[must_use]
    pub fn follows(&self, before: Option<BlockKey>, key: BlockKey) -> bool {
        let Some(at) = self.table.find(spread(key.0)) else { return false };
        let depth = self.table.get(at).depth();
        let Some(before) = before else { return depth == 0 };
        let Some(before) = self.table.find(spread(before.0)).map(|at| self.table.get(at)) else {
            return false;
        };
        let (hash, more) = (spread(key.0), self.more_children(&before));
        let child = link(hash);
        // Another block that is linked in the same way might be the child.
        let is_other = |entry: &Entry| entry.hash != hash;
        before.meta & PARENT != 0
            && before.depth() + 1 == depth
            && more.len() <= CHILDREN_SEARCHED
            && (before.child == child || more.contains(&child))
            && !any_linked(&self.table, child, depth, &mut { is_other })
    }

    /// `owner` does not have `keys` any more, in whatever order. Returns how many of them it had.
    pub fn removed(&mut self, owner: OwnerId, keys: &[BlockKey]) -> usize {
        let Some(seat) = self.seats.of(owner) else {
            self.counters.removed_unknown += keys.len() as u64;
            return 0;
        };
        let removed = keys.iter().filter(|key| self.remove(seat, spread(key.0))).count();
        self.sweep.note_changes(removed);
        self.counters.removed += removed as u64;
        self.counters.removed_unknown += (keys.len() - removed) as u64;
        removed
    }

    fn remove(&mut self, seat: u32, hash: u64) -> bool {
        let Some(at) = self.table.find(hash) else { return false };
        let entry = self.table.get(at);
        if !self.holders.contains(entry.set, seat) {
            return false;
        }
        let set = self.holders.without(entry.set, seat);
        let more = self.more_children(&entry);
        let mut has_children = more.len() > CHILDREN_SEARCHED;
        let hole = has_children
            || self.any_child(&entry, |child| {
                has_children = true;
                self.holders.contains(child.set, seat)
            });
        if hole {
            self.puncture(seat);
        }
        self.table.get_mut(at).set = set;
        self.holders.retain(set);
        self.holders.release(entry.set);
        if set == EMPTY {
            self.ghosts += 1;
            if has_children {
                self.sweep.note_ghost();
            } else {
                self.forget(at);
            }
        }
        self.seats.subtract(seat, hash);
        true
    }

    /// Takes out an entry without holders and without children.
    fn forget(&mut self, at: At) {
        let entry = self.table.get(at);
        if entry.meta & FORK != 0 {
            self.forks.remove(&{ entry.hash });
        }
        self.ghosts -= usize::from(entry.set == EMPTY);
        self.table.remove(at);
        self.sweep.note_forgotten(self.ghosts);
    }

    fn puncture(&mut self, seat: u32) {
        self.counters.holey += u64::from(self.seats.puncture(seat));
        self.sweep.note_hole(seat);
    }

    /// `owner` has nothing any more, and nothing is assumed of it. The time does not depend on how much it
    /// had: its entries are ignored from now on, and [`Index::sweep`] takes them out. The id may be used
    /// again at once.
    pub fn cleared(&mut self, owner: OwnerId) {
        if self.seats.clear(owner) {
            self.counters.cleared += 1;
        }
    }

    /// Whether `owner` has the block.
    #[must_use]
    pub fn holds(&self, owner: OwnerId, key: BlockKey) -> bool {
        let Some(seat) = self.seats.of(owner) else { return false };
        self.table.find(spread(key.0)).is_some_and(|at| self.holders.contains(self.table.get(at).set, seat))
    }

    /// Whether any owner has the block.
    #[must_use]
    pub fn contains(&self, key: BlockKey) -> bool {
        self.table.find(spread(key.0)).is_some_and(|at| self.is_held(self.table.get(at).set))
    }

    /// Unique blocks, with those that have no owner any more and still have to be swept.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.table.len()
    }

    /// Bytes of memory that the index has allocated.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let forks: usize = self.forks.values().map(|more| more.capacity() * size_of::<u32>()).sum();
        self.table.bytes()
            + forks
            + self.forks.allocation_size()
            + self.holders.bytes()
            + self.seats.bytes()
            + self.assumed.bytes()
            + self.candidates.capacity() * size_of::<(u64, u64)>()
            + size_of::<Self>()
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
        self.seats.owners().filter(|(_, seat)| seat.digest.blocks > 0).map(|(at, seat)| OwnerState {
            owner: seat.owner,
            digest: seat.digest,
            holey: self.seats.is_holey(at),
        })
    }

    /// What `owner` has, as a number; what is assumed of it is not part of it.
    #[must_use]
    pub fn digest(&self, owner: OwnerId) -> Digest {
        self.seats.of(owner).map_or(Digest::default(), |seat| self.seats.get(seat).digest)
    }

    /// Whether `owner` may have a block without the block before it, so that queries walk its blocks one by
    /// one.
    #[must_use]
    pub fn is_holey(&self, owner: OwnerId) -> bool {
        self.seats.of(owner).is_some_and(|seat| self.seats.is_holey(seat))
    }
}

/// Whether `found` is true of an entry of this depth whose hash begins with `child`.
fn any_linked(table: &Table<Entry>, child: u32, depth: u32, found: &mut impl FnMut(&Entry) -> bool) -> bool {
    let mut next = table.first_in_cluster(u64::from(child) << 32);
    while let Some(at) = next {
        let entry = table.get(at);
        if link(entry.hash) != child {
            return false;
        }
        if entry.depth() == depth && found(&entry) {
            return true;
        }
        next = table.next_in_cluster(at);
    }
    false
}

fn has_child(table: &Table<Entry>, child: u32, depth: u32) -> bool {
    any_linked(table, child, depth, &mut |_| true)
}
