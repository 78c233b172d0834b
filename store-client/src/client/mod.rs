//! [`Client`]: a client of the store with its own transfer engine.
//!
//! `put.rs` and `get.rs` run the state machines of [`store_core::client`], `open_puts.rs` and
//! `started_gets.rs` what takes several calls, `staging.rs` has objects that are on disks read into memory
//! first, `lending.rs` registers plain memory for the duration of an operation, and `store.rs` implements
//! [`Store`](crate::Store).

mod devices;
mod get;
mod lending;
mod open_puts;
mod packs;
mod put;
mod staging;
mod started_gets;
mod store;

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::ops::AddAssign;
use std::sync::Arc;
use std::time::{Duration, Instant};

use store_core::client::{GetOp, PutOp};
use store_core::message::ReportSegments;
use store_core::{ErrorCode, Trace};
use te_core::device::Devices;
use te_core::{Access, MemSpan, MemoryKinds, Op, RegionId};
use te_engine::{RegisterError, SharedRegion};
use te_host::Spin;
use te_host::fork::Mark;

use crate::bounce::Bounce;
use crate::config::ClientConfig;
use crate::engine::{self, Engine};
use crate::error::{ConnectError, RpcError, StoreError};
use crate::master::MasterClient;
use crate::memory::{self, BufferRange, Held, Memory};
use crate::metrics::{self, ClientMetrics, OperationTimes};
use crate::mover::{Buffers, Mover};
use crate::rpc::RpcConnection;
use crate::segments::{Place, Segments};

use open_puts::OpenPuts;
pub use open_puts::PutRange;
use staging::Staging;
use started_gets::StartedGets;
pub(crate) use store::{found, removed};

/// A client of the store with its own transfer engine. It is used by one thread at a time, and the calling
/// thread also polls the engine. It starts no thread, except a short one each time that it connects to the
/// disks of a node. Gets and puts are those of [`Store`](crate::Store).
///
/// A key that is not found, or not found intact and in time, is a miss: the result is `None`, and a counter
/// in [`counters`](Self::counters) gives the reason. An error is something that the caller should look into.
pub struct Client {
    config: ClientConfig,
    rpc: RpcConnection,
    rpc_connects: u64,
    get: GetOp,
    put: PutOp,
    engine: Engine,
    memory: Memory,
    mover: Mover,
    segments: Segments,
    staging: Staging,
    puts: OpenPuts,
    gets: StartedGets,
    started: Instant,
    /// Keys of the hash from which nonces are drawn; random per client.
    nonce_keys: RandomState,
    nonces: u64,
    /// Number of the connection (as counted by `rpc`) that granted the leases of the latest get.
    leased_by: u64,
    /// Identifies this client in reports of bad replicas; random per client.
    reporter: u64,
    counters: Counters,
    times: OperationTimes,
    mark: Mark,
    /// Handle through which other threads read the counters; `None` until one is requested.
    published: Option<ClientMetrics>,
}

/// What a client has counted since it connected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Keys that were read intact.
    pub hits: u64,
    /// Keys that were not read, for a reason that is not an error.
    pub misses: u64,
    /// Replicas whose bytes did not match the committed checksum.
    pub checksum_mismatches: u64,
    /// Misses because the read took longer than the lease.
    pub lease_misses: u64,
    /// Reads that continued with another replica.
    pub replica_failovers: u64,
    /// Misses because no replica could be read.
    pub transfer_misses: u64,
    /// Keys that were read intact from the disk of a node.
    pub disk_hits: u64,
    /// Those of them that this client has read from packs itself.
    pub shared_hits: u64,
    /// Objects whose packs were not there any more, or too short.
    pub shared_lost: u64,
    /// Keys that were read intact from exported disks by this client itself, past their nodes.
    pub direct_hits: u64,
    /// Reads of exported disks that were left to their nodes, by the reason, in the order of
    /// [`NotDirect::COUNTED`](crate::NotDirect::COUNTED).
    pub direct_fallbacks: [u64; 5],
    /// Misses because the disk that had the key did not deliver it in time, or failed.
    pub disk_misses: u64,
    /// Keys that were committed.
    pub puts: u64,
    /// Keys whose put failed. A put of an existing key is not counted.
    pub put_failures: u64,
    /// Bytes of values read.
    pub read_bytes: u64,
    /// Bytes of values committed; replicas of a value are not counted again.
    pub written_bytes: u64,
    /// Pieces of memory that were put in quarantine because a fabric might still touch them, those that have
    /// come back included.
    pub quarantined_pieces: u64,
    /// Connections made to the master.
    pub connects: u64,
}

impl AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        let Self {
            hits,
            misses,
            checksum_mismatches,
            lease_misses,
            replica_failovers,
            transfer_misses,
            disk_hits,
            shared_hits,
            shared_lost,
            direct_hits,
            direct_fallbacks,
            disk_misses,
            puts,
            put_failures,
            read_bytes,
            written_bytes,
            quarantined_pieces,
            connects,
        } = other;
        self.hits += hits;
        self.misses += misses;
        self.checksum_mismatches += checksum_mismatches;
        self.lease_misses += lease_misses;
        self.replica_failovers += replica_failovers;
        self.transfer_misses += transfer_misses;
        self.disk_hits += disk_hits;
        self.shared_hits += shared_hits;
        self.shared_lost += shared_lost;
        self.direct_hits += direct_hits;
        for (sum, of_other) in self.direct_fallbacks.iter_mut().zip(direct_fallbacks) {
            *sum += of_other;
        }
        self.disk_misses += disk_misses;
        self.puts += puts;
        self.put_failures += put_failures;
        self.read_bytes += read_bytes;
        self.written_bytes += written_bytes;
        self.quarantined_pieces += quarantined_pieces;
        self.connects += connects;
    }
}

impl Client {
    /// Connects to the master and starts an engine.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn connect(mut config: ClientConfig) -> Result<Self, ConnectError> {
        config.validate()?;
        if config.identity.cluster.is_set() {
            config.engine.cluster_secret = config.identity.cluster_secret();
        }
        // This client reads no notifications.
        config.engine.control.notifications_max = 0;
        let rpc = RpcConnection::connect_as(config.master.clone(), config.rpc, config.identity.clone())?;
        let mut engine = engine::start(config.engine.clone())?;
        let mover = mover(&config, &mut engine)?;
        let (get, put) = machines(&config);
        let reporter = RandomState::new().hash_one(engine.identity());
        let mut this = Self {
            rpc,
            rpc_connects: 0,
            get,
            put,
            engine,
            memory: Memory::default(),
            mover,
            segments: segments(&config),
            staging: Staging::new(&config),
            puts: OpenPuts::new(),
            gets: StartedGets::new(),
            started: Instant::now(),
            nonce_keys: RandomState::new(),
            nonces: 0,
            leased_by: 0,
            reporter,
            counters: Counters::default(),
            times: OperationTimes::default(),
            mark: Mark::new(),
            published: None,
            config,
        };
        this.note_connection();
        Ok(this)
    }

    /// Allocates registered memory, from and into which gets and puts move bytes without a copy
    /// ([`BufferRange::part`]). It is freed with the client, or by [`unregister`](Self::unregister).
    ///
    /// # Errors
    /// [`StoreError::Memory`] when the system has no memory left, or the fabrics cannot register it.
    pub fn alloc(&mut self, len: usize) -> Result<SharedRegion, StoreError> {
        self.check_process()?;
        let region = self.engine.alloc_shared(len, Access::LOCAL)?;
        self.memory.insert(region.id(), Held::Shared(region.clone()));
        Ok(region)
    }

    /// Registers the caller's memory, from and into which gets and puts move bytes without a copy.
    ///
    /// Memory of a GPU is found by its address (features `cuda` and `hip`), or its span says where it is
    /// ([`MemSpan::at`]). Its bytes pass through page-locked host memory, where their checksum is computed,
    /// over every fabric; no fabric has to know the device, and registering asks the driver once, so memory
    /// may be registered for a single operation as well. The memory has to be ready: work of the caller's
    /// streams that writes it has ended before a put, and a get has written it when it returns.
    ///
    /// # Errors
    /// [`StoreError::Memory`] when the memory overlaps a registered region, or a fabric refuses it;
    /// [`StoreError::DeviceMemory`].
    ///
    /// # Safety
    /// Until [`unregister`](Self::unregister) has returned `Ok` for the region, or the client has been
    /// dropped, `span` stays mapped, readable and writable, and while an operation names a part of it, no `&`
    /// or `&mut` to that part exists. A get into the region that fails with [`Held`](StoreError::Held) may
    /// still be written by a fabric: for the part that it named, the promise lasts until a later operation
    /// that names the same part succeeds or fails with another error.
    #[allow(unsafe_code, reason = "only the caller can promise what registration needs")]
    pub unsafe fn register(&mut self, span: MemSpan) -> Result<RegionId, StoreError> {
        self.check_process()?;
        let span = self.engine.located(span);
        if span.require(MemoryKinds::HOST).is_err() {
            return self.register_device(span);
        }
        // SAFETY: the caller promises what the engine requires.
        let region = unsafe { self.engine.register(span, Access::LOCAL)? };
        self.memory.insert(region, Held::Raw(span));
        Ok(region)
    }

    /// Ends a registration. After `Ok` nothing touches the memory any more.
    ///
    /// # Errors
    /// [`StoreError::Memory`]: `Busy` while a transfer may still touch the memory, `NotFound` for an unknown
    /// region.
    pub fn unregister(&mut self, region: RegionId) -> Result<(), StoreError> {
        self.check_process()?;
        if memory::is_device(region) {
            return self.unregister_device(region);
        }
        self.engine.unregister(region)?;
        self.memory.remove(region);
        Ok(())
    }

    /// Whether the region came from [`alloc`](Self::alloc) of this client and is still registered.
    pub(crate) fn allocated(&self, region: &SharedRegion) -> bool {
        self.memory.is_at(region.id(), region.span())
    }

    /// The requests that concern the master alone, over this client's connection: lists, places, tasks,
    /// counters.
    #[must_use]
    pub const fn master(&mut self) -> MasterClient<'_> {
        MasterClient::new(&mut self.rpc)
    }

    /// This client's own counters.
    #[must_use]
    pub fn counters(&self) -> Counters {
        Counters {
            quarantined_pieces: self.mover.quarantined_total(),
            connects: self.rpc.connects_total(),
            ..self.counters
        }
    }

    /// Why this client could not reach the segment that failed last: the node's address and the error. It
    /// explains a put that ended with `TransferFail`, or a `transfer_miss`.
    #[must_use]
    pub fn why_unreached(&self) -> Option<&str> {
        self.segments.why_unreached()
    }

    /// Counters, operation times and the engine's rails as OpenMetrics text for Prometheus. Names begin with
    /// `snowskin_client_` and `snowskin_engine_`; `docs/reference/metrics.md` describes each.
    #[must_use]
    pub fn metrics_text(&self) -> String {
        metrics::of_client(&self.counters(), &self.times, &self.engine_stats())
    }

    /// A handle through which another thread reads this client's counters, for a process that exports the
    /// metrics of the clients inside it ([`metrics_text_of`](crate::metrics_text_of)).
    pub fn metrics_handle(&mut self) -> ClientMetrics {
        let handle = self.published.get_or_insert_default().clone();
        self.publish();
        handle
    }

    fn publish(&self) {
        if let Some(published) = &self.published {
            published.publish(self.counters(), self.times);
        }
    }

    /// The number of the latest operation, as it appears in the logs of this client and of the master.
    #[must_use]
    pub fn trace(&self) -> Trace {
        self.rpc.trace()
    }

    /// Counters of the engine and its rails.
    #[must_use]
    pub fn engine_stats(&self) -> te_engine::Stats {
        self.engine.stats()
    }

    #[cfg(test)]
    pub(crate) const fn engine_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// Starts a transfer. Returns whether it is a read that is not the first transfer of its item.
    fn start_transfer(&mut self, transfer: store_core::client::Transfer, buffers: &Buffers<'_, '_>) -> bool {
        let shun = Duration::from_millis(self.config.unreachable_ms.into());
        let place = self.segments.open(transfer.segment, &mut self.rpc, &mut self.engine, shun);
        let handle = match place {
            Some(Place::Memory(handle)) => Some(handle),
            Some(Place::Storage(handle, granule)) => {
                let again = self.mover.start_on_storage(transfer, (handle, granule), buffers);
                return again && transfer.op == Op::Read;
            }
            Some(Place::Disk { staging, service }) if transfer.op == Op::Read => {
                return self.read_from_disk(transfer, staging, service, buffers);
            }
            Some(Place::Packs(packs)) if transfer.op == Op::Read => {
                return self.read_from_packs(transfer, packs, buffers);
            }
            // No put has a place on a disk.
            Some(Place::Disk { .. } | Place::Packs(_)) | None => None,
        };
        self.mover.start(transfer, handle, buffers) && transfer.op == Op::Read
    }

    /// Begins an operation. A connection that the master has closed is replaced here, before the first call
    /// fails on it.
    fn begin_operation(&mut self) -> Instant {
        self.rpc.begin_trace();
        self.mover.settle(&mut self.engine);
        match self.rpc.refresh() {
            Ok(_) => self.note_connection(),
            // The operation's first call fails with the same error, which becomes the result of each item.
            Err(error) => log::debug!("{error}"),
        }
        Instant::now() + Duration::from_millis(self.config.transfer_ms_max.into())
    }

    /// Ends an operation (get or put) of `items` keys; `deadline` is the one that it began with.
    fn end_operation(&mut self, op: Op, items: usize, deadline: Instant) {
        let began = deadline - Duration::from_millis(self.config.transfer_ms_max.into());
        let took = began.elapsed();
        let times = if op == Op::Read { &mut self.times.get } else { &mut self.times.put };
        times.record_ns(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
        let slow = self.config.slow_operation_ms;
        if slow > 0 && took >= Duration::from_millis(slow.into()) {
            let name = if op == Op::Read { "get" } else { "put" };
            log::warn!("operation {}: {name} of {items} keys took {} ms", self.trace(), took.as_millis());
        }
        let shun = Duration::from_millis(self.config.unreachable_ms.into());
        while let Some(segment) = self.mover.next_failed_segment() {
            self.segments.failed(segment, &mut self.engine, shun);
        }
        self.report_unreached();
    }

    /// Reports to the master the segments that this operation could not reach, so that other clients avoid
    /// them. A failed report is not an error: other clients find out themselves.
    fn report_unreached(&mut self) {
        let mut unreached = self.segments.take_unreached();
        unreached.extend(self.mover.take_unreached());
        unreached.sort_unstable();
        unreached.dedup();
        unreached.truncate(REPORTS_MAX);
        // A client that was cut off cannot judge whether a segment is reachable.
        if unreached.is_empty() || self.mover.is_expelled() {
            return;
        }
        if let Err(error) = self.rpc.call::<ReportSegments>(&(), unreached.into_iter()) {
            log::debug!("operation {}: unreachable segments could not be reported: {error}", self.trace());
        }
        self.note_connection();
    }

    fn pump(&mut self, buffers: &mut Buffers<'_, '_>, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        self.mover.pump(&mut self.engine, &self.memory, buffers, left)
    }

    fn wait(&mut self, due: Option<te_core::Instant>, deadline: Instant) {
        let due = due.map(|at| self.started + Duration::from_nanos(at.as_nanos()));
        let until = due.unwrap_or(deadline);
        if self.staging.is_idle() {
            self.mover.wait(&mut self.engine, until);
        } else {
            self.wait_staging(until);
        }
    }

    /// Resets the state machines after an operation was described but not started.
    fn forget_operation(&mut self) {
        (self.get, self.put) = machines(&self.config);
    }

    /// Ends everything that an operation had under way when it panicked, so that the next operation starts
    /// afresh.
    fn abandon_operation(&mut self) {
        self.mover.abandon(&mut self.engine);
        self.staging.abandon();
        self.forget_operation();
        // A response to the operation's requests must not reach the next operation.
        self.rpc.disconnect();
    }

    fn call_failed(&mut self, error: RpcError) -> ErrorCode {
        log::debug!("operation {}: {error}", self.trace());
        let code = error.code();
        // Any failure of the connection, a timeout included: the next call uses a new connection.
        self.rpc.disconnect();
        match self.rpc.ensure_connected() {
            Ok(_) => self.note_connection(),
            Err(error) => log::debug!("{error}"),
        }
        code
    }

    fn note_connection(&mut self) {
        if self.rpc_connects != self.rpc.connects_total() {
            self.rpc_connects = self.rpc.connects_total();
            self.segments.reconnected(self.rpc.welcome().lineage, &mut self.engine);
        }
    }

    fn check_process(&self) -> Result<(), StoreError> {
        if self.mark.is_forked() { Err(StoreError::Forked) } else { Ok(()) }
    }

    /// Checks that operations can be carried out. If nodes have cut off the engine, it is replaced, unless
    /// callers hold memory that is registered with it.
    ///
    /// # Errors
    /// `Forked`, `Expelled`.
    fn usable(&mut self) -> Result<(), StoreError> {
        self.check_process()?;
        if self.mover.is_expelled() {
            self.renew_engine()?;
        }
        Ok(())
    }

    fn renew_engine(&mut self) -> Result<(), StoreError> {
        let failed = |error: &dyn std::fmt::Display| {
            log::warn!(
                "nodes cut this client off and its engine cannot be replaced: {error}: connect a new client"
            );
            StoreError::Expelled
        };
        if !self.memory.is_empty() {
            return Err(failed(&"memory is registered with the old one"));
        }
        let mut engine = engine::start(self.config.engine.clone()).map_err(|error| failed(&error))?;
        let mover = mover(&self.config, &mut engine).map_err(|error| failed(&error))?;
        log::warn!(
            "nodes cut this client off, because it made no progress for longer than they tolerate: it continues with a new engine"
        );
        // The old engine ends before the old mover, whose slots are registered with it.
        self.engine = engine;
        self.mover = mover;
        // They were those of the writer that the nodes have cut off.
        self.puts.clear();
        self.segments = segments(&self.config);
        self.staging = Staging::new(&self.config);
        self.rpc_connects = 0;
        self.note_connection();
        Ok(())
    }

    /// Checks that these ranges lie inside registered memory, that memory of devices was not freed, and that
    /// no fabric may still write them.
    ///
    /// # Errors
    /// `Unregistered`, `DeviceMemory`, `Held`.
    pub(crate) fn check_ranges(
        &self,
        ranges: impl IntoIterator<Item = BufferRange>,
    ) -> Result<(), StoreError> {
        let (mut held, mut checked) = (false, None);
        for range in ranges {
            if !self.memory.contains(range) {
                return Err(StoreError::Unregistered { offset: range.offset, len: range.len });
            }
            // Asks the driver once for ranges of one region.
            if memory::is_device(range.region) && checked != Some(range.region) {
                self.memory.check_device(range.region)?;
                checked = Some(range.region);
            }
            held |= self.mover.is_quarantined(range, &self.memory);
        }
        if held { Err(StoreError::Held) } else { Ok(()) }
    }

    /// Releases quarantined memory that has drained.
    pub(crate) fn settle(&mut self) {
        self.mover.settle(&mut self.engine);
    }

    /// Allocates registered memory that can be shared with a process on this host.
    pub(crate) fn alloc_lent(&mut self, len: usize) -> Result<SharedRegion, StoreError> {
        self.check_process()?;
        let region = self.engine.alloc_lent(len, Access::LOCAL)?;
        self.memory.insert(region.id(), Held::Shared(region.clone()));
        Ok(region)
    }

    /// The devices whose memory this client can register; `None`: this build knows none.
    #[must_use]
    pub fn devices(&self) -> Option<Arc<dyn Devices>> {
        self.engine.devices()
    }

    /// Whether nodes have cut off this client's engine. A caller that holds memory of the engine has to
    /// connect a new client.
    pub(crate) fn is_expelled(&self) -> bool {
        self.mover.is_expelled()
    }

    /// Whether a fabric may still write a part of the range for an operation that is over.
    pub(crate) fn is_held(&mut self, range: BufferRange) -> bool {
        self.settle();
        self.mover.is_quarantined(range, &self.memory)
    }

    /// A random number that names a put, not 0. A forked child has the same hash keys as its parent, but an
    /// engine with another identity.
    fn nonce(&mut self) -> u32 {
        self.nonces = self.nonces.wrapping_add(1);
        (self.nonce_keys.hash_one((self.engine.identity(), self.nonces)) as u32).max(1)
    }

    fn now(&self) -> te_core::Instant {
        te_core::Instant::ZERO + self.started.elapsed()
    }
}

/// Most segments that one operation reports.
const REPORTS_MAX: usize = 256;

/// The state machines of gets and puts.
fn machines(config: &ClientConfig) -> (GetOp, PutOp) {
    let config = config.machines();
    (GetOp::new(config), PutOp::new(config))
}

fn segments(config: &ClientConfig) -> Segments {
    let segments = Segments::new(&config.engine);
    if config.shared == "none" { segments.without_packs() } else { segments }
}

/// The mover with its bounce buffer.
fn mover(config: &ClientConfig, engine: &mut Engine) -> Result<Mover, RegisterError> {
    let bounce = Bounce::new(engine.alloc_shared(config.bounce_bytes, Access::LOCAL)?);
    let spin = Spin::new(Duration::from_micros(config.engine.spin_us.into()));
    Ok(Mover::new(bounce, spin))
}

/// Most keys in one request.
const KEYS_PER_CALL_MAX: usize = 1024;
/// Most bytes of keys in one request: well below the longest frame.
const KEY_BYTES_PER_CALL_MAX: usize = 1 << 20;

/// Splits a batch into parts that fit one request each.
pub(crate) fn chunks<T>(mut items: &[T], key_bytes: impl Fn(&T) -> usize) -> impl Iterator<Item = &[T]> {
    std::iter::from_fn(move || {
        let (chunk, rest) = items.split_at(chunk_len(items, &key_bytes));
        items = rest;
        (!chunk.is_empty()).then_some(chunk)
    })
}

/// How many of the first items fit one request.
fn chunk_len<T>(items: &[T], key_bytes: impl Fn(&T) -> usize) -> usize {
    let mut bytes = 0;
    let fits = |item: &&T| {
        bytes += key_bytes(item);
        bytes <= KEY_BYTES_PER_CALL_MAX
    };
    items.iter().take(KEYS_PER_CALL_MAX).take_while(fits).count().max(1).min(items.len())
}
