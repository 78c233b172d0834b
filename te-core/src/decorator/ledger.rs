//! The slices and fences in flight, by token: a hash table of fixed size that allocates only when it is made.

use alloc::boxed::Box;

use crate::{Instant, Op, RegionId, RemoteRegionId, Token};

/// A slice in flight, or a fence, which has no region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) token: Token,
    pub(super) region: Option<RegionId>,
    pub(super) remote_region: RemoteRegionId,
    pub(super) op: Op,
    pub(super) accepted_at: Instant,
    /// Whether its completion is dropped and replaced by one that comes later.
    pub(super) dropped: bool,
    pub(super) canceled: bool,
}

/// Linear probing over twice as many slots as entries; a removal moves the following entries back, so there
/// are no tombstones.
#[derive(Debug)]
pub(super) struct Ledger {
    slots: Box<[Option<Entry>]>,
    len: usize,
    capacity: usize,
}

impl Ledger {
    pub(super) fn new(capacity: usize) -> Self {
        let slots = (capacity.max(1) * 2).next_power_of_two();
        Self { slots: (0..slots).map(|_| None).collect(), len: 0, capacity }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns false when the table is full.
    pub(super) fn insert(&mut self, entry: Entry) -> bool {
        if self.len == self.capacity {
            return false;
        }
        let mut at = self.home(entry.token);
        while self.slots[at].is_some() {
            at = self.next(at);
        }
        self.slots[at] = Some(entry);
        self.len += 1;
        true
    }

    pub(super) fn find_mut(&mut self, token: Token) -> Option<&mut Entry> {
        let at = self.position(token)?;
        self.slots[at].as_mut()
    }

    pub(super) fn remove(&mut self, token: Token) -> Option<Entry> {
        let mut hole = self.position(token)?;
        let entry = self.slots[hole].take();
        self.len -= 1;
        let mut at = self.next(hole);
        while let Some(follower) = &self.slots[at] {
            // An entry may move into the gap unless its home slot lies behind the gap.
            let home = self.home(follower.token);
            let distance = |to: usize| to.wrapping_sub(home) & (self.slots.len() - 1);
            if distance(hole) < distance(at) {
                self.slots.swap(hole, at);
                hole = at;
            }
            at = self.next(at);
        }
        entry
    }

    fn position(&self, token: Token) -> Option<usize> {
        let mut at = self.home(token);
        while let Some(entry) = &self.slots[at] {
            if entry.token == token {
                return Some(at);
            }
            at = self.next(at);
        }
        None
    }

    fn home(&self, token: Token) -> usize {
        // Fibonacci hashing; the upper bits are well distributed.
        (token.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize & (self.slots.len() - 1)
    }

    fn next(&self, at: usize) -> usize {
        (at + 1) & (self.slots.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;

    fn entry(token: u64) -> Entry {
        Entry {
            token: Token(token),
            region: None,
            remote_region: RemoteRegionId::new(0, 0),
            op: Op::Read,
            accepted_at: Instant::ZERO,
            dropped: false,
            canceled: false,
        }
    }

    #[test]
    fn it_agrees_with_a_set_under_many_insertions_and_removals() {
        let (mut ledger, mut model) = (Ledger::new(40), BTreeSet::new());
        let mut x = 1u64;
        for _ in 0..20_000 {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let token = (x >> 33) % 100;
            if (x >> 20).is_multiple_of(2) && !model.contains(&token) {
                let fits = model.len() < 40;
                assert_eq!(ledger.insert(entry(token)), fits);
                if fits {
                    model.insert(token);
                }
            } else {
                assert_eq!(ledger.remove(Token(token)).is_some(), model.remove(&token));
            }
            assert_eq!(ledger.len(), model.len());
            assert!((0..100).all(|t| ledger.find_mut(Token(t)).is_some() == model.contains(&t)));
        }
    }
}
