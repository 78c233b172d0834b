//! The target's side of a connection: whose it is, how far its handshake is, and what came last.

use core::net::{IpAddr, Ipv6Addr};
use core::time::Duration;

use te_core::Instant;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

use super::staged::Staged;
use crate::connection::{Connection, Source};
use crate::frame::{ConnectionEntry, ENTRIES_MAX, Header, Hello, Kind};

/// Requests are not read while more answers than this wait to be sent on their connection, bytes.
const ANSWERS_BYTES_MAX: u64 = 8 << 20;
/// A connection that has never carried anything is closed after this, room or not.
const SILENT_MS: u64 = 5_000;

/// How far a peer's connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Its HELLO has not come.
    Greeting,
    Live,
    /// It has been told why it ends; what it still sends is discarded.
    Ending,
}

/// A connection of a peer's.
pub(super) type PeerConnection = Connection<Theirs>;

/// The target's side of a connection.
#[derive(Debug)]
pub(super) struct Theirs {
    pub(super) phase: Phase,
    /// Which connections are one host's: the address it came from, or its prefix.
    pub(super) group: IpAddr,
    /// Which connections are one process's, once it has said so.
    pub(super) identity: u64,
    session: u64,
    number: u16,
    generation: u32,
    /// Sequence number of the next operation.
    pub(super) next: u64,
    /// Sequence number of the first operation of the WRITE that is coming in.
    pub(super) writing: u64,
    /// The request that is served, when it touches memory of a device.
    pub(super) staged: Option<Staged>,
    /// It waits for a slot or for the end of a hop, or a FENCE does: looked at again in the next poll.
    pub(super) waits: bool,
    /// The last word is said, and nothing more will be sent.
    finished_sending: bool,
    /// Something has moved that had been granted.
    pub(super) carried: bool,
    /// When something last did, or the connection was admitted.
    pub(super) used: Instant,
}

impl Theirs {
    /// Of a connection that was accepted just `now` and came from this address.
    pub(super) fn new(from: IpAddr, now: Instant) -> Self {
        Self {
            phase: Phase::Greeting,
            group: group_of(from),
            identity: 0,
            session: 0,
            number: 0,
            generation: 0,
            next: 0,
            writing: 0,
            staged: None,
            waits: false,
            finished_sending: false,
            carried: false,
            used: now,
        }
    }

    /// The peer says who it is.
    pub(super) const fn introduce(&mut self, hello: &Hello) {
        self.identity = hello.identity.get();
        self.session = hello.session.get();
        self.number = hello.connection.get();
        self.generation = hello.connection_generation.get();
    }

    /// Whether the connection has said that it is this peer's.
    pub(super) fn is_of(&self, identity: u64) -> bool {
        self.phase != Phase::Greeting && self.identity == identity
    }

    /// Whether a FENCE of `session` ends the connection, which lists those that stay.
    pub(super) fn is_fenced(&self, session: u64, listed: &[ConnectionEntry]) -> bool {
        let is = |entry: &ConnectionEntry| {
            entry.connection.get() == self.number && entry.generation.get() == self.generation
        };
        self.phase != Phase::Greeting && self.session == session && !listed.iter().any(is)
    }

    /// The session that the connection belongs to.
    pub(super) const fn session(&self) -> u64 {
        self.session
    }

    /// Something moves now that was granted.
    pub(super) const fn carries(&mut self, now: Instant) {
        (self.used, self.carried) = (now, true);
    }
}

impl PeerConnection {
    /// Nothing of an operation that was accepted is on its way, in or out.
    pub(super) fn is_idle(&self) -> bool {
        self.inbox.announced().is_empty()
            && self.outbox.is_empty()
            && !self.paused
            && self.role.staged.is_none()
    }

    /// Whether there is room for the answer to a further request.
    pub(super) fn has_room(&self) -> bool {
        self.outbox.has_room(ENTRIES_MAX) && self.outbox.queued() < ANSWERS_BYTES_MAX
    }

    /// Until when a connection that waits for nothing may do nothing. `full_since`: peers hold more than half of
    /// what they may. `None`: for as long as it likes.
    pub(super) fn quiet_until(&self, full_since: bool, idle_ms_max: u32) -> Option<Instant> {
        let idle = u64::from(idle_ms_max);
        let ms = match (full_since, self.role.carried) {
            (true, true) => idle,
            (true, false) => idle.min(SILENT_MS),
            (false, false) => SILENT_MS,
            (false, true) => return None,
        };
        Some(self.role.used + Duration::from_millis(ms))
    }

    /// All payloads of a WRITE frame are in place or discarded: says so.
    pub(super) fn acknowledge(&mut self) {
        let Connection { inbox, outbox, role, .. } = self;
        let mut statuses = [U32::ZERO; ENTRIES_MAX];
        let count = inbox.announced().len().min(ENTRIES_MAX);
        for (to, destination) in statuses.iter_mut().zip(inbox.announced()) {
            *to = U32::new(destination.status);
        }
        let header = Header::new(Kind::Ack, 0, count as u16, role.writing);
        outbox.push_head(&[header.as_bytes(), statuses[..count].as_bytes()]);
        inbox.clear_plan();
    }

    /// The last word of a connection that was idle: every operation before the next one has been answered.
    pub(super) fn send_go_away(&mut self) {
        self.outbox.push_head(&[Header::new(Kind::GoAway, 0, 0, self.role.next).as_bytes()]);
    }

    /// Says that nothing more will be sent, when all of the last word is out.
    pub(super) fn finish_last_word(&mut self) {
        if self.role.phase == Phase::Ending && self.outbox.is_empty() && !self.role.finished_sending {
            self.socket.finish_sending();
            self.role.finished_sending = true;
        }
    }

    /// Whether it has slots that only its peer can set free, by reading or by sending on.
    pub(super) fn holds_slots(&self) -> bool {
        self.outbox.sources().any(|source| matches!(source, Source::Slot(_)))
            || (self.role.staged.is_some() && self.inbox.expects_payload())
    }

    /// Bytes of the region that still wait to be sent on the connection, payloads that are to be written to
    /// it, and payloads of it that are to be sent.
    pub(super) fn uses(&self, region: u32) -> (u64, usize, usize) {
        let source = Source::Region(region);
        let incoming = self.inbox.open_payloads().iter();
        let incoming = incoming.filter(|d| d.user == region && d.memory.is_some()).count();
        let outgoing = self.outbox.sources().filter(|&known| known == source).count();
        (self.outbox.unsent(source), incoming, outgoing)
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
