//! The choice of the peer that is evicted when another one needs a connection: SIEVE.
//!
//! Y. Zhang, J. Yang, Y. Yue, Y. Vigfusson, K. V. Rashmi: *SIEVE is Simpler than LRU*, NSDI 2024. New entries
//! are inserted at the head of a queue; a hand moves from the tail towards the head, keeps and unmarks the
//! entries that were used since it last passed, and stops at the first one that was not. No entry is moved
//! when it is used.

/// Whether a key may be evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UseState {
    /// In use at this moment: it is not evicted.
    Busy,
    /// Used since the hand last passed; the mark is removed now.
    Used,
    /// It may be evicted.
    Idle,
}

/// Keys in the order of their insertion, oldest first. The marks are stored elsewhere, so that a use costs
/// one store.
#[derive(Debug, Default)]
pub(super) struct Sieve {
    keys: Vec<u32>,
    hand: usize,
}

impl Sieve {
    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    pub(super) fn insert(&mut self, key: u32) {
        self.keys.push(key);
    }

    pub(super) fn remove(&mut self, key: u32) {
        if let Some(at) = self.keys.iter().position(|&known| known == key) {
            self.keys.remove(at);
            if at < self.hand {
                self.hand -= 1;
            }
        }
    }

    /// The next key to evict; `None`: all are busy. It stays in the queue until it is removed.
    pub(super) fn victim(&mut self, mut use_state: impl FnMut(u32) -> UseState) -> Option<u32> {
        // The first round may only remove marks; the second one finds a key.
        for _ in 0..2 * self.keys.len() {
            if self.hand >= self.keys.len() {
                self.hand = 0;
            }
            let key = self.keys[self.hand];
            match use_state(key) {
                UseState::Idle => return Some(key),
                UseState::Busy | UseState::Used => self.hand += 1,
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_used_key_is_kept_once() {
        let mut sieve = Sieve::default();
        (0..4).for_each(|key| sieve.insert(key));
        let mut used = vec![0, 1];
        let mut victim = |sieve: &mut Sieve| {
            sieve.victim(|key| match used.iter().position(|&marked| marked == key) {
                Some(at) => {
                    used.swap_remove(at);
                    UseState::Used
                }
                None => UseState::Idle,
            })
        };
        assert_eq!(victim(&mut sieve), Some(2));
        sieve.remove(2);
        sieve.insert(4);
        assert_eq!(victim(&mut sieve), Some(3));
        sieve.remove(3);
        assert_eq!(victim(&mut sieve), Some(4));
        sieve.remove(4);
        assert_eq!((victim(&mut sieve), sieve.len()), (Some(0), 2));
    }

    #[test]
    fn a_busy_key_is_never_evicted() {
        let mut sieve = Sieve::default();
        (0..3).for_each(|key| sieve.insert(key));
        let only = |free| move |key| if key == free { UseState::Idle } else { UseState::Busy };
        assert_eq!((sieve.victim(only(1)), sieve.victim(only(9))), (Some(1), None));
        assert_eq!(Sieve::default().victim(only(0)), None);
    }
}
