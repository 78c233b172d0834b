//! Bytes are written to another transport and read back, over real sockets on this machine.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use common::{by_peers, drive, finish, pair, pattern, read, users, write};
use te_core::{Completion, Op, Token, Transport};
use te_tcp::Config;

fn configs() -> Vec<Config> {
    let small = Config { piece_bytes_max: 4_096, connections: 3, ..common::config() };
    vec![
        common::config(),
        Config { checksum: true, ..common::config() },
        Config { checksum: true, ..small.clone() },
        small,
    ]
}

#[test]
fn what_is_written_is_read_back() {
    for config in configs() {
        let (mut a, mut b) = pair(&config, 4 << 20);
        a.memory.paint(7);
        let len = 3 << 20;
        a.submit(&[write(1, 11, 500, len)]);
        assert_eq!(finish(&mut [&mut a, &mut b], 1), Completion::applied(Token(1)));
        assert!(b.memory.get(500, len as usize) == pattern(7, 11, len as usize));
        assert_eq!(b.memory.get(499, 1), [0]);
        assert_eq!(b.memory.get(500 + u64::from(len), 1), [0]);

        a.memory.paint(0);
        a.submit(&[read(2, 0, 500, len)]);
        assert_eq!(finish(&mut [&mut a, &mut b], 2), Completion::applied(Token(2)));
        assert!(a.memory.get(0, len as usize) == pattern(7, 11, len as usize));
    }
}

#[test]
fn many_small_slices_of_both_kinds_share_a_connection() {
    for config in configs() {
        let (mut a, mut b) = pair(&config, 1 << 20);
        a.memory.paint(1);
        b.memory.paint(2);
        // Even chunks are written there, odd ones are read from there.
        let slices: Vec<_> = (0..1_024_u64)
            .map(|i| {
                let op = if i % 2 == 0 { Op::Write } else { Op::Read };
                common::slice(i, op, i * 1_024, i * 1_024, if i % 3 == 0 { 1_024 } else { 777 })
            })
            .collect();
        a.submit(&slices);
        drive(&mut [&mut a, &mut b], |node| node.done.len() == slices.len());
        for slice in &slices {
            assert!(a.ended(slice.token.0).unwrap().result.is_ok());
            let (len, at) = (slice.len as usize, slice.local.offset);
            let seed = if slice.op == Op::Write { 1 } else { 2 };
            let place = if slice.op == Op::Write { &b.memory } else { &a.memory };
            assert!(place.get(at, len) == pattern(seed, at, len), "slice {:?}", slice.token);
        }
        assert_eq!(a.transport.slices_in_flight(), 0);
        assert_eq!(users(&a), by_peers(0));
        assert_eq!(users(&b), by_peers(0));
    }
}

#[test]
fn a_transport_reaches_its_own_regions() {
    let mut a = common::node(common::config(), 1 << 16);
    let blob = a.export();
    te_core::Memory::attach(&mut a.transport, common::REMOTE, &blob).unwrap();
    a.memory.set(0, b"to myself");
    a.submit(&[write(1, 0, 1_000, 9)]);
    assert!(finish(&mut [&mut a], 1).result.is_ok());
    assert_eq!(a.memory.get(1_000, 9), b"to myself");
}

#[test]
fn a_drained_transport_leaves_its_event_source_quiet() {
    let (mut a, mut b) = pair(&common::config(), 8 << 20);
    let slices: Vec<_> = (0..64).map(|i| write(i, i << 16, i << 16, 1 << 16)).collect();
    a.submit(&slices);
    drive(&mut [&mut a, &mut b], |node| node.done.len() == 64);
    for node in [&mut a, &mut b] {
        // Neither an active connection nor an empty one makes it readable.
        node.poll();
        node.poll();
        let fd = node.transport.event_source().unwrap().0;
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one `pollfd` that lives across the call.
        assert_eq!(unsafe { libc::poll(&raw mut poll, 1, 0) }, 0);
    }
}

#[test]
fn more_is_requested_than_the_windows_hold() {
    for op in [Op::Read, Op::Write] {
        let (mut a, mut b) = pair(&common::config(), 16 << 20);
        a.memory.paint(1);
        b.memory.paint(2);
        let slices: Vec<_> =
            (0..128).map(|i| common::slice(i, op, (i % 16) << 20, (i % 16) << 20, 1 << 20)).collect();
        a.submit(&slices);
        drive(&mut [&mut a, &mut b], |node| node.done.len() == slices.len());
        assert!(a.memory.get(0, 16 << 20) == b.memory.get(0, 16 << 20));
    }
}
