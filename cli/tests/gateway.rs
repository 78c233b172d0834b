//! The HTTP gateway over plain sockets: what it serves, what it refuses, and what it does not wait for.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use common::{Daemon, PATIENCE, Store, assert_exit, json, run, stderr};
use serde_json::Value;
use te_core::testkit::pattern;

/// A parsed response.
struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let body = String::from_utf8_lossy(&self.body[..self.body.len().min(300)]);
        write!(f, "{} {:?} {body}", self.status, self.headers)
    }
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Asserts that this is an error response with this status, and with this text in its message.
    fn refused(&self, status: u16, word: &str) {
        assert_eq!(self.status, status, "{self:?}");
        let problem = self.json();
        assert!(problem["error"].is_string(), "{problem}");
        let message = problem["message"].as_str().expect("a message");
        assert!(message.contains(word), "{message}");
    }
}

struct Gateway {
    daemon: Daemon,
    address: String,
    store: Store,
}

impl Gateway {
    fn start(args: &[&str]) -> Self {
        let store = Store::start();
        let args =
            [&["gateway", "--listen", "127.0.0.1:0", "--json", "--master", &store.address], args].concat();
        let daemon = Daemon::start(&args);
        Self { address: daemon.text("http"), daemon, store }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    fn ask(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> Answer {
        let mut stream = self.connect();
        let length =
            if body.is_empty() { String::new() } else { format!("Content-Length: {}\r\n", body.len()) };
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}{length}\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        // The gateway may have answered before it has read everything.
        let _ = stream.write_all(body);
        read_answer(&mut stream, method == "HEAD")
    }

    fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, "", b"")
    }

    fn put(&self, path: &str, body: &[u8]) -> Answer {
        self.ask("PUT", path, "", body)
    }
}

/// Reads until the connection is closed.
fn read_answer(stream: &mut TcpStream, no_body: bool) -> Answer {
    let mut bytes = Vec::new();
    let mut piece = [0; 1 << 16];
    // A reset after the response is ignored.
    while let Ok(len @ 1..) = stream.read(&mut piece) {
        bytes.extend_from_slice(&piece[..len]);
    }
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n");
    let end = end.unwrap_or_else(|| panic!("no answer: {:?}", String::from_utf8_lossy(&bytes)));
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
    let mut lines = head.lines();
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let headers: Vec<_> = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
        .collect();
    let answer = Answer { status, headers, body: bytes[end + 4..].to_vec() };
    if !no_body && let Some(length) = answer.header("content-length") {
        assert_eq!(answer.body.len(), length.parse::<usize>().unwrap(), "all of the body came");
    }
    answer
}

impl Gateway {
    /// Waits until its metrics contain a line.
    fn until(&self, line: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !String::from_utf8_lossy(&self.get("/metrics").body).contains(line) {
            assert!(Instant::now() < deadline, "{line} does not come about");
        }
    }
}

#[test]
fn a_web_page_whose_name_resolves_to_this_host_is_refused() {
    let gateway = Gateway::start(&[]);
    let asked = |host: &str| {
        let mut stream = gateway.connect();
        let head = format!("GET /v1/objects HTTP/1.1\r\nConnection: close\r\nHost: {host}\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        read_answer(&mut stream, false)
    };
    for own in [&gateway.address[..], "localhost", "LocalHost:1", "127.0.0.1", "[::1]", "[::1]:80"] {
        assert_eq!(asked(own).status, 200, "{own}");
    }
    for other in
        ["a.example", "a.example:80", "localhost.a.example", "127.0.0.1.a.example", "[::1", "[::1]x", "::1"]
    {
        asked(other).refused(403, "localhost");
    }
}

#[test]
fn an_object_is_put_found_fetched_listed_and_removed() {
    let gateway = Gateway::start(&[]);
    let value = pattern(1, 300_000);
    let stored = gateway.put("/v1/objects/kv/a%20b?replicas=1&ttl_ms=600000&pin=soft&group=g", &value);
    assert_eq!((stored.status, stored.json()["bytes"].as_u64()), (201, Some(300_000)));
    gateway.put("/v1/objects/kv/a%20b", b"other").refused(409, "remove it first");
    // The same key in another encoding.
    let found = gateway.get("/v1/objects/kv%2Fa%20b");
    assert_eq!(found.status, 200);
    assert!(found.body == value, "every byte");
    assert_eq!(found.header("content-type"), Some("application/octet-stream"));
    assert_eq!(found.header("accept-ranges"), Some("bytes"));
    let tag = found.header("etag").expect("a tag").to_owned();
    let checksum = format!("\"{:08x}-", te_host::crc32c_of(0, &value));
    assert!(tag.starts_with(&checksum) && tag.ends_with('"'), "{tag}");
    // The command line reads the same object.
    assert!(gateway.store.run(&["get", "kv/a b"]).stdout == value);

    let head = gateway.ask("HEAD", "/v1/objects/kv/a%20b", "", b"");
    assert_eq!((head.status, head.body.len()), (200, 0));
    assert_eq!((head.header("content-length"), head.header("etag")), (Some("300000"), Some(&tag[..])));
    let unchanged = gateway.ask("GET", "/v1/objects/kv/a%20b", &format!("If-None-Match: {tag}\r\n"), b"");
    assert_eq!((unchanged.status, unchanged.body.len()), (304, 0));

    assert_eq!(gateway.put("/v1/objects/%00%ff", b"binary key").status, 201);
    let listed = gateway.get("/v1/objects?limit=10").json();
    let mut hrefs: Vec<_> =
        listed["objects"].as_array().unwrap().iter().map(|object| object["href"].as_str().unwrap()).collect();
    hrefs.sort_unstable();
    assert_eq!(hrefs, ["/v1/objects/%00%FF", "/v1/objects/kv%2Fa%20b"]);
    assert!(listed["cursor"].is_null());
    assert_eq!(gateway.get(hrefs[0]).body, b"binary key");
    let some = gateway.get("/v1/objects?prefix=kv%2F").json();
    assert_eq!(
        (some["objects"].as_array().unwrap().len(), some["objects"][0]["bytes"].as_u64()),
        (1, Some(300_000))
    );

    let exists = gateway.ask("POST", "/v1/exists", "", br#"{"keys":["kv/a b","nothing"]}"#);
    assert_eq!(exists.json()["exists"], serde_json::json!([true, false]));
    gateway.ask("DELETE", "/v1/objects/kv/a%20b", "", b"").refused(409, "force");
    assert_eq!(gateway.ask("DELETE", "/v1/objects/kv/a%20b?force=true", "", b"").status, 204);
    gateway.ask("DELETE", "/v1/objects/kv/a%20b", "", b"").refused(404, "not cached");
    gateway.get("/v1/objects/kv/a%20b").refused(404, "not cached");
    assert_eq!(gateway.ask("HEAD", "/v1/objects/kv/a%20b", "", b"").status, 404);
}

#[test]
fn a_list_has_pages_that_hold_every_key_once() {
    let gateway = Gateway::start(&[]);
    for index in 0..25 {
        assert_eq!(gateway.put(&format!("/v1/objects/page/{index}"), b"x").status, 201);
    }
    let (mut keys, mut cursor) = (Vec::new(), "0".to_owned());
    loop {
        let page = gateway.get(&format!("/v1/objects?prefix=page/&limit=7&cursor={cursor}")).json();
        let objects = page["objects"].as_array().unwrap();
        assert!(objects.len() <= 7);
        keys.extend(objects.iter().map(|object| object["key"].as_str().unwrap().to_owned()));
        match page["cursor"].as_str() {
            Some(next) => next.clone_into(&mut cursor),
            None => break,
        }
    }
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), 25);
}

#[test]
fn parts_of_an_object_are_served_and_parts_it_does_not_have_are_not() {
    let gateway = Gateway::start(&[]);
    let value = pattern(1, 200_000);
    assert_eq!(gateway.put("/v1/objects/k", &value).status, 201);
    for (range, first, last) in [
        ("bytes=0-0", 0, 0),
        ("bytes=65530-65545", 65_530, 65_545),
        ("bytes=199999-", 199_999, 199_999),
        ("bytes=-1000", 199_000, 199_999),
        ("bytes=100000-999999", 100_000, 199_999),
        ("bytes=0-", 0, 199_999),
    ] {
        let part = gateway.ask("GET", "/v1/objects/k", &format!("Range: {range}\r\n"), b"");
        assert_eq!(part.status, 206, "{range}");
        assert!(part.body == value[first..=last], "{range}");
        let content_range = format!("bytes {first}-{last}/200000");
        assert_eq!(part.header("content-range"), Some(&content_range[..]));
    }
    for range in ["bytes=200000-", "bytes=-0", "bytes=99999999999999999999-"] {
        let none = gateway.ask("GET", "/v1/objects/k", &format!("Range: {range}\r\n"), b"");
        none.refused(416, "200000");
        assert_eq!(none.header("content-range"), Some("bytes */200000"));
    }
    // The client has part of another version of the object, so the range is ignored.
    let all = gateway.ask("GET", "/v1/objects/k", "Range: bytes=0-9\r\nIf-Range: \"other\"\r\n", b"");
    assert_eq!((all.status, all.body.len()), (200, 200_000));
    let tag = all.header("etag").unwrap().to_owned();
    let part = gateway.ask("GET", "/v1/objects/k", &format!("Range: bytes=0-9\r\nIf-Range: {tag}\r\n"), b"");
    assert_eq!((part.status, part.body.len()), (206, 10));
}

#[test]
fn malformed_requests_are_refused_with_advice() {
    let gateway = Gateway::start(&["--body-bytes-max", "100KiB"]);
    for path in ["/v1/objects/%zz", "/v1/objects/a%2", "/v1/objects/a%"] {
        gateway.get(path).refused(400, "%25");
        gateway.put(path, b"x").refused(400, "%25");
    }
    gateway.get(&format!("/v1/objects/{}", "k".repeat(1025))).refused(400, "key_bytes_max");
    for query in
        ["replicas=0", "replicas=9", "replicas=x", "ttl_ms=0", "pin=yes", "group=", "colour=red", "a=%"]
    {
        let refused = gateway.put(&format!("/v1/objects/k?{query}"), b"x");
        assert_eq!(refused.status, 400, "{query}");
    }
    gateway.get("/v1/objects?limit=0").refused(400, "limit=1 to 1024");
    gateway.get("/v1/objects?limit=9999").refused(400, "limit=1 to 1024");
    gateway.get("/v1/objects?cursor=x").refused(400, "cursor");
    gateway.ask("DELETE", "/v1/objects/k?force=perhaps", "", b"").refused(400, "force");
    for question in ["", "[]", "{}", "{\"keys\":[1]}", "{\"keys\":[],\"more\":1}", "{\"keys\":[\"a\""] {
        let refused = gateway.ask("POST", "/v1/exists", "", question.as_bytes());
        assert_eq!(refused.status, 400, "{question}");
    }
    let many = serde_json::json!({ "keys": vec!["k"; 1025] }).to_string();
    gateway.ask("POST", "/v1/exists", "", many.as_bytes()).refused(400, "1024");
    gateway.put("/v1/objects/k", b"").refused(400, "one byte");
    gateway.ask("PUT", "/v1/objects/k", "Content-Length: 0\r\n", b"").refused(400, "one byte");
    gateway.get("/v1/objects/").refused(404, "openapi");
    gateway.get("/elsewhere").refused(404, "openapi");
    gateway.ask("PATCH", "/v1/objects/k", "", b"").refused(405, "openapi");
    // Longer than allowed: by Content-Length, and by the bytes that arrive.
    gateway.put("/v1/objects/k", &[1; 100 * 1024 + 1]).refused(413, "--body-bytes-max");
    let mut chunked = b"19001\r\n".to_vec();
    chunked.extend([1; 0x19001]);
    chunked.extend(b"\r\n0\r\n\r\n");
    let mut stream = gateway.connect();
    let head =
        b"PUT /v1/objects/k HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n";
    stream.write_all(head).unwrap();
    let _ = stream.write_all(&chunked);
    read_answer(&mut stream, false).refused(413, "--body-bytes-max");
    // Heads without an end.
    let long = format!("X: {}\r\n", "y".repeat(400_000));
    assert_eq!(gateway.ask("GET", "/health", &long, b"").status, 431);
    let many = "X: y\r\n".repeat(100);
    assert_eq!(gateway.ask("GET", "/health", &many, b"").status, 431);
    // After all of this it still serves, and nothing was stored.
    assert_eq!(gateway.get("/v1/objects").json()["objects"], serde_json::json!([]));
    assert_eq!(gateway.put("/v1/objects/k", &[1; 100 * 1024]).status, 201);
}

#[test]
fn a_chunked_body_is_stored_as_a_whole() {
    let gateway = Gateway::start(&[]);
    let mut stream = gateway.connect();
    let head = "PUT /v1/objects/k HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    for chunk in ["5\r\nhello\r\n", "7\r\n, world\r\n", "0\r\n\r\n"] {
        stream.write_all(chunk.as_bytes()).unwrap();
    }
    assert_eq!(read_answer(&mut stream, false).status, 201);
    assert_eq!(gateway.get("/v1/objects/k").body, b"hello, world");
}

#[test]
fn a_body_that_ends_early_or_never_comes_stores_nothing() {
    // Short, but long enough for clients that send everything, even on a busy machine.
    let gateway = Gateway::start(&["--body-ms-max", "1500", "--head-ms-max", "1500"]);
    // Content-Length promises more than is sent.
    let mut stream = gateway.connect();
    stream
        .write_all(b"PUT /v1/objects/cut HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nhalf")
        .unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let _ = stream.read_to_end(&mut Vec::new());
    // A chunk that is cut off.
    let mut stream = gateway.connect();
    let head =
        b"PUT /v1/objects/cut HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel";
    stream.write_all(head).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let _ = stream.read_to_end(&mut Vec::new());
    // A client that stops sending.
    let mut stream = gateway.connect();
    stream
        .write_all(
            b"PUT /v1/objects/cut HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 9\r\n\r\nhalf",
        )
        .unwrap();
    read_answer(&mut stream, false).refused(408, "too slowly");
    // A client whose head never ends is disconnected.
    let mut stream = gateway.connect();
    let deadline = Instant::now() + PATIENCE;
    let mut bytes = Vec::new();
    stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    stream.write_all(b"GET /health HTTP/1.1\r\nX: ").unwrap();
    loop {
        // A byte from time to time does not prevent that.
        let sent = stream.write_all(b"y");
        match stream.read(&mut [0; 512]) {
            Ok(0) => break,
            Ok(len) => bytes.push(len),
            Err(error)
                if matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {}
            Err(_) => break,
        }
        assert!(Instant::now() < deadline, "it is never disconnected");
        if sent.is_err() {
            break;
        }
    }
    gateway.get("/v1/objects/cut").refused(404, "not cached");
    assert_eq!(gateway.get("/v1/objects").json()["objects"], serde_json::json!([]));
}

#[test]
fn more_bytes_than_the_gateway_may_hold_are_refused_until_there_is_room() {
    let gateway = Gateway::start(&["--body-bytes-max", "1MiB", "--buffered-bytes", "2MiB"]);
    // A client that sends nearly all of its body holds nearly all of the memory for uploads.
    let mut hog = gateway.connect();
    hog.write_all(b"PUT /v1/objects/hog HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1048576\r\n\r\n")
        .unwrap();
    hog.write_all(&pattern(1, 1_000_000)).unwrap();
    gateway.until("snowskin_gateway_incoming_bytes 1048576");
    let value = pattern(1, 100_000);
    let answer = gateway.put("/v1/objects/k", &value);
    answer.refused(503, "--buffered-bytes");
    assert_eq!(answer.header("retry-after"), Some("1"));
    drop(hog);
    let deadline = Instant::now() + PATIENCE;
    while gateway.put("/v1/objects/later", &value).status == 503 {
        assert!(Instant::now() < deadline, "the memory is not freed");
    }
}

#[test]
fn uploads_that_announce_much_and_send_little_do_not_block_others() {
    let gateway = Gateway::start(&[]);
    assert_eq!(gateway.put("/v1/objects/there", b"hello").status, 201);
    let slow: Vec<_> = (0..8)
        .map(|index| {
            let mut stream = gateway.connect();
            let head = format!("PUT /v1/objects/slow{index} HTTP/1.1\r\nHost: localhost\r\n");
            stream.write_all(format!("{head}Content-Length: {}\r\n\r\nx", 256 << 20).as_bytes()).unwrap();
            stream
        })
        .collect();
    // The uploads have arrived when they are counted, together with the request for the metrics.
    gateway.until("snowskin_gateway_requests_in_flight 9");
    for turn in 0..10 {
        assert_eq!(gateway.put(&format!("/v1/objects/k{turn}"), &pattern(1, 100_000)).status, 201);
        assert_eq!(gateway.get("/v1/objects/there").body, b"hello");
    }
    drop(slow);
}

#[test]
fn uploads_that_fill_their_share_do_not_block_readers() {
    let gateway = Gateway::start(&["--body-bytes-max", "1MiB", "--buffered-bytes", "2MiB"]);
    let value = pattern(1, 1 << 20);
    assert_eq!(gateway.put("/v1/objects/there", &value).status, 201);
    let mut hog = gateway.connect();
    hog.write_all(b"PUT /v1/objects/hog HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1048576\r\n\r\n")
        .unwrap();
    hog.write_all(&value[1..]).unwrap();
    gateway.until("snowskin_gateway_incoming_bytes 1048576");
    gateway.put("/v1/objects/k", &value[..100_000]).refused(503, "--buffered-bytes");
    assert_eq!(gateway.get("/v1/objects/there").body, value);
}

#[test]
fn an_upload_that_stalls_is_aborted() {
    let gateway = Gateway::start(&["--stall-ms-max", "300"]);
    let mut stream = gateway.connect();
    stream
        .write_all(
            b"PUT /v1/objects/k HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 9999999\r\n\r\nx",
        )
        .unwrap();
    // Long before the timeout of the whole body, however slowly bytes arrive.
    read_answer(&mut stream, false).refused(408, "too slowly");
}

#[test]
fn a_response_that_is_not_read_frees_its_memory() {
    let gateway = Gateway::start(&[
        "--body-bytes-max",
        "10MiB",
        "--buffered-bytes",
        "20MiB",
        "--stall-ms-max",
        "300",
        "--connections-max",
        "2",
    ]);
    let value = pattern(1, 10 << 20);
    assert_eq!(gateway.put("/v1/objects/k", &value).status, 201);
    // These clients send requests and never read. Then there is no free connection left.
    let mut stalled: Vec<_> = (0..2).map(|_| gateway.connect()).collect();
    for stream in &mut stalled {
        stream.write_all(b"GET /v1/objects/k HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    }
    let deadline = Instant::now() + PATIENCE;
    while gateway.put("/v1/objects/later", b"x").status == 503 {
        assert!(Instant::now() < deadline, "the memory is not freed");
    }
}

#[test]
fn requests_follow_one_another_on_a_connection() {
    let gateway = Gateway::start(&[]);
    let mut stream = gateway.connect();
    stream
        .write_all(
            b"PUT /v1/objects/k HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello\
              GET /v1/objects/k HTTP/1.1\r\nHost: localhost\r\n\r\n\
              GET /v1/objects/nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        )
        .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let statuses: Vec<_> = text.match_indices("HTTP/1.1 ").map(|(at, _)| &text[at + 9..at + 12]).collect();
    assert_eq!(statuses, ["201", "200", "404"]);
    assert!(text.contains("hello"));
}

#[test]
fn it_reports_its_health_and_describes_its_api() {
    let gateway = Gateway::start(&[]);
    assert_eq!(gateway.get("/health").json()["status"], "ok");
    assert_eq!(gateway.get("/ready").json()["ready"], true);
    let document = gateway.get("/openapi.json").json();
    assert!(document["info"]["description"].as_str().unwrap().contains("NO AUTHENTICATION"));
    // Every path and method of the document is served: the response is never "this path does not exist".
    for (path, item) in document["paths"].as_object().unwrap() {
        for method in item.as_object().unwrap().keys().filter(|method| *method != "parameters") {
            let answer = gateway.ask(&method.to_uppercase(), &path.replace("{key}", "some/key"), "", b"");
            let text = String::from_utf8_lossy(&answer.body).into_owned();
            assert!(
                answer.status != 405 && !text.contains("this path does not exist:"),
                "{method} {path}: {answer:?}"
            );
        }
    }
    assert_eq!(gateway.put("/v1/objects/k", &[7; 1000]).status, 201);
    assert_eq!(gateway.get("/v1/objects/k").status, 200);
    let metrics = String::from_utf8(gateway.get("/metrics").body).unwrap();
    for line in [
        "snowskin_gateway_written_bytes_total 1000",
        "snowskin_gateway_read_bytes_total 1000",
        "snowskin_gateway_requests_in_flight 1",
        "snowskin_client_puts_total 1",
        "snowskin_client_hits_total 1",
        "snowskin_client_checksum_mismatches_total 0",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    assert!(metrics.ends_with("# EOF\n"));
    assert_eq!(gateway.daemon.terminate(), Some(0));
}

#[test]
fn without_a_master_it_does_not_start_and_without_nodes_it_is_not_ready() {
    // A gateway waits for a master that is being started, but not for a host that does not exist.
    let away = run(&["gateway", "--listen", "127.0.0.1:0", "--master", "no-such-host.invalid:1"]);
    assert_exit(&away, 1);
    assert!(stderr(&away).contains("no-such-host.invalid"), "{}", stderr(&away));
    let nonsense = run(&["gateway", "--buffered-bytes", "3MiB", "--body-bytes-max", "2MiB"]);
    assert_exit(&nonsense, 2);

    let mut gateway = Gateway::start(&[]);
    gateway.store.node.end();
    let ready = gateway.get("/ready");
    assert_eq!((ready.status, ready.json()["ready"].as_bool()), (503, Some(false)));
    gateway.put("/v1/objects/k", b"x").refused(507, "start a node");
    assert_eq!(gateway.get("/health").status, 200);
}

#[test]
fn a_node_is_a_gateway_and_serves_local_clients_with_flags() {
    let master = Daemon::start(&["master", "--listen", "127.0.0.1:0", "--http", "none", "--json"]);
    let address = master.text("rpc");
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("local.sock");
    let path = socket.to_str().unwrap();
    let node = [
        "node",
        "--master",
        &address,
        "--memory",
        "16MiB",
        "--json",
        "--local",
        path,
        "--gateway",
        "127.0.0.1:0",
    ];
    let node = Daemon::start(&node);
    assert_eq!(node.text("local"), path);
    let file = dir.path().join("in");
    let value = pattern(1, 3_000_000);
    std::fs::write(&file, &value).unwrap();
    let put = run(&["put", "k", file.to_str().unwrap(), "--local", path, "--json"]);
    assert_exit(&put, 0);
    assert_eq!(json(&put)["bytes"], 3_000_000);
    let taken = run(&["put", "k", file.to_str().unwrap(), "--local", path]);
    assert_exit(&taken, 1);
    assert!(stderr(&taken).contains("--replace"));
    assert_exit(&run(&["put", "k", file.to_str().unwrap(), "--local", path, "--replace"]), 0);
    let got = run(&["get", "k", "--local", path]);
    assert_exit(&got, 0);
    assert!(got.stdout == value);
    assert_exit(&run(&["get", "nothing", "--local", path]), 3);
    let away = run(&["get", "k", "--local", dir.path().join("no").to_str().unwrap()]);
    assert_exit(&away, 1);
    assert!(stderr(&away).contains("snowskin node --local"), "{}", stderr(&away));
    // It serves the same store over HTTP.
    let mut stream = TcpStream::connect(node.text("gateway")).unwrap();
    stream.write_all(b"GET /v1/objects/k HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    assert!(read_answer(&mut stream, false).body == value);
    assert_eq!(node.terminate(), Some(0));
    assert!(!socket.exists(), "the socket is removed with its node");
}
