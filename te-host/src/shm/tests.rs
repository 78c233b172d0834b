//! Owners and peers that are slow, silent or greedy. The tests pass the time as an argument, so nothing waits
//! for it.

use std::os::fd::BorrowedFd;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use te_core::grant::{MESSAGE_BYTES_MAX, Message, PROTOCOL};
use te_core::{Completion, Memory, RegionOffset, RemoteOffset, RemoteRegionId, Token, Transport};

use super::*;
use crate::sys::{AllocOptions, SeqSocket};

const LEN: usize = 4096;
const ID: RegionId = RegionId::new(0, 0);

/// A transport with one region, the region's memory, and its export.
fn side() -> (ShmTransport, Arc<SharedMemory>, Vec<u8>) {
    let mut side = ShmTransport::new(ShmConfig::default()).unwrap();
    let options = AllocOptions { peers_may_write: true, populate: false, huge_pages: false };
    let memory = SharedMemory::new(LEN, options).unwrap();
    #[allow(unsafe_code, reason = "a test's own memory")]
    // SAFETY: the memory outlives the transport in every test, and no reference to it is ever made.
    unsafe {
        side.register(ID, memory.span(), Access::all()).unwrap();
    }
    let mut export = vec![0; 128];
    let len = side.export(ID, &mut export).unwrap();
    export.truncate(len);
    (side, memory, export)
}

fn at(seconds: u64) -> Instant {
    Instant::from_millis(seconds * 1000 + 1)
}

fn turn(side: &mut ShmTransport, now: Instant) -> Vec<Completion> {
    let mut out = [Completion::applied(Token(0)); 8];
    let count = side.poll(now, &mut out);
    out[..count].to_vec()
}

/// Connects to the listener that an export names.
fn connect(export: &[u8]) -> SeqSocket {
    SeqSocket::connect(&socket_name(export[17..33].try_into().unwrap())).unwrap()
}

fn send(socket: &SeqSocket, message: Message) -> Result<(), nix::errno::Errno> {
    let mut bytes = [0; MESSAGE_BYTES_MAX];
    let len = message.encode(&mut bytes);
    socket.send(&bytes[..len], None)
}

fn request(export: &[u8]) -> Message {
    Message::Ask { request: 1, region: ID, key: export[41..57].try_into().unwrap() }
}

/// Whether the owner has closed the connection.
fn is_disconnected(socket: &SeqSocket) -> bool {
    loop {
        match socket.recv(&mut [0; 64]) {
            Ok(None) => return false,
            Ok(Some((0, _))) | Err(_) => return true,
            Ok(Some(_)) => {}
        }
    }
}

fn is_readable(side: &ShmTransport) -> bool {
    let EventSource(fd) = side.event_source().unwrap();
    #[allow(unsafe_code, reason = "a test's own descriptor")]
    // SAFETY: the transport keeps it open.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], PollTimeout::ZERO).unwrap() > 0
}

#[test]
fn settings_outside_their_ranges_are_refused_by_name() {
    let good = ShmConfig::default();
    for (field, config) in [
        ("peers_max", ShmConfig { peers_max: 0, ..good }),
        ("peers_per_user_max", ShmConfig { peers_per_user_max: 65_537, ..good }),
        ("idle_ms_max", ShmConfig { idle_ms_max: 0, ..good }),
        ("grant_ms_max", ShmConfig { grant_ms_max: 3_600_001, ..good }),
    ] {
        match ShmTransport::new(config).map(drop) {
            Err(OpenError::Config(error)) => assert_eq!(error.field, field),
            other => panic!("{field}: {other:?}"),
        }
    }
}

#[test]
fn a_peer_that_is_granted_nothing_in_time_is_disconnected() {
    let (mut owner, _memory, export) = side();
    let (silent, wrong, good) = (connect(&export), connect(&export), connect(&export));
    for peer in [&wrong, &good] {
        send(peer, Message::Hello { protocol: PROTOCOL, identity: 7 }).unwrap();
    }
    send(&wrong, Message::Ask { request: 1, region: ID, key: [0; 16] }).unwrap();
    send(&good, request(&export)).unwrap();
    for _ in 0..4 {
        turn(&mut owner, at(0));
    }
    assert!(![&silent, &wrong, &good].into_iter().any(is_disconnected));
    // It returns when it has to be polled again, and returns nothing once they are disconnected.
    assert_eq!(owner.poll_at(), Some(at(2)));
    turn(&mut owner, at(1));
    assert!(![&silent, &wrong].into_iter().any(is_disconnected));
    turn(&mut owner, at(2));
    assert!([&silent, &wrong].into_iter().all(is_disconnected));
    assert_eq!(owner.poll_at(), None);
    turn(&mut owner, at(100));
    assert!(!is_disconnected(&good));
}

#[test]
fn an_owner_that_answers_late_is_reached_from_then_on() {
    let (mut owner, theirs, export) = side();
    let (mut peer, ours, _) = side();
    let remote = RemoteRegionId::new(0, 0);
    peer.attach(remote, &export).unwrap();
    let read = |token| Slice {
        token: Token(token),
        local: RegionOffset::new(ID, 0),
        remote: RemoteOffset::new(remote, 0),
        len: LEN as u32,
        op: te_core::Op::Read,
    };
    peer.submit(&[read(1)]).unwrap();
    assert_eq!(turn(&mut peer, at(0)), []);
    assert_eq!(peer.poll_at(), Some(at(2)));
    assert_eq!(turn(&mut peer, at(1)), []);
    // The answer is late now. Copies fail at once, so that other fabrics may do them.
    let late = |token| vec![Completion::not_applied(Token(token), Error::new(ErrorKind::Unreachable))];
    assert_eq!(turn(&mut peer, at(2)), late(1));
    peer.submit(&[read(2)]).unwrap();
    assert_eq!(turn(&mut peer, at(100)), late(2));
    assert_eq!(peer.poll_at(), None, "the peer waits for an event");
    // The owner is polled again.
    turn(&mut owner, at(100));
    turn(&mut owner, at(100));
    turn(&mut peer, at(101));
    peer.submit(&[read(3)]).unwrap();
    assert_eq!(turn(&mut peer, at(101)), [Completion::applied(Token(3))]);
    // A region that is detached while it waits for its owner leaves no deadline behind.
    peer.detach(remote).unwrap();
    peer.attach(remote, &export).unwrap();
    peer.detach(remote).unwrap();
    assert_eq!(peer.poll_at(), None);
    drop((owner, peer, theirs, ours));
}

#[test]
fn a_peer_that_reads_no_answers_does_not_keep_its_owner_awake() {
    let (mut owner, _memory, export) = side();
    let greedy = connect(&export);
    send(&greedy, Message::Hello { protocol: PROTOCOL, identity: 7 }).unwrap();
    send(&greedy, request(&export)).unwrap();
    turn(&mut owner, at(0));
    // Until there is room neither for requests nor for the answers to them.
    let refused = Message::Ask { request: 2, region: ID, key: [0; 16] };
    let mut requests = 0;
    let mut idle = 0;
    while idle < 3 {
        idle += 1;
        while send(&greedy, refused).is_ok() {
            (requests, idle) = (requests + 1, 0);
        }
        for _ in 0..4 {
            turn(&mut owner, at(0));
        }
    }
    assert!(requests > 0);
    assert!(!is_readable(&owner), "the owner can do nothing for it");
    // Once the peer reads, all its requests are answered.
    let mut answers = 0;
    while answers < requests {
        turn(&mut owner, at(0));
        let before = answers;
        while let Some((len, _)) = greedy.recv(&mut [0; 64]).unwrap() {
            assert!(len > 0, "it is not disconnected");
            answers += 1;
        }
        assert!(answers > before, "{answers} of {requests}");
    }
}
