//! Serving peers: their side channels, the queue pairs that we hold for them, keys for who has the key, fences.

use core::time::Duration;
use std::io;

use te_core::{Error, ErrorKind, RegionId};
use te_fabric::Interest;
use te_fabric::net::{Accepted, random_u64, reset_on_close};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use crate::channel::Channel;
use crate::connection::{Accepting, Connection, In, LISTENER, PeerQp, Role, Undead};
use crate::connects::{Task, Whose};
use crate::exchange::{
    self, FrameError, Header, Hello, KEYS_MAX, Kind, LIVE_MAX, PROTOCOL, PortBody, QpEntry, Refusal, Request,
    Resolve, Resolved, Status, Step, Welcome, Withdrawn,
};
use crate::net;
use crate::transport::RdmaTransport;
use crate::verbs::{Connecting, MrAccess, Path, QpConfig, QpStep, Verbs};

/// Connections accepted in one poll.
const ACCEPTS_MAX: usize = 16;
/// Looks into one socket in one poll; then others get a turn.
pub(crate) const ROUNDS_MAX: u32 = 16;

impl<V: Verbs> RdmaTransport<V> {
    /// Takes in new connections.
    pub(crate) fn accept_all(&mut self) {
        for _ in 0..ACCEPTS_MAX {
            match self.listener.accept() {
                Accepted::Connection(stream) => self.adopt_peer(stream),
                Accepted::Gone => {}
                Accepted::Empty => return,
                Accepted::Failed(error) => {
                    if self.poller.modify(&self.listener, LISTENER, Interest::NONE).is_ok() {
                        let until =
                            self.listener.rest(self.timers.now(), &error, self.config.connections_max);
                        self.due(until);
                    }
                    return;
                }
            }
        }
    }

    fn adopt_peer(&mut self, stream: std::net::TcpStream) {
        if self.inbound >= self.config.connections_max as usize {
            self.stats.channels_refused += 1;
            let mut channel = Channel::new(stream, Interest::NONE);
            channel.push(&[welcome(Status::Full, 0).as_bytes()]);
            let _ = channel.flush();
            return;
        }
        let (index, name) = self.connections.reserve();
        let ready = net::tune(&stream, self.config.peer_silence_ms_max);
        if ready.and_then(|()| self.poller.add(&stream, u64::from(name), Interest::READ)).is_err() {
            self.connections.release(index);
            return;
        }
        let deadline = self.timers.now() + Duration::from_millis(u64::from(self.config.connect_ms_max));
        let connection = Connection {
            channel: Channel::new(stream, Interest::READ),
            deadline: Some(deadline),
            role: Role::In(In { name, ..In::default() }),
        };
        self.connections.put(index, Box::new(connection));
        self.inbound += 1;
        self.stats.channels_accepted += 1;
        self.due(deadline);
    }

    /// Works on a peer's side channel that is ready.
    pub(crate) fn drive_in(&mut self, index: u32, mut connection: Box<Connection>, readable: bool) {
        match self.try_drive_in(&mut connection, readable) {
            Ok(true) => {
                let name = self.connections.name(index);
                if matches!(&connection.role, Role::In(role) if role.waits) && !self.unserved.contains(&name)
                {
                    self.unserved.push_back(name);
                    self.timers.wake();
                }
                self.settle_interest(index, connection);
            }
            Ok(false) | Err(_) => self.end_in(index, *connection),
        }
    }

    /// Goes on with peers that had to wait: making their queue pairs takes its time, and others want theirs.
    pub(crate) fn drive_unserved(&mut self) {
        for _ in 0..self.unserved.len() {
            let name = self.unserved.pop_front();
            if let Some(index) = name.and_then(|name| self.connections.index(name))
                && let Some(connection) = self.connections.take(index)
            {
                self.drive_in(index, connection, true);
            }
        }
    }

    /// `Ok(false)`: the connection is over.
    fn try_drive_in(&mut self, connection: &mut Connection, readable: bool) -> io::Result<bool> {
        let Role::In(role) = &mut connection.role else { return Ok(false) };
        let channel = &mut connection.channel;
        for round in 0.. {
            // First what was answered, then what was asked: there is no room for an answer otherwise.
            channel.flush()?;
            let came = readable && round < ROUNDS_MAX && channel.receive()?;
            let mut used = 0;
            while !role.closing && channel.has_room() {
                match self.serve(role, channel) {
                    Ok(0) => break,
                    Ok(bytes) => {
                        channel.consume(bytes);
                        used += bytes;
                        self.stats.frames += 1;
                    }
                    Err(error) => {
                        self.turn_away(role, channel, error.into());
                        break;
                    }
                }
            }
            if role.session.is_some() {
                connection.deadline = None;
            }
            if role.closing || (!came && used == 0) {
                break;
            }
        }
        channel.flush()?;
        // What a peer that has finished still asks for, nobody would read.
        Ok(!channel.finished && (!role.closing || channel.wanted().writable))
    }

    /// Serves the next frame; gives its length, 0 when it is not all there.
    fn serve(&mut self, role: &mut In, channel: &mut Channel) -> Result<usize, FrameError> {
        let Some(session) = role.session else {
            return match exchange::parse_hello(channel.bytes())? {
                Step::Need(_) => Ok(0),
                Step::Frame(hello, used) => {
                    match self.meet(role, &hello) {
                        Status::Ok => {
                            _ = channel.push(&[welcome(Status::Ok, self.end.incarnation).as_bytes()])
                        }
                        status => self.turn_away(role, channel, status),
                    }
                    Ok(used)
                }
            };
        };
        // Copied out: the answer goes into the same channel.
        let mut frame = [0; exchange::FRAME_BYTES_MAX];
        let seen = channel.bytes().len().min(frame.len());
        frame[..seen].copy_from_slice(&channel.bytes()[..seen]);
        role.waits = false;
        if role.accepting.is_some() {
            return Ok(0);
        }
        let (request, used) = match exchange::parse_request(&frame[..seen])? {
            Step::Need(_) => return Ok(0),
            Step::Frame(request, used) => (request, used),
        };
        match request {
            Request::Connect { .. } if self.peer_qps_left == 0 => {
                role.waits = true;
                return Ok(0);
            }
            Request::Connect { id, port, qps } => match self.connect_qps(role, id, &port, qps) {
                Ok(Some(accepting)) => _ = accept(channel, &accepting),
                Ok(None) => {}
                Err(status) => refuse(channel, id, status),
            },
            Request::Resolve { id, of } => role.proven |= self.resolve(channel, id, &of),
            Request::Fence { id, live } => {
                let gone = |qp: &PeerQp| !live.iter().any(|generation| generation.get() == qp.generation);
                self.end_peer_qps(session, role.identity, &mut role.qps, gone);
                if self.exorcise(|undead| undead.session == session) > 0 {
                    // Not our word without the device's. A new connection asks again.
                    self.turn_away(role, channel, Status::Device);
                    return Ok(used);
                }
                self.stats.peer_fences += 1;
                channel.push(&[Header::new(Kind::Fenced, 0, id).as_bytes()]);
            }
        }
        Ok(used)
    }

    /// Says why, and ends the connection when that has left.
    fn turn_away(&mut self, role: &mut In, channel: &mut Channel, status: Status) {
        self.stats.channels_refused += 1;
        if role.session.is_none() {
            channel.push(&[welcome(status, 0).as_bytes()]);
        } else {
            let header = Header::new(Kind::Error, 0, 0);
            channel.push(&[header.as_bytes(), Refusal::new(status).as_bytes()]);
        }
        role.closing = true;
    }

    /// A peer says who it is and whom it wants.
    fn meet(&mut self, role: &mut In, hello: &Hello) -> Status {
        if hello.target.get() != self.end.incarnation {
            return Status::Restarted;
        }
        if self.expelled.contains(hello.identity.get()) {
            return Status::Expelled;
        }
        let (session, number) = (hello.session.get(), hello.connection.get());
        for index in 0..self.connections.bound() {
            let Some(other) = self.connections.get(index) else { continue };
            let Role::In(known) = &other.role else { continue };
            if known.session != Some(session) {
                continue;
            }
            if number.wrapping_sub(known.number) as i32 <= 0 {
                return Status::Superseded;
            }
            if let Some(older) = self.connections.take(index) {
                self.end_in(index, *older);
            }
        }
        if self.exorcise(|undead| undead.session == session) > 0 {
            return Status::Device;
        }
        role.session = Some(session);
        role.identity = hello.identity.get();
        role.number = number;
        Status::Ok
    }

    /// Makes our ends of a peer's queue pairs. `None`: they are being connected, and the peer is answered later.
    fn connect_qps(
        &mut self,
        role: &mut In,
        id: u64,
        port: &PortBody,
        offered: &[QpEntry],
    ) -> Result<Option<Accepting>, Status> {
        if !role.proven {
            return Err(Status::AccessDenied);
        }
        self.peer_qps_left = self.peer_qps_left.saturating_sub(offered.len());
        if self.outage.is_some() {
            return Err(Status::Device);
        }
        // Half of what the device has is for our own work, however many peers there are.
        let held = self.stats.peer_qps_made - self.stats.peer_qps_destroyed + offered.len() as u64;
        if role.qps.len() + offered.len() > LIVE_MAX || held > u64::from(self.verbs.info().qp_count_max / 2) {
            return Err(Status::Full);
        }
        let gid = self.port.matching(port).ok_or(Status::Family)?;
        let (mut entries, mut jobs) = (Vec::with_capacity(offered.len()), Vec::new());
        let before = role.qps.len();
        let mut failed = None;
        for theirs in offered {
            if role.qps.iter().any(|qp| qp.generation == theirs.generation.get()) {
                failed = Some(Status::Protocol);
                break;
            }
            match self.connect_qp(role, port, gid.index, theirs) {
                Some((ours, Connecting::Done)) => entries.push(ours),
                Some((ours, Connecting::Later(job))) => {
                    entries.push(ours);
                    jobs.push((theirs.generation.get(), job));
                }
                None => {
                    failed = Some(Status::Device);
                    break;
                }
            }
        }
        let session = role.session.unwrap_or(0);
        let accepting = Accepting { id, port: self.port.body(&gid, self.config.reads), entries };
        if failed.is_none() {
            if jobs.is_empty() {
                return Ok(Some(accepting));
            }
            let whose = Whose::Peers { session, channel: role.name };
            match self.connects.push(Task { whose, jobs }) {
                Ok(()) => {
                    role.accepting = Some(accepting);
                    return Ok(None);
                }
                Err(_) => failed = Some(Status::Full),
            }
        } else {
            // They must not hold on to what goes now.
            drop(jobs);
        }
        let mut new = role.qps.split_off(before);
        self.end_peer_qps(session, role.identity, &mut new, |_| true);
        Err(failed.unwrap_or(Status::Device))
    }

    /// The queue pairs of a peer's offer, by generation, are connected or cannot be.
    pub(crate) fn connected_theirs(&mut self, session: u64, channel: u32, ends: &[(u32, Result<(), Error>)]) {
        // Some may have been waiting for this to be destroyed.
        self.exorcise(|undead| undead.session == session);
        let Some(index) = self.connections.index(channel) else { return };
        let Some(mut connection) = self.connections.take(index) else { return };
        if let Role::In(role) = &mut connection.role
            && let Some(accepting) = role.accepting.take()
        {
            match ends.iter().find_map(|(_, end)| end.err()) {
                None if accept(&mut connection.channel, &accepting) => {}
                // It does not read what it is sent.
                None => {
                    self.end_in(index, *connection);
                    return;
                }
                Some(error) => {
                    log::warn!("queue pairs of a peer cannot be connected: {error}");
                    let gone = |qp: &PeerQp| {
                        accepting.entries.iter().any(|entry| entry.generation.get() == qp.generation)
                    };
                    self.end_peer_qps(session, role.identity, &mut role.qps, gone);
                    refuse(&mut connection.channel, accepting.id, Status::Device);
                }
            }
        }
        self.drive_in(index, connection, true);
    }

    fn connect_qp(
        &mut self,
        role: &mut In,
        port: &PortBody,
        gid_index: u32,
        theirs: &QpEntry,
    ) -> Option<(QpEntry, Connecting)> {
        let psn = random_u64().ok()? as u32 & 0xff_ffff;
        let qp = match self.verbs.create_qp(QpConfig { depth: 1, sges: 1, inline_bytes: 0 }) {
            Ok(qp) => qp,
            Err(error) => {
                log::warn!("no queue pair can be made for a peer: {error}");
                return None;
            }
        };
        self.stats.peer_qps_made += 1;
        role.qps.push(PeerQp { generation: theirs.generation.get(), handle: qp.handle });
        let path = Path {
            peer_qp: theirs.number.get(),
            peer_lid: port.lid.get(),
            peer_gid: port.gid,
            gid_index,
            mtu_bytes: self.port.mtu.min(port.mtu.get()),
            peer_psn: theirs.psn.get(),
            psn,
            reads_from_peer: self.config.reads.min(port.reads).max(1),
            reads_to_peer: 1,
            traffic_class: self.config.traffic_class,
            service_level: self.config.service_level,
            timeout_exponent: self.config.timeout_exponent,
            retries: self.config.retries,
            rnr_retries: 0,
        };
        let access = MrAccess::REMOTE_READ | MrAccess::REMOTE_WRITE;
        let init = self.verbs.modify_qp(qp.handle, QpStep::Init(access));
        let connecting = match init.and_then(|()| self.verbs.connect_qp(qp.handle, path)) {
            Ok(connecting) => connecting,
            Err(error) => {
                log::warn!("a queue pair of a peer cannot be connected: {error}");
                return None;
            }
        };
        let entry = QpEntry {
            generation: theirs.generation,
            number: U32::new(qp.number),
            psn: U32::new(psn),
            reserved: U32::ZERO,
        };
        Some((entry, connecting))
    }

    /// Gives the remote keys of a region to a peer that has the region's key. False: it has not.
    fn resolve(&mut self, channel: &mut Channel, id: u64, of: &Resolve) -> bool {
        let region = RegionId::new(of.region.get(), of.generation.get());
        let found = match self.regions.granted(region, of.key.get()) {
            Err(ErrorKind::NotFound) => Err(Status::NotFound),
            Err(ErrorKind::Stale) => Err(Status::Stale),
            Err(_) => Err(Status::AccessDenied),
            Ok(found) if of.first.get() as usize >= found.ext.chunks.len() => Err(Status::OutOfRange),
            Ok(found) => Ok(found),
        };
        let found = match found {
            Ok(found) => found,
            Err(status) => {
                self.stats.resolves_refused += 1;
                refuse(channel, id, status);
                return false;
            }
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
        channel.push(&[header.as_bytes(), body.as_bytes(), keys[..count].as_bytes()])
    }

    /// Destroys those queue pairs of a peer that `goes` names. What cannot be destroyed joins the undead.
    fn end_peer_qps(
        &mut self,
        session: u64,
        identity: u64,
        qps: &mut Vec<PeerQp>,
        mut goes: impl FnMut(&PeerQp) -> bool,
    ) {
        let (verbs, undead, stats) = (&mut self.verbs, &mut self.undead, &mut self.stats);
        qps.retain(|qp| {
            if !goes(qp) {
                return true;
            }
            if verbs.destroy_qp(qp.handle).is_ok() {
                stats.peer_qps_destroyed += 1;
            } else {
                // In error it takes up nothing new, but may still carry out the packet in its hands: no fence (L5).
                // While it is being connected it can be neither; it goes as soon as that has ended.
                if let Err(error) = verbs.modify_qp(qp.handle, QpStep::Error)
                    && error.code != libc::EBUSY
                {
                    log::warn!("a peer's queue pair can neither be destroyed nor stopped: {error}");
                }
                undead.push(Undead { session, identity, handle: qp.handle });
            }
            false
        });
    }

    /// Tries again to destroy leftover queue pairs; gives how many of them are still there.
    fn exorcise(&mut self, whose: impl Fn(&Undead) -> bool) -> usize {
        let (verbs, stats) = (&mut self.verbs, &mut self.stats);
        let mut left = 0;
        self.undead.retain(|undead| {
            if !whose(undead) {
                return true;
            }
            let gone = verbs.destroy_qp(undead.handle).is_ok();
            stats.peer_qps_destroyed += u64::from(gone);
            left += usize::from(!gone);
            !gone
        });
        left
    }

    /// Whether the peer has a side channel here.
    pub(crate) fn has_peer(&self, identity: u64) -> bool {
        (0..self.connections.bound()).any(|index| {
            match self.connections.get(index).map(|known| &known.role) {
                Some(Role::In(role)) => role.session.is_some() && role.identity == identity,
                _ => false,
            }
        })
    }

    /// Closes every side channel of the peer, destroys the queue pairs that belong to it, and refuses it from now on. True:
    /// the device has let go of all of them, so nothing of the peer lands any more.
    pub(crate) fn expel_peer(&mut self, identity: u64, force: bool) -> Result<bool, Error> {
        let connected = self.has_peer(identity);
        self.expelled.add(identity, force, connected)?;
        for index in 0..self.connections.bound() {
            let is = |role: &Role| matches!(role, Role::In(role) if role.session.is_some() && role.identity == identity);
            if self.connections.get(index).is_some_and(|connection| is(&connection.role))
                && let Some(connection) = self.connections.take(index)
            {
                reset_on_close(&connection.channel.stream);
                self.end_in(index, *connection);
            }
        }
        Ok(self.exorcise(|undead| undead.identity == identity) == 0)
    }

    /// A peer's side channel has ended, and so do its queue pairs.
    pub(crate) fn end_in(&mut self, index: u32, connection: Connection) {
        let Connection { channel, role, .. } = connection;
        if let Role::In(mut role) = role {
            let session = role.session.unwrap_or(0);
            self.end_peer_qps(session, role.identity, &mut role.qps, |_| true);
        }
        drop(channel);
        self.connections.release(index);
        self.inbound -= 1;
    }

    /// Ends every peer's side channel: they come back and make new queue pairs.
    pub(crate) fn end_all_in(&mut self) {
        for index in 0..self.connections.bound() {
            if let Some(connection) = self.connections.take(index) {
                match connection.role {
                    Role::In(_) => self.end_in(index, *connection),
                    Role::Out(_) => self.connections.put(index, connection),
                }
            }
        }
    }

    /// Tells peers that a region is gone, so that they need not find out by a queue pair in error. Best effort.
    pub(crate) fn tell_withdrawn(&mut self, id: RegionId) {
        let header = Header::new(Kind::Withdrawn, 0, 0);
        let body = Withdrawn { region: U32::new(id.index), generation: U32::new(id.generation) };
        for index in 0..self.connections.bound() {
            let Some(mut connection) = self.connections.take(index) else { continue };
            if let Role::In(role) = &connection.role
                && role.session.is_some()
                && !role.closing
            {
                connection.channel.push(&[header.as_bytes(), body.as_bytes()]);
                // A broken connection is noticed by the next poll.
                let _ = connection.channel.flush();
            }
            self.settle_interest(index, connection);
        }
    }
}

fn welcome(status: Status, incarnation: u64) -> Welcome {
    PROTOCOL.welcome(status as u32, incarnation, 0)
}

/// False: there is no room for the answer.
fn accept(channel: &mut Channel, accepting: &Accepting) -> bool {
    let Accepting { id, port, entries } = accepting;
    let header = Header::new(Kind::Accept, entries.len() as u16, *id);
    channel.push(&[header.as_bytes(), port.as_bytes(), entries.as_bytes()])
}

fn refuse(channel: &mut Channel, id: u64, status: Status) {
    channel.push(&[Header::new(Kind::Refused, 0, id).as_bytes(), Refusal::new(status).as_bytes()]);
}
