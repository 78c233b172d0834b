//! Checks of the laws S1 to S4 for a [`Stager`].
#![allow(unsafe_code, reason = "reads and writes slots and device memory under test")]

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;

use super::Rng;
use super::counting::allocations;
use super::{ByPointer, PeekPoke};
use crate::device::{Devices, Hop, HopDirection, HopEnd, Stager, StagingSlot};
use crate::{ErrorKind, Location, MemSpan, Token};

/// Stops with a sentence that names the law.
macro_rules! broken {
    ($law:literal, $($sentence:tt)+) => {
        panic!("{} broken: {}", $law, ::alloc::format!($($sentence)+))
    };
}

/// The number of bytes of device memory under test.
const DEVICE_BYTES: usize = 256 << 10;
/// The number of polls after which a hop counts as lost.
const POLLS_MAX: u64 = 5_000_000;

/// Checks the laws for the stager that `devices` makes for `location`. `access` reads and writes the device
/// memory that `allocate` returns. Whether calls of the stager allocate is checked where a
/// [`CountingAlloc`](super::CountingAlloc) counts.
///
/// # Panics
/// With a sentence that starts with the law's number, at the first violation.
pub fn stager_conformance(
    devices: &dyn Devices,
    access: &dyn PeekPoke,
    location: Location,
    mut allocate: impl FnMut(usize) -> MemSpan,
) {
    let device = allocate(DEVICE_BYTES);
    assert_eq!(device.location(), location, "the harness allocates memory at another location");
    where_memory_is(devices, device);
    let stager = match devices.stager(location) {
        Ok(stager) => stager,
        Err(error) => broken!("S1", "no stager for {location}: {error}"),
    };
    let mut bench = Bench {
        stager,
        access,
        device,
        rng: Rng::new(7),
        next_token: 0,
        running: BTreeMap::new(),
        allocated: 0,
    };
    bench.slots_run_out_and_come_back();
    bench.what_cannot_be_is_refused();
    for round in 0..20 {
        bench.bytes_cross_whole_and_alone(round);
    }
    if bench.allocated > 0 {
        broken!("S4", "take, start, poll and give_back allocated {} times", bench.allocated);
    }
}

fn where_memory_is(devices: &dyn Devices, device: MemSpan) {
    let (ptr, len) = (device.as_ptr(), device.len());
    let mut host = [0u8; 64];
    for (what, found, expected) in [
        ("the device's memory", devices.locate(ptr, len), Some(device.location())),
        ("its last byte", devices.locate(ptr.wrapping_add(len - 1), 1), Some(device.location())),
        ("more than was allocated", devices.locate(ptr, len + 1), None),
        ("host memory", devices.locate(host.as_mut_ptr(), host.len()), None),
    ] {
        if found != expected {
            broken!("S1", "locate found {what} at {found:?}, not {expected:?}");
        }
    }
}

struct Bench<'a> {
    stager: Box<dyn Stager>,
    access: &'a dyn PeekPoke,
    device: MemSpan,
    rng: Rng,
    next_token: u64,
    running: BTreeMap<u64, Hop>,
    allocated: u64,
}

impl Bench<'_> {
    /// A call whose allocations are counted.
    fn counted<R>(&mut self, call: impl FnOnce(&mut dyn Stager) -> R) -> R {
        let before = allocations();
        let result = call(&mut *self.stager);
        self.allocated += allocations() - before;
        result
    }

    fn take_all(&mut self) -> Vec<StagingSlot> {
        let mut slots = Vec::with_capacity(1 << 16);
        while let Some(slot) = self.counted(|stager| stager.take()) {
            slots.push(slot);
            assert!(slots.len() < 1 << 16, "S4 broken: slots never run out");
        }
        slots
    }

    fn give_back(&mut self, slots: Vec<StagingSlot>) {
        slots.into_iter().for_each(|slot| self.counted(|stager| stager.give_back(slot)));
    }

    fn slots_run_out_and_come_back(&mut self) {
        let first = self.take_all();
        let mut spans: Vec<(usize, usize)> =
            first.iter().map(|slot| (slot.span.as_ptr().addr(), slot.span.len())).collect();
        spans.sort_unstable();
        if first.is_empty() || spans.windows(2).any(|pair| pair[0].0 + pair[0].1 > pair[1].0) {
            broken!("S2", "there are no slots, or two of them share bytes");
        }
        if first.iter().any(|slot| slot.span.len() != self.stager.slot_bytes() as usize) {
            broken!("S2", "a slot is not slot_bytes long");
        }
        let count = first.len();
        self.give_back(first);
        let again = self.take_all();
        if again.len() != count {
            broken!("S4", "{count} slots were returned, but {} can be taken", again.len());
        }
        self.give_back(again);
    }

    fn what_cannot_be_is_refused(&mut self) {
        let Some(slot) = self.stager.take() else { broken!("S4", "a slot that was returned is not free") };
        let good = self.hop(slot.index, 0, 0, 64, HopDirection::ToDevice);
        let slot_bytes = self.stager.slot_bytes();
        let host = MemSpan::new(slot.span.as_ptr(), 64);
        for (what, hop, kind) in [
            ("a hop of no bytes", Hop { device: self.part(0, 0), ..good }, ErrorKind::InvalidArgument),
            ("a hop that leaves its slot", Hop { offset: slot_bytes - 63, ..good }, ErrorKind::OutOfRange),
            ("a hop past its slot", Hop { offset: u32::MAX, ..good }, ErrorKind::OutOfRange),
            ("a hop through a slot that was not taken", Hop { slot: u32::MAX, ..good }, ErrorKind::NotFound),
            ("a hop to host memory", Hop { device: host, ..good }, ErrorKind::InvalidArgument),
        ] {
            match self.counted(|stager| stager.start(&[hop])).map_err(|error| error.kind) {
                Err(found) if found == kind => {}
                other => broken!("S1", "{what} gave {other:?}, not {kind:?}"),
            }
        }
        self.give_back(vec![slot]);
    }

    /// Random hops in both directions, as many as there are slots, each within its own cell: the bytes of
    /// each hop arrive, nothing else changes, and each hop ends once.
    fn bytes_cross_whole_and_alone(&mut self, round: u64) {
        let slots = self.take_all();
        let cell = (DEVICE_BYTES / slots.len()).min(self.stager.slot_bytes() as usize);
        let mut expected_device = vec![0; DEVICE_BYTES];
        self.rng.fill(&mut expected_device);
        self.poke(self.device, &expected_device);
        let mut expected_slots: Vec<Vec<u8>> = Vec::new();
        let mut hops = Vec::new();
        for (at, slot) in slots.iter().enumerate() {
            let mut bytes = vec![0; slot.span.len()];
            self.rng.fill(&mut bytes);
            self.poke(slot.span, &bytes);
            let len = 1 + self.rng.index(cell);
            let (offset, in_cell) =
                (self.rng.index(slot.span.len() - len + 1), self.rng.index(cell - len + 1));
            let (there, way) = (at * cell + in_cell, self.rng.below(2));
            if way == 0 {
                expected_device[there..there + len].copy_from_slice(&bytes[offset..offset + len]);
            } else {
                bytes[offset..offset + len].copy_from_slice(&expected_device[there..there + len]);
            }
            let way = if way == 0 { HopDirection::ToDevice } else { HopDirection::ToHost };
            hops.push(self.hop(slot.index, offset as u32, there, len, way));
            expected_slots.push(bytes);
        }
        self.run(&hops);
        if self.peek(self.device) != expected_device {
            broken!("S2", "round {round}: device memory is not what the hops should have made of it");
        }
        for (slot, expected) in slots.iter().zip(&expected_slots) {
            if self.peek(slot.span) != *expected {
                broken!(
                    "S2",
                    "round {round}: slot {} is not what the hops should have made of it",
                    slot.index
                );
            }
        }
        // A copy that comes now shows, in whichever direction it goes.
        let (zeroes, ones) = (vec![0; DEVICE_BYTES], vec![0xFF; slots[0].span.len()]);
        self.poke(self.device, &zeroes);
        slots.iter().for_each(|slot| self.poke(slot.span, &ones));
        for _ in 0..100 {
            self.poll();
        }
        if self.peek(self.device) != zeroes || slots.iter().any(|slot| self.peek(slot.span) != ones) {
            broken!("S2", "round {round}: a hop wrote after its end");
        }
        self.give_back(slots);
    }

    fn run(&mut self, hops: &[Hop]) {
        let mut begun = 0;
        for _ in 0..POLLS_MAX {
            if begun < hops.len() {
                match self.counted(|stager| stager.start(&hops[begun..])) {
                    Ok(count) if count <= hops.len() - begun => {
                        hops[begun..begun + count].iter().for_each(|hop| {
                            self.running.insert(hop.token.0, *hop);
                        });
                        begun += count;
                    }
                    other => broken!("S1", "starting {} hops gave {other:?}", hops.len() - begun),
                }
            }
            self.poll();
            if begun == hops.len() && self.running.is_empty() {
                return;
            }
        }
        broken!("S3", "{} hops never ended", self.running.len());
    }

    fn poll(&mut self) {
        let mut out = [HopEnd { token: Token(u64::MAX), result: Ok(()) }; 3];
        let count = self.counted(|stager| stager.poll(&mut out));
        for end in &out[..count] {
            if self.running.remove(&end.token.0).is_none() {
                broken!("S1", "{:?} ended, and was not started or had ended before", end.token);
            }
            if let Err(error) = end.result {
                broken!("S1", "a valid hop failed: {error}");
            }
        }
    }

    fn hop(&mut self, slot: u32, offset: u32, there: usize, len: usize, direction: HopDirection) -> Hop {
        self.next_token += 1;
        Hop { token: Token(self.next_token), slot, offset, device: self.part(there, len), direction }
    }

    fn part(&self, at: usize, len: usize) -> MemSpan {
        match self.device.part(at as u64, len as u64) {
            Ok(part) => part,
            Err(error) => panic!("the checks use bytes outside their memory: {error}"),
        }
    }

    fn peek(&self, span: MemSpan) -> Vec<u8> {
        let mut bytes = vec![0; span.len()];
        // SAFETY: device memory of the harness, or a slot that is ours; no reference to either exists.
        unsafe { self.access_to(span).peek(span, &mut bytes) };
        bytes
    }

    fn poke(&self, span: MemSpan, bytes: &[u8]) {
        // SAFETY: as in `peek`.
        unsafe { self.access_to(span).poke(span, bytes) };
    }

    fn access_to(&self, span: MemSpan) -> &dyn PeekPoke {
        match span.location() == self.device.location() {
            true => self.access,
            false => &ByPointer,
        }
    }
}
