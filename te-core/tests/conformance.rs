//! Every law, on the simulated fabric and on what is built on it.

use std::alloc::System;

use te_core::testkit::CountingAlloc;

#[global_allocator]
static ALLOC: CountingAlloc<System> = CountingAlloc::new(System);

mod on_a_calm_fabric {
    use te_core::sim::SimConfig;
    use te_core::testkit::SimHarness;
    te_core::conformance_tests!(SimHarness::new(1, SimConfig::CALM), skips [a_caller_driven_transport_releases_memory_in_the_next_poll, a_slice_off_the_granule_is_refused_before_a_byte_moves]);
}

mod on_a_stormy_fabric {
    use te_core::sim::SimConfig;
    use te_core::testkit::SimHarness;
    te_core::conformance_tests!(SimHarness::new(2, SimConfig::STORMY), skips [a_caller_driven_transport_releases_memory_in_the_next_poll, a_slice_off_the_granule_is_refused_before_a_byte_moves, submit_and_poll_do_not_allocate]);
}

mod in_granules {
    use te_core::sim::SimConfig;
    use te_core::testkit::SimHarness;

    fn config() -> SimConfig {
        let mut config = SimConfig::CALM;
        config.granule_bytes = 512;
        config.inflight_max = 64;
        config
    }

    te_core::conformance_tests!(
        SimHarness::new(8, config()),
        skips[a_caller_driven_transport_releases_memory_in_the_next_poll]
    );
}

mod over_two_rails {
    use te_core::sim::{SimConfig, SimTransport};
    use te_core::testkit::SimHarness;
    use te_core::{HealthConfig, HealthRoute, MultiTransport, Transport};

    pub(super) fn harness(seed: u64, config: SimConfig) -> SimHarness {
        SimHarness::on_rails(seed, config, 2, |_, rails| multi(rails))
    }

    fn multi(rails: Vec<SimTransport>) -> Box<dyn Transport> {
        let route = HealthRoute::new(&vec![100; rails.len()], HealthConfig::default());
        Box::new(MultiTransport::new(rails, route, 300).expect("two rails"))
    }

    mod calm {
        te_core::conformance_tests!(super::harness(3, te_core::sim::SimConfig::CALM), skips [a_caller_driven_transport_releases_memory_in_the_next_poll, a_slice_off_the_granule_is_refused_before_a_byte_moves, a_wrong_key_opens_nothing]);
    }

    mod stormy {
        te_core::conformance_tests!(super::harness(4, te_core::sim::SimConfig::STORMY), skips [a_caller_driven_transport_releases_memory_in_the_next_poll, a_slice_off_the_granule_is_refused_before_a_byte_moves, a_wrong_key_opens_nothing, submit_and_poll_do_not_allocate]);
    }
}

mod through_a_delay {
    use core::time::Duration;
    use te_core::Delay;
    use te_core::sim::SimConfig;
    use te_core::testkit::SimHarness;
    te_core::conformance_tests!(SimHarness::wrapped(5, SimConfig::CALM, |_, sim| {
        Box::new(Delay::new(sim, Duration::from_micros(70)))
    }), skips [a_caller_driven_transport_releases_memory_in_the_next_poll, a_slice_off_the_granule_is_refused_before_a_byte_moves]);
}

mod through_faults {
    use te_core::sim::SimConfig;
    use te_core::testkit::SimHarness;
    use te_core::{Fault, FaultConfig};

    fn config() -> FaultConfig {
        let mut config = FaultConfig::default();
        config.submit_refused_ppm = 200_000;
        config.completion_failed_ppm = 50_000;
        config.slice_dropped_ppm = 50_000;
        config
    }

    te_core::conformance_tests!(SimHarness::wrapped(6, SimConfig::CALM, |_, sim| {
        Box::new(Fault::new(sim, 66, config()))
    }), skips [a_caller_driven_transport_releases_memory_in_the_next_poll, a_slice_off_the_granule_is_refused_before_a_byte_moves]);
}

mod through_a_throttle {
    use te_core::Throttle;
    use te_core::sim::SimConfig;
    use te_core::testkit::SimHarness;
    te_core::conformance_tests!(SimHarness::wrapped(7, SimConfig::CALM, |_, sim| {
        Box::new(Throttle::new(sim, 100_000_000, 10_000))
    }), skips [a_caller_driven_transport_releases_memory_in_the_next_poll, a_slice_off_the_granule_is_refused_before_a_byte_moves]);
}

mod through_a_trace {
    use te_core::Trace;
    use te_core::sim::SimConfig;
    use te_core::testkit::SimHarness;
    te_core::conformance_tests!(SimHarness::wrapped(8, SimConfig::CALM, |_, sim| {
        Box::new(Trace::new(sim, 100))
    }), skips [a_caller_driven_transport_releases_memory_in_the_next_poll, a_slice_off_the_granule_is_refused_before_a_byte_moves]);
}

mod through_all_decorators_on_a_stormy_fabric {
    use core::time::Duration;
    use te_core::sim::SimConfig;
    use te_core::testkit::SimHarness;
    use te_core::{Delay, Fault, FaultConfig, Throttle, Trace};
    te_core::conformance_tests!(SimHarness::wrapped(9, SimConfig::STORMY, |_, sim| {
        let slow = Throttle::new(sim, 1_000_000_000, 100_000);
        let mut faults = FaultConfig::default();
        faults.slice_dropped_ppm = 20_000;
        let lossy = Fault::new(slow, 77, faults);
        Box::new(Trace::new(Delay::new(lossy, Duration::from_micros(30)), 64))
    }), skips [a_caller_driven_transport_releases_memory_in_the_next_poll, a_slice_off_the_granule_is_refused_before_a_byte_moves, submit_and_poll_do_not_allocate]);
}

/// A failure is a seed: `SNOWSKIN_SEEDS=1000..2000` runs others than these.
#[test]
fn the_laws_hold_whatever_the_seed() {
    use te_core::sim::SimConfig;
    use te_core::testkit::{SimHarness, conformance, each_seed};

    for seed in each_seed(100..104) {
        let _report = conformance(&mut SimHarness::new(seed, SimConfig::STORMY));
        let _report = conformance(&mut over_two_rails::harness(seed, SimConfig::STORMY));
    }
}
