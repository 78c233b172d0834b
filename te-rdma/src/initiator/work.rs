//! The work for one peer: the slices that wait, the queue pairs to it, and the requests to send.

use te_fabric::Queue;
use te_fabric::peer::{Backoff, Fence};

use crate::config::QPS_MAX;

/// The initiator's side of one peer.
#[derive(Debug)]
pub(super) struct Work {
    /// Index of each queue pair.
    pub(super) links: [Option<u32>; QPS_MAX as usize],
    /// Id of the open request that offers queue pairs.
    pub(super) offered: Option<u64>,
    /// The time before queue pairs are made again.
    pub(super) backoff: Backoff,
    /// Slices that can be posted, or are posted in part.
    pub(super) pending: Queue,
    /// Indexes of remote regions of which keys are needed and not requested.
    pub(super) wanting: Vec<u32>,
    /// Running fences, each with the id of the request that carries it, if that was sent.
    pub(super) fences: Vec<Fence<u64>>,
    /// Queue pairs were destroyed here, and the target has to be notified.
    pub(super) cleanup_due: bool,
    /// The control connection is up: requests can be sent.
    pub(super) up: bool,
    /// Slices that are accepted and not completed.
    pub(super) operations: u32,
    /// Attached remote regions of the peer.
    pub(super) remote_regions: u32,
    /// Used since SIEVE last checked.
    pub(super) used: bool,
    /// It is in the list of peers with work.
    pub(super) listed: bool,
}

impl Work {
    /// For a new peer.
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
            remote_regions: 0,
            used: false,
            listed: false,
        }
    }

    /// Whether slices or fences for it are running.
    pub(super) fn is_busy(&self) -> bool {
        self.operations > 0 || !self.fences.is_empty()
    }

    /// Whether some of its work needs the control connection.
    pub(super) fn needs_connection(&self) -> bool {
        !self.pending.is_empty() || !self.wanting.is_empty() || self.has_unsent_fence()
    }

    /// Whether there is work for it.
    pub(super) fn has_work(&self) -> bool {
        self.needs_connection() || (self.cleanup_due && self.up)
    }

    pub(super) fn has_unsent_fence(&self) -> bool {
        self.fences.iter().any(|fence| fence.sent.is_none())
    }

    /// Whether nothing needs the peer any more.
    pub(super) fn is_idle(&self) -> bool {
        self.remote_regions == 0 && !self.is_busy()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use te_core::Token;

    #[test]
    fn a_peer_needs_its_control_connection_for_unsent_requests() {
        let mut work = Work::new(4);
        assert!(!work.needs_connection() && work.is_idle());
        work.wanting.push(3);
        assert!(work.needs_connection());
        work.wanting.clear();
        work.fences.push(Fence { token: Token(1), remote_region: 3, sent: None });
        assert!(work.needs_connection() && work.is_busy() && !work.is_idle());
        work.fences[0].sent = Some(7);
        assert!(!work.needs_connection() && work.is_busy());
        work.fences.clear();
        work.cleanup_due = true;
        assert!(!work.has_work(), "the control connection is not up");
        work.up = true;
        assert!(work.has_work() && !work.needs_connection());
    }
}
