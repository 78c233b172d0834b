//! Extents that are written to, from their first batch to their footer.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec;

use te_core::Instant;

use super::extents::Status;
use super::format::{BatchHeader, Extent, Footer, Lists, Mark, Marks, PAGE_BYTES, Stream};
use super::io::{IoError, Piece, Work};
use super::{Disk, Purpose};

/// An extent that has no footer yet.
#[derive(Debug)]
pub(super) struct OpenExtent {
    pub(super) extent: Extent,
    /// Where the next batch begins.
    pub(super) at: u32,
    /// Of all batches, for the footer.
    pub(super) lists: Lists,
    /// Batches that are not durable: their number, where they end, and the count of completed writes when
    /// they were completed.
    pub(super) pending: BTreeMap<u64, (u32, Option<u64>)>,
    /// Everything below is durable.
    pub(super) durable_to: u32,
}

impl OpenExtent {
    pub(super) const fn new(extent: Extent) -> Self {
        Self { extent, at: 0, lists: Lists::new(), pending: BTreeMap::new(), durable_to: 0 }
    }

    /// Whether a batch with lists of `list_bytes` and images of `image_bytes`, and the footer behind it, have
    /// room.
    pub(super) fn has_room(&self, extent_bytes: u32, list_bytes: usize, image_bytes: u32) -> bool {
        let footer = Footer::bytes(self.lists.bytes() + list_bytes);
        let batch = (BatchHeader::bytes(list_bytes) + image_bytes).next_multiple_of(PAGE_BYTES);
        u64::from(self.at) + u64::from(batch) + u64::from(footer) <= u64::from(extent_bytes)
    }

    /// What was written by this tick is durable. Adds the batches that recovery finds: those behind which no
    /// earlier one is missing.
    fn advance(&mut self, tick: u64, batches: &mut BTreeSet<u64>) {
        while let Some(first) = self.pending.first_entry()
            && let (end, Some(at)) = *first.get()
            && at <= tick
        {
            self.durable_to = end;
            batches.insert(*first.key());
            first.remove();
        }
    }
}

impl Disk {
    pub(super) fn open_extent(&mut self, stream: Stream) -> bool {
        let sequence = self.writing.next_sequence;
        if sequence >= self.durable.current.sequences_end {
            return false;
        }
        let Some(slot) = self.extents.open(sequence, stream) else { return false };
        self.writing.next_sequence += 1;
        self.reserve_sequences();
        let extent = Extent { disk: self.uuid, lineage: self.lineage, slot, sequence, stream };
        self.writing.open[stream.index()] = Some(OpenExtent::new(extent));
        true
    }

    /// The open extent gets no further batch.
    pub(super) fn close(&mut self, stream: Stream) {
        if let Some(open) = self.writing.open[stream.index()].take() {
            let record = self.extents.slot_mut(open.extent.slot);
            record.status = Status::Closing;
            record.shrink();
            self.writing.closing.push(open);
            self.writing.closing.sort_by_key(|open| open.extent.sequence);
        }
    }

    pub(super) fn close_all(&mut self) {
        Stream::ALL.into_iter().for_each(|stream| self.close(stream));
    }

    /// A write to an extent failed: nothing more is written to it, and it is given up.
    pub(super) fn fail_extent(&mut self, now: Instant, slot: u32, sequence: u64) {
        let writing = &mut self.writing;
        let is_it = |open: &OpenExtent| open.extent.sequence == sequence;
        let open = writing.open.iter_mut().find_map(|open| open.take_if(|open| is_it(open)));
        let closing = || writing.closing.iter().position(is_it).map(|at| writing.closing.remove(at));
        let known = writing.failed.iter().any(is_it);
        // An extent that only lacks its footer is durable otherwise.
        let stream = self.extents.slot(slot).stream;
        let closed = Extent { disk: self.uuid, lineage: self.lineage, slot, sequence, stream };
        if let Some(open) = open.or_else(closing).or_else(|| (!known).then(|| OpenExtent::new(closed))) {
            writing.failed.push(open);
        }
        let record = self.extents.slot_mut(slot);
        (record.status, record.bad) = (Status::Closed, true);
        self.tombstones.lost(now, sequence);
    }

    /// Up to where each stream is synced: positions in the first extent that is not.
    pub(super) fn marks(&self, but: impl Fn(u32) -> bool) -> [Mark; 2] {
        let writing = &self.writing;
        let unfinished = || writing.open.iter().flatten().chain(&writing.closing).chain(&writing.failed);
        Stream::ALL.map(|stream| {
            let behind = unfinished().filter(|open| {
                let is_open =
                    writing.open[stream.index()].as_ref().is_some_and(|it| it.extent == open.extent);
                open.extent.stream == stream
                    && (is_open || open.durable_to < open.at)
                    && !but(open.extent.slot)
            });
            let first = behind.min_by_key(|open| open.extent.sequence);
            let all = Mark { sequence: writing.next_sequence, offset: 0 };
            first.map_or(all, |open| Mark { sequence: open.extent.sequence, offset: open.durable_to })
        })
    }

    pub(super) fn next_marks(&mut self) -> Marks {
        let serial = self.writing.next_serial;
        self.writing.next_serial += 1;
        Marks { serial, streams: self.marks(|_| false) }
    }

    /// What was written by this tick is durable. Returns the batches that recovery finds from now on.
    pub(super) fn advance(&mut self, tick: u64) -> BTreeSet<u64> {
        let mut batches = BTreeSet::new();
        let writing = &mut self.writing;
        let open = writing.open.iter_mut().flatten();
        open.chain(&mut writing.closing).for_each(|open| open.advance(tick, &mut batches));
        batches
    }

    /// Writes footers of extents whose batches are all durable: a footer is believed without a look at the
    /// data.
    pub(super) fn write_footers(&mut self, now: Instant) {
        let durable = |open: &OpenExtent| open.pending.is_empty();
        while let Some(at) = self.writing.closing.iter().position(durable) {
            let open = self.writing.closing.remove(at);
            // During a recovery not everything is known to be intact that a new mark would cover.
            let marks = self.opening.as_ref().map(|opening| opening.marks());
            let marks = marks.unwrap_or_else(|| self.next_marks());
            let footer = Footer::encode(&open.extent, open.at, &marks, &open.lists);
            let slot = open.extent.slot;
            let end = self.geometry.extent_at(slot) + u64::from(self.geometry.extent_bytes());
            self.counters.header_bytes_total += footer.len() as u64;
            self.wear.charge(now, footer.len() as u64);
            self.extents.pin(slot);
            let offset = end - footer.len() as u64;
            let pieces = vec![Piece::Bytes(footer.into(), 0)];
            self.ops.order(now, Purpose::Footer { slot }, offset, Work::Write(pieces));
        }
    }

    pub(super) fn footer_ended(&mut self, now: Instant, slot: u32, error: Option<IoError>) {
        self.extents.unpin(slot);
        if self.extents.slot(slot).status != Status::Closing {
            return;
        }
        let record = self.extents.slot_mut(slot);
        record.status = Status::Closed;
        let sequence = record.sequence;
        match error {
            None => {
                self.durable.wrote(now, u64::from(PAGE_BYTES));
            }
            Some(error) => {
                self.counters.write_errors_total += 1;
                self.fail_extent(now, slot, sequence);
                self.withhold(slot, sequence);
                if error != IoError::NoSpace {
                    self.count_error(now);
                }
            }
        }
    }
}
