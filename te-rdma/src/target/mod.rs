//! Serving peers: their control connections, the queue pairs that are held for them, remote keys for peers
//! that have the key of an export, and fences.
//!
//! ```text
//!   inbound       one control connection
//!   queue_pairs   made for offers, destroyed with connections and by fences
//! ```

mod inbound;
mod queue_pairs;

use core::time::Duration;
use std::collections::VecDeque;
use std::io;
use std::net::TcpStream;

use te_core::{Error, ErrorKind, ExpelMode, Instant, RegionId};
use te_fabric::net::{Accepted, reset_on_close};
use te_fabric::peer::Expelled;
use te_fabric::timers::Earliest;
use te_fabric::{Interest, Slab};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use crate::env::Env;
use crate::io::connection::Connection;
use crate::io::{Io, ROUNDS_MAX, Watched, net};
use crate::memory::LocalMemory;
use crate::stats::Stats;
use crate::sys::verbs::Verbs;
use crate::wire::{
    self, FRAME_BYTES_MAX, FrameError, Header, Hello, KEYS_MAX, Kind, QPS_MAX, Request, Resolve, Resolved,
    Status, Step, Withdrawn,
};
use inbound::{Inbound, PeerQp, welcome};
use queue_pairs::{Offer, PeerKey, PeerQueuePairs};

/// The most connections that are accepted in one poll.
const ACCEPTS_MAX: usize = 16;

/// The serving half of a transport.
#[derive(Debug)]
pub(crate) struct Target {
    /// The incarnation that a HELLO has to name.
    incarnation: u64,
    /// Control connections that peers opened.
    inbound: Slab<Box<Inbound>, u32>,
    /// Names of connections with an offer of queue pairs that waits for the next poll.
    deferred: VecDeque<u32>,
    /// How many queue pairs may still be made in this poll.
    qps_left: usize,
    queue_pairs: PeerQueuePairs,
    /// Peers that are refused for good.
    expelled: Expelled,
    accepted: u64,
    refused: u64,
    frames: u64,
    fences: u64,
    resolves_refused: u64,
}

impl Target {
    /// A target without connections. HELLOs have to name `incarnation`.
    pub(crate) fn new(incarnation: u64) -> Self {
        Self {
            incarnation,
            inbound: Slab::new(),
            deferred: VecDeque::new(),
            qps_left: 0,
            queue_pairs: PeerQueuePairs::default(),
            expelled: Expelled::default(),
            accepted: 0,
            refused: 0,
            frames: 0,
            fences: 0,
            resolves_refused: 0,
        }
    }

    /// The number of control connections of peers.
    pub(crate) fn connections(&self) -> usize {
        self.inbound.len()
    }

    /// Frames received and understood so far.
    pub(crate) const fn frames(&self) -> u64 {
        self.frames
    }

    pub(crate) const fn count(&self, stats: &mut Stats) {
        stats.peer_qps_made = self.queue_pairs.made();
        stats.peer_qps_destroyed = self.queue_pairs.destroyed();
        stats.accepted = self.accepted;
        stats.connections_refused = self.refused;
        stats.frames += self.frames;
        stats.fences_served = self.fences;
        stats.resolves_refused = self.resolves_refused;
    }

    /// Begins a poll.
    #[inline]
    pub(crate) const fn begin(&mut self) {
        self.qps_left = QPS_MAX;
    }

    /// Accepts new connections.
    pub(crate) fn accept_all<V: Verbs>(&mut self, env: &mut Env<'_, V>) {
        for _ in 0..ACCEPTS_MAX {
            match env.io.accept() {
                Accepted::Connection(stream) => self.adopt(stream, env),
                Accepted::Gone => {}
                Accepted::Empty => return,
                Accepted::Failed(error) => {
                    if let Some(until) = env.io.pause_listener(env.timers.now(), &error, env.config) {
                        env.timers.due_by(until);
                    }
                    return;
                }
            }
        }
    }

    fn adopt<V: Verbs>(&mut self, stream: TcpStream, env: &mut Env<'_, V>) {
        if self.inbound.len() >= env.config.connections_max as usize {
            self.refused += 1;
            let mut connection = Connection::new(stream, Interest::NONE);
            connection.push(&[welcome(Status::Full, 0).as_bytes()]);
            let _ = connection.flush();
            return;
        }
        let (index, name) = self.inbound.reserve();
        let ready = net::tune(&stream, env.config.peer_silence_ms_max);
        if ready.and_then(|()| env.io.watch(&stream, Watched::Inbound(name), Interest::READ)).is_err() {
            self.inbound.release(index);
            return;
        }
        let deadline = env.timers.now() + Duration::from_millis(u64::from(env.config.connect_ms_max));
        let inbound = Inbound::new(Connection::new(stream, Interest::READ), name, deadline);
        self.inbound.put(index, Box::new(inbound));
        self.accepted += 1;
        env.timers.due_by(deadline);
    }

    /// Handles the connection with this name, which is ready.
    pub(crate) fn drive_named<V: Verbs>(&mut self, name: u32, readable: bool, env: &mut Env<'_, V>) {
        if let Some(index) = self.inbound.index(name) {
            self.drive(index, readable, env);
        }
    }

    fn drive<V: Verbs>(&mut self, index: u32, readable: bool, env: &mut Env<'_, V>) {
        if !self.try_drive(index, readable, env).unwrap_or(false) {
            self.end(index, env.io);
            return;
        }
        let Some(inbound) = self.inbound.get_mut(index) else { return };
        env.io.settle_interest(&mut inbound.connection, Watched::Inbound(inbound.name));
        if inbound.waits && !self.deferred.contains(&inbound.name) {
            self.deferred.push_back(inbound.name);
            env.timers.wake();
        }
    }

    /// Whether offers of queue pairs wait.
    #[inline]
    pub(crate) fn has_deferred(&self) -> bool {
        !self.deferred.is_empty()
    }

    /// Continues with the connections of which an offer waited: making queue pairs takes long, so that each
    /// poll makes only some.
    pub(crate) fn drive_deferred<V: Verbs>(&mut self, env: &mut Env<'_, V>) {
        for _ in 0..self.deferred.len() {
            if let Some(name) = self.deferred.pop_front() {
                self.drive_named(name, true, env);
            }
        }
    }

    /// `Ok(false)`: the connection is to be closed.
    fn try_drive<V: Verbs>(&mut self, index: u32, readable: bool, env: &mut Env<'_, V>) -> io::Result<bool> {
        for round in 0.. {
            let Some(inbound) = self.inbound.get_mut(index) else { return Ok(false) };
            // Answers are sent before requests are received, to make room for further answers.
            inbound.connection.flush()?;
            let came = readable && round < ROUNDS_MAX && inbound.connection.receive()?;
            let used = self.serve_all(index, env);
            let Some(inbound) = self.inbound.get_mut(index) else { return Ok(false) };
            if inbound.session.is_some() {
                inbound.deadline = None;
            }
            if inbound.closing || (!came && used == 0) {
                break;
            }
        }
        let Some(inbound) = self.inbound.get_mut(index) else { return Ok(false) };
        inbound.connection.flush()?;
        // A peer that has closed its side would not read further answers.
        Ok(!inbound.connection.finished && (!inbound.closing || inbound.connection.wanted().writable))
    }

    /// Serves all frames that have arrived; returns their length in bytes.
    fn serve_all<V: Verbs>(&mut self, index: u32, env: &mut Env<'_, V>) -> usize {
        let mut used = 0;
        while let Some(inbound) = self.inbound.get(index)
            && !inbound.closing
            && inbound.connection.has_room()
        {
            let served = self.serve(index, env);
            let Some(inbound) = self.inbound.get_mut(index) else { break };
            match served {
                Ok(0) => break,
                Ok(bytes) => {
                    inbound.connection.consume(bytes);
                    used += bytes;
                    self.frames += 1;
                }
                Err(error) => {
                    self.refused += 1;
                    inbound.refuse_connection(error.into());
                    break;
                }
            }
        }
        used
    }

    /// Serves the next frame; returns its length in bytes; 0: it has not arrived completely, or waits.
    fn serve<V: Verbs>(&mut self, index: u32, env: &mut Env<'_, V>) -> Result<usize, FrameError> {
        let Some(inbound) = self.inbound.get_mut(index) else { return Ok(0) };
        let Some(session) = inbound.session else {
            return match wire::parse_hello(inbound.connection.bytes())? {
                Step::Need(_) => Ok(0),
                Step::Frame(hello, used) => {
                    self.handshake(index, &hello, env.io);
                    Ok(used)
                }
            };
        };
        // Copied, because the answer borrows the connection as well.
        let mut frame = [0; FRAME_BYTES_MAX];
        let seen = inbound.connection.bytes().len().min(frame.len());
        frame[..seen].copy_from_slice(&inbound.connection.bytes()[..seen]);
        inbound.waits = false;
        if inbound.accepting.is_some() {
            return Ok(0);
        }
        let (request, used) = match wire::parse_request(&frame[..seen])? {
            Step::Need(_) => return Ok(0),
            Step::Frame(request, used) => (request, used),
        };
        match request {
            Request::Connect { .. } if self.qps_left == 0 => {
                inbound.waits = true;
                return Ok(0);
            }
            Request::Connect { id, port, qps } => self.connect(index, Offer { id, port, qps }, env),
            Request::Resolve { id, of } => match resolve(inbound, id, &of, env.memory) {
                Ok(answered) => inbound.proven |= answered,
                Err(status) => {
                    self.resolves_refused += 1;
                    inbound.refuse(id, status);
                }
            },
            Request::Fence { id, live } => {
                let unused = |qp: &PeerQp| !live.iter().any(|generation| generation.get() == qp.generation);
                let (identity, verbs) = (inbound.identity, env.io.verbs_mut());
                self.queue_pairs.destroy(session, identity, &mut inbound.qps, unused, verbs);
                if self.queue_pairs.retry_destroy(PeerKey::Session(session), verbs) > 0 {
                    // A fence cannot be confirmed while a queue pair is not destroyed. The peer requests it
                    // again over a new connection.
                    self.refused += 1;
                    inbound.refuse_connection(Status::Device);
                    return Ok(used);
                }
                self.fences += 1;
                inbound.connection.push(&[Header::new(Kind::Fenced, 0, id).as_bytes()]);
            }
        }
        Ok(used)
    }

    /// Answers a HELLO: welcomes the peer, or refuses the connection.
    fn handshake<V: Verbs>(&mut self, index: u32, hello: &Hello, io: &mut Io<V>) {
        let status = self.admit(hello, io);
        let Some(inbound) = self.inbound.get_mut(index) else { return };
        if status == Status::Ok {
            inbound.session = Some(hello.session.get());
            inbound.identity = hello.identity.get();
            inbound.number = hello.connection.get();
            inbound.connection.push(&[welcome(Status::Ok, self.incarnation).as_bytes()]);
        } else {
            self.refused += 1;
            inbound.refuse_connection(status);
        }
    }

    /// Whether a peer gets a connection. An older connection of its session is closed.
    fn admit<V: Verbs>(&mut self, hello: &Hello, io: &mut Io<V>) -> Status {
        if hello.target.get() != self.incarnation {
            return Status::Restarted;
        }
        if self.expelled.contains(hello.identity.get()) {
            return Status::Expelled;
        }
        let (session, number) = (hello.session.get(), hello.connection.get());
        for index in 0..self.inbound.bound() {
            let Some(known) = self.inbound.get(index) else { continue };
            if known.session != Some(session) {
                continue;
            }
            if number.wrapping_sub(known.number) as i32 <= 0 {
                return Status::Superseded;
            }
            self.end(index, io);
        }
        match self.queue_pairs.retry_destroy(PeerKey::Session(session), io.verbs_mut()) {
            0 => Status::Ok,
            _ => Status::Device,
        }
    }

    /// Makes our ends of the queue pairs of an offer. The answer is sent when they are connected.
    fn connect<V: Verbs>(&mut self, index: u32, offer: Offer<'_>, env: &mut Env<'_, V>) {
        let Some(inbound) = self.inbound.get_mut(index) else { return };
        let result = if inbound.proven {
            self.qps_left = self.qps_left.saturating_sub(offer.qps.len());
            match env.io.outage() {
                Some(_) => Err(Status::Device),
                None => self.queue_pairs.accept(inbound, offer, env.io, env.config),
            }
        } else {
            Err(Status::AccessDenied)
        };
        match result {
            Ok(Some(accepting)) => _ = inbound.accept(&accepting),
            Ok(None) => {}
            Err(status) => inbound.refuse(offer.id, status),
        }
    }

    /// Handles the results of connecting the queue pairs of an offer, by their generations.
    pub(crate) fn connected<V: Verbs>(
        &mut self,
        session: u64,
        connection: u32,
        ends: &[(u32, Result<(), Error>)],
        env: &mut Env<'_, V>,
    ) {
        // Queue pairs that could not be destroyed while they were being connected are tried again.
        self.queue_pairs.retry_destroy(PeerKey::Session(session), env.io.verbs_mut());
        let Some(index) = self.inbound.index(connection) else { return };
        let Some(inbound) = self.inbound.get_mut(index) else { return };
        if let Some(accepting) = inbound.accepting.take() {
            if !self.queue_pairs.connected(inbound, &accepting, ends, env.io.verbs_mut()) {
                inbound.refuse(accepting.id, Status::Device);
            } else if !inbound.accept(&accepting) {
                // There is no room for the answer: the peer does not read.
                self.end(index, env.io);
                return;
            }
        }
        self.drive(index, true, env);
    }

    /// Whether a peer with this identity has a control connection to us.
    pub(crate) fn has_peer(&self, identity: u64) -> bool {
        (0..self.inbound.bound())
            .any(|index| self.inbound.get(index).is_some_and(|inbound| inbound.is_of(identity)))
    }

    /// Closes every control connection of the peer, destroys its queue pairs, and refuses it from now on.
    /// True: all of them are destroyed, so no write of the peer can land any more.
    ///
    /// # Errors
    /// `InvalidArgument`, `Busy`, `Full`: as `Transport::expel`.
    pub(crate) fn expel<V: Verbs>(
        &mut self,
        identity: u64,
        mode: ExpelMode,
        io: &mut Io<V>,
    ) -> Result<bool, Error> {
        let connected = self.has_peer(identity);
        self.expelled.add(identity, mode, connected)?;
        for index in 0..self.inbound.bound() {
            if self.inbound.get(index).is_some_and(|inbound| inbound.is_of(identity)) {
                self.reset(index, io);
            }
        }
        Ok(self.queue_pairs.retry_destroy(PeerKey::Identity(identity), io.verbs_mut()) == 0)
    }

    /// Resets a control connection.
    fn reset<V: Verbs>(&mut self, index: u32, io: &mut Io<V>) {
        if let Some(inbound) = self.inbound.get(index) {
            reset_on_close(&inbound.connection.stream);
        }
        self.end(index, io);
    }

    /// Closes a peer's control connection and destroys its queue pairs.
    fn end<V: Verbs>(&mut self, index: u32, io: &mut Io<V>) {
        let Some(mut inbound) = self.inbound.take(index) else { return };
        let session = inbound.session.unwrap_or(0);
        self.queue_pairs.destroy(session, inbound.identity, &mut inbound.qps, |_| true, io.verbs_mut());
        self.inbound.release(index);
    }

    /// Closes the control connection of every peer. They connect again and make new queue pairs.
    pub(crate) fn end_all<V: Verbs>(&mut self, io: &mut Io<V>) {
        (0..self.inbound.bound()).for_each(|index| self.end(index, io));
    }

    /// As [`Self::end_all`], by resets.
    #[cfg(any(test, feature = "testkit"))]
    pub(crate) fn reset_all<V: Verbs>(&mut self, io: &mut Io<V>) {
        (0..self.inbound.bound()).for_each(|index| self.reset(index, io));
    }

    /// Closes connections on which the handshake did not succeed in time.
    pub(crate) fn end_late<V: Verbs>(&mut self, now: Instant, io: &mut Io<V>) {
        for index in 0..self.inbound.bound() {
            let deadline = self.inbound.get(index).and_then(|inbound| inbound.deadline);
            if deadline.is_some_and(|deadline| now >= deadline) {
                self.end(index, io);
            }
        }
    }

    /// The earliest deadline of a handshake.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let mut next = Earliest::default();
        for index in 0..self.inbound.bound() {
            next.note(self.inbound.get(index).and_then(|inbound| inbound.deadline));
        }
        next.get()
    }

    /// Extends all deadlines by the time in which this process was not polled.
    pub(crate) fn forgive(&mut self, away: Duration) {
        for index in 0..self.inbound.bound() {
            if let Some(inbound) = self.inbound.get_mut(index) {
                inbound.forgive(away);
            }
        }
    }

    /// Notifies peers that a region was deregistered, so that they do not lose a queue pair by an attempt to
    /// use it. Best effort.
    pub(crate) fn withdraw<V: Verbs>(&mut self, id: RegionId, io: &Io<V>) {
        let header = Header::new(Kind::Withdrawn, 0, 0);
        let body = Withdrawn { region: U32::new(id.index), generation: U32::new(id.generation) };
        for index in 0..self.inbound.bound() {
            let Some(inbound) = self.inbound.get_mut(index) else { continue };
            if inbound.session.is_some() && !inbound.closing {
                inbound.connection.push(&[header.as_bytes(), body.as_bytes()]);
                // The next poll notices a broken connection.
                let _ = inbound.connection.flush();
            }
            io.settle_interest(&mut inbound.connection, Watched::Inbound(inbound.name));
        }
    }

    /// Destroys the queue pairs of every peer. Nothing is tried again.
    pub(crate) fn destroy_all<V: Verbs>(&mut self, io: &mut Io<V>) {
        for index in 0..self.inbound.bound() {
            if let Some(inbound) = self.inbound.get(index) {
                for qp in &inbound.qps {
                    let _ = io.verbs_mut().destroy_qp(qp.handle);
                }
            }
        }
    }
}

/// Sends the remote keys of a region to a peer that has the region's key. `Ok(false)`: there is no room for
/// the answer.
fn resolve(inbound: &mut Inbound, id: u64, of: &Resolve, memory: &mut LocalMemory) -> Result<bool, Status> {
    let region = RegionId::new(of.region.get(), of.generation.get());
    let found = match memory.granted(region, of.key.get()) {
        Err(ErrorKind::NotFound) => return Err(Status::NotFound),
        Err(ErrorKind::Stale) => return Err(Status::Stale),
        Err(_) => return Err(Status::AccessDenied),
        Ok(found) if of.first.get() as usize >= found.ext.chunks.len() => return Err(Status::OutOfRange),
        Ok(found) => found,
    };
    found.ext.shown = true;
    let mut keys = [U32::ZERO; KEYS_MAX];
    let chunks = &found.ext.chunks[of.first.get() as usize..];
    let count = chunks.len().min(KEYS_MAX);
    for (to, chunk) in keys.iter_mut().zip(chunks) {
        *to = U32::new(chunk.remote_key);
    }
    let body = Resolved {
        base: U64::new(found.ext.chunking.base),
        len: U64::new(found.ext.chunking.len),
        chunk_bytes: U64::new(1 << found.ext.chunking.shift),
        chunks: U32::new(found.ext.chunks.len() as u32),
        first: of.first,
        rights: found.remote_rights(),
        reserved: [0; 7],
    };
    let header = Header::new(Kind::Resolved, count as u16, id);
    Ok(inbound.connection.push(&[header.as_bytes(), body.as_bytes(), keys[..count].as_bytes()]))
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::memory::testing::memory;
    use crate::sim::{DeviceConfig, SimConfig, SimDevice, SimFabric};
    use crate::wire::{MAGIC, VERSION, Welcome};
    use std::io::{Read, Write};
    use std::net::SocketAddr;
    use te_fabric::Timers;
    use zerocopy::FromBytes;
    use zerocopy::little_endian::U16;

    const INCARNATION: u64 = 77;
    const REGION: RegionId = RegionId::new(1, 1);

    /// A target with one region, and the shared parts.
    struct Bench {
        target: Target,
        io: Io<SimDevice>,
        memory: LocalMemory,
        timers: Timers,
        config: Config,
        address: SocketAddr,
    }

    impl Bench {
        fn new() -> Self {
            let config = Config { proof_ms_max: 0, connect_ms_max: 50, ..Config::default() };
            let device = SimFabric::new(1, SimConfig::IMMEDIATE).device(DeviceConfig::default());
            let (io, address) = Io::open(device, &config).expect("a working port");
            let (memory, timers) = (memory(REGION, 8_192), Timers::new());
            Self { target: Target::new(INCARNATION), io, memory, timers, config, address }
        }

        /// Handles everything that is ready.
        fn poll(&mut self) {
            self.target.begin();
            for at in 0..self.io.ready() {
                let event = self.io.event(at);
                let env = &mut Env {
                    io: &mut self.io,
                    memory: &mut self.memory,
                    timers: &mut self.timers,
                    config: &self.config,
                };
                match event {
                    crate::io::Ready::Listener => self.target.accept_all(env),
                    crate::io::Ready::Connection(Watched::Inbound(name), readable) => {
                        self.target.drive_named(name, readable, env);
                    }
                    _ => {}
                }
            }
        }

        /// Connects as `identity`, and returns the result of the handshake.
        fn greet(&mut self, session: u64, identity: u64, incarnation: u64) -> (TcpStream, Status) {
            let mut stream = TcpStream::connect(self.address).expect("it listens");
            let hello = Hello {
                magic: MAGIC,
                version: U16::new(VERSION),
                reserved: U16::ZERO,
                connection: U32::new(1),
                session: U64::new(session),
                target: U64::new(incarnation),
                identity: U64::new(identity),
                reserved_end: U64::ZERO,
            };
            stream.write_all(hello.as_bytes()).expect("room");
            let welcome = Welcome::read_from_bytes(&self.read(&mut stream, 32)).expect("32 bytes");
            (stream, Status::from_wire(welcome.status.get()))
        }

        fn read(&mut self, stream: &mut TcpStream, bytes: usize) -> Vec<u8> {
            stream.set_nonblocking(true).expect("a socket");
            let mut all = Vec::new();
            while all.len() < bytes {
                self.poll();
                let mut some = vec![0; bytes - all.len()];
                match stream.read(&mut some) {
                    Ok(count) => all.extend_from_slice(&some[..count]),
                    Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
                }
            }
            all
        }
    }

    #[test]
    fn a_peer_that_names_this_incarnation_is_welcomed_once() {
        let mut bench = Bench::new();
        let (_other, status) = bench.greet(1, 5, INCARNATION + 1);
        assert_eq!(status, Status::Restarted);
        let (_stream, status) = bench.greet(1, 5, INCARNATION);
        assert_eq!((status, bench.target.has_peer(5), bench.target.has_peer(6)), (Status::Ok, true, false));
        let (_again, status) = bench.greet(1, 5, INCARNATION);
        assert_eq!(status, Status::Superseded, "the number of a later connection has to be larger");
        let mut stats = Stats::default();
        bench.target.count(&mut stats);
        assert_eq!((stats.accepted, stats.connections_refused), (3, 2));
    }

    #[test]
    fn an_expelled_peer_is_closed_and_not_welcomed_again() {
        let mut bench = Bench::new();
        let (_stream, status) = bench.greet(1, 5, INCARNATION);
        assert_eq!(status, Status::Ok);
        let spared = bench.target.expel(5, ExpelMode::SpareConnected, &mut bench.io);
        assert_eq!(spared.map_err(|error| error.kind), Err(ErrorKind::Busy));
        assert_eq!(bench.target.expel(5, ExpelMode::Force, &mut bench.io), Ok(true));
        assert!(!bench.target.has_peer(5));
        let (_again, status) = bench.greet(2, 5, INCARNATION);
        assert_eq!(status, Status::Expelled);
    }

    #[test]
    fn remote_keys_are_sent_only_for_the_key_of_the_export() {
        let mut bench = Bench::new();
        let (mut stream, _) = bench.greet(1, 5, INCARNATION);
        for (key, kind, bytes) in [(98, Kind::Refused, 16 + 8), (99, Kind::Resolved, 16 + 40 + 2 * 4)] {
            let body = Resolve {
                region: U32::new(REGION.index),
                generation: U32::new(REGION.generation),
                key: U64::new(key),
                first: U32::ZERO,
                reserved: U32::ZERO,
            };
            let header = Header::new(Kind::Resolve, 0, 9);
            stream.write_all(&[header.as_bytes(), body.as_bytes()].concat()).expect("room");
            assert_eq!(bench.read(&mut stream, bytes)[0], kind as u8);
            let shown = bench.memory.get(REGION.index).is_some_and(|region| region.ext.shown);
            assert_eq!(shown, kind == Kind::Resolved);
        }
    }

    #[test]
    fn a_connection_without_a_handshake_is_closed() {
        let mut bench = Bench::new();
        let _silent = TcpStream::connect(bench.address).expect("it listens");
        while bench.target.connections() == 0 {
            bench.poll();
        }
        assert_eq!(bench.target.next_deadline(), Some(Instant::from_millis(50)));
        bench.target.forgive(Duration::from_millis(5));
        bench.target.end_late(Instant::from_millis(54), &mut bench.io);
        assert_eq!(bench.target.connections(), 1);
        bench.target.end_late(Instant::from_millis(55), &mut bench.io);
        assert_eq!((bench.target.connections(), bench.target.next_deadline()), (0, None));
    }
}
