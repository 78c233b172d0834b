//! The control port under hostile and careless clients.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use common::*;
use te_engine::{Access, Fabrics, Liveness, SegmentError, TransferEngine};

/// Gives up soon, as a server and as a client: what must be answered at the first try is asked from a more patient one.
fn quick() -> TransferEngine {
    let mut config = config(Fabrics::LOCAL);
    config.control.timeout_ms = 200;
    config.control.connections_max = 4;
    TransferEngine::start(config).unwrap()
}

fn frame(body: &[u8]) -> Vec<u8> {
    let mut frame = b"SNWK\x01\0\0\0".to_vec();
    frame.extend_from_slice(&(body.len() as u32).to_le_bytes());
    frame.extend_from_slice(body);
    frame
}

/// What the server sends before it closes; nothing when it closes at once.
fn answer_to(engine: &TransferEngine, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(engine.name()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    // The server may close before it has taken everything.
    let _ = stream.write_all(bytes);
    let mut out = Vec::new();
    let _ = stream.read_to_end(&mut out);
    out
}

fn assert_serves(engine: &TransferEngine) {
    let asker = common::engine(Fabrics::LOCAL);
    let other = asker.open_segment(engine.name()).unwrap();
    let alive = Liveness::Alive { incarnation: engine.incarnation() };
    assert_eq!(asker.probe(other, Duration::from_secs(5)), Ok(alive));
    asker.close_segment(other).unwrap();
}

#[test]
fn what_is_not_a_request_costs_its_sender_the_connection_and_nobody_else_anything() {
    let engine = quick();
    let good = frame(&[1]);
    let mut bad: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
        frame(&[200, 200, 200]),
        frame(&[]),
        frame(&[1, 1]),
        [&good[..], &good].concat(),
        vec![0; 10_000],
        pattern(1, 100_000),
    ];
    // Another version, another magic, a length of 4 GiB, of a little too much.
    for (at, byte) in [(0, b'X'), (4, 2), (6, 1), (11, 0xFF), (10, 0x02)] {
        let mut frame = good.clone();
        frame[at] = byte;
        bad.push(frame);
    }
    for bytes in bad {
        let answer = answer_to(&engine, &bytes);
        assert!(
            answer.is_empty() || bytes.starts_with(&good),
            "{:?} was answered",
            &bytes[..bytes.len().min(16)]
        );
    }
    for len in 0..good.len() {
        // Cut short, and silent: closed when the time is over.
        assert!(answer_to(&engine, &good[..len]).is_empty());
    }
    assert_serves(&engine);
}

#[test]
fn connections_that_say_nothing_do_not_keep_others_out_for_long() {
    let engine = quick();
    let silent: Vec<_> = (0..20).map(|_| TcpStream::connect(engine.name()).unwrap()).collect();
    eventually("the silent ones are closed", || engine.open_segment(engine.name()).is_ok());
    drop(silent);
    assert_serves(&engine);
}

#[test]
fn one_connection_can_ask_many_times() {
    let engine = common::engine(Fabrics::LOCAL);
    let mut stream = TcpStream::connect(engine.name()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    for _ in 0..100 {
        // In two pieces, to be put together again.
        let request = frame(&[1]);
        stream.write_all(&request[..7]).unwrap();
        stream.flush().unwrap();
        stream.write_all(&request[7..]).unwrap();
        let mut header = [0; 12];
        stream.read_exact(&mut header).unwrap();
        assert_eq!(&header[..4], b"SNWK");
        let mut body = vec![0; header[8] as usize];
        stream.read_exact(&mut body).unwrap();
        assert_eq!(body[0], 1, "alive");
    }
}

#[test]
fn a_server_that_is_not_an_engine_is_told_from_one() {
    let engine = common::engine(Fabrics::LOCAL);
    for (answer, what) in [
        (&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], "not a transfer engine"),
        (b"SNWK\x02\0\0\0\x01\0\0\0x", "another version"),
        (b"SNWK\x01\0\0\0\xff\xff\xff\x7f", "longer than control.frame_bytes_max"),
        (b"SNWK\x01\0\0\0\x01\0\0\0\x63", "does not parse"),
        (b"SNWK\x01\0\0\0\x01\0\0\0\x02", "another question"),
        (b"SNWK\x01\0\0\0\x03\0\0\0\x00\x01\x07", "descriptor does not parse"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let name = listener.local_addr().unwrap().to_string();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 13];
            stream.read_exact(&mut request).unwrap();
            stream.write_all(answer).unwrap();
        });
        let error = engine.open_segment(&name).unwrap_err();
        assert!(
            matches!(error, SegmentError::Protocol { .. }) && error.to_string().contains(what),
            "{error}"
        );
        server.join().unwrap();
    }
    // Silent, gone, and no address at all.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let name = silent.local_addr().unwrap().to_string();
    let error = quick().open_segment(&name).unwrap_err();
    assert!(matches!(&error, SegmentError::Unreachable { reason, .. } if reason == "timed out"), "{error:?}");
    drop(silent);
    assert!(matches!(engine.open_segment(&name), Err(SegmentError::Unreachable { .. })));
    for name in ["", "node-7", "node-7:", ":80", "node-7:http", "node-7:0", "node-7:99999"] {
        assert_eq!(engine.open_segment(name), Err(SegmentError::Name(name.into())));
    }
}

#[test]
fn a_descriptor_of_many_regions_arrives_whole() {
    let (here, there) = (common::engine(Fabrics::LOCAL), common::engine(Fabrics::LOCAL));
    let regions: Vec<_> = (0..300).map(|_| there.alloc_shared(4096, Access::REMOTE_READ).unwrap()).collect();
    let segment = here.open_segment(there.name()).unwrap();
    let mut expected: Vec<u64> = regions.iter().map(|region| region.addr()).collect();
    expected.sort_unstable();
    let listed: Vec<u64> = here.segment_regions(segment).unwrap().iter().map(|region| region.addr).collect();
    assert_eq!(listed, expected);
}
