//! The thread behind a [`TransferEngine`](crate::TransferEngine), and the callers that do its work.
//!
//! The thread that holds the lock on [`State`] is the engine's polling thread for one *turn*: it takes
//! commands, polls, and wakes what waits for a transfer. Mostly that thread is the worker. But a thread hop
//! costs more than a small copy, so a caller that finds the lock free takes the turn itself, for its own
//! command and all others in the mailbox; it never waits for the lock. What is left after that turn is the
//! worker's: the caller rings the bell.
//!
//! No code of a user runs under the lock: wakers and the drops of buffers wait in an [`Outbox`] until it is
//! released. So they may call the engine. They run on the thread that took the turn.
//!
//! How the worker sleeps without missing a wake-up is in [`Parking`].

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::vec::Vec;

use nix::sys::eventfd::{EfdFlags, EventFd};
use te_core::{BatchHandle, Mailbox, Status};
use te_host::{Spin, park};

use crate::engine::{Ended, Engine, FenceHandle, Peers, SegmentOwner};
use crate::error::{RegisterError, SegmentError, TransferError};
use crate::notifier::Notifier;
use crate::ordered::Parking;
use crate::payload::{Abandoned, Freed};
use crate::request::{BatchReport, SegmentHandle};
use crate::transfer::{End, Shared};

/// Commands handled in one turn before the rails are polled.
const COMMANDS_MAX: usize = 64;
/// Time between two attempts to free the buffer of a dropped transfer.
const RECLAIM: Duration = Duration::from_millis(1);

/// What callers hand to the worker.
pub(crate) enum Command {
    Submit(Arc<Shared>),
    Fence(Arc<Shared>, SegmentHandle, Option<Duration>),
    Cancel(Arc<Shared>),
    Abandon(Arc<Shared>, Abandoned),
    /// Any operation of the control path.
    Call(Box<dyn FnOnce(&mut Engine) + Send>),
}

/// What callers and the worker share.
pub(crate) struct Link {
    mailbox: Mailbox<Command>,
    /// Ends the worker's sleep.
    bell: EventFd,
    parking: Parking,
    /// The last handle is gone: the worker is to end.
    stop: AtomicBool,
    /// The worker takes no more commands.
    closed: AtomicBool,
    /// `None` before the worker starts and after it has wound up.
    state: Mutex<Option<State>>,
    /// Transfers that have not ended.
    pub(crate) outstanding: AtomicU32,
    /// [`Stats::leaked_buffers`](crate::Stats::leaked_buffers).
    pub(crate) leaked_buffers: AtomicU64,
    /// [`Stats::leaked_bytes`](crate::Stats::leaked_bytes).
    pub(crate) leaked_bytes: AtomicU64,
}

impl Link {
    pub(crate) fn new(commands_max: usize) -> std::io::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Self {
            mailbox: Mailbox::new(commands_max),
            bell: EventFd::from_flags(flags)?,
            parking: Parking::new(),
            stop: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            state: Mutex::new(None),
            outstanding: AtomicU32::new(0),
            leaked_buffers: AtomicU64::new(0),
            leaked_bytes: AtomicU64::new(0),
        })
    }

    /// Hands a command over, or returns it when the mailbox is full or the worker has ended. With `help`,
    /// this thread carries it out if the engine is free.
    pub(crate) fn push(self: &Arc<Self>, command: Command, help: bool) -> Result<(), Command> {
        if self.closed.load(Ordering::Acquire) {
            return Err(command);
        }
        self.mailbox.push(command)?;
        if !help || self.help().is_none() {
            self.ring();
        }
        Ok(())
    }

    /// Takes a turn on this thread, unless another thread is at it (`None`). Returns whether there was
    /// something to do.
    pub(crate) fn help(self: &Arc<Self>) -> Option<bool> {
        let mut guard = self.state.try_lock().ok()?;
        let state = guard.as_mut()?;
        let busy = state.turn(self);
        let due = state.engine.wake_at();
        let left = !state.reclaims.is_empty();
        let outbox = std::mem::take(&mut state.outbox);
        drop(guard);
        let sooner = due.is_some_and(|due| self.parking.sleeps_past(due.as_nanos()));
        if left || sooner || self.outstanding.load(Ordering::Relaxed) > 0 || !self.mailbox.is_empty() {
            self.ring();
        }
        // Last: it may call the engine.
        outbox.deliver();
        Some(busy)
    }

    /// Hands a command over, waiting for room. False: the worker has ended.
    pub(crate) fn push_all(self: &Arc<Self>, mut command: Command) -> bool {
        loop {
            match self.push(command, true) {
                Ok(()) => return true,
                Err(_) if self.is_closed() => return false,
                Err(back) => command = back,
            }
            // The worker may be in a user's code, or be this thread.
            let _ = self.help();
            std::thread::yield_now();
        }
    }

    /// Ends a transfer that has no batch, or not any more. Runs a user's waker, so no lock may be held.
    fn finish_now(&self, shared: Arc<Shared>, end: End) {
        let mut outbox = Outbox::default();
        self.finish(shared, end, &mut outbox);
        outbox.deliver();
    }

    fn finish(&self, shared: Arc<Shared>, end: End, outbox: &mut Outbox) {
        self.outstanding.fetch_sub(1, Ordering::Relaxed);
        if shared.end.set(end) {
            outbox.wakes.push(shared);
        }
    }

    fn leak(&self, abandoned: &Abandoned, why: &str) {
        log::error!("a buffer of {} bytes {why}: it is leaked, not freed", abandoned.bytes());
        self.count_leak(abandoned.bytes());
    }

    pub(crate) fn count_leak(&self, bytes: u64) {
        self.leaked_buffers.fetch_add(1, Ordering::Relaxed);
        self.leaked_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.ring();
    }

    fn ring(&self) {
        if self.parking.must_ring() {
            // This fails only when the counter is full, and then the worker wakes anyway.
            let _ = self.bell.write(1);
        }
    }
}

/// The engine, and what waits for it.
struct State {
    engine: Engine,
    /// By batch index.
    transfers: Vec<Option<Live>>,
    fences: Vec<(FenceHandle, Arc<Shared>)>,
    /// Buffers of dropped transfers, and until when each may drain.
    reclaims: Vec<(Instant, Abandoned)>,
    ended: Vec<Ended>,
    outbox: Outbox,
    /// Sends the notifications of transfers that have completed.
    notifier: Notifier,
    peers: Peers,
}

/// A transfer whose batch has not ended.
struct Live {
    batch: BatchHandle,
    shared: Arc<Shared>,
    /// Who gets its notification, if it has one.
    owner: Option<SegmentOwner>,
}

/// Code of users that runs once the lock is released. Empty, and without memory, on most turns.
#[derive(Default)]
struct Outbox {
    /// Transfers that have ended and that a thread or a waker waits for.
    wakes: Vec<Arc<Shared>>,
    /// Buffers whose registration has ended.
    freed: Vec<Freed>,
}

impl Outbox {
    fn deliver(self) {
        for shared in self.wakes {
            shared.end.wake();
        }
        for freed in self.freed {
            freed.drop();
        }
    }
}

/// What the worker's thread runs.
pub(crate) struct Worker {
    link: Arc<Link>,
    /// File descriptors that it sleeps on, beside the bell.
    event_sources: Vec<i32>,
    spin: Spin,
    drain: Duration,
}

impl Worker {
    pub(crate) fn new(mut engine: Engine, link: Arc<Link>, notifier: Notifier) -> Self {
        engine.record_ended();
        let config = engine.config();
        let batches_max = config.batches_max as usize;
        let (spin, drain) = (config.spin_us.into(), config.drain_ms.into());
        let (spin, drain) = (Spin::new(Duration::from_micros(spin)), Duration::from_millis(drain));
        let event_sources = engine.event_sources().collect();
        let (peers, ..) = engine.parts();
        let state = State {
            engine,
            transfers: (0..batches_max).map(|_| None).collect(),
            fences: Vec::new(),
            reclaims: Vec::new(),
            ended: Vec::new(),
            outbox: Outbox::default(),
            notifier,
            peers,
        };
        *link.state.lock().unwrap_or_else(PoisonError::into_inner) = Some(state);
        Self { link, event_sources, spin, drain }
    }

    /// Works until [`Link::stop`].
    pub(crate) fn run(mut self) {
        while !self.link.stop.load(Ordering::Acquire) {
            let (busy, idle_time, outbox) = {
                let mut guard = self.link.state.lock().unwrap_or_else(PoisonError::into_inner);
                let Some(state) = guard.as_mut() else { break };
                let before = state.engine.activity();
                let busy = state.turn(&self.link);
                // Serving a peer is work, too: a peer that has just sent a request is likely to send another.
                let busy = busy || state.engine.activity() != before;
                (busy, state.engine.idle_time(), std::mem::take(&mut state.outbox))
            };
            outbox.deliver();
            if busy {
                self.spin.reset();
            } else if idle_time == Some(Duration::ZERO) {
                // A rail has work that no event announces.
            } else if !self.spin.again() {
                self.park();
            }
        }
        self.wind_up();
    }

    /// Sleeps until the bell or a rail.
    fn park(&self) {
        let link = &self.link;
        let timeout = {
            let guard = link.state.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(state) = guard.as_ref() else { return };
            link.parking.announce(state.engine.wake_at().map_or(u64::MAX, te_core::Instant::as_nanos));
            let soon = (!state.reclaims.is_empty()).then_some(RECLAIM);
            state.engine.idle_time().into_iter().chain(soon).min()
        };
        if timeout != Some(Duration::ZERO) && link.mailbox.is_empty() && !link.stop.load(Ordering::Relaxed) {
            park(self.event_sources.iter().copied().chain([link.bell.as_fd().as_raw_fd()]), timeout);
        }
        link.parking.leave();
        // The bell has not rung when a rail or the timeout ended the sleep.
        let _ = link.bell.read();
    }

    /// Ends what is in flight and refuses what is still in the mailbox.
    fn wind_up(self) {
        let link = &self.link;
        link.closed.store(true, Ordering::Release);
        let state = link.state.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(state) = state {
            state.wind_up(link, self.drain);
        }
        // Commands that were pushed during the end.
        let mut outbox = Outbox::default();
        while let Some(command) = link.mailbox.pop() {
            if let Command::Submit(shared) | Command::Fence(shared, ..) = command {
                link.finish(shared, End::Refused(TransferError::Closed), &mut outbox);
            }
        }
        outbox.deliver();
    }
}

impl State {
    /// Takes commands, polls, and ends transfers. False: there was nothing to do.
    fn turn(&mut self, link: &Arc<Link>) -> bool {
        let mut busy = false;
        for _ in 0..COMMANDS_MAX {
            let Some(command) = link.mailbox.pop() else { break };
            self.handle(link, command);
            busy = true;
        }
        busy |= self.engine.poll() > 0;
        self.engine.take_ended(&mut self.ended);
        busy |= !self.ended.is_empty();
        self.finish(link);
        if !self.reclaims.is_empty() {
            self.reclaim(link);
        }
        busy
    }

    fn handle(&mut self, link: &Link, command: Command) {
        match command {
            Command::Submit(shared) => match self.submit(&shared) {
                Ok((batch, owner)) => {
                    shared.slot.store(batch.index() as u32 + 1, Ordering::Relaxed);
                    self.transfers[batch.index()] = Some(Live { batch, shared, owner });
                }
                Err(error) => link.finish(shared, End::Refused(error), &mut self.outbox),
            },
            Command::Fence(shared, segment, timeout) => match self.engine.fence(segment, timeout) {
                Ok(fence) => self.fences.push((fence, shared)),
                Err(error) => link.finish(shared, End::Refused(error), &mut self.outbox),
            },
            Command::Cancel(shared) => self.cancel(&shared),
            Command::Abandon(shared, abandoned) => {
                self.cancel(&shared);
                let drain = Duration::from_millis(u64::from(self.engine.config().drain_ms));
                self.reclaims.push((Instant::now() + drain * 2, abandoned));
            }
            Command::Call(call) => call(&mut self.engine),
        }
    }

    fn submit(&mut self, shared: &Shared) -> Result<(BatchHandle, Option<SegmentOwner>), TransferError> {
        let options = &shared.options;
        let owner = match (&options.notice, shared.requests.first()) {
            (Some(notice), Some(first)) => {
                let owner = self.engine.notice_to(first.segment, notice);
                Some(owner.map_err(|source| TransferError::Segment { index: 0, source })?)
            }
            _ => None,
        };
        let fabric = options.fabric.as_deref();
        let batch = self.engine.submit_from(&shared.requests, options.timeout, fabric, shared.owned)?;
        Ok((batch, owner))
    }

    fn cancel(&mut self, shared: &Arc<Shared>) {
        let Some(index) = (shared.slot.load(Ordering::Relaxed) as usize).checked_sub(1) else { return };
        if let Some(live) = &self.transfers[index]
            && Arc::ptr_eq(&live.shared, shared)
        {
            let canceled = self.engine.cancel(live.batch);
            debug_assert!(canceled.is_ok(), "a live transfer's batch is not freed");
        }
    }

    /// Ends the transfers of the batches and fences that have ended.
    fn finish(&mut self, link: &Arc<Link>) {
        let mut ended = std::mem::take(&mut self.ended);
        for end in ended.drain(..) {
            match end {
                Ended::Batch(handle) => self.finish_batch(link, handle),
                Ended::Fence(fence) => {
                    let Some(at) = self.fences.iter().position(|(live, _)| *live == fence) else { continue };
                    let (_, shared) = self.fences.swap_remove(at);
                    let end = match self.engine.fence_report(fence) {
                        Ok(report) => End::completed(report),
                        Err(error) => End::Refused(error),
                    };
                    let freed = self.engine.free_fence(fence);
                    debug_assert!(freed.is_ok(), "a transfer's fence is freed here alone");
                    link.finish(shared, end, &mut self.outbox);
                }
            }
        }
        self.ended = ended;
    }

    fn finish_batch(&mut self, link: &Arc<Link>, handle: BatchHandle) {
        let Some(Live { shared, owner, .. }) =
            self.transfers[handle.index()].take_if(|live| live.batch == handle)
        else {
            return;
        };
        let end = match self.engine.report(handle) {
            Ok(report) if report.status == Status::Completed => Ok(report),
            Ok(report) => {
                let one = |index| self.engine.request_status(handle, index);
                let requests = (0..shared.requests.len()).map_while(|index| one(index).ok()).collect();
                Err(End::Ended { report, requests: Some(requests), notified: None })
            }
            Err(error) => Err(End::Refused(error)),
        };
        let freed = self.engine.free(handle);
        debug_assert!(freed.is_ok(), "a transfer's batch is freed here alone");
        match (end, owner) {
            (Ok(report), Some(owner)) => self.notify(link, shared, owner, report),
            (Ok(report), None) => link.finish(shared, End::completed(report), &mut self.outbox),
            (Err(end), _) => link.finish(shared, end, &mut self.outbox),
        }
    }

    /// Sends the notification of a transfer that has completed, and then ends the transfer.
    fn notify(&mut self, link: &Arc<Link>, shared: Arc<Shared>, owner: SegmentOwner, report: BatchReport) {
        let end = move |notified| End::Ended { report, requests: None, notified: Some(notified) };
        let to = owner.place().to_owned();
        let (peers, sending, its_link) = (self.peers.clone(), shared.clone(), link.clone());
        let send = move || {
            let notice = sending.options.notice.as_ref();
            let notified =
                notice.map_or(Ok(()), |notice| peers.notify(&owner, &notice.name, &notice.message));
            if let Err(SegmentError::Restarted { found, .. }) = notified {
                let segment = sending.requests[0].segment;
                // Without a worker no thread can use the segment.
                let noted = Box::new(move |engine: &mut Engine| engine.note_restart(segment, found));
                let _ = its_link.push_all(Command::Call(noted));
            }
            move || its_link.finish_now(sending, end(notified))
        };
        if !self.notifier.push(to, send) {
            link.finish(shared, end(Err(SegmentError::Closed)), &mut self.outbox);
        }
    }

    /// Frees the buffers of dropped transfers that nothing uses any more.
    fn reclaim(&mut self, link: &Link) {
        let now = Instant::now();
        for index in (0..self.reclaims.len()).rev() {
            let Abandoned { region, span, .. } = self.reclaims[index].1;
            // A caller can pass a buffer that another engine registered. That engine may still use it.
            if !self.engine.owns(region, span) {
                let (_, abandoned) = self.reclaims.swap_remove(index);
                link.leak(&abandoned, "was registered by another engine");
                continue;
            }
            match self.engine.unregister(region) {
                Ok(()) => {
                    let (_, abandoned) = self.reclaims.swap_remove(index);
                    #[allow(unsafe_code, reason = "frees a buffer whose registration has just ended")]
                    // SAFETY: the engine owned the span as this region, and `unregister` returned `Ok` for
                    // it.
                    self.outbox.freed.push(unsafe { abandoned.free() });
                }
                Err(RegisterError::Busy { .. }) if now < self.reclaims[index].0 => {}
                Err(_) => {
                    let (_, abandoned) = self.reclaims.swap_remove(index);
                    link.leak(&abandoned, "did not drain in time");
                }
            }
        }
    }

    /// Cancels what is in flight, and waits at most `drain` for its end.
    fn wind_up(mut self, link: &Arc<Link>, drain: Duration) {
        let start = Instant::now();
        for live in self.transfers.iter().flatten() {
            let canceled = self.engine.cancel(live.batch);
            debug_assert!(canceled.is_ok(), "a live transfer's batch is not freed");
        }
        while start.elapsed() < drain {
            let busy = self.turn(link);
            // No lock is held: the state has been taken out of the link.
            std::mem::take(&mut self.outbox).deliver();
            let in_flight = self.transfers.iter().any(Option::is_some) || !self.reclaims.is_empty();
            if !busy && !in_flight {
                break;
            }
            if !busy {
                self.engine.park(Some(RECLAIM));
            }
        }
        let Self { engine, transfers, fences, reclaims, mut outbox, .. } = self;
        // Ends what is still in flight.
        drop(engine);
        let transfers = transfers.into_iter().flatten().map(|live| live.shared);
        for shared in transfers.chain(fences.into_iter().map(|(_, shared)| shared)) {
            link.finish(shared, End::Refused(TransferError::Closed), &mut outbox);
        }
        outbox.deliver();
        for (_, abandoned) in reclaims {
            link.leak(&abandoned, "did not drain in time");
        }
    }
}

#[cfg(test)]
impl Link {
    /// Keeps all threads from taking a turn.
    pub(crate) fn hold(&self) -> impl Sized + '_ {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
