//! The blocks that a node caches: least recently used first out.

const NONE: u32 = u32::MAX;

/// A set of blocks with a capacity. Blocks are dense numbers, so the list is two arrays.
#[derive(Clone, Debug)]
pub(crate) struct Lru {
    /// The neighbours of each block; both are the block itself when it is absent.
    older: Vec<u32>,
    newer: Vec<u32>,
    oldest: u32,
    newest: u32,
    len: usize,
    capacity: usize,
}

impl Lru {
    /// An empty cache for `capacity` of `blocks` blocks.
    pub(crate) fn new(blocks: usize, capacity: usize) -> Self {
        let absent: Vec<u32> = (0..blocks as u32).collect();
        Self { older: absent.clone(), newer: absent, oldest: NONE, newest: NONE, len: 0, capacity }
    }

    pub(crate) fn contains(&self, block: u32) -> bool {
        self.older[block as usize] != block
    }

    /// The number of blocks of `prompt` that are here, from the first and without a gap.
    pub(crate) fn matched(&self, prompt: &[u32]) -> usize {
        prompt.iter().position(|block| !self.contains(*block)).unwrap_or(prompt.len())
    }

    /// Makes the blocks of a prompt the most recently used, the first block last, so that a prompt's tail
    /// goes before its head. What does not fit even into an empty cache is left out. Evicted blocks are
    /// added to `evicted`; returns the blocks of the prompt that are here now, and how many of them, the
    /// last ones, are new.
    pub(crate) fn touch(&mut self, prompt: &[u32], evicted: &mut Vec<u32>) -> (usize, usize) {
        let prompt = &prompt[..prompt.len().min(self.capacity)];
        let mut added = 0;
        for block in prompt.iter().rev() {
            if self.contains(*block) {
                self.unlink(*block);
            } else {
                added += 1;
            }
            self.link(*block);
        }
        while self.len > self.capacity {
            let block = self.oldest;
            self.unlink(block);
            evicted.push(block);
        }
        (prompt.len(), added)
    }

    fn link(&mut self, block: u32) {
        self.older[block as usize] = self.newest;
        self.newer[block as usize] = NONE;
        match self.newest {
            NONE => self.oldest = block,
            newest => self.newer[newest as usize] = block,
        }
        self.newest = block;
        self.len += 1;
    }

    fn unlink(&mut self, block: u32) {
        let (older, newer) = (self.older[block as usize], self.newer[block as usize]);
        match older {
            NONE => self.oldest = newer,
            older => self.newer[older as usize] = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.older[newer as usize] = older,
        }
        self.older[block as usize] = block;
        self.newer[block as usize] = block;
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    #[test]
    fn it_does_what_a_list_does() {
        let mut random = Random::new(3);
        let (mut lru, mut list) = (Lru::new(40, 10), Vec::new());
        for _ in 0..2_000 {
            let first = random.below(30) as u32;
            let prompt: Vec<u32> = (first..first + 1 + random.below(10) as u32).collect();
            let had = prompt.iter().filter(|block| list.contains(*block)).count();
            list.retain(|block| !prompt.contains(block));
            list.extend(prompt.iter().rev());
            let gone: Vec<u32> = list.drain(..list.len().saturating_sub(10)).collect();
            let mut evicted = Vec::new();
            assert_eq!(lru.touch(&prompt, &mut evicted), (prompt.len(), prompt.len() - had));
            assert_eq!(evicted, gone);
            assert!((0..40).all(|block| lru.contains(block) == list.contains(&block)));
            assert_eq!(lru.matched(&prompt), prompt.len());
        }
    }

    #[test]
    fn what_does_not_fit_is_left_out() {
        let mut lru = Lru::new(4, 2);
        assert_eq!(lru.touch(&[0, 1, 2, 3], &mut Vec::new()), (2, 2));
        assert_eq!(lru.matched(&[0, 1, 2, 3]), 2);
        assert_eq!(Lru::new(4, 0).touch(&[0], &mut Vec::new()), (0, 0));
    }
}
