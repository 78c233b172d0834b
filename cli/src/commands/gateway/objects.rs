//! The gateway's API: objects by key, lists of keys, health and metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use serde::{Deserialize, Serialize};
use store_client::{
    Client, ErrorCode, Get, ObjectInfo, Pin as Keep, PutOptions, RemoveMode, Retention, Store as _,
    StoreError, metrics_text_of,
};
use store_master::is_own_host;

use super::parse::{Wanted, has_tag, percent_decode, percent_encode, query_pairs, wanted_range};
use super::pool::{Busy, Pool};
use super::room::{Kept, Rooms};

/// State that the handlers share.
#[derive(Clone)]
pub(super) struct App {
    pub(super) pool: Pool,
    pub(super) counters: Arc<Counters>,
    /// Memory for values in transit.
    pub(super) rooms: Rooms,
    /// Longest object, bytes.
    pub(super) body_bytes_max: u64,
    /// Whether requests must address this host by IP address or as `localhost`, if they have a Host header.
    pub(super) own_hosts_only: bool,
}

/// Most keys per query or page.
const KEYS_MAX: usize = 1024;
/// Longest body of a query, bytes.
const QUESTION_BYTES_MAX: u64 = 2 << 20;
/// Attempts to look up and read an object that is replaced in between.
const READ_TRIES: u32 = 3;

const OBJECTS: &str = "/v1/objects/";
const OPENAPI: &str = include_str!("openapi.json");

/// Every path with its methods. `GET` includes `HEAD` unless stated otherwise.
pub(super) fn routes() -> Vec<(&'static str, &'static [&'static str], MethodRouter<App>)> {
    vec![
        (
            "/v1/objects/{*key}",
            &["put", "get", "head", "delete"],
            get(get_object).put(put_object).head(head_object).delete(delete_object),
        ),
        ("/v1/objects", &["get"], get(list_objects)),
        ("/v1/exists", &["post"], post(exists)),
        ("/health", &["get"], get(health)),
        ("/ready", &["get"], get(ready)),
        ("/metrics", &["get"], get(metrics)),
        ("/openapi.json", &["get"], get(openapi)),
    ]
}

pub(super) fn router(app: App) -> Router {
    let mut router = Router::new();
    for (path, _, methods) in routes() {
        router = router.route(path, methods);
    }
    router
        .fallback(|| async {
            Problem::new(StatusCode::NOT_FOUND, "this path does not exist: see /openapi.json")
        })
        .method_not_allowed_fallback(|| async {
            Problem::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "this path does not support the method: see /openapi.json",
            )
        })
        .layer(middleware::from_fn_with_state(app.clone(), guard))
        .layer(middleware::from_fn_with_state(app.clone(), count))
        .with_state(app)
}

/// Counters of the gateway since its start.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// Responses by the first digit of the status, 1 to 5.
    answers: [AtomicU64; 5],
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    in_flight: AtomicU64,
}

/// An error response.
#[derive(Debug)]
pub(super) struct Problem {
    status: StatusCode,
    code: &'static str,
    message: String,
}

impl Problem {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, code: status.canonical_reason().unwrap_or("Error"), message: message.into() }
    }

    pub(super) fn wrong(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let body = serde_json::json!({ "error": self.code, "message": self.message });
        let mut response = json(self.status, &body);
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

impl From<Busy> for Problem {
    fn from(Busy: Busy) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "the gateway is busy: try again, or raise --clients")
    }
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        let code = error.code();
        let status = match code {
            ErrorCode::InvalidKey | ErrorCode::InvalidParams => StatusCode::BAD_REQUEST,
            ErrorCode::ObjectNotFound | ErrorCode::KeyNotFound | ErrorCode::ReplicaIsNotReady => {
                StatusCode::NOT_FOUND
            }
            ErrorCode::ObjectAlreadyExists | ErrorCode::ObjectHasLease => StatusCode::CONFLICT,
            ErrorCode::KeysUltraLimit | ErrorCode::MetadataFull => StatusCode::INSUFFICIENT_STORAGE,
            code if code.is_no_room() => StatusCode::INSUFFICIENT_STORAGE,
            ErrorCode::BufferOverflow => StatusCode::PAYLOAD_TOO_LARGE,
            ErrorCode::InternalError => StatusCode::INTERNAL_SERVER_ERROR,
            _ => StatusCode::SERVICE_UNAVAILABLE,
        };
        Self { status, code: code.name(), message: error.to_string() }
    }
}

type Answer = Result<Response, Problem>;

/// A gateway on loopback must not serve web pages that are open in a browser on this host. A page whose host
/// name was made to resolve to this host (DNS rebinding) still sends that name, and is refused.
async fn guard(State(app): State<App>, request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).map(|host| host.to_str().unwrap_or_default());
    if app.own_hosts_only && host.is_some_and(|host| !is_own_host(host)) {
        return Problem::new(StatusCode::FORBIDDEN, "the Host header must be an IP address or localhost")
            .into_response();
    }
    next.run(request).await
}

async fn count(State(app): State<App>, request: Request, next: Next) -> Response {
    let _flying = Flying::new(&app.counters.in_flight);
    let response = next.run(request).await;
    let class = usize::from(response.status().as_u16() / 100).clamp(1, 5);
    app.counters.answers[class - 1].fetch_add(1, Ordering::Relaxed);
    response
}

/// A request in progress. It is uncounted when dropped, also when the client disconnects early.
struct Flying<'a>(&'a AtomicU64);

impl<'a> Flying<'a> {
    fn new(count: &'a AtomicU64) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Flying<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn put_object(State(app): State<App>, uri: Uri, headers: HeaderMap, body: Body) -> Answer {
    let key = key_of(&uri)?;
    let options = put_options(&uri)?;
    let max = app.body_bytes_max;
    let announced = content_length(&headers)?;
    if announced.is_some_and(|len| len > max) {
        return Err(too_large(max));
    }
    if announced == Some(0) {
        return Err(Problem::wrong("the body is empty, but an object has at least one byte"));
    }
    let (value, room) = app.rooms.collect(body, max, announced).await?;
    if value.is_empty() {
        return Err(Problem::wrong("the body is empty, but an object has at least one byte"));
    }
    let bytes = value.len() as u64;
    let put = move |client: &mut Client| {
        // The value is in memory until it is stored, even if the client disconnects.
        let _room = room;
        client.put(&key, &value, &options)
    };
    match app.pool.call(put).await?? {
        true => {
            app.counters.written_bytes.fetch_add(bytes, Ordering::Relaxed);
            Ok(json(StatusCode::CREATED, &serde_json::json!({ "bytes": bytes })))
        }
        false => Err(StoreError::from(ErrorCode::ObjectAlreadyExists).into()),
    }
}

async fn get_object(State(app): State<App>, uri: Uri, headers: HeaderMap) -> Answer {
    let key = key_of(&uri)?;
    for _ in 0..READ_TRIES {
        let Some(info) = look_up(&app, key.clone()).await? else { return Err(miss()) };
        let tag = tag_of(&info);
        if header_text(&headers, header::IF_NONE_MATCH).is_some_and(|list| has_tag(list, &tag)) {
            let mut response = StatusCode::NOT_MODIFIED.into_response();
            describe(&mut response, &tag);
            return Ok(response);
        }
        // The client has part of an object already: a range of another object is useless to it.
        let same = header_text(&headers, header::IF_RANGE).is_none_or(|wanted| wanted == tag);
        let range = header_text(&headers, header::RANGE).filter(|_| same);
        let (first, last, status) = match range.map_or(Wanted::All, |range| wanted_range(range, info.len)) {
            Wanted::All => (0, info.len.saturating_sub(1), StatusCode::OK),
            Wanted::Part(first, last) => (first, last, StatusCode::PARTIAL_CONTENT),
            Wanted::Nothing => return Ok(unsatisfiable(&info)),
        };
        let len = last - first + 1;
        if len > app.body_bytes_max {
            return Err(too_large(app.body_bytes_max));
        }
        let room = app.rooms.to_go(len)?;
        let wanted = key.clone();
        let read = move |client: &mut Client| (read(client, &wanted, &info, first..=last), room);
        let (part, room) = app.pool.call(read).await?;
        let part = match part? {
            Read::Bytes(bytes) => Bytes::from(bytes),
            Read::Miss => return Err(miss()),
            Read::Another => continue,
        };
        app.counters.read_bytes.fetch_add(len, Ordering::Relaxed);
        let mut response = Response::new(Body::new(Kept { bytes: part, _room: room }));
        *response.status_mut() = status;
        if status == StatusCode::PARTIAL_CONTENT {
            set(&mut response, header::CONTENT_RANGE, &format!("bytes {first}-{last}/{}", info.len));
        }
        describe(&mut response, &tag);
        set(&mut response, header::CONTENT_TYPE, "application/octet-stream");
        return Ok(response);
    }
    Err(Problem::new(
        StatusCode::SERVICE_UNAVAILABLE,
        "the object is replaced too often to be read: try again",
    ))
}

/// The result of reading an object that was looked up before.
enum Read {
    Bytes(Vec<u8>),
    Miss,
    /// Another object has replaced it, so its length and tag are no longer valid.
    Another,
}

fn read(
    client: &mut Client,
    key: &[u8],
    info: &ObjectInfo,
    range: std::ops::RangeInclusive<u64>,
) -> Result<Read, StoreError> {
    let all = *range.start() == 0 && *range.end() == info.len - 1;
    if all {
        let Some(value) = client.get(key)? else { return Ok(Read::Miss) };
        let same = value.len() as u64 == info.len && te_host::crc32c_of(0, &value) == info.checksum;
        return Ok(if same { Read::Bytes(value) } else { Read::Another });
    }
    let mut part = Vec::new();
    let read = match client.get_with(Get::new(key, &mut part).range(range)) {
        // The object is shorter than before, so it is another one.
        Err(error) if error.code() == ErrorCode::InvalidParams => return Ok(Read::Another),
        read => read?,
    };
    if read.is_none() {
        return Ok(Read::Miss);
    }
    // A generation is used once: if it is unchanged after the read, the part is of that object.
    let now = client.master().look_up(key)?;
    Ok(if now.is_some_and(|now| now == *info) { Read::Bytes(part) } else { Read::Another })
}

async fn head_object(State(app): State<App>, uri: Uri) -> Answer {
    let Some(info) = look_up(&app, key_of(&uri)?).await? else { return Err(miss()) };
    let mut response = StatusCode::OK.into_response();
    describe(&mut response, &tag_of(&info));
    set(&mut response, header::CONTENT_TYPE, "application/octet-stream");
    set(&mut response, header::CONTENT_LENGTH, &info.len.to_string());
    Ok(response)
}

async fn delete_object(State(app): State<App>, uri: Uri) -> Answer {
    let key = key_of(&uri)?;
    let mut force = false;
    for (name, value) in query(&uri)? {
        match (&name[..], &value[..]) {
            ("force", "true" | "1" | "") => force = true,
            ("force", "false" | "0") => force = false,
            (name, _) => return Err(unknown(name, "force=true|false")),
        }
    }
    match app.pool.call(move |client| client.remove(&key, RemoveMode::forced(force))).await?? {
        true => Ok(StatusCode::NO_CONTENT.into_response()),
        false => Err(miss()),
    }
}

#[derive(Serialize)]
struct Listed {
    /// The key as text, with invalid UTF-8 replaced; `href` has the exact bytes.
    key: String,
    href: String,
    bytes: u64,
    replicas: u8,
    complete: bool,
    leased: bool,
}

async fn list_objects(State(app): State<App>, uri: Uri) -> Answer {
    let (mut prefix, mut cursor, mut limit) = (Vec::new(), 0u64, 100u32);
    let Some(text) = uri.query() else { return list(&app, prefix, cursor, limit).await };
    for (name, value) in query_pairs(text).map_err(Problem::wrong)? {
        let number = || std::str::from_utf8(&value).ok().and_then(|text| text.parse::<u64>().ok());
        match (&name[..], number()) {
            (b"prefix", _) => prefix = value,
            (b"cursor", Some(number)) => cursor = number,
            (b"limit", Some(number @ 1..=1024)) => limit = number as u32,
            (name, _) => {
                let name = String::from_utf8_lossy(name).into_owned();
                return Err(unknown(&name, "prefix=TEXT, cursor=NUMBER, limit=1 to 1024"));
            }
        }
    }
    list(&app, prefix, cursor, limit).await
}

async fn list(app: &App, prefix: Vec<u8>, cursor: u64, limit: u32) -> Answer {
    let page = app.pool.call(move |client| client.master().list(&prefix, cursor, limit)).await??;
    let objects: Vec<_> = page
        .entries
        .into_iter()
        .map(|entry| Listed {
            href: format!("{OBJECTS}{}", percent_encode(&entry.key)),
            key: String::from_utf8_lossy(&entry.key).into_owned(),
            bytes: entry.len,
            replicas: entry.replicas,
            complete: entry.complete,
            leased: entry.leased,
        })
        .collect();
    // As text, because JSON numbers above 2^53 are not exact in many languages.
    let cursor = (page.cursor != 0).then(|| page.cursor.to_string());
    Ok(json(StatusCode::OK, &serde_json::json!({ "objects": objects, "cursor": cursor })))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    keys: Vec<String>,
}

async fn exists(State(app): State<App>, headers: HeaderMap, body: Body) -> Answer {
    let announced = content_length(&headers)?;
    if announced.is_some_and(|len| len > QUESTION_BYTES_MAX) {
        return Err(too_large(QUESTION_BYTES_MAX));
    }
    let (body, _room) = app.rooms.collect(body, QUESTION_BYTES_MAX, announced).await?;
    let question: Question = serde_json::from_slice(&body)
        .map_err(|error| Problem::wrong(format!("write {{\"keys\": [\"…\", …]}}: {error}")))?;
    if question.keys.len() > KEYS_MAX {
        return Err(Problem::wrong(format!(
            "the query has {} keys, but at most {KEYS_MAX} are allowed",
            question.keys.len()
        )));
    }
    let asked = move |client: &mut Client| {
        let keys: Vec<&[u8]> = question.keys.iter().map(String::as_bytes).collect();
        client.batch_exists(&keys)
    };
    let exists = app.pool.call(asked).await??;
    Ok(json(StatusCode::OK, &serde_json::json!({ "exists": exists })))
}

async fn health() -> Response {
    json(StatusCode::OK, &serde_json::json!({ "status": "ok" }))
}

/// Whether a put could succeed: the master answers, and at least one node lends memory.
async fn ready(State(app): State<App>) -> Answer {
    let why = match app.pool.call(|client| client.master().stats()).await {
        Ok(Ok(stats)) if stats.segments > 0 => {
            return Ok(json(StatusCode::OK, &serde_json::json!({ "ready": true })));
        }
        Ok(Ok(_)) => "no node lends memory".to_owned(),
        Ok(Err(error)) => error.to_string(),
        Err(busy) => Problem::from(busy).message,
    };
    Ok(json(StatusCode::SERVICE_UNAVAILABLE, &serde_json::json!({ "ready": false, "why": why })))
}

async fn metrics(State(app): State<App>) -> Response {
    use std::fmt::Write as _;
    let counters = &app.counters;
    let mut out = metrics_text_of(app.pool.metrics());
    out.push_str("# HELP snowskin_gateway_requests Requests that were answered, by status class.\n");
    out.push_str("# TYPE snowskin_gateway_requests counter\n");
    for (class, answers) in (1..).zip(&counters.answers) {
        let answers = answers.load(Ordering::Relaxed);
        let _ = writeln!(out, "snowskin_gateway_requests_total{{status=\"{class}xx\"}} {answers}");
    }
    let figures = [
        ("read_bytes", "counter", "_total", "Bytes of objects sent to clients.", &counters.read_bytes),
        (
            "written_bytes",
            "counter",
            "_total",
            "Bytes of objects stored for clients.",
            &counters.written_bytes,
        ),
        ("requests_in_flight", "gauge", "", "Requests in progress.", &counters.in_flight),
    ];
    for (name, kind, suffix, help, value) in figures {
        let value = value.load(Ordering::Relaxed);
        let _ = writeln!(out, "# HELP snowskin_gateway_{name} {help}\n# TYPE snowskin_gateway_{name} {kind}");
        let _ = writeln!(out, "snowskin_gateway_{name}{suffix} {value}");
    }
    let [incoming, outgoing] = app.rooms.taken();
    for (name, help, bytes) in [
        ("incoming_bytes", "Memory held by uploads in progress, bytes.", incoming),
        ("outgoing_bytes", "Memory held by downloads in progress, bytes.", outgoing),
    ] {
        let _ = writeln!(out, "# HELP snowskin_gateway_{name} {help}\n# TYPE snowskin_gateway_{name} gauge");
        let _ = writeln!(out, "snowskin_gateway_{name} {bytes}");
    }
    out.push_str("# EOF\n");
    let mut response = out.into_response();
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    set(&mut response, header::CONTENT_TYPE, kind);
    response
}

async fn openapi() -> Response {
    let mut response = OPENAPI.into_response();
    set(&mut response, header::CONTENT_TYPE, "application/json");
    response
}

async fn look_up(app: &App, key: Vec<u8>) -> Result<Option<ObjectInfo>, Problem> {
    Ok(app.pool.call(move |client| client.master().look_up(&key)).await??)
}

/// The key in a path: any bytes, percent-encoded; `/` may stay as it is.
fn key_of(uri: &Uri) -> Result<Vec<u8>, Problem> {
    let text = uri.path().strip_prefix(OBJECTS).unwrap_or_default();
    let key = percent_decode(text).map_err(Problem::wrong)?;
    if key.is_empty() || key.len() > store_core::wire::KEY_BYTES_MAX {
        return Err(StoreError::from(ErrorCode::InvalidKey).into());
    }
    Ok(key)
}

/// The names and values of a query, which must be text.
fn query(uri: &Uri) -> Result<Vec<(String, String)>, Problem> {
    let pairs = query_pairs(uri.query().unwrap_or_default()).map_err(Problem::wrong)?;
    let text = |bytes| String::from_utf8(bytes).map_err(|_| Problem::wrong("the query is not UTF-8"));
    pairs.into_iter().map(|(name, value)| Ok((text(name)?, text(value)?))).collect()
}

fn put_options(uri: &Uri) -> Result<PutOptions, Problem> {
    const OFFERED: &str = "replicas=1 to 8, ttl_ms=1 or more, pin=none|soft|hard, group=NAME";
    let mut options = PutOptions::default();
    let mut retention = Retention::default();
    for (name, value) in query(uri)? {
        let number = value.parse::<u32>().ok();
        match (&name[..], number, &value[..]) {
            ("replicas", Some(replicas @ 1..=8), _) => options.replicas = replicas as u8,
            ("ttl_ms", Some(ttl_ms @ 1..), _) => retention.ttl_ms = Some(ttl_ms),
            ("pin", _, "none") => retention.pin = Keep::None,
            ("pin", _, "soft") => retention.pin = Keep::Soft,
            ("pin", _, "hard") => retention.pin = Keep::Hard,
            ("group", _, group) if !group.is_empty() => {
                retention.group = Some(crate::commands::put::group_number(group));
            }
            (name, ..) => return Err(unknown(name, OFFERED)),
        }
    }
    Ok(PutOptions { retention, ..options })
}

fn unknown(name: &str, offered: &str) -> Problem {
    let name = crate::output::printable(name);
    Problem::wrong(format!("query parameter `{name}` is unknown or out of range; use {offered}"))
}

fn content_length(headers: &HeaderMap) -> Result<Option<u64>, Problem> {
    match headers.get(header::CONTENT_LENGTH) {
        None => Ok(None),
        Some(value) => {
            let number = value.to_str().ok().and_then(|text| text.parse().ok());
            number.map(Some).ok_or_else(|| Problem::wrong("Content-Length is not a number"))
        }
    }
}

fn tag_of(info: &ObjectInfo) -> String {
    format!("\"{:08x}-{:x}\"", info.checksum, info.generation)
}

fn describe(response: &mut Response, tag: &str) {
    set(response, header::ETAG, tag);
    set(response, header::ACCEPT_RANGES, "bytes");
}

fn unsatisfiable(info: &ObjectInfo) -> Response {
    let message = format!("the object has {} bytes, none of which are in the requested range", info.len);
    let mut response = Problem::new(StatusCode::RANGE_NOT_SATISFIABLE, message).into_response();
    set(&mut response, header::CONTENT_RANGE, &format!("bytes */{}", info.len));
    response
}

fn miss() -> Problem {
    StoreError::from(ErrorCode::ObjectNotFound).into()
}

pub(super) fn too_large(max: u64) -> Problem {
    let message = format!(
        "an object has at most {max} bytes here: use the client library for longer ones, or raise \
        --body-bytes-max"
    );
    Problem::new(StatusCode::PAYLOAD_TOO_LARGE, message)
}

fn header_text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

fn set(response: &mut Response, name: HeaderName, value: &str) {
    // All values that are set here are visible ASCII.
    if let Ok(value) = HeaderValue::from_str(value) {
        response.headers_mut().insert(name, value);
    }
}

fn json(status: StatusCode, value: &impl Serialize) -> Response {
    let body = serde_json::to_string(value).unwrap_or_default() + "\n";
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use axum::http::Method;

    use super::*;

    #[test]
    fn the_document_describes_every_route_and_no_other() {
        let document: serde_json::Value = serde_json::from_str(OPENAPI).expect("JSON");
        let mut described = BTreeSet::new();
        for (path, item) in document["paths"].as_object().expect("paths") {
            for (method, operation) in item.as_object().expect("an item") {
                if method == "parameters" {
                    continue;
                }
                described.insert((path.clone(), method.clone()));
                assert!(operation["summary"].is_string(), "{method} {path} has no summary");
                assert!(
                    operation["responses"].as_object().is_some_and(|all| !all.is_empty()),
                    "{method} {path}"
                );
            }
        }
        let served: BTreeSet<_> = routes()
            .into_iter()
            .flat_map(|(path, methods, _)| {
                methods.iter().map(move |method| (path.replace("{*key}", "{key}"), (*method).to_owned()))
            })
            .collect();
        assert_eq!(described, served);
    }

    #[test]
    fn every_schema_that_the_document_names_is_there() {
        let document: serde_json::Value = serde_json::from_str(OPENAPI).expect("JSON");
        for part in OPENAPI.split("\"$ref\": \"#").skip(1) {
            let pointer = part.split('"').next().expect("closed");
            assert!(document.pointer(pointer).is_some(), "{pointer}");
        }
    }

    #[test]
    fn codes_of_the_store_have_a_status_that_says_whether_to_retry() {
        let status = |code: ErrorCode| Problem::from(StoreError::from(code)).status.as_u16();
        assert_eq!(status(ErrorCode::ObjectNotFound), 404);
        assert_eq!(status(ErrorCode::ObjectAlreadyExists), 409);
        assert_eq!(status(ErrorCode::NoAvailableHandle), 507);
        assert_eq!(status(ErrorCode::InvalidKey), 400);
        assert_eq!(status(ErrorCode::RpcTimeout), 503);
        assert_eq!(status(ErrorCode::TransferFail), 503);
    }

    #[test]
    fn methods_are_those_that_are_listed() {
        // Compares `routes` with the methods that are served: a handler that its list does not name is found
        // here.
        for (path, methods, router) in routes() {
            let text = format!("{router:?}");
            for method in
                [Method::GET, Method::PUT, Method::POST, Method::DELETE, Method::PATCH, Method::HEAD]
            {
                let name = method.as_str().to_lowercase();
                let field = format!("{name}: None");
                assert_eq!(!text.contains(&field), methods.contains(&&name[..]), "{method} {path}");
            }
        }
    }
}
