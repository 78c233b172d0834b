//! The state that the devices of one fabric share, and the control path: devices, queue pairs, registrations,
//! faults. `wire.rs` moves the packets.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};
use te_core::testkit::Rng;
use te_core::{Error, MemSpan};

use super::config::{DeviceConfig, LinkConfig, Pace, Refusal, SimConfig, SimCounters, errno};
use super::neighbour::Neighbour;
use super::packet::{Request, Response};
use super::queue::{PSN_MASK, SendQueue};
use crate::sys::dma::{Mapping, MrTable};
use crate::sys::verbs::{
    AsyncEvent, Gid, GidKind, MrAccess, Path, Qp, QpConfig, QpStep, Registration, WcStatus, WorkCompletion,
};

/// The number of every device's first queue pair: numbers repeat from device to device, as on real ones.
const FIRST_QP_NUMBER: u32 = 0x11;
/// A time that does not come.
pub(super) const NEVER: u64 = u64::MAX;

pub(super) struct World {
    pub(super) now: u64,
    pub(super) config: SimConfig,
    pub(super) rng: Rng,
    pub(super) devices: Vec<Device>,
    /// By queue pair, in the order in which they were made. Never shrinks.
    pub(super) ends: Vec<End>,
    /// As `ends`.
    pub(super) senders: Vec<Sender>,
    /// `links[from][to]`.
    pub(super) links: Vec<Vec<LinkConfig>>,
    /// (time, order of scheduling, queue pair): the sender that runs next is on top.
    wakes: BinaryHeap<Reverse<(u64, u64, u32)>>,
    wake_count: u64,
    /// Counts the changes after which a queue pair may reach another peer.
    pub(super) path_changes: u64,
    /// Free payload buffers.
    pub(super) buffers: Vec<Vec<u8>>,
    pub(super) counters: SimCounters,
}

pub(super) struct Device {
    pub(super) config: DeviceConfig,
    pub(super) alive: bool,
    pub(super) active: bool,
    lid: u16,
    pub(super) mrs: MrTable,
    /// Queue pairs by number, from `FIRST_QP_NUMBER` on.
    numbers: Vec<u32>,
    qp_count: u32,
    cq: VecDeque<Cqe>,
    pub(super) cq_failed: bool,
    armed: bool,
    events: VecDeque<AsyncEvent>,
    /// Readable: of the completion channel, and of asynchronous events. The `SimDevice` has them as well.
    pub(super) fds: [Option<Arc<EventFd>>; 2],
    pub(super) faults: Faults,
    pub(super) neighbour: Neighbour,
}

/// The faults that a test has requested of one device.
#[derive(Default)]
pub(super) struct Faults {
    /// errno, and how many calls fail with it.
    pub(super) registrations: Option<(i32, u32)>,
    /// As `registrations`.
    pub(super) qp_creations: Option<(i32, u32)>,
    /// As `registrations`.
    pub(super) qp_steps: Option<(i32, u32)>,
    /// How arriving requests are refused, and how many.
    pub(super) refusal: Option<(Refusal, u32)>,
    /// Packets that are executed although their queue pair is in error.
    pub(super) lingering: u32,
    /// After this many successful completions, one with this status.
    pub(super) status: Option<(u32, WcStatus)>,
}

struct Cqe {
    completion: WorkCompletion,
    qp: u32,
    /// When this was polled, the slots of the send queue before this position are free.
    releases: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Reset,
    Init,
    Ready,
    Error,
    /// Destroyed; packets that it sent may still be on the wire.
    Gone,
}

/// A queue pair as a target.
pub(super) struct End {
    pub(super) device: usize,
    pub(super) number: u32,
    pub(super) state: State,
    pub(super) access: MrAccess,
    pub(super) path: Option<Path>,
    /// The source GID of its packets.
    own_gid: Option<Gid>,
    pub(super) expected_psn: u32,
    /// Packet numbers received in order so far.
    pub(super) received: u64,
    /// A gap was reported, and nothing is reported until it is filled.
    pub(super) gap_reported: bool,
    /// Executed READs whose last response is on the wire.
    pub(super) reads_open: u32,
    /// `World::path_changes` at the last lookup, and the queue pair that it found.
    peer: (u64, Option<usize>),
}

/// A queue pair as an initiator, with its packets on the wire.
pub(super) struct Sender {
    pub(super) queue: SendQueue,
    /// Packet number of the next request to be posted.
    pub(super) psn: u32,
    /// The packet number after the highest that was ever sent.
    pub(super) psn_sent: u32,
    pub(super) reads_open: u32,
    pub(super) retries: u8,
    pub(super) rnr_retries: u8,
    pub(super) ack_deadline: u64,
    /// The peer was not ready: nothing is sent before this time.
    pub(super) hold_until: u64,
    pub(super) wire_free_at: u64,
    /// Packets to the peer. They outlive the queue pair.
    pub(super) requests: VecDeque<Request>,
    pub(super) request_due_last: u64,
    /// Packets from the peer.
    pub(super) responses: VecDeque<Response>,
    pub(super) response_due_last: u64,
    wake_at: u64,
}

impl World {
    pub(super) fn new(seed: u64, config: SimConfig) -> Self {
        Self {
            now: 0,
            config,
            rng: Rng::new(seed),
            devices: Vec::new(),
            ends: Vec::new(),
            senders: Vec::new(),
            links: Vec::new(),
            wakes: BinaryHeap::with_capacity(256),
            wake_count: 0,
            path_changes: 1,
            // Enough for the packets of most tests, so that posting and polling allocate nothing.
            buffers: (0..512).map(|_| Vec::with_capacity(4_096)).collect(),
            counters: SimCounters::default(),
        }
    }

    pub(super) fn add_device(&mut self, mut config: DeviceConfig) -> usize {
        let index = self.devices.len();
        if config.name.is_empty() {
            config.name = format!("sim{index}");
        }
        if config.gids.is_empty() {
            config.gids = default_gids(index, config.infiniband);
        }
        let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        let event_fd = || EventFd::from_flags(flags).ok().map(Arc::new);
        self.devices.push(Device {
            alive: true,
            active: true,
            lid: if config.infiniband { index as u16 + 1 } else { 0 },
            mrs: MrTable::default(),
            numbers: Vec::new(),
            qp_count: 0,
            cq: VecDeque::with_capacity(config.cq_depth as usize),
            cq_failed: false,
            armed: false,
            events: VecDeque::new(),
            fds: [event_fd(), event_fd()],
            faults: Faults::default(),
            neighbour: Neighbour::default(),
            config,
        });
        for row in &mut self.links {
            row.push(self.config.link);
        }
        self.links.push(vec![self.config.link; index + 1]);
        self.path_changes += 1;
        index
    }

    /// The process that opened a device has ended: its queue pairs and registrations end with it.
    pub(super) fn drop_device(&mut self, device: usize) {
        for qp in 0..self.ends.len() {
            if self.ends[qp].device == device && self.ends[qp].state != State::Gone {
                self.remove_qp(qp);
            }
        }
        let device = &mut self.devices[device];
        device.alive = false;
        device.mrs.clear();
        device.fds = [None, None];
        self.path_changes += 1;
    }

    /// The device fails; the process that opened it goes on.
    pub(super) fn kill_device(&mut self, device: usize) {
        if !self.devices[device].alive {
            return;
        }
        self.devices[device].alive = false;
        self.path_changes += 1;
        for qp in 0..self.ends.len() {
            if self.ends[qp].device == device && self.ends[qp].state != State::Gone {
                self.ends[qp].state = State::Error;
                self.senders[qp].stop();
            }
        }
        let device = &mut self.devices[device];
        device.raise(AsyncEvent::DeviceFatal);
        device.signal_completion();
    }

    pub(super) fn set_port(&mut self, device: usize, active: bool) {
        let device = &mut self.devices[device];
        if device.active != active {
            device.active = active;
            device.raise(if active { AsyncEvent::PortActive } else { AsyncEvent::PortError });
        }
    }

    pub(super) fn set_gid(&mut self, device: usize, index: usize, gid: Option<([u8; 16], GidKind)>) {
        let gids = &mut self.devices[device].config.gids;
        if gids.len() <= index {
            gids.resize(index + 1, None);
        }
        gids[index] = gid.map(|(raw, kind)| Gid { index: index as u32, raw, kind });
        self.path_changes += 1;
        self.devices[device].raise(AsyncEvent::GidChange);
    }

    pub(super) fn lid(&self, device: usize) -> u16 {
        self.devices[device].lid
    }

    // Registrations.

    /// Registers a span, which `mapping` keeps mapped if it is part of a dma-buf.
    pub(super) fn register(
        &mut self,
        device: usize,
        (span, mapping): (MemSpan, Option<Mapping>),
        address: u64,
        access: MrAccess,
    ) -> Result<Registration, Error> {
        let first_tag = self.rng.next() as u8;
        let device = &mut self.devices[device];
        device.check_alive()?;
        if let Some(code) = take_fault(&mut device.faults.registrations) {
            return Err(errno(code));
        }
        let writable = access.contains(MrAccess::LOCAL_WRITE) || !access.contains(MrAccess::REMOTE_WRITE);
        let length = span.len() as u64;
        if !writable || span.is_empty() || length > device.config.mr_bytes_max {
            return Err(errno(libc::EINVAL));
        }
        let pinned = device.mrs.pinned_bytes().saturating_add(length);
        if device.mrs.live() >= device.config.mr_count_max || pinned > device.config.pinned_bytes_max {
            return Err(errno(libc::ENOMEM));
        }
        let memory = (span, mapping);
        let (handle, local_key, remote_key) = device.mrs.insert(memory, address, access, first_tag);
        Ok(Registration { handle, local_key, remote_key })
    }

    pub(super) fn deregister(&mut self, device: usize, handle: u64) -> Result<(), Error> {
        if self.devices[device].mrs.remove(handle) { Ok(()) } else { Err(errno(libc::EINVAL)) }
    }

    // Queue pairs.

    pub(super) fn create_qp(&mut self, device_index: usize, wanted: QpConfig) -> Result<Qp, Error> {
        let index = self.ends.len() as u32;
        let device = &mut self.devices[device_index];
        device.check_alive()?;
        if let Some(code) = take_fault(&mut device.faults.qp_creations) {
            return Err(errno(code));
        }
        let limits = &device.config;
        if wanted.depth == 0 || wanted.depth > limits.qp_depth_max || wanted.sges > limits.sge_max {
            return Err(errno(libc::EINVAL));
        }
        if device.qp_count >= limits.qp_count_max {
            return Err(errno(libc::ENOMEM));
        }
        let config = QpConfig {
            sges: wanted.sges.max(1),
            inline_bytes: wanted.inline_bytes.min(limits.inline_bytes_max),
            ..wanted
        };
        let number = FIRST_QP_NUMBER + device.numbers.len() as u32;
        device.numbers.push(index);
        device.qp_count += 1;
        self.ends.push(End {
            device: device_index,
            number,
            state: State::Reset,
            access: MrAccess::empty(),
            path: None,
            own_gid: None,
            expected_psn: 0,
            received: 0,
            gap_reported: false,
            reads_open: 0,
            peer: (0, None),
        });
        self.senders.push(Sender::new(config));
        self.path_changes += 1;
        Ok(Qp { handle: crate::sys::verbs::QpHandle(u64::from(index)), number, config })
    }

    /// The index of the queue pair with this handle, if it is of this device and not destroyed.
    pub(super) fn qp(&self, device: usize, handle: u64) -> Result<usize, Error> {
        let index = usize::try_from(handle).unwrap_or(usize::MAX);
        match self.ends.get(index) {
            Some(end) if end.device == device && end.state != State::Gone => Ok(index),
            _ => Err(errno(libc::EINVAL)),
        }
    }

    pub(super) fn qp_by_number(&self, device: usize, number: u32) -> Option<usize> {
        let offset = number.checked_sub(FIRST_QP_NUMBER)?;
        let qp = *self.devices[device].numbers.get(offset as usize)? as usize;
        (self.ends[qp].state != State::Gone).then_some(qp)
    }

    pub(super) fn modify_qp(&mut self, qp: usize, step: QpStep) -> Result<(), Error> {
        let end = &mut self.ends[qp];
        let device = &mut self.devices[end.device];
        device.check_alive()?;
        if let Some(code) = take_fault(&mut device.faults.qp_steps) {
            return Err(errno(code));
        }
        match (step, end.state) {
            (QpStep::Init(access), State::Reset) => {
                end.access = access;
                end.state = State::Init;
            }
            (QpStep::Connect(path), State::Init) => {
                let own_gid = device.config.gids.get(path.gid_index as usize).copied().flatten();
                let numbers_fit = (path.psn | path.peer_psn | path.peer_qp) & !PSN_MASK == 0;
                let mtu_fits = [256, 512, 1024, 2048, 4096].contains(&path.mtu_bytes)
                    && path.mtu_bytes <= device.config.mtu_bytes;
                let limits_fit = path.reads_to_peer.max(path.reads_from_peer) <= device.config.reads_max
                    && path.retries <= 7
                    && path.rnr_retries <= 7
                    && path.timeout_exponent <= 31;
                if own_gid.is_none() || !numbers_fit || !mtu_fits || !limits_fit {
                    return Err(errno(libc::EINVAL));
                }
                end.own_gid = own_gid;
                end.expected_psn = path.peer_psn;
                end.path = Some(path);
                end.state = State::Ready;
                let sender = &mut self.senders[qp];
                (sender.psn, sender.psn_sent) = (path.psn, path.psn);
                self.path_changes += 1;
            }
            (QpStep::Error, _) => self.qp_to_error(qp),
            _ => return Err(errno(libc::EINVAL)),
        }
        Ok(())
    }

    /// Puts a queue pair in error: everything posted is flushed, in order, and arriving packets are not
    /// executed any more.
    pub(super) fn qp_to_error(&mut self, qp: usize) {
        if matches!(self.ends[qp].state, State::Error | State::Gone) {
            return;
        }
        self.ends[qp].state = State::Error;
        self.senders[qp].stop();
        self.flush(qp);
    }

    /// Completes everything that is posted as flushed.
    pub(super) fn flush(&mut self, qp: usize) {
        let (device, number) = (self.ends[qp].device, self.ends[qp].number);
        while self.senders[qp].queue.done < self.senders[qp].queue.tail {
            let queue = &mut self.senders[qp].queue;
            let id = queue.at(queue.done).id;
            queue.done += 1;
            queue.catch_up();
            let releases = queue.done;
            self.counters.flushed += 1;
            let completion = WorkCompletion {
                id,
                qp_number: number,
                status: WcStatus::Flushed,
                code: status_code(WcStatus::Flushed),
            };
            self.complete(device, Cqe { completion, qp: qp as u32, releases });
        }
    }

    pub(super) fn remove_qp(&mut self, qp: usize) {
        let device = &mut self.devices[self.ends[qp].device];
        device.cq.retain(|cqe| cqe.qp != qp as u32);
        device.qp_count -= 1;
        self.ends[qp].state = State::Gone;
        self.senders[qp].stop();
        self.senders[qp].queue = SendQueue::empty();
        self.path_changes += 1;
    }

    /// The queue pair that packets of `qp` reach at this moment.
    #[inline]
    pub(super) fn peer_of(&mut self, qp: usize) -> Option<usize> {
        let (path_changes, peer) = self.ends[qp].peer;
        if path_changes == self.path_changes {
            return peer;
        }
        let peer = self.find_peer(qp);
        self.ends[qp].peer = (self.path_changes, peer);
        peer
    }

    fn find_peer(&self, qp: usize) -> Option<usize> {
        let end = &self.ends[qp];
        let (path, own_gid) = (end.path?, end.own_gid?);
        let device = &self.devices[end.device];
        // A queue pair whose source GID was removed from the table reaches nothing.
        if device.config.gids.get(own_gid.index as usize).copied().flatten() != Some(own_gid) {
            return None;
        }
        let target = self.devices.iter().position(|target| {
            target.alive
                && if device.config.infiniband {
                    target.config.infiniband && target.lid == path.peer_lid
                } else {
                    target.has_gid(path.peer_gid, own_gid.kind)
                }
        })?;
        let peer = self.qp_by_number(target, path.peer_qp)?;
        // A connected RoCE queue pair accepts packets that are addressed to its own GID, in its own
        // encapsulation.
        let addressed = |gid: Gid| gid.raw == path.peer_gid && gid.kind == own_gid.kind;
        (device.config.infiniband || self.ends[peer].own_gid.is_some_and(addressed)).then_some(peer)
    }

    // Completions.

    /// Completes the oldest request of `qp` with success. False: a fault was requested, and the queue pair is
    /// in error now.
    #[inline]
    pub(super) fn complete_oldest(&mut self, qp: usize) -> bool {
        let end = &self.ends[qp];
        let (device, number) = (end.device, end.number);
        if let Some((left, status)) = &mut self.devices[device].faults.status {
            if *left == 0 {
                let status = *status;
                self.devices[device].faults.status = None;
                self.fail_oldest(qp, status);
                return false;
            }
            *left -= 1;
        }
        let queue = &mut self.senders[qp].queue;
        let wqe = *queue.at(queue.done);
        queue.done += 1;
        queue.catch_up();
        let releases = queue.done;
        self.counters.succeeded += 1;
        if wqe.signaled {
            self.complete_success(device, number, qp, wqe.id, releases);
        }
        true
    }

    /// Reports a request that succeeded.
    #[inline]
    pub(super) fn complete_success(&mut self, device: usize, number: u32, qp: usize, id: u64, releases: u64) {
        let completion = WorkCompletion { id, qp_number: number, status: WcStatus::Success, code: 0 };
        self.complete(device, Cqe { completion, qp: qp as u32, releases });
    }

    /// Completes the oldest request of `qp` with `status`, puts the queue pair in error and flushes the rest.
    pub(super) fn fail_oldest(&mut self, qp: usize, status: WcStatus) {
        let (device, number) = (self.ends[qp].device, self.ends[qp].number);
        let queue = &mut self.senders[qp].queue;
        if queue.done < queue.tail {
            let id = queue.at(queue.done).id;
            queue.done += 1;
            queue.catch_up();
            let releases = queue.done;
            self.counters.failed += 1;
            let completion = WorkCompletion { id, qp_number: number, status, code: status_code(status) };
            self.complete(device, Cqe { completion, qp: qp as u32, releases });
        }
        self.qp_to_error(qp);
    }

    #[inline]
    fn complete(&mut self, device_index: usize, cqe: Cqe) {
        let device = &mut self.devices[device_index];
        if device.cq_failed {
            return;
        }
        if device.cq.len() < device.config.cq_depth as usize {
            device.cq.push_back(cqe);
            if device.armed {
                device.armed = false;
                device.signal_completion();
            }
            return;
        }
        // A completion that does not fit is lost, and every queue pair of this completion queue fails.
        device.cq_failed = true;
        device.raise(AsyncEvent::CqError);
        device.signal_completion();
        for qp in 0..self.ends.len() {
            if self.ends[qp].device == device_index {
                self.qp_to_error(qp);
            }
        }
    }

    pub(super) fn poll(&mut self, device: usize, out: &mut [WorkCompletion]) -> Result<usize, Error> {
        match self.config.pace {
            Pace::Immediate => self.run_until_idle(),
            Pace::Timed => self.run_until(self.now),
        }
        let device = &mut self.devices[device];
        device.check_alive()?;
        if device.cq_failed {
            return Err(errno(libc::EIO));
        }
        let count = out.len().min(device.cq.len());
        for (out, cqe) in out.iter_mut().zip(device.cq.drain(..count)) {
            *out = cqe.completion;
            self.senders[cqe.qp as usize].queue.released = cqe.releases;
        }
        Ok(count)
    }

    // Time.

    #[inline]
    pub(super) fn schedule(&mut self, qp: usize, at: u64) {
        if at < self.senders[qp].wake_at {
            self.senders[qp].wake_at = at;
            self.wake_count += 1;
            self.wakes.push(Reverse((at, self.wake_count, qp as u32)));
        }
    }

    pub(super) fn next_wake(&mut self) -> Option<u64> {
        while let Some(&Reverse((at, _, qp))) = self.wakes.peek() {
            if self.senders[qp as usize].wake_at == at {
                return Some(at);
            }
            self.wakes.pop();
        }
        None
    }

    pub(super) fn run_until(&mut self, now: u64) {
        while let Some(at) = self.next_wake() {
            if at > now {
                break;
            }
            self.run_next(at);
        }
        self.now = self.now.max(now);
    }

    pub(super) fn run_until_idle(&mut self) {
        while let Some(at) = self.next_wake() {
            self.run_next(at);
        }
    }

    fn run_next(&mut self, at: u64) {
        let Some(Reverse((_, _, qp))) = self.wakes.pop() else { return };
        self.now = self.now.max(at);
        self.senders[qp as usize].wake_at = NEVER;
        self.run_qp(qp as usize);
    }
}

impl Device {
    pub(super) fn check_alive(&self) -> Result<(), Error> {
        if self.alive { Ok(()) } else { Err(errno(libc::EIO)) }
    }

    /// Whether there is room for one more completion.
    pub(super) fn has_room(&self) -> bool {
        !self.cq_failed && self.cq.len() < self.config.cq_depth as usize
    }

    pub(super) fn qp_count(&self) -> u32 {
        self.qp_count
    }

    fn has_gid(&self, raw: [u8; 16], kind: GidKind) -> bool {
        self.config.gids.iter().flatten().any(|gid| gid.raw == raw && gid.kind == kind)
    }

    pub(super) fn raise(&mut self, event: AsyncEvent) {
        self.events.push_back(event);
        signal(self.fds[1].as_deref());
    }

    fn signal_completion(&self) {
        signal(self.fds[0].as_deref());
    }

    pub(super) fn arm(&mut self) {
        self.armed = true;
    }

    pub(super) fn next_event(&mut self) -> Option<AsyncEvent> {
        for fd in self.fds.iter().flatten() {
            // EAGAIN: it was not readable.
            let _ = fd.read();
        }
        let event = self.events.pop_front();
        if !self.events.is_empty() {
            signal(self.fds[1].as_deref());
        }
        event
    }
}

impl Sender {
    fn new(config: QpConfig) -> Self {
        Self {
            queue: SendQueue::new(config),
            psn: 0,
            psn_sent: 0,
            reads_open: 0,
            retries: 0,
            rnr_retries: 0,
            ack_deadline: NEVER,
            hold_until: 0,
            wire_free_at: 0,
            requests: VecDeque::with_capacity(config.depth as usize),
            request_due_last: 0,
            responses: VecDeque::with_capacity(config.depth as usize),
            response_due_last: 0,
            wake_at: NEVER,
        }
    }

    /// Sends nothing more and drops the responses. Packets that are on the wire to the peer stay there.
    fn stop(&mut self) {
        self.responses.clear();
        self.ack_deadline = NEVER;
        self.reads_open = 0;
    }
}

/// The `code` of a completion: `enum ibv_wc_status`.
pub(super) fn status_code(status: WcStatus) -> i32 {
    match status {
        WcStatus::Success => 0,
        WcStatus::Local => 4,
        WcStatus::Flushed => 5,
        WcStatus::RemoteAccess => 10,
        WcStatus::RemoteOperation => 11,
        WcStatus::RetriesExceeded => 12,
        WcStatus::NotReady => 13,
        WcStatus::Other => 21,
    }
}

fn signal(fd: Option<&EventFd>) {
    if let Some(fd) = fd {
        // EAGAIN: it is readable already.
        let _ = fd.write(1);
    }
}

/// The errno of a requested fault, which is counted down.
fn take_fault(fault: &mut Option<(i32, u32)>) -> Option<i32> {
    let (code, left) = fault.as_mut()?;
    let code = *code;
    *left = left.saturating_sub(1);
    if *left == 0 {
        *fault = None;
    }
    Some(code)
}

fn default_gids(device: usize, infiniband: bool) -> Vec<Option<Gid>> {
    let (high, low) = ((device >> 8) as u8, device as u8);
    let link_local = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0x02, 0, 0, 0xff, 0xfe, 0, high, low];
    let ipv4 = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 77, high, low];
    let gid = |index, raw, kind| Some(Gid { index, raw, kind });
    if infiniband {
        vec![gid(0, link_local, GidKind::Infiniband)]
    } else {
        vec![
            gid(0, link_local, GidKind::RoceV1),
            gid(1, link_local, GidKind::RoceV2),
            gid(2, ipv4, GidKind::RoceV1),
            gid(3, ipv4, GidKind::RoceV2),
        ]
    }
}

pub(super) fn locked(world: &Mutex<World>) -> MutexGuard<'_, World> {
    // A test's thread that panics while it holds the lock leaves the world consistent.
    world.lock().unwrap_or_else(PoisonError::into_inner)
}
