//! Slots and hops, with simulated devices.

use te_core::device::Stager;
use te_core::testkit::{FakeDevices, FakeStaging, PeekPoke};
use te_core::{GpuVendor, MemoryKinds};

use super::*;

const DEVICE: Location = Location::Device(GpuVendor::Nvidia, 2);

fn devices(slots: u32, hops_max: u32) -> FakeDevices {
    FakeDevices::new(5, DEVICE, FakeStaging { slots, slot_bytes: 64, hops_max, polls_max: 4 })
}

fn staging(devices: &FakeDevices) -> Staging<u32> {
    let mut staging = Staging::new();
    staging.prepare(DEVICE, devices).expect("the device is there");
    staging
}

/// Polls until all hops have ended; returns the tags in the order in which they ended.
fn ends(staging: &mut Staging<u32>) -> Vec<(u32, Result<(), Error>)> {
    let mut ended = Vec::new();
    while staging.is_hopping() {
        staging.flush();
        staging.collect();
        while let Some(end) = staging.next_end() {
            staging.give_back(end.slot);
            ended.push((end.tag, end.result));
        }
        assert!(ended.len() < 1_000, "a hop ends once");
    }
    ended
}

#[test]
fn slots_run_out_and_come_back() {
    let mut staging = staging(&devices(2, 2));
    assert_eq!((staging.slot_bytes(DEVICE), staging.slot_bytes(Location::Host)), (64, 0));
    let (Some(first), Some(second)) = (staging.take(DEVICE), staging.take(DEVICE)) else { panic!("two") };
    assert!(first != second && staging.take(DEVICE).is_none() && staging.slots_taken() == 2);
    assert_eq!(staging.memory(first, 64).map(Pinned::len), Some(64));
    assert!(staging.memory(first, 65).is_none());
    staging.give_back(first);
    assert!(staging.memory(first, 1).is_none());
    assert_eq!(staging.take(DEVICE), Some(first));
    [first, second].into_iter().for_each(|slot| staging.give_back(slot));
    assert_eq!(staging.slots_taken(), 0);
}

#[test]
fn a_location_without_a_device_has_no_slots() {
    let mut staging = Staging::<u32>::new();
    assert!(staging.is_unused() && staging.take(DEVICE).is_none());
    let other = Location::Device(GpuVendor::Nvidia, 3);
    let refused = staging.prepare(other, &devices(1, 1)).map_err(|error| error.kind);
    assert_eq!((refused, staging.is_unused()), (Err(ErrorKind::Unsupported), true));
    let refused = staging.prepare(DEVICE, &devices(0, 1)).map_err(|error| error.kind);
    assert_eq!((refused, staging.is_unused()), (Err(ErrorKind::Full), true));
}

#[test]
fn hops_wait_for_the_copy_queue_and_each_ends_once() {
    let device = devices(8, 1);
    let mut staging = staging(&device);
    let memory = device.allocate(8 * 64);
    for tag in 0..8 {
        let slot = staging.take(DEVICE).expect("eight");
        staging.memory(slot, 64).expect("it is out").fill_from(&[tag as u8 + 1; 64]);
        let part = memory.part(u64::from(tag) * 64, 64).expect("inside");
        staging.start(slot, part, HopDirection::ToDevice, tag);
    }
    assert_eq!(staging.hops().count(), 8);
    let mut tags: Vec<u32> = ends(&mut staging).into_iter().map(|(tag, _)| tag).collect();
    tags.sort_unstable();
    assert_eq!((tags, staging.slots_taken(), staging.hops().count()), ((0..8).collect(), 0, 0));
    for tag in 0..8 {
        let mut bytes = [0; 64];
        let part = memory.part(u64::from(tag) * 64, 64).expect("inside");
        peek(&device, part, &mut bytes);
        assert_eq!(bytes, [tag + 1; 64]);
    }
}

#[allow(unsafe_code, reason = "looks at memory of the device")]
fn peek(device: &FakeDevices, span: MemSpan, out: &mut [u8]) {
    // SAFETY: memory of the device that no hop uses any more.
    unsafe { device.peek(span, out) };
}

#[test]
fn a_hop_that_cannot_be_started_ends_with_the_reason_and_the_next_go_on() {
    let device = devices(3, 3);
    let mut staging = staging(&device);
    let memory = device.allocate(64);
    let nowhere = MemSpan::new(memory.as_ptr().wrapping_add(1 << 20), 64).at(DEVICE);
    for (tag, span) in [(1, memory), (2, nowhere), (3, memory)] {
        let slot = staging.take(DEVICE).expect("three");
        staging.start(slot, span, HopDirection::ToHost, tag);
    }
    let mut ended = ends(&mut staging);
    ended.sort_unstable_by_key(|(tag, _)| *tag);
    let refused = Err(ErrorKind::InvalidArgument.into());
    assert_eq!(ended, [(1, Ok(())), (2, refused), (3, Ok(()))]);
}

/// Devices at two locations.
struct Two(FakeDevices, FakeDevices);

impl Devices for Two {
    fn locate(&self, ptr: *mut u8, len: usize) -> Option<Location> {
        self.0.locate(ptr, len)
    }

    fn kinds(&self) -> MemoryKinds {
        self.0.kinds() | self.1.kinds()
    }

    fn stager(&self, location: Location) -> Result<Box<dyn Stager>, Error> {
        self.0.stager(location).or_else(|_| self.1.stager(location))
    }
}

#[test]
fn each_location_has_slots_of_its_own() {
    let there = Location::Device(GpuVendor::Amd, 0);
    let small = FakeStaging { slots: 1, slot_bytes: 16, hops_max: 1, polls_max: 1 };
    let two = Two(devices(1, 1), FakeDevices::new(6, there, small));
    let mut staging = Staging::<u32>::new();
    for location in [DEVICE, there, DEVICE] {
        staging.prepare(location, &two).expect("both are there");
    }
    let (Some(here), Some(other)) = (staging.take(DEVICE), staging.take(there)) else { panic!("one each") };
    assert!(here != other && staging.take(DEVICE).is_none() && staging.take(there).is_none());
    let lengths = [here, other].map(|slot| staging.memory(slot, 17).is_some());
    assert_eq!(lengths, [true, false]);
    let (span, elsewhere) = (two.0.allocate(8), two.1.allocate(8));
    assert_eq!(check(&two, span), Ok(()));
    assert!(check(&two, elsewhere).is_err(), "its address is the other device's");
    let host = MemSpan::new(Box::leak(Box::new([0_u8; 8])).as_mut_ptr(), 8).at(DEVICE);
    assert!(check(&two, host).is_err());
}

#[test]
fn no_holder_gets_the_slots_that_others_need() {
    let mut staging = staging(&devices(8, 8));
    let take_all = |staging: &mut Staging<u32>, holder| {
        core::iter::from_fn(|| staging.take_share(DEVICE, holder)).collect::<Vec<_>>()
    };
    let first = take_all(&mut staging, 1);
    let others = [2, 3, 4].map(|holder| take_all(&mut staging, holder).len());
    assert_eq!((first.len(), others), (6, [1, 1, 0]));
    // Holder 1 gives one back: a holder without a slot gets it, and holder 1 does not.
    staging.give_back(first[0]);
    assert!(staging.take_share(DEVICE, 1).is_none() && staging.take_share(DEVICE, 4).is_some());
    // Slots that are taken without a holder count against all.
    first[1..].iter().for_each(|slot| staging.give_back(*slot));
    (0..3).for_each(|_| assert!(staging.take(DEVICE).is_some()));
    assert_eq!(take_all(&mut staging, 5).len(), 1);
}
