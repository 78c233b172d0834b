//! Behaviour of providers that the simulated one does not have: flushed work is not completed, queue pairs
//! are not destroyed, completions are reported by file descriptors, keys are used again, the loopback fails.
//! The tests use a simulated device behind a wrapper that misbehaves on demand.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(unsafe_code, reason = "the wrapper passes `register` and `post` on")]

mod common;

use std::io::Write;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use common::{ALL, Block, REGION, REMOTE, config, kind, read, write};
use te_core::{
    Completion, Error, ErrorKind, Instant, MemSpan, Memory, Outcome, RegionId, Slice, Token, Transport,
};
use te_rdma::sim::{DeviceConfig, LinkConfig, SimConfig, SimDevice, SimFabric};
use te_rdma::verbs::{
    AsyncEvent, DeviceInfo, Gid, GidKind, MrAccess, PortInfo, Qp, QpConfig, QpHandle, QpStep, Registrar,
    Registration, Sge, Verbs, WcStatus, WorkCompletion, WorkRequest,
};
use te_rdma::{Config, OpenError, RdmaTransport};

/// The present faults of a device.
#[derive(Debug, Default)]
struct Faults {
    /// Flushed work is not completed.
    swallow_flushes: AtomicBool,
    /// Queue pairs cannot be destroyed.
    refuse_destroy: AtomicBool,
    /// Queue pairs cannot be put in error.
    refuse_error: AtomicBool,
    /// Queue pairs with GIDs of smaller indexes cannot be connected.
    dead_gids: AtomicU32,
    /// How often an event was requested.
    arms: AtomicU64,
    /// The number of registrations that still get `FORCED_KEY` as remote key.
    forced_keys: AtomicU32,
}

const FORCED_KEY: u32 = 0xDEAD;

struct Wrapped {
    device: SimDevice,
    faults: Arc<Faults>,
    /// A completion channel: the test writes to the first end, the transport watches the second.
    channel: Option<(UnixStream, UnixStream)>,
}

fn system(errno: i32) -> Error {
    Error::with_code(ErrorKind::System, errno)
}

impl Registrar for Wrapped {
    unsafe fn register(&self, span: MemSpan, access: MrAccess) -> Result<Registration, Error> {
        // SAFETY: the caller's promise, passed on.
        let mut registration = unsafe { self.device.registrar().register(span, access) }?;
        let left = &self.faults.forced_keys;
        if left.load(Ordering::Relaxed) > 0 {
            left.fetch_sub(1, Ordering::Relaxed);
            registration.remote_key = FORCED_KEY;
        }
        Ok(registration)
    }
}

impl Verbs for Wrapped {
    fn info(&self) -> &DeviceInfo {
        self.device.info()
    }
    fn port(&self) -> Result<PortInfo, Error> {
        self.device.port()
    }
    fn gid(&self, index: u32) -> Result<Option<Gid>, Error> {
        self.device.gid(index)
    }
    fn registrar(&self) -> &dyn Registrar {
        self
    }
    fn register_dmabuf(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        address: u64,
        access: MrAccess,
    ) -> Result<Registration, Error> {
        self.device.register_dmabuf(fd, offset, len, address, access)
    }
    fn deregister(&self, registration: Registration) -> Result<(), Error> {
        self.device.deregister(registration)
    }
    fn create_qp(&mut self, config: QpConfig) -> Result<Qp, Error> {
        self.device.create_qp(config)
    }
    fn modify_qp(&mut self, qp: QpHandle, step: QpStep) -> Result<(), Error> {
        match step {
            QpStep::Error if self.faults.refuse_error.load(Ordering::Relaxed) => Err(system(libc::EIO)),
            QpStep::Connect(path) if path.gid_index < self.faults.dead_gids.load(Ordering::Relaxed) => {
                Err(system(libc::ENETUNREACH))
            }
            step => self.device.modify_qp(qp, step),
        }
    }
    fn destroy_qp(&mut self, qp: QpHandle) -> Result<(), Error> {
        match self.faults.refuse_destroy.load(Ordering::Relaxed) {
            true => Err(system(libc::EBUSY)),
            false => self.device.destroy_qp(qp),
        }
    }
    unsafe fn post(
        &mut self,
        qp: QpHandle,
        requests: &[WorkRequest],
        sges: &[Sge],
    ) -> (usize, Option<Error>) {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.device.post(qp, requests, sges) }
    }
    fn poll_cq(&mut self, out: &mut [WorkCompletion]) -> Result<usize, Error> {
        let count = self.device.poll_cq(out)?;
        if !self.faults.swallow_flushes.load(Ordering::Relaxed) {
            return Ok(count);
        }
        let mut kept = 0;
        for at in 0..count {
            if out[at].status != WcStatus::Flushed {
                out[kept] = out[at];
                kept += 1;
            }
        }
        Ok(kept)
    }
    fn arm(&mut self) -> Result<(), Error> {
        self.faults.arms.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
    fn event_fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [self.channel.as_ref().map(|(_, watched)| watched.as_fd()), None]
    }
    fn next_event(&mut self) -> Option<AsyncEvent> {
        if let Some((_, watched)) = &mut self.channel {
            let _ = std::io::Read::read(watched, &mut [0; 64]);
        }
        self.device.next_event()
    }
}

/// An initiator on a device that misbehaves on demand, and a target on a good device.
struct Pair {
    initiator: RdmaTransport<Wrapped>,
    target: RdmaTransport<SimDevice>,
    here: Block,
    /// Kept: the target has it registered.
    _there: Block,
    faults: Arc<Faults>,
    fabric: SimFabric,
    now: Instant,
    done: Vec<Completion>,
}

const BYTES: usize = 64 << 10;

impl Pair {
    fn new(config: &Config) -> Self {
        Self::with_channel(config, None)
    }

    fn with_channel(config: &Config, channel: Option<(UnixStream, UnixStream)>) -> Self {
        let fabric = SimFabric::new(1, SimConfig::TIMED);
        let faults = Arc::new(Faults::default());
        let device =
            Wrapped { device: fabric.device(DeviceConfig::default()), faults: faults.clone(), channel };
        let mut initiator = RdmaTransport::new(device, config.clone()).unwrap();
        let mut target = RdmaTransport::new(fabric.device(DeviceConfig::default()), config.clone()).unwrap();
        let (here, there) = (Block::new(BYTES), Block::new(BYTES));
        // SAFETY: the blocks are dropped after the transports (field order) and reached only by volatile
        // copies.
        unsafe {
            initiator.register(REGION, here.span(), ALL).unwrap();
            target.register(REGION, there.span(), ALL).unwrap();
        }
        let mut blob = [0; 256];
        let len = target.export(REGION, &mut blob).unwrap();
        initiator.attach(REMOTE, &blob[..len]).unwrap();
        let now = Instant::from_millis(1);
        Self { initiator, target, here, _there: there, faults, fabric, now, done: Vec::new() }
    }

    fn step(&mut self) {
        self.now = self.now + Duration::from_micros(10);
        self.fabric.advance_to(self.now);
        self.target.poll(self.now, &mut []);
        let mut out = [Completion::applied(Token(0)); 64];
        let count = self.initiator.poll(self.now, &mut out);
        self.done.extend_from_slice(&out[..count]);
    }

    fn linger(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            self.step();
        }
    }

    fn ended(&self, token: u64) -> Option<Completion> {
        self.done.iter().find(|end| end.token == Token(token)).copied()
    }

    fn finish(&mut self, token: u64) -> Completion {
        te_fabric::testkit::eventually("a slice or fence ends", || {
            (0..100).any(|_| {
                self.ended(token).is_some() || {
                    self.step();
                    false
                }
            })
        });
        self.ended(token).unwrap()
    }

    fn submit(&mut self, slices: &[Slice]) {
        assert_eq!(self.initiator.submit(slices), Ok(slices.len()));
    }

    fn warm_up(&mut self) {
        self.submit(&[write(u64::MAX, 0, 0, 1)]);
        assert_eq!(self.finish(u64::MAX).result, Ok(()));
    }

    /// Packets take 40 ms from now on.
    fn slow(&self) {
        let (here, there) = (self.initiator_port(), self.target_port());
        for (from, to) in [(here, there), (there, here)] {
            self.fabric.set_link(from, to, LinkConfig { latency_ns: 40_000_000, ..LinkConfig::CALM });
        }
    }

    fn initiator_port(&self) -> te_rdma::sim::PortId {
        self.initiator.provider().device.id()
    }

    fn target_port(&self) -> te_rdma::sim::PortId {
        self.target.provider().id()
    }
}

#[test]
fn a_queue_pair_that_does_not_flush_is_destroyed_and_its_slices_end() {
    let mut pair =
        Pair::new(&Config { cancel_drain_ms: 0, flush_ms_max: 5, timeout_exponent: 20, ..config() });
    pair.warm_up();
    pair.slow();
    pair.faults.swallow_flushes.store(true, Ordering::Relaxed);
    pair.submit(&[write(1, 0, 0, 4_096), read(2, 8_192, 8_192, 4_096)]);
    pair.step();
    pair.initiator.cancel(Token(1)).unwrap();
    pair.initiator.cancel(Token(2)).unwrap();
    pair.linger(Duration::from_millis(2));
    assert_eq!((pair.ended(1), pair.ended(2)), (None, None), "they ended before their queue pair");
    let (write_end, read_end) = (pair.finish(1), pair.finish(2));
    assert_eq!((kind(&write_end), write_end.outcome), (ErrorKind::Canceled, Outcome::Unknown));
    assert_eq!((kind(&read_end), read_end.outcome), (ErrorKind::Canceled, Outcome::NotApplied));
    // L2: a destroyed queue pair writes nothing.
    pair.here.set(0, &[0xAA; BYTES]);
    pair.linger(Duration::from_millis(200));
    assert_eq!(pair.here.get(0, BYTES), vec![0xAA; BYTES]);
}

#[test]
fn memory_of_a_queue_pair_that_cannot_be_destroyed_is_not_handed_back() {
    let config = Config { qps: 1, cancel_drain_ms: 0, flush_ms_max: 2, timeout_exponent: 20, ..config() };
    let mut pair = Pair::new(&config);
    pair.warm_up();
    pair.slow();
    for fault in [&pair.faults.swallow_flushes, &pair.faults.refuse_destroy, &pair.faults.refuse_error] {
        fault.store(true, Ordering::Relaxed);
    }
    pair.submit(&[read(1, 0, 0, 4_096), write(2, 8_192, 0, 1_000)]);
    pair.step();
    pair.initiator.cancel(Token(1)).unwrap();
    pair.linger(Duration::from_millis(30));
    // The device may still touch it: there is no completion and no deregistration, and it is counted.
    assert_eq!(pair.ended(1), None);
    assert_eq!(pair.initiator.stats().quarantined_bytes, 5_096);
    assert_eq!(pair.initiator.deregister(REGION).map_err(|e| e.kind), Err(ErrorKind::Busy));
    for fault in [&pair.faults.swallow_flushes, &pair.faults.refuse_destroy, &pair.faults.refuse_error] {
        fault.store(false, Ordering::Relaxed);
    }
    assert_eq!(kind(&pair.finish(1)), ErrorKind::Canceled);
    assert_eq!(pair.initiator.stats().quarantined_bytes, 0);
    assert_eq!(pair.finish(2).result, Ok(()));
    pair.initiator.deregister(REGION).unwrap();
}

#[test]
fn a_target_that_cannot_destroy_queue_pairs_confirms_no_fence() {
    // The roles are exchanged: the target's device misbehaves here.
    let mut pair = Pair::new(&config());
    let mut blob = [0; 256];
    let len = pair.initiator.export(REGION, &mut blob).unwrap();
    pair.target.attach(REMOTE, &blob[..len]).unwrap();
    let mut next = 0;
    let mut ends = |pair: &mut Pair, slice: Option<Slice>| -> Completion {
        next += 1;
        match slice {
            Some(slice) => assert_eq!(pair.target.submit(&[slice]), Ok(1)),
            None => pair.target.fence(Token(1_000 + next), REMOTE).unwrap(),
        }
        let mut out = [Completion::applied(Token(0)); 1];
        for _ in 0..1_000_000 {
            pair.now = pair.now + Duration::from_micros(10);
            pair.fabric.advance_to(pair.now);
            pair.initiator.poll(pair.now, &mut []);
            if pair.target.poll(pair.now, &mut out) == 1 {
                return out[0];
            }
        }
        panic!("it did not end")
    };
    assert_eq!(ends(&mut pair, Some(write(1, 0, 0, 100))).result, Ok(()));
    // One of our queue pairs fails, so that the target has to destroy its end.
    pair.fabric.corrupt_status(pair.target_port(), 0, WcStatus::RetriesExceeded);
    assert_eq!(ends(&mut pair, Some(write(2, 0, 0, 100))).outcome, Outcome::Unknown);
    pair.faults.refuse_destroy.store(true, Ordering::Relaxed);
    assert_eq!(ends(&mut pair, None).outcome, Outcome::Unknown);
    assert_eq!(ends(&mut pair, None).outcome, Outcome::Unknown);
    pair.faults.refuse_destroy.store(false, Ordering::Relaxed);
    assert_eq!(ends(&mut pair, None).outcome, Outcome::Applied);
}

#[test]
fn a_polling_thread_that_finds_nothing_may_park_until_the_device_reports() {
    let (reports, watched) = UnixStream::pair().unwrap();
    watched.set_nonblocking(true).unwrap();
    let mut report = reports.try_clone().unwrap();
    let config = Config { timeout_exponent: 20, ..config() };
    let mut pair = Pair::with_channel(&config, Some((reports, watched)));
    pair.warm_up();
    let arms = pair.faults.arms.load(Ordering::Relaxed);
    pair.slow();
    pair.submit(&[read(1, 0, 0, 100)]);
    // It has to be polled at once while a completion may come at any moment.
    assert_eq!(pair.initiator.poll_at(), Some(pair.now));
    for _ in 0..200 {
        pair.step();
    }
    // After some polls without a completion an event was requested, once.
    assert_eq!(pair.faults.arms.load(Ordering::Relaxed), arms + 1);
    assert!(pair.initiator.poll_at().is_none_or(|at| at > pair.now));
    pair.now = pair.now + Duration::from_millis(200);
    pair.fabric.advance_to(pair.now);
    report.write_all(&[1]).unwrap();
    let fd = pair.initiator.event_source().unwrap().0;
    assert!(is_readable(fd), "the device has reported, and the thread would stay parked");
    assert_eq!(pair.finish(1).result, Ok(()));
    pair.step();
    assert!(!is_readable(fd), "there is no work, and the thread would not park");
}

fn is_readable(fd: i32) -> bool {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, which lives across the call.
    unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
}

#[test]
fn a_key_that_peers_may_remember_is_not_given_to_another_region() {
    let mut pair = Pair::new(&config());
    // Our region is exported, and the target requests its keys.
    let other = RegionId::new(4, 1);
    let memory = Block::new(4_096);
    // SAFETY: the block outlives the region, which is deregistered below.
    let register = |pair: &mut Pair, id| unsafe { pair.initiator.register(id, memory.span(), ALL) };
    pair.faults.forced_keys.store(1, Ordering::Relaxed);
    register(&mut pair, other).unwrap();
    let mut blob = [0; 256];
    let len = pair.initiator.export(other, &mut blob).unwrap();
    pair.target.attach(REMOTE, &blob[..len]).unwrap();
    assert_eq!(pair.target.submit(&[read(1, 0, 0, 10)]), Ok(1));
    let mut out = [Completion::applied(Token(0)); 1];
    for _ in 0..1_000_000 {
        pair.now = pair.now + Duration::from_micros(10);
        pair.fabric.advance_to(pair.now);
        pair.initiator.poll(pair.now, &mut []);
        if pair.target.poll(pair.now, &mut out) == 1 {
            break;
        }
    }
    // The device does not know the forced key, but the peer has it now.
    assert_eq!(out[0].token, Token(1));
    pair.initiator.deregister(other).unwrap();
    // The device uses it again, twice.
    pair.faults.forced_keys.store(2, Ordering::Relaxed);
    let again = RegionId::new(4, 2);
    register(&mut pair, again).unwrap();
    assert_eq!(pair.faults.forced_keys.load(Ordering::Relaxed), 0);
    pair.initiator.deregister(again).unwrap();
    // A device without another key is refused.
    pair.faults.forced_keys.store(u32::MAX, Ordering::Relaxed);
    assert_eq!(register(&mut pair, again).map_err(|e| e.kind), Err(ErrorKind::Full));
    pair.faults.forced_keys.store(0, Ordering::Relaxed);
}

/// Opens a transport on a device with these GIDs, of which the first `dead` cannot be connected.
fn open(gids: &[([u8; 16], GidKind)], dead: u32, gid_index: Option<u32>) -> Result<Gid, OpenError> {
    let fabric = SimFabric::new(1, SimConfig::IMMEDIATE);
    let gids = gids.iter().enumerate();
    let gids = gids.map(|(i, &(raw, kind))| Some(Gid { index: i as u32, raw, kind })).collect();
    let device = fabric.device(DeviceConfig { gids, ..DeviceConfig::default() });
    let faults = Arc::new(Faults::default());
    faults.dead_gids.store(dead, Ordering::Relaxed);
    let config = Config { proof_ms_max: 200, gid_index, ..config() };
    let id = device.id();
    let transport = RdmaTransport::new(Wrapped { device, faults, channel: None }, config)?;
    assert_eq!((fabric.qp_count(id), fabric.mr_count(id)), (0, 0), "the proof left something behind");
    Ok(transport.gid())
}

#[test]
fn a_gid_is_used_only_when_its_loopback_comes_back() {
    let address = |last| {
        let mut raw = [0; 16];
        raw[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, last]);
        raw
    };
    let table = [(address(1), GidKind::RoceV2), (address(2), GidKind::RoceV2), (address(3), GidKind::RoceV1)];
    assert_eq!(open(&table, 0, None).unwrap().index, 0);
    assert_eq!(open(&table, 1, None).unwrap().index, 1);
    assert_eq!(open(&table, 2, None).unwrap().index, 2);
    assert_eq!(open(&table, 0, Some(2)).unwrap().index, 2);
    let none = open(&table, 3, None).unwrap_err();
    assert!(matches!(none, OpenError::NoGid { code: libc::ENETUNREACH }), "{none}");
    let missing = open(&table, 0, Some(9)).unwrap_err();
    assert!(matches!(missing, OpenError::NoGid { code: 0 }), "{missing}");
}

#[test]
fn a_port_that_is_down_is_not_opened() {
    let fabric = SimFabric::new(1, SimConfig::IMMEDIATE);
    let device = fabric.device(DeviceConfig::default());
    fabric.set_port_active(device.id(), false);
    assert!(matches!(RdmaTransport::new(device, config()), Err(OpenError::PortDown)));
}

#[test]
fn queue_pairs_that_cannot_be_connected_here_do_not_accumulate_at_the_target() {
    let mut pair = Pair::new(&Config { reconnect_ms_max: 10, ..config() });
    pair.faults.dead_gids.store(u32::MAX, Ordering::Relaxed);
    for token in 0..50 {
        pair.submit(&[write(token, 0, 0, 1)]);
        assert_eq!(kind(&pair.finish(token)), ErrorKind::Rail);
    }
    pair.faults.dead_gids.store(0, Ordering::Relaxed);
    pair.submit(&[write(99, 0, 0, 1)]);
    assert_eq!(pair.finish(99).result, Ok(()));
    pair.linger(Duration::from_millis(1));
    let stats = pair.target.stats();
    assert_eq!(stats.peer_qps_made - stats.peer_qps_destroyed, 2);
}

#[test]
fn a_quarantined_slice_does_not_keep_the_polling_thread_busy() {
    let (reports, watched) = UnixStream::pair().unwrap();
    watched.set_nonblocking(true).unwrap();
    let config = Config { cancel_drain_ms: 1, flush_ms_max: 50, ..config() };
    let mut pair = Pair::with_channel(&config, Some((reports, watched)));
    pair.warm_up();
    let here = pair.initiator.provider().device.id();
    let slow = LinkConfig { latency_ns: 1_000_000_000, ..LinkConfig::CALM };
    let target = pair.target.provider().id();
    pair.fabric.set_link(here, target, slow);
    pair.faults.swallow_flushes.store(true, Ordering::Relaxed);
    pair.faults.refuse_destroy.store(true, Ordering::Relaxed);
    pair.submit(&[write(1, 0, 0, 4_096)]);
    pair.step();
    pair.initiator.cancel(Token(1)).unwrap();
    pair.linger(Duration::from_millis(70));
    assert!(pair.ended(1).is_none() && pair.initiator.stats().quarantined_bytes == 4_096);
    let at = pair.initiator.poll_at().expect("the queue pair is tried again");
    assert!(at > pair.now, "it has to be polled at {at:?}, and now is {:?}", pair.now);
    pair.faults.refuse_destroy.store(false, Ordering::Relaxed);
    pair.finish(1);
    assert_eq!(pair.initiator.stats().quarantined_bytes, 0);
}
