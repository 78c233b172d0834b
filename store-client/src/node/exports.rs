//! The memory of a node, and its export: one at a time.
//!
//! A node that is mounted anew revokes its export and exports the same memory again, under another id and
//! other keys. A holder of the former export cannot touch the memory any more. Nothing is allocated, and idle
//! clients that still map the memory cost nothing. The contents of the memory stay.
//!
//! A client that stopped in the middle of a copy over shared memory looks like one that continues in a
//! moment. Memory that it may touch is put in *quarantine*: its pages are given back to the system, and other
//! memory is exported in its place. Extents of a CXL pool ([`super::extents`]) cannot be replaced by others:
//! the node waits until the client goes on, or its page of the pool is given to another process.

use store_core::NodeId;
use te_core::{Access, Location};
use te_engine::{Populate, RegisterError, SharedRegion, TransferEngine};

use super::extents::Extents;
use crate::config::NodeConfig;
use crate::error::ConnectError;
use crate::rpc::RpcConnection;

pub(super) struct Exports {
    engine: TransferEngine,
    name: String,
    len: usize,
    populate: bool,
    /// The memory, if it is in a CXL pool.
    extents: Option<Extents>,
    now: Option<SharedRegion>,
    /// Memory whose export was revoked and that no peer can touch.
    idle: Option<SharedRegion>,
}

impl Exports {
    pub(super) fn new(config: &NodeConfig, engine: TransferEngine, extents: Option<Extents>) -> Self {
        // `validate` has checked that the value fits.
        let len = usize::try_from(config.capacity_bytes).unwrap_or(usize::MAX);
        let (name, populate) = (config.name.clone(), config.populate);
        Self { engine, name, len, populate, extents, now: None, idle: None }
    }

    /// Ends the current export, if any: the memory cannot be reached through it any more.
    ///
    /// # Errors
    /// The fabrics refuse, or transfers of this process are under way. The caller tries again.
    pub(super) fn revoke(&mut self) -> Result<(), RegisterError> {
        let Some(region) = self.now.take() else { return Ok(()) };
        match self.engine.unregister(region.id()) {
            Ok(()) | Err(RegisterError::NotFound) => {
                // Extents are registered anew, in the epoch that they have then.
                self.idle = self.extents.is_none().then_some(region);
                Ok(())
            }
            // No request of this process: a peer may be in the middle of a copy.
            Err(RegisterError::Busy { requests: 0 }) if self.extents.is_none() => {
                log::warn!(
                    "node {}: a client that does not respond may be in the middle of a copy: the memory, {} bytes, is put in \
 quarantine, and other memory is exported in its place",
                    self.name,
                    self.len
                );
                match self.engine.quarantine_shared(region.clone()) {
                    Ok(()) => Ok(()),
                    Err(error) => {
                        self.now = Some(region);
                        Err(error)
                    }
                }
            }
            Err(error) => {
                self.now = Some(region);
                Err(error)
            }
        }
    }

    /// Takes possession of the extents, if the memory is in a CXL pool, after [`revoke`](Self::revoke).
    ///
    /// # Errors
    /// As [`Extents::take`].
    pub(super) fn claim(
        &mut self,
        rpc: &mut RpcConnection,
        node: NodeId,
        key: u64,
    ) -> Result<(), ConnectError> {
        self.extents.as_mut().map_or(Ok(()), |extents| extents.take(rpc, node, key))
    }

    /// Where the memory is, as the master lists it.
    pub(super) fn location(&self, region: &SharedRegion) -> Location {
        if self.extents.is_some() { Location::Pool } else { region.span().location() }
    }

    /// Checks that the memory is still this node's.
    ///
    /// # Errors
    /// As [`Extents::check`].
    pub(super) fn check(&self) -> Result<(), ConnectError> {
        self.extents.as_ref().map_or(Ok(()), Extents::check)
    }

    /// Gives the memory back for good, after [`revoke`](Self::revoke).
    pub(super) fn release(&mut self, rpc: &mut RpcConnection, node: NodeId, key: u64) {
        if let Some(extents) = &mut self.extents {
            extents.release(rpc, node, key);
        }
    }

    /// Exports the memory, after [`revoke`](Self::revoke).
    ///
    /// # Errors
    /// Memory cannot be allocated, or the fabrics refuse it.
    pub(super) fn export(&mut self) -> Result<SharedRegion, RegisterError> {
        let region = match &self.idle {
            None if let Some(extents) = &self.extents => extents.register(&self.engine)?,
            Some(idle) => self.engine.reregister(idle, Access::all())?,
            None => {
                let populate = if self.populate { Populate::Now } else { Populate::OnFirstUse };
                self.engine.alloc_shared_with(self.len, Access::all(), populate)?
            }
        };
        self.idle = None;
        self.now = Some(region.clone());
        Ok(region)
    }
}
