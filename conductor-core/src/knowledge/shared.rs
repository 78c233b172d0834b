//! Blocks of stores that all instances share: objects that are named by an engine's hash, and say neither
//! tokens nor what is before them.

use alloc::vec::Vec;

use foldhash::fast::FixedState;
use hashbrown::HashMap;
use xxhash_rust::xxh3::xxh3_64;

use crate::events::{Batch, Event, ObjectKey, Source, Stored};
use crate::{BlockKey, ContextId, EngineHash, Tier};

use super::apply::{apply_stored, rank_of};
use super::{Knowledge, PublisherId, Role};

/// A block of a store: its objects that are there. The model is the digest of its name.
pub(super) type Block = (PublisherId, u64, EngineHash);

/// Blocks of stores that no engine has announced, or of which not every object is there. Where a block
/// consists of several objects, complete and announced blocks are here, too.
#[derive(Debug)]
pub(super) struct Waiting {
    blocks: HashMap<Block, Vec<u64>, FixedState>,
    blocks_max: usize,
}

impl Waiting {
    pub(super) fn new(blocks_max: usize) -> Self {
        Self { blocks: HashMap::with_hasher(FixedState::with_seed(0)), blocks_max }
    }

    /// Every block with its objects.
    pub(super) fn blocks(&self) -> impl Iterator<Item = (Block, &[u64])> {
        self.blocks.iter().map(|(block, objects)| (*block, objects.as_slice()))
    }

    /// Puts a block of a snapshot back; returns whether there is room.
    pub(super) fn put(&mut self, block: Block, objects: Vec<u64>) -> bool {
        let room = self.blocks.len() < self.blocks_max;
        if room {
            self.blocks.insert(block, objects);
        }
        room
    }

    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub(super) fn forget(&mut self, publisher: PublisherId) {
        self.blocks.retain(|(of, ..), _| *of != publisher);
    }

    /// Adds an object; returns how many the block has, or `None` if there is no room.
    fn add(&mut self, block: Block, object: u64) -> Option<usize> {
        if self.blocks.len() >= self.blocks_max && !self.blocks.contains_key(&block) {
            return None;
        }
        let objects = self.blocks.entry(block).or_default();
        if !objects.contains(&object) && objects.len() < 64 {
            objects.push(object);
        }
        Some(objects.len())
    }

    /// Takes an object out; returns whether it was there.
    fn take(&mut self, block: Block, object: u64) -> bool {
        let Some(objects) = self.blocks.get_mut(&block) else { return false };
        let before = objects.len();
        objects.retain(|known| *known != object);
        let taken = objects.len() != before;
        if objects.is_empty() {
            self.blocks.remove(&block);
        }
        taken
    }

    fn has(&self, block: Block, objects: usize) -> bool {
        self.blocks.get(&block).is_some_and(|known| known.len() >= objects)
    }
}

/// The store and model of an event.
#[derive(Clone, Copy)]
struct Of {
    publisher: PublisherId,
    model: u64,
    objects: usize,
}

impl Knowledge {
    pub(super) fn store_events(&mut self, id: PublisherId, batch: &Batch) {
        for event in batch.events() {
            match event {
                Event::Stored(stored) if !stored.tokens.is_empty() => self.store_tokens(id, &stored),
                Event::Stored(stored) => {
                    let Some(of) = self.store_of(id, &stored.source) else { continue };
                    let object = object_id(&stored.source);
                    stored.hashes.iter().for_each(|hash| self.store_put(of, *hash, object));
                }
                Event::Removed(removed) => {
                    let Some(of) = self.store_of(id, &removed.source) else { continue };
                    let object = object_id(&removed.source);
                    removed.hashes.iter().for_each(|hash| self.store_removed(of, *hash, object));
                }
                Event::Cleared(_) => {
                    let Some(publisher) = self.publishers.get_mut(&id) else { continue };
                    publisher.counters.cleared += 1;
                    for (context, _, rank) in &publisher.ranks {
                        self.contexts[context.0 as usize].clear_rank(*rank);
                    }
                    self.waiting.forget(id);
                }
            }
        }
    }

    /// An engine has announced blocks: those that wait for it are known now.
    pub(super) fn announced(&mut self, context: ContextId, stored: &Stored<'_>, keys: &[BlockKey]) {
        let Some(state) = self.contexts.get(context.0 as usize) else { return };
        let model = xxh3_64(state.context.model.as_bytes());
        let stores = self.publishers.iter().filter_map(|(id, publisher)| {
            let Role::Store { objects_per_block } = publisher.registration.role else { return None };
            let same = publisher.registration.tenant == state.context.tenant;
            same.then_some(Of { publisher: *id, model, objects: objects_per_block as usize })
        });
        let stores: Vec<Of> = stores.collect();
        for (hash, key) in stored.hashes.iter().zip(keys) {
            for of in &stores {
                let block = (of.publisher, of.model, *hash);
                if self.waiting.has(block, of.objects)
                    && self.store_join(*of, context, *key)
                    && of.objects == 1
                {
                    self.waiting.blocks.remove(&block);
                }
            }
        }
    }

    /// The store and model of an event; `None`, and counted, if it is not of the registered model or names
    /// none.
    fn store_of(&mut self, id: PublisherId, source: &Source<'_>) -> Option<Of> {
        let publisher = self.publishers.get_mut(&id)?;
        let registration = &publisher.registration;
        let Role::Store { objects_per_block } = registration.role else { return None };
        let model = if registration.model.is_empty() {
            source.model.or_else(|| ObjectKey::parse(source.object?)?.model)
        } else {
            let same = source.model.is_none_or(|model| model == registration.model);
            same.then_some(registration.model.as_str())
        };
        let tenant = source.tenant.is_none_or(|tenant| tenant.is_empty() || tenant == registration.tenant);
        let Some(model) = model.filter(|_| tenant) else {
            publisher.counters.foreign += 1;
            return None;
        };
        Some(Of { publisher: id, model: xxh3_64(model.as_bytes()), objects: objects_per_block as usize })
    }

    fn store_put(&mut self, of: Of, hash: EngineHash, object: u64) {
        let block = (of.publisher, of.model, hash);
        let known = self.waiting.add(block, object);
        if known.is_none()
            && let Some(publisher) = self.publishers.get_mut(&of.publisher)
        {
            publisher.counters.refused += 1;
        }
        if known.is_none_or(|objects| objects < of.objects) {
            return;
        }
        let mut joined = false;
        for context in self.contexts_of(of) {
            let state = &self.contexts[context.0 as usize];
            let mut keys = state.learned.get(hash);
            // With two meanings, it is not known which one the store has.
            if let (Some(key), None) = (keys.next(), keys.next()) {
                drop(keys);
                joined |= self.store_join(of, context, key);
            }
        }
        if joined && of.objects == 1 {
            self.waiting.blocks.remove(&block);
        }
    }

    fn store_removed(&mut self, of: Of, hash: EngineHash, object: u64) {
        let block = (of.publisher, of.model, hash);
        let was_complete = of.objects == 1 || self.waiting.has(block, of.objects);
        let taken = self.waiting.take(block, object);
        let mut gone = u64::from(taken);
        if was_complete {
            for context in self.contexts_of(of) {
                let Some(publisher) = self.publishers.get(&of.publisher) else { return };
                let Some((_, _, rank)) = publisher.ranks.iter().find(|(of, ..)| *of == context) else {
                    continue;
                };
                let state = &mut self.contexts[context.0 as usize];
                let Some(owner) = state.owner(*rank, Tier::Store, 0) else { continue };
                for key in state.learned.get(hash) {
                    gone += state.index.removed(owner, &[key]) as u64;
                }
                state.unswept = usize::MAX;
            }
        }
        if let Some(publisher) = self.publishers.get_mut(&of.publisher) {
            publisher.counters.removed += u64::from(gone != 0);
            publisher.counters.removed_unknown += u64::from(gone == 0);
        }
    }

    /// The store has a block of a context, if an owner has it there: only then it is known what is before it.
    fn store_join(&mut self, of: Of, context: ContextId, key: BlockKey) -> bool {
        let Some(publisher) = self.publishers.get_mut(&of.publisher) else { return false };
        let state = &mut self.contexts[context.0 as usize];
        let ranks_max = self.settings.contexts_max;
        let Some(rank) = rank_of(publisher, state, context, 0, ranks_max) else { return false };
        let Some(owner) = state.owner_or_new(rank, Tier::Store, 0, 1) else { return false };
        let joined = state.index.joined(owner, key);
        publisher.counters.stored += u64::from(joined);
        joined
    }

    /// The contexts of a store's tenant and an event's model.
    fn contexts_of(&self, of: Of) -> impl Iterator<Item = ContextId> + use<> {
        let tenant = self.publishers.get(&of.publisher).map(|known| known.registration.tenant.as_str());
        let is = |state: &super::ContextState| {
            Some(state.context.tenant.as_str()) == tenant
                && xxh3_64(state.context.model.as_bytes()) == of.model
        };
        let found: Vec<ContextId> = (0..)
            .map(ContextId)
            .zip(&self.contexts)
            .filter(|(_, state)| is(state))
            .map(|(id, _)| id)
            .collect();
        found.into_iter()
    }

    /// A store whose events carry tokens is like an engine's tier.
    fn store_tokens(&mut self, id: PublisherId, stored: &Stored<'_>) {
        let Some(publisher) = self.publishers.get_mut(&id) else { return };
        let state = &mut self.contexts[publisher.context.0 as usize];
        let mut keys = core::mem::take(&mut self.keys);
        keys.clear();
        let stored = Stored { tier: Tier::Store, group: None, ..*stored };
        apply_stored(publisher, state, &self.settings, Some(0), &stored, &mut keys);
        self.keys = keys;
    }
}

/// Which of a block's objects an event is about: the key but for the hash of the block would do; the whole
/// key does, too.
fn object_id(source: &Source<'_>) -> u64 {
    source.object.map_or(0, |object| xxh3_64(object.as_bytes()))
}
