//! Own operations: they are accepted, wait for a connection to their peer, are exchanged one after the other
//! on each connection, and completed.
//!
//! ```text
//!   accept ─▶ queue ─▶ exchange ─▶ complete ─▶ fetch
//!               ▲         │
//!               ├─ resent ┤ the idle connection had been closed
//!               └─ asking ┘ refused, or not reachable: the descriptor is fetched again
//! ```
//!
//! One slice is one exchange. A connection on which an exchange was not completed is closed.

mod connection;
mod exchange;
mod lookup;
mod peer;
mod settle;

pub use lookup::Lookup;

use std::io;
use std::sync::Arc;

use te_core::{Access, Completion, Error, ErrorKind, Instant, Op, RemoteRegionId, Slice, Token};
use te_fabric::net::{error_of, peer_dead, reset_on_close, set_liveness, socket, start_connect};
use te_fabric::operation::accept_prefix;
use te_fabric::peer::{Attempt, Refusal};
use te_fabric::timers::Earliest;
use te_fabric::{Epoll, Event, Interest, Regions, RemoteRegion, RemoteRegions, Slab, Table, Timers};

use self::connection::{Connection, Phase};
use self::exchange::{Advance, Exchange};
use self::lookup::Lookups;
use self::peer::{Doubts, Ext, Operation, Operations, Peer, Place};
use crate::config::Config;
use crate::export::Export;
use crate::header::{Request, Version};
use crate::sys::Memory;

/// The name of the answers of the look-up thread in the poller.
const ANSWERS: u64 = u64::MAX;
const EVENTS_MAX: usize = 128;
/// Fences whose ends were not fetched.
const FENCES_MAX: usize = 64;

/// Counters of the rail's own operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct InitiatorStats {
    /// Data connections that were opened.
    pub connections_opened: u64,
    /// Slices that were applied.
    pub applied: u64,
    /// Slices that were not, or whose end is unknown.
    pub failed: u64,
    /// Times that a target has refused a range.
    pub refused: u64,
    /// Times that a descriptor was fetched again.
    pub lookups: u64,
    /// Bytes that were sent and received, headers and statuses included.
    pub bytes: u64,
}

/// A fence whose end was not fetched.
#[derive(Clone, Copy, Debug)]
struct Fence {
    token: Token,
    remote_region: u32,
    /// Bytes of a WRITE that had ended before may still land.
    in_doubt: bool,
}

/// The operations of a transport, and everything that they need.
#[derive(Debug)]
pub(crate) struct Initiator {
    config: Config,
    epoll: Epoll,
    lookups: Option<Lookups>,
    pub(crate) regions: Regions<Memory>,
    /// Each with the first address of the range at its peer.
    remote_regions: RemoteRegions<u64>,
    operations: Operations,
    peers: Table<Peer>,
    doubts: Doubts,
    connections: Slab<Connection>,
    timers: Timers,
    /// Peers with operations that wait for a connection.
    listed: Vec<u32>,
    fences: Vec<Fence>,
    stats: InitiatorStats,
}

impl Initiator {
    /// An initiator without peers. `lookup` finds descriptors again.
    ///
    /// # Errors
    /// The system refused a thread or a file descriptor.
    pub(crate) fn new(config: &Config, lookup: Option<Arc<dyn Lookup>>) -> io::Result<Self> {
        let epoll = Epoll::new(EVENTS_MAX)?;
        let lookups = lookup.map(Lookups::start).transpose()?;
        if let Some(lookups) = &lookups {
            epoll.add(lookups.ready(), ANSWERS, Interest::READ)?;
        }
        Ok(Self {
            epoll,
            lookups,
            regions: Regions::new(config.regions_max),
            remote_regions: RemoteRegions::new(config.remote_regions_max),
            operations: Operations::new(config.inflight_max, 0),
            peers: Table::new(config.remote_regions_max),
            doubts: Doubts::default(),
            connections: Slab::new(),
            timers: Timers::new(),
            listed: Vec::new(),
            fences: Vec::with_capacity(FENCES_MAX),
            stats: InitiatorStats::default(),
            config: config.clone(),
        })
    }

    pub(crate) const fn config(&self) -> &Config {
        &self.config
    }

    pub(crate) const fn stats(&self) -> InitiatorStats {
        self.stats
    }

    /// Open connections, and those that are being opened.
    pub(crate) fn connections(&self) -> usize {
        self.connections.len()
    }

    pub(crate) fn raw_fd(&self) -> i32 {
        self.epoll.raw_fd()
    }

    pub(crate) fn poll_at(&self) -> Option<Instant> {
        self.timers.next_poll(self.operations.has_completions() || !self.fences.is_empty())
    }
}

/// Calls of the transport's user.
impl Initiator {
    pub(crate) fn attach(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), Error> {
        self.remote_regions.vacant(id.index)?;
        let export = Export::parse(blob).map_err(|_| Error::new(ErrorKind::InvalidArgument))?;
        let known = self.peers.iter().find(|(_, peer)| peer.is_of(&export));
        let number = match known.map(|(number, _)| number) {
            Some(number) => number,
            None => self.peers.add(Peer::new(&export, self.doubts.contains(export.life)))?,
        };
        if let Some(peer) = self.peers.get_mut(number) {
            peer.regions += 1;
        }
        let mut access = export.access;
        if self.speaks(export.version) == Version::V1 && !self.config.allow_unacknowledged_v1 {
            access.remove(Access::REMOTE_WRITE);
        }
        let remote = RemoteRegion {
            generation: id.generation,
            peer: number,
            region: 0,
            region_generation: 0,
            key: 0,
            len: export.len,
            location: te_core::Location::Host,
            access,
            pins: 0,
            ext: export.addr,
        };
        self.remote_regions.insert(id.index, remote)
    }

    /// The version that is spoken to a peer of `version`.
    const fn speaks(&self, version: Version) -> Version {
        if self.config.force_v1 { Version::V1 } else { version }
    }

    pub(crate) fn detach(&mut self, id: RemoteRegionId) -> Result<(), Error> {
        let number = self.remote_regions.detach(id)?.peer;
        let Some(peer) = self.peers.get_mut(number) else { return Ok(()) };
        peer.regions -= 1;
        if peer.regions > 0 {
            return Ok(());
        }
        for index in peer.connections.into_iter().flatten() {
            self.connections.remove(index);
        }
        self.listed.retain(|listed| *listed != number);
        if let Some(peer) = self.peers.remove(number) {
            self.doubts.remember(&peer);
        }
        Ok(())
    }

    pub(crate) fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        let room = self.operations.room();
        let accepted = accept_prefix(batch, room, |slice| self.accept(slice))?;
        self.timers.wake_if(accepted > 0);
        Ok(accepted)
    }

    fn accept(&mut self, slice: &Slice) -> Result<(), Error> {
        if slice.len == 0 || slice.len > self.config.slice_bytes_max {
            return Err(ErrorKind::InvalidArgument.into());
        }
        let region = self.regions.check_local(slice)?;
        let local = region.ext.part(slice.local.offset, slice.len.into())?;
        let number = self.remote_regions.check_remote(slice)?.peer;
        let slot = self.operations.insert(Operation::new(slice, number, Ext::new(local)));
        let slot = slot.ok_or(Error::new(ErrorKind::Full))?;
        self.regions.pin(slice.local.region.index);
        self.remote_regions.pin(slice.remote.region.index);
        self.enqueue(slot);
        Ok(())
    }

    /// Puts an operation, which is in no queue, into the queue of its peer.
    fn enqueue(&mut self, slot: u32) {
        let Some(operation) = self.operations.get_mut(slot) else { return };
        operation.ext.place = Place::Queue;
        let number = operation.peer;
        if let Some(peer) = self.peers.get_mut(number) {
            self.operations.push_back(&mut peer.queue, slot);
        }
        self.list(number);
    }

    fn list(&mut self, number: u32) {
        if let Some(peer) = self.peers.get_mut(number)
            && !std::mem::replace(&mut peer.listed, true)
        {
            self.listed.push(number);
        }
    }

    /// L3: ends a slice at once. Its connection is closed if the target knows of it.
    pub(crate) fn cancel(&mut self, token: Token) -> Result<(), Error> {
        let Some(slot) = self.operations.position(|operation| operation.token == token) else {
            return match self.operations.is_completed(token) {
                true => Ok(()),
                false => Err(ErrorKind::NotFound.into()),
            };
        };
        let Some(operation) = self.operations.get(slot) else { return Ok(()) };
        let mut in_doubt = operation.ext.in_doubt;
        match operation.ext.place {
            Place::Connection(index) => in_doubt |= self.take_back(index),
            Place::Queue | Place::Asking => self.unlink(slot),
        }
        self.finish(slot, Some(ErrorKind::Canceled.into()), in_doubt);
        self.timers.wake();
        Ok(())
    }

    /// Takes the exchange off a connection. Returns whether bytes of a WRITE may still land.
    fn take_back(&mut self, index: u32) -> bool {
        let Some(connection) = self.connections.get_mut(index) else { return false };
        let Phase::Busy(exchange) = std::mem::replace(&mut connection.phase, Phase::Idle) else {
            return false;
        };
        if exchange.is_unsent() {
            let number = connection.peer;
            self.watch(index, false);
            self.list(number);
            return false;
        }
        self.close(index, true);
        exchange.request().op == Op::Write && exchange.may_land()
    }

    /// A fence succeeds while no WRITE to the peer has ended in doubt: then nothing is under way but slices
    /// in flight. The protocol has no means to find out more.
    pub(crate) fn fence(&mut self, token: Token, remote: RemoteRegionId) -> Result<(), Error> {
        let number = self.remote_regions.find(remote)?.peer;
        if self.fences.len() >= FENCES_MAX {
            return Err(ErrorKind::Full.into());
        }
        let in_doubt = self.peers.get(number).is_some_and(|peer| peer.in_doubt);
        self.remote_regions.pin(remote.index);
        self.fences.push(Fence { token, remote_region: remote.index, in_doubt });
        Ok(())
    }
}

/// Polling.
impl Initiator {
    pub(crate) fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize {
        // While this process did not poll, no answer could be received: the peers were not silent then.
        let was_away = self.timers.absence(now, self.config.silence_ms_max).is_some();
        self.timers.begin(now);
        if was_away {
            let now = self.timers.now();
            for index in 0..self.connections.bound() {
                if let Some(connection) = self.connections.get_mut(index) {
                    connection.moved_at = now;
                }
            }
        }
        self.feed();
        // An error here is one of the poller's own, and would come again: deadlines end what waits.
        for at in 0..self.epoll.ready().unwrap_or(0) {
            self.drive(self.epoll.event(at));
        }
        if self.timers.is_due() {
            self.look();
        }
        self.feed();
        let count = self.operations.fetch(out);
        count + self.end_fences(&mut out[count..])
    }

    fn end_fences(&mut self, out: &mut [Completion]) -> usize {
        let count = self.fences.len().min(out.len());
        for (to, fence) in out.iter_mut().zip(self.fences.drain(..count)) {
            self.remote_regions.unpin(fence.remote_region);
            *to = match fence.in_doubt {
                false => Completion::applied(fence.token),
                true => Completion::unknown(fence.token, ErrorKind::Unsupported.into()),
            };
        }
        count
    }

    /// Gives connections to operations that wait for one.
    fn feed(&mut self) {
        let mut at = 0;
        while let Some(&number) = self.listed.get(at) {
            self.feed_peer(number);
            match self.peers.get_mut(number) {
                Some(peer) if !peer.queue.is_empty() => at += 1,
                peer => {
                    peer.into_iter().for_each(|peer| peer.listed = false);
                    self.listed.swap_remove(at);
                }
            }
        }
    }

    fn feed_peer(&mut self, number: u32) {
        loop {
            let Some(peer) = self.peers.get(number) else { return };
            if peer.restarted {
                self.fail_queue(number, ErrorKind::PeerRestarted.into());
                return;
            }
            let Some(slot) = peer.queue.first() else { return };
            let is_idle = |index: &u32| self.connections.get(*index).is_some_and(Connection::is_idle);
            match peer.connections.iter().flatten().copied().find(is_idle) {
                Some(index) if self.was_closed(slot, index) => self.close(index, false),
                Some(index) => self.begin(slot, index),
                None => return self.open(number),
            }
        }
    }

    /// Whether the peer has closed an idle connection, as it may at any time. Only WRITEs ask: what was sent
    /// after that would leave a doubt whether it lands.
    fn was_closed(&self, slot: u32, index: u32) -> bool {
        let is_write = self.operations.get(slot).is_some_and(|operation| operation.op == Op::Write);
        let Some(connection) = self.connections.get(index).filter(|connection| is_write && connection.used)
        else {
            return false;
        };
        !connection.socket.peek(&mut [0]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Begins the exchange of an operation that is in the queue.
    fn begin(&mut self, slot: u32, index: u32) {
        self.unlink(slot);
        let now = self.timers.now();
        let Some(operation) = self.operations.get_mut(slot) else { return };
        operation.ext.place = Place::Connection(index);
        let (number, op, local) = (operation.peer, operation.op, operation.ext.local);
        let base = self.remote_regions.get(operation.remote_region).map_or(0, |remote| remote.ext);
        let addr = base + operation.remote_offset;
        let version = self.peers.get(number).map_or(Version::V2, Peer::version);
        let request = Request { op, version: self.speaks(version), addr, len: local.len() as u64 };
        if let Some(connection) = self.connections.get_mut(index) {
            connection.phase = Phase::Busy(Exchange::new(slot, request, local));
            connection.moved_at = now;
        }
        self.timers.changed();
        self.advance(index);
    }

    /// Opens another connection to the peer, unless one is being opened.
    fn open(&mut self, number: u32) {
        let now = self.timers.now();
        let Some(peer) = self.peers.get(number) else { return };
        let is_connecting = |index: &u32| self.connections.get(*index).is_some_and(Connection::is_connecting);
        let Some(vacant) = peer.vacant(self.config.connections) else { return };
        let is_first = peer.connections.iter().all(Option::is_none);
        let is_full = !is_first && self.connections.len() >= self.config.connections_max as usize;
        if is_full || peer.connections.iter().flatten().any(is_connecting) {
            return;
        }
        let (at, address) = match peer.contact.attempt(now) {
            Attempt::To(at, address) => (at, address),
            Attempt::Later => return self.timers.changed(),
            Attempt::Never(error) => return self.fail_queue(number, error),
        };
        match self.connect(number, at, address) {
            Ok(index) => {
                if let Some(peer) = self.peers.get_mut(number) {
                    peer.connections[vacant] = Some(index);
                }
            }
            Err(error) => self.refused(number, at, error_of(&error)),
        }
    }

    fn connect(&mut self, peer: u32, address: u8, to: std::net::SocketAddr) -> io::Result<u32> {
        let socket = socket(to)?;
        // Without these, answers are slower, and a host that vanished is noticed later.
        let _ = socket.set_nodelay(true).and(set_liveness(&socket, self.config.silence_ms_max));
        start_connect(&socket, to)?;
        let (index, name) = self.connections.reserve();
        if let Err(error) = self.epoll.add(&socket, name, Interest::BOTH) {
            self.connections.release(index);
            return Err(error);
        }
        let (phase, interest, moved_at) = (Phase::Connecting, Interest::BOTH, self.timers.now());
        let connection = Connection { socket, peer, address, phase, interest, moved_at, used: false };
        self.connections.put(index, connection);
        self.stats.connections_opened += 1;
        self.timers.changed();
        Ok(index)
    }

    fn drive(&mut self, event: Event) {
        if event.token == ANSWERS {
            return self.take_answers();
        }
        // A connection that was closed in this poll has another name by now.
        let Some(index) = self.connections.index(event.token) else { return };
        let Some(connection) = self.connections.get_mut(index) else { return };
        match connection.phase {
            Phase::Connecting if event.writable => self.connected(index),
            Phase::Connecting => {}
            // The peer has closed it, or sends what nothing asked for.
            Phase::Idle => self.close(index, false),
            Phase::Busy(_) => self.advance(index),
        }
    }

    /// The attempt to connect has ended.
    fn connected(&mut self, index: u32) {
        let Some(connection) = self.connections.get_mut(index) else { return };
        let (number, address) = (connection.peer, connection.address);
        let failed = match connection.socket.take_error() {
            Ok(None) => None,
            Ok(Some(error)) | Err(error) => Some(error),
        };
        if let Some(error) = failed {
            self.close(index, false);
            return self.refused(number, address, error_of(&error));
        }
        connection.phase = Phase::Idle;
        connection.moved_at = self.timers.now();
        self.watch(index, false);
        if let Some(peer) = self.peers.get_mut(number) {
            peer.contact.welcomed(address);
        }
        self.list(number);
    }

    /// Continues the exchange on a connection.
    fn advance(&mut self, index: u32) {
        let now = self.timers.now();
        let Some(connection) = self.connections.get_mut(index) else { return };
        let Phase::Busy(exchange) = &mut connection.phase else { return };
        let before = exchange.moved();
        let advance = exchange.advance(&connection.socket);
        let moved = exchange.moved() - before;
        if moved > 0 {
            connection.moved_at = now;
            self.stats.bytes += moved;
        }
        match advance {
            Ok(Advance::Pending(wants_write)) => self.watch(index, wants_write),
            Ok(Advance::Done) => self.exchanged(index),
            Ok(Advance::Rejected) => self.rejected(index),
            Err(error) => self.broken(index, error),
        }
    }

    /// Lets the poller watch for what the connection needs.
    fn watch(&mut self, index: u32, wants_write: bool) {
        let name = self.connections.name(index);
        let Some(connection) = self.connections.get_mut(index) else { return };
        let wanted = connection.wanted(wants_write);
        if wanted != connection.interest {
            connection.interest = wanted;
            if let Err(error) = self.epoll.modify(&connection.socket, name, wanted) {
                self.broken(index, peer_dead(error_of(&error)));
            }
        }
    }

    /// Closes a connection. With `reset`, the kernel discards what it has not sent.
    fn close(&mut self, index: u32, reset: bool) {
        let Some(connection) = self.connections.remove(index) else { return };
        if reset {
            reset_on_close(&connection.socket);
        }
        if let Some(peer) = self.peers.get_mut(connection.peer) {
            peer.forget(index);
        }
    }

    /// An address of the peer could not be reached.
    fn refused(&mut self, number: u32, address: u8, error: Error) {
        let now = self.timers.now();
        let Some(peer) = self.peers.get_mut(number) else { return };
        match peer.contact.refused(address, error, now, self.config.reconnect_ms_max) {
            Refusal::NextAddress => self.timers.wake(),
            Refusal::Final(error) => self.fail_queue(number, error),
            Refusal::Paused(error) => self.unreachable(number, error),
        }
        self.timers.changed();
    }

    /// Looks at all deadlines.
    fn look(&mut self) {
        self.timers.looking();
        let now = self.timers.now();
        let ms = |ms: u32| core::time::Duration::from_millis(ms.into());
        let Config { connect_ms_max, silence_ms_max, idle_ms_max, .. } = self.config;
        let mut next = Earliest::default();
        for index in 0..self.connections.bound() {
            let Some(connection) = self.connections.get(index) else { continue };
            let deadline = connection.moved_at
                + match connection.phase {
                    Phase::Connecting => ms(connect_ms_max),
                    Phase::Idle => ms(idle_ms_max),
                    Phase::Busy(_) => ms(silence_ms_max),
                };
            if now < deadline {
                next.note(Some(deadline));
                continue;
            }
            let timed_out = Error::with_code(ErrorKind::PeerDead, libc::ETIMEDOUT);
            match connection.phase {
                Phase::Connecting => {
                    let (number, address) = (connection.peer, connection.address);
                    self.close(index, false);
                    self.refused(number, address, timed_out);
                }
                Phase::Idle => self.close(index, false),
                Phase::Busy(_) => self.broken(index, timed_out),
            }
        }
        for &number in &self.listed {
            next.note(self.peers.get(number).and_then(|peer| peer.contact.paused_until()));
        }
        self.timers.looked(next.get());
    }
}
