//! `/metadata` over its socket, for valid and invalid requests.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::{Read, Write};
use std::net::SocketAddr;

use common::{assert_serves, connect, start, start_with, with};
use store_master::{Config, MasterHandle, MetadataLimits};

/// Method, query, headers, body; and the status of the answer.
type Case<'a> = (&'a str, &'a str, &'a [&'a str], &'a [u8], u16);

struct Answer {
    status: u16,
    tag: Option<String>,
    body: String,
}

fn http(master: &MasterHandle) -> SocketAddr {
    master.http_addr().unwrap()
}

/// One request on its own connection.
fn ask(addr: SocketAddr, method: &str, query: &str, headers: &[&str], body: &[u8]) -> Answer {
    let mut stream = connect(addr);
    let mut head = format!("{method} /metadata{query} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n");
    if !headers.iter().any(|header| header.starts_with("content-length")) {
        head += &format!("content-length: {}\r\n", body.len());
    }
    headers.iter().for_each(|header| head += &format!("{header}\r\n"));
    stream.write_all(&[head.as_bytes(), b"\r\n", body].concat()).unwrap();
    answer(&mut stream)
}

fn answer(stream: &mut impl Read) -> Answer {
    let mut bytes = Vec::new();
    // A server that refuses a request without reading all of it may reset the connection after its answer.
    let _ = stream.read_to_end(&mut bytes);
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
    let tag = head.lines().find_map(|line| line.strip_prefix("etag: ")).map(Into::into);
    Answer { status: head[9..12].parse().unwrap(), tag, body: body.into() }
}

#[test]
fn values_are_put_read_and_deleted_as_mooncakes_engines_do() {
    let master = start();
    let addr = http(&master);
    let key = "?key=mooncake%2Fram%2Fnode-7%3A12345";
    assert_eq!(ask(addr, "GET", key, &[], b"").status, 404);
    assert_eq!(ask(addr, "PUT", key, &[], b"{\"name\":\"node-7\"}").status, 200);
    let read = ask(addr, "GET", key, &[], b"");
    assert_eq!((read.status, read.body.as_str()), (200, "{\"name\":\"node-7\"}"));
    assert_eq!(ask(addr, "PUT", key, &[], b"").status, 200);
    assert_eq!(ask(addr, "GET", key, &[], b"").body, "");
    assert_eq!(ask(addr, "DELETE", key, &[], b"").status, 200);
    assert_eq!(ask(addr, "DELETE", key, &[], b"").status, 404);
    master.stop().unwrap();
}

#[test]
fn a_web_page_changes_nothing() {
    let master = start();
    let addr = http(&master);
    assert_eq!(ask(addr, "PUT", "?key=k", &[], b"ours").status, 200);
    for origin in ["origin: http://a.example:8080", "origin: null"] {
        let put = ask(addr, "PUT", "?key=k", &[origin], b"theirs");
        assert_eq!((put.status, put.body.as_str()), (403, "requests of web pages are refused\n"));
        assert_eq!(ask(addr, "DELETE", "?key=k", &[origin], b"").status, 403);
    }
    assert_eq!(ask(addr, "GET", "?key=k", &[], b"").body, "ours");
    master.stop().unwrap();
}

#[test]
fn writers_compare_and_set_by_etag() {
    let master = start();
    let addr = http(&master);
    let put = |header: &str, body: &[u8]| ask(addr, "PUT", "?key=k&ttl_ms=60000", &[header], body);
    let first = put("if-none-match: *", b"1");
    assert_eq!(first.status, 200);
    assert_eq!(put("if-none-match: *", b"2").status, 412);
    let tag = first.tag.unwrap();
    let second = put(&format!("if-match: {tag}"), b"3");
    assert_eq!(second.status, 200);
    assert_eq!(put(&format!("if-match: {tag}"), b"4").status, 412);
    let read = ask(addr, "GET", "?key=k", &[], b"");
    assert_eq!((read.body.as_str(), read.tag), ("3", second.tag.clone()));
    assert_eq!(ask(addr, "DELETE", "?key=k", &[&format!("if-match: {tag}")], b"").status, 412);
    let tag = second.tag.unwrap();
    assert_eq!(ask(addr, "DELETE", "?key=k", &[&format!("if-match: {tag}")], b"").status, 200);
    master.stop().unwrap();
}

#[test]
fn a_value_expires() {
    let master = start();
    let addr = http(&master);
    assert_eq!(ask(addr, "PUT", "?key=k&ttl_ms=1", &[], b"v").status, 200);
    // However slow this machine is, the time ends at some point.
    while ask(addr, "GET", "?key=k", &[], b"").status != 404 {}
    master.stop().unwrap();
}

#[test]
fn bad_requests_are_refused_with_a_reason_and_the_server_continues() {
    let limits = with(MetadataLimits::default(), |limits| {
        limits.keys_max = 2;
        limits.key_bytes_max = 8;
        limits.value_bytes_max = 32;
        limits.bytes_max = 1000;
    });
    let master = start_with(Config { metadata: limits, ..common::config() });
    let addr = http(&master);
    let long = [b'x'; 33];
    let cases: &[Case<'_>] = &[
        ("GET", "", &[], b"", 400),
        ("GET", "?key=", &[], b"", 400),
        ("GET", "?key=%20", &[], b"", 400),
        ("GET", "?key=a&key=b", &[], b"", 400),
        ("GET", "?key=a&ttl_ms=5", &[], b"", 400),
        ("GET", "?key=%ff", &[], b"", 404),
        ("PUT", "?key=a&ttl=5", &[], b"v", 400),
        ("PUT", "?key=a&ttl_ms=0", &[], b"v", 400),
        ("PUT", "?key=a&ttl_ms=-1", &[], b"v", 400),
        ("PUT", "?key=a&ttl_ms=99999999999999999999", &[], b"v", 400),
        ("PUT", "?key=a&ttl_ms=86400001", &[], b"v", 400),
        ("PUT", "?key=a", &["if-match: *"], b"v", 400),
        ("PUT", "?key=a", &["if-match: \"1\"", "if-none-match: *"], b"v", 400),
        ("PUT", "?key=a", &["if-match: \"zz\""], b"v", 412),
        ("PUT", "?key=123456789", &[], b"v", 413),
        ("PUT", "?key=a", &[], &long, 413),
        ("PUT", "?key=a", &["content-length: 1099511627776"], b"", 413),
        ("POST", "?key=a", &[], b"v", 405),
    ];
    for (method, query, headers, body, status) in cases {
        let answer = ask(addr, method, query, headers, body);
        assert_eq!(answer.status, *status, "{method} {query} {headers:?}: {}", answer.body);
    }
    // A value without an announced length is counted as it arrives.
    let mut stream = connect(addr);
    let head =
        "PUT /metadata?key=a HTTP/1.1\r\nhost: h\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(format!("21\r\n{}\r\n0\r\n\r\n", "x".repeat(33)).as_bytes()).unwrap();
    assert_eq!(answer(&mut stream).status, 413);
    for (key, status) in [("a", 200), ("b", 200), ("c", 507), ("a", 200)] {
        assert_eq!(ask(addr, "PUT", &format!("?key={key}"), &[], b"v").status, status, "{key}");
    }
    assert_serves(master.rpc_addr());
    master.stop().unwrap();
}

#[test]
fn many_values_that_never_arrive_do_not_block_readers() {
    let master = start();
    let addr = http(&master);
    assert_eq!(ask(addr, "PUT", "?key=k", &[], b"v").status, 200);
    let slow: Vec<_> = (0..64)
        .map(|_| {
            let mut stream = connect(addr);
            stream
                .write_all(b"PUT /metadata?key=s HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\nx")
                .unwrap();
            stream
        })
        .collect();
    assert_eq!(ask(addr, "GET", "?key=k", &[], b"").body, "v");
    drop(slow);
    // When they are gone, values are accepted again.
    assert_eq!(ask(addr, "PUT", "?key=k", &[], b"w").status, 200);
    master.stop().unwrap();
}

#[test]
fn it_can_be_turned_off() {
    let master = start_with(Config { metadata_server: false, ..common::config() });
    assert_eq!(ask(http(&master), "PUT", "?key=k", &[], b"v").status, 404);
    master.stop().unwrap();
}
