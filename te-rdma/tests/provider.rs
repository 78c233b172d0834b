//! What a provider may do to us that the simulated one does not: give nothing back, refuse to destroy, tell
//! by descriptors, hand keys out again, fail the loopback. A simulated device behind a wrapper that
//! misbehaves on demand.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(unsafe_code, reason = "the wrapper passes `register` and `post` on")]

mod common;

use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use common::{ALL, Block, REGION, SEGMENT, config, kind, read, write};
use te_core::{
    Completion, Error, ErrorKind, Instant, MemSpan, Memory, Outcome, RegionId, RegionOffset, Slice, Token,
    Transport,
};
use te_rdma::sim::{DeviceConfig, LinkConfig, SimConfig, SimDevice, SimFabric};
use te_rdma::verbs::{
    AsyncEvent, DeviceInfo, Gid, GidKind, MrAccess, PortInfo, Qp, QpConfig, QpHandle, QpStep, Registrar,
    Registration, Sge, Verbs, WcStatus, WorkCompletion, WorkRequest,
};
use te_rdma::{Config, Dmabuf, OpenError, RdmaTransport};

/// What is wrong with a device at the moment.
#[derive(Debug, Default)]
struct Faults {
    /// Completions of flushed work do not come.
    swallow_flushes: AtomicBool,
    /// Queue pairs are not destroyed.
    refuse_destroy: AtomicBool,
    /// Queue pairs are not put in error.
    refuse_error: AtomicBool,
    /// Queue pairs by way of GIDs up to this index do not connect.
    dead_gids: AtomicU32,
    /// Times that an event was asked for.
    arms: AtomicU64,
    /// The next registrations get this remote key, as long as it is not 0; how many.
    forced_keys: AtomicU32,
}

const FORCED_KEY: u32 = 0xDEAD;

struct Wrapped {
    device: SimDevice,
    faults: Arc<Faults>,
    /// A completion channel: one end is told, the other is watched.
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
        _fd: i32,
        _offset: u64,
        len: u64,
        address: u64,
        access: MrAccess,
    ) -> Result<Registration, Error> {
        // Host memory stands in for another device's: the test gives its address and keeps it until the
        // device is gone.
        let span = MemSpan::new(std::ptr::with_exposed_provenance_mut(address as usize), len as usize);
        // SAFETY: as said.
        unsafe { self.device.registrar().register(span, access) }
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
    fn event_fds(&self) -> [Option<i32>; 2] {
        [self.channel.as_ref().map(|(_, watched)| watched.as_raw_fd()), None]
    }
    fn next_event(&mut self) -> Option<AsyncEvent> {
        if let Some((_, watched)) = &mut self.channel {
            let _ = std::io::Read::read(watched, &mut [0; 64]);
        }
        self.device.next_event()
    }
}

/// An initiator that misbehaves on demand and a good target.
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
        // SAFETY: the blocks are dropped after the transports (field order) and looked at through volatile
        // copies only.
        unsafe {
            initiator.register(REGION, here.span(), ALL).unwrap();
            target.register(REGION, there.span(), ALL).unwrap();
        }
        let mut blob = [0; 256];
        let len = target.export(REGION, &mut blob).unwrap();
        initiator.attach(SEGMENT, &blob[..len]).unwrap();
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
        let start = std::time::Instant::now();
        loop {
            if let Some(end) = self.ended(token) {
                return end;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "{token} never ended");
            self.step();
        }
    }

    fn submit(&mut self, slices: &[Slice]) {
        assert_eq!(self.initiator.submit(slices), Ok(slices.len()));
    }

    fn warm_up(&mut self) {
        self.submit(&[write(u64::MAX, 0, 0, 1)]);
        assert_eq!(self.finish(u64::MAX).result, Ok(()));
    }

    /// Nothing arrives for a long time.
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
    assert_eq!((pair.ended(1), pair.ended(2)), (None, None), "they ended before their queue pair had");
    let (write_end, read_end) = (pair.finish(1), pair.finish(2));
    assert_eq!((kind(&write_end), write_end.outcome), (ErrorKind::Canceled, Outcome::Unknown));
    assert_eq!((kind(&read_end), read_end.outcome), (ErrorKind::Canceled, Outcome::NotApplied));
    // L2: destroyed, it writes nothing.
    pair.here.set(0, &[0xAA; BYTES]);
    pair.linger(Duration::from_millis(200));
    assert_eq!(pair.here.get(0, BYTES), vec![0xAA; BYTES]);
}

#[test]
fn memory_under_a_queue_pair_that_will_not_go_is_not_handed_back() {
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
    // Nobody can say that the device has let go of it: no completion, no deregistration, and it is counted.
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
fn a_target_whose_device_does_not_let_go_gives_no_word() {
    // The roles are exchanged: whoever misbehaves is the target here.
    let mut pair = Pair::new(&config());
    let mut blob = [0; 256];
    let len = pair.initiator.export(REGION, &mut blob).unwrap();
    pair.target.attach(SEGMENT, &blob[..len]).unwrap();
    let mut next = 0;
    let mut ends = |pair: &mut Pair, slice: Option<Slice>| -> Completion {
        next += 1;
        match slice {
            Some(slice) => assert_eq!(pair.target.submit(&[slice]), Ok(1)),
            None => pair.target.fence(Token(1_000 + next), SEGMENT).unwrap(),
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
        panic!("it never ended")
    };
    assert_eq!(ends(&mut pair, Some(write(1, 0, 0, 100))).result, Ok(()));
    // One of our queue pairs fails, so there is one at the target that has to go.
    pair.fabric.corrupt_status(pair.target_port(), 0, WcStatus::RetriesExceeded);
    assert_eq!(ends(&mut pair, Some(write(2, 0, 0, 100))).outcome, Outcome::Unknown);
    pair.faults.refuse_destroy.store(true, Ordering::Relaxed);
    assert_eq!(ends(&mut pair, None).outcome, Outcome::Unknown);
    assert_eq!(ends(&mut pair, None).outcome, Outcome::Unknown);
    pair.faults.refuse_destroy.store(false, Ordering::Relaxed);
    assert_eq!(ends(&mut pair, None).outcome, Outcome::Applied);
}

#[test]
fn a_poller_that_finds_nothing_may_park_until_the_device_tells() {
    let (teller, watched) = UnixStream::pair().unwrap();
    watched.set_nonblocking(true).unwrap();
    let mut teller_too = teller.try_clone().unwrap();
    let config = Config { timeout_exponent: 20, ..config() };
    let mut pair = Pair::with_channel(&config, Some((teller, watched)));
    pair.warm_up();
    let arms = pair.faults.arms.load(Ordering::Relaxed);
    pair.slow();
    pair.submit(&[read(1, 0, 0, 100)]);
    // It polls at once while something may come any moment, …
    assert_eq!(pair.initiator.poll_at(), Some(pair.now));
    for _ in 0..200 {
        pair.step();
    }
    // … and stops when nothing has come for a while: then an event was asked for, once.
    assert_eq!(pair.faults.arms.load(Ordering::Relaxed), arms + 1);
    assert!(pair.initiator.poll_at().is_none_or(|at| at > pair.now));
    pair.now = pair.now + Duration::from_millis(200);
    pair.fabric.advance_to(pair.now);
    teller_too.write_all(&[1]).unwrap();
    let fd = pair.initiator.event_source().unwrap().0;
    assert!(is_readable(fd), "the device has spoken, and the poller would sleep on");
    assert_eq!(pair.finish(1).result, Ok(()));
    pair.step();
    assert!(!is_readable(fd), "nothing is left to do, and the poller would not sleep");
}

fn is_readable(fd: i32) -> bool {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, which lives across the call.
    unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
}

#[test]
fn a_key_that_peers_may_remember_is_not_given_to_another_region() {
    let mut pair = Pair::new(&config());
    // Ours exports too, and the target asks for it.
    let other = RegionId::new(4, 1);
    let memory = Block::new(4_096);
    // SAFETY: the block outlives the region, which is deregistered below.
    let register = |pair: &mut Pair, id| unsafe { pair.initiator.register(id, memory.span(), ALL) };
    pair.faults.forced_keys.store(1, Ordering::Relaxed);
    register(&mut pair, other).unwrap();
    let mut blob = [0; 256];
    let len = pair.initiator.export(other, &mut blob).unwrap();
    pair.target.attach(SEGMENT, &blob[..len]).unwrap();
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
    // The forged key means nothing to the device; but it has been shown.
    assert_eq!(out[0].token, Token(1));
    pair.initiator.deregister(other).unwrap();
    // The device gives it out again, twice.
    pair.faults.forced_keys.store(2, Ordering::Relaxed);
    let again = RegionId::new(4, 2);
    register(&mut pair, again).unwrap();
    assert_eq!(pair.faults.forced_keys.load(Ordering::Relaxed), 0);
    pair.initiator.deregister(again).unwrap();
    // A device that has no other key to give is refused.
    pair.faults.forced_keys.store(u32::MAX, Ordering::Relaxed);
    assert_eq!(register(&mut pair, again).map_err(|e| e.kind), Err(ErrorKind::Full));
    pair.faults.forced_keys.store(0, Ordering::Relaxed);
}

/// Opens a transport on a device with these GIDs, of which those below `dead` go nowhere.
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
    fabric.set_port(device.id(), false);
    assert!(matches!(RdmaTransport::new(device, config()), Err(OpenError::PortDown)));
}

#[test]
fn memory_of_another_device_is_never_read_by_the_cpu() {
    let mut pair = Pair::new(&config());
    pair.warm_up();
    let far = Block::new(4_096);
    far.paint(3);
    let region = RegionId::new(4, 1);
    let address = far.span().as_ptr().expose_provenance() as u64;
    let dmabuf = Dmabuf {
        fd: 9,
        offset: 0,
        len: 4_096,
        address,
        location: te_core::Location::Device(te_core::GpuVendor::Nvidia, 0),
    };
    pair.initiator.register_dmabuf(region, dmabuf, ALL).unwrap();
    let before = pair.initiator.stats().inlined;
    // One work request of two regions would be read by the CPU as well.
    let other = write(2, 0, 100, 20);
    pair.submit(&[Slice { local: RegionOffset::new(region, 0), ..write(1, 0, 0, 100) }, other]);
    assert_eq!((pair.finish(1).result, pair.finish(2).result), (Ok(()), Ok(())));
    assert_eq!(pair.initiator.stats().inlined, before);
    pair.submit(&[write(3, 0, 0, 20)]);
    assert_eq!(pair.finish(3).result, Ok(()));
    assert_eq!(pair.initiator.stats().inlined, before + 1);
    pair.initiator.deregister(region).unwrap();
}

#[test]
fn queue_pairs_that_do_not_connect_here_do_not_pile_up_at_the_target() {
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
fn a_slice_in_quarantine_does_not_keep_the_poller_awake() {
    let (tell, watched) = UnixStream::pair().unwrap();
    watched.set_nonblocking(true).unwrap();
    let config = Config { cancel_drain_ms: 1, flush_ms_max: 50, ..config() };
    let mut pair = Pair::with_channel(&config, Some((tell, watched)));
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
    assert!(at > pair.now, "wants to be polled at {at:?}, it is {:?}", pair.now);
    pair.faults.refuse_destroy.store(false, Ordering::Relaxed);
    pair.finish(1);
    assert_eq!(pair.initiator.stats().quarantined_bytes, 0);
}
