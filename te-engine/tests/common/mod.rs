//! What the integration tests share.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::time::{Duration, Instant};

use te_core::{Access, Op, RegionId};
use te_engine::{
    Config, Fabrics, LocalAddr, SegmentHandle, SharedRegion, TransferEngine, TransferRequest, fabrics,
};

pub(crate) const EVERYTHING: Access = Access::all();

pub(crate) fn config(fabrics: Fabrics) -> Config {
    Config { fabrics, ..Config::default() }
}

pub(crate) fn engine(fabrics: Fabrics) -> TransferEngine {
    TransferEngine::start(config(fabrics)).expect("an engine starts")
}

/// Every way to restrict an engine that this build has, by name. Not every host has RDMA: its tests are apart.
pub(crate) fn each_fabric() -> Vec<(&'static str, Fabrics)> {
    let here = fabrics().iter().filter(|entry| entry.is_built() && entry.name != "rdma");
    here.map(|entry| (entry.name, Fabrics::of(entry))).chain([("all", Fabrics::AUTO)]).collect()
}

/// The fabrics that reach another process.
pub(crate) fn each_remote_fabric() -> Vec<(&'static str, Fabrics)> {
    each_fabric().into_iter().filter(|(name, _)| *name != "local").collect()
}

/// Bytes that differ from place to place and from seed to seed.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
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

/// Repeats `check` until it says true. For what other threads and processes bring about.
pub(crate) fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let give_up = Instant::now() + Duration::from_secs(60);
    while !check() {
        assert!(Instant::now() < give_up, "{what}: not within 60 s");
        std::thread::sleep(Duration::from_millis(2));
    }
}
