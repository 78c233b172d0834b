//! Serves peers' operations on the regions that are exported here. Peers' connections are accepted, admitted
//! by their HELLO, served in order, and closed to make room for others.
//!
//! ```text
//!   io ──▶ accept ──▶ connection ──▶ serving ──▶ regions        staged ──▶ regions on devices
//!                      │          │ HELLO, FENCE
//!                      ▼          ▼
//!                  admission: which connections there are
//! ```

mod admission;
mod connection;
mod serving;
mod staged;
#[cfg(test)]
mod tests;

use core::net::IpAddr;
use core::time::Duration;
use std::io;

use te_core::device::Devices;
use te_core::{Error, ExpelMode, Instant, Location, Op};
use te_fabric::net::{Accepted, reset_on_close, set_liveness};
use te_fabric::timers::Earliest;
use te_fabric::{Interest, Slab, Timers};
use zerocopy::IntoBytes;

use self::admission::{Admission, Candidate, silent, victim};
use self::connection::{PeerConnection, Phase, Theirs};
use self::serving::{Answer, Serving, Stop};
use self::staged::{Staged, Stagings, Tag, release};
use crate::config::CONNECTIONS_PER_PEER_MAX;
use crate::connection::{ConnectionName, PeerName, Progress, Reading, Source};
#[cfg(feature = "uring")]
use crate::connection::{Destination, shared_receive};
use crate::context::Context;
use crate::frame::{
    self, ConnectionEntry, ENTRIES_MAX, FrameError, Header, Hello, Kind, PROTOCOL, Request, Status, Step,
};
use crate::io::{Io, RECEIVE_BYTES_MAX, tune, tune_to_peer};
use crate::region::peer_ends;
use crate::stats::Stats;
#[cfg(feature = "uring")]
use crate::sys::Job;
use crate::sys::Socket;

/// Bytes whose checksums one poll computes for peers; the rest is left to the next poll.
const CHECKSUMS_BYTES_MAX: u64 = 8 << 20;
/// Connections that one poll accepts.
const ACCEPTS_MAX: usize = 64;
/// Connections that one peer may have: twice as many as an initiator opens, because those that it has lost
/// may not have ended here yet.
const ADMITTED_PER_PEER_MAX: usize = 2 * CONNECTIONS_PER_PEER_MAX as usize;
/// Time that a connection has to close after its last frame, ms.
const ENDING_MS: u64 = 1_000;
/// Time for which a connection that moves nothing may hold staging slots that others wait for, ms.
const SLOTS_MS: u64 = 1_000;

/// The serving half of a transport.
pub(crate) struct Target {
    /// The incarnation that a HELLO must name.
    incarnation: u64,
    connections: Slab<PeerConnection, PeerName>,
    /// Decides which connections are served.
    admission: Admission,
    answer: Answer,
    /// What is left of [`CHECKSUMS_BYTES_MAX`] in this poll.
    checksums_left: u64,
    /// Connections that the next poll works on without an event: they wait for its checksum budget, for
    /// staging slots, or for hops.
    deferred: Vec<u32>,
    /// Staging slots and hops of peers' operations on memory of devices.
    staging: Stagings,
    spare: Vec<Staged>,
    stats: Stats,
}

impl Target {
    /// A target that serves peers which want to reach this incarnation.
    pub(crate) fn new(incarnation: u64) -> Self {
        Self {
            incarnation,
            connections: Slab::new(),
            admission: Admission::default(),
            answer: Answer::new(),
            checksums_left: 0,
            deferred: Vec::new(),
            staging: Stagings::new(),
            spare: Vec::new(),
            stats: Stats::default(),
        }
    }

    /// Counters of peers' connections and operations.
    pub(crate) const fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Whether the peer has a connection here, or may be alive without one because this target closed its
    /// last one.
    pub(crate) fn has_peer(&self, identity: u64) -> bool {
        let is =
            |index| self.connections.get(index).is_some_and(|connection| connection.role.is_of(identity));
        (0..self.connections.bound()).any(is) || self.admission.was_sent_away(identity)
    }

    /// Closes every connection of the peer, with whatever is unread in it, and refuses the peer from now on.
    /// When this returns `Ok(true)`, no byte of the peer lands any more: without a poll nothing is under way,
    /// no request to the kernel outlives a poll, and a connection without a WELCOME holds no WRITE.
    /// `Ok(false)`: hops to memory of devices still run; they end by themselves.
    ///
    /// # Errors
    /// `InvalidArgument`, `Busy`, `Full`; nothing has changed.
    pub(crate) fn expel(
        &mut self,
        identity: u64,
        mode: ExpelMode,
        cx: &mut Context<'_>,
    ) -> Result<bool, Error> {
        let connected = self.has_peer(identity);
        self.admission.expel(identity, mode, connected)?;
        for index in 0..self.connections.bound() {
            if let Some(connection) = self.connections.get(index)
                && connection.role.is_of(identity)
            {
                reset_on_close(&connection.socket);
                self.end(index, cx);
            }
        }
        cx.timers.wake_if(self.staging.is_hopping());
        Ok(!self.is_landing(identity))
    }

    /// Takes `region` away from every peer's operation: payloads that still arrive are discarded, payloads
    /// that still have to be sent are copied first. A connection for which that copy would be too large is
    /// closed.
    pub(crate) fn withdraw(&mut self, region: u32, cx: &mut Context<'_>) {
        for index in 0..self.connections.bound() {
            let Some(connection) = self.connections.get_mut(index) else { continue };
            let (unsent, incoming, outgoing) = connection.uses(region);
            if unsent > u64::from(cx.config.detached_bytes_max) {
                reset_on_close(&connection.socket);
                self.end(index, cx);
                continue;
            }
            connection.inbox.redirect(region, Status::Withdrawn as u32);
            connection.outbox.detach(Source::Region(region));
            for _ in 0..incoming + outgoing {
                peer_ends(cx.regions, region);
            }
        }
    }

    /// Closes every connection, even in the middle of a frame.
    #[cfg(feature = "testkit")]
    pub(crate) fn close_connections(&mut self, cx: &mut Context<'_>) {
        for index in 0..self.connections.bound() {
            if let Some(connection) = self.connections.get(index) {
                reset_on_close(&connection.socket);
                self.end(index, cx);
            }
        }
    }
}

/// Work on single connections.
impl Target {
    /// Begins a poll: works on the connections that the last one deferred.
    #[inline]
    pub(crate) fn begin_poll(&mut self, cx: &mut Context<'_>) {
        self.checksums_left = CHECKSUMS_BYTES_MAX;
        if !self.deferred.is_empty() {
            self.drive_deferred(cx);
        }
    }

    #[inline(never)]
    fn drive_deferred(&mut self, cx: &mut Context<'_>) {
        let count = self.deferred.len();
        for at in 0..count {
            // It may have to wait once more, and is then added to the list again.
            let index = std::mem::replace(&mut self.deferred[at], u32::MAX);
            if let Some(connection) = self.connections.get_mut(index) {
                connection.role.waits = false;
            }
            self.drive_connection(index, Reading::No, false, cx);
        }
        self.deferred.drain(..count);
    }

    /// Works on a connection after an event.
    pub(crate) fn drive(&mut self, name: PeerName, reading: Reading, writable: bool, cx: &mut Context<'_>) {
        if let Some(index) = self.connections.index(name) {
            self.drive_connection(index, reading, writable, cx);
        }
    }

    /// Reads a connection without asking the poller first. Returns false when it is no longer active, or has
    /// ended.
    pub(crate) fn drive_active(&mut self, name: PeerName, cx: &mut Context<'_>) -> bool {
        let Some(index) = self.connections.index(name) else { return false };
        match self.connections.get_mut(index) {
            Some(connection) if connection.is_active() && connection.paused => {
                connection.read_nothing();
                connection.is_active()
            }
            Some(connection) if connection.is_active() => {
                self.drive_connection(index, Reading::Yes, false, cx)
            }
            _ => false,
        }
    }

    /// Works on a connection. Returns whether it is worth reading without asking the poller first.
    fn drive_connection(
        &mut self,
        index: u32,
        mut reading: Reading,
        writable: bool,
        cx: &mut Context<'_>,
    ) -> bool {
        let Some(connection) = self.connections.get_mut(index) else { return false };
        connection.blocked &= !writable;
        let mut stopped = false;
        while let Some(connection) = self.connections.get_mut(index) {
            let Context { config, io, regions, timers } = &mut *cx;
            let serving = Serving {
                now: timers.now(),
                regions,
                stats: &mut self.stats,
                answer: &mut self.answer,
                staging: &mut self.staging,
                spare: &mut self.spare,
                checksums_left: &mut self.checksums_left,
                slice_bytes_max: config.slice_bytes_max,
            };
            match (Turn { serving, io, timers }.run(connection, &mut reading, stopped)) {
                Ok(Stop::Wait) => return self.end_turn(index, cx),
                Ok(Stop::Hello(hello)) => self.hello(index, &hello, cx),
                Ok(Stop::Fence) => self.fence(index, cx),
                Ok(Stop::Broken(error)) => self.end_with(index, error, cx),
                Ok(Stop::Lost) => {
                    log::warn!(
                        "closed a peer's connection: memory of a device was withdrawn or could not be copied"
                    );
                    reset_on_close(&connection.socket);
                    self.end(index, cx);
                }
                Err(error) => {
                    log::debug!("a peer's connection ended: {error}");
                    self.end(index, cx);
                }
            }
            stopped = true;
        }
        false
    }

    /// Ends the work on a connection: nothing more can be done on it for the moment. Returns whether it is
    /// worth reading without asking the poller first.
    fn end_turn(&mut self, index: u32, cx: &mut Context<'_>) -> bool {
        let Some(connection) = self.connections.get_mut(index) else { return false };
        if connection.role.waits || (self.checksums_left == 0 && connection.paused && connection.has_room()) {
            if !self.deferred.contains(&index) {
                self.deferred.push(index);
            }
            cx.timers.wake();
        }
        connection.finish_ending();
        cx.io.settle_interest(connection);
        connection.is_active()
    }
}

/// Work on one connection.
struct Turn<'a> {
    serving: Serving<'a>,
    io: &'a mut Io,
    timers: &'a mut Timers,
}

impl Turn<'_> {
    /// Sends answers, takes in what has arrived, serves it, and sends again. `stopped` says that there may be
    /// requests that were received before and not served.
    fn run(
        &mut self,
        connection: &mut PeerConnection,
        reading: &mut Reading,
        stopped: bool,
    ) -> io::Result<Stop> {
        if stopped
            && !connection.role.waits
            && let Some(stop) = self.requests(connection)
        {
            return Ok(stop);
        }
        if let Some(stop) = self.serve(connection)? {
            return Ok(stop);
        }
        if reading.is_wanted() && !connection.paused {
            if let Some(stop) = self.read(connection, reading)? {
                return Ok(stop);
            }
            if let Some(stop) = self.serve(connection)? {
                return Ok(stop);
            }
        }
        Ok(Stop::Wait)
    }

    /// Sends answers; while that makes room, serves the requests that wait for it.
    fn serve(&mut self, connection: &mut PeerConnection) -> io::Result<Option<Stop>> {
        loop {
            self.send(connection)?;
            if !connection.paused
                || connection.role.waits
                || !connection.has_room()
                || *self.serving.checksums_left == 0
            {
                return Ok(None);
            }
            connection.paused = false;
            self.io.stopped_reading(connection, false, self.timers);
            if let Some(stop) = self.requests(connection) {
                return Ok(Some(stop));
            }
        }
    }

    /// Sends answers, and releases the regions and staging slots whose last byte is sent.
    fn send(&mut self, connection: &mut PeerConnection) -> io::Result<()> {
        let Serving { regions, staging, now, .. } = &mut self.serving;
        self.io.send(connection, |role, source, progress| match source {
            Source::Region(region) => {
                role.used = *now;
                if progress == Progress::Finished {
                    peer_ends(regions, region);
                }
            }
            Source::Slot(slot) => {
                role.used = *now;
                if progress == Progress::Finished {
                    staging.give_back(slot);
                }
            }
            Source::Connection | Source::Piece(_) => {}
        })?;
        Ok(())
    }

    fn read(&mut self, connection: &mut PeerConnection, reading: &mut Reading) -> io::Result<Option<Stop>> {
        let mut budget = RECEIVE_BYTES_MAX;
        while !connection.paused {
            let Some(received) = self.io.receive(connection, reading)? else { break };
            self.io.mark_active(connection);
            if connection.inbox.open_payloads().first().is_some_and(|payload| payload.memory.is_some()) {
                connection.role.used = self.serving.now;
            }
            if let Some(stop) = self.requests(connection) {
                return Ok(Some(stop));
            }
            budget = budget.saturating_sub(received.bytes);
            if received.drained || budget == 0 {
                let drained = received.drained && !connection.finished;
                self.io.stopped_reading(connection, drained, self.timers);
                break;
            }
        }
        Ok(None)
    }

    /// Serves what has arrived. `None`: no request in it affects other connections.
    fn requests(&mut self, connection: &mut PeerConnection) -> Option<Stop> {
        Some(self.serving.run(connection)).filter(|stop| !matches!(stop, Stop::Wait))
    }
}

/// Requests that affect other connections.
impl Target {
    /// Answers a HELLO.
    fn hello(&mut self, index: u32, hello: &Hello, cx: &mut Context<'_>) {
        let status = self.admit(index, hello, cx);
        let Some(connection) = self.connections.get_mut(index) else { return };
        welcome(connection, status, self.incarnation, cx.config.slice_bytes_max);
        if status != Status::Ok {
            self.begin_end(index, cx);
        }
    }

    /// The status that answers a HELLO. `Ok`: the connection is admitted and counted.
    fn admit(&mut self, index: u32, hello: &Hello, cx: &mut Context<'_>) -> Status {
        let identity = hello.identity.get();
        if hello.target.get() != self.incarnation {
            return Status::Restarted;
        }
        if self.admission.is_expelled(identity) {
            self.stats.turned_away += 1;
            return Status::Expelled;
        }
        if self.live_connections(identity) >= ADMITTED_PER_PEER_MAX || !self.make_room(index, identity, cx) {
            self.stats.turned_away += 1;
            return Status::Full;
        }
        let Some(connection) = self.connections.get_mut(index) else { return Status::Full };
        self.admission.admit(connection.name, identity);
        connection.role.phase = Phase::Live;
        connection.deadline = None;
        connection.role.used = cx.now();
        // Its deadline for silence begins now.
        cx.timers.changed();
        Status::Ok
    }

    /// Connections of the peer that are served.
    fn live_connections(&self, identity: u64) -> usize {
        self.candidates().filter(|candidate| candidate.identity == identity).count()
    }

    /// Makes room for connection `index`, whose HELLO has arrived. Returns false when every connection is
    /// busy or recently used, and no address and no process has more than the new one's.
    fn make_room(&mut self, index: u32, identity: u64, cx: &mut Context<'_>) -> bool {
        let own = cx.io.connections() - self.connections.len();
        let admitted = self.admission.admitted();
        if admitted < cx.config.connections_for_peers() && own + admitted < cx.config.connections_max as usize
        {
            return true;
        }
        let Some(newcomer) = self.connections.get(index) else { return false };
        let candidates: Vec<Candidate> = self.candidates().collect();
        let Some(leaving) = victim(&candidates, newcomer.role.group, identity, cx.now()) else {
            return false;
        };
        // The connection that is closed needs one of the places for connections that are not admitted, and
        // the new one no longer does.
        self.admission.leave(newcomer.name);
        self.evict(leaving, cx);
        true
    }

    /// The connections that are served.
    fn candidates(&self) -> impl Iterator<Item = Candidate> {
        let connections =
            (0..self.connections.bound()).filter_map(|index| Some((index, self.connections.get(index)?)));
        connections.filter(|(_, connection)| connection.role.phase == Phase::Live).map(
            |(index, connection)| {
                let Theirs { group, identity, carried, used, .. } = connection.role;
                Candidate { index, group, identity, carried, used, idle: connection.is_idle() }
            },
        )
    }

    /// L5: closes every connection of the session that the FENCE does not list, with whatever is unread in
    /// it, and answers.
    fn fence(&mut self, index: u32, cx: &mut Context<'_>) {
        let Some(connection) = self.connections.get(index) else { return };
        let (session, identity) = (connection.role.session(), connection.role.identity);
        let Ok(Step::Frame(Request::Fence { id, connections }, head)) =
            frame::parse_request(connection.inbox.unparsed())
        else {
            return;
        };
        let mut listed = [ConnectionEntry::new(0, 0); ENTRIES_MAX];
        let listed = &mut listed[..connections.len()];
        listed.copy_from_slice(connections);
        for other in (0..self.connections.bound()).filter(|&other| other != index) {
            if self
                .connections
                .get(other)
                .is_some_and(|connection| connection.role.is_fenced(session, listed))
            {
                self.end(other, cx);
            }
        }
        let waits = self.is_landing(identity);
        let Some(connection) = self.connections.get_mut(index) else { return };
        if waits {
            // The next poll looks at the FENCE again.
            (connection.paused, connection.role.waits) = (true, true);
            return;
        }
        connection.outbox.push_head(&[Header::new(Kind::FenceAck, 0, 0, id).as_bytes()]);
        connection.inbox.take(head);
        self.stats.fences_served += 1;
    }

    /// Sends a peer the error by which it broke the protocol, as the connection's last frame.
    fn end_with(&mut self, index: u32, error: FrameError, cx: &mut Context<'_>) {
        log::warn!("a peer broke the protocol: {error}");
        self.stats.protocol_errors += 1;
        let Some(connection) = self.connections.get_mut(index) else { return };
        if connection.role.phase == Phase::Greeting {
            welcome(connection, error.into(), self.incarnation, cx.config.slice_bytes_max);
        } else {
            let header = Header::new(Kind::Error, 0, 0, Status::from(error) as u64);
            connection.outbox.push_head(&[header.as_bytes()]);
        }
        self.begin_end(index, cx);
    }
}

fn welcome(connection: &mut PeerConnection, status: Status, incarnation: u64, slice_bytes_max: u32) {
    let welcome = PROTOCOL.welcome(status as u32, incarnation, u64::from(slice_bytes_max));
    connection.outbox.push_head(&[welcome.as_bytes()]);
}

/// Connections begin.
impl Target {
    /// Accepts the connections that wait.
    pub(crate) fn accept_all(&mut self, cx: &mut Context<'_>) {
        for _ in 0..ACCEPTS_MAX {
            match cx.io.accept() {
                Accepted::Connection(stream) => {
                    if let Err(error) = self.adopt(stream.into(), cx) {
                        log::debug!("cannot use an accepted connection: {error}");
                    }
                }
                Accepted::Gone => {}
                Accepted::Empty => return,
                Accepted::Failed(error) => {
                    self.cannot_accept(&error, cx);
                    return;
                }
            }
        }
        // There may be more, and not every driver reports that twice.
        cx.io.accepts_more();
        cx.timers.wake();
    }

    /// Pauses accepting, because trying again at once would fail again, and closes one connection that is
    /// silent to free its descriptor.
    fn cannot_accept(&mut self, error: &io::Error, cx: &mut Context<'_>) {
        let candidates: Vec<Candidate> = self.candidates().collect();
        if let Some(index) = silent(&candidates, cx.now()) {
            self.evict(index, cx);
        }
        cx.io.pause_listener(error, cx.config.connections_max, cx.timers);
    }

    fn adopt(&mut self, socket: Socket, cx: &mut Context<'_>) -> io::Result<()> {
        self.stats.accepted += 1;
        let role = Theirs::new(socket.peer_address()?.ip(), cx.now());
        tune(&socket, cx.config)?;
        tune_to_peer(&socket, cx.config);
        set_liveness(&socket, cx.config.peer_silence_ms_max)?;
        let (group, (index, name)) = (role.group, self.connections.reserve());
        let mut connection = PeerConnection::new(socket, name.raw(), Interest::READ, role);
        if let Err(error) = cx.io.watch(&connection) {
            self.connections.release(index);
            return Err(error);
        }
        connection.deadline = Some(cx.after_ms(u64::from(cx.config.connect_ms_max)));
        self.connections.put(index, connection);
        self.add_unadmitted(name.raw(), group, cx);
        cx.timers.changed();
        Ok(())
    }

    /// Adds a connection that is not admitted; another one may be closed for it.
    fn add_unadmitted(&mut self, name: u64, group: IpAddr, cx: &mut Context<'_>) {
        if let Some(gone) = self.admission.add_unadmitted(name, group)
            && let ConnectionName::Peer(gone) = ConnectionName::of(gone)
            && let Some(index) = self.connections.index(gone)
        {
            self.stats.turned_away += 1;
            self.end(index, cx);
        }
    }
}

/// Connections end.
impl Target {
    /// Closes an idle connection with a GO_AWAY, so that its peer loses nothing.
    fn evict(&mut self, index: u32, cx: &mut Context<'_>) {
        let Some(connection) = self.connections.get_mut(index) else { return };
        self.stats.evicted += 1;
        self.admission.remember_sent_away(connection.role.identity);
        connection.send_go_away();
        self.begin_end(index, cx);
        self.drive_connection(index, Reading::No, false, cx);
    }

    /// Begins to close a connection: only what is queued is still sent.
    fn begin_end(&mut self, index: u32, cx: &mut Context<'_>) {
        let Some(connection) = self.connections.get_mut(index) else { return };
        let was = std::mem::replace(&mut connection.role.phase, Phase::Ending);
        connection.deadline = Some(cx.after_ms(ENDING_MS));
        let (name, group) = (connection.name, connection.role.group);
        if was == Phase::Live {
            self.admission.dismiss();
            self.add_unadmitted(name, group, cx);
        }
        cx.timers.changed();
    }

    /// Ends a connection: nothing more of it is read or written.
    fn end(&mut self, index: u32, cx: &mut Context<'_>) {
        let Some(mut connection) = self.connections.remove(index) else { return };
        match connection.role.phase {
            Phase::Live => self.admission.dismiss(),
            Phase::Greeting | Phase::Ending => self.admission.leave(connection.name),
        }
        release(&mut connection, cx.regions, &mut self.staging);
        for source in connection.outbox.sources() {
            match source {
                Source::Region(region) => peer_ends(cx.regions, region),
                Source::Slot(slot) => self.staging.give_back(slot),
                Source::Connection | Source::Piece(_) => {}
            }
        }
        cx.io.forget(&connection);
    }

    /// Closes connections whose deadline has passed. Returns when to look again.
    pub(crate) fn look(&mut self, cx: &mut Context<'_>) -> Option<Instant> {
        let mut next = Earliest::default();
        for index in 0..self.connections.bound() {
            next.note(self.check_deadline(index, cx));
            next.note(self.check_slots(index, cx));
        }
        next.get()
    }

    /// Closes a connection whose deadline has passed. Returns the deadline of one that is still open.
    fn check_deadline(&mut self, index: u32, cx: &mut Context<'_>) -> Option<Instant> {
        let crowded = self.admission.admitted() > cx.config.connections_for_peers() / 2;
        let connection = self.connections.get(index)?;
        let deadline =
            connection.deadline.or_else(|| connection.quiet_until(crowded, cx.config.idle_ms_max))?;
        if cx.now() < deadline {
            return Some(deadline);
        }
        if connection.role.phase == Phase::Live && connection.is_idle() {
            self.evict(index, cx);
            return self.connections.get(index)?.deadline;
        }
        self.end(index, cx);
        None
    }
}

/// Memory of devices.
impl Target {
    /// Prepares for regions on memory at this location.
    ///
    /// # Errors
    /// Those of [`Devices::stager`].
    pub(crate) fn prepare(&mut self, location: Location, devices: &dyn Devices) -> Result<(), Error> {
        self.staging.prepare(location, devices)
    }

    /// Staging slots that connections hold.
    #[cfg(feature = "testkit")]
    pub(crate) fn slots_taken(&self) -> usize {
        self.staging.slots_taken()
    }

    /// Takes in the hops that have ended, and starts those that wait.
    pub(crate) fn run_staging(&mut self, cx: &mut Context<'_>) {
        self.take_hops(cx);
        self.staging.flush();
        cx.timers.wake_if(self.staging.is_hopping());
    }

    /// Takes in the hops that have ended.
    fn take_hops(&mut self, cx: &mut Context<'_>) {
        self.staging.collect();
        while let Some(end) = self.staging.next_end() {
            peer_ends(cx.regions, end.tag.region);
            let is_used = self
                .index_of(&end.tag)
                .and_then(|index| self.connections.get_mut(index)?.role.staged.as_mut())
                .is_some_and(|staged| staged.hop_ended(end.slot, &end.tag, end.result));
            if !is_used {
                self.staging.give_back(end.slot);
            }
        }
    }

    /// The connection that a hop belongs to, if it has not ended.
    fn index_of(&self, tag: &Tag) -> Option<u32> {
        match ConnectionName::of(tag.connection) {
            ConnectionName::Peer(name) => self.connections.index(name),
            ConnectionName::Own(_) => None,
        }
    }

    /// Whether hops of this peer's WRITEs still run whose connections have ended.
    fn is_landing(&self, identity: u64) -> bool {
        let is = |tag: &Tag| tag.op == Op::Write && tag.identity == identity && self.index_of(tag).is_none();
        self.staging.hops().any(is)
    }

    /// Closes a connection that moves nothing while others wait for the staging slots that it holds. Returns
    /// when that is due.
    fn check_slots(&mut self, index: u32, cx: &mut Context<'_>) -> Option<Instant> {
        if self.staging.is_unused() || !self.deferred.iter().any(|&other| other != index) {
            return None;
        }
        let connection = self.connections.get(index).filter(|connection| connection.holds_slots())?;
        let deadline = connection.role.used + Duration::from_millis(SLOTS_MS);
        if cx.now() < deadline {
            return Some(deadline);
        }
        reset_on_close(&connection.socket);
        self.end(index, cx);
        None
    }
}

/// One receive for several connections.
#[cfg(feature = "uring")]
impl Target {
    /// Whether the connection is to be read once more.
    pub(crate) fn is_active(&self, name: PeerName) -> bool {
        let connection = self.connections.index(name).and_then(|index| self.connections.get(index));
        connection.is_some_and(|connection| connection.is_active() && !connection.paused)
    }

    /// See [`shared_receive::set_finished`].
    pub(crate) fn set_finished(&mut self, name: PeerName) {
        shared_receive::set_finished(&mut self.connections, name);
    }

    /// See [`shared_receive::receives`].
    pub(crate) fn receives<'a>(
        &'a mut self,
        names: &[u64],
        indexes: &'a mut [u32],
    ) -> impl Iterator<Item = (u64, Job<'a, Destination>)> {
        shared_receive::receives(&mut self.connections, names, indexes, |connection| !connection.paused)
    }

    /// See [`shared_receive::arrived`].
    pub(crate) fn arrived(
        &mut self,
        name: PeerName,
        offered: usize,
        result: io::Result<usize>,
    ) -> Option<Reading> {
        shared_receive::arrived(&mut self.connections, name, offered, result)
    }
}
