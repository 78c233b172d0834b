//! The administrative HTTP/JSON interface, and the status page that uses it.
//!
//! A request becomes an RPC frame that the serving thread carries out between two others, in a session with
//! the rights of an admin: there is one implementation per operation. Authorisation is decided here. Every
//! peer that reaches the port may read. Requests that change something need the admin secret (`Authorization:
//! Bearer …`) or, while the master has none, must come from this host.

use std::net::SocketAddr;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{ConnectInfo, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware;
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use serde::{Deserialize, Serialize};
use store_core::ha::HandOverError;
use store_core::message::{
    DrainInfo, DrainStatus, Evict, EvictNow, EvictionReport, ListNodes, ListTasks, NodeInfo, Operation,
    ReadConfig, SegmentInfo, SegmentState, Segments, TaskQuery, TaskReport, TaskState, TenantList,
    TenantUsage,
};
use store_core::wire::KEYS_PER_BATCH_MAX;
use store_core::{ErrorCode, Frame, Items, NodeId, SegmentNo, Stats};

use crate::ha::http as ha;
use crate::hosts;
use crate::http::{Asker, BODY_TIME_MAX, Unanswered};

/// Longest body of a request, bytes.
const BODY_BYTES_MAX: usize = 64 << 10;

/// Number of tasks in an answer if the request has no `limit`.
const TASKS_DEFAULT: u32 = 256;

/// The status page: one file without a build step that loads nothing from other hosts.
const PAGE: &str = include_str!("page.html");
/// Describes every route in this file.
const OPENAPI: &str = include_str!("openapi.json");

pub(crate) fn routes(asker: Asker) -> Router<Asker> {
    Router::new()
        .route("/", get(page))
        .route("/api/openapi.json", get(openapi))
        .route("/api/v1/status", get(status))
        .route("/api/v1/segments", get(segments))
        .route("/api/v1/nodes", get(nodes))
        .route("/api/v1/drains", get(drains))
        .route("/api/v1/tasks", get(tasks))
        .route("/api/v1/tenants", get(tenants))
        .route("/api/v1/config", get(config))
        .route("/api/v1/evict", post(evict))
        .route("/api/v1/masters", get(ha::masters))
        .route("/api/v1/switchover", post(ha::switchover))
        .layer(middleware::from_fn_with_state(asker, hosts::check))
}

async fn page() -> Response {
    // Only this file's own script runs, and it connects to this master alone.
    let policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; \
                  frame-ancestors 'none'";
    ([(header::CONTENT_SECURITY_POLICY, policy)], Html(PAGE)).into_response()
}

async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], OPENAPI).into_response()
}

#[derive(Serialize)]
struct Status {
    version: &'static str,
    epoch: u32,
    uptime_s: f64,
    connections: u64,
    /// Time of the start, seconds since the Unix epoch.
    started_s: f64,
    stats: Stats,
    eviction: EvictionReport,
    tasks: TaskReport,
}

async fn status(State(asker): State<Asker>) -> Result<Response, Refusal> {
    let snapshot = asker.snapshot().await?;
    Ok(json(&Status {
        version: env!("CARGO_PKG_VERSION"),
        epoch: snapshot.epoch,
        uptime_s: snapshot.uptime.as_secs_f64(),
        connections: snapshot.connections,
        started_s: snapshot.started_s,
        stats: snapshot.stats,
        eviction: snapshot.eviction,
        tasks: snapshot.tasks,
    }))
}

/// A segment in JSON. 64-bit identifiers are strings, because many readers of JSON have 53 bits.
#[derive(Serialize)]
struct Segment<'a> {
    segment: SegmentNo,
    name: &'a str,
    endpoint: &'a str,
    node: String,
    incarnation: String,
    /// `*` for host memory, `cpu:N` or `cuda:N` where it is known.
    location: String,
    capacity_bytes: u64,
    used_bytes: u64,
    /// `active`, or the state of its drain.
    state: &'static str,
}

impl<'a> Segment<'a> {
    fn of(info: SegmentInfo<'a>, state: SegmentState) -> Self {
        Self {
            segment: info.segment,
            name: info.name,
            endpoint: info.endpoint,
            node: node_name(info.node),
            incarnation: info.incarnation.to_string(),
            location: info.location.to_string(),
            capacity_bytes: info.len,
            used_bytes: info.used,
            state: state.name(),
        }
    }
}

async fn segments(State(asker): State<Asker>) -> Result<Response, Refusal> {
    let states = asker.drains().await?;
    let state = |no| {
        states.iter().find(|drain| drain.segment == no).map_or(SegmentState::Active, |drain| drain.state)
    };
    asker
        .ask::<Segments, _>(&(), |(), items| {
            json(&items.flatten().map(|info| Segment::of(info, state(info.segment))).collect::<Vec<_>>())
        })
        .await
}

/// A segment in JSON that is not active.
#[derive(Serialize)]
struct Drain {
    segment: SegmentNo,
    node: String,
    state: &'static str,
    used_bytes: u64,
    blocks: u64,
    moving: u32,
    moved_total: u64,
    dropped_total: u64,
    failed_total: u64,
    left_no_room: u64,
    left_unfinished: u64,
    left_bad: u64,
}

impl From<&DrainInfo> for Drain {
    fn from(info: &DrainInfo) -> Self {
        Self {
            segment: info.segment,
            node: node_name(info.node),
            state: info.state.name(),
            used_bytes: info.used_bytes,
            blocks: info.blocks,
            moving: info.moving,
            moved_total: info.moved_total,
            dropped_total: info.dropped_total,
            failed_total: info.failed_total,
            left_no_room: info.left_no_room,
            left_unfinished: info.left_unfinished,
            left_bad: info.left_bad,
        }
    }
}

async fn drains(State(asker): State<Asker>) -> Result<Response, Refusal> {
    Ok(json(&asker.drains().await?.iter().map(Drain::from).collect::<Vec<_>>()))
}

/// A task in JSON. 64-bit identifiers are strings.
#[derive(Serialize)]
struct Task {
    id: String,
    /// For admins only: keys belong to tenants.
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    bytes: u64,
    state: &'static str,
    cause: &'static str,
    source: Option<SegmentNo>,
    target: Option<SegmentNo>,
    attempts: u32,
    error: Option<&'static str>,
    age_ms: u64,
}

#[derive(Serialize)]
struct Tasks {
    /// Where the next page begins; absent on the last page.
    #[serde(skip_serializing_if = "Option::is_none")]
    cursor: Option<String>,
    tasks: Vec<Task>,
}

/// Selects tasks: `?state=…&limit=…&cursor=…`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WhichTasks {
    #[serde(default)]
    cursor: u64,
    limit: Option<u32>,
    state: Option<String>,
}

async fn tasks(
    State(asker): State<Asker>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    which: Result<Query<WhichTasks>, QueryRejection>,
) -> Result<Response, Refusal> {
    let wrong =
        || Refusal::Body("use ?state=STATE&limit=1..4096&cursor=CURSOR; each parameter is optional".into());
    let Query(which) = which.map_err(|_| wrong())?;
    let state = match which.state.as_deref() {
        None => None,
        Some(name) => Some(TaskState::named(name).ok_or_else(wrong)?),
    };
    let limit = which.limit.unwrap_or(TASKS_DEFAULT);
    if !(1..=KEYS_PER_BATCH_MAX as u32).contains(&limit) {
        return Err(wrong());
    }
    let keys = asker.is_admin(peer, &headers);
    let query = TaskQuery { cursor: which.cursor, limit, state };
    asker
        .ask::<ListTasks, _>(&query, |position, items| {
            let tasks = items.map(|info| Task {
                id: info.id.to_string(),
                key: keys.then(|| String::from_utf8_lossy(info.key.0).into_owned()),
                bytes: info.len,
                state: info.state.name(),
                cause: info.cause.name(),
                source: info.source,
                target: info.target,
                attempts: info.attempts,
                error: info.error.map(ErrorCode::name),
                age_ms: info.age_ms,
            });
            let cursor = (position.cursor != 0).then(|| position.cursor.to_string());
            json(&Tasks { cursor, tasks: tasks.collect() })
        })
        .await
}

#[derive(Serialize)]
struct Tenant<'a> {
    name: &'a str,
    objects: u64,
    bytes: u64,
    held_bytes: u64,
    hard_pinned_bytes: u64,
    guaranteed_bytes: u64,
    quota_bytes: Option<u64>,
    quota_objects: Option<u32>,
    disk_bytes: u64,
    quota_disk_bytes: Option<u64>,
    has_secret: bool,
    evictions_total: u64,
    refusals_total: u64,
}

impl<'a> From<TenantUsage<'a>> for Tenant<'a> {
    fn from(usage: TenantUsage<'a>) -> Self {
        Self {
            name: usage.name,
            objects: usage.objects,
            bytes: usage.bytes,
            held_bytes: usage.held_bytes,
            hard_pinned_bytes: usage.hard_pinned_bytes,
            guaranteed_bytes: usage.guaranteed_bytes,
            quota_bytes: usage.quota_bytes,
            quota_objects: usage.quota_objects,
            disk_bytes: usage.disk_bytes,
            quota_disk_bytes: usage.quota_disk_bytes,
            has_secret: usage.has_secret,
            evictions_total: usage.evictions_total,
            refusals_total: usage.refusals_total,
        }
    }
}

async fn tenants(State(asker): State<Asker>) -> Result<Response, Refusal> {
    asker
        .ask::<TenantList, _>(&(), |(), items| json(&items.flatten().map(Tenant::from).collect::<Vec<_>>()))
        .await
}

#[derive(Serialize)]
struct Node {
    node: String,
    incarnation: String,
    segments: u32,
    capacity_bytes: u64,
    used_bytes: u64,
    silent_ms: u64,
}

impl From<NodeInfo> for Node {
    fn from(info: NodeInfo) -> Self {
        Self {
            node: node_name(info.node),
            incarnation: info.incarnation.to_string(),
            segments: info.segments,
            capacity_bytes: info.capacity,
            used_bytes: info.used,
            silent_ms: info.silent_ms,
        }
    }
}

async fn nodes(State(asker): State<Asker>) -> Result<Response, Refusal> {
    asker.ask::<ListNodes, _>(&(), |(), items| json(&items.map(Node::from).collect::<Vec<_>>())).await
}

async fn config(State(asker): State<Asker>) -> Result<Response, Refusal> {
    // With the seed, a client could choose keys that collide.
    asker
        .ask::<ReadConfig, _>(&(), |config, _| json(&store_core::MasterConfig { hash_seed: 0, ..config }))
        .await
}

/// Body of a POST to `/api/v1/evict`: how much to leave. `None`: no limit.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Leave {
    objects_max: Option<u64>,
    used_bytes_max: Option<u64>,
}

async fn evict(
    State(asker): State<Asker>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Refusal> {
    asker.may_change(peer, &headers).await?;
    let leave: Leave = read(&headers, body).await?;
    if leave.objects_max.is_none() && leave.used_bytes_max.is_none() {
        return Err(Refusal::Body(
            "objects_max and used_bytes_max are missing: give at least one of them".into(),
        ));
    }
    let leave = Evict {
        objects_max: leave.objects_max.unwrap_or(u64::MAX),
        used_bytes_max: leave.used_bytes_max.unwrap_or(u64::MAX),
    };
    asker.ask::<EvictNow, _>(&leave, |evicted, _| json(&evicted)).await
}

/// Why a request was refused or has no answer.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The serving thread did not answer in time.
    Unanswered(Unanswered),
    /// The body is not JSON, or has fields that this operation does not have.
    Body(String),
    /// The body is longer than `BODY_BYTES_MAX`.
    Long,
    /// The body did not arrive in time.
    Slow,
    /// The request changes something and comes from another host, and the master has no admin secret.
    Elsewhere,
    /// The request changes something, and the admin secret is missing or wrong.
    Secret,
    /// The request has a host name that another web page may have chosen.
    Host,
    /// The master refused.
    Refused(ErrorCode),
    /// No other master is to lead.
    HandOver(HandOverError),
}

impl From<Unanswered> for Refusal {
    fn from(why: Unanswered) -> Self {
        Self::Unanswered(why)
    }
}

impl Refusal {
    /// The status of the answer, and what is wrong.
    pub(crate) fn parts(self) -> (StatusCode, String) {
        match self {
            Self::Unanswered(why) => (StatusCode::SERVICE_UNAVAILABLE, why.text().to_owned()),
            Self::Body(why) => (StatusCode::BAD_REQUEST, why),
            Self::Long => (StatusCode::PAYLOAD_TOO_LARGE, format!("the body is too long: send at most {BODY_BYTES_MAX} bytes")),
            Self::Slow => (StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time".to_owned()),
            Self::Elsewhere => (
                StatusCode::FORBIDDEN,
                "this request is allowed from the master's host only, because the master has no admin secret: set `store.admin_secret`".into(),
            ),
            Self::Secret => {
                (StatusCode::UNAUTHORIZED, "the admin secret is missing or wrong: send `Authorization: Bearer SECRET`".into())
            }
            Self::Host => (
                StatusCode::FORBIDDEN,
                "the Host of this request is not allowed: use an address, localhost, a name without dots, or one of `http_hosts`".into(),
            ),
            Self::Refused(ErrorCode::NotLeader) => {
                (StatusCode::SERVICE_UNAVAILABLE, ErrorCode::NotLeader.to_string())
            }
            Self::Refused(code) => (StatusCode::CONFLICT, code.to_string()),
            Self::HandOver(error) => (StatusCode::CONFLICT, error.to_string()),
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let (status, why) = self.parts();
        let body = serde_json::json!({ "error": why });
        let mut response =
            (status, [(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response();
        if status == StatusCode::UNAUTHORIZED {
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, header::HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl Asker {
    /// Carries out an operation, and renders its answer.
    pub(crate) async fn ask<O: Operation, T>(
        &self,
        head: &O::Request<'_>,
        render: impl FnOnce(O::Response<'_>, Items<'_, O::ResponseItem<'_>>) -> T,
    ) -> Result<T, Refusal> {
        self.ask_for::<O, T>(None, head, std::iter::empty(), render).await
    }

    /// As [`ask`](Self::ask), with items, and as a client of `tenant` if one is given.
    pub(crate) async fn ask_for<'i, O: Operation, T>(
        &self,
        tenant: Option<&str>,
        head: &O::Request<'_>,
        items: impl ExactSizeIterator<Item = O::RequestItem<'i>>,
        render: impl FnOnce(O::Response<'_>, Items<'_, O::ResponseItem<'_>>) -> T,
    ) -> Result<T, Refusal> {
        let mut request = Vec::new();
        O::encode_request(&mut request, 1, head, items).map_err(|error| Refusal::Body(error.to_string()))?;
        let answer = self.call(request, tenant.map(Into::into)).await?;
        let frame = match Frame::parse(&answer) {
            Ok(Some((frame, _))) => frame,
            _ => return Err(Refusal::Refused(ErrorCode::InternalError)),
        };
        let (head, items) = O::decode_response(&frame).map_err(Refusal::Refused)?;
        Ok(render(head, items))
    }

    /// All segments that are not active.
    pub(crate) async fn drains(&self) -> Result<Vec<DrainInfo>, Refusal> {
        self.ask::<DrainStatus, _>(&(), |(), items| items.flatten().collect()).await
    }

    /// Whether a request has the rights of an admin, as in [`Self::may_change`].
    pub(crate) fn is_admin(&self, peer: SocketAddr, headers: &HeaderMap) -> bool {
        let secret = self.admin_secret();
        if secret.is_set() { secret.matches(bearer(headers).as_bytes()) } else { peer.ip().is_loopback() }
    }

    /// Checks that a request may change something.
    pub(crate) async fn may_change(&self, peer: SocketAddr, headers: &HeaderMap) -> Result<(), Refusal> {
        let secret = self.admin_secret();
        if secret.is_set() {
            if secret.matches(bearer(headers).as_bytes()) {
                return Ok(());
            }
            if headers.contains_key(header::AUTHORIZATION) {
                self.wrong_bearer().await;
            }
            return Err(Refusal::Secret);
        }
        if !peer.ip().is_loopback() {
            return Err(Refusal::Elsewhere);
        }
        // A page whose name resolves to this address would have the same origin for a browser.
        let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
        if host.is_some_and(|host| hosts::is_allowed(host, self.http_hosts())) {
            Ok(())
        } else {
            Err(Refusal::Host)
        }
    }
}

/// The admin secret in a request; empty: none.
pub(crate) fn bearer(headers: &HeaderMap) -> &str {
    let said = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    said.and_then(|value| value.strip_prefix("Bearer ")).unwrap_or("")
}

/// Parses the JSON body of a request. It must be declared as JSON, which a form of another site's page cannot
/// do.
pub(crate) async fn read<T: for<'de> Deserialize<'de>>(
    headers: &HeaderMap,
    body: Body,
) -> Result<T, Refusal> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    if kind.split(';').next().map(str::trim) != Some("application/json") {
        return Err(Refusal::Body("send JSON, as Content-Type: application/json".into()));
    }
    let body = match tokio::time::timeout(BODY_TIME_MAX, to_bytes(body, BODY_BYTES_MAX)).await {
        Ok(Ok(body)) => body,
        Ok(Err(_)) => return Err(Refusal::Long),
        Err(_) => return Err(Refusal::Slow),
    };
    serde_json::from_slice(&body).map_err(|error| Refusal::Body(error.to_string()))
}

pub(crate) fn json(value: &impl Serialize) -> Response {
    match serde_json::to_string(value) {
        Ok(text) => ([(header::CONTENT_TYPE, "application/json")], text + "\n").into_response(),
        Err(error) => {
            tracing::error!(%error, "an answer cannot be encoded as JSON");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

fn node_name(node: NodeId) -> String {
    format!("{node:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_route_is_described_and_every_description_has_its_route() {
        let document: serde_json::Value = serde_json::from_str(OPENAPI).expect("JSON");
        let mut described: Vec<&str> =
            document["paths"].as_object().expect("paths").keys().map(String::as_str).collect();
        let mut routed: Vec<&str> = include_str!("admin.rs")
            .lines()
            .chain(include_str!("http.rs").lines())
            .chain(include_str!("mooncake/mod.rs").lines())
            .filter_map(|line| line.trim().strip_prefix(".route(\"")?.split('"').next())
            .collect();
        described.sort_unstable();
        routed.sort_unstable();
        assert_eq!(described, routed);
    }
}
