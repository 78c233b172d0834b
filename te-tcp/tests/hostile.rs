//! A client that breaks the protocol, against a live target that also has an honest peer.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::io::Write;
use std::net::Shutdown;
use std::time::Duration;

use common::raw::{Raw, frame_of};
use common::{Node, by_peers, finish, pair, users, write};
use te_core::Access;
use te_tcp::Config;
use te_tcp::frame::{
    self, ConnectionEntry, FLAG_CHECKSUM, Header, Hello, Kind, Operation, Response, Status, Step, VERSION,
};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

const BYTES: usize = 1 << 20;

fn honest_works(honest: &mut Node, target: &mut Node, token: u64) {
    honest.memory.set(0, &token.to_le_bytes());
    honest.submit(&[write(token, 0, BYTES as u64 - 8, 8)]);
    assert!(finish(&mut [honest, target], token).result.is_ok());
    assert_eq!(target.memory.get(BYTES as u64 - 8, 8), token.to_le_bytes());
}

#[test]
fn a_wrong_opening_is_answered_and_closed() {
    let (mut honest, mut target) = pair(&common::config(), BYTES);
    let good = Raw::new(&target).hello(1, 0);
    let cases = [
        (Hello { magic: *b"notours!", ..good }, Status::Magic),
        (Hello { version: U16::new(VERSION + 1), ..good }, Status::Version),
        (Hello { target: U64::new(good.target.get() ^ 1), ..good }, Status::Restarted),
    ];
    for (hello, status) in cases {
        let mut raw = Raw::new(&target);
        raw.send(&mut target, hello.as_bytes());
        let answer = raw.receive_rest(&mut target);
        let Ok(Step::Frame(welcome, 32)) = frame::parse_welcome(&answer) else { panic!("{answer:?}") };
        assert_eq!((answer.len(), welcome.status.get()), (32, status as u32));
        assert_eq!(welcome.version.get(), VERSION);
        assert_eq!(welcome.incarnation.get(), 0, "a refusal does not reveal the incarnation");
    }
    honest_works(&mut honest, &mut target, 1);
}

#[test]
fn a_dialogue_cut_at_any_byte_does_no_harm() {
    let (mut honest, mut target) = pair(&common::config(), BYTES);
    let shape = Raw::new(&target);
    let (first, second) = (shape.operation(0, 100), shape.operation(200, 50));
    let connection = ConnectionEntry { connection: U16::ZERO, reserved: U16::ZERO, generation: U32::new(1) };
    let talk = [
        shape.hello(5, 0).as_bytes(),
        &frame_of(Kind::Read, FLAG_CHECKSUM, 0, &[first, second]),
        &frame_of(Kind::Write, 0, 2, &[first, second]),
        &[9; 150],
        Header::new(Kind::Fence, 0, 1, 3).as_bytes(),
        connection.as_bytes(),
        Header::new(Kind::Ping, 0, 0, 4).as_bytes(),
    ]
    .concat();
    for cut in 0..=talk.len() {
        let mut raw = Raw::new(&target);
        raw.send(&mut target, &talk[..cut]);
        raw.stream.shutdown(Shutdown::Write).unwrap();
        raw.receive_rest(&mut target);
    }
    assert_eq!(target.memory.get(0, 100), [9; 100], "the whole dialogue is parsed");
    assert_eq!(users(&target), by_peers(0));
    honest_works(&mut honest, &mut target, 1);
}

#[test]
fn a_dialogue_byte_by_byte_is_parsed() {
    let mut target = common::node(common::config(), BYTES);
    target.memory.paint(3);
    let mut raw = Raw::new(&target);
    let hello = raw.hello(5, 0);
    let read = frame_of(Kind::Read, 0, 0, &[raw.operation(7, 40)]);
    for byte in [hello.as_bytes(), &read].concat() {
        raw.send(&mut target, &[byte]);
    }
    let answer = raw.receive(&mut target, 32 + 16 + 16 + 40);
    assert_eq!(answer[64..], common::pattern(3, 7, 40));
}

#[test]
fn garbage_ends_its_own_connection_only() {
    let (mut honest, mut target) = pair(&common::config(), BYTES);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for round in 0..200 {
        let mut raw = Raw::greeted(&mut target, round, 0);
        let garbage: Vec<u8> = (0..200)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        raw.send(&mut target, &garbage);
        raw.stream.shutdown(Shutdown::Write).unwrap();
        let last = raw.receive_rest(&mut target);
        let Ok(Step::Frame(Response::Error { status: Status::Protocol }, 16)) = frame::parse_response(&last)
        else {
            panic!("round {round}: {last:?}");
        };
    }
    assert_eq!(target.transport.stats().protocol_errors, 200);
    assert_eq!(target.memory.get(0, BYTES), vec![0; BYTES]);
    honest_works(&mut honest, &mut target, 1);
}

#[test]
fn what_was_not_granted_is_refused_and_the_connection_survives() {
    let mut target = common::node(common::config(), BYTES);
    target.memory.paint(1);
    let mut raw = Raw::greeted(&mut target, 1, 0);
    let good = raw.operation(0, 8);
    let cases = [
        (Operation { key: U64::new(good.key.get() ^ 1), ..good }, Status::AccessDenied),
        (Operation { generation: U32::new(99), ..good }, Status::Stale),
        (Operation { region: U32::new(1), ..good }, Status::NotFound),
        (Operation { region: U32::new(u32::MAX), ..good }, Status::NotFound),
        (Operation { offset: U64::new(BYTES as u64 - 7), ..good }, Status::OutOfRange),
        (Operation { offset: U64::new(u64::MAX), ..good }, Status::OutOfRange),
        (Operation { len: U64::ZERO, ..good }, Status::Empty),
    ];
    let mut seq = 0;
    for (operation, status) in cases {
        // The good operation beside it is served.
        raw.send(&mut target, &frame_of(Kind::Read, 0, seq, &[operation, good]));
        let answer = raw.receive(&mut target, 16 + 2 * 16 + 8);
        let Ok(Step::Frame(Response::Data { entries, .. }, _)) = frame::parse_response(&answer) else {
            panic!()
        };
        assert_eq!((entries[0].status.get(), entries[0].len.get()), (status as u32, 0));
        assert_eq!((entries[1].status.get(), entries[1].len.get()), (0, 8));
        assert_eq!(answer[48..], common::pattern(1, 0, 8));

        let payload = vec![0xee; operation.len.get() as usize];
        raw.send(&mut target, &frame_of(Kind::Write, 0, seq + 2, &[operation]));
        raw.send(&mut target, &payload);
        let answer = raw.receive(&mut target, 16 + 4);
        let Ok(Step::Frame(Response::Ack { statuses, .. }, _)) = frame::parse_response(&answer) else {
            panic!()
        };
        assert_eq!(statuses[0].get(), status as u32);
        assert!(raw.is_alive(&mut target));
        seq += 3;
    }
    assert!(target.memory.get(0, BYTES) == common::pattern(1, 0, BYTES), "not a byte moved");
    assert_eq!(target.transport.stats().refused, 14);
}

#[test]
fn sixteen_gib_are_refused_and_drained() {
    let config = Config { slice_bytes_max: 1 << 20, ..common::config() };
    let (mut honest, mut target) = pair(&config, BYTES);
    let mut raw = Raw::greeted(&mut target, 1, 0);
    let huge = raw.operation(0, 16 << 30);
    raw.send(&mut target, &frame_of(Kind::Read, 0, 0, &[huge]));
    let answer = raw.receive(&mut target, 32);
    let Ok(Step::Frame(Response::Data { entries, .. }, _)) = frame::parse_response(&answer) else { panic!() };
    assert_eq!(entries[0].status.get(), Status::TooLong as u32);
    // A payload of twice the limit is drained completely, and the connection goes on.
    raw.send(&mut target, &frame_of(Kind::Write, 0, 1, &[raw.operation(0, 2 << 20)]));
    raw.send(&mut target, &vec![5; 2 << 20]);
    let answer = raw.receive(&mut target, 20);
    let Ok(Step::Frame(Response::Ack { statuses, .. }, _)) = frame::parse_response(&answer) else { panic!() };
    assert_eq!(statuses[0].get(), Status::TooLong as u32);
    assert!(raw.is_alive(&mut target));
    // A payload of sixteen GiB occupies one connection and no memory.
    raw.send(&mut target, &frame_of(Kind::Write, 0, 2, &[huge]));
    raw.send(&mut target, &vec![5; 8 << 20]);
    honest_works(&mut honest, &mut target, 1);
    assert_eq!(target.memory.get(0, 8), [0; 8]);
    drop(raw);
    honest_works(&mut honest, &mut target, 2);
}

#[test]
fn rights_are_the_targets_to_check() {
    let access = Access::LOCAL | Access::REMOTE_READ;
    let mut target = common::node_with(common::config(), BYTES, access);
    let mut raw = Raw::greeted(&mut target, 1, 0);
    raw.send(
        &mut target,
        &[&frame_of(Kind::Write, 0, 0, &[raw.operation(0, 4)]), &[1_u8, 2, 3, 4][..]].concat(),
    );
    let answer = raw.receive(&mut target, 20);
    let Ok(Step::Frame(Response::Ack { statuses, .. }, _)) = frame::parse_response(&answer) else { panic!() };
    assert_eq!(statuses[0].get(), Status::AccessDenied as u32);
    assert_eq!(target.memory.get(0, 4), [0; 4]);
}

#[test]
fn a_payload_with_a_wrong_checksum_is_reported_and_counted() {
    let mut target = common::node(common::config(), BYTES);
    let mut raw = Raw::greeted(&mut target, 1, 0);
    let payload = common::pattern(4, 0, 10_000);
    for (crc, status) in
        [(crc32c::crc32c(&payload), Status::Ok), (crc32c::crc32c(&payload) ^ 1, Status::Corrupt)]
    {
        let seq = u64::from(status == Status::Corrupt);
        let operation = Operation { crc: U32::new(crc), ..raw.operation(0, 10_000) };
        raw.send(
            &mut target,
            &[&frame_of(Kind::Write, FLAG_CHECKSUM, seq, &[operation]), &payload[..]].concat(),
        );
        let answer = raw.receive(&mut target, 20);
        let Ok(Step::Frame(Response::Ack { statuses, .. }, _)) = frame::parse_response(&answer) else {
            panic!()
        };
        assert_eq!(statuses[0].get(), status as u32);
    }
    assert_eq!(target.transport.stats().corrupt, 1);
}

#[test]
fn after_a_fence_nothing_of_an_older_connection_is_applied() {
    let mut target = common::node(common::config(), BYTES);
    let mut old = Raw::greeted(&mut target, 42, 0);
    let mut other = Raw::greeted(&mut target, 43, 0);
    let mut new = Raw::greeted(&mut target, 42, 1);
    for raw in [&mut old, &mut other] {
        // In the middle of a WRITE.
        raw.send(&mut target, &frame_of(Kind::Write, 0, 0, &[raw.operation(0, 1_000)]));
        raw.send(&mut target, &[1; 400]);
    }
    common::linger(&mut [&mut target], Duration::from_millis(20));
    assert_eq!(users(&target), by_peers(2));

    // These bytes may be in the target's receive buffer when the fence is served.
    let _ = old.stream.write(&[2; 600]);
    let connection =
        ConnectionEntry { connection: U16::new(1), reserved: U16::ZERO, generation: U32::new(1) };
    new.send(&mut target, &[Header::new(Kind::Fence, 0, 1, 9).as_bytes(), connection.as_bytes()].concat());
    let answer = new.receive(&mut target, 16);
    assert_eq!(frame::parse_response(&answer), Ok(Step::Frame(Response::FenceAck { id: 9 }, 16)));
    let snapshot = target.memory.get(0, 1_000);
    target.memory.set(0, &[7; 1_000]);
    let _ = old.stream.write(&[3; 600]);
    common::linger(&mut [&mut target], Duration::from_millis(50));
    assert_eq!(target.memory.get(0, 1_000), [7; 1_000], "before the fence it was {snapshot:?}");
    assert_eq!(users(&target), by_peers(1), "another session's connection is not touched");
    other.send(&mut target, &[1; 600]);
    assert_eq!(other.receive(&mut target, 20)[16..], [0; 4]);
}

#[test]
fn a_peer_that_stalls_in_mid_write_does_not_keep_a_region_busy_for_ever() {
    use te_core::{ErrorKind, Memory};
    let mut target = common::node(common::config(), BYTES);
    let mut raw = Raw::greeted(&mut target, 1, 0);
    raw.send(&mut target, &frame_of(Kind::Write, 0, 0, &[raw.operation(0, 1_000)]));
    raw.send(&mut target, &[1; 400]);
    common::linger(&mut [&mut target], Duration::from_millis(20));
    assert_eq!(target.transport.deregister(common::REGION), Err(ErrorKind::Busy.into()));
    // The first call of `deregister` let it continue; from the second on, the rest of its payload is
    // discarded.
    assert_eq!(target.transport.deregister(common::REGION), Ok(()));
    raw.send(&mut target, &[2; 600]);
    let answer = raw.receive(&mut target, 20);
    let Ok(Step::Frame(Response::Ack { statuses, .. }, _)) = frame::parse_response(&answer) else { panic!() };
    assert_eq!(statuses[0].get(), Status::Withdrawn as u32);
    assert_eq!(target.memory.get(0, 1_000), [vec![1; 400], vec![0; 600]].concat());
    assert!(raw.is_alive(&mut target));
}

#[test]
fn a_peer_that_reads_slowly_does_not_keep_a_region_busy_for_ever() {
    use te_core::{ErrorKind, Memory};
    for detached_bytes_max in [64 << 20, 0] {
        let config = Config { detached_bytes_max, send_buffer_bytes: Some(65_536), ..common::config() };
        let mut target = common::node(config, 16 << 20);
        target.memory.paint(6);
        let mut raw = Raw::greeted(&mut target, 1, 0);
        raw.send(&mut target, &frame_of(Kind::Read, 0, 0, &[raw.operation(0, 16 << 20)]));
        common::linger(&mut [&mut target], Duration::from_millis(50));
        assert_eq!(target.transport.deregister(common::REGION), Err(ErrorKind::Busy.into()));
        assert_eq!(target.transport.deregister(common::REGION), Ok(()));
        target.memory.paint(0);
        let all = raw.receive_up_to(&mut target, 32 + (16 << 20));
        if detached_bytes_max > 0 {
            assert!(all[32..] == common::pattern(6, 0, 16 << 20), "a copy of what was to be sent");
        } else {
            assert!(all.len() < 16 << 20, "too much to copy: the connection is closed");
        }
    }
}

#[test]
fn one_connection_too_many_is_refused_with_a_reason() {
    let mut target = common::node(Config { connections_max: 3, ..common::config() }, BYTES);
    let _first = Raw::greeted(&mut target, 1, 0);
    let _second = Raw::greeted(&mut target, 2, 0);
    let mut third = Raw::new(&target);
    let hello = third.hello(3, 0);
    third.send(&mut target, hello.as_bytes());
    let answer = third.receive_rest(&mut target);
    let Ok(Step::Frame(welcome, _)) = frame::parse_welcome(&answer) else { panic!() };
    assert_eq!(welcome.status.get(), Status::Full as u32);
}

#[test]
fn a_connection_that_never_says_hello_is_closed() {
    let mut target = common::node(Config { connect_ms_max: 30, ..common::config() }, BYTES);
    let mut raw = Raw::new(&target);
    assert_eq!(raw.receive_rest(&mut target), []);
    assert_eq!(target.transport.connections(), 0);
}

#[test]
fn peers_that_hold_every_connection_do_not_stop_our_own_operations() {
    let (mut honest, mut target) = pair(&common::config(), BYTES);
    let mut crowded = common::node(Config { connections_max: 8, ..common::config() }, BYTES);
    crowded.attach(&target);
    let _held: Vec<Raw> = (0..6).map(|session| Raw::greeted(&mut crowded, session, 0)).collect();
    let more: Vec<Raw> = (0..20).map(|_| Raw::new(&crowded)).collect();
    common::linger(&mut [&mut crowded], Duration::from_millis(20));
    crowded.submit(&[write(1, 0, 0, 8)]);
    assert!(finish(&mut [&mut crowded, &mut target], 1).result.is_ok());
    drop(more);
    honest_works(&mut honest, &mut target, 1);
}

#[test]
fn a_connection_that_does_nothing_is_closed_when_there_are_many() {
    let config = Config { connections_max: 8, idle_ms_max: 100, ..common::config() };
    let mut target = common::node(config, BYTES);
    let mut few: Vec<Raw> = (0..3).map(|session| Raw::greeted(&mut target, session, 0)).collect();
    common::skip(Duration::from_millis(200));
    (0..100).for_each(|_| _ = target.poll());
    assert_eq!(target.transport.connections(), 3, "there is room for all");
    let mut last = Raw::greeted(&mut target, 3, 0);
    let (mut seq, mut steps) = (0, 0);
    // A connection that gets its GO_AWAY and does not close has one second more.
    while target.transport.connections() > 3 || steps < 6 {
        steps += 1;
        assert!(steps < 100, "one of the idle connections is closed");
        common::skip(Duration::from_millis(50));
        let operation = last.operation(0, 8);
        last.send(&mut target, &frame_of(Kind::Read, 0, seq, &[operation]));
        last.receive(&mut target, 40);
        seq += 1;
        if target.transport.connections() > 3 {
            // A PING does not count as use.
            for raw in &mut few {
                let _ = raw.stream.write(Header::new(Kind::Ping, 0, 0, 7).as_bytes());
            }
        }
    }
    assert!(target.transport.stats().evicted > 0);
    assert!(last.is_alive(&mut target), "the one that is used is not closed");
}

#[test]
fn one_session_has_a_limited_number_of_connections() {
    let mut target = common::node(common::config(), BYTES);
    let _held: Vec<Raw> = (0..32).map(|connection| Raw::greeted(&mut target, 1, connection)).collect();
    let mut surplus = Raw::new(&target);
    let hello = surplus.hello(1, 32);
    surplus.send(&mut target, hello.as_bytes());
    let answer = surplus.receive_rest(&mut target);
    let Ok(Step::Frame(welcome, _)) = frame::parse_welcome(&answer) else { panic!() };
    assert_eq!(welcome.status.get(), Status::Full as u32);
    Raw::greeted(&mut target, 2, 0);
}

#[test]
fn checksums_of_more_than_the_limit_are_not_computed() {
    let (mut honest, mut target) = pair(&common::config(), 8 << 20);
    target.memory.paint(2);
    let mut raw = Raw::greeted(&mut target, 1, 0);
    let (huge, half) = (raw.operation(0, 5 << 20), raw.operation(0, 3 << 20));
    raw.send(&mut target, &frame_of(Kind::Read, FLAG_CHECKSUM, 0, &[huge, half, half]));
    let answer = raw.receive(&mut target, 16 + 3 * 16 + (3 << 20));
    let Ok(Step::Frame(Response::Data { entries, .. }, _)) = frame::parse_response(&answer) else { panic!() };
    let told = entries.iter().map(|entry| (entry.status.get(), entry.len.get())).collect::<Vec<_>>();
    let too_long = (Status::TooLong as u32, 0);
    assert_eq!(told, [too_long, (0, 3 << 20), too_long]);
    assert_eq!(entries[1].crc.get(), crc32c::crc32c(&common::pattern(2, 0, 3 << 20)));
    // Without checksums nothing is computed, and nothing is refused.
    raw.send(&mut target, &frame_of(Kind::Read, 0, 3, &[huge]));
    assert_eq!(raw.receive(&mut target, 32 + (5 << 20))[..4], [129, 0, 1, 0]);
    honest_works(&mut honest, &mut target, 1);
}

#[test]
fn one_poll_computes_a_limited_number_of_checksums_and_the_next_polls_the_others() {
    let mut target = common::node(common::config(), 4 << 20);
    target.memory.paint(2);
    let mut raws: Vec<Raw> = (0..12).map(|session| Raw::greeted(&mut target, session, 0)).collect();
    for raw in &mut raws {
        let request = frame_of(Kind::Read, FLAG_CHECKSUM, 0, &[raw.operation(0, 4 << 20)]);
        // Not with `send`, which polls the target.
        raw.stream.write_all(&request).unwrap();
    }
    let mut served = target.transport.stats().bytes_served;
    let mut polls = 0;
    while served < 12 * (4 << 20) {
        let before = served;
        target.poll();
        served = target.transport.stats().bytes_served;
        assert!(served - before <= 12 << 20, "one poll served {}", served - before);
        polls += 1;
        assert!(polls < 100_000, "the remaining requests are never served");
    }
    for raw in &mut raws {
        let answer = raw.receive(&mut target, 32 + (4 << 20));
        assert!(answer[32..] == common::pattern(2, 0, 4 << 20));
    }
}
