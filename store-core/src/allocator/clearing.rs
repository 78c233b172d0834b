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
    /// Of slabs that could not go yet, the blocks that could.
    slabs: BTreeMap<u32, Vec<Block>>,
}

impl Clearing {
    /// One more could go. Gives blocks, of those that could, that make room for `len` bytes when they are freed; `None`: they
    /// do not yet. Nothing was free for `len` before.
    pub(crate) fn add(&mut self, allocator: &AnyAllocator, block: Block, len: u64) -> Option<Vec<Block>> {
        match allocator {
            AnyAllocator::Offset(it) => {
                self.ranges.insert(block.index(), Vec::from([block]));
                self.window(it, block, len)
            }
            AnyAllocator::Slab(it) => match it.room_in(block, len)? {
                Room::Itself => Some(Vec::from([block])),
                Room::Alone { space, len } => {
                    self.ranges.insert(space.index(), Vec::from([block]));
                    self.window(it.space(), space, len)
                }
                Room::Shared { slab, used, space, len } => {
                    let gone = self.slabs.entry(slab).or_default();
                    if !gone.contains(&block) {
                        gone.push(block);
                    }
                    if gone.len() < used as usize {
                        return None;
                    }
                    let gone = self.slabs.remove(&slab)?;
                    self.ranges.insert(space.index(), gone);
                    self.window(it.space(), space, len)
                }
            },
        }
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
