//! The truth: prompts, and engines with caches that say what they do.

use std::collections::{BTreeMap, BTreeSet};

use conductor_core::events::encode::{Layout, encode};
use conductor_core::events::{Event, Extra, Removed, Source, Stored};
use conductor_core::hash::{Chain, Root};
use conductor_core::{BlockKey, EngineHash, Tier};
use te_core::testkit::Rng;

/// Tokens per block.
pub(crate) const BLOCK_TOKENS: u32 = 2;
pub(crate) const TIERS: [Tier; 3] = [Tier::Gpu, Tier::Cpu, Tier::Disk];
/// Adapter and salt of prompts. Only SGLang's events have a salt.
const ROOTS: [(Option<&str>, Option<&str>); 3] =
    [(None, None), (Some("adapter"), None), (None, Some("salt"))];

/// A block of a prompt.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub(crate) parent: Option<usize>,
    pub(crate) key: BlockKey,
    root: usize,
    tokens: [u32; BLOCK_TOKENS as usize],
}

/// Every prompt that is ever served, as trees of blocks.
#[derive(Debug)]
pub(crate) struct Prompts {
    pub(crate) blocks: Vec<Block>,
    /// Each prompt, as its blocks.
    pub(crate) prompts: Vec<Vec<usize>>,
    /// The keys of each prompt.
    pub(crate) keys: Vec<Vec<BlockKey>>,
}

impl Prompts {
    pub(crate) fn new(rng: &mut Rng) -> Self {
        let mut blocks: Vec<Block> = Vec::new();
        let mut chains: Vec<Chain> = Vec::new();
        for i in 0..36_usize {
            // The first blocks begin a tree each; later ones often continue the newest, which makes prompts
            // long.
            let parent = (i >= 5).then(|| if rng.index(3) == 0 { rng.index(i) } else { i - 1 });
            let root = parent.map_or(i % ROOTS.len(), |parent| blocks[parent].root);
            let (lora, salt) = ROOTS[root];
            let mut chain = parent.map_or(Chain::new(&Root::of(0, lora, salt)), |parent| chains[parent]);
            // Trees of different roots have the same tokens.
            let tokens = [parent.map_or((i / ROOTS.len()) as u32, |_| i as u32), 7];
            let key = chain.push(&tokens);
            chains.push(chain);
            blocks.push(Block { parent, key, root, tokens });
        }
        let is_leaf = |i: &usize| !blocks.iter().any(|block| block.parent == Some(*i));
        let leaves: Vec<usize> = (0..blocks.len()).filter(is_leaf).collect();
        let path = |leaf: usize| {
            let mut path = vec![leaf];
            while let Some(parent) = blocks[path[path.len() - 1]].parent {
                path.push(parent);
            }
            path.reverse();
            path
        };
        let prompts: Vec<Vec<usize>> = leaves.into_iter().map(path).collect();
        let keys =
            prompts.iter().map(|prompt| prompt.iter().map(|block| blocks[*block].key).collect()).collect();
        Self { blocks, prompts, keys }
    }
}

/// What an event of an engine means.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Store(usize, Vec<usize>),
    Remove(usize, Vec<usize>),
    Clear,
}

/// The blocks of a rank, per tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Truth(pub(crate) [BTreeSet<usize>; 3]);

impl Truth {
    pub(crate) fn apply(&mut self, op: &Op) {
        match op {
            Op::Store(tier, blocks) => self.0[*tier].extend(blocks),
            Op::Remove(tier, blocks) => self.0[*tier].retain(|block| !blocks.contains(block)),
            Op::Clear => *self = Self::default(),
        }
    }

    /// How much of a prompt is on the first 1, 2 and 3 tiers.
    pub(crate) fn matched(&self, prompt: &[usize]) -> [u32; 3] {
        [1, 2, 3].map(|tiers| {
            let has = |block: &&usize| self.0[..tiers].iter().any(|tier| tier.contains(block));
            prompt.iter().take_while(has).count() as u32
        })
    }
}

/// A rank of an engine: its caches with the time of their last use, and how it says what it does.
#[derive(Debug)]
pub(crate) struct Rank {
    caches: [BTreeMap<usize, u64>; 3],
    capacity: [usize; 3],
    clock: u64,
    pub(crate) layout: Layout,
    pub(crate) dp_rank: u32,
    /// What makes its hashes differ from those of other engines.
    hash_seed: u64,
}

impl Rank {
    pub(crate) fn new(rng: &mut Rng, dp_rank: u32) -> Self {
        let layouts = [Layout::VllmArrays, Layout::VllmMaps, Layout::Sglang, Layout::Mooncake];
        Self {
            caches: Default::default(),
            capacity: [4 + rng.index(12), rng.index(12), rng.index(12)],
            clock: 0,
            layout: layouts[rng.index(4)],
            dp_rank,
            hash_seed: rng.below(2),
        }
    }

    pub(crate) fn restart(&mut self) {
        self.caches = Default::default();
    }

    /// Serves a prompt or does something else; returns what its events will say.
    pub(crate) fn act(&mut self, rng: &mut Rng, prompts: &Prompts) -> Vec<Op> {
        let mut ops = Vec::new();
        if rng.index(60) == 0 {
            self.caches = Default::default();
            ops.push(Op::Clear);
            return ops;
        }
        for _ in 0..=rng.index(2) {
            let prompt = &prompts.prompts[rng.index(prompts.prompts.len())];
            let salted = ROOTS[prompts.blocks[prompt[0]].root].1.is_some();
            if salted && self.layout != Layout::Sglang {
                continue;
            }
            self.clock += 1;
            let cached = prompt.iter().take_while(|block| self.caches[0].contains_key(block)).count();
            let new: Vec<usize> = prompt[cached..].to_vec();
            self.caches[0].extend(prompt.iter().map(|block| (*block, self.clock)));
            if !new.is_empty() {
                ops.push(Op::Store(0, new));
            }
        }
        for tier in 0..3 {
            self.shrink(tier, prompts, &mut ops);
        }
        ops
    }

    /// Evicts what is beyond the capacity of a tier, down to the next one. The GPU evicts ends of chains
    /// first, the others what was not used for longest, whatever depends on it.
    fn shrink(&mut self, tier: usize, prompts: &Prompts, ops: &mut Vec<Op>) {
        let mut removed = Vec::new();
        while self.caches[tier].len() > self.capacity[tier] {
            let cache = &self.caches[tier];
            let is_end =
                |block: &usize| !cache.keys().any(|other| prompts.blocks[*other].parent == Some(*block));
            let candidates = cache.iter().filter(|(block, _)| tier != 0 || is_end(block));
            let Some((&block, _)) = candidates.min_by_key(|(block, used)| (**used, **block)) else { break };
            let parent = prompts.blocks[block].parent;
            let follows =
                parent.is_none_or(|parent| self.caches.iter().any(|cache| cache.contains_key(&parent)));
            if tier < 2 && self.capacity[tier + 1] > 0 && follows {
                self.caches[tier + 1].insert(block, self.clock);
                ops.push(Op::Store(tier + 1, vec![block]));
            }
            self.caches[tier].remove(&block);
            removed.push(block);
        }
        if !removed.is_empty() {
            ops.push(Op::Remove(tier, removed));
        }
    }

    fn hash(&self, prompts: &Prompts, block: usize) -> EngineHash {
        EngineHash(
            prompts.blocks[block].key.0.rotate_left(17).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ self.hash_seed,
        )
    }

    /// The payload that says `ops`. `published` makes it differ from all others.
    pub(crate) fn payload(&self, rng: &mut Rng, prompts: &Prompts, ops: &[Op], published: f64) -> Vec<u8> {
        let hashes: Vec<Vec<EngineHash>> = ops
            .iter()
            .map(|op| match op {
                Op::Store(_, blocks) | Op::Remove(_, blocks) => {
                    blocks.iter().map(|block| self.hash(prompts, *block)).collect()
                }
                Op::Clear => Vec::new(),
            })
            .collect();
        let tokens: Vec<Vec<u32>> = ops
            .iter()
            .map(|op| match op {
                // What moves down is often announced without its tokens.
                Op::Store(tier, blocks) if *tier == 0 || rng.index(2) == 0 => {
                    blocks.iter().flat_map(|block| prompts.blocks[*block].tokens).collect()
                }
                _ => Vec::new(),
            })
            .collect();
        let events: Vec<Event<'_>> = ops
            .iter()
            .enumerate()
            .map(|(i, op)| match op {
                Op::Store(tier, blocks) => {
                    let first = &prompts.blocks[blocks[0]];
                    let (lora, salt) = ROOTS[first.root];
                    Event::Stored(Stored {
                        hashes: &hashes[i],
                        parent: first.parent.map(|parent| self.hash(prompts, parent)),
                        tokens: &tokens[i],
                        block_tokens: if tokens[i].is_empty() { 0 } else { BLOCK_TOKENS },
                        lora,
                        salt,
                        extra: Extra::default(),
                        tier: TIERS[*tier],
                        group: None,
                        source: Source::default(),
                    })
                }
                Op::Remove(tier, _) => Event::Removed(Removed {
                    hashes: &hashes[i],
                    tier: TIERS[*tier],
                    group: None,
                    source: Source::default(),
                }),
                Op::Clear => Event::Cleared(Source::default()),
            })
            .collect();
        let mut payload = Vec::new();
        encode(self.layout, published, Some(self.dp_rank), &events, &mut payload);
        payload
    }
}
