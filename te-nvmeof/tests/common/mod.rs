//! Helpers of the tests: transports with memory of their own, driven by one thread on the real clock.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(dead_code, reason = "each test binary uses a part of it")]

pub(crate) mod played;
pub(crate) mod proxy;

pub(crate) use te_fabric::testkit::*;
use te_nvmeof::{Config, NvmeofTransport};

pub(crate) type Node = te_fabric::testkit::Node<NvmeofTransport>;

/// A node with these settings, and a region of `bytes` bytes with all rights.
pub(crate) fn node(config: Config, bytes: usize) -> Node {
    Node::with(NvmeofTransport::new(config).unwrap(), bytes, ALL)
}

pub(crate) fn pair(config: &Config, bytes: usize) -> (Node, Node) {
    let target = node(config.clone(), bytes);
    let mut initiator = node(config.clone(), bytes);
    initiator.attach(&target);
    (initiator, target)
}

/// The settings under which the laws are tested: with and without digests, all data within commands or none,
/// one queue or several, small pieces.
pub(crate) fn configs() -> Vec<Config> {
    let plain = Config::default();
    vec![
        plain.clone(),
        Config { header_digest: true, data_digest: true, ..plain.clone() },
        Config { data_digest: true, queues: 4, transfer_bytes_max: 8_192, ..plain.clone() },
        Config { header_digest: true, in_capsule_bytes_max: 0, queues: 1, queue_depth: 4, ..plain },
    ]
}
