//! Engines with the rail and the metadata of this crate: segments of Mooncake peers, and of Snowskin engines
//! that are found by Mooncake's metadata.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::time::Duration;

use common::engines::Side;
use common::{HERE, config};
use te_core::{ErrorKind, Op, Outcome};
use te_engine::{Fabrics, Liveness, RequestProblem, SegmentError, SubmitOptions, TransferError};
use te_fabric::testkit::{eventually, pattern};
use te_mooncake::{Config, MetadataString};

const MIB: u64 = 1 << 20;

fn foreign() -> Side {
    Side::foreign(config(), &MetadataString::peer_to_peer(), 8 * MIB as usize)
}

#[test]
fn bytes_move_between_an_engine_and_the_segment_of_a_mooncake_peer() {
    let (here, there) = (foreign(), foreign());
    let segment = here.engine.open_segment(there.service.name()).unwrap();
    let regions = here.engine.segment_regions(segment).unwrap();
    assert_eq!((regions[0].addr, regions[0].len), (there.addr(), 8 * MIB));
    for (seed, (offset, len)) in
        [(0, 1), (3, 4096), (77, 65_537), (MIB - 1, 3 * MIB), (0, 8 * MIB)].into_iter().enumerate()
    {
        here.block.paint(seed as u8);
        let written = here.transfer(Op::Write, segment, offset, there.addr() + offset, len).unwrap();
        assert_eq!((written.bytes, written.fence_needed), (len, false));
        let expected = pattern(seed as u8, offset, len as usize);
        assert!(there.block.get(offset, len as usize) == expected, "{len} bytes at {offset}");
        here.block.paint(99);
        here.transfer(Op::Read, segment, offset, there.addr() + offset, len).unwrap();
        assert!(here.block.get(offset, len as usize) == expected, "{len} bytes at {offset}");
    }
    assert_eq!(here.engine.stats().rails[0].name, "mooncake");
    assert!(there.service.stats().target.writes >= 5);
}

#[test]
fn batches_notifications_and_probes_reach_a_mooncake_peer() {
    let (here, there) = (foreign(), foreign());
    let segment = here.engine.open_segment(there.service.name()).unwrap();
    here.block.paint(1);
    let requests: Vec<_> = (0..128)
        .map(|i| here.request(Op::Write, segment, i * 65_536, there.addr() + (127 - i) * 65_536, 65_536))
        .collect();
    here.submit(&requests, &SubmitOptions::new().notify("kv", b"layer 7")).unwrap();
    let notified = there.service.take_notifications();
    assert_eq!((notified[0].name.as_str(), notified[0].message.as_str()), ("kv", "layer 7"));
    assert!(there.block.get(0, 65_536) == here.block.get(127 * 65_536, 65_536));
    here.engine.notify(segment, "n", b"m").unwrap();
    assert_eq!(there.service.take_notifications().len(), 1);
    assert!(matches!(here.engine.probe(segment, Duration::from_secs(5)), Ok(Liveness::Alive { .. })));
    drop(there);
    assert_eq!(here.engine.probe(segment, Duration::from_secs(5)), Ok(Liveness::Unreachable));
}

#[test]
fn a_peer_that_restarted_is_opened_again() {
    let (here, there) = (foreign(), foreign());
    let name = there.service.name().to_owned();
    let old = here.engine.open_segment(&name).unwrap();
    here.transfer(Op::Write, old, 0, there.addr(), 100).unwrap();
    let again = Config { rpc_port: there.service.rpc_port(), ..config() };
    drop(there);
    let there = Side::foreign(again, &MetadataString::peer_to_peer(), 8 * MIB as usize);
    assert_eq!(there.service.name(), name);
    let failed = here.transfer(Op::Write, old, 0, there.addr(), 100);
    match failed {
        // The memory of the new process is elsewhere, or by chance in the same place.
        Err(TransferError::Request { problem: RequestProblem::RemoteRange, .. }) => {}
        Err(TransferError::Ended { error, .. }) => assert_eq!(error.kind, ErrorKind::PeerRestarted),
        other => panic!("{other:?}"),
    }
    let new = here.engine.open_segment(&name).unwrap();
    assert_ne!(new, old);
    here.transfer(Op::Write, new, 0, there.addr(), 100).unwrap();
    let refused = here.engine.refresh_segment(old);
    assert!(matches!(refused, Err(SegmentError::Restarted { .. })), "{refused:?}");
}

#[test]
fn what_a_peer_registers_later_is_found_by_a_refresh() {
    let (here, there) = (foreign(), foreign());
    let segment = here.engine.open_segment(there.service.name()).unwrap();
    let more = common::Exported::new(&there.service, 4096, common::ALL);
    let early = here.transfer(Op::Write, segment, 0, more.addr(), 100);
    let problem = RequestProblem::RemoteRange;
    assert_eq!(early.unwrap_err(), TransferError::Request { index: 0, problem });
    here.engine.refresh_segment(segment).unwrap();
    here.transfer(Op::Write, segment, 0, more.addr(), 100).unwrap();
    // What it withdraws is refused by the peer before the engine knows.
    let addr = more.addr();
    drop(more);
    match here.transfer(Op::Write, segment, 0, addr, 100).unwrap_err() {
        TransferError::Ended { error, fence_needed, .. } => {
            assert_eq!((error.kind, fence_needed), (ErrorKind::AccessDenied, false));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn engines_of_this_project_that_meet_by_mooncakes_metadata_use_their_own_fabrics() {
    let start =
        || Side::start(config(), &MetadataString::peer_to_peer(), 8 * MIB as usize, true, Fabrics::LOCAL);
    let (here, there) = (start(), start());
    there.service.set_native(there.engine.name(), there.engine.incarnation()).unwrap();
    let segment = here.engine.open_segment(there.service.name()).unwrap();
    here.block.paint(4);
    here.transfer(Op::Write, segment, 0, there.addr(), 8 * MIB).unwrap();
    assert!(there.block.get(0, 8 << 20) == here.block.get(0, 8 << 20));
    let bytes = |name| here.engine.stats().rails.iter().find(|rail| rail.name == name).map(|rail| rail.bytes);
    assert_eq!((bytes("local"), bytes("mooncake")), (Some(8 * MIB), Some(0)));
    assert_eq!(there.service.stats().data.accepted, 0);
    // A Mooncake peer reaches the same memory by the same name.
    let other = foreign();
    let segment = other.engine.open_segment(there.service.name()).unwrap();
    other.transfer(Op::Read, segment, 0, there.addr(), 8 * MIB).unwrap();
    assert!(other.block.get(0, 8 << 20) == here.block.get(0, 8 << 20));
    // A control port that cannot be reached, as one that listens on loopback of another host.
    let closed = { std::net::TcpListener::bind((HERE, 0)).unwrap().local_addr().unwrap() };
    there.service.set_native(&closed.to_string(), there.engine.incarnation()).unwrap();
    let far = foreign_upgrading();
    let segment = far.engine.open_segment(there.service.name()).unwrap();
    far.transfer(Op::Read, segment, 0, there.addr(), 4096).unwrap();
    assert!(far.block.get(0, 4096) == here.block.get(0, 4096));
    // The process that the descriptor names is gone.
    there.service.set_native(there.engine.name(), 7).unwrap();
    let gone = foreign_upgrading().engine.open_segment(there.service.name());
    assert!(matches!(gone, Err(SegmentError::Restarted { .. })), "{gone:?}");
}

fn foreign_upgrading() -> Side {
    Side::start(config(), &MetadataString::peer_to_peer(), 4096, true, Fabrics::LOCAL)
}

#[test]
fn names_that_lead_to_no_mooncake_peer_are_errors_that_say_why() {
    let config = Config { header_ms_max: 50, ..config() };
    let here = Side::foreign(config, &MetadataString::peer_to_peer(), 4096);
    let open = |name: &str| here.engine.open_segment(name).unwrap_err();
    assert!(matches!(open("a b:1"), SegmentError::Name(_)));
    let port = { std::net::TcpListener::bind((HERE, 0)).unwrap().local_addr().unwrap().port() };
    assert!(matches!(open(&format!("127.0.0.1:{port}")), SegmentError::Unreachable { .. }));
    // The data port is no handshake port.
    let refused = open(&format!("127.0.0.1:{}", here.service.data_port()));
    assert!(matches!(refused, SegmentError::Unreachable { .. } | SegmentError::Protocol { .. }), "{refused}");
}

#[test]
fn a_transfer_that_times_out_is_cancelled_and_its_end_is_unknown() {
    let here = foreign();
    // A peer whose data port takes everything and answers nothing.
    let silent = common::Scripted::start(|mut stream, _| {
        drop(std::io::Read::read_to_end(&mut stream, &mut Vec::new()))
    });
    let descriptor = te_mooncake::SegmentDescriptor {
        name: "silent".into(),
        data_host: None,
        data_port: silent.address.port(),
        version: te_mooncake::header::Version::V2,
        buffers: vec![te_mooncake::Buffer { addr: 4096, len: MIB, name: "silent".into() }],
        native: None,
    };
    let listener = std::net::TcpListener::bind((HERE, 0)).unwrap();
    let name = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut request = [0; 12];
            std::io::Read::read_exact(&mut stream, &mut request).unwrap();
            let answer = te_mooncake::frame::write(te_mooncake::frame::Kind::Metadata, &descriptor.to_json());
            std::io::Write::write_all(&mut stream, &answer).unwrap();
            common::finish(stream);
        }
    });
    let segment = here.engine.open_segment(&name).unwrap();
    let request = here.request(Op::Write, segment, 0, 4096, 100_000);
    let transfer = here.engine.submit(&[request], Some(Duration::from_millis(200))).unwrap();
    let ended = transfer.wait(None).unwrap_err();
    assert!(matches!(ended, TransferError::Ended { fence_needed: true, .. }), "{ended}");
    assert_eq!(transfer.request(0).map(|request| request.outcome), Some(Outcome::Unknown));
    // The local memory is free, and a fence cannot hold.
    eventually("nothing uses the region", || here.engine.unregister(here.region).is_ok());
    let fenced = here.engine.fence(segment, Some(Duration::from_secs(5))).and_then(|fence| fence.wait(None));
    assert!(fenced.is_err(), "{fenced:?}");
}
