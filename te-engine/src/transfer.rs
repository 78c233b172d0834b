//! [`Transfer`]: a batch that was submitted, as its submitter sees it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use te_core::{Buffer, ErrorKind, MemSpan, Outcome, Registered, Status};

use crate::engine::verdict;
use crate::error::{SegmentError, TransferError};
use crate::handle::Inner;
use crate::ordered::Ending;
use crate::payload::Payload;
use crate::request::{BatchReport, RequestStatus, SubmitOptions, TransferRequest};

/// A batch that was submitted. `P` is what it returns at its end: `()` for raw requests, the [`Registered`]
/// buffer for the owned API.
///
/// Dropping it cancels what is still in flight. A buffer inside is freed when that has drained. A buffer that
/// cannot drain is leaked and counted, never freed while a fabric may still write it. So is a buffer that
/// another engine registered.
///
/// A waker, and the `Drop` of a buffer, run on the worker, on any thread that calls the engine, or on one
/// that sends a notification, with no lock held: they may call the engine. While they run on the worker, it
/// does nothing else.
///
/// A buffer cannot be touched while it is in flight, because the transfer holds it:
///
/// ```compile_fail,E0382
/// # use te_engine::{Registered, SegmentHandle, TransferEngine};
/// fn read(engine: &TransferEngine, mut buffer: Registered<Vec<u8>>, segment: SegmentHandle, addr: u64) {
///     let transfer = engine.read(buffer, 0..4096, segment, addr, None);
///     let _early = buffer.as_mut_slice(); // borrow of moved value
///     drop(transfer);
/// }
/// ```
///
/// and a reference to it cannot be kept during the transfer:
///
/// ```compile_fail,E0505
/// # use te_engine::{Registered, SegmentHandle, TransferEngine};
/// fn read(engine: &TransferEngine, mut buffer: Registered<Vec<u8>>, segment: SegmentHandle, addr: u64) {
///     let bytes = buffer.as_mut_slice();
///     let transfer = engine.read(buffer, 0..4096, segment, addr, None); // move out while borrowed
///     drop((transfer, bytes));
/// }
/// ```
#[must_use = "dropping a transfer cancels it"]
pub struct Transfer<P: Payload = ()> {
    shared: Arc<Shared>,
    engine: Arc<Inner>,
    payload: Option<P>,
}

impl<P: Payload> Transfer<P> {
    pub(crate) fn new(shared: Arc<Shared>, engine: Arc<Inner>, payload: P) -> Self {
        Self { shared, engine, payload: Some(payload) }
    }

    /// The state of the batch. Does not wait, and takes no lock: made to be called in a loop, as
    /// [`report`](Self::report), [`request`](Self::request) and [`notified`](Self::notified) are.
    #[must_use]
    pub fn status(&self) -> Status {
        self.report().status
    }

    /// Everything that is known about the batch now. Does not wait. A batch that was refused is `Failed`;
    /// [`wait`](Self::wait) returns the reason.
    #[must_use]
    pub fn report(&self) -> BatchReport {
        let blank = BatchReport {
            status: Status::Pending,
            bytes: 0,
            requests_failed: 0,
            error: None,
            fence_needed: false,
            quarantined: false,
        };
        match self.shared.end.get() {
            None if self.engine.mark.is_forked() => BatchReport {
                status: Status::Failed,
                requests_failed: self.shared.requests.len() as u32,
                error: Some(ErrorKind::Forked.into()),
                ..blank
            },
            None => blank,
            Some(End::Refused(_)) => BatchReport {
                status: Status::Failed,
                requests_failed: self.shared.requests.len() as u32,
                ..blank
            },
            Some(End::Ended { report, .. }) => *report,
        }
    }

    /// Whether the owner of the first request's segment has accepted the
    /// [notification](SubmitOptions::notify) of this batch. `None` when none was given, and when none is sent
    /// because the batch has not ended, or not `Completed`.
    #[must_use]
    pub fn notified(&self) -> Option<Result<(), SegmentError>> {
        match self.shared.end.get() {
            Some(End::Ended { notified, .. }) => notified.clone(),
            _ => None,
        }
    }

    /// The number of requests in the batch.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.shared.requests.len()
    }

    /// What is known about request `index`; `None` if the batch has no such request.
    #[must_use]
    pub fn request(&self, index: usize) -> Option<RequestStatus> {
        let request = self.shared.requests.get(index)?;
        let status = |status, bytes, outcome| RequestStatus {
            status,
            bytes,
            error: None,
            outcome,
            fence_needed: false,
            crc32c: None,
        };
        Some(match self.shared.end.get() {
            None if self.engine.mark.is_forked() => RequestStatus {
                error: Some(ErrorKind::Forked.into()),
                ..status(Status::Failed, 0, Outcome::Unknown)
            },
            None => status(Status::Pending, 0, Outcome::Unknown),
            Some(End::Refused(_)) => status(Status::Failed, 0, Outcome::NotApplied),
            Some(End::Ended { requests: Some(requests), .. }) => *requests.get(index)?,
            Some(End::Ended { requests: None, .. }) => {
                status(Status::Completed, request.len, Outcome::Applied)
            }
        })
    }

    /// Waits until the batch has ended, at most `timeout` (`None`: until it ends, which the timeout of the
    /// batch bounds). This thread does copies within the host itself, spins for `spin_us`, then sleeps.
    ///
    /// # Errors
    /// `Ended` when the batch ended other than `Completed`; `Request` or `Segment` when it was refused;
    /// `WaitTimedOut` when it has not ended (it continues); `Forked`.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<BatchReport, TransferError> {
        if let Some(end) = self.shared.end.get() {
            return end.verdict();
        }
        if self.engine.mark.is_forked() {
            return Err(TransferError::Forked);
        }
        // A deadline that overflows `Instant` means no deadline.
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let late = || until.is_some_and(|until| Instant::now() >= until);
        // Copies within the host need no other thread.
        self.engine.help(|| self.shared.end.get().is_some() || late());
        // This thread is the worker, in a user's waker or drop: no other thread is bound to make progress.
        while self.shared.end.get().is_none() && self.engine.on_worker() && !late() {
            self.engine.help(|| self.shared.end.get().is_some() || late());
            std::thread::yield_now();
        }
        let spin = Duration::from_micros(u64::from(self.engine.config.spin_us));
        self.shared.wait(spin, until).ok_or(TransferError::WaitTimedOut)?.verdict()
    }

    /// Cancels the batch. It still ends exactly once: `Canceled`, or with the end that came first.
    /// [`wait`](Self::wait) returns it.
    pub fn cancel(&self) {
        if self.shared.end.get().is_none() {
            self.engine.cancel(self.shared.clone());
        }
    }

    /// Takes the payload, if nothing touches it any more.
    fn take_payload(&mut self) -> Option<P> {
        match self.shared.end.get() {
            None => None,
            Some(End::Ended { report, .. }) if report.quarantined => None,
            Some(_) => self.payload.take(),
        }
    }
}

impl<B: Buffer> Transfer<Registered<B>> {
    /// Waits until the batch has ended and returns the buffer. `None` in place of the buffer: it is
    /// quarantined. A fabric may still write it, and it stays with the engine.
    pub fn join(mut self) -> (Result<BatchReport, TransferError>, Option<Registered<B>>) {
        (self.wait(None), self.take_payload())
    }

    /// The buffer, if the transfer has ended.
    ///
    /// # Errors
    /// The transfer itself, when it has not ended or when the buffer is quarantined.
    pub fn into_buffer(mut self) -> Result<Registered<B>, Self> {
        self.take_payload().ok_or(self)
    }
}

impl<P: Payload> fmt::Debug for Transfer<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer").field("report", &self.report()).finish_non_exhaustive()
    }
}

impl<P: Payload> Drop for Transfer<P> {
    fn drop(&mut self) {
        if self.engine.mark.is_forked() {
            // In the parent the transfer continues. Here its locks may be held, and its buffer leaks.
            return;
        }
        let ended = self.shared.end.get().is_some();
        self.shared.end.forget_waker();
        match self.payload.take().and_then(Payload::abandon) {
            Some(abandoned) => self.engine.abandon(self.shared.clone(), abandoned),
            None if !ended => self.engine.cancel(self.shared.clone()),
            None => {}
        }
    }
}

mod future {
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use super::*;

    // Nothing inside is pinned; the payload is only ever moved.
    impl<P: Payload> Unpin for Transfer<P> {}

    impl<P: Payload> Transfer<P> {
        fn poll_end(&mut self, cx: &Context<'_>) -> Poll<Result<BatchReport, TransferError>> {
            if self.shared.end.get().is_none() {
                if self.engine.mark.is_forked() {
                    return Poll::Ready(Err(TransferError::Forked));
                }
                self.shared.end.set_waker(cx.waker());
            }
            match self.shared.end.get() {
                None => Poll::Pending,
                Some(end) => Poll::Ready(end.verdict()),
            }
        }
    }

    /// Ends as [`Transfer::wait`] does. Needs no particular runtime.
    impl Future for Transfer<()> {
        type Output = Result<BatchReport, TransferError>;

        fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
            self.get_mut().poll_end(cx)
        }
    }

    /// Ends as [`Transfer::join`] does. Needs no particular runtime.
    impl<B: Buffer> Future for Transfer<Registered<B>> {
        type Output = (Result<BatchReport, TransferError>, Option<Registered<B>>);

        fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
            let this = self.get_mut();
            this.poll_end(cx).map(|end| (end, this.take_payload()))
        }
    }
}

/// What a transfer and the worker share.
pub(crate) struct Shared {
    pub(crate) requests: Box<[TransferRequest]>,
    pub(crate) options: SubmitOptions,
    /// The owned buffer that the requests may use.
    pub(crate) owned: Option<MemSpan>,
    /// Index of the batch plus one; 0: not submitted yet. Used under the worker's lock.
    pub(crate) slot: AtomicU32,
    pub(crate) end: Ending<End>,
}

/// How a transfer ended.
pub(crate) enum End {
    /// The batch was not accepted.
    Refused(TransferError),
    /// The batch was accepted and has ended. `requests` is `None` when all of them completed; `notified` as
    /// in [`Transfer::notified`].
    Ended {
        report: BatchReport,
        requests: Option<Box<[RequestStatus]>>,
        notified: Option<Result<(), SegmentError>>,
    },
}

impl Shared {
    pub(crate) fn new(
        requests: Box<[TransferRequest]>,
        options: SubmitOptions,
        owned: Option<MemSpan>,
    ) -> Self {
        Self { requests, options, owned, slot: AtomicU32::new(0), end: Ending::new() }
    }

    fn wait(&self, spin: Duration, until: Option<Instant>) -> Option<&End> {
        let start = Instant::now();
        // A clock read costs as much as the rest of the loop.
        loop {
            for _ in 0..32 {
                if let Some(end) = self.end.get() {
                    return Some(end);
                }
                std::hint::spin_loop();
            }
            // The worker may need the core that this thread spins on.
            std::thread::yield_now();
            let now = Instant::now();
            if now - start >= spin || until.is_some_and(|until| now >= until) {
                break;
            }
        }
        self.end.wait_until(until)
    }
}

impl End {
    /// A batch or fence that completed.
    pub(crate) fn completed(report: BatchReport) -> Self {
        Self::Ended { report, requests: None, notified: None }
    }

    fn verdict(&self) -> Result<BatchReport, TransferError> {
        match self {
            Self::Refused(error) => Err(error.clone()),
            Self::Ended { report, .. } => verdict(*report),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use te_core::{Access, Op};

    use super::*;
    use crate::{Config, Fabrics, TransferEngine};

    #[test]
    fn polling_a_transfer_takes_no_lock_of_the_engine() {
        let config = Config { fabrics: Fabrics::LOCAL, ..Config::default() };
        let engine = TransferEngine::start(config).unwrap();
        let region = engine.alloc_shared(4096, Access::all()).unwrap();
        let segment = engine.open_segment(engine.name()).unwrap();
        let local = (region.id(), 0).into();
        let remote_addr = region.addr() + 2048;
        let write = TransferRequest { op: Op::Write, local, segment, remote_addr, len: 8 };
        // No thread takes a turn from here on.
        let held = engine.0.link.hold();
        let transfer = Arc::new(engine.submit(&[write], None).unwrap());
        let (say, heard) = channel();
        let polled = transfer.clone();
        let thread = std::thread::spawn(move || {
            let status = (polled.status(), polled.request(0).unwrap().status);
            say.send((status, polled.report().bytes, polled.notified())).unwrap();
        });
        let pending = (Status::Pending, Status::Pending);
        assert_eq!(
            heard.recv_timeout(Duration::from_secs(60)),
            Ok((pending, 0, None)),
            "it waits for a lock"
        );
        drop(held);
        thread.join().unwrap();
        assert_eq!(transfer.wait(None).unwrap().bytes, 8);
        assert_eq!(transfer.status(), Status::Completed);
    }
}
