//! Links and marks, 16 bytes per object, and lists through them.

use crate::slab::{NIL, Values};
use serde::{Deserialize, Serialize};

/// What a policy stores per object: 16 bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Node {
    before: u32,
    after: u32,
    stamp_low: u32,
    stamp_high: u16,
    /// The list that it is on, for policies with several.
    pub(crate) class: u8,
    /// A mark of the policy.
    pub(crate) marked: bool,
}

const _: () = assert!(size_of::<Node>() == 16);

impl Node {
    const FREE: Self = Self { before: NIL, after: NIL, stamp_low: 0, stamp_high: 0, class: 0, marked: false };

    /// The stamp that [`Self::set_stamp`] was given, modulo 2^48.
    pub(crate) const fn stamp(&self) -> u64 {
        (self.stamp_high as u64) << 32 | self.stamp_low as u64
    }

    /// 48 bits: a count of operations, which at a million per second lasts nine years.
    pub(crate) const fn set_stamp(&mut self, stamp: u64) {
        (self.stamp_low, self.stamp_high) = (stamp as u32, (stamp >> 32) as u16);
    }
}

impl crate::snapshot::Packed for Node {
    const VACANT: Self = Self::FREE;

    fn pack(&self, to: &mut alloc::vec::Vec<u8>) {
        let Self { before, after, stamp_low, stamp_high, class, marked } = *self;
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&before.to_le_bytes());
        bytes[4..8].copy_from_slice(&after.to_le_bytes());
        bytes[8..12].copy_from_slice(&stamp_low.to_le_bytes());
        bytes[12..14].copy_from_slice(&stamp_high.to_le_bytes());
        (bytes[14], bytes[15]) = (class, u8::from(marked));
        to.extend_from_slice(&bytes);
    }

    fn unpack(from: &mut &[u8]) -> Option<Self> {
        use crate::snapshot::take;
        let (before, after, stamp_low) = (take!(u32, from), take!(u32, from), take!(u32, from));
        let (stamp_high, class, marked) = (take!(u16, from), take!(u8, from), take!(u8, from) != 0);
        Some(Self { before, after, stamp_low, stamp_high, class, marked })
    }
}

/// The nodes of all objects, whether they are candidates or not.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Nodes {
    nodes: Values<Node>,
    looks: u64,
}

impl Nodes {
    pub(crate) const fn new() -> Self {
        Self { nodes: Values::new(Node::FREE), looks: 0 }
    }

    /// Makes a node for an object.
    pub(crate) fn put(&mut self, index: u32) {
        self.nodes.put(index, Node::FREE);
    }

    /// A page of objects was freed.
    pub(crate) fn close(&mut self, page: usize) {
        self.nodes.close(page);
    }

    pub(crate) fn node(&self, index: u32) -> &Node {
        &self.nodes[index]
    }

    pub(crate) fn node_mut(&mut self, index: u32) -> &mut Node {
        &mut self.nodes[index]
    }

    /// The next node on the list that it is on.
    pub(crate) fn after(&self, index: u32) -> Option<u32> {
        some(self.nodes[index].after)
    }

    /// A node and all nodes behind it.
    pub(crate) fn from(&self, index: Option<u32>) -> impl Iterator<Item = u32> {
        core::iter::successors(index, |index| self.after(*index))
    }

    /// Counts that eviction examined a candidate.
    pub(crate) const fn look(&mut self) {
        self.looks += 1;
    }

    /// Number of candidates examined so far.
    pub(crate) const fn looks(&self) -> u64 {
        self.looks
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.nodes.memory_bytes()
    }
}

/// A doubly linked list. A node must be on at most one list.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct List {
    head: u32,
    tail: u32,
    len: u32,
}

impl List {
    pub(crate) const EMPTY: Self = Self { head: NIL, tail: NIL, len: 0 };

    pub(crate) const fn front(&self) -> Option<u32> {
        some(self.head)
    }

    pub(crate) const fn len(&self) -> u32 {
        self.len
    }

    /// The nodes from the front.
    pub(crate) fn iter(&self, nodes: &Nodes) -> impl Iterator<Item = u32> {
        nodes.from(self.front())
    }

    pub(crate) fn push_back(&mut self, nodes: &mut Nodes, index: u32) {
        self.link(nodes, self.tail, index, NIL);
    }

    pub(crate) fn push_front(&mut self, nodes: &mut Nodes, index: u32) {
        self.link(nodes, NIL, index, self.head);
    }

    /// Inserts `index` before `at`, which is on this list.
    pub(crate) fn insert_before(&mut self, nodes: &mut Nodes, at: u32, index: u32) {
        self.link(nodes, nodes.nodes[at].before, index, at);
    }

    pub(crate) fn unlink(&mut self, nodes: &mut Nodes, index: u32) {
        let Node { before, after, .. } = nodes.nodes[index];
        self.len -= 1;
        if before == NIL {
            self.head = after;
        } else {
            nodes.nodes[before].after = after;
        }
        if after == NIL {
            self.tail = before;
        } else {
            nodes.nodes[after].before = before;
        }
    }

    fn link(&mut self, nodes: &mut Nodes, before: u32, index: u32, after: u32) {
        self.len += 1;
        if before == NIL {
            self.head = index;
        } else {
            nodes.nodes[before].after = index;
        }
        if after == NIL {
            self.tail = index;
        } else {
            nodes.nodes[after].before = index;
        }
        let node = &mut nodes.nodes[index];
        (node.before, node.after) = (before, after);
    }
}

const fn some(index: u32) -> Option<u32> {
    if index == NIL { None } else { Some(index) }
}
