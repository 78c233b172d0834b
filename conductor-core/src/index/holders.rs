//! Sets of owners, each kept once: a block names its set by a number.
//!
//! Blocks of one piece of a chain have the same holders, so that there are far fewer sets than blocks, and a
//! block costs the same whether one owner has it or a thousand.

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;

use hashbrown::HashTable;

/// An interned set.
pub(crate) type SetId = u32;

/// A set's id with what changes when the id is given to another set.
pub(crate) type Stamped = (SetId, u32);

/// No set: the slot is vacant.
pub(crate) const NONE: SetId = 0;
/// The set without members.
pub(crate) const EMPTY: SetId = 1;

/// Members up to which a set is a list.
const FEW: usize = 5;
/// The end of a list that is shorter.
const NO_SEAT: u32 = u32::MAX;

#[derive(Debug)]
enum Members {
    /// Ascending, then [`NO_SEAT`].
    Few([u32; FEW]),
    /// A bit per seat; the last word is not zero.
    Many(Box<[u64]>),
}

#[derive(Debug)]
struct Set {
    hash: u64,
    /// Blocks that have this set.
    refs: u32,
    len: u32,
    /// Changes when the id is given to another set.
    stamp: u32,
    members: Members,
}

/// A step from a set to the set with one member more or less.
#[derive(Clone, Copy, Debug)]
struct Step {
    from: Stamped,
    to: Stamped,
    seat: u32,
}

const STEPS: usize = 64;
const NO_STEP: Step = Step { from: (NONE, 0), to: (NONE, 0), seat: 0 };

#[derive(Debug)]
pub(crate) struct Holders {
    sets: Vec<Set>,
    free: Vec<SetId>,
    by_members: HashTable<SetId>,
    boxed_bytes: usize,
    bytes_max: usize,
    /// Recent steps, so that the blocks of a chain pay for one.
    grown: [Step; STEPS],
    shrunk: [Step; STEPS],
    /// The members of a set that is being made.
    scratch: Vec<u64>,
}

/// The hash of a set is the exclusive or over its seats, so that a step costs one.
fn seat_hash(seat: u32) -> u64 {
    super::seats::digest_of(super::table::spread(u64::from(seat)))
}

fn step_at(from: SetId, seat: u32) -> usize {
    (from.wrapping_mul(0x9e37_79b1) ^ seat.wrapping_mul(0x85eb_ca6b)) as usize >> 7 & (STEPS - 1)
}

const fn bit(seat: u32) -> (usize, u64) {
    (seat as usize / 64, 1 << (seat % 64))
}

/// A word of a mask; words beyond its end are zero.
#[inline]
pub(crate) fn word(mask: &[u64], at: usize) -> u64 {
    mask.get(at).copied().unwrap_or(0)
}

/// Calls `each` for every seat of a word.
#[inline]
pub(crate) fn each_seat(at: usize, mut word: u64, mut each: impl FnMut(u32)) {
    while word != 0 {
        each(at as u32 * 64 + word.trailing_zeros());
        word &= word - 1;
    }
}

impl Set {
    fn contains(&self, seat: u32) -> bool {
        match &self.members {
            Members::Few(few) => few.contains(&seat),
            Members::Many(words) => {
                let (at, bit) = bit(seat);
                word(words, at) & bit != 0
            }
        }
    }

    fn is(&self, words: &[u64], len: u32) -> bool {
        self.len == len
            && match &self.members {
                Members::Few(few) => few[..len as usize].iter().all(|seat| {
                    let (at, bit) = bit(*seat);
                    word(words, at) & bit != 0
                }),
                Members::Many(own) => **own == *words,
            }
    }

    fn boxed_bytes(&self) -> usize {
        match &self.members {
            Members::Few(_) => 0,
            Members::Many(words) => size_of_val::<[u64]>(words),
        }
    }
}

impl Holders {
    pub(crate) fn new(bytes_max: usize) -> Self {
        let empty = || Set { hash: 0, refs: 1, len: 0, stamp: 1, members: Members::Few([NO_SEAT; FEW]) };
        Self {
            sets: vec![empty(), empty()],
            free: Vec::new(),
            by_members: HashTable::new(),
            boxed_bytes: 0,
            bytes_max,
            grown: [NO_STEP; STEPS],
            shrunk: [NO_STEP; STEPS],
            scratch: Vec::new(),
        }
    }

    /// Bytes of the sets and of what finds them.
    pub(crate) fn bytes(&self) -> usize {
        self.boxed_bytes
            + self.sets.capacity() * size_of::<Set>()
            + self.free.capacity() * size_of::<SetId>()
            + self.by_members.allocation_size()
    }

    /// Sets that are in use.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.sets.len() - 2 - self.free.len()
    }

    #[cfg(test)]
    pub(crate) fn refs(&self, set: SetId) -> u32 {
        self.sets[set as usize].refs
    }

    /// One number above every id.
    pub(crate) fn end(&self) -> SetId {
        self.sets.len() as SetId
    }

    #[inline]
    pub(crate) fn contains(&self, set: SetId, seat: u32) -> bool {
        self.sets[set as usize].contains(seat)
    }

    /// Calls `each` for the members of a set that are in `mask`.
    #[inline]
    pub(crate) fn each(&self, set: SetId, mask: &[u64], mut each: impl FnMut(u32)) {
        match &self.sets[set as usize].members {
            Members::Few(few) => {
                for seat in few.iter().take_while(|seat| **seat != NO_SEAT) {
                    let (at, bit) = bit(*seat);
                    if word(mask, at) & bit != 0 {
                        each(*seat);
                    }
                }
            }
            Members::Many(words) => {
                for (at, (own, mask)) in words.iter().zip(mask).enumerate() {
                    each_seat(at, own & mask, &mut each);
                }
            }
        }
    }

    /// Calls `each` for the members of `set` that are in `mask` and not in `other`.
    #[inline]
    pub(crate) fn each_not_in(&self, set: SetId, other: SetId, mask: &[u64], mut each: impl FnMut(u32)) {
        let other = &self.sets[other as usize];
        if let (Members::Many(words), Members::Many(others)) =
            (&self.sets[set as usize].members, &other.members)
        {
            for (at, (own, mask)) in words.iter().zip(mask).enumerate() {
                each_seat(at, own & mask & !word(others, at), &mut each);
            }
            return;
        }
        self.each(set, mask, |seat| {
            if !other.contains(seat) {
                each(seat);
            }
        });
    }

    /// How many members are in `mask`.
    #[inline]
    pub(crate) fn count(&self, set: SetId, mask: &[u64]) -> u32 {
        match &self.sets[set as usize].members {
            Members::Few(_) => {
                let mut count = 0;
                self.each(set, mask, |_| count += 1);
                count
            }
            Members::Many(words) => words.iter().zip(mask).map(|(own, mask)| (own & mask).count_ones()).sum(),
        }
    }

    /// Whether any member is in `mask`.
    #[inline]
    pub(crate) fn any(&self, set: SetId, mask: &[u64]) -> bool {
        match &self.sets[set as usize].members {
            Members::Few(few) => few.iter().take_while(|seat| **seat != NO_SEAT).any(|seat| {
                let (at, bit) = bit(*seat);
                word(mask, at) & bit != 0
            }),
            Members::Many(words) => words.iter().zip(mask).any(|(own, mask)| own & mask != 0),
        }
    }

    /// The set with `seat`, which it does not have. None when that would take more than the memory allowed.
    #[inline]
    pub(crate) fn with(&mut self, from: SetId, seat: u32) -> Option<SetId> {
        let at = step_at(from, seat);
        if let Some(to) = self.follow(self.grown[at], from, seat) {
            return Some(to);
        }
        if self.bytes() >= self.bytes_max {
            return None;
        }
        let (hash, len) = self.load(from);
        let (place, bit) = bit(seat);
        if self.scratch.len() <= place {
            self.scratch.resize(place + 1, 0);
        }
        self.scratch[place] |= bit;
        let to = self.intern(hash ^ seat_hash(seat), len + 1);
        self.grown[at] = self.step(from, seat, to);
        Some(to)
    }

    /// The set without `seat`, which it has.
    #[inline]
    pub(crate) fn without(&mut self, from: SetId, seat: u32) -> SetId {
        let at = step_at(from, seat);
        if let Some(to) = self.follow(self.shrunk[at], from, seat) {
            return to;
        }
        let (hash, len) = self.load(from);
        let (place, bit) = bit(seat);
        self.scratch[place] &= !bit;
        self.trim();
        let to = self.intern(hash ^ seat_hash(seat), len - 1);
        self.shrunk[at] = self.step(from, seat, to);
        to
    }

    pub(crate) fn stamped(&self, set: SetId) -> Stamped {
        (set, self.sets[set as usize].stamp)
    }

    #[inline]
    fn follow(&self, step: Step, from: SetId, seat: u32) -> Option<SetId> {
        let known =
            step.from == self.stamped(from) && step.seat == seat && step.to == self.stamped(step.to.0);
        known.then_some(step.to.0)
    }

    fn step(&self, from: SetId, seat: u32, to: SetId) -> Step {
        Step { from: self.stamped(from), to: self.stamped(to), seat }
    }

    /// The set without the seats that are in `gone`.
    pub(crate) fn without_all(&mut self, from: SetId, gone: &[u64]) -> SetId {
        if !self.any(from, gone) {
            return from;
        }
        let (mut hash, mut len) = self.load(from);
        for (at, (own, gone)) in self.scratch.iter_mut().zip(gone).enumerate() {
            each_seat(at, *own & gone, |seat| {
                hash ^= seat_hash(seat);
                len -= 1;
            });
            *own &= !gone;
        }
        self.trim();
        self.intern(hash, len)
    }

    /// The set of these seats, which are ascending and without duplicates.
    pub(crate) fn of(&mut self, seats: &[u32]) -> SetId {
        self.scratch.clear();
        let mut hash = 0;
        for seat in seats {
            let (place, bit) = bit(*seat);
            if self.scratch.len() <= place {
                self.scratch.resize(place + 1, 0);
            }
            self.scratch[place] |= bit;
            hash ^= seat_hash(*seat);
        }
        self.intern(hash, seats.len() as u32)
    }

    /// Copies a set's members to the scratch; returns its hash and length.
    fn load(&mut self, set: SetId) -> (u64, u32) {
        let set = &self.sets[set as usize];
        self.scratch.clear();
        match &set.members {
            Members::Many(words) => self.scratch.extend_from_slice(words),
            Members::Few(few) => {
                let few = &few[..set.len as usize];
                if let Some(last) = few.last() {
                    self.scratch.resize(bit(*last).0 + 1, 0);
                }
                for seat in few {
                    let (place, bit) = bit(*seat);
                    self.scratch[place] |= bit;
                }
            }
        }
        (set.hash, set.len)
    }

    fn trim(&mut self) {
        while self.scratch.last() == Some(&0) {
            self.scratch.pop();
        }
    }

    /// The set whose members are in the scratch.
    fn intern(&mut self, hash: u64, len: u32) -> SetId {
        if len == 0 {
            return EMPTY;
        }
        let (sets, scratch) = (&self.sets, &self.scratch);
        let same = |id: &SetId| {
            let set = &sets[*id as usize];
            set.hash == hash && set.is(scratch, len)
        };
        if let Some(id) = self.by_members.find(hash, same) {
            return *id;
        }
        let members = if len as usize <= FEW {
            let (mut few, mut next) = ([NO_SEAT; FEW], 0);
            for (at, word) in self.scratch.iter().enumerate() {
                each_seat(at, *word, |seat| {
                    few[next] = seat;
                    next += 1;
                });
            }
            Members::Few(few)
        } else {
            Members::Many(self.scratch.as_slice().into())
        };
        let mut set = Set { hash, refs: 0, len, stamp: 1, members };
        self.boxed_bytes += set.boxed_bytes();
        let id = match self.free.pop() {
            Some(id) => {
                set.stamp = self.sets[id as usize].stamp;
                self.sets[id as usize] = set;
                id
            }
            None => {
                self.sets.push(set);
                (self.sets.len() - 1) as SetId
            }
        };
        self.by_members.insert_unique(hash, id, |id| self.sets[*id as usize].hash);
        id
    }

    /// One block more has the set.
    #[inline]
    pub(crate) fn retain(&mut self, set: SetId) {
        self.retain_many(set, 1);
    }

    #[inline]
    pub(crate) fn retain_many(&mut self, set: SetId, blocks: u32) {
        if set > EMPTY {
            self.sets[set as usize].refs += blocks;
        }
    }

    /// One block less has the set. When it was the last one, the set is forgotten.
    #[inline]
    pub(crate) fn release(&mut self, set: SetId) {
        if set <= EMPTY {
            return;
        }
        let refs = &mut self.sets[set as usize].refs;
        *refs = refs.saturating_sub(1);
        if *refs == 0 {
            self.forget(set);
        }
    }

    /// Forgets a set that no block has.
    pub(crate) fn forget_unused(&mut self, set: SetId) {
        if set > EMPTY && self.sets[set as usize].refs == 0 {
            self.forget(set);
        }
    }

    fn forget(&mut self, id: SetId) {
        let hash = self.sets[id as usize].hash;
        if let Ok(found) = self.by_members.find_entry(hash, |other| *other == id) {
            found.remove();
        }
        let set = &mut self.sets[id as usize];
        self.boxed_bytes -= set.boxed_bytes();
        set.members = Members::Few([NO_SEAT; FEW]);
        set.len = 0;
        set.stamp = set.stamp.wrapping_add(1);
        self.free.push(id);
    }
}
