//! Peers and owners that send what they must not: bytes that are no frame, handles that do not fit, memory
//! that is shorter than they say. A peer that sends it is disconnected; others are not disturbed.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;
#[path = "../../te-gpu/tests/common/mod.rs"]
mod fakes;

use std::os::fd::{AsFd, OwnedFd};

use common::{
    INITIATOR, MIB, REGION, REMOTE, TARGET, export, poll, register, run, slice, transport, until, with,
};
use fakes::Fake;
use te_core::grant::{Message, PROTOCOL};
use te_core::{Access, ErrorKind, Memory, Op, RegionId, Token, Transport};
use te_host::control::{Ledger, SeqSocket, boot_id, socket_name};
use te_nvlink::wire::{FRAME_BYTES_MAX, Frame, Means, Part};
use te_nvlink::{Config, Export};

const BYTES: usize = MIB;

fn frame(frame: Frame) -> Vec<u8> {
    let mut bytes = [0; FRAME_BYTES_MAX];
    let len = frame.encode(&mut bytes);
    bytes[..len].to_vec()
}

fn message(message: Message) -> Vec<u8> {
    frame(Frame::Grant(message))
}

fn part(means: Means, bytes: u64, offset: u64, len: u64) -> Vec<u8> {
    frame(Frame::Part(Part { means, bytes, offset, len }))
}

const HELLO: Message = Message::Hello { protocol: PROTOCOL, identity: 77 };

/// What a socket has received: `None`, nothing; an empty frame, the end.
fn received(socket: &SeqSocket) -> Option<Vec<u8>> {
    let mut bytes = [0; 128];
    match socket.recv(&mut bytes) {
        Ok(None) => None,
        Ok(Some((len, _))) => Some(bytes[..len].to_vec()),
        Err(_) => Some(Vec::new()),
    }
}

#[test]
fn a_peer_that_sends_garbage_is_disconnected_and_others_are_served() {
    let fakes = [Fake::cuda(), Fake::cuda()];
    let (mut peer, mut owner) = (transport(&fakes[0], INITIATOR), transport(&fakes[1], TARGET));
    register(&mut peer, REGION, fakes[0].allocate(BYTES), Access::LOCAL);
    register(&mut owner, REGION, fakes[1].allocate(BYTES), Access::all());
    let blob = export(&owner, REGION);
    let good = Export::parse(&blob).unwrap();
    peer.attach(REMOTE, &blob).unwrap();
    let ask = Message::Ask { request: 1, region: REGION, key: good.key };
    let mut long = message(ask);
    long.push(0);
    let cases: Vec<Vec<Vec<u8>>> = vec![
        vec![vec![9]],
        vec![vec![0]],
        vec![vec![0, 99]],
        vec![vec![0xFF; 91]],
        vec![vec![0xFF; 10_000]],
        vec![message(HELLO)[..9].to_vec()],
        vec![message(Message::Hello { protocol: PROTOCOL + 1, identity: 77 })],
        vec![message(Message::Hello { protocol: PROTOCOL, identity: 0 })],
        // Before its HELLO, and twice.
        vec![message(ask)],
        vec![message(HELLO), message(HELLO)],
        vec![message(HELLO), long],
        // What an owner sends.
        vec![message(HELLO), message(Message::Welcome)],
        vec![part(Means::Fd, 1, 0, 1)],
        vec![message(HELLO), part(Means::Ipc([1; 64]), 1, 0, 1)],
        // Granted, and then garbage: it is to be disconnected, and has to release the memory first.
        vec![message(HELLO), message(ask), vec![7; 7], message(Message::Release { row: 0 })],
    ];
    for case in cases {
        let liar = SeqSocket::connect(&socket_name(&good.socket)).unwrap();
        for bytes in &case {
            // The owner may have closed the connection before the last frame.
            let _closed = liar.send(bytes, None);
        }
        until("the liar is disconnected", || {
            poll(&mut owner);
            std::iter::from_fn(|| received(&liar)).any(|bytes| bytes.is_empty())
        });
        assert_eq!(
            run(&mut peer, Some(&mut owner), &[slice(1, Op::Write, 0, 0, 4_096)]),
            [Ok(())],
            "{case:?}"
        );
    }
    // A release of a row that was never granted does nothing.
    let liar = SeqSocket::connect(&socket_name(&good.socket)).unwrap();
    for row in [0, 1, 1_023, 1_024, u32::MAX] {
        liar.send(&message(Message::Release { row }), None).unwrap();
    }
    for _ in 0..100 {
        poll(&mut owner);
    }
    assert_eq!(run(&mut peer, Some(&mut owner), &[slice(1, Op::Write, 0, 0, 4_096)]), [Ok(())]);
    until("the region is free", || {
        poll(&mut peer);
        owner.deregister(REGION).is_ok()
    });
}

#[test]
fn a_peer_that_closes_its_connection_and_lives_keeps_what_it_has_mapped() {
    let fake = Fake::cuda();
    let mut owner = with(&fake, Config { quarantine_ms: 100, ..Config::default() });
    register(&mut owner, REGION, fake.allocate(BYTES), Access::all());
    let good = Export::parse(&export(&owner, REGION)).unwrap();
    let peer = SeqSocket::connect(&socket_name(&good.socket)).unwrap();
    let ask = Message::Ask { request: 1, region: REGION, key: good.key };
    for sent in [HELLO, ask] {
        peer.send(&message(sent), None).unwrap();
    }
    let mut granted = 0;
    until("the region is granted", || {
        poll(&mut owner);
        granted += received(&peer).iter().filter(|frame| frame[..2] == [0, 4]).count();
        granted > 0
    });
    assert!(owner.is_connected(77));
    drop(peer);
    let mut looks = std::collections::BTreeSet::new();
    // The process of the peer, which is this one, lives. Its connection says nothing about its copies.
    // timing: longer than the time after which a process that cannot be seen counts as dead
    let start = std::time::Instant::now();
    // timing: as above
    while start.elapsed().as_millis() < 400 {
        poll(&mut owner);
        looks.extend(owner.poll_at());
        assert_eq!(owner.deregister(REGION).unwrap_err().kind, ErrorKind::Busy);
    }
    assert!((2..50).contains(&looks.len()), "its process is looked at {} times", looks.len());
    assert!(!owner.is_connected(77), "its connection has ended");
}

/// A listener that plays an owner.
struct Liar {
    listener: SeqSocket,
    export: Export,
}

impl Liar {
    fn new(nth: u8, gpu: Option<[u8; 16]>) -> Self {
        let mut socket = [nth; 16];
        socket[..4].copy_from_slice(&std::process::id().to_le_bytes());
        let export = Export {
            host: boot_id().unwrap(),
            gpu,
            socket,
            region: RegionId::new(0, 1),
            key: [7; 16],
            len: BYTES as u64,
            access: Access::REMOTE_WRITE,
            addresses: Vec::new(),
        };
        Self { listener: SeqSocket::listen(&socket_name(&socket)).unwrap(), export }
    }
}

type Sent = (Vec<u8>, Option<OwnedFd>);

fn grant(row: u32, len: usize, access: Access) -> Sent {
    (message(Message::Grant { request: 1, row, offset: 0, len: len as u64, access }), None)
}

/// A memory file of this length, sealed against shrinking.
fn file(bytes: usize) -> Option<OwnedFd> {
    let memory = common::shared(bytes);
    Some(memory.share(te_host::Protection::ReadWrite).unwrap())
}

/// Sends frames in answer to an `Ask`; the error with which a slice ends.
fn lie(nth: u8, gpu: Option<[u8; 16]>, rows: bool, sent: Vec<Sent>) -> ErrorKind {
    let fake = Fake::cuda();
    let mut peer = with(&fake, Config { identity: INITIATOR, grant_ms_max: 500, ..Config::default() });
    register(&mut peer, REGION, fake.allocate(BYTES), Access::LOCAL);
    let liar = Liar::new(nth, gpu);
    peer.attach(REMOTE, &liar.export.to_bytes()).unwrap();
    let socket = liar.listener.accept().unwrap().unwrap();
    if rows {
        let (_ledger, fd) = Ledger::create().unwrap();
        socket.send(&message(Message::Welcome), Some(fd.as_fd())).unwrap();
    }
    let mut left = sent.iter();
    assert_eq!(peer.submit(&[slice(1, Op::Write, 0, 0, 4_096)]), Ok(1));
    let mut ended = Vec::new();
    until("the slice ends", || {
        // As many as there is room for.
        while let Some((bytes, fd)) = left.clone().next() {
            match socket.send(bytes, fd.as_ref().map(AsFd::as_fd)) {
                Err(nix::errno::Errno::EAGAIN) => break,
                _ => _ = left.next(),
            }
        }
        ended.extend(poll(&mut peer));
        !ended.is_empty()
    });
    assert_eq!(ended[0].token, Token(1));
    peer.detach(REMOTE).unwrap();
    peer.deregister(REGION).unwrap();
    drop(peer);
    assert_eq!(fake.wrong(), 0);
    ended[0].result.unwrap_err().kind
}

const GPU: Option<[u8; 16]> = Some([1; 16]);

#[test]
fn an_owner_that_lies_about_its_memory_is_not_believed() {
    let all = Access::all();
    let fd = || (part(Means::Fd, 2 * MIB as u64, 0, BYTES as u64), file(2 * MIB));
    let kind = |nth, gpu, sent| lie(nth, gpu, true, sent);
    // No ledger, a ledger that is no file, and one that is too short.
    assert_eq!(lie(1, GPU, false, vec![(message(Message::Welcome), None)]), ErrorKind::Protocol);
    assert_eq!(lie(2, GPU, false, vec![(message(Message::Welcome), file(4_096))]), ErrorKind::Protocol);
    // A grant before the ledger, and of no parts.
    assert_eq!(lie(3, GPU, false, vec![grant(0, BYTES, all)]), ErrorKind::Protocol);
    assert_eq!(kind(4, GPU, vec![grant(0, BYTES, all)]), ErrorKind::InvalidArgument);
    // Other lengths and rights than the export says.
    assert_eq!(kind(5, GPU, vec![fd(), grant(0, BYTES + 1, all)]), ErrorKind::AccessDenied);
    assert_eq!(kind(6, GPU, vec![fd(), grant(0, BYTES, Access::REMOTE_READ)]), ErrorKind::AccessDenied);
    // Parts that are shorter or longer than the grant, or do not fit together.
    let short = || (part(Means::Fd, 2 * MIB as u64, 0, 4_096), file(2 * MIB));
    assert_eq!(kind(7, GPU, vec![short(), grant(0, BYTES, all)]), ErrorKind::InvalidArgument);
    assert_eq!(kind(8, GPU, vec![short(), fd(), grant(0, BYTES, all)]), ErrorKind::InvalidArgument);
    let out = (part(Means::Fd, 4_096, 4_096, BYTES as u64), file(2 * MIB));
    assert_eq!(kind(9, GPU, vec![out, grant(0, BYTES, all)]), ErrorKind::InvalidArgument);
    let huge = (part(Means::Fd, u64::MAX, 1, BYTES as u64), file(2 * MIB));
    assert_eq!(kind(10, GPU, vec![huge, grant(0, BYTES, all)]), ErrorKind::InvalidArgument);
    // A descriptor that is missing, and one of less memory.
    let none = (part(Means::Fd, 2 * MIB as u64, 0, BYTES as u64), None);
    assert_eq!(kind(11, GPU, vec![none, grant(0, BYTES, all)]), ErrorKind::Protocol);
    let less = (part(Means::Fd, 4 * MIB as u64, 0, BYTES as u64), file(2 * MIB));
    assert_eq!(kind(12, GPU, vec![less, grant(0, BYTES, all)]), ErrorKind::Unreachable);
    // Handles of nothing.
    for (nth, means) in [(13, Means::Ipc([0xAB; 64])), (14, Means::Fabric([0xAB; 64]))] {
        let sent = vec![(part(means, 2 * MIB as u64, 0, BYTES as u64), None), grant(0, BYTES, all)];
        assert_eq!(kind(nth, GPU, sent), ErrorKind::Unreachable);
    }
    // Host memory for a device's, and the other way round.
    let host = || (part(Means::File, 2 * MIB as u64, 0, BYTES as u64), file(2 * MIB));
    assert_eq!(kind(15, GPU, vec![host(), grant(0, BYTES, all)]), ErrorKind::Protocol);
    assert_eq!(kind(16, None, vec![fd(), grant(0, BYTES, all)]), ErrorKind::Protocol);
    assert_eq!(kind(17, None, vec![host(), host(), grant(0, BYTES, all)]), ErrorKind::Protocol);
    let short = (part(Means::File, 2 * MIB as u64, 0, BYTES as u64), file(4_096));
    assert_eq!(kind(18, None, vec![short, grant(0, BYTES, all)]), ErrorKind::Unreachable);
    // A row that the ledger does not have.
    assert_eq!(kind(19, GPU, vec![fd(), grant(1_024, BYTES, all)]), ErrorKind::Protocol);
    // Garbage, what a peer sends, more parts than a region has, and silence.
    assert_eq!(kind(20, GPU, vec![(vec![3; 40], None)]), ErrorKind::Protocol);
    assert_eq!(kind(21, GPU, vec![(grant(0, BYTES, all).0[..9].to_vec(), None)]), ErrorKind::InvalidArgument);
    assert_eq!(kind(22, GPU, vec![(message(HELLO), None)]), ErrorKind::Protocol);
    let many = (0..4_097).map(|_| (part(Means::Fabric([1; 64]), 1, 0, 1), None)).collect();
    assert_eq!(kind(23, GPU, many), ErrorKind::Protocol);
    assert_eq!(kind(24, GPU, vec![]), ErrorKind::Unreachable);
}

#[test]
fn a_process_of_another_user_is_refused_unless_that_is_allowed() {
    if te_host::own_uid() != 0 {
        println!("skipped: only root can become another user");
        return;
    }
    for (other_users, expected) in [(false, true), (true, false)] {
        let fake = Fake::cuda();
        let mut owner = with(&fake, Config { other_users, ..Config::default() });
        register(&mut owner, REGION, fake.allocate(BYTES), Access::all());
        let Export { socket, .. } = Export::parse(&export(&owner, REGION)).unwrap();
        // The credentials of a thread are those of what it connects.
        let connects = std::thread::spawn(move || {
            become_another_user();
            let socket = SeqSocket::connect(&socket_name(&socket)).unwrap();
            socket.send(&message(HELLO), None).unwrap();
            socket
        });
        let foreign = connects.join().unwrap();
        let mut answer = None;
        until("the foreign has an answer", || {
            poll(&mut owner);
            answer = received(&foreign);
            answer.is_some()
        });
        assert_eq!(answer.unwrap().is_empty(), expected, "other_users = {other_users}");
    }
}

#[allow(unsafe_code, reason = "changes the user of one thread")]
fn become_another_user() {
    // SAFETY: changes the credentials of this thread alone, which ends soon.
    let code = unsafe { libc::syscall(libc::SYS_setresuid, -1, 65_534, -1) };
    assert_eq!(code, 0);
}
