//! The administrative HTTP interface: what it reports, what it changes, and which requests it refuses.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::{Read, Write};
use std::net::SocketAddr;

use common::{config, connect, fill, start, start_with};
use serde_json::{Value, json};
use store_core::message::{
    CreateTasks, Greeting, Hello, NewTask, Operation, OrderSegments, SegmentOrder, SegmentState,
};
use store_core::{Key, MasterConfig, Role, Secret, SegmentNo, prove};
use store_master::Config;

/// Status and body.
fn request(http: SocketAddr, head: &str, body: &str) -> (u16, String) {
    let mut stream = connect(http);
    let length = body.len();
    write!(stream, "{head}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    (status, answer.split_once("\r\n\r\n").unwrap().1.to_owned())
}

fn get(http: SocketAddr, path: &str) -> (u16, String) {
    request(http, &format!("GET {path} HTTP/1.1\r\nHost: {http}"), "")
}

fn post(http: SocketAddr, more: &str, body: &str) -> (u16, String) {
    let head = format!("POST /api/v1/evict HTTP/1.1\r\nHost: {http}\r\nContent-Type: application/json{more}");
    request(http, &head, body)
}

fn value(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn it_reports_status_segments_nodes_and_settings() {
    let master = start();
    fill(master.rpc_addr());
    let http = master.http_addr().unwrap();
    let status = value(&get(http, "/api/v1/status").1);
    assert_eq!((&status["stats"]["objects"], &status["epoch"]), (&json!(10), &json!(7)));
    let segments = value(&get(http, "/api/v1/segments").1);
    assert_eq!(segments[0]["node"], "0000000000000abc");
    assert_eq!(segments[0]["used_bytes"], 40_960);
    let nodes = value(&get(http, "/api/v1/nodes").1);
    assert_eq!((&nodes[0]["segments"], &nodes[0]["capacity_bytes"]), (&json!(1), &json!(1 << 20)));
    let settings = value(&get(http, "/api/v1/config").1);
    assert_eq!(settings["lease_ttl_ms"], MasterConfig::default().lease_ttl_ms);
    assert_eq!(settings["hash_seed"], 0, "the seed is secret");
    let document = value(&get(http, "/api/openapi.json").1);
    assert_eq!(document["openapi"], "3.1.0");
}

#[test]
fn eviction_on_demand_leaves_as_much_as_requested() {
    let master = start();
    fill(master.rpc_addr());
    let http = master.http_addr().unwrap();
    let (status, body) = post(http, "", r#"{"objects_max": 3}"#);
    assert_eq!((status, value(&body)), (200, json!({"objects": 7, "bytes": 7 * 4096, "more": false})));
    assert_eq!(value(&get(http, "/api/v1/status").1)["stats"]["objects"], 3);
}

#[test]
fn an_invalid_request_is_refused_with_a_remedy_and_changes_nothing() {
    let master = start();
    fill(master.rpc_addr());
    let http = master.http_addr().unwrap();
    let long = format!(r#"{{"objects_max": {}1}}"#, " ".repeat(70 << 10));
    for (body, expect) in [
        ("", 400),
        ("{}", 400),
        ("[1]", 400),
        (r#"{"objects_max": -1}"#, 400),
        (r#"{"objects_max": 1, "object_max": 1}"#, 400),
        (r#"{"objects_max": 1"#, 400),
        (&long, 413),
    ] {
        let (status, answer) = post(http, "", body);
        assert_eq!(status, expect, "{answer}");
    }
    // A form on another site's page can send this.
    let head = format!("POST /api/v1/evict HTTP/1.1\r\nHost: {http}\r\nContent-Type: text/plain");
    assert_eq!(request(http, &head, r#"{"objects_max": 0}"#).0, 400);
    // A page under a name that resolves to this host can send this.
    let head = "POST /api/v1/evict HTTP/1.1\r\nHost: evil.example\r\nContent-Type: application/json";
    assert_eq!(request(http, head, r#"{"objects_max": 0}"#).0, 403);
    assert_eq!(value(&get(http, "/api/v1/status").1)["stats"]["objects"], 10);
}

#[test]
fn with_a_secret_only_requests_with_it_change_anything_and_it_is_never_reported() {
    let store = MasterConfig { admin_secret: Secret::new(b"sesame-7"), epoch: 7, ..MasterConfig::default() };
    let master = start_with(Config { store, ..config() });
    let http = master.http_addr().unwrap();
    let leave = r#"{"objects_max": 3}"#;
    assert_eq!(post(http, "", leave).0, 401);
    assert_eq!(post(http, "\r\nAuthorization: Bearer sesame-8", leave).0, 401);
    assert_eq!(post(http, "\r\nAuthorization: Basic sesame-7", leave).0, 401);
    assert_eq!(post(http, "\r\nAuthorization: Bearer sesame-7", leave).0, 200);
    assert!(!get(http, "/api/v1/config").1.contains("sesame"));
}

#[test]
fn the_page_is_one_file_that_loads_nothing_from_other_hosts() {
    let master = start();
    let (status, page) = get(master.http_addr().unwrap(), "/");
    assert_eq!(status, 200);
    for elsewhere in ["http://", "https://", "//cdn", "import(", "innerHTML"] {
        let page = page.replace("http://www.w3.org/2000/svg", "");
        assert!(!page.contains(elsewhere), "{elsewhere}");
    }
}

#[test]
fn segments_have_their_state_and_drains_tasks_and_tenants_are_listed() {
    let master = start();
    fill(master.rpc_addr());
    let http = master.http_addr().unwrap();
    let segments = value(&get(http, "/api/v1/segments").1);
    assert_eq!(segments[0]["state"], "active");
    assert_eq!(value(&get(http, "/api/v1/drains").1), json!([]));
    // There is no other segment: the drain leaves all ten objects.
    let segment = u32::try_from(segments[0]["segment"].as_u64().unwrap()).unwrap();
    let mut stream = connect(master.rpc_addr());
    let mut out = Vec::new();
    let order = SegmentOrder { segment: SegmentNo::new(segment), state: SegmentState::Draining };
    OrderSegments::encode_request(&mut out, 1, &(), [order].into_iter()).unwrap();
    stream.write_all(&out).unwrap();
    assert_eq!(common::read_answer(&mut stream).unwrap().header.status, 0);
    assert_eq!(value(&get(http, "/api/v1/segments").1)[0]["state"], "draining");
    let drains = value(&get(http, "/api/v1/drains").1);
    assert_eq!(
        (&drains[0]["state"], &drains[0]["node"], &drains[0]["blocks"]),
        (&json!("draining"), &json!("0000000000000abc"), &json!(10))
    );

    let tasks = value(&get(http, "/api/v1/tasks?state=pending&limit=10").1);
    assert_eq!(tasks, json!({ "tasks": [] }));
    for wrong in ["state=lost", "limit=0", "limit=5000", "cursor=x", "more=1"] {
        assert_eq!(get(http, &format!("/api/v1/tasks?{wrong}")).0, 400, "{wrong}");
    }
    let tenants = value(&get(http, "/api/v1/tenants").1);
    assert_eq!((&tenants[0]["name"], &tenants[0]["objects"]), (&json!("default"), &json!(10)));
}

#[test]
fn tasks_have_strings_for_numbers_and_keys_for_admins_alone() {
    let store = MasterConfig { admin_secret: Secret::new(b"sesame-7"), epoch: 7, ..MasterConfig::default() };
    for secret in [false, true] {
        let master = if secret { start_with(Config { store: store.clone(), ..config() }) } else { start() };
        let http = master.http_addr().unwrap();
        let mut stream = connect(master.rpc_addr());
        let mut call = |out: Vec<u8>| {
            stream.write_all(&out).unwrap();
            let answer = common::read_answer(&mut stream).unwrap();
            assert_eq!(answer.header.status, 0);
            answer
        };
        let mut out = Vec::new();
        if secret {
            Hello::encode_request(&mut out, 1, &Greeting::default(), std::iter::empty()).unwrap();
            let answer = call(std::mem::take(&mut out));
            let challenge = Hello::decode_response(&answer.frame()).unwrap().0.challenge;
            let proof = prove(b"sesame-7", Role::Admin, &challenge, "default");
            let greeting = Greeting { admin_proof: Key(&proof), ..Greeting::default() };
            Hello::encode_request(&mut out, 1, &greeting, std::iter::empty()).unwrap();
            call(std::mem::take(&mut out));
        }
        common::fill_on(&mut stream, 1, "n1");
        common::mount_on(&mut stream, 2, "n2");
        let mut call = |out: Vec<u8>| {
            stream.write_all(&out).unwrap();
            let answer = common::read_answer(&mut stream).unwrap();
            assert_eq!(answer.header.status, 0);
        };
        let copy = NewTask { key: Key(&[b'k', 1]), source: None, target: None };
        CreateTasks::encode_request(&mut out, 2, &(), [copy].into_iter()).unwrap();
        call(std::mem::take(&mut out));
        let tasks = value(&get(http, "/api/v1/tasks").1);
        let task = &tasks["tasks"][0];
        assert!(task["id"].as_str().unwrap().parse::<u64>().is_ok(), "{tasks}");
        assert_eq!(
            (&task["state"], &task["cause"], &task["bytes"]),
            (&json!("pending"), &json!("requested"), &json!(4096))
        );
        let expected = if secret { Value::Null } else { json!("k\u{1}") };
        assert_eq!(task["key"], expected);
        if secret {
            let head =
                format!("GET /api/v1/tasks HTTP/1.1\r\nHost: {http}\r\nAuthorization: Bearer sesame-7");
            assert_eq!(value(&request(http, &head, "").1)["tasks"][0]["key"], "k\u{1}");
        }
    }
}

#[test]
fn administrative_answers_are_given_under_the_masters_own_names_alone() {
    let hosts = vec!["kv.example.com".to_owned()];
    let master = start_with(Config { http_hosts: hosts, ..config() });
    let http = master.http_addr().unwrap();
    let under = |path: &str, host: &str| request(http, &format!("GET {path} HTTP/1.1\r\nHost: {host}"), "").0;
    for path in
        ["/", "/api/v1/status", "/api/v1/segments", "/api/v1/nodes", "/api/v1/config", "/api/v1/tenants"]
    {
        for host in ["localhost:9003", "10.1.2.3", "master:9003", "kv.example.com:9003"] {
            assert_eq!(under(path, host), 200, "{path} under {host}");
        }
        assert_eq!(under(path, "evil.example:9003"), 403, "{path}");
    }
    // A scraper may use any host name.
    for path in ["/health", "/metrics"] {
        assert_eq!(under(path, "db1.example.org:9003"), 200);
    }
}
