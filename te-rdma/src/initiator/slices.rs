//! Accepted slices: the queue in which each waits, its pieces in flight, and its end. It does not know
//! devices.
//!
//! ```text
//!   accept ─▶ waiting (for remote keys) ─▶ pending (for a queue pair) ─▶ issued ─▶ completed
//!                     ▲                          ▲                          │
//!                     └─ again, from its first byte on, when it was flushed ◀
//! ```

use te_core::{Completion, Error, ErrorKind, Instant, Op, RemoteRegionId, Slice, Token};
use te_fabric::peer::{Fence, FenceCount};
use te_fabric::{Export, RemoteBytes, Table, Timers};

use super::batch::Cut;
use super::operation::{Ext, Operation, Operations};
use super::remote_region::{Keys, RemoteRegion, RemoteRegionExt, RemoteRegions};
use super::work::Work;
use crate::config::Config;
use crate::io::link::Piece;
use crate::memory::LocalMemory;
use crate::sys::verbs::Sge;

/// The result of cancelling a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Canceled {
    /// It has ended, or was cancelled before.
    Done,
    /// It drains: its posted pieces may end by themselves until this time.
    Drains(Instant),
    /// There is no such slice.
    Unknown,
}

/// All accepted slices of a transport, with their remote regions and peers.
#[derive(Debug)]
pub(super) struct Slices {
    operations: Operations,
    remote_regions: RemoteRegions,
    /// By peer, with the indexes of `Peers`.
    work: Table<Work>,
    /// Peers with work.
    listed: Vec<u32>,
    /// Cancelled slices that drain.
    draining: Vec<u32>,
    fences: FenceCount,
    replays_max: u8,
    replays: u64,
}

impl Slices {
    pub(super) fn new(config: &Config) -> Self {
        Self {
            operations: Operations::new(config.inflight_max, config.fences_max),
            remote_regions: RemoteRegions::new(config.remote_regions_max),
            work: Table::new(config.remote_regions_max),
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
    pub(super) const fn remote_regions(&self) -> &RemoteRegions {
        &self.remote_regions
    }

    #[inline]
    pub(super) const fn remote_regions_mut(&mut self) -> &mut RemoteRegions {
        &mut self.remote_regions
    }

    #[inline]
    pub(super) fn work(&self, peer: u32) -> Option<&Work> {
        self.work.get(peer)
    }

    #[inline]
    pub(super) fn work_mut(&mut self, peer: u32) -> Option<&mut Work> {
        self.work.get_mut(peer)
    }

    /// The indexes of peers are smaller than this.
    pub(super) fn peers_bound(&self) -> u32 {
        self.work.bound()
    }

    /// Peers with work.
    #[inline]
    pub(super) fn listed(&self) -> &[u32] {
        &self.listed
    }

    /// Cancelled slices that drain.
    pub(super) fn draining(&self) -> &[u32] {
        &self.draining
    }

    pub(super) const fn replays(&self) -> u64 {
        self.replays
    }
}

/// Remote regions and peers.
impl Slices {
    /// Attaches a remote region of `peer`, which is added with its first one.
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
        self.remote_regions.vacant(id.index)?;
        if self.work.get(peer).is_none() {
            self.work.insert(peer, Work::new(config.fences_max as usize))?;
        }
        if let Some(work) = self.work.get_mut(peer) {
            work.remote_regions += 1;
            // Room for every remote region, so that submitting never allocates.
            work.wanting.reserve(work.remote_regions as usize);
        }
        // Room for every peer.
        self.listed.reserve(self.work.bound() as usize);
        self.remote_regions.insert(id.index, RemoteRegion::new(id, peer, export, RemoteRegionExt::new()))
    }

    /// Detaches a remote region; returns its peer.
    ///
    /// # Errors
    /// `NotFound`, `Stale`, `Busy`.
    pub(super) fn detach(&mut self, id: RemoteRegionId) -> Result<u32, Error> {
        let peer = self.remote_regions.detach(id)?.peer;
        if let Some(work) = self.work.get_mut(peer) {
            work.remote_regions -= 1;
            work.wanting.retain(|&remote| remote != id.index);
        }
        Ok(peer)
    }

    /// Removes a peer that nothing needs any more.
    pub(super) fn remove_peer(&mut self, peer: u32) {
        self.listed.retain(|&listed| listed != peer);
        self.work.remove(peer);
    }

    /// Puts a peer on the list of peers with work.
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

    /// Removes peers without work from the list.
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

    /// Has the keys of a remote region requested, unless they are known or requested.
    pub(super) fn want_keys(&mut self, remote: u32, timers: &mut Timers) {
        let Some(of) = self.remote_regions.get_mut(remote) else { return };
        let peer = of.peer;
        if matches!(of.ext.keys, Keys::Unknown)
            && let Some(work) = self.work.get_mut(peer)
            && !work.wanting.contains(&remote)
        {
            work.wanting.push(remote);
        }
        self.list(peer, timers);
    }

    /// Forgets the keys of every remote region of a peer: they are requested again over the next connection.
    pub(super) fn forget_keys_of(&mut self, peer: u32, timers: &mut Timers) {
        for index in 0..self.remote_regions.bound() {
            if let Some(remote) = self.remote_regions.get_mut(index)
                && remote.peer == peer
                && !matches!(remote.ext.keys, Keys::Withdrawn)
            {
                remote.ext.forget(Keys::Unknown);
                if !remote.ext.waiting.is_empty() {
                    self.want_keys(index, timers);
                }
            }
        }
    }

    /// Forgets the keys that a slice used, because the target refused them. They are requested again.
    pub(super) fn forget_keys(&mut self, slot: u32) {
        if let Some(operation) = self.operations.get(slot)
            && let Some(remote) = self.remote_regions.get_mut(operation.remote_region)
            && matches!(remote.ext.keys, Keys::Known)
        {
            remote.ext.forget(Keys::Unknown);
        }
    }
}

/// Queues.
impl Slices {
    /// Accepts a slice: it waits for keys, or for a queue pair.
    ///
    /// # Errors
    /// It is invalid; `Stale` when its remote region was withdrawn, `Full` when there is no room.
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
        let remote = self.remote_regions.check_remote(slice)?;
        let known = match remote.ext.keys {
            Keys::Withdrawn => return Err(ErrorKind::Stale.into()),
            Keys::Known => true,
            Keys::Unknown | Keys::Requested(_) => false,
        };
        let peer = remote.peer;
        let operation = Operation::new(slice, peer, Ext::new(slice.local.offset));
        let Some(slot) = self.operations.insert(operation) else { return Err(ErrorKind::Full.into()) };
        memory.pin(slice.local.region.index);
        self.remote_regions.pin(slice.remote.region.index);
        if let Some(work) = self.work.get_mut(peer) {
            work.operations += 1;
            if known && work.listed {
                // The same as `enqueue`, with fewer lookups.
                self.operations.push_back(&mut work.pending, slot);
                timers.wake();
                return Ok(());
            }
        }
        self.enqueue(slot, known, timers);
        Ok(())
    }

    /// Puts a slice into the queue for a queue pair, or into that for keys.
    fn enqueue(&mut self, slot: u32, keys_known: bool, timers: &mut Timers) {
        let Some(operation) = self.operations.get_mut(slot) else { return };
        let (peer, remote) = (operation.peer, operation.remote_region);
        operation.ext.waiting = !keys_known;
        if keys_known {
            if let Some(work) = self.work.get_mut(peer) {
                self.operations.push_back(&mut work.pending, slot);
            }
        } else if let Some(of) = self.remote_regions.get_mut(remote) {
            self.operations.push_back(&mut of.ext.waiting, slot);
            self.want_keys(remote, timers);
        }
        self.list(peer, timers);
    }

    /// Removes a slice from its queue.
    #[inline]
    fn unqueue(&mut self, slot: u32) {
        let Some(operation) = self.operations.get(slot) else { return };
        if operation.ext.waiting {
            if let Some(remote) = self.remote_regions.get_mut(operation.remote_region) {
                self.operations.unlink(&mut remote.ext.waiting, slot);
            }
        } else if let Some(work) = self.work.get_mut(operation.peer) {
            self.operations.unlink(&mut work.pending, slot);
        }
    }

    /// Makes the slices pending that wait for the keys of a remote region.
    pub(super) fn keys_known(&mut self, remote: u32, timers: &mut Timers) {
        while let Some(slot) = self.first_waiting(remote) {
            self.unqueue(slot);
            self.enqueue(slot, true, timers);
        }
    }

    /// Has the pending slices of a peer wait for keys again.
    pub(super) fn requeue_pending(&mut self, peer: u32, memory: &mut LocalMemory, timers: &mut Timers) {
        while let Some(slot) = self.first_pending(peer) {
            self.unqueue(slot);
            self.again(slot, memory, timers);
        }
    }

    /// The next slice to post to a peer.
    #[inline]
    pub(super) fn first_pending(&self, peer: u32) -> Option<u32> {
        self.work.get(peer)?.pending.first()
    }

    fn first_waiting(&self, remote: u32) -> Option<u32> {
        self.remote_regions.get(remote)?.ext.waiting.first()
    }

    /// The next part of a slice for a work request. `Err(None)`: its keys are not known any more.
    #[inline]
    pub(super) fn cut(
        &self,
        slot: u32,
        memory: &LocalMemory,
        message_bytes_max: u32,
    ) -> Result<Cut, Option<Error>> {
        let gone = || Some(Error::new(ErrorKind::NotFound));
        let operation = self.operations.get(slot).ok_or_else(gone)?;
        let remote = self.remote_regions.get(operation.remote_region).ok_or_else(gone)?;
        let region = memory.get(operation.region).ok_or_else(gone)?;
        let there = match (&remote.ext.keys, remote.ext.chunking) {
            (Keys::Known, Some(chunking)) => chunking,
            (Keys::Withdrawn, _) => return Err(Some(ErrorKind::Stale.into())),
            _ => return Err(None),
        };
        remote.check(operation.op, operation.remote_offset, operation.len).map_err(Some)?;
        let here = region.ext.chunking;
        let done = u64::from(operation.issued);
        let (local_chunk, local_rest) = here.locate(operation.ext.local_offset + done);
        let (remote_chunk, remote_rest) = there.locate(operation.remote_offset + done);
        let local = region.ext.chunks.get(local_chunk as usize).ok_or_else(gone)?;
        let remote_key = *remote.ext.remote_keys.get(remote_chunk as usize).ok_or_else(gone)?;
        let rest = u64::from(operation.len - operation.issued);
        let len = rest.min(u64::from(message_bytes_max)).min(local_rest).min(remote_rest);
        let addr = here.base + operation.ext.local_offset + done;
        Ok(Cut {
            slot,
            op: operation.op,
            sge: Sge { addr, len: len as u32, local_key: local.local_key },
            cpu_readable: region.ext.backing.is_cpu_readable(),
            remote_addr: there.base + operation.remote_offset + done,
            remote_key,
        })
    }

    /// Counts `bytes` of a pending slice as issued. When all of it is issued, it leaves its queue.
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

    /// Takes back a piece that was issued and not posted: its slice waits at the front of its queue.
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
    /// Handles a piece that succeeded.
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

    /// Handles a piece that failed. Without an `error` its slice is sent again. `doubtful`: the piece may be
    /// in place, or may still land.
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

    /// Ends a slice, or has it sent again, if none of its pieces is in flight.
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

    /// Puts a slice back into its queue, to be sent from its first byte on.
    fn again(&mut self, slot: u32, memory: &mut LocalMemory, timers: &mut Timers) {
        let Some(operation) = self.operations.get_mut(slot) else { return };
        if operation.open > 0 {
            operation.ext.again = true;
            return;
        }
        operation.ext.again = false;
        operation.issued = 0;
        match self.remote_regions.get(operation.remote_region).map(|remote| &remote.ext.keys) {
            Some(Keys::Withdrawn) | None => self.fail(slot, ErrorKind::Stale.into(), memory),
            Some(keys) => {
                let known = matches!(keys, Keys::Known);
                self.enqueue(slot, known, timers);
            }
        }
    }

    /// Handles a slice that cannot be posted: it ends with `error`, or waits for keys again.
    pub(super) fn cannot_post(
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

    /// Ends a slice with `error`, at once or when its last piece has ended.
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
        self.remote_regions.unpin(operation.remote_region);
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

    /// Ends the slices that wait for the keys of a remote region.
    pub(super) fn fail_waiting_for_keys(&mut self, remote: u32, error: Error, memory: &mut LocalMemory) {
        while let Some(slot) = self.first_waiting(remote) {
            self.fail(slot, error, memory);
        }
    }

    /// Ends the slices that wait for a queue pair to a peer.
    pub(super) fn fail_pending(&mut self, peer: u32, error: Error, memory: &mut LocalMemory) {
        while let Some(slot) = self.first_pending(peer) {
            self.fail(slot, error, memory);
        }
    }

    /// Ends every slice to a peer that is not posted.
    pub(super) fn fail_waiting(&mut self, peer: u32, error: Error, memory: &mut LocalMemory) {
        self.fail_pending(peer, error, memory);
        for index in 0..self.remote_regions.bound() {
            if self.remote_regions.get(index).is_some_and(|remote| remote.peer == peer) {
                self.fail_waiting_for_keys(index, error, memory);
            }
        }
        if let Some(work) = self.work.get_mut(peer) {
            work.wanting.clear();
        }
    }

    /// Starts the end of a slice: it ends at once, or when its posted pieces have ended, for which they have
    /// until `until`.
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

    /// The time until which a cancelled slice may end by itself.
    pub(super) fn drains_until(&self, slot: u32) -> Option<Instant> {
        self.operations.get(slot)?.ext.canceled
    }
}

/// Fences.
impl Slices {
    /// Starts a fence of the peer of a remote region.
    ///
    /// # Errors
    /// `NotFound`, `Stale`; `Full` when too many run.
    pub(super) fn fence(
        &mut self,
        token: Token,
        remote: RemoteRegionId,
        timers: &mut Timers,
    ) -> Result<(), Error> {
        let peer = self.remote_regions.find(remote)?.peer;
        let Some(work) = self.work.get_mut(peer) else { return Err(ErrorKind::NotFound.into()) };
        self.fences.begin()?;
        work.fences.push(Fence { token, remote_region: remote.index, sent: None });
        self.remote_regions.pin(remote.index);
        self.list(peer, timers);
        Ok(())
    }

    /// Ends the fences that request `id` carried, which the target has confirmed. Returns how many.
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

    /// Ends every fence of a peer that cannot be reached. `harmless`: no write of ours can land there any
    /// more.
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

    fn fence_done(&mut self, remote: u32, completion: Completion) {
        self.operations.complete(completion);
        self.fences.end();
        self.remote_regions.unpin(remote);
    }
}

#[cfg(test)]
mod tests;
