//! A directory over HTTP, such as the store's master: `GET`, `PUT` and `DELETE` of `…/metadata?key=KEY`,
//! versions as `ETag` (RFC 9110 §8.8.3, §13.1), time to live as `ttl_ms=`.

use std::format;
use std::io::Read as _;
use std::string::{String, ToString};
use std::time::Duration;
use std::vec::Vec;

use ureq::http::Response;
use ureq::{Agent, Body};

use crate::backoff::Fault;
use crate::directory::{Backend, Stored};
use crate::entry::ENTRY_BYTES_MAX;
use crate::key_value::Plain;
use crate::source::encoded;

/// Maximum length of a server's reason in an error, characters.
const REASON_CHARS_MAX: usize = 200;

pub(crate) struct Http {
    server: String,
    url: String,
    agent: Agent,
}

impl Http {
    pub(crate) fn new(server: &str, path: &str, timeout: Duration) -> Self {
        Self { server: server.into(), url: format!("http://{server}{path}"), agent: agent(timeout) }
    }

    /// Kind and address of the server.
    pub(crate) fn name(&self) -> String {
        format!("the metadata server at {}", self.server)
    }

    /// Names need no encoding: they consist of characters that a query may have (RFC 3986 §3.4).
    fn url(&self, key: &str) -> String {
        format!("{}?key={key}", self.url)
    }
}

impl Backend for Http {
    fn server(&self) -> String {
        self.name()
    }

    fn get(&self, key: &str) -> Result<Option<Stored>, Fault> {
        let mut response = self.agent.get(self.url(key)).call().map_err(fault)?;
        match response.status().as_u16() {
            200 => {
                let tag = tag(&response)?;
                let value = body(&mut response, ENTRY_BYTES_MAX)?;
                Ok(Some(Stored {
                    value: value.ok_or(Fault::Garbage("more bytes than an entry may have"))?,
                    tag,
                }))
            }
            404 => Ok(None),
            _ => Err(refusal(response)),
        }
    }

    fn swap(&self, key: &str, old: Option<&Stored>, value: &[u8], ttl: Duration) -> Result<bool, Fault> {
        let put = self.agent.put(format!("{}&ttl_ms={}", self.url(key), ttl.as_millis()));
        let put = match old {
            None => put.header("if-none-match", "*"),
            Some(old) => put.header("if-match", &old.tag),
        };
        let response = put.header("content-type", "application/json").send(value).map_err(fault)?;
        match response.status().as_u16() {
            // A server that returns no version has not compared one either.
            200 | 201 | 204 => tag(&response).map(|_| true),
            412 => Ok(false),
            _ => Err(refusal(response)),
        }
    }

    fn remove(&self, key: &str, old: &Stored) -> Result<bool, Fault> {
        let response = self.agent.delete(self.url(key)).header("if-match", &old.tag).call().map_err(fault)?;
        match response.status().as_u16() {
            200 | 204 => Ok(true),
            404 | 412 => Ok(false),
            _ => Err(refusal(response)),
        }
    }
}

impl Plain for Http {
    fn get(&self, key: &str, bytes_max: usize) -> Result<Option<Vec<u8>>, Fault> {
        let mut response = self.agent.get(self.url(&encoded(key))).call().map_err(fault)?;
        match response.status().as_u16() {
            200 => {
                let value = body(&mut response, bytes_max)?;
                Ok(Some(value.ok_or(Fault::Garbage("more bytes than are accepted"))?))
            }
            404 => Ok(None),
            _ => Err(refusal(response)),
        }
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), Fault> {
        let put = self.agent.put(self.url(&encoded(key))).header("content-type", "application/json");
        let response = put.send(value).map_err(fault)?;
        if response.status() == 200 { Ok(()) } else { Err(refusal(response)) }
    }

    fn delete(&self, key: &str) -> Result<bool, Fault> {
        let response = self.agent.delete(self.url(&encoded(key))).call().map_err(fault)?;
        match response.status().as_u16() {
            200 => Ok(true),
            404 => Ok(false),
            _ => Err(refusal(response)),
        }
    }
}

/// An HTTP client that opens a connection per request, and uses neither redirects nor proxies.
pub(crate) fn agent(timeout: Duration) -> Agent {
    Agent::config_builder()
        .timeout_global(Some(timeout))
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .max_idle_connections(0)
        .proxy(None)
        .user_agent("snowskin")
        .build()
        .new_agent()
}

/// The body of a response; `None`: it has more than `bytes_max` bytes.
pub(crate) fn body(response: &mut Response<Body>, bytes_max: usize) -> Result<Option<Vec<u8>>, Fault> {
    let mut bytes = Vec::new();
    let read = response.body_mut().as_reader().take(bytes_max as u64 + 1).read_to_end(&mut bytes);
    read.map_err(|error| Fault::Unreachable(error.to_string()))?;
    Ok((bytes.len() <= bytes_max).then_some(bytes))
}

/// Why there was no response.
pub(crate) fn fault(error: ureq::Error) -> Fault {
    match error {
        ureq::Error::Timeout(_) => Fault::Unreachable("timed out".into()),
        ureq::Error::Io(error) => Fault::Unreachable(error.to_string()),
        ureq::Error::HostNotFound => Fault::Unreachable("the host has no address".into()),
        ureq::Error::Protocol(error) => Fault::Refused(format!("its response is not HTTP ({error})")),
        error => Fault::Refused(error.to_string()),
    }
}

/// The error of a response with an unexpected status, with the text of its body.
pub(crate) fn refusal(mut response: Response<Body>) -> Fault {
    let status = response.status();
    let body = body(&mut response, 64 << 10).ok().flatten().unwrap_or_default();
    let text: String = String::from_utf8_lossy(&body)
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(REASON_CHARS_MAX)
        .collect();
    Fault::Refused(format!("HTTP status {status}: {}", text.trim()))
}

fn tag(response: &Response<Body>) -> Result<String, Fault> {
    let tag = response.headers().get("etag").and_then(|tag| tag.to_str().ok());
    let tag = tag.filter(|tag| (2..=128).contains(&tag.len()) && !tag.starts_with("W/"));
    let none =
        || Fault::Refused("its responses have no strong ETag, which compare-and-set needs".to_string());
    tag.map(Into::into).ok_or_else(none)
}
