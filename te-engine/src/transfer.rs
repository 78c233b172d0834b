//! A batch on its way, as its submitter sees it.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

use te_core::{Buffer, ErrorKind, MemSpan, Outcome, Registered, Status};

use crate::engine::verdict;
use crate::error::TransferError;
use crate::handle::Inner;
use crate::payload::Payload;
use crate::request::{BatchReport, RequestStatus, TransferRequest};

/// A batch that was submitted. `P` is what it gives back at its end: nothing for raw requests, the [`Registered`] buffer for
/// the owned API.
///
/// Dropping it cancels what is still on its way. A buffer inside is freed when that has drained; if it cannot drain, it is
/// leaked and counted, never freed under a fabric that may still write it. So is a buffer that another engine registered.
///
/// A waker, and the `Drop` of a buffer, run on the worker or on any thread that calls the engine, with no lock held: they may
/// call the engine. While they run on the worker, it does nothing else.
///
/// A buffer cannot be touched while it is in flight, since the transfer has it:
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
/// and a reference to it that is held over the transfer does not compile either:
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
    /// Whether the worker knows that a waker may wait.
    polled: bool,
}

impl<P: Payload> Transfer<P> {
    pub(crate) fn new(shared: Arc<Shared>, engine: Arc<Inner>, payload: P) -> Self {
        Self { shared, engine, payload: Some(payload), polled: false }
    }

    /// How far it is. Does not wait.
    #[must_use]
    pub fn status(&self) -> Status {
        self.report().status
    }

    /// Everything that is known about it now. Does not wait. A batch that was refused is `Failed`; [`wait`](Self::wait) says
    /// why.
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

    /// Requests in the batch.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.shared.requests.len()
    }

    /// What is known about request `index`; `None` when there is no such request.
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

    /// Waits until it has ended, at most `timeout` (`None`: as long as it takes, which its own timeout bounds). Helps with
    /// copies within the host, spins for `spin_us`, then sleeps.
    ///
    /// # Errors
    /// `Ended` when it ended other than `Completed`; `Request` or `Segment` when it was refused; `WaitTimedOut`: it goes on;
    /// `Forked`.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<BatchReport, TransferError> {
        if let Some(end) = self.shared.end.get() {
            return end.verdict();
        }
        if self.engine.mark.is_forked() {
            return Err(TransferError::Forked);
        }
        // Copies within the host need nobody else.
        // A time too far away to be told is none.
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let late = || until.is_some_and(|until| Instant::now() >= until);
        self.engine.help(|| self.shared.end.get().is_some() || late());
        // The worker in a user's waker or drop: nobody else is bound to work.
        while self.shared.end.get().is_none() && self.engine.on_worker() && !late() {
            self.engine.help(|| self.shared.end.get().is_some() || late());
            std::thread::yield_now();
        }
        let spin = Duration::from_micros(u64::from(self.engine.config.spin_us));
        self.shared.wait(spin, until).ok_or(TransferError::WaitTimedOut)?.verdict()
    }

    /// Starts its end. It still ends exactly once, `Canceled` or with whatever end was faster; `wait` tells.
    pub fn cancel(&self) {
        if self.shared.end.get().is_none() {
            self.engine.cancel(self.shared.clone());
        }
    }

    /// Gives the payload when nothing touches it any more.
    fn take_payload(&mut self) -> Option<P> {
        match self.shared.end.get() {
            None => None,
            Some(End::Ended { report, .. }) if report.quarantined => None,
            Some(_) => self.payload.take(),
        }
    }
}

impl<B: Buffer> Transfer<Registered<B>> {
    /// Waits until it has ended and gives the buffer back. `None` in place of the buffer: it is quarantined, something may
    /// still write it, and it stays with the engine.
    pub fn join(mut self) -> (Result<BatchReport, TransferError>, Option<Registered<B>>) {
        (self.wait(None), self.take_payload())
    }

    /// The buffer, if the transfer has ended.
    ///
    /// # Errors
    /// The transfer itself, when it has not, or when the buffer is quarantined.
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
            // In the parent it goes on. Here its locks may be held, and its buffer leaks.
            return;
        }
        let ended = self.shared.end.get().is_some();
        self.shared.forget_waker();
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
                self.shared.set_waker(cx.waker(), !self.polled);
                self.polled = true;
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
    /// The owned buffer that the requests may use.
    pub(crate) owned: Option<MemSpan>,
    /// The worker's: which batch it is, plus one.
    pub(crate) slot: AtomicU32,
    end: OnceLock<End>,
    /// Threads that sleep on `ended`, and one if a waker may wait.
    sleepers: AtomicU32,
    waker: Mutex<Option<Waker>>,
    ended: Condvar,
}

/// How a transfer ended.
pub(crate) enum End {
    /// It never began.
    Refused(TransferError),
    /// `requests` is `None` when all of them completed.
    Ended { report: BatchReport, requests: Option<Box<[RequestStatus]>> },
}

impl Shared {
    pub(crate) fn new(requests: Box<[TransferRequest]>, owned: Option<MemSpan>) -> Self {
        Self {
            requests,
            owned,
            slot: AtomicU32::new(0),
            end: OnceLock::new(),
            sleepers: AtomicU32::new(0),
            waker: Mutex::new(None),
            ended: Condvar::new(),
        }
    }

    /// The worker says how it ended; once. True: somebody may wait, so [`wake`](Self::wake) is due.
    pub(crate) fn finish(&self, end: End) -> bool {
        let first = self.end.set(end).is_ok();
        debug_assert!(first, "a transfer ends once");
        // Pairs with the fence of whoever is about to sleep: it sees the end, or we see it.
        fence(Ordering::SeqCst);
        self.sleepers.load(Ordering::Relaxed) > 0
    }

    /// Wakes whoever waits for the end. Runs a user's waker: not under a lock.
    pub(crate) fn wake(&self) {
        let waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.ended.notify_all();
        waker.into_iter().for_each(Waker::wake);
    }

    /// Nobody waits any more. A waker's drop is a user's code, too: it must not wait for the worker's turn.
    fn forget_waker(&self) {
        let waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(waker);
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
            // The worker may need the very core that we spin on.
            std::thread::yield_now();
            let now = Instant::now();
            if now - start >= spin || until.is_some_and(|until| now >= until) {
                break;
            }
        }
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let mut guard = self.waker.lock().unwrap_or_else(PoisonError::into_inner);
        while self.end.get().is_none() {
            guard = match until {
                None => self.ended.wait(guard).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        break;
                    }
                    self.ended.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        drop(guard);
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
        self.end.get()
    }

    fn set_waker(&self, waker: &Waker, first: bool) {
        let lock = || self.waker.lock().unwrap_or_else(PoisonError::into_inner);
        if lock().as_ref().is_none_or(|old| !old.will_wake(waker)) {
            // Cloned and dropped outside the lock: both are a user's code.
            let new = waker.clone();
            let old = lock().replace(new);
            drop(old);
        }
        if first {
            self.sleepers.fetch_add(1, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
    }
}

impl End {
    fn verdict(&self) -> Result<BatchReport, TransferError> {
        match self {
            Self::Refused(error) => Err(error.clone()),
            Self::Ended { report, .. } => verdict(*report),
        }
    }
}
