//! Extents without a footer: their headers, one after the other, and the data that may not have been synced.

use alloc::vec::Vec;

use te_core::Instant;

use super::super::Disk;
use super::super::crc::crc32c;
use super::super::extents::Status;
use super::super::format::{BatchHeader, Dead, Entry, Lists, PAGE_BYTES};
use super::super::open::OpenExtent;
use super::super::tombstones::Removed;
use super::{Found, Phase, Probe};
use crate::chunks::{CHUNK_BYTES, ChunkSums, stored_len};

/// Most bytes of data that are read at a time: whole chunks.
const PIECE_BYTES: u32 = 16 * CHUNK_BYTES as u32;

/// What is known about the extent that is being walked.
#[derive(Debug)]
pub(super) struct Walk {
    pub(super) found: Found,
    /// Where the next header is.
    at: u32,
    pub(super) objects: Vec<Object>,
    dead: Vec<(Removed, u64)>,
    /// The object that is verified next.
    verified: usize,
    check: Check,
    headers_ended: bool,
}

/// An object in a batch.
#[derive(Debug)]
pub(super) struct Object {
    pub(super) object: Removed,
    pub(super) len: u32,
    pub(super) crc32c: u32,
    pub(super) offset: u32,
    batch_end: u32,
    pub(super) intact: bool,
}

/// The data of one object, as far as it was read.
#[derive(Debug, Default)]
struct Check {
    read: u32,
    sums: ChunkSums,
    trailer: Vec<u8>,
}

impl Walk {
    pub(super) fn new(found: Found) -> Self {
        let (objects, dead) = (Vec::new(), Vec::new());
        Self { found, at: 0, objects, dead, verified: 0, check: Check::default(), headers_ended: false }
    }

    pub(super) const fn end(&self) -> u32 {
        self.at
    }

    fn lists(&self) -> Lists {
        let mut lists = Lists::new();
        for Object { object, len, crc32c, offset, .. } in self.objects.iter().filter(|object| object.intact) {
            let Removed { generation, tenant, key } = object;
            let (tenant, generation, len) = (*tenant, *generation, *len);
            lists.push(&Entry { tenant, key, generation, len, crc32c: *crc32c, offset: *offset });
        }
        for (Removed { generation, tenant, key }, upto) in &self.dead {
            lists.push_dead(&Dead { tenant: *tenant, key, generation: *generation, upto: *upto });
        }
        lists
    }
}

impl Check {
    /// Takes the next bytes of an image whose data has `len` bytes.
    fn add(&mut self, bytes: &[u8], len: u32) {
        let data = bytes.len().min(len.saturating_sub(self.read) as usize);
        let (data, rest) = bytes.split_at(data);
        for chunk in data.chunks(CHUNK_BYTES as usize) {
            self.sums.push(crc32c(0, chunk), chunk.len() as u64);
        }
        self.trailer.extend_from_slice(rest);
        self.read += bytes.len() as u32;
    }

    fn is_intact(&self, object: &Object) -> bool {
        let trailer = self.sums.trailer();
        let right = self.sums.len() == u64::from(object.len) && self.sums.whole() == object.crc32c;
        right && self.trailer.get(..trailer.len()) == Some(trailer)
    }
}

impl Disk {
    /// Begins the next walk, or ends the phase.
    pub(super) fn walk(&mut self, now: Instant) {
        let Some(opening) = &mut self.opening else { return };
        if opening.outstanding > 0 || opening.walk.is_some() {
            return;
        }
        if let Some(sequence) = opening.to_walk.pop_first() {
            let found = opening.found[&sequence];
            opening.walk = Some(Walk::new(found));
            return self.probe_header(now, PAGE_BYTES);
        }
        // Headers up to a mark were synced. Where they are missing, so may be tombstones.
        for mark in opening.marks.streams {
            let exists = opening.found.get(&mark.sequence).is_some_and(|found| found.end >= mark.offset);
            let exists = exists || opening.withheld.contains(&mark.sequence);
            opening.distrusted |= mark.offset > 0 && mark.sequence >= self.durable.wanted.floor && !exists;
        }
        self.walks_ended(now);
    }

    pub(super) fn probe_header(&mut self, now: Instant, bytes: u32) {
        let Some(walk) = self.opening.as_ref().and_then(|opening| opening.walk.as_ref()) else { return };
        let left = self.geometry.extent_bytes() - walk.at;
        let at = self.geometry.extent_at(walk.found.extent.slot) + u64::from(walk.at);
        if bytes > left {
            self.headers_ended(now);
        } else {
            self.probe(now, Probe::Header, at, bytes);
        }
    }

    pub(super) fn header_read(&mut self, now: Instant, bytes: Option<&[u8]>) {
        if let Some(bytes) = bytes
            && let Some(announced) = BatchHeader::announced_bytes(bytes, &self.geometry)
            && bytes.len() < announced as usize
        {
            return self.probe_header(now, announced);
        }
        let Some(opening) = &mut self.opening else { return };
        let Some(walk) = &mut opening.walk else { return };
        let extent = walk.found.extent;
        // A header that cannot be read, other than one that is torn, may have been synced.
        opening.distrusted |= bytes.is_none();
        let header = bytes
            .and_then(|bytes| BatchHeader::decode(bytes, &self.uuid, &self.geometry, extent.slot, walk.at))
            .filter(|header| header.extent == extent);
        let Some(header) = header else { return self.headers_ended(now) };
        walk.at += header.batch_bytes;
        let batch_end = walk.at;
        opening.marks = opening.marks.max(header.marks);
        for Entry { tenant, key, generation, len, crc32c, offset } in header.entries {
            let object = Removed { generation, tenant, key: key.into() };
            walk.objects.push(Object { object, len, crc32c, offset, batch_end, intact: true });
        }
        for Dead { tenant, key, generation, upto } in &header.dead {
            let (tenant, generation) = (*tenant, *generation);
            walk.dead.push((Removed { generation, tenant, key: (*key).into() }, *upto));
        }
        for dead in header.dead {
            self.recover_tombstone(&dead, extent.sequence);
        }
        self.probe_header(now, PAGE_BYTES);
    }

    /// No further header: what was perhaps not synced is verified.
    fn headers_ended(&mut self, now: Instant) {
        let Some(walk) = self.opening.as_mut().and_then(|opening| opening.walk.as_mut()) else { return };
        walk.headers_ended = true;
        self.verify(now);
    }

    fn verify(&mut self, now: Instant) {
        let Some(opening) = &mut self.opening else { return };
        let Some(walk) = &mut opening.walk else { return };
        let extent = walk.found.extent;
        let mark = opening.marks.streams[extent.stream.index()];
        // An extent that should have a footer and has none was damaged, or was being destroyed. An earlier
        // recovery may have left objects out of its footer: everything is verified again.
        let is_last = mark.sequence == extent.sequence;
        while let Some(object) = walk.objects.get(walk.verified) {
            if !(is_last && mark.covers(extent.sequence, object.batch_end)) {
                let image_bytes = self.geometry.image_bytes(object.len.into());
                let left = image_bytes - walk.check.read;
                let at = self.geometry.extent_at(extent.slot) + u64::from(object.offset + walk.check.read);
                return self.probe(now, Probe::Data, at, left.min(PIECE_BYTES));
            }
            walk.verified += 1;
        }
        self.walk_ended(now);
    }

    pub(super) fn data_read(&mut self, now: Instant, bytes: Option<&[u8]>) {
        let Some(walk) = self.opening.as_mut().and_then(|opening| opening.walk.as_mut()) else { return };
        let Some(object) = walk.objects.get_mut(walk.verified) else { return };
        if let Some(bytes) = bytes {
            walk.check.add(bytes, object.len);
        }
        if bytes.is_none() || u64::from(walk.check.read) >= stored_len(object.len.into()) {
            object.intact = bytes.is_some() && walk.check.is_intact(object);
            self.counters.torn_total += u64::from(!object.intact);
            walk.check = Check::default();
            walk.verified += 1;
        }
        self.verify(now);
    }

    fn walk_ended(&mut self, now: Instant) {
        let Some(opening) = &mut self.opening else { return };
        let Some(walk) = opening.walk.take() else { return };
        if opening.phase == Phase::Adopt {
            return self.adopt_walked(now, walk);
        }
        let Some(found) = opening.found.get_mut(&walk.found.extent.sequence) else { return };
        // The tail of a damaged footer says where the batches end, and tombstones may be in any of them.
        // Without a first header either, the extent was being destroyed, and they are recorded elsewhere.
        opening.distrusted |= walk.at > 0 && found.end > walk.at;
        found.end = walk.at;
        let lists = walk.lists();
        found.footer_bytes = super::Footer::bytes(lists.bytes());
        let extent = walk.found.extent;
        let record = self.extents.slot_mut(extent.slot);
        (record.status, record.end) = (Status::Closing, walk.at);
        let end = walk.at;
        self.writing.closing.push(OpenExtent { at: end, lists, durable_to: end, ..OpenExtent::new(extent) });
    }
}
