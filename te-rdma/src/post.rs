//! From slices to work requests: cut at chunks and messages, put together where they lie side by side, posted by the batch.

use te_core::{Error, ErrorKind, Op};

use crate::link::{Link, Piece};
use crate::region::Keys;
use crate::transport::RdmaTransport;
use crate::verbs::{Sge, Verbs, WorkRequest};

/// Work requests of one doorbell, at most: what follows may take another queue pair.
const STRIDE: usize = 32;
/// Slices longer than this gain nothing from sharing a work request.
const MERGE_BYTES_MAX: u32 = 64 << 10;

/// Work requests under construction. Allocated once.
#[derive(Debug)]
pub(crate) struct Batch {
    requests: Vec<WorkRequest>,
    /// Bytes of each request.
    lens: Vec<u32>,
    sges: Vec<Sge>,
    /// `sequence` counts from the batch's first request.
    pieces: Vec<Piece>,
    /// Pieces of the last request.
    shared: u8,
    bytes: u64,
}

impl Batch {
    pub(crate) fn new(sges: usize) -> Self {
        Self {
            requests: Vec::with_capacity(STRIDE),
            lens: Vec::with_capacity(STRIDE),
            sges: Vec::with_capacity(STRIDE * sges),
            pieces: Vec::with_capacity(STRIDE * sges),
            shared: 0,
            bytes: 0,
        }
    }

    /// Adds the step to the last work request, when it lies right behind it at the peer.
    fn merge(&mut self, cut: &Cut, sges_max: u8, message_bytes_max: u32) -> bool {
        let Some(sequence) = self.requests.len().checked_sub(1) else { return false };
        let (request, len) = (&mut self.requests[sequence], &mut self.lens[sequence]);
        let behind = request.op == cut.op
            && request.remote_key == cut.remote_key
            // The peer's word: a region may end where the addresses do.
            && request.remote_addr.wrapping_add(u64::from(*len)) == cut.remote_addr;
        let short = cut.sge.len <= MERGE_BYTES_MAX && cut.sge.len <= message_bytes_max - *len;
        let sequence = sequence as u32;
        if !behind || !short || self.shared >= sges_max {
            return false;
        }
        *len += cut.sge.len;
        request.inline &= cut.mapped;
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

    /// A work request of its own.
    fn append(&mut self, cut: &Cut) {
        let sequence = self.requests.len() as u32;
        self.requests.push(WorkRequest {
            id: 0,
            op: cut.op,
            signaled: false,
            inline: cut.mapped,
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

    /// Names the requests and decides which report success: the last one always, so that nothing is ever left unreported.
    fn finish(&mut self, link: &Link, signal_every: u16, inline_max: u32) {
        let (count, mut silent) = (self.requests.len(), link.silent);
        for (at, (request, len)) in self.requests.iter_mut().zip(&self.lens).enumerate() {
            silent += 1;
            request.signaled = silent >= signal_every || at + 1 == count;
            if request.signaled {
                silent = 0;
            }
            request.inline &= request.op == Op::Write && *len <= inline_max;
            request.id = link.id(link.next.wrapping_add(at as u32));
        }
    }

    fn clear(&mut self) {
        self.requests.clear();
        self.lens.clear();
        self.sges.clear();
        self.pieces.clear();
        self.bytes = 0;
    }
}

/// One step of a slice, as it would go into a work request.
#[derive(Clone, Copy, Debug)]
struct Cut {
    slot: u32,
    op: Op,
    sge: Sge,
    /// The CPU may read the piece: it can travel inside its work request.
    mapped: bool,
    remote_addr: u64,
    remote_key: u32,
}

impl<V: Verbs> RdmaTransport<V> {
    /// Posts what can be posted to the endpoints that have something to do.
    pub(crate) fn post_listed(&mut self) {
        if self.outage.is_none() {
            for at in 0..self.listed.len() {
                self.post(self.listed[at]);
            }
        }
    }

    /// Posts what can be posted to one endpoint.
    pub(crate) fn post(&mut self, endpoint: u32) {
        while let Some(link) = self.roomiest(endpoint) {
            self.build(endpoint, link);
            if self.batch.requests.is_empty() || !self.ring(endpoint, link) {
                return;
            }
        }
    }

    /// The live queue pair with the least in flight that takes more, while there is something to post.
    fn roomiest(&self, endpoint: u32) -> Option<u32> {
        let endpoint = self.endpoints.get(endpoint)?;
        if endpoint.pending.is_empty() || self.outstanding >= self.verbs.info().cq_depth {
            return None;
        }
        let (depth, window) = (self.config.qp_depth, u64::from(self.config.window_bytes_max));
        let links = endpoint.links.iter().flatten();
        let open = links.filter_map(|&at| self.links.get(at).map(|link| (at, link)));
        let open = open.filter(|(_, link)| link.room(depth, window) > 0);
        open.min_by_key(|(_, link)| link.bytes).map(|(at, _)| at)
    }

    /// Fills the batch with work requests for one queue pair. What is in it counts as issued.
    fn build(&mut self, endpoint: u32, link: u32) {
        self.batch.clear();
        let Some(link) = self.links.get(link) else { return };
        let window = u64::from(self.config.window_bytes_max);
        let room = link.room(self.config.qp_depth, window).min(self.verbs.info().cq_depth - self.outstanding);
        let (requests_max, bytes_max) = ((room as usize).min(STRIDE), window.saturating_sub(link.bytes));
        while self.batch.bytes < bytes_max
            && let Some(slot) = self.endpoints.get(endpoint).and_then(|endpoint| endpoint.pending.first())
        {
            let cut = match self.cut(slot) {
                Ok(cut) => cut,
                Err(error) => {
                    self.put_aside(slot, error);
                    continue;
                }
            };
            if self.batch.merge(&cut, self.config.sges, self.config.message_bytes_max) {
                self.stats.merged += 1;
            } else if self.batch.requests.len() < requests_max {
                self.batch.append(&cut);
            } else {
                break;
            }
            if let Some(operation) = self.operations.get_mut(slot) {
                operation.issued += cut.sge.len;
                operation.open += 1;
                if operation.issued == operation.len {
                    self.unqueue(slot);
                }
            }
        }
    }

    /// Posts the batch. False: this queue pair takes no more.
    #[allow(unsafe_code, reason = "an inline request has the CPU read registered memory")]
    fn ring(&mut self, endpoint: u32, index: u32) -> bool {
        let Some(link) = self.links.get_mut(index) else { return false };
        let inline_max = link.qp.config.inline_bytes.min(self.config.inline_bytes_max);
        self.batch.finish(link, self.config.signal_every, inline_max);
        let count = self.batch.requests.len();
        // SAFETY: only pieces of mapped regions go inline; every piece lies in a region that the slice's count (`Region::users`) keeps registered, and `register`'s
        // caller keeps registered memory mapped and unborrowed.
        let (taken, error) =
            unsafe { self.verbs.post(link.qp.handle, &self.batch.requests, &self.batch.sges) };
        let taken = taken.min(count);
        let first = link.next;
        for piece in &self.batch.pieces {
            if (piece.sequence as usize) < taken {
                link.bytes += u64::from(piece.bytes);
                let sequence = first.wrapping_add(piece.sequence);
                link.posted.push_back(Piece { sequence, ..*piece });
            }
        }
        link.next = first.wrapping_add(taken as u32);
        link.outstanding += taken as u32;
        self.outstanding += taken as u32;
        self.stats.posted += taken as u64;
        self.stats.doorbells += 1;
        let posted = &self.batch.requests[..taken];
        self.stats.signaled += posted.iter().filter(|request| request.signaled).count() as u64;
        self.stats.inlined += posted.iter().filter(|request| request.inline).count() as u64;
        link.silent = match posted.last() {
            Some(last) if last.signaled => 0,
            Some(_) => 1,
            None => link.silent,
        };
        let (silent, idle) = (link.silent > 0, link.outstanding == 0);
        if let Some(of) = self.endpoints.get_mut(endpoint) {
            of.used = true;
        }
        if taken == count {
            return true;
        }
        self.take_back(endpoint, taken);
        let full = error.is_some_and(|error| error.kind == ErrorKind::System && error.code == libc::ENOMEM);
        if !full {
            let code = error.map_or(0, |error| error.code);
            self.retire(index, Some(Error::with_code(ErrorKind::Rail, code)));
        } else if silent || idle {
            // Full below its depth, and nothing signaled to tell when it is not: start afresh.
            self.retire(index, None);
        }
        false
    }

    /// Unissues what the queue pair did not take: all requests from `taken` on.
    fn take_back(&mut self, endpoint: u32, taken: usize) {
        while let Some(piece) = self.batch.pieces.pop() {
            if (piece.sequence as usize) < taken {
                break;
            }
            let Some(operation) = self.operations.get_mut(piece.slot) else { continue };
            operation.issued -= piece.bytes;
            operation.open -= 1;
            if !operation.is_queued()
                && let Some(of) = self.endpoints.get_mut(endpoint)
            {
                self.operations.push_front(&mut of.pending, piece.slot);
            }
        }
    }

    /// The next step of a slice. `Err(None)`: its keys are not known any more.
    fn cut(&self, slot: u32) -> Result<Cut, Option<Error>> {
        let gone = || Some(Error::new(ErrorKind::NotFound));
        let operation = self.operations.get(slot).ok_or_else(gone)?;
        let segment = self.segments.get(operation.segment).ok_or_else(gone)?;
        let region = self.regions.get(operation.region).ok_or_else(gone)?;
        let there = match (&segment.ext.keys, segment.ext.chunking) {
            (Keys::Known, Some(chunking)) => chunking,
            (Keys::Withdrawn, _) => return Err(Some(ErrorKind::Stale.into())),
            _ => return Err(None),
        };
        segment.check(operation.op, operation.remote_offset, operation.len).map_err(Some)?;
        let here = region.ext.chunking;
        let done = u64::from(operation.issued);
        let (local_chunk, local_rest) = here.locate(operation.ext.local_offset + done);
        let (remote_chunk, remote_rest) = there.locate(operation.remote_offset + done);
        let local = region.ext.chunks.get(local_chunk as usize).ok_or_else(gone)?;
        let remote_key = *segment.ext.remote_keys.get(remote_chunk as usize).ok_or_else(gone)?;
        let rest = u64::from(operation.len - operation.issued);
        let len = rest.min(u64::from(self.config.message_bytes_max)).min(local_rest).min(remote_rest);
        let addr = here.base + operation.ext.local_offset + done;
        Ok(Cut {
            slot,
            op: operation.op,
            sge: Sge { addr, len: len as u32, local_key: local.local_key },
            mapped: region.ext.mapped,
            remote_addr: there.base + operation.remote_offset + done,
            remote_key,
        })
    }

    /// A slice that cannot be posted: it waits for keys again, or it is over.
    fn put_aside(&mut self, slot: u32, error: Option<Error>) {
        self.unqueue(slot);
        match error {
            Some(error) => self.fail(slot, error),
            None => self.again(slot),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_of_a_peer_may_end_where_the_addresses_do() {
        let mut batch = Batch::new(2);
        let sge = Sge { addr: 0x1000, len: 100, local_key: 1 };
        let last = u64::MAX - 99;
        let cut = Cut { slot: 0, op: Op::Write, sge, mapped: true, remote_addr: last, remote_key: 2 };
        batch.append(&cut);
        assert!(!batch.merge(&Cut { remote_addr: last - 100, ..cut }, 2, 1_000));
        assert_eq!(batch.requests.len(), 1);
    }
}
