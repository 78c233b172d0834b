//! The fake device keeps the laws of a stager, and the checks find each way to break one.

use std::alloc::System;
use std::panic::{AssertUnwindSafe, catch_unwind};

use te_core::device::{Devices, Hop, HopDirection, HopEnd, Stager, StagingSlot};
use te_core::testkit::{CountingAlloc, FakeDevices, FakeStaging, stager_conformance};
use te_core::{Error, GpuVendor, Location, MemoryKinds, Token};

#[global_allocator]
static ALLOC: CountingAlloc<System> = CountingAlloc::new(System);

const DEVICE: Location = Location::Device(GpuVendor::Nvidia, 0);

#[test]
fn the_fake_device_keeps_the_laws_whatever_its_size() {
    let sizes = [(1, 64, 1, 1), (2, 4096, 8, 9), (8, 16 << 10, 3, 5), (31, 1000, 16, 40)];
    for (seed, (slots, slot_bytes, hops_max, polls_max)) in sizes.into_iter().enumerate() {
        let staging = FakeStaging { slots, slot_bytes, hops_max, polls_max };
        let device = FakeDevices::new(seed as u64, DEVICE, staging);
        stager_conformance(&device, &device, DEVICE, |bytes| device.allocate(bytes));
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Flaw {
    EndsTwice,
    NeverEnds,
    EndsTooSoon,
    CopiesAgain,
    TakesAnySlot,
    Allocates,
}

/// Fake devices whose stagers have a flaw.
struct Broken {
    flaw: Flaw,
    devices: FakeDevices,
}

struct BrokenStager {
    flaw: Flaw,
    inner: Box<dyn Stager>,
    /// Ends of hops that the flaw invents.
    extra: Vec<HopEnd>,
    last: Option<Hop>,
    polls: u32,
}

impl Devices for Broken {
    fn locate(&self, ptr: *mut u8, len: usize) -> Option<Location> {
        self.devices.locate(ptr, len)
    }

    fn kinds(&self) -> MemoryKinds {
        self.devices.kinds()
    }

    fn stager(&self, location: Location) -> Result<Box<dyn Stager>, Error> {
        let inner = self.devices.stager(location)?;
        let extra = Vec::with_capacity(1 << 12);
        Ok(Box::new(BrokenStager { flaw: self.flaw, inner, extra, last: None, polls: 0 }))
    }
}

// SAFETY: the slots are those of the inner stager, which keeps the contract. Some flaws touch a slot after
// the end of its hop, but only inside `poll`, on the thread of the checks, which reach slots through `peek`
// and `poke` alone.
unsafe impl Stager for BrokenStager {
    fn slot_bytes(&self) -> u32 {
        self.inner.slot_bytes()
    }

    fn take(&mut self) -> Option<StagingSlot> {
        self.inner.take()
    }

    fn give_back(&mut self, slot: StagingSlot) {
        self.last = None;
        self.inner.give_back(slot);
    }

    fn start(&mut self, hops: &[Hop]) -> Result<usize, Error> {
        if self.flaw == Flaw::TakesAnySlot && hops.first().is_some_and(|hop| hop.slot == u32::MAX) {
            return Ok(1);
        }
        let count = self.inner.start(hops)?;
        if let Some(hop) = hops[..count].last() {
            self.last = Some(*hop);
        }
        if self.flaw == Flaw::EndsTooSoon {
            self.extra.extend(hops[..count].iter().map(|hop| HopEnd { token: hop.token, result: Ok(()) }));
        }
        Ok(count)
    }

    fn poll(&mut self, out: &mut [HopEnd]) -> usize {
        self.polls += 1;
        if self.flaw == Flaw::Allocates {
            drop(std::hint::black_box(vec![0u8; 8]));
        }
        if self.flaw == Flaw::CopiesAgain && self.polls.is_multiple_of(50) {
            // The same hop once more, of which no end is reported.
            if let Some(hop) = self.last.take() {
                let again = Hop { token: Token(u64::MAX - 1), direction: HopDirection::ToDevice, ..hop };
                let _ = self.inner.start(&[again]);
            }
        }
        let count = self.inner.poll(out);
        let (first, rest) = (out.first().copied(), count);
        match self.flaw {
            Flaw::NeverEnds if rest > 0 => rest - 1,
            Flaw::EndsTwice if rest > 0 && rest < out.len() => {
                out[rest] = first.expect("one ended");
                rest + 1
            }
            Flaw::EndsTooSoon => {
                let told = self.extra.len().min(out.len());
                out[..told].copy_from_slice(&self.extra[..told]);
                self.extra.drain(..told);
                told
            }
            Flaw::CopiesAgain => {
                let kept: Vec<HopEnd> =
                    out[..rest].iter().copied().filter(|end| end.token.0 != u64::MAX - 1).collect();
                out[..kept.len()].copy_from_slice(&kept);
                kept.len()
            }
            _ => rest,
        }
    }
}

fn caught(flaw: Flaw, sentence: &str) {
    let devices = FakeDevices::new(3, DEVICE, FakeStaging::default());
    let broken = Broken { flaw, devices: devices.clone() };
    let run = || stager_conformance(&broken, &devices, DEVICE, |bytes| devices.allocate(bytes));
    let panic = catch_unwind(AssertUnwindSafe(run)).expect_err("the checks passed a broken stager");
    let said = panic.downcast_ref::<String>().map_or("no sentence", String::as_str);
    assert!(said.contains(sentence), "{said}");
}

#[test]
fn a_hop_that_ends_twice_is_caught() {
    caught(Flaw::EndsTwice, "had ended before");
}

#[test]
fn a_hop_that_never_ends_is_caught() {
    caught(Flaw::NeverEnds, "never ended");
}

#[test]
fn a_hop_that_ends_before_its_bytes_are_there_is_caught() {
    caught(Flaw::EndsTooSoon, "should have made of it");
}

#[test]
fn a_hop_that_writes_after_its_end_is_caught() {
    caught(Flaw::CopiesAgain, "wrote after its end");
}

#[test]
fn a_slot_that_was_not_taken_is_caught() {
    caught(Flaw::TakesAnySlot, "a slot that was not taken");
}

#[test]
fn an_allocating_stager_is_caught() {
    caught(Flaw::Allocates, "allocated");
}
