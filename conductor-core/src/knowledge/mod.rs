//! What the Conductor knows: which instance has which blocks, as far as its publishers said so.
//!
//! ```text
//!   publisher ── message ──▶ events ─┬─ tokens ──▶ own chain ──▶ keys ─┬─▶ index of the context
//!                                    └─ engine's hashes ◀── learnt ────┘        ▲
//!   store ── objects ──▶ hashes ──▶ known: the store owns the block ────────────┤
//!                               └─▶ unknown: waits until an engine announces it ┘
//!   query: keys ──▶ owners ──▶ per rank GPU ≤ CPU ≤ disk ──▶ per instance, and the store
//! ```
//!
//! Blocks are named by the Conductor's own chain ([`crate::hash`]). The hashes of engines are learnt from
//! events that carry tokens, and never computed: removals, parents and objects of stores are translated by
//! what was learnt. What cannot be translated is not recorded, so that an answer is too short and never too
//! long.
//!
//! Each publisher speaks for its own owners (rank, tier, attention group). [`Feed`] connects it to its
//! [`Stream`](crate::stream::Stream), which decides what is applied and when all of it is void.

mod apply;
#[cfg(test)]
mod churn;
mod context;
mod query;
mod shared;
mod snapshot;
#[cfg(test)]
mod tests;
mod transfer;
mod types;

use alloc::collections::{BTreeMap, VecDeque};
use alloc::string::String;
use alloc::vec::Vec;

use te_core::Instant;

use crate::events::{Batch, Decoder};
use crate::hash::Root;
use crate::stream::{FenceReason, Sink};
use crate::{BlockKey, Context, ContextId, InstanceId};

pub use apply::is_readable;
use context::ContextState;
pub use query::PARTS;
use shared::Waiting;
pub use snapshot::{Positions, SnapshotError};
pub use transfer::Said;
pub use types::{
    Counters, Matches, OwnerDigest, PublisherId, RankMatch, RegisterError, Registration, Role, Settings,
};

#[derive(Debug)]
struct Publisher {
    registration: Registration,
    instance: InstanceId,
    context: ContextId,
    root: Root,
    decoder: Decoder,
    /// Its ranks in contexts, which are few.
    ranks: Vec<(ContextId, u32, u32)>,
    served: bool,
    counters: Counters,
}

/// An instance; without a name once its last publisher was unregistered.
#[derive(Debug, Default)]
struct Instance {
    tenant: String,
    name: String,
}

/// Numbers of instances that are gone which are not given to others yet: decisions may still name them.
const NUMBERS_AT_REST: usize = 1_024;

/// Everything that was learnt from publishers.
#[derive(Debug)]
pub struct Knowledge {
    settings: Settings,
    contexts: Vec<ContextState>,
    instances: Vec<Instance>,
    /// Numbers of instances that are gone, the one that has been for the longest time first.
    gone: VecDeque<InstanceId>,
    publishers: BTreeMap<PublisherId, Publisher>,
    next_publisher: u32,
    waiting: Waiting,
    batch: Batch,
    keys: Vec<BlockKey>,
}

impl Knowledge {
    /// Without publishers.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self {
            waiting: Waiting::new(settings.waiting_max),
            contexts: Vec::new(),
            instances: Vec::new(),
            gone: VecDeque::new(),
            publishers: BTreeMap::new(),
            next_publisher: 0,
            batch: Batch::new(),
            keys: Vec::new(),
            settings,
        }
    }

    /// Makes a publisher known. It is not served before its stream says so. One that is registered already,
    /// with the same values, keeps its id.
    ///
    /// # Errors
    /// A value is missing, differs from a former registration, or there is no room.
    pub fn register(&mut self, registration: Registration) -> Result<PublisherId, RegisterError> {
        check(&registration)?;
        let same = |other: &Registration| {
            (&other.instance, &other.tenant, &other.model, other.dp_rank, &other.lora)
                == (
                    &registration.instance,
                    &registration.tenant,
                    &registration.model,
                    registration.dp_rank,
                    &registration.lora,
                )
        };
        if let Some((id, known)) = self.publishers.iter().find(|(_, known)| same(&known.registration)) {
            return if known.registration == registration {
                Ok(*id)
            } else {
                Err(RegisterError::Differs(*id))
            };
        }
        if self.publishers.len() >= self.settings.publishers_max {
            return Err(RegisterError::Full("publishers_max"));
        }
        let context = self.context_for(&registration)?;
        self.contexts[context.0 as usize].joined();
        let instance = self.instance_for(&registration);
        let id = PublisherId(self.next_publisher);
        self.next_publisher += 1;
        let root = Root::of(self.settings.seed, registration.lora.as_deref(), registration.salt.as_deref());
        let decoder = Decoder::with_limits(registration.dialect, self.settings.payload);
        self.publishers.insert(
            id,
            Publisher {
                registration,
                instance,
                context,
                root,
                decoder,
                ranks: Vec::new(),
                served: false,
                counters: Counters::default(),
            },
        );
        Ok(id)
    }

    /// Takes a publisher out, with everything that it said. Returns whether it was registered.
    pub fn unregister(&mut self, id: PublisherId) -> bool {
        self.fence(id, FenceReason::Dead);
        let Some(publisher) = self.publishers.remove(&id) else { return false };
        for (context, _, rank) in publisher.ranks {
            self.contexts[context.0 as usize].drop_rank(rank);
        }
        self.contexts[publisher.context.0 as usize].left();
        let instance = publisher.instance;
        if self.publishers.values().all(|other| other.instance != instance) {
            self.instances[instance.0 as usize] = Instance::default();
            self.gone.push_back(instance);
        }
        true
    }

    /// The registered publishers.
    pub fn publishers(&self) -> impl Iterator<Item = (PublisherId, &Registration, InstanceId)> {
        self.publishers.iter().map(|(id, publisher)| (*id, &publisher.registration, publisher.instance))
    }

    /// The counts of a publisher.
    #[must_use]
    pub fn counters(&self, id: PublisherId) -> Option<&Counters> {
        self.publishers.get(&id).map(|publisher| &publisher.counters)
    }

    /// Whether a publisher's blocks are part of answers.
    #[must_use]
    pub fn is_served(&self, id: PublisherId) -> bool {
        self.publishers.get(&id).is_some_and(|publisher| publisher.served)
    }

    /// An instance by its name.
    #[must_use]
    pub fn instance(&self, tenant: &str, name: &str) -> Option<InstanceId> {
        let is = |known: &Instance| known.tenant == tenant && known.name == name && !name.is_empty();
        let at = self.instances.iter().position(is)?;
        u32::try_from(at).ok().map(InstanceId)
    }

    /// An instance's tenant and name.
    #[must_use]
    pub fn instance_name(&self, id: InstanceId) -> Option<(&str, &str)> {
        let known = self.instances.get(id.0 as usize).filter(|known| !known.name.is_empty())?;
        Some((known.tenant.as_str(), known.name.as_str()))
    }

    /// The table of a context that was registered.
    #[must_use]
    pub fn context(&self, tenant: &str, model: &str, block_tokens: u32) -> Option<ContextId> {
        let at = self.contexts.iter().position(|known| {
            let Context { tenant: t, model: m, block_tokens: b } = &known.context;
            t == tenant && m == model && *b == block_tokens && block_tokens > 0
        })?;
        u32::try_from(at).ok().map(ContextId)
    }

    /// The contexts.
    pub fn contexts(&self) -> impl Iterator<Item = (ContextId, &Context)> {
        let all = (0..).map(ContextId).zip(&self.contexts);
        all.filter(|(_, state)| !state.is_vacant()).map(|(id, state)| (id, &state.context))
    }

    /// Unique blocks of a context, learnt hashes, and bytes of its index.
    #[must_use]
    pub fn size(&self, context: ContextId) -> Option<(usize, usize, usize)> {
        let state = self.contexts.get(context.0 as usize)?;
        Some((state.index.blocks(), state.learned.len(), state.index.bytes()))
    }

    /// The counts of a context's index.
    #[must_use]
    pub fn index_counters(&self, context: ContextId) -> Option<&crate::index::Counters> {
        self.contexts.get(context.0 as usize).map(|state| state.index.counters())
    }

    /// Blocks of stores that wait for an engine or for further objects.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// What a stream of this publisher acts on.
    pub fn feed(&mut self, publisher: PublisherId) -> Feed<'_> {
        Feed { knowledge: self, publisher, asked: None }
    }

    /// Forgets everything that a publisher said.
    pub fn fence(&mut self, id: PublisherId, reason: FenceReason) {
        let Some(publisher) = self.publishers.get_mut(&id) else { return };
        publisher.counters.fences[reason as usize] += 1;
        // After a gap, the groups stay what they are; a new process tells them again in either case.
        publisher.decoder.restart();
        for (context, _, rank) in &publisher.ranks {
            self.contexts[context.0 as usize].clear_rank(*rank);
        }
        self.waiting.forget(id);
    }

    /// Whether the publisher's blocks are part of answers from now on.
    pub fn serve(&mut self, id: PublisherId, served: bool) {
        let Some(publisher) = self.publishers.get_mut(&id) else { return };
        publisher.served = served;
        for (context, _, rank) in &publisher.ranks {
            self.contexts[context.0 as usize].serve_rank(*rank, served);
        }
    }

    /// An instance is known to be dead: what its publishers said is void at once, until they say it again.
    /// Their streams have to be told, too ([`Stream::died`](crate::stream::Stream::died)).
    pub fn died(&mut self, instance: InstanceId) {
        let of = self.publishers.iter().filter(|(_, publisher)| publisher.instance == instance);
        let ids: Vec<PublisherId> = of.map(|(id, _)| *id).collect();
        for id in ids {
            self.fence(id, FenceReason::Dead);
            self.serve(id, false);
        }
    }

    /// A decision lets a rank of an instance compute or fetch the blocks `keys`, from the prompt's beginning:
    /// they are assumed to be there until `until`, or until its events say so. Returns how many were newly
    /// assumed.
    pub fn assume(
        &mut self,
        context: ContextId,
        instance: InstanceId,
        dp_rank: u32,
        keys: &[BlockKey],
        until: Instant,
    ) -> usize {
        let Some(state) = self.contexts.get_mut(context.0 as usize) else { return 0 };
        state.assume((instance, dp_rank), keys, until)
    }

    /// Drops what was assumed for too long, and cleans up after fences and clears: up to `budget` steps per
    /// context. A context that has had no publisher for [`Settings::context_idle`] is freed. Returns how many
    /// steps there were; none when everything is clean.
    pub fn tick(&mut self, now: Instant, budget: usize) -> usize {
        let mut steps = 0;
        for at in 0..self.contexts.len() {
            let idle = self.contexts[at].idle(now);
            if idle.is_some_and(|idle| idle >= self.settings.context_idle) {
                self.free_context(at);
                steps += 1;
            }
        }
        for state in &mut self.contexts {
            state.index.expire(now);
            let swept = state.index.sweep(budget);
            steps += swept;
            steps += state.sweep_learned(if swept == 0 { state.unswept } else { usize::MAX }, budget);
        }
        steps
    }

    /// What every owner has, for the comparison with another Conductor.
    #[must_use]
    pub fn digests(&self) -> Vec<OwnerDigest> {
        let mut digests = Vec::new();
        for (context, state) in (0..).map(ContextId).zip(&self.contexts) {
            state.digests(context, &mut digests);
        }
        digests.sort_unstable();
        digests
    }

    fn context_for(&mut self, registration: &Registration) -> Result<ContextId, RegisterError> {
        let Registration { tenant, model, block_tokens, .. } = registration;
        if let Some(known) = self.context(tenant, model, *block_tokens) {
            return Ok(known);
        }
        let context = Context { tenant: tenant.clone(), model: model.clone(), block_tokens: *block_tokens };
        let state = ContextState::new(context, &self.settings);
        let vacant = self.contexts.iter().position(ContextState::is_vacant);
        let at = match vacant {
            Some(at) => at,
            None if self.contexts.len() < self.settings.contexts_max => {
                self.contexts.push(state);
                return Ok(ContextId((self.contexts.len() - 1) as u32));
            }
            // That without publishers for the longest time makes room.
            None => {
                let idle = self.contexts.iter().enumerate().filter(|(_, state)| state.publishers == 0);
                let longest =
                    idle.min_by_key(|(_, state)| state.idle_since.map_or((1, Instant::ZERO), |at| (0, at)));
                let at = longest.map(|(at, _)| at).ok_or(RegisterError::Full("contexts_max"))?;
                self.free_context(at);
                at
            }
        };
        self.contexts[at] = state;
        Ok(ContextId(at as u32))
    }

    /// Frees a context without publishers. What stores have of it is known again when they tell it anew.
    fn free_context(&mut self, at: usize) {
        let id = ContextId(at as u32);
        for publisher in self.publishers.values_mut() {
            publisher.ranks.retain(|(context, ..)| *context != id);
        }
        self.contexts[at] = ContextState::vacant(&self.settings);
    }

    fn instance_for(&mut self, registration: &Registration) -> InstanceId {
        let Registration { tenant, instance, .. } = registration;
        if let Some(known) = self.instance(tenant, instance) {
            return known;
        }
        let new = Instance { tenant: tenant.clone(), name: instance.clone() };
        if self.gone.len() > NUMBERS_AT_REST
            && let Some(id) = self.gone.pop_front()
        {
            self.instances[id.0 as usize] = new;
            return id;
        }
        self.instances.push(new);
        InstanceId((self.instances.len() - 1) as u32)
    }
}

/// The [`Sink`] of the stream of one publisher.
#[derive(Debug)]
pub struct Feed<'a> {
    knowledge: &'a mut Knowledge,
    publisher: PublisherId,
    /// The replay that the stream asked for last, if it did.
    pub asked: Option<u64>,
}

impl Feed<'_> {
    /// As [`Knowledge::adopt`].
    pub fn adopt(&mut self, said: &Said, from: usize, budget: usize) -> Option<usize> {
        self.knowledge.adopt(self.publisher, said, from, budget)
    }
}

impl Sink for Feed<'_> {
    fn apply(&mut self, _: u64, payload: &[u8]) -> bool {
        self.knowledge.apply(self.publisher, payload)
    }

    fn fence(&mut self, reason: FenceReason) {
        self.knowledge.fence(self.publisher, reason);
    }

    fn serve(&mut self, served: bool) {
        self.knowledge.serve(self.publisher, served);
    }

    fn ask(&mut self, from: u64) {
        self.asked = Some(from);
    }
}

fn check(registration: &Registration) -> Result<(), RegisterError> {
    if registration.instance.is_empty() {
        return Err(RegisterError::Field("instance"));
    }
    if registration.block_tokens == 0 {
        return Err(RegisterError::Field("block_tokens"));
    }
    match registration.role {
        Role::Engine if registration.model.is_empty() => Err(RegisterError::Field("model")),
        Role::Store { objects_per_block } if !(1..=64).contains(&objects_per_block) => {
            Err(RegisterError::Field("objects_per_block"))
        }
        _ => Ok(()),
    }
}
