//! Slices of this transport, from acceptance to completion: what each one pins, how much of it is done, and
//! how it ended. How pieces travel is up to the connections.

use te_core::{Completion, Error, ErrorKind, MemSpan, Op, RemoteRegionId, Slice, Token};
use te_fabric::peer::Fence;
use te_fabric::{Export, RemoteBytes};

use crate::connection::Destination;
use crate::frame::Status;
use crate::operation::{Ext, Operation, Operations, Piece};
use crate::peers::{Endpoint, Peers, Sent};
use crate::region::{Regions, RemoteRegion, RemoteRegions};
use crate::stats::Stats;
use crate::sys::{Memory, Reach};

/// Accepted slices, their completions, and the remote regions that they refer to.
#[derive(Debug)]
pub(super) struct Slices {
    remote_regions: RemoteRegions,
    operations: Operations,
    stats: Stats,
}

impl Slices {
    pub(super) fn new(remote_regions_max: u32, inflight_max: u32, fences_max: u32) -> Self {
        Self {
            remote_regions: RemoteRegions::new(remote_regions_max),
            operations: Operations::new(inflight_max, fences_max),
            stats: Stats::default(),
        }
    }

    /// Slices that can be accepted now.
    pub(super) fn room(&self) -> usize {
        self.operations.room()
    }

    /// Slices in the table: those that have not completed, and cancelled ones that still wait for answers.
    pub(super) fn len(&self) -> usize {
        self.operations.len()
    }

    pub(super) fn has_completions(&self) -> bool {
        self.operations.has_completions()
    }

    /// Writes completions to `out`; returns their number.
    pub(super) fn fetch(&mut self, out: &mut [Completion]) -> usize {
        self.operations.fetch(out)
    }

    /// Counters of payload bytes and of failed slices.
    pub(super) const fn stats(&self) -> &Stats {
        &self.stats
    }
}

/// Remote regions.
impl Slices {
    /// Attaches a region of the peer that wrote `export`.
    ///
    /// # Errors
    /// `Full`, `Busy`.
    pub(super) fn attach(
        &mut self,
        id: RemoteRegionId,
        export: &Export,
        peers: &mut Peers,
    ) -> Result<(), Error> {
        self.remote_regions.vacant(id.index)?;
        let peer = peers.attach(export)?;
        self.remote_regions.insert(id.index, RemoteRegion::new(id, peer, export, ()))
    }

    /// Detaches a remote region that nothing uses; returns its peer.
    ///
    /// # Errors
    /// `NotFound`, `Stale`, `Busy`.
    pub(super) fn detach(&mut self, id: RemoteRegionId) -> Result<u32, Error> {
        self.remote_regions.detach(id).map(|remote| remote.peer)
    }

    pub(super) fn remote_region(&self, index: u32) -> Option<&RemoteRegion> {
        self.remote_regions.get(index)
    }

    /// Starts a fence towards the peer that owns `remote`; returns the peer.
    ///
    /// # Errors
    /// `NotFound`, `Stale`, `Full`.
    pub(super) fn begin_fence(
        &mut self,
        token: Token,
        remote: RemoteRegionId,
        peers: &mut Peers,
    ) -> Result<u32, Error> {
        let peer = self.remote_regions.find(remote)?.peer;
        peers.begin_fence(peer, Fence { token, remote_region: remote.index, sent: None })?;
        self.remote_regions.pin(remote.index);
        Ok(peer)
    }

    /// Ends a fence with this completion.
    pub(super) fn end_fence(&mut self, fence: &Fence<Sent>, completion: Completion) {
        self.operations.complete(completion);
        self.remote_regions.unpin(fence.remote_region);
    }
}

/// From acceptance to a connection.
impl Slices {
    /// Accepts a slice: it waits for a connection to its peer. Returns the peer.
    ///
    /// # Errors
    /// Those that [`te_core::Transport::submit`] documents for the first slice of a batch.
    pub(super) fn accept(
        &mut self,
        slice: &Slice,
        regions: &mut Regions,
        peers: &mut Peers,
    ) -> Result<u32, Error> {
        let region = regions.check_local(slice)?;
        let local = region.ext.memory.part(slice.local.offset, u64::from(slice.len))?;
        let number = self.remote_regions.check_remote(slice)?.peer;
        let operation = Operation::new(slice, number, Ext::new(local));
        let Some(peer) = peers.get_mut(number) else { return Err(ErrorKind::NotFound.into()) };
        let Some(slot) = self.operations.insert(operation) else { return Err(ErrorKind::Full.into()) };
        let queue = if local.is_device() { &mut peer.unstaged } else { &mut peer.pending };
        self.operations.push_back(queue, slot);
        peer.slice_accepted();
        regions.pin(slice.local.region.index);
        self.remote_regions.pin(slice.remote.region.index);
        Ok(number)
    }

    /// The operation of the next piece for this peer, if there is one.
    pub(super) fn next(&self, peer: &Endpoint) -> Option<Op> {
        if let Some(piece) = peer.ready.front() {
            return Some(piece.op);
        }
        self.operations.get(peer.pending.first()?).map(|operation| operation.op)
    }

    pub(super) fn get(&self, slot: u32) -> Option<&Operation> {
        self.operations.get(slot)
    }

    /// The operation in `slot`, unless it has completed.
    pub(super) fn live(&self, slot: u32) -> Option<&Operation> {
        self.operations.get(slot).filter(|operation| operation.ext.live)
    }

    /// Takes the next `len` bytes of the slice in `slot`, which is the first that waits for `peer`: they
    /// travel as one piece.
    pub(super) fn issue(&mut self, slot: u32, len: u32, peer: &mut Endpoint) {
        let Some(operation) = self.operations.get_mut(slot) else { return };
        operation.issued += len;
        operation.open += 1;
        if operation.issued == operation.len {
            self.unqueue(slot, peer);
        }
    }

    /// Removes a slice from the queue of `peer` that it is in, if it is in one.
    fn unqueue(&mut self, slot: u32, peer: &mut Endpoint) {
        let Some(operation) = self.operations.get(slot) else { return };
        let queue = if operation.ext.local.is_device() { &mut peer.unstaged } else { &mut peer.pending };
        self.operations.unlink(queue, slot);
    }
}

/// From an answer to the completion.
impl Slices {
    /// Settles a piece of a READ: all its bytes have arrived, or it was refused.
    pub(super) fn piece_read(
        &mut self,
        piece: &Piece,
        destination: &Destination,
        peers: &mut Peers,
        regions: &mut Regions,
    ) {
        let error = if destination.is_intact() {
            self.stats.bytes_read += destination.len;
            Status::from_wire(destination.status).error()
        } else {
            self.stats.corrupt += 1;
            Some(Error::new(ErrorKind::Corrupt))
        };
        self.settle(piece.slot, error, false, peers, regions);
    }

    /// Settles a piece of a WRITE with the status that the target has sent.
    pub(super) fn piece_written(
        &mut self,
        piece: &Piece,
        status: Status,
        peers: &mut Peers,
        regions: &mut Regions,
    ) {
        let touched = match status {
            Status::Ok => {
                self.stats.bytes_written += u64::from(piece.len);
                true
            }
            Status::Corrupt => {
                self.stats.corrupt += 1;
                true
            }
            // The target withdrew the region while the payload was arriving.
            Status::Withdrawn => true,
            _ => false,
        };
        self.settle(piece.slot, status.error(), touched, peers, regions);
    }

    /// Settles a piece of the slice in `slot`: it has its answer, or will never have one. `touched` says that
    /// it changed remote bytes, or may have.
    pub(super) fn settle(
        &mut self,
        slot: u32,
        error: Option<Error>,
        touched: bool,
        peers: &mut Peers,
        regions: &mut Regions,
    ) {
        let Some(operation) = self.operations.get_mut(slot) else { return };
        operation.open -= 1;
        operation.ext.touched |= touched;
        if operation.error.is_none() {
            operation.error = error;
        }
        if operation.error.is_some() && operation.is_queued() {
            // The slice has failed: what no connection has taken is not sent any more.
            let peer = operation.peer;
            if let Some(peer) = peers.get_mut(peer) {
                self.unqueue(slot, peer);
            }
        }
        self.finish(slot, peers, regions);
    }

    /// Ends the first slice that waits for `peer` with `error`. Returns false when no slice waits.
    pub(super) fn fail_first(
        &mut self,
        peer: u32,
        error: Error,
        peers: &mut Peers,
        regions: &mut Regions,
    ) -> bool {
        let Some(waiting) = peers.get_mut(peer) else { return false };
        let Some(slot) = waiting.pending.first().or(waiting.unstaged.first()) else { return false };
        self.unqueue(slot, waiting);
        if let Some(operation) = self.operations.get_mut(slot) {
            operation.error.get_or_insert(error);
        }
        self.finish(slot, peers, regions);
        true
    }

    /// Removes the operation in `slot` when none of its pieces is left, and completes it if that was not
    /// done.
    fn finish(&mut self, slot: u32, peers: &mut Peers, regions: &mut Regions) {
        let Some(operation) = self.operations.get(slot) else { return };
        if operation.open > 0 || operation.is_queued() {
            return;
        }
        if operation.ext.live {
            self.complete(slot, peers, regions);
        }
        self.operations.remove(slot);
    }

    /// Completes the slice, and releases its region, its remote region and its peer. It keeps its slot.
    fn complete(&mut self, slot: u32, peers: &mut Peers, regions: &mut Regions) {
        let Some(operation) = self.operations.get_mut(slot) else { return };
        operation.ext.live = false;
        let operation = *operation;
        // The rest of a WRITE that ended with an error may still be on its way.
        let completion = operation.completion(match (operation.ext.touched, operation.error) {
            (true, None) => RemoteBytes::Written,
            (true, Some(_)) => RemoteBytes::InDoubt,
            (false, _) => RemoteBytes::Untouched,
        });
        if completion.result.is_err() {
            self.stats.failed += 1;
        }
        self.operations.complete(completion);
        regions.unpin(operation.region);
        self.remote_regions.unpin(operation.remote_region);
        if let Some(peer) = peers.get_mut(operation.peer) {
            peer.slice_completed();
        }
    }
}

/// Cancelling.
impl Slices {
    /// The slot of the slice with this token. `None`: it has completed and its completion was not fetched
    /// yet, or it was cancelled before.
    ///
    /// # Errors
    /// `NotFound`.
    pub(super) fn find(&self, token: Token) -> Result<Option<u32>, Error> {
        if let Some(slot) = self.operations.position(|of| of.ext.live && of.token == token) {
            let ending = self.operations.get(slot).is_some_and(|of| of.ext.ending);
            return Ok((!ending).then_some(slot));
        }
        if self.operations.is_completed(token) { Ok(None) } else { Err(ErrorKind::NotFound.into()) }
    }

    /// Takes back every piece that no connection has. Calls `freed` for each of them. Returns the slice's
    /// operation, and its peer when connections have pieces of it.
    pub(super) fn begin_cancel(
        &mut self,
        slot: u32,
        peers: &mut Peers,
        mut freed: impl FnMut(&Piece),
    ) -> Option<(Op, Option<u32>)> {
        let operation = self.operations.get_mut(slot)?;
        operation.error.get_or_insert(Error::new(ErrorKind::Canceled));
        let (op, number) = (operation.op, operation.peer);
        let peer = peers.get_mut(number)?;
        self.unqueue(slot, peer);
        let waiting = peer.ready.len();
        peer.ready.retain(|piece| {
            let other = piece.slot != slot;
            if !other {
                freed(piece);
            }
            other
        });
        let taken_back = (waiting - peer.ready.len()) as u32;
        let operation = self.operations.get_mut(slot)?;
        operation.open -= taken_back;
        Some((op, (operation.open > 0).then_some(number)))
    }

    /// Notes that bytes of the slice may change the remote memory.
    pub(super) fn touch(&mut self, slot: u32) {
        if let Some(operation) = self.operations.get_mut(slot) {
            operation.ext.touched = true;
        }
    }

    /// Completes the slice, or leaves that to its last hop. No connection uses the slice's memory any more.
    /// The slot stays taken until the last piece is answered.
    pub(super) fn end_cancel(&mut self, slot: u32, peers: &mut Peers, regions: &mut Regions) {
        let Some(operation) = self.operations.get_mut(slot).filter(|operation| operation.ext.live) else {
            return;
        };
        operation.ext.ending = operation.ext.hops > 0;
        if !operation.ext.ending {
            self.complete(slot, peers, regions);
            self.finish(slot, peers, regions);
        }
    }
}

/// Pieces whose memory is a device's.
impl Slices {
    /// The piece's memory on the device, unless the slice has failed or completed.
    pub(super) fn device_part(&self, piece: &Piece) -> Option<MemSpan> {
        let operation = self.live(piece.slot).filter(|operation| operation.error.is_none())?;
        match operation.ext.local.part(u64::from(piece.offset), u64::from(piece.len)).map(Memory::reach) {
            Ok(Reach::Device(span)) => Some(span),
            _ => None,
        }
    }

    /// Notes that a hop for a piece of this slice begins.
    pub(super) fn hop_begins(&mut self, slot: u32) {
        if let Some(operation) = self.operations.get_mut(slot) {
            operation.ext.hops += 1;
        }
    }

    /// Notes that a hop has ended. Its piece is not settled yet.
    pub(super) fn hop_ended(&mut self, slot: u32) {
        if let Some(operation) = self.operations.get_mut(slot) {
            operation.ext.hops -= 1;
        }
    }

    /// Counts the bytes of a READ's piece that a hop has brought to the device.
    pub(super) fn landed(&mut self, piece: &Piece) {
        self.stats.bytes_read += u64::from(piece.len);
    }

    /// Completes a cancelled slice if its last hop has ended.
    pub(super) fn end_cancel_after_hop(&mut self, slot: u32, peers: &mut Peers, regions: &mut Regions) {
        if self.operations.get(slot).is_some_and(|operation| operation.ext.ending) {
            self.end_cancel(slot, peers, regions);
        }
    }
}

#[cfg(test)]
mod tests {
    use te_core::{RegionOffset, RemoteOffset};

    use super::*;
    use crate::config::Config;
    use crate::context::testing::{Lent, REGION};
    use crate::frame::EXPORT_FORMAT;
    use te_core::Outcome;
    use te_fabric::testkit::export;

    const REMOTE: RemoteRegionId = RemoteRegionId::new(0, 1);

    fn drop_piece(_: &Piece) {}

    struct Rig {
        slices: Slices,
        peers: Peers,
        lent: Lent,
    }

    impl Rig {
        /// One attached region of one peer, and one local region.
        fn new() -> Self {
            let mut export = export(EXPORT_FORMAT);
            export.len = 4_096;
            let (mut slices, mut peers) = (Slices::new(2, 2, 1), Peers::new(2, 1));
            slices.attach(REMOTE, &export, &mut peers).expect("room");
            let mut lent = Lent::new(Config::default());
            lent.region(4_096, 0);
            Self { slices, peers, lent }
        }

        fn accept(&mut self, token: u64, len: u32) -> Result<u32, Error> {
            let slice = Slice {
                token: Token(token),
                local: RegionOffset::new(REGION, 0),
                remote: RemoteOffset::new(REMOTE, 0),
                len,
                op: Op::Write,
            };
            self.slices.accept(&slice, &mut self.lent.regions, &mut self.peers)
        }

        /// Takes `len` bytes of the first slice that waits.
        fn issue(&mut self, len: u32) -> u32 {
            let peer = self.peers.get_mut(0).expect("attached");
            let slot = peer.pending.first().expect("a slice waits");
            self.slices.issue(slot, len, peer);
            slot
        }

        fn settle(&mut self, slot: u32, error: Option<Error>, touched: bool) {
            self.slices.settle(slot, error, touched, &mut self.peers, &mut self.lent.regions);
        }

        fn fetch(&mut self) -> Option<Completion> {
            let mut out = [Completion::applied(Token(0))];
            (self.slices.fetch(&mut out) == 1).then_some(out[0])
        }

        /// Whether the region, the remote region and the peer are in use.
        fn in_use(&self) -> (bool, bool, bool) {
            let remote = self.slices.remote_region(REMOTE.index).is_some_and(|remote| remote.pins > 0);
            let peer = self.peers.get(0).is_some_and(Endpoint::is_awaited);
            (self.lent.users() != (0, 0), remote, peer)
        }
    }

    #[test]
    fn a_slice_holds_what_it_refers_to_until_its_last_piece_is_settled() {
        let mut rig = Rig::new();
        assert_eq!((rig.accept(1, 4_096), rig.in_use()), (Ok(0), (true, true, true)));
        let slot = rig.issue(4_000);
        assert_eq!(rig.peers.get(0).and_then(|peer| rig.slices.next(peer)), Some(Op::Write));
        rig.issue(96);
        assert_eq!(rig.peers.get(0).and_then(|peer| rig.slices.next(peer)), None);
        rig.settle(slot, None, true);
        assert_eq!((rig.fetch(), rig.in_use()), (None, (true, true, true)));
        rig.settle(slot, None, true);
        assert_eq!(rig.fetch(), Some(Completion::applied(Token(1))));
        assert_eq!((rig.slices.len(), rig.in_use()), (0, (false, false, false)));
    }

    #[test]
    fn a_slice_that_is_not_accepted_holds_nothing() {
        let mut rig = Rig::new();
        let kind = |result: Result<u32, Error>| result.map_err(|error| error.kind);
        assert_eq!(kind(rig.accept(1, 4_097)), Err(ErrorKind::OutOfRange));
        assert_eq!((rig.slices.len(), rig.in_use()), (0, (false, false, false)));
        assert_eq!((rig.accept(1, 1), rig.accept(2, 1)), (Ok(0), Ok(0)));
        assert_eq!(kind(rig.accept(3, 1)), Err(ErrorKind::Full));
        assert_eq!(rig.lent.users(), (2, 0));
    }

    #[test]
    fn an_error_takes_what_no_connection_has_off_the_queue() {
        let mut rig = Rig::new();
        rig.accept(1, 4_096).expect("room");
        let slot = rig.issue(1_000);
        let error = Error::new(ErrorKind::PeerDead);
        rig.settle(slot, Some(error), true);
        assert_eq!(rig.fetch(), Some(Completion::unknown(Token(1), error)));
        assert_eq!((rig.slices.len(), rig.slices.stats().failed), (0, 1));
    }

    #[test]
    fn a_slice_that_is_cancelled_completes_at_once_and_its_slot_waits_for_the_answer() {
        let mut rig = Rig::new();
        rig.accept(1, 4_096).expect("room");
        let slot = rig.issue(4_096);
        assert_eq!(rig.slices.find(Token(1)), Ok(Some(slot)));
        assert_eq!(rig.slices.begin_cancel(slot, &mut rig.peers, drop_piece), Some((Op::Write, Some(0))));
        rig.slices.touch(slot);
        rig.slices.end_cancel(slot, &mut rig.peers, &mut rig.lent.regions);
        assert_eq!(rig.slices.find(Token(1)), Ok(None), "it waits to be fetched");
        assert_eq!(rig.fetch().map(|end| end.outcome), Some(Outcome::Unknown));
        assert_eq!((rig.slices.len(), rig.in_use()), (1, (false, false, false)));
        assert!(rig.slices.live(slot).is_none());
        rig.settle(slot, None, true);
        assert_eq!((rig.slices.len(), rig.fetch()), (0, None));
        assert_eq!(rig.slices.find(Token(1)).map_err(|error| error.kind), Err(ErrorKind::NotFound));
    }

    #[test]
    fn a_slice_that_no_connection_has_is_taken_back_whole() {
        let mut rig = Rig::new();
        rig.accept(1, 4_096).expect("room");
        let slot = rig.slices.find(Token(1)).expect("accepted").expect("not completed");
        assert_eq!(rig.slices.begin_cancel(slot, &mut rig.peers, drop_piece), Some((Op::Write, None)));
        rig.slices.end_cancel(slot, &mut rig.peers, &mut rig.lent.regions);
        assert_eq!(rig.fetch().map(|end| end.outcome), Some(Outcome::NotApplied));
        assert_eq!((rig.slices.len(), rig.in_use()), (0, (false, false, false)));
    }
}
