//! The transport: connects the parts, and is driven by `poll` alone.

use core::fmt;
use core::net::SocketAddr;

use te_core::{
    Access, Capabilities, Completion, Error, ErrorKind, EventSource, ExpelMode, Features, Instant, MemSpan,
    MemoryKinds, RegionId, RemoteRegionId, Slice, Token, Transport,
};
use te_fabric::net::{Listener, error_of, random_u64};
use te_fabric::operation::accept_prefix;
use te_fabric::timers::Earliest;
use te_fabric::{Epoll, Export, LocalEnd, OpenError, Timers};

use crate::config::Config;
use crate::context::{Context, Region, RegionExt, Regions, Watched};
use crate::export::{AdoptedExport, EXPORT_BYTES_MAX, EXPORT_FORMAT, Place, nguid, target_nqn};
use crate::initiator::Initiator;
use crate::namespace::Namespace;
use crate::stats::Stats;
use crate::sys::{Buffers, Pinned};
use crate::target::Target;

/// Twice the time between two polls from which on the target was away, ms.
const ABSENCE_MS: u32 = 200;
/// Events that one call of the poller reports.
const EVENTS_MAX: usize = 128;

/// One-sided reads and writes over NVMe/TCP. The [crate]'s documentation says how it works.
pub struct NvmeofTransport {
    epoll: Epoll,
    initiator: Initiator,
    target: Target,
    regions: Regions,
    timers: Timers,
    buffers: Buffers,
    stats: Stats,
    /// What exports say about this transport.
    end: LocalEnd,
    config: Config,
}

impl NvmeofTransport {
    /// Opens a transport that listens as `config` says. It does not connect to a target yet.
    ///
    /// # Errors
    /// A setting outside its range, or an address that is not available.
    pub fn new(config: Config) -> Result<Self, OpenError> {
        config.validate().map_err(OpenError::Config)?;
        let epoll = Epoll::new(EVENTS_MAX).map_err(OpenError::step("make an epoll instance"))?;
        let listener = Listener::bind(config.listen()).map_err(OpenError::step("listen"))?;
        let address = listener.local_address().map_err(OpenError::step("learn the port"))?;
        let end = LocalEnd::new(EXPORT_FORMAT, config.identity, address, config.advertise)
            .map_err(OpenError::step("get random numbers"))?;
        let target = Target::new(listener, target_nqn(end.incarnation), end.incarnation);
        target.watch_listener(&epoll).map_err(OpenError::step("watch the listener"))?;
        Ok(Self {
            epoll,
            initiator: Initiator::new(end.identity, &config),
            target,
            regions: Regions::new(config.regions_max),
            timers: Timers::new(),
            buffers: Buffers::new(),
            stats: Stats::default(),
            end,
            config,
        })
    }

    /// The address that its target listens on.
    #[must_use]
    pub const fn local_address(&self) -> SocketAddr {
        self.end.address
    }

    /// This transport's incarnation: random, another one after each restart.
    #[must_use]
    pub const fn incarnation(&self) -> u64 {
        self.end.incarnation
    }

    /// The NQN of its target.
    #[must_use]
    pub fn nqn(&self) -> String {
        target_nqn(self.end.incarnation)
    }

    /// How targets identify this process: [`Config::identity`], or the random number in its place.
    #[must_use]
    pub const fn identity(&self) -> u64 {
        self.end.identity
    }

    /// Counters since the transport was opened.
    #[must_use]
    pub const fn stats(&self) -> Stats {
        self.stats
    }

    /// The settings that it runs with.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// Hosts' connections that are open.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.target.connections()
    }

    /// Associations with subsystems that are up.
    #[must_use]
    pub fn associations(&self) -> usize {
        self.initiator.associations()
    }

    /// Slices that were accepted and have not completed.
    #[must_use]
    pub fn slices_in_flight(&self) -> usize {
        self.initiator.slices_in_flight()
    }

    /// Adopts a range of a namespace of another target as region `id`, which peers can then attach and reach
    /// without this process. `range` is in bytes, in multiples of [`Config::granule_bytes`]; its first
    /// granule is overwritten with a superblock, and the region is what follows. No two owners may adopt
    /// overlapping ranges. `epoch` tells the caller's uses of the range apart.
    ///
    /// Where the target has reservations, this node takes Exclusive Access – Registrants Only, and
    /// [`expel`](Transport::expel) fences a client by Preempt and Abort. The region can be exported once the
    /// adoption has ended, in later polls; until then exporting it is `Busy`, and when it failed, the error.
    ///
    /// # Errors
    /// `InvalidArgument` for a namespace or a range that cannot be, or without remote rights; `Busy` when the
    /// index is in use; `Full`.
    pub fn adopt(
        &mut self,
        id: RegionId,
        namespace: &Namespace,
        range: core::ops::Range<u64>,
        access: Access,
        epoch: u32,
    ) -> Result<(), Error> {
        self.adopt_as(id, namespace, range, (access, epoch), false)
    }

    /// As [`adopt`](Self::adopt), for a range whose owner is dead, or was this one in an earlier life: every
    /// other host that is registered with the namespace, former owner and clients, is fenced by Preempt and
    /// Abort before the region can be exported. Afterwards nothing lands that they have sent, and they reach
    /// the namespace no more: no other range of it may be in use.
    ///
    /// # Errors
    /// As [`adopt`](Self::adopt). Where the target has no reservations, the adoption ends with `Unsupported`:
    /// nothing there proves that the others are fenced.
    pub fn take_over(
        &mut self,
        id: RegionId,
        namespace: &Namespace,
        range: core::ops::Range<u64>,
        access: Access,
        epoch: u32,
    ) -> Result<(), Error> {
        self.adopt_as(id, namespace, range, (access, epoch), true)
    }

    fn adopt_as(
        &mut self,
        id: RegionId,
        namespace: &Namespace,
        range: core::ops::Range<u64>,
        (access, epoch): (Access, u32),
        alone: bool,
    ) -> Result<(), Error> {
        let remote = access.intersection(Access::REMOTE_READ | Access::REMOTE_WRITE);
        let export = AdoptedExport {
            incarnation: self.end.incarnation,
            epoch,
            granule: self.config.granule_bytes,
            ..AdoptedExport::unmarked(namespace, &range, remote)
        };
        if !export.is_valid() || remote.is_empty() {
            return Err(ErrorKind::InvalidArgument.into());
        }
        let bytes = export.bytes - u64::from(export.granule);
        let ext = RegionExt { memory: None, peers: 0, nsid: 0 };
        self.regions.vacant(id.index)?;
        let (initiator, _, mut cx) = self.split();
        initiator.adopt(id.index, export, alone, &mut cx)?;
        self.regions.insert(id.index, Region::new(id, bytes, te_core::Location::Host, remote, 0, ext))
    }

    /// The namespace as which a region of this transport is served, as other hosts see it: with
    /// [`Config::open_to_hosts`], any host can use it.
    ///
    /// # Errors
    /// `AccessDenied` for a region without remote rights; `NotFound`, `Stale`.
    pub fn namespace(&self, id: RegionId) -> Result<Namespace, Error> {
        let region = self.regions.find(id)?;
        match region.ext.nsid {
            0 => Err(ErrorKind::AccessDenied.into()),
            nsid => Ok(Namespace {
                addresses: te_fabric::net::advertised(self.config.advertise, self.end.address.ip()),
                port: self.end.address.port(),
                nqn: self.nqn(),
                nsid,
                nguid: nguid(self.end.incarnation, nsid, id.generation),
            }),
        }
    }

    /// Attaches a range of a namespace of another target for reading, without an owner that has adopted it:
    /// there are no superblock, no key and no reservation. `range` is in bytes, in multiples of
    /// [`Config::granule_bytes`]. Before the first read, and on each new association, the namespace's
    /// identity (any, where [`Namespace::nguid`] is zero) and its length are checked. What the bytes mean,
    /// and whether they are still those that are meant, is for the caller to verify.
    ///
    /// # Errors
    /// `InvalidArgument` for a namespace or a range that cannot be; `Busy` when the index is in use; `Full`.
    pub fn attach_namespace(
        &mut self,
        id: RemoteRegionId,
        namespace: &Namespace,
        range: core::ops::Range<u64>,
    ) -> Result<(), Error> {
        let export = AdoptedExport::unmarked(namespace, &range, Access::REMOTE_READ);
        if !export.is_range_of(self.config.granule_bytes) {
            return Err(ErrorKind::InvalidArgument.into());
        }
        self.initiator.attach(id, &export.contact(), export.place(), None)
    }

    fn attach_adopted(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), Error> {
        let export = AdoptedExport::parse(blob).ok_or(ErrorKind::InvalidArgument)?;
        if export.granule != self.config.granule_bytes {
            return Err(ErrorKind::Unreachable.into());
        }
        self.initiator.attach(id, &export.contact(), export.place(), Some(export.superblock()))
    }

    /// The parts, and the context that they borrow.
    fn split(&mut self) -> (&mut Initiator, &mut Target, Context<'_>) {
        let Self { epoll, initiator, target, regions, timers, buffers, stats, config, .. } = self;
        (initiator, target, Context { config, epoll, buffers, regions, timers, stats })
    }

    fn feed(&mut self) {
        if self.initiator.has_listed() {
            let (initiator, _, mut cx) = self.split();
            initiator.feed(&mut cx);
        }
    }

    /// Works on what is ready.
    fn drive_ready(&mut self) {
        let count = self.epoll.ready().unwrap_or(0);
        for at in 0..count {
            let event = self.epoll.event(at);
            let (initiator, target, mut cx) = self.split();
            match Watched::of(event.token) {
                Watched::Listener => target.accept_all(&mut cx),
                Watched::Host(name) => target.drive(name, event.readable, &mut cx),
                Watched::Queue(name) => initiator.drive(name, event.readable, event.writable, &mut cx),
            }
        }
        self.timers.wake_if(count >= self.epoll.events_max());
    }

    /// Looks at every deadline.
    fn run_timers(&mut self) {
        self.timers.looking();
        let mut next = Earliest::default();
        let (initiator, target, mut cx) = self.split();
        next.note(target.look(&mut cx));
        next.note(initiator.look(&mut cx));
        self.timers.looked(next.get());
    }
}

/// For tests of this crate and of crates that use it.
#[cfg(feature = "testkit")]
impl NvmeofTransport {
    /// Closes every connection, even in the middle of a PDU. Slices on them end as when a connection breaks;
    /// slices submitted later open new ones.
    pub fn close_connections(&mut self) {
        let (initiator, target, mut cx) = self.split();
        initiator.close_connections(&mut cx);
        target.close_connections(&mut cx);
    }

    /// How many slices of this transport and how many payloads of hosts use region `id` at this moment.
    ///
    /// # Errors
    /// `NotFound`, `Stale`.
    pub fn region_pins(&self, id: RegionId) -> Result<(u32, u32), Error> {
        self.regions.find(id).map(|region| (region.pins, region.ext.peers))
    }
}

impl fmt::Debug for NvmeofTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NvmeofTransport")
            .field("address", &self.end.address)
            .field("incarnation", &self.end.incarnation)
            .field("connections", &self.connections())
            .field("slices_in_flight", &self.slices_in_flight())
            .finish_non_exhaustive()
    }
}

/// What [`Memory`](te_core::Memory) does; the promise about memory enters the crate in `sys`.
impl NvmeofTransport {
    pub(crate) fn register_memory(
        &mut self,
        id: RegionId,
        span: MemSpan,
        access: Access,
        memory: Pinned,
    ) -> Result<(), Error> {
        span.require(MemoryKinds::HOST)?;
        if span.is_empty() || span.as_ptr().is_null() || access.is_empty() {
            return Err(ErrorKind::InvalidArgument.into());
        }
        self.regions.vacant(id.index)?;
        let key = if access.is_remote() { random_u64().map_err(|error| error_of(&error))? } else { 0 };
        let nsid = if access.is_remote() { self.target.serve(id.index)? } else { 0 };
        let ext = RegionExt { memory: Some(memory), peers: 0, nsid };
        let region = Region::new(id, span.len() as u64, span.location(), access, key, ext);
        self.regions.insert(id.index, region)
    }

    pub(crate) fn deregister_memory(&mut self, id: RegionId) -> Result<(), Error> {
        let region = self.regions.find(id)?;
        let (nsid, closing, adopted) = (region.ext.nsid, region.closing, region.ext.memory.is_none());
        if region.pins > 0 {
            return Err(ErrorKind::Busy.into());
        }
        if region.ext.peers > 0 {
            if !closing {
                // New commands of hosts are refused from here on; those that run may continue until the next
                // call.
                if let Some(region) = self.regions.get_mut(id.index) {
                    region.closing = true;
                }
                return Err(ErrorKind::Busy.into());
            }
            let (_, target, mut cx) = self.split();
            target.withdraw(id.index, &mut cx);
            if self.regions.find(id)?.ext.peers > 0 {
                return Err(ErrorKind::Busy.into());
            }
        }
        if nsid != 0 {
            self.target.unserve(nsid);
        }
        if adopted {
            let (initiator, _, mut cx) = self.split();
            initiator.disown(id.index, &mut cx);
        }
        self.regions.remove(id.index).map(|_| ()).ok_or_else(|| ErrorKind::NotFound.into())
    }

    pub(crate) fn export_memory(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error> {
        let region = self.regions.find(id)?;
        if region.ext.memory.is_none() {
            let export = self.initiator.export_adopted(id.index)?;
            return export.write(out).ok_or_else(|| ErrorKind::OutOfRange.into());
        }
        let granule = u64::from(self.config.granule_bytes);
        if region.access.is_remote() && region.len < granule {
            return Err(ErrorKind::InvalidArgument.into());
        }
        // What a peer learns about the region: its namespace, and the length in whole blocks.
        let served = te_fabric::Region::new(
            id,
            region.len / granule * granule,
            region.location,
            region.access,
            region.key,
            (),
        );
        let served = te_fabric::Region { closing: region.closing, ..served };
        self.end.export(RegionId::new(region.ext.nsid, id.generation), &served, out)
    }

    pub(crate) fn attach_remote(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), Error> {
        if AdoptedExport::is_meant(blob) {
            return self.attach_adopted(id, blob);
        }
        let export =
            Export::parse(EXPORT_FORMAT, blob).map_err(|_| Error::new(ErrorKind::InvalidArgument))?;
        let place = Place::of_ours(&export);
        self.initiator.attach(id, &export, place, None)
    }

    pub(crate) fn detach_remote(&mut self, id: RemoteRegionId) -> Result<(), Error> {
        let (initiator, _, mut cx) = self.split();
        initiator.detach(id, &mut cx)
    }
}

impl Transport for NvmeofTransport {
    fn name(&self) -> &'static str {
        "nvmeof"
    }

    fn capabilities(&self) -> Capabilities {
        let mut features = Features::READ
            | Features::WRITE
            | Features::FENCE
            | Features::TWO_SIDED_PROGRESS
            | Features::CALLER_DRIVEN;
        features.set(Features::CHECKSUM, self.config.header_digest && self.config.data_digest);
        let Config { slice_bytes_max, transfer_bytes_max, inflight_max, granule_bytes, .. } = self.config;
        let slice_bytes_max = slice_bytes_max / granule_bytes * granule_bytes;
        Capabilities::new(features)
            .with_slice_bytes(transfer_bytes_max.min(slice_bytes_max), slice_bytes_max)
            .with_inflight_max(inflight_max)
            .with_export_bytes_max(EXPORT_BYTES_MAX as u32)
            .with_granule_bytes(granule_bytes)
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        let (initiator, _, mut cx) = self.split();
        let room = initiator.room();
        let accepted = accept_prefix(batch, room, |slice| initiator.accept(slice, &mut cx))?;
        self.timers.wake_if(accepted > 0);
        Ok(accepted)
    }

    fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize {
        if self.timers.absence(now, self.config.peer_silence_ms_max).is_some() {
            self.initiator.forgive(now);
        }
        if let Some(away) = self.timers.absence(now, ABSENCE_MS) {
            let (_, target, mut cx) = self.split();
            target.returned(away, &mut cx);
        }
        self.timers.begin(now);
        self.feed();
        self.drive_ready();
        if self.timers.is_due() {
            self.run_timers();
        }
        self.feed();
        self.initiator.fetch(out)
    }

    fn poll_at(&self) -> Option<Instant> {
        self.timers.next_poll(self.initiator.has_completions())
    }

    fn event_source(&self) -> Option<EventSource> {
        Some(EventSource(self.epoll.raw_fd()))
    }

    fn activity(&self) -> u64 {
        self.stats.receives + self.stats.sends
    }

    fn cancel(&mut self, token: Token) -> Result<(), Error> {
        let (initiator, _, mut cx) = self.split();
        initiator.cancel(token, &mut cx)
    }

    fn fence(&mut self, token: Token, remote: RemoteRegionId) -> Result<(), Error> {
        let (initiator, _, mut cx) = self.split();
        initiator.fence(token, remote, &mut cx)
    }

    fn is_connected(&self, peer: u64) -> bool {
        peer != 0 && self.target.has_host(peer)
    }

    fn as_any(&mut self) -> Option<&mut dyn core::any::Any> {
        Some(self)
    }

    fn expel(&mut self, peer: u64, mode: ExpelMode) -> Result<bool, Error> {
        let (initiator, target, mut cx) = self.split();
        let here = target.expel(peer, mode, &mut cx)?;
        Ok(initiator.preempt(peer, &mut cx)? && here)
    }
}

/// A caller may move the transport to another thread.
const fn is_send<T: Send>() {}
const _: () = is_send::<NvmeofTransport>();
