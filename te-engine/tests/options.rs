//! Options of a submission: the fabric that carries it, and the notification that follows it.
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]

mod common;

use std::sync::mpsc::channel;
use std::time::Duration;

use common::*;
use te_core::{Access, Op, Status};
use te_engine::{
    Fabrics, RequestProblem, SegmentError, SegmentHandle, SharedRegion, SubmitOptions, TransferEngine,
    TransferError, TransferRequest,
};

const LONG: Option<Duration> = Some(Duration::from_secs(30));

/// Two engines, and what a request between them needs.
struct Pair {
    here: TransferEngine,
    there: TransferEngine,
    local: SharedRegion,
    remote: SharedRegion,
    segment: SegmentHandle,
}

fn pair(fabrics: Fabrics) -> Pair {
    let (here, there) = (engine(fabrics), engine(fabrics));
    let remote = there.alloc_shared(1 << 20, EVERYTHING).unwrap();
    let local = here.alloc_shared(1 << 20, Access::LOCAL).unwrap();
    let segment = here.open_segment(there.name()).unwrap();
    Pair { here, there, local, remote, segment }
}

impl Pair {
    fn write(&self, len: u64) -> TransferRequest {
        request(Op::Write, (self.local.id(), 0), self.segment, self.remote.addr(), len)
    }

    /// The names and bodies of the notifications that the target has received.
    fn received(&self) -> Vec<(String, Vec<u8>)> {
        self.there.take_notifications().into_iter().map(|one| (one.name, one.message)).collect()
    }
}

#[test]
fn a_batch_uses_the_fabric_that_it_names_and_no_other() {
    let pair = pair(Fabrics::LOCAL.and(Fabrics::SHM));
    for fabric in ["shm", "local", "shm"] {
        let before = pair.here.stats();
        let options = SubmitOptions::new().timeout(LONG.unwrap()).fabric(fabric);
        pair.here.submit_with(&[pair.write(700_000)], &options).unwrap().wait(LONG).unwrap();
        for (rail, before) in pair.here.stats().rails.iter().zip(before.rails) {
            assert_eq!(rail.bytes - before.bytes, if rail.name == fabric { 700_000 } else { 0 }, "{fabric}");
        }
    }
    // The batch that follows in the same place is free again.
    let before = pair.here.stats().rails[0].bytes;
    pair.here.submit(&[pair.write(4096)], LONG).unwrap().wait(LONG).unwrap();
    assert_eq!(pair.here.stats().rails[0].bytes - before, 4096, "the nearest");
}

#[test]
fn a_fabric_that_does_not_reach_both_ends_is_refused_for_the_request_that_needs_it() {
    let pair = pair(Fabrics::LOCAL.and(Fabrics::SHM));
    let refused = |fabric: &str, requests: &[TransferRequest]| {
        pair.here.submit_with(requests, &SubmitOptions::new().fabric(fabric)).unwrap().wait(LONG)
    };
    let problem = |index| Err(TransferError::Request { index, problem: RequestProblem::Fabric });
    for unknown in ["tcp", "", "SHM", "pigeon"] {
        assert_eq!(refused(unknown, &[pair.write(8)]), problem(0), "{unknown:?}");
    }
    // Plain memory is not reached over shared memory, and shared memory is.
    let mut plain = vec![0u8; 4096];
    let span = te_core::MemSpan::new(plain.as_mut_ptr(), plain.len());
    // SAFETY: it is unregistered before it is dropped, and not used meanwhile.
    let region = unsafe { pair.there.register(span, EVERYTHING) }.unwrap();
    pair.here.refresh_segment(pair.segment).unwrap();
    let addr = span.as_ptr().addr() as u64;
    let other = request(Op::Write, (pair.local.id(), 0), pair.segment, addr, 8);
    assert_eq!(refused("shm", &[pair.write(8), other]), problem(1));
    refused("local", &[pair.write(8), other]).unwrap();
    pair.there.unregister(region).unwrap();
    assert_eq!(pair.here.stats().batches, 0);
}

#[test]
fn a_notification_follows_a_batch_that_completed() {
    for (name, fabrics) in each_fabric() {
        let pair = pair(fabrics);
        pair.local.write(0, b"kv cache").unwrap();
        let options = SubmitOptions::new().timeout(LONG.unwrap()).notify("layer", b"7\0binary");
        // Small ones end on the caller's thread, large ones on the worker.
        for len in [8, 1 << 20] {
            let transfer = pair.here.submit_with(&[pair.write(len)], &options).unwrap();
            assert_eq!(transfer.wait(LONG).unwrap().bytes, len, "{name}");
            assert_eq!(transfer.notified(), Some(Ok(())), "{name}");
            assert_eq!(transfer.request(0).unwrap().status, Status::Completed);
            // The transfer has ended, so it is there, and so are the bytes.
            assert_eq!(pair.received(), [(String::from("layer"), b"7\0binary".to_vec())], "{name}");
            assert_eq!(&bytes(&pair.remote)[..8], b"kv cache");
        }
        let plain = pair.here.submit(&[pair.write(8)], LONG).unwrap();
        plain.wait(LONG).unwrap();
        assert_eq!((plain.notified(), pair.received().len()), (None, 0));
    }
}

#[test]
fn nothing_is_sent_for_a_batch_that_was_refused_or_did_not_complete() {
    let pair = pair(Fabrics::LOCAL);
    let options = SubmitOptions::new().notify("done", b"");
    let outside = request(Op::Write, (pair.local.id(), 0), pair.segment, 0x10, 8);
    for requests in [vec![outside], vec![pair.write(8), outside]] {
        let transfer = pair.here.submit_with(&requests, &options).unwrap();
        transfer.wait(LONG).unwrap_err();
        assert_eq!(transfer.notified(), None);
    }
    // The owner is gone, and its memory with it: the batch fails.
    let Pair { here, there, local, remote, segment } = pair;
    let write = request(Op::Write, (local.id(), 0), segment, remote.addr(), 8);
    there.unregister(remote.id()).unwrap();
    let transfer = here.submit_with(&[write], &options).unwrap();
    transfer.wait(LONG).unwrap_err();
    assert_eq!((transfer.notified(), there.take_notifications().len()), (None, 0));
}

#[test]
fn bytes_that_arrived_are_reported_although_the_notification_was_refused() {
    let mut full = config(Fabrics::LOCAL);
    full.control.notifications_max = 1;
    let (here, there) = (engine(Fabrics::LOCAL), TransferEngine::start(full).unwrap());
    let remote = there.alloc_shared(4096, EVERYTHING).unwrap();
    let local = here.alloc_shared(4096, Access::LOCAL).unwrap();
    let segment = here.open_segment(there.name()).unwrap();
    let write = request(Op::Write, (local.id(), 0), segment, remote.addr(), 4096);
    let options = SubmitOptions::new().notify("n", b"m");
    let send = || {
        let transfer = here.submit_with(&[write], &options).unwrap();
        assert_eq!(transfer.wait(LONG).unwrap().bytes, 4096);
        transfer.notified().unwrap()
    };
    assert_eq!(send(), Ok(()));
    assert!(matches!(send(), Err(SegmentError::Refused { what, .. }) if what.contains("queue")));
    assert_eq!(there.take_notifications().len(), 1);
    assert_eq!(send(), Ok(()));
    // What is too long for any peer is refused before a byte moves.
    let long = SubmitOptions::new().notify("n", &vec![0; 1 << 20]);
    let refused = here.submit_with(&[write], &long).unwrap().wait(LONG).unwrap_err();
    assert!(
        matches!(&refused, TransferError::Segment { index: 0, source: SegmentError::Refused { .. } }),
        "{refused}"
    );
}

#[test]
fn a_dropped_transfer_and_a_stopped_engine_do_not_stop_the_notification_of_bytes_that_arrived() {
    let pair = pair(Fabrics::LOCAL);
    let options = SubmitOptions::new().notify("kept", b"");
    let submit = || pair.here.submit_with(&[pair.write(8)], &options).unwrap();
    let ended = || eventually("the batches end", || pair.here.stats().batches == 0);
    let one = submit();
    ended();
    // From here on only the notification is outstanding.
    drop(one);
    eventually("it arrives", || pair.received().len() == 1);
    let many: Vec<_> = (0..20).map(|_| submit()).collect();
    ended();
    drop(many);
    let Pair { here, there, .. } = pair;
    drop(here);
    assert_eq!(there.take_notifications().len(), 20, "the engine sent them before it ended");
}

#[test]
fn notifications_of_one_owner_arrive_in_the_order_of_their_batches() {
    let pair = pair(Fabrics::LOCAL);
    let transfers: Vec<_> = (0..200u32)
        .map(|number| {
            let options = SubmitOptions::new().notify("n", &number.to_le_bytes());
            pair.here.submit_with(&[pair.write(8)], &options).unwrap()
        })
        .collect();
    for transfer in transfers {
        transfer.wait(LONG).unwrap();
        assert_eq!(transfer.notified(), Some(Ok(())));
    }
    let received: Vec<Vec<u8>> = pair.received().into_iter().map(|(_, message)| message).collect();
    assert_eq!(received, (0..200u32).map(|number| number.to_le_bytes().to_vec()).collect::<Vec<_>>());
}

#[test]
fn a_waker_may_submit_with_a_notification_and_wait_for_it() {
    use std::future::Future;
    use std::sync::Arc;
    use std::task::{Context, Wake, Waker};

    struct Again(Box<dyn Fn() + Send + Sync>);
    impl Wake for Again {
        fn wake(self: Arc<Self>) {
            (self.0)();
        }
    }
    let pair = Arc::new(pair(Fabrics::LOCAL));
    let options = SubmitOptions::new().notify("n", b"m");
    let (say, heard) = channel();
    let (inner, its_options) = (pair.clone(), options.clone());
    let waker = Waker::from(Arc::new(Again(Box::new(move || {
        let transfer = inner.here.submit_with(&[inner.write(8)], &its_options).unwrap();
        say.send(transfer.wait(LONG).map(|_| transfer.notified())).unwrap();
    }))));
    let mut transfer = std::pin::pin!(pair.here.submit_with(&[pair.write(8)], &options).unwrap());
    if transfer.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
        assert_eq!(heard.recv_timeout(LONG.unwrap()).unwrap(), Ok(Some(Ok(()))));
    }
    drop(waker);
}
