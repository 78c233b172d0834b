//! Lifts: the pieces of puts whose bytes are copied from a device before they are sent, and what happens when
//! a hop has ended.

use std::collections::VecDeque;
use std::sync::Arc;

use te_core::device::Devices;
use te_core::{Error, ErrorKind, Location, Op, Outcome, RegionId};

use super::hops::UnderWay;
use super::{Cut, FLIGHT_BYTES_MAX, FLIGHT_PIECES_MAX, Flying, Job, Mover, Place, worsen};
use crate::engine::Engine;
use crate::error::{DeviceError, StoreError};
use crate::memory::{BufferRange, Memory};

/// Pieces that are lifted, in the order in which they are sent: checksums are computed in this order.
#[derive(Default)]
pub(super) struct Lifts {
    queue: VecDeque<Lift>,
    number: u64,
    /// Items whose bytes could not be copied from or to a device.
    failed: Vec<(usize, DeviceError)>,
}

struct Lift {
    number: u64,
    piece: Flying,
    is_done: bool,
}

impl Lifts {
    /// Forgets what concerns an earlier operation.
    pub(super) fn begin(&mut self) {
        self.queue.clear();
        self.failed.clear();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Puts a piece first in the queue that was lifted and could not be sent. Returns whether it was lifted.
    pub(super) fn give_back(&mut self, piece: &Flying, job: &mut Job) -> bool {
        let is_lifted = job.transfer.op == Op::Write && matches!(piece.place, Place::InSlot(..));
        if is_lifted {
            job.lifting += 1;
            self.number += 1;
            self.queue.push_front(Lift { number: self.number, piece: *piece, is_done: true });
        }
        is_lifted
    }
}

impl Mover {
    /// The number of the stager for memory at a location of these devices.
    ///
    /// # Errors
    /// `DeviceMemory`, `Memory`.
    pub(crate) fn open_stager(
        &mut self,
        engine: &mut Engine,
        devices: &Arc<dyn Devices>,
        location: Location,
    ) -> Result<usize, StoreError> {
        self.hops.open(engine, devices, location)
    }

    /// How many hops under way, of an earlier operation as well, touch a region of device memory.
    pub(crate) fn hops_of(&mut self, region: RegionId) -> usize {
        self.hops.poll();
        self.hops.uses(region)
    }

    /// Why the bytes of an item could not be copied from or to a device.
    pub(crate) fn device_error(&self, item: usize) -> Option<StoreError> {
        let (_, error) = self.lifts.failed.iter().find(|(failed, _)| *failed == item)?;
        Some(StoreError::DeviceMemory(error.clone()))
    }

    /// Cuts a piece that passes through a slot, from or to a range of device memory, or to parts of it.
    pub(super) fn cut_in_slot(
        &mut self,
        index: usize,
        offset: u64,
        len: u64,
        (region, range): (RegionId, Option<BufferRange>),
        memory: &Memory,
    ) -> Cut {
        let Some(device) = memory.device(region) else { return Cut::Never };
        // Room for whole granules. A slot is at least as long as one, and may end within another.
        let granule = self.jobs[index].granule;
        let room = len.next_multiple_of(granule);
        let Some((at, taken)) = self.hops.take(device.stager, room) else { return Cut::NoRoom };
        let len = len.min(taken - taken % granule);
        let place = Place::InSlot(at, range.map(|range| BufferRange { len, ..range }));
        Cut::Piece(Flying { job: index, at: self.jobs[index].sent, offset, len, place })
    }

    /// Starts the hop of a piece whose bytes come from a device. Returns whether they do.
    pub(super) fn lift(&mut self, piece: &Flying, memory: &Memory) -> bool {
        let job = &mut self.jobs[piece.job];
        let (Op::Write, Place::InSlot(at, Some(range))) = (job.transfer.op, piece.place) else {
            return false;
        };
        job.lifting += 1;
        self.lifts.number += 1;
        let number = self.lifts.number;
        self.lifts.queue.push_back(Lift { number, piece: *piece, is_done: false });
        match memory.device_span(range) {
            Some(span) => self.hops.lift(piece.job, number, at, (range, span)),
            // The range was checked before the operation.
            None => {
                worsen(&mut job.outcome, Outcome::NotApplied);
                self.lifted(number);
            }
        }
        true
    }

    /// Adds the pieces to a flight that have been lifted, as long as there is room. Returns their bytes.
    pub(super) fn send_lifted(&mut self, pieces: &mut Vec<Flying>) -> u64 {
        let mut bytes = 0;
        while self.lifts.queue.front().is_some_and(|lift| lift.is_done)
            && pieces.len() < FLIGHT_PIECES_MAX
            && bytes < FLIGHT_BYTES_MAX
            && let Some(Lift { piece, .. }) = self.lifts.queue.pop_front()
        {
            let job = &mut self.jobs[piece.job];
            job.lifting -= 1;
            if job.outcome != Outcome::Applied {
                job.in_flight -= 1;
                self.give_back(piece);
                self.end_if_over(piece.job);
                continue;
            }
            self.request(&piece);
            bytes += piece.len;
            pieces.push(piece);
        }
        bytes
    }

    /// Processes hops that have ended, and gives up those that do not end. Returns whether there were any.
    pub(super) fn reap_hops(&mut self) -> bool {
        self.hops.poll();
        let mut any = false;
        while let Some((hop, result)) = self.hops.next_ended() {
            any = true;
            if let Err(error) = result {
                self.hop_failed(&hop, error);
            }
            match hop.lift {
                Some(number) => self.lifted(number),
                None => {
                    self.jobs[hop.job].hops -= 1;
                    self.end_if_over(hop.job);
                }
            }
        }
        if self.hops.hang() {
            self.give_up_hops();
        }
        any
    }

    fn hop_failed(&mut self, hop: &UnderWay, error: Error) {
        let job = &mut self.jobs[hop.job];
        worsen(&mut job.outcome, Outcome::NotApplied);
        let location = self.hops.location(hop);
        let failed = match error.kind {
            // The stager asks the driver again, and it is not memory of the device any more.
            ErrorKind::InvalidArgument => DeviceError::Stale { location, addr: hop.addr },
            _ => DeviceError::Failed { location, error },
        };
        self.lifts.failed.push((job.transfer.item as usize, failed));
    }

    /// The bytes of a piece are in its slot, or its transfer has failed.
    fn lifted(&mut self, number: u64) {
        let Some(at) = self.lifts.queue.iter().position(|lift| lift.number == number) else { return };
        let Lift { piece, .. } = self.lifts.queue[at];
        let job = &mut self.jobs[piece.job];
        if job.outcome == Outcome::Applied {
            self.lifts.queue[at].is_done = true;
            return;
        }
        self.lifts.queue.remove(at);
        job.lifting -= 1;
        job.in_flight -= 1;
        self.give_back(piece);
        self.end_if_over(piece.job);
    }

    /// Gives up the hops of transfers that were ended early: their device hangs.
    fn give_up_hops(&mut self) {
        let jobs = &self.jobs;
        let given_up = self.hops.give_up(|job| jobs[job].outcome != Outcome::Applied);
        if given_up.is_empty() {
            return;
        }
        log::error!(
            "{} copies from or to a device do not end: their memory is not used before they do: check the device",
            given_up.len()
        );
        for hop in given_up {
            match hop.lift {
                Some(number) => self.lifted(number),
                None => {
                    let job = &mut self.jobs[hop.job];
                    job.hops -= 1;
                    self.spoiled.push(job.transfer.item as usize);
                    self.end_if_over(hop.job);
                }
            }
        }
    }
}
