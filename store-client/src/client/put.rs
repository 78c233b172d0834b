//! Puts: whole objects in, from plain bytes or registered memory.

use std::time::{Duration, Instant};

use store_core::ErrorCode;
use store_core::client::{Action, PutItem};
use store_core::message::{PutAsk, PutOptions};
use te_core::Op;

use super::lending::Lending;
use super::{Client, PARTS_MAX, all, chunks, one};
use crate::error::StoreError;
use crate::memory::BufferRange;
use crate::mover::Buffers;

/// How long the owner of a segment may take to say that nothing of a put is under way any more.
const FENCE_MAX: Duration = Duration::from_secs(2);

impl Client {
    /// Stores a copy of `value`. Gives `false` when the key is taken, and leaves the object there as it is.
    ///
    /// # Errors
    /// No room, an invalid key, no value, or nobody to write to.
    pub fn put(&mut self, key: &[u8], value: &[u8], options: &PutOptions) -> Result<bool, StoreError> {
        stored(self.batch_put(&[(key, value)], options))
    }

    /// Stores many. An item that fails does so alone; one whose key is taken ends `ObjectAlreadyExists`.
    pub fn batch_put(
        &mut self,
        items: &[(&[u8], &[u8])],
        options: &PutOptions,
    ) -> Vec<Result<(), ErrorCode>> {
        let mut results = Vec::with_capacity(items.len());
        for items in chunks(items, |item| item.0.len()) {
            self.put_buffers(items.iter().map(|item| item.0), Buffers::Bytes(items), options, &mut results);
        }
        results
    }

    /// Stores an object straight from registered memory. Gives `false` when the key is taken.
    ///
    /// # Errors
    /// As [`put`](Self::put), `InvalidParams` for a range that is not registered, `UnavailableInCurrentStatus` for one that a
    /// fabric may still write, because a read into it was given up and has not drained: try again, or use other memory.
    pub fn put_from(
        &mut self,
        key: &[u8],
        range: BufferRange,
        options: &PutOptions,
    ) -> Result<bool, StoreError> {
        stored(self.batch_put_from(&[(key, range)], options))
    }

    /// Stores many objects straight from registered memory.
    pub fn batch_put_from(
        &mut self,
        items: &[(&[u8], BufferRange)],
        options: &PutOptions,
    ) -> Vec<Result<(), ErrorCode>> {
        if let Some(refused) = self.refuse(items.iter().map(|item| item.1)) {
            return all(items.len(), refused);
        }
        let mut results = Vec::with_capacity(items.len());
        for items in chunks(items, |item| item.0.len()) {
            self.put_buffers(items.iter().map(|item| item.0), Buffers::Range(items), options, &mut results);
        }
        results
    }

    /// Stores one object that is the parts end to end: tensors that lie apart, say. Empty parts are passed over. Gives `false`
    /// when the key is taken.
    ///
    /// # Errors
    /// As [`put`](Self::put); `InvalidParams` for more than [`PARTS_MAX`] parts, or not a byte in all of them.
    pub fn put_parts(
        &mut self,
        key: &[u8],
        parts: &[&[u8]],
        options: &PutOptions,
    ) -> Result<bool, StoreError> {
        stored(self.batch_put_parts(&[(key, parts)], options))
    }

    /// Stores many objects, each from parts. Too many parts of one are an error of all.
    pub fn batch_put_parts(
        &mut self,
        items: &[(&[u8], &[&[u8]])],
        options: &PutOptions,
    ) -> Vec<Result<(), ErrorCode>> {
        if items.iter().any(|item| item.1.len() > PARTS_MAX) {
            return all(items.len(), ErrorCode::InvalidParams);
        }
        let mut results = Vec::with_capacity(items.len());
        for items in chunks(items, |item| item.0.len()) {
            self.put_buffers(items.iter().map(|item| item.0), Buffers::Slices(items), options, &mut results);
        }
        results
    }

    /// Stores one object that is the ranges of registered memory end to end; they may be of different regions. Empty ones are
    /// passed over. Gives `false` when the key is taken.
    ///
    /// # Errors
    /// As [`put_from`](Self::put_from); `InvalidParams` for more than [`PARTS_MAX`] ranges, or not a byte in all of them.
    pub fn put_from_buffers(
        &mut self,
        key: &[u8],
        ranges: &[BufferRange],
        options: &PutOptions,
    ) -> Result<bool, StoreError> {
        stored(self.batch_put_from_buffers(&[(key, ranges)], options))
    }

    /// Stores many objects, each from several ranges of registered memory. Ranges that are refused are an error of all.
    pub fn batch_put_from_buffers(
        &mut self,
        items: &[(&[u8], &[BufferRange])],
        options: &PutOptions,
    ) -> Vec<Result<(), ErrorCode>> {
        if let Some(refused) = self.refuse_buffers(items) {
            return all(items.len(), refused);
        }
        let mut results = Vec::with_capacity(items.len());
        for items in chunks(items, |item| item.0.len()) {
            self.put_buffers(items.iter().map(|item| item.0), Buffers::Ranges(items), options, &mut results);
        }
        results
    }

    fn put_buffers<'k>(
        &mut self,
        keys: impl ExactSizeIterator<Item = &'k [u8]>,
        buffers: Buffers<'_>,
        options: &PutOptions,
        results: &mut Vec<Result<(), ErrorCode>>,
    ) {
        let items = keys.len();
        if let Err(code) = self.usable() {
            return results.extend((0..items).map(|_| Err(code)));
        }
        let wanted = keys.enumerate().map(|(item, key)| PutItem { key, len: buffers.len(item), checksum: 0 });
        let ask = PutAsk { nonce: self.nonce(), options: *options, writer: self.fabric.identity() };
        self.put.start(wanted, ask);
        self.run_put(items, buffers, results);
    }

    fn run_put(&mut self, items: usize, mut buffers: Buffers<'_>, results: &mut Vec<Result<(), ErrorCode>>) {
        self.mover.begin(items);
        let mut lending = Lending::new(self, items, &mut buffers);
        let this = &mut *lending;
        let deadline = this.begin_operation();
        loop {
            this.put_actions(&buffers, deadline);
            if this.put.is_done() {
                break;
            }
            if Instant::now() >= deadline {
                // Once is enough; it ends what is under way, and asks for no other place.
                this.put.abort(ErrorCode::TransferFail);
                this.put_actions(&buffers, deadline);
            }
            let busy = this.pump(&mut buffers, deadline);
            while let Some((transfer, end)) = this.mover.next_ended() {
                let item = transfer.item as usize;
                this.put.set_checksum(item, this.mover.checksum(item));
                this.put.handle_transfer(transfer.id, end);
            }
            let now = this.now();
            let due = this.put.poll_timeout();
            if due.is_some_and(|at| now >= at) {
                this.put.handle_timeout(now);
            } else if !busy {
                this.wait(due, deadline);
            }
        }
        this.end_operation(Op::Write, items, deadline);
        for item in 0..items {
            let result = this.put.result(item).unwrap_or(Err(ErrorCode::InternalError));
            match result {
                Ok(_) => {
                    this.counters.puts += 1;
                    this.counters.written_bytes += buffers.len(item);
                }
                Err(ErrorCode::ObjectAlreadyExists) => {}
                Err(_) => this.counters.put_failures += 1,
            }
            results.push(result.map(|_generation| ()));
        }
        this.publish();
        lending.finish();
    }

    fn put_actions(&mut self, buffers: &Buffers<'_>, deadline: Instant) {
        loop {
            let now = self.now();
            let (id, out) = self.rpc.queue_raw();
            match self.put.poll(now, id, out) {
                Some(Action::Call) => match self.rpc.exchange(id) {
                    Ok(frame) => {
                        let now = te_core::Instant::ZERO + self.started.elapsed();
                        self.put.handle_response(now, &frame);
                    }
                    Err(error) => {
                        let code = self.call_failed(error);
                        self.put.handle_call_failed(id, code);
                    }
                },
                Some(Action::Transfer(transfer)) => {
                    self.start_transfer(transfer, buffers);
                }
                Some(Action::Cancel { transfer }) => self.mover.cancel(transfer, &mut self.fabric),
                Some(Action::Fence { segment }) => {
                    // One that does not answer is not to take the time that another place needs.
                    let timeout = deadline.saturating_duration_since(Instant::now()).min(FENCE_MAX);
                    let handle = self.segments.handle(segment).filter(|_| self.mover.can_fence(segment));
                    let held = handle.is_some_and(|handle| self.fabric.fence(handle, timeout));
                    self.put.handle_fence(segment, held);
                }
                None => return,
            }
        }
    }
}

fn stored(results: Vec<Result<(), ErrorCode>>) -> Result<bool, StoreError> {
    match one(results) {
        Ok(()) => Ok(true),
        Err(ErrorCode::ObjectAlreadyExists) => Ok(false),
        Err(code) => Err(code.into()),
    }
}
