//! The master: where each object is, who may read it, and which bytes may be allocated.
//!
//! ```text
//!            put_start            put_end                   get
//!    (none) ───────────▶ processing ─────────▶ idle ◀─────────────▶ leased
//!      ▲                 │      │               │      lease over      │ forced remove,
//!      │ quiet revoke    │      │ revoke,       │ remove, evict,       │ time to live over
//!      │                 │      │ displaced     │ time to live over    │
//!      ├─────────────────┘      ▼               │                      ▼
//!      │◀── quiet, or ── pending release        │            pending release
//!      │    cut off by    (writer)              │            (leased)
//!      │    the node                            │                      │ lease over
//!      └────────────────────────────────────────┴──────────────────────┘
//! ```
//!
//! Bytes are allocated to a put only when no other put can still write to them (its writer committed,
//! reported that it is quiet, or was cut off by the node that owns the memory) and no lease on them is valid.

mod admin;
mod drain;
mod evict;
mod expel;
mod hot;
mod mounts;
mod queries;
mod reports;
mod room;
mod tasks;
mod tenants;

use alloc::collections::BTreeMap;
use core::time::Duration;

use te_core::Instant;

use crate::allocator::Allocator;
use crate::chunks::stored_len;
use crate::event::{Event, Events};
use crate::eviction::{BatchOrder, Place};
use crate::handle::handle_of;
use crate::message::{
    Allocation, EvictionReport, Listed, Object, Pin, PutOptions, PutRequest, RemoveMode, Replica, Replicas,
    SegmentInfo, TaskReport, WriterState,
};
use crate::nodes::Nodes;
use crate::objects::{Entry, New, Objects, Placements};
use crate::pattern::Pattern;
use crate::pending_release::{PendingRelease, Reason};
use crate::segments::{Placed, Segment, Segments};
use crate::session::{Granted, Leases};
use crate::tasks::Tasks;
use crate::writers::Writers;
use crate::{ConfigError, ErrorCode, FullKey, Key, MasterConfig, NodeId, SegmentNo, Stats, TaskId, TenantNo};
pub(crate) use queries::PAGE_ITEMS_MAX;
pub(crate) use tenants::Rights;
use tenants::Tenants;

use drain::Drain;
use hot::Hot;
pub(crate) use reports::REPORTERS_MAX;
use reports::Suspects;

/// Objects that one put evicts while the watermark is passed; most are evicted by [`Master::handle_timeout`].
const EVICTIONS_PER_PUT: u32 = 8;
/// Limit on objects that one call drops because their time to live is over.
const EXPIRIES_PER_CALL_MAX: u32 = 4_096;
/// Each epoch of a master begins with another segment number: 4,096 higher than that of the epoch of a second
/// earlier, and the same again after six days.
const SEGMENTS_PER_EPOCH: u32 = 1 << 12;
const EPOCHS: u32 = 1 << 19;

/// The master of one store. Single-threaded, without locks.
///
/// *Inputs*: [`Self::handle`] for frames, or the operations themselves. *Timeouts*: [`Self::handle_timeout`],
/// due at [`Self::poll_timeout`]. *Getters*: the rest. The only outputs are return values and
/// [`Self::poll_event`]. The time that is passed must not decrease.
#[derive(Debug)]
pub struct Master {
    config: MasterConfig,
    tenants: Tenants,
    pub(crate) segments: Segments,
    objects: Objects,
    pending_release: PendingRelease,
    writers: Writers,
    events: Events,
    nodes: Nodes,
    /// Counters only; gauges are computed by [`Self::stats`].
    pub(crate) stats: Stats,
    generation: u64,
    /// Number of sessions that were given a number.
    sessions: u64,
    /// Memory that sessions need for leases that can be returned, bytes.
    pub(crate) lease_bytes: usize,
    /// The event that the memory limit is reached was emitted.
    metadata_reported: bool,
    /// A wall time, ms since 1970, and the time on the master's clock then.
    wall: Option<(Instant, u64)>,
    /// The watermark was passed, and the low mark is not reached yet.
    evicting: bool,
    starved: bool,
    /// Eviction at the watermark has nothing to evict before this time.
    evict_again_at: Instant,
    /// The regular expression of the latest query.
    pattern: Option<Pattern>,
    /// Further counters of eviction; gauges are computed by [`Self::eviction`].
    report: EvictionReport,
    tasks: Tasks,
    drains: BTreeMap<SegmentNo, Drain>,
    hot: Hot,
    suspects: Suspects,
    /// Counters of tasks; gauges are computed by [`Self::task_report`].
    task_report: TaskReport,
}

impl Master {
    /// An empty store.
    ///
    /// # Errors
    /// A setting is not within its limits.
    pub fn new(config: MasterConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let mut this = Self {
            tenants: Tenants::new(&config),
            segments: Segments::after(
                SegmentNo::new(config.epoch % EPOCHS * SEGMENTS_PER_EPOCH),
                config.allocation_strategy,
                millis(config.slow_start_ms),
            ),
            objects: Objects::new(
                config.hash_seed,
                config.eviction,
                millis(config.soft_pin_ttl_ms),
                millis(config.lease_ttl_ms) + millis(config.lease_guard_ms),
            ),
            pending_release: PendingRelease::new(),
            writers: Writers::new(),
            events: Events::default(),
            nodes: Nodes::new(millis(config.node_ttl_ms), 2 * config.segments_max as usize),
            stats: Stats::default(),
            generation: u64::from(config.epoch) << 32,
            sessions: 0,
            lease_bytes: 0,
            metadata_reported: false,
            wall: (config.started_wall_ms != 0).then_some((Instant::ZERO, config.started_wall_ms)),
            evicting: false,
            starved: false,
            evict_again_at: Instant::ZERO,
            report: EvictionReport::default(),
            pattern: None,
            tasks: Tasks::after(TaskId::new(u64::from(config.epoch) << 32), config.tasks.finished_max),
            drains: BTreeMap::new(),
            hot: Hot::new(&config.replication),
            suspects: Suspects::default(),
            task_report: TaskReport::default(),
            config,
        };
        this.add_tenants();
        Ok(this)
    }

    /// Allocates space for a new object that is alone in its batch. The request is not repeatable.
    ///
    /// # Errors
    /// `InvalidKey`, `InvalidParams`, `ObjectAlreadyExists`, `TenantQuotaExceeded`, `KeysUltraLimit`,
    /// `TooManyPuts`, `MetadataFull`, one of [`ErrorCode::is_no_room`]. A put that fails evicts nothing.
    pub fn put_start<'k>(
        &mut self,
        now: Instant,
        key: impl Into<FullKey<'k>>,
        len: u64,
        options: &PutOptions,
    ) -> Result<Allocation, ErrorCode> {
        self.put_start_in(now, key, len, &PutRequest::once(*options), Place::ALONE)
    }

    /// Allocates space for one object of a batch; `place` is its position, which eviction uses. Repeated by
    /// the same writer with the same nonce while the put is unfinished, it returns the same space.
    ///
    /// # Errors
    /// As [`Self::put_start`].
    pub fn put_start_in<'k>(
        &mut self,
        now: Instant,
        key: impl Into<FullKey<'k>>,
        len: u64,
        request: &PutRequest,
        place: Place,
    ) -> Result<Allocation, ErrorCode> {
        self.put_start_from(now, key.into(), len, request, place, 0)
    }

    /// As [`Self::put_start_in`], for the connection with this number; 0: there is none.
    pub(crate) fn put_start_from(
        &mut self,
        now: Instant,
        key: FullKey<'_>,
        len: u64,
        request: &PutRequest,
        place: Place,
        session: u64,
    ) -> Result<Allocation, ErrorCode> {
        self.check_key(key.key)?;
        let options = &request.options;
        let retention = options.retention;
        if len == 0
            || options.replicas == 0
            || options.replicas > self.config.replicas_max
            || retention.ttl_ms == Some(0)
        {
            return Err(ErrorCode::InvalidParams);
        }
        let found = self.objects.find(key);
        if let Some(again) = found.and_then(|index| self.repeated(index, len, request)) {
            return Ok(again);
        }
        if !self.objects.has_room(key.tenant, &retention) {
            return Err(ErrorCode::KeysUltraLimit);
        }
        let (of_session, of_tenant) = self.writers.count(session, key.tenant);
        if of_session >= self.config.session_puts_max || of_tenant >= self.config.tenant_puts_max {
            return Err(ErrorCode::TooManyPuts);
        }
        if retention.pin == Pin::Hard && !self.may_pin(key.tenant, len) {
            self.stats.puts_no_room_total += 1;
            return Err(ErrorCode::PinnedShareReached);
        }
        if let Some(index) = found {
            self.displace(now, index)?;
        }
        // Nothing is evicted before the put is sure of its place.
        let over = self.evicting || self.is_over_watermark();
        let price = self.price(now, key.tenant, len)?;
        let placed = self
            .place(now, key.tenant, stored_len(len), options, &price)
            .inspect_err(|_| self.stats.puts_no_room_total += 1)?;
        self.pay(now, key.tenant, len, &price);
        if over {
            self.evict_to_watermark(now, EVICTIONS_PER_PUT);
        }
        if placed.len() < usize::from(options.replicas) {
            self.stats.puts_partial_total += 1;
        }
        self.generation += 1;
        let replicas = Placements::new(&placed);
        let (generation, nonce) = (self.generation, request.nonce);
        let index = self.objects.insert(now, New { key, len, generation, nonce, replicas, place, retention });
        // An eviction may have freed a slot since, which the object has now.
        placed.iter().for_each(|placed| self.segments.own(placed, index));
        let allocation = self.allocation(generation, replicas_of(&placed));
        self.writers.began(&allocation, request.writer, session, key.tenant, index);
        self.stats.put_starts_total += 1;
        Ok(allocation)
    }

    /// Commits a put; the object is readable from here. The caller vouches that no write of this put is under
    /// way. A repetition has no effect.
    ///
    /// # Errors
    /// `PutIsOver` when there is no such put any more (it was displaced or removed, or its segments are
    /// gone), `InvalidWrite` when it is committed with another checksum.
    pub fn put_end<'k>(
        &mut self,
        now: Instant,
        key: impl Into<FullKey<'k>>,
        generation: u64,
        checksum: u32,
    ) -> Result<(), ErrorCode> {
        self.put_end_in(now, key, generation, checksum, BatchOrder::First)
    }

    /// As [`Self::put_end`], for one object of a batch.
    ///
    /// # Errors
    /// As [`Self::put_end`].
    pub fn put_end_in<'k>(
        &mut self,
        now: Instant,
        key: impl Into<FullKey<'k>>,
        generation: u64,
        checksum: u32,
        order: BatchOrder,
    ) -> Result<(), ErrorCode> {
        let key = key.into();
        let Some(index) = self.find_generation(key, generation) else {
            self.release_writer(key.tenant, generation);
            return Err(ErrorCode::PutIsOver);
        };
        let entry = self.objects.entry(index);
        if entry.is_complete() {
            return if entry.checksum == checksum { Ok(()) } else { Err(ErrorCode::InvalidWrite) };
        }
        self.stats.put_bytes_total += entry.len;
        self.objects.complete(now, index, checksum, order == BatchOrder::Follows);
        self.writers.ended(generation);
        self.stats.put_ends_total += 1;
        Ok(())
    }

    /// Gives a put up. With [`WriterState::Quiet`] the caller vouches that no write of it can land any more,
    /// and the space is freed at once; otherwise the space is pending release until the nodes report that the
    /// writer is cut off. A repetition has no effect.
    ///
    /// # Errors
    /// `PutIsOver` when there is no such put, `InvalidWrite` when it is committed.
    pub fn put_revoke<'k>(
        &mut self,
        now: Instant,
        key: impl Into<FullKey<'k>>,
        generation: u64,
        writer: WriterState,
    ) -> Result<(), ErrorCode> {
        let key = key.into();
        let quiet = writer == WriterState::Quiet;
        let release = now + millis(self.config.put_start_release_timeout_ms);
        if let Some(index) = self.find_generation(key, generation) {
            if self.objects.entry(index).is_complete() {
                return Err(ErrorCode::InvalidWrite);
            }
            if quiet {
                self.drop_object(index, None)
            } else {
                self.drop_object(index, Some((release, Reason::Writer)))
            }
            self.stats.put_revokes_total += 1;
            return Ok(());
        }
        let here = if quiet {
            self.release_writer(key.tenant, generation)
        } else {
            self.pending_release.put_off_writer(key.tenant, generation, release)
        };
        if here { Ok(()) } else { Err(ErrorCode::PutIsOver) }
    }

    /// Looks up an object and leases it for reading.
    ///
    /// # Errors
    /// `ObjectNotFound`, `ReplicaIsNotReady` while it is being written.
    pub fn get<'k>(&mut self, now: Instant, key: impl Into<FullKey<'k>>) -> Result<Object, ErrorCode> {
        self.get_in(now, key, BatchOrder::First)
    }

    /// As [`Self::get`], for one object of a batch.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub fn get_in<'k>(
        &mut self,
        now: Instant,
        key: impl Into<FullKey<'k>>,
        order: BatchOrder,
    ) -> Result<Object, ErrorCode> {
        self.get_leased(now, key.into(), order).map(|(object, _)| object)
    }

    /// As [`Self::get_in`], for a connection that can return the lease.
    pub(crate) fn get_for(
        &mut self,
        now: Instant,
        key: FullKey<'_>,
        order: BatchOrder,
        leases: &mut Leases,
    ) -> Result<Object, ErrorCode> {
        let (object, index) = self.get_leased(now, key, order)?;
        leases.note(now, index, object.generation, now + self.lease());
        Ok(object)
    }

    /// A reader has returned a lease.
    pub(crate) fn lease_returned(&mut self, now: Instant, granted: &Granted) {
        self.stats.leases_returned_total += 1;
        self.objects.return_lease(now, granted.index, granted.generation);
    }

    fn get_leased(
        &mut self,
        now: Instant,
        key: FullKey<'_>,
        order: BatchOrder,
    ) -> Result<(Object, u32), ErrorCode> {
        self.stats.gets_total += 1;
        let index = self.objects.find(key).ok_or(ErrorCode::ObjectNotFound)?;
        if self.objects.is_expired(now, index) {
            return Err(ErrorCode::ObjectNotFound);
        }
        let entry = self.objects.entry(index);
        if !entry.is_complete() {
            return Err(ErrorCode::ReplicaIsNotReady);
        }
        let object = Object {
            len: entry.len,
            checksum: entry.checksum,
            generation: entry.generation,
            replicas: replicas_of(entry.replicas.as_slice()),
        };
        self.objects.lease(now, index, now + self.lease(), order == BatchOrder::Follows);
        self.stats.get_hits_total += 1;
        self.stats.get_bytes_total += object.len;
        if self.hot.is_on() {
            self.count_read(now, index);
        }
        Ok((object, index))
    }

    /// Whether a get would find the object. Neither leases it nor counts as a use. An object whose time to
    /// live is over may still be reported until [`Self::handle_timeout`] has run.
    pub fn exists<'k>(&mut self, key: impl Into<FullKey<'k>>) -> bool {
        let found = self.objects.find(key.into()).is_some_and(|index| self.vouches_for(index));
        self.stats.exists_total += 1;
        self.stats.exists_hits_total += u64::from(found);
        found
    }

    /// Removes an object. Space that is leased, or that a writer may still write to, is freed later.
    ///
    /// # Errors
    /// `KeyNotFound`; with [`RemoveMode::IfUnused`] `ObjectHasLease`, `ReplicaIsNotReady`.
    pub fn remove<'k>(
        &mut self,
        now: Instant,
        key: impl Into<FullKey<'k>>,
        mode: RemoveMode,
    ) -> Result<(), ErrorCode> {
        let index = self.objects.find(key.into()).ok_or(ErrorCode::KeyNotFound)?;
        self.remove_at(now, index, mode)
    }

    /// Does what is due: gives up silent nodes, frees space and memory, evicts. Call it when
    /// [`Self::poll_timeout`] has passed; calling it earlier or later is harmless.
    pub fn handle_timeout(&mut self, now: Instant) {
        for node in self.nodes.expired(now) {
            self.give_up(now, node);
        }
        for _ in 0..EXPIRIES_PER_CALL_MAX {
            let Some(index) = self.objects.processing() else { break };
            let until = self.objects.entry(index).time + millis(self.config.put_start_release_timeout_ms);
            if until > now {
                break;
            }
            self.drop_object(index, Some((until, Reason::Writer)));
            self.stats.puts_abandoned_total += 1;
        }
        for _ in 0..EXPIRIES_PER_CALL_MAX {
            let Some(index) = self.objects.expired(now) else { break };
            self.drop_expired(now, index);
        }
        let held = self.pending_release.bytes_in_all();
        let due = self.pending_release.settle(&mut self.segments, now);
        self.settle_writers(now, due);
        if self.pending_release.bytes_in_all() < held {
            self.drains_look_again(now);
        }
        self.objects.settle(now);
        self.tasks_timeout(now);
        self.drains_timeout(now);
        self.evict_to_watermark(now, self.config.evictions_per_call_max);
        self.objects.tidy();
        self.pending_release.tidy();
        self.writers.tidy();
    }

    /// When [`Self::handle_timeout`] is due next; a time in the past means at once. Every call of a `&mut
    /// self` method may change it.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let processing = self
            .objects
            .processing()
            .map(|index| self.objects.entry(index).time + millis(self.config.put_start_release_timeout_ms));
        let eviction = (self.evicting || self.is_over_watermark())
            .then(|| self.objects.evictable_at())
            .flatten()
            .map(|at| at.max(self.evict_again_at));
        let due = [processing, eviction, self.objects.expiry(), self.pending_release.due(), self.nodes.due()];
        let tidying = self.objects.is_shrinking().then_some(Instant::ZERO);
        let more = [self.tasks.due(), self.drains_due(), tidying];
        due.into_iter().chain(more).flatten().min()
    }

    /// The oldest event that was not taken yet, for a log. At most 1,024 events wait; further ones are
    /// discarded and counted in [`Stats::events_dropped_total`].
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop()
    }

    /// Number of mounted segments.
    #[must_use]
    pub fn segments_len(&self) -> usize {
        self.segments.len()
    }

    /// Number of nodes that are alive.
    #[must_use]
    pub fn nodes_len(&self) -> usize {
        self.nodes.len()
    }

    /// The settings.
    #[must_use]
    pub const fn config(&self) -> &MasterConfig {
        &self.config
    }

    /// What a segment is and where.
    #[must_use]
    pub fn segment(&self, segment: SegmentNo) -> Option<SegmentInfo<'_>> {
        self.segments.get(segment).map(Segment::info)
    }

    /// Every mounted segment, in the order of mounting.
    pub fn segments(&self) -> impl Iterator<Item = SegmentInfo<'_>> {
        self.segments.iter().map(Segment::info)
    }

    /// Gauges and counters. Walks the segments, not the objects.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let processing = self.objects.processing_len();
        Stats {
            objects: u64::from(self.objects.len() - processing),
            objects_processing: processing.into(),
            objects_leased: self.objects.counts().leased.into(),
            object_bytes: self.objects.complete_bytes(),
            segments: self.segments.len() as u64,
            nodes: self.nodes.len() as u64,
            capacity_bytes: self.segments.capacity_bytes(),
            used_bytes: self.segments.used_bytes(),
            unfinished_bytes: self.objects.processing_bytes(),
            quarantined_bytes: self.pending_release.bytes(Reason::Writer)
                + self.pending_release.bytes(Reason::Copy),
            held_dead_writer_bytes: self.writers.ordered_bytes(),
            held_unknown_writer_bytes: self.pending_release.unknown_bytes(),
            segments_unreachable: self.segments.unreachable.into(),
            events_dropped_total: self.events.dropped_total(),
            deferred_bytes: self.pending_release.bytes(Reason::Leased),
            free_bytes_largest: self
                .segments
                .iter()
                .map(|each| each.allocator.largest_free())
                .max()
                .unwrap_or(0),
            memory_bytes: self.memory_bytes() as u64,
            ..self.stats
        }
    }

    /// Memory of the master itself, estimated, bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        size_of::<Self>()
            + self.objects.memory_bytes()
            + self.segments.memory_bytes()
            + self.pending_release.memory_bytes()
            + self.writers.memory_bytes()
            + self.tasks.memory_bytes()
            + self.hot.memory_bytes()
            + self.lease_bytes
    }

    pub(crate) fn warm<'a>(&self, keys: impl Iterator<Item = FullKey<'a>>) {
        self.objects.warm(keys);
    }

    fn check_key(&self, key: &[u8]) -> Result<(), ErrorCode> {
        if key.is_empty() || key.len() > self.config.key_bytes_max as usize {
            return Err(ErrorCode::InvalidKey);
        }
        Ok(())
    }

    fn find_generation(&self, key: FullKey<'_>, generation: u64) -> Option<u32> {
        self.objects.find(key).filter(|index| self.objects.entry(*index).generation == generation)
    }

    /// The allocation of an unfinished put, if the request is a repetition of it. A nonce alone can be
    /// guessed, and two processes may draw the same one; the identity of the writer is random, and only the
    /// master and the nodes learn it.
    fn repeated(&self, index: u32, len: u64, request: &PutRequest) -> Option<Allocation> {
        let entry = self.objects.entry(index);
        let same =
            request.nonce != 0 && !entry.is_complete() && entry.checksum == request.nonce && entry.len == len;
        let is_its = || self.writers.put(entry.generation).is_some_and(|put| put.writer == request.writer);
        (same && is_its()).then(|| self.allocation(entry.generation, replicas_of(entry.replicas.as_slice())))
    }

    fn allocation(&self, generation: u64, replicas: Replicas) -> Allocation {
        Allocation { generation, handle: handle_of(self.config.handle_key, generation), replicas }
    }

    /// Whether the request comes from the writer that began this put. A put that is over gives the same error
    /// as a wrong handle.
    pub(crate) fn check_handle(&self, generation: u64, handle: u64) -> Result<(), ErrorCode> {
        let put = self.writers.put(generation).map(|put| put.handle);
        let began = put.unwrap_or_else(|| handle_of(self.config.handle_key, generation)) == handle;
        if began { Ok(()) } else { Err(ErrorCode::PutIsOver) }
    }

    /// Ends the put that has the key, if its writer's time is over, so that a new put can have the key.
    fn displace(&mut self, now: Instant, index: u32) -> Result<(), ErrorCode> {
        if self.objects.is_expired(now, index) {
            self.drop_expired(now, index);
            return Ok(());
        }
        let entry = self.objects.entry(index);
        let since = entry.time;
        let taken = entry.is_complete() || now < since + millis(self.config.put_start_discard_timeout_ms);
        if taken {
            self.stats.puts_exist_total += 1;
            return Err(ErrorCode::ObjectAlreadyExists);
        }
        let until = since + millis(self.config.put_start_release_timeout_ms);
        self.drop_object(index, Some((until, Reason::Writer)));
        self.stats.puts_abandoned_total += 1;
        Ok(())
    }

    /// Removes an object from the table and frees its space, now or later.
    fn drop_object(&mut self, index: u32, hold: Option<(Instant, Reason)>) {
        let removed = self.objects.remove(index);
        let (generation, complete) = (removed.generation, removed.complete);
        match hold {
            Some((until, reason)) => {
                let writer = if complete { 0 } else { self.writers.ended_pending_release(generation) };
                self.pending_release.hold(&mut self.segments, removed, until, reason, writer);
            }
            None => {
                removed.replicas.as_slice().iter().for_each(|placed| {
                    self.segments.free(placed);
                });
                if !complete {
                    self.writers.ended(generation);
                }
            }
        }
    }

    /// A writer reports that it is quiet. Returns whether space was pending release for it.
    fn release_writer(&mut self, tenant: TenantNo, generation: u64) -> bool {
        let writer = self.pending_release.release_writer(&mut self.segments, tenant, generation);
        writer.map(|writer| self.writers.let_go(writer, generation)).is_some()
    }

    /// Whether an object is readable, as far as is known: not if all of its segments are out of reach.
    fn vouches_for(&self, index: u32) -> bool {
        let entry = self.objects.entry(index);
        let reachable =
            |placed: &Placed| self.segments.get(placed.segment).is_some_and(|segment| !segment.unreachable);
        entry.is_complete()
            && (self.segments.unreachable == 0 || entry.replicas.as_slice().iter().any(reachable))
    }

    /// Queues an event.
    fn emit(&mut self, event: impl FnOnce() -> Event) {
        self.events.push(event());
    }

    /// Gives up a node that has been silent for too long.
    fn give_up(&mut self, now: Instant, node: NodeId) {
        let Some(known) = self.nodes.get(node) else { return };
        let (numbers, silent_ms) = (known.segments.clone(), (now - known.seen).as_millis() as u64);
        let first = numbers.first().and_then(|no| self.segments.get(*no));
        let (name, endpoint) =
            first.map(|segment| (segment.name.clone(), segment.endpoint.clone())).unwrap_or_default();
        let segments = numbers.len() as u32;
        let objects_lost = numbers.into_iter().map(|no| self.drop_segment(now, no)).sum();
        self.stats.nodes_expired_total += 1;
        self.emit(|| Event::NodeGivenUp { node, name, endpoint, silent_ms, segments, objects_lost });
    }

    /// Drops an object whose time to live is over. Leases on it stay valid.
    fn drop_expired(&mut self, now: Instant, index: u32) {
        let entry = self.objects.entry(index);
        let hold = entry.is_leased(now).then_some((entry.time, Reason::Leased));
        self.drop_object(index, hold);
        self.report.expired_total += 1;
    }

    fn lease(&self) -> Duration {
        millis(self.config.lease_ttl_ms) + millis(self.config.lease_guard_ms)
    }
}

fn replicas_of(placed: &[Placed]) -> Replicas {
    let mut replicas = Replicas::new();
    for placed in placed {
        // The list has room for all replicas of one object.
        let _ = replicas.push(Replica { segment: placed.segment, addr: placed.addr });
    }
    replicas
}

fn listing(entry: &Entry, now: Instant) -> Listed<'_> {
    Listed {
        key: Key(entry.key.as_slice()),
        len: entry.len,
        replicas: entry.replicas.as_slice().len() as u8,
        complete: entry.is_complete(),
        leased: entry.is_leased(now),
    }
}

const fn millis(ms: u32) -> Duration {
    Duration::from_millis(ms as u64)
}
