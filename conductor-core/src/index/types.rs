//! Limits, counters and answers of an index.

use core::fmt;

use crate::{BlockKey, OwnerId};

/// Segments of a table.
pub(crate) const BUCKETS: usize = 256;

/// What an index may grow to. Beyond a limit it forgets or refuses blocks, which makes matches shorter and
/// never longer, and counts that in [`Counters`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexLimits {
    /// Unique blocks. At the limit the index drops ends of chains, the least recently stored first and among
    /// those the deepest first; when it finds none in a bounded search, it refuses the new block. So no owner
    /// becomes holey by it.
    pub blocks_max: usize,
    /// Owners that hold blocks at the same time; one that was cleared and not yet swept counts too.
    pub owners_max: u32,
    /// Blocks of a chain; at most [`IndexLimits::DEPTH_MAX`].
    pub depth_max: u32,
    /// Bytes of the interned holder sets. Beyond it, blocks are not recorded for further owners.
    pub holders_bytes_max: usize,
    /// Pairs of owner and block that are assumed at the same time.
    pub assumed_max: usize,
    /// Bytes of a snapshot that [`restore`](super::Index::restore) accepts.
    pub snapshot_bytes_max: usize,
}

impl IndexLimits {
    /// The largest depth that an entry can express, in blocks.
    pub const DEPTH_MAX: u32 = (1 << 23) - 1;
}

impl Default for IndexLimits {
    fn default() -> Self {
        Self {
            blocks_max: 32 << 20,
            owners_max: 16_384,
            depth_max: 1 << 20,
            holders_bytes_max: 256 << 20,
            assumed_max: 4 << 20,
            snapshot_bytes_max: 2 << 30,
        }
    }
}

/// What became of the blocks of one call of [`stored`](super::Index::stored). The sum is the number of keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// Blocks that the owner did not have before.
    pub added: usize,
    /// Blocks that the owner had already.
    pub known: usize,
    /// Blocks that were not recorded, because no owner has their parent, because a limit was reached, or
    /// because the same key is known at another depth. [`Counters`] tells the reasons apart.
    pub refused: usize,
}

/// Counts since the index was made or restored, in blocks unless said otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Pairs of owner and block that were added.
    pub added: u64,
    /// Pairs that were removed by an event.
    pub removed: u64,
    /// Blocks in removals that the owner did not have.
    pub removed_unknown: u64,
    /// Clears of an owner that had blocks, in owners.
    pub cleared: u64,
    /// Blocks refused since no owner has their parent.
    pub orphans: u64,
    /// Blocks refused since their key is known at another depth.
    pub conflicts: u64,
    /// Blocks refused since they are deeper than `depth_max`.
    pub too_deep: u64,
    /// Blocks refused since `blocks_max` was reached and nothing could be dropped.
    pub refused_full: u64,
    /// Blocks refused since `owners_max` was reached.
    pub refused_owners: u64,
    /// Blocks refused since `holders_bytes_max` was reached.
    pub refused_holders: u64,
    /// Unique blocks that were dropped to stay within `blocks_max`.
    pub dropped: u64,
    /// Times that an owner became holey, in owners.
    pub holey: u64,
    /// Pairs that were assumed.
    pub assumed: u64,
    /// Assumed pairs that an event confirmed.
    pub assumed_confirmed: u64,
    /// Assumed pairs whose deadline passed.
    pub assumed_expired: u64,
    /// Pairs that were not assumed since `assumed_max` was reached.
    pub assumed_refused: u64,
}

/// What an owner has, as a number that does not depend on the order of events: equal for two indexes that
/// hold the same blocks for it, and different otherwise but with a probability of about 2^-64. It says
/// nothing about the owner's id, so that two Conductors can compare owners which they number differently.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digest {
    /// Blocks.
    pub blocks: u64,
    /// The wrapping sum of a mix of their keys.
    pub sum: u64,
}

/// A block of an owner, as one index gives it to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HeldBlock {
    /// Blocks before it in its chain.
    pub depth: u32,
    /// The block.
    pub key: BlockKey,
    /// The block before it; none for the first of a chain.
    pub parent: Option<BlockKey>,
}

/// Why bytes are not a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SnapshotError {
    /// They end before the part that is named.
    Truncated(&'static str),
    /// They do not begin with the mark of a snapshot.
    NotASnapshot,
    /// The format has another version.
    Version {
        /// The version in the bytes.
        found: u32,
        /// The version that this build reads.
        reads: u32,
    },
    /// The checksum differs.
    Checksum,
    /// A number is larger than the limits allow.
    TooLarge {
        /// What is counted.
        what: &'static str,
        /// The number in the bytes.
        found: u64,
        /// The limit.
        max: u64,
    },
    /// Parts contradict each other.
    Invalid(&'static str),
}

impl fmt::Display for SnapshotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated(part) => write!(f, "the snapshot ends within its {part}; take another snapshot"),
            Self::NotASnapshot => f.write_str("the bytes are not a snapshot of an index"),
            Self::Version { found, reads } => {
                write!(
                    f,
                    "the snapshot has format {found} and this build reads format {reads}; replay events instead"
                )
            }
            Self::Checksum => {
                f.write_str("the snapshot is damaged: its checksum differs; take another snapshot")
            }
            Self::TooLarge { what, found, max } => {
                write!(f, "the snapshot has {found} {what} and the limit is {max}; raise the limit")
            }
            Self::Invalid(what) => write!(f, "the snapshot contradicts itself: {what}"),
        }
    }
}

impl core::error::Error for SnapshotError {}

/// An owner and what it has, for listings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnerState {
    /// The owner.
    pub owner: OwnerId,
    /// Its blocks.
    pub digest: Digest,
    /// It may have a block without the block before it, and is searched block by block.
    pub holey: bool,
}
