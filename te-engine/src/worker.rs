//! The thread that owns the engine of a [`TransferEngine`](crate::TransferEngine).

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};
use std::vec::Vec;

use nix::sys::eventfd::{EfdFlags, EventFd};
use te_core::{BatchHandle, Mailbox, Status};

use crate::engine::{Ended, Engine, FenceHandle};
use crate::error::{RegisterError, TransferError};
use crate::payload::Abandoned;
use crate::request::SegmentHandle;
use crate::transfer::{End, Shared};

/// Commands handled before the rails have their turn.
const COMMANDS_MAX: usize = 64;
/// How often a buffer that nobody wants any more is tried again.
const RECLAIM: Duration = Duration::from_millis(1);

/// What callers ask of the worker.
pub(crate) enum Command {
    Submit(Arc<Shared>, Option<Duration>),
    Fence(Arc<Shared>, SegmentHandle, Option<Duration>),
    Cancel(Arc<Shared>),
    Abandon(Arc<Shared>, Abandoned),
    /// Anything of the control path.
    Call(Box<dyn FnOnce(&mut Engine) + Send>),
}

/// What callers and the worker share.
pub(crate) struct Link {
    mailbox: Mailbox<Command>,
    bell: EventFd,
    /// The worker sleeps, or is about to: ring.
    parked: AtomicBool,
    stop: AtomicBool,
    closed: AtomicBool,
    /// Transfers that have not ended.
    pub(crate) outstanding: AtomicU32,
    pub(crate) leaked_buffers: AtomicU64,
    pub(crate) leaked_bytes: AtomicU64,
}

impl Link {
    pub(crate) fn new(commands_max: usize) -> std::io::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Self {
            mailbox: Mailbox::new(commands_max),
            bell: EventFd::from_flags(flags)?,
            parked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            outstanding: AtomicU32::new(0),
            leaked_buffers: AtomicU64::new(0),
            leaked_bytes: AtomicU64::new(0),
        })
    }

    /// Hands a command over, or gives it back when there is no room or nobody to take it.
    pub(crate) fn push(&self, command: Command) -> Result<(), Command> {
        if self.closed.load(Ordering::Acquire) {
            return Err(command);
        }
        self.mailbox.push(command)?;
        self.ring();
        Ok(())
    }

    /// Hands a command over, waiting for room. False: nobody is there to take it.
    pub(crate) fn push_all(&self, mut command: Command) -> bool {
        loop {
            match self.push(command) {
                Ok(()) => return true,
                Err(_) if self.is_closed() => return false,
                Err(back) => command = back,
            }
            std::thread::yield_now();
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.ring();
    }

    fn ring(&self) {
        // Pairs with the fence in `Worker::park`: it sees what was pushed, or we see that it sleeps.
        fence(Ordering::SeqCst);
        if self.parked.load(Ordering::Relaxed) && self.parked.swap(false, Ordering::Relaxed) {
            // It can only fail when the counter is full: then the worker wakes anyway.
            let _ = self.bell.write(1);
        }
    }
}

pub(crate) struct Worker {
    engine: Engine,
    link: Arc<Link>,
    /// By batch index.
    transfers: Vec<Option<(BatchHandle, Arc<Shared>)>>,
    fences: Vec<(FenceHandle, Arc<Shared>)>,
    /// Buffers without owners, and until when their memory may drain.
    reclaims: Vec<(Instant, Abandoned)>,
    ended: Vec<Ended>,
}

impl Worker {
    pub(crate) fn new(mut engine: Engine, link: Arc<Link>) -> Self {
        engine.tell_ended();
        let batches_max = engine.config().batches_max as usize;
        Self {
            engine,
            link,
            transfers: (0..batches_max).map(|_| None).collect(),
            fences: Vec::new(),
            reclaims: Vec::new(),
            ended: Vec::new(),
        }
    }

    /// Works until it is told to stop.
    pub(crate) fn run(mut self) {
        let spin = Duration::from_micros(u64::from(self.engine.config().spin_us));
        let mut idle_since = None;
        while !self.link.stop.load(Ordering::Acquire) {
            if self.turn() {
                idle_since = None;
            } else if self.engine.idle_time() == Some(Duration::ZERO) {
            } else if idle_since.get_or_insert_with(Instant::now).elapsed() < spin {
                std::hint::spin_loop();
            } else {
                self.park();
                idle_since = None;
            }
        }
        self.wind_up();
    }

    /// Takes commands, polls, tells who waits. False: there was nothing to do.
    fn turn(&mut self) -> bool {
        let mut busy = false;
        for _ in 0..COMMANDS_MAX {
            let Some(command) = self.link.mailbox.pop() else { break };
            self.handle(command);
            busy = true;
        }
        busy |= self.engine.poll() > 0;
        self.engine.take_ended(&mut self.ended);
        busy |= !self.ended.is_empty();
        self.tell();
        if !self.reclaims.is_empty() {
            self.reclaim();
        }
        busy
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Submit(shared, timeout) => {
                match self.engine.submit_from(&shared.requests, timeout, shared.owned) {
                    Ok(handle) => {
                        shared.slot.store(handle.index() as u32 + 1, Ordering::Relaxed);
                        self.transfers[handle.index()] = Some((handle, shared));
                    }
                    Err(error) => self.finish(&shared, End::Refused(error)),
                }
            }
            Command::Fence(shared, segment, timeout) => match self.engine.fence(segment, timeout) {
                Ok(fence) => self.fences.push((fence, shared)),
                Err(error) => self.finish(&shared, End::Refused(error)),
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

    fn cancel(&mut self, shared: &Arc<Shared>) {
        let Some(index) = (shared.slot.load(Ordering::Relaxed) as usize).checked_sub(1) else { return };
        if let Some((handle, live)) = &self.transfers[index]
            && Arc::ptr_eq(live, shared)
        {
            let canceled = self.engine.cancel(*handle);
            debug_assert!(canceled.is_ok(), "a live transfer's batch is not freed");
        }
    }

    /// Tells whoever waits for what has ended.
    fn tell(&mut self) {
        let mut ended = std::mem::take(&mut self.ended);
        for end in ended.drain(..) {
            match end {
                Ended::Batch(handle) => self.tell_batch(handle),
                Ended::Fence(fence) => {
                    let Some(at) = self.fences.iter().position(|(live, _)| *live == fence) else { continue };
                    let (_, shared) = self.fences.swap_remove(at);
                    let end = match self.engine.fence_report(fence) {
                        Ok(report) => End::Ended { report, requests: None },
                        Err(error) => End::Refused(error),
                    };
                    let freed = self.engine.free_fence(fence);
                    debug_assert!(freed.is_ok(), "nobody else frees a transfer's fence");
                    self.finish(&shared, end);
                }
            }
        }
        self.ended = ended;
    }

    fn tell_batch(&mut self, handle: BatchHandle) {
        let Some((_, shared)) = self.transfers[handle.index()].take_if(|(live, _)| *live == handle) else {
            return;
        };
        let end = match self.engine.report(handle) {
            Ok(report) if report.status == Status::Completed => End::Ended { report, requests: None },
            Ok(report) => {
                let one = |index| self.engine.request_status(handle, index);
                let requests = (0..shared.requests.len()).map_while(|index| one(index).ok()).collect();
                End::Ended { report, requests: Some(requests) }
            }
            Err(error) => End::Refused(error),
        };
        let freed = self.engine.free(handle);
        debug_assert!(freed.is_ok(), "nobody else frees a transfer's batch");
        self.finish(&shared, end);
    }

    fn finish(&self, shared: &Shared, end: End) {
        self.link.outstanding.fetch_sub(1, Ordering::Relaxed);
        shared.finish(end);
    }

    /// Frees buffers that nobody wants any more and nothing uses any more.
    fn reclaim(&mut self) {
        let now = Instant::now();
        for index in (0..self.reclaims.len()).rev() {
            match self.engine.unregister(self.reclaims[index].1.region) {
                Ok(()) => {
                    let (_, abandoned) = self.reclaims.swap_remove(index);
                    #[allow(unsafe_code, reason = "frees a buffer whose registration has just ended")]
                    // SAFETY: `unregister` returned `Ok` for its region.
                    unsafe {
                        abandoned.free();
                    }
                }
                Err(RegisterError::Busy { .. }) if now < self.reclaims[index].0 => {}
                Err(_) => {
                    let (_, abandoned) = self.reclaims.swap_remove(index);
                    self.leak(abandoned);
                }
            }
        }
    }

    fn leak(&self, abandoned: Abandoned) {
        log::error!("a buffer of {} bytes did not drain; it is leaked", abandoned.bytes);
        self.link.leaked_buffers.fetch_add(1, Ordering::Relaxed);
        self.link.leaked_bytes.fetch_add(abandoned.bytes, Ordering::Relaxed);
    }

    /// Sleeps until the bell or a rail.
    fn park(&mut self) {
        self.link.parked.store(true, Ordering::Relaxed);
        // Pairs with the fence in `Link::ring`.
        fence(Ordering::SeqCst);
        if self.link.mailbox.is_empty() && !self.link.stop.load(Ordering::Relaxed) {
            let soon = (!self.reclaims.is_empty()).then_some(RECLAIM);
            self.engine.park_with(Some(self.link.bell.as_fd().as_raw_fd()), soon);
        }
        self.link.parked.store(false, Ordering::Relaxed);
        // Empty when something else woke us.
        let _ = self.link.bell.read();
    }

    /// Ends what is in flight and refuses what comes after.
    fn wind_up(mut self) {
        self.link.closed.store(true, Ordering::Release);
        let drain = Duration::from_millis(u64::from(self.engine.config().drain_ms));
        let start = Instant::now();
        for (handle, _) in self.transfers.iter().flatten() {
            let canceled = self.engine.cancel(*handle);
            debug_assert!(canceled.is_ok(), "a live transfer's batch is not freed");
        }
        while start.elapsed() < drain {
            let busy = self.turn();
            let in_flight = self.transfers.iter().any(Option::is_some) || !self.reclaims.is_empty();
            if !busy && !in_flight {
                break;
            }
            if !busy {
                self.engine.park_with(None, Some(RECLAIM));
            }
        }
        let left: Vec<_> =
            self.transfers.iter_mut().filter_map(Option::take).map(|(_, shared)| shared).collect();
        let fences: Vec<_> = self.fences.drain(..).map(|(_, shared)| shared).collect();
        for shared in left.iter().chain(&fences) {
            self.finish(shared, End::Refused(TransferError::Closed));
        }
        for (_, abandoned) in std::mem::take(&mut self.reclaims) {
            self.leak(abandoned);
        }
        let Self { engine, link, .. } = self;
        drop(engine);
        // Whoever pushed while we closed.
        while let Some(command) = link.mailbox.pop() {
            if let Command::Submit(shared, _) | Command::Fence(shared, ..) = command {
                link.outstanding.fetch_sub(1, Ordering::Relaxed);
                shared.finish(End::Refused(TransferError::Closed));
            }
        }
    }
}
