//! A target that breaks the protocol, against our initiator: the association ends, every slice ends once,
//! and no byte outside of a slice changes.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use common::played::{BLOCK, Played};
use common::{Node, REMOTE, kind, read, write};
use te_core::{ErrorKind, Memory, Outcome, Token, Transport};
use te_nvmeof::Config;
use te_nvmeof::command::{Cqe, Status};
use te_nvmeof::pdu::{self, FLAG_LAST, FLAG_SUCCESS, Kind};

const BYTES: usize = 1 << 20;
const CANARY: u8 = 0xC3;

/// An initiator that is connected to a played target, which holds commands from now on.
fn connected(config: Config) -> (Node, Played) {
    let mut played = Played::new();
    played.identity.in_capsule_bytes = 0;
    let mut client = common::node(config, BYTES);
    client.transport.attach(REMOTE, &played.export()).unwrap();
    client.submit(&[read(1, 0, 0, BLOCK)]);
    played.drive(&mut client, "the first READ", |_, client| client.ended(1).is_some());
    assert_eq!(client.ended(1).unwrap().result, Ok(()));
    client.memory.set(0, &vec![CANARY; BYTES]);
    played.holds = true;
    (client, played)
}

/// Submits a READ or a WRITE of two blocks, lets the target do something about it, and returns how it ended.
fn attacked(
    config: Config,
    reads: bool,
    attack: impl Fn(&mut Played, usize, u16),
) -> (Node, Played, te_core::Completion) {
    let (mut client, mut played) = connected(config);
    let (at, len) = (4 * u64::from(BLOCK), 2 * BLOCK);
    client.submit(&[if reads { read(2, at, 0, len) } else { write(2, at, 0, len) }]);
    played.drive(&mut client, "the command arrives", |played, _| !played.held.is_empty());
    let held = played.held[0].clone();
    attack(&mut played, held.connection, held.cid());
    played.drive(&mut client, "the slice ends", |_, client| client.ended(2).is_some());
    let end = client.ended(2).unwrap();
    let around = [client.memory.get(0, at as usize), client.memory.get(at + u64::from(len), 64 << 10)];
    assert!(around.iter().flatten().all(|byte| *byte == CANARY), "bytes outside of the slice have changed");
    (client, played, end)
}

/// The initiator connects again and works.
fn heals(mut client: Node, mut played: Played) {
    played.holds = false;
    played.held.clear();
    client.submit(&[read(50, 0, 0, BLOCK)]);
    played.drive(&mut client, "the next READ", |_, client| client.ended(50).is_some());
    assert_eq!(client.ended(50).unwrap().result, Ok(()));
}

type Attack = (&'static str, bool, fn(&mut Played, usize, u16));

/// What a target may not send; each ends the association.
const ATTACKS: &[Attack] = &[
    ("a response to another command", true, |t, at, cid| t.respond(at, cid ^ 1, Status::SUCCESS, 0)),
    ("a response of a former generation", true, |t, at, cid| t.respond(at, cid ^ 0x8000, Status::SUCCESS, 0)),
    ("identifier ffff", true, |t, at, _| t.respond(at, 0xffff, Status::SUCCESS, 0)),
    ("success without data", true, |t, at, cid| t.respond(at, cid, Status::SUCCESS, 0)),
    ("success of a WRITE without its data", false, |t, at, cid| t.respond(at, cid, Status::SUCCESS, 0)),
    ("data of another command", true, |t, at, cid| t.send_data(at, cid ^ 2, 0, &[1; 64], FLAG_LAST)),
    ("data beyond the end", true, |t, at, cid| {
        t.send_data(at, cid, 0, &vec![1; 2 * BLOCK as usize + 4], FLAG_LAST);
    }),
    ("data out of order", true, |t, at, cid| t.send_data(at, cid, BLOCK, &[1; 64], FLAG_LAST)),
    ("data at a huge offset", true, |t, at, cid| t.send_data(at, cid, u32::MAX - 3, &[1; 64], FLAG_LAST)),
    ("data twice", true, |t, at, cid| {
        t.send_data(at, cid, 0, &vec![1; BLOCK as usize], 0);
        t.send_data(at, cid, 0, &vec![1; BLOCK as usize], 0);
    }),
    ("success in the middle", true, |t, at, cid| {
        t.send_data(at, cid, 0, &vec![1; BLOCK as usize], FLAG_LAST | FLAG_SUCCESS);
    }),
    ("success that is not the last", true, |t, at, cid| t.send_data(at, cid, 0, &[1; 64], FLAG_SUCCESS)),
    ("data for a WRITE", false, |t, at, cid| t.send_data(at, cid, 0, &[1; 64], FLAG_LAST)),
    ("an R2T for a READ", true, |t, at, cid| t.ask(at, cid, 7, (0, 64))),
    ("an R2T past the end", false, |t, at, cid| t.ask(at, cid, 7, (0, 2 * BLOCK + 1))),
    ("an R2T of nothing", false, |t, at, cid| t.ask(at, cid, 7, (0, 0))),
    ("an R2T of everything there is", false, |t, at, cid| t.ask(at, cid, 7, (0, u32::MAX))),
    ("an R2T out of order", false, |t, at, cid| t.ask(at, cid, 7, (BLOCK, BLOCK))),
    ("an R2T for another command", false, |t, at, cid| t.ask(at, cid ^ 1, 7, (0, BLOCK))),
    ("a PDU without length", true, |t, at, _| t.send(at, &[&[5, 0, 24, 0, 0, 0, 0, 0]])),
    ("a PDU of 2 GiB", true, |t, at, _| t.send(at, &[&[5, 0, 24, 0, 0, 0, 0, 0x80]])),
    ("data of 2 GiB", true, |t, at, _| t.send(at, &[&[7, 4, 24, 24, 0, 0, 0, 0x80]])),
    ("data in front of its header", true, |t, at, _| t.send(at, &[&[7, 4, 24, 8, 88, 0, 0, 0]])),
    ("data that is not aligned", true, |t, at, _| t.send(at, &[&[7, 4, 24, 25, 88, 0, 0, 0]])),
    ("a header of another length", true, |t, at, _| t.send(at, &[&[5, 0, 72, 0, 72, 0, 0, 0]])),
    ("a digest that was not agreed on", true, |t, at, _| t.send(at, &[&[5, 1, 24, 0, 28, 0, 0, 0]])),
    ("a PDU of the host", true, |t, at, _| t.send(at, &[&[4, 0, 72, 0, 72, 0, 0, 0]])),
    ("a type that there is not", true, |t, at, _| t.send(at, &[&[0x55; 24]])),
    ("ICResp once more", true, |t, at, _| {
        let again = pdu::initialize(Kind::IcResp, 0, (false, false), 8_192);
        t.send(at, &[zerocopy::IntoBytes::as_bytes(&again)]);
    }),
    ("TermReq", true, |t, at, _| {
        let term = pdu::term_req(pdu::End::Controller, pdu::Fatal::Sequence, &[]);
        t.send(at, &[&term]);
    }),
    ("half a PDU, and then the end", true, |t, at, _| {
        t.send(at, &[&[5, 0, 24, 0, 24, 0, 0, 0, 1]]);
        t.cut();
    }),
];

#[test]
fn each_breach_ends_the_association_and_the_slice_once() {
    for &(what, reads, attack) in ATTACKS {
        let (client, played, end) = attacked(Config::default(), reads, attack);
        let error = end.result.expect_err(what);
        assert!(error.kind.is_retryable_elsewhere(), "{what}: {error}");
        let expected = if reads { Outcome::NotApplied } else { Outcome::Unknown };
        assert_eq!(end.outcome, expected, "{what}");
        assert_eq!(client.transport.stats().associations_lost, 1, "{what}");
        heals(client, played);
    }
}

#[test]
fn a_breach_is_reported_to_the_target() {
    let (mut client, mut played, _) =
        attacked(Config::default(), false, |played, at, cid| played.ask(at, cid, 7, (0, u32::MAX)));
    played.drive(&mut client, "TermReq", |played, _| played.term.is_some());
    assert_eq!(played.term, Some(pdu::Fatal::OutOfRange(16)));
}

#[test]
fn damaged_data_is_found_by_its_digest() {
    let digests = Config { data_digest: true, ..Config::default() };
    let (client, played, end) = attacked(digests.clone(), true, |played, at, cid| {
        let data = vec![1; 2 * BLOCK as usize];
        let agreed = played.connections[at].agreed;
        let head = pdu::transfer(Kind::C2hData, FLAG_LAST, cid, 0, (0, data.len() as u32), agreed);
        played.send(at, &[head.bytes(), &data, &[0xde, 0xad, 0xbe, 0xef]]);
        played.respond(at, cid, Status::SUCCESS, 0);
    });
    assert_eq!((kind(&end), end.outcome), (ErrorKind::Corrupt, Outcome::NotApplied));
    // The PDU's limits are known, so the association goes on.
    assert_eq!((client.transport.stats().corrupt, client.transport.stats().associations_lost), (1, 0));
    heals(client, played);
    let headers = Config { header_digest: true, ..Config::default() };
    let (client, played, end) = attacked(headers, true, |played, at, cid| {
        let agreed = played.connections[at].agreed;
        let head = pdu::response(Cqe::new(cid, Status::INVALID_NAMESPACE, 0, 0), agreed);
        let mut bytes = head.bytes().to_vec();
        bytes[12] ^= 1;
        played.send(at, &[&bytes]);
    });
    assert_eq!(kind(&end), ErrorKind::Protocol);
    heals(client, played);
}

#[test]
fn a_second_r2t_before_the_first_is_served_is_too_much() {
    let (client, _, end) = attacked(Config::default(), false, |played, at, cid| {
        let agreed = played.connections[at].agreed;
        let ask = |ttag, range| pdu::transfer(Kind::R2t, 0, cid, ttag, range, agreed);
        // Both arrive together, and the first is served at once: the second one is out of order.
        played.send(at, &[ask(7, (0, BLOCK)).bytes(), ask(8, (0, BLOCK)).bytes()]);
    });
    assert_eq!((kind(&end), end.outcome), (ErrorKind::Protocol, Outcome::Unknown));
    assert_eq!(client.transport.stats().protocol_errors, 1);
}

#[test]
fn data_that_is_asked_for_in_parts_is_sent_in_parts() {
    let (mut client, mut played) = connected(Config { data_digest: true, ..Config::default() });
    client.memory.paint(5);
    let len = 8 * BLOCK;
    client.submit(&[write(2, 0, 0, len)]);
    played.drive(&mut client, "the command arrives", |played, _| !played.held.is_empty());
    let held = played.held[0].clone();
    for part in 0..4 {
        played.ask(held.connection, held.cid(), part, (u32::from(part) * 2 * BLOCK, 2 * BLOCK));
        let all = usize::from(part + 1) * 2 * BLOCK as usize;
        let arrived = |played: &Played| played.data.iter().map(|(_, bytes)| bytes.len()).sum::<usize>();
        played.drive(&mut client, "its data", |played, _| arrived(played) == all);
    }
    played.respond(held.connection, held.cid(), Status::SUCCESS, 0);
    played.drive(&mut client, "the WRITE ends", |_, client| client.ended(2).is_some());
    assert_eq!(client.ended(2).unwrap().result, Ok(()));
    let bytes: Vec<u8> = played.data.iter().flat_map(|(_, bytes)| bytes.clone()).collect();
    assert!(bytes == common::pattern(5, 0, len as usize));
    assert!(played.data.iter().all(|(header, bytes)| bytes.len() <= 8_192 && header.len.get() <= 8_192));
}

/// A cancelled WRITE gives its memory back at once, and still sends what it had when the target asks for it.
#[test]
fn a_cancelled_write_sends_what_it_had() {
    let (mut client, mut played) = connected(Config::default());
    client.memory.paint(5);
    client.submit(&[write(2, 0, 0, 2 * BLOCK)]);
    played.drive(&mut client, "the command arrives", |played, _| !played.held.is_empty());
    client.transport.cancel(Token(2)).unwrap();
    client.poll();
    assert_eq!(kind(&client.ended(2).unwrap()), ErrorKind::Canceled);
    client.memory.set(0, &vec![CANARY; BYTES]);
    let held = played.held[0].clone();
    played.ask(held.connection, held.cid(), 3, (0, 2 * BLOCK));
    played.drive(&mut client, "its data", |played, _| !played.data.is_empty());
    assert!(played.data[0].1 == common::pattern(5, 0, 2 * BLOCK as usize));
    played.respond(held.connection, held.cid(), Status::SUCCESS, 0);
    heals(client, played);
}

#[test]
fn statuses_of_a_target_are_told_apart() {
    for (status, expected, outcome) in [
        (Status::LBA_OUT_OF_RANGE, ErrorKind::OutOfRange, Outcome::NotApplied),
        (Status::WRITE_PROTECTED, ErrorKind::AccessDenied, Outcome::NotApplied),
        (Status::INVALID_NAMESPACE, ErrorKind::NotFound, Outcome::NotApplied),
        (Status(0x280), ErrorKind::Rail, Outcome::Unknown),
        (Status::INTERNAL, ErrorKind::Rail, Outcome::Unknown),
        (Status(0x7ff), ErrorKind::Protocol, Outcome::Unknown),
        (Status(0x370), ErrorKind::PeerDead, Outcome::Unknown),
    ] {
        let (mut client, mut played) = connected(Config::default());
        client.submit(&[write(2, 0, 0, BLOCK)]);
        played.drive(&mut client, "the command arrives", |played, _| !played.held.is_empty());
        let held = played.held[0].clone();
        played.respond(held.connection, held.cid(), status, 0);
        played.drive(&mut client, "the WRITE ends", |_, client| client.ended(2).is_some());
        let end = client.ended(2).unwrap();
        assert_eq!((kind(&end), end.outcome), (expected, outcome), "{status:?}");
    }
}

/// A status that says that no byte was taken, although the target has asked for the data: it is not believed.
#[test]
fn a_refusal_after_the_data_was_asked_for_proves_nothing() {
    let (mut client, mut played) = connected(Config::default());
    client.submit(&[write(2, 0, 0, BLOCK)]);
    played.drive(&mut client, "the command arrives", |played, _| !played.held.is_empty());
    let held = played.held[0].clone();
    played.ask(held.connection, held.cid(), 7, (0, BLOCK));
    played.drive(&mut client, "its data", |played, _| !played.data.is_empty());
    played.respond(held.connection, held.cid(), Status::LBA_OUT_OF_RANGE, 0);
    played.drive(&mut client, "the WRITE ends", |_, client| client.ended(2).is_some());
    assert_eq!(client.ended(2).unwrap().outcome, Outcome::Unknown);
}

/// A refusal that comes while the data of its WRITE is still being sent: the rest is sent from a copy, and
/// the association goes on.
#[test]
fn a_write_that_is_refused_before_its_data_was_sent_ends_alone() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    te_fabric::net::set_buffers(&listener, None, Some(4_096)).unwrap();
    let mut played = Played::on(listener);
    played.identity.in_capsule_bytes = 65_536;
    let config = Config {
        in_capsule_bytes_max: 65_536,
        send_buffer_bytes: Some(4_096),
        queues: 1,
        peer_silence_ms_max: 60_000,
        ..Config::default()
    };
    let mut client = common::node(config, BYTES);
    client.transport.attach(REMOTE, &played.export()).unwrap();
    client.submit(&[read(1, 0, 0, BLOCK)]);
    played.drive(&mut client, "the first READ", |_, client| client.ended(1).is_some());
    (played.refuses_early, played.receive_bytes_max) = (Some(Status::WRITE_PROTECTED), 1_000);
    client.memory.paint(5);
    client.submit(&[write(2, 0, 0, 16 * BLOCK)]);
    let mut polls = 0;
    while client.ended(2).is_none() {
        client.poll();
        if polls % 100 == 0 {
            played.poll();
        }
        polls += 1;
        assert!(polls < 2_000_000, "the refusal arrives");
    }
    let end = client.ended(2).unwrap();
    assert_eq!((kind(&end), end.outcome), (ErrorKind::AccessDenied, Outcome::NotApplied));
    assert_eq!((played.refused.len(), client.transport.stats().associations_lost), (1, 0));
    // The copy is sent, and the queue works on.
    client.memory.set(0, &vec![CANARY; BYTES]);
    (played.refuses_early, played.receive_bytes_max) = (None, usize::MAX);
    client.submit(&[write(3, 0, 0, BLOCK)]);
    played.drive(&mut client, "the next WRITE", |_, client| client.ended(3).is_some());
    assert_eq!(client.ended(3).unwrap().result, Ok(()));
    assert_eq!(client.transport.stats().associations_lost, 0);
}

/// A target that answers no Abort: the admin queue keeps room for what has to be sent.
#[test]
fn aborts_do_not_fill_the_admin_queue() {
    let (mut client, mut played) = connected(Config::default());
    played.keeps_aborts = true;
    let writes: Vec<_> = (0..40_u64).map(|at| write(10 + at, at * u64::from(BLOCK), 0, BLOCK)).collect();
    client.submit(&writes);
    played.drive(&mut client, "the WRITEs arrive", |played, _| played.held.len() == 40);
    for token in 10..50 {
        client.transport.cancel(Token(token)).unwrap();
    }
    played.drive(&mut client, "they end", |_, client| (10..50).all(|token| client.ended(token).is_some()));
    played.holds = false;
    let other = te_core::RemoteRegionId::new(5, 1);
    client.transport.attach(other, &played.export()).unwrap();
    let slice = te_core::Slice { remote: te_core::RemoteOffset::new(other, 0), ..read(60, 0, 0, BLOCK) };
    client.submit(&[slice]);
    played.drive(&mut client, "another region is checked", |_, client| client.ended(60).is_some());
    assert_eq!(client.ended(60).unwrap().result, Ok(()));
    assert_eq!(client.transport.stats().associations_lost, 0);
}
