//! The transport: it joins the parts. Code that needs one part alone is in that part.

mod drive;

use core::fmt;
use core::net::SocketAddr;
use std::io;
use std::sync::Arc;

use te_core::device::Devices;
use te_core::{
    Access, Capabilities, Completion, Error, ErrorKind, EventSource, ExpelMode, Features, Instant, MemSpan,
    Memory, MemoryKinds, RegionId, RemoteRegionId, Slice, Token, Transport,
};
use te_fabric::{LocalEnd, Timers};

use crate::config::{Config, SGES_MAX};
use crate::env::Env;
use crate::initiator::Initiator;
use crate::io::Io;
use crate::memory::{self, Backing, LocalMemory};
use crate::open_error::OpenError;
use crate::peers::Peers;
use crate::stats::Stats;
use crate::sys::registration;
use crate::sys::verbs::{DeviceInfo, Gid, Verbs};
use crate::target::Target;
use crate::wire::{self, EXPORT_BYTES_MAX, EXPORT_FORMAT};

/// The slice length from which cutting smaller gains nothing on this fabric, bytes.
const SLICE_BYTES_PREFERRED: u32 = 256 << 10;

/// Lends an initiator or a target the shared parts.
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
    /// As given, lowered to the limits of the NIC.
    config: Config,
    /// What our exports and handshakes carry.
    end: LocalEnd,
    io: Io<V>,
    memory: LocalMemory,
    initiator: Initiator,
    target: Target,
    peers: Peers,
    timers: Timers,
    /// What knows memory of GPUs.
    devices: Option<Arc<dyn Devices>>,
    /// The kinds of memory that can be registered.
    kinds: MemoryKinds,
}

impl<V: Verbs> RdmaTransport<V> {
    /// Uses the port that `verbs` has opened, and listens for control connections as `config` says. Connects
    /// to no peer yet.
    ///
    /// Takes up to [`Config::proof_ms_max`] for each GID that is tried.
    ///
    /// # Errors
    /// A setting out of its limits, an address that cannot be bound, a port that is down, no GID that works.
    pub fn new(verbs: V, config: Config) -> Result<Self, OpenError> {
        Self::open_on(verbs, config, None)
    }

    /// As [`new`](Self::new), and moves memory of `devices` as well, straight between the NIC and the GPU.
    ///
    /// A region there is registered by its dma-bufs ([`Devices::dmabufs`]) where the NIC takes dma-bufs
    /// ([`DeviceFeatures::DMABUF`](crate::verbs::DeviceFeatures::DMABUF)), else by its address where
    /// [`Devices::is_peer_direct`] allows it, else it is refused as `Unsupported`. No stager is made.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_devices(verbs: V, config: Config, devices: Arc<dyn Devices>) -> Result<Self, OpenError> {
        Self::open_on(verbs, config, Some(devices))
    }

    fn open_on(verbs: V, config: Config, devices: Option<Arc<dyn Devices>>) -> Result<Self, OpenError> {
        config.validate().map_err(OpenError::Config)?;
        let step = |what: &'static str| move |source: io::Error| OpenError::System { what, source };
        let config = fitted(config, verbs.info());
        let kinds = memory::kinds(devices.as_deref(), verbs.info());
        let (io, address) = Io::open(verbs, &config)?;
        let end = LocalEnd::new(EXPORT_FORMAT, config.identity, address, config.advertise)
            .map_err(step("get random numbers"))?;
        Ok(Self {
            memory: LocalMemory::new(config.regions_max),
            initiator: Initiator::new(&config),
            target: Target::new(end.incarnation),
            peers: Peers::new(end.identity, &config),
            timers: Timers::new(),
            devices,
            kinds,
            config,
            end,
            io,
        })
    }

    /// The address at which control connections of peers are accepted.
    #[must_use]
    pub const fn local_address(&self) -> SocketAddr {
        self.end.address
    }

    /// The random number of this transport, another one after each restart. Exports carry it.
    #[must_use]
    pub const fn incarnation(&self) -> u64 {
        self.end.incarnation
    }

    /// The identity by which peers know and expel it: [`Config::identity`], or a random number where that is
    /// 0.
    #[must_use]
    pub const fn identity(&self) -> u64 {
        self.end.identity
    }

    /// The settings, lowered to the limits of the NIC.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// The NIC and its limits.
    #[must_use]
    pub fn device(&self) -> &DeviceInfo {
        self.io.info()
    }

    /// The GID that our packets carry.
    #[must_use]
    pub const fn gid(&self) -> Gid {
        self.io.port().gid
    }

    /// Whether the port carries traffic, by the last event of the device.
    #[must_use]
    pub const fn is_up(&self) -> bool {
        self.io.outage().is_none()
    }

    /// Counters and gauges.
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

    /// The provider of verbs.
    #[cfg(any(test, feature = "testkit"))]
    #[must_use]
    pub const fn provider(&self) -> &V {
        self.io.verbs()
    }

    /// Resets every control connection, ours and peers', possibly in the middle of a frame, and destroys the
    /// queue pairs that belong to it. Slices on them end as when a connection breaks. Slices that are
    /// submitted later open new connections.
    #[cfg(any(test, feature = "testkit"))]
    pub fn close_connections(&mut self) {
        self.reset_connections();
        self.target.reset_all(&mut self.io);
    }
}

impl<V: Verbs> fmt::Debug for RdmaTransport<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdmaTransport")
            .field("device", &self.io.info().name)
            .field("address", &self.end.address)
            .field("incarnation", &self.end.incarnation)
            .field("outage", &self.io.outage())
            .field("connections", &(self.peers.connections() + self.target.connections()))
            .field("queue_pairs", &self.io.links().len())
            .field("slices", &self.initiator.in_flight())
            .finish_non_exhaustive()
    }
}

impl<V: Verbs> Memory for RdmaTransport<V> {
    /// Memory of a GPU is registered by its dma-bufs or its address, see
    /// [`with_devices`](RdmaTransport::with_devices). The file descriptors of dma-bufs stay open until the
    /// region is deregistered. Memory that was mapped piece by piece has a dma-buf per mapping; chunks then
    /// are short enough that each lies in one of them.
    ///
    /// Refusals by the driver are returned as `System` with its `errno`: `ENOMEM` when the limit of locked
    /// memory is reached or the NIC has no room, `EAGAIN` when the driver is busy. They are not tried again
    /// here, because that would block the caller. A refused call changes nothing: the chunks that were
    /// registered are deregistered (one that the driver does not release is logged; no peer has its key), and
    /// the id stays free. So the caller may make the same call again at any time, as
    /// `te_core::MultiTransport::rejoin` does.
    #[allow(unsafe_code, reason = "the one place where a caller's promise about memory enters the crate")]
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error> {
        span.require(self.kinds)?;
        if span.is_empty() || span.as_ptr().is_null() {
            return Err(ErrorKind::InvalidArgument.into());
        }
        let config = &self.config;
        let chunking = memory::chunking(span.as_ptr() as u64, span.len() as u64, access, config)?;
        let (verbs, mr_access) = (self.io.verbs(), memory::mr_access(access, config));
        let backing = Backing::of(span, self.devices.as_deref(), verbs.info().features)?;
        let chunking = backing.divided(chunking)?;
        let register = |backing: &Backing| match backing {
            Backing::Dmabufs(parts) => memory::register_dmabufs(verbs, parts, mr_access, chunking),
            // SAFETY: the caller keeps `span` mapped and unborrowed until `deregister` returns `Ok`, which it
            // does only when the NIC has released every chunk.
            Backing::Host | Backing::PeerDirect => unsafe {
                registration::register(verbs, span, mr_access, chunking, config)
            },
        };
        let what = (id, chunking, access, span.location());
        self.memory.register(verbs, what, backing, register)
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
            .with_memory(self.kinds)
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

    fn fence(&mut self, token: Token, remote: RemoteRegionId) -> Result<(), Error> {
        self.initiator.fence(token, remote, &mut self.timers)
    }

    fn is_connected(&self, peer: u64) -> bool {
        peer != 0 && self.target.has_peer(peer)
    }

    fn expel(&mut self, peer: u64, mode: ExpelMode) -> Result<bool, Error> {
        self.target.expel(peer, mode, &mut self.io)
    }
}

impl<V: Verbs> Drop for RdmaTransport<V> {
    /// Ends all access to registered memory, ours and peers'. Regions that are still registered are
    /// deregistered; their memory was promised to stay mapped until then. In a fork it does nothing.
    fn drop(&mut self) {
        if !self.io.is_ours() {
            // The child shares the device's file, and everything made through it, with its parent.
            return;
        }
        self.io.close();
        self.target.destroy_all(&mut self.io);
        self.memory.deregister_all(self.io.verbs());
    }
}

/// The settings, lowered to the limits of the NIC.
fn fitted(mut config: Config, info: &DeviceInfo) -> Config {
    config.qp_depth = config.qp_depth.min(info.qp_depth_max).min(info.cq_depth).max(1);
    config.sges = config.sges.min(u8::try_from(info.sge_max).unwrap_or(SGES_MAX)).max(1);
    config.reads = config.reads.min(info.reads_max).max(1);
    config.message_bytes_max = config.message_bytes_max.min(info.message_bytes_max).max(1);
    let largest = 1_u64 << info.mr_bytes_max.max(1).ilog2();
    config.registration_chunk_bytes = config.registration_chunk_bytes.min(largest);
    config
}
