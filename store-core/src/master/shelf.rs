//! What gets, queries and removals find on disks.

use super::Master;
use crate::BatchOrder;
use crate::disks::Disk;
use crate::message::{Listed, Object, Replica, Replicas};
use crate::objects::Objects;
use crate::shelf::{Record, Shelf};
use crate::{FullKey, Key, Stats};

impl Master {
    /// An object that is on a disk alone and where, and the index of its record.
    pub(super) fn get_from_disk(&mut self, key: FullKey<'_>, order: BatchOrder) -> Option<(Object, u32)> {
        if self.shelf.is_empty() {
            return None;
        }
        // What is in memory and cannot be read has a time to live, and that is over.
        let index = self.readable_record(key).filter(|_| self.objects.find(key).is_none())?;
        self.note_disk_hit(index, order);
        let record = self.shelf.record(index);
        let mut replicas = Replicas::new();
        // The list has room for one.
        let _ = replicas.push(Replica { segment: record.disk, addr: record.locator });
        let object = Object {
            len: record.len.into(),
            checksum: record.checksum,
            generation: record.generation,
            replicas,
        };
        self.stats.get_hits_total += 1;
        self.stats.disk_hits_total += 1;
        self.stats.get_bytes_total += object.len;
        Some((object, index))
    }

    /// Whether an object that is not in memory is on a disk, for `exists`.
    pub(super) fn is_on_disk(&mut self, key: FullKey<'_>) -> bool {
        let is_in_memory = self.objects.find(key).is_some();
        let found = !is_in_memory && self.readable_record(key).is_some();
        self.stats.exists_hits_total += u64::from(found);
        found
    }

    /// The object in memory is about to be removed: what it has on a disk is, too.
    pub(super) fn unshelve_at(&mut self, index: u32) {
        if self.shelf.is_empty() {
            return;
        }
        let entry = self.objects.entry(index);
        if entry.is_complete()
            && let Some(record) = self.shelf.find_generation(entry.full_key(), entry.generation)
        {
            self.drop_record(record, true);
        }
    }

    /// Removes what the key of an object that is being put has on a disk: an earlier object.
    pub(super) fn unshelve_older(&mut self, index: u32) {
        let entry = self.objects.entry(index);
        let found =
            (!entry.is_complete() && !self.shelf.is_empty()).then(|| self.shelf.find(entry.full_key()));
        if let Some(record) = found.flatten() {
            self.drop_record(record, true);
        }
    }

    /// Whether an object in memory is on a disk as well.
    pub(super) fn is_shelved(&self, index: u32) -> bool {
        if self.shelf.is_empty() {
            return false;
        }
        let entry = self.objects.entry(index);
        self.shelf.find_generation(entry.full_key(), entry.generation).is_some()
    }

    /// The counters, with the gauges of disks.
    pub(super) fn with_disks(&self) -> Stats {
        let here = || self.disks.iter().filter(|disk| disk.is_here());
        Stats {
            disks: here().count() as u64,
            disks_away: self.disks.iter().filter(|disk| !disk.is_here()).count() as u64,
            disk_capacity_bytes: here().map(|disk| disk.bytes).sum(),
            disk_tombstones: self.disks.iter().map(|disk: &Disk| disk.tombstones.len() as u64).sum(),
            ..self.stats
        }
    }

    /// Repeats what a get, or a question, of an object that is on a disk alone has changed.
    ///
    /// # Errors
    /// There is no such record.
    pub(super) fn repeat_disk_hit(&mut self, record: u32, order: BatchOrder) -> Result<(), ()> {
        if self.shelf.record(record).is_vacant() {
            return Err(());
        }
        self.stats.gets_total += 1;
        self.stats.get_hits_total += 1;
        self.stats.disk_hits_total += 1;
        self.note_disk_hit(record, order);
        Ok(())
    }
}

/// The object at a slot of the shelf, if it is not in memory as well.
pub(super) fn on_disk_alone<'a>(objects: &Objects, shelf: &'a Shelf, index: u32) -> Option<&'a Record> {
    let record = shelf.record(index);
    (!record.is_vacant() && objects.find(record.full_key()).is_none()).then_some(record)
}

pub(super) fn listing_of(record: &Record) -> Listed<'_> {
    Listed {
        key: Key(record.key.as_slice()),
        len: record.len.into(),
        replicas: 1,
        complete: true,
        leased: false,
    }
}
