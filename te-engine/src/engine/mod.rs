//! [`Engine`]: the core, which one thread at a time calls and polls. Without locks and without a thread hop,
//! it has the lowest latency.

mod control;
#[cfg(test)]
mod failover_tests;
mod fences;
mod memory;
mod rails;
mod regions;
mod reports;
mod requests;
mod segments;
#[cfg(feature = "nvmeof")]
mod storage;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::string::String;
use std::sync::Arc;
use std::time::Duration;
use std::vec::Vec;

use te_core::{
    BatchHandle, BatchTable, CancelReason, Completion, Error, ErrorKind, EventSource, ExpelMode, Instant,
    Memory, MultiTransport, Op, RegionId, RegionOffset, RemoteOffset, RemoteRegionId, Slice, Status, Token,
    Transport,
};
use te_host::fork::{Mark, Own};
use te_host::{Spin, keys, park};

use crate::affinity::Affinity;
use crate::config::Config;
use crate::control::{Inbox, Server};
use crate::descriptor::Published;
use crate::error::{ExpelError, Forked, StartError, TransferError};
use crate::fabrics::FabricEntry;
use crate::gpu::GpuMemory;
use crate::metadata::{Keeper, KeeperState, Metadata};
use crate::pools::PoolMemory;
use crate::request::{BatchReport, Expulsion, LeftOut, SegmentHandle, TransferRequest};
use crate::tiers::Tiers;
use control::Naming;
pub(crate) use control::{Peers, SegmentOwner};
pub use fences::FenceHandle;
use fences::Fences;
use rails::Parts;
use regions::Regions;
pub(crate) use reports::verdict;
use segments::Segments;
#[cfg(feature = "nvmeof")]
pub use storage::{MountedStorage, Storage};

/// Slices submitted, and completions taken, in one call of a rail.
const POLL_BUDGET: usize = 128;
/// Batches in a row that found their rails full before the rest of the queue waits for the next poll.
const BLOCKED_MAX: usize = 16;
/// Time until the next poll when work waits for something that no event announces.
const RETRY: Duration = Duration::from_millis(1);

/// The engine's core. One thread at a time calls it, and must poll it: for its own transfers and, over
/// fabrics whose target takes part, for those of its peers. [`TransferEngine`](crate::TransferEngine) is a
/// handle that threads share.
///
/// In a child after a [fork](te_host::fork) every call returns `Forked`, and nothing of the engine is
/// touched.
pub struct Engine {
    config: Config,
    identity: u64,
    spin: Spin,
    clock: Clock,
    /// Detects that this process is a fork of the one that started the engine.
    mark: Mark,
    rails: Own<MultiTransport<Box<dyn Transport + Send>, Tiers>>,
    /// Device and port of each rail, for reports.
    devices: Vec<String>,
    affinity: Affinity,
    gpus: GpuMemory,
    pools: PoolMemory,
    regions: Regions,
    /// Registrations that a rail has refused for its own reason.
    left_out: Vec<LeftOut>,
    segments: Segments,
    batches: BatchTable,
    /// By batch index: what the batch table does not keep.
    rows: Vec<Row>,
    /// Batches with slices left to submit.
    pending: VecDeque<BatchHandle>,
    fences: Fences,
    /// Remote regions to detach once nothing uses them.
    leaving: Vec<RemoteRegionId>,
    /// Regions that a stopped peer may still be copying.
    quarantine: Vec<RegionId>,
    /// When to try again to unregister them.
    release_at: Option<Instant>,
    /// When to register regions again with the rails that refused them, and how long to wait after that
    /// attempt.
    rejoin_at: Option<(Instant, Duration)>,
    /// The address of the next storage that is mounted.
    #[cfg(feature = "nvmeof")]
    storage_at: u64,
    /// No deadline of a batch or fence is earlier.
    next_deadline: Option<Instant>,
    /// What has ended, for the worker. `None`: not recorded.
    ended: Option<Vec<Ended>>,
    published: Arc<Published>,
    inbox: Arc<Inbox>,
    peers: Own<Peers>,
    registration: KeeperState,
    /// Dropped before the server: peers must not find a name whose control port is closed.
    _keeper: Own<Option<Keeper>>,
    checked: Vec<te_core::TransferRequest>,
    slices: Box<[Slice; POLL_BUDGET]>,
    completions: Box<[Completion; POLL_BUDGET]>,
    batches_timed_out: u64,
    quarantined_batches: u32,
    quarantined_bytes: u64,
    /// Dropped last: peers are answered until everything else has stopped.
    _server: Own<Server>,
}

/// A batch or a fence that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Batch(BatchHandle),
    Fence(FenceHandle),
}

/// What the engine keeps of a batch beside its requests.
#[derive(Default)]
struct Row {
    /// The regions and segments of its requests, whose counts of requests go down at its end.
    uses: Vec<(RegionId, SegmentHandle)>,
    /// CRC-32C of those parts of its requests whose rail reported it.
    sums: Vec<PartSum>,
    deadline: Option<Instant>,
    /// Set when it was cancelled: it is quarantined if it has not drained by then.
    drain_until: Option<Instant>,
    reason: Option<CancelReason>,
    bytes: u64,
    quarantined: bool,
    /// Freed by its caller while quarantined.
    orphan: bool,
    handle: Option<BatchHandle>,
    /// It has ended, or is quarantined.
    done: bool,
}

/// CRC-32C of a part of a request.
#[derive(Clone, Copy, Debug)]
struct PartSum {
    /// Index of the request in its batch.
    request: u16,
    /// Offset of the part in the request, bytes.
    start: u64,
    len: u64,
    crc32c: u32,
}

impl Engine {
    /// Opens the control port and the fabrics.
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

    /// As [`start`](Self::start), with `fabrics` of the caller in addition to those of [`Config::fabrics`],
    /// which may be `none` then. Each of them must start. Peers that have a fabric of the same name are
    /// reached over it.
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
        config.validate_beside(fabrics)?;
        let no_randomness = |error: Error| StartError::System(std::io::Error::from_raw_os_error(error.code));
        let identity = keys::identity().map_err(no_randomness)?;
        let Parts { rails, devices, affinity, gpus, pools, published, inbox, server } =
            rails::open(&config, identity, fabrics)?;
        let Naming { metadata, keeper, registration } =
            Naming::start(&config, metadata, &published.name, published.incarnation)?;
        let empty = Slice {
            token: Token(0),
            local: RegionOffset::new(RegionId::new(0, 0), 0),
            remote: RemoteOffset::new(RemoteRegionId::new(0, 0), 0),
            len: 0,
            op: Op::Read,
        };
        Ok(Self {
            identity,
            mark: Mark::new(),
            clock: Clock(std::time::Instant::now()),
            rails: Own::new(rails),
            devices,
            affinity,
            gpus,
            pools,
            regions: Regions::new(config.regions_max),
            left_out: Vec::new(),
            segments: Segments::new(config.remote_regions_max),
            batches: BatchTable::new(config.batches_max as usize, config.requests_per_batch_max as usize),
            rows: (0..config.batches_max).map(|_| Row::default()).collect(),
            pending: VecDeque::with_capacity(config.batches_max as usize),
            fences: Fences::default(),
            leaving: Vec::new(),
            quarantine: Vec::new(),
            release_at: None,
            rejoin_at: None,
            #[cfg(feature = "nvmeof")]
            storage_at: storage::ADDRESSES_AT,
            next_deadline: None,
            ended: None,
            published,
            inbox,
            peers: Own::new(Peers::new(&config, metadata)),
            registration,
            _keeper: Own::new(keeper),
            checked: Vec::new(),
            slices: Box::new([empty; POLL_BUDGET]),
            completions: Box::new([Completion::applied(Token(0)); POLL_BUDGET]),
            batches_timed_out: 0,
            quarantined_batches: 0,
            quarantined_bytes: 0,
            _server: Own::new(server),
            spin: Spin::new(Duration::from_micros(config.spin_us.into())),
            config,
        })
    }

    /// The name under which peers open this engine's memory: `host:port` of its control port.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.published.name
    }

    /// The incarnation of this engine: another number after every start.
    #[must_use]
    pub fn incarnation(&self) -> u64 {
        self.published.incarnation
    }

    /// The identity of this engine as an initiator, on every fabric: random, never 0, another number after
    /// every start. See [`expel`](Self::expel).
    #[must_use]
    pub fn identity(&self) -> u64 {
        self.identity
    }

    /// The CXL pools that the engine has opened, as [`Config::cxl`] names them. Extents of them are
    /// [claimed](te_cxl::Pool::claim), registered with [`register`](Self::register), and so become part of
    /// this engine's segment. Regions of peers in a pool are reached once this process has
    /// [a page](te_cxl::Pool::take_seat) of it.
    #[cfg(feature = "cxl")]
    #[must_use]
    pub fn pools(&self) -> &[Arc<te_cxl::Pool>] {
        self.pools.all()
    }

    /// The configuration that the engine was started with.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Fails in a child after a fork: there nothing of the engine may be touched.
    #[inline]
    pub(crate) fn here(&self) -> Result<(), Forked> {
        if self.mark.is_forked() { Err(Forked) } else { Ok(()) }
    }

    /// Submits requests as one batch. With `timeout`, requests that have not ended by then are cancelled and
    /// end `TimedOut`.
    ///
    /// # Errors
    /// `BatchLength`, `Request`, `Segment`: no byte of the batch was moved. `Full`: `batches_max` batches are
    /// not freed yet.
    pub fn submit(
        &mut self,
        requests: &[TransferRequest],
        timeout: Option<Duration>,
    ) -> Result<BatchHandle, TransferError> {
        self.submit_from(requests, timeout, None, None)
    }

    /// As `submit`, over rails of `fabric` alone if one is named; `owned` is the owned buffer that the
    /// requests may use.
    pub(crate) fn submit_from(
        &mut self,
        requests: &[TransferRequest],
        timeout: Option<Duration>,
        fabric: Option<&str>,
        owned: Option<te_core::MemSpan>,
    ) -> Result<BatchHandle, TransferError> {
        self.here()?;
        let requests_per_batch_max = self.config.requests_per_batch_max;
        if requests.is_empty() || requests.len() > requests_per_batch_max as usize {
            return Err(TransferError::BatchLength { requests: requests.len(), requests_per_batch_max });
        }
        // All requests are checked before the first one counts.
        let rails = fabric.map_or(u32::MAX, |name| self.rails_of(name));
        let mut checked = std::mem::take(&mut self.checked);
        checked.clear();
        let result = self.check(requests, rails, owned, &mut checked).and_then(|slicer| {
            self.batches.create(checked.iter().copied(), slicer).map_err(|_| TransferError::Full)
        });
        self.checked = checked;
        let handle = result?;
        self.rails.route_mut().permit(handle.index(), rails);
        let row = &mut self.rows[handle.index()];
        row.uses.clear();
        row.sums.clear();
        row.bytes = 0;
        for (core, request) in self.checked.iter().zip(requests) {
            row.uses.push((core.local.region, request.segment));
            row.bytes += request.len;
        }
        for &(region, segment) in &row.uses {
            if let Some(region) = self.regions.region_mut(region) {
                region.requests += 1;
            }
            if let Some(segment) = self.segments.segment_mut(segment) {
                segment.requests += 1;
            }
        }
        let idle = self.batches.live() == 1;
        let now = (idle || timeout.is_some()).then(|| self.clock.now());
        if let (true, Some(now)) = (idle, now) {
            // There may have been no poll for a while, and the rails would charge that time to their slices.
            self.rails.tick(now);
        }
        let deadline = timeout.zip(now).map(|(timeout, now)| now + timeout);
        (row.deadline, row.drain_until, row.reason) = (deadline, None, None);
        (row.quarantined, row.orphan, row.done, row.handle) = (false, false, false, Some(handle));
        self.note_deadline(deadline);
        self.pending.push_back(handle);
        self.pump();
        Ok(handle)
    }

    /// Makes progress: submits slices that wait, takes completions, ends batches that are late. Returns the
    /// number of completions.
    pub fn poll(&mut self) -> usize {
        if self.here().is_err() {
            return 0;
        }
        let now = self.clock.now();
        let mut count = self.reap(now);
        if self.next_deadline.is_some_and(|next| now >= next) {
            // A batch that has ended in time is not late because its completions have not been taken yet. The
            // loop ends: there are no more completions than slices in flight.
            let mut last = count;
            while last == POLL_BUDGET {
                last = self.reap(now);
                count += last;
            }
            self.expire(now);
        }
        if !self.pending.is_empty() {
            self.pump();
        }
        if !self.leaving.is_empty() {
            self.leave();
        }
        self.release(now);
        self.rejoin(now);
        count
    }

    /// Polls until a batch has ended, at most `timeout`, and sleeps while there is nothing to do.
    ///
    /// # Errors
    /// `Ended` when the batch ended other than `Completed`; `WaitTimedOut` when it has not ended (it
    /// continues); `NotFound`.
    pub fn wait(
        &mut self,
        batch: BatchHandle,
        timeout: Option<Duration>,
    ) -> Result<BatchReport, TransferError> {
        let until = timeout.map(|timeout| self.clock.now() + timeout);
        self.poll_until(until, |engine| {
            if engine.is_done(batch)? { verdict(engine.report(batch)?).map(Some) } else { Ok(None) }
        })
    }

    /// Lets rails that copy compute the CRC-32C of the bytes that they move in later polls.
    /// [`request_status`](Self::request_status) then reports it for a request all of whose slices were copied
    /// so, in their order (for a WRITE, from 32 KiB on). For other requests, and over other rails, it reports
    /// no checksum, and the caller computes it.
    pub fn checksum_copies(&mut self, wanted: bool) {
        if self.here().is_ok() {
            self.rails.set_checksums(wanted);
        }
    }

    /// Cancels a batch. It still ends exactly once: `Canceled`, or with the end that came first.
    ///
    /// # Errors
    /// `NotFound` when the batch was freed.
    pub fn cancel(&mut self, batch: BatchHandle) -> Result<(), TransferError> {
        self.here()?;
        self.stop(batch, CancelReason::Canceled)
    }

    /// Frees a batch that has ended.
    ///
    /// # Errors
    /// `Busy` when it has not ended, `NotFound` when it was freed before.
    pub fn free(&mut self, batch: BatchHandle) -> Result<(), TransferError> {
        self.here()?;
        match self.batches.free(batch) {
            Ok(()) => {
                self.rows[batch.index()].handle = None;
                Ok(())
            }
            Err(error) if error.kind == ErrorKind::Busy && self.rows[batch.index()].quarantined => {
                self.rows[batch.index()].orphan = true;
                Ok(())
            }
            Err(error) if error.kind == ErrorKind::Busy => Err(TransferError::Busy),
            Err(_) => Err(TransferError::NotFound),
        }
    }

    /// How long [`park`](Self::park) may sleep. `None`: until an event. Zero: not at all.
    #[must_use]
    pub fn idle_time(&self) -> Option<Duration> {
        self.wake_at().map(|at| at - self.clock.now())
    }

    /// A number that grows whenever [`poll`](Self::poll) moved something, for this engine or for a peer.
    #[must_use]
    pub fn activity(&self) -> u64 {
        if self.here().is_err() {
            return 0;
        }
        self.rails.activity()
    }

    /// When [`poll`](Self::poll) must run even without an event, on the engine's clock. `None`: only after an
    /// event.
    pub(crate) fn wake_at(&self) -> Option<Instant> {
        self.here().ok()?;
        let soon = (!self.pending.is_empty() || !self.leaving.is_empty()).then(|| self.clock.now() + RETRY);
        self.rails
            .poll_at()
            .into_iter()
            .chain(self.next_deadline)
            .chain(self.release_at)
            .chain(self.rejoin_at.map(|(at, _)| at))
            .chain(soon)
            .min()
    }

    /// File descriptors that become readable when [`poll`](Self::poll) has something to do.
    pub fn event_sources(&self) -> impl Iterator<Item = i32> + '_ {
        let rails = if self.here().is_ok() { self.rails.rails() } else { &[] };
        rails.iter().filter_map(Transport::event_source).map(|EventSource(fd)| fd)
    }

    /// Sleeps until [`poll`](Self::poll) has something to do, at most `timeout`. Uses no CPU meanwhile.
    pub fn park(&self, timeout: Option<Duration>) {
        if self.here().is_err() {
            return;
        }
        let idle = self.idle_time();
        if idle != Some(Duration::ZERO) {
            park(self.event_sources(), idle.into_iter().chain(timeout).min());
        }
    }

    /// Expels a peer: ends its access to the memory that this engine exports, over every fabric, and refuses
    /// it from now on. Its connections are closed and its mappings revoked; other peers are not disturbed.
    /// `peer` is the [identity](Self::identity) of its engine. To be called again, after
    /// [`poll`](Self::poll), until the result is [`Gone`](Expulsion::Gone). `mode` decides what happens to a
    /// peer that is connected.
    ///
    /// # Errors
    /// `Identity`, `Full`, `Rails`.
    pub fn expel(&mut self, peer: u64, mode: ExpelMode) -> Result<Expulsion, ExpelError> {
        self.here()?;
        if peer == 0 || peer == self.identity {
            return Err(ExpelError::Identity);
        }
        match self.rails.expel(peer, mode) {
            Ok(true) => Ok(Expulsion::Gone),
            Ok(false) => Ok(Expulsion::Underway),
            Err(error) => match error.kind {
                ErrorKind::Busy => Ok(Expulsion::Connected),
                ErrorKind::Unsupported => Ok(Expulsion::Unsupported),
                ErrorKind::Full => Err(ExpelError::Full),
                _ => Err(ExpelError::Rails(error)),
            },
        }
    }

    /// From now on records what ends, for [`take_ended`](Self::take_ended).
    pub(crate) fn record_ended(&mut self) {
        self.ended = Some(Vec::new());
    }

    /// Moves what has ended since the last call to the end of `out`.
    pub(crate) fn take_ended(&mut self, out: &mut Vec<Ended>) {
        if let Some(ended) = &mut self.ended {
            out.append(ended);
        }
    }

    fn poll_until<T>(
        &mut self,
        until: Option<Instant>,
        mut done: impl FnMut(&Self) -> Result<Option<T>, TransferError>,
    ) -> Result<T, TransferError> {
        loop {
            let before = self.activity();
            let progressed = self.poll() > 0 || self.activity() != before;
            if let Some(end) = done(self)? {
                return Ok(end);
            }
            let now = self.clock.now();
            if until.is_some_and(|until| now >= until) {
                return Err(TransferError::WaitTimedOut);
            }
            if progressed {
                self.spin.reset();
            } else if !self.spin.again() {
                self.park(until.map(|until| until - now));
            }
        }
    }

    /// Takes up to [`POLL_BUDGET`] completions.
    fn reap(&mut self, now: Instant) -> usize {
        let count = self.rails.poll(now, &mut self.completions[..]);
        for index in 0..count {
            let completion = self.completions[index];
            if let Some(number) = completion.token.fence_number() {
                if let Some(fence) = self.fences.complete(number, completion.result) {
                    self.end_fence(fence);
                }
                continue;
            }
            if let Some(crc32c) = completion.crc32c {
                self.keep_sum(completion.token, crc32c.get());
            }
            if let Some(handle) = self.batches.complete(&completion) {
                self.end(handle);
            }
        }
        count
    }

    /// Keeps the checksum of a slice that was applied, joined to that of the slice before it.
    fn keep_sum(&mut self, token: Token, crc32c: u32) {
        let Some((batch, index, (start, len))) = self.batches.find(token) else { return };
        let len = u64::from(len);
        let sums = &mut self.rows[batch.index()].sums;
        // Slices mostly end in their order, and one request after the other.
        match sums.last_mut() {
            Some(last) if last.request == index && last.start + last.len == start => {
                last.crc32c = te_core::crc32c_joined(last.crc32c, crc32c, len);
                last.len += len;
            }
            _ => sums.push(PartSum { request: index, start, len, crc32c }),
        }
    }

    /// Submits slices that wait, as far as the rails have room.
    fn pump(&mut self) {
        let mut blocked = 0;
        for _ in 0..self.pending.len() {
            let Some(handle) = self.pending.pop_front() else { break };
            if self.post(handle) {
                continue;
            }
            // The rails of this batch are full. Other batches may use other rails.
            self.pending.push_back(handle);
            blocked += 1;
            if blocked == BLOCKED_MAX {
                break;
            }
        }
    }

    /// Submits the slices of a batch. False: its rails are full, and slices are left.
    fn post(&mut self, handle: BatchHandle) -> bool {
        loop {
            let Ok(count) = self.batches.next(handle, &mut self.slices[..]) else { return true };
            if count == 0 {
                return true;
            }
            match self.rails.submit(&self.slices[..count]) {
                Ok(accepted) => {
                    self.batches.accepted(&self.slices[..accepted]);
                    if accepted == 0 {
                        return false;
                    }
                }
                Err(error) => {
                    if let Some(ended) = self.batches.refused(&self.slices[0], error) {
                        self.end(ended);
                    }
                }
            }
        }
    }

    /// Cancels a batch, for its caller or because of its deadline.
    fn stop(&mut self, handle: BatchHandle, reason: CancelReason) -> Result<(), TransferError> {
        if self.batches.progress(handle).map_err(|_| TransferError::NotFound)?.status.is_terminal() {
            return Ok(());
        }
        if self.rows[handle.index()].quarantined {
            // It was cancelled before, and has ended for its caller.
            return Ok(());
        }
        let drain_until = self.clock.now() + Duration::from_millis(u64::from(self.config.drain_ms));
        let row = &mut self.rows[handle.index()];
        row.deadline = None;
        row.reason.get_or_insert(reason);
        row.drain_until.get_or_insert(drain_until);
        match self.batches.cancel(handle, reason) {
            Ok(None) => {
                let batches = &self.batches;
                // A slice that its rail does not find has ended already, and its completion waits for a poll.
                let _ = self.rails.cancel_where(|token| batches.is_of(handle, token));
                self.note_deadline(Some(drain_until));
            }
            _ => self.end(handle),
        }
        Ok(())
    }

    /// Records that a batch has ended: nothing touches its memory any more.
    fn end(&mut self, handle: BatchHandle) {
        let row = &mut self.rows[handle.index()];
        for (region, segment) in row.uses.iter() {
            if let Some(region) = self.regions.region_mut(*region) {
                region.requests -= 1;
            }
            if let Some(segment) = self.segments.segment_mut(*segment) {
                segment.requests -= 1;
            }
        }
        let timed_out = self.batches.progress(handle).is_ok_and(|whole| whole.status == Status::TimedOut);
        self.batches_timed_out += u64::from(timed_out && !row.quarantined);
        (row.deadline, row.drain_until, row.done) = (None, None, true);
        if std::mem::take(&mut row.quarantined) {
            self.quarantined_batches -= 1;
            self.quarantined_bytes -= row.bytes;
            if std::mem::take(&mut row.orphan) {
                row.handle = None;
                let freed = self.batches.free(handle);
                debug_assert!(freed.is_ok(), "the batch has ended");
            }
            return;
        }
        if let Some(ended) = &mut self.ended {
            ended.push(Ended::Batch(handle));
        }
    }

    /// Cancels batches that are past their deadline, and quarantines those that did not drain in time.
    fn expire(&mut self, now: Instant) {
        self.next_deadline = None;
        for index in 0..self.rows.len() {
            let row = &self.rows[index];
            let Some(handle) = row.handle else { continue };
            if row.deadline.is_some_and(|deadline| now >= deadline) {
                let stopped = self.stop(handle, CancelReason::TimedOut);
                debug_assert!(stopped.is_ok(), "the batch is there");
            } else if row.drain_until.is_some_and(|until| now >= until) {
                self.quarantine(handle);
            }
            let row = &self.rows[index];
            self.note_deadline(row.deadline.or(row.drain_until));
        }
        self.expire_fences(now);
    }

    fn quarantine(&mut self, handle: BatchHandle) {
        let row = &mut self.rows[handle.index()];
        row.drain_until = None;
        (row.quarantined, row.done) = (true, true);
        self.batches_timed_out += u64::from(row.reason == Some(CancelReason::TimedOut));
        self.quarantined_batches += 1;
        self.quarantined_bytes += row.bytes;
        log::error!(
            "a batch of {} bytes did not drain within drain_ms: its local memory is quarantined",
            row.bytes
        );
        if let Some(ended) = &mut self.ended {
            ended.push(Ended::Batch(handle));
        }
    }

    fn note_deadline(&mut self, deadline: Option<Instant>) {
        self.next_deadline = self.next_deadline.into_iter().chain(deadline).min();
    }

    /// Detaches remote regions that nothing uses any more.
    fn leave(&mut self) {
        let Self { leaving, rails, segments, .. } = self;
        leaving.retain(|&id| match rails.detach(id) {
            Err(error) if error.kind == ErrorKind::Busy => true,
            _ => {
                segments.put_id(id);
                false
            }
        });
    }
}

impl Drop for Engine {
    /// Cancels what is in flight, so that peers receive cancellations instead of broken connections.
    fn drop(&mut self) {
        if self.here().is_err() {
            return;
        }
        let handles: Vec<BatchHandle> = self.rows.iter().filter_map(|row| row.handle).collect();
        for handle in handles {
            // Fails for a batch that was freed meanwhile.
            let _ = self.cancel(handle);
        }
        self.poll();
    }
}

/// Time since the engine started.
struct Clock(std::time::Instant);

impl Clock {
    fn now(&self) -> Instant {
        Instant::from_nanos(u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }
}
