//! One peer, as an initiator sees it: its addresses, the lanes to it, what waits for them, its fences and its pulse.

use std::collections::VecDeque;
use std::net::SocketAddr;

use te_core::{Error, ErrorKind, Instant, Token};
use te_fabric::{EXPORT_ADDRESSES_MAX, Queue};

use crate::config::LANES_MAX;
use crate::initiator::Piece;

/// The first pause before a peer is tried again.
const RECONNECT_MS_MIN: u64 = 10;

/// A fence that waits for the target's word.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fence {
    pub(crate) token: Token,
    pub(crate) segment: u32,
    pub(crate) id: u64,
    /// Lanes (by number) whose answer is missing; `None`: not sent.
    pub(crate) waiting: Option<u32>,
}

/// Incarnations that are remembered after their peers were let go.
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

/// One peer.
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
    /// Bit for each address at which this very incarnation has welcomed a lane. Only from there does `Restarted` say that
    /// it is gone: anywhere else another process may have been listening all along.
    pub(crate) met: u8,
    /// Index of each lane in the table of connections.
    pub(crate) lanes: [Option<u32>; LANES_MAX as usize],
    /// Slices with pieces that no lane has taken.
    pub(crate) pending: Queue,
    /// Pieces that a lane had taken and the target has not: they go first.
    pub(crate) again: VecDeque<Piece>,
    pub(crate) fences: Vec<Fence>,
    /// Slices not yet completed.
    pub(crate) operations: u32,
    pub(crate) segments: u32,
    pub(crate) gate: Gate,
    pub(crate) failures: u32,
    /// Since when there has been no connection to be had, its own or one of ours.
    pub(crate) crowded: Option<Instant>,
    /// When it last showed a sign of life; `None` while it owes us nothing.
    pub(crate) pulse: Option<Instant>,
    /// In the list of peers that have something to send.
    pub(crate) listed: bool,
}

impl Endpoint {
    pub(crate) fn new(
        incarnation: u64,
        addresses: &[SocketAddr; EXPORT_ADDRESSES_MAX],
        count: usize,
    ) -> Self {
        Self {
            incarnation,
            addresses: *addresses,
            address_count: count,
            address_at: 0,
            addresses_failed: 0,
            strangers: 0,
            met: 0,
            lanes: [None; LANES_MAX as usize],
            pending: Queue::new(),
            again: VecDeque::new(),
            fences: Vec::new(),
            operations: 0,
            segments: 0,
            gate: Gate::Open,
            failures: 0,
            crowded: None,
            pulse: None,
            listed: false,
        }
    }

    pub(crate) fn is(&self, incarnation: u64, addresses: &[SocketAddr]) -> bool {
        self.incarnation == incarnation && self.addresses[..self.address_count] == *addresses
    }

    /// Whether it owes us anything.
    pub(crate) fn is_awaited(&self) -> bool {
        self.operations > 0 || !self.fences.is_empty()
    }

    /// Whether something waits to be put on a lane.
    pub(crate) fn has_work(&self) -> bool {
        !self.pending.is_empty()
            || !self.again.is_empty()
            || self.fences.iter().any(|fence| fence.waiting.is_none())
    }

    /// Whether nothing needs it any more.
    pub(crate) fn is_idle(&self) -> bool {
        self.segments == 0 && !self.is_awaited()
    }

    pub(crate) fn lane_count(&self) -> usize {
        self.lanes.iter().flatten().count()
    }

    /// The first lane number up to `lanes_max` that has no connection.
    pub(crate) fn vacant_lane(&self, lanes_max: u8) -> Option<usize> {
        self.lanes[..usize::from(lanes_max)].iter().position(Option::is_none)
    }

    /// A lane is up: whatever kept us away is over.
    pub(crate) fn connected(&mut self) {
        self.failures = 0;
        self.crowded = None;
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
        let pause = (RECONNECT_MS_MIN << self.failures.min(16)).min(u64::from(pause_ms_max));
        self.failures += 1;
        self.addresses_failed = 0;
        self.strangers = 0;
        self.gate = Gate::Until(now + core::time::Duration::from_millis(pause));
    }

    /// A lane is gone; its answers will not come, so fences that wait for it are sent anew.
    pub(crate) fn lane_lost(&mut self, number: usize) {
        self.lanes[number] = None;
        for fence in &mut self.fences {
            if fence.waiting.is_some_and(|lanes| lanes & 1 << number != 0) {
                fence.waiting = None;
            }
        }
    }
}

/// What ended a lane, and what that says about its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LaneEnd {
    /// The connection broke, or the peer closed it.
    Lost(Error),
    /// The target refused the handshake.
    Refused(Error),
    /// The target needs the connection for somebody else, and has accepted nothing that it has not answered.
    Retired,
}

impl LaneEnd {
    pub(crate) const fn error(self) -> Error {
        match self {
            Self::Lost(error) | Self::Refused(error) => error,
            Self::Retired => Error::with_code(ErrorKind::PeerDead, libc::ECONNRESET),
        }
    }
}
