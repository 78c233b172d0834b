//! The keys of a conversation, turn after turn.

use alloc::vec::Vec;

use super::{Chain, Root, extend};
use crate::BlockKey;

/// Keeps the tokens and keys of a prompt, so that the next turn, which begins with the same tokens, has only
/// its new blocks hashed. 4 bytes per token and 8 bytes per block.
#[derive(Clone, Debug)]
pub struct Session {
    root: Root,
    block_tokens: u32,
    tokens: Vec<u32>,
    keys: Vec<BlockKey>,
}

impl Session {
    /// A session without a turn yet.
    #[must_use]
    pub const fn new(root: Root, block_tokens: u32) -> Self {
        Self { root, block_tokens, tokens: Vec::new(), keys: Vec::new() }
    }

    /// The keys of the full blocks of `tokens`: those of the last turn as far as its blocks are the same, and
    /// new ones behind.
    pub fn turn(&mut self, tokens: &[u32]) -> &[BlockKey] {
        if self.block_tokens == 0 {
            return &[];
        }
        let block_tokens = self.block_tokens as usize;
        let same = self
            .tokens
            .chunks_exact(block_tokens)
            .zip(tokens.chunks_exact(block_tokens))
            .take_while(|(ours, theirs)| ours == theirs)
            .count();
        let full = tokens.len() - tokens.len() % block_tokens;
        self.keys.truncate(same);
        self.tokens.truncate(same * block_tokens);
        let new = &tokens[same * block_tokens..full];
        let mut chain = match self.keys.last() {
            Some(&last) => Chain::after(self.root.seed(), last),
            None => Chain::new(&self.root),
        };
        extend(&mut chain, new, self.block_tokens, &mut self.keys);
        self.tokens.extend_from_slice(new);
        &self.keys
    }
}
