//! The caller's slices, carried out as commands of subsystems elsewhere.
//!
//! ```text
//!   accept ─▶ waiting for the check of the remote region ─▶ pending ─▶ commands ─▶ completed
//!                     │                                                 ▲
//!                  association: connect, checks, keep-alive         receive: data, R2Ts, responses
//! ```

mod association;
mod owner;
mod peer;
mod receive;
mod slices;

use std::collections::VecDeque;

use te_core::{Completion, Error, ErrorKind, Instant, Op, RemoteRegionId, Slice, Token};
use te_fabric::peer::FenceCount;
use te_fabric::timers::Earliest;
use te_fabric::{Export, Queue, RemoteRegion, Slab, Table};

use self::peer::{
    Check, Checking, Ext, Fence, Operation, Operations, Peer, QueueConnection, RemoteExt, RemoteRegions,
};
use crate::command::Status;
use crate::config::Config;
use crate::context::Context;
use crate::controller::Admin;
use crate::export::Place;

/// The answer to a command of an association.
#[derive(Clone, Copy, Debug)]
struct Answer {
    peer: u32,
    number: u64,
    what: Admin,
    status: Status,
    result: u64,
    /// Which use of its index the region is that the command was about.
    sequence: u64,
    /// The queue that it came from.
    qid: u16,
}

/// The initiating half of a transport.
pub(crate) struct Initiator {
    identity: u64,
    operations: Operations,
    remotes: RemoteRegions,
    peers: Table<Peer>,
    queues: Slab<QueueConnection, u32>,
    /// Ranges that this node owns, by the index of their region.
    owned: owner::Adopted,
    fences: FenceCount,
    /// The clock of fences: it grows with each fence.
    clock: u64,
    /// The number of the last association.
    associations: u64,
    /// The number of the last region that was attached or adopted.
    sequences: u64,
    /// Answers that were received and not acted upon.
    answers: VecDeque<Answer>,
    /// Peers with work, and the list of those that are being worked on.
    listed: Vec<u32>,
    working: Vec<u32>,
}

impl Initiator {
    pub(crate) fn new(identity: u64, config: &Config) -> Self {
        Self {
            identity,
            operations: Operations::new(config.inflight_max, config.fences_max),
            remotes: RemoteRegions::new(config.remote_regions_max),
            peers: Table::new(config.remote_regions_max.saturating_mul(2)),
            queues: Slab::new(),
            owned: owner::Adopted::new(config.regions_max),
            fences: FenceCount::new(config.fences_max),
            clock: 1,
            associations: 0,
            sequences: 0,
            answers: VecDeque::with_capacity(64),
            listed: Vec::with_capacity(64),
            working: Vec::with_capacity(64),
        }
    }

    pub(crate) fn room(&self) -> usize {
        self.operations.room()
    }

    pub(crate) fn has_completions(&self) -> bool {
        self.operations.has_completions()
    }

    pub(crate) fn fetch(&mut self, out: &mut [Completion]) -> usize {
        self.operations.fetch(out)
    }

    pub(crate) fn slices_in_flight(&self) -> usize {
        self.operations.len()
    }

    /// Associations that are up.
    pub(crate) fn associations(&self) -> usize {
        self.peers.iter().filter(|(_, peer)| peer.up().is_some()).count()
    }

    // The control path.

    pub(crate) fn attach(
        &mut self,
        id: RemoteRegionId,
        export: &Export,
        place: Place,
        superblock: Option<crate::namespace::Superblock>,
    ) -> Result<(), Error> {
        self.remotes.vacant(id.index)?;
        let index = self.peer_of(&place, export)?;
        if let Some(peer) = self.peers.get_mut(index) {
            peer.contact.learn(export, peer.association.is_some());
            peer.regions += 1;
        }
        self.sequences += 1;
        let (check, waiting, sequence) = (Check::Open, Queue::new(), self.sequences);
        let ext = RemoteExt { place, check, block: 0, waiting, superblock, sequence };
        self.remotes.insert(id.index, RemoteRegion::new(id, index, export, ext))
    }

    pub(crate) fn detach(&mut self, id: RemoteRegionId, cx: &mut Context<'_>) -> Result<(), Error> {
        let remote = self.remotes.detach(id)?;
        if let Some(peer) = self.peers.get_mut(remote.peer) {
            peer.regions -= 1;
            peer.checks.retain(|of| *of != id.index);
            if let Some(association) =
                peer.association.as_mut().filter(|of| of.checking == Some(Checking::Remote(id.index)))
            {
                association.checking = Some(Checking::Orphan(remote.ext.sequence));
            }
        }
        self.drop_if_unused(remote.peer, cx);
        Ok(())
    }

    /// Drops a peer that has no regions, no association, and nothing in doubt.
    fn drop_if_unused(&mut self, index: u32, _cx: &mut Context<'_>) {
        let unused = |peer: &Peer| {
            peer.regions == 0
                && peer.fences.is_empty()
                && peer.doubts.is_empty()
                && peer.registered.is_empty()
                && peer.registering.is_empty()
                && peer.association.is_none()
        };
        if self.peers.get(index).is_some_and(unused) {
            self.peers.remove(index);
        }
    }

    // The data path.

    /// Accepts a slice.
    pub(crate) fn accept(&mut self, slice: &Slice, cx: &mut Context<'_>) -> Result<(), Error> {
        let region = cx.regions.check_local(slice)?;
        let remote = self.remotes.check_remote(slice)?;
        let granule = cx.config.granule_bytes;
        let off = !slice.remote.offset.is_multiple_of(granule.into()) || !slice.len.is_multiple_of(granule);
        if slice.len == 0 || off || slice.len > cx.config.slice_bytes_max {
            return Err(ErrorKind::InvalidArgument.into());
        }
        let memory = region.ext.memory.ok_or(ErrorKind::AccessDenied)?;
        let local = memory.part(slice.local.offset, slice.len.into())?;
        let (index, check) = (remote.peer, remote.ext.check);
        let peer = self.peers.get(index).ok_or(ErrorKind::NotFound)?;
        if slice.op == Op::Write && peer.doubts.is_full() {
            return Err(ErrorKind::PeerDead.into());
        }
        let up = peer.up();
        let waits = match check {
            Check::Bad(number, error) if up == Some(number) => return Err(error),
            Check::Good(number) => up != Some(number),
            _ => true,
        };
        let operation = Operation::new(slice, index, Ext { local, touched: false, waits });
        let slot = self.operations.insert(operation).ok_or(ErrorKind::Full)?;
        self.enqueue(slot, waits);
        cx.regions.pin(slice.local.region.index);
        self.remotes.pin(slice.remote.region.index);
        self.list(index);
        Ok(())
    }

    /// Puts an operation, which is in no queue, into the queue of its peer, or into that of its region.
    fn enqueue(&mut self, slot: u32, waits: bool) {
        let Some(operation) = self.operations.get_mut(slot) else { return };
        operation.ext.waits = waits;
        let (remote, peer) = (operation.remote_region, operation.peer);
        if !waits {
            if let Some(peer) = self.peers.get_mut(peer) {
                self.operations.push_back(&mut peer.pending, slot);
            }
            return;
        }
        let Some(of) = self.remotes.get_mut(remote) else { return };
        self.operations.push_back(&mut of.ext.waiting, slot);
        if let Some(peer) = self.peers.get_mut(peer) {
            let up = peer.up();
            if !matches!(of.ext.check, Check::Asked(number) if Some(number) == up) && up.is_some() {
                of.ext.check = Check::Asked(up.unwrap_or_default());
                peer.checks.push_back(remote);
            }
        }
    }

    /// Takes an operation out of the queue that it is in.
    fn dequeue(&mut self, slot: u32) {
        let Some(operation) = self.operations.get(slot).filter(|operation| operation.is_queued()) else {
            return;
        };
        let (remote, peer, waits) = (operation.remote_region, operation.peer, operation.ext.waits);
        if waits {
            if let Some(of) = self.remotes.get_mut(remote) {
                self.operations.unlink(&mut of.ext.waiting, slot);
            }
        } else if let Some(of) = self.peers.get_mut(peer) {
            self.operations.unlink(&mut of.pending, slot);
        }
    }

    /// Works on a peer again after the next response: a queue was full.
    fn starve(&mut self, index: u32) {
        if let Some(peer) = self.peers.get_mut(index) {
            peer.starved = true;
        }
    }

    fn list(&mut self, index: u32) {
        if let Some(peer) = self.peers.get_mut(index).filter(|peer| !peer.listed) {
            peer.listed = true;
            self.listed.push(index);
        }
    }

    pub(crate) fn cancel(&mut self, token: Token, cx: &mut Context<'_>) -> Result<(), Error> {
        let slot =
            self.operations.position(|operation| operation.token == token).ok_or(ErrorKind::NotFound)?;
        self.abandon(slot, cx);
        cx.timers.wake();
        Ok(())
    }

    pub(crate) fn fence(
        &mut self,
        token: Token,
        id: RemoteRegionId,
        cx: &mut Context<'_>,
    ) -> Result<(), Error> {
        let peer = self.remotes.find(id)?.peer;
        self.fences.begin()?;
        self.remotes.pin(id.index);
        self.clock += 1;
        let fence = Fence {
            token,
            remote: id.index,
            stamp: self.clock,
            deadline: cx.after_ms(cx.config.fence_ms_max),
        };
        if let Some(of) = self.peers.get_mut(peer) {
            of.fences.push(fence);
        }
        self.list(peer);
        cx.timers.changed();
        cx.timers.wake();
        Ok(())
    }

    // Progress.

    /// Whether some peer has work.
    pub(crate) fn has_listed(&self) -> bool {
        !self.listed.is_empty()
    }

    /// Works on the peers that have work.
    pub(crate) fn feed(&mut self, cx: &mut Context<'_>) {
        std::mem::swap(&mut self.listed, &mut self.working);
        let mut working = std::mem::take(&mut self.working);
        for index in working.drain(..) {
            if let Some(peer) = self.peers.get_mut(index) {
                peer.listed = false;
            }
            self.work(index, cx);
        }
        self.working = working;
    }

    fn work(&mut self, index: u32, cx: &mut Context<'_>) {
        self.settle_fences(index, cx);
        let Some(peer) = self.peers.get_mut(index) else { return };
        peer.starved = false;
        if peer.up().is_some() {
            self.begin_resets(index, cx);
            self.begin_owner(index, cx);
            self.begin_check(index, cx);
            self.issue(index, cx);
        } else if peer.association.is_none() && self.is_wanted(index) {
            self.connect(index, cx);
        }
    }

    /// Whether a peer has something that needs an association.
    fn is_wanted(&self, index: u32) -> bool {
        let Some(peer) = self.peers.get(index) else { return false };
        let waits =
            self.remotes.iter().any(|(_, remote)| remote.peer == index && !remote.ext.waiting.is_empty());
        let resets = peer.doubts.to_reset().is_some();
        waits || resets || self.has_owner_work(index) || !peer.pending.is_empty() || !peer.fences.is_empty()
    }

    /// Completes the fences that are proved.
    fn settle_fences(&mut self, index: u32, cx: &mut Context<'_>) {
        let Some(peer) = self.peers.get_mut(index) else { return };
        if peer.fences.is_empty() {
            return;
        }
        let oldest = oldest_abandoned(peer, &self.queues);
        let (doubts, operations, remotes, count) =
            (&peer.doubts, &mut self.operations, &mut self.remotes, &mut self.fences);
        peer.fences.retain(|fence| {
            if doubts.block(fence.stamp) || oldest.is_some_and(|stamp| stamp < fence.stamp) {
                return true;
            }
            operations.complete(Completion::applied(fence.token));
            remotes.unpin(fence.remote);
            count.end();
            false
        });
        cx.timers.wake_if(operations.has_completions());
    }

    /// Ends fences that `ends` selects with an error: they have no proof.
    fn fail_fences(&mut self, index: u32, error: Error, ends: impl Fn(&Fence) -> bool) {
        let Some(peer) = self.peers.get_mut(index) else { return };
        let (operations, remotes, count) = (&mut self.operations, &mut self.remotes, &mut self.fences);
        peer.fences.retain(|fence| {
            if !ends(fence) {
                return true;
            }
            operations.complete(Completion::unknown(fence.token, error));
            remotes.unpin(fence.remote);
            count.end();
            false
        });
    }

    /// Looks at every deadline; returns the next one.
    pub(crate) fn look(&mut self, cx: &mut Context<'_>) -> Option<Instant> {
        let mut next = Earliest::default();
        for index in 0..self.peers.bound() {
            if self.peers.get(index).is_some() {
                self.look_at(index, &mut next, cx);
            }
        }
        next.get()
    }

    fn look_at(&mut self, index: u32, next: &mut Earliest, cx: &mut Context<'_>) {
        let now = cx.now();
        self.look_at_association(index, next, cx);
        let Some(peer) = self.peers.get_mut(index) else { return };
        let passed = peer.doubts.pass(now);
        cx.stats.fenced_by_time += passed as u64;
        if passed > 0 {
            self.list(index);
            self.settle_fences(index, cx);
        }
        self.fail_fences(index, ErrorKind::TimedOut.into(), |fence| now >= fence.deadline);
        let Some(peer) = self.peers.get(index) else { return };
        next.note(peer.doubts.next());
        for fence in &peer.fences {
            next.note(Some(fence.deadline));
        }
        if peer.association.is_none() && peer.contact.paused_until().is_some() && self.is_wanted(index) {
            let until = self.peers.get(index).and_then(|peer| peer.contact.paused_until());
            match until {
                Some(until) if now >= until => self.list(index),
                until => next.note(until),
            }
        }
        self.drop_if_unused(index, cx);
        cx.timers.wake_if(self.has_completions() || self.has_listed());
    }

    /// While this process did not poll, targets could not be heard: their silence does not count.
    pub(crate) fn forgive(&mut self, now: Instant) {
        for index in 0..self.peers.bound() {
            if let Some(association) = self.peers.get_mut(index).and_then(|peer| peer.association.as_mut()) {
                association.last_heard = now;
            }
        }
    }

    #[cfg(feature = "testkit")]
    pub(crate) fn close_connections(&mut self, cx: &mut Context<'_>) {
        for index in 0..self.peers.bound() {
            if self.peers.get(index).is_some_and(|peer| peer.association.is_some()) {
                self.fail_association(index, ErrorKind::PeerDead.into(), cx);
            }
        }
    }
}

/// The oldest abandoned WRITE of a peer's association that has no response.
fn oldest_abandoned(peer: &Peer, queues: &Slab<QueueConnection, u32>) -> Option<u64> {
    let of = peer.association.as_ref()?.queues.iter().filter_map(|queue| queues.get(*queue));
    let abandoned = of
        .flat_map(|queue| queue.commands.iter())
        .filter(|(_, command)| !command.live && matches!(command.purpose, crate::queue::Purpose::Write));
    abandoned.map(|(_, command)| command.stamp).min()
}
