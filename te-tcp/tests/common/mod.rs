//! Helpers of the tests: transports with memory of their own, driven by one thread on the real clock.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(dead_code, reason = "each test binary uses a part of it")]

pub(crate) mod raw;

use te_core::Access;
pub(crate) use te_fabric::testkit::*;
use te_tcp::{Config, RegionPins, TcpTransport};

pub(crate) type Node = te_fabric::testkit::Node<TcpTransport>;

/// The default settings, with the driver that this build tests.
pub(crate) fn config() -> Config {
    Config {
        #[cfg(feature = "uring")]
        driver: te_tcp::Driver::Uring,
        ..Config::default()
    }
}

/// A node with these settings, and a region of `bytes` bytes with all rights.
pub(crate) fn node(config: Config, bytes: usize) -> Node {
    node_with(config, bytes, ALL)
}

pub(crate) fn node_with(config: Config, bytes: usize, access: Access) -> Node {
    Node::with(TcpTransport::new(config).unwrap(), bytes, access)
}

pub(crate) fn pair(config: &Config, bytes: usize) -> (Node, Node) {
    let target = node(config.clone(), bytes);
    let mut initiator = node(config.clone(), bytes);
    initiator.attach(&target);
    (initiator, target)
}

/// What uses the first region of a node.
pub(crate) fn users(node: &Node) -> RegionPins {
    node.transport.region_pins(REGION).unwrap()
}

/// `peers` payloads of peers use a region, and no slice of its own transport does.
pub(crate) const fn by_peers(peers: u32) -> RegionPins {
    RegionPins { own: 0, peers }
}
