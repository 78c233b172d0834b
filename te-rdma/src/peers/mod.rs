//! Peers as an initiator sees them: the incarnation of each, its addresses, its backoff, and the control
//! connection to it. It does not know slices: those that wait for a peer are in the initiator.
//!
//! ```text
//!   endpoint   one peer
//!   outbound   one control connection: handshake, requests, answers in order
//!   sieve      the choice of the connection that is closed for another one
//! ```

mod endpoint;
pub(crate) mod outbound;
pub(crate) mod sieve;

use core::time::Duration;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::io;
use std::net::SocketAddr;

use te_core::{Error, ErrorKind, Instant};
use te_fabric::peer::{Attempt, KnownIncarnations, Refusal};
use te_fabric::timers::Earliest;
use te_fabric::{Export, Interest, Slab, Table, Timers};
use zerocopy::little_endian::{U16, U32, U64};

use crate::config::Config;
use crate::io::connection::Connection;
use crate::io::{Io, Watched, net};
use crate::stats::Stats;
use crate::sys::verbs::Verbs;
use crate::wire::{Hello, MAGIC, Response, Status, VERSION};
use endpoint::Endpoint;
use outbound::{ConnectionEnd, Frame, Outbound, answer_of};
use sieve::{Sieve, UseState};

/// A frame from a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PeerFrame<'a> {
    pub(crate) peer: u32,
    /// `None`: the handshake has succeeded.
    pub(crate) response: Option<Response<'a>>,
    /// The bytes to consume after it was handled.
    pub(crate) bytes: usize,
}

/// A control connection that was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Closed {
    pub(crate) peer: u32,
    /// Number of the peer's address.
    pub(crate) address: u8,
    /// Some request was answered.
    pub(crate) answered: bool,
}

/// All peers of one transport.
#[derive(Debug)]
pub(crate) struct Peers {
    endpoints: Table<Endpoint>,
    /// The incarnations of peers that were met and removed.
    known: KnownIncarnations,
    /// Control connections that we opened.
    connections: Slab<Box<Outbound>, u32>,
    /// Peers to which we have a control connection.
    connected: Sieve,
    /// Our identity, which each HELLO carries.
    identity: u64,
    /// Makes a random session number for each target.
    sessions: RandomState,
    last_connection: u32,
    /// Requests without an answer, handshakes included.
    unanswered: u32,
    opened: u64,
    lost: u64,
    evictions: u64,
    frames: u64,
}

impl Peers {
    /// No peers yet. HELLOs carry `identity`.
    pub(crate) fn new(identity: u64, config: &Config) -> Self {
        Self {
            endpoints: Table::new(config.remote_regions_max),
            known: KnownIncarnations::default(),
            connections: Slab::new(),
            connected: Sieve::default(),
            identity,
            sessions: RandomState::new(),
            last_connection: 0,
            unanswered: 0,
            opened: 0,
            lost: 0,
            evictions: 0,
            frames: 0,
        }
    }

    /// The number of control connections that we have opened.
    pub(crate) fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Frames received and understood so far.
    pub(crate) const fn frames(&self) -> u64 {
        self.frames
    }

    /// Whether a request or handshake is unanswered.
    #[inline]
    pub(crate) const fn owes_answers(&self) -> bool {
        self.unanswered > 0
    }

    pub(crate) const fn count(&self, stats: &mut Stats) {
        stats.connections_opened = self.opened;
        stats.connections_lost = self.lost;
        stats.evictions = self.evictions;
        stats.frames += self.frames;
    }
}

/// Contacts.
impl Peers {
    /// The peer that wrote this export: a known one, or a new one.
    ///
    /// # Errors
    /// `Full`.
    pub(crate) fn meet(&mut self, export: &Export) -> Result<u32, Error> {
        let is = |(_, of): &(u32, &Endpoint)| of.contact.incarnation() == export.incarnation;
        let known = self.endpoints.iter().find(is).map(|(peer, _)| peer);
        let peer = match known {
            Some(peer) => peer,
            None => self.endpoints.add(Endpoint::new(export))?,
        };
        if let Some(of) = self.endpoints.get_mut(peer) {
            of.contact.learn(export, of.connection.is_some());
        }
        Ok(peer)
    }

    /// Removes a peer that nothing needs any more, and that has no control connection.
    pub(crate) fn forget(&mut self, peer: u32) {
        if let Some(of) = self.endpoints.remove(peer) {
            self.known.remember(&of.contact);
        }
    }

    /// How to open a control connection to a peer; `None`: there is one already, or no such peer.
    pub(crate) fn attempt(&self, peer: u32, now: Instant) -> Option<Attempt> {
        let of = self.endpoints.get(peer)?;
        of.connection.is_none().then(|| of.contact.attempt(now))
    }

    /// The end of a peer's backoff.
    pub(crate) fn paused_until(&self, peer: u32) -> Option<Instant> {
        self.endpoints.get(peer)?.contact.paused_until()
    }

    /// Begins a peer's backoff.
    pub(crate) fn back_off(&mut self, peer: u32, timers: &mut Timers, config: &Config) {
        if let Some(of) = self.endpoints.get_mut(peer) {
            of.contact.back_off(timers.now(), config.reconnect_ms_max);
        }
        timers.changed();
    }

    /// Handles a failed attempt to open a control connection to address number `address`. Returns the error
    /// with which waiting work ends; `None`: another address is tried.
    pub(crate) fn refused(
        &mut self,
        peer: u32,
        address: u8,
        error: Error,
        timers: &mut Timers,
        config: &Config,
    ) -> Option<Error> {
        let of = self.endpoints.get_mut(peer)?;
        timers.changed();
        match of.contact.refused(address, error, timers.now(), config.reconnect_ms_max) {
            Refusal::NextAddress => {
                timers.wake();
                None
            }
            Refusal::Final(error) | Refusal::Paused(error) => Some(error),
        }
    }

    /// Whether no write of ours can land at a peer any more.
    pub(crate) fn is_harmless(&self, peer: u32) -> bool {
        self.endpoints.get(peer).is_none_or(|of| of.contact.is_harmless(&self.known))
    }
}

/// Control connections: opening and closing.
impl Peers {
    /// Whether we have as many control connections as the settings allow.
    pub(crate) fn is_full(&self, config: &Config) -> bool {
        self.connected.len() >= config.peers_max as usize
    }

    /// The control connection to close for another one; `None`: all are busy.
    pub(crate) fn evict(&mut self, use_state: impl FnMut(u32) -> UseState) -> Option<u32> {
        let victim = self.connected.victim(use_state)?;
        self.evictions += 1;
        self.connection_of(victim)
    }

    /// Index of the control connection to a peer.
    #[inline]
    pub(crate) fn connection_of(&self, peer: u32) -> Option<u32> {
        self.endpoints.get(peer)?.connection
    }

    /// Starts to open the control connection to a peer.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn open<V: Verbs>(
        &mut self,
        peer: u32,
        (number, address): (u8, SocketAddr),
        io: &Io<V>,
        timers: &mut Timers,
        config: &Config,
    ) -> io::Result<()> {
        let stream = net::dial(address, config.peer_silence_ms_max)?;
        let interest = Interest::BOTH;
        let (index, name) = self.connections.reserve();
        if let Err(error) = io.watch(&stream, Watched::Outbound(name), interest) {
            self.connections.release(index);
            return Err(error);
        }
        let deadline = timers.now() + Duration::from_millis(u64::from(config.connect_ms_max));
        let out = Outbound::new(Connection::new(stream, interest), peer, number, deadline);
        self.connections.put(index, Box::new(out));
        self.unanswered += 1;
        self.opened += 1;
        self.connected.insert(peer);
        timers.changed();
        if let Some(of) = self.endpoints.get_mut(peer) {
            of.connection = Some(index);
        }
        Ok(())
    }

    /// Closes a control connection.
    pub(crate) fn close(&mut self, index: u32) -> Option<Closed> {
        let mut out = self.connections.take(index)?;
        self.connections.release(index);
        te_fabric::net::reset_on_close(&out.connection_mut().stream);
        self.unanswered -= out.unanswered();
        self.lost += 1;
        let closed = Closed { peer: out.peer(), address: out.address(), answered: out.has_answered() };
        self.connected.remove(closed.peer);
        if let Some(of) = self.endpoints.get_mut(closed.peer) {
            of.connection = None;
        }
        Some(closed)
    }

    /// The indexes of control connections are smaller than this.
    pub(crate) fn bound(&self) -> u32 {
        self.connections.bound()
    }

    /// The index of the control connection with this name.
    pub(crate) fn index(&self, name: u32) -> Option<u32> {
        self.connections.index(name)
    }

    /// How a control connection ends whose deadline has passed; `None`: it has not passed. The second part:
    /// an answer of the peer is overdue, so that its backoff begins.
    pub(crate) fn overdue(&self, index: u32, now: Instant) -> Option<(ConnectionEnd, bool)> {
        let out = self.connections.get(index)?;
        out.deadline().filter(|deadline| now >= *deadline)?;
        let end = out.lost(Error::with_code(ErrorKind::PeerDead, libc::ETIMEDOUT));
        Some((end, matches!(end, ConnectionEnd::Lost(_))))
    }

    /// The earliest deadline of a control connection.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let mut next = Earliest::default();
        for index in 0..self.connections.bound() {
            next.note(self.connections.get(index).and_then(|out| out.deadline()));
        }
        next.get()
    }

    /// Extends all deadlines by the time in which this process was not polled.
    pub(crate) fn forgive(&mut self, away: Duration) {
        for index in 0..self.connections.bound() {
            if let Some(out) = self.connections.get_mut(index) {
                out.set_deadline(out.deadline().map(|at| at + away));
            }
        }
    }
}

/// Control connections: their frames.
impl Peers {
    /// Begins the handshake when the connection was just made. False: it is still being made.
    ///
    /// # Errors
    /// The connection cannot be made.
    pub(crate) fn greet(&mut self, index: u32) -> Result<bool, ConnectionEnd> {
        let Some(out) = self.connections.get_mut(index) else { return Ok(false) };
        if out.is_made()? {
            self.last_connection = self.last_connection.wrapping_add(1);
            let incarnation = self.endpoints.get(out.peer()).map_or(0, |of| of.contact.incarnation());
            out.greet(&Hello {
                magic: MAGIC,
                version: U16::new(VERSION),
                reserved: U16::ZERO,
                connection: U32::new(self.last_connection),
                session: U64::new(self.sessions.hash_one(incarnation)),
                target: U64::new(incarnation),
                identity: U64::new(self.identity),
                reserved_end: U64::ZERO,
            });
        }
        Ok(!out.is_connecting())
    }

    /// Receives what has arrived on a control connection. True: at least one byte.
    ///
    /// # Errors
    /// The connection is broken.
    pub(crate) fn receive(&mut self, index: u32) -> Result<bool, ConnectionEnd> {
        self.connections.get_mut(index).map_or(Ok(false), |out| out.receive())
    }

    /// The next frame of a peer; `None`: it has not arrived completely. The next answer is overdue at
    /// `until`. The caller [consumes](Self::consume) the frame after it was handled.
    ///
    /// # Errors
    /// The peer refuses us, or breaks the protocol.
    pub(crate) fn next_frame(
        &mut self,
        index: u32,
        until: Instant,
    ) -> Result<Option<PeerFrame<'_>>, ConnectionEnd> {
        // The frame is parsed twice: once for the changes here, and once for the caller, which borrows it.
        let Some(out) = self.connections.get_mut(index) else { return Ok(None) };
        let Some((frame, _)) = out.frame()? else { return Ok(None) };
        match frame {
            Frame::Welcome(welcome) => {
                if let Some(error) = Status::from_wire(welcome.status.get()).error() {
                    return Err(ConnectionEnd::Refused(error));
                }
                let Some(of) = self.endpoints.get_mut(out.peer()) else { return Err(ConnectionEnd::Dropped) };
                if welcome.incarnation.get() != of.contact.incarnation() {
                    return Err(ConnectionEnd::Refused(ErrorKind::PeerRestarted.into()));
                }
                of.contact.welcomed(out.address());
                self.frames += 1;
                self.unanswered -= 1;
                let (peer, bytes) = (out.peer(), size_of_val(&welcome));
                out.welcomed();
                return Ok(Some(PeerFrame { peer, response: None, bytes }));
            }
            Frame::Response(Response::Error { status }) => {
                self.frames += 1;
                return Err(ConnectionEnd::Lost(status.error().unwrap_or(ErrorKind::Protocol.into())));
            }
            Frame::Response(response) => {
                self.frames += 1;
                if let Some((kind, id)) = answer_of(&response) {
                    // It does not answer the oldest request.
                    if !out.answered(kind, id, until) {
                        return Err(ConnectionEnd::Lost(ErrorKind::Protocol.into()));
                    }
                    self.unanswered -= 1;
                }
            }
        }
        let out = &*out;
        Ok(out.frame()?.and_then(|(frame, bytes)| match frame {
            Frame::Welcome(_) => None,
            Frame::Response(response) => {
                Some(PeerFrame { peer: out.peer(), response: Some(response), bytes })
            }
        }))
    }

    /// Drops the bytes of a frame that was handled.
    pub(crate) fn consume(&mut self, index: u32, bytes: usize) {
        if let Some(out) = self.connections.get_mut(index) {
            out.connection_mut().consume(bytes);
        }
    }

    /// Sends as much as the socket takes. Called when every frame that has arrived was handled.
    ///
    /// # Errors
    /// The connection is broken, or the peer has closed it.
    pub(crate) fn flush(&mut self, index: u32) -> Result<(), ConnectionEnd> {
        let Some(out) = self.connections.get_mut(index) else { return Ok(()) };
        out.check_finished()?;
        out.flush()
    }

    /// The control connection with this index, to write requests to. The caller calls [`Self::requested`]
    /// afterwards.
    pub(crate) fn outbound(&mut self, index: u32) -> Option<&mut Outbound> {
        self.connections.get_mut(index).map(|out| &mut **out)
    }

    /// Notes that `count` requests were written, and sends them.
    ///
    /// # Errors
    /// The connection is broken.
    pub(crate) fn requested(
        &mut self,
        index: u32,
        count: u32,
        timers: &mut Timers,
        config: &Config,
    ) -> Result<(), ConnectionEnd> {
        let Some(out) = self.connections.get_mut(index) else { return Ok(()) };
        if count > 0 && out.unanswered() == count {
            let silence = Duration::from_millis(u64::from(config.peer_silence_ms_max));
            out.set_deadline(Some(timers.now() + silence));
            timers.changed();
        }
        self.unanswered += count;
        out.flush()
    }

    /// Updates the readiness that epoll watches a control connection for.
    pub(crate) fn settle_interest<V: Verbs>(&mut self, index: u32, io: &Io<V>) {
        let name = self.connections.name(index);
        if let Some(out) = self.connections.get_mut(index) {
            io.settle_interest(out.connection_mut(), Watched::Outbound(name));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::EXPORT_FORMAT;

    fn export(incarnation: u64) -> Export {
        Export {
            format: EXPORT_FORMAT,
            rights: 12,
            addresses: [[127, 0, 0, 1].into(); 4],
            address_count: 1,
            port: 9,
            incarnation,
            region: 0,
            generation: 1,
            key: 7,
            len: 100,
            location: te_core::Location::Host,
        }
    }

    #[test]
    fn a_peer_is_identified_by_its_incarnation() {
        let mut peers = Peers::new(5, &Config::default());
        let (first, other) = (peers.meet(&export(1)), peers.meet(&export(2)));
        assert_eq!((first, other, peers.meet(&export(1))), (Ok(0), Ok(1), Ok(0)));
        peers.forget(0);
        assert_eq!((peers.attempt(0, Instant::ZERO), peers.meet(&export(3))), (None, Ok(0)));
    }

    #[test]
    fn a_peer_that_refuses_is_in_backoff_and_harmless_while_it_was_not_met() {
        let (config, mut timers) = (Config::default(), Timers::new());
        let mut peers = Peers::new(5, &config);
        let peer = peers.meet(&export(1)).expect("room");
        assert!(matches!(peers.attempt(peer, timers.now()), Some(Attempt::To(0, _))));
        let error = Error::new(ErrorKind::PeerDead);
        assert_eq!(peers.refused(peer, 0, error, &mut timers, &config), Some(error));
        assert_eq!(peers.attempt(peer, timers.now()), Some(Attempt::Later));
        assert!(peers.paused_until(peer).is_some() && peers.is_harmless(peer));
    }

    #[cfg(feature = "sim")]
    #[test]
    fn a_connection_that_is_not_made_in_time_is_closed() {
        use crate::sim::{DeviceConfig, SimConfig, SimFabric};
        let (mut timers, listener) =
            (Timers::new(), std::net::TcpListener::bind("127.0.0.1:0").expect("a port"));
        let config = Config { proof_ms_max: 0, peers_max: 1, connect_ms_max: 50, ..Config::default() };
        let device = SimFabric::new(1, SimConfig::IMMEDIATE).device(DeviceConfig::default());
        let (io, _) = Io::open(device, &config).expect("a port that works");
        let mut peers = Peers::new(5, &config);
        let peer = peers.meet(&export(1)).expect("room");
        let address = listener.local_addr().expect("bound");
        peers.open(peer, (0, address), &io, &mut timers, &config).expect("it listens");
        assert!(
            peers.is_full(&config) && peers.owes_answers() && peers.attempt(peer, timers.now()).is_none()
        );
        let index = peers.connection_of(peer).expect("it was opened");
        assert_eq!(peers.next_deadline(), Some(Instant::from_millis(50)));
        peers.forgive(Duration::from_millis(10));
        assert_eq!(peers.overdue(index, Instant::from_millis(59)), None);
        let refused = ConnectionEnd::Refused(Error::with_code(ErrorKind::PeerDead, libc::ETIMEDOUT));
        assert_eq!(peers.overdue(index, Instant::from_millis(60)), Some((refused, false)));
        assert_eq!(peers.evict(|_| UseState::Busy), None);
        assert_eq!(peers.evict(|_| UseState::Idle), Some(index));
        assert_eq!(peers.close(index), Some(Closed { peer, address: 0, answered: false }));
        assert_eq!((peers.close(index), peers.owes_answers(), peers.connections()), (None, false, 0));
    }
}
