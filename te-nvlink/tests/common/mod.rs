//! What the tests share: transports over fake drivers, memory of every kind, and ways to drive both ends.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
#![allow(dead_code, reason = "no test uses all of it")]
#![allow(unsafe_code, reason = "registers memory under test")]

use std::sync::Arc;

use te_core::{
    Access, Completion, Error, Instant, MemSpan, Memory, Op, RegionId, RegionOffset, RemoteOffset,
    RemoteRegionId, Slice, Token, Transport,
};
use te_host::{AllocOptions, SharedMemory};
use te_nvlink::{Config, NvlinkTransport};

use crate::fakes::Fake;

pub(crate) const REGION: RegionId = RegionId::new(0, 1);
pub(crate) const REMOTE: RemoteRegionId = RemoteRegionId::new(0, 1);
pub(crate) const MIB: usize = 1 << 20;
pub(crate) const INITIATOR: u64 = 0x1111;
pub(crate) const TARGET: u64 = 0x2222;

/// A transport over the devices of a fake driver.
pub(crate) fn transport(fake: &Fake, identity: u64) -> NvlinkTransport {
    with(fake, Config { identity, ..Config::default() })
}

pub(crate) fn with(fake: &Fake, config: Config) -> NvlinkTransport {
    NvlinkTransport::new(config, fake.gpu(fake.config())).unwrap()
}

/// The end of one host of NVLink domain 7; the identity names the host.
pub(crate) fn on_a_host(fake: &Fake, identity: u64) -> NvlinkTransport {
    on_a_host_with(fake, Config { identity, ..Config::default() })
}

pub(crate) fn on_a_host_with(fake: &Fake, config: Config) -> NvlinkTransport {
    fake.set("domain", 7);
    let host = Some([config.identity as u8; 16]);
    with(fake, Config { across_hosts: true, host, ..config })
}

/// Memory with fabric handles, in mappings of this length.
pub(crate) fn fabric_memory(fake: &Fake, count: usize, bytes: usize) -> MemSpan {
    fake.set("domain", 7).map_chunks_with(count, bytes, 1 | 8)
}

/// Registers memory that stays as it is for as long as the test runs.
pub(crate) fn register(transport: &mut impl Memory, id: RegionId, span: MemSpan, access: Access) {
    // SAFETY: the tests keep the memory until their transports are dropped, and make no reference to it.
    unsafe { transport.register(id, span, access) }.unwrap();
}

pub(crate) fn export(transport: &impl Memory, id: RegionId) -> Vec<u8> {
    let mut blob = vec![0; 256];
    let len = transport.export(id, &mut blob).unwrap();
    blob.truncate(len);
    blob
}

/// Shared memory of the host, which is never freed.
pub(crate) fn shared(bytes: usize) -> Arc<SharedMemory> {
    let options = AllocOptions { peers_may_write: true, ..AllocOptions::default() };
    SharedMemory::new(bytes, options).unwrap()
}

pub(crate) fn slice(token: u64, op: Op, local: u64, remote: u64, len: u32) -> Slice {
    Slice {
        token: Token(token),
        local: RegionOffset::new(REGION, local),
        remote: RemoteOffset::new(REMOTE, remote),
        len,
        op,
    }
}

/// The time since the first call.
pub(crate) fn now() -> Instant {
    te_fabric::testkit::now()
}

pub(crate) fn poll(transport: &mut NvlinkTransport) -> Vec<Completion> {
    let mut out = [Completion::applied(Token(u64::MAX)); 64];
    let count = transport.poll(now(), &mut out);
    out[..count].to_vec()
}

/// Submits all slices and polls both ends until each has ended; the ends, by token.
pub(crate) fn run(
    initiator: &mut NvlinkTransport,
    mut target: Option<&mut NvlinkTransport>,
    slices: &[Slice],
) -> Vec<Result<(), Error>> {
    let (mut begun, mut ended) = (0, Vec::new());
    // timing: only a hang takes as long
    let start = std::time::Instant::now();
    while ended.len() < slices.len() {
        begun += initiator.submit(&slices[begun..]).unwrap();
        ended.extend(poll(initiator));
        if let Some(target) = &mut target {
            poll(target);
        }
        // timing: as above
        assert!(start.elapsed().as_secs() < 60, "{} of {} slices ended", ended.len(), slices.len());
    }
    ended.sort_by_key(|end: &Completion| end.token.0);
    ended.iter().map(|end| end.result).collect()
}

/// Polls until `done` returns true.
pub(crate) fn until(what: &str, mut done: impl FnMut() -> bool) {
    // timing: only a hang takes as long
    let start = std::time::Instant::now();
    while !done() {
        // timing: as above
        assert!(start.elapsed().as_secs() < 30, "never: {what}");
        std::thread::yield_now();
    }
}

/// Bytes that differ at every place.
pub(crate) fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    te_core::testkit::Rng::new(seed).fill(&mut bytes);
    bytes
}
