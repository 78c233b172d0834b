//! Peers with wrong secrets: their connections are closed, they are slowed down and counted, and others are
//! not affected.
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

/// Number of wrong proofs that the master has examined.
fn examined(http: SocketAddr) -> u64 {
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
    assert_eq!(examined(master.http_addr().unwrap()), 1);
    let mut stream = connect(master.rpc_addr());
    try_to_prove(&mut stream, b"sesame");
    assert_eq!(read_answer(&mut stream).unwrap().header.status, 0);
    common::assert_greets(&mut stream);
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
    assert_eq!(examined(http), 1);
}

mod timing {
    //! Real time: the rate at which wrong proofs are examined.

    use super::*;

    #[test]
    fn guesses_are_examined_at_a_limited_rate_and_a_proof_over_the_unix_socket_at_once() {
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
        // Other connections of the same address, without a proof, are served.
        common::assert_serves(rpc);
        let examined = examined(http);
        // A burst at once, and then one per quarter of a second.
        let most = 16 + 1 + began.elapsed().as_millis() as u64 / 250;
        assert!((16..=most).contains(&examined), "{examined} of 300 guesses, {most} at most");
        drop(guesses);
        // A peer with the right secret has to wait for a moment, and is accepted.
        let mut stream = connect(rpc);
        try_to_prove(&mut stream, b"sesame");
        assert_eq!(read_answer(&mut stream).unwrap().header.status, 0);
    }
}
