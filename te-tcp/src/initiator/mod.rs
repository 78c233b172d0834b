//! Slices of this transport: they are accepted, cut into pieces, framed onto connections, and settled by the
//! answers. The connections are opened while there is work for them, and given up when the peer is silent.
//!
//! ```text
//!   accept ──▶ slices ──▶ framing ──▶ connection ─────▶ io
//!                 ▲                    │
//!   fetch ◀───────┴───── answers ◀─────┘
//! ```
//!
//! A cancelled slice releases its memory at once, or when hops to and from a device's memory have ended;
//! answers that still arrive for it are discarded. When a connection ends, its pieces are settled according
//! to how much of them was sent.

mod answers;
mod connection;
mod framing;
mod slices;
mod staged;
#[cfg(test)]
mod tests;

pub(crate) use connection::Greeting;

use core::net::SocketAddr;
use std::io;

use te_core::{Completion, Error, ErrorKind, Instant, Op, RemoteRegionId, Slice, Token};
use te_fabric::net::{error_of, peer_dead, reset_on_close};
use te_fabric::peer::{Attempt, Refusal};
use te_fabric::timers::Earliest;
use te_fabric::{Export, Interest, Slab};
use zerocopy::IntoBytes;

use self::answers::Answers;
use self::connection::{ConnectionEnd, Own, OwnConnection, Phase};
use self::framing::Frame;
use self::slices::Slices;
use self::staged::{Stagings, release};
use crate::config::{CONNECTIONS_PER_PEER_MAX, Config};
#[cfg(feature = "uring")]
use crate::connection::{Destination, shared_receive};
use crate::connection::{OwnName, Reading};
use crate::context::Context;
use crate::frame::{ConnectionEntry, ENTRIES_MAX, Header, Kind};
use crate::io::{Io, RECEIVE_BYTES_MAX, tune_to_peer};
use crate::peers::{Peers, Sent};
use crate::region::Regions;
use crate::stats::Stats;
#[cfg(feature = "uring")]
use crate::sys::Job;

/// The initiating half of a transport.
pub(crate) struct Initiator {
    greeting: Greeting,
    slices: Slices,
    connections: Slab<OwnConnection, OwnName>,
    frame: Frame,
    /// Staging slots and hops of slices whose local memory is a device's.
    staging: Stagings,
    /// Counts the rounds in which staging slots were given out, so that each round begins with another peer.
    /// Wraps.
    first_served: u32,
    /// Connections opened so far. Wraps.
    connection_generation: u32,
    /// Number of the last FENCE that was sent.
    last_fence: u64,
    stats: Stats,
}

impl Initiator {
    /// An initiator with room for the slices, remote regions and fences that `config` allows.
    pub(crate) fn new(greeting: Greeting, config: &Config) -> Self {
        Self {
            greeting,
            slices: Slices::new(config.remote_regions_max, config.inflight_max, config.fences_max),
            connections: Slab::new(),
            frame: Frame::new(),
            staging: Stagings::new(),
            first_served: 0,
            connection_generation: 0,
            last_fence: 0,
            stats: Stats::default(),
        }
    }

    /// Slices in the table: those that have not completed, and cancelled ones that still wait for answers.
    pub(crate) fn slices_in_flight(&self) -> usize {
        self.slices.len()
    }

    /// Slices that can be accepted now.
    pub(crate) fn room(&self) -> usize {
        self.slices.room()
    }

    pub(crate) fn has_completions(&self) -> bool {
        self.slices.has_completions()
    }

    /// Writes completions to `out`; returns their number.
    pub(crate) fn fetch(&mut self, out: &mut [Completion]) -> usize {
        self.slices.fetch(out)
    }

    /// Counters of slices and of connections that this transport opened.
    pub(crate) const fn stats(&self) -> Stats {
        self.stats.plus(self.slices.stats())
    }
}

/// Calls of the transport's user.
impl Initiator {
    /// Attaches a region of the peer that wrote `export`.
    ///
    /// # Errors
    /// `Full`, `Busy`.
    pub(crate) fn attach(
        &mut self,
        id: RemoteRegionId,
        export: &Export,
        peers: &mut Peers,
    ) -> Result<(), Error> {
        self.slices.attach(id, export, peers)
    }

    /// Detaches a remote region, and removes its peer when that was the peer's last.
    ///
    /// # Errors
    /// `NotFound`, `Stale`, `Busy`.
    pub(crate) fn detach(
        &mut self,
        id: RemoteRegionId,
        peers: &mut Peers,
        cx: &mut Context<'_>,
    ) -> Result<(), Error> {
        let peer = self.slices.detach(id)?;
        if peers.detach(peer) {
            self.give_up(peer, ErrorKind::Canceled.into(), peers, cx);
            peers.remove(peer);
        }
        Ok(())
    }

    /// Accepts a slice; it is sent by the next poll.
    ///
    /// # Errors
    /// Those that [`te_core::Transport::submit`] documents for the first slice of a batch.
    pub(crate) fn accept(
        &mut self,
        slice: &Slice,
        peers: &mut Peers,
        cx: &mut Context<'_>,
    ) -> Result<(), Error> {
        if slice.len == 0 || slice.len > cx.config.slice_bytes_max {
            return Err(ErrorKind::InvalidArgument.into());
        }
        let peer = self.slices.accept(slice, cx.regions, peers)?;
        peers.list(peer, cx.timers);
        Ok(())
    }

    /// Starts a fence towards the peer that owns `remote`; it is sent by the next poll.
    ///
    /// # Errors
    /// `NotFound`, `Stale`, `Full`.
    pub(crate) fn fence(
        &mut self,
        token: Token,
        remote: RemoteRegionId,
        peers: &mut Peers,
        cx: &mut Context<'_>,
    ) -> Result<(), Error> {
        let peer = self.slices.begin_fence(token, remote, peers)?;
        peers.list(peer, cx.timers);
        cx.timers.wake();
        Ok(())
    }

    /// L3: ends a slice, at once unless hops to or from its memory run. Answers that still arrive for it are
    /// discarded.
    ///
    /// # Errors
    /// `NotFound`: there is no such slice, or its completion was already fetched.
    pub(crate) fn cancel(
        &mut self,
        token: Token,
        peers: &mut Peers,
        cx: &mut Context<'_>,
    ) -> Result<(), Error> {
        let Some(slot) = self.slices.find(token)? else { return Ok(()) };
        let Self { slices, staging, .. } = self;
        let on_connections = slices.begin_cancel(slot, peers, |piece| release(piece, staging));
        if let Some((op, Some(peer))) = on_connections {
            for index in
                peers.get(peer).map_or([None; CONNECTIONS_PER_PEER_MAX as usize], |peer| peer.connections)
            {
                self.cut_connection(index, slot, op, peers, cx);
            }
        }
        self.slices.end_cancel(slot, peers, cx.regions);
        cx.timers.wake();
        Ok(())
    }

    /// Closes every connection, even in the middle of a frame.
    #[cfg(feature = "testkit")]
    pub(crate) fn close_connections(&mut self, peers: &mut Peers, cx: &mut Context<'_>) {
        let error = Error::with_code(ErrorKind::PeerDead, libc::ECONNRESET);
        for index in 0..self.connections.bound() {
            self.end(index, ConnectionEnd::Lost(error), peers, cx);
        }
    }

    fn cut_connection(
        &mut self,
        index: Option<u32>,
        slot: u32,
        op: Op,
        peers: &mut Peers,
        cx: &mut Context<'_>,
    ) {
        let Some(index) = index else { return };
        let Some(connection) = self.connections.get_mut(index) else { return };
        let cut = connection.cut(slot, op, cx.config.detached_bytes_max);
        if cut.touched {
            self.slices.touch(slot);
        }
        if !cut.usable {
            self.end(index, ConnectionEnd::Lost(Error::new(ErrorKind::Rail)), peers, cx);
        }
    }
}

/// Sending.
impl Initiator {
    /// Frames and sends what waits, for every listed peer.
    pub(crate) fn feed(&mut self, peers: &mut Peers, cx: &mut Context<'_>) {
        let mut at = 0;
        while let Some(peer) = peers.listed(at) {
            self.feed_peer(peer, peers, cx);
            at = peers.had_turn(at);
        }
    }

    fn feed_peer(&mut self, number: u32, peers: &mut Peers, cx: &mut Context<'_>) {
        while self.send_fence(number, peers, cx) {}
        let mut fed = [None; CONNECTIONS_PER_PEER_MAX as usize];
        let mut wanting = false;
        while let Some(peer) = peers.get_mut(number)
            && let Some(op) = self.slices.next(peer)
        {
            let Some((connection, index)) = self.pick_connection(&peer.connections, op) else {
                wanting = true;
                break;
            };
            let Some(open) = self.connections.get_mut(index) else { break };
            if !self.frame.send(op, peer, open, &mut self.slices, &self.staging, cx.config) {
                break;
            }
            self.stats.frames_sent += 1;
            fed[connection] = Some(index);
        }
        for index in fed.into_iter().flatten() {
            self.drive_connection(index, Reading::No, false, peers, cx);
        }
        if wanting || peers.get(number).is_some_and(|peer| peer.has_work() && peer.connection_count() == 0) {
            self.open_connection(number, peers, cx);
        }
    }

    /// The live connection with room for another frame and the fewest unanswered bytes.
    fn pick_connection(&self, connections: &[Option<u32>], op: Op) -> Option<(usize, u32)> {
        let open = connections.iter().enumerate().filter_map(|(number, index)| {
            let connection = self.connections.get((*index)?)?;
            connection.takes(op).then_some((number, (*index)?, connection.load()))
        });
        open.min_by_key(|&(.., load)| load).map(|(number, index, _)| (number, index))
    }

    /// Sends one fence that was not sent yet, if a live connection has room. Returns whether one was sent.
    fn send_fence(&mut self, number: u32, peers: &mut Peers, cx: &mut Context<'_>) -> bool {
        let Some(peer) = peers.get_mut(number) else { return false };
        let Some(fence) = peer.fences.iter_mut().find(|fence| fence.sent.is_none()) else { return false };
        let mut connections = [ConnectionEntry::new(0, 0); ENTRIES_MAX];
        let (mut count, mut live) = (0, 0_u32);
        for connection in peer.connections.iter().flatten().filter_map(|&index| self.connections.get(index)) {
            connections[count] =
                ConnectionEntry::new(u16::from(connection.role.number), connection.role.generation);
            count += 1;
            if connection.role.is_live() {
                if !connection.outbox.has_room(0) {
                    return false;
                }
                live |= 1 << connection.role.number;
            }
        }
        if live == 0 {
            return false;
        }
        self.last_fence += 1;
        fence.sent = Some(Sent { id: self.last_fence, connections: live });
        let header = Header::new(Kind::Fence, 0, count as u16, self.last_fence);
        let indexes = peer.connections;
        for (_, index) in indexes.into_iter().enumerate().filter(|(number, _)| live & 1 << number != 0) {
            let Some(index) = index else { continue };
            if let Some(connection) = self.connections.get_mut(index) {
                connection.outbox.push_head(&[header.as_bytes(), connections[..count].as_bytes()]);
                self.drive_connection(index, Reading::No, false, peers, cx);
            }
        }
        true
    }
}

/// Work on single connections.
impl Initiator {
    /// Works on a connection after an event.
    pub(crate) fn drive(
        &mut self,
        name: OwnName,
        reading: Reading,
        writable: bool,
        peers: &mut Peers,
        cx: &mut Context<'_>,
    ) {
        if let Some(index) = self.connections.index(name) {
            self.drive_connection(index, reading, writable, peers, cx);
        }
    }

    /// Reads a connection without asking the poller first. Returns false when it is no longer active, or has
    /// ended.
    pub(crate) fn drive_active(&mut self, name: OwnName, peers: &mut Peers, cx: &mut Context<'_>) -> bool {
        let Some(index) = self.connections.index(name) else { return false };
        match self.connections.get_mut(index) {
            Some(connection) if connection.is_active() && !connection.role.is_awaited() => {
                connection.read_nothing();
                connection.is_active()
            }
            Some(connection) if connection.is_active() => {
                self.drive_connection(index, Reading::Yes, false, peers, cx)
            }
            _ => false,
        }
    }

    /// Whether the connection is worth reading without asking the poller first.
    #[cfg(feature = "uring")]
    pub(crate) fn is_active(&self, name: OwnName) -> bool {
        self.connections
            .index(name)
            .and_then(|index| self.connections.get(index))
            .is_some_and(|connection| connection.is_active())
    }

    /// Works on a connection. Returns whether it is worth reading without asking the poller first.
    fn drive_connection(
        &mut self,
        index: u32,
        reading: Reading,
        writable: bool,
        peers: &mut Peers,
        cx: &mut Context<'_>,
    ) -> bool {
        let Some(connection) = self.connections.get_mut(index) else { return false };
        let Context { config, io, regions, timers } = &mut *cx;
        let answers =
            Answers { slices: &mut self.slices, staging: &mut self.staging, peers, regions, timers };
        match (Turn { greeting: &self.greeting, answers, config, io }).run(connection, reading, writable) {
            Ok(()) => {
                cx.io.settle_interest(connection);
                connection.is_active()
            }
            Err(end) => {
                self.end(index, end, peers, cx);
                false
            }
        }
    }
}

/// Work on one connection.
struct Turn<'a> {
    greeting: &'a Greeting,
    answers: Answers<'a>,
    config: &'a Config,
    io: &'a mut Io,
}

impl Turn<'_> {
    /// Continues the handshake, takes in what has arrived, and sends what waits.
    fn run(
        mut self,
        connection: &mut OwnConnection,
        reading: Reading,
        writable: bool,
    ) -> Result<(), ConnectionEnd> {
        if writable {
            if connection.blocked {
                // The peer makes room, so it reads: a sign of life. Bytes that merely fit into the socket are
                // none.
                self.answers.sign_of_life(connection.role.peer);
            }
            connection.blocked = false;
            if connection.role.phase == Phase::Connecting {
                connection.socket.take_error().map_err(|error| ConnectionEnd::Refused(error_of(&error)))?;
                self.greet(connection);
            }
        }
        if !connection.role.is_up() {
            return Ok(());
        }
        if reading.is_wanted() {
            self.read(connection, reading)?;
        }
        if self.io.send(connection, Own::progress).map_err(|error| ConnectionEnd::Lost(error_of(&error)))? {
            // An answer is likely to arrive soon.
            self.io.mark_active(connection);
        }
        Ok(())
    }

    fn greet(&self, connection: &mut OwnConnection) {
        let same_host = tune_to_peer(&connection.socket, self.config);
        let target =
            self.answers.peers.get(connection.role.peer).map_or(0, |peer| peer.contact.incarnation());
        connection.greet(self.greeting, target, same_host, self.config.window_bytes_max);
    }

    fn read(&mut self, connection: &mut OwnConnection, mut reading: Reading) -> Result<(), ConnectionEnd> {
        let mut budget = RECEIVE_BYTES_MAX;
        loop {
            let received = match self.io.receive(connection, &mut reading) {
                Ok(Some(received)) => received,
                Ok(None) => return Ok(()),
                Err(error) if connection.role.is_live() => return Err(ConnectionEnd::Lost(error_of(&error))),
                Err(error) => return Err(ConnectionEnd::Refused(error_of(&error))),
            };
            self.answers.sign_of_life(connection.role.peer);
            self.answers.take(connection)?;
            budget = budget.saturating_sub(received.bytes);
            if received.drained || budget == 0 {
                let drained = received.drained && !connection.finished;
                self.io.stopped_reading(connection, drained, self.answers.timers);
                return Ok(());
            }
        }
    }
}

/// One receive for several connections.
#[cfg(feature = "uring")]
impl Initiator {
    /// See [`shared_receive::set_finished`].
    pub(crate) fn set_finished(&mut self, name: OwnName) {
        shared_receive::set_finished(&mut self.connections, name);
    }

    /// See [`shared_receive::receives`].
    pub(crate) fn receives<'a>(
        &'a mut self,
        names: &[u64],
        indexes: &'a mut [u32],
    ) -> impl Iterator<Item = (u64, Job<'a, Destination>)> {
        shared_receive::receives(&mut self.connections, names, indexes, |connection| connection.role.is_up())
    }

    /// See [`shared_receive::arrived`].
    pub(crate) fn arrived(
        &mut self,
        name: OwnName,
        offered: usize,
        result: io::Result<usize>,
    ) -> Option<Reading> {
        shared_receive::arrived(&mut self.connections, name, offered, result)
    }
}

/// Opening and closing connections.
impl Initiator {
    /// Opens another connection to the peer, if the limits and the peer's backoff allow it.
    fn open_connection(&mut self, number: u32, peers: &mut Peers, cx: &mut Context<'_>) {
        let Some(peer) = peers.get_mut(number) else { return };
        let (at, address) = match peer.contact.attempt(cx.now()) {
            Attempt::To(at, address) => (at, address),
            Attempt::Later => return,
            Attempt::Never(error) => {
                self.fail_waiting(number, error, peers, cx);
                return;
            }
        };
        let is_opening =
            |index: &u32| self.connections.get(*index).is_none_or(|connection| !connection.role.is_live());
        let opening = peer.connections.iter().flatten().any(is_opening);
        let Some(vacant) = peer.vacant_connection(cx.config.connections) else { return };
        if opening {
            return;
        }
        let (all, own) = (cx.io.connections(), self.connections.len());
        if all >= cx.config.connections_max as usize && own >= cx.config.connections_kept() {
            self.refused(number, at, ErrorKind::Full.into(), peers, cx);
            return;
        }
        let role = Own::new(number, vacant as u8, at, self.connection_generation.wrapping_add(1));
        match self.start_connection(address, role, cx) {
            Ok(index) => peer.connections[vacant] = Some(index),
            Err(error) => self.refused(number, at, error_of(&error), peers, cx),
        }
    }

    fn start_connection(&mut self, address: SocketAddr, role: Own, cx: &mut Context<'_>) -> io::Result<u32> {
        let socket = cx.io.connect(address, cx.config)?;
        self.connection_generation = role.generation;
        let (index, name) = self.connections.reserve();
        let mut connection = OwnConnection::new(socket, name.raw(), Interest::BOTH, role);
        if let Err(error) = cx.io.watch(&connection) {
            self.connections.release(index);
            return Err(error);
        }
        connection.blocked = true;
        connection.deadline = Some(cx.after_ms(u64::from(cx.config.connect_ms_max)));
        self.connections.put(index, connection);
        self.stats.connections_opened += 1;
        cx.timers.changed();
        Ok(index)
    }

    /// Ends a connection: its pieces are settled according to how much of them was sent.
    fn end(&mut self, index: u32, end: ConnectionEnd, peers: &mut Peers, cx: &mut Context<'_>) {
        let Some(connection) = self.connections.remove(index) else { return };
        reset_on_close(&connection.socket);
        cx.io.forget(&connection);
        let OwnConnection { socket, role, .. } = connection;
        // The socket is closed before its pieces are settled: from here on the kernel neither reads nor
        // writes memory of the slices (L2).
        drop(socket);
        self.stats.connections_lost += 1;
        let number = role.peer;
        log::debug!("connection {} to peer {number} ended: {:?}", role.number, end);
        if let Some(peer) = peers.get_mut(number) {
            peer.connection_lost(usize::from(role.number));
        }
        let error = peer_dead(end.error());
        if end == ConnectionEnd::GoAway {
            self.send_again(number, &role, peers, cx.regions);
            peers.list(number, cx.timers);
            return;
        }
        for piece in role.pieces() {
            release(piece, &mut self.staging);
            self.slices.settle(piece.slot, Some(error), piece.may_have_landed(), peers, cx.regions);
        }
        if let ConnectionEnd::Refused(error) = end {
            self.refused(number, role.address, error, peers, cx);
        }
        peers.list(number, cx.timers);
    }

    /// Queues the pieces of a connection whose target has said that it did not accept them: another
    /// connection sends them as if for the first time.
    fn send_again(&mut self, number: u32, role: &Own, peers: &mut Peers, regions: &mut Regions) {
        for piece in role.pieces() {
            if self.slices.live(piece.slot).is_some()
                && let Some(peer) = peers.get_mut(number)
            {
                peer.ready.push_back(*piece);
            } else {
                // The slice was cancelled and has completed; only its slot is left.
                release(piece, &mut self.staging);
                self.slices.settle(piece.slot, None, false, peers, regions);
            }
        }
    }

    /// Notes that an attempt to open a connection to address number `at` has failed.
    fn refused(&mut self, number: u32, at: u8, error: Error, peers: &mut Peers, cx: &mut Context<'_>) {
        let Some(peer) = peers.get_mut(number) else { return };
        cx.timers.changed();
        let error = match peer.contact.refused(at, error, cx.now(), cx.config.reconnect_ms_max) {
            Refusal::Final(error) => {
                self.give_up(number, error, peers, cx);
                return;
            }
            Refusal::NextAddress => {
                cx.timers.wake();
                return;
            }
            Refusal::Paused(error) => error,
        };
        if error.kind == ErrorKind::Full {
            // Another connection will fall idle and make room. Slices wait for that as long as they would
            // wait for a connection to be established.
            let since = *peer.full_since.get_or_insert(cx.now());
            if cx.now().nanos_since(since) < u64::from(cx.config.connect_ms_max) * 1_000_000 {
                return;
            }
            peer.full_since = None;
        }
        if peer.connection_count() == 0 {
            self.fail_waiting(number, error, peers, cx);
        }
    }

    /// Ends every connection to the peer and everything that waits for it: the peer is dead, or another
    /// incarnation has its address.
    fn give_up(&mut self, number: u32, error: Error, peers: &mut Peers, cx: &mut Context<'_>) {
        let Some(peer) = peers.get(number) else { return };
        for index in peer.connections.into_iter().flatten() {
            self.end(index, ConnectionEnd::Lost(error), peers, cx);
        }
        self.fail_waiting(number, error, peers, cx);
    }

    /// Ends everything that waits for a connection to this peer: none can be opened.
    fn fail_waiting(&mut self, number: u32, error: Error, peers: &mut Peers, cx: &mut Context<'_>) {
        while let Some(piece) = peers.get_mut(number).and_then(|peer| peer.ready.pop_front()) {
            release(&piece, &mut self.staging);
            self.slices.settle(piece.slot, Some(error), false, peers, cx.regions);
        }
        while self.slices.fail_first(number, error, peers, cx.regions) {}
        let harmless = peers.is_harmless(number);
        while let Some(fence) = peers.pop_fence(number) {
            let completion = if harmless {
                Completion::applied(fence.token)
            } else {
                Completion::unknown(fence.token, error)
            };
            self.slices.end_fence(&fence, completion);
        }
    }
}

/// Deadlines.
impl Initiator {
    /// Closes connections that were not established in time, and gives up peers that are silent. Returns when
    /// to look again.
    pub(crate) fn look(&mut self, peers: &mut Peers, cx: &mut Context<'_>) -> Option<Instant> {
        let mut next = Earliest::default();
        for index in 0..self.connections.bound() {
            let Some(deadline) = self.connections.get(index).and_then(|connection| connection.deadline)
            else {
                continue;
            };
            if cx.now() < deadline {
                next.note(Some(deadline));
            } else {
                let error = Error::with_code(ErrorKind::PeerDead, libc::ETIMEDOUT);
                self.end(index, ConnectionEnd::Refused(error), peers, cx);
            }
        }
        for peer in 0..peers.bound() {
            next.note(self.check_liveness(peer, peers, cx));
        }
        next.note(peers.next_attempt());
        next.get()
    }

    /// Checks when a peer was last heard from, and gives it up after too long a silence. Returns when to look
    /// again.
    fn check_liveness(&mut self, number: u32, peers: &mut Peers, cx: &mut Context<'_>) -> Option<Instant> {
        let (now, limit) = (cx.now(), u64::from(cx.config.peer_silence_ms_max) * 1_000_000);
        let peer = peers.get_mut(number)?;
        if !peer.is_awaited() {
            peer.last_heard = None;
            return None;
        }
        let last_heard = *peer.last_heard.get_or_insert(now);
        if now.nanos_since(last_heard) >= limit / 4 {
            for index in peer.connections.into_iter().flatten() {
                self.keep_alive(index, peers, cx);
            }
        }
        let peer = peers.get_mut(number)?;
        let silent = now.nanos_since(peer.last_heard.unwrap_or(now));
        if silent >= limit && peer.connection_count() > 0 {
            log::warn!("peer {number} is silent for {} ms: given up", silent / 1_000_000);
            peer.contact.back_off(now, cx.config.reconnect_ms_max);
            self.stats.peers_lost += 1;
            self.give_up(number, Error::with_code(ErrorKind::PeerDead, libc::ETIMEDOUT), peers, cx);
            return None;
        }
        let wait = (limit / 4).min(limit.saturating_sub(silent)).max(1_000_000);
        Some(Instant::from_nanos(now.as_nanos() + wait))
    }

    /// Sends a PING to a silent peer, and counts it as heard from when its kernel still acknowledges bytes.
    fn keep_alive(&mut self, index: u32, peers: &mut Peers, cx: &mut Context<'_>) {
        let Some(connection) = self.connections.get_mut(index) else { return };
        if connection.keep_alive()
            && let Some(peer) = peers.get_mut(connection.role.peer)
        {
            peer.last_heard = Some(cx.now());
        }
        self.drive_connection(index, Reading::No, false, peers, cx);
    }
}
