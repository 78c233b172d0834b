//! Whose lanes there is room for: peers' connections are accepted, admitted by their HELLO, and let go in favour of others.
//! What they carry is the business of `target`.
//!
//! ```text
//!   accept ──▶ outside: HELLO awaited, or the last word said        at most 64, each for a limited time
//!                 │ HELLO                    ▲
//!                 ▼                          │ RETIRED: idle, and somebody else needs the connection
//!              admitted: served              ┘                       at most three quarters of `connections_max`
//! ```
//!
//! Whoever can reach the port can connect and say a good HELLO, so neither may keep others out. A lane that is asked to go
//! costs its peer nothing but a new handshake (RETIRED in [`frame`](crate::frame)), which is why it may go so easily.

use core::net::{IpAddr, Ipv6Addr};
use core::time::Duration;
use std::collections::{HashMap, VecDeque};
use std::io;

use te_core::{Error, Instant};
use te_fabric::Interest;
use te_fabric::net::{Accepted, reset_on_close, set_liveness};
use te_fabric::peer::Expelled;
use zerocopy::IntoBytes;

use crate::connections::Connection;
use crate::frame::{Header, Hello, Kind, Status};
use crate::lane::{Lane, Reading};
use crate::sys::Socket;
use crate::target::{InLane, Phase};
use crate::transport::{LISTENER, TcpTransport};

/// Connections accepted in one poll, at most.
const ACCEPTS_MAX: usize = 64;
/// Peers' connections that are not admitted: their HELLO has not come, or they have had their last word.
const OUTSIDE_MAX: usize = 64;
/// Lanes of one peer, at most: twice what an initiator opens, because those it lost may not have ended here yet.
const PEER_LANES_MAX: usize = 2 * crate::config::LANES_MAX as usize;
/// A lane that has been welcomed gets so long for its first operation before it may have to make room.
const FIRST_WORD_MS: u64 = 250;
/// A lane that has carried something and is idle for so long may have to make room.
const IDLE_MS: u64 = 1_000;
/// A lane that has never carried anything is closed after this, room or not.
const SILENT_MS: u64 = 5_000;
/// How long a lane that has had its last word may take to hang up.
const LAST_WORD_MS: u64 = 1_000;
/// Identities of peers whose lanes were closed from here, remembered at most.
const SENT_AWAY_MAX: usize = 4_096;

/// Counts and lists of peers' lanes, beside the table of connections.
#[derive(Debug, Default)]
pub(crate) struct Admission {
    /// All of peers' connections.
    pub(crate) inbound: usize,
    /// Of these, the ones that are being served.
    admitted: usize,
    /// The others, by the names of their events, and whose they are, in the order in which they got here.
    outside: Vec<(u64, IpAddr)>,
    /// Peers that may be alive without a lane, because it was we who closed it.
    sent_away: VecDeque<u64>,
    /// Peers that are refused for good.
    expelled: Expelled,
}

/// A lane that may have to make room.
#[derive(Clone, Copy)]
struct Candidate {
    index: u32,
    group: IpAddr,
    identity: u64,
    carried: bool,
    used: Instant,
}

impl TcpTransport {
    pub(crate) fn accept_all(&mut self) {
        for _ in 0..ACCEPTS_MAX {
            match self.listener.accept() {
                Accepted::Connection(stream) => {
                    if let Err(error) = self.adopt(stream.into()) {
                        log::debug!("a connection was given up: {error}");
                    }
                }
                Accepted::Gone => {}
                Accepted::Empty => return,
                Accepted::Failed(error) => {
                    self.cannot_accept(&error);
                    return;
                }
            }
        }
        // There may be more, and not every driver says so twice.
        self.listener_waits = true;
        self.timers.wake();
    }

    /// Trying again at once would fail again: rests, and lets go of a descriptor that somebody holds for nothing.
    fn cannot_accept(&mut self, error: &io::Error) {
        let silent = self.candidates().into_iter().filter(|lane| self.is_silent(lane));
        if let Some(lane) = silent.min_by_key(|lane| lane.used) {
            self.retire(lane.index);
        }
        if self.poller.modify(&self.listener, LISTENER, Interest::NONE).is_ok() {
            self.listener.rest(self.timers.now(), error, self.config.connections_max);
            self.timers.due_by(self.timers.now());
        }
    }

    fn adopt(&mut self, socket: Socket) -> io::Result<()> {
        self.stats.accepted += 1;
        let group = group_of(socket.peer_address()?.ip());
        self.tune(&socket)?;
        self.suit(&socket);
        set_liveness(&socket, self.config.peer_silence_ms_max)?;
        let interest = Interest::READ;
        let (index, name) = self.connections.reserve();
        if let Err(error) = self.poller.add(&socket, name, interest) {
            self.connections.release(index);
            return Err(error);
        }
        let role = InLane::new(name, group, self.timers.now());
        let mut lane = Lane::new(socket, interest, role);
        lane.deadline =
            Some(self.timers.now() + Duration::from_millis(u64::from(self.config.connect_ms_max)));
        self.connections.put(index, Connection::In(Box::new(lane)));
        self.admission.inbound += 1;
        self.wait_outside(name, group);
        self.timers.changed();
        Ok(())
    }

    /// One more connection that is not admitted. When there are too many, the one that has been there for longest goes, of the
    /// address that has the most of them.
    fn wait_outside(&mut self, name: u64, group: IpAddr) {
        while self.admission.outside.len() >= OUTSIDE_MAX {
            let outside = &self.admission.outside;
            let share = |group: IpAddr| outside.iter().filter(|(_, other)| *other == group).count();
            let largest = outside.iter().map(|&(_, group)| share(group)).max();
            let Some(at) = outside.iter().position(|&(_, group)| Some(share(group)) == largest) else {
                break;
            };
            let (gone, _) = self.admission.outside.remove(at);
            if let Some(index) = self.connections.index(gone)
                && let Some(lane) = self.connections.take_in(index)
            {
                self.stats.turned_away += 1;
                self.end_in(index, lane);
            }
        }
        self.admission.outside.push((name, group));
    }

    /// What a HELLO is answered. `Ok`: its lane is admitted, and counted.
    pub(crate) fn admit(&mut self, hello: &Hello, lane: &mut Lane<InLane>) -> Status {
        let identity = hello.identity.get();
        if hello.target.get() != self.end.incarnation {
            return Status::Restarted;
        }
        if self.admission.expelled.contains(identity) {
            self.stats.turned_away += 1;
            return Status::Expelled;
        }
        if self.peer_lanes(identity) >= PEER_LANES_MAX || !self.make_room(identity, lane.role.group) {
            self.stats.turned_away += 1;
            return Status::Full;
        }
        self.admission.outside.retain(|&(name, _)| name != lane.role.name);
        self.admission.sent_away.retain(|&known| known != identity);
        self.admission.admitted += 1;
        lane.role.phase = Phase::Live;
        lane.deadline = None;
        lane.role.used = self.timers.now();
        // It may stay silent.
        self.timers.changed();
        Status::Ok
    }

    /// Lanes that the peer has here.
    fn peer_lanes(&mut self, identity: u64) -> usize {
        let mut count = 0;
        for index in 0..self.connections.bound() {
            let lane = self.connections.in_mut(index);
            count +=
                usize::from(lane.is_some_and(|l| l.role.phase == Phase::Live && l.role.identity == identity));
        }
        count
    }

    /// Sees to it that one more lane can be admitted. False: everybody is busy, and nobody has more than the newcomer.
    fn make_room(&mut self, identity: u64, group: IpAddr) -> bool {
        let own = self.connections.len() - self.admission.inbound;
        let admitted = self.admission.admitted;
        if admitted < self.config.connections_for_peers()
            && own + admitted < self.config.connections_max as usize
        {
            return true;
        }
        let Some(victim) = self.victim(identity, group) else { return false };
        self.retire(victim);
        true
    }

    /// The lane that makes room for a newcomer.
    fn victim(&mut self, identity: u64, group: IpAddr) -> Option<u32> {
        let candidates = self.candidates();
        let oldest = |lanes: &mut dyn Iterator<Item = &Candidate>| {
            lanes.min_by_key(|lane| (lane.carried, lane.used)).map(|lane| lane.index)
        };
        let mut silent = candidates.iter().filter(|lane| self.is_silent(lane));
        if let Some(index) = oldest(&mut silent) {
            return Some(index);
        }
        let (mut groups, mut peers) = (HashMap::new(), HashMap::new());
        for index in 0..self.connections.bound() {
            if let Some(lane) = self.connections.in_mut(index)
                && lane.role.phase == Phase::Live
            {
                *groups.entry(lane.role.group).or_insert(0_usize) += 1;
                *peers.entry(lane.role.identity).or_insert(0_usize) += 1;
            }
        }
        // Whoever holds so many that it has still more than the newcomer after one has changed hands.
        let (here, mine) = (groups.get(&group).copied(), peers.get(&identity).copied());
        let greedy = |share: usize, own: Option<usize>| share >= own.unwrap_or(0) + 2;
        let most = candidates.iter().map(|lane| groups[&lane.group]).max()?;
        if greedy(most, here) {
            return oldest(&mut candidates.iter().filter(|lane| groups[&lane.group] == most));
        }
        let most = candidates.iter().map(|lane| peers[&lane.identity]).max()?;
        if greedy(most, mine) {
            return oldest(&mut candidates.iter().filter(|lane| peers[&lane.identity] == most));
        }
        oldest(&mut candidates.iter().filter(|lane| self.quiet_ms(lane) >= IDLE_MS))
    }

    /// Peers' lanes on which nothing is going on.
    fn candidates(&mut self) -> Vec<Candidate> {
        let mut found = Vec::new();
        for index in 0..self.connections.bound() {
            let Some(lane) = self.connections.in_mut(index) else { continue };
            if lane.role.phase == Phase::Live && lane.is_idle() {
                let InLane { group, identity, carried, used, .. } = lane.role;
                found.push(Candidate { index, group, identity, carried, used });
            }
        }
        found
    }

    fn quiet_ms(&self, lane: &Candidate) -> u64 {
        self.timers.now().nanos_since(lane.used) / 1_000_000
    }

    /// Whether it has had its chance to carry something and has not.
    fn is_silent(&self, lane: &Candidate) -> bool {
        !lane.carried && self.quiet_ms(lane) >= FIRST_WORD_MS
    }

    /// Whether the peer has a lane here, or may be alive without one because it was we who closed its last.
    pub(crate) fn has_peer(&self, identity: u64) -> bool {
        let lane = |index| match self.connections.get(index) {
            Some(Connection::In(lane)) => {
                lane.role.phase != Phase::Greeting && lane.role.identity == identity
            }
            _ => false,
        };
        (0..self.connections.bound()).any(lane) || self.admission.sent_away.contains(&identity)
    }

    /// Closes every lane of the peer, with whatever is unread in it, and refuses it from now on. When this returns `Ok`, no
    /// byte of it lands any more: nothing is under way in a transport that nobody polls, no request to the kernel outlives
    /// a poll, and a connection without a WELCOME holds no WRITE.
    pub(crate) fn expel_peer(&mut self, identity: u64, force: bool) -> Result<(), Error> {
        let connected = self.has_peer(identity);
        self.admission.expelled.add(identity, force, connected)?;
        self.admission.sent_away.retain(|&known| known != identity);
        for index in 0..self.connections.bound() {
            if let Some(lane) = self.connections.in_mut(index)
                && lane.role.phase != Phase::Greeting
                && lane.role.identity == identity
                && let Some(lane) = self.connections.take_in(index)
            {
                reset_on_close(&lane.socket);
                self.end_in(index, lane);
            }
        }
        Ok(())
    }

    /// Ends an idle lane in such a way that its peer loses nothing.
    fn retire(&mut self, index: u32) {
        let Some(mut lane) = self.connections.take_in(index) else { return };
        self.stats.retired += 1;
        self.remember_sent_away(lane.role.identity);
        lane.outbox.push_head(&[Header::new(Kind::Retired, 0, 0, lane.role.next).as_bytes()]);
        self.begin_end(&mut lane);
        self.drive_in(index, lane, Reading::No, false);
    }

    fn remember_sent_away(&mut self, identity: u64) {
        let sent_away = &mut self.admission.sent_away;
        if !sent_away.contains(&identity) {
            if sent_away.len() >= SENT_AWAY_MAX {
                sent_away.pop_front();
            }
            sent_away.push_back(identity);
        }
    }

    /// From here on the lane only has its last words.
    pub(crate) fn begin_end(&mut self, lane: &mut Lane<InLane>) {
        if lane.role.phase == Phase::Live {
            self.admission.admitted -= 1;
            self.wait_outside(lane.role.name, lane.role.group);
        }
        lane.role.phase = Phase::Ending;
        lane.deadline = Some(self.timers.now() + Duration::from_millis(LAST_WORD_MS));
        self.timers.changed();
    }

    /// A peer's lane is gone.
    pub(crate) fn struck_off(&mut self, role: &InLane) {
        self.admission.inbound -= 1;
        match role.phase {
            Phase::Live => self.admission.admitted -= 1,
            Phase::Greeting | Phase::Ending => {
                self.admission.outside.retain(|&(name, _)| name != role.name);
            }
        }
    }

    /// Ends a lane that did not do in time what it had to. Gives the deadline of one that still may.
    pub(crate) fn check_deadline_in(&mut self, index: u32, now: Instant) -> Option<Instant> {
        let crowded = self.admission.admitted > self.config.connections_for_peers() / 2;
        let idle = Duration::from_millis(u64::from(self.config.idle_ms_max));
        let lane = self.connections.in_mut(index)?;
        let deadline = match lane.deadline {
            Some(deadline) => deadline,
            None if crowded && lane.role.carried => lane.role.used + idle,
            None if crowded => lane.role.used + idle.min(Duration::from_millis(SILENT_MS)),
            None if !lane.role.carried => lane.role.used + Duration::from_millis(SILENT_MS),
            None => return None,
        };
        if now < deadline {
            return Some(deadline);
        }
        if lane.role.phase == Phase::Live && lane.is_idle() {
            self.retire(index);
            return self.connections.in_mut(index)?.deadline;
        }
        let lane = self.connections.take_in(index)?;
        self.end_in(index, lane);
        None
    }
}

impl Lane<InLane> {
    /// Nothing of an operation that was accepted is on its way, in or out.
    fn is_idle(&self) -> bool {
        self.inbox.announced().is_empty() && self.outbox.is_empty() && !self.paused
    }
}

/// Whom an address counts for: itself, or for IPv6 its /64, of which one host has all addresses.
fn group_of(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(v6) => {
            let mut octets = v6.octets();
            octets[8..].fill(0);
            IpAddr::V6(Ipv6Addr::from(octets))
        }
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::group_of;

    #[test]
    fn one_host_is_one_group_whatever_its_address_in_the_prefix() {
        let group = |text: &str| group_of(text.parse().unwrap_or_else(|_| panic!("{text}")));
        assert_eq!(group("2001:db8::1"), group("2001:db8::ffff:1"));
        assert_ne!(group("2001:db8::1"), group("2001:db8:0:1::1"));
        assert_eq!(group("::ffff:10.0.0.1"), group("10.0.0.1"));
        assert_ne!(group("10.0.0.1"), group("10.0.0.2"));
    }
}
