//! One queue pair for our work to a peer, and its posted work.

use std::collections::VecDeque;

use te_core::{Error, Instant};

use crate::sys::verbs::{Qp, WcStatus};

/// Part of a slice in a posted work request: one of its local pieces.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) slot: u32,
    /// Number of the work request, counted per queue pair.
    pub(crate) sequence: u32,
    pub(crate) bytes: u32,
}

/// The state of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Phase {
    /// Offered to the target.
    Offered,
    /// The target has its end; ours is being connected.
    Connecting,
    /// Connected; work is posted.
    Live,
    /// In error: its posted work is flushed, or ends when it is destroyed.
    Flushing {
        /// When it is destroyed at the latest.
        until: Instant,
        /// The error of its slices; `None`: they did not cause it, and are sent again.
        error: Option<Error>,
    },
}

/// A queue pair of ours.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) qp: Qp,
    pub(crate) peer: u32,
    /// Its number among the queue pairs to this peer.
    pub(crate) number: u8,
    /// The target's name for it.
    pub(crate) generation: u32,
    /// First packet number that it sends.
    pub(crate) psn: u32,
    /// Path MTU, bytes.
    pub(crate) mtu: u32,
    /// Its name in completions.
    pub(crate) name: u32,
    pub(crate) phase: Phase,
    /// Pieces of posted work requests, oldest first.
    pub(crate) posted: VecDeque<Piece>,
    /// The sequence number of the next work request.
    pub(crate) next: u32,
    /// Work requests posted and not known to have ended.
    pub(crate) outstanding: u32,
    /// Bytes of the posted pieces.
    pub(crate) bytes: u64,
    /// Work requests since the last one that reports success.
    pub(crate) unsignaled: u16,
    /// The first work request that failed, and its failure. It and all later ones end when the queue pair is
    /// destroyed: before that, the device may still touch their memory.
    pub(crate) failed: Option<(u32, Failure)>,
    /// Some work request on it has succeeded.
    pub(crate) proven: bool,
    /// It could not be destroyed, and is tried again. The number of bytes that are quarantined with it.
    pub(crate) quarantined: Option<u64>,
}

impl Link {
    /// A queue pair on which nothing was posted yet. At most `pieces` are posted at the same time.
    pub(crate) fn new(qp: Qp, peer: u32, number: u8, name: u32, pieces: usize) -> Self {
        Self {
            qp,
            peer,
            number,
            generation: 0,
            psn: 0,
            mtu: 0,
            name,
            phase: Phase::Offered,
            posted: VecDeque::with_capacity(pieces),
            next: 0,
            outstanding: 0,
            bytes: 0,
            unsignaled: 0,
            failed: None,
            proven: false,
            quarantined: None,
        }
    }

    /// The id of work request `sequence`.
    pub(crate) fn id(&self, sequence: u32) -> u64 {
        u64::from(self.name) << 32 | u64::from(sequence)
    }

    /// How many work requests it takes at this moment.
    pub(crate) fn room(&self, depth: u32, window: u64) -> u32 {
        let open = self.phase == Phase::Live && self.bytes < window;
        if open { depth.saturating_sub(self.outstanding) } else { 0 }
    }

    /// Removes and returns the oldest piece, if its work request is not later than `sequence`.
    pub(crate) fn pop_through(&mut self, sequence: u32) -> Option<Piece> {
        let piece = *self.posted.front()?;
        // Sequence numbers wrap around; posted work spans far less than half of them.
        if (sequence.wrapping_sub(piece.sequence) as i32) < 0 {
            return None;
        }
        self.posted.pop_front();
        self.bytes -= u64::from(piece.bytes);
        Some(piece)
    }

    /// Whether this work request is posted and has not ended.
    pub(crate) fn has(&self, sequence: u32) -> bool {
        let age = self.next.wrapping_sub(sequence);
        age > 0 && age <= self.outstanding
    }
}

/// The consequences of a failed work request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Failure {
    /// The error of its slices; `None`: they did not cause it, and are sent again.
    pub(crate) own: Option<Error>,
    /// The error of the slices posted after it; `None`: they are sent again.
    pub(crate) others: Option<Error>,
    /// Its WRITE may be in place in part, or may still land.
    pub(crate) doubtful: bool,
    /// The remote keys that it used are invalid.
    pub(crate) keys_dead: bool,
}

impl Failure {
    /// Classifies a completion; `None`: it succeeded. `one_packet`: the work request fits into one packet, so
    /// that it lands completely or not at all.
    pub(crate) fn of(status: WcStatus, code: i32, one_packet: bool) -> Option<Self> {
        use te_core::ErrorKind as Kind;
        let error = |kind| Some(Error::with_code(kind, code));
        Some(match status {
            WcStatus::Success => return None,
            // The key is checked with the first packet. The region of a longer message may have been
            // deregistered before its other packets arrived.
            WcStatus::RemoteAccess => {
                Self { own: error(Kind::AccessDenied), others: None, doubtful: !one_packet, keys_dead: true }
            }
            WcStatus::Local => {
                Self { own: error(Kind::System), others: None, doubtful: true, keys_dead: false }
            }
            WcStatus::RemoteOperation => {
                Self { own: error(Kind::Rail), others: None, doubtful: true, keys_dead: false }
            }
            WcStatus::RetriesExceeded | WcStatus::NotReady | WcStatus::Other => {
                let rail = error(Kind::Rail);
                Self { own: rail, others: rail, doubtful: true, keys_dead: false }
            }
            WcStatus::Flushed => Self { own: None, others: None, doubtful: true, keys_dead: false },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::verbs::{QpConfig, QpHandle};
    use te_core::ErrorKind;

    fn link(next: u32) -> Link {
        let config = QpConfig { depth: 4, sges: 2, inline_bytes: 0 };
        let qp = Qp { handle: QpHandle(1), number: 1, config };
        Link { next, phase: Phase::Live, ..Link::new(qp, 0, 0, 7, 4) }
    }

    #[test]
    fn a_completion_ends_everything_before_it_across_the_wrap() {
        let mut link = link(u32::MAX - 1);
        for slot in 0..4 {
            link.posted.push_back(Piece { slot, sequence: link.next, bytes: 10 });
            link.next = link.next.wrapping_add(1);
            link.outstanding += 1;
            link.bytes += 10;
        }
        assert!(link.has(u32::MAX - 1) && link.has(1) && !link.has(2) && !link.has(u32::MAX - 2));
        let mut ended = Vec::new();
        while let Some(piece) = link.pop_through(0) {
            ended.push(piece.slot);
        }
        assert_eq!((ended, link.bytes, link.posted.len()), (vec![0, 1, 2], 10, 1));
        assert_eq!(link.id(3), 7 << 32 | 3);
    }

    #[test]
    fn only_the_slices_that_caused_a_failure_end_with_it() {
        let denied = Failure::of(WcStatus::RemoteAccess, 10, true).expect("a failure");
        assert_eq!(denied.own.map(|e| e.kind), Some(ErrorKind::AccessDenied));
        assert!(denied.others.is_none() && !denied.doubtful && denied.keys_dead);
        assert!(Failure::of(WcStatus::RemoteAccess, 10, false).is_some_and(|failure| failure.doubtful));
        let path = Failure::of(WcStatus::RetriesExceeded, 12, true).expect("a failure");
        assert!(path.others == path.own && path.others.is_some() && path.doubtful);
        let flushed = Failure::of(WcStatus::Flushed, 5, true).expect("a failure");
        assert!(flushed.own.is_none() && flushed.others.is_none() && flushed.doubtful);
        assert_eq!(Failure::of(WcStatus::Success, 0, true), None);
    }
}
