//! Transports, each with its memory, which one thread polls.

use core::time::Duration;
use std::cell::Cell;
use std::sync::OnceLock;
use std::time::Instant as Clock;

use te_core::{
    Access, Completion, Error, ErrorKind, Instant, Op, RegionId, RegionOffset, RemoteOffset, RemoteRegionId,
    Slice, Token, Transport,
};

use super::Block;

/// How long a test waits for an event; a test that waited longer has failed.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// Every right.
pub const ALL: Access = Access::all();
/// The region that each node registers first.
pub const REGION: RegionId = RegionId::new(0, 1);
/// The remote region that initiators attach first.
pub const REMOTE: RemoteRegionId = RemoteRegionId::new(0, 1);

thread_local! {
    /// Each test has its own thread, and so its own time.
    static SKIPPED_NS: Cell<u64> = const { Cell::new(0) };
}

/// The time of this test: the real time plus the time that was [skipped](skip).
pub fn now() -> Instant {
    static START: OnceLock<Clock> = OnceLock::new();
    let start = *START.get_or_init(Clock::now);
    Instant::from_nanos(1 + SKIPPED_NS.get() + start.elapsed().as_nanos() as u64)
}

/// Moves the time of this test forward, for all its transports.
pub fn skip(time: Duration) {
    SKIPPED_NS.set(SKIPPED_NS.get() + time.as_nanos() as u64);
}

/// A transport with one region, and the completions that it has returned.
#[derive(Debug)]
pub struct Node<T> {
    // Dropped before the memory that it refers to.
    /// The transport.
    pub transport: T,
    /// The memory of its first region.
    pub memory: Block,
    /// What has completed.
    pub done: Vec<Completion>,
}

impl<T: Transport> Node<T> {
    /// A node whose region [`REGION`] has this many bytes and these rights.
    #[must_use]
    #[allow(unsafe_code, reason = "registers memory")]
    pub fn with(mut transport: T, bytes: usize, access: Access) -> Self {
        // The clock starts before the transport is used.
        let _ = now();
        let memory = Block::new(bytes);
        // SAFETY: the block outlives the transport (field order) and is only looked at through volatile
        // copies.
        unsafe { transport.register(REGION, memory.span(), access) }.unwrap();
        Self { transport, memory, done: Vec::new() }
    }

    /// The export of a region.
    #[must_use]
    pub fn export_of(&self, region: RegionId) -> Vec<u8> {
        let mut blob = vec![0; self.transport.capabilities().export_bytes_max as usize];
        let len = self.transport.export(region, &mut blob).unwrap();
        blob.truncate(len);
        blob
    }

    /// The export of its first region.
    #[must_use]
    pub fn export(&self) -> Vec<u8> {
        self.export_of(REGION)
    }

    /// Attaches the first region of `target` as [`REMOTE`].
    pub fn attach(&mut self, target: &Self) {
        self.transport.attach(REMOTE, &target.export()).unwrap();
    }

    /// Polls at this time and returns the number of completions.
    pub fn poll_at(&mut self, now: Instant) -> usize {
        let mut out = [Completion::applied(Token(0)); 64];
        let count = self.transport.poll(now, &mut out);
        self.done.extend_from_slice(&out[..count]);
        count
    }

    /// Polls at the time of this test.
    pub fn poll(&mut self) -> usize {
        self.poll_at(now())
    }

    /// Submits slices, all of which are accepted.
    pub fn submit(&mut self, slices: &[Slice]) {
        assert_eq!(self.transport.submit(slices), Ok(slices.len()));
    }

    /// The completion of `token`, once it was returned. Panics when there are two.
    #[must_use]
    pub fn ended(&self, token: u64) -> Option<Completion> {
        let mut found = self.done.iter().filter(|completion| completion.token == Token(token));
        let first = found.next().copied();
        assert!(found.next().is_none(), "L1: token {token} completed twice");
        first
    }
}

/// A slice between [`REGION`] and [`REMOTE`].
#[must_use]
pub const fn slice(token: u64, op: Op, local: u64, remote: u64, len: u32) -> Slice {
    Slice {
        token: Token(token),
        local: RegionOffset::new(REGION, local),
        remote: RemoteOffset::new(REMOTE, remote),
        len,
        op,
    }
}

/// A READ between [`REGION`] and [`REMOTE`].
#[must_use]
pub const fn read(token: u64, local: u64, remote: u64, len: u32) -> Slice {
    slice(token, Op::Read, local, remote, len)
}

/// A WRITE between [`REGION`] and [`REMOTE`].
#[must_use]
pub const fn write(token: u64, local: u64, remote: u64, len: u32) -> Slice {
    slice(token, Op::Write, local, remote, len)
}

/// The error of a slice that failed.
#[must_use]
pub fn kind(completion: &Completion) -> ErrorKind {
    completion.result.map_err(|error: Error| error.kind).expect_err("it failed")
}

/// Polls all nodes until `done` returns true for the first one. Panics after [`PATIENCE`].
pub fn drive<T: Transport>(nodes: &mut [&mut Node<T>], mut done: impl FnMut(&mut Node<T>) -> bool) {
    let start = Clock::now();
    while !done(nodes[0]) {
        assert!(start.elapsed() < PATIENCE, "not done within {PATIENCE:?}");
        let mut quiet = true;
        for node in nodes.iter_mut() {
            quiet &= node.poll() == 0;
        }
        if quiet {
            std::thread::yield_now();
        }
    }
}

/// Polls all nodes for `time`.
pub fn linger<T: Transport>(nodes: &mut [&mut Node<T>], time: Duration) {
    let start = Clock::now();
    while start.elapsed() < time {
        for node in nodes.iter_mut() {
            node.poll();
        }
    }
}

/// Polls until `token` of the first node has ended.
pub fn finish<T: Transport>(nodes: &mut [&mut Node<T>], token: u64) -> Completion {
    drive(nodes, |node| node.ended(token).is_some());
    nodes[0].ended(token).unwrap()
}
