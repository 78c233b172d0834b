//! One peer, as an initiator sees it: its addresses, the lanes to it, what waits for them, its fences and its pulse.

use std::collections::VecDeque;

use te_core::{Error, ErrorKind, Instant};
use te_fabric::peer::{Contact, Fence};
use te_fabric::{Export, Queue};

use crate::config::LANES_MAX;
use crate::initiator::Piece;

/// How a fence was sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    /// What its answers carry. Another one each time it is sent: an answer to an earlier FENCE speaks of other lanes.
    pub(crate) id: u64,
    /// Lanes (by number) whose answer is missing.
    pub(crate) lanes: u32,
}

/// One peer.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(crate) contact: Contact,
    /// Index of each lane in the table of connections.
    pub(crate) lanes: [Option<u32>; LANES_MAX as usize],
    /// Slices with pieces that no lane has taken.
    pub(crate) pending: Queue,
    /// Pieces that a lane had taken and the target has not: they go first.
    pub(crate) again: VecDeque<Piece>,
    pub(crate) fences: Vec<Fence<Sent>>,
    /// Slices not yet completed.
    pub(crate) operations: u32,
    pub(crate) segments: u32,
    /// Since when there has been no connection to be had, its own or one of ours.
    pub(crate) crowded: Option<Instant>,
    /// When it last showed a sign of life; `None` while it owes us nothing.
    pub(crate) pulse: Option<Instant>,
    /// In the list of peers that have something to send.
    pub(crate) listed: bool,
}

impl Endpoint {
    pub(crate) fn new(export: &Export) -> Self {
        Self {
            contact: Contact::new(export),
            lanes: [None; LANES_MAX as usize],
            pending: Queue::new(),
            again: VecDeque::new(),
            fences: Vec::new(),
            operations: 0,
            segments: 0,
            crowded: None,
            pulse: None,
            listed: false,
        }
    }

    /// Whether it owes us anything.
    pub(crate) fn is_awaited(&self) -> bool {
        self.operations > 0 || !self.fences.is_empty()
    }

    /// Whether something waits to be put on a lane.
    pub(crate) fn has_work(&self) -> bool {
        !self.pending.is_empty()
            || !self.again.is_empty()
            || self.fences.iter().any(|fence| fence.sent.is_none())
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

    /// A lane to the address with this number is up: whatever kept us away is over.
    pub(crate) fn connected(&mut self, address: u8) {
        self.contact.welcomed(address);
        self.crowded = None;
    }

    /// A lane is gone; its answers will not come, so fences that wait for it are sent anew.
    pub(crate) fn lane_lost(&mut self, number: usize) {
        self.lanes[number] = None;
        for fence in &mut self.fences {
            if fence.sent.is_some_and(|sent| sent.lanes & 1 << number != 0) {
                fence.sent = None;
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
