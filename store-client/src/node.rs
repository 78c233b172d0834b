//! [`Node`]: contributes memory.

mod tasks;

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use store_core::message::{
    Beat, DrainInfo, DrainStatus, Export, Heartbeat, Mount, MountSegment, NodeStatus, OrderSegments,
    SegmentOrder, SegmentState, Unmount, UnmountSegment,
};
use store_core::{ErrorCode, Items, SegmentNo};
use te_engine::{Access, RegisterError, SharedRegion, TransferEngine};

use crate::config::NodeConfig;
use crate::error::{ConnectError, RpcError};
use crate::rpc::RpcConnection;
use tasks::{Mounted, Worker};

/// Memory of this process in the store.
///
/// Clients read and write it over the fabrics, without this process being asked; a thread tells the master that it lives.
/// When the master has given it up, or was restarted, the memory is exported afresh and mounted anew, empty. Dropping the
/// node unmounts it.
pub struct Node {
    config: NodeConfig,
    endpoint: String,
    capacity_bytes: u64,
    engine: TransferEngine,
    started: Instant,
    shared: Arc<Shared>,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// What a node has seen since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeStatusReport {
    /// The number under which its memory is mounted now; none: it is not.
    pub segment: Option<SegmentNo>,
    /// Whether the master has answered lately: within the time after which it gives a silent node up.
    pub heard: bool,
    /// Times it was mounted.
    pub mounts: u64,
    /// Heartbeats that were answered.
    pub heartbeats: u64,
    /// Times that the master could not be asked.
    pub failures: u64,
    /// Replicas made here, on the master's word, from those of other nodes.
    pub copies: u64,
    /// Of these, tries that failed.
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
    /// When the master answered last, and how long that counts.
    heard: Mutex<Option<(Instant, Duration)>>,
    region: Mutex<Option<SharedRegion>>,
}

/// What the thread owns.
struct Keeper {
    config: NodeConfig,
    engine: TransferEngine,
    rpc: RpcConnection,
    node: u64,
    /// What the node proves with that it is itself.
    key: u64,
    incarnation: u64,
    mounted: Option<SegmentNo>,
    ttl: Duration,
    shared: Arc<Shared>,
    worker: Worker,
}

impl Node {
    /// Starts an engine, allocates the memory and mounts it.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn start(config: NodeConfig) -> Result<Self, ConnectError> {
        config.validate()?;
        let rpc = RpcConnection::connect_as(config.master.clone(), config.rpc, config.identity.clone())?;
        let engine = TransferEngine::start(config.engine.clone())?;
        let endpoint = engine.name().to_owned();
        let shared = Arc::new(Shared::default());
        let worker = Worker::start(&config, engine.clone(), Arc::clone(&shared))?;
        let asker = config.clone();
        let capacity_bytes = config.capacity_bytes;
        let handle = engine.clone();
        let mut keeper = Keeper {
            ttl: Duration::from_millis(rpc.welcome().node_ttl_ms.into()),
            config,
            engine,
            rpc,
            node: random(),
            key: random(),
            incarnation: 0,
            mounted: None,
            shared: Arc::clone(&shared),
            worker,
        };
        keeper.mount()?;
        let (stop, stopped) = channel();
        let thread = thread::Builder::new()
            .name("snowskin-node".into())
            .spawn(move || keeper.run(&stopped))
            .map_err(ConnectError::System)?;
        let started = Instant::now();
        Ok(Self {
            config: asker,
            endpoint,
            capacity_bytes,
            engine: handle,
            started,
            shared,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Where clients' engines find its memory.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// What it has seen.
    #[must_use]
    pub fn status(&self) -> NodeStatusReport {
        let segment = self.shared.segment.load(Ordering::Relaxed);
        NodeStatusReport {
            segment: segment.checked_sub(1).and_then(|no| SegmentNo::try_from(no).ok()),
            heard: self.shared.has_heard(),
            mounts: self.shared.mounts.load(Ordering::Relaxed),
            heartbeats: self.shared.heartbeats.load(Ordering::Relaxed),
            failures: self.shared.failures.load(Ordering::Relaxed),
            copies: self.shared.copies.load(Ordering::Relaxed),
            copy_failures: self.shared.copy_failures.load(Ordering::Relaxed),
        }
    }

    /// What it has seen, and the engine's rails, as OpenMetrics text for Prometheus. Names begin with `snowskin_node_` and
    /// `snowskin_engine_`; `docs/reference/metrics.md` says what each is.
    #[must_use]
    pub fn metrics_text(&self) -> String {
        let engine = self.engine.stats();
        crate::metrics::of_node(&self.status(), self.capacity_bytes, self.started.elapsed(), &engine)
    }

    /// The memory that is mounted now: for tests that corrupt it, and for the curious.
    #[must_use]
    pub fn region(&self) -> Option<SharedRegion> {
        self.shared.region.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Unmounts the memory and ends. Objects that are nowhere else are gone.
    pub fn stop(mut self) {
        self.join();
    }

    /// Has everything moved to other nodes, waits for that at most `timeout`, then ends as [`stop`](Self::stop) does. Gives how
    /// far it came: what is left in [`DrainInfo::blocks`] was unmounted with the memory.
    ///
    /// # Errors
    /// The master could not be asked; the node has ended all the same.
    pub fn stop_drained(mut self, timeout: Duration) -> Result<DrainInfo, ConnectError> {
        let drained = self.drain(Instant::now() + timeout);
        self.join();
        drained
    }

    fn drain(&self, deadline: Instant) -> Result<DrainInfo, ConnectError> {
        let Some(segment) = self.status().segment else { return Ok(DrainInfo::default()) };
        let config = &self.config;
        let mut rpc = RpcConnection::connect_as(config.master.clone(), config.rpc, config.identity.clone())?;
        let order = SegmentOrder { segment, state: SegmentState::Draining };
        let mut info = first(rpc.call::<OrderSegments>(&(), std::iter::once(order)))?;
        while info.state == SegmentState::Draining && Instant::now() < deadline {
            thread::sleep(DRAIN_PAUSE);
            info = first(rpc.call::<DrainStatus>(&(), std::iter::once(segment)))?;
        }
        Ok(info)
    }

    fn join(&mut self) {
        // Hanging up is the sign.
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Between two questions how far the draining is.
const DRAIN_PAUSE: Duration = Duration::from_millis(50);

/// The answer for the only item.
fn first<T>(answer: Result<((), Items<'_, Result<T, ErrorCode>>), RpcError>) -> Result<T, RpcError>
where
    Result<T, ErrorCode>: serde::de::DeserializeOwned,
{
    let (_, mut items) = answer?;
    items.next().unwrap_or(Err(ErrorCode::InternalError)).map_err(RpcError::Refused)
}

/// A random number.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
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

impl Keeper {
    fn run(mut self, stopped: &Receiver<()>) {
        while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(self.pause()) {
            if let Err(error) = self.beat() {
                self.shared.failures.fetch_add(1, Ordering::Relaxed);
                log::warn!("node {}: {error}", self.config.name);
            }
        }
        self.worker.stop();
        self.unmount();
    }

    fn pause(&self) -> Duration {
        let third = self.ttl / 3;
        let wanted = match self.config.heartbeat_ms {
            0 => third,
            ms => Duration::from_millis(ms.into()).min(third),
        };
        // Whoever is not mounted wants to be.
        let wanted = if self.mounted.is_some() { wanted } else { wanted.min(Duration::from_millis(200)) };
        wanted.max(Duration::from_millis(1))
    }

    fn beat(&mut self) -> Result<(), ConnectError> {
        if self.mounted.is_none() {
            return self.mount();
        }
        let beat = Heartbeat { node: self.node, incarnation: self.incarnation, key: self.key };
        let trace = self.rpc.begin_trace();
        log::debug!("node {}: heartbeat (operation {trace})", self.config.name);
        let status = self.rpc.call::<Beat>(&beat, std::iter::empty()).map(|(status, _)| status);
        match status {
            Ok(status @ (NodeStatus::Ok | NodeStatus::Work)) => {
                self.shared.hears(self.ttl);
                self.shared.heartbeats.fetch_add(1, Ordering::Relaxed);
                if status == NodeStatus::Work {
                    self.wake_worker();
                }
                Ok(())
            }
            Ok(NodeStatus::NeedRemount)
            | Err(RpcError::Refused(ErrorCode::ClientNotFound | ErrorCode::IllegalClient)) => {
                log::info!("node {}: the master wants it mounted anew", self.config.name);
                self.forget_mount();
                self.mount()
            }
            Err(error) => {
                // The next beat is to find a fresh connection.
                self.rpc.disconnect();
                Err(error.into())
            }
        }
    }

    /// Exports fresh memory under a higher incarnation, and mounts it. What was exported before is torn down first, so that
    /// nobody who still holds the old export can write to the new one.
    fn mount(&mut self) -> Result<(), ConnectError> {
        self.tear_down()?;
        self.rpc.ensure_connected()?;
        // Should a new master answer the mount, it will not have memory that was exported under the former one.
        let epoch = self.rpc.welcome().epoch;
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
        self.incarnation = wall.max(self.incarnation + 1);
        // `validate` has seen that it fits.
        let len = usize::try_from(self.config.capacity_bytes).unwrap_or(usize::MAX);
        let region = self.engine.alloc_shared_with(len, Access::all(), self.config.populate)?;
        let segment = MountSegment {
            node: self.node,
            incarnation: self.incarnation,
            name: &self.config.name,
            endpoint: self.engine.name(),
            base: region.addr(),
            len: self.config.capacity_bytes,
            export: Export { engine: self.engine.incarnation(), region: region.id().to_bits() },
            epoch,
            key: self.key,
            takeover: false,
        };
        *self.shared.region.lock().unwrap_or_else(PoisonError::into_inner) = Some(region);
        let answer = self.rpc.call::<Mount>(&segment, std::iter::empty());
        match answer.and_then(|(answer, _)| answer.mounted().map_err(RpcError::Refused)) {
            Ok(mounted) => {
                self.mounted = Some(mounted.segment);
                self.ttl = Duration::from_millis(mounted.node_ttl_ms.into());
                self.shared.segment.store(u64::from(mounted.segment) + 1, Ordering::Relaxed);
                self.shared.mounts.fetch_add(1, Ordering::Relaxed);
                self.shared.hears(self.ttl);
                log::info!("node {}: {} bytes mounted as segment {}", self.config.name, len, mounted.segment);
                Ok(())
            }
            Err(error) => {
                self.rpc.disconnect();
                Err(error.into())
            }
        }
    }

    fn wake_worker(&self) {
        let region = self.shared.region.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let (Some(segment), Some(region)) = (self.mounted, region) {
            self.worker.wake(Mounted {
                node: self.node,
                key: self.key,
                incarnation: self.incarnation,
                segment,
                region,
            });
        }
    }

    fn forget_mount(&mut self) {
        self.mounted = None;
        self.shared.segment.store(0, Ordering::Relaxed);
    }

    /// Ends the export there is, if any.
    fn tear_down(&mut self) -> Result<(), RegisterError> {
        let mut region = self.shared.region.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(old) = region.as_ref() {
            self.engine.unregister(old.id())?;
            *region = None;
        }
        Ok(())
    }

    fn unmount(&mut self) {
        if let Some(segment) = self.mounted {
            let unmount = UnmountSegment { node: self.node, incarnation: self.incarnation, segment, key: self.key };
            if let Err(error) = self.rpc.call::<Unmount>(&unmount, std::iter::empty()) {
                log::debug!("node {}: {error}", self.config.name);
            }
            self.forget_mount();
        }
        if let Err(error) = self.tear_down() {
            log::debug!("node {}: {error}", self.config.name);
        }
    }
}
