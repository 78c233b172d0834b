//! What would have to be freed for a block to fit, determined before anything is freed.
//!
//! Blocks that could be freed are added one by one, in the order in which they should be; as soon as some of
//! them, with the free space between them, make a range that is long enough, those are returned. Nothing is
//! changed.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::slab::Room;
use super::{AnyAllocator, Block, OffsetAllocator};

/// Blocks of one allocator that could be freed.
#[derive(Debug, Default)]
pub(crate) struct Clearing {
    /// Ranges of the offset allocator that could be freed, by their block, and the caller's blocks in them.
    ranges: BTreeMap<u32, Vec<Block>>,
    /// The same ranges, joined where they touch, with the free space at their edges: first byte, and the one
    /// after the last.
    runs: BTreeMap<u64, u64>,
    /// Of slabs that cannot be freed yet, the blocks that could be.
    slabs: BTreeMap<u32, Vec<Block>>,
}

/// Whether freeing this block alone makes room for `len` bytes.
pub(crate) fn makes_room_alone(allocator: &AnyAllocator, block: Block, len: u64) -> bool {
    let fits = |space: &OffsetAllocator, block, len| {
        run_of(space, block).is_some_and(|(start, end)| end - start >= len)
    };
    match allocator {
        AnyAllocator::Offset(space) => fits(space, block, len),
        AnyAllocator::Slab(slabs) => match slabs.room_in(block, len) {
            None => false,
            Some(Room::Itself) => true,
            Some(Room::Alone { space, len }) => fits(slabs.space(), space, len),
            Some(Room::Shared { used, space, len, .. }) => used == 1 && fits(slabs.space(), space, len),
        },
    }
}

/// The range that is free when this block is: the block, and the free space below and above it.
fn run_of(space: &OffsetAllocator, block: Block) -> Option<(u64, u64)> {
    let (offset, size) = space.extent(block)?;
    let free = |neighbour: Option<(Block, u64, bool)>| {
        neighbour.map_or(0, |(_, size, free)| if free { size } else { 0 })
    };
    Some((offset - free(space.below(block)), offset + size + free(space.above(block))))
}

impl Clearing {
    /// Adds a block that could be freed. Returns blocks among those added that make room for `len` bytes when
    /// they are freed; `None` when all of them together do not. There must be no room for `len` before.
    pub(crate) fn add(&mut self, allocator: &AnyAllocator, block: Block, len: u64) -> Option<Vec<Block>> {
        match allocator {
            AnyAllocator::Offset(it) => self.range(it, block, Vec::from([block]), len),
            AnyAllocator::Slab(it) => match it.room_in(block, len)? {
                Room::Itself => Some(Vec::from([block])),
                Room::Alone { space, len } => self.range(it.space(), space, Vec::from([block]), len),
                Room::Shared { slab, used, space, len } => {
                    let gone = self.slabs.entry(slab).or_default();
                    if !gone.contains(&block) {
                        gone.push(block);
                    }
                    if gone.len() < used as usize {
                        return None;
                    }
                    let gone = self.slabs.remove(&slab)?;
                    self.range(it.space(), space, gone, len)
                }
            },
        }
    }

    /// Adds a range of the offset allocator that is free once `blocks` are, and checks whether it closes a
    /// gap.
    fn range(
        &mut self,
        space: &OffsetAllocator,
        block: Block,
        blocks: Vec<Block>,
        len: u64,
    ) -> Option<Vec<Block>> {
        let (mut start, mut end) = run_of(space, block)?;
        self.ranges.insert(block.index(), blocks);
        // Free space between two ranges belongs to the runs of both, so runs that meet here touch or overlap.
        if let Some((&below, &to)) = self.runs.range(..start).next_back()
            && to >= start
        {
            self.runs.remove(&below);
            (start, end) = (below, end.max(to));
        }
        if let Some((&above, &to)) = self.runs.range(start..=end).next_back() {
            self.runs.remove(&above);
            end = end.max(to);
        }
        self.runs.insert(start, end);
        if end - start < len { None } else { self.window(space, block, len) }
    }

    /// The blocks of a long enough range around `block`, as few as a walk to both sides finds.
    fn window(&self, space: &OffsetAllocator, block: Block, len: u64) -> Option<Vec<Block>> {
        let mut bytes = space.extent(block)?.1;
        let mut chosen = Vec::from([block.index()]);
        let (mut below, mut above) = (block, block);
        // Free space first, which costs nothing; then blocks that could be freed, one at a time.
        let (mut down, mut up) = (true, true);
        while bytes < len && (down || up) {
            for (edge, open, step) in [
                (&mut below, &mut down, OffsetAllocator::below as fn(&OffsetAllocator, Block) -> _),
                (&mut above, &mut up, OffsetAllocator::above),
            ] {
                if bytes >= len || !*open {
                    continue;
                }
                match step(space, *edge) {
                    Some((next, size, free)) if free || self.ranges.contains_key(&next.index()) => {
                        bytes += size;
                        *edge = next;
                        if !free {
                            chosen.push(next.index());
                        }
                    }
                    _ => *open = false,
                }
            }
        }
        if bytes < len {
            return None;
        }
        Some(chosen.iter().filter_map(|at| self.ranges.get(at)).flatten().copied().collect())
    }
}

#[cfg(test)]
mod tests {
    use te_core::testkit::{Rng, each_seed, seeds};

    use super::*;
    use crate::allocator::{Allocator as _, AllocatorKind, GRAIN_BYTES};

    const SEGMENT_BYTES: u64 = 4 << 20;

    /// A segment full of blocks of four lengths, with holes; and the blocks in random order.
    fn crowded(kind: AllocatorKind, rng: &mut Rng) -> (AnyAllocator, Vec<(Block, u64, u64)>) {
        let mut allocator = kind.build(SEGMENT_BYTES);
        let mut blocks = Vec::new();
        for len in [256 << 10, 64 << 10, 16 << 10, 4 << 10] {
            while rng.range(0..24) > 0
                && let Some((block, offset)) = allocator.allocate(len, 0)
            {
                blocks.push((block, offset, len));
            }
        }
        while let Some((block, offset)) = allocator.allocate(4 << 10, 0) {
            blocks.push((block, offset, 4 << 10));
        }
        for at in (1..blocks.len()).rev() {
            blocks.swap(at, rng.range(0..at as u64 + 1) as usize);
        }
        let kept = blocks.len() - blocks.len() / 16;
        for (block, ..) in blocks.drain(kept..) {
            allocator.free(block).unwrap();
        }
        (allocator, blocks)
    }

    /// The longest range that is free once these blocks are, bytes.
    fn longest(used: &[(Block, u64, u64)], going: usize) -> u64 {
        let mut taken = [false; (SEGMENT_BYTES / GRAIN_BYTES) as usize];
        for (_, offset, len) in &used[going..] {
            taken[(offset / GRAIN_BYTES) as usize..((offset + len) / GRAIN_BYTES) as usize].fill(true);
        }
        let longest = taken.split(|taken| *taken).map(<[bool]>::len).max();
        longest.unwrap_or(0) as u64 * GRAIN_BYTES
    }

    #[test]
    fn blocks_that_make_room_are_found_as_soon_as_there_are_any() {
        const SEEDS: core::ops::Range<u64> = 0..200;
        let mut found_any = 0;
        for seed in each_seed(SEEDS) {
            let mut rng = Rng::new(seed);
            let (mut allocator, blocks) = crowded(AllocatorKind::Offset, &mut rng);
            let len = (32 << 10) << rng.range(0..5);
            if allocator.largest_free() >= len {
                continue;
            }
            let mut clearing = Clearing::default();
            for (at, (block, ..)) in blocks.iter().enumerate() {
                let found = clearing.add(&allocator, *block, len);
                assert_eq!(found.is_some(), longest(&blocks, at + 1) >= len, "seed {seed}, block {at}");
                let Some(found) = found else { continue };
                assert!(found.contains(block), "seed {seed}: the last block closed the gap");
                for block in found {
                    allocator.free(block).unwrap();
                }
                assert!(allocator.allocate(len, 0).is_some(), "seed {seed}");
                found_any += 1;
                break;
            }
        }
        assert!(found_any > 50 || seeds(SEEDS) != SEEDS, "{found_any}");
    }

    #[test]
    fn blocks_in_slabs_make_room_too_and_one_alone_is_known_without_a_list() {
        const SEEDS: core::ops::Range<u64> = 0..400;
        let (mut found_any, mut alone) = (0, 0);
        for seed in each_seed(SEEDS) {
            let mut rng = Rng::new(seed);
            let (mut allocator, blocks) = crowded(AllocatorKind::Slab, &mut rng);
            let len = (4 << 10) << rng.range(0..8);
            if let Some((block, _)) = allocator.allocate(len, 0) {
                allocator.free(block).unwrap();
                continue;
            }
            let mut clearing = Clearing::default();
            for (block, ..) in &blocks {
                let one = Clearing::default().add(&allocator, *block, len);
                assert_eq!(one.is_some(), makes_room_alone(&allocator, *block, len), "seed {seed}");
                alone += usize::from(one.is_some());
                let Some(found) = clearing.add(&allocator, *block, len) else { continue };
                for block in found {
                    allocator.free(block).unwrap();
                }
                assert!(allocator.allocate(len, 0).is_some(), "seed {seed}");
                found_any += 1;
                break;
            }
        }
        assert!(found_any > 50 && alone > 5 || seeds(SEEDS) != SEEDS, "{found_any} {alone}");
    }
}
