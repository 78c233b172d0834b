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
//!   └────────────┘ ── Begin, Append┴──────▶ ┌────────────┐
//!                  ◀──── Join, Ack ──────── │ joining    │ not in sync yet; must not take over
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
//! * **R4, join.** A member that is not in sync gets the whole log. When it has every command whose answer
//!   was given, the leader waits for it as for one in sync, and only then puts it into the record.
//! * **R5, lease.** The leader gives answers only while every member in sync has acknowledged a beat that was
//!   sent within [`Timing::lease`]. A leader alone needs no lease: no other member may take over.
//! * **R6, take over.** A follower in sync that has heard nothing for [`Timing::take_over`] promises itself
//!   to take no more commands of this reign, and asks the arbiter for the next term, with itself alone in
//!   sync. An answer of the arbiter that is lost is asked for again, and never guessed.
//! * **R7, begin.** A new leader first repeats [`TookOver`](crate::command_log::Command::TookOver): time does
//!   not go back, every node has its whole time to live, and no space is reused before every lease has ended
//!   that the former leader may have granted.
//! * **R8, depose.** A leader that learns of a later reign discards the answers that wait, and joins.
//! * **R9, begin anew.** A new lineage begins, with nothing, when every member that the record names has said
//!   that it has no state, or when the record has named the leader alone for [`Timing::unclean`] and the
//!   leader has not confirmed it. A leader alone stops giving answers before that.
//!
//! A member that has restarted has no state. It joins, and may not take over before the leader has told it
//! that the record names it for what it has now, whatever the record said before.
//!
//! # Limits
//!
//! The log is kept whole, in memory, on every member: there is no snapshot yet. A member that lacks state
//! gets the log from its beginning.

mod following;
mod leading;
mod member;

use alloc::vec::Vec;
use core::time::Duration;

use serde::{Deserialize, Serialize};

use crate::command_log::Lsn;

pub use member::Member;

/// The number of a member. Members of one cluster have different numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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

/// What members send to each other. Messages may be lost, repeated and reordered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// A member without state asks the leader for it, and those that the record names whether they have any.
    Join {
        /// A number that is another one each time that a member has lost its state.
        life: u64,
        /// The version of the record that names them.
        version: u64,
    },
    /// The answer to [`Self::Join`] of a member that has no state either.
    Empty {
        /// As it was asked.
        version: u64,
    },
    /// The leader gives a member its first state: that of an empty master with these settings.
    Begin {
        /// The reign.
        reign: Reign,
        /// The life of the member that it is for: one of an earlier life ignores it.
        life: u64,
        /// What the leader's process chose when it started the master.
        start: Start,
    },
    /// Commands of the leader; without commands, a beat.
    Append {
        /// The reign.
        reign: Reign,
        /// The position of the last command before these.
        after: Lsn,
        /// The commands, as [`Recorder::take`](crate::command_log::Recorder::take) returns them.
        commands: Vec<u8>,
        /// The number of the beat.
        beat: u64,
        /// The record names the member, and has done so in this life of it: it may take over.
        trusted: bool,
    },
    /// A follower has every command up to `lsn`.
    Ack {
        /// The reign.
        reign: Reign,
        /// The follower's life.
        life: u64,
        /// The position of its last command.
        lsn: Lsn,
        /// The latest beat that it has heard.
        beat: u64,
    },
    /// A member knows a later reign than that of a message, or has promised to take one.
    Nack {
        /// The reign.
        reign: Reign,
    },
}

/// The settings that differ between two starts of a master, and that all members of a lineage share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// [`MasterConfig::epoch`](crate::MasterConfig::epoch).
    pub epoch: u32,
    /// [`MasterConfig::started_wall_ms`](crate::MasterConfig::started_wall_ms).
    pub started_wall_ms: u64,
    /// [`MasterConfig::handle_key`](crate::MasterConfig::handle_key).
    pub handle_key: [u64; 2],
    /// [`MasterConfig::hash_seed`](crate::MasterConfig::hash_seed).
    pub hash_seed: u64,
}

/// Something that the process of a member is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send a message.
    Send(MemberId, Message),
    /// Ask the arbiter, and pass the answer to [`Member::handle_told`] with this number; [`Told::Unknown`]
    /// when none came in time.
    Ask(u64, Ask),
    /// Send an answer to the connection that the token names.
    Release {
        /// The token.
        token: u64,
        /// The frame.
        answer: Vec<u8>,
    },
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
        }
    }
}
