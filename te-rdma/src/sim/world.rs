//! Everything that the devices of one fabric share, and the control path: devices, queue pairs,
//! registrations, faults. What moves packets is in `wire.rs`.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};
use te_core::sim::Rng;
use te_core::{Error, MemSpan};

use super::config::{DeviceConfig, LinkConfig, Pace, Refusal, SimConfig, SimCounters, errno};
use super::neighbour::Neighbour;
use super::packet::{Request, Response};
use super::queue::{PSN_MASK, SendQueue};
use crate::sys::dma::MrTable;
use crate::sys::verbs::{
    AsyncEvent, Gid, GidKind, MrAccess, Path, Qp, QpConfig, QpStep, Registration, WcStatus, WorkCompletion,
};

/// The number of every device's first queue pair: two devices have the same numbers, as real ones do.
const FIRST_QP_NUMBER: u32 = 0x11;
/// Never.
pub(super) const NEVER: u64 = u64::MAX;

pub(super) struct World {
    pub(super) now: u64,
    pub(super) config: SimConfig,
    pub(super) rng: Rng,
    pub(super) devices: Vec<Device>,
    /// `ends`, `senders`: by queue pair, in the order in which they were made. Never shrinks.
    pub(super) ends: Vec<End>,
    pub(super) senders: Vec<Sender>,
    /// `links[from][to]`.
    pub(super) links: Vec<Vec<LinkConfig>>,
    /// (when, order of scheduling, queue pair): which sender to look at next.
    wakes: BinaryHeap<Reverse<(u64, u64, u32)>>,
    wake_count: u64,
    /// Grows whenever who reaches whom may have changed.
    pub(super) epoch: u64,
    /// Payload buffers that are free.
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
    completion_fd: Option<EventFd>,
    event_fd: Option<EventFd>,
    pub(super) faults: Faults,
    pub(super) neighbour: Neighbour,
}

/// What was asked to go wrong on one device.
#[derive(Default)]
pub(super) struct Faults {
    /// errno, and how many times.
    pub(super) registrations: Option<(i32, u32)>,
    pub(super) qp_creations: Option<(i32, u32)>,
    pub(super) qp_steps: Option<(i32, u32)>,
    /// Requests that arrive and are turned away.
    pub(super) refusal: Option<(Refusal, u32)>,
    /// Packets that are carried out although their queue pair is in error.
    pub(super) lingering: u32,
    /// After so many good completions, one with this status.
    pub(super) status: Option<(u32, WcStatus)>,
}

struct Cqe {
    completion: WorkCompletion,
    qp: u32,
    /// Slots of the send queue that are free once this was polled: all before this position.
    releases: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Reset,
    Init,
    Ready,
    Error,
    /// Destroyed; packets that left it may still be on the wire.
    Gone,
}

/// A queue pair as its peer sees it.
pub(super) struct End {
    pub(super) device: usize,
    pub(super) number: u32,
    pub(super) state: State,
    pub(super) access: MrAccess,
    pub(super) path: Option<Path>,
    /// The GID that packets go out with.
    own_gid: Option<Gid>,
    pub(super) expected_psn: u32,
    /// Packet numbers used up so far.
    pub(super) received: u64,
    /// A gap was reported; say nothing more until it is filled.
    pub(super) gap_reported: bool,
    /// READs carried out whose last response is on the wire.
    pub(super) reads_open: u32,
    /// Epoch, and who answered at that time.
    peer: (u64, Option<usize>),
}

/// A queue pair as a source of requests, with what is on the wire because of it.
pub(super) struct Sender {
    pub(super) queue: SendQueue,
    /// Of the next request to be posted.
    pub(super) psn: u32,
    /// After the highest that ever left.
    pub(super) psn_sent: u32,
    pub(super) reads_open: u32,
    pub(super) retries: u8,
    pub(super) rnr_retries: u8,
    pub(super) ack_deadline: u64,
    /// The peer was not ready: nothing leaves before.
    pub(super) hold_until: u64,
    pub(super) wire_free_at: u64,
    /// Towards the peer. Outlives the queue pair.
    pub(super) requests: VecDeque<Request>,
    pub(super) request_due_last: u64,
    /// Back from the peer.
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
            epoch: 1,
            // Enough for what is under way in most tests, so that posting and polling allocate nothing.
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
        let event_fd =
            || EventFd::from_value_and_flags(0, EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC).ok();
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
            completion_fd: event_fd(),
            event_fd: event_fd(),
            faults: Faults::default(),
            neighbour: Neighbour::default(),
            config,
        });
        for row in &mut self.links {
            row.push(self.config.link);
        }
        self.links.push(vec![self.config.link; index + 1]);
        self.epoch += 1;
        index
    }

    /// The owner of a device ended: its queue pairs and registrations with it.
    pub(super) fn drop_device(&mut self, device: usize) {
        for qp in 0..self.ends.len() {
            if self.ends[qp].device == device && self.ends[qp].state != State::Gone {
                self.remove_qp(qp);
            }
        }
        let device = &mut self.devices[device];
        device.alive = false;
        device.mrs.clear();
        (device.completion_fd, device.event_fd) = (None, None);
        self.epoch += 1;
    }

    /// The device fails, its owner lives.
    pub(super) fn kill_device(&mut self, device: usize) {
        if !self.devices[device].alive {
            return;
        }
        self.devices[device].alive = false;
        self.epoch += 1;
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
        self.epoch += 1;
        self.devices[device].raise(AsyncEvent::GidChange);
    }

    pub(super) fn lid(&self, device: usize) -> u16 {
        self.devices[device].lid
    }

    // Registrations.

    pub(super) fn register(
        &mut self,
        device: usize,
        span: MemSpan,
        address: u64,
        access: MrAccess,
    ) -> Result<Registration, Error> {
        let first_tag = self.rng.next_u64() as u8;
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
        let (handle, local_key, remote_key) = device.mrs.insert(span, address, access, first_tag);
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
        self.epoch += 1;
        Ok(Qp { handle: crate::sys::verbs::QpHandle(u64::from(index)), number, config })
    }

    /// The index behind a handle, if it is this device's and not destroyed.
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
                self.epoch += 1;
            }
            (QpStep::Error, _) => self.qp_to_error(qp),
            _ => return Err(errno(libc::EINVAL)),
        }
        Ok(())
    }

    /// Everything posted is flushed, in order; nothing that arrives is carried out any more.
    pub(super) fn qp_to_error(&mut self, qp: usize) {
        if matches!(self.ends[qp].state, State::Error | State::Gone) {
            return;
        }
        self.ends[qp].state = State::Error;
        self.senders[qp].stop();
        self.flush(qp);
    }

    /// Completes what is posted as flushed.
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
        self.epoch += 1;
    }

    /// Who answers to packets of `qp` just now.
    #[inline]
    pub(super) fn peer_of(&mut self, qp: usize) -> Option<usize> {
        let (epoch, peer) = self.ends[qp].peer;
        if epoch == self.epoch {
            return peer;
        }
        let peer = self.find_peer(qp);
        self.ends[qp].peer = (self.epoch, peer);
        peer
    }

    fn find_peer(&self, qp: usize) -> Option<usize> {
        let end = &self.ends[qp];
        let (path, own_gid) = (end.path?, end.own_gid?);
        let device = &self.devices[end.device];
        // A GID that was taken away takes the queue pairs with it that go out under it.
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
        // A connected RoCE queue pair takes what is addressed to its own GID, in its own kind of packets.
        let addressed = |gid: Gid| gid.raw == path.peer_gid && gid.kind == own_gid.kind;
        (device.config.infiniband || self.ends[peer].own_gid.is_some_and(addressed)).then_some(peer)
    }

    // Completions.

    /// The oldest request of `qp` ended well. False: a fault was asked for and the queue pair is in error
    /// now.
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
            self.complete_well(device, number, qp, wqe.id, releases);
        }
        true
    }

    /// Reports a request that ended well.
    #[inline]
    pub(super) fn complete_well(&mut self, device: usize, number: u32, qp: usize, id: u64, releases: u64) {
        let completion = WorkCompletion { id, qp_number: number, status: WcStatus::Success, code: 0 };
        self.complete(device, Cqe { completion, qp: qp as u32, releases });
    }

    /// The oldest request of `qp` failed, so the queue pair does and the rest is flushed.
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
        // A completion that does not fit is lost, and with it every queue pair of this queue.
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

    /// Whether one more completion fits.
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
        signal(self.event_fd.as_ref());
    }

    fn signal_completion(&self) {
        signal(self.completion_fd.as_ref());
    }

    pub(super) fn arm(&mut self) {
        self.armed = true;
    }

    pub(super) fn next_event(&mut self) -> Option<AsyncEvent> {
        for fd in [&self.completion_fd, &self.event_fd].into_iter().flatten() {
            // EAGAIN: it was not readable.
            let _nothing_there = fd.read();
        }
        let event = self.events.pop_front();
        if !self.events.is_empty() {
            signal(self.event_fd.as_ref());
        }
        event
    }

    pub(super) fn event_fds(&self) -> [Option<i32>; 2] {
        use std::os::fd::AsRawFd as _;
        [&self.completion_fd, &self.event_fd].map(|fd| fd.as_ref().map(EventFd::as_raw_fd))
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

    /// Nothing more leaves and nothing that comes back counts. What is on the wire to the peer stays there.
    fn stop(&mut self) {
        self.responses.clear();
        self.ack_deadline = NEVER;
        self.reads_open = 0;
    }
}

/// What `code` of a completion says: `enum ibv_wc_status`.
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
        let _readable_already = fd.write(1);
    }
}

/// The errno of a fault that was asked for, counted down.
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
    // A panic of one test's thread says nothing about the world, whose calls leave it whole.
    world.lock().unwrap_or_else(PoisonError::into_inner)
}
