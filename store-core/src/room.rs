//! Which segments may have room: per segment the most bytes that are worth requesting, and a search for the
//! first segment with enough of them in logarithmic time.
//!
//! The number is an upper bound and may be too high: it starts at the segment's length, is lowered when the
//! segment's allocator refuses, and is raised when something is freed there. So a put that finds room at its
//! first try changes nothing here.

use alloc::vec;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

/// Bounds by position in the list of segments.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Rooms {
    /// A binary tree without pointers: the root at 1, the children of `n` at `2 n` and `2 n + 1`, the bounds
    /// from `width` on; an inner node is the maximum of its children.
    tree: Vec<u64>,
    width: usize,
    len: usize,
}

impl Rooms {
    pub(crate) fn push(&mut self, bound: u64) {
        if self.len == self.width {
            let mut bounds: Vec<u64> = self.bounds().to_vec();
            bounds.push(bound);
            self.build(&bounds);
        } else {
            self.len += 1;
            self.set(self.len - 1, bound);
        }
    }

    pub(crate) fn remove(&mut self, at: usize) {
        let mut bounds: Vec<u64> = self.bounds().to_vec();
        bounds.remove(at);
        self.build(&bounds);
    }

    pub(crate) fn bound(&self, at: usize) -> u64 {
        self.tree[self.width + at]
    }

    /// The largest bound; 0 if there are no segments.
    pub(crate) fn most(&self) -> u64 {
        self.tree.get(1).copied().unwrap_or(0)
    }

    pub(crate) fn set(&mut self, at: usize, bound: u64) {
        let mut node = self.width + at;
        let mut value = bound;
        while self.tree[node] != value {
            self.tree[node] = value;
            if node == 1 {
                return;
            }
            value = value.max(self.tree[node ^ 1]);
            node /= 2;
        }
    }

    /// The first position from `at` on with a bound of at least `len`; `len` is not 0.
    pub(crate) fn next(&self, at: usize, len: u64) -> Option<usize> {
        if at >= self.len {
            return None;
        }
        let mut node = self.width + at;
        // Go up until this node, or one to its right, is large enough.
        while self.tree[node] < len {
            while node & 1 == 1 {
                node /= 2;
            }
            if node == 0 {
                return None;
            }
            node += 1;
        }
        while node < self.width {
            node *= 2;
            node += usize::from(self.tree[node] < len);
        }
        Some(node - self.width)
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.tree.len() * size_of::<u64>()
    }

    fn bounds(&self) -> &[u64] {
        self.tree.get(self.width..self.width + self.len).unwrap_or_default()
    }

    fn build(&mut self, bounds: &[u64]) {
        self.len = bounds.len();
        self.width = self.len.next_power_of_two();
        self.tree = vec![0; 2 * self.width];
        self.tree[self.width..][..bounds.len()].copy_from_slice(bounds);
        for node in (1..self.width).rev() {
            self.tree[node] = self.tree[2 * node].max(self.tree[2 * node + 1]);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn it_finds_what_a_search_of_the_list_finds(steps in prop::collection::vec((0u8..8, any::<usize>(), 0u64..5), 1..200)) {
            let (mut rooms, mut list) = (Rooms::default(), Vec::new());
            for (what, pick, bound) in steps {
                match (what, list.len()) {
                    (0..3, _) | (_, 0) => {
                        rooms.push(bound);
                        list.push(bound);
                    }
                    (3, len) => {
                        rooms.remove(pick % len);
                        list.remove(pick % len);
                    }
                    (_, len) => {
                        rooms.set(pick % len, bound);
                        list[pick % len] = bound;
                    }
                }
                prop_assert_eq!(rooms.most(), list.iter().copied().max().unwrap_or(0));
                for at in 0..=list.len() {
                    for len in 1..6 {
                        let wanted = (at..list.len()).find(|at| list[*at] >= len);
                        prop_assert_eq!(rooms.next(at, len), wanted, "{} from {} in {:?}", len, at, &list);
                    }
                }
                for (at, bound) in list.iter().enumerate() {
                    prop_assert_eq!(rooms.bound(at), *bound);
                }
            }
        }
    }
}
