//! Accepted slices: where each of them waits, what is on its way, and how it ends. Knows no device.
//!
//! ```text
//!   accept ─▶ waiting (for its segment's keys) ─▶ pending (for a queue pair) ─▶ issued ─▶ settled
//!                        ▲                             ▲                          │
//!                        └── again: from its first byte on, when it was flushed ◀─┘
//! ```

use te_core::{Completion, Error, ErrorKind, Instant, Op, RemoteRegionId, Slice, Token};
use te_fabric::peer::{Fence, FenceCount};
use te_fabric::{Export, RemoteBytes, Table, Timers};

use super::batch::Cut;
use super::operation::{Ext, Operation, Operations};
use super::segment::{Keys, Segment, SegmentExt, Segments};
use super::work::Work;
use crate::config::Config;
use crate::io::link::Piece;
use crate::memory::LocalMemory;
use crate::sys::verbs::Sge;

/// What cancelling a slice leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Canceled {
    /// It has ended, or was cancelled before.
    Done,
    /// It drains: what is posted gets until then to end by itself.
    Drains(Instant),
    /// There is no such slice.
    Unknown,
}

/// All accepted slices of a transport, with the segments and the peers that they are for.
#[derive(Debug)]
pub(super) struct Slices {
    operations: Operations,
    segments: Segments,
    /// By peer, with the indexes of `Peers`.
    work: Table<Work>,
    /// Peers that have something to do.
    listed: Vec<u32>,
    /// Slices that were cancelled and drain.
    draining: Vec<u32>,
    fences: FenceCount,
    replays_max: u8,
    replays: u64,
}

impl Slices {
    pub(super) fn new(config: &Config) -> Self {
        Self {
            operations: Operations::new(config.inflight_max, config.fences_max),
            segments: Segments::new(config.segments_max),
            work: Table::new(config.segments_max),
            listed: Vec::new(),
            draining: Vec::with_capacity(config.inflight_max as usize),
            fences: FenceCount::new(config.fences_max),
            replays_max: config.replays_max,
            replays: 0,
        }
    }

    #[inline]
    pub(super) const fn operations(&self) -> &Operations {
        &self.operations
    }

    #[inline]
    pub(super) const fn operations_mut(&mut self) -> &mut Operations {
        &mut self.operations
    }

    #[inline]
    pub(super) const fn segments(&self) -> &Segments {
        &self.segments
    }

    #[inline]
    pub(super) const fn segments_mut(&mut self) -> &mut Segments {
        &mut self.segments
    }

    #[inline]
    pub(super) fn work(&self, peer: u32) -> Option<&Work> {
        self.work.get(peer)
    }

    #[inline]
    pub(super) fn work_mut(&mut self, peer: u32) -> Option<&mut Work> {
        self.work.get_mut(peer)
    }

    /// The bound for a walk over all peers.
    pub(super) fn peers_bound(&self) -> u32 {
        self.work.bound()
    }

    /// Peers that have something to do.
    #[inline]
    pub(super) fn listed(&self) -> &[u32] {
        &self.listed
    }

    /// Slices that were cancelled and drain.
    pub(super) fn draining(&self) -> &[u32] {
        &self.draining
    }

    pub(super) const fn replays(&self) -> u64 {
        self.replays
    }
}

/// Segments and peers.
impl Slices {
    /// Attaches a segment of `peer`, which is new when it has no segment yet.
    ///
    /// # Errors
    /// `Full`, `Busy`: nothing has changed.
    pub(super) fn attach(
        &mut self,
        id: RemoteRegionId,
        peer: u32,
        export: &Export,
        config: &Config,
    ) -> Result<(), Error> {
        self.segments.vacant(id.index)?;
        if self.work.get(peer).is_none() {
            self.work.insert(peer, Work::new(config.fences_max as usize))?;
        }
        if let Some(work) = self.work.get_mut(peer) {
            work.segments += 1;
            // Room for every segment to want keys at once, so that submitting never allocates.
            work.wanting.reserve(work.segments as usize);
        }
        // As many peers as segments may be listed.
        self.listed.reserve(self.work.bound() as usize);
        self.segments.insert(id.index, Segment::new(id, peer, export, SegmentExt::new()))
    }

    /// Detaches a segment; returns whose it was.
    ///
    /// # Errors
    /// `NotFound`, `Stale`, `Busy`.
    pub(super) fn detach(&mut self, id: RemoteRegionId) -> Result<u32, Error> {
        let peer = self.segments.detach(id)?.peer;
        if let Some(work) = self.work.get_mut(peer) {
            work.segments -= 1;
            work.wanting.retain(|&segment| segment != id.index);
        }
        Ok(peer)
    }

    /// Forgets a peer that nothing needs any more.
    pub(super) fn remove_peer(&mut self, peer: u32) {
        self.listed.retain(|&listed| listed != peer);
        self.work.remove(peer);
    }

    /// Has `poll` look after a peer.
    #[inline]
    pub(super) fn list(&mut self, peer: u32, timers: &mut Timers) {
        if let Some(work) = self.work.get_mut(peer)
            && !work.listed
        {
            work.listed = true;
            self.listed.push(peer);
        }
        timers.wake();
    }

    /// Takes peers off the list that have nothing left; what was listed meanwhile stays.
    pub(super) fn unlist_idle(&mut self) {
        let mut at = 0;
        while let Some(&peer) = self.listed.get(at) {
            match self.work.get_mut(peer) {
                Some(work) if work.has_work() => at += 1,
                Some(work) => {
                    work.listed = false;
                    self.listed.swap_remove(at);
                }
                None => _ = self.listed.swap_remove(at),
            }
        }
    }

    /// Has a segment's keys asked for, unless that has been done.
    pub(super) fn want_keys(&mut self, segment: u32, timers: &mut Timers) {
        let Some(of) = self.segments.get_mut(segment) else { return };
        let peer = of.peer;
        if matches!(of.ext.keys, Keys::Unknown)
            && let Some(work) = self.work.get_mut(peer)
            && !work.wanting.contains(&segment)
        {
            work.wanting.push(segment);
        }
        self.list(peer, timers);
    }

    /// Forgets the keys of every segment of a peer: the next connection has to ask for them again.
    pub(super) fn forget_keys_of(&mut self, peer: u32, timers: &mut Timers) {
        for index in 0..self.segments.bound() {
            if let Some(segment) = self.segments.get_mut(index)
                && segment.peer == peer
                && !matches!(segment.ext.keys, Keys::Withdrawn)
            {
                segment.ext.forget(Keys::Unknown);
                if !segment.ext.waiting.is_empty() {
                    self.want_keys(index, timers);
                }
            }
        }
    }

    /// The keys that a slice used were refused: they are asked for again.
    pub(super) fn forget_keys(&mut self, slot: u32) {
        if let Some(operation) = self.operations.get(slot)
            && let Some(segment) = self.segments.get_mut(operation.remote_region)
            && matches!(segment.ext.keys, Keys::Known)
        {
            segment.ext.forget(Keys::Unknown);
        }
    }
}

/// Queues.
impl Slices {
    /// Accepts a slice: it waits for a queue pair, or for keys first.
    ///
    /// # Errors
    /// What is wrong with it; `Stale` when its segment was withdrawn, `Full` when there is no room.
    #[inline]
    pub(super) fn accept(
        &mut self,
        slice: &Slice,
        bytes_max: u32,
        memory: &mut LocalMemory,
        timers: &mut Timers,
    ) -> Result<(), Error> {
        if slice.len == 0 || slice.len > bytes_max {
            return Err(ErrorKind::InvalidArgument.into());
        }
        memory.check(slice)?;
        let segment = self.segments.check_remote(slice)?;
        let known = match segment.ext.keys {
            Keys::Withdrawn => return Err(ErrorKind::Stale.into()),
            Keys::Known => true,
            Keys::Unknown | Keys::Asked(_) => false,
        };
        let peer = segment.peer;
        let operation = Operation::new(slice, peer, Ext::new(slice.local.offset));
        let Some(slot) = self.operations.insert(operation) else { return Err(ErrorKind::Full.into()) };
        memory.pin(slice.local.region.index);
        self.segments.pin(slice.remote.region.index);
        if let Some(work) = self.work.get_mut(peer) {
            work.operations += 1;
            if known && work.listed {
                // As `enqueue` does, without looking everything up again.
                self.operations.push_back(&mut work.pending, slot);
                timers.wake();
                return Ok(());
            }
        }
        self.enqueue(slot, known, timers);
        Ok(())
    }

    /// Puts a slice where it waits: for work requests, or for keys first.
    fn enqueue(&mut self, slot: u32, keys_known: bool, timers: &mut Timers) {
        let Some(operation) = self.operations.get_mut(slot) else { return };
        let (peer, segment) = (operation.peer, operation.remote_region);
        operation.ext.waiting = !keys_known;
        if keys_known {
            if let Some(work) = self.work.get_mut(peer) {
                self.operations.push_back(&mut work.pending, slot);
            }
        } else if let Some(of) = self.segments.get_mut(segment) {
            self.operations.push_back(&mut of.ext.waiting, slot);
            self.want_keys(segment, timers);
        }
        self.list(peer, timers);
    }

    /// Takes a slice out of its queue.
    #[inline]
    fn unqueue(&mut self, slot: u32) {
        let Some(operation) = self.operations.get(slot) else { return };
        if operation.ext.waiting {
            if let Some(segment) = self.segments.get_mut(operation.remote_region) {
                self.operations.unlink(&mut segment.ext.waiting, slot);
            }
        } else if let Some(work) = self.work.get_mut(operation.peer) {
            self.operations.unlink(&mut work.pending, slot);
        }
    }

    /// The slices that waited for the keys of a segment can be posted.
    pub(super) fn keys_known(&mut self, segment: u32, timers: &mut Timers) {
        while let Some(slot) = self.first_waiting(segment) {
            self.unqueue(slot);
            self.enqueue(slot, true, timers);
        }
    }

    /// What had its keys waits for them again.
    pub(super) fn requeue_pending(&mut self, peer: u32, memory: &mut LocalMemory, timers: &mut Timers) {
        while let Some(slot) = self.first_pending(peer) {
            self.unqueue(slot);
            self.again(slot, memory, timers);
        }
    }

    /// The slice that is posted next to a peer.
    #[inline]
    pub(super) fn first_pending(&self, peer: u32) -> Option<u32> {
        self.work.get(peer)?.pending.first()
    }

    fn first_waiting(&self, segment: u32) -> Option<u32> {
        self.segments.get(segment)?.ext.waiting.first()
    }

    /// The next step of a slice. `Err(None)`: its keys are not known any more.
    #[inline]
    pub(super) fn cut(
        &self,
        slot: u32,
        memory: &LocalMemory,
        message_bytes_max: u32,
    ) -> Result<Cut, Option<Error>> {
        let gone = || Some(Error::new(ErrorKind::NotFound));
        let operation = self.operations.get(slot).ok_or_else(gone)?;
        let segment = self.segments.get(operation.remote_region).ok_or_else(gone)?;
        let region = memory.get(operation.region).ok_or_else(gone)?;
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
        let len = rest.min(u64::from(message_bytes_max)).min(local_rest).min(remote_rest);
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

    /// Counts `bytes` of a pending slice as issued. It leaves its queue when that was the rest of it.
    #[inline]
    pub(super) fn issue(&mut self, peer: u32, slot: u32, bytes: u32) {
        let Some(operation) = self.operations.get_mut(slot) else { return };
        operation.issued += bytes;
        operation.open += 1;
        if operation.issued == operation.len
            && let Some(work) = self.work.get_mut(peer)
        {
            self.operations.unlink(&mut work.pending, slot);
        }
    }

    /// Takes back what was issued and not posted: the slice waits at the front of its queue.
    pub(super) fn unissue(&mut self, peer: u32, piece: Piece) {
        let Some(operation) = self.operations.get_mut(piece.slot) else { return };
        operation.issued -= piece.bytes;
        operation.open -= 1;
        if !operation.is_queued()
            && let Some(work) = self.work.get_mut(peer)
        {
            self.operations.push_front(&mut work.pending, piece.slot);
        }
    }
}

/// Ends.
impl Slices {
    /// Takes in that one piece has ended well.
    #[inline]
    pub(super) fn piece_done(&mut self, piece: Piece, memory: &mut LocalMemory, timers: &mut Timers) {
        let Some(operation) = self.operations.get_mut(piece.slot) else { return };
        operation.open -= 1;
        operation.ext.landed |= operation.op == Op::Write;
        let whole = operation.issued == operation.len && !operation.ext.again;
        if whole && operation.open == 0 && !operation.is_queued() {
            self.finish(piece.slot, memory);
            return;
        }
        if operation.error.is_some() || operation.ext.again {
            self.unqueue(piece.slot);
        }
        self.conclude(piece.slot, memory, timers);
    }

    /// Takes in that one piece has failed. Without an `error` its slice is sent again. `doubtful`: the piece
    /// may be in place, or land yet.
    pub(super) fn piece_failed(
        &mut self,
        piece: Piece,
        (error, doubtful): (Option<Error>, bool),
        memory: &mut LocalMemory,
        timers: &mut Timers,
    ) {
        let Some(operation) = self.operations.get_mut(piece.slot) else { return };
        operation.open -= 1;
        operation.ext.doubtful |= operation.op == Op::Write && doubtful;
        match error {
            Some(error) => _ = operation.error.get_or_insert(error),
            None => operation.ext.again = true,
        }
        self.unqueue(piece.slot);
        self.conclude(piece.slot, memory, timers);
    }

    /// Ends a slice, or has it sent again, if nothing of it is on its way any more.
    fn conclude(&mut self, slot: u32, memory: &mut LocalMemory, timers: &mut Timers) {
        let Some(operation) = self.operations.get_mut(slot) else { return };
        if operation.open > 0 || operation.is_queued() {
            return;
        }
        let whole = operation.issued == operation.len && !operation.ext.again;
        if operation.error.is_some() || whole {
            self.finish(slot, memory);
        } else if operation.ext.canceled.is_some() {
            self.fail(slot, ErrorKind::Canceled.into(), memory);
        } else if operation.ext.again && operation.ext.replays >= self.replays_max {
            self.fail(slot, ErrorKind::Rail.into(), memory);
        } else {
            if operation.ext.again {
                operation.ext.replays += 1;
                self.replays += 1;
            }
            self.again(slot, memory, timers);
        }
    }

    /// Puts a slice back where it waits, from its first byte on.
    fn again(&mut self, slot: u32, memory: &mut LocalMemory, timers: &mut Timers) {
        let Some(operation) = self.operations.get_mut(slot) else { return };
        if operation.open > 0 {
            operation.ext.again = true;
            return;
        }
        operation.ext.again = false;
        operation.issued = 0;
        match self.segments.get(operation.remote_region).map(|segment| &segment.ext.keys) {
            Some(Keys::Withdrawn) | None => self.fail(slot, ErrorKind::Stale.into(), memory),
            Some(keys) => {
                let known = matches!(keys, Keys::Known);
                self.enqueue(slot, known, timers);
            }
        }
    }

    /// A slice that cannot be posted: it waits for keys again, or it is over.
    pub(super) fn put_aside(
        &mut self,
        slot: u32,
        error: Option<Error>,
        memory: &mut LocalMemory,
        timers: &mut Timers,
    ) {
        self.unqueue(slot);
        match error {
            Some(error) => self.fail(slot, error, memory),
            None => self.again(slot, memory, timers),
        }
    }

    /// Ends a slice with `error`, at once or when the last piece of it has ended.
    fn fail(&mut self, slot: u32, error: Error, memory: &mut LocalMemory) {
        self.unqueue(slot);
        let Some(operation) = self.operations.get_mut(slot) else { return };
        operation.error.get_or_insert(error);
        if operation.open == 0 {
            self.finish(slot, memory);
        }
    }

    #[inline]
    fn finish(&mut self, slot: u32, memory: &mut LocalMemory) {
        let Some(operation) = self.operations.remove(slot) else { return };
        if operation.ext.canceled.is_some() {
            self.draining.retain(|&draining| draining != slot);
        }
        memory.unpin(operation.region);
        self.segments.unpin(operation.remote_region);
        if let Some(work) = self.work.get_mut(operation.peer) {
            work.operations -= 1;
        }
        let Ext { landed, doubtful, .. } = operation.ext;
        let remote = match (landed, doubtful) {
            (_, true) => RemoteBytes::InDoubt,
            (true, false) => RemoteBytes::Written,
            (false, false) => RemoteBytes::Untouched,
        };
        self.operations.complete(operation.completion(remote));
    }

    /// Ends what waits for the keys of a segment.
    pub(super) fn fail_segment(&mut self, segment: u32, error: Error, memory: &mut LocalMemory) {
        while let Some(slot) = self.first_waiting(segment) {
            self.fail(slot, error, memory);
        }
    }

    /// Ends what waits for a queue pair to a peer.
    pub(super) fn fail_pending(&mut self, peer: u32, error: Error, memory: &mut LocalMemory) {
        while let Some(slot) = self.first_pending(peer) {
            self.fail(slot, error, memory);
        }
    }

    /// Ends every slice to a peer that is not posted.
    pub(super) fn fail_waiting(&mut self, peer: u32, error: Error, memory: &mut LocalMemory) {
        self.fail_pending(peer, error, memory);
        for index in 0..self.segments.bound() {
            if self.segments.get(index).is_some_and(|segment| segment.peer == peer) {
                self.fail_segment(index, error, memory);
            }
        }
        if let Some(work) = self.work.get_mut(peer) {
            work.wanting.clear();
        }
    }

    /// Starts the end of a slice: at once, or when its posted pieces have ended, or when they have had until
    /// then.
    pub(super) fn cancel(&mut self, token: Token, until: Instant, memory: &mut LocalMemory) -> Canceled {
        let Some(slot) = self.operations.position(|of| of.token == token) else {
            return if self.operations.is_completed(token) { Canceled::Done } else { Canceled::Unknown };
        };
        let Some(operation) = self.operations.get_mut(slot) else { return Canceled::Unknown };
        if operation.ext.canceled.is_some() {
            return Canceled::Done;
        }
        operation.ext.canceled = Some(until);
        if operation.open == 0 {
            self.fail(slot, ErrorKind::Canceled.into(), memory);
            return Canceled::Done;
        }
        self.unqueue(slot);
        self.draining.push(slot);
        Canceled::Drains(until)
    }

    /// Until when a cancelled slice drains.
    pub(super) fn drains_until(&self, slot: u32) -> Option<Instant> {
        self.operations.get(slot)?.ext.canceled
    }
}

/// Fences.
impl Slices {
    /// Starts a fence of a segment's peer.
    ///
    /// # Errors
    /// `NotFound`, `Stale`; `Full` when too many run.
    pub(super) fn fence(
        &mut self,
        token: Token,
        segment: RemoteRegionId,
        timers: &mut Timers,
    ) -> Result<(), Error> {
        let peer = self.segments.find(segment)?.peer;
        let Some(work) = self.work.get_mut(peer) else { return Err(ErrorKind::NotFound.into()) };
        self.fences.begin()?;
        work.fences.push(Fence { token, remote_region: segment.index, sent: None });
        self.segments.pin(segment.index);
        self.list(peer, timers);
        Ok(())
    }

    /// The target has answered question `id`: every fence that it carried holds. Returns how many did.
    pub(super) fn fenced(&mut self, peer: u32, id: u64) -> u64 {
        let (mut at, mut ended) = (0, 0);
        while let Some(work) = self.work.get_mut(peer)
            && let Some(fence) = work.fences.get(at).copied()
        {
            if fence.sent == Some(id) {
                work.fences.swap_remove(at);
                ended += 1;
                self.fence_done(fence.remote_region, Completion::applied(fence.token));
            } else {
                at += 1;
            }
        }
        ended
    }

    /// Ends every fence of a peer that cannot be asked. `harmless`: nothing of ours can land there any more.
    pub(super) fn end_fences(&mut self, peer: u32, harmless: bool, error: Error) {
        while let Some(fence) = self.work.get_mut(peer).and_then(|work| work.fences.pop()) {
            let completion = if harmless {
                Completion::applied(fence.token)
            } else {
                Completion::unknown(fence.token, error)
            };
            self.fence_done(fence.remote_region, completion);
        }
    }

    fn fence_done(&mut self, segment: u32, completion: Completion) {
        self.operations.complete(completion);
        self.fences.end();
        self.segments.unpin(segment);
    }
}

#[cfg(test)]
mod tests;
