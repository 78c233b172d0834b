//! [`Post`]: requests that were submitted together, and what has become of each.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use te_core::{Op, Status};
use te_engine::{LocalAddr, SubmitOptions, Transfer, TransferEngine, TransferError, TransferRequest};

use super::regions::{Borrowed, Regions};
use super::segments::{Attached, Segment, SegmentNumber, Segments};
use super::{EngineError, Notice};

/// One copy between local memory and a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The direction: `Read` copies remote bytes to local memory, `Write` local bytes to remote memory.
    pub op: Op,
    /// First local address.
    pub local: u64,
    /// The segment.
    pub segment: SegmentNumber,
    /// First remote address, in the address space of the segment's owner.
    pub remote: u64,
    /// Length, bytes; 0 completes at once.
    pub len: u64,
}

/// What is known about a request, or about several together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// No byte was submitted yet.
    Waiting,
    /// It has not ended.
    Pending,
    /// Every byte has arrived.
    Completed,
    /// It has ended, and not every byte has arrived.
    Failed,
}

/// The state of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TaskStatus {
    /// The state.
    pub state: State,
    /// Bytes that have arrived.
    pub bytes: u64,
}

impl State {
    /// Whether it has ended: its memory is not touched any more.
    #[must_use]
    pub const fn is_over(self) -> bool {
        matches!(self, Self::Completed | Self::Failed)
    }

    /// The state of both together: over when both are, and complete when both are.
    pub(super) const fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Waiting, Self::Waiting) => Self::Waiting,
            (Self::Waiting | Self::Pending, _) | (_, Self::Waiting | Self::Pending) => Self::Pending,
            (Self::Failed, _) | (_, Self::Failed) => Self::Failed,
            (Self::Completed, Self::Completed) => Self::Completed,
        }
    }
}

/// Everything that did not arrive is `Failed`: callers of the C interface take any other state that is over
/// for success.
impl From<Status> for State {
    fn from(status: Status) -> Self {
        match status {
            Status::Waiting => Self::Waiting,
            Status::Pending => Self::Pending,
            Status::Completed => Self::Completed,
            Status::Failed | Status::TimedOut | Status::Canceled => Self::Failed,
        }
    }
}

/// Requests that were checked and divided, and can be submitted.
#[derive(Default)]
pub(super) struct Plan {
    tasks: Vec<Task>,
    has_refused: bool,
    parts: Vec<TransferRequest>,
    pub(super) borrowed: Borrowed,
    segments: Vec<(SegmentNumber, Arc<Segment>, Arc<Attached>)>,
    bytes: u64,
}

/// What a request has become.
#[derive(Clone, Copy, Debug)]
enum Task {
    /// It has no bytes.
    Empty,
    /// The peer does not export the remote range for this direction.
    Refused,
    /// `count` parts from number `first` on.
    Parts { first: u32, count: u32 },
}

/// Requests that were submitted together.
pub(super) struct Post {
    tasks: Box<[Task]>,
    /// Whether one of the tasks is refused.
    has_refused: bool,
    transfers: Box<[Transfer]>,
    /// Parts per transfer; the last one may have fewer.
    parts_each: usize,
    segments: Box<[Arc<Segment>]>,
    /// Whether `borrowed` holds something.
    is_borrowing: AtomicBool,
    borrowed: Mutex<Borrowed>,
    /// Whether the segments know of the failure.
    has_complained: AtomicBool,
}

impl Plan {
    /// Bytes of all requests.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Checks one more request, and divides it into parts that lie in one local region each.
    ///
    /// # Errors
    /// `Argument`, `Segment`, `Memory`. What `borrowed` has by then is to be given back.
    ///
    /// # Safety
    /// The local bytes of the request stay mapped until the post that is made of this plan is over, and no
    /// `&` or `&mut` exists to bytes that it may write.
    #[allow(unsafe_code, reason = "only the caller can promise what raw addresses need")]
    pub(super) unsafe fn add(
        &mut self,
        engine: &TransferEngine,
        segments: &Segments,
        regions: &Regions,
        request: &Request,
    ) -> Result<(), EngineError> {
        let Request { op, local, remote, len, .. } = *request;
        let attached = self.attached(engine, segments, request)?;
        if len == 0 {
            self.tasks.push(Task::Empty);
            return Ok(());
        }
        let Some(attached) = attached else {
            self.tasks.push(Task::Refused);
            self.has_refused = true;
            return Ok(());
        };
        let first = self.parts.len();
        let parts = &mut self.parts;
        let mut part = |addr: u64, len: u64| {
            let remote_addr = remote + (addr - local);
            let local = LocalAddr::Address(addr);
            parts.push(TransferRequest { op, local, segment: attached.handle, remote_addr, len });
        };
        if !regions.divide(local, len, &mut part) {
            // SAFETY: the caller's promise; the plan's post gives `borrowed` back when it is over.
            unsafe { regions.borrow(engine, local, len, &mut self.borrowed, &mut part)? };
        }
        let count = self.parts.len() - first;
        let too_many = |_| EngineError::argument("too many parts in one call: submit fewer requests");
        let first = u32::try_from(first).map_err(too_many)?;
        self.tasks.push(Task::Parts { first, count: count as u32 });
        self.bytes = self.bytes.saturating_add(len);
        Ok(())
    }

    /// The segment of a request. `None`: its owner, which was asked again, does not export the range.
    fn attached(
        &mut self,
        engine: &TransferEngine,
        segments: &Segments,
        request: &Request,
    ) -> Result<Option<Arc<Attached>>, EngineError> {
        let known = self.segments.iter().position(|(number, ..)| *number == request.segment);
        let at = match known {
            Some(at) => at,
            None => {
                let segment = segments.get(request.segment)?;
                let attached = segment.current(engine)?;
                self.segments.push((request.segment, segment, attached));
                self.segments.len() - 1
            }
        };
        let (_, segment, attached) = &mut self.segments[at];
        let Request { op, remote, len, .. } = *request;
        if len > 0 && !attached.allows(op, remote, len) {
            // The owner may have registered memory since.
            *attached = segment.ask(engine, Some(attached))?;
            if !attached.allows(op, remote, len) {
                log::warn!(
                    "segment {:?} exports no {len} bytes at {remote:#x} to {}: the request has failed",
                    segment.name(),
                    if op == Op::Read { "read" } else { "write" }
                );
                return Ok(None);
            }
        }
        Ok(Some(attached.clone()))
    }

    /// Submits the parts; each batch of the engine has `timeout`. When all requests have completed, `notice`
    /// is sent to the owner of the first one's segment. On an error the plan is as before.
    ///
    /// # Errors
    /// `TooManyBatches`, `Transfer`; `Argument` for a notice with more parts than one batch takes. Nothing is
    /// under way.
    pub(super) fn submit(
        &mut self,
        engine: &TransferEngine,
        timeout: Option<Duration>,
        notice: Option<&Notice>,
    ) -> Result<Post, EngineError> {
        let config = engine.config();
        let parts_each = config.requests_per_batch_max as usize;
        let mut options = SubmitOptions::new();
        if let Some(timeout) = timeout {
            options = options.timeout(timeout);
        }
        // Requests that failed already send nothing.
        if let Some(Notice { name, message }) = notice.filter(|_| !self.has_refused) {
            if self.parts.len() > parts_each {
                return Err(EngineError::argument(format!(
                    "a notification with {} ranges: submit at most {parts_each} of them together",
                    self.parts.len()
                )));
            }
            options = options.notify(name, message);
            if self.parts.is_empty() {
                self.notify_now(engine, name, message);
            }
        }
        let mut transfers = Vec::with_capacity(self.parts.len().div_ceil(parts_each));
        for parts in self.parts.chunks(parts_each) {
            match engine.submit_with(parts, &options) {
                Ok(transfer) => transfers.push(transfer),
                Err(error) => {
                    end_all(&transfers);
                    return Err(match error {
                        TransferError::Full => {
                            EngineError::TooManyBatches { batches_max: config.batches_max as usize }
                        }
                        error => error.into(),
                    });
                }
            }
        }
        let borrowed = std::mem::take(&mut self.borrowed);
        let segments = std::mem::take(&mut self.segments);
        Ok(Post {
            tasks: std::mem::take(&mut self.tasks).into(),
            has_refused: self.has_refused,
            transfers: transfers.into(),
            parts_each,
            segments: segments.into_iter().map(|(_, segment, _)| segment).collect(),
            is_borrowing: AtomicBool::new(!borrowed.is_empty()),
            borrowed: Mutex::new(borrowed),
            has_complained: AtomicBool::new(false),
        })
    }
}

impl Plan {
    /// Sends a notification with requests that have no bytes.
    fn notify_now(&self, engine: &TransferEngine, name: &str, message: &[u8]) {
        let Some((_, segment, attached)) = self.segments.first() else { return };
        if let Err(error) = engine.notify(attached.handle, name, message) {
            log::warn!("the notification {name:?} to {:?} was not delivered: {error}", segment.name());
        }
    }
}

/// Cancels transfers and waits until nothing touches their memory any more, or it is quarantined.
fn end_all(transfers: &[Transfer]) {
    transfers.iter().for_each(Transfer::cancel);
    for transfer in transfers {
        if let Err(error) = transfer.wait(None) {
            log::debug!("a transfer was cancelled: {error}");
        }
    }
}

impl Post {
    /// Requests without bytes.
    #[cfg(test)]
    pub(super) fn without_transfers(tasks: usize) -> Self {
        Self {
            tasks: vec![Task::Empty; tasks].into(),
            has_refused: false,
            transfers: Box::default(),
            parts_each: 1,
            segments: Box::default(),
            is_borrowing: AtomicBool::new(false),
            borrowed: Mutex::default(),
            has_complained: AtomicBool::new(false),
        }
    }

    /// Number of requests.
    pub(super) fn len(&self) -> usize {
        self.tasks.len()
    }

    /// What is known about request number `task`. Takes no lock, except once when memory that was borrowed is
    /// given back.
    pub(super) fn task(&self, task: usize) -> Option<TaskStatus> {
        let status = |state, bytes| TaskStatus { state, bytes };
        Some(match *self.tasks.get(task)? {
            Task::Empty => status(State::Completed, 0),
            Task::Refused => status(State::Failed, 0),
            Task::Parts { first, count } => {
                let parts = first as usize..(first + count) as usize;
                let known = parts.filter_map(|part| {
                    let of = self.transfers[part / self.parts_each].request(part % self.parts_each)?;
                    Some(status(of.status.into(), of.bytes))
                });
                known
                    .reduce(|all, part| status(all.state.and(part.state), all.bytes + part.bytes))
                    .unwrap_or(status(State::Failed, 0))
            }
        })
    }

    /// What is known about all requests together.
    pub(super) fn state(&self) -> State {
        let of_tasks = if self.has_refused { State::Failed } else { State::Completed };
        self.transfers.iter().fold(of_tasks, |state, transfer| state.and(transfer.status().into()))
    }

    /// Waits until all requests have ended, which their timeouts bound.
    ///
    /// # Errors
    /// `Transfer` with the first failure; `Argument` when the peer does not export the range of a request.
    pub(super) fn wait(&self) -> Result<(), EngineError> {
        let mut first = Ok(());
        for transfer in &self.transfers {
            if let Err(error) = transfer.wait(None)
                && first.is_ok()
            {
                first = Err(error.into());
            }
        }
        if first.is_ok() && self.has_refused {
            first = Err(EngineError::argument(
                "the peer exports no such memory for this direction: check the remote addresses and lengths",
            ));
        }
        first
    }

    /// Whether [`settle`](Self::settle) has something to do for a request in this state.
    pub(super) fn wants_settling(&self, state: State) -> bool {
        let is_news = state == State::Failed && !self.has_complained.load(Ordering::Relaxed);
        state.is_over() && (is_news || self.is_borrowing.load(Ordering::Acquire)) && self.state().is_over()
    }

    /// To be called when the state has been found to be over: gives borrowed memory back, and after a failure
    /// lets the segments ask their owners before their next use.
    pub(super) fn settle(&self, engine: &TransferEngine, regions: &Regions) {
        if self.is_borrowing.load(Ordering::Acquire) && self.is_borrowing.swap(false, Ordering::AcqRel) {
            let borrowed = std::mem::take(&mut *self.borrowed.lock().unwrap_or_else(PoisonError::into_inner));
            regions.give_back(engine, borrowed);
        }
        for transfer in &self.transfers {
            if let Some(Err(error)) = transfer.notified() {
                // As in Mooncake: the bytes have arrived, so the transfer has not failed.
                log::warn!("a notification was not delivered: {error}");
            }
        }
        if !self.has_complained.load(Ordering::Relaxed)
            && self.state() == State::Failed
            && !self.has_complained.swap(true, Ordering::Relaxed)
        {
            self.segments.iter().for_each(|segment| segment.suspect());
        }
    }

    /// Begins to end everything that is under way.
    pub(super) fn cancel(&self) {
        self.transfers.iter().for_each(Transfer::cancel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_but_completed_is_success() {
        for status in [Status::Failed, Status::TimedOut, Status::Canceled] {
            assert_eq!(State::from(status), State::Failed);
        }
        assert_eq!(State::from(Status::Completed), State::Completed);
        assert!(!State::from(Status::Pending).is_over() && !State::from(Status::Waiting).is_over());
    }

    #[test]
    fn two_states_are_over_when_both_are_and_complete_when_both_are() {
        use State::{Completed, Failed, Pending, Waiting};
        for (a, b, both) in [
            (Waiting, Waiting, Waiting),
            (Waiting, Completed, Pending),
            (Pending, Failed, Pending),
            (Failed, Completed, Failed),
            (Completed, Completed, Completed),
        ] {
            assert_eq!((a.and(b), b.and(a)), (both, both), "{a:?} {b:?}");
        }
    }
}
