//! One context: its index, what was learnt of hashes, and who its owners are.

use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use te_core::Instant;

use crate::index::Index;
use crate::learned::Learned;
use crate::{Context, ContextId, EngineHash, InstanceId, OwnerId, Tier};

use super::{BlockKey, OwnerDigest, Settings};

/// An owner, from the side of the index.
#[derive(Clone, Copy, Debug)]
pub(super) struct Owner {
    pub(super) rank: u32,
    pub(super) tier: Tier,
    pub(super) group: u32,
}

/// The group of a GPU of which blocks are assumed and no event has told a group: the first one that is told.
const GROUP_UNKNOWN: u32 = u32::MAX;

/// A rank of a publisher, and its owners.
#[derive(Debug)]
pub(super) struct Rank {
    pub(super) instance: InstanceId,
    pub(super) dp_rank: u32,
    pub(super) served: bool,
    /// Its blocks depend on the token behind them, which their keys do not have.
    pub(super) looks_ahead: bool,
    /// Per tier, an owner per attention group.
    pub(super) tiers: [Vec<(u32, OwnerId)>; Tier::ALL.len()],
}

#[derive(Debug)]
pub(super) struct ContextState {
    pub(super) context: Context,
    pub(super) index: Index,
    pub(super) learned: Learned,
    pub(super) owners: Vec<Option<Owner>>,
    pub(super) ranks: Vec<Option<Rank>>,
    /// Learnt hashes to look at, since blocks left the index after their last visit.
    pub(super) unswept: usize,
    /// Publishers that are registered for it.
    pub(super) publishers: usize,
    /// Since when there is none; `None` as well until the next tick after the last one left.
    pub(super) idle_since: Option<Instant>,
}

impl ContextState {
    pub(super) fn new(context: Context, settings: &Settings) -> Self {
        Self {
            context,
            index: Index::new(settings.index.clone()),
            learned: Learned::new(settings.learned_max),
            owners: Vec::new(),
            ranks: Vec::new(),
            unswept: 0,
            publishers: 0,
            idle_since: None,
        }
    }

    /// The place of one that was freed.
    pub(super) fn vacant(settings: &Settings) -> Self {
        Self::new(Context { tenant: String::new(), model: String::new(), block_tokens: 0 }, settings)
    }

    /// Whether it was freed. Tokens per block are never 0 otherwise.
    pub(super) const fn is_vacant(&self) -> bool {
        self.context.block_tokens == 0
    }

    /// A publisher was registered for it.
    pub(super) fn joined(&mut self) {
        self.publishers += 1;
        self.idle_since = None;
    }

    /// A publisher was unregistered.
    pub(super) fn left(&mut self) {
        self.publishers -= 1;
    }

    /// How long it has had no publisher; `None`: it has one, or is vacant.
    pub(super) fn idle(&mut self, now: Instant) -> Option<Duration> {
        (self.publishers == 0 && !self.is_vacant()).then(|| now - *self.idle_since.get_or_insert(now))
    }

    pub(super) fn new_rank(&mut self, rank: Rank) -> u32 {
        put(&mut self.ranks, rank)
    }

    pub(super) fn rank(&self, rank: u32) -> Option<&Rank> {
        self.ranks.get(rank as usize)?.as_ref()
    }

    /// The owner of a rank's tier and group, if there is one.
    pub(super) fn owner(&self, rank: u32, tier: Tier, group: u32) -> Option<OwnerId> {
        let groups = &self.rank(rank)?.tiers[tier as usize];
        groups.iter().find(|(of, _)| *of == group).map(|(_, owner)| *owner)
    }

    /// As [`Self::owner`], made if it is missing; `None` beyond `groups_max`.
    pub(super) fn owner_or_new(
        &mut self,
        rank: u32,
        tier: Tier,
        group: u32,
        groups_max: usize,
    ) -> Option<OwnerId> {
        if let Some(owner) = self.owner(rank, tier, group) {
            return Some(owner);
        }
        let groups = &mut self.ranks.get_mut(rank as usize)?.as_mut()?.tiers[tier as usize];
        if let Some((unknown, owner)) = groups.first_mut().filter(|(group, _)| *group == GROUP_UNKNOWN) {
            // Now it is known.
            *unknown = group;
            self.owners.get_mut(owner.0 as usize)?.as_mut()?.group = group;
            return Some(*owner);
        }
        if groups.len() >= groups_max {
            return None;
        }
        let owner = OwnerId(put(&mut self.owners, Owner { rank, tier, group }));
        groups.push((group, owner));
        Some(owner)
    }

    /// Assumes blocks of every group of the GPU of an instance's rank. Returns how many are new.
    pub(super) fn assume(
        &mut self,
        (instance, dp_rank): (InstanceId, u32),
        keys: &[BlockKey],
        until: Instant,
    ) -> usize {
        let is = |rank: &Rank| rank.instance == instance && rank.dp_rank == dp_rank;
        let Some(at) = self.ranks.iter().position(|rank| rank.as_ref().is_some_and(is)) else { return 0 };
        let Some(rank) = self.rank(at as u32) else { return 0 };
        if rank.tiers[Tier::Gpu as usize].is_empty() {
            self.owner_or_new(at as u32, Tier::Gpu, GROUP_UNKNOWN, 1);
        }
        let Self { index, ranks, .. } = self;
        let groups = ranks[at].as_ref().map_or(&[][..], |rank| &rank.tiers[Tier::Gpu as usize]);
        groups.iter().map(|(_, owner)| index.assumed(*owner, keys, until)).max().unwrap_or(0)
    }

    pub(super) fn clear_rank(&mut self, rank: u32) {
        let Some(rank) = self.ranks.get(rank as usize).and_then(Option::as_ref) else { return };
        for (_, owner) in rank.tiers.iter().flatten() {
            self.index.cleared(*owner);
        }
        self.unswept = usize::MAX;
    }

    pub(super) fn serve_rank(&mut self, rank: u32, served: bool) {
        if let Some(Some(rank)) = self.ranks.get_mut(rank as usize) {
            rank.served = served;
        }
    }

    /// Takes a rank out; its numbers may be used again.
    pub(super) fn drop_rank(&mut self, rank: u32) {
        self.clear_rank(rank);
        let Some(rank) = self.ranks.get_mut(rank as usize).and_then(Option::take) else { return };
        for (_, owner) in rank.tiers.iter().flatten() {
            self.owners[owner.0 as usize] = None;
        }
    }

    /// The block that an engine's hash stands for, from the view of a rank: where engines disagree, the block
    /// that one of the rank's owners has.
    pub(super) fn key_of(&self, hash: EngineHash, rank: u32) -> Option<BlockKey> {
        let mut keys = self.learned.get(hash);
        let first = keys.next()?;
        let Some(second) = keys.next() else { return Some(first) };
        let rank = self.rank(rank)?;
        let has =
            |key: &BlockKey| rank.tiers.iter().flatten().any(|(_, owner)| self.index.holds(*owner, *key));
        [first, second].into_iter().chain(keys).find(has)
    }

    /// Forgets hashes whose blocks are gone, of the `unswept` that may be so; looks at `budget` of them, at
    /// more when most are gone. Returns at how many.
    pub(super) fn sweep_learned(&mut self, unswept: usize, budget: usize) -> usize {
        let known = self.learned.len();
        let most_are_gone = known / 2 > self.index.blocks();
        let visits = unswept.min(known).min(if most_are_gone { budget.saturating_mul(4) } else { budget });
        self.unswept = unswept.min(known) - visits;
        let Self { index, learned, .. } = self;
        learned.sweep(visits, |key| index.contains(key));
        visits
    }

    pub(super) fn digests(&self, context: ContextId, out: &mut Vec<OwnerDigest>) {
        for (id, owner) in (0..).map(OwnerId).zip(&self.owners) {
            let Some(owner) = owner else { continue };
            let Some(rank) = self.rank(owner.rank) else { continue };
            let digest = OwnerDigest {
                context,
                instance: rank.instance,
                dp_rank: rank.dp_rank,
                tier: owner.tier,
                group: owner.group,
                blocks: 0,
                sum: 0,
            };
            out.push(digest.with(self.index.digest(id)));
        }
    }
}

/// Puts a value into the first free place.
fn put<T>(places: &mut Vec<Option<T>>, value: T) -> u32 {
    let at = places.iter().position(Option::is_none).unwrap_or(places.len());
    if at == places.len() {
        places.push(None);
    }
    places[at] = Some(value);
    at as u32
}
