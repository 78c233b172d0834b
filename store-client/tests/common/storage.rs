//! A store whose only segment is storage. The target is our own, in a thread; its owner is an engine that has
//! mounted the namespace.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use store_client::{Client, Fabrics, NamespacePlace, RemoveMode, RpcConfig, RpcConnection, Store as _};
use store_core::chunks::stored_len;
use store_core::message::{Export, Mount, MountSegment};
use store_core::{Incarnation, MasterConfig, MemoryLocation, NodeId, SegmentNo};
use store_master::MasterHandle;
use te_core::{Access, Memory as _, RegionId, Transport as _};
use te_engine::{MountedStorage, Storage, TransferEngine};
use te_fabric::testkit::Block;
use te_nvmeof::{Config, Namespace, NvmeofTransport};

use super::{MIB, client_over, master_with};

pub(crate) const GRANULE: u64 = 4_096;
pub(crate) const LEN: u64 = 32 * MIB;
/// What the target holds where nothing was written.
pub(crate) const UNTOUCHED: u8 = 0xee;

/// The block is reached through volatile copies alone.
pub(crate) struct Shared(pub(crate) Block);

// SAFETY: as its comment says; it is freed by the last of those that share it.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// A target in a thread, open to any host.
pub(crate) struct Target {
    pub(crate) namespace: Namespace,
    pub(crate) memory: Arc<Shared>,
    stopping: Arc<AtomicBool>,
    paused: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Target {
    pub(crate) fn serve() -> Self {
        let config = Config { open_to_hosts: true, ..Config::default() };
        let mut transport = NvmeofTransport::new(config).unwrap();
        let memory = Arc::new(Shared(Block::new(LEN as usize)));
        memory.0.set(0, &vec![UNTOUCHED; LEN as usize]);
        let id = RegionId::new(0, 1);
        // SAFETY: the thread drops the transport before its share of the block.
        unsafe { transport.register(id, memory.0.span(), Access::REMOTE_READ | Access::REMOTE_WRITE) }
            .unwrap();
        let namespace = transport.namespace(id).unwrap();
        let [stopping, paused] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let (stop, pause, shared) = (Arc::clone(&stopping), Arc::clone(&paused), Arc::clone(&memory));
        let thread = std::thread::spawn(move || {
            let (started, shared) = (Instant::now(), shared);
            while !stop.load(Ordering::Relaxed) {
                if !pause.load(Ordering::Relaxed) {
                    // timing: a transport is driven by the time that it is told.
                    transport.poll(te_core::Instant::ZERO + started.elapsed(), &mut []);
                }
                std::thread::yield_now();
            }
            drop(transport);
            drop(shared);
        });
        Self { namespace, memory, stopping, paused, thread: Some(thread) }
    }

    /// The place of an offset of the namespace, in bytes.
    pub(crate) fn place(&self, offset: u64) -> NamespacePlace {
        let Namespace { addresses, port, nqn, nsid, .. } = self.namespace.clone();
        NamespacePlace { address: SocketAddr::new(addresses[0], port), nqn, nsid, offset }
    }

    /// While it is paused, it does nothing.
    pub(crate) fn pause(&self, paused: bool) {
        self.paused.store(paused, Ordering::Relaxed);
    }

    /// `len` bytes of the namespace.
    pub(crate) fn bytes(&self, at: u64, len: u64) -> Vec<u8> {
        self.memory.0.get(at, len as usize)
    }

    /// The epoch that the mark of a range has.
    pub(crate) fn epoch(&self, at: u64) -> u32 {
        let mark = self.bytes(at, 16);
        assert_eq!(&mark[..8], b"snowskin", "{mark:?}");
        u32::from_le_bytes(mark[12..].try_into().unwrap())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// A store whose only segment is storage.
pub(crate) struct Setup {
    pub(crate) client: Client,
    pub(crate) segment: SegmentNo,
    pub(crate) storage: MountedStorage,
    _owner: TransferEngine,
    pub(crate) target: Target,
    pub(crate) master: MasterHandle,
}

pub(crate) fn nvmeof() -> Fabrics {
    "nvmeof,tcp".parse().unwrap()
}

pub(crate) fn setup() -> Setup {
    let target = Target::serve();
    let master = master_with(MasterConfig {
        node_ttl_ms: 600_000,
        lease_ttl_ms: 1_000,
        lease_guard_ms: 0,
        ..MasterConfig::default()
    });
    let config = te_engine::Config { fabrics: nvmeof(), ..te_engine::Config::default() };
    let owner = TransferEngine::start(config).unwrap();
    let wanted = Storage { namespace: target.namespace.clone(), range: 0..LEN, epoch: 1, take_over: false };
    let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
    let storage = owner.mount_storage(&wanted, access, Duration::from_secs(20)).unwrap();
    let mut rpc = RpcConnection::connect(master.rpc_addr().into(), RpcConfig::default()).unwrap();
    let mount = MountSegment {
        node: NodeId::new(1),
        incarnation: Incarnation::new(1),
        name: "storage",
        endpoint: owner.name(),
        base: storage.addr,
        len: storage.len,
        location: MemoryLocation::storage(GRANULE as u32).unwrap(),
        export: Export { engine: owner.incarnation(), region: storage.region.to_bits() },
        lineage: rpc.welcome().lineage,
        ..MountSegment::default()
    };
    let mounted = rpc.call::<Mount>(&mount, std::iter::empty()).unwrap().0.mounted().unwrap();
    let client = client_over(master.rpc_addr(), nvmeof());
    Setup { client, segment: mounted.segment, storage, _owner: owner, target, master }
}

impl Setup {
    /// Where an object begins in the namespace.
    pub(crate) fn place(&mut self, key: &[u8]) -> u64 {
        let replica = &self.client.master().replicas(key).unwrap()[0];
        assert_eq!(replica.segment, self.segment);
        replica.addr - self.storage.addr + GRANULE
    }

    /// Checks the bytes of an object in the namespace, and those behind it in its last granule.
    pub(crate) fn check_stored(&mut self, key: &[u8], value: &[u8]) {
        let (at, len) = (self.place(key), value.len() as u64);
        assert!(at.is_multiple_of(GRANULE));
        let memory = &self.target.memory.0;
        assert!(memory.get(at, value.len()) == value, "{len} bytes at {at}");
        let stored = stored_len(len);
        let rest = memory.get(at + stored, (stored.next_multiple_of(GRANULE) - stored) as usize);
        assert!(rest.iter().all(|byte| *byte == 0), "{len} bytes: zeros up to the end of the granule");
    }

    pub(crate) fn remove(&mut self, key: &[u8]) {
        assert!(self.client.remove(key, RemoveMode::Force).unwrap());
    }
}
