//! One poll: completions first, then control connections that are ready, then deadlines, then what has become
//! possible. And what leads from one part to another: a control connection that ends, a peer that is let go,
//! a port that is lost.

use core::time::Duration;

use te_core::{Error, ErrorKind, Instant};
use te_fabric::net::error_of;
use te_fabric::peer::Attempt;
use te_fabric::timers::Earliest;

use super::{RdmaTransport, lend};
use crate::env::Env;
use crate::io::connects::{End, Whose};
use crate::io::{Outage, PortChange, ROUNDS_MAX, Ready, Watched};
use crate::peers::outbound::ChannelEnd;
use crate::sys::verbs::{AsyncEvent, Verbs};

/// While transfers run, control connections are looked at only so often.
const ASK_EVERY: u32 = 16;
/// Events of the device taken in one poll.
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
            || self.timers.polls().is_multiple_of(ASK_EVERY)
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

    /// Asks for an event, and looks once more: what came in between raises none.
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

    /// Works on what epoll reports.
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
                        self.drive_channel(index, readable);
                    }
                }
            }
        }
        // More than fits into one look.
        self.timers.wake_if(self.io.is_full(count));
    }

    /// Takes in what the device reports beside completions. Either descriptor brings us here.
    fn take_events(&mut self) {
        for _ in 0..EVENTS_MAX {
            let Some(event) = self.io.next_event() else { break };
            match event {
                AsyncEvent::PortActive | AsyncEvent::GidChange => self.look_at_port(),
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

    /// Looks at the port again after one of its events.
    fn look_at_port(&mut self) {
        match self.io.refresh_port(self.config.gid_index) {
            PortChange::Lost => self.initiator.lose_port(Outage::Port, lend!(self)),
            PortChange::Active { moved } => {
                if moved {
                    // The old queue pairs are not found any more, ours and peers'.
                    self.initiator.lose_port(Outage::Port, lend!(self));
                    self.target.end_all(&mut self.io);
                }
                if self.io.regain_port() {
                    self.initiator.list_all(&mut self.timers);
                }
            }
        }
    }

    /// Takes in which queue pairs have been connected, ours and peers'.
    fn take_connected(&mut self) {
        for End { whose, ends } in self.io.take_connected() {
            match whose {
                Whose::Ours { peer } => self.initiator.connected(peer, ends, lend!(self)),
                Whose::Peers { session, channel } => {
                    self.target.connected(session, channel, &ends, lend!(self));
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
                self.channel_overdue(index, end, owes);
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

    /// When we ourselves were away, the peers' silence is not their fault.
    fn forgive_absence(&mut self, now: Instant) {
        let Some(away) = self.timers.absence(now, self.config.peer_silence_ms_max) else { return };
        if self.peers.owes_answers() {
            self.peers.forgive(away);
            self.target.forgive(away);
        }
    }

    /// Does what can be done now for the peers that have something to do.
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
        match self.peers.channel_of(peer) {
            Some(channel) if self.initiator.is_up(peer) => {
                self.ask(peer, channel);
                self.initiator.post(peer, lend!(self));
            }
            Some(_) => {}
            None if self.initiator.needs_channel(peer) => self.open_channel(peer),
            None => {}
        }
    }

    /// Sends the questions that there are for a peer.
    fn ask(&mut self, peer: u32, channel: u32) {
        if !self.initiator.has_questions(peer, &self.io, &self.config) {
            return;
        }
        let Some(to) = self.peers.outbound(channel) else { return };
        let count = self.initiator.ask(peer, to, lend!(self));
        match self.peers.asked(channel, count, &mut self.timers, &self.config) {
            Ok(()) => self.peers.settle_interest(channel, &self.io),
            Err(end) => self.end_channel(channel, end),
        }
    }
}

/// Control connections that we open.
impl<V: Verbs> RdmaTransport<V> {
    /// Opens the control connection to a peer, if nothing speaks against it.
    fn open_channel(&mut self, peer: u32) {
        let to = match self.peers.attempt(peer, self.timers.now()) {
            Some(Attempt::To(number, address)) => (number, address),
            Some(Attempt::Later) | None => return,
            Some(Attempt::Never(error)) => {
                self.give_up(peer, error);
                return;
            }
        };
        if self.peers.is_full(&self.config) {
            // All are busy: one of them will have done.
            let Some(victim) = self.peers.evict(|peer| self.initiator.sign(peer)) else { return };
            self.end_channel(victim, ChannelEnd::Dropped);
        }
        match self.peers.open(peer, to, &self.io, &mut self.timers, &self.config) {
            Ok(()) => self.initiator.channel_opened(peer),
            Err(error) => self.channel_refused(peer, to.0, error_of(&error)),
        }
    }

    /// Works on a control connection of ours that is ready.
    fn drive_channel(&mut self, index: u32, readable: bool) {
        match self.try_drive_channel(index, readable) {
            Ok(()) => self.peers.settle_interest(index, &self.io),
            Err(end) => self.end_channel(index, end),
        }
    }

    fn try_drive_channel(&mut self, index: u32, readable: bool) -> Result<(), ChannelEnd> {
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

    /// Takes in one frame. False: it is not all there.
    fn take_frame(&mut self, index: u32) -> Result<bool, ChannelEnd> {
        let until = self.timers.now() + Duration::from_millis(u64::from(self.config.peer_silence_ms_max));
        let Some(frame) = self.peers.next_frame(index, until)? else { return Ok(false) };
        let (peer, bytes) = (frame.peer, frame.bytes);
        let known = match frame.response {
            Some(response) => self.initiator.answer(peer, &response, lend!(self)),
            None => {
                self.initiator.channel_up(peer, &mut self.timers);
                true
            }
        };
        if !known {
            return Err(ChannelEnd::Lost(ErrorKind::Protocol.into()));
        }
        self.peers.consume(index, bytes);
        Ok(true)
    }

    /// A control connection of ours has ended: what was posted to that peer ends with it.
    fn end_channel(&mut self, index: u32, end: ChannelEnd) {
        let Some(closed) = self.peers.close(index) else { return };
        let peer = closed.peer;
        log::debug!("the control connection to peer {peer} ended: {end:?}");
        let error = match end {
            ChannelEnd::Lost(error) | ChannelEnd::Refused(error) => te_fabric::net::peer_dead(error),
            ChannelEnd::Dropped => ErrorKind::Canceled.into(),
        };
        self.initiator.channel_lost(peer, error, lend!(self));
        match end {
            ChannelEnd::Refused(error) => self.channel_refused(peer, closed.address, error),
            // It would go the same way at once.
            ChannelEnd::Lost(_) if !closed.answered || error.kind == ErrorKind::Protocol => {
                self.peers.back_off(peer, &mut self.timers, &self.config);
                self.give_up(peer, error);
            }
            ChannelEnd::Lost(_) | ChannelEnd::Dropped => {}
        }
        self.initiator.list(peer, &mut self.timers);
    }

    /// Ends a control connection whose time is up. `owes`: the peer owes an answer for too long.
    fn channel_overdue(&mut self, index: u32, end: ChannelEnd, owes: bool) {
        let peer = self.peers.outbound(index).map(|out| out.peer());
        self.end_channel(index, end);
        if let (Some(peer), ChannelEnd::Lost(error), true) = (peer, end, owes) {
            log::warn!("peer {peer} owes an answer for too long: given up");
            self.peers.back_off(peer, &mut self.timers, &self.config);
            self.give_up(peer, error);
        }
    }

    /// An attempt to open a control connection to address number `address` has failed.
    fn channel_refused(&mut self, peer: u32, address: u8, error: Error) {
        let (timers, config) = (&mut self.timers, &self.config);
        if let Some(error) = self.peers.refused(peer, address, error, timers, config) {
            self.give_up(peer, error);
        }
    }

    /// Ends what waits for a control connection that will not come.
    fn give_up(&mut self, peer: u32, error: Error) {
        let harmless = self.peers.is_harmless(peer);
        self.initiator.give_up(peer, harmless, error, &mut self.memory);
    }

    /// Lets go of a peer that nothing needs any more.
    pub(super) fn drop_idle_peer(&mut self, peer: u32) {
        if !self.initiator.is_idle(peer) {
            return;
        }
        if let Some(channel) = self.peers.channel_of(peer) {
            self.end_channel(channel, ChannelEnd::Dropped);
        }
        self.io.links_mut().orphan(peer);
        self.initiator.remove_peer(peer);
        self.peers.forget(peer);
    }

    /// Closes every control connection of ours with a reset.
    #[cfg(any(test, feature = "testkit"))]
    pub(super) fn reset_channels(&mut self) {
        for index in 0..self.peers.bound() {
            self.end_channel(
                index,
                ChannelEnd::Lost(Error::with_code(ErrorKind::PeerDead, libc::ECONNRESET)),
            );
        }
    }
}
