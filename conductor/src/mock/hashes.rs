//! The hashes that an engine gives its blocks: by its own chain, not by the Conductor's.

use std::sync::Arc;

use conductor_core::EngineHash;
use conductor_core::hash::sglang::{SglangChain, published};
use conductor_core::hash::vllm::{Algorithm, ExtraKey, Profile, Release, VllmChain};

use super::batch::Root;
use super::config::Flavor;

/// The hashes of the full blocks of a sequence.
#[derive(Debug)]
pub(crate) struct Hashes {
    chain: Chain,
    salt: Option<Arc<str>>,
    all: Vec<EngineHash>,
}

#[derive(Debug)]
enum Chain {
    Vllm(VllmChain),
    Sglang(SglangChain),
}

/// How an engine hashes.
#[derive(Clone, Debug)]
pub(crate) struct Hasher {
    flavor: Flavor,
    profile: Profile,
}

impl Hasher {
    /// The default of the engine: vLLM's is SHA-256 of pickle; before 0.29 its seed has to be set.
    pub(crate) fn new(flavor: Flavor) -> Self {
        let release = if flavor == Flavor::VllmArrays { Release::UpTo28 } else { Release::From31 };
        let seed = "0".to_owned();
        let profile = Profile::of(release, Algorithm::Sha256, None);
        let profile =
            profile.unwrap_or(Profile { algorithm: Algorithm::Sha256, release, seed, lookahead_tokens: 0 });
        Self { flavor, profile }
    }

    /// The hashes of a new sequence.
    pub(crate) fn begin(&self, root: &Root) -> Hashes {
        let chain = match self.flavor {
            Flavor::Sglang => Chain::Sglang(SglangChain::new(root.salt.as_deref())),
            Flavor::Vllm | Flavor::VllmArrays => Chain::Vllm(VllmChain::new(&self.profile)),
        };
        Hashes { chain, salt: root.salt.clone(), all: Vec::new() }
    }
}

impl Hashes {
    /// Adds the hashes of the full blocks of `tokens` that are not there yet.
    pub(crate) fn extend(&mut self, tokens: &[u32], block_tokens: usize) {
        for block in tokens.chunks_exact(block_tokens).skip(self.all.len()) {
            let hash = match &mut self.chain {
                Chain::Sglang(chain) => published(&chain.push(block)),
                Chain::Vllm(chain) => {
                    let salt = self.salt.as_deref().filter(|_| self.all.is_empty()).map(ExtraKey::Salt);
                    chain.push(block, salt.as_slice(), &[]).published()
                }
            };
            self.all.push(hash);
        }
    }

    pub(crate) fn all(&self) -> &[EngineHash] {
        &self.all
    }
}
