//! The admin's HTTP: what it tells, what it does, and whom it refuses.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::{Read, Write};
use std::net::SocketAddr;

use common::{config, connect, fill, start, start_with};
use serde_json::{Value, json};
use store_core::{MasterConfig, Secret};
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
fn it_tells_of_status_segments_nodes_and_settings() {
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
    assert_eq!(settings["hash_seed"], 0, "nobody is told it");
    let document = value(&get(http, "/api/openapi.json").1);
    assert_eq!(document["openapi"], "3.1.0");
}

#[test]
fn eviction_on_demand_leaves_what_it_was_told_to_leave() {
    let master = start();
    fill(master.rpc_addr());
    let http = master.http_addr().unwrap();
    let (status, body) = post(http, "", r#"{"objects_max": 3}"#);
    assert_eq!((status, value(&body)), (200, json!({"objects": 7, "bytes": 7 * 4096, "more": false})));
    assert_eq!(value(&get(http, "/api/v1/status").1)["stats"]["objects"], 3);
}

#[test]
fn what_is_no_request_is_refused_with_what_to_do_and_changes_nothing() {
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
    // What a form of somebody else's page can send.
    let head = format!("POST /api/v1/evict HTTP/1.1\r\nHost: {http}\r\nContent-Type: text/plain");
    assert_eq!(request(http, &head, r#"{"objects_max": 0}"#).0, 400);
    // What a page under a name that points here can send.
    let head = "POST /api/v1/evict HTTP/1.1\r\nHost: evil.example\r\nContent-Type: application/json";
    assert_eq!(request(http, head, r#"{"objects_max": 0}"#).0, 403);
    assert_eq!(value(&get(http, "/api/v1/status").1)["stats"]["objects"], 10);
}

#[test]
fn with_a_secret_only_who_says_it_changes_anything_and_nobody_is_told_it() {
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
fn the_page_is_one_file_that_fetches_nothing_from_elsewhere() {
    let master = start();
    let (status, page) = get(master.http_addr().unwrap(), "/");
    assert_eq!(status, 200);
    for elsewhere in ["http://", "https://", "//cdn", "import(", "innerHTML"] {
        let page = page.replace("http://www.w3.org/2000/svg", "");
        assert!(!page.contains(elsewhere), "{elsewhere}");
    }
}
