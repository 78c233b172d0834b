//! A polling thread that waits on the event source and on `poll_at` alone makes progress, and is not woken
//! without work.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::time::Duration;

use common::{Node, now, read, write};
use te_core::Transport;

const BYTES: usize = 4 << 20;

/// Waits for one of the event sources, or until a transport wants to be polled; returns whether some source
/// is readable.
fn park(nodes: &[&mut Node], most: Duration) -> bool {
    let mut fds: Vec<libc::pollfd> = nodes
        .iter()
        .map(|node| libc::pollfd {
            fd: node.transport.event_source().unwrap().0,
            events: libc::POLLIN,
            revents: 0,
        })
        .collect();
    let now = now();
    let until = nodes.iter().filter_map(|node| node.transport.poll_at()).min();
    let wait = until.map_or(most, |until| Duration::from_nanos(until.nanos_since(now)).min(most));
    let ms = wait.as_millis() as i32 + i32::from(wait.subsec_nanos() % 1_000_000 > 0);
    // SAFETY: the array lives across the call and has the length that is passed.
    let ready = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, ms) };
    ready > 0
}

#[test]
fn a_parked_thread_is_woken_by_work_alone() {
    for config in common::configs() {
        let (mut a, mut b) = common::pair(&config, BYTES);
        let mut rounds = 0;
        let mut run = |a: &mut Node, b: &mut Node, token: u64| {
            while a.ended(token).is_none() {
                park(&[a, b], Duration::from_secs(5));
                a.poll();
                b.poll();
                rounds += 1;
                assert!(rounds < 20_000, "it spins: {config:?}");
            }
            assert!(a.ended(token).unwrap().result.is_ok());
        };
        a.submit(&[write(1, 0, 0, 1 << 20)]);
        run(&mut a, &mut b, 1);
        for token in 2..12 {
            a.submit(&[read(token, 0, 0, 4_096)]);
            run(&mut a, &mut b, token);
        }
        // Quiet from here on, up to the next keep-alive, after one more look at the deadlines that were set.
        for _ in 0..8 {
            park(&[&mut a, &mut b], Duration::from_millis(10));
            a.poll();
            b.poll();
        }
        assert!(!park(&[&mut a, &mut b], Duration::ZERO), "an event without work: {config:?}");
        for node in [&a, &b] {
            let next = node.transport.poll_at().expect("keep-alives have deadlines");
            assert!(next.nanos_since(now()) > 100_000_000, "it wants to be polled in {next:?}");
        }
    }
}
