//! First in, first out. Reads have no effect.

use super::{Eviction, List, Nodes, Place};
use serde::{Deserialize, Serialize};

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Fifo {
    list: List,
}

impl Fifo {
    pub(crate) const fn new() -> Self {
        Self { list: List::EMPTY }
    }
}

impl Eviction for Fifo {
    fn insert(&mut self, nodes: &mut Nodes, index: u32, _hash: u64, _place: Place) {
        self.list.push_back(nodes, index);
    }

    fn touch(&mut self, _nodes: &mut Nodes, _index: u32, _follows: bool) {}

    fn remove(&mut self, nodes: &mut Nodes, index: u32) {
        self.list.unlink(nodes, index);
    }

    /// It is older than every other candidate: it was next when it was removed.
    fn put_back(&mut self, nodes: &mut Nodes, index: u32) {
        self.list.push_front(nodes, index);
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
