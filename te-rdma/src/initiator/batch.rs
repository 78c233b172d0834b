//! Work requests under construction: pieces of slices, merged where they are contiguous at the peer.

use te_core::Op;

use crate::io::link::{Link, Piece};
use crate::sys::verbs::{Sge, WorkRequest};

/// The most work requests of one doorbell. Later ones may use another queue pair.
pub(super) const REQUESTS_MAX: usize = 32;
/// Longer slices gain nothing from sharing a work request, bytes.
const MERGE_BYTES_MAX: u32 = 64 << 10;

/// The next part of a slice, for a work request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    pub(super) slot: u32,
    pub(super) op: Op,
    pub(super) sge: Sge,
    /// The CPU can read the local memory, so that the bytes can be carried inside the work request.
    pub(super) cpu_readable: bool,
    pub(super) remote_addr: u64,
    pub(super) remote_key: u32,
}

/// Work requests under construction. Allocated once.
#[derive(Debug)]
pub(super) struct Batch {
    requests: Vec<WorkRequest>,
    /// Bytes of each request.
    lens: Vec<u32>,
    sges: Vec<Sge>,
    /// `sequence` is relative to the first request of the batch.
    pieces: Vec<Piece>,
    /// Number of pieces of the last request.
    shared: u8,
    bytes: u64,
}

impl Batch {
    pub(super) fn new(sges: usize) -> Self {
        Self {
            requests: Vec::with_capacity(REQUESTS_MAX),
            lens: Vec::with_capacity(REQUESTS_MAX),
            sges: Vec::with_capacity(REQUESTS_MAX * sges),
            pieces: Vec::with_capacity(REQUESTS_MAX * sges),
            shared: 0,
            bytes: 0,
        }
    }

    pub(super) fn requests(&self) -> &[WorkRequest] {
        &self.requests
    }

    pub(super) fn sges(&self) -> &[Sge] {
        &self.sges
    }

    /// Bytes of all requests.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds the cut to the last work request, if its remote range follows that of the request. False: it does
    /// not.
    pub(super) fn merge(&mut self, cut: &Cut, sges_max: u8, message_bytes_max: u32) -> bool {
        let Some(sequence) = self.requests.len().checked_sub(1) else { return false };
        let (request, len) = (&mut self.requests[sequence], &mut self.lens[sequence]);
        let behind = request.op == cut.op
            && request.remote_key == cut.remote_key
            // The peer chose the address: a region may end at the end of the address space.
            && request.remote_addr.wrapping_add(u64::from(*len)) == cut.remote_addr;
        let short = cut.sge.len <= MERGE_BYTES_MAX && cut.sge.len <= message_bytes_max - *len;
        let sequence = sequence as u32;
        if !behind || !short || self.shared >= sges_max {
            return false;
        }
        *len += cut.sge.len;
        request.inline &= cut.cpu_readable;
        match self.sges.last_mut() {
            Some(sge)
                if sge.local_key == cut.sge.local_key && sge.addr + u64::from(sge.len) == cut.sge.addr =>
            {
                sge.len += cut.sge.len;
            }
            _ => {
                self.sges.push(cut.sge);
                request.sges += 1;
            }
        }
        self.pieces.push(Piece { slot: cut.slot, sequence, bytes: cut.sge.len });
        self.shared += 1;
        self.bytes += u64::from(cut.sge.len);
        true
    }

    /// Adds a work request for the cut.
    pub(super) fn append(&mut self, cut: &Cut) {
        let sequence = self.requests.len() as u32;
        self.requests.push(WorkRequest {
            id: 0,
            op: cut.op,
            signaled: false,
            inline: cut.cpu_readable,
            sges: 1,
            remote_addr: cut.remote_addr,
            remote_key: cut.remote_key,
        });
        self.lens.push(cut.sge.len);
        self.shared = 1;
        self.sges.push(cut.sge);
        self.pieces.push(Piece { slot: cut.slot, sequence, bytes: cut.sge.len });
        self.bytes += u64::from(cut.sge.len);
    }

    /// Sets the ids of the requests and which of them report success. The last one always does, so that
    /// every request is covered by a report.
    pub(super) fn finish(&mut self, link: &Link, signal_every: u16, inline_max: u32) {
        let (count, mut unsignaled) = (self.requests.len(), link.unsignaled);
        for (at, (request, len)) in self.requests.iter_mut().zip(&self.lens).enumerate() {
            unsignaled += 1;
            request.signaled = unsignaled >= signal_every || at + 1 == count;
            if request.signaled {
                unsignaled = 0;
            }
            request.inline &= request.op == Op::Write && *len <= inline_max;
            request.id = link.id(link.next.wrapping_add(at as u32));
        }
    }

    /// Records at the queue pair that it has taken the first `taken` requests.
    pub(super) fn record(&self, link: &mut Link, taken: usize) {
        let first = link.next;
        for piece in &self.pieces {
            if (piece.sequence as usize) < taken {
                link.bytes += u64::from(piece.bytes);
                let sequence = first.wrapping_add(piece.sequence);
                link.posted.push_back(Piece { sequence, ..*piece });
            }
        }
        link.next = first.wrapping_add(taken as u32);
        link.outstanding += taken as u32;
        link.unsignaled = match self.requests[..taken].last() {
            Some(last) if last.signaled => 0,
            Some(_) => 1,
            None => link.unsignaled,
        };
    }

    /// Removes and returns the last piece, if its request is not one of the first `taken`.
    pub(super) fn take_back(&mut self, taken: usize) -> Option<Piece> {
        self.pieces.pop_if(|piece| piece.sequence as usize >= taken)
    }

    pub(super) fn clear(&mut self) {
        self.requests.clear();
        self.lens.clear();
        self.sges.clear();
        self.pieces.clear();
        self.bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::verbs::{Qp, QpConfig, QpHandle};

    const CUT: Cut = Cut {
        slot: 0,
        op: Op::Write,
        sge: Sge { addr: 0x1000, len: 100, local_key: 1 },
        cpu_readable: true,
        remote_addr: 0x8000,
        remote_key: 2,
    };

    fn link() -> Link {
        let config = QpConfig { depth: 8, sges: 2, inline_bytes: 0 };
        Link::new(Qp { handle: QpHandle(1), number: 1, config }, 0, 0, 7, 8)
    }

    /// The cut whose remote range follows that of `cut`, and whose local range is `gap` bytes behind its end.
    fn after(cut: Cut, gap: u64) -> Cut {
        let len = u64::from(cut.sge.len);
        let sge = Sge { addr: cut.sge.addr + len + gap, ..cut.sge };
        Cut { slot: cut.slot + 1, sge, remote_addr: cut.remote_addr + len, ..cut }
    }

    #[test]
    fn a_region_of_a_peer_may_end_at_the_end_of_the_address_space() {
        let mut batch = Batch::new(2);
        let last = u64::MAX - 99;
        let cut = Cut { remote_addr: last, ..CUT };
        batch.append(&cut);
        assert!(!batch.merge(&Cut { remote_addr: last - 100, ..cut }, 2, 1_000));
        assert_eq!(batch.requests().len(), 1);
    }

    #[test]
    fn cuts_that_are_contiguous_at_the_peer_share_a_request() {
        let mut batch = Batch::new(3);
        batch.append(&CUT);
        let second = after(CUT, 0);
        assert!(batch.merge(&second, 3, 1_000));
        assert_eq!(
            (batch.requests()[0].sges, batch.sges()[0].len),
            (1, 200),
            "they are contiguous here as well"
        );
        let third = after(second, 50);
        assert!(!batch.merge(&third, 3, 299), "the message would be too long");
        assert!(!batch.merge(&Cut { op: Op::Read, ..third }, 3, 1_000));
        assert!(!batch.merge(&Cut { remote_key: 3, ..third }, 3, 1_000));
        assert!(!batch.merge(&third, 2, 1_000), "too many pieces");
        assert!(batch.merge(&third, 3, 1_000));
        assert_eq!((batch.requests().len(), batch.requests()[0].sges, batch.bytes()), (1, 2, 300));
    }

    #[test]
    fn the_last_request_is_always_signaled() {
        let mut batch = Batch::new(1);
        (0..4).for_each(|_| batch.append(&CUT));
        let mut link = link();
        link.unsignaled = 1;
        batch.finish(&link, 3, 64);
        let signaled: Vec<bool> = batch.requests().iter().map(|request| request.signaled).collect();
        assert_eq!(signaled, [false, true, false, true]);
        assert!(batch.requests().iter().all(|request| !request.inline), "longer than what goes inline");
        assert_eq!(batch.requests()[3].id, link.id(3));
    }

    #[test]
    fn requests_that_a_queue_pair_did_not_take_are_taken_back() {
        let mut batch = Batch::new(1);
        (0..3).for_each(|slot| batch.append(&Cut { slot, ..CUT }));
        let mut link = link();
        batch.finish(&link, 16, 0);
        batch.record(&mut link, 1);
        assert_eq!((link.posted.len(), link.next, link.outstanding, link.bytes), (1, 1, 1, 100));
        assert_eq!(link.unsignaled, 1);
        let back: Vec<u32> = std::iter::from_fn(|| batch.take_back(1)).map(|piece| piece.slot).collect();
        assert_eq!(back, [2, 1]);
    }
}
