//! What is kept of a slice in flight.

use crate::{Instant, Slice, Token};

/// A slot's generation has 31 bits: a child's token of a slice is never one of a fence ([`Token::of_fence`]).
const GENERATION: u32 = u32::MAX >> 1;

/// Below the generation in a slot's phase: the rail, and these.
const RAIL: u64 = 0xff;
const FREE: u64 = 1 << 8;
const QUEUED: u64 = 1 << 9;
const STRAY: u64 = 1 << 10;
const CANCELED: u64 = 1 << 11;
const AGAIN: u64 = 1 << 12;

/// One slice in flight. 80 bytes.
#[derive(Clone, Copy)]
pub(super) struct Slot {
    /// As the caller gave it, under the caller's token.
    pub(super) slice: Slice,
    pub(super) accepted_at: Instant,
    /// Bytes in flight on the rail when it was accepted, its own included.
    pub(super) bytes_ahead: u64,
    /// Generation in the upper half; rail and flags in the lower one. So one comparison tells whether a completion is the
    /// ordinary end of what its rail was given.
    phase: u64,
    /// The next free slot, or the next in the retry queue.
    pub(super) next: u32,
    /// Rails that failed, as a mask.
    pub(super) tried: u32,
}

impl Slot {
    /// One that is free.
    pub(super) const fn new(slice: Slice, next: u32) -> Self {
        Self { slice, accepted_at: Instant::ZERO, bytes_ahead: 0, phase: FREE, next, tried: 0 }
    }

    /// Takes a slice for `rail`; gives the token for the child.
    #[inline]
    pub(super) fn take(&mut self, index: u32, slice: &Slice, rail: usize, now: Instant) -> Token {
        self.slice = *slice;
        self.accepted_at = now;
        self.tried = 0;
        self.phase = self.phase & !u64::from(u32::MAX) | rail as u64;
        self.child_token(index)
    }

    /// The slice is over.
    #[inline]
    pub(super) fn free(&mut self, next: u32) {
        let generation = self.generation().wrapping_add(1) & GENERATION;
        self.phase = u64::from(generation) << 32 | FREE;
        self.next = next;
    }

    /// Whether `child`, a completion's token, ends what `rail` was given, and nothing special has happened before.
    #[inline]
    pub(super) const fn is_plain(&self, child: Token, rail: usize) -> bool {
        self.phase == child.0 & !(u32::MAX as u64) | rail as u64
    }

    /// Whether `child` ends what `rail` was given, whatever happened before.
    pub(super) const fn is_posted(&self, child: Token, rail: usize) -> bool {
        self.phase & !(STRAY | CANCELED | AGAIN) == child.0 & !(u32::MAX as u64) | rail as u64
    }

    pub(super) const fn is_free(&self) -> bool {
        self.phase & FREE != 0
    }

    /// Waits for a rail.
    pub(super) const fn is_queued(&self) -> bool {
        self.phase & QUEUED != 0
    }

    /// The caller wants it to end.
    pub(super) const fn is_canceled(&self) -> bool {
        self.phase & CANCELED != 0
    }

    /// An earlier attempt ended `Unknown`.
    pub(super) const fn is_stray(&self) -> bool {
        self.phase & STRAY != 0
    }

    /// All rails have failed it once, and are asked once more.
    pub(super) const fn is_again(&self) -> bool {
        self.phase & AGAIN != 0
    }

    pub(super) const fn rail(&self) -> usize {
        (self.phase & RAIL) as usize
    }

    const fn generation(&self) -> u32 {
        (self.phase >> 32) as u32
    }

    #[inline]
    pub(super) const fn child_token(&self, index: u32) -> Token {
        Token(self.phase & !(u32::MAX as u64) | index as u64)
    }

    /// Out of the queue, onto a rail.
    pub(super) fn repost(&mut self, rail: usize, now: Instant) {
        self.phase = self.phase & !(RAIL | QUEUED) | rail as u64;
        self.accepted_at = now;
    }

    pub(super) fn queue(&mut self, next: u32) {
        self.phase |= QUEUED;
        self.next = next;
    }

    pub(super) fn cancel(&mut self) {
        self.phase |= CANCELED;
    }

    /// No rail counts as tried any more, for once.
    pub(super) fn try_again(&mut self) {
        self.phase |= AGAIN;
        self.tried = 0;
    }

    pub(super) fn stray(&mut self) {
        self.phase |= STRAY;
    }
}

/// Which slot a child's token names.
#[inline]
pub(super) const fn slot_of(child: Token) -> usize {
    child.0 as u32 as usize
}
