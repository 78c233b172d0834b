//! Blocks of stores that all instances share: objects that are named by an engine's hash, and say neither
//! tokens nor what is before them.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use foldhash::fast::FixedState;
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
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
    /// By publisher, so that one that clears often pays for its own blocks only.
    stores: BTreeMap<PublisherId, Blocks>,
    len: usize,
    blocks_max: usize,
}

/// The objects of the blocks of a store.
type Blocks = HashMap<(u64, EngineHash), Vec<u64>, FixedState>;

impl Waiting {
    pub(super) fn new(blocks_max: usize) -> Self {
        Self { stores: BTreeMap::new(), len: 0, blocks_max }
    }

    /// Every block with its objects.
    pub(super) fn blocks(&self) -> impl Iterator<Item = (Block, &[u64])> {
        self.stores.iter().flat_map(|(publisher, blocks)| {
            blocks.iter().map(|((model, hash), objects)| ((*publisher, *model, *hash), objects.as_slice()))
        })
    }

    fn get(&self, (publisher, model, hash): Block) -> Option<&Vec<u64>> {
        self.stores.get(&publisher)?.get(&(model, hash))
    }

    fn remove(&mut self, (publisher, model, hash): Block) {
        let Some(blocks) = self.stores.get_mut(&publisher) else { return };
        self.len -= usize::from(blocks.remove(&(model, hash)).is_some());
        if blocks.is_empty() {
            self.stores.remove(&publisher);
        }
    }

    /// The objects of a block, with none when it was not there; `None` if there is no room.
    fn entry(&mut self, (publisher, model, hash): Block) -> Option<&mut Vec<u64>> {
        let blocks =
            self.stores.entry(publisher).or_insert_with(|| Blocks::with_hasher(FixedState::with_seed(0)));
        let full = self.len >= self.blocks_max;
        match blocks.entry((model, hash)) {
            Entry::Occupied(known) => Some(known.into_mut()),
            Entry::Vacant(_) if full => None,
            Entry::Vacant(new) => {
                self.len += 1;
                Some(new.insert(Vec::new()))
            }
        }
    }

    /// Puts a block of a snapshot back; returns whether there is room.
    pub(super) fn put(&mut self, block: Block, objects: Vec<u64>) -> bool {
        let Some(entry) = self.entry(block) else { return false };
        *entry = objects;
        true
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn forget(&mut self, publisher: PublisherId) {
        self.len -= self.stores.remove(&publisher).map_or(0, |blocks| blocks.len());
    }

    /// Adds an object; returns how many the block has, or `None` if there is no room.
    fn add(&mut self, block: Block, object: u64) -> Option<usize> {
        let objects = self.entry(block)?;
        if !objects.contains(&object) && objects.len() < 64 {
            objects.push(object);
        }
        Some(objects.len())
    }

    /// Takes an object out; returns whether it was there.
    fn take(&mut self, block: Block, object: u64) -> bool {
        if self.get(block).is_none_or(|objects| !objects.contains(&object)) {
            return false;
        }
        let Some(objects) = self.entry(block) else { return false };
        objects.retain(|known| *known != object);
        if objects.is_empty() {
            self.remove(block);
        }
        true
    }

    fn has(&self, block: Block, objects: usize) -> bool {
        self.get(block).is_some_and(|known| known.len() >= objects)
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
                Event::Stored(stored) if self.is_like_a_tier(id, &stored) => self.store_tokens(id, &stored),
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
        let stores = self.waiting.stores.keys().filter_map(|id| {
            let publisher = self.publishers.get(id)?;
            let Role::Store { objects_per_block } = publisher.registration.role else { return None };
            let same = publisher.registration.tenant == state.context.tenant;
            same.then_some(Of { publisher: *id, model, objects: objects_per_block as usize })
        });
        let stores: Vec<Of> = stores.collect();
        for (hash, key) in stored.hashes.iter().zip(keys) {
            for of in &stores {
                // With two meanings, it is not known which one the store has.
                if self.contexts[context.0 as usize].learned.get(*hash).nth(1).is_some() {
                    break;
                }
                let block = (of.publisher, of.model, *hash);
                if self.waiting.has(block, of.objects)
                    && self.store_join(*of, context, *key)
                    && of.objects == 1
                {
                    self.waiting.remove(block);
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
        let said = source.model.or_else(|| ObjectKey::parse(source.object?)?.model);
        let model = if registration.model.is_empty() {
            said
        } else {
            // Equal tokens have equal hashes in engines of several models.
            said.is_none_or(|model| model == registration.model).then_some(registration.model.as_str())
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
            self.waiting.remove(block);
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
        let joined = state.index.joined(owner, key, None);
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

    /// Whether the tokens of an event say all of its blocks: not where a block has several objects, each with
    /// an event of its own, or where the event says of which model it is.
    fn is_like_a_tier(&self, id: PublisherId, stored: &Stored<'_>) -> bool {
        let registration = self.publishers.get(&id).map(|publisher| &publisher.registration);
        !stored.tokens.is_empty()
            && registration.is_some_and(|registration| {
                registration.role == Role::Store { objects_per_block: 1 } && !registration.model.is_empty()
            })
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
