//! Replicas by name: listing, copying and moving them, and draining segments.

use store_core::message::{
    CancelTasks, CreateTasks, DrainInfo, DrainStatus, FindReplicas, ListPosition, ListTasks, NewTask,
    OrderSegments, QueryTasks, ReadTaskReport, ReplicaInfo, ReplicaState, RetryTasks, SegmentOrder,
    SegmentState, TaskCause, TaskInfo, TaskQuery, TaskReport, TaskState,
};
use store_core::{ErrorCode, Key, SegmentNo, TaskId};

use super::{MasterClient, SegmentEntry};
use crate::client::chunks;
use crate::error::StoreError;

/// One replica of an object, readable or not, and how to reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReplicaEntry {
    /// Number of the segment that it is on.
    pub segment: SegmentNo,
    /// Name of that segment.
    pub name: String,
    /// Address at which the engine opens that segment.
    pub endpoint: String,
    /// The first byte's address in the segment's export.
    pub addr: u64,
    /// Length of the object, bytes.
    pub len: u64,
    /// The state of the replica.
    pub state: ReplicaState,
}

/// The replicas of each object of a request.
pub type ReplicasOfEach = Vec<Result<Vec<ReplicaEntry>, ErrorCode>>;

/// The current state of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TaskEntry {
    /// Number of the task.
    pub id: TaskId,
    /// Key of its object.
    pub key: Vec<u8>,
    /// Bytes to copy.
    pub len: u64,
    /// State of the task.
    pub state: TaskState,
    /// What created the task.
    pub cause: TaskCause,
    /// Segment of the replica to move; `None`: the task is a copy.
    pub source: Option<SegmentNo>,
    /// Segment of the new replica; `None`: none has been chosen yet.
    pub target: Option<SegmentNo>,
    /// Number of tries begun.
    pub attempts: u32,
    /// Why the latest try failed.
    pub error: Option<ErrorCode>,
    /// Time since the task was created, milliseconds.
    pub age_ms: u64,
}

/// One page of tasks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TaskPage {
    /// The tasks, oldest first.
    pub entries: Vec<TaskEntry>,
    /// Where the next page begins; 0: this was the last page.
    pub cursor: u64,
}

impl From<TaskInfo<'_>> for TaskEntry {
    fn from(info: TaskInfo<'_>) -> Self {
        let TaskInfo { id, len, state, cause, source, target, attempts, error, age_ms, .. } = info;
        Self { id, key: info.key.0.to_vec(), len, state, cause, source, target, attempts, error, age_ms }
    }
}

impl MasterClient<'_> {
    /// Lists the replicas of an object, readable or not. Neither leases the object nor counts as a use.
    ///
    /// # Errors
    /// `ObjectNotFound`; no answer from the master.
    pub fn replicas(&mut self, key: &[u8]) -> Result<Vec<ReplicaInfo>, StoreError> {
        let (_, mut found) = self.rpc.call::<FindReplicas>(&(), std::iter::once(Key(key)))?;
        let replicas = found.next().unwrap_or(Err(ErrorCode::InternalError))?.to_vec();
        Ok(replicas)
    }

    /// Lists the replicas of each of these objects, readable or not, and the segments that they are on: one
    /// request per 1,024 keys, and one about the segments. Neither leases an object nor counts as a use.
    ///
    /// A replica whose segment was unmounted between the requests is left out. An object all of whose
    /// segments were is `ObjectNotFound`.
    ///
    /// # Errors
    /// No answer from the master. For an item: `ObjectNotFound`, also for an invalid key, as no object
    /// has it.
    pub fn batch_replicas(&mut self, keys: &[&[u8]]) -> Result<ReplicasOfEach, StoreError> {
        let mut found: Vec<Result<Vec<ReplicaInfo>, ErrorCode>> = Vec::with_capacity(keys.len());
        for keys in chunks(keys, |key| key.len()) {
            let (_, answers) = self.rpc.call::<FindReplicas>(&(), keys.iter().map(|key| Key(key)))?;
            found.extend(answers.map(|answer| answer.map(|replicas| replicas.to_vec())));
        }
        let mut wanted: Vec<SegmentNo> = found.iter().flatten().flatten().map(|info| info.segment).collect();
        wanted.sort_unstable();
        wanted.dedup();
        let segments = self.segments_of(&wanted)?;
        let entry = |info: ReplicaInfo| {
            let at = segments.binary_search_by_key(&info.segment, |segment| segment.segment).ok()?;
            let SegmentEntry { segment, name, endpoint, .. } = segments[at].clone();
            Some(ReplicaEntry { segment, name, endpoint, addr: info.addr, len: info.len, state: info.state })
        };
        let entries = found.into_iter().map(|found| {
            let entries: Vec<_> = found?.into_iter().filter_map(entry).collect();
            if entries.is_empty() { Err(ErrorCode::ObjectNotFound) } else { Ok(entries) }
        });
        Ok(entries.collect())
    }

    /// Requests a copy of an object on each of these segments, or, if `targets` is empty, on one that the
    /// master chooses. Returns one task per target; the new replicas are readable when their tasks are done.
    ///
    /// # Errors
    /// For each target, see [`store_core::Master::create_task`]. As a whole: no answer from the master.
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

    /// Requests that the replica on `source` is moved to `target`, or to a segment that the master chooses.
    /// The object stays readable throughout.
    ///
    /// # Errors
    /// See [`store_core::Master::create_task`]; no answer from the master.
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

    /// The current state of a task.
    ///
    /// # Errors
    /// `TaskNotFound`; no answer from the master.
    pub fn task(&mut self, id: TaskId) -> Result<TaskEntry, StoreError> {
        let (_, mut found) = self.rpc.call::<QueryTasks>(&(), std::iter::once(id))?;
        let entry = found.next().unwrap_or(Err(ErrorCode::InternalError)).map(TaskEntry::from)?;
        Ok(entry)
    }

    /// Lists at most `limit` tasks, finished ones included; with `state`, only those in that state. `cursor`
    /// is 0 for the first page, then the cursor of the page before.
    ///
    /// # Errors
    /// No answer from the master.
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

    /// Cancels a task and returns its state. A task that is done stays done.
    ///
    /// # Errors
    /// `TaskNotFound`; no answer from the master.
    pub fn cancel_task(&mut self, id: TaskId) -> Result<TaskEntry, StoreError> {
        let (_, mut found) = self.rpc.call::<CancelTasks>(&(), std::iter::once(id))?;
        let entry = found.next().unwrap_or(Err(ErrorCode::InternalError)).map(TaskEntry::from)?;
        Ok(entry)
    }

    /// Restarts a task that was given up and returns its state.
    ///
    /// # Errors
    /// `TaskNotFound`, or why the task cannot be restarted; no answer from the master.
    pub fn retry_task(&mut self, id: TaskId) -> Result<TaskEntry, StoreError> {
        let (_, mut found) = self.rpc.call::<RetryTasks>(&(), std::iter::once(id))?;
        let entry = found.next().unwrap_or(Err(ErrorCode::InternalError)).map(TaskEntry::from)?;
        Ok(entry)
    }

    /// Sets the state of a segment: `Draining` moves all its objects elsewhere, `Maintenance` only keeps new
    /// objects away, `Active` ends both. Returns the progress of the drain.
    ///
    /// # Errors
    /// `SegmentNotFound`; no answer from the master.
    pub fn drain(&mut self, segment: SegmentNo, state: SegmentState) -> Result<DrainInfo, StoreError> {
        let order = SegmentOrder { segment, state };
        let (_, mut infos) = self.rpc.call::<OrderSegments>(&(), std::iter::once(order))?;
        let info = infos.next().unwrap_or(Err(ErrorCode::InternalError))?;
        Ok(info)
    }

    /// The progress of draining these segments; if `segments` is empty, of all that are not active.
    ///
    /// # Errors
    /// `SegmentNotFound` for any of them; no answer from the master.
    pub fn drain_status(&mut self, segments: &[SegmentNo]) -> Result<Vec<DrainInfo>, StoreError> {
        let (_, infos) = self.rpc.call::<DrainStatus>(&(), segments.iter().copied())?;
        let infos = infos.collect::<Result<_, _>>()?;
        Ok(infos)
    }

    /// Counters and gauges of tasks, drains, hot replicas and reports of bad replicas.
    ///
    /// # Errors
    /// No answer from the master.
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
