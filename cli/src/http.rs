//! The HTTP endpoints of a node for operators and monitoring: `/health`, `/ready`, `/metrics`. The master has
//! its own.
//!
//! The server has its own thread and runtime. It answers before the node's memory is allocated (which takes
//! about a second per few GiB) and until the node is unmounted, so that a prober learns which phase the node
//! is in.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use store_client::{ClientMetrics, LocalServer, Node, metrics_text_of};
use store_master::{HttpLimits, HttpServer};

/// A node whose engine does not answer within this time counts as stuck.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for requests in progress to finish after the node has stopped.
const GRACE: Duration = Duration::from_millis(200);

/// The server, with the default limits of a master's HTTP server. Dropping it stops it.
#[derive(Debug)]
pub(crate) struct NodeHttp {
    server: HttpServer,
    phase: SharedPhase,
}

/// The current phase of the node, shared with the request handlers.
#[derive(Clone, Default)]
struct SharedPhase(Arc<Mutex<Phase>>);

#[derive(Clone, Default)]
enum Phase {
    #[default]
    Starting,
    Running(Running),
    Stopping,
}

/// A running node, and the servers that belong to it.
#[derive(Clone)]
pub(crate) struct Running {
    pub(crate) node: Arc<Node>,
    pub(crate) local: Option<Arc<LocalServer>>,
    /// Metrics of the gateway's clients.
    pub(crate) gateway: Vec<ClientMetrics>,
}

impl NodeHttp {
    /// Binds `addr` and serves requests; the node is in its starting phase.
    ///
    /// # Errors
    /// The address cannot be bound, or no thread can be started.
    pub(crate) fn start(addr: SocketAddr) -> io::Result<Self> {
        let mut server = HttpServer::bind(addr)?;
        let phase = SharedPhase::default();
        let router = Router::new()
            .route("/health", get(health))
            .route("/ready", get(ready))
            .route("/metrics", get(metrics))
            .with_state(phase.clone());
        server.serve(router, HttpLimits::default(), GRACE)?;
        Ok(Self { server, phase })
    }

    /// The address that the server listens on.
    pub(crate) fn addr(&self) -> SocketAddr {
        self.server.addr()
    }

    /// Reports that the node runs, with the given servers.
    pub(crate) fn running(&self, running: Running) {
        self.phase.enter(Phase::Running(running));
    }

    /// Reports that the node is being unmounted. Requests are still answered until this is dropped.
    pub(crate) fn stopping(&self) {
        self.phase.enter(Phase::Stopping);
    }
}

impl SharedPhase {
    fn enter(&self, phase: Phase) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = phase;
    }

    fn phase(&self) -> Phase {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl std::fmt::Debug for SharedPhase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self.phase() {
            Phase::Starting => "Starting",
            Phase::Running(_) => "Running",
            Phase::Stopping => "Stopping",
        })
    }
}

/// Liveness: a prober restarts a process that fails here. A node that is not mounted passes, because it
/// mounts again without help.
async fn health(State(shared): State<SharedPhase>) -> Response {
    let status = match shared.phase() {
        Phase::Starting => "starting",
        Phase::Stopping => "stopping",
        Phase::Running(running) => match text(running).await {
            Some(_) => "ok",
            None => return json(StatusCode::SERVICE_UNAVAILABLE, "{\"status\":\"stuck\"}\n".to_owned()),
        },
    };
    json(StatusCode::OK, format!("{{\"status\":\"{status}\"}}\n"))
}

/// Readiness: whether the node's memory is part of the store, as far as the node knows.
async fn ready(State(shared): State<SharedPhase>) -> Response {
    let why = match shared.phase() {
        Phase::Starting => "the node is starting",
        Phase::Stopping => "the node is stopping",
        Phase::Running(running) => match running.node.status() {
            status if status.segment.is_none() => "not mounted: the master has removed this node",
            status if !status.heard => "the master does not answer",
            _ => return json(StatusCode::OK, "{\"ready\":true}\n".to_owned()),
        },
    };
    json(StatusCode::SERVICE_UNAVAILABLE, format!("{{\"ready\":false,\"why\":\"{why}\"}}\n"))
}

async fn metrics(State(shared): State<SharedPhase>) -> Response {
    let Phase::Running(running) = shared.phase() else {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    };
    match text(running).await {
        Some(text) => {
            ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text)
                .into_response()
        }
        None => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}

/// The metrics; `None` when the engine does not answer in time.
async fn text(running: Running) -> Option<String> {
    let text = move || {
        let mut clients = running.gateway;
        clients.extend(running.local.iter().flat_map(|local| local.client_metrics()));
        // Without clients, their metrics are left out.
        let of_clients = if clients.is_empty() { String::new() } else { metrics_text_of(&clients) };
        of_clients + &running.node.metrics_text()
    };
    let asked = tokio::task::spawn_blocking(text);
    tokio::time::timeout(ANSWER_TIMEOUT, asked).await.ok()?.ok()
}

fn json(status: StatusCode, body: String) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}
