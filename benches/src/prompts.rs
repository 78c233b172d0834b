//! Prompts as chains of blocks, and the events of engines that serve them.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;

use conductor_core::index::Index;
use conductor_core::{BlockKey, OwnerId};

/// Blocks of 16 tokens in one of the trace, which has 512.
const BLOCKS_PER_ID: u64 = 32;
/// Blocks in a message of an engine.
const MESSAGE_BLOCKS: usize = 64;

/// SplitMix64's mix.
#[must_use]
pub const fn mix(value: u64) -> u64 {
    let mut mixed = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Prompts: lists of ids of blocks of 512 tokens, where an id stands for everything before it, too.
#[derive(Debug)]
pub struct Prompts {
    ids: Vec<Vec<u64>>,
}

impl Prompts {
    /// The prompts of a trace of Mooncake, one JSON object per line with a list `hash_ids`.
    ///
    /// # Errors
    ///
    /// The file cannot be read.
    pub fn from_trace(path: &Path) -> std::io::Result<Self> {
        let text = std::fs::read_to_string(path)?;
        let ids_of = |line: &str| {
            let list = line.split_once("\"hash_ids\"")?.1.split_once('[')?.1.split_once(']')?.0;
            list.split(',').map(|id| id.trim().parse().ok()).collect::<Option<Vec<u64>>>()
        };
        Ok(Self { ids: text.lines().filter_map(ids_of).collect() })
    }

    /// Conversations like those of Mooncake's trace: every prompt begins with one shared block, 36 % of the
    /// blocks were in an earlier prompt, and the mean is 24 blocks of 512 tokens.
    #[must_use]
    pub fn synthetic(count: usize) -> Self {
        let mut ids: Vec<Vec<u64>> = Vec::with_capacity(count);
        let mut next = 1;
        for at in 0..count as u64 {
            let continues = at > 16 && mix(at) % 5 < 2;
            let mut prompt = if continues {
                // The next turn of a recent conversation.
                let back = 1 + mix(at ^ 0xabcd) % at.min(400);
                ids[(at - back) as usize].clone()
            } else {
                vec![0]
            };
            let new = if continues { 1 + mix(at ^ 0x77) % 7 } else { 2 + mix(at ^ 0x99) % 32 };
            prompt.extend(next..next + new);
            next += new;
            ids.push(prompt);
        }
        Self { ids }
    }

    /// The blocks of one id.
    fn blocks(id: u64) -> impl Iterator<Item = BlockKey> {
        (0..BLOCKS_PER_ID).map(move |at| BlockKey(mix(id * BLOCKS_PER_ID + at)))
    }

    /// The chains that have at least `depth` blocks, cut to as many.
    #[must_use]
    pub fn chains(&self, depth: usize) -> Vec<Vec<BlockKey>> {
        let long = self.ids.iter().filter(|ids| ids.len() * BLOCKS_PER_ID as usize >= depth);
        long.map(|ids| ids.iter().flat_map(|id| Self::blocks(*id)).take(depth).collect()).collect()
    }

    /// The events of `engines` engines that get the prompts at random, each prompt cut to `depth` blocks,
    /// until every engine has `blocks` blocks or the prompts were served eight times.
    #[must_use]
    pub fn events(&self, engines: u32, blocks: usize, depth: usize) -> Events {
        let mut events = Events::default();
        let mut has: Vec<HashSet<u64>> = (0..engines).map(|_| HashSet::new()).collect();
        let mut counts = vec![0; engines as usize];
        let mut full = 0;
        let rounds = (0..8).flat_map(|round| self.ids.iter().enumerate().map(move |prompt| (round, prompt)));
        for (round, (at, ids)) in rounds {
            if full == engines {
                break;
            }
            let engine = (mix((round << 32) | at as u64) % u64::from(engines)) as usize;
            if counts[engine] >= blocks {
                continue;
            }
            let ids = &ids[..ids.len().min(depth.div_ceil(BLOCKS_PER_ID as usize))];
            let cached = ids.iter().take_while(|id| has[engine].contains(id)).count();
            has[engine].extend(&ids[cached..]);
            let room = depth.saturating_sub(cached * BLOCKS_PER_ID as usize).min(blocks - counts[engine]);
            let new: Vec<_> = ids[cached..].iter().flat_map(|id| Self::blocks(*id)).take(room).collect();
            let parent = cached.checked_sub(1).and_then(|last| Self::blocks(ids[last]).last());
            counts[engine] += new.len();
            full += u32::from(counts[engine] >= blocks);
            events.store(OwnerId(engine as u32), parent, &new);
        }
        events
    }
}

/// A message of an engine: it stored a piece of a chain.
#[derive(Clone, Debug)]
pub struct StoredEvent {
    /// The engine.
    pub owner: OwnerId,
    /// The block before the piece.
    pub parent: Option<BlockKey>,
    /// The piece, in [`Events::keys`].
    pub keys: Range<usize>,
}

/// Messages in their order.
#[derive(Debug, Default)]
pub struct Events {
    /// The blocks of all messages.
    pub keys: Vec<BlockKey>,
    /// The messages.
    pub stored: Vec<StoredEvent>,
}

impl Events {
    /// Appends the messages that store a piece of a chain.
    pub fn store(&mut self, owner: OwnerId, mut parent: Option<BlockKey>, keys: &[BlockKey]) {
        for piece in keys.chunks(MESSAGE_BLOCKS) {
            let start = self.keys.len();
            self.keys.extend_from_slice(piece);
            self.stored.push(StoredEvent { owner, parent, keys: start..self.keys.len() });
            parent = piece.last().copied();
        }
    }

    /// Feeds the messages to an index; returns how many pairs of owner and block were new.
    pub fn apply(&self, index: &mut Index) -> usize {
        self.stored
            .iter()
            .map(|event| index.stored(event.owner, event.parent, &self.keys[event.keys.clone()]).added)
            .sum()
    }
}
