//! What the knowledge is told, and what it answers.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::time::Duration;

use crate::events::{self, Dialect, Skipped};
use crate::index::{Digest, IndexLimits};
use crate::stream::FenceReason;
use crate::{ContextId, InstanceId, OwnerMatch, Tier};

/// A publisher: one stream of events of an engine or a store. Never reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct PublisherId(pub u32);

/// What a publisher publishes for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// An engine, which serves requests and keeps blocks.
    Engine,
    /// A store that every instance of its tenant can read.
    Store {
        /// Objects of which a block consists there (one per rank of tensor parallelism, for instance): the
        /// block counts when all of them are there. 1 to 64.
        objects_per_block: u32,
    },
}

/// What is known of a publisher before its first message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// The name of the engine or the store. Publishers of one engine, such as its ranks, share it.
    pub instance: String,
    /// The tenant.
    pub tenant: String,
    /// The model, as the engine names it. Of a store that of its events, or empty for any.
    pub model: String,
    /// Tokens per block; not zero.
    pub block_tokens: u32,
    /// The LoRA adapter of events that name none.
    pub lora: Option<String>,
    /// The salt of events that have none.
    pub salt: Option<String>,
    /// The data-parallel rank of messages that name none.
    pub dp_rank: u32,
    /// Who speaks.
    pub dialect: Dialect,
    /// What it publishes for.
    pub role: Role,
}

/// Why a publisher was not registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegisterError {
    /// A field has no value, or one that cannot be; its name.
    Field(&'static str),
    /// The same instance, tenant, model and rank is registered with other values.
    Differs(PublisherId),
    /// A limit was reached; its name.
    Full(&'static str),
}

impl fmt::Display for RegisterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Field(field) => {
                write!(f, "`{field}` is missing or out of range: set it in the registration")
            }
            Self::Differs(PublisherId(id)) => write!(
                f,
                "the instance and rank are registered with other values (publisher {id}): unregister them first"
            ),
            Self::Full(limit) => {
                write!(f, "`{limit}` was reached: unregister what is gone, or raise the limit")
            }
        }
    }
}

impl core::error::Error for RegisterError {}

/// What the knowledge may grow to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The seed of the block keys. Clients that ask by keys have to use the same one.
    pub seed: u64,
    /// Publishers at the same time.
    pub publishers_max: usize,
    /// Contexts at the same time.
    pub contexts_max: usize,
    /// How long a context is kept without publishers. At the limit, the one that has been without for the
    /// longest time makes room at once.
    pub context_idle: Duration,
    /// Ranks that one publisher may speak for.
    pub ranks_per_publisher_max: usize,
    /// Attention groups per rank and tier.
    pub groups_max: usize,
    /// Hashes of engines that are known per context.
    pub learned_max: usize,
    /// Blocks of stores that no engine has announced yet, or of which objects are missing.
    pub waiting_max: usize,
    /// Limits of the index of each context.
    pub index: IndexLimits,
    /// Limits of payloads.
    pub payload: events::Limits,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            seed: 0,
            publishers_max: 16_384,
            contexts_max: 1_024,
            context_idle: Duration::from_secs(600),
            ranks_per_publisher_max: 64,
            groups_max: 16,
            learned_max: 32 << 20,
            waiting_max: 4 << 20,
            index: IndexLimits::default(),
            payload: events::Limits::default(),
        }
    }
}

/// How much of a prompt a rank has, in blocks from the prompt's beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RankMatch {
    /// The engine.
    pub instance: InstanceId,
    /// The rank.
    pub dp_rank: u32,
    /// Blocks in its GPU's memory.
    pub gpu: u32,
    /// Blocks in the memory of GPU or host; at least `gpu`.
    pub cpu: u32,
    /// Blocks on any of its tiers; at least `cpu`.
    pub disk: u32,
}

/// The answer to a query. Reused, it allocates nothing once it has grown.
#[derive(Clone, Debug, Default)]
pub struct Matches {
    /// Per instance the best of its ranks, by [`InstanceId`].
    pub instances: Vec<crate::InstanceMatch>,
    /// Every rank, by instance and rank.
    pub ranks: Vec<RankMatch>,
    /// Blocks that a store has.
    pub store: u32,
    pub(super) owners: Vec<OwnerMatch>,
    /// Per owner its blocks.
    pub(super) blocks: Vec<u32>,
    /// Ranks that have any.
    pub(super) touched: Vec<u32>,
}

/// What an owner has, for the comparison of two Conductors, which may number owners differently.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct OwnerDigest {
    /// The table.
    pub context: ContextId,
    /// The engine or store.
    pub instance: InstanceId,
    /// Its rank.
    pub dp_rank: u32,
    /// The tier.
    pub tier: Tier,
    /// The attention group.
    pub group: u32,
    /// Blocks.
    pub blocks: u64,
    /// The wrapping sum of a mix of their keys.
    pub sum: u64,
}

impl OwnerDigest {
    pub(super) const fn with(mut self, digest: Digest) -> Self {
        self.blocks = digest.blocks;
        self.sum = digest.sum;
        self
    }
}

/// Counts of a publisher, in blocks unless said otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Messages.
    pub messages: u64,
    /// Events in them.
    pub events: u64,
    /// Blocks that were stored and not known before.
    pub stored: u64,
    /// Blocks that were removed.
    pub removed: u64,
    /// Blocks in removals that the publisher did not have.
    pub removed_unknown: u64,
    /// Clears, in events.
    pub cleared: u64,
    /// Blocks that were not stored since the block before them, or without tokens they themselves, are
    /// unknown.
    pub orphans: u64,
    /// Blocks that were not stored since a limit of the index or of the learnt hashes was reached.
    pub refused: u64,
    /// Events that were not used since their blocks have another size.
    pub other_block_tokens: u64,
    /// Events that were not used since they are of a rank, a group, a tenant or a model beyond what is
    /// registered.
    pub foreign: u64,
    /// Events that were skipped, by reason.
    pub skipped: Skipped,
    /// Messages that are no batch of events, and those in which removals may have been lost.
    pub unreadable: u64,
    /// Times that everything was forgotten, in the order of [`FenceReason::ALL`].
    pub fences: [u64; FenceReason::ALL.len()],
}
