//! The HTTP interface: decisions and their life, rights, and requests that no client should send.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{
    BLOCK_TOKENS, config, engine, eventually, get, matched, metric, post, publisher, raw, send, start,
    stored, tokens,
};
use std::collections::BTreeSet;

use serde_json::json;

#[test]
fn a_request_is_placed_where_its_prefix_is_and_its_reservation_ends() {
    let (one, two) = (publisher(), publisher());
    let mut entries = vec![engine("one", &one), engine("two", &two)];
    entries[1].http = "127.0.0.1:1".into();
    let conductor = start(conductor::Config { engines: entries, ..config() });
    let addr = conductor.addr();
    two.publish(&stored(1, 0, 100)).unwrap();
    one.publish(&stored(5_000, 0, 1)).unwrap();
    eventually("both are heard", || {
        matched(addr, "two", 1, 100) == 400 && matched(addr, "one", 5_000, 1) == 4
    });
    let ask = json!({"model": "m", "token_ids": tokens(1, 120), "max_tokens": 32});
    let (status, placed) = post(addr, "/schedule", &ask);
    assert_eq!((status, &placed["prefill"]["instance_id"]), (200, &json!("two")), "{placed}");
    assert_eq!((&placed["reused_tokens"], &placed["prefill"]["http"]), (&json!(400), &json!("127.0.0.1:1")));
    // What was decided counts for the next decision, and not for queries.
    let ask = json!({"model": "m", "block_size": BLOCK_TOKENS, "token_ids": tokens(1, 120)});
    let of = |answer: &serde_json::Value| answer["default"]["two"]["longest_matched"].as_u64();
    assert_eq!(of(&post(addr, "/query", &ask).1), Some(400));
    assert_eq!(of(&post(addr, "/query?assumed=true", &ask).1), Some(480));
    assert_eq!(get(addr, "/reservations").1["reservations"], 1);
    let id = placed["reservation"].as_str().unwrap();
    for step in ["prefill_started", "prefill_complete", "first_token"] {
        assert_eq!(send(addr, "POST", &format!("/reservations/{id}/{step}"), "").0, 204, "{step}");
    }
    assert_eq!(send(addr, "POST", &format!("/reservations/{id}/output_block"), "{\"tokens\":32}").0, 204);
    assert_eq!(send(addr, "DELETE", &format!("/reservations/{id}"), "").0, 204);
    assert_eq!(send(addr, "DELETE", &format!("/reservations/{id}"), "").0, 404, "it has ended");
    assert_eq!(get(addr, "/reservations").1["reservations"], 0);
    let (_, status) = get(addr, "/status");
    assert_eq!(status["ttfts_ms"].as_array().unwrap().len(), 1);
    assert_eq!(metric(addr, "snowskin_conductor_decisions_total"), 1.0);
    assert_documented(addr);
}

#[test]
fn an_instance_that_failed_the_request_is_avoided_as_long_as_there_is_another() {
    let (one, two) = (publisher(), publisher());
    let mut entries = vec![engine("one", &one), engine("two", &two)];
    entries[1].http = "127.0.0.1:1".into();
    let conductor = start(conductor::Config { engines: entries, ..config() });
    let addr = conductor.addr();
    two.publish(&stored(1, 0, 100)).unwrap();
    one.publish(&stored(5_000, 0, 1)).unwrap();
    eventually("both are heard", || {
        matched(addr, "two", 1, 100) == 400 && matched(addr, "one", 5_000, 1) == 4
    });
    let place = |avoid: serde_json::Value| {
        let ask = json!({"model": "m", "token_ids": tokens(1, 120), "max_tokens": 8, "avoid": avoid});
        let (status, placed) = post(addr, "/schedule", &ask);
        assert_eq!(status, 200, "{placed}");
        placed["decode"]["instance_id"].as_str().unwrap().to_owned()
    };
    assert_eq!(place(json!([])), "two");
    assert_eq!(place(json!(["two", "unknown", 7])), "one");
    assert_eq!(place(json!(["127.0.0.1:1"])), "one");
    assert_eq!(place(json!(["one"])), "two");
    place(json!(["one", "two"]));
}

/// The metrics that are exported are those of the reference.
fn assert_documented(addr: std::net::SocketAddr) {
    let (_, text) = send(addr, "GET", "/metrics", "");
    let exported = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    let exported: BTreeSet<&str> = exported.collect();
    let page = include_str!("../../docs/reference/metrics.md");
    let row = |line: &'static str| line.strip_prefix("| `")?.split('`').next();
    let listed = page.lines().filter_map(row).filter(|name| name.starts_with("snowskin_conductor_"));
    assert_eq!(exported, listed.collect());
}

#[test]
fn an_objective_that_cannot_be_met_is_refused_with_a_time_to_come_again() {
    let publisher = publisher();
    let conductor = start(conductor::Config { engines: vec![engine("a", &publisher)], ..config() });
    let addr = conductor.addr();
    publisher.publish(&stored(1, 0, 1)).unwrap();
    eventually("it is heard", || matched(addr, "a", 1, 1) == 4);
    let body = json!({"model": "m", "token_ids": tokens(9, 10_000), "ttft_slo_ms": 1}).to_string();
    let request =
        format!("POST /schedule HTTP/1.0\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let (status, answer) = raw(addr, request.as_bytes());
    assert_eq!(status, 429, "{answer}");
}

#[test]
fn bodies_that_no_client_should_send_are_refused_and_change_nothing() {
    let conductor = start(conductor::Config { engines: vec![engine("a", &publisher())], ..config() });
    let addr = conductor.addr();
    let deep = "[".repeat(100_000);
    for body in [
        "",
        "{",
        "[]",
        "null",
        "{}",
        "{\"model\":\"m\"}",
        "{\"model\":7,\"token_ids\":[]}",
        "{\"model\":\"m\",\"token_ids\":[-1]}",
        "{\"model\":\"m\",\"token_ids\":[1",
        "\u{0}",
        "{\"model\":\"m\",\"token_ids\":[1.5]}",
        "{\"model\":\"m\",\"token_ids\":[99999999999]}",
        "{\"model\":\"m\",\"token_ids\":[1],\"block_size\":-1}",
        deep.as_str(),
    ] {
        for path in ["/query", "/query_by_hash", "/schedule", "/register", "/unregister"] {
            let (status, answer) = send(addr, "POST", path, body);
            assert!((400..500).contains(&status), "{path} {body:.40}: {status} {answer}");
        }
    }
    let long_name = json!({"model": "m".repeat(1_000), "token_ids": [1]});
    assert_eq!(post(addr, "/query", &long_name).0, 400);
    assert_eq!(post(addr, "/query", &json!({"model": "other", "token_ids": [1]})).0, 404);
    let other_size = json!({"model": "m", "token_ids": [1], "block_size": 999});
    assert_eq!(post(addr, "/query", &other_size).0, 404);
    for id in ["x", "-1", "99999999999999999999", "0", "18446744073709551615"] {
        assert_eq!(send(addr, "DELETE", &format!("/reservations/{id}"), "").0, 404, "{id}");
    }
    let endpoint = json!({"endpoint": "ipc:///x", "modelname": "m", "instance_id": "b", "block_size": 4});
    assert_eq!(post(addr, "/register", &endpoint).0, 400);
    assert_eq!(get(addr, "/services").1["services"].as_array().unwrap().len(), 1);
    assert!(metric(addr, "snowskin_conductor_bad_requests_total") > 50.0);
}

#[test]
fn a_body_beyond_the_limits_is_refused() {
    let mut config = config();
    config.limits.body_bytes_max = 4_096;
    config.limits.tokens_max = 100;
    config.engines = vec![engine("a", &publisher())];
    let conductor = start(config);
    let addr = conductor.addr();
    let many = json!({"model": "m", "token_ids": vec![1; 101]});
    assert_eq!(post(addr, "/query", &many).0, 400);
    assert_eq!(send(addr, "POST", "/query", &" ".repeat(10_000)).0, 413);
}

#[test]
fn what_changes_something_needs_the_secret_and_no_foreign_name() {
    let mut config = config();
    config.admin_secret = store_core::Secret::new(b"sesame");
    let conductor = start(config);
    let addr = conductor.addr();
    assert_eq!(post(addr, "/register", &json!({})).0, 401);
    assert_eq!(post(addr, "/unregister", &json!({})).0, 401);
    let with = |name: &str, host: &str, secret: &str| {
        let request = format!(
            "POST {name} HTTP/1.0\r\nHost: {host}\r\nAuthorization: Bearer {secret}\r\nContent-Length: 2\r\n\r\n{{}}"
        );
        raw(addr, request.as_bytes()).0
    };
    assert_eq!(with("/register", "localhost", "wrong"), 401);
    assert_eq!(with("/register", "localhost", "sesame"), 400, "the body is empty");
    assert_eq!(with("/query", "evil.example", "wrong"), 421);
    assert_eq!(with("/query", "evil.example", "sesame"), 400);
    let (status, _) = raw(addr, b"GET /health HTTP/1.0\r\nHost: evil.example\r\n\r\n");
    assert_eq!(status, 200, "health is served under every name");
}

#[test]
fn every_route_is_in_the_openapi_document() {
    let conductor = start(config());
    let (status, document) = get(conductor.addr(), "/openapi.json");
    assert_eq!(status, 200);
    let source = include_str!("../src/http/mod.rs");
    let routes = source.split(".route(\"").skip(1).filter_map(|rest| rest.split('"').next());
    for route in routes {
        assert!(!document["paths"][route].is_null(), "{route} is not in openapi.json");
    }
    let (status, page) = send(conductor.addr(), "GET", "/", "");
    assert_eq!(status, 200);
    assert!(page.contains("/status"));
}
