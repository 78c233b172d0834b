//! Replicas by name: where they are, copying and moving them, draining segments.

use store_core::message::{
    CancelTasks, CreateTasks, DrainInfo, DrainStatus, FindReplicas, ListPosition, ListTasks, NewTask,
    OrderSegments, QueryTasks, ReadTaskReport, ReplicaInfo, RetryTasks, SegmentOrder, SegmentState,
    TaskCause, TaskInfo, TaskQuery, TaskReport, TaskState,
};
use store_core::{ErrorCode, Key, SegmentNo, TaskId};

use super::MasterClient;
use crate::error::StoreError;

/// A task, as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskEntry {
    /// Its number.
    pub id: TaskId,
    /// Of which object.
    pub key: Vec<u8>,
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

/// A page of tasks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaskPage {
    /// The tasks, oldest first.
    pub entries: Vec<TaskEntry>,
    /// Where the next page begins; 0: that was all.
    pub cursor: u64,
}

impl From<TaskInfo<'_>> for TaskEntry {
    fn from(info: TaskInfo<'_>) -> Self {
        let TaskInfo { id, len, state, cause, source, target, attempts, error, age_ms, .. } = info;
        Self { id, key: info.key.0.to_vec(), len, state, cause, source, target, attempts, error, age_ms }
    }
}

impl MasterClient<'_> {
    /// Where an object is, readable or not. Neither leases it nor counts as a use.
    ///
    /// # Errors
    /// `ObjectNotFound`; a master that cannot be asked.
    pub fn replicas(&mut self, key: &[u8]) -> Result<Vec<ReplicaInfo>, StoreError> {
        let (_, mut found) = self.rpc.call::<FindReplicas>(&(), std::iter::once(Key(key)))?;
        let replicas = found.next().unwrap_or(Err(ErrorCode::InternalError))?.to_vec();
        Ok(replicas)
    }

    /// Has an object copied to each of these segments, or, if none is named, to one that the master chooses. Gives a task for
    /// each; the replicas are readable when their tasks are done.
    ///
    /// # Errors
    /// For each target, see [`store_core::Master::create_task`]. As a whole: a master that cannot be asked.
    pub fn copy(
        &mut self,
        key: &[u8],
        targets: &[SegmentNo],
    ) -> Result<Vec<Result<TaskId, ErrorCode>>, StoreError> {
        let task = |target| NewTask { key: Key(key), source: None, target };
        let targets = targets.chunks(store_core::message::REPLICAS_MAX);
        let mut created = Vec::new();
        if targets.len() == 0 {
            return self.create_tasks(&[task(None)]);
        }
        for targets in targets {
            let tasks: Vec<NewTask<'_>> = targets.iter().map(|target| task(Some(*target))).collect();
            created.extend(self.create_tasks(&tasks)?);
        }
        Ok(created)
    }

    /// Has the replica on `source` moved to `target`, or to a segment that the master chooses. It stays readable throughout.
    ///
    /// # Errors
    /// See [`store_core::Master::create_task`]; a master that cannot be asked.
    pub fn move_(
        &mut self,
        key: &[u8],
        source: SegmentNo,
        target: Option<SegmentNo>,
    ) -> Result<TaskId, StoreError> {
        let created = self.create_tasks(&[NewTask { key: Key(key), source: Some(source), target }])?;
        let created = created.into_iter().next().unwrap_or(Err(ErrorCode::InternalError));
        created.map_err(StoreError::from)
    }

    /// How far a task is.
    ///
    /// # Errors
    /// `TaskNotFound`; a master that cannot be asked.
    pub fn task(&mut self, id: TaskId) -> Result<TaskEntry, StoreError> {
        let (_, mut found) = self.rpc.call::<QueryTasks>(&(), std::iter::once(id))?;
        let entry = found.next().unwrap_or(Err(ErrorCode::InternalError)).map(TaskEntry::from)?;
        Ok(entry)
    }

    /// A page of at most `limit` tasks, finished ones included; only those in `state`, if one is named. `cursor` is 0 to begin
    /// with, then what the page before gave.
    ///
    /// # Errors
    /// A master that cannot be asked.
    pub fn tasks(
        &mut self,
        state: Option<TaskState>,
        cursor: u64,
        limit: u32,
    ) -> Result<TaskPage, StoreError> {
        let query = TaskQuery { cursor, limit, state };
        let (ListPosition { cursor }, tasks) = self.rpc.call::<ListTasks>(&query, std::iter::empty())?;
        let entries = tasks.map(TaskEntry::from).collect();
        Ok(TaskPage { entries, cursor })
    }

    /// Gives a task up; gives what has become of it: one that is done stays done.
    ///
    /// # Errors
    /// `TaskNotFound`; a master that cannot be asked.
    pub fn cancel_task(&mut self, id: TaskId) -> Result<TaskEntry, StoreError> {
        let (_, mut found) = self.rpc.call::<CancelTasks>(&(), std::iter::once(id))?;
        let entry = found.next().unwrap_or(Err(ErrorCode::InternalError)).map(TaskEntry::from)?;
        Ok(entry)
    }

    /// Tries a task again that was given up; gives what has become of it.
    ///
    /// # Errors
    /// `TaskNotFound`, and why there can be no other try; a master that cannot be asked.
    pub fn retry_task(&mut self, id: TaskId) -> Result<TaskEntry, StoreError> {
        let (_, mut found) = self.rpc.call::<RetryTasks>(&(), std::iter::once(id))?;
        let entry = found.next().unwrap_or(Err(ErrorCode::InternalError)).map(TaskEntry::from)?;
        Ok(entry)
    }

    /// Puts a segment into a state: `Draining` moves everything elsewhere, `Maintenance` only keeps new objects away, `Active`
    /// ends both. Gives how far it is.
    ///
    /// # Errors
    /// `SegmentNotFound`; a master that cannot be asked.
    pub fn drain(&mut self, segment: SegmentNo, state: SegmentState) -> Result<DrainInfo, StoreError> {
        let order = SegmentOrder { segment, state };
        let (_, mut infos) = self.rpc.call::<OrderSegments>(&(), std::iter::once(order))?;
        let info = infos.next().unwrap_or(Err(ErrorCode::InternalError))?;
        Ok(info)
    }

    /// How far segments are drained; all that are not active, if none is named.
    ///
    /// # Errors
    /// `SegmentNotFound` for any of them; a master that cannot be asked.
    pub fn drain_status(&mut self, segments: &[SegmentNo]) -> Result<Vec<DrainInfo>, StoreError> {
        let (_, infos) = self.rpc.call::<DrainStatus>(&(), segments.iter().copied())?;
        let infos = infos.collect::<Result<_, _>>()?;
        Ok(infos)
    }

    /// Counters and gauges of tasks, drains, heat and reports of bad replicas.
    ///
    /// # Errors
    /// A master that cannot be asked.
    pub fn task_report(&mut self) -> Result<TaskReport, StoreError> {
        let (report, _) = self.rpc.call::<ReadTaskReport>(&(), std::iter::empty())?;
        Ok(report)
    }

    fn create_tasks(&mut self, tasks: &[NewTask<'_>]) -> Result<Vec<Result<TaskId, ErrorCode>>, StoreError> {
        let (_, created) = self.rpc.call::<CreateTasks>(&(), tasks.iter().copied())?;
        let created = created.collect();
        Ok(created)
    }
}
