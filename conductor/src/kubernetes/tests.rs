//! A fake API server with EndpointSlices, and a Conductor that finds its engines there. No real cluster was
//! tried.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use store_master::kubernetes::ApiServer;

use super::slices::{Slice, Slices};
use super::watch::{Event, Failure, Source, Watch};
use crate::config::{EngineKind, KubernetesConfig, Role};
use crate::proxy::{Ask, Place as _};
use crate::{Conductor, Config};

fn slice(name: &str, annotations: Value, endpoints: Value) -> Value {
    json!({
        "metadata": { "name": name, "resourceVersion": "v", "annotations": annotations },
        "addressType": "IPv4", "endpoints": endpoints,
        "ports": [{ "name": "http", "port": 8000 }, { "name": "kv-events", "port": 5557 }],
    })
}

fn endpoint(name: &str, address: &str, ready: Value) -> Value {
    json!({ "addresses": [address], "conditions": { "ready": ready }, "targetRef": { "kind": "Pod", "name": name } })
}

fn config() -> KubernetesConfig {
    KubernetesConfig { model: "m".into(), ..KubernetesConfig::default() }
}

/// Names and HTTP addresses of the engines that follow from slices.
fn engines(config: KubernetesConfig, slices: &[Value]) -> Vec<(String, String)> {
    let mut known = Slices::new(config);
    known.replace(slices.iter().map(|slice| serde_json::from_value(slice.clone()).unwrap()).collect());
    known.engines().into_values().map(|engine| (engine.instance, engine.http)).collect()
}

fn pair(name: &str, address: &str) -> (String, String) {
    (name.to_owned(), address.to_owned())
}

#[test]
fn a_service_says_what_its_engines_are() {
    let says = json!({
        "snowskin.dev/model": "org/model", "snowskin.dev/kind": "sglang", "snowskin.dev/role": "prefill",
        "snowskin.dev/http-port": "30000", "snowskin.dev/events-port": "kv-events", "snowskin.dev/replay-port": "9",
        "snowskin.dev/block-tokens": "64", "snowskin.dev/dp-ranks": "2", "snowskin.dev/tenant": "t",
    });
    let mut known = Slices::new(config());
    let said = slice("a", says, json!([endpoint("pod", "10.0.0.7", Value::Null)]));
    known.put(serde_json::from_value(said).unwrap());
    let engine = known.engines().into_values().next().unwrap();
    assert_eq!(
        (engine.model.as_str(), engine.kind, engine.role),
        ("org/model", EngineKind::Sglang, Role::Prefill)
    );
    assert_eq!((engine.http.as_str(), engine.endpoint.as_str()), ("10.0.0.7:30000", "tcp://10.0.0.7:5557"));
    assert_eq!((engine.replay_endpoint.as_str(), engine.block_tokens), ("tcp://10.0.0.7:9", 64));
    assert_eq!((engine.dp_ranks, engine.tenant.as_str(), engine.instance.as_str()), (2, "t", "pod"));
    known.remove("a");
    assert!(known.engines().is_empty());
}

#[test]
fn what_is_not_ready_or_not_valid_is_left_out() {
    let all = json!([
        endpoint("ready", "10.0.0.1", json!(true)),
        endpoint("unknown", "10.0.0.2", Value::Null),
        endpoint("not", "10.0.0.3", json!(false)),
        endpoint("name", "example.org", json!(true)),
        { "addresses": [] },
        { "addresses": ["10.0.0.4"] },
    ]);
    let ready =
        [pair("10.0.0.4", "10.0.0.4:8000"), pair("ready", "10.0.0.1:8000"), pair("unknown", "10.0.0.2:8000")];
    assert_eq!(engines(config(), &[slice("a", json!({}), all.clone())]), ready);
    let few = KubernetesConfig { engines_max: 2, ..config() };
    assert_eq!(engines(few, &[slice("a", json!({}), all.clone())]).len(), 2);
    for (key, value) in
        [("kind", "x"), ("role", ""), ("block-tokens", "-1"), ("http-port", "70000"), ("model", "")]
    {
        let says = json!({ format!("snowskin.dev/{key}"): value });
        assert!(engines(config(), &[slice("a", says, all.clone())]).is_empty(), "{key} {value:?}");
    }
    // In two slices, while it moves; and IPv6 beside IPv4.
    let mut other = slice("0", json!({}), json!([endpoint("a", "fd00::1", json!(true))]));
    other["addressType"] = "IPv6".into();
    let not = slice("1", json!({}), json!([endpoint("a", "10.0.0.1", json!(false))]));
    let yes = slice("2", json!({}), json!([endpoint("a", "10.0.0.1", json!(true))]));
    assert_eq!(engines(config(), &[other.clone(), not.clone(), yes]), [pair("a", "10.0.0.1:8000")]);
    assert_eq!(engines(config(), &[other, not]), [pair("a", "[fd00::1]:8000")]);
    assert_eq!(engines(config(), &[json!({}), json!({ "endpoints": null, "metadata": {} })]), []);
}

#[test]
fn hostile_events_end_a_watch() {
    let next = |text: &str| Watch { lines: BufReader::new(text.as_bytes()), line: Vec::new() }.next();
    assert!(next("").unwrap().is_none());
    let bookmark = "{\"type\":\"BOOKMARK\",\"object\":{\"metadata\":{\"resourceVersion\":\"12\"}}}\n";
    assert!(matches!(next(bookmark).unwrap(), Some(Event::Bookmark(version)) if version == "12"));
    let gone = "{\"type\":\"ERROR\",\"object\":{\"kind\":\"Status\",\"code\":410}}\n";
    assert!(matches!(next(gone), Err(Failure::Gone)));
    for text in [
        "x\n",
        "{}\n",
        "{\"type\":\"ADDED\"}\n",
        "{\"type\":\"ADDED\",\"object\":[7]}\n",
        "{\"type\":\"OTHER\",\"object\":{}}\n",
        "{\"type\":\"ERROR\",\"object\":5}\n",
        "{\"type\":\"ADDED\",\"object\":{\"endpoints\":7}}\n",
        &bookmark[..bookmark.len() - 1],
        &"x".repeat(5 << 20),
    ] {
        assert!(matches!(next(text), Err(Failure::Other(_))), "{}", &text[..text.len().min(40)]);
    }
}

/// What the fake server has, and what it was asked.
#[derive(Default)]
struct State {
    items: Vec<Value>,
    /// Lines that watches have to send; `None`: the watch ends.
    events: Vec<Option<String>>,
    /// The next answers have these statuses.
    refuses: Vec<u16>,
    asked: Vec<(String, Option<String>)>,
}

#[derive(Default)]
struct Server {
    state: Mutex<State>,
    changed: Condvar,
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

    fn serve(&self, mut stream: TcpStream) -> Option<()> {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let (mut line, mut token) = (String::new(), None);
        reader.read_line(&mut line).ok().filter(|read| *read > 0)?;
        let path = line.split(' ').nth(1)?.to_owned();
        loop {
            let mut header = String::new();
            reader.read_line(&mut header).ok()?;
            let Some((name, value)) = header.trim().split_once(": ") else { break };
            if name.eq_ignore_ascii_case("authorization") {
                token = Some(value.to_owned());
            }
        }
        let mut state = self.state.lock().unwrap();
        state.asked.push((path.clone(), token));
        self.changed.notify_all();
        let refused = if state.refuses.is_empty() { None } else { Some(state.refuses.remove(0)) };
        let items = state.items.clone();
        drop(state);
        let whole = |status: u16, body: &Value| {
            let body = body.to_string();
            format!(
                "HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            )
        };
        if let Some(status) = refused {
            return stream.write_all(whole(status, &json!({ "message": "says no" })).as_bytes()).ok();
        }
        if !path.contains("watch=true") {
            // Two pages.
            let last = path.contains("continue=next%2F1");
            let (first, second) = items.split_at(items.len() / 2);
            let more = if last { Value::Null } else { "next/1".into() };
            let list = json!({ "metadata": { "resourceVersion": "v-1", "continue": more },
                "items": if last { second } else { first } });
            return stream.write_all(whole(200, &list).as_bytes()).ok();
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n").ok()?;
        loop {
            let state = self.state.lock().unwrap();
            let mut state = self.changed.wait_while(state, |state| state.events.is_empty()).unwrap();
            let event = state.events.remove(0)?;
            drop(state);
            stream.write_all((event.clone() + "\n").as_bytes()).ok()?;
            if event.contains("ERROR") {
                return None;
            }
        }
    }

    fn tell(&self, kind: &str, object: &Value) {
        let line = json!({ "type": kind, "object": object }).to_string();
        self.state.lock().unwrap().events.push(Some(line));
        self.changed.notify_all();
    }

    /// Waits for so many requests of a kind; returns the last one.
    fn asked(&self, part: &str, count: usize) -> String {
        let state = self.state.lock().unwrap();
        let of = |state: &State| state.asked.iter().filter(|(path, _)| path.contains(part)).count();
        let limit = Duration::from_secs(30);
        let (state, waited) =
            self.changed.wait_timeout_while(state, limit, |state| of(state) < count).unwrap();
        assert!(!waited.timed_out(), "{count} of {part}: {:?}", state.asked);
        state.asked.iter().rfind(|(path, _)| path.contains(part)).unwrap().0.clone()
    }
}

/// Waits until `done` is true.
fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = std::time::Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(std::time::Instant::now() < deadline, "never: {what}");
        thread::sleep(Duration::from_millis(2)); // timing: between two looks at a state that has to come
    }
}

/// Where a request would go.
fn placed(conductor: &crate::ConductorHandle) -> Option<String> {
    let ask = Ask {
        tenant: "",
        model: "m",
        lora: "",
        salt: "",
        tokens: &[1, 2, 3],
        output_tokens_max: Some(1),
        waited: Duration::ZERO,
        avoid: &[],
        among: None,
    };
    let place = conductor.place();
    let placed = place.decide(&ask).ok()?;
    place.report(placed.reservation, crate::proxy::Progress::Done);
    Some(placed.decode.pool.address().to_owned())
}

#[test]
fn engines_come_and_go_with_their_slices() {
    let (server, addr) = Server::start();
    // Engines that publish nothing are there at once.
    let says = json!({ "snowskin.dev/events-port": "", "snowskin.dev/replay-port": "" });
    let slice_of = |name: &str, address: &str, ready: bool| {
        slice(name, says.clone(), json!([endpoint(name, address, json!(ready))]))
    };
    server.state.lock().unwrap().refuses = vec![503];
    server.state.lock().unwrap().items =
        vec![slice_of("a", "10.0.0.1", true), slice_of("b", "10.0.0.2", false)];
    let mut config = Config { listen: "127.0.0.1:0".parse().unwrap(), ..Config::default() };
    config.kubernetes.services = format!("k8s+http://{addr}/kv");
    config.kubernetes.model = "m".into();
    let conductor = Conductor::bind(config).unwrap().spawn().unwrap();
    let goes = |to: Option<&str>| placed(&conductor).as_deref() == to;
    eventually("the list", || goes(Some("10.0.0.1:8000")));
    let watch = server.asked("watch=true", 1);
    let expected = "/apis/discovery.k8s.io/v1/namespaces/kv/endpointslices?labelSelector=snowskin.dev%2Fengines%3Dtrue&watch=true&allowWatchBookmarks=true&resourceVersion=v-1";
    assert!(watch.starts_with(expected), "{watch}");

    // One is not ready any more, and the other one is: both in the order of events.
    server.tell("MODIFIED", &slice_of("a", "10.0.0.1", false));
    eventually("nothing is ready", || goes(None));
    server.tell("MODIFIED", &slice_of("b", "10.0.0.2", true));
    eventually("the other one", || goes(Some("10.0.0.2:8000")));
    // A pod of the same name at another address.
    server.tell("MODIFIED", &slice_of("b", "10.0.0.3", true));
    eventually("its new address", || goes(Some("10.0.0.3:8000")));
    server.tell("DELETED", &slice_of("b", "10.0.0.3", true));
    eventually("it is gone", || goes(None));

    // The next watch begins where this one ended.
    server.tell("BOOKMARK", &json!({ "metadata": { "resourceVersion": "v 7" } }));
    server.state.lock().unwrap().events.push(None);
    server.changed.notify_all();
    assert!(server.asked("watch=true", 2).contains("resourceVersion=v%207&"));
    // Its version is gone: the list is read again, and what it does not have is taken out.
    server.tell("ADDED", &slice_of("c", "10.0.0.4", true));
    eventually("one more", || goes(Some("10.0.0.4:8000")));
    server.state.lock().unwrap().items = vec![slice_of("d", "10.0.0.5", true)];
    server.tell("ERROR", &json!({ "kind": "Status", "code": 410 }));
    eventually("the list again", || goes(Some("10.0.0.5:8000")));
    server.asked("watch=true", 3);
    server.state.lock().unwrap().events.push(None);
    server.state.lock().unwrap().refuses = vec![410];
    server.changed.notify_all();
    server.asked("watch=true", 5);
    assert!(goes(Some("10.0.0.5:8000")), "an answer that fails takes nothing out");
    conductor.stop();
}

#[test]
fn refusals_say_what_to_do_and_a_token_is_read_for_each_request() {
    let (server, addr) = Server::start();
    let dir = tempfile::tempdir().unwrap();
    let account = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    let open = || ApiServer::with_account(format!("http://{addr}"), dir.path());
    assert!(open().unwrap_err().contains("ca.crt"));
    account("ca.crt", "nothing");
    assert!(open().unwrap_err().contains("no certificate"));
    account("ca.crt", CERTIFICATE);
    account("token", "one\n");
    let source = Source::at(open().unwrap(), "kv", "a=b").unwrap();
    assert!(source.list().unwrap().0.is_empty());
    account("token", "two\n");
    // Other certificates are taken over; none is an error, which says so.
    account("ca.crt", &CERTIFICATE.repeat(2));
    source.list().unwrap();
    account("ca.crt", "nothing");
    assert!(matches!(source.list(), Err(Failure::Other(why)) if why.contains("no certificate")));
    std::fs::remove_file(dir.path().join("ca.crt")).unwrap();
    source.list().unwrap();
    let asked: Vec<Option<String>> =
        server.state.lock().unwrap().asked.iter().map(|(_, token)| token.clone()).collect();
    assert_eq!(asked[0].as_deref(), Some("Bearer one"));
    assert!(asked[2..].iter().all(|token| token.as_deref() == Some("Bearer two")));
    server.state.lock().unwrap().refuses = vec![403];
    assert!(
        matches!(source.list(), Err(Failure::Other(why)) if why.contains("says no") && why.contains("endpointslices"))
    );
    server.state.lock().unwrap().refuses = vec![410];
    assert!(matches!(source.list(), Err(Failure::Gone)));
    for name in ["", "Kv", "a/b"] {
        assert!(Source::at(ApiServer::at("http://h".into()), name, "").unwrap_err().contains("namespace"));
    }
    let _: Slice = serde_json::from_str("{}").unwrap();
}

/// Any certificate: it is parsed as PEM only until a connection with TLS is opened.
const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n";
