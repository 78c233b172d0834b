//! Tombstones: removed objects whose bytes may still be on this disk.
//!
//! A tombstone is *recorded* in a dead list. It may be forgotten when every extent that existed at the time
//! of the removal is destroyed, and the extent with its record must not be destroyed before. Every new
//! extent begins with all tombstones, so that recovery finds them in the youngest extents.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use te_core::Instant;

use super::format::{Dead, Lists};

/// A removed generation of a key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Removed {
    /// The generation.
    pub generation: u64,
    /// The tenant: a number that means the same after a restart of the master.
    pub tenant: u64,
    /// The key.
    pub key: Box<[u8]>,
}

#[derive(Debug)]
struct Tombstone {
    upto: u64,
    /// The extent with the durable record.
    recorded: Option<u64>,
    writing: Option<Writing>,
    /// A record has to be written.
    wanted: bool,
    /// The master waits for the record.
    confirm: bool,
}

/// A record that is not durable yet.
#[derive(Clone, Copy, Debug)]
struct Writing {
    sequence: u64,
    /// Number of the batch.
    serial: u64,
}

/// What became of a new tombstone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Added {
    /// Its record is not durable yet.
    Waits,
    /// It was known, and its record is durable.
    Recorded,
    /// There is no room for it.
    Full,
}

#[derive(Debug, Default)]
pub(super) struct Tombstones {
    by_object: BTreeMap<Removed, Tombstone>,
    bytes: usize,
    /// When the first record became wanted that was not written since.
    wanted_since: Option<Instant>,
}

impl Tombstones {
    /// Adds one, unless it would exceed `bytes_max`.
    pub(super) fn add(&mut self, now: Instant, removed: Removed, upto: u64, bytes_max: usize) -> Added {
        if let Some(known) = self.by_object.get_mut(&removed) {
            // Asked again: the answer may have been lost.
            known.confirm = known.recorded.is_none();
            return if known.confirm { Added::Waits } else { Added::Recorded };
        }
        let bytes = Dead::bytes(removed.key.len());
        if self.bytes + bytes > bytes_max {
            return Added::Full;
        }
        self.bytes += bytes;
        self.wanted_since.get_or_insert(now);
        let fresh = Tombstone { upto, recorded: None, writing: None, wanted: true, confirm: true };
        self.by_object.insert(removed, fresh);
        Added::Waits
    }

    /// Adds one that recovery found in the extent `recorded`. Returns `false` where it would exceed
    /// `bytes_max`.
    pub(super) fn recover(&mut self, dead: &Dead<'_>, recorded: u64, bytes_max: usize) -> bool {
        let removed = Removed { generation: dead.generation, tenant: dead.tenant, key: dead.key.into() };
        if let Some(known) = self.by_object.get_mut(&removed) {
            known.upto = known.upto.max(dead.upto);
            known.recorded = known.recorded.max(Some(recorded));
            return true;
        }
        self.bytes += Dead::bytes(dead.key.len());
        let recorded = Some(recorded);
        let found = Tombstone { upto: dead.upto, recorded, writing: None, wanted: false, confirm: false };
        self.by_object.insert(removed, found);
        self.bytes <= bytes_max
    }

    pub(super) fn contains(&self, removed: &Removed) -> bool {
        self.by_object.contains_key(removed)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_object.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.by_object.len()
    }

    pub(super) const fn wanted_since(&self) -> Option<Instant> {
        self.wanted_since
    }

    /// Bytes that the next dead list takes: of `all` tombstones, or of those with a wanted record.
    pub(super) fn list_bytes(&self, all: bool) -> usize {
        if all {
            return self.bytes;
        }
        if self.wanted_since.is_none() {
            return 0;
        }
        let wanted = self.by_object.iter().filter(|(_, tombstone)| tombstone.wanted);
        wanted.map(|(removed, _)| Dead::bytes(removed.key.len())).sum()
    }

    /// Appends them to the lists of a batch.
    pub(super) fn take(&mut self, all: bool, sequence: u64, serial: u64, lists: &mut Lists) {
        if !all && self.wanted_since.is_none() {
            return;
        }
        self.wanted_since = None;
        for (removed, tombstone) in &mut self.by_object {
            if all || tombstone.wanted {
                tombstone.wanted = false;
                tombstone.writing = Some(Writing { sequence, serial });
                let Removed { generation, tenant, key } = removed;
                let (generation, tenant) = (*generation, *tenant);
                lists.push_dead(&Dead { tenant, key, generation, upto: tombstone.upto });
            }
        }
    }

    /// These batches are durable, and every batch before them in their extent: recovery finds them. Returns
    /// what the master waits for.
    pub(super) fn durable(&mut self, batches: &BTreeSet<u64>) -> Vec<Removed> {
        let mut confirmed = Vec::new();
        if batches.is_empty() {
            return confirmed;
        }
        for (removed, tombstone) in &mut self.by_object {
            let written = tombstone.writing.take_if(|writing| batches.contains(&writing.serial));
            let Some(Writing { sequence, .. }) = written else { continue };
            tombstone.recorded = Some(sequence);
            if core::mem::take(&mut tombstone.confirm) {
                confirmed.push(removed.clone());
            }
        }
        confirmed
    }

    /// Records in this extent are lost: they have to be written elsewhere.
    pub(super) fn lost(&mut self, now: Instant, sequence: u64) {
        for tombstone in self.by_object.values_mut() {
            let lost = tombstone.writing.is_some_and(|writing| writing.sequence == sequence);
            let only_here = tombstone.writing.is_none() && tombstone.recorded == Some(sequence);
            if lost || only_here {
                (tombstone.writing, tombstone.wanted) = (None, true);
                self.wanted_since.get_or_insert(now);
            }
        }
    }

    /// Whether the record of a tombstone is in this extent, and not yet in another one.
    pub(super) fn recorded_in(&self, sequence: u64) -> bool {
        let here = |tombstone: &Tombstone| {
            tombstone.recorded == Some(sequence)
                || tombstone.writing.is_some_and(|writing| writing.sequence == sequence)
        };
        self.by_object.values().any(here)
    }

    /// The extents that the records of tombstones are in.
    pub(super) fn sequences(&self) -> BTreeSet<u64> {
        self.by_object.values().filter_map(|tombstone| tombstone.recorded).collect()
    }

    /// Forgets those whose bytes are destroyed: no extent before `oldest` exists. Returns what the master
    /// waits for.
    pub(super) fn prune(&mut self, oldest: u64) -> Vec<Removed> {
        let mut confirmed = Vec::new();
        let bytes = &mut self.bytes;
        self.by_object.retain(|removed, tombstone| {
            let keep = tombstone.upto >= oldest;
            if !keep {
                *bytes -= Dead::bytes(removed.key.len());
                confirmed.extend(tombstone.confirm.then(|| removed.clone()));
            }
            keep
        });
        if self.by_object.is_empty() {
            self.wanted_since = None;
        }
        confirmed
    }
}
