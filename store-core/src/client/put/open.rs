//! Puts that stay open: started in one operation, written range by range in others, in any order, and ended
//! by a last one.
//!
//! ```text
//!   open ─▶ start ─▶ OpenPut ─┬─▶ write ─▶ write ─▶ …  ┬─▶ close ─▶ trailer ─▶ fences ─▶ end
//!                             │   ranges, any order    └─▶ close ───────────▶ fences ─▶ revoke
//!                             └─ the object has no reader before its end; a failed write leaves revoke alone
//! ```
//!
//! The writer computes the checksums of what it writes ([`RangeSums`](crate::chunks::RangeSums)). When no
//! byte is missing, they are the trailer and the checksum of the whole object, and what is stored is verified
//! as if it had been written from its beginning to its end. An open put requests no further place: its bytes
//! may be gone by then.

use te_core::Instant;

use super::{Mode, Phase, PutItem, PutOp, State, Todo};
use crate::ErrorCode;
use crate::chunks::trailer_len;
use crate::message::{Allocation, PutRequest, REPLICAS_MAX};

/// A put that was started and not ended yet.
#[derive(Clone, Copy, Debug)]
pub struct OpenPut {
    len: u64,
    allocation: Allocation,
    until: Instant,
    /// One bit per replica: bytes of a failed write may still land.
    loose: u8,
    failed: bool,
}

impl OpenPut {
    /// Bytes of data.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether the put has no data, which no put has.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of the put.
    #[must_use]
    pub const fn generation(&self) -> u64 {
        self.allocation.generation
    }

    /// When its window ends: nothing is written from then on.
    #[must_use]
    pub const fn until(&self) -> Instant {
        self.until
    }

    /// Whether a write has failed, so that the put can only be revoked.
    #[must_use]
    pub const fn has_failed(&self) -> bool {
        self.failed
    }
}

/// A range of an open put to write.
#[derive(Clone, Copy, Debug)]
pub struct RangeItem {
    /// The put.
    pub put: OpenPut,
    /// The range's offset in the object, bytes.
    pub offset: u64,
    /// Length of the range, bytes; not 0. It ends inside the object.
    pub len: u64,
}

/// How an open put ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutEnding {
    /// The object is complete, and its data has this CRC-32C.
    Commit {
        /// CRC-32C of all data.
        checksum: u32,
    },
    /// The put is given up.
    Revoke,
}

/// An open put to end.
#[derive(Clone, Copy, Debug)]
pub struct CloseItem<'a> {
    /// The object's key.
    pub key: &'a [u8],
    /// The put.
    pub put: OpenPut,
    /// How it ends.
    pub ending: PutEnding,
}

impl PutOp {
    /// Begins an operation that starts puts and leaves them open: [`Self::opened`] returns them. As
    /// [`Self::start`] otherwise; the checksums of the items have no meaning.
    ///
    /// # Panics
    /// When the previous operation is not done.
    pub fn open<'a>(&mut self, items: impl IntoIterator<Item = PutItem<'a>>, request: PutRequest) {
        self.reset(Mode::Open, request);
        self.start_items(items);
    }

    /// The put that an item has opened.
    #[must_use]
    pub fn opened(&self, item: usize) -> Option<OpenPut> {
        let state = self.items.get(item).filter(|state| matches!(state.result, Some(Ok(_))))?;
        let (State { len, until, .. }, allocation) = (*state, state.allocation?);
        (self.mode == Mode::Open).then_some(OpenPut { len, allocation, until, loose: 0, failed: false })
    }

    /// Begins an operation that writes ranges of open puts. Its transfers are exactly these ranges, without a
    /// trailer. An item succeeds when its range was written in every replica; pass the result to
    /// [`Self::note_writes`].
    ///
    /// # Panics
    /// When the previous operation is not done.
    pub fn write(&mut self, items: impl IntoIterator<Item = RangeItem>) {
        self.reset(Mode::Write, PutRequest::default());
        for RangeItem { put, offset, len } in items {
            self.keys.push(&[]);
            self.resume(State { len, offset, ..State::of(&put) });
        }
        self.begin_writes();
    }

    /// Notes what a write of a range means for its put.
    pub fn note_writes(&self, item: usize, put: &mut OpenPut) {
        if let Some(state) = self.items.get(item) {
            put.loose |= state.loose;
            put.failed |= !matches!(state.result, Some(Ok(_)));
        }
    }

    /// Begins an operation that ends open puts. Its transfers are the trailers of the objects that are
    /// committed and have one. An item that was to be revoked succeeds when it is; one that could not be
    /// committed is revoked and has an error.
    ///
    /// # Panics
    /// When the previous operation is not done.
    pub fn close<'a>(&mut self, items: impl IntoIterator<Item = CloseItem<'a>>) {
        self.reset(Mode::Close, PutRequest::default());
        for CloseItem { key, put, ending } in items {
            self.keys.push(key);
            let open = State { len: trailer_len(put.len), offset: put.len, ..State::of(&put) };
            self.resume(match ending {
                // The error of a revocation that gets no answer.
                PutEnding::Revoke => State { quits: true, error: Some(ErrorCode::RpcFail), ..open },
                PutEnding::Commit { .. } if put.failed => {
                    State { error: Some(ErrorCode::TransferFail), ..open }
                }
                PutEnding::Commit { checksum } => State { checksum, ..open },
            });
        }
        self.begin_writes();
    }

    /// Adds an item of an open put, with its writes.
    fn resume(&mut self, mut state: State) {
        let replicas = state.allocation.map_or(0, |allocation| allocation.replicas.len());
        if state.len == 0 {
            state.written = ((1u16 << replicas) - 1) as u8;
        } else if state.error.is_none() {
            let first = self.items.len() * REPLICAS_MAX;
            self.queued += replicas as u32;
            self.todo.extend((first..first + replicas).map(|id| Todo::Write(id as u32)));
        }
        self.items.push(state);
    }

    fn begin_writes(&mut self) {
        if self.items.is_empty() {
            return;
        }
        self.phase = Phase::Write;
        self.window_end = self.items.iter().map(|state| state.until).min().unwrap_or(Instant::ZERO);
        self.advance();
    }

    /// Gives up the writes whose windows are over.
    pub(super) fn expire(&mut self, now: Instant) {
        for item in 0..self.items.len() {
            let state = &mut self.items[item];
            let complete = state.allocation.is_some_and(|allocation| state.is_written(&allocation));
            if state.until > now || complete {
                continue;
            }
            state.error.get_or_insert(ErrorCode::TransferFail);
            let writing = state.writing;
            let ids = (0..REPLICAS_MAX).filter(|replica| writing & (1 << replica) != 0);
            self.todo.extend(ids.map(|replica| Todo::Cancel((item * REPLICAS_MAX + replica) as u32)));
        }
        let later = self.items.iter().map(|state| state.until).filter(|until| *until > now);
        self.window_end = later.min().unwrap_or(NEVER);
        self.advance();
    }

    /// All writes of an operation that writes ranges have ended.
    pub(super) fn end_writes(&mut self) {
        for state in &mut self.items {
            let complete = state.allocation.is_some_and(|allocation| state.is_written(&allocation));
            let failed = (!complete).then_some(ErrorCode::TransferFail);
            let error = state.error.or(failed);
            state.result = Some(error.map_or(Ok(state.generation()), Err));
        }
        self.todo.clear();
        self.phase = Phase::Done;
    }
}

/// A time that does not come.
const NEVER: Instant = Instant::from_nanos(u64::MAX);

impl State {
    /// The state of an open put.
    fn of(put: &OpenPut) -> Self {
        Self { allocation: Some(put.allocation), until: put.until, loose: put.loose, ..Self::NEW }
    }
}
