//! The slab allocator: blocks of similar length share a slab, so that a freed slot fits the next block.
//!
//! ```text
//!   segment   ▏▒▒▒▒▒▒▒░▏▓▓▓▓▓▓▓▓▓▓▓▏▒▒▒░░░░░▏■■■■■■■■▏                    ▏   allocated from an offset allocator
//!               slab    long object  slab     slab                free
//!   slab      ▏slot▏slot▏slot▏slot▏slot▏ … ▏        at least 32 slots, all of one length
//!   class       └── the slabs with a free slot ──▶ slab ⇄ slab
//! ```
//!
//! A slab is 1/4,096 of the segment, 64 KiB to 256 MiB. Lengths fall into *classes* by how many of them a
//! slab holds: exact up to 128, then 64 classes per doubling, so that a slot is at most 1/32 longer than its
//! content. An object longer than 1/32 of a slab is allocated directly from the offset allocator, and so is a
//! shorter one when there is no room for a further slab: the remaining space is used, too. An empty slab is
//! freed at once and may become one of another class, or part of a long object. (After J. Bonwick, "The slab
//! allocator: an object-caching kernel memory allocator", USENIX 1994.)
//!
//! Its weakness: when the lengths in demand change, slabs of the old lengths are freed only when they are
//! empty; until then their free slots cannot be used for other lengths.

use alloc::boxed::Box;
use alloc::vec;

use super::{Allocator, Block, GRAIN_BYTES, OffsetAllocator};
use crate::slab;
use crate::slab::NIL;
use serde::{Deserialize, Serialize};

const SLABS_PER_SEGMENT: u64 = 4_096;
const SLAB_BYTES_MIN: u64 = 64 << 10;
const SLAB_BYTES_MAX: u64 = 256 << 20;
/// A length of which a slab holds fewer than this is allocated directly.
const SLOTS_MIN: u32 = 32;
/// The number of slots is rounded to this many significant bits after the first.
const SLOTS_BITS: u32 = 6;

/// The allocated and the free parts of `len` bytes.
#[derive(Debug, Serialize, Deserialize)]
pub struct SlabAllocator {
    /// The slabs, and blocks that are allocated directly.
    space: OffsetAllocator,
    slab_grains: u32,
    /// Per class: the first slab with a free slot.
    partial: Box<[u32]>,
    /// One bit per class: it has a slab with a free slot.
    has_partial: Box<[u64]>,
    slabs: slab::Slab<Slab>,
    entries: slab::Slab<Entry>,
    /// First of the entries whose slab is gone, linked by `link`: they are freed a few at a time.
    vacant: u32,
    used_bytes: u64,
    blocks_used: u32,
}

/// Space for blocks of one class.
#[derive(Clone, Copy, Debug)]
struct Slab {
    offset: u64,
    /// The slab's block in `space`.
    block: Block,
    class: u32,
    slot_bytes: u32,
    slots: u32,
    used: u32,
    /// Slots that have been used since the slab was made; they have entries, used or free.
    touched: u32,
    /// First and last of the free entries.
    free: u32,
    free_last: u32,
    /// Neighbours on the list of the class's slabs with a free slot.
    before: u32,
    after: u32,
}

/// A block, allocated or free; 12 bytes.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// The slab that it is in; or `ALONE`, `FREE`.
    slab: u32,
    /// The slot of the slab; when alone, the block of `space`.
    at: u32,
    /// Allocated: the tag. Free: the next free entry.
    link: u32,
}

crate::snapshot::packed!(Entry, NO_ENTRY, slab: u32, at: u32, link: u32);
crate::snapshot::packed!(
    Slab,
    NO_SLAB,
    offset: u64,
    block: u32,
    class: u32,
    slot_bytes: u32,
    slots: u32,
    used: u32,
    touched: u32,
    free: u32,
    free_last: u32,
    before: u32,
    after: u32,
);

const _: () = assert!(size_of::<Entry>() == 12);

const FREE: u32 = NIL;
const ALONE: u32 = NIL - 1;
const NO_ENTRY: Entry = Entry { slab: FREE, at: 0, link: NIL };
/// Entries of slabs that are gone that are freed per freed block: more than are added.
const VACATED_PER_FREE: u32 = 4;
const NO_SLAB: Slab = Slab {
    offset: 0,
    block: Block(NIL),
    class: 0,
    slot_bytes: 0,
    slots: 0,
    used: 0,
    touched: 0,
    free: NIL,
    free_last: NIL,
    before: NIL,
    after: NIL,
};

/// What becomes of the space of a block when it is freed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Room {
    /// The new block takes its slot.
    Itself,
    /// The block is a range of its own; the new block needs so many bytes there.
    Alone { space: Block, len: u64 },
    /// The block is part of a range with `used` blocks, which is free when all of them are freed.
    Shared { slab: u32, used: u32, space: Block, len: u64 },
}

/// The lengths that share slabs.
#[derive(Clone, Copy, Debug)]
struct Class {
    index: u32,
    slot_grains: u32,
}

impl SlabAllocator {
    /// All of `len` bytes free. A last part that is shorter than [`GRAIN_BYTES`] is never used.
    #[must_use]
    pub fn new(len: u64) -> Self {
        let slab_bytes = 1 << (len / SLABS_PER_SEGMENT).max(1).ilog2();
        let slab_bytes = SLAB_BYTES_MAX.min(SLAB_BYTES_MIN.max(slab_bytes));
        let slab_grains = (slab_bytes / GRAIN_BYTES) as u32;
        let classes = class_of_slots(slab_grains) as usize + 1;
        Self {
            space: OffsetAllocator::new(len),
            slab_grains,
            partial: vec![NIL; classes].into(),
            has_partial: vec![0; classes.div_ceil(64)].into(),
            slabs: slab::Slab::new(NO_SLAB),
            entries: slab::Slab::new(NO_ENTRY),
            vacant: NIL,
            used_bytes: 0,
            blocks_used: 0,
        }
    }

    /// Length of a slab, bytes.
    #[must_use]
    pub const fn slab_bytes(&self) -> u64 {
        self.slab_grains as u64 * GRAIN_BYTES
    }

    /// Length of the longest block that shares a slab, bytes.
    #[must_use]
    pub const fn shared_bytes_max(&self) -> u64 {
        (self.slab_grains / SLOTS_MIN) as u64 * GRAIN_BYTES
    }

    /// `None`: too long to share a slab.
    fn class_of(&self, len: u64) -> Option<Class> {
        let grains = len.div_ceil(GRAIN_BYTES);
        if grains > u64::from(self.slab_grains / SLOTS_MIN) {
            return None;
        }
        let slots = slots_rounded_down(self.slab_grains / grains as u32);
        Some(Class { index: class_of_slots(slots), slot_grains: self.slab_grains / slots })
    }

    /// A slab of this class with a free slot.
    fn slab_for(&mut self, class: Class) -> Option<u32> {
        let partial = self.partial[class.index as usize];
        if partial != NIL {
            return Some(partial);
        }
        let (block, offset) = self.space.allocate(self.slab_bytes(), 0)?;
        let slab = Slab {
            offset,
            block,
            class: class.index,
            slot_bytes: class.slot_grains * GRAIN_BYTES as u32,
            slots: self.slab_grains / class.slot_grains,
            used: 0,
            touched: 0,
            free: NIL,
            free_last: NIL,
            before: NIL,
            after: NIL,
        };
        let index = self.slabs.insert(slab);
        self.link(index);
        Some(index)
    }

    fn allocate_in(&mut self, index: u32, tag: u32) -> (Block, u64) {
        let slab = &mut self.slabs[index];
        slab.used += 1;
        let full = slab.used == slab.slots;
        let entry = slab.free;
        let slot;
        if entry == NIL {
            slot = slab.touched;
            slab.touched += 1;
        } else {
            slot = self.entries[entry].at;
            slab.free = self.entries[entry].link;
        }
        let offset = slab.offset + u64::from(slot) * u64::from(slab.slot_bytes);
        self.used_bytes += u64::from(slab.slot_bytes);
        self.blocks_used += 1;
        let new = Entry { slab: index, at: slot, link: tag };
        let entry = if entry == NIL { self.new_entry(new) } else { entry };
        self.entries[entry] = new;
        if full {
            self.unlink(index);
        }
        (Block(entry), offset)
    }

    fn allocate_alone(&mut self, len: u64, tag: u32) -> Option<(Block, u64)> {
        let (block, offset) = self.space.allocate(len, 0)?;
        self.used_bytes += self.space.rounded(len);
        self.blocks_used += 1;
        Some((Block(self.new_entry(Entry { slab: ALONE, at: block.0, link: tag })), offset))
    }

    fn free_in(&mut self, index: u32, entry: u32) -> u64 {
        let slab = &mut self.slabs[index];
        self.entries[entry] = Entry { slab: FREE, at: self.entries[entry].at, link: slab.free };
        if slab.free == NIL {
            slab.free_last = entry;
        }
        slab.free = entry;
        let was_full = slab.used == slab.slots;
        slab.used -= 1;
        let Slab { used, slot_bytes, block, free, free_last, .. } = *slab;
        if used == 0 {
            // All of its entries are in its free list now: they are freed together.
            self.unlink(index);
            self.entries[free_last].link = self.vacant;
            self.vacant = free;
            self.space.free(block);
            self.slabs.remove(index);
        } else if was_full {
            self.link(index);
        }
        slot_bytes.into()
    }

    fn new_entry(&mut self, entry: Entry) -> u32 {
        if self.vacant == NIL {
            return self.entries.insert(entry);
        }
        let index = self.vacant;
        self.vacant = self.entries[index].link;
        self.entries[index] = entry;
        index
    }

    fn link(&mut self, index: u32) {
        let class = self.slabs[index].class as usize;
        let head = core::mem::replace(&mut self.partial[class], index);
        self.slabs[index].before = NIL;
        self.slabs[index].after = head;
        if head != NIL {
            self.slabs[head].before = index;
        }
        self.has_partial[class / 64] |= 1 << (class % 64);
    }

    fn unlink(&mut self, index: u32) {
        let Slab { class, before, after, .. } = self.slabs[index];
        let class = class as usize;
        if after != NIL {
            self.slabs[after].before = before;
        }
        if before != NIL {
            self.slabs[before].after = after;
            return;
        }
        self.partial[class] = after;
        if after == NIL {
            self.has_partial[class / 64] &= !(1 << (class % 64));
        }
    }

    /// Length of the longest free slot, bytes.
    fn longest_slot(&self) -> u64 {
        // Classes are ordered by length, longest first.
        let class = self
            .has_partial
            .iter()
            .enumerate()
            .find_map(|(word, bits)| (*bits != 0).then(|| word * 64 + bits.trailing_zeros() as usize));
        class.map_or(0, |class| self.slabs[self.partial[class]].slot_bytes.into())
    }

    /// The allocator of slabs, and of blocks that are allocated directly.
    pub(super) const fn space(&self) -> &OffsetAllocator {
        &self.space
    }

    /// The room that freeing an allocated block would make for `len` bytes.
    pub(super) fn room_in(&self, block: Block, len: u64) -> Option<Room> {
        let entry = self.used(block)?;
        let class = self.class_of(len);
        // A short block without a slab is allocated directly.
        let len = class.map_or(len, |class| u64::from(class.slot_grains) * GRAIN_BYTES);
        if entry.slab == ALONE {
            return Some(Room::Alone { space: Block(entry.at), len });
        }
        let slab = &self.slabs[entry.slab];
        Some(match class {
            Some(class) if class.index == slab.class => Room::Itself,
            _ => Room::Shared { slab: entry.slab, used: slab.used, space: slab.block, len },
        })
    }

    fn used(&self, block: Block) -> Option<&Entry> {
        Some(&self.entries[block.0]).filter(|entry| entry.slab != FREE)
    }
}

impl Allocator for SlabAllocator {
    fn allocate(&mut self, len: u64, tag: u32) -> Option<(Block, u64)> {
        if len == 0 {
            return None;
        }
        let Some(class) = self.class_of(len) else { return self.allocate_alone(len, tag) };
        match self.slab_for(class) {
            Some(slab) => Some(self.allocate_in(slab, tag)),
            None => self.allocate_alone(u64::from(class.slot_grains) * GRAIN_BYTES, tag),
        }
    }

    fn free(&mut self, block: Block) -> Option<u64> {
        let Entry { slab, at, .. } = *self.used(block)?;
        let bytes = if slab == ALONE {
            self.entries.remove(block.0);
            self.space.free(Block(at))?
        } else {
            self.free_in(slab, block.0)
        };
        self.used_bytes -= bytes;
        self.blocks_used -= 1;
        for _ in 0..VACATED_PER_FREE {
            if self.vacant != NIL {
                let entry = self.vacant;
                self.vacant = self.entries[entry].link;
                self.entries.remove(entry);
            }
        }
        Some(bytes)
    }

    fn tag(&self, block: Block) -> Option<u32> {
        self.used(block).map(|entry| entry.link)
    }

    fn set_tag(&mut self, block: Block, tag: u32) {
        if self.used(block).is_some() {
            self.entries[block.0].link = tag;
        }
    }

    fn blocks(&self) -> impl Iterator<Item = (Block, u64, u64, u32)> {
        (0..self.entries.end()).filter_map(|index| {
            let block = Block(index);
            let Entry { slab, at, link } = *self.used(block)?;
            let (offset, len) = if slab == ALONE {
                self.space.extent(Block(at))?
            } else {
                let Slab { offset, slot_bytes, .. } = self.slabs[slab];
                (offset + u64::from(at) * u64::from(slot_bytes), slot_bytes.into())
            };
            Some((block, offset, len, link))
        })
    }

    fn capacity_bytes(&self) -> u64 {
        self.space.capacity_bytes()
    }

    fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    fn blocks_used(&self) -> u32 {
        self.blocks_used
    }

    fn rounded(&self, len: u64) -> u64 {
        match self.class_of(len) {
            Some(class) if len > 0 => u64::from(class.slot_grains) * GRAIN_BYTES,
            _ => self.space.rounded(len),
        }
    }

    fn largest_free(&self) -> u64 {
        let range = self.space.largest_free();
        let alone = if range > self.shared_bytes_max() || range == 0 {
            range
        } else {
            // A short object takes a whole slot even when it is allocated directly.
            let slots = slots_rounded_up(self.slab_grains.div_ceil((range / GRAIN_BYTES) as u32));
            u64::from(self.slab_grains / slots) * GRAIN_BYTES
        };
        alone.max(self.longest_slot())
    }

    fn refused_above(&self, refused: u64) -> u64 {
        let slot = self.longest_slot();
        if slot >= refused { slot } else { refused.saturating_sub(1) }
    }

    fn memory_bytes(&self) -> usize {
        self.space.memory_bytes()
            + self.slabs.memory_bytes()
            + self.entries.memory_bytes()
            + size_of_val(&*self.partial)
            + size_of_val(&*self.has_partial)
            + size_of::<Self>()
            - size_of::<OffsetAllocator>()
    }
}

/// The class of slabs that hold this many slots; a number that [`slots_rounded_down`] returned.
const fn class_of_slots(slots: u32) -> u32 {
    let bits = slots.ilog2();
    if bits < SLOTS_BITS {
        return slots - SLOTS_MIN;
    }
    let doubling = bits - SLOTS_BITS;
    (doubling << SLOTS_BITS) + (slots >> doubling) - SLOTS_MIN
}

const fn slots_rounded_down(slots: u32) -> u32 {
    let drop = slots.ilog2().saturating_sub(SLOTS_BITS);
    slots >> drop << drop
}

const fn slots_rounded_up(slots: u32) -> u32 {
    let drop = slots.ilog2().saturating_sub(SLOTS_BITS);
    (slots + ((1 << drop) - 1)) >> drop << drop
}
