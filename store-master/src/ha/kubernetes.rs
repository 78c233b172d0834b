//! The arbiter on a Kubernetes cluster: a `Lease` of `coordination.k8s.io/v1`, of which only the version and
//! our own annotation decide.
//!
//! ```text
//!   Lease NAME      annotation snowskin.dev/record    the record, with a version of its own
//!                   spec.holderIdentity               where clients reach the leader: a hint, for others
//!   Lease NAME-ID   annotation snowskin.dev/address   where a member is reached
//! ```
//!
//! A swap reads the Lease, and replaces it only at the `resourceVersion` that it has read, which the API
//! server compares. Times in a Lease say nothing here: they are of clocks that are not compared.
//! <https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions>

use std::time::Duration;

use serde_json::{Value, json};
use store_core::ha::{Record, Told, Versioned};

use super::arbiter::{Address, Arbiter, ArbiterError, BYTES_MAX, MEMBERS_MAX, Stored, endpoint_of};
use crate::kubernetes::{ApiServer, Patience, is_name, refusal};

const RECORD: &str = "snowskin.dev/record";
const ADDRESS: &str = "snowskin.dev/address";
/// The label of the Leases of members: the name of the Lease with the record.
const MASTERS: &str = "snowskin.dev/masters";
/// Longest name of the Lease: that of a member has a number more, and the label's value at most 63 bytes.
const NAME_BYTES_MAX: usize = 42;
/// Longest answer, bytes.
const ANSWER_BYTES_MAX: u64 = BYTES_MAX * MEMBERS_MAX as u64;

/// What `ha.arbiter` may be.
pub(super) const NEED: &str = "must be k8s://NAMESPACE[/LEASE] in a pod, or k8s+http://HOST:PORT/NAMESPACE[/LEASE] \
                               for `kubectl proxy`; names have 1 to 42 of a to z, 0 to 9 and `-`";

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct KubernetesArbiter {
    api: ApiServer,
    namespace: String,
    lease: String,
}

impl KubernetesArbiter {
    const TIMEOUT: Duration = Duration::from_millis(1_000);

    /// Opens what `ha.arbiter` names; `None`: it is something else.
    pub(crate) fn open(text: &str, cluster: &str) -> Option<Result<Self, String>> {
        if let Some(rest) = text.strip_prefix("k8s+http://") {
            let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
            return Some(Self::at(ApiServer::at(format!("http://{host}")), path, cluster));
        }
        let path = text.strip_prefix("k8s://")?;
        Some(ApiServer::of_pod().and_then(|api| Self::at(api, path, cluster)))
    }

    fn at(api: ApiServer, path: &str, cluster: &str) -> Result<Self, String> {
        let (namespace, lease) = match path.trim_end_matches('/').split_once('/') {
            Some((namespace, lease)) => (namespace, lease.to_owned()),
            None => (path, format!("snowskin-{cluster}")),
        };
        if !is_name(namespace, 63) || !is_name(&lease, NAME_BYTES_MAX) {
            return Err(format!("{namespace}/{lease}: {NEED}"));
        }
        Ok(Self { api, namespace: namespace.into(), lease })
    }

    fn leases(&self) -> String {
        format!("{}/apis/coordination.k8s.io/v1/namespaces/{}/leases", self.api.address(), self.namespace)
    }

    /// Sends a request; returns the status and the object in the answer.
    fn send(&self, method: &str, url: &str, body: Option<&Value>) -> Result<(u16, Value), ArbiterError> {
        let failed = |why: String| ArbiterError(format!("{method} {url}: {why}"));
        let body = body.map(Value::to_string).unwrap_or_default();
        let sent = self.api.send(method, url, body, Patience::Whole(Self::TIMEOUT));
        let mut response = sent.map_err(failed)?;
        let status = response.status().as_u16();
        let bytes = response.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_vec();
        let bytes = bytes.map_err(|error| failed(error.to_string()))?;
        if !matches!(status, 200 | 201 | 404 | 409) {
            return Err(failed(refusal(status, &bytes, "get, list, create and update of leases")));
        }
        let object = serde_json::from_slice(&bytes).map_err(|error| failed(format!("not JSON: {error}")))?;
        Ok((status, object))
    }

    /// A Lease, if there is one of this name.
    fn get(&self, name: &str) -> Result<Option<Value>, ArbiterError> {
        let (status, object) = self.send("GET", &format!("{}/{name}", self.leases()), None)?;
        Ok((status == 200).then_some(object))
    }

    /// Creates a Lease, or replaces the one that was read. Returns whether it was still that one.
    fn put(
        &self,
        name: &str,
        was: Option<Value>,
        edit: impl FnOnce(&mut Value),
    ) -> Result<bool, ArbiterError> {
        let exists = was.is_some();
        let mut lease = was.unwrap_or_else(|| {
            json!({
                "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                "metadata": { "name": name, "namespace": self.namespace },
            })
        });
        edit(&mut lease);
        let url = self.leases();
        let (status, _) = match exists {
            true => self.send("PUT", &format!("{url}/{name}"), Some(&lease))?,
            false => self.send("POST", &url, Some(&lease))?,
        };
        match status {
            // It was removed meanwhile.
            404 if exists => Ok(false),
            404 => Err(ArbiterError(format!("{url}: there is no namespace {}", self.namespace))),
            409 => Ok(false),
            _ => Ok(true),
        }
    }

    fn versioned(&self, lease: Option<&Value>) -> Result<Versioned, ArbiterError> {
        let Some(lease) = lease else { return Ok(Versioned::default()) };
        let Some(text) = lease["metadata"]["annotations"][RECORD].as_str() else {
            let name = &self.lease;
            return Err(ArbiterError(format!("the Lease {name} is not of Snowskin: name another one")));
        };
        let (version, record) = Stored::parse(text.as_bytes())?;
        Ok(Versioned { version, record })
    }
}

fn text_of(bytes: Vec<u8>) -> Result<String, ArbiterError> {
    String::from_utf8(bytes).map_err(|error| ArbiterError(error.to_string()))
}

impl Arbiter for KubernetesArbiter {
    fn name(&self) -> String {
        format!("the Lease {}/{} at {}", self.namespace, self.lease, self.api.address())
    }

    fn read(&mut self) -> Result<Versioned, ArbiterError> {
        self.versioned(self.get(&self.lease)?.as_ref())
    }

    fn swap(&mut self, version: u64, record: &Record, known: &[Address]) -> Result<Told, ArbiterError> {
        let lease = self.get(&self.lease)?;
        let is = self.versioned(lease.as_ref())?;
        if is.version != version {
            return Ok(Told::Is(is));
        }
        let stored = text_of(Stored::of(version + 1, record, known).to_bytes()?)?;
        let endpoint = endpoint_of(record.leader, known);
        let replaced = self.put(&self.lease, lease, |lease| {
            lease["metadata"]["annotations"][RECORD] = stored.into();
            lease["spec"]["holderIdentity"] = endpoint.into();
            lease["spec"]["leaseTransitions"] = i32::try_from(record.reign.term).unwrap_or(i32::MAX).into();
        })?;
        if replaced {
            return Ok(Told::Swapped { version: version + 1 });
        }
        Ok(Told::Is(self.read()?))
    }

    fn announce(&mut self, address: &Address) -> Result<(), ArbiterError> {
        let name = format!("{}-{}", self.lease, address.id);
        let bytes = serde_json::to_vec(address).map_err(|error| ArbiterError(error.to_string()))?;
        let stored = text_of(bytes)?;
        let was = self.get(&name)?;
        let replaced = self.put(&name, was, |lease| {
            lease["metadata"]["labels"][MASTERS] = self.lease.as_str().into();
            lease["metadata"]["annotations"][ADDRESS] = stored.into();
            lease["spec"]["holderIdentity"] = address.rpc.as_str().into();
        })?;
        // It is announced again soon.
        if replaced { Ok(()) } else { Err(ArbiterError(format!("the Lease {name} was changed meanwhile"))) }
    }

    fn members(&mut self) -> Result<Vec<Address>, ArbiterError> {
        let url = format!("{}?labelSelector={MASTERS}%3D{}", self.leases(), self.lease);
        let (_, list) = self.send("GET", &url, None)?;
        let items = list["items"].as_array().map(Vec::as_slice).unwrap_or_default();
        let address = |lease: &Value| {
            let text = lease["metadata"]["annotations"][ADDRESS].as_str()?;
            (text.len() as u64 <= BYTES_MAX).then(|| serde_json::from_str(text).ok())?
        };
        Ok(items.iter().filter_map(address).take(MEMBERS_MAX).collect())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::io::{BufRead as _, BufReader, Read as _, Write as _};
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::sync::{Arc, Mutex};
    use std::thread;

    use super::super::arbiter::tests::is_an_arbiter;
    use super::*;

    /// An API server that has nothing but Leases of one namespace. No real cluster was tried.
    #[derive(Default)]
    struct Server {
        leases: Mutex<State>,
    }

    #[derive(Default)]
    struct State {
        by_name: BTreeMap<String, Value>,
        writes: u64,
        /// Another writer changes a Lease before each of so many of the next writes.
        races: u32,
        /// The next answers have this status.
        refuses: Option<u16>,
        token: Option<String>,
    }

    impl Server {
        fn start() -> (Arc<Self>, SocketAddr) {
            let this = Arc::new(Self::default());
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let (addr, server) = (listener.local_addr().unwrap(), Arc::clone(&this));
            thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let server = Arc::clone(&server);
                    thread::spawn(move || server.serve(stream));
                }
            });
            (this, addr)
        }

        fn serve(&self, stream: TcpStream) -> Option<()> {
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            loop {
                let (mut line, mut len, mut token) = (String::new(), 0, None);
                reader.read_line(&mut line).ok().filter(|read| *read > 0)?;
                let mut words = line.split(' ');
                let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
                loop {
                    let mut header = String::new();
                    reader.read_line(&mut header).ok()?;
                    let Some((name, value)) = header.trim().split_once(": ") else { break };
                    match name.to_ascii_lowercase().as_str() {
                        "content-length" => len = value.parse().unwrap(),
                        "authorization" => token = Some(value.to_owned()),
                        _ => {}
                    }
                }
                let mut body = vec![0; len];
                reader.read_exact(&mut body).ok()?;
                let body = serde_json::from_slice(&body).unwrap_or_default();
                let (status, answer) = self.answer(&method, &path, body, token);
                let answer = answer.to_string();
                let head = format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\n\r\n", answer.len());
                (&stream).write_all((head + &answer).as_bytes()).ok()?;
            }
        }

        fn answer(&self, method: &str, path: &str, body: Value, token: Option<String>) -> (u16, Value) {
            let mut state = self.leases.lock().unwrap();
            let status = |code: u16| (code, json!({ "kind": "Status", "message": format!("says {code}") }));
            if state.token.is_some() && state.token != token {
                return status(401);
            }
            if let Some(code) = state.refuses {
                return status(code);
            }
            let path = path.strip_prefix("/apis/coordination.k8s.io/v1/namespaces/kv/leases").unwrap();
            if let Some(selector) = path.strip_prefix("?labelSelector=") {
                let (label, value) = selector.split_once("%3D").unwrap();
                let has = |lease: &&Value| lease["metadata"]["labels"][label] == value;
                let items: Vec<Value> = state.by_name.values().filter(has).cloned().collect();
                return (200, json!({ "items": items }));
            }
            let name = path.strip_prefix('/').map_or(body["metadata"]["name"].as_str(), Some);
            let name = name.unwrap().to_owned();
            if method != "GET" && state.races > 0 {
                state.races -= 1;
                state.writes += 1;
                let version = format!("other-{}", state.writes);
                let other = json!({ "metadata": { "resourceVersion": version, "annotations": {
                    RECORD: r#"{"format":1,"version":41,"lineage":9,"term":1,"leader":3,"in_sync":[3]}"# } } });
                state.by_name.insert(name.clone(), other);
            }
            let was = state.by_name.get(&name).cloned();
            match (method, was) {
                ("GET", Some(lease)) => (200, lease),
                ("GET" | "PUT", None) => status(404),
                ("POST", Some(_)) => status(409),
                ("PUT", Some(was))
                    if was["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"] =>
                {
                    status(409)
                }
                _ => {
                    state.writes += 1;
                    let mut lease = body;
                    // It is not to be taken for a number.
                    lease["metadata"]["resourceVersion"] = format!("v-{}", state.writes).into();
                    state.by_name.insert(name, lease.clone());
                    (if method == "POST" { 201 } else { 200 }, lease)
                }
            }
        }
    }

    fn open(addr: SocketAddr) -> KubernetesArbiter {
        KubernetesArbiter::open(&format!("k8s+http://{addr}/kv"), "c").unwrap().unwrap()
    }

    fn record(term: u64) -> Record {
        let leader = store_core::ha::MemberId(1);
        Record { reign: store_core::ha::Reign { lineage: 2, term }, leader, in_sync: vec![leader] }
    }

    #[test]
    fn a_lease_is_an_arbiter_and_names_the_leader_for_others() {
        let (server, addr) = Server::start();
        is_an_arbiter(&mut open(addr), &mut open(addr));
        let state = server.leases.lock().unwrap();
        let lease = &state.by_name["snowskin-c"];
        assert_eq!(lease["spec"]["holderIdentity"], format!("h{}:1", u64::MAX));
        assert!(
            lease["spec"]["renewTime"].is_null(),
            "Mooncake's clients take it for one that does not expire"
        );
    }

    #[test]
    fn another_writer_between_reading_and_writing_wins_whether_the_lease_is_new_or_not() {
        let (server, addr) = Server::start();
        let mut arbiter = open(addr);
        server.leases.lock().unwrap().races = 1;
        let Told::Is(is) = arbiter.swap(0, &record(1), &[]).unwrap() else {
            panic!("the other one was first")
        };
        assert_eq!((is.version, is.record.leader.0), (41, 3));
        server.leases.lock().unwrap().races = 1;
        assert!(matches!(arbiter.swap(41, &record(2), &[]).unwrap(), Told::Is(is) if is.version == 41));
        assert_eq!(arbiter.swap(41, &record(2), &[]).unwrap(), Told::Swapped { version: 42 });
    }

    #[test]
    fn what_others_have_written_into_the_lease_stays() {
        let (server, addr) = Server::start();
        let mut arbiter = open(addr);
        arbiter.swap(0, &record(1), &[]).unwrap();
        let set = |state: &mut State| {
            let lease = state.by_name.get_mut("snowskin-c").unwrap();
            lease["metadata"]["annotations"]["team"] = "storage".into();
        };
        set(&mut server.leases.lock().unwrap());
        arbiter.swap(1, &record(2), &[]).unwrap();
        let state = server.leases.lock().unwrap();
        assert_eq!(state.by_name["snowskin-c"]["metadata"]["annotations"]["team"], "storage");
    }

    #[test]
    fn errors_say_what_to_do_and_a_swap_without_an_answer_is_an_error() {
        let (server, addr) = Server::start();
        let mut arbiter = open(addr);
        server.leases.lock().unwrap().refuses = Some(403);
        let error = arbiter.swap(0, &record(1), &[]).unwrap_err().to_string();
        assert!(error.contains("says 403") && error.contains("service account"), "{error}");
        server.leases.lock().unwrap().refuses = Some(503);
        assert!(arbiter.read().unwrap_err().to_string().contains("status 503"));
        let state = || server.leases.lock().unwrap();
        state().refuses = None;
        state().by_name.insert("snowskin-c".into(), json!({ "metadata": { "name": "snowskin-c" } }));
        let error = arbiter.read().unwrap_err().to_string();
        assert!(error.contains("not of Snowskin"), "{error}");
        let mut away = open("127.0.0.1:9".parse().unwrap());
        assert!(away.swap(0, &record(1), &[]).is_err());
    }

    #[test]
    fn the_token_is_read_again_for_each_request() {
        let (server, addr) = Server::start();
        let mut arbiter = open(addr);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        arbiter.api.token = Some(path.clone());
        assert!(arbiter.read().unwrap_err().to_string().contains("token"), "there is no file");
        for token in ["one", "two"] {
            server.leases.lock().unwrap().token = Some(format!("Bearer {token}"));
            assert!(fs::read_to_string(&path).is_err() || arbiter.read().is_err(), "the former token");
            fs::write(&path, format!("{token}\n")).unwrap();
            assert_eq!(arbiter.read().unwrap(), Versioned::default());
        }
    }

    #[test]
    fn names_that_kubernetes_refuses_are_refused_at_once() {
        let open = |text: &str| KubernetesArbiter::open(text, "default");
        assert!(open("etcd://h:1").is_none());
        for wrong in ["", "/", "Kv", "kv/-a", "kv/a_b", "kv/a/b", &format!("kv/{}", "a".repeat(43))] {
            let error = open(&format!("k8s+http://h:1/{wrong}")).unwrap().unwrap_err();
            assert!(error.contains("NAMESPACE"), "{wrong}: {error}");
        }
        assert_eq!(open("k8s+http://h:1/kv").unwrap().unwrap().lease, "snowskin-default");
        assert_eq!(open("k8s+http://h:1/kv/mine").unwrap().unwrap().lease, "mine");
        // This test does not run in a pod.
        let error = open("k8s://kv").unwrap().map(drop);
        assert!(error.is_ok() || error.unwrap_err().contains("KUBERNETES_SERVICE_HOST"));
    }
}
