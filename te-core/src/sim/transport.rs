//! The transport of one node.
#![allow(unsafe_code, reason = "implements `register`, whose promise the caller makes")]

use super::blob::{BLOB_BYTES, Export};
use super::lock::Guard;
use super::world::{RemoteRegion, World};
use super::{NodeId, SimNet};
use crate::{
    Access, Capabilities, Completion, Error, ErrorKind, ExpelMode, Features, Instant, MemSpan, Memory,
    MemoryKinds, RegionId, RemoteRegionId, Slice, Token, Transport,
};

/// A node's transport, for one life of its process: after a kill or restart of the node it is dead, returns
/// `Rail` from every call and completes nothing.
#[derive(Debug)]
pub struct SimTransport {
    net: SimNet,
    node: NodeId,
    incarnation: u64,
}

impl SimTransport {
    pub(super) fn new(net: SimNet, node: NodeId, incarnation: u64) -> Self {
        Self { net, node, incarnation }
    }

    /// The node.
    #[must_use]
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// The incarnation of the node's process; never 0.
    #[must_use]
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// The identity by which its targets know it: its [incarnation](Self::incarnation), unless
    /// [`set_identity`](Self::set_identity) has set another.
    #[must_use]
    pub fn identity(&self) -> u64 {
        self.world().map_or(0, |world| world.nodes[self.node.0 as usize].identity)
    }

    /// Sets another identity, for several rails of one engine, which share one. For what is sent from now on.
    pub fn set_identity(&mut self, identity: u64) {
        if let Ok(mut world) = self.world() {
            world.nodes[self.node.0 as usize].identity = identity;
        }
    }

    /// The network that the node is part of.
    #[must_use]
    pub fn net(&self) -> &SimNet {
        &self.net
    }

    fn world(&self) -> Result<Guard<'_, World>, Error> {
        let world = self.net.world.lock();
        let me = &world.nodes[self.node.0 as usize];
        if !me.alive || me.incarnation != self.incarnation {
            return Err(ErrorKind::Rail.into());
        }
        Ok(world)
    }
}

impl Memory for SimTransport {
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error> {
        span.require(MemoryKinds::HOST)?;
        self.world()?.register(self.node, id, span, access)
    }

    fn deregister(&mut self, id: RegionId) -> Result<(), Error> {
        self.world()?.deregister(self.node, id)
    }

    fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error> {
        let world = self.world()?;
        let region = world.nodes[self.node.0 as usize].regions.get(&id.index).ok_or(ErrorKind::NotFound)?;
        if region.generation != id.generation {
            return Err(ErrorKind::Stale.into());
        }
        if !region.access.is_remote() {
            return Err(ErrorKind::AccessDenied.into());
        }
        let export = Export {
            node: self.node.0,
            region: id,
            access: region.access.intersection(Access::REMOTE_READ.union(Access::REMOTE_WRITE)),
            len: region.span.len() as u64,
            key: region.key,
            incarnation: self.incarnation,
        };
        out.get_mut(..BLOB_BYTES).ok_or(ErrorKind::OutOfRange)?.copy_from_slice(&export.encode());
        Ok(BLOB_BYTES)
    }

    fn attach(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), Error> {
        let export = Export::parse(blob)?;
        let mut world = self.world()?;
        if export.node as usize >= world.nodes.len() {
            return Err(ErrorKind::Unreachable.into());
        }
        let remote_regions = &mut world.nodes[self.node.0 as usize].remote_regions;
        if remote_regions.contains_key(&id.index) {
            return Err(ErrorKind::Busy.into());
        }
        remote_regions.insert(id.index, RemoteRegion { generation: id.generation, export, pins: 0 });
        Ok(())
    }

    fn detach(&mut self, id: RemoteRegionId) -> Result<(), Error> {
        let mut world = self.world()?;
        let remote_regions = &mut world.nodes[self.node.0 as usize].remote_regions;
        let remote_region = remote_regions.get(&id.index).ok_or(ErrorKind::NotFound)?;
        if remote_region.generation != id.generation {
            return Err(ErrorKind::Stale.into());
        }
        if remote_region.pins > 0 {
            return Err(ErrorKind::Busy.into());
        }
        remote_regions.remove(&id.index);
        Ok(())
    }
}

impl Transport for SimTransport {
    fn name(&self) -> &'static str {
        self.net.world.lock().config.name
    }

    fn capabilities(&self) -> Capabilities {
        let config = self.net.world.lock().config;
        Capabilities::new(config.features.union(Features::FENCE))
            .with_slice_bytes(config.slice_bytes_preferred, config.slice_bytes_max)
            .with_inflight_max(config.inflight_max)
            .with_export_bytes_max(BLOB_BYTES as u32)
            .with_granule_bytes(config.granule_bytes)
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        let mut world = self.world()?;
        let granule = u64::from(world.config.granule_bytes);
        for (accepted, slice) in batch.iter().enumerate() {
            let is_whole = slice.remote.offset % granule == 0 && u64::from(slice.len) % granule == 0;
            let submitted = match is_whole {
                true => world.submit(self.node, slice),
                false => Err(ErrorKind::InvalidArgument.into()),
            };
            match submitted {
                Ok(true) => {}
                Ok(false) => return Ok(accepted),
                Err(error) if accepted == 0 => return Err(error),
                Err(_) => return Ok(accepted),
            }
        }
        Ok(batch.len())
    }

    fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize {
        let Ok(mut world) = self.world() else { return 0 };
        world.advance_to(now.as_nanos());
        world.poll(self.node, out)
    }

    fn poll_at(&self) -> Option<Instant> {
        self.world().ok()?.poll_at(self.node)
    }

    fn cancel(&mut self, token: Token) -> Result<(), Error> {
        self.world()?.cancel(self.node, token)
    }

    fn fence(&mut self, token: Token, remote_region: RemoteRegionId) -> Result<(), Error> {
        self.world()?.fence(self.node, token, remote_region)
    }

    fn is_connected(&self, peer: u64) -> bool {
        self.world().is_ok_and(|world| world.is_connected(self.node, peer))
    }

    fn expel(&mut self, peer: u64, mode: ExpelMode) -> Result<bool, Error> {
        self.world()?.expel(self.node, peer, mode)
    }
}

impl Drop for SimTransport {
    fn drop(&mut self) {
        if let Ok(mut world) = self.world() {
            world.kill(self.node);
        }
    }
}
