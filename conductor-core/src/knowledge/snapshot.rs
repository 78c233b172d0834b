//! Everything that is known, as bytes: after a restart, streams go on where the snapshot was taken.
//!
//! ```text
//!   magic · version · seed · instances · contexts: name, index, learnt hashes, ranks and owners
//!   · publishers: registration, position of the stream, ranks · blocks of stores that wait · checksum
//! ```
//!
//! Numbers are little-endian; lengths come before what they count. What was assumed is left out.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use xxhash_rust::xxh3::xxh3_64;

use crate::events::{Decoder, Dialect};
use crate::hash::Root;
use crate::index::{self, Index};
use crate::learned::Learned;
use crate::stream::{FenceReason, Position};
use crate::{BlockKey, Context, ContextId, EngineHash, InstanceId, OwnerId, Tier};

use super::context::{ContextState, Owner, Rank};
use super::{Counters, Instance, Knowledge, Publisher, PublisherId, Registration, Role, Settings};

const MAGIC: [u8; 8] = *b"snowknow";
const VERSION: u32 = 2;
/// Objects of a block of a store.
const OBJECTS_MAX: u32 = 64;

/// Why bytes are not a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotError {
    /// They do not begin as a snapshot does.
    NotASnapshot,
    /// Another version wrote them.
    Version(u32),
    /// They were damaged, or cut off.
    Checksum,
    /// Block keys were made with another seed.
    Seed {
        /// The snapshot's.
        snapshot: u64,
        /// That of the settings.
        settings: u64,
    },
    /// A part is not valid; what it is.
    Invalid(&'static str),
    /// A limit of the settings is lower than what the snapshot has; its name.
    Full(&'static str),
    /// An index is not valid.
    Index(index::SnapshotError),
}

impl fmt::Display for SnapshotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotASnapshot => f.write_str("the file is not a snapshot of a Conductor: check its path"),
            Self::Version(version) => write!(
                f,
                "the snapshot has format {version}, and {VERSION} is needed: start without it, replays follow"
            ),
            Self::Checksum => f.write_str("the snapshot is damaged or cut off: start without it"),
            Self::Seed { snapshot, settings } => write!(
                f,
                "the snapshot was made with the seed {snapshot}, and {settings} is set: start without it, or set \
                 the seed back"
            ),
            Self::Invalid(what) => write!(f, "the snapshot is not valid ({what}): start without it"),
            Self::Full(limit) => write!(f, "the snapshot has more than `{limit}` allows: raise it"),
            Self::Index(error) => write!(f, "the index in the snapshot is not valid: {error}"),
        }
    }
}

impl core::error::Error for SnapshotError {}

/// Where the stream of each publisher goes on; `None` begins anew.
pub type Positions = Vec<(PublisherId, Option<Position>)>;

pub(super) const CUT: SnapshotError = SnapshotError::Invalid("it ends early");

impl Knowledge {
    /// Appends a snapshot to `out`. `position` tells where the stream of a publisher is
    /// ([`Stream::position`](crate::stream::Stream::position)); it has to be taken at the same time.
    pub fn snapshot(&self, position: impl Fn(PublisherId) -> Option<Position>, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&MAGIC);
        put_u32(out, VERSION);
        put_u64(out, self.settings.seed);
        put_len(out, self.instances.len());
        for instance in &self.instances {
            put_text(out, &instance.tenant);
            put_text(out, &instance.name);
        }
        put_len(out, self.contexts.len());
        self.contexts.iter().for_each(|state| put_context(out, state));
        put_u32(out, self.next_publisher);
        put_len(out, self.publishers.len());
        for (id, publisher) in &self.publishers {
            put_u32(out, id.0);
            put_publisher(out, publisher, position(*id));
        }
        put_len(out, self.waiting.len());
        for ((publisher, model, hash), objects) in self.waiting.blocks() {
            put_u32(out, publisher.0);
            put_u64(out, model);
            put_u64(out, hash.0);
            put_len(out, objects.len());
            objects.iter().for_each(|object| put_u64(out, *object));
        }
        let checksum = xxh3_64(&out[start..]);
        put_u64(out, checksum);
    }

    /// What a snapshot has, and where each publisher's stream goes on. No publisher is served before its
    /// stream has shown that it is the same run. What a publisher without a position said is left out.
    ///
    /// # Errors
    /// The bytes are not a valid snapshot, or exceed a limit.
    pub fn restore(bytes: &[u8], settings: Settings) -> Result<(Self, Positions), SnapshotError> {
        let rest = bytes.strip_prefix(&MAGIC).ok_or(SnapshotError::NotASnapshot)?;
        let (mut read, checksum) = rest.split_last_chunk::<8>().ok_or(SnapshotError::Checksum)?;
        let read = &mut read;
        let version = u32_of(read)?;
        if version != VERSION {
            return Err(SnapshotError::Version(version));
        }
        if xxh3_64(&bytes[..bytes.len() - 8]) != u64::from_le_bytes(*checksum) {
            return Err(SnapshotError::Checksum);
        }
        let seed = u64_of(read)?;
        if seed != settings.seed {
            return Err(SnapshotError::Seed { snapshot: seed, settings: settings.seed });
        }
        let mut this = Self::new(settings);
        for at in 0..len_of(read, 8)? {
            let instance = Instance { tenant: text_of(read)?, name: text_of(read)? };
            if instance.name.is_empty() {
                this.gone.push_back(InstanceId(at as u32));
            }
            this.instances.push(instance);
        }
        let contexts = len_of(read, 12)?;
        if contexts > this.settings.contexts_max {
            return Err(SnapshotError::Full("contexts_max"));
        }
        for _ in 0..contexts {
            let state = context_of(read, &this.settings, this.instances.len())?;
            this.contexts.push(state);
        }
        let positions = this.read_publishers(read)?;
        this.read_waiting(read)?;
        if !read.is_empty() {
            return Err(SnapshotError::Invalid("bytes follow its end"));
        }
        for (id, position) in &positions {
            if position.is_none() {
                this.fence(*id, FenceReason::Unverifiable);
            }
        }
        Ok((this, positions))
    }

    fn read_publishers(&mut self, read: &mut &[u8]) -> Result<Positions, SnapshotError> {
        self.next_publisher = u32_of(read)?;
        if self.next_publisher > u32::MAX / 2 {
            return Err(SnapshotError::Invalid("a publisher's number"));
        }
        let count = len_of(read, 32)?;
        if count > self.settings.publishers_max {
            return Err(SnapshotError::Full("publishers_max"));
        }
        let mut positions = Vec::with_capacity(count);
        let mut taken: Vec<(ContextId, u32)> = Vec::new();
        for _ in 0..count {
            let id = PublisherId(u32_of(read)?);
            let (publisher, position) = self.publisher_of(read)?;
            self.contexts[publisher.context.0 as usize].joined();
            taken.extend(publisher.ranks.iter().map(|(context, _, rank)| (*context, *rank)));
            if id.0 >= self.next_publisher || self.publishers.insert(id, publisher).is_some() {
                return Err(SnapshotError::Invalid("a publisher's number"));
            }
            positions.push((id, position));
        }
        taken.sort_unstable();
        let ranks: usize = self.contexts.iter().map(|state| state.ranks.iter().flatten().count()).sum();
        let all = taken.len();
        taken.dedup();
        if taken.len() != all || ranks != all {
            return Err(SnapshotError::Invalid("a rank does not belong to one publisher"));
        }
        Ok(positions)
    }

    fn publisher_of(&self, read: &mut &[u8]) -> Result<(Publisher, Option<Position>), SnapshotError> {
        let context = ContextId(u32_of(read)?);
        let instance = InstanceId(u32_of(read)?);
        if context.0 as usize >= self.contexts.len() || instance.0 as usize >= self.instances.len() {
            return Err(SnapshotError::Invalid("a publisher's context or instance"));
        }
        let registration = registration_of(read)?;
        super::check(&registration).map_err(|_| SnapshotError::Invalid("a registration"))?;
        let own = |state: &ContextState| state.context.tenant == registration.tenant;
        let Context { model, block_tokens, .. } = &self.contexts[context.0 as usize].context;
        let known = &self.instances[instance.0 as usize];
        if !own(&self.contexts[context.0 as usize])
            || (model, block_tokens) != (&registration.model, &registration.block_tokens)
            || (&known.tenant, &known.name) != (&registration.tenant, &registration.instance)
        {
            return Err(SnapshotError::Invalid("a publisher's context or instance is another's"));
        }
        let position = match u8_of(read)? {
            0 => None,
            _ => Some(Position { begin: u64_of(read)?, next: u64_of(read)?, digest: u64_of(read)? }),
        };
        let mut ranks = Vec::new();
        for _ in 0..len_of(read, 12)? {
            let (context, dp_rank, rank) = (ContextId(u32_of(read)?), u32_of(read)?, u32_of(read)?);
            let state = self.contexts.get(context.0 as usize).filter(|state| own(state));
            let known = state.and_then(|state| state.rank(rank));
            if known.is_none_or(|known| (known.dp_rank, known.instance) != (dp_rank, instance)) {
                return Err(SnapshotError::Invalid("a publisher's rank"));
            }
            ranks.push((context, dp_rank, rank));
        }
        let root = Root::of(self.settings.seed, registration.lora.as_deref(), registration.salt.as_deref());
        let decoder = Decoder::with_limits(registration.dialect, self.settings.payload);
        let counters = Counters::default();
        let publisher =
            Publisher { registration, instance, context, root, decoder, ranks, served: false, counters };
        Ok((publisher, position))
    }

    fn read_waiting(&mut self, read: &mut &[u8]) -> Result<(), SnapshotError> {
        for _ in 0..len_of(read, 24)? {
            let block = (PublisherId(u32_of(read)?), u64_of(read)?, EngineHash(u64_of(read)?));
            let count = len_of(read, 8)?;
            if count > OBJECTS_MAX as usize {
                return Err(SnapshotError::Invalid("a block of a store"));
            }
            let objects = (0..count).map(|_| u64_of(read)).collect::<Result<_, _>>()?;
            if !self.waiting.put(block, objects) {
                return Err(SnapshotError::Full("waiting_max"));
            }
        }
        Ok(())
    }
}

fn put_context(out: &mut Vec<u8>, state: &ContextState) {
    put_text(out, &state.context.tenant);
    put_text(out, &state.context.model);
    put_u32(out, state.context.block_tokens);
    let at = out.len();
    put_u64(out, 0);
    state.index.snapshot(out);
    let bytes = (out.len() - at - 8) as u64;
    out[at..at + 8].copy_from_slice(&bytes.to_le_bytes());
    put_u64(out, state.learned.len() as u64);
    for (hash, key) in state.learned.pairs() {
        put_u64(out, hash.0);
        put_u64(out, key.0);
    }
    put_len(out, state.ranks.len());
    for rank in &state.ranks {
        let Some(rank) = rank else {
            out.push(0);
            continue;
        };
        out.push(1);
        put_u32(out, rank.instance.0);
        put_u32(out, rank.dp_rank);
        out.push(u8::from(rank.looks_ahead));
        for groups in &rank.tiers {
            put_len(out, groups.len());
            for (group, owner) in groups {
                put_u32(out, *group);
                put_u32(out, owner.0);
            }
        }
    }
}

fn context_of(
    read: &mut &[u8],
    settings: &Settings,
    instances: usize,
) -> Result<ContextState, SnapshotError> {
    let context = Context { tenant: text_of(read)?, model: text_of(read)?, block_tokens: u32_of(read)? };
    // One that was freed has neither a name nor tokens per block.
    if context.block_tokens == 0 && !(context.tenant.is_empty() && context.model.is_empty()) {
        return Err(SnapshotError::Invalid("a context without tokens per block"));
    }
    let mut state = ContextState::new(context, settings);
    let bytes = usize::try_from(u64_of(read)?).map_err(|_| CUT)?;
    let (index, rest) = read.split_at_checked(bytes).ok_or(CUT)?;
    *read = rest;
    state.index = Index::restore(index, settings.index.clone()).map_err(SnapshotError::Index)?;
    let pairs = usize::try_from(u64_of(read)?).map_err(|_| CUT)?;
    if pairs > read.len() / 16 {
        return Err(CUT);
    }
    if pairs > settings.learned_max {
        return Err(SnapshotError::Full("learned_max"));
    }
    let (bytes, rest) = read.split_at_checked(pairs * 16).ok_or(CUT)?;
    *read = rest;
    let pair = |bytes: &[u8; 16]| {
        let (hash, key) = (bytes.first_chunk().copied(), bytes.last_chunk().copied());
        let number = |bytes: Option<[u8; 8]>| u64::from_le_bytes(bytes.unwrap_or_default());
        (EngineHash(number(hash)), BlockKey(number(key)))
    };
    state.learned = Learned::of(bytes.as_chunks().0.iter().map(pair), settings.learned_max)
        .ok_or(SnapshotError::Invalid("learnt hashes"))?;
    let ranks = len_of(read, 1)?;
    if ranks > settings.publishers_max.saturating_mul(settings.ranks_per_publisher_max) {
        return Err(SnapshotError::Full("publishers_max"));
    }
    for at in 0..ranks {
        let rank = match u8_of(read)? {
            0 => None,
            _ => Some(rank_of(read, at as u32, &mut state, instances)?),
        };
        state.ranks.push(rank);
    }
    // Blocks of an owner that is not named could never be taken out.
    let unknown = |owner: OwnerId| !matches!(state.owners.get(owner.0 as usize), Some(Some(_)));
    if state.index.owners().any(|known| unknown(known.owner)) {
        return Err(SnapshotError::Invalid("an owner that is not named"));
    }
    Ok(state)
}

fn rank_of(
    read: &mut &[u8],
    at: u32,
    state: &mut ContextState,
    instances: usize,
) -> Result<Rank, SnapshotError> {
    const OWNER: SnapshotError = SnapshotError::Invalid("an owner");
    let (instance, dp_rank) = (InstanceId(u32_of(read)?), u32_of(read)?);
    if instance.0 as usize >= instances {
        return Err(SnapshotError::Invalid("a rank's instance"));
    }
    let looks_ahead = u8_of(read)? != 0;
    let mut rank = Rank { instance, dp_rank, served: false, looks_ahead, tiers: Default::default() };
    for tier in Tier::ALL {
        for _ in 0..len_of(read, 8)? {
            let (group, owner) = (u32_of(read)?, u32_of(read)?);
            if owner >= state.index.limits().owners_max {
                return Err(SnapshotError::Full("owners_max"));
            }
            let places = owner as usize + 1;
            if state.owners.len() < places {
                state.owners.resize(places, None);
            }
            if state.owners[owner as usize].replace(Owner { rank: at, tier, group }).is_some() {
                return Err(OWNER);
            }
            rank.tiers[tier as usize].push((group, OwnerId(owner)));
        }
    }
    Ok(rank)
}

fn put_publisher(out: &mut Vec<u8>, publisher: &Publisher, position: Option<Position>) {
    put_u32(out, publisher.context.0);
    put_u32(out, publisher.instance.0);
    put_registration(out, &publisher.registration);
    out.push(u8::from(position.is_some()));
    if let Some(Position { begin, next, digest }) = position {
        [begin, next, digest].into_iter().for_each(|number| put_u64(out, number));
    }
    put_len(out, publisher.ranks.len());
    for (context, dp_rank, rank) in &publisher.ranks {
        [context.0, *dp_rank, *rank].into_iter().for_each(|number| put_u32(out, number));
    }
}

pub(super) fn put_registration(out: &mut Vec<u8>, registration: &Registration) {
    let Registration { instance, tenant, model, block_tokens, lora, salt, dp_rank, dialect, role } =
        registration;
    [instance, tenant, model].into_iter().for_each(|text| put_text(out, text));
    put_u32(out, *block_tokens);
    for text in [lora, salt] {
        out.push(u8::from(text.is_some()));
        put_text(out, text.as_deref().unwrap_or_default());
    }
    put_u32(out, *dp_rank);
    out.push(match dialect {
        Dialect::Vllm => 0,
        Dialect::Sglang => 1,
        Dialect::Mooncake => 2,
    });
    put_u32(out, if let Role::Store { objects_per_block } = role { *objects_per_block } else { 0 });
}

pub(super) fn registration_of(read: &mut &[u8]) -> Result<Registration, SnapshotError> {
    let (instance, tenant, model) = (text_of(read)?, text_of(read)?, text_of(read)?);
    let block_tokens = u32_of(read)?;
    let mut optional = || -> Result<Option<String>, SnapshotError> {
        let is_some = u8_of(read)? != 0;
        Ok(Some(text_of(read)?).filter(|_| is_some))
    };
    let (lora, salt) = (optional()?, optional()?);
    let dp_rank = u32_of(read)?;
    let dialect = match u8_of(read)? {
        0 => Dialect::Vllm,
        1 => Dialect::Sglang,
        2 => Dialect::Mooncake,
        _ => return Err(SnapshotError::Invalid("a dialect")),
    };
    let role = match u32_of(read)? {
        0 => Role::Engine,
        objects_per_block => Role::Store { objects_per_block },
    };
    Ok(Registration { instance, tenant, model, block_tokens, lora, salt, dp_rank, dialect, role })
}

pub(super) fn put_u32(out: &mut Vec<u8>, number: u32) {
    out.extend_from_slice(&number.to_le_bytes());
}

pub(super) fn put_u64(out: &mut Vec<u8>, number: u64) {
    out.extend_from_slice(&number.to_le_bytes());
}

pub(super) fn put_len(out: &mut Vec<u8>, len: usize) {
    put_u32(out, u32::try_from(len).unwrap_or(u32::MAX));
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    put_len(out, text.len());
    out.extend_from_slice(text.as_bytes());
}

pub(super) fn u8_of(read: &mut &[u8]) -> Result<u8, SnapshotError> {
    let (&byte, rest) = read.split_first().ok_or(CUT)?;
    *read = rest;
    Ok(byte)
}

pub(super) fn u32_of(read: &mut &[u8]) -> Result<u32, SnapshotError> {
    let (bytes, rest) = read.split_first_chunk().ok_or(CUT)?;
    *read = rest;
    Ok(u32::from_le_bytes(*bytes))
}

pub(super) fn u64_of(read: &mut &[u8]) -> Result<u64, SnapshotError> {
    let (bytes, rest) = read.split_first_chunk().ok_or(CUT)?;
    *read = rest;
    Ok(u64::from_le_bytes(*bytes))
}

/// A count of things that have `bytes` bytes each at least.
pub(super) fn len_of(read: &mut &[u8], bytes: usize) -> Result<usize, SnapshotError> {
    let len = u32_of(read)? as usize;
    if len > read.len() / bytes { Err(CUT) } else { Ok(len) }
}

fn text_of(read: &mut &[u8]) -> Result<String, SnapshotError> {
    let len = len_of(read, 1)?;
    let (text, rest) = read.split_at_checked(len).ok_or(CUT)?;
    *read = rest;
    core::str::from_utf8(text).map(Into::into).map_err(|_| SnapshotError::Invalid("a text"))
}
