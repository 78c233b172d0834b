//! Another transport listens at one of a peer's addresses: it has another incarnation, and its answers say
//! nothing about the peer.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::time::Duration;

use common::{Node, REMOTE, by_peers, finish, kind, linger, users, write};
use te_core::{Completion, ErrorKind, Memory, Outcome, Token, Transport};
use te_tcp::{Config, frame};

fn config(bind: &str) -> Config {
    Config {
        bind: bind.parse().unwrap(),
        connect_ms_max: 200,
        peer_silence_ms_max: 300,
        reconnect_ms_max: 10,
        ..common::config()
    }
}

/// A target, another transport with the target's port at another address, and an export that carries both
/// addresses.
fn two_addresses() -> (Node, Node, Vec<u8>) {
    for _ in 0..20 {
        let target = common::node(config("127.0.0.1:0"), 4_096);
        let port = target.transport.local_address().port();
        let bind = format!("127.0.0.2:{port}");
        if std::net::TcpListener::bind(&bind).is_err() {
            continue;
        }
        let other = common::node(config(&bind), 4_096);
        let mut export = frame::parse_export(&target.export()).unwrap();
        export.addresses[1] = "127.0.0.2".parse().unwrap();
        export.address_count = 2;
        let mut blob = vec![0; frame::EXPORT_BYTES_MAX];
        let len = export.write(&mut blob).unwrap();
        blob.truncate(len);
        return (target, other, blob);
    }
    panic!("no port is free at both addresses");
}

#[test]
fn a_peer_with_another_incarnation_does_not_complete_a_fence() {
    let (mut target, mut other, blob) = two_addresses();
    let mut a = common::node(config("127.0.0.1:0"), 4_096);
    a.transport.attach(REMOTE, &blob).unwrap();
    a.submit(&[write(1, 0, 0, 8)]);
    assert!(finish(&mut [&mut a, &mut target], 1).result.is_ok());

    // The target is not polled while a WRITE is in its socket.
    a.memory.set(0, &[7; 8]);
    a.submit(&[write(2, 0, 0, 8)]);
    let away = finish(&mut [&mut a, &mut other], 2);
    assert_eq!((kind(&away), away.outcome), (ErrorKind::PeerDead, Outcome::Unknown));
    for token in 3..6 {
        a.transport.fence(Token(token), REMOTE).unwrap();
        let fence = finish(&mut [&mut a, &mut other], token);
        assert_eq!((kind(&fence), fence.outcome), (ErrorKind::PeerDead, Outcome::Unknown));
    }

    // It is polled again, and neither it nor its remote region is lost.
    a.transport.fence(Token(6), REMOTE).unwrap();
    assert_eq!(finish(&mut [&mut a, &mut target, &mut other], 6), Completion::applied(Token(6)));
    target.memory.set(0, &[9; 8]);
    linger(&mut [&mut a, &mut target], Duration::from_millis(20));
    assert_eq!(target.memory.get(0, 8), [9; 8], "nothing older lands after the fence");
}

#[test]
fn a_peer_that_was_removed_is_not_taken_for_one_never_met() {
    let (mut target, mut other, blob) = two_addresses();
    let mut a = common::node(config("127.0.0.1:0"), 4_096);
    a.transport.attach(REMOTE, &blob).unwrap();
    a.submit(&[write(1, 0, 0, 8)]);
    assert!(finish(&mut [&mut a, &mut target], 1).result.is_ok());
    a.submit(&[write(2, 0, 0, 8)]);
    assert!(finish(&mut [&mut a, &mut other], 2).result.is_err());
    a.transport.detach(REMOTE).unwrap();
    a.transport.attach(REMOTE, &blob).unwrap();
    a.transport.fence(Token(3), REMOTE).unwrap();
    assert_eq!(finish(&mut [&mut a, &mut other], 3).outcome, Outcome::Unknown);
}

#[test]
fn a_peer_never_met_has_nothing_to_fence() {
    let (target, mut other, blob) = two_addresses();
    drop(target);
    let mut a = common::node(config("127.0.0.1:0"), 4_096);
    a.transport.attach(REMOTE, &blob).unwrap();
    a.submit(&[write(1, 0, 0, 8)]);
    let end = finish(&mut [&mut a, &mut other], 1);
    assert_eq!((kind(&end), end.outcome), (ErrorKind::PeerDead, Outcome::NotApplied));
    a.transport.fence(Token(2), REMOTE).unwrap();
    assert_eq!(finish(&mut [&mut a, &mut other], 2), Completion::applied(Token(2)));
    assert_eq!(users(&other), by_peers(0));
}
