//! A table whose entries have an index and a generation, so that late events of an entry that is gone are harmless.

const INDEX_BITS: u32 = 20;
const INDEX_MASK: u32 = (1 << INDEX_BITS) - 1;
const GENERATION_MASK: u16 = (1 << (32 - INDEX_BITS)) - 1;
/// Slots of one slab, at most.
pub(crate) const SLOTS_MAX: usize = 1 << INDEX_BITS;

#[derive(Debug)]
struct Slot<T> {
    generation: u16,
    taken: bool,
    value: Option<T>,
}

/// Entries by index. While one is being worked on it may be taken out; its slot stays its own.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    pub(crate) const fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }

    /// Slots in use.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Slots there ever were: the bound for a walk over all indexes.
    pub(crate) fn bound(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Reserves a slot; gives its index and its name.
    pub(crate) fn reserve(&mut self) -> (u32, u32) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, taken: false, value: None });
            // Room for every slot to come free, so that freeing never allocates.
            self.free.reserve(self.slots.len());
            self.slots.len() as u32 - 1
        });
        self.slots[index as usize].taken = true;
        (index, self.name(index))
    }

    /// Index and generation in one word.
    pub(crate) fn name(&self, index: u32) -> u32 {
        let generation = self.slots.get(index as usize).map_or(0, |slot| slot.generation);
        u32::from(generation) << INDEX_BITS | index & INDEX_MASK
    }

    /// The index that a name means, unless that entry is gone.
    pub(crate) fn index(&self, name: u32) -> Option<u32> {
        let index = name & INDEX_MASK;
        let slot = self.slots.get(index as usize)?;
        (slot.taken && u32::from(slot.generation) == name >> INDEX_BITS).then_some(index)
    }

    pub(crate) fn get(&self, index: u32) -> Option<&T> {
        self.slots.get(index as usize)?.value.as_ref()
    }

    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        self.slots.get_mut(index as usize)?.value.as_mut()
    }

    /// Takes an entry out to work on it; `put` or `release` follows.
    pub(crate) fn take(&mut self, index: u32) -> Option<T> {
        self.slots.get_mut(index as usize)?.value.take()
    }

    pub(crate) fn put(&mut self, index: u32, value: T) {
        if let Some(slot) = self.slots.get_mut(index as usize) {
            slot.value = Some(value);
        }
    }

    /// Frees a slot.
    pub(crate) fn release(&mut self, index: u32) {
        if let Some(slot) = self.slots.get_mut(index as usize)
            && slot.taken
        {
            slot.value = None;
            slot.taken = false;
            slot.generation = (slot.generation + 1) & GENERATION_MASK;
            self.free.push(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_does_not_outlive_its_entry() {
        let mut slab = Slab::new();
        let (index, name) = slab.reserve();
        slab.put(index, 'a');
        assert_eq!((slab.index(name), slab.get(index), slab.len()), (Some(index), Some(&'a'), 1));
        slab.release(index);
        slab.release(index);
        assert_eq!((slab.index(name), slab.get(index), slab.len()), (None, None, 0));
        let (again, other) = slab.reserve();
        assert!(again == index && other != name && slab.index(name).is_none());
    }
}
