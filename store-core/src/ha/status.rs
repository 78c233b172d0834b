//! What a member shows of itself.

use alloc::vec::Vec;

use super::{MemberId, Record, Reign};
use crate::command_log::Lsn;

/// What a member does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// It has no state, or not all of it yet.
    #[default]
    Joining,
    /// It repeats the commands of a leader.
    Following,
    /// It serves.
    Leading,
}

impl Role {
    /// Its name: `joining`, `following` or `leading`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::Following => "following",
            Self::Leading => "leading",
        }
    }
}

/// How far another member has come, as the leader knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It waits for a snapshot.
    Waits,
    /// It is sent a snapshot.
    Receives {
        /// Chunks that it has.
        taken: u32,
        /// Chunks of the snapshot.
        chunks: u32,
    },
    /// It repeats commands.
    Follows,
}

/// Another member, as the leader knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Which.
    pub id: MemberId,
    /// How far it has come.
    pub stage: Stage,
    /// The last command that it has.
    pub acked: Lsn,
    /// The record names it, and the leader has not given it up: it may take over.
    pub in_sync: bool,
}

/// What a member shows of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// What it does.
    pub role: Role,
    /// The reign in which it does so, or the latest that it knows.
    pub reign: Reign,
    /// The position of the last command that it has.
    pub lsn: Lsn,
    /// The record, as the arbiter last had it.
    pub record: Option<Record>,
    /// Of the leader: the other members.
    pub peers: Vec<Peer>,
    /// Of the leader: bytes of commands that are kept for other members.
    pub history_bytes: u64,
    /// Counters since the start of the process.
    pub totals: Totals,
}

/// Counters of a member since the start of its process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// How often it has begun to lead.
    pub led: u64,
    /// How often it has ceased to lead.
    pub deposed: u64,
    /// How often its state was not that of the leader.
    pub diverged: u64,
    /// Snapshots that it has taken of its state.
    pub snapshots_taken: u64,
    /// Snapshots that it has continued from.
    pub snapshots_loaded: u64,
    /// Snapshots that it could not load.
    pub snapshots_refused: u64,
    /// Requests to the arbiter that had no answer.
    pub arbiter_errors: u64,
}
