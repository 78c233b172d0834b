//! Reports of batches, and counters of the engine.

use std::fmt;

use te_core::{BatchHandle, CancelReason, Error, ErrorKind, Outcome, Status, Transport};

use super::{Engine, Row};
use crate::error::TransferError;
use crate::request::{BatchReport, RailStats, RequestStatus, Stats};

impl Engine {
    /// Everything that is known about a batch.
    ///
    /// # Errors
    /// `NotFound` when it was freed.
    pub fn report(&self, batch: BatchHandle) -> Result<BatchReport, TransferError> {
        self.here()?;
        let progress = self.batches.progress(batch).map_err(|_| TransferError::NotFound)?;
        let row = &self.rows[batch.index()];
        let mut report = BatchReport {
            status: progress.status,
            bytes: progress.bytes_done,
            requests_failed: 0,
            error: progress.error,
            fence_needed: progress.fence_needed,
            quarantined: row.quarantined,
        };
        if row.quarantined {
            report.status = row.given_up();
            report.fence_needed = true;
        }
        if report.status.is_terminal() && report.status != Status::Completed {
            for index in 0..row.uses.len() {
                let request = self.batches.task_progress(batch, index).map(|task| task.status);
                report.requests_failed += u32::from(request != Ok(Status::Completed));
            }
            report.error = report.error.or(Some(Error::new(match report.status {
                Status::TimedOut => ErrorKind::TimedOut,
                _ => ErrorKind::Canceled,
            })));
        }
        Ok(report)
    }

    /// Whether a batch has ended. Made for a polling loop: the cost does not depend on the number of
    /// requests.
    ///
    /// # Errors
    /// `NotFound` when it was freed.
    pub fn is_done(&self, batch: BatchHandle) -> Result<bool, TransferError> {
        self.here()?;
        let row = self.rows.get(batch.index()).filter(|row| row.handle == Some(batch));
        row.map(|row| row.done).ok_or(TransferError::NotFound)
    }

    /// The state of a batch.
    ///
    /// # Errors
    /// `NotFound` when it was freed.
    pub fn status(&self, batch: BatchHandle) -> Result<Status, TransferError> {
        self.report(batch).map(|report| report.status)
    }

    /// What is known about request `index` of a batch.
    ///
    /// # Errors
    /// `NotFound` when the batch was freed or has no such request.
    pub fn request_status(&self, batch: BatchHandle, index: usize) -> Result<RequestStatus, TransferError> {
        self.here()?;
        let task = self.batches.task_progress(batch, index).map_err(|_| TransferError::NotFound)?;
        let row = &self.rows[batch.index()];
        let quarantined = row.quarantined && !task.status.is_terminal();
        let status = if quarantined { row.given_up() } else { task.status };
        let fence_needed = task.fence_needed || quarantined;
        let outcome = match status {
            Status::Completed => Outcome::Applied,
            _ if status.is_terminal() && task.bytes_done == 0 && !fence_needed => Outcome::NotApplied,
            _ => Outcome::Unknown,
        };
        let kind = match status {
            Status::TimedOut => Some(ErrorKind::TimedOut),
            Status::Canceled => Some(ErrorKind::Canceled),
            _ => None,
        };
        let error = task.error.or(kind.map(Error::new));
        let whole = |sum: &&super::PartSum| {
            usize::from(sum.request) == index && (sum.start, sum.len) == (0, task.bytes_done)
        };
        let crc32c = row.sums.iter().find(whole).map(|sum| sum.crc32c);
        let crc32c = crc32c.filter(|_| status == Status::Completed);
        Ok(RequestStatus { status, bytes: task.bytes_done, error, outcome, fence_needed, crc32c })
    }

    /// Counters of the engine and of each rail.
    #[must_use]
    pub fn stats(&self) -> Stats {
        if self.here().is_err() {
            return Stats::default();
        }
        let now = self.clock.now();
        let (quarantined_regions, quarantined_region_bytes) = self.quarantined_regions();
        let rails = self.rails.rails();
        let rail = |index: usize| {
            let health = self.rails.route().health(index)?;
            Some(RailStats {
                name: rails[index].name(),
                device: self.devices.get(index).cloned().unwrap_or_default(),
                bytes: health.bytes_done,
                slices: health.slices_ended - health.errors,
                errors: health.errors,
                inflight_bytes: health.bytes_in_flight,
                ewma_gb_s: health.bandwidth as f64 / 1e9,
                slice_ns: health.slice_nanos,
                paused: health.paused_until.is_some_and(|until| now < until),
                slow: health.state == te_core::RailState::Slow,
                pauses: health.pauses,
                slowdowns: health.slowdowns,
            })
        };
        Stats {
            rails: (0..rails.len()).filter_map(rail).collect(),
            regions: self.regions.len(),
            registered_bytes: self.regions.bytes(),
            segments: self.segments.len(),
            batches: self.batches.live() as u32,
            batches_timed_out: self.batches_timed_out,
            quarantined_batches: self.quarantined_batches,
            quarantined_bytes: self.quarantined_bytes,
            quarantined_regions,
            quarantined_region_bytes,
            leaked_buffers: 0,
            leaked_bytes: 0,
            notifications_refused: self.inbox.refused(),
        }
    }
}

/// `Ok` for `Completed`, else `TransferError::Ended`.
pub(crate) fn verdict(report: BatchReport) -> Result<BatchReport, TransferError> {
    match (report.status, report.error) {
        (Status::Completed, _) => Ok(report),
        (status, error) => Err(TransferError::Ended {
            status,
            requests_failed: report.requests_failed,
            error: error.unwrap_or(Error::new(ErrorKind::Canceled)),
            fence_needed: report.fence_needed,
        }),
    }
}

impl Row {
    /// The status of a batch that was cancelled and did not drain.
    pub(super) fn given_up(&self) -> Status {
        match self.reason {
            Some(CancelReason::TimedOut) => Status::TimedOut,
            _ => Status::Canceled,
        }
    }
}

/// Prints the name and the incarnation.
impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("name", &self.published.name)
            .field("incarnation", &self.published.incarnation)
            .finish()
    }
}
