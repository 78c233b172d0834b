//! Owners and peers that are slow, silent or greedy. Time is an argument here: nothing waits for it.

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

fn ask(export: &[u8]) -> Message {
    Message::Ask { request: 1, region: ID, key: export[41..57].try_into().unwrap() }
}

/// Whether the owner has hung up.
fn is_dropped(socket: &SeqSocket) -> bool {
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
fn settings_out_of_their_limits_are_refused_by_name() {
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
fn whoever_is_granted_nothing_in_time_is_dropped() {
    let (mut owner, _memory, export) = side();
    let (silent, wrong, good) = (connect(&export), connect(&export), connect(&export));
    for asker in [&wrong, &good] {
        send(asker, Message::Hello { protocol: PROTOCOL, identity: 7 }).unwrap();
    }
    send(&wrong, Message::Ask { request: 1, region: ID, key: [0; 16] }).unwrap();
    send(&good, ask(&export)).unwrap();
    for _ in 0..4 {
        turn(&mut owner, at(0));
    }
    assert!(![&silent, &wrong, &good].into_iter().any(is_dropped));
    // It tells when it wants to look again, and does no more than it said once they are gone.
    assert_eq!(owner.poll_at(), Some(at(2)));
    turn(&mut owner, at(1));
    assert!(![&silent, &wrong].into_iter().any(is_dropped));
    turn(&mut owner, at(2));
    assert!([&silent, &wrong].into_iter().all(is_dropped));
    assert_eq!(owner.poll_at(), None);
    turn(&mut owner, at(100));
    assert!(!is_dropped(&good));
}

#[test]
fn an_owner_that_answers_late_is_reached_from_then_on() {
    let (mut owner, theirs, export) = side();
    let (mut peer, ours, _) = side();
    let segment = RemoteRegionId::new(0, 0);
    peer.attach(segment, &export).unwrap();
    let read = |token| Slice {
        token: Token(token),
        local: RegionOffset::new(ID, 0),
        remote: RemoteOffset::new(segment, 0),
        len: LEN as u32,
        op: te_core::Op::Read,
    };
    peer.submit(&[read(1)]).unwrap();
    assert_eq!(turn(&mut peer, at(0)), []);
    assert_eq!(peer.poll_at(), Some(at(2)));
    assert_eq!(turn(&mut peer, at(1)), []);
    // Now it is late. Copies fail, and at once: other fabrics may do them.
    let late = |token| vec![Completion::not_applied(Token(token), Error::new(ErrorKind::Unreachable))];
    assert_eq!(turn(&mut peer, at(2)), late(1));
    peer.submit(&[read(2)]).unwrap();
    assert_eq!(turn(&mut peer, at(100)), late(2));
    assert_eq!(peer.poll_at(), None, "it waits for an event");
    // The owner is back.
    turn(&mut owner, at(100));
    turn(&mut owner, at(100));
    turn(&mut peer, at(101));
    peer.submit(&[read(3)]).unwrap();
    assert_eq!(turn(&mut peer, at(101)), [Completion::applied(Token(3))]);
    // One whose time passes while the owner is there is no trouble either way.
    peer.detach(segment).unwrap();
    peer.attach(segment, &export).unwrap();
    peer.detach(segment).unwrap();
    assert_eq!(peer.poll_at(), None);
    drop((owner, peer, theirs, ours));
}

#[test]
fn one_that_reads_no_answers_does_not_keep_its_owner_awake() {
    let (mut owner, _memory, export) = side();
    let greedy = connect(&export);
    send(&greedy, Message::Hello { protocol: PROTOCOL, identity: 7 }).unwrap();
    send(&greedy, ask(&export)).unwrap();
    turn(&mut owner, at(0));
    // Until there is room neither for our questions nor for the answers to them.
    let refused = Message::Ask { request: 2, region: ID, key: [0; 16] };
    let mut asked = 0;
    let mut idle = 0;
    while idle < 3 {
        idle += 1;
        while send(&greedy, refused).is_ok() {
            (asked, idle) = (asked + 1, 0);
        }
        for _ in 0..4 {
            turn(&mut owner, at(0));
        }
    }
    assert!(asked > 0);
    assert!(!is_readable(&owner), "nothing can be done for it");
    // Once it reads, all of its questions are answered.
    let mut answers = 0;
    while answers < asked {
        turn(&mut owner, at(0));
        let before = answers;
        while let Some((len, _)) = greedy.recv(&mut [0; 64]).unwrap() {
            assert!(len > 0, "it is not dropped");
            answers += 1;
        }
        assert!(answers > before, "{answers} of {asked}");
    }
}
