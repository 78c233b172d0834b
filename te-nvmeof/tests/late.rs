//! The late write: the connection fails while a WRITE is in flight. No fence ends `Applied` before it is
//! excluded that its bytes land, towards targets with every kind of proof.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::time::Duration;

use common::played::{BLOCK, Played};
use common::proxy::Proxy;
use common::{Node, REGION, REMOTE, drive, finish, kind, skip, write};
use te_core::{Access, ErrorKind, Memory, Outcome, RegionId, Token, Transport};
use te_nvmeof::command::Status;
use te_nvmeof::{Config, NvmeofTransport};

const BYTES: usize = 1 << 20;
const FENCE: u64 = 99;

/// A client of a played target that offers `resets`; the target is ours, or of another vendor.
fn client(config: Config, played: &mut Played, resets: u8, ours: bool) -> Node {
    (played.identity.resets_max, played.identity.instance) = (resets, u8::from(resets > 0));
    let mut client = common::node(config.clone(), BYTES);
    if ours {
        client.transport.attach(REMOTE, &played.export()).unwrap();
    } else {
        let mut owner = common::node(config, BYTES);
        let adopted = RegionId::new(7, 1);
        let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
        let whole = 0..32 * u64::from(BLOCK);
        owner.transport.adopt(adopted, &played.namespace(), whole, access, 1).unwrap();
        let mut blob = vec![0; 1_024];
        let mut len = 0;
        played.drive(&mut owner, "the range is adopted", |_, owner| {
            len = owner.transport.export(adopted, &mut blob).unwrap_or(0);
            len > 0
        });
        client.transport.attach(REMOTE, &blob[..len]).unwrap();
    }
    client
}

/// A WRITE is in flight when the connections fail. Returns once it has ended, which is `Unknown`.
fn lose_a_write(client: &mut Node, played: &mut Played) {
    client.submit(&[write(1, 0, 0, BLOCK)]);
    played.drive(client, "the first WRITE", |_, client| client.ended(1).is_some());
    assert_eq!(client.ended(1).unwrap().result, Ok(()));
    played.holds = true;
    client.submit(&[write(2, 0, 0, BLOCK)]);
    played.drive(client, "the WRITE arrives", |played, _| !played.held.is_empty());
    played.cut();
    played.drive(client, "the WRITE ends", |_, client| client.ended(2).is_some());
    let end = client.ended(2).unwrap();
    assert_eq!((end.outcome, end.fence_needed), (Outcome::Unknown, true));
    client.transport.fence(Token(FENCE), REMOTE).unwrap();
}

/// The fence has not ended `Applied`, although the two are connected again.
fn is_not_applied(client: &mut Node, played: &mut Played) {
    for _ in 0..50 {
        client.poll();
        played.poll();
        // timing: a premature fence has time to end
        std::thread::sleep(Duration::from_millis(2));
    }
    let applied = client.ended(FENCE).is_some_and(|end| end.outcome == Outcome::Applied);
    assert!(!applied, "L5: the fence has ended, and nothing excludes that the WRITE lands");
}

#[test]
fn a_reset_by_the_target_is_a_proof() {
    let mut played = Played::new();
    let mut client = client(Config::default(), &mut played, 4, true);
    lose_a_write(&mut client, &mut played);
    played.drive(&mut client, "the fence", |_, client| client.ended(FENCE).is_some());
    assert_eq!(client.ended(FENCE).unwrap().result, Ok(()));
    // The reset named the lost controller, and came before the fence ended.
    assert_eq!(played.resets, [(1, 1_001)]);
    assert_eq!(client.transport.stats().fenced_by_reset, 1);
}

#[test]
fn a_reset_that_was_only_begun_is_none() {
    for answer in [(Status::SUCCESS, 0), (Status::INVALID_FIELD, 1), (Status(0x141), 0)] {
        let mut played = Played::new();
        played.reset_answer = answer;
        let mut client = client(Config::default(), &mut played, 4, true);
        lose_a_write(&mut client, &mut played);
        is_not_applied(&mut client, &mut played);
        assert_eq!(played.resets.len(), 1, "{answer:?}");
        // No other proof exists for a target of ours, so the fence ends with an error, at once.
        let end = client.ended(FENCE).unwrap();
        assert!(end.result.is_err() && end.fence_needed);
        skip(Duration::from_secs(600));
        client.transport.fence(Token(FENCE + 1), REMOTE).unwrap();
        skip(Duration::from_secs(600));
        played.drive(&mut client, "the second fence", |_, client| client.ended(FENCE + 1).is_some());
        assert!(client.ended(FENCE + 1).unwrap().result.is_err(), "time proves nothing about our target");
    }
}

#[test]
fn a_target_without_resets_is_fenced_by_time_and_not_earlier() {
    let mut played = Played::new();
    let mut client = client(Config::default(), &mut played, 0, false);
    lose_a_write(&mut client, &mut played);
    is_not_applied(&mut client, &mut played);
    assert!(client.ended(FENCE).is_none(), "it waits");
    // 2 × KATO + 15 s, and a little less.
    skip(Duration::from_millis(24_500));
    is_not_applied(&mut client, &mut played);
    skip(Duration::from_millis(1_000));
    played.drive(&mut client, "the fence by time", |_, client| client.ended(FENCE).is_some());
    assert_eq!(client.ended(FENCE).unwrap().result, Ok(()));
    assert_eq!((client.transport.stats().fenced_by_time, played.resets.len()), (1, 0));
}

#[test]
fn without_a_fence_by_time_there_is_no_proof() {
    let mut played = Played::new();
    let config = Config { quiesce_ms: 0, fence_ms_max: 5_000, ..Config::default() };
    let mut client = client(config, &mut played, 0, false);
    lose_a_write(&mut client, &mut played);
    skip(Duration::from_secs(3_600));
    played.drive(&mut client, "the fence gives up", |_, client| client.ended(FENCE).is_some());
    assert_eq!(kind(&client.ended(FENCE).unwrap()), ErrorKind::TimedOut);
    // Nor for a later one.
    client.transport.fence(Token(FENCE + 1), REMOTE).unwrap();
    is_not_applied(&mut client, &mut played);
}

#[test]
fn a_write_that_was_cancelled_blocks_a_fence_until_its_response() {
    let mut played = Played::new();
    let mut client = client(Config::default(), &mut played, 0, true);
    client.submit(&[write(1, 0, 0, BLOCK)]);
    played.drive(&mut client, "the first WRITE", |_, client| client.ended(1).is_some());
    played.holds = true;
    client.submit(&[write(2, 0, 0, BLOCK)]);
    played.drive(&mut client, "the WRITE arrives", |played, _| !played.held.is_empty());
    client.transport.cancel(Token(2)).unwrap();
    client.poll();
    assert_eq!(client.ended(2).unwrap().outcome, Outcome::Unknown);
    client.transport.fence(Token(FENCE), REMOTE).unwrap();
    is_not_applied(&mut client, &mut played);
    let held = played.held[0].clone();
    played.respond(held.connection, held.cid(), Status::SUCCESS, 0);
    played.drive(&mut client, "the fence", |_, client| client.ended(FENCE).is_some());
    assert_eq!(client.ended(FENCE).unwrap().result, Ok(()), "F0: the response is the proof");
}

#[test]
fn a_fence_in_the_middle_of_a_loss_covers_what_was_cancelled_before_it() {
    let mut played = Played::new();
    let mut client = client(Config::default(), &mut played, 4, true);
    client.submit(&[write(1, 0, 0, BLOCK)]);
    played.drive(&mut client, "the first WRITE", |_, client| client.ended(1).is_some());
    played.holds = true;
    client.submit(&[write(2, 0, 0, BLOCK)]);
    played.drive(&mut client, "the WRITE arrives", |played, _| !played.held.is_empty());
    client.transport.cancel(Token(2)).unwrap();
    client.transport.fence(Token(FENCE), REMOTE).unwrap();
    played.reset_answer = (Status(0x13f), 0);
    played.cut();
    is_not_applied(&mut client, &mut played);
    assert!(played.resets.len() <= 1);
}

/// The bytes of a WRITE lie in the socket of a target that does not run. Another life of the connection
/// brings new bytes. Once the fence has ended, the old ones never show.
#[test]
fn bytes_in_the_sockets_of_a_stopped_target_do_not_land_after_the_fence() {
    for config in common::configs() {
        let (mut a, mut b) = common::pair(&config, BYTES);
        a.memory.paint(1);
        a.submit(&[write(1, 0, 0, 4_096)]);
        assert!(finish(&mut [&mut a, &mut b], 1).result.is_ok());
        for round in 0..8_u64 {
            let (warm, old, new) = (10 * round + 2, 10 * round + 3, 10 * round + 4);
            a.submit(&[write(warm, 0, 0, 4_096)]);
            assert!(finish(&mut [&mut a, &mut b], warm).result.is_ok());
            a.memory.set(0, &vec![0x77; 65_536]);
            a.submit(&[write(old, 0, 0, 65_536)]);
            a.poll();
            if round % 2 == 1 {
                b.poll();
            }
            // The initiator's end fails; the target has not read.
            a.transport.close_connections();
            a.poll();
            let end = a.ended(old);
            assert_eq!(end.map(|end| end.outcome), Some(Outcome::Unknown), "round {round}, {config:?}");
            a.transport.fence(Token(new), REMOTE).unwrap();
            assert_eq!(finish(&mut [&mut a, &mut b], new).result, Ok(()), "{config:?}");
            b.memory.set(0, &vec![0x99; BYTES]);
            common::linger(&mut [&mut a, &mut b], Duration::from_millis(20));
            let landed = b.memory.get(0, BYTES).iter().any(|byte| *byte != 0x99);
            assert!(!landed, "L5: bytes landed after the fence, round {round}");
        }
        assert!(a.transport.stats().fenced_by_reset > 0);
        assert!(b.transport.region_pins(REGION).is_ok_and(|pins| pins == (0, 0)));
    }
}

/// Another host counts on the keep-alive timeout alone (F4). A target of ours that was stopped for longer has
/// to end the controller before it reads what lies in its sockets.
#[test]
fn a_target_that_was_stopped_for_longer_than_the_timeout_reads_nothing_of_before() {
    let (mut a, mut b) = common::pair(&Config::default(), BYTES);
    a.submit(&[write(1, 0, 0, 4_096)]);
    assert!(finish(&mut [&mut a, &mut b], 1).result.is_ok());
    b.memory.set(0, &vec![0x99; BYTES]);
    a.memory.set(0, &vec![0x77; BYTES]);
    a.submit(&[write(2, 0, 0, 4_096)]);
    a.poll();
    skip(Duration::from_secs(6));
    for _ in 0..20 {
        b.poll();
    }
    assert!(b.memory.get(0, BYTES).iter().all(|byte| *byte == 0x99), "it was sent before the timeout");
    assert_eq!(b.transport.stats().expired, 1);
}

#[test]
fn a_target_that_never_answers_is_given_up_and_its_fences_end() {
    let mut played = Played::new();
    let config = Config { peer_silence_ms_max: 200, connect_ms_max: 200, ..Config::default() };
    let mut client = client(config, &mut played, 4, true);
    client.submit(&[write(1, 0, 0, BLOCK)]);
    played.drive(&mut client, "the first WRITE", |_, client| client.ended(1).is_some());
    client.submit(&[write(2, 0, 0, BLOCK)]);
    // The target is not polled from here on: it accepts connections and says nothing.
    drive(&mut [&mut client], |client| client.ended(2).is_some());
    assert_eq!(kind(&client.ended(2).unwrap()), ErrorKind::PeerDead);
    client.transport.fence(Token(FENCE), REMOTE).unwrap();
    drive(&mut [&mut client], |client| client.ended(FENCE).is_some());
    assert_eq!(kind(&client.ended(FENCE).unwrap()), ErrorKind::PeerDead);
    client.submit(&[write(3, 0, 0, BLOCK)]);
    drive(&mut [&mut client], |client| client.ended(3).is_some());
    assert_eq!(client.ended(3).unwrap().outcome, Outcome::NotApplied, "nothing of it was sent");
}

#[test]
fn keep_alives_are_sent_while_nothing_else_is() {
    let mut played = Played::new();
    let config = Config { keep_alive_ms: 300, ..Config::default() };
    let mut client = client(config, &mut played, 0, true);
    client.submit(&[write(1, 0, 0, BLOCK)]);
    played.drive(&mut client, "the first WRITE", |_, client| client.ended(1).is_some());
    played.drive(&mut client, "three keep-alives", |played, _| played.keep_alives >= 3);
    // A target of ours ends a controller whose host is silent, and only then.
    let (mut a, mut b) = common::pair(&Config { keep_alive_ms: 300, ..Config::default() }, BYTES);
    a.submit(&[write(1, 0, 0, 4_096)]);
    assert!(finish(&mut [&mut a, &mut b], 1).result.is_ok());
    let identity = a.transport.identity();
    drive(&mut [&mut b], |b| !b.transport.is_connected(identity));
    assert_eq!(b.transport.stats().expired, 1);
    let stats: fn(&NvmeofTransport) -> u64 = |of| of.stats().associations;
    a.submit(&[write(2, 0, 0, 4_096)]);
    let _ = finish(&mut [&mut a, &mut b], 2);
    a.submit(&[write(3, 0, 0, 4_096)]);
    assert!(finish(&mut [&mut a, &mut b], 3).result.is_ok());
    assert_eq!(stats(&a.transport), 2, "it has connected again");
}

/// The bytes of a WRITE are still in the network when the association has failed and the fence has ended.
/// They arrive at the target afterwards.
#[test]
fn bytes_that_the_network_held_back_do_not_land_after_the_fence() {
    for (round, config) in common::configs().into_iter().enumerate() {
        let mut b = common::node(config.clone(), BYTES);
        let mut a = common::node(config.clone(), BYTES);
        let mut network = Proxy::new(&b);
        a.transport.attach(REMOTE, &network.export(&b)).unwrap();
        let drive = |a: &mut Node, b: &mut Node, network: &mut Proxy, what: &str, token: u64| {
            common::eventually(what, || {
                a.poll();
                network.poll();
                b.poll();
                a.ended(token).is_some()
            });
        };
        a.submit(&[write(1, 0, 0, 4_096)]);
        drive(&mut a, &mut b, &mut network, "the first WRITE", 1);
        a.memory.set(0, &vec![0x77; BYTES]);
        let len = config.in_capsule_bytes_max.max(4_096);
        if config.in_capsule_bytes_max > 0 {
            network.hold();
            a.submit(&[write(2, 0, 0, len)]);
            a.poll();
        } else {
            // Here the data follows an R2T: the network holds it once the R2T is there.
            a.submit(&[write(2, 0, 0, len)]);
            for _ in 0..8 {
                a.poll();
                network.poll();
                b.poll();
                network.hold();
            }
            network.release();
            network.hold();
        }
        common::eventually("the bytes are in the network", || {
            a.poll();
            network.poll();
            b.poll();
            network.held() > 0 || a.ended(2).is_some()
        });
        assert!(a.ended(2).is_none(), "{config:?}");
        a.transport.close_connections();
        a.poll();
        assert_eq!(a.ended(2).unwrap().outcome, Outcome::Unknown);
        a.transport.fence(Token(FENCE), REMOTE).unwrap();
        drive(&mut a, &mut b, &mut network, "the fence", FENCE);
        assert_eq!(a.ended(FENCE).unwrap().result, Ok(()));
        b.memory.set(0, &vec![0x99; BYTES]);
        network.release();
        for _ in 0..200 {
            network.poll();
            b.poll();
            a.poll();
            std::thread::yield_now();
        }
        let landed = b.memory.get(0, BYTES).iter().any(|byte| *byte != 0x99);
        assert!(!landed, "L5: bytes have landed after the fence, round {round}");
    }
}

/// Only a target that does not know the subsystem has restarted. Another refusal proves nothing.
#[test]
fn a_connect_that_is_refused_is_not_a_restart() {
    const SUBSYSTEM: u64 = 1 << 16 | 256;
    type Refuses = fn(u32) -> Option<(Status, u64)>;
    let cases: [(Refuses, bool); 4] = [
        (|_| Some((Status::CONNECT_PARAMETERS, 42)), false),
        (|_| Some((Status::CONNECT_PARAMETERS, 0)), false),
        (|qid| (qid > 0).then_some((Status::CONNECT_PARAMETERS, SUBSYSTEM)), false),
        (|_| Some((Status::CONNECT_PARAMETERS, SUBSYSTEM)), true),
    ];
    for (case, (refuses, proves)) in cases.into_iter().enumerate() {
        let mut played = Played::new();
        let config = Config { fence_ms_max: 1_000, ..Config::default() };
        let mut client = client(config, &mut played, 0, true);
        played.refuses = |_| None;
        lose_a_write_to(&mut client, &mut played, refuses);
        played.drive(&mut client, "the fence", |_, client| client.ended(FENCE).is_some());
        let applied = client.ended(FENCE).unwrap().outcome == Outcome::Applied;
        assert_eq!(applied, proves, "case {case}");
    }
}

/// As [`lose_a_write`], to a target that refuses connections from the loss on.
fn lose_a_write_to(client: &mut Node, played: &mut Played, refuses: fn(u32) -> Option<(Status, u64)>) {
    client.submit(&[write(1, 0, 0, BLOCK)]);
    played.drive(client, "the first WRITE", |_, client| client.ended(1).is_some());
    played.holds = true;
    client.submit(&[write(2, 0, 0, BLOCK)]);
    played.drive(client, "the WRITE arrives", |played, _| !played.held.is_empty());
    played.refuses = refuses;
    played.cut();
    played.drive(client, "the WRITE ends", |_, client| client.ended(2).is_some());
    client.transport.fence(Token(FENCE), REMOTE).unwrap();
}

/// An association that takes long to come up is kept alive meanwhile.
#[test]
fn keep_alives_are_sent_before_the_queues_are_up() {
    let mut played = Played::new();
    played.stalls = true;
    let config = Config { keep_alive_ms: 300, connect_ms_max: 60_000, ..Config::default() };
    let mut client = client(config, &mut played, 0, true);
    client.submit(&[write(1, 0, 0, BLOCK)]);
    played.drive(&mut client, "two keep-alives", |played, _| played.keep_alives >= 2);
}

/// After a quiet time, a target is not blamed for having said nothing before a command was sent.
#[test]
fn silence_counts_from_the_command_that_is_owed() {
    let mut played = Played::new();
    let config = Config { peer_silence_ms_max: 1_000, keep_alive_ms: 9_000, ..Config::default() };
    let mut client = client(config, &mut played, 0, true);
    client.submit(&[write(1, 0, 0, BLOCK)]);
    played.drive(&mut client, "the first WRITE", |_, client| client.ended(1).is_some());
    for _ in 0..9 {
        skip(Duration::from_millis(320));
        for _ in 0..20 {
            client.poll();
            played.poll();
        }
    }
    client.submit(&[write(2, 0, 0, BLOCK)]);
    client.poll();
    skip(Duration::from_millis(250));
    client.poll();
    client.poll();
    played.drive(&mut client, "the second WRITE", |_, client| client.ended(2).is_some());
    assert_eq!(client.ended(2).unwrap().result, Ok(()));
    assert_eq!(client.transport.stats().associations_lost, 0);
    assert!(played.keep_alives >= 2, "a quiet target is asked whether it lives");
}

/// A target that is polled rarely still notices that a host is silent.
#[test]
fn a_target_that_parks_ends_the_controller_of_a_silent_host() {
    let (mut a, mut b) = common::pair(&Config { keep_alive_ms: 1_000, ..Config::default() }, BYTES);
    a.submit(&[write(1, 0, 0, 4_096)]);
    assert!(finish(&mut [&mut a, &mut b], 1).result.is_ok());
    for _ in 0..10 {
        skip(Duration::from_millis(150));
        b.poll();
    }
    assert_eq!(b.transport.stats().expired, 1);
}
