//! The transport: one object that initiates and serves, driven by `poll` alone.

use core::fmt;
use core::net::SocketAddr;
use std::io;

use te_core::{
    Access, Capabilities, Completion, Error, ErrorKind, EventSource, Features, Instant, MemSpan, Memory,
    RegionId, SegmentId, Slice, Token, Transport,
};
use te_fabric::net::{Listener, error_of, random_u64, reset_on_close, set_congestion};
use te_fabric::operation::accept_prefix;
use te_fabric::peer::{Fence, FenceCount, KnownIncarnations};
use te_fabric::{ConfigError, Epoll, Interest, LocalEnd, Table, Timers};

use crate::admission::Admission;
use crate::config::{Config, Driver};
use crate::connections::{Connection, Connections};
use crate::endpoint::{Endpoint, LaneEnd};
use crate::frame::{self, EXPORT_BYTES_MAX, EXPORT_FORMAT};
use crate::operation::{Ext, Operation, Operations};
use crate::region::{Ext as RegionExt, Region, Regions, Segment, Segments};
use crate::stats::Stats;
#[cfg(feature = "uring")]
use crate::sys::Ring;
use crate::sys::{Buffers, Pinned, Poller, Socket};

/// Received from one lane before the others get a turn, bytes.
pub(crate) const RECEIVE_BYTES_MAX: usize = 4 << 20;
/// Bytes of which one poll computes checksums for peers before it leaves the rest to the next.
pub(crate) const CHECKSUMS_BYTES_MAX: u64 = 8 << 20;
/// Events taken in one poll.
const EVENTS_MAX: usize = 64;
/// The name of the listener's events; no connection has it.
pub(crate) const LISTENER: u64 = u64::MAX;

/// One-sided reads and writes over TCP. See the [crate] for what it is and how it works.
///
/// A fork inherits the sockets but not the conversation: a child may drop its copy, which closes its descriptors and does
/// nothing to the parent's connections, and must not call anything else.
pub struct TcpTransport {
    /// First, so that it lets go of the sockets before they are closed.
    pub(crate) poller: Poller,
    pub(crate) config: Config,
    /// What peers learn of us.
    pub(crate) end: LocalEnd,
    pub(crate) session: u64,
    pub(crate) listener: Listener,

    pub(crate) buffers: Buffers,
    pub(crate) regions: Regions,
    pub(crate) segments: Segments,
    pub(crate) peers: Table<Endpoint>,
    /// Peers that were met and let go.
    pub(crate) known: KnownIncarnations,
    pub(crate) operations: Operations,
    pub(crate) connections: Connections,
    /// Who is there of those, and what became of the others.
    pub(crate) admission: Admission,
    /// Peers that have something to send.
    pub(crate) listed: Vec<u32>,
    /// Lanes that are read without asking.
    pub(crate) hot: Vec<u32>,
    /// What is left of [`CHECKSUMS_BYTES_MAX`] in this poll.
    pub(crate) checksums_left: u64,
    /// Peers' lanes that wait for the next poll's.
    pub(crate) deferred: Vec<u32>,
    /// Lanes of which epoll is to tell when they can be written.
    pub(crate) waiting_to_write: u32,
    pub(crate) lane_generation: u32,
    pub(crate) fences: FenceCount,
    /// The last FENCE frame that was sent.
    pub(crate) next_fence: u64,
    pub(crate) timers: Timers,
    /// Connections may be waiting to be accepted.
    pub(crate) listener_waits: bool,
    pub(crate) stats: Stats,
}

impl TcpTransport {
    /// Listens as `config` says. Connects to nobody yet.
    ///
    /// # Errors
    /// A setting out of its limits, an address that cannot be bound, a congestion control that the kernel does not have.
    pub fn new(config: Config) -> Result<Self, OpenError> {
        config.validate().map_err(OpenError::Config)?;
        let step = |what: &'static str| move |source: io::Error| OpenError::System { what, source };
        let listener = Listener::bind(config.bind).map_err(step("listen on the address in `bind`"))?;
        if let Some(name) = &config.congestion {
            set_congestion(&listener, name).map_err(step("use the algorithm in `congestion`"))?;
        }
        let address = listener.local_address().map_err(step("learn the port"))?;
        let mut poller = match config.driver {
            Driver::Epoll => Poller::Epoll(Epoll::new(EVENTS_MAX).map_err(step("create an epoll instance"))?),
            #[cfg(feature = "uring")]
            Driver::Uring => {
                let ring = Ring::new(config.connections_max as usize);
                let what = step("set up io_uring, which the kernel may forbid (io_uring_disabled)");
                Poller::Ring(Box::new(ring.map_err(what)?))
            }
        };
        poller.add(&listener, LISTENER, Interest::READ).map_err(step("watch the listener"))?;
        let end = LocalEnd::new(EXPORT_FORMAT, config.identity, address, config.advertise);
        Ok(Self {
            end: end.map_err(step("get random numbers"))?,
            session: random_u64().map_err(step("get random numbers"))?,
            listener,
            poller,
            buffers: Buffers::new(),
            regions: Regions::new(config.regions_max),
            segments: Segments::new(config.segments_max),
            peers: Table::new(config.segments_max),
            known: KnownIncarnations::default(),
            operations: Operations::new(config.inflight_max, config.fences_max),
            connections: Connections::default(),
            admission: Admission::default(),
            listed: Vec::new(),
            hot: Vec::new(),
            checksums_left: 0,
            deferred: Vec::new(),
            waiting_to_write: 0,
            lane_generation: 0,
            fences: FenceCount::new(config.fences_max),
            next_fence: 0,
            timers: Timers::new(),
            listener_waits: false,
            stats: Stats::default(),
            config,
        })
    }

    /// Where it listens.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.end.address
    }

    /// Who it is: random, another one after each restart.
    #[must_use]
    pub const fn incarnation(&self) -> u64 {
        self.end.incarnation
    }

    /// Who peers take it for: [`Config::identity`], or the random number in its place.
    #[must_use]
    pub const fn identity(&self) -> u64 {
        self.end.identity
    }

    /// What it has done so far.
    #[must_use]
    pub const fn stats(&self) -> Stats {
        self.stats
    }

    /// The settings it runs with.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// Connections that are open, own and peers'.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Closes every connection, own and peers', in mid-word if need be. Slices on them end as when a connection breaks;
    /// what is submitted later opens new ones.
    pub fn close_connections(&mut self) {
        for index in 0..self.connections.bound() {
            match self.connections.take(index) {
                Some(Connection::Out(lane)) => {
                    let error = Error::with_code(ErrorKind::PeerDead, libc::ECONNRESET);
                    self.end_out(index, lane, LaneEnd::Lost(error));
                }
                Some(Connection::In(lane)) => {
                    reset_on_close(&lane.socket);
                    self.end_in(index, lane);
                }
                None => {}
            }
        }
    }

    /// Settings that every socket gets before it connects.
    pub(crate) fn tune(&self, socket: &Socket) -> io::Result<()> {
        socket.set_nodelay()?;
        if let Some(bytes) = self.config.send_buffer_bytes {
            socket.set_send_buffer(bytes)?;
        }
        if let Some(bytes) = self.config.receive_buffer_bytes {
            socket.set_receive_buffer(bytes)?;
        }
        if let Some(name) = &self.config.congestion {
            set_congestion(socket, name)?;
        }
        Ok(())
    }

    /// Settings that depend on who is at the other end. True: somebody on this host.
    pub(crate) fn suit(&self, socket: &Socket) -> bool {
        let (Ok(here), Ok(there)) = (socket.local_address(), socket.peer_address()) else { return false };
        let same_host = there.ip().is_loopback() || here.ip() == there.ip();
        if same_host && self.config.congestion.is_none() {
            // Pacing within one host only costs. A kernel without cubic keeps what it has.
            let _ = set_congestion(socket, "cubic");
        }
        same_host
    }

    fn accept_slice(&mut self, slice: &Slice) -> Result<(), Error> {
        if slice.len == 0 || slice.len > self.config.slice_bytes_max {
            return Err(ErrorKind::InvalidArgument.into());
        }
        let region = self.regions.check_local(slice)?;
        let local = region.ext.memory.part(slice.local.1, u64::from(slice.len))?;
        let peer = self.segments.check_remote(slice)?.peer;
        let operation = Operation::new(slice, peer, Ext::new(local));
        let Some(endpoint) = self.peers.get_mut(peer) else { return Err(ErrorKind::NotFound.into()) };
        let Some(slot) = self.operations.insert(operation) else { return Err(ErrorKind::Full.into()) };
        self.operations.push_back(&mut endpoint.pending, slot);
        endpoint.operations += 1;
        self.regions.pin(slice.local.0.index);
        self.segments.pin(slice.remote.0.index);
        self.list_peer(peer);
        Ok(())
    }

    /// Lets go of a peer that nothing needs any more.
    fn drop_idle_peer(&mut self, peer: u32) {
        if self.peers.get(peer).is_some_and(Endpoint::is_idle) {
            self.fail_peer(peer, ErrorKind::Canceled.into());
            self.listed.retain(|&known| known != peer);
            if let Some(endpoint) = self.peers.remove(peer) {
                self.known.remember(&endpoint.contact);
            }
        }
    }
}

impl fmt::Debug for TcpTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpTransport")
            .field("address", &self.end.address)
            .field("incarnation", &self.end.incarnation)
            .field("connections", &self.connections.len())
            .field("slots_in_use", &self.operations.len())
            .finish_non_exhaustive()
    }
}

impl Memory for TcpTransport {
    #[allow(unsafe_code, reason = "the one place where a caller's promise about memory enters the crate")]
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error> {
        if span.is_empty() || span.as_ptr().is_null() || access.is_empty() {
            return Err(ErrorKind::InvalidArgument.into());
        }
        // What no peer may reach needs no key: its rights refuse them all.
        let key = if access.is_remote() { random_u64().map_err(|error| error_of(&error))? } else { 0 };
        // SAFETY: the caller keeps `span` mapped and unborrowed until `deregister` returns `Ok`, which it does only when no
        // operation, own or a peer's, holds the `Pinned` or a part of it.
        let memory = unsafe { Pinned::new(span) };
        let ext = RegionExt { memory, peers: 0 };
        self.regions.insert(id.index, Region::new(id, span.len() as u64, access, key, ext))
    }

    fn deregister(&mut self, id: RegionId) -> Result<(), Error> {
        let region = self.regions.find(id)?;
        if region.users > 0 {
            return Err(ErrorKind::Busy.into());
        }
        if region.ext.peers > 0 {
            if !region.closing {
                // New operations of peers are refused from here on; those that run get until the next call.
                if let Some(region) = self.regions.get_mut(id.index) {
                    region.closing = true;
                }
                return Err(ErrorKind::Busy.into());
            }
            self.withdraw(id.index);
        }
        match self.regions.find(id)?.ext.peers {
            0 => self.regions.remove(id.index).map(|_| ()).ok_or_else(|| ErrorKind::NotFound.into()),
            _ => Err(ErrorKind::Busy.into()),
        }
    }

    fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error> {
        self.end.export(id, self.regions.find(id)?, out)
    }

    fn attach(&mut self, id: SegmentId, blob: &[u8]) -> Result<(), Error> {
        let export = frame::parse_export(blob).map_err(|_| Error::new(ErrorKind::InvalidArgument))?;
        self.segments.vacant(id.index)?;
        let is = |(_, endpoint): &(u32, &Endpoint)| endpoint.contact.incarnation() == export.incarnation;
        let known = self.peers.iter().find(is).map(|(peer, _)| peer);
        let peer = match known {
            Some(peer) => peer,
            None => self.peers.add(Endpoint::new(&export))?,
        };
        if let Some(endpoint) = self.peers.get_mut(peer) {
            let connecting = endpoint.lane_count() > 0;
            endpoint.contact.learn(&export, connecting);
            endpoint.segments += 1;
        }
        self.segments.insert(id.index, Segment::new(id, peer, &export, ()))
    }

    fn detach(&mut self, id: SegmentId) -> Result<(), Error> {
        let peer = self.segments.detach(id)?.peer;
        if let Some(endpoint) = self.peers.get_mut(peer) {
            endpoint.segments -= 1;
        }
        self.drop_idle_peer(peer);
        Ok(())
    }
}

impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn capabilities(&self) -> Capabilities {
        let mut features = Features::READ
            | Features::WRITE
            | Features::FENCE
            | Features::TWO_SIDED_PROGRESS
            | Features::INLINE;
        features.set(Features::CHECKSUM, self.config.checksum);
        Capabilities {
            features,
            slice_bytes_max: self.config.slice_bytes_max,
            slice_bytes_preferred: self.config.piece_bytes_max.min(self.config.slice_bytes_max),
            inflight_max: self.config.inflight_max,
            export_bytes_max: EXPORT_BYTES_MAX as u32,
        }
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        let room = self.operations.room();
        let accepted = accept_prefix(batch, room, |slice| self.accept_slice(slice))?;
        self.timers.wake_if(accepted > 0);
        Ok(accepted)
    }

    fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize {
        self.forgive_absence(now);
        self.timers.begin(now);
        self.checksums_left = CHECKSUMS_BYTES_MAX;
        if !self.listed.is_empty() {
            self.feed_all();
        }
        self.drive_all();
        if std::mem::take(&mut self.listener_waits) && self.listener.rests_until().is_none() {
            self.accept_all();
        }
        if self.timers.is_due() {
            self.run_timers();
        }
        if !self.listed.is_empty() {
            self.feed_all();
        }
        self.operations.fetch(out)
    }

    fn poll_at(&self) -> Option<Instant> {
        self.timers.next_poll(self.operations.has_completions())
    }

    fn event_source(&self) -> Option<EventSource> {
        Some(EventSource(self.poller.raw_fd()))
    }

    fn activity(&self) -> u64 {
        self.stats.receives + self.stats.sends
    }

    fn cancel(&mut self, token: Token) -> Result<(), Error> {
        if let Some(slot) = self.operations.position(|of| of.ext.live && of.token == token) {
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
        let peer = self.segments.find(segment)?.peer;
        let Some(endpoint) = self.peers.get_mut(peer) else { return Err(ErrorKind::NotFound.into()) };
        self.fences.begin()?;
        endpoint.fences.push(Fence { token, segment: segment.index, sent: None });
        self.segments.pin(segment.index);
        self.list_peer(peer);
        self.timers.wake();
        Ok(())
    }

    /// True as well for one whose last lane was closed from here because it was idle: it may be alive.
    fn is_connected(&self, peer: u64) -> bool {
        peer != 0 && self.has_peer(peer)
    }

    fn expel(&mut self, peer: u64, force: bool) -> Result<bool, Error> {
        self.expel_peer(peer, force).map(|()| true)
    }
}

/// Why a transport could not be opened.
#[derive(Debug)]
#[non_exhaustive]
pub enum OpenError {
    /// A setting is out of its limits.
    Config(ConfigError),
    /// The system refused.
    System {
        /// What was tried.
        what: &'static str,
        /// What it said.
        source: io::Error,
    },
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(error) => write!(f, "setting {error}"),
            Self::System { what, source } => write!(f, "could not {what}: {source}"),
        }
    }
}

impl std::error::Error for OpenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Config(error) => Some(error),
            Self::System { source, .. } => Some(source),
        }
    }
}

/// Slices in flight, for tests of this crate.
impl TcpTransport {
    /// Slices that hold a slot, ghosts of cancelled ones included.
    #[must_use]
    pub fn slots_in_use(&self) -> usize {
        self.operations.len()
    }

    /// Slices of this transport, and payloads of peers, that use region `id` at this moment: for reports and tests.
    ///
    /// # Errors
    /// `NotFound`, `Stale`.
    pub fn region_users(&self, id: RegionId) -> Result<(u32, u32), Error> {
        self.regions.find(id).map(|region| (region.users, region.ext.peers))
    }
}

/// An owner may hand it to another thread.
const fn is_send<T: Send>() {}
const _: () = is_send::<TcpTransport>();
