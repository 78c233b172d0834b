//! The command log: everything that changes a master, in order, so that another process can repeat it.
//!
//! ```text
//!   leader                                                    standby
//!  ┌──────────────────────────┐                              ┌──────────────────────────┐
//!  │ Master + Sessions        │   commands, in order         │ Standby                  │
//!  │   ▲                      │  ──────────────────────────▶ │   Master + Sessions      │
//!  │   │ frames, timeouts     │   lsn 7: Session, lsn 8:     │   apply: the same code   │
//!  │ Recorder                 │   Request, lsn 9: Touched …  │   with the same input    │
//!  └──────────────────────────┘                              └──────────────────────────┘
//! ```
//!
//! A [`Master`](crate::Master) is deterministic: its state depends on its settings and on the calls that
//! were made, with their times, and on nothing else. The [`Recorder`] stands in front of the master of the
//! leader and writes down each call that changes state; a [`Standby`] makes the same calls.
//! [`Master::digest`](crate::Master::digest) of both is equal at the same position of the log, which the
//! simulation checks.
//!
//! What is written for a request depends on its effect ([`Effect`]):
//!
//! * A request that only asks is not written. The counters of such requests are the leader's alone.
//! * A request that leases objects for reading is written as the slots of the objects that were leased
//!   ([`Command::Touched`], about 4 bytes per object), not as their keys.
//! * Every other request is written as it came, without its number.
//!
//! Connections exist on the leader alone. A command names the connection by a slot, and the state that the
//! master keeps for the connection (its tenant and rights, the leases that it can return) is state of the
//! standby as well. Proofs of secrets are not repeated: their result is written ([`Command::Session`]).
//!
//! # Example
//!
//! ```
//! use store_core::command_log::{Recorder, Standby};
//! use store_core::message::{Mount, MountSegment, Operation};
//! use store_core::{Frame, Incarnation, Instant, Master, MasterConfig, NodeId, Session};
//!
//! let mut master = Master::new(MasterConfig::default())?;
//! let mut recorder = Recorder::new(&mut master);
//! let mut standby = Standby::new(MasterConfig::default())?;
//!
//! let (mut session, mut request, mut response) = (Session::owner(), Vec::new(), Vec::new());
//! let segment = MountSegment {
//!     node: NodeId::new(1),
//!     incarnation: Incarnation::new(1),
//!     name: "n1",
//!     endpoint: "n1:9000",
//!     len: 1 << 20,
//!     ..MountSegment::default()
//! };
//! Mount::encode_request(&mut request, 1, &segment, std::iter::empty())?;
//! let (frame, _) = Frame::parse(&request)?.expect("whole");
//! recorder.handle(&mut master, Instant::from_millis(1), &mut session, &frame, &mut response);
//!
//! let log = recorder.take();
//! standby.apply(&log)?;
//! assert_eq!(standby.lsn(), recorder.lsn());
//! assert_eq!(standby.master().digest(), master.digest());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod dependence;
mod recorder;
mod sessions;
mod standby;

use alloc::vec::Vec;
use core::fmt;

use serde::{Deserialize, Serialize};

use crate::codec::Key;
use crate::session::Peer;
use crate::wire::FRAME_BYTES_MAX;
use crate::{Session, TenantNo};

pub use dependence::Dependence;
pub use recorder::Recorder;
pub(crate) use sessions::SessionRecord;
pub use standby::Standby;

/// The number of what commands do: two releases with the same number make the same state of the same
/// commands. It is written into snapshots and journals, and those with another number are refused. A change
/// of the master that changes the effect of any command, or the state, raises it: a test in
/// `tests/snapshot.rs` fails then.
pub const BEHAVIOUR: u32 = 8;

/// The position of a command in the log: 1 for the first.
pub type Lsn = u64;

/// The number of a connection in the log. Given again when the connection has ended.
pub type Slot = u32;

/// Length limit of one encoded command, bytes: a frame and what is written about it.
pub const COMMAND_BYTES_MAX: usize = FRAME_BYTES_MAX + 64;

/// Limit on connections that commands name at the same time.
pub const SLOTS_MAX: u32 = 1 << 20;

/// The highest bit of an item of [`Command::Touched`]: the object follows another one of the same request.
const FOLLOWS: u32 = 1 << 31;

/// What a request does to the state of the master.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing but counters.
    Asks,
    /// It leases objects for reading.
    Leases,
    /// Anything else.
    Changes,
    /// It fills in the state of its connection, and may create a tenant.
    Greets,
}

/// One entry of the log. Times are ns since the time of the command before, because they are small then.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Command<'a> {
    /// A connection that the log has not named yet, or whose rights have changed.
    Session {
        /// Its number from here on.
        slot: Slot,
        /// What the master knows of it.
        state: SessionState,
    },
    /// A greeting has created a tenant with this name.
    Tenant(&'a str),
    /// A request with [`Effect::Changes`].
    Request {
        /// Time since the command before, ns.
        after_ns: u64,
        /// The connection.
        slot: Slot,
        /// The operation, a [`Kind`](crate::Kind).
        kind: u8,
        /// The body of the frame.
        #[serde(borrow)]
        body: Key<'a>,
    },
    /// A request has leased objects.
    Touched {
        /// Time since the command before, ns.
        after_ns: u64,
        /// The connection.
        slot: Slot,
        /// Whether the leases were those of gets, which count as uses of the objects.
        get: bool,
        /// The objects: per object 4 bytes, least significant first; the highest bit says that the
        /// object follows another one of the same request.
        #[serde(borrow)]
        objects: Key<'a>,
    },
    /// A connection has ended. Its number may be given again.
    Ended {
        /// Time since the command before, ns.
        after_ns: u64,
        /// The connection.
        slot: Slot,
    },
    /// Timeouts were handled.
    Timeout {
        /// Time since the command before, ns.
        after_ns: u64,
    },
    /// Another process leads from here on: the connections of the former leader are gone.
    TookOver {
        /// Time since the command before, ns.
        after_ns: u64,
        /// The former leader had handed over: it granted no lease that is not in the log.
        handed_over: bool,
    },
    /// The wall time was set.
    Wall {
        /// Time since the command before, ns.
        after_ns: u64,
        /// ms since 1970.
        wall_ms: u64,
    },
}

/// What the master knows of a connection, but for its leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionState {
    local: bool,
    greeted: bool,
    admin: bool,
    cluster: bool,
    node: bool,
    tenant: Option<(TenantNo, u32)>,
}

impl SessionState {
    const fn of(session: &Session) -> Self {
        let Session { peer, greeted, admin, cluster, node, tenant, .. } = *session;
        Self { local: matches!(peer, Peer::Local), greeted, admin, cluster, node, tenant }
    }

    const fn fill(self, session: &mut Session) {
        session.peer = if self.local { Peer::Local } else { Peer::Remote };
        (session.greeted, session.admin, session.cluster) = (self.greeted, self.admin, self.cluster);
        (session.node, session.tenant) = (self.node, self.tenant);
    }
}

impl<'a> Command<'a> {
    /// Appends the command to a log: its length, a postcard varint, and the command itself in postcard.
    pub fn encode(&self, log: &mut Vec<u8>) {
        let payload = match self {
            Self::Request { body: bytes, .. } | Self::Touched { objects: bytes, .. } => bytes.0.len(),
            _ => 0,
        };
        let mut small = [0; 512];
        if payload <= 256
            && let Ok(bytes) = postcard::to_slice(self, &mut small)
        {
            push_varint(log, bytes.len());
            log.extend_from_slice(bytes);
            return;
        }
        // Writing to memory does not fail.
        let bytes = postcard::to_allocvec(self).unwrap_or_default();
        push_varint(log, bytes.len());
        log.extend_from_slice(&bytes);
    }

    /// Splits the first command off a log; returns it and the rest. `None` at the end of the log.
    ///
    /// # Errors
    /// The log is cut short, or is not a log of this version.
    pub fn decode(log: &'a [u8]) -> Result<Option<(Self, &'a [u8])>, CommandError> {
        if log.is_empty() {
            return Ok(None);
        }
        let (len, rest) = postcard::take_from_bytes::<u32>(log).map_err(|_| CommandError::Damaged)?;
        let len = len as usize;
        if len > COMMAND_BYTES_MAX {
            return Err(CommandError::TooLong { bytes: len });
        }
        let Some((command, rest)) = rest.split_at_checked(len) else { return Err(CommandError::Damaged) };
        let (command, left) = postcard::take_from_bytes(command).map_err(|_| CommandError::Damaged)?;
        if left.is_empty() { Ok(Some((command, rest))) } else { Err(CommandError::Damaged) }
    }
}

fn push_varint(log: &mut Vec<u8>, len: usize) {
    let mut bytes = [0; 10];
    if let Ok(bytes) = postcard::to_slice(&(len as u32), &mut bytes) {
        log.extend_from_slice(bytes);
    }
}

/// Why a command cannot be applied. The log is not one that this state can follow: the standby has to begin
/// anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CommandError {
    /// The bytes are cut short, or are no command.
    Damaged,
    /// A command is longer than [`COMMAND_BYTES_MAX`].
    TooLong {
        /// Its length, bytes.
        bytes: usize,
    },
    /// A command names a connection that the log has not introduced, or that has ended.
    UnknownSlot {
        /// The number of the connection.
        slot: Slot,
    },
    /// A command names an operation that this release does not know, or that is not written to a log.
    UnknownKind {
        /// The operation.
        kind: u8,
    },
    /// A command names an object that is not there.
    UnknownObject {
        /// The slot of the object.
        index: u32,
    },
    /// A tenant cannot be created that the leader has created.
    Tenant,
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Damaged => f.write_str("the command log is damaged or cut short"),
            Self::TooLong { bytes } => {
                write!(f, "a command of {bytes} bytes is longer than the limit of {COMMAND_BYTES_MAX}")
            }
            Self::UnknownSlot { slot } => {
                write!(f, "the command log names connection {slot}, which it has not introduced")
            }
            Self::UnknownKind { kind } => write!(
                f,
                "the command log has operation {kind}, which this release does not repeat: use the same \
                 release on all masters"
            ),
            Self::UnknownObject { index } => {
                write!(f, "the command log names object {index}, which is not there")
            }
            Self::Tenant => f.write_str("a tenant of the command log cannot be created"),
        }
    }
}

impl core::error::Error for CommandError {}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn commands() -> [Command<'static>; 8] {
        let state = SessionState::of(&Session::owner());
        [
            Command::Session { slot: 1, state },
            Command::Tenant("research"),
            Command::Request { after_ns: 17, slot: 1, kind: 20, body: Key(b"body") },
            Command::Touched { after_ns: 1 << 40, slot: 1, get: true, objects: Key(&[1, 0, 0, 0x80]) },
            Command::Ended { after_ns: 0, slot: 1 },
            Command::Timeout { after_ns: u64::MAX },
            Command::TookOver { after_ns: 9, handed_over: true },
            Command::Wall { after_ns: 3, wall_ms: 1_700_000_000_000 },
        ]
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        let mut log = Vec::new();
        commands().iter().for_each(|command| command.encode(&mut log));
        let long = alloc::vec![7; 300];
        let long = Command::Request { after_ns: 0, slot: 2, kind: 1, body: Key(&long) };
        long.encode(&mut log);
        let mut rest = &log[..];
        for command in commands().into_iter().chain([long]) {
            let (decoded, left) = Command::decode(rest).unwrap().unwrap();
            assert_eq!(decoded, command);
            rest = left;
        }
        assert_eq!(Command::decode(rest), Ok(None));
    }

    #[test]
    fn a_log_that_is_cut_short_is_an_error_and_not_another_log() {
        let mut log = Vec::new();
        commands()[2].encode(&mut log);
        for len in 1..log.len() {
            assert_eq!(Command::decode(&log[..len]), Err(CommandError::Damaged), "{len}");
        }
        // A length of 5 bytes is the longest; one that ends nowhere is damaged.
        assert_eq!(Command::decode(&[0xff; 16]), Err(CommandError::Damaged));
        let mut huge = Vec::new();
        push_varint(&mut huge, COMMAND_BYTES_MAX + 1);
        let bytes = COMMAND_BYTES_MAX + 1;
        assert_eq!(Command::decode(&huge), Err(CommandError::TooLong { bytes }));
        // Bytes after the command within its length.
        assert_eq!(Command::decode(&[3, 5, 0, 0]), Err(CommandError::Damaged));
    }
}
