//! How `object_store` sends its requests here: with `ureq`, on the thread that asks.
//!
//! `object_store` signs requests and reads answers; it expects an asynchronous client below. Ours answers
//! before it returns, so that no runtime is needed: the threads that read and write packs wait for the store
//! as others wait for a file system. Each request has a deadline that depends on its bytes, and its answer a
//! limit. Refusals are told apart here, where status and code of an answer are known.

use std::borrow::Borrow;
use std::error::Error;
use std::fmt;
use std::ops::Deref;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use http_body::Body as _;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use object_store::{ClientConfigKey, ClientOptions};
use ureq::http::{Method, header};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Proxy};

use crate::disk::packs::answers::Refusal;

/// Most bytes of an answer beyond those that were asked for: an error, a small object, a page of a list.
const ANSWER_BYTES_MAX: u64 = 16 << 20;
/// Time to connect.
const CONNECT: Duration = Duration::from_secs(3);
/// Time of a request, without its bytes.
const REQUEST: Duration = Duration::from_secs(10);
/// Bytes per second that a connection has at least.
const BYTES_PER_S: u64 = 2 << 20;
/// Connections that are kept.
const IDLE_MAX: usize = 16;
/// Where the certificates of a private authority are, as other S3 clients are told.
const CA_BUNDLE: &str = "AWS_CA_BUNDLE";
/// Most bytes of that file.
const CA_BYTES_MAX: u64 = 1 << 20;

/// An answer that did not come, or not all of it.
#[derive(Clone, Debug)]
pub(super) enum NoAnswer {
    Timeout,
    Broken(String),
    /// Bytes that were announced, and bytes that came.
    Short(u64, u64),
}

impl fmt::Display for NoAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Timeout => f.write_str("timeout"),
            Self::Broken(why) => f.write_str(why),
            Self::Short(expected, found) => write!(f, "{found} of {expected} bytes"),
        }
    }
}

impl Error for NoAnswer {}

/// Makes clients for `object_store`.
#[derive(Debug)]
pub(super) struct Connector {
    roots: RootCerts,
}

impl Connector {
    /// With the certificates that the environment names, or those that are built in.
    pub(super) fn from_env() -> Result<Self, String> {
        let Some(path) = std::env::var_os(CA_BUNDLE).filter(|path| !path.is_empty()) else {
            return Ok(Self { roots: RootCerts::WebPki });
        };
        let failed = |why: &dyn fmt::Display| format!("{CA_BUNDLE}={}: {why}", path.display());
        let read = || -> std::io::Result<Vec<u8>> {
            use std::io::Read as _;
            let mut pem = Vec::new();
            std::fs::File::open(&path)?.take(CA_BYTES_MAX).read_to_end(&mut pem)?;
            Ok(pem)
        };
        let pem = read().map_err(|error| failed(&error))?;
        let roots: Vec<_> = parse_pem(&pem)
            .filter_map(|item| match item {
                Ok(PemItem::Certificate(certificate)) => Some(certificate),
                _ => None,
            })
            .collect();
        if roots.is_empty() {
            return Err(failed(&"no certificate in it"));
        }
        Ok(Self { roots: RootCerts::new_with_certs(&roots) })
    }
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let option = |key| options.get_config_value(&key);
        let proxy = match option(ClientConfigKey::ProxyUrl) {
            Some(url) => Some(Proxy::new(&url).map_err(|error| object_store::Error::Generic {
                store: "S3",
                // Not the address: it may have a password.
                source: format!("AWS_PROXY_URL: {error}").into(),
            })?),
            None => None,
        };
        let config = Agent::config_builder()
            .https_only(option(ClientConfigKey::AllowHttp).as_deref() != Some("true"))
            .tls_config(TlsConfig::builder().root_certs(self.roots.clone()).build())
            .proxy(proxy)
            .http_status_as_error(false)
            .timeout_connect(Some(CONNECT))
            .max_idle_connections(IDLE_MAX)
            .max_idle_connections_per_host(IDLE_MAX)
            .max_redirects(0)
            .user_agent("snowskin");
        Ok(HttpClient::new(Service { agent: config.build().new_agent() }))
    }
}

#[derive(Debug)]
struct Service {
    agent: Agent,
}

impl HttpService for Service {
    fn call<'service, 'call>(
        &'service self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'call>>
    where
        'service: 'call,
        Self: 'call,
    {
        Box::pin(std::future::ready(self.answer(request)))
    }
}

impl Service {
    fn answer(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (parts, body) = request.into_parts();
        let wanted = wanted_bytes(parts.headers.get(header::RANGE).and_then(|range| range.to_str().ok()));
        let bytes = body.content_length() as u64 + wanted;
        let timeout = REQUEST + Duration::from_millis(bytes.saturating_mul(1_000) / BYTES_PER_S);
        let (head, plain) = (parts.method == Method::HEAD, body.is_empty() && parts.method != Method::PUT);
        let sent = if plain {
            let request = ureq::http::Request::from_parts(parts, ());
            let request = self.agent.configure_request(request).timeout_global(Some(timeout)).build();
            self.agent.run(request)
        } else {
            let frames = frames_of(body)?;
            let whole;
            let bytes: &[u8] = match frames.as_slice() {
                [one] => one,
                several => {
                    whole = several.concat();
                    &whole
                }
            };
            let request = ureq::http::Request::from_parts(parts, bytes);
            let request = self.agent.configure_request(request).timeout_global(Some(timeout)).build();
            self.agent.run(request)
        };
        let (parts, mut body) = sent.map_err(no_answer)?.into_parts();
        let announced = parts.headers.get(header::CONTENT_LENGTH);
        let announced: Option<u64> = announced.and_then(|it| it.to_str().ok()).and_then(|it| it.parse().ok());
        let bytes = match head {
            true => Vec::new(),
            false => body.with_config().limit(wanted + ANSWER_BYTES_MAX).read_to_vec().map_err(no_answer)?,
        };
        if let Some(announced) = announced.filter(|announced| !head && *announced != bytes.len() as u64) {
            let short = NoAnswer::Short(announced, bytes.len() as u64);
            return Err(HttpError::new(HttpErrorKind::Unknown, short));
        }
        if let Some(refusal) = Refusal::of(parts.status.as_u16(), &bytes) {
            return Err(HttpError::new(HttpErrorKind::Unknown, refusal));
        }
        Ok(HttpResponse::from_parts(parts, bytes.into()))
    }
}

/// Bytes that a request with this range asks for.
fn wanted_bytes(range: Option<&str>) -> u64 {
    let parse = || {
        let (from, to) = range?.strip_prefix("bytes=")?.split_once('-')?;
        to.parse::<u64>().ok()?.checked_sub(from.parse().ok()?)
    };
    parse().unwrap_or(0)
}

/// The parts of a body, which are there already.
fn frames_of(
    body: object_store::client::HttpRequestBody,
) -> Result<Vec<impl Deref<Target = [u8]> + Borrow<[u8]>>, HttpError> {
    let (mut body, mut frames) = (pin!(body), Vec::new());
    let mut context = Context::from_waker(Waker::noop());
    while let Poll::Ready(Some(frame)) = body.as_mut().poll_frame(&mut context) {
        frames.extend(frame?.into_data());
    }
    Ok(frames)
}

fn no_answer(error: ureq::Error) -> HttpError {
    let (kind, source) = match error {
        ureq::Error::Timeout(_) => (HttpErrorKind::Timeout, NoAnswer::Timeout),
        ureq::Error::ConnectionFailed | ureq::Error::HostNotFound => {
            (HttpErrorKind::Connect, NoAnswer::Broken(error.to_string()))
        }
        error => (HttpErrorKind::Unknown, NoAnswer::Broken(error.to_string())),
    };
    HttpError::new(kind, source)
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits for a future on this thread. It is pending only while another thread fetches credentials.
pub(super) fn wait_for<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => return value,
            Poll::Pending => thread::park(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_says_how_many_bytes_are_wanted() {
        assert_eq!(wanted_bytes(Some("bytes=10-19")), 9);
        assert_eq!(wanted_bytes(Some("bytes=-5")), 0);
    }
}
