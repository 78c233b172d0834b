//! Gets: objects out, or parts of them, into plain bytes or registered memory.

use std::ops::{Bound, RangeBounds};
use std::time::Instant;

use store_core::ErrorCode;
use store_core::client::{Action, GetItem};
use te_core::Op;

use super::lending::Lending;
use super::{Client, PARTS_MAX, all, chunk_len, chunks, one};
use crate::error::StoreError;
use crate::memory::{BufferRange, Fragment};
use crate::mover::Buffers;

impl Client {
    /// Reads a value. `None` is a miss.
    ///
    /// # Errors
    /// A value over `value_bytes_max`, or a master that cannot be asked. A key that no object can have is a miss.
    pub fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        one(self.batch_get(&[key])).map_err(StoreError::from)
    }

    /// Reads many values.
    pub fn batch_get(&mut self, keys: &[&[u8]]) -> Vec<Result<Option<Vec<u8>>, ErrorCode>> {
        let capacity = self.config.value_bytes_max;
        let mut results = Vec::with_capacity(keys.len());
        for keys in chunks(keys, |key| key.len()) {
            self.get.start(keys.iter().map(|&key| GetItem { key, capacity, len_min: 1 }), &[]);
            let mut sinks = vec![None; keys.len()];
            self.run_get(keys.len(), Buffers::Made(&mut sinks));
            for (item, sink) in sinks.into_iter().enumerate() {
                // A result without a sink would be an object without bytes, which there is not.
                results.push(self.fetched(item, None).map(|len| len.and(sink)));
            }
        }
        results
    }

    /// Reads a value into the caller's memory, from its first byte on; gives its length. `None` is a miss; the memory may have
    /// been written all the same. No allocation, unlike [`get`](Self::get); over rails that pin memory, and for short values, one copy more
    /// than [`get_into`](Self::get_into).
    ///
    /// # Errors
    /// `BufferOverflow` when the object is longer than `bytes`; a master that cannot be asked.
    pub fn get_to(&mut self, key: &[u8], bytes: &mut [u8]) -> Result<Option<u64>, StoreError> {
        one(self.batch_get_to(&mut [(key, bytes)])).map_err(StoreError::from)
    }

    /// Reads many values, each into memory of the caller's.
    pub fn batch_get_to(&mut self, items: &mut [(&[u8], &mut [u8])]) -> Vec<Result<Option<u64>, ErrorCode>> {
        let mut results = Vec::with_capacity(items.len());
        let mut left = items;
        while !left.is_empty() {
            let (items, rest) = left.split_at_mut(chunk_len(left, |item| item.0.len()));
            left = rest;
            self.get.start(
                items.iter().map(|(key, bytes)| GetItem { key, capacity: bytes.len() as u64, len_min: 1 }),
                &[],
            );
            let mut sinks: Vec<&mut [u8]> = items.iter_mut().map(|(_, bytes)| &mut **bytes).collect();
            self.run_get(sinks.len(), Buffers::Filled(&mut sinks));
            results.extend((0..items.len()).map(|item| self.fetched(item, None)));
        }
        results
    }

    /// Reads an object straight into registered memory; gives its length. `None` is a miss; the memory may have been written
    /// all the same.
    ///
    /// # Errors
    /// As [`put_from`](Self::put_from), and `BufferOverflow` when the object is longer than the range.
    /// `UnavailableInCurrentStatus` also when this read was given up and a fabric may still write to the range: it is not the
    /// caller's to use until an operation with it is not refused any more, or [`unregister`](Self::unregister) returned `Ok`.
    pub fn get_into(&mut self, key: &[u8], range: BufferRange) -> Result<Option<u64>, StoreError> {
        one(self.batch_get_into(&[(key, range)])).map_err(StoreError::from)
    }

    /// Reads many objects straight into registered memory. Ranges must not overlap: what does is read with mixed bytes, and
    /// the checksum makes it a miss.
    pub fn batch_get_into(&mut self, items: &[(&[u8], BufferRange)]) -> Vec<Result<Option<u64>, ErrorCode>> {
        if let Some(refused) = self.refuse(items.iter().map(|item| item.1)) {
            return all(items.len(), refused);
        }
        let mut results = Vec::with_capacity(items.len());
        for items in chunks(items, |item| item.0.len()) {
            self.get.start(
                items.iter().map(|&(key, range)| GetItem { key, capacity: range.len, len_min: 1 }),
                &[],
            );
            self.run_get(items.len(), Buffers::Range(items));
            results.extend((0..items.len()).map(|item| self.fetched(item, None)));
        }
        results
    }

    /// Reads one object into several ranges of registered memory, filled one after the other; they may be of different regions.
    /// Gives the object's length. `None` is a miss.
    ///
    /// # Errors
    /// As [`get_into`](Self::get_into), and `InvalidParams` for more than [`PARTS_MAX`] ranges.
    pub fn get_into_buffers(
        &mut self,
        key: &[u8],
        ranges: &[BufferRange],
    ) -> Result<Option<u64>, StoreError> {
        one(self.batch_get_into_buffers(&[(key, ranges)])).map_err(StoreError::from)
    }

    /// Reads many objects, each into several ranges of registered memory. Ranges that are refused are an error of all.
    pub fn batch_get_into_buffers(
        &mut self,
        items: &[(&[u8], &[BufferRange])],
    ) -> Vec<Result<Option<u64>, ErrorCode>> {
        if let Some(refused) = self.refuse_buffers(items) {
            return all(items.len(), refused);
        }
        let mut results = Vec::with_capacity(items.len());
        for items in chunks(items, |item| item.0.len()) {
            let buffers = Buffers::Ranges(items);
            let wanted = items.iter().enumerate();
            let wanted =
                wanted.map(|(item, &(key, _))| GetItem { key, capacity: buffers.len(item), len_min: 1 });
            self.get.start(wanted, &[]);
            self.run_get(items.len(), buffers);
            results.extend((0..items.len()).map(|item| self.fetched(item, None)));
        }
        results
    }

    /// Reads a part of an object: `100..200`, or `100..` to its end. `None` is a miss.
    ///
    /// No more is read than the blocks of 64 KiB that the part touches and their checksums, and the part is verified like the
    /// whole ([`store_core::blocks`]).
    ///
    /// # Errors
    /// As [`get`](Self::get); `InvalidParams` for a range that is empty or goes beyond the object's end.
    pub fn get_range(
        &mut self,
        key: &[u8],
        range: impl RangeBounds<u64>,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        let part = part(range).ok_or(ErrorCode::InvalidParams)?;
        one(self.batch_get_part(&[(key, part)])).map_err(StoreError::from)
    }

    /// A part of each object: from where on, and how many bytes, or all up to its end.
    pub(crate) fn batch_get_part(
        &mut self,
        items: &[(&[u8], Part)],
    ) -> Vec<Result<Option<Vec<u8>>, ErrorCode>> {
        let mut results = Vec::with_capacity(items.len());
        for items in chunks(items, |item| item.0.len()) {
            let bytes_max = self.config.value_bytes_max;
            let wanted = items.iter().map(|&(key, (offset, len))| match len {
                // Makes no room for more than may be: nothing is that long.
                Some(len) if len > bytes_max => GetItem { key, capacity: 0, len_min: 1 },
                Some(len) => GetItem { key, capacity: u64::MAX, len_min: offset.saturating_add(len) },
                None => {
                    let (capacity, len_min) = (offset.saturating_add(bytes_max), offset.saturating_add(1));
                    GetItem { key, capacity, len_min }
                }
            });
            self.get.start(wanted, &[]);
            let parts: Vec<Part> = items.iter().map(|item| item.1).collect();
            let mut sinks = vec![None; items.len()];
            self.run_get(items.len(), Buffers::Part(&parts, &mut sinks));
            for (item, sink) in sinks.into_iter().enumerate() {
                let bytes = sink.as_ref().map(|sink: &Vec<u8>| sink.len() as u64);
                results.push(self.fetched(item, bytes).map(|len| len.and(sink)));
            }
        }
        results
    }

    /// Reads a part of an object straight into registered memory: as many bytes as the range has, from `offset` on. Gives that
    /// number. `None` is a miss; the memory may have been written all the same.
    ///
    /// Blocks of 64 KiB that are wanted as a whole land where they belong; of the others, the part that is wanted is copied
    /// there once they are verified.
    ///
    /// # Errors
    /// As [`get_into`](Self::get_into); `InvalidParams` for a range that is empty or goes beyond the object's end.
    pub fn get_range_into(
        &mut self,
        key: &[u8],
        offset: u64,
        into: BufferRange,
    ) -> Result<Option<u64>, StoreError> {
        one(self.batch_get_ranges(&[(key, &[Fragment { offset, into }])])).map_err(StoreError::from)
    }

    /// Reads several parts of each of several objects straight into registered memory: one question to the master, one trailer
    /// of each object, no block twice. Gives each key the bytes of its parts, all of them or none.
    ///
    /// Parts may overlap in the object, not in memory. A part that is empty, ends beyond the largest offset there is, or goes
    /// where memory is not registered, and more than [`PARTS_MAX`] parts of a key, or none, are an error of all; one that goes
    /// beyond the end of its object is `InvalidParams` for this object.
    pub fn batch_get_ranges(
        &mut self,
        items: &[(&[u8], &[Fragment])],
    ) -> Vec<Result<Option<u64>, ErrorCode>> {
        let end = |part: &Fragment| part.offset.checked_add(part.into.len).filter(|_| part.into.len > 0);
        let malformed = |parts: &[Fragment]| {
            !(1..=PARTS_MAX).contains(&parts.len()) || parts.iter().any(|part| end(part).is_none())
        };
        if items.iter().any(|item| malformed(item.1)) {
            return all(items.len(), ErrorCode::InvalidParams);
        }
        if let Some(refused) = self.refuse(items.iter().flat_map(|item| item.1).map(|part| part.into)) {
            return all(items.len(), refused);
        }
        let mut results = Vec::with_capacity(items.len());
        for items in chunks(items, |item| item.0.len()) {
            let wanted = items.iter().map(|&(key, parts)| {
                let len_min = parts.iter().filter_map(end).max().unwrap_or(1);
                GetItem { key, capacity: u64::MAX, len_min }
            });
            self.get.start(wanted, &[]);
            self.run_get(items.len(), Buffers::Fragments(items));
            for (item, (_, parts)) in items.iter().enumerate() {
                let bytes = parts.iter().map(|part| part.into.len).sum();
                results.push(self.fetched(item, Some(bytes)));
            }
        }
        results
    }

    /// Why nothing is done with objects in several ranges of registered memory.
    pub(super) fn refuse_buffers(&mut self, items: &[(&[u8], &[BufferRange])]) -> Option<ErrorCode> {
        if items.iter().any(|item| item.1.len() > PARTS_MAX) {
            return Some(ErrorCode::InvalidParams);
        }
        self.refuse(items.iter().flat_map(|item| item.1).copied())
    }

    fn run_get(&mut self, items: usize, mut buffers: Buffers<'_>) {
        self.unusable = self.usable().err();
        if self.unusable.is_some() {
            return self.forget_operation();
        }
        self.mover.begin(items);
        let mut lending = Lending::new(self, items, &mut buffers);
        let this = &mut *lending;
        let quarantined = this.mover.quarantined_total();
        let deadline = this.begin_operation();
        loop {
            this.get_actions(&buffers);
            if this.get.is_done() {
                break;
            }
            // A node that hangs gets half of what is left of the lease; another replica has time in the other half.
            let patience = this.get.poll_timeout().map(|end| Instant::now() + (end - this.now()) / 2);
            let busy = this.pump(&mut buffers, patience.map_or(deadline, |end| end.min(deadline)));
            let now = this.now();
            while let Some((transfer, end)) = this.mover.next_ended() {
                this.get.handle_transfer(now, transfer.id, end);
            }
            let due = this.get.poll_timeout();
            if due.is_some_and(|at| now >= at) {
                this.get.handle_timeout(now);
            } else if !busy {
                this.wait(due, deadline);
            }
        }
        this.counters.checksum_mismatches += u64::from(this.get.mismatches());
        // A read that was given up may still go on, and the bytes had better stay what they are.
        if let Some(leases) = this.get.leases()
            && this.leased_by == this.rpc.connects_total()
            && this.mover.quarantined_total() == quarantined
        {
            this.rpc.return_leases(leases);
        }
        this.report_bad_replicas();
        this.end_operation(Op::Read, items, deadline);
        lending.finish();
    }

    fn get_actions(&mut self, buffers: &Buffers<'_>) {
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
                    if self.start_transfer(transfer, buffers) {
                        self.counters.replica_failovers += 1;
                    }
                }
                Some(Action::Cancel { transfer }) => self.mover.cancel(transfer, &mut self.fabric),
                // A get writes nothing, so there is nothing to fence.
                Some(Action::Fence { .. }) => {}
                None => return,
            }
        }
    }

    /// The result of an item of a get, counted; `bytes` of it were wanted, or all.
    fn fetched(&mut self, item: usize, bytes: Option<u64>) -> Result<Option<u64>, ErrorCode> {
        let fetched = self.count_fetched(item, bytes);
        self.publish();
        fetched
    }

    fn count_fetched(&mut self, item: usize, bytes: Option<u64>) -> Result<Option<u64>, ErrorCode> {
        let result = match self.unusable {
            Some(code) => return Err(code),
            None => self.get.result(item).unwrap_or(Err(ErrorCode::InternalError)),
        };
        match result {
            Ok(fetched) => {
                self.counters.hits += 1;
                let bytes = bytes.unwrap_or(fetched.len);
                self.counters.read_bytes += bytes;
                return Ok(Some(bytes));
            }
            Err(ErrorCode::LeaseExpired) => self.counters.lease_misses += 1,
            Err(ErrorCode::TransferFail | ErrorCode::SegmentNotFound) => self.counters.transfer_misses += 1,
            Err(ErrorCode::ObjectNotFound | ErrorCode::ReplicaIsNotReady | ErrorCode::ChecksumMismatch) => {}
            Err(_) if self.mover.is_spoiled(item) => {}
            Err(code) => return Err(code),
        }
        self.counters.misses += 1;
        if self.mover.is_spoiled(item) {
            // A miss would say that the memory is the caller's again.
            return Err(ErrorCode::UnavailableInCurrentStatus);
        }
        Ok(None)
    }
}

/// Where a part begins, and how long it is, if not to the end.
pub(crate) type Part = (u64, Option<u64>);

/// `None`: it is empty, or begins or ends beyond what there is.
pub(crate) fn part(range: impl RangeBounds<u64>) -> Option<Part> {
    let start = match range.start_bound() {
        Bound::Included(start) => *start,
        Bound::Excluded(before) => before.checked_add(1)?,
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(last) => last.checked_add(1)?,
        Bound::Excluded(end) => *end,
        Bound::Unbounded => return Some((start, None)),
    };
    (start < end).then(|| (start, Some(end - start)))
}
