//! What comes back: completions, failures and who pays for them, flushed queue pairs, slices that are sent again.

use core::time::Duration;

use te_core::{Error, ErrorKind, Op};

use crate::link::{Failure, Link, Phase, Piece};
use crate::operation::Ext;
use crate::port::NOTHING;
use crate::region::Keys;
use crate::transport::{Outage, RdmaTransport};
use crate::verbs::{QpStep, Verbs, WcStatus, WorkCompletion};

/// Completions taken at a time, and how often at most in one poll.
const COMPLETIONS_MAX: usize = 64;
const ROUNDS_MAX: usize = 16;

/// How a piece of a slice ended.
#[derive(Clone, Copy, Debug)]
enum End {
    Done,
    Failed {
        /// `None`: it is sent again.
        error: Option<Error>,
        /// It may be in place, or land yet.
        doubtful: bool,
    },
}

impl<V: Verbs> RdmaTransport<V> {
    /// Takes in what has completed; gives how many work requests reported.
    pub(crate) fn reap(&mut self) -> usize {
        let mut ends = [NOTHING; COMPLETIONS_MAX];
        let mut total = 0;
        for _ in 0..ROUNDS_MAX {
            let Ok(count) = self.verbs.poll_cq(&mut ends) else {
                self.lose_port(Outage::Device);
                break;
            };
            ends[..count].iter().for_each(|end| self.completed(end));
            total += count;
            if count < ends.len() {
                break;
            }
        }
        self.stats.completions += total as u64;
        total
    }

    fn completed(&mut self, end: &WorkCompletion) {
        let (name, sequence) = ((end.id >> 32) as u32, end.id as u32);
        let Some(index) = self.links.index(name) else { return };
        let Some(mut link) = self.links.take(index) else { return };
        if link.has(sequence) {
            self.advance(&mut link, sequence, end);
        }
        let endpoint = link.endpoint;
        let path_lost = matches!(end.status, WcStatus::RetriesExceeded | WcStatus::NotReady);
        let done = link.outstanding == 0 && matches!(link.phase, Phase::Flushing { .. });
        self.links.put(index, link);
        if done {
            self.bury(index);
        }
        if path_lost {
            self.retire_idle(endpoint);
        }
        if self.endpoints.get(endpoint).is_some_and(|endpoint| !endpoint.pending.is_empty()) {
            self.list(endpoint);
        }
    }

    /// Takes in the end of work request `sequence`. Until one has failed, everything before it went well.
    fn advance(&mut self, link: &mut Link, sequence: u32, end: &WorkCompletion) {
        let left = link.next.wrapping_sub(sequence) - 1;
        self.outstanding -= link.outstanding - left;
        link.outstanding = left;
        if link.failed.is_some() {
            return;
        }
        while let Some(piece) = link.pop_through(sequence.wrapping_sub(1)) {
            self.settle(piece, End::Done);
        }
        let own = link.posted.iter().take_while(|piece| piece.sequence == sequence);
        let bytes: u64 = own.map(|piece| u64::from(piece.bytes)).sum();
        if let Some(failure) = Failure::of(end.status, end.code, bytes <= u64::from(link.mtu)) {
            if end.status != WcStatus::Flushed {
                log::debug!("queue pair {:#x}: {:?} (code {:#x})", link.qp.number, end.status, end.code);
            }
            link.failed = Some((sequence, failure));
            self.put_in_error(link, failure.others);
            return;
        }
        if !link.proven
            && let Some(endpoint) = self.endpoints.get_mut(link.endpoint)
        {
            endpoint.links_rest.forgive();
        }
        link.proven = true;
        while let Some(piece) = link.pop_through(sequence) {
            self.settle(piece, End::Done);
        }
    }

    /// The keys that a slice used are refused: ask again.
    fn forget_keys(&mut self, slot: u32) {
        if let Some(operation) = self.operations.get(slot)
            && let Some(segment) = self.segments.get_mut(operation.segment)
            && matches!(segment.ext.keys, Keys::Known)
        {
            segment.ext.forget(Keys::Unknown);
        }
    }

    fn settle(&mut self, piece: Piece, end: End) {
        let Some(operation) = self.operations.get_mut(piece.slot) else { return };
        operation.open -= 1;
        let write = operation.op == Op::Write;
        match end {
            End::Done => operation.ext.landed |= write,
            End::Failed { error, doubtful } => {
                operation.ext.doubtful |= write && doubtful;
                match error {
                    Some(error) => _ = operation.error.get_or_insert(error),
                    None => operation.ext.again = true,
                }
            }
        }
        if operation.error.is_some() || operation.ext.again {
            self.unqueue(piece.slot);
        }
        self.conclude(piece.slot);
    }

    /// Ends a slice, or has it sent again, if nothing of it is on its way any more.
    fn conclude(&mut self, slot: u32) {
        let replays_max = self.config.replays_max;
        let Some(operation) = self.operations.get_mut(slot) else { return };
        if operation.open > 0 || operation.is_queued() {
            return;
        }
        let whole = operation.issued == operation.len && !operation.ext.again;
        if operation.error.is_some() || whole {
            self.finish(slot);
        } else if operation.ext.canceled.is_some() {
            self.fail(slot, ErrorKind::Canceled.into());
        } else if operation.ext.again && operation.ext.replays >= replays_max {
            self.fail(slot, ErrorKind::Rail.into());
        } else {
            if operation.ext.again {
                operation.ext.replays += 1;
                self.stats.replays += 1;
            }
            self.again(slot);
        }
    }

    /// Puts a slice back where it waits, from its first byte on.
    pub(crate) fn again(&mut self, slot: u32) {
        let Some(operation) = self.operations.get_mut(slot) else { return };
        if operation.open > 0 {
            operation.ext.again = true;
            return;
        }
        operation.ext.again = false;
        operation.issued = 0;
        match self.segments.get(operation.segment).map(|segment| &segment.ext.keys) {
            Some(Keys::Withdrawn) | None => self.fail(slot, ErrorKind::Stale.into()),
            Some(keys) => {
                let known = matches!(keys, Keys::Known);
                self.enqueue(slot, known);
            }
        }
    }

    /// Takes a slice out of its queue.
    pub(crate) fn unqueue(&mut self, slot: u32) {
        let Some(operation) = self.operations.get(slot) else { return };
        if operation.ext.waiting {
            if let Some(segment) = self.segments.get_mut(operation.segment) {
                self.operations.unlink(&mut segment.ext.waiting, slot);
            }
        } else if let Some(endpoint) = self.endpoints.get_mut(operation.peer) {
            self.operations.unlink(&mut endpoint.pending, slot);
        }
    }

    /// Ends a slice with `error`, at once or when the last piece of it has ended.
    pub(crate) fn fail(&mut self, slot: u32, error: Error) {
        self.unqueue(slot);
        let Some(operation) = self.operations.get_mut(slot) else { return };
        operation.error.get_or_insert(error);
        if operation.open == 0 {
            self.finish(slot);
        }
    }

    fn finish(&mut self, slot: u32) {
        let Some(operation) = self.operations.remove(slot) else { return };
        if operation.ext.canceled.is_some() {
            self.draining.retain(|&draining| draining != slot);
        }
        self.regions.unpin(operation.region);
        self.segments.unpin(operation.segment);
        if let Some(endpoint) = self.endpoints.get_mut(operation.peer) {
            endpoint.operations -= 1;
        }
        let Ext { landed, doubtful, .. } = operation.ext;
        self.operations.complete(operation.completion(landed, doubtful));
    }

    /// Starts the end of a slice: at once, or when its posted pieces have ended, or when they have had time to.
    pub(crate) fn cancel_slot(&mut self, slot: u32) {
        let until = self.timers.now() + Duration::from_millis(u64::from(self.config.cancel_drain_ms));
        let Some(operation) = self.operations.get_mut(slot) else { return };
        if operation.ext.canceled.is_some() {
            return;
        }
        operation.ext.canceled = Some(until);
        if operation.open == 0 {
            self.fail(slot, ErrorKind::Canceled.into());
            return;
        }
        self.unqueue(slot);
        self.draining.push(slot);
        self.due(until);
    }

    /// Slices that had time to end by themselves, and did not: their queue pairs are flushed.
    pub(crate) fn flush_canceled(&mut self) {
        let mut at = 0;
        while let Some(&slot) = self.draining.get(at) {
            at += 1;
            let Some(operation) = self.operations.get(slot) else { continue };
            if operation.ext.canceled.is_none_or(|until| self.timers.now() < until) {
                continue;
            }
            let links = self.endpoints.get(operation.peer).map(|endpoint| endpoint.links);
            for index in links.iter().flatten().flatten() {
                let holds = |link: &Link| {
                    link.phase == Phase::Live && link.posted.iter().any(|piece| piece.slot == slot)
                };
                if self.links.get(*index).is_some_and(|link| holds(link)) {
                    self.retire(*index, None);
                    // What it held may have ended at once, and the list have moved.
                    at = 0;
                }
            }
        }
    }

    /// Ends a queue pair of ours. What is posted on it comes back with `verdict`, or is sent again.
    pub(crate) fn retire(&mut self, index: u32, verdict: Option<Error>) {
        let Some(mut link) = self.links.take(index) else { return };
        self.put_in_error(&mut link, verdict);
        let quiet = link.posted.is_empty();
        self.links.put(index, link);
        if quiet {
            self.bury(index);
        }
    }

    /// The path of one queue pair is gone, and the others share it: those that are idle are made anew before they are used.
    fn retire_idle(&mut self, endpoint: u32) {
        let links = self.endpoints.get(endpoint).map(|endpoint| endpoint.links);
        for index in links.iter().flatten().flatten() {
            if self.links.get(*index).is_some_and(|link| link.phase == Phase::Live && link.posted.is_empty())
            {
                self.retire(*index, None);
            }
        }
    }

    /// The device says that a queue pair is in error. A peer's is the peer's affair.
    pub(crate) fn qp_failed(&mut self, number: u32) {
        for index in 0..self.links.bound() {
            let is = |link: &Link| link.qp.number == number && link.phase == Phase::Live;
            if self.links.get(index).is_some_and(|link| is(link)) {
                self.retire(index, None);
            }
        }
    }

    fn put_in_error(&mut self, link: &mut Link, new: Option<Error>) {
        if let Phase::Flushing { verdict, .. } = &mut link.phase {
            if verdict.is_none() {
                *verdict = new;
            }
            return;
        }
        if !link.posted.is_empty() {
            self.stats.flushes += 1;
        }
        let flushes = self.verbs.modify_qp(link.qp.handle, QpStep::Error).is_ok()
            && self.outage != Some(Outage::Device);
        let patience = if flushes { u64::from(self.config.flush_ms_max) } else { 0 };
        let until = self.timers.now() + Duration::from_millis(patience);
        link.phase = Phase::Flushing { until, verdict: new };
        self.flushing += 1;
        self.due(until);
        if new.is_some_and(|error| error.kind == ErrorKind::Rail)
            && let Some(endpoint) = self.endpoints.get_mut(link.endpoint)
        {
            endpoint.links_rest.fail(self.timers.now(), self.config.reconnect_ms_max);
        }
    }

    /// Destroys a queue pair that is in error; what did not go well on it ends here, for only what is destroyed is sure to leave
    /// memory alone. A queue pair that cannot be destroyed is
    /// kept, with its slices, and tried again: their memory is not handed back.
    pub(crate) fn bury(&mut self, index: u32) {
        let Some(mut link) = self.links.take(index) else { return };
        if let Err(error) = self.verbs.destroy_qp(link.qp.handle) {
            // One that is being connected goes when that has ended; nothing was ever posted on it.
            let connecting = error.code == libc::EBUSY && link.next == 0;
            if link.stuck.is_none() && !connecting {
                log::error!(
                    "queue pair {:#x} cannot be destroyed, {} bytes are in quarantine: {error}",
                    link.qp.number,
                    link.bytes
                );
                link.stuck = Some(link.bytes);
                self.stats.quarantined_bytes += link.bytes;
            }
            let verdict = match link.phase {
                Phase::Flushing { verdict, .. } => verdict,
                _ => {
                    self.flushing += 1;
                    None
                }
            };
            let until = self.timers.now() + Duration::from_millis(u64::from(self.config.flush_ms_max));
            link.phase = Phase::Flushing { until, verdict };
            self.due(until);
            self.links.put(index, link);
            return;
        }
        self.stats.qps_destroyed += 1;
        self.links.release(index);
        self.outstanding -= link.outstanding;
        self.stats.quarantined_bytes -= link.stuck.unwrap_or(0);
        let error = match link.phase {
            Phase::Flushing { verdict, .. } => {
                self.flushing -= 1;
                verdict
            }
            _ => None,
        };
        if let Some(endpoint) = self.endpoints.get_mut(link.endpoint) {
            endpoint.links[usize::from(link.number)] = None;
            endpoint.sweep |= endpoint.up && link.phase != Phase::Offered;
        }
        while let Some(piece) = link.posted.pop_front() {
            let swept = End::Failed { error, doubtful: true };
            let end = match link.failed {
                Some((sequence, failure)) if sequence == piece.sequence => {
                    if failure.keys_dead {
                        self.forget_keys(piece.slot);
                    }
                    End::Failed { error: failure.own.or(error), doubtful: failure.doubtful }
                }
                _ => swept,
            };
            self.settle(piece, end);
        }
        self.list(link.endpoint);
    }

    /// Queue pairs that have not flushed in time.
    pub(crate) fn bury_late(&mut self) {
        for index in 0..self.links.bound() {
            if let Some(link) = self.links.get(index)
                && let Phase::Flushing { until, .. } = link.phase
                && self.timers.now() >= until
            {
                self.bury(index);
            }
        }
    }

    /// The port carries nothing any more: what is posted ends, so that other rails may have it.
    pub(crate) fn lose_port(&mut self, outage: Outage) {
        if self.outage == Some(Outage::Device) || self.outage == Some(outage) {
            return;
        }
        log::warn!("{}: {outage:?} outage", self.verbs.info().name);
        self.outage = Some(outage);
        for index in 0..self.links.bound() {
            self.retire(index, Some(outage.error()));
        }
        for endpoint in 0..self.endpoints.bound() {
            self.list(endpoint);
        }
    }
}
