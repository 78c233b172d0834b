//! Time limits: of handshakes, of requests and operations at the target, of silent peers at the initiator, of
//! idle connections. Each test waits for a limit that it sets to some 100 ms.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::time::{Duration, Instant};

use common::{
    ALL, Exported, Scripted, config, connect, everything, exactly, exchange, rail, request, service_with,
};
use te_core::{ErrorKind, Op, Outcome};
use te_fabric::testkit::{drive, finish, kind, read, write};
use te_mooncake::header::{Status, Version};
use te_mooncake::{Client, Config, MetadataString, PeerError};

const SHORT_MS: u32 = 150;
const SHORT: Duration = Duration::from_millis(SHORT_MS as u64);
/// Far more than the limits of these tests, and less than the defaults.
const LONG: Duration = Duration::from_secs(3);

/// How long `work` took: at least `SHORT`, and less than `LONG`.
fn takes_short<T>(work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = work();
    let took = start.elapsed();
    assert!(took >= SHORT - Duration::from_millis(20) && took < LONG, "it took {took:?}");
    result
}

#[test]
fn a_handshake_that_drips_is_closed_at_its_deadline() {
    let service = service_with(Config { handshake_ms_max: SHORT_MS, ..config() });
    let mut stream = connect(service.rpc_port());
    takes_short(|| {
        // Each byte comes in time, but not the request.
        for byte in 100_u64.to_le_bytes().into_iter().chain([1; 92]) {
            if stream.write_all(&[byte]).is_err() {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(everything(&mut stream), b"");
    });
}

#[test]
fn a_client_that_does_not_close_after_its_answer_is_closed() {
    let service = service_with(Config { handshake_ms_max: SHORT_MS, ..config() });
    let mut stream = connect(service.rpc_port());
    stream.write_all(&te_mooncake::frame::write(te_mooncake::frame::Kind::Probe, b"{}")).unwrap();
    assert_eq!(everything(&mut stream).len(), 30);
    takes_short(|| te_fabric::testkit::eventually("it is closed", || service.stats().handshakes.open == 0));
}

#[test]
fn a_request_that_drips_is_closed_and_an_idle_connection_is_not() {
    let service = service_with(Config { header_ms_max: SHORT_MS, ..config() });
    let exported = Exported::new(&service, 64, ALL);
    let mut idle = connect(service.data_port());
    assert_eq!(exchange(&mut idle, Op::Read, exported.addr(), &mut [0; 8]), Some(Status::Done));
    let mut unused = connect(service.data_port());
    let mut dripping = connect(service.data_port());
    takes_short(|| {
        for byte in &request(Op::Read, Version::V2, exported.addr(), 8)[..23] {
            if dripping.write_all(&[*byte]).is_err() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(everything(&mut dripping), b"");
    });
    assert_eq!(everything(&mut unused), b"", "a connection that never carried a request");
    std::thread::sleep(2 * SHORT);
    assert_eq!(exchange(&mut idle, Op::Read, exported.addr(), &mut [0; 8]), Some(Status::Done));
}

#[test]
fn an_operation_that_moves_nothing_is_closed() {
    let service = service_with(Config { silence_ms_max: SHORT_MS, ..config() });
    let exported = Exported::new(&service, 64 << 20, ALL);
    let mut writer = connect(service.data_port());
    writer.write_all(&request(Op::Write, Version::V2, exported.addr(), 100)).unwrap();
    writer.write_all(&[1; 99]).unwrap();
    takes_short(|| assert_eq!(everything(&mut writer), b""));
    // One that reads nothing of what it has asked for.
    let mut reader = connect(service.data_port());
    reader.write_all(&request(Op::Read, Version::V2, exported.addr(), 64 << 20)).unwrap();
    exactly(&mut reader, 8);
    takes_short(|| te_fabric::testkit::eventually("it is closed", || service.stats().data.open == 0));
    assert!(everything(&mut reader).len() < 64 << 20);
}

#[test]
fn an_operation_that_moves_nothing_while_others_wait_is_closed_after_a_second() {
    let service = service_with(Config { target_inflight_bytes_max: 100, ..config() });
    let exported = Exported::new(&service, 4096, ALL);
    let mut stalled = connect(service.data_port());
    stalled.write_all(&request(Op::Write, Version::V2, exported.addr(), 100)).unwrap();
    stalled.write_all(&[1; 10]).unwrap();
    te_fabric::testkit::eventually("it is being served", || exported.block.get(9, 1) == [1]);
    let mut waiting = connect(service.data_port());
    let start = Instant::now();
    assert_eq!(exchange(&mut waiting, Op::Read, exported.addr(), &mut [0; 8]), Some(Status::Done));
    assert!(start.elapsed() < LONG, "30 s are the limit of an operation for which none waits");
    assert_eq!(everything(&mut stalled), b"");
}

#[test]
fn a_target_that_answers_nothing_ends_slices_after_the_limit() {
    let target = Scripted::start(|mut stream, _| {
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let config = Config { silence_ms_max: SHORT_MS, ..config() };
    let mut node = rail(&config, None, 4096, &target.export(4096, 4096, Version::V2));
    takes_short(|| {
        node.submit(&[read(1, 0, 0, 100), write(2, 0, 0, 100)]);
        let (read, written) = (finish(&mut [&mut node], 1), finish(&mut [&mut node], 2));
        assert_eq!((kind(&read), read.outcome), (ErrorKind::PeerDead, Outcome::NotApplied));
        assert_eq!((kind(&written), written.outcome), (ErrorKind::PeerDead, Outcome::Unknown));
        assert_eq!(read.result.unwrap_err().code, libc::ETIMEDOUT);
    });
}

#[test]
fn time_in_which_the_rail_was_not_polled_is_not_the_targets_silence() {
    let target = Scripted::start(|mut stream, _| {
        common::next_request(&mut stream);
        std::thread::sleep(2 * SHORT);
        stream.write_all(&Status::Done.to_bytes()).unwrap();
        stream.write_all(&[5; 100]).unwrap();
        common::finish(stream);
    });
    let config = Config { silence_ms_max: SHORT_MS, ..config() };
    let mut node = rail(&config, None, 4096, &target.export(4096, 4096, Version::V2));
    node.submit(&[read(1, 0, 0, 100)]);
    drive(&mut [&mut node], |node| node.transport.stats().bytes >= 24);
    std::thread::sleep(3 * SHORT);
    assert!(finish(&mut [&mut node], 1).result.is_ok());
}

#[test]
fn an_idle_connection_of_the_rail_is_closed_after_the_limit() {
    let target = Scripted::start(|mut stream, _| {
        while common::next_request(&mut stream).is_some() {
            stream.write_all(&[&Status::Done.to_bytes()[..], &[5; 100]].concat()).unwrap();
        }
    });
    let config = Config { idle_ms_max: SHORT_MS, ..config() };
    let mut node = rail(&config, None, 4096, &target.export(4096, 4096, Version::V2));
    node.submit(&[read(1, 0, 0, 100)]);
    assert!(finish(&mut [&mut node], 1).result.is_ok());
    assert_eq!(node.transport.connections(), 1);
    takes_short(|| drive(&mut [&mut node], |node| node.transport.connections() == 0));
}

#[test]
fn a_peer_that_accepts_and_says_nothing_ends_a_handshake_after_the_limit() {
    let listener = TcpListener::bind((common::HERE, 0)).unwrap();
    let name = listener.local_addr().unwrap().to_string();
    let config = Config { timeout_ms: SHORT_MS, ..config() };
    let client = Client::new(&config, &MetadataString::peer_to_peer()).unwrap();
    takes_short(|| {
        let error = client.probe(&name).unwrap_err();
        assert!(matches!(&error, PeerError::Unreachable { reason, .. } if reason == "timed out"), "{error}");
    });
}

#[test]
fn a_peer_whose_answer_drips_ends_a_handshake_after_the_limit() {
    let listener = TcpListener::bind((common::HERE, 0)).unwrap();
    let name = listener.local_addr().unwrap().to_string();
    let config = Config { timeout_ms: SHORT_MS, ..config() };
    let client = Client::new(&config, &MetadataString::peer_to_peer()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            exactly(&mut stream, 12);
            for byte in 1000_u64.to_le_bytes().into_iter().chain([1; 400]) {
                if stream.write_all(&[byte]).is_err() {
                    return;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        takes_short(|| assert!(client.descriptor(&name).is_err()));
    });
}
