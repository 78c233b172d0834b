//! Accepted slices: a slab of fixed size, threaded into queues.

use std::collections::VecDeque;

use te_core::{Completion, Error, Instant, Op, Token};

const NONE: u32 = u32::MAX;

/// One accepted slice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operation {
    pub(crate) token: Token,
    pub(crate) op: Op,
    pub(crate) len: u32,
    /// Offset into the local region.
    pub(crate) local_offset: u64,
    pub(crate) region: u32,
    pub(crate) segment: u32,
    pub(crate) endpoint: u32,
    pub(crate) remote_offset: u64,
    /// Bytes that are in posted work requests, of this attempt.
    pub(crate) issued: u32,
    /// Pieces in posted work requests that have not ended.
    pub(crate) open: u32,
    /// The first thing that went wrong for good.
    pub(crate) error: Option<Error>,
    /// Some piece of a WRITE is in place.
    pub(crate) landed: bool,
    /// Some piece of a WRITE ended without anybody knowing whether it will land.
    pub(crate) doubtful: bool,
    /// Swept out by somebody else's failure: to be sent again when its last piece has ended.
    pub(crate) again: bool,
    /// The caller wants it to end: by itself until then.
    pub(crate) canceled: Option<Instant>,
    pub(crate) replays: u8,
    /// In a queue.
    pub(crate) queued: bool,
    /// That queue is its segment's: it waits for keys.
    pub(crate) waiting: bool,
}

impl Operation {
    /// How it ended.
    pub(crate) fn completion(&self) -> Completion {
        let write = self.op == Op::Write;
        match self.error {
            None => {
                let fence_needed = write && self.doubtful;
                Completion { fence_needed, ..Completion::applied(self.token) }
            }
            Some(error) if write && (self.landed || self.doubtful) => Completion::unknown(self.token, error),
            Some(error) => Completion::not_applied(self.token, error),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    operation: Option<Operation>,
    previous: u32,
    next: u32,
}

/// A queue of operations, threaded through the slab.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Queue {
    head: u32,
    tail: u32,
}

impl Queue {
    pub(crate) const fn new() -> Self {
        Self { head: NONE, tail: NONE }
    }

    pub(crate) const fn first(&self) -> Option<u32> {
        if self.head == NONE { None } else { Some(self.head) }
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.head == NONE
    }
}

/// All accepted slices, and the completions that wait for `poll`.
#[derive(Debug)]
pub(crate) struct Operations {
    slots: Box<[Slot]>,
    free: u32,
    free_count: usize,
    pub(crate) done: VecDeque<Completion>,
}

impl Operations {
    pub(crate) fn new(inflight_max: u32, fences_max: u32) -> Self {
        let mut slots = vec![Slot { operation: None, previous: NONE, next: NONE }; inflight_max as usize];
        for (i, slot) in slots.iter_mut().enumerate() {
            slot.next = if i as u32 + 1 == inflight_max { NONE } else { i as u32 + 1 };
        }
        Self {
            slots: slots.into(),
            free: 0,
            free_count: inflight_max as usize,
            done: VecDeque::with_capacity((inflight_max + fences_max) as usize),
        }
    }

    /// Slices that can be accepted now. Completions that nobody has fetched count as in flight.
    pub(crate) fn room(&self) -> usize {
        self.free_count.saturating_sub(self.done.len())
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free_count
    }

    pub(crate) fn get(&self, slot: u32) -> Option<&Operation> {
        self.slots.get(slot as usize)?.operation.as_ref()
    }

    pub(crate) fn get_mut(&mut self, slot: u32) -> Option<&mut Operation> {
        self.slots.get_mut(slot as usize)?.operation.as_mut()
    }

    /// The slice in flight that has this token. Looks at every slot: cancelling is rare.
    pub(crate) fn find(&self, token: Token) -> Option<u32> {
        let is = |slot: &Slot| slot.operation.as_ref().is_some_and(|op| op.token == token);
        self.slots.iter().position(is).map(|at| at as u32)
    }

    pub(crate) fn insert(&mut self, operation: Operation) -> Option<u32> {
        let slot = self.free;
        let entry = self.slots.get_mut(slot as usize)?;
        self.free = entry.next;
        *entry = Slot { operation: Some(operation), previous: NONE, next: NONE };
        self.free_count -= 1;
        Some(slot)
    }

    pub(crate) fn remove(&mut self, slot: u32) -> Option<Operation> {
        let entry = self.slots.get_mut(slot as usize)?;
        let operation = entry.operation?;
        *entry = Slot { operation: None, previous: NONE, next: self.free };
        self.free = slot;
        self.free_count += 1;
        Some(operation)
    }

    pub(crate) fn push_back(&mut self, queue: &mut Queue, slot: u32) {
        let last = queue.tail;
        self.link(slot, last, NONE);
        queue.tail = slot;
        match self.slots.get_mut(last as usize) {
            Some(before) => before.next = slot,
            None => queue.head = slot,
        }
    }

    pub(crate) fn push_front(&mut self, queue: &mut Queue, slot: u32) {
        let first = queue.head;
        self.link(slot, NONE, first);
        queue.head = slot;
        match self.slots.get_mut(first as usize) {
            Some(after) => after.previous = slot,
            None => queue.tail = slot,
        }
    }

    /// Takes an operation out of `queue`, if it is in it.
    pub(crate) fn unlink(&mut self, queue: &mut Queue, slot: u32) {
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

    fn link(&mut self, slot: u32, previous: u32, next: u32) {
        if let Some(entry) = self.slots.get_mut(slot as usize) {
            (entry.previous, entry.next) = (previous, next);
            if let Some(operation) = &mut entry.operation {
                operation.queued = true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operation(token: u64) -> Operation {
        Operation {
            token: Token(token),
            op: Op::Write,
            len: 1,
            local_offset: 0,
            region: 0,
            segment: 0,
            endpoint: 0,
            remote_offset: 0,
            issued: 0,
            open: 0,
            error: None,
            landed: false,
            doubtful: false,
            again: false,
            canceled: None,
            replays: 0,
            queued: false,
            waiting: false,
        }
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
        assert!(queue.is_empty() && all.find(Token(1)) == Some(slots[1]));
        assert!(all.remove(slots[1]).is_some() && all.remove(slots[1]).is_none() && all.len() == 3);
    }

    #[test]
    fn an_end_says_what_is_known() {
        let error = Error::new(te_core::ErrorKind::Rail);
        let write = operation(1);
        assert_eq!(write.completion(), Completion::applied(Token(1)));
        let twice = Operation { doubtful: true, ..write };
        assert!(twice.completion().fence_needed && twice.completion().result.is_ok());
        let lost = Operation { error: Some(error), doubtful: true, ..write };
        assert_eq!(lost.completion(), Completion::unknown(Token(1), error));
        let half = Operation { error: Some(error), landed: true, ..write };
        assert_eq!(half.completion(), Completion::unknown(Token(1), error));
        let never = Operation { error: Some(error), ..write };
        assert_eq!(never.completion(), Completion::not_applied(Token(1), error));
        let read = Operation { op: Op::Read, doubtful: true, ..lost };
        assert_eq!(read.completion(), Completion::not_applied(Token(1), error));
    }
}
