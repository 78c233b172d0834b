//! What every initiator keeps about a peer: its incarnation, its addresses, when to try again, and the fences
//! that wait for its answer. Connections are each fabric's own.

use core::net::SocketAddr;
use core::time::Duration;
use std::collections::HashSet;

use te_core::{EXPELLED_MAX, Error, ErrorKind, ExpelMode, Instant, Token};

use crate::export::{EXPORT_ADDRESSES_MAX, Export};
use crate::net::peer_dead;

/// The first backoff after a failure, in milliseconds.
const PAUSE_MS_MIN: u64 = 10;
/// The largest number of incarnations that are remembered after their peers were dropped.
const KNOWN_MAX: usize = 4_096;

/// The backoff after so many failures in a row: 10 ms, twice as long after each further one, up to
/// `pause_ms_max`.
fn pause(failures: u32, pause_ms_max: u32) -> Duration {
    Duration::from_millis((PAUSE_MS_MIN << failures.min(16)).min(u64::from(pause_ms_max)))
}

/// Whether a peer may be tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ready,
    /// Not before this time.
    Backoff(Instant),
    /// Never again: another incarnation answered at an address where this one was met.
    Restarted,
    /// Never again: the peer has expelled us.
    Expelled,
}

/// What to do when a connection is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attempt {
    /// Connect to this address. The number identifies it in [`Contact::welcomed`] and [`Contact::refused`].
    To(u8, SocketAddr),
    /// Wait: the peer is in backoff.
    Later,
    /// Do not connect: no attempt can succeed.
    Never(Error),
}

/// What to do after an attempt that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No attempt can succeed from now on: everything that waits for the peer ends with this error.
    Final(Error),
    /// Try the next address at once.
    NextAddress,
    /// All addresses have failed, and the peer is in backoff. What waits and cannot wait longer ends with
    /// this error.
    Paused(Error),
}

/// One incarnation of a target, and the addresses at which it may be reached.
///
/// A peer is identified by its incarnation alone. The addresses are only hints: another process may answer
/// there, since the addresses of bridges, for example, are the same on every host. `PeerRestarted` from an
/// address counts only where this incarnation was met before.
#[derive(Debug)]
pub struct Contact {
    incarnation: u64,
    addresses: [SocketAddr; EXPORT_ADDRESSES_MAX],
    address_count: usize,
    /// The address that is tried next.
    address_at: usize,
    /// How many addresses have failed in a row.
    addresses_failed: usize,
    /// At how many of them another incarnation answered.
    other_incarnations: usize,
    /// One bit for each address at which this incarnation has welcomed us.
    met: u8,
    state: State,
    failures: u32,
}

impl Contact {
    /// The peer that wrote this export.
    #[must_use]
    pub fn new(export: &Export) -> Self {
        let mut contact = Self {
            incarnation: export.incarnation,
            addresses: [SocketAddr::new(export.addresses[0], export.port); EXPORT_ADDRESSES_MAX],
            address_count: 1,
            address_at: 0,
            addresses_failed: 0,
            other_incarnations: 0,
            met: 0,
            state: State::Ready,
            failures: 0,
        };
        contact.use_addresses(export);
        contact
    }

    /// The peer's incarnation.
    #[inline]
    #[must_use]
    pub const fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// Takes the addresses of another export of the same incarnation, if they differ and nothing is known
    /// about the old ones: the peer was not met, and no connection to it is being made (`connecting`).
    pub fn learn(&mut self, export: &Export, connecting: bool) {
        let same =
            self.list() == Self::listed(export).0.get(..usize::from(export.address_count)).unwrap_or(&[]);
        if !same && self.met == 0 && !connecting {
            self.use_addresses(export);
            self.state = State::Ready;
        }
    }

    /// What to do when a connection is wanted.
    #[must_use]
    pub fn attempt(&self, now: Instant) -> Attempt {
        match self.state {
            State::Restarted => Attempt::Never(ErrorKind::PeerRestarted.into()),
            State::Expelled => Attempt::Never(ErrorKind::Expelled.into()),
            State::Backoff(when) if now < when => Attempt::Later,
            State::Backoff(_) | State::Ready => {
                Attempt::To(self.address_at as u8, self.addresses[self.address_at])
            }
        }
    }

    /// When the backoff ends; `None` when the peer is not in backoff.
    #[must_use]
    pub const fn paused_until(&self) -> Option<Instant> {
        match self.state {
            State::Backoff(when) => Some(when),
            _ => None,
        }
    }

    /// Notes that the peer has welcomed us at the address with this number.
    pub const fn welcomed(&mut self, address: u8) {
        self.met |= 1 << address;
        self.failures = 0;
        self.addresses_failed = 0;
        self.other_incarnations = 0;
        self.state = State::Ready;
    }

    /// Whether the peer has ever welcomed us.
    #[must_use]
    pub const fn was_met(&self) -> bool {
        self.met != 0
    }

    /// Notes that an attempt at the address with this number has failed.
    pub fn refused(&mut self, address: u8, error: Error, now: Instant, pause_ms_max: u32) -> Refusal {
        match error.kind {
            // Only a peer with the right incarnation reports this.
            ErrorKind::Expelled => {
                self.state = State::Expelled;
                return Refusal::Final(error);
            }
            ErrorKind::PeerRestarted if self.met & 1 << address != 0 => {
                self.state = State::Restarted;
                return Refusal::Final(error);
            }
            ErrorKind::PeerRestarted => self.other_incarnations += 1,
            _ => {}
        }
        let error = match error.kind {
            ErrorKind::PeerRestarted if self.met != 0 || self.other_incarnations < self.address_count => {
                Error::with_code(ErrorKind::PeerDead, libc::EHOSTUNREACH)
            }
            _ => peer_dead(error),
        };
        self.address_at = (self.address_at + 1) % self.address_count;
        self.addresses_failed += 1;
        if self.addresses_failed < self.address_count {
            return Refusal::NextAddress;
        }
        self.back_off(now, pause_ms_max);
        Refusal::Paused(error)
    }

    /// Puts the peer into backoff, twice as long each time.
    pub fn back_off(&mut self, now: Instant, pause_ms_max: u32) {
        self.state = State::Backoff(now + pause(self.failures, pause_ms_max));
        self.failures += 1;
        self.addresses_failed = 0;
        self.other_incarnations = 0;
    }

    /// Whether no bytes of ours can land at the peer any more: an incarnation that is gone has no memory, one
    /// that expelled us has closed all our connections, and one that was never met was sent nothing. A peer
    /// that does not answer may still receive our bytes.
    #[must_use]
    pub fn is_harmless(&self, known: &KnownIncarnations) -> bool {
        matches!(self.state, State::Restarted | State::Expelled)
            || (self.met == 0 && !known.contains(self.incarnation))
    }

    fn list(&self) -> &[SocketAddr] {
        &self.addresses[..self.address_count]
    }

    fn listed(export: &Export) -> ([SocketAddr; EXPORT_ADDRESSES_MAX], usize) {
        let count = usize::from(export.address_count).clamp(1, EXPORT_ADDRESSES_MAX);
        (export.addresses.map(|ip| SocketAddr::new(ip, export.port)), count)
    }

    fn use_addresses(&mut self, export: &Export) {
        (self.addresses, self.address_count) = Self::listed(export);
        (self.address_at, self.addresses_failed, self.other_incarnations) = (0, 0, 0);
    }
}

/// A backoff that grows with each failure and is halved by each success.
#[derive(Clone, Copy, Debug, Default)]
pub struct Backoff {
    failures: u32,
    until: Option<Instant>,
}

impl Backoff {
    /// Notes a failure. The first one causes no wait, the second one 10 ms, each further one twice as much.
    pub fn fail(&mut self, now: Instant, pause_ms_max: u32) {
        let wait = self.failures.checked_sub(1).map_or(Duration::ZERO, |n| pause(n, pause_ms_max));
        self.failures = (self.failures + 1).min(32);
        self.until = Some(now + wait);
    }

    /// Notes a success: half of the failures are forgotten.
    pub const fn succeed(&mut self) {
        self.failures /= 2;
    }

    /// When the backoff ends; `None` when it has ended.
    #[must_use]
    pub fn pending(&self, now: Instant) -> Option<Instant> {
        self.until.filter(|until| now < *until)
    }
}

/// Incarnations that were met and whose peers were dropped since: what was sent to them may still land.
#[derive(Debug, Default)]
pub struct KnownIncarnations {
    incarnations: Vec<u64>,
    /// There were more than the table holds: any incarnation may be one of them.
    overflow: bool,
}

impl KnownIncarnations {
    /// Remembers the peer if it was met. The caller calls this before it drops a peer.
    pub fn remember(&mut self, peer: &Contact) {
        if peer.was_met() && !self.contains(peer.incarnation) {
            if self.incarnations.len() < KNOWN_MAX {
                self.incarnations.push(peer.incarnation);
            } else {
                self.overflow = true;
            }
        }
    }

    /// Whether this incarnation was met, or may have been.
    #[must_use]
    pub fn contains(&self, incarnation: u64) -> bool {
        self.overflow || self.incarnations.contains(&incarnation)
    }
}

/// A fence that waits for the target's answer. By `S` the fabric recognizes the answer.
#[derive(Clone, Copy, Debug)]
pub struct Fence<S> {
    /// The caller's name for the fence.
    pub token: Token,
    /// The index of the remote region that it is about.
    pub remote_region: u32,
    /// How it was sent. `None` when it was not sent yet, or when the connection that carried it was lost.
    pub sent: Option<S>,
}

/// The number of fences of a transport that have not ended, and its limit.
#[derive(Clone, Copy, Debug)]
pub struct FenceCount {
    open: u32,
    max: u32,
}

impl FenceCount {
    /// No fences yet, and room for `max`.
    #[must_use]
    pub const fn new(max: u32) -> Self {
        Self { open: 0, max }
    }

    /// Counts a fence that begins.
    ///
    /// # Errors
    /// `Full` when `max` fences have not ended.
    pub fn begin(&mut self) -> Result<(), Error> {
        if self.open >= self.max {
            return Err(ErrorKind::Full.into());
        }
        self.open += 1;
        Ok(())
    }

    /// Counts a fence that ends.
    pub fn end(&mut self) {
        debug_assert!(self.open > 0, "a fence ends once");
        self.open -= 1;
    }
}

/// The identities that a target has expelled.
#[derive(Debug, Default)]
pub struct Expelled(HashSet<u64>);

impl Expelled {
    /// Refuses `identity` from now on. `connected` is whether it has a connection here.
    ///
    /// # Errors
    /// `InvalidArgument` for identity 0, which no peer has. `Busy` when it is connected and `mode` spares it.
    /// `Full` when [`EXPELLED_MAX`] identities are refused already. In each case nothing has changed.
    pub fn add(&mut self, identity: u64, mode: ExpelMode, connected: bool) -> Result<(), Error> {
        if identity == 0 {
            return Err(ErrorKind::InvalidArgument.into());
        }
        if mode == ExpelMode::SpareConnected && connected {
            return Err(ErrorKind::Busy.into());
        }
        if !self.contains(identity) && self.0.len() >= EXPELLED_MAX {
            return Err(ErrorKind::Full.into());
        }
        self.0.insert(identity);
        Ok(())
    }

    /// Whether `identity` is refused.
    #[must_use]
    pub fn contains(&self, identity: u64) -> bool {
        self.0.contains(&identity)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use core::net::IpAddr;

    const NOW: Instant = Instant::from_millis(1_000);
    const PAUSE_MS_MAX: u32 = 1_000;

    fn export(hosts: &[u8]) -> Export {
        let mut export = Export { address_count: hosts.len() as u8, ..testing::export() };
        for (to, &host) in export.addresses.iter_mut().zip(hosts) {
            *to = IpAddr::from([10, 0, 0, host]);
        }
        export
    }

    fn refuse(contact: &mut Contact, address: u8, kind: ErrorKind) -> Refusal {
        contact.refused(address, kind.into(), NOW, PAUSE_MS_MAX)
    }

    fn next(contact: &Contact) -> Option<(u8, SocketAddr)> {
        match contact.attempt(NOW) {
            Attempt::To(number, address) => Some((number, address)),
            _ => None,
        }
    }

    fn address(host: u8) -> SocketAddr {
        SocketAddr::new(IpAddr::from([10, 0, 0, host]), testing::export().port)
    }

    #[test]
    fn each_address_is_tried_before_there_is_a_backoff() {
        let mut peer = Contact::new(&export(&[1, 2]));
        assert_eq!(next(&peer), Some((0, address(1))));
        assert_eq!(refuse(&mut peer, 0, ErrorKind::PeerDead), Refusal::NextAddress);
        assert_eq!(next(&peer), Some((1, address(2))));
        assert_eq!(refuse(&mut peer, 1, ErrorKind::PeerDead), Refusal::Paused(ErrorKind::PeerDead.into()));
        assert_eq!(peer.attempt(NOW), Attempt::Later);
        assert_eq!(peer.paused_until(), Some(NOW + Duration::from_millis(10)));
        assert_eq!(peer.attempt(NOW + Duration::from_millis(10)), Attempt::To(0, address(1)));
    }

    #[test]
    fn backoffs_double_up_to_the_limit_and_a_welcome_ends_them() {
        let mut peer = Contact::new(&export(&[1]));
        let pauses: Vec<u128> = (0..9)
            .map(|_| {
                peer.back_off(NOW, PAUSE_MS_MAX);
                peer.paused_until().map_or(0, |until| (until - NOW).as_millis())
            })
            .collect();
        assert_eq!(pauses, [10, 20, 40, 80, 160, 320, 640, 1_000, 1_000]);
        peer.welcomed(0);
        assert_eq!((peer.paused_until(), next(&peer)), (None, Some((0, address(1)))));
        peer.back_off(NOW, PAUSE_MS_MAX);
        assert_eq!(peer.paused_until(), Some(NOW + Duration::from_millis(10)));
    }

    #[test]
    fn a_restart_counts_only_where_the_peer_was_met() {
        let mut peer = Contact::new(&export(&[1, 2]));
        peer.welcomed(0);
        // Another process has that address on this host.
        assert_eq!(refuse(&mut peer, 1, ErrorKind::PeerRestarted), Refusal::NextAddress);
        assert_eq!(
            refuse(&mut peer, 0, ErrorKind::PeerRestarted),
            Refusal::Final(ErrorKind::PeerRestarted.into())
        );
        assert_eq!(peer.attempt(NOW), Attempt::Never(ErrorKind::PeerRestarted.into()));
    }

    #[test]
    fn a_peer_that_was_never_met_is_replaced_when_every_address_has_another_incarnation() {
        let mut peer = Contact::new(&export(&[1, 2]));
        assert_eq!(refuse(&mut peer, 0, ErrorKind::PeerRestarted), Refusal::NextAddress);
        let all = refuse(&mut peer, 1, ErrorKind::PeerRestarted);
        assert_eq!(all, Refusal::Paused(ErrorKind::PeerRestarted.into()));
        // Another incarnation at one of two addresses: this one may be at the other.
        assert_eq!(refuse(&mut peer, 0, ErrorKind::PeerDead), Refusal::NextAddress);
        let some = refuse(&mut peer, 1, ErrorKind::PeerRestarted);
        assert_eq!(some, Refusal::Paused(Error::with_code(ErrorKind::PeerDead, libc::EHOSTUNREACH)));
    }

    #[test]
    fn a_peer_that_expelled_us_is_never_tried_again() {
        let mut peer = Contact::new(&export(&[1]));
        assert_eq!(refuse(&mut peer, 0, ErrorKind::Expelled), Refusal::Final(ErrorKind::Expelled.into()));
        assert_eq!(peer.attempt(NOW), Attempt::Never(ErrorKind::Expelled.into()));
    }

    #[test]
    fn a_refusal_by_the_system_speaks_against_the_peer() {
        let mut peer = Contact::new(&export(&[1]));
        let refusal = peer.refused(0, Error::with_code(ErrorKind::System, 24), NOW, PAUSE_MS_MAX);
        assert_eq!(refusal, Refusal::Paused(Error::with_code(ErrorKind::PeerDead, 24)));
    }

    #[test]
    fn other_addresses_are_taken_while_the_peer_was_not_met() {
        let mut peer = Contact::new(&export(&[1]));
        peer.back_off(NOW, PAUSE_MS_MAX);
        peer.learn(&export(&[1]), false);
        assert_eq!(peer.attempt(NOW), Attempt::Later, "the same address changes nothing");
        peer.learn(&export(&[2, 3]), true);
        assert_eq!(peer.attempt(NOW), Attempt::Later, "a connection is being made");
        peer.learn(&export(&[2, 3]), false);
        assert_eq!(next(&peer), Some((0, address(2))));
        peer.welcomed(0);
        peer.learn(&export(&[9]), false);
        assert_eq!(next(&peer), Some((0, address(2))), "it was met there");
    }

    #[test]
    fn an_export_without_an_address_has_one_that_does_not_answer() {
        // No parser accepts it. A walk over no address must not divide by zero in any case.
        let mut peer = Contact::new(&export(&[]));
        assert!(matches!(refuse(&mut peer, 0, ErrorKind::PeerDead), Refusal::Paused(_)));
    }

    #[test]
    fn what_was_sent_to_a_peer_may_land_until_its_incarnation_is_gone() {
        let mut known = KnownIncarnations::default();
        let mut peer = Contact::new(&export(&[1]));
        assert!(peer.is_harmless(&known), "it was never met");
        peer.welcomed(0);
        assert!(!peer.is_harmless(&known), "it was met");
        known.remember(&peer);
        assert!(!Contact::new(&export(&[1])).is_harmless(&known), "it was met and dropped");
        refuse(&mut peer, 0, ErrorKind::PeerRestarted);
        assert!(peer.is_harmless(&known), "it is gone");
    }

    #[test]
    fn when_too_many_were_met_any_incarnation_may_be_one() {
        let mut known = KnownIncarnations::default();
        for incarnation in 0..=KNOWN_MAX as u64 {
            assert!(!known.contains(u64::MAX));
            let mut peer = Contact::new(&Export { incarnation, ..export(&[1]) });
            known.remember(&peer);
            assert!(!known.contains(incarnation), "it was not met");
            peer.welcomed(0);
            known.remember(&peer);
        }
        assert!(known.contains(u64::MAX));
    }

    #[test]
    fn a_backoff_grows_with_failures_and_is_halved_by_successes() {
        let mut backoff = Backoff::default();
        let mut pauses = Vec::new();
        for _ in 0..10 {
            backoff.fail(NOW, PAUSE_MS_MAX);
            pauses.push(backoff.pending(NOW).map_or(0, |until| (until - NOW).as_millis()));
        }
        assert_eq!(pauses, [0, 10, 20, 40, 80, 160, 320, 640, 1_000, 1_000]);
        (0..3).for_each(|_| backoff.succeed());
        backoff.fail(NOW, PAUSE_MS_MAX);
        assert_eq!(backoff.pending(NOW), Some(NOW + Duration::from_millis(10)));
        assert_eq!(backoff.pending(NOW + Duration::from_millis(10)), None);
    }

    #[test]
    fn fences_are_counted_up_to_their_limit() {
        let mut fences = FenceCount::new(1);
        assert_eq!((fences.begin(), fences.begin()), (Ok(()), Err(ErrorKind::Full.into())));
        fences.end();
        assert_eq!(fences.begin(), Ok(()));
    }

    #[test]
    fn an_identity_is_expelled_by_force_or_when_it_is_not_connected() {
        use ExpelMode::{Force, SpareConnected};
        let mut expelled = Expelled::default();
        assert_eq!(expelled.add(0, Force, false), Err(ErrorKind::InvalidArgument.into()));
        assert_eq!(expelled.add(1, SpareConnected, true), Err(ErrorKind::Busy.into()));
        assert!(!expelled.contains(1));
        assert_eq!((expelled.add(1, Force, true), expelled.contains(1)), (Ok(()), true));
        (2..=EXPELLED_MAX as u64)
            .for_each(|identity| assert_eq!(expelled.add(identity, SpareConnected, false), Ok(())));
        assert_eq!(expelled.add(u64::MAX, Force, false), Err(ErrorKind::Full.into()));
        assert_eq!(expelled.add(1, Force, false), Ok(()), "it is refused already");
    }
}
