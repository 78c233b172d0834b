//! What followers of KV events are told: as it happens, after they missed something, and by a master that was
//! started again.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use common::followers::{Follower, Socket};
use common::{assert_greets, config, connect, mount_on, put_on, read_answer, with};
use conductor_core::zmtp::{Kind, Sent};
use store_core::Key;
use store_core::message::{Operation, Removal, Remove};
use store_master::{Config, MasterHandle, MasterServer};

fn publishing(change: impl FnOnce(&mut Config)) -> (MasterHandle, SocketAddr, SocketAddr) {
    let config = with(config(), |config| {
        config.kv_events.listen = Some("127.0.0.1:0".parse().unwrap());
        change(config);
    });
    let server = MasterServer::bind(config).unwrap();
    let (events, replays) = server.kv_events_addrs().unwrap();
    (server.spawn().unwrap(), events, replays)
}

fn remove_on(stream: &mut TcpStream, key: &str) {
    let mut out = Vec::new();
    let removal = Removal { key: Key(key.as_bytes()), force: true };
    Remove::encode_request(&mut out, 9, &(), [removal].into_iter()).unwrap();
    stream.write_all(&out).unwrap();
    assert_eq!(read_answer(stream).unwrap().header.status, 0);
}

fn hash_key(number: u64) -> String {
    format!("model@tp_rank:0@pcp0@dcp0@pp_rank:0@{number:064x}")
}

#[test]
fn a_follower_is_told_of_puts_and_removals_as_they_happen() {
    let (master, events, replays) = publishing(|_| {});
    let mut stream = connect(master.rpc_addr());
    assert_greets(&mut stream);
    mount_on(&mut stream, 1, "n1");
    let mut socket = Socket::connect(events, Kind::Sub);
    // What came before it subscribed it asks for.
    let mut follower = Follower::default();
    for message in Socket::connect(replays, Kind::Dealer).replay(1) {
        follower.take(&message);
    }
    assert_eq!((follower.found.len(), follower.cleared), (0, 1));
    for number in 0..3 {
        put_on(&mut stream, hash_key(number).as_bytes(), 64);
    }
    while follower.found.len() < 3 {
        follower.take(&socket.receive());
    }
    remove_on(&mut stream, &hash_key(1));
    follower.take(&socket.receive());
    assert_eq!(follower.keys(), [hash_key(0), hash_key(2)]);
    master.stop().unwrap();
}

#[test]
fn a_follower_that_missed_messages_is_sent_them_again_or_every_object() {
    let (master, events, replays) = publishing(|config| config.kv_events.buffer_mib = 1);
    let mut stream = connect(master.rpc_addr());
    assert_greets(&mut stream);
    mount_on(&mut stream, 1, "n1");
    let mut socket = Socket::connect(events, Kind::Sub);
    let mut asks = Socket::connect(replays, Kind::Req);
    let mut live = Follower::default();
    put_on(&mut stream, hash_key(0).as_bytes(), 64);
    while live.found.is_empty() {
        live.take(&socket.receive());
    }
    let missed = live.next.unwrap();
    for number in 1..10 {
        put_on(&mut stream, hash_key(number).as_bytes(), 64);
    }
    while live.found.len() < 10 {
        live.take(&socket.receive());
    }
    // The buffer has them.
    let mut late =
        Follower { found: [(hash_key(0), "cpu".to_owned())].into(), next: Some(missed), cleared: 0 };
    for message in asks.replay(missed) {
        late.take(&message);
    }
    assert_eq!((&late.found, late.cleared, late.next), (&live.found, 0, live.next));
    // More than the buffer keeps: every object, under numbers that end with that of the latest message.
    for round in 0..4_000 {
        put_on(&mut stream, hash_key(100 + round).as_bytes(), 64);
        remove_on(&mut stream, &hash_key(100 + round));
    }
    let told = |live: &mut Follower, socket: &mut Socket| {
        while live.next.unwrap() < missed + 9 + 8_000 {
            live.take(&socket.receive());
        }
    };
    told(&mut live, &mut socket);
    let mut late = Follower::default();
    for message in asks.replay(missed) {
        late.take(&message);
    }
    assert_eq!((&late.found, late.cleared, late.next), (&live.found, 1, live.next));
    // There is nothing newer.
    assert_eq!(asks.replay(live.next.unwrap()), []);
    master.stop().unwrap();
}

#[test]
fn a_master_that_is_started_again_begins_an_epoch_with_higher_numbers_and_tells_all_objects() {
    let dir = tempfile::tempdir().unwrap();
    let journal = dir.path().join("journal");
    let (master, _, replays) = publishing(|config| config.journal = Some(journal.clone()));
    let mut stream = connect(master.rpc_addr());
    assert_greets(&mut stream);
    mount_on(&mut stream, 1, "n1");
    (0..20).for_each(|number| put_on(&mut stream, hash_key(number).as_bytes(), 64));
    let mut before = Follower::default();
    Socket::connect(replays, Kind::Dealer).replay(0).iter().for_each(|message| before.take(message));
    assert_eq!(before.found.len(), 20);
    master.stop().unwrap();

    let (master, _, replays) = publishing(|config| config.journal = Some(journal));
    let mut after = Follower::default();
    // The former numbers are those of another epoch.
    let messages = Socket::connect(replays, Kind::Dealer).replay(before.next.unwrap());
    assert!(messages[0].0 >= before.next.unwrap(), "numbers go on");
    messages.iter().for_each(|message| after.take(message));
    assert_eq!((after.cleared, &after.found), (1, &before.found));
    master.stop().unwrap();
}

#[test]
fn bytes_that_are_not_zeromq_and_questions_that_are_none_close_that_connection_or_have_no_answer() {
    let (master, events, replays) = publishing(|config| config.kv_events.followers_max = 2);
    for addr in [events, replays] {
        let mut stream = connect(addr);
        stream.write_all(&[b'x'; 80]).unwrap();
        let mut rest = Vec::new();
        // The greeting of the publisher comes, and then the end.
        let _ = stream.read_to_end(&mut rest);
        assert!(rest.len() <= 128, "{}", rest.len());
    }
    let mut asks = Socket::connect(replays, Kind::Dealer);
    let questions: [&[&[u8]]; 4] = [&[b""], &[b"", b"seven b"], &[b"", &[0; 8], b"more"], &[b"", b""]];
    for question in questions {
        assert_eq!(asks.zmtp.send(question), Sent::Queued);
    }
    // Only this one is answered.
    assert_eq!(asks.replay(u64::MAX - 1), []);
    // A third follower is refused, and the two that are there go on.
    let _others = [Socket::connect(events, Kind::Sub), Socket::connect(events, Kind::Sub)];
    let mut third = connect(events);
    let mut rest = Vec::new();
    assert!(matches!(third.read_to_end(&mut rest), Ok(0) | Err(_)));
    master.stop().unwrap();
}

#[test]
fn settings_that_cannot_work_are_named() {
    for (change, named) in [
        ((|config| config.kv_events.backend_id.clear()) as fn(&mut Config), "kv_events.backend_id"),
        (|config| config.kv_events.buffer_mib = 0, "kv_events.buffer_mib"),
        (|config| config.kv_events.followers_max = 0, "kv_events.followers_max"),
        (
            |config| config.kv_events.replay_listen = Some("127.0.0.1:1".parse().unwrap()),
            "kv_events.replay_listen",
        ),
        (
            |config| config.kv_events.listen = Some("127.0.0.1:65535".parse().unwrap()),
            "kv_events.replay_listen",
        ),
    ] {
        let error = MasterServer::bind(with(config(), change)).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
}
