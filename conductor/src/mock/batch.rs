//! What a mock engine computes: requests that wait, that are prefilled in chunks, and that decode together.
//!
//! ```text
//!   submit ──▶ waiting ──▶ prefilling ──▶ decoding ──▶ ended: blocks are released,
//!                │ (room)   (one at a time,  (all, one    or held for a decode engine
//!                └─ blocks that are reused    token per    that fetches them
//!                                             step)
//! ```
//!
//! Steps have a duration, by the cost model, and no clock: the caller waits between [`Batch::plan`] and
//! [`Batch::finish`].

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use conductor_core::EngineHash;
use conductor_core::cost::{CostModel, PrefillWork};
use tokio::sync::mpsc::UnboundedSender;

use super::cache::{BlockCache, Event};
use super::config::MockConfig;
use super::hashes::{Hasher, Hashes};
use super::tokens::Generator;

/// Requests whose blocks wait for a decode engine; beyond them the oldest is released.
const HELD_MAX: usize = 4_096;

/// What a request gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// The prompt is computed; this many of its tokens were reused.
    Prefilled { reused: u32 },
    /// A token.
    Token(u32),
    /// No more tokens.
    Ended,
}

/// A request.
#[derive(Debug)]
pub(crate) struct Work {
    /// The prompt; not empty.
    pub(crate) tokens: Vec<u32>,
    /// LoRA adapter and salt.
    pub(crate) root: Root,
    /// Tokens to generate; not 0.
    pub(crate) output_tokens: u32,
    /// Where the prompt's KV comes from, and where it goes.
    pub(crate) kv: Kv,
    /// Receives the output. A closed one cancels the request.
    pub(crate) out: UnboundedSender<Output>,
}

/// What distinguishes chains of equal tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Root {
    /// The LoRA adapter's name.
    pub(crate) lora: Option<String>,
    /// The salt of the cache.
    pub(crate) salt: Option<Arc<str>>,
}

/// Where the KV of a prompt comes from, and where it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kv {
    /// Computed here, released at the end.
    Own,
    /// Computed here, held under this number at the end, until it is fetched.
    Held(u64),
    /// It came from a prefill engine, so that only decoding is left.
    Fetched,
}

#[derive(Debug)]
struct Sequence {
    work: Work,
    model: Generator,
    hashes: Hashes,
    /// Prompt and output.
    tokens: Vec<u32>,
    /// Blocks that it uses in the cache.
    used: Vec<EngineHash>,
    /// No room was left for further blocks.
    is_full: bool,
    reused: u32,
    generated: u32,
    /// Chunks of prefill that are done, and all.
    chunks: (u32, u32),
    /// Seconds per chunk.
    chunk_s: f64,
}

/// Counters of an engine since its start, and its state now.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Load {
    /// Requests that are prefilled or decode.
    pub(crate) running: u32,
    /// Requests that wait.
    pub(crate) waiting: u32,
    /// Tokens of blocks in the GPU's memory, and their most.
    pub(crate) tokens: u64,
    pub(crate) tokens_max: u64,
    /// Tokens of waiting requests that are not in the cache.
    pub(crate) waiting_uncached: u64,
    /// Tokens of running requests.
    pub(crate) context: u64,
    /// Prompt tokens that were computed, and that were reused.
    pub(crate) prefilled_total: u64,
    pub(crate) reused_total: u64,
    /// Time spent on them, seconds of the simulated engine.
    pub(crate) prefill_busy_s: f64,
    /// Tokens generated.
    pub(crate) generated_total: u64,
    /// Requests that were submitted.
    pub(crate) requests_total: u64,
}

/// The engine's state.
#[derive(Debug)]
pub(crate) struct Batch {
    cost: CostModel,
    block_tokens: usize,
    chunk_tokens: u32,
    running_max: usize,
    waiting_max: usize,
    noise: Noise,
    hasher: Hasher,
    cache: BlockCache,
    waiting: VecDeque<Work>,
    prefilling: VecDeque<Sequence>,
    decoding: Vec<Sequence>,
    held: HashMap<u64, Vec<EngineHash>>,
    held_order: VecDeque<u64>,
    newly_held: Vec<u64>,
    totals: Load,
    /// A step was planned and is not finished; its parts.
    planned: Option<(bool, usize)>,
}

impl Batch {
    pub(crate) fn new(config: &MockConfig) -> Self {
        Self {
            cost: config.cost,
            block_tokens: config.block_tokens.max(1) as usize,
            chunk_tokens: config.chunk_tokens.max(1),
            running_max: config.running_max.max(1) as usize,
            waiting_max: config.waiting_max as usize,
            noise: Noise { amount: config.noise.clamp(0.0, 1.0), state: config.seed },
            hasher: Hasher::new(config.flavor),
            cache: BlockCache::new(
                config.gpu_blocks as usize,
                config.cpu_blocks as usize,
                config.disk_blocks as usize,
            ),
            waiting: VecDeque::new(),
            prefilling: VecDeque::new(),
            decoding: Vec::new(),
            held: HashMap::new(),
            held_order: VecDeque::new(),
            newly_held: Vec::new(),
            totals: Load::default(),
            planned: None,
        }
    }

    /// Adds a request. Returns false when too many wait, or when it can never fit.
    pub(crate) fn submit(&mut self, work: Work) -> bool {
        let blocks = self.blocks_of(&work);
        if self.waiting.len() >= self.waiting_max || blocks > self.cache.gpu().1 || work.tokens.is_empty() {
            return false;
        }
        self.totals.requests_total += 1;
        self.waiting.push_back(work);
        true
    }

    /// Begins a step and returns its duration; `None` when there is nothing to do.
    pub(crate) fn plan(&mut self) -> Option<Duration> {
        self.drop_cancelled();
        self.admit();
        let chunk_s = self.prefilling.front().map(|sequence| sequence.chunk_s);
        let context: u64 = self.decoding.iter().map(|sequence| sequence.tokens.len() as u64).sum();
        let decode_s = match self.decoding.len() {
            0 => None,
            sequences => Some(self.cost.decode.seconds(sequences as f64, context as f64)),
        };
        if chunk_s.is_none() && decode_s.is_none() {
            return None;
        }
        let factor = self.noise.factor();
        let prefill_s = chunk_s.unwrap_or(0.0) * factor;
        self.totals.prefill_busy_s += prefill_s;
        self.planned = Some((chunk_s.is_some(), self.decoding.len()));
        Some(Duration::from_secs_f64(prefill_s + decode_s.unwrap_or(0.0) * factor))
    }

    /// Ends the step that was planned: tokens come out, blocks are kept. Returns the numbers under which
    /// blocks are held from now on.
    pub(crate) fn finish(&mut self) -> Vec<u64> {
        let Some((has_prefill, decoding)) = self.planned.take() else { return Vec::new() };
        for at in (0..decoding.min(self.decoding.len())).rev() {
            let (mut sequence, cache) = (self.decoding.swap_remove(at), &mut self.cache);
            sequence.generate(&mut self.totals);
            sequence.keep(cache, self.block_tokens);
            match sequence.is_done() {
                true => self.end(sequence),
                false => self.decoding.push(sequence),
            }
        }
        if has_prefill {
            self.finish_chunk();
        }
        std::mem::take(&mut self.newly_held)
    }

    /// Changes of the cache since the last call.
    pub(crate) fn take_events(&mut self) -> Vec<Event> {
        self.cache.take_events()
    }

    /// Forgets every block that no request uses.
    pub(crate) fn clear_cache(&mut self) {
        self.cache.clear();
    }

    /// Releases held blocks, which were fetched or have waited too long. Returns whether they were held.
    pub(crate) fn release_held(&mut self, number: u64) -> bool {
        match self.held.remove(&number) {
            Some(hashes) => {
                self.cache.release(&hashes);
                self.held_order.retain(|&other| other != number);
                true
            }
            None => false,
        }
    }

    /// Counters and state.
    pub(crate) fn load(&self) -> Load {
        let (held, all) = self.cache.gpu();
        let tokens = |blocks: usize| (blocks * self.block_tokens) as u64;
        let sequences = self.prefilling.iter().chain(&self.decoding);
        Load {
            running: (self.prefilling.len() + self.decoding.len()) as u32,
            waiting: self.waiting.len() as u32,
            tokens: tokens(held),
            tokens_max: tokens(all),
            waiting_uncached: self.waiting.iter().map(|work| work.tokens.len() as u64).sum(),
            context: sequences.map(|sequence| sequence.tokens.len() as u64).sum(),
            ..self.totals
        }
    }

    fn blocks_of(&self, work: &Work) -> usize {
        (work.tokens.len() + work.output_tokens as usize) / self.block_tokens
    }

    fn drop_cancelled(&mut self) {
        self.waiting.retain(|work| !work.out.is_closed());
        let gone = |sequence: &Sequence| sequence.work.out.is_closed();
        for at in (0..self.prefilling.len()).rev() {
            if gone(&self.prefilling[at])
                && let Some(sequence) = self.prefilling.remove(at)
            {
                self.cache.release(&sequence.used);
            }
        }
        for at in (0..self.decoding.len()).rev() {
            if gone(&self.decoding[at]) {
                let sequence = self.decoding.swap_remove(at);
                self.cache.release(&sequence.used);
            }
        }
    }

    fn admit(&mut self) {
        while self.prefilling.len() + self.decoding.len() < self.running_max {
            let Some(work) = self.waiting.front() else { return };
            if self.blocks_of(work) > self.cache.room() {
                return;
            }
            let Some(work) = self.waiting.pop_front() else { return };
            let mut sequence = Sequence::new(work, &self.hasher);
            sequence.hashes.extend(&sequence.tokens, self.block_tokens);
            match sequence.work.kv {
                Kv::Fetched => {
                    sequence.keep(&mut self.cache, self.block_tokens);
                    let _ = sequence.work.out.send(Output::Prefilled { reused: 0 });
                    self.decoding.push(sequence);
                }
                Kv::Own | Kv::Held(_) => {
                    self.reuse(&mut sequence);
                    self.prefilling.push_back(sequence);
                }
            }
        }
    }

    /// Takes the blocks that are held already, and plans the chunks of the rest.
    fn reuse(&mut self, sequence: &mut Sequence) {
        // At least one token has to be computed, or there are no logits.
        let most = (sequence.tokens.len() - 1) / self.block_tokens;
        let (_, held) = self.cache.matched(&sequence.hashes.all()[..most]);
        for at in 0..held {
            let hash = sequence.hashes.all()[at];
            if !self.cache.acquire(hash) {
                break;
            }
            sequence.used.push(hash);
        }
        sequence.reused = (sequence.used.len() * self.block_tokens) as u32;
        let prompt = sequence.tokens.len() as u32;
        sequence.chunks = (0, (prompt - sequence.reused).div_ceil(self.chunk_tokens));
        let seconds = self.cost.prefill.seconds(&PrefillWork::of(prompt, sequence.reused));
        sequence.chunk_s = seconds / f64::from(sequence.chunks.1);
    }

    fn finish_chunk(&mut self) {
        let Some(mut sequence) = self.prefilling.pop_front() else { return };
        sequence.chunks.0 += 1;
        if sequence.chunks.0 < sequence.chunks.1 {
            self.prefilling.push_front(sequence);
            return;
        }
        sequence.keep(&mut self.cache, self.block_tokens);
        self.totals.prefilled_total += sequence.tokens.len() as u64 - u64::from(sequence.reused);
        self.totals.reused_total += u64::from(sequence.reused);
        let _ = sequence.work.out.send(Output::Prefilled { reused: sequence.reused });
        sequence.generate(&mut self.totals);
        match sequence.is_done() {
            true => self.end(sequence),
            false => self.decoding.push(sequence),
        }
    }

    fn end(&mut self, sequence: Sequence) {
        match sequence.work.kv {
            Kv::Own | Kv::Fetched => self.cache.release(&sequence.used),
            Kv::Held(number) => {
                if self.held_order.len() >= HELD_MAX
                    && let Some(oldest) = self.held_order.front().copied()
                {
                    self.release_held(oldest);
                }
                self.held.insert(number, sequence.used);
                self.held_order.push_back(number);
                self.newly_held.push(number);
            }
        }
        let _ = sequence.work.out.send(Output::Ended);
    }
}

impl Sequence {
    fn new(work: Work, hasher: &Hasher) -> Self {
        let tokens = work.tokens.clone();
        Self {
            model: Generator::after(&tokens),
            hashes: hasher.begin(&work.root),
            tokens,
            used: Vec::new(),
            is_full: false,
            reused: 0,
            generated: 0,
            chunks: (0, 1),
            chunk_s: 0.0,
            work,
        }
    }

    fn is_done(&self) -> bool {
        self.generated >= self.work.output_tokens
    }

    fn generate(&mut self, totals: &mut Load) {
        let token = self.model.generate();
        self.tokens.push(token);
        self.generated += 1;
        totals.generated_total += 1;
        let _ = self.work.out.send(Output::Token(token));
    }

    /// Keeps the full blocks of what was computed. The KV of the last token is not: it was only sampled.
    fn keep(&mut self, cache: &mut BlockCache, block_tokens: usize) {
        let computed = self.tokens.len() - usize::from(self.generated > 0);
        while !self.is_full && (self.used.len() + 1) * block_tokens <= computed {
            let at = self.used.len();
            self.hashes.extend(&self.tokens[..computed], block_tokens);
            let hash = self.hashes.all()[at];
            let parent = at.checked_sub(1).map(|before| self.hashes.all()[before]);
            let tokens = &self.tokens[at * block_tokens..][..block_tokens];
            match cache.insert(hash, parent, tokens, self.work.root.salt.as_ref()) {
                true => self.used.push(hash),
                false => self.is_full = true,
            }
        }
    }
}

/// Factors around 1.
#[derive(Debug)]
struct Noise {
    /// The standard deviation.
    amount: f64,
    state: u64,
}

impl Noise {
    /// The next factor: the sum of four uniform numbers, which is nearly normal, and never below 0.05.
    fn factor(&mut self) -> f64 {
        if self.amount <= 0.0 {
            return 1.0;
        }
        let sum: f64 = (0..4).map(|_| self.uniform() - 0.5).sum();
        // The variance of one of them is 1/12.
        (1.0 + self.amount * sum * 3.0_f64.sqrt()).max(0.05)
    }

    /// From 0 to 1 (SplitMix64).
    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }
}
