//! The Conductor of the simulated cluster: the index and the scheduler that the server uses.

use core::time::Duration;

use conductor_core::index::{Index, IndexLimits};
use conductor_core::scheduler::{
    Ask, InstanceError, InstanceSpec, Limits, Reason, Refusal, ReservationId, Role, Scheduler,
    SchedulerConfig, Slo, Source, TierCost,
};
use conductor_core::{BlockKey, InstanceId, InstanceMatch, OwnerId, OwnerMatch};
use te_core::Instant;

use crate::random::mixed;
use crate::setup::{Setup, Shipping};
use crate::trace::{BLOCK_TOKENS, Request};

/// Where a request goes. Nodes are numbered: the prefill groups first, then the decode instances.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Placed {
    /// The prefill group.
    pub(crate) group: usize,
    /// The group that blocks are fetched from; `None` for the store, which is the memory of the decode nodes.
    pub(crate) source: Option<usize>,
    /// Blocks that are reused, from the prompt's beginning.
    pub(crate) reused_blocks: u32,
    /// Of them, blocks that are fetched: the last ones.
    pub(crate) fetched_blocks: u32,
    /// The decode instance, counted from 0.
    pub(crate) decoder: usize,
    /// The predicted time to the first token.
    pub(crate) ttft_ns: u64,
}

/// How long after its predicted end a prefill's blocks are still expected.
const ASSUMED_LATE: Duration = Duration::from_secs(10);

/// See the module.
pub(crate) struct Router {
    index: Index,
    scheduler: Scheduler,
    slo: Slo,
    groups: usize,
    reservations: Vec<Option<ReservationId>>,
    keys: Vec<BlockKey>,
    owners: Vec<OwnerMatch>,
    matches: Vec<InstanceMatch>,
    /// As `matches`, with what was assumed.
    coming: Vec<InstanceMatch>,
}

impl Router {
    /// The Conductor of `setup`, for a trace of `requests` and of `blocks` distinct blocks.
    pub(crate) fn new(setup: &Setup, requests: usize, blocks: usize) -> Self {
        let nodes = setup.groups + setup.decoders;
        let limit = |count: usize| u32::try_from(count).unwrap_or(u32::MAX).max(1);
        let free = TierCost { latency: Duration::ZERO, bytes_per_s: 0 };
        let config = SchedulerConfig {
            limits: Limits {
                instances: limit(nodes),
                racks: 1,
                reservations: limit(requests),
                queue_per_instance: limit(requests),
                models: 1,
                ..Limits::default()
            },
            policy: setup.policy,
            seed: setup.seed,
            admission: setup.ttft_s_max.is_some() || setup.tbt_s_max.is_some(),
            first_token_after_transfer: setup.decoders > 0,
            layerwise: setup.shipping == Shipping::LayerWise,
            bandwidth_bytes_per_s: setup.nic_bytes_per_s as u64,
            tiers: [free; 4],
            // A simulated request always ends.
            reservation_ttl: Duration::MAX,
            replication: None,
            online_fit: None,
            ..SchedulerConfig::default()
        };
        let longest = |seconds: Option<f64>| seconds.map_or(Duration::MAX, Duration::from_secs_f64);
        let mut router = Self {
            index: Index::new(IndexLimits {
                blocks_max: blocks + 1,
                owners_max: limit(nodes),
                ..IndexLimits::default()
            }),
            scheduler: Scheduler::new(config),
            slo: Slo { ttft: longest(setup.ttft_s_max), tbt: longest(setup.tbt_s_max) },
            groups: setup.groups,
            reservations: vec![None; requests],
            keys: Vec::new(),
            owners: Vec::new(),
            matches: Vec::new(),
            coming: Vec::new(),
        };
        let added = router.add_instances(setup);
        debug_assert_eq!(added, Ok(()), "the limits are those of the setup");
        router
    }

    fn add_instances(&mut self, setup: &Setup) -> Result<(), InstanceError> {
        let kind = self.scheduler.add_kind(setup.cost);
        for node in 0..setup.groups + setup.decoders {
            let role = match node < setup.groups {
                // Without decode instances a request ends where it is prefilled.
                true if setup.decoders == 0 => Role::Both,
                true => Role::Prefill,
                false => Role::Decode,
            };
            let decodes = role == Role::Decode;
            self.scheduler.add_instance(InstanceSpec {
                nic_bytes_per_s: setup.nic_bytes_per_s as u64,
                kv_tokens_max: if decodes { setup.kv_tokens } else { 0 },
                sequences_max: if decodes { setup.sequences_max as u32 } else { 0 },
                stages: if decodes { 1 } else { setup.group_nodes },
                chunk_tokens: setup.chunk_tokens,
                ..InstanceSpec::new(InstanceId(node as u32), role, kind)
            })?;
        }
        Ok(())
    }

    /// Places a request, or refuses it.
    pub(crate) fn place(
        &mut self,
        now_ns: u64,
        nth: usize,
        request: &Request,
        blocks: &[u32],
    ) -> Result<Placed, Reason> {
        let now = Instant::from_nanos(now_ns);
        self.keys.clear();
        self.keys.extend(blocks.iter().map(|block| key(*block)));
        self.index.expire(now);
        self.index.query(&self.keys, &mut self.owners);
        // What decode nodes have is in the store.
        let store = |found: &OwnerMatch| found.owner.0 as usize >= self.groups;
        let store_blocks = self.owners.iter().filter(|found| store(found)).map(|found| found.blocks).max();
        matches_of(&mut self.owners, self.groups, &mut self.matches);
        self.index.query_with_assumed(&self.keys, &mut self.owners);
        matches_of(&mut self.owners, self.groups, &mut self.coming);
        let ask = Ask {
            model: 0,
            tokens: request.tokens,
            block_tokens: BLOCK_TOKENS,
            matches: &self.matches,
            store_blocks: store_blocks.unwrap_or(0),
            keys: &self.keys,
            expected_output: None,
            slo: self.slo,
        };
        let decision = self.scheduler.decide_with(now, &ask, &self.coming);
        let decision = decision.map_err(|Refusal { reason, .. }| reason)?;
        self.reservations[nth] = Some(decision.reservation);
        let until = now + decision.ttft + ASSUMED_LATE;
        self.index.assumed(OwnerId(decision.prefill.0), &self.keys, until);
        let mut placed = Placed {
            group: decision.prefill.0 as usize,
            reused_blocks: decision.reuse_blocks,
            decoder: (decision.decode.0 as usize).saturating_sub(self.groups),
            ttft_ns: u64::try_from(decision.ttft.as_nanos()).unwrap_or(u64::MAX),
            ..Placed::default()
        };
        if let Some(fetch) = decision.fetch {
            placed.fetched_blocks = fetch.blocks;
            placed.source = match fetch.from {
                Source::Instance(source) => Some(source.0 as usize),
                Source::Store => None,
            };
        }
        Ok(placed)
    }

    /// A request's prefill began.
    pub(crate) fn started(&mut self, now_ns: u64, request: usize) {
        self.report(request, |scheduler, id| scheduler.prefill_started(Instant::from_nanos(now_ns), id));
    }

    /// A request's prefill ended.
    pub(crate) fn prefilled(&mut self, now_ns: u64, request: usize) {
        self.report(request, |scheduler, id| scheduler.prefill_done(Instant::from_nanos(now_ns), id));
    }

    /// A request's KV has arrived at its decode instance.
    pub(crate) fn shipped(&mut self, now_ns: u64, request: usize) {
        self.report(request, |scheduler, id| scheduler.transfer_done(Instant::from_nanos(now_ns), id));
    }

    /// A request's first token was out.
    pub(crate) fn first_token(&mut self, now_ns: u64, request: usize) {
        self.report(request, |scheduler, id| scheduler.first_token(Instant::from_nanos(now_ns), id));
    }

    /// A request ended.
    pub(crate) fn done(&mut self, now_ns: u64, request: usize, output: u32) {
        self.report(request, |scheduler, id| scheduler.done(Instant::from_nanos(now_ns), id, output));
    }

    fn report<E: core::fmt::Debug>(
        &mut self,
        request: usize,
        report: impl FnOnce(&mut Scheduler, ReservationId) -> Result<(), E>,
    ) {
        if let Some(id) = self.reservations[request] {
            let known = report(&mut self.scheduler, id);
            debug_assert!(known.is_ok(), "request {request}: {known:?}");
        }
    }

    /// A node has the last `added` of these blocks since now, and `evicted` no longer.
    pub(crate) fn changed(&mut self, node: usize, blocks: &[u32], added: usize, evicted: &[u32]) {
        let owner = OwnerId(node as u32);
        let (before, new) = blocks.split_at(blocks.len() - added);
        if !new.is_empty() {
            self.keys.clear();
            self.keys.extend(new.iter().map(|block| key(*block)));
            let stored = self.index.stored(owner, before.last().map(|block| key(*block)), &self.keys);
            debug_assert_eq!(stored.added, added);
        }
        if !evicted.is_empty() {
            self.keys.clear();
            self.keys.extend(evicted.iter().map(|block| key(*block)));
            let removed = self.index.removed(owner, &self.keys);
            debug_assert_eq!(removed, evicted.len());
        }
    }
}

/// What prefill groups have.
fn matches_of(owners: &mut Vec<OwnerMatch>, groups: usize, matches: &mut Vec<InstanceMatch>) {
    owners.retain(|found| (found.owner.0 as usize) < groups);
    owners.sort_unstable_by_key(|found| found.owner);
    matches.clear();
    matches.extend(owners.iter().map(|found| InstanceMatch {
        instance: InstanceId(found.owner.0),
        dp_rank: 0,
        gpu: 0,
        cpu: found.blocks,
        disk: found.blocks,
    }));
}

/// The key of a block of the trace.
const fn key(block: u32) -> BlockKey {
    BlockKey(mixed(block as u64 + 1))
}
