//! One poll: completions first, then control connections that are ready, then deadlines, then work that has
//! become possible. And the steps that involve several parts: the end of a control connection, the removal
//! of a peer, the loss of a port.

use core::time::Duration;

use te_core::{Error, ErrorKind, Instant};
use te_fabric::net::error_of;
use te_fabric::peer::Attempt;
use te_fabric::timers::Earliest;

use super::{RdmaTransport, lend};
use crate::env::Env;
use crate::io::connects::{End, Requester};
use crate::io::{Outage, PortChange, ROUNDS_MAX, Ready, Watched};
use crate::peers::outbound::ConnectionEnd;
use crate::sys::verbs::{AsyncEvent, Verbs};

/// While transfers run, epoll is called in one of this many polls.
const EPOLL_EVERY: u32 = 16;
/// The most events of the device that one poll takes.
const EVENTS_MAX: usize = 64;

impl<V: Verbs> RdmaTransport<V> {
    pub(super) fn drive(&mut self, now: Instant) {
        self.forgive_absence(now);
        self.timers.begin(now);
        self.target.begin();
        if self.io.links().outstanding() > 0 {
            let count = self.initiator.reap(lend!(self));
            self.io.polled(count);
        }
        if self.target.has_deferred() {
            self.target.drive_deferred(lend!(self));
        }
        if self.io.is_connecting() {
            self.take_connected();
        }
        if self.io.links().outstanding() == 0
            || self.peers.owes_answers()
            || self.io.is_armed()
            || self.timers.polls().is_multiple_of(EPOLL_EVERY)
        {
            self.drive_ready();
        }
        if self.timers.is_due() {
            self.run_timers();
        }
        if self.initiator.listed_count() > 0 {
            self.serve_listed();
        }
        if self.io.wants_event() {
            self.arm();
        }
    }

    /// Requests an event at the next completion, and polls once more: a completion in between raises none.
    fn arm(&mut self) {
        if self.io.arm().is_err() {
            self.initiator.lose_port(Outage::Device, lend!(self));
            return;
        }
        let count = self.initiator.reap(lend!(self));
        if count > 0 {
            self.io.polled(count);
            self.timers.wake();
            self.serve_listed();
        }
    }

    /// Handles everything that epoll reports.
    fn drive_ready(&mut self) {
        let count = self.io.ready();
        for at in 0..count {
            match self.io.event(at) {
                Ready::Listener => self.target.accept_all(lend!(self)),
                Ready::Device => self.take_events(),
                Ready::Connects => self.take_connected(),
                Ready::Connection(Watched::Inbound(name), readable) => {
                    self.target.drive_named(name, readable, lend!(self));
                }
                Ready::Connection(Watched::Outbound(name), readable) => {
                    if let Some(index) = self.peers.index(name) {
                        self.drive_connection(index, readable);
                    }
                }
            }
        }
        // epoll may have more to report.
        self.timers.wake_if(self.io.is_full(count));
    }

    /// Handles the events of the device. It is called when either of its file descriptors is readable.
    fn take_events(&mut self) {
        for _ in 0..EVENTS_MAX {
            let Some(event) = self.io.next_event() else { break };
            match event {
                AsyncEvent::PortActive | AsyncEvent::GidChange => self.refresh_port(),
                AsyncEvent::PortError => self.initiator.lose_port(Outage::Port, lend!(self)),
                AsyncEvent::CqError | AsyncEvent::DeviceFatal => {
                    self.initiator.lose_port(Outage::Device, lend!(self));
                }
                AsyncEvent::QpError(number) => self.initiator.qp_failed(number, lend!(self)),
                AsyncEvent::Other(_) => {}
            }
        }
        self.io.disarm();
        if self.io.links().outstanding() > 0 {
            let count = self.initiator.reap(lend!(self));
            if count > 0 {
                self.io.polled(count);
            }
        }
    }

    /// Queries the port after one of its events.
    fn refresh_port(&mut self) {
        match self.io.refresh_port(self.config.gid_index) {
            PortChange::Lost => self.initiator.lose_port(Outage::Port, lend!(self)),
            PortChange::Active { moved } => {
                if moved {
                    // Packets no longer reach the old queue pairs, neither ours nor peers'.
                    self.initiator.lose_port(Outage::Port, lend!(self));
                    self.target.end_all(&mut self.io);
                }
                if self.io.regain_port() {
                    self.initiator.list_all(&mut self.timers);
                }
            }
        }
    }

    /// Handles queue pairs, ours and peers', whose connecting has ended.
    fn take_connected(&mut self) {
        for End { requester, ends } in self.io.take_connected() {
            match requester {
                Requester::Initiator { peer } => self.initiator.connected(peer, ends, lend!(self)),
                Requester::Target { session, connection } => {
                    self.target.connected(session, connection, &ends, lend!(self));
                }
            }
        }
    }

    fn run_timers(&mut self) {
        let now = self.timers.now();
        self.timers.looking();
        self.io.resume_listener(now);
        if self.initiator.is_draining() {
            self.initiator.flush_canceled(lend!(self));
        }
        if self.io.links().any_flushing() {
            self.initiator.destroy_late(lend!(self));
        }
        for index in 0..self.peers.bound() {
            if let Some((end, owes)) = self.peers.overdue(index, now) {
                self.connection_overdue(index, end, owes);
            }
        }
        self.target.end_late(now, &mut self.io);
        let mut next = Earliest::default();
        next.note(self.io.listener_paused_until());
        next.note(self.peers.next_deadline());
        next.note(self.target.next_deadline());
        let paused_until = |peer| self.peers.paused_until(peer);
        next.note(self.initiator.next_deadline(now, self.io.links(), paused_until));
        self.timers.looked(next.get());
    }

    /// Extends the peers' deadlines when this process itself was not polled for a while.
    fn forgive_absence(&mut self, now: Instant) {
        let Some(away) = self.timers.absence(now, self.config.peer_silence_ms_max) else { return };
        if self.peers.owes_answers() {
            self.peers.forgive(away);
            self.target.forgive(away);
        }
    }

    /// Serves the peers that have work.
    fn serve_listed(&mut self) {
        for at in 0..self.initiator.listed_count() {
            if let Some(peer) = self.initiator.listed(at) {
                self.serve_peer(peer);
            }
        }
        self.initiator.unlist_idle();
    }

    fn serve_peer(&mut self, peer: u32) {
        if let Some(outage) = self.io.outage() {
            self.initiator.fail_waiting(peer, outage.error(), &mut self.memory);
        }
        match self.peers.connection_of(peer) {
            Some(connection) if self.initiator.is_up(peer) => {
                self.send_requests(peer, connection);
                self.initiator.post(peer, lend!(self));
            }
            Some(_) => {}
            None if self.initiator.needs_connection(peer) => self.open_connection(peer),
            None => {}
        }
    }

    /// Sends the pending requests to a peer.
    fn send_requests(&mut self, peer: u32, connection: u32) {
        if !self.initiator.has_requests(peer, &self.io, &self.config) {
            return;
        }
        let Some(to) = self.peers.outbound(connection) else { return };
        let count = self.initiator.write_requests(peer, to, lend!(self));
        match self.peers.requested(connection, count, &mut self.timers, &self.config) {
            Ok(()) => self.peers.settle_interest(connection, &self.io),
            Err(end) => self.end_connection(connection, end),
        }
    }
}

/// Control connections that we open.
impl<V: Verbs> RdmaTransport<V> {
    /// Opens the control connection to a peer, unless the peer is in backoff or refuses us for good.
    fn open_connection(&mut self, peer: u32) {
        let to = match self.peers.attempt(peer, self.timers.now()) {
            Some(Attempt::To(number, address)) => (number, address),
            Some(Attempt::Later) | None => return,
            Some(Attempt::Never(error)) => {
                self.give_up(peer, error);
                return;
            }
        };
        if self.peers.is_full(&self.config) {
            // When all are busy, the peer waits until one of them is not.
            let Some(victim) = self.peers.evict(|peer| self.initiator.use_state(peer)) else { return };
            self.end_connection(victim, ConnectionEnd::Dropped);
        }
        match self.peers.open(peer, to, &self.io, &mut self.timers, &self.config) {
            Ok(()) => self.initiator.connection_opened(peer),
            Err(error) => self.connection_refused(peer, to.0, error_of(&error)),
        }
    }

    /// Handles a control connection of ours that is ready.
    fn drive_connection(&mut self, index: u32, readable: bool) {
        match self.try_drive_connection(index, readable) {
            Ok(()) => self.peers.settle_interest(index, &self.io),
            Err(end) => self.end_connection(index, end),
        }
    }

    fn try_drive_connection(&mut self, index: u32, readable: bool) -> Result<(), ConnectionEnd> {
        if !self.peers.greet(index)? {
            return Ok(());
        }
        for round in 0.. {
            let came = readable && round < ROUNDS_MAX && self.peers.receive(index)?;
            let mut any = false;
            while self.take_frame(index)? {
                any = true;
            }
            if !came && !any {
                break;
            }
        }
        self.peers.flush(index)
    }

    /// Handles one frame. False: it has not arrived completely.
    fn take_frame(&mut self, index: u32) -> Result<bool, ConnectionEnd> {
        let until = self.timers.now() + Duration::from_millis(u64::from(self.config.peer_silence_ms_max));
        let Some(frame) = self.peers.next_frame(index, until)? else { return Ok(false) };
        let (peer, bytes) = (frame.peer, frame.bytes);
        let known = match frame.response {
            Some(response) => self.initiator.answer(peer, &response, lend!(self)),
            None => {
                self.initiator.connection_up(peer, &mut self.timers);
                true
            }
        };
        if !known {
            return Err(ConnectionEnd::Lost(ErrorKind::Protocol.into()));
        }
        self.peers.consume(index, bytes);
        Ok(true)
    }

    /// Closes a control connection of ours. Posted work to that peer ends with it.
    fn end_connection(&mut self, index: u32, end: ConnectionEnd) {
        let Some(closed) = self.peers.close(index) else { return };
        let peer = closed.peer;
        log::debug!("the control connection to peer {peer} ended: {end:?}");
        let error = match end {
            ConnectionEnd::Lost(error) | ConnectionEnd::Refused(error) => te_fabric::net::peer_dead(error),
            ConnectionEnd::Dropped => ErrorKind::Canceled.into(),
        };
        self.initiator.connection_lost(peer, error, lend!(self));
        match end {
            ConnectionEnd::Refused(error) => self.connection_refused(peer, closed.address, error),
            // Another attempt would fail in the same way at once.
            ConnectionEnd::Lost(_) if !closed.answered || error.kind == ErrorKind::Protocol => {
                self.peers.back_off(peer, &mut self.timers, &self.config);
                self.give_up(peer, error);
            }
            ConnectionEnd::Lost(_) | ConnectionEnd::Dropped => {}
        }
        self.initiator.list(peer, &mut self.timers);
    }

    /// Closes a control connection whose deadline has passed. `owes`: the peer has not answered in time.
    fn connection_overdue(&mut self, index: u32, end: ConnectionEnd, owes: bool) {
        let peer = self.peers.outbound(index).map(|out| out.peer());
        self.end_connection(index, end);
        if let (Some(peer), ConnectionEnd::Lost(error), true) = (peer, end, owes) {
            let limit = self.config.peer_silence_ms_max;
            log::warn!("peer {peer} has not answered for {limit} ms (peer_silence_ms_max): given up");
            self.peers.back_off(peer, &mut self.timers, &self.config);
            self.give_up(peer, error);
        }
    }

    /// Handles a failed attempt to open a control connection to address number `address`.
    fn connection_refused(&mut self, peer: u32, address: u8, error: Error) {
        let (timers, config) = (&mut self.timers, &self.config);
        if let Some(error) = self.peers.refused(peer, address, error, timers, config) {
            self.give_up(peer, error);
        }
    }

    /// Ends the slices and fences that wait for a control connection which cannot be opened.
    fn give_up(&mut self, peer: u32, error: Error) {
        let harmless = self.peers.is_harmless(peer);
        self.initiator.give_up(peer, harmless, error, &mut self.memory);
    }

    /// Removes a peer that nothing needs any more.
    pub(super) fn drop_idle_peer(&mut self, peer: u32) {
        if !self.initiator.is_idle(peer) {
            return;
        }
        if let Some(connection) = self.peers.connection_of(peer) {
            self.end_connection(connection, ConnectionEnd::Dropped);
        }
        self.io.links_mut().orphan(peer);
        self.initiator.remove_peer(peer);
        self.peers.forget(peer);
    }

    /// Resets every control connection of ours.
    #[cfg(any(test, feature = "testkit"))]
    pub(super) fn reset_connections(&mut self) {
        for index in 0..self.peers.bound() {
            self.end_connection(
                index,
                ConnectionEnd::Lost(Error::with_code(ErrorKind::PeerDead, libc::ECONNRESET)),
            );
        }
    }
}
