//! Accepted slices: a slab of fixed size, threaded into the queues of their peers.

use std::collections::VecDeque;

use te_core::{Completion, Error, Op, Token};

use crate::sys::Pinned;

const NONE: u32 = u32::MAX;

/// One accepted slice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operation {
    pub(crate) token: Token,
    pub(crate) op: Op,
    pub(crate) len: u32,
    pub(crate) local: Pinned,
    pub(crate) region: u32,
    pub(crate) segment: u32,
    pub(crate) peer: u32,
    pub(crate) remote_offset: u64,
    /// Bytes that have been put into frames.
    pub(crate) issued: u32,
    /// Pieces in frames that have no answer yet.
    pub(crate) open: u32,
    /// The first thing that went wrong.
    pub(crate) error: Option<Error>,
    /// Some piece of a WRITE is in place, or may be.
    pub(crate) touched: bool,
    /// Not yet completed. A slice that is cancelled stays as a ghost until its last piece is answered.
    pub(crate) live: bool,
    /// In its peer's queue.
    pub(crate) queued: bool,
}

impl Operation {
    /// How it ended.
    pub(crate) fn completion(&self) -> Completion {
        match self.error {
            None => Completion::applied(self.token),
            Some(error) if self.op == Op::Write && self.touched => Completion::unknown(self.token, error),
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
        let is = |slot: &Slot| slot.operation.as_ref().is_some_and(|op| op.live && op.token == token);
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

    pub(crate) fn remove(&mut self, slot: u32) {
        if let Some(entry) = self.slots.get_mut(slot as usize)
            && entry.operation.is_some()
        {
            *entry = Slot { operation: None, previous: NONE, next: self.free };
            self.free = slot;
            self.free_count += 1;
        }
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
