//! Cancels, fences, regions that are withdrawn, and peers that stop: what the contract promises in case of
//! failure.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::net::TcpListener;
use std::time::Duration;

use common::raw::export_of;
use common::{
    Node, REGION, REMOTE, by_peers, drive, finish, kind, linger, now, pair, pattern, read, users, write,
};
use te_core::{
    Completion, ErrorKind, Memory, Outcome, RegionId, RemoteOffset, RemoteRegionId, Token, Transport,
};
use te_tcp::frame::{DataEntry, FLAG_CHECKSUM, Header, Kind, MAGIC, VERSION, Welcome};
use te_tcp::{Config, TcpTransport};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

const MIB: u32 = 1 << 20;

/// Small socket buffers: bytes that do not fit stay in the transport.
fn tight() -> Config {
    Config { send_buffer_bytes: Some(65_536), receive_buffer_bytes: Some(65_536), ..common::config() }
}

/// Opens the connection, so that what follows concerns slices alone.
fn connect(a: &mut Node, b: &mut Node) {
    a.submit(&[read(u64::MAX, 0, 0, 1)]);
    assert!(finish(&mut [a, b], u64::MAX).result.is_ok());
}

/// Polls one side alone until it has done what it can.
fn exhaust(node: &mut Node) {
    linger(&mut [node], Duration::from_millis(30));
}

#[test]
fn a_slice_cancelled_before_it_is_sent_was_not_applied() {
    let (mut a, mut b) = pair(&common::config(), 1 << 20);
    a.memory.paint(1);
    a.submit(&[write(1, 0, 0, 100), read(2, 200, 200, 100)]);
    a.transport.cancel(Token(1)).unwrap();
    a.transport.cancel(Token(2)).unwrap();
    assert_eq!(a.transport.cancel(Token(3)), Err(ErrorKind::NotFound.into()));
    for token in [1, 2] {
        let end = finish(&mut [&mut a, &mut b], token);
        assert_eq!(
            (kind(&end), end.outcome, end.fence_needed),
            (ErrorKind::Canceled, Outcome::NotApplied, false)
        );
    }
    linger(&mut [&mut a, &mut b], Duration::from_millis(20));
    assert_eq!(b.memory.get(0, 100), [0; 100]);
    assert_eq!(a.transport.slices_in_flight(), 0);
}

#[test]
fn a_write_cancelled_behind_a_full_socket_was_not_applied() {
    let (mut a, mut b) = pair(&tight(), 16 << 20);
    connect(&mut a, &mut b);
    a.memory.paint(1);
    a.submit(&[write(1, 0, 0, 8 * MIB), write(2, 0, 15 << 20, 1_000), read(3, 0, 0, 10)]);
    exhaust(&mut a);
    a.transport.cancel(Token(2)).unwrap();
    assert_eq!(finish(&mut [&mut a], 2).outcome, Outcome::NotApplied);
    assert!(finish(&mut [&mut a, &mut b], 1).result.is_ok());
    assert!(finish(&mut [&mut a, &mut b], 3).result.is_ok());
    assert_eq!(b.memory.get(15 << 20, 1_000), [0; 1_000]);
}

#[test]
fn a_framed_write_that_is_taken_back_leaves_its_neighbours_alone() {
    // One frame with a large WRITE and many small ones; the socket takes only its beginning.
    let (mut a, mut b) = pair(&tight(), 16 << 20);
    connect(&mut a, &mut b);
    a.memory.paint(1);
    let mut slices = vec![write(0, 0, 0, MIB)];
    slices.extend((1..=200).map(|i| write(i, i * 1_000, (8 << 20) + i * 1_000, 1_000)));
    a.submit(&slices);
    exhaust(&mut a);
    for token in (1..=200).step_by(2) {
        a.transport.cancel(Token(token)).unwrap();
    }
    drive(&mut [&mut a, &mut b], |node| node.done.len() == 202);
    for token in 1..=200 {
        let (at, end) = ((8 << 20) + token * 1_000, a.ended(token).unwrap());
        if token % 2 == 0 {
            assert!(end.result.is_ok());
            assert!(b.memory.get(at, 1_000) == pattern(1, token * 1_000, 1_000));
        } else if end.outcome == Outcome::NotApplied {
            assert_eq!(b.memory.get(at, 1_000), [0; 1_000]);
        }
    }
    assert!(a.done.iter().any(|end| end.outcome == Outcome::NotApplied));
    linger(&mut [&mut a, &mut b], Duration::from_millis(20));
    assert_eq!(a.transport.slices_in_flight(), 0);
}

#[test]
fn a_cancelled_read_never_writes_again() {
    for piece_bytes_max in [16 << 20, 65_536] {
        let config = Config { piece_bytes_max, ..tight() };
        let (mut a, mut b) = pair(&config, 16 << 20);
        connect(&mut a, &mut b);
        b.memory.paint(9);
        a.submit(&[read(1, 0, 0, 16 * MIB), read(2, 0, 64, 64)]);
        drive(&mut [&mut a, &mut b], |node| node.memory.get(100, 1) != [0]);
        a.transport.cancel(Token(1)).unwrap();
        // From this instant on, whichever side polls.
        a.memory.paint(0x55);
        let end = finish(&mut [&mut a], 1);
        assert_eq!(
            (kind(&end), end.outcome, end.fence_needed),
            (ErrorKind::Canceled, Outcome::NotApplied, false)
        );
        assert!(finish(&mut [&mut a, &mut b], 2).result.is_ok());
        assert!(a.memory.get(64, (16 << 20) - 64) == pattern(0x55, 64, (16 << 20) - 64), "L2");
        assert_eq!(a.memory.get(0, 64), pattern(9, 64, 64));
        assert_eq!(a.transport.slices_in_flight(), 0);
    }
}

#[test]
fn a_write_cut_in_mid_frame_is_unknown_and_its_memory_is_not_read_again() {
    let (mut a, mut b) = pair(&tight(), 16 << 20);
    connect(&mut a, &mut b);
    a.memory.paint(1);
    a.submit(&[write(1, 0, 0, 4 * MIB), write(2, 8 << 20, 8 << 20, 500)]);
    exhaust(&mut a);
    a.transport.cancel(Token(1)).unwrap();
    a.memory.set(0, &vec![0xbb; 4 << 20]);
    let end = finish(&mut [&mut a], 1);
    assert_eq!((kind(&end), end.outcome, end.fence_needed), (ErrorKind::Canceled, Outcome::Unknown, true));
    // The connection stays usable.
    assert!(finish(&mut [&mut a, &mut b], 2).result.is_ok());
    assert_eq!(a.transport.stats().connections_opened, 1);
    let seen = b.memory.get(0, 4 << 20);
    let old = pattern(1, 0, 4 << 20);
    assert!(
        seen.iter().zip(&old).all(|(&seen, &old)| seen == old || seen == 0),
        "not one byte from after the cancel"
    );
    assert!(seen != old, "what was not yet framed was not sent");

    a.transport.fence(Token(3), REMOTE).unwrap();
    assert_eq!(finish(&mut [&mut a, &mut b], 3), Completion::applied(Token(3)));
    b.memory.paint(0x77);
    linger(&mut [&mut a, &mut b], Duration::from_millis(20));
    assert!(b.memory.get(0, 4 << 20) == pattern(0x77, 0, 4 << 20), "L5");
    assert_eq!(a.transport.slices_in_flight(), 0);
}

#[test]
fn a_write_that_waits_for_its_answer_is_unknown_when_cancelled() {
    let (mut a, mut b) = pair(&common::config(), 1 << 20);
    connect(&mut a, &mut b);
    a.memory.paint(1);
    a.submit(&[write(1, 0, 0, 1_000)]);
    exhaust(&mut a);
    a.transport.cancel(Token(1)).unwrap();
    let end = finish(&mut [&mut a], 1);
    assert_eq!((kind(&end), end.outcome), (ErrorKind::Canceled, Outcome::Unknown));
    assert_eq!(a.transport.slices_in_flight(), 1, "its slot is taken until the target has answered");
    drive(&mut [&mut a, &mut b], |node| node.transport.slices_in_flight() == 0);
    assert_eq!(a.done.len(), 2, "L1");
}

#[test]
fn bytes_of_a_connection_that_died_do_not_land_after_the_fence() {
    for connections in [1, 4] {
        // No detached copy is allowed: cancelling resets the connection, with its bytes in the target's
        // receive buffer.
        let config = Config { detached_bytes_max: 0, connections, ..tight() };
        let (mut a, mut b) = pair(&config, 16 << 20);
        connect(&mut a, &mut b);
        a.memory.paint(1);
        a.submit(&[write(1, 0, 0, 4 * MIB), write(2, 8 << 20, 8 << 20, 64)]);
        exhaust(&mut a);
        a.transport.cancel(Token(1)).unwrap();
        assert_eq!(finish(&mut [&mut a], 1).outcome, Outcome::Unknown);
        assert!(a.transport.stats().connections_lost > 0);
        a.transport.fence(Token(3), REMOTE).unwrap();
        assert!(finish(&mut [&mut a, &mut b], 3).result.is_ok());
        b.memory.set(0, &vec![0x77; 4 << 20]);
        linger(&mut [&mut a, &mut b], Duration::from_millis(50));
        assert!(b.memory.get(0, 4 << 20) == vec![0x77; 4 << 20], "L5");
        assert_eq!(users(&b), by_peers(0));
    }
}

#[test]
fn fences_end_by_what_is_known_of_the_target() {
    // No process listens at the address any more.
    let (mut a, mut b) = pair(&common::config(), 4_096);
    a.submit(&[write(0, 0, 0, 8)]);
    assert!(finish(&mut [&mut a, &mut b], 0).result.is_ok());
    let address = b.transport.local_address();
    drop(b);
    a.transport.fence(Token(1), REMOTE).unwrap();
    let end = finish(&mut [&mut a], 1);
    assert_eq!((kind(&end), end.outcome), (ErrorKind::PeerDead, Outcome::Unknown));
    assert_eq!(a.transport.detach(REMOTE), Ok(()), "the fence has ended");

    // Another incarnation is at the address: the earlier one has ended.
    let (mut a, mut b) = pair(&Config { bind: address, ..common::config() }.any_port(), 4_096);
    a.submit(&[write(0, 0, 0, 8)]);
    assert!(finish(&mut [&mut a, &mut b], 0).result.is_ok());
    let address = b.transport.local_address();
    drop(b);
    drive(&mut [&mut a], |node| node.transport.connections() == 0);
    let mut b = common::node(Config { bind: address, ..common::config() }, 4_096);
    a.transport.fence(Token(1), REMOTE).unwrap();
    a.submit(&[write(2, 0, 0, 8), read(3, 0, 0, 8)]);
    assert_eq!(finish(&mut [&mut a, &mut b], 1), Completion::applied(Token(1)));
    for token in [2, 3] {
        let end = finish(&mut [&mut a, &mut b], token);
        assert_eq!((kind(&end), end.outcome), (ErrorKind::PeerRestarted, Outcome::NotApplied));
    }
    a.submit(&[write(4, 0, 0, 8)]);
    assert_eq!(kind(&finish(&mut [&mut a, &mut b], 4)), ErrorKind::PeerRestarted);
}

trait AnyPort {
    fn any_port(self) -> Self;
}

impl AnyPort for Config {
    fn any_port(mut self) -> Self {
        self.bind.set_port(0);
        self
    }
}

#[test]
fn a_fence_does_not_disturb_what_is_in_flight() {
    let (mut a, mut b) = pair(&Config { connections: 4, ..common::config() }, 16 << 20);
    a.memory.paint(1);
    let slices: Vec<_> = (0..16).map(|i| write(i, i << 20, i << 20, MIB)).collect();
    a.submit(&slices);
    a.transport.fence(Token(100), REMOTE).unwrap();
    a.transport.fence(Token(101), REMOTE).unwrap();
    drive(&mut [&mut a, &mut b], |node| node.done.len() == 18);
    assert!(a.done.iter().all(|end| end.result.is_ok()));
    assert!(b.memory.get(0, 16 << 20) == pattern(1, 0, 16 << 20));
}

#[test]
fn a_region_in_use_is_busy_and_then_free() {
    let (mut a, mut b) = pair(&common::config(), 1 << 20);
    a.submit(&[write(1, 0, 0, 1_000)]);
    assert_eq!(a.transport.deregister(REGION), Err(ErrorKind::Busy.into()));
    assert_eq!(a.transport.detach(REMOTE), Err(ErrorKind::Busy.into()));
    assert_eq!(a.transport.deregister(RegionId::new(0, 2)), Err(ErrorKind::Stale.into()));
    assert_eq!(a.transport.deregister(RegionId::new(1, 1)), Err(ErrorKind::NotFound.into()));
    assert!(finish(&mut [&mut a, &mut b], 1).result.is_ok());
    assert_eq!(b.transport.deregister(REGION), Ok(()));
    a.submit(&[write(2, 0, 0, 1_000), read(3, 0, 0, 1_000)]);
    for token in [2, 3] {
        let end = finish(&mut [&mut a, &mut b], token);
        assert_eq!((kind(&end), end.outcome), (ErrorKind::NotFound, Outcome::NotApplied));
    }
    assert_eq!(a.transport.deregister(REGION), Ok(()));
    assert_eq!(a.transport.detach(REMOTE), Ok(()));
    drive(&mut [&mut b], |node| node.transport.connections() == 0);
}

#[test]
fn invalid_calls_are_not_accepted() {
    let (mut a, b) = pair(&Config { slice_bytes_max: 1_000, ..common::config() }, 4_096);
    let mut refused = |slice| a.transport.submit(&[slice]).map_err(|error| error.kind);
    assert_eq!(refused(write(1, 0, 0, 0)), Err(ErrorKind::InvalidArgument));
    assert_eq!(refused(write(1, 0, 0, 1_001)), Err(ErrorKind::InvalidArgument));
    assert_eq!(refused(write(1, 4_000, 0, 97)), Err(ErrorKind::OutOfRange));
    assert_eq!(refused(write(1, 0, 4_000, 97)), Err(ErrorKind::OutOfRange));
    assert_eq!(refused(write(1, 0, u64::MAX, 97)), Err(ErrorKind::OutOfRange));
    let other = RemoteRegionId::new(0, 9);
    assert_eq!(
        refused(te_core::Slice { remote: RemoteOffset::new(other, 0), ..write(1, 0, 0, 1) }),
        Err(ErrorKind::Stale)
    );
    let other = RemoteRegionId::new(9, 1);
    assert_eq!(
        refused(te_core::Slice { remote: RemoteOffset::new(other, 0), ..write(1, 0, 0, 1) }),
        Err(ErrorKind::NotFound)
    );
    assert_eq!(a.transport.submit(&[write(1, 0, 0, 8), write(2, 0, 0, 0)]), Ok(1), "a prefix");
    assert_eq!(a.transport.attach(REMOTE, &b.export()), Err(ErrorKind::Busy.into()));
    assert_eq!(
        a.transport.attach(RemoteRegionId::new(1, 1), &b.export()[1..]),
        Err(ErrorKind::InvalidArgument.into())
    );
}

#[test]
fn a_target_that_is_not_polled_pushes_back() {
    let config = Config { inflight_max: 256, ..tight() };
    let (mut a, mut b) = pair(&config, 1 << 20);
    connect(&mut a, &mut b);
    let batch: Vec<_> = (0..1_000).map(|i| write(i, 0, 0, 4_096)).collect();
    let mut accepted = 0;
    for _ in 0..1_000 {
        accepted += a.transport.submit(&batch[accepted..]).unwrap();
        a.poll();
    }
    assert_eq!(accepted, 256, "the limit, and the caller learns it");
    while accepted < batch.len() {
        accepted += a.transport.submit(&batch[accepted..]).unwrap();
        a.poll();
        b.poll();
    }
    drive(&mut [&mut a, &mut b], |node| node.done.len() == batch.len() + 1);
    assert!(a.done.iter().all(|end| end.result.is_ok()));
}

#[test]
fn a_peer_that_falls_silent_ends_its_slices_and_no_others() {
    let config = Config { peer_silence_ms_max: 250, ..tight() };
    let (mut a, mut silent) = pair(&config, 16 << 20);
    let mut lively = common::node(config, 1 << 20);
    let other = RemoteRegionId::new(1, 1);
    a.transport.attach(other, &lively.export()).unwrap();
    connect(&mut a, &mut silent);
    // From here on `silent` is not polled, so the connection is half open.
    a.submit(&[write(1, 0, 0, 1_000), read(2, 0, 0, 1_000), write(3, 0, 0, 16 * MIB), write(4, 0, 0, 10)]);
    a.transport.fence(Token(5), REMOTE).unwrap();
    let mut token = 100;
    drive(&mut [&mut a, &mut lively], |node| {
        if token == 100 || node.ended(token - 1).is_some() {
            node.submit(&[te_core::Slice { remote: RemoteOffset::new(other, 0), ..write(token, 0, 0, 64) }]);
            token += 1;
        }
        (1..=5).all(|token| node.ended(token).is_some())
    });
    let outcome = |token| a.ended(token).unwrap().outcome;
    assert_eq!([1, 2, 3, 4, 5].map(outcome).map(|o| o as u8), {
        use Outcome::{NotApplied, Unknown};
        [Unknown, NotApplied, Unknown, NotApplied, Unknown].map(|o| o as u8)
    });
    assert!((1..=5).all(|token| kind(&a.ended(token).unwrap()) == ErrorKind::PeerDead));
    assert!((100..token - 1).all(|token| a.ended(token).unwrap().result.is_ok()));
    // It is polled again: what comes next reaches it, and what was in its buffer does not land after the
    // fence.
    a.transport.fence(Token(6), REMOTE).unwrap();
    a.submit(&[write(7, 0, 0, 1_000)]);
    assert!(finish(&mut [&mut a, &mut silent, &mut lively], 6).result.is_ok());
    assert!(finish(&mut [&mut a, &mut silent, &mut lively], 7).result.is_ok());
}

#[test]
fn an_address_without_a_listener_is_a_dead_peer() {
    let (mut a, b) = pair(&common::config(), 4_096);
    drop(b);
    for token in 0..3 {
        a.submit(&[write(token, 0, 0, 8)]);
        let end = finish(&mut [&mut a], token);
        assert_eq!((kind(&end), end.outcome), (ErrorKind::PeerDead, Outcome::NotApplied));
    }
}

#[test]
fn a_listener_that_never_answers_is_a_dead_peer() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut a = common::node(Config { connect_ms_max: 50, ..common::config() }, 4_096);
    a.transport.attach(REMOTE, &export_of(&listener)).unwrap();
    a.submit(&[write(1, 0, 0, 8), read(2, 0, 0, 8)]);
    assert!(a.transport.poll_at().is_some());
    for token in [1, 2] {
        let end = finish(&mut [&mut a], token);
        assert_eq!((kind(&end), end.outcome), (ErrorKind::PeerDead, Outcome::NotApplied));
    }
}

#[test]
fn a_parked_caller_is_woken_for_everything() {
    let (mut a, b) =
        pair(&Config { peer_silence_ms_max: 100, connect_ms_max: 100, ..common::config() }, 1 << 20);
    let parked = |a: &mut Node, token: u64| {
        while a.ended(token).is_none() {
            a.poll();
            let wait = match a.transport.poll_at() {
                Some(at) => (at.nanos_since(now()).div_ceil(1_000_000)) as i32,
                None => 10_000,
            };
            let fd = a.transport.event_source().unwrap().0;
            let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            // SAFETY: one `pollfd` that lives across the call.
            let ready = unsafe { libc::poll(&raw mut poll, 1, wait) };
            assert!(ready > 0 || wait < 10_000, "it would never be woken");
        }
        a.ended(token).unwrap()
    };
    // The target is not polled: the handshake exceeds its time limit.
    a.submit(&[write(1, 0, 0, 8)]);
    assert_eq!(kind(&parked(&mut a, 1)), ErrorKind::PeerDead);
    drop(b);
    a.submit(&[write(2, 0, 0, 8)]);
    assert_eq!(kind(&parked(&mut a, 2)), ErrorKind::PeerDead);
}

#[test]
fn a_target_that_sends_wrong_bytes_is_caught() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut a = common::node(Config { checksum: true, ..common::config() }, 4_096);
    a.transport.attach(REMOTE, &export_of(&listener)).unwrap();
    let server = std::thread::spawn(move || {
        use std::io::{Read, Write};
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 48]).unwrap();
        let welcome = Welcome {
            magic: MAGIC,
            version: U16::new(VERSION),
            reserved: U16::ZERO,
            status: U32::ZERO,
            incarnation: U64::new(5),
            detail: U64::new(1 << 30),
        };
        stream.write_all(welcome.as_bytes()).unwrap();
        stream.read_exact(&mut [0; 56]).unwrap();
        let entry = DataEntry { status: U32::ZERO, crc: U32::new(1), len: U64::new(4) };
        let header = Header::new(Kind::Data, FLAG_CHECKSUM, 1, 0);
        stream.write_all(&[header.as_bytes(), entry.as_bytes(), b"oops"].concat()).unwrap();
        // Then an answer without a request.
        stream.read_exact(&mut [0; 56]).unwrap();
        stream.write_all(Header::new(Kind::Data, 0, 1, 900).as_bytes()).unwrap();
        stream.write_all(entry.as_bytes()).unwrap();
        let _ = stream.read(&mut [0; 1]);
    });
    a.submit(&[read(1, 0, 0, 4)]);
    let end = finish(&mut [&mut a], 1);
    assert_eq!((kind(&end), end.outcome), (ErrorKind::Corrupt, Outcome::NotApplied));
    assert_eq!(a.transport.stats().corrupt, 1);
    a.submit(&[read(2, 0, 0, 4)]);
    let end = finish(&mut [&mut a], 2);
    assert_eq!((kind(&end), end.outcome), (ErrorKind::Protocol, Outcome::NotApplied));
    server.join().unwrap();
}

#[test]
fn settings_outside_their_ranges_are_named() {
    let error = TcpTransport::new(Config { connections: 0, ..common::config() }).unwrap_err();
    assert_eq!(error.to_string(), "setting connections is 0: set it to a value from 1 to 16");
    let error = TcpTransport::new(Config { connections: 20, ..common::config() }).unwrap_err();
    assert_eq!(error.to_string(), "setting connections is 20: set it to a value from 1 to 16");
    let error =
        TcpTransport::new(Config { congestion: Some("nonesuch".into()), ..common::config() }).unwrap_err();
    assert!(error.to_string().contains("congestion"), "{error}");
}
