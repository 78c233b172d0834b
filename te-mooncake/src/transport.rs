//! The rail: own transfers to Mooncake peers, as a [`Transport`].

use core::fmt;
use std::sync::Arc;

use te_core::{
    Access, Capabilities, Completion, Error, ErrorKind, EventSource, Features, Instant, MemSpan, Memory,
    MemoryKinds, RegionId, RemoteRegionId, Slice, Token, Transport,
};
use te_fabric::Region;
use te_host::fork::Mark;

use crate::config::Config;
use crate::error::StartError;
use crate::export::EXPORT_BYTES_MAX;
use crate::initiator::{Initiator, InitiatorStats, Lookup};
use crate::sys;

/// The name of the rail.
pub const RAIL: &str = "mooncake";

/// One-sided reads and writes of the memory of Mooncake peers, over their data ports. The [crate]'s
/// documentation says what the protocol cannot do.
///
/// It has no thread of its own but one that fetches descriptors again, and makes progress in
/// [`poll`](Transport::poll) alone. It exports nothing: peers reach what
/// [`Service::export`](crate::Service::export) lets them reach.
pub struct MooncakeTransport {
    initiator: Initiator,
    mark: Mark,
}

impl MooncakeTransport {
    /// A rail without peers. `lookup`, normally a [`Client`](crate::Client), fetches the descriptor of a peer
    /// again when the peer refuses a range or cannot be reached; without it, such slices fail at once.
    ///
    /// # Errors
    /// `Config`, `Setting`; `System`.
    pub fn new(config: &Config, lookup: Option<Arc<dyn Lookup>>) -> Result<Self, StartError> {
        config.validate()?;
        let initiator = Initiator::new(config, lookup).map_err(StartError::System)?;
        Ok(Self { initiator, mark: Mark::new() })
    }

    /// Counters since the transport was opened.
    #[must_use]
    pub const fn stats(&self) -> InitiatorStats {
        self.initiator.stats()
    }

    /// Data connections that are open or being opened.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.initiator.connections()
    }

    fn here(&self) -> Result<(), Error> {
        if self.mark.is_forked() { Err(ErrorKind::Forked.into()) } else { Ok(()) }
    }
}

impl fmt::Debug for MooncakeTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MooncakeTransport")
            .field("connections", &self.connections())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl Memory for MooncakeTransport {
    #[allow(
        unsafe_code,
        reason = "the one place where a caller's promise about local memory enters the crate"
    )]
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error> {
        self.here()?;
        span.require(MemoryKinds::HOST)?;
        if span.is_empty() || span.as_ptr().is_null() || access.is_empty() {
            return Err(ErrorKind::InvalidArgument.into());
        }
        // SAFETY: the caller keeps `span` mapped and unborrowed until `deregister` returns `Ok`, which it
        // does only when no operation holds the memory or a part of it.
        let memory = unsafe { sys::Memory::new(span) };
        let region = Region::new(id, span.len() as u64, span.location(), access, 0, memory);
        self.initiator.regions.insert(id.index, region)
    }

    fn deregister(&mut self, id: RegionId) -> Result<(), Error> {
        if self.initiator.regions.find(id)?.pins > 0 {
            return Err(ErrorKind::Busy.into());
        }
        self.initiator.regions.remove(id.index).map(|_| ()).ok_or_else(|| ErrorKind::NotFound.into())
    }

    /// Always `Unsupported`: registering memory, or exporting it to native peers, exports nothing to Mooncake
    /// peers.
    fn export(&self, id: RegionId, _: &mut [u8]) -> Result<usize, Error> {
        self.initiator.regions.find(id)?;
        Err(ErrorKind::Unsupported.into())
    }

    fn attach(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), Error> {
        self.here()?;
        self.initiator.attach(id, blob)
    }

    fn detach(&mut self, id: RemoteRegionId) -> Result<(), Error> {
        self.here()?;
        self.initiator.detach(id)
    }
}

impl Transport for MooncakeTransport {
    fn name(&self) -> &'static str {
        RAIL
    }

    fn capabilities(&self) -> Capabilities {
        let Config { slice_bytes_max, slice_bytes_preferred, inflight_max, .. } = *self.initiator.config();
        Capabilities::new(Features::READ | Features::WRITE | Features::CALLER_DRIVEN)
            .with_slice_bytes(slice_bytes_preferred.min(slice_bytes_max), slice_bytes_max)
            .with_inflight_max(inflight_max)
            .with_export_bytes_max(EXPORT_BYTES_MAX as u32)
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        self.here()?;
        self.initiator.submit(batch)
    }

    fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize {
        if self.mark.is_forked() {
            return 0;
        }
        self.initiator.poll(now, out)
    }

    fn poll_at(&self) -> Option<Instant> {
        self.initiator.poll_at()
    }

    fn event_source(&self) -> Option<EventSource> {
        Some(EventSource(self.initiator.raw_fd()))
    }

    fn activity(&self) -> u64 {
        self.initiator.stats().bytes
    }

    fn cancel(&mut self, token: Token) -> Result<(), Error> {
        self.here()?;
        self.initiator.cancel(token)
    }

    /// Succeeds while no WRITE to the peer has ended with bytes that may still land, and fails with
    /// `Unsupported` from then on, for as long as the peer lives: the protocol has no fence.
    fn fence(&mut self, token: Token, remote: RemoteRegionId) -> Result<(), Error> {
        self.here()?;
        self.initiator.fence(token, remote)
    }
}

/// A caller may move the transport to another thread.
const fn is_send<T: Send>() {}
const _: () = is_send::<MooncakeTransport>();
