//! Neighbours that do not say where they are: connecting to them takes its time, and nobody else's.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use common::{Net, REGION, SEGMENT, config, read, write};
use te_core::{ErrorKind, Memory, Outcome, RemoteRegionId, Slice, Token, Transport};
use te_rdma::Config;

const BYTES: usize = 1 << 20;
const OTHER: RemoteRegionId = RemoteRegionId::new(1, 1);

/// A neighbour that is waited for keeps nobody waiting but the link to it. The simulated call gives up after
/// ten seconds; what a poll that waited for it could not do is done here while it still waits.
fn patient() -> Config {
    Config { qps: 2, peer_silence_ms_max: 3_600_000, connect_ms_max: 3_600_000, ..config() }
}

/// Three nodes: 0 and 2 initiate, 1 is their target, and 0 knows 2 as well.
fn three() -> Net {
    let mut net = Net::new(1);
    for _ in 0..3 {
        net.add(&patient(), BYTES);
    }
    net.attach(0, SEGMENT, 1, REGION);
    net.attach(2, SEGMENT, 1, REGION);
    net.attach(2, OTHER, 0, REGION);
    net
}

#[test]
fn a_poll_does_not_wait_for_our_own_neighbour() {
    let mut net = three();
    net.fabric.set_neighbours(net.ports[0], false);
    net.nodes[0].submit(&[write(1, 0, 0, 4_096)]);
    net.drive("the neighbour is asked", |net| net.fabric.waiting_for_neighbours(net.ports[0]) == 1);
    // The others go on, and so does the transport itself: it serves as a target, once its own neighbour is
    // not needed.
    net.nodes[2].submit(&[write(2, 0, 8_192, 64)]);
    net.drive("somebody else's WRITE ends", |net| net.nodes[2].ended(2).is_some());
    assert!(net.nodes[2].ended(2).unwrap().result.is_ok());
    for _ in 0..1_000 {
        net.step();
    }
    assert_eq!(net.fabric.waiting_for_neighbours(net.ports[0]), 1, "it is still being waited for");
    assert!(net.nodes[0].ended(1).is_none());
    net.fabric.set_neighbours(net.ports[0], true);
    assert!(net.finish(1).result.is_ok());
}

#[test]
fn a_target_serves_others_while_it_waits_for_one_peers_neighbour() {
    let mut net = three();
    net.nodes[2].submit(&[write(1, 0, 0, 8)]);
    net.drive("the first peer is connected", |net| net.nodes[2].ended(1).is_some());
    let target = net.ports[1];
    net.fabric.set_neighbours(target, false);
    net.nodes[0].submit(&[write(2, 0, 0, 4_096), read(3, 8_192, 0, 64)]);
    net.drive("the neighbour is asked", |net| net.fabric.waiting_for_neighbours(target) == 1);
    // Keys and fences of the other peer are answered meanwhile.
    net.nodes[2].transport.fence(Token(4), SEGMENT).unwrap();
    net.drive("another's fence ends", |net| net.nodes[2].ended(4).is_some());
    assert!(net.nodes[2].ended(4).unwrap().result.is_ok());
    assert_eq!(net.fabric.waiting_for_neighbours(target), 1);
    // What the peer that waits asks behind its offer waits with it.
    net.nodes[0].transport.fence(Token(5), SEGMENT).unwrap();
    for _ in 0..1_000 {
        net.step();
    }
    assert!(net.nodes[0].done.is_empty());
    net.fabric.set_neighbours(target, true);
    for token in [2, 3, 5] {
        assert!(net.finish(token).result.is_ok());
    }
}

#[test]
fn a_neighbour_that_cannot_be_found_fails_the_rail() {
    let mut net = three();
    net.fabric.set_neighbours(net.ports[0], false);
    net.nodes[0].submit(&[write(1, 0, 0, 8)]);
    net.drive("the neighbour is asked", |net| net.fabric.waiting_for_neighbours(net.ports[0]) == 1);
    net.fabric.fail_qp_steps(net.ports[0], libc::EHOSTUNREACH, 2);
    net.fabric.set_neighbours(net.ports[0], true);
    let end = net.finish(1);
    assert_eq!((common::kind(&end), end.outcome), (ErrorKind::Rail, Outcome::NotApplied));
    net.nodes[0].submit(&[write(2, 0, 0, 8)]);
    net.drive("it is tried again", |net| {
        net.nodes[0].ended(2).is_some_and(|end| end.result.is_ok()) || {
            if net.nodes[0].ended(2).is_some() {
                net.nodes[0].done.clear();
                net.nodes[0].submit(&[write(2, 0, 0, 8)]);
            }
            false
        }
    });
}

#[test]
fn queue_pairs_given_up_while_they_are_being_connected_are_destroyed_afterwards() {
    for side in [0, 1] {
        let mut net = three();
        let port = net.ports[side];
        net.fabric.set_neighbours(port, false);
        net.nodes[0].submit(&[write(1, 0, 0, 8)]);
        net.drive("the neighbour is asked", |net| net.fabric.waiting_for_neighbours(port) == 1);
        net.nodes[side].transport.close_connections();
        net.nodes[0].transport.cancel(Token(1)).unwrap();
        for _ in 0..200 {
            net.step();
        }
        assert!(net.fabric.qp_count(port) > 0, "one that is being connected cannot be destroyed");
        net.fabric.set_neighbours(port, true);
        net.drive("the queue pairs are gone", |net| net.fabric.qp_count(port) == 0);
        assert_eq!(net.nodes[0].transport.stats().quarantined_bytes, 0);
        // Nothing is left behind that would hinder the next.
        net.nodes[0].submit(&[Slice { token: Token(2), ..write(2, 0, 0, 8) }]);
        assert!(net.finish(2).result.is_ok());
        net.nodes[0].transport.fence(Token(3), SEGMENT).unwrap();
        assert!(net.finish(3).result.is_ok());
    }
}

#[test]
fn a_transport_that_is_dropped_waits_for_what_is_being_connected_and_leaves_nothing() {
    let mut net = three();
    let port = net.ports[0];
    net.fabric.set_neighbours(port, false);
    net.nodes[0].submit(&[write(1, 0, 0, 8)]);
    net.drive("the neighbour is asked", |net| net.fabric.waiting_for_neighbours(port) == 1);
    let fabric = net.fabric.clone();
    let answering = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(20));
        fabric.set_neighbours(port, true);
    });
    drop(net.nodes.remove(0));
    answering.join().unwrap();
    assert_eq!((net.fabric.qp_count(port), net.fabric.mr_count(port)), (0, 0));
}

#[test]
fn offers_that_wait_for_neighbours_have_a_limit() {
    let mut net = Net::new(1);
    let target = net.add(&Config { connections_max: 1_024, ..patient() }, BYTES);
    let port = net.ports[target];
    net.fabric.set_neighbours(port, false);
    let mut initiators = Vec::new();
    for _ in 0..300 {
        let node = net.add(&Config { qps: 1, ..patient() }, 4_096);
        net.attach(node, SEGMENT, target, REGION);
        net.nodes[node].submit(&[write(1, 0, 0, 8)]);
        initiators.push(node);
    }
    net.drive("somebody is refused", |net| initiators.iter().any(|&node| net.nodes[node].ended(1).is_some()));
    assert!(net.fabric.waiting_for_neighbours(port) <= 4, "threads have a limit, too");
    let refused = initiators.iter().find_map(|&node| net.nodes[node].ended(1)).unwrap();
    assert_eq!(refused.outcome, Outcome::NotApplied);
    net.fabric.set_neighbours(port, true);
    net.drive("all others are served", |net| {
        initiators.iter().all(|&node| net.nodes[node].ended(1).is_some())
    });
    let _ = Memory::deregister(&mut net.nodes[target].transport, REGION);
}
