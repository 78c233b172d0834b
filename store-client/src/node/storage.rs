//! A range of a namespace of NVMe over TCP as what a node contributes, in place of memory.
//!
//! The node is the owner of the range: its mark is in the first granule, it tells clients where the range is,
//! and cuts writers off. The bytes pass it by: only replicas that it copies for the master are written by
//! itself.
//!
//! Before it touches the namespace, it asks the master whether another node has its name: a second process
//! with the same settings must not take the range from the first.

#[cfg(feature = "nvmeof")]
pub(super) use built::Storage;
#[cfg(not(feature = "nvmeof"))]
pub(super) use not_built::Storage;

#[cfg(feature = "nvmeof")]
mod built {
    use std::time::{Duration, SystemTime, UNIX_EPOCH};

    use store_core::message::Segments;
    use store_core::{MemoryLocation, NodeId};
    use te_core::{Access, ErrorKind};
    use te_engine::nvmeof::Namespace;
    use te_engine::{RegisterError, TransferEngine};

    use crate::config::{NamespacePlace, NodeConfig};
    use crate::error::ConnectError;
    use crate::node::home::Home;
    use crate::rpc::RpcConnection;

    /// How long a target may take to answer all that is asked at a mount.
    const MOUNT: Duration = Duration::from_secs(10);

    /// The storage of a node.
    pub(in crate::node) struct Storage {
        /// As the settings name it.
        place: NamespacePlace,
        storage: te_engine::Storage,
        location: MemoryLocation,
        /// The name of the node, and whether it takes that over.
        name: String,
        takeover: bool,
        /// How often the range was mounted.
        mounts: u64,
    }

    impl Storage {
        /// The storage that the settings name; `None` if they name none.
        ///
        /// # Errors
        /// `Config`.
        pub(in crate::node) fn of(
            config: &NodeConfig,
            engine: &TransferEngine,
        ) -> Result<Option<Self>, ConnectError> {
            let (Some(place), Some(nguid)) = (&config.storage.namespace, config.storage.nguid) else {
                return Ok(None);
            };
            let field = "storage.namespace";
            if engine.stats().rails.iter().all(|rail| rail.name != "nvmeof") {
                let need = "must be reached by the engine: name `nvmeof` in `engine.fabrics`";
                return Err(ConnectError::Config { field, need });
            }
            let location = MemoryLocation::storage(config.engine.nvmeof.granule_bytes);
            let need =
                "needs a granule that masters know: 512 to 65536 bytes (`engine.nvmeof.granule_bytes`)";
            let location = location.ok_or(ConnectError::Config { field, need })?;
            let namespace = Namespace {
                addresses: vec![place.address.ip()],
                port: place.address.port(),
                nqn: place.nqn.clone(),
                nsid: place.nsid,
                nguid: nguid.0,
            };
            let range = place.offset..place.offset + config.storage.bytes;
            let take_over = config.storage.take_over;
            Ok(Some(Self {
                place: place.clone(),
                storage: te_engine::Storage { namespace, range, epoch: 0, take_over },
                location,
                name: config.name.clone(),
                takeover: config.takeover,
                mounts: 0,
            }))
        }

        /// Bytes for objects.
        pub(in crate::node) fn bytes(&self) -> u64 {
            let range = &self.storage.range;
            range.end - range.start - u64::from(self.location.granule_bytes())
        }

        /// Asks the master whether another node has this node's name, and may use the range.
        ///
        /// # Errors
        /// `Storage`: one has. `Rpc`.
        pub(in crate::node) fn ask(&self, rpc: &mut RpcConnection, node: NodeId) -> Result<(), ConnectError> {
            if self.takeover {
                return Ok(());
            }
            rpc.ensure_connected()?;
            let (_, mut infos) = rpc.call::<Segments>(&(), std::iter::empty())?;
            let holds = |info: &store_core::message::SegmentInfo<'_>| {
                info.extent_bytes == 0 && info.name == self.name && info.node != node
            };
            match infos.find_map(|info| info.ok().filter(holds)) {
                None => Ok(()),
                Some(holder) => Err(ConnectError::Storage {
                    namespace: self.place.to_string(),
                    why: format!(
                        "the node at {} has the name `{}` and may use it: stop that node, or wait until the master has \
                         given it up",
                        holder.endpoint.escape_debug(),
                        self.name.escape_debug()
                    ),
                    busy: true,
                }),
            }
        }

        /// Mounts the range as a part of the engine's segment, in an epoch of its own.
        ///
        /// # Errors
        /// `Storage`, with what to do.
        pub(in crate::node) fn mount(&mut self, engine: &TransferEngine) -> Result<Home, ConnectError> {
            let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
            let storage = &mut self.storage;
            // Each mount has another epoch, also when the clock stands still or went back.
            storage.epoch = u32::try_from(wall).unwrap_or(u32::MAX).max(storage.epoch.saturating_add(1));
            let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
            match engine.mount_storage(storage, access, MOUNT) {
                Ok(mounted) => {
                    log::info!("node {}: {} is mounted in epoch {}", self.name, self.place, storage.epoch);
                    // Clients of this mount may have writes under way when the range is mounted anew, and
                    // nothing but their fence proves that these do not land in objects of then.
                    storage.take_over = true;
                    self.mounts += 1;
                    Ok(Home::of_storage(mounted, self.location))
                }
                Err(error) => Err(self.failed(&error)),
            }
        }

        fn failed(&self, error: &RegisterError) -> ConnectError {
            let kind = match error {
                RegisterError::Rails(error) => Some(error.kind),
                _ => None,
            };
            let bytes = self.storage.range.end - self.storage.range.start;
            let why = match kind {
                Some(ErrorKind::Stale) => format!(
                    "it is another namespace than `storage.nguid` says, or ends before the range of {bytes} bytes: check \
                     `storage.nguid`, the offset and `storage.bytes`"
                ),
                Some(ErrorKind::AccessDenied) => "another host has reserved it: stop its owner, or set \
                    `storage.take_over` if that has ended, such as this node before it was restarted"
                    .to_owned(),
                Some(ErrorKind::Unsupported) if self.mounts > 0 => "its target has no reservations, or cannot prove \
                    that writes of clients to the former mount have ended, so the node does not mount it anew: restart \
                    the node when the clients that used it have ended"
                    .to_owned(),
                Some(ErrorKind::Unsupported) => "its target has no reservations, or cannot prove that earlier writes \
                    have ended, so it cannot be taken over: unset `storage.take_over` if no other process uses it"
                    .to_owned(),
                Some(ErrorKind::TimedOut) => {
                    format!(
                        "its target has not agreed within {} s: check that it runs, and the address",
                        MOUNT.as_secs()
                    )
                }
                _ => error.to_string(),
            };
            ConnectError::Storage { namespace: self.place.to_string(), why, busy: false }
        }
    }
}

#[cfg(not(feature = "nvmeof"))]
mod not_built {
    use store_core::NodeId;
    use te_engine::TransferEngine;

    use crate::config::NodeConfig;
    use crate::error::ConnectError;
    use crate::node::home::Home;
    use crate::rpc::RpcConnection;

    /// No storage: this build has no NVMe over TCP. The settings are checked to name none.
    pub(in crate::node) enum Storage {}

    impl Storage {
        pub(in crate::node) const fn of(
            _: &NodeConfig,
            _: &TransferEngine,
        ) -> Result<Option<Self>, ConnectError> {
            Ok(None)
        }

        pub(in crate::node) const fn bytes(&self) -> u64 {
            match *self {}
        }

        pub(in crate::node) const fn ask(
            &self,
            _: &mut RpcConnection,
            _: NodeId,
        ) -> Result<(), ConnectError> {
            match *self {}
        }

        pub(in crate::node) const fn mount(&mut self, _: &TransferEngine) -> Result<Home, ConnectError> {
            match *self {}
        }
    }
}
