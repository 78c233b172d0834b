//! [`TransferEngine`]: the handle that threads share.

use std::fmt;
use std::ops::Range;
use std::string::String;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::vec::Vec;

use te_core::{Access, Buffer, ExpelMode, MemSpan, Op, RegionId, Registered};
use te_host::fork::{Mark, Own};
use te_host::{AllocOptions, SharedMemory};

use crate::config::Config;
use crate::control::Inbox;
use crate::engine::{Engine, Peers};
use crate::error::{
    AtIndex, ExpelError, Forked, GivenBack, RegisterError, RequestProblem, SegmentError, StartError,
    TransferError, Unavailable,
};
use crate::fabrics::FabricEntry;
use crate::metadata::{KeeperState, Metadata, Registration};
use crate::notifier::Notifier;
use crate::payload::{Abandoned, Payload};
use crate::region::{Populate, SharedRegion};
use crate::request::{
    Expulsion, LeftOut, Liveness, LocalAddr, Notification, RemoteRegion, SegmentHandle, Stats, SubmitOptions,
    TransferRequest,
};
use crate::transfer::{Shared, Transfer};
use crate::worker::{Command, Link, Worker};

/// A transfer engine behind a worker thread. Clones are handles to the same engine; dropping the last one
/// stops it.
///
/// In a child after a [fork](te_host::fork) every call returns `Forked`, nothing of the engine is touched,
/// and dropping a handle does nothing. The child has to start another engine.
#[derive(Clone)]
pub struct TransferEngine(pub(crate) Arc<Inner>);

impl TransferEngine {
    /// Opens the control port and the fabrics, and starts the worker.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start(config: Config) -> Result<Self, StartError> {
        Self::start_with(config, None)
    }

    /// As [`start`](Self::start), with a `metadata` of the caller that looks up segment names in place of
    /// [`Config::metadata`].
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start_with(config: Config, metadata: Option<Arc<dyn Metadata>>) -> Result<Self, StartError> {
        Self::start_with_parts(config, metadata, &[])
    }

    /// As [`start`](Self::start), with further fabrics: see [`Engine::start_with_fabrics`].
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start_with_fabrics(config: Config, fabrics: &[FabricEntry<'_>]) -> Result<Self, StartError> {
        Self::start_with_parts(config, None, fabrics)
    }

    /// As [`start_with`](Self::start_with) and [`start_with_fabrics`](Self::start_with_fabrics) together.
    ///
    /// # Errors
    /// See [`StartError`].
    pub fn start_with_parts(
        config: Config,
        metadata: Option<Arc<dyn Metadata>>,
        fabrics: &[FabricEntry<'_>],
    ) -> Result<Self, StartError> {
        let engine = Engine::start_with_parts(config.clone(), metadata, fabrics)?;
        let (name, incarnation, identity) = (engine.name().into(), engine.incarnation(), engine.identity());
        let (peers, registration, inbox) = engine.parts();
        #[cfg(feature = "cxl")]
        let pools = engine.pools().to_vec();
        let link = Arc::new(Link::new(config.mailbox_commands_max as usize)?);
        let notifier = Notifier::default();
        let worker = Worker::new(engine, link.clone(), notifier.clone());
        let thread = std::thread::Builder::new().name("te-worker".into()).spawn(move || worker.run())?;
        Ok(Self(Arc::new(Inner {
            mark: Mark::new(),
            link,
            thread: Own::new(Some(thread)),
            config,
            name,
            incarnation,
            identity,
            #[cfg(feature = "cxl")]
            pools,
            peers: Own::new(peers),
            registration,
            inbox,
            notifier,
        })))
    }

    /// The name under which peers open this engine's memory: `host:port` of its control port.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The incarnation of this engine: another number after every start.
    #[must_use]
    pub fn incarnation(&self) -> u64 {
        self.0.incarnation
    }

    /// The identity of this engine as an initiator, on every fabric: random, never 0, another number after
    /// every start. See [`expel`](Self::expel).
    #[must_use]
    pub fn identity(&self) -> u64 {
        self.0.identity
    }

    /// The configuration that the engine was started with.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// The CXL pools that the engine has opened. See [`Engine::pools`].
    #[cfg(feature = "cxl")]
    #[must_use]
    pub fn pools(&self) -> &[Arc<te_cxl::Pool>] {
        &self.0.pools
    }

    /// The state of this engine's name in the directory.
    #[must_use]
    pub fn registration(&self) -> Registration {
        if self.here().is_err() {
            return Registration::None;
        }
        self.0.registration.registration()
    }

    /// As [`registration`](Self::registration), after the first attempt to register the name; waits for its
    /// end at most `timeout`.
    #[must_use]
    pub fn wait_registered(&self, timeout: Duration) -> Registration {
        if self.here().is_err() {
            return Registration::None;
        }
        self.0.registration.wait(timeout)
    }

    /// Registers memory that the caller keeps mapped. With remote rights it becomes part of this engine's
    /// segment.
    ///
    /// # Errors
    /// `Empty`, `Overlap` with a registered region, `Full`, or the fabrics' refusal.
    ///
    /// # Safety
    /// Until [`unregister`](Self::unregister) returned `Ok` for the region, or the engine is gone, `span`
    /// stays mapped, and no `&` or `&mut` exists to bytes that a peer (remote rights) or a transfer in flight
    /// (local rights) may write.
    #[allow(unsafe_code, reason = "only the caller can promise what registration needs")]
    pub unsafe fn register(&self, span: MemSpan, access: Access) -> Result<RegionId, RegisterError> {
        // SAFETY: the caller's promise.
        let registered = self.call(move |engine| unsafe { engine.register(span, access) });
        registered.unwrap_or_else(|unavailable| Err(unavailable.into()))
    }

    /// Registers several regions, as [`register`](Self::register) does: all of them, or none. It takes one turn
    /// of the worker, and peers see all of them at once.
    ///
    /// # Errors
    /// Which region was refused, and why. A region that overlaps an earlier one of the list is refused, too.
    ///
    /// # Safety
    /// As [`register`](Self::register), for each span.
    #[allow(unsafe_code, reason = "only the caller can promise what registration needs")]
    pub unsafe fn register_many(
        &self,
        regions: &[(MemSpan, Access)],
    ) -> Result<Vec<RegionId>, AtIndex<RegisterError>> {
        let regions = regions.to_vec();
        // SAFETY: the caller's promise.
        let registered = self.call(move |engine| unsafe { engine.register_many(&regions) });
        registered.unwrap_or_else(|unavailable| Err(AtIndex { index: 0, error: unavailable.into() }))
    }

    /// Ends a registration. After `Ok` neither this engine nor a peer touches the memory any more. Waits for
    /// an operation of a peer that is under way, at most `drain_ms`.
    ///
    /// # Errors
    /// `Busy` while requests in flight use the region; `NotFound`.
    pub fn unregister(&self, region: RegionId) -> Result<(), RegisterError> {
        let give_up = Instant::now() + Duration::from_millis(u64::from(self.0.config.drain_ms));
        loop {
            let ended = self
                .call(move |engine| engine.unregister(region))
                .unwrap_or_else(|unavailable| Err(unavailable.into()));
            match ended {
                Err(RegisterError::Busy { requests: 0 }) if Instant::now() < give_up => {
                    std::thread::sleep(PEER_COPY);
                }
                ended => return ended,
            }
        }
    }

    /// Ends several registrations, as [`unregister`](Self::unregister) does: none of them if one is unknown, is
    /// listed twice, or is used by requests in flight. It takes one turn of the worker, unless an operation
    /// of a peer is under way.
    ///
    /// # Errors
    /// Which region is still registered, and why. After `Busy` with no requests, a peer's operation did not
    /// end within `drain_ms`: regions of the list that no peer used are unregistered, and `NotFound` from
    /// then on.
    pub fn unregister_many(&self, regions: &[RegionId]) -> Result<(), AtIndex<RegisterError>> {
        let give_up = Instant::now() + Duration::from_millis(u64::from(self.0.config.drain_ms));
        let mut left: Vec<(usize, RegionId)> = regions.iter().copied().enumerate().collect();
        loop {
            let ended = self.call(move |engine| {
                let ended = engine.unregister_left(&mut left);
                (ended, left)
            });
            let (ended, still) =
                ended.map_err(|unavailable| AtIndex { index: 0, error: RegisterError::from(unavailable) })?;
            left = still;
            match ended {
                Err(AtIndex { error: RegisterError::Busy { requests: 0 }, .. })
                    if Instant::now() < give_up =>
                {
                    std::thread::sleep(PEER_COPY);
                }
                ended => return ended,
            }
        }
    }

    /// Allocates and registers zeroed memory that processes on this host can share: page-aligned, reachable
    /// over `shm`.
    ///
    /// # Errors
    /// As [`register`](Self::register), and `Alloc`.
    pub fn alloc_shared(&self, len: usize, access: Access) -> Result<SharedRegion, RegisterError> {
        self.alloc_shared_with(len, access, Populate::OnFirstUse)
    }

    /// As [`alloc_shared`](Self::alloc_shared); `populate` chooses when its pages are allocated.
    ///
    /// # Errors
    /// As [`alloc_shared`](Self::alloc_shared).
    pub fn alloc_shared_with(
        &self,
        len: usize,
        access: Access,
        populate: Populate,
    ) -> Result<SharedRegion, RegisterError> {
        self.here()?;
        if len == 0 {
            return Err(RegisterError::Empty);
        }
        let peers_may_write = access.contains(Access::REMOTE_WRITE);
        let populate = populate == Populate::Now;
        let options = AllocOptions { peers_may_write, populate, huge_pages: true };
        let memory = SharedMemory::new(len, options).map_err(RegisterError::alloc)?;
        let registered = self.call(move |engine| engine.register_shared(memory, access));
        registered.unwrap_or_else(|unavailable| Err(unavailable.into()))
    }

    /// Registers the memory of a [`SharedRegion`] again after its registration has ended: see
    /// [`Engine::reregister`].
    ///
    /// # Errors
    /// As [`register`](Self::register): `Overlap` while it is still registered.
    pub fn reregister(&self, region: &SharedRegion, access: Access) -> Result<SharedRegion, RegisterError> {
        let region = region.clone();
        let registered = self.call(move |engine| engine.reregister(&region, access));
        registered.unwrap_or_else(|unavailable| Err(unavailable.into()))
    }

    /// Registers extents of a pool that this process has claimed: see [`Engine::register_claimed`].
    ///
    /// # Errors
    /// As [`Engine::register_claimed`].
    #[cfg(feature = "cxl")]
    pub fn register_claimed(
        &self,
        pool: &Arc<te_cxl::Pool>,
        span: MemSpan,
        access: Access,
    ) -> Result<SharedRegion, RegisterError> {
        let pool = pool.clone();
        let registered = self.call(move |engine| engine.register_claimed(&pool, span, access));
        registered.unwrap_or_else(|unavailable| Err(unavailable.into()))
    }

    /// Mounts storage as a part of this engine's segment: see [`Engine::mount_storage`]. Waits until the
    /// target has agreed, at most `timeout`.
    ///
    /// # Errors
    /// As [`Engine::mount_storage`] and [`Engine::list_storage`]; `Rails` with `TimedOut`. Nothing is mounted
    /// then.
    #[cfg(feature = "nvmeof")]
    pub fn mount_storage(
        &self,
        storage: &crate::Storage,
        access: Access,
        timeout: Duration,
    ) -> Result<crate::MountedStorage, RegisterError> {
        let give_up = Instant::now() + timeout;
        let storage = storage.clone();
        let begun = self.call(move |engine| engine.mount_storage(&storage, access));
        let mounted = begun.unwrap_or_else(|unavailable| Err(unavailable.into()))?;
        loop {
            let listed = self.call(move |engine| engine.list_storage(&mounted));
            match listed.unwrap_or_else(|unavailable| Err(unavailable.into())) {
                Ok(true) => return Ok(mounted),
                Ok(false) if Instant::now() < give_up => std::thread::sleep(PEER_COPY),
                Ok(false) => {
                    self.unregister(mounted.region)?;
                    return Err(RegisterError::Rails(te_core::ErrorKind::TimedOut.into()));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Quarantines shared memory for which [`unregister`](Self::unregister) returns `Busy` because a stopped
    /// peer may be in the middle of a copy: see [`Engine::quarantine_shared`]. A clone of `region` that is
    /// kept would keep the addresses in use.
    ///
    /// # Errors
    /// `Busy` while requests of this engine use it; `NotFound`.
    pub fn quarantine_shared(&self, region: SharedRegion) -> Result<(), RegisterError> {
        self.call(move |engine| engine.quarantine_shared(region))
            .unwrap_or_else(|unavailable| Err(unavailable.into()))
    }

    /// Registers a buffer, which the engine holds until [`unregister_buffer`](Self::unregister_buffer)
    /// returns it.
    ///
    /// # Errors
    /// As [`register`](Self::register); the error holds the buffer.
    pub fn register_buffer<B: Buffer>(
        &self,
        buffer: B,
        access: Access,
    ) -> Result<Registered<B>, GivenBack<RegisterError, B>> {
        // The buffer is taken apart before the rails know its memory, so the id has to be there first.
        let region =
            match self.call(Engine::reserve_region).unwrap_or_else(|unavailable| Err(unavailable.into())) {
                Ok(region) => region,
                Err(error) => return Err(GivenBack::new(error, buffer)),
            };
        let buffer = Registered::new(buffer, region, access);
        let span = buffer.span();
        #[allow(unsafe_code, reason = "registers a buffer that is taken apart, or puts it together again")]
        // SAFETY: `Buffer` keeps the span in place and unreferenced while the buffer is apart, and
        // `Registered` lends only what no peer and no transfer can write; the buffer is put together only
        // after `unregister` returned `Ok`, or here, where nothing is registered.
        unsafe {
            let registered = self.call(move |engine| engine.register_as(region, span, access, true, None));
            match registered.unwrap_or_else(|unavailable| Err(unavailable.into())) {
                Ok(()) => Ok(buffer),
                Err(error) => Err(GivenBack::new(error, buffer.into_inner())),
            }
        }
    }

    /// Ends the registration of a buffer and returns it.
    ///
    /// # Errors
    /// `Busy` while a peer uses it, `NotFound` when another engine registered it; the error holds the buffer,
    /// which is still registered.
    pub fn unregister_buffer<B: Buffer>(
        &self,
        buffer: Registered<B>,
    ) -> Result<B, GivenBack<RegisterError, Registered<B>>> {
        let (region, span) = (buffer.region(), buffer.span());
        // Ids alone do not distinguish buffers of different engines; spans do.
        let ours = self.call(move |engine| engine.owns(region, span)).unwrap_or(false);
        let ended = if ours { self.unregister(region) } else { Err(RegisterError::NotFound) };
        match ended {
            #[allow(unsafe_code, reason = "puts a buffer together whose registration has ended")]
            // SAFETY: `unregister` returned `Ok` for its region.
            Ok(()) => Ok(unsafe { buffer.into_inner() }),
            Err(error) => Err(GivenBack::new(error, buffer)),
        }
    }

    /// Opens the memory that the engine called `name` exports: see [`Engine::open_segment`].
    ///
    /// # Errors
    /// See [`SegmentError`].
    pub fn open_segment(&self, name: &str) -> Result<SegmentHandle, SegmentError> {
        self.here()?;
        let (endpoint, descriptor) = self.0.peers.describe(name)?;
        let name: String = name.into();
        self.call_segment(move |engine| engine.attach_at(&name, endpoint.as_deref(), &descriptor))
    }

    /// Fetches the descriptor of a segment again: see [`Engine::refresh_segment`].
    ///
    /// # Errors
    /// `Restarted` when another process answers; the handle refuses further work.
    pub fn refresh_segment(&self, segment: SegmentHandle) -> Result<(), SegmentError> {
        let owner = self.call_segment(move |engine| engine.segment_owner(segment))?;
        let descriptor = self.0.peers.describe_again(&owner)?;
        self.call_segment(move |engine| engine.sync_segment(segment, &descriptor))
    }

    /// Closes a segment. A segment that was opened several times is detached by the last of as many calls.
    ///
    /// # Errors
    /// `Busy` while requests in flight use it; `NotFound`.
    pub fn close_segment(&self, segment: SegmentHandle) -> Result<(), SegmentError> {
        self.call_segment(move |engine| engine.close_segment(segment))
    }

    /// The attached regions of the segment, in the order of their addresses.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn segment_regions(&self, segment: SegmentHandle) -> Result<Vec<RemoteRegion>, SegmentError> {
        self.call_segment(move |engine| engine.segment_regions(segment))
    }

    /// Submits requests as one batch. With `timeout`, requests that have not ended by then are cancelled and
    /// end `TimedOut`.
    ///
    /// # Errors
    /// `BatchLength`, `Full`, `Closed`. A request that is refused is reported by the transfer: see
    /// [`Transfer::wait`].
    pub fn submit(
        &self,
        requests: &[TransferRequest],
        timeout: Option<Duration>,
    ) -> Result<Transfer, TransferError> {
        let options = SubmitOptions { timeout, ..SubmitOptions::default() };
        self.submit_with(requests, &options)
    }

    /// As [`submit`](Self::submit), with further [options](SubmitOptions): the fabric that carries the batch,
    /// a notification that follows it.
    ///
    /// # Errors
    /// As [`submit`](Self::submit). A fabric that does not reach a request, and a notification that is too
    /// long, are reported by the transfer, as requests that are refused are.
    pub fn submit_with(
        &self,
        requests: &[TransferRequest],
        options: &SubmitOptions,
    ) -> Result<Transfer, TransferError> {
        self.submit_holding(requests, options.clone(), None, ()).map_err(|refused| refused.error)
    }

    /// Reads `range.len()` bytes at `remote_addr` into `range` of an owned buffer, which the transfer holds
    /// until it has ended.
    ///
    /// # Errors
    /// As [`submit`](Self::submit); the error holds the buffer.
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
    /// As [`submit`](Self::submit); the error holds the buffer.
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

    /// Fences a segment (law L5): when the transfer completes, no WRITE that ended before this call can still
    /// land there. See [`Engine::fence`].
    ///
    /// # Errors
    /// `Full`, `Closed`. An unknown segment, and one that a quarantined batch uses (`Busy`), are reported by
    /// the transfer.
    pub fn fence(
        &self,
        segment: SegmentHandle,
        timeout: Option<Duration>,
    ) -> Result<Transfer, TransferError> {
        let shared = Arc::new(Shared::new(Box::default(), SubmitOptions::default(), None));
        self.begin(Command::Fence(shared.clone(), segment, timeout), true).map_err(|_| self.refusal())?;
        Ok(Transfer::new(shared, self.0.clone(), ()))
    }

    /// Sends a message to the owner of the segment, which receives it with
    /// [`take_notifications`](Self::take_notifications). Returns when it is in the owner's queue.
    ///
    /// # Errors
    /// `Refused` when the message is too long or the owner's queue is full; `Unreachable`, `Restarted`;
    /// `Foreign` unless the [`Metadata`] that describes the segment carries notifications.
    pub fn notify(&self, segment: SegmentHandle, name: &str, message: &[u8]) -> Result<(), SegmentError> {
        let owner = self.call_segment(move |engine| engine.segment_owner(segment))?;
        let sent = self.0.peers.notify(&owner, name, message);
        if let Err(SegmentError::Restarted { found, .. }) = sent {
            self.note_restart(segment, found);
        }
        sent
    }

    /// Takes all notifications that peers have sent since the last call.
    #[must_use]
    pub fn take_notifications(&self) -> Vec<Notification> {
        if self.here().is_err() {
            return Vec::new();
        }
        self.0.inbox.take()
    }

    /// Checks whether the owner of the segment is alive; waits at most `timeout`.
    ///
    /// # Errors
    /// `NotFound`, `Foreign`, `Closed`. An owner that does not answer is not an error but
    /// [`Liveness::Unreachable`].
    pub fn probe(&self, segment: SegmentHandle, timeout: Duration) -> Result<Liveness, SegmentError> {
        let owner = self.call_segment(move |engine| engine.segment_owner(segment))?;
        let liveness = self.0.peers.probe(&owner, timeout)?;
        if let Liveness::Restarted { found, .. } = liveness {
            self.note_restart(segment, found);
        }
        Ok(liveness)
    }

    /// Expels a peer: see [`Engine::expel`]. Does not wait: to be called again until the result is
    /// [`Gone`](Expulsion::Gone).
    ///
    /// # Errors
    /// See [`ExpelError`].
    pub fn expel(&self, peer: u64, mode: ExpelMode) -> Result<Expulsion, ExpelError> {
        self.call(move |engine| engine.expel(peer, mode))
            .unwrap_or_else(|unavailable| Err(unavailable.into()))
    }

    /// Counters of the engine and of each rail.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let Ok(mut stats) = self.call(|engine| engine.stats()) else { return Stats::default() };
        stats.leaked_buffers = self.0.link.leaked_buffers.load(Ordering::Relaxed);
        stats.leaked_bytes = self.0.link.leaked_bytes.load(Ordering::Relaxed);
        stats
    }

    /// The regions that a rail has refused, or does not export, and why: see [`Engine::left_out`].
    #[must_use]
    pub fn left_out(&self) -> Vec<LeftOut> {
        self.call(|engine| engine.left_out()).unwrap_or_default()
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
        let options = SubmitOptions { timeout, ..SubmitOptions::default() };
        self.submit_holding(&[request], options, Some(span), buffer)
    }

    fn submit_holding<P: Payload>(
        &self,
        requests: &[TransferRequest],
        options: SubmitOptions,
        owned: Option<MemSpan>,
        payload: P,
    ) -> Result<Transfer<P>, GivenBack<TransferError, P>> {
        let requests_per_batch_max = self.0.config.requests_per_batch_max;
        if requests.is_empty() || requests.len() > requests_per_batch_max as usize {
            let error = TransferError::BatchLength { requests: requests.len(), requests_per_batch_max };
            return Err(GivenBack::new(error, payload));
        }
        let shared = Arc::new(Shared::new(requests.into(), options, owned));
        let bytes = requests.iter().fold(0u64, |bytes, request| bytes.saturating_add(request.len));
        let help = bytes <= u64::from(self.0.config.caller_bytes_max);
        match self.begin(Command::Submit(shared.clone()), help) {
            Ok(()) => Ok(Transfer::new(shared, self.0.clone(), payload)),
            Err(_) => Err(GivenBack::new(self.refusal(), payload)),
        }
    }

    /// Hands over the command that begins a transfer, unless `batches_max` transfers are outstanding.
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
        // Without a worker no thread can use the segment.
        let _ = self.call(move |engine| engine.note_restart(segment, found));
    }

    /// Fails in a child after a fork: there nothing of the engine may be touched.
    #[inline]
    fn here(&self) -> Result<(), Forked> {
        if self.0.mark.is_forked() { Err(Forked) } else { Ok(()) }
    }

    /// Runs `run` on the engine, and returns its result.
    fn call<T: Send + 'static>(
        &self,
        run: impl FnOnce(&mut Engine) -> T + Send + 'static,
    ) -> Result<T, Unavailable> {
        self.here().map_err(|Forked| Unavailable::Forked)?;
        let (reply, answer) = mpsc::sync_channel(1);
        let call = move |engine: &mut Engine| {
            // The receiver is there until it has the reply.
            let _ = reply.send(run(engine));
        };
        if !self.0.link.push_all(Command::Call(Box::new(call))) {
            return Err(Unavailable::Closed);
        }
        // Mostly the reply is there already. A worker that is inside a user's waker or drop, or that calls
        // this function from one, takes no commands: then this thread takes the turn.
        loop {
            match answer.recv_timeout(HELP_AFTER) {
                Ok(answer) => return Ok(answer),
                Err(mpsc::RecvTimeoutError::Disconnected) => return Err(Unavailable::Closed),
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    let _ = self.0.link.help();
                }
            }
        }
    }

    fn call_segment<T: Send + 'static>(
        &self,
        run: impl FnOnce(&mut Engine) -> Result<T, SegmentError> + Send + 'static,
    ) -> Result<T, SegmentError> {
        self.call(run).unwrap_or_else(|unavailable| Err(unavailable.into()))
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
const HELP_AFTER: Duration = Duration::from_millis(1);
/// Time between two attempts to unregister a region that a peer is copying.
const PEER_COPY: Duration = Duration::from_micros(200);

/// What the clones of a handle share. Its drop stops the worker.
pub(crate) struct Inner {
    /// Detects that this process is a fork of the one that started the engine.
    pub(crate) mark: Mark,
    pub(crate) link: Arc<Link>,
    /// `None` once it is joined.
    thread: Own<Option<JoinHandle<()>>>,
    pub(crate) config: Config,
    name: String,
    incarnation: u64,
    identity: u64,
    #[cfg(feature = "cxl")]
    pools: Vec<Arc<te_cxl::Pool>>,
    peers: Own<Peers>,
    registration: KeeperState,
    inbox: Arc<Inbox>,
    notifier: Notifier,
}

impl Inner {
    /// Takes turns on this thread while there is something to do and no other thread is at it.
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

    /// Frees a buffer once nothing uses it. Without a worker that time is unknown: the buffer leaks.
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
            // The worker runs in the parent alone, and the bell belongs to the parent.
            return;
        }
        self.link.stop();
        let Some(thread) = self.thread.take() else { return };
        // The worker itself may drop the last handle, with a waker that held it. It then ends without a join.
        if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
            log::error!("the engine's worker panicked");
        }
        self.notifier.close(Duration::from_millis(self.config.drain_ms.into()));
    }
}
