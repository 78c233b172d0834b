//! Who gets a turn in `poll`: lanes that are ready, lanes that are warm, and deadlines that have come.

use te_core::{Error, ErrorKind, Instant};
use te_fabric::Interest;
use te_fabric::timers::Earliest;

use crate::connections::Connection;
use crate::endpoint::LaneEnd;
use crate::lane::{Lane, Reading};
#[cfg(feature = "uring")]
use crate::sys::Poller;
use crate::transport::{LISTENER, TcpTransport};

/// Vain attempts after which a lane is no longer read without asking.
const HEAT: u16 = 64;

/// Every so many polls the system is asked, however warm the lanes are: new connections and cold lanes want their turn.
const ASK_EVERY: u32 = 16;

impl TcpTransport {
    pub(crate) fn drive_all(&mut self) {
        self.drive_deferred();
        #[cfg(feature = "uring")]
        if self.poller.tells_changes() {
            self.drive_changes();
            return;
        }
        if self.hot.is_empty() || self.waiting_to_write > 0 || self.timers.polls().is_multiple_of(ASK_EVERY) {
            self.drive_ready();
        } else {
            self.drive_hot();
        }
    }

    /// Works on the lanes whose requests the last poll had no time for.
    fn drive_deferred(&mut self) {
        let count = self.deferred.len();
        for at in 0..count {
            // It may have to wait once more, and is listed anew then.
            let index = std::mem::replace(&mut self.deferred[at], u32::MAX);
            self.drive(index, Reading::No, false);
        }
        self.deferred.drain(..count);
    }

    /// Asks the system who is ready, and works on those.
    fn drive_ready(&mut self) {
        self.stats.waits += 1;
        let Ok(count) = self.poller.ready() else { return };
        for at in 0..count {
            let event = self.poller.event(at);
            if event.token == LISTENER {
                self.listener_waits = true;
            } else if let Some(index) = self.connections.index(event.token) {
                self.drive(index, Reading::of(event.readable), event.writable);
            }
        }
    }

    /// Takes in what has changed, and reads all lanes that have something in as few system calls as there can be.
    #[cfg(feature = "uring")]
    fn drive_changes(&mut self) {
        use crate::sys::JOBS_MAX;
        self.stats.waits += 1;
        let Ok(count) = self.poller.ready() else { return };
        for at in 0..count {
            let event = self.poller.event(at);
            if event.token == LISTENER {
                self.listener_waits = true;
                continue;
            }
            let Some(index) = self.connections.index(event.token) else { continue };
            if event.finished {
                match self.connections.get_mut(index) {
                    Some(Connection::Out(lane)) => lane.finished = true,
                    Some(Connection::In(lane)) => lane.finished = true,
                    None => {}
                }
            }
            if event.writable {
                self.drive(index, Reading::No, true);
            }
            if event.readable && !self.hot.contains(&index) {
                self.hot.push(index);
            }
        }
        let mut from = 0;
        while from < self.hot.len() {
            let mut group: [Option<(u32, Connection)>; JOBS_MAX] = [const { None }; JOBS_MAX];
            let mut jobs = [const { None }; JOBS_MAX];
            let until = self.hot.len().min(from + JOBS_MAX);
            for (to, &index) in group.iter_mut().zip(&self.hot[from..until]) {
                *to = self.connections.take(index).map(|connection| (index, connection));
            }
            for (member, job) in group.iter_mut().zip(&mut jobs) {
                *job = match member {
                    Some((_, Connection::Out(lane))) if lane.role.is_up() => {
                        Some(lane.inbox.job(&lane.socket))
                    }
                    Some((_, Connection::In(lane))) if !lane.paused => Some(lane.inbox.job(&lane.socket)),
                    _ => None,
                };
            }
            if let Poller::Ring(ring) = &mut self.poller {
                ring.receive_all(&mut jobs);
            }
            let ends = jobs.map(|job| job.map(|job| (job.offered, job.result)));
            // Back into the table first: serving one lane may concern another.
            let mut arrived = [const { None }; JOBS_MAX];
            for (at, (member, end)) in group.into_iter().zip(ends).enumerate() {
                let Some((index, mut connection)) = member else { continue };
                if let Some((offered, result)) = end {
                    arrived[at] = Some(match &mut connection {
                        Connection::Out(lane) => (index, lane.inbox.arrived(offered, result)),
                        Connection::In(lane) => (index, lane.inbox.arrived(offered, result)),
                    });
                }
                self.connections.put(index, connection);
            }
            for (index, received) in arrived.into_iter().flatten() {
                self.drive(index, Reading::Arrived(received), false);
            }
            from = until;
        }
        let connections = &self.connections;
        self.hot.retain(|&index| match connections.get(index) {
            Some(Connection::Out(lane)) => lane.heat > 0,
            Some(Connection::In(lane)) => lane.heat > 0 && !lane.paused,
            None => false,
        });
        let news = matches!(&self.poller, Poller::Ring(ring) if ring.has_news());
        self.timers.wake_if(news || !self.hot.is_empty());
    }

    /// Works on the lanes that had something to say a moment ago, without asking first.
    fn drive_hot(&mut self) {
        let mut at = 0;
        while at < self.hot.len() {
            let index = self.hot[at];
            match self.connections.get(index) {
                Some(Connection::Out(lane)) if lane.heat > 0 => {
                    if lane.role.is_awaited() {
                        self.drive(index, Reading::Yes, false);
                    } else {
                        self.cool(index);
                    }
                }
                Some(Connection::In(lane)) if lane.heat > 0 => {
                    if !lane.paused {
                        self.drive(index, Reading::Yes, false);
                    } else {
                        self.cool(index);
                    }
                }
                _ => {}
            }
            let warm = match self.connections.get(index) {
                Some(Connection::Out(lane)) => lane.heat > 0,
                Some(Connection::In(lane)) => lane.heat > 0,
                None => false,
            };
            if warm {
                at += 1;
            } else if self.hot.get(at) == Some(&index) {
                self.hot.swap_remove(at);
            }
        }
    }

    fn drive(&mut self, index: u32, reading: Reading, writable: bool) {
        match self.connections.take(index) {
            Some(Connection::Out(lane)) => self.drive_out(index, lane, reading, writable),
            Some(Connection::In(lane)) => self.drive_in(index, lane, reading, writable),
            None => {}
        }
    }

    fn cool(&mut self, index: u32) {
        match self.connections.take(index) {
            Some(Connection::Out(mut lane)) => {
                lane.heat -= 1;
                self.connections.put(index, Connection::Out(lane));
            }
            Some(Connection::In(mut lane)) => {
                lane.heat -= 1;
                self.connections.put(index, Connection::In(lane));
            }
            None => {}
        }
    }

    /// From now on a lane is read without asking, until that has been in vain for a while.
    pub(crate) fn heat_up(&mut self, index: u32, heat: &mut u16) {
        if self.poller.tells_changes() {
            // Asking costs nothing there.
            return;
        }
        if *heat == 0 && !self.hot.contains(&index) {
            self.hot.push(index);
        }
        *heat = HEAT;
    }

    /// A lane was read, or may be read again, and there may be more (unless `drained`). Where changes are told and not
    /// states, it is up to us to come back.
    pub(crate) fn stopped_reading(&mut self, index: u32, heat: &mut u16, drained: bool) {
        if self.poller.tells_changes() {
            *heat = u16::from(!drained);
            if !drained {
                self.timers.wake();
                if !self.hot.contains(&index) {
                    self.hot.push(index);
                }
            }
        }
    }

    /// Tells epoll what a lane waits for, if that has changed.
    pub(crate) fn settle_interest<R>(&mut self, index: u32, lane: &mut Lane<R>) {
        let wanted = Interest { readable: !lane.paused, writable: lane.blocked };
        if wanted == lane.interest {
            return;
        }
        let name = self.connections.name(index);
        if self.poller.modify(&lane.socket, name, wanted).is_ok() {
            self.waiting_to_write -= u32::from(lane.interest.writable);
            self.waiting_to_write += u32::from(wanted.writable);
            lane.interest = wanted;
        }
    }

    /// Frees the slot of a connection that is gone.
    pub(crate) fn forget(&mut self, index: u32, interest: Interest) {
        self.poller.remove(self.connections.name(index));
        self.waiting_to_write -= u32::from(interest.writable);
        self.hot.retain(|&known| known != index);
        self.connections.release(index);
    }

    pub(crate) fn run_timers(&mut self) {
        let now = self.timers.now();
        self.timers.looking();
        let mut next = Earliest::default();
        if self.listener.is_rested(now)
            && self.poller.modify(&self.listener, LISTENER, Interest::READ).is_ok()
        {
            self.listener.resume();
            self.listener_waits = true;
            self.timers.wake();
        }
        next.note(self.listener.rests_until());
        for index in 0..self.connections.bound() {
            next.note(self.check_deadline_in(index, now));
            next.note(self.check_deadline_out(index, now));
        }
        next.note(self.check_pulses(now));
        for peer in &self.listed {
            next.note(self.peers.get(*peer).and_then(|endpoint| endpoint.contact.paused_until()));
        }
        self.timers.looked(next.get());
    }

    fn check_deadline_out(&mut self, index: u32, now: Instant) -> Option<Instant> {
        let deadline = self.connections.out(index)?.deadline?;
        if now < deadline {
            return Some(deadline);
        }
        let lane = self.connections.take_out(index)?;
        let error = Error::with_code(ErrorKind::PeerDead, libc::ETIMEDOUT);
        self.end_out(index, lane, LaneEnd::Refused(error));
        None
    }

    /// When we ourselves were away, the peers' silence is not their fault.
    pub(crate) fn forgive_absence(&mut self, now: Instant) {
        if self.timers.absence(now, self.config.peer_silence_ms_max).is_some() {
            for peer in 0..self.peers.bound() {
                if let Some(endpoint) = self.peers.get_mut(peer) {
                    endpoint.pulse = endpoint.pulse.map(|_| now);
                }
            }
        }
    }
}
