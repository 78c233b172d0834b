//! Clients that try to exhaust the master's memory: however much they send or leave unread, the memory that
//! the master holds for them is bounded, and other clients are served meanwhile.
//!
//! These tests are alone in their binary, because they measure their own process.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::Write;
use std::net::{SocketAddr, TcpStream};

use common::{assert_serves, config, connect, segment, start_with};
use store_core::message::{
    Exists, Mount, MountSegment, NewObject, Operation, PutRequest, PutStart, ReadStats,
};
use store_core::wire::{FRAME_BYTES_MAX, HEADER_BYTES};
use store_core::{Incarnation, Key, Kind, Stats};
use store_master::Config;

const MIB: usize = 1 << 20;

fn resident_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

/// The longest frame without its last byte.
fn unfinished() -> Vec<u8> {
    let mut frame = common::exists(1, &[]);
    frame.truncate(HEADER_BYTES);
    frame[20..24].copy_from_slice(&((FRAME_BYTES_MAX - HEADER_BYTES) as u32).to_le_bytes());
    frame.resize(FRAME_BYTES_MAX - 1, 0);
    frame
}

/// Sends as much as the master accepts.
fn send_all_it_takes(addr: SocketAddr, bytes: &[u8]) -> TcpStream {
    let stream = connect(addr);
    stream.set_nonblocking(true).unwrap();
    let mut sent = 0;
    let mut refused = 0;
    while sent < bytes.len() && refused < 20 {
        match (&stream).write(&bytes[sent..]) {
            Ok(len) => (sent, refused) = (sent + len, 0),
            Err(_) => {
                refused += 1;
                std::thread::sleep(std::time::Duration::from_millis(5)); // timing: a pause between two tries
            }
        }
    }
    stream
}

fn stats(addr: SocketAddr) -> Stats {
    let mut stream = connect(addr);
    let mut out = Vec::new();
    ReadStats::encode_request(&mut out, 1, &(), std::iter::empty()).unwrap();
    stream.write_all(&out).unwrap();
    let answer = common::read_answer(&mut stream).unwrap();
    ReadStats::decode_response(&answer.frame()).unwrap().0
}

#[test]
fn memory_that_hostile_clients_make_the_master_hold_is_bounded_and_given_back() {
    let store =
        store_core::MasterConfig { objects_max: 10_000, segments_max: 16, nodes_max: 16, ..config().store };
    let master = start_with(Config { buffered_mib_max: 32, stall_ms_max: 2_000, store, ..config() });
    let addr = master.rpc_addr();
    assert_serves(addr);
    let frame = unfinished();
    let before = resident_bytes();

    // Frames that are never completed: four times as much as fits.
    let held: Vec<TcpStream> = (0..32).map(|_| send_all_it_takes(addr, &frame)).collect();
    let during = resident_bytes();
    assert!(during < before + 64 * MIB, "{} MiB for unfinished frames", (during - before) / MIB);
    assert_serves(addr);
    drop(held);

    // Answers that are not read.
    let keys = vec![Key(b"some key"); 4_096];
    let mut ask = Vec::new();
    for id in 0..64 {
        Exists::encode_request(&mut ask, id, &(), keys.iter().copied()).unwrap();
    }
    let held: Vec<TcpStream> = (0..32).map(|_| send_all_it_takes(addr, &ask)).collect();
    let during = resident_bytes();
    assert!(during < before + 96 * MIB, "{} MiB for unread answers", (during - before) / MIB);
    assert_serves(addr);
    drop(held);

    // More objects and more segments than allowed, with the longest names.
    let mut stream = connect(addr);
    let name = "n".repeat(store_core::message::NAME_BYTES_MAX - 4);
    for node in 0..200_u64 {
        let own = format!("{name}{node}");
        let segment = MountSegment {
            incarnation: Incarnation::new(node + 1),
            endpoint: &name,
            ..segment(node, &own, 1 << 30)
        };
        let mut out = Vec::new();
        Mount::encode_request(&mut out, node, &segment, std::iter::empty()).unwrap();
        stream.write_all(&out).unwrap();
        common::read_answer(&mut stream).unwrap();
    }
    assert_eq!(stats(addr).segments, 16);
    for round in 0..20_u64 {
        let names: Vec<Vec<u8>> =
            (0..2_000).map(|n| format!("{:0>1000}", round * 2_000 + n).into_bytes()).collect();
        let objects = names.iter().map(|name| NewObject { key: Key(name), len: 1 });
        let mut out = Vec::new();
        PutStart::encode_request(
            &mut out,
            round,
            &PutRequest { writer: 1, ..PutRequest::default() },
            objects,
        )
        .unwrap();
        stream.write_all(&out).unwrap();
        common::read_answer(&mut stream).unwrap();
    }
    let seen = stats(addr);
    assert_eq!(seen.objects_processing, 10_000, "{seen:?}");
    let during = resident_bytes();
    assert!(during < before + 128 * MIB, "{} MiB in all", (during - before) / MIB);
    assert_serves(addr);
    master.stop().unwrap();
}

#[test]
fn every_kind_of_request_that_announces_more_than_it_contains_is_refused_before_it_costs_anything() {
    let master = start_with(config());
    let mut stream = connect(master.rpc_addr());
    // Returned leases get no answer.
    for (id, kind) in (1..).zip(Kind::ALL.iter().filter(|kind| **kind != Kind::ReturnLeases)) {
        for count in [&[0x80, 0x20][..], &[0xff, 0xff, 0xff, 0xff, 0x0f]] {
            for head_bytes in [0, 1, 2, 8, 40] {
                let mut frame = common::exists(id, &[]);
                frame.truncate(HEADER_BYTES);
                frame[6] = *kind as u8;
                frame.resize(HEADER_BYTES + head_bytes, 0);
                frame.extend_from_slice(count);
                let body_len = (frame.len() - HEADER_BYTES) as u32;
                frame[20..24].copy_from_slice(&body_len.to_le_bytes());
                stream.write_all(&frame).unwrap();
                let answer = common::read_answer(&mut stream).unwrap();
                assert_eq!(answer.header.request_id, id);
                assert!(
                    answer.bytes.len() < 64 << 10,
                    "{kind:?} was answered with {} bytes",
                    answer.bytes.len()
                );
            }
        }
    }
    assert_serves(master.rpc_addr());
}
