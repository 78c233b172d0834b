//! The thread that keeps a node in the store: it mounts its memory, and says that it lives.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use store_core::message::{
    Beat, Export, Heartbeat, Mount, MountSegment, NodeStatus, Unmount, UnmountSegment,
};
use store_core::{ErrorCode, SegmentNo};
use te_engine::{Access, RegisterError, TransferEngine};

use super::Shared;
use super::tasks::{Mounted, Worker};
use crate::config::NodeConfig;
use crate::error::{ConnectError, RpcError};
use crate::rpc::RpcConnection;

/// What the thread owns.
pub(super) struct Keeper {
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

impl Keeper {
    pub(super) fn new(
        config: NodeConfig,
        engine: TransferEngine,
        rpc: RpcConnection,
        shared: Arc<Shared>,
        worker: Worker,
    ) -> Self {
        let ttl = Duration::from_millis(rpc.welcome().node_ttl_ms.into());
        let (node, key) = (super::random(), super::random());
        Self { config, engine, rpc, node, key, incarnation: 0, mounted: None, ttl, shared, worker }
    }

    /// Until the node is stopped.
    pub(super) fn run(mut self, stopped: &Receiver<()>) {
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
    pub(super) fn mount(&mut self) -> Result<(), ConnectError> {
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
            let (node, key, incarnation) = (self.node, self.key, self.incarnation);
            self.worker.wake(Mounted { node, key, incarnation, segment, region });
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
            let unmount =
                UnmountSegment { node: self.node, incarnation: self.incarnation, segment, key: self.key };
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
