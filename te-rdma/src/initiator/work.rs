//! What there is to do for one peer: the slices that wait, the queue pairs to it, and the questions to ask.

use te_fabric::Queue;
use te_fabric::peer::{Backoff, Fence};

use crate::config::QPS_MAX;

/// The initiator's side of one peer.
#[derive(Debug)]
pub(super) struct Work {
    /// Index of each queue pair.
    pub(super) links: [Option<u32>; QPS_MAX as usize],
    /// The question that offers queue pairs.
    pub(super) offered: Option<u64>,
    /// Pause before queue pairs are made again.
    pub(super) backoff: Backoff,
    /// Slices that can be posted, or are posted in part.
    pub(super) pending: Queue,
    /// Segments with slices that wait for keys which have not been asked for.
    pub(super) wanting: Vec<u32>,
    /// Each, once sent, with the question that carries it.
    pub(super) fences: Vec<Fence<u64>>,
    /// Queue pairs have ended here; the target does not know yet.
    pub(super) cleanup_due: bool,
    /// The control connection is up: questions can be asked.
    pub(super) up: bool,
    /// Slices not yet completed.
    pub(super) operations: u32,
    pub(super) segments: u32,
    /// Used since the connection cache's hand last came by.
    pub(super) used: bool,
    /// In the list of peers that have something to do.
    pub(super) listed: bool,
}

impl Work {
    /// Of a peer that is new.
    pub(super) fn new(fences_max: usize) -> Self {
        Self {
            links: [None; QPS_MAX as usize],
            offered: None,
            backoff: Backoff::default(),
            pending: Queue::new(),
            wanting: Vec::new(),
            fences: Vec::with_capacity(fences_max.min(64)),
            cleanup_due: false,
            up: false,
            operations: 0,
            segments: 0,
            used: false,
            listed: false,
        }
    }

    /// Whether it has slices or fences of ours.
    pub(super) fn is_busy(&self) -> bool {
        self.operations > 0 || !self.fences.is_empty()
    }

    /// Whether something of it needs the control connection.
    pub(super) fn needs_channel(&self) -> bool {
        !self.pending.is_empty() || !self.wanting.is_empty() || self.has_unsent_fence()
    }

    /// Whether it has something to do now or soon.
    pub(super) fn has_work(&self) -> bool {
        self.needs_channel() || (self.cleanup_due && self.up)
    }

    pub(super) fn has_unsent_fence(&self) -> bool {
        self.fences.iter().any(|fence| fence.sent.is_none())
    }

    /// Whether nothing needs it any more.
    pub(super) fn is_idle(&self) -> bool {
        self.segments == 0 && !self.is_busy()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use te_core::Token;

    #[test]
    fn a_peer_needs_its_control_connection_for_what_was_not_sent() {
        let mut work = Work::new(4);
        assert!(!work.needs_channel() && work.is_idle());
        work.wanting.push(3);
        assert!(work.needs_channel());
        work.wanting.clear();
        work.fences.push(Fence { token: Token(1), remote_region: 3, sent: None });
        assert!(work.needs_channel() && work.is_busy() && !work.is_idle());
        work.fences[0].sent = Some(7);
        assert!(!work.needs_channel() && work.is_busy());
        work.fences.clear();
        work.cleanup_due = true;
        assert!(!work.has_work(), "the target cannot be asked");
        work.up = true;
        assert!(work.has_work() && !work.needs_channel());
    }
}
