//! The state, for people, monitoring, and another Conductor.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use conductor_core::knowledge::PublisherId;
use serde::Serialize;
use tokio::sync::oneshot;

use super::schedule::{Load, all_loads, ms};
use super::{App, Refused, json, value};
use crate::io::{Command, Report};
use crate::metrics;

/// Longest wait for an answer of the event thread.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(2);

/// Prefixes on the status page.
const HOT_SHOWN: usize = 24;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN_METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The status page: one file without a build step that loads nothing from other hosts.
const PAGE: &str = include_str!("../page.html");
/// Describes every route.
const OPENAPI: &str = include_str!("../openapi.json");

pub(super) async fn page() -> Response {
    // Only this file's own script runs, and it connects to this Conductor alone.
    let policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; \
                  frame-ancestors 'none'";
    ([(header::CONTENT_SECURITY_POLICY, policy)], Html(PAGE)).into_response()
}

pub(super) async fn openapi() -> Response {
    json(OPENAPI.to_owned())
}

/// Whether the event thread is alive. If not, restart the process.
pub(super) async fn health(State(app): State<App>) -> Response {
    match app.reports().await {
        Ok(reports) => json(format!("{{\"status\":\"ok\",\"publishers\":{}}}\n", reports.len())),
        Err(_) => (
            StatusCode::SERVICE_UNAVAILABLE,
            [(header::CONTENT_TYPE, "application/json")],
            "{\"status\":\"stuck\"}\n",
        )
            .into_response(),
    }
}

/// Whether every publisher is heard, so that answers are complete. A Conductor without publishers is not
/// ready.
pub(super) async fn ready(State(app): State<App>) -> Response {
    let directory = app.shared.directory();
    let all = directory.publishers.len();
    let heard = directory.publishers.values().filter(|publisher| publisher.served).count();
    drop(directory);
    let why = match (all, heard) {
        (0, _) => "no engine is registered: POST /register, or conductor.engines".to_owned(),
        // One that is down for good must not take the Conductor out of service for the others.
        (all, 0) => format!("none of {all} publishers is heard"),
        (all, heard) => return json(format!("{{\"ready\":true,\"publishers\":{all},\"heard\":{heard}}}\n")),
    };
    let text = format!("{{\"ready\":false,\"why\":\"{why}\"}}\n");
    (StatusCode::SERVICE_UNAVAILABLE, [(header::CONTENT_TYPE, "application/json")], text).into_response()
}

/// In the requested format: OpenMetrics if `Accept` lists it, as Prometheus does, otherwise plain text.
pub(super) async fn metrics(State(app): State<App>, headers: HeaderMap) -> Result<Response, Refused> {
    let mut accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let open = accepted.any(|value| value.contains("application/openmetrics-text"));
    let text = metrics::encode(&app.shared, &app.reports().await?)
        .map_err(|_| Refused::Busy("the metrics cannot be written"))?;
    let (kind, text) = if open { (OPEN_METRICS, text) } else { (PLAIN_METRICS, metrics::plain(&text)) };
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}

impl App {
    /// The state of all publishers, from the event thread.
    ///
    /// # Errors
    /// It does not answer in time.
    pub(crate) async fn reports(&self) -> Result<HashMap<PublisherId, Report>, Refused> {
        let (send, receive) = oneshot::channel();
        let sent = self.commander.send(Command::Report(send));
        let stuck =
            Refused::Busy("the event thread does not respond: check the log, or restart the Conductor");
        match tokio::time::timeout(ANSWER_TIME_MAX, receive).await {
            Ok(Ok(reports)) if sent => Ok(reports.into_iter().map(|report| (report.id, report)).collect()),
            _ => Err(stuck),
        }
    }
}

/// A publisher as `/services` and `/workers` list it.
#[derive(Debug, Serialize)]
struct Service {
    instance_id: String,
    tenant_id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    modelname: String,
    lora_name: String,
    block_size: u32,
    dp_rank: u32,
    endpoint: String,
    replay_endpoint: String,
    role: &'static str,
    http: String,
    /// Whether its blocks are part of answers.
    served: bool,
    state: &'static str,
    /// Whether everything that it ever said is known.
    whole: bool,
    applied: u64,
    /// The number of the next message; null when nothing was applied.
    next_seq: Option<u64>,
    gaps: u64,
    replays: u64,
    fences: u64,
    skipped_events: u64,
}

async fn all_services(app: &App) -> Result<Vec<Service>, Refused> {
    let reports = app.reports().await?;
    let directory = app.shared.directory();
    let knowledge = app.shared.knowledge.read();
    let service = |(id, publisher): (&PublisherId, &crate::directory::Publisher)| {
        let report = reports.get(id);
        let engine = &publisher.engine;
        let counters = report.map(|report| report.counters).unwrap_or_default();
        let skipped = knowledge.counters(*id).map_or(0, |counters| counters.skipped.total().into());
        Service {
            instance_id: engine.instance.clone(),
            tenant_id: engine.tenant.clone(),
            kind: engine.kind.name(),
            modelname: engine.model.clone(),
            lora_name: engine.lora.clone(),
            block_size: engine.block_tokens,
            dp_rank: publisher.dp_rank,
            endpoint: engine.endpoint.clone(),
            replay_endpoint: engine.replay_endpoint.clone(),
            role: engine.role.name(),
            http: engine.http_address().to_owned(),
            served: publisher.served,
            state: report.map_or("unsubscribed", |report| report.state.name()),
            whole: report.is_some_and(|report| report.is_whole),
            applied: counters.applied,
            next_seq: report.and_then(|report| report.position).map(|position| position.next),
            gaps: counters.gaps,
            replays: counters.replays,
            fences: counters.fences.iter().sum(),
            skipped_events: skipped,
        }
    };
    Ok(directory.publishers.iter().map(service).collect())
}

#[derive(Serialize)]
struct Services {
    services: Vec<Service>,
}

/// Mooncake's list of publishers.
pub(super) async fn services(State(app): State<App>) -> Result<Response, Refused> {
    Ok(value(&Services { services: all_services(&app).await? }))
}

/// Dynamo's list of publishers.
pub(super) async fn workers(State(app): State<App>) -> Result<Response, Refused> {
    Ok(value(&all_services(&app).await?))
}

/// Dynamo's list of other indexers.
pub(super) async fn peers(State(app): State<App>) -> Response {
    let peer = &app.shared.config.peer;
    let peers: Vec<String> =
        Some(peer).filter(|peer| !peer.is_empty()).map(|peer| format!("http://{peer}")).into_iter().collect();
    value(&peers)
}

/// What a rank has on a tier. 64-bit sums are texts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
pub(crate) struct OwnerRow {
    pub(crate) tenant_id: String,
    pub(crate) model_name: String,
    pub(crate) block_size: u32,
    pub(crate) instance_id: String,
    pub(crate) dp_rank: u32,
    pub(crate) medium: String,
    pub(crate) group: u32,
    pub(crate) blocks: u64,
    /// The wrapping sum of a mix of the blocks' keys: equal sums mean equal blocks.
    pub(crate) sum: String,
}

/// What every owner has.
pub(crate) fn owner_rows(app: &App) -> Vec<OwnerRow> {
    let knowledge = app.shared.knowledge.read();
    let contexts: HashMap<_, _> = knowledge.contexts().collect();
    let row = |digest: conductor_core::knowledge::OwnerDigest| {
        let context = contexts.get(&digest.context)?;
        Some(OwnerRow {
            tenant_id: context.tenant.clone(),
            model_name: context.model.clone(),
            block_size: context.block_tokens,
            instance_id: knowledge.instance_name(digest.instance)?.1.to_owned(),
            dp_rank: digest.dp_rank,
            medium: digest.tier.name().to_owned(),
            group: digest.group,
            blocks: digest.blocks,
            sum: digest.sum.to_string(),
        })
    };
    knowledge.digests().into_iter().filter_map(row).collect()
}

/// Where the stream of a publisher is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
pub(crate) struct StreamRow {
    /// Its number in this Conductor.
    pub(crate) publisher: u32,
    pub(crate) tenant_id: String,
    pub(crate) model_name: String,
    pub(crate) lora_name: String,
    pub(crate) block_size: u32,
    pub(crate) instance_id: String,
    pub(crate) dp_rank: u32,
    pub(crate) state: String,
    /// Whether it can be asked for what was missed.
    pub(crate) replays: bool,
    /// The number of the first message that was applied; null when none was.
    pub(crate) begin: Option<u64>,
    /// The number after the last one.
    pub(crate) next_seq: Option<u64>,
}

impl StreamRow {
    /// Whether two Conductors mean the same publisher.
    pub(crate) fn is_of_same_publisher(&self, other: &Self) -> bool {
        let name = |row: &Self| {
            let Self { tenant_id, model_name, lora_name, instance_id, .. } = row.clone();
            (tenant_id, model_name, lora_name, instance_id, row.block_size, row.dp_rank)
        };
        name(self) == name(other)
    }

    /// Whether an owner is of this publisher.
    pub(crate) fn has(&self, row: &OwnerRow) -> bool {
        (&self.tenant_id, &self.model_name, &self.instance_id)
            == (&row.tenant_id, &row.model_name, &row.instance_id)
            && self.dp_rank == row.dp_rank
    }
}

/// Where every stream is.
pub(crate) async fn stream_rows(app: &App) -> Result<Vec<StreamRow>, Refused> {
    let reports = app.reports().await?;
    let directory = app.shared.directory();
    let row = |(id, publisher): (&PublisherId, &crate::directory::Publisher)| {
        let report = reports.get(id)?;
        let engine = &publisher.engine;
        Some(StreamRow {
            publisher: id.0,
            tenant_id: engine.tenant.clone(),
            model_name: engine.model.clone(),
            lora_name: engine.lora.clone(),
            block_size: engine.block_tokens,
            instance_id: engine.instance.clone(),
            dp_rank: engine.dp_rank,
            state: report.state.name().to_owned(),
            replays: !engine.replay_endpoint.is_empty(),
            begin: report.position.map(|position| position.begin),
            next_seq: report.position.map(|position| position.next),
        })
    };
    Ok(directory.publishers.iter().filter_map(row).collect())
}

#[derive(Serialize)]
struct Digests {
    digests: Vec<OwnerRow>,
    streams: Vec<StreamRow>,
}

/// What every owner has, as numbers that another Conductor can compare, and where every stream is.
pub(super) async fn digest(State(app): State<App>) -> Result<Response, Refused> {
    let streams = stream_rows(&app).await?;
    Ok(value(&Digests { digests: owner_rows(&app), streams }))
}

#[derive(Serialize)]
struct View {
    tenant_id: String,
    model_name: String,
    block_size: u32,
    /// Unique blocks.
    blocks: usize,
    index_bytes: usize,
    learnt_hashes: usize,
    owners: Vec<OwnerRow>,
}

fn views(app: &App) -> Vec<View> {
    let mut rows: BTreeMap<(String, String, u32), Vec<OwnerRow>> = BTreeMap::new();
    for row in owner_rows(app) {
        let context = (row.tenant_id.clone(), row.model_name.clone(), row.block_size);
        rows.entry(context).or_default().push(row);
    }
    let knowledge = app.shared.knowledge.read();
    let view = |(id, context): (conductor_core::ContextId, &conductor_core::Context)| {
        let (blocks, learnt_hashes, index_bytes) = knowledge.size(id).unwrap_or_default();
        let key = (context.tenant.clone(), context.model.clone(), context.block_tokens);
        View {
            owners: rows.remove(&key).unwrap_or_default(),
            tenant_id: key.0,
            model_name: key.1,
            block_size: key.2,
            blocks,
            index_bytes,
            learnt_hashes,
        }
    };
    knowledge.contexts().map(view).collect()
}

#[derive(Serialize)]
struct GlobalView {
    contexts: Vec<View>,
}

/// Every index, and what every rank has on every tier.
pub(super) async fn global_view(State(app): State<App>) -> Response {
    value(&GlobalView { contexts: views(&app) })
}

/// What the status page shows.
#[derive(Serialize)]
struct Status {
    version: &'static str,
    uptime_s: f64,
    queries_total: u64,
    query_tokens_total: u64,
    query_hit_tokens_total: u64,
    decided_total: u64,
    decided_tokens_total: u64,
    reused_tokens_total: u64,
    fetched_tokens_total: u64,
    refused_total: u64,
    reservations: u32,
    policy: &'static str,
    /// Latest predicted and actual times to the first token, milliseconds.
    ttfts_ms: Vec<(f64, f64)>,
    /// The error of half of the predictions is at most this part; null without predictions.
    ttft_error_p50: Option<f64>,
    loads: Vec<Load>,
    contexts: Vec<View>,
    services: Vec<Service>,
    hot: Vec<HotPrefix>,
}

/// A prefix that was asked for often.
#[derive(Clone, Debug, Serialize)]
struct HotPrefix {
    model_name: String,
    /// The key of an early block.
    key: String,
    /// Requests, decayed over minutes.
    requests: f64,
    /// Tokens that the best instance has of the prompt that was asked for last.
    tokens: u64,
    /// Instances that have its beginning.
    instances: Vec<String>,
}

fn hot_prefixes(app: &App) -> Vec<HotPrefix> {
    let now = app.shared.now();
    let hottest = app.shared.hot().hottest(now, HOT_SHOWN);
    let directory = app.shared.directory();
    let name = |id: &conductor_core::InstanceId| directory.instances.get(id).map(|it| it.name.clone());
    let row = |prefix: crate::hot::Prefix| HotPrefix {
        key: format!("{:016x}", prefix.key.0),
        requests: (prefix.count(now) * 10.0).round() / 10.0,
        tokens: prefix.tokens,
        instances: prefix.instances.iter().filter_map(name).collect(),
        model_name: prefix.model,
    };
    hottest.into_iter().map(row).collect()
}

/// `GET /status`, of which the page is made.
pub(super) async fn status(State(app): State<App>) -> Result<Response, Refused> {
    let services = all_services(&app).await?;
    let (loads, contexts) = (all_loads(&app), views(&app));
    let hot = hot_prefixes(&app);
    let counts = &app.shared.counts;
    let schedule = app.shared.schedule();
    let counters = *schedule.scheduler.counters();
    let status = Status {
        version: env!("CARGO_PKG_VERSION"),
        uptime_s: (app.shared.now() - te_core::Instant::ZERO).as_secs_f64(),
        queries_total: counts.queries.load(Ordering::Relaxed),
        query_tokens_total: counts.tokens.load(Ordering::Relaxed),
        query_hit_tokens_total: counts.hit_tokens.load(Ordering::Relaxed),
        decided_total: counters.decided,
        decided_tokens_total: counters.tokens,
        reused_tokens_total: counters.reused_tokens,
        fetched_tokens_total: counters.fetched_tokens,
        refused_total: counters.refused_ttft + counters.refused_tbt + counters.refused_other,
        reservations: schedule.scheduler.reservations(),
        policy: app.shared.config.schedule.policy.name(),
        ttfts_ms: schedule.ttfts.iter().map(|(predicted, actual)| (ms(*predicted), ms(*actual))).collect(),
        ttft_error_p50: schedule.scheduler.ttft_errors().quantile(0.5).filter(|error| error.is_finite()),
        loads,
        contexts,
        services,
        hot,
    };
    Ok(value(&status))
}
