//! The side of HTTP that clients see: connections with limits, on the runtime of the caller.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::header::{self, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::Sleep;

use super::body::Answer;

/// Pause after a connection could not be accepted, for example because no file descriptor is left.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);
/// How much of an answer a client must read within `stall_time_max`, bytes.
const PROGRESS_BYTES_MIN: usize = 64 << 10;
/// How long requests under way may take when the server stops.
const GRACE: Duration = Duration::from_secs(5);

/// What a client may do.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Most connections; further ones wait in the kernel.
    pub connections_max: usize,
    /// Longest head of a request, bytes.
    pub head_bytes_max: usize,
    /// Most header fields of a request.
    pub headers_max: usize,
    /// Longest time for the head of a request, and for a connection without one.
    pub head_time_max: Duration,
    /// Longest time in which a client that does not read all of its answer reads 64 KiB of it. After it the
    /// connection is closed, and its request is cancelled.
    pub stall_time_max: Duration,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            connections_max: 4_096,
            head_bytes_max: 64 << 10,
            headers_max: 64,
            head_time_max: Duration::from_secs(30),
            stall_time_max: Duration::from_secs(30),
        }
    }
}

/// A request with the address of its client.
pub type Asked = Request<Incoming>;

/// Accepts connections and answers requests until `stopped` is true; then requests under way may end.
/// Dropping the future closes every connection at once.
pub async fn serve<F, Fut>(
    listener: TcpListener,
    limits: ConnectionLimits,
    mut stopped: watch::Receiver<bool>,
    handler: F,
) -> io::Result<()>
where
    F: Fn(Asked, SocketAddr) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Response<Answer>> + Send + 'static,
{
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let handler = Arc::new(handler);
    let places = Arc::new(Semaphore::new(limits.connections_max.min(Semaphore::MAX_PERMITS)));
    let mut connections = JoinSet::new();
    while !*stopped.borrow() {
        let accepted = tokio::select! {
            _ = stopped.changed() => break,
            accepted = async {
                let place = Arc::clone(&places).acquire_owned().await.map_err(io::Error::other)?;
                io::Result::Ok((listener.accept().await?, place))
            } => accepted,
        };
        while connections.try_join_next().is_some() {}
        match accepted {
            Ok(((stream, from), place)) => {
                let (handler, stopped) = (Arc::clone(&handler), stopped.clone());
                connections.spawn(async move {
                    connection(stream, from, limits, stopped, &*handler).await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a connection cannot be accepted");
                tokio::time::sleep(ACCEPT_BACKOFF).await;
            }
        }
    }
    drop(listener);
    let all = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(GRACE, all).await.is_err() {
        tracing::debug!("connections that did not end in time are closed");
    }
    Ok(())
}

async fn connection<F, Fut>(
    stream: TcpStream,
    from: SocketAddr,
    limits: ConnectionLimits,
    mut stopped: watch::Receiver<bool>,
    handler: &F,
) where
    F: Fn(Asked, SocketAddr) -> Fut,
    Fut: Future<Output = Response<Answer>>,
{
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request: Asked| {
        let answer = match head_bytes(&request) > limits.head_bytes_max {
            true => Err(too_long()),
            false => Ok(handler(request, from)),
        };
        async move {
            match answer {
                Ok(answer) => Ok::<_, std::convert::Infallible>(answer.await),
                Err(refused) => Ok(refused),
            }
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_time_max)
        .max_buf_size(limits.head_bytes_max.max(8 << 10))
        .max_headers(limits.headers_max)
        .serve_connection(
            TokioIo::new(Stalling { stream, time_max: limits.stall_time_max, waiting: None }),
            service,
        );
    let mut connection = pin!(connection);
    loop {
        tokio::select! {
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!(%error, %from, "a client's connection ended");
                }
                return;
            }
            changed = stopped.changed() => {
                connection.as_mut().graceful_shutdown();
                if changed.is_err() {
                    // The server cannot be stopped any more: the connection goes on until its end.
                    let _ = connection.await;
                    return;
                }
            }
        }
    }
}

/// A stream that fails when its reader is too slow: an answer that is not read keeps an engine busy.
struct Stalling {
    stream: TcpStream,
    time_max: Duration,
    /// When a write first found no room, and the bytes written since.
    waiting: Option<(Pin<Box<Sleep>>, usize)>,
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
        match Pin::new(&mut self.stream).poll_write(cx, bytes) {
            Poll::Ready(Ok(len)) => {
                self.waiting = self.waiting.take().and_then(|(sleep, before)| {
                    let moved = before + len;
                    (moved < PROGRESS_BYTES_MIN).then_some((sleep, moved))
                });
                Poll::Ready(Ok(len))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => {
                let time_max = self.time_max;
                let (sleep, _) =
                    self.waiting.get_or_insert_with(|| (Box::pin(tokio::time::sleep(time_max)), 0));
                ready!(sleep.as_mut().poll(cx));
                Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
            }
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // All output has been written before a flush.
        self.waiting = None;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

fn head_bytes(request: &Asked) -> usize {
    let lines = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + 4);
    request.uri().path_and_query().map_or(0, |target| target.as_str().len()) + lines.sum::<usize>()
}

fn too_long() -> Response<Answer> {
    let mut response = Response::new(Answer::whole("the head of the request is too long"));
    *response.status_mut() = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}
