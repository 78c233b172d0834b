//! Which keys have changed, and where their objects are: what [`KvEvents`](crate::KvEvents) asks.

use super::Master;
use crate::kv_events::Tiers;
use crate::objects::changes::Keys;
use crate::segments::Placed;
use crate::shelf::Record;
use crate::{FullKey, SegmentNo, TenantNo};

/// Cursors from here on are of records of disks.
const ON_DISKS: u64 = 1 << 32;
/// Objects, or records, that a page of a scan looks at.
const PAGE_SLOTS: u32 = 4_096;

impl Master {
    /// From here on the keys whose objects change are noted, for [`Self::take_changed_keys`].
    pub(crate) fn note_changed_keys(&mut self) {
        self.objects.changes.note_keys();
    }

    /// The keys whose objects have changed since the last call; none if they are not noted.
    pub(crate) fn take_changed_keys(&mut self) -> Option<Keys> {
        self.objects.changes.take_keys()
    }

    /// For the next keys.
    pub(crate) fn give_back_changed_keys(&mut self, keys: Keys) {
        self.objects.changes.give_back(keys);
    }

    /// Where a get finds the object of a key. The time to live does not count: its end is a timeout of the
    /// master, which removes the object.
    pub(crate) fn tiers_of(&self, key: FullKey<'_>) -> Tiers {
        let disk = self.readable_record(key).is_some();
        let Some(index) = self.objects.find(key) else { return Tiers { memory: false, disk } };
        let entry = self.objects.entry(index);
        if !entry.is_complete() {
            // A put is under way: until its end or its removal a get does not look at the disk either.
            return Tiers::default();
        }
        let is_memory = |placed: &Placed| self.disks.get(placed.segment).is_none();
        Tiers { memory: entry.replicas.as_slice().iter().any(is_memory), disk }
    }

    pub(crate) fn hash_of(&self, key: FullKey<'_>) -> u64 {
        self.objects.key_number(key)
    }

    pub(crate) fn tenant_name(&self, no: TenantNo) -> Option<&str> {
        self.tenants.name(no)
    }

    /// Calls `each` with the keys of a page, and returns the cursor of the next page, 0 at the end.
    pub(crate) fn scan_keys(&self, cursor: u64, mut each: impl FnMut(FullKey<'_>)) -> u64 {
        if cursor < ON_DISKS {
            let start = cursor as u32;
            let end = self.objects.slots().min(start.saturating_add(PAGE_SLOTS));
            for index in start..end {
                let entry = self.objects.entry(index);
                if entry.has_key() {
                    each(entry.full_key());
                }
            }
            return if end < self.objects.slots() { end.into() } else { ON_DISKS };
        }
        let start = (cursor - ON_DISKS) as u32;
        let end = self.shelf.slots().min(start.saturating_add(PAGE_SLOTS));
        for index in start..end {
            let record: &Record = self.shelf.record(index);
            // What is in memory was in a page before.
            if !record.is_vacant() && self.objects.find(record.full_key()).is_none() {
                each(record.full_key());
            }
        }
        if end < self.shelf.slots() { ON_DISKS + u64::from(end) } else { 0 }
    }

    /// The objects of a disk can be read no more, or again.
    pub(super) fn note_disk(&mut self, no: SegmentNo) {
        if !self.objects.changes.are_keys_noted() {
            return;
        }
        let members = self.disks.get(no).map(|disk| disk.members(0, u64::MAX));
        for index in members.into_iter().flatten() {
            let record = self.shelf.record(index);
            if record.disk == no {
                self.objects.note_key(record.full_key());
            }
        }
    }
}
