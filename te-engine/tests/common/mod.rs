//! What the integration tests share.
#![allow(dead_code, unused_imports, reason = "each test binary uses its part")]

pub(crate) use te_core::testkit::pattern;
use te_core::{Access, Op, RegionId};
use te_engine::{
    Config, Fabrics, LocalAddr, SegmentHandle, SharedRegion, TransferEngine, TransferRequest, fabrics,
};
pub(crate) use te_fabric::testkit::eventually;

pub(crate) const EVERYTHING: Access = Access::all();

pub(crate) fn config(fabrics: Fabrics) -> Config {
    Config { fabrics, ..Config::default() }
}

pub(crate) fn engine(fabrics: Fabrics) -> TransferEngine {
    TransferEngine::start(config(fabrics)).expect("an engine starts")
}

/// The fabrics of this build, each alone and all together, by name. Without RDMA, which has its own tests:
/// not every host has it.
pub(crate) fn each_fabric() -> Vec<(&'static str, Fabrics)> {
    let here = fabrics().iter().filter(|entry| entry.is_built() && entry.auto && entry.name != "rdma");
    here.map(|entry| (entry.name, Fabrics::of(entry))).chain([("all", Fabrics::AUTO)]).collect()
}

/// The fabrics that reach another process.
pub(crate) fn each_remote_fabric() -> Vec<(&'static str, Fabrics)> {
    each_fabric().into_iter().filter(|(name, _)| *name != "local").collect()
}

pub(crate) fn bytes(region: &SharedRegion) -> Vec<u8> {
    let mut out = vec![0; region.len()];
    region.read(0, &mut out).expect("in range");
    out
}

pub(crate) fn request(
    op: Op,
    local: (RegionId, u64),
    segment: SegmentHandle,
    remote_addr: u64,
    len: u64,
) -> TransferRequest {
    TransferRequest { op, local: LocalAddr::from(local), segment, remote_addr, len }
}
