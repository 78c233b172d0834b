//! [`HttpServer`]: what the HTTP servers of this workspace share, whatever their routes: a thread, and limits
//! that prevent silent and slow clients from blocking it.
//!
//! ```text
//!   accept ──▶ a place ──────▶ head ──────────▶ body ──────────────▶ answer ──────────────┐
//!              (the longest    head_ms_max      checked by the route  stall_ms_max        │
//!              silent one's)   ▲─────────────────── the next request ◀────────────────────┘
//! ```
//!
//! `/health` and `/ready` have a reserve of places for when all others are busy; see `http_places.rs`.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::{HeaderValue, Request, Response, StatusCode, Version, header};
use hyper::body::{Body as HttpBody, Bytes, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Sleep;

use crate::config::HttpLimits;
use crate::http_places::{AtWork, Heard, Place, Places, is_vital};

/// Longest head of a request, bytes. Bytes beyond it that were read already are dropped.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// Most header fields of a request.
const HEADERS_MAX: usize = 64;
/// How much of an answer a client must read within `stall_ms_max`, bytes.
const PROGRESS_BYTES_MIN: usize = 64 << 10;
/// Pause after a connection could not be accepted, for example because no file descriptor is left.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// An HTTP server on its own thread. Dropping it stops it.
///
/// ```
/// use axum::{Router, routing::get};
/// use store_master::{HttpLimits, HttpServer};
///
/// let mut server = HttpServer::bind("127.0.0.1:0".parse()?)?;
/// let router = Router::new().route("/", get(|| async { "here" }));
/// server.serve(router, HttpLimits::default(), std::time::Duration::ZERO)?;
/// println!("http://{}/", server.addr());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct HttpServer {
    addr: SocketAddr,
    /// `None` once it serves.
    listener: Option<TcpListener>,
    running: Option<(watch::Sender<bool>, JoinHandle<()>)>,
}

impl HttpServer {
    /// Listens; with port 0 the system chooses a port. Requests are not answered before
    /// [`serve`](Self::serve).
    ///
    /// # Errors
    /// The error of the operating system.
    pub fn bind(addr: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(addr)?;
        listener.set_nonblocking(true)?;
        Ok(Self { addr: listener.local_addr()?, listener: Some(listener), running: None })
    }

    /// The address at which it listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Serves on a thread of its own; routes receive the client's address (`ConnectInfo<SocketAddr>`). Call
    /// it once. `grace`: how long requests under way may take to end when the server stops.
    ///
    /// # Errors
    /// The operating system did not create a thread.
    pub fn serve(&mut self, router: Router, limits: HttpLimits, grace: Duration) -> io::Result<()> {
        let Some(listener) = self.listener.take() else { return Ok(()) };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, stopped) = watch::channel(false);
        let serve = async move {
            match tokio::net::TcpListener::from_std(listener) {
                Ok(listener) => accept(listener, router, limits, grace, stopped).await,
                Err(error) => tracing::error!(%error, "the HTTP server cannot start"),
            }
        };
        let thread = std::thread::Builder::new().name("snowskin-http".into()).spawn(move || {
            runtime.block_on(serve);
            // A blocking task of a route must not prevent the process from ending.
            runtime.shutdown_background();
        })?;
        self.running = Some((stop, thread));
        Ok(())
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.running.take() {
            let _ = stop.send(true);
            if thread.join().is_err() {
                tracing::error!("the HTTP server's thread panicked");
            }
        }
    }
}

/// Whether a `Host` (RFC 9110 §7.2) is an address, or `localhost`, with or without a port: names that no
/// other party's DNS controls. Requests of a web page whose host name resolves to this host (DNS rebinding)
/// carry that name.
#[must_use]
pub fn is_own_host(host: &str) -> bool {
    let is_port = |port: &str| port.bytes().all(|digit| digit.is_ascii_digit());
    if let Some(rest) = host.strip_prefix('[') {
        let Some((ip, port)) = rest.split_once(']') else { return false };
        return ip.parse::<Ipv6Addr>().is_ok() && port.strip_prefix(':').map_or(port.is_empty(), is_port);
    }
    let (name, port) = host.split_once(':').unwrap_or((host, ""));
    is_port(port) && (name.eq_ignore_ascii_case("localhost") || name.parse::<Ipv4Addr>().is_ok())
}

async fn accept(
    listener: tokio::net::TcpListener,
    router: Router,
    limits: HttpLimits,
    grace: Duration,
    mut stopped: watch::Receiver<bool>,
) {
    let places = Places::new(limits.connections_max as usize);
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            _ = stopped.changed() => break,
            accepted = async {
                let client = listener.accept().await?;
                // A connection without a place waits here, and those behind it in the kernel.
                io::Result::Ok((client, places.enter().await))
            } => accepted,
        };
        while connections.try_join_next().is_some() {}
        let ((stream, from), place) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "an HTTP connection cannot be accepted");
                tokio::time::sleep(ACCEPT_BACKOFF).await;
                continue;
            }
        };
        let (router, stopped) = (router.clone(), stopped.clone());
        connections.spawn(async move {
            serve(stream, from, router, limits, place, stopped).await;
        });
    }
    drop(listener);
    let all = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(grace, all).await.is_err() {
        tracing::debug!("HTTP connections that did not end in time are closed");
    }
}

async fn serve(
    stream: TcpStream,
    from: SocketAddr,
    router: Router,
    limits: HttpLimits,
    place: Place,
    mut stopped: watch::Receiver<bool>,
) {
    // Answers are written in few pieces, and each should be sent at once.
    let _ = stream.set_nodelay(true);
    let io = TokioIo::new(Stalling::new(stream, ms(limits.stall_ms_max), Some(place.heard())));
    let (service, place) = (TowerToHyperService::new(router), &place);
    let service = service_fn(move |mut request: Request<Incoming>| {
        let refused = match place.begin(is_vital(request.uri().path())) {
            None => {
                Err(refusal(StatusCode::SERVICE_UNAVAILABLE, "all connections are in use: try again later"))
            }
            Some(at_work) => check(&request).map_or(Ok(at_work), Err),
        };
        let answer = refused.map(|at_work| {
            request.extensions_mut().insert(ConnectInfo(from));
            (service.call(request), at_work)
        });
        async move {
            match answer {
                Ok((answer, at_work)) => {
                    let answer = answer.await?;
                    Ok(answer.map(|body| Body::new(Attended { body, _at_work: at_work })))
                }
                Err(refused) => Ok::<_, std::convert::Infallible>(refused),
            }
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(ms(limits.head_ms_max))
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(io, service);
    let mut connection = pin!(connection);
    let mut stopping = false;
    loop {
        tokio::select! {
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "an HTTP connection ended");
                }
                return;
            }
            () = place.wanted() => {
                tracing::debug!(%from, "an HTTP connection was silent, and its place is needed");
                return;
            }
            _ = stopped.changed(), if !stopping => {
                stopping = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}

/// Refuses requests that no route should see: with a second `Host`, which two readers could interpret
/// differently; without a required `Host` (RFC 9112 §3.2); with a head that is too long.
fn check(request: &Request<Incoming>) -> Option<Response<Body>> {
    let hosts = request.headers().get_all(header::HOST).iter().count();
    if hosts > 1 || (hosts == 0 && request.version() == Version::HTTP_11) {
        return Some(refusal(StatusCode::BAD_REQUEST, "send exactly one Host header"));
    }
    let lines = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + 4);
    let target = request.uri().path_and_query().map_or(0, |target| target.as_str().len());
    if target + lines.sum::<usize>() > HEAD_BYTES_MAX {
        return Some(refusal(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "send at most 64 KiB of headers"));
    }
    None
}

/// An answer after which the connection is closed.
fn refusal(status: StatusCode, why: &'static str) -> Response<Body> {
    let mut response = Response::new(Body::from(why));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    if status == StatusCode::SERVICE_UNAVAILABLE {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}

/// The body of an answer; its connection is busy until all of it was produced.
struct Attended<B> {
    body: B,
    _at_work: AtWork,
}

impl<B: HttpBody<Data = Bytes> + Unpin> HttpBody for Attended<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

fn ms(ms: u32) -> Duration {
    Duration::from_millis(ms.into())
}

/// A stream that fails when its reader is too slow: unread answers use memory, and a place.
struct Stalling<S> {
    stream: S,
    time_max: Duration,
    /// When a write first found no room, and the bytes written since.
    waiting: Option<(Pin<Box<Sleep>>, usize)>,
    /// Records that bytes are transferred.
    heard: Option<Heard>,
}

impl<S> Stalling<S> {
    fn new(stream: S, time_max: Duration, heard: Option<Heard>) -> Self {
        Self { stream, time_max, waiting: None, heard }
    }

    fn heard(&self) {
        if let Some(heard) = &self.heard {
            heard.now();
        }
    }

    fn watch(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        match &written {
            Poll::Ready(Ok(len)) => {
                self.heard();
                self.waiting = self.waiting.take().and_then(|(sleep, before)| {
                    let moved = before + len;
                    (moved < PROGRESS_BYTES_MIN).then_some((sleep, moved))
                });
                written
            }
            Poll::Ready(Err(_)) => written,
            Poll::Pending => {
                let time_max = self.time_max;
                let (sleep, _) =
                    self.waiting.get_or_insert_with(|| (Box::pin(tokio::time::sleep(time_max)), 0));
                ready!(sleep.as_mut().poll(cx));
                Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
            }
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Stalling<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let (before, read) = (out.filled().len(), Pin::new(&mut self.stream).poll_read(cx, out));
        if out.filled().len() > before {
            self.heard();
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Stalling<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.watch(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.watch(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::future::poll_fn;
    use std::io::{Read as _, Write as _};

    use axum::routing::get;

    use super::*;

    #[test]
    fn only_addresses_and_localhost_are_own_hosts() {
        for host in
            ["localhost", "LocalHost:9003", "127.0.0.1:9003", "127.0.0.1", "10.1.2.3", "[::1]:9003", "[::1]"]
        {
            assert!(is_own_host(host), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:9003",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "localhost:evil",
            "",
            ":9003",
            "[evil]:1",
            "[::1",
            "[::1]x",
            "::1",
        ] {
            assert!(!is_own_host(host), "{host}");
        }
    }

    #[test]
    fn a_route_may_take_longer_than_any_client() {
        let mut server = HttpServer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let late = |ConnectInfo(from): ConnectInfo<SocketAddr>| async move {
            tokio::time::sleep(Duration::from_millis(2_500)).await; // timing: longer than the limits below
            from.to_string()
        };
        let limits = HttpLimits { connections_max: 1, head_ms_max: 1_000, stall_ms_max: 1_000 };
        server.serve(Router::new().route("/", get(late)), limits, Duration::ZERO).unwrap();
        let mut stream = std::net::TcpStream::connect(server.addr()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let asker = stream.local_addr().unwrap().to_string();
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with(&asker), "{answer}");
    }

    /// Accepts this many bytes, then none for a moment, and so on.
    struct Taking {
        bytes: usize,
        moment: Option<Pin<Box<Sleep>>>,
    }

    impl AsyncWrite for Taking {
        fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
            let moment =
                self.moment.get_or_insert_with(|| Box::pin(tokio::time::sleep(Duration::from_millis(5)))); // timing: the reader pauses
            ready!(moment.as_mut().poll(cx));
            self.moment = None;
            Poll::Ready(Ok(self.bytes))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// Writes this many times to a reader that accepts `bytes` bytes at a time.
    fn write(bytes: usize, times: usize, flushing: bool) -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        runtime.block_on(async {
            let mut stream = Stalling::new(Taking { bytes, moment: None }, Duration::from_millis(100), None);
            for _ in 0..times {
                poll_fn(|cx| Pin::new(&mut stream).poll_write(cx, &[0; 1])).await?;
                if flushing {
                    poll_fn(|cx| Pin::new(&mut stream).poll_flush(cx)).await?;
                }
            }
            Ok(())
        })
    }

    #[test]
    fn a_client_that_reads_a_few_bytes_at_a_time_is_cut_off_and_one_that_reads_pieces_is_not() {
        let error = write(1 << 10, 63, false).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        write(PROGRESS_BYTES_MIN, 100, false).unwrap();
        // Small answers that are read completely are allowed.
        write(1, 100, true).unwrap();
    }
}
