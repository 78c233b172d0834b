//! Get: look up the replicas, read one, verify it.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::time::Duration;

use te_core::{Instant, Op, Outcome};

use super::{Action, ClientConfig, KeyList, Transfer, TransferEnd};
use crate::bound::bound;
use crate::message::{self, BadReplica, LeaseRange, LeaseWanted, Object, Operation, Replicas};
use crate::wire::{Frame, WireError};
use crate::{ErrorCode, QUICK_LEASE_MS, SegmentNo};

/// A read that takes so long under a quick lease may outlive the next one.
const SLOW: Duration = Duration::from_millis(QUICK_LEASE_MS as u64 / 4);
/// How long lasting leases are asked for after it.
const SLOW_FOR: Duration = Duration::from_secs(10);

/// One key to read.
#[derive(Clone, Copy, Debug)]
pub struct GetItem<'a> {
    /// The object's key.
    pub key: &'a [u8],
    /// Length of the caller's buffer, bytes; a longer object fails with `BufferOverflow`.
    pub capacity: u64,
    /// The end of the last part that the caller wants, bytes; a shorter object fails with `InvalidParams`. 1
    /// for the whole object.
    pub len_min: u64,
}

/// An object that was read and verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// Length of the object, bytes; also of the data in the buffer when the whole object was read.
    pub len: u64,
    /// The put that stored the object.
    pub generation: u64,
    /// CRC-32C of the object's bytes.
    pub checksum: u32,
}

/// A get of many keys.
///
/// An item succeeds when every byte of one replica (or of the requested parts) has arrived, its checksum is
/// the committed one, and the lease had not run out on the reader's own clock. Replicas are tried one after
/// the other. Everything else is an error, which the caller treats as a miss. The buffer of an item may have
/// been written to even when the item fails; once the operation is done nothing will touch the buffer again.
#[derive(Debug, Default)]
pub struct GetOp {
    config: ClientConfig,
    keys: KeyList,
    items: Vec<State>,
    prefer: Vec<SegmentNo>,
    todo: VecDeque<Todo>,
    call: Option<u64>,
    tries: u8,
    asked_at: Instant,
    lease_end: Instant,
    leases: LeaseRange,
    /// What the caller wants of the next leases.
    wanted: LeaseWanted,
    /// The leases of this operation are quick ones.
    is_quick: bool,
    /// Until then lasting leases are asked for, because a read took long.
    slow_until: Instant,
    reading: u32,
    unfinished: u32,
    /// Number of operations before this one.
    turn: u64,
    /// Item index and segment of each replica whose bytes were not the committed ones.
    bad: Vec<(u32, SegmentNo)>,
    /// Replicas among them that are not there any more.
    vanished: u32,
    canceled: bool,
    aborted: Option<ErrorCode>,
}

#[derive(Clone, Copy, Debug)]
struct State {
    capacity: u64,
    len_min: u64,
    object: Object,
    first: u8,
    tried: u8,
    /// How often a replica on a disk was put off.
    put_off: u8,
    reading: bool,
    result: Option<Result<Fetched, ErrorCode>>,
}

#[derive(Clone, Copy, Debug)]
enum Todo {
    Call,
    Read(u32),
    Cancel(u32),
}

impl GetOp {
    /// A state machine without an operation.
    #[must_use]
    pub fn new(config: ClientConfig) -> Self {
        Self { config, ..Self::default() }
    }

    /// Sets which leases the next operations ask for. They ask for lasting ones as well for some seconds
    /// after a read that took a quarter of a quick lease or longer, whatever is set.
    pub const fn want(&mut self, wanted: LeaseWanted) {
        self.wanted = wanted;
    }

    /// Begins an operation. `prefer` lists nearby segments (of this host): replicas on them are read first.
    ///
    /// # Panics
    /// When the previous operation is not done.
    pub fn start<'a>(&mut self, items: impl IntoIterator<Item = GetItem<'a>>, prefer: &[SegmentNo]) {
        assert!(self.is_done(), "the previous operation is not done");
        self.turn = self.turn.wrapping_add(u64::from(!self.items.is_empty()));
        self.keys.clear();
        self.items.clear();
        self.todo.clear();
        self.prefer.clear();
        self.prefer.extend_from_slice(prefer);
        let object = Object { len: 0, checksum: 0, generation: 0, replicas: Replicas::new() };
        for item in items {
            self.keys.push(item.key);
            self.items.push(State {
                capacity: item.capacity,
                len_min: item.len_min,
                object,
                first: 0,
                tried: 0,
                put_off: 0,
                reading: false,
                result: None,
            });
        }
        (self.call, self.tries, self.reading) = (None, 0, 0);
        self.leases = LeaseRange::default();
        self.bad.clear();
        self.vanished = 0;
        (self.canceled, self.aborted, self.is_quick) = (false, None, false);
        self.unfinished = self.items.len() as u32;
        if self.unfinished > 0 {
            self.todo.push_back(Todo::Call);
        }
    }

    /// As [`Self::start`], for objects that were looked up before, under leases that end at `lease_end` or
    /// later: the operation sends no request, and [`Self::leases`] has nothing to return. An item without an
    /// object fails with its error.
    ///
    /// # Panics
    /// When the previous operation is not done.
    pub fn start_leased(
        &mut self,
        items: &[(GetItem<'_>, Result<Object, ErrorCode>)],
        lease_end: Instant,
        prefer: &[SegmentNo],
    ) {
        self.start(items.iter().map(|(item, _)| *item), prefer);
        self.todo.clear();
        self.lease_end = lease_end;
        for (item, (_, object)) in items.iter().enumerate() {
            self.found(item as u32, *object);
        }
    }

    /// What to do next. `request_id` identifies the request, if the result is [`Action::Call`].
    pub fn poll(&mut self, now: Instant, request_id: u64, out: &mut Vec<u8>) -> Option<Action> {
        while let Some(todo) = self.todo.pop_front() {
            match todo {
                Todo::Call => {
                    let keys = (0..self.items.len()).map(|item| self.keys.key(item));
                    let wanted = if now < self.slow_until { LeaseWanted::Lasting } else { self.wanted };
                    self.is_quick = wanted == LeaseWanted::Quick;
                    if let Err(error) = message::Get::encode_request(out, request_id, &wanted, keys) {
                        self.finish_all(too_much(error));
                        continue;
                    }
                    (self.call, self.asked_at, self.tries) = (Some(request_id), now, self.tries + 1);
                    return Some(Action::Call);
                }
                Todo::Cancel(item) => {
                    if self.items[item as usize].reading {
                        return Some(Action::Cancel { transfer: item });
                    }
                }
                Todo::Read(item) => {
                    let state = &mut self.items[item as usize];
                    if state.result.is_some() {
                        continue;
                    }
                    if now >= self.lease_end {
                        self.finish(item, Err(ErrorCode::LeaseExpired));
                        continue;
                    }
                    let count = state.object.replicas.len();
                    let replica =
                        state.object.replicas[(usize::from(state.first) + usize::from(state.tried)) % count];
                    state.reading = true;
                    self.reading += 1;
                    return Some(Action::Transfer(Transfer {
                        id: item,
                        item,
                        op: Op::Read,
                        segment: replica.segment,
                        addr: replica.addr,
                        len: state.object.len,
                    }));
                }
            }
        }
        None
    }

    /// When [`Self::handle_timeout`] is due: at the end of the lease, while a read is in progress under it.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        (self.reading > 0 && !self.canceled).then_some(self.lease_end)
    }

    /// The lease is over: reads in progress are worthless and are cancelled.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.reading > 0 && !self.canceled && now >= self.lease_end {
            self.cancel_reads();
        }
    }

    /// Aborts the operation: items that are not finished fail with `error` as soon as their reads have ended.
    pub fn abort(&mut self, error: ErrorCode) {
        self.call = None;
        self.todo.clear();
        self.aborted = Some(error);
        for item in 0..self.items.len() as u32 {
            if !self.items[item as usize].reading {
                self.finish(item, Err(error));
            }
        }
        self.cancel_reads();
    }

    /// Processes the master's response. Frames of other requests are ignored.
    pub fn handle_response(&mut self, frame: &Frame<'_>) {
        if self.call != Some(frame.header.request_id) {
            return;
        }
        self.call = None;
        match message::Get::decode_response(frame) {
            Ok((lease, objects)) if objects.len() == self.items.len() => {
                self.lease_end = self.asked_at + Duration::from_millis(lease.lease_ms.into());
                self.leases.first = lease.first;
                for (item, object) in objects.enumerate() {
                    self.leases.count += u32::from(object.is_ok());
                    self.found(item as u32, object);
                }
            }
            Ok(_) => self.finish_all(ErrorCode::InternalError),
            Err(error) => self.finish_all(error),
        }
    }

    /// Reports that a request got no response and that none will be passed to this operation.
    pub fn handle_call_failed(&mut self, request_id: u64, error: ErrorCode) {
        if self.call != Some(request_id) {
            return;
        }
        self.call = None;
        if self.tries < self.config.rpc_tries_max {
            self.todo.push_back(Todo::Call);
        } else {
            self.finish_all(error);
        }
    }

    /// Whether a transfer that ends like this has brought the bytes that were committed.
    #[must_use]
    pub fn is_intact(&self, id: u32, end: &TransferEnd) -> bool {
        let Some(State { object, .. }) = self.items.get(id as usize) else { return false };
        // Bound to the key that was requested: the checksum of another key's object does not verify.
        let found = bound(end.checksum, self.keys.key(id as usize).0, object.generation);
        end.outcome == Outcome::Applied && found == object.checksum && !end.damaged
    }

    /// Reports that a transfer ended. `now` is a time after its last byte arrived.
    pub fn handle_transfer(&mut self, now: Instant, id: u32, end: TransferEnd) {
        let Some(state) = self.items.get_mut(id as usize).filter(|state| state.reading) else { return };
        state.reading = false;
        state.tried = state.tried.saturating_add(1);
        self.reading -= 1;
        if self.is_quick && now >= self.asked_at + SLOW {
            self.slow_until = now + SLOW_FOR;
        }
        let applied = end.outcome == Outcome::Applied;
        let intact = self.is_intact(id, &end);
        let state = &self.items[id as usize];
        let object = &state.object;
        // Once the lease is over, the memory may legitimately hold other bytes.
        if applied && !intact && now < self.lease_end {
            let count = object.replicas.len();
            let read = object.replicas[(usize::from(state.first) + usize::from(state.tried) - 1) % count];
            self.bad.push((id, read.segment));
        }
        let more = usize::from(state.tried) < object.replicas.len();
        let result = if let Some(error) = self.aborted {
            Err(error)
        } else if now >= self.lease_end {
            Err(ErrorCode::LeaseExpired)
        } else if intact {
            Ok(Fetched { len: object.len, generation: object.generation, checksum: end.checksum })
        } else if more {
            return self.todo.push_back(Todo::Read(id));
        } else if applied {
            Err(ErrorCode::ChecksumMismatch)
        } else {
            Err(ErrorCode::TransferFail)
        };
        self.finish(id, result);
    }

    /// Reports that the replica of a transfer is on a disk, before anything of it is read. Returns whether to
    /// read it. If not, the transfer is over, without an end to report: replicas in memory come first.
    pub fn handle_disk(&mut self, id: u32) -> bool {
        let Some(state) = self.items.get_mut(id as usize).filter(|state| state.reading) else { return true };
        let count = state.object.replicas.len();
        // After each replica was put off once, the rest is on disks.
        if usize::from(state.put_off) + 1 >= count || usize::from(state.tried) + 1 >= count {
            return true;
        }
        state.put_off += 1;
        let place = |turn: usize| (usize::from(state.first) + turn) % count;
        for turn in usize::from(state.tried)..count - 1 {
            state.object.replicas.swap(place(turn), place(turn + 1));
        }
        state.reading = false;
        self.reading -= 1;
        self.todo.push_back(Todo::Read(id));
        false
    }

    /// Reports that the replica that a transfer reads does not exist any more, as the reader has seen itself.
    /// It is reported to the master with those whose bytes are wrong. The transfer goes on until its end is
    /// reported.
    pub fn handle_vanished(&mut self, id: u32, segment: SegmentNo) {
        if self.items.get(id as usize).is_some_and(|state| state.reading) {
            self.bad.push((id, segment));
            self.vanished += 1;
        }
    }

    /// Whether every item has a result and nothing is in progress.
    #[must_use]
    pub const fn is_done(&self) -> bool {
        self.unfinished == 0 && self.reading == 0
    }

    /// Number of items of the operation.
    #[must_use]
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether the operation has no items.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// The result of an item; `None` while it has none.
    #[must_use]
    pub fn result(&self, item: usize) -> Option<Result<Fetched, ErrorCode>> {
        self.items.get(item)?.result
    }

    /// The leases that the operation was granted, to be returned with
    /// [`ReturnLeases`](crate::message::ReturnLeases) on the connection that granted them. `None` while a
    /// read is in progress, or when no lease was granted.
    #[must_use]
    pub fn leases(&self) -> Option<LeaseRange> {
        (self.is_done() && self.leases.count > 0).then_some(self.leases)
    }

    /// Number of replicas whose bytes were not the committed ones.
    #[must_use]
    pub fn mismatches(&self) -> u32 {
        self.bad.len() as u32 - self.vanished
    }

    /// The replicas whose bytes were not the committed ones, in the form in which they are reported to the
    /// master.
    pub fn bad_replicas(&self) -> impl ExactSizeIterator<Item = BadReplica<'_>> + Clone {
        self.bad.iter().map(|&(item, segment)| BadReplica {
            key: self.keys.key(item as usize),
            generation: self.items[item as usize].object.generation,
            segment,
        })
    }

    fn found(&mut self, item: u32, object: Result<Object, ErrorCode>) {
        let object = match object {
            Ok(object) => object,
            Err(error) => return self.finish(item, Err(error)),
        };
        let state = &mut self.items[item as usize];
        if object.len > state.capacity {
            return self.finish(item, Err(ErrorCode::BufferOverflow));
        }
        if object.len < state.len_min {
            return self.finish(item, Err(ErrorCode::InvalidParams));
        }
        if object.replicas.is_empty() || object.len == 0 {
            return self.finish(item, Err(ErrorCode::InternalError));
        }
        // Without a nearby replica, reads are spread over the replicas, both across objects and across reads
        // of one object.
        let near = object.replicas.iter().position(|replica| self.prefer.contains(&replica.segment));
        let turn = object.generation.wrapping_add(self.turn);
        state.first = near.unwrap_or((turn % object.replicas.len() as u64) as usize) as u8;
        state.object = object;
        self.todo.push_back(Todo::Read(item));
    }

    fn finish(&mut self, item: u32, result: Result<Fetched, ErrorCode>) {
        let slot = &mut self.items[item as usize].result;
        if slot.is_none() {
            *slot = Some(result);
            self.unfinished -= 1;
        }
    }

    fn finish_all(&mut self, error: ErrorCode) {
        for item in 0..self.items.len() as u32 {
            self.finish(item, Err(error));
        }
    }

    fn cancel_reads(&mut self) {
        self.canceled = true;
        let reading = (0..self.items.len() as u32).filter(|&item| self.items[item as usize].reading);
        self.todo.extend(reading.map(Todo::Cancel));
    }
}

/// The error of an operation that does not fit into a frame.
pub(super) const fn too_much(error: WireError) -> ErrorCode {
    error.code()
}
