//! The slab allocator: blocks of about one length share a slab, so that what one gives back fits the next.
//!
//! ```text
//!   segment   ▏▒▒▒▒▒▒▒░▏▓▓▓▓▓▓▓▓▓▓▓▏▒▒▒░░░░░▏■■■■■■■■▏                    ▏   taken from an offset allocator
//!               slab    long object  slab     slab                free
//!   slab      ▏slot▏slot▏slot▏slot▏slot▏ … ▏        at least 32 slots, all of one length
//!   class       └── the slabs with a free slot ──▶ slab ⇄ slab
//! ```
//!
//! A slab is 1/4,096 of the segment, 64 KiB to 256 MiB. Lengths fall into *classes* by how many of them a slab holds: exact up
//! to 128, then 64 classes for every doubling, so that a slot is at most 1/32 longer than what is in it. An object longer than
//! 1/32 of a slab is taken from the offset allocator as it is, and so is a short one when there is no room for a further slab:
//! what is left over at the end is used too. A slab that is empty goes back at once and may become one of another class, or
//! part of a long object. (After J. Bonwick, "The slab allocator: an object-caching kernel memory allocator", USENIX 1994.)
//!
//! What it is not good at: when the lengths in demand change, slabs of the old ones come back only when they are empty; until
//! then their free slots are of no use to others.

use alloc::boxed::Box;
use alloc::vec;

use super::{Allocator, Block, GRAIN_BYTES, OffsetAllocator};
use crate::slab;
use crate::slab::NIL;

const SLABS_PER_SEGMENT: u64 = 4_096;
const SLAB_BYTES_MIN: u64 = 64 << 10;
const SLAB_BYTES_MAX: u64 = 256 << 20;
/// A length of which fewer fit a slab is taken as it is.
const SLOTS_MIN: u32 = 32;
/// Numbers of slots are told apart by this many of their first bits, the very first not counted.
const SLOTS_BITS: u32 = 6;

/// What is allocated and what is free in `len` bytes.
#[derive(Debug)]
pub struct SlabAllocator {
    /// Whole slabs, and what lies alone.
    space: OffsetAllocator,
    slab_grains: u32,
    /// Of each class, the first slab with a free slot.
    partial: Box<[u32]>,
    /// Bit per class: it has one.
    has_partial: Box<[u64]>,
    slabs: slab::Slab<Slab>,
    entries: slab::Slab<Entry>,
    /// First of the entries that belong to no slab any more, linked by `link`: they go a few at a time.
    vacant: u32,
    used_bytes: u64,
    blocks_used: u32,
}

/// Space for blocks of one class.
#[derive(Clone, Copy, Debug)]
struct Slab {
    offset: u64,
    /// In `space`.
    block: Block,
    class: u32,
    slot_bytes: u32,
    slots: u32,
    used: u32,
    /// Slots that have been used since it was made; they have entries, used or free.
    touched: u32,
    /// First and last of the free entries.
    free: u32,
    free_last: u32,
    /// Neighbours among the slabs of its class with a free slot.
    before: u32,
    after: u32,
}

/// A block, used or free; 12 bytes.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Which slab it is in; or `ALONE`, `FREE`.
    slab: u32,
    /// Which slot of the slab; alone: which block of `space`.
    at: u32,
    /// Used: the tag. Free: the next free one.
    link: u32,
}

const _: () = assert!(size_of::<Entry>() == 12);

const FREE: u32 = NIL;
const ALONE: u32 = NIL - 1;
const NO_ENTRY: Entry = Entry { slab: FREE, at: 0, link: NIL };
/// Entries of slabs that are gone, that go with each block: more than come.
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

/// What becomes of the space of a block that goes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Room {
    /// The new one takes its slot.
    Itself,
    /// It is a range of its own; the new one needs so many bytes there.
    Alone { space: Block, len: u64 },
    /// It is part of a range with so many others, which is free when all of them have gone.
    Shared { slab: u32, used: u32, space: Block, len: u64 },
}

/// Lengths that share slabs.
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

    /// Bytes of a slab.
    #[must_use]
    pub const fn slab_bytes(&self) -> u64 {
        self.slab_grains as u64 * GRAIN_BYTES
    }

    /// Longest block that shares a slab, bytes.
    #[must_use]
    pub const fn shared_bytes_max(&self) -> u64 {
        (self.slab_grains / SLOTS_MIN) as u64 * GRAIN_BYTES
    }

    /// `None`: too long to share.
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
            // Every entry it ever had is in its free list now: they go as one.
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
        // The first class has the longest.
        let class = self
            .has_partial
            .iter()
            .enumerate()
            .find_map(|(word, bits)| (*bits != 0).then(|| word * 64 + bits.trailing_zeros() as usize));
        class.map_or(0, |class| self.slabs[self.partial[class]].slot_bytes.into())
    }

    /// Whole slabs, and what lies alone.
    pub(super) const fn space(&self) -> &OffsetAllocator {
        &self.space
    }

    /// What of `len` bytes would find room where an allocated block is.
    pub(super) fn room_in(&self, block: Block, len: u64) -> Option<Room> {
        let entry = self.used(block)?;
        let class = self.class_of(len);
        // A short one that finds no slab lies alone.
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
            // A short object takes a whole slot even when it lies alone.
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

/// The class of slabs that hold this many; a number that [`slots_rounded_down`] gave.
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
