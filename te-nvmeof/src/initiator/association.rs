//! Associations: how they come up, what they check, and how they are lost.

use te_core::{Error, ErrorKind};
use te_fabric::net::{reset_on_close, set_buffers, set_liveness};
use te_fabric::peer::{Attempt, KnownIncarnations, Refusal};
use te_fabric::timers::Earliest;
use te_fabric::{Interest, net};
use zerocopy::IntoBytes;

use super::owner::{keys, register_client};
use super::peer::{Association, Check, Checking, Phase, QueueConnection};
use super::slices::PieceEnd;
use super::{Answer, Initiator};
use crate::command::{AT_SUBSYSTEM, CONTROLLER_ANY, Sqe, Status, connect_data};
use crate::context::{Context, Watched};
use crate::controller::{self, Admin, Expected, Life, Next, reported};
use crate::export::{host_id, host_nqn};
use crate::fence::quiet_at;
use crate::identify::IDENTIFY_BYTES;
use crate::pdu::{self, Agreed, Kind};
use crate::queue::{Command, Commands, Purpose};
use crate::stream::{BUFFER_BYTES, DATA_BUFFER_BYTES, Stream};
use crate::sys::Socket;

/// Commands in flight on an admin queue.
const ADMIN_DEPTH: u16 = 31;
/// The longest data of a superblock's granule.
const SUPERBLOCK_BYTES_MAX: u32 = 16 << 10;

impl Initiator {
    /// Begins an association, where one may be tried.
    pub(super) fn connect(&mut self, index: u32, cx: &mut Context<'_>) {
        let Some(peer) = self.peers.get(index) else { return };
        let (address, to) = match peer.contact.attempt(cx.now()) {
            Attempt::To(address, to) => (address, to),
            Attempt::Later => return cx.timers.changed(),
            Attempt::Never(error) => return self.fail_waiting(index, error, cx),
        };
        self.associations += 1;
        let now = cx.now();
        let association = Association {
            number: self.associations,
            address,
            socket_address: to,
            queues: Vec::with_capacity(usize::from(cx.config.queues) + 1),
            connecting: 0,
            up: false,
            life: Life::default(),
            deadline: cx.after_ms(cx.config.connect_ms_max),
            last_heard: now,
            keep_alive_at: cx.after_ms(keep_alive_pause_ms(cx)),
            transfer_bytes: cx.config.transfer_bytes_max,
            in_capsule_bytes: 0,
            collected: Box::new([0; IDENTIFY_BYTES]),
            checking: None,
            resetting: false,
        };
        if let Some(peer) = self.peers.get_mut(index) {
            peer.association = Some(association);
        }
        cx.timers.changed();
        if let Err(error) = self.open_queue(index, 0, cx) {
            self.fail_association(index, error, cx);
        }
    }

    /// Opens the connection of a queue.
    fn open_queue(&mut self, index: u32, qid: u16, cx: &mut Context<'_>) -> Result<(), Error> {
        let association = self.peers.get_mut(index).and_then(|peer| peer.association.as_mut());
        let association = association.ok_or(ErrorKind::NotFound)?;
        let failed = |error: std::io::Error| net::peer_dead(net::error_of(&error));
        let socket = Socket::new(association.socket_address).map_err(failed)?;
        set_buffers(&socket, cx.config.send_buffer_bytes, cx.config.receive_buffer_bytes).map_err(failed)?;
        socket.connect(association.socket_address).map_err(failed)?;
        let entries = u16::try_from(association.life.entries_max.saturating_sub(1)).unwrap_or(u16::MAX);
        let commands_max = association.life.identity.commands_max;
        let depth = match qid {
            0 => ADMIN_DEPTH,
            _ if commands_max > 0 => cx.config.queue_depth.min(entries).min(commands_max),
            _ => cx.config.queue_depth.min(entries),
        };
        let (at, name) = self.queues.reserve();
        if let Err(error) = cx.epoll.add(&socket, Watched::Queue(name).token(), Interest::BOTH) {
            self.queues.release(at);
            return Err(failed(error));
        }
        let mut stream = Stream::new(socket, if qid == 0 { BUFFER_BYTES } else { DATA_BUFFER_BYTES });
        stream.blocked = true;
        let queue = QueueConnection {
            peer: index,
            number: association.number,
            qid,
            phase: Phase::Connecting,
            stream,
            commands: Commands::new(depth.max(1)),
            backlog: std::collections::VecDeque::with_capacity(depth.into()),
            data_bytes_max: 4_096,
            no_flow_control: false,
            bytes_in_flight: 0,
            interest: Interest::BOTH,
        };
        self.queues.put(at, queue);
        association.queues.push(at);
        Ok(())
    }

    /// The socket of a queue has connected, or failed to: opens NVMe/TCP on it.
    pub(super) fn connected(queue: &mut QueueConnection, cx: &Context<'_>) -> Result<(), Error> {
        let failed = |error: std::io::Error| net::peer_dead(net::error_of(&error));
        queue.stream.socket.take_error().map_err(failed)?;
        queue.stream.socket.set_nodelay().map_err(failed)?;
        set_liveness(&queue.stream.socket, cx.config.peer_silence_ms_max).map_err(failed)?;
        let digests = (cx.config.header_digest, cx.config.data_digest);
        queue.stream.push(pdu::initialize(Kind::IcReq, 0, digests, 0).as_bytes());
        queue.phase = Phase::Opened;
        queue.stream.blocked = false;
        Ok(())
    }

    /// The target has answered ICReq: sends Connect.
    pub(super) fn initialized(
        &self,
        queue: &mut QueueConnection,
        answer: &pdu::Initialize,
        cx: &Context<'_>,
    ) -> Result<(), Error> {
        let (header_digest, data_digest) = (answer.digests & 1 != 0, answer.digests & 2 != 0);
        let unasked = header_digest && !cx.config.header_digest || data_digest && !cx.config.data_digest;
        let limit = answer.limit.get();
        if unasked || limit < 4_096 {
            return Err(ErrorKind::Protocol.into());
        }
        queue.data_bytes_max = limit / 4 * 4;
        queue.stream.agreed = Agreed { header_digest, data_digest, alignment: answer.alignment };
        queue.phase = Phase::Initialized;
        let peer = self.peers.get(queue.peer).ok_or(ErrorKind::NotFound)?;
        let association = peer.association.as_ref().ok_or(ErrorKind::NotFound)?;
        let (controller, keep_alive_ms) = match queue.qid {
            0 => (CONTROLLER_ANY, cx.config.keep_alive_ms),
            _ => (association.life.id, 0),
        };
        let command = Command::new(Purpose::Admin(Admin::Connect), 0, None, 0);
        let (_, cid) = queue.commands.insert(command).ok_or(ErrorKind::Full)?;
        let entries = if queue.qid == 0 { ADMIN_DEPTH + 1 } else { queue.commands.depth() + 1 };
        let sqe = Sqe::connect(cid, queue.qid, entries, keep_alive_ms);
        let data = connect_data(host_id(self.identity), controller, &peer.nqn, &host_nqn(self.identity));
        let bytes = data.as_bytes();
        queue.stream.push(pdu::command(sqe, bytes.len() as u32, queue.stream.agreed).bytes());
        queue.stream.push_bytes(bytes);
        Ok(())
    }

    /// Sends a command on the admin queue. False when the queue is full: the peer is worked on again later.
    pub(super) fn send_admin(
        &mut self,
        index: u32,
        what: Admin,
        sqe: impl FnOnce(u16) -> Sqe,
        cx: &mut Context<'_>,
    ) -> bool {
        self.begins_to_owe(index, cx);
        let association = self.peers.get(index).and_then(|peer| peer.association.as_ref());
        let Some(at) = association.and_then(|association| association.queues.first().copied()) else {
            return false;
        };
        let command = Command::of_association(what, self.sequence_of(what), 0);
        let queue = self.queues.get_mut(at).filter(|queue| queue.stream.has_room(1));
        let Some((queue, (_, cid))) =
            queue.and_then(|queue| queue.commands.insert(command).map(|names| (queue, names)))
        else {
            self.starve(index);
            return false;
        };
        let head = pdu::command(sqe(cid), 0, queue.stream.agreed);
        queue.stream.push(head.bytes());
        if let Err(error) = self.flush_index(at, cx) {
            self.fail_association(index, error, cx);
        }
        true
    }

    /// A command is about to be sent: where no other has no response, the target's silence counts from now.
    pub(super) fn begins_to_owe(&mut self, index: u32, cx: &mut Context<'_>) {
        let association = self.peers.get_mut(index).and_then(|peer| peer.association.as_mut());
        let Some(association) = association else { return };
        let mut queues = association.queues.iter().filter_map(|at| self.queues.get(*at));
        if queues.all(|queue| queue.commands.is_empty()) {
            association.last_heard = cx.now();
            cx.timers.changed();
        }
    }

    /// Acts upon the answers that were received.
    pub(super) fn act(&mut self, cx: &mut Context<'_>) {
        while let Some(answer) = self.answers.pop_front() {
            let current = self.peers.get(answer.peer).and_then(|peer| peer.association.as_ref());
            if current.is_some_and(|association| association.number == answer.number)
                && let Err(error) = self.answered(answer, cx)
            {
                self.fail_association(answer.peer, error, cx);
            }
        }
    }

    fn answered(&mut self, answer: Answer, cx: &mut Context<'_>) -> Result<(), Error> {
        let index = answer.peer;
        if self.sequence_of(answer.what) != answer.sequence {
            // Its region was given up; another one may have its index.
            let association = self.peers.get_mut(index).and_then(|peer| peer.association.as_mut());
            let orphan = Some(Checking::Orphan(answer.sequence));
            if let Some(association) = association.filter(|of| of.checking == orphan) {
                association.checking = None;
                self.list(index);
                cx.timers.wake();
            }
            return Ok(());
        }
        let error = answer.status.error();
        match answer.what {
            Admin::Connect if answer.qid > 0 => match error {
                Some(_) => Err(self.refusal(&answer)),
                None => {
                    self.queue_is_up(index, cx);
                    Ok(())
                }
            },
            Admin::KeepAlive | Admin::Abort => Ok(()),
            Admin::Key(remote) => match error {
                Some(error) => {
                    self.checked(index, remote, Err(error), cx);
                    Ok(())
                }
                None => {
                    self.send_check(index, Admin::Descriptors(remote), cx);
                    Ok(())
                }
            },
            Admin::Descriptors(remote) | Admin::Namespace(remote) => {
                self.check_answered(index, remote, answer, cx);
                Ok(())
            }
            Admin::Superblock(remote) => {
                // Our key was registered, now or before: an owner has preempted it.
                let reserved = self.remotes.get(remote).is_some_and(|of| of.ext.place.reserved);
                let fenced = reserved && answer.status == Status::RESERVATION_CONFLICT;
                let error = error.map(|error| match fenced {
                    true => Error::with_code(ErrorKind::Expelled, error.code),
                    false => error,
                });
                let is_there = error.map_or_else(|| self.has_superblock(index, remote), Err);
                self.checked(index, remote, is_there, cx);
                Ok(())
            }
            Admin::Reset(number) => {
                self.reset_answered(index, number, answer, cx);
                Ok(())
            }
            Admin::Report(remote) => {
                self.report_answered(index, remote, error, cx);
                Ok(())
            }
            Admin::Register(remote, replaced) => {
                self.register_answered(index, remote, error.is_none());
                match error {
                    // Another key of ours is registered.
                    Some(_) if !replaced && answer.status == Status::RESERVATION_CONFLICT => {
                        self.register(index, remote, true, cx);
                    }
                    Some(error) => self.checked(index, remote, Err(error), cx),
                    None => self.after_register(index, remote, cx),
                }
                Ok(())
            }
            Admin::Owner(region) | Admin::Mark(region) => {
                self.owner_answered(region, answer, cx);
                Ok(())
            }
            _ if error.is_some() => Err(self.refusal(&answer)),
            what => self.next_step(index, what, answer.result, cx),
        }
    }

    /// The number of the region that a command is about; 0 for none. It is that of no region once the region
    /// was given up.
    pub(super) fn sequence_of(&self, what: Admin) -> u64 {
        match what {
            Admin::Key(remote)
            | Admin::Descriptors(remote)
            | Admin::Namespace(remote)
            | Admin::Register(remote, _)
            | Admin::Report(remote)
            | Admin::Superblock(remote) => self.remotes.get(remote).map_or(u64::MAX, |of| of.ext.sequence),
            Admin::Owner(region) | Admin::Mark(region) => self.sequence_of_owned(region),
            _ => 0,
        }
    }

    /// The error of an association that the target refused.
    fn refusal(&self, answer: &Answer) -> Error {
        let (status, ours) = (answer.status, self.peers.get(answer.peer).is_some_and(|peer| peer.ours));
        // Only a target that does not know the subsystem is another incarnation. Any other parameter may be
        // wrong while the old one lives.
        let other = answer.what == Admin::Connect && answer.qid == 0 && answer.result == AT_SUBSYSTEM;
        let kind = match status {
            Status::CONNECT_PARAMETERS if ours && other => ErrorKind::PeerRestarted,
            Status::CONNECT_HOST if ours => ErrorKind::Expelled,
            _ => ErrorKind::PeerDead,
        };
        Error::with_code(kind, status.0.into())
    }

    fn next_step(&mut self, index: u32, what: Admin, result: u64, cx: &mut Context<'_>) -> Result<(), Error> {
        let queues = u16::from(cx.config.queues);
        let peer = self.peers.get_mut(index).ok_or(ErrorKind::NotFound)?;
        let association = peer.association.as_mut().ok_or(ErrorKind::NotFound)?;
        let next = association.life.answered(what, result, &association.collected, queues)?;
        if what == Admin::Connect {
            peer.contact.welcomed(association.address);
        }
        match next {
            Next::Send(step) => {
                self.send_admin(index, step, |cid| controller::sqe_of(step, cid, queues), cx);
            }
            Next::Open(count) => {
                let identity = association.life.identity;
                let limit = identity.transfer_bytes_max.unwrap_or(u32::MAX);
                // A piece is of whole blocks, and these are not larger than a granule.
                let granule = cx.config.granule_bytes;
                association.transfer_bytes = limit.min(cx.config.transfer_bytes_max) / granule * granule;
                association.in_capsule_bytes = identity.in_capsule_bytes.min(cx.config.in_capsule_bytes_max);
                association.connecting = count;
                if association.transfer_bytes < cx.config.granule_bytes {
                    return Err(ErrorKind::Protocol.into());
                }
                for qid in 1..=count {
                    self.open_queue(index, qid, cx)?;
                }
            }
        }
        Ok(())
    }

    /// One more I/O queue is up; with the last one, the association is.
    fn queue_is_up(&mut self, index: u32, cx: &mut Context<'_>) {
        let Some(peer) = self.peers.get_mut(index) else { return };
        let Some(association) = &mut peer.association else { return };
        association.connecting = association.connecting.saturating_sub(1);
        if association.connecting > 0 {
            return;
        }
        association.up = true;
        let number = association.number;
        peer.checks.clear();
        let waiting = |remote: &te_fabric::RemoteRegion<super::RemoteExt>| {
            remote.peer == index && !remote.ext.waiting.is_empty()
        };
        for at in 0..self.remotes.bound() {
            if let Some(remote) = self.remotes.get_mut(at).filter(|remote| waiting(remote)) {
                remote.ext.check = Check::Asked(number);
                peer.checks.push_back(at);
            }
        }
        cx.stats.associations += 1;
        cx.timers.wake();
        self.list(index);
    }

    // Checks of remote regions.

    /// Begins the next check, if none is under way.
    pub(super) fn begin_check(&mut self, index: u32, cx: &mut Context<'_>) {
        let Some(peer) = self.peers.get_mut(index) else { return };
        let Some(association) = peer.association.as_mut().filter(|of| of.up && of.checking.is_none()) else {
            return;
        };
        let Some(remote) = peer.checks.pop_front() else { return };
        association.checking = Some(Checking::Remote(remote));
        let first = if peer.ours { Admin::Key(remote) } else { Admin::Descriptors(remote) };
        self.send_check(index, first, cx);
    }

    fn send_check(&mut self, index: u32, step: Admin, cx: &mut Context<'_>) {
        let (Admin::Key(at) | Admin::Descriptors(at) | Admin::Namespace(at)) = step else { return };
        let Some(remote) = self.remotes.get(at) else { return };
        let (nsid, key) = (remote.ext.place.nsid, remote.key);
        let incarnation = self.peers.get(index).map_or(0, |peer| peer.contact.incarnation());
        let sqe = |cid: u16| match step {
            Admin::Key(_) => controller::key_sqe(cid, nsid, key, incarnation),
            _ => {
                let mut sqe = controller::sqe_of(step, cid, 0);
                sqe.nsid.set(nsid);
                sqe
            }
        };
        if !self.send_admin(index, step, sqe, cx) {
            self.check_later(index, at);
        }
    }

    /// A step of a check could not be sent: the check begins anew once there is room.
    fn check_later(&mut self, index: u32, remote: u32) {
        self.starve(index);
        let Some(peer) = self.peers.get_mut(index) else { return };
        if let Some(association) = &mut peer.association {
            association.checking = None;
        }
        peer.checks.push_front(remote);
    }

    fn expected(&self, remote: u32, cx: &Context<'_>) -> Option<Expected> {
        let of = self.remotes.get(remote)?;
        Some(Expected {
            nguid: of.ext.place.nguid,
            first: of.ext.place.first,
            bytes: of.len,
            whole: of.ext.place.ours,
            granule: cx.config.granule_bytes,
        })
    }

    fn check_answered(&mut self, index: u32, remote: u32, answer: Answer, cx: &mut Context<'_>) {
        let Some(expected) = self.expected(remote, cx) else { return };
        let Some(association) = self.peers.get(index).and_then(|peer| peer.association.as_ref()) else {
            return;
        };
        if let Some(error) = answer.status.error() {
            return self.checked(index, remote, Err(error), cx);
        }
        if let Admin::Descriptors(_) = answer.what {
            return match expected.check_identity(&association.collected) {
                Ok(()) => self.send_check(index, Admin::Namespace(remote), cx),
                Err(error) => self.checked(index, remote, Err(error), cx),
            };
        }
        match expected.check_blocks(&association.collected) {
            Err(error) => self.checked(index, remote, Err(error), cx),
            Ok(block) => {
                if let Some(of) = self.remotes.get_mut(remote) {
                    of.ext.block = block;
                }
                self.after_blocks(index, remote, cx);
            }
        }
    }

    /// The namespace is the right one: a client of a reserved namespace registers its key, once.
    fn after_blocks(&mut self, index: u32, remote: u32, cx: &mut Context<'_>) {
        let Some(of) = self.remotes.get(remote) else { return };
        let Some(peer) = self.peers.get_mut(index) else { return };
        let nsid = of.ext.place.nsid;
        if !of.ext.place.reserved || peer.registered.contains(&nsid) {
            return self.after_register(index, remote, cx);
        }
        if !self.send_collecting(index, Admin::Report(remote), |cid| controller::report_sqe(cid, nsid), cx) {
            self.check_later(index, remote);
        }
    }

    /// What is registered with a namespace before the client registers. Where a Register of before has no
    /// response, it was carried out, or was not; and where it was, the owner may have fenced this client
    /// since, which then must not register again. The generation, which grows with each change, tells them
    /// apart.
    fn report_answered(&mut self, index: u32, remote: u32, error: Option<Error>, cx: &mut Context<'_>) {
        let Some(nsid) = self.remotes.get(remote).map(|of| of.ext.place.nsid) else { return };
        let host = host_id(self.identity);
        let Some(peer) = self.peers.get_mut(index) else { return };
        let Some(association) = &peer.association else { return };
        let (generation, key) = match error {
            None => reported(&association.collected, &host),
            Some(_) => (0, None),
        };
        let generation = error.is_none().then_some(generation);
        if key == Some(self.identity) {
            self.register_answered(index, remote, true);
            return self.after_register(index, remote, cx);
        }
        match peer.registering.iter().find(|(of, _)| *of == nsid) {
            Some((_, before)) if generation.is_none() || *before != generation => {
                let error = error.unwrap_or(ErrorKind::Expelled.into());
                return self.checked(index, remote, Err(error), cx);
            }
            Some(_) => {}
            None => peer.registering.push((nsid, generation)),
        }
        self.register(index, remote, false, cx);
    }

    /// Register has its response, or its effect was found.
    fn register_answered(&mut self, index: u32, remote: u32, done: bool) {
        let Some(nsid) = self.remotes.get(remote).map(|of| of.ext.place.nsid) else { return };
        let Some(peer) = self.peers.get_mut(index) else { return };
        peer.registering.retain(|(of, _)| *of != nsid);
        if done {
            peer.registered.push(nsid);
        }
    }

    fn register(&mut self, index: u32, remote: u32, replace: bool, cx: &mut Context<'_>) {
        let Some(nsid) = self.remotes.get(remote).map(|of| of.ext.place.nsid) else { return };
        let (what, data) = (Admin::Register(remote, replace), keys(0, self.identity));
        if !self.send_io(index, what, &data, register_client(nsid, replace), cx) {
            if let Some(peer) = self.peers.get_mut(index) {
                peer.registering.retain(|(of, _)| *of != nsid);
            }
            self.check_later(index, remote);
        }
    }

    fn after_register(&mut self, index: u32, remote: u32, cx: &mut Context<'_>) {
        let Some(of) = self.remotes.get(remote) else { return };
        match of.ext.superblock {
            Some(_) => self.read_superblock(index, remote, of.ext.block, cx),
            None => self.checked(index, remote, Ok(()), cx),
        }
    }

    /// Reads the first granule of an adopted range, on an I/O queue.
    fn read_superblock(&mut self, index: u32, remote: u32, block: u32, cx: &mut Context<'_>) {
        let len = block;
        let place = self.remotes.get(remote).map(|of| (of.ext.place.nsid, of.ext.place.first));
        let Some((nsid, first)) = place else { return };
        // The superblock's granule lies before the range.
        let before =
            first.checked_sub(u64::from(cx.config.granule_bytes)).filter(|_| len <= SUPERBLOCK_BYTES_MAX);
        let Some(lba) = before.map(|before| before / u64::from(block)) else {
            return self.checked(index, remote, Err(ErrorKind::Unsupported.into()), cx);
        };
        let sqe = |cid| controller::superblock_sqe(cid, nsid, lba, len, block);
        if !self.send_collecting(index, Admin::Superblock(remote), sqe, cx) {
            self.check_later(index, remote);
        }
    }

    /// Sends a command whose data is collected on an I/O queue. False when the queue is full: the peer is
    /// worked on again later.
    pub(super) fn send_collecting(
        &mut self,
        index: u32,
        what: Admin,
        sqe: impl FnOnce(u16) -> Sqe,
        cx: &mut Context<'_>,
    ) -> bool {
        self.begins_to_owe(index, cx);
        let of = self.peers.get(index).and_then(|peer| peer.association.as_ref());
        let Some(at) = of.and_then(|association| association.queues.get(1).copied()) else { return false };
        let command = Command::of_association(what, self.sequence_of(what), 0);
        let queue = self.queues.get_mut(at).filter(|queue| queue.stream.has_room(1));
        let Some((queue, (_, cid))) =
            queue.and_then(|queue| queue.commands.insert(command).map(|names| (queue, names)))
        else {
            self.starve(index);
            return false;
        };
        queue.stream.push(pdu::command(sqe(cid), 0, queue.stream.agreed).bytes());
        if let Err(error) = self.flush_index(at, cx) {
            self.fail_association(index, error, cx);
        }
        true
    }

    fn has_superblock(&self, index: u32, remote: u32) -> Result<(), Error> {
        let association = self.peers.get(index).and_then(|peer| peer.association.as_ref());
        let superblock = self.remotes.get(remote).and_then(|of| of.ext.superblock.as_ref());
        match (association, superblock) {
            (Some(association), Some(superblock)) if superblock.is_in(&association.collected[..]) => Ok(()),
            _ => Err(ErrorKind::Stale.into()),
        }
    }

    /// The check of a remote region has ended.
    fn checked(&mut self, index: u32, remote: u32, result: Result<(), Error>, cx: &mut Context<'_>) {
        let Some(peer) = self.peers.get_mut(index) else { return };
        let Some(association) = &mut peer.association else { return };
        association.checking = None;
        let (number, ours) = (association.number, peer.ours);
        let Some(of) = self.remotes.get_mut(remote) else { return };
        of.ext.check = match result {
            Ok(()) => Check::Good(number),
            Err(error) if passes(error.kind, ours) => Check::Open,
            Err(error) => Check::Bad(number, error),
        };
        while let Some(slot) = self.remotes.get(remote).and_then(|of| of.ext.waiting.first()) {
            match result {
                Ok(()) => {
                    self.dequeue(slot);
                    self.enqueue(slot, false);
                }
                Err(error) => self.fail(slot, error, cx),
            }
        }
        cx.timers.wake();
        self.list(index);
    }

    // Resets of lost controllers.

    /// Sends the next reset, if none is under way.
    pub(super) fn begin_resets(&mut self, index: u32, cx: &mut Context<'_>) {
        let Some(peer) = self.peers.get_mut(index) else { return };
        let Some(association) = peer.association.as_ref().filter(|of| of.up && !of.resetting) else { return };
        if association.life.identity.resets_max == 0 {
            return;
        }
        let Some(doubt) = peer.doubts.to_reset() else { return };
        let sqe = |cid| controller::reset_sqe(cid, doubt.id, doubt.instance, doubt.random);
        let sent = self.send_admin(index, Admin::Reset(doubt.number), sqe, cx);
        if let Some(association) = self.peers.get_mut(index).and_then(|peer| peer.association.as_mut()) {
            association.resetting = sent;
        }
    }

    fn reset_answered(&mut self, index: u32, number: u32, answer: Answer, cx: &mut Context<'_>) {
        let Some(peer) = self.peers.get_mut(index) else { return };
        if let Some(association) = &mut peer.association {
            association.resetting = false;
        }
        let proved = controller::proves_reset(answer.status, answer.result);
        if peer.doubts.reset(number, proved) {
            cx.stats.fenced_by_reset += 1;
        } else if peer.doubts.to_reset().is_none() && !peer.doubts.may_pass() {
            // The target refuses the proof that it offers, and there is none other.
            let error = answer.status.error().unwrap_or(ErrorKind::Unsupported.into());
            self.settle_fences(index, cx);
            self.fail_fences(index, error, |_| true);
        }
        self.list(index);
        cx.timers.wake();
    }

    // The end.

    /// Ends an association: its sockets are closed with what is unsent, its commands have failed, and what of
    /// them may still land is noted.
    pub(super) fn fail_association(&mut self, index: u32, error: Error, cx: &mut Context<'_>) {
        let Some(association) = self.peers.get_mut(index).and_then(|peer| peer.association.take()) else {
            return;
        };
        let mut oldest = None;
        for at in &association.queues {
            let Some(queue) = self.queues.take(*at) else { continue };
            self.queues.release(*at);
            reset_on_close(&queue.stream.socket);
            for (_, command) in queue.commands.iter() {
                let is_write = matches!(command.purpose, Purpose::Write | Purpose::Admin(Admin::Mark(_)));
                if is_write {
                    let stamp = if command.live { self.clock } else { command.stamp };
                    oldest = Some(oldest.map_or(stamp, |oldest: u64| oldest.min(stamp)));
                }
                if command.live && !matches!(command.purpose, Purpose::Admin(_)) {
                    let end = if is_write { PieceEnd::Failed(error) } else { PieceEnd::Refused(error) };
                    self.end_piece(command.slot, end, cx);
                }
            }
        }
        let Some(peer) = self.peers.get_mut(index) else { return };
        if let Some(stamp) = oldest {
            let identity = &association.life.identity;
            let quiet = quiet_at(cx.now(), identity, cx.config.keep_alive_ms, cx.config.quiesce_ms);
            // Our own target may have been stopped for any time: it proves more, by itself.
            peer.doubts.add(association.life.id, identity, stamp, quiet.filter(|_| !peer.ours));
        }
        if association.up {
            cx.stats.associations_lost += 1;
        }
        while let Some(slot) = self.peers.get(index).and_then(|peer| peer.pending.first()) {
            let begun = self.operations.get(slot).is_some_and(|operation| operation.issued > 0);
            if begun {
                self.fail(slot, error, cx);
            } else {
                self.dequeue(slot);
                self.enqueue(slot, true);
            }
        }
        self.retry_later(index, &association, error, cx);
        cx.timers.changed();
        cx.timers.wake();
    }

    /// Decides when a lost peer is tried again.
    fn retry_later(&mut self, index: u32, lost: &Association, error: Error, cx: &mut Context<'_>) {
        let (now, pause_ms_max) = (cx.now(), cx.config.reconnect_ms_max);
        let Some(peer) = self.peers.get_mut(index) else { return };
        if lost.up {
            peer.contact.back_off(now, pause_ms_max);
            return;
        }
        match peer.contact.refused(lost.address, error, now, pause_ms_max) {
            Refusal::NextAddress => self.list(index),
            Refusal::Final(error) | Refusal::Paused(error) => self.fail_waiting(index, error, cx),
        }
    }

    /// Ends what waits for a peer that cannot be reached.
    fn fail_waiting(&mut self, index: u32, error: Error, cx: &mut Context<'_>) {
        for at in 0..self.remotes.bound() {
            let of_peer = |remote: &&te_fabric::RemoteRegion<super::RemoteExt>| remote.peer == index;
            while let Some(slot) = self.remotes.get(at).filter(of_peer).and_then(|of| of.ext.waiting.first())
            {
                self.fail(slot, error, cx);
            }
        }
        let Some(peer) = self.peers.get_mut(index) else { return };
        if peer.ours && peer.contact.is_harmless(&KnownIncarnations::default()) {
            peer.doubts.clear();
        }
        self.settle_fences(index, cx);
        // Where time alone is a proof, the target need not answer.
        if self.peers.get(index).is_some_and(|peer| !peer.doubts.may_pass()) {
            self.fail_fences(index, error, |_| true);
        }
        cx.timers.wake_if(self.has_completions());
    }

    /// The deadlines of an association.
    pub(super) fn look_at_association(&mut self, index: u32, next: &mut Earliest, cx: &mut Context<'_>) {
        let now = cx.now();
        let Some(peer) = self.peers.get(index) else { return };
        let Some(association) = &peer.association else { return };
        if !association.up {
            if now >= association.deadline {
                self.fail_association(index, ErrorKind::PeerDead.into(), cx);
            } else {
                next.note(Some(association.deadline));
                let admin = association.queues.first().and_then(|at| self.queues.get(*at));
                if admin.is_some_and(|queue| queue.phase == Phase::Up) {
                    self.keep_alive(index, next, cx);
                }
            }
            return;
        }
        let owes = association.queues.iter().filter_map(|at| self.queues.get(*at));
        let owes = owes.into_iter().any(|queue| !queue.commands.is_empty());
        let silence = core::time::Duration::from_millis(cx.config.peer_silence_ms_max.into());
        if owes && now >= association.last_heard + silence {
            return self.fail_association(index, ErrorKind::PeerDead.into(), cx);
        }
        if owes {
            next.note(Some(association.last_heard + silence));
        }
        self.keep_alive(index, next, cx);
    }

    /// Sends Keep Alive when it is due.
    fn keep_alive(&mut self, index: u32, next: &mut Earliest, cx: &mut Context<'_>) {
        let association = self.peers.get(index).and_then(|peer| peer.association.as_ref());
        let Some(association) = association else { return };
        if cx.now() >= association.keep_alive_at {
            let again = cx.after_ms(keep_alive_pause_ms(cx));
            if let Some(association) = self.peers.get_mut(index).and_then(|peer| peer.association.as_mut()) {
                association.keep_alive_at = again;
            }
            self.send_admin(index, Admin::KeepAlive, |cid| controller::sqe_of(Admin::KeepAlive, cid, 0), cx);
            next.note(Some(again));
        } else {
            next.note(Some(association.keep_alive_at));
        }
    }
}

/// Whether the error of a check may be gone the next time, on the same association: the kernel's target
/// answers with a path-related status while a namespace is disabled, and a target of another vendor may get
/// a namespace later.
fn passes(kind: ErrorKind, ours: bool) -> bool {
    matches!(kind, ErrorKind::PeerDead | ErrorKind::Rail) || kind == ErrorKind::NotFound && !ours
}

/// The time between two Keep Alives: the target has to hear us, and we have to hear the target.
fn keep_alive_pause_ms(cx: &Context<'_>) -> u32 {
    (cx.config.keep_alive_ms.min(cx.config.peer_silence_ms_max) / 3).max(1)
}
