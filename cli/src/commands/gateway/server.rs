//! Connections: how many, how long, how large; and how they end.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, Sleep};

/// What a server holds its clients to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Connections at a time; more wait until one is over.
    pub(super) connections_max: usize,
    /// How long the head of a request may take, and a connection may lie idle.
    pub(super) head_time_max: Duration,
    /// How long a client may take nothing of an answer.
    pub(super) stall_time_max: Duration,
    /// How long requests under way may take to end when the server stops.
    pub(super) grace: Duration,
}

/// Longest head of a request, bytes.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// Most lines of it.
const HEADERS_MAX: usize = 64;
/// How long not to accept after that failed: no descriptor is left.
const REST: Duration = Duration::from_millis(100);

/// An HTTP server on a thread of its own. Dropping it stops it.
#[derive(Debug)]
pub(super) struct Server {
    addr: SocketAddr,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens and serves.
    ///
    /// # Errors
    /// The system's reason.
    pub(super) fn start(addr: SocketAddr, router: Router, limits: Limits) -> io::Result<Self> {
        let listener = TcpListener::bind(addr)?;
        listener.set_nonblocking(true)?;
        let addr = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, stopped) = watch::channel(false);
        let serve = async move {
            match tokio::net::TcpListener::from_std(listener) {
                Ok(listener) => accept(listener, router, limits, stopped).await,
                Err(error) => tracing::error!(%error, "the gateway cannot listen"),
            }
        };
        let thread = std::thread::Builder::new()
            .name("snowskin-http".into())
            .spawn(move || runtime.block_on(serve))?;
        Ok(Self { addr, stop, thread: Some(thread) })
    }

    pub(super) fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.stop.send(true);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the gateway's thread panicked");
        }
    }
}

async fn accept(
    listener: tokio::net::TcpListener,
    router: Router,
    limits: Limits,
    mut stopped: watch::Receiver<bool>,
) {
    let room = Arc::new(Semaphore::new(limits.connections_max));
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            _ = stopped.changed() => break,
            accepted = async {
                // First the place, then the client: who finds none waits in the kernel.
                let place = Arc::clone(&room).acquire_owned().await;
                (listener.accept().await, place)
            } => accepted,
        };
        while connections.try_join_next().is_some() {}
        let (stream, place) = match accepted {
            (Ok((stream, _)), Ok(place)) => (stream, place),
            (Ok(_), Err(_)) => break,
            (Err(error), _) => {
                tracing::warn!(%error, "accepting a client failed");
                tokio::time::sleep(REST).await;
                continue;
            }
        };
        let (router, stopped) = (router.clone(), stopped.clone());
        connections.spawn(async move {
            serve(stream, router, limits, stopped).await;
            drop(place);
        });
    }
    drop(listener);
    let all = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(limits.grace, all).await.is_err() {
        tracing::warn!("connections that did not end in time are cut");
    }
}

async fn serve(stream: TcpStream, router: Router, limits: Limits, mut stopped: watch::Receiver<bool>) {
    // Answers are written in few pieces; what is written is wanted at once.
    let _ = stream.set_nodelay(true);
    let io = TokioIo::new(Stalling::new(stream, limits.stall_time_max));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_time_max)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(io, TowerToHyperService::new(router));
    let mut connection = pin!(connection);
    let mut stopping = false;
    loop {
        tokio::select! {
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "a connection ended");
                }
                return;
            }
            _ = stopped.changed(), if !stopping => {
                stopping = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}

/// A stream that fails when its reader takes nothing for too long: what it is to be sent takes up memory.
struct Stalling {
    stream: TcpStream,
    time_max: Duration,
    /// Since a write found no room.
    waiting: Option<Pin<Box<Sleep>>>,
}

impl Stalling {
    fn new(stream: TcpStream, time_max: Duration) -> Self {
        Self { stream, time_max, waiting: None }
    }

    fn watch<T>(&mut self, cx: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.waiting = None;
            return result;
        }
        let deadline = Instant::now() + self.time_max;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
        ready!(waiting.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Stalling {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, out)
    }
}

impl AsyncWrite for Stalling {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.watch(cx, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.watch(cx, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
