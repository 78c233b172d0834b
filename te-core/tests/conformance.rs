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
