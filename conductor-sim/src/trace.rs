//! Requests with their arrival times and the blocks of their prompts.

use std::collections::BTreeMap;

use crate::random::Random;

/// Tokens per block of the traces.
pub const BLOCK_TOKENS: u32 = 512;
/// Tokens per block of the paper's store (Section 5.1), which is what can be reused of a trace's last block.
pub const STORE_BLOCK_TOKENS: u32 = 256;
/// Arrivals of the published traces are rounded down to multiples of this, milliseconds.
pub const BIN_MS: u64 = 3_000;
/// Most requests of one trace.
pub const REQUESTS_MAX: usize = 4_000_000;
/// Most blocks of one prompt: 128 M tokens, which no model reads.
pub const BLOCKS_MAX: usize = 256 << 10;

/// One request of a [`Trace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The arrival, milliseconds from the beginning of the trace, rounded down to its bin.
    pub bin_ms: u64,
    /// Length of the prompt, tokens; not zero.
    pub tokens: u32,
    /// Length of the answer, tokens; not zero.
    pub output: u32,
    first_block: u32,
    blocks: u32,
}

impl Request {
    /// Tokens that the first `blocks` of the prompt's blocks save. The last token is always computed.
    #[must_use]
    pub fn reusable_tokens(&self, blocks: u32) -> u32 {
        let stored = self.tokens / STORE_BLOCK_TOKENS * STORE_BLOCK_TOKENS;
        blocks.saturating_mul(BLOCK_TOKENS).min(stored).min(self.tokens - 1)
    }
}

/// A trace: requests in the order of their arrivals. Blocks are numbered densely from 0.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    requests: Vec<Request>,
    blocks: Vec<u32>,
    dense: BTreeMap<u64, u32>,
}

/// Why a request is not part of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TraceError {
    /// The request's arrival is before the one that came before it.
    Order {
        /// The arrival, milliseconds.
        arrival_ms: u64,
    },
    /// The request has no prompt, or one that is too long.
    Tokens {
        /// Tokens of the prompt.
        tokens: u64,
        /// The hashes that came with it.
        hashes: usize,
    },
    /// The trace is full.
    Full,
}

impl core::fmt::Display for TraceError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Order { arrival_ms } => {
                write!(f, "the request arrives at {arrival_ms} ms, before the one above it; sort the trace")
            }
            Self::Tokens { tokens, hashes } => write!(
                f,
                "the prompt has {tokens} tokens and {hashes} hashes of blocks; expected 1 token or more, and at \
                 least one hash per {BLOCK_TOKENS} tokens, of which at most {BLOCKS_MAX} are accepted"
            ),
            Self::Full => write!(f, "more than {REQUESTS_MAX} requests; cut the trace"),
        }
    }
}

impl std::error::Error for TraceError {}

impl Trace {
    /// Adds a request. `hashes` name its blocks, each together with all blocks before it. The last block is
    /// kept when it has at least one block of the store, as only full blocks of the store can be reused. An
    /// answer of no tokens counts as one token.
    ///
    /// # Errors
    /// The request is out of order, has no tokens or too few hashes, or the trace is full.
    pub fn push(
        &mut self,
        arrival_ms: u64,
        tokens: u64,
        output: u64,
        hashes: &[u64],
    ) -> Result<(), TraceError> {
        if self.requests.len() >= REQUESTS_MAX {
            return Err(TraceError::Full);
        }
        if self.requests.last().is_some_and(|last| arrival_ms < last.bin_ms) {
            return Err(TraceError::Order { arrival_ms });
        }
        let (block, store_block) = (u64::from(BLOCK_TOKENS), u64::from(STORE_BLOCK_TOKENS));
        let kept = (tokens / store_block * store_block).div_ceil(block);
        if tokens == 0 || kept > hashes.len() as u64 || kept > BLOCKS_MAX as u64 {
            return Err(TraceError::Tokens { tokens, hashes: hashes.len() });
        }
        let first_block = u32::try_from(self.blocks.len()).map_err(|_| TraceError::Full)?;
        for hash in &hashes[..kept as usize] {
            let fresh = self.dense.len() as u32;
            self.blocks.push(*self.dense.entry(*hash).or_insert(fresh));
        }
        self.requests.push(Request {
            bin_ms: arrival_ms,
            tokens: tokens as u32,
            output: u32::try_from(output).unwrap_or(u32::MAX).max(1),
            first_block,
            blocks: kept as u32,
        });
        Ok(())
    }

    /// The requests, in the order of their arrivals.
    #[must_use]
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// The blocks of a request's prompt that can be reused, in order.
    #[must_use]
    pub fn blocks_of(&self, request: &Request) -> &[u32] {
        &self.blocks[request.first_block as usize..][..request.blocks as usize]
    }

    /// Number of distinct blocks.
    #[must_use]
    pub fn distinct_blocks(&self) -> usize {
        self.dense.len()
    }

    /// Arrival times, nanoseconds, in the order of the requests: each bin's requests are spread evenly at
    /// random over its three seconds, and the whole trace is replayed `speed` times as fast.
    #[must_use]
    pub fn arrivals_ns(&self, seed: u64, speed: f64) -> Vec<u64> {
        let mut random = Random::new(seed);
        let mut times: Vec<u64> = self
            .requests
            .iter()
            .map(|request| request.bin_ms * 1_000_000 + random.below(BIN_MS * 1_000_000))
            .collect();
        // Requests of one bin keep their order, as turns of one conversation may be in it.
        times.sort_unstable();
        times.iter().map(|at| (*at as f64 / speed) as u64).collect()
    }
}
