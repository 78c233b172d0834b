//! One poll: completions first, then whoever speaks on a side channel, then deadlines, then what has become possible.

use te_core::Instant;
use te_fabric::timers::Earliest;
use te_fabric::{Event, Interest};

use crate::connection::{CONNECTS, CQ, Connection, EVENTS, LISTENER, Role};
use crate::connects::{End, Whose};
use crate::exchange;
use crate::transport::{Outage, RdmaTransport};
use crate::verbs::{AsyncEvent, Verbs};

/// While transfers run, side channels are looked at only so often.
const ASK_EVERY: u32 = 16;
/// Polls without a completion after which the device is asked for an event, so that the poller may park.
const VAIN_MAX: u32 = 64;
/// Events of the device taken in one poll.
const EVENTS_MAX: usize = 64;

impl<V: Verbs> RdmaTransport<V> {
    pub(crate) fn drive(&mut self, now: Instant) {
        self.forgive_absence(now);
        self.timers.begin(now);
        self.peer_qps_left = exchange::QPS_MAX;
        if self.outstanding > 0 {
            match self.reap() {
                0 => self.vain = self.vain.saturating_add(1),
                _ => self.vain = 0,
            }
        }
        if !self.unserved.is_empty() {
            self.drive_unserved();
        }
        if self.connects.open > 0 {
            self.take_connected();
        }
        if self.outstanding == 0
            || self.questions > 0
            || self.armed
            || self.timers.polls().is_multiple_of(ASK_EVERY)
        {
            self.drive_ready();
        }
        if self.timers.is_due() {
            self.run_timers();
        }
        if !self.listed.is_empty() {
            self.tend_listed();
        }
        if self.can_arm && !self.armed && self.outstanding > 0 && self.vain >= VAIN_MAX {
            self.arm();
        }
    }

    /// Asks for an event, and looks once more: what came in between raises none.
    fn arm(&mut self) {
        if self.verbs.arm().is_err() {
            self.lose_port(Outage::Device);
            return;
        }
        self.armed = true;
        self.stats.arms += 1;
        if self.reap() > 0 {
            self.vain = 0;
            self.timers.wake();
            self.tend_listed();
        }
    }

    /// Works on what epoll has to tell.
    fn drive_ready(&mut self) {
        let count = self.poller.ready().unwrap_or(0);
        for at in 0..count {
            let Event { token, readable, .. } = self.poller.event(at);
            match token {
                LISTENER => self.accept_all(),
                CQ | EVENTS => self.take_events(),
                CONNECTS => self.take_connected(),
                name => {
                    let Some(index) = self.connections.index(name as u32) else { continue };
                    let Some(connection) = self.connections.take(index) else { continue };
                    match connection.role {
                        Role::Out(_) => self.drive_out(index, connection, readable),
                        Role::In(_) => self.drive_in(index, connection, readable),
                    }
                }
            }
        }
        // More than fits into one look.
        self.timers.wake_if(count == self.poller.events_max());
    }

    /// Takes in what the device tells beside completions. Either descriptor brings us here.
    fn take_events(&mut self) {
        for _ in 0..EVENTS_MAX {
            let Some(event) = self.verbs.next_event() else { break };
            self.stats.events += 1;
            match event {
                AsyncEvent::PortActive | AsyncEvent::GidChange => self.look_at_port(),
                AsyncEvent::PortError => self.lose_port(Outage::Port),
                AsyncEvent::CqError | AsyncEvent::DeviceFatal => self.lose_port(Outage::Device),
                AsyncEvent::QpError(number) => self.qp_failed(number),
                AsyncEvent::Other(_) => {}
            }
        }
        self.armed = false;
        if self.outstanding > 0 && self.reap() > 0 {
            self.vain = 0;
        }
    }

    /// Takes in which queue pairs have been connected, ours and peers'.
    fn take_connected(&mut self) {
        for End { whose, ends } in self.connects.take() {
            match whose {
                Whose::Ours { endpoint } => self.connected_ours(endpoint, ends),
                Whose::Peers { session, channel } => self.connected_theirs(session, channel, &ends),
            }
        }
    }

    /// Puts a connection back and tells epoll what it waits for, if that has changed.
    pub(crate) fn settle_interest(&mut self, index: u32, mut connection: Box<Connection>) {
        let wanted = connection.channel.wanted();
        if wanted != connection.channel.interest {
            let name = u64::from(self.connections.name(index));
            if self.poller.modify(&connection.channel.stream, name, wanted).is_ok() {
                connection.channel.interest = wanted;
            }
        }
        self.connections.put(index, connection);
    }

    /// Has the timers looked at by `at`.
    pub(crate) fn due(&mut self, at: Instant) {
        self.timers.due_by(at);
    }

    fn run_timers(&mut self) {
        let now = self.timers.now();
        self.timers.looking();
        if self.listener.is_rested(now)
            && self.poller.modify(&self.listener, LISTENER, Interest::READ).is_ok()
        {
            self.listener.resume();
        }
        if !self.draining.is_empty() {
            self.flush_canceled();
        }
        if self.flushing > 0 {
            self.bury_late();
        }
        for index in 0..self.connections.bound() {
            let late = |connection: &Connection| connection.deadline.is_some_and(|deadline| now >= deadline);
            if self.connections.get(index).is_some_and(|connection| late(connection))
                && let Some(connection) = self.connections.take(index)
            {
                match connection.role {
                    Role::Out(_) => self.out_is_late(index, *connection),
                    Role::In(_) => self.end_in(index, *connection),
                }
            }
        }
        let next = self.next_deadline();
        self.timers.looked(next);
    }

    fn next_deadline(&self) -> Option<Instant> {
        let mut next = Earliest::default();
        next.note(self.listener.rests_until());
        for index in 0..self.connections.bound() {
            next.note(self.connections.get(index).and_then(|connection| connection.deadline));
        }
        for &slot in &self.draining {
            // Whose time is up, its queue pair has been flushed: that one's deadline counts.
            let until = self.operations.get(slot).and_then(|operation| operation.ext.canceled);
            next.note(until.filter(|until| *until > self.timers.now()));
        }
        if self.flushing > 0 {
            for index in 0..self.links.bound() {
                if let Some(link) = self.links.get(index)
                    && let crate::link::Phase::Flushing { until, .. } = link.phase
                {
                    next.note(Some(until));
                }
            }
        }
        for endpoint in self.listed.iter().filter_map(|&at| self.endpoints.get(at)) {
            next.note(endpoint.contact.paused_until());
            next.note(endpoint.links_rest.pending(self.timers.now()));
        }
        next.get()
    }

    /// When we ourselves were away, the peers' silence is not their fault.
    fn forgive_absence(&mut self, now: Instant) {
        let Some(away) = self.timers.absence(now, self.config.peer_silence_ms_max) else { return };
        if self.questions == 0 {
            return;
        }
        for index in 0..self.connections.bound() {
            if let Some(connection) = self.connections.get_mut(index) {
                connection.deadline = connection.deadline.map(|at| at + away);
            }
        }
    }
}
