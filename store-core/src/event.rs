//! Events: what happened in a master that somebody may want to read in a log.

use alloc::boxed::Box;
use alloc::collections::VecDeque;

use crate::SegmentNo;
use crate::message::SegmentState;

/// Events that wait to be taken.
const EVENTS_MAX: usize = 1_024;

/// Something that does not happen with every request. Removals and evictions are none.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are named for what they are; bytes and ms as their names say")]
pub enum Event {
    /// A node has contributed memory.
    SegmentMounted { node: u64, segment: SegmentNo, name: Box<str>, endpoint: Box<str>, bytes: u64 },
    /// A mount took a name over: from a former life of the same node, from one that was gone, or because it was asked to.
    SegmentReplaced {
        node: u64,
        name: Box<str>,
        endpoint: Box<str>,
        old_endpoint: Box<str>,
        objects_lost: u64,
        takeover: bool,
    },
    /// A node took its memory back.
    SegmentUnmounted { node: u64, segment: SegmentNo, name: Box<str>, endpoint: Box<str>, objects_lost: u64 },
    /// A node was silent for too long. Name and endpoint are those of its first segment.
    NodeGivenUp {
        node: u64,
        name: Box<str>,
        endpoint: Box<str>,
        silent_ms: u64,
        segments: u32,
        objects_lost: u64,
    },
    /// A node wanted a name that another one has who lives.
    MountRefused { name: Box<str>, endpoint: Box<str>, holder_endpoint: Box<str>, holder_silent_ms: u64 },
    /// A node's mount was refused, because its incarnation is more than an hour ahead of the master's clock: the clock of the
    /// node or that of the master is wrong. Both in ms since 1970.
    IncarnationTooHigh { name: Box<str>, endpoint: Box<str>, incarnation_ms: u64, wall_ms: u64 },
    /// A segment was put into another state.
    SegmentState { segment: SegmentNo, name: Box<str>, state: SegmentState },
    /// A segment is empty, or its drain goes on but what it has cannot be moved for now: objects for which no other segment has
    /// room, and bad ones. Told again when that becomes worse or the bad ones change, not with every round.
    SegmentDrained { segment: SegmentNo, name: Box<str>, left_objects: u64, left_bad: u64 },
    /// A client could not reach a segment.
    SegmentUnreachable { segment: SegmentNo, name: Box<str>, endpoint: Box<str> },
    /// Its node was heard of since.
    SegmentReachable { segment: SegmentNo, name: Box<str>, endpoint: Box<str> },
    /// A node has cut a writer off.
    WriterExpelled { writer: u64, node: u64, freed_bytes: u64 },
    /// The master's own memory is used up. Told once until there is some again.
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
