//! Requests that no client should send, and engines that answer badly.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use conductor::mock::{Flavor, Role};
use conductor::proxy::{ConnectionLimits, Limits};
use serde_json::json;

use crate::common::{Front, front, front_with, post, quick, read, start};

fn small() -> Limits {
    Limits { body_bytes_max: 4_096, body_time_max: Duration::from_millis(200), ..Limits::default() }
}

/// Sends bytes, and returns what comes until the connection is closed.
async fn raw(addr: SocketAddr, bytes: Vec<u8>) -> String {
    let work = move || {
        let mut stream = TcpStream::connect(addr).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let _ = stream.write_all(&bytes);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    };
    tokio::task::spawn_blocking(work).await.unwrap()
}

async fn still_serves(front: &Front) {
    let body = json!({"model": "mock", "prompt": [300], "max_tokens": 2, "stream": true}).to_string();
    let (status, _, text) = post(front.addr, "/v1/completions", body).await;
    assert_eq!(status.as_u16(), 200);
    assert!(read(&text).is_done);
    assert_eq!(front.place.open(), 0);
}

#[tokio::test]
async fn bad_bodies_are_refused_before_an_engine_is_asked() {
    let engine = start(quick(Role::Both, Flavor::Vllm));
    let front = front(&[], &[&engine], small());
    for (path, body, status) in [
        ("/v1/completions", "", 400),
        ("/v1/completions", "[]", 400),
        ("/v1/completions", "{\"model\":\"mock\"", 400),
        ("/v1/completions", "{\"model\":\"mock\"}", 400),
        ("/v1/completions", "{\"prompt\":\"x\"}", 400),
        ("/v1/completions", "{\"model\":\"mock\",\"model\":\"other\",\"prompt\":\"x\"}", 400),
        ("/v1/completions", "{\"model\":\"mock\",\"prompt\":[1,-2]}", 400),
        ("/v1/completions", "{\"model\":\"mock\",\"prompt\":[\"a\",\"b\"]}", 400),
        ("/v1/completions", "{\"model\":\"mock\",\"prompt\":\"x\",\"max_tokens\":-1}", 400),
        ("/v1/completions", "{\"model\":\"mock\",\"prompt\":\"x\",\"max_tokens\":0}", 400),
        ("/v1/completions", "{\"model\":\"mock\",\"prompt\":\"x\",\"stream\":\"yes\"}", 400),
        ("/v1/completions", "{\"model\":\"other\",\"prompt\":\"x\"}", 404),
        ("/v1/chat/completions", "{\"model\":\"mock\",\"messages\":\"hi\"}", 400),
        ("/v1/nothing", "{}", 404),
        ("/v1/models", "{}", 405),
    ] {
        assert_eq!(post(front.addr, path, body).await.0.as_u16(), status, "{path} {body}");
    }
    let long = format!("{{\"model\":\"mock\",\"prompt\":\"{}\"}}", "x".repeat(5_000));
    assert_eq!(post(front.addr, "/v1/completions", long).await.0.as_u16(), 413);
    assert_eq!(engine.requests().0, 0);
    still_serves(&front).await;
}

#[tokio::test]
async fn a_client_cannot_send_an_engine_to_another_host() {
    let engine = start(quick(Role::Both, Flavor::Vllm));
    let front = front(&[], &[&engine], Limits::default());
    let trap = TcpListener::bind("127.0.0.1:0").unwrap();
    trap.set_nonblocking(true).unwrap();
    let port = trap.local_addr().unwrap().port();
    let body = json!({"model": "mock", "prompt": [300], "max_tokens": 1, "stream": true,
        "bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 1,
        "kv_transfer_params": {"do_remote_prefill": true, "remote_host": "127.0.0.1", "remote_port": port,
            "remote_engine_id": "x", "remote_block_ids": [1]}});
    let (status, _, text) = post(front.addr, "/v1/completions", body.to_string()).await;
    assert_eq!(status.as_u16(), 200, "{text}");
    assert!(trap.accept().is_err(), "the engine went where the client sent it");
}

#[tokio::test]
async fn slow_and_long_heads_and_bodies_end() {
    let engine = start(quick(Role::Both, Flavor::Vllm));
    let front = front(&[], &[&engine], small());
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n";
    // A body that does not come.
    let late = raw(front.addr, format!("{head}content-length: 10\r\n\r\n{{").into()).await;
    assert!(late.starts_with("HTTP/1.1 408 "), "{late}");
    // A body that says that it is long, and one that is.
    let long = raw(front.addr, format!("{head}content-length: 99999999999\r\n\r\n").into()).await;
    assert!(long.starts_with("HTTP/1.1 413 "), "{long}");
    let chunk = format!("1000\r\n{}\r\n", "x".repeat(0x1000));
    let chunks = format!("{head}transfer-encoding: chunked\r\n\r\n{}", chunk.repeat(3));
    let long = raw(front.addr, chunks.into()).await;
    assert!(long.starts_with("HTTP/1.1 413 "), "{long}");
    // Heads.
    let many: String = (0..100).map(|at| format!("h{at}: x\r\n")).collect();
    let refused = raw(front.addr, format!("{head}{many}\r\n").into()).await;
    assert!(refused.starts_with("HTTP/1.1 431 "), "{refused}");
    let long = raw(front.addr, format!("{head}h: {}\r\n\r\n", "x".repeat(200_000)).into()).await;
    assert!(long.is_empty() || long.starts_with("HTTP/1.1 431 "), "{long}");
    assert_eq!(engine.requests().0, 0);
    still_serves(&front).await;
}

#[tokio::test]
async fn too_many_requests_are_refused() {
    let engine = start(quick(Role::Both, Flavor::Vllm));
    let front = front(&[], &[&engine], Limits { requests_max: 0, ..Limits::default() });
    let body = json!({"model": "mock", "prompt": [300]}).to_string();
    let (status, headers, _) = post(front.addr, "/v1/completions", body).await;
    assert_eq!((status.as_u16(), headers.contains_key("retry-after")), (503, true));
}

#[tokio::test]
async fn a_client_that_does_not_read_loses_its_connection_and_its_request() {
    let engine = start(quick(Role::Both, Flavor::Vllm));
    let connections =
        ConnectionLimits { stall_time_max: Duration::from_millis(200), ..ConnectionLimits::default() };
    let front = front_with(&[], &[&engine], Limits::default(), connections);
    let body = json!({"model": "mock", "prompt": [300], "max_tokens": 130_000, "stream": true}).to_string();
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    let mut stream = TcpStream::connect(front.addr).unwrap();
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    while front.place.reports().is_empty() || front.place.open() > 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(front.proxy.figures().done, 0, "all of it went into buffers");
    drop(stream);
    still_serves(&front).await;
}
