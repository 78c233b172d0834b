//! Settings, states and counts of a stream.

use core::fmt;
use core::time::Duration;

/// How a publisher counts and replays, and how long it may be away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The number of a publisher's first message: 0 of vLLM and SGLang, 1 of Mooncake's store.
    pub first_seq: u64,
    /// Whether the publisher has a replay port.
    pub replay: bool,
    /// Whether a replay of messages that the publisher does not keep is answered with a snapshot: messages
    /// with everything that is there, of which the first clears what was before, the numbers have no gap and
    /// the last has the number of the latest message. Numbers of such a publisher differ from one run to the
    /// next. Our own store does so; Mooncake's has no replays, and engines have no snapshots.
    pub snapshots: bool,
    /// Replays in a row that may bring nothing new before the stream does without.
    pub replay_attempts_max: u32,
    /// The time until the next message of a replay.
    pub replay_timeout: Duration,
    /// The time without a connection after which the publisher's blocks are not served any more.
    pub stale_after: Duration,
    /// Messages that are held while a replay is under way.
    pub held_messages_max: usize,
    /// Bytes of these messages.
    pub held_bytes_max: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            first_seq: 0,
            replay: true,
            snapshots: false,
            replay_attempts_max: 4,
            replay_timeout: Duration::from_secs(2),
            stale_after: Duration::from_secs(5),
            held_messages_max: 65_536,
            held_bytes_max: 64 << 20,
        }
    }
}

/// Where a stream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// There is no connection. What was applied is served until [`Settings::stale_after`].
    Connecting,
    /// A replay after a new connection or a fence is under way.
    Replaying,
    /// Every message is applied as it arrives.
    Live,
    /// A replay is under way because a message is missing. What was applied before is served.
    Gap,
    /// There was no connection for too long. Nothing is served.
    Stale,
}

impl State {
    /// The state's name in answers and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Connecting => "connecting",
            Self::Replaying => "replaying",
            Self::Live => "live",
            Self::Gap => "gap",
            Self::Stale => "stale",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why everything that a publisher said was forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum FenceReason {
    /// Messages are missing, and its replays do not have them.
    Lost,
    /// Messages are missing, and it replays nothing, or did not answer.
    NoReplay,
    /// It runs anew, with an empty cache.
    Restarted,
    /// Its connection and its replay told different things under one number.
    Conflict,
    /// It connected again and replays nothing, so that it may be another run.
    Unverifiable,
    /// A message of it, which may have removed blocks, could not be read.
    Unreadable,
    /// It was taken out, or is known to be dead.
    Dead,
    /// What another Conductor knows of it takes the place of what was known.
    Replaced,
}

impl FenceReason {
    /// Every reason, in the order of [`Counters::fences`].
    pub const ALL: [Self; 8] = [
        Self::Lost,
        Self::NoReplay,
        Self::Restarted,
        Self::Conflict,
        Self::Unverifiable,
        Self::Unreadable,
        Self::Dead,
        Self::Replaced,
    ];

    /// The reason's name in answers and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lost => "lost",
            Self::NoReplay => "no_replay",
            Self::Restarted => "restarted",
            Self::Conflict => "conflict",
            Self::Unverifiable => "unverifiable",
            Self::Unreadable => "unreadable",
            Self::Dead => "dead",
            Self::Replaced => "replaced",
        }
    }
}

impl fmt::Display for FenceReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which messages of a publisher were applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// The number of the first one.
    pub begin: u64,
    /// The number after the last one.
    pub next: u64,
    /// The digest of the last one.
    pub digest: u64,
}

/// What became of what another Conductor knows of a publisher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adoption {
    /// It has taken the place of what was known, and messages go on behind it.
    Adopted,
    /// It ends with a message that has not arrived here yet: offer it again.
    Later,
    /// It is of another run of the publisher, or cannot be shown to be of this one.
    Refused,
}

/// Counts since the stream was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Connections that were opened.
    pub connections: u64,
    /// Messages that were applied.
    pub applied: u64,
    /// Messages that had been applied or held before.
    pub duplicates: u64,
    /// Messages that arrived after one with a higher number.
    pub reordered: u64,
    /// Messages whose number went back as after a restart.
    pub back: u64,
    /// Times that a message was missing in a live stream.
    pub gaps: u64,
    /// Replays that were asked for.
    pub replays: u64,
    /// Replays whose end arrived.
    pub replays_ended: u64,
    /// Replays that ended early or timed out.
    pub replays_failed: u64,
    /// Replays in which a message was missing.
    pub holes: u64,
    /// Messages that were dropped since too many were held; a replay brings them again.
    pub overflows: u64,
    /// Replays that were answered with a snapshot.
    pub snapshots: u64,
    /// Times that the stream went on without what a replay did not bring.
    pub given_up: u64,
    /// Times that the publisher was away for too long.
    pub stale: u64,
    /// Messages without a connection, or of a replay that nothing waits for.
    pub unexpected: u64,
    /// Fences, in the order of [`FenceReason::ALL`].
    pub fences: [u64; FenceReason::ALL.len()],
}
