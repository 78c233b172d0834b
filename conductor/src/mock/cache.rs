//! The blocks that a mock engine holds: tiers with a capacity each, and the least recently used block leaves.
//!
//! ```text
//!   insert ──▶ GPU ── evicted ──▶ CPU ── evicted ──▶ disk ── evicted ──▶ gone
//!               ▲                  │                  │
//!               └──── acquire ─────┴──────────────────┘   (a copy stays below)
//! ```
//!
//! Blocks that a running request uses are not evicted. Of blocks that were released together, the deepest
//! leaves first, as in vLLM, so that what stays is a prefix. Each change is an [`Event`].

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use conductor_core::{EngineHash, Tier};

/// Tiers of a mock engine, the fastest first.
const TIERS: [Tier; 3] = [Tier::Gpu, Tier::Cpu, Tier::Disk];

/// A change of what is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A block came to a tier.
    Stored {
        tier: Tier,
        hash: EngineHash,
        parent: Option<EngineHash>,
        tokens: Arc<[u32]>,
        /// The salt of its prompt.
        salt: Option<Arc<str>>,
    },
    /// A block left a tier.
    Removed { tier: Tier, hash: EngineHash },
    /// Everything left.
    Cleared,
}

#[derive(Debug)]
struct Block {
    parent: Option<EngineHash>,
    tokens: Arc<[u32]>,
    salt: Option<Arc<str>>,
    depth: u32,
    /// Running requests that use it.
    users: u32,
    /// When it was last used, for each tier that has it.
    held: [Option<u64>; TIERS.len()],
}

/// Evictable blocks, the next to leave first.
type Queue = BTreeMap<(u64, Reverse<u32>, EngineHash), ()>;

/// The blocks of an engine. Not thread-safe, no clock: "recent" is the order of the calls.
#[derive(Debug)]
pub(crate) struct BlockCache {
    blocks: HashMap<EngineHash, Block>,
    capacity: [usize; TIERS.len()],
    held: [usize; TIERS.len()],
    queues: [Queue; TIERS.len()],
    clock: u64,
    events: Vec<Event>,
}

impl BlockCache {
    /// An empty cache. Capacities are numbers of blocks.
    pub(crate) fn new(gpu: usize, cpu: usize, disk: usize) -> Self {
        Self {
            blocks: HashMap::new(),
            capacity: [gpu, cpu, disk],
            held: [0; TIERS.len()],
            queues: Default::default(),
            clock: 0,
            events: Vec::new(),
        }
    }

    /// How many of these blocks, from the first without a gap, are in the GPU's memory, and on any tier.
    pub(crate) fn matched(&self, hashes: &[EngineHash]) -> (usize, usize) {
        let has = |hash: &EngineHash, tiers: &[usize]| {
            self.blocks.get(hash).is_some_and(|block| tiers.iter().any(|&tier| block.held[tier].is_some()))
        };
        let gpu = hashes.iter().take_while(|hash| has(hash, &[0])).count();
        let any = hashes.iter().take_while(|hash| has(hash, &[0, 1, 2])).count();
        (gpu, any)
    }

    /// Blocks that could be inserted now.
    pub(crate) fn room(&self) -> usize {
        self.capacity[0] - self.held[0] + self.queues[0].len()
    }

    /// Blocks in the GPU's memory, and their most.
    pub(crate) fn gpu(&self) -> (usize, usize) {
        (self.held[0], self.capacity[0])
    }

    /// A running request uses a block: it is brought to the GPU's memory if it is below. Returns false when
    /// it is not held at all, or when no room can be made.
    pub(crate) fn acquire(&mut self, hash: EngineHash) -> bool {
        let Some(block) = self.blocks.get_mut(&hash) else { return false };
        let (depth, on_gpu) = (block.depth, block.held[0]);
        block.users += 1;
        if let Some(stamp) = on_gpu {
            self.queues[0].remove(&(stamp, Reverse(depth), hash));
            return true;
        }
        if !self.make_room(0) {
            self.unuse(hash);
            return false;
        }
        self.place(0, hash);
        true
    }

    /// A running request has computed a block. Returns false when no room can be made; the block is then not
    /// kept.
    pub(crate) fn insert(
        &mut self,
        hash: EngineHash,
        parent: Option<EngineHash>,
        tokens: &[u32],
        salt: Option<&Arc<str>>,
    ) -> bool {
        if self.blocks.contains_key(&hash) {
            return self.acquire(hash);
        }
        if !self.make_room(0) {
            return false;
        }
        let depth = parent.and_then(|parent| self.blocks.get(&parent)).map_or(0, |parent| parent.depth + 1);
        let (tokens, salt) = (tokens.into(), salt.cloned());
        let block = Block { parent, tokens, salt, depth, users: 1, held: Default::default() };
        self.blocks.insert(hash, block);
        self.place(0, hash);
        true
    }

    /// A request that used these blocks has ended: they may be evicted from now on.
    pub(crate) fn release(&mut self, hashes: &[EngineHash]) {
        self.clock += 1;
        for &hash in hashes {
            self.unuse(hash);
        }
    }

    /// Forgets everything that no running request uses. An engine that is asked to reset its cache does so.
    pub(crate) fn clear(&mut self) {
        self.blocks.retain(|_, block| block.users > 0);
        self.queues.iter_mut().for_each(BTreeMap::clear);
        self.held = [self.blocks.len(), 0, 0];
        for block in self.blocks.values_mut() {
            block.held = [block.held[0], None, None];
        }
        self.events.push(Event::Cleared);
        let kept: Vec<_> = self.blocks.keys().copied().collect();
        for hash in kept {
            self.stored(0, hash);
        }
    }

    /// What has changed since the last call.
    pub(crate) fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    fn unuse(&mut self, hash: EngineHash) {
        let clock = self.clock;
        let Some(block) = self.blocks.get_mut(&hash) else { return };
        block.users = block.users.saturating_sub(1);
        if block.users > 0 {
            return;
        }
        if let Some(stamp) = &mut block.held[0] {
            *stamp = clock;
            self.queues[0].insert((clock, Reverse(block.depth), hash), ());
        }
    }

    /// Makes room for one block on a tier.
    fn make_room(&mut self, tier: usize) -> bool {
        if self.held[tier] < self.capacity[tier] {
            return true;
        }
        let Some(((_, _, hash), ())) = self.queues[tier].pop_first() else { return false };
        self.held[tier] -= 1;
        if let Some(block) = self.blocks.get_mut(&hash) {
            block.held[tier] = None;
        }
        let below = tier + 1;
        let is_below =
            |cache: &Self| cache.blocks.get(&hash).is_some_and(|block| block.held[below].is_some());
        if below < TIERS.len() && self.capacity[below] > 0 && !is_below(self) && self.make_room(below) {
            self.place(below, hash);
        }
        self.events.push(Event::Removed { tier: TIERS[tier], hash });
        if self
            .blocks
            .get(&hash)
            .is_some_and(|block| block.users == 0 && block.held.iter().all(Option::is_none))
        {
            self.blocks.remove(&hash);
        }
        true
    }

    /// Puts a block on a tier that has room for it.
    fn place(&mut self, tier: usize, hash: EngineHash) {
        let clock = self.clock;
        let Some(block) = self.blocks.get_mut(&hash) else { return };
        block.held[tier] = Some(clock);
        if tier > 0 || block.users == 0 {
            self.queues[tier].insert((clock, Reverse(block.depth), hash), ());
        }
        self.held[tier] += 1;
        self.stored(tier, hash);
    }

    fn stored(&mut self, tier: usize, hash: EngineHash) {
        if let Some(block) = self.blocks.get(&hash) {
            let (tokens, salt) = (Arc::clone(&block.tokens), block.salt.clone());
            self.events.push(Event::Stored { tier: TIERS[tier], hash, parent: block.parent, tokens, salt });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn hashes(range: std::ops::Range<u64>) -> Vec<EngineHash> {
        range.map(EngineHash).collect()
    }

    fn compute(cache: &mut BlockCache, chain: &[EngineHash]) -> bool {
        let mut parent = None;
        for &hash in chain {
            if !cache.insert(hash, parent, &[1, 2], None) {
                return false;
            }
            parent = Some(hash);
        }
        true
    }

    /// What a reader of the events believes is held.
    fn believed(events: &[Event]) -> HashSet<(Tier, EngineHash)> {
        let mut held = HashSet::new();
        for event in events {
            match event {
                Event::Stored { tier, hash, .. } => assert!(held.insert((*tier, *hash)), "stored twice"),
                Event::Removed { tier, hash } => assert!(held.remove(&(*tier, *hash)), "was not held"),
                Event::Cleared => held.clear(),
            }
        }
        held
    }

    #[test]
    fn the_deepest_of_the_least_recent_blocks_leaves_first() {
        let mut cache = BlockCache::new(4, 0, 0);
        let (old, new) = (hashes(0..2), hashes(10..12));
        assert!(compute(&mut cache, &old));
        cache.release(&old);
        assert!(compute(&mut cache, &new));
        cache.release(&new);
        assert!(compute(&mut cache, &hashes(20..21)));
        assert_eq!((cache.matched(&old), cache.matched(&new)), ((1, 1), (2, 2)));
    }

    #[test]
    fn used_blocks_stay_and_too_many_are_refused() {
        let mut cache = BlockCache::new(2, 0, 0);
        assert!(compute(&mut cache, &hashes(0..2)));
        assert_eq!(cache.room(), 0);
        assert!(!compute(&mut cache, &hashes(5..6)));
        cache.release(&hashes(0..2));
        assert_eq!(cache.room(), 2);
        assert!(compute(&mut cache, &hashes(5..6)));
    }

    #[test]
    fn an_evicted_block_goes_down_and_comes_back_when_it_is_used() {
        let mut cache = BlockCache::new(2, 2, 1);
        let chains = [hashes(0..2), hashes(10..12), hashes(20..22)];
        for chain in &chains {
            assert!(compute(&mut cache, chain));
            cache.release(chain);
        }
        // The deepest of the first chain went on to the disk, and then from it to make room for its parent.
        assert_eq!(cache.matched(&chains[0]), (0, 1));
        assert_eq!(cache.matched(&chains[1]), (0, 2));
        assert!(cache.acquire(chains[1][0]));
        assert_eq!(cache.matched(&chains[1]), (1, 2));
    }

    #[test]
    fn events_tell_exactly_what_is_held() {
        let mut cache = BlockCache::new(6, 5, 3);
        let (mut events, mut random) = (Vec::new(), 7_u64);
        for round in 0..400 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let start = (random >> 33) % 40;
            let chain = hashes(start..start + 1 + (random >> 60) % 4);
            let used: Vec<_> = {
                let mut parent = None;
                let fits = |&hash: &EngineHash| {
                    let fits = cache.insert(hash, parent, &[3], None);
                    parent = Some(hash);
                    fits
                };
                chain.iter().copied().take_while(fits).collect()
            };
            cache.release(&used);
            if round == 200 {
                cache.clear();
            }
            events.extend(cache.take_events());
            let held: HashSet<_> = cache
                .blocks
                .iter()
                .flat_map(|(&hash, block)| {
                    let on = (0..3).filter(|&tier| block.held[tier].is_some());
                    on.map(move |tier| (TIERS[tier], hash)).collect::<Vec<_>>()
                })
                .collect();
            assert_eq!(believed(&events), held, "round {round}");
            for (tier, name) in TIERS.iter().enumerate() {
                let on = held.iter().filter(|(on, _)| on == name).count();
                assert_eq!(on, cache.held[tier]);
                assert!(on <= cache.capacity[tier]);
            }
        }
    }
}
