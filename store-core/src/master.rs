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
mod changed;
mod disks;
mod drain;
mod evict;
mod expel;
mod hot;
mod mounts;
mod pools;
mod promote;
mod puts;
mod queries;
mod repeat;
mod reports;
mod room;
mod shelf;
mod state;
mod tasks;
mod tenants;

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::time::Duration;

use te_core::Instant;

use crate::allocator::Allocator;
use crate::config::Overrides;
use crate::disks::Disks;
use crate::event::{Event, Events};
use crate::eviction::BatchOrder;
use crate::message::{
    EvictionReport, Listed, Object, RemoveMode, Replica, Replicas, SegmentInfo, TaskReport,
};
use crate::nodes::Nodes;
use crate::objects::{Entry, Objects};
use crate::pattern::Pattern;
use crate::pending_release::{PendingRelease, Reason};
use crate::pools::Pools;
use crate::segments::{Placed, Segment, Segments};
use crate::session::{Granted, Leases};
use crate::shelf::Shelf;
use crate::tasks::Tasks;
use crate::writers::Writers;
use crate::{ConfigError, ErrorCode, FullKey, Key, MasterConfig, NodeId, SegmentNo, Stats, TaskId, TenantNo};
pub(crate) use queries::PAGE_ITEMS_MAX;
pub(crate) use tenants::Rights;
use tenants::Tenants;

use drain::Drain;
use hot::Hot;
use promote::Promotions;
use puts::Ended;
pub(crate) use reports::REPORTERS_MAX;
use reports::Suspects;

/// In a lease, in place of the index of an object that is on a disk alone.
const NOT_IN_MEMORY: u32 = u32::MAX;
/// In what the command log names: the rest of the number is the index of a record of the shelf. Objects in
/// memory have lower indices, see [`MasterConfig::objects_max`].
const ON_DISK: u32 = 1 << 30;
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
    overrides: Overrides,
    tenants: Tenants,
    pub(crate) segments: Segments,
    objects: Objects,
    shelf: Shelf,
    disks: Disks,
    promotions: Promotions,
    pending_release: PendingRelease,
    writers: Writers,
    events: Events,
    nodes: Nodes,
    pools: Pools,
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
    ended_upserts: Ended,
    /// Counters of tasks; gauges are computed by [`Self::task_report`].
    task_report: TaskReport,
    /// The objects that the running request has leased, and whether each follows another one, if they are
    /// noted.
    touches: Option<Vec<(u32, bool)>>,
    /// Every object may be leased until then.
    lease_floor: Instant,
    /// Which leader of its state this master is.
    term: u64,
}

impl Master {
    /// An empty store.
    ///
    /// # Errors
    /// A setting is not within its limits.
    pub fn new(config: MasterConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let mut this = Self {
            overrides: Overrides::default(),
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
            shelf: Shelf::new(config.hash_seed),
            disks: Disks::default(),
            promotions: Promotions::default(),
            pending_release: PendingRelease::new(),
            writers: Writers::new(),
            events: Events::default(),
            nodes: Nodes::new(millis(config.node_ttl_ms), 2 * config.segments_max as usize),
            pools: Pools::default(),
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
            ended_upserts: Ended::new(),
            task_report: TaskReport::default(),
            touches: None,
            lease_floor: Instant::ZERO,
            term: 1,
            config,
        };
        this.add_tenants();
        Ok(this)
    }

    /// Which leader of its state this master is, as [`Welcome::term`](crate::message::Welcome::term) says it.
    /// It is 1 until it is [set](Self::set_term).
    #[must_use]
    pub const fn term(&self) -> u64 {
        self.term
    }

    /// Sets the term under which this master leads. It is not part of its state: no snapshot and no digest
    /// has it. Close all connections first: those that exist were welcomed with the former term.
    pub const fn set_term(&mut self, term: u64) {
        self.term = term;
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
        let key = key.into();
        match self.get_leased(now, key, order) {
            Err(error @ ErrorCode::ObjectNotFound) => {
                self.get_from_disk(key, order).map(|(object, _)| object).ok_or(error)
            }
            result => result.map(|(object, _)| object),
        }
    }

    /// As [`Self::get_in`], for a connection that can return the lease.
    pub(crate) fn get_for(
        &mut self,
        now: Instant,
        key: FullKey<'_>,
        order: BatchOrder,
        leases: &mut Leases,
    ) -> Result<Object, ErrorCode> {
        let (object, leased, touched) = match self.get_leased(now, key, order) {
            Err(error @ ErrorCode::ObjectNotFound) => {
                let (object, record) = self.get_from_disk(key, order).ok_or(error)?;
                // A disk needs no lease: what it gave up is not found there.
                (object, NOT_IN_MEMORY, record | ON_DISK)
            }
            result => result.map(|(object, index)| (object, index, index))?,
        };
        leases.note(now, leased, object.generation, now + self.lease());
        if let Some(touches) = &mut self.touches {
            touches.push((touched, order == BatchOrder::Follows));
        }
        Ok(object)
    }

    /// A reader has returned a lease.
    pub(crate) fn lease_returned(&mut self, now: Instant, granted: &Granted) {
        self.stats.leases_returned_total += 1;
        if granted.index == NOT_IN_MEMORY {
            return;
        }
        self.return_lease(now, granted.index, granted.generation);
    }

    /// A lease is over before its time. That of an object that is gone may have held its space.
    fn return_lease(&mut self, now: Instant, index: u32, generation: u64) {
        if !self.objects.return_lease(now, index, generation)
            && self.pending_release.return_lease(&mut self.segments, generation)
        {
            self.drains_look_again(now);
        }
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
        self.read_at(now, index, order);
        Ok((object, index))
    }

    /// A get has found an object: it is leased, and used.
    fn read_at(&mut self, now: Instant, index: u32, order: BatchOrder) {
        self.objects.lease(now, index, now + self.lease(), order == BatchOrder::Follows);
        self.stats.get_hits_total += 1;
        self.stats.get_bytes_total += self.objects.entry(index).len;
        if self.hot.is_on() {
            self.count_read(now, index);
        }
    }

    /// Whether a get would find the object. Neither leases it nor counts as a use. An object whose time to
    /// live is over may still be reported until [`Self::handle_timeout`] has run.
    pub fn exists<'k>(&mut self, key: impl Into<FullKey<'k>>) -> bool {
        let key = key.into();
        let found = match self.objects.find(key) {
            Some(index) => self.vouches_for(index),
            None => self.readable_record(key).is_some(),
        };
        self.stats.exists_total += 1;
        self.stats.exists_hits_total += u64::from(found);
        found
    }

    /// As [`Self::exists`], and leases the object for reading if it is there: it stays in place as it
    /// would for a get, which finds it if it comes in time. Does not count as a use.
    pub fn exists_leased<'k>(&mut self, now: Instant, key: impl Into<FullKey<'k>>) -> bool {
        let key = key.into();
        self.lease_if_there(now, key).is_some() || self.is_on_disk(key)
    }

    /// As [`Self::exists_leased`], for a connection that can return the lease.
    pub(crate) fn exists_for(&mut self, now: Instant, key: FullKey<'_>, leases: &mut Leases) -> bool {
        let mut found = self.lease_if_there(now, key);
        if found.is_none() && self.is_on_disk(key) {
            found = Some(NOT_IN_MEMORY);
        }
        if let Some(index) = found {
            leases.note(now, index, self.objects.entry(index).generation, now + self.lease());
            if let Some(touches) = &mut self.touches {
                touches.push((if index == NOT_IN_MEMORY { ON_DISK } else { index }, false));
            }
        }
        found.is_some()
    }

    fn lease_if_there(&mut self, now: Instant, key: FullKey<'_>) -> Option<u32> {
        let found = self.objects.find(key);
        let found = found.filter(|index| self.vouches_for(*index) && !self.objects.is_expired(now, *index));
        self.stats.exists_total += 1;
        if let Some(index) = found {
            self.stats.exists_hits_total += 1;
            self.objects.hold(now, index, now + self.lease(), false);
        }
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
        let key = key.into();
        match self.objects.find(key) {
            Some(index) => self.remove_at(now, index, mode),
            None if self.unshelve(key, |_| true) => {
                self.stats.removes_total += 1;
                Ok(())
            }
            None => Err(ErrorCode::KeyNotFound),
        }
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
        self.disks_timeout(now);
        self.promote(now);
        self.evict_to_watermark(now, self.config.evictions_per_call_max);
        self.objects.tidy();
        self.shelf.tidy();
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
        let shrinks = self.objects.is_shrinking() || self.shelf.is_shrinking();
        let tidying = shrinks.then_some(Instant::ZERO);
        let more = [self.tasks.due(), self.drains_due(), self.disks_due_at(), self.promotions_due(), tidying];
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

    /// What a segment, or a disk, is and where.
    #[must_use]
    pub fn segment(&self, segment: SegmentNo) -> Option<SegmentInfo<'_>> {
        self.segments.get(segment).map(Segment::info).or_else(|| self.disk_info(segment))
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
            upserts_unfinished: self.objects.upserts_len() as u64,
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
            leaving_bytes: self.objects.leaving_bytes(),
            disk_backlog_bytes: self.disk_backlog_bytes(),
            disk_objects: self.shelf.len().into(),
            disk_object_bytes: self.shelf.bytes(),
            ..self.with_disks()
        }
    }

    /// Memory of the master itself, estimated, bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        size_of::<Self>()
            + self.objects.memory_bytes()
            + self.shelf.memory_bytes()
            + self.disks.memory_bytes()
            + self.segments.memory_bytes()
            + self.pending_release.memory_bytes()
            + self.writers.memory_bytes()
            + self.pools.memory_bytes()
            + self.tasks.memory_bytes()
            + self.hot.memory_bytes()
            + self.ended_upserts.memory_bytes()
            + self.lease_bytes
    }

    pub(crate) fn warm<'a>(&self, keys: impl Iterator<Item = FullKey<'a>>) {
        self.objects.warm(keys);
    }

    /// Until when, and why, the space of an object is held that is dropped now, whatever uses it.
    fn holds(&self, now: Instant, index: u32) -> Option<(Instant, Reason)> {
        let entry = self.objects.entry(index);
        if !entry.is_complete() {
            return Some((now + millis(self.config.put_start_release_timeout_ms), Reason::Writer));
        }
        self.leased_until(now, index).map(|until| (until, Reason::Leased))
    }

    /// Whether any object may be leased without this leader knowing, because the former one had granted the
    /// lease: nothing is freed at once then.
    fn has_unknown_leases(&self, now: Instant) -> bool {
        now < self.lease_floor
    }

    /// The end of the leases that the object may have, if they have not ended.
    fn leased_until(&self, now: Instant, index: u32) -> Option<Instant> {
        Some(self.objects.entry(index).leased_until().max(self.lease_floor)).filter(|until| *until > now)
    }

    /// Removes an object, with its copy on a disk, and frees its space, now or later.
    fn drop_object(&mut self, index: u32, hold: Option<(Instant, Reason)>) {
        self.unshelve_at(index);
        self.drop_from_memory(index, hold);
    }

    /// Removes an object from the table and frees its space, now or later. A copy on a disk stays.
    fn drop_from_memory(&mut self, index: u32, hold: Option<(Instant, Reason)>) {
        let mut removed = self.objects.remove(index);
        let (generation, complete) = (removed.generation, removed.complete);
        match hold {
            Some((until, reason)) => {
                if until == self.lease_floor {
                    // There may be leases that are not counted.
                    removed.leases = 0;
                }
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
        let reachable = |placed: &Placed| match self.segments.get(placed.segment) {
            Some(segment) => !segment.unreachable,
            None => self.disks.get(placed.segment).is_some_and(crate::disks::Disk::is_here),
        };
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
        self.drop_object(index, self.holds(now, index));
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
