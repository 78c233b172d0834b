//! HTTP for people and their tools: `/health`, `/ready`, `/metrics`; the administrative interface is in
//! `admin.rs`.
//!
//! It has a thread and a runtime of its own. The master is neither locked nor read from here. `/health` and
//! `/ready` read the serving thread's [`Liveness`] without a request to it, so that they stay correct under
//! any load; everything else requests a [`Snapshot`], or the answer to a frame, from the serving thread and
//! waits for it. Requests that wait for a snapshot at the same time get the same one.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use mio::Waker;
use store_core::ha::{HandOverError, MemberId};
use store_core::{ErrorCode, Secret};
use tokio::sync::{Mutex, Semaphore, oneshot};

use crate::Config;
use crate::admin;
use crate::config::HttpLimits;
use crate::http_server::HttpServer;
use crate::liveness::Liveness;
use crate::metrics::Snapshot;
use crate::mooncake;
use crate::server::Stopper;

/// A question to the serving thread, with the channel for its answer.
pub(crate) enum Question {
    /// The state of everything.
    Snapshot(oneshot::Sender<Box<Snapshot>>),
    /// The answer to an RPC frame with an admin's rights, and those of a tenant, if one is named.
    Call(Vec<u8>, Option<String>, oneshot::Sender<Vec<u8>>),
    /// Objects of a tenant, by key. Nothing counts as a use.
    Inspect(String, Vec<Vec<u8>>, oneshot::Sender<Vec<Result<Inspected, ErrorCode>>>),
    /// Another master is to lead. The answer is which, or why not; it comes when the switchover has begun.
    HandOver(Option<MemberId>, oneshot::Sender<Result<MemberId, HandOverError>>),
    /// No answer: a request had a wrong secret.
    WrongBearer,
}

/// An object, and where its readable replicas are.
#[derive(Debug)]
pub(crate) struct Inspected {
    /// Length, bytes.
    pub(crate) len: u64,
    /// The address in the export of the segment, and the endpoint of the segment's node.
    pub(crate) replicas: Vec<(u64, String)>,
}

/// Most questions at a time; further ones wait.
const QUESTIONS_MAX: usize = 64;
/// Longest wait for an answer of the serving thread.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// Delay of the answer to a wrong secret.
const WRONG_BEARER_DELAY: Duration = Duration::from_millis(250);
/// Time for requests under way to end when the master has stopped.
const GRACE: Duration = Duration::from_millis(200);
/// Longest time for the body of a request.
pub(crate) const BODY_TIME_MAX: Duration = Duration::from_secs(5);

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN_METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The HTTP server. Dropping it stops it.
#[derive(Debug)]
pub(crate) struct Http {
    server: HttpServer,
    limits: HttpLimits,
    asker: Asker,
}

/// Sends questions to the serving thread.
#[derive(Clone, Debug)]
pub(crate) struct Asker(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    requests: SyncSender<Question>,
    /// As many permits as `requests` has room for questions.
    places: Semaphore,
    /// The latest snapshot, and when it was requested.
    latest: Mutex<Option<(Instant, Arc<Snapshot>)>>,
    liveness: Arc<Liveness>,
    waker: Arc<Waker>,
    stopping: Arc<AtomicBool>,
    admin_secret: Secret,
    http_hosts: Vec<String>,
    multi_tenants: bool,
}

/// Why the serving thread did not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unanswered {
    /// It is alive, but has too much to do.
    Busy,
    /// It is stuck.
    Stuck,
}

impl Http {
    pub(crate) fn bind(
        addr: SocketAddr,
        config: &Config,
        stopper: &Stopper,
        liveness: Arc<Liveness>,
    ) -> io::Result<(Self, Receiver<Question>)> {
        let server = HttpServer::bind(addr)?;
        let (requests, receiver) = sync_channel(QUESTIONS_MAX);
        let shared = Shared {
            requests,
            places: Semaphore::new(QUESTIONS_MAX),
            latest: Mutex::new(None),
            liveness,
            waker: Arc::clone(&stopper.waker),
            stopping: Arc::clone(&stopper.stop),
            admin_secret: config.store.admin_secret.clone(),
            http_hosts: config.http_hosts.clone(),
            multi_tenants: config.store.multi_tenants,
        };
        Ok((Self { server, limits: config.http, asker: Asker(Arc::new(shared)) }, receiver))
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.server.addr()
    }

    /// Serves its own routes and `others`.
    pub(crate) fn start(&mut self, others: Router) -> io::Result<()> {
        let router = Router::new()
            .route("/health", get(health))
            .route("/ready", get(ready))
            .route("/metrics", get(metrics))
            .merge(admin::routes(self.asker.clone()))
            .with_state(self.asker.clone())
            .merge(mooncake::routes(self.asker.clone()))
            .merge(others);
        self.server.serve(router, self.limits, GRACE)
    }
}

impl Unanswered {
    pub(crate) const fn text(self) -> &'static str {
        match self {
            Self::Busy => "the master is busy: try again later",
            Self::Stuck => "the master does not respond: check its log, or restart it",
        }
    }
}

impl Asker {
    /// Whether the master is stopping: it sends its last answers and takes no snapshot any more.
    fn is_stopping(&self) -> bool {
        self.0.stopping.load(Ordering::Acquire)
    }

    /// The state of everything, at a moment after this was called.
    ///
    /// # Errors
    /// The serving thread did not answer in time.
    pub(crate) async fn snapshot(&self) -> Result<Arc<Snapshot>, Unanswered> {
        let now = Instant::now();
        let shared = async {
            // Requests that arrive meanwhile wait here. They get the next request's snapshot, or request one
            // themselves.
            let mut latest = self.0.latest.lock().await;
            if let Some((asked, snapshot)) = &*latest
                && *asked >= now
            {
                return Some(Arc::clone(snapshot));
            }
            let asked = Instant::now();
            let snapshot = Arc::<Snapshot>::from(self.question(Question::Snapshot).await?);
            *latest = Some((asked, Arc::clone(&snapshot)));
            Some(snapshot)
        };
        self.in_time(shared).await
    }

    /// The answer to an RPC frame.
    ///
    /// # Errors
    /// The serving thread did not answer in time.
    pub(crate) async fn call(&self, request: Vec<u8>, tenant: Option<String>) -> Result<Vec<u8>, Unanswered> {
        self.in_time(self.question(|answer| Question::Call(request, tenant, answer))).await
    }

    /// Objects of a tenant, one result per key.
    ///
    /// # Errors
    /// The serving thread did not answer in time.
    pub(crate) async fn inspect(
        &self,
        tenant: &str,
        keys: Vec<Vec<u8>>,
    ) -> Result<Vec<Result<Inspected, ErrorCode>>, Unanswered> {
        let tenant = tenant.to_owned();
        self.in_time(self.question(|answer| Question::Inspect(tenant, keys, answer))).await
    }

    /// Begins a switchover. Returns which member is to lead, or why none.
    ///
    /// # Errors
    /// The serving thread did not answer in time.
    pub(crate) async fn hand_over(
        &self,
        to: Option<MemberId>,
    ) -> Result<Result<MemberId, HandOverError>, Unanswered> {
        self.in_time(self.question(|answer| Question::HandOver(to, answer))).await
    }

    /// Whether there are other tenants than the default one.
    pub(crate) fn has_tenants(&self) -> bool {
        self.0.multi_tenants
    }

    /// Reports a wrong secret to be counted and logged, and delays the answer.
    pub(crate) async fn wrong_bearer(&self) {
        if self.0.requests.try_send(Question::WrongBearer).is_ok() {
            let _ = self.0.waker.wake();
        }
        tokio::time::sleep(WRONG_BEARER_DELAY).await;
    }

    /// Configured host names, see `hosts.rs`.
    pub(crate) fn http_hosts(&self) -> &[String] {
        &self.0.http_hosts
    }

    /// The admin secret.
    pub(crate) fn admin_secret(&self) -> &Secret {
        &self.0.admin_secret
    }

    async fn in_time<T>(&self, answer: impl Future<Output = Option<T>>) -> Result<T, Unanswered> {
        match tokio::time::timeout(ANSWER_TIMEOUT, answer).await {
            Ok(Some(answer)) => Ok(answer),
            _ if self.0.liveness.is_alive().await => Err(Unanswered::Busy),
            _ => Err(Unanswered::Stuck),
        }
    }

    /// `None`: the serving thread has ended.
    async fn question<T>(&self, question: impl FnOnce(oneshot::Sender<T>) -> Question) -> Option<T> {
        let _place = self.0.places.acquire().await.ok()?;
        let (send, receive) = oneshot::channel();
        self.0.requests.try_send(question(send)).ok()?;
        self.0.waker.wake().ok()?;
        receive.await.ok()
    }
}

/// Whether the serving thread is alive. If not, restart the process.
async fn health(State(asker): State<Asker>) -> Response {
    if asker.is_stopping() {
        return json(StatusCode::OK, "{\"status\":\"stopping\"}\n".into());
    }
    if asker.0.liveness.is_alive().await {
        json(StatusCode::OK, asker.0.liveness.health())
    } else {
        json(StatusCode::SERVICE_UNAVAILABLE, "{\"status\":\"stuck\"}\n".into())
    }
}

/// Whether puts can succeed. If not, send work elsewhere. Nodes do not use it: their mounts make the master
/// ready.
async fn ready(State(asker): State<Asker>) -> Response {
    let why = if asker.is_stopping() {
        "the master is stopping"
    } else if !asker.0.liveness.is_ready() {
        "no node has mounted memory: start a node"
    } else if !asker.0.liveness.is_alive().await {
        "the master does not respond"
    } else {
        return json(StatusCode::OK, "{\"ready\":true}\n".into());
    };
    json(StatusCode::SERVICE_UNAVAILABLE, format!("{{\"ready\":false,\"why\":\"{why}\"}}\n"))
}

/// In the requested format: OpenMetrics if `Accept` lists it, as Prometheus does, otherwise plain text.
async fn metrics(State(asker): State<Asker>, headers: HeaderMap) -> Response {
    let mut accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let open = accepted.any(|value| value.contains("application/openmetrics-text"));
    let (kind, text) = match asker.snapshot().await {
        Ok(snapshot) if open => (OPEN_METRICS, snapshot.encode()),
        Ok(snapshot) => (PLAIN_METRICS, snapshot.encode_plain()),
        Err(why) => return (StatusCode::SERVICE_UNAVAILABLE, why.text()).into_response(),
    };
    match text {
        Ok(text) => ([(header::CONTENT_TYPE, kind)], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

fn json(status: StatusCode, body: String) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}
