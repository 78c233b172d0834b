//! The transport: connects the parts, and is driven by `poll` alone.

use core::fmt;
use core::net::SocketAddr;
use std::sync::Arc;

use te_core::device::Devices;
use te_core::{
    Access, Capabilities, Completion, Error, ErrorKind, EventSource, ExpelMode, Features, Instant, MemSpan,
    Memory, MemoryKinds, RegionId, RemoteRegionId, Slice, Token, Transport,
};
use te_fabric::net::{error_of, random_u64};
use te_fabric::operation::accept_prefix;
use te_fabric::timers::Earliest;
use te_fabric::{LocalEnd, OpenError, Timers};

use crate::config::Config;
use crate::connection::{ConnectionName, Reading};
use crate::context::Context;
use crate::frame::{self, EXPORT_BYTES_MAX, EXPORT_FORMAT};
use crate::initiator::{Greeting, Initiator};
use crate::io::Io;
use crate::peers::Peers;
use crate::region::{Ext as RegionExt, Region, Regions};
use crate::staging;
use crate::stats::Stats;
#[cfg(feature = "uring")]
use crate::sys::JOBS_MAX;
use crate::sys::Memory as Bytes;
use crate::target::Target;

/// One-sided reads and writes over TCP. The [crate]'s documentation says how it works.
///
/// A fork inherits the sockets but not the connections' state: a child may drop its copy, which closes its
/// descriptors without an effect on the parent's connections, and must not call anything else.
pub struct TcpTransport {
    /// The first field, so that it is dropped before the sockets are closed.
    io: Io,
    initiator: Initiator,
    target: Target,
    peers: Peers,
    regions: Regions,
    timers: Timers,
    /// Locates memory of devices and makes stagers for it.
    devices: Option<Arc<dyn Devices>>,
    /// A region on memory of a device was registered: polls have to work on hops.
    stages: bool,
    /// What exports and HELLOs say about this transport.
    end: LocalEnd,
    config: Config,
}

impl TcpTransport {
    /// Opens a transport that listens as `config` says. It does not connect to a peer yet.
    ///
    /// # Errors
    /// A setting outside its range, an address that is not available, a congestion control that the kernel
    /// does not have.
    pub fn new(config: Config) -> Result<Self, OpenError> {
        config.validate().map_err(OpenError::Config)?;
        let io = Io::open(&config)?;
        let address = io.local_address().map_err(OpenError::step("learn the port"))?;
        let random = OpenError::step("get random numbers");
        let end =
            LocalEnd::new(EXPORT_FORMAT, config.identity, address, config.advertise).map_err(&random)?;
        let session = random_u64().map_err(&random)?;
        let greeting = Greeting { session, incarnation: end.incarnation, identity: end.identity };
        Ok(Self {
            io,
            initiator: Initiator::new(greeting, &config),
            target: Target::new(end.incarnation),
            peers: Peers::new(config.remote_regions_max, config.fences_max),
            regions: Regions::new(config.regions_max),
            timers: Timers::new(),
            devices: None,
            stages: false,
            end,
            config,
        })
    }

    /// As [`new`](Self::new), and moves memory of `devices` as well, through page-locked staging slots.
    ///
    /// For each location, one stager is made for own slices and one for peers' operations, each when the
    /// first region that needs it is registered.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn with_devices(config: Config, devices: Arc<dyn Devices>) -> Result<Self, OpenError> {
        Ok(Self { devices: Some(devices), ..Self::new(config)? })
    }

    /// The address that it listens on.
    #[must_use]
    pub const fn local_address(&self) -> SocketAddr {
        self.end.address
    }

    /// This transport's incarnation: random, another one after each restart.
    #[must_use]
    pub const fn incarnation(&self) -> u64 {
        self.end.incarnation
    }

    /// How peers identify this process: [`Config::identity`], or the random number in its place.
    #[must_use]
    pub const fn identity(&self) -> u64 {
        self.end.identity
    }

    /// Counters since the transport was opened.
    #[must_use]
    pub const fn stats(&self) -> Stats {
        self.initiator.stats().plus(self.target.stats()).plus(self.io.stats())
    }

    /// The settings that it runs with.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// Open connections: those that this transport opened and those of peers.
    #[must_use]
    pub const fn connections(&self) -> usize {
        self.io.connections()
    }

    /// Slices that were accepted and have not completed, and cancelled slices that still wait for an answer
    /// on a connection.
    #[must_use]
    pub fn slices_in_flight(&self) -> usize {
        self.initiator.slices_in_flight()
    }

    /// The parts, and the context that they borrow.
    fn split(&mut self) -> (&mut Initiator, &mut Target, &mut Peers, Context<'_>) {
        let Self { io, initiator, target, peers, regions, timers, config, .. } = self;
        (initiator, target, peers, Context { config, io, regions, timers })
    }
}

/// The steps of `poll`.
impl TcpTransport {
    /// Takes in hops that have ended, and starts what waits for staging slots. Transports without device
    /// memory never call it.
    #[cold]
    #[inline(never)]
    fn run_staging(&mut self) {
        let (initiator, target, peers, mut cx) = self.split();
        target.run_staging(&mut cx);
        initiator.run_staging(peers, &mut cx);
    }

    fn feed(&mut self) {
        if self.peers.has_listed() {
            let (initiator, _, peers, mut cx) = self.split();
            initiator.feed(peers, &mut cx);
        }
    }

    fn drive_all(&mut self) {
        let (_, target, _, mut cx) = self.split();
        target.begin_poll(&mut cx);
        #[cfg(feature = "uring")]
        if self.io.reports_changes() {
            self.drive_changes();
            return;
        }
        if self.io.asks(self.timers.polls()) {
            self.drive_ready();
        } else {
            self.drive_active();
        }
    }

    fn drive(&mut self, name: u64, reading: Reading, writable: bool) {
        let (initiator, target, peers, mut cx) = self.split();
        match ConnectionName::of(name) {
            ConnectionName::Own(name) => initiator.drive(name, reading, writable, peers, &mut cx),
            ConnectionName::Peer(name) => target.drive(name, reading, writable, &mut cx),
        }
    }

    /// Asks the poller which connections are ready, and works on those.
    fn drive_ready(&mut self) {
        for at in 0..self.io.ready() {
            if let Some(event) = self.io.event(at) {
                self.drive(event.token, Reading::of(event.readable), event.writable);
            }
        }
    }

    /// Works on the active connections without asking the poller.
    fn drive_active(&mut self) {
        let (initiator, target, peers, mut cx) = self.split();
        let mut at = 0;
        while let Some(name) = cx.io.active(at) {
            let active = match ConnectionName::of(name) {
                ConnectionName::Own(own) => initiator.drive_active(own, peers, &mut cx),
                ConnectionName::Peer(peer) => target.drive_active(peer, &mut cx),
            };
            at = cx.io.had_turn(at, name, active);
        }
    }

    /// Checks every deadline.
    fn run_timers(&mut self) {
        self.timers.looking();
        let mut next = Earliest::default();
        let (initiator, target, peers, mut cx) = self.split();
        next.note(cx.io.look_at_listener(cx.timers));
        next.note(target.look(&mut cx));
        next.note(initiator.look(peers, &mut cx));
        self.timers.looked(next.get());
    }
}

/// The steps of `poll` with a driver that reports changes.
#[cfg(feature = "uring")]
impl TcpTransport {
    /// Takes in the changes, and reads all connections that have something to read, in as few system calls as
    /// possible.
    fn drive_changes(&mut self) {
        for at in 0..self.io.ready() {
            let Some(event) = self.io.event(at) else { continue };
            if event.finished {
                match ConnectionName::of(event.token) {
                    ConnectionName::Own(name) => self.initiator.set_finished(name),
                    ConnectionName::Peer(name) => self.target.set_finished(name),
                }
            }
            if event.writable {
                self.drive(event.token, Reading::No, true);
            }
            if event.readable {
                self.io.add_active(event.token);
            }
        }
        let mut from = 0;
        while self.io.active(from).is_some() {
            from += self.receive_from(from);
        }
        let (initiator, target) = (&self.initiator, &self.target);
        let more = self.io.retain_active(|name| match ConnectionName::of(name) {
            ConnectionName::Own(name) => initiator.is_active(name),
            ConnectionName::Peer(name) => target.is_active(name),
        });
        self.timers.wake_if(more);
    }

    /// Receives for the active connections from position `from` on in one system call, and works on them.
    /// Returns their number.
    fn receive_from(&mut self, from: usize) -> usize {
        let Self { io, initiator, target, .. } = self;
        let mut group = [0; JOBS_MAX];
        let count = io.active_from(from).len();
        group[..count].copy_from_slice(io.active_from(from));
        let group = &group[..count];
        let (mut own, mut theirs) = ([0; JOBS_MAX], [0; JOBS_MAX]);
        let mut jobs = [const { None }; JOBS_MAX];
        let receives = initiator.receives(group, &mut own).chain(target.receives(group, &mut theirs));
        for (name, job) in receives {
            // Connections are worked on in the order in which they became active.
            if let Some(at) = group.iter().position(|&member| member == name) {
                jobs[at] = Some(job);
            }
        }
        io.receive_all(&mut jobs);
        let ends = jobs.map(|job| job.map(|job| (job.offered, job.result)));
        // All results are taken in before one connection is worked on, because serving one may close another.
        let mut arrived = [const { None }; JOBS_MAX];
        for ((&name, end), to) in group.iter().zip(ends).zip(&mut arrived) {
            let Some((offered, result)) = end else { continue };
            *to = match ConnectionName::of(name) {
                ConnectionName::Own(name) => initiator.arrived(name, offered, result),
                ConnectionName::Peer(name) => target.arrived(name, offered, result),
            };
        }
        for (&name, reading) in group.iter().zip(arrived) {
            if let Some(reading) = reading {
                self.drive(name, reading, false);
            }
        }
        count
    }
}

/// For tests of this crate and of crates that use it.
#[cfg(feature = "testkit")]
impl TcpTransport {
    /// Closes every connection, even in the middle of a frame. Slices on them end as when a connection
    /// breaks; slices submitted later open new ones.
    pub fn close_connections(&mut self) {
        let (initiator, target, peers, mut cx) = self.split();
        initiator.close_connections(peers, &mut cx);
        target.close_connections(&mut cx);
    }

    /// Staging slots that own slices and peers' operations hold at this moment.
    #[must_use]
    pub fn slots_taken(&self) -> usize {
        self.initiator.slots_taken() + self.target.slots_taken()
    }

    /// How many slices of this transport and how many payloads of peers use region `id` at this moment.
    ///
    /// # Errors
    /// `NotFound`, `Stale`.
    pub fn region_pins(&self, id: RegionId) -> Result<RegionPins, Error> {
        self.regions.find(id).map(|region| RegionPins { own: region.pins, peers: region.ext.peers })
    }
}

/// What uses a region at one moment.
#[cfg(feature = "testkit")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionPins {
    /// Slices of the transport that registered it.
    pub own: u32,
    /// Payloads of peers that are being moved into it or out of it.
    pub peers: u32,
}

impl fmt::Debug for TcpTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpTransport")
            .field("address", &self.end.address)
            .field("incarnation", &self.end.incarnation)
            .field("connections", &self.connections())
            .field("slices_in_flight", &self.slices_in_flight())
            .finish_non_exhaustive()
    }
}

impl Memory for TcpTransport {
    #[allow(unsafe_code, reason = "the one place where a caller's promise about memory enters the crate")]
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error> {
        span.require(self.capabilities().memory)?;
        if span.is_empty() || span.as_ptr().is_null() || access.is_empty() {
            return Err(ErrorKind::InvalidArgument.into());
        }
        if let Some(devices) = self.devices.as_ref().filter(|_| !is_host(span)) {
            if access.intersects(Access::LOCAL) {
                self.initiator.prepare(span.location(), &**devices)?;
            }
            if access.is_remote() {
                self.target.prepare(span.location(), &**devices)?;
            }
            self.stages = true;
            staging::check(&**devices, span)?;
        }
        // A region that no peer may reach needs no key: its rights refuse every peer.
        let key = if access.is_remote() { random_u64().map_err(|error| error_of(&error))? } else { 0 };
        // SAFETY: the caller keeps `span` mapped and unborrowed until `deregister` returns `Ok`, which it
        // does only when no operation, own or a peer's, holds the memory or a part of it.
        let memory = unsafe { Bytes::new(span) };
        let ext = RegionExt { memory, peers: 0 };
        self.regions.insert(id.index, Region::new(id, span.len() as u64, span.location(), access, key, ext))
    }

    fn deregister(&mut self, id: RegionId) -> Result<(), Error> {
        let region = self.regions.find(id)?;
        if region.pins > 0 {
            return Err(ErrorKind::Busy.into());
        }
        if region.ext.peers > 0 {
            if !region.closing {
                // New operations of peers are refused from here on; those that run may continue until the
                // next call.
                if let Some(region) = self.regions.get_mut(id.index) {
                    region.closing = true;
                }
                return Err(ErrorKind::Busy.into());
            }
            let (_, target, _, mut cx) = self.split();
            target.withdraw(id.index, &mut cx);
        }
        match self.regions.find(id)?.ext.peers {
            0 => self.regions.remove(id.index).map(|_| ()).ok_or_else(|| ErrorKind::NotFound.into()),
            _ => Err(ErrorKind::Busy.into()),
        }
    }

    fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error> {
        self.end.export(id, self.regions.find(id)?, out)
    }

    fn attach(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), Error> {
        let export = frame::parse_export(blob).map_err(|_| Error::new(ErrorKind::InvalidArgument))?;
        self.initiator.attach(id, &export, &mut self.peers)
    }

    fn detach(&mut self, id: RemoteRegionId) -> Result<(), Error> {
        let (initiator, _, peers, mut cx) = self.split();
        initiator.detach(id, peers, &mut cx)
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
            | Features::CALLER_DRIVEN;
        features.set(Features::CHECKSUM, self.config.checksum);
        let kinds = self.devices.as_ref().map_or(MemoryKinds::empty(), |devices| devices.kinds());
        let Config { slice_bytes_max, piece_bytes_max, inflight_max, .. } = self.config;
        Capabilities::new(features)
            .with_slice_bytes(piece_bytes_max.min(slice_bytes_max), slice_bytes_max)
            .with_inflight_max(inflight_max)
            .with_export_bytes_max(EXPORT_BYTES_MAX as u32)
            .with_memory(MemoryKinds::HOST | kinds)
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        let (initiator, _, peers, mut cx) = self.split();
        let room = initiator.room();
        let accepted = accept_prefix(batch, room, |slice| initiator.accept(slice, peers, &mut cx))?;
        self.timers.wake_if(accepted > 0);
        Ok(accepted)
    }

    fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize {
        // While this process did not poll, the peers' answers could not be received: their silence does not
        // count.
        if self.timers.absence(now, self.config.peer_silence_ms_max).is_some() {
            self.peers.forgive(now);
        }
        self.timers.begin(now);
        if self.stages {
            self.run_staging();
        }
        self.feed();
        self.drive_all();
        if self.io.takes_connections() {
            let (_, target, _, mut cx) = self.split();
            target.accept_all(&mut cx);
        }
        if self.timers.is_due() {
            self.run_timers();
        }
        if self.stages {
            self.run_staging();
        }
        self.feed();
        self.initiator.fetch(out)
    }

    fn poll_at(&self) -> Option<Instant> {
        self.timers.next_poll(self.initiator.has_completions())
    }

    fn event_source(&self) -> Option<EventSource> {
        Some(EventSource(self.io.raw_fd()))
    }

    fn activity(&self) -> u64 {
        self.io.stats().receives + self.io.stats().sends
    }

    fn cancel(&mut self, token: Token) -> Result<(), Error> {
        let (initiator, _, peers, mut cx) = self.split();
        initiator.cancel(token, peers, &mut cx)
    }

    fn fence(&mut self, token: Token, remote: RemoteRegionId) -> Result<(), Error> {
        let (initiator, _, peers, mut cx) = self.split();
        initiator.fence(token, remote, peers, &mut cx)
    }

    /// Also true for a peer whose last connection this target closed because it was idle: the peer may be
    /// alive.
    fn is_connected(&self, peer: u64) -> bool {
        peer != 0 && self.target.has_peer(peer)
    }

    fn expel(&mut self, peer: u64, mode: ExpelMode) -> Result<bool, Error> {
        let (_, target, _, mut cx) = self.split();
        target.expel(peer, mode, &mut cx)
    }
}

/// Whether the CPU can access the memory.
const fn is_host(span: MemSpan) -> bool {
    span.location().kind().contains(MemoryKinds::HOST)
}

/// A caller may move the transport to another thread.
const fn is_send<T: Send>() {}
const _: () = is_send::<TcpTransport>();
