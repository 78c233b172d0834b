//! More peers than there are connections for: some are silent, some take more than their share, all others
//! are honest.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::{FromRawFd, OwnedFd};
use std::process::Command;
use std::time::Duration;

use common::raw::{Raw, frame_of};
use common::{Node, drive, finish, linger, pair, read, skip, write};
use te_core::{Completion, Token, Transport};
use te_tcp::Config;
use te_tcp::frame::{self, Kind, Response, Status, Step};
use zerocopy::IntoBytes;

const BYTES: usize = 1 << 20;
/// Longer than a connection may stay silent after its WELCOME when others need room.
const FIRST_OPERATION: Duration = Duration::from_millis(300);

/// Settings with which peers may hold twelve connections.
fn small() -> Config {
    Config { connections_max: 16, ..common::config() }
}

fn writes_through(initiator: &mut Node, target: &mut Node, token: u64) {
    initiator.memory.set(0, &token.to_le_bytes());
    initiator.submit(&[write(token, 0, 0, 8)]);
    assert_eq!(finish(&mut [initiator, target], token), Completion::applied(Token(token)));
    assert_eq!(target.memory.get(0, 8), token.to_le_bytes());
}

/// A connection to the target from this loopback address.
fn connect_from(source: Ipv4Addr, target: &Node) -> TcpStream {
    let SocketAddr::V4(to) = target.transport.local_address() else { panic!("an IPv4 listener") };
    let name = |ip: Ipv4Addr, port: u16| libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from(ip).to_be() },
        sin_zero: [0; 8],
    };
    let len = size_of::<libc::sockaddr_in>() as libc::socklen_t;
    // SAFETY: takes no pointer.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: opened above, and used by nothing else.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let raw = std::os::fd::AsRawFd::as_raw_fd(&fd);
    let (from, to) = (name(source, 0), name(*to.ip(), to.port()));
    // SAFETY: both addresses live across the calls and have the length that is passed.
    let done = unsafe {
        libc::bind(raw, (&raw const from).cast(), len) == 0
            && libc::connect(raw, (&raw const to).cast(), len) == 0
    };
    assert!(done, "{}", std::io::Error::last_os_error());
    TcpStream::from(fd)
}

/// Requests one READ of eight bytes and reads the answer; `seq` counts from 0 on each connection.
fn reads(raw: &mut Raw, target: &mut Node, seq: u64) {
    let operation = raw.operation(0, 8);
    raw.send(target, &frame_of(Kind::Read, 0, seq, &[operation]));
    raw.receive(target, 40);
}

#[test]
fn silent_connections_make_room_for_newcomers() {
    let mut target = common::node(small(), BYTES);
    let silent: Vec<Raw> = (0..12).map(|session| Raw::greeted(&mut target, session, 0)).collect();
    skip(FIRST_OPERATION);
    let mut newcomers: Vec<Node> = (0..12).map(|_| common::node(common::config(), BYTES)).collect();
    for (token, newcomer) in (1..).zip(&mut newcomers) {
        newcomer.attach(&target);
        writes_through(newcomer, &mut target, token);
    }
    assert_eq!(target.transport.stats().evicted, 12);
    // The silent peers come back, and now they are turned away: all others have carried something.
    let again: Vec<Raw> = (0..12).map(|_| Raw::new(&target)).collect();
    for (session, mut raw) in again.into_iter().enumerate() {
        let hello = raw.hello(100 + session as u64, 0);
        raw.send(&mut target, hello.as_bytes());
    }
    for (token, newcomer) in (101..).zip(&mut newcomers) {
        writes_through(newcomer, &mut target, token);
        assert_eq!(newcomer.transport.stats().failed, 0);
    }
    drop(silent);
}

#[test]
fn the_connection_that_has_been_silent_for_longest_goes_first_and_learns_why() {
    let mut target = common::node(small(), BYTES);
    let mut connections: Vec<Raw> = (0..12)
        .map(|session| {
            skip(Duration::from_millis(20));
            Raw::greeted(&mut target, session, 0)
        })
        .collect();
    reads(&mut connections[0], &mut target, 0);
    skip(FIRST_OPERATION);
    let _newcomer = Raw::greeted(&mut target, 50, 0);
    let last_word = connections[1].receive_rest(&mut target);
    let evicted = Step::Frame(Response::GoAway { next: 0 }, 16);
    assert_eq!(frame::parse_response(&last_word), Ok(evicted), "the first of those that carried nothing");
    assert!(connections[0].is_alive(&mut target) && connections[2].is_alive(&mut target));
}

#[test]
fn a_connection_that_never_carries_anything_is_closed_though_there_is_room() {
    let mut target = common::node(small(), BYTES);
    let (mut silent, mut used) = (Raw::greeted(&mut target, 1, 0), Raw::greeted(&mut target, 2, 0));
    reads(&mut used, &mut target, 0);
    skip(Duration::from_secs(6));
    linger(&mut [&mut target], Duration::from_millis(20));
    assert_eq!(
        frame::parse_response(&silent.receive_rest(&mut target)),
        Ok(Step::Frame(Response::GoAway { next: 0 }, 16))
    );
    assert!(used.is_alive(&mut target));
}

#[test]
fn a_slice_that_meets_a_connection_being_closed_is_carried_by_the_next() {
    // Peers may hold one connection.
    let config = Config { connections_max: 2, ..common::config() };
    let (mut a, mut target) = pair(&config, BYTES);
    for round in 0..8 {
        a.transport.fence(Token(1_000 + round), common::REMOTE).unwrap();
        assert!(finish(&mut [&mut a, &mut target], 1_000 + round).result.is_ok());
        let mut other = Raw::new(&target);
        linger(&mut [&mut a, &mut target], Duration::from_millis(2));
        skip(Duration::from_secs(2));
        // A HELLO, and after it requests on the connection that has to be closed for it.
        let hello = other.hello(100 + round, 0);
        std::io::Write::write_all(&mut other.stream, hello.as_bytes()).unwrap();
        let served = target.transport.stats().bytes_served;
        a.memory.paint(round as u8);
        let (whole, half) = (BYTES as u32, BYTES as u32 / 2);
        if round % 2 == 0 {
            a.submit(&[write(round, 0, 0, whole)]);
        } else {
            target.memory.paint(100 + round as u8);
            a.submit(&[read(round, 0, 0, half), write(2_000 + round, u64::from(half), u64::from(half), 8)]);
        }
        for _ in 0..10 {
            a.poll();
        }
        skip(Duration::from_secs(2));
        assert_eq!(finish(&mut [&mut a, &mut target], round), Completion::applied(Token(round)));
        if round % 2 == 0 {
            assert!(target.memory.get(0, BYTES) == common::pattern(round as u8, 0, BYTES));
            assert_eq!(target.transport.stats().bytes_served - served, BYTES as u64, "once");
        } else {
            assert!(finish(&mut [&mut a, &mut target], 2_000 + round).result.is_ok());
            assert!(a.memory.get(0, half as usize) == common::pattern(100 + round as u8, 0, half as usize));
        }
    }
    assert!(
        target.transport.stats().evicted > 8,
        "connections had to be closed: {:?}",
        target.transport.stats()
    );
    assert_eq!((a.transport.stats().failed, a.transport.slices_in_flight()), (0, 0));
}

#[test]
fn a_slice_that_waits_for_another_connection_can_be_cancelled_and_fails_with_its_peer() {
    let config = Config { connections_max: 2, connect_ms_max: 200, ..common::config() };
    let (mut a, mut target) = pair(&config, BYTES);
    a.transport.fence(Token(1_000), common::REMOTE).unwrap();
    assert!(finish(&mut [&mut a, &mut target], 1_000).result.is_ok());
    let mut other = Raw::new(&target);
    linger(&mut [&mut a, &mut target], Duration::from_millis(2));
    skip(Duration::from_secs(2));
    let mut other = {
        let hello = other.hello(9, 0);
        std::io::Write::write_all(&mut other.stream, hello.as_bytes()).unwrap();
        a.submit(&[write(1, 0, 0, BYTES as u32), write(2, 0, 0, 8)]);
        (0..10).for_each(|_| _ = a.poll());
        linger(&mut [&mut target], Duration::from_millis(20));
        other.receive(&mut target, 32);
        other
    };
    // In the middle of a WRITE the other connection does not have to make room.
    let held = other.operation(0, 1_000);
    other.send(&mut target, &frame_of(Kind::Write, 0, 0, &[held]));
    drive(&mut [&mut a], |a| a.transport.stats().connections_lost > 0);
    a.transport.cancel(Token(1)).unwrap();
    drive(&mut [&mut a, &mut target], |a| a.done.len() == 3);
    for token in [1, 2] {
        let end = a.ended(token).unwrap();
        assert_eq!(end.outcome, te_core::Outcome::NotApplied, "{end:?}");
    }
    assert_eq!(a.transport.slices_in_flight(), 0);
    assert_eq!(target.memory.get(0, 8), [0; 8]);
}

#[test]
fn more_initiators_than_connections_all_get_their_turn() {
    let mut target = common::node(Config { connections_max: 4, ..common::config() }, BYTES);
    let mut initiators: Vec<Node> = (0..9).map(|_| common::node(common::config(), BYTES)).collect();
    initiators.iter_mut().for_each(|initiator| initiator.attach(&target));
    for round in 0..3 {
        for (i, initiator) in initiators.iter_mut().enumerate() {
            skip(Duration::from_millis(1_100));
            writes_through(initiator, &mut target, round * 100 + i as u64);
        }
    }
    assert!(initiators.iter().all(|initiator| initiator.transport.stats().failed == 0));
}

#[test]
fn half_a_hello_holds_no_connection() {
    let (mut honest, mut target) = pair(&common::config(), BYTES);
    let mut half: Vec<Raw> = Vec::new();
    for session in 0..150 {
        let mut raw = Raw::new(&target);
        let hello = raw.hello(session, 0);
        raw.send(&mut target, &hello.as_bytes()[..20]);
        half.push(raw);
        assert!(target.transport.connections() <= 64, "{}", target.transport.connections());
    }
    writes_through(&mut honest, &mut target, 1);
    assert_eq!(
        half.iter_mut().filter_map(|raw| raw.receive_some().then_some(())).count(),
        63,
        "the latest are still there"
    );
}

#[test]
fn one_address_does_not_keep_the_others_out() {
    let mut target = common::node(small(), BYTES);
    let mut seqs = 0;
    // They are never silent, and hold as many connections as peers may hold.
    let mut greedy: Vec<Raw> = (0..12)
        .map(|session| {
            let stream = connect_from(Ipv4Addr::new(127, 0, 0, 2), &target);
            let mut raw = Raw::over(stream, &target).welcomed(&mut target, session, 0);
            reads(&mut raw, &mut target, 0);
            raw
        })
        .collect();
    let mut newcomers: Vec<Node> = (0..6).map(|_| common::node(common::config(), BYTES)).collect();
    for (token, newcomer) in (1..).zip(&mut newcomers) {
        newcomer.attach(&target);
        writes_through(newcomer, &mut target, token);
        greedy.retain_mut(|raw| raw.receive_some() && raw.received.is_empty());
        seqs += 1;
        for raw in &mut greedy {
            reads(raw, &mut target, seqs);
        }
    }
    assert!((6..=7).contains(&greedy.len()), "an even share: {}", greedy.len());
    let mut surplus = Raw::over(connect_from(Ipv4Addr::new(127, 0, 0, 2), &target), &target);
    let hello = surplus.hello(77, 0);
    surplus.send(&mut target, hello.as_bytes());
    let Ok(Step::Frame(welcome, _)) = frame::parse_welcome(&surplus.receive_rest(&mut target)) else {
        panic!()
    };
    assert_eq!(welcome.status.get(), Status::Full as u32);
}

#[test]
fn one_process_has_a_limited_number_of_connections_however_many_sessions_it_opens() {
    let mut target = common::node(common::config(), BYTES);
    let mut held = Vec::new();
    for session in 0..33 {
        let mut raw = Raw::new(&target);
        let hello = frame::Hello { identity: 7.into(), ..raw.hello(session, 0) };
        raw.send(&mut target, hello.as_bytes());
        let Ok(Step::Frame(welcome, _)) = frame::parse_welcome(&raw.receive(&mut target, 32)) else {
            panic!()
        };
        let expected = if session < 32 { Status::Ok } else { Status::Full };
        assert_eq!(welcome.status.get(), expected as u32, "connection {session}");
        held.push(raw);
    }
    Raw::greeted(&mut target, 100, 0);
}

const FEW_FILES: &str = "SNOWSKIN_TEST_FEW_FILES";

#[test]
fn a_process_out_of_descriptors_pauses_accepting_and_recovers() {
    if std::env::var_os(FEW_FILES).is_none() {
        // The limit applies to the whole process.
        let name = "a_process_out_of_descriptors_pauses_accepting_and_recovers";
        let status = Command::new(std::env::current_exe().unwrap())
            .args([name, "--exact", "--nocapture"])
            .env(FEW_FILES, "1")
            .status()
            .unwrap();
        assert!(status.success());
        return;
    }
    let (mut honest, mut target) = pair(&common::config(), BYTES);
    let streams: Vec<TcpStream> =
        (0..20).map(|_| TcpStream::connect(target.transport.local_address()).unwrap()).collect();
    let highest = std::os::fd::AsRawFd::as_raw_fd(&streams[19]) as u64;
    let limit = libc::rlimit { rlim_cur: highest + 11, rlim_max: highest + 11 };
    // SAFETY: reads the limit, which lives across the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    let mut held: Vec<Raw> = streams.into_iter().map(|stream| Raw::over(stream, &target)).collect();
    for (session, raw) in (0..).zip(&mut held) {
        let hello = raw.hello(session, 0);
        raw.send(&mut target, hello.as_bytes());
    }
    linger(&mut [&mut target], Duration::from_millis(20));
    assert_eq!(target.transport.connections(), 10, "no descriptor is left");
    let mut at_once = 0;
    for _ in 0..2_000 {
        target.poll();
        at_once += u32::from(target.transport.poll_at().is_some_and(|at| at <= common::now()));
    }
    assert!(at_once < 100, "{at_once} of 2,000 polls wanted the next one at once");
    // Connections that carry nothing are closed one at a time, and the next in the accept queue is admitted.
    let accepted = target.transport.stats().accepted;
    drive(&mut [&mut target], |target| {
        skip(Duration::from_millis(50));
        held.retain_mut(|raw| {
            while raw.receive_some() && raw.received.len() < 48 {
                if raw.received.len() == 32 {
                    return true;
                }
                if raw.received.is_empty() {
                    return true;
                }
            }
            false
        });
        target.transport.stats().accepted > accepted
    });
    drop(held);
    writes_through(&mut honest, &mut target, 1);
}
