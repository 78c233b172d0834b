//! The entry of a slice in flight.

use crate::{Instant, Slice, Token};

/// The generation of a slot has 31 bits, so that a child's token of a slice never looks like one of a fence
/// ([`Token::of_fence`]).
const GENERATION: u32 = u32::MAX >> 1;

/// The lower half of a slot's phase: the rail, and these flags.
const RAIL: u64 = 0xff;
const FREE: u64 = 1 << 8;
const QUEUED: u64 = 1 << 9;
const STRAY: u64 = 1 << 10;
const CANCELED: u64 = 1 << 11;
const AGAIN: u64 = 1 << 12;

/// One slice in flight. 80 bytes.
#[derive(Clone, Copy)]
pub(super) struct Slot {
    /// The slice as the caller submitted it, under the caller's token.
    pub(super) slice: Slice,
    pub(super) accepted_at: Instant,
    /// The bytes in flight on the rail when the slice was accepted, its own included.
    pub(super) bytes_ahead: u64,
    /// The generation in the upper half; rail and flags in the lower half. One comparison therefore shows
    /// whether a completion is the ordinary end of a slice on its rail.
    phase: u64,
    /// The next free slot, or the next in the retry queue.
    pub(super) next: u32,
    /// The rails that failed it, as a mask.
    pub(super) tried: u32,
}

impl Slot {
    /// A slot that is free.
    pub(super) const fn new(slice: Slice, next: u32) -> Self {
        Self { slice, accepted_at: Instant::ZERO, bytes_ahead: 0, phase: FREE, next, tried: 0 }
    }

    /// Fills the slot with a slice for `rail`; returns the token for the child.
    #[inline]
    pub(super) fn take(&mut self, index: u32, slice: &Slice, rail: usize, now: Instant) -> Token {
        self.slice = *slice;
        self.accepted_at = now;
        self.tried = 0;
        self.phase = self.phase & !u64::from(u32::MAX) | rail as u64;
        self.child_token(index)
    }

    /// Frees the slot.
    #[inline]
    pub(super) fn free(&mut self, next: u32) {
        let generation = self.generation().wrapping_add(1) & GENERATION;
        self.phase = u64::from(generation) << 32 | FREE;
        self.next = next;
    }

    /// Whether `child`, the token of a completion, ends the try on `rail`, with no flag set.
    #[inline]
    pub(super) const fn is_plain(&self, child: Token, rail: usize) -> bool {
        self.phase == child.0 & !(u32::MAX as u64) | rail as u64
    }

    /// Whether `child` ends the try on `rail`, with any flags.
    pub(super) const fn is_posted(&self, child: Token, rail: usize) -> bool {
        self.phase & !(STRAY | CANCELED | AGAIN) == child.0 & !(u32::MAX as u64) | rail as u64
    }

    pub(super) const fn is_free(&self) -> bool {
        self.phase & FREE != 0
    }

    /// Whether it waits for a rail.
    pub(super) const fn is_queued(&self) -> bool {
        self.phase & QUEUED != 0
    }

    /// Whether the caller has cancelled it.
    pub(super) const fn is_canceled(&self) -> bool {
        self.phase & CANCELED != 0
    }

    /// Whether an earlier try ended `Unknown`.
    pub(super) const fn is_stray(&self) -> bool {
        self.phase & STRAY != 0
    }

    /// Whether all rails have failed it once, and are tried once more.
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

    /// Takes it from the queue onto a rail.
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

    /// Forgets, once, which rails have tried it.
    pub(super) fn try_again(&mut self) {
        self.phase |= AGAIN;
        self.tried = 0;
    }

    pub(super) fn stray(&mut self) {
        self.phase |= STRAY;
    }
}

/// The slot that a child's token names.
#[inline]
pub(super) const fn slot_of(child: Token) -> usize {
    child.0 as u32 as usize
}
