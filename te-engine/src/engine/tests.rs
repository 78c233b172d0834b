//! Batches over a rail that completes slices only when the test releases them.

use std::sync::Mutex;

use te_core::{Access, Capabilities, Features, HealthConfig, MemSpan};
use te_host::{LocalConfig, LocalTransport};

use super::*;
use crate::descriptor::{Descriptor, RegionDescriptor};
use crate::error::SegmentError;

/// Accepts every slice, and completes slices only in [`release`](Self::release).
#[derive(Clone, Default)]
struct Stuck(Arc<Mutex<Held>>, Arc<Meeting>);

/// Where registrations on several rails wait for each other.
#[derive(Default)]
struct Meeting {
    /// How many registrations must come, and how many have.
    guests: Mutex<(usize, usize)>,
    came: std::sync::Condvar,
}

#[derive(Default)]
struct Held {
    /// Its device is gone: registrations fail.
    gone: bool,
    held: Vec<Token>,
    ended: VecDeque<Completion>,
}

impl Stuck {
    /// Completes all slices that it holds.
    fn release(&self) {
        let mut all = self.0.lock().unwrap();
        let Held { held, ended, .. } = &mut *all;
        ended.extend(held.drain(..).map(Completion::applied));
    }
}

impl Memory for Stuck {
    #[allow(unsafe_code, reason = "the trait's method; the memory is never touched")]
    unsafe fn register(&mut self, _: RegionId, _: MemSpan, _: Access) -> Result<(), Error> {
        let mut guests = self.1.guests.lock().unwrap();
        guests.1 += 1;
        self.1.came.notify_all();
        let wait = Duration::from_secs(60);
        let (_guests, late) = self.1.came.wait_timeout_while(guests, wait, |(all, came)| came < all).unwrap();
        let gone = self.0.lock().unwrap().gone || late.timed_out();
        if gone { Err(ErrorKind::Rail.into()) } else { Ok(()) }
    }

    fn deregister(&mut self, _: RegionId) -> Result<(), Error> {
        Ok(())
    }

    fn export(&self, _: RegionId, out: &mut [u8]) -> Result<usize, Error> {
        out[0] = 0;
        Ok(1)
    }

    fn attach(&mut self, _: RemoteRegionId, _: &[u8]) -> Result<(), Error> {
        Ok(())
    }

    fn detach(&mut self, _: RemoteRegionId) -> Result<(), Error> {
        Ok(())
    }
}

impl Transport for Stuck {
    fn name(&self) -> &'static str {
        "stuck"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Features::READ | Features::WRITE)
            .with_slice_bytes(4096, 1 << 20)
            .with_inflight_max(4096)
            .with_export_bytes_max(1)
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        self.0.lock().unwrap().held.extend(batch.iter().map(|slice| slice.token));
        Ok(batch.len())
    }

    fn poll(&mut self, _: Instant, out: &mut [Completion]) -> usize {
        let ended = &mut self.0.lock().unwrap().ended;
        let count = out.len().min(ended.len());
        out.iter_mut().zip(ended.drain(..count)).for_each(|(out, end)| *out = end);
        count
    }

    fn poll_at(&self) -> Option<Instant> {
        None
    }

    fn event_source(&self) -> Option<EventSource> {
        None
    }

    fn cancel(&mut self, _: Token) -> Result<(), Error> {
        Ok(())
    }

    fn fence(&mut self, token: Token, _: RemoteRegionId) -> Result<(), Error> {
        self.0.lock().unwrap().ended.push_back(Completion::applied(token));
        Ok(())
    }
}

const LEN: u64 = 8192;

/// An engine on a stuck rail, and a request for it.
fn engine(drain_ms: u32) -> (Stuck, Engine, TransferRequest) {
    let fabrics = crate::Fabrics::LOCAL;
    let mut engine = Engine::start(Config { fabrics, drain_ms, ..Config::default() }).unwrap();
    let stuck = Stuck::default();
    let route = Tiers::new(&[0], HealthConfig::default());
    engine.rails = te_host::fork::Own::new(
        MultiTransport::new([Box::new(stuck.clone()) as _], route, 4096).map_err(|_| ()).unwrap(),
    );
    let local = engine.alloc_shared(LEN as usize, Access::LOCAL).unwrap();
    let mut export = vec![1, 5];
    export.extend_from_slice(b"stuck");
    export.extend_from_slice(&[1, 0, 0]);
    let access = (Access::REMOTE_READ | Access::REMOTE_WRITE).bits();
    let region = RegionDescriptor { region: 1, addr: 0x1000, len: LEN, access, location: "*".into(), export };
    let descriptor = Descriptor { name: "peer:1".into(), incarnation: 1, version: 1, regions: vec![region] };
    let segment = engine.attach_segment("peer:1", &descriptor).unwrap();
    let local = (local.id(), 0).into();
    (stuck, engine, TransferRequest { op: Op::Write, local, segment, remote_addr: 0x1000, len: LEN })
}

fn quarantined(engine: &Engine) -> (u32, u64) {
    let stats = engine.stats();
    (stats.quarantined_batches, stats.quarantined_bytes)
}

#[test]
fn a_quarantined_batch_is_counted_once_and_counted_out_when_it_ends() {
    let (stuck, mut engine, request) = engine(0);
    let batch = engine.submit(&[request], Some(Duration::ZERO)).unwrap();
    while !engine.is_done(batch).unwrap() {
        engine.poll();
    }
    assert_eq!(quarantined(&engine), (1, LEN));
    for _ in 0..3 {
        engine.cancel(batch).unwrap();
        engine.poll();
    }
    assert_eq!((quarantined(&engine), engine.stats().batches_timed_out), ((1, LEN), 1));
    assert_eq!(engine.status(batch), Ok(Status::TimedOut));
    engine.free(batch).unwrap();
    stuck.release();
    engine.poll();
    assert_eq!((quarantined(&engine), engine.stats().batches), ((0, 0), 0));
}

#[test]
fn a_segment_cannot_be_fenced_while_a_quarantined_batch_uses_it() {
    let (stuck, mut engine, request) = engine(0);
    let fence = engine.fence(request.segment, None).unwrap();
    engine.wait_fence(fence, None).unwrap();
    engine.free_fence(fence).unwrap();
    let batch = engine.submit(&[request], Some(Duration::ZERO)).unwrap();
    while !engine.is_done(batch).unwrap() {
        engine.poll();
    }
    assert!(engine.report(batch).unwrap().fence_needed);
    let busy = TransferError::Segment { index: 0, source: SegmentError::Busy };
    assert_eq!(engine.fence(request.segment, None), Err(busy.clone()));
    // The batch continues after its handle is freed.
    engine.free(batch).unwrap();
    assert_eq!(engine.fence(request.segment, None), Err(busy));
    stuck.release();
    engine.poll();
    let fence = engine.fence(request.segment, None).unwrap();
    engine.wait_fence(fence, None).unwrap();
}

#[test]
fn what_has_ended_before_its_time_was_up_is_not_late() {
    let (stuck, mut engine, request) = engine(0);
    // More slices than one call takes from the rails, and a deadline that has passed at the first poll.
    let one = TransferRequest { len: 8, ..request };
    let batch = engine.submit(&[one; 3 * POLL_BUDGET], Some(Duration::ZERO)).unwrap();
    stuck.release();
    while !engine.is_done(batch).unwrap() {
        engine.poll();
    }
    assert_eq!(engine.status(batch), Ok(Status::Completed));
    assert_eq!((quarantined(&engine), engine.stats().batches_timed_out), ((0, 0), 0));
}

#[test]
fn what_was_copied_comes_with_its_checksum_once_asked_for() {
    let config = Config { fabrics: crate::Fabrics::LOCAL, ..Config::default() };
    let mut engine = Engine::start(config).unwrap();
    let there = engine.alloc_shared(1 << 20, Access::all()).unwrap();
    let here = engine.alloc_shared(1 << 20, Access::LOCAL).unwrap();
    let bytes: Vec<u8> = (0..1u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 9) as u8).collect();
    there.write(0, &bytes).unwrap();
    let name = engine.name().to_owned();
    let segment = engine.open_segment(&name).unwrap();
    let remote_addr = engine.segment_regions(segment).unwrap()[0].addr;
    let mut sum_of = |op, len| {
        let local = crate::LocalAddr::Region(here.id(), 0);
        let batch = engine.submit(&[TransferRequest { op, local, segment, remote_addr, len }], None).unwrap();
        engine.wait(batch, None).unwrap();
        let sum = engine.request_status(batch, 0).unwrap().crc32c;
        engine.free(batch).unwrap();
        engine.checksum_copies(true);
        sum
    };
    assert_eq!(sum_of(Op::Read, 50_000), None, "not requested yet");
    assert_eq!(sum_of(Op::Read, 50_000), Some(crc32c::crc32c(&bytes[..50_000])));
    assert_eq!(sum_of(Op::Write, 49_999), Some(crc32c::crc32c(&bytes[..49_999])));
    assert_eq!(sum_of(Op::Write, 32_767), None, "the checksum of a short WRITE takes longer than its copy");
    for op in [Op::Read, Op::Write] {
        assert_eq!(sum_of(op, 1 << 20), Some(crc32c::crc32c(&bytes)), "joined from several slices");
    }
    assert_eq!(
        sum_of(Op::Read, 777_777),
        Some(crc32c::crc32c(&bytes[..777_777])),
        "the last slice is longer"
    );
    assert_eq!(
        sum_of(Op::Read, 17),
        Some(crc32c::crc32c(&bytes[..17])),
        "nothing of an earlier request is left"
    );
}

#[test]
fn a_region_joins_a_rail_that_was_gone_and_peers_use_it() {
    let stuck = Stuck::default();
    let start = || {
        let fabrics = crate::Fabrics::LOCAL;
        let mut engine = Engine::start(Config { fabrics, ..Config::default() }).unwrap();
        let route = Tiers::new(&[0, 1], HealthConfig::default());
        let local =
            Box::new(LocalTransport::new(LocalConfig::default()).unwrap()) as Box<dyn Transport + Send>;
        let rails = MultiTransport::new([local, Box::new(stuck.clone())], route, 64);
        engine.rails = te_host::fork::Own::new(rails.unwrap_or_else(|_| unreachable!("two rails")));
        engine.devices = vec![String::new(), "stuck0".into()];
        engine
    };
    let (mut owner, mut peer) = (start(), start());
    stuck.0.lock().unwrap().gone = true;
    let region = owner.alloc_shared(4096, Access::all()).unwrap();
    let segment = peer.attach_segment(owner.name(), &owner.published.descriptor()).unwrap();
    let rails = |peer: &Engine| {
        let regions = &peer.segments.segment(segment).unwrap().regions;
        assert_eq!(regions.len(), 1);
        peer.rails.reachable(regions[0].id)
    };
    let look = |owner: &mut Engine, peer: &mut Engine| {
        let (_, wait) = owner.rejoin_at.expect("another attempt is due");
        owner.rejoin_at = Some((Instant::ZERO, wait));
        owner.poll();
        peer.sync_segment(segment, &owner.published.descriptor()).unwrap();
        peer.poll();
    };
    assert_eq!(rails(&peer), 0b01);
    look(&mut owner, &mut peer);
    assert_eq!(rails(&peer), 0b01, "it is still gone");
    assert!(owner.wake_at().is_some(), "a parked engine wakes for the next attempt");
    stuck.0.lock().unwrap().gone = false;
    look(&mut owner, &mut peer);
    assert_eq!(rails(&peer), 0b11);
    assert_eq!(owner.rejoin_at, None, "no further attempt is due");
    owner.unregister(region.id()).unwrap();
}

#[test]
fn several_devices_register_a_large_region_at_the_same_time() {
    let fabrics = crate::Fabrics::LOCAL;
    let mut engine = Engine::start(Config { fabrics, ..Config::default() }).unwrap();
    let meeting = Arc::new(Meeting::default());
    let rails =
        || (0..5).map(|_| Box::new(Stuck(Arc::default(), meeting.clone())) as Box<dyn Transport + Send>);
    let multi = MultiTransport::new(rails(), Tiers::new(&[0; 5], HealthConfig::default()), 64);
    engine.rails = te_host::fork::Own::new(multi.unwrap_or_else(|_| unreachable!("five rails")));
    engine.devices = vec![String::new(); 5];
    // Each registration waits until all have begun.
    meeting.guests.lock().unwrap().0 = 5;
    let region = engine.alloc_shared(PARALLEL, Access::LOCAL).unwrap();
    assert_eq!(engine.rails.left_out(), None, "no registration waited until its timeout");
    assert!(!engine.rails.is_missing_rails());
    engine.unregister(region.id()).unwrap();
}

const PARALLEL: usize = 64 << 20;
