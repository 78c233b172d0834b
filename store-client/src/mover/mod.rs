// Long because: a piece's path through the state machine, from the queue to its landing, is in one place.
//! The mover: moves the bytes of an operation's items in pieces, and computes their checksums in transit.
//!
//! ```text
//!   Transfer ─▶ job ─▶ pieces of at most 256 KiB ─▶ flights (one engine batch each) ─▶ in order ─▶ TransferEnd
//!                        │ registered memory, and plain memory that is registered for the operation: directly
//!                        │ other plain memory, trailers, edges of parts: through the bounce buffer
//!                        └ memory of devices: through slots (`hops.rs`, `lifts.rs`)
//! ```
//!
//! What is moved to or from storage is cut at its granules (`granules.rs`).
//!
//! A put that is moved directly is cut at the borders of its checksum chunks of 64 KiB, so that a rail that
//! computes checksums while it copies returns the checksum of a chunk.
//!
//! A put writes the object followed by its trailer ([`store_core::chunks`]); an open put writes ranges,
//! and its trailer when it ends. A get of a whole object reads the object; a get of parts reads the
//! trailer and the chunks that it needs (`parts.rs`).
//!
//! Pieces *land* in the order in which they were sent, whatever the order in which they arrive. The checksum
//! of a job is therefore computed piece by piece, while the bytes are still in the cache and later pieces are
//! under way.

mod buffers;
mod granules;
mod hops;
mod land;
mod lifts;
mod parts;
mod sums;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use store_core::SegmentNo;
use store_core::chunks::{CHUNK_BYTES, stored_len};
use store_core::client::{Transfer, TransferEnd};
use te_core::{BatchHandle, Status};
use te_core::{ErrorKind, Op, Outcome};
use te_engine::{LocalAddr, SegmentHandle, TransferError, TransferRequest};
use te_host::Spin;

use crate::bounce::{Bounce, Piece};
use crate::checksum::Checksum;
use crate::config::REQUESTS_PER_BATCH_MIN;
use crate::disk::AlignedBuffer;
use crate::engine::{self, Engine};
use crate::memory::{self, BufferRange, Memory};
use crate::quarantine::{Pieces, Quarantine};
use crate::sys;
use buffers::Cursor;
pub(crate) use buffers::{Buffers, RangeWrite};
use hops::Hops;
pub(crate) use hops::SlotPiece;
use land::land;
use lifts::Lifts;
use parts::{Next, Parts};
use sums::ItemSum;
pub(crate) use sums::PartSum;

/// Longest piece, bytes: short enough to stay in the second-level cache until its checksum is computed.
const PIECE_BYTES: u64 = 256 << 10;
const _: () = assert!(PIECE_BYTES.is_multiple_of(CHUNK_BYTES));
/// A trailer up to this length, bytes, is sent in one piece with the last bytes of plain memory.
const TAIL_BYTES: u64 = 4 << 10;
/// Most bytes of one engine batch after its first piece. With fewer and larger batches a rail is idle less
/// often.
const FLIGHT_BYTES_MAX: u64 = 1 << 20;
/// Most pieces of one engine batch.
const FLIGHT_PIECES_MAX: usize = REQUESTS_PER_BATCH_MIN as usize;
/// Most engine batches under way.
const FLIGHTS_MAX: usize = 64;
/// How long the mover sends before it returns to its caller. A rail that copies synchronously would otherwise
/// move everything in one call, past the lease or the put's window, which only the caller checks.
const TURN: Duration = Duration::from_millis(1);
/// How long a sleep is while a hop is under way.
const HOP_NAP: Duration = Duration::from_micros(50);
/// The longest sleep: it bounds the delay if an event is lost.
const PARK_MAX: Duration = Duration::from_millis(100);

/// Moves the bytes of one operation at a time.
pub(crate) struct Mover {
    bounce: Bounce,
    hops: Hops,
    lifts: Lifts,
    spin: Spin,
    jobs: Vec<Job>,
    /// Jobs with bytes that are not sent yet, in the order of their start.
    pending: VecDeque<usize>,
    flights: VecDeque<Flight>,
    ended: VecDeque<(Transfer, TransferEnd)>,
    /// Checksums of the items of a put.
    sums: Vec<ItemSum>,
    /// How often a transfer of each item was started.
    starts: Vec<u8>,
    /// Plain memory of items that is registered for this operation.
    lent: Vec<Option<BufferRange>>,
    requests: Vec<TransferRequest>,
    spare: Vec<Vec<Flying>>,
    /// Segments whose owner is gone or has another incarnation.
    failed_segments: Vec<SegmentNo>,
    /// Segments whose owner did not answer, or is gone.
    unreached: Vec<SegmentNo>,
    /// Whether a node has cut off our engine.
    expelled: bool,
    quarantine: Quarantine,
    /// Items whose destination a fabric may still write: they are not read any further.
    spoiled: Vec<usize>,
    /// Segments to which a write of this operation may still be under way, even after a fence.
    unfenceable: Vec<SegmentNo>,
    /// Bytes of registered memory whose checksum was computed here, not by the rail.
    #[cfg(test)]
    pub(crate) summed_bytes: u64,
}

struct Job {
    transfer: Transfer,
    /// Where it is; `None`: in `image`.
    handle: Option<SegmentHandle>,
    /// Remote offsets and lengths are multiples of this, bytes: 1 for memory.
    granule: u64,
    /// The object and its trailer, in memory of this process.
    image: Option<AlignedBuffer>,
    /// Bytes to move.
    total: u64,
    /// The offset of the first of them in the object.
    base: u64,
    sent: u64,
    in_flight: u32,
    /// Pieces among them whose bytes come from a device and are not sent yet.
    lifting: u32,
    /// Hops to a device that are under way.
    hops: u32,
    cursor: Cursor,
    /// State of a read of parts; `None`: the whole object is moved.
    parts: Option<Box<Parts>>,
    /// Checksum of the bytes that were read.
    checksum: Checksum,
    outcome: Outcome,
    fence_needed: bool,
    over: bool,
}

/// Where the bytes of a transfer are.
enum Source {
    /// A segment, and its granule in bytes.
    Segment(SegmentHandle, u64),
    Image(AlignedBuffer),
}

struct Flight {
    batch: BatchHandle,
    pieces: Vec<Flying>,
    /// Number of pieces that have landed, counted from the first.
    landed: usize,
}

#[derive(Clone, Copy)]
struct Flying {
    job: usize,
    /// Offset among the bytes that the job moves.
    at: u64,
    /// Offset in the stored object, which is followed by its trailer; or in the range that is written.
    offset: u64,
    len: u64,
    place: Place,
}

/// Local memory of a piece.
#[derive(Clone, Copy)]
enum Place {
    Bounced(Piece),
    Straight(BufferRange),
    /// A slot, for memory of a device: this range, or the parts of a read.
    InSlot(SlotPiece, Option<BufferRange>),
}

/// Result of cutting the next piece of a job.
enum Cut {
    Piece(Flying),
    /// The bounce buffer has no room.
    NoRoom,
    /// The pieces before it are to be checksummed first: it is the trailer, or they come from a device and it
    /// does not.
    Later,
    /// The request is invalid, and stays so.
    Never,
}

impl Mover {
    pub(crate) fn new(bounce: Bounce, spin: Spin) -> Self {
        Self {
            bounce,
            hops: Hops::default(),
            lifts: Lifts::default(),
            spin,
            jobs: Vec::new(),
            pending: VecDeque::new(),
            flights: VecDeque::new(),
            ended: VecDeque::new(),
            sums: Vec::new(),
            starts: Vec::new(),
            lent: Vec::new(),
            requests: Vec::new(),
            spare: Vec::new(),
            failed_segments: Vec::new(),
            unreached: Vec::new(),
            expelled: false,
            quarantine: Quarantine::default(),
            spoiled: Vec::new(),
            unfenceable: Vec::new(),
            #[cfg(test)]
            summed_bytes: 0,
        }
    }

    /// Begins an operation with this number of items. Nothing of the operation before is under way.
    pub(crate) fn begin(&mut self, items: usize) {
        self.jobs.clear();
        self.pending.clear();
        self.ended.clear();
        self.sums.clear();
        self.sums.resize(items, ItemSum::default());
        self.starts.clear();
        self.starts.resize(items, 0);
        self.lent.clear();
        self.lent.resize(items, None);
        self.spoiled.clear();
        self.unfenceable.clear();
        self.lifts.begin();
    }

    /// Begins an operation that writes ranges, which begin at these offsets of their objects.
    pub(crate) fn begin_ranges(&mut self, offsets: impl ExactSizeIterator<Item = u64>) {
        self.begin(offsets.len());
        self.sums.clear();
        self.sums.extend(offsets.map(ItemSum::of_range));
    }

    /// The checksums of a range that was written.
    pub(crate) fn take_parts(&mut self, item: usize) -> Vec<PartSum> {
        self.sums.get_mut(item).map(ItemSum::take_parts).unwrap_or_default()
    }

    /// Records that the plain memory of an item is registered, until [`take_back`](Self::take_back).
    pub(crate) fn lend(&mut self, item: usize, range: BufferRange) {
        self.lent[item] = Some(range);
    }

    /// Removes one recorded range, for the caller to unregister.
    pub(crate) fn take_back(&mut self) -> Option<BufferRange> {
        while let Some(lent) = self.lent.pop() {
            if lent.is_some() {
                return lent;
            }
        }
        None
    }

    /// Gives up everything that is under way, after a panic has ended the operation. The memory becomes
    /// usable again when the fabrics release it.
    pub(crate) fn abandon(&mut self, engine: &mut Engine) {
        self.pending.clear();
        for flight in std::mem::take(&mut self.flights) {
            // A batch that was freed needs no cancelling.
            let _ = engine.cancel(flight.batch);
            self.quarantine(&flight);
        }
        // A piece that was cut but never belonged to a flight is freed as well.
        self.bounce.reclaim(self.quarantine.bounced());
        self.lifts.begin();
        self.hops.abandon(self.quarantine.in_slots());
    }

    /// Accepts a transfer. Without a handle it ends at once. Returns whether it is not the first transfer of
    /// its item.
    pub(crate) fn start(
        &mut self,
        transfer: Transfer,
        handle: Option<SegmentHandle>,
        buffers: &Buffers<'_, '_>,
    ) -> bool {
        self.start_from(transfer, handle.map(|handle| Source::Segment(handle, 1)), buffers)
    }

    /// As [`start`](Self::start), to or from storage with this granule, bytes.
    pub(crate) fn start_on_storage(
        &mut self,
        transfer: Transfer,
        (handle, granule): (SegmentHandle, u32),
        buffers: &Buffers<'_, '_>,
    ) -> bool {
        self.start_from(transfer, Some(Source::Segment(handle, granule.into())), buffers)
    }

    /// As [`start`](Self::start), for a read whose object is in memory of this process, with its trailer.
    pub(crate) fn start_image(
        &mut self,
        transfer: Transfer,
        image: AlignedBuffer,
        buffers: &Buffers<'_, '_>,
    ) -> bool {
        let whole = image.len() as u64 >= stored_len(transfer.len) && transfer.op == Op::Read;
        self.start_from(transfer, whole.then_some(Source::Image(image)), buffers)
    }

    fn start_from(&mut self, transfer: Transfer, from: Option<Source>, buffers: &Buffers<'_, '_>) -> bool {
        if self.spoiled.contains(&(transfer.item as usize)) {
            // The read that is still under way would overwrite bytes of another replica.
            self.ended.push_back((transfer, TransferEnd::not_applied()));
            return false;
        }
        match from {
            Some(from) => {
                let (handle, granule, image) = match from {
                    Source::Segment(handle, granule) => (Some(handle), granule, None),
                    Source::Image(image) => (None, 1, Some(image)),
                };
                let parts = Parts::new(&transfer, buffers);
                let base = buffers.range_offset(transfer.item as usize);
                let total = match (transfer.op, &parts) {
                    (Op::Write, _) if base.is_none() => stored_len(transfer.len),
                    (_, None) => transfer.len,
                    (_, Some(parts)) => parts.total(transfer.len),
                };
                self.pending.push_back(self.jobs.len());
                self.jobs.push(Job {
                    transfer,
                    handle,
                    granule,
                    image,
                    total,
                    base: base.unwrap_or(0),
                    sent: 0,
                    in_flight: 0,
                    lifting: 0,
                    hops: 0,
                    cursor: Cursor::default(),
                    parts,
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

    /// Ends a transfer early. Its end is still reported.
    pub(crate) fn cancel(&mut self, id: u32, engine: &mut Engine) {
        for (index, job) in
            self.jobs.iter_mut().enumerate().filter(|(_, job)| job.transfer.id == id && !job.over)
        {
            worsen(&mut job.outcome, Outcome::NotApplied);
            for flight in
                self.flights.iter().filter(|flight| flight.pieces.iter().any(|piece| piece.job == index))
            {
                let _ = engine.cancel(flight.batch);
            }
        }
        self.end_finished();
    }

    /// Sends what can be sent and processes what has ended. Returns whether anything happened.
    pub(crate) fn pump(
        &mut self,
        engine: &mut Engine,
        memory: &Memory,
        buffers: &mut Buffers<'_, '_>,
        timeout: Duration,
    ) -> bool {
        let (mut busy, mut stuck) = (false, false);
        let turn_end = Instant::now() + TURN;
        while self.flights.len() < FLIGHTS_MAX {
            if !self.send_flight(engine, memory, buffers, timeout) {
                stuck = true;
                break;
            }
            busy = true;
            // Over a rail that copies synchronously the flight has now ended, and its bytes are still in the
            // cache.
            engine.poll();
            self.reap_ended(engine, memory, buffers);
            if Instant::now() >= turn_end {
                break;
            }
        }
        if stuck && self.is_idle() && self.lifts.is_empty() && !self.pending.is_empty() {
            self.give_up();
        }
        engine.poll();
        busy |= self.reap_ended(engine, memory, buffers);
        busy |= self.reap_hops();
        busy || !self.ended.is_empty()
    }

    /// Waits until there may be progress, at most until `deadline`; it spins first, then sleeps.
    pub(crate) fn wait(&mut self, engine: &mut Engine, deadline: Instant) {
        if self.is_idle() {
            return;
        }
        loop {
            if (engine.poll() > 0) | self.hops.poll() {
                return self.spin.reset();
            }
            let now = Instant::now();
            if now >= deadline {
                return self.spin.reset();
            }
            if !self.spin.again() {
                if !self.hops.is_idle() {
                    // Nothing announces the end of a hop, and the engine sleeps for whole milliseconds.
                    return std::thread::sleep(HOP_NAP);
                }
                return engine.park(Some((deadline - now).min(PARK_MAX)));
            }
        }
    }

    /// Whether nothing is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.flights.is_empty() && self.hops.is_idle()
    }

    /// The next transfer that has ended, and how.
    pub(crate) fn next_ended(&mut self) -> Option<(Transfer, TransferEnd)> {
        self.ended.pop_front()
    }

    /// The next segment whose owner a transfer found gone.
    pub(crate) fn next_failed_segment(&mut self) -> Option<SegmentNo> {
        self.failed_segments.pop()
    }

    /// The segments whose owner did not answer in time, or is gone.
    pub(crate) fn take_unreached(&mut self) -> Vec<SegmentNo> {
        std::mem::take(&mut self.unreached)
    }

    /// Whether a node has cut off our engine. Other nodes will do so as well.
    pub(crate) const fn is_expelled(&self) -> bool {
        self.expelled
    }

    /// CRC-32C of an item of a put. It is complete once one of the item's transfers was applied.
    pub(crate) fn checksum(&self, item: usize) -> u32 {
        self.sums.get(item).map_or(0, ItemSum::whole)
    }

    /// Number of pieces that were put in quarantine since the client started.
    pub(crate) const fn quarantined_total(&self) -> u64 {
        self.quarantine.total() + self.hops.orphans_total()
    }

    /// Whether a transfer of an operation that is over may still be under way.
    pub(crate) fn has_quarantined(&self) -> bool {
        !self.quarantine.is_empty()
    }

    /// Whether a fabric or a device may still write a part of the range, for an operation that is over.
    pub(crate) fn is_quarantined(&self, range: BufferRange, memory: &Memory) -> bool {
        match memory.device_span(range) {
            Some(span) => self.hops.covers(span),
            None => self.quarantine.covers(range),
        }
    }

    /// Whether a read of the item was given up that a fabric may still carry out, into the caller's memory.
    pub(crate) fn is_spoiled(&self, item: usize) -> bool {
        self.spoiled.contains(&item)
    }

    /// Releases quarantined memory that has drained.
    pub(crate) fn settle(&mut self, engine: &mut Engine) {
        let (bounce, hops) = (&mut self.bounce, &mut self.hops);
        self.quarantine.settle(engine, |pieces| {
            pieces.bounced.iter().for_each(|piece| bounce.give(*piece));
            pieces.in_slots.iter().for_each(|piece| hops.release(*piece));
        });
        self.hops.poll();
    }

    /// Whether a fence of the segment would be sufficient. It covers writes that have ended; a write in
    /// quarantine has not.
    pub(crate) fn can_fence(&self, segment: SegmentNo) -> bool {
        !self.unfenceable.contains(&segment)
    }

    fn send_flight(
        &mut self,
        engine: &mut Engine,
        memory: &Memory,
        buffers: &mut Buffers<'_, '_>,
        timeout: Duration,
    ) -> bool {
        let mut pieces = self.spare.pop().unwrap_or_default();
        self.requests.clear();
        let (mut bytes, mut passed, mut lifted) = (self.send_lifted(&mut pieces), 0, false);
        while let Some(&index) = self.pending.get(passed)
            && pieces.len() < FLIGHT_PIECES_MAX
            && bytes < FLIGHT_BYTES_MAX
        {
            let job = &mut self.jobs[index];
            if job.outcome != Outcome::Applied || job.sent == job.total {
                self.pending.remove(passed);
                continue;
            }
            let piece = match self.cut(index, memory, buffers) {
                Cut::Piece(piece) => piece,
                Cut::NoRoom => break,
                Cut::Later => {
                    passed += 1;
                    continue;
                }
                Cut::Never => {
                    worsen(&mut self.jobs[index].outcome, Outcome::NotApplied);
                    self.end_finished();
                    continue;
                }
            };
            if self.jobs[index].image.is_some() {
                self.copy_image(index, &piece, memory, buffers);
                continue;
            }
            let job = &mut self.jobs[index];
            job.sent += piece.len;
            job.in_flight += 1;
            if self.lift(&piece, memory) {
                lifted = true;
                continue;
            }
            self.request(&piece);
            bytes += piece.len;
            pieces.push(piece);
        }
        if pieces.is_empty() {
            self.spare.push(pieces);
            return lifted;
        }
        match engine.submit(&self.requests, Some(timeout)) {
            Ok(batch) => {
                self.flights.push_back(Flight { batch, pieces, landed: 0 });
                self.sum_straight(engine, memory);
                true
            }
            Err(error) => self.not_sent(pieces, &error),
        }
    }

    /// Adds the request of a piece to the next batch.
    fn request(&mut self, piece: &Flying) {
        let job = &self.jobs[piece.job];
        let Some(segment) = job.handle else { return };
        let (region, offset) = match piece.place {
            Place::Straight(range) => (range.region, range.offset),
            Place::Bounced(at) => (self.bounce.region().id(), at.offset),
            Place::InSlot(at, _) => self.hops.local(at),
        };
        // Of storage, whole granules around the piece, for which its place has room.
        let remote_addr = job.transfer.addr + piece.offset;
        let before = remote_addr % job.granule;
        self.requests.push(TransferRequest {
            op: job.transfer.op,
            local: LocalAddr::Region(region, offset - before),
            segment,
            remote_addr: remote_addr - before,
            len: (before + piece.len).next_multiple_of(job.granule),
        });
    }

    /// Moves a piece of an object that is in memory of this process.
    fn copy_image(&mut self, index: usize, piece: &Flying, memory: &Memory, buffers: &mut Buffers<'_, '_>) {
        let job = &mut self.jobs[index];
        let Some(image) = job.image.take() else { return };
        match piece.place {
            Place::Straight(range) => memory.copy_in(image.span(), piece.offset, range),
            Place::Bounced(at) => {
                let (from, to) = (piece.offset as usize, (piece.offset + piece.len) as usize);
                let bytes = image.get(from..to).unwrap_or_default();
                // The piece lies inside the region, so this cannot fail. If it did, the checksum would not
                // match.
                let _ = self.bounce.region().write(at.offset, bytes);
            }
            Place::InSlot(at, _) => {
                let (slot, offset) = self.hops.memory(at);
                sys::copy_span(image.span(), piece.offset, slot, offset, piece.len);
            }
        }
        land(job, piece, None, &self.bounce, &mut self.hops, memory, buffers);
        job.image = Some(image);
        job.sent += piece.len;
        if job.sent == job.total {
            job.image = None;
        }
        self.give_back(*piece);
        self.end_if_over(index);
    }

    /// Ends all jobs when nothing is under way and nothing can be sent: too much of the bounce buffer is in
    /// quarantine.
    fn give_up(&mut self) {
        log::warn!(
            "transfers fail: all of the bounce buffer, or all slots of a device, are in quarantine: connect a new client, and check \
     the fabrics' health"
        );
        while let Some(index) = self.pending.pop_front() {
            worsen(&mut self.jobs[index].outcome, Outcome::NotApplied);
        }
        self.end_finished();
    }

    /// Cuts the next piece of a job.
    fn cut(&mut self, index: usize, memory: &Memory, buffers: &Buffers<'_, '_>) -> Cut {
        let job = &mut self.jobs[index];
        let (transfer, at) = (job.transfer, job.sent);
        let item = transfer.item as usize;
        if let Some(parts) = &job.parts {
            return match (parts.next(&transfer, at), parts.device()) {
                (Some(Next::Straight { offset, place }), _) => {
                    let granule = job.granule;
                    self.cut_part(index, offset, place, granule, memory)
                }
                (Some(Next::Bounced { offset, len, chunks: true }), Some(region)) => {
                    let most =
                        PIECE_BYTES.min(self.hops.slot_bytes(memory, region)) / CHUNK_BYTES * CHUNK_BYTES;
                    self.cut_in_slot(index, offset, len.min(most), (region, None), memory)
                }
                (Some(Next::Bounced { offset, len, chunks }), _) => {
                    let most = self.bounce.piece_bytes_max().min(PIECE_BYTES);
                    let most = if chunks { most / CHUNK_BYTES * CHUNK_BYTES } else { most };
                    self.cut_bounced(index, at, offset, len.min(most))
                }
                (None, _) => Cut::Never,
            };
        }
        if job.granule > 1 {
            return self.cut_granules(index, memory, buffers);
        }
        let stored_left = job.total - at;
        let lent = self.lent[item].as_slice();
        if let Some(ranges) = if lent.is_empty() { buffers.ranges(item) } else { Some(lent) }
            && at < transfer.len
        {
            return match job.cursor.seek(ranges, at, |range| range.len) {
                Some((part, skip)) => {
                    let range = ranges[part];
                    let len = (range.len - skip).min(transfer.len - at);
                    let range = BufferRange { offset: range.offset + skip, len, ..range };
                    self.cut_straight(index, at, range, memory)
                }
                None => Cut::Never,
            };
        }
        if transfer.op == Op::Read {
            return self.cut_bounced(index, at, at, stored_left.min(PIECE_BYTES));
        }
        let sum = &self.sums[item];
        if at >= transfer.len && !sum.is_whole(transfer.len) {
            return Cut::Later;
        }
        let most = if stored_left <= PIECE_BYTES + TAIL_BYTES { stored_left } else { PIECE_BYTES };
        let cut = self.cut_bounced(index, at, at, most);
        if let Cut::Piece(Flying { len, place: Place::Bounced(piece), .. }) = &cut {
            self.fill(index, at, *len, *piece, buffers);
        }
        cut
    }

    /// Cuts a piece that is moved directly from or into registered memory, or through a slot if that is
    /// memory of a device.
    fn cut_straight(&mut self, index: usize, offset: u64, place: BufferRange, memory: &Memory) -> Cut {
        let Job { transfer, sent: at, base, lifting, .. } = self.jobs[index];
        let most = match transfer.op {
            Op::Read => PIECE_BYTES,
            // At most to the end of a chunk, so that a rail that computes checksums returns that of the
            // chunk.
            Op::Write => CHUNK_BYTES - (base + offset) % CHUNK_BYTES,
        };
        let len = place.len.min(most);
        if memory::is_device(place.region) {
            return self.cut_in_slot(index, offset, len, (place.region, Some(place)), memory);
        }
        if lifting > 0 {
            return Cut::Later;
        }
        let place = Place::Straight(BufferRange { len, ..place });
        Cut::Piece(Flying { job: index, at, offset, len, place })
    }

    /// Cuts a piece that passes through the bounce buffer, with room for the granules around it.
    fn cut_bounced(&mut self, job: usize, at: u64, offset: u64, len: u64) -> Cut {
        let Job { transfer, granule, .. } = &self.jobs[job];
        let (before, granule) = ((transfer.addr + offset) % granule, *granule);
        let most = self.bounce.piece_bytes_max() / granule * granule;
        if most == 0 {
            return Cut::Never;
        }
        let wanted = (before + len).next_multiple_of(granule).min(most);
        match self.bounce.take(wanted, wanted) {
            Some(taken) => {
                let len = len.min(taken.len - before);
                let place = Place::Bounced(Piece { offset: taken.offset + before, len });
                Cut::Piece(Flying { job, at, offset, len, place })
            }
            None => Cut::NoRoom,
        }
    }

    /// Copies to the bounce buffer what is written from there: plain memory, which is checksummed meanwhile,
    /// and the trailer.
    fn fill(&mut self, index: usize, offset: u64, len: u64, piece: Piece, buffers: &Buffers<'_, '_>) {
        let Job { transfer, cursor, .. } = &mut self.jobs[index];
        let item = transfer.item as usize;
        let sum = &mut self.sums[item];
        let slices = buffers.slices(item).unwrap_or_default();
        let end = offset + len;
        let data_end = end.min(transfer.len);
        let mut at = offset;
        while at < data_end {
            let Some((part, skip)) = cursor.seek(slices, at, |slice| slice.len() as u64) else { return };
            let bytes = &slices[part][skip as usize..];
            let bytes = &bytes[..bytes.len().min((data_end - at) as usize)];
            sum.update(transfer.len, at, bytes.len() as u64, |sum, from, count| {
                sum.update(&bytes[from as usize..][..count as usize]);
            });
            // The piece lies inside the region, so this cannot fail. If it did, the reader would find a wrong
            // checksum.
            let _ = self.bounce.region().write(piece.offset + (at - offset), bytes);
            at += bytes.len() as u64;
        }
        self.fill_trailer(index, (offset, at, end), piece);
    }

    /// Writes the bytes `at..end` of a put's trailer to a piece that begins at `offset`, if there are any,
    /// and zeros up to the end of the granule.
    fn fill_trailer(&mut self, index: usize, (offset, at, end): (u64, u64, u64), piece: Piece) {
        let Job { transfer, granule, .. } = &self.jobs[index];
        if at < end {
            // All bytes before the trailer have been checksummed. Otherwise readers would not accept the
            // trailer.
            let (from, to) = ((at - transfer.len) as usize, (end - transfer.len) as usize);
            let sum = &self.sums[transfer.item as usize];
            let trailer = sum.trailer().get(from..to).unwrap_or_default();
            let _ = self.bounce.region().write(piece.offset + (at - offset), trailer);
        }
        // What other objects have left in the bounce buffer is not written to storage.
        let mut pad = (transfer.addr + end).next_multiple_of(*granule) - (transfer.addr + end);
        let mut at = piece.offset + (end - offset);
        while pad > 0 {
            let zeros = &[0; 512][..pad.min(512) as usize];
            let _ = self.bounce.region().write(at, zeros);
            pad -= zeros.len() as u64;
            at += zeros.len() as u64;
        }
    }

    /// Computes checksums of the last flight's direct pieces of a put while it is under way, unless its rail
    /// has done so.
    fn sum_straight(&mut self, engine: &mut Engine, memory: &Memory) {
        let Some(Flight { batch, pieces, .. }) = self.flights.back() else { return };
        let mut unpolled = 0;
        for (index, piece) in pieces.iter().enumerate() {
            let transfer = &self.jobs[piece.job].transfer;
            let in_slot = match (transfer.op, piece.place) {
                (Op::Write, Place::Straight(_)) => None,
                (Op::Write, Place::InSlot(at, _)) => Some(self.hops.memory(at)),
                _ => continue,
            };
            if index == 0 || unpolled >= PIECE_BYTES {
                // Some rails send only in `poll`, and no more than fits a socket buffer.
                engine.poll();
                unpolled = 0;
            }
            unpolled += piece.len;
            let sum = &mut self.sums[transfer.item as usize];
            let summed = engine.request_status(*batch, index).ok().and_then(|status| status.crc32c);
            if summed.is_some_and(|crc32c| sum.take(transfer.len, piece.offset, piece.len, crc32c)) {
                continue;
            }
            sum.update(transfer.len, piece.offset, piece.len, |sum, from, count| {
                #[cfg(test)]
                {
                    self.summed_bytes += count;
                }
                match (in_slot, piece.place) {
                    (Some((slot, offset)), _) => sum.update_span(slot, offset + from, count),
                    (None, Place::Straight(range)) => {
                        let offset = range.offset + from;
                        memory.checksum(BufferRange { offset, len: count, ..range }, sum);
                    }
                    (None, _) => {}
                }
            });
        }
    }

    /// Handles a flight that the engine refused. Returns whether to go on sending.
    fn not_sent(&mut self, mut pieces: Vec<Flying>, error: &TransferError) -> bool {
        let culprit = match error {
            // It is sent again when one of the batches under way has ended. Without any under way it would
            // never be accepted.
            TransferError::Full if !self.flights.is_empty() => {
                // From back to front, so that each job returns to its former state.
                for piece in pieces.drain(..).rev() {
                    if self.lifts.give_back(&piece, &mut self.jobs[piece.job]) {
                        continue;
                    }
                    self.give_back(piece);
                    let job = &mut self.jobs[piece.job];
                    job.in_flight -= 1;
                    job.sent = piece.at;
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
                self.unreached.extend(segment);
                Some(*index)
            }
            _ => None,
        };
        log::debug!("the engine refused a transfer: {error}");
        let culprit = culprit.and_then(|index| pieces.get(index)).map(|piece| piece.job);
        for piece in pieces.drain(..).rev() {
            let is_culprit = culprit.is_none_or(|culprit| culprit == piece.job);
            if !is_culprit && self.lifts.give_back(&piece, &mut self.jobs[piece.job]) {
                continue;
            }
            self.give_back(piece);
            let job = &mut self.jobs[piece.job];
            job.in_flight -= 1;
            job.sent = job.sent.min(piece.at);
            if culprit.is_none_or(|culprit| culprit == piece.job) {
                worsen(&mut job.outcome, Outcome::NotApplied);
            } else if self.pending.front() != Some(&piece.job) {
                self.pending.push_front(piece.job);
            }
        }
        self.spare.push(pieces);
        self.end_finished();
        true
    }

    /// Processes flights that have ended. Returns whether there were any.
    fn reap_ended(&mut self, engine: &mut Engine, memory: &Memory, buffers: &mut Buffers<'_, '_>) -> bool {
        let mut any = false;
        while self.flights.front().is_some_and(|flight| engine::is_over(engine, flight.batch)) {
            if let Some(flight) = self.flights.pop_front() {
                self.reap(flight, engine, memory, buffers);
                any = true;
            }
        }
        any | self.land_early(engine, memory, buffers)
    }

    /// Lands the pieces of the oldest flight that have arrived while the rest is under way.
    fn land_early(&mut self, engine: &Engine, memory: &Memory, buffers: &mut Buffers<'_, '_>) -> bool {
        let Some(flight) = self.flights.front_mut() else { return false };
        let before = flight.landed;
        while let Some(&piece) = flight.pieces.get(flight.landed)
            && let Some(status) =
                engine.request_status(flight.batch, flight.landed).ok().filter(engine::is_complete)
        {
            let job = &mut self.jobs[piece.job];
            if job.transfer.op == Op::Read && job.outcome == Outcome::Applied {
                land(job, &piece, status.crc32c, &self.bounce, &mut self.hops, memory, buffers);
            }
            flight.landed += 1;
        }
        flight.landed > before
    }

    fn reap(
        &mut self,
        mut flight: Flight,
        engine: &mut Engine,
        memory: &Memory,
        buffers: &mut Buffers<'_, '_>,
    ) {
        let quarantined = engine::is_quarantined(engine, flight.batch);
        if quarantined {
            self.quarantine(&flight);
        }
        for (index, piece) in flight.pieces.drain(..).enumerate() {
            let status = engine.request_status(flight.batch, index).ok();
            let applied = status.as_ref().is_some_and(engine::is_complete);
            let job = &mut self.jobs[piece.job];
            job.in_flight -= 1;
            if let Some(status) = &status {
                job.fence_needed |= status.fence_needed;
            }
            if applied {
                let late = index >= flight.landed;
                if late && job.transfer.op == Op::Read && job.outcome == Outcome::Applied {
                    let crc32c = status.and_then(|status| status.crc32c);
                    land(job, &piece, crc32c, &self.bounce, &mut self.hops, memory, buffers);
                }
            } else {
                worsen(&mut job.outcome, Outcome::NotApplied);
                worsen(&mut job.outcome, status.map_or(Outcome::Unknown, |status| status.outcome));
                let kind = status.and_then(|status| status.error).map(|error| error.kind);
                let gone = kind.is_some_and(is_owner_gone);
                if gone {
                    self.failed_segments.push(job.transfer.segment);
                }
                self.expelled |= kind == Some(ErrorKind::Expelled);
                let silent = status.is_some_and(|status| status.status == Status::TimedOut);
                if (gone || silent) && self.unreached.last() != Some(&job.transfer.segment) {
                    self.unreached.push(job.transfer.segment);
                }
            }
            if !quarantined {
                self.give_back(piece);
            }
            self.end_if_over(piece.job);
        }
        if !quarantined {
            engine::free(engine, flight.batch);
        }
        self.spare.push(flight.pieces);
    }

    /// Records the memory of a flight that the engine gave up but the fabric may still carry out.
    fn quarantine(&mut self, flight: &Flight) {
        let mut held = Pieces::default();
        for piece in &flight.pieces {
            let transfer = &self.jobs[piece.job].transfer;
            match (transfer.op, piece.place) {
                (Op::Read, Place::Straight(range)) => {
                    held.ranges.push(range);
                    self.spoiled.push(transfer.item as usize);
                }
                (_, Place::Bounced(piece)) => held.bounced.push(piece),
                (_, Place::InSlot(piece, _)) => held.in_slots.push(piece),
                (Op::Write, Place::Straight(_)) => {}
            }
            if transfer.op == Op::Write {
                self.unfenceable.push(transfer.segment);
            }
        }
        self.quarantine.hold(flight.batch, held, flight.pieces.len() as u64);
    }

    fn give_back(&mut self, piece: Flying) {
        match piece.place {
            Place::Bounced(piece) => self.bounce.give(piece),
            Place::InSlot(piece, _) => self.hops.release(piece),
            Place::Straight(_) => {}
        }
    }

    fn end_if_over(&mut self, index: usize) {
        let job = &mut self.jobs[index];
        let all_sent = job.sent == job.total || job.outcome != Outcome::Applied;
        if job.in_flight == 0 && job.hops == 0 && all_sent && !job.over {
            job.over = true;
            let checksum = job.checksum.finish();
            let damaged = job.parts.as_ref().is_some_and(|parts| parts.is_damaged());
            let end = TransferEnd { outcome: job.outcome, fence_needed: job.fence_needed, checksum, damaged };
            self.ended.push_back((job.transfer, end));
        }
    }

    /// Reports jobs that are over, those included that failed before a piece was under way.
    fn end_finished(&mut self) {
        for index in 0..self.jobs.len() {
            self.end_if_over(index);
        }
    }
}

/// Sets the worse of two outcomes: `Unknown` is worse than `NotApplied`, which is worse than `Applied`.
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
