//! One peer, as an initiator sees it: its addresses, its side channel, the queue pairs to it, what waits, and its fences.

use te_core::Error;
use te_fabric::peer::{Contact, Cooldown, Fence};
use te_fabric::{Export, Queue};

use crate::config::QPS_MAX;

/// One peer: one incarnation of a target.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub(crate) contact: Contact,
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
    /// Each, once sent, with the question that carries it.
    pub(crate) fences: Vec<Fence<u64>>,
    /// Queue pairs have ended here; the target does not know yet.
    pub(crate) sweep: bool,
    /// Slices not yet completed.
    pub(crate) operations: u32,
    pub(crate) segments: u32,
    /// Used since the cache's hand last came by.
    pub(crate) used: bool,
    /// In the list of endpoints that have something to do.
    pub(crate) listed: bool,
}

impl Endpoint {
    pub(crate) fn new(export: &Export, fences_max: usize) -> Self {
        Self {
            contact: Contact::new(export),
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
            used: false,
            listed: false,
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
        self.fences.iter().any(|fence| fence.sent.is_none())
    }

    /// Whether nothing needs it any more.
    pub(crate) fn is_idle(&self) -> bool {
        self.segments == 0 && !self.is_busy()
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
