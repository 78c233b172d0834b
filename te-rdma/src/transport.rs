//! The transport: one object that initiates and serves, driven by `poll` alone.

use core::fmt;
use core::net::SocketAddr;
use std::collections::VecDeque;
use std::hash::RandomState;
use std::io;

use te_core::{
    Access, Capabilities, Completion, Error, ErrorKind, EventSource, Features, Instant, MemSpan, Memory,
    RegionId, SegmentId, Slice, Token, Transport,
};
use te_fabric::net::{Listener, random_u64, reset_on_close};
use te_fabric::operation::accept_prefix;
use te_fabric::peer::{Expelled, Fence, FenceCount, KnownIncarnations};
use te_fabric::{Epoll, Interest, LocalEnd, Slab, Table, Timers};

use crate::config::{Config, SGES_MAX};
use crate::connection::{CONNECTS, CQ, Connection, EVENTS, LISTENER, Role, Undead};
use crate::connects::Connects;
use crate::endpoint::{ChannelEnd, Endpoint};
use crate::exchange::{self, Chunking, EXPORT_BYTES_MAX, EXPORT_FORMAT, Kind};
use crate::link::Link;
use crate::net;
use crate::open_error::OpenError;
use crate::operation::{Ext, Operation, Operations};
use crate::port::LocalPort;
use crate::post::Batch;
use crate::region::{Keys, Region, RegionExt, Regions, Retired, Segment, SegmentExt, Segments};
use crate::registration;
use crate::sieve::Sieve;
use crate::stats::Stats;
use crate::verbs::{DeviceInfo, Gid, Registration, Verbs};

/// What one more cut is worth on this fabric, bytes.
const SLICE_BYTES_PREFERRED: u32 = 256 << 10;
/// Descriptors that are looked at in one poll.
const POLLER_EVENTS_MAX: usize = 64;
/// Registering again, to be rid of a key that peers may remember.
const KEY_ATTEMPTS_MAX: usize = 8;

/// One-sided reads and writes over RDMA. See the [crate] for what it is and how it works.
pub struct RdmaTransport<V: Verbs> {
    pub(crate) verbs: V,
    pub(crate) poller: Epoll,
    /// As given, lowered to what the device can do.
    pub(crate) config: Config,
    /// What peers learn of us.
    pub(crate) end: LocalEnd,
    /// What the sessions with targets are made of.
    pub(crate) sessions: RandomState,
    pub(crate) listener: Listener,
    /// The one that opened it.
    process: u32,
    pub(crate) port: LocalPort,
    /// Why nothing can be sent at the moment, or ever again.
    pub(crate) outage: Option<Outage>,

    pub(crate) regions: Regions,
    pub(crate) segments: Segments,
    pub(crate) endpoints: Table<Endpoint>,
    /// Peers that were met and let go.
    pub(crate) known: KnownIncarnations,
    pub(crate) operations: Operations,
    pub(crate) connections: Slab<Box<Connection>, u32>,
    pub(crate) links: Slab<Box<Link>, u32>,
    /// Of the connections, those that peers opened.
    pub(crate) inbound: usize,
    /// Endpoints with a connection.
    pub(crate) connected: Sieve,
    /// Peers' queue pairs that could not be put out of action.
    pub(crate) undead: Vec<Undead>,
    /// Peers that are refused for good.
    pub(crate) expelled: Expelled,
    /// Queue pairs that are being connected.
    pub(crate) connects: Connects,
    /// Queue pairs that may still be made for peers in this poll.
    pub(crate) peer_qps_left: usize,
    /// Peers' side channels, by name, that wait for the next poll with an offer of queue pairs.
    pub(crate) unserved: VecDeque<u32>,
    /// Endpoints that have something to do.
    pub(crate) listed: Vec<u32>,
    pub(crate) retired: Retired,

    pub(crate) batch: Batch,
    /// Work requests posted and not ended, on all queue pairs.
    pub(crate) outstanding: u32,
    /// Slices that were cancelled and drain.
    pub(crate) draining: Vec<u32>,
    /// Queue pairs in error.
    pub(crate) flushing: u32,
    pub(crate) next_generation: u32,
    pub(crate) next_connection: u32,
    pub(crate) next_question: u64,
    /// Questions that are being written; empty between two calls.
    pub(crate) asked_now: Vec<(u64, Kind)>,
    /// Questions to peers without an answer, handshakes included.
    pub(crate) questions: u32,
    pub(crate) fences: FenceCount,

    pub(crate) timers: Timers,
    /// Polls in a row that found no completion.
    pub(crate) vain: u32,
    /// An event is to come with the next completion.
    pub(crate) armed: bool,
    /// The provider has a descriptor for completions.
    pub(crate) can_arm: bool,
    pub(crate) stats: Stats,
}

/// Why the port carries nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outage {
    /// The link is down, or the GID is gone; either may come back.
    Port,
    /// The device or its completion queue is lost.
    Device,
}

impl Outage {
    pub(crate) const fn error(self) -> Error {
        Error::new(ErrorKind::Rail)
    }
}

impl<V: Verbs> RdmaTransport<V> {
    /// Goes by the port that `verbs` has opened, and listens as `config` says. Connects to nobody yet.
    ///
    /// May take as long as `proof_ms_max` for each GID that is tried.
    ///
    /// # Errors
    /// A setting out of its limits, an address that cannot be bound, a port that is down, no GID that works.
    pub fn new(mut verbs: V, config: Config) -> Result<Self, OpenError> {
        config.validate().map_err(OpenError::Config)?;
        let step = |what: &'static str| move |source: io::Error| OpenError::System { what, source };
        let config = fitted(config, verbs.info());
        let port = LocalPort::open(&mut verbs, &config).map_err(|error| match error.kind {
            ErrorKind::Rail => OpenError::PortDown,
            ErrorKind::Unreachable => OpenError::NoGid { code: error.code },
            _ => OpenError::Device { what: "look at the port", source: error },
        })?;
        let listener = Listener::bind(config.bind).map_err(step("listen on the address in `bind`"))?;
        let address = listener.local_address().map_err(step("learn the port of the side channel"))?;
        let poller = Epoll::new(POLLER_EVENTS_MAX).map_err(step("create an epoll instance"))?;
        poller.add(&listener, LISTENER, Interest::READ).map_err(step("watch the listener"))?;
        let [completions, events] = verbs.event_fds();
        for (fd, token) in [(completions, CQ), (events, EVENTS)] {
            if let Some(fd) = fd {
                net::watch(&poller, fd, token).map_err(step("watch the device's descriptors"))?;
            }
        }
        let connects = Connects::new().map_err(step("make an event descriptor"))?;
        poller.add(connects.fd(), CONNECTS, Interest::READ).map_err(step("watch the event descriptor"))?;
        let end = LocalEnd::new(EXPORT_FORMAT, config.identity, address, config.advertise);
        Ok(Self {
            end: end.map_err(step("get random numbers"))?,
            sessions: RandomState::new(),
            poller,
            listener,
            process: std::process::id(),
            port,
            outage: None,
            regions: Regions::new(config.regions_max),
            segments: Segments::new(config.segments_max),
            endpoints: Table::new(config.segments_max),
            known: KnownIncarnations::default(),
            operations: Operations::new(config.inflight_max, config.fences_max),
            connections: Slab::new(),
            links: Slab::new(),
            inbound: 0,
            connected: Sieve::default(),
            undead: Vec::new(),
            expelled: Expelled::default(),
            connects,
            peer_qps_left: 0,
            unserved: VecDeque::new(),
            listed: Vec::new(),
            retired: Retired::default(),
            batch: Batch::new(usize::from(config.sges)),
            outstanding: 0,
            draining: Vec::with_capacity(config.inflight_max as usize),
            flushing: 0,
            next_generation: 0,
            next_connection: 0,
            next_question: 0,
            asked_now: Vec::new(),
            questions: 0,
            fences: FenceCount::new(config.fences_max),
            timers: Timers::new(),
            vain: 0,
            armed: false,
            can_arm: completions.is_some(),
            stats: Stats::default(),
            config,
            verbs,
        })
    }

    /// Where the side channel listens.
    #[must_use]
    pub const fn local_address(&self) -> SocketAddr {
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
    pub const fn settings(&self) -> &Config {
        &self.config
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &DeviceInfo {
        self.verbs.info()
    }

    /// The GID that we go by.
    #[must_use]
    pub const fn gid(&self) -> Gid {
        self.port.gid
    }

    /// Whether the port carries traffic, as far as is known.
    #[must_use]
    pub const fn is_up(&self) -> bool {
        self.outage.is_none()
    }

    /// What it has done so far.
    #[must_use]
    pub const fn stats(&self) -> Stats {
        self.stats
    }

    /// The provider.
    #[must_use]
    pub const fn provider(&self) -> &V {
        &self.verbs
    }

    /// Closes every side channel, own and peers', in mid-word if need be, and with each the queue pairs that belong to it.
    /// Slices on them end as when a connection breaks; what is submitted later opens new ones.
    pub fn close_connections(&mut self) {
        for index in 0..self.connections.bound() {
            let Some(connection) = self.connections.take(index) else { continue };
            match connection.role {
                Role::Out(_) => {
                    let error = Error::with_code(ErrorKind::PeerDead, libc::ECONNRESET);
                    self.end_out(index, *connection, ChannelEnd::Lost(error));
                }
                Role::In(_) => {
                    reset_on_close(&connection.channel.stream);
                    self.end_in(index, *connection);
                }
            }
        }
    }

    /// Slices that were accepted and have not completed.
    #[must_use]
    pub fn slices_in_flight(&self) -> usize {
        self.operations.len()
    }

    /// Registers memory of another device by its dma-buf: as [`Memory::register`] for `len` bytes from `offset` on of `fd`.
    /// `address` is what the first byte is called; what it is does not matter, as long as regions do not overlap.
    ///
    /// # Errors
    /// As [`Memory::register`]; `Unsupported` when the device cannot.
    pub fn register_dmabuf(&mut self, id: RegionId, dmabuf: Dmabuf, access: Access) -> Result<(), Error> {
        let Dmabuf { fd, offset, len, address } = dmabuf;
        let chunking = self.chunking(address, len, access)?;
        self.regions.vacant(id.index)?;
        let mr_access = self.mr_access(access);
        let mut chunks = Vec::new();
        for index in 0..chunking.count() {
            let (at, bytes) = chunking.chunk(index);
            match self.verbs.register_dmabuf(fd, offset + at, bytes, address + at, mr_access) {
                Ok(registration) => chunks.push(registration),
                Err(error) => {
                    self.undo(chunks);
                    return Err(error);
                }
            }
        }
        self.adopt(id, chunking, chunks, access, false)
    }

    fn mr_access(&self, access: Access) -> crate::verbs::MrAccess {
        registration::mr_access(access, self.config.relaxed_ordering)
    }

    fn chunking(&self, address: u64, len: u64, access: Access) -> Result<Chunking, Error> {
        if access.is_empty() {
            return Err(ErrorKind::InvalidArgument.into());
        }
        let chunk = self.config.registration_chunk_bytes;
        Chunking::new(address, len, chunk).ok_or_else(|| ErrorKind::InvalidArgument.into())
    }

    /// Keeps a region that the device has.
    fn adopt(
        &mut self,
        id: RegionId,
        chunking: Chunking,
        chunks: Vec<Registration>,
        access: Access,
        mapped: bool,
    ) -> Result<(), Error> {
        let key = match random_u64() {
            Ok(key) => key,
            Err(_) => {
                self.undo(chunks);
                return Err(ErrorKind::System.into());
            }
        };
        self.stats.registered_bytes += chunking.len;
        let len = chunking.len;
        let ext = RegionExt { chunking, chunks, mapped, shown: false };
        self.regions.insert(id.index, Region::new(id, len, access, key, ext))
    }

    fn undo(&self, chunks: Vec<Registration>) {
        for chunk in chunks {
            if let Err(error) = self.verbs.deregister(chunk) {
                log::error!("a chunk of a failed registration could not be undone: {error}");
            }
        }
    }

    fn accept_slice(&mut self, slice: &Slice) -> Result<(), Error> {
        if slice.len == 0 || slice.len > self.config.slice_bytes_max {
            return Err(ErrorKind::InvalidArgument.into());
        }
        self.regions.check_local(slice)?;
        let segment = self.segments.check_remote(slice)?;
        let known = match segment.ext.keys {
            Keys::Withdrawn => return Err(ErrorKind::Stale.into()),
            Keys::Known => true,
            Keys::Unknown | Keys::Asked(_) => false,
        };
        let endpoint = segment.peer;
        let operation = Operation::new(slice, endpoint, Ext::new(slice.local.1));
        let Some(slot) = self.operations.insert(operation) else { return Err(ErrorKind::Full.into()) };
        self.regions.pin(slice.local.0.index);
        self.segments.pin(slice.remote.0.index);
        if let Some(endpoint) = self.endpoints.get_mut(endpoint) {
            endpoint.operations += 1;
        }
        self.enqueue(slot, known);
        Ok(())
    }

    /// Puts a slice where it waits: for work requests, or for keys first.
    pub(crate) fn enqueue(&mut self, slot: u32, keys_known: bool) {
        let Some(operation) = self.operations.get_mut(slot) else { return };
        let (endpoint, segment) = (operation.peer, operation.segment);
        operation.ext.waiting = !keys_known;
        if keys_known {
            if let Some(endpoint) = self.endpoints.get_mut(endpoint) {
                self.operations.push_back(&mut endpoint.pending, slot);
            }
        } else if let Some(of) = self.segments.get_mut(segment) {
            self.operations.push_back(&mut of.ext.waiting, slot);
            self.want_keys(segment);
        }
        self.list(endpoint);
    }

    /// Has somebody ask for a segment's keys, unless that has been done.
    pub(crate) fn want_keys(&mut self, segment: u32) {
        let Some(of) = self.segments.get_mut(segment) else { return };
        let endpoint = of.peer;
        if matches!(of.ext.keys, Keys::Unknown)
            && let Some(endpoint) = self.endpoints.get_mut(endpoint)
            && !endpoint.wanting.contains(&segment)
        {
            endpoint.wanting.push(segment);
        }
        self.list(endpoint);
    }

    /// Has `poll` look after an endpoint.
    pub(crate) fn list(&mut self, endpoint: u32) {
        if let Some(of) = self.endpoints.get_mut(endpoint)
            && !of.listed
        {
            of.listed = true;
            self.listed.push(endpoint);
        }
        self.timers.wake();
    }
}

/// Memory of another device; see [`RdmaTransport::register_dmabuf`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dmabuf {
    /// The dma-buf's descriptor. May be closed when the call has returned.
    pub fd: i32,
    /// First byte, from the buffer's start.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// What peers and work requests call the first byte.
    pub address: u64,
}

impl<V: Verbs> fmt::Debug for RdmaTransport<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdmaTransport")
            .field("device", &self.verbs.info().name)
            .field("address", &self.end.address)
            .field("incarnation", &self.end.incarnation)
            .field("outage", &self.outage)
            .field("connections", &self.connections.len())
            .field("queue_pairs", &self.links.len())
            .field("slices", &self.operations.len())
            .finish_non_exhaustive()
    }
}

impl<V: Verbs> Memory for RdmaTransport<V> {
    #[allow(unsafe_code, reason = "the one place where a caller's promise about memory enters the crate")]
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error> {
        if span.is_empty() || span.as_ptr().is_null() {
            return Err(ErrorKind::InvalidArgument.into());
        }
        let chunking = self.chunking(span.as_ptr() as u64, span.len() as u64, access)?;
        self.regions.vacant(id.index)?;
        let mr_access = self.mr_access(access);
        // SAFETY: the caller keeps `span` mapped and unborrowed until `deregister` returns `Ok`, which it does only when
        // the device has forgotten every chunk.
        let register =
            |verbs: &V| unsafe { registration::register(verbs, span, mr_access, chunking, &self.config) };
        let mut chunks = register(&self.verbs)?;
        for _ in 0..KEY_ATTEMPTS_MAX {
            if !access.is_remote() || !chunks.iter().any(|chunk| self.retired.contains(chunk.remote_key)) {
                break;
            }
            // The old ones go after the new ones have come, so that these get other keys.
            let other = register(&self.verbs);
            self.undo(chunks);
            chunks = other?;
        }
        if access.is_remote() && chunks.iter().any(|chunk| self.retired.contains(chunk.remote_key)) {
            self.undo(chunks);
            return Err(ErrorKind::Full.into());
        }
        self.adopt(id, chunking, chunks, access, true)
    }

    fn deregister(&mut self, id: RegionId) -> Result<(), Error> {
        let region = self.regions.find(id)?;
        if region.users > 0 {
            return Err(ErrorKind::Busy.into());
        }
        let Some(region) = self.regions.get_mut(id.index) else { return Err(ErrorKind::NotFound.into()) };
        region.closing = true;
        while let Some(&chunk) = region.ext.chunks.last() {
            // The device ends a peer's access before it says so. What it does not let go of stays ours; call again.
            self.verbs.deregister(chunk)?;
            region.ext.chunks.pop();
            if region.ext.shown {
                self.retired.add(chunk.remote_key);
            }
        }
        let Some(region) = self.regions.remove(id.index) else { return Err(ErrorKind::NotFound.into()) };
        self.stats.registered_bytes -= region.len;
        if region.ext.shown {
            self.tell_withdrawn(id);
        }
        Ok(())
    }

    fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error> {
        self.end.export(id, self.regions.find(id)?, out)
    }

    fn attach(&mut self, id: SegmentId, blob: &[u8]) -> Result<(), Error> {
        let export = exchange::parse_export(blob).map_err(|_| Error::new(ErrorKind::InvalidArgument))?;
        self.segments.vacant(id.index)?;
        let is = |(_, of): &(u32, &Endpoint)| of.contact.incarnation() == export.incarnation;
        let known = self.endpoints.iter().find(is).map(|(endpoint, _)| endpoint);
        let endpoint = match known {
            Some(endpoint) => endpoint,
            None => self.endpoints.add(Endpoint::new(&export, self.config.fences_max as usize))?,
        };
        if let Some(of) = self.endpoints.get_mut(endpoint) {
            of.contact.learn(&export, of.channel.is_some());
            of.segments += 1;
            // Room for every segment to want keys at once, so that submitting never allocates.
            of.wanting.reserve(of.segments as usize);
        }
        // As many endpoints as segments may be listed.
        self.listed.reserve(self.endpoints.bound() as usize);
        self.segments.insert(id.index, Segment::new(id, endpoint, &export, SegmentExt::new()))
    }

    fn detach(&mut self, id: SegmentId) -> Result<(), Error> {
        let endpoint = self.segments.detach(id)?.peer;
        if let Some(of) = self.endpoints.get_mut(endpoint) {
            of.segments -= 1;
            of.wanting.retain(|&segment| segment != id.index);
        }
        self.drop_idle_endpoint(endpoint);
        Ok(())
    }
}

impl<V: Verbs> Transport for RdmaTransport<V> {
    fn name(&self) -> &'static str {
        "rdma"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            features: Features::READ | Features::WRITE | Features::FENCE,
            slice_bytes_max: self.config.slice_bytes_max,
            slice_bytes_preferred: SLICE_BYTES_PREFERRED.min(self.config.slice_bytes_max),
            inflight_max: self.config.inflight_max,
            export_bytes_max: EXPORT_BYTES_MAX as u32,
        }
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        let room = self.operations.room();
        let accepted = accept_prefix(batch, room, |slice| self.accept_slice(slice))?;
        if accepted > 0 {
            self.post_listed();
        }
        Ok(accepted)
    }

    fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize {
        self.drive(now);
        self.operations.fetch(out)
    }

    fn poll_at(&self) -> Option<Instant> {
        let watching = self.outstanding > 0 && !self.armed;
        self.timers.next_poll(watching || self.operations.has_completions())
    }

    fn event_source(&self) -> Option<EventSource> {
        Some(EventSource(self.poller.raw_fd()))
    }

    fn activity(&self) -> u64 {
        self.stats.completions + self.stats.posted + self.stats.frames
    }

    fn cancel(&mut self, token: Token) -> Result<(), Error> {
        if let Some(slot) = self.operations.position(|of| of.token == token) {
            self.cancel_slot(slot);
            self.timers.wake();
            return Ok(());
        }
        if self.operations.is_completed(token) {
            return Ok(());
        }
        Err(ErrorKind::NotFound.into())
    }

    fn fence(&mut self, token: Token, segment: SegmentId) -> Result<(), Error> {
        let endpoint = self.segments.find(segment)?.peer;
        let Some(of) = self.endpoints.get_mut(endpoint) else { return Err(ErrorKind::NotFound.into()) };
        self.fences.begin()?;
        of.fences.push(Fence { token, segment: segment.index, sent: None });
        self.segments.pin(segment.index);
        self.list(endpoint);
        Ok(())
    }

    fn is_connected(&self, peer: u64) -> bool {
        peer != 0 && self.has_peer(peer)
    }

    fn expel(&mut self, peer: u64, force: bool) -> Result<bool, Error> {
        self.expel_peer(peer, force)
    }
}

impl<V: Verbs> Drop for RdmaTransport<V> {
    /// Ends all access, ours and peers', before the memory's owners go on; in a fork, nothing. Regions that were not deregistered are let go
    /// of as well; their memory was promised to stay until then.
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // The device's file is the parent's as well, and so is everything made through it.
            return;
        }
        // What is being connected cannot be destroyed.
        self.connects.stop();
        for index in 0..self.links.bound() {
            if let Some(link) = self.links.get(index) {
                let _ = self.verbs.destroy_qp(link.qp.handle);
            }
        }
        for index in 0..self.connections.bound() {
            if let Some(connection) = self.connections.get(index) {
                for qp in connection.peer_qps() {
                    let _ = self.verbs.destroy_qp(qp);
                }
            }
        }
        for index in 0..self.regions.bound() {
            if let Some(region) = self.regions.remove(index) {
                for chunk in region.ext.chunks {
                    let _ = self.verbs.deregister(chunk);
                }
            }
        }
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
