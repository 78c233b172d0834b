//! The gateway's side of the protocol: bytes of messages, and a client over loopback.

use std::io::{Read as _, Write as _};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::http::uri::PathAndQuery;
use conductor_core::InstanceId;
use hyper::body::Bytes;
use prost::Message as _;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio_stream::wrappers::ReceiverStream;
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

use super::picker::{Bounds, Flow, Picker};
use super::proto::{self, BodyMode, Kind, Part, ProcessingRequest, ProcessingResponse, Reply};
use super::record::Record;
use super::server::{CHECK, Gateway, GatewayServer, PROCESS, Prost, WATCH};
use crate::proxy::{Ask, Engine, Handover, Limits, Place, Placed, Pool, Progress, Proxy, Refused};
use crate::traffic::OutcomeLabels;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

const ENDPOINT: &str = "10.0.0.7:8000";

/// What a decision was asked for.
#[derive(Debug, PartialEq)]
struct Seen {
    tenant: String,
    model: String,
    tokens: Vec<u32>,
    among: Option<Vec<String>>,
    avoid: Vec<u32>,
}

/// Chooses always the same engine, or refuses.
struct Fake {
    refuses: Mutex<Option<Refused>>,
    models: Mutex<Vec<String>>,
    decode: Mutex<String>,
    seen: Mutex<Vec<Seen>>,
    next: AtomicU64,
    reports: UnboundedSender<(u64, Progress)>,
}

impl Fake {
    fn new() -> (Arc<Self>, UnboundedReceiver<(u64, Progress)>) {
        let (reports, received) = mpsc::unbounded_channel();
        let fake = Self {
            refuses: Mutex::default(),
            models: Mutex::new(vec!["m".into()]),
            decode: Mutex::new(ENDPOINT.into()),
            seen: Mutex::default(),
            next: AtomicU64::new(1),
            reports,
        };
        (Arc::new(fake), received)
    }

    fn engine(instance: u32, address: &str) -> Engine {
        let pool = Arc::new(Pool::new(address).unwrap());
        Engine { instance: InstanceId(instance), pool, handover: Handover::KvTransferParams }
    }
}

impl Place for Fake {
    fn decide(&self, ask: &Ask<'_>) -> Result<Placed, Refused> {
        let decode = self.decode.lock().unwrap().clone();
        self.seen.lock().unwrap().push(Seen {
            tenant: ask.tenant.into(),
            model: ask.model.into(),
            tokens: ask.tokens.to_vec(),
            among: ask.among.map(<[String]>::to_vec),
            avoid: ask.avoid.iter().map(|id| id.0).collect(),
        });
        if ask.among.is_some_and(|among| !among.contains(&decode)) {
            return Err(Refused::NoEngine);
        }
        if let Some(refused) = *self.refuses.lock().unwrap() {
            return Err(refused);
        }
        let same = decode == ENDPOINT;
        Ok(Placed {
            reservation: self.next.fetch_add(1, Ordering::Relaxed),
            prefill: Self::engine(1, ENDPOINT),
            decode: Self::engine(if same { 1 } else { 2 }, &decode),
            ttft: Duration::ZERO,
            reused_tokens: 0,
        })
    }

    fn report(&self, reservation: u64, progress: Progress) {
        let _ = self.reports.send((reservation, progress));
    }

    fn suspect(&self, _: InstanceId) {}

    fn tokenizer(&self, _: &str) -> Option<Engine> {
        Some(Self::engine(9, &self.decode.lock().unwrap()))
    }

    fn models(&self) -> Vec<String> {
        self.models.lock().unwrap().clone()
    }
}

fn bounds(bodies: usize) -> Bounds {
    let time = Duration::from_secs(60);
    Bounds { body_time_max: time, silence_max: time, bodies: Arc::new(Semaphore::new(bodies)) }
}

fn limits() -> Limits {
    Limits { body_bytes_max: 4_096, ..Limits::default() }
}

fn picker(fake: &Arc<Fake>, bodies: usize) -> Picker<Fake> {
    recorded(fake, bodies, &Arc::default())
}

fn recorded(fake: &Arc<Fake>, bodies: usize, record: &Arc<Record>) -> Picker<Fake> {
    let core = Arc::clone(Proxy::new(Arc::clone(fake), limits()).core());
    Picker::new(core, bounds(bodies), Arc::clone(record))
}

fn message(part: Part) -> ProcessingRequest {
    ProcessingRequest { request: Some(part), ..ProcessingRequest::default() }
}

fn head(pairs: &[(&str, &str)], end_of_stream: bool) -> proto::HttpHeaders {
    let header = |(key, value): &(&str, &str)| proto::HeaderValue {
        key: (*key).into(),
        value: String::new(),
        raw_value: Bytes::copy_from_slice(value.as_bytes()),
    };
    let headers = Some(proto::HeaderMap { headers: pairs.iter().map(header).collect() });
    proto::HttpHeaders { headers, end_of_stream }
}

const COMPLETION: [(&str, &str); 3] =
    [(":method", "POST"), (":path", "/v1/completions?x=1"), ("x-tenant-id", "t")];

fn begin() -> ProcessingRequest {
    message(Part::RequestHeaders(head(&COMPLETION, false)))
}

fn modes(message: ProcessingRequest, request: BodyMode, response: BodyMode) -> ProcessingRequest {
    let protocol_config = Some(proto::ProtocolConfiguration {
        request_body_mode: request.into(),
        response_body_mode: response.into(),
    });
    ProcessingRequest { protocol_config, ..message }
}

fn body(text: &str, end_of_stream: bool) -> ProcessingRequest {
    message(Part::RequestBody(proto::HttpBody {
        body: Bytes::copy_from_slice(text.as_bytes()),
        end_of_stream,
    }))
}

fn with_metadata(message: ProcessingRequest, namespace: &str, key: &str, kind: Kind) -> ProcessingRequest {
    let fields = [(key.to_owned(), proto::Value { kind: Some(kind) })].into();
    let filter_metadata = [(namespace.to_owned(), proto::Struct { fields })].into();
    ProcessingRequest { metadata_context: Some(proto::Metadata { filter_metadata }), ..message }
}

fn subset(endpoints: &[&str]) -> ProcessingRequest {
    let text = |text: &&str| proto::Value { kind: Some(Kind::String((*text).to_owned())) };
    let list = proto::ListValue { values: endpoints.iter().map(text).collect() };
    with_metadata(begin(), "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset", Kind::List(list))
}

fn answer(text: &str, end_of_stream: bool) -> ProcessingRequest {
    let body = Bytes::copy_from_slice(text.as_bytes());
    message(Part::ResponseBody(proto::HttpBody { body, end_of_stream }))
}

const STREAM: [(&str, &str); 2] = [(":status", "200"), ("content-type", "text/event-stream; charset=utf-8")];
const PROMPT: &str = r#"{"model":"m","prompt":[1,2,3],"stream":true}"#;

/// Gives messages one after the other.
async fn give(
    picker: &mut Picker<Fake>,
    messages: impl IntoIterator<Item = ProcessingRequest>,
) -> Result<(Vec<ProcessingResponse>, Flow), Status> {
    let (mut out, mut flow) = (Vec::new(), Flow::Goes);
    for message in messages {
        flow = picker.take(message, &mut out).await?;
    }
    Ok((out, flow))
}

/// Status, headers and body of the immediate answer that has to be the only one.
fn refused((answers, flow): (Vec<ProcessingResponse>, Flow)) -> (i32, Vec<(String, String)>, String) {
    let [ProcessingResponse { response: Some(Reply::Immediate(immediate)), .. }] = &answers[..] else {
        panic!("{answers:?}");
    };
    assert_eq!(flow, Flow::Ends);
    let text = |bytes: &Bytes| String::from_utf8(bytes.to_vec()).unwrap();
    let headers = immediate.headers.clone().unwrap().set_headers.into_iter().map(|option| {
        let header = option.header.unwrap();
        (header.key, text(&header.raw_value))
    });
    (immediate.status.clone().unwrap().code, headers.collect(), text(&immediate.body))
}

// ------------------------------------------------------------------------------------------------- bytes

fn varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// A field with a length (wire type 2): protobuf's encoding guide, "Message Structure".
fn len(field: u64, parts: &[&[u8]]) -> Vec<u8> {
    let body = parts.concat();
    let mut out = Vec::new();
    varint(field << 3 | 2, &mut out);
    varint(body.len() as u64, &mut out);
    [out, body].concat()
}

/// A number (wire type 0).
fn int(field: u64, value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    varint(field << 3, &mut out);
    varint(value, &mut out);
    out
}

#[test]
fn requests_have_the_bytes_of_envoys_definitions() {
    // HeaderValue: key = 1, raw_value = 3; HeaderMap.headers = 1; HttpHeaders: headers = 1, end_of_stream =
    // 3.
    let header = |key: &str, value: &str| len(1, &[&len(1, &[key.as_bytes()]), &len(3, &[value.as_bytes()])]);
    let map = len(1, &[&header(":path", "/v1/models"), &header("x-tenant-id", "t")]);
    let headers = [&map[..], &int(3, 1)].concat();
    // A map's entry: key = 1, value = 2. Metadata.filter_metadata = 1; Struct.fields = 1; Value.list_value =
    // 6, .string_value = 3; ListValue.values = 1.
    let entry = |key: &str, value: &[u8]| len(1, &[&len(1, &[key.as_bytes()]), &len(2, &[value])]);
    let list = len(6, &[&len(1, &[&len(3, &[b"10.0.0.7:8000"])])]);
    let metadata = entry("envoy.lb.subset_hint", &entry("x-gateway-destination-endpoint-subset", &list));
    // ProtocolConfiguration: request_body_mode = 1, response_body_mode = 2, FULL_DUPLEX_STREAMED = 4.
    let config = [int(1, 4), int(2, 4)].concat();
    // ProcessingRequest: request_headers = 2, metadata_context = 8, protocol_config = 11.
    let bytes = [len(2, &[&headers]), len(8, &[&metadata]), len(11, &[&config])].concat();

    let expected = modes(subset(&[ENDPOINT]), BodyMode::FullDuplexStreamed, BodyMode::FullDuplexStreamed);
    let pairs = [(":path", "/v1/models"), ("x-tenant-id", "t")];
    let expected = ProcessingRequest { request: Some(Part::RequestHeaders(head(&pairs, true))), ..expected };
    assert_eq!(ProcessingRequest::decode(&bytes[..]).unwrap(), expected);
    assert_eq!(expected.encode_to_vec(), bytes);

    // HttpBody: body = 1, end_of_stream = 2. ProcessingRequest: request_body = 4, response_headers = 3,
    // response_body = 5, request_trailers = 6, response_trailers = 7, attributes = 9, observability_mode =
    // 10.
    let body_bytes = b"\x22\x06\x0a\x02{}\x10\x01";
    assert_eq!(len(4, &[&len(1, &[b"{}"]), &int(2, 1)]), body_bytes, "the helper itself");
    assert_eq!(ProcessingRequest::decode(&body_bytes[..]).unwrap(), body("{}", true));
    assert_eq!(ProcessingRequest::decode(&len(5, &[&len(1, &[b"x"])])[..]).unwrap(), answer("x", false));
    let unknown = [len(3, &[&headers]), len(9, &[&entry("a", b"")]), int(77, 5)].concat();
    let expected = message(Part::ResponseHeaders(head(&pairs, true)));
    assert_eq!(ProcessingRequest::decode(&unknown[..]).unwrap(), expected, "others are skipped");
    let trailers = message(Part::ResponseTrailers(proto::HttpTrailers {}));
    assert_eq!(ProcessingRequest::decode(&len(7, &[&map])[..]).unwrap(), trailers);
    let observed = ProcessingRequest::decode(&[len(6, &[]), int(10, 1)].concat()[..]).unwrap();
    assert!(observed.observability_mode && observed.request.is_some());
}

#[tokio::test]
async fn answers_have_the_bytes_of_envoys_definitions() {
    let (fake, _reports) = Fake::new();
    *fake.decode.lock().unwrap() = "10.0.0.8:9".into();
    let (answers, flow) = give(&mut picker(&fake, 10), [begin(), body(PROMPT, true)]).await.unwrap();
    assert_eq!(flow, Flow::Goes);

    // HeaderValueOption: header = 1, append_action = 3, OVERWRITE_IF_EXISTS_OR_ADD = 2.
    // HeaderMutation.set_headers = 1.
    let option = |key: &str, value: &str| {
        let header = len(1, &[&len(1, &[key.as_bytes()]), &len(3, &[value.as_bytes()])]);
        len(1, &[&header, &int(3, 2)])
    };
    let set =
        [option("x-gateway-destination-endpoint", "10.0.0.8:9"), option("x-prefiller-host-port", ENDPOINT)]
            .concat();
    // CommonResponse: header_mutation = 2, clear_route_cache = 5. HeadersResponse.response = 1.
    let common = [len(2, &[&set]), int(5, 1)].concat();
    // Struct.fields = 1 with entries of key = 1, value = 2; Value: struct_value = 5, string_value = 3.
    let entry = |key: &str, value: &[u8]| len(1, &[&len(1, &[key.as_bytes()]), &len(2, &[value])]);
    let inner = entry("x-gateway-destination-endpoint", &len(3, &[b"10.0.0.8:9"]));
    let metadata = entry("envoy.lb", &len(5, &[&inner]));
    // ProcessingResponse: request_headers = 1, dynamic_metadata = 8.
    let bytes = [len(1, &[&len(1, &[&common])]), len(8, &[&metadata])].concat();
    assert_eq!(answers[0].encode_to_vec(), bytes);
    // StreamedBodyResponse: body = 1, end_of_stream = 2; BodyMutation.streamed_response = 3;
    // CommonResponse.body_mutation = 3; BodyResponse.response = 1; ProcessingResponse.request_body = 3.
    let part = [len(1, &[PROMPT.as_bytes()]), int(2, 1)].concat();
    assert_eq!(answers[1].encode_to_vec(), len(3, &[&len(1, &[&len(3, &[&len(3, &[&part])])])]));
    assert_eq!(answers.len(), 2);

    *fake.refuses.lock().unwrap() = Some(Refused::Overloaded { retry_after: Duration::from_millis(1_200) });
    let (answers, _) = give(&mut picker(&fake, 10), [begin(), body(PROMPT, true)]).await.unwrap();
    // ImmediateResponse: status = 1, headers = 2, body = 3, details = 5; HttpStatus.code = 1.
    // ProcessingResponse.immediate_response = 7.
    let headers = [option("content-type", "application/json"), option("retry-after", "2")].concat();
    let text = r#"{"error":{"code":429,"message":"the objective cannot be met now: try again later","type":"rate_limit_error"}}"#;
    let immediate =
        [len(1, &[&int(1, 429)]), len(2, &[&headers]), len(3, &[text.as_bytes()]), len(5, &[b"snowskin"])];
    assert_eq!(answers[0].encode_to_vec(), len(7, &[&immediate.concat()]));

    // HealthCheckRequest.service = 1; HealthCheckResponse.status = 1, SERVING = 1.
    let asked = proto::HealthCheckRequest { service: "x".into() };
    assert_eq!(asked.encode_to_vec(), b"\x0a\x01x");
    assert_eq!(proto::HealthCheckResponse { status: proto::SERVING }.encode_to_vec(), b"\x08\x01");
}

// ---------------------------------------------------------------------------------------------- requests

#[tokio::test]
async fn a_body_in_one_message_is_answered_after_its_headers() {
    let (fake, mut reports) = Fake::new();
    let mut picker = picker(&fake, 10);
    let first = modes(begin(), BodyMode::Buffered, BodyMode::None);
    let (answers, _) = give(&mut picker, [first]).await.unwrap();
    assert!(
        matches!(&answers[..], [ProcessingResponse { response: Some(Reply::RequestHeaders(answer)), dynamic_metadata: None }]
        if answer.response.as_ref().unwrap().header_mutation.is_none())
    );
    let (answers, _) = give(&mut picker, [body(PROMPT, false)]).await.unwrap();
    let [ProcessingResponse { response: Some(Reply::RequestBody(answer)), dynamic_metadata: Some(_) }] =
        &answers[..]
    else {
        panic!("{answers:?}");
    };
    let common = answer.response.clone().unwrap();
    assert!(common.body_mutation.is_none() && common.clear_route_cache);
    assert_eq!(common.header_mutation.unwrap().set_headers[0].header.as_ref().unwrap().raw_value, ENDPOINT);
    let last = [
        message(Part::RequestTrailers(proto::HttpTrailers {})),
        message(Part::ResponseHeaders(head(&[(":status", "200")], true))),
    ];
    give(&mut picker, last).await.unwrap();
    assert_eq!(reports.recv().await, Some((1, Progress::Done)));
    drop(picker);
    assert!(reports.try_recv().is_err(), "it ends once");
}

#[tokio::test]
async fn refusals_end_the_request_at_the_gateway() {
    let (fake, mut reports) = Fake::new();
    let whole = |text: &str| [begin(), body(text, true)];
    let status = async |messages: Vec<ProcessingRequest>| {
        refused(give(&mut picker(&fake, 10), messages).await.unwrap())
    };
    assert_eq!(status(whole("no json").into()).await.0, 400);
    assert_eq!(status(whole(r#"{"prompt":[1]}"#).into()).await.0, 400);
    assert_eq!(status(whole(r#"{"model":"m","prompt":[[1],[2]]}"#).into()).await.0, 400);
    assert_eq!(status(whole(&format!("{{\"a\":\"{}\"}}", "x".repeat(5_000))).into()).await.0, 413);
    let parts = |count| std::iter::once(begin()).chain((0..count).map(|_| body("1", false)));
    assert_eq!(status(parts(11).collect()).await.0, 503, "more than all bodies may have together");
    for mode in [BodyMode::None, BodyMode::Streamed, BodyMode::BufferedPartial, BodyMode::Grpc] {
        let (code, _, text) = status(vec![modes(begin(), mode, BodyMode::None)]).await;
        assert!(code == 500 && text.contains("FULL_DUPLEX_STREAMED"), "{text}");
    }
    let many: Vec<(&str, &str)> = vec![("a", "b"); 600];
    assert_eq!(status(vec![message(Part::RequestHeaders(head(&many, false)))]).await.0, 431);

    let refuse = |refused| *fake.refuses.lock().unwrap() = Some(refused);
    refuse(Refused::NoEngine);
    let (code, headers, _) = status(whole(PROMPT).into()).await;
    assert_eq!((code, headers[1].clone()), (503, ("retry-after".into(), "1".into())));
    refuse(Refused::NoModel);
    assert_eq!(status(whole(PROMPT).into()).await.0, 404);
    refuse(Refused::Overloaded { retry_after: Duration::ZERO });
    let (code, headers, _) = status(whole(PROMPT).into()).await;
    assert_eq!((code, headers[1].clone()), (429, ("retry-after".into(), "1".into())));
    assert!(reports.try_recv().is_err(), "nothing was reserved");

    let mut late = picker(&fake, 10);
    give(&mut late, [begin(), body("{", false)]).await.unwrap();
    let last = late.timed_out().unwrap();
    assert_eq!(refused((vec![last], Flow::Ends)).0, 408);
    assert!(late.timed_out().is_none());
}

#[tokio::test]
async fn only_endpoints_of_the_subset_are_chosen() {
    let (fake, _reports) = Fake::new();
    let ask = async |first: ProcessingRequest| {
        let given = give(&mut picker(&fake, 10), [first, body(PROMPT, true)]).await.unwrap();
        (given.0.len(), given)
    };
    assert_eq!(ask(subset(&["10.0.0.1:1", ENDPOINT])).await.0, 2);
    let among = fake.seen.lock().unwrap().pop().unwrap().among.unwrap();
    assert_eq!(among, ["10.0.0.1:1", ENDPOINT]);
    assert_eq!(refused(ask(subset(&["10.0.0.1:1"])).await.1).0, 503);
    assert_eq!(refused(ask(subset(&[])).await.1).0, 503, "the list is empty");
    let (namespace, key) = super::picker::SUBSET;
    let text = with_metadata(begin(), namespace, key, Kind::String(format!("10.0.0.1:1, {ENDPOINT}")));
    assert_eq!(ask(text).await.0, 2);
    let other = with_metadata(begin(), namespace, "other", Kind::String("10.0.0.1:1".into()));
    assert_eq!(ask(other).await.0, 2, "no subset");
    assert_eq!(fake.seen.lock().unwrap().pop().unwrap().among, None);
}

#[tokio::test]
async fn a_request_without_a_body_goes_to_any_engine() {
    let (fake, _reports) = Fake::new();
    let get = message(Part::RequestHeaders(head(&[(":method", "GET"), (":path", "/v1/models")], true)));
    let (answers, _) = give(&mut picker(&fake, 10), [get.clone()]).await.unwrap();
    assert!(matches!(
        &answers[..],
        [ProcessingResponse { response: Some(Reply::RequestHeaders(_)), dynamic_metadata: Some(_) }]
    ));
    fake.models.lock().unwrap().clear();
    assert_eq!(refused(give(&mut picker(&fake, 10), [get]).await.unwrap()).0, 503);
}

#[tokio::test]
async fn how_an_answer_goes_is_reported_and_its_end_once() {
    let failed_status = |status| [message(Part::ResponseHeaders(head(&[(":status", status)], false)))];
    let served = |endpoint: &str| {
        let begins = message(Part::ResponseHeaders(head(&STREAM, false)));
        with_metadata(
            begins,
            "envoy.lb",
            "x-gateway-destination-endpoint-served",
            Kind::String(endpoint.into()),
        )
    };
    let (first, second) = ("data: {}\n\ndata: {}\n", "\ndata: [DONE]\n\n");
    let tokens = [Progress::Prefilled, Progress::FirstToken, Progress::Tokens(1), Progress::Tokens(2)];
    let ended = [&tokens[..], &[Progress::Done]].concat();
    let cut = [&tokens[..2], &[Progress::Tokens(1), Progress::Failed]].concat();
    let failed = vec![Progress::Failed];
    for (what, messages, expected) in [
        ("in order", vec![served(ENDPOINT), answer(first, false), answer(second, true)], &ended),
        ("broken off", vec![served(ENDPOINT), answer(first, false)], &cut),
        ("elsewhere", vec![served("10.9.9.9:1"), answer(first, false), answer(second, true)], &failed),
        ("an error", [&failed_status("503")[..], &[answer(first, true)]].concat(), &failed),
        ("busy", [&failed_status("429")[..], &[answer("", true)]].concat(), &failed),
        ("no status", vec![message(Part::ResponseHeaders(head(&[], true)))], &vec![Progress::Done]),
        ("no answer", vec![], &failed),
    ] {
        let (fake, mut reports) = Fake::new();
        let mut picker = picker(&fake, 10);
        give(&mut picker, [begin(), body(PROMPT, true)]).await.unwrap();
        let (answers, _) = give(&mut picker, messages.clone()).await.unwrap();
        assert_eq!(answers.len(), messages.len(), "{what}: each message has an answer");
        drop(picker);
        drop(fake);
        let mut seen = Vec::new();
        while let Some((reservation, progress)) = reports.recv().await {
            assert_eq!(reservation, 1);
            seen.push(progress);
        }
        assert_eq!(seen, *expected, "{what}");
    }
}

#[tokio::test]
async fn a_retry_avoids_the_engine_that_failed_the_request_and_outcomes_are_counted() {
    let ((fake, _reports), record) = (Fake::new(), Arc::<Record>::default());
    let ask = async |id: &str, status: Option<&str>| {
        let begins = head(&[&COMPLETION[..], &[("x-request-id", id)]].concat(), false);
        let mut picker = recorded(&fake, 10, &record);
        let first = [message(Part::RequestHeaders(begins)), body(PROMPT, true)];
        let status = status.map(|status| message(Part::ResponseHeaders(head(&[(":status", status)], true))));
        give(&mut picker, first.into_iter().chain(status)).await.unwrap();
        fake.seen.lock().unwrap().pop().unwrap().avoid
    };
    assert_eq!(ask("a", Some("503")).await, [] as [u32; 0]);
    assert_eq!(ask("a", Some("429")).await, [1]);
    assert_eq!(ask("b", Some("404")).await, [] as [u32; 0], "it is another request");
    assert_eq!(ask("b", Some("200")).await, [] as [u32; 0], "what is wrong with a request is no failure");
    assert_eq!(ask("", None).await, [] as [u32; 0]);
    *fake.refuses.lock().unwrap() = Some(Refused::NoModel);
    give(&mut recorded(&fake, 10, &record), [begin(), body(PROMPT, true)]).await.unwrap();
    give(&mut recorded(&fake, 10, &record), [begin(), begin()]).await.unwrap_err();
    let count = |outcome| record.traffic.requests.get_or_create(&OutcomeLabels { outcome }).get();
    let counts = ["done", "failed", "left", "wrong", "protocol", "overloaded"].map(count);
    assert_eq!(
        (counts, record.traffic.retried.get(), record.traffic.in_flight.get()),
        ([2, 2, 1, 1, 1, 0], 1, 0)
    );
}

#[tokio::test]
async fn hostile_messages_end_the_stream() {
    let (fake, mut reports) = Fake::new();
    let observed = ProcessingRequest { observability_mode: true, ..begin() };
    let placed = || vec![begin(), body(PROMPT, true)];
    for (messages, code) in [
        (vec![ProcessingRequest::default()], Code::InvalidArgument),
        (vec![observed], Code::FailedPrecondition),
        (vec![body("{}", true)], Code::InvalidArgument),
        (vec![answer("x", false)], Code::InvalidArgument),
        (vec![begin(), begin()], Code::InvalidArgument),
        (vec![begin(), message(Part::ResponseHeaders(head(&STREAM, false)))], Code::InvalidArgument),
        ([placed(), placed()].concat(), Code::InvalidArgument),
        ([placed(), vec![body("x", false)]].concat(), Code::InvalidArgument),
    ] {
        let error = give(&mut picker(&fake, 10), messages.clone()).await.unwrap_err();
        assert_eq!(error.code(), code, "{messages:?}");
    }
    for reservation in [1, 2] {
        assert_eq!(reports.recv().await, Some((reservation, Progress::Failed)));
    }
    assert!(reports.try_recv().is_err());

    let whole = subset(&[ENDPOINT, "10.0.0.1:1"]).encode_to_vec();
    for cut in 0..whole.len() {
        // A cut at the end of a field is a message, too.
        if let Ok(message) = ProcessingRequest::decode(&whole[..cut]) {
            let _ = give(&mut picker(&fake, 10), [message]).await;
        }
    }
    let deep =
        (0..200).fold(Vec::new(), |inner, _| len(5, &[&len(1, &[&len(1, &[b"a"]), &len(2, &[&inner])])]));
    let deep =
        len(8, &[&len(1, &[&len(1, &[b"a"]), &len(2, &[&len(1, &[&len(1, &[b"a"]), &len(2, &[&deep])])])])]);
    assert!(ProcessingRequest::decode(&deep[..]).is_err(), "depth has a limit");
    // A length of almost 2^64, and a field that is no headers.
    assert!(ProcessingRequest::decode(&b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"[..]).is_err());
    assert!(ProcessingRequest::decode(&b"\x12\x02\x0a\x7f"[..]).is_err());
}

// ---------------------------------------------------------------------------------------------- loopback

fn serve(fake: &Arc<Fake>, streams_max: u32) -> GatewayServer {
    let gateway = Gateway::new(Arc::clone(fake), limits(), bounds(1_000), streams_max, Record::default());
    GatewayServer::serve("127.0.0.1:0".parse().unwrap(), gateway).unwrap()
}

async fn client(addr: std::net::SocketAddr) -> Grpc<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{addr}")).unwrap();
    Grpc::new(endpoint.connect().await.unwrap())
}

type Sender<S> = mpsc::Sender<S>;

/// A stream of a method, to which messages are sent one by one.
async fn open<S: prost::Message + 'static>(
    grpc: &mut Grpc<Channel>,
    first: S,
) -> Result<(Sender<S>, Streaming<ProcessingResponse>), Status> {
    let (send, receive) = mpsc::channel(16);
    send.send(first).await.unwrap();
    let request = tonic::Request::new(ReceiverStream::new(receive));
    let path = PathAndQuery::from_static(PROCESS);
    grpc.ready().await.unwrap();
    let opened = grpc.streaming(request, path, Prost::<S, ProcessingResponse>::default()).await?;
    Ok((send, opened.into_inner()))
}

#[tokio::test]
async fn a_request_goes_there_and_back_over_grpc() {
    let (fake, mut reports) = Fake::new();
    let server = serve(&fake, 10);
    let mut grpc = client(server.addr()).await;
    let (send, mut answers) = open(&mut grpc, begin()).await.unwrap();
    let (left, right) = PROMPT.split_at(9);
    send.send(body(left, false)).await.unwrap();
    send.send(body(right, false)).await.unwrap();
    send.send(message(Part::RequestTrailers(proto::HttpTrailers {}))).await.unwrap();
    let first = answers.message().await.unwrap().unwrap();
    assert!(matches!(first.response, Some(Reply::RequestHeaders(_))) && first.dynamic_metadata.is_some());
    for text in [left, right] {
        let Some(Reply::RequestBody(part)) = answers.message().await.unwrap().unwrap().response else {
            panic!("the body comes back");
        };
        let part = part.response.unwrap().body_mutation.unwrap().streamed_response.unwrap();
        assert_eq!((&part.body[..], part.end_of_stream), (text.as_bytes(), false));
    }
    let trailers = answers.message().await.unwrap().unwrap().response;
    assert!(matches!(trailers, Some(Reply::RequestTrailers(_))));
    let seen = fake.seen.lock().unwrap().pop().unwrap();
    let expected =
        Seen { tenant: "t".into(), model: "m".into(), tokens: vec![1, 2, 3], among: None, avoid: vec![] };
    assert_eq!(seen, expected);

    send.send(message(Part::ResponseHeaders(head(&STREAM, false)))).await.unwrap();
    send.send(answer("data: [DONE]\n\n", true)).await.unwrap();
    assert!(matches!(answers.message().await.unwrap().unwrap().response, Some(Reply::ResponseHeaders(_))));
    let Some(Reply::ResponseBody(part)) = answers.message().await.unwrap().unwrap().response else {
        panic!("the answer comes back");
    };
    let part = part.response.unwrap().body_mutation.unwrap().streamed_response.unwrap();
    assert_eq!((&part.body[..], part.end_of_stream), (&b"data: [DONE]\n\n"[..], true));
    drop(send);
    assert!(answers.message().await.unwrap().is_none(), "the stream ends in order");
    for progress in [Progress::Prefilled, Progress::FirstToken, Progress::Tokens(1), Progress::Done] {
        assert_eq!(reports.recv().await, Some((1, progress)));
    }
    assert!(reports.try_recv().is_err());
}

#[tokio::test]
async fn a_stream_that_is_cut_ends_its_reservation_once_and_frees_its_place() {
    let (fake, mut reports) = Fake::new();
    let server = serve(&fake, 1);
    for reservation in 1..=3 {
        // Its place is free as soon as the end of the one before was reported, or a little later.
        let (send, mut answers, grpc) = loop {
            let mut grpc = client(server.addr()).await;
            match open(&mut grpc, begin()).await {
                Ok((send, answers)) => break (send, answers, grpc),
                Err(status) => assert_eq!(status.code(), Code::ResourceExhausted),
            }
        };
        let mut other = client(server.addr()).await;
        let refused = open(&mut other, begin()).await.map(drop).unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted, "one is the most");
        send.send(body(PROMPT, true)).await.unwrap();
        answers.message().await.unwrap().unwrap();
        match reservation {
            1 => drop((send, answers)),
            2 => drop(send),
            _ => drop((grpc, send, answers)),
        }
        assert_eq!(reports.recv().await, Some((reservation, Progress::Failed)));
    }
    assert!(reports.try_recv().is_err());
}

/// A frame that is no `ProcessingRequest`: its field 2 is a text.
#[derive(Clone, PartialEq, prost::Message)]
struct Garbage {
    #[prost(string, tag = "2")]
    text: String,
}

#[tokio::test]
async fn hostile_frames_are_refused_and_the_server_goes_on() {
    let (fake, mut reports) = Fake::new();
    let server = serve(&fake, 10);
    let mut grpc = client(server.addr()).await;
    for (text, code) in
        [("\u{7f}\u{7f}".to_owned(), Code::InvalidArgument), ("x".repeat(2 << 20), Code::OutOfRange)]
    {
        let (_send, mut answers) = open(&mut grpc, Garbage { text }).await.unwrap();
        // The stream ends: with a status, or because what was sent cannot be read.
        match answers.message().await {
            Ok(answer) => assert!(answer.is_none()),
            Err(status) => assert!(status.code() == code || status.code() == Code::Unknown, "{status}"),
        }
    }
    // Bytes that are not HTTP/2.
    let mut raw = std::net::TcpStream::connect(server.addr()).unwrap();
    raw.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let _ = raw.read_to_end(&mut Vec::new());
    let path = PathAndQuery::from_static("/envoy.service.ext_proc.v3.ExternalProcessor/Other");
    let codec = Prost::<Garbage, Garbage>::default();
    grpc.ready().await.unwrap();
    let unknown = grpc.unary(tonic::Request::new(Garbage::default()), path, codec).await.unwrap_err();
    assert_eq!(unknown.code(), Code::Unimplemented);

    let (send, mut answers) = open(&mut client(server.addr()).await, begin()).await.unwrap();
    send.send(body(PROMPT, true)).await.unwrap();
    assert!(answers.message().await.unwrap().is_some());
    assert!(reports.try_recv().is_err());
}

#[tokio::test]
async fn health_follows_the_engines() {
    let (fake, _reports) = Fake::new();
    let server = serve(&fake, 10);
    let mut grpc = client(server.addr()).await;
    let mut check = async |service: &str| {
        let asked = tonic::Request::new(proto::HealthCheckRequest { service: service.into() });
        grpc.ready().await.unwrap();
        let codec = Prost::<_, proto::HealthCheckResponse>::default();
        let answer = grpc.unary(asked, PathAndQuery::from_static(CHECK), codec).await;
        answer.map(|answer| answer.into_inner().status).map_err(|status| status.code())
    };
    let names = ["", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"];
    for name in names {
        assert_eq!(check(name).await, Ok(proto::SERVING), "{name}");
    }
    assert_eq!(check("other").await, Err(Code::NotFound));
    fake.models.lock().unwrap().clear();
    for name in names {
        assert_eq!(check(name).await, Ok(proto::NOT_SERVING), "{name}");
    }
    assert_eq!(check("liveness").await, Ok(proto::SERVING));
}

#[tokio::test]
async fn health_that_is_watched_is_told_when_it_changes() {
    let (fake, _reports) = Fake::new();
    let server = serve(&fake, 2);
    // Each on a connection of its own: a client does not open more streams than the server allows.
    let watch = async |service: &str| {
        let mut grpc = client(server.addr()).await;
        let asked = tonic::Request::new(proto::HealthCheckRequest { service: service.into() });
        grpc.ready().await.unwrap();
        let codec = Prost::<_, proto::HealthCheckResponse>::default();
        grpc.server_streaming(asked, PathAndQuery::from_static(WATCH), codec).await
    };
    let mut all = watch("").await.unwrap().into_inner();
    let mut other = watch("other").await.unwrap().into_inner();
    assert_eq!(watch("").await.unwrap_err().code(), Code::ResourceExhausted);
    assert_eq!(other.message().await.unwrap().unwrap().status, proto::SERVICE_UNKNOWN);
    assert_eq!(all.message().await.unwrap().unwrap().status, proto::SERVING);
    fake.models.lock().unwrap().clear();
    assert_eq!(all.message().await.unwrap().unwrap().status, proto::NOT_SERVING);
    fake.models.lock().unwrap().push("m".into());
    assert_eq!(all.message().await.unwrap().unwrap().status, proto::SERVING);
}

#[tokio::test]
async fn a_text_is_tokenised_by_an_engine() {
    let (fake, _reports) = Fake::new();
    let engine = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    *fake.decode.lock().unwrap() = engine.local_addr().unwrap().to_string();
    let answers = async {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let (mut stream, _) = engine.accept().await.unwrap();
        let mut request = vec![0; 4_096];
        let read = stream.read(&mut request).await.unwrap();
        stream
            .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 26\r\n\r\n{\"count\":2,\"tokens\":[5,6]}")
            .await
            .unwrap();
        String::from_utf8_lossy(&request[..read]).into_owned()
    };
    let messages = [begin(), body(r#"{"model":"m","prompt":"two words"}"#, true)];
    let mut picker = picker(&fake, 10);
    let (request, given) = tokio::join!(answers, give(&mut picker, messages));
    assert!(request.starts_with("POST /tokenize "), "{request}");
    given.unwrap();
    assert_eq!(fake.seen.lock().unwrap().pop().unwrap().tokens, [5, 6]);
}

#[tokio::test]
async fn a_conductor_chooses_among_its_engines() {
    let engine = |port: u16, tenant: &str| crate::EngineConfig {
        instance: format!("e{port}"),
        model: "m".into(),
        tenant: tenant.into(),
        http: format!("127.0.0.1:{port}"),
        ..crate::EngineConfig::default()
    };
    let mut config = crate::Config {
        listen: "127.0.0.1:0".parse().unwrap(),
        engines: vec![engine(1, "t"), engine(2, "t"), engine(3, "other")],
        ..crate::Config::default()
    };
    config.gateway.listen = Some("127.0.0.1:0".parse().unwrap());
    let conductor = crate::Conductor::bind(config).unwrap().spawn().unwrap();
    let mut grpc = client(conductor.gateway_addr().unwrap()).await;
    let mut ask = async |first: ProcessingRequest| {
        let (send, mut answers) = open(&mut grpc, first).await.unwrap();
        send.send(body(PROMPT, true)).await.unwrap();
        answers.message().await.unwrap().unwrap()
    };
    let chosen = |answer: ProcessingResponse| {
        let Some(Reply::RequestHeaders(answer)) = answer.response else { panic!("{answer:?}") };
        let headers = answer.response.unwrap().header_mutation.unwrap().set_headers;
        String::from_utf8(headers[0].header.clone().unwrap().raw_value.to_vec()).unwrap()
    };
    for endpoint in ["127.0.0.1:2", "127.0.0.1:1", "127.0.0.1:2"] {
        assert_eq!(chosen(ask(subset(&["10.0.0.1:1", endpoint])).await), endpoint);
    }
    let any = chosen(ask(begin()).await);
    assert!(["127.0.0.1:1", "127.0.0.1:2"].contains(&any.as_str()), "{any}");
    for none in [&["127.0.0.1:3"][..], &[]] {
        assert_eq!(refused((vec![ask(subset(none)).await], Flow::Ends)).0, 503, "{none:?}");
    }
    conductor.stop();
}
