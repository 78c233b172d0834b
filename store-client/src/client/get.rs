//! Gets: reads objects, or parts of them, into plain or registered memory.

use std::time::Instant;

use store_core::ErrorCode;
use store_core::client::{Action, GetItem};
use store_core::message::{LeaseWanted, ReportReplicas};
use te_core::Op;

use super::Client;
use super::lending::Lending;
use crate::error::StoreError;
use crate::item::{Get, Sink};
use crate::mover::Buffers;

/// A get into more room than this asks for lasting leases, bytes: at 20 MB/s, it takes as long as a quick
/// lease.
const QUICK_BYTES_MAX: u64 = 4 << 20;

impl Client {
    /// Reads as many items as fit one request, and sets the result of each.
    pub(super) fn get_chunk(&mut self, items: &mut [Get<'_>]) {
        if let Err(error) = self.usable() {
            return items.iter_mut().for_each(|item| item.end_with(Err(error.clone())));
        }
        self.settle();
        for item in items.iter_mut() {
            item.result = self.check_get(item).map(|()| None);
        }
        if items.iter().any(|item| item.result.is_ok()) {
            let value_bytes_max = self.config.value_bytes_max;
            let room = items.iter().filter_map(|item| item.sink.room()).fold(0, u64::saturating_add);
            let is_long = room > QUICK_BYTES_MAX;
            self.get.want(if is_long { LeaseWanted::Lasting } else { LeaseWanted::Quick });
            self.get.start(items.iter().map(|item| wanted(item, value_bytes_max)), &[]);
            self.run_get(items);
        }
        self.finish_get(items);
    }

    /// Sets the results of the items of a get that is over.
    pub(super) fn finish_get(&mut self, items: &mut [Get<'_>]) {
        for (index, item) in items.iter_mut().enumerate() {
            let result = match &item.result {
                Ok(_) => self.fetched(index, item),
                Err(refused) => Err(refused.clone()),
            };
            item.end_with(result);
        }
        self.publish();
    }

    /// Checks that an item can be read with this client.
    pub(super) fn check_get(&self, item: &Get<'_>) -> Result<(), StoreError> {
        item.check()?;
        self.check_one_device(item)?;
        match &item.sink {
            Sink::Region(range) => self.check_ranges([*range]),
            Sink::Regions(ranges) => self.check_ranges(ranges.iter().copied()),
            Sink::Fragments(parts) => self.check_ranges(parts.iter().map(|part| part.into)),
            Sink::Local(_) => Err(StoreError::ForeignMemory),
            Sink::Vec(_) | Sink::Bytes(_) | Sink::Slices(_) => Ok(()),
        }
    }

    /// Runs the operation that `self.get` was started with.
    pub(super) fn run_get(&mut self, items: &mut [Get<'_>]) {
        let count = items.len();
        let mut buffers = Buffers::Get(items);
        self.mover.begin(count);
        let mut lending = Lending::new(self, count, &mut buffers);
        let this = &mut *lending;
        let quarantined = this.mover.quarantined_total();
        let deadline = this.begin_operation();
        this.staging.begin();
        loop {
            this.get_actions(&buffers);
            if this.get.is_done() {
                break;
            }
            // A node that does not respond gets half of the remaining lease; another replica can be read in
            // the other half.
            let patience = this.get.poll_timeout().map(|end| Instant::now() + (end - this.now()) / 2);
            let staged = this.pump_staging(&buffers);
            let busy = this.pump(&mut buffers, patience.map_or(deadline, |end| end.min(deadline))) | staged;
            let now = this.now();
            while let Some((transfer, end)) = this.mover.next_ended() {
                if let Some(end) = this.staged_end(&transfer, end, &buffers) {
                    this.get.handle_transfer(now, transfer.id, end);
                }
            }
            let due = this.get.poll_timeout();
            if due.is_some_and(|at| now >= at) {
                this.get.handle_timeout(now);
            } else if !busy {
                this.wait(due, deadline);
            }
        }
        this.staging.finish();
        this.counters.checksum_mismatches += u64::from(this.get.mismatches());
        // Leases are kept while a read that was given up may still be under way, so that its source does not
        // change.
        if let Some(leases) = this.get.leases()
            && this.leased_by == this.rpc.connects_total()
            && this.mover.quarantined_total() == quarantined
        {
            this.rpc.return_leases(leases);
        }
        this.report_bad_replicas();
        this.end_operation(Op::Read, count, deadline);
        lending.finish();
    }

    fn get_actions(&mut self, buffers: &Buffers<'_, '_>) {
        loop {
            let now = self.now();
            let (id, out) = self.rpc.queue_get();
            match self.get.poll(now, id, out) {
                Some(Action::Call) => match self.rpc.exchange(id) {
                    Ok(frame) => {
                        self.get.handle_response(&frame);
                        self.leased_by = self.rpc.connects_total();
                    }
                    Err(error) => {
                        let code = self.call_failed(error);
                        self.get.handle_call_failed(id, code);
                    }
                },
                Some(Action::Transfer(transfer)) => {
                    self.staging.read_again(transfer.item);
                    if self.start_transfer(transfer, buffers) {
                        self.counters.replica_failovers += 1;
                    }
                }
                Some(Action::Cancel { transfer }) => {
                    self.mover.cancel(transfer, &mut self.engine);
                    self.staging.cancel(transfer);
                }
                // A get writes nothing remote, so there is nothing to fence.
                Some(Action::Fence { .. }) => {}
                None => return,
            }
        }
    }

    /// Determines and counts the result of an item of a get.
    fn fetched(&mut self, index: usize, item: &Get<'_>) -> Result<Option<u64>, StoreError> {
        match self.get.result(index).unwrap_or(Err(ErrorCode::InternalError)) {
            Ok(fetched) => {
                let bytes = item.bytes_of(fetched.len);
                self.counters.hits += 1;
                self.counters.disk_hits += u64::from(self.staging.was_read(index));
                self.counters.shared_hits += u64::from(self.staging.was_read_direct(index));
                self.counters.direct_hits += u64::from(self.staging.was_read_exported(index));
                self.counters.read_bytes += bytes;
                return Ok(Some(bytes));
            }
            Err(ErrorCode::TransferFail | ErrorCode::LeaseExpired) if self.staging.was_missed(index) => {
                self.counters.disk_misses += 1;
            }
            Err(ErrorCode::LeaseExpired) => self.counters.lease_misses += 1,
            Err(ErrorCode::TransferFail | ErrorCode::SegmentNotFound) => self.counters.transfer_misses += 1,
            Err(ErrorCode::ObjectNotFound | ErrorCode::ReplicaIsNotReady | ErrorCode::ChecksumMismatch) => {}
            Err(_) if self.mover.is_spoiled(index) || self.mover.device_error(index).is_some() => {}
            Err(code) => return Err(self.refused(item, code)),
        }
        self.counters.misses += 1;
        if self.mover.is_spoiled(index) {
            // A miss would allow the caller to use the memory again.
            return Err(StoreError::Held);
        }
        // A miss would say that the object is not there.
        self.mover.device_error(index).map_or(Ok(None), Err)
    }

    /// The error for a refused item, with the values that explain it.
    fn refused(&self, item: &Get<'_>, code: ErrorCode) -> StoreError {
        match (code, item.end()) {
            (ErrorCode::BufferOverflow, _) => {
                StoreError::TooLong { room: item.sink.room().unwrap_or(self.config.value_bytes_max) }
            }
            (ErrorCode::InvalidParams, Some(end)) => StoreError::BeyondEnd { end },
            _ => code.into(),
        }
    }

    /// Reports to the master the replicas that the latest get found to be bad. A failed report is not an
    /// error: the next reader finds and reports the same.
    fn report_bad_replicas(&mut self) {
        let bad = self.get.bad_replicas();
        if bad.len() == 0 {
            return;
        }
        if let Err(error) = self.rpc.call::<ReportReplicas>(&self.reporter, bad) {
            log::debug!("operation {}: a bad replica could not be reported: {error}", self.trace());
        }
        self.note_connection();
    }
}

/// Translates an item for the state machine of gets.
pub(super) fn wanted<'g>(item: &'g Get<'_>, value_bytes_max: u64) -> GetItem<'g> {
    if item.result.is_err() {
        // The item was refused before any request. No object has an empty key, so this one is a miss.
        return GetItem { key: &[], capacity: 0, len_min: 1 };
    }
    let key = item.key;
    let room = item.sink.room().unwrap_or(value_bytes_max);
    let len_min = item.end().unwrap_or(1);
    let capacity = match (&item.sink, item.part) {
        (Sink::Fragments(_), _) => u64::MAX,
        (_, None) => room,
        // The requested length exceeds the room, so no object can satisfy this item.
        (_, Some((_, Some(len)))) if len > room => return GetItem { key, capacity: 0, len_min: 1 },
        (_, Some((_, Some(_)))) => u64::MAX,
        (_, Some((start, None))) => start.saturating_add(room),
    };
    GetItem { key, capacity, len_min }
}
