//! What is shared with peers, and the end of it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use te_core::grant::Offer;
use te_core::{Access, Error, MemSpan, RegionId};
use te_fabric::Region;
use te_gpu::NotShared;
use te_host::control::socket_name;
use te_host::{Protection, SharedMemory, keys};

use super::{Local, NvlinkTransport, Pinning};
use crate::channel::system;
use crate::export::Export;
use crate::memory::{Handles, Own, part};
use crate::not_exported::NotExported;
use crate::owner::Shared;
use crate::wire::{Means, Part};

/// How long a transport that is dropped waits for its peers.
const DROP_MAX: Duration = Duration::from_secs(1);

impl NvlinkTransport {
    /// The handles of a region, for its peers.
    fn parts(&self, span: MemSpan, access: Access, is_device: bool) -> Result<Handles, NotExported> {
        if !access.is_remote() {
            return Err(NotExported::Private);
        }
        if is_device {
            let parts = self.gpu.share(span).map_err(NotExported::Device)?;
            return Ok(parts.into_iter().map(part).collect());
        }
        let (memory, offset) = SharedMemory::find(span).ok_or(NotExported::NotSharedMemory)?;
        let writable = access.contains(Access::REMOTE_WRITE);
        if writable && !memory.peers_may_write() {
            return Err(NotExported::NotWritable);
        }
        let protection = if writable { Protection::ReadWrite } else { Protection::ReadOnly };
        let fd = memory.share(protection).map_err(|error| {
            NotExported::Device(NotShared::Refused { handle: "memory file", error: system(error) })
        })?;
        let (bytes, len) = (memory.span().len() as u64, span.len() as u64);
        Ok(vec![(Part { means: Means::File, bytes, offset, len }, Some(Arc::new(fd)))])
    }

    /// The handles of a region for peers of other hosts; none where it is shared with this host alone.
    fn parts_across_hosts(&self, local: &Local) -> Result<Handles, NotExported> {
        if !self.config.across_hosts || local.device.is_none() {
            return Ok(Handles::new());
        }
        let parts = self.gpu.share_across_hosts(local.span).map_err(NotExported::Device)?;
        Ok(parts.into_iter().map(part).collect())
    }

    /// Where peers of other hosts reach the owner of a region that they can map.
    pub(super) fn addresses_of(&self, region: &Region<Local>) -> Vec<SocketAddr> {
        match region.ext.device.is_some() && region.ext.across_hosts.is_ok() {
            true => self.addresses.clone(),
            false => Vec::new(),
        }
    }

    pub(super) const fn export_bytes_max(&self) -> u32 {
        (if self.config.across_hosts { Export::BYTES_MAX } else { Export::BYTES }) as u32
    }

    /// Why a region with remote rights is not exported, or to this host alone.
    pub(super) fn why_not_shared(&self, id: RegionId) -> Option<String> {
        match self.not_exported(id).ok()? {
            Some(NotExported::Private) => None,
            Some(why) => Some(why.to_string()),
            None => self.not_across_hosts(id).ok()?.map(|why| format!("other hosts cannot map it: {why}")),
        }
    }

    /// Lets peers map a region.
    pub(super) fn share(&mut self, id: RegionId, local: &mut Local, access: Access) -> Result<(), Error> {
        let parts = match self.parts(local.span, access, local.device.is_some()) {
            Ok(parts) => parts,
            Err(why) => {
                self.reasons.log(id, &why);
                local.exported = Err(why);
                return Ok(());
            }
        };
        let across_hosts = match self.parts_across_hosts(local) {
            Ok(parts) => parts,
            Err(why) => {
                self.reasons.log_across_hosts(id, &why);
                local.across_hosts = Err(why);
                Handles::new()
            }
        };
        local.key = keys::random()?;
        self.owner.listen(&self.epoll, &socket_name(&self.socket))?;
        let len = local.span.len() as u64;
        if let Some(device) = &local.device {
            let (location, kernel) = (device.block.location, device.block.is_own_context);
            let own = Own { driver: self.gpu.driver_id(), place: device.place, location, len, kernel };
            own.remember(self.socket, id);
        }
        let block = local.device.as_ref().map(|device| device.block);
        let shared = Shared { id, parts, across_hosts, block };
        self.owner.share(Offer { key: local.key, offset: 0, len, access }, shared);
        Ok(())
    }
}

impl Drop for NvlinkTransport {
    fn drop(&mut self) {
        if self.mark.is_forked() {
            return;
        }
        let begin = std::time::Instant::now();
        while self.running > 0 && begin.elapsed() < DROP_MAX {
            self.reap();
            std::thread::yield_now();
        }
        // What still runs uses pages that were locked for it. A queue waits once more, and does not say
        // whether that helped: the pages stay locked.
        self.queues.clear();
        if self.running > 0 || self.quarantined > 0 {
            let indices: Vec<u32> = self.regions.iter().map(|(index, _)| index).collect();
            for region in indices {
                let region = self.regions.get_mut(region);
                std::mem::forget(region.map(|region| std::mem::replace(&mut region.ext.pin, Pinning::Not)));
            }
        }
        if let Some(worker) = &mut self.worker {
            self.peers.close(&self.epoll, worker);
            // What an owner grants is in use there until it is told that it is not mapped here.
            while self.peers.waits() && begin.elapsed() < DROP_MAX {
                self.events();
                std::thread::yield_now();
            }
        }
        let ids: Vec<RegionId> =
            self.regions.iter().map(|(index, region)| RegionId::new(index, region.generation)).collect();
        for id in ids {
            Own::forget(self.socket, id);
            loop {
                self.events();
                if self.owner.unshare(&self.epoll, id) {
                    break;
                }
                if begin.elapsed() >= DROP_MAX {
                    log::error!(
                        "nvlink: a peer has region {id} still mapped after 1 s; its memory may change"
                    );
                    break;
                }
                std::thread::yield_now();
            }
        }
    }
}
