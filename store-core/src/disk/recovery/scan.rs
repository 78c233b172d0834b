//! The scan: the last page and the first header of every extent.

use te_core::Instant;

use super::super::Disk;
use super::super::extents::Status;
use super::super::format::{BatchHeader, Extent, Footer, PAGE_BYTES, Stream};
use super::{Found, Phase, Probe, RECORDS_PER_STREAM};

/// Slots that are scanned at a time.
const SCANNED_MAX: usize = 16;

/// What was read of one slot.
#[derive(Debug, Default)]
pub(super) struct Scanned {
    ended: u32,
    /// The last page, or the first one, cannot be read.
    unreadable: bool,
    headless: bool,
    /// By its footer.
    tail: Option<Found>,
    /// By its first header.
    head: Option<Found>,
}

impl Disk {
    pub(super) fn scan(&mut self, now: Instant) {
        while let Some(opening) = &mut self.opening
            && opening.scanned.len() < SCANNED_MAX
            && opening.next_slot < self.geometry.extents()
        {
            let slot = opening.next_slot;
            opening.next_slot += 1;
            if self.durable.wanted.bad.contains(&slot) {
                let record = self.extents.slot_mut(slot);
                (record.status, record.bad) = (Status::Unusable, true);
                continue;
            }
            opening.scanned.insert(slot, Scanned::default());
            self.probe_end(now, Probe::Tail(slot), slot, PAGE_BYTES);
            self.probe(now, Probe::Head(slot), self.geometry.extent_at(slot), PAGE_BYTES);
        }
        if self.opening.as_ref().is_some_and(|opening| opening.scanned.is_empty()) {
            self.scan_ended();
        }
    }

    pub(super) fn tail_read(&mut self, slot: u32, bytes: Option<&[u8]>) {
        let tail = bytes.and_then(|bytes| Footer::decode_tail(bytes, &self.uuid, &self.geometry, slot));
        let Some(opening) = &mut self.opening else { return };
        let Some(scanned) = opening.scanned.get_mut(&slot) else { return };
        scanned.unreadable |= bytes.is_none();
        if let Some(Footer { extent, footer_bytes, end, marks, .. }) = tail {
            opening.marks = opening.marks.max(marks);
            scanned.tail = Some(Found { extent, footer_bytes, end });
        }
        self.slot_scanned(slot);
    }

    pub(super) fn head_read(&mut self, now: Instant, slot: u32, bytes: Option<&[u8]>) {
        if let Some(bytes) = bytes
            && let Some(announced) = BatchHeader::announced_bytes(bytes, &self.geometry)
            && bytes.len() < announced as usize
        {
            return self.probe(now, Probe::Head(slot), self.geometry.extent_at(slot), announced);
        }
        let head = bytes.and_then(|bytes| BatchHeader::decode(bytes, &self.uuid, &self.geometry, slot, 0));
        let Some(opening) = &mut self.opening else { return };
        let Some(scanned) = opening.scanned.get_mut(&slot) else { return };
        scanned.unreadable |= bytes.is_none();
        scanned.headless = bytes.is_none();
        if let Some(header) = head {
            opening.marks = opening.marks.max(header.marks);
            scanned.head = Some(Found { extent: header.extent, footer_bytes: 0, end: 0 });
        }
        self.slot_scanned(slot);
    }

    /// One of the two reads of a slot has ended.
    fn slot_scanned(&mut self, slot: u32) {
        let Some(opening) = &mut self.opening else { return };
        let Some(scanned) = opening.scanned.get_mut(&slot) else { return };
        scanned.ended += 1;
        if scanned.ended < 2 {
            return;
        }
        let Some(Scanned { unreadable, headless, tail, head, .. }) = opening.scanned.remove(&slot) else {
            return;
        };
        // A new extent was begun where the footer of an old one is left, or its first header is damaged.
        let newest = |a: &Found| (a.extent.sequence, a.footer_bytes);
        let found = tail.into_iter().chain(head).max_by_key(newest);
        match found {
            Some(found) if found.extent.sequence >= self.durable.wanted.floor => {
                opening.found.insert(found.extent.sequence, found);
            }
            None if unreadable => {
                // Tombstones may be behind the page.
                opening.distrusted |= headless;
                self.durable.wanted.bad.insert(slot);
                self.extents.slot_mut(slot).status = Status::Unusable;
            }
            _ => {}
        }
    }

    fn scan_ended(&mut self) {
        let Some(opening) = &mut self.opening else { return };
        opening.phase = Phase::Records;
        if let Some((last, _)) = opening.found.last_key_value() {
            self.writing.next_sequence = self.writing.next_sequence.max(last + 1);
        }
        for stream in Stream::ALL {
            let of_stream = opening.found.iter().rev().filter(|(_, found)| found.extent.stream == stream);
            for (sequence, found) in of_stream.take(RECORDS_PER_STREAM) {
                if found.footer_bytes > 0 {
                    opening.to_check.push_back(*sequence);
                }
            }
        }
        let unfinished = opening.found.iter().filter(|(_, found)| found.footer_bytes == 0);
        opening.to_walk = unfinished.map(|(sequence, _)| *sequence).collect();
        for (sequence, found) in &opening.found {
            let Extent { slot, stream, .. } = found.extent;
            self.extents.insert(slot, *sequence, stream, Status::Closed);
            self.extents.slot_mut(slot).end = found.end;
        }
    }
}
