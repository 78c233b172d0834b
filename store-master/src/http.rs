//! What people and their tools ask: `/health`, `/ready`, `/metrics`; `admin.rs` has what administers.
//!
//! On a thread and a runtime of its own. The master is not locked and not read from here: a request asks the serving thread
//! for a [`Snapshot`] and waits for it, so that `/health` fails when that thread hangs.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use mio::Waker;
use tokio::sync::oneshot;

use store_core::Secret;

use crate::admin;
use crate::config::HttpLimits;
use crate::http_server::HttpServer;
use crate::metrics::Snapshot;

/// What the serving thread is asked, and where it puts the answer.
pub(crate) enum Question {
    /// How it is.
    Snapshot(oneshot::Sender<Box<Snapshot>>),
    /// The answer to an RPC frame of an admin's.
    Call(Vec<u8>, oneshot::Sender<Vec<u8>>),
}

const QUESTIONS_MAX: usize = 64;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// How long answers under way have to end when the master has stopped.
const GRACE: Duration = Duration::from_millis(200);
/// How long the body of a request may take.
pub(crate) const BODY_TIME_MAX: Duration = Duration::from_secs(5);

/// The HTTP server. Dropping it stops it.
#[derive(Debug)]
pub(crate) struct Http {
    server: HttpServer,
    limits: HttpLimits,
    asker: Asker,
}

/// Asks the serving thread.
#[derive(Clone, Debug)]
pub(crate) struct Asker {
    requests: SyncSender<Question>,
    waker: Arc<Waker>,
    stopping: Arc<AtomicBool>,
    admin_secret: Arc<Secret>,
}

impl Http {
    pub(crate) fn bind(
        addr: SocketAddr,
        limits: HttpLimits,
        waker: Arc<Waker>,
        stopping: Arc<AtomicBool>,
        admin_secret: Secret,
    ) -> io::Result<(Self, Receiver<Question>)> {
        let server = HttpServer::bind(addr)?;
        let (requests, receiver) = sync_channel(QUESTIONS_MAX);
        let asker = Asker { requests, waker, stopping, admin_secret: Arc::new(admin_secret) };
        Ok((Self { server, limits, asker }, receiver))
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
            .merge(admin::routes())
            .with_state(self.asker.clone())
            .merge(others);
        self.server.serve(router, self.limits, GRACE)
    }
}

impl Asker {
    /// It hands out its last answers, and answers no snapshot any more.
    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// `None`: the serving thread did not answer in time.
    pub(crate) async fn snapshot(&self) -> Option<Box<Snapshot>> {
        self.question(Question::Snapshot).await
    }

    /// The answer to an RPC frame. `None`: the serving thread did not answer in time.
    pub(crate) async fn call(&self, request: Vec<u8>) -> Option<Vec<u8>> {
        self.question(|answer| Question::Call(request, answer)).await
    }

    /// What proves an admin.
    pub(crate) fn admin_secret(&self) -> &Secret {
        &self.admin_secret
    }

    async fn question<T>(&self, question: impl FnOnce(oneshot::Sender<T>) -> Question) -> Option<T> {
        let (send, receive) = oneshot::channel();
        self.requests.try_send(question(send)).ok()?;
        self.waker.wake().ok()?;
        tokio::time::timeout(ANSWER_TIMEOUT, receive).await.ok()?.ok()
    }
}

/// Whether it lives: restart what says no.
async fn health(State(asker): State<Asker>) -> Response {
    if asker.is_stopping() {
        return json(StatusCode::OK, "{\"status\":\"stopping\"}\n".into());
    }
    match asker.snapshot().await {
        Some(snapshot) => json(StatusCode::OK, snapshot.health()),
        None => json(StatusCode::SERVICE_UNAVAILABLE, "{\"status\":\"stuck\"}\n".into()),
    }
}

/// Whether puts can succeed: send work elsewhere while it says no. Nodes do not ask; they mount to make it ready.
async fn ready(State(asker): State<Asker>) -> Response {
    if asker.is_stopping() {
        let why = "{\"ready\":false,\"why\":\"the master is stopping\"}\n";
        return json(StatusCode::SERVICE_UNAVAILABLE, why.into());
    }
    match asker.snapshot().await {
        Some(snapshot) if snapshot.is_ready() => json(StatusCode::OK, "{\"ready\":true}\n".into()),
        Some(_) => json(
            StatusCode::SERVICE_UNAVAILABLE,
            "{\"ready\":false,\"why\":\"no node has mounted memory\"}\n".into(),
        ),
        None => json(
            StatusCode::SERVICE_UNAVAILABLE,
            "{\"ready\":false,\"why\":\"the master is stuck\"}\n".into(),
        ),
    }
}

async fn metrics(State(asker): State<Asker>) -> Response {
    match asker.snapshot().await.map(|snapshot| snapshot.encode()) {
        Some(Ok(text)) => {
            ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text)
                .into_response()
        }
        Some(Err(_)) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        None => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}

fn json(status: StatusCode, body: String) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}
