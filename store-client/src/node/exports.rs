//! What a node has exported: memory or storage, one export at a time.
//!
//! A node that is mounted anew revokes its export and exports the same memory again, under another id and
//! other keys. A holder of the former export cannot touch the memory any more. Nothing is allocated, and idle
//! clients that still map the memory cost nothing. The contents of the memory stay.
//!
//! A client that stopped in the middle of a copy over shared memory looks like one that continues in a
//! moment. Memory that it may touch is put in *quarantine*: its pages are given back to the system, and other
//! memory is exported in its place. Extents of a CXL pool ([`super::extents`]) cannot be replaced by others:
//! the node waits until the client goes on, or its page of the pool is given to another process.
//!
//! [Storage](super::storage) is mounted anew in another epoch, and every client that was registered with the
//! namespace is fenced before: a write that it had sent before does not land any more. A target without
//! reservations offers no such proof, and there the node does not mount the range anew.

use store_core::{MemoryLocation, NodeId};
use te_core::{Access, Location};
use te_engine::{Populate, RegisterError, SharedRegion, TransferEngine};

use super::extents::Extents;
use super::home::Home;
use super::storage::Storage;
use crate::config::NodeConfig;
use crate::error::ConnectError;
use crate::rpc::RpcConnection;

/// Where a node has from what it contributes.
pub(super) enum Origin {
    /// It allocates memory.
    Memory {
        bytes: u64,
        populate: bool,
        /// Memory whose export was revoked and that no peer can touch.
        idle: Option<SharedRegion>,
    },
    /// Memory of a CXL pool.
    Extents(Extents),
    /// Storage of a target.
    Storage(Storage),
}

impl Origin {
    /// What the settings say.
    ///
    /// # Errors
    /// As [`Extents::of`] and [`Storage::of`].
    pub(super) fn of(config: &NodeConfig, engine: &TransferEngine) -> Result<Self, ConnectError> {
        if let Some(extents) = Extents::of(config, engine)? {
            return Ok(Self::Extents(extents));
        }
        Ok(match Storage::of(config, engine)? {
            Some(storage) => Self::Storage(storage),
            None => Self::Memory { bytes: config.capacity_bytes, populate: config.populate, idle: None },
        })
    }

    /// Bytes for objects.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Memory { bytes, .. } => *bytes,
            Self::Extents(extents) => extents.bytes(),
            Self::Storage(storage) => storage.bytes(),
        }
    }

    /// Exports it.
    ///
    /// # Errors
    /// Memory cannot be allocated, the fabrics refuse it, or the target of storage does.
    fn export(&mut self, engine: &TransferEngine) -> Result<Home, ConnectError> {
        let (region, location) = match self {
            Self::Storage(storage) => return storage.mount(engine),
            Self::Extents(extents) => (extents.register(engine)?, Location::Pool),
            Self::Memory { bytes, populate, idle } => {
                let region = if let Some(idle) = idle {
                    engine.reregister(idle, Access::all())?
                } else {
                    let populate = if *populate { Populate::Now } else { Populate::OnFirstUse };
                    // `validate` has checked that the value fits.
                    let len = usize::try_from(*bytes).unwrap_or(usize::MAX);
                    engine.alloc_shared_with(len, Access::all(), populate)?
                };
                *idle = None;
                let location = region.span().location();
                (region, location)
            }
        };
        Ok(Home::of_memory(region, MemoryLocation::from(location)))
    }
}

pub(super) struct Exports {
    engine: TransferEngine,
    name: String,
    origin: Origin,
    now: Option<Home>,
}

impl Exports {
    pub(super) fn new(config: &NodeConfig, engine: TransferEngine, origin: Origin) -> Self {
        Self { engine, name: config.name.clone(), origin, now: None }
    }

    /// Ends the current export, if any: it cannot be reached through it any more.
    ///
    /// # Errors
    /// The fabrics refuse, or transfers of this process are under way. The caller tries again.
    pub(super) fn revoke(&mut self) -> Result<(), RegisterError> {
        let Some(home) = self.now.take() else { return Ok(()) };
        let revoked = match home.close() {
            0 => self.engine.unregister(home.id()),
            requests => Err(RegisterError::Busy { requests }),
        };
        match (revoked, home.memory(), &mut self.origin) {
            // Extents are registered anew, in the epoch that they have then, and so is storage.
            (Ok(()) | Err(RegisterError::NotFound), memory, origin) => {
                if let Origin::Memory { idle, .. } = origin {
                    *idle = memory.cloned();
                }
                Ok(())
            }
            // No request of this process: a peer may be in the middle of a copy.
            (Err(RegisterError::Busy { requests: 0 }), Some(memory), Origin::Memory { bytes, .. }) => {
                log::warn!(
                    "node {}: a client that does not respond may be in the middle of a copy: the memory, {bytes} bytes, is \
                     put in quarantine, and other memory is exported in its place",
                    self.name
                );
                let quarantined = self.engine.quarantine_shared(memory.clone());
                if quarantined.is_err() {
                    self.now = Some(home);
                }
                quarantined
            }
            (Err(error), ..) => {
                self.now = Some(home);
                Err(error)
            }
        }
    }

    /// Before [`export`](Self::export), and after [`revoke`](Self::revoke): takes possession of the extents, if
    /// the memory is in a CXL pool, and asks whether another node may use the storage, if it is that.
    ///
    /// # Errors
    /// As [`Extents::take`] and [`Storage::ask`].
    pub(super) fn claim(
        &mut self,
        rpc: &mut RpcConnection,
        node: NodeId,
        key: u64,
    ) -> Result<(), ConnectError> {
        match &mut self.origin {
            Origin::Memory { .. } => Ok(()),
            Origin::Extents(extents) => extents.take(rpc, node, key),
            Origin::Storage(storage) => storage.ask(rpc, node),
        }
    }

    /// Checks that the memory is still this node's.
    ///
    /// # Errors
    /// As [`Extents::check`].
    pub(super) fn check(&self) -> Result<(), ConnectError> {
        match &self.origin {
            Origin::Extents(extents) => extents.check(),
            Origin::Memory { .. } | Origin::Storage(_) => Ok(()),
        }
    }

    /// Gives the memory back for good, after [`revoke`](Self::revoke).
    pub(super) fn release(&mut self, rpc: &mut RpcConnection, node: NodeId, key: u64) {
        if let Origin::Extents(extents) = &mut self.origin {
            extents.release(rpc, node, key);
        }
    }

    /// Exports what the node contributes, after [`revoke`](Self::revoke).
    ///
    /// # Errors
    /// Memory cannot be allocated, the fabrics refuse it, or the target of storage does.
    pub(super) fn export(&mut self) -> Result<Home, ConnectError> {
        let home = self.origin.export(&self.engine)?;
        self.now = Some(home.clone());
        Ok(home)
    }
}
