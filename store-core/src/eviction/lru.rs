//! Least recently used: one list, in the order of the last read.
//!
//! Approximate, because all reads within one lease count as one, when the lease begins.

use super::{Eviction, List, Nodes, Place};
use serde::{Deserialize, Serialize};

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Lru {
    list: List,
}

impl Lru {
    pub(crate) const fn new() -> Self {
        Self { list: List::EMPTY }
    }
}

impl Eviction for Lru {
    fn insert(&mut self, nodes: &mut Nodes, index: u32, _hash: u64, _place: Place) {
        self.list.push_back(nodes, index);
    }

    fn touch(&mut self, nodes: &mut Nodes, index: u32, _follows: bool) {
        self.list.unlink(nodes, index);
        self.list.push_back(nodes, index);
    }

    fn remove(&mut self, nodes: &mut Nodes, index: u32) {
        self.list.unlink(nodes, index);
    }

    /// The object was being read until now.
    fn put_back(&mut self, nodes: &mut Nodes, index: u32) {
        self.list.push_back(nodes, index);
    }

    fn victim(&mut self, nodes: &mut Nodes) -> Option<u32> {
        nodes.look();
        self.list.front()
    }

    fn evict(&mut self, nodes: &mut Nodes, index: u32, _hash: u64) {
        self.list.unlink(nodes, index);
    }

    fn len(&self) -> u32 {
        self.list.len()
    }

    fn preview(&self, nodes: &Nodes, each: &mut dyn FnMut(u32) -> bool) {
        self.list.iter(nodes).all(each);
    }
}
