//! Put: reserve space, write every replica, make sure that no write can still land, commit. `open.rs` has
//! puts that stay open while their bytes are written range by range.

mod open;

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::time::Duration;

use te_core::{Instant, Op, Outcome};

use super::get::too_much;
use super::{Action, ClientConfig, FenceEnd, KeyList, Transfer, TransferEnd};
use crate::bound::bound;
use crate::message::{self, Allocation, Commit, NewObject, Operation, PutRequest, REPLICAS_MAX, Revocation};
use crate::wire::Frame;
use crate::{ErrorCode, SegmentNo};
pub use open::{CloseItem, OpenPut, PutEnding, RangeItem};

/// Minimum speed of a segment, bytes per millisecond: 25 MB/s. A slower one is abandoned for another place.
const PLACE_BYTES_PER_MS_MIN: u64 = 25_000;
/// Multiplier from the nonce of one round to that of the next. Odd, so that distinct nonces stay distinct.
const NONCE_STEP: u32 = 0x9e37_79b1;

/// One key to store.
#[derive(Clone, Copy, Debug)]
pub struct PutItem<'a> {
    /// The object's key.
    pub key: &'a [u8],
    /// Bytes of data; not 0.
    pub len: u64,
    /// CRC-32C of the data. May also be set later, with [`PutOp::set_checksum`].
    pub checksum: u32,
}

/// A put of many keys.
///
/// An item is committed when *every* replica that was allocated has been written, and every write with an
/// unknown outcome was fenced by the target; otherwise the put is revoked. A revocation states whether the
/// writer is quiet, that is whether the master may reuse the space at once. Writes stop when the window that
/// the master granted is over.
///
/// An item whose bytes could not be moved, because a segment refused them or accepted none for
/// [`place_ms_max`](ClientConfig::place_ms_max), requests another place on segments that have not failed in
/// this operation. That is a new put, with its own generation and window, and begins when the previous one
/// was revoked.
///
/// An item whose key is stored already ends with `ObjectAlreadyExists`, unless the put is an
/// [upsert](crate::message::Existing::Replace); most callers treat that as success.
/// `RpcFail` or `RpcTimeout` after the writes means that the outcome of the commit is unknown; a get resolves
/// it.
#[derive(Debug, Default)]
pub struct PutOp {
    config: ClientConfig,
    request: PutRequest,
    keys: KeyList,
    items: Vec<State>,
    fences: Vec<(SegmentNo, Fence)>,
    todo: VecDeque<Todo>,
    mode: Mode,
    phase: Phase,
    start_call: Option<u64>,
    start_tries: u8,
    end_call: Call,
    revoke_call: Call,
    /// When the start was first sent.
    asked_at: Instant,
    /// The earliest end of a window.
    window_end: Instant,
    queued: u32,
    writing: u32,
    fencing: u32,
    aborted: Option<ErrorCode>,
    /// Number of places that were requested before this one.
    round: u8,
    /// Segments that could not be written to; they are excluded from the next request.
    failed: Vec<SegmentNo>,
    /// Segments that have accepted bytes in this round.
    answering: Vec<SegmentNo>,
    /// When segments that have accepted no bytes are abandoned. `None`: not before the window ends.
    patience_end: Option<Instant>,
}

/// What an operation does with its items.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Mode {
    /// Starts puts, writes them and ends them.
    #[default]
    Whole,
    /// Starts puts that stay open.
    Open,
    /// Writes ranges of open puts.
    Write,
    /// Ends open puts.
    Close,
}

#[derive(Clone, Copy, Debug)]
struct State {
    /// Bytes of data, or, of an open put, bytes to write: from this offset in the stored object on.
    len: u64,
    offset: u64,
    checksum: u32,
    /// One bit per replica: a write was requested and has not ended.
    writing: u8,
    /// One bit per replica: written.
    written: u8,
    /// One bit per replica: bytes of a failed write may still land.
    loose: u8,
    allocation: Option<Allocation>,
    /// When its window ends.
    until: Instant,
    /// It is to be revoked.
    quits: bool,
    /// Set once the item has failed; it will be revoked if it has an allocation.
    error: Option<ErrorCode>,
    /// The item failed because bytes could not be moved: another place may work.
    misplaced: bool,
    result: Option<Result<u64, ErrorCode>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Done,
    Start,
    Write,
    Fence,
    Finish,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fence {
    Requested,
    Held,
    Failed,
}

#[derive(Clone, Copy, Debug, Default)]
struct Call {
    id: Option<u64>,
    tries: u8,
    wanted: bool,
}

#[derive(Clone, Copy, Debug)]
enum Todo {
    Start,
    Write(u32),
    Cancel(u32),
    Fence(SegmentNo),
    End,
    Revoke,
}

impl PutOp {
    /// A state machine without an operation.
    #[must_use]
    pub fn new(config: ClientConfig) -> Self {
        Self { config, ..Self::default() }
    }

    /// Begins an operation. Its nonce must be a fresh random number; with 0, a start whose response is lost
    /// is not repeated.
    ///
    /// # Panics
    /// When the previous operation is not done.
    pub fn start<'a>(&mut self, items: impl IntoIterator<Item = PutItem<'a>>, request: PutRequest) {
        self.reset(Mode::Whole, request);
        self.start_items(items);
    }

    /// Prepares the next operation.
    fn reset(&mut self, mode: Mode, request: PutRequest) {
        assert!(self.is_done(), "the previous operation is not done");
        self.keys.clear();
        self.items.clear();
        self.fences.clear();
        self.todo.clear();
        self.mode = mode;
        (self.request, self.start_tries, self.round) = (request, 0, 0);
        self.failed.clear();
        self.answering.clear();
        (self.start_call, self.end_call, self.revoke_call) = (None, Call::default(), Call::default());
        (self.queued, self.writing, self.fencing, self.aborted) = (0, 0, 0, None);
        self.patience_end = None;
    }

    fn start_items<'a>(&mut self, items: impl IntoIterator<Item = PutItem<'a>>) {
        for item in items {
            self.keys.push(item.key);
            self.items.push(State { len: item.len, checksum: item.checksum, ..State::NEW });
        }
        if !self.items.is_empty() {
            self.phase = Phase::Start;
            self.todo.push_back(Todo::Start);
        }
    }

    /// Sets an item's checksum. Required before the item's last transfer is reported.
    pub fn set_checksum(&mut self, item: usize, checksum: u32) {
        if let Some(state) = self.items.get_mut(item) {
            state.checksum = checksum;
        }
    }

    /// What to do next. `request_id` identifies the request, if the result is [`Action::Call`].
    pub fn poll(&mut self, now: Instant, request_id: u64, out: &mut Vec<u8>) -> Option<Action> {
        while let Some(todo) = self.todo.pop_front() {
            let action = match todo {
                Todo::Start => self.send_start(now, request_id, out),
                Todo::Write(id) => self.send_write(now, id),
                Todo::Cancel(id) => {
                    let (item, bit) = split(id);
                    (self.items[item].writing & bit != 0).then_some(Action::Cancel { transfer: id })
                }
                Todo::Fence(segment) => Some(Action::Fence { segment }),
                Todo::End => self.send_end(request_id, out),
                Todo::Revoke => self.send_revoke(request_id, out),
            };
            if action.is_some() {
                return action;
            }
            self.advance();
        }
        None
    }

    /// When [`Self::handle_timeout`] is due: at the end of the window, or at the time at which silent
    /// segments are abandoned, while writes are in progress.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let end = self.patience_end.map_or(self.window_end, |end| end.min(self.window_end));
        (self.phase == Phase::Write && self.aborted.is_none()).then_some(end)
    }

    /// At the end of the window, everything that is not written is given up. Before it, writes to segments
    /// that have accepted nothing are cancelled, and another place is requested.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.poll_timeout().is_none_or(|end| now < end) {
            return;
        }
        if now >= self.window_end {
            return match self.mode {
                Mode::Whole | Mode::Open => self.abort(ErrorCode::TransferFail),
                Mode::Write | Mode::Close => self.expire(now),
            };
        }
        self.patience_end = None;
        for item in 0..self.items.len() {
            let state = &mut self.items[item];
            let silent = |replica: &usize| {
                let segment = state.segment(*replica);
                segment.is_some_and(|segment| !self.answering.contains(&segment))
            };
            let mut writing = (0..REPLICAS_MAX).filter(|replica| state.writing & (1 << replica) != 0);
            let Some(first_silent) = writing.find(silent) else { continue };
            state.misplace();
            // One silent segment is enough to fail the item; whether others are silent shows in the next
            // round.
            note(&mut self.failed, state.segment(first_silent));
            let ids = (0..REPLICAS_MAX).filter(|replica| state.writing & (1 << replica) != 0);
            self.todo.extend(ids.map(|replica| Todo::Cancel((item * REPLICAS_MAX + replica) as u32)));
        }
    }

    /// Aborts the operation: writes are cancelled and, once they have ended, revoked. Items that are being
    /// committed continue.
    pub fn abort(&mut self, error: ErrorCode) {
        if self.aborted.is_some() || self.phase == Phase::Done {
            return;
        }
        self.aborted = Some(error);
        if !matches!(self.phase, Phase::Start | Phase::Write) {
            return;
        }
        self.todo.clear();
        self.queued = 0;
        if self.phase == Phase::Start && self.start_call.is_none() {
            return self.finish_all(error);
        }
        for item in 0..self.items.len() {
            let state = &mut self.items[item];
            let complete = state.allocation.is_some_and(|allocation| state.is_written(&allocation));
            if self.phase == Phase::Write && state.result.is_none() && !complete {
                state.error.get_or_insert(error);
            }
            let writing = state.writing;
            let ids = (0..REPLICAS_MAX).filter(|replica| writing & (1 << replica) != 0);
            self.todo.extend(ids.map(|replica| Todo::Cancel((item * REPLICAS_MAX + replica) as u32)));
        }
        self.advance();
    }

    /// Processes the master's response. Frames of other requests are ignored.
    pub fn handle_response(&mut self, now: Instant, frame: &Frame<'_>) {
        let id = Some(frame.header.request_id);
        if self.start_call == id {
            self.start_call = None;
            self.started(now, frame);
        } else if self.end_call.id == id {
            self.end_call = Call::default();
            self.ended(frame);
        } else if self.revoke_call.id == id {
            // Whatever the response: the space is freed, now or when the nodes report that nothing can land
            // there.
            self.revoke_call = Call::default();
            self.revoked(frame);
        } else {
            return;
        }
        self.advance();
    }

    /// Reports that a request got no response and that none will be passed to this operation.
    pub fn handle_call_failed(&mut self, request_id: u64, error: ErrorCode) {
        let id = Some(request_id);
        if self.start_call == id {
            self.start_call = None;
            let again = self.request.nonce != 0 && self.start_tries < self.config.rpc_tries_max;
            if again && self.aborted.is_none() {
                self.todo.push_back(Todo::Start);
            } else {
                self.finish_all(error);
            }
        } else if self.end_call.id == id {
            self.end_call.id = None;
            if self.end_call.tries < self.config.rpc_tries_max {
                self.todo.push_back(Todo::End);
            } else {
                self.end_call = Call::default();
                self.items
                    .iter_mut()
                    .filter(|state| state.commits())
                    .for_each(|state| state.result = Some(Err(error)));
            }
        } else if self.revoke_call.id == id {
            self.revoke_call.id = None;
            if self.revoke_call.tries < self.config.rpc_tries_max {
                self.todo.push_back(Todo::Revoke);
            } else {
                self.revoke_call = Call::default();
                self.give_up_revoked();
            }
        }
        self.advance();
    }

    /// Reports that a transfer ended.
    pub fn handle_transfer(&mut self, id: u32, end: TransferEnd) {
        let (item, bit) = split(id);
        let Some(state) = self.items.get_mut(item).filter(|state| state.writing & bit != 0) else { return };
        state.writing &= !bit;
        self.writing -= 1;
        let segment = state.segment(id as usize % REPLICAS_MAX);
        if end.outcome == Outcome::Applied {
            state.written |= bit;
            note(&mut self.answering, segment);
        } else if state.error.is_none() {
            state.misplace();
            note(&mut self.failed, segment);
        }
        if end.fence_needed || end.outcome == Outcome::Unknown {
            state.loose |= bit;
        }
        self.advance();
    }

    /// Reports that a fence ended.
    pub fn handle_fence(&mut self, segment: SegmentNo, end: FenceEnd) {
        let requested =
            self.fences.iter_mut().find(|(no, fence)| *no == segment && *fence == Fence::Requested);
        let Some((_, fence)) = requested else { return };
        *fence = if end == FenceEnd::Held { Fence::Held } else { Fence::Failed };
        self.fencing -= 1;
        self.advance();
    }

    /// Whether every item has a result and nothing is in progress.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.phase == Phase::Done
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

    /// The result of an item, with the generation that was committed; `None` while it has none.
    #[must_use]
    pub fn result(&self, item: usize) -> Option<Result<u64, ErrorCode>> {
        self.items.get(item)?.result
    }

    fn send_start(&mut self, now: Instant, request_id: u64, out: &mut Vec<u8>) -> Option<Action> {
        let count = self.items.iter().filter(|state| state.waits()).count();
        let waiting = self.items.iter().enumerate().filter(|(_, state)| state.waits());
        let objects = waiting.map(|(item, state)| NewObject { key: self.keys.key(item), len: state.len });
        let objects = Counted(objects, count);
        if let Err(error) = message::PutStart::encode_request(out, request_id, &self.request, objects) {
            self.finish_all(too_much(error));
            return None;
        }
        self.start_call = Some(request_id);
        self.start_tries += 1;
        if self.start_tries == 1 {
            self.asked_at = now;
        }
        Some(Action::Call)
    }

    fn started(&mut self, now: Instant, frame: &Frame<'_>) {
        let waiting = self.items.iter().filter(|state| state.waits()).count();
        let (window, allocations) = match message::PutStart::decode_response(frame) {
            Ok(answer) if answer.1.len() == waiting => answer,
            Ok(_) => return self.finish_all(ErrorCode::InternalError),
            Err(error) => return self.finish_all(error),
        };
        self.window_end = self.asked_at + Duration::from_millis(window.window_ms.into());
        self.phase = Phase::Write;
        // A response that comes after the window must not lead to a single write.
        let late = (now >= self.window_end).then_some(ErrorCode::TransferFail);
        let refuse = self.aborted.or(late);
        self.answering.clear();
        let mut bytes = 0u64;
        let items = self.items.iter_mut().enumerate().filter(|(_, state)| state.waits());
        for ((item, state), allocation) in items.zip(allocations) {
            match allocation {
                Ok(allocation) => {
                    bytes = bytes.saturating_add(state.len.saturating_mul(allocation.replicas.len() as u64));
                    state.allocation = Some(allocation);
                    state.until = self.window_end;
                    state.error = refuse;
                    if refuse.is_none() && self.mode == Mode::Open {
                        state.result = Some(Ok(allocation.generation));
                    } else if refuse.is_none() {
                        let ids = (0..allocation.replicas.len())
                            .map(|replica| (item * REPLICAS_MAX + replica) as u32);
                        self.queued += ids.len() as u32;
                        self.todo.extend(ids.map(Todo::Write));
                    }
                }
                // The caller is told why its first place could not be written to, not why there is no second
                // one.
                Err(error) if self.round > 0 && error.is_no_room() => {
                    state.result = Some(Err(ErrorCode::TransferFail));
                }
                Err(error) => state.result = Some(Err(error)),
            }
        }
        let patience = Duration::from_millis(self.config.place_ms_max.into())
            + Duration::from_millis(bytes / PLACE_BYTES_PER_MS_MIN);
        let elsewhere = self.mode == Mode::Whole && self.round + 1 < self.config.places_max;
        self.patience_end = elsewhere.then_some(now + patience);
    }

    fn send_write(&mut self, now: Instant, id: u32) -> Option<Action> {
        self.queued -= 1;
        let (item, bit) = split(id);
        let state = &mut self.items[item];
        if now >= state.until {
            state.error.get_or_insert(ErrorCode::TransferFail);
        }
        if state.error.is_some() {
            return None;
        }
        let replica = *state.allocation.as_ref()?.replicas.get(id as usize % REPLICAS_MAX)?;
        state.writing |= bit;
        self.writing += 1;
        Some(Action::Transfer(Transfer {
            id,
            item: item as u32,
            op: Op::Write,
            segment: replica.segment,
            addr: replica.addr + state.offset,
            len: state.len,
        }))
    }

    fn send_end(&mut self, request_id: u64, out: &mut Vec<u8>) -> Option<Action> {
        // Two passes, because the number of items is encoded first.
        let count = self.items.iter().filter(|state| state.commits()).count();
        let commits = self.items.iter().enumerate().filter_map(|(item, state)| {
            let Allocation { generation, handle, .. } = state.commits().then_some(state.allocation)??;
            let key = self.keys.key(item);
            Some(Commit { key, generation, handle, checksum: bound(state.checksum, key.0, generation) })
        });
        if let Err(error) = message::PutEnd::encode_request(out, request_id, &(), Counted(commits, count)) {
            let error = too_much(error);
            self.items
                .iter_mut()
                .filter(|state| state.commits())
                .for_each(|state| state.result = Some(Err(error)));
            self.end_call = Call::default();
            return None;
        }
        self.end_call.id = Some(request_id);
        self.end_call.tries += 1;
        Some(Action::Call)
    }

    fn ended(&mut self, frame: &Frame<'_>) {
        let waiting = self.items.iter_mut().filter(|state| state.commits());
        match message::PutEnd::decode_response(frame) {
            Ok((_, mut results)) => {
                for state in waiting {
                    let generation = state.generation();
                    let result = results.next().unwrap_or(Err(ErrorCode::InternalError));
                    state.result = Some(result.map(|()| generation));
                }
            }
            Err(error) => waiting.for_each(|state| state.result = Some(Err(error))),
        }
    }

    fn send_revoke(&mut self, request_id: u64, out: &mut Vec<u8>) -> Option<Action> {
        let count = self.items.iter().filter(|state| state.revokes()).count();
        let revocations = self.items.iter().enumerate().filter_map(|(item, state)| {
            let Allocation { generation, handle, .. } = state.revokes().then_some(state.allocation)??;
            Some(Revocation { key: self.keys.key(item), generation, handle, quiet: self.is_quiet(state) })
        });
        if message::PutRevoke::encode_request(out, request_id, &(), Counted(revocations, count)).is_err() {
            self.revoke_call = Call::default();
            self.give_up_revoked();
            return None;
        }
        self.revoke_call.id = Some(request_id);
        self.revoke_call.tries += 1;
        Some(Action::Call)
    }

    /// Every item that was revoked has failed, or requests another place.
    fn revoked(&mut self, frame: &Frame<'_>) {
        let again =
            self.mode == Mode::Whole && self.round + 1 < self.config.places_max && self.aborted.is_none();
        let Ok((_, mut results)) = message::PutRevoke::decode_response(frame) else {
            return self.give_up_revoked();
        };
        for state in self.items.iter_mut().filter(|state| state.revokes()) {
            // A put that the master no longer knows does not block the key either.
            let is_gone =
                results.next().is_some_and(|result| !matches!(result, Err(ErrorCode::InvalidWrite)));
            if again && state.misplaced && is_gone {
                state.start_over();
            } else if state.quits {
                let ended = if is_gone { Ok(state.generation()) } else { Err(ErrorCode::InvalidWrite) };
                state.result = Some(ended);
            } else {
                state.fail();
            }
        }
    }

    /// The master did not confirm the revocation: the keys may still be taken.
    fn give_up_revoked(&mut self) {
        self.items.iter_mut().filter(|state| state.revokes()).for_each(State::fail);
    }

    /// Requests places for the items without one, on segments that have not failed.
    fn next_round(&mut self) {
        self.round += 1;
        // The segments that failed last are excluded: a put can name only a few.
        let placement = &mut self.request.options.placement;
        for segment in self.failed.iter().rev() {
            if !placement.excluded.contains(segment) && placement.excluded.push(*segment).is_err() {
                break;
            }
        }
        if self.request.nonce != 0 {
            // A new put, which must not be mistaken for the previous one.
            self.request.nonce = self.request.nonce.wrapping_mul(NONCE_STEP) | 1;
        }
        self.fences.clear();
        self.start_tries = 0;
        self.phase = Phase::Start;
        self.todo.push_back(Todo::Start);
    }

    /// Whether every write of the item with an unknown outcome was fenced.
    fn is_quiet(&self, state: &State) -> bool {
        state.loose_segments().all(|segment| self.fences.contains(&(segment, Fence::Held)))
    }

    /// Moves on to the next phase when this one has nothing left to do.
    fn advance(&mut self) {
        if self.phase == Phase::Write && self.writing == 0 && self.queued == 0 && self.mode == Mode::Write {
            return self.end_writes();
        }
        if self.phase == Phase::Write && self.writing == 0 && self.queued == 0 {
            self.phase = Phase::Fence;
            for state in &self.items {
                for segment in state.loose_segments() {
                    if !self.fences.iter().any(|(no, _)| *no == segment) {
                        self.fences.push((segment, Fence::Requested));
                        self.todo.push_back(Todo::Fence(segment));
                        self.fencing += 1;
                    }
                }
            }
        }
        if self.phase == Phase::Fence && self.fencing == 0 {
            self.phase = Phase::Finish;
            for item in 0..self.items.len() {
                if !self.is_quiet(&self.items[item]) {
                    let loose = self.items[item].loose_segments();
                    let unfenced = loose.filter(|segment| !self.fences.contains(&(*segment, Fence::Held)));
                    unfenced.for_each(|segment| note(&mut self.failed, Some(segment)));
                    self.items[item].misplace();
                }
            }
            if self.items.iter().any(State::commits) {
                self.end_call.wanted = true;
                self.todo.push_back(Todo::End);
            }
            if self.items.iter().any(State::revokes) {
                self.revoke_call.wanted = true;
                self.todo.push_back(Todo::Revoke);
            }
        }
        if self.phase == Phase::Finish && !self.end_call.wanted && !self.revoke_call.wanted {
            if self.items.iter().any(State::waits) {
                self.next_round();
            } else {
                self.phase = Phase::Done;
            }
        }
    }

    fn finish_all(&mut self, error: ErrorCode) {
        for state in &mut self.items {
            state.result.get_or_insert(Err(error));
        }
        self.todo.clear();
        self.phase = Phase::Done;
    }
}

impl State {
    /// An item without a place.
    const NEW: Self = Self {
        len: 0,
        offset: 0,
        checksum: 0,
        writing: 0,
        written: 0,
        loose: 0,
        allocation: None,
        until: Instant::ZERO,
        quits: false,
        error: None,
        misplaced: false,
        result: None,
    };

    fn generation(&self) -> u64 {
        self.allocation.map_or(0, |allocation| allocation.generation)
    }

    fn is_written(&self, allocation: &Allocation) -> bool {
        u32::from(self.written).count_ones() as usize == allocation.replicas.len()
    }

    /// Whether the item has no place yet.
    fn waits(&self) -> bool {
        self.result.is_none() && self.allocation.is_none()
    }

    /// Marks the item's place as one to which its bytes could not be moved.
    fn misplace(&mut self) {
        if self.error.is_none() {
            (self.error, self.misplaced) = (Some(ErrorCode::TransferFail), true);
        }
    }

    fn fail(&mut self) {
        self.result = Some(Err(self.error.unwrap_or(ErrorCode::InternalError)));
    }

    /// Resets the item to the state before its first try.
    fn start_over(&mut self) {
        (self.writing, self.written, self.loose) = (0, 0, 0);
        (self.allocation, self.error, self.misplaced) = (None, None, false);
    }

    fn segment(&self, replica: usize) -> Option<SegmentNo> {
        self.allocation.as_ref()?.replicas.get(replica).map(|replica| replica.segment)
    }

    fn commits(&self) -> bool {
        self.result.is_none() && self.error.is_none() && self.allocation.is_some()
    }

    fn revokes(&self) -> bool {
        self.result.is_none() && self.error.is_some() && self.allocation.is_some()
    }

    fn loose_segments(&self) -> impl Iterator<Item = SegmentNo> {
        let replicas = self.allocation.map(|allocation| allocation.replicas).unwrap_or_default();
        (0..replicas.len())
            .filter(|replica| self.loose & (1 << replica) != 0)
            .map(move |replica| replicas[replica].segment)
    }
}

/// Adds a segment to the list unless it is there.
fn note(list: &mut Vec<SegmentNo>, segment: Option<SegmentNo>) {
    if let Some(segment) = segment.filter(|segment| !list.contains(segment)) {
        list.push(segment);
    }
}

/// An iterator whose length was counted before.
struct Counted<I>(I, usize);

impl<I: Iterator> Iterator for Counted<I> {
    type Item = I::Item;

    fn next(&mut self) -> Option<I::Item> {
        let item = self.0.next()?;
        self.1 -= 1;
        Some(item)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.1, Some(self.1))
    }
}

impl<I: Iterator> ExactSizeIterator for Counted<I> {}

/// The item and the replica's bit of a transfer's id.
const fn split(id: u32) -> (usize, u8) {
    (id as usize / REPLICAS_MAX, 1 << (id as usize % REPLICAS_MAX))
}
