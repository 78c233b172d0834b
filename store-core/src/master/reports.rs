//! Replicas that readers found bad, and where replicas are.
//!
//! The master never sees the bytes, so it does not believe a single reader: one with bad memory, or a bad
//! link, would take the store apart. A replica is dropped when
//! [`TaskConfig::bad_reports_min`](crate::TaskConfig::bad_reports_min) different readers have found other
//! bytes in it than were committed. That includes the last replica: it cannot be read, and as long as its key
//! is taken the object cannot be put again.

use alloc::collections::VecDeque;

use serde::{Deserialize, Serialize};
use te_core::Instant;

use super::Master;
use crate::codec::Short;
use crate::message::{BadReplica, ReplicaInfo, ReplicaInfos, ReplicaState, TaskState, Verdict};
use crate::pending_release::Reason;
use crate::segments::Placed;
use crate::{ErrorCode, FullKey, SegmentNo, TenantNo};

/// Most readers that are distinguished per replica.
pub(crate) const REPORTERS_MAX: usize = 8;
/// Suspected replicas that are remembered; beyond the limit the oldest is forgotten.
const SUSPECTS_MAX: usize = 256;

#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Suspects {
    list: VecDeque<Suspect>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Suspect {
    generation: u64,
    segment: SegmentNo,
    reporters: Short<u64, REPORTERS_MAX>,
}

impl Suspects {
    /// Counts a report; returns how many readers have reported the replica.
    fn note(&mut self, generation: u64, segment: SegmentNo, reporter: u64) -> usize {
        let known = self
            .list
            .iter_mut()
            .find(|suspect| suspect.generation == generation && suspect.segment == segment);
        if let Some(suspect) = known {
            if !suspect.reporters.contains(&reporter) {
                // When the list is full, the limit on reports is reached already.
                let _ = suspect.reporters.push(reporter);
            }
            return suspect.reporters.len();
        }
        if self.list.len() >= SUSPECTS_MAX {
            self.list.pop_front();
        }
        let mut reporters = Short::new();
        let _ = reporters.push(reporter);
        self.list.push_back(Suspect { generation, segment, reporters });
        1
    }

    fn forget(&mut self, generation: u64, segment: SegmentNo) {
        self.list.retain(|suspect| suspect.generation != generation || suspect.segment != segment);
    }
}

impl Master {
    /// A reader found other bytes in a replica than were committed, while its lease was valid.
    ///
    /// # Errors
    /// `ObjectNotFound`, `ReplicaNotFound`: it is gone already.
    pub fn report_replica(
        &mut self,
        now: Instant,
        reporter: u64,
        tenant: TenantNo,
        bad: &BadReplica<'_>,
    ) -> Result<Verdict, ErrorCode> {
        self.report_replica_of(now, reporter, Some(tenant), bad)
    }

    /// As [`Self::report_replica`], of a tenant's object; or of any tenant's object with a task.
    pub(crate) fn report_replica_of(
        &mut self,
        now: Instant,
        reporter: u64,
        tenant: Option<TenantNo>,
        bad: &BadReplica<'_>,
    ) -> Result<Verdict, ErrorCode> {
        if self.disks.get(bad.segment).is_some() {
            return self.report_on_disk(reporter, tenant, bad);
        }
        let index = match tenant {
            Some(tenant) => self.find_generation(FullKey { tenant, key: bad.key.0 }, bad.generation),
            None => self.find_ordered(bad),
        };
        let index = index.ok_or(ErrorCode::ObjectNotFound)?;
        let entry = self.objects.entry(index);
        let replicas = entry.replicas.as_slice();
        if !entry.is_complete() || !replicas.iter().any(|placed| placed.segment == bad.segment) {
            return Err(ErrorCode::ReplicaNotFound);
        }
        let (last, until) = (replicas.len() == 1, self.leased_until(now, index));
        self.task_report.bad_reports_total += 1;
        let reports = self.suspects.note(bad.generation, bad.segment, reporter);
        if reports < self.config.tasks.bad_reports_min as usize {
            return Ok(Verdict::Noted);
        }
        self.suspects.forget(bad.generation, bad.segment);
        self.task_report.bad_dropped_total += 1;
        if last {
            self.drop_from_memory(index, until.map(|until| (until, Reason::Leased)));
            return Ok(Verdict::Gone);
        }
        self.drop_replica(now, index, bad.segment);
        Ok(Verdict::Dropped)
    }

    /// As [`Self::report_replica_of`], of a copy on a disk.
    fn report_on_disk(
        &mut self,
        reporter: u64,
        tenant: Option<TenantNo>,
        bad: &BadReplica<'_>,
    ) -> Result<Verdict, ErrorCode> {
        let tenant = tenant.ok_or(ErrorCode::ObjectNotFound)?;
        let full = FullKey { tenant, key: bad.key.0 };
        let record = self.shelf.find_generation(full, bad.generation).ok_or(ErrorCode::ObjectNotFound)?;
        if self.shelf.record(record).disk != bad.segment {
            return Err(ErrorCode::ReplicaNotFound);
        }
        self.task_report.bad_reports_total += 1;
        let reports = self.suspects.note(bad.generation, bad.segment, reporter);
        if reports < self.config.tasks.bad_reports_min as usize {
            return Ok(Verdict::Noted);
        }
        self.suspects.forget(bad.generation, bad.segment);
        self.task_report.bad_dropped_total += 1;
        self.drop_record(record, true);
        self.stats.disk_lost_total += 1;
        Ok(if self.objects.find(full).is_some() { Verdict::Dropped } else { Verdict::Gone })
    }

    /// An object, of any tenant, that a node has a task to copy.
    fn find_ordered(&self, bad: &BadReplica<'_>) -> Option<u32> {
        let mut tasks = self.tasks.of_object(bad.generation);
        let (_, task) = tasks.find(|(_, task)| *task.key == *bad.key.0)?;
        self.is_there(task.index, bad.generation).then_some(task.index)
    }

    /// Where an object is, readable or not. Neither leases it nor counts as a use.
    ///
    /// # Errors
    /// `ObjectNotFound`.
    pub fn find_replicas<'k>(&self, key: impl Into<FullKey<'k>>) -> Result<ReplicaInfos, ErrorCode> {
        let key = key.into();
        let mut infos = ReplicaInfos::new();
        if let Some(record) = self.readable_record(key).map(|index| self.shelf.record(index)) {
            let (segment, addr, len) = (record.disk, record.locator, record.len.into());
            let info = ReplicaInfo { segment, addr, len, state: ReplicaState::Complete };
            // The list has room for one more than an object's replicas.
            let _ = infos.push(info);
        }
        let index = match self.objects.find(key) {
            Some(index) => index,
            None if infos.is_empty() => return Err(ErrorCode::ObjectNotFound),
            None => return Ok(infos),
        };
        let entry = self.objects.entry(index);
        let state = if entry.is_complete() { ReplicaState::Complete } else { ReplicaState::Processing };
        let info = |placed: &Placed, state| ReplicaInfo {
            segment: placed.segment,
            addr: placed.addr,
            len: entry.len,
            state,
        };
        for placed in entry.replicas.as_slice() {
            // The list has room for all replicas of one object.
            let _ = infos.push(info(placed, state));
        }
        for (_, task) in self.tasks.of_object(entry.generation) {
            let state = match task.state {
                TaskState::Processing => ReplicaState::Processing,
                _ => ReplicaState::Initialized,
            };
            let _ = infos.push(info(&task.placed, state));
        }
        Ok(infos)
    }
}
