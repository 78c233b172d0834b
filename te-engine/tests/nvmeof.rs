//! NVMe over TCP as a fabric of the engine: each engine serves its regions as namespaces.
#![cfg(feature = "nvmeof")]
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]

mod common;

use std::time::Duration;

use common::{EVERYTHING, bytes, pattern, request};
use te_core::{Access, ErrorKind, ExpelMode, Memory as _, Op, Transport as _};
use te_engine::nvmeof::Namespace;
use te_engine::{
    Config, Expulsion, MountedStorage, RegisterError, RequestProblem, SegmentHandle, SharedRegion, Storage,
    SubmitOptions, TransferEngine, TransferError,
};

const LONG: Option<Duration> = Some(Duration::from_secs(30));
const LEN: usize = 3 << 20;

struct Pair {
    here: TransferEngine,
    there: TransferEngine,
    local: SharedRegion,
    remote: SharedRegion,
    segment: SegmentHandle,
}

fn pair(fabrics: &str) -> Pair {
    let engine =
        || TransferEngine::start(Config { fabrics: fabrics.parse().unwrap(), ..Config::default() }).unwrap();
    let (here, there) = (engine(), engine());
    let remote = there.alloc_shared(LEN, EVERYTHING).unwrap();
    let local = here.alloc_shared(LEN, Access::LOCAL).unwrap();
    let segment = here.open_segment(there.name()).unwrap();
    Pair { here, there, local, remote, segment }
}

impl Pair {
    /// Moves `len` bytes between offset `at` of the local region and offset `to` of the remote one.
    fn transfer(&self, op: Op, (at, to): (u64, u64), len: u64) -> Result<(), TransferError> {
        let requests = [request(op, (self.local.id(), at), self.segment, self.remote.addr() + to, len)];
        let options = SubmitOptions::new().timeout(Duration::from_secs(20));
        self.here.submit_with(&requests, &options)?.wait(LONG).map(drop)
    }

    fn moved(&self, fabric: &str) -> u64 {
        self.here.stats().rails.iter().filter(|rail| rail.name == fabric).map(|rail| rail.bytes).sum()
    }
}

#[test]
fn regions_of_peers_are_read_and_written_in_blocks() {
    let pair = pair("nvmeof");
    let content = pattern(11, LEN);
    pair.local.write(0, &content).unwrap();
    pair.transfer(Op::Write, (0, 0), LEN as u64).unwrap();
    assert_eq!(bytes(&pair.remote), content);
    pair.local.write(0, &vec![0; LEN]).unwrap();
    // The local side has no granule.
    pair.transfer(Op::Read, (5, 8192), (1 << 20) + 4096).unwrap();
    assert_eq!(bytes(&pair.local)[5..][..(1 << 20) + 4096], content[8192..][..(1 << 20) + 4096]);
    for (to, len) in [(1, 4096), (0, 4095), (512, 4096), (4096, 100)] {
        let refused = pair.transfer(Op::Write, (0, to), len);
        let problem = Err(TransferError::Request { index: 0, problem: RequestProblem::Granule });
        assert_eq!(refused, problem, "{to} {len}");
    }
}

#[cfg(feature = "tcp")]
#[test]
fn requests_off_the_granule_go_over_a_fabric_without_one() {
    let pair = pair("tcp,nvmeof");
    pair.transfer(Op::Write, (0, 1), 4095).unwrap();
    pair.transfer(Op::Write, (0, 0), 8192).unwrap();
    assert_eq!((pair.moved("tcp"), pair.moved("nvmeof")), (4095 + 8192, 0), "TCP is nearer");
    let requests = [request(Op::Write, (pair.local.id(), 0), pair.segment, pair.remote.addr(), 8192)];
    let options = SubmitOptions::new().fabric("nvmeof");
    pair.here.submit_with(&requests, &options).unwrap().wait(LONG).unwrap();
    assert_eq!(pair.moved("nvmeof"), 8192);
    let requests = [request(Op::Write, (pair.local.id(), 0), pair.segment, pair.remote.addr(), 8191)];
    let problem = Err(TransferError::Request { index: 0, problem: RequestProblem::Granule });
    let ended = pair.here.submit_with(&requests, &options).and_then(|batch| batch.wait(LONG).map(drop));
    assert_eq!(ended, problem);
}

#[test]
fn an_expelled_peer_writes_no_more() {
    let pair = pair("nvmeof");
    pair.transfer(Op::Write, (0, 0), 4096).unwrap();
    let mut state = pair.there.expel(pair.here.identity(), ExpelMode::Force).unwrap();
    common::eventually("the peer is gone", || {
        state = pair.there.expel(pair.here.identity(), ExpelMode::Force).unwrap();
        state == Expulsion::Gone
    });
    pair.local.write(0, &[9; 4096]).unwrap();
    assert!(pair.transfer(Op::Write, (0, 0), 4096).is_err());
    // Nor over an attachment that it makes anew.
    let again = pair.here.open_segment(pair.there.name()).unwrap();
    let requests = [request(Op::Write, (pair.local.id(), 0), again, pair.remote.addr(), 4096)];
    let options = SubmitOptions::new().timeout(Duration::from_secs(5));
    let ended = pair.here.submit_with(&requests, &options).and_then(|batch| batch.wait(LONG).map(drop));
    assert!(ended.is_err());
    assert_eq!(bytes(&pair.remote)[..4096], [0; 4096]);
}

/// A box of disks that runs nothing of ours: a target in a thread, open to any host.
struct Disks {
    namespace: Namespace,
    memory: std::sync::Arc<Shared>,
    stop: std::sync::Arc<std::sync::atomic::AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// The block is reached through volatile copies alone.
struct Shared(te_fabric::testkit::Block);

// SAFETY: as its comment says; it is freed by the last of those that share it.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Disks {
    fn new() -> Self {
        let config = te_engine::nvmeof::Config { open_to_hosts: true, ..Default::default() };
        let mut transport = te_engine::nvmeof::NvmeofTransport::new(config).unwrap();
        let memory = std::sync::Arc::new(Shared(te_fabric::testkit::Block::new(LEN)));
        let id = te_core::RegionId::new(0, 1);
        // SAFETY: the thread drops the transport before its share of the block.
        unsafe { transport.register(id, memory.0.span(), Access::REMOTE_READ | Access::REMOTE_WRITE) }
            .unwrap();
        let namespace = transport.namespace(id).unwrap();
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let (stopped, shared) = (stop.clone(), memory.clone());
        let thread = std::thread::spawn(move || {
            let (started, shared) = (std::time::Instant::now(), shared);
            while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
                // timing: a transport is driven by the time that it is told.
                transport.poll(te_core::Instant::ZERO + started.elapsed(), &mut []);
                std::thread::yield_now();
            }
            drop(transport);
            drop(shared);
        });
        Self { namespace, memory, stop, thread: Some(thread) }
    }

    fn storage(&self, take_over: bool) -> Storage {
        Storage { namespace: self.namespace.clone(), range: 0..LEN as u64, epoch: 1, take_over }
    }
}

impl Drop for Disks {
    fn drop(&mut self) {
        self.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

const GRANULE: u64 = 4_096;

/// An engine that only knows this fabric.
fn engine() -> TransferEngine {
    TransferEngine::start(Config { fabrics: "nvmeof".parse().unwrap(), ..Config::default() }).unwrap()
}

fn mounted(owner: &TransferEngine, storage: &Storage) -> Result<MountedStorage, RegisterError> {
    owner.mount_storage(storage, EVERYTHING, Duration::from_secs(20))
}

fn moved_by(engine: &TransferEngine) -> u64 {
    engine.stats().rails.iter().map(|rail| rail.bytes).sum()
}

#[test]
fn storage_that_an_engine_mounts_is_used_by_peers_past_it() {
    let disks = Disks::new();
    let (owner, here) = (engine(), engine());
    let storage = mounted(&owner, &disks.storage(false)).unwrap();
    assert_eq!(storage.len, LEN as u64 - GRANULE);
    let segment = here.open_segment(owner.name()).unwrap();
    let local = here.alloc_shared(LEN, Access::LOCAL).unwrap();
    let content = pattern(3, 1 << 20);
    local.write(0, &content).unwrap();
    let transfer = |op, at: u64, to: u64, len: u64| {
        let requests = [request(op, (local.id(), at), segment, storage.addr + to, len)];
        here.submit(&requests, Some(Duration::from_secs(20)))?.wait(LONG).map(drop)
    };
    transfer(Op::Write, 0, 8_192, 1 << 20).unwrap();
    assert!(disks.memory.0.get(GRANULE + 8_192, 1 << 20) == content, "behind the superblock");
    transfer(Op::Read, 1 << 20, 8_192, 1 << 20).unwrap();
    assert!(bytes(&local)[1 << 20..][..1 << 20] == content);
    assert_eq!(moved_by(&owner), 0, "nothing has passed through its owner");
    let outside = transfer(Op::Write, 0, storage.len, GRANULE);
    assert!(outside.is_err());
    // It is no memory of its owner.
    let own = owner.open_segment(owner.name()).unwrap();
    let requests = [request(Op::Read, (storage.region, 0), own, storage.addr, GRANULE)];
    let refused = owner.submit(&requests, LONG).and_then(|batch| batch.wait(LONG).map(drop));
    assert!(matches!(refused, Err(TransferError::Request { index: 0, .. })), "{refused:?}");
    // Its owner reads and writes it as peers do.
    let memory = owner.alloc_shared(LEN, Access::LOCAL).unwrap();
    memory.write(0, &content[..8_192]).unwrap();
    let transfer = |op, at: u64| {
        let requests = [request(op, (memory.id(), at), own, storage.addr + (2 << 20), 8_192)];
        owner.submit(&requests, LONG)?.wait(LONG).map(drop)
    };
    transfer(Op::Write, 0).unwrap();
    assert!(disks.memory.0.get(GRANULE + (2 << 20), 8_192) == content[..8_192]);
    transfer(Op::Read, 16_384).unwrap();
    assert!(bytes(&memory)[16_384..][..8_192] == content[..8_192]);
    // What is not mounted any more is not listed, and may be mounted again.
    owner.unregister(storage.region).unwrap();
    let again = mounted(&owner, &Storage { epoch: 2, ..disks.storage(false) }).unwrap();
    assert!(again.addr > storage.addr + storage.len);
}

#[test]
fn after_the_death_of_an_owner_its_heir_fences_everybody_before_it_lists_the_storage() {
    let disks = Disks::new();
    let (owner, here) = (engine(), engine());
    let storage = mounted(&owner, &disks.storage(false)).unwrap();
    let segment = here.open_segment(owner.name()).unwrap();
    let local = here.alloc_shared(LEN, Access::LOCAL).unwrap();
    local.write(0, &[7; 8_192]).unwrap();
    let write = |segment, addr| {
        let requests = [request(Op::Write, (local.id(), 0), segment, addr, 8_192)];
        here.submit(&requests, Some(Duration::from_secs(5)))?.wait(LONG).map(drop)
    };
    write(segment, storage.addr).unwrap();
    drop(owner);
    write(segment, storage.addr).unwrap();
    let heir = engine();
    let refused = mounted(&heir, &disks.storage(false)).unwrap_err();
    let is = |error: &RegisterError, kind| matches!(error, RegisterError::Rails(of) if of.kind == kind);
    assert!(is(&refused, ErrorKind::AccessDenied), "{refused}");
    let storage = mounted(&heir, &Storage { epoch: 2, ..disks.storage(true) }).unwrap();
    disks.memory.0.set(GRANULE, &[0xEE; 16_384]);
    assert!(write(segment, storage.addr).is_err(), "a client of the dead owner");
    assert_eq!(disks.memory.0.get(GRANULE, 16_384), [0xEE; 16_384]);
    // It learns that it was fenced, and goes on with another identity.
    let again = here.open_segment(heir.name()).unwrap();
    let fenced = write(again, storage.addr).unwrap_err();
    assert!(
        matches!(&fenced, TransferError::Ended { error, .. } if error.kind == ErrorKind::Expelled),
        "{fenced}"
    );
    let other = engine();
    let segment = other.open_segment(heir.name()).unwrap();
    let memory = other.alloc_shared(8_192, Access::LOCAL).unwrap();
    memory.write(0, &[9; 8_192]).unwrap();
    let requests = [request(Op::Write, (memory.id(), 0), segment, storage.addr, 8_192)];
    other.submit(&requests, LONG).unwrap().wait(LONG).unwrap();
    assert_eq!(disks.memory.0.get(GRANULE, 8_192), [9; 8_192]);
}

#[test]
fn storage_that_cannot_be_is_not_mounted() {
    let disks = Disks::new();
    let owner = engine();
    let kind = |storage: Storage, owner: &TransferEngine| match mounted(owner, &storage) {
        Err(RegisterError::Rails(error)) => error.kind,
        other => panic!("{other:?}"),
    };
    let good = disks.storage(false);
    let of = |range| Storage { range, ..good.clone() };
    assert_eq!(kind(of(0..GRANULE), &owner), ErrorKind::InvalidArgument);
    assert_eq!(kind(of(512..8 * GRANULE), &owner), ErrorKind::InvalidArgument);
    assert_eq!(kind(of(0..LEN as u64 + GRANULE), &owner), ErrorKind::Stale, "it ends before");
    let other = Namespace { nguid: [1; 16], ..good.namespace.clone() };
    assert_eq!(kind(Storage { namespace: other, ..good.clone() }, &owner), ErrorKind::Stale);
    let away = Namespace { port: 1, ..good.namespace.clone() };
    // An engine that knows the subsystem already would find it.
    let owner = engine();
    let begun = owner.mount_storage(
        &Storage { namespace: away, ..good.clone() },
        EVERYTHING,
        Duration::from_millis(50),
    );
    assert!(begun.is_err(), "{begun:?}");
    assert_eq!(owner.stats().regions, 0, "nothing is left");
    let without = TransferEngine::start(Config { fabrics: "shm".parse().unwrap(), ..Config::default() });
    assert_eq!(kind(good, &without.unwrap()), ErrorKind::Unsupported);
}

#[test]
fn it_is_used_only_when_it_is_named_or_has_a_port() {
    let rails = |config: Config| TransferEngine::start(config).unwrap().stats().rails;
    assert!(rails(Config::default()).iter().all(|rail| rail.name != "nvmeof"));
    let mut config = Config::default();
    config.nvmeof.port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    assert!(rails(config).iter().any(|rail| rail.name == "nvmeof"));
}
