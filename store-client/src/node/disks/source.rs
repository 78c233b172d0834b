//! The disks of a node, as its stage service reads them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use store_core::disk::{Failure, Refused};
use store_core::{ErrorCode, SegmentNo};
use te_engine::SharedRegion;

use super::lend::lend;
use crate::disk::{DiskService, NotDone, Stage};
use crate::stage::{Exported, StageJob, StageSource};

/// The disks that can be read now, by their numbers, and the reads under way.
pub(super) struct Sources {
    staging: SharedRegion,
    disks: RwLock<HashMap<SegmentNo, Readable>>,
    jobs: Mutex<Jobs>,
}

/// A disk, and where readers reach it without the node.
struct Readable {
    service: Arc<DiskService>,
    exported: Option<Arc<Exported>>,
}

#[derive(Default)]
struct Jobs {
    last: u64,
    map: HashMap<u64, StageJob>,
}

impl Sources {
    pub(super) fn new(staging: SharedRegion) -> Self {
        Self { staging, disks: RwLock::default(), jobs: Mutex::default() }
    }

    /// The disk can be read under this number from here on.
    pub(super) fn add(&self, disk: SegmentNo, service: Arc<DiskService>, exported: Option<Arc<Exported>>) {
        if exported.is_some() {
            service.locate_extents();
        }
        self.disks
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(disk, Readable { service, exported });
    }

    /// The number means nothing from here on. Reads under way end.
    pub(super) fn remove(&self, disk: SegmentNo) {
        self.disks.write().unwrap_or_else(PoisonError::into_inner).remove(&disk);
    }

    /// A read has ended, and nothing touches its buffer any more.
    pub(super) fn ended(&self, id: u64, result: Result<(), ErrorCode>) -> Option<u64> {
        let job = self.jobs.lock().unwrap_or_else(PoisonError::into_inner).map.remove(&id)?;
        let locator = job.locator();
        job.finish(result);
        Some(locator)
    }

    fn begin(&self, job: StageJob) -> Result<(), (u64, ErrorCode)> {
        let (disk, locator, len, deadline, span) =
            (job.disk(), job.locator(), job.len(), job.deadline(), job.buffer());
        let id = {
            let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
            jobs.last += 1;
            let id = jobs.last;
            jobs.map.insert(id, job);
            id
        };
        let disks = self.disks.read().unwrap_or_else(PoisonError::into_inner);
        let Readable { service, .. } = disks.get(&disk).ok_or((id, ErrorCode::SegmentNotFound))?;
        // The buffer is a part of the staging memory, and the job is kept until the disk has returned it.
        let buffer = lend(&self.staging, span.as_ptr().addr() as u64, span.len() as u64)
            .ok_or((id, ErrorCode::InternalError))?;
        let stage = Stage { id, locator, len, deadline, buffer };
        service.stage(stage).map_err(|_| (id, ErrorCode::UnavailableInCurrentStatus))
    }
}

impl StageSource for Sources {
    fn stage(&self, job: StageJob) {
        if let Err((id, error)) = self.begin(job) {
            self.ended(id, Err(error));
        }
    }

    fn locate(&self, disk: SegmentNo, sequences: &[u64]) -> Option<(Arc<Exported>, Vec<Option<u64>>)> {
        let disks = self.disks.read().unwrap_or_else(PoisonError::into_inner);
        let Readable { service, exported } = disks.get(&disk)?;
        let extents = sequences.iter().map(|sequence| service.extent_at(*sequence)).collect();
        Some((Arc::clone(exported.as_ref()?), extents))
    }
}

/// What a reader is told about a read that was not carried out.
pub(super) const fn code_of(why: NotDone) -> ErrorCode {
    match why {
        NotDone::Refused(Refused::Gone | Refused::Absent | Refused::Removed) => ErrorCode::ObjectNotFound,
        NotDone::Refused(Refused::OtherLength) => ErrorCode::InvalidParams,
        NotDone::Failed(Failure::Device) => ErrorCode::TransferFail,
        _ => ErrorCode::UnavailableInCurrentStatus,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_gone_is_told_from_what_a_reader_has_wrong_and_from_what_can_be_tried_again() {
        let of = |why| code_of(NotDone::Refused(why));
        assert_eq!(of(Refused::Gone), ErrorCode::ObjectNotFound);
        assert_eq!(of(Refused::Absent), ErrorCode::ObjectNotFound);
        assert_eq!(of(Refused::OtherLength), ErrorCode::InvalidParams);
        assert_eq!(of(Refused::Busy), ErrorCode::UnavailableInCurrentStatus);
        assert_eq!(code_of(NotDone::Failed(Failure::Device)), ErrorCode::TransferFail);
    }
}
