//! Peers that break the protocol of the control connection, by malice or because they run another release.
//! Other peers must not be affected.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use common::{Net, REGION, REMOTE, config, kind, read, write};
use te_core::{ErrorKind, Memory, Outcome, RemoteOffset, Transport};
use te_rdma::Config;
use te_rdma::wire::*;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

const KIB: usize = 1 << 10;

/// A raw connection to node 1. While it waits, all nodes are polled.
struct Raw {
    stream: TcpStream,
}

impl Raw {
    fn to(net: &Net) -> Self {
        let stream = TcpStream::connect(net.nodes[1].transport.local_address()).unwrap();
        stream.set_nonblocking(true).unwrap();
        Self { stream }
    }

    /// Connected and welcomed, and the key of the export was shown.
    fn proven(net: &mut Net, session: u64) -> Self {
        let mut raw = Self::welcomed(net, session);
        raw.prove(net);
        raw
    }

    fn prove(&mut self, net: &mut Net) {
        self.send(&resolve(net, 0, 0, 0));
        assert_eq!(self.receive(net, 60).len(), 60);
    }

    /// Connected and welcomed.
    fn welcomed(net: &mut Net, session: u64) -> Self {
        let mut raw = Self::to(net);
        raw.send(hello(net, session, 1).as_bytes());
        let welcome = raw.receive(net, 32);
        assert_eq!(Welcome::read_from_bytes(&welcome).unwrap().status.get(), 0);
        raw
    }

    fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// The next `len` bytes; fewer if the target has closed the connection.
    fn receive(&mut self, net: &mut Net, len: usize) -> Vec<u8> {
        let mut got = Vec::new();
        net.drive("an answer or a close", |_| {
            let mut rest = vec![0; len - got.len()];
            match self.stream.read(&mut rest) {
                Ok(0) => return true,
                Ok(count) => got.extend_from_slice(&rest[..count]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return true,
            }
            got.len() == len
        });
        got
    }

    /// The status with which the target closed the connection.
    fn end(&mut self, net: &mut Net) -> Option<Status> {
        let bytes = self.receive(net, 4_096);
        if let Ok((welcome, _)) = Welcome::read_from_prefix(&bytes)
            && welcome.magic == MAGIC
        {
            return Some(Status::from_wire(welcome.status.get()));
        }
        match parse_response(&bytes) {
            Ok(Step::Frame(Response::Error { status }, _)) => Some(status),
            _ => None,
        }
    }
}

fn hello(net: &Net, session: u64, connection: u32) -> Hello {
    Hello {
        magic: MAGIC,
        version: U16::new(VERSION),
        reserved: U16::ZERO,
        connection: U32::new(connection),
        session: U64::new(session),
        target: U64::new(net.nodes[1].transport.incarnation()),
        identity: U64::new(session | 1),
        reserved_end: U64::ZERO,
    }
}

fn port() -> PortBody {
    let mut gid = [0; 16];
    gid[0] = 0xfe;
    gid[1] = 0x80;
    PortBody { gid, lid: U16::ZERO, gid_kind: 2, reads: 1, mtu: U32::new(4_096), reserved: U64::ZERO }
}

fn connect(id: u64, generations: impl Iterator<Item = u32>) -> Vec<u8> {
    let entries: Vec<QpEntry> = generations
        .map(|generation| QpEntry {
            generation: U32::new(generation),
            number: U32::new(0x1234),
            psn: U32::ZERO,
            reserved: U32::ZERO,
        })
        .collect();
    let header = Header::new(Kind::Connect, entries.len() as u16, id);
    [header.as_bytes(), port().as_bytes(), entries.as_bytes()].concat()
}

fn resolve(net: &Net, id: u64, key_xor: u64, first: u32) -> Vec<u8> {
    let export = parse_export(&net.nodes[1].export_of(REGION)).unwrap();
    let body = Resolve {
        region: U32::new(export.region),
        generation: U32::new(export.generation),
        key: U64::new(export.key ^ key_xor),
        first: U32::new(first),
        reserved: U32::ZERO,
    };
    [Header::new(Kind::Resolve, 0, id).as_bytes(), body.as_bytes()].concat()
}

/// Checks that the two nodes still work.
fn still_works(net: &mut Net, token: u64) {
    net.transfer(&[write(token, 0, 0, 500), read(token + 1, 0, 0, 500)]);
    assert_eq!(net.fence(token + 2).outcome, Outcome::Applied);
}

#[test]
fn a_connection_that_does_not_begin_with_a_hello_is_refused() {
    let mut net = Net::pair(&config(), 4 * KIB);
    let good = hello(&net, 5, 1);
    let cases: [(Vec<u8>, Status); 5] = [
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), Status::Magic),
        (Hello { version: U16::new(9), ..good }.as_bytes().to_vec(), Status::Version),
        (Hello { reserved_end: U64::new(1), ..good }.as_bytes().to_vec(), Status::Protocol),
        (Hello { target: U64::new(1), ..good }.as_bytes().to_vec(), Status::Restarted),
        (vec![0; 48], Status::Magic),
    ];
    for (bytes, status) in cases {
        let mut raw = Raw::to(&net);
        raw.send(&bytes);
        assert_eq!(raw.end(&mut net), Some(status));
    }
    still_works(&mut net, 10);
}

#[test]
fn a_malformed_frame_ends_its_connection_alone() {
    let mut net = Net::pair(&config(), 4 * KIB);
    still_works(&mut net, 1);
    let frames: [Vec<u8>; 6] = [
        vec![0xff; 64],
        Header::new(Kind::Fence, 65, 0).as_bytes().to_vec(),
        Header::new(Kind::Accept, 1, 0).as_bytes().to_vec(),
        connect(1, std::iter::empty()),
        connect(1, 0..17),
        Header::new(Kind::Resolve, 1, 0).as_bytes().to_vec(),
    ];
    for (i, frame) in frames.into_iter().enumerate() {
        let mut raw = Raw::welcomed(&mut net, 77 + i as u64);
        raw.send(&frame);
        assert_eq!(raw.end(&mut net), Some(Status::Protocol), "frame {i}");
    }
    still_works(&mut net, 10);
}

#[test]
fn a_connection_without_a_complete_hello_is_closed() {
    let mut net = Net::pair(&Config { connect_ms_max: 20, ..config() }, 4 * KIB);
    let mut raw = Raw::to(&net);
    raw.send(&hello(&net, 5, 1).as_bytes()[..47]);
    assert_eq!(raw.receive(&mut net, 1), b"");
    still_works(&mut net, 10);
}

#[test]
fn a_wrong_key_is_refused_however_often_it_is_tried() {
    let mut net = Net::pair(&config(), 4 * KIB);
    let mut raw = Raw::welcomed(&mut net, 5);
    for bit in 0..64 {
        raw.send(&resolve(&net, bit, 1 << bit, 0));
        let answer = raw.receive(&mut net, 24);
        let Ok(Step::Frame(Response::Refused { id, status }, _)) = parse_response(&answer) else {
            panic!("a wrong key was answered with {answer:?}")
        };
        assert_eq!((id, status), (bit, Status::AccessDenied));
    }
    assert_eq!(net.nodes[1].transport.stats().resolves_refused, 64);
    // The connection goes on, and the right key is accepted.
    raw.send(&resolve(&net, 99, 0, 0));
    assert!(matches!(
        parse_response(&raw.receive(&mut net, 60)),
        Ok(Step::Frame(Response::Resolved { .. }, 60))
    ));
    raw.send(&resolve(&net, 100, 0, 1));
    let answer = raw.receive(&mut net, 24);
    assert!(matches!(
        parse_response(&answer),
        Ok(Step::Frame(Response::Refused { status: Status::OutOfRange, .. }, _))
    ));
}

#[test]
fn a_peer_that_has_shown_no_key_gets_no_queue_pair() {
    let mut net = Net::pair(&config(), 4 * KIB);
    let mut raw = Raw::welcomed(&mut net, 5);
    raw.send(&resolve(&net, 1, 1, 0));
    raw.receive(&mut net, 24);
    raw.send(&connect(2, 0..1));
    let answer = raw.receive(&mut net, 24);
    let refused = Response::Refused { id: 2, status: Status::AccessDenied };
    assert_eq!(parse_response(&answer), Ok(Step::Frame(refused, 24)));
    assert_eq!(net.fabric.qp_count(net.ports[1]), 0);
}

#[test]
fn queue_pairs_for_one_peer_are_bounded_and_go_with_its_connection() {
    let mut net = Net::pair(&config(), 4 * KIB);
    let port = net.ports[1];
    let before = net.fabric.qp_count(port);
    let mut raw = Raw::proven(&mut net, 5);
    for round in 0..4_u32 {
        raw.send(&connect(1, round * 16..round * 16 + 16));
        let answer = raw.receive(&mut net, 16 + 32 + 16 * 16);
        assert!(matches!(parse_response(&answer), Ok(Step::Frame(Response::Accept { .. }, _))));
    }
    assert_eq!(net.fabric.qp_count(port), before + 64);
    raw.send(&connect(2, 100..101));
    let answer = raw.receive(&mut net, 24);
    assert!(matches!(
        parse_response(&answer),
        Ok(Step::Frame(Response::Refused { id: 2, status: Status::Full }, _))
    ));
    drop(raw);
    net.drive("its queue pairs are destroyed", |net| net.fabric.qp_count(port) == before);
}

#[test]
fn a_generation_that_is_offered_twice_leaves_no_queue_pair_behind() {
    let mut net = Net::pair(&config(), 4 * KIB);
    let port = net.ports[1];
    let mut raw = Raw::proven(&mut net, 5);
    raw.send(&connect(3, [7, 8, 7].into_iter()));
    let answer = raw.receive(&mut net, 24);
    assert!(matches!(parse_response(&answer), Ok(Step::Frame(Response::Refused { id: 3, .. }, _))));
    assert_eq!(net.fabric.qp_count(port), 0);
}

#[test]
fn a_newer_connection_of_a_session_ends_the_older_one_and_no_older_one_the_newer() {
    let mut net = Net::pair(&config(), 4 * KIB);
    let port = net.ports[1];
    let mut first = Raw::to(&net);
    first.send(hello(&net, 5, 10).as_bytes());
    first.receive(&mut net, 32);
    first.prove(&mut net);
    first.send(&connect(1, 0..4));
    first.receive(&mut net, 16 + 32 + 4 * 16);
    assert_eq!(net.fabric.qp_count(port), 4);
    let mut late = Raw::to(&net);
    late.send(hello(&net, 5, 9).as_bytes());
    assert_eq!(late.end(&mut net), Some(Status::Superseded));
    assert_eq!(net.fabric.qp_count(port), 4);
    let mut newer = Raw::to(&net);
    newer.send(hello(&net, 5, 11).as_bytes());
    assert_eq!(newer.receive(&mut net, 32).len(), 32);
    // When it is welcomed, the queue pairs of the older one are destroyed.
    assert_eq!(net.fabric.qp_count(port), 0);
    assert_eq!(first.receive(&mut net, 1), b"");
}

#[test]
fn a_fence_destroys_the_queue_pairs_that_it_does_not_list() {
    let mut net = Net::pair(&config(), 4 * KIB);
    let port = net.ports[1];
    let mut raw = Raw::proven(&mut net, 5);
    raw.send(&connect(1, 0..6));
    raw.receive(&mut net, 16 + 32 + 6 * 16);
    let live = [U32::new(2), U32::new(4), U32::new(400)];
    raw.send(&[Header::new(Kind::Fence, 3, 42).as_bytes(), live.as_bytes()].concat());
    let answer = raw.receive(&mut net, 16);
    assert_eq!(parse_response(&answer), Ok(Step::Frame(Response::Fenced { id: 42 }, 16)));
    assert_eq!(net.fabric.qp_count(port), 2);
}

#[test]
fn a_flood_of_requests_is_answered_only_as_fast_as_the_answers_are_read() {
    let mut net = Net::pair(&config(), 4 * KIB);
    let mut raw = Raw::welcomed(&mut net, 5);
    let request = Header::new(Kind::Fence, 0, 1);
    let flood = request.as_bytes().repeat(1_000);
    let mut sent = 0;
    // The answers are not read, so the target stops receiving requests.
    for _ in 0..20_000 {
        match raw.stream.write(&flood) {
            Ok(count) => sent += count,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                if sent > 8 << 20 {
                    break;
                }
            }
            Err(error) => panic!("the flood was cut off: {error}"),
        }
        net.step();
        if sent > 64 << 20 {
            panic!("64 MiB of requests were taken without an answer being read");
        }
    }
    still_works(&mut net, 10);
    let mut answers = 0;
    let mut buffer = vec![0; 1 << 20];
    net.drive("an answer is read", |_| {
        answers += raw.stream.read(&mut buffer).unwrap_or(0);
        answers >= 1 << 20
    });
}

#[test]
fn connections_beyond_the_limit_are_refused_with_a_reason() {
    let mut net = Net::pair(&Config { connections_max: 3, ..config() }, 4 * KIB);
    still_works(&mut net, 1);
    let _two = [Raw::welcomed(&mut net, 5), Raw::welcomed(&mut net, 6)];
    let mut one_too_many = Raw::to(&net);
    assert_eq!(one_too_many.end(&mut net), Some(Status::Full));
    still_works(&mut net, 10);
}

fn false_export(address: std::net::SocketAddr, incarnation: u64) -> Vec<u8> {
    let export = Export {
        format: EXPORT_FORMAT,
        rights: 12,
        addresses: [address.ip(); EXPORT_ADDRESSES_MAX],
        address_count: 1,
        port: address.port(),
        incarnation,
        region: 0,
        generation: 1,
        key: 1,
        len: 4_096,
        location: te_core::Location::Host,
    };
    let mut blob = [0; EXPORT_BYTES_MAX];
    let len = export.write(&mut blob).unwrap();
    blob[..len].to_vec()
}

/// Node 0, attached to a fake target: a thread that answers as the test wants.
fn with_false_target(answer: impl FnOnce(TcpStream) + Send + 'static) -> (Net, std::thread::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut net = Net::new(1);
    net.add(&config(), 4 * KIB);
    net.nodes[0].transport.attach(REMOTE, &false_export(address, 5)).unwrap();
    let thread = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        answer(stream);
    });
    (net, thread)
}

fn greet(stream: &mut TcpStream, incarnation: u64) {
    stream.read_exact(&mut [0; 48]).unwrap();
    let welcome = Welcome {
        magic: MAGIC,
        version: U16::new(VERSION),
        reserved: U16::ZERO,
        status: U32::ZERO,
        incarnation: U64::new(incarnation),
        detail: U64::ZERO,
    };
    stream.write_all(welcome.as_bytes()).unwrap();
}

fn ends_with(net: &mut Net, expected: &[ErrorKind]) {
    net.nodes[0].submit(&[write(1, 0, 0, 100)]);
    let end = net.finish(1);
    assert!(expected.contains(&kind(&end)), "{end:?}");
    assert_eq!(end.outcome, Outcome::NotApplied);
}

const PROTOCOL: &[ErrorKind] = &[ErrorKind::Protocol, ErrorKind::PeerDead];

#[test]
fn a_target_with_another_protocol_is_refused() {
    let (mut net, thread) = with_false_target(|mut stream| {
        stream.write_all(b"220 mail.example ESMTP\r\n 32 bytes and more").unwrap();
        let _ = stream.read(&mut [0; 64]);
    });
    ends_with(&mut net, PROTOCOL);
    thread.join().unwrap();
}

#[test]
fn a_target_with_another_incarnation_gets_no_request() {
    let (mut net, thread) = with_false_target(|mut stream| {
        greet(&mut stream, 6);
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert!(rest.is_empty(), "it got {} bytes of requests", rest.len());
    });
    ends_with(&mut net, &[ErrorKind::PeerRestarted]);
    thread.join().unwrap();
}

#[test]
fn answers_without_a_request_end_the_connection() {
    for answer in [Kind::Fenced, Kind::Refused] {
        let (mut net, thread) = with_false_target(move |mut stream| {
            greet(&mut stream, 5);
            let mut request = [0; 40];
            stream.read_exact(&mut request).unwrap();
            // Ids that were never used.
            let header = Header::new(answer, 0, u64::MAX);
            let body = Refusal::new(Status::NotFound);
            let body = if answer == Kind::Refused { body.as_bytes() } else { &[] };
            let _ = stream.write_all(&[header.as_bytes(), body].concat());
            let _ = stream.read(&mut [0; 64]);
        });
        ends_with(&mut net, PROTOCOL);
        thread.join().unwrap();
    }
}

#[test]
fn keys_that_do_not_fit_the_region_are_refused() {
    let (mut net, thread) = with_false_target(|mut stream| {
        greet(&mut stream, 5);
        let mut request = [0; 40];
        stream.read_exact(&mut request).unwrap();
        let (header, _) = Header::read_from_prefix(&request).unwrap();
        // The second half of a list of which the first half was never sent.
        let body = Resolved {
            base: U64::new(0x1000),
            len: U64::new(0x2000),
            chunk_bytes: U64::new(0x1000),
            chunks: U32::new(2),
            first: U32::new(1),
            rights: 12,
            reserved: [0; 7],
        };
        let answer = Header::new(Kind::Resolved, 1, header.id.get());
        let _ = stream.write_all(&[answer.as_bytes(), body.as_bytes(), &[1, 2, 3, 4]].concat());
        let _ = stream.read(&mut [0; 64]);
    });
    ends_with(&mut net, PROTOCOL);
    thread.join().unwrap();
}

#[test]
fn a_target_that_does_not_answer_is_given_up() {
    let (mut net, thread) = with_false_target(|mut stream| {
        greet(&mut stream, 5);
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    });
    ends_with(&mut net, &[ErrorKind::PeerDead]);
    // Without its confirmation, the outcome of a fence is unknown.
    net.nodes[0].transport.fence(te_core::Token(2), REMOTE).unwrap();
    assert_eq!(net.finish(2).outcome, Outcome::Unknown);
    drop(net);
    thread.join().unwrap();
}

#[test]
fn an_answer_of_another_kind_than_the_request_ends_the_connection() {
    for answer in [Kind::Fenced, Kind::Refused] {
        let (mut net, thread) = with_false_target(move |mut stream| {
            // It ends when the initiator closes the connection.
            stream.set_read_timeout(None).unwrap();
            greet(&mut stream, 5);
            let mut request = [0; 40];
            stream.read_exact(&mut request).unwrap();
            let (header, _) = Header::read_from_prefix(&request).unwrap();
            // FENCED as the answer to a RESOLVE; REFUSED with the id of an earlier request that does not
            // exist.
            let (id, body) = match answer {
                Kind::Refused => (header.id.get() - (1 << 24), Refusal::new(Status::NotFound)),
                _ => (header.id.get(), Refusal::new(Status::NotFound)),
            };
            let header = Header::new(answer, 0, id);
            let body = if answer == Kind::Refused { body.as_bytes() } else { &[] };
            for _ in 0..2 {
                let _ = stream.write_all(&[header.as_bytes(), body].concat());
            }
            let _ = stream.read_to_end(&mut Vec::new());
        });
        ends_with(&mut net, PROTOCOL);
        drop(net);
        thread.join().unwrap();
    }
}

#[test]
fn a_target_that_welcomes_and_closes_is_not_tried_again_without_limit() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut net = Net::new(1);
    net.add(&config(), 4 * KIB);
    let blob = false_export(listener.local_addr().unwrap(), 5);
    net.nodes[0].transport.attach(REMOTE, &blob).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().take(200) {
            greet(&mut stream.unwrap(), 5);
        }
    });
    ends_with(&mut net, PROTOCOL);
    let attempts = net.nodes[0].transport.stats().connections_opened;
    assert!(attempts < 10, "{attempts} attempts");
}

#[test]
fn sessions_with_two_targets_differ() {
    let (first, second) =
        (TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
    let mut net = Net::new(1);
    net.add(&config(), 4 * KIB);
    let mut session = |listener: &TcpListener, remote: u32, incarnation: u64| {
        let blob = false_export(listener.local_addr().unwrap(), incarnation);
        let id = te_core::RemoteRegionId::new(remote, 1);
        net.nodes[0].transport.attach(id, &blob).unwrap();
        let slice = write(u64::from(remote), 0, 0, 1);
        net.nodes[0].submit(&[te_core::Slice { remote: RemoteOffset::new(id, 0), ..slice }]);
        net.step();
        let (mut stream, _) = listener.accept().unwrap();
        let mut came = [0; 48];
        net.step();
        stream.read_exact(&mut came).unwrap();
        Hello::read_from_bytes(&came).unwrap().session.get()
    };
    // A newer connection of a session ends the older one, so one target must not know the session with
    // another.
    assert_ne!(session(&first, 1, 5), session(&second, 2, 6));
}

#[test]
fn a_flood_of_queue_pairs_is_served_a_few_at_a_time() {
    let mut net = Net::pair(&config(), 4 * KIB);
    let mut raw = Raw::proven(&mut net, 5);
    let fence = Header::new(Kind::Fence, 0, 3);
    let pair = [connect(2, 0..16), fence.as_bytes().to_vec()].concat();
    for round in 0..2 {
        raw.send(&pair.repeat(20));
        let mut answers = 0;
        for _ in 0..1_000 {
            let before = net.nodes[1].transport.stats().peer_qps_made;
            net.step();
            let made = net.nodes[1].transport.stats().peer_qps_made - before;
            assert!(made <= 16, "{made} queue pairs in one poll");
            answers += raw.stream.read(&mut [0; 65_536]).unwrap_or(0);
        }
        assert_eq!(answers, 20 * (16 + 32 + 256 + 16), "round {round}");
    }
    still_works(&mut net, 10);
}

#[test]
fn peers_cannot_take_every_queue_pair_that_the_device_has() {
    let mut net = Net::new(1);
    let device = te_rdma::sim::DeviceConfig { qp_count_max: 16, ..Default::default() };
    net.add(&config(), 4 * KIB);
    net.add_device(device, &config(), 4 * KIB);
    net.attach(0, REMOTE, 1, REGION);
    net.attach(1, REMOTE, 0, REGION);
    let mut greedy = Raw::proven(&mut net, 5);
    for (id, generations) in [(1, 0..4), (2, 4..8), (3, 8..12)] {
        greedy.send(&connect(id, generations));
        let answer = greedy.receive(&mut net, if id == 3 { 24 } else { 16 + 32 + 4 * 16 });
        let full = matches!(
            parse_response(&answer),
            Ok(Step::Frame(Response::Refused { status: Status::Full, .. }, _))
        );
        assert_eq!(full, id == 3);
    }
    // The others are reserved for its own work.
    net.nodes[1].submit(&[write(1, 0, 0, 100)]);
    net.drive("it reaches a peer", |net| net.nodes[1].ended(1).is_some());
    assert_eq!(net.nodes[1].ended(1).unwrap().result, Ok(()));
}
