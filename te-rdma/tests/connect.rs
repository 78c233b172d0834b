//! Neighbours that do not answer address resolution: connecting to them takes long, and must not delay
//! anything else.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use common::{Net, REGION, REMOTE, config, read, write};
use te_core::{ErrorKind, Memory, Outcome, RemoteRegionId, Slice, Token, Transport};
use te_rdma::Config;

const BYTES: usize = 1 << 20;
const OTHER: RemoteRegionId = RemoteRegionId::new(1, 1);

/// Settings with which only the simulated resolution times out, after ten seconds. The tests do meanwhile
/// what a poll that waited for it could not do.
fn patient() -> Config {
    Config { qps: 2, peer_silence_ms_max: 3_600_000, connect_ms_max: 3_600_000, ..config() }
}

/// Three nodes: 0 and 2 initiate, 1 is their target, and 0 is a target of 2 as well.
fn three() -> Net {
    let mut net = Net::new(1);
    for _ in 0..3 {
        net.add(&patient(), BYTES);
    }
    net.attach(0, REMOTE, 1, REGION);
    net.attach(2, REMOTE, 1, REGION);
    net.attach(2, OTHER, 0, REGION);
    net
}

#[test]
fn a_poll_does_not_wait_for_our_own_neighbour() {
    let mut net = three();
    net.fabric.set_neighbours_answer(net.ports[0], false);
    net.nodes[0].submit(&[write(1, 0, 0, 4_096)]);
    net.drive("the neighbour is being resolved", |net| net.fabric.waiting_for_neighbours(net.ports[0]) == 1);
    // The other nodes go on, and so does the transport as a target where its own neighbour is not needed.
    net.nodes[2].submit(&[write(2, 0, 8_192, 64)]);
    net.drive("another WRITE ends", |net| net.nodes[2].ended(2).is_some());
    assert!(net.nodes[2].ended(2).unwrap().result.is_ok());
    for _ in 0..1_000 {
        net.step();
    }
    assert_eq!(net.fabric.waiting_for_neighbours(net.ports[0]), 1, "it is still being resolved");
    assert!(net.nodes[0].ended(1).is_none());
    net.fabric.set_neighbours_answer(net.ports[0], true);
    assert!(net.finish(1).result.is_ok());
}

#[test]
fn a_target_serves_other_peers_while_the_neighbour_of_one_is_resolved() {
    let mut net = three();
    net.nodes[2].submit(&[write(1, 0, 0, 8)]);
    net.drive("the first peer is connected", |net| net.nodes[2].ended(1).is_some());
    let target = net.ports[1];
    net.fabric.set_neighbours_answer(target, false);
    net.nodes[0].submit(&[write(2, 0, 0, 4_096), read(3, 8_192, 0, 64)]);
    net.drive("the neighbour is being resolved", |net| net.fabric.waiting_for_neighbours(target) == 1);
    // Requests of the other peer are answered meanwhile.
    net.nodes[2].transport.fence(Token(4), REMOTE).unwrap();
    net.drive("another's fence ends", |net| net.nodes[2].ended(4).is_some());
    assert!(net.nodes[2].ended(4).unwrap().result.is_ok());
    assert_eq!(net.fabric.waiting_for_neighbours(target), 1);
    // Later requests of the peer wait until its offer is answered.
    net.nodes[0].transport.fence(Token(5), REMOTE).unwrap();
    for _ in 0..1_000 {
        net.step();
    }
    assert!(net.nodes[0].done.is_empty());
    net.fabric.set_neighbours_answer(target, true);
    for token in [2, 3, 5] {
        assert!(net.finish(token).result.is_ok());
    }
}

#[test]
fn a_neighbour_that_cannot_be_found_fails_the_rail() {
    let mut net = three();
    net.fabric.set_neighbours_answer(net.ports[0], false);
    net.nodes[0].submit(&[write(1, 0, 0, 8)]);
    net.drive("the neighbour is being resolved", |net| net.fabric.waiting_for_neighbours(net.ports[0]) == 1);
    net.fabric.fail_qp_steps(net.ports[0], libc::EHOSTUNREACH, 2);
    net.fabric.set_neighbours_answer(net.ports[0], true);
    let end = net.finish(1);
    assert_eq!((common::kind(&end), end.outcome), (ErrorKind::Rail, Outcome::NotApplied));
    net.nodes[0].submit(&[write(2, 0, 0, 8)]);
    net.drive("another attempt succeeds", |net| {
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
fn queue_pairs_that_are_not_needed_while_being_connected_are_destroyed_afterwards() {
    for side in [0, 1] {
        let mut net = three();
        let port = net.ports[side];
        net.fabric.set_neighbours_answer(port, false);
        net.nodes[0].submit(&[write(1, 0, 0, 8)]);
        net.drive("the neighbour is being resolved", |net| net.fabric.waiting_for_neighbours(port) == 1);
        net.nodes[side].transport.close_connections();
        net.nodes[0].transport.cancel(Token(1)).unwrap();
        for _ in 0..200 {
            net.step();
        }
        assert!(net.fabric.qp_count(port) > 0, "one that is being connected cannot be destroyed");
        net.fabric.set_neighbours_answer(port, true);
        net.drive("the queue pairs are destroyed", |net| net.fabric.qp_count(port) == 0);
        assert_eq!(net.nodes[0].transport.stats().quarantined_bytes, 0);
        // Later slices and fences succeed.
        net.nodes[0].submit(&[Slice { token: Token(2), ..write(2, 0, 0, 8) }]);
        assert!(net.finish(2).result.is_ok());
        net.nodes[0].transport.fence(Token(3), REMOTE).unwrap();
        assert!(net.finish(3).result.is_ok());
    }
}

#[test]
fn dropping_a_transport_waits_for_connecting_queue_pairs_and_leaves_nothing_behind() {
    let mut net = three();
    let port = net.ports[0];
    net.fabric.set_neighbours_answer(port, false);
    net.nodes[0].submit(&[write(1, 0, 0, 8)]);
    net.drive("the neighbour is being resolved", |net| net.fabric.waiting_for_neighbours(port) == 1);
    let fabric = net.fabric.clone();
    let answering = std::thread::spawn(move || {
        // timing: the drop is to begin before the answer, and nothing can be observed of it.
        std::thread::sleep(std::time::Duration::from_millis(20)); // timing: as above
        fabric.set_neighbours_answer(port, true);
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
    net.fabric.set_neighbours_answer(port, false);
    let mut initiators = Vec::new();
    for _ in 0..300 {
        let node = net.add(&Config { qps: 1, ..patient() }, 4_096);
        net.attach(node, REMOTE, target, REGION);
        net.nodes[node].submit(&[write(1, 0, 0, 8)]);
        initiators.push(node);
    }
    net.drive("one of them is refused", |net| {
        initiators.iter().any(|&node| net.nodes[node].ended(1).is_some())
    });
    assert!(net.fabric.waiting_for_neighbours(port) <= 4, "the number of threads is limited as well");
    let refused = initiators.iter().find_map(|&node| net.nodes[node].ended(1)).unwrap();
    assert_eq!(refused.outcome, Outcome::NotApplied);
    net.fabric.set_neighbours_answer(port, true);
    net.drive("the others are served", |net| {
        initiators.iter().all(|&node| net.nodes[node].ended(1).is_some())
    });
    let _ = Memory::deregister(&mut net.nodes[target].transport, REGION);
}
