//! The disaggregated cluster, event by event.
//!
//! ```text
//!   arrival ──▶ router ──▶ queue of a prefill group ──▶ prefill ──▶ KV over the NICs ──▶ decode batch
//!                 │               ▲                      layer by layer, as it is computed
//!                 └── fetch of the prefix from another node
//! ```

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use crate::gaps::Steps;
use crate::lru::Lru;
use crate::nic::Network;
use crate::outcome::{Outcome, Record};
use crate::router::{Placed, Router};
use crate::setup::{Setup, Shipping};
use crate::trace::{BLOCK_TOKENS, Trace};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The request reaches the router.
    Arrive(usize),
    /// The head of a group's queue may be able to start.
    Start(usize),
    /// The group has computed a prompt.
    Prefilled(usize, usize),
    /// A request's KV is in the GPUs of its decode instance.
    Ready(usize),
    /// A decode step ends.
    Step(usize),
}

/// A prefill group: nodes that compute chunks of one prompt as a pipeline. Its first node has the NIC and
/// cache.
#[derive(Debug, Default)]
struct Group {
    queue: VecDeque<usize>,
    busy_until_ns: u64,
}

/// A decode instance.
#[derive(Debug, Default)]
struct Batch {
    /// Requests by the number of the step after which they are complete.
    running: BinaryHeap<Reverse<(usize, usize)>>,
    /// Requests whose KV is here, but for which there was no step or no memory yet.
    waiting: VecDeque<usize>,
    context_tokens: u64,
    reserved_tokens: u64,
    is_stepping: bool,
    /// Requests of the running step that have no token yet.
    fresh: Vec<usize>,
    steps: Steps,
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    placed: Placed,
    fetched_ns: u64,
    joined: usize,
}

struct Cluster<'a> {
    trace: &'a Trace,
    setup: &'a Setup,
    arrivals_ns: Vec<u64>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    scheduled: u64,
    now_ns: u64,
    router: Router,
    network: Network,
    groups: Vec<Group>,
    batches: Vec<Batch>,
    /// The blocks in each node's memory: the groups first, then the decode instances.
    caches: Vec<Lru>,
    progress: Vec<Progress>,
    outcome: Outcome,
    evicted: Vec<u32>,
}

/// Runs the trace on a disaggregated cluster.
#[must_use]
pub fn run(trace: &Trace, setup: &Setup) -> Outcome {
    let count = trace.requests().len();
    let nodes = setup.groups + setup.decoders;
    let blocks = (setup.cache_tokens / u64::from(BLOCK_TOKENS)) as usize;
    let mut cluster = Cluster {
        trace,
        setup,
        arrivals_ns: trace.arrivals_ns(setup.seed, setup.speed),
        events: BinaryHeap::new(),
        scheduled: 0,
        now_ns: 0,
        router: Router::new(setup, count, trace.distinct_blocks()),
        network: Network::new(nodes, setup.nic_bytes_per_s),
        groups: (0..setup.groups).map(|_| Group::default()).collect(),
        batches: (0..setup.decoders).map(|_| Batch::default()).collect(),
        caches: vec![Lru::new(trace.distinct_blocks(), blocks); nodes],
        progress: vec![Progress::default(); count],
        outcome: Outcome { records: vec![Record::default(); count], nodes, ..Outcome::default() },
        evicted: Vec::new(),
    };
    cluster.run();
    cluster.outcome
}

impl Cluster<'_> {
    fn run(&mut self) {
        let decision_ns = nanos(self.setup.decision_s);
        for request in 0..self.arrivals_ns.len() {
            self.at(self.arrivals_ns[request] + decision_ns, Event::Arrive(request));
        }
        while let Some(Reverse((at, _, event))) = self.events.pop() {
            self.now_ns = at;
            match event {
                Event::Arrive(request) => self.arrive(request),
                Event::Start(group) => self.start(group),
                Event::Prefilled(group, request) => self.prefilled(group, request),
                Event::Ready(request) => self.ready(request),
                Event::Step(decoder) => self.stepped(decoder),
            }
        }
        self.outcome.end_ns = self.now_ns;
        self.outcome.sent_ns = self.network.busy_ns();
    }

    fn at(&mut self, at_ns: u64, event: Event) {
        self.scheduled += 1;
        self.events.push(Reverse((at_ns, self.scheduled, event)));
    }

    fn arrive(&mut self, request: usize) {
        let length = self.trace.requests()[request];
        let blocks = self.trace.blocks_of(&length);
        let Ok(mut placed) = self.router.place(self.now_ns, request, &length, blocks) else {
            self.outcome.records[request].rejected = true;
            return;
        };
        self.outcome.prompt_tokens += u64::from(length.tokens);
        self.outcome.output_tokens += u64::from(length.output);
        self.outcome.records[request].predicted_ttft_ns = placed.ttft_ns + nanos(self.setup.decision_s);
        if placed.fetched_blocks > 0 {
            self.fetch(request, &mut placed);
        }
        self.progress[request].placed = placed;
        self.groups[placed.group].queue.push_back(request);
        self.start(placed.group);
    }

    /// Sends the blocks that a placement wants, as far as the source has them.
    fn fetch(&mut self, request: usize, placed: &mut Placed) {
        let length = self.trace.requests()[request];
        let blocks = self.trace.blocks_of(&length);
        let of_store = |node: &usize| (self.caches[*node].matched(blocks), Reverse(*node));
        let decoders = self.setup.groups..self.setup.groups + self.setup.decoders;
        let Some(source) = placed.source.or_else(|| decoders.max_by_key(of_store)) else { return };
        let there = self.caches[source].matched(blocks) as u32;
        placed.reused_blocks = placed.reused_blocks.min(there);
        let own = self.caches[placed.group].matched(blocks) as u32;
        placed.fetched_blocks = placed.reused_blocks.saturating_sub(own);
        let tokens = placed.fetched_blocks * BLOCK_TOKENS;
        let bytes = u64::from(tokens) * self.setup.cost.kv_bytes_per_token;
        self.progress[request].fetched_ns = self.network.send(self.now_ns, source, placed.group, bytes);
        self.outcome.records[request].fetched_tokens = tokens;
        self.touch(source, &blocks[..placed.reused_blocks as usize]);
    }

    /// Starts the head of the queue when the group is free and the head's fetched prefix is there.
    fn start(&mut self, group: usize) {
        let Some(request) = self.groups[group].queue.front().copied() else { return };
        let Progress { placed, fetched_ns, .. } = self.progress[request];
        let earliest = fetched_ns.max(self.groups[group].busy_until_ns);
        if earliest > self.now_ns {
            // The end of the prefill before it has its own event.
            if fetched_ns > self.groups[group].busy_until_ns {
                self.at(fetched_ns, Event::Start(group));
            }
            return;
        }
        self.groups[group].queue.pop_front();
        let length = self.trace.requests()[request];
        let here = self.caches[group].matched(self.trace.blocks_of(&length)) as u32;
        let fetched = if placed.fetched_blocks > 0 { placed.reused_blocks } else { 0 };
        let reused = length.reusable_tokens(here.max(fetched));
        let alone = self.setup.cost.prefill.time(length.tokens, reused).as_nanos() as u64;
        let stages = self.setup.group_nodes as u64;
        let (occupied, latency) = pipeline(alone, stages, length.tokens - reused, self.setup.chunk_tokens);
        let record = &mut self.outcome.records[request];
        record.reused_tokens = reused;
        record.prefill_ns = occupied * stages;
        self.groups[group].busy_until_ns = self.now_ns + occupied;
        self.router.started(self.now_ns, request);
        // The next prompt may reuse this one's blocks, so this one ends first.
        self.at(self.now_ns + latency, Event::Prefilled(group, request));
        self.at(self.now_ns + occupied, Event::Start(group));
        if self.setup.shipping == Shipping::LayerWise {
            let end = self.ship(request);
            self.progress[request].fetched_ns = end;
        }
    }

    /// Sends a prompt's KV to its decode instance; returns when it is there.
    fn ship(&mut self, request: usize) -> u64 {
        if self.batches.is_empty() {
            return self.now_ns;
        }
        let placed = self.progress[request].placed;
        let length = self.trace.requests()[request];
        let decoder = self.setup.groups + placed.decoder;
        let bytes = u64::from(length.tokens) * self.setup.cost.kv_bytes_per_token;
        self.network.send(self.now_ns, placed.group, decoder, bytes)
    }

    fn prefilled(&mut self, group: usize, request: usize) {
        let length = self.trace.requests()[request];
        self.touch(group, self.trace.blocks_of(&length));
        self.router.prefilled(self.now_ns, request);
        if self.batches.is_empty() {
            self.outcome.records[request].ttft_ns = self.now_ns - self.arrivals_ns[request];
            self.router.done(self.now_ns, request, 1);
            return;
        }
        let shipped = match self.setup.shipping {
            Shipping::LayerWise => {
                // The last layer leaves when it is computed.
                let bytes = u64::from(length.tokens) * self.setup.cost.kv_bytes_per_token;
                let last = self.network.time_ns(bytes / self.setup.layers);
                self.progress[request].fetched_ns.max(self.now_ns + last)
            }
            Shipping::AfterPrefill => self.ship(request),
        };
        let load_ns = nanos(self.setup.load_s_per_token * f64::from(length.tokens));
        self.at(shipped + load_ns, Event::Ready(request));
    }

    fn ready(&mut self, request: usize) {
        let decoder = self.progress[request].placed.decoder;
        self.router.shipped(self.now_ns, request);
        if self.setup.decoders_cache {
            let length = self.trace.requests()[request];
            self.touch(self.setup.groups + decoder, self.trace.blocks_of(&length));
        }
        self.batches[decoder].waiting.push_back(request);
        if !self.batches[decoder].is_stepping {
            self.step(decoder);
        }
    }

    /// Takes what fits into the batch, and begins a step when there is any.
    fn step(&mut self, decoder: usize) {
        let batch = &mut self.batches[decoder];
        while let Some(request) = batch.waiting.front().copied() {
            let length = self.trace.requests()[request];
            let tokens = u64::from(length.tokens) + u64::from(length.output);
            let fits = batch.reserved_tokens + tokens <= self.setup.kv_tokens
                && batch.running.len() < self.setup.sequences_max;
            if !fits && !batch.running.is_empty() {
                break;
            }
            batch.waiting.pop_front();
            batch.reserved_tokens += tokens;
            batch.context_tokens += u64::from(length.tokens);
            self.progress[request].joined = batch.steps.len();
            batch.fresh.push(request);
            batch.running.push(Reverse((batch.steps.len() + length.output as usize, request)));
        }
        batch.is_stepping = !batch.running.is_empty();
        if batch.is_stepping {
            let sequences = batch.running.len() as u32;
            let time = self.setup.cost.decode.time(sequences, batch.context_tokens).as_nanos() as u64;
            self.at(self.now_ns + time, Event::Step(decoder));
        }
    }

    fn stepped(&mut self, decoder: usize) {
        let batch = &mut self.batches[decoder];
        batch.steps.push(self.now_ns);
        batch.context_tokens += batch.running.len() as u64;
        for request in batch.fresh.drain(..) {
            self.router.first_token(self.now_ns, request);
        }
        while let Some(Reverse((after, request))) = batch.running.peek().copied() {
            if after > batch.steps.len() {
                break;
            }
            batch.running.pop();
            let length = self.trace.requests()[request];
            batch.context_tokens -= u64::from(length.tokens) + u64::from(length.output);
            batch.reserved_tokens -= u64::from(length.tokens) + u64::from(length.output);
            let joined = self.progress[request].joined;
            let first_ns = batch.steps.end_ns(joined);
            let record = &mut self.outcome.records[request];
            record.ttft_ns = first_ns - self.arrivals_ns[request];
            record.tbt_ns = batch.steps.tbt_ns(first_ns, joined + 1, after);
            self.router.done(self.now_ns, request, length.output);
        }
        self.step(decoder);
    }

    /// A node used these blocks, or has them now.
    fn touch(&mut self, node: usize, blocks: &[u32]) {
        self.evicted.clear();
        let (kept, added) = self.caches[node].touch(blocks, &mut self.evicted);
        self.router.changed(node, &blocks[..kept], added, &self.evicted);
    }
}

/// The time for which a pipeline of `stages` is occupied by work of `alone` on one node, and the time until
/// the work is done: the last chunk still has to pass all stages but the first.
fn pipeline(alone_ns: u64, stages: u64, tokens: u32, chunk_tokens: u32) -> (u64, u64) {
    let chunks = u64::from(tokens.div_ceil(chunk_tokens.max(1)).max(1));
    let occupied = alone_ns / stages;
    (occupied, occupied + (alone_ns / chunks / stages) * (stages - 1))
}

fn nanos(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipeline_has_the_throughput_of_its_nodes_and_its_last_chunk_passes_all() {
        assert_eq!(pipeline(1_000, 1, 10_000, 1_000), (1_000, 1_000));
        assert_eq!(pipeline(1_000, 4, 10_000, 1_000), (250, 250 + 25 * 3));
        assert_eq!(pipeline(1_000, 4, 100, 1_000), (250, 1_000), "one chunk is no faster than on one node");
        assert_eq!(pipeline(1_000, 2, 0, 0), (500, 1_000));
    }
}
