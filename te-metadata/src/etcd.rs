//! etcd, through the JSON gateway of its v3 API: `POST /v3/kv/range`, `/v3/kv/txn`, `/v3/lease/…`, bytes as
//! base64, 64-bit numbers as strings. A key belongs to a lease, which its owner keeps alive; versions are
//! `mod_revision`.
//!
//! <https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/>

use std::collections::HashMap;
use std::format;
use std::string::{String, ToString};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use std::vec::Vec;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use ureq::Agent;

use crate::backoff::Fault;
use crate::directory::{Backend, Stored};
use crate::http;
use crate::key_value::Plain;
use crate::register::{REGISTER_BYTES_MAX, Register, Swapped};

/// Maximum length of an answer, bytes: an entry in base64, and the JSON around it.
const ANSWER_BYTES_MAX: usize = 16 << 10;

/// The same for a register.
const REGISTER_ANSWER_MAX: usize = REGISTER_BYTES_MAX.div_ceil(3) * 4 + ANSWER_BYTES_MAX;

pub(crate) struct Etcd {
    servers: Vec<String>,
    /// Index of the server that answered last.
    current: AtomicUsize,
    agent: Agent,
    /// Leases of the keys that were put, by key.
    leases: Mutex<HashMap<String, String>>,
}

impl Etcd {
    pub(crate) fn new(servers: &[String], timeout: Duration) -> Self {
        let (current, leases) = (AtomicUsize::new(0), Mutex::default());
        Self { servers: servers.into(), current, agent: http::agent(timeout), leases }
    }

    /// Kind and addresses of the servers.
    pub(crate) fn name(&self) -> String {
        format!("etcd at {}", self.servers.join(","))
    }

    fn post(&self, path: &str, body: &Value) -> Result<Value, Fault> {
        self.post_for(path, body, ANSWER_BYTES_MAX)
    }

    /// Sends a request to one server after the other until one answers.
    fn post_for(&self, path: &str, body: &Value, answer_bytes_max: usize) -> Result<Value, Fault> {
        let first = self.current.load(Ordering::Relaxed);
        let mut last = Fault::Unreachable("no server".into());
        for i in 0..self.servers.len() {
            let index = (first + i) % self.servers.len();
            let server = &self.servers[index];
            match self.post_to(server, path, body, answer_bytes_max) {
                Err(Fault::Unreachable(reason)) if self.servers.len() > 1 => {
                    last = Fault::Unreachable(format!("{server}: {reason}"));
                }
                Err(Fault::Unreachable(reason)) => last = Fault::Unreachable(reason),
                answer => {
                    self.current.store(index, Ordering::Relaxed);
                    return answer;
                }
            }
        }
        Err(last)
    }

    fn post_to(
        &self,
        server: &str,
        path: &str,
        body: &Value,
        answer_bytes_max: usize,
    ) -> Result<Value, Fault> {
        let post = self.agent.post(format!("http://{server}/v3/{path}"));
        let post = post.header("content-type", "application/json");
        let mut response = post.send(body.to_string()).map_err(http::fault)?;
        match response.status().as_u16() {
            200 => {}
            // It has no leader or is stopping: another server may answer.
            500 | 502..=504 => {
                let Fault::Refused(reason) = http::refusal(response) else {
                    return Err(Fault::Unreachable("no leader".into()));
                };
                return Err(Fault::Unreachable(reason));
            }
            _ => return Err(http::refusal(response)),
        }
        let bytes = http::body(&mut response, answer_bytes_max)?;
        let bytes = bytes.ok_or(Fault::Garbage("more bytes than are accepted"))?;
        serde_json::from_slice(&bytes).map_err(|_| not_etcd())
    }

    fn read(&self, key: &str, answer_bytes_max: usize) -> Result<Option<Stored>, Fault> {
        let body = json!({ "key": STANDARD.encode(key) });
        let answer = self.post_for("kv/range", &body, answer_bytes_max)?;
        let Some(found) = answer["kvs"].get(0) else { return Ok(None) };
        // An empty value is left out.
        let value = STANDARD.decode(found["value"].as_str().unwrap_or_default()).map_err(|_| not_etcd())?;
        let tag = found["mod_revision"].as_str().ok_or_else(not_etcd)?.into();
        Ok(Some(Stored { value, tag }))
    }

    /// A new lease for as long as `ttl`, in whole seconds.
    fn grant(&self, ttl: Duration) -> Result<String, Fault> {
        let seconds = ttl.as_millis().div_ceil(1000).to_string();
        let answer = self.post("lease/grant", &json!({ "TTL": seconds }))?;
        answer["ID"].as_str().map(Into::into).ok_or_else(not_etcd)
    }

    fn revoke(&self, lease: &str) {
        // A lease that is not revoked expires.
        if let Err(fault) = self.post("lease/revoke", &json!({ "ID": lease })) {
            log::debug!("etcd: a lease is not revoked, and expires later: {fault:?}");
        }
    }

    /// A key with its version.
    pub(crate) fn register(&self, key: &str) -> Result<Register, Fault> {
        let body = json!({ "key": STANDARD.encode(key) });
        let answer = self.post_for("kv/range", &body, REGISTER_ANSWER_MAX)?;
        if answer["header"].is_object() { register_in(&answer) } else { Err(not_etcd()) }
    }

    /// Replaces a value at a version. If the key has another one, the same request says which.
    pub(crate) fn swap_register(&self, key: &str, version: u64, value: &[u8]) -> Result<Swapped, Fault> {
        let key = STANDARD.encode(key);
        let compare = json!({
            "key": key, "target": "MOD", "result": "EQUAL", "mod_revision": version.to_string(),
        });
        let put = json!({ "request_put": { "key": key, "value": STANDARD.encode(value) } });
        let read = json!({ "request_range": { "key": key } });
        let body = json!({ "compare": [compare], "success": [put], "failure": [read] });
        let answer = self.post_for("kv/txn", &body, REGISTER_ANSWER_MAX)?;
        if answer["succeeded"].as_bool().unwrap_or(false) {
            let revision = answer["header"]["revision"].as_str().and_then(|text| text.parse().ok());
            return revision.map(Swapped::Yes).ok_or_else(not_etcd);
        }
        register_in(&answer["responses"][0]["response_range"]).map(Swapped::No)
    }

    /// Keys that begin with `prefix`, and their values.
    pub(crate) fn list(&self, prefix: &str, limit: usize) -> Result<Vec<(String, Vec<u8>)>, Fault> {
        let mut end = prefix.as_bytes().to_vec();
        // Keys are UTF-8: no byte is 255.
        if let Some(last) = end.last_mut() {
            *last += 1;
        }
        let (from, end) = (STANDARD.encode(prefix), STANDARD.encode(end));
        let body = json!({ "key": from, "range_end": end, "limit": limit.to_string() });
        let answer = self.post_for("kv/range", &body, limit * REGISTER_ANSWER_MAX)?;
        if !answer["header"].is_object() {
            return Err(not_etcd());
        }
        let pair = |found: &Value| {
            let text = |field: &str| STANDARD.decode(found[field].as_str().unwrap_or_default()).ok();
            Some((String::from_utf8(text("key")?).ok()?, text("value")?))
        };
        let found = answer["kvs"].as_array().map(Vec::as_slice).unwrap_or_default();
        found.iter().map(|found| pair(found).ok_or_else(not_etcd)).collect()
    }

    /// Carries out `then` if the key is at `revision`. Returns whether it was.
    fn compare(&self, key: &str, revision: &str, then: Value) -> Result<bool, Fault> {
        let compare = json!({
            "key": STANDARD.encode(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision,
        });
        let answer = self.post("kv/txn", &json!({ "compare": [compare], "success": [then] }))?;
        Ok(answer["succeeded"].as_bool().unwrap_or(false))
    }

    fn leases(&self) -> std::sync::MutexGuard<'_, HashMap<String, String>> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Backend for Etcd {
    fn server(&self) -> String {
        self.name()
    }

    fn get(&self, key: &str) -> Result<Option<Stored>, Fault> {
        self.read(key, ANSWER_BYTES_MAX)
    }

    fn swap(&self, key: &str, old: Option<&Stored>, value: &[u8], ttl: Duration) -> Result<bool, Fault> {
        let lease = self.grant(ttl)?;
        let put = json!({ "key": STANDARD.encode(key), "value": STANDARD.encode(value), "lease": lease });
        let revision = old.map_or("0", |old| &old.tag);
        let put = self.compare(key, revision, json!({ "request_put": put }));
        let unused = match put {
            Ok(true) => self.leases().insert(key.into(), lease),
            _ => Some(lease),
        };
        if let (Some(lease), Ok(_)) = (unused, &put) {
            self.revoke(&lease);
        }
        put
    }

    fn remove(&self, key: &str, old: &Stored) -> Result<bool, Fault> {
        let delete = json!({ "request_delete_range": { "key": STANDARD.encode(key) } });
        let removed = self.compare(key, &old.tag, delete)?;
        let lease = self.leases().remove(key);
        if let Some(lease) = lease {
            self.revoke(&lease);
        }
        Ok(removed)
    }

    /// Renews the lease of the key: a write would add a revision each time.
    fn renew(&self, key: &str, value: &[u8], _: Duration) -> Result<bool, Fault> {
        let Some(lease) = self.leases().get(key).cloned() else { return Ok(false) };
        if self.read(key, ANSWER_BYTES_MAX)?.is_none_or(|stored| stored.value != value) {
            return Ok(false);
        }
        let answer = self.post("lease/keepalive", &json!({ "ID": lease }))?;
        // A lease that has expired has no time to live.
        let ttl = answer["result"]["TTL"].as_str().and_then(|ttl| ttl.parse::<i64>().ok());
        Ok(ttl.is_some_and(|ttl| ttl > 0))
    }
}

impl Plain for Etcd {
    fn get(&self, key: &str, bytes_max: usize) -> Result<Option<Vec<u8>>, Fault> {
        // In base64, with the key and the JSON around it.
        let answer_bytes_max = bytes_max.div_ceil(3) * 4 + ANSWER_BYTES_MAX;
        match self.read(key, answer_bytes_max)? {
            Some(stored) if stored.value.len() > bytes_max => {
                Err(Fault::Garbage("more bytes than are accepted"))
            }
            found => Ok(found.map(|stored| stored.value)),
        }
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), Fault> {
        let put = json!({ "key": STANDARD.encode(key), "value": STANDARD.encode(value) });
        let answer = self.post("kv/put", &put)?;
        if answer["header"].is_object() { Ok(()) } else { Err(not_etcd()) }
    }

    fn delete(&self, key: &str) -> Result<bool, Fault> {
        let answer = self.post("kv/deleterange", &json!({ "key": STANDARD.encode(key) }))?;
        if !answer["header"].is_object() {
            return Err(not_etcd());
        }
        // A count of 0 is left out.
        Ok(answer["deleted"].as_str().is_some_and(|count| count != "0"))
    }
}

/// The key in the answer to a range of one key.
fn register_in(answer: &Value) -> Result<Register, Fault> {
    if !answer.is_object() {
        return Err(not_etcd());
    }
    let Some(found) = answer["kvs"].get(0) else { return Ok(Register::default()) };
    let value = STANDARD.decode(found["value"].as_str().unwrap_or_default()).map_err(|_| not_etcd())?;
    let version = found["mod_revision"].as_str().and_then(|text| text.parse().ok()).ok_or_else(not_etcd)?;
    if value.len() > REGISTER_BYTES_MAX {
        return Err(Fault::Garbage("more bytes than are accepted"));
    }
    Ok(Register { version, value })
}

fn not_etcd() -> Fault {
    Fault::Refused("its answer is not one of etcd".into())
}
