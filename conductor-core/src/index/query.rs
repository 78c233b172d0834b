//! The longest prefix of a chain that each owner has.

use alloc::vec::Vec;

use super::{EMPTY, Index, SetId, spread};
use crate::{BlockKey, OwnerId, OwnerMatch};

/// A piece of the chain at whose ends the holders differ.
#[derive(Clone, Copy, Default)]
struct Piece {
    low: usize,
    low_set: SetId,
    high: usize,
    high_set: SetId,
    /// Blocks of pieces whose middle was not fetched yet; longer ones were.
    fetched: usize,
}

/// Steps of a gallop whose blocks are fetched at the same time.
const GALLOPED: usize = 6;
/// Parts of a piece between which blocks are fetched at the same time: three halvings.
const PARTS: usize = 8;

/// Halvings of a chain of 2^32 blocks, and one.
const PIECES: usize = 33;

impl Index {
    /// For every owner that has the first block of the chain `keys`: how many blocks it has from the
    /// beginning without a gap. `keys` is a chain from its first block: the answer for an owner that is not
    /// holey rests on each key standing for all those before it. `out` is emptied first; its order is not
    /// specified. Allocates nothing when `out` has room for as many owners as there are.
    pub fn query(&self, keys: &[BlockKey], out: &mut Vec<OwnerMatch>) {
        out.clear();
        let keys = &keys[..keys.len().min(self.limits.depth_max as usize)];
        let Some(first) = keys.first() else { return };
        let first_set = self.set_at(0, *first);
        if first_set == EMPTY {
            return;
        }
        if self.seats.holey_count() > 0 {
            self.walk(keys, first_set, out);
        }
        self.search(keys, first_set, out);
    }

    /// How many blocks of the chain `keys` `owner` has from the beginning without a gap.
    #[must_use]
    pub fn matched(&self, owner: OwnerId, keys: &[BlockKey]) -> u32 {
        let Some(seat) = self.seats.of(owner) else { return 0 };
        let keys = &keys[..keys.len().min(self.limits.depth_max as usize)];
        let has = |at: usize| self.holders.contains(self.set_at(at, keys[at]), seat);
        let blocks = if self.seats.is_holey(seat) {
            (0..keys.len()).take_while(|at| has(*at)).count()
        } else {
            let mut step = 1;
            let mut low = 0;
            while low + step <= keys.len() && has(low + step - 1) {
                low += step;
                step *= 2;
            }
            let mut high = keys.len().min(low + step - 1);
            // `low` blocks are there, and what is at `high` and beyond is not or does not exist.
            while low < high {
                let middle = low + (high - low) / 2;
                if has(middle) {
                    low = middle + 1;
                } else {
                    high = middle;
                }
            }
            low
        };
        u32::try_from(blocks).unwrap_or(u32::MAX)
    }

    /// The holders of the block at this depth.
    #[inline]
    fn set_at(&self, depth: usize, key: BlockKey) -> SetId {
        match self.table.find(spread(key.0)) {
            Some(at) => {
                let entry = self.table.get(at);
                if entry.depth() as usize == depth { entry.set } else { EMPTY }
            }
            None => EMPTY,
        }
    }

    /// Lets the processor fetch where some blocks are.
    #[inline]
    fn fetch<const N: usize>(&self, keys: &[BlockKey], at: impl Fn(usize) -> usize) {
        let hashes: [u64; N] = core::array::from_fn(|n| spread(keys[at(n)].0));
        self.table.touch(&hashes);
    }

    /// Whether the same regular owners are in both sets, of which `later` has no other ones.
    #[inline]
    fn same(&self, earlier: SetId, later: SetId) -> bool {
        earlier == later
            || (!self.seats.all_regular()
                && self.holders.count(earlier, self.seats.regular())
                    == self.holders.count(later, self.seats.regular()))
    }

    /// Owners without holes: gallop to where the holders differ, then bisect.
    fn search(&self, keys: &[BlockKey], first_set: SetId, out: &mut Vec<OwnerMatch>) {
        let regular = self.seats.regular();
        let (mut low, mut low_set, mut step) = (0, first_set, 1);
        let last = keys.len() - 1;
        let mut steps = 0;
        while low < last && self.holders.any(low_set, regular) {
            if steps % GALLOPED == 0 {
                // Steps double, so that the next ones are at the beginning and twice, four times, ... `step`.
                let ahead = |at: usize| last.min(low + (step << (at + 1)) - step);
                self.fetch::<GALLOPED>(keys, ahead);
            }
            steps += 1;
            let high = last.min(low + step);
            let high_set = self.set_at(high, keys[high]);
            if !self.same(low_set, high_set) {
                self.bisect(keys, Piece { low, low_set, high, high_set, fetched: high - low }, out);
            }
            (low, low_set) = (high, high_set);
            step *= 2;
        }
        self.holders.each(low_set, regular, |seat| self.found(seat, low + 1, out));
    }

    fn bisect(&self, keys: &[BlockKey], piece: Piece, out: &mut Vec<OwnerMatch>) {
        let mut pieces = [Piece::default(); PIECES];
        let mut waiting = 0;
        let mut piece = piece;
        loop {
            let Piece { low, low_set, high, high_set, mut fetched } = piece;
            if high - low > 1 && high - low <= fetched {
                fetched = (high - low) / PARTS;
                self.fetch::<{ PARTS - 1 }>(keys, |at| low + (high - low) * (at + 1) / PARTS);
            }
            if high - low == 1 {
                self.holders
                    .each_not_in(low_set, high_set, self.seats.regular(), |seat| self.found(seat, high, out));
            } else {
                let middle = low + (high - low) / 2;
                let middle_set = self.set_at(middle, keys[middle]);
                let right = Piece { low: middle, low_set: middle_set, high, high_set, fetched };
                let (in_left, in_right) = (!self.same(low_set, middle_set), !self.same(middle_set, high_set));
                if in_left {
                    if in_right && let Some(place) = pieces.get_mut(waiting) {
                        *place = right;
                        waiting += 1;
                    }
                    piece = Piece { low, low_set, high: middle, high_set: middle_set, fetched };
                    continue;
                }
                if in_right {
                    piece = right;
                    continue;
                }
            }
            if waiting == 0 {
                return;
            }
            waiting -= 1;
            piece = pieces[waiting];
        }
    }

    /// Holey owners: block by block. `out` has nothing else yet.
    fn walk(&self, keys: &[BlockKey], first_set: SetId, out: &mut Vec<OwnerMatch>) {
        self.holders.each(first_set, self.seats.holey(), |seat| {
            // Seats until the end; then owners take their places.
            out.push(OwnerMatch { owner: OwnerId(seat), blocks: 1 });
        });
        let mut walking = out.len();
        let mut set_before = first_set;
        for (at, key) in keys.iter().enumerate().skip(1) {
            if walking == 0 {
                break;
            }
            let set = self.set_at(at, *key);
            if set != set_before {
                let mut next = 0;
                while next < walking {
                    if self.holders.contains(set, out[next].owner.0) {
                        next += 1;
                    } else {
                        walking -= 1;
                        out[next].blocks = at as u32;
                        out.swap(next, walking);
                    }
                }
                set_before = set;
            }
        }
        for found in &mut out[..walking] {
            found.blocks = keys.len() as u32;
        }
        for found in out {
            found.owner = self.seats.get(found.owner.0).owner;
        }
    }

    fn found(&self, seat: u32, blocks: usize, out: &mut Vec<OwnerMatch>) {
        out.push(OwnerMatch { owner: self.seats.get(seat).owner, blocks: blocks as u32 });
    }
}
