//! The transport: the place where the parts meet. What needs one part alone is in that part.

mod drive;

use core::fmt;
use core::net::SocketAddr;
use std::io;

use te_core::{
    Access, Capabilities, Completion, Error, ErrorKind, EventSource, ExpelMode, Features, Instant, MemSpan,
    Memory, MemoryKinds, RegionId, RemoteRegionId, Slice, Token, Transport,
};
use te_fabric::{LocalEnd, Timers};

use crate::config::{Config, SGES_MAX};
use crate::env::Env;
use crate::initiator::Initiator;
use crate::io::Io;
use crate::memory::{self, Dmabuf, LocalMemory};
use crate::open_error::OpenError;
use crate::peers::Peers;
use crate::stats::Stats;
use crate::sys::registration;
use crate::sys::verbs::{DeviceInfo, Gid, Verbs};
use crate::target::Target;
use crate::wire::{self, EXPORT_BYTES_MAX, EXPORT_FORMAT};

/// What one more cut is worth on this fabric, bytes.
const SLICE_BYTES_PREFERRED: u32 = 256 << 10;

/// Lends an initiator or a target what it works with.
macro_rules! lend {
    ($transport:ident) => {
        &mut Env {
            io: &mut $transport.io,
            memory: &mut $transport.memory,
            timers: &mut $transport.timers,
            config: &$transport.config,
        }
    };
}
use lend;

/// One-sided reads and writes over RDMA. See the [crate] for what it is and how it works.
pub struct RdmaTransport<V: Verbs> {
    /// As given, lowered to what the device can do.
    config: Config,
    /// What peers learn of us.
    end: LocalEnd,
    io: Io<V>,
    memory: LocalMemory,
    initiator: Initiator,
    target: Target,
    peers: Peers,
    timers: Timers,
}

impl<V: Verbs> RdmaTransport<V> {
    /// Goes by the port that `verbs` has opened, and listens as `config` says. Connects to no peer yet.
    ///
    /// May take as long as `proof_ms_max` for each GID that is tried.
    ///
    /// # Errors
    /// A setting out of its limits, an address that cannot be bound, a port that is down, no GID that works.
    pub fn new(verbs: V, config: Config) -> Result<Self, OpenError> {
        config.validate().map_err(OpenError::Config)?;
        let step = |what: &'static str| move |source: io::Error| OpenError::System { what, source };
        let config = fitted(config, verbs.info());
        let (io, address) = Io::open(verbs, &config)?;
        let end = LocalEnd::new(EXPORT_FORMAT, config.identity, address, config.advertise)
            .map_err(step("get random numbers"))?;
        Ok(Self {
            memory: LocalMemory::new(config.regions_max),
            initiator: Initiator::new(&config),
            target: Target::new(end.incarnation),
            peers: Peers::new(end.identity, &config),
            timers: Timers::new(),
            config,
            end,
            io,
        })
    }

    /// Where the control connections of peers are accepted.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.end.address
    }

    /// The random number of this transport's life: exports carry it.
    #[must_use]
    pub const fn incarnation(&self) -> u64 {
        self.end.incarnation
    }

    /// Who peers take it for: [`Config::identity`], or the random number in its place.
    #[must_use]
    pub const fn identity(&self) -> u64 {
        self.end.identity
    }

    /// The settings, lowered to what the device can do.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &DeviceInfo {
        self.io.info()
    }

    /// The GID that we go by.
    #[must_use]
    pub const fn gid(&self) -> Gid {
        self.io.port().gid
    }

    /// Whether the port carries traffic, as far as is known.
    #[must_use]
    pub const fn is_up(&self) -> bool {
        self.io.outage().is_none()
    }

    /// What it has done so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let mut stats = Stats { registered_bytes: self.memory.registered_bytes(), ..Stats::default() };
        self.io.count(&mut stats);
        self.initiator.count(&mut stats);
        self.target.count(&mut stats);
        self.peers.count(&mut stats);
        stats
    }

    /// Slices that were accepted and have not completed.
    #[must_use]
    pub fn slices_in_flight(&self) -> usize {
        self.initiator.in_flight()
    }

    /// The provider.
    #[cfg(any(test, feature = "testkit"))]
    #[must_use]
    pub const fn provider(&self) -> &V {
        self.io.verbs()
    }

    /// Closes every control connection, own and peers', with a reset, possibly in the middle of a frame, and
    /// with each the queue pairs that belong to it. Slices on them end as when a connection breaks; what is
    /// submitted later opens new ones.
    #[cfg(any(test, feature = "testkit"))]
    pub fn close_connections(&mut self) {
        self.reset_channels();
        self.target.reset_all(&mut self.io);
    }

    /// Registers memory of another device by its dma-buf: as [`Memory::register`] for `len` bytes from
    /// `offset` on of `fd`. `address` is what the first byte is called; what it is does not matter, as long
    /// as regions do not overlap.
    ///
    /// # Errors
    /// As [`Memory::register`]; `Unsupported` when the device cannot.
    pub fn register_dmabuf(&mut self, id: RegionId, dmabuf: Dmabuf, access: Access) -> Result<(), Error> {
        let chunking = memory::chunking(dmabuf.address, dmabuf.len, access, &self.config)?;
        let (what, mr_access) =
            ((id, chunking, access, dmabuf.location), memory::mr_access(access, &self.config));
        self.memory.register_dmabuf(self.io.verbs(), what, dmabuf, mr_access)
    }
}

impl<V: Verbs> fmt::Debug for RdmaTransport<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdmaTransport")
            .field("device", &self.io.info().name)
            .field("address", &self.end.address)
            .field("incarnation", &self.end.incarnation)
            .field("outage", &self.io.outage())
            .field("connections", &(self.peers.channels() + self.target.channels()))
            .field("queue_pairs", &self.io.links().len())
            .field("slices", &self.initiator.in_flight())
            .finish_non_exhaustive()
    }
}

impl<V: Verbs> Memory for RdmaTransport<V> {
    /// Refusals by the driver are returned as `System` with its `errno`: `ENOMEM` when the limit of locked
    /// memory is reached or the device has no room, `EAGAIN` when the driver is busy. They are not tried
    /// again here, because that would keep the caller waiting. A refused call changes nothing: the chunks
    /// that were registered are deregistered (one that the driver refuses to let go of is logged; no peer has
    /// its key), and the id stays free. So the caller may make the same call again at any time, as
    /// `te_core::MultiTransport::rejoin` does.
    #[allow(unsafe_code, reason = "the one place where a caller's promise about memory enters the crate")]
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error> {
        span.require(MemoryKinds::HOST)?;
        if span.is_empty() || span.as_ptr().is_null() {
            return Err(ErrorKind::InvalidArgument.into());
        }
        let config = &self.config;
        let chunking = memory::chunking(span.as_ptr() as u64, span.len() as u64, access, config)?;
        let (verbs, mr_access) = (self.io.verbs(), memory::mr_access(access, config));
        // SAFETY: the caller keeps `span` mapped and unborrowed until `deregister` returns `Ok`, which it
        // does only when the device has forgotten every chunk.
        let register = || unsafe { registration::register(verbs, span, mr_access, chunking, config) };
        self.memory.register(verbs, (id, chunking, access, span.location()), register)
    }

    fn deregister(&mut self, id: RegionId) -> Result<(), Error> {
        if self.memory.deregister(self.io.verbs(), id)? {
            self.target.withdraw(id, &self.io);
        }
        Ok(())
    }

    fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error> {
        self.end.export(id, self.memory.find(id)?, out)
    }

    fn attach(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), Error> {
        let export = wire::parse_export(blob).map_err(|_| Error::new(ErrorKind::InvalidArgument))?;
        self.initiator.vacant(id)?;
        let peer = self.peers.meet(&export)?;
        self.initiator.attach(id, peer, &export, &self.config)
    }

    fn detach(&mut self, id: RemoteRegionId) -> Result<(), Error> {
        let peer = self.initiator.detach(id)?;
        self.drop_idle_peer(peer);
        Ok(())
    }
}

impl<V: Verbs> Transport for RdmaTransport<V> {
    fn name(&self) -> &'static str {
        "rdma"
    }

    fn capabilities(&self) -> Capabilities {
        let Config { slice_bytes_max, inflight_max, .. } = self.config;
        Capabilities::new(Features::READ | Features::WRITE | Features::FENCE)
            .with_slice_bytes(SLICE_BYTES_PREFERRED.min(slice_bytes_max), slice_bytes_max)
            .with_inflight_max(inflight_max)
            .with_export_bytes_max(EXPORT_BYTES_MAX as u32)
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        self.initiator.submit(batch, lend!(self))
    }

    fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize {
        self.drive(now);
        self.initiator.fetch(out)
    }

    fn poll_at(&self) -> Option<Instant> {
        self.timers.next_poll(self.io.must_poll() || self.initiator.has_completions())
    }

    fn event_source(&self) -> Option<EventSource> {
        Some(EventSource(self.io.raw_fd()))
    }

    fn activity(&self) -> u64 {
        let frames = self.peers.frames() + self.target.frames();
        self.io.completions() + self.initiator.posted() + frames
    }

    fn cancel(&mut self, token: Token) -> Result<(), Error> {
        self.initiator.cancel(token, lend!(self))
    }

    fn fence(&mut self, token: Token, segment: RemoteRegionId) -> Result<(), Error> {
        self.initiator.fence(token, segment, &mut self.timers)
    }

    fn is_connected(&self, peer: u64) -> bool {
        peer != 0 && self.target.has_peer(peer)
    }

    fn expel(&mut self, peer: u64, mode: ExpelMode) -> Result<bool, Error> {
        self.target.expel(peer, mode, &mut self.io)
    }
}

impl<V: Verbs> Drop for RdmaTransport<V> {
    /// Ends all access, ours and peers', before the memory's owners go on; in a fork, nothing. Regions that
    /// were not deregistered are let go of as well; their memory was promised to stay until then.
    fn drop(&mut self) {
        if !self.io.is_ours() {
            // The device's file is the parent's as well, and so is everything made through it.
            return;
        }
        self.io.close();
        self.target.destroy_all(&mut self.io);
        self.memory.deregister_all(self.io.verbs());
    }
}

/// Settings that the device can keep.
fn fitted(mut config: Config, info: &DeviceInfo) -> Config {
    config.qp_depth = config.qp_depth.min(info.qp_depth_max).min(info.cq_depth).max(1);
    config.sges = config.sges.min(u8::try_from(info.sge_max).unwrap_or(SGES_MAX)).max(1);
    config.reads = config.reads.min(info.reads_max).max(1);
    config.message_bytes_max = config.message_bytes_max.min(info.message_bytes_max).max(1);
    let largest = 1_u64 << info.mr_bytes_max.max(1).ilog2();
    config.registration_chunk_bytes = config.registration_chunk_bytes.min(largest);
    config
}
