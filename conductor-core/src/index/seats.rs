//! Owners as bits: every owner that holds something has a seat, the number of its bit in the holder sets.
//!
//! A clear takes the seat away from its owner in O(1). The seat is dead until no set has its bit any more;
//! then it may become another owner's.

use alloc::vec::Vec;

use hashbrown::HashMap;

use super::Digest;
use crate::OwnerId;

type Hasher = foldhash::fast::FixedState;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Live,
    Dead,
}

#[derive(Debug)]
pub(crate) struct Seat {
    pub(crate) owner: OwnerId,
    pub(crate) digest: Digest,
    /// Unique for every time that a seat is given to an owner.
    pub(crate) tenure: u64,
    /// Pairs that are assumed of the owner.
    pub(crate) assumed: usize,
    state: State,
}

#[derive(Debug)]
pub(crate) struct Seats {
    seats: Vec<Seat>,
    by_owner: HashMap<OwnerId, u32, Hasher>,
    free: Vec<u32>,
    seats_max: usize,
    tenures: u64,
    dead: usize,
    holey_count: usize,
    /// Seats of owners.
    live: Vec<u64>,
    /// Seats of owners that have no block without its parent.
    regular: Vec<u64>,
    /// Seats of owners that may have one.
    holey: Vec<u64>,
}

/// A fixed mix of a key for digests: the same in every Conductor.
#[inline]
pub(crate) const fn digest_of(hash: u64) -> u64 {
    let wide = (hash ^ 0xa076_1d64_78bd_642f) as u128 * 0xe703_7ed1_a0b4_28db;
    (wide >> 64) as u64 ^ wide as u64
}

fn set(mask: &mut [u64], seat: u32, on: bool) {
    let (at, bit) = (seat as usize / 64, 1 << (seat % 64));
    if on {
        mask[at] |= bit;
    } else {
        mask[at] &= !bit;
    }
}

fn is_set(mask: &[u64], seat: u32) -> bool {
    mask[seat as usize / 64] & (1 << (seat % 64)) != 0
}

impl Seats {
    pub(crate) fn new(owners_max: u32) -> Self {
        Self {
            seats: Vec::new(),
            by_owner: HashMap::with_hasher(Hasher::with_seed(0)),
            free: Vec::new(),
            seats_max: owners_max as usize,
            tenures: 0,
            dead: 0,
            holey_count: 0,
            live: Vec::new(),
            regular: Vec::new(),
            holey: Vec::new(),
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.seats.capacity() * size_of::<Seat>()
            + self.by_owner.allocation_size()
            + (self.live.capacity() + self.regular.capacity() + self.holey.capacity()) * size_of::<u64>()
            + self.free.capacity() * size_of::<u32>()
    }

    pub(crate) fn of(&self, owner: OwnerId) -> Option<u32> {
        self.by_owner.get(&owner).copied()
    }

    /// The seat of an owner, a new one when it has none; none when there are too many.
    pub(crate) fn of_or_new(&mut self, owner: OwnerId) -> Option<u32> {
        if let Some(seat) = self.of(owner) {
            return Some(seat);
        }
        self.tenures += 1;
        let fresh =
            Seat { owner, digest: Digest::default(), tenure: self.tenures, assumed: 0, state: State::Live };
        let seat = match self.free.pop() {
            Some(seat) => {
                self.seats[seat as usize] = fresh;
                seat
            }
            None if self.seats.len() >= self.seats_max => return None,
            None => {
                self.seats.push(fresh);
                let words = self.seats.len().div_ceil(64);
                for mask in [&mut self.live, &mut self.regular, &mut self.holey] {
                    mask.resize(words, 0);
                }
                (self.seats.len() - 1) as u32
            }
        };
        set(&mut self.live, seat, true);
        set(&mut self.regular, seat, true);
        self.by_owner.insert(owner, seat);
        Some(seat)
    }

    /// The owner has nothing any more; true when the seat has to be swept.
    pub(crate) fn clear(&mut self, owner: OwnerId) -> bool {
        let Some(seat) = self.by_owner.remove(&owner) else { return false };
        self.heal(seat);
        set(&mut self.live, seat, false);
        set(&mut self.regular, seat, false);
        let of = &mut self.seats[seat as usize];
        let held = of.digest.blocks > 0;
        of.digest = Digest::default();
        of.assumed = 0;
        if held {
            of.state = State::Dead;
            self.dead += 1;
        } else {
            of.state = State::Free;
            self.free.push(seat);
        }
        held
    }

    /// No set has the seat any more.
    pub(crate) fn swept(&mut self, seat: u32) {
        let of = &mut self.seats[seat as usize];
        if of.state == State::Dead {
            of.state = State::Free;
            self.dead -= 1;
            self.free.push(seat);
        }
    }

    pub(crate) fn dead(&self) -> usize {
        self.dead
    }

    /// Writes the dead seats into a mask.
    pub(crate) fn dead_into(&self, mask: &mut Vec<u64>) {
        mask.clear();
        mask.resize(self.live.len(), 0);
        for (seat, of) in self.seats.iter().enumerate() {
            if of.state == State::Dead {
                set(mask, seat as u32, true);
            }
        }
    }

    #[inline]
    pub(crate) fn get(&self, seat: u32) -> &Seat {
        &self.seats[seat as usize]
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, seat: u32) -> &mut Seat {
        &mut self.seats[seat as usize]
    }

    pub(crate) fn owners(&self) -> impl Iterator<Item = (u32, &Seat)> + '_ {
        self.seats
            .iter()
            .enumerate()
            .filter(|(_, seat)| seat.state == State::Live)
            .map(|(at, seat)| (at as u32, seat))
    }

    #[inline]
    pub(crate) fn add(&mut self, seat: u32, hash: u64) {
        let digest = &mut self.seats[seat as usize].digest;
        digest.blocks += 1;
        digest.sum = digest.sum.wrapping_add(digest_of(hash));
    }

    pub(crate) fn add_many(&mut self, seat: u32, blocks: Digest) {
        let digest = &mut self.seats[seat as usize].digest;
        digest.blocks += blocks.blocks;
        digest.sum = digest.sum.wrapping_add(blocks.sum);
    }

    /// The owner has one block less; without blocks it has no holes either.
    #[inline]
    pub(crate) fn subtract(&mut self, seat: u32, hash: u64) {
        let digest = &mut self.seats[seat as usize].digest;
        digest.blocks = digest.blocks.saturating_sub(1);
        digest.sum = digest.sum.wrapping_sub(digest_of(hash));
        if digest.blocks == 0 {
            self.heal(seat);
        }
    }

    /// The owner may have a block without its parent. True when that is new.
    pub(crate) fn puncture(&mut self, seat: u32) -> bool {
        if !is_set(&self.live, seat) || is_set(&self.holey, seat) {
            return false;
        }
        set(&mut self.holey, seat, true);
        set(&mut self.regular, seat, false);
        self.holey_count += 1;
        true
    }

    /// The owner has the parent of each of its blocks.
    pub(crate) fn heal(&mut self, seat: u32) {
        if is_set(&self.holey, seat) {
            set(&mut self.holey, seat, false);
            set(&mut self.regular, seat, is_set(&self.live, seat));
            self.holey_count -= 1;
        }
    }

    pub(crate) fn is_holey(&self, seat: u32) -> bool {
        is_set(&self.holey, seat)
    }

    pub(crate) fn holey_count(&self) -> usize {
        self.holey_count
    }

    #[inline]
    pub(crate) fn live(&self) -> &[u64] {
        &self.live
    }

    #[inline]
    pub(crate) fn regular(&self) -> &[u64] {
        &self.regular
    }

    #[inline]
    pub(crate) fn holey(&self) -> &[u64] {
        &self.holey
    }

    /// Whether every bit of every set is a regular owner's, so that different sets differ in regular owners.
    #[inline]
    pub(crate) fn all_regular(&self) -> bool {
        self.dead == 0 && self.holey_count == 0
    }
}
