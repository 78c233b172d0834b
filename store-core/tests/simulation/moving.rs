//! How a simulated client moves bytes: whole objects with their trailers, or the chunks that cover a part;
//! and how it verifies them.

use store_core::chunks::{CHUNK_BYTES, Cover, expected, stored_len, trailer_len};
use store_core::client::{FenceEnd, Transfer, TransferEnd};
use store_core::{SegmentNo, unbound};
use te_core::{
    Completion, ErrorKind, Memory as _, Op, Outcome, RegionOffset, RemoteOffset, RemoteRegionId, Slice,
    Token, Transport,
};

use crate::client::{Client, REGION};
use crate::common::{Core, slice_bytes};
use crate::memory::checksum;
use crate::scenario::{LATE_MAX, Lies};
use crate::shadow::Violation;

#[derive(Clone, Copy)]
pub(crate) enum What {
    Slice(u64),
    Fence(SegmentNo),
}

pub(crate) struct Moving {
    pub(crate) transfer: Transfer,
    pub(crate) tokens: Vec<Token>,
    /// Offset and length of the pieces of the object that are moved. They have the same offsets in the
    /// client's memory.
    pieces: Vec<(u64, u64)>,
    left: usize,
    outcome: Outcome,
    fence_needed: bool,
}

impl Client {
    /// Takes completions from the fabric.
    pub(crate) fn reap(&mut self, core: &mut Core) -> bool {
        if self.tokens.is_empty() {
            return false;
        }
        let mut done = [Completion::applied(Token(0)); 16];
        let mut any = false;
        loop {
            let count = self.transport.poll(core.now, &mut done);
            for completion in &done[..count] {
                any = true;
                if completion.result.is_err_and(|error| error.kind == ErrorKind::Expelled) {
                    core.report.turned_away += 1;
                    self.expelled = true;
                }
                match self.tokens.remove(&completion.token) {
                    Some(What::Slice(number)) => {
                        self.slice_ended(core, number, completion.outcome, completion.fence_needed)
                    }
                    Some(What::Fence(segment)) => {
                        // A target that restarted counts as fenced, too.
                        let restarted = |error: te_core::Error| error.kind == ErrorKind::PeerRestarted;
                        let held = completion.result.is_ok() || completion.result.is_err_and(restarted);
                        if held {
                            core.shadow.fenced(self.index, segment);
                        }
                        core.report.fences += u64::from(held);
                        self.put.handle_fence(segment, FenceEnd::of(held));
                    }
                    None => panic!("a completion of an unknown token: {completion:?}"),
                }
            }
            if count < done.len() {
                return any;
            }
        }
    }

    pub(crate) fn transfer(&mut self, core: &mut Core, transfer: Transfer) -> Result<(), Violation> {
        let number = self.next_id();
        let mut slot = u64::from(transfer.item) * self.slot_bytes;
        let len = transfer.len;
        let mut pieces = vec![(0, len)];
        if transfer.op == Op::Write {
            let moved = self.moved(&transfer);
            let item = moved.as_ref().map_or(transfer.item as usize, |moved| moved.item);
            let bytes = if moved.is_some() { len } else { stored_len(len) };
            let range = (transfer.segment, transfer.addr, bytes);
            let whole = moved.as_ref().map_or(range, |moved| moved.whole);
            let generation = self.asked[item].generation.unwrap_or(0);
            let id = (self.index, number);
            let begun = core.shadow.write_begins(core.now, id, self.engine, generation, (whole, range));
            core.judge(begun)?;
            slot = item as u64 * self.slot_bytes + moved.map_or(0, |moved| moved.offset);
            pieces = vec![(0, bytes)];
        } else if let Some((start, count)) = self.asked[transfer.item as usize].part {
            let end = count.map_or(len, |count| start + count);
            let cover = Cover::new(len, std::iter::once(start..end));
            pieces = cover.runs().iter().map(|run| (run.offset, run.len)).collect();
            pieces.extend((trailer_len(len) > 0).then_some((len, trailer_len(len))));
        }
        let mut moving = Moving {
            transfer,
            tokens: Vec::new(),
            pieces,
            left: 0,
            outcome: Outcome::Applied,
            fence_needed: false,
        };
        let Some(segment) = self.attached(core, transfer.segment) else {
            moving.outcome = Outcome::NotApplied;
            self.transfers.insert(number, moving);
            self.transfer_ended(core, number);
            return Ok(());
        };
        let step = slice_bytes(len);
        let mut slices = Vec::new();
        for (from, bytes) in moving.pieces.iter().copied() {
            for offset in (from..from + bytes).step_by(step as usize) {
                let token = Token(self.next_id());
                slices.push(Slice {
                    token,
                    local: RegionOffset::new(REGION, slot + offset),
                    remote: RemoteOffset::new(segment, transfer.addr + offset),
                    len: step.min(from + bytes - offset) as u32,
                    op: transfer.op,
                });
            }
        }
        let pauses = transfer.op == Op::Write && core.stops_writer(self.index, self.life);
        let sent = if pauses { core.below(slices.len() as u64) as usize } else { slices.len() };
        self.stopped |= pauses;
        moving.left = slices.len();
        self.transfers.insert(number, moving);
        for (at, slice) in slices.into_iter().enumerate() {
            if at >= sent {
                self.unsent.push((number, slice));
            } else if !self.submit(number, slice) {
                self.slice_ended(core, number, Outcome::NotApplied, false);
            }
        }
        Ok(())
    }

    pub(crate) fn fence(&mut self, core: &mut Core, segment: SegmentNo) {
        if core.lies.contains(Lies::FENCE) {
            return self.put.handle_fence(segment, FenceEnd::Held);
        }
        let token = Token(self.next_id());
        match self.segments.get(&segment).map(|id| self.transport.fence(token, *id)) {
            Some(Ok(())) => drop(self.tokens.insert(token, What::Fence(segment))),
            _ => self.put.handle_fence(segment, FenceEnd::Failed),
        }
    }

    pub(crate) fn slice_ended(&mut self, core: &mut Core, number: u64, outcome: Outcome, fence_needed: bool) {
        let Some(moving) = self.transfers.get_mut(&number) else { return };
        moving.outcome = match (moving.outcome, outcome) {
            (Outcome::Unknown, _) | (_, Outcome::Unknown) => Outcome::Unknown,
            (Outcome::NotApplied, _) | (_, Outcome::NotApplied) => Outcome::NotApplied,
            _ => Outcome::Applied,
        };
        moving.fence_needed |= fence_needed;
        moving.left -= 1;
        if moving.left == 0 {
            self.transfer_ended(core, number);
        }
    }

    fn transfer_ended(&mut self, core: &mut Core, number: u64) {
        let Some(moving) = self.transfers.remove(&number) else { return };
        let Transfer { id, item, op, .. } = moving.transfer;
        let mut end = TransferEnd {
            outcome: moving.outcome,
            fence_needed: moving.fence_needed,
            ..TransferEnd::read(0)
        };
        if op == Op::Write {
            let loose = end.fence_needed || end.outcome == Outcome::Unknown;
            core.report.unknown_writes += u64::from(loose);
            core.shadow.write_ends((self.index, number), loose.then(|| core.now + LATE_MAX));
            if core.lies.contains(Lies::OUTCOME) && loose {
                end = TransferEnd::written();
            }
            self.put.handle_transfer(id, end);
            return;
        }
        let asked = &self.asked[item as usize];
        let (object, part) = (asked.object, asked.part.is_some());
        if end.outcome == Outcome::Applied {
            (end.checksum, end.damaged) = self.sum(&moving, part);
        }
        let lying = core.lies.contains(Lies::CHECKSUM) || part && core.lies.contains(Lies::TRAILER);
        if let Some(object) = object.filter(|_| lying) {
            let committed = unbound(object.checksum, &asked.key, object.generation);
            (end.checksum, end.damaged) = (committed, false);
        }
        self.get.handle_transfer(
            if core.lies.contains(Lies::CLOCK) { self.began } else { self.clock.shows(core.now) },
            id,
            end,
        );
    }

    /// The object's checksum according to what has arrived, and whether a chunk does not match the trailer.
    fn sum(&self, moving: &Moving, part: bool) -> (u32, bool) {
        let Transfer { item, len, .. } = moving.transfer;
        let slot = u64::from(item) * self.slot_bytes;
        if !part || trailer_len(len) == 0 {
            // The only chunk of an object is the whole object.
            return (checksum(&self.memory.read(slot, len)), false);
        }
        let trailer = self.memory.read(slot + len, trailer_len(len));
        let mut damaged = false;
        for (from, bytes) in moving.pieces.iter().filter(|(from, _)| *from < len) {
            for offset in (*from..from + bytes).step_by(CHUNK_BYTES as usize) {
                let block = CHUNK_BYTES.min(from + bytes - offset);
                let sum = checksum(&self.memory.read(slot + offset, block));
                damaged |= expected(&trailer, len, offset, block) != Some(sum);
            }
        }
        (expected(&trailer, len, 0, len).unwrap_or(0), damaged)
    }

    fn attached(&mut self, core: &Core, segment: SegmentNo) -> Option<RemoteRegionId> {
        if let Some(id) = self.segments.get(&segment) {
            return Some(*id);
        }
        let id = RemoteRegionId::new(segment.get(), 1);
        self.transport.attach(id, core.export_of(segment)?).ok()?;
        self.segments.insert(segment, id);
        Some(id)
    }
}
