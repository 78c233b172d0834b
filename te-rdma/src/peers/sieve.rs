//! Which connected peer gives way when another wants its place: SIEVE.
//!
//! Y. Zhang, J. Yang, Y. Yue, Y. Vigfusson, K. V. Rashmi: *SIEVE is Simpler than LRU*, NSDI 2024. Newcomers
//! enter at the head of a queue; a hand walks from the tail towards the head, spares and unmarks what was
//! used since it last came by, and stops at the first that was not. Nothing is moved when it is used.

/// What a key's owner says when the hand comes by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sign {
    /// In use at this moment: it may not go.
    Busy,
    /// Used since the hand last came by; the owner has taken the mark off.
    Used,
    /// It may go.
    Idle,
}

/// Keys in the order in which they came, oldest first. The marks are with their owners, so that a use costs
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

    /// The next to go among those that may; `None`: none may. It stays until it is removed.
    pub(super) fn victim(&mut self, mut sign: impl FnMut(u32) -> Sign) -> Option<u32> {
        // One round may only take marks off, the next one finds.
        for _ in 0..2 * self.keys.len() {
            if self.hand >= self.keys.len() {
                self.hand = 0;
            }
            let key = self.keys[self.hand];
            match sign(key) {
                Sign::Idle => return Some(key),
                Sign::Busy | Sign::Used => self.hand += 1,
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_is_spared_once() {
        let mut sieve = Sieve::default();
        (0..4).for_each(|key| sieve.insert(key));
        let mut used = vec![0, 1];
        let mut victim = |sieve: &mut Sieve| {
            sieve.victim(|key| match used.iter().position(|&marked| marked == key) {
                Some(at) => {
                    used.swap_remove(at);
                    Sign::Used
                }
                None => Sign::Idle,
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
    fn what_is_busy_never_goes() {
        let mut sieve = Sieve::default();
        (0..3).for_each(|key| sieve.insert(key));
        let only = |free| move |key| if key == free { Sign::Idle } else { Sign::Busy };
        assert_eq!((sieve.victim(only(1)), sieve.victim(only(9))), (Some(1), None));
        assert_eq!(Sieve::default().victim(only(0)), None);
    }
}
