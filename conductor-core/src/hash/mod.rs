//! Hashes of blocks: the Conductor's own chain, and the chains of the engines.
//!
//! The Conductor names a block by its own chain, never by that of an engine: engines change theirs between
//! releases, and events tell which hash of an engine belongs to which tokens. The chain is the standard hash
//! of Mooncake's KV events (`docs/source/api-reference/http/conductor-indexer.md`, "Hashing standard"):
//!
//! ```text
//!   local[i] = XXH3-64(tokens of block i as little-endian u32, seed)
//!   key[0]   = local[0]                                        without LoRA adapter and salt
//!   key[0]   = XXH3-64(le64 root || le64 local[0], seed)       root = hash of adapter and salt
//!   key[i]   = XXH3-64(le64 key[i-1] || le64 local[i], seed)
//! ```
//!
//! A block with more than tokens in it (an image, a prompt given as embeddings) has these extra keys folded
//! into its local hash. The modules [`vllm`] and [`sglang`] compute what those engines publish: for tests,
//! for a simulated engine, and for queries by an engine's own hashes.

mod session;
pub mod sglang;
pub mod vllm;

pub use session::Session;

use alloc::vec::Vec;

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};
use zerocopy::IntoBytes;

use crate::BlockKey;

/// Where a chain begins: its seed, and what separates it from the chains of other prompts with the same
/// tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Root {
    seed: u64,
    before: Option<BlockKey>,
}

impl Root {
    /// The root of prompts without LoRA adapter and salt. Every publisher of standard hashes, every client
    /// that asks by them and the Conductor have to agree on `seed`; Mooncake's default is 0.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { seed, before: None }
    }

    /// The root of prompts with these. Without either it is [`new`](Self::new); an empty text is none.
    #[must_use]
    pub fn of(seed: u64, lora: Option<&str>, salt: Option<&str>) -> Self {
        let (lora, salt) = (lora.unwrap_or_default(), salt.unwrap_or_default());
        if lora.is_empty() && salt.is_empty() {
            return Self::new(seed);
        }
        let mut hasher = Xxh3::with_seed(seed);
        hasher.update(b"snowskin root 1");
        // The length in front makes ("a", "bc") and ("ab", "c") differ.
        hasher.update(&(lora.len() as u64).to_le_bytes());
        hasher.update(lora.as_bytes());
        hasher.update(salt.as_bytes());
        Self { seed, before: Some(BlockKey(hasher.digest())) }
    }

    /// The seed.
    #[must_use]
    pub const fn seed(&self) -> u64 {
        self.seed
    }
}

/// A chain of keys under construction.
#[derive(Clone, Copy, Debug)]
pub struct Chain {
    seed: u64,
    before: Option<BlockKey>,
}

impl Chain {
    /// A chain whose next block is the first of a prompt.
    #[must_use]
    pub const fn new(root: &Root) -> Self {
        Self { seed: root.seed, before: root.before }
    }

    /// A chain whose next block follows the block `parent`. What separates prompts with equal tokens is part
    /// of `parent` already, so only the seed is needed.
    #[must_use]
    pub const fn after(seed: u64, parent: BlockKey) -> Self {
        Self { seed, before: Some(parent) }
    }

    /// The key of the next block, which has `tokens` and nothing else. The caller passes full blocks only.
    pub fn push(&mut self, tokens: &[u32]) -> BlockKey {
        let local = local(tokens, self.seed);
        self.link(local)
    }

    /// The key of the next block, which has `tokens` and `extra`: what else decides its content, in the form
    /// in which events have it ([`Extra`](crate::events::Extra)). With an empty `extra` it is
    /// [`push`](Self::push).
    pub fn push_with(&mut self, tokens: &[u32], extra: &[u8]) -> BlockKey {
        if extra.is_empty() {
            return self.push(tokens);
        }
        let mut hasher = Xxh3::with_seed(self.seed);
        hasher.update(&local(tokens, self.seed).to_le_bytes());
        hasher.update(b"snowskin extra 1");
        hasher.update(extra);
        self.link(hasher.digest())
    }

    fn link(&mut self, local: u64) -> BlockKey {
        let key = match self.before {
            None => BlockKey(local),
            Some(BlockKey(before)) => {
                let pair = (u128::from(local) << 64) | u128::from(before);
                BlockKey(xxh3_64_with_seed(&pair.to_le_bytes(), self.seed))
            }
        };
        self.before = Some(key);
        key
    }
}

/// Appends to `out` the key of every full block of `tokens`; the rest behind the last full block has none.
/// With a `block_tokens` of zero there is no block.
pub fn keys(tokens: &[u32], block_tokens: u32, root: &Root, out: &mut Vec<BlockKey>) {
    let mut chain = Chain::new(root);
    extend(&mut chain, tokens, block_tokens, out);
}

/// As [`keys`], from wherever `chain` is.
pub fn extend(chain: &mut Chain, tokens: &[u32], block_tokens: u32, out: &mut Vec<BlockKey>) {
    if block_tokens == 0 {
        return;
    }
    let blocks = tokens.chunks_exact(block_tokens as usize);
    out.reserve(blocks.len());
    out.extend(blocks.map(|block| chain.push(block)));
}

/// The hash of a block's tokens alone.
#[cfg(target_endian = "little")]
fn local(tokens: &[u32], seed: u64) -> u64 {
    xxh3_64_with_seed(tokens.as_bytes(), seed)
}

#[cfg(target_endian = "big")]
fn local(tokens: &[u32], seed: u64) -> u64 {
    let swapped: Vec<u32> = tokens.iter().map(|token| token.swap_bytes()).collect();
    xxh3_64_with_seed(swapped.as_bytes(), seed)
}

#[cfg(test)]
mod tests;
