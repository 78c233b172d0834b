//! Batches of requests: handles, counters per request, and the six statuses.
//!
//! ```text
//!   create(requests) ──► Waiting ──accepted()───► Pending ──every slice completed──► Completed
//!                            │                       │                               Failed
//!                            └──── cancel(reason) ───┴──► drains, then ────────────► Canceled / TimedOut
//! ```
//!
//! A batch is terminal only when each of its accepted slices has completed, whatever failed first: the memory
//! of a terminal batch belongs to the caller again (L2). [`BatchTable::next`] cuts slices on demand; they are
//! never kept as a list.

use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::{
    Completion, Error, ErrorKind, RegionOffset, RemoteOffset, Slice, Slicer, Token, TransferRequest,
};

/// Identifies a batch by slot and generation. The handle of a freed batch is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchHandle {
    index: u16,
    generation: u32,
}

impl BatchHandle {
    /// The number of the slot in the table; less than the table's `batches_max`.
    #[must_use]
    pub const fn index(self) -> usize {
        self.index as usize
    }

    /// The [`index`](Self::index) of the batch that a slice with this token was cut from. Only for tokens of
    /// [`BatchTable::next`].
    #[inline]
    #[must_use]
    pub const fn index_of(token: Token) -> usize {
        parts(token).0 as usize
    }
}

/// The state of a batch or of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Status {
    /// Nothing was submitted yet.
    Waiting,
    /// At least one slice was submitted, and not all have ended.
    Pending,
    /// Every byte is in place.
    Completed,
    /// At least one slice failed; all have ended.
    Failed,
    /// The deadline passed; all slices have ended.
    TimedOut,
    /// The caller cancelled it; all slices have ended.
    Canceled,
}

impl Status {
    /// Whether it has ended: no memory of the batch will be touched any more.
    #[must_use]
    pub const fn is_terminal(self) -> bool {
        !matches!(self, Self::Waiting | Self::Pending)
    }
}

/// Why a batch is ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelReason {
    /// The caller cancelled it.
    Canceled,
    /// Its deadline passed.
    TimedOut,
}

/// What is known about one request of a batch, or about a batch as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The state.
    pub status: Status,
    /// The number of bytes that are known to be in place.
    pub bytes_done: u64,
    /// The first error, if any.
    pub error: Option<Error>,
    /// Bytes of a WRITE may still land at the target: fence before the range gets other bytes (L5).
    pub fence_needed: bool,
}

/// A table of fixed size of batches. Only `new` and the first batch in a slot, which grows the slot's task
/// list, allocate.
#[derive(Debug)]
pub struct BatchTable {
    batches: Box<[Batch]>,
    free: Vec<u16>,
    tasks_per_batch_max: u16,
}

#[derive(Debug)]
struct Batch {
    generation: u32,
    live: bool,
    slicer: Slicer,
    tasks: Vec<Task>,
    /// The first task that may still have something to cut.
    cursor: u16,
    /// The number of tasks that are not terminal.
    unfinished: u16,
    submitted: bool,
    canceled: Option<CancelReason>,
}

#[derive(Clone, Copy, Debug)]
struct Task {
    request: TransferRequest,
    /// The bytes that were cut and accepted so far; the next slice starts here.
    cut_bytes: u64,
    done_bytes: u64,
    /// The number of slices that were accepted, and so the number of the next slice.
    slices: u32,
    outstanding: u32,
    error: Option<Error>,
    fence_needed: bool,
    /// Whether no more slices are cut: the task failed or was cancelled.
    stopped: bool,
    terminal: bool,
}

impl BatchTable {
    /// A table of `batches_max` batches of at most `tasks_per_batch_max` requests each.
    ///
    /// # Panics
    /// When `batches_max` or `tasks_per_batch_max` is 0 or exceeds 65,535.
    #[must_use]
    pub fn new(batches_max: usize, tasks_per_batch_max: usize) -> Self {
        let batches_max = u16::try_from(batches_max).expect("batches_max fits 16 bits");
        let tasks_per_batch_max =
            u16::try_from(tasks_per_batch_max).expect("tasks_per_batch_max fits 16 bits");
        assert!(
            batches_max > 0 && tasks_per_batch_max > 0,
            "batches_max and tasks_per_batch_max are at least 1"
        );
        let batches = (0..batches_max)
            .map(|_| Batch {
                generation: 0,
                live: false,
                slicer: Slicer::default(),
                tasks: Vec::new(),
                cursor: 0,
                unfinished: 0,
                submitted: false,
                canceled: None,
            })
            .collect();
        Self { batches, free: (0..batches_max).rev().collect(), tasks_per_batch_max }
    }

    /// The number of batches that exist.
    #[must_use]
    pub fn live(&self) -> usize {
        self.batches.len() - self.free.len()
    }

    /// Creates a batch of `requests`, `Waiting`, to be cut by `slicer`. Requests of length 0 are complete
    /// from the start.
    ///
    /// # Errors
    /// `Full` when all slots are in use, `InvalidArgument` when there are no requests or more than a slot
    /// holds.
    pub fn create(
        &mut self,
        requests: impl ExactSizeIterator<Item = TransferRequest>,
        slicer: Slicer,
    ) -> Result<BatchHandle, Error> {
        let count = requests.len();
        if count == 0 || count > usize::from(self.tasks_per_batch_max) {
            return Err(Error::new(ErrorKind::InvalidArgument));
        }
        let index = self.free.pop().ok_or(Error::new(ErrorKind::Full))?;
        let batch = &mut self.batches[usize::from(index)];
        batch.live = true;
        batch.slicer = slicer;
        batch.cursor = 0;
        batch.submitted = false;
        batch.canceled = None;
        batch.unfinished = 0;
        batch.tasks.clear();
        batch.tasks.reserve(count);
        for request in requests {
            let terminal = request.len == 0;
            batch.unfinished += u16::from(!terminal);
            batch.tasks.push(Task {
                request,
                cut_bytes: 0,
                done_bytes: 0,
                slices: 0,
                outstanding: 0,
                error: None,
                fence_needed: false,
                stopped: false,
                terminal,
            });
        }
        Ok(BatchHandle { index, generation: batch.generation })
    }

    /// Cuts the next slices of the batch into `out` without accepting them, and returns their number. Until
    /// [`accepted`](Self::accepted) is called, the same slices come again.
    ///
    /// # Errors
    /// `Stale` when the handle was freed.
    #[inline]
    pub fn next(&self, handle: BatchHandle, out: &mut [Slice]) -> Result<usize, Error> {
        let batch = self.batch(handle)?;
        let mut filled = 0;
        for (task_index, task) in batch.tasks.iter().enumerate().skip(usize::from(batch.cursor)) {
            if task.stopped || task.terminal {
                continue;
            }
            let Some(room) = out.get_mut(filled..).filter(|room| !room.is_empty()) else { break };
            let TransferRequest { op, local, remote, len } = task.request;
            let (mut cut, mut number) = (task.cut_bytes, task.slices);
            for slot in room {
                if cut == len {
                    break;
                }
                let bytes = batch.slicer.cut(len - cut);
                *slot = Slice {
                    token: token(handle.index, task_index, number),
                    local: RegionOffset::new(local.region, local.offset.wrapping_add(cut)),
                    remote: RemoteOffset::new(remote.region, remote.offset.wrapping_add(cut)),
                    len: bytes,
                    op,
                };
                cut += u64::from(bytes);
                number += 1;
            }
            filled += (number - task.slices) as usize;
        }
        Ok(filled)
    }

    /// Records that a transport accepted these slices: a prefix of what [`next`](Self::next) returned.
    #[inline]
    pub fn accepted(&mut self, slices: &[Slice]) {
        // Slices of one request follow each other: they are counted together.
        let Some(mut first) = slices.first() else { return };
        let (mut count, mut bytes) = (0, 0);
        for slice in slices {
            if slice.token.0 as u32 != first.token.0 as u32 {
                self.book(first.token, count, bytes);
                (first, count, bytes) = (slice, 0, 0);
            }
            debug_assert_eq!(
                parts(slice.token).2,
                parts(first.token).2 + count,
                "slices are accepted in the order in which they were cut"
            );
            count += 1;
            bytes += u64::from(slice.len);
        }
        self.book(first.token, count, bytes);
    }

    /// Counts `count` accepted slices with `bytes` bytes together, the first of which is `first`.
    #[inline]
    fn book(&mut self, first: Token, count: u32, bytes: u64) {
        let (index, task_index, number) = parts(first);
        let batch = &mut self.batches[usize::from(index)];
        batch.submitted = true;
        let task = &mut batch.tasks[task_index];
        debug_assert_eq!(task.slices, number, "slices are accepted in the order in which they were cut");
        task.cut_bytes += bytes;
        task.slices += count;
        task.outstanding += count;
        if task.cut_bytes == task.request.len && usize::from(batch.cursor) == task_index {
            batch.cursor += 1;
        }
    }

    /// Records that `slice`, the first that [`next`](Self::next) returns, was refused for good: its task
    /// fails. Returns the batch when that made it terminal.
    pub fn refused(&mut self, slice: &Slice, error: Error) -> Option<BatchHandle> {
        let (index, task_index, _) = parts(slice.token);
        let batch = &mut self.batches[usize::from(index)];
        batch.submitted = true;
        let task = &mut batch.tasks[task_index];
        task.stopped = true;
        task.error.get_or_insert(error);
        batch.settle(task_index);
        batch.ended(index)
    }

    /// Records the end of a slice. Returns the batch when that made it terminal.
    #[inline]
    pub fn complete(&mut self, completion: &Completion) -> Option<BatchHandle> {
        let (index, task_index, number) = parts(completion.token);
        let batch = self.batches.get_mut(usize::from(index))?;
        let slicer = batch.slicer;
        let task = batch.tasks.get_mut(task_index)?;
        if !batch.live || task.outstanding == 0 {
            debug_assert!(false, "a completion without a slice (L1)");
            return None;
        }
        task.outstanding -= 1;
        task.fence_needed |= completion.fence_needed;
        match completion.result {
            Ok(()) => {
                // All slices but the last of a request have the slicer's length.
                let start = u64::from(number) * u64::from(slicer.slice_bytes());
                task.done_bytes += u64::from(slicer.cut(task.request.len - start));
            }
            Err(error) => {
                task.stopped = true;
                task.error.get_or_insert(error);
            }
        }
        if task.outstanding > 0 {
            return None;
        }
        batch.settle(task_index);
        batch.ended(index)
    }

    /// Ends a batch early: no more slices are cut. Slices in flight must still complete;
    /// [`is_of`](Self::is_of) identifies them for the transport's `cancel`. Returns the handle when the batch
    /// is terminal already.
    ///
    /// # Errors
    /// `Stale` when the handle was freed.
    pub fn cancel(
        &mut self,
        handle: BatchHandle,
        reason: CancelReason,
    ) -> Result<Option<BatchHandle>, Error> {
        let index = self.index(handle)?;
        let batch = &mut self.batches[index];
        if batch.unfinished == 0 {
            return Ok(Some(handle));
        }
        batch.canceled.get_or_insert(reason);
        for task_index in 0..batch.tasks.len() {
            batch.tasks[task_index].stopped = true;
            batch.settle(task_index);
        }
        Ok(batch.ended(handle.index))
    }

    /// Whether a slice with this token belongs to the batch. The caller cancels those slices in flight when
    /// it cancels a batch.
    #[must_use]
    pub fn is_of(&self, handle: BatchHandle, token: Token) -> bool {
        self.batch(handle).is_ok() && parts(token).0 == handle.index
    }

    /// The batch and the number of the request that a slice in flight was cut from; where in the request the
    /// slice begins, and its length, in bytes.
    #[must_use]
    pub fn find(&self, token: Token) -> Option<(BatchHandle, u16, (u64, u32))> {
        let (index, task_index, number) = parts(token);
        let batch = self.batches.get(usize::from(index)).filter(|batch| batch.live)?;
        let request = &batch.tasks.get(task_index)?.request;
        // All slices but the last of a request have the slicer's length.
        let start = u64::from(number) * u64::from(batch.slicer.slice_bytes());
        let len = batch.slicer.cut(request.len.checked_sub(start)?);
        Some((BatchHandle { index, generation: batch.generation }, task_index as u16, (start, len)))
    }

    /// The batch as a whole: the worst status of its requests, the sum of their bytes, the first error.
    ///
    /// # Errors
    /// `Stale` when the handle was freed.
    pub fn progress(&self, handle: BatchHandle) -> Result<Progress, Error> {
        let batch = self.batch(handle)?;
        let mut whole = Progress { status: batch.status(), bytes_done: 0, error: None, fence_needed: false };
        for task in &batch.tasks {
            whole.bytes_done += task.done_bytes;
            whole.error = whole.error.or(task.error);
            whole.fence_needed |= task.fence_needed;
        }
        Ok(whole)
    }

    /// Request number `task` of the batch.
    ///
    /// # Errors
    /// `Stale` when the handle was freed, `OutOfRange` when the batch has fewer requests.
    pub fn task_progress(&self, handle: BatchHandle, task: usize) -> Result<Progress, Error> {
        let batch = self.batch(handle)?;
        let task = batch.tasks.get(task).ok_or(Error::new(ErrorKind::OutOfRange))?;
        Ok(Progress {
            status: batch.task_status(task),
            bytes_done: task.done_bytes,
            error: task.error,
            fence_needed: task.fence_needed,
        })
    }

    /// Frees the slot. The handle is refused from now on.
    ///
    /// # Errors
    /// `Busy` while the batch is not terminal, `Stale` when it was freed already.
    pub fn free(&mut self, handle: BatchHandle) -> Result<(), Error> {
        let index = self.index(handle)?;
        let batch = &mut self.batches[index];
        if batch.unfinished > 0 {
            return Err(Error::new(ErrorKind::Busy));
        }
        batch.live = false;
        batch.generation = batch.generation.wrapping_add(1);
        self.free.push(handle.index);
        Ok(())
    }

    fn index(&self, handle: BatchHandle) -> Result<usize, Error> {
        self.batch(handle).map(|_| handle.index())
    }

    fn batch(&self, handle: BatchHandle) -> Result<&Batch, Error> {
        match self.batches.get(handle.index()) {
            Some(batch) if batch.live && batch.generation == handle.generation => Ok(batch),
            _ => Err(Error::new(ErrorKind::Stale)),
        }
    }
}

impl Batch {
    /// Marks a task terminal when none of its slices is in flight or still to be cut.
    fn settle(&mut self, task_index: usize) {
        let task = &mut self.tasks[task_index];
        let all_cut = task.stopped || task.cut_bytes == task.request.len;
        if !task.terminal && all_cut && task.outstanding == 0 {
            task.terminal = true;
            self.unfinished -= 1;
        }
    }

    fn ended(&self, index: u16) -> Option<BatchHandle> {
        if self.unfinished > 0 {
            return None;
        }
        Some(BatchHandle { index, generation: self.generation })
    }

    fn task_status(&self, task: &Task) -> Status {
        match (task.terminal, self.canceled, task.error) {
            (false, ..) if task.slices == 0 => Status::Waiting,
            (false, ..) => Status::Pending,
            (true, ..) if task.done_bytes == task.request.len => Status::Completed,
            (true, Some(CancelReason::Canceled), _) => Status::Canceled,
            (true, Some(CancelReason::TimedOut), _) => Status::TimedOut,
            (true, None, _) => Status::Failed,
        }
    }

    fn status(&self) -> Status {
        if self.unfinished > 0 {
            return if self.submitted { Status::Pending } else { Status::Waiting };
        }
        if self.tasks.iter().all(|task| task.done_bytes == task.request.len) {
            return Status::Completed;
        }
        match self.canceled {
            Some(CancelReason::Canceled) => Status::Canceled,
            Some(CancelReason::TimedOut) => Status::TimedOut,
            None => Status::Failed,
        }
    }
}

/// The slice number in the upper half, task and batch in the lower half: a token leads to its counters
/// without a search.
const fn token(batch: u16, task: usize, slice: u32) -> Token {
    debug_assert!(slice <= u32::MAX >> 1, "a token whose top bit is set belongs to a fence");
    Token((slice as u64) << 32 | (task as u64 & 0xffff) << 16 | batch as u64)
}

const fn parts(token: Token) -> (u16, usize, u32) {
    (token.0 as u16, (token.0 >> 16) as usize & 0xffff, (token.0 >> 32) as u32)
}
