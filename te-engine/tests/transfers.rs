//! Transfers between engines of one process, over each fabric alone and over all fabrics together.
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]

mod common;

use std::time::Duration;

use common::*;
use te_core::{Access, ErrorKind, MemSpan, Op, Outcome, Status};
use te_engine::{
    Engine, Fabrics, LocalAddr, RegisterError, RequestProblem, SegmentError, TransferEngine, TransferError,
    TransferRequest,
};

const LONG: Option<Duration> = Some(Duration::from_secs(15));

#[test]
fn bytes_go_there_and_back_over_every_fabric() {
    for (name, fabrics) in each_fabric() {
        let (here, there) = (engine(fabrics), engine(fabrics));
        let len = 3 << 20;
        let remote = there.alloc_shared(len, EVERYTHING).unwrap();
        let local = here.alloc_shared(2 * len, Access::LOCAL).unwrap();
        let content = pattern(1, len);
        local.write(0, &content).unwrap();
        let segment = here.open_segment(there.name()).unwrap();
        // Odd lengths and offsets.
        let cuts = [0, 1, 4096, 70_001, 1 << 20, (2 << 20) + 13, len];
        let requests = |op, base: usize| -> Vec<TransferRequest> {
            cuts.windows(2)
                .map(|cut| {
                    let (at, len) = (cut[0] as u64, (cut[1] - cut[0]) as u64);
                    request(op, (local.id(), base as u64 + at), segment, remote.addr() + at, len)
                })
                .collect()
        };
        let write = here.submit(&requests(Op::Write, 0), None).unwrap();
        let report = write.wait(LONG).unwrap_or_else(|error| panic!("{name}: write: {error}"));
        assert_eq!((report.status, report.bytes), (Status::Completed, len as u64), "{name}");
        assert!(bytes(&remote) == content, "{name}: what was written is there");
        let read = here.submit(&requests(Op::Read, len), None).unwrap();
        read.wait(LONG).unwrap_or_else(|error| panic!("{name}: read: {error}"));
        assert!(bytes(&local)[len..] == content, "{name}: what was read is here");
        for index in 0..cuts.len() - 1 {
            let one = read.request(index).unwrap();
            assert_eq!((one.status, one.outcome), (Status::Completed, Outcome::Applied), "{name}");
        }
        let stats = here.stats();
        let moved: u64 = stats.rails.iter().map(|rail| rail.bytes).sum();
        assert_eq!(moved, 2 * len as u64, "{name}: {stats:?}");
        let used: Vec<_> = stats.rails.iter().filter(|rail| rail.bytes > 0).map(|rail| rail.name).collect();
        assert_eq!(used, [if name == "all" { "local" } else { name }], "the nearest fabric takes all");
    }
}

#[test]
fn a_polled_engine_moves_bytes_without_a_worker() {
    let fabrics = Fabrics::LOCAL.and(Fabrics::SHM);
    let mut here = Engine::start(config(fabrics)).unwrap();
    let there = engine(fabrics);
    let remote = there.alloc_shared(8192, EVERYTHING).unwrap();
    remote.write(4096, &pattern(2, 4096)).unwrap();
    let local = here.alloc_shared(4096, Access::LOCAL).unwrap();
    let segment = here.open_segment(there.name()).unwrap();
    let one = request(Op::Read, (local.id(), 0), segment, remote.addr() + 4096, 4096);
    let batch = here.submit(&[one], None).unwrap();
    assert_eq!(here.free(batch), Err(TransferError::Busy));
    let report = here.wait(batch, LONG).unwrap();
    assert_eq!(report.bytes, 4096);
    assert_eq!(bytes(&local), pattern(2, 4096));
    here.free(batch).unwrap();
    assert_eq!(here.status(batch), Err(TransferError::NotFound));
    let fence = here.fence(segment, LONG).unwrap();
    here.wait_fence(fence, LONG).unwrap();
    here.free_fence(fence).unwrap();
}

#[test]
fn an_owned_buffer_is_moved_into_a_transfer_and_returned() {
    let (here, there) = (engine(Fabrics::default()), engine(Fabrics::default()));
    let remote = there.alloc_shared(64 << 10, EVERYTHING).unwrap();
    let segment = here.open_segment(there.name()).unwrap();
    let mut buffer = here.register_buffer(vec![0u8; 64 << 10], Access::LOCAL).unwrap();
    let content = pattern(3, 64 << 10);
    buffer.as_mut_slice().unwrap().copy_from_slice(&content);
    let (report, buffer) = here.write(buffer, 0..64 << 10, segment, remote.addr(), LONG).unwrap().join();
    assert_eq!(report.unwrap().bytes, 64 << 10);
    assert_eq!(bytes(&remote), content);
    let read = here.read(buffer.unwrap(), 0..1000, segment, remote.addr() + 1000, LONG).unwrap();
    let (report, buffer) = read.join();
    report.unwrap();
    let buffer = here.unregister_buffer(buffer.unwrap()).unwrap();
    assert_eq!(buffer[..1000], content[1000..2000]);
    assert_eq!(buffer[1000..], content[1000..]);
    assert_eq!(here.stats().regions, 0);
}

#[test]
fn a_buffer_of_another_engine_is_refused_and_returned() {
    let (here, there) = (engine(Fabrics::LOCAL), engine(Fabrics::LOCAL));
    let remote = there.alloc_shared(4096, EVERYTHING).unwrap();
    let segment = here.open_segment(there.name()).unwrap();
    // The same region id at both engines.
    let ours = here.register_buffer(vec![1u8; 4096], Access::LOCAL).unwrap();
    let _taken = there.alloc_shared(4096, Access::LOCAL).unwrap();
    let theirs = engine(Fabrics::LOCAL);
    let foreign = theirs.register_buffer(vec![2u8; 4096], Access::LOCAL).unwrap();
    assert_eq!(ours.region(), foreign.region());
    let (report, foreign) = here.read(foreign, 0..4096, segment, remote.addr(), LONG).unwrap().join();
    assert_eq!(report, Err(TransferError::Request { index: 0, problem: RequestProblem::Owned }));
    let refused = here.unregister_buffer(foreign.unwrap()).unwrap_err();
    assert_eq!(refused.error, RegisterError::NotFound);
    assert_eq!(theirs.unregister_buffer(refused.buffer).unwrap(), vec![2u8; 4096]);
    // A raw request cannot use an owned buffer.
    let raw = request(Op::Read, (ours.region(), 0), segment, remote.addr(), 1);
    let refused = here.submit(&[raw], None).unwrap().wait(LONG);
    assert_eq!(refused, Err(TransferError::Request { index: 0, problem: RequestProblem::Owned }));
    here.unregister_buffer(ours).unwrap();
}

#[test]
fn dropping_a_transfer_frees_its_buffer_once_it_has_drained() {
    let (here, there) = (engine(Fabrics::LOCAL), engine(Fabrics::LOCAL));
    let remote = there.alloc_shared(8 << 20, EVERYTHING).unwrap();
    let segment = here.open_segment(there.name()).unwrap();
    for _ in 0..20 {
        let buffer = here.register_buffer(vec![0u8; 8 << 20].into_boxed_slice(), Access::LOCAL).unwrap();
        drop(here.read(buffer, 0..8 << 20, segment, remote.addr(), LONG).unwrap());
    }
    eventually("the buffers are unregistered", || here.stats().regions == 0);
    assert_eq!((here.stats().leaked_buffers, here.stats().batches), (0, 0));
}

#[test]
fn dropping_a_refused_transfer_of_another_engines_buffer_frees_nothing() {
    let (here, there) = (engine(Fabrics::LOCAL), engine(Fabrics::LOCAL));
    let ours = here.register_buffer(vec![1u8; 4096], Access::LOCAL).unwrap();
    let theirs = there.register_buffer(vec![2u8; 4096], EVERYTHING).unwrap();
    assert_eq!(ours.region(), theirs.region());
    let (span, region) = (theirs.span(), ours.region());
    let segment = here.open_segment(there.name()).unwrap();
    let addr = here.segment_regions(segment).unwrap()[0].addr;
    drop(here.read(theirs, 0..16, segment, addr, None).unwrap());
    eventually("it is leaked", || here.stats().leaked_buffers == 1);
    assert_eq!((here.stats().regions, here.stats().leaked_bytes, there.stats().regions), (1, 4096, 1));
    // The other engine still serves the buffer, so it must not be freed.
    let local = here.alloc_shared(16, Access::LOCAL).unwrap();
    local.write(0, &[7; 16]).unwrap();
    let write = request(Op::Write, (local.id(), 0), segment, addr, 16);
    here.submit(&[write], LONG).unwrap().wait(LONG).unwrap();
    // SAFETY: the buffer is leaked and nothing is in flight.
    assert_eq!(unsafe { std::slice::from_raw_parts(span.as_ptr(), 17) }, [&[7; 16][..], &[2]].concat());
    // A buffer with an invented id.
    let made_up = te_core::Registered::new(vec![3u8; 8], region, Access::LOCAL);
    drop(here.read(made_up, 0..8, segment, addr, None).unwrap());
    eventually("it is leaked", || here.stats().leaked_buffers == 2);
    assert_eq!(here.unregister_buffer(ours).unwrap(), vec![1u8; 4096]);
}

/// A buffer whose `Drop` calls the engine.
struct Chatty(Vec<u8>);

static CHATTED_WITH: std::sync::OnceLock<TransferEngine> = std::sync::OnceLock::new();
static CHATS: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);

// SAFETY: the parts are those of the vector inside, as `Vec`'s own implementation takes them.
unsafe impl te_core::Buffer for Chatty {
    type Rest = usize;

    fn into_raw(mut self) -> (MemSpan, usize) {
        let bytes = std::mem::take(&mut self.0);
        std::mem::forget(self);
        bytes.into_raw()
    }

    unsafe fn from_raw(span: MemSpan, rest: usize) -> Self {
        // SAFETY: the parts of the vector, by the trait's contract.
        Self(unsafe { Vec::from_raw(span, rest) })
    }
}

impl Drop for Chatty {
    fn drop(&mut self) {
        let engine = CHATTED_WITH.get().unwrap();
        let region = engine.alloc_shared(4096, Access::LOCAL).unwrap();
        engine.unregister(region.id()).unwrap();
        CHATS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
}

#[test]
fn a_buffers_drop_may_call_the_engine() {
    let there = engine(Fabrics::LOCAL);
    let here = CHATTED_WITH.get_or_init(|| engine(Fabrics::LOCAL));
    let remote = there.alloc_shared(1 << 20, EVERYTHING).unwrap();
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let segment = here.open_segment(there.name()).unwrap();
        // Small transfers run and end on the caller's thread, large ones on the worker.
        for len in [16, 1 << 20].into_iter().cycle().take(20) {
            let buffer = here.register_buffer(Chatty(vec![0; len]), Access::LOCAL).unwrap();
            drop(here.read(buffer, 0..len, segment, remote.addr(), LONG).unwrap());
        }
        eventually("all are freed", || CHATS.load(std::sync::atomic::Ordering::Relaxed) == 20);
        done.send(()).unwrap();
    });
    is_done.recv_timeout(Duration::from_secs(15)).expect("nothing hangs");
    assert_eq!((here.stats().regions, here.stats().leaked_buffers), (0, 0));
}

#[test]
fn a_time_limit_may_be_as_long_as_a_duration_can_be() {
    let (here, there) = (engine(Fabrics::LOCAL), engine(Fabrics::LOCAL));
    let remote = there.alloc_shared(4096, EVERYTHING).unwrap();
    let local = here.alloc_shared(4096, Access::LOCAL).unwrap();
    let segment = here.open_segment(there.name()).unwrap();
    let read = request(Op::Read, (local.id(), 0), segment, remote.addr(), 4096);
    here.submit(&[read], Some(Duration::MAX)).unwrap().wait(Some(Duration::MAX)).unwrap();
    let alive = here.probe(segment, Duration::MAX).unwrap();
    assert_eq!(alive, te_engine::Liveness::Alive { incarnation: there.incarnation() });
}

#[cfg(feature = "tcp")]
#[test]
fn tcp_settings_reach_the_fabric() {
    let with = |congestion: &str| {
        let tcp = te_tcp::Config {
            congestion: Some(congestion.into()),
            send_buffer_bytes: Some(1 << 20),
            receive_buffer_bytes: Some(1 << 20),
            ..te_tcp::Config::default()
        };
        TransferEngine::start(te_engine::Config { tcp, ..config(Fabrics::TCP) })
    };
    // Reno is in every kernel.
    let (here, there) = (with("reno").unwrap(), with("reno").unwrap());
    let remote = there.alloc_shared(1 << 20, EVERYTHING).unwrap();
    let local = here.alloc_shared(1 << 20, Access::LOCAL).unwrap();
    let segment = here.open_segment(there.name()).unwrap();
    let read = request(Op::Read, (local.id(), 0), segment, remote.addr(), 1 << 20);
    here.submit(&[read], LONG).unwrap().wait(LONG).unwrap();
    assert!(matches!(with("no-such-thing"), Err(te_engine::StartError::Fabric { name: "tcp", .. })));
}

#[test]
fn invalid_requests_are_refused_before_a_byte_moves() {
    let (here, there) = (engine(Fabrics::default()), engine(Fabrics::default()));
    let readable = there.alloc_shared(4096, Access::REMOTE_READ).unwrap();
    let source = here.alloc_shared(4096, Access::LOCAL_READ).unwrap();
    let local = here.alloc_shared(4096, Access::LOCAL).unwrap();
    let segment = here.open_segment(there.name()).unwrap();
    let good = request(Op::Read, (local.id(), 0), segment, readable.addr(), 4096);
    let cases = [
        (TransferRequest { len: 0, ..good }, RequestProblem::Empty),
        (TransferRequest { len: 4097, ..good }, RequestProblem::LocalRange),
        (TransferRequest { local: LocalAddr::Region(local.id(), 1), ..good }, RequestProblem::LocalRange),
        (TransferRequest { local: LocalAddr::Address(8), ..good }, RequestProblem::LocalRange),
        (TransferRequest { remote_addr: readable.addr() + 1, ..good }, RequestProblem::RemoteRange),
        (TransferRequest { remote_addr: u64::MAX, ..good }, RequestProblem::RemoteRange),
        (TransferRequest { remote_addr: 0, ..good }, RequestProblem::RemoteRange),
        (TransferRequest { op: Op::Write, ..good }, RequestProblem::RemoteAccess),
        (TransferRequest { local: (source.id(), 0).into(), ..good }, RequestProblem::LocalAccess),
    ];
    for (bad, problem) in cases {
        let refused = here.submit(&[good, bad], None).unwrap().wait(LONG);
        assert_eq!(refused, Err(TransferError::Request { index: 1, problem }), "{bad:?}");
    }
    let too_many = vec![good; here.config().requests_per_batch_max as usize + 1];
    for requests in [&[][..], &too_many] {
        assert!(matches!(here.submit(requests, None), Err(TransferError::BatchLength { .. })));
    }
    let unknown = TransferRequest { segment: te_engine::SegmentHandle::from_bits(77), ..good };
    let refused = here.submit(&[unknown], None).unwrap().wait(LONG);
    assert_eq!(refused, Err(TransferError::Segment { index: 0, source: SegmentError::NotFound }));
    here.submit(&[good], None).unwrap().wait(LONG).unwrap();
}

#[test]
fn registration_refuses_overlapping_empty_and_too_many_regions() {
    let engine =
        TransferEngine::start(te_engine::Config { regions_max: 2, ..config(Fabrics::LOCAL) }).unwrap();
    let region = engine.alloc_shared(8192, Access::LOCAL).unwrap();
    let span = region.span();
    // SAFETY: every one of these is refused.
    unsafe {
        let inside = engine.register(span.part(4096, 1).unwrap(), Access::LOCAL);
        assert_eq!(inside, Err(RegisterError::Overlap { addr: region.addr(), len: 8192 }));
        let empty = engine.register(MemSpan::new(span.as_ptr(), 0), Access::LOCAL);
        assert_eq!(empty, Err(RegisterError::Empty));
    }
    assert_eq!(engine.alloc_shared(0, Access::LOCAL).unwrap_err(), RegisterError::Empty);
    let second = engine.register_buffer(vec![0u8; 1], Access::LOCAL).unwrap();
    let Err(refused) = engine.register_buffer(vec![5u8; 9], Access::LOCAL) else { panic!("it fits") };
    assert_eq!((refused.error, refused.buffer), (RegisterError::Full { regions_max: 2 }, vec![5u8; 9]));
    engine.unregister(region.id()).unwrap();
    assert_eq!(engine.unregister(region.id()), Err(RegisterError::NotFound));
    engine.unregister_buffer(second).unwrap();
    assert_eq!(engine.stats().registered_bytes, 0);
}

#[test]
fn unregister_is_busy_while_requests_in_flight_use_the_region() {
    // Over shared memory, nothing moves until the target polls.
    let mut there = Engine::start(config(Fabrics::SHM)).unwrap();
    let remote = there.alloc_shared(4096, EVERYTHING).unwrap();
    let here = engine(Fabrics::SHM);
    let local = here.alloc_shared(4096, Access::LOCAL).unwrap();
    let segment = here.open_segment(there.name()).unwrap();
    let requests = [request(Op::Write, (local.id(), 0), segment, remote.addr(), 4096); 3];
    let transfer = here.submit(&requests, None).unwrap();
    assert_eq!(here.unregister(local.id()), Err(RegisterError::Busy { requests: 3 }));
    assert_eq!(here.close_segment(segment), Err(SegmentError::Busy));
    assert_eq!(transfer.status(), Status::Pending);
    assert_eq!(transfer.wait(Some(Duration::from_millis(5))), Err(TransferError::WaitTimedOut));
    while !transfer.status().is_terminal() {
        there.poll();
        there.park(Some(Duration::from_millis(1)));
    }
    transfer.wait(None).unwrap();
    here.unregister(local.id()).unwrap();
    here.close_segment(segment).unwrap();
    there.unregister(remote.id()).unwrap();
}

#[test]
fn a_batch_past_its_deadline_ends_and_touches_nothing_after() {
    let mut there = Engine::start(config(Fabrics::SHM)).unwrap();
    let remote = there.alloc_shared(4096, EVERYTHING).unwrap();
    let here = engine(Fabrics::SHM);
    let local = here.alloc_shared(4096, Access::LOCAL).unwrap();
    local.write(0, &[7; 4096]).unwrap();
    let segment = here.open_segment(there.name()).unwrap();
    let write = request(Op::Write, (local.id(), 0), segment, remote.addr(), 4096);
    let transfer = here.submit(&[write], Some(Duration::from_millis(20))).unwrap();
    let error = transfer.wait(LONG).unwrap_err();
    let TransferError::Ended { status, error, fence_needed, .. } = error else { panic!("{error:?}") };
    assert_eq!((status, fence_needed), (Status::TimedOut, false));
    assert!(matches!(error.kind, ErrorKind::TimedOut | ErrorKind::Canceled), "{error:?}");
    let one = transfer.request(0).unwrap();
    assert_eq!((one.status, one.outcome), (Status::TimedOut, Outcome::NotApplied));
    // The batch has ended: its region is unused, and no byte arrives when the target polls.
    here.unregister(local.id()).unwrap();
    for _ in 0..100 {
        there.poll();
        there.park(Some(Duration::from_micros(100)));
    }
    assert_eq!(bytes(&remote), [0; 4096]);
    assert_eq!((here.stats().batches_timed_out, here.stats().batches), (1, 0));
    assert_eq!(here.stats().quarantined_batches, 0);
}

#[test]
fn a_cancelled_batch_ends_once_and_leaves_its_memory_alone() {
    let mut there = Engine::start(config(Fabrics::SHM)).unwrap();
    let remote = there.alloc_shared(4096, EVERYTHING).unwrap();
    remote.write(0, &[9; 4096]).unwrap();
    let here = engine(Fabrics::SHM);
    let local = here.alloc_shared(4096, Access::LOCAL).unwrap();
    let segment = here.open_segment(there.name()).unwrap();
    let read = request(Op::Read, (local.id(), 0), segment, remote.addr(), 4096);
    let transfer = here.submit(&[read; 5], None).unwrap();
    transfer.cancel();
    transfer.cancel();
    let error = transfer.wait(LONG).unwrap_err();
    assert!(
        matches!(error, TransferError::Ended { status: Status::Canceled, requests_failed: 5, .. }),
        "{error:?}"
    );
    for _ in 0..100 {
        there.poll();
        there.park(Some(Duration::from_micros(100)));
    }
    assert_eq!(bytes(&local), [0; 4096]);
}

#[test]
fn a_refresh_attaches_new_regions_and_detaches_old_ones() {
    for (name, fabrics) in each_fabric() {
        let (here, there) = (engine(fabrics), engine(fabrics));
        let local = here.alloc_shared(4096, Access::LOCAL).unwrap();
        let segment = here.open_segment(there.name()).unwrap();
        assert!(here.segment_regions(segment).unwrap().is_empty());
        let remote = there.alloc_shared(4096, EVERYTHING).unwrap();
        let read = request(Op::Read, (local.id(), 0), segment, remote.addr(), 4096);
        let unknown = TransferError::Request { index: 0, problem: RequestProblem::RemoteRange };
        assert_eq!(here.submit(&[read], None).unwrap().wait(LONG), Err(unknown.clone()), "{name}");
        here.refresh_segment(segment).unwrap();
        let listed = here.segment_regions(segment).unwrap();
        assert_eq!((listed.len(), listed[0].addr, listed[0].len), (1, remote.addr(), 4096), "{name}");
        here.submit(&[read], None).unwrap().wait(LONG).unwrap();
        there.unregister(remote.id()).unwrap();
        // Before a refresh, the request is submitted and fails.
        let stale = here.submit(&[read], LONG).unwrap().wait(LONG).unwrap_err();
        assert!(matches!(stale, TransferError::Ended { status: Status::Failed, .. }), "{name}: {stale:?}");
        assert_eq!(here.open_segment(there.name()).unwrap(), segment, "opening again refreshes");
        assert_eq!(here.submit(&[read], None).unwrap().wait(LONG), Err(unknown), "{name}");
        here.close_segment(segment).unwrap();
        here.close_segment(segment).unwrap();
        assert_eq!(here.close_segment(segment), Err(SegmentError::NotFound));
    }
}

#[test]
fn many_threads_share_one_engine() {
    let (here, there) = (engine(Fabrics::default()), engine(Fabrics::default()));
    let (threads, each) = (4u64, 64 << 10);
    let remote = there.alloc_shared(threads as usize * each, EVERYTHING).unwrap();
    let segment = here.open_segment(there.name()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (here, remote) = (here.clone(), remote.clone());
            scope.spawn(move || {
                let local = here.alloc_shared(each, Access::LOCAL).unwrap();
                let at = remote.addr() + thread * each as u64;
                for round in 0..200 {
                    let content = pattern(thread * 1000 + round, each);
                    local.write(0, &content).unwrap();
                    let write = request(Op::Write, (local.id(), 0), segment, at, each as u64);
                    here.submit(&[write], LONG).unwrap().wait(None).unwrap();
                    local.write(0, &[0; 64]).unwrap();
                    let read = request(Op::Read, (local.id(), 0), segment, at, each as u64);
                    here.submit(&[read], LONG).unwrap().wait(None).unwrap();
                    assert!(bytes(&local) == content);
                }
            });
        }
    });
}

#[tokio::test]
async fn a_transfer_can_be_awaited() {
    let (here, there) = (engine(Fabrics::default()), engine(Fabrics::default()));
    let remote = there.alloc_shared(1 << 20, EVERYTHING).unwrap();
    remote.write(0, &pattern(4, 1 << 20)).unwrap();
    let segment = here.open_segment(there.name()).unwrap();
    let local = here.alloc_shared(1 << 20, Access::LOCAL).unwrap();
    let read = request(Op::Read, (local.id(), 0), segment, remote.addr(), 1 << 20);
    let report = here.submit(&[read], LONG).unwrap().await.unwrap();
    assert_eq!(report.bytes, 1 << 20);
    let buffer = here.register_buffer(vec![0u8; 4096], Access::LOCAL).unwrap();
    let (report, buffer) = here.read(buffer, 0..4096, segment, remote.addr(), LONG).unwrap().await;
    report.unwrap();
    assert_eq!(buffer.unwrap().as_slice().unwrap(), &pattern(4, 1 << 20)[..4096]);
}

#[test]
fn a_waker_may_call_the_engine() {
    use std::future::Future;
    use std::sync::{Arc, Mutex, mpsc};
    use std::task::{Context, Poll, Wake, Waker};

    struct CountsRegions(TransferEngine, Mutex<mpsc::Sender<u32>>);
    impl Wake for CountsRegions {
        fn wake(self: Arc<Self>) {
            let regions = self.0.stats().regions;
            self.1.lock().unwrap().send(regions).unwrap();
        }
    }

    // The target does not poll yet, so the transfer waits.
    let mut there = Engine::start(config(Fabrics::SHM)).unwrap();
    let remote = there.alloc_shared(4096, EVERYTHING).unwrap();
    let here = engine(Fabrics::SHM);
    let local = here.alloc_shared(4096, Access::LOCAL).unwrap();
    let segment = here.open_segment(there.name()).unwrap();
    let write = request(Op::Write, (local.id(), 0), segment, remote.addr(), 4096);
    let mut transfer = here.submit(&[write], LONG).unwrap();
    let (woken, is_woken) = mpsc::channel();
    let waker = Waker::from(Arc::new(CountsRegions(here.clone(), Mutex::new(woken))));
    let mut cx = Context::from_waker(&waker);
    assert!(std::pin::Pin::new(&mut transfer).poll(&mut cx).is_pending());
    let give_up = std::time::Instant::now() + Duration::from_secs(15);
    let regions = loop {
        there.poll();
        match is_woken.recv_timeout(Duration::from_millis(1)) {
            Ok(regions) => break regions,
            Err(_) => assert!(std::time::Instant::now() < give_up, "the waker hangs"),
        }
    };
    assert_eq!(regions, 1);
    assert!(matches!(std::pin::Pin::new(&mut transfer).poll(&mut cx), Poll::Ready(Ok(_))));
}
