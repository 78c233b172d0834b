//! What a case works with: a pair, its memory, and a record that checks every completion against L1.
#![allow(unsafe_code, reason = "registers its own buffers")]

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;
use core::time::Duration;

use super::Rng;
use super::buffer::Buffer;
use super::counting::allocations;
use super::{Hook, Law, Pair, Side};
use crate::{
    Access, Capabilities, Completion, Error, ErrorKind, ExpelMode, Features, Instant, Op, Outcome, RegionId,
    RegionOffset, RemoteOffset, RemoteRegionId, Slice, Token,
};

/// The number of bytes of the region at each end.
pub(super) const REGION_BYTES: usize = 128 << 10;
const REGION: RegionId = RegionId::new(0, 1);
const REMOTE_REGION: RemoteRegionId = RemoteRegionId::new(0, 1);
const STEPS_MAX: u64 = 20_000_000;
/// How many times a slice that fails for the fabric's reasons is submitted.
const ATTEMPTS_MAX: usize = 500;

/// Why a case was not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skip(pub String);

impl Skip {
    pub(super) fn because(reason: &str) -> Self {
        Self(reason.into())
    }
}

/// Stops a case with a sentence that starts with the law.
macro_rules! broken {
    ($law:expr, $($sentence:tt)+) => {
        panic!("{:?} broken: {}", $law, ::alloc::format!($($sentence)+))
    };
}
pub(super) use broken;

/// A pair of transports with memory at both ends, whose calls are checked. Each case gets one.
pub struct Rig<'h> {
    // First, so that the transports are dropped before the memory.
    pair: Box<dyn Pair + 'h>,
    pub(super) law: Law,
    pub(super) caps: Capabilities,
    pub(super) local: Buffer,
    pub(super) remote: Buffer,
    pub(super) more: Vec<Buffer>,
    pub(super) rng: Rng,
    pub(super) now: Instant,
    /// The number of allocations inside `submit` and `poll` so far.
    pub(super) allocated: u64,
    ledger: BTreeMap<u64, Entry>,
    in_flight: usize,
    next_token: u64,
    next_index: u32,
    target_is_polled: bool,
    /// Whether a WRITE since the last fence may still land.
    fence_due: bool,
}

struct Entry {
    slice: Option<Slice>,
    completion: Option<Completion>,
}

impl<'h> Rig<'h> {
    pub(super) fn new(law: Law, mut pair: Box<dyn Pair + 'h>) -> Result<Self, Skip> {
        let caps = pair.initiator().capabilities();
        let local = Buffer::new(REGION_BYTES, &mut *pair, Side::Initiator);
        let remote = Buffer::new(REGION_BYTES, &mut *pair, Side::Target);
        let mut rig = Self {
            pair,
            law,
            caps,
            local,
            remote,
            more: Vec::new(),
            rng: Rng::new(law as u64 + 1),
            now: Instant::ZERO,
            allocated: 0,
            ledger: BTreeMap::new(),
            in_flight: 0,
            next_token: 1,
            next_index: 1,
            target_is_polled: true,
            fence_due: false,
        };
        if !caps.features.intersects(Features::READ.union(Features::WRITE)) {
            return Err(Skip::because("the transport offers neither READ nor WRITE"));
        }
        rig.now = rig.pair.tick();
        rig.register_local();
        rig.export_remote(REGION, REMOTE_REGION);
        Ok(rig)
    }

    /// Registers the local buffer at the initiator.
    pub(super) fn register_local(&mut self) {
        // SAFETY: the buffer outlives the pair and is only reached through volatile spans.
        let registered = unsafe { self.pair.initiator().register(REGION, self.local.span(), Access::LOCAL) };
        self.demand(registered, "registering local memory");
    }

    /// Registers the remote buffer at the target and attaches it.
    pub(super) fn export_remote(&mut self, region: RegionId, remote_region: RemoteRegionId) {
        let access = Access::LOCAL.union(Access::REMOTE_READ).union(Access::REMOTE_WRITE);
        let blob = self.register_remote(region, access);
        let attached = self.initiator().attach(remote_region, &blob);
        self.demand(attached, "attaching a valid export");
    }

    /// Registers the remote buffer at the target and exports it.
    pub(super) fn register_remote(&mut self, region: RegionId, access: Access) -> Vec<u8> {
        let span = self.remote.span();
        // SAFETY: as in `new`.
        let registered = unsafe { self.pair.target().register(region, span, access) };
        self.demand(registered, "registering the target's memory");
        self.export(region)
    }

    pub(super) fn register_at(
        &mut self,
        side: Side,
        region: RegionId,
        buffer: &Buffer,
        access: Access,
    ) -> Result<(), Error> {
        let end = self.end(side);
        // SAFETY: the suite keeps each buffer in `more` or in the rig, dropped after the pair.
        unsafe { end.register(region, buffer.span(), access) }
    }

    pub(super) fn register_span(&mut self, region: RegionId, span: crate::MemSpan) -> Result<(), Error> {
        // SAFETY: `span` lies in one of the rig's buffers, which outlive the pair.
        unsafe { self.pair.initiator().register(region, span, Access::LOCAL) }
    }

    pub(super) fn export(&mut self, region: RegionId) -> Vec<u8> {
        let mut blob = vec![0; self.caps.export_bytes_max as usize];
        match self.pair.target().export(region, &mut blob) {
            Ok(bytes) => blob.truncate(bytes),
            Err(error) => broken!(self.law, "a region with remote rights could not be exported: {error}"),
        }
        blob
    }

    pub(super) fn end(&mut self, side: Side) -> &mut dyn crate::Transport {
        match side {
            Side::Initiator => self.pair.initiator(),
            Side::Target => self.pair.target(),
        }
    }

    pub(super) fn initiator(&mut self) -> &mut dyn crate::Transport {
        self.pair.initiator()
    }

    pub(super) fn target(&mut self) -> &mut dyn crate::Transport {
        self.pair.target()
    }

    pub(super) fn pair(&mut self) -> &mut dyn Pair {
        &mut *self.pair
    }

    /// The identity by which the target knows the initiator.
    pub(super) fn identity(&self) -> Result<u64, Skip> {
        let unknown = Skip::because("the harness does not know the identity of the initiator");
        self.pair.initiator_identity().ok_or(unknown)
    }

    /// Expels `peer` at the target. Polls the target alone meanwhile, or both ends when `both`.
    pub(super) fn expel(&mut self, peer: u64, both: bool) {
        let give_up = self.deadline();
        loop {
            match self.target().expel(peer, ExpelMode::Force) {
                Ok(true) => return,
                Ok(false) if both => self.step(),
                Ok(false) => self.step_target(),
                Err(error) => broken!(self.law, "expelling an initiator by force failed: {error}"),
            }
            if self.now > give_up.0 {
                broken!(self.law, "the expulsion of an initiator does not end (waited {:?})", give_up.1);
            }
        }
    }

    pub(super) fn region(&self) -> RegionId {
        REGION
    }

    pub(super) fn remote_region(&self) -> RemoteRegionId {
        REMOTE_REGION
    }

    pub(super) fn fresh_index(&mut self) -> u32 {
        self.next_index += 1;
        self.next_index
    }

    pub(super) fn fresh_token(&mut self) -> Token {
        self.next_token += 1;
        // Spread over the word: tokens belong to the caller and need not be small numbers.
        Token(self.next_token << 33 ^ self.next_token)
    }

    /// More memory for one end, kept until the pair is dropped.
    pub(super) fn allocate(&mut self, side: Side, bytes: usize) -> usize {
        self.more.push(Buffer::new(bytes, &mut *self.pair, side));
        self.more.len() - 1
    }

    /// A slice, lengthened to the transport's granule where that is more than one byte.
    pub(super) fn slice(&mut self, op: Op, local: usize, remote: usize, len: usize) -> Slice {
        let (remote, len) = (self.granule_down(remote), self.granule_up(len));
        // A slice that grew at the end of the region begins earlier at our end.
        let local =
            if self.caps.granule_bytes == 1 { local } else { local.min(REGION_BYTES.saturating_sub(len)) };
        Slice {
            token: self.fresh_token(),
            local: RegionOffset::new(REGION, local as u64),
            remote: RemoteOffset::new(REMOTE_REGION, remote as u64),
            len: len as u32,
            op,
        }
    }

    pub(super) fn granule_down(&self, bytes: usize) -> usize {
        bytes - bytes % self.caps.granule_bytes as usize
    }

    fn granule_up(&self, bytes: usize) -> usize {
        bytes.next_multiple_of(self.caps.granule_bytes as usize)
    }

    /// `count` slices at odd offsets, each within its own cell at both ends.
    pub(super) fn random_slices(&mut self, count: usize, op: Option<Op>) -> Vec<Slice> {
        let cell = self.granule_down(REGION_BYTES / count);
        let ops = self.ops();
        (0..count)
            .map(|i| {
                let op = op.unwrap_or(ops[self.rng.index(ops.len())]);
                let len = 1 + self.rng.index(cell - 1);
                let len = self.granule_up(len);
                let (local, remote) = (self.rng.index(cell - len + 1), self.rng.index(cell - len + 1));
                self.slice(op, i * cell + local, i * cell + remote, len)
            })
            .collect()
    }

    pub(super) fn ops(&self) -> Vec<Op> {
        let offered = |(feature, op)| self.caps.features.contains(feature).then_some(op);
        [(Features::READ, Op::Read), (Features::WRITE, Op::Write)].into_iter().filter_map(offered).collect()
    }

    pub(super) fn need(&self, feature: Features) -> Result<(), Skip> {
        match self.caps.features.contains(feature) {
            true => Ok(()),
            false => Err(Skip(::alloc::format!("the transport does not offer {feature:?}"))),
        }
    }

    /// Fills the target's memory, after a fence where one is due: a range may get other bytes only then (L5).
    pub(super) fn fill_remote(&mut self, byte: u8) {
        self.fence_if_due();
        self.remote.fill(byte);
    }

    /// Fills both ends with numbers from the seed, after a fence where one is due.
    pub(super) fn scramble(&mut self) {
        self.fence_if_due();
        let mut bytes = vec![0; REGION_BYTES];
        self.rng.fill(&mut bytes);
        self.local.write(0, &bytes);
        self.rng.fill(&mut bytes);
        self.remote.write(0, &bytes);
    }

    // Submission.

    /// One call of `submit`, recorded.
    pub(super) fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        let before = allocations();
        let accepted = self.pair.initiator().submit(batch);
        self.allocated += allocations() - before;
        let count = accepted?;
        if count > batch.len() {
            broken!(Law::L1, "submit accepted {count} slices of {}", batch.len());
        }
        for slice in &batch[..count] {
            self.expect(slice.token, Some(*slice));
        }
        Ok(count)
    }

    /// Submits until all slices are accepted.
    pub(super) fn submit_all(&mut self, mut batch: &[Slice]) {
        let mut give_up = self.deadline();
        while !batch.is_empty() {
            match self.submit(batch) {
                Ok(0) => self.step_before(give_up, Law::L4, "submit accepts nothing any more"),
                Ok(count) => {
                    batch = &batch[count..];
                    give_up = self.deadline();
                }
                Err(error) if error.kind == ErrorKind::Full => {
                    broken!(Law::L4, "being full was reported as an error instead of a short count")
                }
                Err(error) => broken!(self.law, "a valid slice was refused: {error}"),
            }
        }
    }

    /// Submits one slice: it is accepted, or refused with this error.
    pub(super) fn submit_one(&mut self, slice: Slice) -> Result<(), Error> {
        let give_up = self.deadline();
        while self.submit(&[slice])? == 0 {
            self.step_before(give_up, Law::L4, "submit accepts nothing any more");
        }
        Ok(())
    }

    /// Submits one slice and waits for its completion.
    pub(super) fn run_one(&mut self, slice: Slice) -> Result<Completion, Error> {
        self.submit_one(slice)?;
        self.settle();
        Ok(self.completion(slice.token))
    }

    pub(super) fn fence(&mut self, remote_region: RemoteRegionId) -> Result<Token, Error> {
        let token = self.fresh_token();
        let give_up = self.deadline();
        loop {
            match self.initiator().fence(token, remote_region) {
                Err(error) if error.kind == ErrorKind::Full => {
                    self.step_before(give_up, Law::L5, "fences stay full for ever");
                }
                Err(error) => return Err(error),
                Ok(()) => break,
            }
        }
        self.expect(token, None);
        Ok(token)
    }

    /// Fences until the target has acknowledged a fence.
    pub(super) fn fence_for_sure(&mut self) {
        for _ in 0..ATTEMPTS_MAX {
            match self.fence(REMOTE_REGION) {
                Ok(token) => {
                    self.settle();
                    if self.completion(token).outcome == Outcome::Applied {
                        self.fence_due = false;
                        return;
                    }
                }
                Err(error) => broken!(Law::L5, "a fence on an attached remote region was refused: {error}"),
            }
        }
        broken!(Law::L5, "{ATTEMPTS_MAX} fences in a row failed although the target is alive");
    }

    /// Makes sure that nothing lands any more, where something might.
    pub(super) fn fence_if_due(&mut self) {
        if self.fence_due {
            self.fence_for_sure();
        }
    }

    /// Moves all slices, again where the fabric loses them, until each was applied.
    pub(super) fn transfer(&mut self, slices: &[Slice]) {
        self.transfer_and_tell(slices, |_, _, _| ());
    }

    /// As [`transfer`](Self::transfer); calls `applied` with each slice that was applied, and its completion.
    pub(super) fn transfer_and_tell(
        &mut self,
        slices: &[Slice],
        mut applied: impl FnMut(&Self, &Slice, &Completion),
    ) {
        self.fence_if_due();
        let mut todo = slices.to_vec();
        for _ in 0..ATTEMPTS_MAX {
            self.submit_all(&todo);
            self.settle();
            let mut again = Vec::new();
            for slice in todo {
                let end = self.completion(slice.token);
                match end.result {
                    Ok(()) => applied(self, &slice, &end),
                    Err(error) if error.kind.is_retryable_elsewhere() => {
                        again.push(Slice { token: self.fresh_token(), ..slice });
                    }
                    Err(error) => {
                        broken!(self.law, "a valid {:?} of {} bytes failed: {error}", slice.op, slice.len)
                    }
                }
            }
            if again.is_empty() {
                return;
            }
            todo = again;
        }
        broken!(
            self.law,
            "{} slices failed {ATTEMPTS_MAX} times in a row although both ends are alive",
            todo.len()
        );
    }

    /// Checks that the fabric still works: refusals and cancels must not cost the connection.
    pub(super) fn still_works(&mut self) {
        let slices: Vec<Slice> = self.ops().into_iter().map(|op| self.slice(op, 3, 5, 1000)).collect();
        for slice in slices {
            self.transfer(&[slice]);
            self.check_content(&slice);
        }
    }

    /// Checks that a slice is refused with one of `kinds`, by `submit` or by a completion, before any byte
    /// moved.
    pub(super) fn refused(&mut self, slice: Slice, kinds: &[ErrorKind], what: &str) {
        self.fence_if_due();
        for _ in 0..ATTEMPTS_MAX {
            let slice = Slice { token: self.fresh_token(), ..slice };
            let before = (self.local.read(0, REGION_BYTES), self.remote.read(0, REGION_BYTES));
            let kind = match self.run_one(slice) {
                Err(error) => error.kind,
                Ok(Completion { result: Ok(()), .. }) => broken!(self.law, "{what} was carried out"),
                Ok(Completion { result: Err(error), .. }) => error.kind,
            };
            if slice.op == Op::Write && before.1 != self.remote.read(0, REGION_BYTES) {
                broken!(self.law, "{what} was refused, but changed bytes at the target");
            }
            if slice.op == Op::Read && before.0 != self.local.read(0, REGION_BYTES) {
                broken!(self.law, "{what} was refused, but changed local bytes");
            }
            self.check_guards(what);
            if kinds.contains(&kind) {
                return;
            }
            if !kind.is_retryable_elsewhere() {
                broken!(self.law, "{what} was refused as {kind:?}, expected one of {kinds:?}");
            }
        }
        broken!(self.law, "{what} was never refused, only lost");
    }

    // Time.

    /// Lets some time pass and polls both ends.
    pub(super) fn step(&mut self) {
        self.step_with_room(64);
    }

    /// As `step`, with room for `room` completions; returns their number.
    pub(super) fn step_with_room(&mut self, room: usize) -> usize {
        let blank = Completion::applied(Token(u64::MAX));
        let mut out = [blank; 64];
        self.step_target();
        let before = allocations();
        let count = self.pair.initiator().poll(self.now, &mut out[..room]);
        self.allocated += allocations() - before;
        if count > room {
            broken!(Law::L1, "poll returned {count} completions into room for {room}");
        }
        for completion in &out[..count] {
            self.record(*completion);
        }
        count
    }

    /// Lets some time pass and polls the target alone, as if the initiator's process were stopped.
    pub(super) fn step_target(&mut self) {
        self.now = self.pair.tick();
        if self.target_is_polled {
            let mut out = [Completion::applied(Token(u64::MAX)); 64];
            let before = allocations();
            let count = self.pair.target().poll(self.now, &mut out);
            self.allocated += allocations() - before;
            if count > 0 {
                broken!(
                    Law::L1,
                    "the target completed {:?}, although no slice was submitted to it",
                    out[0].token
                );
            }
        }
    }

    /// Lets some time pass and polls the initiator alone, as if the target's process were not scheduled.
    pub(super) fn step_initiator(&mut self) {
        let polled = core::mem::replace(&mut self.target_is_polled, false);
        self.step();
        self.target_is_polled = polled;
    }

    /// Steps until nothing is in flight.
    pub(super) fn settle(&mut self) {
        let (give_up, patience) = self.deadline();
        while self.in_flight > 0 {
            self.step();
            if self.now > give_up && self.in_flight > 0 {
                broken!(self.law.min(Law::L5), "{} (waited {patience:?})", self.what_is_lost());
            }
        }
    }

    fn what_is_lost(&self) -> String {
        let lost = self.ledger.iter().find(|(_, entry)| entry.completion.is_none()).map(|(token, _)| *token);
        match lost.and_then(|token| self.ledger.get(&token)) {
            Some(Entry { slice: Some(slice), .. }) => ::alloc::format!("{slice:?} never completed"),
            _ => ::alloc::format!("fence {lost:?} never completed"),
        }
    }

    /// Steps for `time`.
    pub(super) fn linger(&mut self, time: Duration) {
        let until = self.now + time;
        for _ in 0..STEPS_MAX {
            if self.now >= until {
                return;
            }
            self.step();
        }
    }

    /// Steps for as long as a late write may still land.
    pub(super) fn linger_for_late_writes(&mut self) {
        let late_max = self.pair.late_max();
        self.linger(late_max);
    }

    pub(super) fn some_steps(&mut self, below: u64) {
        for _ in 0..self.rng.below(below) {
            self.step();
        }
    }

    pub(super) fn deadline(&self) -> (Instant, Duration) {
        (self.now + self.pair.patience(), self.pair.patience())
    }

    pub(super) fn step_before(&mut self, give_up: (Instant, Duration), law: Law, what: &str) {
        self.step();
        if self.now > give_up.0 {
            broken!(law, "{what} (waited {:?})", give_up.1);
        }
    }

    // Results.

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    pub(super) fn is_done(&self, token: Token) -> bool {
        self.ledger.get(&token.0).is_some_and(|entry| entry.completion.is_some())
    }

    pub(super) fn completion(&self, token: Token) -> Completion {
        match self.ledger.get(&token.0).and_then(|entry| entry.completion) {
            Some(completion) => completion,
            None => broken!(Law::L1, "{token:?} has not completed"),
        }
    }

    /// Checks that both ends of an applied slice hold the same bytes.
    pub(super) fn check_content(&self, slice: &Slice) {
        let local = self.local.read(slice.local.offset as usize, slice.len as usize);
        let remote = self.remote.read(slice.remote.offset as usize, slice.len as usize);
        if local != remote {
            broken!(self.law, "after an applied {:?} of {} bytes the two ends differ", slice.op, slice.len);
        }
    }

    pub(super) fn check_guards(&self, what: &str) {
        if !self.local.guards_intact() {
            broken!(Law::L2, "{what} changed local bytes outside the registered region");
        }
        if !self.remote.guards_intact() {
            broken!(Law::L6, "{what} changed the target's bytes outside the exported region");
        }
    }

    // The harness.

    pub(super) fn stall(&mut self, stalled: bool) -> Result<(), Skip> {
        hooked(self.pair.stall_target(stalled))?;
        self.target_is_polled = !stalled;
        Ok(())
    }

    pub(super) fn kill(&mut self) -> Result<(), Skip> {
        hooked(self.pair.kill_target())?;
        self.target_is_polled = false;
        Ok(())
    }

    pub(super) fn restart(&mut self) -> Result<(), Skip> {
        hooked(self.pair.restart_target())?;
        // What was on its way was meant for another incarnation.
        self.fence_due = false;
        self.target_is_polled = true;
        Ok(())
    }

    pub(super) fn cut(&mut self) -> Result<(), Skip> {
        hooked(self.pair.cut())
    }

    fn expect(&mut self, token: Token, slice: Option<Slice>) {
        self.in_flight += 1;
        let twice = self.ledger.insert(token.0, Entry { slice, completion: None });
        assert!(twice.is_none(), "the suite uses each token once");
    }

    fn record(&mut self, completion: Completion) {
        let Some(entry) = self.ledger.get_mut(&completion.token.0) else {
            broken!(Law::L1, "{:?} completed, and was never accepted", completion.token)
        };
        if let Some(first) = entry.completion {
            broken!(Law::L1, "{:?} completed twice: {first:?}, then {completion:?}", completion.token);
        }
        if completion.result.is_ok() != (completion.outcome == Outcome::Applied) {
            broken!(Law::L2, "a completion contradicts itself: {completion:?}");
        }
        if completion.crc32c.is_some() && (completion.result.is_err() || entry.slice.is_none()) {
            broken!(Law::L2, "a checksum of what was not applied, or of a fence: {completion:?}");
        }
        if completion.outcome == Outcome::Unknown && !completion.fence_needed {
            broken!(Law::L5, "an Unknown outcome must ask for a fence: {completion:?}");
        }
        if completion.outcome == Outcome::Unknown && entry.slice.is_some_and(|slice| slice.op == Op::Read) {
            broken!(Law::L2, "a READ cannot end Unknown, it changes no remote byte: {completion:?}");
        }
        self.fence_due |= completion.fence_needed && entry.slice.is_some();
        entry.completion = Some(completion);
        self.in_flight -= 1;
    }

    fn demand(&self, result: Result<(), Error>, what: &str) {
        if let Err(error) = result {
            broken!(self.law, "{what} failed: {error}");
        }
    }
}

impl fmt::Debug for Rig<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rig")
            .field("now", &self.now)
            .field("in_flight", &self.in_flight)
            .finish_non_exhaustive()
    }
}

fn hooked(hook: Hook) -> Result<(), Skip> {
    match hook {
        Hook::Done => Ok(()),
        Hook::Unsupported(reason) => Err(Skip::because(reason)),
    }
}
