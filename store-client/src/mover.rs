//! Moves the bytes that an operation asks for, in pieces, and checksums them on the way.
//!
//! ```text
//!   Transfer ─▶ job ─▶ pieces of 256 KiB ─▶ flights (one engine batch each) ─▶ checksummed, in order ─▶ TransferEnd
//!                        │ registered range: straight from or into it
//!                        └ plain bytes: by way of the bounce buffer
//! ```
//!
//! Pieces land in the order in which they were sent, whatever the order in which they arrive, so the checksum of a job can be
//! taken piece by piece while the bytes are still in the cache and later pieces are on their way.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use store_core::SegmentNo;
use store_core::client::{Transfer, TransferEnd};
use te_core::{ErrorKind, Op, Outcome};
use te_engine::{BatchHandle, LocalAddr, RegionId, SegmentHandle, TransferError, TransferRequest};

use crate::bounce::{Bounce, Piece};
use crate::checksum::Checksum;
use crate::fabric::{self, Fabric};
use crate::memory::{BufferRange, Memory};
use crate::quarantine::Quarantine;

/// Bytes checksummed at a time: few enough to stay in the second-level cache.
const PIECE_BYTES: u64 = 256 << 10;
/// Bytes of one engine batch, beyond its first piece. Fewer and larger ones leave a rail fewer gaps.
const FLIGHT_BYTES_MAX: u64 = 1 << 20;
/// Pieces of one engine batch.
const FLIGHT_PIECES_MAX: usize = 128;
/// Engine batches under way.
const FLIGHTS_MAX: usize = 64;

/// Where the bytes of an operation's items come from or go to.
pub(crate) enum Buffers<'a> {
    /// Registered memory, either way.
    Ranges(&'a [(&'a [u8], BufferRange)]),
    /// Plain bytes to put.
    Sources(&'a [(&'a [u8], &'a [u8])]),
    /// Plain bytes to get, made when their length is known.
    Sinks(&'a mut [Option<Vec<u8>>]),
}

impl Buffers<'_> {
    /// Bytes of an item.
    pub(crate) fn len(&self, item: usize) -> u64 {
        match self {
            Self::Ranges(items) => items[item].1.len,
            Self::Sources(items) => items[item].1.len() as u64,
            Self::Sinks(sinks) => sinks[item].as_ref().map_or(0, |sink| sink.len() as u64),
        }
    }
}

/// What is moved for one operation at a time.
pub(crate) struct Mover {
    bounce: Bounce,
    jobs: Vec<Job>,
    /// Jobs with bytes that are not yet sent, first come first served.
    pending: VecDeque<usize>,
    flights: VecDeque<Flight>,
    ended: VecDeque<(Transfer, TransferEnd)>,
    /// Checksums of what is put, item by item.
    sums: Vec<Sum>,
    /// How often each item was started.
    starts: Vec<u8>,
    requests: Vec<TransferRequest>,
    spare: Vec<Vec<Flying>>,
    /// Segments whose owner turned out to be gone or another.
    failed_segments: Vec<SegmentNo>,
    quarantine: Quarantine,
    /// Items whose range a fabric may still write: they are not read any further.
    spoiled: Vec<usize>,
    /// Segments to which a write of this operation may still be under way, whatever a fence says.
    unfenceable: Vec<SegmentNo>,
}

struct Job {
    transfer: Transfer,
    handle: SegmentHandle,
    sent: u64,
    in_flight: u32,
    /// Of what was read.
    checksum: Checksum,
    outcome: Outcome,
    fence_needed: bool,
    over: bool,
}

#[derive(Clone, Copy, Default)]
struct Sum {
    checksum: Checksum,
    at: u64,
}

struct Flight {
    batch: BatchHandle,
    pieces: Vec<Flying>,
    /// Pieces that are in place and checksummed, from the first on.
    landed: usize,
}

#[derive(Clone, Copy)]
struct Flying {
    job: usize,
    offset: u64,
    len: u64,
    bounced: Option<Piece>,
}

impl Mover {
    pub(crate) fn new(bounce: Bounce) -> Self {
        Self {
            bounce,
            jobs: Vec::new(),
            pending: VecDeque::new(),
            flights: VecDeque::new(),
            ended: VecDeque::new(),
            sums: Vec::new(),
            starts: Vec::new(),
            requests: Vec::new(),
            spare: Vec::new(),
            failed_segments: Vec::new(),
            quarantine: Quarantine::default(),
            spoiled: Vec::new(),
            unfenceable: Vec::new(),
        }
    }

    /// Another operation begins, with so many items; nothing of the former is under way.
    pub(crate) fn begin(&mut self, items: usize) {
        self.jobs.clear();
        self.pending.clear();
        self.ended.clear();
        self.sums.clear();
        self.sums.resize(items, Sum::default());
        self.starts.clear();
        self.starts.resize(items, 0);
        self.spoiled.clear();
        self.unfenceable.clear();
    }

    /// Takes a transfer on. Without a handle it ends at once. Whether it is not the first of its item.
    pub(crate) fn start(&mut self, transfer: Transfer, handle: Option<SegmentHandle>) -> bool {
        if self.spoiled.contains(&(transfer.item as usize)) {
            // What is still under way would land among the bytes of another replica.
            self.ended.push_back((transfer, TransferEnd::not_applied()));
            return false;
        }
        match handle {
            Some(handle) => {
                self.pending.push_back(self.jobs.len());
                self.jobs.push(Job {
                    transfer,
                    handle,
                    sent: 0,
                    in_flight: 0,
                    checksum: Checksum::default(),
                    outcome: Outcome::Applied,
                    fence_needed: false,
                    over: false,
                });
            }
            None => self.ended.push_back((transfer, TransferEnd::not_applied())),
        }
        let starts = &mut self.starts[transfer.item as usize];
        *starts = starts.saturating_add(1);
        *starts > 1
    }

    /// Ends a transfer early. It is still reported.
    pub(crate) fn cancel(&mut self, id: u32, fabric: &mut Fabric) {
        for (index, job) in
            self.jobs.iter_mut().enumerate().filter(|(_, job)| job.transfer.id == id && !job.over)
        {
            worsen(&mut job.outcome, Outcome::NotApplied);
            for flight in
                self.flights.iter().filter(|flight| flight.pieces.iter().any(|piece| piece.job == index))
            {
                fabric.cancel(flight.batch);
            }
        }
        self.bury_dead();
    }

    /// Sends what can be sent and reaps what has ended. Whether anything happened.
    pub(crate) fn pump(
        &mut self,
        fabric: &mut Fabric,
        memory: &Memory,
        buffers: &mut Buffers<'_>,
        timeout: Duration,
    ) -> bool {
        let mut busy = false;
        while self.flights.len() < FLIGHTS_MAX && self.send_flight(fabric, memory, buffers, timeout) {
            busy = true;
            // Over a rail that copies at once it is over now, and its bytes are still in the cache.
            fabric.poll();
            self.reap_ended(fabric, memory, buffers);
        }
        if self.flights.is_empty() && !self.pending.is_empty() {
            self.give_up();
        }
        fabric.poll();
        busy |= self.reap_ended(fabric, memory, buffers);
        busy || !self.ended.is_empty()
    }

    /// Waits until something may have moved, at most until `deadline`.
    pub(crate) fn wait(&mut self, fabric: &mut Fabric, deadline: Instant) {
        if !self.flights.is_empty() {
            fabric.wait(deadline);
        }
    }

    /// A transfer that has ended.
    pub(crate) fn next_ended(&mut self) -> Option<(Transfer, TransferEnd)> {
        self.ended.pop_front()
    }

    /// A segment whose owner a transfer found gone.
    pub(crate) fn next_failed_segment(&mut self) -> Option<SegmentNo> {
        self.failed_segments.pop()
    }

    /// CRC-32C of an item that is put, as far as it was sent: all of it, once one of its transfers was applied.
    pub(crate) fn checksum(&self, item: usize) -> u32 {
        self.sums.get(item).map_or(0, |sum| sum.checksum.finish())
    }

    /// Pieces whose memory could be touched after the operation, so that it was kept from use.
    pub(crate) const fn quarantined_total(&self) -> u64 {
        self.quarantine.total()
    }

    /// Whether a fabric may still write to some of the range, on behalf of an operation that is over.
    pub(crate) fn is_quarantined(&self, range: BufferRange) -> bool {
        self.quarantine.covers(range)
    }

    /// Takes memory back that has drained meanwhile.
    pub(crate) fn settle(&mut self, fabric: &mut Fabric) {
        let bounce = &mut self.bounce;
        self.quarantine.settle(fabric, |piece| bounce.give(piece));
    }

    /// Whether a fence of the segment says that all is quiet. It speaks of writes that have ended; one that is quarantined
    /// has not.
    pub(crate) fn can_fence(&self, segment: SegmentNo) -> bool {
        !self.unfenceable.contains(&segment)
    }

    fn send_flight(
        &mut self,
        fabric: &mut Fabric,
        memory: &Memory,
        buffers: &mut Buffers<'_>,
        timeout: Duration,
    ) -> bool {
        let mut pieces = self.spare.pop().unwrap_or_default();
        self.requests.clear();
        let mut bytes = 0;
        while let Some(&index) = self.pending.front()
            && pieces.len() < FLIGHT_PIECES_MAX
            && bytes < FLIGHT_BYTES_MAX
        {
            let job = &self.jobs[index];
            if job.outcome != Outcome::Applied || job.sent == job.transfer.len {
                self.pending.pop_front();
                continue;
            }
            let Some(piece) = self.cut(index, buffers) else { break };
            let job = &mut self.jobs[index];
            let local = match (piece.bounced, &*buffers) {
                (None, Buffers::Ranges(items)) => {
                    let range = items[job.transfer.item as usize].1;
                    (range.region, range.offset + piece.offset)
                }
                (bounced, _) => (self.bounce.region().id(), bounced.map_or(0, |at| at.offset)),
            };
            self.requests.push(request(job, piece, local));
            job.sent += piece.len;
            job.in_flight += 1;
            bytes += piece.len;
            pieces.push(piece);
        }
        if pieces.is_empty() {
            self.spare.push(pieces);
            return false;
        }
        match fabric.submit(&self.requests, timeout) {
            Ok(batch) => {
                // While the bytes are on their way.
                self.sum_ranges(&pieces, memory, buffers);
                self.flights.push_back(Flight { batch, pieces, landed: 0 });
                true
            }
            Err(error) => self.not_sent(pieces, &error),
        }
    }

    /// Nothing is under way and nothing can be sent: too much of the bounce buffer is quarantined.
    fn give_up(&mut self) {
        log::warn!("no memory to pass plain bytes through: quarantined; connect a new client");
        while let Some(index) = self.pending.pop_front() {
            worsen(&mut self.jobs[index].outcome, Outcome::NotApplied);
        }
        self.bury_dead();
    }

    /// The next piece of a job; `None` when the bounce buffer has no room.
    fn cut(&mut self, index: usize, buffers: &Buffers<'_>) -> Option<Flying> {
        let transfer = self.jobs[index].transfer;
        let offset = self.jobs[index].sent;
        let wanted = (transfer.len - offset).min(PIECE_BYTES);
        let bounced = match buffers {
            Buffers::Ranges(_) => None,
            Buffers::Sources(_) | Buffers::Sinks(_) => Some(self.bounce.take(wanted, PIECE_BYTES)?),
        };
        let len = bounced.map_or(wanted, |piece| piece.len);
        if let (Some(piece), Buffers::Sources(items)) = (bounced, buffers) {
            let bytes = &items[transfer.item as usize].1[offset as usize..][..len as usize];
            let sum = &mut self.sums[transfer.item as usize];
            if sum.at == offset {
                sum.checksum.update(bytes);
                sum.at += len;
            }
            // The piece lies inside the region, so this does not fail; if it did, the reader's checksum would tell.
            let _ = self.bounce.region().write(piece.offset, bytes);
        }
        Some(Flying { job: index, offset, len, bounced })
    }

    /// Checksums what is put straight from registered memory.
    fn sum_ranges(&mut self, pieces: &[Flying], memory: &Memory, buffers: &Buffers<'_>) {
        let Buffers::Ranges(items) = buffers else { return };
        for piece in pieces {
            let transfer = &self.jobs[piece.job].transfer;
            let sum = &mut self.sums[transfer.item as usize];
            if transfer.op == Op::Write && sum.at == piece.offset {
                let range = items[transfer.item as usize].1;
                let part = BufferRange { offset: range.offset + piece.offset, len: piece.len, ..range };
                memory.checksum(part, &mut sum.checksum);
                sum.at += piece.len;
            }
        }
    }

    /// The engine did not take a flight. Whether to go on sending.
    fn not_sent(&mut self, mut pieces: Vec<Flying>, error: &TransferError) -> bool {
        let culprit = match error {
            // Later, when some of those under way have ended. With none under way it will never do.
            TransferError::Full if !self.flights.is_empty() => {
                // Back to front, so that each job ends up where it was.
                for piece in pieces.drain(..).rev() {
                    self.give_back(piece);
                    let job = &mut self.jobs[piece.job];
                    job.in_flight -= 1;
                    job.sent = piece.offset;
                    if self.pending.front() != Some(&piece.job) {
                        self.pending.push_front(piece.job);
                    }
                }
                self.spare.push(pieces);
                return false;
            }
            TransferError::Request { index, .. } => Some(*index),
            TransferError::Segment { index, .. } => {
                let segment = pieces.get(*index).map(|piece| self.jobs[piece.job].transfer.segment);
                self.failed_segments.extend(segment);
                Some(*index)
            }
            _ => None,
        };
        log::debug!("transfer refused: {error}");
        let culprit = culprit.and_then(|index| pieces.get(index)).map(|piece| piece.job);
        for piece in pieces.drain(..).rev() {
            self.give_back(piece);
            let job = &mut self.jobs[piece.job];
            job.in_flight -= 1;
            job.sent = job.sent.min(piece.offset);
            if culprit.is_none_or(|culprit| culprit == piece.job) {
                worsen(&mut job.outcome, Outcome::NotApplied);
            } else if self.pending.front() != Some(&piece.job) {
                self.pending.push_front(piece.job);
            }
        }
        self.spare.push(pieces);
        self.bury_dead();
        true
    }

    /// Whether there were any.
    fn reap_ended(&mut self, fabric: &mut Fabric, memory: &Memory, buffers: &mut Buffers<'_>) -> bool {
        let mut any = false;
        while self.flights.front().is_some_and(|flight| fabric.is_over(flight.batch)) {
            if let Some(flight) = self.flights.pop_front() {
                self.reap(flight, fabric, memory, buffers);
                any = true;
            }
        }
        any | self.land_early(fabric, memory, buffers)
    }

    /// Checksums what has arrived of the oldest flight, while the rest is on its way.
    fn land_early(&mut self, fabric: &Fabric, memory: &Memory, buffers: &mut Buffers<'_>) -> bool {
        let Some(flight) = self.flights.front_mut() else { return false };
        let before = flight.landed;
        while let Some(&piece) = flight.pieces.get(flight.landed)
            && let Some(status) = fabric.request(flight.batch, flight.landed).filter(fabric::is_complete)
        {
            let job = &mut self.jobs[piece.job];
            if job.transfer.op == Op::Read && job.outcome == Outcome::Applied {
                land(job, piece, status.crc32c, &self.bounce, memory, buffers);
            }
            flight.landed += 1;
        }
        flight.landed > before
    }

    fn reap(&mut self, mut flight: Flight, fabric: &mut Fabric, memory: &Memory, buffers: &mut Buffers<'_>) {
        let quarantined = fabric.is_quarantined(flight.batch);
        if quarantined {
            self.quarantine(&flight, buffers);
        }
        for (index, piece) in flight.pieces.drain(..).enumerate() {
            let status = fabric.request(flight.batch, index);
            let applied = status.as_ref().is_some_and(fabric::is_complete);
            let job = &mut self.jobs[piece.job];
            job.in_flight -= 1;
            if let Some(status) = &status {
                job.fence_needed |= status.fence_needed;
            }
            if applied {
                let late = index >= flight.landed;
                if late && job.transfer.op == Op::Read && job.outcome == Outcome::Applied {
                    let crc32c = status.and_then(|status| status.crc32c);
                    land(job, piece, crc32c, &self.bounce, memory, buffers);
                }
            } else {
                worsen(&mut job.outcome, Outcome::NotApplied);
                worsen(&mut job.outcome, status.map_or(Outcome::Unknown, |status| status.outcome));
                let kind = status.and_then(|status| status.error).map(|error| error.kind);
                if kind.is_some_and(is_owner_gone) {
                    self.failed_segments.push(job.transfer.segment);
                }
            }
            if !quarantined {
                self.give_back(piece);
            }
            self.end_if_over(piece.job);
        }
        if !quarantined {
            fabric.free(flight.batch);
        }
        self.spare.push(flight.pieces);
    }

    /// The engine gave the flight up, but the fabric may not have.
    fn quarantine(&mut self, flight: &Flight, buffers: &Buffers<'_>) {
        let (mut bounced, mut ranges) = (Vec::new(), Vec::new());
        for piece in &flight.pieces {
            let transfer = &self.jobs[piece.job].transfer;
            bounced.extend(piece.bounced);
            match (transfer.op, buffers) {
                (Op::Read, Buffers::Ranges(items)) => {
                    let range = items[transfer.item as usize].1;
                    ranges.push(BufferRange { offset: range.offset + piece.offset, len: piece.len, ..range });
                    self.spoiled.push(transfer.item as usize);
                }
                (Op::Write, _) => self.unfenceable.push(transfer.segment),
                _ => {}
            }
        }
        self.quarantine.hold(flight.batch, bounced, ranges, flight.pieces.len() as u64);
    }

    fn give_back(&mut self, piece: Flying) {
        if let Some(piece) = piece.bounced {
            self.bounce.give(piece);
        }
    }

    fn end_if_over(&mut self, index: usize) {
        let job = &mut self.jobs[index];
        let all_sent = job.sent == job.transfer.len || job.outcome != Outcome::Applied;
        if job.in_flight == 0 && all_sent && !job.over {
            job.over = true;
            let checksum = job.checksum.finish();
            let end = TransferEnd { outcome: job.outcome, fence_needed: job.fence_needed, checksum };
            self.ended.push_back((job.transfer, end));
        }
    }

    /// Jobs that failed before they had anything in flight.
    fn bury_dead(&mut self) {
        for index in 0..self.jobs.len() {
            self.end_if_over(index);
        }
    }
}

/// What was read is where it belongs; checksum it, in order. Where its rail did so on the way, that is enough for memory into
/// which it read; what passes through the bounce buffer is summed at its end.
fn land(
    job: &mut Job,
    piece: Flying,
    crc32c: Option<u32>,
    bounce: &Bounce,
    memory: &Memory,
    buffers: &mut Buffers<'_>,
) {
    let item = job.transfer.item as usize;
    match (piece.bounced, buffers) {
        (Some(at), Buffers::Sinks(sinks)) => {
            let sink = sinks[item].get_or_insert_with(|| vec![0; job.transfer.len as usize]);
            let place = &mut sink[piece.offset as usize..][..piece.len as usize];
            // It lies inside the region, so this does not fail; if it did, the checksum would tell.
            let _ = bounce.region().read(at.offset, place);
            job.checksum.update(place);
        }
        (_, Buffers::Ranges(items)) => {
            if let Some(crc32c) = crc32c {
                job.checksum.update_summed(crc32c, piece.len);
                return;
            }
            let range = items[item].1;
            let part = BufferRange { offset: range.offset + piece.offset, len: piece.len, ..range };
            memory.checksum(part, &mut job.checksum);
        }
        _ => {}
    }
}

fn request(job: &Job, piece: Flying, (region, offset): (RegionId, u64)) -> TransferRequest {
    TransferRequest {
        op: job.transfer.op,
        local: LocalAddr::Region(region, offset),
        segment: job.handle,
        remote_addr: job.transfer.addr + piece.offset,
        len: piece.len,
    }
}

/// Unknown is worse than not applied, which is worse than applied.
fn worsen(outcome: &mut Outcome, other: Outcome) {
    let rank = |outcome| match outcome {
        Outcome::Applied => 0,
        Outcome::NotApplied => 1,
        Outcome::Unknown => 2,
    };
    if rank(other) > rank(*outcome) {
        *outcome = other;
    }
}

fn is_owner_gone(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::PeerRestarted
            | ErrorKind::PeerDead
            | ErrorKind::Unreachable
            | ErrorKind::Stale
            | ErrorKind::OutOfRange
            | ErrorKind::NotFound
    )
}
