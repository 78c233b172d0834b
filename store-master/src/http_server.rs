//! [`HttpServer`]: what the HTTP servers of this workspace share, whatever their routes are: a thread, and limits that keep
//! clients who say nothing, or take nothing, from holding it up.
//!
//! ```text
//!   accept ──▶ a place ──────▶ head ──────────▶ body ──────────────▶ answer ──────────────┐
//!              (the longest    head_ms_max      its route's business  stall_ms_max        │
//!              silent one's)    ▲─────────────────── the next request ◀───────────────────┘
//! ```
//!
//! `/health` and `/ready` have a reserve of places, for when all others are at work; see `http_places.rs`.

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

/// Longest head of a request, bytes. What is read beyond it before that is noticed is dropped.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// Most lines of it.
const HEADERS_MAX: usize = 64;
/// What a client has to take of an answer within `stall_ms_max`, bytes.
const PROGRESS_BYTES_MIN: usize = 64 << 10;
/// How long not to accept after that failed: no descriptor is left.
const REST: Duration = Duration::from_millis(100);

/// An HTTP server on a thread of its own. Dropping it stops it.
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
    /// Until it serves.
    listener: Option<TcpListener>,
    running: Option<(watch::Sender<bool>, JoinHandle<()>)>,
}

impl HttpServer {
    /// Listens. Port 0 picks one. Nobody is answered before [`serve`](Self::serve).
    ///
    /// # Errors
    /// The system's reason.
    pub fn bind(addr: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(addr)?;
        listener.set_nonblocking(true)?;
        Ok(Self { addr: listener.local_addr()?, listener: Some(listener), running: None })
    }

    /// Where it listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Answers from now on, on a thread of its own; routes are told who asks (`ConnectInfo<SocketAddr>`). Once is enough.
    /// `grace`: how long requests under way have to end when it stops.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn serve(&mut self, router: Router, limits: HttpLimits, grace: Duration) -> io::Result<()> {
        let Some(listener) = self.listener.take() else { return Ok(()) };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, stopped) = watch::channel(false);
        let serve = async move {
            match tokio::net::TcpListener::from_std(listener) {
                Ok(listener) => accept(listener, router, limits, grace, stopped).await,
                Err(error) => tracing::error!(%error, "HTTP is not served"),
            }
        };
        let thread = std::thread::Builder::new().name("snowskin-http".into()).spawn(move || {
            runtime.block_on(serve);
            // A route that hangs in a thread of its own must not keep the process.
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

/// Whether a `Host` (RFC 9110 §7.2) is an address, or `localhost`, with a port or without: what no other's DNS says. A web page
/// whose host's name was made to mean this host (DNS rebinding) still asks for that name.
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
                // Whoever finds no place waits here, and those behind in the kernel.
                io::Result::Ok((client, places.enter().await))
            } => accepted,
        };
        while connections.try_join_next().is_some() {}
        let ((stream, from), place) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "accepting a client failed");
                tokio::time::sleep(REST).await;
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
        tracing::debug!("HTTP connections that did not end in time are cut");
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
    // Answers are written in few pieces; what is written is wanted at once.
    let _ = stream.set_nodelay(true);
    let io = TokioIo::new(Stalling::new(stream, ms(limits.stall_ms_max), Some(place.heard())));
    let (service, place) = (TowerToHyperService::new(router), &place);
    let service = service_fn(move |mut request: Request<Incoming>| {
        let refused = match place.begin(is_vital(request.uri().path())) {
            None => Err(refusal(StatusCode::SERVICE_UNAVAILABLE, "all connections are in use: ask again")),
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
                tracing::debug!(%from, "an HTTP connection was silent, and its place is wanted");
                return;
            }
            _ = stopped.changed(), if !stopping => {
                stopping = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}

/// What no route should see: a second `Host`, with which two readers of one request could disagree whom it is for; none, where
/// there must be one (RFC 9112 §3.2); a head that is too long.
fn check(request: &Request<Incoming>) -> Option<Response<Body>> {
    let hosts = request.headers().get_all(header::HOST).iter().count();
    if hosts > 1 || (hosts == 0 && request.version() == Version::HTTP_11) {
        return Some(refusal(StatusCode::BAD_REQUEST, "say one Host"));
    }
    let lines = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + 4);
    let target = request.uri().path_and_query().map_or(0, |target| target.as_str().len());
    if target + lines.sum::<usize>() > HEAD_BYTES_MAX {
        return Some(refusal(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "send 64 KiB of headers at most"));
    }
    None
}

/// An answer behind which the connection ends.
fn refusal(status: StatusCode, why: &'static str) -> Response<Body> {
    let mut response = Response::new(Body::from(why));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    if status == StatusCode::SERVICE_UNAVAILABLE {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}

/// An answer's body; until all of it was produced, its connection is at work.
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

/// A stream that fails when its reader is too slow: what it is to be sent takes up memory, and a place.
struct Stalling<S> {
    stream: S,
    time_max: Duration,
    /// Since a write found no room, and what was written since.
    waiting: Option<(Pin<Box<Sleep>>, usize)>,
    /// Who is told that bytes move.
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
        // Whoever flushes has written all that there was.
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
            tokio::time::sleep(Duration::from_millis(2_500)).await;
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

    /// Takes this many bytes, then none for a moment, and so on.
    struct Taking {
        bytes: usize,
        moment: Option<Pin<Box<Sleep>>>,
    }

    impl AsyncWrite for Taking {
        fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
            let moment =
                self.moment.get_or_insert_with(|| Box::pin(tokio::time::sleep(Duration::from_millis(5))));
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

    /// Writes this many times to a reader that takes so many bytes at a time.
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
    fn who_takes_an_answer_in_crumbs_is_cut_and_who_takes_it_in_pieces_is_not() {
        let error = write(1 << 10, 63, false).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        write(PROGRESS_BYTES_MIN, 100, false).unwrap();
        // Small answers that are taken whole are no crumbs.
        write(1, 100, true).unwrap();
    }
}
