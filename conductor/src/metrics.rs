//! The Conductor's metrics: made from the state when they are asked for.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use conductor_core::index;
use conductor_core::knowledge::PublisherId;
use conductor_core::stream::FenceReason;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::io::Report;
use crate::shared::Shared;
use crate::traffic::{OutcomeLabels, ReasonLabels};

/// One publisher.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PublisherLabels {
    tenant: String,
    instance: String,
    dp_rank: u32,
}

/// One instance.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InstanceLabels {
    tenant: String,
    instance: String,
}

/// One index.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ContextLabels {
    tenant: String,
    model: String,
    block_tokens: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabels {
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct QuantileLabels {
    quantile: &'static str,
}

/// The OpenMetrics text.
///
/// # Errors
/// Only if the encoder fails, which is not known to happen.
pub(crate) fn encode(shared: &Shared, reports: &HashMap<PublisherId, Report>) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("snowskin_conductor");
    register_process(shared, &mut registry);
    register_streams(shared, reports, &mut registry);
    register_indexes(shared, &mut registry);
    register_requests(shared, &mut registry);
    register_scheduler(shared, &mut registry);
    register_proxy(shared, &mut registry);
    register_gateway(shared, &mut registry);
    register_discovery(shared, &mut registry);
    register_copies(shared, &mut registry);
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry)?;
    Ok(text)
}

/// The same in Prometheus' plain format, which every version of it reads.
pub(crate) fn plain(open: &str) -> String {
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

fn register_process(shared: &Shared, registry: &mut Registry) {
    let uptime = Gauge::<f64, AtomicU64>::default();
    uptime.set((shared.now() - te_core::Instant::ZERO).as_secs_f64());
    registry.register("uptime_seconds", "Time since the start of the process, seconds", uptime);
    gauge(registry, "resident_bytes", "Resident memory of the process, bytes", resident_bytes());
    let directory = shared.directory();
    let heard = directory.publishers.values().filter(|publisher| publisher.served).count();
    gauge(registry, "instances", "Instances that are registered", directory.instances.len() as u64);
    gauge(registry, "publishers", "Publishers that are registered", directory.publishers.len() as u64);
    gauge(registry, "publishers_served", "Publishers whose blocks are part of answers", heard as u64);
    drop(directory);
    let counts = &shared.counts;
    let counters: [(&str, &str, &AtomicU64); 7] = [
        ("snapshots", "Snapshots that were written to the file", &counts.snapshots),
        ("snapshot_failures", "Snapshots that could not be written", &counts.snapshot_failures),
        ("peer_rounds", "Comparisons with the other Conductor", &counts.peer_rounds),
        ("peer_failures", "Comparisons that failed", &counts.peer_failures),
        (
            "peer_differences",
            "Owners that differed from those of the other Conductor",
            &counts.peer_differences,
        ),
        (
            "peer_adoptions",
            "Times that what the other Conductor knew of a publisher was taken over",
            &counts.peer_adoptions,
        ),
        (
            "peer_refusals",
            "Times that what the other Conductor knew of a publisher was not taken over",
            &counts.peer_refusals,
        ),
    ];
    for (name, help, value) in counters {
        counter(registry, name, help, value.load(Ordering::Relaxed));
    }
}

/// Counters of one stream: name, description, value.
type StreamCounter = (&'static str, &'static str, fn(&Report) -> u64);

const STREAM_COUNTERS: [StreamCounter; 11] = [
    ("stream_messages", "Messages that were applied, by publisher", |it| it.counters.applied),
    ("stream_bytes", "Bytes of messages that were applied, by publisher", |it| it.totals.bytes),
    ("stream_connections", "Connections that were opened, by publisher", |it| it.counters.connections),
    ("stream_gaps", "Times that a message was missing, by publisher", |it| it.counters.gaps),
    ("stream_replays", "Replays that were asked for, by publisher", |it| it.counters.replays),
    ("stream_replays_failed", "Replays that ended early, by publisher", |it| it.counters.replays_failed),
    ("stream_holes", "Replays in which a message was missing, by publisher", |it| it.counters.holes),
    ("stream_duplicates", "Messages that were known already, by publisher", |it| it.counters.duplicates),
    ("stream_fences", "Times that everything was forgotten, by publisher", |it| {
        it.counters.fences.iter().sum()
    }),
    ("stream_malformed", "Messages without number and payload, by publisher", |it| it.totals.malformed),
    ("stream_loads", "Reports of load, by publisher", |it| it.totals.loads),
];

fn register_streams(shared: &Shared, reports: &HashMap<PublisherId, Report>, registry: &mut Registry) {
    let directory = shared.directory();
    let labels: BTreeMap<PublisherId, PublisherLabels> = directory
        .publishers
        .iter()
        .map(|(id, publisher)| {
            let engine = &publisher.engine;
            let (tenant, instance) = (engine.tenant.clone(), engine.instance.clone());
            (*id, PublisherLabels { tenant, instance, dp_rank: publisher.dp_rank })
        })
        .collect();
    let served = Family::<PublisherLabels, Gauge>::default();
    for (id, publisher) in &directory.publishers {
        if let Some(labels) = labels.get(id) {
            served.get_or_create(labels).set(publisher.served.into());
        }
    }
    drop(directory);
    registry.register("stream_served", "Whether a publisher's blocks are part of answers: 1 or 0", served);
    for (name, help, value) in STREAM_COUNTERS {
        let family = Family::<PublisherLabels, Counter>::default();
        for (id, labels) in &labels {
            family.get_or_create(labels).inc_by(reports.get(id).map_or(0, value));
        }
        registry.register(name, help, family);
    }
    let fences = Family::<ReasonLabels, Counter>::default();
    for (at, reason) in FenceReason::ALL.into_iter().enumerate() {
        let sum = reports.values().map(|it| it.counters.fences.get(at).copied().unwrap_or_default()).sum();
        fences.get_or_create(&ReasonLabels { reason: reason.name() }).inc_by(sum);
    }
    registry.register(
        "fences",
        "Times that everything that a publisher said was forgotten, by reason",
        fences,
    );
    let knowledge = shared.knowledge.read();
    let events = Family::<PublisherLabels, Counter>::default();
    let stored = Family::<PublisherLabels, Counter>::default();
    let removed = Family::<PublisherLabels, Counter>::default();
    let unused = Family::<PublisherLabels, Counter>::default();
    let skipped = Family::<ReasonLabels, Counter>::default();
    for (id, labels) in &labels {
        let Some(counters) = knowledge.counters(*id) else { continue };
        events.get_or_create(labels).inc_by(counters.events);
        stored.get_or_create(labels).inc_by(counters.stored);
        removed.get_or_create(labels).inc_by(counters.removed);
        unused.get_or_create(labels).inc_by(counters.orphans + counters.refused);
        for (reason, count) in counters.skipped.by_reason() {
            skipped.get_or_create(&ReasonLabels { reason }).inc_by(count.into());
        }
        for (reason, count) in [
            ("other_block_tokens", counters.other_block_tokens),
            ("foreign", counters.foreign),
            ("unreadable_message", counters.unreadable),
        ] {
            skipped.get_or_create(&ReasonLabels { reason }).inc_by(count);
        }
    }
    registry.register("events", "Events that were read, by publisher", events);
    registry.register("blocks_stored", "Blocks that were stored, by publisher", stored);
    registry.register("blocks_removed", "Blocks that were removed, by publisher", removed);
    let help =
        "Blocks that were announced and cannot be indexed: their parent is unknown, or a limit is reached";
    registry.register("blocks_unused", help, unused);
    registry.register("events_skipped", "Events that were not used, by reason", skipped);
}

fn register_indexes(shared: &Shared, registry: &mut Registry) {
    let knowledge = shared.knowledge.read();
    let sizes: [Family<ContextLabels, Gauge>; 3] = Default::default();
    let counters: [Family<ContextLabels, Counter>; 3] = Default::default();
    for (id, context) in knowledge.contexts() {
        let labels = ContextLabels {
            tenant: context.tenant.clone(),
            model: context.model.clone(),
            block_tokens: context.block_tokens,
        };
        let (blocks, hashes, bytes) = knowledge.size(id).unwrap_or_default();
        for (family, value) in sizes.iter().zip([blocks, bytes, hashes]) {
            family.get_or_create(&labels).set(signed(value as u64));
        }
        let empty = index::Counters::default();
        let of = knowledge.index_counters(id).unwrap_or(&empty);
        let refused =
            of.refused_full + of.refused_owners + of.refused_holders + of.too_deep + of.assumed_refused;
        for (family, value) in counters.iter().zip([of.dropped, refused, of.assumed_expired]) {
            family.get_or_create(&labels).inc_by(value);
        }
    }
    let waiting = knowledge.waiting() as u64;
    drop(knowledge);
    let [blocks, bytes, hashes] = sizes;
    registry.register("blocks", "Unique blocks in the index, by model", blocks);
    registry.register("index_bytes", "Memory of the index, bytes, by model", bytes);
    registry.register("learnt_hashes", "Hashes of engines whose block is known, by model", hashes);
    let [dropped, refused, expired] = counters;
    registry.register("blocks_dropped", "Blocks that were dropped because the index was full", dropped);
    registry.register("blocks_refused", "Blocks that were refused because of a limit of the index", refused);
    let help = "Blocks that were assumed after a decision and that no event confirmed in time";
    registry.register("assumed_expired", help, expired);
    gauge(registry, "store_blocks_waiting", "Blocks of stores that no engine has announced yet", waiting);
}

fn register_requests(shared: &Shared, registry: &mut Registry) {
    let counts = &shared.counts;
    let counters: [(&str, &str, &AtomicU64); 6] = [
        ("unknown_prompts", "Prompts that were placed without their length", &counts.unknown_prompts),
        ("queries", "Queries that were answered", &counts.queries),
        ("query_tokens", "Tokens of the full blocks that queries were about", &counts.tokens),
        ("query_hit_tokens", "Of them, tokens that the best instance or a store has", &counts.hit_tokens),
        ("bad_requests", "Requests whose body was refused", &counts.bad_requests),
        ("forbidden", "Requests without the right to change something", &counts.forbidden),
    ];
    for (name, help, value) in counters {
        counter(registry, name, help, value.load(Ordering::Relaxed));
    }
}

fn register_scheduler(shared: &Shared, registry: &mut Registry) {
    let now = shared.now();
    let directory = shared.directory();
    let schedule = shared.schedule();
    let of = schedule.scheduler.counters();
    let counters: [(&str, &str, u64); 10] = [
        ("decisions", "Requests that were placed", of.decided),
        ("decided_tokens", "Tokens of the prompts that were placed", of.tokens),
        ("reused_tokens", "Of them, tokens that are reused", of.reused_tokens),
        (
            "fetched_tokens",
            "Of them, tokens that are fetched from another instance or a store",
            of.fetched_tokens,
        ),
        ("rescheduled", "Requests that were placed anew because an instance was lost", of.rescheduled),
        ("reservations_done", "Reservations that ended as reported", of.done),
        ("reservations_released", "Reservations that ended without an output", of.released),
        ("reservations_expired", "Reservations that ended because nothing was reported", of.expired),
        ("reports_stale", "Reports about reservations that do not exist any more", of.stale),
        ("replications", "Copies of hot prefixes that were asked for", of.replicated),
    ];
    for (name, help, value) in counters {
        counter(registry, name, help, value);
    }
    let refusals = Family::<ReasonLabels, Counter>::default();
    for (reason, value) in [("ttft", of.refused_ttft), ("tbt", of.refused_tbt), ("other", of.refused_other)] {
        refusals.get_or_create(&ReasonLabels { reason }).inc_by(value);
    }
    registry.register(
        "refusals",
        "Requests that were refused, by the objective that would be missed",
        refusals,
    );
    let reservations = schedule.scheduler.reservations();
    gauge(registry, "reservations", "Requests in progress", reservations.into());
    let errors = Family::<QuantileLabels, Gauge<f64, AtomicU64>>::default();
    for (quantile, q) in [("0.5", 0.5), ("0.9", 0.9), ("0.99", 0.99)] {
        if let Some(error) = schedule.scheduler.ttft_errors().quantile(q) {
            errors.get_or_create(&QuantileLabels { quantile }).set(error);
        }
    }
    let help = "Error of the predicted time to the first token, as a part of the actual time";
    registry.register("ttft_error_ratio", help, errors);
    let queues = Family::<InstanceLabels, Gauge<f64, AtomicU64>>::default();
    let sizes: [Family<InstanceLabels, Gauge>; 3] = Default::default();
    for (id, it) in directory.instances.iter().filter(|(_, it)| !it.is_store) {
        let labels = InstanceLabels { tenant: it.tenant.clone(), instance: it.name.clone() };
        let (queued, wait_ns) = schedule.scheduler.queue(*id, now).unwrap_or_default();
        let (decoding, tokens) = schedule.scheduler.decoding(*id, now).unwrap_or_default();
        queues.get_or_create(&labels).set(Duration::from_nanos(wait_ns).as_secs_f64());
        for (family, value) in sizes.iter().zip([u64::from(queued), decoding, tokens]) {
            family.get_or_create(&labels).set(signed(value));
        }
    }
    registry.register(
        "queue_seconds",
        "Time until an instance's queue of prefills has drained, seconds",
        queues,
    );
    let [queued, decoding, tokens] = sizes;
    registry.register("queued_requests", "Requests in an instance's queue of prefills", queued);
    registry.register("decoding_requests", "Requests that an instance decodes or will", decoding);
    registry.register("decoding_tokens", "Tokens of KV of these requests", tokens);
}

/// What the proxy does; zeros without one.
fn register_proxy(shared: &Shared, registry: &mut Registry) {
    let of = shared.proxy.figures();
    let outcomes = Family::<OutcomeLabels, Counter>::default();
    for (outcome, value) in [
        ("done", of.done),
        ("left", of.left),
        ("broken", of.broken),
        ("overloaded", of.overloaded),
        ("unavailable", of.unavailable),
        ("wrong", of.wrong),
    ] {
        outcomes.get_or_create(&OutcomeLabels { outcome }).inc_by(value);
    }
    registry.register("proxy_requests", "Requests of the proxy that are over, by outcome", outcomes);
    gauge(registry, "proxy_in_flight", "Requests that the proxy is answering", of.in_flight);
    let help = "Times that an engine failed a request of the proxy, which went elsewhere";
    counter(registry, "proxy_retries", help, of.retries);
    let help = "Outputs of the proxy that another engine continued after their first token";
    counter(registry, "proxy_continued", help, of.continued);
    let tokens = Family::<KindLabels, Counter>::default();
    for (kind, value) in [("prompt", of.prompt_tokens), ("output", of.output_tokens)] {
        tokens.get_or_create(&KindLabels { kind }).inc_by(value);
    }
    registry.register("proxy_tokens", "Tokens of the proxy's requests, as far as they are known", tokens);
    let help = "Time from a request of the proxy to the first token of its stream, seconds";
    registry.register("proxy_ttft_seconds", help, shared.proxy.ttft.clone());
    let added = Counter::<f64, AtomicU64>::default();
    added.inc_by(Duration::from_micros(of.added_us).as_secs_f64());
    let help = "Time that the proxy itself took before engines were asked to generate, seconds";
    registry.register("proxy_added_seconds", help, added);
}

/// What gateways ask; zeros without one.
fn register_gateway(shared: &Shared, registry: &mut Registry) {
    let of = &shared.traffic.gateway;
    let help = "Requests of gateways (streams of ext_proc) that are over, by outcome";
    registry.register("gateway_requests", help, of.requests.clone());
    registry.register("gateway_in_flight", "Requests of gateways in progress", of.in_flight.clone());
    registry.register("gateway_decisions", "Requests of gateways that were placed", of.placed.clone());
    let help = "Requests of gateways that an engine had failed before, which was avoided";
    registry.register("gateway_retried", help, of.retried.clone());
}

/// Where engines come from, and in what state they are.
fn register_discovery(shared: &Shared, registry: &mut Registry) {
    let suspects = shared.suspects();
    let directory = shared.directory();
    let mut counts = [("heard", 0), ("unheard", 0), ("suspect", 0), ("silent", 0)];
    for id in directory.instances.iter().filter(|(_, it)| !it.is_store).map(|(id, _)| *id) {
        let at = match (suspects.contains(&id), directory.is_heard(id)) {
            (true, _) => 2,
            (_, heard) => usize::from(!heard),
        };
        counts[at].1 += 1;
    }
    // Engines of the settings that have not said yet what was left to them.
    let left = shared.config.engines.iter().filter(|it| it.block_tokens == 0 || it.dp_ranks == 0);
    let silent = left.filter(|it| directory.find(&it.tenant, &it.instance).is_none()).count() as i64;
    drop(directory);
    let of = &shared.traffic.kubernetes;
    counts[3].1 = silent.saturating_add(of.waiting.get());
    let endpoints = Family::<StateLabels, Gauge>::default();
    for (state, count) in counts {
        endpoints.get_or_create(&StateLabels { state }).set(count);
    }
    registry.register("endpoints", "Engines that are registered or expected, by state", endpoints);
    let help = "Engines that are ready in Kubernetes and registered";
    registry.register("kubernetes_endpoints", help, of.registered.clone());
    registry.register("kubernetes_lists", "Lists of EndpointSlices that were read", of.lists.clone());
    registry.register("kubernetes_events", "Changes of EndpointSlices that were read", of.events.clone());
    let help = "Times that EndpointSlices could not be followed";
    registry.register("kubernetes_failures", help, of.failures.clone());
}

/// Copies of hot prefixes in the store; zeros without one.
fn register_copies(shared: &Shared, registry: &mut Registry) {
    let of = &shared.replicas.traffic;
    let help = "Copies of objects that the store's master was asked for";
    registry.register("store_copies_asked", help, of.asked.clone());
    registry.register("store_copies_done", "Of them, copies that are readable", of.done.clone());
    registry.register("store_copies_failed", "Of them, copies that were given up", of.failed.clone());
    let help = "Copies of objects in the store in progress";
    registry.register("store_copies_in_flight", help, of.in_flight.clone());
    let help = "Objects of hot prefixes that were not copied, by reason; blocks where objects are not known";
    registry.register("store_copies_refused", help, of.refused.clone());
    let (objects, bytes, dropped) = shared.replicas.size();
    gauge(registry, "store_names", "Objects of the store whose names are known", objects);
    gauge(registry, "store_names_bytes", "Memory of these names, bytes", bytes);
    let help = "Objects whose names were dropped because their memory is full";
    counter(registry, "store_names_dropped", help, dropped);
}

/// Registers a counter; the encoder appends `_total` to its name.
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

/// Resident memory of this process; 0 where the system does not say.
fn resident_bytes() -> u64 {
    let Ok(status) = std::fs::read_to_string("/proc/self/status") else { return 0 };
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1_024
}
