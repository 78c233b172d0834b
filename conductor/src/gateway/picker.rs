//! [`Picker`]: one request of a gateway, from its headers to the end of its answer.
//!
//! ```text
//!   headers ──▶ body ──▶ whole ──▶ tokens ──▶ decide ──▶ sent ──▶ answer's headers, body ──▶ over
//!                 │ too long, too slow, no engine, refused            │ cut: the reservation has failed
//!                 └──▶ an immediate answer: 413, 408, 503, 429 ◀──────┘
//! ```

use std::collections::HashMap;
use std::str;
use std::sync::Arc;
use std::time::Duration;

use conductor_core::InstanceId;
use hyper::StatusCode;
use hyper::body::Bytes;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tonic::Status;

use super::proto::{self, BodyMode, CommonAnswer, CommonResponse, Kind, Part, Reply};
use super::record::{self, Record};
use crate::proxy::{
    self, Core, Fields, PASSED, Place, Placed, Progress, Reserved, Session, Stop, TENANT, Wanted,
};
use crate::traffic::Outcome;

/// The header and the metadata with the endpoint that was chosen (proposal 004, "Destination Endpoint").
pub(crate) const DESTINATION: &str = "x-gateway-destination-endpoint";
/// The namespace of that metadata.
pub(crate) const NAMESPACE: &str = "envoy.lb";
/// The endpoints of which one must be chosen ("Endpoint Subset"), and their namespace.
pub(crate) const SUBSET: (&str, &str) = ("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset");
/// The endpoint that served ("Destination Endpoint Served"), in the namespace [`NAMESPACE`].
pub(crate) const SERVED: &str = "x-gateway-destination-endpoint-served";
/// The prefill engine, for the sidecar of a decode engine (the routing sidecar of llm-d).
pub(crate) const PREFILLER: &str = "x-prefiller-host-port";

/// Most endpoints of a subset.
const SUBSET_MAX: usize = 16_384;
/// Most headers of a request.
const HEADERS_MAX: usize = 512;
/// Most parts of a request's body.
const PARTS_MAX: usize = 16_384;
/// Bytes of bodies per permit of [`Picker`]'s budget.
pub(crate) const BYTES_PER_PERMIT: usize = 1_024;

/// What bounds a request.
#[derive(Clone, Debug)]
pub(crate) struct Bounds {
    /// Longest time for it to arrive.
    pub(crate) body_time_max: Duration,
    /// Longest pause after it was placed.
    pub(crate) silence_max: Duration,
    /// Bytes of all bodies, in units of [`BYTES_PER_PERMIT`].
    pub(crate) bodies: Arc<Semaphore>,
}

/// See the module's documentation.
pub(crate) struct Picker<P: Place> {
    core: Arc<Core<P>>,
    bounds: Bounds,
    record: Arc<Record>,
    began: Instant,
    stage: Stage<P>,
    /// How it ends as far as that is known; the answer's end is known in `stage`.
    outcome: Option<Outcome>,
}

enum Stage<P: Place> {
    /// Nothing has come.
    New,
    /// Its body comes.
    Arriving(Box<Arriving>),
    /// It was placed.
    Placed(Box<Running<P>>),
    /// Nothing more is expected.
    Over,
}

/// A request whose body comes.
#[derive(Default)]
struct Arriving {
    path: String,
    headers: HeaderMap,
    tenant: String,
    subset: Option<Vec<String>>,
    answers: BodyAnswers,
    is_buffered: bool,
    parts: Vec<Bytes>,
    bytes: usize,
    held: Option<OwnedSemaphorePermit>,
}

/// What is answered to parts of the answer's body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum BodyAnswers {
    /// The part itself, which the gateway then passes on.
    #[default]
    Parts,
    /// That it goes on.
    Nothing,
}

/// A request that was placed.
struct Running<P: Place> {
    /// `None` once it has ended.
    reserved: Option<Reserved<P>>,
    endpoint: String,
    decode: InstanceId,
    /// The request's name in the record of failures.
    name: Option<u64>,
    outcome: Outcome,
    answers: BodyAnswers,
    is_stream: bool,
    failed: bool,
    begun: bool,
    /// The last byte of the part before.
    last: u8,
}

/// Whether a stream goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    Goes,
    Ends,
}

impl<P: Place> Picker<P> {
    pub(crate) fn new(core: Arc<Core<P>>, bounds: Bounds, record: Arc<Record>) -> Self {
        record.traffic.began();
        Self { core, bounds, record, began: Instant::now(), stage: Stage::New, outcome: None }
    }

    /// How long to wait for the next message.
    pub(crate) fn patience(&self) -> Duration {
        match self.stage {
            Stage::New | Stage::Arriving(_) => self.bounds.body_time_max.saturating_sub(self.began.elapsed()),
            Stage::Placed(_) | Stage::Over => self.bounds.silence_max,
        }
    }

    /// No message came for [`patience`](Self::patience): the last answer, if there is one to give.
    pub(crate) fn timed_out(&mut self) -> Option<proto::ProcessingResponse> {
        match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Arriving(_) => {
                self.outcome = Some(Outcome::Wrong);
                Some(immediate(Stop::own(StatusCode::REQUEST_TIMEOUT, "the body did not come in time")))
            }
            Stage::New | Stage::Placed(_) | Stage::Over => None,
        }
    }

    /// Takes a message; puts what is to be answered into `out`.
    ///
    /// # Errors
    /// The gateway does not keep to the protocol, or is set up in a way in which no engine can be chosen.
    pub(crate) async fn take(
        &mut self,
        message: proto::ProcessingRequest,
        out: &mut Vec<proto::ProcessingResponse>,
    ) -> Result<Flow, Status> {
        // What follows is a breach of the protocol, unless it is found to be something else.
        let before = self.outcome.replace(Outcome::Protocol);
        if message.observability_mode {
            return Err(Status::failed_precondition(
                "observability_mode: no engine can be chosen, switch it off",
            ));
        }
        let Some(request) = message.request else {
            return Err(Status::invalid_argument("a ProcessingRequest without a request"));
        };
        let metadata = message.metadata_context.unwrap_or_default();
        let ended = match (request, std::mem::replace(&mut self.stage, Stage::Over)) {
            (Part::RequestHeaders(headers), Stage::New) => {
                self.headers(&headers, &metadata, message.protocol_config, out)
            }
            (Part::RequestBody(body), Stage::Arriving(arriving)) => self.body(arriving, body, out).await,
            (Part::RequestTrailers(_), Stage::Arriving(arriving)) => {
                let placed = self.whole(arriving, false, out).await;
                out.extend(placed.is_ok().then(|| of(Reply::RequestTrailers(proto::TrailersResponse {}))));
                placed
            }
            (Part::RequestTrailers(_), stage @ Stage::Placed(_)) => {
                out.push(of(Reply::RequestTrailers(proto::TrailersResponse {})));
                self.stage = stage;
                Ok(())
            }
            (Part::ResponseHeaders(headers), Stage::Placed(mut running)) => {
                running.answered(&headers, &metadata, &self.record);
                out.push(of(Reply::ResponseHeaders(CommonAnswer::go_on())));
                self.after(running, headers.end_of_stream)
            }
            (Part::ResponseBody(body), Stage::Placed(mut running)) => {
                running.received(&body.body);
                let ends = body.end_of_stream;
                out.push(of(Reply::ResponseBody(running.answers.to(body))));
                self.after(running, ends)
            }
            (Part::ResponseTrailers(_), Stage::Placed(running)) => {
                out.push(of(Reply::ResponseTrailers(proto::TrailersResponse {})));
                self.after(running, true)
            }
            _ => return Err(Status::invalid_argument("a message that does not follow the one before")),
        };
        match ended {
            Ok(()) => {
                self.outcome = before;
                Ok(Flow::Goes)
            }
            Err(stop) => {
                let (Stop::Own { status, .. } | Stop::Engine { status, .. }) = &stop;
                self.outcome = Some(record::refused(*status));
                // What was put in before belongs to a request that does not go on.
                out.clear();
                out.push(immediate(stop));
                Ok(Flow::Ends)
            }
        }
    }

    /// The request begins.
    fn headers(
        &mut self,
        head: &proto::HttpHeaders,
        metadata: &proto::Metadata,
        config: Option<proto::ProtocolConfiguration>,
        out: &mut Vec<proto::ProcessingResponse>,
    ) -> Result<(), Stop> {
        let arriving = Arriving::of(head, metadata, config.as_ref())?;
        if head.end_of_stream {
            return self.without_body(arriving, out);
        }
        // Gateways that say nothing of their mode are older than that message, and those of the extension use
        // this one.
        let mode = config.as_ref().map_or(BodyMode::FullDuplexStreamed, |config| config.request_body_mode());
        let arriving = match mode {
            BodyMode::FullDuplexStreamed => arriving,
            BodyMode::Buffered => {
                out.push(of(Reply::RequestHeaders(CommonAnswer::go_on())));
                Arriving { is_buffered: true, ..arriving }
            }
            other => {
                let message = format!(
                    "the gateway's request_body_mode is {other:?}, with which no engine can be chosen by the \
                     prompt: set FULL_DUPLEX_STREAMED or BUFFERED"
                );
                return Err(Stop::own(StatusCode::INTERNAL_SERVER_ERROR, message));
            }
        };
        self.stage = Stage::Arriving(Box::new(arriving));
        Ok(())
    }

    /// A part of the body.
    async fn body(
        &mut self,
        mut arriving: Box<Arriving>,
        body: proto::HttpBody,
        out: &mut Vec<proto::ProcessingResponse>,
    ) -> Result<(), Stop> {
        let most = self.core.limits.body_bytes_max;
        if body.body.is_empty() && !body.end_of_stream && !arriving.is_buffered {
            self.stage = Stage::Arriving(arriving);
            return Ok(());
        }
        if arriving.parts.len() >= PARTS_MAX {
            let message = format!("the body has more than {PARTS_MAX} parts");
            return Err(Stop::own(StatusCode::PAYLOAD_TOO_LARGE, message));
        }
        arriving.bytes = arriving.bytes.saturating_add(body.body.len());
        if arriving.bytes > most {
            let message = format!("the body has more than {most} bytes");
            return Err(Stop::own(StatusCode::PAYLOAD_TOO_LARGE, message));
        }
        // A small part is not for nothing, either.
        let permits = u32::try_from(body.body.len() / BYTES_PER_PERMIT + 1).unwrap_or(u32::MAX);
        let permit = Arc::clone(&self.bounds.bodies).try_acquire_many_owned(permits);
        let permit = permit.map_err(|_| Stop::Own {
            status: StatusCode::SERVICE_UNAVAILABLE,
            message: "the bodies of all requests take too much memory".to_owned(),
            retry_after: Some(Duration::from_secs(1)),
        })?;
        match &mut arriving.held {
            Some(held) => held.merge(permit),
            held => *held = Some(permit),
        }
        arriving.parts.push(body.body);
        if body.end_of_stream || arriving.is_buffered {
            return self.whole(arriving, body.end_of_stream, out).await;
        }
        self.stage = Stage::Arriving(arriving);
        Ok(())
    }

    /// A request without a body, such as `GET /v1/models`: any engine can answer it.
    fn without_body(
        &mut self,
        arriving: Arriving,
        out: &mut Vec<proto::ProcessingResponse>,
    ) -> Result<(), Stop> {
        let mut stop = Stop::own(StatusCode::SERVICE_UNAVAILABLE, "there is no engine");
        for model in self.core.place.models() {
            let quoted = serde_json::json!({ "model": model }).to_string();
            let bad = |why| Stop::own(StatusCode::BAD_REQUEST, why);
            let fields = Fields::parse(quoted.into()).map_err(bad)?;
            let wanted = Wanted::parse(&fields, true).map_err(bad)?;
            let (headers, tenant) = (arriving.headers.clone(), arriving.tenant.clone());
            let mut session = Session::new(&self.core, (fields, wanted), headers, tenant, self.began);
            let name = self.avoid_failed(&mut session);
            match session.decide(&[], arriving.subset.as_deref()) {
                Ok((placed, reserved)) => {
                    out.push(destination(&placed, Reply::RequestHeaders));
                    let running = Running::new(&placed, reserved, arriving.answers, name);
                    self.stage = Stage::Placed(Box::new(running));
                    self.record.traffic.placed.inc();
                    return Ok(());
                }
                Err(why) => stop = why,
            }
        }
        Err(stop)
    }

    /// The whole request is there. `ends`: nothing follows its last part.
    async fn whole(
        &mut self,
        mut arriving: Box<Arriving>,
        ends: bool,
        out: &mut Vec<proto::ProcessingResponse>,
    ) -> Result<(), Stop> {
        let bad = |message| Stop::own(StatusCode::BAD_REQUEST, message);
        let parts = std::mem::take(&mut arriving.parts);
        let text = match &parts[..] {
            [part] => part.clone(),
            parts => parts.concat().into(),
        };
        let fields = Fields::parse(text).map_err(bad)?;
        let is_text = arriving.path == "/v1/completions";
        let wanted = Wanted::parse(&fields, !is_text).map_err(bad)?;
        let (headers, tenant) = (std::mem::take(&mut arriving.headers), std::mem::take(&mut arriving.tenant));
        let mut session = Session::new(&self.core, (fields, wanted), headers, tenant, self.began);
        let name = self.avoid_failed(&mut session);
        if is_text || arriving.path == "/v1/chat/completions" {
            session.tokenize().await?;
        }
        let tokens = session.tokens.clone().unwrap_or_default();
        let (placed, reserved) = session.decide(&tokens, arriving.subset.as_deref())?;
        if arriving.is_buffered {
            out.push(destination(&placed, Reply::RequestBody));
        } else {
            out.push(destination(&placed, Reply::RequestHeaders));
            let last = parts.len().saturating_sub(1);
            for (at, body) in parts.into_iter().enumerate() {
                let part = proto::HttpBody { body, end_of_stream: ends && at == last };
                out.push(of(Reply::RequestBody(BodyAnswers::Parts.to(part))));
            }
        }
        self.record.traffic.placed.inc();
        self.stage = Stage::Placed(Box::new(Running::new(&placed, reserved, arriving.answers, name)));
        Ok(())
    }

    /// Tells a request which engines failed it before. Returns its name in the record of failures.
    fn avoid_failed(&self, session: &mut Session<P>) -> Option<u64> {
        let [id, ..] = PASSED;
        let name = self.record.failures.name(session.headers.get(id)?.as_bytes())?;
        session.avoid = self.record.failures.of(name, Instant::now());
        self.record.traffic.retried(!session.avoid.is_empty());
        Some(name)
    }

    /// After a message of the answer.
    fn after(&mut self, mut running: Box<Running<P>>, ends: bool) -> Result<(), Stop> {
        if ends {
            running.end();
        }
        self.stage = Stage::Placed(running);
        Ok(())
    }
}

impl<P: Place> Drop for Picker<P> {
    fn drop(&mut self) {
        let answer = match &self.stage {
            Stage::Placed(running) => running.outcome,
            Stage::New | Stage::Arriving(_) | Stage::Over => Outcome::Left,
        };
        self.record.traffic.over(self.outcome.unwrap_or(answer));
    }
}

impl Arriving {
    fn of(
        head: &proto::HttpHeaders,
        metadata: &proto::Metadata,
        config: Option<&proto::ProtocolConfiguration>,
    ) -> Result<Self, Stop> {
        let mut arriving = Self::default();
        let values = head.headers.as_ref().map_or(&[][..], |headers| &headers.headers);
        if values.len() > HEADERS_MAX {
            let message = format!("more than {HEADERS_MAX} headers");
            return Err(Stop::own(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, message));
        }
        for header in values {
            match header.key.as_str() {
                ":path" => {
                    let path = header.text().split('?').next().unwrap_or_default();
                    arriving.path = path.trim_end_matches('/').to_owned();
                }
                key if key == TENANT.as_str() => arriving.tenant = header.text().to_owned(),
                key => {
                    let name = PASSED.into_iter().find(|name| name.as_str() == key);
                    if let (Some(name), Ok(value)) = (name, HeaderValue::from_bytes(header.bytes())) {
                        arriving.headers.insert(name, value);
                    }
                }
            }
        }
        if let Some(subset) = metadata.get(SUBSET.0, SUBSET.1) {
            let endpoints = endpoints(subset);
            if endpoints.len() > SUBSET_MAX {
                let message = format!("a subset of more than {SUBSET_MAX} endpoints");
                return Err(Stop::own(StatusCode::BAD_REQUEST, message));
            }
            arriving.subset = Some(endpoints);
        }
        let mode = config.map_or(BodyMode::FullDuplexStreamed, |config| config.response_body_mode());
        arriving.answers = match mode {
            BodyMode::FullDuplexStreamed => BodyAnswers::Parts,
            _ => BodyAnswers::Nothing,
        };
        Ok(arriving)
    }
}

impl<P: Place> Running<P> {
    fn new(placed: &Placed, reserved: Reserved<P>, answers: BodyAnswers, name: Option<u64>) -> Self {
        Self {
            reserved: Some(reserved),
            endpoint: placed.decode.pool.address().to_owned(),
            decode: placed.decode.instance,
            name,
            outcome: Outcome::Left,
            answers,
            is_stream: false,
            failed: false,
            begun: false,
            last: 0,
        }
    }

    /// The answer begins.
    fn answered(&mut self, head: &proto::HttpHeaders, metadata: &proto::Metadata, record: &Record) {
        if let Some(proto::Value { kind: Some(Kind::String(served)) }) = metadata.get(NAMESPACE, SERVED)
            && *served != self.endpoint
        {
            tracing::debug!(chosen = self.endpoint, served, "the gateway sent a request elsewhere");
            self.reserved = None;
            self.outcome = Outcome::Elsewhere;
        }
        for header in head.headers.iter().flat_map(|headers| &headers.headers) {
            match header.key.as_str() {
                ":status" => {
                    let status = header.text().parse().unwrap_or(0_u16);
                    self.failed = status == 429 || !(100..500).contains(&status);
                }
                "content-type" => self.is_stream = header.text().starts_with("text/event-stream"),
                _ => {}
            }
        }
        if self.failed && self.reserved.is_some() {
            self.outcome = Outcome::Failed;
            if let Some(name) = self.name {
                record.failures.note(name, self.decode, Instant::now());
            }
        }
    }

    /// A part of the answer. Each event of a stream counts as a token.
    fn received(&mut self, body: &[u8]) {
        let Some(reserved) = self.reserved.as_ref().filter(|_| self.is_stream && !self.failed) else {
            return;
        };
        let Some(&end) = body.last() else { return };
        if !std::mem::replace(&mut self.begun, true) {
            reserved.report(Progress::Prefilled);
            reserved.report(Progress::FirstToken);
        }
        let split = u32::from(self.last == b'\n' && body.first() == Some(&b'\n'));
        let events = body.windows(2).filter(|pair| pair == b"\n\n").count();
        self.last = end;
        let events = u32::try_from(events).unwrap_or(u32::MAX).saturating_add(split);
        if events > 0 {
            reserved.report(Progress::Tokens(events));
        }
    }

    /// The answer has ended.
    fn end(&mut self) {
        if let Some(reserved) = self.reserved.take().filter(|_| !self.failed) {
            self.outcome = Outcome::Done;
            reserved.done();
        }
    }
}

impl BodyAnswers {
    fn to(self, part: proto::HttpBody) -> CommonAnswer {
        match self {
            Self::Nothing => CommonAnswer::go_on(),
            Self::Parts => {
                let body_mutation = Some(proto::BodyMutation { streamed_response: Some(part) });
                CommonAnswer { response: Some(CommonResponse { body_mutation, ..CommonResponse::default() }) }
            }
        }
    }
}

impl CommonAnswer {
    fn go_on() -> Self {
        Self { response: Some(CommonResponse::default()) }
    }
}

impl proto::HeaderValue {
    fn bytes(&self) -> &[u8] {
        if self.raw_value.is_empty() { self.value.as_bytes() } else { &self.raw_value }
    }

    /// The value; empty when it is not UTF-8.
    fn text(&self) -> &str {
        str::from_utf8(self.bytes()).unwrap_or_default()
    }
}

impl proto::Metadata {
    fn get(&self, namespace: &str, name: &str) -> Option<&proto::Value> {
        self.filter_metadata.get(namespace)?.fields.get(name)
    }
}

/// The endpoints of a subset: a list of texts, each of which may have several with commas. Anything else
/// names none.
fn endpoints(subset: &proto::Value) -> Vec<String> {
    let texts: Vec<&str> = match &subset.kind {
        Some(Kind::List(list)) => list.values.iter().filter_map(text_of).collect(),
        _ => text_of(subset).into_iter().collect(),
    };
    let each = texts.into_iter().flat_map(|text| text.split(',')).map(str::trim);
    each.filter(|text| !text.is_empty()).take(SUBSET_MAX + 1).map(str::to_owned).collect()
}

fn text_of(value: &proto::Value) -> Option<&str> {
    match &value.kind {
        Some(Kind::String(text)) => Some(text),
        _ => None,
    }
}

/// Where a request goes, as headers and as metadata.
fn destination(placed: &Placed, response: fn(CommonAnswer) -> Reply) -> proto::ProcessingResponse {
    let endpoint = placed.decode.pool.address();
    let mut set_headers = vec![set(DESTINATION, endpoint)];
    if placed.prefill.instance != placed.decode.instance {
        set_headers.push(set(PREFILLER, placed.prefill.pool.address()));
    }
    let header_mutation = Some(proto::HeaderMutation { set_headers, remove_headers: Vec::new() });
    let common = CommonResponse { header_mutation, body_mutation: None, clear_route_cache: true };
    let of_key = |key: &str, kind| proto::Struct {
        fields: HashMap::from([(key.to_owned(), proto::Value { kind: Some(kind) })]),
    };
    let inner = of_key(DESTINATION, Kind::String(endpoint.to_owned()));
    proto::ProcessingResponse {
        response: Some(response(CommonAnswer { response: Some(common) })),
        dynamic_metadata: Some(of_key(NAMESPACE, Kind::Struct(inner))),
    }
}

/// A header that takes the place of the client's.
fn set(name: &str, value: &str) -> proto::HeaderValueOption {
    let raw_value = Bytes::copy_from_slice(value.as_bytes());
    let header = proto::HeaderValue { key: name.to_owned(), value: String::new(), raw_value };
    proto::HeaderValueOption { header: Some(header), append_action: proto::OVERWRITE }
}

fn of(response: Reply) -> proto::ProcessingResponse {
    proto::ProcessingResponse { response: Some(response), dynamic_metadata: None }
}

/// An answer that ends the request at the gateway.
pub(crate) fn immediate(stop: Stop) -> proto::ProcessingResponse {
    let mut headers = Vec::new();
    let mut add = |name: HeaderName, value: &str| headers.push(set(name.as_str(), value));
    let (status, body) = match stop {
        Stop::Own { status, message, retry_after } => {
            add(header::CONTENT_TYPE, "application/json");
            if let Some(after) = retry_after {
                add(header::RETRY_AFTER, &proxy::retry_after_s(after).to_string());
            }
            (status, proxy::explained(status, &message).into())
        }
        Stop::Engine { status, body, .. } => (status, body),
    };
    of(Reply::Immediate(proto::ImmediateResponse {
        status: Some(proto::HttpStatus { code: status.as_u16().into() }),
        headers: Some(proto::HeaderMutation { set_headers: headers, remove_headers: Vec::new() }),
        body,
        details: "snowskin".to_owned(),
    }))
}
