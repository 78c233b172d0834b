//! Allocators: which bytes of a segment are allocated. They never access the memory itself.
//!
//! One trait and two allocators, chosen by [`AllocatorKind`]:
//!
//! | | [`OffsetAllocator`] | [`SlabAllocator`] |
//! |---|---|---|
//! | good at | objects of any length, side by side | very many objects of a few lengths |
//! | bytes lost to rounding | less than 64 per object | at most 1/32 of an object, and less than 64 |
//! | bytes lost otherwise | holes between objects of different lengths | free slots in slabs of lengths that are not in demand |
//! | the master's memory, per object | 32 bytes | 12 bytes |
//!
//! Both allocate and free in a time that does not depend on how much is allocated, and both return
//! [`Block`]s, which carry a tag of the caller: when a segment goes away, its blocks name the objects that
//! lose a replica.

pub(crate) mod clearing;
mod offset;
mod slab;

use core::fmt::{self, Debug};
use core::str::FromStr;

use serde::{Deserialize, Serialize};

pub use offset::OffsetAllocator;
pub use slab::SlabAllocator;

/// Bytes to which every allocation is rounded up and aligned, unless chosen otherwise: a cache line.
pub const GRAIN_BYTES: u64 = 64;

/// The allocated and the free parts of a range of bytes that begins at offset 0.
///
/// # For callers
/// A block is valid until it is freed; after that its index may be given to another block.
///
/// # For implementers
/// `free` must merge the freed range with its neighbours, so that a range whose blocks are all freed is one
/// free range again.
pub trait Allocator: Debug {
    /// Allocates `len` bytes; returns the block and its offset, a multiple of the grain. `tag` is the
    /// caller's, see [`Self::tag`]. `None`: there is no room, or `len` is 0.
    fn allocate(&mut self, len: u64, tag: u32) -> Option<(Block, u64)>;

    /// Frees a block; returns its length, bytes. `None`: it is not allocated.
    fn free(&mut self, block: Block) -> Option<u64>;

    /// The caller's tag of an allocated block.
    fn tag(&self, block: Block) -> Option<u32>;

    /// Changes the tag of an allocated block. Does nothing if the block is not allocated.
    fn set_tag(&mut self, block: Block, tag: u32);

    /// Every allocated block with its offset, its length and its tag, in an order that depends only on the
    /// history of calls.
    fn blocks(&self) -> impl Iterator<Item = (Block, u64, u64, u32)>;

    /// Length of the whole range, bytes.
    fn capacity_bytes(&self) -> u64;

    /// Bytes that are allocated, rounding included.
    fn used_bytes(&self) -> u64;

    /// Bytes that are free. They may be scattered: see [`Self::largest_free`].
    fn free_bytes(&self) -> u64 {
        self.capacity_bytes() - self.used_bytes()
    }

    /// Number of allocated blocks.
    fn blocks_used(&self) -> u32;

    /// Bytes that an allocation of `len` bytes takes.
    fn rounded(&self, len: u64) -> u64;

    /// Bytes that can be allocated in one block. Not more than 1/32 and one grain more can be. 0 when nothing
    /// is free.
    fn largest_free(&self) -> u64;

    /// A bound to assume after `allocate(refused)` found no room: until something is freed, requests for more
    /// bytes are refused as well.
    fn refused_above(&self, refused: u64) -> u64;

    /// Memory of the allocator itself, bytes.
    fn memory_bytes(&self) -> usize;
}

/// An allocated block. Opaque; valid until it is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Block(u32);

impl Block {
    /// The block with this index, for callers that store blocks as bare numbers.
    #[must_use]
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// The block's index.
    #[must_use]
    pub const fn index(self) -> u32 {
        self.0
    }
}

impl From<Block> for u32 {
    fn from(block: Block) -> Self {
        block.0
    }
}

impl From<u32> for Block {
    fn from(index: u32) -> Self {
        Self(index)
    }
}

/// The allocator that a master uses for its segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum AllocatorKind {
    /// [`OffsetAllocator`]. The default.
    #[default]
    Offset,
    /// [`SlabAllocator`].
    Slab,
}

impl AllocatorKind {
    /// All allocators of this release.
    pub const ALL: &'static [Self] = &[Self::Offset, Self::Slab];

    /// The name in configurations and on command lines.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Offset => "offset",
            Self::Slab => "slab",
        }
    }

    /// An allocator of this kind, with all of `len` bytes free.
    #[must_use]
    pub fn build(self, len: u64) -> AnyAllocator {
        match self {
            Self::Offset => AnyAllocator::Offset(OffsetAllocator::new(len)),
            Self::Slab => AnyAllocator::Slab(SlabAllocator::new(len)),
        }
    }

    /// As [`build`](Self::build), for a segment whose allocations are multiples of a granule, at multiples of
    /// it. With a granule above [`GRAIN_BYTES`] it is an [`OffsetAllocator`] of either kind: the lengths of
    /// slots are no multiples of it.
    #[must_use]
    pub fn build_for(self, len: u64, granule_bytes: u64) -> AnyAllocator {
        match granule_bytes {
            ..=GRAIN_BYTES => self.build(len),
            _ => AnyAllocator::Offset(OffsetAllocator::with_grain(len, granule_bytes)),
        }
    }
}

impl fmt::Display for AllocatorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for AllocatorKind {
    type Err = UnknownAllocator;

    fn from_str(text: &str) -> Result<Self, UnknownAllocator> {
        Self::ALL.iter().find(|kind| kind.name() == text).copied().ok_or(UnknownAllocator)
    }
}

/// No allocator has the given name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownAllocator;

impl fmt::Display for UnknownAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("unknown allocator: choose one of")?;
        AllocatorKind::ALL.iter().try_for_each(|kind| write!(f, " {kind}"))
    }
}

impl core::error::Error for UnknownAllocator {}

/// The allocator chosen when the program starts: a predictable branch instead of a call through a table.
#[derive(Debug, Serialize, Deserialize)]
#[non_exhaustive]
#[expect(
    clippy::large_enum_variant,
    reason = "there is one per segment, and no pointer to follow with every put"
)]
pub enum AnyAllocator {
    /// See [`AllocatorKind::Offset`].
    Offset(OffsetAllocator),
    /// See [`AllocatorKind::Slab`].
    Slab(SlabAllocator),
}

macro_rules! dispatch {
    ($self:ident, $it:ident => $call:expr) => {
        match $self {
            AnyAllocator::Offset($it) => $call,
            AnyAllocator::Slab($it) => $call,
        }
    };
}

impl Allocator for AnyAllocator {
    fn allocate(&mut self, len: u64, tag: u32) -> Option<(Block, u64)> {
        dispatch!(self, it => it.allocate(len, tag))
    }

    fn free(&mut self, block: Block) -> Option<u64> {
        dispatch!(self, it => it.free(block))
    }

    fn tag(&self, block: Block) -> Option<u32> {
        dispatch!(self, it => it.tag(block))
    }

    fn set_tag(&mut self, block: Block, tag: u32) {
        dispatch!(self, it => it.set_tag(block, tag));
    }

    fn blocks(&self) -> impl Iterator<Item = (Block, u64, u64, u32)> {
        let (offset, slab) = match self {
            Self::Offset(it) => (Some(it.blocks()), None),
            Self::Slab(it) => (None, Some(it.blocks())),
        };
        offset.into_iter().flatten().chain(slab.into_iter().flatten())
    }

    fn capacity_bytes(&self) -> u64 {
        dispatch!(self, it => it.capacity_bytes())
    }

    fn used_bytes(&self) -> u64 {
        dispatch!(self, it => it.used_bytes())
    }

    fn blocks_used(&self) -> u32 {
        dispatch!(self, it => it.blocks_used())
    }

    fn rounded(&self, len: u64) -> u64 {
        dispatch!(self, it => it.rounded(len))
    }

    fn largest_free(&self) -> u64 {
        dispatch!(self, it => it.largest_free())
    }

    fn refused_above(&self, refused: u64) -> u64 {
        dispatch!(self, it => it.refused_above(refused))
    }

    fn memory_bytes(&self) -> usize {
        dispatch!(self, it => it.memory_bytes())
    }
}
