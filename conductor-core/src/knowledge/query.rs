//! Answers: from block keys to instances.

use alloc::vec::Vec;

use crate::index::Index;
use crate::{BlockKey, ContextId, EngineHash, InstanceMatch, OwnerId, Tier};

use super::context::{ContextState, Rank};
use super::{Knowledge, Matches, RankMatch};

/// Parts of what was learnt.
pub const PARTS: usize = crate::index::BUCKETS;

/// Tiers of an instance, the fastest first.
const TIERS: [Tier; 3] = [Tier::Gpu, Tier::Cpu, Tier::Disk];

impl Knowledge {
    /// How much of a prompt, whose blocks have `keys`, each instance and the store have, as far as their
    /// publishers are served. With `assumed`, what was assumed counts for its GPU. An unknown context has no
    /// matches.
    pub fn query(&self, context: ContextId, keys: &[BlockKey], assumed: bool, out: &mut Matches) {
        out.instances.clear();
        out.ranks.clear();
        out.store = 0;
        let Some(state) = self.contexts.get(context.0 as usize) else { return };
        if assumed {
            state.index.query_with_assumed(keys, &mut out.owners);
        } else {
            state.index.query(keys, &mut out.owners);
        }
        out.blocks.clear();
        out.blocks.resize(state.owners.len(), 0);
        out.touched.clear();
        for found in &out.owners {
            let Some(Some(owner)) = state.owners.get(found.owner.0 as usize) else { continue };
            out.blocks[found.owner.0 as usize] = found.blocks;
            out.touched.push(owner.rank);
        }
        out.touched.sort_unstable();
        out.touched.dedup();
        for at in &out.touched {
            let Some(rank) = state.rank(*at).filter(|rank| rank.served) else { continue };
            if let Some(store) = blocks_of(rank, Tier::Store, &out.blocks) {
                out.store = out.store.max(store);
            }
            let found = matched(state, rank, keys, &out.blocks);
            if found.disk != 0 {
                out.ranks.push(found);
            }
        }
        out.ranks.sort_unstable_by_key(|rank| (rank.instance, rank.dp_rank));
        summarize(&out.ranks, &mut out.instances);
    }

    /// The hashes of engines for blocks for which `wanted` is true: those in one of [`PARTS`] parts of what
    /// was learnt, so that a search through all of it need not be made at once. Appends pairs to `out`.
    pub fn hashes_of(
        &self,
        context: ContextId,
        part: usize,
        wanted: impl Fn(BlockKey) -> bool,
        out: &mut Vec<(BlockKey, EngineHash)>,
    ) {
        let Some(state) = self.contexts.get(context.0 as usize).filter(|_| part < PARTS) else { return };
        out.extend(state.learned.part(part).filter(|(_, key)| wanted(*key)).map(|(hash, key)| (key, hash)));
    }

    /// The keys of blocks that have the engines' `hashes`, as far as they are known, from the first on.
    /// `keys` is emptied first.
    pub fn keys_of(&self, context: ContextId, hashes: &[EngineHash], keys: &mut Vec<BlockKey>) {
        keys.clear();
        let Some(state) = self.contexts.get(context.0 as usize) else { return };
        let mut disputed = false;
        for hash in hashes {
            let mut candidates = state.learned.get(*hash);
            let Some(first) = candidates.next() else { return };
            let second = candidates.next();
            disputed |= second.is_some();
            let mut key = Some(first);
            if disputed {
                // Engines disagree: it is the block that follows the one before it, if that is a single one.
                let follows = |key: &BlockKey| state.index.follows(keys.last().copied(), *key);
                let mut fits = [first].into_iter().chain(second).chain(candidates).filter(follows);
                key = fits.next().xor(fits.next());
            }
            let Some(key) = key else { return };
            keys.push(key);
        }
    }
}

/// What a rank has; each number counts the tiers up to its own together.
fn matched(state: &ContextState, rank: &Rank, keys: &[BlockKey], blocks: &[u32]) -> RankMatch {
    let mut counts = [0; TIERS.len()];
    let mut together = 0;
    for (i, tier) in TIERS.iter().enumerate() {
        if let Some(alone) = blocks_of(rank, *tier, blocks) {
            together = together.max(alone);
            if i != 0 {
                together = extended(&state.index, rank, &TIERS[..=i], keys, together);
            }
        }
        counts[i] = together;
    }
    if rank.looks_ahead {
        // Of each block but the last one, the block behind it shows that the token behind it is the prompt's.
        counts = counts.map(|blocks| blocks.saturating_sub(1));
    }
    let [gpu, cpu, disk] = counts;
    RankMatch { instance: rank.instance, dp_rank: rank.dp_rank, gpu, cpu, disk }
}

/// Blocks from the beginning that every attention group of a tier has; `None` for a tier without owners.
fn blocks_of(rank: &Rank, tier: Tier, blocks: &[u32]) -> Option<u32> {
    let of = |(_, owner): &(u32, OwnerId)| blocks.get(owner.0 as usize).copied().unwrap_or_default();
    rank.tiers[tier as usize].iter().map(of).min()
}

/// Goes on from `from` as long as one of the tiers has the next block.
fn extended(index: &Index, rank: &Rank, tiers: &[Tier], keys: &[BlockKey], from: u32) -> u32 {
    let has = |tier: &Tier, key: BlockKey| {
        let groups = &rank.tiers[*tier as usize];
        !groups.is_empty() && groups.iter().all(|(_, owner)| index.holds(*owner, key))
    };
    let rest = keys.iter().skip(from as usize);
    let more = rest.take_while(|key| tiers.iter().any(|tier| has(tier, **key))).count();
    from + more as u32
}

/// The best rank of each instance.
fn summarize(ranks: &[RankMatch], out: &mut Vec<InstanceMatch>) {
    for rank in ranks {
        if out.last().is_none_or(|last| last.instance != rank.instance) {
            out.push(InstanceMatch {
                instance: rank.instance,
                dp_rank: rank.dp_rank,
                ..InstanceMatch::default()
            });
        }
        let Some(best) = out.last_mut() else { continue };
        if rank.gpu > best.gpu {
            (best.gpu, best.dp_rank) = (rank.gpu, rank.dp_rank);
        }
        best.cpu = best.cpu.max(rank.cpu);
        best.disk = best.disk.max(rank.disk);
    }
}
