//! Expelled initiators: their queue pairs are destroyed, and their packets on the wire do not land.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use common::{Net, REGION, REMOTE, config, kind, write};
use te_core::{Completion, EXPELLED_MAX, ErrorKind, ExpelMode, Memory, Outcome, Slice, Token, Transport};
use te_rdma::Config;
use te_rdma::sim::LinkConfig;

const BYTES: usize = 1 << 20;
const WRITER: u64 = 77;

fn known(identity: u64) -> Config {
    Config { identity, ..config() }
}

/// A writer, its target, and another writer to the same target.
fn three() -> Net {
    let mut net = Net::new(1);
    net.add(&known(WRITER), BYTES);
    net.add(&known(1), BYTES);
    net.add(&known(78), BYTES);
    net.attach(0, REMOTE, 1, REGION);
    net.attach(2, REMOTE, 1, REGION);
    net
}

fn expel(net: &mut Net, mode: ExpelMode) -> Result<bool, ErrorKind> {
    net.nodes[1].transport.expel(WRITER, mode).map_err(|error| error.kind)
}

#[test]
fn packets_of_an_expelled_peer_on_the_wire_do_not_land() {
    let mut net = three();
    net.warm_up();
    net.nodes[2].submit(&[write(1, 0, 512 << 10, 8)]);
    net.drive("the other is connected", |net| net.nodes[2].ended(1).is_some());
    // The writer's process stops while its packets are on the wire. Its device goes on.
    net.set_link(0, 1, LinkConfig { latency_ns: 500_000, ..LinkConfig::CALM });
    net.nodes[0].memory.paint(5);
    net.nodes[0].submit(&(0..64).map(|i| write(10 + i, i * 4_096, i * 4_096, 4_096)).collect::<Vec<_>>());
    net.stalled.push(0);
    net.linger(std::time::Duration::from_micros(100));
    assert_eq!(expel(&mut net, ExpelMode::SpareConnected), Err(ErrorKind::Busy));
    assert!(net.nodes[1].transport.is_connected(WRITER));
    assert_eq!(expel(&mut net, ExpelMode::Force), Ok(true));
    assert!(!net.nodes[1].transport.is_connected(WRITER));
    net.nodes[1].memory.set(0, &[7; 256 << 10]);
    net.linger(std::time::Duration::from_millis(20));
    assert!(net.nodes[1].memory.get(0, 256 << 10) == [7; 256 << 10], "not a byte");

    // It goes on, with retries, and gets the reason for the refusal.
    net.stalled.clear();
    net.drive("all its slices end", |net| (10..74).all(|token| net.nodes[0].ended(token).is_some()));
    net.drive("it gets the reason", |net| {
        let token = net.nodes[0].done.len() as u64 + 1_000;
        net.nodes[0].submit(&[write(token, 0, 0, 8)]);
        let end = net.finish(token);
        assert_eq!(end.outcome, Outcome::NotApplied);
        kind(&end) == ErrorKind::Expelled
    });
    net.nodes[0].transport.fence(Token(5), REMOTE).unwrap();
    assert_eq!(
        net.finish(5),
        Completion::applied(Token(5)),
        "the target has confirmed that nothing lands any more"
    );
    assert!(net.nodes[1].memory.get(0, 256 << 10) == [7; 256 << 10], "not a byte");

    // The other writer goes on, and the expelled process is still a target itself.
    net.nodes[2].submit(&[write(2, 0, 512 << 10, 8)]);
    net.drive("the other goes on", |net| net.nodes[2].ended(2).is_some());
    assert!(net.nodes[2].ended(2).unwrap().result.is_ok());
    let blob = net.nodes[0].export_of(REGION);
    net.nodes[1].transport.attach(REMOTE, &blob).unwrap();
    net.nodes[1].submit(&[write(3, 0, 0, 8)]);
    net.drive("the target writes", |net| net.nodes[1].ended(3).is_some());
    assert!(net.nodes[1].ended(3).unwrap().result.is_ok());
}

#[test]
fn an_expelled_peer_without_a_connection_is_refused_when_it_connects() {
    let mut net = three();
    assert_eq!(net.nodes[1].transport.expel(0, ExpelMode::Force), Err(ErrorKind::InvalidArgument.into()));
    assert_eq!(expel(&mut net, ExpelMode::SpareConnected), Ok(true));
    net.nodes[0].submit(&[write(1, 0, 0, 8)]);
    let end = net.finish(1);
    assert_eq!((kind(&end), end.outcome), (ErrorKind::Expelled, Outcome::NotApplied));
    assert_eq!(net.fabric.qp_count(net.ports[1]), 0);
    // Attaching again does not help.
    net.nodes[0].transport.detach(REMOTE).unwrap();
    net.attach(0, REMOTE, 1, REGION);
    net.nodes[0].submit(&[Slice { token: Token(2), ..write(2, 0, 0, 8) }]);
    assert_eq!(kind(&net.finish(2)), ErrorKind::Expelled);
}

#[test]
fn expelling_a_peer_ends_when_its_queue_pairs_are_destroyed() {
    let mut net = three();
    let target = net.ports[1];
    net.fabric.set_neighbours_answer(target, false);
    net.nodes[0].submit(&[write(1, 0, 0, 8)]);
    net.drive("its queue pairs are being connected", |net| net.fabric.waiting_for_neighbours(target) == 1);
    for _ in 0..100 {
        assert_eq!(expel(&mut net, ExpelMode::Force), Ok(false), "the device still has them");
        net.step();
    }
    assert_eq!(expel(&mut net, ExpelMode::SpareConnected), Ok(false), "it has no connection any more");
    net.fabric.set_neighbours_answer(target, true);
    net.drive("it is expelled", |net| expel(net, ExpelMode::Force) == Ok(true));
    assert_eq!(net.fabric.qp_count(target), 0);
}

#[test]
fn the_number_of_expelled_peers_is_limited() {
    let mut net = three();
    net.warm_up();
    for identity in 0..EXPELLED_MAX as u64 {
        assert_eq!(net.nodes[1].transport.expel(1_000 + identity, ExpelMode::SpareConnected), Ok(true));
    }
    assert_eq!(expel(&mut net, ExpelMode::Force), Err(ErrorKind::Full));
    net.transfer(&[write(2, 0, 0, 8)]);
}
