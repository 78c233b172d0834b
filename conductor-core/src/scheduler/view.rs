//! What a policy sees: the instances that could prefill, who has the prompt's blocks, and what things would
//! take.

use te_core::Instant;

use super::cluster::Cluster;
use super::types::{Ask, InstanceSpec};
use crate::cost::PrefillCost;
use crate::{InstanceId, Tier};

/// An instance that could prefill the request.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    pub(super) slot: u32,
    pub(super) prefill: Prefill,
    /// Bytes of KV per block.
    pub(super) block_bytes: f64,
    pub(super) egress_wait: u64,
    pub(super) ingress_wait: u64,
    pub(super) ingress_utilisation: f64,
    /// Its name.
    pub id: InstanceId,
    /// Its rack.
    pub rack: u16,
    /// Whether it also decodes.
    pub decodes: bool,
    /// Blocks of the prompt in its GPU's memory.
    pub gpu: u32,
    /// Blocks in its GPU's and its host's memory.
    pub cpu: u32,
    /// Blocks on any of its tiers.
    pub disk: u32,
    /// Nanoseconds until its queue has drained.
    pub wait: u64,
    /// Requests that it prefills or will, and, if it also decodes, those that it decodes or will.
    pub requests: u32,
    /// Tokens without KV in its queue.
    pub queued_tokens: u64,
    /// Tokens of KV of the requests that it decodes.
    pub decode_tokens: u64,
    /// Tokens whose KV was computed or fetched here, as far as we placed them; fades as its cache is
    /// replaced.
    pub cached_tokens: u64,
    /// Nanoseconds of prefill that it was given recently (halved every minute).
    pub recent_ns: u64,
}

/// Nanoseconds of the prompt's prefill on one instance, by the number of reused blocks `k`: a polynomial,
/// `c0 + c1 (n - kB) + c2 (n² - (kB)²) + c3 kB` for blocks of `B` tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prefill {
    none: f64,
    per_block: f64,
    per_square: f64,
    tokens: u32,
    block_tokens: u32,
    stages: u32,
    chunk_tokens: u32,
}

impl Prefill {
    #[inline]
    pub(super) fn new(spec: &InstanceSpec, cost: &PrefillCost, tokens: u32, block_tokens: u32) -> Self {
        let (n, b) = (f64::from(tokens), f64::from(block_tokens));
        Self {
            none: 1e9 * (cost.per_prompt + cost.per_token * n + cost.per_square * (n * n)),
            per_block: 1e9 * (cost.per_reused - cost.per_token) * b,
            per_square: -1e9 * cost.per_square * (b * b),
            tokens,
            block_tokens,
            stages: spec.stages.max(1),
            chunk_tokens: spec.chunk_tokens,
        }
    }

    /// On one node.
    fn alone(&self, blocks: u32) -> f64 {
        let k = f64::from(blocks);
        self.none + k * (self.per_block + k * self.per_square)
    }

    /// Nanoseconds from the beginning to the end: on a pipeline of stages, a prompt of several chunks is in
    /// several stages at a time.
    #[inline]
    pub(super) fn latency(&self, blocks: u32) -> u64 {
        if self.stages == 1 {
            return whole(self.alone(blocks));
        }
        let stages = f64::from(self.stages);
        let uncached = self.tokens.saturating_sub(blocks * self.block_tokens);
        let chunks = f64::from(uncached.checked_div(self.chunk_tokens).unwrap_or(0) + 1);
        whole(self.alone(blocks) * (chunks + stages - 1.0) / (chunks * stages))
    }

    /// Nanoseconds after which an instance can begin with the next prefill.
    pub(super) fn occupancy(&self, blocks: u32) -> u64 {
        whole(self.alone(blocks) / f64::from(self.stages))
    }
}

/// Whole nanoseconds; 0 when negative or not a number. Converted as signed, which is cheaper.
#[inline]
pub(super) fn whole(nanos: f64) -> u64 {
    (nanos as i64).max(0) as u64
}

/// A holder of blocks of the prompt.
#[derive(Clone, Copy, Debug)]
pub struct Holder {
    /// The instance's slot, or none for the store.
    pub(super) slot: u32,
    pub(super) rack: u16,
    /// The instance; `None` for the shared store.
    pub instance: Option<InstanceId>,
    /// The slowest tier that is read.
    pub tier: Tier,
    /// Blocks, from the prompt's beginning.
    pub blocks: u32,
    /// Nanoseconds until its NIC is free.
    pub wait: u64,
    pub(super) utilisation: f64,
}

/// What a placement would take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Estimate {
    /// Nanoseconds from now to the end of the prefill.
    pub total: u64,
    /// Nanoseconds of them in which the prefill runs.
    pub prefill: u64,
    /// Nanoseconds from now until the KV to reuse is there (whether or not the queue has drained by then).
    pub ready: u64,
    /// Blocks that are reused, fetched ones included.
    pub blocks: u32,
}

/// Where a policy puts a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The index into [`View::candidates`].
    pub candidate: usize,
    /// The index into [`View::holders`] and the blocks to have in all after the fetch, if anything is
    /// fetched.
    pub fetch: Option<(usize, u32)>,
}

/// See the module.
#[derive(Debug)]
pub struct View<'a> {
    pub(super) cluster: &'a Cluster,
    pub(super) now: Instant,
    pub(super) ask: &'a Ask<'a>,
    pub(super) candidates: &'a [Candidate],
    pub(super) holders: &'a [Holder],
    pub(super) blocks_max: u32,
    /// How busy the candidates have been, on average.
    pub(super) utilisation: f64,
}

impl<'a> View<'a> {
    /// The instances that could prefill, never empty, in the order in which they were added.
    #[must_use]
    pub const fn candidates(&self) -> &'a [Candidate] {
        self.candidates
    }

    /// Who has blocks of the prompt, by falling number of blocks. Those that another one of the same rack
    /// equals in blocks and is sooner free than are left out.
    #[must_use]
    pub const fn holders(&self) -> &'a [Holder] {
        self.holders
    }

    /// The time of the decision.
    #[must_use]
    pub const fn now(&self) -> Instant {
        self.now
    }

    /// Blocks that can be reused at most: at least one token has to be computed.
    #[must_use]
    pub const fn blocks_max(&self) -> u32 {
        self.blocks_max
    }

    /// Tokens per block.
    #[must_use]
    pub const fn block_tokens(&self) -> u32 {
        self.ask.block_tokens
    }

    /// The candidate with the least `key`, the first of several, with what it has itself.
    #[must_use]
    pub fn least<K: PartialOrd>(&self, key: impl Fn(&Candidate) -> K) -> Option<Placement> {
        let mut best: Option<(K, usize)> = None;
        for (i, candidate) in self.candidates.iter().enumerate() {
            let key = key(candidate);
            if best.as_ref().is_none_or(|(least, _)| key < *least) {
                best = Some((key, i));
            }
        }
        best.map(|(_, candidate)| Placement { candidate, fetch: None })
    }

    /// Blocks of the prompt, the last one possibly not full.
    #[must_use]
    pub const fn blocks(&self) -> u32 {
        self.ask.tokens.div_ceil(self.ask.block_tokens)
    }

    /// Nanoseconds of prefill on `candidate` when `blocks` are reused.
    #[must_use]
    #[inline]
    pub fn prefill(&self, candidate: &Candidate, blocks: u32) -> u64 {
        candidate.prefill.latency(blocks.min(self.blocks_max))
    }

    /// The prefill on `candidate` with what it has itself: from the tiers that pay.
    #[must_use]
    #[inline]
    pub fn own(&self, candidate: &Candidate) -> Estimate {
        let estimate = |blocks, ready: u64| {
            let prefill = self.prefill(candidate, blocks);
            Estimate { total: candidate.wait.max(ready).saturating_add(prefill), prefill, ready, blocks }
        };
        let memory = estimate(candidate.cpu, 0);
        if candidate.disk <= candidate.cpu {
            return memory;
        }
        let rate = self.cluster.tier_ns_per_byte(Tier::Disk);
        let bytes = candidate.block_bytes * f64::from(candidate.disk - candidate.cpu);
        let load = self.cluster.tier_latency_ns(Tier::Disk).saturating_add(whole(bytes * rate));
        memory.min(estimate(candidate.disk, load))
    }

    /// When a fetch from `holder` would begin to deliver, and nanoseconds per block.
    #[inline]
    fn fetch_rate(&self, candidate: &Candidate, holder: &Holder, booked: bool) -> (u64, f64) {
        let wait = if booked { holder.wait.max(candidate.ingress_wait) } else { 0 };
        let rate = self.cluster.ns_per_byte(holder.slot, candidate.slot, Some(holder.tier));
        (wait.saturating_add(self.cluster.tier_latency_ns(holder.tier)), rate * candidate.block_bytes)
    }

    /// The prefill on `candidate` after fetching up to block `blocks` from `holder`, on top of `own`. With
    /// `booked`, the fetch waits for the transfers that are booked on both NICs.
    #[must_use]
    pub fn fetched(
        &self,
        candidate: &Candidate,
        own: &Estimate,
        holder: &Holder,
        blocks: u32,
        booked: bool,
    ) -> Estimate {
        let (begin, per_block) = self.fetch_rate(candidate, holder, booked);
        self.cut(candidate, own, begin, per_block, blocks.min(holder.blocks))
    }

    /// Nanoseconds for which the fetch of `blocks` in all, on top of `own`, keeps NICs busy.
    #[must_use]
    #[inline]
    pub fn fetch_span(&self, candidate: &Candidate, own: &Estimate, holder: &Holder, blocks: u32) -> f64 {
        let (_, per_block) = self.fetch_rate(candidate, holder, true);
        f64::from(blocks.saturating_sub(own.blocks)) * per_block
    }

    /// When a fetch from `holder` can begin, in nanoseconds from now.
    pub(super) fn fetch_begin(&self, candidate: &Candidate, holder: &Holder) -> u64 {
        self.fetch_rate(candidate, holder, true).0
    }

    /// The fetches from `holder` that can be the best: everything, and as much as arrives while the queue of
    /// `candidate` drains anyway.
    ///
    /// Up to that cut, every block is free. Beyond it the end moves by the transfer of a block less its
    /// prefill, which falls (in the square of the position): the sum is concave, so that it is least at one
    /// of its ends.
    #[must_use]
    #[inline]
    pub fn fetches(
        &self,
        candidate: &Candidate,
        own: &Estimate,
        holder: &Holder,
        booked: bool,
    ) -> [Option<Estimate>; 2] {
        let (begin, per_block) = self.fetch_rate(candidate, holder, booked);
        let all = self.cut(candidate, own, begin, per_block, holder.blocks);
        let wait = candidate.wait.max(own.ready);
        if all.ready <= wait || begin >= wait || per_block <= 0.0 {
            return [Some(all), None];
        }
        let free = ((wait - begin) as f64 / per_block) as u32;
        let blocks = own.blocks.saturating_add(free).min(holder.blocks);
        let free = (blocks > own.blocks).then(|| self.cut(candidate, own, begin, per_block, blocks));
        [Some(all), free]
    }

    #[inline]
    fn cut(
        &self,
        candidate: &Candidate,
        own: &Estimate,
        begin: u64,
        per_block: f64,
        blocks: u32,
    ) -> Estimate {
        let fetch = whole(f64::from(blocks.saturating_sub(own.blocks)) * per_block);
        let ready = own.ready.max(begin.saturating_add(fetch));
        let prefill = self.prefill(candidate, blocks);
        Estimate { total: candidate.wait.max(ready).saturating_add(prefill), prefill, ready, blocks }
    }

    /// What a nanosecond of prefill costs those who come later, in nanoseconds.
    #[must_use]
    pub fn prefill_price(&self) -> f64 {
        price(self.utilisation)
    }

    /// What a nanosecond of transfer from `holder` to `candidate` costs others, in nanoseconds: itself,
    /// because copies take room in caches, and the waits for the two NICs.
    #[must_use]
    pub fn fetch_price(&self, candidate: &Candidate, holder: &Holder) -> f64 {
        1.0 + price(holder.utilisation) + price(candidate.ingress_utilisation)
    }

    /// Nanoseconds that the KV of a prefill on `candidate` that ends after `end` would wait for its NIC.
    #[must_use]
    pub fn ship_wait(&self, candidate: &Candidate, end: u64) -> u64 {
        let config = &self.cluster.config;
        if candidate.decodes || !config.ships || !config.first_token_after_transfer {
            return 0;
        }
        candidate.egress_wait.saturating_sub(end)
    }
}

/// What a nanosecond of a server with this utilisation costs those who come later, in nanoseconds: the wait
/// in a queue grows by it (M/D/1). At most the price at 95 %.
fn price(utilisation: f64) -> f64 {
    let busy = utilisation.clamp(0.0, 0.95);
    busy / (1.0 - busy)
}
