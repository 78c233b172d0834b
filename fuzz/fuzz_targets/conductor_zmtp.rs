//! ZMTP: what a peer sends has the same meaning in pieces of any size, stays within the limits, and never
//! lets the connection send more than its limit.
#![no_main]

use std::time::Duration;

use conductor_core::zmtp::{Connection, Event, GREETING_BYTES, Kind, Limits, greeting};
use libfuzzer_sys::fuzz_target;
use te_core::Instant;

const LIMITS: Limits = Limits {
    part_bytes_max: 4_096,
    message_bytes_max: 8_192,
    parts_max: 5,
    output_bytes_max: 4_096,
    subscriptions_max: 8,
    handshake_timeout: Duration::from_secs(1),
    heartbeat_interval: Duration::from_secs(1),
    heartbeat_timeout: Duration::from_secs(3),
};
const NOW: Instant = Instant::ZERO;
/// What may wait beside messages: greeting, READY, and the answer to a PING.
const REST_BYTES_MAX: usize = 512;

/// Everything that the connection makes of `bytes`, as text.
fn meaning(kind: Kind, start: &[u8], bytes: &[u8], piece: usize) -> Vec<String> {
    let mut connection = Connection::new(kind, LIMITS, b"id", NOW);
    connection.subscribe(b"topic");
    let mut seen = Vec::new();
    for bytes in [start].into_iter().chain(bytes.chunks(piece)) {
        connection.receive(NOW, bytes);
        loop {
            match connection.next() {
                Ok(Some(event)) => {
                    if let Event::Message(message) = event {
                        assert!((1..=LIMITS.parts_max).contains(&message.len()));
                        let total: usize = message.iter().map(<[u8]>::len).sum();
                        assert!(total <= LIMITS.message_bytes_max);
                    }
                    seen.push(format!("{:?}", described(event)));
                }
                Ok(None) => break,
                Err(error) => {
                    seen.push(error.to_string());
                    return seen;
                }
            }
        }
        assert!(connection.output().len() <= LIMITS.output_bytes_max + REST_BYTES_MAX);
        assert!(connection.tick_at().is_none_or(|at| at > NOW));
    }
    seen
}

/// An event without where it is in memory.
fn described(event: Event<'_>) -> (u8, Vec<Vec<u8>>) {
    match event {
        Event::Ready { identity } => (0, vec![identity.to_vec()]),
        Event::Message(message) => (1, message.iter().map(<[u8]>::to_vec).collect()),
        Event::Subscribed(topic) => (2, vec![topic.to_vec()]),
        Event::Unsubscribed(topic) => (3, vec![topic.to_vec()]),
    }
}

fuzz_target!(|bytes: &[u8]| {
    let [which, piece, bytes @ ..] = bytes else { return };
    let (kind, peer) = [
        (Kind::Pub, "SUB"),
        (Kind::Sub, "PUB"),
        (Kind::Dealer, "ROUTER"),
        (Kind::Router, "DEALER"),
        (Kind::Req, "ROUTER"),
    ][usize::from(which % 5)];
    // Most inputs begin behind the handshake, which is hard to guess.
    let mut start = Vec::new();
    if which / 5 % 4 != 0 {
        start.extend_from_slice(&greeting()[..GREETING_BYTES]);
    }
    if which / 5 % 4 > 1 {
        start.extend_from_slice(&[4, 6 + 16 + peer.len() as u8, 5]);
        start.extend_from_slice(b"READY\x0bSocket-Type\0\0\0");
        start.push(peer.len() as u8);
        start.extend_from_slice(peer.as_bytes());
    }
    let whole = meaning(kind, &start, bytes, bytes.len().max(1));
    assert_eq!(meaning(kind, &start, bytes, usize::from(*piece).max(1)), whole);
    assert_eq!(meaning(kind, &start, bytes, 1), whole);
});
