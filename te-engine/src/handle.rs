//! [`TransferEngine`]: the handle that threads share.

use std::fmt;
use std::ops::Range;
use std::string::String;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::vec::Vec;

use te_core::{Access, Buffer, MemSpan, Op, RegionId, Registered};
use te_host::fork::{Mark, Own};
use te_host::{AllocOptions, SharedMemory};

use crate::config::Config;
use crate::control::Inbox;
use crate::engine::{self, Engine, SegmentOwner};
use crate::error::{
    ExpelError, Forked, GivenBack, RegisterError, RequestProblem, SegmentError, Silent, StartError,
    TransferError,
};
use crate::fabrics::FabricEntry;
use crate::metadata::{KeeperState, Metadata, Registration};
use crate::payload::{Abandoned, Payload};
use crate::region::SharedRegion;
use crate::request::{
    Expulsion, Liveness, LocalAddr, Notification, RemoteRegion, SegmentHandle, Stats, TransferRequest,
};
use crate::transfer::{Shared, Transfer};
use crate::worker::{Command, Link, Worker};

/// A transfer engine behind a worker thread. Clones are handles to the same engine; the last one to go stops it.
///
/// In a child after a [fork](te_host::fork) every call is answered with `Forked`, nothing of the engine is touched, and dropping it
/// does nothing. The child starts an engine of its own.
#[derive(Clone)]
pub struct TransferEngine(Arc<Inner>);

impl TransferEngine {
    /// Opens the control port and the fabrics, and starts the worker.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start(config: Config) -> Result<Self, StartError> {
        Self::start_with(config, None)
    }

    /// As [`start`](Self::start), with another way from names to owners than [`Config::metadata`]'s.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start_with(config: Config, metadata: Option<Arc<dyn Metadata>>) -> Result<Self, StartError> {
        Self::start_over(config, metadata, &[])
    }

    /// As [`start`](Self::start), with `fabrics` of the caller beside those of [`Config::fabrics`], which may be none then. Each
    /// must start. Peers that have a fabric of the same name are reached over it.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start_with_fabrics(config: Config, fabrics: &[FabricEntry<'_>]) -> Result<Self, StartError> {
        Self::start_over(config, None, fabrics)
    }

    fn start_over(
        config: Config,
        metadata: Option<Arc<dyn Metadata>>,
        fabrics: &[FabricEntry<'_>],
    ) -> Result<Self, StartError> {
        let engine = Engine::start_over(config.clone(), metadata, fabrics)?;
        let (name, incarnation, identity) = (engine.name().into(), engine.incarnation(), engine.identity());
        let (metadata, registration, inbox) = engine.parts();
        let link = Arc::new(Link::new(config.mailbox_commands_max as usize)?);
        let worker = Worker::new(engine, link.clone());
        let thread = std::thread::Builder::new().name("te-worker".into()).spawn(move || worker.run())?;
        let (mark, thread, metadata) = (Mark::new(), Own::new(Some(thread)), Own::new(metadata));
        let inner =
            Inner { mark, link, thread, config, name, incarnation, identity, metadata, registration, inbox };
        Ok(Self(Arc::new(inner)))
    }

    /// The name under which peers open this engine's memory: `host:port` of its control port.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Which life of the process this is; another one after every start.
    #[must_use]
    pub fn incarnation(&self) -> u64 {
        self.0.incarnation
    }

    /// What peers know this engine by, on every fabric: random, never 0, another one after every start. See
    /// [`expel`](Self::expel).
    #[must_use]
    pub fn identity(&self) -> u64 {
        self.0.identity
    }

    /// What it was started with.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// How this engine's name stands in the directory.
    #[must_use]
    pub fn registration(&self) -> Registration {
        if self.here().is_err() {
            return Registration::None;
        }
        self.0.registration.registration()
    }

    /// As [`registration`](Self::registration), once the first attempt has ended; waits for that at most `timeout`.
    #[must_use]
    pub fn wait_registered(&self, timeout: Duration) -> Registration {
        if self.here().is_err() {
            return Registration::None;
        }
        self.0.registration.wait(timeout)
    }

    /// Registers memory that the caller keeps alive. With remote rights it becomes part of this engine's segment.
    ///
    /// # Errors
    /// `Empty`, `Overlap` with a registered region, `Full`, or the fabrics' refusal.
    ///
    /// # Safety
    /// Until [`unregister`](Self::unregister) returned `Ok` for the region, or the engine is gone, `span` stays mapped, and
    /// no `&` or `&mut` exists to bytes that a peer (remote rights) or a transfer in flight (local rights) may write.
    #[allow(unsafe_code, reason = "only the caller can promise what registration needs")]
    pub unsafe fn register(&self, span: MemSpan, access: Access) -> Result<RegionId, RegisterError> {
        // SAFETY: the caller's promise.
        let registered = self.call(move |engine| unsafe { engine.register(span, access) });
        registered.unwrap_or_else(|silent| Err(silent.into()))
    }

    /// Ends a registration. After `Ok` nothing touches the memory any more, ours or a peer's. Waits for a peer's running
    /// operation, at most `drain_ms`.
    ///
    /// # Errors
    /// `Busy` while requests in flight use it; `NotFound`.
    pub fn unregister(&self, region: RegionId) -> Result<(), RegisterError> {
        let give_up = Instant::now() + Duration::from_millis(u64::from(self.0.config.drain_ms));
        loop {
            let ended = self
                .call(move |engine| engine.unregister(region))
                .unwrap_or_else(|silent| Err(silent.into()));
            match ended {
                Err(RegisterError::Busy { requests: 0 }) if Instant::now() < give_up => {
                    std::thread::sleep(PEER_COPY);
                }
                ended => return ended,
            }
        }
    }

    /// Allocates and registers zeroed memory that processes on this host can share: page-aligned, reachable over `shm`.
    ///
    /// # Errors
    /// As [`register`](Self::register), and `Alloc`.
    pub fn alloc_shared(&self, len: usize, access: Access) -> Result<SharedRegion, RegisterError> {
        self.alloc_shared_with(len, access, false)
    }

    /// As [`alloc_shared`](Self::alloc_shared); with `populate`, every page is touched now, on the calling thread, rather
    /// than on first use.
    ///
    /// # Errors
    /// As [`alloc_shared`](Self::alloc_shared).
    pub fn alloc_shared_with(
        &self,
        len: usize,
        access: Access,
        populate: bool,
    ) -> Result<SharedRegion, RegisterError> {
        self.here()?;
        if len == 0 {
            return Err(RegisterError::Empty);
        }
        let peers_may_write = access.contains(Access::REMOTE_WRITE);
        let options = AllocOptions { peers_may_write, populate, huge_pages: true };
        let memory = SharedMemory::new(len, options).map_err(RegisterError::alloc)?;
        let registered = self.call(move |engine| engine.register_shared(memory, access));
        registered.unwrap_or_else(|silent| Err(silent.into()))
    }

    /// Registers memory of a [`SharedRegion`] whose registration has ended once more, under a new id and new keys: nothing is
    /// allocated or touched, and the contents stay. What peers were granted before is no way to it.
    ///
    /// # Errors
    /// As [`register`](Self::register): `Overlap` while it is still registered.
    pub fn reregister(&self, region: &SharedRegion, access: Access) -> Result<SharedRegion, RegisterError> {
        let region = region.clone();
        let registered = self.call(move |engine| engine.reregister(&region, access));
        registered.unwrap_or_else(|silent| Err(silent.into()))
    }

    /// Lets go of shared memory that [`unregister`](Self::unregister) calls `Busy` because a peer that is stopped may be in the
    /// middle of a copy: its pages are given back to the system, contents and all, and the rest (addresses, one of `regions_max`)
    /// as soon as the peer goes on or is gone. Until then it counts in [`Stats::quarantined_regions`]. Nobody is granted it
    /// any more. Keep no clone of `region`: it would keep the addresses.
    ///
    /// # Errors
    /// `Busy` while requests of ours use it; `NotFound`.
    pub fn quarantine_shared(&self, region: SharedRegion) -> Result<(), RegisterError> {
        self.call(move |engine| engine.quarantine_shared(region)).unwrap_or_else(|silent| Err(silent.into()))
    }

    /// Registers a buffer that the engine takes apart until it is given back.
    ///
    /// # Errors
    /// As [`register`](Self::register); the buffer comes back.
    pub fn register_buffer<B: Buffer>(
        &self,
        buffer: B,
        access: Access,
    ) -> Result<Registered<B>, GivenBack<RegisterError, B>> {
        // The owner is taken apart before anybody else knows its memory, so the id comes first.
        let region = match self.call(Engine::reserve_region).unwrap_or_else(|silent| Err(silent.into())) {
            Ok(region) => region,
            Err(error) => return Err(GivenBack::new(error, buffer)),
        };
        let buffer = Registered::new(buffer, region, access);
        let span = buffer.span();
        #[allow(unsafe_code, reason = "registers a buffer that is taken apart, or puts it together again")]
        // SAFETY: `Buffer` keeps the span in place and unreferenced while the owner is apart, and `Registered` lends only
        // what no peer and no transfer can write; the owner is put together only after `unregister` returned `Ok`, or here,
        // where nothing is registered.
        unsafe {
            let registered = self.call(move |engine| engine.register_as(region, span, access, true, None));
            match registered.unwrap_or_else(|silent| Err(silent.into())) {
                Ok(()) => Ok(buffer),
                Err(error) => Err(GivenBack::new(error, buffer.into_inner())),
            }
        }
    }

    /// Ends the registration of a buffer and gives the owner back.
    ///
    /// # Errors
    /// `Busy` while a peer is using it, `NotFound` when another engine registered it; the buffer comes back registered.
    pub fn unregister_buffer<B: Buffer>(
        &self,
        buffer: Registered<B>,
    ) -> Result<B, GivenBack<RegisterError, Registered<B>>> {
        let (region, span) = (buffer.region(), buffer.span());
        // The span tells another engine's buffer from ours, whatever its id.
        let ours = self.call(move |engine| engine.owns(region, span)).unwrap_or(false);
        let ended = if ours { self.unregister(region) } else { Err(RegisterError::NotFound) };
        match ended {
            #[allow(unsafe_code, reason = "puts a buffer together whose registration has ended")]
            // SAFETY: `unregister` returned `Ok` for its region.
            Ok(()) => Ok(unsafe { buffer.into_inner() }),
            Err(error) => Err(GivenBack::new(error, buffer)),
        }
    }

    /// Opens the memory that the engine called `name` exports: `host:port`, or a name that [`Config::metadata`] looks up. Asks it
    /// for its descriptor; waits for the answer at most `control.timeout_ms`, and `metadata.timeout_ms` for the directory's. Opening a segment again refreshes it and gives the same handle, unless its owner
    /// has restarted: then the handle is new, and the old one refuses work with [`SegmentError::Restarted`].
    ///
    /// # Errors
    /// See [`SegmentError`].
    pub fn open_segment(&self, name: &str) -> Result<SegmentHandle, SegmentError> {
        self.here()?;
        let (endpoint, descriptor) =
            engine::peer_to_peer(&self.0.config).describe(&**self.0.metadata, name)?;
        let name: String = name.into();
        self.call_segment(move |engine| engine.attach_at(&name, &endpoint, &descriptor))
    }

    /// Learns which regions the owner has registered and unregistered since.
    ///
    /// # Errors
    /// `Restarted` when another process answers; the handle refuses further work.
    pub fn refresh_segment(&self, segment: SegmentHandle) -> Result<(), SegmentError> {
        let SegmentOwner { name, endpoint, .. } =
            self.call_segment(move |engine| engine.segment_owner(segment))?;
        let peers = engine::peer_to_peer(&self.0.config);
        let descriptor = peers.describe_again(&**self.0.metadata, &name, &endpoint)?;
        self.call_segment(move |engine| engine.sync_segment(segment, &descriptor))
    }

    /// Forgets a segment. It must be closed as often as it was opened.
    ///
    /// # Errors
    /// `Busy` while requests in flight use it; `NotFound`.
    pub fn close_segment(&self, segment: SegmentHandle) -> Result<(), SegmentError> {
        self.call_segment(move |engine| engine.close_segment(segment))
    }

    /// The regions that the segment's owner exports, by address.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn segment_regions(&self, segment: SegmentHandle) -> Result<Vec<RemoteRegion>, SegmentError> {
        self.call_segment(move |engine| engine.segment_regions(segment))
    }

    /// Submits requests as one batch. With `timeout`, what has not ended by then is cancelled and ends `TimedOut`.
    ///
    /// # Errors
    /// `BatchLength`, `Full`, `Closed`. What is wrong with a single request is told by the transfer: [`Transfer::wait`].
    pub fn submit(
        &self,
        requests: &[TransferRequest],
        timeout: Option<Duration>,
    ) -> Result<Transfer, TransferError> {
        self.submit_holding(requests, timeout, None, ()).map_err(|refused| refused.error)
    }

    /// Reads `range.len()` bytes at `remote_addr` into `range` of an owned buffer, which the transfer holds until it has ended.
    ///
    /// # Errors
    /// As [`submit`](Self::submit); the buffer comes back.
    pub fn read<B: Buffer>(
        &self,
        buffer: Registered<B>,
        range: Range<usize>,
        segment: SegmentHandle,
        remote_addr: u64,
        timeout: Option<Duration>,
    ) -> Result<Transfer<Registered<B>>, GivenBack<TransferError, Registered<B>>> {
        self.transfer_buffer(Op::Read, buffer, range, segment, remote_addr, timeout)
    }

    /// Writes `range` of an owned buffer to `remote_addr`; the transfer holds the buffer until it has ended.
    ///
    /// # Errors
    /// As [`submit`](Self::submit); the buffer comes back.
    pub fn write<B: Buffer>(
        &self,
        buffer: Registered<B>,
        range: Range<usize>,
        segment: SegmentHandle,
        remote_addr: u64,
        timeout: Option<Duration>,
    ) -> Result<Transfer<Registered<B>>, GivenBack<TransferError, Registered<B>>> {
        self.transfer_buffer(Op::Write, buffer, range, segment, remote_addr, timeout)
    }

    /// Fences a segment (law L5): when the transfer completes, no WRITE that ended before this call can still land there.
    ///
    /// A quarantined batch has ended for its caller, but not for the fabrics, and no fence of theirs covers it. So while one
    /// uses the segment the fence is refused; try again once [`Stats::quarantined_batches`] has gone down.
    ///
    /// # Errors
    /// `Full`, `Closed`; an unknown segment, and one that a quarantined batch uses (`Busy`), are told by the transfer.
    pub fn fence(
        &self,
        segment: SegmentHandle,
        timeout: Option<Duration>,
    ) -> Result<Transfer, TransferError> {
        let shared = Arc::new(Shared::new(Box::default(), None));
        self.begin(Command::Fence(shared.clone(), segment, timeout), true).map_err(|_| self.refusal())?;
        Ok(Transfer::new(shared, self.0.clone(), ()))
    }

    /// Sends a message to the segment's owner, who finds it with [`take_notifications`](Self::take_notifications). Returns
    /// when the owner has it.
    ///
    /// # Errors
    /// `Refused` when it is too long or the owner's queue is full; `Unreachable`, `Restarted`.
    pub fn notify(&self, segment: SegmentHandle, name: &str, message: &[u8]) -> Result<(), SegmentError> {
        let owner = self.call_segment(move |engine| engine.segment_owner(segment))?;
        let told = engine::notify(&self.0.config, &owner, name, message);
        if let Err(SegmentError::Restarted { found, .. }) = told {
            self.note_restart(segment, found);
        }
        told
    }

    /// Takes all notifications that peers have sent since the last call.
    #[must_use]
    pub fn take_notifications(&self) -> Vec<Notification> {
        if self.here().is_err() {
            return Vec::new();
        }
        self.0.inbox.take()
    }

    /// Asks the segment's owner whether it lives; waits at most `timeout`.
    ///
    /// # Errors
    /// `NotFound`, `Closed`. That nobody answers is not an error but [`Liveness::Unreachable`].
    pub fn probe(&self, segment: SegmentHandle, timeout: Duration) -> Result<Liveness, SegmentError> {
        let owner = self.call_segment(move |engine| engine.segment_owner(segment))?;
        let liveness = engine::probe(&self.0.config, &owner, timeout);
        if let Liveness::Restarted { found, .. } = liveness {
            self.note_restart(segment, found);
        }
        Ok(liveness)
    }

    /// Ends what the engine with this [identity](Self::identity) can do to the memory that this one exports, over every fabric,
    /// and refuses it from now on: its connections are closed, its mappings revoked. Others are not disturbed. Does not wait:
    /// until it is [`Gone`](Expulsion::Gone), ask again. Without `force`, a peer that is connected is left alone.
    ///
    /// # Errors
    /// See [`ExpelError`].
    pub fn expel(&self, peer: u64, force: bool) -> Result<Expulsion, ExpelError> {
        self.call(move |engine| engine.expel(peer, force)).unwrap_or_else(|silent| Err(silent.into()))
    }

    /// Counters of the engine and of each rail.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let Ok(mut stats) = self.call(|engine| engine.stats()) else { return Stats::default() };
        stats.leaked_buffers = self.0.link.leaked_buffers.load(Ordering::Relaxed);
        stats.leaked_bytes = self.0.link.leaked_bytes.load(Ordering::Relaxed);
        stats
    }

    fn transfer_buffer<B: Buffer>(
        &self,
        op: Op,
        buffer: Registered<B>,
        range: Range<usize>,
        segment: SegmentHandle,
        remote_addr: u64,
        timeout: Option<Duration>,
    ) -> Result<Transfer<Registered<B>>, GivenBack<TransferError, Registered<B>>> {
        let span = buffer.span();
        if range.start >= range.end || range.end > span.len() {
            let problem =
                if range.start >= range.end { RequestProblem::Empty } else { RequestProblem::LocalRange };
            return Err(GivenBack::new(TransferError::Request { index: 0, problem }, buffer));
        }
        let local = LocalAddr::Region(buffer.region(), range.start as u64);
        let request = TransferRequest { op, local, segment, remote_addr, len: range.len() as u64 };
        self.submit_holding(&[request], timeout, Some(span), buffer)
    }

    fn submit_holding<P: Payload>(
        &self,
        requests: &[TransferRequest],
        timeout: Option<Duration>,
        owned: Option<MemSpan>,
        payload: P,
    ) -> Result<Transfer<P>, GivenBack<TransferError, P>> {
        let requests_per_batch_max = self.0.config.requests_per_batch_max;
        if requests.is_empty() || requests.len() > requests_per_batch_max as usize {
            let error = TransferError::BatchLength { requests: requests.len(), requests_per_batch_max };
            return Err(GivenBack::new(error, payload));
        }
        let shared = Arc::new(Shared::new(requests.into(), owned));
        let bytes = requests.iter().fold(0u64, |bytes, request| bytes.saturating_add(request.len));
        let help = bytes <= u64::from(self.0.config.inline_bytes_max);
        match self.begin(Command::Submit(shared.clone(), timeout), help) {
            Ok(()) => Ok(Transfer::new(shared, self.0.clone(), payload)),
            Err(_) => Err(GivenBack::new(self.refusal(), payload)),
        }
    }

    /// Hands over what begins a transfer, if one more may be.
    fn begin(&self, command: Command, help: bool) -> Result<(), Command> {
        let link = &self.0.link;
        if self.here().is_err() {
            return Err(command);
        }
        if link.outstanding.fetch_add(1, Ordering::Relaxed) >= self.0.config.batches_max {
            link.outstanding.fetch_sub(1, Ordering::Relaxed);
            return Err(command);
        }
        link.push(command, help).inspect_err(|_| {
            link.outstanding.fetch_sub(1, Ordering::Relaxed);
        })
    }

    fn refusal(&self) -> TransferError {
        match self.here() {
            Err(forked) => forked.into(),
            Ok(()) if self.0.link.is_closed() => TransferError::Closed,
            Ok(()) => TransferError::Full,
        }
    }

    fn note_restart(&self, segment: SegmentHandle, found: u64) {
        // Without a worker there is nobody who could use the segment.
        let _ = self.call(move |engine| engine.note_restart(segment, found));
    }

    /// Not in a child: there nothing of the engine is touched.
    #[inline]
    fn here(&self) -> Result<(), Forked> {
        if self.0.mark.is_forked() { Err(Forked) } else { Ok(()) }
    }

    /// Runs `ask` on the worker.
    fn call<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&mut Engine) -> T + Send + 'static,
    ) -> Result<T, Silent> {
        self.here().map_err(|Forked| Silent::Forked)?;
        let (reply, answer) = mpsc::sync_channel(1);
        let call = move |engine: &mut Engine| {
            // Whoever asked waits for it.
            let _ = reply.send(ask(engine));
        };
        if !self.0.link.push_all(Command::Call(Box::new(call))) {
            return Err(Silent::Closed);
        }
        // Mostly it is there. A worker that is held up by a user's waker or drop, or that calls us from one, answers nobody:
        // then this thread takes the turn.
        loop {
            match answer.recv_timeout(LEND_A_HAND) {
                Ok(answer) => return Ok(answer),
                Err(mpsc::RecvTimeoutError::Disconnected) => return Err(Silent::Closed),
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    // Whatever it did, the answer tells.
                    let _ = self.0.link.help();
                }
            }
        }
    }

    fn call_segment<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&mut Engine) -> Result<T, SegmentError> + Send + 'static,
    ) -> Result<T, SegmentError> {
        self.call(ask).unwrap_or_else(|silent| Err(silent.into()))
    }
}

impl fmt::Debug for TransferEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransferEngine")
            .field("name", &self.0.name)
            .field("incarnation", &self.0.incarnation)
            .finish()
    }
}

/// How long the worker may take to answer before a caller takes the turn itself.
const LEND_A_HAND: Duration = Duration::from_millis(1);
/// How long a peer's running copy may take before it is worth looking again.
const PEER_COPY: Duration = Duration::from_micros(200);

/// What the clones of a handle share. Stops the worker when the last is gone.
pub(crate) struct Inner {
    /// Says when this process is a fork of the one that started the engine.
    pub(crate) mark: Mark,
    link: Arc<Link>,
    /// `None` once it is joined.
    thread: Own<Option<JoinHandle<()>>>,
    pub(crate) config: Config,
    name: String,
    incarnation: u64,
    identity: u64,
    metadata: Own<Arc<dyn Metadata>>,
    registration: KeeperState,
    inbox: Arc<Inbox>,
}

impl Inner {
    /// Works for the engine while there is something to do and nobody else does.
    pub(crate) fn help(&self, done: impl Fn() -> bool) {
        while !done() && self.link.help() == Some(true) {}
    }

    /// Whether this is the worker's thread.
    pub(crate) fn on_worker(&self) -> bool {
        let worker = (*self.thread).as_ref().map(|thread| thread.thread().id());
        worker == Some(std::thread::current().id())
    }

    pub(crate) fn cancel(&self, shared: Arc<Shared>) {
        if self.mark.is_forked() {
            return;
        }
        // Without a worker nothing is in flight.
        let _ = self.link.push_all(Command::Cancel(shared));
    }

    /// Frees a buffer once nothing uses it. Without a worker nobody knows when that is: it leaks.
    pub(crate) fn abandon(&self, shared: Arc<Shared>, abandoned: Abandoned) {
        if self.mark.is_forked() {
            // Leaks: in the parent it is still registered.
            return;
        }
        let bytes = abandoned.bytes();
        if !self.link.push_all(Command::Abandon(shared, abandoned)) {
            self.link.count_leak(bytes);
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.mark.is_forked() {
            // The worker is not here, and the bell is the parent's.
            return;
        }
        self.link.stop();
        let Some(thread) = self.thread.take() else { return };
        // The worker itself may drop the last handle, with a waker that held it. It stops on its own then.
        if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
            log::error!("the engine's worker panicked");
        }
    }
}
