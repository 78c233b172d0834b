//! Serves the regions that are exported here as namespaces of one subsystem. Hosts' connections are accepted,
//! become queues of controllers by Connect, and are served in order.
//!
//! ```text
//!   listener ──▶ connection ──▶ admin      Connect, properties, Identify, features, logs, keys, resets
//!                     │    └──▶ io         Read, Write, Flush, reservations
//!                     ▼
//!                controllers, namespaces ──▶ reservation
//! ```

mod admin;
mod connection;
mod io;
mod reservation;

use std::collections::HashMap;
use std::io as std_io;

use te_core::{Error, ErrorKind, ExpelMode, Instant};
use te_fabric::net::{Accepted, Listener, set_buffers, set_liveness};
use te_fabric::peer::Expelled;
use te_fabric::timers::Earliest;
use te_fabric::{Interest, Slab};

use self::connection::{Connection, Controller, Phase};
use self::reservation::Reservation;
use crate::command::{Cqe, Sqe, Status};
use crate::context::{Context, Watched, peer_ends};
use crate::pdu::{self, Agreed, Data, End, Fatal, Kind, Pdu, Step};
use crate::stream::{DATA_BUFFER_BYTES, Payload, Source, Stream};
use crate::sys::Socket;

/// Connections that one poll accepts.
const ACCEPTS_MAX: usize = 64;
/// Bytes that one poll receives on one connection.
const RECEIVE_BYTES_MAX: usize = 4 << 20;
/// Unsent bytes of a connection above which its commands wait.
const UNSENT_BYTES_MAX: u64 = 4 << 20;
/// Time that a connection has to become a queue, ms.
const CONNECT_MS: u32 = 5_000;
/// Time that a connection has to close after its last PDU, ms.
const ENDING_MS: u32 = 1_000;

/// Why a connection is closed.
#[derive(Debug)]
pub(super) enum Stop {
    /// The host has broken the protocol: tell it, then close.
    Fatal(Fatal),
    /// Close after what is queued was sent.
    Finish,
    /// The socket has failed, or the host has closed.
    Gone,
}

/// How a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// After what is queued was sent.
    Politely,
    /// By the target.
    AtOnce,
    /// By the host, or its system.
    Closed,
}

impl From<Fatal> for Stop {
    fn from(fatal: Fatal) -> Self {
        Self::Fatal(fatal)
    }
}

impl From<std_io::Error> for Stop {
    fn from(_: std_io::Error) -> Self {
        Self::Gone
    }
}

/// A region as a namespace.
#[derive(Debug)]
struct Served {
    region: u32,
    reservation: Reservation,
}

/// The serving half of a transport.
pub(crate) struct Target {
    listener: Listener,
    nqn: String,
    incarnation: u64,
    connections: Slab<Connection, u32>,
    controllers: Slab<Controller, u32>,
    namespaces: HashMap<u32, Served>,
    /// The last namespace identifier that was given away.
    nsid: u32,
    /// The last controller identifier that was given away, and how often all of them were.
    controller_id: (u16, u8),
    expelled: Expelled,
}

impl Target {
    pub(crate) fn new(listener: Listener, nqn: String, incarnation: u64) -> Self {
        Self {
            listener,
            nqn,
            incarnation,
            connections: Slab::new(),
            controllers: Slab::new(),
            namespaces: HashMap::new(),
            nsid: 0,
            controller_id: (0, 0),
            expelled: Expelled::default(),
        }
    }

    /// Serves region `index` as a namespace; returns its identifier, which no other ever gets.
    ///
    /// # Errors
    /// `Full` when all identifiers were used.
    pub(crate) fn serve(&mut self, index: u32) -> Result<u32, Error> {
        if self.nsid >= 0xffff_fffd {
            return Err(ErrorKind::Full.into());
        }
        self.nsid += 1;
        self.namespaces.insert(self.nsid, Served { region: index, reservation: Reservation::default() });
        Ok(self.nsid)
    }

    /// Ends a namespace, which no payload uses.
    pub(crate) fn unserve(&mut self, nsid: u32) {
        self.namespaces.remove(&nsid);
        for index in 0..self.controllers.bound() {
            if let Some(controller) = self.controllers.get_mut(index) {
                controller.granted.retain(|granted| *granted != nsid);
            }
        }
    }

    /// Ends the use of a region by hosts: what is being received is discarded, what is being sent is copied.
    /// A connection with more to send than may be copied is closed.
    pub(crate) fn withdraw(&mut self, region: u32, cx: &mut Context<'_>) {
        for index in 0..self.connections.bound() {
            let Some(connection) = self.connections.get_mut(index) else { continue };
            for tag in 0..connection.transfers.len() as u16 {
                discard(connection, tag, cx, |transfer| {
                    (transfer.region == region).then_some(Status::INVALID_NAMESPACE)
                });
            }
            let source = Source::Region(region);
            let users = connection.stream.sources().filter(|from| *from == source).count();
            if users > 0 && connection.stream.unsent(source) > cx.config.detached_bytes_max.into() {
                self.close_association(index, cx);
            } else if users > 0 {
                connection.stream.detach(source);
                (0..users).for_each(|_| peer_ends(cx.regions, region));
            }
        }
    }

    /// Whether a host with this identity has a controller here.
    pub(crate) fn has_host(&self, identity: u64) -> bool {
        self.controllers().any(|controller| identity_of(&controller.host) == identity)
    }

    /// Refuses this host from now on, and closes its controllers with what is unread in their connections.
    pub(crate) fn expel(
        &mut self,
        identity: u64,
        mode: ExpelMode,
        cx: &mut Context<'_>,
    ) -> Result<bool, Error> {
        let connected = self.has_host(identity) && !self.expelled.contains(identity);
        self.expelled.add(identity, mode, connected)?;
        for index in 0..self.controllers.bound() {
            let is_it = |controller: &Controller| identity_of(&controller.host) == identity;
            if self.controllers.get(index).is_some_and(is_it) {
                self.close_controller(index, cx);
            }
        }
        Ok(true)
    }

    #[cfg(feature = "testkit")]
    pub(crate) fn close_connections(&mut self, cx: &mut Context<'_>) {
        for index in 0..self.connections.bound() {
            self.close_association(index, cx);
        }
    }

    pub(crate) fn connections(&self) -> usize {
        self.connections.len()
    }

    fn controllers(&self) -> impl Iterator<Item = &Controller> {
        (0..self.controllers.bound()).filter_map(|index| self.controllers.get(index))
    }

    // Connections.

    pub(crate) fn accept_all(&mut self, cx: &mut Context<'_>) {
        for _ in 0..ACCEPTS_MAX {
            match self.listener.accept() {
                Accepted::Connection(stream) => self.admit(stream, cx),
                Accepted::Gone => {}
                Accepted::Empty => return,
                Accepted::Failed(error) => {
                    let _ = cx.epoll.modify(&self.listener, Watched::Listener.token(), Interest::NONE);
                    let until = self.listener.pause(cx.now(), &error, cx.config.connections_max);
                    cx.timers.due_by(until);
                    return;
                }
            }
        }
        cx.timers.wake();
    }

    pub(crate) fn watch_listener(&self, epoll: &te_fabric::Epoll) -> std_io::Result<()> {
        epoll.add(&self.listener, Watched::Listener.token(), Interest::READ)
    }

    fn admit(&mut self, stream: std::net::TcpStream, cx: &mut Context<'_>) {
        if self.connections.len() >= cx.config.connections_max as usize {
            cx.stats.turned_away += 1;
            return;
        }
        let socket = Socket::from(stream);
        let tuned = socket
            .set_nodelay()
            .and_then(|()| set_liveness(&socket, cx.config.peer_silence_ms_max))
            .and_then(|()| set_buffers(&socket, cx.config.send_buffer_bytes, cx.config.receive_buffer_bytes));
        if tuned.is_err() {
            return;
        }
        let (index, name) = self.connections.reserve();
        if cx.epoll.add(&socket, Watched::Host(name).token(), Interest::READ).is_err() {
            self.connections.release(index);
            return;
        }
        let deadline = cx.after_ms(CONNECT_MS);
        cx.timers.changed();
        self.connections.put(index, Connection::new(Stream::new(socket, DATA_BUFFER_BYTES), deadline));
        cx.stats.accepted += 1;
        self.drive_index(index, true, cx);
    }

    pub(crate) fn drive(&mut self, name: u32, readable: bool, cx: &mut Context<'_>) {
        if let Some(index) = self.connections.index(name) {
            self.drive_index(index, readable, cx);
        }
    }

    fn drive_index(&mut self, index: u32, readable: bool, cx: &mut Context<'_>) {
        let Some(mut connection) = self.connections.take(index) else { return };
        let result = self.serve_connection(&mut connection, index, readable, cx);
        let stop = match result {
            Ok(()) => None,
            Err(Stop::Fatal(fatal)) => {
                cx.stats.protocol_errors += 1;
                log::debug!("closing a host's connection: {fatal}");
                let header = &connection.stream.unparsed()[..connection.stream.unparsed().len().min(128)];
                let term = pdu::term_req(End::Controller, fatal, header);
                connection.stream.push_detached(term.into());
                Some(Ending::Politely)
            }
            Err(Stop::Finish) => Some(Ending::Politely),
            Err(Stop::Gone) => Some(Ending::Closed),
        };
        match stop {
            None => {
                self.watch(&mut connection, index, cx);
                self.connections.put(index, connection);
            }
            Some(how) => self.end_connection(index, connection, how, cx),
        }
    }

    /// Ends a connection that was taken out. Its controller ends with it, unless the host has closed the
    /// connection of an I/O queue: the kernel's host does that first, and then shuts the controller down by a
    /// command on its admin queue.
    fn end_connection(&mut self, index: u32, mut connection: Connection, how: Ending, cx: &mut Context<'_>) {
        let controller = match connection.phase {
            Phase::Queue(controller) => Some(controller),
            _ => None,
        };
        let closed_by_host = how == Ending::Closed && connection.qid > 0;
        release(&mut connection, cx);
        let sent = how == Ending::Politely && connection.stream.flush(cx.buffers, cx.stats, |_| {}).is_ok();
        if sent {
            connection.phase = Phase::Ending;
            connection.deadline = Some(cx.after_ms(ENDING_MS));
            cx.timers.changed();
            self.watch(&mut connection, index, cx);
            self.connections.put(index, connection);
        } else {
            self.connections.release(index);
        }
        if let Some(controller) = controller {
            if let Some(controller) = self.controllers.get_mut(controller) {
                controller.connections.retain(|of| *of != index);
            }
            if !closed_by_host {
                self.close_controller(controller, cx);
            }
        }
    }

    /// Closes a connection, and the other connections of its controller.
    fn close_association(&mut self, index: u32, cx: &mut Context<'_>) {
        if let Some(connection) = self.connections.take(index) {
            self.end_connection(index, connection, Ending::AtOnce, cx);
        }
    }

    /// Ends a controller: its connections are closed with all that is unread in them, so that none of its
    /// commands is carried out from here on.
    fn close_controller(&mut self, index: u32, cx: &mut Context<'_>) {
        let Some(controller) = self.controllers.take(index) else { return };
        self.controllers.release(index);
        for of in controller.connections {
            if let Some(mut connection) = self.connections.take(of) {
                release(&mut connection, cx);
                self.connections.release(of);
            }
        }
    }

    fn watch(&self, connection: &mut Connection, index: u32, cx: &mut Context<'_>) {
        let interest = Interest {
            readable: connection.phase == Phase::Ending || !is_stuffed(connection),
            writable: connection.stream.blocked,
        };
        if interest != connection.interest {
            connection.interest = interest;
            let token = Watched::Host(self.connections.name(index)).token();
            let _ = cx.epoll.modify(&connection.stream.socket, token, interest);
        }
    }

    /// Receives and serves what there is, and sends the answers.
    fn serve_connection(
        &mut self,
        connection: &mut Connection,
        index: u32,
        readable: bool,
        cx: &mut Context<'_>,
    ) -> Result<(), Stop> {
        let mut budget = RECEIVE_BYTES_MAX;
        let mut more = readable;
        loop {
            while self.step(connection, index, cx)? {}
            let stuffed = is_stuffed(connection);
            flush(connection, cx)?;
            // Commands that were left in the buffer because of that are taken now: no event comes for them.
            if stuffed && !is_stuffed(connection) {
                continue;
            }
            if !more || is_stuffed(connection) {
                return Ok(());
            }
            match connection.stream.receive(cx.buffers, cx.stats) {
                Ok((bytes, drained)) => {
                    budget = budget.saturating_sub(bytes);
                    more = !drained && budget > 0;
                    if let (Phase::Queue(of), now) = (connection.phase, cx.now())
                        && let Some(controller) = self.controllers.get_mut(of)
                    {
                        controller.last_seen = now;
                    }
                }
                Err(error) if error.kind() == std_io::ErrorKind::WouldBlock => more = false,
                Err(error) if error.kind() == std_io::ErrorKind::Interrupted => {}
                Err(_) => return Err(Stop::Gone),
            }
        }
    }

    /// Takes in one PDU, or the end of data; returns whether there was one.
    fn step(&mut self, connection: &mut Connection, index: u32, cx: &mut Context<'_>) -> Result<bool, Stop> {
        if connection.phase == Phase::Ending {
            let all = connection.stream.unparsed().len();
            connection.stream.take(all);
            return Ok(false);
        }
        if connection.stream.is_receiving_data() {
            let Some(arrived) = connection.stream.arrived() else { return Ok(false) };
            if !arrived.intact {
                cx.stats.corrupt += 1;
            }
            io::data_arrived(connection, arrived.payload, arrived.intact, cx);
            return Ok(true);
        }
        if is_stuffed(connection) {
            return Ok(false);
        }
        let data_max = cx.config.transfer_bytes_max;
        let agreed = connection.stream.agreed;
        let Step::Frame(pdu, used) = pdu::parse(connection.stream.unparsed(), End::Host, agreed, data_max)?
        else {
            return Ok(false);
        };
        match (connection.phase, pdu) {
            (Phase::Opened, Pdu::IcReq(request)) => {
                connection.stream.take(used);
                initialize(connection, &request, cx);
                Ok(true)
            }
            (Phase::Initialized, Pdu::Command(sqe, data)) => {
                self.connect(connection, index, (sqe, data, used), cx)
            }
            (Phase::Queue(controller), Pdu::Command(sqe, data)) => {
                if connection.qid == 0 {
                    self.admin_command(connection, controller, (sqe, data, used), cx)
                } else {
                    self.io_command(connection, controller, (sqe, data, used), cx)
                }
            }
            (Phase::Queue(_), Pdu::H2cData(header, data)) => {
                let tag = header.ttag.get();
                let last = header.common.flags & pdu::FLAG_LAST != 0;
                let range = (header.offset.get(), header.len.get());
                let payload = io::transfer_data(connection, header.cid.get(), tag, range, last, data)?;
                connection.stream.take(used);
                connection.stream.announce(payload);
                Ok(true)
            }
            (_, Pdu::TermReq(fatal)) => {
                log::debug!("a host ends its connection: {fatal}");
                Err(Stop::Finish)
            }
            _ => Err(Fatal::Sequence.into()),
        }
    }

    // Time.

    /// Closes what has run out of time; returns the next deadline.
    pub(crate) fn look(&mut self, cx: &mut Context<'_>) -> Option<Instant> {
        let now = cx.now();
        let mut next = Earliest::default();
        if self.listener.is_pause_over(now)
            && cx.epoll.modify(&self.listener, Watched::Listener.token(), Interest::READ).is_ok()
        {
            self.listener.resume();
        }
        next.note(self.listener.paused_until());
        for index in 0..self.connections.bound() {
            let Some(deadline) = self.connections.get(index).and_then(|connection| connection.deadline)
            else {
                continue;
            };
            if now >= deadline {
                self.close_association(index, cx);
            } else {
                next.note(Some(deadline));
            }
        }
        for index in 0..self.controllers.bound() {
            let Some(controller) = self.controllers.get(index) else { continue };
            if controller.keep_alive_ms == 0 {
                continue;
            }
            let until =
                controller.last_seen + core::time::Duration::from_millis(controller.keep_alive_ms.into());
            if now >= until {
                cx.stats.expired += 1;
                self.close_controller(index, cx);
            } else {
                next.note(Some(until));
            }
        }
        next.get()
    }

    /// This process did not poll for `away`. A controller whose timeout has passed meanwhile has ended,
    /// before anything that its host sent is read: the host may rely on that. What the others' hosts have
    /// sent is read before their silence is looked at.
    pub(crate) fn returned(&mut self, away: core::time::Duration, cx: &mut Context<'_>) {
        for index in 0..self.controllers.bound() {
            let Some(controller) = self.controllers.get(index) else { continue };
            let timeout = core::time::Duration::from_millis(controller.keep_alive_ms.into());
            if !timeout.is_zero() && away >= timeout {
                cx.stats.expired += 1;
                self.close_controller(index, cx);
            }
        }
    }
}

/// The identity in a host's identifier.
fn identity_of(host: &[u8; 16]) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&host[..8]);
    u64::from_le_bytes(bytes)
}

/// Whether no further command is taken before more was sent.
fn is_stuffed(connection: &Connection) -> bool {
    !connection.stream.has_room(4) || connection.stream.queued() > UNSENT_BYTES_MAX
}

fn flush(connection: &mut Connection, cx: &mut Context<'_>) -> Result<(), Stop> {
    let regions = &mut *cx.regions;
    connection.stream.flush(cx.buffers, cx.stats, |source| {
        if let Source::Region(region) = source {
            peer_ends(regions, region);
        }
    })?;
    Ok(())
}

/// Gives up what a connection uses of regions.
fn release(connection: &mut Connection, cx: &mut Context<'_>) {
    let regions = &mut *cx.regions;
    for source in connection.stream.sources() {
        if let Source::Region(region) = source {
            peer_ends(regions, region);
        }
    }
    for transfer in connection.transfers.iter_mut().filter_map(Option::take) {
        if transfer.memory.is_some() {
            peer_ends(cx.regions, transfer.region);
        }
    }
    connection.transfers_open = 0;
    connection.stream.forget();
}

/// Discards the rest of a transfer if `status_of` gives a status, with which it then ends.
fn discard(
    connection: &mut Connection,
    tag: u16,
    cx: &mut Context<'_>,
    status_of: impl Fn(&connection::Transfer) -> Option<Status>,
) {
    let Some(transfer) = connection.transfer(tag) else { return };
    let Some(status) = status_of(transfer) else { return };
    if transfer.memory.take().is_some() {
        transfer.status = status;
        let region = transfer.region;
        connection.stream.redirect(tag);
        peer_ends(cx.regions, region);
    }
}

fn initialize(connection: &mut Connection, request: &pdu::Initialize, cx: &Context<'_>) {
    let (header_digest, data_digest) = (request.digests & 1 != 0, request.digests & 2 != 0);
    let limit = cx.config.transfer_bytes_max;
    let answer = pdu::initialize(Kind::IcResp, 0, (header_digest, data_digest), limit);
    connection.stream.push(zerocopy::IntoBytes::as_bytes(&answer));
    connection.stream.agreed = Agreed { header_digest, data_digest, alignment: 0 };
    connection.phase = Phase::Initialized;
}

/// A response to `sqe`.
fn respond(connection: &mut Connection, cid: u16, status: Status, result: u64, cx: &mut Context<'_>) {
    match status {
        Status::SUCCESS => cx.stats.served += 1,
        _ => cx.stats.refused += 1,
    }
    let sqhd = connection.sqhd;
    let head = pdu::response(Cqe::new(cid, status, sqhd, result), connection.stream.agreed);
    connection.stream.push(head.bytes());
}

/// Data for the host that is copied, and the response.
fn respond_with(connection: &mut Connection, sqe: &Sqe, bytes: &[u8], cx: &mut Context<'_>) {
    let cid = sqe.cid.get();
    let len = bytes.len() as u32;
    if sqe.place() != Some(crate::command::Place::Transport(len)) {
        respond(connection, cid, Status::SGL_LENGTH, 0, cx);
        return;
    }
    let agreed = connection.stream.agreed;
    let head = pdu::transfer(Kind::C2hData, pdu::FLAG_LAST, cid, 0, (0, len), agreed);
    connection.stream.push(head.bytes());
    connection.stream.push_bytes(bytes);
    respond(connection, cid, Status::SUCCESS, 0, cx);
}

/// A command that was parsed: its entry, its in-capsule data, and the length of its head.
type Parsed = (Sqe, Data, usize);

/// Discards in-capsule data that is not wanted, if there is some.
fn skip(connection: &mut Connection, (_, data, used): Parsed) {
    connection.stream.take(used);
    if data.len > 0 {
        connection.stream.announce(Payload::new(None, data, io::NO_TRANSFER));
    }
}
