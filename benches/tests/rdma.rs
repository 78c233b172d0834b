//! te-rdma's data path allocates nothing: a million slices over a provider that moves no bytes, so that every
//! allocation would be te-rdma's.

use std::alloc::System;

use benches::{InstantVerbs, Pair, slices};
use te_core::Op;
use te_core::testkit::{CountingAlloc, allocations, is_counting};
use te_rdma::sim::{DeviceConfig, SimConfig, SimFabric};
use te_rdma::{Config, RdmaTransport};

#[global_allocator]
static ALLOC: CountingAlloc<System> = CountingAlloc::new(System);

#[test]
fn a_million_slices_over_rdma_allocate_nothing() {
    assert!(is_counting());
    let fabric = SimFabric::new(1, SimConfig::IMMEDIATE);
    let open = || {
        let verbs = InstantVerbs::new(fabric.device(DeviceConfig::default()));
        RdmaTransport::new(verbs, Config { proof_ms_max: 0, ..Config::default() }).expect("a simulated port")
    };
    let mut pair = Pair::new(open(), open(), 128 * 4096);
    let (writes, reads) = (slices(Op::Write, 128, 4096), slices(Op::Read, 128, 64));
    // Connections, keys, and queues that have grown to their size.
    for _ in 0..64 {
        pair.round(&writes);
        pair.round(&reads);
    }
    let before = allocations();
    for _ in 0..4096 {
        pair.round(&writes);
        pair.round(&reads);
    }
    assert_eq!(allocations() - before, 0);
}
