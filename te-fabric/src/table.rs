//! Tables: one whose caller chooses the index of an entry, and one that chooses the index and gives the entry
//! a name.

use te_core::{Error, ErrorKind};

/// Entries whose index the caller chooses, below a limit. The table grows when an entry is added, never on
/// the data path.
#[derive(Debug)]
pub struct Table<T> {
    entries: Vec<Option<T>>,
    max: u32,
}

impl<T> Table<T> {
    /// An empty table for indexes from 0 up to, but not including, `max`.
    #[must_use]
    pub const fn new(max: u32) -> Self {
        Self { entries: Vec::new(), max }
    }

    /// One more than the largest index that was ever used: the bound of a loop over all entries.
    #[must_use]
    pub fn bound(&self) -> u32 {
        self.entries.len() as u32
    }

    /// The entry at `index`.
    #[inline]
    #[must_use]
    pub fn get(&self, index: u32) -> Option<&T> {
        self.entries.get(index as usize)?.as_ref()
    }

    /// The entry at `index`.
    #[inline]
    pub fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        self.entries.get_mut(index as usize)?.as_mut()
    }

    /// All entries with their indexes.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let entries = self.entries.iter().enumerate();
        entries.filter_map(|(index, entry)| entry.as_ref().map(|entry| (index as u32, entry)))
    }

    /// Checks that an entry may be put at `index`.
    ///
    /// # Errors
    /// `Full` when the index is not below the limit, `Busy` when there is an entry.
    pub fn vacant(&self, index: u32) -> Result<(), Error> {
        match (index < self.max, self.get(index)) {
            (false, _) => Err(ErrorKind::Full.into()),
            (true, Some(_)) => Err(ErrorKind::Busy.into()),
            (true, None) => Ok(()),
        }
    }

    /// Puts `entry` at `index`.
    ///
    /// # Errors
    /// As [`Self::vacant`]; the table has not changed.
    pub fn insert(&mut self, index: u32, entry: T) -> Result<(), Error> {
        self.vacant(index)?;
        let at = index as usize;
        if self.entries.len() <= at {
            self.entries.resize_with(at + 1, || None);
        }
        self.entries[at] = Some(entry);
        Ok(())
    }

    /// Puts `entry` at the first free index; returns the index.
    ///
    /// # Errors
    /// `Full`.
    pub fn add(&mut self, entry: T) -> Result<u32, Error> {
        let free = self.entries.iter().position(Option::is_none).unwrap_or(self.entries.len()) as u32;
        self.insert(free, entry).map(|()| free)
    }

    /// Takes the entry at `index` out of the table.
    pub fn remove(&mut self, index: u32) -> Option<T> {
        self.entries.get_mut(index as usize)?.take()
    }
}

/// An index and a generation in one word. A name refers to nothing once its entry is removed: the next entry
/// in the slot has another generation.
pub trait Name: Copy {
    /// The number of slots that names can distinguish.
    const SLOTS_MAX: u64;

    /// The name of slot `index` in `generation`. Only as many low bits of the generation count as the name
    /// has room for.
    fn pack(index: u32, generation: u32) -> Self;

    /// The index and the generation in a name.
    fn unpack(self) -> (u32, u32);
}

impl Name for u64 {
    const SLOTS_MAX: u64 = 1 << 32;

    fn pack(index: u32, generation: u32) -> Self {
        Self::from(generation) << 32 | Self::from(index)
    }

    fn unpack(self) -> (u32, u32) {
        (self as u32, (self >> 32) as u32)
    }
}

/// For names that share a word with other data: 20 bits of index, 12 bits of generation.
impl Name for u32 {
    const SLOTS_MAX: u64 = 1 << 20;

    fn pack(index: u32, generation: u32) -> Self {
        generation << 20 | index & 0xf_ffff
    }

    fn unpack(self) -> (u32, u32) {
        (self & 0xf_ffff, self >> 20)
    }
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    reserved: bool,
    value: Option<T>,
}

/// Entries whose index the slab chooses. A caller may take an entry out to work on it; its slot stays
/// reserved meanwhile.
#[derive(Debug)]
pub struct Slab<T, N = u64> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    name: core::marker::PhantomData<fn() -> N>,
}

impl<T, N: Name> Slab<T, N> {
    /// An empty slab.
    #[must_use]
    pub const fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new(), name: core::marker::PhantomData }
    }

    /// The number of slots in use.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether no slot is in use.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One more than the largest index that was ever used: the bound of a loop over all entries.
    #[must_use]
    pub fn bound(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Reserves a slot; returns its index and its name.
    pub fn reserve(&mut self) -> (u32, N) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, reserved: false, value: None });
            // Room for every slot to become free, so that freeing never allocates.
            self.free.reserve(self.slots.len());
            self.slots.len() as u32 - 1
        });
        self.slots[index as usize].reserved = true;
        (index, self.name(index))
    }

    /// The name of slot `index`.
    #[must_use]
    pub fn name(&self, index: u32) -> N {
        N::pack(index, self.slots.get(index as usize).map_or(0, |slot| slot.generation))
    }

    /// The index that a name refers to; `None` once the entry was removed.
    #[inline]
    #[must_use]
    pub fn index(&self, name: N) -> Option<u32> {
        let (index, generation) = name.unpack();
        let slot = self.slots.get(index as usize)?;
        let (_, current) = N::pack(index, slot.generation).unpack();
        (slot.reserved && current == generation).then_some(index)
    }

    /// The entry at `index`, unless it is taken out.
    #[inline]
    #[must_use]
    pub fn get(&self, index: u32) -> Option<&T> {
        self.slots.get(index as usize)?.value.as_ref()
    }

    /// The entry at `index`, unless it is taken out.
    #[inline]
    pub fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        self.slots.get_mut(index as usize)?.value.as_mut()
    }

    /// Takes an entry out to work on it. The caller calls `put` or `release` afterwards.
    #[inline]
    pub fn take(&mut self, index: u32) -> Option<T> {
        self.slots.get_mut(index as usize)?.value.take()
    }

    /// Puts an entry into a slot that was reserved for it.
    #[inline]
    pub fn put(&mut self, index: u32, value: T) {
        if let Some(slot) = self.slots.get_mut(index as usize) {
            slot.value = Some(value);
        }
    }

    /// Removes an entry: its slot becomes free, and its name refers to nothing from now on.
    pub fn remove(&mut self, index: u32) -> Option<T> {
        let value = self.take(index);
        self.release(index);
        value
    }

    /// Several entries at once, for work that needs more than one of them. Sorts `indexes`, and returns each
    /// entry that exists once.
    pub fn each_mut(&mut self, indexes: &mut [u32]) -> impl Iterator<Item = (u32, &mut T)> {
        indexes.sort_unstable();
        let (mut rest, mut passed) = (self.slots.as_mut_slice(), 0);
        indexes.iter().filter_map(move |&index| {
            let skip = (index as usize).checked_sub(passed)?;
            let (slot, behind) = std::mem::take(&mut rest).get_mut(skip..)?.split_first_mut()?;
            (rest, passed) = (behind, index as usize + 1);
            slot.value.as_mut().map(|value| (index, value))
        })
    }

    /// Frees a slot, with or without an entry in it.
    pub fn release(&mut self, index: u32) {
        if let Some(slot) = self.slots.get_mut(index as usize)
            && slot.reserved
        {
            slot.value = None;
            slot.reserved = false;
            slot.generation = slot.generation.wrapping_add(1);
            self.free.push(index);
        }
    }
}

impl<T, N: Name> Default for Slab<T, N> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_is_taken_once_and_bounded() {
        let mut table = Table::new(2);
        assert_eq!(table.insert(1, 'a'), Ok(()));
        assert_eq!(table.insert(1, 'b').map_err(|e| e.kind), Err(ErrorKind::Busy));
        assert_eq!(table.insert(2, 'b').map_err(|e| e.kind), Err(ErrorKind::Full));
        assert_eq!((table.add('c'), table.add('d').map_err(|e| e.kind)), (Ok(0), Err(ErrorKind::Full)));
        assert_eq!(table.iter().collect::<Vec<_>>(), [(0, &'c'), (1, &'a')]);
        assert_eq!((table.remove(1), table.remove(1), table.get(0)), (Some('a'), None, Some(&'c')));
    }

    fn a_name_does_not_outlive_its_entry<N: Name + PartialEq>() {
        let mut slab: Slab<char, N> = Slab::new();
        let (index, name) = slab.reserve();
        slab.put(index, 'a');
        assert_eq!((slab.index(name), slab.get(index), slab.len()), (Some(index), Some(&'a'), 1));
        assert_eq!((slab.take(index), slab.get(index), slab.index(name)), (Some('a'), None, Some(index)));
        slab.release(index);
        slab.release(index);
        assert_eq!((slab.index(name), slab.get(index), slab.len()), (None, None, 0));
        let (again, other) = slab.reserve();
        assert!(again == index && other != name && slab.index(name).is_none());
    }

    #[test]
    fn an_entry_that_is_removed_leaves_its_slot_free() {
        let mut slab: Slab<char> = Slab::new();
        let (index, name) = slab.reserve();
        slab.put(index, 'a');
        assert_eq!((slab.remove(index), slab.remove(index), slab.len()), (Some('a'), None, 0));
        assert_eq!((slab.index(name), slab.reserve().0), (None, index));
    }

    #[test]
    fn several_entries_are_lent_at_once_and_each_once() {
        let mut slab: Slab<char> = Slab::new();
        for value in ['a', 'b', 'c', 'd'] {
            let (index, _) = slab.reserve();
            slab.put(index, value);
        }
        slab.remove(1);
        let mut lent = slab.each_mut(&mut [3, 9, 1, 0, 3]).collect::<Vec<_>>();
        assert_eq!(lent, [(0, &mut 'a'), (3, &mut 'd')]);
        lent.iter_mut().for_each(|(_, value)| value.make_ascii_uppercase());
        assert_eq!((slab.get(0), slab.get(2), slab.get(3)), (Some(&'A'), Some(&'c'), Some(&'D')));
        assert_eq!(slab.each_mut(&mut []).count(), 0);
    }

    #[test]
    fn names_do_not_outlive_their_entries() {
        a_name_does_not_outlive_its_entry::<u32>();
        a_name_does_not_outlive_its_entry::<u64>();
    }

    #[test]
    fn a_generation_that_is_longer_than_a_name_has_bits_wraps() {
        let mut slab: Slab<(), u32> = Slab::new();
        for _ in 0..5_000 {
            let (index, name) = slab.reserve();
            assert_eq!(slab.index(name), Some(index));
            slab.release(index);
        }
        assert_eq!(slab.bound(), 1);
    }
}
