//! The thread that keeps a node in the store: it mounts the memory or storage and sends heartbeats.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use store_core::message::{
    Beat, Export, Heartbeat, Mount, MountResponse, MountSegment, NodeStatus, Unmount, UnmountSegment,
};
use store_core::{ErrorCode, Incarnation, NodeId, SegmentNo};
use te_engine::TransferEngine;

use super::Shared;
use super::disks::Disks;
use super::exports::{Exports, Origin};
use super::home::Home;
use super::tasks::{Mounted, Worker};
use crate::config::NodeConfig;
use crate::error::{ConnectError, RpcError};
use crate::rpc::RpcConnection;

/// Shortest time between two log lines about a failure that persists.
const LOG_PAUSE: Duration = Duration::from_secs(10);

/// State of the thread.
pub(super) struct Keeper {
    config: NodeConfig,
    engine: TransferEngine,
    exports: Exports,
    rpc: RpcConnection,
    node: NodeId,
    /// Random key with which the node proves its identity to the master.
    key: u64,
    incarnation: Incarnation,
    mounted: Option<SegmentNo>,
    ttl: Duration,
    shared: Arc<Shared>,
    worker: Worker,
    disks: Option<Disks>,
}

impl Keeper {
    pub(super) fn new(
        config: NodeConfig,
        engine: TransferEngine,
        rpc: RpcConnection,
        shared: Arc<Shared>,
        worker: Worker,
        disks: Option<Disks>,
        origin: Origin,
    ) -> Self {
        let ttl = Duration::from_millis(rpc.welcome().node_ttl_ms.into());
        let (node, key) = (NodeId::new(super::random(&engine)), super::random(&engine));
        let exports = Exports::new(&config, engine.clone(), origin);
        let (incarnation, mounted) = (Incarnation::default(), None);
        Self { config, engine, exports, rpc, node, key, incarnation, mounted, ttl, shared, worker, disks }
    }

    /// Runs until the node is stopped.
    pub(super) fn run(mut self, stopped: &Receiver<()>) {
        let mut logged: Option<Instant> = None;
        while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(self.pause()) {
            if let Err(error) = self.beat() {
                self.shared.failures.fetch_add(1, Ordering::Relaxed);
                // A node that is not mounted tries several times per second.
                if logged.is_none_or(|logged| logged.elapsed() >= LOG_PAUSE) {
                    logged = Some(Instant::now());
                    log::warn!("node {}: not in contact with the master: {error}", self.config.name);
                }
            } else {
                logged = None;
            }
        }
        self.end();
    }

    /// Gives everything back.
    pub(super) fn end(mut self) {
        self.worker.stop();
        if let Some(mut disks) = self.disks.take() {
            disks.stop();
        }
        self.unmount();
    }

    fn pause(&self) -> Duration {
        let third = self.ttl / 3;
        let wanted = match self.config.heartbeat_ms {
            0 => third,
            ms => Duration::from_millis(ms.into()).min(third),
        };
        // A node that is not mounted tries again soon.
        let wanted = if self.mounted.is_some() { wanted } else { wanted.min(Duration::from_millis(200)) };
        wanted.max(Duration::from_millis(1))
    }

    fn beat(&mut self) -> Result<(), ConnectError> {
        if self.mounted.is_none() {
            return self.mount();
        }
        if let Err(error) = self.exports.check() {
            log::error!(
                "node {}: its memory belongs to another process, and is taken out of service: {error}",
                self.config.name
            );
            self.say_unmounted();
            self.forget_mount();
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
                log::info!(
                    "node {}: the master does not know it any more: its memory is mounted anew",
                    self.config.name
                );
                self.forget_mount();
                self.mount()
            }
            // After any other error the export stays: the master may still know its objects.
            Err(error) => {
                // The next heartbeat uses a new connection.
                self.rpc.disconnect();
                Err(error.into())
            }
        }
    }

    /// Exports the memory anew, under a higher incarnation, and mounts it. The former export is revoked
    /// first, so that no holder of it can write to the new one.
    pub(super) fn mount(&mut self) -> Result<(), ConnectError> {
        self.exports.revoke()?;
        self.rpc.ensure_connected()?;
        // If another master answers the mount, it must not accept memory that was exported under the former
        // one.
        let lineage = self.rpc.welcome().lineage;
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
        if let Err(error) = self.exports.claim(&mut self.rpc, self.node, self.key) {
            if matches!(error, ConnectError::Rpc(_)) {
                self.rpc.disconnect();
            }
            return Err(error);
        }
        self.incarnation = Incarnation::new(wall.max(self.incarnation.get() + 1));
        let home = self.exports.export()?;
        *self.shared.home.lock().unwrap_or_else(PoisonError::into_inner) = Some(home.clone());
        let answer = match self.ask_mount(&home, lineage) {
            // The clock of this host, or of the former holder of the name, was wrong: the incarnation
            // continues from the master's.
            Ok(Asked::Stale { incarnation_min }) => {
                self.incarnation = incarnation_min;
                self.ask_mount(&home, lineage)
            }
            answer => answer,
        };
        match answer {
            Ok(Asked::Mounted(mounted)) => {
                self.mounted = Some(mounted.segment);
                self.ttl = Duration::from_millis(mounted.node_ttl_ms.into());
                self.shared.segment.store(u64::from(mounted.segment.get()) + 1, Ordering::Relaxed);
                self.shared.mounts.fetch_add(1, Ordering::Relaxed);
                self.shared.hears(self.ttl);
                let (name, segment) = (&self.config.name, mounted.segment);
                log::info!("node {name}: {} bytes mounted as segment {segment}", home.len());
                if let Some(disks) = &self.disks {
                    disks.mounted(self.as_mounted());
                }
                Ok(())
            }
            Ok(Asked::Held { endpoint, silent_ms }) => {
                Err(ConnectError::Held { name: self.config.name.clone(), endpoint, silent_ms })
            }
            // This happens twice in a row only when several nodes keep taking the name over.
            Ok(Asked::Stale { .. }) => Err(RpcError::Refused(ErrorCode::IllegalClient).into()),
            Err(error) => {
                self.rpc.disconnect();
                Err(error.into())
            }
        }
    }

    fn ask_mount(&mut self, home: &Home, lineage: u64) -> Result<Asked, RpcError> {
        let segment = MountSegment {
            node: self.node,
            incarnation: self.incarnation,
            name: &self.config.name,
            endpoint: self.engine.name(),
            base: home.addr(),
            len: home.len(),
            location: home.location(),
            export: Export { engine: self.engine.incarnation(), region: home.id().to_bits() },
            lineage,
            key: self.key,
            takeover: self.config.takeover,
        };
        let (answer, _) = self.rpc.call::<Mount>(&segment, std::iter::empty())?;
        Ok(match answer {
            MountResponse::Mounted(mounted) => Asked::Mounted(mounted),
            MountResponse::Stale { incarnation_min } => Asked::Stale { incarnation_min },
            MountResponse::Held { endpoint, silent_ms } => {
                Asked::Held { endpoint: endpoint.to_owned(), silent_ms }
            }
        })
    }

    fn wake_worker(&self) {
        if let Some(mounted) = self.as_mounted() {
            self.worker.wake(mounted);
        }
    }

    fn as_mounted(&self) -> Option<Mounted> {
        let home = self.shared.home.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        let (node, key, incarnation, segment) = (self.node, self.key, self.incarnation, self.mounted?);
        Some(Mounted { node, key, incarnation, segment, home })
    }

    fn forget_mount(&mut self) {
        self.mounted = None;
        if let Some(disks) = &self.disks {
            disks.mounted(None);
        }
        self.shared.segment.store(0, Ordering::Relaxed);
    }

    fn unmount(&mut self) {
        self.say_unmounted();
        self.forget_mount();
        match self.exports.revoke() {
            Ok(()) => self.exports.release(&mut self.rpc, self.node, self.key),
            Err(error) => log::warn!(
                "node {}: its memory is still in use by a peer, and is not given back; extents of a CXL pool then stay \
                 with it until a node of this host claims them: {error}",
                self.config.name
            ),
        }
    }

    /// Tells the master that the memory is not mounted any more.
    fn say_unmounted(&mut self) {
        let Some(segment) = self.mounted else { return };
        let Self { node, incarnation, key, .. } = *self;
        let unmount = UnmountSegment { node, incarnation, segment, key };
        if let Err(error) = self.rpc.call::<Unmount>(&unmount, std::iter::empty()) {
            log::debug!("node {}: {error}", self.config.name);
        }
    }
}

/// A [`MountResponse`] that owns its data.
enum Asked {
    Mounted(store_core::message::Mounted),
    Stale { incarnation_min: Incarnation },
    Held { endpoint: String, silent_ms: u64 },
}
