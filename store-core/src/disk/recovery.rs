//! Recovery: what is on the disk, without believing any of it.
//!
//! ```text
//!   superblocks ─▶ scan ─▶ records ─▶ walk ─▶ finish ─▶ adopt ─▶ ready
//!   │              │       │          │       │         └ footers of all extents: objects are announced
//!   │              │       │          │       └ new footers, synced; a new superblock, synced
//!   │              │       │          └ extents without footers: headers one by one; data behind the marks
//!   │              │       └ footers of the youngest extents: tombstones
//!   │              └ the tail of the footer and the first header of every extent
//!   └ both, each by itself
//! ```
//!
//! Whatever is not announced after a recovery is never announced again, because the master does not keep
//! tombstones of objects that it does not know to be here: extents without footers get one with just the
//! objects that are intact, and extents that cannot be read are put on the list of bad ones.

mod adopt;
mod scan;
mod walk;

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use te_core::Instant;

use super::extents::{Extents, Status};
use super::format::{Dead, Extent, Footer, Geometry, Marks, PAGE_BYTES, Superblock};
use super::io::{IoError, Target, Work};
use super::message::{Event, State, Why};
use super::{Disk, Purpose};
use scan::Scanned;
use walk::Walk;

/// How often a read is repeated when it fails.
const RETRIES: u32 = 3;
/// The youngest extents of each stream whose tombstones are read. The record of each tombstone that is
/// needed is in the youngest extent, or in one that was open beside it; the others are to be safe.
const RECORDS_PER_STREAM: usize = 4;

/// The state of a recovery.
#[derive(Debug)]
pub(super) struct Opening {
    disk_bytes: u64,
    block_bytes: u32,
    phase: Phase,
    superblocks: Vec<Superblock>,
    /// Superblocks that were read, valid or not.
    superblocks_read: u32,
    next_slot: u32,
    scanned: BTreeMap<u32, Scanned>,
    found: BTreeMap<u64, Found>,
    marks: Marks,
    to_check: VecDeque<u64>,
    to_walk: BTreeSet<u64>,
    walk: Option<Walk>,
    to_adopt: VecDeque<u64>,
    /// Extents that cannot be announced, because they could not be given a footer.
    withheld: BTreeSet<u64>,
    /// Orders of this phase that have not ended.
    outstanding: u32,
    /// More tombstones than fit, or fewer than there should be.
    distrusted: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Superblocks,
    Scan,
    Records,
    Walk,
    Finish,
    Adopt,
}

/// An extent that was found.
#[derive(Clone, Copy, Debug)]
struct Found {
    extent: Extent,
    /// Bytes of its footer; 0 without one.
    footer_bytes: u32,
    /// Where its batches end, by its footer.
    end: u32,
}

/// A read of the recovery.
#[derive(Debug)]
pub(super) struct Probing {
    probe: Probe,
    offset: u64,
    bytes: u32,
    /// How often it may fail before it counts as failed.
    retries: u32,
}

/// What a read is for.
#[derive(Debug)]
pub(super) enum Probe {
    Superblock,
    Tail(u32),
    Head(u32),
    Records(u64),
    Header,
    Data,
    Adopt(u64),
}

impl Opening {
    pub(super) const fn is_finishing(&self) -> bool {
        matches!(self.phase, Phase::Finish)
    }

    pub(super) const fn marks(&self) -> Marks {
        self.marks
    }
}

impl Disk {
    pub(super) fn begin_recovery(&mut self, now: Instant, disk_bytes: u64, block_bytes: u32) {
        self.opening = Some(alloc::boxed::Box::new(Opening {
            disk_bytes,
            block_bytes,
            phase: Phase::Superblocks,
            superblocks: Vec::new(),
            superblocks_read: 0,
            next_slot: 0,
            scanned: BTreeMap::new(),
            found: BTreeMap::new(),
            marks: Marks::default(),
            to_check: VecDeque::new(),
            to_walk: BTreeSet::new(),
            walk: None,
            to_adopt: VecDeque::new(),
            withheld: BTreeSet::new(),
            outstanding: 0,
            distrusted: false,
        }));
        self.probe(now, Probe::Superblock, 0, PAGE_BYTES);
        self.probe(now, Probe::Superblock, PAGE_BYTES.into(), PAGE_BYTES);
    }

    fn probe(&mut self, now: Instant, probe: Probe, offset: u64, bytes: u32) {
        self.order_probe(now, Probing { probe, offset, bytes, retries: RETRIES });
    }

    fn order_probe(&mut self, now: Instant, probing: Probing) {
        if let Some(opening) = &mut self.opening {
            opening.outstanding += 1;
        }
        let Probing { offset, bytes, .. } = probing;
        self.counters.recovery_bytes_total += u64::from(bytes);
        self.ops.order(
            now,
            Purpose::Recover(probing),
            offset,
            Work::Read { bytes, into: Target::Completion },
        );
    }

    /// The bytes at the end of an extent.
    fn probe_end(&mut self, now: Instant, probe: Probe, slot: u32, bytes: u32) {
        let end = self.geometry.extent_at(slot) + u64::from(self.geometry.extent_bytes());
        self.probe(now, probe, end - u64::from(bytes), bytes);
    }

    pub(super) fn probe_ended(&mut self, now: Instant, probing: Probing, result: Result<Vec<u8>, IoError>) {
        let Some(opening) = &mut self.opening else { return };
        opening.outstanding -= 1;
        if result.is_err() {
            self.counters.read_errors_total += 1;
            if let Some(retries) = probing.retries.checked_sub(1) {
                return self.order_probe(now, Probing { retries, ..probing });
            }
        }
        let bytes = result.ok();
        match probing.probe {
            Probe::Superblock => {
                opening.superblocks_read += 1;
                opening.superblocks.extend(bytes.and_then(|page| Superblock::decode(&page)));
                if opening.superblocks_read == 2 {
                    self.superblocks_read();
                }
            }
            Probe::Tail(slot) => self.tail_read(slot, bytes.as_deref()),
            Probe::Head(slot) => self.head_read(now, slot, bytes.as_deref()),
            Probe::Records(sequence) => self.records_read(sequence, bytes.as_deref()),
            Probe::Header => self.header_read(now, bytes.as_deref()),
            Probe::Data => self.data_read(now, bytes.as_deref()),
            Probe::Adopt(sequence) => self.footer_read(now, sequence, bytes.as_deref()),
        }
    }

    /// Continues with the next step when the current one allows it.
    pub(super) fn proceed_recovery(&mut self, now: Instant) {
        loop {
            let Some(opening) = &self.opening else { return };
            let before = opening.phase;
            match before {
                Phase::Superblocks => {}
                Phase::Scan => self.scan(now),
                Phase::Records => self.read_records(now),
                Phase::Walk => self.walk(now),
                Phase::Finish => self.finish(now),
                Phase::Adopt => self.adopt(now),
            }
            if self.opening.as_ref().is_none_or(|opening| opening.phase == before) {
                return;
            }
        }
    }

    fn superblocks_read(&mut self) {
        let Some(opening) = &mut self.opening else { return };
        opening.superblocks.sort_by_key(|superblock| superblock.serial);
        let alone = opening.superblocks.len() == 1;
        let Some(mut superblock) = opening.superblocks.pop() else { return self.stop(Why::NoSuperblock) };
        opening.phase = Phase::Scan;
        opening.marks = superblock.marks;
        let (extent_bytes, block_bytes) =
            (superblock.geometry.extent_bytes(), superblock.geometry.block_bytes());
        // A disk that became shorter has what is left of it.
        let exists = Geometry::new(opening.disk_bytes, extent_bytes, block_bytes);
        let Some(exists) = exists.ok().filter(|_| block_bytes >= opening.block_bytes) else {
            return self.stop(Why::Geometry);
        };
        if exists.extents() < superblock.geometry.extents() {
            superblock.geometry = exists;
            superblock.bad.retain(|slot| *slot < exists.extents());
        }
        self.geometry = superblock.geometry;
        self.uuid = superblock.disk;
        self.ops.set_block(block_bytes);
        self.extents = Extents::new(&self.geometry);
        // The superblock that is missing may have reserved more.
        self.writing.next_sequence =
            superblock.sequences_end + if alone { super::durable::SEQUENCES_MAX } else { 0 };
        // Without the other one, what counts in both has to be written twice.
        let unknown = || Superblock { bad: BTreeSet::new(), floor: 0, ..superblock.clone() };
        self.durable.previous = opening.superblocks.pop().unwrap_or_else(unknown);
        self.durable.wanted = superblock.clone();
        self.durable.current = superblock;
    }

    fn read_records(&mut self, now: Instant) {
        let Some(opening) = &mut self.opening else { return };
        if opening.outstanding > 0 {
            return;
        }
        match opening.to_check.pop_front() {
            Some(sequence) => {
                let found = opening.found[&sequence];
                self.probe_end(now, Probe::Records(sequence), found.extent.slot, found.footer_bytes);
            }
            None => opening.phase = Phase::Walk,
        }
    }

    fn records_read(&mut self, sequence: u64, bytes: Option<&[u8]>) {
        let Some(opening) = &mut self.opening else { return };
        let Some(found) = opening.found.get_mut(&sequence) else { return };
        let slot = found.extent.slot;
        let footer = bytes.and_then(|bytes| Footer::decode(bytes, &self.uuid, &self.geometry, slot));
        let Some(footer) = footer else {
            // Its headers say the same.
            found.footer_bytes = 0;
            opening.to_walk.insert(sequence);
            return;
        };
        for dead in &footer.dead {
            self.recover_tombstone(dead, sequence);
        }
    }

    /// Takes a tombstone from a list in the extent `sequence`.
    fn recover_tombstone(&mut self, dead: &Dead<'_>, sequence: u64) {
        let bytes_max = self.tombstone_bytes_max();
        let Some(opening) = &mut self.opening else { return };
        // Without an extent that may contain the object the tombstone was forgotten.
        let oldest = opening.found.first_key_value().map_or(0, |(oldest, _)| *oldest);
        if dead.upto >= oldest {
            opening.distrusted |= !self.tombstones.recover(dead, sequence, bytes_max);
        }
    }

    /// All tombstones are known, and all extents have footers or are about to get one.
    fn walks_ended(&mut self, now: Instant) {
        let Some(opening) = &mut self.opening else { return };
        opening.phase = Phase::Finish;
        self.writing.next_serial = opening.marks.serial + 1;
        for slot in 0..self.geometry.extents() {
            if self.extents.slot(slot).status == Status::Free {
                self.extents.add_free(slot);
            }
        }
        self.conclude();
        // Something to sync: what was verified.
        self.durable.wrote(now, 0);
        self.durable.force = true;
        self.reserve_sequences();
    }

    /// An extent could not be given a footer. Nothing in it is announced, now or later: it is listed as bad
    /// before anything is announced.
    pub(super) fn withhold(&mut self, slot: u32, sequence: u64) {
        let Some(opening) = &mut self.opening else { return };
        if opening.phase == Phase::Adopt {
            return;
        }
        opening.found.remove(&sequence);
        opening.withheld.insert(sequence);
        // Its tombstones would be lost with it.
        opening.distrusted |= self.tombstones.recorded_in(sequence);
        self.writing.failed.retain(|open| open.extent.sequence != sequence);
        self.durable.wanted.bad.insert(slot);
        self.extents.slot_mut(slot).status = Status::Drained;
        self.extents.release(slot);
        if opening.phase == Phase::Finish {
            self.conclude();
        }
    }

    /// Decides whether anything on the disk is announced.
    fn conclude(&mut self) {
        let Some(opening) = &mut self.opening else { return };
        if opening.distrusted && !opening.found.is_empty() {
            self.events.push_back(Event::Distrusted);
            opening.found.clear();
            self.raise_floor();
        }
        let Some(opening) = &mut self.opening else { return };
        opening.to_adopt = opening.found.keys().copied().collect();
        self.prune_tombstones();
    }

    /// The new superblock is durable: the disk was formatted, or recovery knows everything.
    pub(super) fn finished(&mut self) {
        match &mut self.opening {
            Some(opening) => {
                opening.phase = Phase::Adopt;
                self.state = State::Adopting;
            }
            None => {
                self.state = State::Ready;
                self.events.push_back(Event::Ready);
            }
        }
    }
}
