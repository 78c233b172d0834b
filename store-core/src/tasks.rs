//! Tasks: which node makes which replica, and the state of each. Bounded queues; what the states mean to
//! objects is in `master/tasks.rs`.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use core::time::Duration;

use serde::{Deserialize, Serialize};
use te_core::Instant;

use crate::chunks::stored_len;
use crate::message::{TaskCause, TaskInfo, TaskState};
use crate::objects::charge;
use crate::segments::Placed;
use crate::{ErrorCode, Key, NodeId, SegmentNo, TaskId, TenantNo};

/// Limits of tasks, drains and reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TaskConfig {
    /// Most tasks that are pending or processing. Default 10,000.
    pub unfinished_max: u32,
    /// Most finished tasks that are remembered. Default 10,000.
    pub finished_max: u32,
    /// Most tasks that one node processes at once. Default 64.
    pub per_node_max: u32,
    /// Time limit for a task to wait for its node, ms. Default 300,000.
    pub pending_timeout_ms: u32,
    /// Time limit for a node to process a task, ms; then the space of the copy is pending release. Default
    /// 60,000.
    pub processing_timeout_ms: u32,
    /// Most attempts per task. Default 3.
    pub attempts_max: u32,
    /// Most moves in progress per segment that is drained. Default 64.
    pub drain_moves_max: u32,
    /// Number of readers that must have reported a replica as bad before it is dropped. Default 2.
    pub bad_reports_min: u32,
}

impl Default for TaskConfig {
    fn default() -> Self {
        Self {
            unfinished_max: 10_000,
            finished_max: 10_000,
            per_node_max: 64,
            pending_timeout_ms: 300_000,
            processing_timeout_ms: 60_000,
            attempts_max: 3,
            drain_moves_max: 64,
            bad_reports_min: 2,
        }
    }
}

/// One replica to be made.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(crate) tenant: TenantNo,
    pub(crate) key: Box<[u8]>,
    /// Index of the object's entry, as long as that entry has this generation.
    pub(crate) index: u32,
    pub(crate) generation: u64,
    pub(crate) len: u64,
    pub(crate) source: Option<SegmentNo>,
    /// The requested target; `None`: any segment.
    pub(crate) wanted: Option<SegmentNo>,
    pub(crate) cause: TaskCause,
    pub(crate) state: TaskState,
    #[serde(with = "crate::snapshot::error")]
    pub(crate) error: Option<ErrorCode>,
    pub(crate) attempts: u32,
    /// Identifies the latest attempt, once there is one; also in
    /// [`PendingRelease`](crate::pending_release::PendingRelease).
    pub(crate) attempt: u64,
    /// Space for the new replica: reserved while the task is unfinished.
    pub(crate) placed: Placed,
    /// The node that owns that space.
    pub(crate) node: NodeId,
    pub(crate) created: Instant,
    /// When the task has waited, or was processed, for too long.
    pub(crate) deadline: Instant,
    /// Until when the object is held for the latest attempt; in the past: it is not held.
    pub(crate) held_until: Instant,
}

impl Task {
    pub(crate) fn info(&self, id: TaskId, now: Instant) -> TaskInfo<'_> {
        TaskInfo {
            id,
            key: Key(&self.key),
            len: self.len,
            state: self.state,
            cause: self.cause,
            source: self.source,
            target: (self.placed != Placed::NOWHERE).then_some(self.placed.segment).or(self.wanted),
            attempts: self.attempts,
            error: self.error,
            age_ms: if now > self.created { (now - self.created).as_millis() as u64 } else { 0 },
        }
    }
}

/// All tasks by number, with indices by object, node and deadline.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Tasks {
    map: BTreeMap<TaskId, Task>,
    last: TaskId,
    /// Unfinished tasks by object.
    by_object: BTreeSet<(u64, TaskId)>,
    /// Unfinished tasks by node: those that wait, in order, and those that are processed.
    waiting: BTreeMap<NodeId, VecDeque<TaskId>>,
    running: BTreeMap<NodeId, BTreeSet<TaskId>>,
    deadlines: BTreeSet<(Instant, TaskId)>,
    finished: VecDeque<TaskId>,
    finished_max: usize,
    pending: u32,
    processing: u32,
    /// Per tenant: bytes that its unfinished copies will be charged. A move is charged nothing.
    reserved: BTreeMap<TenantNo, u64>,
}

impl Tasks {
    /// Bytes that a tenant will be charged for its unfinished copies.
    pub(crate) fn reserved(&self, tenant: TenantNo) -> u64 {
        self.reserved.get(&tenant).copied().unwrap_or(0)
    }

    /// Whether a tenant has unfinished tasks.
    pub(crate) fn has_unfinished_of(&self, tenant: TenantNo) -> bool {
        self.by_object.iter().any(|(_, id)| self.map.get(id).is_some_and(|task| task.tenant == tenant))
    }

    /// Forgets the finished tasks of a tenant that was removed: another tenant may get its number.
    pub(crate) fn forget(&mut self, tenant: TenantNo) {
        let map = &mut self.map;
        self.finished.retain(|id| {
            let theirs = map.get(id).is_some_and(|task| task.tenant == tenant);
            if theirs {
                map.remove(id);
            }
            !theirs
        });
    }

    /// No tasks; numbers begin after `last`.
    pub(crate) fn after(last: TaskId, finished_max: u32) -> Self {
        Self {
            map: BTreeMap::new(),
            last,
            by_object: BTreeSet::new(),
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            finished: VecDeque::new(),
            finished_max: finished_max as usize,
            pending: 0,
            reserved: BTreeMap::new(),
            processing: 0,
        }
    }

    /// Takes other settings.
    pub(crate) fn reconfigure(&mut self, finished_max: u32) {
        self.finished_max = finished_max as usize;
    }

    pub(crate) fn pending(&self) -> u32 {
        self.pending
    }

    pub(crate) fn processing(&self) -> u32 {
        self.processing
    }

    pub(crate) fn finished(&self) -> usize {
        self.finished.len()
    }

    /// Adds a pending task.
    pub(crate) fn add(&mut self, task: Task) -> TaskId {
        let id = TaskId::new(self.last.get() + 1);
        self.last = id;
        self.map.insert(id, task);
        self.enter(id);
        id
    }

    pub(crate) fn get(&self, id: TaskId) -> Option<&Task> {
        self.map.get(&id)
    }

    /// All tasks from `id` on.
    pub(crate) fn from(&self, id: TaskId) -> impl Iterator<Item = (TaskId, &Task)> {
        self.map.range(id..).map(|(id, task)| (*id, task))
    }

    /// Unfinished tasks of an object.
    pub(crate) fn of_object(&self, generation: u64) -> impl Iterator<Item = (TaskId, &Task)> {
        let ids = self.by_object.range((generation, TaskId::default())..=(generation, TaskId::MAX));
        ids.filter_map(|(_, id)| Some((*id, self.map.get(id)?)))
    }

    /// Whether a node has tasks to begin or to continue.
    pub(crate) fn has_work(&self, node: NodeId) -> bool {
        // Usually there are no tasks at all.
        self.pending + self.processing > 0
            && (self.waiting.contains_key(&node) || self.running.contains_key(&node))
    }

    pub(crate) fn running(&self, node: NodeId) -> impl Iterator<Item = TaskId> {
        self.running.get(&node).into_iter().flatten().copied()
    }

    pub(crate) fn next_waiting(&self, node: NodeId) -> Option<TaskId> {
        self.waiting.get(&node)?.front().copied()
    }

    /// Begins an attempt of a pending task.
    pub(crate) fn start(&mut self, id: TaskId, attempt: u64, deadline: Instant) {
        self.leave(id);
        if let Some(task) = self.map.get_mut(&id) {
            (task.state, task.attempt, task.deadline) = (TaskState::Processing, attempt, deadline);
            // The hold for the attempt before ends by time: its node may still be reading.
            task.held_until = Instant::ZERO;
            task.attempts += 1;
        }
        self.enter(id);
    }

    /// Holds the object for the latest attempt until then; returns until when it was held.
    pub(crate) fn hold(&mut self, id: TaskId, until: Instant) -> Instant {
        self.map.get_mut(&id).map_or(until, |task| core::mem::replace(&mut task.held_until, until))
    }

    /// Puts a task back into the queue, with space elsewhere.
    pub(crate) fn requeue(&mut self, id: TaskId, placed: Placed, node: NodeId, deadline: Instant) {
        self.leave(id);
        if let Some(task) = self.map.get_mut(&id) {
            (task.state, task.placed, task.node, task.deadline) =
                (TaskState::Pending, placed, node, deadline);
        }
        self.enter(id);
    }

    /// The attempt has failed: its space no longer belongs to the task.
    pub(crate) fn failed(&mut self, id: TaskId, error: ErrorCode) -> Placed {
        let Some(task) = self.map.get_mut(&id) else { return Placed::NOWHERE };
        task.error = Some(error);
        core::mem::replace(&mut task.placed, Placed::NOWHERE)
    }

    /// Temporarily takes an unfinished task off its object's list. [`Self::attach_to_object`] puts it back.
    pub(crate) fn detach_from_object(&mut self, id: TaskId) {
        if let Some(task) = self.map.get(&id) {
            self.by_object.remove(&(task.generation, id));
        }
    }

    /// Reverses [`Self::detach_from_object`].
    pub(crate) fn attach_to_object(&mut self, id: TaskId) {
        if let Some(task) = self.map.get(&id) {
            self.by_object.insert((task.generation, id));
        }
    }

    /// Ends a task for good. Forgets the oldest finished tasks when there are too many.
    pub(crate) fn finish(&mut self, id: TaskId, state: TaskState) {
        self.leave(id);
        if let Some(task) = self.map.get_mut(&id) {
            task.state = state;
        }
        self.finished.push_back(id);
        while self.finished.len() > self.finished_max {
            if let Some(oldest) = self.finished.pop_front() {
                self.map.remove(&oldest);
            }
        }
    }

    /// Makes a finished task pending again and resets its attempts.
    pub(crate) fn revive(&mut self, id: TaskId, placed: Placed, node: NodeId, deadline: Instant) {
        self.finished.retain(|finished| *finished != id);
        if let Some(task) = self.map.get_mut(&id) {
            (task.state, task.error, task.attempts) = (TaskState::Pending, None, 0);
            (task.placed, task.node, task.deadline) = (placed, node, deadline);
        }
        self.enter(id);
    }

    /// A task whose deadline has passed.
    pub(crate) fn overdue(&self, now: Instant) -> Option<TaskId> {
        self.deadlines.first().filter(|(at, _)| *at <= now).map(|(_, id)| *id)
    }

    pub(crate) fn due(&self) -> Option<Instant> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// Unfinished tasks with space on a segment.
    pub(crate) fn on_segment(&self, no: SegmentNo) -> impl Iterator<Item = TaskId> {
        let unfinished = self.by_object.iter().map(|(_, id)| *id);
        unfinished.filter(move |id| self.map.get(id).is_some_and(|task| task.placed.segment == no))
    }

    /// Pending moves away from a segment because it is drained.
    pub(crate) fn draining(&self, no: SegmentNo) -> impl Iterator<Item = TaskId> {
        let unfinished = self.by_object.iter().map(|(_, id)| *id);
        unfinished.filter(move |id| {
            self.map.get(id).is_some_and(|task| {
                task.cause == TaskCause::Drain && task.source == Some(no) && task.state == TaskState::Pending
            })
        })
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        // The keys, and the approximate size of a map of this length.
        self.map.values().map(|task| task.key.len()).sum::<usize>()
            + self.map.len() * (size_of::<Task>() + 128)
    }

    fn enter(&mut self, id: TaskId) {
        let Some(task) = self.map.get(&id) else { return };
        self.by_object.insert((task.generation, id));
        self.deadlines.insert((task.deadline, id));
        if task.source.is_none() {
            *self.reserved.entry(task.tenant).or_default() += charge(stored_len(task.len), 1);
        }
        if task.state == TaskState::Pending {
            self.pending += 1;
            self.waiting.entry(task.node).or_default().push_back(id);
        } else {
            self.processing += 1;
            self.running.entry(task.node).or_default().insert(id);
        }
    }

    /// Removes an unfinished task from all indices.
    fn leave(&mut self, id: TaskId) {
        let Some(task) = self.map.get(&id).filter(|task| !task.state.is_finished()) else { return };
        self.by_object.remove(&(task.generation, id));
        self.deadlines.remove(&(task.deadline, id));
        if task.source.is_none()
            && let Some(reserved) = self.reserved.get_mut(&task.tenant)
        {
            *reserved -= charge(stored_len(task.len), 1);
            if *reserved == 0 {
                self.reserved.remove(&task.tenant);
            }
        }
        let node = task.node;
        if task.state == TaskState::Pending {
            self.pending -= 1;
            if let Some(waiting) = self.waiting.get_mut(&node) {
                if waiting.front() == Some(&id) {
                    waiting.pop_front();
                } else {
                    waiting.retain(|waiting| *waiting != id);
                }
                if waiting.is_empty() {
                    self.waiting.remove(&node);
                }
            }
        } else {
            self.processing -= 1;
            if let Some(running) = self.running.get_mut(&node) {
                running.remove(&id);
                if running.is_empty() {
                    self.running.remove(&node);
                }
            }
        }
    }
}

/// The deadline of a task that begins to wait, or to be processed, now.
pub(crate) fn deadline(now: Instant, timeout_ms: u32) -> Instant {
    now + Duration::from_millis(timeout_ms.into())
}
