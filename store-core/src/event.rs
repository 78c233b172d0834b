//! Events: what happened in a master and belongs into its log.

use alloc::boxed::Box;
use alloc::collections::VecDeque;

use crate::message::SegmentState;
use crate::{NodeId, SegmentNo};

/// Limit on events that wait to be taken.
const EVENTS_MAX: usize = 1_024;

/// Something that does not happen with every request. Removals and evictions of objects are not events.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are named for what they are; bytes and ms as their names say")]
pub enum Event {
    /// A node has mounted a segment.
    SegmentMounted { node: NodeId, segment: SegmentNo, name: Box<str>, endpoint: Box<str>, bytes: u64 },
    /// A mount took over a name: from an earlier incarnation of the same node, from a node that is gone, or
    /// because takeover was requested.
    SegmentReplaced {
        node: NodeId,
        name: Box<str>,
        endpoint: Box<str>,
        old_endpoint: Box<str>,
        objects_lost: u64,
        takeover: bool,
    },
    /// A node has unmounted a segment.
    SegmentUnmounted {
        node: NodeId,
        segment: SegmentNo,
        name: Box<str>,
        endpoint: Box<str>,
        objects_lost: u64,
    },
    /// A node was silent for too long and was given up. Name and endpoint are those of its first segment.
    NodeGivenUp {
        node: NodeId,
        name: Box<str>,
        endpoint: Box<str>,
        silent_ms: u64,
        segments: u32,
        objects_lost: u64,
    },
    /// A node requested a name that another live node has mounted.
    MountRefused { name: Box<str>, endpoint: Box<str>, holder_endpoint: Box<str>, holder_silent_ms: u64 },
    /// A node's mount was refused, because its incarnation is more than an hour ahead of the master's clock:
    /// the clock of the node or that of the master is wrong. Both in ms since 1970.
    IncarnationTooHigh { name: Box<str>, endpoint: Box<str>, incarnation_ms: u64, wall_ms: u64 },
    /// The state of a segment was changed.
    SegmentState { segment: SegmentNo, name: Box<str>, state: SegmentState },
    /// A segment is empty, or its drain cannot move some objects for now: objects for which no other segment
    /// has room, and bad ones. Reported again when their number grows or the bad ones change, not with every
    /// round.
    SegmentDrained { segment: SegmentNo, name: Box<str>, left_objects: u64, left_bad: u64 },
    /// A client could not reach a segment.
    SegmentUnreachable { segment: SegmentNo, name: Box<str>, endpoint: Box<str> },
    /// A segment's node was heard of after the segment had been out of reach.
    SegmentReachable { segment: SegmentNo, name: Box<str>, endpoint: Box<str> },
    /// A node has cut off a writer.
    WriterExpelled { writer: u64, node: NodeId, freed_bytes: u64 },
    /// A node was given extents of a pool.
    ExtentsGiven { node: NodeId, pool: [u8; 16], first: u32, count: u32, epoch: u64 },
    /// The memory limit of the master is reached. Reported once, and again only after memory had become
    /// available.
    MetadataFull { bytes: u64, bytes_max: u64 },
}

/// Events in their order.
#[derive(Debug, Default)]
pub(crate) struct Events {
    list: VecDeque<Event>,
    dropped_total: u64,
}

impl Events {
    pub(crate) fn push(&mut self, event: Event) {
        if self.list.len() < EVENTS_MAX {
            self.list.push_back(event);
        } else {
            self.dropped_total += 1;
        }
    }

    pub(crate) fn pop(&mut self) -> Option<Event> {
        self.list.pop_front()
    }

    pub(crate) const fn dropped_total(&self) -> u64 {
        self.dropped_total
    }
}
