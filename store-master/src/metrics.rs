//! The master's metrics: counted by the serving thread, copied on request, rendered on another thread.

mod disks;
mod kv_events;
pub(crate) mod pools;
pub(crate) mod segments;

use std::fmt;
use std::fs;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use store_core::message::{EvictionReport, TaskReport, TaskState};
use store_core::wire::HEADER_BYTES;
use store_core::{ErrorCode, Kind, Master, Stats, Times};

use crate::answering::Refusals;
use crate::connections::Totals;
use crate::ha::{self, HaStats};
use crate::journal::JournalStats;
use crate::kv_events::KvEventsStats;

/// Requests by operation and result. The index of a result is 0 for success, else one more than that of the
/// error in [`ErrorCode::ALL`].
#[derive(Clone, Debug)]
pub(crate) struct RequestCounters {
    by_kind: Vec<[u64; RESULTS]>,
    times: Vec<Times>,
    /// How many requests of each kind pass until the next one is timed.
    untimed: [u8; KINDS],
    unknown_total: u64,
    broken_total: u64,
}

const RESULTS: usize = ErrorCode::ALL.len() + 1;
const KINDS: usize = 256;
/// Of frequent requests, one in this many is timed. It is prime, so that no pattern of requests coincides
/// with it.
const TIMED_EVERY: u8 = 61;

/// A copy of all counters and gauges, taken between two requests.
#[derive(Debug)]
pub(crate) struct Snapshot {
    pub(crate) uptime: Duration,
    pub(crate) epoch: u32,
    /// Of one of several masters.
    pub(crate) ha: Option<HaStats>,
    pub(crate) stats: Stats,
    pub(crate) eviction: EvictionReport,
    pub(crate) requests: RequestCounters,
    pub(crate) segments: Vec<segments::SegmentUse>,
    pub(crate) pools: Vec<pools::PoolUse>,
    pub(crate) tenants: Vec<TenantUse>,
    pub(crate) tasks: TaskReport,
    pub(crate) drains: DrainsLeft,
    pub(crate) connections: u64,
    pub(crate) totals: Totals,
    pub(crate) refusals: Refusals,
    pub(crate) names_held_total: u64,
    pub(crate) names_taken_over_total: u64,
    /// Wall time of the start, seconds since the Unix epoch.
    pub(crate) started_s: f64,
    pub(crate) metadata_bytes_max: u64,
    pub(crate) journal: Option<JournalStats>,
    pub(crate) kv_events: Option<KvEventsStats>,
    /// Answers that wait for the journal.
    pub(crate) answers_held: u64,
}

/// One tenant's gauges and counters.
#[derive(Debug)]
pub(crate) struct TenantUse {
    name: String,
    objects: u64,
    bytes: u64,
    held_bytes: u64,
    guaranteed_bytes: u64,
    quota_bytes: Option<u64>,
    quota_objects: Option<u64>,
    disk_bytes: u64,
    quota_disk_bytes: Option<u64>,
    evictions_total: u64,
    refusals_total: u64,
}

/// Number of objects that the latest rounds of all drains did not move.
#[derive(Debug, Default)]
pub(crate) struct DrainsLeft {
    no_room: u64,
    unfinished: u64,
    bad: u64,
}

impl RequestCounters {
    /// Whether to time the next request of this kind. Reading the clock twice costs a good part of a lookup,
    /// so only one in [`TIMED_EVERY`] of the most frequent requests is timed; all others are.
    pub(crate) fn is_timed(&mut self, kind: u8) -> bool {
        let left = &mut self.untimed[usize::from(kind)];
        if *left > 0 {
            *left -= 1;
            return false;
        }
        if let Some(Kind::Get | Kind::Exists | Kind::PutStart | Kind::PutEnd) = Kind::from_byte(kind) {
            *left = TIMED_EVERY - 1;
        }
        true
    }

    /// Records the time of one request.
    pub(crate) fn time(&mut self, kind: u8, took: Duration) {
        self.times[usize::from(kind)].record_ns(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Counts one request by the status of its answer, and returns the status.
    pub(crate) fn count(&mut self, kind: u8, answer: &[u8]) -> i32 {
        let status = match answer.get(STATUS_AT..STATUS_AT + 4) {
            Some(bytes) => i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            None => 0,
        };
        let result = if status == 0 {
            0
        } else {
            ErrorCode::ALL.iter().position(|code| code.code() == status).map_or(1, |index| index + 1)
        };
        match Kind::from_byte(kind) {
            Some(_) => self.by_kind[usize::from(kind)][result] += 1,
            None => self.unknown_total += 1,
        }
        status
    }

    /// Counts a connection that sent an invalid frame.
    pub(crate) fn count_broken(&mut self) {
        self.broken_total += 1;
    }
}

/// Offset of the status in a frame's header; see `store_core::wire`.
const STATUS_AT: usize = 16;
const _: () = assert!(STATUS_AT + 4 < HEADER_BYTES);

impl Default for RequestCounters {
    fn default() -> Self {
        Self {
            by_kind: vec![[0; RESULTS]; KINDS],
            times: vec![Times::default(); KINDS],
            untimed: [0; KINDS],
            unknown_total: 0,
            broken_total: 0,
        }
    }
}

/// The tenants' part of a snapshot.
pub(crate) fn tenants(master: &Master) -> Vec<TenantUse> {
    let row = |usage: store_core::message::TenantUsage<'_>| TenantUse {
        name: usage.name.to_owned(),
        objects: usage.objects,
        bytes: usage.bytes,
        held_bytes: usage.held_bytes,
        guaranteed_bytes: usage.guaranteed_bytes,
        quota_bytes: usage.quota_bytes,
        quota_objects: usage.quota_objects.map(u64::from),
        disk_bytes: usage.disk_bytes,
        quota_disk_bytes: usage.quota_disk_bytes,
        evictions_total: usage.evictions_total,
        refusals_total: usage.refusals_total,
    };
    master.tenants().map(row).collect()
}

/// The drains' part of a snapshot.
pub(crate) fn drains(master: &Master) -> DrainsLeft {
    let mut left = DrainsLeft::default();
    for info in master.drains() {
        left.no_room += info.left_no_room;
        left.unfinished += info.left_unfinished;
        left.bad += info.left_bad;
    }
    left
}

impl Snapshot {
    /// The text in Prometheus' plain format, which every version of it reads.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub(crate) fn encode_plain(&self) -> Result<String, fmt::Error> {
        Ok(plain(&self.encode()?))
    }

    /// The OpenMetrics text.
    ///
    /// # Errors
    /// Only if the encoder fails, which is not known to happen.
    pub(crate) fn encode(&self) -> Result<String, fmt::Error> {
        let mut registry = Registry::with_prefix("snowskin_master");
        self.register_requests(&mut registry);
        registry.register_collector(Box::new(RequestTimes(self.requests.times.clone())));
        segments::register(&mut registry, &self.segments);
        pools::register(&mut registry, &self.pools);
        self.register_tenants(&mut registry);
        self.register_tasks(&mut registry);
        self.register_eviction(&mut registry);
        self.register_gauges(&mut registry);
        disks::register(&mut registry, &self.stats);
        self.register_counters(&mut registry);
        self.register_held(&mut registry);
        self.register_refusals(&mut registry);
        self.register_journal(&mut registry);
        kv_events::register(&mut registry, self.kv_events.as_ref());
        if let Some(ha) = &self.ha {
            ha::metrics::register(&mut registry, ha, self.answers_held);
        }
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry)?;
        Ok(text)
    }

    fn register_gauges(&self, registry: &mut Registry) {
        let stats = &self.stats;
        let gauges: [(&str, &str, u64); 17] = [
            ("objects", "Readable objects", stats.objects),
            ("objects_processing", "Objects being written", stats.objects_processing),
            ("objects_leased", "Readable objects with a valid lease", stats.objects_leased),
            ("object_bytes", "Bytes of readable objects; each object counts once", stats.object_bytes),
            ("segments", "Segments mounted", stats.segments),
            ("active_nodes", "Nodes alive", stats.nodes),
            ("capacity_bytes", "Bytes of all segments", stats.capacity_bytes),
            (
                "allocated_bytes",
                "Bytes of all segments that are allocated or pending release",
                stats.used_bytes,
            ),
            (
                "quarantined_bytes",
                "Bytes pending release because a writer may still write there",
                stats.quarantined_bytes,
            ),
            ("deferred_bytes", "Bytes pending release because of a reader's lease", stats.deferred_bytes),
            (
                "free_bytes_largest",
                "Largest object that fits without eviction, bytes",
                stats.free_bytes_largest,
            ),
            ("metadata_bytes", "Memory of the metadata, estimated, bytes", stats.memory_bytes),
            (
                "metadata_bytes_max",
                "Limit of the metadata's memory, bytes; further puts are refused",
                self.metadata_bytes_max,
            ),
            (
                "segments_unreachable",
                "Segments that clients could not reach, and whose node has sent no heartbeat since",
                stats.segments_unreachable,
            ),
            ("connections", "RPC connections", self.connections),
            ("resident_bytes", "Resident memory of the process, bytes", resident_bytes()),
            ("epoch", "Epoch of the master: one per life of its process", u64::from(self.epoch)),
        ];
        gauges.into_iter().for_each(|(name, help, value)| gauge(registry, name, help, value));
        let uptime = Gauge::<f64, AtomicU64>::default();
        uptime.set(self.uptime.as_secs_f64());
        registry.register("uptime_seconds", "Time since the start of the process, seconds", uptime);
        let start = Gauge::<f64, AtomicU64>::default();
        start.set(self.started_s);
        registry.register(
            "start_time_seconds",
            "Time of the start, seconds since the Unix epoch; a change means a restart",
            start,
        );
    }

    fn register_counters(&self, registry: &mut Registry) {
        let stats = &self.stats;
        let counters: [(&str, &str, u64); 33] = [
            ("put_starts", "Puts started", stats.put_starts_total),
            ("put_ends", "Puts committed", stats.put_ends_total),
            ("upserts", "Upserts committed; puts as well", stats.upserts_total),
            ("objects_replaced", "Objects that an upsert replaced", stats.objects_replaced_total),
            ("put_revokes", "Puts revoked", stats.put_revokes_total),
            ("puts_partial", "Puts that got fewer replicas than wanted", stats.puts_partial_total),
            ("puts_no_room", "Puts that found no room", stats.puts_no_room_total),
            ("puts_exist", "Puts refused because the key exists", stats.puts_exist_total),
            ("puts_abandoned", "Puts whose writer was given up", stats.puts_abandoned_total),
            (
                "zombies", // alias: the former name, for one release
                "Deprecated: use snowskin_master_puts_abandoned_total",
                stats.puts_abandoned_total,
            ),
            ("gets", "Keys looked up by get", stats.gets_total),
            ("get_hits", "Keys found by get", stats.get_hits_total),
            ("get_bytes", "Bytes of objects found by get", stats.get_bytes_total),
            ("put_bytes", "Bytes of puts committed", stats.put_bytes_total),
            ("exists", "Keys queried by exists", stats.exists_total),
            ("exists_hits", "Keys found by exists", stats.exists_hits_total),
            ("removes", "Objects removed on request", stats.removes_total),
            ("evictions", "Objects evicted", stats.evictions_total),
            ("evicted_bytes", "Bytes of objects evicted", stats.evicted_bytes_total),
            ("evictions_starved", "Evictions that found nothing to evict", stats.evictions_starved_total),
            ("objects_lost", "Objects lost with their last segment", stats.objects_lost_total),
            ("mounts", "Segments mounted", stats.mounts_total),
            ("unmounts", "Segments unmounted", stats.unmounts_total),
            ("nodes_expired", "Nodes given up because they sent no heartbeat", stats.nodes_expired_total),
            ("connections_accepted", "RPC connections accepted", self.totals.accepted),
            (
                "connections_refused",
                "RPC connections refused because all places were in use",
                self.totals.refused,
            ),
            (
                "connections_displaced",
                "RPC connections closed to make room for others",
                self.totals.displaced,
            ),
            (
                "connections_silent",
                "RPC connections closed because they were silent for too long",
                self.totals.silent,
            ),
            (
                "names_taken_over",
                "Mounts that took a name from another endpoint",
                self.names_taken_over_total,
            ),
            (
                "writers_expelled",
                "Writers that were cut off so that their space could be freed",
                stats.expulsions_total,
            ),
            ("leases_returned", "Leases returned before they ended", stats.leases_returned_total),
            (
                "puts_metadata_full",
                "Puts refused because the metadata's memory was at its limit",
                stats.puts_metadata_full_total,
            ),
            ("streams_broken", "RPC streams closed because of malformed frames", self.requests.broken_total),
        ];
        counters.into_iter().for_each(|(name, help, value)| counter(registry, name, help, value));
    }

    /// Bytes that are neither free nor part of an object, by reason.
    fn register_held(&self, registry: &mut Registry) {
        let stats = &self.stats;
        let silent = stats.quarantined_bytes.saturating_sub(stats.held_unknown_writer_bytes);
        let held = Family::<ReasonLabels, Gauge>::default();
        for (reason, value) in [
            ("unfinished", stats.unfinished_bytes),
            ("dead_writer", stats.held_dead_writer_bytes),
            ("unknown_writer", stats.held_unknown_writer_bytes),
            ("silent_writer", silent),
            ("lease", stats.deferred_bytes),
        ] {
            held.get_or_create(&ReasonLabels { reason }).set(signed(value));
        }
        registry.register(
            "held_bytes",
            "Bytes that are neither free nor part of an object, by reason; dead_writer is part of the others",
            held,
        );
    }

    /// Mounts and proofs that were refused.
    fn register_refusals(&self, registry: &mut Registry) {
        let refusals = &self.refusals;
        let mounts = Family::<ReasonLabels, Counter>::default();
        for (reason, value) in [
            ("name_held", self.names_held_total),
            ("incarnation", refusals.incarnations),
            ("proof", refusals.mounts_unproved),
        ] {
            mounts.get_or_create(&ReasonLabels { reason }).inc_by(value);
        }
        registry.register("mounts_refused", "Mounts that were refused, by reason", mounts);
        let proofs = Family::<RoleLabels, Counter>::default();
        for (role, value) in ["tenant", "admin", "cluster"].into_iter().zip(refusals.proofs) {
            proofs.get_or_create(&RoleLabels { role }).inc_by(value);
        }
        registry.register("proofs_failed", "Wrong secrets, by the role that they claimed", proofs);
    }

    /// Of a master with a journal.
    fn register_journal(&self, registry: &mut Registry) {
        let Some(journal) = &self.journal else { return };
        let (writer, snapshots) = (&journal.writer, &journal.snapshots);
        for (name, help, value) in [
            ("journal_lsn", "Number of the last command", journal.lsn),
            ("journal_durable_lsn", "Number of the last command that is on disk", writer.durable),
            ("journal_answers_held", "Answers that wait for the disk", self.answers_held),
            ("journal_snapshot_bytes", "Length of the latest snapshot, bytes", snapshots.bytes),
        ] {
            gauge(registry, name, help, value);
        }
        for (name, help, value) in [
            ("journal_bytes", "Bytes written to the journal, without snapshots", writer.bytes),
            ("journal_records", "Records written, each of which was made durable at once", writer.records),
            ("journal_snapshots", "Snapshots written", snapshots.taken_total),
            ("journal_snapshots_failed", "Snapshots that could not be written", snapshots.failed_total),
        ] {
            counter(registry, name, help, value);
        }
        for (name, help, value) in [
            (
                "journal_snapshot_pause_seconds",
                "How long the master stood still for the latest snapshot",
                snapshots.pause_s,
            ),
            (
                "journal_snapshot_seconds",
                "How long the latest snapshot took until it was on disk",
                snapshots.took_s,
            ),
        ] {
            let gauge = Gauge::<f64, AtomicU64>::default();
            gauge.set(value);
            registry.register(name, help, gauge);
        }
        registry.register_collector(Box::new(SyncTimes(writer.syncs)));
    }

    fn register_requests(&self, registry: &mut Registry) {
        let family = Family::<RequestLabels, Counter>::default();
        for kind in Kind::ALL {
            for (result, &value) in self.requests.by_kind[usize::from(*kind as u8)].iter().enumerate() {
                if value > 0 || result == 0 {
                    let result = result.checked_sub(1).map_or("OK", |index| ErrorCode::ALL[index].name());
                    family.get_or_create(&RequestLabels { op: kind.name(), result }).inc_by(value);
                }
            }
        }
        let unknown = RequestLabels { op: "unknown", result: ErrorCode::NotSupported.name() };
        family.get_or_create(&unknown).inc_by(self.requests.unknown_total);
        registry.register("requests", "RPC requests by operation and result", family);
    }

    /// Tenants by name, at most `tenants_max`. Limits that a tenant does not have are omitted.
    fn register_tenants(&self, registry: &mut Registry) {
        type Value = fn(&TenantUse) -> Option<u64>;
        let gauges: [(&str, &str, Value); 8] = [
            ("tenant_objects", "Objects of a tenant, those being written included", |usage| {
                Some(usage.objects)
            }),
            ("tenant_bytes", "Bytes of a tenant's objects; each replica counts", |usage| Some(usage.bytes)),
            (
                "tenant_held_bytes",
                "Bytes pending release of a tenant's readers and writers; its quota includes them",
                |usage| Some(usage.held_bytes),
            ),
            (
                "tenant_guaranteed_bytes",
                "Bytes of a tenant that puts of other tenants cannot evict",
                |usage| Some(usage.guaranteed_bytes),
            ),
            ("tenant_quota_bytes", "Limit of a tenant's bytes; absent without a limit", |usage| {
                usage.quota_bytes
            }),
            ("tenant_quota_objects", "Limit of a tenant's objects; absent without a limit", |usage| {
                usage.quota_objects
            }),
            ("tenant_disk_bytes", "Bytes of a tenant's objects on disks", |usage| Some(usage.disk_bytes)),
            ("tenant_quota_disk_bytes", "Limit of these; absent without a limit", |usage| {
                usage.quota_disk_bytes
            }),
        ];
        for (name, help, value) in gauges {
            let family = Family::<TenantLabels, Gauge>::default();
            for usage in &self.tenants {
                if let Some(value) = value(usage) {
                    family.get_or_create(&TenantLabels::of(usage)).set(signed(value));
                }
            }
            registry.register(name, help, family);
        }
        let family = Family::<TenantLabels, Counter>::default;
        let (evictions, refusals) = (family(), family());
        for usage in &self.tenants {
            let labels = TenantLabels::of(usage);
            evictions.get_or_create(&labels).inc_by(usage.evictions_total);
            refusals.get_or_create(&labels).inc_by(usage.refusals_total);
        }
        registry.register(
            "tenant_evictions",
            "Objects of a tenant that were evicted, for any tenant",
            evictions,
        );
        registry.register("tenant_refusals", "Puts that a tenant's quota refused", refusals);
    }

    /// Tasks, drains, extra replicas of hot objects, and bad replicas.
    fn register_tasks(&self, registry: &mut Registry) {
        let report = &self.tasks;
        let unfinished = Family::<StateLabels, Gauge>::default();
        for (state, value) in
            [(TaskState::Pending, report.pending), (TaskState::Processing, report.processing)]
        {
            unfinished.get_or_create(&StateLabels { state: state.name() }).set(signed(value));
        }
        registry.register("tasks", "Tasks that wait for their node or are carried out, by state", unfinished);
        let ended = Family::<StateLabels, Counter>::default();
        for (state, value) in [
            (TaskState::Done, report.done_total),
            (TaskState::Failed, report.failed_total),
            (TaskState::Canceled, report.canceled_total),
        ] {
            ended.get_or_create(&StateLabels { state: state.name() }).inc_by(value);
        }
        registry.register("tasks_ended", "Tasks that ended, by state", ended);
        let left = Family::<ReasonLabels, Gauge>::default();
        let drains = &self.drains;
        for (reason, value) in
            [("no_room", drains.no_room), ("unfinished", drains.unfinished), ("bad", drains.bad)]
        {
            left.get_or_create(&ReasonLabels { reason }).set(signed(value));
        }
        registry.register(
            "drain_left_objects",
            "Objects that the latest round of a drain did not move, by reason",
            left,
        );
        for (name, help, value) in [
            ("segments_draining", "Segments that are being drained", report.draining),
            (
                "extra_replicas",
                "Extra replicas of hot objects that still exist, as far as the master knows",
                report.extra_replicas,
            ),
        ] {
            gauge(registry, name, help, value);
        }
        for (name, help, value) in [
            (
                "tasks_created",
                "Tasks created: on request, by drains, or by the master for hot objects",
                report.created_total,
            ),
            ("task_retries", "Failed attempts of tasks that were tried again", report.retried_total),
            ("task_copied_bytes", "Bytes that tasks copied", report.copied_bytes_total),
            (
                "hot_gets",
                "Gets of objects that are read often enough for another replica",
                report.hot_gets_total,
            ),
            (
                "extra_replicas_shed",
                "Extra replicas that were removed because their space was needed",
                report.extras_shed_total,
            ),
            (
                "bad_replica_reports",
                "Reports of readers that a replica has other bytes than were committed",
                report.bad_reports_total,
            ),
            (
                "bad_replicas_dropped",
                "Replicas that were removed because of such reports",
                report.bad_dropped_total,
            ),
        ] {
            counter(registry, name, help, value);
        }
    }

    /// Why objects were kept, and the work to find out.
    fn register_eviction(&self, registry: &mut Registry) {
        let report = &self.eviction;
        let kept = Family::<ReasonLabels, Gauge>::default();
        let reasons = [
            ("leased", report.kept_leased),
            ("soft_pinned", report.kept_soft_pinned),
            ("hard_pinned", report.kept_hard_pinned),
            ("group", report.kept_by_group),
            ("unfinished", report.kept_unfinished),
        ];
        for (reason, value) in reasons {
            kept.get_or_create(&ReasonLabels { reason }).set(signed(value));
        }
        registry.register("eviction_kept_objects", "Objects that cannot be evicted now, by reason", kept);
        gauge(
            registry,
            "eviction_candidates",
            "Objects and groups that eviction can choose from",
            report.candidates,
        );
        let passed = Family::<ReasonLabels, Counter>::default();
        for (reason, value) in
            [("leased", report.kept_leased_total), ("soft_pinned", report.kept_soft_pinned_total)]
        {
            passed.get_or_create(&ReasonLabels { reason }).inc_by(value);
        }
        registry.register(
            "eviction_passed_over",
            "Times that eviction reached an object and kept it",
            passed,
        );
        let causes = Family::<CauseLabels, Counter>::default();
        let for_room = report.evicted_for_room_total;
        for (cause, value) in
            [("watermark", report.evictions_total.saturating_sub(for_room)), ("room", for_room)]
        {
            causes.get_or_create(&CauseLabels { cause }).inc_by(value);
        }
        registry.register("evictions_by_cause", "Objects evicted, by what needed the space", causes);
        let counters = [
            ("eviction_looks", "Candidates that eviction examined", report.looks_total),
            ("soft_pins_decayed", "Soft pins that ran out", report.soft_pins_decayed_total),
            (
                "soft_pins_revived",
                "Soft pins that a read renewed after they had run out",
                report.soft_pins_revived_total,
            ),
            (
                "soft_pinned_evicted",
                "Objects with a soft pin that were evicted",
                report.soft_pinned_evicted_total,
            ),
            ("groups_evicted", "Groups evicted", report.groups_evicted_total),
            ("objects_expired", "Objects whose time to live ended", report.expired_total),
            ("keys_returned", "Keys put again soon after their eviction", report.returned_total),
        ];
        counters.into_iter().for_each(|(name, help, value)| counter(registry, name, help, value));
    }
}

/// Converts OpenMetrics to the plain format (0.0.4), in which a counter's name has its `_total` in the
/// comments, too.
fn plain(open: &str) -> String {
    let mut text = String::with_capacity(open.len());
    let mut help = None;
    for line in open.lines() {
        let comment = line.strip_prefix("# ").map(|comment| comment.splitn(3, ' ').collect::<Vec<_>>());
        match comment.as_deref() {
            Some(["HELP", name, rest]) => help = Some((*name, *rest)),
            Some(["TYPE", name, kind]) => {
                let total = if *kind == "counter" { "_total" } else { "" };
                if let Some((_, help)) = help.take().filter(|(of, _)| of == name) {
                    text.push_str(&format!("# HELP {name}{total} {help}\n"));
                }
                text.push_str(&format!("# TYPE {name}{total} {kind}\n"));
            }
            Some(_) => {}
            None => {
                text.push_str(line);
                text.push('\n');
            }
        }
    }
    text
}

/// Registers a counter; the encoder appends `_total` to its name.
pub(crate) fn counter(registry: &mut Registry, name: &str, help: &str, value: u64) {
    let counter = Counter::<u64>::default();
    counter.inc_by(value);
    registry.register(name, help, counter);
}

pub(crate) fn gauge(registry: &mut Registry, name: &str, help: &str, value: u64) {
    let gauge = Gauge::<i64>::default();
    gauge.set(signed(value));
    registry.register(name, help, gauge);
}

pub(crate) fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    op: &'static str,
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RoleLabels {
    role: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TenantLabels {
    tenant: String,
}

impl TenantLabels {
    fn of(usage: &TenantUse) -> Self {
        Self { tenant: usage.name.clone() }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CauseLabels {
    cause: &'static str,
}

/// One histogram per operation, by the number of its kind.
#[derive(Debug)]
struct RequestTimes(Vec<Times>);

impl Collector for RequestTimes {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Time in the state machine; of the most frequent operations a sample";
        let mut family = encoder.encode_descriptor("request_seconds", help, None, MetricType::Histogram)?;
        for kind in Kind::ALL {
            let times = &self.0[usize::from(*kind as u8)];
            let classes: Vec<(f64, u64)> = times.classes().collect();
            family.encode_family(&[("op", kind.name())])?.encode_histogram::<NoLabelSet>(
                times.sum_s(),
                times.count(),
                &classes,
                None,
            )?;
        }
        Ok(())
    }
}

/// How long records took to become durable.
#[derive(Debug)]
struct SyncTimes(Times);

impl Collector for SyncTimes {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Time until a record was on disk: writing and fdatasync";
        let mut metric =
            encoder.encode_descriptor("journal_sync_seconds", help, None, MetricType::Histogram)?;
        let classes: Vec<(f64, u64)> = self.0.classes().collect();
        metric.encode_histogram::<NoLabelSet>(self.0.sum_s(), self.0.count(), &classes, None)
    }
}

/// Resident memory, or 0 where the system does not report it.
fn resident_bytes() -> u64 {
    let Ok(status) = fs::read_to_string("/proc/self/status") else { return 0 };
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_the_plain_format_every_sample_follows_help_and_type_of_its_own_name() {
        let open = "# HELP m_puts Puts.\n# TYPE m_puts counter\nm_puts_total{a=\"# HELP x\"} 1\n\
                    # HELP m_now How many.\n# TYPE m_now gauge\nm_now 2\n\
                    # HELP m_s Time.\n# TYPE m_s histogram\n# UNIT m_s seconds\nm_s_sum 1.0\nm_s_bucket{le=\"1.0\"} 1\n# EOF\n";
        let expected = "# HELP m_puts_total Puts.\n# TYPE m_puts_total counter\nm_puts_total{a=\"# HELP x\"} 1\n\
                        # HELP m_now How many.\n# TYPE m_now gauge\nm_now 2\n\
                        # HELP m_s Time.\n# TYPE m_s histogram\nm_s_sum 1.0\nm_s_bucket{le=\"1.0\"} 1\n";
        assert_eq!(plain(open), expected);
    }
}
