//! How exchanges and operations end.

use te_core::{Error, ErrorKind, Op};

use super::connection::{Connection, Phase};
use super::exchange::Exchange;
use super::peer::{Place, remote_bytes};
use super::{Initiator, Version};

impl Initiator {
    /// The answer is complete: the connection is free, and the operation has ended.
    pub(super) fn exchanged(&mut self, index: u32) {
        let Some(connection) = self.connections.get_mut(index) else { return };
        let Phase::Busy(exchange) = std::mem::replace(&mut connection.phase, Phase::Idle) else { return };
        connection.used = true;
        let number = connection.peer;
        let request = exchange.request();
        // Nothing has acknowledged a WRITE of version 1: it may still be refused, or be lost.
        let unacknowledged = request.op == Op::Write && request.version == Version::V1;
        let resent_in_doubt =
            self.operations.get(exchange.slot).is_some_and(|operation| operation.ext.in_doubt);
        self.watch(index, false);
        self.finish(exchange.slot, None, unacknowledged || resent_in_doubt);
        self.list(number);
    }

    /// The target does not serve the range. It closes the connection.
    pub(super) fn rejected(&mut self, index: u32) {
        self.stats.refused += 1;
        if let Some((_, exchange)) = self.take_exchange(index) {
            self.refuse(exchange.slot);
        }
    }

    /// The connection of an exchange is of no further use.
    pub(super) fn broken(&mut self, index: u32, error: Error) {
        let Some((connection, exchange)) = self.take_exchange(index) else { return self.close(index, true) };
        let slot = exchange.slot;
        let request = *exchange.request();
        let may_land = request.op == Op::Write && exchange.may_land();
        let Some(operation) = self.operations.get_mut(slot) else { return };
        operation.ext.in_doubt |= may_land;
        let in_doubt = operation.ext.in_doubt;
        let closed =
            error.kind == ErrorKind::PeerDead && error.code != libc::ETIMEDOUT && !exchange.is_answered();
        // A peer may close an idle connection at any time. The same bytes may be sent to the same range
        // again.
        if closed && connection.used && !operation.ext.resent {
            operation.ext.resent = true;
            self.enqueue(slot);
            self.timers.wake();
            return;
        }
        // To a READ of a range that it does not serve, a target of version 1 has no other answer.
        if closed && request.version == Version::V1 && request.op == Op::Read {
            self.stats.refused += 1;
            return self.refuse(slot);
        }
        self.finish(slot, Some(error), in_doubt);
        self.list(connection.peer);
    }

    /// Closes a connection in the middle of an exchange.
    fn take_exchange(&mut self, index: u32) -> Option<(Connection, Exchange)> {
        let mut connection = self.connections.remove(index)?;
        te_fabric::net::reset_on_close(&connection.socket);
        if let Some(peer) = self.peers.get_mut(connection.peer) {
            peer.forget(index);
        }
        match std::mem::replace(&mut connection.phase, Phase::Idle) {
            Phase::Busy(exchange) => Some((connection, exchange)),
            Phase::Connecting | Phase::Idle => None,
        }
    }

    /// The target has refused the range of an operation. The descriptor may be of an earlier life of its
    /// owner: it is fetched again, once.
    fn refuse(&mut self, slot: u32) {
        let Some(operation) = self.operations.get_mut(slot) else { return };
        let (number, again, in_doubt) = (operation.peer, operation.ext.refused, operation.ext.in_doubt);
        operation.ext.refused = true;
        let denied = Error::new(ErrorKind::AccessDenied);
        self.list(number);
        if again || !self.ask(number) {
            return self.finish(slot, Some(denied), in_doubt);
        }
        self.wait_for_answer(slot);
    }

    /// The peer cannot be reached. It may have another data port by now.
    pub(super) fn unreachable(&mut self, number: u32, error: Error) {
        if !self.ask(number) {
            return self.fail_queue(number, error);
        }
        if let Some(peer) = self.peers.get_mut(number) {
            peer.unreachable = Some(error);
        }
        while let Some(slot) = self.peers.get(number).and_then(|peer| peer.queue.first()) {
            self.unlink(slot);
            self.wait_for_answer(slot);
        }
    }

    /// Asks for the peer's descriptor. False: there is nothing to ask, or too much is asked already.
    fn ask(&mut self, number: u32) -> bool {
        let (Some(lookups), Some(peer)) = (&self.lookups, self.peers.get_mut(number)) else { return false };
        if peer.asked {
            return true;
        }
        if !lookups.ask(number, peer.contact.incarnation(), peer.segment()) {
            return false;
        }
        peer.asked = true;
        self.stats.lookups += 1;
        true
    }

    fn wait_for_answer(&mut self, slot: u32) {
        let Some(operation) = self.operations.get_mut(slot) else { return };
        operation.ext.place = Place::Asking;
        let number = operation.peer;
        if let Some(peer) = self.peers.get_mut(number) {
            self.operations.push_back(&mut peer.asking, slot);
        }
    }

    /// Takes in the descriptors that were fetched again.
    pub(super) fn take_answers(&mut self) {
        let Some(answers) = self.lookups.as_ref().map(super::Lookups::answers) else { return };
        for answer in answers {
            let number = answer.peer;
            let Some(peer) = self.peers.get_mut(number) else { continue };
            // Another peer has the number by now.
            if peer.contact.incarnation() != answer.life {
                continue;
            }
            peer.asked = false;
            let error = peer.unreachable.take().unwrap_or(ErrorKind::PeerDead.into());
            peer.restarted |= answer.descriptor.as_ref().is_some_and(|now| now.life() != answer.life);
            let restarted = peer.restarted;
            while let Some(slot) = self.peers.get(number).and_then(|peer| peer.asking.first()) {
                self.unlink(slot);
                let Some(operation) = self.operations.get(slot) else { continue };
                let (refused, in_doubt) = (operation.ext.refused, operation.ext.in_doubt);
                let base = self.remote_regions.get(operation.remote_region).map_or(0, |remote| remote.ext);
                let (addr, len) = (base + operation.remote_offset, u64::from(operation.len));
                let listed = answer.descriptor.as_ref().is_some_and(|now| now.contains(addr, len));
                match (restarted, refused) {
                    (true, _) => self.finish(slot, Some(ErrorKind::PeerRestarted.into()), in_doubt),
                    (false, true) if listed => self.enqueue(slot),
                    (false, true) => self.finish(slot, Some(ErrorKind::AccessDenied.into()), in_doubt),
                    (false, false) => self.finish(slot, Some(error), in_doubt),
                }
            }
            self.list(number);
        }
        self.timers.wake();
    }

    /// Ends every operation that waits for a connection to the peer.
    pub(super) fn fail_queue(&mut self, number: u32, error: Error) {
        while let Some(slot) = self.peers.get(number).and_then(|peer| peer.queue.first()) {
            self.unlink(slot);
            let in_doubt = self.operations.get(slot).is_some_and(|operation| operation.ext.in_doubt);
            self.finish(slot, Some(error), in_doubt);
        }
    }

    /// Takes an operation out of the queue in which it is.
    pub(super) fn unlink(&mut self, slot: u32) {
        let Some(operation) = self.operations.get(slot) else { return };
        let (number, place) = (operation.peer, operation.ext.place);
        let Some(peer) = self.peers.get_mut(number) else { return };
        match place {
            Place::Queue => self.operations.unlink(&mut peer.queue, slot),
            Place::Asking => self.operations.unlink(&mut peer.asking, slot),
            Place::Connection(_) => {}
        }
    }

    /// Completes an operation, which is in no queue and on no connection.
    pub(super) fn finish(&mut self, slot: u32, error: Option<Error>, in_doubt: bool) {
        let Some(mut operation) = self.operations.remove(slot) else { return };
        operation.error = error;
        self.regions.unpin(operation.region);
        self.remote_regions.unpin(operation.remote_region);
        let in_doubt = in_doubt && operation.op == Op::Write;
        if in_doubt && let Some(peer) = self.peers.get_mut(operation.peer) {
            peer.in_doubt = true;
        }
        let count = if error.is_none() { &mut self.stats.applied } else { &mut self.stats.failed };
        *count += 1;
        self.operations.complete(operation.completion(remote_bytes(operation.op, error.is_some(), in_doubt)));
    }
}
