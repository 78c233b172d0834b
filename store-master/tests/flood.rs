//! Many connections that keep the master computing: others are served nevertheless, and a stop takes effect.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use common::{assert_greets, connect, exists, read_answer, segment, start};
use store_core::Key;
use store_core::message::{
    ExplainEviction, Find, FindQuery, Get, LeaseWanted, List, ListQuery, Mount, NewObject, Operation,
    PutRequest, PutStart,
};

/// Far longer than anything here may take, and far shorter than it would take if connections were served to
/// their end one by one.
const PATIENCE: Duration = Duration::from_secs(10);
const FLOODERS: usize = 40;

/// Puts objects whose keys are expensive to match: the longest, of two letters.
fn fill(addr: SocketAddr) {
    let mut stream = connect(addr);
    let mut out = Vec::new();
    let segment = segment(1, "n", 1 << 20);
    Mount::encode_request(&mut out, 1, &segment, std::iter::empty()).unwrap();
    let mut state = 1_u32;
    let mut letter = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        if state >> 31 == 0 { b'a' } else { b'b' }
    };
    let keys: Vec<Vec<u8>> = (0..64).map(|_| (0..1_024).map(|_| letter()).collect()).collect();
    let new = keys.iter().map(|key| NewObject { key: Key(key), len: 64 });
    PutStart::encode_request(&mut out, 2, &PutRequest { writer: 1, ..PutRequest::default() }, new).unwrap();
    stream.write_all(&out).unwrap();
    assert_eq!(read_answer(&mut stream).unwrap().header.status, 0);
    assert_eq!(read_answer(&mut stream).unwrap().header.status, 0);
}

/// Requests that are short to send and take minutes to answer.
fn flood() -> Vec<u8> {
    let (mut out, none) = (Vec::new(), std::iter::empty);
    for id in 0..400 {
        let find = FindQuery { pattern: "(a[ab]{20}c|b[ab]{20}d)", limit: 1, cursor: 0 };
        Find::encode_request(&mut out, id, &find, none()).unwrap();
        let list = ListQuery { prefix: Key(b"absent"), limit: 4096, cursor: 0 };
        List::encode_request(&mut out, id, &list, none()).unwrap();
        ExplainEviction::encode_request(&mut out, id, &4096, none()).unwrap();
        let keys = (0..256).map(|_| Key(b"a key of the usual length"));
        Get::encode_request(&mut out, id, &LeaseWanted::Quick, keys).unwrap();
    }
    out
}

/// Sends what the master accepts, and reads nothing.
fn flooder(addr: SocketAddr, flood: &[u8]) -> TcpStream {
    let stream = connect(addr);
    stream.set_nonblocking(true).unwrap();
    let mut sent = 0;
    while let Ok(len @ 1..) = (&stream).write(&flood[sent..]) {
        sent += len;
    }
    stream
}

fn health(addr: SocketAddr) -> String {
    let mut stream = connect(addr);
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

mod timing {
    //! Real time: 20 rounds of requests, and then a stop, beside a flood. Each must end within [`PATIENCE`].

    use super::*;

    #[test]
    fn connections_that_compute_delay_neither_health_checks_nor_a_stop() {
        let master = start();
        let addr = master.rpc_addr();
        fill(addr);
        let mut known = connect(addr);
        assert_greets(&mut known);
        let flood = flood();
        let crowd: Vec<TcpStream> = (0..FLOODERS).map(|_| flooder(addr, &flood)).collect();
        let began = Instant::now();
        for id in 0..20 {
            known.write_all(&exists(id, &[b"k"])).unwrap();
            assert_eq!(read_answer(&mut known).unwrap().header.request_id, id);
            let mut newcomer = connect(addr);
            newcomer.write_all(&exists(id, &[b"k"])).unwrap();
            assert_eq!(read_answer(&mut newcomer).unwrap().header.request_id, id);
            let health = health(master.http_addr().unwrap());
            assert!(health.starts_with("HTTP/1.1 200 ") && health.contains("\"status\":\"ok\""), "{health}");
        }
        assert!(began.elapsed() < PATIENCE, "{:?} for 60 questions", began.elapsed());
        let stopping = Instant::now();
        master.stop().unwrap();
        assert!(stopping.elapsed() < PATIENCE, "{:?} to stop", stopping.elapsed());
        drop(crowd);
    }
}
