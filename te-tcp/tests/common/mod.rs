//! What the tests share: transports with memory of their own, driven in one thread against the real clock.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(dead_code, reason = "each test binary uses a part of it")]

pub(crate) mod raw;

use std::cell::Cell;
use std::time::{Duration, Instant as Clock};

use te_core::{
    Access, Completion, Error, Instant, MemSpan, Memory, Op, RegionId, SegmentId, Slice, Token, Transport,
    VolatileSpan,
};
use te_tcp::{Config, TcpTransport};

/// Longer than anything here takes; a test that gets there has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(15);

/// The defaults, on the driver that this build is to test.
pub(crate) fn config() -> Config {
    Config {
        #[cfg(feature = "uring")]
        driver: te_tcp::Driver::Uring,
        ..Config::default()
    }
}

pub(crate) const ALL: Access = Access::all();

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

/// A transport with one region, and the clock that it is polled with.
pub(crate) struct Node {
    // Dropped before the memory that it refers to.
    pub(crate) transport: TcpTransport,
    pub(crate) memory: Block,
    pub(crate) done: Vec<Completion>,
}

pub(crate) const REGION: RegionId = RegionId::new(0, 1);
pub(crate) const SEGMENT: SegmentId = SegmentId::new(0, 1);

thread_local! {
    /// Each test has a thread, and so a time, of its own.
    static SKIPPED_NS: Cell<u64> = const { Cell::new(0) };
}

pub(crate) fn now() -> Instant {
    use std::sync::OnceLock;
    static START: OnceLock<Clock> = OnceLock::new();
    let start = *START.get_or_init(Clock::now);
    let skipped = SKIPPED_NS.get();
    Instant::from_nanos(1 + skipped + start.elapsed().as_nanos() as u64)
}

/// From now on it is so much later for every transport of this test.
pub(crate) fn skip(time: Duration) {
    SKIPPED_NS.set(SKIPPED_NS.get() + time.as_nanos() as u64);
}

impl Node {
    pub(crate) fn new(config: Config, bytes: usize) -> Self {
        Self::with_access(config, bytes, ALL)
    }

    pub(crate) fn with_access(config: Config, bytes: usize, access: Access) -> Self {
        let _ = now();
        let mut transport = TcpTransport::new(config).unwrap();
        let memory = Block::new(bytes);
        // SAFETY: the block outlives the transport (field order) and is only looked at through volatile copies.
        unsafe { transport.register(REGION, memory.span(), access) }.unwrap();
        Self { transport, memory, done: Vec::new() }
    }

    pub(crate) fn export(&self) -> Vec<u8> {
        let mut blob = vec![0; self.transport.capabilities().export_bytes_max as usize];
        let len = self.transport.export(REGION, &mut blob).unwrap();
        blob.truncate(len);
        blob
    }

    pub(crate) fn attach(&mut self, target: &Self) {
        self.transport.attach(SEGMENT, &target.export()).unwrap();
    }

    pub(crate) fn poll(&mut self) -> usize {
        let mut out = [Completion::applied(Token(0)); 64];
        let count = self.transport.poll(now(), &mut out);
        self.done.extend_from_slice(&out[..count]);
        count
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

/// Polls all nodes until `done` holds of the first.
pub(crate) fn drive(nodes: &mut [&mut Node], mut done: impl FnMut(&mut Node) -> bool) {
    let start = Clock::now();
    while !done(nodes[0]) {
        assert!(start.elapsed() < PATIENCE, "it took too long");
        let mut quiet = true;
        for node in nodes.iter_mut() {
            quiet &= node.poll() == 0;
        }
        if quiet {
            std::thread::yield_now();
        }
    }
}

/// Polls all nodes for a while.
pub(crate) fn linger(nodes: &mut [&mut Node], time: Duration) {
    let start = Clock::now();
    while start.elapsed() < time {
        for node in nodes.iter_mut() {
            node.poll();
        }
    }
}

/// Polls until `token` of the first node has ended.
pub(crate) fn finish(nodes: &mut [&mut Node], token: u64) -> Completion {
    drive(nodes, |node| node.ended(token).is_some());
    nodes[0].ended(token).unwrap()
}

pub(crate) fn pair(config: &Config, bytes: usize) -> (Node, Node) {
    let target = Node::new(config.clone(), bytes);
    let mut initiator = Node::new(config.clone(), bytes);
    initiator.attach(&target);
    (initiator, target)
}

pub(crate) fn kind(completion: &Completion) -> te_core::ErrorKind {
    completion.result.map_err(|error: Error| error.kind).expect_err("it failed")
}

/// A process of this test, which ends with it.
pub(crate) struct Process(pub(crate) std::process::Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Bytes as text, for a process's environment or output.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes behind [`hex`].
pub(crate) fn bytes_of(hex: &str) -> Vec<u8> {
    (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap()).collect()
}
