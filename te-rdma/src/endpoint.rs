//! One peer, as an initiator sees it: its addresses, its side channel, the queue pairs to it, what waits, and its fences.

use core::time::Duration;
use std::net::SocketAddr;

use te_core::{Error, Instant, Token};
use te_fabric::Queue;

use crate::config::QPS_MAX;
use crate::exchange::EXPORT_ADDRESSES_MAX;

/// The first pause before a peer, or a queue pair to it, is tried again.
const PAUSE_MS_MIN: u64 = 10;

/// A fence that waits for the target's word.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fence {
    pub(crate) token: Token,
    pub(crate) segment: u32,
    /// The question that carries it; `None`: not sent.
    pub(crate) asked: Option<u64>,
}

/// Incarnations that are remembered after their endpoints were let go.
const ACQUAINTANCES_MAX: usize = 4_096;

/// Incarnations that have been met and let go: what was sent to them may still land.
#[derive(Debug, Default)]
pub(crate) struct Acquaintances {
    incarnations: Vec<u64>,
    /// There were too many: anybody may be one.
    overflow: bool,
}

impl Acquaintances {
    pub(crate) fn add(&mut self, incarnation: u64) {
        if self.knows(incarnation) {
            return;
        }
        if self.incarnations.len() < ACQUAINTANCES_MAX {
            self.incarnations.push(incarnation);
        } else {
            self.overflow = true;
        }
    }

    pub(crate) fn knows(&self, incarnation: u64) -> bool {
        self.overflow || self.incarnations.contains(&incarnation)
    }
}

/// Why nothing connects to the peer at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gate {
    Open,
    /// Not before then.
    Until(Instant),
    /// Its incarnation is gone for good: a listener where it was met is another one.
    Restarted,
    /// It has cut us off, for good.
    Expelled,
}

/// A pause that grows with each failure and is forgotten by degrees.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cooldown {
    failures: u32,
    until: Option<Instant>,
}

impl Cooldown {
    /// The first failure costs nothing, the second one 10 ms, each further one twice as much.
    pub(crate) fn fail(&mut self, now: Instant, pause_ms_max: u32) {
        let pause = match self.failures {
            0 => 0,
            n => (PAUSE_MS_MIN << (n - 1).min(16)).min(u64::from(pause_ms_max)),
        };
        self.failures = (self.failures + 1).min(32);
        self.until = Some(now + Duration::from_millis(pause));
    }

    /// Something worked: half of the failures are forgotten.
    pub(crate) fn forgive(&mut self) {
        self.failures /= 2;
    }

    /// Until when to wait; `None`: no more.
    pub(crate) fn pending(&self, now: Instant) -> Option<Instant> {
        self.until.filter(|until| now < *until)
    }
}

/// One peer: one incarnation of a target.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(crate) incarnation: u64,
    pub(crate) addresses: [SocketAddr; EXPORT_ADDRESSES_MAX],
    pub(crate) address_count: usize,
    /// The address that is tried next, and how many have failed in a row.
    pub(crate) address_at: usize,
    pub(crate) addresses_failed: usize,
    /// Of these, how many were answered by somebody else.
    pub(crate) strangers: usize,
    /// Bit for each address at which this very incarnation has welcomed us. Only from there does `Restarted` say that it is
    /// gone: anywhere else another process may have been listening all along.
    pub(crate) met: u8,
    /// Index of its side channel.
    pub(crate) channel: Option<u32>,
    /// The side channel has been welcomed.
    pub(crate) up: bool,
    /// Index of each queue pair.
    pub(crate) links: [Option<u32>; QPS_MAX as usize],
    /// The question that offers queue pairs.
    pub(crate) offered: Option<u64>,
    /// Pause before queue pairs are made again.
    pub(crate) links_rest: Cooldown,
    /// Slices that can be posted, or are posted in part.
    pub(crate) pending: Queue,
    /// Segments with slices that wait for keys, and nobody has asked for them.
    pub(crate) wanting: Vec<u32>,
    pub(crate) fences: Vec<Fence>,
    /// Queue pairs have ended here; the target does not know yet.
    pub(crate) sweep: bool,
    /// Slices not yet completed.
    pub(crate) operations: u32,
    pub(crate) segments: u32,
    pub(crate) gate: Gate,
    pub(crate) failures: u32,
    /// Used since the cache's hand last came by.
    pub(crate) used: bool,
    /// In the list of endpoints that have something to do.
    pub(crate) listed: bool,
}

impl Endpoint {
    pub(crate) fn new(
        incarnation: u64,
        addresses: &[SocketAddr; EXPORT_ADDRESSES_MAX],
        count: usize,
        fences_max: usize,
    ) -> Self {
        Self {
            incarnation,
            addresses: *addresses,
            address_count: count.max(1),
            address_at: 0,
            addresses_failed: 0,
            strangers: 0,
            met: 0,
            channel: None,
            up: false,
            links: [None; QPS_MAX as usize],
            offered: None,
            links_rest: Cooldown::default(),
            pending: Queue::new(),
            wanting: Vec::new(),
            fences: Vec::with_capacity(fences_max.min(64)),
            sweep: false,
            operations: 0,
            segments: 0,
            gate: Gate::Open,
            failures: 0,
            used: false,
            listed: false,
        }
    }

    /// Whether it is where this export says.
    pub(crate) fn is_at(&self, addresses: &[SocketAddr]) -> bool {
        self.addresses[..self.address_count] == *addresses
    }

    /// Another export of the same incarnation names other addresses. They are believed while nobody was met at the old.
    pub(crate) fn move_to(&mut self, addresses: &[SocketAddr; EXPORT_ADDRESSES_MAX], count: usize) {
        if self.met == 0 && self.channel.is_none() {
            self.addresses = *addresses;
            self.address_count = count.max(1);
            (self.address_at, self.addresses_failed, self.strangers) = (0, 0, 0);
            self.gate = Gate::Open;
        }
    }

    /// Whether it has slices or fences of ours.
    pub(crate) fn is_busy(&self) -> bool {
        self.operations > 0 || !self.fences.is_empty()
    }

    /// Whether something of it needs the side channel.
    pub(crate) fn needs_channel(&self) -> bool {
        !self.pending.is_empty() || !self.wanting.is_empty() || self.has_unsent_fence()
    }

    pub(crate) fn has_unsent_fence(&self) -> bool {
        self.fences.iter().any(|fence| fence.asked.is_none())
    }

    /// Whether nothing needs it any more.
    pub(crate) fn is_idle(&self) -> bool {
        self.segments == 0 && !self.is_busy()
    }

    /// The channel is up: whatever kept us away is over.
    pub(crate) fn connected(&mut self) {
        self.failures = 0;
        self.addresses_failed = 0;
        self.strangers = 0;
        self.gate = Gate::Open;
    }

    /// Whether it, and nobody else, has been at this address.
    pub(crate) const fn has_met(&self, address: u8) -> bool {
        self.met & 1 << address != 0
    }

    /// Every address of the round was answered by somebody else, and the peer has never been seen at any.
    pub(crate) const fn is_replaced(&self) -> bool {
        self.met == 0 && self.strangers >= self.address_count
    }

    /// An attempt has failed. True: another address is worth a try at once.
    pub(crate) fn try_next_address(&mut self) -> bool {
        self.address_at = (self.address_at + 1) % self.address_count;
        self.addresses_failed += 1;
        self.addresses_failed < self.address_count
    }

    /// All addresses have failed: leaves the peer alone for a while, longer each time.
    pub(crate) fn back_off(&mut self, now: Instant, pause_ms_max: u32) {
        let pause = (PAUSE_MS_MIN << self.failures.min(16)).min(u64::from(pause_ms_max));
        self.failures += 1;
        self.addresses_failed = 0;
        self.strangers = 0;
        self.gate = Gate::Until(now + Duration::from_millis(pause));
    }
}

/// What ended a side channel, and what that says about its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChannelEnd {
    /// It was up, and broke or was closed.
    Lost(Error),
    /// It never came up.
    Refused(Error),
    /// We closed it: nobody's failure.
    Dropped,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_are_forgotten_by_degrees() {
        let mut rest = Cooldown::default();
        let start = Instant::from_millis(1_000);
        let mut pauses = Vec::new();
        for _ in 0..10 {
            rest.fail(start, 1_000);
            pauses.push(rest.pending(start).map_or(0, |until| (until - start).as_millis()));
        }
        assert_eq!(pauses, [0, 10, 20, 40, 80, 160, 320, 640, 1_000, 1_000]);
        (0..3).for_each(|_| rest.forgive());
        rest.fail(start, 1_000);
        assert_eq!(rest.pending(start), Some(start + Duration::from_millis(10)));
        assert_eq!(rest.pending(start + Duration::from_millis(10)), None);
    }
}
