//! The target's side of a connection: the peer's identity, the state of the handshake, and what was requested
//! last.

use core::net::{IpAddr, Ipv6Addr};
use core::time::Duration;

use te_core::Instant;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

use super::staged::Staged;
use crate::connection::{Connection, Source};
use crate::frame::{ConnectionEntry, ENTRIES_MAX, Header, Hello, Kind};

/// Requests are not read while more bytes of answers than this wait to be sent on their connection.
const ANSWERS_BYTES_MAX: u64 = 8 << 20;
/// A connection that has never carried anything is closed after this time even if there is room, ms.
const SILENT_MS: u64 = 5_000;

/// State of a peer's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Its HELLO has not arrived.
    Greeting,
    Live,
    /// Its last frame is queued or sent; what still arrives is discarded.
    Ending,
}

/// A connection that a peer opened.
pub(super) type PeerConnection = Connection<Theirs>;

/// The target's side of a connection.
#[derive(Debug)]
pub(super) struct Theirs {
    pub(super) phase: Phase,
    /// The group of addresses that count as one host: the address it came from, or its prefix.
    pub(super) group: IpAddr,
    /// The identity from its HELLO: one for each process. 0 before that.
    pub(super) identity: u64,
    session: u64,
    number: u16,
    generation: u32,
    /// Sequence number of the next operation.
    pub(super) next: u64,
    /// Sequence number of the first operation of the WRITE whose payloads are arriving.
    pub(super) writing: u64,
    /// The request that is being served, when it touches memory of a device.
    pub(super) staged: Option<Staged>,
    /// The connection, or a FENCE on it, waits for a staging slot or for the end of a hop: the next poll
    /// looks at it again.
    pub(super) waits: bool,
    /// The last frame is sent, and the sending direction is shut down.
    finished_sending: bool,
    /// Bytes of a granted operation have moved on it.
    pub(super) carried: bool,
    /// When such bytes last moved, or when the connection was admitted.
    pub(super) used: Instant,
}

impl Theirs {
    /// For a connection from this address that was accepted at `now`.
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

    /// Takes in what the HELLO says about the peer.
    pub(super) const fn introduce(&mut self, hello: &Hello) {
        self.identity = hello.identity.get();
        self.session = hello.session.get();
        self.number = hello.connection.get();
        self.generation = hello.connection_generation.get();
    }

    /// Whether the connection's HELLO carried this identity.
    pub(super) fn is_of(&self, identity: u64) -> bool {
        self.phase != Phase::Greeting && self.identity == identity
    }

    /// Whether a FENCE of `session` that lists these connections as still used ends this one.
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

    /// Notes that bytes of a granted operation move now.
    pub(super) const fn carries(&mut self, now: Instant) {
        (self.used, self.carried) = (now, true);
    }
}

impl PeerConnection {
    /// Whether no operation that was accepted is under way, in or out.
    pub(super) fn is_idle(&self) -> bool {
        self.inbox.announced().is_empty()
            && self.outbox.is_empty()
            && !self.paused
            && self.role.staged.is_none()
    }

    /// Whether there is room for the answer to another request.
    pub(super) fn has_room(&self) -> bool {
        self.outbox.has_room(ENTRIES_MAX) && self.outbox.queued() < ANSWERS_BYTES_MAX
    }

    /// When the connection is closed if nothing happens on it. `crowded` says that peers hold more than half
    /// of the connections that they may hold. `None`: it may stay idle.
    pub(super) fn quiet_until(&self, crowded: bool, idle_ms_max: u32) -> Option<Instant> {
        let idle = u64::from(idle_ms_max);
        let ms = match (crowded, self.role.carried) {
            (true, true) => idle,
            (true, false) => idle.min(SILENT_MS),
            (false, false) => SILENT_MS,
            (false, true) => return None,
        };
        Some(self.role.used + Duration::from_millis(ms))
    }

    /// Queues the ACK of a WRITE frame. All its payloads are in place or discarded.
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

    /// Queues the GO_AWAY, the last frame of a connection that was idle: every operation before the number in
    /// it has been answered.
    pub(super) fn send_go_away(&mut self) {
        self.outbox.push_head(&[Header::new(Kind::GoAway, 0, 0, self.role.next).as_bytes()]);
    }

    /// Shuts down the sending direction when the last frame is sent.
    pub(super) fn finish_ending(&mut self) {
        if self.role.phase == Phase::Ending && self.outbox.is_empty() && !self.role.finished_sending {
            self.socket.finish_sending();
            self.role.finished_sending = true;
        }
    }

    /// Whether the connection holds staging slots that only its peer can free, by receiving or by sending.
    pub(super) fn holds_slots(&self) -> bool {
        self.outbox.sources().any(|source| matches!(source, Source::Slot(_)))
            || (self.role.staged.is_some() && self.inbox.expects_payload())
    }

    /// Bytes of the region that wait to be sent on the connection, announced payloads that go to the region,
    /// and queued payloads that come from it.
    pub(super) fn uses(&self, region: u32) -> (u64, usize, usize) {
        let source = Source::Region(region);
        let incoming = self.inbox.open_payloads().iter();
        let incoming = incoming.filter(|d| d.user == region && d.memory.is_some()).count();
        let outgoing = self.outbox.sources().filter(|&known| known == source).count();
        (self.outbox.unsent(source), incoming, outgoing)
    }
}

/// The group that an address counts for: the address itself, or for IPv6 its /64, because one host may have
/// all addresses of it.
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
