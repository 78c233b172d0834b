//! The extents of a disk: a record for each, and four bytes per object.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use super::format::{Geometry, Stream};

/// Images begin at multiples of this, bytes.
const UNIT_BYTES: u32 = 512;
/// Set in a place whose object was removed, or was never written.
const DEAD: u32 = 1 << 31;

/// What an extent is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    /// Nothing is in it.
    Free,
    /// Batches are appended.
    Open,
    /// Full; it waits for its footer.
    Closing,
    /// Full.
    Closed,
    /// Its first header and its footer are being destroyed: recovery will not find it any more.
    Wiping,
    /// The master was asked to drop its places.
    Reclaiming,
    /// No place in it is known any more; it is free when nothing reads or writes it.
    Drained,
    /// Not used any more.
    Unusable,
}

#[derive(Debug)]
pub(super) struct Record {
    pub(super) sequence: u64,
    pub(super) stream: Stream,
    pub(super) status: Status,
    /// A write failed.
    pub(super) bad: bool,
    /// Orders in flight that touch it.
    pub(super) pins: u32,
    /// Where its last batch ends.
    pub(super) end: u32,
    live: u32,
    /// Where its images begin, in units; ascending.
    places: Vec<u32>,
}

impl Record {
    const UNUSED: Self = Self {
        sequence: 0,
        stream: Stream::Trial,
        status: Status::Free,
        bad: false,
        pins: 0,
        end: 0,
        live: 0,
        places: Vec::new(),
    };

    /// Adds an image behind all others.
    pub(super) fn push(&mut self, offset: u32) {
        self.places.push(offset / UNIT_BYTES);
        self.live += 1;
    }

    /// Adds a place that no reader is to find.
    pub(super) fn push_dead(&mut self, offset: u32) {
        self.places.push((offset / UNIT_BYTES) | DEAD);
    }

    pub(super) fn shrink(&mut self) {
        self.places.shrink_to_fit();
    }

    /// Bytes up to the next image, or to the end, from that at `offset`. `None`: no live object is there.
    pub(super) fn bytes_at(&self, offset: u32) -> Option<u32> {
        let at = self.find(offset).filter(|at| self.places[*at] & DEAD == 0)?;
        let next = self.places.get(at + 1).map_or(self.end, |place| (place & !DEAD) * UNIT_BYTES);
        Some(next - offset)
    }

    /// Removes the object at `offset`, if there is one.
    pub(super) fn remove(&mut self, offset: u32) {
        if let Some(at) = self.find(offset).filter(|at| self.places[*at] & DEAD == 0) {
            self.places[at] |= DEAD;
            self.live -= 1;
        }
    }

    /// Removes all objects from `offset` on.
    pub(super) fn cut(&mut self, offset: u32) {
        let at = self.places.partition_point(|place| (place & !DEAD) * UNIT_BYTES < offset);
        self.live -= self.places[at..].iter().filter(|place| *place & DEAD == 0).count() as u32;
        self.places.truncate(at);
        self.end = self.end.min(offset);
    }

    fn find(&self, offset: u32) -> Option<usize> {
        if !offset.is_multiple_of(UNIT_BYTES) {
            return None;
        }
        self.places.binary_search_by_key(&(offset / UNIT_BYTES), |place| place & !DEAD).ok()
    }
}

#[derive(Debug)]
pub(super) struct Extents {
    records: Vec<Record>,
    by_sequence: BTreeMap<u64, u32>,
    free: VecDeque<u32>,
    /// Counts changes of `by_sequence`.
    pub(super) version: u64,
}

impl Extents {
    pub(super) fn new(geometry: &Geometry) -> Self {
        let records: Vec<Record> = (0..geometry.extents()).map(|_| Record::UNUSED).collect();
        Self { records, by_sequence: BTreeMap::new(), free: VecDeque::new(), version: 0 }
    }

    pub(super) fn slot(&self, slot: u32) -> &Record {
        &self.records[slot as usize]
    }

    pub(super) fn slot_mut(&mut self, slot: u32) -> &mut Record {
        &mut self.records[slot as usize]
    }

    /// The slot of the extent with this sequence.
    pub(super) fn find(&self, sequence: u64) -> Option<u32> {
        self.by_sequence.get(&sequence).copied()
    }

    /// All extents that are not free, oldest first.
    pub(super) fn oldest_first(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        self.by_sequence.iter().map(|(sequence, slot)| (*sequence, *slot))
    }

    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    pub(super) fn count(&self, status: Status) -> usize {
        self.records.iter().filter(|record| record.status == status).count()
    }

    /// Objects that readers can find.
    pub(super) fn live(&self) -> u64 {
        self.records.iter().map(|record| u64::from(record.live)).sum()
    }

    /// Takes a free slot for a new extent.
    pub(super) fn open(&mut self, sequence: u64, stream: Stream) -> Option<u32> {
        let slot = self.free.pop_front()?;
        self.insert(slot, sequence, stream, Status::Open);
        Some(slot)
    }

    pub(super) fn insert(&mut self, slot: u32, sequence: u64, stream: Stream, status: Status) {
        *self.slot_mut(slot) = Record { sequence, stream, status, ..Record::UNUSED };
        self.by_sequence.insert(sequence, slot);
        self.version += 1;
    }

    /// Makes a slot free that contains nothing.
    pub(super) fn add_free(&mut self, slot: u32) {
        *self.slot_mut(slot) = Record::UNUSED;
        self.free.push_back(slot);
    }

    /// Frees an extent that is drained and not touched any more.
    pub(super) fn release(&mut self, slot: u32) {
        let record = self.slot(slot);
        if record.status != Status::Drained || record.pins > 0 {
            return;
        }
        let (bad, sequence) = (record.bad, record.sequence);
        self.by_sequence.remove(&sequence);
        self.version += 1;
        if bad {
            *self.slot_mut(slot) = Record { status: Status::Unusable, bad, ..Record::UNUSED };
        } else {
            self.add_free(slot);
        }
    }

    pub(super) fn pin(&mut self, slot: u32) {
        self.slot_mut(slot).pins += 1;
    }

    pub(super) fn unpin(&mut self, slot: u32) {
        let record = self.slot_mut(slot);
        record.pins = record.pins.saturating_sub(1);
        self.release(slot);
    }

    /// The closed extent to give up first: one without live objects, or else the oldest, where extents of
    /// objects on trial age `weight` times as fast. Only extents that `may` be given up.
    pub(super) fn victim(
        &self,
        next: u64,
        weight: u32,
        mut may: impl FnMut(u32, &Record) -> bool,
    ) -> Option<u32> {
        let closed = self.by_sequence.values().filter(|slot| self.slot(**slot).status == Status::Closed);
        let age = |slot: &u32| {
            let record = self.slot(*slot);
            let weight = if record.stream == Stream::Trial { u64::from(weight) } else { 1 };
            (record.live == 0, (next - record.sequence).saturating_mul(weight))
        };
        closed.filter(|slot| may(**slot, self.slot(**slot))).copied().max_by_key(age)
    }

    /// Estimated bytes of memory.
    pub(super) fn memory_bytes(&self) -> usize {
        let places: usize = self.records.iter().map(|record| record.places.capacity() * 4).sum();
        places + self.records.capacity() * size_of::<Record>() + self.by_sequence.len() * 24
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extents() -> Extents {
        let geometry = Geometry::new((1 << 20) + (8 << 20), 1 << 20, 512).unwrap();
        let mut extents = Extents::new(&geometry);
        (0..8).for_each(|slot| extents.add_free(slot));
        extents
    }

    fn closed(extents: &mut Extents, sequence: u64, stream: Stream) -> u32 {
        let slot = extents.open(sequence, stream).unwrap();
        let record = extents.slot_mut(slot);
        (record.status, record.end) = (Status::Closed, 16_384);
        record.push(4_096);
        record.push(8_192);
        slot
    }

    #[test]
    fn only_beginnings_of_live_images_are_found() {
        let mut extents = extents();
        let slot = closed(&mut extents, 1, Stream::Trial);
        let record = extents.slot_mut(slot);
        assert_eq!((record.bytes_at(4_096), record.bytes_at(8_192)), (Some(4_096), Some(8_192)));
        for offset in [0, 1, 4_095, 4_608, 16_384, u32::MAX] {
            assert_eq!(record.bytes_at(offset), None, "{offset}");
        }
        record.remove(4_096);
        record.remove(4_096);
        assert_eq!((record.bytes_at(4_096), record.live), (None, 1));
        record.cut(4_608);
        assert_eq!((record.bytes_at(8_192), record.live, record.end), (None, 0, 4_608));
    }

    #[test]
    fn the_oldest_goes_first_and_trial_ages_threefold_and_empty_extents_go_before_all() {
        let mut extents = extents();
        let old = closed(&mut extents, 1, Stream::Proven);
        let trial = closed(&mut extents, 5, Stream::Trial);
        let empty = closed(&mut extents, 6, Stream::Proven);
        let any = |_: u32, _: &Record| true;
        assert_eq!(extents.victim(8, 3, any), Some(trial), "3 × 3 is older than 7");
        assert_eq!(extents.victim(20, 1, any), Some(old));
        extents.slot_mut(empty).cut(0);
        assert_eq!(extents.victim(20, 1, any), Some(empty));
        assert_eq!(extents.victim(20, 1, |slot, _| slot != empty), Some(old));
    }

    #[test]
    fn a_drained_extent_is_free_when_nothing_touches_it() {
        let mut extents = extents();
        let slot = closed(&mut extents, 1, Stream::Trial);
        extents.pin(slot);
        extents.slot_mut(slot).status = Status::Drained;
        extents.release(slot);
        assert_eq!((extents.free(), extents.find(1)), (7, Some(slot)));
        extents.unpin(slot);
        assert_eq!((extents.free(), extents.find(1)), (8, None));
    }
}
