//! What one publisher said, from one Conductor to another.
//!
//! ```text
//!   magic · version · seed · registration · position: begin, next, digest
//!   · learnt hashes n u64, then n times hash u64, key u64
//!   · owners n u32, then n times rank u32, looks ahead u8, tier u8, group u32, blocks m u64, then m times
//!       depth u32, key u64, and key of the block before it u64 unless the depth is 0
//!   · checksum: XXH3-64 of everything before
//! ```
//!
//! Numbers are little-endian. The position is part of it, because without it the blocks would mean nothing:
//! [`Stream::adopt`](crate::stream::Stream::adopt) shows that it is one of the publisher's present run, and
//! goes on behind it. The bytes are trusted as far as the other Conductor is: a checksum does not show that
//! it tells the truth about blocks.

use alloc::vec::Vec;

use foldhash::fast::FixedState;
use hashbrown::HashSet;
use xxhash_rust::xxh3::xxh3_64;

use crate::index::HeldBlock;
use crate::learned::Learnt;
use crate::stream::Position;
use crate::{BlockKey, EngineHash, Tier};

use super::apply::rank_of;
use super::snapshot::{
    CUT, len_of, put_len, put_registration, put_u32, put_u64, registration_of, u8_of, u32_of, u64_of,
};
use super::{Knowledge, PublisherId, Registration, Role, SnapshotError};

const MAGIC: [u8; 8] = *b"snowsaid";
const VERSION: u32 = 1;

/// What a publisher said up to a position in its stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    seed: u64,
    registration: Registration,
    position: Position,
    pairs: Vec<(EngineHash, BlockKey)>,
    owners: Vec<SaidOwner>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct SaidOwner {
    dp_rank: u32,
    looks_ahead: bool,
    tier: Tier,
    group: u32,
    blocks: Vec<HeldBlock>,
}

impl Said {
    /// Whose it is.
    #[must_use]
    pub const fn registration(&self) -> &Registration {
        &self.registration
    }

    /// Where it ends.
    #[must_use]
    pub const fn position(&self) -> Position {
        self.position
    }

    /// The hashes of engines for its blocks.
    pub fn pairs(&self) -> impl Iterator<Item = (EngineHash, BlockKey)> + '_ {
        self.pairs.iter().copied()
    }

    /// The blocks of each of its owners, by depth, with rank and tier. A block may appear more than once in a
    /// row.
    pub fn owners(&self) -> impl Iterator<Item = (u32, Tier, &[HeldBlock])> + '_ {
        self.owners.iter().map(|owner| (owner.dp_rank, owner.tier, owner.blocks.as_slice()))
    }

    /// Steps of [`Knowledge::adopt`] for all of it.
    #[must_use]
    pub fn steps(&self) -> usize {
        self.pairs.len() + self.owners.iter().map(|owner| owner.blocks.len()).sum::<usize>()
    }

    /// Appends it to `out`, about 36 bytes per block.
    pub fn write(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&MAGIC);
        put_u32(out, VERSION);
        put_u64(out, self.seed);
        put_registration(out, &self.registration);
        let Position { begin, next, digest } = self.position;
        [begin, next, digest].into_iter().for_each(|number| put_u64(out, number));
        put_u64(out, self.pairs.len() as u64);
        for (hash, key) in &self.pairs {
            put_u64(out, hash.0);
            put_u64(out, key.0);
        }
        put_len(out, self.owners.len());
        for owner in &self.owners {
            put_u32(out, owner.dp_rank);
            out.push(u8::from(owner.looks_ahead));
            out.push(owner.tier as u8);
            put_u32(out, owner.group);
            put_u64(out, owner.blocks.len() as u64);
            for block in &owner.blocks {
                put_u32(out, block.depth);
                put_u64(out, block.key.0);
                block.parent.into_iter().for_each(|parent| put_u64(out, parent.0));
            }
        }
        let checksum = xxh3_64(&out[start..]);
        put_u64(out, checksum);
    }

    /// What [`write`](Self::write) wrote. Nothing larger than a few times `bytes` is allocated.
    ///
    /// # Errors
    /// The bytes are something else, of another version, or damaged.
    pub fn read(bytes: &[u8]) -> Result<Self, SnapshotError> {
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
        let registration = registration_of(read)?;
        super::check(&registration).map_err(|_| SnapshotError::Invalid("a registration"))?;
        let position = Position { begin: u64_of(read)?, next: u64_of(read)?, digest: u64_of(read)? };
        let mut pairs = Vec::with_capacity(many_of(read, 16)?);
        for _ in 0..pairs.capacity() {
            pairs.push((EngineHash(u64_of(read)?), BlockKey(u64_of(read)?)));
        }
        let known: HashSet<BlockKey, FixedState> = pairs.iter().map(|(_, key)| *key).collect();
        let mut owners = Vec::new();
        for _ in 0..len_of(read, 18)? {
            let (dp_rank, looks_ahead) = (u32_of(read)?, u8_of(read)? != 0);
            let (tier, group) = (usize::from(u8_of(read)?), u32_of(read)?);
            let tier = *Tier::ALL.get(tier).ok_or(SnapshotError::Invalid("a tier"))?;
            let mut blocks = Vec::with_capacity(many_of(read, 12)?);
            for _ in 0..blocks.capacity() {
                let (depth, key) = (u32_of(read)?, BlockKey(u64_of(read)?));
                let parent = if depth == 0 { None } else { Some(BlockKey(u64_of(read)?)) };
                if !known.contains(&key) {
                    return Err(SnapshotError::Invalid("a block whose hash is not known"));
                }
                blocks.push(HeldBlock { depth, key, parent });
            }
            if !blocks.is_sorted() {
                return Err(SnapshotError::Invalid("the order of blocks"));
            }
            owners.push(SaidOwner { dp_rank, looks_ahead, tier, group, blocks });
        }
        if !read.is_empty() {
            return Err(SnapshotError::Invalid("bytes follow its end"));
        }
        Ok(Self { seed, registration, position, pairs, owners })
    }
}

/// A count in 64 bits of things that have `bytes` bytes each at least.
fn many_of(read: &mut &[u8], bytes: usize) -> Result<usize, SnapshotError> {
    let count = usize::try_from(u64_of(read)?).map_err(|_| CUT)?;
    if count > read.len() / bytes { Err(CUT) } else { Ok(count) }
}

impl Knowledge {
    /// What a publisher said up to `position`, where its stream has to be. None for a store: what a store has
    /// can be told only together with objects that wait, and ours tells everything itself. The time is that
    /// of visiting every block and every learnt hash of the publisher's context.
    #[must_use]
    pub fn said_by(&self, id: PublisherId, position: Position) -> Option<Said> {
        let publisher = self.publishers.get(&id)?;
        if publisher.registration.role != Role::Engine {
            return None;
        }
        let state = self.contexts.get(publisher.context.0 as usize)?;
        let mut owners = Vec::new();
        for (context, dp_rank, rank) in &publisher.ranks {
            let Some(rank) = state.rank(*rank).filter(|_| *context == publisher.context) else { continue };
            for tier in Tier::ALL {
                for (group, owner) in &rank.tiers[tier as usize] {
                    let mut blocks = Vec::new();
                    state.index.blocks_of(*owner, &mut blocks);
                    if !blocks.is_empty() {
                        let (dp_rank, group, looks_ahead) = (*dp_rank, *group, rank.looks_ahead);
                        owners.push(SaidOwner { dp_rank, looks_ahead, tier, group, blocks });
                    }
                }
            }
        }
        let keys: HashSet<BlockKey, FixedState> =
            owners.iter().flat_map(|owner| &owner.blocks).map(|block| block.key).collect();
        let pairs = state.learned.pairs().filter(|(_, key)| keys.contains(key)).collect();
        let (seed, registration) = (self.settings.seed, publisher.registration.clone());
        Some(Said { seed, registration, position, pairs, owners })
    }

    /// Records `budget` steps of what a publisher said to another Conductor, from the step `from` on; returns
    /// the next step, which is [`Said::steps`] at the end. What it had said here has to be forgotten before
    /// ([`Knowledge::fence`]), and until the end nothing else is to be called that changes what is known.
    /// None: it is of another publisher, or a limit was reached. Then a part of it may be recorded, and has
    /// to be forgotten.
    pub fn adopt(&mut self, id: PublisherId, said: &Said, from: usize, budget: usize) -> Option<usize> {
        let publisher = self.publishers.get_mut(&id)?;
        if publisher.registration != said.registration || self.settings.seed != said.seed {
            return None;
        }
        let context = publisher.context;
        let state = self.contexts.get_mut(context.0 as usize)?;
        let mut step = from;
        let end = from.saturating_add(budget).min(said.steps());
        while let Some((hash, key)) = said.pairs.get(step).filter(|_| step < end) {
            // A block whose hash is not known could never be removed.
            if state.learned.learn(*hash, *key) == Learnt::Full {
                return None;
            }
            step += 1;
        }
        let mut first = said.pairs.len();
        for owner in &said.owners {
            let (begin, behind) = (step.max(first), end.min(first + owner.blocks.len()));
            if begin < behind {
                let ranks_max = self.settings.ranks_per_publisher_max;
                let rank = rank_of(publisher, state, context, owner.dp_rank, ranks_max)?;
                if let Some(Some(rank)) = state.ranks.get_mut(rank as usize) {
                    rank.looks_ahead |= owner.looks_ahead;
                }
                let at = state.owner_or_new(rank, owner.tier, owner.group, self.settings.groups_max)?;
                state.index.adopt(at, &owner.blocks[begin - first..behind - first]);
            }
            first += owner.blocks.len();
        }
        // What was learnt for blocks that did not fit is swept.
        state.unswept = usize::MAX;
        Some(end)
    }
}
