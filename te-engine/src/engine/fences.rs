//! Fences of whole segments (law L5): one fence per rail that reaches the owner, and one end for the caller.

use std::time::Duration;
use std::vec::Vec;

use te_core::{Error, ErrorKind, Instant, Status, Token, Transport};

use super::{Ended, Engine, verdict};
use crate::error::{SegmentError, TransferError};
use crate::request::{BatchReport, SegmentHandle};

/// Maximum number of fences of segments in flight.
const FENCES_MAX: usize = 1024;

/// A fence in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FenceHandle {
    index: u32,
    generation: u32,
}

#[derive(Default)]
pub(super) struct Fences {
    rows: Vec<Row>,
}

#[derive(Clone, Copy)]
struct Row {
    generation: u32,
    live: bool,
    segment: SegmentHandle,
    /// Rails' fences that have not ended.
    pending: u32,
    error: Option<Error>,
    deadline: Option<Instant>,
    timed_out: bool,
    /// Freed before it ended.
    orphan: bool,
}

impl Fences {
    /// Records the end of one rail's part of fence number `index`. Returns the fence when all of its rails
    /// have ended.
    pub(super) fn complete(&mut self, index: u32, result: Result<(), Error>) -> Option<FenceHandle> {
        let row = self.rows.get_mut(index as usize).filter(|row| row.live)?;
        if let Err(error) = result {
            row.error.get_or_insert(error);
        }
        row.pending = row.pending.saturating_sub(1);
        (row.pending == 0).then_some(FenceHandle { index, generation: row.generation })
    }

    fn row(&mut self, fence: FenceHandle) -> Option<&mut Row> {
        self.rows.get_mut(fence.index as usize).filter(|row| row.live && row.generation == fence.generation)
    }

    fn free(&mut self, index: u32) {
        let row = &mut self.rows[index as usize];
        row.live = false;
        row.generation = row.generation.wrapping_add(1);
    }
}

impl Engine {
    /// Fences a segment (law L5): when the fence has completed, no WRITE that ended before this call can
    /// still land there.
    ///
    /// A quarantined batch has ended for its caller, but not for the rails, and their fences do not cover it.
    /// So while one uses the segment the fence is refused; it succeeds once
    /// [`Stats::quarantined_batches`](crate::Stats) has gone down.
    ///
    /// # Errors
    /// `Segment` with `NotFound` when the segment is not open, with `Busy` while a quarantined batch uses it;
    /// `Full`.
    pub fn fence(
        &mut self,
        handle: SegmentHandle,
        timeout: Option<Duration>,
    ) -> Result<FenceHandle, TransferError> {
        self.here()?;
        let source = SegmentError::NotFound;
        let segment = self.segments.segment_mut(handle).ok_or(TransferError::Segment { index: 0, source })?;
        if self.quarantined_batches > 0 {
            let uses = |row: &super::Row| row.uses.iter().any(|&(_, used)| used == handle);
            if self.rows.iter().any(|row| row.quarantined && uses(row)) {
                return Err(TransferError::Segment { index: 0, source: SegmentError::Busy });
            }
        }
        let index = self.fences.rows.iter().position(|row| !row.live).unwrap_or(self.fences.rows.len());
        if index == FENCES_MAX {
            return Err(TransferError::Full);
        }
        let deadline = timeout.map(|timeout| self.clock.now() + timeout);
        let fresh = Row {
            generation: self.fences.rows.get(index).map_or(0, |row| row.generation),
            live: true,
            segment: handle,
            pending: 0,
            error: None,
            deadline,
            timed_out: false,
            orphan: false,
        };
        if index == self.fences.rows.len() {
            self.fences.rows.push(fresh);
        }
        let row = &mut self.fences.rows[index];
        *row = fresh;
        // A rail's fence covers all that it has sent to the owner, so each rail fences one region only.
        let mut covered = 0;
        for region in &segment.regions {
            let rails = self.rails.reachable(region.id);
            if rails & !covered == 0 {
                continue;
            }
            covered |= rails;
            match self.rails.fence(Token::of_fence(index as u32), region.id) {
                Ok(()) => row.pending += 1,
                Err(error) => {
                    row.error.get_or_insert(error);
                }
            }
        }
        segment.requests += 1;
        let fence = FenceHandle { index: index as u32, generation: row.generation };
        if row.pending == 0 {
            self.end_fence(fence);
        }
        self.note_deadline(deadline);
        Ok(fence)
    }

    /// The state of a fence.
    ///
    /// # Errors
    /// `NotFound` when it was freed.
    pub fn fence_report(&self, fence: FenceHandle) -> Result<BatchReport, TransferError> {
        self.here()?;
        let row = self.fences.rows.get(fence.index as usize);
        let row = row.filter(|row| row.live && row.generation == fence.generation && !row.orphan);
        let row = row.ok_or(TransferError::NotFound)?;
        let status = match (row.pending, row.error) {
            _ if row.timed_out => Status::TimedOut,
            (0, None) => Status::Completed,
            (0, Some(_)) => Status::Failed,
            _ => Status::Pending,
        };
        let failed = status.is_terminal() && status != Status::Completed;
        Ok(BatchReport {
            status,
            bytes: 0,
            requests_failed: u32::from(failed),
            error: if row.timed_out { Some(Error::new(ErrorKind::TimedOut)) } else { row.error },
            fence_needed: status != Status::Completed,
            quarantined: false,
        })
    }

    /// Polls until a fence has ended, at most `timeout`.
    ///
    /// # Errors
    /// `Ended` when the fence ended other than `Completed`; `WaitTimedOut` when it has not ended; `NotFound`.
    pub fn wait_fence(
        &mut self,
        fence: FenceHandle,
        timeout: Option<Duration>,
    ) -> Result<BatchReport, TransferError> {
        let until = timeout.map(|timeout| self.clock.now() + timeout);
        self.poll_until(until, |engine| {
            let report = engine.fence_report(fence)?;
            if report.status.is_terminal() { verdict(report).map(Some) } else { Ok(None) }
        })
    }

    /// Frees a fence, whether it has ended or not.
    ///
    /// # Errors
    /// `NotFound` when it was freed before.
    pub fn free_fence(&mut self, fence: FenceHandle) -> Result<(), TransferError> {
        self.here()?;
        let row = self.fences.row(fence).filter(|row| !row.orphan).ok_or(TransferError::NotFound)?;
        if row.pending > 0 {
            // The rails still report the ends of their parts, which need the row.
            row.orphan = true;
        } else {
            self.fences.free(fence.index);
        }
        Ok(())
    }

    /// Ends a fence of which all rails have ended their parts.
    pub(super) fn end_fence(&mut self, fence: FenceHandle) {
        let Some(row) = self.fences.row(fence) else { return };
        let (segment, timed_out, orphan) = (row.segment, row.timed_out, row.orphan);
        row.deadline = None;
        if let Some(segment) = self.segments.segment_mut(segment) {
            segment.requests -= 1;
        }
        if orphan {
            self.fences.free(fence.index);
        } else if let (Some(ended), false) = (&mut self.ended, timed_out) {
            ended.push(Ended::Fence(fence));
        }
    }

    pub(super) fn expire_fences(&mut self, now: Instant) {
        for index in 0..self.fences.rows.len() {
            let row = &mut self.fences.rows[index];
            let Some(deadline) = row.deadline.filter(|_| row.live) else { continue };
            if now < deadline {
                self.note_deadline(Some(deadline));
                continue;
            }
            row.deadline = None;
            row.timed_out = true;
            let fence = FenceHandle { index: index as u32, generation: row.generation };
            if let (Some(ended), false) = (&mut self.ended, row.orphan) {
                ended.push(Ended::Fence(fence));
            }
        }
    }
}
