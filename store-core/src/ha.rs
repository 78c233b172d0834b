//! High availability: one of several masters leads, and the others have its state.
//!
//! ```text
//!    clients, nodes                    arbiter (one record, compare-and-swap)
//!         │                     { lineage, term, leader, in_sync }
//!         ▼                        ▲ only when the membership changes
//!   ┌────────────┐   Append, beats │        ┌────────────┐
//!   │ leader     │ ────────────────┼──────▶ │ follower   │ in sync: has every command whose
//!   │  Master    │ ◀──── Ack ──────┼─────── │  Standby   │ answer was given; may take over
//!   │  Recorder  │                 │        └────────────┘
//!   └────────────┘ ── Chunk, Append┴──────▶ ┌────────────┐
//!                  ◀─── Join, Taken, Ack ── │ joining    │ not in sync yet; must not take over
//!                                           └────────────┘
//! ```
//!
//! This is PacificA (Lin and others, Microsoft Research TR-2008-25): the members replicate the [command
//! log](crate::command_log) of the leader's master, and an arbiter that only stores one record decides who
//! may lead. A [`Member`] is a state machine without I/O, clock or threads. Its rules:
//!
//! * **R1, append.** The leader gives the answer to a request that changes state when every member that the
//!   record names as in sync has the command. An answer that depends on such a command waits as well: that
//!   to a get whose object was changed by it, and that to any question that is not about keys.
//! * **R2, accept.** A follower takes commands of the reign that it follows alone, each exactly once, in
//!   order.
//! * **R3, drop.** A member that is silent for [`Timing::silent`] is left out after the arbiter has taken it
//!   out of the record; until then answers wait. What was dropped may not take over.
//! * **R4, join.** A member without state gets a [snapshot](crate::snapshot), and the commands after it. When
//!   it has nearly every command, the leader waits for it as for one in sync; when it has every command whose
//!   answer was given, the record may name it.
//! * **R5, lease.** The leader gives answers only while every member in sync has acknowledged a beat that was
//!   sent within [`Timing::lease`]. A leader alone needs no lease: no other member may take over.
//! * **R6, take over.** A follower in sync that has heard nothing for [`Timing::take_over`] promises itself
//!   to take no more commands of this reign, and asks the arbiter for the next term, with itself alone in
//!   sync. An answer of the arbiter that is lost is asked for again, and never guessed.
//! * **R7, begin.** A new leader first repeats [`TookOver`](crate::command_log::Command::TookOver): time does
//!   not go back, every node has its whole time to live, and no space is reused before every lease has ended
//!   that the former leader may have granted. A leader that has handed over has written all of them to the
//!   log.
//! * **R8, depose.** A leader that learns of a later reign discards the answers that wait, and joins.
//! * **R9, begin anew.** A new lineage begins, with nothing, when every member that the record names has said
//!   that it has no state, or when the record has named the leader alone for [`Timing::unclean`] and the
//!   leader has not confirmed it. A leader alone stops giving answers before that.
//!
//! A member that has restarted has no state, whatever the record says of it. The leader sends it a snapshot
//! only when the record does not name it any more, so a member with state that the record names may take
//! over.
//!
//! # Switchover
//!
//! [`Member::hand_over`] is R6 at the leader's request. The leader takes no more requests, gives the answers
//! that wait, and tells the follower to take over when that has every command. The follower promises and asks
//! the arbiter at once, because the leader has given up the lease that R5 needs from this follower: it
//! answers again only if the follower has acknowledged a later beat, which it does not once it has promised.
//! So a switchover that fails at any point leaves one leader, as any other loss of messages does.
//!
//! # Limits
//!
//! The leader keeps the commands that a member may still need, up to [`Limits::history_bytes`]. A member that
//! falls further behind is taken out of the record, and gets a snapshot again. So does every other member
//! after a change of the leader.

mod following;
mod history;
mod leading;
mod member;
mod message;
mod remote;
mod status;
mod transfer;

use alloc::vec::Vec;
use core::fmt;
use core::time::Duration;

use serde::{Deserialize, Serialize};

use crate::snapshot::Crc32c;

pub use member::Member;
pub use message::{MESSAGE_BYTES_MAX, MESSAGES_VERSION, Message, MessageError};
pub use status::{Peer, Role, Stage, Status, Totals};

/// The number of a member. Members of one cluster have different numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MemberId(pub u64);

/// Which leader: the later one is greater.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Reign {
    /// Which state: new when the state of the cluster was lost, and everything begins with nothing. It is the
    /// [`MasterConfig::epoch`](crate::MasterConfig::epoch) of the master.
    pub lineage: u64,
    /// Which leader of this state.
    pub term: u64,
}

impl Reign {
    const fn next(self) -> Self {
        Self { lineage: self.lineage, term: self.term + 1 }
    }
}

/// What the arbiter stores.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The reign.
    pub reign: Reign,
    /// Who leads it.
    pub leader: MemberId,
    /// The members that have every command whose answer was given, the leader included; sorted.
    pub in_sync: Vec<MemberId>,
}

impl Record {
    fn has(&self, member: MemberId) -> bool {
        self.in_sync.contains(&member)
    }

    /// Whether the leader alone is in sync.
    fn is_alone(&self) -> bool {
        self.in_sync == [self.leader]
    }

    fn with(&self, member: MemberId) -> Self {
        let mut record = self.clone();
        if let Err(at) = record.in_sync.binary_search(&member) {
            record.in_sync.insert(at, member);
        }
        record
    }

    fn without(&self, member: MemberId) -> Self {
        let mut record = self.clone();
        record.in_sync.retain(|id| *id != member);
        record
    }
}

/// The record and its version, which grows with each change. Version 0: there is no record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Versioned {
    /// Its version.
    pub version: u64,
    /// The record.
    pub record: Record,
}

/// A request to the arbiter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// What is the record?
    Read,
    /// Replace the record if it still has this version.
    Swap {
        /// The version.
        version: u64,
        /// The new record.
        record: Record,
    },
}

/// The answer of the arbiter, or that there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// The record. To a [`Ask::Swap`]: it was not replaced.
    Is(Versioned),
    /// The record was replaced, and has this version.
    Swapped {
        /// The version.
        version: u64,
    },
    /// No answer came in time. A swap may have been carried out, or may be carried out later.
    Unknown,
}

/// Something that the process of a member is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send a message.
    Send(MemberId, Message),
    /// Ask the arbiter, and pass the answer to [`Member::handle_told`] with this number; [`Told::Unknown`]
    /// when none came in time.
    Ask(u64, Ask),
    /// The member leads from here on.
    Leads(Reign),
    /// The member no longer leads: close all connections of clients and nodes.
    Deposed,
}

/// Times of the protocol. Clocks of members run at rates that differ by 1 % at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Time between two beats. Default 50 ms.
    pub beat: Duration,
    /// A member that has acknowledged nothing for this long is dropped. Default 200 ms.
    pub silent: Duration,
    /// How long an acknowledged beat lets the leader give answers, from when it was sent. Default 400 ms.
    pub lease: Duration,
    /// A follower that has heard nothing for this long takes over. Longer than the lease, by more than clocks
    /// differ. Default 500 ms.
    pub take_over: Duration,
    /// Time between two tries to join, and to read the record. Default 200 ms.
    pub retry: Duration,
    /// When the record has named the leader alone and has not changed for this long, a member without state
    /// begins a new lineage; `None`: no new lineage ever begins by itself. A leader alone has the record
    /// confirmed meanwhile, and gives no answers when it cannot. Default 10 s.
    pub unclean: Option<Duration>,
    /// How long a switchover may take before the leader serves again. Default 2 s.
    pub hand_over: Duration,
    /// Time between two comparisons of a follower's whole state with the leader's. Default 10 s.
    pub compare: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        let ms = Duration::from_millis;
        Self {
            beat: ms(50),
            silent: ms(200),
            lease: ms(400),
            take_over: ms(500),
            retry: ms(200),
            unclean: Some(Duration::from_secs(10)),
            hand_over: Duration::from_secs(2),
            compare: Duration::from_secs(10),
        }
    }
}

/// Limits on what is kept, and on what is under way to one member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most bytes of commands that the leader keeps for members that lack them. A member that falls further
    /// behind gets a snapshot. Default 1 GiB.
    pub history_bytes: u64,
    /// Commands that were sent to one member and not acknowledged. Default 8 MiB.
    pub window_bytes: u64,
    /// Commands in one message, as far as they can be split. Default 256 KiB.
    pub append_bytes: usize,
    /// Chunks of a snapshot that were sent to one member and that it has not confirmed. Default 8.
    pub window_chunks: u32,
    /// Longest snapshot that a member takes, bytes. Default 64 GiB.
    pub snapshot_bytes: u64,
    /// A member lacks so few bytes of commands when the leader begins to wait for it. Default 256 KiB.
    pub near_bytes: u64,
    /// States of more objects are not compared: a comparison takes time in proportion. Default 1,000.
    pub compare_objects: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            history_bytes: 1 << 30,
            window_bytes: 8 << 20,
            append_bytes: 256 << 10,
            window_chunks: 8,
            snapshot_bytes: 64 << 30,
            near_bytes: 256 << 10,
            compare_objects: 1_000,
        }
    }
}

/// How members behave. The same for all members of a cluster.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Times.
    pub timing: Timing,
    /// Limits.
    pub limits: Limits,
    /// Computes the CRC-32C of the chunks of snapshots.
    pub crc32c: Crc32c,
}

/// The member does not take requests: it does not lead, or it hands over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotLeading;

/// Why a switchover does not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HandOverError {
    /// This member does not lead.
    NotLeading,
    /// A switchover is under way.
    UnderWay,
    /// The member is not in sync, so it must not lead.
    NotInSync {
        /// Which.
        member: MemberId,
    },
    /// No other member is in sync.
    Alone,
}

impl fmt::Display for HandOverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotLeading => f.write_str("this master does not lead: ask the leader"),
            Self::UnderWay => f.write_str("a switchover is under way: wait for its end"),
            Self::NotInSync { member } => {
                write!(f, "master {} is not in sync: wait until it is, or choose another one", member.0)
            }
            Self::Alone => f.write_str("no other master is in sync: start one, and wait until it is"),
        }
    }
}

impl core::error::Error for HandOverError {}
