//! Messages about replicas: tasks that copy and move them, draining segments, replicas that turned out to be bad.

use serde::{Deserialize, Serialize};

use super::{REPLICAS_MAX, Replicas, SegmentNo};
use crate::ErrorCode;
use crate::codec::{Key, Short};

/// The number of a task: counted up, never used twice.
pub type TaskId = u64;

/// Make one more replica of an object, or move one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewTask<'a> {
    /// Its key.
    #[serde(borrow)]
    pub key: Key<'a>,
    /// A move: the replica on this segment goes when the new one is readable. None: a copy.
    pub source: Option<SegmentNo>,
    /// Where the new replica goes; none: where a put would place it.
    pub target: Option<SegmentNo>,
}

/// How far a task is.
///
/// ```text
///            fetched by the target's node          its report
///   Pending ────────────────────────────▶ Processing ────────▶ Done
///      │ ▲        failed, tries left          │  │
///      │ └────────────────────────────────────┘  └───────────▶ Failed ── retry ─▶ Pending
///      └──────────────────── cancel ─────────────────────────▶ Canceled ─┘
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TaskState {
    /// Its node has not fetched it yet.
    #[default]
    Pending,
    /// Its node is at it.
    Processing,
    /// The new replica is readable.
    Done,
    /// Given up; the error says why.
    Failed,
    /// Given up on request.
    Canceled,
}

impl TaskState {
    /// Whether nothing will change any more, unless somebody asks for a retry.
    #[must_use]
    pub const fn is_finished(self) -> bool {
        matches!(self, Self::Done | Self::Failed | Self::Canceled)
    }

    /// For people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Processing => "processing",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Canceled => "canceled",
        }
    }

    /// The one that people call this.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let all = [Self::Pending, Self::Processing, Self::Done, Self::Failed, Self::Canceled];
        all.into_iter().find(|state| state.name() == name)
    }
}

/// Why there is a task.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TaskCause {
    /// Somebody asked for it.
    #[default]
    Asked,
    /// Its source is being drained.
    Drain,
    /// The object is read very often.
    Heat,
}

impl TaskCause {
    /// For people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Asked => "asked",
            Self::Drain => "drain",
            Self::Heat => "heat",
        }
    }
}

/// A task, as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskInfo<'a> {
    /// Its number.
    pub id: TaskId,
    /// Of which object.
    #[serde(borrow)]
    pub key: Key<'a>,
    /// Bytes to copy.
    pub len: u64,
    /// How far it is.
    pub state: TaskState,
    /// Why it is there.
    pub cause: TaskCause,
    /// A move: from here.
    pub source: Option<SegmentNo>,
    /// The new replica's segment; none before one was found.
    pub target: Option<SegmentNo>,
    /// Tries begun.
    pub attempts: u32,
    /// Why the latest try failed.
    pub error: Option<ErrorCode>,
    /// Since it was asked for, milliseconds.
    pub age_ms: u64,
}

/// Which tasks to list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskQuery {
    /// 0 to begin; then what the answer before gave.
    pub cursor: u64,
    /// Most tasks in the answer; at most 512.
    pub limit: u32,
    /// Only these; none: all.
    pub state: Option<TaskState>,
}

/// A node asks what it has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FetchAsk {
    /// Which node.
    pub node: u64,
    /// Which life of it.
    pub incarnation: u64,
    /// Most tasks that it wants, those that it has already included.
    pub count_max: u32,
    /// As in [`MountSegment::key`](super::MountSegment::key).
    pub key: u64,
}

/// One replica to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskOrder<'a> {
    /// Of this task.
    pub id: TaskId,
    /// This try of it; no other has the same. A node that has told its end and is given it again, because that was not
    /// heard, tells the same end again and leaves the place alone: the first may be on its way still, and when it arrives
    /// the place is a replica, or somebody else's.
    pub attempt: u64,
    /// The object's key.
    #[serde(borrow)]
    pub key: Key<'a>,
    /// Which put it is from.
    pub generation: u64,
    /// Bytes, without the trailer that follows them: see [`crate::blocks`].
    pub len: u64,
    /// CRC-32C of all bytes, [`bound`](crate::bound) to the key and the generation.
    pub checksum: u32,
    /// The node's own segment.
    pub segment: SegmentNo,
    /// Where in it.
    pub addr: u64,
    /// Any one of them has the bytes.
    pub sources: Replicas,
}

/// How a try ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskEnd {
    /// Of this task.
    pub id: TaskId,
    /// Which try.
    pub attempt: u64,
    /// CRC-32C of the bytes that are in place, [`bound`](crate::bound) to the key and the generation; or why they are not.
    pub result: Result<u32, ErrorCode>,
    /// Nothing will be written to the new replica's place any more.
    pub quiet: bool,
}

/// What may be done with a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SegmentState {
    /// Takes new replicas and serves what it has.
    #[default]
    Active,
    /// Serves what it has, takes nothing new.
    Maintenance,
    /// What it has is moved elsewhere; it serves until then and takes nothing new.
    Draining,
    /// Empty; takes nothing new. It can be unmounted and nothing is lost.
    Drained,
}

impl SegmentState {
    /// For people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Maintenance => "maintenance",
            Self::Draining => "draining",
            Self::Drained => "drained",
        }
    }
}

/// Puts a segment into a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentOrder {
    /// Which.
    pub segment: SegmentNo,
    /// `Active`, `Maintenance` or `Draining`; `Drained` comes by itself and is taken for `Draining`.
    pub state: SegmentState,
}

/// How far a segment's draining is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainInfo {
    /// Which.
    pub segment: SegmentNo,
    /// Whose.
    pub node: u64,
    /// Its state.
    pub state: SegmentState,
    /// Bytes there that are allocated or held back.
    pub used_bytes: u64,
    /// Allocations there: replicas, unfinished puts, what is held back.
    pub blocks: u64,
    /// Moves under way.
    pub moving: u32,
    /// Replicas that were moved away since the draining began.
    pub moved_total: u64,
    /// Replicas that were dropped, because no other segment had room and the object has another replica.
    pub dropped_total: u64,
    /// Moves that failed.
    pub failed_total: u64,
    /// In the latest round: objects that have no other replica, and for which no other segment has room.
    pub left_no_room: u64,
    /// In the latest round: objects that were being written, or that another task was at, or whose move failed and is tried again.
    pub left_unfinished: u64,
    /// In the latest round: objects whose replica here is not what was committed. They stay until enough readers have reported
    /// them, or somebody removes them.
    pub left_bad: u64,
}

/// A replica whose bytes were not those that were committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BadReplica<'a> {
    /// The object's key.
    #[serde(borrow)]
    pub key: Key<'a>,
    /// Which put it is from.
    pub generation: u64,
    /// Where the replica is.
    pub segment: SegmentNo,
}

/// What became of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// Counted.
    Noted,
    /// The replica is dropped; the object has others.
    Dropped,
    /// It was the last one: the object is gone, and can be put again.
    Gone,
}

/// How far a replica is.
///
/// The states are those of Mooncake's replicas; here they follow from where the replica is kept, and none is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ReplicaState {
    /// Space was reserved, and nobody writes to it yet: a copy that waits for its node.
    #[default]
    Initialized,
    /// It is being written, by a put or by a task.
    Processing,
    /// It can be read.
    Complete,
}

/// One replica of an object, readable or not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaInfo {
    /// Where.
    pub segment: SegmentNo,
    /// The first byte's address in the segment's export.
    pub addr: u64,
    /// How far it is.
    pub state: ReplicaState,
}

/// Every replica of an object: as many that can be read, and as many again that are on their way.
pub type ReplicaInfos = Short<ReplicaInfo, { 2 * REPLICAS_MAX }>;

/// Tasks, drains, heat and reports: gauges (now) and counters (since the master was created). A counter ends in `_total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskReport {
    /// Tasks that wait for their node.
    pub pending: u64,
    /// Tasks that a node is at.
    pub processing: u64,
    /// Finished tasks that are still known.
    pub finished: u64,
    /// Tasks that were asked for, whoever asked.
    pub created_total: u64,
    /// Replicas made.
    pub done_total: u64,
    /// Tasks given up.
    pub failed_total: u64,
    /// Tasks given up on request.
    pub canceled_total: u64,
    /// Tries that failed, timed out or lost their segment, and that another followed.
    pub retried_total: u64,
    /// Bytes copied.
    pub copied_bytes_total: u64,
    /// Segments that are being drained.
    pub draining: u64,
    /// Gets of objects that are read often enough to have another replica.
    pub hot_gets_total: u64,
    /// Replicas that were made because of that, and are there still, as far as is known.
    pub extra_replicas: u64,
    /// Such replicas that were dropped because their space was needed.
    pub extras_shed_total: u64,
    /// Reports of bad replicas.
    pub bad_reports_total: u64,
    /// Replicas dropped because of them.
    pub bad_dropped_total: u64,
}
