//! `/metadata`: a small server of key-value pairs, in which engines find each other by name.
//!
//! It is independent of the store: the master never reads it, and a restart forgets it (owners store their
//! entries again when they renew them). The requests have the form that Mooncake's engines use with their
//! metadata server:
//!
//! ```text
//!   GET    /metadata?key=KEY                 200 value, ETag | 404
//!   PUT    /metadata?key=KEY[&ttl_ms=MS]     200 ETag | 412 precondition failed | 413, 507 too long, full
//!   DELETE /metadata?key=KEY                 200 | 404 | 412
//! ```
//!
//! In addition, a value may have a time to live after which it is removed (`ttl_ms`, 1 to 86,400,000;
//! without: until it is deleted), and every version of a value has an `ETag`, so that writers compare and
//! set: `If-Match: "TAG"` and `If-None-Match: *` (RFC 9110 §13.1). Bad requests end with 400 and the reason;
//! requests of web pages that change something end with 403.
//!
//! Everything is bounded by [`MetadataLimits`]. The metadata server and the serving thread never wait for
//! each other.

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

/// Most values that arrive at a time: their memory is not counted yet.
const ARRIVING_MAX: usize = 32;
const TTL_MS_MAX: u64 = 86_400_000;
/// Memory of an entry in addition to its key and its value, bytes.
const ENTRY_OVERHEAD_BYTES: u64 = 128;
/// Most expired values that one request removes.
const EXPIRED_MAX: usize = 256;

/// The routes, with a new table.
pub(crate) fn router(limits: MetadataLimits) -> Router {
    let methods = get(read).put(write).delete(remove);
    Router::new().route("/metadata", methods).with_state(Arc::new(Shared::new(limits)))
}

/// The values, and what limits requests.
pub(crate) struct Shared {
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

async fn read(State(shared): State<Arc<Shared>>, params: Asked) -> Response {
    let asked = shared.params(params).and_then(|params| params.without_ttl());
    let key = match asked {
        Ok(key) => key,
        Err(refused) => return refused.into_response(),
    };
    match shared.table().get(&key, Instant::now()) {
        Some((value, version)) => {
            let headers =
                [(header::ETAG, tag(version)), (header::CACHE_CONTROL, HeaderValue::from_static("no-store"))];
            (headers, value).into_response()
        }
        None => Refused::NotFound.into_response(),
    }
}

async fn write(State(shared): State<Arc<Shared>>, params: Asked, headers: HeaderMap, body: Body) -> Response {
    let put = async {
        no_browser(&headers)?;
        let params = shared.params(params)?;
        let expected = expectation(&headers)?;
        let ttl = match params.ttl_ms {
            None => None,
            Some(ttl @ 1..=TTL_MS_MAX) => Some(Duration::from_millis(ttl)),
            Some(_) => return Err(Refused::Bad("ttl_ms must be 1 to 86400000")),
        };
        let value = shared.receive(&headers, body).await?;
        shared.table().put(params.key, value, expected, ttl, Instant::now())
    };
    match put.await {
        Ok(version) => ([(header::ETAG, tag(version))], "metadata updated\n").into_response(),
        Err(refused) => refused.into_response(),
    }
}

async fn remove(State(shared): State<Arc<Shared>>, params: Asked, headers: HeaderMap) -> Response {
    let deleted = no_browser(&headers).and_then(|()| shared.params(params)).and_then(|params| {
        let (key, expected) = (params.without_ttl()?, expectation(&headers)?);
        shared.table().delete(&key, expected, Instant::now())
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
        if self.ttl_ms.is_some() { Err(Refused::Bad("ttl_ms is allowed in PUT only")) } else { Ok(self.key) }
    }
}

impl Shared {
    pub(crate) fn new(limits: MetadataLimits) -> Self {
        // Versions of an earlier process must differ from those of this one.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let table = Mutex::new(Table::new(limits, u64::try_from(since.as_micros()).unwrap_or_default()));
        Self { table, limits, arriving: Semaphore::new(ARRIVING_MAX) }
    }

    pub(crate) fn table(&self) -> std::sync::MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn params(&self, params: Asked) -> Result<Checked, Refused> {
        let Ok(Query(Params { key, ttl_ms })) = params else {
            return Err(Refused::Bad(
                "use ?key=KEY, for PUT also &ttl_ms=MILLISECONDS, and no other parameter",
            ));
        };
        let key = key.filter(|key| !key.trim().is_empty()).ok_or(Refused::Bad("?key=KEY is missing"))?;
        self.check_key(&key)?;
        Ok(Checked { key, ttl_ms })
    }

    pub(crate) fn check_key(&self, key: &str) -> Result<(), Refused> {
        if key.len() > self.limits.key_bytes_max as usize { Err(Refused::TooLong("the key")) } else { Ok(()) }
    }

    /// Receives the whole value.
    pub(crate) async fn receive(&self, headers: &HeaderMap, body: Body) -> Result<Bytes, Refused> {
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

/// Why a request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    NotFound,
    /// The request comes from a web page.
    Browser,
    Bad(&'static str),
    /// The current version is not the one that the writer expects.
    Changed,
    TooLong(&'static str),
    Full,
    Busy,
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        match self {
            Self::NotFound => (StatusCode::NOT_FOUND, "metadata not found\n".to_owned()),
            Self::Browser => (StatusCode::FORBIDDEN, "requests of web pages are refused\n".to_owned()),
            Self::Bad(why) => (StatusCode::BAD_REQUEST, format!("{why}\n")),
            Self::Changed => {
                (StatusCode::PRECONDITION_FAILED, "the value has changed: read it again\n".to_owned())
            }
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

/// Refuses requests that a browser sends for a web page: they always carry its origin (Fetch standard, §3.2),
/// and those of engines never do. A page whose host name resolves to this host could otherwise take over the
/// names of segments.
pub(crate) fn no_browser(headers: &HeaderMap) -> Result<(), Refused> {
    if headers.contains_key(header::ORIGIN) { Err(Refused::Browser) } else { Ok(()) }
}

/// The version that a writer expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expected {
    Anything,
    Nothing,
    Version(u64),
    /// A version that this server did not create: it never matches.
    Foreign,
}

fn expectation(headers: &HeaderMap) -> Result<Expected, Refused> {
    match (headers.get(header::IF_MATCH), headers.get(header::IF_NONE_MATCH)) {
        (None, None) => Ok(Expected::Anything),
        (None, Some(star)) if star == "*" => Ok(Expected::Nothing),
        (Some(tag), None) => {
            let version = tag.to_str().ok().and_then(|tag| tag.strip_prefix('"')?.strip_suffix('"'));
            let version = version.ok_or(Refused::Bad("If-Match is one ETag, as it was given"))?;
            Ok(u64::from_str_radix(version, 16).map_or(Expected::Foreign, Expected::Version))
        }
        _ => Err(Refused::Bad("use either If-Match with one ETag, or If-None-Match: *")),
    }
}

fn tag(version: u64) -> HeaderValue {
    // Digits and quotes form a valid header value.
    HeaderValue::from_str(&format!("\"{version:016x}\"")).unwrap_or(HeaderValue::from_static("\"\""))
}

/// The values. The current time is an argument of its methods.
#[derive(Debug)]
pub(crate) struct Table {
    limits: MetadataLimits,
    values: HashMap<Arc<str>, Value>,
    /// Values that expire, in the order of their expiry.
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

    pub(crate) fn get(&mut self, key: &str, now: Instant) -> Option<(Bytes, u64)> {
        self.expire(now);
        self.live(key, now).map(|value| (value.bytes.clone(), value.version))
    }

    pub(crate) fn put(
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
        // A time that overflows `Instant` means that the value does not expire.
        let expires = ttl.and_then(|ttl| now.checked_add(ttl));
        self.expiring.extend(expires.map(|at| (at, Arc::clone(&key))));
        // A copy, because a slice would keep the whole receive buffer.
        let bytes = Bytes::copy_from_slice(&bytes);
        self.values.insert(key, Value { bytes, version: self.version, expires });
        self.bytes = total;
        Ok(self.version)
    }

    pub(crate) fn delete(&mut self, key: &str, expected: Expected, now: Instant) -> Result<(), Refused> {
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
            Expected::Foreign => false,
        };
        if as_expected { Ok(()) } else { Err(Refused::Changed) }
    }

    /// The value, if it exists and has not expired, whether or not an expired value's memory has been freed.
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

    /// Removes expired values, a limited number at a time.
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
    fn a_value_exists_until_its_time_to_live_ends_and_its_space_returns() {
        let (mut table, start) = table();
        let value = || Bytes::from_static(b"v");
        let version = table.put("k".into(), value(), Expected::Anything, Some(SECOND), start).unwrap();
        assert_eq!(table.get("k", start + SECOND / 2), Some((value(), version)));
        // After a renewal the earlier expiry does not count.
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
        assert_eq!(put(Expected::Foreign), Err(Refused::Changed));
        assert_eq!(table.delete("k", Expected::Version(first), now), Err(Refused::Changed));
        table.delete("k", Expected::Version(second), now).unwrap();
        assert_eq!(table.delete("k", Expected::Anything, now), Err(Refused::NotFound));
        assert!(empty(&table));
    }

    #[test]
    fn an_expired_value_may_be_replaced_by_a_writer_that_expects_none() {
        let (mut table, now) = table();
        table.put("k".into(), Bytes::new(), Expected::Nothing, Some(SECOND), now).unwrap();
        let later = now + SECOND;
        table.put("k".into(), Bytes::new(), Expected::Nothing, Some(SECOND), later).unwrap();
        assert_eq!(table.delete("k", Expected::Nothing, later), Err(Refused::Changed));
    }

    #[test]
    fn keys_and_bytes_are_bounded_and_expired_values_make_room() {
        let (mut table, now) = table();
        for key in ["a", "b", "c"] {
            put(&mut table, key, "v", now).unwrap();
        }
        table.put("d".into(), Bytes::new(), Expected::Anything, Some(SECOND), now).unwrap();
        assert_eq!(put(&mut table, "e", "v", now), Err(Refused::Full));
        put(&mut table, "a", "another", now).unwrap();
        put(&mut table, "e", "v", now + SECOND).unwrap();
        // The limit on bytes: three more of what is left of 1,000.
        let long = "x".repeat(900);
        assert_eq!(put(&mut table, "a", &long, now + SECOND), Err(Refused::Full));
        assert_eq!(table.get("a", now + SECOND).unwrap().0, "another", "a refused value changes nothing");
    }

    #[test]
    fn one_request_frees_a_bounded_number_of_values_and_the_rest_is_not_visible() {
        let limits = MetadataLimits { keys_max: 1000, bytes_max: 1 << 20, ..LIMITS };
        let (mut table, now) = (Table::new(limits, 0), Instant::now());
        for i in 0..EXPIRED_MAX + 10 {
            table.put(i.to_string(), Bytes::new(), Expected::Nothing, Some(SECOND), now).unwrap();
        }
        // Of values that expire at the same time, the first in the order of keys is removed first.
        assert_eq!(table.get("99", now + SECOND), None);
        assert!(table.values.len() == 10 && table.values.contains_key("99"));
        assert_eq!(table.get("99", now + SECOND), None);
        assert!(empty(&table));
    }

    #[test]
    fn invalid_preconditions_are_refused() {
        let headers = |pairs: &[(header::HeaderName, &'static str)]| -> HeaderMap {
            pairs.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value))).collect()
        };
        let said = |pairs| expectation(&headers(pairs));
        assert_eq!(said(&[]), Ok(Expected::Anything));
        assert_eq!(said(&[(header::IF_MATCH, "\"00000000000000ff\"")]), Ok(Expected::Version(255)));
        assert_eq!(said(&[(header::IF_MATCH, "\"another's\"")]), Ok(Expected::Foreign));
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
