//! Requests that touch memory of a device: their bytes go through staging slots, as many at the same time as
//! are free.
//!
//! ```text
//!   WRITE   socket ──▶ slot ──▶ hop ──▶ slot given back      ACK when the last hop has ended
//!   READ    slot ──▶ hop ──▶ DATA ──▶ socket ──▶ slot given back
//! ```
//!
//! While no slot is free, the connection is not read. Each part of an operation is checked again before it
//! gets its slot, so a region that is withdrawn meanwhile is used only by hops that already run. A hop
//! belongs to the target and not to its connection: it continues after the connection has ended, and what has
//! to know that nothing lands any more (an ACK, a fence, an expulsion, a deregistration) waits for it.

use std::collections::VecDeque;

use te_core::device::HopDirection;
use te_core::{Access, Error, MemSpan, Op};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use super::connection::PeerConnection;
use super::serving::{EMPTY, Serving, drop_plan};
use crate::connection::{Destination, Source};
use crate::frame::{
    CHECKSUM_BYTES_MAX, DataEntry, ENTRIES_MAX, FLAG_CHECKSUM, Header, Kind, Operation, Status,
};
use crate::region::{Regions, granted, peer_begins, peer_ends};
use crate::staging::{SlotId, Staging};
use crate::sys::{Memory, Reach};

/// Parts of one connection's operations that may be under way at the same time.
const PARTS_MAX: usize = 16;

/// What a hop of a peer's operation belongs to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tag {
    /// Name of the connection's events.
    pub(super) connection: u64,
    /// Identity of the connection's peer.
    pub(super) identity: u64,
    pub(super) region: u32,
    pub(super) op: Op,
}

/// The staging slots and hops of a target.
pub(super) type Stagings = Staging<Tag>;

/// A request that touches memory of a device, while it is served.
#[derive(Debug)]
pub(super) struct Staged {
    op: Op,
    checksum: bool,
    seq: u64,
    operations: Vec<Operation>,
    /// WRITE: the status of each operation for the ACK.
    statuses: Vec<U32>,
    /// The operation whose next part is begun next.
    at: usize,
    /// Bytes of operation `at` that are in parts already.
    begun: u64,
    /// READ: the parts of operation `at` that are begun are only for its checksum.
    summing: bool,
    /// READ: the checksum of operation `at` is computed, or parts for it are begun.
    summed: bool,
    /// Parts in the order of the stream. WRITE: those that are to be received. READ: those that are to be
    /// sent.
    parts: VecDeque<Part>,
    /// WRITE: number of hops that run.
    hops: usize,
    /// A hop has failed.
    failed: bool,
    /// Checksum of the parts that are finished.
    crc: u32,
    /// READ: bytes whose checksums may still be computed for this request.
    checksums_left: u64,
}

#[derive(Debug)]
struct Part {
    operation: usize,
    len: u64,
    slot: Option<SlotId>,
    /// It is the first part of its operation.
    first: bool,
    /// It is the last part of its operation.
    last: bool,
    what: What,
}

#[derive(Clone, Copy, Debug)]
enum What {
    /// WRITE: the part goes to this memory once it has been received; `None`: it is discarded.
    Receive(Option<MemSpan>),
    /// READ: the hop of the part runs, or has ended; the part is to be sent, or only counts for the checksum.
    Hop { ended: bool, send: bool },
    /// READ: the operation is not on a device, and is answered when its turn comes.
    Plain,
    /// READ: the operation is refused.
    Refuse(Status),
    /// READ: the operation cannot be completed, and its beginning has been sent.
    Lost,
}

/// How serving a staged request goes on.
pub(super) enum Flow {
    /// The request is answered.
    Done,
    /// Bytes have to arrive.
    Read,
    /// A staging slot must become free, or a hop must end.
    Wait,
    /// There is no room for answers.
    Full,
    /// The request cannot be answered: the connection has to be closed.
    Lost,
}

impl Staged {
    pub(super) fn new() -> Self {
        Self {
            op: Op::Read,
            checksum: false,
            seq: 0,
            operations: Vec::with_capacity(ENTRIES_MAX),
            statuses: Vec::with_capacity(ENTRIES_MAX),
            at: 0,
            begun: 0,
            summing: false,
            summed: false,
            parts: VecDeque::with_capacity(PARTS_MAX),
            hops: 0,
            failed: false,
            crc: 0,
            checksums_left: 0,
        }
    }

    /// Begins with another request, in the record of an earlier one.
    pub(super) fn begin(&mut self, op: Op, checksum: bool, seq: u64, operations: &[Operation]) {
        (self.op, self.checksum, self.seq) = (op, checksum, seq);
        self.operations.clear();
        self.operations.extend_from_slice(operations);
        self.statuses.clear();
        self.statuses.resize(operations.len(), U32::ZERO);
        (self.at, self.begun, self.hops, self.crc) = (0, 0, 0, 0);
        (self.summing, self.summed, self.failed) = (false, false, false);
        self.checksums_left = u64::from(CHECKSUM_BYTES_MAX);
        self.parts.clear();
    }

    /// Takes in the end of a hop. Returns whether the slot is still needed.
    pub(super) fn hop_ended(&mut self, slot: SlotId, tag: &Tag, result: Result<(), Error>) -> bool {
        self.failed |= result.is_err();
        if tag.op == Op::Write {
            self.hops -= 1;
            return false;
        }
        let part = self.parts.iter_mut().find(|part| part.slot == Some(slot));
        if let Some(Part { what: What::Hop { ended, .. }, .. }) = part {
            *ended = true;
            return true;
        }
        false
    }

    /// Goes to the next operation: all bytes of operation `at` are in parts, or it needs none.
    fn next_operation(&mut self) {
        self.at += 1;
        self.begun = 0;
        (self.summing, self.summed) = (false, false);
    }

    fn push(&mut self, len: u64, slot: Option<SlotId>, first: bool, last: bool, what: What) {
        self.parts.push_back(Part { operation: self.at, len, slot, first, last, what });
    }

    /// Sets the status of an operation, unless one was set before.
    fn refuse(&mut self, operation: usize, status: u32) {
        if let Some(known) = self.statuses.get_mut(operation).filter(|known| **known == U32::ZERO) {
            *known = U32::new(status);
        }
    }
}

/// Releases the staging slots and announced payloads of a connection. Slots of hops that run are released
/// when these end.
#[inline(never)]
pub(super) fn release(connection: &mut PeerConnection, regions: &mut Regions, staging: &mut Stagings) {
    drop_plan(&mut connection.inbox, regions);
    if let Some(staged) = connection.role.staged.take() {
        for part in &staged.parts {
            if let Some(slot) = part.slot
                && !matches!(part.what, What::Hop { ended: false, .. })
            {
                staging.give_back(slot);
            }
        }
    }
}

impl Serving<'_> {
    /// Whether one of the operations is on memory of a device.
    #[inline(never)]
    pub(super) fn is_staged(&self, operations: &[Operation]) -> bool {
        let is_device = |asked: &Operation| {
            self.regions.get(asked.region.get()).is_some_and(|region| region.ext.memory.is_device())
        };
        operations.iter().any(is_device)
    }

    /// Begins with a request that touches memory of a device.
    #[inline(never)]
    pub(super) fn begin_staged(
        &mut self,
        op: Op,
        checksum: bool,
        seq: u64,
        operations: &[Operation],
    ) -> Staged {
        let mut staged = self.spare.pop().unwrap_or_else(Staged::new);
        staged.begin(op, checksum, seq, operations);
        staged
    }

    /// Continues with the staged request.
    #[inline(never)]
    pub(super) fn staged(&mut self, staged: &mut Staged, connection: &mut PeerConnection) -> Flow {
        if staged.failed {
            return Flow::Lost;
        }
        match staged.op {
            Op::Write => self.staged_write(staged, connection),
            Op::Read => self.staged_read(staged, connection),
        }
    }

    fn start(&mut self, connection: &PeerConnection, slot: SlotId, device: MemSpan, region: u32, op: Op) {
        let direction = match op {
            Op::Read => HopDirection::ToHost,
            Op::Write => HopDirection::ToDevice,
        };
        let tag = Tag { connection: connection.name, identity: connection.role.identity, region, op };
        self.staging.start(slot, device, direction, tag);
    }
}

/// WRITE.
impl Serving<'_> {
    fn staged_write(&mut self, staged: &mut Staged, connection: &mut PeerConnection) -> Flow {
        loop {
            while let Some(destination) = connection.inbox.next_complete() {
                self.received(staged, &destination, connection);
            }
            if connection.inbox.expects_payload() {
                return Flow::Read;
            }
            connection.inbox.clear_plan();
            self.plan(staged, connection);
            if connection.inbox.expects_payload() {
                continue;
            }
            if staged.at < staged.operations.len() || staged.hops > 0 {
                return Flow::Wait;
            }
            let header = Header::new(Kind::Ack, 0, staged.statuses.len() as u16, staged.seq);
            connection.outbox.push_head(&[header.as_bytes(), staged.statuses.as_bytes()]);
            return Flow::Done;
        }
    }

    /// Announces the next parts, as many as slots are free.
    fn plan(&mut self, staged: &mut Staged, connection: &mut PeerConnection) {
        while staged.parts.len() < PARTS_MAX
            && let Some(asked) = staged.operations.get(staged.at).copied()
        {
            let rest = asked.len.get() - staged.begun;
            let region = asked.region.get();
            let (mut memory, mut len, mut checksum) = (None, rest, None);
            match granted(self.regions, &asked, Access::REMOTE_WRITE, self.slice_bytes_max).map(Memory::reach)
            {
                Err(status) => {
                    let status = if staged.begun > 0 { Status::Withdrawn } else { status };
                    self.stats.refused += u64::from(staged.begun == 0);
                    staged.refuse(staged.at, status as u32);
                    staged.push(rest, None, staged.begun == 0, true, What::Receive(None));
                }
                Ok(Reach::Host(part)) => {
                    memory = Some(part);
                    checksum = staged.checksum.then_some((asked.crc.get(), 0));
                    staged.push(rest, None, true, true, What::Receive(None));
                }
                Ok(Reach::Device(span)) => {
                    let Some(slot) = self.staging.take(span.location()) else { return };
                    len = rest.min(u64::from(self.staging.slot_bytes(span.location())));
                    memory = self.staging.memory(slot, len);
                    let device = span.part(staged.begun, len).ok();
                    staged.push(len, Some(slot), staged.begun == 0, len == rest, What::Receive(device));
                }
            }
            if memory.is_some() {
                peer_begins(self.regions, region);
                connection.role.carries(self.now);
            }
            let (_, plan) = connection.inbox.split();
            plan.push(Destination { memory, len, done: 0, checksum, status: 0, user: region });
            staged.begun += len;
            if len == rest {
                staged.next_operation();
            }
        }
    }

    /// Takes in the next part, all of whose bytes have arrived.
    fn received(&mut self, staged: &mut Staged, destination: &Destination, connection: &PeerConnection) {
        let Some(part) = staged.parts.pop_front() else { return };
        staged.refuse(part.operation, destination.status);
        if destination.memory.is_some() {
            self.stats.bytes_served += destination.len;
        }
        match (part.slot, destination.memory, part.what) {
            (Some(slot), Some(memory), What::Receive(Some(device))) => {
                if staged.checksum {
                    staged.crc = memory.crc32c(if part.first { 0 } else { staged.crc });
                }
                staged.hops += 1;
                // The hop uses the region until it has ended.
                self.start(connection, slot, device, destination.user, Op::Write);
            }
            (Some(slot), ..) => self.staging.give_back(slot),
            (None, Some(_), _) => peer_ends(self.regions, destination.user),
            (None, None, _) => {}
        }
        let asked = staged.operations.get(part.operation).map_or(0, |asked| asked.crc.get());
        let is_intact = match part.slot {
            Some(_) => !(part.last && staged.checksum && destination.memory.is_some()) || staged.crc == asked,
            None => destination.is_intact(),
        };
        if !is_intact {
            self.stats.corrupt += 1;
            staged.refuse(part.operation, Status::Corrupt as u32);
        }
    }
}

/// READ.
impl Serving<'_> {
    fn staged_read(&mut self, staged: &mut Staged, connection: &mut PeerConnection) -> Flow {
        loop {
            while let Some(part) = staged.parts.front() {
                if matches!(part.what, What::Hop { ended: false, .. }) {
                    break;
                }
                if !connection.has_room() || *self.checksums_left == 0 {
                    return Flow::Full;
                }
                if matches!(part.what, What::Lost) {
                    return Flow::Lost;
                }
                self.answer(staged, connection);
            }
            if !self.begin_parts(staged, connection) {
                break;
            }
        }
        match staged.parts.is_empty() && staged.at == staged.operations.len() {
            true => Flow::Done,
            false => Flow::Wait,
        }
    }

    /// Begins the next parts, as many as slots are free. Returns whether one of them needs no hop.
    fn begin_parts(&mut self, staged: &mut Staged, connection: &mut PeerConnection) -> bool {
        let mut some = false;
        while staged.parts.len() < PARTS_MAX
            && let Some(asked) = staged.operations.get(staged.at).copied()
        {
            let (len, first) = (asked.len.get(), staged.begun == 0);
            let is_new = first && !staged.summed;
            let span = match granted(self.regions, &asked, Access::REMOTE_READ, self.slice_bytes_max)
                .map(Memory::reach)
            {
                Ok(Reach::Device(_)) if is_new && staged.checksum && len > staged.checksums_left => {
                    Err(What::Refuse(Status::TooLong))
                }
                Ok(Reach::Device(span)) => Ok(span),
                Ok(Reach::Host(_)) => Err(What::Plain),
                Err(_) if first => Err(What::Plain),
                Err(_) => Err(What::Lost),
            };
            let span = match span {
                Ok(span) => span,
                Err(what) => {
                    staged.push(0, None, true, true, what);
                    staged.next_operation();
                    some = true;
                    continue;
                }
            };
            let Some(slot) = self.staging.take(span.location()) else { return some };
            let longest = u64::from(self.staging.slot_bytes(span.location()));
            if is_new && staged.checksum {
                (staged.summing, staged.summed) = (len > longest, true);
                staged.checksums_left -= len;
            }
            let bytes = (len - staged.begun).min(longest);
            let last = staged.begun + bytes == len;
            let what = What::Hop { ended: false, send: !staged.summing };
            staged.push(bytes, Some(slot), first, last, what);
            peer_begins(self.regions, asked.region.get());
            connection.role.carries(self.now);
            if let Ok(device) = span.part(staged.begun, bytes) {
                self.start(connection, slot, device, asked.region.get(), Op::Read);
            }
            staged.begun += bytes;
            match (last, staged.summing) {
                (true, false) => staged.next_operation(),
                // The same bytes once more, this time to be sent.
                (true, true) => (staged.begun, staged.summing) = (0, false),
                (false, _) => {}
            }
        }
        some
    }

    /// Sends the next part, or adds it to the checksum.
    fn answer(&mut self, staged: &mut Staged, connection: &mut PeerConnection) {
        let Some(part) = staged.parts.pop_front() else { return };
        let Some(asked) = staged.operations.get(part.operation).copied() else { return };
        let seq = staged.seq + part.operation as u64;
        let flags = if staged.checksum { FLAG_CHECKSUM } else { 0 };
        let mut send = |entry: DataEntry| {
            let header = Header::new(Kind::Data, flags, 1, seq);
            connection.outbox.push_head(&[header.as_bytes(), entry.as_bytes()]);
        };
        match (part.what, part.slot) {
            (What::Hop { send: false, .. }, Some(slot)) => {
                if let Some(memory) = self.staging.memory(slot, part.len) {
                    staged.crc = memory.crc32c(if part.first { 0 } else { staged.crc });
                }
                *self.checksums_left = self.checksums_left.saturating_sub(part.len);
                self.staging.give_back(slot);
            }
            (What::Hop { .. }, Some(slot)) => {
                let Some(memory) = self.staging.memory(slot, part.len) else { return };
                if staged.checksum && part.first && part.last {
                    staged.crc = memory.crc32c(0);
                    *self.checksums_left = self.checksums_left.saturating_sub(part.len);
                }
                if part.first {
                    let crc = if staged.checksum { staged.crc } else { 0 };
                    send(DataEntry { crc: U32::new(crc), len: U64::new(asked.len.get()), ..EMPTY });
                }
                self.stats.bytes_served += part.len;
                connection.outbox.push_payload(memory, Source::Slot(slot));
            }
            (What::Refuse(status), _) => {
                self.stats.refused += 1;
                send(DataEntry { status: U32::new(status as u32), ..EMPTY });
            }
            _ => {
                let mut left = staged.checksums_left;
                send(self.read(&asked, staged.checksum, &mut left));
                staged.checksums_left = left;
                for (memory, region) in self.answer.payloads.drain(..) {
                    connection.outbox.push_payload(memory, Source::Region(region));
                }
            }
        }
    }
}
