//! The master's part in tasks: where a new replica is placed, which node makes it, and when it counts.
//!
//! ```text
//!   requested, drained, hot ──▶ space is reserved ──▶ the node that owns the space fetches it: an attempt, and a hold
//!                                                       │ reads a source over the fabric into the space, verifies
//!                                                       ▼
//!        a replica, readable at once ◀── checksum matches ── its report ── or not ──▶ another attempt, or none
//!        a move: the source is dropped
//! ```
//!
//! The node that gets the replica *reads* it into its own memory; no other process writes to it. So the space
//! is quiet as soon as that node reports that its read has ended, or its segment is gone. If an attempt is
//! given up before the node's report, its space is pending release, as a lost writer's put is, under the
//! number of the attempt.

use alloc::vec::Vec;

use te_core::Instant;

use super::{Master, millis, replicas_of};
use crate::chunks::stored_len;
use crate::codec::Short;
use crate::message::{
    FetchRequest, REPLICAS_MAX, TaskCause, TaskEnd, TaskInfo, TaskOrder, TaskQuery, TaskReport, TaskState,
};
use crate::objects::{Placements, Removed, charge};
use crate::pending_release::Reason;
use crate::placement::{PlaceRequest, Spared};
use crate::segments::{HELD, Placed};
use crate::tasks::{Task, deadline};
use crate::{ErrorCode, FullKey, NodeId, Placement, SegmentNo, TaskId, TenantNo};

/// Overdue tasks that one call gives up.
const OVERDUE_PER_CALL_MAX: u32 = 256;
/// Tasks examined for one page of a listing.
const LIST_SCAN_MAX: usize = 4_096;
/// Tasks in one page of a listing.
const LIST_MAX: u32 = 512;

/// A task to create.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wish {
    pub(super) index: u32,
    /// The segment to move the replica from; `None`: a copy.
    pub(super) source: Option<SegmentNo>,
    pub(super) target: Option<SegmentNo>,
    pub(super) cause: TaskCause,
}

impl Master {
    /// Copies an object to one more segment, or moves it from one segment to another. Repeated while the task
    /// is unfinished, it returns the same task.
    ///
    /// # Errors
    /// `ObjectNotFound`, `ReplicaIsNotReady`, `ReplicaNotFound` (no such source), `ReplicaAlreadyExists` (at
    /// the target), `ObjectHasReplicationTask`, `SegmentNotFound`, `NoAvailableHandle` (nothing is evicted
    /// for it), `KeysUltraLimit` (it has the maximum number of replicas), `TaskPendingLimitExceeded`,
    /// `TenantQuotaExceeded`.
    pub fn create_task<'k>(
        &mut self,
        now: Instant,
        key: impl Into<FullKey<'k>>,
        source: Option<SegmentNo>,
        target: Option<SegmentNo>,
    ) -> Result<TaskId, ErrorCode> {
        let index = self.objects.find(key.into()).ok_or(ErrorCode::ObjectNotFound)?;
        self.add_task(now, Wish { index, source, target, cause: TaskCause::Requested })
    }

    /// A task and its state.
    ///
    /// # Errors
    /// `TaskNotFound`.
    pub fn task(&self, now: Instant, id: TaskId) -> Result<TaskInfo<'_>, ErrorCode> {
        self.tasks.get(id).map(|task| task.info(id, now)).ok_or(ErrorCode::TaskNotFound)
    }

    pub(crate) fn is_task_of(&self, id: TaskId, tenant: Option<TenantNo>) -> bool {
        self.tasks.get(id).is_some_and(|task| tenant.is_none_or(|tenant| tenant == task.tenant))
    }

    /// Calls `each` with a page of tasks, oldest first; returns the cursor of the next page, 0 at the end.
    /// `each` returns false to stop early.
    pub fn list_tasks<'a>(
        &'a self,
        now: Instant,
        query: &TaskQuery,
        each: impl FnMut(TaskInfo<'a>) -> bool,
    ) -> u64 {
        self.list_tasks_of(now, None, query, each)
    }

    /// As [`Self::list_tasks`], with the tasks of one tenant.
    pub(crate) fn list_tasks_of<'a>(
        &'a self,
        now: Instant,
        tenant: Option<TenantNo>,
        query: &TaskQuery,
        mut each: impl FnMut(TaskInfo<'a>) -> bool,
    ) -> u64 {
        let limit = query.limit.clamp(1, LIST_MAX);
        let mut listed = 0;
        for (seen, (id, task)) in self.tasks.from(TaskId::new(query.cursor)).enumerate() {
            let theirs = tenant.is_none_or(|tenant| tenant == task.tenant);
            let wanted = theirs && query.state.is_none_or(|state| state == task.state);
            if seen == LIST_SCAN_MAX || wanted && (listed == limit || !each(task.info(id, now))) {
                return id.get();
            }
            listed += u32::from(wanted);
        }
        0
    }

    /// Cancels a task. Space that its node may be writing to is pending release until the node reports that
    /// it is quiet.
    ///
    /// # Errors
    /// `TaskNotFound`.
    pub fn cancel_task(&mut self, now: Instant, id: TaskId) -> Result<TaskInfo<'_>, ErrorCode> {
        let state = self.tasks.get(id).ok_or(ErrorCode::TaskNotFound)?.state;
        if !state.is_finished() {
            self.end_attempt(now, id, ErrorCode::UnavailableInCurrentStatus, state == TaskState::Pending);
            self.finish_task(now, id, TaskState::Canceled);
        }
        self.task(now, id)
    }

    /// Retries a task that failed or was canceled. A task in another state is not changed.
    ///
    /// # Errors
    /// `TaskNotFound`, and as [`Self::create_task`].
    pub fn retry_task(&mut self, now: Instant, id: TaskId) -> Result<TaskInfo<'_>, ErrorCode> {
        let task = self.tasks.get(id).ok_or(ErrorCode::TaskNotFound)?;
        if matches!(task.state, TaskState::Failed | TaskState::Canceled) {
            let wish = Wish {
                index: task.index,
                source: task.source,
                target: task.wanted,
                cause: TaskCause::Requested,
            };
            let (generation, tenant, len) = (task.generation, task.tenant, task.len);
            if !self.is_there(wish.index, generation) {
                return Err(ErrorCode::ObjectNotFound);
            }
            if self.tasks.pending() + self.tasks.processing() >= self.config.tasks.unfinished_max {
                return Err(ErrorCode::TaskPendingLimitExceeded);
            }
            if wish.source.is_none() && !self.may_copy(tenant, len) {
                return Err(ErrorCode::TenantQuotaExceeded);
            }
            let (placed, node) = self.find_place(now, wish)?;
            let until = deadline(now, self.config.tasks.pending_timeout_ms);
            self.tasks.revive(id, placed, node, until);
        }
        self.task(now, id)
    }

    /// The tasks of a node: those that it was given before and has not reported, then further ones, up to its
    /// limit. The sources of a task may be read for the time of a lease, from the node's request on, or until
    /// the node reports the end.
    ///
    /// # Errors
    /// `ClientNotFound` when the node is not known under this incarnation, `IllegalClient` when the key is
    /// wrong.
    pub fn fetch_tasks(
        &mut self,
        now: Instant,
        fetch: &FetchRequest,
    ) -> Result<Vec<TaskOrder<'_>>, ErrorCode> {
        self.check_incarnation(fetch)?;
        // Find the work that earlier reports have made room for.
        self.drains_timeout(now);
        self.promote(now);
        let most = fetch.count_max.min(self.config.tasks.per_node_max) as usize;
        let mut ids: Vec<TaskId> = self.tasks.running(fetch.node).take(most).collect();
        while ids.len() < most {
            let Some(id) = self.tasks.next_waiting(fetch.node) else { break };
            if self.begin_attempt(now, id) {
                ids.push(id);
            }
        }
        let until = now + self.lease();
        for id in &ids {
            if let Some((index, generation)) = self.tasks.get(*id).map(|task| (task.index, task.generation))
                && self.is_there(index, generation)
            {
                let again = self.tasks.hold(*id, until) > now;
                self.objects.hold(now, index, until, again);
            }
        }
        let orders = ids.into_iter().filter_map(|id| {
            let task = self.tasks.get(id)?;
            let entry = self.objects.entry(task.index);
            self.is_there(task.index, task.generation).then(|| TaskOrder {
                id,
                attempt: task.attempt,
                key: crate::Key(&task.key),
                generation: task.generation,
                len: task.len,
                checksum: entry.checksum,
                segment: task.placed.segment,
                addr: task.placed.addr,
                sources: replicas_of(entry.replicas.as_slice()),
            })
        });
        Ok(orders.collect())
    }

    /// A node reports the end of an attempt. A repetition has no effect.
    ///
    /// # Errors
    /// `TaskNotFound` when that attempt ended otherwise than by this report.
    pub fn end_task(&mut self, now: Instant, node: NodeId, end: &TaskEnd) -> Result<(), ErrorCode> {
        let quiet = end.quiet || end.result.is_ok();
        let latest = |task: &&Task| task.attempt == end.attempt && end.attempt != 0;
        if quiet && self.tasks.get(end.id).filter(latest).is_some_and(|task| task.node == node) {
            self.end_hold(now, end.id);
        }
        match self.tasks.get(end.id).filter(latest) {
            Some(task) if task.state == TaskState::Processing && task.node == node => {}
            Some(task) if task.state == TaskState::Done => return Ok(()),
            _ => {
                // The attempt was given up meanwhile: its space is released now.
                if let Some(tenant) = self.tasks.get(end.id).map(|task| task.tenant).filter(|_| quiet) {
                    self.release_writer(tenant, end.attempt);
                }
                return Err(ErrorCode::TaskNotFound);
            }
        }
        match end.result.map(|checksum| self.finish_copy(now, end.id, checksum)) {
            Ok(Ok(())) => {}
            Ok(Err(error)) | Err(error) => {
                self.end_attempt(now, end.id, error, quiet);
                self.try_again(now, end.id, error);
            }
        }
        Ok(())
    }

    /// Gauges and counters.
    #[must_use]
    pub fn task_report(&self) -> TaskReport {
        TaskReport {
            pending: self.tasks.pending().into(),
            processing: self.tasks.processing().into(),
            finished: self.tasks.finished() as u64,
            draining: self.draining(),
            extra_replicas: self.hot.extras(),
            ..self.task_report
        }
    }

    /// The node of the latest attempt has stopped reading: ends the hold on the object. Only that node's
    /// report ends a hold before its time. An attempt that is given up may still be read: if its source were
    /// reused, the node would find it damaged.
    fn end_hold(&mut self, now: Instant, id: TaskId) {
        let Some(task) = self.tasks.get(id) else { return };
        let (index, generation) = (task.index, task.generation);
        if self.tasks.hold(id, Instant::ZERO) > now {
            self.return_lease(now, index, generation);
        }
    }

    /// Adds a task, with space for it.
    pub(super) fn add_task(&mut self, now: Instant, wish: Wish) -> Result<TaskId, ErrorCode> {
        if self.objects.is_expired(now, wish.index) {
            return Err(ErrorCode::ObjectNotFound);
        }
        let entry = self.objects.entry(wish.index);
        if !entry.is_complete() {
            return Err(ErrorCode::ReplicaIsNotReady);
        }
        let same = |task: &Task| (task.source, task.wanted) == (wish.source, wish.target);
        if let Some((id, _)) = self.tasks.of_object(entry.generation).find(|(_, task)| same(task)) {
            return if wish.cause == TaskCause::Requested {
                Ok(id)
            } else {
                Err(ErrorCode::ObjectHasReplicationTask)
            };
        }
        if self.tasks.pending() + self.tasks.processing() >= self.config.tasks.unfinished_max {
            return Err(ErrorCode::TaskPendingLimitExceeded);
        }
        // Nothing is evicted for a copy, not even objects of its tenant.
        if wish.source.is_none() && !self.may_copy(entry.tenant, entry.len) {
            return Err(ErrorCode::TenantQuotaExceeded);
        }
        let (placed, node) = self.find_place(now, wish)?;
        let entry = self.objects.entry(wish.index);
        let task = Task {
            tenant: entry.tenant,
            key: entry.key.as_slice().into(),
            index: wish.index,
            generation: entry.generation,
            len: entry.len,
            source: wish.source,
            wanted: wish.target,
            cause: wish.cause,
            state: TaskState::Pending,
            error: None,
            attempts: 0,
            attempt: 0,
            placed,
            node,
            created: now,
            deadline: deadline(now, self.config.tasks.pending_timeout_ms),
            held_until: Instant::ZERO,
        };
        self.task_report.created_total += 1;
        Ok(self.tasks.add(task))
    }

    /// Gives up tasks that took too long.
    pub(super) fn tasks_timeout(&mut self, now: Instant) {
        for _ in 0..OVERDUE_PER_CALL_MAX {
            let Some(id) = self.tasks.overdue(now) else { return };
            let processing = self.tasks.get(id).is_some_and(|task| task.state == TaskState::Processing);
            self.end_attempt(now, id, ErrorCode::RpcTimeout, !processing);
            if processing {
                self.try_again(now, id, ErrorCode::RpcTimeout);
            } else {
                self.finish_task(now, id, TaskState::Failed);
            }
        }
    }

    /// A segment is gone, and the copies that were being made there.
    pub(super) fn tasks_lost_segment(&mut self, now: Instant, no: SegmentNo) {
        if self.tasks.pending() + self.tasks.processing() == 0 {
            return;
        }
        let lost: Vec<TaskId> = self.tasks.on_segment(no).collect();
        for id in lost {
            // The space is gone with the segment.
            self.tasks.failed(id, ErrorCode::SegmentNotFound);
            self.try_again(now, id, ErrorCode::SegmentNotFound);
        }
    }

    /// Drops a replica of an object, now or when its leases are over.
    pub(super) fn drop_replica(&mut self, now: Instant, index: u32, segment: SegmentNo) {
        let entry = self.objects.entry(index);
        let (tenant, len) = (entry.tenant, entry.len);
        let leased = self.leased_until(now, index);
        let Some(placed) = self.objects.take_replica(index, segment) else { return };
        if let Some(until) = leased {
            self.generation += 1;
            self.hold_apart(tenant, self.generation, placed, len, until, Reason::Leased);
        } else {
            self.segments.free(&placed);
        }
    }

    /// Adds the space of one replica to those that are pending release, under a generation of its own.
    fn hold_apart(
        &mut self,
        tenant: TenantNo,
        name: u64,
        placed: Placed,
        len: u64,
        until: Instant,
        reason: Reason,
    ) {
        let replicas = Placements::new(&[placed]);
        let removed = Removed { tenant, len, generation: name, complete: true, leases: 0, replicas };
        self.pending_release.hold(&mut self.segments, removed, until, reason, 0);
    }

    /// Whether the entry still contains this object, readable.
    pub(super) fn is_there(&self, index: u32, generation: u64) -> bool {
        let entry = self.objects.entry(index);
        entry.generation == generation && entry.is_complete()
    }

    /// Whether a tenant's quota has room for one more copy, counting those in progress.
    fn may_copy(&self, tenant: TenantNo, len: u64) -> bool {
        let held = self.pending_release.charged(tenant) + self.tasks.reserved(tenant);
        self.objects.usage(tenant).has_bytes(charge(stored_len(len), 1), held)
    }

    /// Reserves space for one more replica of an object, on a segment without one; returns the node that owns
    /// it.
    fn find_place(&mut self, now: Instant, wish: Wish) -> Result<(Placed, NodeId), ErrorCode> {
        if self.objects.is_expired(now, wish.index) {
            return Err(ErrorCode::ObjectNotFound);
        }
        let entry = self.objects.entry(wish.index);
        let (len, mut others, mut most) =
            (stored_len(entry.len), Short::<Placed, { 2 * REPLICAS_MAX }>::new(), 0);
        // A place on a disk is no replica that counts.
        let in_memory = |placed: &&Placed| self.segments.get(placed.segment).is_some();
        for placed in entry.replicas.as_slice().iter().filter(in_memory) {
            let _ = others.push(*placed);
        }
        let has = |others: &[Placed], no| others.iter().any(|placed: &Placed| placed.segment == no);
        if wish.source.is_some_and(|source| !has(&others, source)) {
            return Err(ErrorCode::ReplicaNotFound);
        }
        if wish.target.is_some_and(|target| has(&others, target)) {
            return Err(ErrorCode::ReplicaAlreadyExists);
        }
        most += others.len();
        for (_, task) in self.tasks.of_object(entry.generation) {
            if wish.source.is_some() && task.source == wish.source {
                return Err(ErrorCode::ObjectHasReplicationTask);
            }
            if task.placed != Placed::NOWHERE {
                if wish.target == Some(task.placed.segment) {
                    return Err(ErrorCode::ObjectHasReplicationTask);
                }
                let _ = others.push(task.placed);
            }
            most += usize::from(task.source.is_none());
        }
        // A move does not change the number of replicas.
        if most - usize::from(wish.source.is_some()) >= usize::from(self.config.replicas_max) {
            return Err(ErrorCode::KeysUltraLimit);
        }
        let (placement, near) = (&Placement::ANY, Short::of(SegmentNo::NONE));
        let mut request = PlaceRequest { now, len, tag: HELD, placement, near, spared: Spared::Alone };
        let mut placed = None;
        if wish.target.is_none() {
            placed = self.segments.place(&request, &others);
        }
        // A named segment is used in any case; a new node is spared, unless there is no other place.
        request.spared = if wish.target.is_some() { Spared::All } else { Spared::New };
        if placed.is_none() {
            placed = match wish.target {
                Some(target) if self.segments.get(target).is_none() => {
                    return Err(ErrorCode::SegmentNotFound);
                }
                Some(target) => self.segments.place_on(target, &request),
                None => self.segments.place(&request, &others),
            };
        }
        let placed = placed.ok_or(ErrorCode::NoAvailableHandle)?;
        let node = self.segments.get(placed.segment).map_or(NodeId::default(), |segment| segment.node);
        Ok((placed, node))
    }

    /// Hands a waiting task to its node; returns false when the task has become pointless.
    fn begin_attempt(&mut self, now: Instant, id: TaskId) -> bool {
        let Some(task) = self.tasks.get(id) else { return false };
        let entry = self.objects.entry(task.index);
        let has = |no: SegmentNo| entry.replicas.as_slice().iter().any(|placed| placed.segment == no);
        let error = if !self.is_there(task.index, task.generation) {
            Some(ErrorCode::ObjectNotFound)
        } else if task.source.is_some_and(|source| !has(source)) {
            Some(ErrorCode::ReplicaNotFound)
        } else {
            None
        };
        if let Some(error) = error {
            self.end_attempt(now, id, error, true);
            self.finish_task(now, id, TaskState::Failed);
            return false;
        }
        self.generation += 1;
        self.tasks.start(id, self.generation, deadline(now, self.config.tasks.processing_timeout_ms));
        true
    }

    /// The bytes are in place: the replica counts from here on.
    fn finish_copy(&mut self, now: Instant, id: TaskId, checksum: u32) -> Result<(), ErrorCode> {
        let task = self.tasks.get(id).ok_or(ErrorCode::TaskNotFound)?;
        let (index, source, placed, cause) = (task.index, task.source, task.placed, task.cause);
        if !self.is_there(index, task.generation) {
            return Err(ErrorCode::ObjectNotFound);
        }
        let entry = self.objects.entry(index);
        if checksum != entry.checksum {
            return Err(ErrorCode::ChecksumMismatch);
        }
        // If the source of a move is gone meanwhile, the move has become a copy.
        let replicas = entry.replicas.as_slice();
        let moves = source.is_some_and(|no| replicas.iter().any(|placed| placed.segment == no));
        let in_memory = replicas.iter().filter(|placed| self.segments.get(placed.segment).is_some()).count();
        if in_memory - usize::from(moves) >= usize::from(self.config.replicas_max) {
            return Err(ErrorCode::ReplicaNotFound);
        }
        let (len, generation) = (entry.len, entry.generation);
        // For a copy, the quota was reserved when it was created; for such a move it was not.
        if source.is_some() && !moves && !self.may_copy(entry.tenant, len) {
            return Err(ErrorCode::ReplicaNotFound);
        }
        if let Some(source) = source {
            self.drop_replica(now, index, source);
        }
        self.objects.add_replica(index, placed);
        self.segments.own(&placed, index);
        self.task_report.copied_bytes_total += len;
        if cause == TaskCause::Hot {
            self.hot.note_extra(index, generation, placed.segment);
        }
        self.finish_task(now, id, TaskState::Done);
        Ok(())
    }

    /// An attempt has ended without a replica: its space is freed, at once if it is quiet.
    pub(super) fn end_attempt(&mut self, now: Instant, id: TaskId, error: ErrorCode, quiet: bool) {
        let Some(task) = self.tasks.get(id) else { return };
        let (tenant, attempt, len) = (task.tenant, task.attempt, task.len);
        let placed = self.tasks.failed(id, error);
        if placed == Placed::NOWHERE {
            return;
        }
        if quiet {
            self.segments.free(&placed);
        } else {
            let until = now + millis(self.config.put_start_release_timeout_ms);
            self.hold_apart(tenant, attempt, placed, len, until, Reason::Copy);
        }
    }

    /// Looks for another place, if another attempt is worthwhile.
    fn try_again(&mut self, now: Instant, id: TaskId, error: ErrorCode) {
        let Some(task) = self.tasks.get(id) else { return };
        let hopeless = matches!(
            error,
            ErrorCode::ChecksumMismatch | ErrorCode::ObjectNotFound | ErrorCode::ReplicaNotFound
        ) || error == ErrorCode::SegmentNotFound && task.wanted.is_some();
        let spent = task.attempts >= self.config.tasks.attempts_max;
        let wish = Wish { index: task.index, source: task.source, target: task.wanted, cause: task.cause };
        if hopeless || spent || !self.is_there(task.index, task.generation) {
            return self.finish_task(now, id, TaskState::Failed);
        }
        match self.find_place_again(now, id, wish) {
            Ok((placed, node)) => {
                let until = deadline(now, self.config.tasks.pending_timeout_ms);
                self.tasks.requeue(id, placed, node, until);
                self.task_report.retried_total += 1;
            }
            Err(error) => {
                self.tasks.failed(id, error);
                self.finish_task(now, id, TaskState::Failed);
            }
        }
    }

    /// As [`Self::find_place`], for an unfinished task, which must not be in its own way.
    fn find_place_again(
        &mut self,
        now: Instant,
        id: TaskId,
        wish: Wish,
    ) -> Result<(Placed, NodeId), ErrorCode> {
        self.tasks.detach_from_object(id);
        let found = self.find_place(now, wish);
        self.tasks.attach_to_object(id);
        found
    }

    pub(super) fn finish_task(&mut self, now: Instant, id: TaskId, state: TaskState) {
        self.tasks.finish(id, state);
        match state {
            TaskState::Done => self.task_report.done_total += 1,
            TaskState::Canceled => self.task_report.canceled_total += 1,
            _ => self.task_report.failed_total += 1,
        }
        let Some(task) = self.tasks.get(id) else { return };
        if task.cause == TaskCause::Promotion {
            let (index, generation) = (task.index, task.generation);
            return self.promotion_ended(index, generation);
        }
        if let (TaskCause::Drain, Some(source)) = (task.cause, task.source) {
            let error = task.error;
            self.drain_move_ended(now, source, id, state, error);
        }
    }
}
