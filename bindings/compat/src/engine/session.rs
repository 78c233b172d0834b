//! [`Session`]: an engine with the calls of Mooncake's, and typed results.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use te_core::{Access, Location, MemSpan, Op};
use te_engine::{TransferEngine, TransferError};
use te_host::fork::Mark;

use super::batches::Batches;
use super::managed::Managed;
use super::post::{Plan, Post};
use super::regions::{Regions, SHARED};
use super::segments::{Attached, Segment, Segments, checked};
use super::wire::Wire;
use super::{EngineError, Request, SegmentNumber, Setup, State, TaskStatus};

/// What every call says in a child after a fork.
const FORKED: &str = "this process is a fork of the one that initialized the engine: initialize another";

/// An initialized engine: registered memory, segments by name, transfers, batches, notifications.
///
/// All calls may be made by any number of threads. Dropping the session stops the engine: transfers are
/// cancelled, and nothing touches registered memory afterwards.
pub struct Session {
    // Dropped in this order: transfers end while the engine still runs, and no peer reaches memory that is
    // freed.
    batches: Batches,
    wire: Wire,
    engine: TransferEngine,
    managed: Mutex<Managed>,
    regions: Regions,
    segments: Segments,
    setup: Setup,
    mark: Mark,
    /// Held while registrations end.
    ending: Mutex<()>,
}

/// One copy between local memory and the segment that a call names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// First local address.
    pub local: u64,
    /// First remote address.
    pub remote: u64,
    /// Length, bytes.
    pub len: u64,
}

/// A span of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionSpan {
    /// First address.
    pub addr: u64,
    /// Length, bytes.
    pub len: u64,
}

/// A message of one process to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// The kind of message.
    pub name: String,
    /// Its body.
    pub message: Vec<u8>,
}

impl Session {
    /// Opens the ports and starts an engine.
    ///
    /// # Errors
    /// `Wire`, `Start`.
    pub fn start(setup: Setup) -> Result<Self, EngineError> {
        let (wire, engine) = Wire::start(setup.wire_config(), &setup.metadata, setup.engine_config())?;
        log::info!("transfer engine {} answers as {}", engine.incarnation(), wire.name());
        Ok(Self {
            batches: Batches::new(engine.identity()),
            managed: Mutex::new(Managed::new(setup.arena_bytes)),
            regions: Regions::default(),
            segments: Segments::new(wire.name()),
            mark: Mark::new(),
            ending: Mutex::default(),
            wire,
            engine,
            setup,
        })
    }

    /// The name under which peers open this session's memory: `host:port`, or with a metadata server the
    /// local name of the setup.
    #[must_use]
    pub fn name(&self) -> &str {
        self.wire.name()
    }

    /// `host:port` of the port for handshakes. Without a metadata server, that is the name.
    #[must_use]
    pub fn address(&self) -> String {
        match self.setup.metadata.is_peer_to_peer() {
            true => self.name().to_owned(),
            false => self.setup.address(self.rpc_port()),
        }
    }

    /// The port for handshakes.
    #[must_use]
    pub fn rpc_port(&self) -> u16 {
        self.wire.rpc_port()
    }

    /// The engine.
    #[must_use]
    pub fn engine(&self) -> &TransferEngine {
        &self.engine
    }

    /// Registers memory. With `remote`, peers may then read and write it.
    ///
    /// # Errors
    /// `Argument`, `Overlap`, `Memory`.
    ///
    /// # Safety
    /// The memory stays mapped until [`unregister`](Self::unregister) returned `Ok`, or the session is gone.
    #[allow(unsafe_code, reason = "only the caller can promise that the memory stays mapped")]
    pub unsafe fn register(
        &self,
        addr: u64,
        len: u64,
        location: &str,
        remote: bool,
    ) -> Result<(), EngineError> {
        // SAFETY: the caller's promise.
        unsafe { self.register_spans(&[RegionSpan { addr, len }], location, remote) }
    }

    /// Registers several pieces of memory, which peers may then read and write, or none of them.
    ///
    /// # Errors
    /// As [`register`](Self::register).
    ///
    /// # Safety
    /// As [`register`](Self::register).
    #[allow(unsafe_code, reason = "only the caller can promise that the memory stays mapped")]
    pub unsafe fn register_all(&self, spans: &[RegionSpan], location: &str) -> Result<(), EngineError> {
        // SAFETY: the caller's promise.
        unsafe { self.register_spans(spans, location, true) }
    }

    #[allow(unsafe_code, reason = "only the caller can promise that the memory stays mapped")]
    unsafe fn register_spans(
        &self,
        spans: &[RegionSpan],
        location: &str,
        remote: bool,
    ) -> Result<(), EngineError> {
        self.here()?;
        let access = if remote { SHARED } else { Access::LOCAL };
        // SAFETY: the caller's promise.
        let memory = unsafe { self.regions.add(&self.engine, spans, location_of(location), access)? };
        if !remote {
            return Ok(());
        }
        // SAFETY: the caller's promise; the export is withdrawn before the registration ends.
        unsafe { self.wire.export(&memory) }.inspect_err(|_| {
            for span in spans {
                if let Err(error) = self.regions.remove(&self.engine, span.addr) {
                    log::warn!("memory at {:#x} stays registered: {error}", span.addr);
                }
            }
        })
    }

    /// Ends a registration. After `Ok` nothing touches the memory any more.
    ///
    /// # Errors
    /// `NotRegistered`; `Memory` with `Busy` while a transfer of this session uses it.
    pub fn unregister(&self, addr: u64) -> Result<(), EngineError> {
        self.here()?;
        self.unregister_all(&[addr])
    }

    /// Ends several registrations: all that it can. The metadata server is told once.
    ///
    /// # Errors
    /// The first failure.
    pub fn unregister_all(&self, addrs: &[u64]) -> Result<(), EngineError> {
        self.here()?;
        // One after the other: another call must not end the registration of what is exported again below.
        let _ending = self.ending.lock().unwrap_or_else(PoisonError::into_inner);
        let known: Vec<Option<(u64, bool)>> = addrs.iter().map(|addr| self.regions.at(*addr)).collect();
        let is_remote = |known: &Option<(u64, bool)>| known.is_some_and(|(_, remote)| remote);
        let exported = addrs.iter().zip(&known).filter(|(_, known)| is_remote(known));
        let exported: Vec<u64> = exported.map(|(addr, _)| *addr).collect();
        if !exported.is_empty() {
            self.wire.withdraw(&exported);
        }
        let mut first = Ok(());
        for (&addr, known) in addrs.iter().zip(known) {
            let removed = self.regions.remove(&self.engine, addr);
            if let (Err(EngineError::Memory(_)), Some((len, true))) = (&removed, known) {
                // It goes on, and so does its export.
                let span = MemSpan::new(addr as *mut u8, len as usize);
                #[allow(unsafe_code, reason = "exports memory whose registration goes on")]
                // SAFETY: the memory is still registered, so the promise of `register` still holds.
                if let Err(error) = unsafe { self.wire.export(&[span]) } {
                    log::warn!("memory at {addr:#x} is not exported any more: {error}");
                }
            }
            first = first.and(removed);
        }
        first
    }

    /// The first addresses of the registered memory.
    #[must_use]
    pub fn registered(&self) -> Vec<u64> {
        self.regions.users()
    }

    /// Allocates a buffer of registered memory, which processes on this host reach without sockets, and
    /// returns its address.
    ///
    /// # Errors
    /// `Memory`, `Argument`.
    pub fn allocate_managed(&self, len: u64) -> Result<u64, EngineError> {
        self.here()?;
        self.managed().allocate(len, &self.engine, &self.regions, &self.wire)
    }

    /// Frees a buffer that [`allocate_managed`](Self::allocate_managed) returned.
    ///
    /// # Errors
    /// `NotRegistered`, `Memory` with `Busy`.
    pub fn free_managed(&self, addr: u64) -> Result<(), EngineError> {
        self.here()?;
        self.managed().free(addr, &self.engine, &self.regions, &self.wire)
    }

    /// The memory from which buffers are allocated.
    #[must_use]
    pub fn managed_spans(&self) -> Vec<RegionSpan> {
        self.managed().spans()
    }

    /// Opens the segment of this name, or returns its number if it is open.
    ///
    /// # Errors
    /// `Argument`, `Segment`.
    pub fn open_segment(&self, name: &str) -> Result<SegmentNumber, EngineError> {
        self.here()?;
        self.segments.open(&self.engine, name)
    }

    /// As [`open_segment`](Self::open_segment), and asks the owner what it exports even if the segment is
    /// open.
    ///
    /// # Errors
    /// `Argument`, `Segment`.
    pub fn reopen_segment(&self, name: &str) -> Result<SegmentNumber, EngineError> {
        let number = self.open_segment(name)?;
        let segment = self.segments.get(number)?;
        segment.suspect();
        segment.current(&self.engine)?;
        Ok(number)
    }

    /// Closes a segment; its number stays valid, and a later use opens it again.
    ///
    /// # Errors
    /// `Argument` for a number that was never given out.
    pub fn close_segment(&self, number: SegmentNumber) -> Result<(), EngineError> {
        self.here()?;
        self.segments.close(&self.engine, number)
    }

    /// Asks the owners of all open segments what they export.
    ///
    /// # Errors
    /// The first failure; the other owners are asked nevertheless.
    pub fn refresh_segments(&self) -> Result<(), EngineError> {
        self.here()?;
        let asked = self.segments.attached().into_iter().map(|segment| {
            segment.suspect();
            segment.current(&self.engine).map(drop)
        });
        first_failure(asked)
    }

    /// Moves bytes between local memory and the segment `target`, and waits until they have arrived. After a
    /// failure because the target has restarted, or has registered other memory since, it is tried once more.
    /// A call that runs out of time ([`Env::timeout_of`](crate::env::Env::timeout_of)) has cancelled its
    /// transfers and waited until nothing touches the local memory.
    ///
    /// # Errors
    /// `Argument`, `Segment`, `Memory`, `Transfer`. Some of the bytes may have arrived.
    ///
    /// # Safety
    /// The local memory is mapped until the call returns, and no `&` or `&mut` exists to bytes that it may
    /// write.
    #[allow(unsafe_code, reason = "only the caller can promise what raw addresses need")]
    pub unsafe fn transfer(
        &self,
        target: &str,
        op: Op,
        copies: &[Copy],
        notice: Option<&Notice>,
    ) -> Result<(), EngineError> {
        let (number, segment) = self.segment_of(target)?;
        let bytes = copies.iter().fold(0_u64, |bytes, copy| bytes.saturating_add(copy.len));
        let until = Instant::now() + self.setup.env.timeout_of(bytes);
        loop {
            let before = segment.current(&self.engine)?;
            let left = until.saturating_duration_since(Instant::now());
            // SAFETY: the caller's promise lasts until this call returns, and `run` until its transfers are
            // over.
            let ended = unsafe { self.run(number, op, copies, left, notice) };
            match ended {
                Ok(()) => return Ok(()),
                Err(error) if !self.is_worth_another_try(&error, &segment, &before, until) => {
                    return Err(error);
                }
                Err(error) => log::info!("a transfer with {target:?} is tried again: {error}"),
            }
        }
    }

    /// One try of [`transfer`](Self::transfer).
    ///
    /// # Safety
    /// As [`transfer`](Self::transfer).
    #[allow(unsafe_code, reason = "only the caller can promise what raw addresses need")]
    unsafe fn run(
        &self,
        segment: SegmentNumber,
        op: Op,
        copies: &[Copy],
        timeout: Duration,
        notice: Option<&Notice>,
    ) -> Result<(), EngineError> {
        let until = Instant::now() + timeout;
        let requests =
            copies.iter().map(|&Copy { local, remote, len }| Request { op, local, segment, remote, len });
        let mut left = Some(timeout);
        loop {
            // SAFETY: the caller's promise lasts until this function returns, which waits for the post.
            let posted = unsafe { self.post(requests.clone(), left, notice) };
            match posted {
                Ok(post) => {
                    let ended = post.wait();
                    post.settle(&self.engine, &self.regions);
                    return ended;
                }
                // Other threads have as many batches under way as there can be: some of them will end.
                Err(EngineError::TooManyBatches { batches_max }) => {
                    let rest = until.saturating_duration_since(Instant::now());
                    if rest.is_zero() {
                        return Err(EngineError::TooManyBatches { batches_max });
                    }
                    left = Some(rest);
                    std::thread::sleep(FULL_PAUSE);
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn is_worth_another_try(
        &self,
        error: &EngineError,
        segment: &Segment,
        before: &Attached,
        until: Instant,
    ) -> bool {
        let EngineError::Transfer(error) = error else { return false };
        let (timed_out, in_doubt) = match error {
            TransferError::Ended { status, fence_needed, .. } => {
                (*status == te_core::Status::TimedOut, *fence_needed)
            }
            _ => (false, false),
        };
        if timed_out || Instant::now() >= until {
            return false;
        }
        // Bytes of the first try may land after those of the second, and after what the caller writes next:
        // only not when the process is gone that they were for.
        let may_repeat = |now: &Attached| if in_doubt { !now.is_of(before) } else { !now.is_as(before) };
        segment.current(&self.engine).is_ok_and(|now| may_repeat(&now))
    }

    /// Checks requests, and submits them together.
    ///
    /// # Errors
    /// `Argument`, `Segment`, `Memory`, `TooManyBatches`, `Transfer`; no byte was moved.
    ///
    /// # Safety
    /// The local memory stays mapped until the post is over, and no `&` or `&mut` exists to bytes that it may
    /// write.
    #[allow(unsafe_code, reason = "only the caller can promise what raw addresses need")]
    unsafe fn post(
        &self,
        requests: impl Iterator<Item = Request>,
        timeout: Option<Duration>,
        notice: Option<&Notice>,
    ) -> Result<Post, EngineError> {
        self.here()?;
        let mut plan = Plan::default();
        let mut requests = requests;
        // SAFETY: the caller's promise.
        let added = requests.try_for_each(|request| unsafe {
            plan.add(&self.engine, &self.segments, &self.regions, &request)
        });
        let posted = added.and_then(|()| {
            let timeout = timeout.or_else(|| {
                self.setup.env.slice_timeout.map(|limit| limit + Duration::from_nanos(plan.bytes()))
            });
            plan.submit(&self.engine, timeout, notice)
        });
        if posted.is_err() {
            self.regions.give_back(&self.engine, std::mem::take(&mut plan.borrowed));
        }
        posted
    }

    /// Begins to move bytes between local memory and the segment `target`, and returns the id of the batch.
    /// It has the timeout of [`transfer`](Self::transfer).
    ///
    /// # Errors
    /// As [`transfer`](Self::transfer), and `TooManyBatches`; no byte was moved.
    ///
    /// # Safety
    /// As [`submit`](Self::submit).
    #[allow(unsafe_code, reason = "only the caller can promise what raw addresses need")]
    pub unsafe fn begin(&self, target: &str, op: Op, copies: &[Copy]) -> Result<u64, EngineError> {
        let (segment, _) = self.segment_of(target)?;
        let batch = self.batches.allocate(copies.len())?;
        let bytes = copies.iter().fold(0_u64, |bytes, copy| bytes.saturating_add(copy.len));
        let requests =
            copies.iter().map(|&Copy { local, remote, len }| Request { op, local, segment, remote, len });
        let timeout = Some(self.setup.env.timeout_of(bytes));
        // SAFETY: the caller's promise.
        let added = batch.add(&self.batches, copies.len(), || unsafe { self.post(requests, timeout, None) });
        if let Err(error) = added {
            let _ = self.batches.free(batch.id());
            return Err(error);
        }
        Ok(batch.id())
    }

    /// Waits until the batches have ended, and frees them.
    ///
    /// # Errors
    /// The first failure: `UnknownBatch`, `Transfer`, `Argument`. The batches were waited for and freed
    /// nevertheless.
    pub fn wait(&self, batches: &[u64]) -> Result<(), EngineError> {
        self.here()?;
        let waited = batches.iter().map(|&id| {
            let batch = self.batches.get(id)?;
            let ended = first_failure(batch.posts().map(Post::wait));
            self.free_batch(id)?;
            ended
        });
        first_failure(waited)
    }

    /// What is known about all requests of a batch together.
    ///
    /// # Errors
    /// `UnknownBatch`.
    pub fn batch_state(&self, batch: u64) -> Result<State, EngineError> {
        self.here()?;
        self.batches.look(batch, |batch| Ok(batch.state()))
    }

    /// Allocates an id for at most `capacity` requests, which are added with [`submit`](Self::submit). The id
    /// is not used again after it was [freed](Self::free_batch).
    ///
    /// # Errors
    /// `TooManyBatches`, `Argument`.
    pub fn allocate_batch(&self, capacity: usize) -> Result<u64, EngineError> {
        self.here()?;
        self.batches.allocate(capacity).map(|batch| batch.id())
    }

    /// Adds requests to a batch and submits them. They have no timeout, unless `MC_SLICE_TIMEOUT` sets one.
    /// When all of them have completed, `notice` is sent to the owner of the first request's segment; until
    /// the owner has answered, they are `Pending`.
    ///
    /// # Errors
    /// `UnknownBatch`, `BatchFull`, `Argument` for a notice without requests, and those of
    /// [`transfer`](Self::transfer); no byte was moved.
    ///
    /// # Safety
    /// The local memory stays mapped until [`task_status`](Self::task_status) has reported for each of the
    /// requests that it is over, and no `&` or `&mut` exists to bytes that a request may write.
    #[allow(unsafe_code, reason = "only the caller can promise what raw addresses need")]
    pub unsafe fn submit(
        &self,
        batch: u64,
        requests: &[Request],
        notice: Option<&Notice>,
    ) -> Result<(), EngineError> {
        self.here()?;
        let batch = self.batches.get(batch)?;
        if requests.is_empty() {
            return match notice {
                None => Ok(()),
                Some(_) => Err(EngineError::argument("a notification needs requests: submit at least one")),
            };
        }
        // SAFETY: the caller's promise.
        let post = || unsafe { self.post(requests.iter().copied(), None, notice) };
        batch.add(&self.batches, requests.len(), post)
    }

    /// What is known about request number `task` of a batch. Takes no lock and does not wait.
    ///
    /// # Errors
    /// `UnknownBatch`; `Argument` if the batch has no such request.
    pub fn task_status(&self, batch: u64, task: usize) -> Result<TaskStatus, EngineError> {
        self.here()?;
        self.batches.look(batch, |batch| {
            let found = batch.post_of(task).and_then(|(post, task)| Some((post, post.task(task)?)));
            let Some((post, status)) = found else {
                return Err(EngineError::argument(format!("the batch has no request {task}")));
            };
            if post.wants_settling(status.state) {
                post.settle(&self.engine, &self.regions);
            }
            Ok(status)
        })
    }

    /// Frees a batch that has ended, however it ended.
    ///
    /// # Errors
    /// `UnknownBatch`, `BatchBusy`.
    pub fn free_batch(&self, batch: u64) -> Result<(), EngineError> {
        self.here()?;
        let batch = self.batches.free(batch)?;
        batch.posts().for_each(|post| post.settle(&self.engine, &self.regions));
        Ok(())
    }

    /// Sends a message to the owner of a segment. Returns when it is in the owner's queue.
    ///
    /// # Errors
    /// `Argument`, `Segment`.
    pub fn notify(&self, segment: SegmentNumber, name: &str, message: &[u8]) -> Result<(), EngineError> {
        self.here()?;
        let segment = self.segments.get(segment)?;
        let sent = |attached: &Attached| {
            self.engine.notify(attached.handle, name, message).map_err(|source| segment.failed(source))
        };
        sent(&*segment.current(&self.engine)?).or_else(|error| {
            // The owner may have restarted.
            segment.suspect();
            match segment.current(&self.engine) {
                Ok(now) => sent(&now),
                Err(_) => Err(error),
            }
        })
    }

    /// Takes the messages that peers have sent since the last call.
    #[must_use]
    pub fn take_notifications(&self) -> Vec<Notice> {
        if self.here().is_err() {
            return Vec::new();
        }
        let native = self.engine.take_notifications().into_iter();
        let native = native.map(|taken| Notice { name: taken.name, message: taken.message });
        native.chain(self.wire.take_notifications()).collect()
    }

    /// Checks that the peer `name` answers.
    ///
    /// # Errors
    /// `Argument`, `Peer`: it does not.
    pub fn probe(&self, name: &str) -> Result<(), EngineError> {
        self.here()?;
        self.wire.probe(checked(name)?)
    }

    /// The address of the first buffer that the peer `name` exports; `None` if it exports none.
    ///
    /// # Errors
    /// `Argument`, `Peer`.
    pub fn first_buffer_address(&self, name: &str) -> Result<Option<u64>, EngineError> {
        self.here()?;
        self.wire.first_buffer(checked(name)?)
    }

    /// The segments that are open, by number.
    #[must_use]
    pub(super) fn open_names(&self) -> Vec<String> {
        self.segments.attached().iter().map(|segment| segment.name().to_owned()).collect()
    }

    /// The segment of a name, opened if it is not.
    fn segment_of(&self, name: &str) -> Result<(SegmentNumber, Arc<Segment>), EngineError> {
        self.here()?;
        let name = checked(name)?;
        if let Some(found) = self.segments.find(name) {
            return Ok(found);
        }
        let number = self.segments.open(&self.engine, name)?;
        Ok((number, self.segments.get(number)?))
    }

    /// Fails in a child after a fork, where locks of this session may be held for ever.
    fn here(&self) -> Result<(), EngineError> {
        if self.mark.is_forked() { Err(EngineError::argument(FORKED)) } else { Ok(()) }
    }

    fn managed(&self) -> MutexGuard<'_, Managed> {
        self.managed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Pause before requests are submitted again to an engine that was full.
const FULL_PAUSE: Duration = Duration::from_millis(1);

impl Session {
    /// Ends every registration that no transfer of this session uses, at once: from here on no peer reaches
    /// the memory. The directory is told later.
    pub(super) fn revoke(&self) {
        if self.mark.is_forked() {
            return;
        }
        self.wire.revoke();
        for addr in self.regions.users() {
            if let Err(error) = self.regions.remove(&self.engine, addr) {
                log::debug!("the memory at {addr:#x} is in use until its transfer ends: {error}");
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.mark.is_forked() {
            return;
        }
        let batches = self.batches.all();
        batches.iter().flat_map(|batch| batch.posts()).for_each(Post::cancel);
        for post in batches.iter().flat_map(|batch| batch.posts()) {
            if let Err(error) = post.wait() {
                log::debug!("a batch was under way when its engine stopped: {error}");
            }
        }
        // The ports are closed next, and the engine is stopped: nothing reaches the memory any more.
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("name", &self.name()).finish_non_exhaustive()
    }
}

/// The first of the failures, after all of `results` were computed.
fn first_failure(results: impl Iterator<Item = Result<(), EngineError>>) -> Result<(), EngineError> {
    let mut first = Ok(());
    for result in results {
        first = first.and(result);
    }
    first
}

/// The location that a caller names. Texts that Snowskin does not know count as host memory: Mooncake's
/// callers pass `*` for any memory.
fn location_of(text: &str) -> Location {
    text.parse().unwrap_or_default()
}
