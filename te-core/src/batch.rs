//! Batches of requests: handles, per-task counters, and the six statuses.
//!
//! ```text
//!   create(requests) ──► Waiting ──accepted()───► Pending ──every slice completed──► Completed
//!                            │                       │                               Failed
//!                            └──── cancel(reason) ───┴──► drains, then ────────────► Canceled / TimedOut
//! ```
//!
//! A batch is terminal only when each of its accepted slices has completed, whatever failed first: memory of a terminal
//! batch is the caller's again (L2). Slices are cut on demand by [`BatchTable::next`], never kept as a list.

use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::{
    Completion, Error, ErrorKind, RegionOffset, RemoteOffset, Slice, Slicer, Token, TransferRequest,
};

/// Names a batch: slot and generation, never a pointer. A freed batch's handle is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchHandle {
    index: u16,
    generation: u32,
}

impl BatchHandle {
    /// Which slot of the table; less than the table's `batches_max`.
    #[must_use]
    pub const fn index(self) -> usize {
        self.index as usize
    }
}

/// How far a batch or task is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Status {
    /// Nothing submitted yet.
    Waiting,
    /// At least one slice submitted, not all ended.
    Pending,
    /// Every byte is in place.
    Completed,
    /// At least one slice failed; all have ended.
    Failed,
    /// Ended by its deadline; all slices have ended.
    TimedOut,
    /// Ended by the caller; all slices have ended.
    Canceled,
}

impl Status {
    /// Whether it is over: no memory of the batch will be touched any more.
    #[must_use]
    pub const fn is_terminal(self) -> bool {
        !matches!(self, Self::Waiting | Self::Pending)
    }
}

/// Why a batch is being ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelReason {
    /// The caller wants it to end.
    Canceled,
    /// Its deadline passed.
    TimedOut,
}

/// What is known about one request of a batch, or a batch as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// How far it is.
    pub status: Status,
    /// Bytes known to be in place.
    pub bytes_done: u64,
    /// The first error, if any.
    pub error: Option<Error>,
    /// Some WRITE's bytes may still land at the target: fence before the range gets other bytes (L5).
    pub fence_needed: bool,
}

/// Fixed-size table of batches. Creating a batch may grow a slot's task list the first time; nothing else allocates.
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
    /// First task that may still have something to cut.
    cursor: u16,
    /// Tasks that are not terminal.
    unfinished: u16,
    submitted: bool,
    canceled: Option<CancelReason>,
}

#[derive(Clone, Copy, Debug)]
struct Task {
    request: TransferRequest,
    /// Bytes cut and accepted so far; the next slice starts here.
    cut_bytes: u64,
    done_bytes: u64,
    /// Slices accepted; the next slice's number.
    slices: u32,
    outstanding: u32,
    error: Option<Error>,
    fence_needed: bool,
    /// No more cuts: failed or cancelled.
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
        assert!(batches_max > 0 && tasks_per_batch_max > 0, "a table of nothing");
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

    /// Batches that exist.
    #[must_use]
    pub fn live(&self) -> usize {
        self.batches.len() - self.free.len()
    }

    /// A new batch of `requests`, `Waiting`, to be cut by `slicer`. Requests of length 0 are complete from the start.
    ///
    /// # Errors
    /// `Full` when the table is, `InvalidArgument` for no requests or too many.
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

    /// Cuts the next slices of the batch into `out` without accepting them; gives how many. The same slices come again
    /// until [`accepted`](Self::accepted) says otherwise.
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

    /// Records that a transport accepted these slices: a prefix of what [`next`](Self::next) gave.
    #[inline]
    pub fn accepted(&mut self, slices: &[Slice]) {
        // Slices of one request follow each other: they are booked together.
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
                "slices are accepted in the order of their cutting"
            );
            count += 1;
            bytes += u64::from(slice.len);
        }
        self.book(first.token, count, bytes);
    }

    /// Books `count` slices that were accepted, of `bytes` together, the first of which is `first`.
    #[inline]
    fn book(&mut self, first: Token, count: u32, bytes: u64) {
        let (index, task_index, number) = parts(first);
        let batch = &mut self.batches[usize::from(index)];
        batch.submitted = true;
        let task = &mut batch.tasks[task_index];
        debug_assert_eq!(task.slices, number, "slices are accepted in the order of their cutting");
        task.cut_bytes += bytes;
        task.slices += count;
        task.outstanding += count;
        if task.cut_bytes == task.request.len && usize::from(batch.cursor) == task_index {
            batch.cursor += 1;
        }
    }

    /// Records that `slice`, the first that [`next`](Self::next) gives, was refused for good: its task fails.
    /// Gives the batch when that made it terminal.
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

    /// Records the end of a slice. Gives the batch when that made it terminal.
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

    /// Ends a batch early: nothing more is cut. Slices in flight must still complete; [`is_of`](Self::is_of) tells
    /// which they are, for the transport's `cancel`. Gives the handle when the batch is terminal already.
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

    /// Whether a slice with this token belongs to the batch: what to ask of each slice in flight when a batch is cancelled.
    #[must_use]
    pub fn is_of(&self, handle: BatchHandle, token: Token) -> bool {
        self.batch(handle).is_ok() && parts(token).0 == handle.index
    }

    /// The batch and the number of the request that a slice in flight was cut from; and where in it the slice begins, and how
    /// long it is, bytes.
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

    /// Gives the slot back. The handle is refused from here on.
    ///
    /// # Errors
    /// `Busy` while the batch is not terminal, `Stale` when it was freed before.
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
    /// Marks a task terminal when nothing of it is outstanding or to come.
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

/// Slice number above, task and batch below: a token finds its counters without a search.
const fn token(batch: u16, task: usize, slice: u32) -> Token {
    debug_assert!(slice <= u32::MAX >> 1, "a token with the bit above is a fence's");
    Token((slice as u64) << 32 | (task as u64 & 0xffff) << 16 | batch as u64)
}

const fn parts(token: Token) -> (u16, usize, u32) {
    (token.0 as u16, (token.0 >> 16) as usize & 0xffff, (token.0 >> 32) as u32)
}
