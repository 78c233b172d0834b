//! The laws of a stager, over every kind of driver, and what its calls may not do.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::alloc::System;

use common::Fake;
use te_core::device::Devices;
use te_core::testkit::{CountingAlloc, each_seed, stager_conformance};
use te_gpu::Config;

#[global_allocator]
static ALLOC: CountingAlloc<System> = CountingAlloc::new(System);

fn conforms(fake: &Fake, config: Config) {
    let gpu = fake.gpu(config);
    stager_conformance(&gpu, fake, fake.location(), |bytes| fake.allocate(bytes));
    assert_eq!(fake.context(), 0);
}

#[test]
fn a_driver_with_everything() {
    let fake = Fake::cuda();
    conforms(&fake, fake.config());
    assert!(fake.calls("cuLaunchKernel") > 0 && fake.calls("cuMemcpyBatchAsync_v2") > 0);
}

#[test]
fn a_driver_without_the_batch_call() {
    let fake = Fake::cuda();
    fake.set("version", 12_020);
    conforms(&fake, fake.config());
    assert_eq!((fake.calls("cuMemcpyBatchAsync_v2"), fake.calls("cuMemcpyBatchAsync")), (0, 0));
}

#[test]
fn a_driver_with_the_first_form_of_the_batch_call() {
    let fake = Fake::cuda();
    fake.set("version", 12_080);
    conforms(&fake, fake.config());
    assert_eq!(fake.calls("cuMemcpyBatchAsync_v2"), 0);
    assert!(fake.calls("cuMemcpyBatchAsync") > 0);
}

#[test]
fn a_driver_that_cannot_load_the_kernel() {
    let fake = Fake::cuda();
    fake.fail("cuModuleLoadDataEx", 0, 221);
    conforms(&fake, fake.config());
    assert_eq!(fake.calls("cuLaunchKernel"), 0);
    assert!(!fake.gpu(fake.config()).plan(fake.location()).is_some_and(|plan| plan.offer().kernel));
}

#[test]
fn a_driver_whose_streams_cannot_store_words() {
    let fake = Fake::cuda();
    fake.set("stream_writes", 0);
    conforms(&fake, fake.config());
    assert!(fake.calls("cuEventQuery") > 0);
    assert_eq!(fake.calls("cuStreamWriteValue64_v2"), 0);
}

#[test]
fn a_driver_that_says_its_streams_store_words_and_fails() {
    let fake = Fake::cuda();
    fake.fail("cuStreamWriteValue64_v2", 0, 801);
    conforms(&fake, fake.config());
    assert!(fake.calls("cuEventQuery") > 0);
}

#[test]
fn a_driver_of_hip_with_and_without_the_batch_call() {
    for batch in [true, false] {
        let fake = Fake::hip();
        fake.fail("hipMemcpyBatchAsync", 0, if batch { 0 } else { 801 });
        conforms(&fake, fake.config());
        assert!(fake.calls("hipStreamWriteValue64") > 0);
    }
}

#[test]
fn few_and_odd_slots() {
    let fake = Fake::cuda();
    for (slot_bytes, ring_bytes, hops_max) in
        [(4_096, 4_096, 16), (5_001, 64 << 10, 16), (64 << 10, 1 << 20, 4_096)]
    {
        conforms(&fake, Config { slot_bytes, ring_bytes, hops_max, ..fake.config() });
    }
}

#[test]
fn any_delays() {
    let fake = Fake::cuda();
    for seed in each_seed(1..201) {
        fake.set("seed", seed as i64).set("delay_us_max", [0, 10, 100, 400][seed as usize % 4]);
        let config = match seed % 3 {
            0 => fake.config(),
            1 => Config { slot_bytes: 4_096, ring_bytes: 256 << 10, ..fake.config() },
            _ => Config { slot_bytes: 9_999, ring_bytes: 30 << 10, hops_max: 16, ..fake.config() },
        };
        conforms(&fake, config);
    }
}

#[test]
fn nothing_is_live_after_the_last_is_dropped() {
    for fake in [Fake::cuda(), Fake::hip()] {
        let gpu = fake.gpu(fake.config());
        let stager = gpu.stager(fake.location()).unwrap();
        drop(gpu);
        drop(stager);
        assert_eq!(fake.live(), 0);
    }
}
