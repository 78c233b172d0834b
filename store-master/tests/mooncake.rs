//! The interface under the names of Mooncake's master: what it reports, what it changes, what it refuses.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use common::{config, connect, fill, fill_on, mount_on, read_answer, start, start_with};
use serde_json::{Value, json};
use store_core::message::{
    Commit, Exists, Get, Greeting, Hello, LeaseWanted, NewObject, Operation, PutEnd, PutOptions, PutRequest,
    PutStart, ReadStats,
};
use store_core::{Key, MasterConfig, Role, Secret, Stats, TenantConfig, prove};
use store_master::{Config, MasterHandle, MasterServer};

struct Answer {
    status: u16,
    kind: String,
    body: Vec<u8>,
}

impl Answer {
    fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    fn json(&self) -> Value {
        assert!(self.kind.starts_with("application/json"), "{}", self.kind);
        serde_json::from_slice(&self.body).unwrap()
    }
}

/// One request on its own connection; `more` are further lines of its head.
fn send(http: SocketAddr, method: &str, path: &str, more: &str, body: &str) -> Answer {
    let mut stream = connect(http);
    let host = if more.contains("Host:") { String::new() } else { format!("Host: {http}\r\n") };
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\n{host}Connection: close\r\nContent-Length: {length}\r\n{more}\r\n"
    )
    .unwrap();
    // A request that is refused by its head is answered at once, and the rest of its body is not taken.
    let taken = stream.write_all(body.as_bytes());
    let mut bytes = Vec::new();
    let read = stream.read_to_end(&mut bytes);
    assert!(read.is_ok() || taken.is_err(), "{read:?}");
    let at = bytes.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
    let head = String::from_utf8(bytes[..at].to_vec()).unwrap().to_lowercase();
    let field = |name: &str| {
        head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": ").map(str::to_owned))
    };
    let mut body = bytes.split_off(at + 4);
    if field("transfer-encoding").as_deref() == Some("chunked") {
        body = unchunked(&body);
    }
    Answer { status: head[9..12].parse().unwrap(), kind: field("content-type").unwrap_or_default(), body }
}

/// The bytes of a chunked body, which must be complete.
fn unchunked(mut body: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    loop {
        let end = body.windows(2).position(|two| two == b"\r\n").expect("a chunk");
        let len = usize::from_str_radix(std::str::from_utf8(&body[..end]).unwrap(), 16).unwrap();
        out.extend_from_slice(&body[end + 2..end + 2 + len]);
        if len == 0 {
            return out;
        }
        body = &body[end + 2 + len + 2..];
    }
}

fn get(http: SocketAddr, path: &str) -> Answer {
    send(http, "GET", path, "", "")
}

const JSON: &str = "Content-Type: application/json\r\n";
const SECRET: &str = "Authorization: Bearer sesame-7\r\n";

fn with_secret() -> MasterHandle {
    let store = MasterConfig { admin_secret: Secret::new(b"sesame-7"), epoch: 7, ..MasterConfig::default() };
    start_with(Config { store, ..config() })
}

/// A connection with the rights of an admin and of a tenant.
fn admin(rpc: SocketAddr, tenant: &str) -> TcpStream {
    let mut stream = connect(rpc);
    let mut hello = |greeting: &Greeting<'_>| {
        let mut out = Vec::new();
        Hello::encode_request(&mut out, 1, greeting, std::iter::empty()).unwrap();
        stream.write_all(&out).unwrap();
        let answer = read_answer(&mut stream).unwrap();
        Hello::decode_response(&answer.frame()).unwrap().0.challenge
    };
    let challenge = hello(&Greeting { tenant: "", ..Greeting::default() });
    let proof = prove(b"sesame-7", Role::Admin, &challenge, tenant);
    hello(&Greeting { tenant, admin_proof: Key(&proof), ..Greeting::default() });
    stream
}

/// Puts objects of 64 bytes.
fn put(stream: &mut TcpStream, keys: &[Vec<u8>]) {
    for part in keys.chunks(256) {
        let mut out = Vec::new();
        let new = part.iter().map(|key| NewObject { key: Key(key), len: 64 });
        let request = PutRequest { writer: 1, ..PutRequest::once(PutOptions::DEFAULT) };
        PutStart::encode_request(&mut out, 3, &request, new).unwrap();
        stream.write_all(&out).unwrap();
        let answer = read_answer(stream).unwrap();
        let frame = answer.frame();
        let places = PutStart::decode_response(&frame).unwrap().1;
        let commits: Vec<_> = part
            .iter()
            .zip(places)
            .map(|(key, place)| {
                let place = place.unwrap();
                Commit { key: Key(key), generation: place.generation, handle: place.handle, checksum: 1 }
            })
            .collect();
        let mut out = Vec::new();
        PutEnd::encode_request(&mut out, 4, &(), commits.into_iter()).unwrap();
        stream.write_all(&out).unwrap();
        assert_eq!(read_answer(stream).unwrap().header.status, 0);
    }
}

fn stats(rpc: SocketAddr) -> Stats {
    let mut stream = connect(rpc);
    let mut out = Vec::new();
    ReadStats::encode_request(&mut out, 1, &(), std::iter::empty()).unwrap();
    stream.write_all(&out).unwrap();
    ReadStats::decode_response(&read_answer(&mut stream).unwrap().frame()).unwrap().0
}

#[test]
fn segments_are_reported_as_mooncake_does() {
    let master = start();
    let http = master.http_addr().unwrap();
    let none = get(http, "/get_all_segments");
    assert_eq!((none.status, none.text()), (200, ""), "SGLang waits for a line");
    fill(master.rpc_addr());
    let mut stream = connect(master.rpc_addr());
    mount_on(&mut stream, 2, "127.0.0.1:12345");
    let names = get(http, "/get_all_segments");
    assert_eq!(names.text(), "<img src=x onerror=alert(1)>\n127.0.0.1:12345\n");
    assert!(names.kind.starts_with("text/plain"), "it is never a page: {}", names.kind);

    let details = get(http, "/get_segments_detail").json();
    assert_eq!(details["total_segments"], 2);
    let one = &details["segments"][0];
    assert_eq!(
        (&one["te_endpoint"], &one["status"], &one["allocator_used_bytes"], &one["size_bytes"]),
        (&json!("n:1"), &json!("OK"), &json!(40_960), &json!(1 << 20))
    );
    assert_eq!((&one["client_id"], &one["size_human"]), (&json!("2748-1"), &json!("0.0009765625 GiB")));
    assert!((one["allocator_usage_percent"].as_f64().unwrap() - 3.90625).abs() < 1e-9);

    let query = get(http, "/query_segment?segment=127.0.0.1%3A12345");
    assert_eq!(query.text(), "127.0.0.1:12345\nUsed(bytes): 0\nCapacity(bytes) : 1048576\n");
    assert_eq!(get(http, "/query_segment?segment=n:1").status, 200, "by its endpoint");
    let status = get(http, "/api/v1/segments/status?segment=127.0.0.1:12345").json();
    assert_eq!(
        status,
        json!({"success": true, "segment": "127.0.0.1:12345", "status": 1, "status_name": "OK",
               "error_code": 0, "error_message": ""})
    );
    for path in ["/query_segment", "/api/v1/segments/status"] {
        let missing = get(http, path);
        assert_eq!((missing.status, &missing.json()["error_code"]), (400, &json!(-600)), "{path}");
        let unknown = get(http, &format!("{path}?segment=nope"));
        let body = unknown.json();
        assert_eq!(
            (unknown.status, &body["error_code"], &body["success"]),
            (404, &json!(-101), &json!(false))
        );
        assert_eq!(get(http, &format!("{path}?segment=%ff")).status, 400);
    }
}

#[test]
fn role_leader_and_events_say_what_there_is() {
    let master = start();
    fill(master.rpc_addr());
    let http = master.http_addr().unwrap();
    assert_eq!((get(http, "/role").text(), get(http, "/ha_status").text()), ("leader", "serving"));
    assert_eq!(get(http, "/leader").json(), json!({"present": false}));
    assert_eq!(get(http, "/kv_events/status").json()["enabled"], false);
    let summary = get(http, "/metrics/summary");
    assert!(
        summary.text().contains("Mem Storage: 40960 B / 1048576 B (3.9%) | Keys: 10"),
        "{}",
        summary.text()
    );
}

#[test]
fn objects_are_found_by_key_without_a_lease_or_a_use() {
    let master = start();
    let http = master.http_addr().unwrap();
    let mut stream = connect(master.rpc_addr());
    mount_on(&mut stream, 2, "n2");
    put(&mut stream, &[b"a b+c".to_vec(), vec![0xff, b',', 0], b"plain".to_vec()]);
    let found = get(http, "/query_key?key=a%20b+c").json();
    assert_eq!(found["success"], true);
    assert_eq!(
        found["data"],
        json!([{"size_": 64, "buffer_address_": 0, "protocol_": "tcp", "transport_endpoint_": "n:1"}])
    );
    assert_eq!(get(http, "/query_key?key=%ff%2c%00").status, 200, "keys are bytes");
    let missing = get(http, "/query_key?key=nope");
    assert_eq!((missing.status, &missing.json()["error_code"]), (404, &json!(-704)));
    assert_eq!(get(http, "/query_key").status, 400);
    // One that is being written is not readable.
    let mut out = Vec::new();
    let request = PutRequest { writer: 1, ..PutRequest::once(PutOptions::DEFAULT) };
    let new = NewObject { key: Key(b"unfinished"), len: 64 };
    PutStart::encode_request(&mut out, 3, &request, [new].into_iter()).unwrap();
    stream.write_all(&out).unwrap();
    read_answer(&mut stream).unwrap();
    assert_eq!(get(http, "/query_key?key=unfinished").json()["error_code"], -703);

    let many = get(http, "/batch_query_keys?keys=plain,nope,unfinished").json();
    assert_eq!(
        (&many["success"], &many["data"]["plain"]["ok"], &many["data"]["plain"]["values"][0]["size_"]),
        (&json!(true), &json!(true), &json!(64))
    );
    assert_eq!(many["data"]["nope"], json!({"ok": false, "error": "OBJECT_NOT_FOUND"}));
    let list: Vec<String> = (0..4097).map(|n| n.to_string()).collect();
    assert_eq!(get(http, &format!("/batch_query_keys?keys={}", list[..4096].join(","))).status, 200);
    assert_eq!(get(http, &format!("/batch_query_keys?keys={}", list.join(","))).status, 400);
    assert_eq!(get(http, "/batch_query_keys?keys=").status, 400);
    let after = stats(master.rpc_addr());
    assert_eq!((after.gets_total, after.exists_total, after.objects_leased), (0, 0, 0));
}

#[test]
fn all_keys_are_listed_however_many_pages_they_fill() {
    let master = start();
    let http = master.http_addr().unwrap();
    assert_eq!((get(http, "/get_all_keys").status, get(http, "/get_all_keys").text()), (200, ""));
    let mut stream = connect(master.rpc_addr());
    mount_on(&mut stream, 2, "n2");
    let keys: Vec<Vec<u8>> = (0..3000_u32).map(|n| format!("key-{n:05}").into_bytes()).collect();
    put(&mut stream, &keys);
    let answer = get(http, "/get_all_keys");
    let mut listed: Vec<&str> = answer.text().lines().collect();
    listed.sort_unstable();
    assert!(listed.iter().map(|key| key.as_bytes()).eq(keys.iter().map(Vec::as_slice)), "{}", listed.len());
    // A client that goes away in the middle costs nothing.
    let mut gone = connect(http);
    write!(gone, "GET /get_all_keys HTTP/1.1\r\nHost: {http}\r\n\r\n").unwrap();
    let mut some = [0; 64];
    gone.read_exact(&mut some).unwrap();
    drop(gone);
    common::assert_serves(master.rpc_addr());
}

#[test]
fn everything_is_removed_on_request_and_leased_objects_only_by_force() {
    let master = start();
    let http = master.http_addr().unwrap();
    let mut stream = connect(master.rpc_addr());
    mount_on(&mut stream, 2, "n2");
    let keys: Vec<Vec<u8>> = (0..1000_u32).map(|n| n.to_le_bytes().to_vec()).collect();
    put(&mut stream, &keys);
    let mut out = Vec::new();
    Get::encode_request(&mut out, 5, &LeaseWanted::Quick, [Key(&keys[7])].into_iter()).unwrap();
    stream.write_all(&out).unwrap();
    assert_eq!(read_answer(&mut stream).unwrap().header.status, 0);
    let remove = |query: &str| send(http, "POST", &format!("/api/v1/remove_all{query}"), "", "").json();
    assert_eq!(remove(""), json!({"success": true, "removed_count": 999}));
    assert_eq!(remove("?force=false&tenant_id=default")["removed_count"], 0);
    assert_eq!(remove("?force=1")["removed_count"], 1);
    let mut out = Vec::new();
    Exists::encode_request(&mut out, 6, &(), keys.iter().map(|key| Key(key))).unwrap();
    stream.write_all(&out).unwrap();
    let answer = read_answer(&mut stream).unwrap();
    assert!(Exists::decode_response(&answer.frame()).unwrap().1.all(|exists| !exists));
    assert_eq!(remove("?tenant_id=other")["error_code"], -1701);
    assert_eq!(get(http, "/api/v1/remove_all").status, 405);
}

#[test]
fn what_changes_something_needs_the_secret_or_comes_from_this_host_and_from_no_page() {
    let drain = r#"{"segments": ["n2"]}"#;
    let quota = r#"{"requested_quota_bytes": 1000}"#;
    let changes = [
        ("POST", "/api/v1/remove_all", ""),
        ("POST", "/api/v1/drain_jobs", drain),
        ("POST", "/api/v1/drain_jobs/cancel?job_id=1-1", ""),
        ("PUT", "/api/v1/tenant_quotas?tenant_id=default", quota),
        ("DELETE", "/api/v1/tenant_quotas?tenant_id=default", ""),
    ];
    let master = start();
    let http = master.http_addr().unwrap();
    fill(master.rpc_addr());
    for (method, path, body) in changes {
        let page = send(http, method, path, &format!("{JSON}Origin: http://evil.example\r\n"), body);
        assert_eq!((page.status, &page.json()["error_code"]), (403, &json!(-1790)), "{path}");
        let rebound = send(http, method, path, &format!("{JSON}Host: evil.example\r\n"), body);
        assert_eq!(rebound.status, 403, "{path}");
    }
    assert_eq!(stats(master.rpc_addr()).objects, 10);

    let master = with_secret();
    let http = master.http_addr().unwrap();
    let mut stream = admin(master.rpc_addr(), "default");
    fill_on(&mut stream, 2, "n2");
    for (method, path, body) in changes {
        for wrong in ["", "Authorization: Bearer sesame-8\r\n"] {
            let answer = send(http, method, path, &format!("{JSON}{wrong}"), body);
            assert_eq!((answer.status, &answer.json()["error_code"]), (401, &json!(-1790)), "{path}");
        }
    }
    // Keys are for admins, too. Segments and the summary are for everyone, under every name.
    for path in ["/get_all_keys", "/query_key?key=k%01", "/batch_query_keys?keys=a"] {
        assert_eq!(get(http, path).status, 401, "{path}");
        assert_eq!(send(http, "GET", path, SECRET, "").status, 200, "{path}");
    }
    for path in
        ["/get_all_segments", "/metrics/summary", "/role", "/ha_status", "/leader", "/kv_events/status"]
    {
        assert_eq!(send(http, "GET", path, "Host: db1.example.org\r\n", "").status, 200, "{path}");
    }
    for path in ["/get_segments_detail", "/query_segment?segment=n2", "/api/v1/tenant_quotas"] {
        assert_eq!(send(http, "GET", path, "Host: db1.example.org\r\n", "").status, 403, "{path}");
    }
    let removed = send(http, "POST", "/api/v1/remove_all", SECRET, "").json();
    assert_eq!(removed["removed_count"], 10);
}

#[test]
fn a_drain_job_follows_its_segments_to_the_end() {
    let master = start();
    let http = master.http_addr().unwrap();
    let mut stream = connect(master.rpc_addr());
    mount_on(&mut stream, 1, "empty");
    mount_on(&mut stream, 2, "other");
    let post = |path: &str, body: &str| send(http, "POST", path, JSON, body);
    let start = |body: &str| post("/api/v1/drain_jobs", body);
    for (wrong, status, code) in [
        ("", 400, -600),
        ("[]", 400, -600),
        (r#"{"segments": []}"#, 400, -600),
        (r#"{"segments": ["empty"], "max_concurrency": 0}"#, 400, -600),
        (r#"{"segments": ["empty"], "surprise": 1}"#, 400, -600),
        (r#"{"segments": ["nope"]}"#, 404, -101),
        (r#"{"segments": ["empty"], "target_segments": ["nope"]}"#, 404, -101),
    ] {
        let answer = start(wrong);
        assert_eq!((answer.status, &answer.json()["error_code"]), (status, &json!(code)), "{wrong}");
    }
    let state = |name: &str| {
        get(http, &format!("/api/v1/segments/status?segment={name}")).json()["status_name"].clone()
    };
    assert_eq!(state("empty"), "OK");
    // As many targets as there are: with a third segment, this list would leave one out.
    let job = start(r#"{"segments": ["empty"], "target_segments": ["other"], "max_concurrency": 1}"#).json();
    assert_eq!(
        (&job["success"], &job["status"], &job["error_code"]),
        (&json!(true), &json!("CREATED"), &json!(0))
    );
    let id = job["job_id"].as_str().unwrap();
    let query = |id: &str| get(http, &format!("/api/v1/drain_jobs/query?job_id={id}"));
    te_fabric::testkit::eventually("the empty segment is drained", || {
        query(id).json()["status_name"] == "SUCCEEDED"
    });
    let report = query(id).json();
    assert_eq!(
        (&report["type_name"], &report["status"], &report["active_units"], &report["segments"]),
        (&json!("DRAIN"), &json!(3), &json!(0), &json!(["empty"]))
    );
    assert_eq!((state("empty"), state("other")), (json!("DRAINED"), json!("OK")));
    let over = post(&format!("/api/v1/drain_jobs/cancel?job_id={id}"), "");
    assert_eq!((over.status, &over.json()["error_code"]), (409, &json!(-1010)));
    for bad in ["", "?job_id=", "?job_id=7", "?job_id=a-b", "?job_id=-1"] {
        assert_eq!(get(http, &format!("/api/v1/drain_jobs/query{bad}")).status, 400, "{bad}");
    }
    let unknown = query("1-1");
    assert_eq!((unknown.status, &unknown.json()["error_code"]), (404, &json!(-1402)));
}

#[test]
fn a_drain_job_is_cancelled_and_targets_are_not_narrowed_in_silence() {
    let master = start();
    let http = master.http_addr().unwrap();
    let mut stream = connect(master.rpc_addr());
    // Nothing can move: the objects of the first one do not fit anywhere.
    fill_on(&mut stream, 1, "full");
    let post = |path: &str, body: &str| send(http, "POST", path, JSON, body);
    let job = post("/api/v1/drain_jobs", r#"{"segments": ["full", "full"]}"#).json();
    let id = job["job_id"].as_str().unwrap();
    let report = get(http, &format!("/api/v1/drain_jobs/query?job_id={id}")).json();
    assert_eq!((&report["status_name"], &report["segments"]), (&json!("RUNNING"), &json!(["full"])));
    let status = || get(http, "/api/v1/segments/status?segment=full").json()["status_name"].clone();
    assert_eq!(status(), "DRAINING");
    let cancelled = post(&format!("/api/v1/drain_jobs/cancel?job_id={id}"), "").json();
    assert_eq!((&cancelled["status"], &cancelled["job_id"]), (&json!("CANCELED"), &json!(id)));
    assert_eq!(status(), "OK");
    let report = get(http, &format!("/api/v1/drain_jobs/query?job_id={id}")).json();
    assert_eq!((&report["status"], &report["status_name"]), (&json!(5), &json!("CANCELED")));

    mount_on(&mut stream, 2, "b");
    mount_on(&mut stream, 3, "c");
    let narrow = post("/api/v1/drain_jobs", r#"{"segments": ["full"], "target_segments": ["b"]}"#);
    assert_eq!(narrow.status, 409);
    assert!(narrow.text().contains("leaves out \\\"c\\\""), "{}", narrow.text());
    assert_eq!(status(), "OK", "nothing was ordered");
}

#[test]
fn quotas_are_read_set_and_removed() {
    let tenant = |name: &str| TenantConfig {
        name: name.into(),
        quota_objects: Some(9),
        guaranteed_bytes: 64,
        ..TenantConfig::default()
    };
    let store = MasterConfig {
        multi_tenants: true,
        admin_secret: Secret::new(b"sesame-7"),
        tenants: vec![tenant("a")],
        epoch: 7,
        ..MasterConfig::default()
    };
    let master = start_with(Config { store, ..config() });
    let http = master.http_addr().unwrap();
    let mut stream = admin(master.rpc_addr(), "a");
    fill_on(&mut stream, 2, "n2");
    let path = "/api/v1/tenant_quotas?tenant_id=";
    let quota = |name: &str| get(http, &format!("{path}{name}")).json()["data"].clone();
    let a = quota("a");
    assert_eq!(
        (&a["charged_bytes"], &a["requested_quota_bytes"], &a["effective_quota_bytes"]),
        (&json!(9 * 4096), &json!(0), &json!(1 << 20)),
        "the tenth object displaced another one: {a}"
    );
    let change = |method: &str, name: &str, body: &str| {
        send(http, method, &format!("{path}{name}"), &format!("{JSON}{SECRET}"), body)
    };
    for bad in
        ["", "{}", r#"{"requested_quota_bytes": 0}"#, r#"{"requested_quota_bytes": 9223372036854775808}"#]
    {
        assert_eq!(change("PUT", "a", bad).status, 400, "{bad}");
    }
    let set = change("PUT", "a", r#"{"requested_quota_bytes": 36864}"#).json();
    assert_eq!(set["success"], true);
    assert_eq!(
        (&set["data"]["effective_quota_bytes"], &set["data"]["admission_closed"], &set["data"]["over_quota"]),
        (&json!(36_864), &json!(true), &json!(false))
    );
    let usage = get(http, "/api/v1/tenants").json();
    assert_eq!(
        (&usage[0]["quota_objects"], &usage[0]["guaranteed_bytes"]),
        (&json!(9), &json!(64)),
        "they stay"
    );
    // A tenant that the master does not know is added.
    change("PUT", "b", r#"{"requested_quota_bytes": 1000}"#);
    assert_eq!(quota("b")["has_explicit_policy"], true);
    assert_eq!(get(http, "/api/v1/tenant_quotas").json()["data"].as_array().unwrap().len(), 2);
    let busy = change("DELETE", "a", "");
    assert_eq!((busy.status, &busy.json()["error_code"]), (409, &json!(-1702)));
    assert_eq!(change("DELETE", "b", "").json()["data"]["tenant_id"], "b");
    assert_eq!(change("DELETE", "b", "").status, 404);
    assert_eq!(get(http, &format!("{path}b")).status, 404);
    assert_eq!(change("DELETE", "", "").status, 400);
    // Keys of a tenant, for an admin.
    let of = |tenant: &str| send(http, "GET", &format!("/query_key?key=k%01&tenant_id={tenant}"), SECRET, "");
    assert_eq!((of("a").status, of("b").status), (200, 404));
    let removed = send(http, "POST", "/api/v1/remove_all?tenant_id=a", SECRET, "").json();
    assert_eq!(removed["removed_count"], 9);
}

#[test]
fn the_default_tenant_of_a_master_without_tenants_only_loses_its_quota() {
    let master = start();
    let http = master.http_addr().unwrap();
    let path = "/api/v1/tenant_quotas?tenant_id=default";
    let set = send(http, "PUT", path, JSON, r#"{"requested_quota_bytes": 4096}"#).json();
    assert_eq!(set["data"]["requested_quota_bytes"], 4096);
    assert_eq!(send(http, "DELETE", path, "", "").json()["data"]["requested_quota_bytes"], 4096);
    assert_eq!(get(http, path).json()["data"]["has_explicit_policy"], false);
}

#[test]
fn the_metadata_server_answers_as_mooncakes_does() {
    let mut settings = config();
    settings.mooncake_metadata_listen = Some("127.0.0.1:0".parse().unwrap());
    let server = MasterServer::bind(settings).unwrap();
    let http = server.mooncake_metadata_addr().unwrap();
    let _master = server.spawn().unwrap();
    let path = |key: &str| format!("/metadata?key={key}");
    let ask = |method: &str, key: &str, body: &str| {
        let answer = send(http, method, &path(key), "", body);
        (answer.status, answer.text().to_owned())
    };
    let ram = "mooncake%2Fram%2F10.0.0.7%3A15000";
    assert_eq!(ask("GET", ram, ""), (404, "metadata not found".into()));
    assert_eq!(ask("PUT", ram, "{}"), (200, "metadata updated".into()));
    assert_eq!(ask("PUT", ram, r#"{"name": "b"}"#).0, 200, "a descriptor is replaced");
    let read = send(http, "GET", &path("mooncake/ram/10.0.0.7:15000"), "", "");
    assert_eq!((read.status, read.text(), &*read.kind), (200, r#"{"name": "b"}"#, "application/json"));
    let rpc = "mooncake%2Frpc_meta%2F10.0.0.7%3A15000";
    assert_eq!(ask("PUT", rpc, "1").0, 200);
    assert_eq!(ask("PUT", rpc, "1"), (200, "metadata unchanged".into()));
    assert_eq!(ask("PUT", rpc, "2"), (400, "Duplicate rpc_meta key not allowed".into()));
    assert_eq!(ask("GET", rpc, ""), (200, "1".into()));
    assert_eq!(ask("DELETE", rpc, ""), (200, "metadata deleted".into()));
    assert_eq!(ask("DELETE", rpc, ""), (404, "metadata not found".into()));
    assert_eq!(ask("PUT", rpc, "2").0, 200);
    for method in ["GET", "PUT", "DELETE"] {
        for key in ["", "%20%20"] {
            assert_eq!(ask(method, key, ""), (400, "Missing key parameter".into()), "{method}");
        }
        assert_eq!(send(http, method, "/metadata", "", "").status, 400);
        assert_eq!(ask(method, &"k".repeat(513), "").0, 413);
    }
    assert_eq!(send(http, "POST", &path("a"), "", "").status, 405);
    assert_eq!(ask("PUT", "long", &"x".repeat((1 << 20) + 1)).0, 413);
    assert_eq!(send(http, "GET", "/health", "", "").text(), "OK");
    let page = send(http, "PUT", &path("a"), "Origin: http://evil.example\r\n", "x");
    assert_eq!(page.status, 403);
    // It has nothing of the master's own interface.
    assert_eq!(send(http, "GET", "/api/v1/status", "", "").status, 404);
}
