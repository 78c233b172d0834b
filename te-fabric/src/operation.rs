//! Accepted slices: a slab of fixed size whose entries are linked into queues, and completions that `poll`
//! has not returned yet.

use std::collections::VecDeque;

use te_core::{Completion, Error, Op, Slice, Token};

const NONE: u32 = u32::MAX;

/// One accepted slice. `X` holds what one fabric alone needs.
#[derive(Clone, Copy, Debug)]
pub struct Operation<X> {
    /// The caller's name for the slice.
    pub token: Token,
    /// The direction of the slice.
    pub op: Op,
    /// The length of the slice, in bytes.
    pub len: u32,
    /// The index of the local region.
    pub region: u32,
    /// The index of the remote region.
    pub remote_region: u32,
    /// The index of the peer that owns the remote region.
    pub peer: u32,
    /// Where the slice begins in the remote region, in bytes.
    pub remote_offset: u64,
    /// The number of bytes that were handed to the wire in the current try.
    pub issued: u32,
    /// The number of pieces that were handed to the wire and have not ended.
    pub open: u32,
    /// The first error that is final.
    pub error: Option<Error>,
    /// What one fabric alone needs.
    pub ext: X,
    queued: bool,
}

impl<X> Operation<X> {
    /// The operation for a slice whose remote region belongs to `peer`.
    #[inline]
    #[must_use]
    pub const fn new(slice: &Slice, peer: u32, ext: X) -> Self {
        Self {
            token: slice.token,
            op: slice.op,
            len: slice.len,
            region: slice.local.region.index,
            remote_region: slice.remote.region.index,
            peer,
            remote_offset: slice.remote.offset,
            issued: 0,
            open: 0,
            error: None,
            ext,
            queued: false,
        }
    }

    /// Whether the operation is in a queue.
    #[inline]
    #[must_use]
    pub const fn is_queued(&self) -> bool {
        self.queued
    }

    /// The completion of this operation. `remote` counts for a WRITE alone: a READ changes no remote bytes.
    #[inline]
    #[must_use]
    pub fn completion(&self, remote: RemoteBytes) -> Completion {
        let remote = if self.op == Op::Write { remote } else { RemoteBytes::Untouched };
        match (self.error, remote) {
            (None, _) => {
                Completion { fence_needed: remote == RemoteBytes::InDoubt, ..Completion::applied(self.token) }
            }
            (Some(error), RemoteBytes::Untouched) => Completion::not_applied(self.token, error),
            (Some(error), _) => Completion::unknown(self.token, error),
        }
    }
}

/// What is known about the remote bytes of a WRITE when its operation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteBytes {
    /// None of them changed, and none will.
    Untouched,
    /// Some or all of them are written, and no more will change.
    Written,
    /// Some of them may still change. The caller has to fence the range even when the WRITE was applied.
    InDoubt,
}

#[derive(Clone, Copy, Debug)]
struct Slot<X> {
    operation: Option<Operation<X>>,
    previous: u32,
    next: u32,
}

/// A queue of operations, linked through the slab.
#[derive(Clone, Copy, Debug)]
pub struct Queue {
    head: u32,
    tail: u32,
}

impl Queue {
    /// An empty queue.
    #[must_use]
    pub const fn new() -> Self {
        Self { head: NONE, tail: NONE }
    }

    /// The slot at the front of the queue.
    #[inline]
    #[must_use]
    pub const fn first(&self) -> Option<u32> {
        if self.head == NONE { None } else { Some(self.head) }
    }

    /// Whether the queue is empty.
    #[inline]
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.head == NONE
    }
}

impl Default for Queue {
    fn default() -> Self {
        Self::new()
    }
}

/// All accepted slices, and the completions that `poll` has not returned yet. Nothing here allocates after
/// `new`.
#[derive(Debug)]
pub struct Operations<X> {
    slots: Box<[Slot<X>]>,
    free: u32,
    free_count: usize,
    done: VecDeque<Completion>,
}

impl<X: Copy> Operations<X> {
    /// Room for `inflight_max` slices, and for the completions of as many slices and `fences_max` fences.
    #[must_use]
    pub fn new(inflight_max: u32, fences_max: u32) -> Self {
        let mut slots = vec![Slot { operation: None, previous: NONE, next: NONE }; inflight_max as usize];
        for (i, slot) in slots.iter_mut().enumerate() {
            slot.next = if i as u32 + 1 == inflight_max { NONE } else { i as u32 + 1 };
        }
        Self {
            slots: slots.into(),
            free: if inflight_max == 0 { NONE } else { 0 },
            free_count: inflight_max as usize,
            done: VecDeque::with_capacity((inflight_max + fences_max) as usize),
        }
    }

    /// The number of slices that can be accepted now. A completion that was not fetched counts as in flight.
    #[inline]
    #[must_use]
    pub fn room(&self) -> usize {
        self.free_count.saturating_sub(self.done.len())
    }

    /// The number of slots in use.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len() - self.free_count
    }

    /// Whether no slot is in use.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The slot behind `slot` in its queue.
    #[inline]
    #[must_use]
    pub fn after(&self, slot: u32) -> Option<u32> {
        let next = self.slots.get(slot as usize)?.next;
        (next != NONE).then_some(next)
    }

    /// The operation in `slot`.
    #[inline]
    #[must_use]
    pub fn get(&self, slot: u32) -> Option<&Operation<X>> {
        self.slots.get(slot as usize)?.operation.as_ref()
    }

    /// The operation in `slot`.
    #[inline]
    pub fn get_mut(&mut self, slot: u32) -> Option<&mut Operation<X>> {
        self.slots.get_mut(slot as usize)?.operation.as_mut()
    }

    /// The first slot whose operation satisfies `is`. Looks at every slot: only `cancel` needs it, which is
    /// rare.
    #[must_use]
    pub fn position(&self, is: impl Fn(&Operation<X>) -> bool) -> Option<u32> {
        self.slots.iter().position(|slot| slot.operation.as_ref().is_some_and(&is)).map(|at| at as u32)
    }

    /// Stores an operation; returns its slot, or `None` when all slots are in use.
    #[inline]
    pub fn insert(&mut self, operation: Operation<X>) -> Option<u32> {
        let slot = self.free;
        let entry = self.slots.get_mut(slot as usize)?;
        self.free = entry.next;
        *entry = Slot { operation: Some(operation), previous: NONE, next: NONE };
        self.free_count -= 1;
        Some(slot)
    }

    /// Frees a slot and returns its operation, which must not be in a queue.
    #[inline]
    pub fn remove(&mut self, slot: u32) -> Option<Operation<X>> {
        let entry = self.slots.get_mut(slot as usize)?;
        let operation = entry.operation?;
        debug_assert!(!operation.queued, "a queue still refers to the slot");
        *entry = Slot { operation: None, previous: NONE, next: self.free };
        self.free = slot;
        self.free_count += 1;
        Some(operation)
    }

    /// Appends an operation, which is in no queue, to `queue`.
    #[inline]
    pub fn push_back(&mut self, queue: &mut Queue, slot: u32) {
        let last = queue.tail;
        self.link(slot, last, NONE);
        queue.tail = slot;
        match self.slots.get_mut(last as usize) {
            Some(before) => before.next = slot,
            None => queue.head = slot,
        }
    }

    /// Puts an operation, which is in no queue, at the front of `queue`.
    #[inline]
    pub fn push_front(&mut self, queue: &mut Queue, slot: u32) {
        let first = queue.head;
        self.link(slot, NONE, first);
        queue.head = slot;
        match self.slots.get_mut(first as usize) {
            Some(after) => after.previous = slot,
            None => queue.tail = slot,
        }
    }

    /// Takes an operation out of `queue`. Does nothing when the operation is in no queue; it must not be in
    /// another queue.
    #[inline]
    pub fn unlink(&mut self, queue: &mut Queue, slot: u32) {
        let Some(entry) = self.slots.get_mut(slot as usize) else { return };
        let Some(operation) = entry.operation.as_mut().filter(|operation| operation.queued) else { return };
        operation.queued = false;
        let (previous, next) = (entry.previous, entry.next);
        match self.slots.get_mut(previous as usize) {
            Some(before) => before.next = next,
            None => queue.head = next,
        }
        match self.slots.get_mut(next as usize) {
            Some(after) => after.previous = previous,
            None => queue.tail = previous,
        }
    }

    /// Queues a completion for the caller.
    #[inline]
    pub fn complete(&mut self, completion: Completion) {
        self.done.push_back(completion);
    }

    /// Whether there are completions to fetch.
    #[inline]
    #[must_use]
    pub fn has_completions(&self) -> bool {
        !self.done.is_empty()
    }

    /// Whether there is a completion of `token` to fetch.
    #[must_use]
    pub fn is_completed(&self, token: Token) -> bool {
        self.done.iter().any(|completion| completion.token == token)
    }

    /// Moves completions to `out`, oldest first, and returns their number.
    #[inline]
    pub fn fetch(&mut self, out: &mut [Completion]) -> usize {
        let count = self.done.len().min(out.len());
        for (to, completion) in out.iter_mut().zip(self.done.drain(..count)) {
            *to = completion;
        }
        count
    }

    fn link(&mut self, slot: u32, previous: u32, next: u32) {
        if let Some(entry) = self.slots.get_mut(slot as usize) {
            (entry.previous, entry.next) = (previous, next);
            if let Some(operation) = &mut entry.operation {
                debug_assert!(!operation.queued, "it would be in two queues");
                operation.queued = true;
            }
        }
    }
}

/// Accepts slices of `batch` in order until one is refused or `room` is used up, and returns their number. A
/// refusal of the first slice is returned as the error; that of a later slice is not, because the caller
/// submits that slice again.
///
/// # Errors
/// What `accept` returned for the first slice.
#[inline]
pub fn accept_prefix(
    batch: &[Slice],
    room: usize,
    mut accept: impl FnMut(&Slice) -> Result<(), Error>,
) -> Result<usize, Error> {
    let mut accepted = 0;
    for slice in batch.iter().take(room) {
        match accept(slice) {
            Ok(()) => accepted += 1,
            Err(error) if accepted == 0 => return Err(error),
            Err(_) => break,
        }
    }
    Ok(accepted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use te_core::{ErrorKind, RegionId, RegionOffset, RemoteOffset, RemoteRegionId};

    fn slice(token: u64) -> Slice {
        let (local, remote) =
            (RegionOffset::new(RegionId::new(0, 1), 0), RemoteOffset::new(RemoteRegionId::new(0, 1), 0));
        Slice { token: Token(token), local, remote, len: 1, op: Op::Write }
    }

    fn operation(token: u64) -> Operation<()> {
        Operation::new(&slice(token), 0, ())
    }

    #[test]
    fn operations_leave_a_queue_from_any_place_and_come_back_at_its_front() {
        let mut all = Operations::new(4, 1);
        let mut queue = Queue::new();
        let slots: Vec<u32> = (0..4).filter_map(|token| all.insert(operation(token))).collect();
        assert!(all.insert(operation(9)).is_none() && all.room() == 0);
        slots.iter().for_each(|&slot| all.push_back(&mut queue, slot));
        all.unlink(&mut queue, slots[1]);
        all.unlink(&mut queue, slots[1]);
        all.unlink(&mut queue, slots[3]);
        all.push_front(&mut queue, slots[3]);
        let mut order = Vec::new();
        while let Some(slot) = queue.first() {
            all.unlink(&mut queue, slot);
            order.push(slot);
        }
        assert_eq!(order, [slots[3], slots[0], slots[2]]);
        assert!(queue.is_empty() && all.position(|of| of.token == Token(1)) == Some(slots[1]));
        assert!(all.remove(slots[1]).is_some() && all.remove(slots[1]).is_none() && all.len() == 3);
    }

    #[test]
    fn a_completion_states_what_is_known() {
        let error = Error::new(ErrorKind::Rail);
        let write = operation(1);
        let failed = Operation { error: Some(error), ..write };
        assert_eq!(write.completion(RemoteBytes::Written), Completion::applied(Token(1)));
        let applied = write.completion(RemoteBytes::InDoubt);
        assert!(applied.fence_needed && applied.result.is_ok());
        assert_eq!(failed.completion(RemoteBytes::InDoubt), Completion::unknown(Token(1), error));
        assert_eq!(failed.completion(RemoteBytes::Written), Completion::unknown(Token(1), error));
        assert_eq!(failed.completion(RemoteBytes::Untouched), Completion::not_applied(Token(1), error));
        let read = Operation { op: Op::Read, ..failed };
        assert_eq!(read.completion(RemoteBytes::InDoubt), Completion::not_applied(Token(1), error));
    }

    #[test]
    fn completions_that_were_not_fetched_take_up_room() {
        let mut all = Operations::new(2, 1);
        let slot = all.insert(operation(1)).expect("an empty slab");
        all.remove(slot);
        all.complete(Completion::applied(Token(1)));
        assert!(all.room() == 1 && all.has_completions() && all.is_completed(Token(1)));
        let mut out = [Completion::applied(Token(0)); 2];
        assert_eq!((all.fetch(&mut out), out[0].token, all.room()), (1, Token(1), 2));
        assert!(!all.is_completed(Token(1)) && all.fetch(&mut out) == 0);
    }

    #[test]
    fn a_prefix_is_accepted_and_only_the_first_refusal_is_an_error() {
        let batch = [slice(1), slice(2), slice(3)];
        let refuse = |at: u64| {
            move |slice: &Slice| if slice.token.0 == at { Err(ErrorKind::Full.into()) } else { Ok(()) }
        };
        assert_eq!(accept_prefix(&batch, 8, refuse(9)), Ok(3));
        assert_eq!(accept_prefix(&batch, 2, refuse(3)), Ok(2));
        assert_eq!(accept_prefix(&batch, 8, refuse(3)), Ok(2));
        assert_eq!(accept_prefix(&batch, 8, refuse(1)), Err(ErrorKind::Full.into()));
    }
}
