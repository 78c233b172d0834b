//! [`Node`]: contributes memory, or storage, to the store.

mod disks;
mod exports;
mod expulsions;
mod extents;
mod home;
mod keeper;
mod share;
mod storage;
mod tasks;
mod waiting;

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use store_core::message::{DrainInfo, DrainStatus, OrderSegments, SegmentOrder, SegmentState};
use store_core::{ErrorCode, Items, SegmentNo};
#[cfg(any(test, feature = "testkit"))]
use te_engine::SharedRegion;
use te_engine::TransferEngine;
use te_host::fork::Mark;

use crate::config::NodeConfig;
use crate::error::{ConnectError, RpcError};
use crate::rpc::{RpcConnection, Standing};
use crate::stage::{StageCounters, StageServer};
pub use disks::{DiskKind, DiskReport};
use disks::{Disks, Reports};
use exports::Origin;
use home::Home;
use keeper::Keeper;
use tasks::Worker;
use waiting::Waiting;

/// Memory of this process in the store, or storage that it contributes ([`NodeConfig::storage`]).
///
/// Clients read and write it over the fabrics, without any action of this process's code. A thread sends
/// heartbeats to the master. When the master has given the node up, or the store has begun anew (a master
/// that was restarted without its journal), the memory is exported and mounted anew, empty. It stays mounted
/// when another master of the same lineage leads. Dropping the node unmounts it.
pub struct Node {
    config: NodeConfig,
    endpoint: String,
    capacity_bytes: u64,
    engine: TransferEngine,
    started: Instant,
    shared: Arc<Shared>,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    /// Of its disks and its stage service, if it has any.
    reports: Option<(Arc<Reports>, Arc<StageServer>)>,
    mark: Mark,
}

/// What a node has counted since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeStatusReport {
    /// Number of the segment under which its memory is mounted; `None`: it is not mounted.
    pub segment: Option<SegmentNo>,
    /// Whether the master has answered recently: within the time after which it gives a silent node up.
    pub heard: bool,
    /// How often the memory was mounted.
    pub mounts: u64,
    /// Heartbeats that were answered.
    pub heartbeats: u64,
    /// Heartbeats and mounts that failed.
    pub failures: u64,
    /// Replicas that this node copied from other nodes, as the master requested.
    pub copies: u64,
    /// Copies that failed.
    pub copy_failures: u64,
}

#[derive(Default)]
struct Shared {
    /// Segment number plus one; 0: not mounted.
    segment: AtomicU64,
    mounts: AtomicU64,
    heartbeats: AtomicU64,
    failures: AtomicU64,
    copies: AtomicU64,
    copy_failures: AtomicU64,
    /// When the master answered last, and how long that answer counts as recent.
    heard: Mutex<Option<(Instant, Duration)>>,
    home: Mutex<Option<Home>>,
    /// The latest reign that the node has met: orders of earlier ones are refused, whichever of its
    /// connections they come over.
    standing: Standing,
}

/// Connects to the master that leads.
fn connect(config: &NodeConfig, standing: &Standing) -> Result<RpcConnection, RpcError> {
    let (masters, identity) = (config.master.clone(), config.identity.clone());
    RpcConnection::connect_with(masters, config.rpc, identity, standing.clone())
}

impl Node {
    /// Starts an engine, allocates the memory, or reserves the storage, and mounts it. A master that does not
    /// answer is waited for as long as [`NodeConfig::wait_master_ms`].
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn start(config: NodeConfig) -> Result<Self, ConnectError> {
        Self::start_unless(config, || false)
    }

    /// As [`start`](Self::start). While it waits for the master, it calls `gives_up` about every 50 ms and
    /// stops waiting when that returns `true`: for a process that was asked to end.
    ///
    /// # Errors
    /// See [`ConnectError`]; if `gives_up` returned `true`, the error of the latest try.
    pub fn start_unless(
        mut config: NodeConfig,
        gives_up: impl FnMut() -> bool,
    ) -> Result<Self, ConnectError> {
        config.validate()?;
        if config.identity.cluster.is_set() {
            config.engine.cluster_secret = config.identity.cluster_secret();
        }
        #[cfg(feature = "cxl")]
        if config.cxl.is_set() && !config.engine.cxl.pools.contains(&config.cxl.pool) {
            config.engine.cxl.pools.push(config.cxl.pool.clone());
        }
        crate::engine::sole_writer(&mut config.engine);
        // A node reads no notifications.
        config.engine.control.notifications_max = 0;
        // Errors of the engine are reported before the wait for the master.
        let engine = TransferEngine::start(config.engine.clone())?;
        let endpoint = engine.name().to_owned();
        let origin = Origin::of(&config, &engine)?;
        config.capacity_bytes = origin.bytes();
        let mut waiting = Waiting::new(&config, gives_up);
        let shared = Arc::new(Shared::default());
        let rpc = waiting.until(|| connect(&config, &shared.standing).map_err(ConnectError::from))?;
        let worker = Worker::start(&config, engine.clone(), Arc::clone(&shared))?;
        let disks = Disks::start(&config, &engine, shared.standing.clone())?;
        let reports = disks.as_ref().map(Disks::reports);
        let mut keeper =
            Keeper::new(config.clone(), engine.clone(), rpc, Arc::clone(&shared), worker, disks, origin);
        if let Err(error) = waiting.until(|| keeper.mount()) {
            // Extents of a pool may be claimed already.
            keeper.end();
            return Err(error);
        }
        let (stop, stopped) = channel();
        let thread = thread::Builder::new()
            .name("snowskin-node".into())
            .spawn(move || keeper.run(&stopped))
            .map_err(ConnectError::System)?;
        Ok(Self {
            capacity_bytes: config.capacity_bytes,
            config,
            endpoint,
            engine,
            started: Instant::now(),
            shared,
            stop: Some(stop),
            thread: Some(thread),
            reports,
            mark: Mark::new(),
        })
    }

    /// Address of its engine, at which clients reach its memory.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Its counters. All are 0 in a fork of the process that started it.
    #[must_use]
    pub fn status(&self) -> NodeStatusReport {
        if self.mark.is_forked() {
            return NodeStatusReport::default();
        }
        let segment = self.shared.segment.load(Ordering::Relaxed);
        NodeStatusReport {
            segment: segment.checked_sub(1).and_then(|no| u32::try_from(no).ok()).map(SegmentNo::new),
            heard: self.shared.has_heard(),
            mounts: self.shared.mounts.load(Ordering::Relaxed),
            heartbeats: self.shared.heartbeats.load(Ordering::Relaxed),
            failures: self.shared.failures.load(Ordering::Relaxed),
            copies: self.shared.copies.load(Ordering::Relaxed),
            copy_failures: self.shared.copy_failures.load(Ordering::Relaxed),
        }
    }

    /// Its disks, and what they have counted.
    #[must_use]
    pub fn disks(&self) -> Vec<DiskReport> {
        let reports = self.reports.as_ref().filter(|_| !self.mark.is_forked());
        reports.map(|(disks, _)| disks.disks()).unwrap_or_default()
    }

    /// What its stage service has counted; zeros without disks.
    #[must_use]
    pub fn stage(&self) -> StageCounters {
        let reports = self.reports.as_ref().filter(|_| !self.mark.is_forked());
        reports.map(|(_, stage)| stage.counters()).unwrap_or_default()
    }

    /// Its counters and its engine's rails as OpenMetrics text for Prometheus. Names begin with
    /// `snowskin_node_` and `snowskin_engine_`; `docs/reference/metrics.md` describes each.
    #[must_use]
    pub fn metrics_text(&self) -> String {
        let engine = self.engine.stats();
        let (status, disks) = (self.status(), self.disks());
        crate::metrics::of_node(&status, self.capacity_bytes, self.started.elapsed(), &engine, &disks)
    }

    /// The memory that is mounted, for tests that corrupt it; `None` for storage.
    #[cfg(any(test, feature = "testkit"))]
    #[must_use]
    pub fn region(&self) -> Option<SharedRegion> {
        if self.mark.is_forked() {
            return None;
        }
        let home = self.shared.home.lock().unwrap_or_else(PoisonError::into_inner);
        home.as_ref().and_then(Home::memory).cloned()
    }

    /// Unmounts the memory and ends. Objects without another replica are lost, unless
    /// [`NodeConfig::drain_on_stop_ms`] makes the node move them to other nodes before; the result is logged.
    pub fn stop(mut self) {
        let timeout = Duration::from_millis(self.config.drain_on_stop_ms.into());
        if timeout.is_zero() || self.mark.is_forked() {
            return self.join();
        }
        let name = self.config.name.clone();
        match self.stop_drained(timeout) {
            Ok(info) if info.blocks == 0 => {
                log::info!("node {name}: drained: {} objects were moved to other nodes", info.moved_total);
            }
            Ok(info) => log::warn!(
                "node {name}: not drained within {} ms: {} allocations (replicas, unfinished puts, space pending \
                 release) of {} bytes are left; raise `drain_on_stop_ms`",
                timeout.as_millis(),
                info.blocks,
                info.used_bytes
            ),
            Err(error) => log::warn!("node {name}: stopped without being drained: {error}"),
        }
    }

    /// Moves all objects to other nodes. It waits at most `timeout`, or until nothing more can be moved, and
    /// returns the progress. The node continues: objects that are left can be read until it is stopped.
    /// [`DrainInfo::blocks`] counts what is left: replicas, unfinished puts, and space pending release.
    ///
    /// # Errors
    /// The master did not answer before the timeout.
    pub fn drain(&self, timeout: Duration) -> Result<DrainInfo, ConnectError> {
        self.drain_until(Instant::now() + timeout, |_| ControlFlow::Continue(()))
    }

    /// Moves all objects to other nodes, waits at most `timeout`, then ends as [`stop`](Self::stop) does.
    /// Returns the progress: what was left (as many replicas, unfinished puts and parts of space pending
    /// release as [`DrainInfo::blocks`]) was unmounted with the memory.
    ///
    /// # Errors
    /// The master did not answer before the timeout; the node has ended nevertheless.
    pub fn stop_drained(self, timeout: Duration) -> Result<DrainInfo, ConnectError> {
        self.stop_drained_while(timeout, |_| ControlFlow::Continue(()))
    }

    /// As [`stop_drained`](Self::stop_drained). `watch` receives the progress about every 50 ms, and may end
    /// the wait.
    ///
    /// # Errors
    /// As [`stop_drained`](Self::stop_drained).
    pub fn stop_drained_while(
        mut self,
        timeout: Duration,
        watch: impl FnMut(&DrainInfo) -> ControlFlow<()>,
    ) -> Result<DrainInfo, ConnectError> {
        let drained = self.drain_until(Instant::now() + timeout, watch);
        self.join();
        drained
    }

    /// A master that does not answer meanwhile is waited for, and memory that was mounted anew is drained
    /// anew.
    fn drain_until(
        &self,
        deadline: Instant,
        mut watch: impl FnMut(&DrainInfo) -> ControlFlow<()>,
    ) -> Result<DrainInfo, ConnectError> {
        if self.mark.is_forked() {
            return Err(ConnectError::Forked);
        }
        let config = &self.config;
        let mut rpc = None;
        let mut ordered = None;
        let mut info = DrainInfo::default();
        loop {
            let step = self.drain_step(&mut rpc, &mut ordered);
            match &step {
                Ok(Some(now)) => info = *now,
                // Nothing of this node is mounted.
                Ok(None) => info = DrainInfo::default(),
                Err(error) => {
                    log::debug!("node {}: the drain cannot be checked: {error}", config.name);
                    rpc = None;
                }
            }
            let waits = match &step {
                Ok(_) => {
                    let left = info.left_no_room + info.left_bad;
                    let stuck = info.moving == 0 && left > 0 && left >= info.blocks;
                    ordered.is_some() && info.state == SegmentState::Draining && !stuck
                }
                Err(error) => error.is_transient() || error.code() == ErrorCode::SegmentNotFound,
            };
            if !waits || watch(&info).is_break() || Instant::now() >= deadline {
                return step.map(|_| info).map_err(ConnectError::from);
            }
            thread::sleep(DRAIN_PAUSE);
        }
    }

    /// Orders the drain of the mounted segment, once, and asks for the progress. `None`: nothing is mounted.
    fn drain_step(
        &self,
        rpc: &mut Option<RpcConnection>,
        ordered: &mut Option<SegmentNo>,
    ) -> Result<Option<DrainInfo>, RpcError> {
        let Some(segment) = self.status().segment else {
            *ordered = None;
            return Ok(None);
        };
        let config = &self.config;
        let rpc = match rpc {
            Some(rpc) => rpc,
            None => rpc.insert(connect(config, &self.shared.standing)?),
        };
        if *ordered == Some(segment) {
            return first(rpc.call::<DrainStatus>(&(), std::iter::once(segment))).map(Some);
        }
        let order = SegmentOrder { segment, state: SegmentState::Draining };
        let info = first(rpc.call::<OrderSegments>(&(), std::iter::once(order)))?;
        *ordered = Some(segment);
        Ok(Some(info))
    }

    fn join(&mut self) {
        if self.mark.is_forked() {
            // The thread, and the locks that it holds, belong to the parent.
            std::mem::forget((self.stop.take(), self.thread.take()));
            return;
        }
        // Dropping the sender ends the thread.
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Time between two questions about the progress of a drain.
const DRAIN_PAUSE: Duration = Duration::from_millis(50);

/// The answer for the only item of a request.
fn first<T>(answer: Result<((), Items<'_, Result<T, ErrorCode>>), RpcError>) -> Result<T, RpcError>
where
    Result<T, ErrorCode>: serde::de::DeserializeOwned,
{
    let (_, mut items) = answer?;
    items.next().unwrap_or(Err(ErrorCode::InternalError)).map_err(RpcError::Refused)
}

/// A random number. A forked child has the same hash keys as its parent, but an engine with another identity.
fn random(engine: &TransferEngine) -> u64 {
    RandomState::new().hash_one(engine.identity())
}

impl Drop for Node {
    fn drop(&mut self) {
        self.join();
    }
}

impl Shared {
    fn hears(&self, ttl: Duration) {
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), ttl));
    }

    fn has_heard(&self) -> bool {
        let heard = *self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        heard.is_some_and(|(at, ttl)| at.elapsed() < ttl)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use store_master::{Config, MasterHandle, MasterServer};
    use te_engine::{Expulsion, Fabrics, SegmentError};
    use te_fabric::testkit::eventually;

    use super::*;
    use crate::local::{LocalConfig, LocalServerConfig};
    use crate::{
        BufferRange, Client, ClientConfig, LocalClient, LocalServer, PutOptions, Store as _, StoreError,
    };

    const ONE: PutOptions = PutOptions::DEFAULT;

    fn store(fabrics: Fabrics) -> (MasterHandle, Node) {
        let config =
            Config { rpc_listen: "127.0.0.1:0".parse().unwrap(), http_listen: None, ..Config::default() };
        let master = MasterServer::bind(config).unwrap().spawn().unwrap();
        let node = NodeConfig::new("a", master.rpc_addr().into(), 8 << 20).fabrics(fabrics);
        (master, Node::start(node).unwrap())
    }

    fn connect(master: &MasterHandle, fabrics: Fabrics) -> Client {
        Client::connect(ClientConfig::new(master.rpc_addr().into()).fabrics(fabrics)).unwrap()
    }

    fn expel(node: &Node, writer: u64) {
        while node.engine.expel(writer, te_core::ExpelMode::Force).unwrap() != Expulsion::Gone {
            thread::yield_now();
        }
    }

    #[test]
    fn a_client_that_was_cut_off_continues_with_another_engine_unless_it_holds_memory_of_the_old_one() {
        for fabrics in [Fabrics::TCP, Fabrics::SHM] {
            let (master, node) = store(fabrics);
            let (mut plain, mut holding) = (connect(&master, fabrics), connect(&master, fabrics));
            let memory = holding.alloc(4096).unwrap();
            for (name, client) in [("plain", &mut plain), ("holding", &mut holding)] {
                assert!(client.put(name.as_bytes(), &[7; 100_000], &ONE).unwrap());
                expel(&node, client.engine_mut().identity());
                // The client notices when it connects again; a connection that breaks is not yet the notice.
                eventually("the client notices that it was cut off", || {
                    client.is_expelled() || {
                        assert!(client.put(b"late", &[8; 100_000], &ONE).is_err(), "{name} over {fabrics}");
                        false
                    }
                });
            }
            assert!(plain.put(b"after", &[9; 100_000], &ONE).unwrap(), "{fabrics}");
            assert_eq!(plain.get(b"after").unwrap(), Some(vec![9; 100_000]));
            assert_eq!(plain.get(b"plain").unwrap(), Some(vec![7; 100_000]));
            let range = BufferRange::all(&memory);
            assert!(matches!(holding.put(b"held", range, &ONE), Err(StoreError::Expelled)));
            assert!(matches!(holding.get(b"after"), Err(StoreError::Expelled)), "{fabrics}");
            drop(holding);
        }
    }

    #[test]
    fn local_clients_of_a_worker_that_was_cut_off_come_back() {
        let (master, node) = store(Fabrics::default());
        let dir = tempfile::tempdir().unwrap();
        let mut config = LocalServerConfig::new(
            dir.path().join("local.sock"),
            ClientConfig::new(master.rpc_addr().into()),
        );
        config.workers = 1;
        let server = LocalServer::start(config).unwrap();
        let mut local = LocalClient::connect(LocalConfig::new(server.path())).unwrap();
        assert!(local.put(b"before", &[1; 100_000], &ONE).unwrap());
        let writers = server.shared().identities.lock().unwrap().clone();
        writers.into_iter().for_each(|writer| expel(&node, writer));
        // One call notices that the worker was cut off, and one that the connection is closed.
        eventually("the local client recovers", || local.put(b"after", &[2; 100_000], &ONE).unwrap_or(false));
        assert_eq!(local.get(b"after").unwrap(), Some(vec![2; 100_000]));
        assert_eq!(local.get(b"before").unwrap(), Some(vec![1; 100_000]));
        drop(local);
        server.stop();
    }

    #[test]
    fn nodes_and_clients_keep_no_notifications() {
        let (master, node) = store(Fabrics::TCP);
        let mut client = connect(&master, Fabrics::TCP);
        let outsider = TransferEngine::start(te_engine::Config::default()).unwrap();
        for endpoint in [node.endpoint().to_owned(), client.engine_mut().name().to_owned()] {
            let segment = outsider.open_segment(&endpoint).unwrap();
            let refused = outsider.notify(segment, "a name", b"a message");
            assert!(matches!(refused, Err(SegmentError::Refused { .. })), "{endpoint}: {refused:?}");
        }
    }
}
