//! What the tests share: transports on one simulated fabric, with memory of their own, driven in one thread. The devices and
//! their time are simulated, the side channels are real sockets.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::time::Duration;

use te_core::{
    Access, Completion, ErrorKind, Instant, MemSpan, Memory, Op, RegionId, SegmentId, Slice, Token,
    Transport, VolatileSpan,
};
use te_rdma::sim::{DeviceConfig, LinkConfig, PortId, SimConfig, SimDevice, SimFabric};
use te_rdma::{Config, RdmaTransport};

pub(crate) type Sim = RdmaTransport<SimDevice>;

pub(crate) const REGION: RegionId = RegionId::new(0, 1);
pub(crate) const SEGMENT: SegmentId = SegmentId::new(0, 1);
pub(crate) const ALL: Access = Access::all();
/// Longer than anything here takes; a test that gets there has failed.
const PATIENCE: Duration = Duration::from_secs(20);

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

/// Memory that stays where it is and is looked at only through volatile copies.
pub(crate) struct Block {
    ptr: *mut u8,
    len: usize,
}

impl Block {
    pub(crate) fn new(len: usize) -> Self {
        let bytes = vec![0_u8; len].into_boxed_slice();
        Self { ptr: Box::into_raw(bytes).cast(), len }
    }

    pub(crate) fn span(&self) -> MemSpan {
        MemSpan::new(self.ptr, self.len)
    }

    fn view(&self) -> VolatileSpan<'_> {
        // SAFETY: the block lives as long as `self` and nothing else refers to it.
        unsafe { VolatileSpan::new(self.span()) }
    }

    pub(crate) fn get(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.view().read(offset, &mut out).unwrap();
        out
    }

    pub(crate) fn set(&self, offset: u64, bytes: &[u8]) {
        self.view().write(offset, bytes).unwrap();
    }

    /// Fills it with bytes that depend on the place and the seed.
    pub(crate) fn paint(&self, seed: u8) {
        self.set(0, &pattern(seed, 0, self.len));
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: made by `Box::into_raw` in `new` from a boxed slice of this length, and freed once.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.ptr, self.len)) });
    }
}

pub(crate) fn pattern(seed: u8, offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64).map(|i| (i.wrapping_mul(31) ^ (i >> 8)) as u8 ^ seed).collect()
}

/// A transport with one region.
pub(crate) struct Node {
    // Dropped before the memory that it refers to.
    pub(crate) transport: Sim,
    pub(crate) memory: Block,
    pub(crate) done: Vec<Completion>,
    pub(crate) port: PortId,
}

impl Node {
    pub(crate) fn on(fabric: &SimFabric, device: DeviceConfig, config: Config, bytes: usize) -> Self {
        let device = fabric.device(device);
        let port = device.id();
        let mut transport = RdmaTransport::new(device, config).unwrap();
        let memory = Block::new(bytes);
        // SAFETY: the block outlives the transport (field order) and is only looked at through volatile copies.
        unsafe { transport.register(REGION, memory.span(), ALL) }.unwrap();
        Self { transport, memory, done: Vec::new(), port }
    }

    pub(crate) fn export(&self, region: RegionId) -> Vec<u8> {
        let mut blob = vec![0; self.transport.capabilities().export_bytes_max as usize];
        let len = self.transport.export(region, &mut blob).unwrap();
        blob.truncate(len);
        blob
    }

    pub(crate) fn submit(&mut self, slices: &[Slice]) {
        assert_eq!(self.transport.submit(slices), Ok(slices.len()));
    }

    pub(crate) fn ended(&self, token: u64) -> Option<Completion> {
        let mut found = self.done.iter().filter(|completion| completion.token == Token(token));
        let first = found.next().copied();
        assert!(found.next().is_none(), "L1: token {token} completed twice");
        first
    }

    fn poll(&mut self, now: Instant) -> usize {
        let mut out = [Completion::applied(Token(0)); 64];
        let count = self.transport.poll(now, &mut out);
        self.done.extend_from_slice(&out[..count]);
        count
    }
}

/// A fabric with nodes. Node 0 initiates, node 1 is its target; there may be more.
pub(crate) struct Net {
    pub(crate) nodes: Vec<Node>,
    pub(crate) fabric: SimFabric,
    pub(crate) now: Instant,
    /// Nodes that are not polled.
    pub(crate) stalled: Vec<usize>,
}

impl Net {
    pub(crate) fn new(seed: u64) -> Self {
        let fabric = SimFabric::new(seed, SimConfig::TIMED);
        Self { nodes: Vec::new(), fabric, now: Instant::from_millis(1), stalled: Vec::new() }
    }

    /// Two nodes, the second attached to the first.
    pub(crate) fn pair(config: &Config, bytes: usize) -> Self {
        let mut net = Self::new(1);
        net.add(config, bytes);
        net.add(config, bytes);
        net.attach(0, SEGMENT, 1, REGION);
        net
    }

    pub(crate) fn add(&mut self, config: &Config, bytes: usize) -> usize {
        self.add_device(DeviceConfig::default(), config, bytes)
    }

    pub(crate) fn add_device(&mut self, device: DeviceConfig, config: &Config, bytes: usize) -> usize {
        self.nodes.push(Node::on(&self.fabric, device, config.clone(), bytes));
        self.nodes.len() - 1
    }

    pub(crate) fn attach(&mut self, node: usize, segment: SegmentId, target: usize, region: RegionId) {
        let blob = self.nodes[target].export(region);
        self.nodes[node].transport.attach(segment, &blob).unwrap();
    }

    /// The link between two nodes, both ways.
    pub(crate) fn set_link(&self, a: usize, b: usize, link: LinkConfig) {
        let (a, b) = (self.nodes[a].port, self.nodes[b].port);
        self.fabric.set_link(a, b, link);
        self.fabric.set_link(b, a, link);
    }

    /// Some microseconds go by, and everybody is polled.
    pub(crate) fn step(&mut self) {
        self.now = self.now + Duration::from_micros(10);
        self.fabric.advance_to(self.now);
        for (index, node) in self.nodes.iter_mut().enumerate() {
            if !self.stalled.contains(&index) {
                node.poll(self.now);
            }
        }
    }

    pub(crate) fn drive(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let start = std::time::Instant::now();
        while !done(self) {
            assert!(start.elapsed() < PATIENCE, "waited too long until {what}");
            self.step();
        }
    }

    pub(crate) fn linger(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            self.step();
        }
    }

    /// Until `token` of node 0 has ended.
    pub(crate) fn finish(&mut self, token: u64) -> Completion {
        self.drive("a slice or fence ends", |net| net.nodes[0].ended(token).is_some());
        self.nodes[0].ended(token).unwrap()
    }

    /// Submits to node 0 and waits until all have been applied.
    pub(crate) fn transfer(&mut self, slices: &[Slice]) {
        self.nodes[0].submit(slices);
        for slice in slices {
            let end = self.finish(slice.token.0);
            assert!(end.result.is_ok(), "{slice:?} ended as {end:?}");
        }
    }

    pub(crate) fn fence(&mut self, token: u64) -> Completion {
        self.nodes[0].transport.fence(Token(token), SEGMENT).unwrap();
        self.finish(token)
    }

    /// Leaves the connection up and the queue pairs live.
    pub(crate) fn warm_up(&mut self) {
        self.transfer(&[write(u64::MAX, 0, 0, 1)]);
    }
}

pub(crate) fn slice(token: u64, op: Op, local: u64, remote: u64, len: u32) -> Slice {
    Slice { token: Token(token), local: (REGION, local), remote: (SEGMENT, remote), len, op }
}

pub(crate) fn read(token: u64, local: u64, remote: u64, len: u32) -> Slice {
    slice(token, Op::Read, local, remote, len)
}

pub(crate) fn write(token: u64, local: u64, remote: u64, len: u32) -> Slice {
    slice(token, Op::Write, local, remote, len)
}

pub(crate) fn kind(completion: &Completion) -> ErrorKind {
    completion.result.expect_err("it failed").kind
}
