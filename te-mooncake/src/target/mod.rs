//! The data port: serves peers' operations on exported ranges, and on nothing else.
//!
//! ```text
//!            ┌────────────── next request ◀──────────────────────────────────┐
//!            ▼                                                               │
//!   Header ──┬─ served, room ─▶ Receiving (WRITE) ─▶ Status ─────────────────┤
//!            │                  Sending (READ: status, bytes) ───────────────┘
//!            ├─ served, no room ─▶ Waiting ─▶ Receiving, Sending
//!            └─ refused ─▶ Rejecting (version 2) ─▶ Draining ─▶ closed; version 1: closed
//! ```
//!
//! Payloads go from the socket to the exported memory and back without another copy. Each system call that
//! touches a range holds a guard of it, and none blocks; so withdrawing a range waits for microseconds,
//! whatever its peers do. A peer in the middle of an operation on a range that is withdrawn loses its
//! connection.

mod exports;
mod session;

pub(crate) use exports::Exports;

use std::collections::VecDeque;
use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use te_core::{Access, Op};
use te_fabric::net::Listener;

use self::session::Session;
use crate::config::Config;
use crate::header::Request;
use crate::server::{Limits, Protocol, Server, Turn};
use crate::sys::ExportedRange;

/// How long an operation may move nothing while others wait for room.
const STALL_MAX: Duration = Duration::from_secs(1);
/// How long an operation waits for room. Then it is served beyond the limit: peers that are slow, or want to
/// be, must not keep others from theirs.
const WAIT_MAX: Duration = Duration::from_secs(2);

/// Serves `exports` on `listener`.
///
/// # Errors
/// The system refused a thread or a file descriptor.
pub(crate) fn start(
    listener: Listener,
    config: &Config,
    exports: Arc<Exports>,
    counters: Arc<Counters>,
) -> io::Result<Server> {
    let limits = Limits {
        peers: config.peers.clone(),
        connections_max: config.target_connections_max as usize,
        per_peer_max: config.target_connections_per_peer_max as usize,
        silence_ms: config.silence_ms_max,
    };
    let target = Target {
        exports,
        counters,
        header: Duration::from_millis(config.header_ms_max.into()),
        silence: Duration::from_millis(config.silence_ms_max.into()),
        inflight_bytes: 0,
        inflight_bytes_max: config.target_inflight_bytes_max,
        waiting: VecDeque::new(),
        granted: None,
        sink: vec![0; SINK_BYTES].into(),
    };
    Server::start("mooncake-data", listener, limits, target)
}

/// Memory into which bytes that are not wanted are received.
const SINK_BYTES: usize = 64 << 10;

/// What a target has counted.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    reads: AtomicU64,
    writes: AtomicU64,
    bytes: AtomicU64,
    rejected: AtomicU64,
}

/// Counters of what peers did with exported memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TargetStats {
    /// READs whose last byte was sent.
    pub reads: u64,
    /// WRITEs whose last byte is in place.
    pub writes: u64,
    /// Bytes of READs and WRITEs, also of those that did not end.
    pub bytes: u64,
    /// Requests for ranges, or with rights, that are not exported.
    pub rejected: u64,
}

impl Counters {
    pub(crate) fn stats(&self) -> TargetStats {
        let get = |of: &AtomicU64| of.load(Ordering::Relaxed);
        TargetStats {
            reads: get(&self.reads),
            writes: get(&self.writes),
            bytes: get(&self.bytes),
            rejected: get(&self.rejected),
        }
    }

    fn moved(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn done(&self, op: Op) {
        let of = if op == Op::Read { &self.reads } else { &self.writes };
        of.fetch_add(1, Ordering::Relaxed);
    }
}

/// What all connections share.
struct Target {
    exports: Arc<Exports>,
    counters: Arc<Counters>,
    /// For a request.
    header: Duration,
    /// Without a byte of an operation.
    silence: Duration,
    /// Bytes of all operations that are served.
    inflight_bytes: u64,
    inflight_bytes_max: u64,
    /// Operations that wait for room, in the order of their arrival.
    waiting: VecDeque<Waiting>,
    /// The connection whose operation was given room, and has not begun yet.
    granted: Option<u64>,
    sink: Box<[u8]>,
}

/// An operation that waits for room.
struct Waiting {
    /// The connection.
    name: u64,
    bytes: u64,
    since: Instant,
}

impl Target {
    /// The exported range of a request, and the offset in it; `None`: it is not served.
    fn find(&self, request: &Request) -> Option<(Arc<ExportedRange>, u64)> {
        let needed = match request.op {
            Op::Read => Access::REMOTE_READ,
            Op::Write => Access::REMOTE_WRITE,
        };
        let found =
            self.exports.find(request.addr, request.len).filter(|(range, _)| range.access().contains(needed));
        if found.is_none() {
            self.counters.rejected.fetch_add(1, Ordering::Relaxed);
            log::debug!(
                "a {:?} of {} bytes at {:#x} is refused: it does not lie in one exported range with that right",
                request.op,
                request.len,
                request.addr
            );
        }
        found
    }

    /// Gives room to an operation of `bytes` bytes, or lets the connection wait for it.
    fn enter(&mut self, name: u64, bytes: u64, now: Instant) -> bool {
        if self.waiting.is_empty() && self.has_room(bytes) {
            self.inflight_bytes = self.inflight_bytes.saturating_add(bytes);
            return true;
        }
        self.waiting.push_back(Waiting { name, bytes, since: now });
        false
    }

    /// An operation that is longer than the limit is served alone.
    const fn has_room(&self, bytes: u64) -> bool {
        self.inflight_bytes == 0 || self.inflight_bytes.saturating_add(bytes) <= self.inflight_bytes_max
    }

    fn leave(&mut self, bytes: u64) {
        debug_assert!(self.inflight_bytes >= bytes, "an operation leaves once");
        self.inflight_bytes = self.inflight_bytes.saturating_sub(bytes);
    }

    /// Whether the waiting connection was given room, which it takes.
    fn takes_grant(&mut self, name: u64) -> bool {
        self.granted.take_if(|granted| *granted == name).is_some()
    }
}

impl Protocol for Target {
    type Session = Session;

    fn opened(&mut self, name: u64, stream: TcpStream, now: Instant) -> Session {
        Session::new(name, stream, now)
    }

    fn stream(session: &Session) -> &TcpStream {
        session.stream()
    }

    fn drive(&mut self, session: &mut Session, now: Instant) -> Turn {
        session.drive(self, now)
    }

    fn deadline(&self, session: &Session) -> Option<Instant> {
        let silence = if self.waiting.is_empty() { self.silence } else { self.silence.min(STALL_MAX) };
        session.deadline(self.header, silence)
    }

    fn idle_since(&self, session: &Session) -> Option<Instant> {
        session.idle_since()
    }

    fn closed(&mut self, session: Session) {
        self.waiting.retain(|waiting| waiting.name != session.name());
        if let Some(bytes) = session.inflight_bytes() {
            self.leave(bytes);
        }
        session.close();
    }

    fn resumed(&mut self, now: Instant) -> Option<u64> {
        let &Waiting { name, bytes, since } = self.waiting.front()?;
        if !self.has_room(bytes) && now < since + WAIT_MAX {
            return None;
        }
        self.waiting.pop_front();
        self.inflight_bytes = self.inflight_bytes.saturating_add(bytes);
        self.granted = Some(name);
        Some(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(inflight_bytes_max: u64) -> Target {
        Target {
            exports: Arc::new(Exports::new(1)),
            counters: Arc::default(),
            header: Duration::from_secs(5),
            silence: Duration::from_secs(30),
            inflight_bytes: 0,
            inflight_bytes_max,
            waiting: VecDeque::new(),
            granted: None,
            sink: Box::default(),
        }
    }

    #[test]
    fn operations_wait_in_order_while_there_is_no_room() {
        let (mut target, now) = (target(100), Instant::now());
        assert!(target.enter(1, 60, now));
        assert!(!target.enter(2, 60, now), "no room");
        assert!(!target.enter(3, 10, now), "room, but another waits");
        assert_eq!(target.resumed(now), None);
        target.leave(60);
        assert_eq!(
            (target.resumed(now), target.takes_grant(3), target.takes_grant(2)),
            (Some(2), false, true)
        );
        assert_eq!((target.resumed(now), target.takes_grant(3)), (Some(3), true));
        assert_eq!((target.inflight_bytes, target.resumed(now)), (70, None));
    }

    #[test]
    fn an_operation_that_has_waited_for_long_is_served_beyond_the_limit() {
        let (mut target, now) = (target(100), Instant::now());
        assert!(target.enter(1, 100, now), "its peer sends a byte now and then");
        assert!(!target.enter(2, 60, now));
        assert!(!target.enter(3, 60, now + Duration::from_secs(1)));
        assert_eq!(target.resumed(now + WAIT_MAX - Duration::from_millis(1)), None);
        assert_eq!(target.resumed(now + WAIT_MAX), Some(2));
        assert!(target.takes_grant(2));
        assert_eq!(target.resumed(now + WAIT_MAX), None, "each waits for its own time");
        assert_eq!(target.inflight_bytes, 160);
    }

    #[test]
    fn an_operation_beyond_the_limit_is_served_alone() {
        let (mut target, now) = (target(100), Instant::now());
        assert!(target.enter(1, 1 << 63, now));
        assert!(!target.enter(2, 1, now));
        target.leave(1 << 63);
        assert_eq!((target.resumed(now), target.inflight_bytes), (Some(2), 1));
        assert!(!target.enter(3, u64::MAX, now), "it does not overflow");
    }
}
