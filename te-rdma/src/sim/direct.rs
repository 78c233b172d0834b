//! The direct path of [`Pace::Immediate`]: work that no fault can reach is executed by one copy, without
//! packets.
//!
//! It executes exactly the requests that would succeed on the packet path (`wire.rs`) without drawing a
//! fault, and leaves the first other request to that path, unchanged. It saves work that benches of a
//! transport should not measure.

use te_core::Op;

use super::config::{LinkConfig, Pace};
use super::queue::{PSN_MASK, SendQueue};
use super::world::{State, World};
use crate::sys::dma::{MrTable, Target};
use crate::sys::verbs::MrAccess;

impl World {
    /// Executes requests of `qp` up to the first that needs the packet path.
    pub(super) fn execute_directly(&mut self, qp: usize) {
        let Some(peer) = self.plain_peer(qp) else { return };
        let (device, number) = (self.ends[qp].device, self.ends[qp].number);
        let limit = self.devices[device].config.message_bytes_max;
        let access = self.ends[peer].access;
        let mut ended = 0;
        loop {
            let queue = &self.senders[qp].queue;
            let position = queue.done;
            if position == queue.tail {
                break;
            }
            let wqe = queue.at(position);
            let (right, psn) = (remote_right(wqe.op), wqe.first_psn);
            let target = &mut self.ends[peer];
            let fits = wqe.len <= limit && psn == target.expected_psn && access.contains(right);
            if !fits || (wqe.signaled && !self.devices[device].has_room()) {
                break;
            }
            let (own, theirs) = (&self.devices[device].mrs, &self.devices[target.device].mrs);
            if !copy(queue, position, own, theirs) {
                break;
            }
            target.expected_psn = (psn + 1) & PSN_MASK;
            let (id, signaled) = (wqe.id, wqe.signaled);
            let queue = &mut self.senders[qp].queue;
            queue.done = position + 1;
            queue.sent = position + 1;
            ended += 1;
            if signaled {
                self.complete_success(device, number, qp, id, position + 1);
            }
        }
        if ended == 0 {
            return;
        }
        let target = &mut self.ends[peer];
        (target.received, target.gap_reported) = (target.received + ended, false);
        let expected = target.expected_psn;
        let sender = &mut self.senders[qp];
        (sender.psn_sent, sender.retries, sender.rnr_retries) = (expected, 0, 0);
        self.counters.succeeded += ended;
        self.counters.packets += ended;
    }

    /// The peer of `qp`, if nothing is on the wire between them and no fault can be drawn.
    fn plain_peer(&mut self, qp: usize) -> Option<usize> {
        let peer = self.peer_of(qp)?;
        if self.peer_of(peer) != Some(qp) {
            return None;
        }
        let (sender, end, target) = (&self.senders[qp], &self.ends[qp], &self.ends[peer]);
        let idle = sender.queue.done == sender.queue.sent
            && sender.queue.sent_packets == 0
            && sender.requests.is_empty()
            && sender.responses.is_empty()
            && sender.hold_until <= self.now;
        let ready = end.state == State::Ready && target.state == State::Ready;
        // Both ends allow READs.
        let reads = end.path?.reads_to_peer != 0 && target.path?.reads_from_peer != 0;
        let faults = self.devices[end.device].faults.status.is_some()
            || self.devices[target.device].faults.refusal.is_some();
        let calm = |link: Option<LinkConfig>| link == Some(LinkConfig::INSTANT);
        let plain = self.config.pace == Pace::Immediate && idle && ready && reads && !faults;
        (plain && calm(self.link(qp, peer)) && calm(self.link(peer, qp))).then_some(peer)
    }
}

fn remote_right(op: Op) -> MrAccess {
    match op {
        Op::Read => MrAccess::REMOTE_READ,
        Op::Write => MrAccess::REMOTE_WRITE,
    }
}

/// Moves the bytes of a request if all of it is allowed; false: nothing was moved.
#[inline]
fn copy(queue: &SendQueue, position: u64, own: &MrTable, theirs: &MrTable) -> bool {
    let wqe = queue.at(position);
    let right = if wqe.op == Op::Read { MrAccess::LOCAL_WRITE } else { MrAccess::empty() };
    let sges = queue.sges_at(position);
    let remote = theirs.remote(wqe.remote_key, wqe.remote_addr, u64::from(wqe.len), remote_right(wqe.op));
    // Messages without bytes need no key; the packet path handles them.
    let (Some(remote), true) = (remote, wqe.len != 0) else { return false };
    if wqe.inline {
        remote.write(queue.inline_at(position));
        return true;
    }
    let both = |local: Target<'_>, done: usize| {
        let part = remote.part(done, local.len());
        if wqe.op == Op::Read { local.copy_from(part) } else { part.copy_from(local) }
    };
    if let [sge] = sges {
        let Some(local) = own.local(sge, right) else { return false };
        both(local, 0);
        return true;
    }
    if !sges.iter().all(|sge| own.local(sge, right).is_some()) {
        return false;
    }
    let mut done = 0;
    for local in sges.iter().filter_map(|sge| own.local(sge, right)) {
        both(local, done);
        done += local.len();
    }
    true
}
