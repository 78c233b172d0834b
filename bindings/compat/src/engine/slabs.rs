//! [`Slabs`]: divides arenas into slabs of powers of two, and joins free neighbours again.
//!
//! It only computes offsets; the memory belongs to [`managed`](super::managed).

use std::collections::{BTreeSet, HashMap};

/// The smallest slab, bytes.
pub(super) const SLAB_BYTES_MIN: u64 = 8 << 10;
/// The largest slab, bytes. Longer buffers are allocated alone.
pub(super) const SLAB_BYTES_MAX: u64 = 256 << 20;
/// Number of sizes: each is twice the one before.
const CLASSES: usize = (SLAB_BYTES_MAX / SLAB_BYTES_MIN).ilog2() as usize + 1;

/// A buddy allocator over arenas whose addresses it is told. A slab is as long as its class says, and begins
/// at a multiple of that length in its arena.
#[derive(Debug)]
pub(super) struct Slabs {
    /// Free slabs by class, each by its address. The lowest one is given out first.
    free: [BTreeSet<u64>; CLASSES],
    /// Slabs that are given out, and their classes.
    used: HashMap<u64, usize>,
    /// Arenas by their first address, and their lengths.
    arenas: Vec<(u64, u64)>,
}

impl Slabs {
    pub(super) fn new() -> Self {
        Self { free: [const { BTreeSet::new() }; CLASSES], used: HashMap::new(), arenas: Vec::new() }
    }

    /// Adds an arena. What remains of `len` beyond a multiple of the smallest slab is not used.
    pub(super) fn add_arena(&mut self, base: u64, len: u64) {
        self.arenas.push((base, len));
        let (mut at, end) = (base, base + len);
        // The longest slabs that the rest of the arena has room for, each at a multiple of its own length.
        for class in (0..CLASSES).rev() {
            while end - at >= bytes_of(class) && (at - base).is_multiple_of(bytes_of(class)) {
                self.free[class].insert(at);
                at += bytes_of(class);
            }
        }
    }

    /// Takes a slab of at least `len` bytes. `None`: the arenas have none; or `len` is more than the longest
    /// slab.
    pub(super) fn take(&mut self, len: u64) -> Option<u64> {
        let wanted = class_of(len)?;
        let from = (wanted..CLASSES).find(|class| !self.free[*class].is_empty())?;
        let addr = self.free[from].pop_first()?;
        for class in (wanted..from).rev() {
            self.free[class].insert(addr + bytes_of(class));
        }
        self.used.insert(addr, wanted);
        Some(addr)
    }

    /// Returns a slab, and joins it with its free neighbours. `false`: no slab that is in use begins there.
    pub(super) fn put(&mut self, addr: u64) -> bool {
        let Some(mut class) = self.used.remove(&addr) else { return false };
        let Some(&(base, _)) = self.arenas.iter().find(|(base, len)| (*base..base + len).contains(&addr))
        else {
            return false;
        };
        let mut addr = addr;
        while class + 1 < CLASSES {
            let buddy = base + ((addr - base) ^ bytes_of(class));
            if !self.free[class].remove(&buddy) {
                break;
            }
            addr = addr.min(buddy);
            class += 1;
        }
        self.free[class].insert(addr);
        true
    }
}

/// Length of the slabs of a class.
const fn bytes_of(class: usize) -> u64 {
    SLAB_BYTES_MIN << class
}

/// The class of the shortest slabs that have `len` bytes.
fn class_of(len: u64) -> Option<usize> {
    (len <= SLAB_BYTES_MAX)
        .then(|| len.max(SLAB_BYTES_MIN).next_power_of_two().ilog2() - SLAB_BYTES_MIN.ilog2())
        .map(|class| class as usize)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BASE: u64 = 0x7f00_0000_1000;

    fn slabs(len: u64) -> Slabs {
        let mut slabs = Slabs::new();
        slabs.add_arena(BASE, len);
        slabs
    }

    #[test]
    fn lengths_are_rounded_up_to_the_next_class() {
        for (len, class) in [(0, 0), (1, 0), (8192, 0), (8193, 1), (64 << 20, 13), (SLAB_BYTES_MAX, 15)] {
            assert_eq!(class_of(len), Some(class), "{len}");
        }
        assert_eq!(class_of(SLAB_BYTES_MAX + 1), None);
        assert_eq!(class_of(u64::MAX), None);
    }

    #[test]
    fn the_first_slab_begins_at_the_arena() {
        let mut slabs = slabs(2 << 30);
        assert_eq!(slabs.take(1), Some(BASE));
        assert_eq!(slabs.take(64 << 20), Some(BASE + (64 << 20)));
    }

    #[test]
    fn an_arena_serves_all_of_its_bytes_and_again_after_they_came_back() {
        let mut slabs = slabs(2 << 30);
        for _ in 0..2 {
            let taken: Vec<u64> = std::iter::from_fn(|| slabs.take(SLAB_BYTES_MAX)).collect();
            assert_eq!(taken.len(), 8);
            assert!(taken.into_iter().all(|addr| slabs.put(addr)));
            let small: Vec<u64> = (0..32).filter_map(|_| slabs.take(64 << 20)).collect();
            assert_eq!((small.len(), slabs.take(1)), (32, None));
            assert!(small.into_iter().rev().all(|addr| slabs.put(addr)));
        }
    }

    #[test]
    fn a_slab_is_returned_once_and_by_its_own_address() {
        let mut slabs = slabs(1 << 20);
        let addr = slabs.take(16 << 10).unwrap();
        assert!(!slabs.put(addr + 8192) && !slabs.put(0) && slabs.used.contains_key(&addr));
        assert!(slabs.put(addr) && !slabs.put(addr) && slabs.used.is_empty());
    }

    #[test]
    fn an_arena_that_is_no_power_of_two_is_divided_to_its_last_slab() {
        let mut slabs = slabs((1 << 20) + (24 << 10) + 100);
        let taken = std::iter::from_fn(|| slabs.take(1)).count();
        assert_eq!(taken, 128 + 3);
    }

    proptest! {
        #[test]
        fn slabs_never_overlap_and_all_come_back(ops in prop::collection::vec((any::<bool>(), 0..64_u64 << 10), 1..200)) {
            let mut slabs = slabs(1 << 20);
            let mut live: Vec<(u64, u64)> = Vec::new();
            for (take, len) in ops {
                if take {
                    if let Some(addr) = slabs.take(len) {
                        let end = addr + len.max(1);
                        prop_assert!(addr >= BASE && end <= BASE + (1 << 20));
                        prop_assert!(live.iter().all(|(from, to)| end <= *from || addr >= *to));
                        live.push((addr, addr + bytes_of(class_of(len).unwrap())));
                    }
                } else if !live.is_empty() {
                    let (addr, _) = live.swap_remove(len as usize % live.len());
                    prop_assert!(slabs.put(addr));
                }
            }
            for (addr, _) in live {
                prop_assert!(slabs.put(addr));
            }
            // All neighbours were joined: the arena is whole again.
            prop_assert_eq!(slabs.take(1 << 20), Some(BASE));
        }
    }
}
