//! Whoever says wrong secrets: hung up on, slowed down, counted; and not in the way of others.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use common::{config, connect, read_answer, start_with};
use store_core::message::{Greeting, Hello, Operation};
use store_core::{ErrorCode, Key, MasterConfig, Role, Secret, prove};
use store_master::Config;

fn guarded() -> Config {
    let store = MasterConfig { admin_secret: Secret::new(b"sesame"), epoch: 7, ..MasterConfig::default() };
    Config { store, ..config() }
}

/// Sends a proof of this secret, made with the connection's challenge.
fn try_to_prove(stream: &mut (impl Read + Write), secret: &[u8]) {
    let mut out = Vec::new();
    Hello::encode_request(&mut out, 1, &Greeting::default(), std::iter::empty()).unwrap();
    stream.write_all(&out).unwrap();
    let answer = read_answer(stream).unwrap();
    let challenge = Hello::decode_response(&answer.frame()).unwrap().0.challenge;
    let proof = prove(secret, Role::Admin, &challenge, "default");
    let greeting = Greeting { admin_proof: Key(&proof), ..Greeting::default() };
    out.clear();
    Hello::encode_request(&mut out, 2, &greeting, std::iter::empty()).unwrap();
    stream.write_all(&out).unwrap();
}

/// Wrong proofs that the master has looked at.
fn looked_at(http: SocketAddr) -> u64 {
    let mut stream = connect(http);
    write!(stream, "GET /metrics HTTP/1.1\r\nhost: {http}\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let series = "snowskin_master_proofs_failed_total{role=\"admin\"} ";
    text.lines().find_map(|line| line.strip_prefix(series)).unwrap().parse().unwrap()
}

#[test]
fn a_wrong_secret_ends_the_connection_after_an_answer() {
    let master = start_with(guarded());
    let mut stream = connect(master.rpc_addr());
    try_to_prove(&mut stream, b"open");
    assert_eq!(common::last_words(&mut stream), ErrorCode::PermissionDenied.code());
    assert_eq!(looked_at(master.http_addr().unwrap()), 1);
    let mut stream = connect(master.rpc_addr());
    try_to_prove(&mut stream, b"sesame");
    assert_eq!(read_answer(&mut stream).unwrap().header.status, 0);
    common::assert_greets(&mut stream);
}

#[test]
fn who_guesses_is_looked_at_seldom_and_who_comes_by_the_unix_socket_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rpc");
    let master = start_with(Config { rpc_unix: Some(path.clone()), ..guarded() });
    let (rpc, http) = (master.rpc_addr(), master.http_addr().unwrap());
    let began = Instant::now();
    let guesses: Vec<TcpStream> = (0..300)
        .map(|_| {
            let mut stream = connect(rpc);
            try_to_prove(&mut stream, b"open");
            stream
        })
        .collect();
    let mut unix = UnixStream::connect(&path).unwrap();
    unix.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    try_to_prove(&mut unix, b"sesame");
    assert_eq!(read_answer(&mut unix).unwrap().header.status, 0);
    // Others of that address, who prove nothing, are served.
    common::assert_serves(rpc);
    let looked_at = looked_at(http);
    // So many at once, and then one each quarter of a second.
    let may_be = 16 + 1 + began.elapsed().as_millis() as u64 / 250;
    assert!((16..=may_be).contains(&looked_at), "{looked_at} of 300 guesses, {may_be} at most");
    drop(guesses);
    // Whoever knows it has to wait for a moment, and is let in.
    let mut stream = connect(rpc);
    try_to_prove(&mut stream, b"sesame");
    assert_eq!(read_answer(&mut stream).unwrap().header.status, 0);
}

#[test]
fn wrong_secrets_over_http_are_counted() {
    let master = start_with(guarded());
    let http = master.http_addr().unwrap();
    let mut stream = connect(http);
    write!(
        stream,
        "POST /api/v1/evict HTTP/1.1\r\nhost: {http}\r\nauthorization: Bearer open\r\nconnection: close\r\n\r\n"
    )
    .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 401 "), "{text}");
    assert_eq!(looked_at(http), 1);
}
