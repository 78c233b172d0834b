//! Decides which connections of peers are served: which are admitted, which have to make room for others, and
//! which peers are refused for good. The target closes the connections.
//!
//! ```text
//!   accept ──▶ not admitted: HELLO awaited, or last frame sent   at most 64, each for a limited time
//!                 │ HELLO                    ▲
//!                 ▼                          │ GO_AWAY: idle, and the connection is needed for another peer
//!              admitted: served              ┘                  at most three quarters of `connections_max`
//! ```
//!
//! Any process that reaches the port can connect and send a valid HELLO, so neither may keep others out.
//! Closing an idle connection costs its peer no more than a new handshake (GO_AWAY in
//! [`frame`](crate::frame)), so it is done readily.

use core::net::IpAddr;
use std::collections::{HashMap, VecDeque};

use te_core::{Error, ExpelMode, Instant};
use te_fabric::peer::Expelled;

/// Connections that may be open without being admitted: their HELLO has not arrived, or their last frame is
/// being sent.
const UNADMITTED_MAX: usize = 64;
/// Time that a connection has for its first operation after the WELCOME before it may have to make room, ms.
const FIRST_OPERATION_MS: u64 = 250;
/// Idle time after which a connection that has carried something may have to make room, ms.
const IDLE_MS: u64 = 1_000;
/// Identities of peers whose connections this target closed, kept at most.
const SENT_AWAY_MAX: usize = 4_096;

/// Counts and lists of peers' connections, beside the table of them.
#[derive(Debug, Default)]
pub(super) struct Admission {
    /// Number of connections that are served.
    admitted: usize,
    /// The other connections, by the name of their events and their address group, in the order in which they
    /// came.
    unadmitted: Vec<(u64, IpAddr)>,
    /// Identities of peers that may be alive without a connection, because this target closed it.
    sent_away: VecDeque<u64>,
    /// Peers that are refused for good.
    expelled: Expelled,
}

impl Admission {
    /// Number of connections that are served.
    pub(super) const fn admitted(&self) -> usize {
        self.admitted
    }

    /// Adds a connection that is not admitted. When there are too many, returns the one to close: the oldest
    /// one of the address that has the most.
    pub(super) fn add_unadmitted(&mut self, name: u64, group: IpAddr) -> Option<u64> {
        let gone = self.surplus().map(|at| self.unadmitted.remove(at).0);
        self.unadmitted.push((name, group));
        gone
    }

    /// Index of the connection to close before another one can be added. `None`: there is room.
    fn surplus(&self) -> Option<usize> {
        if self.unadmitted.len() < UNADMITTED_MAX {
            return None;
        }
        let share = |group: IpAddr| self.unadmitted.iter().filter(|(_, other)| *other == group).count();
        let largest = self.unadmitted.iter().map(|&(_, group)| share(group)).max();
        self.unadmitted.iter().position(|&(_, group)| Some(share(group)) == largest)
    }

    /// Counts a connection as served from now on. Its peer has come back.
    pub(super) fn admit(&mut self, name: u64, identity: u64) {
        self.leave(name);
        self.forget_sent_away(identity);
        self.admitted += 1;
    }

    /// Counts a connection as no longer served.
    pub(super) fn dismiss(&mut self) {
        debug_assert!(self.admitted > 0, "a connection is dismissed once");
        self.admitted -= 1;
    }

    /// Removes a connection from those that are not admitted.
    pub(super) fn leave(&mut self, name: u64) {
        self.unadmitted.retain(|&(known, _)| known != name);
    }
}

/// Peers that have no connection here.
impl Admission {
    /// Whether the peer may be alive without a connection, because this target closed its last one.
    pub(super) fn was_sent_away(&self, identity: u64) -> bool {
        self.sent_away.contains(&identity)
    }

    /// Remembers that this target closed a connection of the peer.
    pub(super) fn remember_sent_away(&mut self, identity: u64) {
        if !self.sent_away.contains(&identity) {
            if self.sent_away.len() >= SENT_AWAY_MAX {
                self.sent_away.pop_front();
            }
            self.sent_away.push_back(identity);
        }
    }

    fn forget_sent_away(&mut self, identity: u64) {
        self.sent_away.retain(|&known| known != identity);
    }

    pub(super) fn is_expelled(&self, identity: u64) -> bool {
        self.expelled.contains(identity)
    }

    /// Refuses a peer from now on. `connected` says that it has a connection here, which protects it unless
    /// `mode` is [`ExpelMode::Force`].
    ///
    /// # Errors
    /// `InvalidArgument`, `Busy`, `Full`.
    pub(super) fn expel(&mut self, identity: u64, mode: ExpelMode, connected: bool) -> Result<(), Error> {
        self.expelled.add(identity, mode, connected)?;
        self.forget_sent_away(identity);
        Ok(())
    }
}

/// A connection that is served, with what decides whether it has to make room.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) index: u32,
    /// The group that its address belongs to: one for each host.
    pub(super) group: IpAddr,
    /// The identity that its HELLO carried: one for each process.
    pub(super) identity: u64,
    /// Bytes of a granted operation have moved on it.
    pub(super) carried: bool,
    /// When such bytes last moved, or when it was admitted.
    pub(super) used: Instant,
    /// No operation is under way on it: it may have to make room.
    pub(super) idle: bool,
}

impl Candidate {
    fn quiet_ms(&self, now: Instant) -> u64 {
        now.nanos_since(self.used) / 1_000_000
    }

    /// Whether it has carried nothing although it had time for it.
    fn is_silent(&self, now: Instant) -> bool {
        self.idle && !self.carried && self.quiet_ms(now) >= FIRST_OPERATION_MS
    }
}

/// The connection that has been silent for longest among those that have never carried anything.
pub(super) fn silent(candidates: &[Candidate], now: Instant) -> Option<u32> {
    oldest(candidates.iter().filter(|candidate| candidate.is_silent(now)))
}

/// The connection that has to make room for a new one from `group` with this identity. `None`: every
/// connection is busy or recently used, and no address and no process has more than the new one's.
pub(super) fn victim(candidates: &[Candidate], group: IpAddr, identity: u64, now: Instant) -> Option<u32> {
    if let Some(index) = silent(candidates, now) {
        return Some(index);
    }
    let (mut groups, mut peers) = (HashMap::new(), HashMap::new());
    for candidate in candidates {
        *groups.entry(candidate.group).or_insert(0_usize) += 1;
        *peers.entry(candidate.identity).or_insert(0_usize) += 1;
    }
    // An address or a process gives up a connection when it still has more than the new one's afterwards.
    let (here, mine) = (groups.get(&group).copied(), peers.get(&identity).copied());
    let greedy = |share: usize, own: Option<usize>| share >= own.unwrap_or(0) + 2;
    let idle = || candidates.iter().filter(|candidate| candidate.idle);
    let most = idle().map(|candidate| groups[&candidate.group]).max()?;
    if greedy(most, here) {
        return oldest(idle().filter(|candidate| groups[&candidate.group] == most));
    }
    let most = idle().map(|candidate| peers[&candidate.identity]).max()?;
    if greedy(most, mine) {
        return oldest(idle().filter(|candidate| peers[&candidate.identity] == most));
    }
    oldest(idle().filter(|candidate| candidate.quiet_ms(now) >= IDLE_MS))
}

/// Among these connections, one that has carried nothing, or the one whose last use is longest ago.
fn oldest<'a>(candidates: impl Iterator<Item = &'a Candidate>) -> Option<u32> {
    candidates.min_by_key(|candidate| (candidate.carried, candidate.used)).map(|candidate| candidate.index)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Instant = Instant::from_millis(100_000);

    fn host(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    /// An idle connection whose last use was `quiet_ms` ago.
    fn candidate(index: u32, last: u8, identity: u64, quiet_ms: u64) -> Candidate {
        let used = Instant::from_millis(100_000 - quiet_ms);
        Candidate { index, group: host(last), identity, carried: true, used, idle: true }
    }

    #[test]
    fn too_many_unadmitted_cost_the_address_with_the_most_of_them() {
        let mut admission = Admission::default();
        assert_eq!(admission.add_unadmitted(1_000, host(1)), None);
        for name in 0..UNADMITTED_MAX as u64 - 1 {
            assert_eq!(admission.add_unadmitted(name, host(2)), None);
        }
        assert_eq!(admission.add_unadmitted(2_000, host(3)), Some(0));
        assert_eq!(admission.add_unadmitted(2_001, host(3)), Some(1));
        admission.leave(2_001);
        assert_eq!(admission.add_unadmitted(2_002, host(3)), None);
    }

    #[test]
    fn a_connection_that_never_carried_anything_makes_room_first_once_it_had_its_chance() {
        let silent_for = |index, quiet_ms| Candidate { carried: false, ..candidate(index, 1, 1, quiet_ms) };
        let candidates =
            [candidate(0, 1, 1, 9_000), silent_for(1, 249), silent_for(2, 250), silent_for(3, 300)];
        assert_eq!((silent(&candidates, NOW), victim(&candidates, host(1), 1, NOW)), (Some(3), Some(3)));
        assert_eq!(silent(&candidates[..2], NOW), None);
        let busy = Candidate { idle: false, ..silent_for(0, 300) };
        assert_eq!((silent(&[busy], NOW), victim(&[busy], host(9), 9, NOW)), (None, None));
    }

    #[test]
    fn the_address_that_holds_the_most_makes_room_then_the_process_then_who_is_idle_for_long() {
        let mut candidates = vec![candidate(0, 1, 1, 10), candidate(1, 1, 2, 20), candidate(2, 2, 3, 30)];
        assert_eq!(victim(&candidates, host(3), 9, NOW), Some(1), "two of one address");
        assert_eq!(victim(&candidates, host(1), 9, NOW), None, "its own address holds the most");
        candidates[2].used = Instant::from_millis(100_000 - 1_000);
        assert_eq!(victim(&candidates, host(1), 9, NOW), Some(2), "idle for a second");
        candidates[1].identity = 1;
        assert_eq!(victim(&candidates, host(1), 9, NOW), Some(1), "two connections of one process");
        assert_eq!(victim(&candidates, host(1), 1, NOW), Some(2), "the newcomer is that process");
    }

    #[test]
    fn connections_that_are_busy_count_and_do_not_go() {
        let mut candidates = [candidate(0, 1, 1, 10), candidate(1, 1, 1, 20)];
        candidates[1].idle = false;
        assert_eq!(victim(&candidates, host(2), 9, NOW), Some(0));
        candidates[0].idle = false;
        assert_eq!(victim(&candidates, host(2), 9, NOW), None);
    }

    #[test]
    fn a_peer_that_was_sent_away_is_remembered_until_it_comes_again_or_is_expelled() {
        let mut admission = Admission::default();
        [7, 8, 7].into_iter().for_each(|identity| admission.remember_sent_away(identity));
        assert!(admission.was_sent_away(7) && admission.was_sent_away(8));
        admission.admit(1, 7);
        assert_eq!((admission.was_sent_away(7), admission.admitted()), (false, 1));
        assert_eq!(admission.expel(8, ExpelMode::SpareConnected, false), Ok(()));
        assert!(!admission.was_sent_away(8) && admission.is_expelled(8));
        for identity in 100..100 + SENT_AWAY_MAX as u64 + 1 {
            admission.remember_sent_away(identity);
        }
        assert!(!admission.was_sent_away(100) && admission.was_sent_away(101), "the oldest is forgotten");
    }
}
