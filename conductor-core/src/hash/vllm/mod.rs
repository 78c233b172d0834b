//! The hashes of vLLM's prefix cache.
//!
//! ```text
//!   root    = H(seed)
//!   hash[i] = H((hash[i-1] or root, tokens of block i, extra keys or None))
//! ```
//!
//! `H` is SHA-256 or XXH3-128 of the value, serialised by Python's pickle (protocol 5) or as canonical CBOR:
//! `vllm/utils/hashing.py`, `vllm/v1/core/kv_cache_utils.py`. The seed and the form of the extra keys depend
//! on the release; [`Profile::of`] knows them. Events have the low 64 bits of a hash ([`Digest::published`]),
//! or all of it where `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`.
//!
//! Pickle begins a new frame after 64 KiB. Blocks with fewer than 8192 tokens and shorter texts stay below
//! that; for larger ones the pickled algorithms give other hashes than vLLM.

mod serial;

use alloc::string::String;
use alloc::vec::Vec;

use sha2::{Digest as _, Sha256};
use xxhash_rust::xxh3::xxh3_128;

use self::serial::{Cbor, Pickle, Serial};
use crate::EngineHash;

/// The function `H`: vLLM's `--prefix-caching-hash-algo`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// SHA-256 of pickle: the default.
    Sha256,
    /// SHA-256 of canonical CBOR.
    Sha256Cbor,
    /// XXH3-128 of pickle.
    Xxhash,
    /// XXH3-128 of canonical CBOR.
    XxhashCbor,
}

impl Algorithm {
    /// Every algorithm.
    pub const ALL: [Self; 4] = [Self::Sha256, Self::Sha256Cbor, Self::Xxhash, Self::XxhashCbor];

    /// vLLM's name of it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Sha256Cbor => "sha256_cbor",
            Self::Xxhash => "xxhash",
            Self::XxhashCbor => "xxhash_cbor",
        }
    }

    /// The algorithm of a name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|algorithm| algorithm.name() == name)
    }

    const fn is_cryptographic(self) -> bool {
        matches!(self, Self::Sha256 | Self::Sha256Cbor)
    }

    fn digest(self, bytes: &[u8]) -> Digest {
        let mut digest = Digest { bytes: [0; 32], len: 32 };
        match self {
            Self::Sha256 | Self::Sha256Cbor => digest.bytes.copy_from_slice(&Sha256::digest(bytes)),
            Self::Xxhash | Self::XxhashCbor => {
                digest.len = 16;
                digest.bytes[..16].copy_from_slice(&xxh3_128(bytes).to_be_bytes());
            }
        }
        digest
    }

    /// The hash of what `write` writes.
    fn of(self, buffer: &mut Vec<u8>, write: impl FnOnce(&mut dyn Serial)) -> Digest {
        buffer.clear();
        match self {
            Self::Sha256 | Self::Xxhash => Pickle::write(buffer, write),
            Self::Sha256Cbor | Self::XxhashCbor => write(&mut Cbor::new(buffer)),
        }
        self.digest(buffer)
    }
}

/// Releases of vLLM that hash alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Release {
    /// Until 0.28: without a seed of the user the root is random.
    UpTo28,
    /// 0.29 and 0.30: without one, SHA-256 has a seed that everybody knows.
    From29,
    /// Since 0.31: extra keys are tagged, and the adapter has its path beside its name.
    From31,
}

impl Release {
    /// The seed of the root if the user sets none (`PYTHONHASHSEED`); `None` if it is random.
    #[must_use]
    pub const fn default_seed(self, algorithm: Algorithm) -> Option<&'static str> {
        match self {
            Self::From29 | Self::From31 if algorithm.is_cryptographic() => Some("vllm-none-hash"),
            _ => None,
        }
    }

    /// Whether extra keys are tagged.
    #[must_use]
    pub const fn tags(self) -> bool {
        matches!(self, Self::From31)
    }
}

/// Everything that decides the hashes of an instance of vLLM, besides the prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// The function.
    pub algorithm: Algorithm,
    /// The releases.
    pub release: Release,
    /// What the root is the hash of.
    pub seed: String,
    /// How many tokens behind a block are part of its hash: 0, but for drafters since 0.33 (EAGLE, MTP).
    pub lookahead_tokens: u32,
}

impl Profile {
    /// The profile of an instance that was started with `seed` as `PYTHONHASHSEED`, or without. `None` if the
    /// root is then random: such hashes can only be learnt from events.
    #[must_use]
    pub fn of(release: Release, algorithm: Algorithm, seed: Option<&str>) -> Option<Self> {
        let seed = seed.or_else(|| release.default_seed(algorithm))?;
        Some(Self { algorithm, release, seed: String::from(seed), lookahead_tokens: 0 })
    }

    /// The hash before the first block (`NONE_HASH`).
    #[must_use]
    pub fn root(&self) -> Digest {
        self.algorithm.of(&mut Vec::new(), |serial| serial.text(&self.seed))
    }
}

/// A hash as vLLM has it inside: 32 bytes of SHA-256, 16 of XXH3-128.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Digest {
    bytes: [u8; 32],
    len: u8,
}

impl Digest {
    /// The bytes, which events have where vLLM is told so.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// The number that events have: the last 8 bytes, most significant first.
    #[must_use]
    pub fn published(&self) -> EngineHash {
        EngineHash(self.as_bytes().last_chunk().map_or(0, |last| u64::from_be_bytes(*last)))
    }
}

/// What decides the content of a block besides tokens. vLLM has them in this order in each block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtraKey<'a> {
    /// The adapter, in every block.
    Lora {
        /// Its name.
        name: &'a str,
        /// Its path, which releases without tags leave out.
        path: &'a str,
    },
    /// An image or other input of which the block has a part.
    Media {
        /// Its identifier.
        identifier: &'a str,
        /// Where it begins, in tokens from the beginning of the block.
        offset: i64,
    },
    /// The salt of the request, in its first block.
    Salt(&'a str),
    /// The SHA-256 of the block's part of a prompt that was given as embeddings.
    Embeddings(&'a [u8]),
}

impl ExtraKey<'_> {
    fn write(&self, serial: &mut dyn Serial, tagged: bool) {
        if !tagged {
            return match *self {
                Self::Lora { name: text, .. } | Self::Salt(text) => serial.text(text),
                Self::Media { identifier, offset } => {
                    serial.begin(2);
                    serial.text(identifier);
                    serial.int(offset);
                    serial.end(2);
                }
                Self::Embeddings(digest) => serial.bytes(digest),
            };
        }
        let values = match self {
            Self::Lora { .. } | Self::Media { .. } => 3,
            Self::Salt(_) | Self::Embeddings(_) => 2,
        };
        serial.begin(values);
        match *self {
            Self::Lora { name, path } => {
                serial.constant("lora");
                serial.text(name);
                serial.text(path);
            }
            Self::Media { identifier, offset } => {
                serial.constant("mm");
                serial.text(identifier);
                serial.int(offset);
            }
            Self::Salt(salt) => {
                serial.constant("cache_salt");
                serial.text(salt);
            }
            Self::Embeddings(digest) => {
                serial.constant("prompt_embeds");
                serial.bytes(digest);
            }
        }
        serial.end(values);
    }
}

/// The hashes of a prompt's blocks, one after the other.
#[derive(Clone, Debug)]
pub struct VllmChain {
    algorithm: Algorithm,
    tagged: bool,
    before: Digest,
    buffer: Vec<u8>,
}

impl VllmChain {
    /// A chain whose next block is the first of a prompt.
    #[must_use]
    pub fn new(profile: &Profile) -> Self {
        Self::after(profile, profile.root())
    }

    /// A chain whose next block follows the block with the hash `parent`.
    #[must_use]
    pub fn after(profile: &Profile, parent: Digest) -> Self {
        Self {
            algorithm: profile.algorithm,
            tagged: profile.release.tags(),
            before: parent,
            buffer: Vec::new(),
        }
    }

    /// The hash of the next block. `lookahead` are the tokens behind it that are part of its hash, as many as
    /// [`Profile::lookahead_tokens`]. The extra keys are to be in the order of [`ExtraKey`].
    pub fn push(&mut self, tokens: &[u32], extra: &[ExtraKey<'_>], lookahead: &[u32]) -> Digest {
        let (before, tagged) = (self.before, self.tagged);
        let digest = self.algorithm.of(&mut self.buffer, |serial| {
            serial.begin(3);
            serial.bytes(before.as_bytes());
            serial.begin(tokens.len());
            tokens.iter().for_each(|&token| serial.int(i64::from(token)));
            serial.end(tokens.len());
            if lookahead.is_empty() {
                extra_keys(serial, extra, tagged);
            } else {
                serial.begin(1 + lookahead.len());
                extra_keys(serial, extra, tagged);
                lookahead.iter().for_each(|&token| serial.int(i64::from(token)));
                serial.end(1 + lookahead.len());
            }
            serial.end(3);
        });
        self.before = digest;
        digest
    }
}

fn extra_keys(serial: &mut dyn Serial, extra: &[ExtraKey<'_>], tagged: bool) {
    if extra.is_empty() {
        return serial.none();
    }
    serial.begin(extra.len());
    extra.iter().for_each(|key| key.write(serial, tagged));
    serial.end(extra.len());
}

/// Appends to `out` the hash of every full block of a prompt of text. Its last blocks have no hash yet where
/// they need tokens that are still to come. `lora` is the adapter's name and path.
pub fn hashes(
    profile: &Profile,
    tokens: &[u32],
    block_tokens: u32,
    lora: Option<(&str, &str)>,
    salt: Option<&str>,
    out: &mut Vec<Digest>,
) {
    if block_tokens == 0 {
        return;
    }
    let (block_tokens, lookahead) = (block_tokens as usize, profile.lookahead_tokens as usize);
    let lora = lora.map(|(name, path)| ExtraKey::Lora { name, path });
    let first: Vec<ExtraKey<'_>> = lora.into_iter().chain(salt.map(ExtraKey::Salt)).collect();
    let rest = &first[..usize::from(lora.is_some())];
    let mut chain = VllmChain::new(profile);
    for (block, own) in tokens.chunks_exact(block_tokens).enumerate() {
        let end = (block + 1) * block_tokens;
        let Some(behind) = tokens.get(end..end + lookahead) else { break };
        out.push(chain.push(own, if block == 0 { &first } else { rest }, behind));
    }
}
