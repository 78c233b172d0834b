//! Completions: successes, failures and the slices that they affect, flushed queue pairs, slices that are
//! sent again.

use te_core::{Error, ErrorKind};

use super::Initiator;
use crate::env::Env;
use crate::io::Outage;
use crate::io::link::{Failure, Link, Phase};
use crate::io::links::Destroyed;
use crate::io::port::NOTHING;
use crate::sys::verbs::{Verbs, WcStatus, WorkCompletion};

/// The most completions that are taken with one call.
const COMPLETIONS_MAX: usize = 64;
/// The most such calls in one poll.
const ROUNDS_MAX: usize = 16;

impl Initiator {
    /// Handles completions; returns how many there were.
    pub(crate) fn reap<V: Verbs>(&mut self, env: &mut Env<'_, V>) -> usize {
        let mut ends = [NOTHING; COMPLETIONS_MAX];
        let mut total = 0;
        for _ in 0..ROUNDS_MAX {
            let Ok(count) = env.io.poll_completions(&mut ends) else {
                self.lose_port(Outage::Device, env);
                break;
            };
            ends[..count].iter().for_each(|end| self.completed(end, env));
            total += count;
            if count < ends.len() {
                break;
            }
        }
        total
    }

    fn completed<V: Verbs>(&mut self, end: &WorkCompletion, env: &mut Env<'_, V>) {
        let (name, sequence) = ((end.id >> 32) as u32, end.id as u32);
        let Some(index) = env.io.links().index(name) else { return };
        self.advance(index, sequence, end, env);
        let Some(link) = env.io.links().get(index) else { return };
        let peer = link.peer;
        if link.outstanding == 0 && matches!(link.phase, Phase::Flushing { .. }) {
            self.destroy(index, env);
        }
        if matches!(end.status, WcStatus::RetriesExceeded | WcStatus::NotReady) {
            self.drain_idle(peer, env);
        }
        if self.slices.first_pending(peer).is_some() {
            self.slices.list(peer, env.timers);
        }
    }

    /// Handles the end of work request `sequence`. Until one has failed, every earlier one has succeeded.
    fn advance<V: Verbs>(&mut self, index: u32, sequence: u32, end: &WorkCompletion, env: &mut Env<'_, V>) {
        let Some(link) = env.io.links_mut().ended(index, sequence) else { return };
        if link.failed.is_some() {
            return;
        }
        let failed = end.status != WcStatus::Success;
        let succeeded = if failed { sequence.wrapping_sub(1) } else { sequence };
        while let Some(piece) = link.pop_through(succeeded) {
            self.slices.piece_done(piece, env.memory, env.timers);
        }
        if failed {
            let own = link.posted.iter().take_while(|piece| piece.sequence == sequence);
            let bytes: u64 = own.map(|piece| u64::from(piece.bytes)).sum();
            let Some(failure) = Failure::of(end.status, end.code, bytes <= u64::from(link.mtu)) else {
                return;
            };
            if end.status != WcStatus::Flushed {
                log::debug!("queue pair {:#x}: {:?} (code {:#x})", link.qp.number, end.status, end.code);
            }
            link.failed = Some((sequence, failure));
            self.put_in_error(index, failure.others, env);
        } else if !link.proven {
            link.proven = true;
            if let Some(work) = self.slices.work_mut(link.peer) {
                work.backoff.succeed();
            }
        }
    }

    /// Flushes the queue pairs of cancelled slices that did not end by themselves in time.
    pub(crate) fn flush_canceled<V: Verbs>(&mut self, env: &mut Env<'_, V>) {
        let mut at = 0;
        while let Some(&slot) = self.slices.draining().get(at) {
            at += 1;
            if self.slices.drains_until(slot).is_none_or(|until| env.timers.now() < until) {
                continue;
            }
            let peer = self.slices.operations().get(slot).map(|operation| operation.peer);
            let links = peer.and_then(|peer| self.slices.work(peer)).map(|work| work.links);
            for index in links.into_iter().flatten().flatten() {
                let holds = |link: &Link| {
                    link.phase == Phase::Live && link.posted.iter().any(|piece| piece.slot == slot)
                };
                if env.io.links().get(index).is_some_and(holds) {
                    self.drain(index, None, env);
                    // Its slices may have ended, which changes the list.
                    at = 0;
                }
            }
        }
    }

    /// Ends a queue pair of ours. Its posted slices end with `error`, or are sent again.
    pub(super) fn drain<V: Verbs>(&mut self, index: u32, error: Option<Error>, env: &mut Env<'_, V>) {
        self.put_in_error(index, error, env);
        if env.io.links().get(index).is_some_and(|link| link.posted.is_empty()) {
            self.destroy(index, env);
        }
    }

    /// Replaces the idle queue pairs to a peer: another one has lost the path that they share.
    fn drain_idle<V: Verbs>(&mut self, peer: u32, env: &mut Env<'_, V>) {
        let links = self.slices.work(peer).map(|work| work.links);
        for index in links.into_iter().flatten().flatten() {
            let idle = |link: &Link| link.phase == Phase::Live && link.posted.is_empty();
            if env.io.links().get(index).is_some_and(idle) {
                self.drain(index, None, env);
            }
        }
    }

    /// Handles the event that a queue pair is in error. Queue pairs that are held for peers are left to the
    /// peers.
    pub(crate) fn qp_failed<V: Verbs>(&mut self, number: u32, env: &mut Env<'_, V>) {
        for index in 0..env.io.links().bound() {
            let is = |link: &Link| link.qp.number == number && link.phase == Phase::Live;
            if env.io.links().get(index).is_some_and(is) {
                self.drain(index, None, env);
            }
        }
    }

    fn put_in_error<V: Verbs>(&mut self, index: u32, error: Option<Error>, env: &mut Env<'_, V>) {
        let now = env.timers.now();
        let Some(until) = env.io.fail_link(index, error, now, env.config) else { return };
        env.timers.due_by(until);
        if error.is_some_and(|error| error.kind == ErrorKind::Rail)
            && let Some(link) = env.io.links().get(index)
            && let Some(work) = self.slices.work_mut(link.peer)
        {
            work.backoff.fail(now, env.config.reconnect_ms_max);
        }
    }

    /// Destroys a queue pair. Its slices that did not succeed end here, because only a destroyed queue pair
    /// no longer touches memory. One that cannot be destroyed is kept, with its slices, and tried again:
    /// their memory is not handed back.
    pub(super) fn destroy<V: Verbs>(&mut self, index: u32, env: &mut Env<'_, V>) {
        let (mut link, error) = match env.io.destroy_link(index, env.timers.now(), env.config) {
            Destroyed::Gone(link, error) => (link, error),
            Destroyed::Kept(until) => {
                env.timers.due_by(until);
                return;
            }
            Destroyed::Unknown => return,
        };
        if let Some(work) = self.slices.work_mut(link.peer) {
            work.links[usize::from(link.number)] = None;
            work.cleanup_due |= work.up && link.phase != Phase::Offered;
        }
        while let Some(piece) = link.posted.pop_front() {
            let end = match link.failed {
                Some((sequence, failure)) if sequence == piece.sequence => {
                    if failure.keys_dead {
                        self.slices.forget_keys(piece.slot);
                    }
                    (failure.own.or(error), failure.doubtful)
                }
                _ => (error, true),
            };
            self.slices.piece_failed(piece, end, env.memory, env.timers);
        }
        self.slices.list(link.peer, env.timers);
    }

    /// Destroys queue pairs that did not flush in time.
    pub(crate) fn destroy_late<V: Verbs>(&mut self, env: &mut Env<'_, V>) {
        for index in 0..env.io.links().bound() {
            if env.io.links().flushes_until(index).is_some_and(|until| env.timers.now() >= until) {
                self.destroy(index, env);
            }
        }
    }

    /// Whether cancelled slices drain.
    pub(crate) fn is_draining(&self) -> bool {
        !self.slices.draining().is_empty()
    }

    /// Handles an outage of the port: posted slices end, so that other rails can take them.
    pub(crate) fn lose_port<V: Verbs>(&mut self, outage: Outage, env: &mut Env<'_, V>) {
        if !env.io.lose_port(outage) {
            return;
        }
        for index in 0..env.io.links().bound() {
            self.drain(index, Some(outage.error()), env);
        }
        self.list_all(env.timers);
    }
}
