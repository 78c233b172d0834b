//! Nodes: which are alive, and which incarnations are over.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::time::Duration;

use foldhash::fast::FixedState;
use serde::{Deserialize, Serialize};
use te_core::Instant;

use crate::map::Map;
use crate::message::MountSegment;
use crate::{Incarnation, NodeId, SegmentNo};

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Node {
    pub(crate) incarnation: Incarnation,
    /// The key with which the node proves its identity.
    pub(crate) key: u64,
    pub(crate) seen: Instant,
    /// The connection that it was last heard on; 0: unknown.
    session: u64,
    /// That connection is open, as far as is known.
    pub(crate) connected: bool,
    pub(crate) segments: Vec<SegmentNo>,
}

/// A segment that was unmounted. Until late writes are over, its name can be mounted again only under a
/// higher incarnation: memory that is mounted again under the old one could still be written by a process
/// that holds the old export.
#[derive(Debug, Serialize, Deserialize)]
struct PastMount {
    name: Box<str>,
    incarnation: Incarnation,
    until: Instant,
}

/// Nodes with segments, and names of unmounted segments.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Nodes {
    map: Map<NodeId, Node, FixedState>,
    past_mounts: VecDeque<PastMount>,
    past_mounts_max: usize,
    ttl: Duration,
    /// No node expires before this time.
    check_at: Option<Instant>,
}

impl Nodes {
    pub(crate) fn new(ttl: Duration, past_mounts_max: usize) -> Self {
        Self { map: Map::with_seed(0), past_mounts: VecDeque::new(), past_mounts_max, ttl, check_at: None }
    }

    pub(crate) fn get(&self, node: NodeId) -> Option<&Node> {
        self.map.get(&node)
    }

    /// Notes that a node is alive, and the connection that it was heard on.
    pub(crate) fn heard(&mut self, now: Instant, node: NodeId, session: u64) {
        if let Some(node) = self.map.get_mut(&node) {
            node.seen = node.seen.max(now);
            (node.session, node.connected) = (session, true);
        }
    }

    /// Gives every node its whole time to live.
    pub(crate) fn heard_all(&mut self, now: Instant) {
        for node in self.map.values_mut() {
            node.seen = node.seen.max(now);
        }
    }

    /// Takes other settings.
    pub(crate) fn reconfigure(&mut self, now: Instant, ttl: Duration, past_mounts_max: usize) {
        (self.ttl, self.past_mounts_max) = (ttl, past_mounts_max);
        // They are examined soon; nothing expires before its time.
        self.check_at = self.check_at.map(|_| now);
    }

    /// A connection has ended.
    pub(crate) fn hung_up(&mut self, session: u64) {
        for node in self.map.values_mut().filter(|node| node.session == session) {
            node.connected = false;
        }
    }

    /// All nodes, sorted by number: the map's order must not show.
    pub(crate) fn all(&self) -> Vec<(NodeId, &Node)> {
        let mut all: Vec<_> = self.map.iter().map(|(no, node)| (*no, node)).collect();
        all.sort_unstable_by_key(|(no, _)| *no);
        all
    }

    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// Notes a mounted segment. Its node is alive.
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
        node: NodeId,
        segment: SegmentNo,
        name: Box<str>,
        incarnation: Incarnation,
        until: Instant,
    ) {
        if let Some(entry) = self.map.get_mut(&node) {
            entry.segments.retain(|no| *no != segment);
            if entry.segments.is_empty() {
                self.map.remove(&node);
            }
        }
        if self.past_mounts.len() >= self.past_mounts_max {
            self.past_mounts.pop_front();
        }
        self.past_mounts.push_back(PastMount { name, incarnation, until });
    }

    /// The highest incarnation of a name that is over and may still be written to.
    pub(crate) fn last_incarnation(&self, now: Instant, name: &str) -> Option<Incarnation> {
        let past_mounts = self.past_mounts.iter().filter(|past| *past.name == *name && now < past.until);
        past_mounts.map(|past| past.incarnation).max()
    }

    /// Nodes that have been silent for too long.
    pub(crate) fn expired(&mut self, now: Instant) -> Vec<NodeId> {
        if self.check_at.is_none_or(|at| now < at) {
            return Vec::new();
        }
        while self.past_mounts.front().is_some_and(|past| past.until <= now) {
            self.past_mounts.pop_front();
        }
        let over = |node: &Node| node.seen + self.ttl <= now;
        let mut expired: Vec<NodeId> =
            self.map.iter().filter(|(_, node)| over(node)).map(|(id, _)| *id).collect();
        // Sorted: the map's order must not show.
        expired.sort_unstable();
        self.check_at = self.map.values().filter(|node| !over(node)).map(|node| node.seen + self.ttl).min();
        expired
    }

    /// The earliest time at which a node expires.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.check_at
    }
}
