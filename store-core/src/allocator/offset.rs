//! The offset allocator: adjacent blocks of any length.
//!
//! Two-level segregated fit (M. Masmano et al., "TLSF: a new dynamic memory allocator for real-time systems",
//! ECRTS 2004): free blocks are listed in bins by size, 32 bins per power of two, and two levels of bitmaps
//! find a bin that fits in a few instructions. Both operations are O(1), and a freed block is merged with its
//! free neighbours at once.
//!
//! ```text
//!   first level     ▏0 ▏1 ▏2 ▏3 ▏ …          one bit per power of two
//!   second level          ▏0…31▏             one bit per bin: sizes within 1/32 of each other
//!   bins                   └─▶ block ⇄ block ⇄ block
//!   memory          │used│ free │used│used│  free   │     every block knows its neighbours
//! ```
//!
//! A request is served from the bin of its own size when a block there is long enough, else from the next bin
//! that has one, so the chosen block is at most two bins longer than the shortest one that fits: 1/16 of its
//! size, which is not lost but split off.

use alloc::boxed::Box;

use super::{Allocator, Block, GRAIN_BYTES};
use crate::slab::{NIL, Slab};
use serde::{Deserialize, Serialize};

const SECOND_BITS: u32 = 5;
const SECONDS: usize = 1 << SECOND_BITS;
const FIRSTS: usize = 64 - SECOND_BITS as usize + 1;
/// Blocks of a request's own bin that are examined before a higher bin is used.
const OWN_BIN_TRIES: usize = 4;
/// Blocks that are examined before the request is refused.
const LAST_BIN_TRIES: usize = 64;

/// The allocated and the free parts of `len` bytes.
#[derive(Debug, Serialize, Deserialize)]
pub struct OffsetAllocator {
    nodes: Slab<Node>,
    grain_bits: u32,
    grains: u64,
    grains_free: u64,
    blocks_used: u32,
    first: u64,
    #[serde(with = "crate::snapshot::array")]
    second: [u32; FIRSTS],
    #[serde(with = "crate::snapshot::array")]
    heads: Box<[[u32; SECONDS]; FIRSTS]>,
}

/// A block, allocated or free; 32 bytes. Sizes and offsets are in grains.
#[derive(Clone, Copy, Debug)]
struct Node {
    offset: u64,
    size: u64,
    /// The neighbours below and above in memory.
    below: u32,
    above: u32,
    /// Free: the previous block in its bin, or `NIL`. Allocated: `USED`. Not a block: `VACANT`.
    a: u32,
    /// Free: the next block in its bin. Allocated: the tag.
    b: u32,
}

crate::snapshot::packed!(Node, NO_BLOCK, offset: u64, size: u64, below: u32, above: u32, a: u32, b: u32);

const _: () = assert!(size_of::<Node>() == 32);

const USED: u32 = NIL - 1;
const VACANT: u32 = NIL - 2;
const NO_BLOCK: Node = Node { offset: 0, size: 0, below: NIL, above: NIL, a: VACANT, b: NIL };

impl OffsetAllocator {
    /// All of `len` bytes free, in grains of [`GRAIN_BYTES`]. A last part that is shorter than a grain is
    /// never used.
    #[must_use]
    pub fn new(len: u64) -> Self {
        Self::with_grain(len, GRAIN_BYTES)
    }

    /// All of `len` bytes free, in grains of `grain_bytes`, rounded up to a power of two.
    #[must_use]
    pub fn with_grain(len: u64, grain_bytes: u64) -> Self {
        let grain_bits = grain_bytes.max(1).checked_next_power_of_two().unwrap_or(1 << 63).trailing_zeros();
        let grains = len >> grain_bits;
        let mut allocator = Self {
            nodes: Slab::new(NO_BLOCK),
            grain_bits,
            grains,
            grains_free: grains,
            blocks_used: 0,
            first: 0,
            second: [0; FIRSTS],
            heads: Box::new([[NIL; SECONDS]; FIRSTS]),
        };
        if grains > 0 {
            let all = allocator.nodes.insert(Node {
                offset: 0,
                size: grains,
                below: NIL,
                above: NIL,
                a: NIL,
                b: NIL,
            });
            allocator.link(all);
        }
        allocator
    }

    const fn to_grains(&self, len: u64) -> Option<u64> {
        if len == 0 { None } else { Some(len.div_ceil(1 << self.grain_bits)) }
    }

    fn used(&self, block: Block) -> Option<&Node> {
        Some(&self.nodes[block.0]).filter(|node| node.a == USED)
    }

    /// Offset and length of an allocated block, bytes.
    pub(super) fn extent(&self, block: Block) -> Option<(u64, u64)> {
        self.used(block).map(|node| (node.offset << self.grain_bits, node.size << self.grain_bits))
    }

    /// The neighbour below a block in memory, its length in bytes, and whether it is free.
    pub(super) fn below(&self, block: Block) -> Option<(Block, u64, bool)> {
        self.neighbour(self.nodes[block.0].below)
    }

    /// The neighbour above a block in memory, its length in bytes, and whether it is free.
    pub(super) fn above(&self, block: Block) -> Option<(Block, u64, bool)> {
        self.neighbour(self.nodes[block.0].above)
    }

    fn neighbour(&self, index: u32) -> Option<(Block, u64, bool)> {
        (index != NIL).then(|| (Block(index), self.nodes[index].size << self.grain_bits, self.is_free(index)))
    }

    fn is_free(&self, index: u32) -> bool {
        !matches!(self.nodes[index].a, USED | VACANT)
    }

    /// A free block of at least `size` grains.
    fn find(&self, size: u64) -> Option<u32> {
        let own = bin_of(size);
        let fits = |tries: usize| self.bin(own).take(tries).find(|&index| self.nodes[index].size >= size);
        if let Some(index) = fits(OWN_BIN_TRIES) {
            return Some(index);
        }
        // Every block of a higher bin is long enough.
        let (mut first, second) = own;
        let mut seconds = self.second[first] & (u32::MAX << second).wrapping_sub(1 << second);
        if seconds == 0 {
            let firsts = self.first & (u64::MAX << first).wrapping_sub(1 << first);
            if firsts == 0 {
                return fits(LAST_BIN_TRIES);
            }
            first = firsts.trailing_zeros() as usize;
            seconds = self.second[first];
        }
        Some(self.heads[first][seconds.trailing_zeros() as usize])
    }

    fn bin(&self, (first, second): (usize, usize)) -> impl Iterator<Item = u32> {
        let mut next = self.heads[first][second];
        core::iter::from_fn(move || {
            let index = (next != NIL).then_some(next)?;
            next = self.nodes[index].b;
            Some(index)
        })
    }

    fn link(&mut self, index: u32) {
        let (first, second) = bin_of(self.nodes[index].size);
        let head = core::mem::replace(&mut self.heads[first][second], index);
        let node = &mut self.nodes[index];
        (node.a, node.b) = (NIL, head);
        if head != NIL {
            self.nodes[head].a = index;
        }
        self.first |= 1 << first;
        self.second[first] |= 1 << second;
    }

    fn unlink(&mut self, index: u32) {
        let Node { size, a: before, b: after, .. } = self.nodes[index];
        if after != NIL {
            self.nodes[after].a = before;
        }
        if before != NIL {
            self.nodes[before].b = after;
            return;
        }
        let (first, second) = bin_of(size);
        self.heads[first][second] = after;
        if after == NIL {
            self.second[first] &= !(1 << second);
            if self.second[first] == 0 {
                self.first &= !(1 << first);
            }
        }
    }

    /// Merges the block `upper` into its neighbour `lower`.
    fn absorb(&mut self, lower: u32, upper: u32) {
        let Node { size, above, .. } = self.nodes[upper];
        self.nodes[lower].size += size;
        self.nodes[lower].above = above;
        if above != NIL {
            self.nodes[above].below = lower;
        }
        self.nodes.remove(upper);
    }
}

impl Allocator for OffsetAllocator {
    fn allocate(&mut self, len: u64, tag: u32) -> Option<(Block, u64)> {
        let size = self.to_grains(len)?;
        let index = self.find(size)?;
        self.unlink(index);
        let node = self.nodes[index];
        if node.size > size {
            let rest = self.nodes.insert(Node {
                offset: node.offset + size,
                size: node.size - size,
                below: index,
                above: node.above,
                a: NIL,
                b: NIL,
            });
            if node.above != NIL {
                self.nodes[node.above].below = rest;
            }
            self.nodes[index].above = rest;
            self.link(rest);
        }
        let node = &mut self.nodes[index];
        (node.size, node.a, node.b) = (size, USED, tag);
        self.grains_free -= size;
        self.blocks_used += 1;
        Some((Block(index), node.offset << self.grain_bits))
    }

    fn free(&mut self, block: Block) -> Option<u64> {
        let mut index = block.0;
        let size = self.used(block)?.size;
        self.grains_free += size;
        self.blocks_used -= 1;
        let Node { below, above, .. } = self.nodes[index];
        if above != NIL && self.is_free(above) {
            self.unlink(above);
            self.absorb(index, above);
        }
        if below != NIL && self.is_free(below) {
            self.unlink(below);
            self.absorb(below, index);
            index = below;
        }
        self.link(index);
        Some(size << self.grain_bits)
    }

    fn tag(&self, block: Block) -> Option<u32> {
        self.used(block).map(|node| node.b)
    }

    fn set_tag(&mut self, block: Block, tag: u32) {
        if self.used(block).is_some() {
            self.nodes[block.0].b = tag;
        }
    }

    fn blocks(&self) -> impl Iterator<Item = (Block, u64, u64, u32)> {
        // Merging keeps the lower node, so the block at offset 0 is always node 0.
        let mut next = if self.nodes.end() == 0 { NIL } else { 0 };
        core::iter::from_fn(move || {
            while next != NIL {
                let index = next;
                let node = &self.nodes[index];
                next = node.above;
                if node.a == USED {
                    let bytes = |grains| grains << self.grain_bits;
                    return Some((Block(index), bytes(node.offset), bytes(node.size), node.b));
                }
            }
            None
        })
    }

    fn capacity_bytes(&self) -> u64 {
        self.grains << self.grain_bits
    }

    fn used_bytes(&self) -> u64 {
        (self.grains - self.grains_free) << self.grain_bits
    }

    fn blocks_used(&self) -> u32 {
        self.blocks_used
    }

    fn rounded(&self, len: u64) -> u64 {
        len.div_ceil(1 << self.grain_bits) << self.grain_bits
    }

    fn largest_free(&self) -> u64 {
        if self.first == 0 {
            return 0;
        }
        let first = 63 - self.first.leading_zeros() as usize;
        let second = 31 - self.second[first].leading_zeros() as usize;
        self.bin((first, second)).take(LAST_BIN_TRIES).map(|index| self.nodes[index].size).max().unwrap_or(0)
            << self.grain_bits
    }

    fn refused_above(&self, refused: u64) -> u64 {
        // A larger request would examine no other non-empty bin.
        refused.saturating_sub(1)
    }

    fn memory_bytes(&self) -> usize {
        self.nodes.memory_bytes() + size_of::<[[u32; SECONDS]; FIRSTS]>() + size_of::<Self>()
    }
}

/// The bin of blocks of `size` grains: one per size below 32, then 32 per power of two.
const fn bin_of(size: u64) -> (usize, usize) {
    if size < SECONDS as u64 {
        return (0, size as usize);
    }
    let exponent = 63 - size.leading_zeros();
    let second = (size >> (exponent - SECOND_BITS)) as usize % SECONDS;
    ((exponent - SECOND_BITS + 1) as usize, second)
}

#[cfg(test)]
mod tests {
    use alloc::collections::BTreeMap;
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn blocks_of_one_size_fill_everything_and_are_reused() {
        for len in [4096, 5000, 70_001] {
            let mut allocator = OffsetAllocator::new(64 * 1024 * 1024);
            let mut blocks: Vec<Block> =
                core::iter::from_fn(|| Some(allocator.allocate(len, 0)?.0)).collect();
            assert!(allocator.free_bytes() < allocator.rounded(len));
            for turn in 0..blocks.len() {
                let at = turn * 7919 % blocks.len();
                allocator.free(blocks[at]).unwrap();
                blocks[at] = allocator.allocate(len, 0).expect("the hole just made fits").0;
            }
        }
    }

    #[test]
    fn huge_and_tiny_segments_work() {
        let mut huge = OffsetAllocator::new(u64::MAX);
        let (block, offset) = huge.allocate(1 << 50, 7).unwrap();
        assert_eq!((offset, huge.free(block)), (0, Some(1 << 50)));
        assert_eq!(huge.allocate(0, 0), None);
        let mut tiny = OffsetAllocator::new(63);
        assert_eq!((tiny.capacity_bytes(), tiny.allocate(1, 0)), (0, None));
    }

    #[test]
    fn a_request_is_never_served_from_a_block_much_longer_than_needed() {
        // Holes of every size between allocated blocks: the chosen hole is at most 1/16 longer than the best
        // fit, plus a grain.
        let mut allocator = OffsetAllocator::with_grain(1 << 30, 1);
        let mut holes = BTreeMap::new();
        let mut frees = Vec::new();
        for len in (64..40_000u64).step_by(97) {
            let (block, offset) = allocator.allocate(len, 0).unwrap();
            allocator.allocate(1, 0).unwrap();
            holes.insert(len, offset);
            frees.push(block);
        }
        frees.into_iter().for_each(|block| assert!(allocator.free(block).is_some()));
        for want in (64..30_000u64).step_by(1013) {
            let (best, _) = holes.range(want..).next().unwrap();
            let best = *best;
            let (_, offset) = allocator.allocate(want, 0).unwrap();
            let (&taken, _) = holes.iter().find(|(_, start)| **start == offset).unwrap();
            assert!(taken <= best + best / 16 + 1, "{want} from {taken}, {best} would do");
            holes.remove(&taken);
        }
    }
}
