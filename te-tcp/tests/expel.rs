//! An initiator that is expelled: nothing of it lands any more, whatever its bytes wait in, and other peers
//! are not affected.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::io::Write;
use std::time::Duration;

use common::raw::{Raw, frame_of};
use common::{REMOTE, by_peers, drive, finish, kind, linger, pair, skip, users, write};
use te_core::{Completion, EXPELLED_MAX, ErrorKind, ExpelMode, Memory, Outcome, Token, Transport};
use te_tcp::Config;
use te_tcp::frame::{self, Kind, Status, Step};
use zerocopy::IntoBytes;

const BYTES: usize = 1 << 20;

#[test]
fn what_lies_in_the_socket_of_an_expelled_peer_never_lands() {
    let mut target = common::node(common::config(), BYTES);
    let (mut writer, mut other) = (Raw::greeted(&mut target, 1, 0), Raw::greeted(&mut target, 2, 0));
    for raw in [&mut writer, &mut other] {
        raw.send(&mut target, &frame_of(Kind::Write, 0, 0, &[raw.operation(0, 1_000)]));
        raw.send(&mut target, &[1; 400]);
    }
    linger(&mut [&mut target], Duration::from_millis(20));
    assert_eq!(users(&target), by_peers(2));
    // The rest of the payload, and another WRITE, are in the target's socket buffer.
    writer.stream.write_all(&[2; 600]).unwrap();
    writer.stream.write_all(&frame_of(Kind::Write, 0, 1, &[writer.operation(0, 1_000)])).unwrap();
    writer.stream.write_all(&[3; 1_000]).unwrap();
    assert_eq!(
        target.transport.expel(2, ExpelMode::SpareConnected),
        Err(ErrorKind::Busy.into()),
        "it has a connection"
    );
    assert_eq!(target.transport.expel(2, ExpelMode::Force), Ok(true));
    assert_eq!(users(&target), by_peers(1), "the other WRITE is not affected");
    target.memory.set(0, &[7; 1_000]);
    linger(&mut [&mut target], Duration::from_millis(50));
    assert_eq!(target.memory.get(0, 1_000), [7; 1_000]);

    // It comes back on three connections, and learns why it is refused.
    for connection in 0..3 {
        let mut again = Raw::new(&target);
        let hello = again.hello(1, connection);
        again.send(&mut target, hello.as_bytes());
        let Ok(Step::Frame(welcome, _)) = frame::parse_welcome(&again.receive_rest(&mut target)) else {
            panic!()
        };
        assert_eq!(welcome.status.get(), Status::Expelled as u32);
    }
    other.send(&mut target, &[1; 600]);
    assert_eq!(
        other.receive(&mut target, 20)[16..],
        [0; 4],
        "the other peer continues in the middle of its payload"
    );
    assert!(target.transport.is_connected(3) && !target.transport.is_connected(2));
}

#[test]
fn a_peer_without_a_connection_is_refused_when_it_comes() {
    let (mut a, mut target) = pair(&Config { identity: 77, ..common::config() }, BYTES);
    assert_eq!(a.transport.identity(), 77);
    assert_eq!(target.transport.expel(0, ExpelMode::Force), Err(ErrorKind::InvalidArgument.into()));
    assert_eq!(target.transport.expel(77, ExpelMode::SpareConnected), Ok(true));
    assert_eq!(
        target.transport.expel(77, ExpelMode::SpareConnected),
        Ok(true),
        "a second time changes nothing"
    );
    for token in 1..4 {
        a.submit(&[write(token, 0, 0, 8)]);
        let end = finish(&mut [&mut a, &mut target], token);
        assert_eq!((kind(&end), end.outcome), (ErrorKind::Expelled, Outcome::NotApplied));
    }
    // The target has confirmed that nothing of this initiator lands any more.
    a.transport.fence(Token(9), REMOTE).unwrap();
    assert_eq!(finish(&mut [&mut a, &mut target], 9), Completion::applied(Token(9)));
    // The expulsion concerns what `a` initiates at this target. The target may still write to it.
    a.transport.detach(REMOTE).unwrap();
    target.attach(&a);
    target.submit(&[write(1, 0, 0, 8)]);
    assert!(finish(&mut [&mut target, &mut a], 1).result.is_ok());
}

#[test]
fn a_peer_that_was_sent_away_for_being_idle_is_not_taken_for_a_dead_one() {
    let (mut a, mut target) = pair(&Config { identity: 77, ..common::config() }, BYTES);
    a.transport.fence(Token(1), REMOTE).unwrap();
    finish(&mut [&mut a, &mut target], 1);
    // Its connection has never carried anything.
    skip(Duration::from_secs(6));
    drive(&mut [&mut target, &mut a], |target| target.transport.connections() == 0);
    assert_eq!(target.transport.expel(77, ExpelMode::SpareConnected), Err(ErrorKind::Busy.into()));
    a.submit(&[write(2, 0, 0, 8)]);
    assert!(finish(&mut [&mut a, &mut target], 2).result.is_ok());
    // It closes the connection itself.
    drop(a);
    drive(&mut [&mut target], |target| target.transport.connections() == 0);
    assert_eq!(target.transport.expel(77, ExpelMode::SpareConnected), Ok(true));
}

#[test]
fn the_expelled_are_counted_and_there_is_a_limit() {
    let mut target = common::node(common::config(), BYTES);
    for identity in 1..=EXPELLED_MAX as u64 {
        assert_eq!(target.transport.expel(identity, ExpelMode::SpareConnected), Ok(true));
    }
    let one_more = EXPELLED_MAX as u64 + 1;
    let mut raw = Raw::greeted(&mut target, one_more - 1, 0);
    assert_eq!(target.transport.expel(one_more, ExpelMode::Force), Err(ErrorKind::Full.into()));
    assert!(raw.is_alive(&mut target), "nothing has changed for it");
    assert_eq!(target.transport.expel(5, ExpelMode::Force), Ok(true), "an expelled peer needs no more room");
}
