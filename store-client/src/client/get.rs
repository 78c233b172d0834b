//! Gets: whole objects out, into plain bytes or registered memory.

use store_core::ErrorCode;
use store_core::client::{Action, GetItem};

use super::{Client, chunks, one};
use crate::error::StoreError;
use crate::memory::BufferRange;
use crate::mover::Buffers;

impl Client {
    /// Reads a value. `None` is a miss.
    ///
    /// # Errors
    /// An invalid key, a value over `value_bytes_max`, or a master that cannot be asked.
    pub fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        one(self.batch_get(&[key])).map_err(StoreError::from)
    }

    /// Reads many values.
    pub fn batch_get(&mut self, keys: &[&[u8]]) -> Vec<Result<Option<Vec<u8>>, ErrorCode>> {
        let capacity = self.config.value_bytes_max;
        let mut results = Vec::with_capacity(keys.len());
        for keys in chunks(keys, |key| key.len()) {
            self.get.start(keys.iter().map(|&key| GetItem { key, capacity }), &[]);
            let mut sinks = vec![None; keys.len()];
            self.run_get(keys.len(), Buffers::Sinks(&mut sinks));
            for (item, sink) in sinks.into_iter().enumerate() {
                // A result without a sink would be an object without bytes, which there is not.
                results.push(self.fetched(item).map(|len| len.and(sink)));
            }
        }
        results
    }

    /// Reads an object straight into registered memory; gives its length. `None` is a miss; the memory may have been written
    /// all the same.
    ///
    /// # Errors
    /// As [`put_from`](Self::put_from), and `BufferOverflow` when the object is longer than the range.
    pub fn get_into(&mut self, key: &[u8], range: BufferRange) -> Result<Option<u64>, StoreError> {
        one(self.batch_get_into(&[(key, range)])).map_err(StoreError::from)
    }

    /// Reads many objects straight into registered memory. Ranges must not overlap: what does is read with mixed bytes, and
    /// the checksum makes it a miss.
    pub fn batch_get_into(&mut self, items: &[(&[u8], BufferRange)]) -> Vec<Result<Option<u64>, ErrorCode>> {
        if let Some(results) = self.refuse_ranges(items) {
            return results;
        }
        let mut results = Vec::with_capacity(items.len());
        for items in chunks(items, |item| item.0.len()) {
            self.get.start(items.iter().map(|&(key, range)| GetItem { key, capacity: range.len }), &[]);
            self.run_get(items.len(), Buffers::Ranges(items));
            results.extend((0..items.len()).map(|item| self.fetched(item)));
        }
        results
    }

    fn run_get(&mut self, items: usize, mut buffers: Buffers<'_>) {
        self.mover.begin(items);
        let deadline = self.begin_operation();
        loop {
            self.get_actions();
            if self.get.is_done() {
                break;
            }
            let busy = self.pump(&mut buffers, deadline);
            let now = self.now();
            while let Some((transfer, end)) = self.mover.next_ended() {
                self.get.handle_transfer(now, transfer.id, end);
            }
            let due = self.get.poll_timeout();
            if due.is_some_and(|at| now >= at) {
                self.get.handle_timeout(now);
            } else if !busy {
                self.wait(due, deadline);
            }
        }
        self.counters.checksum_mismatches += u64::from(self.get.mismatches());
        self.end_operation();
    }

    fn get_actions(&mut self) {
        loop {
            let now = self.now();
            let (id, out) = self.rpc.queue_raw();
            match self.get.poll(now, id, out) {
                Some(Action::Call) => match self.rpc.exchange(id) {
                    Ok(frame) => self.get.handle_response(&frame),
                    Err(error) => {
                        let code = self.call_failed(error);
                        self.get.handle_call_failed(id, code);
                    }
                },
                Some(Action::Transfer(transfer)) => {
                    if self.start_transfer(transfer) {
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

    /// The result of an item of a get, counted.
    fn fetched(&mut self, item: usize) -> Result<Option<u64>, ErrorCode> {
        let result = self.get.result(item).unwrap_or(Err(ErrorCode::InternalError));
        match result {
            Ok(fetched) => {
                self.counters.hits += 1;
                self.counters.read_bytes += fetched.len;
                return Ok(Some(fetched.len));
            }
            Err(ErrorCode::LeaseExpired) => self.counters.lease_misses += 1,
            Err(ErrorCode::TransferFail | ErrorCode::SegmentNotFound) => self.counters.transfer_misses += 1,
            Err(ErrorCode::ObjectNotFound | ErrorCode::ReplicaIsNotReady | ErrorCode::ChecksumMismatch) => {}
            Err(code) => return Err(code),
        }
        self.counters.misses += 1;
        Ok(None)
    }
}
