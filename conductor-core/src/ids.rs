//! The names of what the Conductor knows: blocks, engines, tiers, contexts.

use alloc::string::String;
use core::fmt;

/// The key of a full block of tokens: a hash of the tokens of this block and of every block before it, by the
/// Conductor's own chain ([`crate::hash`]). Two prompts have the same key at the same block exactly when they
/// have the same tokens up to its end (but for collisions of 64 bits).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct BlockKey(pub u64);

/// The hash that an engine published for a block, as 64 bits. Only that engine knows how it is computed;
/// events that carry the block's tokens say to which [`BlockKey`] it belongs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct EngineHash(pub u64);

/// An engine: a process or group of processes that serves requests under one address. Never reused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct InstanceId(pub u32);

/// Where blocks are kept: one tier of one data-parallel rank of one instance. Dense, and reused only after
/// every entry of the former owner was swept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct OwnerId(pub u32);

/// A table of blocks of one [`Context`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct ContextId(pub u32);

/// The kind of memory that holds a block, the fastest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// Memory of the accelerator.
    Gpu,
    /// Memory of the host.
    Cpu,
    /// A disk of the host.
    Disk,
    /// A store that every instance of the cluster can read.
    Store,
}

impl Tier {
    /// Every tier, the fastest first.
    pub const ALL: [Self; 4] = [Self::Gpu, Self::Cpu, Self::Disk, Self::Store];

    /// The tier's name in answers and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gpu => "gpu",
            Self::Cpu => "cpu",
            Self::Disk => "disk",
            Self::Store => "store",
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What has to be equal for blocks to be comparable at all. LoRA adapters, salts and the content of images
/// are not part of it: they are folded into the first keys of a chain ([`crate::hash`]).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Context {
    /// The tenant. Tenants never see each other's blocks.
    pub tenant: String,
    /// The model, as the engines name it.
    pub model: String,
    /// Tokens per block; not zero.
    pub block_tokens: u32,
}

/// An owner, spelled out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner {
    /// The engine.
    pub instance: InstanceId,
    /// The data-parallel rank within the engine.
    pub dp_rank: u32,
    /// The tier.
    pub tier: Tier,
}

/// How many blocks of a prompt, from its beginning and without a gap, an owner has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OwnerMatch {
    /// The owner.
    pub owner: OwnerId,
    /// Blocks; not zero.
    pub blocks: u32,
}

/// How much of a prompt an instance has, in blocks from the prompt's beginning, over all its ranks and tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InstanceMatch {
    /// The engine.
    pub instance: InstanceId,
    /// The data-parallel rank that has most in its GPU's memory.
    pub dp_rank: u32,
    /// Blocks that `dp_rank` has in its GPU's memory.
    pub gpu: u32,
    /// Blocks that are in the memory of GPU or host; at least `gpu`.
    pub cpu: u32,
    /// Blocks that are on any tier of the instance; at least `cpu`.
    pub disk: u32,
}
