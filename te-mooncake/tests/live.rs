//! Interoperation with a live Mooncake engine: its published wheel, driven by `live/peer.py`.
//!
//! `MOONCAKE_PYTHON` names a Python that has the wheel (`mooncake-transfer-engine-non-cuda`). Without it, the
//! wheel is installed into a virtual environment in `target/peers`; where that is not possible, the tests are
//! reported as ignored.
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]

mod common;
#[path = "live/peer.rs"]
mod peer;
#[path = "common/servers.rs"]
mod servers;

use std::process::ExitCode;

use common::engines::Side;
use common::{Exported, config, connect, everything, exactly, exchange, request};
use libtest_mimic::{Arguments, Completion, Trial};
use peer::{Peer, crc32, python};
use serde_json::json;
use servers::{Kind, Server};
use te_core::Op;
use te_engine::{SegmentError, SubmitOptions, TransferError};
use te_fabric::testkit::eventually;
use te_mooncake::header::{Status, Version};
use te_mooncake::{Config, MetadataString};

const MIB: u64 = 1 << 20;
const SIZES: [u64; 9] = [1, 7, 4_096, 65_535, 65_536, 65_537, MIB, 5 * MIB + 3, 64 * MIB];
const BUFFER: u64 = 64 * MIB;

type Test = fn();
const TESTS: [(&str, Test); 13] = [
    ("ours_to_mooncake::reads_and_writes_of_every_size", ours_to_mooncake),
    ("ours_to_mooncake::many_slices_at_a_time", many_slices),
    ("ours_to_mooncake::a_refused_range_is_denied_and_the_rest_goes_on", refused_by_mooncake),
    ("ours_to_mooncake::a_restarted_peer_is_opened_again", mooncake_restarts),
    ("ours_to_mooncake::version_1", version_1_to_mooncake),
    ("ours_to_mooncake::raw_bytes_are_answered_as_recorded", raw_bytes),
    ("mooncake_to_ours::reads_and_writes_of_every_size", mooncake_to_ours),
    ("mooncake_to_ours::version_1", version_1_to_ours),
    ("mooncake_to_ours::a_connection_per_transfer", connection_per_transfer),
    ("mooncake_to_ours::what_is_not_exported_fails_and_the_rest_goes_on", refused_by_ours),
    ("mooncake_to_ours::a_restarted_service_is_found_again", ours_restarts),
    ("both::notifications_and_probes", notifications),
    ("both::hostile_descriptors_are_refused_and_the_rest_goes_on", hostile_descriptors),
];
const WITH_SERVERS: [(Kind, Test); 2] = [(Kind::Http, over_http), (Kind::Etcd, over_etcd)];

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let with_servers = WITH_SERVERS
        .iter()
        .map(|&(kind, test)| (format!("both::over_{}", kind.name()), kind.missing(), test));
    let tests = TESTS.iter().map(|&(name, test)| (name.to_owned(), None, test));
    let trials = tests.chain(with_servers).map(|(name, missing, test)| {
        Trial::ignorable_test(name, move || {
            let missing = missing.map(str::to_owned).or_else(|| python().as_ref().err().cloned());
            if let Some(missing) = missing {
                eprintln!("ignored: {missing}");
                return Ok(Completion::ignored_with(missing));
            }
            test();
            Ok(Completion::Completed)
        })
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

fn side() -> Side {
    Side::foreign(config(), &MetadataString::peer_to_peer(), BUFFER as usize)
}

fn peer() -> Peer {
    Peer::start("127.0.0.1", "P2PHANDSHAKE", BUFFER)
}

/// Bytes from one end to the other and back, with the CRC-32 of both ends compared.
fn moves_both_ways(here: &Side, peer: &mut Peer, sizes: &[u64]) {
    let segment = here.engine.open_segment(&peer.name).unwrap();
    for (i, &len) in sizes.iter().enumerate() {
        let offset = (BUFFER - len).min(i as u64 * 13);
        let painted = peer.call(json!(["paint", i, offset, len]));
        here.transfer(Op::Read, segment, offset, peer.base + offset, len).unwrap();
        assert_eq!(painted, crc32(&here.block.get(offset, len as usize)), "READ of {len} bytes");
        here.block.paint(i as u8 + 100);
        let written = here.transfer(Op::Write, segment, offset, peer.base + offset, len).unwrap();
        assert_eq!((written.bytes, written.fence_needed), (len, false));
        let digest = peer.call(json!(["digest", offset, len]));
        assert_eq!(digest, crc32(&here.block.get(offset, len as usize)), "WRITE of {len} bytes");
    }
}

fn ours_to_mooncake() {
    let (here, mut peer) = (side(), peer());
    moves_both_ways(&here, &mut peer, &SIZES);
}

fn many_slices() {
    let (here, mut peer) = (side(), peer());
    let segment = here.engine.open_segment(&peer.name).unwrap();
    here.block.paint(1);
    let of = |op| -> Vec<_> {
        let request = |i: u64| here.request(op, segment, i * 65_536, peer.base + (1023 - i) * 65_536, 65_536);
        (0..1024).map(request).collect()
    };
    here.submit(&of(Op::Write), &SubmitOptions::new()).unwrap();
    let first = crc32(&here.block.get(1023 * 65_536, 65_536));
    let sent = here.block.get(0, BUFFER as usize);
    here.block.paint(2);
    here.submit(&of(Op::Read), &SubmitOptions::new()).unwrap();
    assert!(here.block.get(0, BUFFER as usize) == sent);
    assert_eq!(peer.call(json!(["digest", 0, 65_536])), first);
}

fn refused_by_mooncake() {
    let (here, mut peer) = (side(), peer());
    let segment = here.engine.open_segment(&peer.name).unwrap();
    here.transfer(Op::Write, segment, 0, peer.base, 100).unwrap();
    assert_eq!(peer.call(json!(["register", false])), 0);
    for op in [Op::Read, Op::Write] {
        match here.transfer(op, segment, 0, peer.base, 16 * MIB).unwrap_err() {
            TransferError::Ended { error, fence_needed, .. } => {
                // A target that closes with unread bytes resets, which may overtake its status.
                let overtaken = op == Op::Write && fence_needed;
                assert!(error.kind == te_core::ErrorKind::AccessDenied || overtaken, "{op:?}: {error}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(peer.call(json!(["register", true])), 0);
    here.engine.refresh_segment(segment).unwrap();
    here.transfer(Op::Write, segment, 0, peer.base, 100).unwrap();
}

fn mooncake_restarts() {
    let server = Server::start(Kind::Http);
    let here = Side::foreign(config_named("here"), &server.metadata(), BUFFER as usize);
    let mut old = Peer::start("there", &server.string(), BUFFER);
    let before = here.engine.open_segment("there").unwrap();
    here.transfer(Op::Write, before, 0, old.base, 100).unwrap();
    // Its entries stay behind.
    old.kill();
    let dead = here.transfer(Op::Write, before, 0, old.base, 100).unwrap_err();
    assert!(matches!(dead, TransferError::Ended { .. }), "{dead}");
    let mut new = Peer::start("there", &server.string(), BUFFER);
    eventually("the restart is noticed", || match here.engine.refresh_segment(before) {
        Err(SegmentError::Restarted { .. }) => true,
        other => panic!("{other:?}"),
    });
    let after = here.engine.open_segment("there").unwrap();
    here.block.paint(3);
    here.transfer(Op::Write, after, 0, new.base, 10 * MIB).unwrap();
    assert_eq!(new.call(json!(["digest", 0, 10 * MIB])), crc32(&here.block.get(0, 10 << 20)));
}

/// What `frame`, `header` and the tests of the ports were recorded from.
fn raw_bytes() {
    let mut peer = peer();
    let here = side();
    let segment = here.service.client().descriptor(&peer.name).unwrap();
    assert_eq!((segment.version, segment.buffers[0].addr), (Version::V2, peer.base));
    let digest = peer.call(json!(["paint", 1, 0, 1000]));
    let mut stream = connect(segment.data_port);
    let mut bytes = vec![0; 1000];
    assert_eq!(exchange(&mut stream, Op::Read, peer.base, &mut bytes), Some(Status::Done));
    assert_eq!(digest, crc32(&bytes));
    assert_eq!(exchange(&mut stream, Op::Write, peer.base + 5000, &mut bytes), Some(Status::Done));
    assert_eq!(peer.call(json!(["digest", 5000, 1000])), crc32(&bytes));
    std::io::Write::write_all(&mut stream, &request(Op::Read, Version::V1, peer.base, 1000)).unwrap();
    assert_eq!(exactly(&mut stream, 1000), bytes);
    std::io::Write::write_all(&mut stream, &request(Op::Read, Version::V2, peer.base + BUFFER - 4, 16))
        .unwrap();
    assert_eq!(everything(&mut stream), Status::Rejected.to_bytes());
    let port = peer.name.rsplit_once(':').unwrap().1.parse().unwrap();
    let probe = common::handshake(port, &te_mooncake::frame::write(te_mooncake::frame::Kind::Probe, b"{}"));
    assert_eq!(
        probe,
        te_mooncake::frame::write(te_mooncake::frame::Kind::Probe, te_mooncake::message::ALIVE)
    );
}

fn mooncake_to_ours() {
    let (here, mut peer) = (side(), peer());
    assert_eq!(peer.call(json!(["first", here.service.name()])), here.addr());
    for (i, &len) in SIZES.iter().enumerate() {
        let offset = (BUFFER - len).min(i as u64 * 13);
        let painted = peer.call(json!(["paint", i, offset, len]));
        let transfer = |op| json!(["transfer", op, here.service.name(), offset, here.addr() + offset, len]);
        assert_eq!(peer.call(transfer("write")), 0, "WRITE of {len} bytes");
        assert_eq!(painted, crc32(&here.block.get(offset, len as usize)), "WRITE of {len} bytes");
        here.block.paint(i as u8 + 100);
        assert_eq!(peer.call(transfer("read")), 0, "READ of {len} bytes");
        let digest = peer.call(json!(["digest", offset, len]));
        assert_eq!(digest, crc32(&here.block.get(offset, len as usize)), "READ of {len} bytes");
    }
    let offsets: Vec<u64> = (0..200).map(|i| i * 10_000).collect();
    let remotes: Vec<u64> = offsets.iter().rev().map(|offset| here.addr() + offset).collect();
    let lengths: Vec<u64> = (0..200).map(|i| i * 50).collect();
    for op in ["write", "read"] {
        assert_eq!(peer.call(json!(["batch", op, here.service.name(), offsets, remotes, lengths])), 0);
    }
    let digest = peer.call(json!(["digest", offsets[199], lengths[199]]));
    assert_eq!(digest, crc32(&here.block.get(0, lengths[199] as usize)));
}

/// Reads are answered; writes are acknowledged by nothing, and arrive nevertheless.
fn version_1_to_mooncake() {
    let forced = Config { force_v1: true, ..config() };
    let here = Side::foreign(forced.clone(), &MetadataString::peer_to_peer(), BUFFER as usize);
    let mut peer = peer();
    let segment = here.engine.open_segment(&peer.name).unwrap();
    let painted = peer.call(json!(["paint", 1, 0, 5 * MIB]));
    here.transfer(Op::Read, segment, 0, peer.base, 5 * MIB).unwrap();
    assert_eq!(painted, crc32(&here.block.get(0, 5 << 20)));
    let refused = here.transfer(Op::Write, segment, 0, peer.base, 100).unwrap_err();
    let problem = te_engine::RequestProblem::RemoteAccess;
    assert_eq!(refused, TransferError::Request { index: 0, problem });
    let allowed = Config { allow_unacknowledged_v1: true, ..forced };
    let here = Side::foreign(allowed, &MetadataString::peer_to_peer(), BUFFER as usize);
    let segment = here.engine.open_segment(&peer.name).unwrap();
    here.block.paint(3);
    let sent = here.transfer(Op::Write, segment, 0, peer.base, 5 * MIB).unwrap();
    assert!(sent.fence_needed);
    let expected = crc32(&here.block.get(0, 5 << 20));
    eventually("the bytes arrive", || peer.call(json!(["digest", 0, 5 * MIB])) == expected);
}

fn version_1_to_ours() {
    let here = side();
    let mut peer = Peer::start_with("127.0.0.1", "P2PHANDSHAKE", BUFFER, &[("MC_TCP_PROTO", "1")]);
    let painted = peer.call(json!(["paint", 1, 0, 5 * MIB]));
    let ours = here.service.name().to_owned();
    assert_eq!(peer.call(json!(["transfer", "write", ours, 0, here.addr(), 5 * MIB])), 0);
    eventually("the bytes arrive", || painted == crc32(&here.block.get(0, 5 << 20)));
    here.block.paint(3);
    assert_eq!(peer.call(json!(["transfer", "read", ours, 0, here.addr(), 5 * MIB])), 0);
    assert_eq!(peer.call(json!(["digest", 0, 5 * MIB])), crc32(&here.block.get(0, 5 << 20)));
    assert_eq!(peer.call(json!(["transfer", "read", ours, 0, here.addr() + BUFFER, 5])), -1);
}

fn connection_per_transfer() {
    let here = side();
    let one_shot = [("MC_TCP_ENABLE_CONNECTION_POOL", "0")];
    let mut peer = Peer::start_with("127.0.0.1", "P2PHANDSHAKE", BUFFER, &one_shot);
    let ours = here.service.name().to_owned();
    for i in 0..20 {
        let painted = peer.call(json!(["paint", i, 0, MIB]));
        assert_eq!(peer.call(json!(["transfer", "write", ours, 0, here.addr(), MIB])), 0);
        assert_eq!(painted, crc32(&here.block.get(0, 1 << 20)));
    }
    assert!(here.service.stats().data.accepted >= 20);
    eventually("they are closed", || here.service.stats().data.open == 0);
}

fn refused_by_ours() {
    let (here, mut peer) = (side(), peer());
    let ours = here.service.name().to_owned();
    let mut transfer =
        |op: &str, remote: u64, len: u64| peer.call(json!(["transfer", op, ours, 0, remote, len]));
    assert_eq!(transfer("write", here.addr(), 100), 0);
    let read_only = Exported::new(&here.service, 4096, te_core::Access::REMOTE_READ);
    for (op, remote, len, expected) in [
        ("write", here.addr() + BUFFER - 10, 11, -1),
        ("read", here.addr() + BUFFER, 1, -1),
        ("write", read_only.addr(), 100, -1),
        ("read", read_only.addr(), 100, 0),
        ("write", here.addr(), 16 * MIB, 0),
    ] {
        assert_eq!(transfer(op, remote, len), expected, "{op} of {len} bytes");
    }
    here.service.withdraw(here.addr()).unwrap();
    assert_eq!(transfer("write", here.addr(), 16 * MIB), -1);
    // After some refusals a Mooncake initiator fails one more transfer, towards a Mooncake target, too.
    eventually("it goes on", || transfer("read", read_only.addr(), 100) == 0);
}

fn ours_restarts() {
    let (here, mut peer) = (side(), peer());
    let name = here.service.name().to_owned();
    assert_eq!(peer.call(json!(["transfer", "write", name, 0, here.addr(), 100])), 0);
    // Both ports as before: a Mooncake initiator keeps what it knows about a segment.
    let again = Config { rpc_port: here.service.rpc_port(), data_port: here.service.data_port(), ..config() };
    drop(here);
    let here = Side::foreign(again, &MetadataString::peer_to_peer(), BUFFER as usize);
    assert_eq!(here.service.name(), name);
    let digest = peer.call(json!(["paint", 5, 0, 100]));
    eventually("it reaches the new process", || {
        peer.call(json!(["transfer", "write", name, 0, here.addr(), 100])) == 0
    });
    assert_eq!(digest, crc32(&here.block.get(0, 100)));
}

fn notifications() {
    let (here, mut peer) = (side(), peer());
    let segment = here.engine.open_segment(&peer.name).unwrap();
    here.engine.notify(segment, "kv é", "lay\"er\n7 é".as_bytes()).unwrap();
    let request = here.request(Op::Write, segment, 0, peer.base, 100);
    here.submit(&[request], &SubmitOptions::new().notify("done", b"8")).unwrap();
    assert_eq!(peer.call(json!(["notifies"])), json!([["kv é", "lay\"er\n7 é"], ["done", "8"]]));
    let ours = here.service.name().to_owned();
    assert_eq!(peer.call(json!(["notifying", ours, here.addr(), 100, "k é", "m \u{1}\n"])), 0);
    eventually("the notification arrives", || {
        let notified = here.service.take_notifications();
        notified.iter().any(|of| of.name == "k é" && of.message == "m \u{1}\n")
    });
    here.service.client().probe(&peer.name).unwrap();
    assert_eq!(peer.call(json!(["probe", ours])), 0);
    drop(here);
    assert_ne!(peer.call(json!(["probe", ours])), 0);
}

/// Entries that a Mooncake engine does not survive everywhere: it aborts on some of them.
fn hostile_descriptors() {
    let server = Server::start(Kind::Http);
    let mut peer = Peer::start("there", &server.string(), BUFFER);
    let ours = Side::foreign(config_named("here"), &server.metadata(), MIB as usize);
    for value in ["{}", "[1]", "\"str\"", "{\"protocol\":\"tcp\",\"tcp_data_port\":\"x\"}"] {
        server.put("mooncake/ram/bad", value);
        assert!(ours.engine.open_segment("bad").is_err(), "{value}");
    }
    assert_eq!(peer.call(json!(["transfer", "write", "here", 0, ours.addr(), 100])), 0);
}

fn config_named(name: &str) -> Config {
    Config { name: Some(name.into()), ..config() }
}

fn over_http() {
    over(Kind::Http);
}

fn over_etcd() {
    over(Kind::Etcd);
}

/// Both sides find each other on a metadata server.
fn over(kind: Kind) {
    let server = Server::start(kind);
    let here = Side::foreign(config_named("here"), &server.metadata(), BUFFER as usize);
    let mut peer = Peer::start("there", &server.string(), BUFFER);
    assert_eq!(peer.name, "there");
    moves_both_ways(&here, &mut peer, &[1, 65_537, 5 * MIB]);
    assert_eq!(peer.call(json!(["first", "here"])), here.addr());
    let digest = peer.call(json!(["paint", 9, 0, 3 * MIB]));
    assert_eq!(peer.call(json!(["transfer", "write", "here", 0, here.addr(), 3 * MIB])), 0);
    assert_eq!(digest, crc32(&here.block.get(0, 3 << 20)));
    assert_eq!(peer.call(json!(["probe", "here"])), 0);
    here.service.client().probe("there").unwrap();
    here.service.client().notify("there", "n", "m").unwrap();
    assert_eq!(peer.call(json!(["notifies"])), json!([["n", "m"]]));
}
