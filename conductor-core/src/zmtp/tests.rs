//! The bytes of greeting and handshake, and hostile input.

use alloc::vec;
use alloc::vec::Vec;

use te_core::Instant;

use super::*;

const NOW: Instant = Instant::ZERO;

fn connection(kind: Kind) -> Connection {
    Connection::new(kind, Limits::default(), b"", NOW)
}

/// The bytes of a peer of libzmq 4.3.5 up to the end of its handshake.
fn peer(kind: &str, minor: u8) -> Vec<u8> {
    let mut bytes = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, minor];
    bytes.extend_from_slice(b"NULL");
    bytes.resize(GREETING_BYTES, 0);
    wire::put_command(
        &mut bytes,
        "READY",
        &[b"\x0bSocket-Type", &(kind.len() as u32).to_be_bytes(), kind.as_bytes()],
    );
    bytes
}

/// What became of `bytes` that arrive in pieces of `piece` bytes: the messages, or the error.
fn fed(connection: &mut Connection, bytes: &[u8], piece: usize) -> Result<Vec<Vec<Vec<u8>>>, Error> {
    let mut messages = Vec::new();
    for bytes in bytes.chunks(piece) {
        connection.receive(NOW, bytes);
        while let Some(event) = connection.next()? {
            if let Event::Message(message) = event {
                messages.push(message.iter().map(<[u8]>::to_vec).collect());
            }
        }
    }
    Ok(messages)
}

fn refused(kind: Kind, bytes: &[u8]) -> Error {
    let error = fed(&mut connection(kind), bytes, bytes.len()).unwrap_err();
    // In single bytes it is the same error, and it stays.
    let mut again = connection(kind);
    assert_eq!(fed(&mut again, bytes, 1).unwrap_err(), error);
    assert_eq!(again.next().unwrap_err(), error);
    error
}

#[test]
fn greeting_and_ready_are_those_of_the_specification() {
    let dealer = Connection::new(Kind::Dealer, Limits::default(), b"me", NOW);
    let mut expected = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 1];
    expected.extend_from_slice(b"NULL");
    expected.resize(64, 0);
    expected.extend_from_slice(b"\x04\x2b\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\x02me");
    assert_eq!(dealer.output(), expected);
    let subscriber = connection(Kind::Sub);
    assert_eq!(&subscriber.output()[64..], b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB");
}

#[test]
fn subscriptions_follow_the_peers_version() {
    for (minor, expected) in [(1, &b"\x04\x0c\x09SUBSCRIBEkv"[..]), (0, b"\x00\x03\x01kv")] {
        let mut subscriber = connection(Kind::Sub);
        subscriber.subscribe(b"kv");
        subscriber.wrote(subscriber.output().len());
        fed(&mut subscriber, &peer("PUB", minor), 1).unwrap();
        assert!(subscriber.is_open());
        assert_eq!(subscriber.output(), expected);
        let mut publisher = connection(Kind::Pub);
        fed(&mut publisher, &peer("SUB", minor), 7).unwrap();
        assert_eq!(publisher.send(&[b"kv@1", b""]), Sent::NotSubscribed);
        fed(&mut publisher, expected, 1).unwrap();
        assert_eq!(publisher.send(&[b"kv@1", b""]), Sent::Queued);
        assert_eq!(publisher.send(&[b"load", b""]), Sent::NotSubscribed);
        let cancel: &[u8] = if minor == 1 { b"\x04\x09\x06CANCELkv" } else { b"\x00\x03\x00kv" };
        fed(&mut publisher, cancel, 3).unwrap();
        assert_eq!(publisher.send(&[b"kv@1", b""]), Sent::NotSubscribed);
    }
}

#[test]
fn messages_arrive_whole_in_pieces_of_any_size() {
    let long = vec![7; 70_000];
    let sent: [&[&[u8]]; 4] = [&[b"topic", b"12345678", &long], &[b""], &[b"", b"", b"x"], &[&long, &long]];
    let mut bytes = peer("PUB", 1);
    for parts in sent {
        put_message(&mut bytes, parts);
        wire::put_command(&mut bytes, "LATER", &[b"unknown commands are ignored"]);
    }
    for piece in [1, 2, 3, 64, 1_000, 65_536, bytes.len()] {
        let got = fed(&mut connection(Kind::Sub), &bytes, piece).unwrap();
        assert!(got == sent.map(<[&[u8]]>::to_vec), "pieces of {piece}");
    }
}

#[test]
fn a_heartbeat_between_two_parts_does_not_tear_the_message() {
    let mut bytes = peer("PUB", 1);
    bytes.extend_from_slice(b"\x01\x01a\x04\x09\x04PING\0\x1ehi\x01\x01b\x00\x01c");
    let mut subscriber = connection(Kind::Sub);
    let got = fed(&mut subscriber, &bytes, 1).unwrap();
    assert_eq!(got, [[b"a", b"b", b"c"]]);
    assert!(subscriber.output().ends_with(b"\x04\x07\x04PONGhi"), "{:?}", subscriber.output());
}

#[test]
fn what_is_not_zmtp_is_refused_at_its_first_wrong_byte() {
    assert_eq!(refused(Kind::Sub, b"GET / HTTP/1.1\r\n"), Error::NotZmtp);
    assert_eq!(refused(Kind::Sub, &[0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7e]), Error::NotZmtp);
    let old = [0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 1];
    assert_eq!(refused(Kind::Sub, &old), Error::Version { major: 1 });
    let mut curve = peer("PUB", 1);
    curve[12..17].copy_from_slice(b"CURVE");
    let text = refused(Kind::Sub, &curve).to_string();
    assert_eq!(text, "the peer demands the mechanism CURVE; only NULL is supported: turn it off there");
}

#[test]
fn a_handshake_that_does_not_fit_is_refused() {
    let router = peer("ROUTER", 1);
    let text = refused(Kind::Sub, &router).to_string();
    assert_eq!(text, "the peer is a ROUTER socket, which does not go with SUB: check the port");
    let greeting = &router[..GREETING_BYTES];
    for (frame, expected) in [
        (&b"\x04\x06\x05ERROR"[..], Error::Refused),
        (b"\x00\x01x", Error::Flags(0)),
        (b"\x04\x00", Error::Command("it has no name")),
        (b"\x04\x03\x05RE", Error::Command("its name is empty or longer than the command")),
        (b"\x04\x05\x04PONG", Error::Command("the first command is not READY")),
        (b"\x04\x06\x05READY", Error::Command("READY does not name a socket type")),
        (b"\x04\x08\x05READY\x0bS", Error::Command("a property of READY is cut off")),
        (b"\x04\x0c\x05READY\x01S\xff\xff\xff\xff", Error::Command("a property of READY is cut off")),
        (b"\x08\x00", Error::Flags(8)),
        (b"\x05\x00", Error::Flags(5)),
    ] {
        let bytes = [greeting, frame].concat();
        assert_eq!(refused(Kind::Sub, &bytes), expected, "{frame:?}");
    }
}

#[test]
fn lengths_and_counts_are_refused_before_they_are_buffered() {
    let limits = Limits { part_bytes_max: 100, message_bytes_max: 150, parts_max: 3, ..Limits::default() };
    let feed = |bytes: &[u8]| {
        let mut subscriber = Connection::new(Kind::Sub, limits, b"", NOW);
        fed(&mut subscriber, &peer("PUB", 1), 64).unwrap();
        fed(&mut subscriber, bytes, 1)
    };
    let huge = [2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
    assert_eq!(feed(&huge), Err(Error::TooLong { bytes: u64::MAX, bytes_max: 100 }));
    assert_eq!(feed(&[0, 101]), Err(Error::TooLong { bytes: 101, bytes_max: 100 }));
    let mut two = vec![1, 100];
    two.resize(102, 0);
    two.extend_from_slice(&[0, 51]);
    assert_eq!(feed(&two), Err(Error::TooLong { bytes: 151, bytes_max: 150 }));
    assert_eq!(feed(&[1, 0, 1, 0, 1, 0, 0, 0]), Err(Error::TooManyParts { parts_max: 3 }));
    assert_eq!(feed(&[6, 0, 0, 0, 0, 0, 1, 0, 1]), Err(Error::TooLong { bytes: 65_537, bytes_max: 65_536 }));
    // Commands between parts stay in the buffer, so their sum is limited.
    let mut flood = vec![1, 0];
    (0..2_000).for_each(|_| wire::put_command(&mut flood, "X", &[&[0; 90]]));
    assert!(matches!(feed(&flood), Err(Error::TooLong { bytes_max: 65_536, .. })));
}

#[test]
fn a_peer_that_subscribes_without_end_is_refused() {
    let limits = Limits { subscriptions_max: 2, ..Limits::default() };
    let mut publisher = Connection::new(Kind::Pub, limits, b"", NOW);
    fed(&mut publisher, &peer("SUB", 0), 64).unwrap();
    fed(&mut publisher, b"\x00\x02\x01a\x00\x02\x01b", 4).unwrap();
    let error = fed(&mut publisher, b"\x00\x02\x01c", 4);
    assert_eq!(error, Err(Error::TooManySubscriptions { subscriptions_max: 2 }));
    // A message may be long, a topic not: all of them are kept.
    let mut publisher = Connection::new(Kind::Pub, Limits::default(), b"", NOW);
    fed(&mut publisher, &peer("SUB", 0), 64).unwrap();
    let mut long = Vec::new();
    wire::put_message(&mut long, &[&[1; 4_098]]);
    let error = fed(&mut publisher, &long, long.len());
    assert_eq!(error, Err(Error::TooLong { bytes: 4_097, bytes_max: 4_096 }));
}

#[test]
fn a_peer_that_does_not_read_fills_the_output_and_no_more() {
    let limits = Limits { output_bytes_max: 1_000, ..Limits::default() };
    let mut router = Connection::new(Kind::Router, limits, b"", NOW);
    assert_eq!(router.send(&[b"x"]), Sent::NotReady);
    fed(&mut router, &peer("DEALER", 1), 64).unwrap();
    while router.send(&[b"", &[0; 90]]) == Sent::Queued {}
    assert_eq!(router.send(&[b"", &[0; 90]]), Sent::Full);
    assert!((900..=1_000).contains(&router.output().len()));
    let ping = b"\x04\x07\x04PING\0\x1e".repeat(1_000);
    fed(&mut router, &ping, ping.len()).unwrap();
    assert!(router.output().len() < 1_100);
}

#[test]
fn silence_after_a_heartbeat_is_a_lost_peer() {
    let at = Instant::from_millis;
    let mut subscriber = connection(Kind::Sub);
    assert_eq!(subscriber.tick_at(), Some(at(10_000)));
    assert_eq!(subscriber.tick(at(10_000)), Err(Error::HandshakeTimeout));
    fed(&mut subscriber, &peer("PUB", 1), 64).unwrap();
    assert_eq!(subscriber.tick_at(), Some(at(1_000)));
    subscriber.wrote(usize::MAX);
    subscriber.tick(at(1_000)).unwrap();
    assert_eq!(subscriber.output(), b"\x04\x07\x04PING\0\x1e");
    subscriber.tick(at(2_500)).unwrap();
    subscriber.receive(at(2_600), b"\x04\x05\x04PONG");
    assert_eq!(subscriber.next(), Ok(None));
    assert_eq!(subscriber.tick(at(4_000)), Ok(()));
    assert_eq!(subscriber.tick(at(6_999)), Ok(()));
    assert_eq!(subscriber.tick(at(7_000)), Err(Error::Lost));
}

#[test]
fn a_peer_of_an_older_version_gets_heartbeats_once_it_sent_one() {
    let at = Instant::from_millis;
    let mut subscriber = connection(Kind::Sub);
    fed(&mut subscriber, &peer("PUB", 0), 64).unwrap();
    assert_eq!(subscriber.tick_at(), None);
    fed(&mut subscriber, b"\x04\x07\x04PING\0\x0a", 64).unwrap();
    assert_eq!(subscriber.tick_at(), Some(at(1_000)));
    // The peer announced that it closes after a second, and so do we.
    assert_eq!(subscriber.tick(at(1_000)), Err(Error::Lost));
    assert_eq!(refused(Kind::Sub, &[&peer("PUB", 1)[..], b"\x04\x06\x04PING\0"].concat()).to_string(), {
        "a command is malformed: PING has no time to live"
    });
}

#[test]
fn a_warm_connection_keeps_its_buffers() {
    let mut subscriber = connection(Kind::Sub);
    fed(&mut subscriber, &peer("PUB", 1), 64).unwrap();
    let mut bytes = Vec::new();
    put_message(&mut bytes, &[b"topic", &[0; 8], &[1; 3_000]]);
    let mut at = Vec::new();
    for _ in 0..1_000 {
        let space = subscriber.space();
        at.push((space.as_ptr(), space.len()));
        space[..bytes.len()].copy_from_slice(&bytes);
        subscriber.filled(NOW, bytes.len());
        assert!(matches!(subscriber.next(), Ok(Some(Event::Message(message))) if message.len() == 3));
        assert_eq!(subscriber.next(), Ok(None));
    }
    assert!(at[1..].iter().all(|space| *space == at[1]));
}
