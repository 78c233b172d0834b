//! Messages about replicas: tasks that copy and move them, draining of segments, reports of bad replicas.

use serde::{Deserialize, Serialize};

use super::{REPLICAS_MAX, Replicas};
use crate::codec::{Key, Short};
use crate::{ErrorCode, Incarnation, NodeId, SegmentNo, TaskId};

/// A request to add a replica to an object, or to move one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewTask<'a> {
    /// The object's key.
    #[serde(borrow)]
    pub key: Key<'a>,
    /// A move: the replica on this segment is dropped when the new one is readable. `None`: a copy.
    pub source: Option<SegmentNo>,
    /// The segment of the new replica. `None`: where a put would place it.
    pub target: Option<SegmentNo>,
}

/// The state of a task.
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
    /// The node has not fetched it yet.
    #[default]
    Pending,
    /// The node carries it out.
    Processing,
    /// The new replica is readable.
    Done,
    /// Given up because of an error, or of too many of them.
    Failed,
    /// Canceled on request.
    Canceled,
}

impl TaskState {
    /// Whether the state is final, unless a retry is requested.
    #[must_use]
    pub const fn is_finished(self) -> bool {
        matches!(self, Self::Done | Self::Failed | Self::Canceled)
    }

    /// The name in output and on command lines.
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

    /// The state with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let all = [Self::Pending, Self::Processing, Self::Done, Self::Failed, Self::Canceled];
        all.into_iter().find(|state| state.name() == name)
    }
}

/// Why a task was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum TaskCause {
    /// It was requested.
    #[default]
    Requested,
    /// Its source is being drained.
    Drain,
    /// The object is read very often.
    Hot,
    /// The object is on a disk alone, and is read.
    Promotion,
}

impl TaskCause {
    /// The name in output.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Requested => "requested",
            Self::Drain => "drain",
            Self::Hot => "hot",
            Self::Promotion => "promotion",
        }
    }
}

/// A task and its present state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskInfo<'a> {
    /// The task's number.
    pub id: TaskId,
    /// The object's key.
    #[serde(borrow)]
    pub key: Key<'a>,
    /// Bytes to copy.
    pub len: u64,
    /// Its state.
    pub state: TaskState,
    /// Why it was created.
    pub cause: TaskCause,
    /// The segment that the replica is moved from. `None`: a copy.
    pub source: Option<SegmentNo>,
    /// The segment of the new replica. `None`: no place has been found yet.
    pub target: Option<SegmentNo>,
    /// Number of attempts begun.
    pub attempts: u32,
    /// Why the latest attempt failed.
    pub error: Option<ErrorCode>,
    /// Milliseconds since the task was created.
    pub age_ms: u64,
}

/// A request for a page of tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskQuery {
    /// 0 for the first page; then the value of the previous response.
    pub cursor: u64,
    /// Most tasks in the response, at most 512.
    pub limit: u32,
    /// Only tasks in this state. `None`: all tasks.
    pub state: Option<TaskState>,
}

/// A node requests its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FetchRequest {
    /// The node.
    pub node: NodeId,
    /// Its incarnation.
    pub incarnation: Incarnation,
    /// Most tasks in the response, including those that the node has already.
    pub count_max: u32,
    /// As in [`MountSegment::key`](super::MountSegment::key).
    pub key: u64,
}

/// A task for a node: one replica to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskOrder<'a> {
    /// The task.
    pub id: TaskId,
    /// This attempt of the task; no other attempt has the same number. A node that has reported the end of an
    /// attempt and receives the attempt again, because the report was lost, repeats the report and does not
    /// touch the place: the first report may still arrive, and then the place is a replica, or belongs to
    /// another object.
    pub attempt: u64,
    /// The object's key.
    #[serde(borrow)]
    pub key: Key<'a>,
    /// The put that stored the object.
    pub generation: u64,
    /// Length of the object, bytes, without the trailer that follows: see [`crate::chunks`].
    pub len: u64,
    /// CRC-32C of all data, [`bound`](crate::bound) to the key and the generation.
    pub checksum: u32,
    /// The node's segment that gets the replica.
    pub segment: SegmentNo,
    /// The replica's address in the segment's export.
    pub addr: u64,
    /// The existing replicas; each has all bytes.
    pub sources: Replicas,
}

/// The end of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskEnd {
    /// The task.
    pub id: TaskId,
    /// The attempt.
    pub attempt: u64,
    /// CRC-32C of the copied bytes, [`bound`](crate::bound) to the key and the generation; or why they were
    /// not copied.
    pub result: Result<u32, ErrorCode>,
    /// Nothing will be written to the place of the new replica any more.
    pub quiet: bool,
}

/// The state of a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SegmentState {
    /// Accepts new replicas and serves its replicas.
    #[default]
    Active,
    /// Serves its replicas and accepts no new ones.
    Maintenance,
    /// Its replicas are moved elsewhere; it serves them until then and accepts no new ones.
    Draining,
    /// Empty, and accepts no new replicas. It can be unmounted without a loss.
    Drained,
}

impl SegmentState {
    /// The name in output.
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

/// A request to put a segment into a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentOrder {
    /// The segment.
    pub segment: SegmentNo,
    /// `Active`, `Maintenance` or `Draining`. `Drained` means `Draining`: a segment becomes drained by
    /// itself.
    pub state: SegmentState,
}

/// The progress of draining a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainInfo {
    /// The segment.
    pub segment: SegmentNo,
    /// The node that mounted it.
    pub node: NodeId,
    /// The state of the segment.
    pub state: SegmentState,
    /// Bytes of it that are allocated or pending release.
    pub used_bytes: u64,
    /// Number of allocations: replicas, unfinished puts, space pending release.
    pub blocks: u64,
    /// Moves in progress.
    pub moving: u32,
    /// Replicas that were moved away since the draining began.
    pub moved_total: u64,
    /// Replicas that were dropped, because no other segment had room and the object has another replica.
    pub dropped_total: u64,
    /// Moves that failed.
    pub failed_total: u64,
    /// In the latest round: objects without another replica for which no other segment has room.
    pub left_no_room: u64,
    /// In the latest round: objects that were being written, or had another task, or whose move failed and
    /// will be tried again.
    pub left_unfinished: u64,
    /// In the latest round: objects whose replica on this segment is damaged. They stay until enough readers
    /// have reported them, or until they are removed.
    pub left_bad: u64,
}

/// A report of a replica whose bytes were not the committed ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BadReplica<'a> {
    /// The object's key.
    #[serde(borrow)]
    pub key: Key<'a>,
    /// The put that stored the object.
    pub generation: u64,
    /// The segment of the replica.
    pub segment: SegmentNo,
}

/// The result of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// The report was counted.
    Noted,
    /// The replica was dropped; the object has others.
    Dropped,
    /// The last replica was dropped: the object is gone, and can be put again.
    Gone,
}

/// The state of a replica.
///
/// The states are those of Mooncake's replicas. They are not stored: they follow from where the replica is
/// kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ReplicaState {
    /// Its space is reserved and not written to yet: a copy that waits for its node.
    #[default]
    Initialized,
    /// It is being written, by a put or by a task.
    Processing,
    /// It is readable.
    Complete,
}

/// One replica of an object, readable or not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaInfo {
    /// The segment that it is on.
    pub segment: SegmentNo,
    /// The first byte's address in the segment's export.
    pub addr: u64,
    /// Length of the object, bytes; the trailer of an object of several chunks follows it.
    pub len: u64,
    /// The state of the replica.
    pub state: ReplicaState,
}

/// Every replica of an object: those that are readable, and as many again that are being made.
pub type ReplicaInfos = Short<ReplicaInfo, { 2 * REPLICAS_MAX }>;

/// Tasks, drains, hot objects and reports: gauges (now) and counters (since the master was created). The name
/// of a counter ends in `_total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TaskReport {
    /// Tasks that wait for their node.
    pub pending: u64,
    /// Tasks that a node carries out.
    pub processing: u64,
    /// Finished tasks that are remembered.
    pub finished: u64,
    /// Tasks that were created, for any reason.
    pub created_total: u64,
    /// Replicas made.
    pub done_total: u64,
    /// Tasks that were given up.
    pub failed_total: u64,
    /// Tasks that were canceled on request.
    pub canceled_total: u64,
    /// Attempts that failed, timed out or lost their segment, and were followed by another one.
    pub retried_total: u64,
    /// Bytes copied.
    pub copied_bytes_total: u64,
    /// Segments that are being drained.
    pub draining: u64,
    /// Gets of objects that are read often enough to get another replica.
    pub hot_gets_total: u64,
    /// Replicas that were made because of such gets, and exist still, as far as is known.
    pub extra_replicas: u64,
    /// Such replicas that were dropped because their space was needed.
    pub extras_shed_total: u64,
    /// Reports of bad replicas.
    pub bad_reports_total: u64,
    /// Replicas that were dropped because of such reports.
    pub bad_dropped_total: u64,
}
