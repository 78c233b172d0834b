//! HTTP: queries, decisions, registrations, and the state for people and monitoring.
//!
//! ```text
//!   request ─▶ own host? ─▶ body (length, time) ─▶ numbers by hand, the rest by serde ─▶ read lock ─▶ answer
//!                └ 421         └ 413, 408              └ 400
//! ```
//!
//! One thread serves all requests. A query needs the index for some microseconds and never waits for an
//! engine; what does wait (text that an engine tokenises, the other Conductor) waits asynchronously.

mod answer;
mod forms;
pub(crate) mod numbers;
mod query;
mod register;
mod schedule;
pub(crate) mod state;
mod transfer;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{ConnectInfo, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use serde::Serialize;
use store_master::is_allowed_host;

use crate::io::Commander;
use crate::shared::{Counts, Shared};

/// Longest time for the body of a request.
const BODY_TIME_MAX: Duration = Duration::from_secs(10);
/// Delay of the answer to a wrong secret.
const WRONG_BEARER_DELAY: Duration = Duration::from_millis(250);

/// What routes use.
#[derive(Clone, Debug)]
pub(crate) struct App {
    pub(crate) shared: Arc<Shared>,
    pub(crate) commander: Commander,
}

/// Why a request is not answered as asked.
#[derive(Debug)]
pub(crate) enum Refused {
    /// 400: what is wrong with it.
    Bad(String),
    /// 401.
    Bearer,
    /// 403: such requests are accepted from this host only.
    Remote,
    /// 404: what does not exist.
    Missing(String),
    /// 408: the body took too long.
    Slow,
    /// 409: what it contradicts.
    Conflict(String),
    /// 413: more bytes than this.
    Long(usize),
    /// 421: the name under which it was asked.
    Host,
    /// 429: an SLO would be missed; when to come again, and the prediction.
    Later(String, Duration),
    /// 502: what an engine answered.
    Engine(String),
    /// 503.
    Busy(&'static str),
}

#[derive(Serialize)]
struct Error<'a> {
    error: &'a str,
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let (status, text) = match &self {
            Self::Bad(text) => (StatusCode::BAD_REQUEST, text.clone()),
            Self::Bearer => (StatusCode::UNAUTHORIZED, "send the admin secret: `Authorization: Bearer …`".into()),
            Self::Remote => (
                StatusCode::FORBIDDEN,
                "without an admin secret, this is accepted from the Conductor's own host only: start it with \
                 --admin-secret-file"
                    .into(),
            ),
            Self::Missing(text) => (StatusCode::NOT_FOUND, text.clone()),
            Self::Slow => (StatusCode::REQUEST_TIMEOUT, "the body took too long".into()),
            Self::Conflict(text) => (StatusCode::CONFLICT, text.clone()),
            Self::Long(max) => (StatusCode::PAYLOAD_TOO_LARGE, format!("send at most {max} bytes")),
            Self::Host => (
                StatusCode::MISDIRECTED_REQUEST,
                "this name is not one of the Conductor's: add it to conductor.http_hosts, or ask by address".into(),
            ),
            Self::Later(text, _) => (StatusCode::TOO_MANY_REQUESTS, text.clone()),
            Self::Engine(text) => (StatusCode::BAD_GATEWAY, text.clone()),
            Self::Busy(text) => (StatusCode::SERVICE_UNAVAILABLE, (*text).into()),
        };
        let mut response = (status, value(&Error { error: &text })).into_response();
        if let Self::Later(_, after) = self {
            let seconds = after.as_secs_f64().ceil().clamp(1.0, 3_600.0) as u64;
            response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        }
        response
    }
}

/// Every route.
pub(crate) fn router(app: App) -> Router {
    let guarded = Router::new()
        .route("/", get(state::page))
        .route("/openapi.json", get(state::openapi))
        .route("/query", post(query::query))
        .route("/query_by_hash", post(query::query))
        .route("/register", post(register::register))
        .route("/unregister", post(register::unregister))
        .route("/services", get(state::services))
        .route("/workers", get(state::workers))
        .route("/peers", get(state::peers))
        .route("/global_view", get(state::global_view))
        .route("/schedule", post(schedule::schedule))
        .route("/reservations", get(schedule::list))
        .route("/reservations/{id}/prefill_started", post(schedule::prefill_started))
        .route("/reservations/{id}/prefill_complete", post(schedule::prefill_complete))
        .route("/reservations/{id}/first_token", post(schedule::first_token))
        .route("/reservations/{id}/output_block", post(schedule::output_block))
        .route("/reservations/{id}", delete(schedule::end))
        .route("/loads", get(schedule::loads))
        .route("/digest", get(state::digest))
        .route("/snapshot", get(transfer::snapshot))
        .route("/dump", get(transfer::dump))
        .route("/status", get(state::status))
        .layer(middleware::from_fn_with_state(app.clone(), check_host));
    Router::new()
        .route("/health", get(state::health))
        .route("/ready", get(state::ready))
        .route("/metrics", get(state::metrics))
        .merge(guarded)
        .with_state(app)
}

/// Refuses requests under names that other parties own, unless they carry the admin secret.
async fn check_host(State(app): State<App>, request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    let config = &app.shared.config;
    let allowed = match host {
        Some(host) => is_allowed_host(host, &config.http_hosts),
        None => !request.headers().contains_key(header::HOST),
    };
    let secret = &config.admin_secret;
    match allowed || (secret.is_set() && secret.matches(bearer(request.headers()).as_bytes())) {
        true => next.run(request).await,
        false => Refused::Host.into_response(),
    }
}

/// The secret that a request carries.
fn bearer(headers: &HeaderMap) -> &str {
    let value = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()).unwrap_or_default();
    match value.split_once(' ') {
        Some((scheme, secret)) if scheme.eq_ignore_ascii_case("bearer") => secret.trim(),
        _ => "",
    }
}

impl App {
    /// Whether a request may change something.
    ///
    /// # Errors
    /// [`Refused::Bearer`], [`Refused::Remote`].
    pub(crate) async fn authorize(&self, headers: &HeaderMap, from: SocketAddr) -> Result<(), Refused> {
        let secret = &self.shared.config.admin_secret;
        let refused = match secret.is_set() {
            true if secret.matches(bearer(headers).as_bytes()) => return Ok(()),
            false if from.ip().to_canonical().is_loopback() => return Ok(()),
            true => Refused::Bearer,
            false => Refused::Remote,
        };
        Counts::add(&self.shared.counts.forbidden, 1);
        tokio::time::sleep(WRONG_BEARER_DELAY).await;
        Err(refused)
    }

    /// The body of a request.
    ///
    /// # Errors
    /// It is too long, or does not arrive in time.
    pub(crate) async fn body(&self, body: Body) -> Result<Bytes, Refused> {
        let max = self.shared.config.limits.body_bytes_max as usize;
        let read = match tokio::time::timeout(BODY_TIME_MAX, to_bytes(body, max)).await {
            Ok(read) => read.map_err(|_| Refused::Long(max)),
            Err(_) => Err(Refused::Slow),
        };
        self.counted(read)
    }

    /// Counts a refusal.
    pub(crate) fn counted<T>(&self, result: Result<T, Refused>) -> Result<T, Refused> {
        if result.is_err() {
            Counts::add(&self.shared.counts.bad_requests, 1);
        }
        result
    }
}

/// A client's address.
pub(crate) type From = ConnectInfo<SocketAddr>;

/// A value as JSON.
pub(crate) fn value(value: &impl Serialize) -> Response {
    match serde_json::to_string(value) {
        Ok(text) => json(text),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// A JSON document that is written already.
pub(crate) fn json(text: String) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], text).into_response()
}
