//! Replicas that are written to this node's storage once they are verified.
//!
//! The node writes to its own segment, over the fabric of the storage: the bytes are in no memory of its own.
//! An order ends when its write has: before, the target may not have all of it.

use std::time::Instant;

use store_core::chunks::stored_len;
use store_core::{ErrorCode, SegmentNo};
use te_core::{Op, Status};
use te_engine::{BatchReport, SegmentHandle, SharedRegion, Transfer, TransferRequest};

use super::super::home::Writing;
use super::{Flight, Mounted, Order, Work};

impl Work {
    /// Begins to write verified bytes to this node's storage, or ends the order.
    pub(super) fn write(&mut self, order: Order, source: SegmentNo, apart: SharedRegion, mounted: &Mounted) {
        match self.begin_write(&order, &apart, mounted) {
            Some((transfer, writing)) => self.flights.push(Flight {
                order,
                source,
                transfer,
                apart: Some(apart),
                staged: None,
                writing: Some(writing),
            }),
            None => {
                self.end(&order, Err(ErrorCode::TransferFail), true);
                self.spent.push(apart);
            }
        }
    }

    fn begin_write(
        &mut self,
        order: &Order,
        apart: &SharedRegion,
        mounted: &Mounted,
    ) -> Option<(Transfer, Writing)> {
        let home = &mounted.home;
        let writing = home.begin_write()?;
        let segment = self.open_own(mounted)?;
        let stored = stored_len(order.len);
        let len = stored.next_multiple_of(home.granule());
        // What follows in the source's last granule is part of no object.
        apart.write(stored, &vec![0; (len - stored) as usize]).ok()?;
        let (local, remote_addr) = ((apart.id(), 0).into(), home.addr() + order.offset);
        let request = TransferRequest { op: Op::Write, local, segment, remote_addr, len };
        let left = order.until.saturating_duration_since(Instant::now());
        Some((self.engine.submit(&[request], Some(left)).ok()?, writing))
    }

    /// A write to this node's storage has ended.
    pub(super) fn wrote(&mut self, flight: Flight, report: &BatchReport) {
        let Flight { order, transfer, apart, writing, .. } = flight;
        if report.status == Status::Completed {
            self.end(&order, Ok(order.checksum), true);
        } else {
            let failure = transfer.wait(None).err();
            log::warn!("node {}: its storage cannot be written: {failure:?}", self.name);
            self.end(&order, Err(ErrorCode::TransferFail), is_quiet(report));
            self.close_own();
        }
        drop(writing);
        self.spent.extend(apart);
    }

    /// The handle of this node's own segment, as it is mounted now.
    fn open_own(&mut self, mounted: &Mounted) -> Option<SegmentHandle> {
        if let Some((_, handle)) = self.own.filter(|(of, _)| *of == mounted.incarnation) {
            return Some(handle);
        }
        self.close_own();
        let opened = self.engine.open_segment(self.engine.name());
        let handle = opened
            .inspect_err(|error| log::warn!("node {}: its own segment cannot be opened: {error}", self.name))
            .ok()?;
        self.own = Some((mounted.incarnation, handle));
        Some(handle)
    }

    fn close_own(&mut self) {
        if let Some(Err(error)) = self.own.take().map(|(_, handle)| self.engine.close_segment(handle)) {
            log::debug!("node {}: its own segment cannot be closed: {error}", self.name);
        }
    }
}

/// Whether nothing of a write that has ended lands any more.
pub(super) const fn is_quiet(report: &BatchReport) -> bool {
    !report.fence_needed && !report.quarantined
}
