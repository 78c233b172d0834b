//! The hashes of `SGLang`'s radix cache.
//!
//! ```text
//!   page[i] = SHA-256(page[i-1] or the salt's seed or nothing || tokens of page i as little-endian u32)
//!   event   = the first 8 bytes of page[i], most significant first, as a signed number
//! ```
//!
//! `sglang/srt/mem_cache/utils.py`, `events.py` and `cpp_utils/hash_binding.cpp` of 0.5.23. The number of an
//! event is hashed once more with a [`Namespace`] if the prompt has a named adapter, and with the setting
//! `format: dynamo`. Pages with tokens of more than 32 bits, which `SGLang` hashes in another form, are left
//! out here: no vocabulary has such tokens.

use alloc::vec::Vec;

use sha2::{Digest as _, Sha256};

use crate::EngineHash;

/// The hash of a page.
pub type PageDigest = [u8; 32];

/// The hashes of a prompt's pages, one after the other.
#[derive(Clone, Copy, Debug, Default)]
pub struct SglangChain {
    before: Option<PageDigest>,
}

impl SglangChain {
    /// A chain whose next page is the first of a prompt.
    #[must_use]
    pub fn new(salt: Option<&str>) -> Self {
        let seed = |salt: &str| {
            Sha256::new().chain_update(b"sglang-cache-salt-v1\0").chain_update(salt).finalize().into()
        };
        Self { before: salt.map(seed) }
    }

    /// A chain whose next page follows the page `parent`.
    #[must_use]
    pub const fn after(parent: PageDigest) -> Self {
        Self { before: Some(parent) }
    }

    /// The hash of the next page. The last page of a prompt may have fewer tokens than the others.
    pub fn push(&mut self, tokens: &[u32]) -> PageDigest {
        let mut hasher = self.begin();
        tokens.iter().for_each(|token| hasher.update(token.to_le_bytes()));
        self.end(hasher)
    }

    /// The hash of the next page of a prompt with a drafter (EAGLE): every token is hashed with the one
    /// behind it, so `tokens` has one more than the page.
    pub fn push_pairs(&mut self, tokens: &[u32]) -> PageDigest {
        let mut hasher = self.begin();
        for pair in tokens.windows(2) {
            pair.iter().for_each(|token| hasher.update(token.to_le_bytes()));
        }
        self.end(hasher)
    }

    fn begin(&self) -> Sha256 {
        let mut hasher = Sha256::new();
        if let Some(before) = self.before {
            hasher.update(before);
        }
        hasher
    }

    fn end(&mut self, hasher: Sha256) -> PageDigest {
        let digest = hasher.finalize().into();
        self.before = Some(digest);
        digest
    }
}

/// The number that events have for a page. As a signed number it is negative where the first bit is set;
/// [`EngineHash`] has the same 64 bits.
#[must_use]
pub fn published(page: &PageDigest) -> EngineHash {
    EngineHash(page.first_chunk().map_or(0, |first| u64::from_be_bytes(*first)))
}

/// Appends to `out` the number of every page of a prompt, of the last one, too, if it is not full.
pub fn hashes(tokens: &[u32], page_tokens: u32, salt: Option<&str>, out: &mut Vec<EngineHash>) {
    if page_tokens == 0 {
        return;
    }
    let mut chain = SglangChain::new(salt);
    out.extend(tokens.chunks(page_tokens as usize).map(|page| published(&chain.push(page))));
}

/// What is folded into each number: of a prompt with a named adapter its extra key, and with the setting
/// `format: dynamo` the extra key and the salt of every prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Namespace(Option<PageDigest>);

impl Namespace {
    /// The namespace of prompts with this extra key (that of an adapter, mostly) and this salt. An empty text
    /// is another one than none; with neither, numbers stay as they are.
    #[must_use]
    pub fn new(extra_key: Option<&str>, salt: Option<&str>) -> Self {
        if extra_key.is_none() && salt.is_none() {
            return Self(None);
        }
        let mut hasher = Sha256::new();
        hasher.update(b"sglang-kv-event-namespace-v1");
        for part in [extra_key, salt] {
            match part {
                None => hasher.update([0]),
                Some(text) => {
                    hasher.update([1]);
                    hasher.update((text.len() as u64).to_le_bytes());
                    hasher.update(text);
                }
            }
        }
        Self(Some(hasher.finalize().into()))
    }

    /// The number that is published in place of `hash`.
    #[must_use]
    pub fn apply(&self, hash: EngineHash) -> EngineHash {
        let Some(seed) = self.0 else { return hash };
        let digest = Sha256::new().chain_update(seed).chain_update(hash.0.to_be_bytes()).finalize();
        published(&digest.into())
    }
}
