//! What people and their tools ask: `/health`, `/ready`, `/metrics`; `admin.rs` has what administers.
//!
//! On a thread and a runtime of its own. The master is not locked and not read from here. `/health` and `/ready` look at the
//! serving thread's [`Pulse`] and ask nothing, so that they are true however much is asked besides; everything else asks the
//! serving thread for a [`Snapshot`], or for the answer to a frame, and waits for it. Those who wait for a snapshot at the same
//! time get the same one.

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
use store_core::Secret;
use tokio::sync::{Mutex, Semaphore, oneshot};

use crate::Config;
use crate::admin;
use crate::config::HttpLimits;
use crate::http_server::HttpServer;
use crate::metrics::Snapshot;
use crate::pulse::Pulse;
use crate::server::Stopper;

/// What the serving thread is asked, and where it puts the answer.
pub(crate) enum Question {
    /// How it is.
    Snapshot(oneshot::Sender<Box<Snapshot>>),
    /// The answer to an RPC frame of an admin's.
    Call(Vec<u8>, oneshot::Sender<Vec<u8>>),
    /// None: somebody said a wrong secret.
    WrongBearer,
}

/// Questions that are with the serving thread at a time; others wait for theirs.
const QUESTIONS_MAX: usize = 64;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// How long whoever says a wrong secret waits for the answer.
const WRONG_BEARER_DELAY: Duration = Duration::from_millis(250);
/// How long answers under way have to end when the master has stopped.
const GRACE: Duration = Duration::from_millis(200);
/// How long the body of a request may take.
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

/// Asks the serving thread.
#[derive(Clone, Debug)]
pub(crate) struct Asker(Arc<Desk>);

#[derive(Debug)]
struct Desk {
    requests: SyncSender<Question>,
    /// As many as `requests` has room for.
    places: Semaphore,
    /// The last snapshot, and when it was asked for.
    latest: Mutex<Option<(Instant, Arc<Snapshot>)>>,
    pulse: Arc<Pulse>,
    waker: Arc<Waker>,
    stopping: Arc<AtomicBool>,
    admin_secret: Secret,
    http_hosts: Vec<String>,
}

/// Why the serving thread gave no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unanswered {
    /// It lives and has too much to do.
    Busy,
    /// It does not move.
    Stuck,
}

impl Http {
    pub(crate) fn bind(
        addr: SocketAddr,
        config: &Config,
        stopper: &Stopper,
        pulse: Arc<Pulse>,
    ) -> io::Result<(Self, Receiver<Question>)> {
        let server = HttpServer::bind(addr)?;
        let (requests, receiver) = sync_channel(QUESTIONS_MAX);
        let desk = Desk {
            requests,
            places: Semaphore::new(QUESTIONS_MAX),
            latest: Mutex::new(None),
            pulse,
            waker: Arc::clone(&stopper.waker),
            stopping: Arc::clone(&stopper.stop),
            admin_secret: config.store.admin_secret.clone(),
            http_hosts: config.http_hosts.clone(),
        };
        Ok((Self { server, limits: config.http, asker: Asker(Arc::new(desk)) }, receiver))
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.server.addr()
    }

    /// Serves, and `others` beside its own routes.
    pub(crate) fn start(&mut self, others: Router) -> io::Result<()> {
        let router = Router::new()
            .route("/health", get(health))
            .route("/ready", get(ready))
            .route("/metrics", get(metrics))
            .merge(admin::routes(self.asker.clone()))
            .with_state(self.asker.clone())
            .merge(others);
        self.server.serve(router, self.limits, GRACE)
    }
}

impl Unanswered {
    pub(crate) const fn text(self) -> &'static str {
        match self {
            Self::Busy => "the master is busy: ask again",
            Self::Stuck => "the master does not answer",
        }
    }
}

impl Asker {
    /// It hands out its last answers, and answers no snapshot any more.
    fn is_stopping(&self) -> bool {
        self.0.stopping.load(Ordering::Acquire)
    }

    /// How everything is, at some moment since this was called.
    ///
    /// # Errors
    /// The serving thread did not answer in time.
    pub(crate) async fn snapshot(&self) -> Result<Arc<Snapshot>, Unanswered> {
        let now = Instant::now();
        let shared = async {
            // Whoever comes while somebody asks waits here, and finds the answer of the next who asked, or asks.
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
    pub(crate) async fn call(&self, request: Vec<u8>) -> Result<Vec<u8>, Unanswered> {
        self.in_time(self.question(|answer| Question::Call(request, answer))).await
    }

    /// Somebody said a wrong secret: it is counted and logged, and the answer waits.
    pub(crate) async fn wrong_bearer(&self) {
        if self.0.requests.try_send(Question::WrongBearer).is_ok() {
            let _ = self.0.waker.wake();
        }
        tokio::time::sleep(WRONG_BEARER_DELAY).await;
    }

    /// Names under which it may be asked, besides those that are everybody's own.
    pub(crate) fn http_hosts(&self) -> &[String] {
        &self.0.http_hosts
    }

    /// What proves an admin.
    pub(crate) fn admin_secret(&self) -> &Secret {
        &self.0.admin_secret
    }

    async fn in_time<T>(&self, answer: impl Future<Output = Option<T>>) -> Result<T, Unanswered> {
        match tokio::time::timeout(ANSWER_TIMEOUT, answer).await {
            Ok(Some(answer)) => Ok(answer),
            _ if self.0.pulse.is_alive().await => Err(Unanswered::Busy),
            _ => Err(Unanswered::Stuck),
        }
    }

    /// `None`: there is nobody to ask any more.
    async fn question<T>(&self, question: impl FnOnce(oneshot::Sender<T>) -> Question) -> Option<T> {
        let _place = self.0.places.acquire().await.ok()?;
        let (send, receive) = oneshot::channel();
        self.0.requests.try_send(question(send)).ok()?;
        self.0.waker.wake().ok()?;
        receive.await.ok()
    }
}

/// Whether it lives: restart what says no.
async fn health(State(asker): State<Asker>) -> Response {
    if asker.is_stopping() {
        return json(StatusCode::OK, "{\"status\":\"stopping\"}\n".into());
    }
    if asker.0.pulse.is_alive().await {
        json(StatusCode::OK, asker.0.pulse.health())
    } else {
        json(StatusCode::SERVICE_UNAVAILABLE, "{\"status\":\"stuck\"}\n".into())
    }
}

/// Whether puts can succeed: send work elsewhere while it says no. Nodes do not ask; they mount to make it ready.
async fn ready(State(asker): State<Asker>) -> Response {
    let why = if asker.is_stopping() {
        "the master is stopping"
    } else if !asker.0.pulse.is_ready() {
        "no node has mounted memory"
    } else if !asker.0.pulse.is_alive().await {
        "the master is stuck"
    } else {
        return json(StatusCode::OK, "{\"ready\":true}\n".into());
    };
    json(StatusCode::SERVICE_UNAVAILABLE, format!("{{\"ready\":false,\"why\":\"{why}\"}}\n"))
}

/// In the format that is asked for: `Accept` with OpenMetrics, as Prometheus sends it, or plain text.
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
