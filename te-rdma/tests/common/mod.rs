//! Transports on one simulated fabric, each with memory, driven in one thread. The devices and their time are
//! simulated, the control connections are real sockets.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::sync::Arc;
use std::time::Duration;

use te_core::device::Devices;
use te_core::{Completion, Instant, Memory, RegionId, RemoteRegionId, Slice, Token, Transport};
pub(crate) use te_fabric::testkit::*;
use te_rdma::sim::{DeviceConfig, LinkConfig, PortId, SimConfig, SimDevice, SimFabric};
use te_rdma::{Config, RdmaTransport};

pub(crate) type Sim = RdmaTransport<SimDevice>;
pub(crate) type Node = te_fabric::testkit::Node<Sim>;

/// Short limits, and no loopback proof: virtual time stands still while a transport is opened.
pub(crate) fn config() -> Config {
    Config {
        proof_ms_max: 0,
        timeout_exponent: 8,
        retries: 3,
        peer_silence_ms_max: 2_000,
        connect_ms_max: 1_000,
        reconnect_ms_max: 100,
        ..Config::default()
    }
}

/// Opens transports of one configuration, each on a new device of one fabric, for pairs of the conformance
/// suite.
pub(crate) struct Reopen {
    sim: SimFabric,
    nic: DeviceConfig,
    pub(crate) config: Config,
    /// The devices whose memory the next transport registers.
    pub(crate) devices: Option<Arc<dyn Devices>>,
}

impl Reopen {
    pub(crate) fn new(sim: SimFabric, nic: DeviceConfig, config: Config) -> Self {
        Self { sim, nic, config, devices: None }
    }

    pub(crate) fn open(&self) -> Sim {
        let (nic, config) = (self.sim.device(self.nic.clone()), self.config.clone());
        match &self.devices {
            Some(devices) => RdmaTransport::with_devices(nic, config, Arc::clone(devices)).unwrap(),
            None => RdmaTransport::new(nic, config).unwrap(),
        }
    }
}

impl Fabric for Reopen {
    type Transport = Sim;

    fn reopen(&mut self) -> Sim {
        self.open()
    }

    fn identity(transport: &Sim) -> u64 {
        transport.identity()
    }

    fn cut(transport: &mut Sim) {
        transport.close_connections();
    }

    fn advance(&mut self, now: Instant) {
        self.sim.advance_to(now);
    }
}

/// A fabric with nodes. Node 0 initiates, node 1 is its target; there may be more.
pub(crate) struct Net {
    pub(crate) nodes: Vec<Node>,
    /// The port of each.
    pub(crate) ports: Vec<PortId>,
    pub(crate) fabric: SimFabric,
    pub(crate) now: Instant,
    /// Nodes that are not polled.
    pub(crate) stalled: Vec<usize>,
}

impl Net {
    pub(crate) fn new(seed: u64) -> Self {
        let fabric = SimFabric::new(seed, SimConfig::TIMED);
        Self {
            nodes: Vec::new(),
            ports: Vec::new(),
            fabric,
            now: Instant::from_millis(1),
            stalled: Vec::new(),
        }
    }

    /// Two nodes, the second attached to the first.
    pub(crate) fn pair(config: &Config, bytes: usize) -> Self {
        let mut net = Self::new(1);
        net.add(config, bytes);
        net.add(config, bytes);
        net.attach(0, REMOTE, 1, REGION);
        net
    }

    pub(crate) fn add(&mut self, config: &Config, bytes: usize) -> usize {
        self.add_device(DeviceConfig::default(), config, bytes)
    }

    pub(crate) fn add_device(&mut self, device: DeviceConfig, config: &Config, bytes: usize) -> usize {
        let device = self.fabric.device(device);
        self.ports.push(device.id());
        let transport = RdmaTransport::new(device, config.clone()).unwrap();
        self.nodes.push(Node::with(transport, bytes, ALL));
        self.nodes.len() - 1
    }

    pub(crate) fn attach(&mut self, node: usize, segment: RemoteRegionId, target: usize, region: RegionId) {
        let blob = self.nodes[target].export_of(region);
        self.nodes[node].transport.attach(segment, &blob).unwrap();
    }

    /// The link between two nodes, both ways.
    pub(crate) fn set_link(&self, a: usize, b: usize, link: LinkConfig) {
        let (a, b) = (self.ports[a], self.ports[b]);
        self.fabric.set_link(a, b, link);
        self.fabric.set_link(b, a, link);
    }

    /// Ten microseconds pass, and every node that is not stalled is polled.
    pub(crate) fn step(&mut self) {
        self.now = self.now + Duration::from_micros(10);
        self.fabric.advance_to(self.now);
        for (index, node) in self.nodes.iter_mut().enumerate() {
            if !self.stalled.contains(&index) {
                node.poll_at(self.now);
            }
        }
    }

    /// Steps until `done`; `what` describes it.
    pub(crate) fn drive(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let start = std::time::Instant::now();
        while !done(self) {
            assert!(start.elapsed() < PATIENCE, "this did not happen in time: {what}");
            self.step();
        }
    }

    /// Steps for this much simulated time.
    pub(crate) fn linger(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            self.step();
        }
    }

    /// Steps until `token` of node 0 has ended; returns its completion.
    pub(crate) fn finish(&mut self, token: u64) -> Completion {
        self.drive("a slice or fence ends", |net| net.nodes[0].ended(token).is_some());
        self.nodes[0].ended(token).unwrap()
    }

    /// Submits to node 0 and waits until all slices are applied.
    pub(crate) fn transfer(&mut self, slices: &[Slice]) {
        self.nodes[0].submit(slices);
        for slice in slices {
            let end = self.finish(slice.token.0);
            assert!(end.result.is_ok(), "{slice:?} ended as {end:?}");
        }
    }

    pub(crate) fn fence(&mut self, token: u64) -> Completion {
        self.nodes[0].transport.fence(Token(token), REMOTE).unwrap();
        self.finish(token)
    }

    /// Moves one byte, so that the connection is up and the queue pairs are live.
    pub(crate) fn warm_up(&mut self) {
        self.transfer(&[write(u64::MAX, 0, 0, 1)]);
    }
}
