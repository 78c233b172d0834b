//! The hash table of keys: slab indices, with 32 bits of each hash.
//!
//! It grows when it is full, and shrinks when three quarters of it are empty. Shrinking moves a few slots
//! with every removal and every timeout, so that no call waits for a million moves: until the last slot has
//! moved there are two tables, and what is not found in the new one is looked up in the old.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;

use hashbrown::HashTable;

/// Smaller tables are not shrunk.
const BUCKETS_MIN: usize = 4_096;
/// Buckets of a table that is too large that are moved per removal: the table is empty long before the next
/// one has to shrink.
const BUCKETS_PER_REMOVAL: usize = 16;
/// The same per timeout: some tens of microseconds.
pub(crate) const BUCKETS_PER_TIMEOUT: usize = 2_048;

#[derive(Clone, Copy, Debug)]
struct Slot {
    index: u32,
    hash: u32,
}

/// The memory of a slot: the table takes one more byte per slot.
pub(crate) const SLOT_BYTES: usize = size_of::<Slot>() + 1;

pub(crate) struct Table {
    slots: HashTable<Slot>,
    leaving: Option<Box<Leaving>>,
}

/// A table that is too large and is being emptied.
struct Leaving {
    slots: HashTable<Slot>,
    /// The first bucket that may contain an index.
    next: usize,
}

impl Table {
    pub(crate) const fn new() -> Self {
        Self { slots: HashTable::new(), leaving: None }
    }

    /// Makes room for this many more.
    pub(crate) fn reserve(&mut self, more: usize) {
        self.slots.reserve(more, |slot| spread(slot.hash));
    }

    pub(crate) fn find(&self, hash: u32, is: impl Fn(u32) -> bool) -> Option<u32> {
        let same = |slot: &Slot| slot.hash == hash && is(slot.index);
        let found = self.slots.find(spread(hash), same).or_else(|| {
            let leaving = self.leaving.as_ref()?;
            leaving.slots.find(spread(hash), same)
        });
        found.map(|slot| slot.index)
    }

    /// Adds an index that is not in the table.
    pub(crate) fn insert(&mut self, hash: u32, index: u32) {
        self.slots.insert_unique(spread(hash), Slot { index, hash }, |slot| spread(slot.hash));
    }

    /// Removes an index that is in the table.
    pub(crate) fn remove(&mut self, hash: u32, index: u32) {
        let is = |slot: &Slot| slot.index == index;
        if let Ok(slot) = self.slots.find_entry(spread(hash), is) {
            slot.remove();
        } else if let Some(leaving) = &mut self.leaving
            && let Ok(slot) = leaving.slots.find_entry(spread(hash), is)
        {
            slot.remove();
        }
        let (len, buckets) = (self.slots.len(), self.slots.num_buckets());
        if self.leaving.is_some() {
            self.shrink(BUCKETS_PER_REMOVAL);
        } else if buckets > BUCKETS_MIN && len < buckets / 4 {
            let slots = core::mem::replace(&mut self.slots, HashTable::with_capacity(buckets * 3 / 8));
            self.leaving = Some(Box::new(Leaving { slots, next: 0 }));
        }
    }

    /// The indices, in no particular order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> {
        let leaving = self.leaving.iter().flat_map(|leaving| leaving.slots.iter());
        self.slots.iter().chain(leaving).map(|slot| slot.index)
    }

    /// Number of indices.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() + self.leaving.as_ref().map_or(0, |leaving| leaving.slots.len())
    }

    pub(crate) const fn is_shrinking(&self) -> bool {
        self.leaving.is_some()
    }

    /// Continues to shrink, if shrinking is in progress: moves `buckets` buckets.
    pub(crate) fn shrink(&mut self, buckets: usize) {
        let Some(leaving) = &mut self.leaving else { return };
        let end = leaving.slots.num_buckets().min(leaving.next + buckets);
        for bucket in leaving.next..end {
            if let Ok(slot) = leaving.slots.get_bucket_entry(bucket) {
                let (slot, _) = slot.remove();
                self.slots.insert_unique(spread(slot.hash), slot, |slot| spread(slot.hash));
            }
        }
        leaving.next = end;
        if end == leaving.slots.num_buckets() || leaving.slots.is_empty() {
            self.leaving = None;
        }
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.slots.allocation_size()
            + self.leaving.as_ref().map_or(0, |leaving| leaving.slots.allocation_size())
    }
}

/// What is in it, whatever its history was.
impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut all: Vec<u32> = self.iter().collect();
        all.sort_unstable();
        f.debug_list().entries(all).finish()
    }
}

/// 64 bits for the hash table from the 32 that slots keep: it takes the bucket from the low end and the tag
/// from the high end.
const fn spread(hash: u32) -> u64 {
    (hash as u64) << 32 | hash as u64
}

#[cfg(test)]
mod tests {
    use alloc::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn a_table_that_shrinks_finds_what_is_there_and_nothing_else(
            steps in prop::collection::vec((any::<bool>(), 1u32..20_000, 0usize..3_000), 1..20),
        ) {
            // Hashes that collide now and then.
            let hash = |index: u32| index.wrapping_mul(0x9e37_79b9) >> 8;
            let (mut table, mut model, mut end) = (Table::new(), BTreeSet::new(), 0);
            for (adds, count, buckets) in steps {
                for turn in 0..count {
                    if adds {
                        table.insert(hash(end), end);
                        model.insert(end);
                        end += 1;
                    } else if let Some(&index) = model.range(turn.wrapping_mul(7_919) % end.max(1)..).next() {
                        model.remove(&index);
                        table.remove(hash(index), index);
                    }
                }
                table.shrink(buckets);
                for index in 0..end {
                    let found = table.find(hash(index), |at| at == index);
                    prop_assert_eq!(found, model.contains(&index).then_some(index));
                }
            }
            while table.is_shrinking() {
                table.shrink(1_000);
            }
            prop_assert_eq!(table.slots.len(), model.len());
        }
    }

    #[test]
    fn it_shrinks_in_small_steps_as_slots_go_one_by_one() {
        const MANY: u32 = 500_000;
        let (mut table, hash) = (Table::new(), |index: u32| index.wrapping_mul(0x9e37_79b9));
        (0..MANY).for_each(|index| table.insert(hash(index), index));
        let full = table.memory_bytes();
        for index in 0..MANY {
            let before = table.slots.len();
            table.remove(hash(index), index);
            if before > 0 {
                let moved = (table.slots.len() + 1).saturating_sub(before);
                assert!(moved <= BUCKETS_PER_REMOVAL, "{moved} at once");
            }
        }
        while table.is_shrinking() {
            table.shrink(BUCKETS_PER_TIMEOUT);
        }
        assert!(table.memory_bytes() < full / 50, "{} of {full}", table.memory_bytes());
    }
}
