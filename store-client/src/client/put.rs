//! Puts: stores whole objects from plain or registered memory.

use std::time::{Duration, Instant};

use store_core::ErrorCode;
use store_core::client::{Action, FenceEnd, PutItem};
use store_core::message::{PutOptions, PutRequest};
use te_core::Op;

use super::Client;
use super::lending::Lending;
use crate::error::StoreError;
use crate::item::{Put, Source};
use crate::mover::Buffers;

/// Longest wait for the owner of a segment to confirm that no write of a put is under way.
const FENCE_MAX: Duration = Duration::from_secs(2);

impl Client {
    /// Stores as many items as fit one request, and sets the result of each.
    pub(super) fn put_chunk(&mut self, items: &mut [Put<'_>], options: &PutOptions) {
        if let Err(error) = self.usable() {
            return items.iter_mut().for_each(|item| item.result = Err(error.clone()));
        }
        self.settle();
        for item in items.iter_mut() {
            item.result = self.check_put(item).map(|()| false);
        }
        if items.iter().any(|item| item.result.is_ok()) {
            let ask = PutRequest { nonce: self.nonce(), options: *options, writer: self.engine.identity() };
            self.put.start(items.iter().map(wanted), ask);
            self.mover.begin(items.len());
            self.run_put(items.len(), Buffers::Put(items));
        }
        for (index, item) in items.iter_mut().enumerate() {
            if item.result.is_ok() {
                item.result = self.stored(index, item);
            }
        }
        self.publish();
    }

    /// Checks that an item can be put with this client.
    fn check_put(&self, item: &Put<'_>) -> Result<(), StoreError> {
        self.check_source(&item.source)
    }

    /// Checks that bytes can be written from there.
    pub(super) fn check_source(&self, source: &Source<'_>) -> Result<(), StoreError> {
        source.check()?;
        match *source {
            Source::Region(range) => self.check_ranges([range]),
            Source::Regions(ranges) => self.check_ranges(ranges.iter().copied()),
            Source::Local(_) => Err(StoreError::ForeignMemory),
            Source::Bytes(_) | Source::Slices(_) => Ok(()),
        }
    }

    /// Determines and counts the result of an item of a put.
    fn stored(&mut self, index: usize, item: &Put<'_>) -> Result<bool, StoreError> {
        match self.put.result(index).unwrap_or(Err(ErrorCode::InternalError)) {
            Ok(_generation) => {
                self.counters.puts += 1;
                self.counters.written_bytes += item.source.len();
                Ok(true)
            }
            Err(ErrorCode::ObjectAlreadyExists) => Ok(false),
            Err(code) => {
                let error = self.put_failed(code);
                Err(self.mover.device_error(index).unwrap_or(error))
            }
        }
    }

    /// The error of a put that failed, which is counted unless its key exists.
    pub(super) fn put_failed(&mut self, code: ErrorCode) -> StoreError {
        self.counters.put_failures += u64::from(code != ErrorCode::ObjectAlreadyExists);
        code.into()
    }

    /// Runs the operation of `count` items that `self.put` was started with, and the mover has begun.
    pub(super) fn run_put(&mut self, count: usize, mut buffers: Buffers<'_, '_>) {
        let whole = matches!(buffers, Buffers::Put(_));
        let mut lending = Lending::new(self, count, &mut buffers);
        let this = &mut *lending;
        let deadline = this.begin_operation();
        loop {
            this.put_actions(&buffers, deadline);
            if this.put.is_done() {
                break;
            }
            if Instant::now() >= deadline {
                // One abort ends everything under way and requests no further place.
                this.put.abort(ErrorCode::TransferFail);
                this.put_actions(&buffers, deadline);
            }
            let busy = this.pump(&mut buffers, deadline);
            while let Some((transfer, end)) = this.mover.next_ended() {
                let item = transfer.item as usize;
                if whole {
                    this.put.set_checksum(item, this.mover.checksum(item));
                }
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
        this.end_operation(Op::Write, count, deadline);
        lending.finish();
    }

    fn put_actions(&mut self, buffers: &Buffers<'_, '_>, deadline: Instant) {
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
                Some(Action::Cancel { transfer }) => self.mover.cancel(transfer, &mut self.engine),
                Some(Action::Fence { segment }) => {
                    // A node that does not respond must not use up the time for another place.
                    let timeout = deadline.saturating_duration_since(Instant::now()).min(FENCE_MAX);
                    let held = self.mover.can_fence(segment)
                        && self.segments.fence(segment, &mut self.engine, timeout);
                    self.put.handle_fence(segment, FenceEnd::of(held));
                }
                None => return,
            }
        }
    }
}

/// Translates an item for the state machine of puts.
fn wanted<'p>(item: &'p Put<'_>) -> PutItem<'p> {
    if item.result.is_err() {
        // The item was refused before any request. No object has an empty key, so the state machine refuses
        // it too.
        return PutItem { key: &[], len: 1, checksum: 0 };
    }
    PutItem { key: item.key, len: item.source.len(), checksum: 0 }
}
