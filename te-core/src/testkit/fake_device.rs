//! A fake device: memory that the CPU cannot touch, and a stager that is slow and ends hops out of order.
#![allow(unsafe_code, reason = "slots are raw memory that both a caller and the stager reach")]

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::PeekPoke;
use super::Rng;
use crate::device::{Devices, Hop, HopDirection, HopEnd, Stager, StagingSlot};
use crate::{Buffer, Error, ErrorKind, Location, MemSpan, MemoryKinds, VolatileSpan};

/// Where the addresses of fake devices begin: at the end of the address space, which no process has mapped.
/// Code that uses one as host memory faults.
const ADDRESSES: usize = usize::MAX << (usize::BITS - 8);
const PAGE: usize = 4096;

/// How a fake device stages.
#[derive(Clone, Copy, Debug)]
pub struct FakeStaging {
    /// The number of slots of each stager.
    pub slots: u32,
    /// The length of a slot, in bytes.
    pub slot_bytes: u32,
    /// The number of hops that a stager carries out at a time; `start` accepts no more.
    pub hops_max: u32,
    /// A hop ends after 1 to this many polls.
    pub polls_max: u32,
}

impl Default for FakeStaging {
    fn default() -> Self {
        Self { slots: 8, slot_bytes: 16 << 10, hops_max: 16, polls_max: 5 }
    }
}

/// Fake devices of one location. Clones share the memory.
///
/// A hop copies at the moment at which it ends, so that a source that changes too early, or a destination
/// that is read too early, shows as wrong bytes.
///
/// ```
/// use te_core::testkit::{FakeDevices, FakeStaging, stager_conformance};
/// use te_core::{GpuVendor, Location};
///
/// let device = FakeDevices::new(1, Location::Device(GpuVendor::Nvidia, 0), FakeStaging::default());
/// stager_conformance(&device, &device, device.location(), |bytes| device.allocate(bytes));
/// ```
#[derive(Clone)]
pub struct FakeDevices {
    location: Location,
    staging: FakeStaging,
    memory: Arc<Mutex<FakeMemory>>,
}

struct FakeMemory {
    rng: Rng,
    end: usize,
    /// The first address and the bytes of each, ascending.
    allocations: Vec<(usize, Vec<u8>)>,
}

impl FakeMemory {
    /// The part of an allocation that is the whole range.
    fn find(&mut self, address: usize, len: usize) -> Option<&mut [u8]> {
        let after = self.allocations.partition_point(|(base, _)| *base <= address);
        let (base, bytes) = self.allocations.get_mut(after.checked_sub(1)?)?;
        let at = address - *base;
        bytes.get_mut(at..at.checked_add(len)?)
    }
}

impl FakeDevices {
    /// Devices at `location`, without memory yet. `seed` determines how long hops take and in which order
    /// they end.
    #[must_use]
    pub fn new(seed: u64, location: Location, staging: FakeStaging) -> Self {
        let memory = FakeMemory { rng: Rng::new(seed), end: ADDRESSES, allocations: Vec::new() };
        Self { location, staging, memory: Arc::new(Mutex::new(memory)) }
    }

    /// The location of the memory.
    #[must_use]
    pub fn location(&self) -> Location {
        self.location
    }

    /// Zeroed device memory, aligned to 4096. It exists as long as the devices.
    #[must_use]
    pub fn allocate(&self, bytes: usize) -> MemSpan {
        let mut memory = self.lock();
        let base = memory.end;
        // A page between two allocations belongs to neither.
        memory.end = base + bytes.next_multiple_of(PAGE) + PAGE;
        memory.allocations.push((base, vec![0; bytes]));
        MemSpan::new(core::ptr::without_provenance_mut(base), bytes).at(self.location)
    }

    fn lock(&self) -> MutexGuard<'_, FakeMemory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for FakeDevices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FakeDevices").field("location", &self.location).finish_non_exhaustive()
    }
}

/// Memory of the devices by its contents, host memory by its address.
impl PeekPoke for FakeDevices {
    unsafe fn peek(&self, span: MemSpan, out: &mut [u8]) {
        if span.location() != self.location {
            // SAFETY: the caller's promise, passed on.
            return unsafe { super::ByPointer.peek(span, out) };
        }
        match self.lock().find(span.as_ptr().addr(), out.len()) {
            Some(bytes) => out.copy_from_slice(bytes),
            None => panic!("{span:?} is not memory of {}", self.location),
        }
    }

    unsafe fn poke(&self, span: MemSpan, bytes: &[u8]) {
        if span.location() != self.location {
            // SAFETY: the caller's promise, passed on.
            return unsafe { super::ByPointer.poke(span, bytes) };
        }
        match self.lock().find(span.as_ptr().addr(), bytes.len()) {
            Some(device) => device.copy_from_slice(bytes),
            None => panic!("{span:?} is not memory of {}", self.location),
        }
    }
}

impl Devices for FakeDevices {
    fn locate(&self, ptr: *mut u8, len: usize) -> Option<Location> {
        self.lock().find(ptr.addr(), len).map(|_| self.location)
    }

    fn kinds(&self) -> MemoryKinds {
        self.location.kind()
    }

    fn stager(&self, location: Location) -> Result<Box<dyn Stager>, Error> {
        if location != self.location {
            return Err(ErrorKind::Unsupported.into());
        }
        let FakeStaging { slots, slot_bytes, hops_max, .. } = self.staging;
        let seed = self.lock().rng.next();
        Ok(Box::new(FakeStager {
            device: self.clone(),
            rng: Rng::new(seed),
            slots: (0..slots).map(|_| Slot::new(slot_bytes as usize)).collect(),
            running: Vec::with_capacity(hops_max as usize),
        }))
    }
}

/// A vector that is decomposed for as long as the slot exists.
struct Slot {
    span: MemSpan,
    capacity: usize,
    taken: bool,
}

impl Slot {
    fn new(bytes: usize) -> Self {
        let (span, capacity) = vec![0; bytes].into_raw();
        Self { span, capacity, taken: false }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // SAFETY: the parts from `new`, composed once.
        drop(unsafe { Vec::from_raw(self.span, self.capacity) });
    }
}

struct FakeStager {
    device: FakeDevices,
    rng: Rng,
    slots: Vec<Slot>,
    /// The hops that run, and the number of polls until each ends.
    running: Vec<(Hop, u32)>,
}

// SAFETY: only the addresses of the slots are not `Send`, and their memory belongs to the stager.
unsafe impl Send for FakeStager {}

impl FakeStager {
    fn check(&self, hop: &Hop) -> Result<(), Error> {
        let slot = self.slots.get(hop.slot as usize).filter(|slot| slot.taken).ok_or(ErrorKind::NotFound)?;
        if hop.device.is_empty() {
            return Err(ErrorKind::InvalidArgument.into());
        }
        if !slot.span.contains(hop.offset.into(), hop.device.len() as u64) {
            return Err(ErrorKind::OutOfRange.into());
        }
        match self.device.locate(hop.device.as_ptr(), hop.device.len()) {
            Some(_) => Ok(()),
            None => Err(ErrorKind::InvalidArgument.into()),
        }
    }

    fn carry_out(&self, hop: &Hop) {
        let mut memory = self.device.lock();
        let Some(device) = memory.find(hop.device.as_ptr().addr(), hop.device.len()) else {
            unreachable!("it was there when the hop started, and no allocation is freed")
        };
        // SAFETY: the slot's own memory, mapped as long as the stager; no reference to it is made after
        // `new`.
        let slot = unsafe { VolatileSpan::new(self.slots[hop.slot as usize].span) };
        let copied = match hop.direction {
            HopDirection::ToDevice => slot.read(hop.offset.into(), device),
            HopDirection::ToHost => slot.write(hop.offset.into(), device),
        };
        assert!(copied.is_ok(), "the hop lies in its slot");
    }
}

// SAFETY: a slot is a heap allocation of `slot_bytes`, which its `Slot` keeps until the stager drops; no
// reference to it is made after `Slot::new`. `take` hands out each slot once. Hops copy inside `poll`, at the
// moment at which they end, and `check` limits them to their slot and to one allocation of the device.
unsafe impl Stager for FakeStager {
    fn slot_bytes(&self) -> u32 {
        self.device.staging.slot_bytes
    }

    fn take(&mut self) -> Option<StagingSlot> {
        let index = self.slots.iter().position(|slot| !slot.taken)?;
        self.slots[index].taken = true;
        Some(StagingSlot { index: index as u32, span: self.slots[index].span })
    }

    fn give_back(&mut self, slot: StagingSlot) {
        let used = self.running.iter().any(|(hop, _)| hop.slot == slot.index);
        assert!(!used, "S2 broken: slot {} was returned while a hop used it", slot.index);
        let own = &mut self.slots[slot.index as usize];
        assert!(own.taken, "slot {} was returned twice", slot.index);
        own.taken = false;
        // A late reader gets other bytes.
        // SAFETY: as in `carry_out`.
        let span = unsafe { VolatileSpan::new(own.span) };
        for at in (0..span.len()).step_by(64) {
            let len = (span.len() - at).min(64);
            assert!(span.write(at as u64, &[0xDE; 64][..len]).is_ok(), "inside the slot");
        }
    }

    fn start(&mut self, hops: &[Hop]) -> Result<usize, Error> {
        for (started, hop) in hops.iter().enumerate() {
            if self.running.len() == self.device.staging.hops_max as usize {
                return Ok(started);
            }
            match self.check(hop) {
                Ok(()) => {}
                Err(error) if started == 0 => return Err(error),
                Err(_) => return Ok(started),
            }
            let polls = 1 + self.rng.below(self.device.staging.polls_max.into()) as u32;
            self.running.push((*hop, polls));
        }
        Ok(hops.len())
    }

    fn poll(&mut self, out: &mut [HopEnd]) -> usize {
        self.running.iter_mut().for_each(|(_, polls)| *polls = polls.saturating_sub(1));
        let mut ended = 0;
        while ended < out.len() {
            let ready = self.running.iter().filter(|(_, polls)| *polls == 0).count();
            if ready == 0 {
                break;
            }
            // Any one of those that are ready.
            let nth = self.rng.index(ready);
            let Some(at) = (0..self.running.len()).filter(|&at| self.running[at].1 == 0).nth(nth) else {
                break;
            };
            let (hop, _) = self.running.swap_remove(at);
            self.carry_out(&hop);
            out[ended] = HopEnd { token: hop.token, result: Ok(()) };
            ended += 1;
        }
        ended
    }
}
