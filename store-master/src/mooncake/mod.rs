//! The HTTP interface of Mooncake's master, by its names: what serving engines, scripts and dashboards that
//! know that master ask on its metrics port.
//!
//! ```text
//!   mod.rs        /role /leader /ha_status /kv_events/status /metrics/summary; errors; requests
//!   segments.rs   /get_all_segments /get_segments_detail /query_segment /api/v1/segments/status
//!   keys.rs       /query_key /batch_query_keys /get_all_keys /api/v1/remove_all
//!   drains.rs     /api/v1/drain_jobs[/query|/cancel]
//!   tenants.rs    /api/v1/tenant_quotas
//!   metadata.rs   /metadata of its metadata server, on a port of its own
//! ```
//!
//! Paths, parameters, members and numbers are those of `master_admin_service.cpp` and
//! `http_metadata_server.cpp` of Mooncake at commit 3b5a5941. Where this master has no such thing (election,
//! events), the answer says so truthfully.
//!
//! Every answer is made of short requests to the serving thread: a page of a list, or a bounded number of
//! keys. What changes something needs the admin secret, or comes from this host, as in `admin.rs`. Keys are
//! answered as over RPC: to everyone if the master has neither tenants nor an admin secret, else to admins.

mod drains;
mod keys;
pub(crate) mod metadata;
mod segments;
mod tenants;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::Serialize;
use store_core::{ErrorCode, Stats};

use crate::admin::Refusal;
use crate::ha::HaStats;
use crate::hosts;
use crate::http::Asker;

/// Content type of texts.
const TEXT: &str = "text/plain; charset=utf-8";

/// What the routes share.
#[derive(Clone)]
struct Shared {
    asker: Asker,
    jobs: Arc<Mutex<drains::Jobs>>,
}

/// All routes but those of the metadata server.
pub(crate) fn routes(asker: Asker) -> Router {
    let shared = Shared { asker: asker.clone(), jobs: Arc::default() };
    // As `/metrics`, which has the names of segments as well, these are served under every host name.
    let open = Router::new()
        .route("/get_all_segments", get(segments::names))
        .route("/metrics/summary", get(summary))
        .route("/role", get(role))
        .route("/ha_status", get(ha_status))
        .route("/leader", get(leader))
        .route("/kv_events/status", get(kv_events));
    Router::new()
        .route("/get_segments_detail", get(segments::details))
        .route("/query_segment", get(segments::one))
        .route("/api/v1/segments/status", get(segments::status))
        .route("/query_key", get(keys::query))
        .route("/batch_query_keys", get(keys::query_many))
        .route("/get_all_keys", get(keys::all))
        .route("/api/v1/remove_all", post(keys::remove_all))
        .route("/api/v1/drain_jobs", post(drains::create))
        .route("/api/v1/drain_jobs/query", get(drains::query))
        .route("/api/v1/drain_jobs/cancel", post(drains::cancel))
        .route("/api/v1/tenant_quotas", get(tenants::read).put(tenants::set).delete(tenants::remove))
        .layer(middleware::from_fn_with_state(asker, hosts::check))
        .merge(open)
        .with_state(shared)
}

/// One line for people, with the state of everything.
async fn summary(State(shared): State<Shared>) -> Result<Response, Refused> {
    let snapshot = shared.asker.snapshot().await.map_err(Refusal::from)?;
    let ha = snapshot.ha.as_ref();
    let role = ha.map_or("leader", HaStats::mooncake_role);
    let state = ha.map_or("serving", HaStats::mooncake_state);
    Ok(text(summary_of(role, state, &snapshot.stats)))
}

fn summary_of(role: &str, state: &str, stats: &Stats) -> String {
    let percent = if stats.capacity_bytes == 0 {
        0.0
    } else {
        stats.used_bytes as f64 / stats.capacity_bytes as f64 * 100.0
    };
    format!(
        "role={role}, state={state}, service_ready={}, master={{Mem Storage: {} B / {} B ({percent:.1}%) | \
         Keys: {} | Segments: {} | Clients: {} | Gets: {} (hits: {}) | Puts: {} | Evictions: {} | Lost: {}}}\n",
        state == "serving",
        stats.used_bytes,
        stats.capacity_bytes,
        stats.objects,
        stats.segments,
        stats.nodes,
        stats.gets_total,
        stats.get_hits_total,
        stats.put_ends_total,
        stats.evictions_total,
        stats.objects_lost_total,
    )
}

/// `leader` or `standby`; a master that is alone leads.
async fn role(State(shared): State<Shared>) -> Result<Response, Refused> {
    let snapshot = shared.asker.snapshot().await.map_err(Refusal::from)?;
    Ok(text(snapshot.ha.as_ref().map_or("leader", HaStats::mooncake_role).into()))
}

async fn ha_status(State(shared): State<Shared>) -> Result<Response, Refused> {
    let snapshot = shared.asker.snapshot().await.map_err(Refusal::from)?;
    Ok(text(snapshot.ha.as_ref().map_or("serving", HaStats::mooncake_state).into()))
}

/// The leader that was elected; a master that is alone was not.
async fn leader(State(shared): State<Shared>) -> Result<Response, Refused> {
    let snapshot = shared.asker.snapshot().await.map_err(Refusal::from)?;
    let ha = snapshot.ha.as_ref();
    let found = ha.and_then(|ha| Some((ha, ha.leader().filter(|(_, rpc)| !rpc.is_empty())?.1)));
    let says = match found {
        Some((ha, rpc)) => serde_json::json!({
            "present": true, "leader_address": rpc, "view_version": ha.status.reign.term,
        }),
        None => serde_json::json!({ "present": false }),
    };
    Ok(json(StatusCode::OK, &says))
}

/// This master publishes no events.
async fn kv_events() -> Response {
    json(
        StatusCode::OK,
        &serde_json::json!({
            "enabled": false,
            "published_batches": 0,
            "published_events": 0,
            "dropped_events": 0,
            "skipped_unparsed_keys": 0,
        }),
    )
}

/// Why a request was refused, in Mooncake's form: `{success, error_code, error_message}`.
#[derive(Debug)]
struct Refused {
    status: StatusCode,
    code: i32,
    message: String,
}

impl Refused {
    fn new(status: StatusCode, code: ErrorCode, message: impl Into<String>) -> Self {
        Self { status, code: code.code(), message: message.into() }
    }

    /// A parameter or the body is wrong.
    fn params(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, ErrorCode::InvalidParams, message)
    }
}

/// The status of an answer with this code.
impl From<ErrorCode> for Refused {
    fn from(code: ErrorCode) -> Self {
        let status = match code {
            ErrorCode::InvalidParams | ErrorCode::InvalidKey => StatusCode::BAD_REQUEST,
            ErrorCode::SegmentNotFound
            | ErrorCode::ObjectNotFound
            | ErrorCode::KeyNotFound
            | ErrorCode::ReplicaIsNotReady
            | ErrorCode::TenantNotRegistered => StatusCode::NOT_FOUND,
            ErrorCode::TenantNotEmpty | ErrorCode::UnavailableInCurrentStatus => StatusCode::CONFLICT,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, code, code.to_string())
    }
}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Self {
        if let Refusal::Refused(code) = refusal {
            return code.into();
        }
        let (status, message) = refusal.parts();
        let code = match status {
            StatusCode::SERVICE_UNAVAILABLE => ErrorCode::UnavailableInCurrentStatus,
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => ErrorCode::PermissionDenied,
            _ => ErrorCode::InvalidParams,
        };
        Self::new(status, code, message)
    }
}

impl From<crate::http::Unanswered> for Refused {
    fn from(why: crate::http::Unanswered) -> Self {
        Refusal::from(why).into()
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        #[derive(Serialize)]
        struct Body {
            success: bool,
            error_code: i32,
            error_message: String,
        }
        let body = Body { success: false, error_code: self.code, error_message: self.message };
        let mut response = json(self.status, &body);
        if self.status == StatusCode::UNAUTHORIZED {
            let bearer = header::HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, bearer);
        }
        response
    }
}

impl Shared {
    /// Checks that a request may change something. A web page can send a request without a body to any
    /// address; it carries the page's origin then (Fetch standard, §3.2).
    async fn may_change(&self, peer: SocketAddr, headers: &HeaderMap) -> Result<(), Refused> {
        self.asker.may_change(peer, headers).await?;
        if headers.contains_key(header::ORIGIN) && !self.asker.admin_secret().is_set() {
            return Err(Refusal::Host.into());
        }
        Ok(())
    }

    /// Checks that a request may see keys.
    fn may_see_keys(&self, peer: SocketAddr, headers: &HeaderMap) -> Result<(), Refused> {
        let open = !self.asker.has_tenants() && !self.asker.admin_secret().is_set();
        if open || self.asker.is_admin(peer, headers) {
            return Ok(());
        }
        let secret = self.asker.admin_secret().is_set();
        Err(if secret { Refusal::Secret } else { Refusal::Elsewhere }.into())
    }
}

/// The value of a parameter of the query, percent-decoded; a `+` stands for itself. `None`: it is missing.
fn param(uri: &Uri, name: &str) -> Option<Vec<u8>> {
    let pairs = uri.query().unwrap_or_default().split('&');
    let mut named = pairs.filter_map(|pair| pair.split_once('=')).filter(|(key, _)| *key == name);
    named.next().map(|(_, value)| decoded(value))
}

/// As [`param`], for a parameter that is text and not empty.
fn text_param(uri: &Uri, name: &str) -> Result<Option<String>, Refused> {
    let Some(value) = param(uri, name).filter(|value| !value.is_empty()) else { return Ok(None) };
    let text = String::from_utf8(value);
    text.map(Some).map_err(|_| Refused::params(format!("{name} is not UTF-8: write it percent-encoded")))
}

/// Decodes `%XX`. What is not one stays as it is.
fn decoded(text: &str) -> Vec<u8> {
    let digit = |byte: Option<&u8>| char::from(*byte?).to_digit(16);
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        match (byte, digit(bytes.get(at + 1)), digit(bytes.get(at + 2))) {
            (b'%', Some(high), Some(low)) => {
                out.push((high * 16 + low) as u8);
                at += 3;
            }
            _ => {
                out.push(byte);
                at += 1;
            }
        }
    }
    out
}

fn text(body: String) -> Response {
    ([(header::CONTENT_TYPE, TEXT)], body).into_response()
}

fn json(status: StatusCode, value: &impl Serialize) -> Response {
    match serde_json::to_string(value) {
        Ok(text) => {
            let kind = [(header::CONTENT_TYPE, "application/json; charset=utf-8")];
            (status, kind, text).into_response()
        }
        Err(error) => {
            tracing::error!(%error, "an answer cannot be encoded as JSON");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// Two numbers, as Mooncake writes its ids of 128 bits.
fn id(first: u64, second: u64) -> String {
    format!("{first}-{second}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_decoded_and_a_plus_is_a_plus() {
        let uri: Uri = "/x?a=1%2f%2F+%zz%4&key=%00%ff&empty=&a=2&flag".parse().expect("a URI");
        assert_eq!(param(&uri, "a").as_deref(), Some(&b"1//+%zz%4"[..]), "the first of a name");
        assert_eq!(param(&uri, "key").as_deref(), Some(&[0, 0xff][..]));
        assert_eq!((param(&uri, "flag"), param(&uri, "none")), (None, None));
        assert_eq!(text_param(&uri, "empty").expect("text"), None);
        assert_eq!(text_param(&uri, "key").expect_err("not text").status, StatusCode::BAD_REQUEST);
        assert_eq!(param(&"/x".parse().expect("a URI"), "a"), None);
    }

    #[test]
    fn the_summary_of_a_master_without_nodes_divides_by_nothing() {
        let line = summary_of("leader", "serving", &Stats::default());
        assert!(line.starts_with("role=leader, state=serving, service_ready=true, master={"), "{line}");
        assert!(line.contains("Mem Storage: 0 B / 0 B (0.0%) | Keys: 0"), "{line}");
    }

    #[test]
    fn ids_are_two_decimal_numbers() {
        assert_eq!(id(u64::MAX, 7), "18446744073709551615-7");
    }
}
