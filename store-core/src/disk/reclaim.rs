//! Giving up extents, tombstones, and clearing the disk.
//!
//! An extent is given up in this order: its first header and its footer are destroyed, and that is made
//! durable, so that no recovery announces its objects again; the master is asked to drop its places; when it
//! has answered and nothing reads the extent any more, it is free. Its images are intact until then.

use alloc::collections::BTreeSet;
use alloc::vec;
use alloc::vec::Vec;

use te_core::Instant;

use super::extents::Status;
use super::format::PAGE_BYTES;
use super::io::{IoError, Piece, Work};
use super::message::{Event, Failure, Refused, State};
use super::tombstones::{Added, Removed};
use super::{Disk, Purpose};
use crate::wire::KEY_BYTES_MAX;

#[derive(Debug, Default)]
pub(super) struct Wiping {
    wipes: Vec<Wipe>,
    /// Slots that are on the path to being free.
    underway: BTreeSet<u32>,
    /// Slots that are free when the floor is durable.
    clearing: Vec<u32>,
    is_clearing: bool,
}

#[derive(Debug)]
struct Wipe {
    slot: u32,
    /// Writes that have not ended.
    left: u32,
    tick: u64,
}

impl Wiping {
    pub(super) fn waits_for_sync(&self) -> bool {
        self.wipes.iter().any(|wipe| wipe.left == 0)
    }
}

impl Disk {
    /// Remembers that a generation of a key was removed, so that it is not announced after a restart.
    /// Answered by [`Event::Forgotten`] when that is durable. `locator`: where the object is, if that is
    /// known; it is not read from there any more.
    ///
    /// # Errors
    /// `Busy`: the disk is being opened. `Unsuitable`: the key is empty or too long. `TombstonesFull`.
    /// `ReadOnly`: the removal is not recorded; the object may be announced after a restart.
    pub fn forget(&mut self, now: Instant, object: Removed, locator: Option<u64>) -> Result<(), Refused> {
        if self.state == State::Opening {
            return Err(self.busy());
        }
        if !(1..=KEY_BYTES_MAX).contains(&object.key.len()) {
            return Err(Refused::Unsuitable);
        }
        self.cancel_queued(&object);
        let place = locator.map(|locator| self.geometry.place(locator));
        if let Some((sequence, offset)) = place
            && let Some(slot) = self.extents.find(sequence)
        {
            self.extents.slot_mut(slot).remove(offset);
        }
        if matches!(self.state, State::ReadOnly(_) | State::Failed(_)) {
            return Err(Refused::ReadOnly);
        }
        let upto = self.writing.next_sequence - 1;
        if upto == 0 {
            self.events.push_back(Event::Forgotten(object));
            return Ok(());
        }
        let bytes_max = self.tombstone_bytes_max();
        match self.tombstones.add(now, object.clone(), upto, bytes_max) {
            Added::Waits => self.proceed(now),
            Added::Recorded => self.events.push_back(Event::Forgotten(object)),
            Added::Full => return Err(Refused::TombstonesFull),
        }
        Ok(())
    }

    /// The answer to [`Event::Reclaim`]: the master has dropped all places in this extent, and no reader
    /// will use them any more.
    pub fn reclaimed(&mut self, now: Instant, sequence: u64) {
        if let Some(slot) = self.extents.find(sequence)
            && self.extents.slot(slot).status == Status::Reclaiming
        {
            self.extents.slot_mut(slot).status = Status::Drained;
            self.extents.release(slot);
            self.proceed(now);
        }
    }

    /// The extents for which [`Event::Reclaim`] was not answered yet: to be asked again after the connection
    /// to the master was lost.
    pub fn unanswered_reclaims(&self) -> impl Iterator<Item = u64> {
        let waiting = |slot: &u32| self.extents.slot(*slot).status == Status::Reclaiming;
        self.extents.oldest_first().filter(move |(_, slot)| waiting(slot)).map(|(sequence, _)| sequence)
    }

    /// Gives up everything on the disk at once: raises its floor. The caller has dropped all places on it,
    /// and no reader uses one any more. Demotions that wait fail. Answered by
    /// [`Event::Cleared`].
    ///
    /// # Errors
    /// `Busy`: the disk is being opened. `ReadOnly`.
    pub fn clear(&mut self, now: Instant) -> Result<(), Refused> {
        match self.state {
            State::Opening | State::Adopting => return Err(self.busy()),
            State::ReadOnly(_) | State::Failed(_) => return Err(Refused::ReadOnly),
            State::Ready => {}
        }
        // So that nothing that was accepted before is on the disk afterwards.
        self.fail_queue(Failure::Abandoned);
        self.raise_floor();
        self.proceed(now);
        Ok(())
    }

    pub(super) fn raise_floor(&mut self) {
        self.writing.open = [None, None];
        self.writing.closing.clear();
        self.writing.failed.clear();
        self.reclaim.wipes.clear();
        self.reclaim.clearing.clear();
        let known: Vec<u32> = self.extents.oldest_first().map(|(_, slot)| slot).collect();
        for slot in known {
            let record = self.extents.slot_mut(slot);
            record.status = Status::Wiping;
            record.cut(0);
            if record.bad {
                self.durable.wanted.bad.insert(slot);
            }
            self.reclaim.clearing.push(slot);
        }
        self.durable.wanted.floor = self.writing.next_sequence;
        self.durable.force = true;
        self.reclaim.is_clearing = true;
    }

    /// The floor is durable.
    pub(super) fn cleared(&mut self) {
        if !core::mem::take(&mut self.reclaim.is_clearing) {
            return;
        }
        for slot in core::mem::take(&mut self.reclaim.clearing) {
            self.extents.slot_mut(slot).status = Status::Drained;
            self.extents.release(slot);
        }
        self.prune_tombstones();
        // A recovery that distrusts the disk raises the floor too, and has said so.
        if self.state != State::Opening {
            self.events.push_back(Event::Cleared);
        }
    }

    /// Keeps enough extents free.
    pub(super) fn give_up_extents(&mut self, now: Instant) {
        self.give_up_failed(now);
        let extents = &self.extents;
        let on_path = [Status::Wiping, Status::Reclaiming, Status::Drained];
        self.reclaim.underway.retain(|slot| on_path.contains(&extents.slot(*slot).status));
        let enough = self.config.free_extents as usize;
        while self.extents.free() + self.reclaim.underway.len() < enough {
            let recorded = self.tombstones.sequences();
            let marks = self.durable.durable_marks;
            let (next, weight) = (self.writing.next_sequence, self.config.trial_weight);
            let (mut early, no_room) = (false, self.extents.free() == 0);
            let victim = self.extents.victim(next, weight, |_, record| {
                // A recovery that finds a mark in an extent has to find the extent.
                let synced = marks.streams[record.stream.index()].sequence > record.sequence;
                early |= !synced;
                // Without a free extent its records could not be written elsewhere.
                let stuck = no_room && recorded.contains(&record.sequence);
                synced && !record.bad && !stuck
            });
            let Some(slot) = victim else {
                self.durable.force |= early;
                return;
            };
            let sequence = self.extents.slot(slot).sequence;
            if recorded.contains(&sequence) {
                // Its records are written elsewhere first.
                self.tombstones.lost(now, sequence);
                return;
            }
            self.wipe(now, slot);
        }
    }

    /// Extents in which a write failed are given up at once; the list of bad extents stands for the
    /// destruction of their headers.
    fn give_up_failed(&mut self, now: Instant) {
        for at in 0..self.writing.failed.len() {
            let (slot, sequence) = {
                let extent = &self.writing.failed[at].extent;
                (extent.slot, extent.sequence)
            };
            if self.extents.slot(slot).status != Status::Closed {
                continue;
            }
            if self.tombstones.recorded_in(sequence) {
                self.tombstones.lost(now, sequence);
            } else {
                self.extents.slot_mut(slot).status = Status::Wiping;
                self.give_up_bad(slot);
            }
        }
    }

    fn give_up_bad(&mut self, slot: u32) {
        self.durable.wanted.bad.insert(slot);
        self.reclaim.wipes.push(Wipe { slot, left: 0, tick: 0 });
        if self.durable.wanted.bad.len() > super::format::BAD_MAX {
            self.stop(super::Why::Errors);
        }
    }

    fn wipe(&mut self, now: Instant, slot: u32) {
        self.extents.slot_mut(slot).status = Status::Wiping;
        self.reclaim.underway.insert(slot);
        self.reclaim.wipes.push(Wipe { slot, left: 2, tick: 0 });
        let at = self.geometry.extent_at(slot);
        let last = at + u64::from(self.geometry.extent_bytes() - PAGE_BYTES);
        for offset in [at, last] {
            self.extents.pin(slot);
            self.counters.header_bytes_total += u64::from(PAGE_BYTES);
            let pieces = vec![Piece::Zeros(PAGE_BYTES)];
            self.ops.order(now, Purpose::Wipe { slot }, offset, Work::Write(pieces));
        }
    }

    pub(super) fn wipe_ended(&mut self, now: Instant, slot: u32, error: Option<IoError>) {
        self.extents.unpin(slot);
        let tick = self.durable.wrote(now, u64::from(PAGE_BYTES));
        let Some(at) = self.reclaim.wipes.iter().position(|wipe| wipe.slot == slot) else { return };
        let wipe = &mut self.reclaim.wipes[at];
        (wipe.left, wipe.tick) = (wipe.left.saturating_sub(1), tick);
        if error.is_some() {
            self.counters.write_errors_total += 1;
            self.extents.slot_mut(slot).bad = true;
            self.count_error(now);
        }
        if self.reclaim.wipes[at].left == 0 && self.extents.slot(slot).bad {
            self.reclaim.wipes.remove(at);
            self.give_up_bad(slot);
        }
    }

    /// Asks the master about the extents whose headers are durably destroyed.
    pub(super) fn wiped(&mut self) {
        let (durable, extents) = (&self.durable, &self.extents);
        let is_done = |wipe: &Wipe| {
            let bad = extents.slot(wipe.slot).bad;
            wipe.left == 0 && durable.is_durable(wipe.tick) && (!bad || durable.is_listed(wipe.slot))
        };
        let done: Vec<u32> =
            self.reclaim.wipes.extract_if(.., |wipe| is_done(wipe)).map(|wipe| wipe.slot).collect();
        for slot in done {
            let record = self.extents.slot_mut(slot);
            record.status = Status::Reclaiming;
            let sequence = record.sequence;
            self.counters.reclaimed_total += 1;
            self.events.push_back(Event::Reclaim { sequence });
            self.prune_tombstones();
        }
    }
}
