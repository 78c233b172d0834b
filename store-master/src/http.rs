//! What people and their tools ask: `/health`, `/ready`, `/metrics`; and, with other routes, whatever they serve.
//!
//! On a thread and a runtime of its own. The master is not locked and not read from here: a request asks the serving thread
//! for a [`Snapshot`] and waits for it, so that `/health` fails when that thread hangs.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use mio::Waker;
use tokio::sync::oneshot;

use crate::metrics::Snapshot;

/// Where the serving thread puts the snapshot.
pub(crate) type SnapshotRequest = oneshot::Sender<Box<Snapshot>>;

const SNAPSHOT_REQUESTS_MAX: usize = 64;
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(2);

/// The HTTP server. Dropping it stops it.
#[derive(Debug)]
pub(crate) struct Http {
    addr: SocketAddr,
    listener: Option<TcpListener>,
    asker: Asker,
    running: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

#[derive(Clone, Debug)]
struct Asker {
    requests: SyncSender<SnapshotRequest>,
    waker: Arc<Waker>,
}

impl Http {
    pub(crate) fn bind(addr: SocketAddr, waker: Arc<Waker>) -> io::Result<(Self, Receiver<SnapshotRequest>)> {
        let listener = TcpListener::bind(addr)?;
        listener.set_nonblocking(true)?;
        let addr = listener.local_addr()?;
        let (requests, receiver) = sync_channel(SNAPSHOT_REQUESTS_MAX);
        Ok((
            Self { addr, listener: Some(listener), asker: Asker { requests, waker }, running: None },
            receiver,
        ))
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Serves, and `others` beside its own routes.
    pub(crate) fn start(&mut self, others: Router) -> io::Result<()> {
        let Some(listener) = self.listener.take() else { return Ok(()) };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, stopped) = oneshot::channel();
        let asker = self.asker.clone();
        let serve = async move {
            let listener = match tokio::net::TcpListener::from_std(listener) {
                Ok(listener) => listener,
                Err(error) => return tracing::error!(%error, "no /health and /metrics"),
            };
            let router = Router::new()
                .route("/health", get(health))
                .route("/ready", get(ready))
                .route("/metrics", get(metrics))
                .with_state(asker)
                .merge(others);
            tokio::select! {
                result = async { axum::serve(listener, router).await } => {
                    if let Err(error) = result {
                        tracing::error!(%error, "no more /health and /metrics");
                    }
                }
                _ = stopped => {}
            }
        };
        let thread =
            thread::Builder::new().name("snowskin-http".into()).spawn(move || runtime.block_on(serve))?;
        self.running = Some((stop, thread));
        Ok(())
    }
}

impl Drop for Http {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.running.take() {
            let _ = stop.send(());
            let _ = thread.join();
        }
    }
}

impl Asker {
    /// `None`: the serving thread did not answer in time.
    async fn snapshot(&self) -> Option<Box<Snapshot>> {
        let (send, receive) = oneshot::channel();
        self.requests.try_send(send).ok()?;
        self.waker.wake().ok()?;
        tokio::time::timeout(SNAPSHOT_TIMEOUT, receive).await.ok()?.ok()
    }
}

async fn health(State(asker): State<Asker>) -> Response {
    match asker.snapshot().await {
        Some(snapshot) => json(StatusCode::OK, snapshot.health()),
        None => json(StatusCode::SERVICE_UNAVAILABLE, "{\"status\":\"stuck\"}\n".into()),
    }
}

async fn ready(State(asker): State<Asker>) -> Response {
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
