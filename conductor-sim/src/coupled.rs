//! The baseline: instances that prefill and decode on the same GPUs, as vLLM 0.5.1 does.
//!
//! ```text
//!   waiting prompts? ── yes ──▶ one prefill of all that fit      every running answer waits for it
//!         │
//!         └─ no ──▶ one decode step of all running sequences
//!
//!   chunked: each step is all running sequences, and as many prompt tokens as the chunk has left
//! ```

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use conductor_core::cost::{CostModel, PrefillWork};

use crate::gaps::Steps;
use crate::lru::Lru;
use crate::outcome::{Outcome, Record};
use crate::trace::{BLOCK_TOKENS, Trace};

/// How coupled instances treat prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coupled {
    /// Whole prompts, before any decode step.
    Plain,
    /// The same, and blocks stay in the GPUs' memory for later prompts of the same instance.
    PrefixCaching,
    /// Prompts in chunks, together with decode steps.
    Chunked {
        /// Tokens per step, of prompts and answers together.
        step_tokens: u32,
    },
}

/// A cluster of coupled instances, one per node; requests go to the instances in turn.
#[derive(Clone, Debug)]
pub struct CoupledSetup {
    /// Instances.
    pub nodes: usize,
    /// How prompts are treated.
    pub mode: Coupled,
    /// What work costs.
    pub cost: CostModel,
    /// Tokens of KV that fit into the memory of an instance's GPUs.
    pub kv_tokens: u64,
    /// Most prompt tokens of one prefill.
    pub batch_tokens_max: u64,
    /// Most sequences of one step.
    pub sequences_max: usize,
    /// The seed of the arrivals within their bins.
    pub seed: u64,
    /// How many times as fast as it was recorded the trace is replayed.
    pub speed: f64,
}

/// A prompt that is being prefilled in chunks.
#[derive(Clone, Copy, Debug)]
struct Partial {
    request: usize,
    done_tokens: u32,
    spent_ns: u64,
}

/// One instance in the middle of a run.
struct Instance<'a> {
    setup: &'a CoupledSetup,
    trace: &'a Trace,
    arrivals_ns: &'a [u64],
    now_ns: u64,
    /// Requests that will arrive, or wait, in order.
    waiting: VecDeque<usize>,
    partial: Option<Partial>,
    /// Requests by the number of the step after which they are complete.
    running: BinaryHeap<Reverse<(usize, usize)>>,
    context_tokens: u64,
    reserved_tokens: u64,
    steps: Steps,
    cache: Lru,
    first_ns: Vec<u64>,
    joined: Vec<usize>,
}

/// Runs the trace on coupled instances.
#[must_use]
pub fn run_coupled(trace: &Trace, setup: &CoupledSetup) -> Outcome {
    let arrivals_ns = trace.arrivals_ns(setup.seed, setup.speed);
    let count = trace.requests().len();
    let mut outcome =
        Outcome { records: vec![Record::default(); count], nodes: setup.nodes, ..Outcome::default() };
    for request in trace.requests() {
        outcome.prompt_tokens += u64::from(request.tokens);
        outcome.output_tokens += u64::from(request.output);
    }
    let nodes = setup.nodes.max(1);
    for node in 0..nodes {
        let mut instance = Instance {
            setup,
            trace,
            arrivals_ns: &arrivals_ns,
            now_ns: 0,
            waiting: (node..count).step_by(nodes).collect(),
            partial: None,
            running: BinaryHeap::new(),
            context_tokens: 0,
            reserved_tokens: 0,
            steps: Steps::default(),
            cache: Lru::new(trace.distinct_blocks(), 0),
            first_ns: vec![0; count],
            joined: vec![0; count],
        };
        if setup.mode == Coupled::PrefixCaching {
            let blocks = setup.kv_tokens / u64::from(BLOCK_TOKENS);
            instance.cache = Lru::new(trace.distinct_blocks(), blocks as usize);
        }
        instance.run(&mut outcome.records);
        outcome.end_ns = outcome.end_ns.max(instance.now_ns);
    }
    outcome
}

impl Instance<'_> {
    fn run(&mut self, records: &mut [Record]) {
        loop {
            let arrived = self.waiting.front().is_some_and(|first| self.arrivals_ns[*first] <= self.now_ns);
            if let Coupled::Chunked { step_tokens } = self.setup.mode {
                if arrived || self.partial.is_some() || !self.running.is_empty() {
                    self.chunked_step(step_tokens, records);
                    continue;
                }
            } else {
                if arrived && self.prefill(records) {
                    continue;
                }
                if !self.running.is_empty() {
                    self.step(0.0, records);
                    continue;
                }
            }
            match self.waiting.front() {
                Some(first) => self.now_ns = self.now_ns.max(self.arrivals_ns[*first]),
                None => return,
            }
        }
    }

    /// Whether a request's prompt and answer fit into memory. The first one always does.
    fn admits(&self, request: usize) -> bool {
        let request = &self.trace.requests()[request];
        let tokens = u64::from(request.tokens) + u64::from(request.output);
        self.reserved_tokens == 0
            || (self.reserved_tokens + tokens <= self.setup.kv_tokens
                && self.running.len() < self.setup.sequences_max)
    }

    /// Prefills as many waiting prompts as fit into one batch; returns whether there were any.
    fn prefill(&mut self, records: &mut [Record]) -> bool {
        let (mut batch, mut tokens, mut seconds) = (Vec::new(), 0, 0.0);
        while let Some(next) = self.waiting.front().copied() {
            let request = self.trace.requests()[next];
            let fits = batch.is_empty() || tokens + u64::from(request.tokens) <= self.setup.batch_tokens_max;
            if self.arrivals_ns[next] > self.now_ns || !fits || !self.admits(next) {
                break;
            }
            self.waiting.pop_front();
            let blocks = self.trace.blocks_of(&request);
            let reused = request.reusable_tokens(self.cache.matched(blocks) as u32);
            let mut work = PrefillWork::of(request.tokens, reused);
            // The prompts of one batch share one forward pass.
            work.prompts = if batch.is_empty() { 1.0 } else { 0.0 };
            let spent = self.setup.cost.prefill.seconds(&work);
            records[next].prefill_ns = nanos(spent);
            records[next].reused_tokens = reused;
            seconds += spent;
            tokens += u64::from(request.tokens);
            self.reserved_tokens += u64::from(request.tokens) + u64::from(request.output);
            batch.push(next);
        }
        self.now_ns += nanos(seconds);
        for request in &batch {
            let blocks = self.trace.blocks_of(&self.trace.requests()[*request]);
            self.cache.touch(blocks, &mut Vec::new());
            self.join(*request, records);
        }
        !batch.is_empty()
    }

    /// A step of all running sequences, which takes `seconds` more than that.
    fn step(&mut self, seconds: f64, records: &mut [Record]) {
        let (sequences, context) = (self.running.len() as f64, self.context_tokens as f64);
        let decode = &self.setup.cost.decode;
        // A forward pass with a part of a prompt has its own time per pass.
        let pass = if seconds > 0.0 { 0.0 } else { decode.per_step };
        let time = seconds + pass + decode.per_sequence * sequences + decode.per_context_token * context;
        self.now_ns += nanos(time);
        self.steps.push(self.now_ns);
        self.context_tokens += self.running.len() as u64;
        while let Some(Reverse((after, request))) = self.running.peek().copied() {
            if after > self.steps.len() {
                break;
            }
            self.running.pop();
            let length = self.trace.requests()[request];
            self.context_tokens -= u64::from(length.tokens) + u64::from(length.output) - 1;
            self.reserved_tokens -= u64::from(length.tokens) + u64::from(length.output);
            let from = self.joined[request];
            records[request].tbt_ns = self.steps.tbt_ns(self.first_ns[request], from, after);
        }
    }

    /// A step with parts of prompts.
    fn chunked_step(&mut self, step_tokens: u32, records: &mut [Record]) {
        let mut left = step_tokens.saturating_sub(self.running.len() as u32).max(1);
        let (mut seconds, mut complete) = (0.0, Vec::new());
        while left > 0 {
            let Some(mut partial) = self.partial.take().or_else(|| self.next_partial()) else { break };
            let tokens = self.trace.requests()[partial.request].tokens;
            let until = tokens.min(partial.done_tokens + left);
            left -= until - partial.done_tokens;
            let mut work = PrefillWork::of(until, partial.done_tokens);
            work.prompts = if seconds > 0.0 { 0.0 } else { 1.0 };
            let spent = self.setup.cost.prefill.seconds(&work);
            seconds += spent;
            partial.done_tokens = until;
            partial.spent_ns += nanos(spent);
            if until == tokens {
                complete.push(partial);
            } else {
                self.partial = Some(partial);
            }
        }
        self.step(seconds, records);
        for partial in complete {
            records[partial.request].prefill_ns = partial.spent_ns;
            self.join(partial.request, records);
        }
    }

    fn next_partial(&mut self) -> Option<Partial> {
        let next = *self.waiting.front()?;
        if self.arrivals_ns[next] > self.now_ns || !self.admits(next) {
            return None;
        }
        self.waiting.pop_front();
        let request = &self.trace.requests()[next];
        self.reserved_tokens += u64::from(request.tokens) + u64::from(request.output);
        Some(Partial { request: next, done_tokens: 0, spent_ns: 0 })
    }

    /// The prompt is computed, and with it the first token of the answer.
    fn join(&mut self, request: usize, records: &mut [Record]) {
        let length = self.trace.requests()[request];
        records[request].ttft_ns = self.now_ns - self.arrivals_ns[request];
        if length.output == 1 {
            self.reserved_tokens -= u64::from(length.tokens) + 1;
            return;
        }
        self.first_ns[request] = self.now_ns;
        self.joined[request] = self.steps.len();
        self.context_tokens += u64::from(length.tokens);
        self.running.push(Reverse((self.steps.len() + length.output as usize - 1, request)));
    }
}

fn nanos(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}
