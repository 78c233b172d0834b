//! What would have to be freed for a block to fit: asked before anything is.
//!
//! Blocks that could go are added one by one, in the order in which they should; as soon as some of them, with the free space
//! between, make a range that is long enough, those alone are named. Nothing is changed.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::slab::Room;
use super::{AnyAllocator, Block, OffsetAllocator};

/// Blocks of one allocator that could go.
#[derive(Debug, Default)]
pub(crate) struct Clearing {
    /// Ranges of the offset allocator that could go, by their block, and which of the caller's blocks make them.
    ranges: BTreeMap<u32, Vec<Block>>,
    /// The same ranges, joined where they touch, with the free space at their edges: first byte, and the one after the last.
    runs: BTreeMap<u64, u64>,
    /// Of slabs that could not go yet, the blocks that could.
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

/// The range that is free when this block is: the block, and free space below and above it.
fn run_of(space: &OffsetAllocator, block: Block) -> Option<(u64, u64)> {
    let (offset, size) = space.extent(block)?;
    let free = |neighbour: Option<(Block, u64, bool)>| {
        neighbour.map_or(0, |(_, size, free)| if free { size } else { 0 })
    };
    Some((offset - free(space.below(block)), offset + size + free(space.above(block))))
}

impl Clearing {
    /// Adds a block that could go. Returns blocks, of those that could, that make room for `len` bytes when they are freed;
    /// `None` when all of them together do not. Nothing was free for `len` before.
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

    /// Adds a range of the offset allocator that is free once `blocks` are, and looks whether it closed a gap.
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

    /// The blocks of a range around `block` that is long enough, as few as a walk to both sides finds.
    fn window(&self, space: &OffsetAllocator, block: Block, len: u64) -> Option<Vec<Block>> {
        let mut bytes = space.extent(block)?.1;
        let mut chosen = Vec::from([block.index()]);
        let (mut below, mut above) = (block, block);
        // Free space first, which costs nothing; then what could go, one at a time.
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
