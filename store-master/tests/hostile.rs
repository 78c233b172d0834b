//! Clients that send anything: each gets a clear error, and other clients are not affected.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::{Read, Write};
use std::time::Duration;

use common::{
    assert_greets, assert_serves, connect, exists, hello, last_words, read_answer, segment, start, start_with,
};
use store_core::message::{
    Commit, Exists, Get, Greeting, Hello, LeaseWanted, Mount, MountSegment, NewObject, Operation, PutEnd,
    PutOptions, PutRequest, PutRevoke, PutStart, Removal, Remove, Revocation,
};
use store_core::wire::{KEYS_PER_BATCH_MAX, VERSION};
use store_core::{ErrorCode, Key, Kind, Role, Secret, TenantConfig, prove};
use store_master::Config;
use te_core::testkit::Rng;
use te_fabric::testkit::eventually;

#[test]
fn garbage_gets_an_error_and_only_its_connection_ends() {
    let master = start();
    let mut good = connect(master.rpc_addr());
    assert_greets(&mut good);
    let mut bad = connect(master.rpc_addr());
    bad.write_all(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n").unwrap();
    assert_eq!(last_words(&mut bad), ErrorCode::InvalidParams.code());
    assert_greets(&mut good);
    master.stop().unwrap();
}

#[test]
fn another_version_gets_an_error_under_its_own_request_id() {
    let master = start();
    let mut stream = connect(master.rpc_addr());
    let mut frame = hello(9);
    frame[4] = 0xfe;
    stream.write_all(&frame).unwrap();
    let answer = read_answer(&mut stream).unwrap();
    assert_eq!((answer.header.request_id, answer.header.status), (9, ErrorCode::InvalidVersion.code()));
    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    assert_serves(master.rpc_addr());
}

#[test]
fn a_huge_length_is_refused_before_a_byte_is_stored() {
    let master = start();
    let mut stream = connect(master.rpc_addr());
    let mut frame = hello(1);
    frame[20..24].copy_from_slice(&u32::MAX.to_le_bytes());
    stream.write_all(&frame).unwrap();
    assert_eq!(last_words(&mut stream), ErrorCode::InvalidParams.code());
    assert_serves(master.rpc_addr());
}

#[test]
fn a_frame_cut_short_by_a_hangup_affects_no_other_connection() {
    let master = start();
    for cut in [1, 5, 23, 25] {
        let mut stream = connect(master.rpc_addr());
        let frame = exists(1, &[b"a key that is cut"]);
        stream.write_all(&frame[..cut]).unwrap();
    }
    assert_serves(master.rpc_addr());
}

#[test]
fn frames_in_single_bytes_are_answered() {
    let master = start();
    let mut stream = connect(master.rpc_addr());
    stream.set_nodelay(true).unwrap();
    for byte in [hello(1), exists(2, &[b"k"])].concat() {
        stream.write_all(&[byte]).unwrap();
    }
    assert_eq!(read_answer(&mut stream).unwrap().header.request_id, 1);
    assert_eq!(read_answer(&mut stream).unwrap().header.request_id, 2);
}

#[test]
fn a_connection_that_stalls_in_mid_frame_is_closed() {
    let master = start_with(Config { stall_ms_max: 100, ..common::config() });
    let mut idle = connect(master.rpc_addr());
    assert_greets(&mut idle);
    let mut stalled = connect(master.rpc_addr());
    stalled.write_all(&hello(1)[..10]).unwrap();
    assert_eq!(stalled.read(&mut [0]).unwrap_or(0), 0);
    // Silence between frames is not a stall.
    assert_greets(&mut idle);
}

#[test]
fn an_unknown_operation_and_a_body_that_does_not_decode_fail_alone() {
    let master = start();
    let mut stream = connect(master.rpc_addr());
    let mut unknown = hello(1);
    unknown[6] = 250;
    let mut scrambled = exists(2, &[b"key"]);
    scrambled[24] = 0xff;
    stream.write_all(&[unknown, scrambled, hello(3)].concat()).unwrap();
    let answers: Vec<_> = (0..3).map(|_| read_answer(&mut stream).unwrap().header).collect();
    assert_eq!((answers[0].request_id, answers[0].status), (1, ErrorCode::NotSupported.code()));
    assert_eq!((answers[1].request_id, answers[1].status), (2, ErrorCode::InvalidParams.code()));
    assert_eq!((answers[2].request_id, answers[2].status), (3, 0));
}

#[test]
fn too_many_keys_are_refused_and_a_key_without_bytes_does_not_exist() {
    let master = start();
    let mut stream = connect(master.rpc_addr());
    // The count is a varint before the keys; the encoder refuses to write this many.
    let mut frame = exists(1, &[]);
    frame.truncate(24);
    frame.extend([0xff, 0xff, 0x03]);
    frame.extend(vec![0; KEYS_PER_BATCH_MAX * 8]);
    let body_len = (frame.len() - 24) as u32;
    frame[20..24].copy_from_slice(&body_len.to_le_bytes());
    stream.write_all(&frame).unwrap();
    stream.write_all(&exists(2, &[b""])).unwrap();
    let answer = read_answer(&mut stream).unwrap();
    assert_eq!((answer.header.request_id, answer.header.status), (1, ErrorCode::KeysUltraLimit.code()));
    let answer = read_answer(&mut stream).unwrap();
    let found: Vec<bool> = Exists::decode_response(&answer.frame()).unwrap().1.collect();
    assert_eq!(found, [false]);
}

#[test]
fn a_response_sent_to_the_master_affects_no_other_connection() {
    let master = start();
    let mut stream = connect(master.rpc_addr());
    let mut frame = hello(1);
    frame[7] = 1;
    stream.write_all(&frame).unwrap();
    drop(stream);
    assert_serves(master.rpc_addr());
}

#[test]
fn a_peer_that_does_not_read_is_not_read_from() {
    let config = Config { backlog_bytes_max: 64 << 10, stall_ms_max: 60_000, ..common::config() };
    let master = start_with(config);
    let mut stream = connect(master.rpc_addr());
    stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    let keys = vec![b"some key".as_slice(); 1024];
    let frame = exists(1, &keys);
    // Until the sockets are full on both sides.
    let mut sent = 0;
    let mut cut = 0;
    while sent < 1 << 30 {
        match stream.write(&frame[cut..]) {
            Ok(len) => {
                sent += len;
                cut = (cut + len) % frame.len();
            }
            Err(_) => break,
        }
    }
    assert!(sent < 1 << 30, "the master reads without limit");
    assert_serves(master.rpc_addr());
    // Complete frames are answered once the peer reads.
    let whole = sent / frame.len();
    for _ in 0..whole {
        assert_eq!(read_answer(&mut stream).unwrap().header.status, 0);
    }
}

#[test]
fn one_connection_too_many_gets_an_error() {
    let master = start_with(Config { connections_max: 1, ..common::config() });
    // The first connection must have sent a request recently, which a busy machine can prevent.
    let refused = (0..200).any(|_| {
        let mut first = connect(master.rpc_addr());
        let greeted = first.write_all(&hello(1)).is_ok()
            && read_answer(&mut first).is_ok_and(|answer| answer.header.status == 0);
        let mut second = connect(master.rpc_addr());
        second.write_all(&hello(2)).is_ok()
            && greeted
            && read_answer(&mut second)
                .is_ok_and(|answer| answer.header.status == ErrorCode::TooManyConnections.code())
    });
    assert!(refused);
    // The place is free as soon as the master has noticed that the connections are closed.
    eventually("the place is free", || {
        let mut third = connect(master.rpc_addr());
        third.write_all(&hello(1)).is_ok()
            && read_answer(&mut third).is_ok_and(|answer| answer.header.status == 0)
    });
}

#[test]
fn random_bytes_never_take_it_down() {
    let master = start();
    let mut rng = Rng::new(1);
    for round in 0..200 {
        let mut stream = connect(master.rpc_addr());
        // A valid header every other time, so that bodies are tried, too.
        let mut bytes: Vec<u8> = (0..rng.below(200)).map(|_| rng.next() as u8).collect();
        if round % 2 == 0 {
            let kinds = Kind::ALL;
            let mut frame = hello(round);
            frame.truncate(24);
            frame[6] = kinds[rng.below(kinds.len() as u64) as usize] as u8;
            frame[20..24].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
            frame.append(&mut bytes);
            bytes = frame;
        }
        let _ = stream.write_all(&bytes);
    }
    assert_serves(master.rpc_addr());
}

#[test]
fn a_flood_of_connections_does_not_affect_existing_ones_and_new_ones_are_accepted() {
    let master = start_with(Config { connections_max: 8, ..common::config() });
    let mut good = connect(master.rpc_addr());
    assert_greets(&mut good);
    let crowd: Vec<_> = (0..300).map(|_| connect(master.rpc_addr())).collect();
    // A connection that sent no request is closed for a new one.
    assert_serves(master.rpc_addr());
    assert_greets(&mut good);
    drop(crowd);
}

#[test]
fn a_connection_without_a_request_is_closed() {
    let master = start_with(Config { greet_ms_max: 1, ..common::config() });
    let mut silent = connect(master.rpc_addr());
    assert_eq!(silent.read(&mut [0]).unwrap(), 0);
    master.stop().unwrap();
}

/// Sends one request about one key, as a tenant; gives the result of that key, or of the whole request.
macro_rules! ask {
    ($stream:expr, $operation:ty, $ask:expr, $item:expr) => {{
        let mut out = Vec::new();
        <$operation>::encode_request(&mut out, 5, &$ask, std::iter::once($item)).unwrap();
        $stream.write_all(&out).unwrap();
        let answer = read_answer($stream).unwrap();
        let decoded = <$operation>::decode_response(&answer.frame());
        decoded.and_then(|(_, mut items)| items.next().unwrap())
    }};
}

#[test]
fn another_tenant_that_knows_key_and_generation_cannot_change_a_put() {
    let tenants =
        ["mine", "theirs"].map(|name| TenantConfig { name: name.into(), ..TenantConfig::default() });
    let mut config = common::config();
    (config.store.multi_tenants, config.store.tenants) = (true, tenants.into());
    config.store.admin_secret = Secret::new(b"sesame");
    let epoch = config.store.epoch;
    let master = start_with(config);
    let greet = |tenant: &str, admin: &[u8]| {
        let mut stream = connect(master.rpc_addr());
        let mut hello = |greeting: &Greeting<'_>| {
            let mut out = Vec::new();
            Hello::encode_request(&mut out, 1, greeting, std::iter::empty()).unwrap();
            stream.write_all(&out).unwrap();
            let answer = read_answer(&mut stream).unwrap();
            Hello::decode_response(&answer.frame()).unwrap().0.challenge
        };
        let challenge = hello(&Greeting { tenant: "", ..Greeting::default() });
        let proof = prove(admin, Role::Admin, &challenge, tenant);
        let admin_proof = if admin.is_empty() { Key(b"") } else { Key(&proof) };
        hello(&Greeting { version: VERSION, tenant, admin_proof, ..Greeting::default() });
        stream
    };
    let (mut mine, mut theirs) = (greet("mine", b""), greet("theirs", b""));
    let segment = MountSegment { lineage: epoch.into(), ..segment(1, "n", 1 << 20) };
    let mut out = Vec::new();
    Mount::encode_request(&mut out, 1, &segment, std::iter::empty()).unwrap();
    let mut node = greet("", b"sesame");
    node.write_all(&out).unwrap();
    assert_eq!(read_answer(&mut node).unwrap().header.status, 0);
    // A peer without the secret cannot act as a node.
    mine.write_all(&out).unwrap();
    assert_eq!(read_answer(&mut mine).unwrap().header.status, ErrorCode::PermissionDenied.code());

    let key = Key(b"k");
    let start = PutRequest { writer: 1, ..PutRequest::once(PutOptions::DEFAULT) };
    let put = ask!(&mut mine, PutStart, start, NewObject { key, len: 100 }).unwrap();
    let (generation, handle) = (put.generation, put.handle);
    // Neighbouring generations as well: they are counted upwards.
    for generation in generation - 5..generation + 5 {
        let commit = Commit { key, generation, handle, checksum: 0 };
        assert_eq!(ask!(&mut theirs, PutEnd, (), commit), Err(ErrorCode::PutIsOver));
        for quiet in [true, false] {
            let revocation = Revocation { key, generation, handle, quiet };
            assert_eq!(ask!(&mut theirs, PutRevoke, (), revocation), Err(ErrorCode::PutIsOver));
        }
    }
    let removal = Removal { key, force: true };
    assert_eq!(ask!(&mut theirs, Remove, (), removal), Err(ErrorCode::KeyNotFound));
    assert_eq!(ask!(&mut mine, PutEnd, (), Commit { key, generation, handle, checksum: 7 }), Ok(()));
    assert_eq!(ask!(&mut theirs, Get, LeaseWanted::Quick, key).map(|_| ()), Err(ErrorCode::ObjectNotFound));
    assert_eq!(ask!(&mut theirs, Remove, (), removal), Err(ErrorCode::KeyNotFound));
    assert_eq!(ask!(&mut mine, Get, LeaseWanted::Quick, key).map(|object| object.checksum), Ok(7));
}

mod timing {
    //! Real time: a byte every 20 ms, until the master closes the connection after `stall_ms_max`.

    use super::*;

    #[test]
    fn a_frame_in_occasional_single_bytes_does_not_keep_its_place() {
        let master = start_with(Config { stall_ms_max: 200, ..common::config() });
        let mut trickle = connect(master.rpc_addr());
        trickle.set_nodelay(true).unwrap();
        let mut frame = exists(1, &[]);
        frame.resize(64 << 10, 0);
        let body_len = (frame.len() - 24) as u32;
        frame[20..24].copy_from_slice(&body_len.to_le_bytes());
        // Each byte comes well within `stall_ms_max`, but the frame would take half an hour.
        let closed = frame.iter().take(1_500).any(|byte| {
            std::thread::sleep(Duration::from_millis(20));
            trickle.write_all(&[*byte]).is_err()
        });
        assert!(closed);
        assert_serves(master.rpc_addr());
    }
}
