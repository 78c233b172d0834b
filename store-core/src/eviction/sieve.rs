//! SIEVE (Zhang et al., NSDI'24): a queue that is never reordered, one bit per object, and a hand.
//!
//! The hand moves from the oldest to the newest, clears the bit of each object that has one, and evicts the
//! first object without. It stays where it stopped, so that objects that came behind it have to be read
//! before it returns to them.
//!
//! Made for web caches. On the published traces of KV-cache blocks it loses to LRU wherever the pool is small
//! (see [`super::trial`]): a prefix comes back a few times, then never, and the bit keeps it for a whole turn
//! of the hand.

use super::{Eviction, List, Nodes, Place};
use serde::{Deserialize, Serialize};

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Sieve {
    list: List,
    /// The object that is examined next; none: the oldest.
    hand: Option<u32>,
}

impl Sieve {
    pub(crate) const fn new() -> Self {
        Self { list: List::EMPTY, hand: None }
    }

    fn take(&mut self, nodes: &mut Nodes, index: u32) {
        if self.hand == Some(index) {
            self.hand = nodes.after(index);
        }
        self.list.unlink(nodes, index);
    }
}

impl Eviction for Sieve {
    fn insert(&mut self, nodes: &mut Nodes, index: u32, _hash: u64, _place: Place) {
        nodes.node_mut(index).marked = false;
        self.list.push_back(nodes, index);
    }

    fn touch(&mut self, nodes: &mut Nodes, index: u32, _follows: bool) {
        nodes.node_mut(index).marked = true;
    }

    fn remove(&mut self, nodes: &mut Nodes, index: u32) {
        self.take(nodes, index);
    }

    /// Right behind the hand, where it would be if the hand had passed it.
    fn put_back(&mut self, nodes: &mut Nodes, index: u32) {
        nodes.node_mut(index).marked = false;
        match self.hand {
            Some(hand) => self.list.insert_before(nodes, hand, index),
            None => self.list.push_back(nodes, index),
        }
    }

    fn victim(&mut self, nodes: &mut Nodes) -> Option<u32> {
        // After one round every bit is cleared.
        loop {
            let index = self.hand.or(self.list.front())?;
            nodes.look();
            if !core::mem::take(&mut nodes.node_mut(index).marked) {
                self.hand = Some(index);
                return Some(index);
            }
            self.hand = nodes.after(index);
        }
    }

    fn evict(&mut self, nodes: &mut Nodes, index: u32, _hash: u64) {
        self.take(nodes, index);
    }

    fn len(&self) -> u32 {
        self.list.len()
    }

    /// First the objects without the bit, from the hand on; then the others.
    fn preview(&self, nodes: &Nodes, each: &mut dyn FnMut(u32) -> bool) {
        let ahead = || nodes.from(self.hand);
        let behind = || self.list.iter(nodes).take_while(|index| Some(*index) != self.hand);
        let round = || ahead().chain(behind());
        let _ = round().filter(|index| !nodes.node(*index).marked).all(&mut *each)
            && round().filter(|index| nodes.node(*index).marked).all(each);
    }
}
