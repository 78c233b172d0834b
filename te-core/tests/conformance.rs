//! Every law, on the simulated fabric and on what is built over it.

use std::alloc::System;

use te_core::testkit::CountingAlloc;

#[global_allocator]
static ALLOC: CountingAlloc<System> = CountingAlloc::new(System);

mod on_a_calm_fabric {
    use te_core::sim::SimConfig;
    use te_core::testkit::SimHarness;
    te_core::conformance_tests!(SimHarness::new(1, SimConfig::CALM));
}

mod on_a_stormy_fabric {
    use te_core::sim::SimConfig;
    use te_core::testkit::SimHarness;
    te_core::conformance_tests!(SimHarness::new(2, SimConfig::STORMY));
}

mod over_two_rails {
    use te_core::sim::{SimConfig, SimTransport};
    use te_core::testkit::SimHarness;
    use te_core::{HealthConfig, HealthRoute, MultiTransport, Transport};

    fn harness(seed: u64, config: SimConfig) -> SimHarness {
        SimHarness::on_rails(seed, config, 2, |_, rails| multi(rails))
    }

    fn multi(rails: Vec<SimTransport>) -> Box<dyn Transport> {
        let route = HealthRoute::new(&vec![100; rails.len()], HealthConfig::default());
        Box::new(MultiTransport::new(rails, route, 300).expect("two rails"))
    }

    mod calm {
        te_core::conformance_tests!(super::harness(3, te_core::sim::SimConfig::CALM));
    }

    mod stormy {
        te_core::conformance_tests!(super::harness(4, te_core::sim::SimConfig::STORMY));
    }
}
