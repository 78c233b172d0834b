//! Objects that were found are announced.

use alloc::vec::Vec;

use te_core::Instant;

use super::super::Disk;
use super::super::format::{Entry, Extent, Footer, PAGE_BYTES};
use super::super::message::{Adopted, Event, State};
use super::super::tombstones::Removed;
use super::walk::{Object, Walk};
use super::{Phase, Probe};

/// Footers that are read at a time.
const FOOTERS_MAX: u32 = 4;
/// No further footer is read while so many events wait to be polled.
const EVENTS_MAX: usize = 64;
/// Most objects of an event.
const OBJECTS_MAX: usize = 1_024;

impl Disk {
    pub(super) fn adopt(&mut self, now: Instant) {
        while let Some(opening) = &mut self.opening
            && opening.phase == Phase::Adopt
            && opening.outstanding < FOOTERS_MAX
            && opening.walk.is_none()
            && self.events.len() < EVENTS_MAX
        {
            if let Some(sequence) = opening.to_adopt.pop_front() {
                let Some(found) = opening.found.get(&sequence).copied() else { continue };
                self.probe_end(now, Probe::Adopt(sequence), found.extent.slot, found.footer_bytes);
            } else if opening.outstanding == 0 {
                match opening.to_walk.pop_first().and_then(|sequence| opening.found.get(&sequence)) {
                    Some(found) => {
                        opening.walk = Some(Walk::new(*found));
                        self.probe_header(now, PAGE_BYTES);
                    }
                    None => {
                        self.opening = None;
                        self.state = State::Ready;
                        self.events.push_back(Event::Ready);
                    }
                }
            } else {
                return;
            }
        }
    }

    pub(super) fn footer_read(&mut self, _now: Instant, sequence: u64, bytes: Option<&[u8]>) {
        let Some(found) = self.opening.as_ref().and_then(|opening| opening.found.get(&sequence)) else {
            return;
        };
        let extent = found.extent;
        let footer = bytes.and_then(|bytes| Footer::decode(bytes, &self.uuid, &self.geometry, extent.slot));
        match footer.filter(|footer| footer.extent == extent) {
            Some(footer) => self.announce(&extent, footer.end, footer.entries.iter().copied()),
            // Its headers say the same.
            None => {
                if let Some(opening) = &mut self.opening {
                    opening.to_walk.insert(sequence);
                }
            }
        }
    }

    /// An extent whose footer is damaged was walked.
    pub(super) fn adopt_walked(&mut self, now: Instant, walk: Walk) {
        let extent = walk.found.extent;
        let intact = walk.objects.iter().filter(|object| object.intact);
        let entries = intact.map(|object| {
            let Object { object: Removed { generation, tenant, key }, len, crc32c, offset, .. } = object;
            let (tenant, generation, len) = (*tenant, *generation, *len);
            Entry { tenant, key, generation, len, crc32c: *crc32c, offset: *offset }
        });
        self.announce(&extent, walk.end(), entries);
        if walk.end() < walk.found.end {
            // What was not announced must not be announced by a later recovery.
            self.fail_extent(now, extent.slot, extent.sequence);
        }
    }

    fn announce<'a>(&mut self, extent: &Extent, end: u32, entries: impl Iterator<Item = Entry<'a>>) {
        let record = self.extents.slot_mut(extent.slot);
        record.end = end;
        let mut objects = Vec::new();
        for Entry { tenant, key, generation, len, crc32c, offset } in entries {
            let object = Removed { generation, tenant, key: key.into() };
            if self.tombstones.contains(&object) {
                record.push_dead(offset);
                continue;
            }
            record.push(offset);
            let locator = self.geometry.locator(extent.sequence, offset);
            self.counters.adopted_total += 1;
            objects.push(Adopted { object, len, crc32c, locator });
            if objects.len() == OBJECTS_MAX {
                let objects = core::mem::take(&mut objects);
                self.events.push_back(Event::Adopt { lineage: extent.lineage, objects });
            }
        }
        record.shrink();
        if !objects.is_empty() {
            self.events.push_back(Event::Adopt { lineage: extent.lineage, objects });
        }
    }
}
