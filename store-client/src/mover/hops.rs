//! Hops: copies between device memory and *slots* of host memory that are registered with the engine.
//!
//! ```text
//!   put   device memory ── hop ──▶ slot ── piece ──▶ node      its checksum is computed in the slot
//!   get   device memory ◀── hop ── slot ◀── piece ── node      likewise, before the hop
//! ```
//!
//! The bytes of device memory pass through a slot over every fabric, because the CPU computes their checksum
//! there. So no fabric has to know the device. A slot is page-locked memory of a [`Stager`]; all slots are
//! taken and registered once, and stay so.
//!
//! A slot holds several short pieces. Each piece and each hop of it is a *user* of the slot, which is filled
//! again from its beginning when it has none.

use std::sync::Arc;
use std::time::{Duration, Instant};

use store_core::chunks::CHUNK_BYTES;
use te_core::device::{Devices, Hop, HopDirection, HopEnd, Stager, StagingSlot};
use te_core::{Error, Location, MemSpan, RegionId, Token};
use te_engine::RegisterError;
use te_host::fork::Own;

use crate::engine::Engine;
use crate::error::{DeviceError, StoreError};
use crate::memory::{BufferRange, Memory};
use crate::sys;

/// Most slots of one device. More do not make a transfer faster, and each is a region of the engine.
const SLOTS_MAX: usize = 256;
/// Pieces begin at multiples of this in their slot, bytes.
const ALIGN: u32 = 64;
/// Hops of an operation that is over are given up when none has ended for this long: the device hangs.
const HOPS_MAX: Duration = Duration::from_secs(1);
/// Ends of hops that are taken from a stager at once.
const ENDS: usize = 32;

/// A piece of a slot, from `offset` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotPiece {
    stager: u16,
    slot: u16,
    offset: u32,
}

/// A hop that is under way, for the mover.
#[derive(Clone, Copy, Debug)]
pub(super) struct UnderWay {
    pub(super) job: usize,
    /// The number of the piece that is lifted from the device; `None`: the hop goes to the device.
    pub(super) lift: Option<u64>,
    /// The device memory.
    pub(super) range: BufferRange,
    /// Its address.
    pub(super) addr: u64,
    at: SlotPiece,
    /// Its operation is over.
    is_orphan: bool,
}

/// The stagers of a client.
#[derive(Default)]
pub(super) struct Hops {
    stagers: Vec<Slots>,
    /// By token.
    under_way: Vec<Option<UnderWay>>,
    free_tokens: Vec<usize>,
    /// Hops under way of the current operation, and of earlier ones.
    running: usize,
    orphans: usize,
    orphans_total: u64,
    ended: Vec<(UnderWay, Result<(), Error>)>,
    /// When the latest hop ended, or the first was started.
    progress: Option<Instant>,
}

/// A stager, all of whose slots are taken.
struct Slots {
    location: Location,
    /// Its driver does not work in a forked child.
    stager: Own<Box<dyn Stager>>,
    slot_bytes: u32,
    slots: Vec<Slot>,
    /// The slot that is being filled.
    current: usize,
    /// Hops that the stager has not accepted yet.
    queue: Vec<Hop>,
}

struct Slot {
    slot: StagingSlot,
    region: RegionId,
    used: u32,
    users: u32,
}

impl Hops {
    /// The number of the stager for memory at `location`, which is made at the first call.
    ///
    /// # Errors
    /// `DeviceMemory`: `NoStager`, `ShortSlots`; `Memory` when the engine does not register a single slot.
    pub(super) fn open(
        &mut self,
        engine: &mut Engine,
        devices: &Arc<dyn Devices>,
        location: Location,
    ) -> Result<usize, StoreError> {
        if let Some(known) = self.stagers.iter().position(|stager| stager.location == location) {
            return Ok(known);
        }
        let none = |error| StoreError::DeviceMemory(DeviceError::NoStager { location, error });
        let mut stager = devices.stager(location).map_err(none)?;
        let slot_bytes = stager.slot_bytes();
        if u64::from(slot_bytes) < CHUNK_BYTES {
            return Err(StoreError::DeviceMemory(DeviceError::ShortSlots { slot_bytes }));
        }
        let mut slots = Vec::new();
        while slots.len() < SLOTS_MAX
            && let Some(slot) = stager.take()
        {
            #[allow(unsafe_code, reason = "registers a slot that stays taken")]
            // SAFETY: the slot stays in `slots` beside its stager. They are dropped after the engine
            // (`Client`), or below, after the region was unregistered.
            let registered = unsafe { sys::register_slot(engine, slot.span) };
            match registered {
                Ok(region) => slots.push(Slot { slot, region, used: 0, users: 0 }),
                Err(error) if slots.is_empty() => return Err(error.into()),
                Err(RegisterError::Full { .. }) => break,
                Err(error) => {
                    for slot in slots {
                        let undone = engine.unregister(slot.region);
                        debug_assert!(undone.is_ok(), "nothing was moved from or into the slot");
                    }
                    return Err(error.into());
                }
            }
        }
        if slots.is_empty() {
            return Err(none(te_core::ErrorKind::Full.into()));
        }
        let stager = Own::new(stager);
        self.stagers.push(Slots { location, stager, slot_bytes, slots, current: 0, queue: Vec::new() });
        Ok(self.stagers.len() - 1)
    }

    /// The device of a hop.
    pub(super) fn location(&self, hop: &UnderWay) -> Location {
        self.stagers[usize::from(hop.at.stager)].location
    }

    /// Takes a piece of at most `len` bytes, and its length; `None` while no slot has room.
    pub(super) fn take(&mut self, stager: usize, len: u64) -> Option<(SlotPiece, u64)> {
        let Slots { slots, current, slot_bytes, .. } = &mut self.stagers[stager];
        let len = u32::try_from(len).unwrap_or(u32::MAX).min(*slot_bytes);
        if slots[*current].users == 0 {
            slots[*current].used = 0;
        }
        if *slot_bytes - slots[*current].used < len {
            let count = slots.len();
            let next = (1..count).map(|step| (*current + step) % count).find(|&slot| slots[slot].users == 0);
            *current = next?;
            slots[*current].used = 0;
        }
        let slot = &mut slots[*current];
        let offset = slot.used;
        slot.used = (offset + len).next_multiple_of(ALIGN).min(*slot_bytes);
        slot.users += 1;
        Some((SlotPiece { stager: stager as u16, slot: *current as u16, offset }, len.into()))
    }

    /// Ends the use of a slot by a piece.
    pub(super) fn release(&mut self, piece: SlotPiece) {
        let slot = self.slot_mut(piece);
        slot.users = slot.users.saturating_sub(1);
    }

    /// The region of a piece's slot, and where the piece begins in it.
    pub(super) fn local(&self, piece: SlotPiece) -> (RegionId, u64) {
        (self.slot(piece).region, piece.offset.into())
    }

    /// The memory of a piece's slot, and where the piece begins in it.
    pub(super) fn memory(&self, piece: SlotPiece) -> (MemSpan, u64) {
        (self.slot(piece).slot.span, piece.offset.into())
    }

    /// Lets the bytes of device memory be copied to a piece of a slot.
    pub(super) fn lift(&mut self, job: usize, lift: u64, piece: SlotPiece, of: (BufferRange, MemSpan)) {
        self.start(job, Some(lift), piece, 0, of);
    }

    /// Lets the bytes from `skip` on of a piece be copied to a range of device memory. Returns the number of
    /// hops: 0 when there is no such range.
    pub(super) fn sink(
        &mut self,
        job: usize,
        piece: SlotPiece,
        skip: u64,
        to: BufferRange,
        memory: &Memory,
    ) -> u32 {
        let Some(span) = memory.device_span(to) else { return 0 };
        self.start(job, None, piece, skip as u32, (to, span));
        1
    }

    /// Length of the slots for a region of device memory, bytes.
    pub(super) fn slot_bytes(&self, memory: &Memory, region: RegionId) -> u64 {
        memory.device(region).map_or(0, |device| self.stagers[device.stager].slot_bytes.into())
    }

    fn start(
        &mut self,
        job: usize,
        lift: Option<u64>,
        at: SlotPiece,
        skip: u32,
        (range, device): (BufferRange, MemSpan),
    ) {
        let addr = device.as_ptr().addr() as u64;
        let token = self.free_tokens.pop().unwrap_or_else(|| {
            self.under_way.push(None);
            self.under_way.len() - 1
        });
        self.under_way[token] = Some(UnderWay { job, lift, range, addr, at, is_orphan: false });
        if self.running == 0 {
            self.progress = Some(Instant::now());
        }
        self.running += 1;
        let slot = self.slot_mut(at);
        slot.users += 1;
        let slot = slot.slot.index;
        let direction = if lift.is_some() { HopDirection::ToHost } else { HopDirection::ToDevice };
        let hop = Hop { token: Token(token as u64), slot, offset: at.offset + skip, device, direction };
        self.stagers[usize::from(at.stager)].queue.push(hop);
    }

    /// Starts hops and takes note of those that have ended. Returns whether any has ended.
    pub(super) fn poll(&mut self) -> bool {
        if self.running == 0 && self.orphans == 0 {
            return false;
        }
        let before = self.ended.len();
        for stager in 0..self.stagers.len() {
            loop {
                let Slots { stager, queue, .. } = &mut self.stagers[stager];
                if queue.is_empty() {
                    break;
                }
                match stager.start(queue) {
                    Ok(0) => break,
                    Ok(started) => drop(queue.drain(..started)),
                    Err(error) => {
                        let hop = queue.remove(0);
                        self.end(hop.token, Err(error));
                    }
                }
            }
            loop {
                let mut ends = [HopEnd { token: Token(0), result: Ok(()) }; ENDS];
                let count = self.stagers[stager].stager.poll(&mut ends);
                ends[..count].iter().for_each(|end| self.end(end.token, end.result));
                if count < ends.len() {
                    break;
                }
            }
        }
        self.ended.len() > before
    }

    fn end(&mut self, Token(token): Token, result: Result<(), Error>) {
        let token = token as usize;
        let Some(hop) = self.under_way.get_mut(token).and_then(Option::take) else { return };
        self.free_tokens.push(token);
        self.release(hop.at);
        if hop.is_orphan {
            self.orphans -= 1;
        } else {
            self.running -= 1;
            self.progress = Some(Instant::now());
            self.ended.push((hop, result));
        }
    }

    /// The next hop of the operation that has ended, and how.
    pub(super) fn next_ended(&mut self) -> Option<(UnderWay, Result<(), Error>)> {
        self.ended.pop()
    }

    /// Whether no hop of the operation is under way or has ended without being taken note of.
    pub(super) fn is_idle(&self) -> bool {
        self.running == 0 && self.ended.is_empty()
    }

    /// Whether no hop has ended for too long, although some are under way.
    pub(super) fn hang(&self) -> bool {
        self.running > 0 && self.progress.is_some_and(|at| at.elapsed() > HOPS_MAX)
    }

    /// Gives up the hops of these jobs, and returns them. Their memory is [covered](Self::covers) until they
    /// have ended.
    pub(super) fn give_up(&mut self, mut is_over: impl FnMut(usize) -> bool) -> Vec<UnderWay> {
        let mut given_up = Vec::new();
        for token in 0..self.under_way.len() {
            let Some(hop) = &mut self.under_way[token] else { continue };
            if hop.is_orphan || !is_over(hop.job) {
                continue;
            }
            hop.is_orphan = true;
            let hop = *hop;
            self.running -= 1;
            self.orphans += 1;
            given_up.push(hop);
            let queue = &mut self.stagers[usize::from(hop.at.stager)].queue;
            if let Some(at) = queue.iter().position(|hop| hop.token == Token(token as u64)) {
                // It was never started.
                queue.remove(at);
                self.end(Token(token as u64), Ok(()));
            } else {
                self.orphans_total += 1;
            }
        }
        given_up
    }

    /// Gives up everything, after a panic. `held` are the pieces that fabrics may still touch.
    pub(super) fn abandon(&mut self, held: impl Iterator<Item = SlotPiece>) {
        self.give_up(|_| true);
        self.ended.clear();
        self.stagers.iter_mut().flat_map(|stager| &mut stager.slots).for_each(|slot| slot.users = 0);
        let orphans: Vec<SlotPiece> = self.under_way.iter().flatten().map(|hop| hop.at).collect();
        for piece in held.chain(orphans) {
            self.slot_mut(piece).users += 1;
        }
    }

    /// Whether a hop that was given up may still read or write a part of the device memory.
    pub(super) fn covers(&self, span: MemSpan) -> bool {
        let start = span.as_ptr().addr() as u64;
        let overlaps = |hop: &UnderWay| {
            hop.addr < start.saturating_add(span.len() as u64)
                && start < hop.addr.saturating_add(hop.range.len)
        };
        self.orphans > 0 && self.under_way.iter().flatten().any(|hop| hop.is_orphan && overlaps(hop))
    }

    /// How many hops under way touch the region.
    pub(super) fn uses(&self, region: RegionId) -> usize {
        self.under_way.iter().flatten().filter(|hop| hop.range.region == region).count()
    }

    /// Number of hops that were given up after they had been started.
    pub(super) const fn orphans_total(&self) -> u64 {
        self.orphans_total
    }

    fn slot(&self, piece: SlotPiece) -> &Slot {
        &self.stagers[usize::from(piece.stager)].slots[usize::from(piece.slot)]
    }

    fn slot_mut(&mut self, piece: SlotPiece) -> &mut Slot {
        &mut self.stagers[usize::from(piece.stager)].slots[usize::from(piece.slot)]
    }
}
