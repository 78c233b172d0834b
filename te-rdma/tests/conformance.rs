//! The conformance suite over the simulated provider: two transports on one fabric of verbs, control
//! connections over loopback. Simulated devices, real sockets.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::alloc::System;
use std::time::Duration;

use common::Reopen;
use te_core::testkit::{CountingAlloc, Harness, Pair};
use te_fabric::testkit::{Ends, EndsConfig};
use te_rdma::Config;
use te_rdma::sim::{DeviceConfig, LinkConfig, SimConfig, SimFabric};

#[global_allocator]
static ALLOC: CountingAlloc<System> = CountingAlloc::new(System);

/// Pairs, each on a fabric of its own.
struct Fabric {
    config: Config,
    device: DeviceConfig,
    link: LinkConfig,
    late: Duration,
}

impl Fabric {
    fn new(config: Config) -> Self {
        Self {
            config,
            device: DeviceConfig::default(),
            link: LinkConfig::CALM,
            late: Duration::from_millis(30),
        }
    }

    fn device(self, device: DeviceConfig) -> Self {
        Self { device, ..self }
    }

    /// Links on which packets may be delayed by `late`.
    fn link(self, link: LinkConfig, late: Duration) -> Self {
        Self { link, late, ..self }
    }
}

impl Harness for Fabric {
    fn skip(&self, case: &str) -> Option<&'static str> {
        let faulty = self.link.loss_ppm > 0 || self.link.hold_ppm > 0;
        (case == "submit_and_poll_do_not_allocate" && faulty)
            .then_some("queue pairs that fail are made again, which allocates")
    }

    fn pair(&mut self) -> Box<dyn Pair + '_> {
        let sim = SimFabric::new(7, SimConfig { link: self.link, ..SimConfig::TIMED });
        let mut restart = Reopen::new(sim, self.device.clone(), self.config.clone());
        let (initiator, target) = (restart.open(), restart.open());
        // The restarted target comes back at the same address.
        restart.config.bind = target.local_address();
        let config = EndsConfig { patience: Duration::from_secs(30), late_max: self.late };
        Box::new(Ends::new(initiator, target, restart, config))
    }
}

/// The suite's longest slices, short limits.
fn plain() -> Config {
    Config { slice_bytes_max: 16 << 20, ..common::config() }
}

mod one_queue_pair {
    use te_rdma::Config;
    te_core::conformance_tests!(super::Fabric::new(Config { qps: 1, ..super::plain() }), skips [a_caller_driven_transport_releases_memory_in_the_next_poll, a_slice_off_the_granule_is_refused_before_a_byte_moves], may_skip [after_a_fence_nothing_lands, after_a_fence_nothing_lands_that_a_stalled_target_held_back]);
}

mod two_queue_pairs {
    te_core::conformance_tests!(super::Fabric::new(super::plain()), skips [a_caller_driven_transport_releases_memory_in_the_next_poll, a_slice_off_the_granule_is_refused_before_a_byte_moves], may_skip [after_a_fence_nothing_lands, after_a_fence_nothing_lands_that_a_stalled_target_held_back]);
}

mod many_queue_pairs_and_short_messages {
    use te_rdma::Config;
    te_core::conformance_tests!(super::Fabric::new(Config {
        qps: 16,
        message_bytes_max: 4_096,
        mtu_bytes_max: 1_024,
        ..super::plain()
    }), skips [a_caller_driven_transport_releases_memory_in_the_next_poll, a_slice_off_the_granule_is_refused_before_a_byte_moves], may_skip [after_a_fence_nothing_lands, after_a_fence_nothing_lands_that_a_stalled_target_held_back]);
}

mod tiny_windows {
    use te_rdma::Config;
    te_core::conformance_tests!(super::Fabric::new(Config {
        qp_depth: 2,
        window_bytes_max: 2_048,
        signal_every: 1,
        sges: 1,
        inline_bytes_max: 0,
        ..super::plain()
    }), skips [a_caller_driven_transport_releases_memory_in_the_next_poll, a_slice_off_the_granule_is_refused_before_a_byte_moves], may_skip [after_a_fence_nothing_lands, after_a_fence_nothing_lands_that_a_stalled_target_held_back]);
}

mod a_small_device {
    use te_rdma::sim::DeviceConfig;
    te_core::conformance_tests!(super::Fabric::new(super::plain()).device(DeviceConfig {
        cq_depth: 8,
        sge_max: 2,
        reads_max: 1,
        inline_bytes_max: 0,
        mr_bytes_max: 20_000,
        message_bytes_max: 8_192,
        ..DeviceConfig::default()
    }), skips [a_caller_driven_transport_releases_memory_in_the_next_poll, a_slice_off_the_granule_is_refused_before_a_byte_moves], may_skip [after_a_fence_nothing_lands, after_a_fence_nothing_lands_that_a_stalled_target_held_back]);
}

mod cancels_that_do_not_wait {
    use te_rdma::Config;
    use te_rdma::sim::LinkConfig;
    te_core::conformance_tests!(
        super::Fabric::new(Config { cancel_drain_ms: 0, timeout_exponent: 10, ..super::plain() }).link(
            LinkConfig { latency_ns: 200_000, jitter_ns: 100_000, ..LinkConfig::CALM },
            std::time::Duration::from_millis(30),
        ), skips [a_caller_driven_transport_releases_memory_in_the_next_poll, a_slice_off_the_granule_is_refused_before_a_byte_moves], may_skip [after_a_fence_nothing_lands, after_a_fence_nothing_lands_that_a_stalled_target_held_back]);
}

mod chunked_registrations {
    use te_rdma::Config;
    te_core::conformance_tests!(super::Fabric::new(Config {
        registration_chunk_bytes: 4_096,
        cancel_drain_ms: 1,
        ..super::plain()
    }), skips [a_caller_driven_transport_releases_memory_in_the_next_poll, a_slice_off_the_granule_is_refused_before_a_byte_moves], may_skip [after_a_fence_nothing_lands, after_a_fence_nothing_lands_that_a_stalled_target_held_back]);
}

/// Delayed packets, which land long after their sender has failed: late writes, which fences exist for.
mod packets_that_are_held_up {
    use std::time::Duration;
    use te_rdma::Config;
    use te_rdma::sim::LinkConfig;
    te_core::conformance_tests!(
        super::Fabric::new(Config { cancel_drain_ms: 0, retries: 2, ..super::plain() }).link(
            LinkConfig {
                latency_ns: 100_000,
                jitter_ns: 100_000,
                hold_ppm: 500,
                hold_ns: 20_000_000,
                ..LinkConfig::CALM
            },
            Duration::from_millis(60),
        ), skips [a_caller_driven_transport_releases_memory_in_the_next_poll, a_slice_off_the_granule_is_refused_before_a_byte_moves, submit_and_poll_do_not_allocate], may_skip [after_a_fence_nothing_lands, after_a_fence_nothing_lands_that_a_stalled_target_held_back]);
}

mod packets_that_are_lost {
    use std::time::Duration;
    use te_rdma::Config;
    use te_rdma::sim::LinkConfig;
    te_core::conformance_tests!(super::Fabric::new(Config { cancel_drain_ms: 1, ..super::plain() }).link(
        LinkConfig { loss_ppm: 10_000, duplicate_ppm: 10_000, ..LinkConfig::CALM },
        Duration::from_millis(30),
    ), skips [a_caller_driven_transport_releases_memory_in_the_next_poll, a_slice_off_the_granule_is_refused_before_a_byte_moves, submit_and_poll_do_not_allocate], may_skip [after_a_fence_nothing_lands, after_a_fence_nothing_lands_that_a_stalled_target_held_back]);
}
