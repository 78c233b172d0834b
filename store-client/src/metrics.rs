//! The metrics of clients, nodes and their engines, rendered as OpenMetrics text on request.
//!
//! `docs/reference/metrics.md` describes each.

mod disks;

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use store_core::Times;

use crate::client::Counters;
use crate::direct::NotDirect;
use crate::node::{DiskReport, NodeStatusReport};

/// Durations of a client's operations.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OperationTimes {
    pub(crate) get: Times,
    pub(crate) put: Times,
}

/// A client's counters, readable from another thread. Clones refer to the same counters. See
/// [`Client::metrics_handle`](crate::Client::metrics_handle).
#[derive(Clone, Debug, Default)]
pub struct ClientMetrics(Arc<Mutex<Seen>>);

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    counters: Counters,
    times: OperationTimes,
}

impl ClientMetrics {
    /// The counters as of the client's latest operation.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.seen().counters
    }

    pub(crate) fn publish(&self, counters: Counters, times: OperationTimes) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Seen { counters, times };
    }

    fn seen(&self) -> Seen {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The sums of these clients' counters as OpenMetrics text for Prometheus: the families `snowskin_client_*`,
/// without those of their engines, and without the final line, so that other families can follow.
#[must_use]
pub fn metrics_text_of(clients: &[ClientMetrics]) -> String {
    let (mut counters, mut times) = (Counters::default(), Vec::new());
    for seen in clients.iter().map(ClientMetrics::seen) {
        counters += seen.counters;
        times.push(seen.times);
    }
    let mut out = String::new();
    // Writing into a String does not fail.
    let _ = prometheus_client::encoding::text::encode_registry(&mut out, &client_registry(&counters, times));
    out
}

/// The text of one client and its engine.
pub(crate) fn of_client(counters: &Counters, times: &OperationTimes, engine: &te_engine::Stats) -> String {
    text(client_registry(counters, vec![*times]), engine)
}

fn client_registry(counters: &Counters, times: Vec<OperationTimes>) -> Registry {
    let mut registry = Registry::with_prefix("snowskin_client");
    let values = [
        ("hits", "Keys that were read intact", counters.hits),
        ("misses", "Keys that were not read, for any reason that is not an error", counters.misses),
        (
            "checksum_mismatches",
            "Replicas whose bytes were not those that were committed",
            counters.checksum_mismatches,
        ),
        ("lease_misses", "Misses because reading took longer than the lease", counters.lease_misses),
        ("replica_failovers", "Reads that continued with another replica", counters.replica_failovers),
        ("transfer_misses", "Misses because no replica could be read", counters.transfer_misses),
        ("disk_hits", "Keys that were read intact from the disk of a node", counters.disk_hits),
        ("shared_hits", "Keys that were read intact from packs, without their node", counters.shared_hits),
        ("shared_lost", "Objects whose packs were not there any more, or too short", counters.shared_lost),
        (
            "direct_hits",
            "Keys that were read intact from exported disks, past their nodes",
            counters.direct_hits,
        ),
        (
            "disk_misses",
            "Misses because the disk that had the key did not deliver it in time, or failed",
            counters.disk_misses,
        ),
        ("puts", "Keys that were committed", counters.puts),
        ("put_failures", "Keys whose put failed", counters.put_failures),
        ("read_bytes", "Bytes of values read", counters.read_bytes),
        ("written_bytes", "Bytes of values committed; each value counts once", counters.written_bytes),
        (
            "quarantined_pieces",
            "Pieces of memory that were put in quarantine because a fabric might still touch them",
            counters.quarantined_pieces,
        ),
        ("connects", "Connections made to the master", counters.connects),
    ];
    values.into_iter().for_each(|(name, help, value)| counter(&mut registry, name, help, value));
    let fallbacks = Family::<ReasonLabels, Counter>::default();
    for (reason, count) in NotDirect::COUNTED.iter().zip(counters.direct_fallbacks) {
        fallbacks.get_or_create(&ReasonLabels { reason: reason.name() }).inc_by(count);
    }
    let help = "Reads of exported disks that were left to their nodes";
    registry.register("direct_fallbacks", help, fallbacks);
    registry.register_collector(Box::new(AllTimes(times)));
    registry
}

/// The text of a node and its engine.
pub(crate) fn of_node(
    status: &NodeStatusReport,
    capacity_bytes: u64,
    uptime: Duration,
    engine: &te_engine::Stats,
    disks: &[DiskReport],
) -> String {
    let mut registry = Registry::with_prefix("snowskin_node");
    let mounted = status.segment.is_some() && status.heard;
    let help = "1 while the node's memory is part of the store and the master answers";
    gauge(&mut registry, "mounted", help, mounted.into());
    gauge(&mut registry, "capacity_bytes", "Memory that the node lends to the store, bytes", capacity_bytes);
    let seconds = Gauge::<f64, AtomicU64>::default();
    seconds.set(uptime.as_secs_f64());
    registry.register("uptime_seconds", "Time since the start of the process, seconds", seconds);
    counter(&mut registry, "mounts", "Times that the memory was mounted", status.mounts);
    counter(&mut registry, "heartbeats", "Heartbeats that were answered", status.heartbeats);
    counter(&mut registry, "failures", "Heartbeats and mounts that failed", status.failures);
    disks::register(&mut registry, disks);
    text(registry, engine)
}

/// The text of a registry, followed by that of the engine.
fn text(registry: Registry, engine: &te_engine::Stats) -> String {
    let mut out = String::new();
    let mut of_engine = Registry::with_prefix("snowskin_engine");
    register_engine(&mut of_engine, engine);
    // Writing into a String does not fail.
    let _ = prometheus_client::encoding::text::encode_registry(&mut out, &registry);
    let _ = prometheus_client::encoding::text::encode_registry(&mut out, &of_engine);
    let _ = prometheus_client::encoding::text::encode_eof(&mut out);
    out
}

fn register_engine(registry: &mut Registry, stats: &te_engine::Stats) {
    let family = || Family::<RailLabels, Counter>::default();
    let (bytes, slices, errors, pauses, slowdowns) = (family(), family(), family(), family(), family());
    let family = || Family::<RailLabels, Gauge>::default();
    let (inflight, paused, slow) = (family(), family(), family());
    let family = || Family::<RailLabels, Gauge<f64, AtomicU64>>::default();
    let (rate, seconds) = (family(), family());
    for rail in &stats.rails {
        let labels = RailLabels { rail: rail.name, device: rail.device.clone() };
        for (family, value) in [
            (&bytes, rail.bytes),
            (&slices, rail.slices),
            (&errors, rail.errors),
            (&pauses, rail.pauses),
            (&slowdowns, rail.slowdowns),
        ] {
            family.get_or_create(&labels).inc_by(value);
        }
        for (family, value) in
            [(&inflight, rail.inflight_bytes), (&paused, rail.paused.into()), (&slow, rail.slow.into())]
        {
            family.get_or_create(&labels).set(signed(value));
        }
        rate.get_or_create(&labels).set(rail.ewma_gb_s * 1e9);
        seconds.get_or_create(&labels).set(rail.slice_ns as f64 / 1e9);
    }
    registry.register("rail_bytes", "Bytes moved over a rail", bytes);
    registry.register("rail_slices", "Slices that completed successfully", slices);
    registry.register("rail_errors", "Slices that failed", errors);
    registry.register("rail_pauses", "Times that a rail was paused because of errors", pauses);
    registry.register("rail_slowdowns", "Times that a rail became slow", slowdowns);
    registry.register("rail_inflight_bytes", "Bytes under way on a rail", inflight);
    registry.register("rail_paused", "1 while a rail is paused", paused);
    registry.register("rail_slow", "1 while a rail is several times slower than others of its fabric", slow);
    registry.register("rail_bytes_per_second", "Recent throughput of a rail, smoothed", rate);
    registry.register("rail_slice_seconds", "Recent time per slice, smoothed, seconds", seconds);
    for (name, help, value) in [
        ("regions", "Registered regions", stats.regions.into()),
        ("registered_bytes", "Registered bytes", stats.registered_bytes),
        ("segments", "Open segments of peers", stats.segments.into()),
        ("batches", "Batches under way or not yet freed", stats.batches.into()),
        (
            "quarantined_batches",
            "Batches in quarantine: not drained by their deadline, nor since",
            stats.quarantined_batches.into(),
        ),
        ("quarantined_bytes", "Bytes of local memory of batches in quarantine", stats.quarantined_bytes),
        (
            "quarantined_regions",
            "Regions in quarantine, because a peer that does not answer may be in the middle of a copy",
            stats.quarantined_regions.into(),
        ),
        (
            "quarantined_region_bytes",
            "Bytes of regions in quarantine; their pages are returned to the system",
            stats.quarantined_region_bytes,
        ),
        ("leaked_bytes", "Bytes of buffers of dropped transfers that could not be freed", stats.leaked_bytes),
    ] {
        gauge(registry, name, help, value);
    }
    counter(registry, "batches_timed_out", "Batches that exceeded their deadline", stats.batches_timed_out);
    let refused = stats.notifications_refused;
    counter(
        registry,
        "notifications_refused",
        "Notifications refused because too many were waiting",
        refused,
    );
}

fn counter(registry: &mut Registry, name: &str, help: &str, value: u64) {
    let counter = Counter::<u64>::default();
    counter.inc_by(value);
    registry.register(name, help, counter);
}

fn gauge(registry: &mut Registry, name: &str, help: &str, value: u64) {
    let gauge = Gauge::<i64>::default();
    gauge.set(signed(value));
    registry.register(name, help, gauge);
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RailLabels {
    rail: &'static str,
    device: String,
}

/// The operation times of one or several clients.
#[derive(Debug)]
struct AllTimes(Vec<OperationTimes>);

impl Collector for AllTimes {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Time of an operation on all keys of a batch, seconds";
        let mut family = encoder.encode_descriptor("operation_seconds", help, None, MetricType::Histogram)?;
        for op in ["get", "put"] {
            let mut classes: Vec<(f64, u64)> = Times::default().classes().collect();
            let (mut sum_s, mut count) = (0.0, 0);
            for times in &self.0 {
                let times = if op == "get" { &times.get } else { &times.put };
                sum_s += times.sum_s();
                count += times.count();
                for (class, (_, counted)) in classes.iter_mut().zip(times.classes()) {
                    class.1 += counted;
                }
            }
            family
                .encode_family(&[("op", op)])?
                .encode_histogram::<NoLabelSet>(sum_s, count, &classes, None)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counters_of_several_clients_are_summed() {
        let (a, b) = (ClientMetrics::default(), ClientMetrics::default());
        let mut times = OperationTimes::default();
        times.get.record_ns(1_500_000);
        a.publish(Counters { hits: 3, checksum_mismatches: 1, ..Counters::default() }, times);
        times.get.record_ns(500);
        b.publish(Counters { hits: 4, connects: 2, ..Counters::default() }, times);
        let text = metrics_text_of(&[a.clone(), b]);
        for line in [
            "snowskin_client_hits_total 7",
            "snowskin_client_checksum_mismatches_total 1",
            "snowskin_client_connects_total 2",
            "snowskin_client_operation_seconds_count{op=\"get\"} 3",
            "snowskin_client_operation_seconds_count{op=\"put\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("# EOF") && !text.contains("snowskin_engine"), "{text}");
        assert_eq!(a.counters().hits, 3);
    }
}
