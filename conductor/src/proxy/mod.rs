//! The OpenAI proxy: requests go to the engines that the Conductor chose, answers come back as they are made.
//!
//! ```text
//!   client ──▶ request ──▶ token ids ──▶ decide ──▶ prefill engine ──▶ decode engine ──▶ client
//!              (limits)    (given, or     (Place)       │ died            │ died
//!                           /tokenize)      ▲───────────┴─────────────────┘
//!                                           └ elsewhere, with the tokens that were sent so far
//! ```
//!
//! `request.rs` finds the fields of a request in its text, `session.rs` gets an engine to answer, `relay.rs`
//! passes a stream on and says what is promised when its engine dies.

mod body;
mod client;
mod counters;
mod listener;
mod place;
mod relay;
mod request;
mod server;
mod session;
mod sse;
mod tokenizer;

use std::fmt::Write as _;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hyper::body::Bytes;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Response, StatusCode};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::time::Instant;

pub use body::{Answer, CollectError, Sink, Stream, collect};
pub use client::{Exchange, Message, Pool, SendError};
use counters::Ticket;
pub use counters::{Counters, Figures};
pub use listener::{Asked, ConnectionLimits, serve};
pub use place::{Ask, Engine, Handover, Place, Placed, Progress, Refused, Reservation};
use relay::Relay;
pub(crate) use request::Fields;
pub use server::ProxyServer;
use session::Failed;
#[cfg(feature = "gateway")]
pub(crate) use session::Reserved;
pub(crate) use session::{Session, Stop, Wanted};
use tokenizer::Tokenizer;

/// Limits of a proxy.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Longest body of a request, bytes.
    pub body_bytes_max: usize,
    /// Longest time for the body of a request.
    pub body_time_max: Duration,
    /// Longest answer that is not a stream, bytes.
    pub answer_bytes_max: usize,
    /// Most requests at a time; further ones are refused (503).
    pub requests_max: usize,
    /// Longest time until an engine begins to answer. A prefill is part of it.
    pub head_time_max: Duration,
    /// Longest pause of an engine in the middle of its answer.
    pub idle_time_max: Duration,
    /// Longest time for `/tokenize`; after it a request is placed by its length only.
    pub tokenize_time_max: Duration,
    /// Engines that are tried for one request.
    pub attempts_max: u32,
    /// Token ids that are remembered with their texts.
    pub remembered_ids_max: usize,
    /// Whether outputs are continued by another engine when one dies. The proxy then asks engines for token
    /// ids (`return_token_ids`), and replaces them by null for clients that did not.
    pub continues: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes_max: 32 << 20,
            body_time_max: Duration::from_secs(30),
            answer_bytes_max: 64 << 20,
            requests_max: 8_192,
            head_time_max: Duration::from_secs(120),
            idle_time_max: Duration::from_secs(60),
            tokenize_time_max: Duration::from_secs(5),
            attempts_max: 4,
            remembered_ids_max: 8 << 20,
            continues: true,
        }
    }
}

/// The proxy. Clones are the same proxy.
#[derive(Debug)]
pub struct Proxy<P: Place>(Arc<Core<P>>);

impl<P: Place> Clone for Proxy<P> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

#[derive(Debug)]
pub(crate) struct Core<P: Place> {
    pub(crate) place: Arc<P>,
    pub(crate) limits: Limits,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) counters: Arc<Counters>,
    requests: Arc<Semaphore>,
    /// Numbers of rooms and requests follow from it.
    random: RandomState,
    next: AtomicU64,
}

impl<P: Place> Core<P> {
    /// A number that no client can guess.
    pub(crate) fn number(&self) -> u64 {
        self.random.hash_one(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// The number of a room: SGLang's are below 2^63.
    pub(crate) fn room(&self) -> u64 {
        self.number() >> 1
    }
}

/// Headers that are passed on to engines.
pub(crate) const PASSED: [HeaderName; 4] = [
    HeaderName::from_static("x-request-id"),
    HeaderName::from_static("traceparent"),
    HeaderName::from_static("tracestate"),
    header::AUTHORIZATION,
];
/// The tenant of a request. A gateway in front of the proxy sets it.
pub(crate) const TENANT: HeaderName = HeaderName::from_static("x-tenant-id");

impl<P: Place> Proxy<P> {
    /// A proxy that asks `place` where requests go.
    #[must_use]
    pub fn new(place: Arc<P>, limits: Limits) -> Self {
        Self(Arc::new(Core {
            tokenizer: Tokenizer::new(limits.remembered_ids_max),
            counters: place.counters(),
            place,
            requests: Arc::new(Semaphore::new(limits.requests_max.min(Semaphore::MAX_PERMITS))),
            random: RandomState::new(),
            next: AtomicU64::new(0),
            limits,
        }))
    }

    /// What requests share.
    #[cfg(feature = "gateway")]
    pub(crate) fn core(&self) -> &Arc<Core<P>> {
        &self.0
    }

    /// What it has done so far.
    #[must_use]
    pub fn figures(&self) -> Figures {
        self.0.counters.figures()
    }

    /// Answers a request. Unknown paths are 404. Dropping the future, or the body of the answer, cancels the
    /// request at the engines.
    pub async fn answer(&self, request: Asked) -> Response<Answer> {
        let began = Instant::now();
        let mut headers = HeaderMap::new();
        for name in PASSED {
            if let Some(value) = request.headers().get(&name) {
                headers.insert(name, value.clone());
            }
        }
        let [id, ..] = PASSED;
        let id = headers.entry(id).or_insert_with(|| {
            let mut id = String::new();
            let _ = write!(id, "{:016x}", self.0.number());
            HeaderValue::from_str(&id).unwrap_or(HeaderValue::from_static(""))
        });
        let id = id.clone();
        let answered = match (request.method(), request.uri().path()) {
            (&Method::POST, "/v1/completions") => self.complete(request, headers, began, false).await,
            (&Method::POST, "/v1/chat/completions") => self.complete(request, headers, began, true).await,
            (&Method::GET, "/v1/models") => Ok(self.models()),
            (_, "/v1/completions" | "/v1/chat/completions" | "/v1/models") => {
                Err(Stop::own(StatusCode::METHOD_NOT_ALLOWED, "POST completions, GET models"))
            }
            (_, path) => Err(Stop::own(StatusCode::NOT_FOUND, format!("there is nothing at {path}"))),
        };
        let mut response = answered.unwrap_or_else(|stop| {
            self.0.counters.refused(&stop);
            stopped(stop)
        });
        let [name, ..] = PASSED;
        response.headers_mut().insert(name, id);
        response
    }

    fn models(&self) -> Response<Answer> {
        let models = self.0.place.models();
        let each = models.iter().map(|model| json!({"id": model, "object": "model", "owned_by": "snowskin"}));
        let list = json!({"object": "list", "data": each.collect::<Vec<_>>()});
        with_type(Response::new(Answer::whole(list.to_string())), HeaderValue::from_static(JSON))
    }

    async fn complete(
        &self,
        request: Asked,
        headers: HeaderMap,
        began: Instant,
        is_chat: bool,
    ) -> Result<Response<Answer>, Stop> {
        let mut ticket = Some(Ticket::new(&self.0.counters));
        let answered = self.answer_completion(request, headers, began, is_chat, &mut ticket).await;
        // That of a stream goes with the stream.
        if let Some(ticket) = ticket {
            ticket.settle();
        }
        answered
    }

    async fn answer_completion(
        &self,
        request: Asked,
        headers: HeaderMap,
        began: Instant,
        is_chat: bool,
        ticket: &mut Option<Ticket>,
    ) -> Result<Response<Answer>, Stop> {
        let core = &self.0;
        let place = Arc::clone(&core.requests).try_acquire_owned().map_err(|_| Stop::Own {
            status: StatusCode::SERVICE_UNAVAILABLE,
            message: format!("{} requests are under way already", core.limits.requests_max),
            retry_after: Some(Duration::from_secs(1)),
        })?;
        let tenant = request.headers().get(&TENANT).and_then(|tenant| tenant.to_str().ok());
        let tenant = tenant.unwrap_or_default().to_owned();
        let body = self.body(request).await?;
        let bad = |message| Stop::own(StatusCode::BAD_REQUEST, message);
        let fields = Fields::parse(body).map_err(bad)?;
        let wanted = Wanted::parse(&fields, is_chat).map_err(bad)?;
        // The client's time to send the body is not the proxy's.
        let mut session = Session::new(core, (fields, wanted), headers, tenant, began);
        session.tokenize().await?;
        Counters::add(&core.counters.prompt_tokens, session.tokens.as_ref().map_or(0, |it| it.len() as u64));
        let asked = session::Asked { path: session.wanted.path(), changes: Vec::new() };
        if !session.wanted.stream {
            return whole(session, &asked).await;
        }
        let attempt = session.attempt(&asked, &[]).await?;
        core.counters.added(&session);
        let status = attempt.exchange.status();
        let kind = attempt.exchange.headers().get(header::CONTENT_TYPE).cloned();
        let kind = kind.unwrap_or(HeaderValue::from_static("text/event-stream; charset=utf-8"));
        let ticket = ticket.take();
        let mut response = Response::new(Answer::streamed(|sink| async move {
            Relay::new(session).run(attempt, sink).await;
            if let Some(ticket) = ticket {
                ticket.settle();
            }
            drop(place);
        }));
        *response.status_mut() = status;
        response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        // Reverse proxies must not collect a stream.
        let name = HeaderName::from_static("x-accel-buffering");
        response.headers_mut().insert(name, HeaderValue::from_static("no"));
        Ok(with_type(response, kind))
    }

    async fn body(&self, request: Asked) -> Result<Bytes, Stop> {
        let limits = &self.0.limits;
        let mut body = request.into_body();
        let body = tokio::time::timeout(limits.body_time_max, collect(&mut body, limits.body_bytes_max));
        match body.await {
            Ok(Ok(body)) => Ok(body),
            Ok(Err(CollectError::TooLong)) => {
                let message = format!("the body has more than {} bytes", limits.body_bytes_max);
                Err(Stop::own(StatusCode::PAYLOAD_TOO_LARGE, message))
            }
            Ok(Err(CollectError::Broken)) => {
                Err(Stop::own(StatusCode::BAD_REQUEST, "the body ended before its length"))
            }
            Err(_) => Err(Stop::own(StatusCode::REQUEST_TIMEOUT, "the body did not come in time")),
        }
    }
}

/// An answer in one piece: nothing is sent before all of it is there, so that any engine can make it anew.
async fn whole<P: Place>(
    mut session: Session<P>,
    asked: &session::Asked<'_>,
) -> Result<Response<Answer>, Stop> {
    let limits = session.core.limits;
    loop {
        let mut attempt = session.attempt(asked, &[]).await?;
        if session.attempts == 1 {
            session.core.counters.added(&session);
        }
        let engine = attempt.placed.decode.clone();
        let gone = |why: String| Failed {
            engines: vec![engine.instance],
            is_gone: true,
            why: format!("{}: {why}", engine.pool.address()),
            answer: None,
        };
        let failed = loop {
            tokio::select! {
                body = tokio::time::timeout(limits.head_time_max, attempt.exchange.collect(limits.answer_bytes_max)) => {
                    match body {
                        Ok(Ok(body)) => {
                            attempt.reserved.report(Progress::FirstToken);
                            Counters::add(&session.core.counters.done, 1);
                            let output = output_tokens(&body);
                            Counters::add(&session.core.counters.output_tokens, output.into());
                            attempt.reserved.report(Progress::Tokens(output));
                            let kind = attempt.exchange.headers().get(header::CONTENT_TYPE).cloned();
                            attempt.exchange.finish(&attempt.placed.decode.pool);
                            attempt.reserved.done();
                            let kind = kind.unwrap_or(HeaderValue::from_static(JSON));
                            return Ok(with_type(Response::new(Answer::whole(body)), kind));
                        }
                        Ok(Err(CollectError::TooLong)) => {
                            let message = format!("the answer has more than {} bytes", limits.answer_bytes_max);
                            return Err(Stop::own(StatusCode::BAD_GATEWAY, message));
                        }
                        Ok(Err(CollectError::Broken)) => break gone("the answer broke off".into()),
                        Err(_) => break gone("the answer did not end in time".into()),
                    }
                }
                prefilled = session::ended(&mut attempt.prefill) => {
                    attempt.prefill = None;
                    match prefilled {
                        Ok(()) => attempt.reserved.report(Progress::Prefilled),
                        Err(failed) => break failed,
                    }
                }
            }
        };
        drop(attempt);
        session.failed(&failed);
        if session.attempts >= limits.attempts_max {
            return Err(Stop::own(StatusCode::BAD_GATEWAY, format!("no engine answered: {}", failed.why)));
        }
    }
}

/// The tokens of an answer in one piece, as its `usage` says; 0 where it says nothing.
fn output_tokens(body: &[u8]) -> u32 {
    #[derive(Deserialize)]
    struct Whole {
        usage: Option<Usage>,
    }
    #[derive(Deserialize)]
    struct Usage {
        completion_tokens: Option<u32>,
    }
    let whole = serde_json::from_slice::<Whole>(body).ok();
    whole.and_then(|whole| whole.usage?.completion_tokens).unwrap_or(0)
}

const JSON: &str = "application/json";

fn with_type(mut response: Response<Answer>, kind: HeaderValue) -> Response<Answer> {
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// The body of an error, as OpenAI's interface has it.
pub(crate) fn explained(status: StatusCode, message: &str) -> String {
    let kind = match status {
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "server_error",
    };
    json!({"error": {"message": message, "type": kind, "code": status.as_u16()}}).to_string()
}

/// The value of `Retry-After`, whole seconds, at least 1.
pub(crate) fn retry_after_s(after: Duration) -> u64 {
    (after.as_secs() + u64::from(after.subsec_nanos() > 0)).max(1)
}

/// The answer of a request that ended before its stream began.
fn stopped(stop: Stop) -> Response<Answer> {
    let (status, message, retry_after) = match stop {
        Stop::Own { status, message, retry_after } => (status, message, retry_after),
        Stop::Engine { status, content_type, body } => {
            let mut response = Response::new(Answer::whole(body));
            *response.status_mut() = status;
            return with_type(response, content_type.unwrap_or(HeaderValue::from_static(JSON)));
        }
    };
    let mut response = Response::new(Answer::whole(explained(status, &message)));
    *response.status_mut() = status;
    if let Some(after) = retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(retry_after_s(after)));
    }
    // A body that was not read to its end would be taken for the next request.
    if matches!(status, StatusCode::PAYLOAD_TOO_LARGE | StatusCode::REQUEST_TIMEOUT) {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    with_type(response, HeaderValue::from_static(JSON))
}
