//! Which slots of a stager are taken. Sans-IO; nothing allocates after `new`.

/// The state of the slots of a stager.
#[derive(Debug)]
pub(crate) struct Slots {
    /// The numbers of the free ones; the last is taken next, because it is the warmest in the caches.
    free: Vec<u32>,
    taken: Vec<bool>,
}

impl Slots {
    pub(crate) fn new(count: u32) -> Self {
        Self { free: (0..count).rev().collect(), taken: vec![false; count as usize] }
    }

    pub(crate) fn take(&mut self) -> Option<u32> {
        let slot = self.free.pop()?;
        self.taken[slot as usize] = true;
        Some(slot)
    }

    /// Frees a slot that is taken; one that is not stays as it is.
    pub(crate) fn give_back(&mut self, slot: u32) {
        if let Some(taken @ true) = self.taken.get_mut(slot as usize) {
            *taken = false;
            self.free.push(slot);
        } else {
            debug_assert!(false, "slot {slot} is given back and was not taken");
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.taken.len()
    }

    pub(crate) fn is_taken(&self, slot: u32) -> bool {
        self.taken.get(slot as usize) == Some(&true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_slot_is_taken_once_and_the_last_that_came_back_is_next() {
        let mut slots = Slots::new(3);
        assert_eq!(
            [slots.take(), slots.take(), slots.take(), slots.take()],
            [Some(0), Some(1), Some(2), None]
        );
        slots.give_back(1);
        assert!(slots.is_taken(0) && !slots.is_taken(1) && !slots.is_taken(3));
        assert_eq!((slots.take(), slots.take()), (Some(1), None));
    }
}
