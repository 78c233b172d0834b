//! [`Pool`]: connections to one engine, kept open between requests.
//!
//! ```text
//!   send ──▶ an idle connection, or a new one ──▶ Exchange: head, then pieces of the body
//!                 ▲                                   │ read to its end       │ dropped before
//!                 └────────── kept ◀──────────────────┘                       ▼ the connection is closed:
//!                                                                 the engine cancels the request
//! ```

use std::fmt;
use std::io;
use std::sync::Mutex;
use std::time::Duration;

use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{self, HeaderValue};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::body::{Answer, CollectError, collect, next_data};

/// Most connections without a request that are kept per engine.
const IDLE_MAX: usize = 256;
/// Connections that were idle for longer are not used any more. It is below the 5 s of uvicorn, the server in
/// engines.
const IDLE_TIME_MAX: Duration = Duration::from_secs(4);
/// Longest time to connect to an engine.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(2);
/// Longest head of an engine's answer, bytes.
const HEAD_BYTES_MAX: usize = 64 << 10;

/// Why an engine did not answer.
#[derive(Debug)]
pub enum SendError {
    /// It does not accept connections.
    Connect(io::Error),
    /// The connection ended, or what came is not HTTP.
    Http(hyper::Error),
    /// The answer's head did not come in time.
    Late(Duration),
}

impl fmt::Display for SendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect(error) => write!(f, "it cannot be reached: {error}"),
            Self::Http(error) => write!(f, "the connection ended: {error}"),
            Self::Late(limit) => write!(f, "it did not begin to answer within {limit:?}"),
        }
    }
}

impl std::error::Error for SendError {}

/// Connections to one engine. They belong to the runtime on which they were made.
#[derive(Debug)]
pub struct Pool {
    /// `HOST:PORT`.
    address: String,
    host: HeaderValue,
    idle: Mutex<Vec<Connection>>,
}

#[derive(Debug)]
struct Connection {
    sender: SendRequest<Answer>,
    task: AbortHandle,
    used: Instant,
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Closes the socket even when an answer is still coming.
        self.task.abort();
    }
}

impl Pool {
    /// Connections to `HOST:PORT`. Opens none yet.
    ///
    /// # Errors
    /// The address has characters that a `Host` header cannot have.
    pub fn new(address: &str) -> Result<Self, header::InvalidHeaderValue> {
        let host = HeaderValue::from_str(address)?;
        Ok(Self { address: address.to_owned(), host, idle: Mutex::default() })
    }

    /// The engine's address, `HOST:PORT`.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Sends a request and waits for the head of its answer. A request that was sent on a kept connection
    /// that the engine was closing is sent once more on a new one.
    ///
    /// # Errors
    /// See [`SendError`].
    pub async fn send(&self, message: Message<'_>, head_time_max: Duration) -> Result<Exchange, SendError> {
        let answered = async {
            if let Some(connection) = self.kept()
                && let Ok(exchange) = self.send_on(connection, &message).await
            {
                return Ok(exchange);
            }
            let connection = self.connect().await?;
            self.send_on(connection, &message).await.map_err(SendError::Http)
        };
        tokio::time::timeout(head_time_max, answered).await.map_err(|_| SendError::Late(head_time_max))?
    }

    fn kept(&self) -> Option<Connection> {
        let mut idle = self.idle.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        loop {
            let connection = idle.pop()?;
            if connection.used.elapsed() > IDLE_TIME_MAX {
                // Those below it were idle for longer.
                idle.clear();
                return None;
            }
            if !connection.sender.is_closed() {
                return Some(connection);
            }
        }
    }

    async fn connect(&self) -> Result<Connection, SendError> {
        let stream = tokio::time::timeout(CONNECT_TIME_MAX, TcpStream::connect(&self.address))
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            .map_err(SendError::Connect)?;
        let _ = stream.set_nodelay(true);
        let (sender, connection) = http1::Builder::new()
            .max_buf_size(HEAD_BYTES_MAX)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(SendError::Http)?;
        let task = tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection to an engine ended");
            }
        });
        Ok(Connection { sender, task: task.abort_handle(), used: Instant::now() })
    }

    async fn send_on(&self, mut connection: Connection, message: &Message<'_>) -> hyper::Result<Exchange> {
        connection.sender.ready().await?;
        let response = connection.sender.send_request(message.request(&self.host)).await?;
        Ok(Exchange { response, ended: false, connection: Some(connection) })
    }

    fn keep(&self, mut connection: Connection) {
        connection.used = Instant::now();
        let mut idle = self.idle.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if idle.len() < IDLE_MAX {
            idle.push(connection);
        }
    }
}

/// A request to an engine.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    /// The path, beginning with a slash.
    pub path: &'a str,
    /// A JSON body; without one it is a `GET`.
    pub body: Option<&'a Bytes>,
    /// Headers that are passed on.
    pub headers: &'a header::HeaderMap,
}

impl Message<'_> {
    fn request(&self, host: &HeaderValue) -> Request<Answer> {
        let body = self.body.cloned().map_or(Answer::Whole(None), |bytes| Answer::Whole(Some(bytes)));
        let mut request = Request::new(body);
        if self.body.is_some() {
            *request.method_mut() = hyper::Method::POST;
        }
        *request.uri_mut() = self.path.parse().unwrap_or_default();
        *request.headers_mut() = self.headers.clone();
        request.headers_mut().insert(header::HOST, host.clone());
        if self.body.is_some() {
            let json = HeaderValue::from_static("application/json");
            request.headers_mut().insert(header::CONTENT_TYPE, json);
        }
        request
    }
}

/// An answer that is being read. Dropping it before its end closes the connection, at which engines cancel
/// the request.
#[derive(Debug)]
pub struct Exchange {
    response: Response<Incoming>,
    /// The body was read to its end.
    ended: bool,
    connection: Option<Connection>,
}

impl Exchange {
    /// The status.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.response.status()
    }

    /// The headers.
    #[must_use]
    pub fn headers(&self) -> &header::HeaderMap {
        self.response.headers()
    }

    /// The next bytes; `None` at the end.
    ///
    /// # Errors
    /// The connection ended before the body did.
    pub async fn next(&mut self) -> Option<hyper::Result<Bytes>> {
        let next = next_data(self.response.body_mut()).await;
        self.ended |= next.is_none();
        next
    }

    /// The rest of the body.
    ///
    /// # Errors
    /// See [`CollectError`].
    pub async fn collect(&mut self, bytes_max: usize) -> Result<Bytes, CollectError> {
        let all = collect(self.response.body_mut(), bytes_max).await;
        self.ended |= all.is_ok();
        all
    }

    /// Keeps the connection for further requests, if the body was read to its end.
    pub fn finish(mut self, pool: &Pool) {
        if self.ended
            && let Some(connection) = self.connection.take()
        {
            pool.keep(connection);
        }
    }
}
