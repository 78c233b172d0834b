//! A child process that drops the transports it has inherited: the parent's are not affected.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use common::{Node, REMOTE, finish, in_a_child, pair, read, write};
use te_core::{Completion, EventSource, Memory, Token, Transport};
use te_tcp::Config;

const BYTES: usize = 1 << 20;

/// Continues with both transports in the parent; the child drops its copies.
fn survive(a: Node, target: Node) -> (Node, Node) {
    let Node { transport: ours, memory, done } = a;
    let Node { transport: theirs, memory: remote, done: others } = target;
    let mut moved = Some((ours, theirs));
    in_a_child("transports are dropped", || {
        drop(moved.take());
        Ok(())
    });
    let (ours, theirs) = moved.unwrap();
    (Node { transport: ours, memory, done }, Node { transport: theirs, memory: remote, done: others })
}

#[test]
fn a_child_that_drops_a_transport_leaves_the_parents_connections_alone() {
    for config in [common::config(), Config { connections: 4, checksum: true, ..common::config() }] {
        let (mut a, mut target) = pair(&config, BYTES);
        a.memory.paint(3);
        a.submit(&[write(1, 0, 0, BYTES as u32)]);
        assert!(finish(&mut [&mut a, &mut target], 1).result.is_ok());

        // In the middle of a WRITE and a READ.
        a.submit(&[
            write(2, 0, 0, BYTES as u32 / 2),
            read(3, BYTES as u64 / 2, BYTES as u64 / 2, BYTES as u32 / 2),
        ]);
        a.poll();
        target.poll();
        (a, target) = survive(a, target);
        assert_eq!(finish(&mut [&mut a, &mut target], 2), Completion::applied(Token(2)));
        assert_eq!(finish(&mut [&mut a, &mut target], 3), Completion::applied(Token(3)));
        // Readiness is still reported: a poller that is asked before reading learns of the next slice.
        common::linger(&mut [&mut a, &mut target], std::time::Duration::from_millis(20));
        (a, target) = survive(a, target);
        for node in [&a, &target] {
            let EventSource(fd) = node.transport.event_source().unwrap();
            let mut asked = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            // SAFETY: `asked` is one entry and lives across the call.
            let ready = unsafe { libc::poll(&raw mut asked, 1, 20) };
            assert_eq!(ready, 0, "nothing has happened to its sockets");
        }
        a.submit(&[write(4, 0, 8, 8)]);
        assert_eq!(finish(&mut [&mut a, &mut target], 4), Completion::applied(Token(4)));
        assert_eq!(a.transport.stats().connections_lost, 0, "no connection was lost");
        assert_eq!(target.transport.stats().accepted, a.transport.stats().connections_opened);
        // A new peer is accepted.
        let mut newcomer = common::node(config.clone(), BYTES);
        newcomer.transport.attach(REMOTE, &target.export()).unwrap();
        newcomer.submit(&[write(5, 0, 0, 8)]);
        assert!(finish(&mut [&mut newcomer, &mut target], 5).result.is_ok());
    }
}
