//! Slots with generations: an entry to which an event refers may be removed, but is never confused with its
//! successor.

use alloc::vec::Vec;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    index: u32,
    generation: u32,
}

pub(super) struct Slab<T> {
    slots: Vec<(u32, Option<T>)>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    pub(super) const fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }

    pub(super) fn insert(&mut self, value: T) -> Key {
        if let Some(index) = self.free.pop() {
            let slot = &mut self.slots[index as usize];
            slot.1 = Some(value);
            return Key { index, generation: slot.0 };
        }
        self.slots.push((0, Some(value)));
        Key { index: self.slots.len() as u32 - 1, generation: 0 }
    }

    pub(super) fn remove(&mut self, key: Key) -> Option<T> {
        let slot = self.slots.get_mut(key.index as usize).filter(|slot| slot.0 == key.generation)?;
        let value = slot.1.take()?;
        slot.0 = slot.0.wrapping_add(1);
        self.free.push(key.index);
        Some(value)
    }

    pub(super) fn find(&self, key: Key) -> Option<&T> {
        self.slots.get(key.index as usize).filter(|slot| slot.0 == key.generation)?.1.as_ref()
    }

    pub(super) fn find_mut(&mut self, key: Key) -> Option<&mut T> {
        self.slots.get_mut(key.index as usize).filter(|slot| slot.0 == key.generation)?.1.as_mut()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Key, &T)> {
        self.slots.iter().enumerate().filter_map(|(index, (generation, value))| {
            value.as_ref().map(|value| (Key { index: index as u32, generation: *generation }, value))
        })
    }

    /// The first key at or after slot `from` whose value `wanted` chooses, and the slot to continue from.
    /// Allows changes in between.
    pub(super) fn next_where(&self, from: usize, wanted: impl Fn(&T) -> bool) -> Option<(Key, usize)> {
        self.slots.iter().enumerate().skip(from).find_map(|(index, (generation, value))| {
            let hit = value.as_ref().is_some_and(&wanted);
            hit.then_some((Key { index: index as u32, generation: *generation }, index + 1))
        })
    }
}
