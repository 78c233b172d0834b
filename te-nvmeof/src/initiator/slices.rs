//! How slices become commands, and how they end.

use te_core::{Error, ErrorKind, Op};
use te_fabric::RemoteBytes;

use super::Initiator;
use super::peer::{Association, Phase, QueueConnection};
use crate::command::{Place, Sqe, Status, io};
use crate::context::Context;
use crate::controller::Admin;
use crate::pdu::{self, FLAG_LAST, Kind};
use crate::queue::{Command, Purpose, Wanted};
use crate::stream::Source;

/// Unsent bytes of a queue above which it gets no further command.
const UNSENT_BYTES_MAX: u64 = 4 << 20;

/// Bytes of commands in flight above which a queue gets no further one: more only falls out of the caches.
const IN_FLIGHT_BYTES_MAX: u64 = 2 << 20;

/// Commands of an admin queue for which aborts leave room.
const ABORTS_LEAVE: usize = 8;

/// How a piece of a slice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PieceEnd {
    Done,
    /// It was refused before a byte of it was taken.
    Refused(Error),
    /// It failed, and some of its bytes may have changed the remote memory.
    Failed(Error),
}

impl Initiator {
    /// Makes commands of the slices that are pending, as far as there is room, and sends them.
    pub(super) fn issue(&mut self, index: u32, cx: &mut Context<'_>) {
        if self.peers.get(index).is_some_and(|peer| !peer.pending.is_empty()) {
            self.begins_to_owe(index, cx);
        }
        while let Some(slot) = self.peers.get(index).and_then(|peer| peer.pending.first()) {
            let Some(association) = self.peers.get(index).and_then(|peer| peer.association.as_ref()) else {
                return;
            };
            let Some(queue) = self.best_queue(association) else { break };
            let (transfer, in_capsule) = (association.transfer_bytes, association.in_capsule_bytes);
            if !self.issue_piece(index, slot, queue, (transfer, in_capsule), cx) {
                break;
            }
        }
        let Some(queues) =
            self.peers.get(index).and_then(|peer| peer.association.as_ref()).map(|of| of.queues.len())
        else {
            return;
        };
        for at in 1..queues {
            let of = self.peers.get(index).and_then(|peer| peer.association.as_ref());
            let Some(queue) = of.and_then(|association| association.queues.get(at).copied()) else { return };
            if let Err(error) = self.flush_index(queue, cx) {
                self.fail_association(index, error, cx);
                return;
            }
        }
    }

    /// The I/O queue with the fewest bytes in flight among those that have room.
    fn best_queue(&self, association: &Association) -> Option<u32> {
        let mut best: Option<(u32, u64)> = None;
        for index in association.queues.iter().skip(1) {
            let Some(queue) = self.queues.get(*index) else { continue };
            let has_room = queue.phase == Phase::Up
                && queue.commands.has_room()
                && queue.stream.has_room(2)
                && queue.stream.queued() < UNSENT_BYTES_MAX
                && queue.bytes_in_flight < IN_FLIGHT_BYTES_MAX;
            if has_room && best.is_none_or(|(_, bytes)| queue.bytes_in_flight < bytes) {
                best = Some((*index, queue.bytes_in_flight));
            }
        }
        best.map(|(index, _)| index)
    }

    /// Makes one command of the next piece of a slice. False when it could not.
    fn issue_piece(
        &mut self,
        index: u32,
        slot: u32,
        queue: u32,
        (transfer_bytes, in_capsule_bytes): (u32, u32),
        cx: &mut Context<'_>,
    ) -> bool {
        let (Some(operation), Some(queue)) = (self.operations.get_mut(slot), self.queues.get_mut(queue))
        else {
            return false;
        };
        let Some(remote) = self.remotes.get(operation.remote_region) else { return false };
        let len = (operation.len - operation.issued).min(transfer_bytes);
        let block = remote.ext.block.max(512);
        let Ok(memory) = operation.ext.local.part(operation.issued.into(), len.into()) else { return false };
        let purpose = if operation.op == Op::Read { Purpose::Read } else { Purpose::Write };
        let Some((at, cid)) = queue.commands.insert(Command::new(purpose, slot, Some(memory), len)) else {
            return false;
        };
        let offset = operation.remote_offset + u64::from(operation.issued);
        let lba = (remote.ext.place.first + offset) / u64::from(block);
        let opcode = if operation.op == Op::Read { io::READ } else { io::WRITE };
        let sqe = Sqe::blocks(opcode, cid, remote.ext.place.nsid, lba, len / block);
        let agreed = queue.stream.agreed;
        if operation.op == Op::Write && len <= in_capsule_bytes {
            let sqe = sqe.with_data(Place::InCapsule(len));
            queue.stream.push(pdu::command(sqe, len, agreed).bytes());
            queue.stream.push_memory(memory, Source::Command(at));
            if let Some(command) = queue.commands.get_mut(at) {
                command.moved = len;
            }
        } else {
            let sqe = sqe.with_data(Place::Transport(len));
            queue.stream.push(pdu::command(sqe, 0, agreed).bytes());
        }
        queue.bytes_in_flight += u64::from(len);
        cx.stats.commands += 1;
        operation.issued += len;
        operation.open += 1;
        if operation.issued == operation.len
            && let Some(peer) = self.peers.get_mut(index)
        {
            self.operations.unlink(&mut peer.pending, slot);
        }
        true
    }

    /// Hands data that the target has asked for to the socket, as far as there is room.
    pub(super) fn pump(queue: &mut QueueConnection, at: u16) {
        let agreed = queue.stream.agreed;
        let cid = queue.commands.identifier(at);
        while let Some(command) = queue.commands.get(at) {
            let (moved, memory) = (command.moved, command.memory);
            let Some(Wanted { ttag, end }) = command.wanted else { return };
            if !queue.stream.has_room(1) {
                queue.backlog.push_back(at);
                return;
            }
            let len = (end - moved).min(queue.data_bytes_max);
            let flags = if moved + len == end { FLAG_LAST } else { 0 };
            let head = pdu::transfer(Kind::H2cData, flags, cid, ttag, (moved, len), agreed);
            let part = memory.and_then(|memory| memory.part(moved.into(), len.into()).ok());
            match part {
                Some(part) => {
                    queue.stream.push(head.bytes());
                    queue.stream.push_memory(part, Source::Command(at));
                }
                None => {
                    let Some(copy) = queue.commands.copy(at, moved, len) else { return };
                    queue.stream.push(head.bytes());
                    queue.stream.push_bytes(copy);
                }
            }
            if let Some(command) = queue.commands.get_mut(at) {
                command.moved += len;
                if command.moved == end {
                    command.wanted = None;
                }
            }
        }
    }

    /// A piece of a slice has ended.
    pub(super) fn end_piece(&mut self, slot: u32, end: PieceEnd, cx: &mut Context<'_>) {
        let Some(operation) = self.operations.get_mut(slot) else { return };
        operation.open -= 1;
        match end {
            PieceEnd::Done => operation.ext.touched = true,
            PieceEnd::Refused(error) => {
                let place = self.remotes.get(operation.remote_region).map(|remote| &remote.ext.place);
                let conflict = error.code == i32::from(Status::RESERVATION_CONFLICT.0);
                // Our key was registered: the owner has preempted it.
                let error = match place.is_some_and(|place| place.reserved) && conflict {
                    true => Error::with_code(ErrorKind::Expelled, error.code),
                    false => error,
                };
                operation.error = operation.error.or(Some(error));
            }
            PieceEnd::Failed(error) => {
                operation.ext.touched = true;
                operation.error = operation.error.or(Some(error));
            }
        }
        if operation.error.is_some() {
            self.dequeue(slot);
        }
        self.end_if_over(slot, cx);
    }

    /// Completes a slice whose pieces have all ended.
    pub(super) fn end_if_over(&mut self, slot: u32, cx: &mut Context<'_>) {
        let Some(operation) = self.operations.get(slot) else { return };
        let over = operation.open == 0 && (operation.error.is_some() || operation.issued == operation.len);
        if over {
            let remote = if operation.ext.touched { RemoteBytes::Written } else { RemoteBytes::Untouched };
            self.complete(slot, remote, cx);
        }
    }

    /// Ends a slice that is in no queue and has no live command with what it has as its error.
    fn complete(&mut self, slot: u32, remote: RemoteBytes, cx: &mut Context<'_>) {
        let Some(ended) = self.operations.remove(slot) else { return };
        cx.regions.unpin(ended.region);
        self.remotes.unpin(ended.remote_region);
        match (ended.error, ended.op) {
            (Some(_), _) => cx.stats.failed += 1,
            (None, Op::Read) => cx.stats.bytes_read += u64::from(ended.len),
            (None, Op::Write) => cx.stats.bytes_written += u64::from(ended.len),
        }
        self.operations.complete(ended.completion(remote));
    }

    /// Ends a slice that has no commands.
    pub(super) fn fail(&mut self, slot: u32, error: Error, cx: &mut Context<'_>) {
        self.dequeue(slot);
        if let Some(operation) = self.operations.get_mut(slot) {
            operation.error = operation.error.or(Some(error));
        }
        self.end_if_over(slot, cx);
    }

    /// Ends a cancelled slice at once. Its commands go on without it: data of READs is discarded, and what is
    /// left to send of WRITEs is copied.
    pub(super) fn abandon(&mut self, slot: u32, cx: &mut Context<'_>) {
        self.dequeue(slot);
        let Some(operation) = self.operations.get_mut(slot) else { return };
        operation.error = Some(ErrorKind::Canceled.into());
        let (index, is_write, stamp) = (operation.peer, operation.op == Op::Write, self.clock);
        let mut in_doubt = operation.ext.touched;
        let mut copied = 0;
        let mut waiting = Vec::new();
        let association = self.peers.get(index).and_then(|peer| peer.association.as_ref());
        for of in association.map_or(&[][..], |association| &association.queues) {
            let Some(queue) = self.queues.get_mut(*of) else { continue };
            let QueueConnection { commands, stream, .. } = queue;
            let of_slot = |(_, command): &(u16, &Command)| command.live && command.slot == slot;
            let found: Vec<u16> = commands
                .iter()
                .filter(of_slot)
                .filter(|(_, command)| !matches!(command.purpose, Purpose::Admin(_)))
                .map(|(at, _)| at)
                .collect();
            for at in found {
                let Some(command) = commands.get_mut(at) else { continue };
                let memory = command.memory.take();
                (command.live, command.stamp) = (false, stamp);
                let moved = command.moved;
                if !is_write {
                    stream.redirect(at);
                    continue;
                }
                in_doubt = true;
                let rest = command.len - moved;
                copied += u64::from(rest) + stream.unsent(Source::Command(at));
                if copied > cx.config.detached_bytes_max.into() {
                    continue;
                }
                stream.detach(Source::Command(at));
                if let Some(memory) = memory.filter(|_| rest > 0) {
                    commands.keep_copy(at, moved, memory.tail(moved.into()).to_vec().into());
                    waiting.push((queue.qid, commands.identifier(at)));
                }
            }
        }
        let too_long = copied > cx.config.detached_bytes_max.into();
        if let Some(operation) = self.operations.get_mut(slot) {
            operation.open = 0;
        }
        if too_long {
            // Before the slice completes: no socket may send from its memory afterwards.
            self.fail_association(index, ErrorKind::Canceled.into(), cx);
        } else {
            for (qid, cid) in waiting {
                self.send_abort(index, qid, cid, cx);
            }
        }
        self.complete(slot, if in_doubt { RemoteBytes::InDoubt } else { RemoteBytes::Untouched }, cx);
        self.list(index);
    }

    /// Asks the target to abort a command. It may refuse. Not when the rest of the admin queue may be needed.
    fn send_abort(&mut self, index: u32, qid: u16, cid: u16, cx: &mut Context<'_>) {
        let association = self.peers.get(index).and_then(|peer| peer.association.as_ref());
        let admin = association.and_then(|of| of.queues.first()).and_then(|at| self.queues.get(*at));
        if admin.is_none_or(|queue| queue.commands.room() <= ABORTS_LEAVE) {
            return;
        }
        let sqe = |own: u16| {
            Sqe::new(crate::command::admin::ABORT, own, 0)
                .with_dwords(&[u32::from(qid) | u32::from(cid) << 16])
        };
        self.send_admin(index, Admin::Abort, sqe, cx);
    }
}
