//! What goes in and out of the scheduler.

use core::fmt;
use core::time::Duration;

use te_core::Instant;

use crate::cost::PrefillCounters;
use crate::{BlockKey, InstanceId, InstanceMatch, Tier};

/// What a request was promised. [`Duration::MAX`] promises nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slo {
    /// Time to the first token, from the arrival of the request.
    pub ttft: Duration,
    /// Time between tokens.
    pub tbt: Duration,
}

impl Slo {
    /// No promise.
    pub const NONE: Self = Self { ttft: Duration::MAX, tbt: Duration::MAX };
}

/// A request to place: its length, and who has how much of it.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// The model; only instances with the same number are candidates.
    pub model: u32,
    /// Tokens of the prompt; at least 1.
    pub tokens: u32,
    /// Tokens per block, for every number of blocks here; at least 1.
    pub block_tokens: u32,
    /// What instances have of the prompt. Instances that are unknown or lost are ignored; of several entries
    /// of one instance the last counts.
    pub matches: &'a [InstanceMatch],
    /// Blocks, from the prompt's beginning, that the shared store has.
    pub store_blocks: u32,
    /// The keys of the prompt's blocks: only to name hot prefixes for replication; may be empty.
    pub keys: &'a [BlockKey],
    /// Tokens of output, if known (a limit that the request sets); else what the model's requests had before.
    pub expected_output: Option<u32>,
    /// The promises.
    pub slo: Slo,
}

/// A reservation, fenced: after the request was placed anew, or ended, its former name has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReservationId {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
}

impl ReservationId {
    /// As one number, for wires and logs.
    #[must_use]
    pub const fn to_u64(self) -> u64 {
        (self.generation as u64) << 32 | self.slot as u64
    }

    /// From [`to_u64`](Self::to_u64). Any number is allowed: one that names nothing has no effect.
    #[must_use]
    pub const fn from_u64(id: u64) -> Self {
        Self { slot: id as u32, generation: (id >> 32) as u32 }
    }
}

/// Where blocks are fetched from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// Another instance.
    Instance(InstanceId),
    /// The store that every instance can read.
    Store,
}

/// Blocks that the prefill instance fetches before it computes the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// From where.
    pub from: Source,
    /// The slowest tier that is read.
    pub tier: Tier,
    /// The first block to fetch: those before are on the prefill instance.
    pub first_block: u32,
    /// Blocks to fetch; not zero.
    pub blocks: u32,
}

/// Where a request runs, and what is expected of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The name of the reservation.
    pub reservation: ReservationId,
    /// The instance that computes the prompt. With `restored`, the decode instance.
    pub prefill: InstanceId,
    /// Blocks of the prompt that are not computed: held by the prefill instance, or fetched.
    pub reuse_blocks: u32,
    /// What is fetched, if anything.
    pub fetch: Option<Fetch>,
    /// The instance that decodes; equal to `prefill` on instances that do both.
    pub decode: InstanceId,
    /// The decode instance reads the KV from the store itself, and no prefill runs (after a decode instance
    /// was lost).
    pub restored: bool,
    /// Predicted time to the first token, from now.
    pub ttft: Duration,
    /// Predicted time between tokens when this request has joined its decode instance.
    pub tbt: Duration,
    /// The part of `ttft` in which the request waits for others, or for its KV.
    pub wait: Duration,
    /// The part of `ttft` in which its prefill runs.
    pub prefill_time: Duration,
}

/// Why a request was not placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The prompt has no token, its blocks have none, or it is longer than the limit.
    BadAsk,
    /// No instance that can prefill this model is up.
    NoPrefill,
    /// No instance that can decode this model is up.
    NoDecode,
    /// The first token would come after its SLO.
    Ttft,
    /// Every decode instance would be slower than the SLO when the prefill ends.
    Tbt,
    /// No decode instance has room for the KV when the prefill ends.
    KvFull,
    /// As many requests as the limit allows are in progress.
    Full,
    /// The reservation to place anew does not exist, or its instances are not lost.
    Stale,
}

/// A request that was not placed: an HTTP server answers 429 with `Retry-After`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Why.
    pub reason: Reason,
    /// The time to the first token that was predicted; [`Duration::MAX`] when there was nothing to predict
    /// with.
    pub ttft: Duration,
    /// The time between tokens that was predicted; [`Duration::MAX`] when there was nothing to predict with.
    pub tbt: Duration,
    /// When the same request would be accepted if nothing else arrived.
    pub retry_after: Duration,
}

impl Refusal {
    pub(crate) const fn of(reason: Reason, retry_after: Duration) -> Self {
        Self { reason, ttft: Duration::MAX, tbt: Duration::MAX, retry_after }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ttft, tbt) = (self.ttft, self.tbt);
        match self.reason {
            Reason::BadAsk => {
                return f.write_str(
                    "the prompt or its blocks have no token, or it exceeds `tokens_max`: correct it",
                );
            }
            Reason::NoPrefill => f.write_str("no instance that can prefill this model is up")?,
            Reason::NoDecode => f.write_str("no instance that can decode this model is up")?,
            Reason::Ttft => write!(f, "the first token would take {ttft:.1?}, longer than promised")?,
            Reason::Tbt => write!(f, "tokens would take {tbt:.1?} each, longer than promised")?,
            Reason::KvFull => f.write_str("no decode instance will have room for the request's KV")?,
            Reason::Full => f.write_str("as many requests as `limits` allow are in progress")?,
            Reason::Stale => {
                return f.write_str("the reservation ended or was placed already: place a new request");
            }
        }
        write!(f, ": retry after {:.1?}", self.retry_after)
    }
}

impl core::error::Error for Refusal {}

/// What an instance can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Only prefill: the KV is shipped to a decode instance.
    Prefill,
    /// Only decode.
    Decode,
    /// Both: a request that is prefilled here is decoded here.
    Both,
}

/// A kind of instance: those of one kind have one [`CostModel`](crate::cost::CostModel).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KindId(pub(crate) u16);

/// An instance to schedule on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InstanceSpec {
    /// Its name.
    pub id: InstanceId,
    /// What it can do.
    pub role: Role,
    /// The model it serves.
    pub model: u32,
    /// What work costs on it.
    pub kind: KindId,
    /// The rack it is in; less than the limit `racks`.
    pub rack: u16,
    /// Bytes per second of its NICs together, each way; 0: only the bandwidth between racks limits.
    pub nic_bytes_per_s: u64,
    /// Tokens of KV that fit for decoding; 0: unknown, no limit.
    pub kv_tokens_max: u64,
    /// Sequences that decode at a time; 0: unknown, no limit.
    pub sequences_max: u32,
    /// Nodes that a long prompt is pipelined over (chunked pipeline parallelism); 1 without a group.
    pub stages: u32,
    /// Tokens per chunk of such a pipeline; 0: a prompt is one chunk.
    pub chunk_tokens: u32,
}

impl InstanceSpec {
    /// An instance in rack 0, without limits and without a pipeline.
    #[must_use]
    pub const fn new(id: InstanceId, role: Role, kind: KindId) -> Self {
        Self {
            id,
            role,
            model: 0,
            kind,
            rack: 0,
            nic_bytes_per_s: 0,
            kv_tokens_max: 0,
            sequences_max: 0,
            stages: 1,
            chunk_tokens: 0,
        }
    }
}

/// What an engine says about itself. What it does not say is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoadReport {
    /// Requests that it computes.
    pub running: Option<u32>,
    /// Requests that wait in it.
    pub waiting: Option<u32>,
    /// Tokens without KV of the requests that wait.
    pub waiting_uncached_tokens: Option<u64>,
    /// Tokens of KV in use by requests.
    pub kv_tokens: Option<u64>,
    /// Tokens of KV that fit.
    pub kv_tokens_max: Option<u64>,
    /// Counters of prefills since its start.
    pub counters: Option<PrefillCounters>,
    /// The time of a recent decode step, of `running` sequences with `kv_tokens` tokens.
    pub step: Option<Duration>,
}

/// Why an instance was not added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstanceError {
    /// As many instances as the limit allows exist.
    TooMany {
        /// The limit.
        max: u32,
    },
    /// One of this name exists.
    Exists(InstanceId),
    /// The kind does not exist.
    UnknownKind(KindId),
    /// The rack's number is not below the limit.
    BadRack {
        /// The number.
        rack: u16,
        /// The limit.
        max: u16,
    },
}

impl fmt::Display for InstanceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooMany { max } => write!(f, "there are {max} instances already: raise `limits.instances`"),
            Self::Exists(id) => write!(f, "instance {} exists already: remove it first", id.0),
            Self::UnknownKind(kind) => {
                write!(f, "kind {} does not exist: add it with `add_kind` first", kind.0)
            }
            Self::BadRack { rack, max } => {
                write!(f, "rack {rack} is not below {max}: number racks from 0, or raise `limits.racks`")
            }
        }
    }
}

impl core::error::Error for InstanceError {}

/// A request whose instance was lost: place it again with
/// [`Scheduler::reschedule`](super::Scheduler::reschedule), or [`release`](super::Scheduler::release) it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Orphan {
    /// Its reservation.
    pub reservation: ReservationId,
    /// Whether its prefill had ended: it has to be restored from the store, or prefilled again.
    pub prefilled: bool,
    /// Tokens of output that were reported: they are part of the prompt now.
    pub output: u32,
    /// When it arrived.
    pub arrival: Instant,
}

/// Blocks to copy because many requests wait for their holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replicate {
    /// The last block of the prefix.
    pub key: BlockKey,
    /// Blocks of the prefix.
    pub blocks: u32,
    /// Who has them. From the store, one of its nodes to another.
    pub from: Source,
    /// Who should; of the store's blocks, who has just fetched them.
    pub to: InstanceId,
}
