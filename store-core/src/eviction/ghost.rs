//! A short memory of keys that were evicted: 2 to 4 bytes per object, and no more.
//!
//! Sets of eight tags of 16 bits, the newest first; a ninth tag pushes the oldest one out. The number of tags
//! is the largest number of candidates so far, up to twice that; when fewer than an eighth as many candidates
//! are left, half of the memory is forgotten. A key is mistaken for another one with a probability of
//! 8/65,536.

use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Ghosts {
    /// The length is 0 or a power of two.
    #[serde(with = "crate::snapshot::words")]
    sets: Vec<u128>,
}

/// With fewer sets, nothing is gained by forgetting.
const SETS_MIN: usize = 1_024;
const TAGS: u32 = 8;
const TAG_BITS: u32 = u128::BITS / TAGS;

impl Ghosts {
    pub(crate) const fn new() -> Self {
        Self { sets: Vec::new() }
    }

    /// Adds a key. `candidates` is the current number of candidates.
    pub(crate) fn add(&mut self, hash: u64, candidates: u32) {
        let wanted = (candidates.div_ceil(TAGS) as usize).next_power_of_two();
        if self.sets.is_empty() {
            self.sets.resize(wanted, 0);
        }
        while self.sets.len() < wanted {
            // Each tag of a set now belongs to one of two sets; both keep it, and the wrong copy is pushed
            // out in time.
            self.sets.reserve_exact(self.sets.len());
            self.sets.extend_from_within(..);
        }
        let at = self.set(hash);
        self.sets[at] = self.sets[at] << TAG_BITS | u128::from(tag(hash));
    }

    /// Whether a key was added and not forgotten.
    pub(crate) fn has(&self, hash: u64) -> bool {
        !self.sets.is_empty() && position(self.sets[self.set(hash)], tag(hash)).is_some()
    }

    /// Forgets a key.
    pub(crate) fn remove(&mut self, hash: u64) {
        if self.sets.is_empty() {
            return;
        }
        let at = self.set(hash);
        if let Some(shift) = position(self.sets[at], tag(hash)) {
            let newer = self.sets[at] & ((1 << shift) - 1);
            // Two shifts, because a shift by all bits is not allowed.
            let older = self.sets[at] >> shift >> TAG_BITS << shift;
            self.sets[at] = newer | older;
        }
    }

    /// Adapts to the current number of candidates.
    pub(crate) fn trim(&mut self, candidates: u32) {
        let wanted = (candidates.div_ceil(TAGS) as usize).next_power_of_two();
        if self.sets.len() > SETS_MIN && self.sets.len() >= 16 * wanted {
            // Each remaining set stands for two from now on; the tags of the dropped half are forgotten.
            self.sets.truncate(self.sets.len() / 2);
            self.sets.shrink_to_fit();
        }
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.sets.capacity() * size_of::<u128>()
    }

    fn set(&self, hash: u64) -> usize {
        hash as u32 as usize & (self.sets.len() - 1)
    }
}

/// The tag, from other bits of the hash than the set. 0 is an empty place.
const fn tag(hash: u64) -> u16 {
    match (hash >> 48) as u16 {
        0 => 1,
        tag => tag,
    }
}

/// The number of bits by which the set has to be shifted for the tag to be lowest.
fn position(set: u128, tag: u16) -> Option<u32> {
    (0..TAGS).map(|place| place * TAG_BITS).find(|shift| (set >> shift) as u16 == tag)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hash(set: u64, tag: u64) -> u64 {
        tag << 48 | set
    }

    #[test]
    fn a_full_set_forgets_its_oldest() {
        let mut ghosts = Ghosts::new();
        (1..=9).for_each(|tag| ghosts.add(hash(0, tag), 1));
        assert!(!ghosts.has(hash(0, 1)) && (2..=9).all(|tag| ghosts.has(hash(0, tag))));
    }

    #[test]
    fn growing_forgets_no_key_and_memory_is_bounded() {
        let mut ghosts = Ghosts::new();
        (0..8).for_each(|at| ghosts.add(hash(at * 3, at + 1), 8));
        ghosts.add(hash(77, 99), 1_000);
        assert!((0..8).all(|at| ghosts.has(hash(at * 3, at + 1))));
        assert_eq!(ghosts.memory_bytes(), 128 * 16, "1,000 candidates: 1,024 tags");
    }

    #[test]
    fn what_many_candidates_needed_is_given_back_when_there_are_few() {
        let mut ghosts = Ghosts::new();
        ghosts.add(hash(3, 9), 1_000_000);
        let full = ghosts.memory_bytes();
        ghosts.trim(125_001);
        assert_eq!(ghosts.memory_bytes(), full, "an eighth is enough");
        (0..20).for_each(|_| ghosts.trim(0));
        assert_eq!(ghosts.memory_bytes(), SETS_MIN * 16);
        assert!(ghosts.has(hash(3, 9)), "it was not in the part that was forgotten");
    }

    proptest! {
        #[test]
        fn a_set_is_a_list_of_the_eight_newest(ops in prop::collection::vec((any::<bool>(), 1u64..20), 1..200)) {
            let (mut ghosts, mut model) = (Ghosts::new(), Vec::new());
            for (add, tag) in ops {
                if add {
                    ghosts.add(hash(0, tag), 1);
                    model.insert(0, tag);
                    model.truncate(8);
                } else {
                    ghosts.remove(hash(0, tag));
                    if let Some(at) = model.iter().position(|other| *other == tag) {
                        model.remove(at);
                    }
                }
                for tag in 1..20 {
                    prop_assert_eq!(ghosts.has(hash(0, tag)), model.contains(&tag));
                }
            }
        }
    }
}
