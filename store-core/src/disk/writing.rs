//! Batches: how objects get to the disk.
//!
//! Objects wait in a queue per stream. A batch takes what fits into the open extent of the stream and is one
//! contiguous write. An extent without room is closed: when all its batches are durable, its footer follows.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;

use te_core::Instant;

use super::extents::Status;
use super::format::{BatchHeader, Entry, Extent, Lists, Marks, PAGE_BYTES, Stream};
use super::io::{IoError, Piece, Work};
use super::message::{Demote, Event, Failure, Refused, State};
use super::open::OpenExtent;
use super::tombstones::Removed;
use super::{Disk, Purpose};
use crate::chunks::stored_len;
use crate::wire::KEY_BYTES_MAX;

/// What is being written.
#[derive(Debug)]
pub(super) struct Writing {
    queues: [VecDeque<Waiting>; 2],
    queue_bytes: [u64; 2],
    in_flight: [u32; 2],
    /// The open extents.
    pub(super) open: [Option<OpenExtent>; 2],
    /// Extents without room that have no footer yet, oldest first.
    pub(super) closing: Vec<OpenExtent>,
    /// Extents in which a write failed, until recovery knows that it has to ignore them.
    pub(super) failed: Vec<OpenExtent>,
    pub(super) next_sequence: u64,
    pub(super) next_serial: u64,
}

impl Default for Writing {
    fn default() -> Self {
        Self {
            queues: Default::default(),
            queue_bytes: [0; 2],
            in_flight: [0; 2],
            open: [None, None],
            closing: Vec::new(),
            failed: Vec::new(),
            next_sequence: 1,
            next_serial: 1,
        }
    }
}

#[derive(Debug)]
struct Waiting {
    since: Instant,
    image_bytes: u32,
    request: Demote,
}

/// A batch that is being written.
#[derive(Debug)]
pub(super) struct Batch {
    slot: u32,
    sequence: u64,
    stream: Stream,
    marks: Marks,
    bytes: u32,
    items: Vec<Item>,
}

#[derive(Debug)]
struct Item {
    id: u64,
    object: Removed,
    offset: u32,
    len: u64,
}

/// What fits into the next batch.
struct Fit {
    dead_bytes: usize,
    list_bytes: usize,
    image_bytes: u32,
}

impl Fit {
    const fn lists(&self) -> usize {
        self.dead_bytes + self.list_bytes
    }
}

impl Disk {
    /// Queues an object for the disk. Answered by [`Event::Demoted`] or [`Event::DemoteFailed`].
    ///
    /// # Errors
    /// `Busy`: the queue is full, or the disk does not answer or is not ready. `ReadOnly`. `Unsuitable`: the
    /// length or the key. `Removed`.
    pub fn demote(&mut self, now: Instant, request: Demote) -> Result<(), Refused> {
        match self.state {
            State::ReadOnly(_) | State::Failed(_) => return Err(Refused::ReadOnly),
            State::Opening | State::Adopting => return Err(self.busy()),
            State::Ready => {}
        }
        let image_bytes = self.geometry.image_bytes(request.len);
        if image_bytes == 0 || !(1..=KEY_BYTES_MAX).contains(&request.key.len()) {
            return Err(Refused::Unsuitable);
        }
        let (tenant, generation) = (request.tenant, request.generation);
        let object = Removed { generation, tenant, key: request.key.clone() };
        if self.tombstones.contains(&object) {
            return Err(Refused::Removed);
        }
        let count: usize = self.writing.queues.iter().map(VecDeque::len).sum();
        let bytes: u64 = self.writing.queue_bytes.iter().sum::<u64>() + u64::from(image_bytes);
        let full = count >= self.config.queue_objects_max as usize
            || count > 0 && bytes > self.config.queue_bytes_max;
        if full || self.is_stalled(now) {
            return Err(self.busy());
        }
        let stream = request.stream.index();
        self.writing.queue_bytes[stream] += u64::from(image_bytes);
        self.writing.queues[stream].push_back(Waiting { since: now, image_bytes, request });
        self.proceed(now);
        Ok(())
    }

    pub(super) const fn busy(&mut self) -> Refused {
        self.counters.busy_total += 1;
        Refused::Busy
    }

    /// Removes an object that waits from its queue.
    pub(super) fn cancel_queued(&mut self, object: &Removed) {
        let same = |waiting: &Waiting| {
            let request = &waiting.request;
            request.generation == object.generation
                && request.tenant == object.tenant
                && request.key == object.key
        };
        for (queue, bytes) in self.writing.queues.iter_mut().zip(&mut self.writing.queue_bytes) {
            queue.retain(|waiting| {
                let cancel = same(waiting);
                if cancel {
                    *bytes -= u64::from(waiting.image_bytes);
                    let id = waiting.request.id;
                    self.events.push_back(Event::DemoteFailed { id, why: Failure::Removed });
                }
                !cancel
            });
        }
    }

    pub(super) fn fail_queue(&mut self, why: Failure) {
        for waiting in self.writing.queues.iter_mut().flat_map(|queue| queue.drain(..)) {
            self.events.push_back(Event::DemoteFailed { id: waiting.request.id, why });
        }
        self.writing.queue_bytes = [0; 2];
    }

    fn batch_wait(&self) -> Duration {
        Duration::from_millis(self.config.batch_wait_ms.into())
    }

    /// When batches are to be written at the latest: of each stream, and of tombstones.
    pub(super) fn batches_due_at(&self) -> [Option<Instant>; 3] {
        let (wait, open_at) = (self.batch_wait(), self.wear.open_at());
        let [trial, proven] = &self.writing.queues;
        let first = [trial, proven].map(|queue| queue.front().map(|waiting| waiting.since));
        [first[0], first[1], self.tombstones.wanted_since()].map(|since| Some((since? + wait).max(open_at)))
    }

    pub(super) fn write_batches(&mut self, now: Instant) {
        for stream in Stream::ALL {
            while self.is_due(now, stream) && self.write_batch(now, stream) {}
        }
        let due = self.tombstones.wanted_since().is_some_and(|since| since + self.batch_wait() <= now);
        if due {
            let open = Stream::ALL.into_iter().find(|stream| self.writing.open[stream.index()].is_some());
            self.write_batch(now, open.unwrap_or_default());
        }
    }

    fn is_due(&self, now: Instant, stream: Stream) -> bool {
        let index = stream.index();
        let full = self.writing.queue_bytes[index] >= u64::from(self.config.batch_bytes);
        let first = self.writing.queues[index].front();
        first.is_some_and(|first| full || first.since + self.batch_wait() <= now)
            && self.writing.in_flight[index] < self.config.batches_max
            && self.wear.open_at() <= now
    }

    /// Writes the next batch of a stream: objects that wait, and tombstones. Returns `false` where there is
    /// no extent to write it to.
    fn write_batch(&mut self, now: Instant, stream: Stream) -> bool {
        let index = stream.index();
        let extent_bytes = self.geometry.extent_bytes();
        loop {
            let Some(open) = &self.writing.open[index] else {
                if self.open_extent(stream) { continue } else { return false }
            };
            let mut fit =
                Fit { dead_bytes: self.tombstones.list_bytes(open.at == 0), list_bytes: 0, image_bytes: 0 };
            let mut count = 0;
            for waiting in &self.writing.queues[index] {
                let more = Fit {
                    list_bytes: fit.list_bytes + Entry::bytes(waiting.request.key.len()),
                    image_bytes: fit.image_bytes + waiting.image_bytes,
                    ..fit
                };
                let long = count > 0 && more.image_bytes > self.config.batch_bytes;
                if long || !open.has_room(extent_bytes, more.lists(), more.image_bytes) {
                    break;
                }
                (fit, count) = (more, count + 1);
            }
            let nothing = count == 0
                && (!self.writing.queues[index].is_empty()
                    || !open.has_room(extent_bytes, fit.lists(), fit.image_bytes));
            if nothing && open.at > 0 {
                self.close(stream);
                continue;
            }
            if count == 0 && fit.dead_bytes == 0 {
                return false;
            }
            self.send_batch(now, stream, count, &fit);
            return true;
        }
    }

    fn send_batch(&mut self, now: Instant, stream: Stream, count: usize, fit: &Fit) {
        let index = stream.index();
        let marks = self.next_marks();
        let Some(open) = &mut self.writing.open[index] else { return };
        let header_bytes = BatchHeader::bytes(fit.lists());
        let mut lists = Lists::new();
        self.tombstones.take(open.at == 0, open.extent.sequence, marks.serial, &mut lists);
        let mut pieces = vec![Piece::Zeros(0)];
        let mut items = Vec::with_capacity(count);
        let mut at = open.at + header_bytes;
        let record = self.extents.slot_mut(open.extent.slot);
        for Waiting { image_bytes, request, .. } in self.writing.queues[index].drain(..count) {
            let Demote { id, tenant, key, generation, len, crc32c, token, .. } = request;
            lists.push(&Entry { tenant, key: &key, generation, len: len as u32, crc32c, offset: at });
            let bytes = stored_len(len) as u32;
            pieces.push(Piece::Source { token, offset: 0, bytes });
            if image_bytes > bytes {
                pieces.push(Piece::Zeros(image_bytes - bytes));
            }
            record.push(at);
            items.push(Item { id, object: Removed { generation, tenant, key }, offset: at, len });
            at += image_bytes;
            self.writing.queue_bytes[index] -= u64::from(image_bytes);
        }
        let (from, end) = (open.at, at.next_multiple_of(PAGE_BYTES));
        if end > at {
            pieces.push(Piece::Zeros(end - at));
        }
        let header = BatchHeader::encode(&open.extent, from, end - from - header_bytes, &marks, &lists);
        pieces[0] = Piece::Bytes(header.into(), 0);
        open.lists.append(&lists);
        open.pending.insert(marks.serial, (end, None));
        open.at = end;
        record.end = end;
        let Extent { slot, sequence, .. } = open.extent;
        let bytes = end - from;
        self.extents.pin(slot);
        self.writing.in_flight[index] += 1;
        self.wear.charge(now, bytes.into());
        let data: u64 = items.iter().map(|item| item.len).sum();
        self.counters.object_bytes_total += data;
        self.counters.header_bytes_total += u64::from(header_bytes);
        self.counters.pad_bytes_total += u64::from(bytes - header_bytes) - data;
        let batch = Box::new(Batch { slot, sequence, stream, marks, bytes, items });
        let offset = self.geometry.extent_at(slot) + u64::from(from);
        self.ops.order(now, Purpose::Batch(batch), offset, Work::Write(pieces));
    }

    pub(super) fn batch_ended(&mut self, now: Instant, batch: Batch, error: Option<IoError>) {
        self.extents.unpin(batch.slot);
        self.writing.in_flight[batch.stream.index()] -= 1;
        let known = self.extents.find(batch.sequence).is_some();
        let valid = known && self.extents.slot(batch.slot).status != Status::Wiping;
        let why = match error {
            _ if !valid || self.state != State::Ready => Some(Failure::Abandoned),
            Some(_) => Some(Failure::Device),
            None => None,
        };
        if let Some(why) = why {
            for item in batch.items {
                if valid {
                    self.extents.slot_mut(batch.slot).remove(item.offset);
                }
                self.events.push_back(Event::DemoteFailed { id: item.id, why });
            }
        } else {
            self.batch_written(now, batch.marks, &batch);
        }
        if let Some(error) = error {
            self.counters.write_errors_total += 1;
            if valid {
                self.fail_extent(now, batch.slot, batch.sequence);
            }
            if error != IoError::NoSpace {
                self.count_error(now);
            }
        }
    }

    fn batch_written(&mut self, now: Instant, marks: Marks, batch: &Batch) {
        let tick = self.durable.wrote(now, batch.bytes.into());
        self.durable.done_marks = self.durable.done_marks.max(marks);
        let writing = &mut self.writing;
        let unfinished = writing.open.iter_mut().flatten().chain(&mut writing.closing);
        for open in unfinished.filter(|open| open.extent.sequence == batch.sequence) {
            if let Some((_, written)) = open.pending.get_mut(&marks.serial) {
                *written = Some(tick);
            }
        }
        for item in &batch.items {
            let id = item.id;
            if self.tombstones.contains(&item.object) {
                self.extents.slot_mut(batch.slot).remove(item.offset);
                self.events.push_back(Event::DemoteFailed { id, why: Failure::Removed });
            } else {
                let locator = self.geometry.locator(batch.sequence, item.offset);
                self.counters.demoted_total += 1;
                self.events.push_back(Event::Demoted { id, locator });
            }
        }
    }
}
