//! The chain of hashes of an engine: its own, not the Conductor's.

use conductor_core::EngineHash;

use super::batch::Root;
use super::config::Flavor;

/// The hashes of the full blocks of a sequence.
#[derive(Clone, Debug)]
pub(crate) struct Hashes {
    flavor: Flavor,
    root: u64,
    all: Vec<EngineHash>,
}

impl Hashes {
    pub(crate) fn new(flavor: Flavor) -> Self {
        Self { flavor, root: 0, all: Vec::new() }
    }

    /// The chain of a new sequence.
    pub(crate) fn begin(&self, root: &Root) -> Self {
        let salt = root.salt.as_deref().unwrap_or_default();
        let root = salt.bytes().fold(self.flavor as u64, |hash, byte| mix(hash ^ u64::from(byte)));
        Self { flavor: self.flavor, root, all: Vec::new() }
    }

    /// Adds the hashes of the full blocks of `tokens` that are not there yet.
    pub(crate) fn extend(&mut self, tokens: &[u32], block_tokens: usize) {
        for block in tokens.chunks_exact(block_tokens).skip(self.all.len()) {
            let parent = self.all.last().map_or(self.root, |hash| hash.0);
            let hash = block.iter().fold(mix(parent), |hash, &token| mix(hash ^ u64::from(token)));
            self.all.push(EngineHash(hash));
        }
    }

    pub(crate) fn all(&self) -> &[EngineHash] {
        &self.all
    }
}

fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (x ^ (x >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) ^ (x >> 31)
}
