//! Nodes: who lives, and which incarnations are over.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::time::Duration;

use foldhash::fast::FixedState;
use hashbrown::HashMap;
use te_core::Instant;

use crate::SegmentNo;
use crate::message::MountSegment;

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) incarnation: u64,
    /// What it proves with that it is itself.
    pub(crate) key: u64,
    pub(crate) seen: Instant,
    /// The connection that it was heard on last; 0: not known which.
    session: u64,
    /// That connection stands, as far as is known.
    pub(crate) connected: bool,
    pub(crate) segments: Vec<SegmentNo>,
}

/// A segment that went away. Until late writers are over, its name comes back only under a higher incarnation: memory
/// that is mounted again under the old one could still be written by somebody who holds the old export.
#[derive(Debug)]
struct Grave {
    name: Box<str>,
    incarnation: u64,
    until: Instant,
}

/// Nodes with segments, and graves.
#[derive(Debug)]
pub(crate) struct Nodes {
    map: HashMap<u64, Node, FixedState>,
    graves: VecDeque<Grave>,
    graves_max: usize,
    ttl: Duration,
    /// No node runs out before this.
    check_at: Option<Instant>,
}

impl Nodes {
    pub(crate) fn new(ttl: Duration, graves_max: usize) -> Self {
        Self {
            map: HashMap::with_hasher(FixedState::with_seed(0)),
            graves: VecDeque::new(),
            graves_max,
            ttl,
            check_at: None,
        }
    }

    pub(crate) fn get(&self, node: u64) -> Option<&Node> {
        self.map.get(&node)
    }

    /// Notes that a node lives, and on which connection it said so.
    pub(crate) fn heard(&mut self, now: Instant, node: u64, session: u64) {
        if let Some(node) = self.map.get_mut(&node) {
            node.seen = node.seen.max(now);
            (node.session, node.connected) = (session, true);
        }
    }

    /// A connection has ended.
    pub(crate) fn hung_up(&mut self, session: u64) {
        for node in self.map.values_mut().filter(|node| node.session == session) {
            node.connected = false;
        }
    }

    /// All, by number: the map's order is not part of the contract.
    pub(crate) fn all(&self) -> Vec<(u64, &Node)> {
        let mut all: Vec<_> = self.map.iter().map(|(no, node)| (*no, node)).collect();
        all.sort_unstable_by_key(|(no, _)| *no);
        all
    }

    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// Notes a mounted segment; its node lives.
    pub(crate) fn mounted(&mut self, now: Instant, mount: &MountSegment<'_>, segment: SegmentNo) {
        let MountSegment { node, incarnation, key, .. } = *mount;
        let fresh = Node { incarnation, key, seen: now, session: 0, connected: true, segments: Vec::new() };
        let entry = self.map.entry(node).or_insert(fresh);
        (entry.incarnation, entry.key, entry.seen) = (incarnation, key, now);
        entry.segments.push(segment);
        let end = now + self.ttl;
        self.check_at = Some(self.check_at.map_or(end, |at| at.min(end)));
    }

    /// Notes that a segment is gone. A node without segments is forgotten.
    pub(crate) fn unmounted(
        &mut self,
        node: u64,
        segment: SegmentNo,
        name: Box<str>,
        incarnation: u64,
        until: Instant,
    ) {
        if let Some(entry) = self.map.get_mut(&node) {
            entry.segments.retain(|no| *no != segment);
            if entry.segments.is_empty() {
                self.map.remove(&node);
            }
        }
        if self.graves.len() >= self.graves_max {
            self.graves.pop_front();
        }
        self.graves.push_back(Grave { name, incarnation, until });
    }

    /// The highest incarnation of a name that is over and may still be written to.
    pub(crate) fn buried(&self, now: Instant, name: &str) -> Option<u64> {
        let graves = self.graves.iter().filter(|grave| *grave.name == *name && now < grave.until);
        graves.map(|grave| grave.incarnation).max()
    }

    /// Nodes that have been silent for too long.
    pub(crate) fn expired(&mut self, now: Instant) -> Vec<u64> {
        if self.check_at.is_none_or(|at| now < at) {
            return Vec::new();
        }
        while self.graves.front().is_some_and(|grave| grave.until <= now) {
            self.graves.pop_front();
        }
        let over = |node: &Node| node.seen + self.ttl <= now;
        let mut expired: Vec<u64> =
            self.map.iter().filter(|(_, node)| over(node)).map(|(id, _)| *id).collect();
        // The map's order is not part of the contract.
        expired.sort_unstable();
        self.check_at = self.map.values().filter(|node| !over(node)).map(|node| node.seen + self.ttl).min();
        expired
    }

    /// When a node runs out, at the earliest.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.check_at
    }
}
