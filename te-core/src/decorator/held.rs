//! Completions that are held back. For the caller such a slice is still in flight, so its memory stays busy
//! (L2), it can be cancelled (L3), and it counts towards `inflight_max` (L4).

use alloc::vec::Vec;

use super::FENCES_MAX;
use super::ledger::{Entry, Ledger};
use crate::{Completion, Error, ErrorKind, Instant, Op, RegionId, RemoteRegionId, Slice, Token};

#[derive(Debug)]
pub(super) struct Held {
    ledger: Ledger,
    held: Vec<Waiting>,
    slices_max: usize,
    fences: usize,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    due: Instant,
    completion: Completion,
    entry: Entry,
}

impl Held {
    pub(super) fn new(inflight_max: u32) -> Self {
        let slices_max = inflight_max as usize;
        let entries_max = slices_max.saturating_add(FENCES_MAX);
        Self {
            ledger: Ledger::new(entries_max),
            held: Vec::with_capacity(entries_max),
            slices_max,
            fences: 0,
        }
    }

    /// The number of slices that may still be accepted.
    pub(super) fn room(&self) -> usize {
        self.slices_max - (self.ledger.len() - self.fences)
    }

    pub(super) fn accept(&mut self, slice: &Slice, now: Instant, dropped: bool) {
        let inserted = self.ledger.insert(Entry {
            token: slice.token,
            region: Some(slice.local.region),
            remote_region: slice.remote.region,
            op: slice.op,
            accepted_at: now,
            dropped,
            canceled: false,
        });
        debug_assert!(inserted, "the caller has checked that there is room");
    }

    pub(super) fn has_room_for_a_fence(&self) -> bool {
        self.fences < FENCES_MAX
    }

    pub(super) fn accept_fence(&mut self, token: Token, remote_region: RemoteRegionId, now: Instant) {
        self.fences += 1;
        let inserted = self.ledger.insert(Entry {
            token,
            region: None,
            remote_region,
            op: Op::Write,
            accepted_at: now,
            dropped: false,
            canceled: false,
        });
        debug_assert!(inserted, "the caller has checked that there is room");
    }

    /// Notes that the inner transport has ended this slice. `None` when it was never accepted here: the inner
    /// transport is broken.
    pub(super) fn ended(&mut self, token: Token) -> Option<Entry> {
        let entry = self.ledger.find_mut(token).copied();
        debug_assert!(
            entry.is_some(),
            "the inner transport completed {token:?}, which it was not given (L1)"
        );
        entry
    }

    pub(super) fn hold(&mut self, entry: Entry, completion: Completion, due: Instant) {
        self.held.push(Waiting { due, completion, entry });
    }

    /// Writes the completions that are due into `out`.
    pub(super) fn release(&mut self, now: Instant, out: &mut [Completion]) -> usize {
        let mut written = 0;
        let mut at = 0;
        while at < self.held.len() && written < out.len() {
            if self.held[at].due > now {
                at += 1;
                continue;
            }
            let held = self.held.swap_remove(at);
            self.ledger.remove(held.entry.token);
            self.fences -= usize::from(held.entry.region.is_none());
            out[written] = held.completion;
            written += 1;
        }
        written
    }

    pub(super) fn next_due(&self) -> Option<Instant> {
        self.held.iter().map(|held| held.due).min()
    }

    /// The result of a cancel for a slice that the inner transport has ended, or else the result of `inner`.
    pub(super) fn cancel(&mut self, token: Token, inner: Result<(), Error>) -> Result<(), Error> {
        let Some(entry) = self.ledger.find_mut(token).filter(|entry| entry.region.is_some()) else {
            return Err(ErrorKind::NotFound.into());
        };
        entry.canceled = true;
        if let Some(held) = self.held.iter_mut().find(|held| held.entry.token == token) {
            if held.entry.dropped {
                held.completion = given_up(&held.entry, ErrorKind::Canceled.into());
                held.due = Instant::ZERO;
            }
            return Ok(());
        }
        inner
    }

    pub(super) fn check_region_is_free(&self, id: RegionId) -> Result<(), Error> {
        match self.held.iter().any(|held| held.entry.region == Some(id)) {
            true => Err(ErrorKind::Busy.into()),
            false => Ok(()),
        }
    }

    pub(super) fn check_remote_is_free(&self, id: RemoteRegionId) -> Result<(), Error> {
        match self.held.iter().any(|held| held.entry.remote_region == id) {
            true => Err(ErrorKind::Busy.into()),
            false => Ok(()),
        }
    }
}

/// The completion of a slice or fence of which nothing is known except that it was sent.
pub(super) fn given_up(entry: &Entry, error: Error) -> Completion {
    match entry.op {
        Op::Read => Completion::not_applied(entry.token, error),
        Op::Write => Completion::unknown(entry.token, error),
    }
}
