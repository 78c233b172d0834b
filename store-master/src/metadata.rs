//! `/metadata`: a small server of bytes under keys, in which engines find each other by name.
//!
//! It is beside the store, not of it: the master never reads what is kept here, and a restart forgets it (owners put it again when
//! they renew it). The shape of the requests is what Mooncake's engines use of their metadata server:
//!
//! ```text
//!   GET    /metadata?key=KEY                 200 value, ETag | 404
//!   PUT    /metadata?key=KEY[&ttl_ms=MS]     200 ETag | 412 not as If-Match or If-None-Match say | 413, 507 too much
//!   DELETE /metadata?key=KEY                 200 | 404 | 412
//! ```
//!
//! Beyond that shape: a value may have a time to live, after which it is gone (`ttl_ms`, 1 to 86,400,000; none: until it is deleted),
//! and every version of a value has an `ETag`, so that writers compare and set: `If-Match: "TAG"` and `If-None-Match: *`
//! (RFC 9110 §13.1). Bad requests end 400 with a sentence that says why; what a web page would change ends 403.
//!
//! Bounded in every direction: [`MetadataLimits`]. Nobody waits for the serving thread here, nor does it for this.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde::Deserialize;
use tokio::sync::Semaphore;

use crate::config::MetadataLimits;
use crate::http::BODY_TIME_MAX;

/// Values that arrive at a time: what they hold is not counted yet.
const ARRIVING_MAX: usize = 32;
const TTL_MS_MAX: u64 = 86_400_000;
/// What a key costs beside its own bytes and its value's.
const ENTRY_OVERHEAD_BYTES: u64 = 128;
/// Values that one request may let expire.
const EXPIRED_MAX: usize = 256;

/// The routes, with a table of their own behind them.
pub(crate) fn router(limits: MetadataLimits) -> Router {
    // Versions of an earlier life must not be taken for this one's.
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let table = Mutex::new(Table::new(limits, u64::try_from(since.as_micros()).unwrap_or_default()));
    let desk = Desk { table, limits, arriving: Semaphore::new(ARRIVING_MAX) };
    let methods = get(read).put(write).delete(remove);
    Router::new().route("/metadata", methods).with_state(Arc::new(desk))
}

struct Desk {
    table: Mutex<Table>,
    limits: MetadataLimits,
    arriving: Semaphore,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Params {
    key: Option<String>,
    ttl_ms: Option<u64>,
}

type Asked = Result<Query<Params>, QueryRejection>;

async fn read(State(desk): State<Arc<Desk>>, params: Asked) -> Response {
    let asked = desk.params(params).and_then(|params| params.without_ttl());
    let key = match asked {
        Ok(key) => key,
        Err(refused) => return refused.into_response(),
    };
    match desk.table().get(&key, Instant::now()) {
        Some((value, version)) => {
            let headers =
                [(header::ETAG, tag(version)), (header::CACHE_CONTROL, HeaderValue::from_static("no-store"))];
            (headers, value).into_response()
        }
        None => Refused::NotFound.into_response(),
    }
}

async fn write(State(desk): State<Arc<Desk>>, params: Asked, headers: HeaderMap, body: Body) -> Response {
    let put = async {
        no_browser(&headers)?;
        let params = desk.params(params)?;
        let expected = expectation(&headers)?;
        let ttl = match params.ttl_ms {
            None => None,
            Some(ttl @ 1..=TTL_MS_MAX) => Some(Duration::from_millis(ttl)),
            Some(_) => return Err(Refused::Bad("ttl_ms must be 1 to 86400000")),
        };
        let value = desk.receive(&headers, body).await?;
        desk.table().put(params.key, value, expected, ttl, Instant::now())
    };
    match put.await {
        Ok(version) => ([(header::ETAG, tag(version))], "metadata updated\n").into_response(),
        Err(refused) => refused.into_response(),
    }
}

async fn remove(State(desk): State<Arc<Desk>>, params: Asked, headers: HeaderMap) -> Response {
    let deleted = no_browser(&headers).and_then(|()| desk.params(params)).and_then(|params| {
        let (key, expected) = (params.without_ttl()?, expectation(&headers)?);
        desk.table().delete(&key, expected, Instant::now())
    });
    match deleted {
        Ok(()) => "metadata deleted\n".into_response(),
        Err(refused) => refused.into_response(),
    }
}

/// Checked parameters.
struct Checked {
    key: String,
    ttl_ms: Option<u64>,
}

impl Checked {
    fn without_ttl(self) -> Result<String, Refused> {
        if self.ttl_ms.is_some() { Err(Refused::Bad("ttl_ms is for PUT")) } else { Ok(self.key) }
    }
}

impl Desk {
    fn table(&self) -> std::sync::MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn params(&self, params: Asked) -> Result<Checked, Refused> {
        let Ok(Query(Params { key, ttl_ms })) = params else {
            return Err(Refused::Bad(
                "ask with ?key=KEY, and for PUT &ttl_ms=MILLISECONDS, and nothing else",
            ));
        };
        let key = key.filter(|key| !key.trim().is_empty()).ok_or(Refused::Bad("?key=KEY is missing"))?;
        if key.len() > self.limits.key_bytes_max as usize {
            return Err(Refused::TooLong("the key"));
        }
        Ok(Checked { key, ttl_ms })
    }

    /// The value, once it has all arrived.
    async fn receive(&self, headers: &HeaderMap, body: Body) -> Result<Bytes, Refused> {
        let bytes_max = self.limits.value_bytes_max as usize;
        let length =
            headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        if length.is_some_and(|length: u64| length > bytes_max as u64) {
            return Err(Refused::TooLong("the value"));
        }
        let Ok(_turn) = self.arriving.acquire().await else { return Err(Refused::Busy) };
        match tokio::time::timeout(BODY_TIME_MAX, to_bytes(body, bytes_max)).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(_)) => Err(Refused::TooLong("the value")),
            Err(_) => Err(Refused::Busy),
        }
    }
}

/// What a request was refused for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refused {
    NotFound,
    /// A web page asks.
    Browser,
    Bad(&'static str),
    /// What is there is not what the writer expects.
    Changed,
    TooLong(&'static str),
    Full,
    Busy,
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        match self {
            Self::NotFound => (StatusCode::NOT_FOUND, "metadata not found\n".to_owned()),
            Self::Browser => (StatusCode::FORBIDDEN, "not for web pages\n".to_owned()),
            Self::Bad(why) => (StatusCode::BAD_REQUEST, format!("{why}\n")),
            Self::Changed => (StatusCode::PRECONDITION_FAILED, "it has changed: read it again\n".to_owned()),
            Self::TooLong(what) => (StatusCode::PAYLOAD_TOO_LARGE, format!("{what} is too long\n")),
            Self::Full => (
                StatusCode::INSUFFICIENT_STORAGE,
                "the metadata server is full: delete some keys\n".to_owned(),
            ),
            Self::Busy => (StatusCode::REQUEST_TIMEOUT, "the value did not arrive in time\n".to_owned()),
        }
        .into_response()
    }
}

/// Refuses what a browser sends for a web page: always with its origin (Fetch standard, §3.2), which engines never have. A page
/// whose host's name was made to mean this one could take over the names of segments.
fn no_browser(headers: &HeaderMap) -> Result<(), Refused> {
    if headers.contains_key(header::ORIGIN) { Err(Refused::Browser) } else { Ok(()) }
}

/// What a writer expects to be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    Anything,
    Nothing,
    Version(u64),
    /// A version that is none of ours: never there.
    Strange,
}

fn expectation(headers: &HeaderMap) -> Result<Expected, Refused> {
    match (headers.get(header::IF_MATCH), headers.get(header::IF_NONE_MATCH)) {
        (None, None) => Ok(Expected::Anything),
        (None, Some(star)) if star == "*" => Ok(Expected::Nothing),
        (Some(tag), None) => {
            let version = tag.to_str().ok().and_then(|tag| tag.strip_prefix('"')?.strip_suffix('"'));
            let version = version.ok_or(Refused::Bad("If-Match is one ETag, as it was given"))?;
            Ok(u64::from_str_radix(version, 16).map_or(Expected::Strange, Expected::Version))
        }
        _ => Err(Refused::Bad("give either If-Match with one ETag, or If-None-Match: *")),
    }
}

fn tag(version: u64) -> HeaderValue {
    // Digits and quotes are a header value.
    HeaderValue::from_str(&format!("\"{version:016x}\"")).unwrap_or(HeaderValue::from_static("\"\""))
}

/// The values. Time is an argument.
#[derive(Debug)]
struct Table {
    limits: MetadataLimits,
    values: HashMap<Arc<str>, Value>,
    /// Those that expire, soonest first.
    expiring: BTreeSet<(Instant, Arc<str>)>,
    bytes: u64,
    version: u64,
}

#[derive(Debug)]
struct Value {
    bytes: Bytes,
    version: u64,
    expires: Option<Instant>,
}

impl Table {
    fn new(limits: MetadataLimits, version: u64) -> Self {
        Self { limits, values: HashMap::new(), expiring: BTreeSet::new(), bytes: 0, version }
    }

    fn get(&mut self, key: &str, now: Instant) -> Option<(Bytes, u64)> {
        self.expire(now);
        self.live(key, now).map(|value| (value.bytes.clone(), value.version))
    }

    fn put(
        &mut self,
        key: String,
        bytes: Bytes,
        expected: Expected,
        ttl: Option<Duration>,
        now: Instant,
    ) -> Result<u64, Refused> {
        self.expire(now);
        self.check(&key, expected, now)?;
        let key: Arc<str> = key.into();
        let old = self.values.get(&key).map_or(0, |old| cost(&key, &old.bytes));
        let is_new = old == 0;
        let total = self.bytes - old + cost(&key, &bytes);
        if (is_new && self.values.len() >= self.limits.keys_max as usize) || total > self.limits.bytes_max {
            return Err(Refused::Full);
        }
        self.take(&key);
        self.version += 1;
        // A time so far away that it cannot be told is for ever.
        let expires = ttl.and_then(|ttl| now.checked_add(ttl));
        self.expiring.extend(expires.map(|at| (at, Arc::clone(&key))));
        // What came with the rest of a buffer would hold all of it.
        let bytes = Bytes::copy_from_slice(&bytes);
        self.values.insert(key, Value { bytes, version: self.version, expires });
        self.bytes = total;
        Ok(self.version)
    }

    fn delete(&mut self, key: &str, expected: Expected, now: Instant) -> Result<(), Refused> {
        self.expire(now);
        self.check(key, expected, now)?;
        self.live(key, now).ok_or(Refused::NotFound)?;
        self.take(key);
        Ok(())
    }

    fn check(&self, key: &str, expected: Expected, now: Instant) -> Result<(), Refused> {
        let found = self.live(key, now).map(|value| value.version);
        let as_expected = match expected {
            Expected::Anything => true,
            Expected::Nothing => found.is_none(),
            Expected::Version(version) => found == Some(version),
            Expected::Strange => false,
        };
        if as_expected { Ok(()) } else { Err(Refused::Changed) }
    }

    /// What is there and has not expired, whether or not its space has been freed yet.
    fn live(&self, key: &str, now: Instant) -> Option<&Value> {
        self.values.get(key).filter(|value| value.expires.is_none_or(|expires| now < expires))
    }

    fn take(&mut self, key: &str) {
        let Some((key, value)) = self.values.remove_entry(key) else { return };
        self.bytes -= cost(&key, &value.bytes);
        if let Some(expires) = value.expires {
            self.expiring.remove(&(expires, key));
        }
    }

    /// Frees what has expired, some of it at a time.
    fn expire(&mut self, now: Instant) {
        for _ in 0..EXPIRED_MAX {
            let Some((_, key)) = self.expiring.first().filter(|(at, _)| *at <= now) else { return };
            let key = Arc::clone(key);
            self.take(&key);
        }
    }
}

fn cost(key: &str, value: &Bytes) -> u64 {
    ENTRY_OVERHEAD_BYTES + key.len() as u64 + value.len() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: MetadataLimits =
        MetadataLimits { keys_max: 4, key_bytes_max: 16, value_bytes_max: 64, bytes_max: 1000 };
    const SECOND: Duration = Duration::from_secs(1);

    fn table() -> (Table, Instant) {
        (Table::new(LIMITS, 7), Instant::now())
    }

    fn put(table: &mut Table, key: &str, value: &str, now: Instant) -> Result<u64, Refused> {
        table.put(key.into(), Bytes::copy_from_slice(value.as_bytes()), Expected::Anything, None, now)
    }

    fn empty(table: &Table) -> bool {
        table.bytes == 0 && table.values.is_empty() && table.expiring.is_empty()
    }

    #[test]
    fn a_value_is_there_until_its_time_is_over_and_its_space_returns() {
        let (mut table, start) = table();
        let value = || Bytes::from_static(b"v");
        let version = table.put("k".into(), value(), Expected::Anything, Some(SECOND), start).unwrap();
        assert_eq!(table.get("k", start + SECOND / 2), Some((value(), version)));
        // Renewed: the earlier time counts no more.
        let expected = Expected::Version(version);
        let renewed = table.put("k".into(), value(), expected, Some(SECOND), start + SECOND / 2).unwrap();
        assert_eq!(table.get("k", start + SECOND), Some((value(), renewed)));
        assert_eq!(table.get("k", start + SECOND * 3 / 2), None);
        assert!(empty(&table));
    }

    #[test]
    fn writers_compare_and_set() {
        let (mut table, now) = table();
        let mut put = |expected| table.put("k".into(), Bytes::from_static(b"v"), expected, None, now);
        assert_eq!(put(Expected::Version(8)), Err(Refused::Changed));
        let first = put(Expected::Nothing).unwrap();
        assert_eq!(put(Expected::Nothing), Err(Refused::Changed));
        let second = put(Expected::Version(first)).unwrap();
        assert_ne!(first, second);
        assert_eq!(put(Expected::Version(first)), Err(Refused::Changed));
        assert_eq!(put(Expected::Strange), Err(Refused::Changed));
        assert_eq!(table.delete("k", Expected::Version(first), now), Err(Refused::Changed));
        table.delete("k", Expected::Version(second), now).unwrap();
        assert_eq!(table.delete("k", Expected::Anything, now), Err(Refused::NotFound));
        assert!(empty(&table));
    }

    #[test]
    fn an_expired_value_may_be_taken_by_who_expects_nothing() {
        let (mut table, now) = table();
        table.put("k".into(), Bytes::new(), Expected::Nothing, Some(SECOND), now).unwrap();
        let later = now + SECOND;
        table.put("k".into(), Bytes::new(), Expected::Nothing, Some(SECOND), later).unwrap();
        assert_eq!(table.delete("k", Expected::Nothing, later), Err(Refused::Changed));
    }

    #[test]
    fn keys_and_bytes_are_bounded_and_what_expired_makes_room() {
        let (mut table, now) = table();
        for key in ["a", "b", "c"] {
            put(&mut table, key, "v", now).unwrap();
        }
        table.put("d".into(), Bytes::new(), Expected::Anything, Some(SECOND), now).unwrap();
        assert_eq!(put(&mut table, "e", "v", now), Err(Refused::Full));
        put(&mut table, "a", "another", now).unwrap();
        put(&mut table, "e", "v", now + SECOND).unwrap();
        // By bytes: three more of what is left of 1000.
        let long = "x".repeat(900);
        assert_eq!(put(&mut table, "a", &long, now + SECOND), Err(Refused::Full));
        assert_eq!(table.get("a", now + SECOND).unwrap().0, "another", "a refused value changes nothing");
    }

    #[test]
    fn one_request_frees_a_bounded_number_and_none_of_the_rest_is_seen() {
        let limits = MetadataLimits { keys_max: 1000, bytes_max: 1 << 20, ..LIMITS };
        let (mut table, now) = (Table::new(limits, 0), Instant::now());
        for i in 0..EXPIRED_MAX + 10 {
            table.put(i.to_string(), Bytes::new(), Expected::Nothing, Some(SECOND), now).unwrap();
        }
        // Of what expires at the same time, the first in order of keys goes first.
        assert_eq!(table.get("99", now + SECOND), None);
        assert!(table.values.len() == 10 && table.values.contains_key("99"));
        assert_eq!(table.get("99", now + SECOND), None);
        assert!(empty(&table));
    }

    #[test]
    fn preconditions_that_make_no_sense_are_refused() {
        let headers = |pairs: &[(header::HeaderName, &'static str)]| -> HeaderMap {
            pairs.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value))).collect()
        };
        let said = |pairs| expectation(&headers(pairs));
        assert_eq!(said(&[]), Ok(Expected::Anything));
        assert_eq!(said(&[(header::IF_MATCH, "\"00000000000000ff\"")]), Ok(Expected::Version(255)));
        assert_eq!(said(&[(header::IF_MATCH, "\"another's\"")]), Ok(Expected::Strange));
        assert_eq!(said(&[(header::IF_NONE_MATCH, "*")]), Ok(Expected::Nothing));
        for bad in [
            &[(header::IF_MATCH, "*")][..],
            &[(header::IF_MATCH, "W/\"1\"")],
            &[(header::IF_NONE_MATCH, "\"1\"")],
            &[(header::IF_MATCH, "\"1\""), (header::IF_NONE_MATCH, "*")],
        ] {
            assert!(matches!(said(bad), Err(Refused::Bad(_))), "{bad:?}");
        }
    }
}
