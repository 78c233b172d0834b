//! The disks of a node: they are opened and mounted, their objects are announced, and they do what the master
//! orders.
//!
//! ```text
//!   keeper ── mounted, or not ──▶ ┌─────────────────────┐ ── MountDisks, AdoptObjects, DiskReady ──▶ master
//!                                 │ thread of the disks │ ── FetchDiskOrders ──────────────────────▶
//!   disk's thread ── events ────▶ │                     │ ── EndDiskOrders, ReclaimExtents ────────▶
//!                 ◀── requests ── └─────────────────────┘
//!        ▲
//!        └── StageSource ── StageServer ◀── readers
//! ```
//!
//! The thread has its own connection to the master. It never waits for a disk, and neither heartbeats nor
//! copies wait for it. When the node's memory is mounted anew, the disks are opened anew, too, so that they
//! announce all of their objects again.

mod disk;
mod gone;
mod lend;
mod packs;
mod source;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use store_core::ErrorCode;
use store_core::message::{Export, Staging};
use te_core::Access;
use te_engine::{Populate, TransferEngine};

use super::tasks::Mounted;
use crate::config::{NodeConfig, NodeDiskConfig};
use crate::disk::DiskStats;
use crate::error::{ConnectError, RpcError};
use crate::rpc::{RpcConnection, Standing};
use crate::stage::StageServer;
use disk::NodeDisk;
use packs::Orphans;
use source::Sources;

/// How often the master is asked for orders when there were none the last time.
const IDLE: Duration = Duration::from_millis(50);
/// The same while orders are carried out.
const BUSY: Duration = Duration::from_millis(5);
/// Time between two tries to reach the master, or to mount.
const RETRY: Duration = Duration::from_millis(500);
/// Shortest time between two log lines about a failure that persists.
const LOG_PAUSE: Duration = Duration::from_secs(10);

/// What a disk of a node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskKind {
    /// A file or block device, which its node alone reads.
    Local,
    /// A directory of packs, which everybody who mounts it reads.
    Shared,
}

impl DiskKind {
    /// As it is called in metrics and lists.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Local => "disk",
            Self::Shared => "shared",
        }
    }
}

/// A disk of a node and what is known of it, for metrics.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DiskReport {
    /// Where it is.
    pub path: PathBuf,
    /// What it is.
    pub kind: DiskKind,
    /// It belonged to a node that is gone: it is read, and nothing is written to it.
    pub adopted: bool,
    /// Files in a directory of packs that are none.
    pub refused: u64,
    /// Whether the master knows it, and all objects on it are known.
    pub ready: bool,
    /// Its counters.
    pub stats: DiskStats,
}

/// What the disks' thread shares with the node.
#[derive(Default)]
pub(super) struct Reports {
    disks: Mutex<Vec<DiskReport>>,
}

/// Handle of the thread.
pub(super) struct Disks {
    mounted: Option<Sender<Option<Mounted>>>,
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    server: Arc<StageServer>,
    reports: Arc<Reports>,
}

impl Disks {
    /// Opens the disks, allocates the staging memory and starts the stage service and the thread. `None`: the
    /// node has no disks.
    ///
    /// # Errors
    /// A disk cannot be opened, or the service cannot be started.
    pub(super) fn start(
        config: &NodeConfig,
        engine: &TransferEngine,
        standing: Standing,
    ) -> Result<Option<Self>, ConnectError> {
        if config.disks.0.is_empty() && config.shared.0.is_empty() {
            return Ok(None);
        }
        let mut disks = Vec::new();
        let mut making = Vec::new();
        for each in &config.shared.0 {
            if packs::is_bucket(&each.path) {
                // Memory does not wait for a store.
                making.push(Making::new(each.clone(), Vec::new()));
            } else {
                disks.push(NodeDisk::shared(each, &config.shared_cluster, &config.name, &[])?);
            }
        }
        for each in &config.disks.0 {
            let export = config.disk_exports.0.iter().find(|export| export.path == each.path);
            disks.push(NodeDisk::new(each, export)?);
        }
        let len = usize::try_from(config.stage.memory_bytes).unwrap_or(usize::MAX);
        let staging = engine.alloc_shared_with(len, Access::REMOTE_READ, Populate::OnFirstUse)?;
        let sources = Arc::new(Sources::new(staging.clone()));
        let (host, listen) = stage_host(engine.name());
        let mut stage = config.stage.clone();
        if stage.listen.ip() == IpAddr::V4(Ipv4Addr::LOCALHOST) && stage.listen.port() == 0 {
            stage.listen = listen;
        }
        let source = Arc::clone(&sources);
        let server = StageServer::start(stage, staging.clone(), config.identity.cluster_secret(), source)
            .map_err(ConnectError::Stage)?;
        let server = Arc::new(server);
        let address = format!("{host}:{}", server.addr().port());
        let reports = Arc::new(Reports::default());
        let (mounted, woken) = channel();
        let stopping = Arc::new(AtomicBool::new(false));
        let run = Run {
            place: Place {
                name: config.name.clone(),
                endpoint: engine.name().to_owned(),
                stage: address,
                staging: Staging {
                    base: staging.addr(),
                    len: staging.len() as u64,
                    location: staging.span().location().into(),
                    export: Export { engine: engine.incarnation(), region: staging.id().to_bits() },
                },
                sources,
                write_bytes_per_s_max: config.disk_write_bytes_per_s_max,
            },
            orphans: Orphans::new(&config.shared.0, &config.shared_cluster, config.shared_adopt_ms),
            config: config.clone(),
            standing,
            disks,
            making,
            rpc: None,
            mounted: None,
            woken,
            stopping: Arc::clone(&stopping),
            reports: Arc::clone(&reports),
            logged: None,
            retry_at: Instant::now(),
        };
        let thread = thread::Builder::new()
            .name("snowskin-node-disks".into())
            .spawn(move || run.run())
            .map_err(ConnectError::System)?;
        Ok(Some(Self { mounted: Some(mounted), stopping, thread: Some(thread), server, reports }))
    }

    /// The node's memory was mounted, or is not mounted any more.
    pub(super) fn mounted(&self, mounted: Option<Mounted>) {
        if let Some(sender) = &self.mounted {
            // The thread has ended only when the node ends.
            let _ = sender.send(mounted);
        }
    }

    pub(super) fn reports(&self) -> (Arc<Reports>, Arc<StageServer>) {
        (Arc::clone(&self.reports), Arc::clone(&self.server))
    }

    /// Closes the disks in order and ends the thread.
    pub(super) fn stop(&mut self) {
        self.stopping.store(true, Ordering::Relaxed);
        drop(self.mounted.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Disks {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Reports {
    pub(super) fn disks(&self) -> Vec<DiskReport> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Where the node's disks are read.
struct Place {
    name: String,
    endpoint: String,
    /// The address of the stage service.
    stage: String,
    staging: Staging,
    sources: Arc<Sources>,
    /// Most bytes that are written to a disk per second; 0: no limit.
    write_bytes_per_s_max: u64,
}

/// The node's own directory in a bucket, until it is open.
struct Making {
    config: NodeDiskConfig,
    /// Directories that the master has given to others.
    except: Vec<PathBuf>,
    thread: Option<JoinHandle<Result<NodeDisk, ConnectError>>>,
    not_before: Instant,
}

impl Making {
    fn new(config: NodeDiskConfig, except: Vec<PathBuf>) -> Self {
        Self { config, except, thread: None, not_before: Instant::now() }
    }
}

/// State of the thread.
struct Run {
    place: Place,
    config: NodeConfig,
    standing: Standing,
    disks: Vec<NodeDisk>,
    making: Vec<Making>,
    orphans: Orphans,
    rpc: Option<RpcConnection>,
    mounted: Option<Mounted>,
    woken: Receiver<Option<Mounted>>,
    stopping: Arc<AtomicBool>,
    reports: Arc<Reports>,
    logged: Option<Instant>,
    retry_at: Instant,
}

impl Run {
    fn run(mut self) {
        loop {
            match self.woken.try_recv() {
                Ok(mounted) => self.remounted(mounted),
                Err(TryRecvError::Disconnected) => break,
                Err(TryRecvError::Empty) => {}
            }
            if self.stopping.load(Ordering::Relaxed) {
                break;
            }
            let pause = match self.turn() {
                Ok(pause) => pause,
                Err(error) => {
                    self.failed(&error);
                    RETRY
                }
            };
            self.report();
            // The descriptors tell of events; a new mount is noticed at the next turn.
            let fds: Vec<_> = self.disks.iter().filter_map(NodeDisk::fd).collect();
            te_host::park(fds, Some(pause.min(IDLE)));
        }
        self.disks.iter_mut().for_each(|disk| disk.close(&self.place));
        self.report();
    }

    /// The disks have to be opened and mounted anew.
    fn remounted(&mut self, mounted: Option<Mounted>) {
        self.mounted = mounted;
        self.disks.iter_mut().for_each(|disk| disk.forget_mount(&self.place));
        self.retry_at = Instant::now();
    }

    /// Handles what has happened and asks for orders. Returns when to do so again.
    fn turn(&mut self) -> Result<Duration, DisksError> {
        for disk in &mut self.disks {
            disk.handle_events(&self.place);
        }
        self.make();
        let Some(mounted) = self.mounted.clone() else { return Ok(IDLE) };
        if Instant::now() < self.retry_at {
            return Ok(IDLE);
        }
        let rpc = match &mut self.rpc {
            Some(rpc) => rpc,
            None => self.rpc.insert(super::connect(&self.config, &self.standing)?),
        };
        if rpc.ensure_connected()? {
            self.disks.iter().for_each(NodeDisk::repeat_reclaims);
        }
        let found = self.orphans.look(&self.disks);
        self.disks.extend(found);
        let mut pause = IDLE;
        let mut lost = None;
        for (index, disk) in self.disks.iter_mut().enumerate() {
            match disk.work(rpc, &mounted, &self.place) {
                Ok(busy) => pause = if busy { pause.min(BUSY) } else { pause },
                Err(error) if disk.is_lost(&error) => {
                    // The master alone decides whether the node of a directory is gone.
                    let expected = disk.adopted && error.is_taken();
                    let level = if expected { log::Level::Debug } else { log::Level::Warn };
                    log::log!(level, "node {}: {}: {error}", self.place.name, disk.path().display());
                    lost = Some((index, error.is_taken()));
                }
                Err(error) => return Err(error),
            }
        }
        lost.into_iter().for_each(|(index, taken)| self.let_go(index, taken));
        Ok(pause)
    }

    /// Opens or makes the node's directories in buckets, until the stores allow it.
    fn make(&mut self) {
        for mut making in std::mem::take(&mut self.making) {
            match packs::ended(&mut making.thread) {
                Some(Ok(disk)) => {
                    self.disks.push(disk);
                    continue;
                }
                Some(Err(error)) => {
                    log::error!("node {}: no directory of packs: {error}", self.place.name);
                    making.not_before = Instant::now() + LOG_PAUSE;
                }
                None if making.thread.is_none() && making.not_before <= Instant::now() => {
                    let (config, except) = (making.config.clone(), making.except.clone());
                    let (cluster, name) = (self.config.shared_cluster.clone(), self.config.name.clone());
                    making.thread =
                        packs::in_background(move || NodeDisk::shared(&config, &cluster, &name, &except));
                    making.not_before = Instant::now() + RETRY;
                }
                None => {}
            }
            self.making.push(making);
        }
    }

    /// A directory of packs belongs to another node, or cannot be used. The node makes another one of its own
    /// if it was that.
    fn let_go(&mut self, index: usize, taken: bool) {
        let mut disk = self.disks.remove(index);
        if !disk.adopted {
            self.retry_at = Instant::now() + RETRY;
        }
        disk.close(&self.place);
        self.orphans.refused(disk.path().to_owned(), taken);
        let config = self.config.shared.0.iter().find(|config| disk.path().starts_with(&config.path));
        if let Some(config) = config.filter(|_| !disk.adopted) {
            if packs::is_bucket(disk.path()) {
                self.making.push(Making::new(config.clone(), vec![disk.path().to_owned()]));
                return;
            }
            match NodeDisk::shared(config, &self.config.shared_cluster, &self.config.name, &[]) {
                Ok(disk) => self.disks.push(disk),
                Err(error) => log::error!("node {}: no directory of packs: {error}", self.place.name),
            }
        }
    }

    fn failed(&mut self, error: &DisksError) {
        self.retry_at = Instant::now() + RETRY;
        if let DisksError::Rpc(RpcError::Refused(
            ErrorCode::SegmentNotFound | ErrorCode::ClientNotFound | ErrorCode::IllegalClient,
        )) = error
        {
            // The master does not know the node, or the disk, any more: all of it is mounted again when the
            // node's memory is.
            self.disks.iter_mut().for_each(|disk| disk.forget_mount(&self.place));
        } else if let Some(rpc) = &mut self.rpc {
            rpc.disconnect();
        }
        if self.logged.is_none_or(|logged| logged.elapsed() >= LOG_PAUSE) {
            self.logged = Some(Instant::now());
            log::warn!("node {}: the disks are not in contact with the master: {error}", self.place.name);
        }
    }

    fn report(&self) {
        let reports = self.disks.iter().filter_map(NodeDisk::report).collect();
        *self.reports.disks.lock().unwrap_or_else(PoisonError::into_inner) = reports;
    }
}

/// Why a turn failed.
#[derive(Debug)]
enum DisksError {
    Rpc(RpcError),
    Disk(crate::disk::DiskError),
}

impl DisksError {
    /// The master says that another node has the disk.
    const fn is_taken(&self) -> bool {
        matches!(self, Self::Rpc(RpcError::Refused(ErrorCode::SegmentAlreadyExists)))
    }
}

impl From<RpcError> for DisksError {
    fn from(error: RpcError) -> Self {
        Self::Rpc(error)
    }
}

impl From<crate::disk::DiskError> for DisksError {
    fn from(error: crate::disk::DiskError) -> Self {
        Self::Disk(error)
    }
}

impl std::fmt::Display for DisksError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Rpc(error) => error.fmt(f),
            Self::Disk(error) => error.fmt(f),
        }
    }
}

/// The host that the engine is reached at, and where the stage service listens so that it is reached there,
/// too.
fn stage_host(endpoint: &str) -> (&str, SocketAddr) {
    let host = endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host);
    let plain = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let any = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    (host, SocketAddr::new(plain.parse().unwrap_or(any), 0))
}
