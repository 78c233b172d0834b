//! Our own slices: queued, cut and merged into work requests, posted, completed; and the requests that they
//! need.
//!
//! ```text
//!   slices     the queues of slices, and their ends
//!   work       the work for one peer
//!   batch      work requests under construction
//!   post       cut, merge, doorbell
//!   complete   completions, failures, the end of queue pairs
//!   requests   keys, queue pairs and fences: requests and answers
//! ```
//!
//! It knows peers by number only. `Peers` knows whether a peer can be reached, and the transport reports that
//! here.

mod batch;
mod complete;
mod operation;
mod post;
mod remote_region;
mod requests;
mod slices;
mod work;

use core::time::Duration;

use te_core::{Completion, Error, ErrorKind, Instant, RemoteRegionId, Slice, Token};
use te_fabric::operation::accept_prefix;
use te_fabric::timers::Earliest;
use te_fabric::{Export, Timers};

use crate::config::Config;
use crate::env::Env;
use crate::io::links::Links;
use crate::memory::LocalMemory;
use crate::peers::sieve::UseState;
use crate::stats::Stats;
use crate::sys::verbs::Verbs;
use batch::Batch;
use slices::{Canceled, Slices};

/// The initiating half of a transport.
#[derive(Debug)]
pub(crate) struct Initiator {
    slices: Slices,
    batch: Batch,
    /// Number of the last request.
    last_request: u64,
    posted: u64,
    doorbells: u64,
    signaled: u64,
    inlined: u64,
    merged: u64,
    fences: u64,
}

impl Initiator {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            slices: Slices::new(config),
            batch: Batch::new(usize::from(config.sges)),
            last_request: 0,
            posted: 0,
            doorbells: 0,
            signaled: 0,
            inlined: 0,
            merged: 0,
            fences: 0,
        }
    }

    /// Slices that were accepted and have not completed.
    pub(crate) fn in_flight(&self) -> usize {
        self.slices.operations().len()
    }

    /// Work requests posted so far.
    pub(crate) const fn posted(&self) -> u64 {
        self.posted
    }

    pub(crate) const fn count(&self, stats: &mut Stats) {
        stats.posted = self.posted;
        stats.doorbells = self.doorbells;
        stats.signaled = self.signaled;
        stats.inlined = self.inlined;
        stats.merged = self.merged;
        stats.fences = self.fences;
        stats.replays = self.slices.replays();
    }

    /// Accepts a prefix of `batch` and posts as much as queue pairs take; returns how many slices it
    /// accepted.
    ///
    /// # Errors
    /// The first slice is invalid.
    #[inline]
    pub(crate) fn submit<V: Verbs>(&mut self, batch: &[Slice], env: &mut Env<'_, V>) -> Result<usize, Error> {
        let (room, bytes_max) = (self.slices.operations().room(), env.config.slice_bytes_max);
        let accept = |slice: &Slice| self.slices.accept(slice, bytes_max, env.memory, env.timers);
        let accepted = accept_prefix(batch, room, accept)?;
        if accepted > 0 {
            self.post_listed(env);
        }
        Ok(accepted)
    }

    /// Moves completions to `out`, oldest first; returns how many.
    #[inline]
    pub(crate) fn fetch(&mut self, out: &mut [Completion]) -> usize {
        self.slices.operations_mut().fetch(out)
    }

    /// Whether completions wait to be fetched.
    pub(crate) fn has_completions(&self) -> bool {
        self.slices.operations().has_completions()
    }

    /// Starts the end of a slice.
    ///
    /// # Errors
    /// `NotFound`: there is no such slice.
    pub(crate) fn cancel<V: Verbs>(&mut self, token: Token, env: &mut Env<'_, V>) -> Result<(), Error> {
        let until = env.timers.now() + Duration::from_millis(u64::from(env.config.cancel_drain_ms));
        match self.slices.cancel(token, until, env.memory) {
            Canceled::Unknown => return Err(ErrorKind::NotFound.into()),
            Canceled::Drains(until) => env.timers.due_by(until),
            Canceled::Done => {}
        }
        env.timers.wake();
        Ok(())
    }

    /// Starts a fence.
    ///
    /// # Errors
    /// `NotFound`, `Stale`, `Full`.
    pub(crate) fn fence(
        &mut self,
        token: Token,
        remote: RemoteRegionId,
        timers: &mut Timers,
    ) -> Result<(), Error> {
        self.slices.fence(token, remote, timers)
    }
}

/// Remote regions and peers.
impl Initiator {
    /// Checks that a remote region may be attached with this index.
    ///
    /// # Errors
    /// `Full`, `Busy`.
    pub(crate) fn vacant(&self, id: RemoteRegionId) -> Result<(), Error> {
        self.slices.remote_regions().vacant(id.index)
    }

    /// Attaches a remote region of `peer`.
    ///
    /// # Errors
    /// `Full`, `Busy`.
    pub(crate) fn attach(
        &mut self,
        id: RemoteRegionId,
        peer: u32,
        export: &Export,
        config: &Config,
    ) -> Result<(), Error> {
        self.slices.attach(id, peer, export, config)
    }

    /// Detaches a remote region; returns its peer.
    ///
    /// # Errors
    /// `NotFound`, `Stale`, `Busy`.
    pub(crate) fn detach(&mut self, id: RemoteRegionId) -> Result<u32, Error> {
        self.slices.detach(id)
    }

    /// Whether nothing needs the peer any more.
    pub(crate) fn is_idle(&self, peer: u32) -> bool {
        self.slices.work(peer).is_some_and(work::Work::is_idle)
    }

    /// Removes an idle peer.
    pub(crate) fn remove_peer(&mut self, peer: u32) {
        self.slices.remove_peer(peer);
    }

    /// Number `at` in the list of peers with work.
    pub(crate) fn listed(&self, at: usize) -> Option<u32> {
        self.slices.listed().get(at).copied()
    }

    /// The length of the list of peers with work.
    #[inline]
    pub(crate) fn listed_count(&self) -> usize {
        self.slices.listed().len()
    }

    /// Removes peers without work from the list.
    pub(crate) fn unlist_idle(&mut self) {
        self.slices.unlist_idle();
    }

    /// Puts a peer on the list of peers with work.
    pub(crate) fn list(&mut self, peer: u32, timers: &mut Timers) {
        self.slices.list(peer, timers);
    }

    /// Puts every peer on the list of peers with work.
    pub(crate) fn list_all(&mut self, timers: &mut Timers) {
        (0..self.slices.peers_bound()).for_each(|peer| self.slices.list(peer, timers));
    }

    /// Whether work for this peer needs a control connection.
    pub(crate) fn needs_connection(&self, peer: u32) -> bool {
        self.slices.work(peer).is_some_and(work::Work::needs_connection)
    }

    /// Whether the control connection to a peer is up.
    #[inline]
    pub(crate) fn is_up(&self, peer: u32) -> bool {
        self.slices.work(peer).is_some_and(|work| work.up)
    }

    /// Whether the connection to a peer may be evicted. Removes the mark of its last use.
    pub(crate) fn use_state(&mut self, peer: u32) -> UseState {
        let Some(work) = self.slices.work_mut(peer) else { return UseState::Idle };
        match work.is_busy() {
            true => UseState::Busy,
            false if core::mem::take(&mut work.used) => UseState::Used,
            false => UseState::Idle,
        }
    }

    /// Notes that a control connection to the peer is being made.
    pub(crate) fn connection_opened(&mut self, peer: u32) {
        if let Some(work) = self.slices.work_mut(peer) {
            work.used = true;
        }
    }

    /// Notes that the control connection to the peer is up, so that requests can be sent.
    pub(crate) fn connection_up(&mut self, peer: u32, timers: &mut Timers) {
        if let Some(work) = self.slices.work_mut(peer) {
            work.up = true;
        }
        self.slices.list(peer, timers);
    }

    /// Notes that the control connection has ended. The peer destroys its queue pairs, so posted slices end
    /// with `error`; slices that wait go on waiting.
    pub(crate) fn connection_lost<V: Verbs>(&mut self, peer: u32, error: Error, env: &mut Env<'_, V>) {
        let Some(work) = self.slices.work_mut(peer) else { return };
        (work.up, work.offered, work.cleanup_due) = (false, None, false);
        work.fences.iter_mut().for_each(|fence| fence.sent = None);
        for link in work.links.into_iter().flatten() {
            self.drain(link, Some(error), env);
        }
        self.slices.forget_keys_of(peer, env.timers);
        self.slices.requeue_pending(peer, env.memory, env.timers);
    }

    /// Ends every slice to a peer that is not posted.
    pub(crate) fn fail_waiting(&mut self, peer: u32, error: Error, memory: &mut LocalMemory) {
        self.slices.fail_waiting(peer, error, memory);
    }

    /// Ends the slices and fences that wait for a control connection which cannot be opened. `harmless`: no
    /// write of ours can land at the peer any more.
    pub(crate) fn give_up(&mut self, peer: u32, harmless: bool, error: Error, memory: &mut LocalMemory) {
        self.slices.fail_waiting(peer, error, memory);
        self.slices.end_fences(peer, harmless, error);
    }

    /// The earliest deadline of the initiator. `paused_until` returns the end of a peer's backoff.
    pub(crate) fn next_deadline(
        &self,
        now: Instant,
        links: &Links,
        paused_until: impl Fn(u32) -> Option<Instant>,
    ) -> Option<Instant> {
        let mut next = Earliest::default();
        for &slot in self.slices.draining() {
            // After that time its queue pair has been flushed, and the deadline of the queue pair counts.
            next.note(self.slices.drains_until(slot).filter(|until| *until > now));
        }
        if links.any_flushing() {
            (0..links.bound()).for_each(|index| next.note(links.flushes_until(index)));
        }
        for &peer in self.slices.listed() {
            next.note(paused_until(peer));
            next.note(self.slices.work(peer).and_then(|work| work.backoff.pending(now)));
        }
        next.get()
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests;
