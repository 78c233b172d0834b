//! Superblocks, and what is durable.
//!
//! Every completed write gets a number, its *tick*. A sync that is ordered after the write with tick n makes
//! everything up to n durable. What depends on durability remembers a tick.

use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;

use te_core::Instant;

use super::extents::Status;
use super::format::{DiskUuid, Geometry, Marks, PAGE_BYTES, Superblock};
use super::io::{Piece, Work};
use super::message::{Event, State, Why};
use super::open::OpenExtent;
use super::{Disk, Purpose};

/// So many sequences are reserved in a superblock at a time: it is written once per so many extents.
const SEQUENCES: u64 = 64;
/// The next sequences are reserved when so few are left.
const SEQUENCES_LEFT: u64 = 16;

/// A superblock may have reserved so many more than the one before.
pub(super) const SEQUENCES_MAX: u64 = 2 * SEQUENCES;

#[derive(Debug)]
pub(super) struct Durable {
    /// The last superblock that is durable.
    pub(super) current: Superblock,
    /// The one before, which recovery uses where the current one cannot be read.
    pub(super) previous: Superblock,
    /// What the next one is to say.
    pub(super) wanted: Superblock,
    /// The one that is being written.
    next: Option<Next>,
    pub(super) force: bool,
    /// Writes that were completed.
    done: u64,
    /// Writes that are durable.
    durable: u64,
    unsynced_bytes: u64,
    unsynced_since: Option<Instant>,
    syncing: bool,
    /// Marks of the newest header that was written, and of the newest one that is durable.
    pub(super) done_marks: Marks,
    pub(super) durable_marks: Marks,
}

#[derive(Debug)]
struct Next {
    superblock: Superblock,
    tick: Option<u64>,
}

impl Durable {
    pub(super) fn new(disk: DiskUuid, geometry: Geometry) -> Self {
        let current = Superblock {
            disk,
            geometry,
            serial: 0,
            sequences_end: 1,
            floor: 0,
            written_bytes: 0,
            object_bytes: 0,
            marks: Marks::default(),
            bad: Default::default(),
        };
        Self {
            wanted: Superblock { sequences_end: 1 + SEQUENCES, ..current.clone() },
            previous: current.clone(),
            current,
            next: None,
            force: false,
            done: 0,
            durable: 0,
            unsynced_bytes: 0,
            unsynced_since: None,
            syncing: false,
            done_marks: Marks::default(),
            durable_marks: Marks::default(),
        }
    }

    /// A write was completed. Returns its tick.
    pub(super) fn wrote(&mut self, now: Instant, bytes: u64) -> u64 {
        self.done += 1;
        self.unsynced_bytes += bytes;
        self.unsynced_since.get_or_insert(now);
        self.done
    }

    /// Whether everything is durable that was written by this tick.
    pub(super) const fn is_durable(&self, tick: u64) -> bool {
        tick <= self.durable
    }

    /// Whether everything is durable that was written.
    const fn is_all_durable(&self) -> bool {
        self.done == self.durable
    }

    /// Whether recovery ignores this extent, whichever superblock it reads.
    pub(super) fn is_listed(&self, slot: u32) -> bool {
        self.current.bad.contains(&slot) && self.previous.bad.contains(&slot)
    }

    /// Whether the list of bad extents is being written. Headers that are built meanwhile would have marks in
    /// an extent that recovery ignores.
    pub(super) fn is_listing_bad(&self) -> bool {
        let differs = |other: &Superblock| other.bad != self.current.bad;
        differs(&self.previous) || self.next.as_ref().is_some_and(|next| differs(&next.superblock))
    }

    /// Whether a superblock has to be written. The list of bad extents and the floor count when both
    /// superblocks have them.
    fn is_wanted(&self) -> bool {
        let differs = |other: &Superblock| other.bad != self.wanted.bad || other.floor != self.wanted.floor;
        let reserve = self.wanted.sequences_end != self.current.sequences_end;
        self.force || reserve || differs(&self.current) || differs(&self.previous)
    }
}

impl Disk {
    /// Both superblocks of a new disk in one write. The disk is formatted when it is ready.
    pub(super) fn format_superblocks(&mut self, now: Instant) {
        (0..self.geometry.extents()).for_each(|slot| self.extents.add_free(slot));
        let first = Superblock { serial: 1, ..self.durable.wanted.clone() };
        let second = Superblock { serial: 2, ..first.clone() };
        // Each at the place where its successor after the next one will be written.
        let pages = [second.encode(), first.encode()].concat();
        self.durable.next = Some(Next { superblock: second, tick: None });
        self.counters.header_bytes_total += pages.len() as u64;
        let pieces = vec![Piece::Bytes(pages.into(), 0)];
        self.ops.order(now, Purpose::Superblock, 0, Work::Write(pieces));
    }

    /// Reserves sequences before they are needed.
    pub(super) fn reserve_sequences(&mut self) {
        let wanted = &mut self.durable.wanted.sequences_end;
        if self.writing.next_sequence + SEQUENCES_LEFT >= *wanted {
            *wanted = self.writing.next_sequence + SEQUENCES;
        }
    }

    pub(super) fn write_superblock(&mut self, now: Instant) {
        if self.durable.next.is_some() || !self.durable.is_wanted() {
            return;
        }
        self.durable.force = false;
        let mut superblock = self.durable.wanted.clone();
        superblock.serial = self.durable.current.serial + 1;
        let ignored = |slot: u32| superblock.bad.contains(&slot);
        let streams = self.marks(ignored);
        superblock.marks = Marks { serial: self.writing.next_serial, streams };
        self.writing.next_serial += 1;
        let before = &self.durable.current;
        let written = &self.counters;
        let all = written.object_bytes_total + written.pad_bytes_total + written.header_bytes_total;
        superblock.written_bytes = before.written_bytes.max(self.durable.wanted.written_bytes + all);
        superblock.object_bytes =
            before.object_bytes.max(self.durable.wanted.object_bytes + written.object_bytes_total);
        let offset = superblock.serial % 2 * u64::from(PAGE_BYTES);
        let pieces = vec![Piece::Bytes(superblock.encode().into(), 0)];
        self.counters.header_bytes_total += u64::from(PAGE_BYTES);
        self.durable.next = Some(Next { superblock, tick: None });
        self.ops.order(now, Purpose::Superblock, offset, Work::Write(pieces));
    }

    pub(super) fn superblock_ended(&mut self, now: Instant, ok: bool) {
        if !ok {
            self.counters.write_errors_total += 1;
            self.stop(Why::Errors);
            return;
        }
        let tick = self.durable.wrote(now, u64::from(PAGE_BYTES));
        if let Some(next) = &mut self.durable.next {
            next.tick = Some(tick);
        }
        if self.is_finishing() {
            self.sync(now);
        }
    }

    /// When the next sync is due at the latest.
    pub(super) fn sync_due_at(&self) -> Option<Instant> {
        let wait = Duration::from_millis(self.config.sync_wait_ms.into());
        self.durable.unsynced_since.map(|since| since + wait)
    }

    /// Orders a sync where one is due.
    pub(super) fn sync(&mut self, now: Instant) {
        let durable = &self.durable;
        if durable.syncing || durable.is_all_durable() {
            return;
        }
        let waits = durable.next.as_ref().is_some_and(|next| next.tick.is_some());
        let due = self.sync_due_at().is_some_and(|at| at <= now);
        let full = durable.unsynced_bytes >= self.config.sync_bytes;
        if waits || due || full || self.is_finishing() || self.reclaim.waits_for_sync() {
            let (tick, marks) = (durable.done, durable.done_marks);
            self.durable.syncing = true;
            self.durable.unsynced_bytes = 0;
            self.durable.unsynced_since = None;
            self.ops.order(now, Purpose::Sync { tick, marks }, 0, Work::Sync);
        }
    }

    pub(super) fn sync_ended(&mut self, tick: u64, marks: Marks, ok: bool) {
        self.durable.syncing = false;
        if !ok {
            self.sync_failed();
            return;
        }
        if !matches!(self.state, State::Opening | State::Adopting | State::Ready) {
            return;
        }
        self.counters.syncs_total += 1;
        self.durable.durable = tick;
        self.durable.durable_marks = self.durable.durable_marks.max(marks);
        let batches = self.advance(tick);
        let confirmed = self.tombstones.durable(&batches);
        self.confirm(confirmed);
        let next = self.durable.next.take_if(|next| next.tick.is_some_and(|at| at <= tick));
        if let Some(Next { superblock, .. }) = next {
            self.superblock_is_durable(superblock);
        }
        self.wiped();
    }

    fn superblock_is_durable(&mut self, superblock: Superblock) {
        self.durable.durable_marks = self.durable.durable_marks.max(superblock.marks);
        self.durable.previous = core::mem::replace(&mut self.durable.current, superblock);
        let durable = &self.durable;
        self.writing.failed.retain(|open| !durable.is_listed(open.extent.slot));
        let floors = [durable.current.floor, durable.previous.floor];
        if floors == [durable.wanted.floor; 2] {
            self.cleared();
        }
        if self.state == State::Opening && !self.durable.is_wanted() {
            self.finished();
        }
    }

    /// Whether a new superblock and footers are all that is missing before objects are announced.
    pub(super) fn is_finishing(&self) -> bool {
        self.state == State::Opening && self.opening.as_ref().is_none_or(|opening| opening.is_finishing())
    }

    /// The end of an opening, step by step, each synced: what was found and verified, which may not be
    /// durable where only the process ended; footers; the superblock that says that all is synced.
    pub(super) fn finish(&mut self, now: Instant) {
        if !self.durable.is_all_durable() {
            return self.sync(now);
        }
        self.write_footers(now);
        if self.extents.count(Status::Closing) == 0 {
            self.write_superblock(now);
        }
    }

    /// Nothing that was written since the last sync is certain, and no later sync can change that.
    fn sync_failed(&mut self) {
        let writing = &mut self.writing;
        let open = writing.open.iter_mut().filter_map(Option::take);
        let unfinished = open.chain(writing.closing.drain(..)).chain(writing.failed.drain(..));
        let unproven: Vec<OpenExtent> = unfinished.collect();
        for OpenExtent { extent, durable_to, .. } in unproven {
            self.extents.slot_mut(extent.slot).cut(durable_to);
            let from = self.geometry.locator(extent.sequence, durable_to);
            let to = self.geometry.locator(extent.sequence + 1, 0);
            self.events.push_back(Event::Dropped { from, to });
        }
        self.stop(Why::Sync);
    }
}
