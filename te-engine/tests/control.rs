//! The control port under hostile and faulty clients.
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use common::*;
use te_core::Access;
use te_engine::{Fabrics, Liveness, SegmentError, TransferEngine};

/// An engine with a short `timeout_ms`, as a server and as a client. Requests that must succeed at the first
/// attempt use another engine.
fn quick() -> TransferEngine {
    let mut config = config(Fabrics::LOCAL);
    config.control.timeout_ms = 200;
    config.control.connections_max = 4;
    TransferEngine::start(config).unwrap()
}

fn frame(body: &[u8]) -> Vec<u8> {
    let mut frame = b"SNWK\x02\0\0\0".to_vec();
    frame.extend_from_slice(&(body.len() as u32).to_le_bytes());
    frame.extend_from_slice(body);
    frame
}

/// What the server sends before it closes the connection.
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
    let client = common::engine(Fabrics::LOCAL);
    let other = client.open_segment(engine.name()).unwrap();
    let alive = Liveness::Alive { incarnation: engine.incarnation() };
    assert_eq!(client.probe(other, Duration::from_secs(5)), Ok(alive));
    client.close_segment(other).unwrap();
}

#[test]
fn an_invalid_request_closes_the_connection_of_its_sender_and_no_other() {
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
    // Another magic, another version, a length of 4 GiB, a length that is a little too long.
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
        // Cut short, and then silent: closed after the timeout.
        assert!(answer_to(&engine, &good[..len]).is_empty());
    }
    assert_serves(&engine);
}

#[test]
fn silent_connections_do_not_keep_others_out_for_long() {
    let engine = quick();
    let silent: Vec<_> = (0..20).map(|_| TcpStream::connect(engine.name()).unwrap()).collect();
    eventually("the silent connections are closed", || engine.open_segment(engine.name()).is_ok());
    drop(silent);
    assert_serves(&engine);
}

#[test]
fn one_connection_can_make_many_requests() {
    let engine = common::engine(Fabrics::LOCAL);
    let mut stream = TcpStream::connect(engine.name()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    for _ in 0..100 {
        // In two pieces, which the server has to join.
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
fn a_server_that_is_not_an_engine_is_recognised() {
    let engine = common::engine(Fabrics::LOCAL);
    for (answer, what) in [
        (&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], "not a transfer engine"),
        (b"SNWK\x03\0\0\0\x01\0\0\0x", "another version"),
        (b"SNWK\x02\0\0\0\xff\xff\xff\x7f", "longer than control.frame_bytes_max"),
        (b"SNWK\x02\0\0\0\x01\0\0\0\x63", "does not parse"),
        (b"SNWK\x02\0\0\0\x01\0\0\0\x02", "not one to this request"),
        (b"SNWK\x02\0\0\0\x03\0\0\0\x00\x01\x07", "descriptor does not parse"),
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
    // A silent server, a closed port, and names that are not addresses.
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

/// An engine that knows this secret.
fn knowing(secret: &str) -> TransferEngine {
    TransferEngine::start(te_engine::Config {
        cluster_secret: te_core::Secret::from(secret),
        ..config(Fabrics::LOCAL)
    })
    .unwrap()
}

#[test]
fn without_the_cluster_secret_only_probes_are_answered() {
    let (owner, friend) = (knowing("the secret"), knowing("the secret"));
    let region = owner.alloc_shared(4096, EVERYTHING).unwrap();
    let segment = friend.open_segment(owner.name()).unwrap();
    assert_eq!(friend.segment_regions(segment).unwrap()[0].addr, region.addr());
    friend.notify(segment, "name", b"message").unwrap();
    assert_eq!(owner.take_notifications().len(), 1);
    // A client without a secret, one with another secret, and one with a secret whose peer has none.
    for (client, owner_name, reason) in [
        (common::engine(Fabrics::LOCAL), owner.name(), "it requires the cluster secret"),
        (knowing("the sekret"), owner.name(), "its cluster secret is another one"),
        (knowing("the secret"), common::engine(Fabrics::LOCAL).name(), "cluster secret"),
    ] {
        let Err(error) = client.open_segment(owner_name) else { panic!("{reason}: the descriptor was sent") };
        if owner_name == owner.name() {
            assert!(
                matches!(error, SegmentError::Refused { .. }) && error.to_string().contains(reason),
                "{error}"
            );
        }
    }
    // On the wire: a probe is answered; a descriptor and a notification are not, and no key is sent.
    let call = |bytes: &[u8]| {
        let mut stream = TcpStream::connect(owner.name()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        stream.write_all(&frame(bytes)).unwrap();
        let mut header = [0; 12];
        stream.read_exact(&mut header).unwrap();
        let mut body = vec![0; header[8] as usize];
        stream.read_exact(&mut body).unwrap();
        (body, stream)
    };
    assert_eq!(call(&[1]).0[0], 1, "alive");
    for request in [&[0][..], &[2, 0, 1, b'n', 1, b'm']] {
        let (answer, mut stream) = call(request);
        assert_eq!(answer, [9], "needs a proof");
        assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0, "and the connection is closed");
    }
    assert!(owner.take_notifications().is_empty());
}

/// Receives one frame, header and body.
fn take_frame(from: &mut TcpStream) -> Vec<u8> {
    let mut all = vec![0; 12];
    from.read_exact(&mut all).unwrap();
    let len = u32::from_le_bytes(all[8..].try_into().unwrap()) as usize;
    all.resize(12 + len, 0);
    from.read_exact(&mut all[12..]).unwrap();
    all
}

#[test]
fn a_proof_cannot_be_replayed() {
    // A proxy forwards all frames, and then sends the proof again, on the same and on another connection.
    let owner = knowing("the secret");
    let _region = owner.alloc_shared(4096, EVERYTHING).unwrap();
    let middle = TcpListener::bind("127.0.0.1:0").unwrap();
    let name = middle.local_addr().unwrap().to_string();
    let target = owner.name().to_string();
    let eavesdropper = std::thread::spawn(move || {
        let (mut client, _) = middle.accept().unwrap();
        let mut there = TcpStream::connect(&target).unwrap();
        let pass = |from: &mut TcpStream, to: &mut TcpStream| {
            let all = take_frame(from);
            to.write_all(&all).unwrap();
            all
        };
        pass(&mut client, &mut there);
        pass(&mut there, &mut client);
        let proven = pass(&mut client, &mut there);
        let answer = pass(&mut there, &mut client);
        assert!(answer.len() > 100, "it was a proof");
        // On the same connection the challenge has been used; another connection has another challenge.
        there.write_all(&proven).unwrap();
        let mut again = vec![];
        there.read_to_end(&mut again).unwrap();
        assert_eq!(again[12..], [10], "a wrong proof");
        let mut fresh = TcpStream::connect(&target).unwrap();
        fresh.write_all(&frame(&[3])).unwrap();
        let mut challenge = [0; 12 + 33];
        fresh.read_exact(&mut challenge).unwrap();
        fresh.write_all(&proven).unwrap();
        let mut again = vec![];
        fresh.read_to_end(&mut again).unwrap();
        assert_eq!(again[12..], [10], "a wrong proof");
    });
    let friend = knowing("the secret");
    friend.open_segment(&name).unwrap();
    eavesdropper.join().unwrap();
}

#[test]
fn an_answer_that_was_changed_in_transit_is_refused() {
    let owner = knowing("the secret");
    let _region = owner.alloc_shared(4096, EVERYTHING).unwrap();
    let middle = TcpListener::bind("127.0.0.1:0").unwrap();
    let name = middle.local_addr().unwrap().to_string();
    let target = owner.name().to_string();
    let forger = std::thread::spawn(move || {
        let (mut client, _) = middle.accept().unwrap();
        let mut there = TcpStream::connect(&target).unwrap();
        for round in 0..4 {
            let (from, to) =
                if round % 2 == 0 { (&mut client, &mut there) } else { (&mut there, &mut client) };
            let mut all = take_frame(from);
            if round == 3 {
                let middle = all.len() / 2;
                all[middle] ^= 1;
            }
            to.write_all(&all).unwrap();
        }
    });
    let error = knowing("the secret").open_segment(&name).unwrap_err();
    assert!(matches!(error, SegmentError::Refused { .. }), "{error}");
    forger.join().unwrap();
}

#[test]
fn a_connection_with_nothing_but_probes_is_closed() {
    let engine = quick();
    let mut prober = TcpStream::connect(engine.name()).unwrap();
    prober.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let closed = |stream: &mut TcpStream| {
        let mut header = [0; 12];
        stream.write_all(&frame(&[1])).is_err() || stream.read_exact(&mut header).is_err() || {
            let mut body = vec![0; header[8] as usize];
            stream.read_exact(&mut body).is_err()
        }
    };
    eventually("the connection is closed", || closed(&mut prober));
}

#[test]
fn a_new_connection_replaces_the_one_that_has_been_silent_longest() {
    let mut config = config(Fabrics::LOCAL);
    config.control.connections_max = 4;
    // No connection reaches its timeout here.
    config.control.timeout_ms = 600_000;
    let engine = TransferEngine::start(config).unwrap();
    let mut silent: Vec<TcpStream> = (0..4).map(|_| TcpStream::connect(engine.name()).unwrap()).collect();
    for round in 0..40 {
        assert_serves(&engine);
        let mut prober = TcpStream::connect(engine.name()).unwrap();
        prober.write_all(&frame(&[1])).unwrap();
        silent.push(prober);
        assert!(silent.len() == 5 + round);
    }
    let mut one = silent.remove(0);
    one.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    assert_eq!(one.read(&mut [0; 1]).unwrap(), 0, "the first connection is closed");
}

#[test]
fn an_engine_that_accepts_no_notifications_refuses_them_with_the_reason() {
    let mut config = config(Fabrics::LOCAL);
    config.control.notifications_max = 0;
    let engine = TransferEngine::start(config).unwrap();
    let client = common::engine(Fabrics::LOCAL);
    let segment = client.open_segment(engine.name()).unwrap();
    let error = client.notify(segment, "name", b"").unwrap_err();
    assert!(error.to_string().contains("it accepts no notifications"), "{error}");
    assert!(engine.take_notifications().is_empty());
    assert_eq!(engine.stats().notifications_refused, 1);
}
