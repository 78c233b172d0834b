//! Reads of images into buffers of readers.
//!
//! A read is bounded by the deadline of its reader, not by the disk: at the deadline the reader gets its
//! answer, and the buffer stays taken until the order has ended.

use te_core::Instant;

use super::extents::Status;
use super::io::{Target, Work};
use super::message::{Event, Failure, Refused, Stage, State};
use super::{Disk, Purpose};

/// What is being read.
#[derive(Debug, Default)]
pub(super) struct Reads {
    count: u32,
    bytes: u64,
}

#[derive(Debug)]
pub(super) struct Flight {
    id: u64,
    token: u64,
    deadline: Instant,
    slot: u32,
    bytes: u32,
    len: u64,
    /// The reader was told that its deadline had passed.
    expired: bool,
}

impl Disk {
    /// Reads the image of an object, data and trailer, to the beginning of a buffer. Answered by
    /// [`Event::Staged`] or [`Event::ReadFailed`].
    ///
    /// The disk knows nothing about keys and generations. The reader verifies what was read, with the
    /// checksum that the master keeps ([`crate::bound`]).
    ///
    /// # Errors
    /// `Gone`: there is nothing at this locator, and there never will be. `Absent`: there is nothing so far.
    /// `OtherLength`: the object there does not have this length. `Busy`: too much is being read, the disk is
    /// being opened, does not answer or has failed, or the deadline has passed.
    pub fn stage(&mut self, now: Instant, request: Stage) -> Result<(), Refused> {
        let Stage { id, locator, len, token, deadline } = request;
        let (sequence, offset) = self.geometry.place(locator);
        let bytes = self.geometry.image_bytes(len);
        let Some((slot, room)) = self.image_at(sequence, offset) else { return Err(self.missing(sequence)) };
        if bytes == 0 || bytes > room {
            return Err(Refused::OtherLength);
        }
        let reads = &self.reads;
        let full = reads.count >= self.config.reads_max
            || reads.count > 0 && reads.bytes + u64::from(bytes) > self.config.read_bytes_max;
        if full || deadline <= now || self.is_stalled(now) {
            return Err(self.busy());
        }
        self.reads.count += 1;
        self.reads.bytes += u64::from(bytes);
        self.extents.pin(slot);
        let flight = Flight { id, token, deadline, slot, bytes, len, expired: false };
        let at = self.geometry.extent_at(slot) + u64::from(offset);
        let work = Work::Read { bytes, into: Target::Buffer { token, offset: 0 } };
        self.ops.order(now, Purpose::Stage(flight), at, work);
        Ok(())
    }

    /// The slot of an image, and the bytes up to the next one. What a reader says about its length has no
    /// part in it.
    fn image_at(&self, sequence: u64, offset: u32) -> Option<(u32, u32)> {
        let slot = self.extents.find(sequence)?;
        let record = self.extents.slot(slot);
        let there = record.status != Status::Drained && !matches!(self.state, State::Failed(_));
        Some((slot, record.bytes_at(offset).filter(|_| there)?))
    }

    /// What it means that nothing is at a locator in this extent. The owner of the disk believes `Gone`, so
    /// it must not be said of what a recovery or a batch may still bring.
    fn missing(&mut self, sequence: u64) -> Refused {
        if matches!(self.state, State::Opening | State::Adopting | State::Failed(_)) {
            return self.busy();
        }
        let open = |slot| self.extents.slot(slot).status == Status::Open;
        let grows = sequence >= self.writing.next_sequence || self.extents.find(sequence).is_some_and(open);
        if grows { Refused::Absent } else { Refused::Gone }
    }

    pub(super) fn stage_ended(&mut self, now: Instant, flight: &Flight, ok: bool) {
        let Flight { id, token, slot, bytes, len, expired, .. } = *flight;
        self.extents.unpin(slot);
        self.reads.count -= 1;
        self.reads.bytes -= u64::from(bytes);
        if expired {
            self.events.push_back(Event::BufferFree { token });
        } else if ok {
            self.counters.staged_total += 1;
            self.counters.staged_bytes_total += len;
            self.events.push_back(Event::Staged { id });
        } else {
            self.events.push_back(Event::ReadFailed { id, why: Failure::Device, buffer_free: true });
        }
        if !ok {
            self.counters.read_errors_total += 1;
            self.count_error(now);
        }
    }

    /// When the next deadline of a reader passes.
    pub(super) fn reads_due_at(&self) -> Option<Instant> {
        if self.reads.count == 0 {
            return None;
        }
        let deadline = |purpose: &Purpose| match purpose {
            Purpose::Stage(flight) if !flight.expired => Some(flight.deadline),
            _ => None,
        };
        self.ops.purposes().filter_map(deadline).min()
    }

    /// Answers readers whose deadline has passed.
    pub(super) fn expire_reads(&mut self, now: Instant) {
        if self.reads.count == 0 {
            return;
        }
        for purpose in self.ops.purposes_mut() {
            if let Purpose::Stage(flight) = purpose
                && !flight.expired
                && flight.deadline <= now
            {
                flight.expired = true;
                let (id, why) = (flight.id, Failure::Deadline);
                self.events.push_back(Event::ReadFailed { id, why, buffer_free: false });
            }
        }
    }
}
