//! From a message to the index.

use alloc::vec::Vec;
use core::mem;

use crate::events::{Batch, BatchError, Decoded, Decoder, Event, Removed, Skipped, Source, Stored};
use crate::hash::{Chain, Root};
use crate::index::TOUCHED;
use crate::learned::Learnt;
use crate::stream::FenceReason;
use crate::{BlockKey, ContextId, OwnerId, Tier};

use super::context::{ContextState, Rank};
use super::{Counters, Knowledge, Publisher, PublisherId, Registration, Role, Settings};

impl Knowledge {
    /// Applies a message of a publisher. Returns whether it could be read; if not, everything that the
    /// publisher said is forgotten.
    pub fn apply(&mut self, id: PublisherId, payload: &[u8]) -> bool {
        let Some(publisher) = self.publishers.get_mut(&id) else { return true };
        let mut batch = mem::take(&mut self.batch);
        let decoded = publisher.decoder.decode(payload, &mut batch);
        self.apply_decoded(id, &decoded, &batch);
        self.batch = batch;
        is_readable(&decoded)
    }

    /// What decodes the messages of a publisher for [`apply_decoded`](Self::apply_decoded). After
    /// [`fence`](Self::fence) it has to be [restarted](Decoder::restart).
    #[must_use]
    pub fn decoder(&self, id: PublisherId) -> Option<Decoder> {
        self.publishers.get(&id).map(|publisher| publisher.decoder.clone())
    }

    /// As [`apply`](Self::apply), of a message that was decoded already: so that no query waits for that.
    pub fn apply_decoded(&mut self, id: PublisherId, decoded: &Result<Decoded, BatchError>, batch: &Batch) {
        let Some(publisher) = self.publishers.get_mut(&id) else { return };
        publisher.counters.messages += 1;
        if let Ok(decoded) = decoded {
            publisher.counters.events += u64::from(decoded.events);
            add_skipped(&mut publisher.counters, &decoded.skipped);
        }
        if !is_readable(decoded) {
            publisher.counters.unreadable += 1;
            return self.fence(id, FenceReason::Unreadable);
        }
        match publisher.registration.role {
            Role::Engine => self.engine_events(id, batch),
            Role::Store { .. } => self.store_events(id, batch),
        }
    }

    fn engine_events(&mut self, id: PublisherId, batch: &Batch) {
        let mut keys = mem::take(&mut self.keys);
        for event in batch.events() {
            let Some(publisher) = self.publishers.get_mut(&id) else { break };
            let state = &mut self.contexts[publisher.context.0 as usize];
            match event {
                Event::Stored(stored) => {
                    let dp_rank = stored.source.dp_rank.or(batch.dp_rank());
                    keys.clear();
                    apply_stored(publisher, state, &self.settings, dp_rank, &stored, &mut keys);
                    if !keys.is_empty() && !self.waiting.is_empty() {
                        let context = publisher.context;
                        self.announced(context, &stored, &keys);
                    }
                }
                Event::Removed(removed) => {
                    let dp_rank = removed.source.dp_rank.or(batch.dp_rank());
                    keys.clear();
                    apply_removed(publisher, state, dp_rank, &removed, &mut keys);
                }
                Event::Cleared(source) => {
                    publisher.counters.cleared += 1;
                    let dp_rank = source.dp_rank.or(batch.dp_rank());
                    for (_, rank, at) in &publisher.ranks {
                        if dp_rank.is_none_or(|dp_rank| dp_rank == *rank) {
                            state.clear_rank(*at);
                        }
                    }
                }
            }
        }
        self.keys = keys;
    }
}

/// Whether a message said everything that it was to say. If not, what its publisher keeps is unknown.
#[must_use]
pub fn is_readable(decoded: &Result<Decoded, BatchError>) -> bool {
    decoded.as_ref().is_ok_and(|decoded| !decoded.removals_lost)
}

/// The rank for which a publisher speaks, made if it is missing; `None` beyond the limit.
pub(super) fn rank_of(
    publisher: &mut Publisher,
    state: &mut ContextState,
    context: ContextId,
    dp_rank: u32,
    ranks_max: usize,
) -> Option<u32> {
    let known = publisher.ranks.iter().find(|(of, rank, _)| (*of, *rank) == (context, dp_rank));
    if let Some((_, _, at)) = known {
        return Some(*at);
    }
    if publisher.ranks.len() >= ranks_max {
        return None;
    }
    let at = state.new_rank(Rank {
        instance: publisher.instance,
        dp_rank,
        served: publisher.served,
        looks_ahead: false,
        tiers: Default::default(),
    });
    publisher.ranks.push((context, dp_rank, at));
    Some(at)
}

/// Leaves the keys of the blocks in `keys`, as far as they are known.
pub(super) fn apply_stored(
    publisher: &mut Publisher,
    state: &mut ContextState,
    settings: &Settings,
    dp_rank: Option<u32>,
    stored: &Stored<'_>,
    keys: &mut Vec<BlockKey>,
) {
    let block_tokens = state.context.block_tokens;
    if !stored.tokens.is_empty() && stored.block_tokens != block_tokens {
        publisher.counters.other_block_tokens += 1;
        return;
    }
    if is_foreign(&publisher.registration, &stored.source) {
        publisher.counters.foreign += 1;
        return;
    }
    // Only stores speak for what all instances share.
    if (stored.tier == Tier::Store) != matches!(publisher.registration.role, Role::Store { .. }) {
        publisher.counters.foreign += 1;
        return;
    }
    let dp_rank = dp_rank.unwrap_or(publisher.registration.dp_rank);
    let context = publisher.context;
    let rank = rank_of(publisher, state, context, dp_rank, settings.ranks_per_publisher_max);
    let group = stored.group.unwrap_or_default();
    let place = rank.and_then(|rank| {
        let owner = state.owner_or_new(rank, stored.tier, group, settings.groups_max)?;
        Some((rank, owner))
    });
    let Some((rank, owner)) = place else {
        publisher.counters.foreign += 1;
        return;
    };
    if stored.tokens.is_empty() {
        return join(publisher, state, rank, owner, stored, keys);
    }
    if stored.extra.looks_ahead()
        && let Some(Some(rank)) = state.ranks.get_mut(rank as usize)
    {
        rank.looks_ahead = true;
    }
    let parent = match stored.parent.map(|hash| state.key_of(hash, rank)) {
        Some(None) => {
            publisher.counters.orphans += stored.hashes.len() as u64;
            return;
        }
        known => known.flatten(),
    };
    let mut chain = match parent {
        Some(parent) => Chain::after(settings.seed, parent),
        None => Chain::new(&root_of(publisher, settings.seed, stored)),
    };
    let blocks = stored.hashes.iter().zip(stored.tokens.chunks_exact(block_tokens as usize));
    let mut ahead = stored.hashes.chunks(TOUCHED);
    ahead.next().into_iter().for_each(|hashes| state.learned.touch(hashes));
    for (i, (hash, tokens)) in blocks.enumerate() {
        if i % TOUCHED == 0 {
            ahead.next().into_iter().for_each(|hashes| state.learned.touch(hashes));
        }
        let key = chain.push_with(tokens, stored.extra.of(i));
        // A block whose hash is not known could never be removed.
        if state.learned.learn(*hash, key) == Learnt::Full {
            break;
        }
        keys.push(key);
    }
    publisher.counters.refused += (stored.hashes.len() - keys.len()) as u64;
    let dropped = state.index.counters().dropped;
    let result = state.index.stored(owner, parent, keys);
    if state.index.counters().dropped != dropped {
        state.unswept = usize::MAX;
    }
    publisher.counters.stored += result.added as u64;
    publisher.counters.refused += result.refused as u64;
}

/// Whether an event says that it is of another tenant or model than its publisher is registered for.
fn is_foreign(registration: &Registration, source: &Source<'_>) -> bool {
    let differs = |said: Option<&str>, own: &str| said.is_some_and(|said| !said.is_empty() && said != own);
    differs(source.tenant, &registration.tenant)
        || (!registration.model.is_empty() && differs(source.model, &registration.model))
}

/// Blocks without tokens, wherever in a chain: they are what their hashes were learnt to be, and are before
/// and behind what events with tokens said, whatever this one says.
fn join(
    publisher: &mut Publisher,
    state: &mut ContextState,
    rank: u32,
    owner: OwnerId,
    stored: &Stored<'_>,
    keys: &mut Vec<BlockKey>,
) {
    let mut before = stored.parent.and_then(|hash| state.key_of(hash, rank));
    for hash in stored.hashes {
        let key = state.key_of(*hash, rank);
        if let Some(key) = key.filter(|key| state.index.joined(owner, *key, before)) {
            keys.push(key);
        }
        before = key;
    }
    publisher.counters.stored += keys.len() as u64;
    publisher.counters.orphans += (stored.hashes.len() - keys.len()) as u64;
    // What announces blocks says their tokens.
    keys.clear();
}

fn apply_removed(
    publisher: &mut Publisher,
    state: &mut ContextState,
    dp_rank: Option<u32>,
    removed: &Removed<'_>,
    keys: &mut Vec<BlockKey>,
) {
    let dp_rank = dp_rank.unwrap_or(publisher.registration.dp_rank);
    let known = publisher.ranks.iter().find(|(of, rank, _)| (*of, *rank) == (publisher.context, dp_rank));
    // Where a hash stands for several blocks, the owner has at most one of them.
    keys.extend(removed.hashes.iter().flat_map(|hash| state.learned.get(*hash)));
    let ContextState { index, ranks, unswept, .. } = state;
    let rank = known.and_then(|(_, _, rank)| ranks.get(*rank as usize)?.as_ref());
    let groups = rank.map_or(&[][..], |rank| &rank.tiers[removed.tier as usize]);
    let mut gone = 0;
    // Without a group, no group can be relied on to have them still.
    for (_, owner) in groups.iter().filter(|(group, _)| removed.group.is_none_or(|of| of == *group)) {
        gone = gone.max(index.removed(*owner, keys) as u64);
        *unswept = usize::MAX;
    }
    publisher.counters.removed += gone;
    publisher.counters.removed_unknown += (removed.hashes.len() as u64).saturating_sub(gone);
}

fn add_skipped(counters: &mut Counters, skipped: &Skipped) {
    let Skipped {
        malformed,
        truncated,
        unknown_event,
        unknown_medium,
        other_group,
        too_large,
        mismatch,
        empty,
        unknown_object,
    } = &mut counters.skipped;
    *malformed = malformed.saturating_add(skipped.malformed);
    *truncated = truncated.saturating_add(skipped.truncated);
    *unknown_event = unknown_event.saturating_add(skipped.unknown_event);
    *unknown_medium = unknown_medium.saturating_add(skipped.unknown_medium);
    *other_group = other_group.saturating_add(skipped.other_group);
    *too_large = too_large.saturating_add(skipped.too_large);
    *mismatch = mismatch.saturating_add(skipped.mismatch);
    *empty = empty.saturating_add(skipped.empty);
    *unknown_object = unknown_object.saturating_add(skipped.unknown_object);
}

fn root_of(publisher: &Publisher, seed: u64, stored: &Stored<'_>) -> Root {
    if stored.lora.is_none() && stored.salt.is_none() {
        return publisher.root;
    }
    let registration = &publisher.registration;
    Root::of(seed, stored.lora.or(registration.lora.as_deref()), stored.salt.or(registration.salt.as_deref()))
}
