//! The readers' side: connections to the stage services of nodes, and the objects that are asked for.

use std::time::{Duration, Instant};

use store_core::ErrorCode;
use store_core::message::StageItem;
use te_core::Secret;

use super::line::Line;
use crate::rpc::{Identity, RpcConfig};

/// Longest time to connect.
const CONNECT_MS_MAX: u32 = 500;
/// How long to wait for one of several nodes at a time.
const SLICE: Duration = Duration::from_micros(500);

/// An object that a reader wants to be staged.
pub(crate) struct Wanted<T> {
    pub(crate) item: StageItem,
    /// When the reader stops waiting.
    pub(crate) deadline: Instant,
    /// Comes back with the end.
    pub(crate) what: T,
}

/// How staging an object ended.
pub(crate) struct StageEnd<T> {
    pub(crate) what: T,
    pub(crate) result: Result<StagedAt, ErrorCode>,
}

/// An object in the staging memory of a node, until it is [released](StageConnections::release).
#[derive(Clone, Copy, Debug)]
pub(crate) struct StagedAt {
    /// Its address in the export of the disk.
    pub(crate) addr: u64,
    /// What was read later does not count.
    pub(crate) until: Instant,
    pub(super) ticket: u64,
    pub(super) line: usize,
    /// Number of the line's connection that the ticket belongs to.
    pub(super) connect: u64,
    pub(super) bytes: u64,
}

/// Connections to the stage services of nodes; `T` identifies the reader's objects.
pub(crate) struct StageConnections<T> {
    settings: Settings,
    lines: Vec<Line<T>>,
    /// Number of objects that have not ended.
    wanted: usize,
}

pub(super) struct Settings {
    pub(super) rpc: RpcConfig,
    pub(super) identity: Identity,
    /// How long a service is left alone after its connection failed.
    pub(super) shun: Duration,
}

impl<T> StageConnections<T> {
    /// No connections yet, for a reader with these settings.
    pub(crate) fn new(rpc: RpcConfig, cluster: Secret, shun: Duration) -> Self {
        // The secrets of a tenant or an admin are not for nodes.
        let identity =
            Identity { tenant: String::new(), secret: Secret::default(), admin: Secret::default(), cluster };
        let connect_ms_max = rpc.connect_ms_max.min(CONNECT_MS_MAX);
        let rpc = RpcConfig { connect_ms_max, reconnect_ms_max: 0, call_ms_max: connect_ms_max, ..rpc };
        Self { settings: Settings { rpc, identity, shun }, lines: Vec::new(), wanted: 0 }
    }

    /// The number of the service with this address.
    pub(crate) fn line(&mut self, address: &str) -> usize {
        let known = self.lines.iter().position(|line| line.address == address);
        known.unwrap_or_else(|| {
            // A node that was restarted may have another address: its former connection is closed.
            self.lines.iter_mut().for_each(Line::drop_if_lost);
            self.lines.push(Line::new(address));
            self.lines.len() - 1
        })
    }

    /// Whether every object has ended.
    pub(crate) const fn is_idle(&self) -> bool {
        self.wanted == 0
    }

    /// Asks the service `line` for an object, at the next [`poll`](Self::poll).
    pub(crate) fn want(&mut self, line: usize, wanted: Wanted<T>) {
        self.lines[line].want(wanted);
        self.wanted += 1;
    }

    /// What the objects are that have not ended.
    pub(crate) fn whats(&mut self) -> impl Iterator<Item = &mut T> {
        self.lines.iter_mut().flat_map(Line::whats)
    }

    /// Sends requests and receives answers; what has ended is appended to `ends`. It does not wait. Returns
    /// whether anything ended.
    pub(crate) fn poll(&mut self, ends: &mut Vec<StageEnd<T>>) -> bool {
        if self.wanted == 0 {
            return false;
        }
        let (now, before) = (Instant::now(), ends.len());
        for (index, line) in self.lines.iter_mut().enumerate() {
            line.poll(index, now, &self.settings, ends);
        }
        self.wanted -= ends.len() - before;
        ends.len() > before
    }

    /// Gives up the objects that `is` chooses: their end is appended to `ends`.
    pub(crate) fn give_up(
        &mut self,
        error: ErrorCode,
        mut is: impl FnMut(&T) -> bool,
        ends: &mut Vec<StageEnd<T>>,
    ) {
        let before = ends.len();
        for line in &mut self.lines {
            line.give_up(error, |wanted| is(&wanted.what), ends);
        }
        self.wanted -= ends.len() - before;
    }

    /// An object has been read (`read`), or will not be read any more although the fabric may still do so: it
    /// then stays where it is to the end of its window.
    pub(crate) fn release(&mut self, staged: &StagedAt, read: bool) {
        self.lines[staged.line].release(staged, read);
    }

    /// Sends what has been released.
    pub(crate) fn flush(&mut self) {
        for line in &mut self.lines {
            line.send_releases();
        }
    }

    /// Whether bytes that were read by now are those that were staged, or damaged: the window is not over,
    /// and the connection is still there. Answers that arrive meanwhile are appended to `ends`.
    pub(crate) fn is_valid(&mut self, staged: &StagedAt, ends: &mut Vec<StageEnd<T>>) -> bool {
        let before = ends.len();
        let there = self.lines[staged.line].is_there(staged, ends);
        self.wanted -= ends.len() - before;
        there && Instant::now() < staged.until
    }

    /// Closes all connections and forgets every object, after a panic.
    pub(crate) fn abandon(&mut self) {
        self.lines.iter_mut().for_each(Line::abandon);
        self.wanted = 0;
    }

    /// Waits until there may be something to [`poll`](Self::poll), at most until `until`.
    pub(crate) fn wait(&mut self, until: Instant) {
        let mut busy = self.lines.iter_mut().filter(|line| line.is_busy());
        let Some(first) = busy.next() else { return };
        let several = busy.next().is_some();
        let left = until.saturating_duration_since(Instant::now());
        let left = if several { left.min(SLICE) } else { left };
        if !left.is_zero() {
            first.wait(left, &self.settings);
        }
    }
}
